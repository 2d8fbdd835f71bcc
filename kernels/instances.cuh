// The instances of the kernels: lean ones for lists whose tensors are all alike, a generic one for everything else.
#pragma once

#include "platform.cuh"

// KIND: the lean ones are for one method each, without norm lock, f64 or conservative steps; in the generic one formats,
// momentum and master weights may differ from tensor to tensor.
enum class Kind {
    published,  // lean, RFD as published
    averaged,   // lean, the adaptive method with averaged gradients
    generic,
};

// WIDTH: neighbouring elements that a thread updates at a time. 4, that is 16 bytes of f32, so that the threads of a warp
// touch neighbouring addresses; 8 where nothing is f32 in memory, which is 16 bytes of bf16 and one call of Philox.
//
// BLOCKS: of 256 threads a multiprocessor. 4, that is half of its threads on most GPUs, leave 64 registers a thread.
//
// ROWS_AT_ONCE: of the 16/WIDTH rows of a chunk, how many the update loads before the first is stored; SUMMED_AT_ONCE: of its
// 4 rows, how many the sums load before the first is added. As many as fit into the registers: 32 to 64 bytes a thread, so 32 to
// 64 KB a multiprocessor under way; 5 TB/s at a latency of 1 µs want some 40 KB of each of 132. Chosen by the registers that
// ptxas reports, not measured.
struct InstanceF32 {
    static constexpr int PARAM = RFD_DTYPE_F32, GRAD = RFD_DTYPE_F32;
    static constexpr Kind KIND = Kind::published;
    static constexpr bool MASTER = false, MOMENTUM = false;
    static constexpr int WIDTH = 4, ROWS_AT_ONCE = 2, SUMMED_AT_ONCE = 4, BLOCKS = 4;
};

struct InstanceF32Momentum : InstanceF32 {
    static constexpr bool MOMENTUM = true;
    static constexpr int ROWS_AT_ONCE = 1;
};

struct InstanceF32Averaged : InstanceF32Momentum {
    static constexpr Kind KIND = Kind::averaged;
    static constexpr int SUMMED_AT_ONCE = 1;
};

struct InstanceBf16Master : InstanceF32 {
    static constexpr int PARAM = RFD_DTYPE_BF16, GRAD = RFD_DTYPE_BF16;
    static constexpr bool MASTER = true;
};

struct InstanceBf16MasterMomentum : InstanceBf16Master {
    static constexpr bool MOMENTUM = true;
    static constexpr int ROWS_AT_ONCE = 1;
};

struct InstanceBf16MasterAveraged : InstanceBf16MasterMomentum {
    static constexpr Kind KIND = Kind::averaged;
    static constexpr int SUMMED_AT_ONCE = 2;
};

struct InstanceBf16 : InstanceBf16Master {
    static constexpr bool MASTER = false;
    static constexpr int WIDTH = 8;
};

struct InstanceF16Master : InstanceF32 {
    static constexpr int PARAM = RFD_DTYPE_F16, GRAD = RFD_DTYPE_F16;
    static constexpr bool MASTER = true;
};

// PARAM and GRAD are not used. Half as many blocks: double precision and the search of conservative steps take registers.
struct InstanceGeneric {
    static constexpr int PARAM = RFD_DTYPE_F32, GRAD = RFD_DTYPE_F32;
    static constexpr Kind KIND = Kind::generic;
    static constexpr bool MASTER = true, MOMENTUM = true;
    static constexpr int WIDTH = 4, ROWS_AT_ONCE = 1, SUMMED_AT_ONCE = 1, BLOCKS = 2;
};

#define RFD_INSTANCES(X)                                  \
    X(f32, InstanceF32)                                   \
    X(f32_momentum, InstanceF32Momentum)                  \
    X(f32_averaged, InstanceF32Averaged)                  \
    X(bf16_master, InstanceBf16Master)                    \
    X(bf16_master_momentum, InstanceBf16MasterMomentum)   \
    X(bf16_master_averaged, InstanceBf16MasterAveraged)   \
    X(bf16, InstanceBf16)                                 \
    X(f16_master, InstanceF16Master)                      \
    X(generic, InstanceGeneric)

template <class I>
__device__ constexpr bool is_generic()
{
    return I::KIND == Kind::generic;
}

// Sums that the norm pass forms of each chunk, at most.
__device__ constexpr int sums_of(Kind kind)
{
    return kind == Kind::generic ? 4 : kind == Kind::averaged ? 2 : 1;
}
