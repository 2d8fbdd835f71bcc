/*
 * rfdescent: Random Function Descent, an optimizer whose step sizes follow from the statistics of the cost.
 *
 * Rules that hold unless a function says otherwise:
 *
 * - Functions return an rfd_status. Anything but RFD_OK is an error, whose message rfd_last_error() has.
 *   Outputs are written only on success; what was an input is as it was.
 * - Handles (rfd_model, rfd_statistics, ...) are made by the library and freed by the caller, with the
 *   _destroy function of their kind, once. A handle must not be in use then. What a function is given by
 *   pointer is not kept after it returns.
 * - Structs begin with their size: set it to sizeof before the call, or use the _init function. So a program
 *   that was compiled with an older header runs with a newer library.
 * - Texts are UTF-8 and end with 0; names of files are whatever the system takes.
 * - Callbacks must not throw, longjmp or otherwise unwind into the library.
 * - Large tensors are worked on by the calling thread and by threads of the library, as many in all as there
 *   are processors, or as RAYON_NUM_THREADS or rfd_set_threads say. Results do not depend on their number.
 *
 * Made from capi/src by cbindgen: change it there.
 */

#ifndef RFDESCENT_H
#define RFDESCENT_H

#include <stddef.h>
#include <stdint.h>

/**
 * Version of the C ABI. It changes when a program that was compiled with an older header can no longer run
 * with the new shared library; the library's soname ends in it.
 */
#define RFD_ABI_VERSION 1

/**
 * The minimiser of the conditional expectation: RFD as published.
 */
#define RFD_MODE_RFD 0

/**
 * Its asymptote for small gradient cost quotients: a constant learning rate for a given loss.
 */
#define RFD_MODE_A_RFD 1

/**
 * The asymptote, but no step longer than RFD's longest.
 */
#define RFD_MODE_CLIPPED_A_RFD 2

/**
 * A flag of a fit: samples that look foreign to the others, as those of initialisations that blow up, are
 * left out. Where there are none the fit is the same to the bit.
 */
#define RFD_FIT_ROBUST 1

/**
 * Spreads the batch sizes out, which is safe against a wrong first guess of the variances. As published.
 */
#define RFD_DESIGN_GIBBS 0

/**
 * The two batch sizes that give the smallest variance per example.
 */
#define RFD_DESIGN_C_OPTIMAL 1

/**
 * Foreign samples end the run with RFD_ERROR_ESTIMATION where they decide over the fit, changing a variance
 * by more than a factor of 2, or leave none: no number of further samples would make up for that. Where they
 * do not, a warning names them.
 */
#define RFD_FOREIGN_REFUSE 0

/**
 * Foreign samples are left out of the fit, as with RFD_FIT_ROBUST; a warning names them.
 */
#define RFD_FOREIGN_LEAVE_OUT 1

/**
 * Foreign samples are part of the fit, for losses that are known to have heavy tails; a warning names them.
 */
#define RFD_FOREIGN_KEEP 2

/**
 * IEEE binary32.
 */
#define RFD_DTYPE_F32 0

/**
 * IEEE binary64.
 */
#define RFD_DTYPE_F64 1

/**
 * IEEE binary16.
 */
#define RFD_DTYPE_F16 2

/**
 * bfloat16.
 */
#define RFD_DTYPE_BF16 3

/**
 * Memory of the process.
 */
#define RFD_DEVICE_CPU 0

/**
 * Memory of a CUDA device.
 */
#define RFD_DEVICE_CUDA 1

/**
 * A flag of a tensor: its gradient does not count in the global norm. In sharded training a tensor that
 * several ranks hold counts on one of them.
 */
#define RFD_TENSOR_NOT_IN_NORM 1

/**
 * A flag of a tensor that is a part of a whole one: on some rank the part is cut along another dimension
 * than the first. The same on all ranks.
 */
#define RFD_TENSOR_SPLITS_ROWS 2

/**
 * A flag of an optimizer: f16 and bf16 parameters get f32 master weights, which steps update and the
 * parameters are rounded from.
 */
#define RFD_OPTIMIZER_MASTER_WEIGHTS 1

/**
 * A flag of an optimizer: f16 and bf16 parameters without master weights are rounded stochastically.
 */
#define RFD_OPTIMIZER_STOCHASTIC_ROUNDING 2

/**
 * A flag of a group: each of its tensors keeps its Euclidean norm. Those of norm 0 and of one element are
 * left alone.
 */
#define RFD_GROUP_NORM_LOCK 1

/**
 * No step has been seen yet.
 */
#define RFD_OUTCOME_NONE 0

/**
 * Parameters were updated.
 */
#define RFD_OUTCOME_APPLIED 1

/**
 * Skipped: found_inf was not 0.
 */
#define RFD_OUTCOME_FOUND_INF 2

/**
 * Skipped: the loss is NaN or infinite. NaN it is too where a program forgot to set it after
 * rfd_step_input_init.
 */
#define RFD_OUTCOME_NON_FINITE_LOSS 3

/**
 * Skipped: a gradient has a NaN or infinite element, or the norm exceeds the range of double.
 */
#define RFD_OUTCOME_NON_FINITE_GRADIENT 4

/**
 * Skipped: the gradient is 0.
 */
#define RFD_OUTCOME_ZERO_GRADIENT 5

/**
 * Skipped: a setting in a device's memory is outside its domain.
 */
#define RFD_OUTCOME_INVALID_OPTION 6

/**
 * Skipped: with momentum or the adaptive method, gradient norm or learning rate leave the range of float, in
 * which velocities are kept.
 */
#define RFD_OUTCOME_OUT_OF_RANGE 7

/**
 * Skipped: the loss is below the lower bound given to the adaptive method.
 */
#define RFD_OUTCOME_LOSS_BELOW_BOUND 8

/**
 * Nothing limited the step by the adaptive method's rules: it was skipped, or is of another method.
 */
#define RFD_LIMIT_NONE 0

/**
 * The largest rate of the adaptive method.
 */
#define RFD_LIMIT_RATE 1

/**
 * The share of the loss that a step of the adaptive method may promise to lower it by.
 */
#define RFD_LIMIT_LOSS 2

/**
 * `max_step_size` of the options.
 */
#define RFD_LIMIT_SIZE 3

/**
 * Bytes that the library made: a text or a saved state. Immutable, so any thread may read it.
 */
typedef struct rfd_buffer rfd_buffer;

/**
 * A distribution of batch sizes to sample. Immutable, so any number of threads may use it at once.
 */
typedef struct rfd_design rfd_design;

/**
 * A fitted covariance model. Immutable, so any number of threads may use it at once.
 */
typedef struct rfd_model rfd_model;

/**
 * Random Function Descent over a fixed list of tensors, with what it remembers of them. One thread at a
 * time: a call while another thread is in one returns RFD_ERROR_BUSY; rfd_optimizer_report and
 * rfd_optimizer_wait_report may be called at any time. Different optimizers are independent.
 */
typedef struct rfd_optimizer rfd_optimizer;

/**
 * Sufficient statistics of samples (loss, squared gradient norm, batch size) at random initialisations;
 * memory grows with the number of distinct batch sizes only. One thread at a time: a call while another
 * thread is in one returns RFD_ERROR_BUSY. Give each worker its own and merge them.
 */
typedef struct rfd_statistics rfd_statistics;

