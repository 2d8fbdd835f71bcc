// The adaptive method: what training itself shows decides. src/optimizer/method/adaptive.rs operation by
// operation, so that the bits agree.
#pragma once

#include "../observation.cuh"
#include "../rows.cuh"

struct Adaptive {
    template <Kind KIND>
    struct Scratch {
        RfdHistory history;  // after the step
        double promise;      // what the step promises at most
        double squared;      // squared Σ-norm of the averaged gradient
        Totals totals;
    };

    static __device__ __forceinline__ bool accepts(const RfdStep&, const RfdSettings&) { return true; }

    // The velocity is the sum that the averaged gradient is made of.
    static __device__ __forceinline__ bool accepts(const RfdStep& step, const RfdGroup& group)
    {
        return group.velocity_decay == step.adaptive.averaging;
    }

    static __device__ __forceinline__ double averaging(const RfdStep& step) { return step.adaptive.averaging; }

    static __device__ __forceinline__ bool has_rows(const RfdStep&) { return true; }

    // Those of a tensor in the step after so many.
    static __device__ __forceinline__ Variances variances(const Launch& launch, uint32_t k, uint64_t applied)
    {
        const RfdAdaptive& adaptive = launch.step.adaptive;
        const RfdTensorHistory& before = tensors_of(history_after(launch.step, applied))[k];
        const double seen = 1.0 - before.squares_rest;
        const double mean = seen > 0.0 ? before.squares / seen / launch.elements_of(k) : 0.0;
        Variances variances(launch, k, before.turn != 0.0);
        variances.decay = adaptive.variance_decay;
        variances.weight = 1.0 - before.squares_rest * adaptive.variance_decay;
        variances.floor = adaptive.variance_floor * mean;
        return variances;
    }

    // All that follows from the loss.
    template <Kind KIND>
    static __device__ __forceinline__ void prepare(const Launch& launch, DecisionScratch<KIND>& scratch)
    {
        const RfdAdaptive& adaptive = launch.step.adaptive;
        const Decision& decision = scratch.decision;
        Scratch<KIND>& own = scratch;
        own.history = observed(adaptive, *history_after(launch.step, decision.applied), decision.applied, decision.loss);
        // A mean of losses at the bound may be rounded below it.
        const double loss = own.history.loss / (1.0 - own.history.loss_rest);
        own.promise = adaptive.loss_share * fmax(loss - floor_of(adaptive), 0.0);
    }

    template <Kind KIND>
    static __device__ __forceinline__ void complete_report(const Launch&, DecisionScratch<KIND>& scratch)
    {
        Decision& decision = scratch.decision;
        const Scratch<KIND>& own = scratch;
        if (decision.outcome == RFD_OUTCOME_APPLIED) {
            // That of the averaged gradient; of a skipped step that of the gradient.
            decision.theta = RFD_F64_INFINITY;
            decision.sigma_norm = sqrt(own.squared);
        } else {
            decision.sigma_norm = quotient(sqrt(own.totals.sigma) * power_of_two(own.totals.exponent), scratch.grad_scale);
        }
    }

    // By all threads.
    template <Kind KIND>
    static __device__ __forceinline__ void decide(const Launch launch, DecisionScratch<KIND>& scratch, const Totals totals)
    {
        const RfdStep& step = launch.step;
        const RfdAdaptive& adaptive = step.adaptive;
        const RfdTensor* tensors = launch.tensors;
        Decision& decision = scratch.decision;
        double squared = 0.0;
        bool fits = true;
        for (uint32_t k = threadIdx.x; k < step.tensor_count; k += RFD_THREADS) {
            const RfdTensorHistory tensor = observed(launch, decision, k);
            fits = fits && is_finite(tensor.squares);
            if (launch.counts(k) && launch.takes_part(k)) {
                const RfdGroup group = scratch.group(launch, tensors[k].group);
                const double average = (1.0 - adaptive.averaging) / (1.0 - tensor.average_rest);
                const double direction = __ldcg(tensor_sums(step, RFD_SUM_DIRECTION) + k);
                squared += group.multiplier * (group.length_scale_factor * group.length_scale_factor) *
                           (length_of_average(adaptive, tensor) * average * direction);
            }
        }
        squared = fold_by_block(scratch.euclidean, squared);
        if (threadIdx.x == 0) {
            const double norm = sqrt(totals.euclidean) * power_of_two(totals.exponent);
            decision.grad_norm = quotient(norm, scratch.grad_scale);
            conclude<KIND>(launch, scratch, totals, squared);
        }
        if (launch.parts != nullptr) {
            refuse_torn(launch, decision);
        }
        __syncthreads();
        for (uint32_t k = threadIdx.x; scratch.moves && k < step.tensor_count; k += RFD_THREADS) {
            fits = fits && fits_velocities(decision, scratch.group(launch, tensors[k].group), scale(launch, decision, k));
        }
        refuse_unless(fits, decision);
    }

