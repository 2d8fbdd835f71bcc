#include "network.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

enum { WEIGHT, SCALE, SHIFT };

#define EPSILON 1e-5f
#define EVALUATION_BATCH 256

static int out_of_memory(network_t *network) {
    network_destroy(network);
    fprintf(stderr, "network: out of memory\n");
    return -1;
}

static float *parameter(const network_t *network, int layer, int which) {
    return network->parameters + network->tensors[3 * layer + which].offset;
}

static float *gradient(const network_t *network, int layer, int which) {
    return network->gradients + network->tensors[3 * layer + which].offset;
}

int network_create(network_t *network, const size_t widths[NETWORK_LAYERS + 1]) {
    static const char *const names[] = {"weight", "scale", "shift"};
    *network = (network_t){0};
    memcpy(network->widths, widths, sizeof network->widths);
    for (int l = 0; l < NETWORK_LAYERS; l++) {
        network_layer_t *layer = &network->layers[l];
        layer->inputs = widths[l];
        layer->outputs = widths[l + 1];
        for (int which = WEIGHT; which <= SHIFT; which++) {
            network_tensor_t *tensor = &network->tensors[3 * l + which];
            snprintf(tensor->name, sizeof tensor->name, "layer%d.%s", l + 1, names[which]);
            tensor->shape[0] = layer->outputs;
            tensor->shape[1] = which == WEIGHT ? layer->inputs : 1;
            tensor->rank = which == WEIGHT ? 2 : 1;
            tensor->offset = network->parameter_count;
            tensor->count = layer->outputs * (size_t)tensor->shape[1];
            network->parameter_count += tensor->count;
        }
        float **statistics[] = {&layer->mean, &layer->inverse_deviation, &layer->running_mean,
                                &layer->running_variance};
        for (int i = 0; i < 4; i++) {
            *statistics[i] = calloc(layer->outputs, sizeof(float));
            if (!*statistics[i]) {
                return out_of_memory(network);
            }
        }
    }
    network->parameters = calloc(network->parameter_count, sizeof(float));
    network->gradients = calloc(network->parameter_count, sizeof(float));
    return network->parameters && network->gradients ? 0 : out_of_memory(network);
}

/* Room for `count` examples; 0 for none. */
static int reserve(network_t *network, size_t count) {
    if (count > 0 && count <= network->capacity) {
        return 0;
    }
    network->capacity = 0;
    int ok = 1;
    for (int l = 0; l < NETWORK_LAYERS; l++) {
        network_layer_t *layer = &network->layers[l];
        free(layer->input), free(layer->normal), free(layer->gradient);
        layer->input = layer->normal = layer->gradient = NULL;
        if (count > 0) {
            layer->input = malloc(count * layer->inputs * sizeof(float));
            layer->normal = malloc(count * layer->outputs * sizeof(float));
            layer->gradient = malloc(count * layer->outputs * sizeof(float));
            ok = ok && layer->input && layer->normal && layer->gradient;
        }
    }
    free(network->outputs), free(network->labels);
    network->outputs = NULL, network->labels = NULL;
    if (count > 0) {
        network->outputs = malloc(count * network->widths[NETWORK_LAYERS] * sizeof(float));
        network->labels = calloc(count, 1);
        if (!ok || !network->outputs || !network->labels) {
            fprintf(stderr, "network: out of memory\n");
            return -1;
        }
    }
    network->capacity = count;
    return 0;
}

void network_destroy(network_t *network) {
    reserve(network, 0);
    for (int l = 0; l < NETWORK_LAYERS; l++) {
        network_layer_t *layer = &network->layers[l];
        free(layer->mean), free(layer->inverse_deviation);
        free(layer->running_mean), free(layer->running_variance);
    }
    free(network->parameters), free(network->gradients);
    *network = (network_t){0};
}

