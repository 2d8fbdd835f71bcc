// Blocks of fibers: what threads of a kernel see of the shim's scheduler.
#pragma once

#include <cstddef>
#include <cstdint>

struct Dim {
    uint32_t x;
};

// Of the fiber that runs on this OS thread.
extern thread_local Dim threadIdx, blockIdx, gridDim;

namespace shim {

enum class Collective : uint32_t { none, barrier, shuffle, ballot };

// Ends the program with a message unless `condition` holds: a kernel that breaks a rule of CUDA must not pass
// a test.
void expect(bool condition, const char* problem);

// The block's shared memory, filled with NaN before the block begins.
void* shared_memory(size_t size);

void block_barrier();
bool block_all(bool value);
void grid_barrier();

// All 32 lanes of a warp call the same collective; each gets what all have given. Valid until the warp's next
// but one.
const uint64_t* warp_exchange(Collective kind, uint64_t value);

}  // namespace shim
