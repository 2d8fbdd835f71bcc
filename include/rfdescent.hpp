// rfdescent for C++17: what rfdescent.h has, with handles that free themselves and errors as exceptions.
//
// Handles are moved, not copied; a moved-from one is empty and may only be assigned to or destroyed.
// Everything else (threads, streams, who owns tensors) is as rfdescent.h says. Callbacks may throw: the
// exception passes through the library's call as an error and is thrown again behind it.
#ifndef RFDESCENT_HPP
#define RFDESCENT_HPP

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "rfdescent.h"

namespace rfd {

/// A status that is not RFD_OK, with the library's message.
class error : public std::runtime_error {
public:
    error(rfd_status status, const std::string &message) : std::runtime_error(message), status_(status) {}

    rfd_status status() const noexcept { return status_; }

private:
    rfd_status status_;
};

/// A status by its name, e.g. "RFD_ERROR_TENSOR".
inline std::string status_string(rfd_status status) { return rfd_status_string(status); }

/// The library's release, e.g. "0.1.0".
inline std::string version() { return rfd_version(); }

/// Throws unless the status is RFD_OK.
inline void check(rfd_status status) {
    if (status != RFD_OK) {
        throw error(status, rfd_last_error());
    }
}

/// Sets how many threads the library works with from the next step on; 0 for the default.
inline void set_threads(std::uint32_t count) { check(rfd_set_threads(count)); }

/// Throws if the library's ABI is not the one of this header.
inline void check_abi() {
    if (rfd_abi_version() != RFD_ABI_VERSION) {
        throw error(RFD_ERROR_UNSUPPORTED, "compiled for ABI " + std::to_string(RFD_ABI_VERSION) +
                                               " of rfdescent, but the library has " +
                                               std::to_string(rfd_abi_version()));
    }
}

namespace detail {

template <auto destroy>
struct deleter {
    template <class T>
    void operator()(T *handle) const noexcept {
        destroy(handle);
    }
};

template <class T, auto destroy>
using handle = std::unique_ptr<T, deleter<destroy>>;

/// Calls `make(&handle)` and takes what it made.
template <class Handle, class Make>
Handle made(Make make) {
    typename Handle::pointer raw = nullptr;
    check(make(&raw));
    return Handle(raw);
}

using buffer = handle<rfd_buffer, rfd_buffer_destroy>;

inline std::string text(const buffer &bytes) {
    return {reinterpret_cast<const char *>(rfd_buffer_data(bytes.get())), rfd_buffer_size(bytes.get())};
}

/// Throws unless two lists have one length.
inline void same_length(const char *name, std::size_t count, const char *of, std::size_t expected) {
    if (count != expected) {
        throw error(RFD_ERROR_INVALID_ARGUMENT, std::string("number of ") + name + " = " + std::to_string(count) +
                                                    ": there are " + std::to_string(expected) + " " + of);
    }
}

template <class Struct>
Struct sized() {
    Struct value{};
    value.size = sizeof value;
    return value;
}

} // namespace detail

/// Options of auto_fit with their defaults.
inline rfd_auto_fit_options auto_fit_options() {
    rfd_auto_fit_options options;
    check(rfd_auto_fit_options_init(&options, sizeof options));
    return options;
}

/// Settings of a group with their defaults.
inline rfd_group group() {
    rfd_group settings;
    check(rfd_group_init(&settings, sizeof settings));
    return settings;
}

/// Options of an optimizer with their defaults.
inline rfd_optimizer_options optimizer_options() {
    rfd_optimizer_options options;
    check(rfd_optimizer_options_init(&options, sizeof options));
    return options;
}

/// Settings of the adaptive method with their defaults.
inline rfd_adaptive adaptive() {
    rfd_adaptive settings;
    check(rfd_adaptive_init(&settings, sizeof settings));
    return settings;
}

/// The scalars of a step with their defaults. Where no loss is given it is NaN, so that a step that finds
/// none is skipped.
inline rfd_step_input step_input(double loss = std::numeric_limits<double>::quiet_NaN()) {
    rfd_step_input input;
    check(rfd_step_input_init(&input, sizeof input));
    input.loss = loss;
    return input;
}

/// A value and its derivative.
struct value_and_slope {
    double value, slope;
};

/// A fitted covariance model.
class model {
public:
    model(const std::string &covariance, const rfd_moments &moments)
        : handle_(detail::made<handle>(
              [&](rfd_model **out) { return rfd_model_create(covariance.c_str(), &moments, out); })) {}