/**
 * What a function returns: RFD_OK or one of RFD_ERROR_*. Numbers are never used again for something else;
 * later releases may add some, so treat what you do not know as an error.
 */
typedef uint32_t rfd_status;

/**
 * Mean and variances of the cost and of its mini-batch noise.
 */
typedef struct rfd_moments {
    /**
     * sizeof(rfd_moments).
     */
    size_t size;
    /**
     * Mean of the cost.
     */
    double mean;
    /**
     * Variance of the cost; > 0.
     */
    double variance;
    /**
     * Variance of one example's loss around the cost; >= 0.
     */
    double noise_variance;
    /**
     * Expected squared norm of the cost's gradient; > 0.
     */
    double grad_variance;
    /**
     * Expected squared norm of one example's gradient noise; >= 0.
     */
    double noise_grad_variance;
    /**
     * Number of parameters; >= 1.
     */
    uint64_t dims;
} rfd_moments;

/**
 * Mean and variances that were estimated from samples.
 */
typedef struct rfd_fit {
    /**
     * sizeof(rfd_fit).
     */
    size_t size;
    /**
     * Mean of the cost.
     */
    double mean;
    /**
     * Variance of the cost.
     */
    double variance;
    /**
     * Variance of one example's loss around the cost.
     */
    double noise_variance;
    /**
     * Expected squared norm of the cost's gradient.
     */
    double grad_variance;
    /**
     * Expected squared norm of one example's gradient noise.
     */
    double noise_grad_variance;
    /**
     * Estimated standard deviation of `variance` divided by it; 0.3 is good enough for training.
     */
    double relative_std;
    /**
     * Mini-batches used: as many as samples.
     */
    uint64_t batches;
    /**
     * Examples used: the sum of the batch sizes.
     */
    uint64_t examples;
    /**
     * Reweightings until mean, variance and noise variance settled.
     */
    uint32_t iterations_loss;
    /**
     * Reweightings until the gradient's variances settled.
     */
    uint32_t iterations_grad;
} rfd_fit;

/**
 * Options of rfd_auto_fit; rfd_auto_fit_options_init sets the defaults.
 */
typedef struct rfd_auto_fit_options {
    /**
     * sizeof(rfd_auto_fit_options).
     */
    size_t size;
    /**
     * Relative standard deviation of the variance at which to stop. Default 0.3.
     */
    double tolerance;
    /**
     * Examples to draw before the first fit. Default 6000.
     */
    uint64_t initial_budget;
    /**
     * Examples to draw at most, those in the cache included. Default 1,000,000.
     */
    uint64_t max_budget;
    /**
     * Smallest batch size to draw. Default 20.
     */
    uint64_t min_batch_size;
    /**
     * Largest batch size to draw: the size of the data set. 0, the default: the budget is the limit.
     */
    uint64_t max_batch_size;
    /**
     * All that is random follows from it. Default 0.
     */
    uint64_t seed;
    /**
     * CSV file that keeps the samples: created, or gone on from, so that an interrupted run loses none.
     * Null, the default: none.
     */
    const char *cache;
    /**
     * One of RFD_DESIGN_*. Default RFD_DESIGN_GIBBS.
     */
    uint32_t design;
    /**
     * What to do about samples that look foreign to the others, as those of initialisations that blow up:
     * one of RFD_FOREIGN_*. Default RFD_FOREIGN_REFUSE.
     */
    uint32_t on_foreign;
} rfd_auto_fit_options;

/**
 * Evaluates the cost for rfd_auto_fit: initialises the parameters at random, draws `batch_size` examples at
 * random, and writes the mean loss over them and the squared norm of that mean's gradient. All randomness
 * should come from `seed`.
 *
 * Returns 0, or any other number to end the run with RFD_ERROR_CALLBACK. Must not throw, longjmp or
 * otherwise unwind. Called on the thread that called rfd_auto_fit.
 */
typedef int32_t (*rfd_sample_callback)(void *user_data,
                                       uint64_t batch_size,
                                       uint64_t seed,
                                       double *loss,
                                       double *sq_grad_norm);

/**
 * How far rfd_auto_fit has come.
 */
typedef struct rfd_progress {
    /**
     * The struct's size in the library, which may have more fields than the caller's header.
     */
    size_t size;
    /**
     * Mini-batches so far.
     */
    uint64_t batches;
    /**
     * Examples so far.
     */
    uint64_t examples;
    /**
     * Examples that will have been needed in the end, by the last fit; 0 before the first.
     */
    uint64_t needed;
    /**
     * Relative standard deviation of the variance in the last fit; NaN before the first.
     */
    double relative_std;
    /**
     * Where it has to come below.
     */
    double tolerance;
    /**
     * Examples to expect in the end, `max_budget` at most: `needed` once there is a fit. Before, and so
     * before the first sample is drawn, what a first guess of the variances would need.
     */
    uint64_t expected;
    /**
     * How long those still to be drawn will take, judged by the ones drawn so far; NaN before the first.
     */
    double remaining_seconds;
} rfd_progress;

/**
 * Hears how far rfd_auto_fit has come: once before the first sample is drawn and after each. Returns 0 to go
 * on, any other number to end the run with RFD_ERROR_STOPPED. `progress` is valid during the call only.
 * Otherwise as rfd_sample_callback.
 */
typedef int32_t (*rfd_progress_callback)(void *user_data, const struct rfd_progress *progress);

/**
 * Evaluates the cost at `count` mini-batches for rfd_auto_fit_many: as rfd_sample_callback for each, of
 * `batch_sizes[i]` examples with `seeds[i]`, into `losses[i]` and `sq_grad_norms[i]`. So a device's results
 * can be waited for once.
 *
 * Sets `*done` to the number of mini-batches, from the first on, that were evaluated; they count even when
 * it returns another number than 0 to end the run. More than `count` end the run with RFD_ERROR_CALLBACK,
 * and none of them counts.
 */
typedef int32_t (*rfd_sample_many_callback)(void *user_data,
                                            size_t count,
                                            const uint64_t *batch_sizes,
                                            const uint64_t *seeds,
                                            double *losses,
                                            double *sq_grad_norms,
                                            size_t *done);

/**
 * Settings of RFD with a fitted model, as published; rfd_fitted_init sets the defaults.
 */
typedef struct rfd_fitted {
    /**
     * sizeof(rfd_fitted).
     */
    size_t size;
    /**
     * The fitted model, which has no default.
     */
    const struct rfd_model *model;
    /**
     * In [0, 1). Default 0.
     */
    double conservatism;
    /**
     * 1/b for gradients of batches of b examples; 0, the default, treats loss and gradient as noiseless.
     */
    double inv_batch_size;
    /**
     * In [0, 1), for all groups. Default 0: no velocity is kept.
     */
    double momentum;
    /**
     * One number for each group, in the place of `momentum`; null, the default, for none.
     */
    const double *group_momentum;
    /**
     * The number of groups, or 0 with null.
     */
    size_t group_momentum_count;
    /**
     * One of RFD_MODE_*. Default RFD_MODE_RFD.
     */
    uint32_t mode;
} rfd_fitted;

/**
 * Settings of a group of tensors; rfd_group_init sets the defaults. All groups share one norm and one step
 * size.
 */
