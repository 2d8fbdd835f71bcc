/* A GPT on the bytes of a text: four blocks of attention and two layers each, forward and backward as plain
 * loops, trained by the adaptive method of Random Function Descent with nothing set.
 *
 *     gpt [FILE...] [--steps N] [--seed S] [--generate N] [--compare]
 *     gpt --check
 *
 * The texts are joined, and their last tenth is held out for validation; without FILE it is this program's
 * source. In the end the network writes N bytes. With --compare it is also trained by AdamW at four learning
 * rates, from the same parameters on the same batches. --check compares gradients with differences of losses.
 *
 * What concerns the library is make_optimizer and the two lines behind it in train. */
#include <rfdescent.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

typedef struct {
    int blocks, channels, heads, context, batch, vocabulary;
} sizes_t;

static const sizes_t SIZES = {.blocks = 4, .channels = 64, .heads = 4, .context = 64, .batch = 8, .vocabulary = 256};

/* The tensors: those of the whole network, then those of each block. The embedding is also the last layer's
 * matrix. */
enum { EMBEDDING, POSITIONS, LAST_GAIN, LAST_SHIFT, FIRST_BLOCK };
enum { GAIN_1, SHIFT_1, QKV, QKV_BIAS, PROJECT, PROJECT_BIAS, GAIN_2, SHIFT_2, UP, UP_BIAS, DOWN, DOWN_BIAS, OF_A_BLOCK };

typedef struct {
    char name[32];
    uint64_t shape[2]; /* matrices have a row of weights for each output */
    uint32_t rank;
    size_t offset, count;
} tensor_t;

/* What the forward pass of a block keeps for the backward pass: a row for each position of each sequence. */
typedef struct {
    float *input, *norm_1, *qkv, *weights, *mixed, *middle, *norm_2, *up, *active;
} block_t;

typedef struct {
    sizes_t sizes;
    int tensor_count;
    tensor_t *tensors;
    size_t parameter_count;
    float *parameters, *gradients; /* all tensors, one after the other */
    block_t *blocks;
    float *output, *norm, *logits;                                    /* of the last block, and behind it */
    float *d_logits, *d_stream, *d_norm, *d_qkv, *d_mixed, *d_active; /* gradients of what the network computes */
} gpt_t;

/* ---- The arithmetic of layers, in blocks of eight: compilers make vectors of them that change no sum. */

static float dot(const float *a, const float *b, int count) {
    float sums[8] = {0}, sum = 0;
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int j = 0; j < 8; j++) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    for (; i < count; i++) {
        sum += a[i] * b[i];
    }
    for (int j = 0; j < 8; j++) {
        sum += sums[j];
    }
    return sum;
}

static void add_scaled(float *restrict to, float factor, const float *restrict from, int count) {
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int j = 0; j < 8; j++) {
            to[i + j] += factor * from[i + j];
        }
    }
    for (; i < count; i++) {
        to[i] += factor * from[i];
    }
}

/* out = in weightᵀ + bias, for each row; without bias where that is null. */
static void linear(float *out, const float *in, const float *weight, const float *bias, int rows, int inputs, int outputs) {
    for (int row = 0; row < rows; row++, in += inputs, out += outputs) {
        for (int o = 0; o < outputs; o++) {
            out[o] = (bias ? bias[o] : 0) + dot(in, weight + o * inputs, inputs);
        }
    }
}

/* Sets d_in, adds to d_weight and d_bias. */
static void linear_backward(float *d_in, float *d_weight, float *d_bias, const float *d_out, const float *in,
                            const float *weight, int rows, int inputs, int outputs) {
    memset(d_in, 0, (size_t)rows * (size_t)inputs * sizeof *d_in);
    for (int row = 0; row < rows; row++, in += inputs, d_in += inputs, d_out += outputs) {
        for (int o = 0; o < outputs; o++) {
            add_scaled(d_in, d_out[o], weight + o * inputs, inputs);
            add_scaled(d_weight + o * inputs, d_out[o], in, inputs);
        }
        if (d_bias) {
            add_scaled(d_bias, 1, d_out, outputs);
        }
    }
}