    model(const std::string &covariance, const rfd_fit &fit, std::uint64_t dims)
        : handle_(detail::made<handle>(
              [&](rfd_model **out) { return rfd_model_create_from_fit(covariance.c_str(), &fit, dims, out); })) {}

    static model load(const std::string &file) {
        return model(detail::made<handle>([&](rfd_model **out) { return rfd_model_load(file.c_str(), out); }));
    }

    static model from_json(std::string_view json) {
        return model(
            detail::made<handle>([&](rfd_model **out) { return rfd_model_from_json(json.data(), json.size(), out); }));
    }

    void save(const std::string &file) const { check(rfd_model_save(get(), file.c_str())); }

    std::string to_json() const {
        return detail::text(
            detail::made<detail::buffer>([&](rfd_buffer **out) { return rfd_model_to_json(get(), out); }));
    }

    std::string covariance() const { return rfd_model_covariance(get()); }

    rfd_moments moments() const {
        auto moments = detail::sized<rfd_moments>();
        check(rfd_model_moments(get(), &moments));
        return moments;
    }

    double length_scale() const {
        double value;
        check(rfd_model_scales(get(), &value, nullptr));
        return value;
    }

    double plateau_step_size() const {
        double value;
        check(rfd_model_scales(get(), nullptr, &value));
        return value;
    }

    double asymptotic_learning_rate(double limiting_loss, double inv_batch_size = 0.0) const {
        double value;
        check(rfd_model_asymptotic_learning_rate(get(), limiting_loss, inv_batch_size, &value));
        return value;
    }

    double step_size(double loss, double grad_norm, double inv_batch_size = 0.0, std::uint32_t mode = RFD_MODE_RFD,
                     double conservatism = 0.0) const {
        double value;
        check(rfd_model_step(get(), loss, grad_norm, inv_batch_size, mode, conservatism, &value, nullptr));
        return value;
    }

    value_and_slope conditional_mean(double loss, double grad_norm, double inv_batch_size, double step_size) const {
        value_and_slope result;
        check(rfd_model_conditional_mean(get(), loss, grad_norm, inv_batch_size, step_size, &result.value,
                                         &result.slope));
        return result;
    }

    value_and_slope conditional_variance(double inv_batch_size, double step_size) const {
        value_and_slope result;
        check(rfd_model_conditional_variance(get(), inv_batch_size, step_size, &result.value, &result.slope));
        return result;
    }

    rfd_model *get() const noexcept { return handle_.get(); }

private:
    using handle = detail::handle<rfd_model, rfd_model_destroy>;
    explicit model(handle made) : handle_(std::move(made)) {}
    handle handle_;
};

/// Settings of the method of a fitted model with their defaults. The model must live as long as they are
/// used.
inline rfd_fitted fitted(const model &model) {
    rfd_fitted settings;
    check(rfd_fitted_init(&settings, sizeof settings));
    settings.model = model.get();
    return settings;
}

/// Sufficient statistics of samples.
class statistics {
public:
    statistics() : handle_(detail::made<handle>(rfd_statistics_create)) {}

    /// Takes a handle of the C interface.
    explicit statistics(rfd_statistics *made) noexcept : handle_(made) {}

    static statistics from_json(std::string_view json) {
        return statistics(detail::made<handle>([&](rfd_statistics **out) {
                              return rfd_statistics_from_json(json.data(), json.size(), out);
                          }).release());
    }

    void push(double loss, double sq_grad_norm, std::uint64_t batch_size) {
        check(rfd_statistics_push(get(), loss, sq_grad_norm, batch_size));
    }

    /// Adds all samples, or none when one is outside its domain.
    void push_array(const std::vector<double> &losses, const std::vector<double> &sq_grad_norms,
                    const std::vector<std::uint64_t> &batch_sizes) {
        detail::same_length("sq_grad_norms", sq_grad_norms.size(), "losses", losses.size());
        detail::same_length("batch_sizes", batch_sizes.size(), "losses", losses.size());
        check(rfd_statistics_push_array(get(), losses.data(), sq_grad_norms.data(), batch_sizes.data(), losses.size()));
    }

