// The adaptive method: what training itself shows decides. src/optimizer/method/adaptive.rs operation by
// operation, so that the bits agree.
#pragma once

#include "../observation.cuh"

struct Adaptive {
    template <Kind KIND>
    struct Scratch {
        RfdHistory history;  // after the step
    };

    static __device__ __forceinline__ bool accepts(const RfdStep&) { return true; }

    // The velocity is the sum that the averaged gradient is made of.
    static __device__ __forceinline__ bool accepts(const RfdStep& step, const RfdGroup& group)
    {
        return group.velocity_decay == step.adaptive.averaging;
    }

    static __device__ __forceinline__ double averaging(const RfdStep& step) { return step.adaptive.averaging; }

    // By all threads.
    template <Kind KIND>
    RFD_SHARED_CODE static void decide(const Launch launch, DecisionScratch<KIND>& scratch, const Totals totals)
    {
        const RfdStep& step = launch.step;
        const RfdAdaptive& adaptive = step.adaptive;
        const RfdTensor* tensors = launch.tensors;
        Decision& decision = scratch.decision;
        const auto counts = [&](uint32_t k) {
            return tensors[k].flags & RFD_TENSOR_COUNTS && launch.chunks_of(k) > 0;
        };
        double squares = 0.0, elements = 0.0;
        for (uint32_t k = threadIdx.x; k < step.tensor_count; k += RFD_THREADS) {
            if (counts(k)) {
                squares += mean_square(observed(launch, decision, k));
                elements += static_cast<double>(tensors[k].len);
            }
        }
        fold_by_block(scratch.euclidean, scratch.sigma, squares, elements);
        const double mean = squares / elements;
        double averaged = 0.0, single = 0.0;
        for (uint32_t k = threadIdx.x; k < step.tensor_count; k += RFD_THREADS) {
            if (counts(k)) {
                const RfdTensorHistory tensor = observed(launch, decision, k);
                const double factor = launch.group(tensors[k].group).length_scale_factor;
                const double weight =
                    factor * factor * geometry(adaptive, tensor, static_cast<double>(tensors[k].len), mean);
                const double average = average_scale(adaptive, tensor);
                const double direction = adaptive.averaging > 0.0 ? __ldcg(tensor_sums(step, RFD_SUM_DIRECTION) + k)
                                                                  : unscaled_squares(step, decision, k);
                averaged += weight * (direction * (average * average));
                single += weight * mean_square(tensor);
            }
        }
        fold_by_block(scratch.euclidean, scratch.sigma, averaged, single);
        if (threadIdx.x == 0) {
            const double unit = power_of_two(totals.exponent), grad_scale = grad_scale_of(step);
            decision.grad_norm = sqrt(totals.euclidean) * unit / grad_scale;
            decision.sigma_norm = sqrt(totals.sigma) * unit / grad_scale;
            decision.mean_variance = mean;
            conclude<KIND>(launch, scratch, totals, averaged, single);
        }
        __syncthreads();
        bool fits = true;
        for (uint32_t k = threadIdx.x; k < step.tensor_count; k += RFD_THREADS) {
            fits = fits && is_finite(observed(launch, decision, k).squares) &&
                   fits_velocities(decision, launch.group(tensors[k].group), scale(launch, decision, k));
        }
        refuse_unless(fits, decision);
        if (threadIdx.x == 0 && decision.outcome == RFD_OUTCOME_APPLIED) {
            // That of the averaged gradient; of a skipped step that of the gradient.
            decision.sigma_norm = sqrt(averaged);
        }
    }

    // What a tensor's velocity is multiplied with beside what all tensors share. After decide.
    RFD_SHARED_CODE static double scale(const Launch launch, const Decision& decision, uint32_t k)
    {
        if (launch.chunks_of(k) == 0) {
            return 0.0;
        }
        const RfdAdaptive& adaptive = launch.step.adaptive;
        const RfdTensorHistory tensor = observed(launch, decision, k);
        const double len = static_cast<double>(launch.tensors[k].len);
        return geometry(adaptive, tensor, len, decision.mean_variance) * average_scale(adaptive, tensor);
    }

