// Rows and columns of a tensor (docs/summation.md, sections 1 and 6): how chunks consist of whole rows, and
// the variances by which elements are weighed.
#pragma once

#include "scalars.cuh"
#include "tree.cuh"

// Threads that sum a row of so many elements: a power of two, as few as hold it.
__device__ __forceinline__ uint32_t lanes_of(uint32_t row)
{
    const uint32_t lanes = (row + RFD_CHUNK / RFD_THREADS - 1) / (RFD_CHUNK / RFD_THREADS);
    return lanes <= 1 ? 1 : 1u << (32 - __clz(static_cast<int>(lanes - 1)));
}

// Elements of a chunk.
__device__ __forceinline__ uint32_t chunk_size(uint32_t row)
{
    return RFD_THREADS / lanes_of(row) * row;
}

// A chunk as such, of a tensor that may consist of rows.
__device__ __forceinline__ Chunk chunk_of_rows(const RfdTensor& tensor, uint64_t index, uint64_t addresses)
{
    const uint32_t size = chunk_size(tensor.row);
    const uint64_t first = (index - tensor.first_chunk) * size, left = tensor.len - first;
    return {first, left < size ? static_cast<uint32_t>(left) : size, (addresses | size % 4) % 16 == 0};
}

// What this thread works on of a chunk of rows: a part of one row, a few neighbouring elements of each of its
// lines.
struct RowUnits {
    uint64_t begin;   // the row's first element
    uint32_t length;  // the row's elements; 0 without a row
    uint32_t offset;  // of this thread in a line
    uint32_t stride;  // elements of a line
    bool whole;       // of each unit all exist or none, and it begins at a multiple of four

    // Whether some exist of a line; of lines behind one of which none exists none does.
    __device__ __forceinline__ bool has(int line) const
    {
        return unit(line).count > 0;
    }

    // FULL promises that all exist.
    template <bool FULL = false>
    __device__ __forceinline__ Unit unit(int line) const
    {
        if (FULL) {
            return {begin + offset + static_cast<uint64_t>(line) * stride, RFD_QUAD, true};
        }
        const uint32_t at = static_cast<uint32_t>(line) * stride + offset;
        const int left = static_cast<int>(length) - static_cast<int>(at);
        return {begin + at, left > RFD_QUAD ? RFD_QUAD : left < 0 ? 0 : left, false};
    }

    // The scales of the columns of a line's elements; 1 without columns.
    template <bool FULL>
    __device__ __forceinline__ void scales(float (&u)[RFD_QUAD], const float* of_columns, int line) const
    {
        const uint32_t at = static_cast<uint32_t>(line) * stride + offset;
        if (of_columns != nullptr && (FULL || at + RFD_QUAD <= length)) {
            const uint4 four = __ldg(reinterpret_cast<const uint4*>(of_columns + at));
            memcpy(u, &four, sizeof(u));
            return;
        }
#pragma unroll
        for (int c = 0; c < RFD_QUAD; ++c) {
            u[c] = of_columns != nullptr && at + c < length ? __ldg(of_columns + at + c) : 1.0f;
        }
    }
};

// An average of decay `decay` after one more number.
__device__ __forceinline__ double averaged(double decay, double before, double now)
{
    return decay * before + (1.0 - decay) * now;
}

// The variances of one tensor: where they lie, as src/optimizer/device/buffers.rs lays them out, and how they
// change in a step.
struct Variances {
    uint64_t from, to;  // addresses of the side that is read and of that which is written
    uint32_t columns;   // 0 without
    double decay;
    double weight;  // of the rows' averages once they have seen the step
    double floor;   // what is added to each row's

    Variances() = default;

    // Sides by `turn`.
    __device__ __forceinline__ Variances(const Launch& launch, uint32_t k, bool turn)
        : columns(launch.tensors[k].flags & RFD_TENSOR_COLUMNS ? launch.tensors[k].row : 0)
    {
        const RfdTensor& tensor = launch.tensors[k];
        const uint64_t size = (scales_size() + 8 * (columns + launch.row_averages_of(k)) + 15) / 16 * 16;
        from = tensor.variances + (turn ? size : 0);
        to = tensor.variances + (turn ? 0 : size);
        sums_ = tensor.variances + 2 * size;
    }

    __device__ __forceinline__ const double* rows_before() const { return rows_at(from); }
    __device__ __forceinline__ double* rows_after() const { return rows_at(to); }
    __device__ __forceinline__ const double* columns_before() const { return columns_at(from); }
    __device__ __forceinline__ double* columns_after() const { return columns_at(to); }
    __device__ __forceinline__ float* scales_after() const { return reinterpret_cast<float*>(to); }

