/* gpu_problem.h - a linear layer of random weights, several variants' planes and a ragged batch, with its float64 reference. */
#ifndef BD_GPU_PROBLEM_H
#define BD_GPU_PROBLEM_H

#include "gpu_test.h"

typedef struct linear_case {
    int rows, n, k, variants, planes, runs; /* runs: segments of the step */
} linear_case;

typedef struct problem {
    linear_case c;
    uint16_t *x, *w;
    float *bias;
    uint8_t *bits[16][K_PLANES_MAX];
    float *scale[16][K_PLANES_MAX];
    k_segment *segments;
    int segment_count;
    bool fp16; /* x and w; else bf16 */
    int32_t *row_overlay;
    buffer device_bits[16][K_PLANES_MAX], device_scale[16][K_PLANES_MAX];
} problem;

static inline float element_float(uint16_t v, bool fp16) {
    return fp16 ? bd_f16_to_f32(v) : bd_bf16_to_f32(v);
}

static inline problem problem_make_element(linear_case c, bool fp16) {
    problem p = {.c = c, .fp16 = fp16};
    size_t n = (size_t)c.n, k = (size_t)c.k;
    p.x = bf16_random((size_t)c.rows * k, 1);
    p.w = bf16_random(n * k, 0.02);
    p.bias = floats_random(n, 0.1);
    for (size_t i = 0; fp16 && i < (size_t)c.rows * k; i++) p.x[i] = bd_f32_to_f16(bd_bf16_to_f32(p.x[i]));
    for (size_t i = 0; fp16 && i < n * k; i++) p.w[i] = bd_f32_to_f16(bd_bf16_to_f32(p.w[i]));
    for (int v = 0; v < c.variants; v++)
        for (int q = 0; q < c.planes; q++) {
            p.bits[v][q] = bytes_random(n * k / 8);
            p.scale[v][q] = floats_random(n, 0.002);
            buffer raw = buffer_make(p.bits[v][q], n * k / 8);
            p.device_bits[v][q] = buffer_make(NULL, k_sign_bytes((uint32_t)c.n, (uint32_t)c.k));
            p.device_scale[v][q] = buffer_make(p.scale[v][q], n * 4);
            /* In two uneven pieces, as a load arrives. */
            uint32_t first = (uint32_t)(c.n / 3);
            CUDA_OK(k_repack(p.device_bits[v][q].data, raw.data, (uint32_t)c.k, 0, first, NULL));
            CUDA_OK(k_repack(p.device_bits[v][q].data, (uint8_t *)raw.data + first * k / 8, (uint32_t)c.k, first, (uint32_t)c.n - first, NULL));
            CUDA_OK(cudaDeviceSynchronize());
            buffer_free(&raw);
        }
    p.segments = calloc((size_t)c.runs + 1, sizeof *p.segments);
    p.row_overlay = calloc((size_t)c.rows, sizeof *p.row_overlay);
    int at = 0;
    for (int s = 0; s < c.runs && at < c.rows; s++) {
        int left = c.rows - at, size = s == c.runs - 1 ? left : 1 + (int)(test_next() % (uint64_t)(2 * left / (c.runs - s)));
        if (size > left) size = left;
        int overlay = (int)(test_next() % (uint64_t)(c.variants + 1)) - 1;
        if (c.runs == 1 && c.variants) overlay = 0;
        p.segments[p.segment_count++] = (k_segment){overlay, at, at + size};
        for (int i = 0; i < size; i++) p.row_overlay[at + i] = overlay;
        at += size;
    }
    p.segments[p.segment_count - 1].end_row = c.rows;
    for (int i = at; i < c.rows; i++) p.row_overlay[i] = p.segments[p.segment_count - 1].overlay;
    return p;
}

static inline problem problem_make(linear_case c) {
    return problem_make_element(c, false);
}

/* Turns a variant's signs around. */
static inline void problem_mirror(problem *p, int v) {
    size_t bytes = (size_t)p->c.n * (size_t)p->c.k / 8;
    for (size_t i = 0; i < bytes; i++) p->bits[v][0][i] ^= 0xFF;
    buffer raw = buffer_make(p->bits[v][0], bytes);
    CUDA_OK(k_repack(p->device_bits[v][0].data, raw.data, (uint32_t)p->c.k, 0, (uint32_t)p->c.n, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    buffer_free(&raw);
}

static inline void problem_scale(problem *p, int v, float scale) {
    for (int i = 0; i < p->c.n; i++) p->scale[v][0][i] = scale;
    CUDA_OK(cudaMemcpy(p->device_scale[v][0].data, p->scale[v][0], (size_t)p->c.n * 4, cudaMemcpyHostToDevice));
}

static inline void problem_free(problem *p) {
    for (int v = 0; v < p->c.variants; v++)
        for (int q = 0; q < p->c.planes; q++) {
            buffer_free(&p->device_bits[v][q]);
            buffer_free(&p->device_scale[v][q]);
            free(p->bits[v][q]);
            free(p->scale[v][q]);
        }
    free(p->x);
    free(p->w);
    free(p->bias);
    free(p->segments);
    free(p->row_overlay);
}

static inline double sign_of(const uint8_t *bits, size_t n, size_t k, size_t cols) {
    return (bits[n * cols / 8 + k / 8] >> (k % 8)) & 1 ? 1.0 : -1.0;
}

static inline void reference(const problem *p, double *y) {
    size_t k = (size_t)p->c.k;
    for (size_t m = 0; m < (size_t)p->c.rows; m++)
        for (size_t n = 0; n < (size_t)p->c.n; n++) {
            double sum = p->bias[n];
            int v = p->row_overlay[m];
            for (size_t i = 0; i < k; i++) {
                double w = element_float(p->w[n * k + i], p->fp16);
                for (int q = 0; v >= 0 && q < p->c.planes; q++) w += p->scale[v][q][n] * sign_of(p->bits[v][q], n, i, k);
                sum += w * element_float(p->x[m * k + i], p->fp16);
            }
            y[m * (size_t)p->c.n + n] = sum;
        }
}

#endif