    // Writes what is remembered after an applied step, to where no block reads during this one. By one block.
    template <Kind KIND>
    RFD_SHARED_CODE static void store_history(const Launch launch, const DecisionScratch<KIND>& scratch)
    {
        const Decision& decision = scratch.decision;
        RfdHistory* next = history_after(launch.step, decision.applied + 1);
        for (uint32_t k = threadIdx.x; k < launch.step.tensor_count; k += RFD_THREADS) {
            tensors_of(next)[k] = observed(launch, decision, k);
        }
        if (threadIdx.x == 0) {
            *next = static_cast<const Scratch<KIND>&>(scratch).history;
        }
    }

private:
    // What is remembered after so many applied steps.
    static __device__ __forceinline__ RfdHistory* history_after(const RfdStep& step, uint64_t applied)
    {
        const uint64_t size = sizeof(RfdHistory) + step.tensor_count * sizeof(RfdTensorHistory);
        return reinterpret_cast<RfdHistory*>(step.adaptive.history + applied % 2 * size);
    }

    static __device__ __forceinline__ RfdTensorHistory* tensors_of(RfdHistory* history)
    {
        return reinterpret_cast<RfdTensorHistory*>(history + 1);
    }

    // ‖g_k‖², gradient scale removed, of a tensor that takes part in the step.
    static __device__ __forceinline__ double unscaled_squares(const RfdStep& step, const Decision& decision, uint32_t k)
    {
        return __ldcg(tensor_sums(step, RFD_SUM_SQUARES) + k) * decision.unscale * decision.unscale;
    }

    // What will be remembered of a tensor after the step.
    static __device__ __forceinline__ RfdTensorHistory observed(const Launch& launch, const Decision& decision,
                                                                uint32_t k)
    {
        const RfdStep& step = launch.step;
        RfdTensorHistory tensor = tensors_of(history_after(step, decision.applied))[k];
        if (launch.chunks_of(k) > 0) {
            const double decay = step.adaptive.variance_decay;
            tensor.squares = decay * tensor.squares + (1.0 - decay) * unscaled_squares(step, decision, k);
            tensor.squares_rest *= decay;
            tensor.average_rest *= step.adaptive.averaging;
        }
        return tensor;
    }

    // The average of ‖g_k‖².
    static __device__ __forceinline__ double mean_square(const RfdTensorHistory& tensor)
    {
        return tensor.squares / (1.0 - tensor.squares_rest);
    }

    // What makes minus the velocity the averaged gradient.
    static __device__ __forceinline__ double average_scale(const RfdAdaptive& adaptive, const RfdTensorHistory& tensor)
    {
        return (1.0 - adaptive.averaging) / (1.0 - tensor.average_rest);
    }

    // Σ_k of a tensor of so many elements, from the mean variance.
    static __device__ __forceinline__ double geometry(const RfdAdaptive& adaptive, const RfdTensorHistory& tensor,
                                                      double len, double mean)
    {
        if (adaptive.tensorwise == 0) {
            return 1.0;
        }
        const double variance = fmax(mean_square(tensor) / len, adaptive.smallest_variance * mean);
        return sqrt(mean / fmin(variance, adaptive.largest_variance * mean));
    }

    // What the trust is multiplied with after two complete windows.
    static __device__ __forceinline__ double verdict(const RfdAdaptive& adaptive, const RfdHistory& history)
    {
        const double fall = history.sum_before - history.sum;
        const double mean = (history.promised_before + history.promised) / 2.0;
        const double promise = adaptive.share * (adaptive.window * mean);
        const double noise = sqrt((history.squares_before + history.squares) / 2.0);
        if (fall < promise - noise) {
            return adaptive.after_less;
        }
        return fall > promise ? adaptive.after_more : 1.0;
    }