    // What a tensor's velocity is multiplied with beside what all tensors share, and what rows and columns
    // are. After decide.
    static __device__ __forceinline__ double scale(const Launch launch, const Decision& decision, uint32_t k)
    {
        return launch.takes_part(k) ? length_of_average(launch.step.adaptive, observed(launch, decision, k)) : 0.0;
    }

    // Writes averages and scales of up to RFD_THREADS columns. By all threads, after decide.
    static __device__ __forceinline__ void fold_columns(const Launch launch, const Decision& decision, uint32_t k,
                                             const Variances variances, uint64_t slice)
    {
        const uint64_t column = slice * RFD_THREADS + threadIdx.x;
        // Those of all ranks are there since they were added up.
        if (launch.parts != nullptr || column >= variances.columns) {
            return;
        }
        const double square = column_square(launch, k, variances, column, decision.applied, decision.unscale);
        const double average = next_column(variances, column, square);
        store_column(launch, variances, column, average, next_column_mean(launch, decision, k));
    }

    // The mean square in a column over the elements that tell of it.
    static __device__ __forceinline__ double column_square(const Launch& launch, uint32_t k, const Variances& variances,
                                                           uint64_t column, uint64_t applied, double unscale)
    {
        const RfdTensor& tensor = launch.tensors[k];
        const uint64_t chunks = launch.chunks_of(k);
        const Sample sample(chunks, applied);
        double sum = 0.0;
        for (uint64_t chunk = sample.first; chunk < chunks; chunk += sample.stride) {
            sum += __ldcg(variances.column_sums(sample.place(chunk)) + column);
        }
        const uint64_t height = sampled_elements(tensor, chunks, sample) / tensor.row;
        const double rows = static_cast<double>(height > 0 ? height : 1);
        return sum * unscale * unscale / rows;
    }

    // The average of it after the step.
    static __device__ __forceinline__ double next_column(const Variances& variances, uint64_t column, double square)
    {
        return variances.next(__ldg(variances.columns_before() + column), square);
    }

    // Writes average and scale of a column; `mean` is the average over all of them.
    static __device__ __forceinline__ void store_column(const Launch& launch, const Variances& variances,
                                                        uint64_t column, double average, double mean)
    {
        const double floor = launch.step.adaptive.variance_floor * mean;
        variances.columns_after()[column] = average;
        variances.scales_after()[column] =
            mean > 0.0 ? static_cast<float>(sqrt(mean / (average + floor))) : 1.0f;
    }

    // Writes what is remembered after an applied step, to where no block reads during this one. By one block.
    template <Kind KIND>
    static __device__ __forceinline__ void store_history(const Launch launch, const DecisionScratch<KIND>& scratch)
    {
        const Decision& decision = scratch.decision;
        RfdHistory* next = history_after(launch.step, decision.applied + 1);
        for (uint32_t k = threadIdx.x; k < launch.step.tensor_count; k += RFD_THREADS) {
            RfdTensorHistory tensor = observed(launch, decision, k);
            if (launch.takes_part(k)) {
                tensor.column_mean = next_column_mean(launch, decision, k);
            }
            tensors_of(next)[k] = tensor;
        }
        if (threadIdx.x == 0) {
            *next = static_cast<const Scratch<KIND>&>(scratch).history;
        }
    }

