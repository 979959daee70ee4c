/* cpu_kernels_avx512.c - the inner loops with AVX-512 (F, BW, DQ, VL), compiled for any x86-64 and
 * used where the machine and its operating system have them. Arithmetic is float32 throughout:
 * bf16 weights are widened, not fed to the bf16 dot products, which round and flush. Every (output,
 * row) pair has one sixteen-lane accumulator that runs over k in order, whatever the blocking, so a
 * row's product does not depend on how many rows share the pass. Threads: any. */
#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define INLINE AVX512 __attribute__((always_inline)) static inline
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLL   _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define ROLL   _Pragma("GCC unroll 1")
#endif

/* The lowest `count` of sixteen lanes; count may be more. */
INLINE __mmask16 first_lanes(uint32_t count) {
    return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1u);
}

/* Sixteen bf16 become float32 in one permute of 16-bit lanes: each moves to the top of its own. */
INLINE __m512 widen_bf16(__m256i half) {
    const __m512i lanes = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7,
                                           0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16((__mmask32)0xaaaaaaaau, lanes,
                                                              _mm512_castsi256_si512(half)));
}

INLINE __m512 load16(const uint8_t *w, uint32_t k, bd_dtype dtype) {
    if (dtype == BD_DTYPE_F32) return _mm512_loadu_ps(w + 4 * (size_t)k);
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(w + 2 * (size_t)k));
    return dtype == BD_DTYPE_F16 ? _mm512_cvtph_ps(half) : widen_bf16(half);
}

/* The weights of these lanes, zeros in the others, whose memory is not touched. */
INLINE __m512 load_last(const uint8_t *w, uint32_t k, __mmask16 lanes, bd_dtype dtype) {
    if (dtype == BD_DTYPE_F32) return _mm512_maskz_loadu_ps(lanes, w + 4 * (size_t)k);
    const __m256i half = _mm256_maskz_loadu_epi16(lanes, w + 2 * (size_t)k);
    return dtype == BD_DTYPE_F16 ? _mm512_cvtph_ps(half) : widen_bf16(half);
}

/* Asks for the cache line that holds element k, a multiple of 32, of the row at w; past the
 * matrix's end the request comes to nothing. */
INLINE void prefetch(const uint8_t *w, uint64_t ahead_bytes, uint32_t k) {
    const uintptr_t at = (uintptr_t)w + ahead_bytes + 2 * (size_t)k;
    _mm_prefetch((const char *)at, _MM_HINT_T0);
}

/* NW outputs times R rows; both are constants after inlining, and the accumulators fit the 32
 * registers. ahead_bytes: 0, or how far ahead of these weights to prefetch. */
INLINE void dot_block(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, uint32_t r,
                      uint64_t ahead_bytes, const uint32_t NW, const uint32_t R) {
    __m512 acc[16][4];
    const uint8_t *w[16];
    const float *x[4];
    UNROLL for (uint32_t a = 0; a < NW; a++) {
        w[a] = dot->w + (i + a) * dot->stride_bytes;
        UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] = _mm512_setzero_ps();
    }
    UNROLL for (uint32_t b = 0; b < R; b++) x[b] = dot->x[r + b];
    const uint32_t whole = dot->k / 16 * 16;
    for (uint32_t k = 0; k < whole; k += 16) {
        if (dtype != BD_DTYPE_F32 && ahead_bytes > 0 && k % 32 == 0) {
            UNROLL for (uint32_t a = 0; a < NW; a++) prefetch(w[a], ahead_bytes, k);
        }
        __m512 xs[4];
        UNROLL for (uint32_t b = 0; b < R; b++) xs[b] = _mm512_loadu_ps(x[b] + k);
        UNROLL for (uint32_t a = 0; a < NW; a++) {
            const __m512 wide = load16(w[a], k, dtype);
            UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] =
                _mm512_fmadd_ps(xs[b], wide, acc[a][b]);
        }
    }
    if (whole < dot->k) {
        const __mmask16 lanes = first_lanes(dot->k - whole);
        UNROLL for (uint32_t a = 0; a < NW; a++) {
            const __m512 wide = load_last(w[a], whole, lanes, dtype);
            UNROLL for (uint32_t b = 0; b < R; b++) acc[a][b] =
                _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, x[b] + whole), wide, acc[a][b]);
        }
    }
    UNROLL for (uint32_t b = 0; b < R; b++) {
        float *y = dot->y[r + b] + i;
        UNROLL for (uint32_t a = 0; a < NW; a++) y[a] =
            (dot->add ? y[a] : 0.0f) + _mm512_reduce_add_ps(acc[a][b]);
    }
}

/* Weights pass through the cache once: all rows visit a few outputs before the next few are read,
 * which the first rows ask for. A row alone waits for memory anyway, and asking only costs it. */
