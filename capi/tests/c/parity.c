/* Takes steps on tensors of all formats and prints every report and the bits of the parameters, for
 * comparison with the same steps through the Rust interface. Its argument is `fitted` or `adaptive`. */
#include "check.h"

#include <inttypes.h>

static uint64_t state;

static uint64_t next(void) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Numbers in (-2, 2) by their bits, so that all programs have the same. */
static void fill(void *data, size_t count, uint32_t dtype) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = next();
        if (dtype == RFD_DTYPE_F32) {
            ((uint32_t *)data)[i] = (uint32_t)(bits & 0xbfffffff);
        } else if (dtype == RFD_DTYPE_F64) {
            ((uint64_t *)data)[i] = (bits & 0xb00fffffffffffff) | 0x3000000000000000;
        } else if (dtype == RFD_DTYPE_F16) {
            ((uint16_t *)data)[i] = (uint16_t)(bits & 0xbfff);
        } else {
            ((uint16_t *)data)[i] = (uint16_t)(bits & 0xbfff);
        }
    }
}

#define TENSORS 4
/* More than two of the windows in which the adaptive method compares losses. */
#define STEPS 35

int main(int argc, char **argv) {
    const int adaptive = argc == 2 && !strcmp(argv[1], "adaptive");
    static const uint64_t counts[TENSORS] = {70000, 4097, 333, 5000};
    static const uint32_t dtypes[TENSORS] = {RFD_DTYPE_F32, RFD_DTYPE_F64, RFD_DTYPE_F16, RFD_DTYPE_BF16};
    static const char *const names[TENSORS] = {"a", "b", "c", "d"};
    const rfd_moments moments = {sizeof moments, 2.5, 0.01, 0.9, 5.0, 300.0, 79430};
    rfd_model *model = NULL;
    OK(rfd_model_create("rational_quadratic:1", &moments, &model));

    rfd_group groups[2];
    OK(rfd_group_init(&groups[0], sizeof groups[0]));
    groups[1] = groups[0];
    groups[1].weight_decay = 0.01;
    groups[1].length_scale_factor = 0.5;
    groups[1].flags = RFD_GROUP_NORM_LOCK;
    rfd_optimizer_options options;
    OK(rfd_optimizer_options_init(&options, sizeof options));
    options.groups = groups;
    options.group_count = 2;
    options.flags = RFD_OPTIMIZER_STOCHASTIC_ROUNDING;
    options.seed = 7;

    static union {
        double align;
        char bytes[8 * 70000];
    } param[TENSORS], grad[TENSORS];
    rfd_tensor_spec specs[TENSORS];
    rfd_tensor params[TENSORS];
    rfd_gradient grads[TENSORS];
    for (int k = 0; k < TENSORS; k++) {
        specs[k] = (rfd_tensor_spec){.size = sizeof *specs,
                                     .name = names[k],
                                     .shape = &counts[k],
                                     .rank = 1,
                                     .dtype = dtypes[k],
                                     .group = (uint32_t)k % 2,
                                     .offset = (uint64_t)k,
                                     .row = k == 0 ? 100 : 0};
        params[k] = (rfd_tensor){.size = sizeof *params, .data = &param[k], .count = counts[k], .dtype = dtypes[k]};
        grads[k] = (rfd_gradient){.size = sizeof *grads, .data = &grad[k], .count = counts[k], .dtype = dtypes[k]};
        fill(&param[k], counts[k], dtypes[k]);
    }
    rfd_optimizer *optimizer = NULL;
    if (adaptive) {
        rfd_adaptive settings;
        OK(rfd_adaptive_init(&settings, sizeof settings));
        settings.averaging = 0.8;
        settings.loss_bound = -2;
        OK(rfd_adaptive_optimizer_create(&settings, &options, specs, TENSORS, &optimizer));
    } else {
        const double momentum[] = {0, 0.9};
        const rfd_fitted settings = {.size = sizeof settings,
                                     .model = model,
                                     .inv_batch_size = 1.0 / 128,
                                     .group_momentum = momentum,
                                     .group_momentum_count = 2};
        OK(rfd_fitted_optimizer_create(&settings, &options, specs, TENSORS, &optimizer));
    }
    rfd_step_input input;
    OK(rfd_step_input_init(&input, sizeof input));
    rfd_step_report report = {.size = sizeof report};
    for (int step = 0; step < STEPS; step++) {
        for (int k = 0; k < TENSORS; k++) {
            fill(&grad[k], counts[k], dtypes[k]);
        }
        input.loss = 2.4 - 0.0625 * step;
        OK(rfd_optimizer_step(optimizer, params, grads, TENSORS, &input, NULL, &report));
        printf("step %" PRIu64 " %a %a %a %a %a %a %a %" PRIu32 "\n", report.applied_steps, report.loss,
               report.grad_norm, report.sigma_norm, report.theta, report.step_size, report.learning_rate, report.trust,
               report.limit);
    }
    for (int k = 0; k < TENSORS; k++) {
        static const size_t sizes[] = {4, 8, 2, 2};
        uint64_t hash = 0xcbf29ce484222325u;
        for (size_t i = 0; i < counts[k] * sizes[k]; i++) {
            hash = (hash ^ (unsigned char)param[k].bytes[i]) * 0x00000100000001b3u;
        }
        printf("hash %016" PRIx64 "\n", hash);
    }
    rfd_optimizer_destroy(optimizer);
    rfd_model_destroy(model);
    return 0;
}
