/* fast_head.c - which kernel makes the rows of logits: of few rows decode's, block by block of the
 * variants' pages; of many that the base's table alone makes, prefill's; else the plain one. */
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

/* Variants are told apart even where none has a head of its own, so that a step's launches do not
 * tell which have, and one recording does for all. */
static bool chunk_fill(bd_cuda *cuda, const bd_step *step, cuda_head_step *d) {
    const uint32_t rows = step->logits_row_count;
    int32_t *columns = cuda_upload_reserve(cuda, rows, sizeof *columns, (const void **)&d->columns);
    int32_t *slot = cuda_upload_reserve(cuda, rows, sizeof *slot, (const void **)&d->slot);
    if (!columns || !slot) return false;
    uint32_t segment = 0;
    int32_t last = -1; /* the variant before, the base's rows passed over */
    for (uint32_t i = 0; i < rows; i++) {
        const uint32_t row = step->logits_rows[i].row;
        while (segment + 1 < step->segment_count && row >= step->segments[segment + 1].first_row)
            segment++;
        while (row < step->segments[segment].first_row)
            segment--;
        const int32_t overlay = step->segments[segment].overlay;
        if (overlay >= 0 && overlay != last) columns[d->chunk.slots++] = last = overlay;
        slot[i] = overlay < 0 ? -1 : (int32_t)d->chunk.slots - 1;
    }
    d->chunk.rows = rows;
    return true;
}

bool cuda_fast_head_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_head_step *d = &cuda->fast_step.head;
    const uint32_t rows = step->logits_row_count;
    const bool many = rows > K_LEAN_ROWS;
    bool plain;
    if (!cuda->fast.head.fast || !rows || !heads_usable(step, &plain) || (many && !plain))
        return true;
    d->usable = 1;
    return many ? tiles_fill(cuda, rows, d) : chunk_fill(cuda, step, d);
}
