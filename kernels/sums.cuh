// Sums over a chunk (docs/summation.md, section 1): what each thread, a leaf of the tree, adds.
#pragma once

#include "lines.cuh"
#include "method.cuh"

// Four neighbouring columns of a chunk, summed from row to row.
struct Columns {
    double sum[RFD_QUAD] = {};

    template <class T>
    __device__ __forceinline__ void add(const T (&x)[RFD_QUAD], const T (&y)[RFD_QUAD])
    {
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            if constexpr (sizeof(T) == sizeof(double)) {
                sum[c] += x[c] * y[c];
            } else {
                sum[c] = add_exact_product(sum[c], x[c], y[c]);
            }
        }
    }

    // The same with weights, and with their squares.
    template <class T>
    __device__ __forceinline__ void add(const T (&x)[RFD_QUAD], const T (&y)[RFD_QUAD], const float (&u)[RFD_QUAD])
    {
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            sum[c] += static_cast<double>(x[c]) * static_cast<double>(y[c]) * static_cast<double>(u[c]);
        }
    }
    template <class T>
    __device__ __forceinline__ void add_twice(const T (&x)[RFD_QUAD], const T (&y)[RFD_QUAD],
                                              const float (&u)[RFD_QUAD])
    {
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            const double square = static_cast<double>(u[c]) * static_cast<double>(u[c]);
            sum[c] += static_cast<double>(x[c]) * static_cast<double>(y[c]) * square;
        }
    }

    __device__ __forceinline__ double leaf() const { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }
};

// This leaf's sum of squares of the gradient over a chunk, in a lean instance without rows.
template <class I, bool FULL, Lies GRAD = Lies::aligned>
__device__ __forceinline__ double leaf_squares(const RfdTensor& tensor, const Chunk& chunk)
{
    [[maybe_unused]] constexpr int ROWS_AT_ONCE = FULL ? I::SUMMED_AT_ONCE : 1;
    Columns squares;
#pragma unroll ROWS_AT_ONCE
    for (int row = 0; row < RFD_ROWS; ++row) {
        float g[RFD_QUAD];
        load<Reuse::later>(g, I::GRAD, tensor.grad, lying<GRAD>(unit_of<RFD_QUAD, FULL>(chunk, row)));
        squares.add(g, g);
    }
    return squares.leaf();
}

// How a tensor's gradient is summed.
struct Summing {
    bool rows;       // of a method that has some: the direction too
    double scale;    // of f64 gradients, for their squares
    double decay;    // of the velocity; where it is not needed, 0
    double unscale;  // 1 over the gradient scale
};

