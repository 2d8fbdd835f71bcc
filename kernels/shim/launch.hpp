// Launching a kernel on the shim.
#pragma once

#include <barrier>

#include "../abi.h"

namespace shim {

// Blocks that may be alive at once: each is an OS thread with 16 MB of stacks.
constexpr uint32_t MOST_BLOCKS = 8;

struct Job {
    void (*kernel)(const RfdStep&, const RfdTable&);
    const RfdStep* step;
    const RfdTable* table;
    uint32_t grid;
    uint64_t seed;
    std::barrier<>* barrier;
};

void launch(Job job, bool cooperative);

}  // namespace shim

extern "C" {

// Runs a kernel to its end. 0, or 1 for an unknown name, 2 for a grid that is refused: empty, or larger than
// the 8 blocks that a cooperative launch may have.
int rfd_shim_launch(const char* kernel, int cooperative, unsigned grid, const RfdStep* step, const RfdTable* table);

// Decides in which order fibers and blocks run from now on.
void rfd_shim_seed(uint64_t seed);
}
