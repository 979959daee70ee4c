/* cpu_kernels_plain.c - the inner loops in plain C: for machines with neither AVX2 nor NEON, and
 * the second opinion in tests. Sums run in eight lanes, as in the AVX2 file, so that both have
 * errors of the same size. Threads: any. */
#include <string.h>

#include "bitdelta/base/half.h"
#include "cpu.h"

#define LANES 8u

static float lane_sum(const float lanes[LANES]) {
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

static void plain_to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    if (dtype == BD_DTYPE_F32) {
        memcpy(dst, src, (size_t)count * sizeof *dst);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, src + 2 * (size_t)i, sizeof bits);
        dst[i] = dtype == BD_DTYPE_BF16 ? bd_bf16_to_f32(bits) : bd_f16_to_f32(bits);
    }
}

static size_t dtype_bytes(bd_dtype dtype) {
    return dtype == BD_DTYPE_F32 ? 4 : 2;
}

#define BAND 8u /* rows that share the widened weights */

/* One output of rows [first, first + rows). */
static void dot_band(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, uint32_t first,
                     uint32_t rows) {
    const uint8_t *w = dot->w + i * dot->stride_bytes;
    float lanes[BAND][LANES] = {0};
    for (uint32_t k = 0; k < dot->k; k += LANES) {
        const uint32_t count = dot->k - k < LANES ? dot->k - k : LANES;
        float wide[LANES];
        plain_to_f32(wide, w + k * dtype_bytes(dtype), dtype, count);
        for (uint32_t r = 0; r < rows; r++) {
            const float *x = dot->x[first + r] + k;
            for (uint32_t l = 0; l < count; l++)
                lanes[r][l] += x[l] * wide[l];
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        float *y = dot->y[first + r] + i;
        *y = (dot->add ? *y : 0.0f) + lane_sum(lanes[r]);
    }
}

static void plain_dot(const bd_cpu_dot *dot, bd_dtype dtype) {
    for (uint32_t i = 0; i < dot->n; i++) {
        for (uint32_t r = 0; r < dot->rows; r += BAND)
            dot_band(dot, dtype, i, r, dot->rows - r < BAND ? dot->rows - r : BAND);
    }
}

static void plain_dot_f32(const bd_cpu_dot *dot) {
    plain_dot(dot, BD_DTYPE_F32);
}
static void plain_dot_bf16(const bd_cpu_dot *dot) {
    plain_dot(dot, BD_DTYPE_BF16);
}
static void plain_dot_f16(const bd_cpu_dot *dot) {
    plain_dot(dot, BD_DTYPE_F16);
}

static uint32_t load_word(const uint8_t *bits) {
    uint32_t word;
    memcpy(&word, bits, sizeof word);
    return word;
}

static float flip(float value, uint32_t word, uint32_t bit) {
    return (word >> bit) & 1u ? -value : value;
}

static void plain_sum_table(float *table, const float *x, uint32_t k) {
    for (uint32_t w = 0; w < bd_cpu_plane_words(k); w++) {
        float part[33] = {0};
        memcpy(part, x + 32u * w, (k - 32u * w < 32u ? k - 32u * w : 32u) * sizeof *part);
        for (uint32_t t = 0; t < BD_CPU_TRIPLES; t++) {
            for (uint32_t j = 0; j < 8; j++) {
                *table++ = (flip(part[3 * t], j, 0) + flip(part[3 * t + 1], j, 1)) +
                           flip(part[3 * t + 2], j, 2);
            }
        }
    }
}

static float plain_signed_sum(const bd_cpu_signs *signs, const float *row_table, uint32_t n) {
    float sum = 0.0f, part = 0.0f;
    for (uint32_t w = 0; w < signs->words; w++) {
        uint32_t word = load_word(signs->plane + bd_cpu_plane_offset(signs->words, n, w));
        const float *table = row_table + (size_t)w * BD_CPU_TRIPLES * 8u;
        for (uint32_t t = 0; t < BD_CPU_TRIPLES; t++, word >>= 3)
            part += table[8u * t + (word & 7u)];
        if (w % BD_CPU_FOLD_WORDS == BD_CPU_FOLD_WORDS - 1) {
            sum += part;
            part = 0.0f;
        }
    }
    return sum + part;
}

static void plain_sign_dot(const bd_cpu_signs *signs) {
    for (uint32_t r = 0; r < signs->rows; r++) {
        for (uint32_t i = 0; i < signs->count; i++) {
            signs->y[r][i] +=
                signs->scale[i] * plain_signed_sum(signs, signs->table[r], signs->first + i);
        }
    }
}

static void plain_add_signs(float *dst, const float *src, const uint8_t *bits, uint32_t count,
                            float scale) {
    for (uint32_t i = 0; i < count; i++) {
        dst[i] = src[i] + flip(scale, load_word(bits + i / 32u * BD_CPU_PLANE_STEP), i % 32u);
    }
}

static void plain_weighted_sum(float *acc, const float *p, uint32_t queries, const float *v,
                               uint32_t tokens, uint32_t dim) {
    for (uint32_t q = 0; q < queries; q++) {
        float *out = acc + q * BD_CPU_HEAD_DIM_MAX;
        for (uint32_t t = 0; t < tokens; t++) {
            const float weight = p[q * BD_CPU_KV_TILE + t];
            for (uint32_t d = 0; d < dim; d++)
                out[d] += weight * v[(size_t)t * dim + d];
        }
    }
}

static const bd_cpu_kernels plain_kernels = {
    .name = "plain",
    .short_rows = 24,
    .dot = {[BD_DTYPE_F32] = plain_dot_f32,
            [BD_DTYPE_BF16] = plain_dot_bf16,
            [BD_DTYPE_F16] = plain_dot_f16},
    .sum_table = plain_sum_table,
    .sign_dot = plain_sign_dot,
    .to_f32 = plain_to_f32,
    .add_signs = plain_add_signs,
    .weighted_sum = plain_weighted_sum,
};

const bd_cpu_kernels *bd_cpu_kernels_plain(void) {
    return &plain_kernels;
}
