// The norm pass: every block sums its chunks; whoever completes a segment or a tensor folds it. After it, and
// a barrier, every block finds the sums of all tensors.
#pragma once

#include "sums.cuh"

// Chunks whose sums are joined at a time, by one warp, a lane each. Within a batch warps run ahead of one
// another, so that some load while others add.
#define RFD_BATCH 32

template <Kind KIND>
struct NormScratch {
    RowScratch<KIND> rows;
    // Two, so that a batch may begin while the one before is being joined.
    double warp_sums[2][RFD_BATCH][sums_of(KIND)][RFD_WARPS];
    uint32_t tensor[2][RFD_BATCH];
};

// Chunks [first, first + count), whose sums per warp lie in shared memory.
struct Batch {
    uint64_t first;
    uint32_t count;
    int buffer;
};

// Adds to a counter that is 0 between launches; whether that completes it, in which case it is 0 again, and
// what the others did before they added has happened.
__device__ __forceinline__ bool completes(uint64_t counters, uint64_t index, uint32_t count, uint32_t all)
{
    // Who does everything alone need not tell.
    if (count == all) {
        return true;
    }
    uint32_t* counter = reinterpret_cast<uint32_t*>(counters) + index;
    const bool last = add_in_order(counter, count) + count == all;
    if (last) {
        *counter = 0;
    }
    return last;
}

template <Kind KIND>
__device__ __forceinline__ int sums_of_tensor(const RfdStep& step, const RfdTensor& tensor)
{
    if constexpr (KIND != Kind::generic) {
        return sums_of(KIND);
    }
    const bool locks = tensor.flags & RFD_TENSOR_LOCK;
    return has_rows<KIND>(step) ? (locks ? RFD_MOST_SUMS : 2) : locks ? 4 : 1;
}

// Squares of formats other than f64 are scaled as sums: a power of two is exact there. 0 stays 0 at any
// scale.
template <Kind KIND>
__device__ __forceinline__ double scaled_squares(double sum, const RfdTensor& tensor, double scale)
{
    if (KIND != Kind::generic || scale == 1.0 || grad_format(tensor) == RFD_DTYPE_F64 || sum == 0.0) {
        return sum;
    }
    return sum * scale * scale;
}

// Folds one segment of a tensor, and the tensor if that was its last one. By one warp.
template <Kind KIND>
__device__ __forceinline__ void fold_segment(const Launch& launch, uint32_t index, uint32_t segment)
{
    const RfdStep& step = launch.step;
    const RfdTensor& tensor = launch.tensors[index];
    const uint64_t chunks = launch.chunks_of(index);
    const uint64_t before = static_cast<uint64_t>(segment) * RFD_CHUNKS_PER_SEGMENT;
    const uint64_t left = chunks - before;
    const int sums = sums_of_tensor<KIND>(step, tensor);
    const uint32_t segments =
        static_cast<uint32_t>((chunks + RFD_CHUNKS_PER_SEGMENT - 1) / RFD_CHUNKS_PER_SEGMENT);
    uint32_t terms = left < RFD_CHUNKS_PER_SEGMENT ? static_cast<uint32_t>(left) : RFD_CHUNKS_PER_SEGMENT;
    // The segment from its chunks, then the tensor from its segments; of a single one the segment's fold is
    // that of the tensor.
#pragma unroll 1
    for (bool of_chunks = true;; of_chunks = false, terms = segments) {
        const bool whole = !of_chunks || segments == 1;
#pragma unroll 1
        for (int n = 0; n < sums; ++n) {
            const double sum = fold_by_warp(of_chunks ? chunk_sums(step, n) + tensor.first_chunk + before
                                                      : segment_sums(step, n) + tensor.first_segment,
                                            terms);
            if (threadIdx.x == 0) {
                *(whole ? tensor_sums(step, n) + index : segment_sums(step, n) + tensor.first_segment + segment) = sum;
            }
        }
        if (whole) {
            return;
        }
        const bool last = threadIdx.x == 0 && completes(step.tensor_done, index, 1, segments);
        if (__ballot_sync(RFD_FULL_WARP, last) == 0) {
            return;
        }
        __syncwarp();
    }
}

// Adds what `count` warps have summed, a power of two of them, in the order of the tree.
__device__ __forceinline__ double join_warps(double* sums, uint32_t count)
{
    for (uint32_t half = count / 2; half > 0; half /= 2) {
        for (uint32_t i = 0; i < half; ++i) {
            sums[i] += sums[i + half];
        }
    }
    return sums[0];
}

