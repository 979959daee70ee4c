/* cpu_kernels_avx2.c - the inner loops with AVX2, FMA and F16C, compiled for any x86-64 and used
 * where the machine has them. Every (output, row) pair has one eight-lane accumulator that runs
 * over k in order, whatever the blocking, so a row's product does not depend on how many rows share
 * the pass. Threads: any. */
#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define AVX2   __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 __attribute__((always_inline)) static inline
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLL   _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define ROLL   _Pragma("GCC unroll 1")
#endif

INLINE float lane_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/* Eight bf16 become float32 in one shuffle: each half of the register gets all sixteen bytes and
 * moves its own four numbers to the tops of its lanes. */
INLINE __m256 load8(const uint8_t *w, uint32_t k, bd_dtype dtype) {
    if (dtype == BD_DTYPE_F32)
        return _mm256_loadu_ps((const float *)(const void *)(w + 4 * (size_t)k));
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(w + 2 * (size_t)k));
    if (dtype == BD_DTYPE_F16) return _mm256_cvtph_ps(half);
    const __m256i tops =
        _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1,
                         -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half), tops));
}

/* A row's last count < 8 weights, then zeros. */
AVX2 static __m256 load_last(const uint8_t *w, uint32_t k, uint32_t count, bd_dtype dtype) {
    uint8_t part[32] = {0};
    const size_t size = bd_dtype_bytes(dtype);
    memcpy(part, w + k * size, count * size);
    return load8(part, 0, dtype);
}

INLINE __m256i first_lanes(uint32_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Asks for the cache line that holds 16-bit element k, a multiple of 32, of the row at w; past the
 * matrix's end the request comes to nothing. */
INLINE void prefetch(const uint8_t *w, uint64_t ahead_bytes, uint32_t k) {
    const uintptr_t at = (uintptr_t)w + ahead_bytes + 2 * (size_t)k;
    _mm_prefetch((const char *)at, _MM_HINT_T0);
}

#define ALONE_AHEAD_BYTES 256u /* of a row alone, which waits for memory whatever it does */

/* Of `count` outputs NW go together, and every one of the NW goes on with the next row of its own
 * part: NW long streams, which the hardware's prefetchers follow, where NW neighbouring rows would
 * be NW short ones, over before they are found (18 instead of 23 GB/s at 2048 columns, 12 instead
 * of 21 at 1536). A float32 tile is in the cache, where parts lie in each other's way. */
INLINE uint32_t part_rows(uint32_t count, bd_dtype dtype, const uint32_t NW) {
    return dtype == BD_DTYPE_F32 ? 1 : count / NW;
}
/* The first output of the j-th NW of them. */
INLINE uint32_t part_at(uint32_t i, uint32_t j, bd_dtype dtype, const uint32_t NW) {
    return i + (dtype == BD_DTYPE_F32 ? j * NW : j);
}

typedef struct dot_at {   /* what a block computes */
    uint32_t i, step, r;  /* outputs i, i + step, ... of rows r, r + 1, ... */
    uint64_t ahead_bytes; /* 0, or how far ahead of these weights to prefetch */
} dot_at;

/* NW outputs times R rows; both are constants after inlining, and the accumulators fit the 16
 * registers. */
INLINE void dot_block(const bd_cpu_dot *dot, bd_dtype dtype, dot_at at, const uint32_t NW,
                      const uint32_t R) {
    __m256 acc[8][4];
    const uint8_t *w[8];
    const float *x[4];
    UNROLL for (uint32_t a = 0; a < NW; a++) {
        w[a] = dot->w + (at.i + a * at.step) * dot->stride_bytes;
        UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] = _mm256_setzero_ps();
    }
    UNROLL for (uint32_t b = 0; b < R; b++) x[b] = dot->x[at.r + b];
    const uint32_t count = dot->k / 8 * 8;
    for (uint32_t k = 0; k < count; k += 8) {
        if (dtype != BD_DTYPE_F32 && at.ahead_bytes > 0 && k % 32 == 0) {
            UNROLL for (uint32_t a = 0; a < NW; a++) prefetch(w[a], at.ahead_bytes, k);
        }
        if (NW <= R) {
            __m256 wide[8];
            UNROLL for (uint32_t a = 0; a < NW; a++) wide[a] = load8(w[a], k, dtype);
            UNROLL for (uint32_t b = 0; b < R; b++) {
                const __m256 xs = _mm256_loadu_ps(x[b] + k);
                UNROLL for (uint32_t a = 0; a < NW; a++) acc[a][b] =
                    _mm256_fmadd_ps(xs, wide[a], acc[a][b]);
            }
        } else {
            __m256 xs[4];
            UNROLL for (uint32_t b = 0; b < R; b++) xs[b] = _mm256_loadu_ps(x[b] + k);
            UNROLL for (uint32_t a = 0; a < NW; a++) {
                const __m256 wide = load8(w[a], k, dtype);
                UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] =
                    _mm256_fmadd_ps(xs[b], wide, acc[a][b]);
            }
        }
    }
    if (count < dot->k) {
        const __m256i lanes = first_lanes(dot->k - count);
        UNROLL for (uint32_t a = 0; a < NW; a++) {
            const __m256 wide = load_last(w[a], count, dot->k - count, dtype);
            UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] =
                _mm256_fmadd_ps(_mm256_maskload_ps(x[b] + count, lanes), wide, acc[a][b]);
        }
    }
    UNROLL for (uint32_t b = 0; b < R; b++) {
        float *y = dot->y[at.r + b] + at.i;
        UNROLL for (uint32_t a = 0; a < NW; a++) y[a * at.step] =
            (dot->add ? y[a * at.step] : 0.0f) + lane_sum(acc[a][b]);
    }
}

