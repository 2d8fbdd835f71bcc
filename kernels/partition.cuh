// Which elements a block works on: a contiguous range of chunks, tensor after tensor.
#pragma once

#include "formats.cuh"
#include "instances.cuh"

// A launch's parameters, unpacked.
struct Launch {
    const RfdStep& step;
    const RfdTensor* tensors;
    const RfdPart* parts;  // null but in halves of a step with rows

    // A step in one launch leaves the parts out: what is there for them is no part of its code then.
    __device__ __forceinline__ Launch(const RfdStep& step, const RfdTable& table, uint64_t parts = 0)
        : step(step),
          tensors(step.tensors != 0 ? reinterpret_cast<const RfdTensor*>(step.tensors) : table.tensor),
          parts(reinterpret_cast<const RfdPart*>(parts))
    {
    }

    __device__ __forceinline__ const RfdGroup& group(uint32_t index) const
    {
        return reinterpret_cast<const RfdGroup*>(step.groups)[index];
    }

    // The first chunk behind a tensor's.
    __device__ __forceinline__ uint64_t end_of(uint32_t index) const
    {
        return index + 1 < step.tensor_count ? tensors[index + 1].first_chunk : step.chunks;
    }

    // Chunks of a tensor; 0 without elements or without gradient.
    __device__ __forceinline__ uint64_t chunks_of(uint32_t index) const
    {
        return end_of(index) - tensors[index].first_chunk;
    }

    // Averages of rows that are kept of a tensor.
    __device__ __forceinline__ uint64_t row_averages_of(uint32_t index) const
    {
        return parts != nullptr && parts[index].shared_rows > 0 ? parts[index].shared_rows : tensors[index].rows;
    }

    // Elements of the tensor, on all ranks.
    __device__ __forceinline__ double elements_of(uint32_t index) const
    {
        return parts != nullptr ? parts[index].elements : static_cast<double>(tensors[index].len);
    }

    // What ranks add up of a tensor, in halves of a step with rows.
    __device__ __forceinline__ RfdTensorNumbers& numbers_of(uint32_t index) const
    {
        double* all = reinterpret_cast<double*>(step.rank_sums);
        return *reinterpret_cast<RfdTensorNumbers*>(all + parts[index].first_number);
    }

    // Whether a tensor takes part in the step: it has a gradient, be it on another rank.
    __device__ __forceinline__ bool takes_part(uint32_t index) const
    {
        return parts != nullptr ? numbers_of(index).present > 0.0 : chunks_of(index) > 0;
    }

    // Whether it counts in the norm if it takes part. What ranks have added up is from where it does.
    __device__ __forceinline__ bool counts(uint32_t index) const
    {
        return parts != nullptr || (tensors[index].flags & RFD_TENSOR_COUNTS) != 0;
    }
};

struct Range {
    uint64_t begin, end;
};

// The same number of chunks for every block, up to one.
__device__ __forceinline__ Range chunks_of_block(uint64_t chunks)
{
    const uint64_t block = blockIdx.x;
    return {block * chunks / gridDim.x, (block + 1) * chunks / gridDim.x};
}

// Elements of a chunk.
struct Chunk {
    uint64_t first;  // index in the tensor
    uint32_t count;
    bool aligned;  // all addresses that a pass uses are multiples of 16 bytes
};

// The last tensor that begins at or before a chunk; those without chunks begin where the next one does. By a
// whole warp, which looks at 32 places at once: each round is a trip to memory that the first gradient waits
// for.
__device__ __forceinline__ uint32_t tensor_of(const Launch& launch, uint64_t chunk)
{
    uint32_t low = 0, high = launch.step.tensor_count;
    while (high - low > 1) {
        const uint32_t stride = (high - low + 31) / 32, place = low + threadIdx.x % 32 * stride;
        const bool before = place < high && launch.tensors[place].first_chunk <= chunk;
        low += (__popc(__ballot_sync(RFD_FULL_WARP, before)) - 1) * stride;
        high = low + stride < high ? low + stride : high;
    }
    return low;
}

// The tensor that a chunk belongs to; moves along with a pass in either direction.
class Cursor {
public:
    __device__ __forceinline__ Cursor(const Launch& launch, uint64_t chunk)
    {
        if (launch.step.chunks > 0) {
            open(launch, tensor_of(launch, chunk));
        }
    }

    // At a tensor that is known; to go back from there.
    __device__ __forceinline__ Cursor(uint32_t index, const RfdTensor& tensor) : index_(index), tensor_(tensor) {}

    // To the tensor of a chunk that lies not before the one it is at.
    __device__ __forceinline__ void advance(const Launch& launch, uint64_t chunk)
    {
        while (chunk >= end_) {
            open(launch, index_ + 1);
        }
    }

    // To the tensor of a chunk that lies not behind the one it is at; whether that is another one.
    __device__ __forceinline__ bool retreat(const Launch& launch, uint64_t chunk)
    {
        const uint32_t before = index_;
        while (chunk < tensor_.first_chunk) {
            open(launch, index_ - 1);
        }
        return index_ != before;
    }

    __device__ __forceinline__ uint32_t index() const { return index_; }
    __device__ __forceinline__ const RfdTensor& tensor() const { return tensor_; }

    // A chunk of the tensor; `addresses` are those that the pass uses, or-ed.
    __device__ __forceinline__ Chunk chunk(uint64_t chunk, uint64_t addresses) const
    {
        const uint64_t first = (chunk - tensor_.first_chunk) * RFD_CHUNK;
        const uint64_t left = tensor_.len - first;
        return {first, left < RFD_CHUNK ? static_cast<uint32_t>(left) : RFD_CHUNK, addresses % 16 == 0};
    }

private:
    __device__ __forceinline__ void open(const Launch& launch, uint32_t index)
    {
        index_ = index;
        tensor_ = launch.tensors[index];
        end_ = launch.end_of(index);
    }

    uint32_t index_ = 0;
    RfdTensor tensor_ = {};
    uint64_t end_ = 0;
};

__device__ __forceinline__ int param_format(const RfdTensor& tensor)
{
    return tensor.formats & 15;
}

__device__ __forceinline__ int grad_format(const RfdTensor& tensor)
{
    return tensor.formats >> 4;
}

// This thread's elements of a row of a chunk, where a row is N elements for each thread. FULL promises that
// all exist and are aligned.
template <int N, bool FULL>
__device__ __forceinline__ Unit unit_of(const Chunk& chunk, int row)
{
    if (FULL) {
        // In this order: rows are at constant distances then, which cost no registers.
        return {chunk.first + threadIdx.x * N + static_cast<uint64_t>(row) * (RFD_THREADS * N), N, true};
    }
    const int offset = (row * RFD_THREADS + static_cast<int>(threadIdx.x)) * N;
    const int left = static_cast<int>(chunk.count) - offset;
    const int count = left > N ? N : left < 0 ? 0 : left;
    return {chunk.first + offset, count, chunk.aligned && count == N};
}

__device__ __forceinline__ bool is_full(const Chunk& chunk)
{
    return chunk.aligned && chunk.count == RFD_CHUNK;
}

// How a gradient lies: multiples of 16 bytes are read so, others element by element. Views of a bucket often
// are others, behind a tensor of odd size.
enum class Lies { aligned, anyhow };

template <Lies GRAD>
__device__ __forceinline__ Unit lying(const Unit& unit)
{
    return {unit.first, unit.count, unit.vector && GRAD == Lies::aligned};
}
