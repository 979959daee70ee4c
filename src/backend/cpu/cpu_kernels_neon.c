/* cpu_kernels_neon.c - the inner loops with NEON, which every 64-bit ARM has. Every (output, row)
 * pair has one eight-lane accumulator (two registers) that runs over k in order, whatever the
 * blocking, so a row's product does not depend on how many rows share the pass. Threads: any. */
#include "cpu.h"

#if defined(__aarch64__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_neon.h>
#include <string.h>

#define INLINE __attribute__((always_inline)) static inline
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLL   _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define ROLL   _Pragma("GCC unroll 1")
#endif

typedef float32x4x2_t eight;

INLINE eight zero8(void) {
    return (eight){{vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}};
}

INLINE eight load_floats(const float *x) {
    return (eight){{vld1q_f32(x), vld1q_f32(x + 4)}};
}

INLINE void store_floats(float *x, eight v) {
    vst1q_f32(x, v.val[0]);
    vst1q_f32(x + 4, v.val[1]);
}

INLINE eight add8(eight a, eight b) {
    return (eight){{vaddq_f32(a.val[0], b.val[0]), vaddq_f32(a.val[1], b.val[1])}};
}

INLINE eight fma8(eight sum, eight a, eight b) {
    return (eight){
        {vfmaq_f32(sum.val[0], a.val[0], b.val[0]), vfmaq_f32(sum.val[1], a.val[1], b.val[1])}};
}

INLINE float lane_sum(eight v) {
    const float32x4_t four = vaddq_f32(v.val[0], v.val[1]);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

/* Weights are not aligned: bytes are loaded. */
INLINE eight load8(const uint8_t *w, uint32_t k, bd_dtype dtype) {
    if (dtype == BD_DTYPE_F32) {
        const uint8_t *at = w + 4 * (size_t)k;
        return (eight){
            {vreinterpretq_f32_u8(vld1q_u8(at)), vreinterpretq_f32_u8(vld1q_u8(at + 16))}};
    }
    const uint16x8_t half = vreinterpretq_u16_u8(vld1q_u8(w + 2 * (size_t)k));
    if (dtype == BD_DTYPE_F16) {
        const float16x8_t small = vreinterpretq_f16_u16(half);
        return (eight){{vcvt_f32_f16(vget_low_f16(small)), vcvt_f32_f16(vget_high_f16(small))}};
    }
    return (eight){{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)),
                    vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(half), 16))}};
}

/* A row's last count < 8 weights, then zeros. */
static eight load_last(const uint8_t *w, uint32_t k, uint32_t count, bd_dtype dtype) {
    uint8_t part[32] = {0};
    const size_t size = bd_dtype_bytes(dtype);
    memcpy(part, w + k * size, count * size);
    return load8(part, 0, dtype);
}

static eight load_last_floats(const float *x, uint32_t count) {
    float part[8] = {0};
    memcpy(part, x, count * sizeof *part);
    return load_floats(part);
}

/* NW outputs times R rows; both are constants after inlining, and the accumulators fit the 32
 * registers. */
INLINE void dot_block(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, uint32_t r,
                      const uint32_t NW, const uint32_t R) {
    eight acc[4][4];
    const uint8_t *w[4];
    UNROLL for (uint32_t a = 0; a < NW; a++) {
        w[a] = dot->w + (i + a) * dot->stride_bytes;
        UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] = zero8();
    }
    const uint32_t whole = dot->k / 8 * 8;
    for (uint32_t k = 0; k < whole; k += 8) {
        eight wide[4];
        UNROLL for (uint32_t a = 0; a < NW; a++) wide[a] = load8(w[a], k, dtype);
        UNROLL for (uint32_t b = 0; b < R; b++) {
            const eight xs = load_floats(dot->x[r + b] + k);
            UNROLL for (uint32_t a = 0; a < NW; a++) acc[a][b] = fma8(acc[a][b], xs, wide[a]);
        }
    }
    if (whole < dot->k) {
        const uint32_t count = dot->k - whole;
        for (uint32_t b = 0; b < R; b++) {
            const eight xs = load_last_floats(dot->x[r + b] + whole, count);
            for (uint32_t a = 0; a < NW; a++)
                acc[a][b] = fma8(acc[a][b], xs, load_last(w[a], whole, count, dtype));
        }
    }
    UNROLL for (uint32_t b = 0; b < R; b++) {
        float *y = dot->y[r + b] + i;
        UNROLL for (uint32_t a = 0; a < NW; a++) y[a] =
            (dot->add ? y[a] : 0.0f) + lane_sum(acc[a][b]);
    }
}

INLINE void dot_rows(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, const uint32_t NW) {
    uint32_t r = 0;
    for (; r + 4 <= dot->rows; r += 4) {
        for (uint32_t a = 0; a<NW; a += NW> 1 ? 2 : 1)
            dot_block(dot, dtype, i + a, r, NW > 1 ? 2 : 1, 4);
    }
    for (; r + 2 <= dot->rows; r += 2)
        dot_block(dot, dtype, i, r, NW, 2);
    if (r < dot->rows) dot_block(dot, dtype, i, r, NW, 1);
}