// Weighs the rows of a chunk that several warps have summed each. By one thread.
template <Kind KIND>
__device__ __forceinline__ void weigh_wide_rows(const Launch launch, NormScratch<KIND>& scratch, int buffer, uint32_t place,
                                     uint32_t index, uint64_t chunk, uint64_t applied)
{
    constexpr int SUMS = sums_of(KIND);
    const RfdTensor& tensor = launch.tensors[index];
    const int count = sums_of_tensor<KIND>(launch.step, tensor);
    const Variances variances = variances_of<KIND>(launch, index, applied);
    const double decay = averaging_of<KIND>(launch.step), unscale = 1.0 / grad_scale_of(launch.step);
    const uint32_t warps = lanes_of(tensor.row) / 32;
    uint64_t row = (chunk - tensor.first_chunk) * (RFD_WARPS / warps);
    for (uint32_t first = 0; first < RFD_WARPS; first += warps, ++row) {
        double sums[SUMS] = {};
        for (int n = 0; n < count; ++n) {
            double* of_warps = scratch.warp_sums[buffer][place][n] + first;
            sums[n] = join_warps(of_warps, warps);
            for (uint32_t i = 0; i < warps; ++i) {
                of_warps[i] = 0.0;
            }
        }
        if (row >= tensor.rows) {
            continue;
        }
        const uint64_t left = tensor.len - row * tensor.row;
        const double elements = static_cast<double>(left < tensor.row ? left : tensor.row);
        weigh_row(sums, variances, RowPlaces(launch, index), row, elements, unscale, decay > 0.0);
        for (int n = 0; n < count; ++n) {
            scratch.warp_sums[buffer][place][n][first] = sums[n];
        }
    }
}

// Joins the sums of a batch, a chunk a lane, and folds what they complete. By the first warp.
template <Kind KIND>
__device__ __forceinline__ void finalize(const Launch launch, NormScratch<KIND>& scratch, const Batch batch, double scale)
{
    const RfdStep& step = launch.step;
    const uint32_t lane = threadIdx.x;
    const uint64_t chunk = batch.first + lane;
    const bool mine = lane < batch.count;
    uint32_t index = 0, segment = 0;
    bool last_of_segment = false, complete = false;
    if (mine) {
        index = scratch.tensor[batch.buffer][lane];
        const RfdTensor& tensor = launch.tensors[index];
        // A tensor of one chunk is folded when that is summed; adding 0 is what the folds would do.
        const bool whole = launch.chunks_of(index) == 1;
        const uint64_t place = whole ? index : chunk;
        if constexpr (KIND != Kind::fitted) {
            if (has_rows<KIND>(step) && lanes_of(tensor.row) > 32) {
                weigh_wide_rows<KIND>(launch, scratch, batch.buffer, lane, index, chunk, applied_steps(step));
            }
        }
        for (int n = 0; n < sums_of_tensor<KIND>(step, tensor); ++n) {
            double sum = join_groups(scratch.warp_sums[batch.buffer][lane][n]);
            sum = n == RFD_SUM_SQUARES ? scaled_squares<KIND>(sum, tensor, scale) : sum;
            // d is minus the new velocity.
            const bool negative = n == RFD_SUM_PRODUCT && launch.group(tensor.group).velocity_decay > 0.0;
            (whole ? tensor_sums(step, n) : chunk_sums(step, n))[place] = (negative ? -sum : sum) + 0.0;
        }
        segment = static_cast<uint32_t>((chunk - tensor.first_chunk) / RFD_CHUNKS_PER_SEGMENT);
        const uint64_t next = chunk + 1;
        last_of_segment = !whole && (lane + 1 == batch.count || next == launch.end_of(index) ||
                                     (next - tensor.first_chunk) % RFD_CHUNKS_PER_SEGMENT == 0);
    }
    __syncwarp();
    if (last_of_segment) {
        const uint64_t begin =
            launch.tensors[index].first_chunk + static_cast<uint64_t>(segment) * RFD_CHUNKS_PER_SEGMENT;
        const uint64_t left = launch.end_of(index) - begin;
        const uint64_t from = begin > batch.first ? begin : batch.first;
        complete = completes(step.segment_done, launch.tensors[index].first_segment + segment,
                             static_cast<uint32_t>(chunk + 1 - from),
                             left < RFD_CHUNKS_PER_SEGMENT ? static_cast<uint32_t>(left) : RFD_CHUNKS_PER_SEGMENT);
    }
    uint32_t pending = __ballot_sync(RFD_FULL_WARP, complete);
    __syncwarp();
    while (pending != 0) {
        const int source = __ffs(static_cast<int>(pending)) - 1;
        pending &= pending - 1;
        fold_segment<KIND>(launch, __shfl_sync(RFD_FULL_WARP, index, source),
                           __shfl_sync(RFD_FULL_WARP, segment, source));
    }
}

