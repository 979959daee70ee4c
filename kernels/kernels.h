/* kernels.h - C launchers of the CUDA kernels and the device-side structures they share with the host glue.
 * Every launcher is asynchronous on the given stream, allocates nothing, and returns the launch's own error.
 * Pointers inside the structures are device pointers unless they say host. Rows are tokens of the step, sorted by variant;
 * rows of one variant form a segment. Shapes are [slow, ..., fast]. 16-bit elements are fp16 where the arguments say fp16, else bf16. */
#ifndef BITDELTA_KERNELS_KERNELS_H
#define BITDELTA_KERNELS_KERNELS_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define K_BOTH_SIDES __host__ __device__
#else
#define K_BOTH_SIDES
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define K_PLANES_MAX 4
#define K_TOP_MAX 20
#define K_TILE_TOKENS 32

/* One linear of one overlay on the device. bits: sign chunks (repack.cu), scale: [n] float32. */
typedef struct k_overlay_linear {
    const uint8_t *bits[K_PLANES_MAX];
    const float *scale[K_PLANES_MAX];
    const float *bias; /* NULL: the base's */
    int64_t plane_count;
} k_overlay_linear;

typedef struct k_segment {
    int32_t overlay; /* column of the overlay tables, -1: base */
    int32_t first_row, end_row;
} k_segment;

typedef struct k_tile { /* at most K_TILE_TOKENS rows and the segments that touch them */
    int32_t first_row, end_row, first_segment, end_segment;
} k_tile;

/* y[m][n] = sum_k x[m][k] (W[n][k] + sum_p scale_p[n] S_p[n][k]) + bias[n] */
typedef struct k_linear_args {
    const uint16_t *x;      /* [rows, k] */
    const uint16_t *w;      /* [n, k], row-major */
    float *y;               /* [rows, y_stride] float32; column 0 is n = 0 of this call */
    const float *bias;      /* base's [n], may be NULL */
    const k_overlay_linear *overlays; /* [overlay_count] of this linear (of this block of rows) */
    const k_tile *tiles;
    const k_segment *segments;
    const int32_t *row_overlay; /* [rows] */
    int32_t tile_count, tile_rows_max, n, k, y_stride, planes_max;
    bool fp16;
} k_linear_args;
cudaError_t k_linear_plain(const k_linear_args *args, cudaStream_t stream);

/* ---- sm_90a: W_eff rebuilt in registers (bitdelta_gemm.cu) and exact decode (bitdelta_decode.cu) ---- */

typedef struct k_gemm_tile { /* tokens [m0, m1) of one variant (a column of the overlay table, -1: base), m1 - m0 <= tok */
    int32_t m0, m1, variant, pad;
} k_gemm_tile;

typedef struct k_gemm_args {
    CUtensorMap w, x, y; /* W [n, k] box 128 x 64; x [rows, k] box (tok / 2) x 64; Y [rows, n] box 32 x 64; 128-byte swizzle */
    const void *w_data;
    void *y_data;        /* [rows, n] */
    float *wide;         /* NULL, or in place of y: [rows, wide_stride] float32, of any n */
    const float *bias;   /* base's [n], may be NULL */
    const k_overlay_linear *overlays;
    const k_gemm_tile *tiles;
    int32_t tile_count, n, k, wide_stride, w_row; /* w_row: where in w's map W begins */
    bool fp16;
    int32_t group;       /* W-tile pairs per scheduling group */
    int32_t sm_count;
    int32_t pdl;         /* programmatic dependent launch: only x may come from the kernel just before in the stream */
    int32_t first, count; /* set by the launcher; zero */
} k_gemm_args;
/* (tok, split) in {(256, 1), (256, 2), (256, 4), (128, 1), (128, 2), (64, 1), (64, 2)}; k % 128 == 0 (split > 1: k % (256 split)),
 * n % 8 == 0 where y is not wide; delta: whether any tile has a variant. (256, 1) may be two launches. */