/* Mean and inverse standard deviation. */
static void moments(const float *x, int count, float *mean, float *inverse) {
    float sum = 0, squares = 0;
    for (int i = 0; i < count; i++) {
        sum += x[i];
    }
    *mean = sum / (float)count;
    for (int i = 0; i < count; i++) {
        squares += (x[i] - *mean) * (x[i] - *mean);
    }
    *inverse = 1 / sqrtf(squares / (float)count + 1e-5f);
}

static void layer_norm(float *out, const float *in, const float *gain, const float *shift, int rows, int channels) {
    for (int row = 0; row < rows; row++, in += channels, out += channels) {
        float mean, inverse;
        moments(in, channels, &mean, &inverse);
        for (int i = 0; i < channels; i++) {
            out[i] = (in[i] - mean) * inverse * gain[i] + shift[i];
        }
    }
}

/* Adds to d_in, d_gain and d_shift. */
static void layer_norm_backward(float *d_in, float *d_gain, float *d_shift, const float *d_out, const float *in,
                                const float *gain, int rows, int channels) {
    for (int row = 0; row < rows; row++, in += channels, d_in += channels, d_out += channels) {
        float mean, inverse, sum = 0, along = 0;
        moments(in, channels, &mean, &inverse);
        for (int i = 0; i < channels; i++) {
            float normal = (in[i] - mean) * inverse;
            sum += d_out[i] * gain[i];
            along += d_out[i] * gain[i] * normal;
            d_gain[i] += d_out[i] * normal;
            d_shift[i] += d_out[i];
        }
        for (int i = 0; i < channels; i++) {
            float normal = (in[i] - mean) * inverse;
            d_in[i] += inverse * (d_out[i] * gain[i] - (sum + along * normal) / (float)channels);
        }
    }
}

#define GELU_SCALE 0.7978845608f /* √(2/π) */
#define GELU_CUBE 0.044715f

static void gelu(float *out, const float *in, int count) {
    for (int i = 0; i < count; i++) {
        float x = in[i];
        out[i] = 0.5f * x * (1 + tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x)));
    }
}

/* Turns gradients of the output into those of the input. */
static void gelu_backward(float *d, const float *in, int count) {
    for (int i = 0; i < count; i++) {
        float x = in[i], t = tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x));
        d[i] *= 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBE * x * x);
    }
}

/* In place; returns the logarithm of what the exponentials were divided by. */
static float softmax(float *x, int count) {
    float largest = x[0], sum = 0;
    for (int i = 1; i < count; i++) {
        largest = x[i] > largest ? x[i] : largest;
    }
    for (int i = 0; i < count; i++) {
        x[i] = expf(x[i] - largest);
        sum += x[i];
    }
    for (int i = 0; i < count; i++) {
        x[i] /= sum;
    }
    return largest + logf(sum);
}

/* Each position looks at itself and those before: `weights` say how much, `mixed` is what it gets. A row of
 * `qkv` is query, key and value of all heads. */
static void attention(const sizes_t *s, float *mixed, float *weights, const float *qkv) {
    const int channels = s->channels, size = channels / s->heads, context = s->context;
    const float scale = 1 / sqrtf((float)size);
    memset(mixed, 0, (size_t)(s->batch * context * channels) * sizeof *mixed);
    for (int b = 0; b < s->batch; b++, qkv += context * 3 * channels, mixed += context * channels) {
        for (int h = 0; h < s->heads; h++) {
            for (int t = 0; t < context; t++, weights += context) {
                const float *query = qkv + t * 3 * channels + h * size;
                const float *keys = qkv + channels + h * size, *values = keys + channels;
                for (int u = 0; u <= t; u++) {
                    weights[u] = scale * dot(query, keys + u * 3 * channels, size);
                }
                softmax(weights, t + 1);
                for (int u = 0; u <= t; u++) {
                    add_scaled(mixed + t * channels + h * size, weights[u], values + u * 3 * channels, size);
                }
            }
        }
    }
}

