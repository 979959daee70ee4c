/* kernels.h - C launchers of the CUDA kernels and the device-side structures they share with the host glue.
 * Every launcher is asynchronous on the given stream, allocates nothing, and returns the launch's own error.
 * Pointers inside the structures are device pointers unless they say host. Rows are tokens of the step, sorted by variant;
 * rows of one variant form a segment. Shapes are [slow, ..., fast]. */
#ifndef BITDELTA_KERNELS_KERNELS_H
#define BITDELTA_KERNELS_KERNELS_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

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
    const uint16_t *x;      /* [rows, k] bf16 */
    const uint16_t *w;      /* [n, k] bf16, row-major */
    float *y;               /* [rows, y_stride] float32; column 0 is n = 0 of this call */
    const float *bias;      /* base's [n], may be NULL */
    const k_overlay_linear *overlays; /* [overlay_count] of this linear (of this block of rows) */
    const k_tile *tiles;
    const k_segment *segments;
    const int32_t *row_overlay; /* [rows] */
    int32_t tile_count, tile_rows_max, n, k, y_stride, planes_max;
} k_linear_args;
cudaError_t k_linear_plain_bf16(const k_linear_args *args, cudaStream_t stream);

/* ---- sm_90a: W_eff rebuilt in registers (bitdelta_gemm.cu) and exact decode (bitdelta_decode.cu) ---- */

typedef struct k_gemm_tile { /* tokens [m0, m1) of one variant (a column of the overlay table, -1: base), m1 - m0 <= tok */
    int32_t m0, m1, variant, pad;
} k_gemm_tile;

typedef struct k_gemm_args {
    CUtensorMap w, x, y; /* W [n, k] box 128 x 64; x [rows, k] box (tok / 2) x 64; Y [rows, n] box 32 x 64; 128-byte swizzle */
    const void *w_data;
    void *y_data;        /* [rows, n] bf16 */
    const float *bias;   /* base's [n], may be NULL */
    const k_overlay_linear *overlays;
    const k_gemm_tile *tiles;
    int32_t tile_count, n, k;
    int32_t group;       /* W-tile pairs per scheduling group */
    int32_t sm_count;
    int32_t pdl;         /* programmatic dependent launch: only x may come from the kernel just before in the stream */
    int32_t first, count; /* range of the walk over pair-tiles; count 0: all */
} k_gemm_args;
/* (tok, split) in {(256, 1), (256, 2), (256, 4), (128, 1), (128, 2), (64, 1), (64, 2)}; k % 128 == 0 (split: k % (256 split)), n % 8 == 0 */
cudaError_t k_gemm_bf16(const k_gemm_args *args, int tok, int split, bool delta, cudaStream_t stream);
cudaError_t k_gemm_waves_bf16(const k_gemm_args *args, bool delta, cudaStream_t stream);

typedef struct k_decode_args {
    CUtensorMap w, x;      /* W [n, k] box 128 x 64; x [rows, k] box max(8, nb) x 64; 128-byte swizzle */
    const void *w_data;
    const uint8_t *planes; /* [k / 256][nb][512], scale [nb], sum [nb]: by k_planes_bf16; unused without variants */
    const float *scale;
    const int32_t *sum;
    const k_overlay_linear *overlays;
    const int32_t *columns; /* [variants] column of the overlay table of each slot */
    const int32_t *slot;    /* [rows] slot of each row, -1: base */
    const float *bias;      /* base's [n], may be NULL */
    void *y;                /* [rows, n] bf16 */
    unsigned long long *workspace; /* k_decode_workspace_bytes(), zero before the first call, left zero */
    unsigned *ticket;       /* zero before the first call, left zero; not shared by launches that may overlap */
    int32_t rows, n, k, variants, sm_count, pdl;
    int32_t stages, frames, burst; /* set by the launcher */
} k_decode_args;
cudaError_t k_planes_bf16(uint8_t *planes, float *scale, int32_t *sum, const uint16_t *x, int rows, int k, int nb, cudaStream_t stream);
uint64_t k_decode_workspace_bytes(int sm_count);
cudaError_t k_decode_bf16(const k_decode_args *args, int nb, cudaStream_t stream);

/* Sign chunks: [ceil(n / 128)][ceil(k / 256)] of 4096 bytes, see repack.cu. */
uint64_t k_sign_bytes(uint32_t n, uint32_t k);
typedef struct k_plane_part {
    uint32_t first_row, row_count, first_col, col_count;
} k_plane_part;
/* src: rows of col_count / 8 bytes, contiguous. first_col is a multiple of 64, and so is col_count unless the part ends
 * with its rows. */