    // Null without columns.
    __device__ __forceinline__ const float* scales() const
    {
        return columns > 0 ? reinterpret_cast<const float*>(from) : nullptr;
    }

    // Sums over the rows of a sampled chunk, by column.
    __device__ __forceinline__ double* column_sums(uint64_t sampled) const
    {
        return reinterpret_cast<double*>(sums_) + sampled * columns;
    }

    // The two sums over a row of the part that is a piece of one that ranks share.
    __device__ __forceinline__ double* row_sums(uint64_t row) const
    {
        return column_sums(RFD_SAMPLED_CHUNKS) + 2 * row;
    }

    __device__ __forceinline__ double next(double before, double mean_square) const
    {
        return averaged(decay, before, mean_square);
    }

    // w of a row with this average.
    __device__ __forceinline__ double scale(double average) const
    {
        const double variance = average / weight + floor;
        return variance > 0.0 ? 1.0 / sqrt(variance) : 0.0;
    }

private:
    uint64_t sums_;

    __device__ __forceinline__ uint64_t scales_size() const
    {
        return (sizeof(float) * static_cast<uint64_t>(columns) + 15) / 16 * 16;
    }
    __device__ __forceinline__ double* columns_at(uint64_t side) const
    {
        return reinterpret_cast<double*>(side + scales_size());
    }
    __device__ __forceinline__ double* rows_at(uint64_t side) const { return columns_at(side) + columns; }
};

// A tensor with all that passes over its rows ask for; without rows its chunks are rows. Each warp has one,
// in shared memory: the registers go to elements.
struct RowTensor {
    RfdTensor tensor;
    Variances variances;
    Change change;    // of the update
    uint64_t applied;  // steps before this one
    uint64_t chunks;
    uint32_t lanes;   // of a row
    uint32_t lines;   // of a row: at most RFD_ROWS

    // This thread's part of a chunk.
    __device__ __forceinline__ RowUnits units(uint64_t chunk) const
    {
        const uint64_t begin = row_of(chunk) * tensor.row, left = begin < tensor.len ? tensor.len - begin : 0;
        const uint32_t length = left < tensor.row ? static_cast<uint32_t>(left) : tensor.row;
        return {begin, length, threadIdx.x % lanes * RFD_QUAD, lanes * RFD_QUAD,
                (tensor.row | length) % RFD_QUAD == 0};
    }

    // This thread's row of a chunk.
    __device__ __forceinline__ uint64_t row_of(uint64_t chunk) const
    {
        return (chunk - tensor.first_chunk) * (RFD_THREADS / lanes) + threadIdx.x / lanes;
    }

    // Elements of a chunk.
    __device__ __forceinline__ uint32_t chunk_size() const { return RFD_THREADS / lanes * tensor.row; }

    // Whether every thread has all elements of every line: the same for all threads.
    __device__ __forceinline__ bool is_full(uint64_t chunk) const
    {
        return tensor.row == lines * lanes * RFD_QUAD && (chunk - tensor.first_chunk + 1) * chunk_size() <= tensor.len;
    }
};

// One for each warp, of kinds that may have rows.
template <Kind KIND>
struct RowScratch {
    RowTensor of_warp[RFD_WARPS];

    __device__ __forceinline__ RowTensor& own() { return of_warp[threadIdx.x / 32]; }
};

template <>
struct RowScratch<Kind::fitted> {};

// Where the averages of a tensor's rows lie, which may be pieces of rows that ranks share.
struct RowPlaces {
    uint32_t first, pieces;  // pieces of each; 0 where rows are whole

    __device__ __forceinline__ RowPlaces(const Launch& launch, uint32_t index) : first(0), pieces(0)
    {
        if (launch.parts != nullptr && launch.parts[index].shared_rows > 0) {
            first = launch.parts[index].first_row;
            pieces = launch.parts[index].pieces;
        }
    }

    __device__ __forceinline__ uint64_t of(uint64_t row) const
    {
        return pieces > 0 ? first + static_cast<uint32_t>(row) / pieces : row;
    }
};

// w of a row, from its variance after the step.
__device__ __forceinline__ double row_scale(const RowTensor& here, uint64_t row)
{
    return here.variances.scale(__ldcg(here.variances.rows_after() + row));
}

// The same once the row's squared gradient, its scale removed, is known: writes the variance.
__device__ __forceinline__ double next_row_scale(const Variances& variances, uint64_t row, double elements, double squares)
{
    const double average = variances.next(__ldcg(variances.rows_before() + row), squares / elements);
    __stcg(variances.rows_after() + row, average);
    return variances.scale(average);
}

