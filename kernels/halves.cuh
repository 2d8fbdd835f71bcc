// The halves of a step of the adaptive method in sharded training (docs/summation.md, section 7): what ranks
// add up, and what becomes of it. Both go over the tensors, a block for each.
#pragma once

#include "method.cuh"

struct FoldScratch {
    double groups[RFD_WARPS];
};

// The doubles behind a tensor's numbers: those of columns, then those of rows that ranks share.
__device__ __forceinline__ double* numbers_of_columns(const Launch& launch, uint32_t k)
{
    return reinterpret_cast<double*>(&launch.numbers_of(k) + 1);
}

__device__ __forceinline__ double* numbers_of_rows(const Launch& launch, uint32_t k)
{
    return numbers_of_columns(launch, k) + launch.parts[k].whole_columns;
}

// The place of a column of the part among those of the whole tensor.
__device__ __forceinline__ uint64_t place_of(const RfdPart& part, uint64_t column)
{
    return part.places != 0 ? reinterpret_cast<const uint32_t*>(part.places)[column] : column;
}

// The seven numbers of a tensor. By one thread.
__device__ __forceinline__ void write_numbers(const Launch& launch, uint32_t k, uint64_t applied, double unscale)
{
    const RfdPart& part = launch.parts[k];
    const RfdTensor& tensor = launch.tensors[k];
    const bool present = launch.chunks_of(k) > 0;
    RfdTensorNumbers& numbers = launch.numbers_of(k);
    (present ? numbers.present : numbers.missing) = tensor.len > 0 ? 1.0 : 0.0;
    if (!present) {
        return;
    }
    const double squares = __ldcg(tensor_sums(launch.step, RFD_SUM_SQUARES) + k);
    if (tensor.flags & RFD_TENSOR_COUNTS) {
        const double direction = __ldcg(tensor_sums(launch.step, RFD_SUM_DIRECTION) + k);
        numbers.elements = static_cast<double>(tensor.len);
        numbers.squares = squares;
        numbers.direction = part.shared_rows > 0 ? 0.0 : direction;
        numbers.sampled = Adaptive::sampled_square(launch, k, applied, unscale) * part.share;
    } else if (!is_finite(squares)) {
        // Then all skip.
        numbers.squares = squares;
    }
}

// Writes what ranks add up of this one's tensors, but for the sums over parameters.
__device__ __forceinline__ void write_local_sums(const Launch& launch)
{
    const uint64_t applied = applied_steps(launch.step);
    const double unscale = 1.0 / grad_scale_of(launch.step);
    for (uint32_t k = blockIdx.x; k < launch.step.tensor_count; k += gridDim.x) {
        if (threadIdx.x == 0) {
            write_numbers(launch, k, applied, unscale);
        }
        const RfdPart& part = launch.parts[k];
        const RfdTensor& tensor = launch.tensors[k];
        if (launch.chunks_of(k) == 0 || !(tensor.flags & RFD_TENSOR_COUNTS)) {
            continue;
        }
        const Variances variances = Adaptive::variances(launch, k, applied);
        for (uint32_t column = threadIdx.x; column < variances.columns; column += RFD_THREADS) {
            const double square = Adaptive::column_square(launch, k, variances, column, applied, unscale);
            numbers_of_columns(launch, k)[place_of(part, column)] = square * part.height_share;
        }
        if (part.shared_rows == 0) {
            continue;
        }
        // The pieces of a row in their order.
        for (uint64_t row = threadIdx.x; row * part.pieces < tensor.rows; row += RFD_THREADS) {
            const uint64_t first = row * part.pieces, left = tensor.rows - first;
            const uint64_t end = first + (left < part.pieces ? left : part.pieces);
            double squares = 0.0, direction = 0.0;
            for (uint64_t piece = first; piece < end; ++piece) {
                squares += __ldcg(variances.row_sums(piece));
                direction += __ldcg(variances.row_sums(piece) + 1);
            }
            double* numbers = numbers_of_rows(launch, k) + 2 * (part.first_row + row);
            numbers[0] = squares;
            numbers[1] = direction;
        }
    }
}

// The direction of a tensor whose rows ranks share, which is every thread's, and their new averages. By all
// threads.
__device__ __forceinline__ double fold_shared_rows(const Launch& launch, FoldScratch& scratch, uint32_t k,
                                                   const Variances& variances, double unscale)
{
    const RfdPart& part = launch.parts[k];
    const double* numbers = numbers_of_rows(launch, k);
    double direction = 0.0;
    for (uint64_t row = threadIdx.x; row < part.shared_rows; row += RFD_THREADS) {
        const double squares = numbers[2 * row] * unscale * unscale;
        direction += next_row_scale(variances, row, part.row, squares) * numbers[2 * row + 1];
    }
    return fold_by_block(scratch.groups, direction);
}

// Puts what all ranks have added up in the place of this one's own sums, and forms what follows from it:
// length scales before the first step, averages of columns and of rows that ranks share.
__device__ __forceinline__ void take_sums(const Launch& launch, FoldScratch& scratch)
{
    const RfdStep& step = launch.step;
    const uint64_t applied = applied_steps(step);
    const double unscale = 1.0 / grad_scale_of(step);
    // Then there is no step, and the parameters' sums may be torn as well.
    const bool torn = Adaptive::any_torn(launch);
    for (uint32_t k = blockIdx.x; k < step.tensor_count; k += gridDim.x) {
        const RfdPart& part = launch.parts[k];
        const RfdTensorNumbers& numbers = launch.numbers_of(k);
        if (threadIdx.x == 0 && !torn) {
            Adaptive::take_length(step.adaptive, Adaptive::history_of(step, applied, k), launch.tensors[k],
                                  numbers.parameter, part.elements);
        }
        if (!launch.takes_part(k)) {
            continue;
        }
        const Variances variances = Adaptive::variances(launch, k, applied);
        const double direction = part.shared_rows > 0 ? fold_shared_rows(launch, scratch, k, variances, unscale)
                                                      : numbers.direction;
        if (threadIdx.x == 0) {
            tensor_sums(step, RFD_SUM_SQUARES)[k] = numbers.squares;
            tensor_sums(step, RFD_SUM_DIRECTION)[k] = direction;
        }
        const double mean = Adaptive::next_column_mean(step, applied, k, numbers.sampled);
        for (uint32_t column = threadIdx.x; column < variances.columns; column += RFD_THREADS) {
            const double square = numbers_of_columns(launch, k)[place_of(part, column)];
            const double average = Adaptive::next_column(variances, column, square);
            Adaptive::store_column(launch, variances, column, average, mean);
        }
    }
}