void network_initialise(network_t *network, uint64_t seed) {
    random_t random = {seed};
    for (int l = 0; l < NETWORK_LAYERS; l++) {
        network_layer_t *layer = &network->layers[l];
        double bound = 1.0 / sqrt((double)layer->inputs);
        for (size_t i = 0; i < layer->inputs * layer->outputs; i++) {
            parameter(network, l, WEIGHT)[i] = (float)(bound * (2.0 * random_uniform(&random) - 1.0));
        }
        for (size_t j = 0; j < layer->outputs; j++) {
            parameter(network, l, SCALE)[j] = 1.0f;
            parameter(network, l, SHIFT)[j] = 0.0f;
            layer->running_mean[j] = 0.0f;
            layer->running_variance[j] = 1.0f;
        }
    }
}

/* out[count][n] = in[count][m] * weight[n][m]^T */
static void multiply(float *out, const float *in, const float *weight, size_t count, size_t n, size_t m) {
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < n; j++) {
            /* Eight sums, for the compiler to keep in one vector. */
            float sums[8] = {0};
            const float *x = in + i * m, *w = weight + j * m;
            size_t k = 0;
            for (; k + 8 <= m; k += 8) {
                for (size_t l = 0; l < 8; l++) {
                    sums[l] += x[k + l] * w[k + l];
                }
            }
            float sum = 0.0f;
            for (; k < m; k++) {
                sum += x[k] * w[k];
            }
            for (size_t l = 0; l < 8; l++) {
                sum += sums[l];
            }
            out[i * n + j] = sum;
        }
    }
}

/* Mean and deviation of each unit over the batch; running ones follow. */
static void measure(network_layer_t *layer, size_t count) {
    size_t n = layer->outputs;
    for (size_t j = 0; j < n; j++) {
        double sum = 0.0, squares = 0.0;
        for (size_t i = 0; i < count; i++) {
            sum += layer->normal[i * n + j];
        }
        layer->mean[j] = (float)(sum / (double)count);
        for (size_t i = 0; i < count; i++) {
            double deviation = layer->normal[i * n + j] - layer->mean[j];
            squares += deviation * deviation;
        }
        float variance = (float)(squares / (double)count);
        layer->inverse_deviation[j] = 1.0f / sqrtf(variance + EPSILON);
        layer->running_mean[j] += 0.1f * (layer->mean[j] - layer->running_mean[j]);
        layer->running_variance[j] += 0.1f * (variance - layer->running_variance[j]);
    }
}

/* From the first layer's input to the outputs. */
static void forward(network_t *network, size_t count, int training) {
    for (int l = 0; l < NETWORK_LAYERS; l++) {
        network_layer_t *layer = &network->layers[l];
        size_t n = layer->outputs;
        multiply(layer->normal, layer->input, parameter(network, l, WEIGHT), count, n, layer->inputs);
        if (training) {
            measure(layer, count);
        }
        int last = l == NETWORK_LAYERS - 1;
        float *out = last ? network->outputs : network->layers[l + 1].input;
        const float *mean = training ? layer->mean : layer->running_mean;
        for (size_t j = 0; j < n; j++) {
            float inverse =
                training ? layer->inverse_deviation[j] : 1.0f / sqrtf(layer->running_variance[j] + EPSILON);
            float scale = parameter(network, l, SCALE)[j], shift = parameter(network, l, SHIFT)[j];
            for (size_t i = 0; i < count; i++) {
                float *normal = &layer->normal[i * n + j];
                *normal = (*normal - mean[j]) * inverse;
                float value = scale * *normal + shift;
                out[i * n + j] = last || value > 0.0f ? value : 0.0f;
            }
        }
    }
}

/* Outputs to probabilities; the sum of the losses, and how many are right. */
static double softmax(float *outputs, const uint8_t *labels, size_t count, size_t classes, size_t *right) {
    double total = 0.0;
    for (size_t i = 0; i < count; i++) {
        float *row = outputs + i * classes;
        size_t best = 0;
        for (size_t j = 1; j < classes; j++) {
            best = row[j] > row[best] ? j : best;
        }
        double sum = 0.0, largest = row[best];
        for (size_t j = 0; j < classes; j++) {
            sum += exp(row[j] - largest);
        }
        total += log(sum) - (row[labels[i]] - largest);
        for (size_t j = 0; j < classes; j++) {
            row[j] = (float)(exp(row[j] - largest) / sum);
        }
        *right += best == labels[i];
    }
    return total;
}