typedef struct rfd_group {
    /**
     * sizeof(rfd_group).
     */
    size_t size;
    /**
     * Multiplies the group's length scale. Default 1.
     */
    double length_scale_factor;
    /**
     * Multiplies the learning rate of this group alone. Default 1.
     */
    double multiplier;
    /**
     * Decoupled: parameters are multiplied with 1 - learning_rate * weight_decay. Default 0.
     */
    double weight_decay;
    /**
     * RFD_GROUP_* or 0.
     */
    uint32_t flags;
} rfd_group;

/**
 * Options of an optimizer; rfd_optimizer_options_init sets the defaults.
 */
typedef struct rfd_optimizer_options {
    /**
     * sizeof(rfd_optimizer_options).
     */
    size_t size;
    /**
     * The groups; null, the default, for one with default settings.
     */
    const struct rfd_group *groups;
    /**
     * Number of groups; 0 with null.
     */
    size_t group_count;
    /**
     * Multiplies the step size; for schedulers. Default 1.
     */
    double multiplier;
    /**
     * The step size times the multiplier is cut to this. Default: infinity.
     */
    double max_step_size;
    /**
     * Of stochastic rounding. Default 0.
     */
    uint64_t seed;
    /**
     * RFD_OPTIMIZER_* added up, or 0.
     */
    uint32_t flags;
    /**
     * Where the tensors will be: one of RFD_DEVICE_*. Default RFD_DEVICE_CPU.
     */
    uint32_t device_kind;
    /**
     * Number of the device among those of its kind, as CUDA_VISIBLE_DEVICES counts. Default 0.
     */
    uint32_t device_index;
} rfd_optimizer_options;

/**
 * Describes one parameter of an optimizer. All zero but `size`, `name`, `shape`, `rank` and `dtype` is a
 * whole tensor of the first group that counts in the norm.
 */
typedef struct rfd_tensor_spec {
    /**
     * sizeof(rfd_tensor_spec).
     */
    size_t size;
    /**
     * A name of its own, UTF-8; it appears in errors and in saved states.
     */
    const char *name;
    /**
     * Its `rank` sizes; null for rank 0, which has one element.
     */
    const uint64_t *shape;
    /**
     * Index of the first element in the whole tensor, when this is a shard of it.
     */
    uint64_t offset;
    /**
     * Number of sizes.
     */
    uint32_t rank;
    /**
     * One of RFD_DTYPE_*.
     */
    uint32_t dtype;
    /**
     * Index into the groups of the options.
     */
    uint32_t group;
    /**
     * RFD_TENSOR_* or 0.
     */
    uint32_t flags;
    /**
     * For the adaptive method: elements of a row, which are neighbours and share a variance. 0 for what lies
     * behind the first size, or for one variance where there are no more than one size. No more than the
     * tensor has.
     */
    uint64_t row;
    /**
     * In sharded training with the adaptive method, where this is a part of a tensor: `rank` sizes of the
     * whole one, on every rank, also on one that happens to hold all of it or nothing. Null when it is not
     * cut.
     */
    const uint64_t *whole;
    /**
     * For each of them, the place of the part's first element. Null exactly where `whole` is.
     */
    const uint64_t *start;
} rfd_tensor_spec;

/**
 * Settings of the adaptive method, which needs no fitted model; rfd_adaptive_init sets the defaults, which
 * are for all networks.
 */
typedef struct rfd_adaptive {
    /**
     * sizeof(rfd_adaptive).
     */
    size_t size;
    /**
     * Decay of the averages of gradients and losses, in [0, 1). Default 0.85; with 0 no buffer is kept.
     */
    double averaging;
    /**
     * The largest number known that no loss falls below; a step with a loss below it is skipped. Default
     * -INFINITY, for none known: losses are taken to have the bound 0 until one is negative, and then to
     * have none.
     */
    double loss_bound;
    /**
     * 0.
     */
    uint32_t reserved;
} rfd_adaptive;

/**
 * What a step did.
 */
typedef struct rfd_step_report {
    /**
     * sizeof(rfd_step_report).
     */
    size_t size;
    /**
     * The loss given.
     */
    double loss;
    /**
     * Euclidean norm of the gradient, gradient scale removed; 0 when found_inf skipped the step.
     */
    double grad_norm;
    /**
     * The norm that the step refers to; differs from `grad_norm` when length-scale factors do from 1. With
     * the adaptive method that of the averaged gradient.
     */
    double sigma_norm;
    /**
     * Gradient cost quotient; infinite at a loss of the cost's mean or above and with the adaptive method, 0
     * in a skipped step.
     */
    double theta;
    /**
     * Length of the step, multiplier and cap included; 0 in a skipped step.
     */
    double step_size;
    /**
     * `step_size` / `sigma_norm`: what the gradient is multiplied with, with the adaptive method the
     * averaged one, and each tensor's scale beside; 0 in a skipped step.
     */
    double learning_rate;
    /**
     * Steps applied so far, this one included.
     */
    uint64_t applied_steps;
    /**
     * Steps skipped so far, this one included.
     */
    uint64_t skipped_steps;
    /**
     * One of RFD_OUTCOME_*.
     */
    uint32_t outcome;
    /**
     * What limits a step of the adaptive method, one of RFD_LIMIT_*; RFD_LIMIT_NONE with other methods.
     */
    uint32_t limit;
    /**
     * How far the adaptive method trusts its model: a factor on the step, between 0.001 and 4; 0 in a
     * skipped step and with other methods. Below 0.01 for long, either the loss can't fall any more, or the
     * gradients are not those of the loss.
     */
    double trust;
} rfd_step_report;

/**
 * Where a parameter lies in one step. Contiguous, aligned to its elements.
 */
typedef struct rfd_tensor {
    /**
     * sizeof(rfd_tensor).
     */
    size_t size;
    /**
     * Its first element, on the host or on the device. May be null when it has no elements.
     */
    void *data;
    /**
     * Number of elements.
     */
    uint64_t count;
    /**
     * One of RFD_DTYPE_*.
     */
    uint32_t dtype;
    /**
     * One of RFD_DEVICE_*; the optimizer's.
     */
    uint32_t device_kind;
    /**
     * Number of the device among those of its kind; 0 for the CPU.
     */
    uint32_t device_index;
} rfd_tensor;

/**
 * Where a gradient lies in one step: as rfd_tensor, but it is only read.
 */
typedef struct rfd_gradient {
    /**
     * sizeof(rfd_gradient).
     */
    size_t size;
    /**
     * Its first element, on the host or on the device. One that is null is missing: the parameter stays as
     * it is and counts in no norm.
     */
    const void *data;
    /**
     * Number of elements: the parameter's.
     */
    uint64_t count;
    /**
     * One of RFD_DTYPE_*. May differ from the parameter's.
     */
    uint32_t dtype;
    /**
     * One of RFD_DEVICE_*; the optimizer's.
     */
    uint32_t device_kind;
    /**
     * Number of the device among those of its kind; 0 for the CPU.
     */
    uint32_t device_index;
} rfd_gradient;

/**
 * The scalars of a step; rfd_step_input_init sets the defaults. Addresses are for tensors on a device and
 * must be null for tensors on the CPU.
 */
