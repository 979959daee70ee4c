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

/* Sums of the lanes of one register, or of several at once: always (0 + 8) of lanes sixteen apart
 * by eight, then by four, two and one, so that the bits are the same whichever of these is used. */
INLINE __m128 sum_blocks(__m512 v) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

INLINE float lane_sum(__m512 v) {
    const __m128 four = sum_blocks(v), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Block j of the result: the four lanes that are left of v[j]. */
INLINE __m512 fold_four(const __m512 v[4]) {
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44),
                                   _mm512_shuffle_f32x4(v[0], v[1], 0xee));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44),
                                   _mm512_shuffle_f32x4(v[2], v[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Of every block the lanes 0 + 2 of a and of b, then their lanes 1 + 3. */
INLINE __m512 fold_pair(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

/* Of every block the sums of a, b, c and d. */
INLINE __m512 fold_blocks(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = fold_pair(a, b), cd = fold_pair(c, d);
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
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

#define STREAMS     4u
#define AHEAD_BYTES 2048u

/* One row alone, which goes at the speed of memory: of a block's outputs four go together, one of
 * every quarter, and next time the ones after them, so that each quarter is one long stream, which
 * the hardware's prefetchers follow. Eight streams and neighbouring rows were slower. */
typedef struct streams {
    __m512 acc[STREAMS];
    const uint8_t *w[STREAMS];
    const float *x;
    uint64_t turn_bytes,
        jump_bytes; /* what is asked for from turn_bytes on lies in the next block */
} streams;

/* The j-th output of every quarter; `each`: outputs of a quarter. */
INLINE streams streams_begin(const bd_cpu_dot *dot, uint32_t j, uint32_t each) {
    streams s = {.x = dot->x[0], .turn_bytes = UINT64_MAX};
    UNROLL for (uint32_t a = 0; a < STREAMS; a++) {
        s.w[a] = dot->w + (j + a * each) * dot->stride_bytes;
        s.acc[a] = _mm512_setzero_ps();
    }
    /* Behind a quarter comes the next one, which has been read; the next block's is three on. */
    if (j + 1 == each) {
        s.turn_bytes = dot->stride_bytes;
        s.jump_bytes = (STREAMS - 1) * (uint64_t)each * dot->stride_bytes;
    }
    return s;
}

/* Thirty-two weights of each, 16 bits wide. */
INLINE void streams_word(streams *s, uint32_t k, bd_dtype dtype) {
    uint64_t ahead = AHEAD_BYTES;
    if (ahead + 2 * (uint64_t)k >= s->turn_bytes) ahead += s->jump_bytes;
    UNROLL for (uint32_t a = 0; a < STREAMS; a++) prefetch(s->w[a], ahead, k);
    UNROLL for (uint32_t half = 0; half < 32; half += 16) {
        const __m512 xs = _mm512_loadu_ps(s->x + k + half);
        UNROLL for (uint32_t a = 0; a < STREAMS; a++) s->acc[a] =
            _mm512_fmadd_ps(xs, load16(s->w[a], k + half, dtype), s->acc[a]);
    }
}

/* The weights from k on, fewer than 32, and the sums. */
INLINE void streams_end(streams *s, const bd_cpu_dot *dot, uint32_t k, bd_dtype dtype, uint32_t j,
                        uint32_t each) {
    for (; k < dot->k; k += 16) {
        const __mmask16 lanes = first_lanes(dot->k - k);
        const __m512 xs = _mm512_maskz_loadu_ps(lanes, s->x + k);
        UNROLL for (uint32_t a = 0; a < STREAMS; a++) s->acc[a] =
            _mm512_fmadd_ps(xs, load_last(s->w[a], k, lanes, dtype), s->acc[a]);
    }
    float *y = dot->y[0] + j;
    UNROLL for (uint32_t a = 0; a < STREAMS; a++) y[a * each] =
        (dot->add ? y[a * each] : 0.0f) + lane_sum(s->acc[a]);
}

/* Returns the first output that is left. */
INLINE uint32_t dot_streams(const bd_cpu_dot *dot, bd_dtype dtype) {
    const uint32_t each = dot->n / STREAMS;
    for (uint32_t j = 0; j < each; j++) {
        streams s = streams_begin(dot, j, each);
        uint32_t k = 0;
        for (; k + 32 <= dot->k; k += 32)
            streams_word(&s, k, dtype);
        streams_end(&s, dot, k, dtype, j, each);
    }
    return STREAMS * each;
}

/* The sums of NW outputs and R rows, into y or on top of it. */
INLINE void put_sums(const bd_cpu_dot *dot, __m512 acc[6][4], uint32_t i, uint32_t r,
                     const uint32_t NW, const uint32_t R) {
    __m512 of[6]; /* by output: what is left of four lanes, block by block for the rows */
    UNROLL for (uint32_t a = 0; a < 6; a++) {
        const __m512 none = _mm512_setzero_ps();
        const __m512 rows[4] = {a < NW ? acc[a][0] : none, a < NW && R > 1 ? acc[a][1] : none,
                                a < NW && R > 2 ? acc[a][2] : none,
                                a < NW && R > 3 ? acc[a][3] : none};
        of[a] = a < NW ? fold_four(rows) : none;
    }
    const __m512 low = fold_blocks(of[0], of[1], of[2], of[3]);
    const __m512 high = NW > 4 ? fold_blocks(of[4], of[5], of[4], of[5]) : low;
    const __m128 lows[4] = {_mm512_castps512_ps128(low), _mm512_extractf32x4_ps(low, 1),
                            _mm512_extractf32x4_ps(low, 2), _mm512_extractf32x4_ps(low, 3)};
    const __m128 highs[4] = {_mm512_castps512_ps128(high), _mm512_extractf32x4_ps(high, 1),
                             _mm512_extractf32x4_ps(high, 2), _mm512_extractf32x4_ps(high, 3)};
    const __mmask8 first = (__mmask8)((1u << (NW < 4 ? NW : 4)) - 1u), last = 3;
    UNROLL for (uint32_t b = 0; b < R; b++) {
        float *y = dot->y[r + b] + i;
        __m128 sums = lows[b], more = highs[b];
        if (dot->add) {
            sums = _mm_add_ps(_mm_maskz_loadu_ps(first, y), sums);
            if (NW > 4) more = _mm_add_ps(_mm_maskz_loadu_ps(last, y + 4), more);
        }
        if (NW >= 4) {
            _mm_storeu_ps(y, sums);
        } else {
            _mm_mask_storeu_ps(y, first, sums);
        }
        if (NW > 4) _mm_storel_pi((__m64 *)(void *)(y + 4), more);
    }
}

/* NW outputs times R rows; both are constants after inlining, and the accumulators fit the 32
 * registers. ahead_bytes: 0, or how far ahead of these weights to prefetch. */
INLINE void dot_block(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, uint32_t r,
                      uint64_t ahead_bytes, const uint32_t NW, const uint32_t R) {
    __m512 acc[6][4];
    const uint8_t *w[6];
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
    if (dtype == BD_DTYPE_F32 || R != 3) {
        put_sums(dot, acc, i, r, NW, R);
        return;
    }
    UNROLL for (uint32_t b = 0; b < R; b++) { /* gcc's loop for three rows was slower with them */
        float *y = dot->y[r + b] + i;
        UNROLL for (uint32_t a = 0; a < NW; a++) y[a] =
            (dot->add ? y[a] : 0.0f) + lane_sum(acc[a][b]);
    }
}

/* Weights pass through the cache once: all rows visit a few outputs before the next few are read,
 * which the first rows ask for. */
INLINE void dot_rows(const bd_cpu_dot *dot, bd_dtype dtype, uint32_t i, const uint32_t NW) {
    uint32_t r = 0;
    for (; r + 4 <= dot->rows; r += 4)
        dot_block(dot, dtype, i, r, r == 0 ? NW * dot->stride_bytes : 0, NW, 4);
    const uint64_t ahead_bytes = r == 0 ? NW * dot->stride_bytes : 0;
    if (dot->rows - r == 3) dot_block(dot, dtype, i, r, ahead_bytes, NW, 3);
    if (dot->rows - r == 2) dot_block(dot, dtype, i, r, ahead_bytes, NW, 2);
    if (dot->rows - r == 1) dot_block(dot, dtype, i, r, ahead_bytes, NW, 1);
}

INLINE void dot_all(const bd_cpu_dot *dot, bd_dtype dtype) {
    uint32_t i = dot->rows == 1 && dtype != BD_DTYPE_F32 ? dot_streams(dot, dtype) : 0;
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

/* The j-th outputs' weights, and the part-th of 4 G parts of the words of G times sixteen outputs
 * from `group` on, which are not the same ones: after 4 G calls both are done with as many outputs.
 * Every 32 weights of the four go with one lookup (G = 2) or two, so that memory never waits for
 * lookups; a table read serves 16 G outputs. The sums run in the same order as in dot_block and
 * sign_block. */
INLINE void fused_part(const bd_cpu_dot *dot, const bd_cpu_signs *signs, signed_sum *sums,
                       uint32_t j, uint32_t each, uint32_t group, uint32_t part, const uint32_t G) {
    const uint32_t first = signs->words * part / (4 * G), end = signs->words * (part + 1) / (4 * G);
    const float *table = signs->table[0] + (size_t)first * BD_CPU_QUADS * 16u;
    const uint32_t lookups = G == 1 ? 2 : 1;
    streams s = streams_begin(dot, j, each);
    uint32_t k = 0;
    for (uint32_t word = first; word < end; word++) {
        __m512i bits[2];
        UNROLL for (uint32_t g = 0; g < G; g++) bits[g] =
            load_bits(signs, group + 2 * g, word, true);
        ROLL for (uint32_t t = 0; t < BD_CPU_QUADS; t += lookups) {
            if (k + 32 <= dot->k) {
                streams_word(&s, k, BD_DTYPE_BF16);
                k += 32;
            }
            UNROLL for (uint32_t q = 0; q < lookups; q++) {
                const __m512 sixteen = _mm512_loadu_ps(table);
                table += 16;
                UNROLL for (uint32_t g = 0; g < G; g++) {
                    add_quad(&sums[g], sixteen, bits[g]);
                    bits[g] = _mm512_srli_epi32(bits[g], 4);
                }
            }
        }
        if (word % BD_CPU_FOLD_WORDS != BD_CPU_FOLD_WORDS - 1) continue;
        UNROLL for (uint32_t g = 0; g < G; g++) fold(&sums[g]);
    }
    for (; k + 32 <= dot->k; k += 32)
        streams_word(&s, k, BD_DTYPE_BF16);
    streams_end(&s, dot, k, BD_DTYPE_BF16, j, each);
}

#define FUSED_SIXTEENS 6u

/* All outputs of dot, 16 times `sixteens`, which begin with a group. */
AVX512 static void fused_sixteens(const bd_cpu_dot *dot, const bd_cpu_signs *signs,
                                  uint32_t sixteens) {
    signed_sum sums[FUSED_SIXTEENS];
    const uint32_t first = signs->first / 8u, each = 4 * sixteens;
    BD_ASSERT(sixteens <= FUSED_SIXTEENS);
    for (uint32_t i = 0, j = 0, next; i < sixteens; i = next) {
        const bool two = sixteens - i >= 2;
        next = i + (two ? 2 : 1);
        sums[i] = sums[next - 1] = (signed_sum){_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (uint32_t part = 0; part < 4 * (next - i); part++, j++) {
            if (two) {
                fused_part(dot, signs, &sums[i], j, each, first + 2 * i, part, 2);
            } else {
                fused_part(dot, signs, &sums[i], j, each, first + 2 * i, part, 1);
            }
        }
    }
    for (uint32_t i = 0; i < sixteens; i++) {
        fold(&sums[i]);
        add_scaled(signs, first + 2 * i, 0, sums[i].total);
    }
}

AVX512 static void avx512_dot_signs(const bd_cpu_dot *dot, const bd_cpu_signs *signs) {
    BD_ASSERT(dot->rows == 1 && signs->rows == 1 && dot->n == signs->count && !dot->add);
    for (uint32_t i = 0, next; i < dot->n; i = next) {
        const uint32_t at = signs->first + i, left = (dot->n - i) / 16u,
                       sixteens = left < FUSED_SIXTEENS ? left : FUSED_SIXTEENS;
        const bool whole = at % 8 == 0 && sixteens > 0;
        next = whole ? i + 16 * sixteens : at / 8u * 8u + 8u - signs->first;
        if (next > dot->n) next = dot->n;
        bd_cpu_dot few = *dot;
        bd_cpu_signs few_signs = *signs;
        float *y = NULL;
        bd_cpu_take(&few, &few_signs, i, next - i, &y);
        if (whole) {
            fused_sixteens(&few, &few_signs, sixteens);
        } else { /* the outputs around: a plane may begin or end within a group */
            avx512_dot_bf16(&few);
            avx512_sign_dot(&few_signs);
        }
    }
}

/* Masked stores are slow: only what is left at the end takes one. */
INLINE void to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    uint32_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(dst + i, load16(src, i, dtype));
    const __mmask16 lanes = first_lanes(count - i);
    _mm512_mask_storeu_ps(dst + i, lanes, load_last(src, i, lanes, dtype));
}

AVX512 static void avx512_to_f32(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count) {
    if (dtype == BD_DTYPE_F32) {
        memcpy(dst, src, (size_t)count * sizeof *dst);
    } else if (dtype == BD_DTYPE_BF16) {
        to_f32(dst, src, BD_DTYPE_BF16, count);
    } else {
        to_f32(dst, src, BD_DTYPE_F16, count);
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
        if (k + 16 <= count) {
            _mm512_storeu_ps(dst + k, sum);
        } else {
            _mm512_mask_storeu_ps(dst + k, lanes, sum);
        }
    }
}

/* D times sixteen dimensions from d on of Q queries; lanes: of the last sixteen. */
INLINE void weighted_block(float *acc, const float *p, const float *v, uint32_t tokens,
                           uint32_t dim, uint32_t d, __mmask16 lanes, const uint32_t D,
                           const uint32_t Q) {
    __m512 sums[4][4], values[4];
    UNROLL for (uint32_t q = 0; q < Q; q++) {
        UNROLL for (uint32_t i = 0; i < D; i++) sums[q][i] =
            _mm512_maskz_loadu_ps(lanes, acc + q * BD_CPU_HEAD_DIM_MAX + d + 16 * i);
    }
    for (uint32_t t = 0; t < tokens; t++) {
        UNROLL for (uint32_t i = 0; i < D; i++) values[i] =
            _mm512_maskz_loadu_ps(lanes, v + (size_t)t * dim + d + 16 * i);
        UNROLL for (uint32_t q = 0; q < Q; q++) {
            const __m512 weight = _mm512_set1_ps(p[q * BD_CPU_KV_TILE + t]);
            UNROLL for (uint32_t i = 0; i < D; i++) sums[q][i] =
                _mm512_fmadd_ps(weight, values[i], sums[q][i]);
        }
    }
    UNROLL for (uint32_t q = 0; q < Q; q++) {
        UNROLL for (uint32_t i = 0; i < D; i++)
            _mm512_mask_storeu_ps(acc + q * BD_CPU_HEAD_DIM_MAX + d + 16 * i, lanes, sums[q][i]);
    }
}

INLINE void weighted_queries(float *acc, const float *p, const float *v, uint32_t tokens,
                             uint32_t dim, const uint32_t Q) {
    uint32_t d = 0;
    for (; d + 64 <= dim; d += 64)
        weighted_block(acc, p, v, tokens, dim, d, 0xffff, 4, Q);
    for (; d < dim; d += 16)
        weighted_block(acc, p, v, tokens, dim, d, first_lanes(dim - d), 1, Q);
}

AVX512 static void avx512_weighted_sum(float *acc, const float *p, uint32_t queries, const float *v,
                                       uint32_t tokens, uint32_t dim) {
    uint32_t q = 0;
    for (; q + 4 <= queries; q += 4)
        weighted_queries(acc + q * BD_CPU_HEAD_DIM_MAX, p + q * BD_CPU_KV_TILE, v, tokens, dim, 4);
    acc += q * BD_CPU_HEAD_DIM_MAX;
    p += q * BD_CPU_KV_TILE;
    if (queries - q == 3) weighted_queries(acc, p, v, tokens, dim, 3);
    if (queries - q == 2) weighted_queries(acc, p, v, tokens, dim, 2);
    if (queries - q == 1) weighted_queries(acc, p, v, tokens, dim, 1);
}

static const bd_cpu_kernels avx512_kernels = {
    .name = "avx512",
    .short_rows = 48,
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