INLINE void dot_all(const bd_cpu_dot *dot, bd_dtype dtype) {
    uint32_t i = 0;
    for (; i + 4 <= dot->n; i += 4)
        dot_rows(dot, dtype, i, 4);
    for (; i < dot->n; i++)
        dot_rows(dot, dtype, i, 1);
}

static void neon_dot_f32(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_F32);
}
static void neon_dot_bf16(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_BF16);
}
static void neon_dot_f16(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_F16);
}

/* Of four elements of a word those from bit `shift` on: a minus where the bit is set. */
INLINE uint32x4_t sign_bits(uint32_t word, int32_t shift) {
    const int32_t to_top[4] = {31, 30, 29, 28};
    const int32x4_t by = vsubq_s32(vld1q_s32(to_top), vdupq_n_s32(shift));
    return vandq_u32(vshlq_u32(vdupq_n_u32(word), by), vdupq_n_u32(0x80000000u));
}

INLINE float32x4_t flip(float32x4_t v, uint32x4_t minus) {
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), minus));
}

/* Of every three elements all eight sums, lane j with a minus where j has a bit. */
static void neon_sum_table(float *table, const float *x, uint32_t k) {
    const uint32x4_t first = sign_bits(0xa, 0), second = sign_bits(0xc, 0);
    for (uint32_t w = 0; w < bd_cpu_plane_words(k); w++) {
        float part[33] = {0};
        memcpy(part, x + 32u * w, (k - 32u * w < 32u ? k - 32u * w : 32u) * sizeof *part);
        for (uint32_t t = 0; t < BD_CPU_TRIPLES; t++, table += 8) {
            const float32x4_t two = vaddq_f32(flip(vdupq_n_f32(part[3 * t]), first),
                                              flip(vdupq_n_f32(part[3 * t + 1]), second));
            vst1q_f32(table, vaddq_f32(two, vdupq_n_f32(part[3 * t + 2])));
            vst1q_f32(table + 4, vsubq_f32(two, vdupq_n_f32(part[3 * t + 2])));
        }
    }
}

typedef struct signed_sum { /* of eight outputs and a row of the batch */
    eight total, part;      /* part: of the words since the last fold */
} signed_sum;

/* Byte numbers, in a table of eight floats, of the float that each lane's lowest bits choose. */
INLINE uint8x16_t table_bytes(uint32x4_t bits) {
    const uint32x4_t index = vandq_u32(bits, vdupq_n_u32(7));
    return vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100u), index, 0x04040404u));
}

INLINE float32x4_t choose(uint8x16x2_t table, uint8x16_t bytes) {
    return vreinterpretq_f32_u8(vqtbl2q_u8(table, bytes));
}

/* y of a row of the batch += scale * sums, for outputs of the group that are asked for. */
INLINE void add_scaled(const bd_cpu_signs *signs, uint32_t group, uint32_t r, eight total) {
    float sums[8];
    const uint32_t end = signs->first + signs->count;
    store_floats(sums, total);
    for (uint32_t n = 8 * group; n < 8 * (group + 1) && n < end; n++) {
        if (n < signs->first) continue; /* a neighbour's */
        signs->y[r][n - signs->first] += signs->scale[n - signs->first] * sums[n - 8 * group];
    }
}

/* Eight outputs, rows [r, r + R) of the batch: which sums the bits choose is worked out once for
 * all rows. */
INLINE void sign_block(const bd_cpu_signs *signs, uint32_t group, uint32_t r, const uint32_t R) {
    signed_sum sums[4];
    UNROLL for (uint32_t b = 0; b < R; b++) sums[b] = (signed_sum){zero8(), zero8()};
    size_t at = 0;
    for (uint32_t w = 0; w < signs->words; w++) {
        const uint8_t *words = signs->plane + bd_cpu_plane_offset(signs->words, 8 * group, w);
        uint32x4_t low = vreinterpretq_u32_u8(vld1q_u8(words)),
                   high = vreinterpretq_u32_u8(vld1q_u8(words + 16));
        ROLL for (uint32_t t = 0; t < BD_CPU_TRIPLES; t++, at += 8) {
            const uint8x16_t low_bytes = table_bytes(low), high_bytes = table_bytes(high);
            UNROLL for (uint32_t b = 0; b < R; b++) {
                const float *from = signs->table[r + b] + at;
                const uint8x16x2_t table = {{vreinterpretq_u8_f32(vld1q_f32(from)),
                                             vreinterpretq_u8_f32(vld1q_f32(from + 4))}};
                sums[b].part = add8(sums[b].part,
                                    (eight){{choose(table, low_bytes), choose(table, high_bytes)}});
            }
            low = vshrq_n_u32(low, 3);
            high = vshrq_n_u32(high, 3);
        }
        if (w % BD_CPU_FOLD_WORDS != BD_CPU_FOLD_WORDS - 1 && w + 1 != signs->words) continue;
        UNROLL for (uint32_t b = 0; b < R; b++) {
            sums[b].total = add8(sums[b].total, sums[b].part);
            sums[b].part = zero8();
        }
    }
    UNROLL for (uint32_t b = 0; b < R; b++) add_scaled(signs, group, r + b, sums[b].total);
}