typedef struct rfd_step_input {
    /**
     * sizeof(rfd_step_input).
     */
    size_t size;
    /**
     * The mini-batch loss at the current parameters: the mean over the batch that the gradients are the
     * mean of, without gradient scale. A captured CUDA graph keeps it; use `loss_address` there. Has to be
     * set: NaN from rfd_step_input_init on, with which steps are skipped.
     */
    double loss;
    /**
     * S when the gradients are S times the real ones, as with a gradient scaler. CPU only. Default 1.
     */
    double grad_scale;
    /**
     * Any value but 0 skips the step. CPU only. Default 0.
     */
    double found_inf;
    /**
     * Where the loss lies on the device, in place of `loss`; read when the step runs. Default null.
     */
    const void *loss_address;
    /**
     * Where S lies on the device. Default null: no gradient scale.
     */
    const float *grad_scale_address;
    /**
     * Where found_inf lies on the device. Default null: none.
     */
    const float *found_inf_address;
    /**
     * Format of the number at `loss_address`, one of RFD_DTYPE_*. Default RFD_DTYPE_F32.
     */
    uint32_t loss_dtype;
} rfd_step_input;

/**
 * Success.
 */
#define RFD_OK 0

/**
 * A pointer is null that must not be.
 */
#define RFD_ERROR_NULL 1

/**
 * An argument, a field or an option is outside its domain.
 */
#define RFD_ERROR_INVALID_ARGUMENT 2

/**
 * The `size` of a struct is none that any release had: it was not set, or the header is newer than the
 * library.
 */
#define RFD_ERROR_STRUCT_SIZE 3

/**
 * The operating system refused to read or write a file.
 */
#define RFD_ERROR_IO 4

/**
 * A file or a text was read, but what it holds is not what it should be.
 */
#define RFD_ERROR_FILE 5

/**
 * The samples do not determine the covariance.
 */
#define RFD_ERROR_ESTIMATION 6

/**
 * A tensor does not fit the optimizer, or its descriptor is wrong.
 */
#define RFD_ERROR_TENSOR 7

/**
 * A saved optimizer state is damaged or belongs to another optimizer.
 */
#define RFD_ERROR_STATE 8

/**
 * A device or its driver is missing, unsuitable, or failed.
 */
#define RFD_ERROR_DEVICE 9

/**
 * This library was built without what was asked for.
 */
#define RFD_ERROR_UNSUPPORTED 10

/**
 * A callback returned an error.
 */
#define RFD_ERROR_CALLBACK 11

/**
 * The progress callback asked to stop.
 */
#define RFD_ERROR_STOPPED 12

/**
 * There is no step: loss or gradient norm are not finite, or the norm is zero.
 */
#define RFD_ERROR_NO_STEP 13

/**
 * Another thread is using the same handle at this moment.
 */
#define RFD_ERROR_BUSY 14

/**
 * A fault of the library; please report it with the message. The handle that was used must be destroyed.
 */
#define RFD_ERROR_PANIC 15

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * What the last function said that did not return RFD_OK on this thread; "" when none has failed. The
 * message names the tensor, file, row or option at fault and says what to do.
 *
 * Never null. The text belongs to the library and is valid until the next call on the same thread that
 * fails, or the thread's end. Any thread.
 */
const char *rfd_last_error(void);

/**
 * A name for a status, e.g. "RFD_ERROR_TENSOR"; "unknown status" for numbers that this release does not
 * know.
 *
 * Never null. The text is a constant. Any thread.
 */
const char *rfd_status_string(rfd_status status);

/**
 * The library's release, e.g. "0.1.0".
 *
 * Never null. The text is a constant. Any thread.
 */
const char *rfd_version(void);

/**
 * The version of the library's ABI. A program should refuse one that is not the RFD_ABI_VERSION of its
 * header; with the shared library the loader does, by the soname. Any thread.
 */
uint32_t rfd_abi_version(void);

/**
 * Sets how many threads the library works on large tensors with from the next step on, the calling one among
 * them; 0 brings back the default, as many as there are processors, or as the environment variable
 * RAYON_NUM_THREADS says. Results do not depend on it.
 *
 * For the whole process. With 1 no thread is started, but those that have been stay; else they start with
 * the first large step and end when the last optimizer is destroyed. Where the system starts fewer, steps go
 * on with those and say so on the standard error stream, once. A process that is forked starts its own. Any
 * thread.
 * RFD_ERROR_INVALID_ARGUMENT when `count` is more than 1024.
 */
rfd_status rfd_set_threads(uint32_t count);

/**
 * The bytes. One 0 follows them, so that a text can be used as a string.
 *
 * `buffer` may be null: the result is null then. What it points to belongs to the buffer and lives as long
 * as it.
 */
const uint8_t *rfd_buffer_data(const struct rfd_buffer *buffer);

/**
 * How many bytes there are, the 0 behind them not counted; 0 when `buffer` is null.
 */
size_t rfd_buffer_size(const struct rfd_buffer *buffer);

/**
 * Frees a buffer. Null does nothing.
 */
void rfd_buffer_destroy(struct rfd_buffer *buffer);

/**
 * Makes a model from moments.
 *
 * `covariance` is "squared_exponential" (or "se"), "rational_quadratic:BETA" (or "rq:BETA"; BETA is 1 when
 * left out with its colon), "matern:1.5" or "matern:2.5". No pointer may be null; both inputs are copied.
 * On success `*model` is a new handle that the caller frees with rfd_model_destroy. Any thread.
 * RFD_ERROR_INVALID_ARGUMENT names the moment that is outside its domain.
 */
rfd_status rfd_model_create(const char *covariance,
                            const struct rfd_moments *moments,
                            struct rfd_model **model);

/**
 * Makes a model from a fit, for a cost of `dims` parameters. Otherwise as rfd_model_create.
 */
rfd_status rfd_model_create_from_fit(const char *covariance,
                                     const struct rfd_fit *fit,
                                     uint64_t dims,
                                     struct rfd_model **model);

/**
 * Frees a model. Null does nothing. Optimizers that were made with it keep what they need.
 */
void rfd_model_destroy(struct rfd_model *model);

/**
 * Reads a file that rfd_model_save, or the Rust library, wrote.
 *
 * No pointer may be null. On success `*model` is a new handle that the caller frees with rfd_model_destroy.
 * Any thread. RFD_ERROR_IO when the file can't be read, RFD_ERROR_FILE when it is no model or one of another
 * version.
 */
rfd_status rfd_model_load(const char *file,
                          struct rfd_model **model);

/**
 * Writes a model to a file, whole or not at all.
 *
 * No pointer may be null. Any thread. RFD_ERROR_IO when the file can't be written.
 */
rfd_status rfd_model_save(const struct rfd_model *model, const char *file);

/**
 * Reads what rfd_model_to_json wrote: `size` bytes at `json`.
 *
 * No pointer may be null; the text is not kept. On success `*model` is a new handle that the caller frees
 * with rfd_model_destroy. Any thread. RFD_ERROR_FILE when it is no model or one of another version.
 */
rfd_status rfd_model_from_json(const char *json,
                               size_t size,
                               struct rfd_model **model);

/**
 * The model as JSON text.
 *
 * No pointer may be null. On success `*json` is a new buffer that the caller frees with rfd_buffer_destroy.
 * Any thread.
 */
rfd_status rfd_model_to_json(const struct rfd_model *model,
                             struct rfd_buffer **json);

/**
 * The name of the covariance, as rfd_model_create takes it; "" when `model` is null.
 *
 * Never null. The text belongs to the model. Any thread.
 */
const char *rfd_model_covariance(const struct rfd_model *model);

/**
 * The moments the model was made from. Set `moments->size` before the call.
 *
 * No pointer may be null. Any thread.
 */
rfd_status rfd_model_moments(const struct rfd_model *model, struct rfd_moments *moments);

