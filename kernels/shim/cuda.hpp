// CUDA as the kernels use it, on a CPU: threads of a block are fibers of one OS thread, blocks are OS
// threads. For tests; slow, but every barrier, shuffle and atomic is a real one, and fibers run in an order
// that a seed shuffles.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.hpp"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define RFD_PARAMETER(T) const T&

using std::exp, std::expm1, std::fabs, std::fmax, std::fmin, std::log, std::log1p, std::sqrt;

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};

template <class T>
T& block_shared()
{
    return *static_cast<T*>(shim::shared_memory(sizeof(T)));
}

inline void grid_barrier() { gridDim.x == 1 ? shim::block_barrier() : shim::grid_barrier(); }
inline void __syncthreads() { shim::block_barrier(); }
inline int __syncthreads_and(int value) { return shim::block_all(value != 0); }
inline void __syncwarp() { shim::warp_exchange(shim::Collective::barrier, 0); }
inline void system_fence() { std::atomic_thread_fence(std::memory_order_acq_rel); }
inline void prefetch(uint64_t) {}
inline double add_exact_product(double sum, double x, double y) { return sum + x * y; }

// The kernels only use whole warps.
inline void whole_warp(uint32_t mask) { shim::expect(mask == 0xFFFFFFFFu, "a collective of part of a warp"); }

inline double __shfl_down_sync(uint32_t mask, double value, int distance)
{
    whole_warp(mask);
    const uint64_t* lanes = shim::warp_exchange(shim::Collective::shuffle, std::bit_cast<uint64_t>(value));
    const uint32_t lane = threadIdx.x % 32, source = lane + static_cast<uint32_t>(distance);
    return std::bit_cast<double>(lanes[source < 32 ? source : lane]);
}

inline uint32_t __shfl_sync(uint32_t mask, uint32_t value, int source)
{
    whole_warp(mask);
    return static_cast<uint32_t>(shim::warp_exchange(shim::Collective::shuffle, value)[source]);
}

inline uint32_t __ballot_sync(uint32_t mask, bool value)
{
    whole_warp(mask);
    const uint64_t* lanes = shim::warp_exchange(shim::Collective::ballot, value);
    uint32_t ballot = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) {
        ballot |= static_cast<uint32_t>(lanes[lane]) << lane;
    }
    return ballot;
}

inline uint32_t __popc(uint32_t x) { return static_cast<uint32_t>(std::popcount(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }

inline uint32_t add_in_order(uint32_t* counter, uint32_t x)
{
    return std::atomic_ref(*counter).fetch_add(x, std::memory_order_acq_rel);
}

inline unsigned long long atomicMax(unsigned long long* to, unsigned long long x)
{
    std::atomic_ref cell(*to);
    unsigned long long old = cell.load();
    while (old < x && !cell.compare_exchange_weak(old, x)) {
    }
    return old;
}

// By memcpy, as floats lie in memory what is read as words; a misaligned address is an error here as on a
// GPU.
template <class T>
T read_aligned(const T* from)
{
    shim::expect(reinterpret_cast<uintptr_t>(from) % sizeof(T) == 0, "a misaligned load");
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
T __ldcg(const T* from) { return read_aligned(from); }
template <class T>
T __ldcs(const T* from) { return read_aligned(from); }
template <class T>
T __ldg(const T* from) { return read_aligned(from); }
template <class T>
void __stcs(T* to, const T& value)
{
    shim::expect(reinterpret_cast<uintptr_t>(to) % sizeof(T) == 0, "a misaligned store");
    std::memcpy(to, &value, sizeof(T));
}

template <class T>
void __stcg(T* to, const T& value) { __stcs(to, value); }

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline float fabsf(float x) { return std::fabs(x); }
inline float floorf(float x) { return std::floor(x); }

// cvt.f32.f16
inline float widen_f16(unsigned short bits)
{
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
    if (exponent == 0) {
        // Subnormal: a multiple of 2⁻²⁴, exact.
        return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f) | sign);
    }
    const uint32_t rebiased = exponent == 31 ? 255 : exponent + 112;
    const uint32_t quiet = exponent == 31 && fraction != 0 ? 0x400000 : 0;
    return std::bit_cast<float>(sign | rebiased << 23 | fraction << 13 | quiet);
}

// cvt.rn.f16.f32
inline unsigned short narrow_f16(float x)
{
    const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
    const float magnitude = std::fabs(x);
    if (magnitude != magnitude) {
        return 0x7FFF;
    }
    if (magnitude >= 65520.0f) {
        return static_cast<unsigned short>(sign | 0x7C00);
    }
    if (magnitude < 0x1p-14f) {
        // Adding 2⁻¹ leaves multiples of 2⁻²⁴, rounded to nearest even.
        return static_cast<unsigned short>(sign | (std::bit_cast<uint32_t>(magnitude + 0.5f) - 0x3F000000u));
    }
    const uint32_t rounded = (bits & 0x7FFFFFFF) + 0xFFF + (bits >> 13 & 1);
    return static_cast<unsigned short>(sign | ((rounded >> 13) - (112u << 10)));
}