/* Sets d_qkv. */
static void attention_backward(const sizes_t *s, float *d_qkv, const float *d_mixed, const float *weights,
                               const float *qkv) {
    const int channels = s->channels, size = channels / s->heads, context = s->context, row = 3 * channels;
    const float scale = 1 / sqrtf((float)size);
    memset(d_qkv, 0, (size_t)(s->batch * context * row) * sizeof *d_qkv);
    for (int b = 0; b < s->batch; b++, qkv += context * row, d_qkv += context * row, d_mixed += context * channels) {
        for (int h = 0; h < s->heads; h++) {
            for (int t = 0; t < context; t++, weights += context) {
                const float *d_out = d_mixed + t * channels + h * size;
                const int q = t * row + h * size, k = channels + h * size, v = k + channels;
                float mean = 0;
                for (int u = 0; u <= t; u++) {
                    mean += weights[u] * dot(d_out, qkv + v + u * row, size);
                }
                for (int u = 0; u <= t; u++) {
                    float d_score = scale * weights[u] * (dot(d_out, qkv + v + u * row, size) - mean);
                    add_scaled(d_qkv + q, d_score, qkv + k + u * row, size);
                    add_scaled(d_qkv + k + u * row, d_score, qkv + q, size);
                    add_scaled(d_qkv + v + u * row, weights[u], d_out, size);
                }
            }
        }
    }
}

/* ---- The network. ---- */

static float *parameter(const gpt_t *gpt, int tensor) { return gpt->parameters + gpt->tensors[tensor].offset; }

static float *gradient(const gpt_t *gpt, int tensor) { return gpt->gradients + gpt->tensors[tensor].offset; }

static int of_block(int block, int tensor) { return FIRST_BLOCK + block * OF_A_BLOCK + tensor; }

/* The mean loss of predicting each target from the bytes up to it, in nats; batch·context of both. Keeps what
 * gpt_backward needs. */
static double gpt_forward(gpt_t *gpt, const uint8_t *bytes, const uint8_t *targets) {
    const sizes_t *s = &gpt->sizes;
    const int rows = s->batch * s->context, channels = s->channels;
    float *stream = gpt->blocks[0].input;
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < channels; i++) {
            stream[row * channels + i] = parameter(gpt, EMBEDDING)[bytes[row] * channels + i] +
                                         parameter(gpt, POSITIONS)[row % s->context * channels + i];
        }
    }
    for (int k = 0; k < s->blocks; k++) {
        block_t *block = &gpt->blocks[k];
        float *next = k + 1 < s->blocks ? block[1].input : gpt->output;
#define P(tensor) parameter(gpt, of_block(k, tensor))
        layer_norm(block->norm_1, block->input, P(GAIN_1), P(SHIFT_1), rows, channels);
        linear(block->qkv, block->norm_1, P(QKV), P(QKV_BIAS), rows, channels, 3 * channels);
        attention(s, block->mixed, block->weights, block->qkv);
        linear(block->middle, block->mixed, P(PROJECT), P(PROJECT_BIAS), rows, channels, channels);
        add_scaled(block->middle, 1, block->input, rows * channels);
        layer_norm(block->norm_2, block->middle, P(GAIN_2), P(SHIFT_2), rows, channels);
        linear(block->up, block->norm_2, P(UP), P(UP_BIAS), rows, channels, 4 * channels);
        gelu(block->active, block->up, rows * 4 * channels);
        linear(next, block->active, P(DOWN), P(DOWN_BIAS), rows, 4 * channels, channels);
        add_scaled(next, 1, block->middle, rows * channels);
    }
    layer_norm(gpt->norm, gpt->output, parameter(gpt, LAST_GAIN), parameter(gpt, LAST_SHIFT), rows, channels);
    linear(gpt->logits, gpt->norm, parameter(gpt, EMBEDDING), NULL, rows, channels, s->vocabulary);
    double loss = 0;
    for (int row = 0; row < rows; row++) {
        float *logits = gpt->logits + row * s->vocabulary, target = logits[targets[row]];
        loss += (double)(softmax(logits, s->vocabulary) - target); /* logits are probabilities from here on */
    }
    return loss / rows;
}

