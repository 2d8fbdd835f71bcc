// From the sums of all tensors to the step, the same in every block: src/optimizer/decision.rs on the device.
#pragma once

#include "adaptive.cuh"

// Gradient norms with exponents up to this need no prescaling: coefficients stay far inside the range of f32.
#define RFD_COMFORTABLE_EXPONENT 32

// The norms and whether there can be a step. By thread 0.
template <Kind KIND>
__device__ __forceinline__ void observe(const Launch& launch, DecisionScratch<KIND>& scratch, const Totals& totals)
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
template <Kind KIND>
__device__ __forceinline__ void conclude(const Launch& launch, DecisionScratch<KIND>& scratch, double u)
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
}

// RFD as published.
template <Kind KIND>
__device__ __forceinline__ void decide_as_published(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                    const Totals& totals)
{
    const RfdStep& step = launch.step;
    const RfdModel& model = step.model;
    Decision& decision = scratch.decision;
    if (threadIdx.x == 0) {
        observe<KIND>(launch, scratch, totals);
    }
    double u = 0.0;
    const bool cautious = KIND == Kind::generic && model.quantile > 0.0;
    if constexpr (KIND == Kind::generic) {
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
        conclude<KIND>(launch, scratch, u);
    }
    __syncthreads();
    bool fits = true;
    for (uint32_t i = threadIdx.x; i < step.group_count; i += RFD_LANES) {
        fits = fits && fits_velocities(decision, launch.group(i), 1.0);
    }
    refuse_unless(fits, decision);
}

// After inspect; leaves the decision in shared memory. `exponent` is that of the tensors' sums, after a rescue.
template <Kind KIND>
RFD_SHARED_CODE void decide(const Launch launch, DecisionScratch<KIND>& scratch, int exponent)
{
    const RfdStep& step = launch.step;
    __syncthreads();
    if (scratch.decision.reason == RFD_REASON_FOUND_INF) {
        return;
    }
    Totals totals;
    if (KIND != Kind::averaged && step.given_norm != 0) {
        const RfdSquaredNorm& given = *reinterpret_cast<const RfdSquaredNorm*>(step.given_norm);
        totals = {given.euclidean, given.sigma, 0, true};
    } else {
        totals = total_squares<KIND>(launch, scratch, exponent);
    }
    if (is_adaptive<KIND>(step)) {
        decide_adaptively<KIND>(launch, scratch, totals);
    } else if constexpr (KIND != Kind::averaged) {
        decide_as_published<KIND>(launch, scratch, totals);
    }
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
