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
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE float lane_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

INLINE __m256 load8(const uint8_t *w, uint32_t k, bd_dtype dtype) {
    if (dtype == BD_DTYPE_F32)
        return _mm256_loadu_ps((const float *)(const void *)(w + 4 * (size_t)k));
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(w + 2 * (size_t)k));
    if (dtype == BD_DTYPE_F16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* NW outputs times R rows; both are constants after inlining, and the accumulators fit the 16
 * registers. */
INLINE void dot_block(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, uint32_t r,
                      const uint32_t NW, const uint32_t R) {
    __m256 acc[6][4];
    const uint8_t *w[6];
    const float *x[4];
    UNROLL for (uint32_t a = 0; a < NW; a++) {
        w[a] = dot->w + (i + a) * dot->stride_bytes;
        UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] = _mm256_setzero_ps();
    }
    UNROLL for (uint32_t b = 0; b < R; b++) x[b] = dot->x[r + b];
    const uint32_t count = dot->k;
    for (uint32_t k = 0; k < count; k += 8) {
        if (NW <= R) {
            __m256 wide[6];
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
    UNROLL for (uint32_t b = 0; b < R; b++) {
        float *y = dot->y[r + b] + i;
        UNROLL for (uint32_t a = 0; a < NW; a++) y[a] =
            (dot->add ? y[a] : 0.0f) + lane_sum(acc[a][b]);
    }
}

/* Weights pass through the cache once: all rows visit a few outputs before the next few are read.
 */
INLINE void dot_rows(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, const uint32_t NW) {
    const uint32_t half = NW == 6 ? 3 : NW;
    uint32_t r = 0;
    for (; r + 3 <= dot->rows;) {
        const bool four = r + 4 <= dot->rows && (dot->rows - r) % 3 != 0;
        for (uint32_t a = i; a < i + NW; a += half) {
            if (four) {
                dot_block(dot, dtype, a, r, half, 4);
            } else {
                dot_block(dot, dtype, a, r, half, 3);
            }
        }
        r += four ? 4 : 3;
    }
    if (dot->rows - r == 2) dot_block(dot, dtype, i, r, NW, 2);
    if (dot->rows - r == 1) dot_block(dot, dtype, i, r, NW, 1);
}

INLINE void dot_all(const bd_cpu_dot *dot, bd_dtype dtype) {
    uint32_t i = 0;
    for (; i + 6 <= dot->n; i += 6)
        dot_rows(dot, dtype, i, 6);
    for (; i + 2 <= dot->n; i += 2)
        dot_rows(dot, dtype, i, 2);
    if (i < dot->n) dot_rows(dot, dtype, i, 1);
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

AVX2 static void avx2_sum_table(float *table, const float *x, uint32_t k) {
    const __m256 sign[3] = {sign_mask(0xaa, 0), sign_mask(0xcc, 0),
                            sign_mask(0xf0, 0)}; /* bit b of the lane's number */
    for (uint32_t w = 0; w < bd_cpu_plane_words(k); w++) {
        float part[33] = {0};
        memcpy(part, x + 32u * w, (k - 32u * w < 32u ? k - 32u * w : 32u) * sizeof *part);
        for (uint32_t t = 0; t < BD_CPU_TRIPLES; t++, table += 8) {
            const __m256 a = _mm256_xor_ps(_mm256_set1_ps(part[3 * t]), sign[0]);
            const __m256 b = _mm256_xor_ps(_mm256_set1_ps(part[3 * t + 1]), sign[1]);
            const __m256 c = _mm256_xor_ps(_mm256_set1_ps(part[3 * t + 2]), sign[2]);
            _mm256_storeu_ps(table, _mm256_add_ps(_mm256_add_ps(a, b), c));
        }
    }
}

/* G groups of eight rows from group `first` on: signed sums to out[8 G]. */
INLINE void signed_sums(const bd_cpu_signs *signs, uint32_t first, float *out, const uint32_t G) {
    __m256 sums[4], part[4];
    const uint8_t *bits[4];
    UNROLL for (uint32_t g = 0; g < G; g++) {
        bits[g] = signs->plane + bd_cpu_plane_offset(signs->words, 8 * (first + g), 0);
        sums[g] = part[g] = _mm256_setzero_ps();
    }
    const float *table = signs->table;
    for (uint32_t w = 0; w < signs->words;) {
        const uint32_t end =
            signs->words - w < BD_CPU_FOLD_WORDS ? signs->words : w + BD_CPU_FOLD_WORDS;
        for (; w < end; w++) {
            __m256i index[4];
            UNROLL for (uint32_t g = 0; g < G; g++) {
                index[g] = _mm256_loadu_si256(
                    (const __m256i *)(const void *)(bits[g] + (size_t)w * BD_CPU_PLANE_STEP));
            }
            UNROLL for (uint32_t t = 0; t < BD_CPU_TRIPLES; t++, table += 8) {
                const __m256 eight = _mm256_loadu_ps(table);
                UNROLL for (uint32_t g = 0; g < G; g++) {
                    part[g] = _mm256_add_ps(part[g], _mm256_permutevar8x32_ps(eight, index[g]));
                    index[g] = _mm256_srli_epi32(index[g], 3);
                }
            }
        }
        UNROLL for (uint32_t g = 0; g < G; g++) {
            sums[g] = _mm256_add_ps(sums[g], part[g]);
            part[g] = _mm256_setzero_ps();
        }
    }
    UNROLL for (uint32_t g = 0; g < G; g++) _mm256_storeu_ps(out + 8 * g, sums[g]);
}

AVX2 static void avx2_sign_dot(const bd_cpu_signs *signs) {
    const uint32_t end = signs->first + signs->count;
    for (uint32_t group = signs->first / 8u; 8 * group < end;) {
        float sums[32];
        const uint32_t groups = (end - 8 * group + 7) / 8u >= 4 ? 4 : 1;
        if (groups == 4) {
            signed_sums(signs, group, sums, 4);
        } else {
            signed_sums(signs, group, sums, 1);
        }
        for (uint32_t n = 8 * group; n < 8 * (group + groups) && n < end; n++) {
            if (n < signs->first) continue; /* a neighbour's */
            signs->y[n - signs->first] += signs->scale[n - signs->first] * sums[n - 8 * group];
        }
        group += groups;
    }
}

AVX2 static void avx2_to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    if (dtype == BD_DTYPE_F32) {
        memcpy(dst, src, (size_t)count * sizeof *dst);
    } else if (dtype == BD_DTYPE_BF16) {
        for (uint32_t i = 0; i < count; i += 8)
            _mm256_storeu_ps(dst + i, load8(src, i, BD_DTYPE_BF16));
    } else {
        for (uint32_t i = 0; i < count; i += 8)
            _mm256_storeu_ps(dst + i, load8(src, i, BD_DTYPE_F16));
    }
}

AVX2 static void avx2_add_signs(float *dst, const float *src, const uint8_t *bits, uint32_t count,
                                float scale) {
    const __m256 wide = _mm256_set1_ps(scale);
    for (uint32_t k = 0; k < count; k += 32) {
        uint32_t word;
        memcpy(&word, bits + k / 32u * BD_CPU_PLANE_STEP, sizeof word);
        const uint32_t groups = count - k >= 32 ? 4 : (count - k) / 8u;
        for (uint32_t g = 0; g < groups; g++) {
            const uint32_t at = k + 8 * g;
            const __m256 step = _mm256_xor_ps(wide, sign_mask(word, g));
            _mm256_storeu_ps(dst + at, _mm256_add_ps(_mm256_loadu_ps(src + at), step));
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
    .dot = {[BD_DTYPE_F32] = avx2_dot_f32,
            [BD_DTYPE_BF16] = avx2_dot_bf16,
            [BD_DTYPE_F16] = avx2_dot_f16},
    .sum_table = avx2_sum_table,
    .sign_dot = avx2_sign_dot,
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