/* The gradient of the loss that gpt_forward returned for the same bytes. */
static void gpt_backward(gpt_t *gpt, const uint8_t *bytes, const uint8_t *targets) {
    const sizes_t *s = &gpt->sizes;
    const int rows = s->batch * s->context, channels = s->channels;
    memset(gpt->gradients, 0, gpt->parameter_count * sizeof *gpt->gradients);
    for (int i = 0; i < rows * s->vocabulary; i++) {
        int hit = i % s->vocabulary == targets[i / s->vocabulary];
        gpt->d_logits[i] = (gpt->logits[i] - (float)hit) / (float)rows;
    }
    linear_backward(gpt->d_norm, gradient(gpt, EMBEDDING), NULL, gpt->d_logits, gpt->norm, parameter(gpt, EMBEDDING), rows,
                    channels, s->vocabulary);
    /* Blocks add to the stream, so its gradient goes through all of them, and each adds to it. */
    float *d_stream = gpt->d_stream;
    memset(d_stream, 0, (size_t)(rows * channels) * sizeof *d_stream);
    layer_norm_backward(d_stream, gradient(gpt, LAST_GAIN), gradient(gpt, LAST_SHIFT), gpt->d_norm, gpt->output,
                        parameter(gpt, LAST_GAIN), rows, channels);
    for (int k = s->blocks - 1; k >= 0; k--) {
        const block_t *block = &gpt->blocks[k];
#define G(tensor) gradient(gpt, of_block(k, tensor))
        linear_backward(gpt->d_active, G(DOWN), G(DOWN_BIAS), d_stream, block->active, P(DOWN), rows, 4 * channels,
                        channels);
        gelu_backward(gpt->d_active, block->up, rows * 4 * channels);
        linear_backward(gpt->d_norm, G(UP), G(UP_BIAS), gpt->d_active, block->norm_2, P(UP), rows, channels, 4 * channels);
        layer_norm_backward(d_stream, G(GAIN_2), G(SHIFT_2), gpt->d_norm, block->middle, P(GAIN_2), rows, channels);
        linear_backward(gpt->d_mixed, G(PROJECT), G(PROJECT_BIAS), d_stream, block->mixed, P(PROJECT), rows, channels,
                        channels);
        attention_backward(s, gpt->d_qkv, gpt->d_mixed, block->weights, block->qkv);
        linear_backward(gpt->d_norm, G(QKV), G(QKV_BIAS), gpt->d_qkv, block->norm_1, P(QKV), rows, channels, 3 * channels);
        layer_norm_backward(d_stream, G(GAIN_1), G(SHIFT_1), gpt->d_norm, block->input, P(GAIN_1), rows, channels);
#undef G
#undef P
    }
    for (int row = 0; row < rows; row++) {
        const float *d = d_stream + row * channels;
        add_scaled(gradient(gpt, EMBEDDING) + bytes[row] * channels, 1, d, channels);
        add_scaled(gradient(gpt, POSITIONS) + row % s->context * channels, 1, d, channels);
    }
}

/* Normal with the given standard deviation, less for what is added to the stream; gains 1, biases 0. */
static void gpt_initialise(gpt_t *gpt, uint64_t seed, float deviation) {
    random_t random = {seed};
    for (int k = 0; k < gpt->tensor_count; k++) {
        const int which = k < FIRST_BLOCK ? -1 : (k - FIRST_BLOCK) % OF_A_BLOCK;
        const int adds = which == PROJECT || which == DOWN, gain = k == LAST_GAIN || which == GAIN_1 || which == GAIN_2;
        const float width = adds ? deviation / sqrtf(2.0f * (float)gpt->sizes.blocks) : deviation;
        for (size_t i = 0; i < gpt->tensors[k].count; i++) {
            parameter(gpt, k)[i] = gpt->tensors[k].rank == 2 ? width * (float)random_normal(&random) : (float)gain;
        }
    }
}

static void gpt_destroy(gpt_t *gpt) {
    free(gpt->tensors);
    free(gpt->blocks);
    free(gpt->parameters);
    *gpt = (gpt_t){0};
}

static void add_tensor(gpt_t *gpt, const char *name, int block, int outputs, int inputs) {
    tensor_t *tensor = &gpt->tensors[gpt->tensor_count++];
    *tensor = (tensor_t){.shape = {(uint64_t)outputs, (uint64_t)inputs}, .rank = inputs ? 2 : 1};
    snprintf(tensor->name, sizeof tensor->name, block < 0 ? "%s" : "%s.%d", name, block);
    tensor->offset = gpt->parameter_count;
    tensor->count = (size_t)outputs * (size_t)(inputs ? inputs : 1);
    gpt->parameter_count += tensor->count;
}