/* Weights pass through the cache once: all rows visit a few outputs before the next few are read,
 * which the first rows ask for. */
INLINE void dot_rows(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, uint32_t step,
                     const uint32_t NW) {
    const uint32_t half = NW == 6 ? 3 : NW;
    const uint64_t next_bytes = (dtype == BD_DTYPE_F32 ? NW : 1) * dot->stride_bytes;
    dot_at at = {i, step, 0, next_bytes};
    while (at.r + 3 <= dot->rows) {
        const bool four = at.r + 4 <= dot->rows && (dot->rows - at.r) % 3 != 0;
        for (uint32_t a = 0; a < NW; a += half) {
            at.i = i + a * step;
            if (four) {
                dot_block(dot, dtype, at, half, 4);
            } else {
                dot_block(dot, dtype, at, half, 3);
            }
        }
        at.i = i;
        at.r += four ? 4 : 3;
        at.ahead_bytes = 0;
    }
    if (dot->rows - at.r == 2) dot_block(dot, dtype, at, NW, 2);
    if (dot->rows - at.r == 1) {
        if (at.r == 0) at.ahead_bytes = ALONE_AHEAD_BYTES;
        dot_block(dot, dtype, at, NW, 1);
    }
}

/* As many outputs from i on as go in blocks of NW; returns the first that is left. */
INLINE uint32_t dot_outputs(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, const uint32_t NW) {
    const uint32_t blocks = (dot->n - i) / NW, step = part_rows(dot->n - i, dtype, NW);
    for (uint32_t j = 0; j < blocks; j++) {
        const uint32_t first = part_at(i, j, dtype, NW);
        if (NW == 8) {
            dot_block(dot, dtype, (dot_at){first, step, 0, ALONE_AHEAD_BYTES}, 8, 1);
        } else {
            dot_rows(dot, dtype, first, step, NW);
        }
    }
    return i + blocks * NW;
}

INLINE void dot_all(const bd_cpu_dot *dot, bd_dtype dtype) {
    uint32_t i = 0;
    if (dot->rows == 1) i = dot_outputs(dot, dtype, i, 8);
    i = dot_outputs(dot, dtype, i, 6);
    i = dot_outputs(dot, dtype, i, 2);
    dot_outputs(dot, dtype, i, 1);
}

