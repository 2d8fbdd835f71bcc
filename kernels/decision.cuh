// From the sums of all tensors to the step, the same in every block.
#pragma once

#include "method.cuh"

__device__ __forceinline__ bool is_valid(const RfdGroup& group)
{
    // The factor's square enters the norm: it has to be a normal number.
    const double square = group.length_scale_factor * group.length_scale_factor;
    return group.length_scale_factor > 0.0 && square >= power_of_two(-1022) && is_finite(square) &&
           not_negative(group.multiplier) && not_negative(group.weight_decay) && group.velocity_decay >= 0.0 &&
           group.velocity_decay < 1.0;
}

__device__ __forceinline__ bool is_valid(const RfdSettings& settings, double grad_scale)
{
    return not_negative(settings.multiplier) && settings.max_step_size > 0.0 && grad_scale > 0.0 &&
           is_finite(grad_scale);
}

// Reads all that a step depends on beside tensors, and forms what needs no sums. Called before the sums are
// there: to have the waiting over by then, and because behind the barrier the first block counts this step.
// By all threads, but the first warp has other work: after the norm pass it still joins sums.
template <Kind KIND>
__device__ __forceinline__ void load_settings(const Launch& launch, DecisionScratch<KIND>& scratch)
{
    const RfdStep& step = launch.step;
    bool valid = true, moves = false;
    if (threadIdx.x >= 32) {
        const uint32_t first = threadIdx.x - 32, stride = RFD_THREADS - 32;
        if (first == 0) {
            // All loads before the first store: the compiler can't know that they don't overlap.
            const RfdSettings settings = settings_of(step);
            const double grad_scale = grad_scale_of(step), loss = loss_of(step);
            const uint64_t applied = applied_steps(step);
            const bool spoilt = found_inf(step);
            scratch.settings = settings;
            scratch.grad_scale = grad_scale;
            scratch.decision = Decision{};
            scratch.decision.loss = loss;
            scratch.decision.decay_share = 1.0;
            scratch.decision.unscale = quotient(1.0, grad_scale);
            scratch.decision.applied = applied;
            scratch.decision.outcome = spoilt ? RFD_OUTCOME_FOUND_INF : RFD_OUTCOME_APPLIED;
            valid = (KIND != Kind::generic || is_method(step.method)) &&
                    is_valid(scratch.settings, scratch.grad_scale) && method_accepts<KIND>(step, scratch.settings);
            prepare<KIND>(launch, scratch);
        }
        const Range range = chunks_of_block(step.chunks);
        if (range.begin < range.end) {
            const uint32_t last = tensor_of(launch, range.end - 1);
            if (first == 0) {
                scratch.last_index = last;
                scratch.last = launch.tensors[last];
            }
        }
        for (uint32_t i = first; i < step.group_count; i += stride) {
            const RfdGroup group = launch.group(i);
            valid = valid && is_valid(group) && method_accepts<KIND>(step, group);
            moves = moves || group.velocity_decay != 0.0;
            if (i < RFD_SHARED_GROUPS) {
                scratch.groups[i] = group;
            }
        }
        for (uint32_t k = first; k < step.tensor_count; k += stride) {
            // Momentum that was switched on without a buffer for the velocity.
            const RfdTensor& tensor = launch.tensors[k];
            valid = valid && (tensor.velocity != 0 || launch.group(tensor.group).velocity_decay == 0.0 ||
                              launch.chunks_of(k) == 0);
        }
    }
    valid = __syncthreads_and(valid) != 0;
    moves = __syncthreads_and(!moves) == 0;
    if (threadIdx.x == 0) {
        scratch.valid = valid;
        scratch.moves = moves;
    }
    __syncthreads();
}

// Has the lines brought near that load_settings will read.
__device__ __forceinline__ void prefetch_settings(const RfdStep& step)
{
    if (threadIdx.x == 0) {
        prefetch(step.settings);
        prefetch(step.status);
    } else if (threadIdx.x == 1 && step.loss != 0) {
        prefetch(step.loss);
    } else if (threadIdx.x == 2 && step.grad_scale != 0) {
        prefetch(step.grad_scale);
    }
    const uint32_t line = 128 / sizeof(RfdGroup), group = (threadIdx.x - 32) * line;
    if (threadIdx.x >= 32 && group < step.group_count) {
        prefetch(step.groups + group * sizeof(RfdGroup));
    }
}