static int gpt_create(gpt_t *gpt, const sizes_t *sizes) {
    *gpt = (gpt_t){.sizes = *sizes};
    const int channels = sizes->channels, rows = sizes->batch * sizes->context;
    gpt->tensors = calloc((size_t)of_block(sizes->blocks, 0), sizeof *gpt->tensors);
    gpt->blocks = calloc((size_t)sizes->blocks, sizeof *gpt->blocks);
    if (gpt->tensors && gpt->blocks) {
        add_tensor(gpt, "embedding", -1, sizes->vocabulary, channels);
        add_tensor(gpt, "positions", -1, sizes->context, channels);
        add_tensor(gpt, "gain", -1, channels, 0);
        add_tensor(gpt, "shift", -1, channels, 0);
        for (int k = 0; k < sizes->blocks; k++) {
            add_tensor(gpt, "gain_1", k, channels, 0);
            add_tensor(gpt, "shift_1", k, channels, 0);
            add_tensor(gpt, "qkv", k, 3 * channels, channels);
            add_tensor(gpt, "qkv_bias", k, 3 * channels, 0);
            add_tensor(gpt, "project", k, channels, channels);
            add_tensor(gpt, "project_bias", k, channels, 0);
            add_tensor(gpt, "gain_2", k, channels, 0);
            add_tensor(gpt, "shift_2", k, channels, 0);
            add_tensor(gpt, "up", k, 4 * channels, channels);
            add_tensor(gpt, "up_bias", k, 4 * channels, 0);
            add_tensor(gpt, "down", k, channels, 4 * channels);
            add_tensor(gpt, "down_bias", k, channels, 0);
        }
        /* All numbers in one piece of memory: how many each list has, and where its address goes. */
        const size_t stream = (size_t)(rows * channels), weights = (size_t)(rows * sizes->heads * sizes->context);
        const size_t logits = (size_t)(rows * sizes->vocabulary);
        size_t total = 2 * gpt->parameter_count + 5 * stream + 2 * logits + 3 * stream + 4 * stream +
                       (size_t)sizes->blocks * (16 * stream + weights);
        float *memory = calloc(total, sizeof *memory);
        if (memory) {
#define TAKE(list, count) ((list) = memory, memory += (count))
            TAKE(gpt->parameters, gpt->parameter_count);
            TAKE(gpt->gradients, gpt->parameter_count);
            TAKE(gpt->output, stream), TAKE(gpt->norm, stream), TAKE(gpt->d_stream, stream);
            TAKE(gpt->d_norm, stream), TAKE(gpt->d_mixed, stream);
            TAKE(gpt->logits, logits), TAKE(gpt->d_logits, logits);
            TAKE(gpt->d_qkv, 3 * stream), TAKE(gpt->d_active, 4 * stream);
            for (int k = 0; k < sizes->blocks; k++) {
                block_t *block = &gpt->blocks[k];
                TAKE(block->input, stream), TAKE(block->norm_1, stream), TAKE(block->qkv, 3 * stream);
                TAKE(block->weights, weights), TAKE(block->mixed, stream), TAKE(block->middle, stream);
                TAKE(block->norm_2, stream), TAKE(block->up, 4 * stream), TAKE(block->active, 4 * stream);
            }
#undef TAKE
            return 0;
        }
    }
    gpt_destroy(gpt);
    fprintf(stderr, "out of memory\n");
    return -1;
}

/* ---- Training. ---- */

typedef struct {
    const char *files[64];
    int file_count, steps, generate, compare, check;
    uint64_t seed;
} arguments_t;

typedef struct {
    uint8_t *bytes;
    size_t count, training; /* the first `training` of them are trained on */
} text_t;

typedef struct {
    double training; /* mean over the last tenth of the steps */
    double smallest, last; /* of the validation losses */
} result_t;

/* Every call of the library goes through this. */
static int check(rfd_status status, const char *what) {
    if (status == RFD_OK) {
        return 0;
    }
    fprintf(stderr, "%s: %s: %s\n", what, rfd_status_string(status), rfd_last_error());
    return -1;
}