    // Takes the length scales that tensors lack from the sums of squares of their parameters; before a step,
    // where `history` is that of the first tensor. In halves of a step ranks have to add the sums up first.
    // By one block.
    static __device__ __forceinline__ void measure(const Launch& launch)
    {
        const RfdStep& step = launch.step;
        for (uint32_t k = threadIdx.x; k < step.tensor_count; k += RFD_THREADS) {
            const RfdTensor& tensor = launch.tensors[k];
            const double squares = launch.chunks_of(k) > 0 ? __ldcg(tensor_sums(step, RFD_SUM_SQUARES) + k) : 0.0;
            if (launch.parts != nullptr) {
                launch.numbers_of(k).parameter = tensor.flags & RFD_TENSOR_COUNTS ? squares : 0.0;
            } else {
                RfdTensorHistory& history = reinterpret_cast<RfdTensorHistory*>(step.adaptive.history)[k];
                take_length(step.adaptive, history, tensor, squares, static_cast<double>(tensor.len));
            }
        }
    }

    // The same of one tensor, of which there are so many elements.
    static __device__ __forceinline__ void take_length(const RfdAdaptive& adaptive, RfdTensorHistory& history,
                                                       const RfdTensor& tensor, double squares, double elements)
    {
        double size = sqrt(squares / (elements > 0.0 ? elements : 1.0));
        // Sizes that are not finite would never do.
        const double smallest = tensor.flags & RFD_TENSOR_MATRIX ? adaptive.smallest_matrix : adaptive.smallest_vector;
        size = size > smallest && is_finite(size) ? size : smallest;
        // A tensor that is new in a state has none yet.
        if (history.length == 0.0) {
            history.length = sqrt(adaptive.length_share * size);
        }
    }

    // Whether what ranks have added up is neither all of some tensor nor nothing of it. By all threads.
    static __device__ __forceinline__ bool any_torn(const Launch& launch)
    {
        bool torn = false;
        for (uint32_t k = threadIdx.x; k < launch.step.tensor_count; k += RFD_THREADS) {
            torn = torn || is_torn(launch, k);
        }
        return __syncthreads_and(!torn) == 0;
    }

    // What is remembered of a tensor after so many applied steps.
    static __device__ __forceinline__ RfdTensorHistory& history_of(const RfdStep& step, uint64_t applied, uint32_t k)
    {
        return tensors_of(history_after(step, applied))[k];
    }

    // The mean square of the elements that tell of columns, of a tensor that has them; 0 without columns.
    static __device__ __forceinline__ double sampled_square(const Launch& launch, uint32_t k, uint64_t applied,
                                                            double unscale)
    {
        const RfdStep& step = launch.step;
        const RfdTensor& tensor = launch.tensors[k];
        if (!(tensor.flags & RFD_TENSOR_COLUMNS)) {
            return 0.0;
        }
        const uint64_t chunks = launch.chunks_of(k);
        const Sample sample(chunks, applied);
        double total = 0.0;
        for (uint64_t chunk = sample.first; chunk < chunks; chunk += sample.stride) {
            // The sum of a tensor's only chunk is the tensor's.
            total += __ldcg(chunks == 1 ? tensor_sums(step, RFD_SUM_SQUARES) + k
                                        : chunk_sums(step, RFD_SUM_SQUARES) + tensor.first_chunk + chunk);
        }
        return total * unscale * unscale / static_cast<double>(sampled_elements(tensor, chunks, sample));
    }