// Folds the sums of all tensors.
template <Kind KIND>
__device__ __forceinline__ Totals total_squares(const Launch& launch, DecisionScratch<KIND>& scratch, int exponent)
{
    const double* sums = tensor_sums(launch.step, RFD_SUM_SQUARES);
    double euclidean = 0.0, sigma = 0.0;
    bool finite = true;
    for (uint32_t k = threadIdx.x; k < launch.step.tensor_count; k += RFD_THREADS) {
        // Of a tensor that takes no part nothing was summed; what lies there is old.
        const double sum = launch.takes_part(k) ? __ldcg(sums + k) : 0.0;
        const RfdTensor& tensor = launch.tensors[k];
        finite = finite && is_finite(sum);
        if (launch.counts(k)) {
            const double factor = scratch.group(launch, tensor.group).length_scale_factor;
            euclidean += sum;
            sigma += factor * factor * sum;
        }
    }
    euclidean = warp_tree(euclidean);
    sigma = warp_tree(sigma);
    if (threadIdx.x % 32 == 0) {
        scratch.euclidean[threadIdx.x / 32] = euclidean;
        scratch.sigma[threadIdx.x / 32] = sigma;
    }
    finite = __syncthreads_and(finite) != 0;
    return {join_groups(scratch.euclidean), join_groups(scratch.sigma), exponent, finite};
}

// After load_settings and a barrier; leaves the decision in shared memory. `exponent` is that of the tensors'
// sums, after rescaling.
template <Kind KIND>
__device__ __forceinline__ void decide(const Launch launch, DecisionScratch<KIND>& scratch, int exponent)
{
    const RfdStep& step = launch.step;
    if (scratch.decision.outcome == RFD_OUTCOME_FOUND_INF) {
        return;
    }
    Totals totals;
    if (KIND != Kind::averaged && launch.parts == nullptr && step.rank_sums != 0) {
        const RfdSquaredNorm& given = *reinterpret_cast<const RfdSquaredNorm*>(step.rank_sums);
        totals = {given.euclidean, given.sigma, 0, true};
        // All have read the outcome before one of them writes it.
        __syncthreads();
    } else {
        totals = total_squares<KIND>(launch, scratch, exponent);
    }
    decide_by_method<KIND>(launch, scratch, totals);
}

// Forms what only the report tells, then counts the step: writes the status and its mirror, the counts first
// and the sequence last (see RfdStatus on how to read them). By one thread of the launch, when no block needs
// the old counts any more.
template <Kind KIND>
__device__ __forceinline__ void write_status(const Launch& launch, DecisionScratch<KIND>& scratch)
{
    const RfdStep& step = launch.step;
    Decision& decision = scratch.decision;
    if (decision.outcome != RFD_OUTCOME_FOUND_INF) {
        complete_report<KIND>(launch, scratch);
    }
    volatile RfdStatus* status = reinterpret_cast<volatile RfdStatus*>(step.status);
    volatile RfdStatus* mirror = step.mirror != 0 ? reinterpret_cast<volatile RfdStatus*>(step.mirror) : status;
    const uint64_t counts = decision.outcome == RFD_OUTCOME_APPLIED ? 1 : 0;
    const uint64_t applied = decision.applied + counts, skipped = status->skipped + (1 - counts);
    volatile RfdStatus* copies[] = {status, mirror};
#pragma unroll
    for (volatile RfdStatus* copy : copies) {
        copy->applied = applied;
        copy->skipped = skipped;
    }
    system_fence();
#pragma unroll
    for (volatile RfdStatus* copy : copies) {
        copy->loss = decision.loss;
        copy->grad_norm = decision.grad_norm;
        copy->sigma_norm = decision.sigma_norm;
        copy->theta = decision.theta;
        copy->step_size = decision.step_size;
        copy->learning_rate = decision.learning_rate;
        copy->trust = decision.trust;
        copy->limit = decision.limit;
        copy->outcome = decision.outcome;
    }
    system_fence();
#pragma unroll
    for (volatile RfdStatus* copy : copies) {
        copy->sequence = applied + skipped;
    }
}