/* The adaptive method, with nothing set. */
static int make_optimizer(const gpt_t *gpt, rfd_optimizer **optimizer) {
    rfd_tensor_spec *specs = calloc((size_t)gpt->tensor_count, sizeof *specs);
    if (!specs) {
        fprintf(stderr, "out of memory\n");
        return -1;
    }
    for (int k = 0; k < gpt->tensor_count; k++) {
        const tensor_t *tensor = &gpt->tensors[k];
        specs[k] = (rfd_tensor_spec){.size = sizeof specs[k],
                                     .name = tensor->name,
                                     .shape = tensor->shape,
                                     .rank = tensor->rank,
                                     .dtype = RFD_DTYPE_F32};
    }
    rfd_status status = rfd_adaptive_optimizer_create(NULL, NULL, specs, (size_t)gpt->tensor_count, optimizer);
    free(specs);
    return check(status, "optimizer");
}

/* For comparison: `state` has two numbers for each parameter, 0 before the first step. */
static void adamw(gpt_t *gpt, float *state, int step, float rate) {
    const float beta_1 = 0.9f, beta_2 = 0.999f, decay = 0.01f;
    const float rest_1 = 1 - powf(beta_1, (float)step), rest_2 = 1 - powf(beta_2, (float)step);
    for (size_t i = 0; i < gpt->parameter_count; i++) {
        float g = gpt->gradients[i], *m = &state[2 * i], *v = &state[2 * i + 1];
        *m = beta_1 * *m + (1 - beta_1) * g;
        *v = beta_2 * *v + (1 - beta_2) * g * g;
        gpt->parameters[i] -= rate * (*m / rest_1 / (sqrtf(*v / rest_2) + 1e-8f) + decay * gpt->parameters[i]);
    }
}

/* Sequences that begin at random places of the training text. */
static void draw(const gpt_t *gpt, const text_t *text, random_t *random, uint8_t *bytes, uint8_t *targets) {
    const size_t context = (size_t)gpt->sizes.context;
    for (int b = 0; b < gpt->sizes.batch; b++, bytes += context, targets += context) {
        const uint8_t *from = text->bytes + random_below(random, text->training - context);
        memcpy(bytes, from, context);
        memcpy(targets, from + 1, context);
    }
}

/* The mean loss on the held-out text, up to 32 batches of neighbouring sequences. */
static double validate(gpt_t *gpt, const text_t *text, uint8_t *bytes, uint8_t *targets) {
    const size_t context = (size_t)gpt->sizes.context, rows = context * (size_t)gpt->sizes.batch;
    double sum = 0;
    int batches = 0;
    for (size_t at = text->training; at + rows < text->count && batches < 32; at += rows, batches++) {
        memcpy(bytes, text->bytes + at, rows);
        memcpy(targets, text->bytes + at + 1, rows);
        sum += gpt_forward(gpt, bytes, targets);
    }
    return sum / batches;
}

/* By AdamW where a rate is given, else by the adaptive method. */
static int train(gpt_t *gpt, const text_t *text, const arguments_t *arguments, float rate, result_t *result) {
    const size_t rows = (size_t)(gpt->sizes.batch * gpt->sizes.context);
    uint8_t *bytes = malloc(2 * rows), *targets = bytes ? bytes + rows : NULL;
    float *state = rate > 0 ? calloc(gpt->parameter_count, 2 * sizeof *state) : NULL;
    rfd_optimizer *optimizer = NULL;
    int failed = !bytes || (rate > 0 && !state);
    if (failed) {
        fprintf(stderr, "out of memory\n");
    } else if (rate <= 0) {
        failed = make_optimizer(gpt, &optimizer);
    }
    rfd_step_input input;
    rfd_step_input_init(&input, sizeof input);
    rfd_step_report report = {.size = sizeof report};

    gpt_initialise(gpt, arguments->seed, 0.02f);
    random_t random = {arguments->seed + 1};
    const int every = arguments->steps < 10 ? 1 : arguments->steps / 10;
    double sum = 0;
    *result = (result_t){.smallest = INFINITY};
    for (int step = 1; step <= arguments->steps && !failed; step++) {
        draw(gpt, text, &random, bytes, targets);
        input.loss = gpt_forward(gpt, bytes, targets);
        gpt_backward(gpt, bytes, targets);
        sum += input.loss;
        if (rate > 0) {
            adamw(gpt, state, step, rate);
        } else {
            failed = check(rfd_optimizer_step_flat(optimizer, gpt->parameters, gpt->gradients, gpt->parameter_count,
                                                   RFD_DTYPE_F32, &input, NULL, &report),
                           "step");
        }
        if (step % every == 0) {
            result->training = sum / every;
            result->last = validate(gpt, text, bytes, targets);
            result->smallest = fmin(result->smallest, result->last);
            printf("step %5d: training loss %.4f, validation loss %.4f", step, result->training, result->last);
            if (rate > 0) {
                printf("\n");
            } else {
                printf(", trust %.3g, steps skipped %llu\n", report.trust, (unsigned long long)report.skipped_steps);
            }
            fflush(stdout);
            sum = 0;
        }
    }
    rfd_optimizer_destroy(optimizer);
    free(state);
    free(bytes);
    return failed ? -1 : 0;
}

