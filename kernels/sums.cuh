// Sums over a chunk (docs/summation.md, section 1): what each thread, a leaf of the tree, adds.
#pragma once

#include "method.cuh"
#include "rows.cuh"

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

// This leaf's sum of squares of the gradient over a chunk. The scale is for f64 gradients only.
template <class I, class T, bool FULL, Lies GRAD = Lies::aligned>
__device__ __forceinline__ double leaf_squares(const RfdTensor& tensor, const Chunk& chunk, double scale)
{
    [[maybe_unused]] constexpr int ROWS_AT_ONCE = FULL ? I::SUMMED_AT_ONCE : 1;
    Columns squares;
#pragma unroll ROWS_AT_ONCE
    for (int row = 0; row < RFD_ROWS; ++row) {
        T g[RFD_QUAD];
        load<Reuse::later>(g, View<I>(tensor).grad, tensor.grad, lying<GRAD>(unit_of<RFD_QUAD, FULL>(chunk, row)));
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

// The same of a whole chunk that is not f64.
template <class I>
__device__ __forceinline__ double whole_squares(const RfdTensor& tensor, const Chunk& chunk)
{
    return chunk.aligned ? leaf_squares<I, float, true>(tensor, chunk, 1.0)
                         : leaf_squares<I, float, true, Lies::anyhow>(tensor, chunk, 1.0);
}

// This leaf's four sums for norm lock. The direction is that of the update to come: it needs the decay of the
// velocity and the gradient scale, which are known, but not the step size.
template <class I, class T>
__device__ __forceinline__ void leaf_lock(double (&sums)[RFD_MOST_SUMS], const RfdTensor& tensor, const Chunk& chunk, double scale,
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

// This thread's sums over its part of a row. The direction is that of the update to come. LINES, of a full
// row, is how many it has.
template <class I, class T, int LINES = 0>
__device__ __forceinline__ void leaf_row(double (&sums)[sums_of(I::KIND)], const RowTensor& here, const RowUnits& units,
                                         double scale, double decay, double unscale)
{
    const RfdTensor& tensor = here.tensor;
    const View<I> view(tensor);
    const float* of_columns = here.variances.scales();
    constexpr bool FULL = LINES > 0;
    const int lines = FULL ? LINES : static_cast<int>(here.lines);
    const bool moves = has_velocity<I>(decay), locks = is_generic<I>() && tensor.flags & RFD_TENSOR_LOCK;
    const T narrow_decay = narrowed<T>(decay), narrow_unscale = narrowed<T>(unscale);
    Columns squares, direction, parameter, product, weighted;
    constexpr int AT_ONCE = FULL ? I::SUMMED_AT_ONCE : 1;
#pragma unroll AT_ONCE
    for (int first = 0; first < lines; first += AT_ONCE) {
        T g[AT_ONCE][RFD_QUAD], d[AT_ONCE][RFD_QUAD], scaled[RFD_QUAD];
        float u[AT_ONCE][RFD_QUAD];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (AT_ONCE == 1 || first + i < lines) {
                const Unit unit = units.unit<FULL>(first + i);
                load<Reuse::later>(g[i], view.grad, tensor.grad, unit);
                if (moves) {
                    load<Reuse::later>(d[i], view.state(), tensor.velocity, unit);
                }
                units.scales<FULL>(u[i], of_columns, first + i);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (AT_ONCE > 1 && first + i >= lines) {
                continue;
            }
#pragma unroll
            for (int c = 0; c < RFD_QUAD; ++c) {
                scaled[c] = view.grad == RFD_DTYPE_F64 ? static_cast<T>(g[i][c] * scale) : g[i][c];
                d[i][c] = moves ? next_velocity(d[i][c], g[i][c], narrow_decay, narrow_unscale, view.state()) : g[i][c];
            }
            squares.add(scaled, scaled);
            direction.add(d[i], d[i], u[i]);
            if constexpr (is_generic<I>()) {
                static_assert(AT_ONCE == 1);
                if (locks) {
                    T p[RFD_QUAD];
                    load<Reuse::later>(p, view.param, view.weights, units.unit<FULL>(first));
                    parameter.add(p, p);
                    product.add(p, d[i], u[i]);
                    weighted.add_twice(d[i], d[i], u[i]);
                }
            }
        }
    }
    sums[RFD_SUM_SQUARES] = squares.leaf();
    sums[RFD_SUM_DIRECTION] = direction.leaf();
    if constexpr (is_generic<I>()) {
        sums[RFD_SUM_PARAMETER] = parameter.leaf();
        sums[RFD_SUM_PRODUCT] = product.leaf();
        sums[RFD_SUM_WEIGHTED] = weighted.leaf();
    }
}

// All sums of this warp over a chunk of rows, in its first lane, and the new averages of its rows. Of rows
// that several warps share they are not weighed yet.
template <class I>
__device__ __forceinline__ void warp_rows(double (&sums)[sums_of(I::KIND)], const Launch& launch, uint32_t index,
                                          const RowTensor& here, uint64_t chunk, double scale, double decay,
                                          double unscale)
{
    const View<I> view(here.tensor);
    const bool moves = has_velocity<I>(decay);
    const bool locks = is_generic<I>() && here.tensor.flags & RFD_TENSOR_LOCK;
    const uint64_t addresses = here.tensor.grad | (moves ? here.tensor.velocity : 0) | (locks ? view.weights : 0);
    const RowUnits units = here.units(chunk, addresses);
    if (view.in_f64()) {
        if constexpr (is_generic<I>()) {
            leaf_row<I, double>(sums, here, units, scale, decay, unscale);
        }
    } else if (!is_generic<I>() && here.lines == 4 && here.is_full(chunk, addresses)) {
        leaf_row<I, float, 4>(sums, here, units, scale, decay, unscale);
    } else if (!is_generic<I>() && here.lines == 3 && here.is_full(chunk, addresses)) {
        leaf_row<I, float, 3>(sums, here, units, scale, decay, unscale);
    } else {
        leaf_row<I, float>(sums, here, units, scale, decay, unscale);
    }
#pragma unroll
    for (int n = 0; n < sums_of(I::KIND); ++n) {
        sums[n] = join_lanes(sums[n], here.lanes);
    }
    if (here.lanes > 32) {
        return;
    }
    const bool leads = threadIdx.x % here.lanes == 0 && here.row_of(chunk) < here.tensor.rows;
    if (leads) {
        const RowPlaces places(launch, index);
        weigh_row(sums, here.variances, places, here.row_of(chunk), units.length, unscale, moves);
    }
#pragma unroll
    for (int n = 0; n < sums_of(I::KIND); ++n) {
        sums[n] = join_rows(leads ? sums[n] : 0.0, here.lanes);
    }
}

// All sums of this leaf over a chunk that does not consist of rows; how many there are.
template <class I>
__device__ __forceinline__ int leaf_sums(double (&sums)[sums_of(I::KIND)], const Launch& launch,
                                         const RfdTensor& tensor, uint64_t index, const Cursor& cursor, double scale,
                                         double unscale)
{
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
        if (view.grad == RFD_DTYPE_F64) {
            sums[0] = leaf_squares<I, double, false>(tensor, cursor.chunk(index, tensor.grad), scale);
            return 1;
        }
    }
    const Chunk chunk = cursor.chunk(index, tensor.grad);
    if (chunk.count < RFD_CHUNK) {
        sums[0] = leaf_squares<I, float, false>(tensor, chunk, scale);
    } else if constexpr (is_generic<I>()) {
        switch (grad_format(tensor)) {
        case RFD_DTYPE_F32: sums[0] = whole_squares<Alike<RFD_DTYPE_F32, RFD_DTYPE_F32, false>>(tensor, chunk); break;
        case RFD_DTYPE_F16: sums[0] = whole_squares<Alike<RFD_DTYPE_F32, RFD_DTYPE_F16, false>>(tensor, chunk); break;
        default: sums[0] = whole_squares<Alike<RFD_DTYPE_F32, RFD_DTYPE_BF16, false>>(tensor, chunk);
        }
    } else {
        sums[0] = whole_squares<I>(tensor, chunk);
    }
    return 1;
}
