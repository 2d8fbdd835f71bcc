// The order of summation (docs/summation.md, section 1).
#pragma once

#include "instances.cuh"
#include "rule.cuh"

#define RFD_WARPS (RFD_LANES / 32)
#define RFD_QUAD (RFD_COLUMNS / RFD_LANES)

// The first five levels of the tree; the result is in lane 0.
__device__ __forceinline__ double warp_tree(double x)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_down_sync(RFD_FULL_WARP, x, distance);
    }
    return x;
}

// The last three: the sums of the groups of 32 lanes.
__device__ __forceinline__ double join_groups(const double (&group)[RFD_WARPS])
{
    return ((group[0] + group[4]) + (group[2] + group[6])) + ((group[1] + group[5]) + (group[3] + group[7]));
}

// Folds a list with one warp; the result is in its lane 0. Each lane stands for the eight that are 32 apart, and takes four
// of them at a time: as many loads and trees are under way at once, and all eight would need registers that others lack.
RFD_SHARED_CODE inline double fold_by_warp(const double* terms, uint32_t count)
{
    const uint32_t lane = threadIdx.x % 32;
    double total = 0.0;
#pragma unroll 1
    for (uint32_t odd = 0; odd < 2; ++odd) {
        // Groups odd, odd + 2, odd + 4, odd + 6.
        double group[RFD_WARPS / 2] = {};
#pragma unroll 1
        for (uint32_t first = 32 * odd + lane; first < count; first += RFD_LANES) {
#pragma unroll
            for (uint32_t g = 0; g < RFD_WARPS / 2; ++g) {
                const uint32_t i = first + 64 * g;
                group[g] += i < count ? __ldcg(terms + i) : 0.0;
            }
        }
#pragma unroll
        for (uint32_t g = 0; g < RFD_WARPS / 2; ++g) {
            group[g] = warp_tree(group[g]);
        }
        total += (group[0] + group[2]) + (group[1] + group[3]);
    }
    return total;
}

// Four neighbouring columns of a chunk, summed from row to row.
struct Columns {
    double sum[RFD_QUAD] = {};

    template <class T>
    __device__ __forceinline__ void add(const T (&x)[RFD_QUAD], const T (&y)[RFD_QUAD])
    {
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            // Exact in f64, unless an operand is f64 itself.
            sum[c] += static_cast<double>(x[c]) * static_cast<double>(y[c]);
        }
    }

    __device__ __forceinline__ double lane() const { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }
};

// This lane's sum of squares of the gradient over a chunk. The scale is for f64 gradients only.
template <class I, class T, bool FULL>
__device__ __forceinline__ double lane_squares(const RfdTensor& tensor, const Chunk& chunk, double scale)
{
    [[maybe_unused]] constexpr int ROWS_AT_ONCE = FULL ? I::SUMMED_AT_ONCE : 1;
    Columns squares;
#pragma unroll ROWS_AT_ONCE
    for (int row = 0; row < RFD_ROWS; ++row) {
        T g[RFD_QUAD];
        load<Reuse::later>(g, View<I>(tensor).grad, tensor.grad, unit_of<RFD_QUAD, FULL>(chunk, row));
        if constexpr (sizeof(T) == sizeof(double)) {
#pragma unroll
            for (int c = 0; c < RFD_QUAD; ++c) {
                g[c] *= scale;
            }
        }
        squares.add(g, g);
    }
    return squares.lane();
}

// This lane's two sums for averaged gradients: of squares of the gradient, and of the velocity to come.
template <class I, class T, bool FULL>
__device__ __forceinline__ void lane_averaged(double (&sums)[sums_of(I::KIND)], const RfdTensor& tensor,
                                              const Chunk& chunk, double scale, double momentum, double unscale)
{
    [[maybe_unused]] constexpr int ROWS_AT_ONCE = FULL ? I::SUMMED_AT_ONCE : 1;
    const View<I> view(tensor);
    Columns squares, direction;
#pragma unroll ROWS_AT_ONCE
    for (int row = 0; row < RFD_ROWS; ++row) {
        const Unit unit = unit_of<RFD_QUAD, FULL>(chunk, row);
        T g[RFD_QUAD], v[RFD_QUAD], scaled[RFD_QUAD];
        load<Reuse::later>(g, view.grad, tensor.grad, unit);
        load<Reuse::later>(v, view.state(), tensor.momentum, unit);
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            scaled[c] = view.grad == RFD_DTYPE_F64 ? static_cast<T>(g[c] * scale) : g[c];
            v[c] = next_velocity(v[c], g[c], narrowed<T>(momentum), narrowed<T>(unscale), view.state());
        }
        squares.add(scaled, scaled);
        direction.add(v, v);
    }
    sums[RFD_SUM_SQUARES] = squares.lane();
    sums[RFD_SUM_DIRECTION] = direction.lane();
}

