// The fitted method, RFD as published: a covariance model decides. src/optimizer/method/fitted.rs and
// src/optimizer/decision.rs operation by operation, so that the bits agree.
#pragma once

#include "../conservative.cuh"
#include "../observation.cuh"
#include "../rows.cuh"

struct Fitted : WithoutRows {
    struct NoSearch {};

    template <bool CONDITION, class A, class B>
    struct Either {
        using Type = A;
    };

    template <class A, class B>
    struct Either<false, A, B> {
        using Type = B;
    };

    template <Kind KIND>
    struct Scratch {
        Forces forces;
        double scaled_sigma;  // Σ-norm of the gradients as given
        typename Either<KIND == Kind::generic, SearchScratch, NoSearch>::Type search;
    };

    // Whether the settings that only this method has are in their domains.
    static __device__ __forceinline__ bool accepts(const RfdStep& step)
    {
        const double inv_batch_size = settings_of(step).inv_batch_size;
        return inv_batch_size >= 0.0 && inv_batch_size <= 1.0 && is_family(step.model.family) &&
               step.model.mode <= RFD_MODE_CLIPPED_A_RFD;
    }

    // Any momentum will do.
    static __device__ __forceinline__ bool accepts(const RfdStep&, const RfdGroup&) { return true; }

    // By all threads.
    template <Kind KIND>
    static __device__ __forceinline__ void decide(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                  const Totals& totals)
    {
        const RfdStep& step = launch.step;
        const RfdModel& model = step.model;
        Decision& decision = scratch.decision;
        Scratch<KIND>& own = scratch;
        if (threadIdx.x == 0) {
            observe<KIND>(launch, scratch, totals);
        }
        double u = 0.0;
        const bool cautious = KIND == Kind::generic && model.quantile > 0.0;
        if constexpr (KIND == Kind::generic) {
            __syncthreads();
            if (cautious && decision.outcome == RFD_OUTCOME_APPLIED) {
                const Objective objective(model, own.forces, settings_of(step).inv_batch_size);
                u = conservative_step(objective, own.search);
            }
        }
        if (threadIdx.x == 0 && decision.outcome == RFD_OUTCOME_APPLIED) {
            const bool at_mean = decision.loss >= model.mean;
            decision.theta = at_mean ? RFD_F64_INFINITY : own.forces.theta;
            if (!cautious) {
                u = at_mean ? model.plateau : step_of_mode(model, own.forces);
            }
            const double step_size = fmin(model.length_scale * u, RFD_F64_MAX);
            step_along_gradient(decision, settings_of(step), step_size, own.scaled_sigma);
        }
        __syncthreads();
        bool fits = true;
        for (uint32_t i = threadIdx.x; i < step.group_count; i += RFD_THREADS) {
            fits = fits && fits_velocities(decision, launch.group(i), 1.0);
        }
        refuse_unless(fits, decision);
    }

    // What a tensor's update is multiplied with beside what all tensors share.
    static __device__ __forceinline__ double scale(const Launch&, const Decision&, uint32_t) { return 1.0; }

    // Nothing is remembered.
    template <Kind KIND>
    static __device__ __forceinline__ void store_history(const Launch&, const DecisionScratch<KIND>&)
    {
    }

private:
    // The norms and whether there can be a step. By thread 0.
    template <Kind KIND>
    static __device__ __forceinline__ void observe(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                   const Totals& totals)
    {
        const double grad_scale = grad_scale_of(launch.step), unit = power_of_two(totals.exponent);
        Decision& decision = scratch.decision;
        Scratch<KIND>& own = scratch;
        own.scaled_sigma = sqrt(totals.sigma) * unit;
        decision.grad_norm = sqrt(totals.euclidean) * unit / grad_scale;
        decision.sigma_norm = own.scaled_sigma / grad_scale;
        if (!totals.finite) {
            decision.outcome = RFD_OUTCOME_NON_FINITE_GRADIENT;
        } else if (!scratch.valid) {
            decision.outcome = RFD_OUTCOME_INVALID_OPTION;
        } else if (!is_finite(decision.loss)) {
            decision.outcome = RFD_OUTCOME_NON_FINITE_LOSS;
        } else if (!not_negative(decision.sigma_norm)) {
            decision.outcome = RFD_OUTCOME_NON_FINITE_GRADIENT;
        } else if (decision.sigma_norm == 0.0) {
            decision.outcome = RFD_OUTCOME_ZERO_GRADIENT;
        } else {
            // Above μ the step is the one at μ.
            const double loss = fmin(decision.loss, launch.step.model.mean);
            own.forces = forces_of(launch.step.model, loss, decision.sigma_norm,
                                       settings_of(launch.step).inv_batch_size);
        }
    }
};