    // The average of it after the step, of a tensor that takes part.
    static __device__ __forceinline__ double next_column_mean(const RfdStep& step, uint64_t applied, uint32_t k,
                                                              double square)
    {
        return averaged(step.adaptive.variance_decay, history_of(step, applied, k).column_mean, square);
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

    // What will be remembered of a tensor after the step, but for its columns.
    static __device__ __forceinline__ RfdTensorHistory observed(const Launch& launch, const Decision& decision,
                                                                uint32_t k)
    {
        const RfdStep& step = launch.step;
        RfdTensorHistory tensor = tensors_of(history_after(step, decision.applied))[k];
        if (launch.takes_part(k)) {
            tensor.squares = averaged(step.adaptive.variance_decay, tensor.squares, unscaled_squares(step, decision, k));
            tensor.squares_rest *= step.adaptive.variance_decay;
            tensor.average_rest *= step.adaptive.averaging;
            tensor.turn = 1.0 - tensor.turn;
        }
        return tensor;
    }

    // Elements that tell of columns.
    static __device__ __forceinline__ uint64_t sampled_elements(const RfdTensor& tensor, uint64_t chunks,
                                                                const Sample& sample)
    {
        const uint64_t size = chunk_size(tensor.row), sampled = (chunks - sample.first - 1) / sample.stride + 1;
        const uint64_t last = tensor.len - (chunks - 1) * size;
        return sampled * size - (sample.has(chunks - 1) ? size - last : 0);
    }

    static __device__ __forceinline__ double next_column_mean(const Launch& launch, const Decision& decision,
                                                              uint32_t k)
    {
        const double square = launch.parts != nullptr ? launch.numbers_of(k).sampled
                                                      : sampled_square(launch, k, decision.applied, decision.unscale);
        return next_column_mean(launch.step, decision.applied, k, square);
    }

    // Whether what ranks have added up of a tensor is neither all of it nor nothing, or leaves this one's
    // part out.
    static __device__ __forceinline__ bool is_torn(const Launch& launch, uint32_t k)
    {
        const RfdTensorNumbers& numbers = launch.numbers_of(k);
        const bool present = launch.takes_part(k), here = launch.chunks_of(k) > 0;
        return (present && (numbers.missing > 0.0 || numbers.elements != launch.parts[k].elements)) ||
               (launch.tensors[k].len > 0 && here != present);
    }

    // There is no step where that is so of some tensor; the first one is told.
    static __device__ __forceinline__ void refuse_torn(const Launch& launch, Decision& decision)
    {
        if (any_torn(launch) && threadIdx.x == 0) {
            // Within the list, should the sums change meanwhile.
            uint32_t first = 0;
            while (first + 1 < launch.step.tensor_count && !is_torn(launch, first)) {
                ++first;
            }
            decision.outcome = RFD_OUTCOME_TORN_TENSOR;
            decision.limit = first;
        }
    }

    // What makes minus the velocity the averaged gradient, in length scales.
    static __device__ __forceinline__ double length_of_average(const RfdAdaptive& adaptive,
                                                               const RfdTensorHistory& tensor)
    {
        return tensor.length * ((1.0 - adaptive.averaging) / (1.0 - tensor.average_rest));
    }

    // Whether there is a bound below all losses, so far as is known, and which.
    static __device__ __forceinline__ bool has_floor(const RfdAdaptive& adaptive, const RfdHistory& history)
    {
        return is_finite(adaptive.loss_bound) || history.below == 0.0;
    }

    static __device__ __forceinline__ double floor_of(const RfdAdaptive& adaptive)
    {
        return is_finite(adaptive.loss_bound) ? adaptive.loss_bound : 0.0;
    }

    // The standard deviation of a single loss in the last complete window.
    static __device__ __forceinline__ double deviation(const RfdAdaptive& adaptive, const RfdHistory& history)
    {
        return sqrt(history.squares_before / (2.0 * adaptive.window));
    }

    // What the next loss counts as at most.
    static __device__ __forceinline__ double most(const RfdAdaptive& adaptive, const RfdHistory& before,
                                                  uint64_t applied)
    {
        if (static_cast<double>(applied) < adaptive.settled) {
            return RFD_F64_INFINITY;
        }
        const double average = before.loss / (1.0 - before.loss_rest);
        if (has_floor(adaptive, before)) {
            const double floor = floor_of(adaptive);
            return average > floor ? average + adaptive.loss_growth * (average - floor) : RFD_F64_INFINITY;
        }
        return before.windows > 0.0 ? average + adaptive.noise_growth * deviation(adaptive, before) : RFD_F64_INFINITY;
    }

    static __device__ __forceinline__ double bounded(const RfdAdaptive& adaptive, double trust)
    {
        return fmin(fmax(trust, adaptive.smallest_trust), adaptive.largest_trust);
    }

    // What the trust is multiplied with after two complete windows.
    static __device__ __forceinline__ double verdict(const RfdAdaptive& adaptive, const RfdHistory& history)
    {
        const double fall = history.sum_before - history.sum;
        const double mean = (history.promised_before + history.promised) / 2.0;
        const double promise = adaptive.share * (adaptive.window * mean);
        const double noise = sqrt((history.squares_before + history.squares) / 2.0);
        if (promise == 0.0) {
            return 1.0;
        }
        if (fall < promise - noise) {
            return adaptive.after_less;
        }
        if (fall > promise) {
            return adaptive.after_more;
        }
        return 1.0;
    }

    // What will be remembered of all tensors together, but for what the step promises.
    static __device__ __forceinline__ RfdHistory observed(const RfdAdaptive& adaptive, const RfdHistory& before,
                                                          uint64_t applied, double given)
    {
        const double most_now = most(adaptive, before, applied), beta = adaptive.averaging;
        const double cut = given > most_now ? fmin(before.cut + 1.0, adaptive.cut_losses + 1.0) : 0.0;
        const double loss = cut > adaptive.cut_losses ? given : fmin(given, most_now);
        const double mean = before.sum_before / adaptive.window;
        const bool high =
            before.windows > 0.0 && loss > mean + adaptive.alarm_deviations * deviation(adaptive, before);
        const bool first = before.steps == 0.0 && before.windows == 0.0;
        const double difference = first ? 0.0 : loss - before.last;
        RfdHistory history = before;
        history.loss = beta * history.loss + (1.0 - beta) * loss;
        history.loss_rest *= beta;
        if (!is_finite(adaptive.loss_bound) && given < 0.0) {
            history.below = 1.0;
        }
        history.cut = cut;
        history.last = loss;
        const bool alarmed = before.high >= adaptive.alarm_losses;
        history.high = alarmed ? before.high : high ? before.high + 1.0 : 0.0;
        history.steps += 1.0;
        history.sum += loss;
        history.squares += difference * difference;
        if (history.high >= adaptive.alarm_losses && !alarmed) {
            history.trust = bounded(adaptive, history.trust * adaptive.after_less);
        }
        if (history.steps < adaptive.window) {
            return history;
        }
        if (history.windows > 0.0) {
            history.trust = bounded(adaptive, history.trust * verdict(adaptive, history));
        }
        history.high = history.steps = 0.0;
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
        const uint64_t last = adaptive.ramp - 1;
        return applied < last ? power_of_two(static_cast<int>(applied) - static_cast<int>(last)) : 1.0;
    }

    // Whether there can be a step, and which. `squared` is the squared Σ-norm of the averaged gradient. By
    // thread 0.
    template <Kind KIND>
    static __device__ __forceinline__ void conclude(const Launch& launch, DecisionScratch<KIND>& scratch,
                                                    const Totals& totals, double squared)
    {
        const RfdStep& step = launch.step;
        const RfdAdaptive& adaptive = step.adaptive;
        const RfdSettings& settings = scratch.settings;
        Decision& decision = scratch.decision;
        Scratch<KIND>& own = scratch;
        own.totals = totals;
        own.squared = squared;
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
        } else {
            RfdHistory& history = own.history;
            const bool by_loss = has_floor(adaptive, history) && own.promise < adaptive.largest_rate * squared;
            const double full = by_loss ? own.promise / squared : adaptive.largest_rate;
            const double norm = sqrt(squared);
            const double rate = history.trust * (ramp(adaptive, decision.applied) * full) * settings.multiplier;
            const double step_size = fmin(rate * norm, fmin(settings.max_step_size, RFD_F64_MAX));
            const bool by_size = step_size < rate * norm;
            const double learning_rate = by_size ? step_size / norm : rate;
            history.promised += step_size * norm;
            if (is_finite(squared) && is_finite(learning_rate) && is_finite(history.sum) &&
                is_finite(history.squares) && is_finite(history.promised) && is_finite(history.sum_before) &&
                is_finite(history.squares_before) && is_finite(history.promised_before)) {
                decision.step_size = step_size;
                decision.learning_rate = learning_rate;
                decision.prescaled_rate = learning_rate * decision.unscale;
                decision.prescale = 1.0;
                decision.decay_share = adaptive.decay_share;
                decision.trust = history.trust;
                decision.limit = by_size ? RFD_LIMIT_SIZE : by_loss ? RFD_LIMIT_LOSS : RFD_LIMIT_RATE;
            } else {
                decision.outcome = RFD_OUTCOME_OUT_OF_RANGE;
            }
        }
    }
};
