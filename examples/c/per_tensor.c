/* An adapter for trainers that know of an optimizer no more than update(dW, W), which they call for one
 * tensor after the other, with the adaptive method.
 *
 *     per_tensor [--trace]
 *
 * --trace prints every step, numbers as hexadecimal floats. */
#include <rfdescent.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "network.h"
#include "random.h"

#define BATCH_SIZE 128
#define EPOCHS 3

/* The adapter, to be copied. A step needs the gradients of all tensors, so that update only keeps a copy of
 * each but the last, which takes the step: then all parameters change, in whatever order the calls come.
 *
 *     adapter_add       for each tensor, then
 *     adapter_start     once
 *     adapter_loss      after each backward pass, as the interface has no place for the loss
 *     adapter_update    for each tensor, by the trainer */
#define ADAPTER_TENSORS 64

typedef struct {
    rfd_optimizer *optimizer;
    rfd_tensor_spec specs[ADAPTER_TENSORS];
    rfd_tensor params[ADAPTER_TENSORS];
    uint64_t lengths[ADAPTER_TENSORS];
    char names[ADAPTER_TENSORS][32];
    int given[ADAPTER_TENSORS]; /* since the last step */
    size_t count;
    rfd_step_input input;
    rfd_step_report report;
} adapter_t;

static int check(rfd_status status, const char *what) {
    if (status == RFD_OK) {
        return 0;
    }
    fprintf(stderr, "%s: %s: %s\n", what, rfd_status_string(status), rfd_last_error());
    return -1;
}

/* The weights of one output lie beside each other, `row` of them; 0 for a tensor that is no matrix. */
static int adapter_add(adapter_t *adapter, const char *name, float *W, size_t length, size_t row) {
    size_t k = adapter->count;
    if (k == ADAPTER_TENSORS) {
        fprintf(stderr, "more than %d tensors: raise ADAPTER_TENSORS\n", ADAPTER_TENSORS);
        return -1;
    }
    snprintf(adapter->names[k], sizeof adapter->names[k], "%s", name);
    adapter->lengths[k] = length;
    adapter->specs[k] = (rfd_tensor_spec){.size = sizeof adapter->specs[k],
                                          .name = adapter->names[k],
                                          .shape = &adapter->lengths[k],
                                          .rank = 1,
                                          .dtype = RFD_DTYPE_F32,
                                          .row = row};
    adapter->params[k] =
        (rfd_tensor){.size = sizeof adapter->params[k], .data = W, .count = length, .dtype = RFD_DTYPE_F32};
    adapter->count++;
    return 0;
}

static int adapter_start(adapter_t *adapter) {
    adapter->report.size = sizeof adapter->report;
    return check(rfd_step_input_init(&adapter->input, sizeof adapter->input), "input") ||
           check(rfd_adaptive_optimizer_create(NULL, NULL, adapter->specs, adapter->count, &adapter->optimizer), "optimizer");
}

static void adapter_loss(adapter_t *adapter, double loss) { adapter->input.loss = loss; }

/* The trainer's interface: `self` is an adapter_t. */
static int adapter_update(void *self, const float *dW, float *W, size_t length) {
    adapter_t *adapter = self;
    size_t k = 0;
    while (k < adapter->count && adapter->params[k].data != W) {
        k++;
    }
    /* A tensor that was not added is refused here. */
    if (check(rfd_optimizer_give_gradient(adapter->optimizer, k, dW, length, RFD_DTYPE_F32), "update")) {
        return -1;
    }
    adapter->given[k] = 1;
    for (size_t i = 0; i < adapter->count; i++) {
        if (!adapter->given[i]) {
            return 0;
        }
    }
    memset(adapter->given, 0, sizeof adapter->given);
    rfd_status status =
        rfd_optimizer_finish(adapter->optimizer, adapter->params, adapter->count, &adapter->input, &adapter->report);
    adapter->input.loss = NAN; /* a loss that is forgotten shows in the report as RFD_OUTCOME_NON_FINITE_LOSS */
    return check(status, "step");
}

static void adapter_end(adapter_t *adapter) { rfd_optimizer_destroy(adapter->optimizer); }

/* The trainer, which knows nothing of the library. */
typedef int (*update_t)(void *self, const float *dW, float *W, size_t length);

static int update_all(network_t *network, update_t update, void *self) {
    for (int k = NETWORK_TENSORS - 1; k >= 0; k--) { /* as backward passes come by them */
        const network_tensor_t *tensor = &network->tensors[k];
        if (update(self, network->gradients + tensor->offset, network->parameters + tensor->offset, tensor->count)) {
            return -1;
        }
    }
    return 0;
}

static int train(network_t *network, const data_t *training, const data_t *validation, size_t *examples, int trace) {
    adapter_t adapter = {0};
    int failed = 0;
    for (int k = 0; k < NETWORK_TENSORS && !failed; k++) {
        const network_tensor_t *tensor = &network->tensors[k];
        size_t row = tensor->rank == 2 ? (size_t)tensor->shape[1] : 0;
        failed = adapter_add(&adapter, tensor->name, network->parameters + tensor->offset, tensor->count, row);
    }
    failed = failed || adapter_start(&adapter);
    random_t random = {1};
    network_initialise(network, random_next(&random));
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
            double loss = network_gradient(network, training, examples + step * BATCH_SIZE, BATCH_SIZE);
            adapter_loss(&adapter, loss);
            failed = update_all(network, adapter_update, &adapter);
            if (trace) {
                printf("step %llu loss %a grad_norm %a step_size %a\n", (unsigned long long)adapter.report.applied_steps,
                       adapter.report.loss, adapter.report.grad_norm, adapter.report.step_size);
            }
            total += loss;
        }
        double accuracy = 0.0;
        double loss = network_evaluate(network, validation, &accuracy);
        printf("epoch %d: training loss %.4f, validation loss %.4f, accuracy %.2f %%\n", epoch, total / (double)steps, loss,
               100.0 * accuracy);
    }
    adapter_end(&adapter);
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