cudaError_t k_gemm(const k_gemm_args *args, int tok, int split, bool delta, cudaStream_t stream);
/* Estimated microseconds of a launch on an H200, to be compared between kernels and tiles of one matrix. */
double k_gemm_cost(int n, int k, int tok, int split, int tile_count, int sm_count);

#define K_DECODE_ROWS 64 /* most rows of one launch */

typedef struct k_decode_args {
    CUtensorMap w, x;      /* W [n, k] box 128 x 64; x, not used by the lean one: box k_decode_tokens(rows) x 64; 128-byte swizzle */
    const void *w_data;
    const void *x_data;    /* [rows, k]; the lean one's */
    int32_t first_row;     /* row of x's map where x_data starts */
    const uint8_t *planes; /* by k_planes; used from 17 rows on */
    const k_overlay_linear *overlays;
    const int32_t *columns; /* [variants] column of the overlay table of each slot */
    const int32_t *slot;    /* [rows] slot of each row, -1: base; apart from the -1s they start at 0 and rise by at most 1 a row */
    const float *bias;      /* base's [n], may be NULL */
    void *y;                /* [rows, n] */
    float *wide;            /* NULL, or in place of y: [rows, wide_stride] float32, of any n */
    int32_t wide_stride, w_row; /* w_row: where in w's map W begins */
    unsigned long long *workspace; /* k_decode_workspace_bytes(); the first _zeros() are zero before the first call and left zero */
    unsigned *ticket;       /* zero before the first call, left zero; not shared by launches that may overlap */
    int32_t rows, n, k, variants, sm_count;
    bool fp16;
    int32_t pdl;            /* programmatic dependent launch: only x and the planes may come from the kernel just before in the stream */
    int32_t stages, pieces, chunks, burst; /* set by the launcher */
} k_decode_args;
uint64_t k_decode_workspace_bytes(int sm_count), k_decode_workspace_zeros(int sm_count);
int k_decode_tokens(int rows); /* columns of the product: 32 or 64 */
cudaError_t k_decode(const k_decode_args *args, cudaStream_t stream);
#define K_LEAN_ROWS 16
/* The same for up to K_LEAN_ROWS rows, n % 8 == 0, which makes its planes itself (bitdelta_lean.cu). */
cudaError_t k_decode_lean(const k_decode_args *args, cudaStream_t stream);
/* As k_gemm_cost, comparable with it; the planes are counted. Up to K_LEAN_ROWS rows: the lean one's. */
double k_decode_cost(int n, int k, int rows, int slots, int sm_count);
/* The bit planes of x, [rows, k], for k_decode: k_planes_bytes() bytes. */
uint64_t k_planes_bytes(int rows, int k);
cudaError_t k_planes(uint8_t *planes, const void *x, int rows, int k, bool fp16, bool pdl, cudaStream_t stream);

#define K_DIGITS_CHUNKS 17
typedef struct k_digits_chunk { /* rows of one launch of k_rows, and where its digits begin */
    int32_t first_row, rows;
    uint64_t at_bytes;
} k_digits_chunk;
typedef struct k_digits_args { /* bitdelta_digits.cu: x as k_rows takes it */
    const void *x; /* [.., k] */
    uint8_t *digits;
    k_digits_chunk chunks[K_DIGITS_CHUNKS];
    int32_t chunk_count, k;
    bool fp16;
    int32_t pdl;
} k_digits_args;
uint64_t k_digits_bytes(int rows, int k); /* of a launch of so many rows; a multiple of 128 */
cudaError_t k_digits(const k_digits_args *args, cudaStream_t stream);

#define K_ROWS_GROUPS 16 /* most groups of one launch of k_rows */
#define K_ROWS_SMALL  8  /* most rows of a group: all of a launch are of either kind */
#define K_ROWS_LARGE  16