    void push_csv(const std::string &file) { check(rfd_statistics_push_csv(get(), file.c_str())); }

    void merge(const statistics &other) { check(rfd_statistics_merge(get(), other.get())); }

    std::uint64_t batches() const {
        std::uint64_t count;
        check(rfd_statistics_counts(get(), &count, nullptr));
        return count;
    }

    std::uint64_t examples() const {
        std::uint64_t count;
        check(rfd_statistics_counts(get(), nullptr, &count));
        return count;
    }

    rfd_fit fit() const {
        auto result = detail::sized<rfd_fit>();
        check(rfd_statistics_fit(get(), &result));
        return result;
    }

    std::string to_json() const {
        return detail::text(
            detail::made<detail::buffer>([&](rfd_buffer **out) { return rfd_statistics_to_json(get(), out); }));
    }

    rfd_statistics *get() const noexcept { return handle_.get(); }

private:
    using handle = detail::handle<rfd_statistics, rfd_statistics_destroy>;
    handle handle_;
};

/// A fit to samples that are at hand.
struct fitted_samples {
    rfd_fit fit;
    std::string warnings; ///< a line for each; empty for none
};

/// Fits mean and variances to samples; `flags` is RFD_FIT_ROBUST or 0.
inline fitted_samples fit_array(const std::vector<double> &losses, const std::vector<double> &sq_grad_norms,
                                const std::vector<std::uint64_t> &batch_sizes, std::uint32_t flags = 0) {
    detail::same_length("sq_grad_norms", sq_grad_norms.size(), "losses", losses.size());
    detail::same_length("batch_sizes", batch_sizes.size(), "losses", losses.size());
    auto fit = detail::sized<rfd_fit>();
    const auto warnings = detail::made<detail::buffer>([&](rfd_buffer **out) {
        return rfd_fit_array(losses.data(), sq_grad_norms.data(), batch_sizes.data(), losses.size(), flags, &fit, out);
    });
    return {fit, detail::text(warnings)};
}

/// How many more examples a fit needs for its relative standard deviation to fall to `tolerance`.
inline std::uint64_t fit_further_examples(const rfd_fit &fit, double tolerance) {
    std::uint64_t examples;
    check(rfd_fit_further_examples(&fit, tolerance, &examples));
    return examples;
}

/// Fits mean and variances to a CSV file of samples; `flags` is RFD_FIT_ROBUST or 0.
inline fitted_samples fit_csv(const std::string &file, std::uint32_t flags = 0) {
    auto fit = detail::sized<rfd_fit>();
    const auto warnings = detail::made<detail::buffer>(
        [&](rfd_buffer **out) { return rfd_fit_csv(file.c_str(), flags, &fit, out); });
    return {fit, detail::text(warnings)};
}

/// A distribution of batch sizes to sample.
class design {
public:
    design(double variance, double noise_variance, std::uint64_t min_batch_size, std::uint64_t max_batch_size = 0,
           std::uint32_t kind = RFD_DESIGN_GIBBS)
        : handle_(detail::made<handle>([&](rfd_design **out) {
              return rfd_design_create(variance, noise_variance, min_batch_size, max_batch_size, kind, out);
          })) {}

    /// That of the next examples, given those drawn already.
    design after(const statistics &drawn, std::uint64_t further) const {
        return design(detail::made<handle>(
            [&](rfd_design **out) { return rfd_design_after(get(), drawn.get(), further, out); }));
    }

    /// Batch sizes with their shares of the mini-batches.
    std::vector<std::pair<std::uint64_t, double>> points() const {
        std::vector<std::pair<std::uint64_t, double>> points(rfd_design_size(get()));
        for (std::size_t i = 0; i < points.size(); i++) {
            check(rfd_design_point(get(), i, &points[i].first, &points[i].second));
        }
        return points;
    }

    std::uint64_t quantile(double u) const {
        std::uint64_t batch_size;
        check(rfd_design_quantile(get(), u, &batch_size));
        return batch_size;
    }

