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
        Shares shares;
        Forces forces;
        double scaled_sigma;  // Σ-norm of the gradients as given
        typename Either<KIND == Kind::generic, SearchScratch, NoSearch>::Type search;
    };

    // Whether the settings that only this method has are in their domains.
    static __device__ __forceinline__ bool accepts(const RfdStep& step, const RfdSettings& settings)
    {
        const double inv_batch_size = settings.inv_batch_size;
        return inv_batch_size >= 0.0 && inv_batch_size <= 1.0 && is_family(step.model.family) &&
               step.model.mode <= RFD_MODE_CLIPPED_A_RFD;
    }

    // Any momentum will do.
    static __device__ __forceinline__ bool accepts(const RfdStep&, const RfdGroup&) { return true; }

    template <Kind KIND>
    static __device__ __forceinline__ void prepare(const Launch& launch, DecisionScratch<KIND>& scratch)
    {
        static_cast<Scratch<KIND>&>(scratch).shares = Shares(launch.step.model, scratch.settings.inv_batch_size);
    }

    template <Kind KIND>
    static __device__ __forceinline__ void complete_report(const Launch& launch, DecisionScratch<KIND>& scratch)
    {
        const RfdModel& model = launch.step.model;
        Decision& decision = scratch.decision;
        if (decision.outcome == RFD_OUTCOME_APPLIED) {
            const Observed observed(model, decision.loss, decision.sigma_norm);
            decision.theta = decision.loss >= model.mean
                                 ? RFD_F64_INFINITY
                                 : theta_of(static_cast<Scratch<KIND>&>(scratch).shares, observed);
        }
    }

    // By all threads.
    template <Kind KIND>
    static __device__ __forceinline__ void decide(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                  const Totals& totals)
    {
        const RfdStep& step = launch.step;
        const RfdModel& model = step.model;
        Decision& decision = scratch.decision;
        Scratch<KIND>& own = scratch;
        if constexpr (KIND == Kind::generic) {
            if (threadIdx.x == 0) {
                observe<KIND>(launch, scratch, totals);
            }
            __syncthreads();
            if (model.quantile > 0.0 && decision.outcome == RFD_OUTCOME_APPLIED) {
                const Objective objective(model, own.forces, scratch.settings.inv_batch_size);
                conservative_step(objective, own.search);
            }
        }
        if (threadIdx.x == 0) {
            if constexpr (KIND != Kind::generic) {
                observe<KIND>(launch, scratch, totals);
            }
            if (decision.outcome == RFD_OUTCOME_APPLIED) {
                const double u = step_length<KIND>(model, decision, own);
                const double step_size = fmin(model.length_scale * u, RFD_F64_MAX);
                step_along_gradient(decision, scratch.settings, step_size, own.scaled_sigma);
            }
        }
        __syncthreads();
        if (!scratch.moves) {
            return;
        }
        bool fits = true;
        for (uint32_t i = threadIdx.x; i < step.group_count; i += RFD_THREADS) {
            fits = fits && fits_velocities(decision, scratch.group(launch, i), 1.0);
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
    // In length scales, before the multiplier. By thread 0.
    template <Kind KIND>
    static __device__ __forceinline__ double step_length(const RfdModel& model, const Decision& decision,
                                                         const Scratch<KIND>& own)
    {
        if constexpr (KIND == Kind::generic) {
            if (model.quantile > 0.0) {
                return own.search.best[0].u;
            }
        }
        return decision.loss >= model.mean ? model.plateau : step_of_mode(model, own.forces);
    }

    // The norms and whether there can be a step. By thread 0.
    template <Kind KIND>
    static __device__ __forceinline__ void observe(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                   const Totals& totals)
    {
        const RfdModel& model = launch.step.model;
        const double grad_scale = scratch.grad_scale, unit = power_of_two(totals.exponent);
        Decision& decision = scratch.decision;
        Scratch<KIND>& own = scratch;
        own.scaled_sigma = sqrt(totals.sigma) * unit;
        decision.sigma_norm = quotient(own.scaled_sigma, grad_scale);
        // The same number as long as all factors are 1 and all tensors count.
        decision.grad_norm = totals.euclidean == totals.sigma
                                 ? decision.sigma_norm
                                 : quotient(sqrt(totals.euclidean) * unit, grad_scale);
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
            const Observed observed(model, fmin(decision.loss, model.mean), decision.sigma_norm);
            own.forces = forces_of(model, own.shares, observed);
        }
    }
};