/* bitdelta_rows.cu: at most K_DECODE_ROWS rows of several variants, which lie together, the base product once. */
typedef struct k_rows_args {
    CUtensorMap w;             /* W [n, k] box 128 x 64, 128-byte swizzle */
    CUtensorMap x;             /* x [.., k] box k_decode_tokens(rows) x 64, likewise; first_row is a row of it */
    const uint8_t *digits;     /* of x's rows, by k_digits; 16-byte aligned */
    const void *w_data;
    const k_overlay_linear *overlays;
    const int32_t *columns;    /* [variants] column of the overlay table of each slot */
    const k_gemm_tile *groups; /* rows [m0, m1) of x and y; variant: the slot, -1: base, of any number of rows. Every slot has a group, in
                                  rising order, and every row is in one */
    const float *bias;         /* base's [n], may be NULL */
    void *y;                   /* [.., n]; rows from first_row on */
    float *wide;               /* NULL, or in place of y: [rows, wide_stride] float32, of any n, its first row first_row's */
    int32_t wide_stride, w_row; /* as k_decode_args' */
    unsigned long long *workspace; /* as k_decode_args' */
    unsigned *ticket;
    int32_t group_rows;        /* K_ROWS_SMALL or K_ROWS_LARGE */
    int32_t first_row, rows, n, k, group_count, variants, sm_count; /* first_row: what m0 of the first group is */
    bool fp16;
    int32_t pdl;               /* as k_gemm_args' */
} k_rows_args;
/* 1 <= variants <= 16; k % 256 == 0, n % 8 == 0 where y is not wide; groups as k_rows_takes. */
cudaError_t k_rows(const k_rows_args *args, cudaStream_t stream);
/* Whether groups of at most `group_rows` rows may be so many. */
bool k_rows_takes(int rows, int groups, int group_rows);
/* As k_gemm_cost. */
double k_rows_cost(int n, int k, int rows, int groups, int group_rows, int variants, int sm_count);

/* Sign chunks: [ceil(n / 128)][ceil(k / 256)] of 4096 bytes, see repack.cu. */
uint64_t k_sign_bytes(uint32_t n, uint32_t k);
typedef struct k_plane_part {
    uint32_t first_row, row_count, first_col, col_count;
} k_plane_part;
/* src: rows of col_count / 8 bytes, contiguous. first_col and col_count are multiples of 8. Parts of one plane, one after another,
 * in any order. */
cudaError_t k_repack_part(uint8_t *dst, const uint8_t *src, uint32_t k, const k_plane_part *part, cudaStream_t stream);
/* src: rows of k / 8 bytes, contiguous, rows [first_row, first_row + row_count) of the plane at dst. */
cudaError_t k_repack(uint8_t *dst, const uint8_t *src, uint32_t k, uint32_t first_row, uint32_t row_count,
                     cudaStream_t stream);

typedef struct k_embed_args {
    float *residual;        /* [rows, hidden] */
    const uint16_t *embed;  /* [vocab, hidden] */
    const int32_t *tokens, *row_overlay; /* [rows] */
    const k_overlay_linear *overlays;    /* [blocks][overlay_count] */
    int32_t rows, hidden, block_rows, overlay_count;
    int32_t first, vocab;   /* rows of the table that are here: tokens first .. first + vocab - 1; a row of another token is zero */
    float scale;
    bool fp16;
} k_embed_args;
cudaError_t k_embed(const k_embed_args *args, cudaStream_t stream);

