// Number formats: elements in memory become the format that is computed in (f32, or f64 where parameter or
// gradient is f64), and back.
#pragma once

#include "platform.cuh"
#include "rounding.cuh"

// One thread's share of an access: up to N neighbouring elements of a tensor.
struct Unit {
    uint64_t first;  // index of the first element in the tensor
    int count;       // elements that exist
    bool vector;     // all exist, and their address is a multiple of 16 bytes where N elements take that much
};

// Bytes of an element.
__device__ __forceinline__ uint64_t size_of(int format)
{
    return format == RFD_DTYPE_F64 ? 8 : format == RFD_DTYPE_F32 ? 4 : 2;
}

// Whether cache lines should stay: those of gradients in the first pass, which the second reads again.
enum class Reuse { later, never };

template <class Word, Reuse REUSE>
__device__ __forceinline__ Word read_word(const Word* from)
{
    // Past the first-level cache, where nothing is ever found again; "streaming" lines are the first to leave
    // the second.
    return REUSE == Reuse::later ? __ldcg(from) : __ldcs(from);
}

// 16 bytes an access, 8 where the elements take no more.
template <Reuse REUSE, class Raw, int N>
__device__ __forceinline__ void read(Raw (&x)[N], uint64_t address, const Unit& unit)
{
    const Raw* from = reinterpret_cast<const Raw*>(address) + unit.first;
    if (!unit.vector) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            x[i] = i < unit.count ? from[i] : Raw(0);
        }
    } else if constexpr (sizeof(x) % 16 == 0) {
        uint4 words[sizeof(x) / 16];
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(x) / 16); ++i) {
            words[i] = read_word<uint4, REUSE>(reinterpret_cast<const uint4*>(from) + i);
        }
        memcpy(x, words, sizeof(x));
    } else {
        static_assert(sizeof(x) == 8, "four halves");
        const uint2 word = read_word<uint2, REUSE>(reinterpret_cast<const uint2*>(from));
        memcpy(x, &word, sizeof(x));
    }
}

template <class Raw, int N>
__device__ __forceinline__ void write(const Raw (&x)[N], uint64_t address, const Unit& unit)
{
    Raw* to = reinterpret_cast<Raw*>(address) + unit.first;
    if (!unit.vector) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < unit.count) {
                to[i] = x[i];
            }
        }
    } else if constexpr (sizeof(x) % 16 == 0) {
        uint4 words[sizeof(x) / 16];
        memcpy(words, x, sizeof(x));
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(x) / 16); ++i) {
            __stcs(reinterpret_cast<uint4*>(to) + i, words[i]);
        }
    } else {
        static_assert(sizeof(x) == 8, "four halves");
        uint2 word;
        memcpy(&word, x, sizeof(x));
        __stcs(reinterpret_cast<uint2*>(to), word);
    }
}

// Elements of the given format as T, exactly; those that don't exist are 0. Where `format` is a constant,
// only its branch is compiled.
template <Reuse REUSE, class T, int N>
__device__ __forceinline__ void load(T (&x)[N], int format, uint64_t address, const Unit& unit)
{
    if (format == RFD_DTYPE_F64) {
        // Nothing computed in f32 reads f64.
        if constexpr (sizeof(T) == sizeof(double)) {
            read<REUSE>(x, address, unit);
        }
    } else if (format == RFD_DTYPE_F32) {
        float raw[N];
        read<REUSE>(raw, address, unit);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            x[i] = raw[i];
        }
    } else {
        uint16_t raw[N];
        read<REUSE>(raw, address, unit);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            x[i] = format == RFD_DTYPE_F16 ? widen_f16(raw[i]) : widen_bf16(raw[i]);
        }
    }
}

// Rounds and writes: to f32 and f64 to nearest, to f16 and bf16 from f32 as `rounding` says.
template <class T, int N>
__device__ __forceinline__ void store(const T (&x)[N], int format, uint64_t address, const Unit& unit,
                                      const Rounding& rounding)
{
    if (format == RFD_DTYPE_F64) {
        if constexpr (sizeof(T) == sizeof(double)) {
            write(x, address, unit);
        }
        return;
    }
    float single[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        single[i] = static_cast<float>(x[i]);
    }
    if (format == RFD_DTYPE_F32) {
        write(single, address, unit);
        return;
    }
    uint16_t half[N];
    round_to_half(half, single, format, unit.first, rounding);
    write(half, address, unit);
}

// A scalar in the format that is computed in: to nearest, beyond its largest number to that number, so that 0
// times it stays 0. A NaN stays.
template <class T>
__device__ __forceinline__ T narrowed(double x)
{
    const double largest = RFD_F64_MAX;
    return x > largest ? largest : x < -largest ? -largest : x;
}

template <>
__device__ __forceinline__ float narrowed<float>(double x)
{
    const float single = static_cast<float>(x);
    return single > RFD_F32_MAX ? RFD_F32_MAX : single < -RFD_F32_MAX ? -RFD_F32_MAX : single;
}
