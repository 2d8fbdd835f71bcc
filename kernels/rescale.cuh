// f64 gradients whose squares leave the range of f64: the sums are formed again of gradients scaled by a
// power of two (docs/summation.md, section 1).
#pragma once

#include "decision.cuh"
#include "reduce.cuh"

// Whether squares overflowed or underflowed; the answer is the same in every thread of every block.
__device__ __forceinline__ bool needs_rescale(const Launch launch, DecisionScratch<Kind::generic>& scratch)
{
    const double* sums = tensor_sums(launch.step, RFD_SUM_SQUARES);
    double total = 0.0;
    for (uint32_t k = threadIdx.x; k < launch.step.tensor_count; k += RFD_THREADS) {
        total += launch.chunks_of(k) > 0 ? __ldcg(sums + k) : 0.0;
    }
    total = warp_tree(total);
    if (threadIdx.x % 32 == 0) {
        scratch.euclidean[threadIdx.x / 32] = total;
    }
    __syncthreads();
    total = join_groups(scratch.euclidean);
    // Nobody writes before all have read.
    __syncthreads();
    return total < power_of_two(RFD_TINY_EXPONENT) || total == RFD_F64_INFINITY;
}

// The largest |g| of this block's f64 gradients goes into the launch's.
__device__ __forceinline__ void find_largest(const Launch launch)
{
    const Range range = chunks_of_block(launch.step.chunks);
    Cursor cursor(launch, range.begin);
    double largest = 0.0;
    for (uint64_t index = range.begin; index < range.end; ++index) {
        cursor.advance(launch, index);
        if (grad_format(cursor.tensor()) != RFD_DTYPE_F64) {
            continue;
        }
        const Chunk chunk = chunk_of_rows(cursor.tensor(), index, cursor.tensor().grad);
#pragma unroll 1
        for (int row = 0; row < RFD_ROWS; ++row) {
            double g[RFD_QUAD];
            load<Reuse::later>(g, RFD_DTYPE_F64, cursor.tensor().grad, unit_of<RFD_QUAD, false>(chunk, row));
            for (int c = 0; c < RFD_QUAD; ++c) {
                largest = fmax(largest, fabs(g[c]));
            }
        }
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        largest = fmax(largest, __shfl_down_sync(RFD_FULL_WARP, largest, distance));
    }
    // Numbers that are not negative order as their bits do.
    if (threadIdx.x % 32 == 0 && largest > 0.0) {
        atomicMax(reinterpret_cast<unsigned long long*>(launch.step.largest_grad),
                  static_cast<unsigned long long>(__double_as_longlong(largest)));
    }
}

__device__ __forceinline__ double read_largest(const RfdStep& step)
{
    return __ldcg(reinterpret_cast<const double*>(step.largest_grad));
}

__device__ __forceinline__ void forget_largest(const RfdStep& step)
{
    *reinterpret_cast<double*>(step.largest_grad) = 0.0;
}

// e of the factor 2⁻ᵉ; 0 without f64 gradients that are positive and finite.
__device__ __forceinline__ int rescale_exponent(double largest)
{
    if (!(largest > 0.0 && is_finite(largest))) {
        return 0;
    }
    const int exponent = exponent_of(largest);
    return exponent > 1022 ? 1022 : exponent < -1022 ? -1022 : exponent;
}

// Within one cooperative launch; the exponent of the sums that are needed, 0 when those that are there will
// do.
__device__ __forceinline__ int find_exponent(const Launch& launch, DecisionScratch<Kind::generic>& scratch)
{
    if (!needs_rescale(launch, scratch)) {
        return 0;
    }
    find_largest(launch);
    grid_barrier();
    const int exponent = rescale_exponent(read_largest(launch.step));
    grid_barrier();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        forget_largest(launch.step);
    }
    return exponent;
}
