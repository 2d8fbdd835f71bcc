// What methods decide from: settings, loss, and the sums of all tensors together.
#pragma once

#include "instances.cuh"
#include "scalars.cuh"
#include "tree.cuh"

// What the threads of a block share while they decide (method.cuh): a SharedDecision and the scratch of each
// method.
template <Kind KIND>
struct DecisionScratch;

// Groups that are copied to shared memory. Behind the barrier of the grid whatever lies in device memory is a
// trip to the second-level cache.
#define RFD_SHARED_GROUPS 32

struct SharedDecision {
    double euclidean[RFD_WARPS];
    double sigma[RFD_WARPS];
    RfdGroup groups[RFD_SHARED_GROUPS];  // the first ones
    RfdSettings settings;
    double grad_scale;
    Decision decision;
    RfdTensor last;  // that of the block's last chunk, with which the update begins
    uint32_t last_index;
    bool valid;  // the settings
    bool moves;  // some group has a velocity

    __device__ __forceinline__ RfdGroup group(const Launch& launch, uint32_t index) const
    {
        if (index < RFD_SHARED_GROUPS) {
            return groups[index];
        }
        return launch.group(index);
    }
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

// Steps applied before this one; until behind the barrier, where the first block counts it.
__device__ __forceinline__ uint64_t applied_steps(const RfdStep& step)
{
    return reinterpret_cast<const volatile RfdStatus*>(step.status)->applied;
}

__device__ __forceinline__ const RfdSettings& settings_of(const RfdStep& step)
{
    return *reinterpret_cast<const RfdSettings*>(step.settings);
}

__device__ __forceinline__ bool not_negative(double x)
{
    return x >= 0.0 && is_finite(x);
}

// Velocities are f32: |v| ≤ max ‖g‖/(1 − m) has to stay finite, and so has the learning rate. `scale` as in
// scalars_of.
__device__ __forceinline__ bool fits_velocities(const Decision& decision, const RfdGroup& group, double scale)
{
    const double largest = RFD_F32_MAX;
    return group.velocity_decay == 0.0 || (decision.grad_norm <= largest * (1.0 - group.velocity_decay) &&
                                           scalars_of(decision, group, scale).coefficient <= largest);
}

// x / by; a division by 1 is none.
__device__ __forceinline__ double quotient(double x, double by)
{
    return by == 1.0 ? x : x / by;
}

// What follows from the size of a step along the gradient, before multiplier and cap; `norm` is the Σ-norm of
// the gradients as given.
__device__ __forceinline__ void step_along_gradient(Decision& decision, const RfdSettings& settings, double step_size,
                                                    double norm)
{
    const int exponent = exponent_of(norm);
    const bool comfortable = exponent <= RFD_COMFORTABLE_EXPONENT && -exponent <= RFD_COMFORTABLE_EXPONENT;
    // ±126 keeps the scale a normal f32; what is left is for the coefficient, whose range then suffices.
    const int opposite = exponent > 126 ? -126 : exponent < -126 ? 126 : -exponent;
    decision.step_size = fmin(step_size * settings.multiplier, fmin(settings.max_step_size, RFD_F64_MAX));
    decision.prescale = comfortable ? 1.0 : power_of_two(opposite);
    const double rate = decision.step_size / decision.sigma_norm, prescaled = norm * decision.prescale;
    decision.learning_rate = fmin(rate, RFD_F64_MAX);
    decision.prescaled_rate = prescaled == decision.sigma_norm ? rate : decision.step_size / prescaled;
}

// There is no step unless what each thread has checked fits.
__device__ __forceinline__ void refuse_unless(bool fits, Decision& decision)
{
    const bool applies = decision.outcome == RFD_OUTCOME_APPLIED;
    if (__syncthreads_and(fits) == 0 && applies && threadIdx.x == 0) {
        decision.outcome = RFD_OUTCOME_OUT_OF_RANGE;
        decision.step_size = decision.learning_rate = decision.trust = 0.0;
        decision.limit = RFD_LIMIT_NONE;
    }
    __syncthreads();
}
