/* lora.h - C launchers of lora.cu. Rules as in kernels.h. */
#ifndef BITDELTA_KERNELS_LORA_H
#define BITDELTA_KERNELS_LORA_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define K_LORA_ROWS 8      /* most rows of a tile */
#define K_LORA_PIECES_MAX 3 /* matrices that share their input: q, k, v */

typedef struct k_lora_linear { /* a low-rank pair of one overlay: y += scale (x A^T) B^T */
    const float *a, *b;        /* [rank, k], [n, rank]; at any float */
    float scale;
    int32_t rank; /* 0: none */
} k_lora_linear;

typedef struct k_lora_tile { /* rows of one overlay, K_LORA_ROWS at most */
    int32_t first_row, end_row, overlay;
} k_lora_tile;

typedef struct k_lora_piece { /* one matrix */
    const k_lora_linear *linears; /* [overlay_count] */
    void *y;                      /* [rows, y_stride], from this matrix's column 0 on: float32, or 16-bit when y_half */
    int32_t n, y_stride;
} k_lora_piece;

typedef struct k_lora_args {
    const uint16_t *x; /* [rows, k], 16-byte aligned */
    float *t;          /* scratch: [pieces][t_rows][t_stride] */
    const k_lora_tile *tiles;
    k_lora_piece pieces[K_LORA_PIECES_MAX];
    int32_t piece_count, tile_count, k;
    int32_t rank_max;         /* the largest rank of any overlay in `pieces` */
    int32_t t_rows, t_stride; /* at least as many as rows, and rank_max */
    bool y_half, fp16;
} k_lora_args;
/* t = scale x A^T of the tiles' rows. k % 8 == 0. */
cudaError_t k_lora_down(const k_lora_args *args, cudaStream_t stream);
/* y += t B^T. */
cudaError_t k_lora_up(const k_lora_args *args, cudaStream_t stream);

typedef struct k_lora_embed_args { /* after k_embed: residual[m] += scale * what the row's overlay adds to its token's row */
    float *residual;                     /* [rows, hidden] */
    const int32_t *tokens, *row_overlay; /* [rows] */
    const k_lora_linear *linears;        /* [blocks][overlay_count] of block_rows rows of the table each; k is hidden */
    int32_t rows, hidden, block_rows, overlay_count;
    int32_t first, vocab; /* as k_embed_args' */
    float scale;
} k_lora_embed_args;
cudaError_t k_lora_embed(const k_lora_embed_args *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