/**
 * The length scale that follows from the moments, and the longest step: that at a loss of the cost's mean.
 *
 * `model` must not be null; an output that is null is left out. Any thread.
 */
rfd_status rfd_model_scales(const struct rfd_model *model,
                            double *length_scale,
                            double *plateau_step_size);

/**
 * The learning rate towards which RFD's tends when the loss tends to `limiting_loss`, which must be below
 * the mean.
 *
 * `inv_batch_size` is 1/b for batches of b examples, or 0 for no noise. No pointer may be null. Any thread.
 */
rfd_status rfd_model_asymptotic_learning_rate(const struct rfd_model *model,
                                              double limiting_loss,
                                              double inv_batch_size,
                                              double *learning_rate);

/**
 * The step size for a loss and the norm of its gradient, without an optimizer.
 *
 * `inv_batch_size` is 1/b for batches of b examples, or 0 for no noise; `mode` one of RFD_MODE_*;
 * `conservatism` in [0, 1), 0 for none. `*step_size` is the length of the step: divide it by the norm for
 * the learning rate. `*theta` is the gradient cost quotient, infinite at a loss of the mean or above.
 * `model` must not be null; an output that is null is left out. Any thread. RFD_ERROR_NO_STEP when loss or
 * norm are not finite, or the norm is 0.
 */
rfd_status rfd_model_step(const struct rfd_model *model,
                          double loss,
                          double grad_norm,
                          double inv_batch_size,
                          uint32_t mode,
                          double conservatism,
                          double *step_size,
                          double *theta);

/**
 * The cost expected after a step of the given size, knowing loss and gradient norm here, and its derivative
 * in the step size.
 *
 * `model` must not be null; an output that is null is left out. Any thread.
 */
rfd_status rfd_model_conditional_mean(const struct rfd_model *model,
                                      double loss,
                                      double grad_norm,
                                      double inv_batch_size,
                                      double step_size,
                                      double *value,
                                      double *slope);

/**
 * The variance of the cost after a step of the given size, knowing loss and gradient here, and its
 * derivative in the step size. It does not depend on the values that were observed.
 *
 * `model` must not be null; an output that is null is left out. Any thread.
 */
rfd_status rfd_model_conditional_variance(const struct rfd_model *model,
                                          double inv_batch_size,
                                          double step_size,
                                          double *value,
                                          double *slope);

/**
 * Fits mean and variances to `count` samples: mean losses of mini-batches at random initialisations, squared
 * norms of their gradients, and batch sizes, of which there must be at least two different ones. Set
 * `result->size` before the call.
 *
 * `flags` is RFD_FIT_ROBUST or 0. `warnings` may be null, no other pointer unless `count` is 0. On success
 * `*warnings` is a new buffer, to be freed with rfd_buffer_destroy, with a line for each warning, empty for
 * none. Warnings are about samples that look foreign to the others (by their place from 0, with how far from
 * these they are and what the fit is without them), losses of two populations, and heavy tails.
 *
 * Any thread. RFD_ERROR_INVALID_ARGUMENT names the sample that is outside its domain, RFD_ERROR_ESTIMATION
 * says which samples are missing, or that foreign ones prevent a fit.
 */
rfd_status rfd_fit_array(const double *losses,
                         const double *sq_grad_norms,
                         const uint64_t *batch_sizes,
                         size_t count,
                         uint32_t flags,
                         struct rfd_fit *result,
                         struct rfd_buffer **warnings);

/**
 * Fits mean and variances to a CSV file with the columns `loss`, `grad_norm` (or `sq_grad_norm`) and
 * `batchsize`. Set `result->size` before the call.
 *
 * As rfd_fit_array, but warnings name rows. No pointer may be null but `warnings`. RFD_ERROR_IO when the
 * file can't be read; the message of RFD_ERROR_FILE has row and column.
 */
rfd_status rfd_fit_csv(const char *file,
                       uint32_t flags,
                       struct rfd_fit *result,
                       struct rfd_buffer **warnings);

/**
 * How many more examples a fit needs for its relative standard deviation to fall to `tolerance`, at batch
 * sizes in the same proportions; 0 when it is there.
 *
 * No pointer may be null. Any thread.
 */
rfd_status rfd_fit_further_examples(const struct rfd_fit *fit,
                                    double tolerance,
                                    uint64_t *examples);

/**
 * Makes statistics of no samples.
 *
 * `statistics` must not be null. On success `*statistics` is a new handle that the caller frees with
 * rfd_statistics_destroy. Any thread.
 */
rfd_status rfd_statistics_create(struct rfd_statistics **statistics);

/**
 * Frees statistics. Null does nothing.
 */
void rfd_statistics_destroy(struct rfd_statistics *statistics);

/**
 * Adds one sample: the mean loss of a mini-batch at a random initialisation, the squared norm of its
 * gradient, and its size.
 *
 * `statistics` must not be null. One thread at a time. RFD_ERROR_INVALID_ARGUMENT names the number that is
 * not finite or outside its domain; nothing is added then.
 */
rfd_status rfd_statistics_push(struct rfd_statistics *statistics,
                               double loss,
                               double sq_grad_norm,
                               uint64_t batch_size);

/**
 * Adds `count` samples from arrays: all of them, or none when one is outside its domain.
 *
 * `statistics` must not be null, nor the arrays unless `count` is 0. One thread at a time. The message of
 * RFD_ERROR_INVALID_ARGUMENT has the index of the sample.
 */
rfd_status rfd_statistics_push_array(struct rfd_statistics *statistics,
                                     const double *losses,
                                     const double *sq_grad_norms,
                                     const uint64_t *batch_sizes,
                                     size_t count);

/**
 * Adds the samples of a CSV file with the columns `loss`, `grad_norm` (or `sq_grad_norm`) and `batchsize`:
 * all of them, or none when a row is wrong.
 *
 * No pointer may be null. One thread at a time. RFD_ERROR_IO when the file can't be read; the message of
 * RFD_ERROR_FILE has row and column.
 */
rfd_status rfd_statistics_push_csv(struct rfd_statistics *statistics,
                                   const char *file);

/**
 * Adds the samples of other statistics, which stay as they are. The two may be the same.
 *
 * No pointer may be null. One thread at a time, for both.
 */
rfd_status rfd_statistics_merge(struct rfd_statistics *statistics,
                                const struct rfd_statistics *other);

/**
 * Number of mini-batches, and of examples in them.
 *
 * `statistics` must not be null; an output that is null is left out. One thread at a time.
 */
rfd_status rfd_statistics_counts(const struct rfd_statistics *statistics,
                                 uint64_t *batches,
                                 uint64_t *examples);

/**
 * Fits mean and variances. Set `result->size` before the call.
 *
 * No pointer may be null. One thread at a time. RFD_ERROR_ESTIMATION says which samples are missing.
 */
rfd_status rfd_statistics_fit(const struct rfd_statistics *statistics,
                              struct rfd_fit *result);

/**
 * The statistics as JSON text, for a file or another process. rfd_statistics_from_json restores them bit for
 * bit.
 *
 * No pointer may be null. On success `*json` is a new buffer that the caller frees with rfd_buffer_destroy.
 * One thread at a time.
 */
rfd_status rfd_statistics_to_json(const struct rfd_statistics *statistics,
                                  struct rfd_buffer **json);

