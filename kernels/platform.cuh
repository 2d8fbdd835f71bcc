// What the kernels need of their platform: CUDA, or the shim that runs them on a CPU in tests.
#pragma once

#include "abi.h"

#ifdef __CUDACC__

#include <cooperative_groups.h>

// A kernel's parameter that is read where it lies, never copied to the stack.
#define RFD_PARAMETER(T) const __grid_constant__ T

// The block's shared memory.
template <class T>
__device__ __forceinline__ T& block_shared()
{
    __shared__ T storage;
    return storage;
}

// Waits for all blocks of a launch, which is a cooperative one or has one block, and makes their writes
// visible.
__device__ __forceinline__ void grid_barrier()
{
    if (gridDim.x == 1) {
        __syncthreads();
    } else {
        cooperative_groups::this_grid().sync();
    }
}

// Adds to a counter and returns what it was. All that this thread knows to have happened before, also from
// other threads of its block by way of a barrier, has then happened for those who add later.
__device__ __forceinline__ uint32_t add_in_order(uint32_t* counter, uint32_t x)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(x)
                 : "memory");
    return before;
}

// What this thread wrote before comes before what it writes later, for the host too.
__device__ __forceinline__ void system_fence()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Asks for a line of device memory to be brought to the second-level cache.
__device__ __forceinline__ void prefetch(uint64_t address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// sum + x·y where the product is exact in f64: then rounding once changes nothing.
__device__ __forceinline__ double add_exact_product(double sum, double x, double y)
{
    return __fma_rn(x, y, sum);
}

// The conversions themselves, as cuda_fp16.h has them: saves NVRTC the reading of 4000 lines.
__device__ __forceinline__ float widen_f16(unsigned short bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ unsigned short narrow_f16(float x)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

#else
#include "shim/cuda.hpp"
#endif

// IEEE double and single, as <float.h> has them; NVRTC has no such header.
#define RFD_F64_MAX 1.7976931348623157e308
#define RFD_F64_EPSILON 2.220446049250313e-16
#define RFD_F64_INFINITY __longlong_as_double(0x7FF0000000000000)
#define RFD_F32_MAX 3.4028234663852886e38f

#define RFD_FULL_WARP 0xFFFFFFFFu

__device__ __forceinline__ bool is_finite(double x)
{
    return fabs(x) <= RFD_F64_MAX;
}

// 2^exponent for a normal result.
__device__ __forceinline__ double power_of_two(int exponent)
{
    return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
}

// The exponent of a positive finite number: floor(log2 x).
__device__ __forceinline__ int exponent_of(double x)
{
    const bool subnormal = x < power_of_two(-1022);
    // Scaling a subnormal up is exact.
    const double normal = subnormal ? x * power_of_two(64) : x;
    const int exponent = static_cast<int>(__double_as_longlong(normal) >> 52) - 1023;
    return subnormal ? exponent - 64 : exponent;
}