AVX2 static void avx2_dot_f32(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_F32);
}
AVX2 static void avx2_dot_bf16(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_BF16);
}
AVX2 static void avx2_dot_f16(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_F16);
}

/* Bits 8 group .. 8 group + 7 of the word, each moved to the top of its lane. */
INLINE __m256 sign_mask(uint32_t word, uint32_t group) {
    const __m256i lanes = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i shift = _mm256_sub_epi32(lanes, _mm256_set1_epi32((int)(8 * group)));
    const __m256i bits = _mm256_sllv_epi32(_mm256_set1_epi32((int)word), shift);
    return _mm256_and_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(-0.0f));
}

/* Of every two elements all four sums, lane j with a minus where j has a bit. */
AVX2 static void avx2_sum_table(float *table, const float *x, uint32_t k) {
    for (uint32_t at = 0; at < bd_cpu_plane_words(k) * 32u; at += 2, table += 4) {
        const float a = at < k ? x[at] : 0.0f, b = at + 1 < k ? x[at + 1] : 0.0f;
        _mm_storeu_ps(table, _mm_add_ps(_mm_setr_ps(a, -a, a, -a), _mm_setr_ps(b, b, -b, -b)));
    }
}

/* Adds the two pairs that the lowest bits choose; next: the bits, two on. */
INLINE __m256 add_pairs(__m256 part, const float *table, __m256i bits, __m256i next) {
    const __m256 low = _mm256_broadcast_ps((const __m128 *)(const void *)table);
    const __m256 high = _mm256_broadcast_ps((const __m128 *)(const void *)(table + 4));
    return _mm256_add_ps(
        part, _mm256_add_ps(_mm256_permutevar_ps(low, bits), _mm256_permutevar_ps(high, next)));
}

INLINE __m256i load_bits(const bd_cpu_signs *signs, uint32_t group, uint32_t word) {
    return _mm256_loadu_si256(
        (const __m256i *)(const void *)(signs->plane +
                                        bd_cpu_plane_offset(signs->words, 8 * group, word)));
}

/* y of a row of the batch += scale * sums, for outputs of the group that are asked for. */
INLINE void add_scaled(const bd_cpu_signs *signs, uint32_t group, uint32_t r, __m256 total) {
    float sums[8];
    const uint32_t end = signs->first + signs->count;
    _mm256_storeu_ps(sums, total);
    for (uint32_t n = 8 * group; n < 8 * (group + 1) && n < end; n++) {
        if (n < signs->first) continue; /* a neighbour's */
        signs->y[r][n - signs->first] += signs->scale[n - signs->first] * sums[n - 8 * group];
    }
}

#define SIGN_GROUPS 8u

typedef struct sign_totals { /* of up to SIGN_GROUPS groups of eight outputs */
    __m256 of[BD_CPU_SIGN_ROWS][SIGN_GROUPS];
} sign_totals;

/* The words [w, end) of G groups of eight outputs from `group` on, for rows [r, r + R) of the
 * batch; the bits are shifted once for all rows. at: the first group's place in totals. */