// Makes of the sums over one row what they are in the tensor's. `moves`: by a velocity; without one the
// gradient scale is in the sums still. What a piece of a row weighs is not known yet: its sums are kept.
template <int COUNT>
__device__ __forceinline__ void weigh_row(double (&sums)[COUNT], const Variances& variances, const RowPlaces& places,
                                          uint64_t row, double elements, double unscale, bool moves)
{
    const auto unscaled = [&](double direction) { return moves ? direction : direction * unscale * unscale; };
    if (places.pieces > 0) {
        double* kept = variances.row_sums(row);
        __stcg(kept, sums[RFD_SUM_SQUARES]);
        __stcg(kept + 1, unscaled(sums[RFD_SUM_DIRECTION]));
        return;
    }
    const double w = next_row_scale(variances, row, elements, sums[RFD_SUM_SQUARES] * unscale * unscale);
    sums[RFD_SUM_DIRECTION] = w * unscaled(sums[RFD_SUM_DIRECTION]);
    if constexpr (COUNT > RFD_SUM_WEIGHTED) {
        sums[RFD_SUM_PRODUCT] = w * sums[RFD_SUM_PRODUCT];
        sums[RFD_SUM_WEIGHTED] = w * w * sums[RFD_SUM_WEIGHTED];
    }
}

// What a method inherits that has no rows; only `has_rows` is ever called.
struct WithoutRows {
    static __device__ __forceinline__ bool has_rows(const RfdStep&) { return false; }
    static __device__ __forceinline__ double averaging(const RfdStep&) { return 0.0; }
    static __device__ __forceinline__ Variances variances(const Launch& launch, uint32_t k, uint64_t)
    {
        return {launch, k, false};
    }
    static __device__ __forceinline__ void fold_columns(const Launch&, const Decision&, uint32_t, const Variances&,
                                                        uint64_t)
    {
    }
};

// The levels of the tree below and above rows of so many lanes, within a warp.
__device__ __forceinline__ double join_lanes(double x, uint32_t lanes)
{
#pragma unroll
    for (uint32_t distance = 16; distance > 0; distance /= 2) {
        if (distance < lanes) {
            x += __shfl_down_sync(RFD_FULL_WARP, x, distance);
        }
    }
    return x;
}

__device__ __forceinline__ double join_rows(double x, uint32_t lanes)
{
#pragma unroll
    for (uint32_t distance = 16; distance > 0; distance /= 2) {
        if (distance >= lanes) {
            x += __shfl_down_sync(RFD_FULL_WARP, x, distance);
        }
    }
    return x;
}

// The chunks of a tensor that tell of its columns in a step: every so many, from one on.
struct Sample {
    uint64_t first, stride;

    __device__ __forceinline__ Sample(uint64_t chunks, uint64_t applied)
    {
        stride = (chunks + RFD_SAMPLED_CHUNKS - 1) / RFD_SAMPLED_CHUNKS;
        stride = stride > 0 ? stride : 1;
        first = applied % stride;
    }

    __device__ __forceinline__ bool has(uint64_t chunk) const { return chunk % stride == first; }
    __device__ __forceinline__ uint64_t place(uint64_t chunk) const { return chunk / stride; }
};

// One element as f64, exactly.
__device__ __forceinline__ double element_of(int format, uint64_t address, uint64_t index)
{
    switch (format) {
    case RFD_DTYPE_F64: return __ldcg(reinterpret_cast<const double*>(address) + index);
    case RFD_DTYPE_F32: return __ldcg(reinterpret_cast<const float*>(address) + index);
    case RFD_DTYPE_F16: return widen_f16(__ldcg(reinterpret_cast<const uint16_t*>(address) + index));
    default: return widen_bf16(__ldcg(reinterpret_cast<const uint16_t*>(address) + index));
    }
}

// Squares of a chunk, added from row to row by column, if it tells of columns in this step. By all threads.
__device__ __forceinline__ void sum_columns(const RowTensor& here, uint64_t chunk)
{
    if (here.variances.columns == 0) {
        return;
    }
    const RfdTensor& tensor = here.tensor;
    const Sample sample(here.chunks, here.applied);
    const uint64_t index = chunk - tensor.first_chunk;
    if (!sample.has(index)) {
        return;
    }
    const uint32_t size = here.chunk_size();
    const uint64_t first = index * size, left = tensor.len - first;
    const uint32_t count = left < size ? static_cast<uint32_t>(left) : size;
    double* sums = here.variances.column_sums(sample.place(index));
    for (uint32_t column = threadIdx.x; column < tensor.row; column += RFD_THREADS) {
        double sum = 0.0;
#pragma unroll 4
        for (uint32_t at = column; at < count; at += tensor.row) {
            const double g = element_of(grad_format(tensor), tensor.grad, first + at);
            sum += g * g;
        }
        __stcg(sums + column, sum);
    }
}
