/* Trains a small network with Random Function Descent: sampling and fitting, then the training loop.
 *
 *     train [--data FOLDER] [--epochs N] [--seed S] [--model FILE | --adaptive] [--trace]
 *
 * FOLDER has MNIST's IDX files (or Fashion-MNIST's), unpacked; without it the program makes data. With
 * --model the fitted model is kept in FILE and read from there the next time; with --adaptive none is needed.
 * --trace prints every step, numbers as hexadecimal floats. */
#include <rfdescent.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "network.h"
#include "random.h"

#define BATCH_SIZE 128

typedef struct {
    const char *data, *model;
    int epochs, adaptive, trace;
    uint64_t seed;
} arguments_t;

typedef struct {
    data_t training, validation;
    network_t network;
    size_t *examples; /* scratch: a permutation of the training data */
} trainer_t;

/* Every call of the library goes through this. */
static int check(rfd_status status, const char *what) {
    if (status == RFD_OK) {
        return 0;
    }
    fprintf(stderr, "%s: %s: %s\n", what, rfd_status_string(status), rfd_last_error());
    return -1;
}

/* One mini-batch at a random initialisation; called by rfd_auto_fit. */
static int32_t sample(void *user_data, uint64_t batch_size, uint64_t seed, double *loss, double *sq_grad_norm) {
    trainer_t *trainer = user_data;
    random_t random = {seed};
    network_initialise(&trainer->network, random_next(&random));
    /* Draws without replacement: the beginning of a shuffle. */
    for (size_t i = 0; i < batch_size; i++) {
        size_t j = i + random_below(&random, trainer->training.count - i);
        size_t swap = trainer->examples[i];
        trainer->examples[i] = trainer->examples[j];
        trainer->examples[j] = swap;
    }
    *loss = network_gradient(&trainer->network, &trainer->training, trainer->examples, (size_t)batch_size);
    *sq_grad_norm = 0.0;
    for (size_t i = 0; i < trainer->network.parameter_count; i++) {
        *sq_grad_norm += (double)trainer->network.gradients[i] * trainer->network.gradients[i];
    }
    return *loss < 0.0; /* out of memory */
}

/* The model of the cost: from a file, or fitted to samples. */
static int make_model(trainer_t *trainer, const arguments_t *arguments, rfd_model **model) {
    if (arguments->adaptive) {
        return 0;
    }
    if (arguments->model) {
        rfd_status status = rfd_model_load(arguments->model, model);
        if (status != RFD_ERROR_IO) { /* a file that is not there yet is made below */
            return check(status, "loading the model");
        }
    }
    rfd_auto_fit_options options;
    rfd_auto_fit_options_init(&options, sizeof options);
    options.max_batch_size = trainer->training.count;
    options.seed = arguments->seed;
    rfd_fit fit = {.size = sizeof fit};
    rfd_buffer *warnings = NULL;
    uint64_t dims = trainer->network.parameter_count;
    if (check(rfd_auto_fit(&options, dims, sample, NULL, trainer, &fit, NULL, &warnings), "auto-fit")) {
        return -1;
    }
    printf("%s", (const char *)rfd_buffer_data(warnings));
    rfd_buffer_destroy(warnings);
    printf("fitted to %llu examples: mean %g, variance %g (relative std %.2f)\n",
           (unsigned long long)fit.examples, fit.mean, fit.variance, fit.relative_std);
    if (check(rfd_model_create_from_fit("squared_exponential", &fit, dims, model), "model")) {
        return -1;
    }
    return arguments->model ? check(rfd_model_save(*model, arguments->model), "saving the model") : 0;
}

/* Without a model the adaptive method's. */
static int make_optimizer(const network_t *network, const rfd_model *model, rfd_optimizer **optimizer) {
    rfd_tensor_spec specs[NETWORK_TENSORS];
    for (int k = 0; k < NETWORK_TENSORS; k++) {
        const network_tensor_t *tensor = &network->tensors[k];
        specs[k] = (rfd_tensor_spec){.size = sizeof specs[k],
                                     .name = tensor->name,
                                     .shape = tensor->shape,
                                     .rank = tensor->rank,
                                     .dtype = RFD_DTYPE_F32};
    }
    if (!model) {
        return check(rfd_adaptive_optimizer_create(NULL, NULL, specs, NETWORK_TENSORS, optimizer), "optimizer");
    }
    rfd_fitted fitted;
    rfd_fitted_init(&fitted, sizeof fitted);
    fitted.model = model;
    fitted.inv_batch_size = 1.0 / BATCH_SIZE; /* loss and gradient are those of mini-batches */
    return check(rfd_fitted_optimizer_create(&fitted, NULL, specs, NETWORK_TENSORS, optimizer), "optimizer");
}