    double examples_needed(double tolerance) const {
        double examples;
        check(rfd_design_cost(get(), tolerance, &examples, nullptr));
        return examples;
    }

    rfd_design *get() const noexcept { return handle_.get(); }

private:
    using handle = detail::handle<rfd_design, rfd_design_destroy>;
    explicit design(handle made) : handle_(std::move(made)) {}
    handle handle_;
};

/// A mini-batch at a random initialisation: its mean loss and the squared norm of that mean's gradient.
struct batch_sample {
    double loss, sq_grad_norm;
};

/// A mini-batch to evaluate.
struct batch_request {
    std::uint64_t batch_size, seed;
};

/// What auto_fit found.
struct auto_fitted {
    rfd_fit fit;
    statistics samples;
    std::string warnings; ///< a line for each; empty for none
};

/// Returns whether to go on.
using progress_function = std::function<bool(const rfd_progress &)>;

namespace detail {

/// What the callbacks of a run call, and what one of them threw.
template <class Sample>
struct callbacks {
    const std::function<Sample> &sample;
    const progress_function &progress;
    std::exception_ptr thrown;

    /// Keeps what `body` throws; 0 when it returns true.
    template <class Body>
    static std::int32_t call(void *data, Body body) {
        auto &self = *static_cast<callbacks *>(data);
        try {
            return body(self) ? 0 : 1;
        } catch (...) {
            self.thrown = std::current_exception();
            return 1;
        }
    }

    static std::int32_t report(void *data, const rfd_progress *now) {
        return call(data, [&](callbacks &self) { return self.progress(*now); });
    }
};

/// Calls `run(progress, &fit, &samples, &warnings)` and throws what a callback threw in it.
template <class Callbacks, class Run>
auto_fitted run_auto_fit(const Callbacks &called, Run run) {
    auto fit = sized<rfd_fit>();
    rfd_statistics *samples = nullptr;
    rfd_buffer *warnings = nullptr;
    const rfd_progress_callback progress = called.progress ? &Callbacks::report : nullptr;
    const rfd_status status = run(progress, &fit, &samples, &warnings);
    if (called.thrown) {
        std::rethrow_exception(called.thrown);
    }
    check(status);
    statistics owned(samples);
    return {fit, std::move(owned), text(buffer(warnings))};
}

} // namespace detail

/// Draws samples until the fit is precise enough. `sample(batch_size, seed)` evaluates a mini-batch;
/// `progress(now)` returns whether to go on. Either may throw.
inline auto_fitted auto_fit(const rfd_auto_fit_options &options, std::uint64_t dims,
                            const std::function<batch_sample(std::uint64_t, std::uint64_t)> &sample,
                            const progress_function &progress = {}) {
    using callbacks = detail::callbacks<batch_sample(std::uint64_t, std::uint64_t)>;
    callbacks user{sample, progress, nullptr};
    const rfd_sample_callback on_sample = [](void *data, std::uint64_t batch_size, std::uint64_t seed, double *loss,
                                             double *sq_grad_norm) {
        return callbacks::call(data, [&](callbacks &self) {
            const batch_sample drawn = self.sample(batch_size, seed);
            *loss = drawn.loss;
            *sq_grad_norm = drawn.sq_grad_norm;
            return true;
        });
    };
    return detail::run_auto_fit(user, [&](rfd_progress_callback on_progress, rfd_fit *fit, rfd_statistics **samples,
                                          rfd_buffer **warnings) {
        return rfd_auto_fit(&options, dims, sample ? on_sample : nullptr, on_progress, &user, fit, samples, warnings);
    });
}

/// The same with up to `most_at_once` mini-batches at once: `sample(requests, drawn)` evaluates all of
/// `requests` and appends a result for each to `drawn`, which is empty. Those that are there when it throws
/// count.
inline auto_fitted
auto_fit_many(const rfd_auto_fit_options &options, std::uint64_t dims, std::size_t most_at_once,
              const std::function<void(const std::vector<batch_request> &, std::vector<batch_sample> &)> &sample,
              const progress_function &progress = {}) {
    using callbacks = detail::callbacks<void(const std::vector<batch_request> &, std::vector<batch_sample> &)>;
    callbacks user{sample, progress, nullptr};
    const rfd_sample_many_callback on_sample = [](void *data, std::size_t count, const std::uint64_t *batch_sizes,
                                                  const std::uint64_t *seeds, double *losses, double *sq_grad_norms,
                                                  std::size_t *done) {
        std::vector<batch_sample> drawn;
        const std::int32_t code = callbacks::call(data, [&](callbacks &self) {
            std::vector<batch_request> requests;
            for (std::size_t i = 0; i < count; i++) {
                requests.push_back({batch_sizes[i], seeds[i]});
            }
            self.sample(requests, drawn);
            return true;
        });
        for (std::size_t i = 0; i < count && i < drawn.size(); i++) {
            losses[i] = drawn[i].loss;
            sq_grad_norms[i] = drawn[i].sq_grad_norm;
        }
        *done = drawn.size();
        return code;
    };
    return detail::run_auto_fit(user, [&](rfd_progress_callback on_progress, rfd_fit *fit, rfd_statistics **samples,
                                          rfd_buffer **warnings) {
        return rfd_auto_fit_many(&options, dims, most_at_once, sample ? on_sample : nullptr, on_progress, &user, fit,
                                 samples, warnings);
    });
}

/// One parameter of an optimizer.
struct tensor_spec {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::uint32_t dtype = RFD_DTYPE_F32;
    std::uint32_t group = 0;
    std::uint32_t flags = 0;
    std::uint64_t offset = 0;
    std::uint64_t row = 0;
    /// In sharded training, of what tensor this is a part, and where it starts there; empty for a whole one.
    std::vector<std::uint64_t> whole = {};
    std::vector<std::uint64_t> start = {};
};

/// The format of float or double.
template <class T>
constexpr std::uint32_t dtype_of() {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "say the dtype yourself for half formats");
    return std::is_same_v<T, float> ? RFD_DTYPE_F32 : RFD_DTYPE_F64;
}