INLINE void sign_block(const bd_cpu_signs *signs, sign_totals *totals, uint32_t group, uint32_t at,
                       uint32_t r, uint32_t w, uint32_t end, const uint32_t G, const uint32_t R) {
    __m256 part[4][4];
    const uint8_t *plane[4];
    const float *table[4];
    UNROLL for (uint32_t g = 0; g < G; g++) {
        plane[g] = signs->plane + bd_cpu_plane_offset(signs->words, 8 * (group + g), w);
        UNROLL for (uint32_t b = 0; b < R; b++) part[g][b] = _mm256_setzero_ps();
    }
    UNROLL for (uint32_t b = 0; b < R; b++) table[b] = signs->table[r + b] + (size_t)w * 64u;
    size_t at_table = 0;
    for (uint32_t i = 0; i < end - w; i++) {
        __m256i bits[4], next[4];
        UNROLL for (uint32_t g = 0; g < G; g++) bits[g] = _mm256_loadu_si256(
            (const __m256i *)(const void *)(plane[g] + (size_t)i * BD_CPU_PLANE_STEP));
        /* Unrolled, gcc would permute everything before it adds, and spill. */
        ROLL for (uint32_t t = 0; t < BD_CPU_PAIRS; t += 2, at_table += 8) {
            UNROLL for (uint32_t g = 0; g < G; g++) next[g] = _mm256_srli_epi32(bits[g], 2);
            UNROLL for (uint32_t b = 0; b < R; b++) {
                UNROLL for (uint32_t g = 0; g < G; g++) part[g][b] =
                    add_pairs(part[g][b], table[b] + at_table, bits[g], next[g]);
            }
            UNROLL for (uint32_t g = 0; g < G; g++) bits[g] = _mm256_srli_epi32(bits[g], 4);
        }
    }
    UNROLL for (uint32_t g = 0; g < G; g++) {
        UNROLL for (uint32_t b = 0; b < R; b++) totals->of[r + b][at + g] =
            _mm256_add_ps(totals->of[r + b][at + g], part[g][b]);
    }
}

/* All rows of the batch, words [w, end) of one or more groups. */
INLINE void sign_rows(const bd_cpu_signs *signs, sign_totals *totals, uint32_t group, uint32_t at,
                      uint32_t w, uint32_t end, const uint32_t G) {
    const uint32_t half = G > 1 ? G / 2 : 1;
    uint32_t r = 0;
    for (; r + 4 <= signs->rows; r += 4) {
        for (uint32_t g = 0; g < G; g += half)
            sign_block(signs, totals, group + g, at + g, r, w, end, half, 4);
    }
    for (; r + 2 <= signs->rows; r += 2)
        sign_block(signs, totals, group, at, r, w, end, G, 2);
    if (r < signs->rows) sign_block(signs, totals, group, at, r, w, end, G, 1);
}

/* Up to SIGN_GROUPS groups from `first` on, BD_CPU_FOLD_WORDS words at a time: their part of the
 * tables of all rows stays in the first cache. */
AVX2 static void sign_groups(const bd_cpu_signs *signs, uint32_t first, uint32_t groups) {
    sign_totals totals;
    BD_ASSERT(signs->rows <= BD_CPU_SIGN_ROWS && groups <= SIGN_GROUPS);
    for (uint32_t r = 0; r < signs->rows; r++) {
        for (uint32_t g = 0; g < groups; g++)
            totals.of[r][g] = _mm256_setzero_ps();
    }
    for (uint32_t w = 0, end; w < signs->words; w = end) {
        uint32_t g = 0;
        end = signs->words - w < BD_CPU_FOLD_WORDS ? signs->words : w + BD_CPU_FOLD_WORDS;
        for (; g + 4 <= groups; g += 4)
            sign_rows(signs, &totals, first + g, g, w, end, 4);
        for (; g < groups; g++)
            sign_rows(signs, &totals, first + g, g, w, end, 1);
    }
    for (uint32_t r = 0; r < signs->rows; r++) {
        for (uint32_t g = 0; g < groups; g++)
            add_scaled(signs, first + g, r, totals.of[r][g]);
    }
}

AVX2 static void avx2_sign_dot(const bd_cpu_signs *signs) {
    const uint32_t end = (signs->first + signs->count + 7) / 8u;
    for (uint32_t group = signs->first / 8u; group < end; group += SIGN_GROUPS)
        sign_groups(signs, group, end - group < SIGN_GROUPS ? end - group : SIGN_GROUPS);
}

/* Eight outputs' weights and the bits of a group, not of the same outputs: `group` counts groups of
 * eight as they lie in the plane. Returns the sums of the bits. The sums run in the same order as
 * in dot_block and sign_block. */
