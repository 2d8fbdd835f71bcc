// Lines of a row: a thread asks for several of them before it uses the first, of whatever format and however
// they lie. ROW_LINES, where it isn't 0, promises that rows have so many, that all elements exist, and that
// addresses are multiples of 16 bytes.
#pragma once

#include "rows.cuh"

// A thread's elements of a line as they lie in memory: two words of an f64, one of an f32. Of f16 and bf16
// two share a word where all are read at once, else each has its own.
template <class T>
struct Quad {
    uint32_t words[sizeof(T) / sizeof(float) * RFD_QUAD];
};

// One of the arrays of a tensor, as a thread sees its part of a row.
struct Array {
    uint64_t address;
    int format;
    bool used;
    bool wide;  // four elements are read and written at once, if it is used

    // A unit of it.
    __device__ __forceinline__ Unit at(const Unit& unit) const
    {
        return {unit.first, unit.count, wide && unit.count > 0};
    }
};

// An array of the tensor that the units are of.
template <int ROW_LINES>
__device__ __forceinline__ Array array_of(const RowUnits& units, uint64_t address, int format, bool used = true)
{
    return {address, format, used, ROW_LINES > 0 || !used || (units.whole && address % 16 == 0)};
}

// Lines of units that exist or don't as a whole, PARTS words each; the first exists. It is read in place of
// those that don't: a branch would part the loads, and what other threads work on may be written already.
template <int ROW_LINES, Reuse REUSE, class Word, int PARTS, class T, int LINES>
__device__ __forceinline__ void read_whole(Quad<T> (&to)[LINES], uint64_t address, const RowUnits& units, int first)
{
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        if (ROW_LINES > 0 && first + i >= ROW_LINES) {
            continue;
        }
        const Unit unit = units.unit<(ROW_LINES > 0)>(first + i);
        const uint64_t at = unit.count > 0 ? unit.first : units.unit(first).first;
        const Word* from = reinterpret_cast<const Word*>(address + at * (sizeof(Word) * PARTS / RFD_QUAD));
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Word word = read_word<Word, REUSE>(from + part);
            memcpy(&to[i].words[part * (sizeof(Word) / sizeof(uint32_t))], &word, sizeof(word));
        }
    }
}

// Lines of any units, element by element.
template <class Raw, class T, int LINES>
__device__ __forceinline__ void read_apart(Quad<T> (&to)[LINES], uint64_t address, const RowUnits& units, int first)
{
    constexpr int WORDS = sizeof(Raw) <= sizeof(uint32_t) ? 1 : sizeof(Raw) / sizeof(uint32_t);
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        const Unit unit = units.unit(first + i);
        const Raw* from = reinterpret_cast<const Raw*>(address) + unit.first;
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            if (c < unit.count) {
                const Raw raw = from[c];
                if constexpr (WORDS == 1) {
                    to[i].words[c] = raw;
                } else {
                    memcpy(&to[i].words[WORDS * c], &raw, sizeof(raw));
                }
            }
        }
    }
}

// Asks for lines of an array; WIDE: all of its units are read at once.
template <int ROW_LINES, Reuse REUSE, bool WIDE, class T, int LINES>
__device__ __forceinline__ void read_lines(Quad<T> (&to)[LINES], const Array& from, const RowUnits& units, int first)
{
    if (!from.used) {
        return;
    }
    const bool wide = WIDE || from.wide;
    if constexpr (sizeof(T) == sizeof(double)) {
        if (from.format == RFD_DTYPE_F64) {
            wide ? read_whole<ROW_LINES, REUSE, uint4, 2>(to, from.address, units, first)
                 : read_apart<uint2>(to, from.address, units, first);
            return;
        }
    }
    if (from.format == RFD_DTYPE_F32) {
        wide ? read_whole<ROW_LINES, REUSE, uint4, 1>(to, from.address, units, first)
             : read_apart<uint32_t>(to, from.address, units, first);
    } else {
        wide ? read_whole<ROW_LINES, REUSE, uint2, 1>(to, from.address, units, first)
             : read_apart<uint16_t>(to, from.address, units, first);
    }
}

// Asks for lines of three arrays from `first` on, which exists; other units that don't may become anything,
// elements of others stay. Loads that are all wide make a branch of their own: after one that may have read
// elements the compiler moves registers, which waits for what they were to hold.
template <int ROW_LINES, Reuse REUSE, class T, int LINES>
__device__ __forceinline__ void read_arrays(const RowUnits& units, int first, Quad<T> (&a)[LINES], const Array& of_a,
                                            Quad<T> (&b)[LINES], const Array& of_b, Quad<T> (&c)[LINES], const Array& of_c)
{
    if (ROW_LINES > 0 || (of_a.wide && of_b.wide && of_c.wide)) {
        read_lines<ROW_LINES, REUSE, true>(a, of_a, units, first);
        read_lines<ROW_LINES, REUSE, true>(b, of_b, units, first);
        read_lines<ROW_LINES, REUSE, true>(c, of_c, units, first);
    } else {
        read_lines<ROW_LINES, REUSE, false>(a, of_a, units, first);
        read_lines<ROW_LINES, REUSE, false>(b, of_b, units, first);
        read_lines<ROW_LINES, REUSE, false>(c, of_c, units, first);
    }
}

// What was read, exactly.
template <class T>
__device__ __forceinline__ void widen(T (&x)[RFD_QUAD], const Quad<T>& quad, const Array& from)
{
    if constexpr (sizeof(T) == sizeof(double)) {
        if (from.format == RFD_DTYPE_F64) {
            memcpy(x, quad.words, sizeof(x));
            return;
        }
    }
    if (from.format == RFD_DTYPE_F32) {
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            x[c] = __uint_as_float(quad.words[c]);
        }
    } else {
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            const uint32_t word = from.wide ? quad.words[c / 2] >> 16 * (c % 2) : quad.words[c];
            const uint16_t bits = static_cast<uint16_t>(word);
            x[c] = from.format == RFD_DTYPE_F16 ? widen_f16(bits) : widen_bf16(bits);
        }
    }
}

// Lines of an array. All before the first is used: with branches by format between them more would spill.
template <class T, int LINES>
__device__ __forceinline__ void widen_lines(T (&x)[LINES][RFD_QUAD], const Quad<T> (&lines)[LINES], const Array& from)
{
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        widen(x[i], lines[i], from);
    }
}

// Lines that are asked for at once where so many of f32 are.
template <class T>
__device__ constexpr int lines_at_once(int of_f32)
{
    return sizeof(T) == sizeof(float) || of_f32 == 1 ? of_f32 : of_f32 / 2;
}