// The sums of this warp over one chunk after the other of a batch, in lean instances without rows.
template <class I>
class PlainSums {
public:
    __device__ __forceinline__ PlainSums(const Launch& launch, NormScratch<I::KIND>&, uint64_t first)
        : cursor_(launch, first)
    {
    }

    // How many there are.
    __device__ __forceinline__ int next(double (&sums)[1], const Launch& launch, uint64_t chunk, double, double)
    {
        cursor_.advance(launch, chunk);
        const RfdTensor& tensor = cursor_.tensor();
        sums[0] = warp_tree(leaf_of_chunk<I>(tensor, cursor_.chunk(chunk, tensor.grad)));
        return 1;
    }

    __device__ __forceinline__ uint32_t index() const { return cursor_.index(); }

private:
    Cursor cursor_;
};

// The same over chunks of rows, and in the generic instance over chunks as such.
template <class I>
class RowSums {
public:
    __device__ __forceinline__ RowSums(const Launch& launch, NormScratch<I::KIND>& scratch, uint64_t first)
        : cursor_(launch, scratch.rows.own(), tensor_of(launch, first), applied_steps(launch.step))
    {
    }

    __device__ __forceinline__ int next(double (&sums)[sums_of(I::KIND)], const Launch& launch, uint64_t chunk,
                                        double scale, double unscale)
    {
        cursor_.advance(launch, chunk);
        const RowTensor& here = cursor_.here;
        const bool rows = has_rows<I::KIND>(launch.step);
        double decay = rows ? averaging_of<I::KIND>(launch.step) : 0.0;
        // A captured table has no velocity where a momentum was set later: the decision refuses such a step.
        if (is_generic<I>() && !rows && here.tensor.flags & RFD_TENSOR_LOCK && here.tensor.velocity != 0) {
            decay = launch.group(here.tensor.group).velocity_decay;
        }
        const int count = sums_of_tensor<I::KIND>(launch.step, here.tensor);
        warp_rows<I>(sums, count, launch, cursor_.index(), here, chunk, {rows, scale, decay, unscale});
        sum_columns(here, chunk);
        return count;
    }

    __device__ __forceinline__ uint32_t index() const { return cursor_.index(); }

private:
    RowCursor<I::KIND> cursor_;
};

// Sums this block's chunks, in order.
template <class I, template <class> class Sums>
__device__ __forceinline__ void sum_chunks(const Launch& launch, NormScratch<I::KIND>& scratch, double scale)
{
    const uint32_t warp = threadIdx.x / 32;
    Batch batch{chunks_of_block(launch.step.chunks).begin, 0, 0};
    for (;; batch.first += batch.count, batch.buffer ^= 1) {
        // Found anew for each batch, as is what follows: kept, they would take registers while sums are
        // formed.
        const uint64_t end = chunks_of_block(launch.step.chunks).end;
        if (batch.first >= end) {
            return;
        }
        const uint64_t left = end - batch.first;
        batch.count = left < RFD_BATCH ? static_cast<uint32_t>(left) : RFD_BATCH;
        const double unscale = I::KIND == Kind::fitted ? 1.0 : 1.0 / grad_scale_of(launch.step);
        Sums<I> of_chunk(launch, scratch, batch.first);
        for (uint32_t i = 0; i < batch.count; ++i) {
            double sums[sums_of(I::KIND)];
            const int count = of_chunk.next(sums, launch, batch.first + i, scale, unscale);
#pragma unroll
            for (int n = 0; n < sums_of(I::KIND); ++n) {
                if (n < count && threadIdx.x % 32 == 0) {
                    scratch.warp_sums[batch.buffer][i][n][warp] = sums[n];
                }
            }
            if (threadIdx.x == 0) {
                scratch.tensor[batch.buffer][i] = of_chunk.index();
            }
        }
        __syncthreads();
        if (warp == 0) {
            finalize<I::KIND>(launch, scratch, batch, scale);
        }
    }
}

// `scale` multiplies the gradients: 1, or what rescaling f64 asks for.
template <class I>
__device__ __forceinline__ void norm_pass(const Launch& launch, NormScratch<I::KIND>& scratch, double scale)
{
    if constexpr (I::KIND == Kind::fitted) {
        sum_chunks<I, PlainSums>(launch, scratch, scale);
    } else {
        sum_chunks<I, RowSums>(launch, scratch, scale);
    }
}
