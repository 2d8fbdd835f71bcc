/* Random numbers that are the same everywhere: SplitMix64. */
#ifndef EXAMPLE_RANDOM_H
#define EXAMPLE_RANDOM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t state;
} random_t;

static inline uint64_t random_next(random_t *random) {
    random->state += 0x9E3779B97F4A7C15u;
    uint64_t z = random->state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform in (0, 1). */
static inline double random_uniform(random_t *random) {
    return ((double)(random_next(random) >> 11) + 0.5) / 9007199254740992.0;
}

static inline double random_normal(random_t *random) {
    double radius = sqrt(-2.0 * log(random_uniform(random)));
    return radius * cos(6.283185307179586 * random_uniform(random));
}

/* Uniform below `bound`. */
static inline size_t random_below(random_t *random, size_t bound) {
    return (size_t)(random_uniform(random) * (double)bound);
}

#endif