INLINE void dot_rows(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, const uint32_t NW) {
    uint32_t r = 0;
    for (; r + 4 <= dot->rows; r += 4)
        dot_block(dot, dtype, i, r, r == 0 ? NW * dot->stride_bytes : 0, NW, 4);
    const uint64_t ahead_bytes = r == 0 && dot->rows > 1 ? NW * dot->stride_bytes : 0;
    if (dot->rows - r == 3) dot_block(dot, dtype, i, r, ahead_bytes, NW, 3);
    if (dot->rows - r == 2) dot_block(dot, dtype, i, r, ahead_bytes, NW, 2);
    if (dot->rows - r == 1) dot_block(dot, dtype, i, r, ahead_bytes, NW, 1);
}

INLINE void dot_all(const bd_cpu_dot *dot, bd_dtype dtype) {
    uint32_t i = 0;
    for (; i + 6 <= dot->n; i += 6)
        dot_rows(dot, dtype, i, 6);
    for (; i + 2 <= dot->n; i += 2)
        dot_rows(dot, dtype, i, 2);
    if (i < dot->n) dot_rows(dot, dtype, i, 1);
}

AVX512 static void avx512_dot_f32(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_F32);
}
AVX512 static void avx512_dot_bf16(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_BF16);
}
AVX512 static void avx512_dot_f16(const bd_cpu_dot *dot) {
    dot_all(dot, BD_DTYPE_F16);
}

INLINE __m512 flipped(float x, __mmask16 minus) {
    return _mm512_mask_xor_ps(_mm512_set1_ps(x), minus, _mm512_set1_ps(x), _mm512_set1_ps(-0.0f));
}

/* Of every four elements all sixteen sums, lane j with a minus where j has a bit. */
AVX512 static void avx512_sum_table(float *table, const float *x, uint32_t k) {
    for (uint32_t at = 0; at < bd_cpu_plane_words(k) * 32u; at += 4, table += 16) {
        float four[4] = {0};
        if (at < k) memcpy(four, x + at, (k - at < 4 ? k - at : 4) * sizeof *four);
        const __m512 low = _mm512_add_ps(flipped(four[0], 0xaaaa), flipped(four[1], 0xcccc));
        const __m512 high = _mm512_add_ps(flipped(four[2], 0xf0f0), flipped(four[3], 0xff00));
        _mm512_storeu_ps(table, _mm512_add_ps(low, high));
    }
}

typedef struct signed_sum { /* of sixteen outputs and a row of the batch */
    __m512 total, part;     /* part: of the words since the last fold */
} signed_sum;

/* Adds the four elements that the lowest bits choose. */
INLINE void add_quad(signed_sum *sum, __m512 sixteen, __m512i bits) {
    sum->part = _mm512_add_ps(sum->part, _mm512_permutexvar_ps(bits, sixteen));
}

INLINE void fold(signed_sum *sum) {
    sum->total = _mm512_add_ps(sum->total, sum->part);
    sum->part = _mm512_setzero_ps();
}

/* A word of sixteen outputs: those of a group and, where `two`, of the next. */
INLINE __m512i load_bits(const bd_cpu_signs *signs, uint32_t group, uint32_t word, bool two) {
    const uint8_t *at = signs->plane + bd_cpu_plane_offset(signs->words, 8 * group, word);
    const __m512i low =
        _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)at));
    if (!two) return low;
    const __m256i *next = (const void *)(at + (size_t)signs->words * BD_CPU_PLANE_STEP);
    return _mm512_inserti64x4(low, _mm256_loadu_si256(next), 1);
}

/* y of a row of the batch += scale * sums, for those of sixteen outputs from a group's first on
 * that are asked for. */
INLINE void add_scaled(const bd_cpu_signs *signs, uint32_t group, uint32_t r, __m512 total) {
    float sums[16];
    const uint32_t end = signs->first + signs->count;
    _mm512_storeu_ps(sums, total);
    for (uint32_t n = 8 * group; n < 8 * group + 16 && n < end; n++) {
        if (n < signs->first) continue; /* a neighbour's */
        signs->y[r][n - signs->first] += signs->scale[n - signs->first] * sums[n - 8 * group];
    }
}

/* G times sixteen outputs from `group` on, rows [r, r + R) of the batch: the bits are shifted once
 * for all rows. two: the last sixteen reach into a second group. */