/**
 * Reads what rfd_statistics_to_json wrote: `size` bytes at `json`.
 *
 * No pointer may be null; the text is not kept. On success `*statistics` is a new handle that the caller
 * frees with rfd_statistics_destroy. Any thread. RFD_ERROR_FILE when it is something else, of another
 * version, or inconsistent.
 */
rfd_status rfd_statistics_from_json(const char *json,
                                    size_t size,
                                    struct rfd_statistics **statistics);

/**
 * Makes the best design for a guess of the cost's variance and of one example's variance around it.
 *
 * `max_batch_size` 0 stands for none; `kind` is one of RFD_DESIGN_*. `design` must not be null. On success
 * `*design` is a new handle that the caller frees with rfd_design_destroy. Any thread.
 * RFD_ERROR_INVALID_ARGUMENT names the number that is outside its domain.
 */
rfd_status rfd_design_create(double variance,
                             double noise_variance,
                             uint64_t min_batch_size,
                             uint64_t max_batch_size,
                             uint32_t kind,
                             struct rfd_design **design);

/**
 * Makes the design of the next `further` examples, given the samples drawn already.
 *
 * No pointer may be null. On success `*next` is a new handle that the caller frees with rfd_design_destroy.
 * `statistics`: one thread at a time.
 */
rfd_status rfd_design_after(const struct rfd_design *design,
                            const struct rfd_statistics *statistics,
                            uint64_t further,
                            struct rfd_design **next);

/**
 * Frees a design. Null does nothing.
 */
void rfd_design_destroy(struct rfd_design *design);

/**
 * Number of different batch sizes; 0 when `design` is null. Any thread.
 */
size_t rfd_design_size(const struct rfd_design *design);

/**
 * One of the batch sizes, in increasing order, and its share of the mini-batches to draw.
 *
 * `design` must not be null; an output that is null is left out. Any thread.
 */
rfd_status rfd_design_point(const struct rfd_design *design,
                            size_t index,
                            uint64_t *batch_size,
                            double *share);

/**
 * The batch size at the quantile `u` in [0, 1); with u uniform, a draw from the distribution.
 *
 * No pointer may be null. Any thread.
 */
rfd_status rfd_design_quantile(const struct rfd_design *design, double u, uint64_t *batch_size);

/**
 * Examples after which the relative standard deviation of the fitted variance is `tolerance`, and those that
 * a mini-batch costs on average.
 *
 * `design` must not be null; an output that is null is left out. Any thread.
 */
rfd_status rfd_design_cost(const struct rfd_design *design,
                           double tolerance,
                           double *examples,
                           double *expected_batch_size);

/**
 * Sets all options to their defaults; `size` is sizeof(rfd_auto_fit_options).
 *
 * `options` must not be null. Any thread.
 */
rfd_status rfd_auto_fit_options_init(struct rfd_auto_fit_options *options, size_t size);

/**
 * Draws samples at batch sizes of its choice, by way of a callback, until the fitted variance is known well
 * enough or the budget is used up; then the fit is there all the same, with a warning. Set `fit->size`
 * before the call.
 *
 * `options` may be null for the defaults, `progress` for no reports; `user_data` is passed to both callbacks
 * and may be anything. `dims` is the number of parameters. `fit` must not be null. Outputs that are null are
 * left out: on success `*statistics` is a new handle, of the samples that were fitted, which the caller
 * frees with rfd_statistics_destroy; `*warnings` a new buffer with a line for each warning, empty for none,
 * to be freed with rfd_buffer_destroy. There is a warning wherever the tolerance was not reached.
 *
 * Any thread; the callbacks run on it. RFD_ERROR_CALLBACK and RFD_ERROR_STOPPED when a callback ended the
 * run, RFD_ERROR_ESTIMATION when a sample is not finite, foreign samples decide over the fit (`on_foreign`),
 * all losses or norms are one number, or the budget ended without any fit, RFD_ERROR_IO and RFD_ERROR_FILE
 * when the cache can't be used. The cache keeps every sample drawn in each of these
 * cases.
 */
rfd_status rfd_auto_fit(const struct rfd_auto_fit_options *options,
                        uint64_t dims,
                        rfd_sample_callback sample,
                        rfd_progress_callback progress,
                        void *user_data,
                        struct rfd_fit *fit,
                        struct rfd_statistics **statistics,
                        struct rfd_buffer **warnings);

/**
 * The same as rfd_auto_fit for a callback that takes up to `most_at_once` mini-batches (at least 1) at once;
 * `progress` hears of these together. A cache that one of both began, the other goes on from, with the same
 * samples.
 */
rfd_status rfd_auto_fit_many(const struct rfd_auto_fit_options *options,
                             uint64_t dims,
                             size_t most_at_once,
                             rfd_sample_many_callback sample,
                             rfd_progress_callback progress,
                             void *user_data,
                             struct rfd_fit *fit,
                             struct rfd_statistics **statistics,
                             struct rfd_buffer **warnings);

/**
 * Frees an optimizer. Null does nothing. On a device it waits for the work that uses the optimizer's memory;
 * captured steps must not be replayed any more. Parameters and gradients stay the caller's.
 */
void rfd_optimizer_destroy(struct rfd_optimizer *optimizer);

/**
 * Sets all settings of the method of a fitted model to their defaults but `model`, which is null and has to
 * be set; `size` is sizeof(rfd_fitted).
 *
 * `fitted` must not be null. Any thread.
 */
rfd_status rfd_fitted_init(struct rfd_fitted *fitted,
                           size_t size);

/**
 * Makes an optimizer of a fitted model for `count` tensors, whose order every step follows.
 *
 * `fitted`, its `model` and `optimizer` must not be null; `options` may be, for the defaults; `specs` may be
 * when `count` is 0. All inputs are copied; the model may be freed afterwards. On success `*optimizer` is a
 * new handle that the caller frees with rfd_optimizer_destroy.
 *
 * Any thread. For CUDA the device's primary context is used, the one of CUDA's runtime; it is bound during
 * calls only. RFD_ERROR_INVALID_ARGUMENT names an option outside its domain, RFD_ERROR_TENSOR a tensor that
 * is listed twice or whose group does not exist; RFD_ERROR_DEVICE says why a device can't be used,
 * RFD_ERROR_UNSUPPORTED that the library was built without that kind.
 */
rfd_status rfd_fitted_optimizer_create(const struct rfd_fitted *fitted,
                                       const struct rfd_optimizer_options *options,
                                       const struct rfd_tensor_spec *specs,
                                       size_t count,
                                       struct rfd_optimizer **optimizer);

/**
 * Sets `inv_batch_size`, `momentum` and `group_momentum` from the next step on, in an optimizer of a fitted
 * model. All else must be as it was when the optimizer was made; `model` may be null.
 * RFD_ERROR_INVALID_ARGUMENT says what is not; nothing has changed then. Otherwise as
 * rfd_optimizer_set_multiplier; on a device switching momentum on or off means that steps must be captured
 * again.
 *
 * `fitted` must not be null.
 */
rfd_status rfd_optimizer_set_fitted(struct rfd_optimizer *optimizer,
                                    const struct rfd_fitted *fitted,
                                    void *stream);

/**
 * Sets all settings of the adaptive method to their defaults; `size` is sizeof(rfd_adaptive).
 *
 * `adaptive` must not be null. Any thread.
 */
rfd_status rfd_adaptive_init(struct rfd_adaptive *adaptive, size_t size);