static int train(trainer_t *trainer, const arguments_t *arguments, rfd_optimizer *optimizer) {
    network_t *network = &trainer->network;
    rfd_tensor params[NETWORK_TENSORS];
    rfd_gradient grads[NETWORK_TENSORS];
    for (int k = 0; k < NETWORK_TENSORS; k++) {
        const network_tensor_t *tensor = &network->tensors[k];
        params[k] = (rfd_tensor){.size = sizeof(rfd_tensor), .count = tensor->count, .dtype = RFD_DTYPE_F32};
        params[k].data = network->parameters + tensor->offset;
        grads[k] = (rfd_gradient){.size = sizeof(rfd_gradient), .count = tensor->count, .dtype = RFD_DTYPE_F32};
        grads[k].data = network->gradients + tensor->offset;
    }
    rfd_step_input input;
    rfd_step_input_init(&input, sizeof input);
    rfd_step_report report = {.size = sizeof report};

    random_t random = {arguments->seed + 1};
    network_initialise(network, random_next(&random));
    for (int epoch = 1; epoch <= arguments->epochs; epoch++) {
        double total = 0.0, rates = 0.0;
        size_t steps = trainer->training.count / BATCH_SIZE;
        for (size_t i = trainer->training.count - 1; i > 0; i--) {
            size_t j = random_below(&random, i + 1);
            size_t swap = trainer->examples[i];
            trainer->examples[i] = trainer->examples[j];
            trainer->examples[j] = swap;
        }
        for (size_t step = 0; step < steps; step++) {
            input.loss =
                network_gradient(network, &trainer->training, trainer->examples + step * BATCH_SIZE, BATCH_SIZE);
            if (check(rfd_optimizer_step(optimizer, params, grads, NETWORK_TENSORS, &input, NULL, &report), "step")) {
                return -1;
            }
            if (arguments->trace) {
                printf("step %llu loss %a grad_norm %a step_size %a\n", (unsigned long long)report.applied_steps,
                       report.loss, report.grad_norm, report.step_size);
            }
            total += report.loss;
            rates += report.learning_rate;
        }
        double accuracy = 0.0;
        double validation = network_evaluate(network, &trainer->validation, &accuracy);
        printf("epoch %d: training loss %.4f, mean learning rate %.3g, validation loss %.4f, accuracy %.2f %%\n",
               epoch, total / (double)steps, rates / (double)steps, validation, 100.0 * accuracy);
    }
    return 0;
}

static int prepare(trainer_t *trainer, const arguments_t *arguments) {
    const char *folder = arguments->data;
    int bad = folder ? data_read(&trainer->training, folder, "train-images-idx3-ubyte", "train-labels-idx1-ubyte") ||
                           data_read(&trainer->validation, folder, "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
                     : data_make(&trainer->training, 6000, 64, 1) || data_make(&trainer->validation, 1000, 64, 2);
    const size_t widths[] = {trainer->training.features, 128, trainer->training.classes};
    if (bad || network_create(&trainer->network, widths)) {
        return -1;
    }
    if (trainer->training.count < BATCH_SIZE || trainer->validation.features != trainer->training.features) {
        fprintf(stderr, "training and validation data must have images of one size, and at least %d\n", BATCH_SIZE);
        return -1;
    }
    trainer->examples = malloc(trainer->training.count * sizeof *trainer->examples);
    if (!trainer->examples) {
        fprintf(stderr, "out of memory\n");
        return -1;
    }
    for (size_t i = 0; i < trainer->training.count; i++) {
        trainer->examples[i] = i;
    }
    return 0;
}

static int parse(arguments_t *arguments, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--trace")) {
            arguments->trace = 1;
            continue;
        } else if (!strcmp(argv[i], "--adaptive")) {
            arguments->adaptive = 1;
            continue;
        } else if (!strcmp(argv[i], "--data") && value) {
            arguments->data = value;
        } else if (!strcmp(argv[i], "--model") && value) {
            arguments->model = value;
        } else if (!strcmp(argv[i], "--epochs") && value) {
            arguments->epochs = atoi(value);
        } else if (!strcmp(argv[i], "--seed") && value) {
            arguments->seed = strtoull(value, NULL, 10);
        } else {
            fprintf(stderr, "usage: %s [--data FOLDER] [--epochs N] [--seed S] [--model FILE | --adaptive] [--trace]\n",
                    argv[0]);
            return -1;
        }
        i++;
    }
    return 0;
}

int main(int argc, char **argv) {
    arguments_t arguments = {.epochs = 3};
    trainer_t trainer = {0};
    rfd_model *model = NULL;
    rfd_optimizer *optimizer = NULL;
    if (rfd_abi_version() != RFD_ABI_VERSION) {
        fprintf(stderr, "compiled for ABI %d of rfdescent, but the library has %u\n", RFD_ABI_VERSION, rfd_abi_version());
        return 1;
    }
    if (parse(&arguments, argc, argv)) {
        return 2;
    }
    int failed = prepare(&trainer, &arguments) || make_model(&trainer, &arguments, &model) ||
                 make_optimizer(&trainer.network, model, &optimizer) || train(&trainer, &arguments, optimizer);
    rfd_optimizer_destroy(optimizer);
    rfd_model_destroy(model);
    network_destroy(&trainer.network);
    data_free(&trainer.training);
    data_free(&trainer.validation);
    free(trainer.examples);
    return failed ? 1 : 0;
}
