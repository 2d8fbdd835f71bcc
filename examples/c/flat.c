/* A trainer that keeps all parameters in one array and their gradients in another, with the adaptive method.
 * What concerns the library is making the optimizer, and one call for each step.
 *
 *     flat [--trace]
 *
 * --trace prints every step, numbers as hexadecimal floats. */
#include <rfdescent.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "network.h"
#include "random.h"

#define BATCH_SIZE 128
#define EPOCHS 3

static int check(rfd_status status, const char *what) {
    if (status == RFD_OK) {
        return 0;
    }
    fprintf(stderr, "%s: %s: %s\n", what, rfd_status_string(status), rfd_last_error());
    return -1;
}

/* The tensors in the order in which they lie in the array: what their lengths add up to is the array's. */
static int make_optimizer(const network_t *network, rfd_optimizer **optimizer) {
    rfd_tensor_spec specs[NETWORK_TENSORS];
    for (int k = 0; k < NETWORK_TENSORS; k++) {
        const network_tensor_t *tensor = &network->tensors[k];
        specs[k] = (rfd_tensor_spec){.size = sizeof specs[k],
                                     .name = tensor->name,
                                     .shape = tensor->shape,
                                     .rank = tensor->rank,
                                     .dtype = RFD_DTYPE_F32};
    }
    return check(rfd_adaptive_optimizer_create(NULL, NULL, specs, NETWORK_TENSORS, optimizer), "optimizer");
}

static int train(network_t *network, const data_t *training, const data_t *validation, size_t *examples, int trace) {
    rfd_optimizer *optimizer = NULL;
    if (make_optimizer(network, &optimizer)) {
        return -1;
    }
    rfd_step_input input;
    rfd_step_input_init(&input, sizeof input);
    rfd_step_report report = {.size = sizeof report};
    random_t random = {1};
    network_initialise(network, random_next(&random));
    int failed = 0;
    for (int epoch = 1; epoch <= EPOCHS && !failed; epoch++) {
        double total = 0.0;
        size_t steps = training->count / BATCH_SIZE;
        for (size_t i = training->count - 1; i > 0; i--) {
            size_t j = random_below(&random, i + 1);
            size_t swap = examples[i];
            examples[i] = examples[j];
            examples[j] = swap;
        }
        for (size_t step = 0; step < steps && !failed; step++) {
            input.loss = network_gradient(network, training, examples + step * BATCH_SIZE, BATCH_SIZE);
            failed = check(rfd_optimizer_step_flat(optimizer, network->parameters, network->gradients,
                                                   network->parameter_count, RFD_DTYPE_F32, &input, NULL, &report),
                           "step");
            if (trace) {
                printf("step %llu loss %a grad_norm %a step_size %a\n", (unsigned long long)report.applied_steps,
                       report.loss, report.grad_norm, report.step_size);
            }
            total += report.loss;
        }
        double accuracy = 0.0;
        double loss = network_evaluate(network, validation, &accuracy);
        printf("epoch %d: training loss %.4f, validation loss %.4f, accuracy %.2f %%\n", epoch, total / (double)steps, loss,
               100.0 * accuracy);
    }
    rfd_optimizer_destroy(optimizer);
    return failed;
}

int main(int argc, char **argv) {
    data_t training = {0}, validation = {0};
    network_t network = {0};
    size_t *examples = NULL;
    const int trace = argc == 2 && !strcmp(argv[1], "--trace");
    if (argc != 1 + trace) {
        fprintf(stderr, "usage: %s [--trace]\n", argv[0]);
        return 2;
    }
    int failed = data_make(&training, 6000, 64, 1) || data_make(&validation, 1000, 64, 2);
    if (!failed) {
        const size_t widths[] = {training.features, 128, training.classes};
        examples = malloc(training.count * sizeof *examples);
        failed = !examples || network_create(&network, widths);
    }
    if (!failed) {
        for (size_t i = 0; i < training.count; i++) {
            examples[i] = i;
        }
        failed = train(&network, &training, &validation, examples, trace);
    }
    network_destroy(&network);
    data_free(&training);
    data_free(&validation);
    free(examples);
    return failed ? 1 : 0;
}
