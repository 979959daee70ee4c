/* fast_head.c - which kernel makes the rows of logits, block by block of the variants' pages:
 * decode's and the rows kernel, or prefill's, for many rows and for those that the base's table
 * alone makes. */
#include "cuda_internal.h"
#include "fast.h"

/* *plain: no variant has a head of its own. false: one has more planes than the kernels take. */
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

/* Runs of logits rows of one variant. Variants are told apart even where none has a head of its
 * own, so that a step's launches do not tell which have, and one recording does for all. */
static uint32_t runs_of(const bd_step *step, bd_segment *runs) {
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

static bool chunks_fill(bd_cuda *cuda, uint32_t rows, uint32_t runs, cuda_head_step *d) {
    cuda_chunk_lists lists;
    if (!cuda_fast_lists_reserve(cuda, rows, &d->chunks, &lists)) return false;
    cuda_fast_chunks_fill(cuda->fast.head.runs, runs, rows > K_LEAN_ROWS, &lists, &d->chunks);
    return true;
}

/* Beyond one chunk, where several cost less than tiles. */
static bool chunks_pay(const bd_cuda *cuda, const cuda_head_step *d) {
    const uint32_t n = cuda->step.block_rows, k = cuda->shape.hidden;
    const cuda_way tiles = cuda_fast_tile(&cuda->fast, n, k, d->tiles.count);
    return cuda_fast_chunks_cost(&cuda->fast, n, k, &d->chunks) < (double)tiles.cost_us;
}

bool cuda_fast_head_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_head_step *d = &cuda->fast_step.head;
    bd_segment *runs = cuda->fast.head.runs;
    const uint32_t rows = step->logits_row_count;
    bool plain;
    if (!cuda->fast.head.fast || !rows || !heads_usable(step, &plain)) return true;
    d->usable = 1;
    uint32_t count = runs_of(step, runs);
    const bool few = rows <= K_LEAN_ROWS || (!plain && rows <= K_DECODE_ROWS);
    if ((few || (!plain && rows <= CUDA_DECODE_ROWS_MAX)) && !chunks_fill(cuda, rows, count, d))
        return false;
    if (few) return true;
    if (plain) runs[0] = (bd_segment){-1, 0, rows}, count = 1;
    d->delta = !plain;
    if (!cuda_fast_tiles_fill(cuda, runs, count, &d->tiles)) return false;
    if (d->chunks.count && !chunks_pay(cuda, d)) d->chunks.count = 0;
    return true;
}