/* Writes bytes, each drawn from what the network says of it, beginning with the last ones of the training
 * text. */
static int generate(gpt_t *gpt, const text_t *text, int count, uint64_t seed) {
    const int context = gpt->sizes.context, batch = gpt->sizes.batch;
    uint8_t *bytes = calloc((size_t)context, 2);
    if (!bytes) {
        fprintf(stderr, "out of memory\n");
        return -1;
    }
    uint8_t *targets = bytes + context; /* which don't matter here */
    memcpy(bytes, text->bytes + text->training - context, (size_t)context);
    random_t random = {seed + 2};
    gpt->sizes.batch = 1;
    for (int k = 0; k < count; k++) {
        gpt_forward(gpt, bytes, targets);
        const float *probabilities = gpt->logits + (context - 1) * gpt->sizes.vocabulary; /* behind the last byte */
        double left = random_uniform(&random);
        int byte = 0;
        while (byte + 1 < gpt->sizes.vocabulary && (left -= (double)probabilities[byte]) > 0) {
            byte++;
        }
        memmove(bytes, bytes + 1, (size_t)context - 1);
        bytes[context - 1] = (uint8_t)byte;
        putchar(byte < 32 && byte != '\n' && byte != '\t' ? '?' : byte);
    }
    putchar('\n');
    gpt->sizes.batch = batch;
    free(bytes);
    return 0;
}

static int compare(gpt_t *gpt, const text_t *text, const arguments_t *arguments, const result_t *adaptive) {
    static const float rates[] = {1e-4f, 3e-4f, 1e-3f, 3e-3f};
    result_t results[4], best = {INFINITY, INFINITY, INFINITY};
    for (int k = 0; k < 4; k++) {
        printf("\nAdamW, learning rate %g\n", (double)rates[k]);
        if (train(gpt, text, arguments, rates[k], &results[k])) {
            return -1;
        }
        best.smallest = fmin(best.smallest, results[k].smallest);
        best.last = fmin(best.last, results[k].last);
    }
    printf("\n                    training loss   validation loss: smallest      last\n");
    printf("adaptive            %13.4f   %25.4f   %7.4f\n", adaptive->training, adaptive->smallest, adaptive->last);
    for (int k = 0; k < 4; k++) {
        printf("AdamW %-13g %13.4f   %25.4f   %7.4f\n", (double)rates[k], results[k].training, results[k].smallest,
               results[k].last);
    }
    printf("adaptive over AdamW's best: %.3f, %.3f\n", adaptive->smallest / best.smallest, adaptive->last / best.last);
    return 0;
}

/* ---- What goes around it. ---- */

/* Differences of losses, in which float leaves about four digits, against gradients, tensor by tensor. */
static int check_gradients(void) {
    const sizes_t sizes = {.blocks = 2, .channels = 8, .heads = 2, .context = 5, .batch = 2, .vocabulary = 11};
    const float step = 1e-2f;
    gpt_t gpt;
    if (gpt_create(&gpt, &sizes)) {
        return -1;
    }
    gpt_initialise(&gpt, 1, 0.3f);
    random_t random = {2};
    uint8_t bytes[10], targets[10];
    for (int i = 0; i < 10; i++) {
        bytes[i] = (uint8_t)random_below(&random, 11);
        targets[i] = (uint8_t)random_below(&random, 11);
    }
    gpt_forward(&gpt, bytes, targets);
    gpt_backward(&gpt, bytes, targets);
    int failed = 0;
    for (int k = 0; k < gpt.tensor_count; k++) {
        double error = 0, squares = 0;
        for (size_t i = 0; i < gpt.tensors[k].count; i++) {
            float *p = parameter(&gpt, k) + i, old = *p;
            *p = old + step;
            double above = gpt_forward(&gpt, bytes, targets);
            *p = old - step;
            double below = gpt_forward(&gpt, bytes, targets);
            *p = old;
            double expected = (above - below) / (2 * (double)step), found = (double)gradient(&gpt, k)[i];
            error += (found - expected) * (found - expected);
            squares += expected * expected;
        }
        const int wrong = !(error < 1e-4 * squares); /* of NaN too */
        printf("%-16s relative error %.1e%s\n", gpt.tensors[k].name, sqrt(error / squares), wrong ? ": wrong" : "");
        failed |= wrong;
    }
    gpt_destroy(&gpt);
    printf(failed ? "gradients are wrong\n" : "gradients are right\n");
    return failed ? -1 : 0;
}