typedef struct k_norm_args {
    float *residual;         /* [rows, width], updated in place when add */
    const void *proj;        /* [rows, width] float32, or 16-bit when proj_half; read when add */
    uint16_t *normed;        /* [rows, width] */
    const float *gamma, *post_gamma;  /* the base's [width]; post NULL: no post norm */
    const float *const *gammas;       /* [overlay_count], NULL entries: the base's */
    const float *const *post_gammas;
    const int32_t *row_overlay;
    int32_t rows, width;
    bool add, plus_one, proj_half, fp16;
    bool overlap; /* sm_90: the kernel before may still run at the launch (programmatic dependent launch) */
    float eps;
} k_norm_args;
#define K_NORM_WIDTH_MAX 16384
/* width % 8 == 0. All but gamma in pieces of 16 bytes. */
cudaError_t k_norm_residual(const k_norm_args *args, cudaStream_t stream);

/* act[m][i] = f(gate[m][i]) * up[m][i]; gelu: tanh form, else SiLU */
typedef struct k_gate_args {
    uint16_t *act;          /* [rows, width] */
    const void *gate, *up;  /* rows in_stride elements apart: float32, or 16-bit when in_half */
    int32_t rows, width, in_stride;
    bool in_half, gelu, fp16;
    bool overlap;           /* as k_norm_args' */
} k_gate_args; /* width and in_stride % 8 == 0, pieces of 16 bytes */
cudaError_t k_gate(const k_gate_args *args, cudaStream_t stream);

/* Paged KV of one layer: [block][key, value][kv_head][block_tokens][head_dim], bf16 or fp16 */
typedef struct k_seq {
    int32_t first_row, row_count, kv_before, first_block; /* first_block: index into kv_blocks */
} k_seq;

typedef struct k_attention_tile { /* K_ATTENTION_ROWS rows of a sequence, from its first_row-th of this step */
    int32_t seq, first_row;
} k_attention_tile;
#define K_ATTENTION_ROWS 128
/* One part of the keys that the one row of a sequence sees, [first_key, tokens). Parts are counted from the one that holds first_key, or,
 * where a layer has no window, from key 0: those beyond the last are passed over. */
typedef struct k_attention_item {
    int32_t row, tokens, first_key, first_block, index, part, unused[2]; /* index: which of the partial results are the sequence's */
} k_attention_item;
#define K_ATTENTION_KEYS 512  /* of a part, about, unless they are too many */
#define K_ATTENTION_SPLITS 16 /* at most so many parts of a sequence's keys are worked on side by side */

typedef struct k_attention_args {
    /* [rows, heads * head_dim] and [rows, kv_heads * head_dim], rows q_stride and kv_stride elements apart: float32, or the 16-bit
     * element type when in_half */
    const void *q_in, *k_in, *v_in;
    uint16_t *q;                      /* [rows, heads * head_dim], after norm and rope */
    uint16_t *kv;                     /* this layer's cache */
    uint16_t *out;                    /* [rows, heads * head_dim] */
    const float *rope;                /* [tables][positions][rotary_dim / 2][cos, sin] */
    const int32_t *row_rope;          /* [rows] table of the row's segment */
    const int32_t *row_window;        /* [rows] 0: full */
    const int32_t *positions, *seq_of_row;
    const k_seq *seqs;
    const int32_t *kv_blocks;
    const float *q_gamma, *k_gamma;   /* the base's [head_dim], NULL: no q/k norm */
    const float *const *q_gammas, *const *k_gammas; /* [overlay_count] */
    const int32_t *row_overlay;
    const k_attention_tile *tiles;    /* k_attention_prefill: its work */
    const k_attention_item *decode_items; /* k_attention_decode: its work, at multiples of 16 bytes */
    const int32_t *decode_count;          /* how many of them */
    float *partials;                  /* [indices of decode_items][heads][K_ATTENTION_SPLITS][head_dim + 2] */
    unsigned *counters;               /* [indices][heads], zero before the first call, left zero */
    int32_t tile_count, decode_items_max, sm_count; /* decode_items_max: their number, or more */
    int32_t rows, heads, kv_heads, head_dim, rotary_dim, block_tokens, rope_positions;
    int32_t q_stride, kv_stride;
    bool use_window, norm_plus_one, in_half;
    bool decode_sparse; /* decode_items_max is far from their number */
    bool fp16;    /* the element type of all 16-bit arrays here; else bf16 */
    bool overlap; /* as k_norm_args'; keys of earlier steps must be no running kernel's */
    float scale, softcap, eps;
} k_attention_args;
/* Also zeroes what follows a sequence's last token in a page whose first token is of this step: the tail of a page is finite. */
cudaError_t k_rope_kv_write(const k_attention_args *args, cudaStream_t stream);
/* Any even head_dim up to 256, all rows. */
cudaError_t k_attention_plain(const k_attention_args *args, cudaStream_t stream);
/* sm_90a, head_dim 64, 80, 96, 128, 256, block_tokens 8 or more: the rows that `tiles` name. Maps with 128-byte swizzle: q as
 * [rows, heads * head_dim] in boxes of 128 x 64, the layer's cache as [blocks * 2 * kv_heads * block_tokens, head_dim] in boxes
 * of k_attention_box(head_dim, block_tokens) x 64. */