/* Gradients of a layer's parameters, and of its linear map's output in place of that of the layer's. */
static void backward(network_t *network, int l, size_t count) {
    network_layer_t *layer = &network->layers[l];
    size_t n = layer->outputs, m = layer->inputs;
    for (size_t j = 0; j < n; j++) {
        double sum = 0.0, product = 0.0;
        for (size_t i = 0; i < count; i++) {
            sum += layer->gradient[i * n + j];
            product += layer->gradient[i * n + j] * layer->normal[i * n + j];
        }
        gradient(network, l, SHIFT)[j] = (float)sum;
        gradient(network, l, SCALE)[j] = (float)product;
        float mean = (float)(sum / (double)count), slope = (float)(product / (double)count);
        float factor = parameter(network, l, SCALE)[j] * layer->inverse_deviation[j];
        for (size_t i = 0; i < count; i++) {
            float *value = &layer->gradient[i * n + j];
            *value = factor * (*value - mean - layer->normal[i * n + j] * slope);
        }
    }
    float *weight_gradient = gradient(network, l, WEIGHT);
    memset(weight_gradient, 0, n * m * sizeof *weight_gradient);
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < n; j++) {
            float factor = layer->gradient[i * n + j];
            const float *x = layer->input + i * m;
            float *row = weight_gradient + j * m;
            for (size_t k = 0; k < m; k++) {
                row[k] += factor * x[k];
            }
        }
    }
}

/* The gradient of the layer's input, through the ReLU that made it: that of the output of the layer below. */
static void propagate(network_t *network, int l, size_t count) {
    const network_layer_t *layer = &network->layers[l];
    size_t n = layer->outputs, m = layer->inputs;
    const float *weight = parameter(network, l, WEIGHT);
    float *below = network->layers[l - 1].gradient;
    memset(below, 0, count * m * sizeof *below);
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < n; j++) {
            float factor = layer->gradient[i * n + j];
            for (size_t k = 0; k < m; k++) {
                below[i * m + k] += factor * weight[j * m + k];
            }
        }
        for (size_t k = 0; k < m; k++) {
            below[i * m + k] = layer->input[i * m + k] > 0.0f ? below[i * m + k] : 0.0f;
        }
    }
}

double network_gradient(network_t *network, const data_t *data, const size_t *examples, size_t count) {
    if (reserve(network, count) != 0) {
        return -1.0;
    }
    size_t inputs = network->widths[0], classes = network->widths[NETWORK_LAYERS], right = 0;
    for (size_t i = 0; i < count; i++) {
        memcpy(network->layers[0].input + i * inputs, data->values + examples[i] * inputs, inputs * sizeof(float));
        network->labels[i] = data->labels[examples[i]];
    }
    forward(network, count, 1);
    double loss = softmax(network->outputs, network->labels, count, classes, &right) / (double)count;
    float *last = network->layers[NETWORK_LAYERS - 1].gradient;
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < classes; j++) {
            float hit = j == network->labels[i] ? 1.0f : 0.0f;
            last[i * classes + j] = (network->outputs[i * classes + j] - hit) / (float)count;
        }
    }
    for (int l = NETWORK_LAYERS - 1; l >= 0; l--) {
        backward(network, l, count);
        if (l > 0) {
            propagate(network, l, count);
        }
    }
    return loss;
}

double network_evaluate(network_t *network, const data_t *data, double *accuracy) {
    if (reserve(network, EVALUATION_BATCH) != 0) {
        return -1.0;
    }
    size_t inputs = network->widths[0], right = 0;
    double total = 0.0;
    for (size_t first = 0; first < data->count; first += EVALUATION_BATCH) {
        size_t count = data->count - first < EVALUATION_BATCH ? data->count - first : EVALUATION_BATCH;
        memcpy(network->layers[0].input, data->values + first * inputs, count * inputs * sizeof(float));
        forward(network, count, 0);
        total += softmax(network->outputs, data->labels + first, count, network->widths[NETWORK_LAYERS], &right);
    }
    *accuracy = (double)right / (double)data->count;
    return total / (double)data->count;
}