    // What will be remembered of all tensors together, but for what the step promises.
    static __device__ __forceinline__ RfdHistory observed(const RfdAdaptive& adaptive, RfdHistory history, double loss)
    {
        const double beta = adaptive.averaging;
        history.loss = beta * history.loss + (1.0 - beta) * loss;
        history.loss_rest *= beta;
        const bool first = history.steps == 0.0 && history.windows == 0.0;
        const double difference = first ? 0.0 : loss - history.last;
        history.last = loss;
        history.steps += 1.0;
        history.sum += loss;
        history.squares += difference * difference;
        if (history.steps < adaptive.window) {
            return history;
        }
        if (history.windows > 0.0) {
            history.factor = fmin(fmax(history.factor * verdict(adaptive, history), adaptive.smallest_trust), 1.0);
        }
        history.steps = 0.0;
        history.windows += 1.0;
        history.sum_before = history.sum;
        history.squares_before = history.squares;
        history.promised_before = history.promised;
        history.sum = history.squares = history.promised = 0.0;
        return history;
    }

    // The share of the rule's step that the next one takes after so many.
    static __device__ __forceinline__ double ramp(const RfdAdaptive& adaptive, uint64_t applied)
    {
        const bool still = applied < adaptive.ramp - 1;
        return power_of_two(still ? static_cast<int>(applied) + 1 - static_cast<int>(adaptive.ramp) : 0);
    }

    // Whether there can be a step, and which. `averaged` is the squared Σ-norm of the averaged gradient,
    // `single` the mean one of single gradients. By thread 0.
    template <Kind KIND>
    static __device__ __forceinline__ void conclude(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                    const Totals& totals, double averaged, double single)
    {
        const RfdStep& step = launch.step;
        const RfdAdaptive& adaptive = step.adaptive;
        const RfdSettings& settings = settings_of(step);
        Decision& decision = scratch.decision;
        if (!totals.finite) {
            decision.outcome = RFD_OUTCOME_NON_FINITE_GRADIENT;
        } else if (!scratch.valid) {
            decision.outcome = RFD_OUTCOME_INVALID_OPTION;
        } else if (!is_finite(decision.loss)) {
            decision.outcome = RFD_OUTCOME_NON_FINITE_LOSS;
        } else if (decision.grad_norm == 0.0) {
            decision.outcome = RFD_OUTCOME_ZERO_GRADIENT;
        } else if (decision.loss < adaptive.loss_bound) {
            decision.outcome = RFD_OUTCOME_LOSS_BELOW_BOUND;
        } else if (totals.exponent != 0) {
            decision.outcome = RFD_OUTCOME_OUT_OF_RANGE;
        } else if (averaged == 0.0) {
            decision.outcome = RFD_OUTCOME_ZERO_GRADIENT;
        } else {
            RfdHistory history = observed(adaptive, *history_after(step, decision.applied), decision.loss);
            const double loss = history.loss / (1.0 - history.loss_rest) - adaptive.loss_bound;
            const double certain = ramp(adaptive, decision.applied) * adaptive.decrease / averaged;
            const double rate = history.factor * fmin(certain, adaptive.noisy_decrease / single) * loss;
            const double norm = sqrt(averaged);
            const double cap = fmin(settings.max_step_size, RFD_F64_MAX);
            const double step_size = fmin(rate * norm * settings.multiplier, cap);
            const double learning_rate = step_size / norm;
            history.promised += step_size * norm;
            static_cast<Scratch<KIND>&>(scratch).history = history;
            if (is_finite(averaged) && is_finite(single) && is_finite(learning_rate) && is_finite(history.sum) &&
                is_finite(history.squares) && is_finite(history.promised) && is_finite(history.sum_before) &&
                is_finite(history.squares_before) && is_finite(history.promised_before)) {
                decision.theta = RFD_F64_INFINITY;
                decision.step_size = step_size;
                decision.learning_rate = learning_rate;
                decision.prescaled_rate = learning_rate * decision.unscale;
                decision.prescale = 1.0;
            } else {
                decision.outcome = RFD_OUTCOME_OUT_OF_RANGE;
            }
        }
    }
};
