/* gpu_test.h - what the kernel tests share: device buffers with guard bands, random data from a printed seed, error norms.
 * A test program exits with 77 (skipped) where no CUDA device answers. */
#ifndef BD_GPU_TEST_H
#define BD_GPU_TEST_H

/* References in float64 take float32 inputs: promoting them is the point. */
#pragma GCC diagnostic ignored "-Wdouble-promotion"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <cuda_runtime_api.h>

#include "bitdelta/base/half.h"
#include "kernels.h"

#define GUARD_BYTES 4096u
#define GUARD_BYTE 0xA5

#define CUDA_OK(call)                                                                              \
    do {                                                                                           \
        cudaError_t cuda_error_ = (call);                                                          \
        if (cuda_error_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(cuda_error_)); \
    } while (0)

static uint64_t test_state;

static inline uint64_t test_next(void) { /* SplitMix64 */
    uint64_t z = (test_state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static inline double test_uniform(void) { return (double)(test_next() >> 11) * 0x1p-53; }
static inline double test_normal(void) {
    return sqrt(-2.0 * log(test_uniform() + 1e-300)) * cos(6.283185307179586 * test_uniform());
}

/* A device buffer between two guard bands, filled with NaN patterns. */
typedef struct buffer {
    uint8_t *raw;
    void *data;
    size_t bytes;
} buffer;

static inline buffer buffer_make(const void *host, size_t bytes) {
    buffer b = {.bytes = bytes};
    CUDA_OK(cudaMalloc((void **)&b.raw, bytes + 2 * GUARD_BYTES));
    CUDA_OK(cudaMemset(b.raw, GUARD_BYTE, bytes + 2 * GUARD_BYTES));
    b.data = b.raw + GUARD_BYTES;
    if (host) CUDA_OK(cudaMemcpy(b.data, host, bytes, cudaMemcpyHostToDevice));
    else CUDA_OK(cudaMemset(b.data, 0xFF, bytes)); /* NaN in float32 and bf16 */
    return b;
}
static inline void buffer_get(const buffer *b, void *host) {
    CUDA_OK(cudaMemcpy(host, b->data, b->bytes, cudaMemcpyDeviceToHost));
}
/* Frees, after checking that nothing was written outside. */
static inline void buffer_free(buffer *b) {
    uint8_t band[GUARD_BYTES];
    for (int side = 0; side < 2; side++) {
        CUDA_OK(cudaMemcpy(band, b->raw + (side ? GUARD_BYTES + b->bytes : 0), GUARD_BYTES, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < GUARD_BYTES; i++)
            if (band[i] != GUARD_BYTE) fail_msg("a kernel wrote %s its buffer, byte %zu of the guard", side ? "past" : "before", i);
    }
    CUDA_OK(cudaFree(b->raw));
}

static inline float *floats_random(size_t count, double scale) {
    float *v = malloc((count + 1) * sizeof *v);
    for (size_t i = 0; i < count; i++) v[i] = (float)(test_normal() * scale);
    return v;
}
static inline uint16_t *bf16_random(size_t count, double scale) {
    uint16_t *v = malloc((count + 1) * sizeof *v);
    for (size_t i = 0; i < count; i++) v[i] = bd_f32_to_bf16((float)(test_normal() * scale));
    return v;
}
static inline uint8_t *bytes_random(size_t count) {
    uint8_t *v = malloc(count + 1);
    for (size_t i = 0; i < count; i++) v[i] = (uint8_t)test_next();
    return v;
}

/* ||got - want|| / ||want||; infinite when any value is NaN. */
static inline double relative_l2(const float *got, const double *want, size_t count) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        if (isnan(got[i])) return INFINITY;
        error += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(error / (norm + 1e-300));
}
#define CHECK_L2(got, want, count, bound, ...)                                                     \
    do {                                                                                           \
        double l2_ = relative_l2(got, want, count);                                                \
        if (!(l2_ <= (bound))) {                                                                   \
            char text_[256];                                                                       \
            snprintf(text_, sizeof text_, __VA_ARGS__);                                            \
            fail_msg("%s: relative L2 %.3g, bound %.3g", text_, l2_, (double)(bound));             \
        }                                                                                          \
    } while (0)

/* Call first in main: skips without a device, seeds and prints the seed (argument 1 repeats a run). */
static inline void gpu_test_begin(int argc, char **argv) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("no CUDA device: skipped\n");
        exit(77);
    }
    test_state = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)test_state);
}

#endif