INLINE __m256 fused_block(const bd_cpu_dot *dot, const bd_cpu_signs *signs, uint32_t i,
                          uint32_t step, uint32_t group) {
    __m256 acc[8];
    const uint8_t *w[8];
    const float *x = dot->x[0], *table = signs->table[0];
    __m256 total = _mm256_setzero_ps(), part = _mm256_setzero_ps();
    UNROLL for (uint32_t a = 0; a < 8; a++) {
        w[a] = dot->w + (i + a * step) * dot->stride_bytes;
        acc[a] = _mm256_setzero_ps();
    }
    const uint32_t whole = dot->k / 8 * 8;
    uint32_t k = 0;
    for (uint32_t word = 0; word < signs->words; word++) {
        __m256i bits = load_bits(signs, group, word);
        UNROLL for (uint32_t a = 0; a < 8; a++) prefetch(w[a], ALONE_AHEAD_BYTES, k);
        ROLL for (uint32_t t = 0; t < BD_CPU_PAIRS; t += 4, table += 16) {
            if (k < whole) {
                const __m256 xs = _mm256_loadu_ps(x + k);
                UNROLL for (uint32_t a = 0; a < 8; a++) acc[a] =
                    _mm256_fmadd_ps(xs, load8(w[a], k, BD_DTYPE_BF16), acc[a]);
                k += 8;
            }
            UNROLL for (uint32_t at = 0; at < 16; at += 8) {
                part = add_pairs(part, table + at, bits, _mm256_srli_epi32(bits, 2));
                bits = _mm256_srli_epi32(bits, 4);
            }
        }
        if (word % BD_CPU_FOLD_WORDS != BD_CPU_FOLD_WORDS - 1 && word + 1 != signs->words) continue;
        total = _mm256_add_ps(total, part);
        part = _mm256_setzero_ps();
    }
    if (k < dot->k) {
        const __m256 xs = _mm256_maskload_ps(x + k, first_lanes(dot->k - k));
        UNROLL for (uint32_t a = 0; a < 8; a++) acc[a] =
            _mm256_fmadd_ps(xs, load_last(w[a], k, dot->k - k, BD_DTYPE_BF16), acc[a]);
    }
    UNROLL for (uint32_t a = 0; a < 8; a++) dot->y[0][i + a * step] = lane_sum(acc[a]);
    return total;
}

#define FUSED_GROUPS 12u

/* `groups` whole groups of the plane, whose first output is dot's i-th. */
AVX2 static void fused_groups(const bd_cpu_dot *dot, const bd_cpu_signs *signs, uint32_t i,
                              uint32_t groups) {
    __m256 totals[FUSED_GROUPS];
    const uint32_t first = (signs->first + i) / 8u;
    BD_ASSERT(groups <= FUSED_GROUPS);
    for (uint32_t g = 0; g < groups; g++)
        totals[g] = fused_block(dot, signs, i + g, groups, first + g);
    for (uint32_t g = 0; g < groups; g++)
        add_scaled(signs, first + g, 0, totals[g]);
}

AVX2 static void avx2_dot_signs(const bd_cpu_dot *dot, const bd_cpu_signs *signs) {
    BD_ASSERT(dot->rows == 1 && signs->rows == 1 && dot->n == signs->count && !dot->add);
    for (uint32_t i = 0, next; i < dot->n; i = next) {
        const uint32_t at = signs->first + i, left = (dot->n - i) / 8u;
        if (at % 8 == 0 && left > 0) {
            const uint32_t groups = left < FUSED_GROUPS ? left : FUSED_GROUPS;
            fused_groups(dot, signs, i, groups);
            next = i + 8 * groups;
            continue;
        }
        /* The outputs around whole groups: a plane may begin or end within one. */
        next = at / 8u * 8u + 8u - signs->first;
        if (next > dot->n) next = dot->n;
        bd_cpu_dot few = *dot;
        bd_cpu_signs few_signs = *signs;
        float *y = NULL;
        bd_cpu_take(&few, &few_signs, i, next - i, &y);
        avx2_dot_bf16(&few);
        avx2_sign_dot(&few_signs);
    }
}

INLINE void to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    uint32_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(dst + i, load8(src, i, dtype));
    if (i < count)
        _mm256_maskstore_ps(dst + i, first_lanes(count - i), load_last(src, i, count - i, dtype));
}

