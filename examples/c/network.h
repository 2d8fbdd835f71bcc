/* A small network: linear layers, each with batch norm, ReLU between them, softmax with cross entropy behind.
 *
 * The outputs are normalised too: then the scale of no weight matters, and the statistics of the cost at
 * random initialisations, which the library fits, say much about those elsewhere. */
#ifndef EXAMPLE_NETWORK_H
#define EXAMPLE_NETWORK_H

#include <stddef.h>
#include <stdint.h>

#include "data.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NETWORK_LAYERS 2
#define NETWORK_TENSORS (3 * NETWORK_LAYERS) /* weight, scale and shift of each layer */

typedef struct {
    char name[32];
    uint64_t shape[2];
    uint32_t rank;
    size_t offset; /* of its first element among the parameters */
    size_t count;
} network_tensor_t;

typedef struct {
    size_t inputs, outputs;
    /* Of batch norm: statistics of the batch, running ones for evaluation. */
    float *mean, *inverse_deviation, *running_mean, *running_variance;
    /* For each example: the layer's input, the normalised output of its linear map, the gradient of
     * either. */
    float *input, *normal, *gradient;
} network_layer_t;

typedef struct {
    size_t widths[NETWORK_LAYERS + 1];
    network_tensor_t tensors[NETWORK_TENSORS];
    network_layer_t layers[NETWORK_LAYERS];
    size_t parameter_count;
    float *parameters;
    float *gradients;
    size_t capacity; /* examples that the buffers have room for */
    float *outputs;
    uint8_t *labels;
} network_t;

/* Layers with `widths[0]` inputs, then `widths[1]`, ... units. 0, or -1 after a message. */
int network_create(network_t *network, const size_t widths[NETWORK_LAYERS + 1]);
void network_destroy(network_t *network);

/* Random weights, batch norm at the identity. */
void network_initialise(network_t *network, uint64_t seed);

/* Mean loss over the given examples of the data; writes the gradient of that mean. A negative number: out of
 * memory. */
double network_gradient(network_t *network, const data_t *data, const size_t *examples, size_t count);

/* Mean loss over all data with running statistics, and the share that is classified right. */
double network_evaluate(network_t *network, const data_t *data, double *accuracy);

#ifdef __cplusplus
}
#endif

#endif