namespace detail {

template <class Descriptor, class Data>
Descriptor described(Data *data, std::uint64_t count, std::uint32_t dtype, std::uint32_t device_kind,
                     std::uint32_t device_index) {
    auto tensor = sized<Descriptor>();
    tensor.data = data;
    tensor.count = count;
    tensor.dtype = dtype;
    tensor.device_kind = device_kind;
    tensor.device_index = device_index;
    return tensor;
}

} // namespace detail

/// A parameter in the process's memory.
template <class T>
rfd_tensor host_tensor(T *data, std::size_t count) {
    return detail::described<rfd_tensor>(data, count, dtype_of<T>(), RFD_DEVICE_CPU, 0);
}

/// A gradient in the process's memory.
template <class T>
rfd_gradient host_gradient(const T *data, std::size_t count) {
    return detail::described<rfd_gradient>(data, count, dtype_of<T>(), RFD_DEVICE_CPU, 0);
}

/// A parameter in the memory of a CUDA device.
inline rfd_tensor cuda_tensor(void *data, std::uint64_t count, std::uint32_t dtype, std::uint32_t device_index = 0) {
    return detail::described<rfd_tensor>(data, count, dtype, RFD_DEVICE_CUDA, device_index);
}

/// A gradient in the memory of a CUDA device.
inline rfd_gradient cuda_gradient(const void *data, std::uint64_t count, std::uint32_t dtype,
                                  std::uint32_t device_index = 0) {
    return detail::described<rfd_gradient>(data, count, dtype, RFD_DEVICE_CUDA, device_index);
}

/// Random Function Descent over a fixed list of tensors. Where a function has a stream it is null on the CPU.
class optimizer {
public:
    /// One of a fitted model.
    optimizer(const rfd_fitted &fitted, const rfd_optimizer_options &options, const std::vector<tensor_spec> &tensors)
        : handle_(made(rfd_fitted_optimizer_create, &fitted, options, tensors)) {}

    /// The same with the default settings.
    optimizer(const model &model, const rfd_optimizer_options &options, const std::vector<tensor_spec> &tensors)
        : optimizer(fitted(model), options, tensors) {}