// This thread's sums over its part of a row; LINES, of a full one, is how many it has. DIRECTS: also those of
// the direction and of parameters, where the tensor has some. The direction is that of the update to come: it
// needs the decay of the velocity and the gradient scale, which are known, but not the step size.
template <class I, class T, bool DIRECTS, int LINES = 0>
__device__ __forceinline__ void leaf_row(double (&sums)[sums_of(I::KIND)], const RowTensor& here, const RowUnits& units,
                                         const Summing& by)
{
    // Sums of the direction have more arrays to read, and take more registers.
    constexpr int AT_ONCE = lines_at_once<T>(is_generic<I>() && DIRECTS ? I::SUMMED_AT_ONCE / 2 : I::SUMMED_AT_ONCE);
    constexpr bool FULL = LINES > 0;
    [[maybe_unused]] constexpr int STEPS = FULL ? RFD_ROWS : 1;
    const RfdTensor& tensor = here.tensor;
    const View<I> view(tensor);
    const bool locks = DIRECTS && is_generic<I>() && tensor.flags & RFD_TENSOR_LOCK;
    const bool moves = DIRECTS && has_velocity<I>(by.decay);
    const float* of_columns = here.variances.scales();
    const T decay = narrowed<T>(by.decay), unscale = narrowed<T>(by.unscale);
    const Array grad = array_of<LINES>(units, tensor.grad, view.grad),
                velocity = array_of<LINES>(units, tensor.velocity, view.state(), moves),
                weights = array_of<LINES>(units, view.weights, view.param, locks);
    Columns squares, direction, parameter, product, weighted;
#pragma unroll STEPS
    for (int first = 0; FULL ? first < LINES : units.has(first); first += AT_ONCE) {
        Quad<T> of_grad[AT_ONCE] = {}, of_velocity[AT_ONCE] = {}, of_weights[AT_ONCE] = {};
        read_arrays<LINES, Reuse::later>(units, first, of_grad, grad, of_velocity, velocity, of_weights, weights);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (FULL ? first + i >= LINES : !units.has(first + i)) {
                continue;
            }
            T g[RFD_QUAD], d[RFD_QUAD], scaled[RFD_QUAD];
            widen(g, of_grad[i], grad);
#pragma unroll
            for (int c = 0; c < RFD_QUAD; ++c) {
                scaled[c] = view.grad == RFD_DTYPE_F64 ? static_cast<T>(g[c] * by.scale) : g[c];
                d[c] = g[c];
            }
            squares.add(scaled, scaled);
            if (!DIRECTS) {
                continue;
            }
            if (moves) {
                T v[RFD_QUAD];
                widen(v, of_velocity[i], velocity);
#pragma unroll
                for (int c = 0; c < RFD_QUAD; ++c) {
                    d[c] = next_velocity(v[c], g[c], decay, unscale, view.state());
                }
            }
            float u[RFD_QUAD];
            units.scales<FULL>(u, of_columns, first + i);
            direction.add(d, d, u);
            if (locks) {
                T p[RFD_QUAD];
                widen(p, of_weights[i], weights);
                parameter.add(p, p);
                product.add(p, d, u);
                weighted.add_twice(d, d, u);
            }
        }
    }
    sums[RFD_SUM_SQUARES] = squares.leaf();
    if constexpr (I::KIND != Kind::fitted) {
        sums[RFD_SUM_DIRECTION] = direction.leaf();
    }
    if constexpr (is_generic<I>()) {
        sums[RFD_SUM_PARAMETER] = parameter.leaf();
        sums[RFD_SUM_PRODUCT] = product.leaf();
        sums[RFD_SUM_WEIGHTED] = weighted.leaf();
    }
}

// The first sums of this warp over a chunk of rows, as many as asked for, in its first lane, and the new
// averages of its rows. Of rows that several warps share they are not weighed yet.
template <class I>
__device__ __forceinline__ void warp_rows(double (&sums)[sums_of(I::KIND)], int count, const Launch& launch,
                                          uint32_t index, const RowTensor& here, uint64_t chunk, const Summing& by)
{
    const RowUnits units = here.units(chunk);
    const bool directs = by.rows || here.tensor.flags & RFD_TENSOR_LOCK;
    const bool full = I::KIND == Kind::averaged && (here.tensor.grad | here.tensor.velocity) % 16 == 0 && here.is_full(chunk);
    if (View<I>(here.tensor).in_f64()) {
        if constexpr (is_generic<I>()) {
            directs ? leaf_row<I, double, true>(sums, here, units, by) : leaf_row<I, double, false>(sums, here, units, by);
        }
    } else if (full && here.lines == 4) {
        leaf_row<I, float, true, 4>(sums, here, units, by);
    } else if (full && here.lines == 3) {
        leaf_row<I, float, true, 3>(sums, here, units, by);
    } else if (!is_generic<I>() || directs) {
        leaf_row<I, float, true>(sums, here, units, by);
    } else {
        leaf_row<I, float, false>(sums, here, units, by);
    }
#pragma unroll
    for (int n = 0; n < sums_of(I::KIND); ++n) {
        if (n < count) {
            sums[n] = join_lanes(sums[n], here.lanes);
        }
    }
    if (here.lanes > 32 || !by.rows) {
        return;
    }
    const bool leads = threadIdx.x % here.lanes == 0 && units.length > 0;
    if (leads) {
        const RowPlaces places(launch, index);
        weigh_row(sums, here.variances, places, here.row_of(chunk), units.length, by.unscale, has_velocity<I>(by.decay));
    }
#pragma unroll
    for (int n = 0; n < sums_of(I::KIND); ++n) {
        if (n < count) {
            sums[n] = join_rows(leads ? sums[n] : 0.0, here.lanes);
        }
    }
}

// This leaf's sum over a chunk, in a lean instance without rows.
template <class I>
__device__ __forceinline__ double leaf_of_chunk(const RfdTensor& tensor, const Chunk& chunk)
{
    if (chunk.count < RFD_CHUNK) {
        return leaf_squares<I, false>(tensor, chunk);
    }
    return chunk.aligned ? leaf_squares<I, true>(tensor, chunk) : leaf_squares<I, true, Lies::anyhow>(tensor, chunk);
}
