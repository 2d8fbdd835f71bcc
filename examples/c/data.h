/* Labelled examples: MNIST's IDX files, or classes that are made up. */
#ifndef EXAMPLE_DATA_H
#define EXAMPLE_DATA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t count;    /* examples */
    size_t features; /* numbers in one of them */
    size_t classes;
    float *values;   /* count * features */
    uint8_t *labels; /* count */
} data_t;

/* Reads a pair of IDX files, not compressed. 0, or -1 after a message. */
int data_read(data_t *data, const char *folder, const char *images, const char *labels);

/* Makes examples of 10 classes: a centre for each, of which a random half of all features is seen, and
 * noise. */
int data_make(data_t *data, size_t count, size_t features, uint64_t seed);

void data_free(data_t *data);

#ifdef __cplusplus
}
#endif

#endif
