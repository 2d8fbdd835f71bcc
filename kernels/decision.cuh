// From the sums of all tensors to the step, the same in every block: src/optimizer/decision.rs on the device.
#pragma once

#include "conservative.cuh"
#include "reduce.cuh"

// Gradient norms with exponents up to this need no prescaling: coefficients stay far inside the range of f32.
#define RFD_COMFORTABLE_EXPONENT 32

struct NoSearch {};

template <bool CONDITION, class A, class B>
struct Either {
    using Type = A;
};

template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

template <bool GENERIC>
struct DecisionScratch {
    double euclidean[RFD_WARPS];
    double sigma[RFD_WARPS];
    Decision decision;
    Forces forces;
    double scaled_sigma;  // Σ-norm of the gradients as given
    bool valid;           // the settings
    typename Either<GENERIC, SearchScratch, NoSearch>::Type search;
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
    bool valid = is_valid(settings_of(launch.step), grad_scale_of(launch.step));
    for (uint32_t i = threadIdx.x; i < launch.step.group_count; i += RFD_LANES) {
        valid = valid && is_valid(launch.group(i));
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
template <bool GENERIC>
RFD_SHARED_CODE void inspect(const Launch launch, DecisionScratch<GENERIC>& scratch)
{
    const bool valid = settings_are_valid(launch);
    if (threadIdx.x == 0) {
        scratch.valid = valid;
        scratch.decision = Decision{};
        scratch.decision.loss = loss_of(launch.step);
        scratch.decision.applied = reinterpret_cast<const volatile RfdStatus*>(launch.step.status)->applied;
        scratch.decision.reason = found_inf(launch.step) ? RFD_REASON_FOUND_INF : RFD_REASON_APPLIED;
    }
}

// Folds the sums of all tensors; the result is in thread 0.
template <bool GENERIC>
__device__ __forceinline__ Totals total_squares(const Launch& launch, DecisionScratch<GENERIC>& scratch, int exponent)
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

// The norms and whether there can be a step. By thread 0.
template <bool GENERIC>
__device__ __forceinline__ void observe(const Launch& launch, DecisionScratch<GENERIC>& scratch, const Totals& totals)
{
    const double grad_scale = grad_scale_of(launch.step), unit = power_of_two(totals.exponent);
    Decision& decision = scratch.decision;
    scratch.scaled_sigma = sqrt(totals.sigma) * unit;
    decision.grad_norm = sqrt(totals.euclidean) * unit / grad_scale;
    decision.sigma_norm = scratch.scaled_sigma / grad_scale;
    if (!totals.finite) {
        decision.reason = RFD_REASON_NON_FINITE_GRADIENT;
    } else if (!scratch.valid) {
        decision.reason = RFD_REASON_INVALID_OPTION;
    } else if (!is_finite(decision.loss)) {
        decision.reason = RFD_REASON_NON_FINITE_LOSS;
    } else if (!not_negative(decision.sigma_norm)) {
        decision.reason = RFD_REASON_NON_FINITE_GRADIENT;
    } else if (decision.sigma_norm == 0.0) {
        decision.reason = RFD_REASON_ZERO_GRADIENT;
    } else {
        // Above μ the step is the one at μ.
        const double loss = fmin(decision.loss, launch.step.model.mean);
        scratch.forces = forces_of(launch.step.model, loss, decision.sigma_norm,
                                   settings_of(launch.step).inv_batch_size);
    }
}

// The rates that follow from a step of u length scales. By thread 0.
template <bool GENERIC>
__device__ __forceinline__ void conclude(const Launch& launch, DecisionScratch<GENERIC>& scratch, double u)
{
    const RfdSettings& settings = settings_of(launch.step);
    Decision& decision = scratch.decision;
    const double step_size = fmin(launch.step.model.length_scale * u, RFD_F64_MAX) * settings.multiplier;
    const double n = scratch.scaled_sigma;
    const int exponent = exponent_of(n);
    const bool comfortable = exponent <= RFD_COMFORTABLE_EXPONENT && -exponent <= RFD_COMFORTABLE_EXPONENT;
    // ±126 keeps the scale a normal f32; what is left is for the coefficient, whose range then suffices.
    const int opposite = exponent > 126 ? -126 : exponent < -126 ? 126 : -exponent;
    decision.step_size = fmin(step_size, fmin(settings.max_step_size, RFD_F64_MAX));
    decision.prescale = comfortable ? 1.0 : power_of_two(opposite);
    decision.learning_rate = fmin(decision.step_size / decision.sigma_norm, RFD_F64_MAX);
    decision.prescaled_rate = decision.step_size / (n * decision.prescale);
    decision.unscale = 1.0 / grad_scale_of(launch.step);
}

// Velocities are f32: |v| ≤ max ‖g‖/(1 − m) has to stay finite, and so has the learning rate. Else there is no step.
__device__ __forceinline__ void refuse_what_velocities_cannot_hold(const Launch& launch, Decision& decision)
{
    const double largest = RFD_F32_MAX;
    bool fits = true;
    for (uint32_t i = threadIdx.x; i < launch.step.group_count; i += RFD_LANES) {
        const RfdGroup& group = launch.group(i);
        fits = fits && (group.momentum == 0.0 || (decision.grad_norm <= largest * (1.0 - group.momentum) &&
                                                  scalars_of(decision, group).coefficient <= largest));
    }
    const bool applies = decision.reason == RFD_REASON_APPLIED;
    if (__syncthreads_and(fits) == 0 && applies && threadIdx.x == 0) {
        decision.reason = RFD_REASON_OUT_OF_RANGE;
        decision.theta = decision.step_size = decision.learning_rate = 0.0;
    }
    __syncthreads();
}

// After inspect; leaves the decision in shared memory. `exponent` is that of the tensors' sums, after a rescue.
template <bool GENERIC>
RFD_SHARED_CODE void decide(const Launch launch, DecisionScratch<GENERIC>& scratch, int exponent)
{
    const RfdStep& step = launch.step;
    const RfdModel& model = step.model;
    Decision& decision = scratch.decision;
    __syncthreads();
    if (decision.reason == RFD_REASON_FOUND_INF) {
        return;
    }
    Totals totals;
    if (step.given_norm != 0) {
        const RfdSquaredNorm& given = *reinterpret_cast<const RfdSquaredNorm*>(step.given_norm);
        totals = {given.euclidean, given.sigma, 0, true};
    } else {
        totals = total_squares<GENERIC>(launch, scratch, exponent);
    }
    if (threadIdx.x == 0) {
        observe<GENERIC>(launch, scratch, totals);
    }
    double u = 0.0;
    const bool cautious = GENERIC && model.quantile > 0.0;
    if constexpr (GENERIC) {
        __syncthreads();
        if (cautious && decision.reason == RFD_REASON_APPLIED) {
            const Objective objective(model, scratch.forces, settings_of(step).inv_batch_size);
            u = conservative_step(objective, scratch.search);
        }
    }
    if (threadIdx.x == 0 && decision.reason == RFD_REASON_APPLIED) {
        const bool at_mean = decision.loss >= model.mean;
        decision.theta = at_mean ? RFD_F64_INFINITY : scratch.forces.theta;
        if (!cautious) {
            u = at_mean ? model.plateau : step_of_mode(model, scratch.forces);
        }
        conclude<GENERIC>(launch, scratch, u);
    }
    __syncthreads();
    refuse_what_velocities_cannot_hold(launch, decision);
}

// Counts the step: writes the status and its mirror, the counts first and the sequence last (see RfdStatus on how to read
// them). By one thread of the launch, when no block needs the old counts any more.
RFD_SHARED_CODE inline void write_status(const RfdStep& step, const Decision& decision)
{
    volatile RfdStatus* status = reinterpret_cast<volatile RfdStatus*>(step.status);
    volatile RfdStatus* mirror = step.mirror != 0 ? reinterpret_cast<volatile RfdStatus*>(step.mirror) : status;
    const uint64_t counts = decision.reason == RFD_REASON_APPLIED ? 1 : 0;
    const uint64_t applied = decision.applied + counts, skipped = status->skipped + (1 - counts);
    volatile RfdStatus* copies[] = {status, mirror};
    for (volatile RfdStatus* copy : copies) {
        copy->applied = applied;
        copy->skipped = skipped;
    }
    __threadfence_system();
    for (volatile RfdStatus* copy : copies) {
        copy->loss = decision.loss;
        copy->grad_norm = decision.grad_norm;
        copy->sigma_norm = decision.sigma_norm;
        copy->theta = decision.theta;
        copy->step_size = decision.step_size;
        copy->learning_rate = decision.learning_rate;
        copy->reason = decision.reason;
    }
    __threadfence_system();
    for (volatile RfdStatus* copy : copies) {
        copy->sequence = applied + skipped;
    }
}