    /// One of the adaptive method, which needs no model.
    optimizer(const rfd_adaptive &adaptive, const rfd_optimizer_options &options, const std::vector<tensor_spec> &tensors)
        : handle_(made(rfd_adaptive_optimizer_create, &adaptive, options, tensors)) {}

    /// A step on the CPU.
    rfd_step_report step(const std::vector<rfd_tensor> &params, const std::vector<rfd_gradient> &grads,
                         const rfd_step_input &input) {
        same_length(params, grads);
        auto report = detail::sized<rfd_step_report>();
        check(rfd_optimizer_step(get(), params.data(), grads.data(), params.size(), &input, nullptr, &report));
        return report;
    }

    /// Queues a step on a device.
    void step_on(void *stream, const std::vector<rfd_tensor> &params, const std::vector<rfd_gradient> &grads,
                 const rfd_step_input &input) {
        same_length(params, grads);
        check(rfd_optimizer_step(get(), params.data(), grads.data(), params.size(), &input, stream, nullptr));
    }

    /// A step on the CPU over all tensors one after the other in two arrays.
    template <class T>
    rfd_step_report step_flat(T *params, const T *grads, std::size_t count, const rfd_step_input &input) {
        return step_flat(params, grads, count, dtype_of<T>(), input);
    }

    /// The same for arrays of any format.
    rfd_step_report step_flat(void *params, const void *grads, std::size_t count, std::uint32_t dtype,
                              const rfd_step_input &input) {
        auto report = detail::sized<rfd_step_report>();
        check(rfd_optimizer_step_flat(get(), params, grads, count, dtype, &input, nullptr, &report));
        return report;
    }

    /// Queues such a step on a device.
    void step_flat_on(void *stream, void *params, const void *grads, std::size_t count, std::uint32_t dtype,
                      const rfd_step_input &input) {
        check(rfd_optimizer_step_flat(get(), params, grads, count, dtype, &input, stream, nullptr));
    }

    /// Takes a copy of one tensor's gradient, added to what was given of it before, for finish. CPU only.
    template <class T>
    void give_gradient(std::size_t index, const T *grad, std::size_t count) {
        give_gradient(index, grad, count, dtype_of<T>());
    }

    /// The same for a gradient of any format.
    void give_gradient(std::size_t index, const void *grad, std::size_t count, std::uint32_t dtype) {
        check(rfd_optimizer_give_gradient(get(), index, grad, count, dtype));
    }

    /// A step on the CPU with the gradients that were given.
    rfd_step_report finish(const std::vector<rfd_tensor> &params, const rfd_step_input &input) {
        auto report = detail::sized<rfd_step_report>();
        check(rfd_optimizer_finish(get(), params.data(), params.size(), &input, &report));
        return report;
    }

    /// Throws what a step would, without taking it, for processes that tell each other before.
    void check_step(const std::vector<rfd_tensor> &params, const std::vector<rfd_gradient> &grads,
                    const rfd_step_input &input, void *stream = nullptr) {
        same_length(params, grads);
        check(rfd_optimizer_check_step(get(), params.data(), grads.data(), params.size(), &input, stream));
    }

    /// How many numbers ranks add up between the halves of a step in sharded training.
    std::size_t sums_len() {
        std::size_t len;
        check(rfd_optimizer_sums_len(get(), &len));
        return len;
    }

    /// First half of a step in sharded training: sums_len() numbers, where the tensors are.
    double *local_sums(const std::vector<rfd_tensor> &params, const std::vector<rfd_gradient> &grads,
                       const rfd_step_input &input, void *stream = nullptr) {
        same_length(params, grads);
        double *sums;
        check(rfd_optimizer_local_sums(get(), params.data(), grads.data(), params.size(), &input, stream, &sums));
        return sums;
    }

    /// Second half, with the sums of all ranks. On a device the report must not be asked for.
    void step_with_sums(const std::vector<rfd_tensor> &params, const std::vector<rfd_gradient> &grads, const double *sums,
                        const rfd_step_input &input, void *stream = nullptr, rfd_step_report *report = nullptr) {
        same_length(params, grads);
        check(rfd_optimizer_step_with_sums(get(), params.data(), grads.data(), params.size(), sums, &input, stream,
                                           report));
    }