static void neon_sign_dot(const bd_cpu_signs *signs) {
    const uint32_t end = (signs->first + signs->count + 7) / 8u;
    for (uint32_t group = signs->first / 8u; group < end; group++) {
        uint32_t r = 0;
        for (; r + 4 <= signs->rows; r += 4)
            sign_block(signs, group, r, 4);
        for (; r + 2 <= signs->rows; r += 2)
            sign_block(signs, group, r, 2);
        if (r < signs->rows) sign_block(signs, group, r, 1);
    }
}

INLINE void to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    uint32_t i = 0;
    for (; i + 8 <= count; i += 8)
        store_floats(dst + i, load8(src, i, dtype));
    if (i == count) return;
    float last[8];
    store_floats(last, load_last(src, i, count - i, dtype));
    memcpy(dst + i, last, (count - i) * sizeof *dst);
}

static void neon_to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    if (dtype == BD_DTYPE_F32) {
        memcpy(dst, src, (size_t)count * sizeof *dst);
    } else if (dtype == BD_DTYPE_BF16) {
        to_f32(dst, src, BD_DTYPE_BF16, count);
    } else {
        to_f32(dst, src, BD_DTYPE_F16, count);
    }
}

static void neon_add_signs(float *dst, const float *src, const uint8_t *bits, uint32_t count,
                           float scale) {
    const float32x4_t wide = vdupq_n_f32(scale);
    for (uint32_t k = 0; k < count; k += 4) {
        uint32_t word;
        memcpy(&word, bits + k / 32u * BD_CPU_PLANE_STEP, sizeof word);
        const float32x4_t step = flip(wide, sign_bits(word, (int32_t)(k % 32)));
        if (k + 4 <= count) {
            vst1q_f32(dst + k, vaddq_f32(vld1q_f32(src + k), step));
            continue;
        }
        float last[4] = {0};
        memcpy(last, src + k, (count - k) * sizeof *last);
        vst1q_f32(last, vaddq_f32(vld1q_f32(last), step));
        memcpy(dst + k, last, (count - k) * sizeof *last);
    }
}

INLINE void weighted_block(float *acc, const float *p, const float *v, uint32_t tokens,
                           uint32_t dim, const uint32_t Q) {
    for (uint32_t d = 0; d < dim; d += 8) {
        eight sums[4];
        UNROLL for (uint32_t q = 0; q < Q; q++) sums[q] =
            load_floats(acc + q * BD_CPU_HEAD_DIM_MAX + d);
        for (uint32_t t = 0; t < tokens; t++) {
            const eight value = load_floats(v + (size_t)t * dim + d);
            UNROLL for (uint32_t q = 0; q < Q; q++) {
                const float32x4_t weight = vdupq_n_f32(p[q * BD_CPU_KV_TILE + t]);
                sums[q] = fma8(sums[q], (eight){{weight, weight}}, value);
            }
        }
        UNROLL for (uint32_t q = 0; q < Q; q++)
            store_floats(acc + q * BD_CPU_HEAD_DIM_MAX + d, sums[q]);
    }
}

static void neon_weighted_sum(float *acc, const float *p, uint32_t queries, const float *v,
                              uint32_t tokens, uint32_t dim) {
    uint32_t q = 0;
    for (; q + 4 <= queries; q += 4) {
        weighted_block(acc + q * BD_CPU_HEAD_DIM_MAX, p + q * BD_CPU_KV_TILE, v, tokens, dim, 4);
    }
    for (; q < queries; q++) {
        weighted_block(acc + q * BD_CPU_HEAD_DIM_MAX, p + q * BD_CPU_KV_TILE, v, tokens, dim, 1);
    }
}

static const bd_cpu_kernels neon_kernels = {
    .name = "neon",
    .short_rows = 16, /* not measured */
    .dot = {[BD_DTYPE_F32] = neon_dot_f32,
            [BD_DTYPE_BF16] = neon_dot_bf16,
            [BD_DTYPE_F16] = neon_dot_f16},
    .sum_table = neon_sum_table,
    .sign_dot = neon_sign_dot,
    .to_f32 = neon_to_f32,
    .add_signs = neon_add_signs,
    .weighted_sum = neon_weighted_sum,
};

const bd_cpu_kernels *bd_cpu_kernels_neon(void) {
    return &neon_kernels;
}

#else

const bd_cpu_kernels *bd_cpu_kernels_neon(void) {
    return NULL;
}

#endif