/**
 * Makes an optimizer of the adaptive method, whose steps follow from the losses and gradients of training
 * itself, without a fitted model. Otherwise as rfd_fitted_optimizer_create.
 *
 * `adaptive` may be null, for the defaults. In sharded training, which is for the CPU, specs say what their
 * tensors are parts of (`whole`), and every rank lists the same tensors. A saved state can be loaded into an
 * optimizer of the same method only.
 */
rfd_status rfd_adaptive_optimizer_create(const struct rfd_adaptive *adaptive,
                                         const struct rfd_optimizer_options *options,
                                         const struct rfd_tensor_spec *specs,
                                         size_t count,
                                         struct rfd_optimizer **optimizer);

/**
 * What the last finished step did, without waiting for anything; RFD_OUTCOME_NONE before the first. Set
 * `report->size` before the call.
 *
 * No pointer may be null. Any thread, also while a step runs.
 */
rfd_status rfd_optimizer_report(const struct rfd_optimizer *optimizer,
                                struct rfd_step_report *report);

/**
 * Waits for all work on the stream, then as rfd_optimizer_report.
 *
 * No pointer may be null but `stream`, which is null on the CPU. Any thread. RFD_ERROR_DEVICE with what the
 * driver reports, which may come from work queued earlier.
 */
rfd_status rfd_optimizer_wait_report(const struct rfd_optimizer *optimizer,
                                     void *stream,
                                     struct rfd_step_report *report);

/**
 * The name of the kernels that the last step on a device took, before it of those that one will take whose
 * gradients have the parameters' formats; where they are the generic ones, which are slower, also the tensor
 * or setting that asks for them. "CPU" on the CPU.
 *
 * No pointer may be null. On success `*text` is a new buffer that the caller frees with rfd_buffer_destroy.
 * One thread at a time.
 */
rfd_status rfd_optimizer_kernels(const struct rfd_optimizer *optimizer,
                                 struct rfd_buffer **text);

/**
 * Multiplies all step sizes from the next step on; for schedulers. On a device in the order of the stream's
 * work, for replays of captured steps too.
 *
 * `optimizer` must not be null. `stream` as in rfd_optimizer_step. One thread at a time.
 * RFD_ERROR_INVALID_ARGUMENT for a negative or non-finite number.
 */
rfd_status rfd_optimizer_set_multiplier(struct rfd_optimizer *optimizer,
                                        double multiplier,
                                        void *stream);

/**
 * Sets what step sizes times the multiplier are cut to, from the next step on; infinity for no cap.
 * RFD_ERROR_INVALID_ARGUMENT for a number that is not above 0. Otherwise as rfd_optimizer_set_multiplier.
 */
rfd_status rfd_optimizer_set_max_step_size(struct rfd_optimizer *optimizer,
                                           double max_step_size,
                                           void *stream);

/**
 * Sets the weight decay of one group from the next step on. Otherwise as rfd_optimizer_set_multiplier.
 */
rfd_status rfd_optimizer_set_weight_decay(struct rfd_optimizer *optimizer,
                                          size_t group,
                                          double weight_decay,
                                          void *stream);

/**
 * Sets all settings of one group from the next step on. `settings` must not be null. Otherwise as
 * rfd_optimizer_set_multiplier; on a device switching norm lock on or off means that steps must be captured
 * again.
 */
rfd_status rfd_optimizer_set_group(struct rfd_optimizer *optimizer,
                                   size_t group,
                                   const struct rfd_group *settings,
                                   void *stream);

/**
 * Whether a step on a device may be one launch, whose blocks wait for one another: 1, the default, or 0 for
 * several launches, with the same bits, from the next step on. One launch needs room for all its blocks at
 * once; where kernels of other streams spin until another device comes, as those of communication do, and
 * that one waits behind a step of its own, take several, which wait for nothing. The halves of a step in
 * sharded training always are. No effect on the CPU.
 *
 * `optimizer` must not be null. One thread at a time.
 */
rfd_status rfd_optimizer_set_one_launch(struct rfd_optimizer *optimizer,
                                        uint32_t one_launch);

/**
 * Writes velocities, master weights and counts to a safetensors file, whole or not at all. On a device it
 * waits for the stream.
 *
 * No pointer may be null but `stream`, which is as in rfd_optimizer_step. One thread at a time. RFD_ERROR_IO
 * when the file can't be written.
 */
rfd_status rfd_optimizer_save_state(const struct rfd_optimizer *optimizer,
                                    const char *file,
                                    void *stream);

/**
 * Loads a state that was saved for the same tensors, on whatever device. On a device it waits for the
 * stream, and steps must be captured again.
 *
 * No pointer may be null but `stream`, which is as in rfd_optimizer_step. One thread at a time. RFD_ERROR_IO
 * when the file can't be read, RFD_ERROR_FILE when it is no regular one; RFD_ERROR_STATE says what is
 * damaged, of another version, or which tensor differs; the optimizer is as it was then.
 */
rfd_status rfd_optimizer_load_state(struct rfd_optimizer *optimizer,
                                    const char *file,
                                    void *stream);

/**
 * The state as the bytes of a safetensors file. On a device it waits for the stream.
 *
 * No pointer may be null but `stream`, which is as in rfd_optimizer_step. On success `*state` is a new
 * buffer that the caller frees with rfd_buffer_destroy. One thread at a time.
 */
rfd_status rfd_optimizer_get_state(const struct rfd_optimizer *optimizer,
                                   void *stream,
                                   struct rfd_buffer **state);

/**
 * Loads a state from `size` bytes at `state`, which are not kept. Otherwise as rfd_optimizer_load_state.
 */
rfd_status rfd_optimizer_set_state(struct rfd_optimizer *optimizer,
                                   const void *state,
                                   size_t size,
                                   void *stream);

/**
 * One step: norm, step size, update of all parameters.
 *
 * `params` and `grads` have `count` elements each, in the order of the specs; they and `input` are copied.
 * Parameters and gradients stay the caller's. `optimizer`, `params`, `grads` and `input` must not be null,
 * but `params` and `grads` may be when `count` is 0.
 *
 * On the CPU `stream` is null, and `report`, unless it is null, receives what the step did; set
 * `report->size` before. On a CUDA device `stream` is a CUstream or cudaStream_t of the device's primary
 * context (null, 1 and 2 are the default streams), and `report` is null: the step is queued there and
 * nothing waits for it, so parameters must stay allocated, and gradients unchanged, until the stream has
 * done it. It can be captured in a CUDA graph; then call rfd_optimizer_init_master_weights before, if there
 * are master weights. Steps of one optimizer go to one stream, or to streams that the caller orders.
 *
 * One thread at a time. Input that is not finite, a zero gradient or found_inf skip the step: RFD_OK,
 * nothing has changed, and the report says why. RFD_ERROR_TENSOR names a tensor whose count, format, device
 * or alignment is wrong, or that shares memory with another one; nothing has changed then.
 */
rfd_status rfd_optimizer_step(struct rfd_optimizer *optimizer,
                              const struct rfd_tensor *params,
                              const struct rfd_gradient *grads,
                              size_t count,
                              const struct rfd_step_input *input,
                              void *stream,
                              struct rfd_step_report *report);