INLINE void sign_block(const bd_cpu_signs *signs, uint32_t group, uint32_t r, bool two,
                       const uint32_t G, const uint32_t R) {
    signed_sum sums[4][4];
    UNROLL for (uint32_t g = 0; g < G; g++) {
        UNROLL for (uint32_t b = 0; b < R; b++) sums[g][b] =
            (signed_sum){_mm512_setzero_ps(), _mm512_setzero_ps()};
    }
    size_t at = 0;
    for (uint32_t w = 0; w < signs->words;) {
        const uint32_t end =
            signs->words - w < BD_CPU_FOLD_WORDS ? signs->words : w + BD_CPU_FOLD_WORDS;
        for (; w < end; w++) {
            __m512i bits[4];
            UNROLL for (uint32_t g = 0; g < G; g++) bits[g] =
                load_bits(signs, group + 2 * g, w, G > 1 || two);
            /* Unrolled, gcc would permute everything before it adds, and spill. */
            ROLL for (uint32_t t = 0; t < BD_CPU_QUADS; t++, at += 16) {
                UNROLL for (uint32_t b = 0; b < R; b++) {
                    const __m512 sixteen = _mm512_loadu_ps(signs->table[r + b] + at);
                    UNROLL for (uint32_t g = 0; g < G; g++) add_quad(&sums[g][b], sixteen, bits[g]);
                }
                UNROLL for (uint32_t g = 0; g < G; g++) bits[g] = _mm512_srli_epi32(bits[g], 4);
            }
        }
        UNROLL for (uint32_t g = 0; g < G; g++) {
            UNROLL for (uint32_t b = 0; b < R; b++) fold(&sums[g][b]);
        }
    }
    UNROLL for (uint32_t g = 0; g < G; g++) {
        UNROLL for (uint32_t b = 0; b < R; b++)
            add_scaled(signs, group + 2 * g, r + b, sums[g][b].total);
    }
}

INLINE void sign_rows(const bd_cpu_signs *signs, uint32_t r, const uint32_t G, const uint32_t R) {
    const uint32_t end = (signs->first + signs->count + 7) / 8u;
    uint32_t group = signs->first / 8u;
    for (; group + 2 * G <= end; group += 2 * G)
        sign_block(signs, group, r, true, G, R);
    for (; group < end; group += 2)
        sign_block(signs, group, r, group + 1 < end, 1, R);
}

AVX512 static void avx512_sign_dot(const bd_cpu_signs *signs) {
    uint32_t r = 0;
    for (; r + 4 <= signs->rows; r += 4)
        sign_rows(signs, r, 2, 4);
    for (; r + 2 <= signs->rows; r += 2)
        sign_rows(signs, r, 2, 2);
    if (r < signs->rows) sign_rows(signs, r, 4, 1);
}

/* Weights and bits of sixteen outputs that begin with a group; i: of the first in dot. The sums run
 * in the same order as in dot_block and sign_block. */
INLINE void fused_block(const bd_cpu_dot *dot, const bd_cpu_signs *signs, uint32_t i) {
    __m512 acc[16];
    const uint8_t *w[16];
    const float *x = dot->x[0], *table = signs->table[0];
    const uint32_t group = (signs->first + i) / 8u;
    signed_sum sum = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    UNROLL for (uint32_t a = 0; a < 16; a++) {
        w[a] = dot->w + (i + a) * dot->stride_bytes;
        acc[a] = _mm512_setzero_ps();
    }
    uint32_t k = 0;
    for (uint32_t word = 0; word < signs->words; word++) {
        const uint32_t end = dot->k - k < 32 ? dot->k / 16 * 16 : k + 32;
        for (; k < end; k += 16) {
            const __m512 xs = _mm512_loadu_ps(x + k);
            UNROLL for (uint32_t a = 0; a < 16; a++) acc[a] =
                _mm512_fmadd_ps(xs, load16(w[a], k, BD_DTYPE_BF16), acc[a]);
        }
        __m512i bits = load_bits(signs, group, word, true);
        UNROLL for (uint32_t t = 0; t < BD_CPU_QUADS; t++, table += 16) {
            add_quad(&sum, _mm512_loadu_ps(table), bits);
            bits = _mm512_srli_epi32(bits, 4);
        }
        if (word % BD_CPU_FOLD_WORDS == BD_CPU_FOLD_WORDS - 1) fold(&sum);
    }
    fold(&sum);
    if (k < dot->k) {
        const __mmask16 lanes = first_lanes(dot->k - k);
        const __m512 xs = _mm512_maskz_loadu_ps(lanes, x + k);
        UNROLL for (uint32_t a = 0; a < 16; a++) acc[a] =
            _mm512_fmadd_ps(xs, load_last(w[a], k, lanes, BD_DTYPE_BF16), acc[a]);
    }
    UNROLL for (uint32_t a = 0; a < 16; a++) dot->y[0][i + a] = _mm512_reduce_add_ps(acc[a]);
    add_scaled(signs, group, 0, sum.total);
}

