// What a step knows before it decides: settings, loss, and the sums of all tensors together.
#pragma once

#include "conservative.cuh"
#include "reduce.cuh"

struct NoSearch {};

template <bool CONDITION, class A, class B>
struct Either {
    using Type = A;
};

template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

// What the threads of a block share while they decide.
template <Kind KIND>
struct DecisionScratch {
    double euclidean[RFD_WARPS];
    double sigma[RFD_WARPS];
    Decision decision;
    Forces forces;
    double scaled_sigma;  // Σ-norm of the gradients as given
    RfdHistory history;   // after the step
    bool valid;           // the settings
    typename Either<KIND == Kind::generic, SearchScratch, NoSearch>::Type search;
};

// ‖g‖² and Σ f²‖g_k‖² of the gradients as given, times 4^−exponent.
struct Totals {
    double euclidean;
    double sigma;
    int exponent;
    bool finite;  // the sums of all tensors, also of those that don't count
};

__device__ __forceinline__ bool found_inf(const RfdStep& step)
{
    // A sum over devices, so any number but 0; NaN too.
    return step.found_inf != 0 && *reinterpret_cast<const float*>(step.found_inf) != 0.0f;
}

__device__ __forceinline__ double loss_of(const RfdStep& step)
{
    if (step.loss == 0) {
        return step.loss_value;
    }
    double loss[RFD_QUAD];
    const Unit unit{0, 1, false};
    load<Reuse::later>(loss, static_cast<int>(step.loss_dtype), step.loss, unit);
    return loss[0];
}

__device__ __forceinline__ const RfdSettings& settings_of(const RfdStep& step)
{
    return *reinterpret_cast<const RfdSettings*>(step.settings);
}

__device__ __forceinline__ bool not_negative(double x)
{
    return x >= 0.0 && is_finite(x);
}

__device__ __forceinline__ bool is_valid(const RfdGroup& group)
{
    // The factor's square enters the norm: it has to be a normal number.
    const double square = group.length_scale_factor * group.length_scale_factor;
    return group.length_scale_factor > 0.0 && square >= power_of_two(-1022) && is_finite(square) &&
           not_negative(group.multiplier) && not_negative(group.weight_decay) && group.momentum >= 0.0 &&
           group.momentum < 1.0;
}

__device__ __forceinline__ bool is_valid(const RfdSettings& settings, double grad_scale)
{
    return not_negative(settings.multiplier) && settings.inv_batch_size >= 0.0 && settings.inv_batch_size <= 1.0 &&
           settings.max_step_size > 0.0 && grad_scale > 0.0 && is_finite(grad_scale);
}

// Whether everything that lies on the device and may have changed since the launch was prepared is in its domain. The
// answer is the block's.
__device__ __forceinline__ bool settings_are_valid(const Launch& launch)
{
    const RfdAdaptive& adaptive = launch.step.adaptive;
    bool valid = is_valid(settings_of(launch.step), grad_scale_of(launch.step));
    for (uint32_t i = threadIdx.x; i < launch.step.group_count; i += RFD_LANES) {
        // The velocity is the sum that the averaged gradient is made of.
        valid = valid && is_valid(launch.group(i)) &&
                (adaptive.history == 0 || launch.group(i).momentum == adaptive.averaging);
    }
    for (uint32_t k = threadIdx.x; k < launch.step.tensor_count; k += RFD_LANES) {
        // Momentum that was switched on without a buffer for the velocity.
        const RfdTensor& tensor = launch.tensors[k];
        valid = valid && (tensor.momentum != 0 || launch.group(tensor.group).momentum == 0.0 ||
                          launch.chunks_of(k) == 0);
    }
    return __syncthreads_and(valid) != 0;
}

// Reads all that a step depends on beside tensors. Called before the sums are there: to have the waiting over by then, and
// because behind the barrier the first block counts this step.
template <Kind KIND>
RFD_SHARED_CODE void inspect(const Launch launch, DecisionScratch<KIND>& scratch)
{
    const bool valid = settings_are_valid(launch);
    if (threadIdx.x == 0) {
        scratch.valid = valid;
        scratch.decision = Decision{};
        scratch.decision.loss = loss_of(launch.step);
        scratch.decision.unscale = 1.0 / grad_scale_of(launch.step);
        scratch.decision.applied = reinterpret_cast<const volatile RfdStatus*>(launch.step.status)->applied;
        scratch.decision.reason = found_inf(launch.step) ? RFD_REASON_FOUND_INF : RFD_REASON_APPLIED;
    }
}

// Folds the sums of all tensors.
template <Kind KIND>
__device__ __forceinline__ Totals total_squares(const Launch& launch, DecisionScratch<KIND>& scratch, int exponent)
{
    const double* sums = tensor_sums(launch.step, RFD_SUM_SQUARES);
    double euclidean = 0.0, sigma = 0.0;
    bool finite = true;
    for (uint32_t k = threadIdx.x; k < launch.step.tensor_count; k += RFD_LANES) {
        // Without chunks nothing was summed; what lies there is old.
        const double sum = launch.chunks_of(k) > 0 ? __ldcg(sums + k) : 0.0;
        const RfdTensor& tensor = launch.tensors[k];
        finite = finite && is_finite(sum);
        if (tensor.flags & RFD_TENSOR_COUNTS) {
            const double factor = launch.group(tensor.group).length_scale_factor;
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

// Velocities are f32: |v| ≤ max ‖g‖/(1 − m) has to stay finite, and so has the learning rate. `scale` as in scalars_of.
__device__ __forceinline__ bool fits_velocities(const Decision& decision, const RfdGroup& group, double scale)
{
    const double largest = RFD_F32_MAX;
    return group.momentum == 0.0 || (decision.grad_norm <= largest * (1.0 - group.momentum) &&
                                     scalars_of(decision, group, scale).coefficient <= largest);
}

// There is no step unless what each thread has checked fits.
__device__ __forceinline__ void refuse_unless(bool fits, Decision& decision)
{
    const bool applies = decision.reason == RFD_REASON_APPLIED;
    if (__syncthreads_and(fits) == 0 && applies && threadIdx.x == 0) {
        decision.reason = RFD_REASON_OUT_OF_RANGE;
        decision.theta = decision.step_size = decision.learning_rate = 0.0;
    }
    __syncthreads();
}