/**
 * One step for programs that keep all parameters in one array, and their gradients in another: the
 * optimizer's tensors one after the other, in the order of the specs, without gaps.
 *
 * `params` and `grads` have `count` elements each, as many as all tensors together, in the format `dtype`,
 * which is that of every spec; they lie where the optimizer works, on the host or on its device. Gradients
 * are only read. No pointer may be null but `stream`, `report` and, when `count` is 0, the arrays. Otherwise
 * as rfd_optimizer_step, with the same result to the bit. RFD_ERROR_INVALID_ARGUMENT when `count` is another
 * number, RFD_ERROR_TENSOR names a tensor of another format.
 */
rfd_status rfd_optimizer_step_flat(struct rfd_optimizer *optimizer,
                                   void *params,
                                   const void *grads,
                                   uint64_t count,
                                   uint32_t dtype,
                                   const struct rfd_step_input *input,
                                   void *stream,
                                   struct rfd_step_report *report);

/**
 * Takes a copy of the gradient of tensor `index`, counted from 0 in the order of the specs, for programs
 * that update tensor by tensor: rfd_optimizer_finish takes the step when all are given, in any order.
 *
 * A gradient that is given again before the step is added, in float, or in double as soon as one of the
 * tensor's gradients is double: so gradients are accumulated over several backward passes. Each is given
 * as it is; where the sum of m means was given, `grad_scale` of the step is m.
 *
 * `grad` has `count` elements, as many as the tensor, in the format `dtype`, whatever that of the
 * parameter; it is only read, and free to be overwritten when the call returns. Neither it nor `optimizer`
 * may be null, but `grad` may be when `count` is 0. One thread at a time. The copies take as much memory
 * as float gradients do. Saved states do not hold them, and other steps leave them alone.
 * RFD_ERROR_INVALID_ARGUMENT when there is no such tensor, RFD_ERROR_TENSOR names one whose count or
 * alignment is wrong. On a device: RFD_ERROR_DEVICE; add gradients up there and give all of them to
 * rfd_optimizer_step.
 */
rfd_status rfd_optimizer_give_gradient(struct rfd_optimizer *optimizer,
                                       size_t index,
                                       const void *grad,
                                       uint64_t count,
                                       uint32_t dtype);

/**
 * One step with the gradients that rfd_optimizer_give_gradient was given since the last one; those of
 * which none was given are missing. What the step did goes to `report`, unless it is null; set
 * `report->size` before.
 *
 * `params` has `count` elements, in the order of the specs. `optimizer`, `params` and `input` must not be
 * null, but `params` may be when `count` is 0. One thread at a time. After RFD_OK gradients are given
 * anew, also where the step was skipped (with found_inf it only forgets them); after an error they are
 * still there. RFD_ERROR_INVALID_ARGUMENT when no gradient was given; otherwise as rfd_optimizer_step,
 * with the same result to the bit where each gradient was given once. On a device: RFD_ERROR_DEVICE.
 */
rfd_status rfd_optimizer_finish(struct rfd_optimizer *optimizer,
                                const struct rfd_tensor *params,
                                size_t count,
                                const struct rfd_step_input *input,
                                struct rfd_step_report *report);

/**
 * What rfd_optimizer_step with the same arguments would refuse, for processes that tell each other before
 * all take a step. It reads no tensor and changes nothing, and finds nothing that a step only skips.
 *
 * Arguments, errors and threads are those of rfd_optimizer_step.
 */
rfd_status rfd_optimizer_check_step(struct rfd_optimizer *optimizer,
                                    const struct rfd_tensor *params,
                                    const struct rfd_gradient *grads,
                                    size_t count,
                                    const struct rfd_step_input *input,
                                    void *stream);

/**
 * How many doubles ranks add up between the halves of a step in sharded training: 2, or with the adaptive
 * method a number that follows from the list of tensors, the same on all ranks.
 *
 * No pointer may be null. One thread at a time.
 */
rfd_status rfd_optimizer_sums_len(struct rfd_optimizer *optimizer,
                                  size_t *len);

/**
 * The first half of a step in sharded training: the sums of this rank's parameters and gradients by which
 * the step is decided. Of `input` it reads the gradient scale alone.
 *
 * On success `*sums` points to as many doubles as rfd_optimizer_sums_len says, which belong to the
 * optimizer, host memory on the CPU, device memory on a device. The caller adds them up over all ranks,
 * number by number, there or elsewhere, and passes the result to rfd_optimizer_step_with_sums. They are
 * valid until the next step or half of one. No pointer may be null, except as in rfd_optimizer_step, whose
 * rules for `params`, `grads` and `stream` hold. One thread at a time. RFD_ERROR_INVALID_ARGUMENT when a
 * group has norm lock, which needs to know whole tensors.
 *
 * On a device nothing waits, and both halves can be captured in a graph, with the adaptive method once a
 * step in halves that found_inf did not skip has been seen finished: until then they sum up the parameters
 * too.
 */
rfd_status rfd_optimizer_local_sums(struct rfd_optimizer *optimizer,
                                    const struct rfd_tensor *params,
                                    const struct rfd_gradient *grads,
                                    size_t count,
                                    const struct rfd_step_input *input,
                                    void *stream,
                                    double **sums);

/**
 * The second half: the update with the sums of all ranks, as many doubles at `sums` as
 * rfd_optimizer_sums_len says, on the host for the CPU, on the device for a device. Every rank must give the
 * same numbers and input, and the gradients and gradient scale of the first half; then all take bitwise the
 * same step.
 *
 * `sums` must not be null; otherwise as rfd_optimizer_step. On the CPU, and with the adaptive method,
 * RFD_ERROR_INVALID_ARGUMENT where there was no first half since the last step, on the CPU also where it
 * had another gradient scale; besides as rfd_optimizer_local_sums. RFD_ERROR_TENSOR names a tensor whose
 * parts on the ranks do not make up the whole one; the step counts as skipped then. On a device, where the
 * sums are not known yet, rfd_optimizer_report and rfd_optimizer_wait_report return that error.
 */
rfd_status rfd_optimizer_step_with_sums(struct rfd_optimizer *optimizer,
                                        const struct rfd_tensor *params,
                                        const struct rfd_gradient *grads,
                                        size_t count,
                                        const double *sums,
                                        const struct rfd_step_input *input,
                                        void *stream,
                                        struct rfd_step_report *report);

/**
 * Fills the master weights from the parameters: on a device before a first step that is captured in a graph.
 * On the CPU it does nothing, as the first step fills them.
 *
 * `optimizer` must not be null, nor `params` unless `count` is 0. `stream` as in rfd_optimizer_step. One
 * thread at a time.
 */
rfd_status rfd_optimizer_init_master_weights(struct rfd_optimizer *optimizer,
                                             const struct rfd_tensor *params,
                                             size_t count,
                                             void *stream);

/**
 * Sets all settings of a group to their defaults; `size` is sizeof(rfd_group).
 *
 * `group` must not be null. Any thread.
 */
rfd_status rfd_group_init(struct rfd_group *group, size_t size);

/**
 * Sets all options to their defaults; `size` is sizeof(rfd_optimizer_options).
 *
 * `options` must not be null. Any thread.
 */
rfd_status rfd_optimizer_options_init(struct rfd_optimizer_options *options, size_t size);

/**
 * Sets all scalars of a step to their defaults but `loss`, which is NaN and has to be set; `size` is
 * sizeof(rfd_step_input).
 *
 * `input` must not be null. Any thread.
 */
rfd_status rfd_step_input_init(struct rfd_step_input *input,
                               size_t size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RFDESCENT_H */
