/* fast_head.c - which kernel makes the rows of logits: decode's and the rows kernel, block by block
 * of the variants' pages; of more than a few that the base's table alone makes, prefill's; of very
 * many the plain one. */
#include "cuda_internal.h"
#include "fast.h"

/* *plain: no variant has a head of its own. false: decode's kernels do not take what one has. */
static bool heads_usable(const bd_step *step, bool *plain) {
    *plain = true;
    for (uint32_t v = 0; v < step->overlay_count; v++)
        for (uint32_t b = 0; step->overlays[v]->head && b < step->overlays[v]->block_count; b++) {
            const bd_overlay_linear *block = &step->overlays[v]->head[b];
            if (block->plane_count > 1) return false;
            if (block->plane_count || block->bias) *plain = false;
        }
    return true;
}

static bool tiles_fill(bd_cuda *cuda, uint32_t rows, cuda_head_step *d) {
    for (uint32_t t = 0; t < CUDA_TILES; t++) {
        const uint32_t tokens = cuda_tile_tokens[t];
        d->tile_count[t] = (rows + tokens - 1) / tokens;
        k_gemm_tile *tile =
            cuda_upload_reserve(cuda, d->tile_count[t], sizeof *tile, (const void **)&d->tiles[t]);
        if (!tile) return false;
        for (uint32_t row = 0; row < rows; row += tokens)
            *tile++ = (k_gemm_tile){(int32_t)row,
                                    (int32_t)(row + tokens < rows ? row + tokens : rows), -1, 0};
    }
    return true;
}

/* Runs of logits rows of one variant. Variants are told apart even where none has a head of its
 * own, so that a step's launches do not tell which have, and one recording does for all. */
static uint32_t runs_of(const bd_step *step, bd_segment runs[CUDA_DECODE_ROWS_MAX]) {
    uint32_t count = 0, segment = 0;
    for (uint32_t i = 0; i < step->logits_row_count; i++) {
        const uint32_t row = step->logits_rows[i].row;
        while (segment + 1 < step->segment_count && row >= step->segments[segment + 1].first_row)
            segment++;
        while (row < step->segments[segment].first_row)
            segment--;
        const int32_t overlay = step->segments[segment].overlay;
        if (count && runs[count - 1].overlay == overlay)
            runs[count - 1].row_count++;
        else
            runs[count++] = (bd_segment){overlay, i, 1};
    }
    return count;
}

static bool chunks_fill(bd_cuda *cuda, const bd_step *step, cuda_head_step *d) {
    bd_segment runs[CUDA_DECODE_ROWS_MAX];
    cuda_chunk_lists lists;
    const uint32_t rows = step->logits_row_count;
    if (!cuda_fast_lists_reserve(cuda, rows, &d->chunks, &lists)) return false;
    cuda_fast_chunks_fill(runs, runs_of(step, runs), rows > K_LEAN_ROWS, &lists, &d->chunks);
    return true;
}

bool cuda_fast_head_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_head_step *d = &cuda->fast_step.head;
    const uint32_t rows = step->logits_row_count;
    bool plain;
    if (!cuda->fast.head.fast || !rows || !heads_usable(step, &plain)) return true;
    const bool tiles = plain && rows > K_LEAN_ROWS;
    if (!tiles && rows > CUDA_DECODE_ROWS_MAX) return true;
    d->usable = 1;
    return tiles ? tiles_fill(cuda, rows, d) : chunks_fill(cuda, step, d);
}