// This lane's four sums for norm lock. The direction is that of the update to come: it needs momentum and gradient
// scale, which are known, but not the step size.
template <class I, class T>
__device__ __forceinline__ void lane_lock(double (&sums)[4], const RfdTensor& tensor, const Chunk& chunk, double scale,
                                          double momentum, double unscale)
{
    const View<I> view(tensor);
    Columns squares, parameter, product, direction;
#pragma unroll 1
    for (int row = 0; row < RFD_ROWS; ++row) {
        const Unit unit = unit_of<RFD_QUAD, false>(chunk, row);
        T p[RFD_QUAD], g[RFD_QUAD], scaled[RFD_QUAD];
        load<Reuse::later>(p, view.param, view.weights, unit);
        load<Reuse::later>(g, view.grad, tensor.grad, unit);
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            scaled[c] = view.grad == RFD_DTYPE_F64 ? static_cast<T>(g[c] * scale) : g[c];
        }
        squares.add(scaled, scaled);
        parameter.add(p, p);
        if (has_velocity<I>(momentum)) {
            T v[RFD_QUAD];
            load<Reuse::later>(v, view.state(), tensor.momentum, unit);
#pragma unroll
            for (int c = 0; c < RFD_QUAD; ++c) {
                g[c] = next_velocity(v[c], g[c], narrowed<T>(momentum), narrowed<T>(unscale), view.state());
            }
        }
        product.add(p, g);
        direction.add(g, g);
    }
    sums[RFD_SUM_SQUARES] = squares.lane();
    sums[RFD_SUM_PARAMETER] = parameter.lane();
    sums[RFD_SUM_PRODUCT] = product.lane();
    sums[RFD_SUM_DIRECTION] = direction.lane();
}

// All sums of this lane over a chunk; how many there are.
template <class I>
__device__ __forceinline__ int lane_sums(double (&sums)[sums_of(I::KIND)], const Launch& launch, const RfdTensor& tensor,
                                         uint64_t index, const Cursor& cursor, double scale, double unscale)
{
    [[maybe_unused]] const double averaging = launch.step.adaptive.averaging;
    if constexpr (I::KIND == Kind::averaged) {
        const Chunk chunk = cursor.chunk(index, tensor.grad | tensor.momentum);
        if (is_full(chunk)) {
            lane_averaged<I, float, true>(sums, tensor, chunk, scale, averaging, unscale);
        } else {
            lane_averaged<I, float, false>(sums, tensor, chunk, scale, averaging, unscale);
        }
        return 2;
    } else {
        if constexpr (is_generic<I>()) {
            const View<I> view(tensor);
            if (tensor.flags & RFD_TENSOR_LOCK) {
                const double momentum = launch.group(tensor.group).momentum;
                const uint64_t velocity = has_velocity<I>(momentum) ? tensor.momentum : 0;
                const Chunk chunk = cursor.chunk(index, tensor.grad | view.weights | velocity);
                if (view.in_f64()) {
                    lane_lock<I, double>(sums, tensor, chunk, scale, momentum, unscale);
                } else {
                    lane_lock<I, float>(sums, tensor, chunk, scale, momentum, unscale);
                }
                return 4;
            }
            if (averaging > 0.0) {
                const Chunk chunk = cursor.chunk(index, tensor.grad | tensor.momentum);
                if (view.in_f64()) {
                    lane_averaged<I, double, false>(sums, tensor, chunk, scale, averaging, unscale);
                } else {
                    lane_averaged<I, float, false>(sums, tensor, chunk, scale, averaging, unscale);
                }
                return 2;
            }
            if (view.grad == RFD_DTYPE_F64) {
                sums[0] = lane_squares<I, double, false>(tensor, cursor.chunk(index, tensor.grad), scale);
                return 1;
            }
        }
        const Chunk chunk = cursor.chunk(index, tensor.grad);
        sums[0] = is_full(chunk) ? lane_squares<I, float, true>(tensor, chunk, scale)
                                 : lane_squares<I, float, false>(tensor, chunk, scale);
        return 1;
    }
}