cudaError_t k_attention_prefill(const k_attention_args *args, const CUtensorMap *q, const CUtensorMap *kv, cudaStream_t stream);
static inline uint32_t k_attention_box(int32_t head_dim, int32_t block_tokens) {
    const int32_t keys = head_dim <= 128 ? 128 : 64;
    return (uint32_t)(block_tokens < keys ? block_tokens : keys);
}
/* head_dim 64, 80, 96, 128, 256, block_tokens 8 or more: the rows of decode_items. */
cudaError_t k_attention_decode(const k_attention_args *args, cudaStream_t stream);
bool k_attention_fast(int32_t head_dim);
uint32_t k_attention_shared_bytes(int32_t head_dim); /* what a block of k_attention_decode takes */
/* Keys that one part of a sequence of `tokens` keys takes, and how many parts that makes: a function of the length alone, so
 * that a sequence's result does not depend on its batch. */
K_BOTH_SIDES static inline int32_t k_attention_part(int32_t tokens) {
    const int32_t wanted = (tokens + K_ATTENTION_KEYS - 1) / K_ATTENTION_KEYS, parts = wanted < 1 ? 1 : wanted < K_ATTENTION_SPLITS ? wanted : K_ATTENTION_SPLITS;
    return ((tokens + parts - 1) / parts + 15) / 16 * 16;
}
K_BOTH_SIDES static inline int32_t k_attention_splits(int32_t tokens) {
    const int32_t part = k_attention_part(tokens);
    return part ? (tokens + part - 1) / part : 0;
}

cudaError_t k_gather_rows(uint16_t *dst, const uint16_t *src, const int32_t *rows, int32_t count, int32_t width,
                               cudaStream_t stream);

/* In place; *overflow becomes 1 when a value is beyond fp16's range or not a number. */
cudaError_t k_bf16_to_fp16(uint16_t *data, uint64_t count, unsigned *overflow, cudaStream_t stream);

typedef struct k_edit {
    int32_t token;
    float repetition, add;
} k_edit;

typedef struct k_sample_row {
    int32_t target;      /* >= 0: report it; -1: sample */
    int32_t top_count, vocab; /* ids at and above vocab are -inf */
    int32_t first_edit, edit_count;
    uint32_t top_k;
    float temperature, top_p, min_p;
    float uniform;       /* the row's draw in [0, 1) */
} k_sample_row;

typedef struct k_sample_result {
    int32_t id;
    float logprob;
    uint32_t rank, fault;
    int32_t top_ids[K_TOP_MAX];
    float top_logprobs[K_TOP_MAX];
} k_sample_result;

/* logits: [rows, vocab] raw, soft-capped and masked in place; scratch: [rows, vocab rounded up to a multiple of 4];
 * both on 16 bytes. */
cudaError_t k_sample(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits, k_sample_result *results,
                     int32_t row_count, int32_t vocab, float softcap, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