static int read_file(text_t *text, const char *name) {
    FILE *file = fopen(name, "rb");
    if (!file) {
        fprintf(stderr, "%s: can't be opened; give text files to learn from\n", name);
        return -1;
    }
    uint8_t part[4096];
    size_t count;
    int failed = 0;
    while (!failed && (count = fread(part, 1, sizeof part, file)) > 0) {
        uint8_t *larger = realloc(text->bytes, text->count + count);
        failed = !larger;
        if (larger) {
            memcpy(larger + text->count, part, count);
            text->bytes = larger;
            text->count += count;
        }
    }
    failed |= ferror(file);
    fclose(file);
    if (failed) {
        fprintf(stderr, "%s: can't be read to its end\n", name);
    }
    return failed ? -1 : 0;
}

static int prepare(text_t *text, const arguments_t *arguments) {
    for (int k = 0; k < arguments->file_count; k++) {
        if (read_file(text, arguments->files[k])) {
            return -1;
        }
    }
    text->training = text->count / 10 * 9;
    const size_t least = 10 * (size_t)(SIZES.batch * SIZES.context + 1);
    if (text->count < least) {
        fprintf(stderr, "the text has %zu bytes: give at least %zu\n", text->count, least);
        return -1;
    }
    printf("%zu bytes of text, the last %zu of them for validation\n", text->count, text->count - text->training);
    return 0;
}

static int parse(arguments_t *arguments, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--compare")) {
            arguments->compare = 1;
        } else if (!strcmp(argv[i], "--check")) {
            arguments->check = 1;
        } else if (!strcmp(argv[i], "--steps") && value && atoi(value) > 0) {
            arguments->steps = atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--generate") && value && atoi(value) >= 0) {
            arguments->generate = atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--seed") && value) {
            arguments->seed = strtoull(argv[++i], NULL, 10);
        } else if (argv[i][0] != '-' && arguments->file_count < 64) {
            arguments->files[arguments->file_count++] = argv[i];
        } else {
            fprintf(stderr,
                    "usage: %s [FILE...] [--steps N] [--seed S] [--generate N] [--compare]\n       %s --check\n"
                    "N of --steps is at least 1; at most 64 files are read\n",
                    argv[0], argv[0]);
            return -1;
        }
    }
    if (!arguments->file_count && !arguments->check) {
        printf("no FILE was given: learning from %s\n", __FILE__);
        arguments->files[arguments->file_count++] = __FILE__;
    }
    return 0;
}

int main(int argc, char **argv) {
    arguments_t arguments = {.steps = 500, .generate = 400};
    if (rfd_abi_version() != RFD_ABI_VERSION) {
        fprintf(stderr, "compiled for ABI %d of rfdescent, but the library has %u\n", RFD_ABI_VERSION, rfd_abi_version());
        return 1;
    }
    if (parse(&arguments, argc, argv)) {
        return 2;
    }
    if (arguments.check) {
        return check_gradients() ? 1 : 0;
    }
    text_t text = {0};
    gpt_t gpt = {0};
    result_t adaptive;
    int failed = prepare(&text, &arguments) || gpt_create(&gpt, &SIZES);
    if (!failed) {
        printf("%zu parameters, adaptive method\n", gpt.parameter_count);
        failed = train(&gpt, &text, &arguments, 0, &adaptive) || generate(&gpt, &text, arguments.generate, arguments.seed) ||
                 (arguments.compare && compare(&gpt, &text, &arguments, &adaptive));
    }
    gpt_destroy(&gpt);
    free(text.bytes);
    return failed ? 1 : 0;
}