    void init_master_weights(const std::vector<rfd_tensor> &params, void *stream = nullptr) {
        check(rfd_optimizer_init_master_weights(get(), params.data(), params.size(), stream));
    }

    /// What the last finished step did.
    rfd_step_report report() const {
        auto report = detail::sized<rfd_step_report>();
        check(rfd_optimizer_report(get(), &report));
        return report;
    }

    /// Waits for the stream before.
    rfd_step_report wait_report(void *stream = nullptr) const {
        auto report = detail::sized<rfd_step_report>();
        check(rfd_optimizer_wait_report(get(), stream, &report));
        return report;
    }

    /// The kernels that steps on a device take, and of the generic ones why.
    std::string kernels() const {
        return detail::text(
            detail::made<detail::buffer>([&](rfd_buffer **out) { return rfd_optimizer_kernels(get(), out); }));
    }

    /// Whether a step on a device may be one launch, whose blocks wait for one another.
    void set_one_launch(bool one_launch) { check(rfd_optimizer_set_one_launch(get(), one_launch)); }

    void set_multiplier(double multiplier, void *stream = nullptr) {
        check(rfd_optimizer_set_multiplier(get(), multiplier, stream));
    }

    /// Infinity for no cap.
    void set_max_step_size(double max_step_size, void *stream = nullptr) {
        check(rfd_optimizer_set_max_step_size(get(), max_step_size, stream));
    }

    /// Batch size and momentum may change; the model may be null.
    void set_fitted(const rfd_fitted &fitted, void *stream = nullptr) {
        check(rfd_optimizer_set_fitted(get(), &fitted, stream));
    }

    void set_weight_decay(std::size_t group, double weight_decay, void *stream = nullptr) {
        check(rfd_optimizer_set_weight_decay(get(), group, weight_decay, stream));
    }

    void set_group(std::size_t group, const rfd_group &settings, void *stream = nullptr) {
        check(rfd_optimizer_set_group(get(), group, &settings, stream));
    }

    void save_state(const std::string &file, void *stream = nullptr) const {
        check(rfd_optimizer_save_state(get(), file.c_str(), stream));
    }

    void load_state(const std::string &file, void *stream = nullptr) {
        check(rfd_optimizer_load_state(get(), file.c_str(), stream));
    }

    std::string state(void *stream = nullptr) const {
        return detail::text(detail::made<detail::buffer>(
            [&](rfd_buffer **out) { return rfd_optimizer_get_state(get(), stream, out); }));
    }

    void set_state(std::string_view state, void *stream = nullptr) {
        check(rfd_optimizer_set_state(get(), state.data(), state.size(), stream));
    }

    rfd_optimizer *get() const noexcept { return handle_.get(); }

private:
    using handle = detail::handle<rfd_optimizer, rfd_optimizer_destroy>;

    template <class Create, class Method>
    static handle made(Create create, const Method *method, const rfd_optimizer_options &options,
                       const std::vector<tensor_spec> &tensors) {
        std::vector<rfd_tensor_spec> specs;
        for (const tensor_spec &tensor : tensors) {
            auto spec = detail::sized<rfd_tensor_spec>();
            spec.name = tensor.name.c_str();
            spec.shape = tensor.shape.data();
            spec.rank = static_cast<std::uint32_t>(tensor.shape.size());
            spec.dtype = tensor.dtype;
            spec.group = tensor.group;
            spec.flags = tensor.flags;
            spec.offset = tensor.offset;
            spec.row = tensor.row;
            if (!tensor.whole.empty() || !tensor.start.empty()) {
                detail::same_length("whole", tensor.whole.size(), "sizes in shape", tensor.shape.size());
                detail::same_length("start", tensor.start.size(), "sizes in shape", tensor.shape.size());
                spec.whole = tensor.whole.data();
                spec.start = tensor.start.data();
            }
            specs.push_back(spec);
        }
        return detail::made<handle>(
            [&](rfd_optimizer **out) { return create(method, &options, specs.data(), specs.size(), out); });
    }

    static void same_length(const std::vector<rfd_tensor> &params, const std::vector<rfd_gradient> &grads) {
        detail::same_length("grads", grads.size(), "params", params.size());
    }

    handle handle_;
};

} // namespace rfd

#endif