AVX512 static void avx512_dot_signs(const bd_cpu_dot *dot, const bd_cpu_signs *signs) {
    BD_ASSERT(dot->rows == 1 && signs->rows == 1 && dot->n == signs->count && !dot->add);
    for (uint32_t i = 0, next; i < dot->n; i = next) {
        const uint32_t at = signs->first + i;
        if (at % 8 == 0 && dot->n - i >= 16) {
            fused_block(dot, signs, i);
            next = i + 16;
            continue;
        }
        next = at / 8u * 8u + 8u - signs->first;
        if (next > dot->n) next = dot->n;
        bd_cpu_dot few = *dot;
        bd_cpu_signs few_signs = *signs;
        float *y = NULL;
        bd_cpu_take(&few, &few_signs, i, next - i, &y);
        avx512_dot_bf16(&few);
        avx512_sign_dot(&few_signs);
    }
}

AVX512 static void avx512_to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    if (dtype == BD_DTYPE_F32) {
        memcpy(dst, src, (size_t)count * sizeof *dst);
        return;
    }
    for (uint32_t i = 0; i < count; i += 16) {
        const __mmask16 lanes = first_lanes(count - i);
        _mm512_mask_storeu_ps(dst + i, lanes,
                              dtype == BD_DTYPE_BF16 ? load_last(src, i, lanes, BD_DTYPE_BF16)
                                                     : load_last(src, i, lanes, BD_DTYPE_F16));
    }
}

/* The bits are the mask of the lanes that subtract. */
AVX512 static void avx512_add_signs(float *dst, const float *src, const uint8_t *bits,
                                    uint32_t count, float scale) {
    const __m512 wide = _mm512_set1_ps(scale);
    for (uint32_t k = 0; k < count; k += 16) {
        uint16_t minus;
        memcpy(&minus, bits + k / 32u * BD_CPU_PLANE_STEP + k % 32u / 8u, sizeof minus);
        const __mmask16 lanes = first_lanes(count - k);
        const __m512 from = _mm512_maskz_loadu_ps(lanes, src + k);
        const __m512 sum =
            _mm512_mask_sub_ps(_mm512_add_ps(from, wide), (__mmask16)minus, from, wide);
        _mm512_mask_storeu_ps(dst + k, lanes, sum);
    }
}

INLINE void weighted_block(float *acc, const float *p, const float *v, uint32_t tokens,
                           uint32_t dim, const uint32_t Q) {
    for (uint32_t d = 0; d < dim; d += 16) {
        const __mmask16 lanes = first_lanes(dim - d);
        __m512 sums[4];
        UNROLL for (uint32_t q = 0; q < Q; q++) sums[q] =
            _mm512_maskz_loadu_ps(lanes, acc + q * BD_CPU_HEAD_DIM_MAX + d);
        for (uint32_t t = 0; t < tokens; t++) {
            const __m512 value = _mm512_maskz_loadu_ps(lanes, v + (size_t)t * dim + d);
            UNROLL for (uint32_t q = 0; q < Q; q++) sums[q] =
                _mm512_fmadd_ps(_mm512_set1_ps(p[q * BD_CPU_KV_TILE + t]), value, sums[q]);
        }
        UNROLL for (uint32_t q = 0; q < Q; q++)
            _mm512_mask_storeu_ps(acc + q * BD_CPU_HEAD_DIM_MAX + d, lanes, sums[q]);
    }
}

AVX512 static void avx512_weighted_sum(float *acc, const float *p, uint32_t queries, const float *v,
                                       uint32_t tokens, uint32_t dim) {
    uint32_t q = 0;
    for (; q + 4 <= queries; q += 4) {
        weighted_block(acc + q * BD_CPU_HEAD_DIM_MAX, p + q * BD_CPU_KV_TILE, v, tokens, dim, 4);
    }
    for (; q < queries; q++) {
        weighted_block(acc + q * BD_CPU_HEAD_DIM_MAX, p + q * BD_CPU_KV_TILE, v, tokens, dim, 1);
    }
}

static const bd_cpu_kernels avx512_kernels = {
    .name = "avx512",
    .dot = {[BD_DTYPE_F32] = avx512_dot_f32,
            [BD_DTYPE_BF16] = avx512_dot_bf16,
            [BD_DTYPE_F16] = avx512_dot_f16},
    .sum_table = avx512_sum_table,
    .sign_dot = avx512_sign_dot,
    .dot_signs = avx512_dot_signs,
    .to_f32 = avx512_to_f32,
    .add_signs = avx512_add_signs,
    .weighted_sum = avx512_weighted_sum,
};

/* The compiler's runtime asks the operating system too whether it keeps the wide registers. */
const bd_cpu_kernels *bd_cpu_kernels_avx512(void) {
    const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return here ? &avx512_kernels : NULL;
}

#else

const bd_cpu_kernels *bd_cpu_kernels_avx512(void) {
    return NULL;
}

#endif
