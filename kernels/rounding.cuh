// Rounding of f32 to f16 and bf16, to nearest or stochastically with bits of Philox4x32-10
// (docs/summation.md).
#pragma once

#include "platform.cuh"

// How a tensor's results are rounded to half precision.
struct Rounding {
    bool stochastic;
    uint32_t tensor;
    uint32_t step;
    uint64_t seed;
    uint64_t offset;  // of the tensor's first element in the whole, unsharded tensor
};

__device__ __forceinline__ Rounding to_nearest()
{
    return Rounding{};
}

// bf16 is the upper half of an f32.
__device__ __forceinline__ float widen_bf16(uint16_t bits)
{
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// By integers: conversion instructions for bf16 begin with sm_80, above the PTX that is shipped.
__device__ __forceinline__ uint16_t narrow_bf16(float x)
{
    const uint32_t bits = __float_as_uint(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;
    return static_cast<uint16_t>(x != x ? quiet : rounded);
}

__device__ __forceinline__ uint16_t stochastic_bf16(float x, uint32_t random)
{
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7F800000) == 0x7F800000) {
        return static_cast<uint16_t>((bits >> 16) | (x != x ? 0x40 : 0));
    }
    // Adding r·2⁻¹⁶ units in the last place before truncation carries with the probability of the fraction.
    return static_cast<uint16_t>((bits + random) >> 16);
}

__device__ __forceinline__ uint16_t stochastic_f16(float x, uint32_t random)
{
    const float magnitude = fabsf(x);
    // Also false for NaN.
    if (!(magnitude < 65536.0f)) {
        return narrow_f16(x);
    }
    const uint32_t sign = (__float_as_uint(x) >> 16) & 0x8000;
    if (magnitude < 6.103515625e-5f) {
        // Subnormal: a multiple of 2⁻²⁴. The product is exact, its fraction is compared with r/2¹⁶.
        const float scaled = magnitude * 16777216.0f;
        const float below = floorf(scaled);
        const uint32_t up = static_cast<float>(random) < (scaled - below) * 65536.0f ? 1 : 0;
        return static_cast<uint16_t>(sign | (static_cast<uint32_t>(below) + up));
    }
    // 13 of the 23 fraction bits go; the exponent's bias goes from 127 to 15.
    const uint32_t carried = __float_as_uint(magnitude) + (random >> 3);
    return static_cast<uint16_t>(sign | ((carried >> 13) - ((127 - 15) << 10)));
}

// 128 random bits of 8 neighbouring elements, `octet` being the index of the first over 8: 16 each, lower
// half first.
__device__ __forceinline__ uint4 philox(uint64_t octet, const Rounding& rounding)
{
    uint32_t c0 = static_cast<uint32_t>(octet);
    uint32_t c1 = static_cast<uint32_t>(octet >> 32);
    uint32_t c2 = rounding.tensor;
    uint32_t c3 = rounding.step;
    uint32_t k0 = static_cast<uint32_t>(rounding.seed);
    uint32_t k1 = static_cast<uint32_t>(rounding.seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
        const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(b);
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return uint4{c0, c1, c2, c3};
}

// 16 random bits for each of N ≤ 8 neighbouring elements, two a word.
template <int N>
__device__ __forceinline__ void draw(uint32_t (&words)[N / 2], uint64_t first, const Rounding& rounding)
{
    const uint64_t octet = first / 8;
    const int skipped = static_cast<int>(first % 8);
    const uint4 low = philox(octet, rounding);
    uint32_t all[8] = {low.x, low.y, low.z, low.w, 0, 0, 0, 0};
    if (skipped + N > 8) {
        const uint4 high = philox(octet + 1, rounding);
        all[4] = high.x, all[5] = high.y, all[6] = high.z, all[7] = high.w;
    }
    // A shift by the elements skipped, in steps of fixed length: an index that varies would put the words in
    // memory.
    if (skipped & 4) {
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            all[i] = all[i + 2];
        }
    }
    if (skipped & 2) {
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            all[i] = all[i + 1];
        }
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        words[i] = skipped & 1 ? (all[i] >> 16) | (all[i + 1] << 16) : all[i];
    }
}

// Rounds N neighbouring elements, the first of which has index `first` in the tensor.
template <int N>
__device__ __forceinline__ void round_to_half(uint16_t (&half)[N], const float (&x)[N], int format, uint64_t first,
                                              const Rounding& rounding)
{
    if (!rounding.stochastic) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            half[i] = format == RFD_DTYPE_F16 ? narrow_f16(x[i]) : narrow_bf16(x[i]);
        }
        return;
    }
    uint32_t words[N / 2];
    draw<N>(words, rounding.offset + first, rounding);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t random = i % 2 == 0 ? words[i / 2] & 0xFFFF : words[i / 2] >> 16;
        half[i] = format == RFD_DTYPE_F16 ? stochastic_f16(x[i], random) : stochastic_bf16(x[i], random);
    }
}
