// Sums over a chunk (docs/summation.md, section 1): what each thread, a leaf of the tree, adds.
#pragma once

#include "method.cuh"

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

    __device__ __forceinline__ double leaf() const { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }
};

// This leaf's sum of squares of the gradient over a chunk. The scale is for f64 gradients only.
template <class I, class T, bool FULL>
__device__ __forceinline__ double leaf_squares(const RfdTensor& tensor, const Chunk& chunk, double scale)
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
    return squares.leaf();
}

// This leaf's two sums for averaged gradients: of squares of the gradient, and of the velocity to come.
template <class I, class T, bool FULL>
__device__ __forceinline__ void leaf_averaged(double (&sums)[sums_of(I::KIND)], const RfdTensor& tensor,
                                              const Chunk& chunk, double scale, double decay, double unscale)
{
    [[maybe_unused]] constexpr int ROWS_AT_ONCE = FULL ? I::SUMMED_AT_ONCE : 1;
    const View<I> view(tensor);
    Columns squares, direction;
#pragma unroll ROWS_AT_ONCE
    for (int row = 0; row < RFD_ROWS; ++row) {
        const Unit unit = unit_of<RFD_QUAD, FULL>(chunk, row);
        T g[RFD_QUAD], v[RFD_QUAD], scaled[RFD_QUAD];
        load<Reuse::later>(g, view.grad, tensor.grad, unit);
        load<Reuse::later>(v, view.state(), tensor.velocity, unit);
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            scaled[c] = view.grad == RFD_DTYPE_F64 ? static_cast<T>(g[c] * scale) : g[c];
            v[c] = next_velocity(v[c], g[c], narrowed<T>(decay), narrowed<T>(unscale), view.state());
        }
        squares.add(scaled, scaled);
        direction.add(v, v);
    }
    sums[RFD_SUM_SQUARES] = squares.leaf();
    sums[RFD_SUM_DIRECTION] = direction.leaf();
}

// This leaf's four sums for norm lock. The direction is that of the update to come: it needs the decay of the
// velocity and the gradient scale, which are known, but not the step size.
template <class I, class T>
__device__ __forceinline__ void leaf_lock(double (&sums)[4], const RfdTensor& tensor, const Chunk& chunk, double scale,
                                          double decay, double unscale)
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
        if (has_velocity<I>(decay)) {
            T v[RFD_QUAD];
            load<Reuse::later>(v, view.state(), tensor.velocity, unit);
#pragma unroll
            for (int c = 0; c < RFD_QUAD; ++c) {
                g[c] = next_velocity(v[c], g[c], narrowed<T>(decay), narrowed<T>(unscale), view.state());
            }
        }
        product.add(p, g);
        direction.add(g, g);
    }
    sums[RFD_SUM_SQUARES] = squares.leaf();
    sums[RFD_SUM_PARAMETER] = parameter.leaf();
    sums[RFD_SUM_PRODUCT] = product.leaf();
    sums[RFD_SUM_DIRECTION] = direction.leaf();
}

// All sums of this leaf over a chunk; how many there are.
template <class I>
__device__ __forceinline__ int leaf_sums(double (&sums)[sums_of(I::KIND)], const Launch& launch,
                                         const RfdTensor& tensor, uint64_t index, const Cursor& cursor, double scale,
                                         double unscale)
{
    [[maybe_unused]] const double averaging = averaging_of<I::KIND>(launch.step);
    if constexpr (I::KIND == Kind::averaged) {
        const Chunk chunk = cursor.chunk(index, tensor.grad | tensor.velocity);
        if (is_full(chunk)) {
            leaf_averaged<I, float, true>(sums, tensor, chunk, scale, averaging, unscale);
        } else {
            leaf_averaged<I, float, false>(sums, tensor, chunk, scale, averaging, unscale);
        }
        return 2;
    } else {
        if constexpr (is_generic<I>()) {
            const View<I> view(tensor);
            if (tensor.flags & RFD_TENSOR_LOCK) {
                const double decay = launch.group(tensor.group).velocity_decay;
                const uint64_t velocity = has_velocity<I>(decay) ? tensor.velocity : 0;
                const Chunk chunk = cursor.chunk(index, tensor.grad | view.weights | velocity);
                if (view.in_f64()) {
                    leaf_lock<I, double>(sums, tensor, chunk, scale, decay, unscale);
                } else {
                    leaf_lock<I, float>(sums, tensor, chunk, scale, decay, unscale);
                }
                return 4;
            }
            if (averaging > 0.0) {
                const Chunk chunk = cursor.chunk(index, tensor.grad | tensor.velocity);
                if (view.in_f64()) {
                    leaf_averaged<I, double, false>(sums, tensor, chunk, scale, averaging, unscale);
                } else {
                    leaf_averaged<I, float, false>(sums, tensor, chunk, scale, averaging, unscale);
                }
                return 2;
            }
            if (view.grad == RFD_DTYPE_F64) {
                sums[0] = leaf_squares<I, double, false>(tensor, cursor.chunk(index, tensor.grad), scale);
                return 1;
            }
        }
        const Chunk chunk = cursor.chunk(index, tensor.grad);
        sums[0] = is_full(chunk) ? leaf_squares<I, float, true>(tensor, chunk, scale)
                                 : leaf_squares<I, float, false>(tensor, chunk, scale);
        return 1;
    }
}
