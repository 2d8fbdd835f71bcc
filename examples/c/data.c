#include "data.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

#define CLASSES 10

static int fail(const char *path, const char *problem) {
    fprintf(stderr, "%s: %s\n", path, problem);
    return -1;
}

/* Reads one IDX file of bytes with the given number of dimensions. */
static uint8_t *read_idx(const char *folder, const char *name, int dimensions, uint32_t *sizes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) {
        fail(path, "can't be opened; give a folder with MNIST's unpacked IDX files");
        return NULL;
    }
    uint8_t head[4];
    uint8_t *bytes = NULL;
    size_t total = 1;
    int ok = fread(head, 1, 4, file) == 4 && head[0] == 0 && head[1] == 0 && head[2] == 8 &&
             head[3] == dimensions;
    for (int i = 0; ok && i < dimensions; i++) {
        uint8_t s[4];
        ok = fread(s, 1, 4, file) == 4;
        if (ok) {
            sizes[i] = (uint32_t)s[0] << 24 | (uint32_t)s[1] << 16 | (uint32_t)s[2] << 8 | s[3];
            ok = sizes[i] > 0 && total <= ((size_t)1 << 32) / sizes[i];
            total *= sizes[i];
        }
    }
    if (ok) {
        bytes = malloc(total);
        ok = bytes && fread(bytes, 1, total, file) == total;
    }
    fclose(file);
    if (!ok) {
        free(bytes);
        fail(path, "is no whole IDX file of bytes");
        return NULL;
    }
    return bytes;
}

static int allocate(data_t *data, size_t count, size_t features) {
    *data = (data_t){.count = count, .features = features, .classes = CLASSES};
    data->values = malloc(count * features * sizeof *data->values);
    data->labels = malloc(count);
    if (data->values && data->labels) {
        return 0;
    }
    data_free(data);
    return fail("data", "out of memory");
}

int data_read(data_t *data, const char *folder, const char *images, const char *labels) {
    uint32_t image_sizes[3] = {0}, label_size[1] = {0};
    uint8_t *pixels = read_idx(folder, images, 3, image_sizes);
    uint8_t *classes = pixels ? read_idx(folder, labels, 1, label_size) : NULL;
    int result = -1;
    if (classes) {
        if (image_sizes[0] != label_size[0]) {
            fail(folder, "has not as many images as labels");
        } else if (allocate(data, image_sizes[0], (size_t)image_sizes[1] * image_sizes[2]) == 0) {
            for (size_t i = 0; i < data->count * data->features; i++) {
                data->values[i] = (float)pixels[i] / 255.0f;
            }
            for (size_t i = 0; i < data->count; i++) {
                data->labels[i] = classes[i] % CLASSES;
            }
            result = 0;
        }
    }
    free(pixels);
    free(classes);
    return result;
}

int data_make(data_t *data, size_t count, size_t features, uint64_t seed) {
    if (allocate(data, count, features) != 0) {
        return -1;
    }
    /* The classes are the same for every seed, so that training and validation data belong together. */
    random_t centres = {42};
    float *centre = malloc(CLASSES * features * sizeof *centre);
    if (!centre) {
        data_free(data);
        return fail("data", "out of memory");
    }
    for (size_t i = 0; i < CLASSES * features; i++) {
        centre[i] = (float)random_normal(&centres);
    }
    random_t random = {seed};
    for (size_t i = 0; i < count; i++) {
        size_t label = random_below(&random, CLASSES);
        data->labels[i] = (uint8_t)label;
        for (size_t j = 0; j < features; j++) {
            float seen = random_uniform(&random) < 0.5 ? centre[label * features + j] : 0.0f;
            data->values[i * features + j] = seen + (float)random_normal(&random);
        }
    }
    free(centre);
    return 0;
}

void data_free(data_t *data) {
    free(data->values);
    free(data->labels);
    *data = (data_t){0};
}
