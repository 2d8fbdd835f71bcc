// The trees that sums fold in (docs/summation.md, section 1), and where sums lie.
#pragma once

#include "partition.cuh"

#define RFD_WARPS (RFD_THREADS / 32)
#define RFD_QUAD (RFD_COLUMNS / RFD_THREADS)

__device__ __forceinline__ double* chunk_sums(const RfdStep& step, int sum)
{
    return reinterpret_cast<double*>(step.chunk_sums) + sum * step.chunks;
}

__device__ __forceinline__ double* segment_sums(const RfdStep& step, int sum)
{
    return reinterpret_cast<double*>(step.segment_sums) + static_cast<uint64_t>(sum) * step.segments;
}

__device__ __forceinline__ double* tensor_sums(const RfdStep& step, int sum)
{
    return reinterpret_cast<double*>(step.tensor_sums) + static_cast<uint64_t>(sum) * step.tensor_count;
}

// The first five levels of the tree; the result is in lane 0.
__device__ __forceinline__ double warp_tree(double x)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_down_sync(RFD_FULL_WARP, x, distance);
    }
    return x;
}

// The last three: the sums of the groups of 32 leaves.
__device__ __forceinline__ double join_groups(const double (&group)[RFD_WARPS])
{
    return ((group[0] + group[4]) + (group[2] + group[6])) + ((group[1] + group[5]) + (group[3] + group[7]));
}

// Folds a list with one warp; the result is in its lane 0. Each lane stands for the eight leaves that are 32
// apart, and takes four of them at a time: as many loads and trees are under way at once, and all eight would
// need registers that others lack.
__device__ __forceinline__ double fold_by_warp(const double* terms, uint32_t count)
{
    const uint32_t lane = threadIdx.x % 32;
    double total = 0.0;
#pragma unroll 1
    for (uint32_t odd = 0; odd < 2; ++odd) {
        // Groups odd, odd + 2, odd + 4, odd + 6.
        double group[RFD_WARPS / 2] = {};
#pragma unroll 1
        for (uint32_t first = 32 * odd + lane; first < count; first += RFD_THREADS) {
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

// Folds a list of which each thread of the block has added its terms; the result is every thread's.
__device__ __forceinline__ double fold_by_block(double (&groups)[RFD_WARPS], double x)
{
    x = warp_tree(x);
    // Nobody writes before all have read.
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        groups[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return join_groups(groups);
}