cudaError_t k_repack_part(uint8_t *dst, const uint8_t *src, uint32_t k, const k_plane_part *part, cudaStream_t stream);
/* src: rows of k / 8 bytes, contiguous, rows [first_row, first_row + row_count) of the plane at dst. */
cudaError_t k_repack(uint8_t *dst, const uint8_t *src, uint32_t k, uint32_t first_row, uint32_t row_count,
                     cudaStream_t stream);

typedef struct k_embed_args {
    float *residual;        /* [rows, hidden] */
    const uint16_t *embed;  /* [vocab, hidden] bf16 */
    const int32_t *tokens, *row_overlay; /* [rows] */
    const k_overlay_linear *overlays;    /* [blocks][overlay_count] */
    int32_t rows, hidden, block_rows, overlay_count;
    float scale;
} k_embed_args;
cudaError_t k_embed_bf16(const k_embed_args *args, cudaStream_t stream);

typedef struct k_norm_args {
    float *residual;         /* [rows, width], updated in place when add */
    const void *proj;        /* [rows, width] float32, or bf16 when proj_bf16; read when add */
    uint16_t *normed;        /* [rows, width] bf16 */
    const float *gamma, *post_gamma;  /* the base's [width]; post NULL: no post norm */
    const float *const *gammas;       /* [overlay_count], NULL entries: the base's */
    const float *const *post_gammas;
    const int32_t *row_overlay;
    int32_t rows, width;
    bool add, plus_one, proj_bf16;
    float eps;
    /* For the decode kernel that follows: the rows' bit planes as k_planes_bf16 makes them, or NULL. */
    uint8_t *planes;
    float *plane_scale;
    int32_t *plane_sum;
    int32_t planes_nb;
} k_norm_args;
cudaError_t k_norm_residual_bf16(const k_norm_args *args, cudaStream_t stream);

/* act[m][i] = f(gate[m][i]) * up[m][i]; gelu: tanh form, else SiLU */
typedef struct k_gate_args {
    uint16_t *act;          /* [rows, width] bf16 */
    const void *gate, *up;  /* rows in_stride elements apart: float32, or bf16 when in_bf16 */
    int32_t rows, width, in_stride;
    bool in_bf16, gelu;
} k_gate_args;
cudaError_t k_gate_bf16(const k_gate_args *args, cudaStream_t stream);

/* Paged KV of one layer: [block][key, value][kv_head][block_tokens][head_dim] bf16 */
typedef struct k_seq {
    int32_t first_row, row_count, kv_before, first_block; /* first_block: index into kv_blocks */
} k_seq;

typedef struct k_attention_args {
    /* [rows, heads * head_dim] and [rows, kv_heads * head_dim], rows q_stride and kv_stride elements apart: float32, or bf16 when
     * in_bf16 */
    const void *q_in, *k_in, *v_in;
    uint16_t *q;                      /* [rows, heads * head_dim] bf16, after norm and rope */
    uint16_t *kv;                     /* this layer's cache */
    uint16_t *out;                    /* [rows, heads * head_dim] bf16 */
    const float *rope;                /* [tables][positions][rotary_dim / 2][cos, sin] */
    const int32_t *row_rope;          /* [rows] table of the row's segment */
    const int32_t *row_window;        /* [rows] 0: full */
    const int32_t *positions, *seq_of_row;
    const k_seq *seqs;
    const int32_t *kv_blocks;
    const float *q_gamma, *k_gamma;   /* the base's [head_dim], NULL: no q/k norm */
    const float *const *q_gammas, *const *k_gammas; /* [overlay_count] */
    const int32_t *row_overlay;
    int32_t rows, heads, kv_heads, head_dim, rotary_dim, block_tokens, rope_positions;
    int32_t q_stride, kv_stride;
    bool use_window, norm_plus_one, in_bf16;
    float scale, softcap, eps;
} k_attention_args;
cudaError_t k_rope_kv_write_bf16(const k_attention_args *args, cudaStream_t stream);
cudaError_t k_attention_plain_bf16(const k_attention_args *args, cudaStream_t stream);

cudaError_t k_gather_rows_bf16(uint16_t *dst, const uint16_t *src, const int32_t *rows, int32_t count, int32_t width,
                               cudaStream_t stream);

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

/* logits: [rows, vocab] raw, soft-capped and masked in place; scratch: [rows, 2, vocab]. */
cudaError_t k_sample(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits, k_sample_result *results,
                     int32_t row_count, int32_t vocab, float softcap, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