AVX2 static void avx2_to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    if (dtype == BD_DTYPE_F32) {
        memcpy(dst, src, (size_t)count * sizeof *dst);
    } else if (dtype == BD_DTYPE_BF16) {
        to_f32(dst, src, BD_DTYPE_BF16, count);
    } else {
        to_f32(dst, src, BD_DTYPE_F16, count);
    }
}

AVX2 static void avx2_add_signs(float *dst, const float *src, const uint8_t *bits, uint32_t count,
                                float scale) {
    const __m256 wide = _mm256_set1_ps(scale);
    for (uint32_t k = 0; k < count; k += 32) {
        uint32_t word;
        memcpy(&word, bits + k / 32u * BD_CPU_PLANE_STEP, sizeof word);
        const uint32_t left = count - k < 32 ? count - k : 32;
        for (uint32_t g = 0; 8 * g < left; g++) {
            const uint32_t at = k + 8 * g;
            const __m256 step = _mm256_xor_ps(wide, sign_mask(word, g));
            if (8 * g + 8 <= left) {
                _mm256_storeu_ps(dst + at, _mm256_add_ps(_mm256_loadu_ps(src + at), step));
            } else {
                const __m256i lanes = first_lanes(left - 8 * g);
                const __m256 from = _mm256_maskload_ps(src + at, lanes);
                _mm256_maskstore_ps(dst + at, lanes, _mm256_add_ps(from, step));
            }
        }
    }
}

INLINE void weighted_block(float *acc, const float *p, const float *v, uint32_t tokens,
                           uint32_t dim, const uint32_t Q) {
    for (uint32_t d = 0; d < dim; d += 8) {
        __m256 sums[4];
        UNROLL for (uint32_t q = 0; q < Q; q++) sums[q] =
            _mm256_loadu_ps(acc + q * BD_CPU_HEAD_DIM_MAX + d);
        for (uint32_t t = 0; t < tokens; t++) {
            const __m256 value = _mm256_loadu_ps(v + (size_t)t * dim + d);
            UNROLL for (uint32_t q = 0; q < Q; q++) {
                sums[q] = _mm256_fmadd_ps(_mm256_broadcast_ss(p + q * BD_CPU_KV_TILE + t), value,
                                          sums[q]);
            }
        }
        UNROLL for (uint32_t q = 0; q < Q; q++)
            _mm256_storeu_ps(acc + q * BD_CPU_HEAD_DIM_MAX + d, sums[q]);
    }
}

AVX2 static void avx2_weighted_sum(float *acc, const float *p, uint32_t queries, const float *v,
                                   uint32_t tokens, uint32_t dim) {
    uint32_t q = 0;
    for (; q + 4 <= queries; q += 4) {
        weighted_block(acc + q * BD_CPU_HEAD_DIM_MAX, p + q * BD_CPU_KV_TILE, v, tokens, dim, 4);
    }
    for (; q < queries; q++) {
        weighted_block(acc + q * BD_CPU_HEAD_DIM_MAX, p + q * BD_CPU_KV_TILE, v, tokens, dim, 1);
    }
}

static const bd_cpu_kernels avx2_kernels = {
    .name = "avx2",
    .short_rows = 24,
    .dot = {[BD_DTYPE_F32] = avx2_dot_f32,
            [BD_DTYPE_BF16] = avx2_dot_bf16,
            [BD_DTYPE_F16] = avx2_dot_f16},
    .sum_table = avx2_sum_table,
    .sign_dot = avx2_sign_dot,
    .dot_signs = avx2_dot_signs,
    .to_f32 = avx2_to_f32,
    .add_signs = avx2_add_signs,
    .weighted_sum = avx2_weighted_sum,
};

/* Every CPU with AVX2 has F16C. */
const bd_cpu_kernels *bd_cpu_kernels_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2_kernels : NULL;
}

#else

const bd_cpu_kernels *bd_cpu_kernels_avx2(void) {
    return NULL;
}

#endif
