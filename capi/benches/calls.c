/* Nanoseconds of a step from C, one line for each number of tensors given. Part of benches/calls.rs. */
#define _POSIX_C_SOURCE 199309L
#include <rfdescent.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static void check(rfd_status status) {
    if (status != RFD_OK) {
        fprintf(stderr, "%s\n", rfd_last_error());
        exit(1);
    }
}

int main(int argc, char **argv) {
    for (int argument = 1; argument < argc; argument++) {
        size_t count = (size_t)atoi(argv[argument]);
        rfd_moments moments = {sizeof moments, 2.5, 0.01, 0.9, 5.0, 300.0, 1000};
        rfd_model *model;
        check(rfd_model_create("se", &moments, &model));
        rfd_tensor_spec *specs = calloc(count, sizeof *specs);
        rfd_tensor *params = calloc(count, sizeof *params);
        rfd_gradient *grads = calloc(count, sizeof *grads);
        float *values = calloc(count, sizeof *values), *gradients = calloc(count, sizeof *gradients);
        char(*names)[16] = calloc(count, sizeof *names);
        if (!specs || !params || !grads || !values || !gradients || !names) {
            return 1;
        }
        for (size_t k = 0; k < count; k++) {
            snprintf(names[k], sizeof names[k], "%zu", k);
            gradients[k] = 1;
            specs[k] = (rfd_tensor_spec){.size = sizeof *specs, .name = names[k]};
            params[k] = (rfd_tensor){.size = sizeof *params, .data = &values[k], .count = 1};
            grads[k] = (rfd_gradient){.size = sizeof *grads, .data = &gradients[k], .count = 1};
        }
        rfd_optimizer *optimizer;
        const rfd_fitted fitted = {.size = sizeof fitted, .model = model};
        check(rfd_fitted_optimizer_create(&fitted, NULL, specs, count, &optimizer));
        rfd_step_input input;
        check(rfd_step_input_init(&input, sizeof input));
        input.loss = 2.0;
        rfd_step_report report = {.size = sizeof report};
        /* The best of many short rounds: what disturbs one makes it slower. */
        double best = 1e300;
        int calls = 100 / (int)count + 1;
        for (int round = 0; round < 5000; round++) {
            double start = now();
            for (int i = 0; i < calls; i++) {
                check(rfd_optimizer_step(optimizer, params, grads, count, &input, NULL, &report));
            }
            double each = (now() - start) / calls;
            best = each < best ? each : best;
        }
        if (report.outcome != RFD_OUTCOME_APPLIED || !(values[0] < 0)) {
            return 1;
        }
        printf("%.1f\n", best);
        rfd_optimizer_destroy(optimizer);
        rfd_model_destroy(model);
        free(specs), free(params), free(grads), free(values), free(gradients), free(names);
    }
    return 0;
}
