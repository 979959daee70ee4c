/* whole.c - rows of the vocabulary that variants keep whole (bd_overlay_rows), in pages of bf16 or
 * fp16: embedding and head in full, and rows added to the base's. The base's tables are used first,
 * for all rows alike, and what variants have of their own is written over it: an embedding row by
 * row, a head by the kernel of any matrix, once for every page. Of several ranks each has its part
 * of what is in full and all added rows; of those rank 0 makes the embeddings, which are summed,
 * and every rank the logits, from the same numbers. Owner: the executor thread. */
#include "whole.h"

#include "cuda_internal.h"

static bool has_whole(const bd_overlay *o) {
    return o->full_embed.count || o->full_head.count || o->extra_rows;
}

bool cuda_step_has_whole(const bd_step *step) {
    for (uint32_t v = 0; v < step->overlay_count; v++)
        if (has_whole(step->overlays[v])) return true;
    return false;
}

static const uint16_t *row_at(const bd_cuda *cuda, const bd_overlay_rows *rows, uint32_t row) {
    BD_ASSERT(row < rows->count);
    const uint16_t *block = rows->blocks[row / rows->block_rows];
    return block + (size_t)(row % rows->block_rows) * cuda->shape.hidden;
}

/* NULL: the base's, another rank's, or of no vocabulary. */
static const uint16_t *embed_row(const bd_cuda *cuda, const bd_overlay *o, int32_t id) {
    const uint32_t token = (uint32_t)id, first = cuda->options.vocab_first;
    if (token >= cuda->vocab_total)
        return cuda->options.rank == 0 ? row_at(cuda, &o->extra_embed, token - cuda->vocab_total)
                                       : NULL;
    if (!o->full_embed.count || token < first || token - first >= cuda->shape.vocab) return NULL;
    return row_at(cuda, &o->full_embed, token - first);
}

/* The tiles of the runs of logits rows that are overlay v's, as many as there are, and the rows of
 * the longest; out NULL: only counted. */
static uint32_t tiles_of(const bd_cuda *cuda, uint32_t count, uint32_t v, k_tile *out,
                         uint32_t *rows_max) {
    const int32_t *overlays = cuda->whole.logits_overlay;
    uint32_t tiles = 0;
    *rows_max = 0;
    for (uint32_t row = 0, end; row < count; row = end) {
        end = row + 1;
        if (overlays[row] != (int32_t)v) continue;
        while (end < count && end - row < K_TILE_TOKENS && overlays[end] == (int32_t)v)
            end++;
        if (end - row > *rows_max) *rows_max = end - row;
        if (out) out[tiles] = (k_tile){.first_row = (int32_t)row, .end_row = (int32_t)end};
        tiles++;
    }
    return tiles;
}

static bool covers(const bd_cuda *cuda, const bd_step *step) {
    for (uint32_t i = 0; i < step->logits_row_count; i++) {
        const int32_t v = cuda->whole.logits_overlay[i];
        if (v < 0 || !step->overlays[v]->full_head.count) return false;
    }
    return true;
}

bool cuda_whole_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_whole *w = &cuda->whole;
    *w = (cuda_whole){.any = cuda_step_has_whole(step)};
    if (!w->any) return true;
    const size_t at = (size_t)((const uint8_t *)cuda->step.logits_overlay - cuda->upload.device);
    w->logits_overlay = (const int32_t *)(const void *)(cuda->upload.host + at);
    w->covers = covers(cuda, step);
    const uint32_t logits_rows = step->logits_row_count;
    uint32_t tile_count = 0, rows_max;
    for (uint32_t v = 0; v < step->overlay_count; v++)
        tile_count += tiles_of(cuda, logits_rows, v, NULL, &rows_max);
    const uint16_t **from =
        cuda_upload_reserve(cuda, step->row_count, sizeof *from, (const void **)&w->embed_from);
    k_tile *tiles = cuda_upload_reserve(cuda, tile_count, sizeof *tiles, (const void **)&w->tiles);
    int32_t *no_overlay =
        cuda_upload_reserve(cuda, logits_rows, sizeof *no_overlay, (const void **)&w->no_overlay);
    if (!from || !tiles || !no_overlay) return false;
    for (uint32_t i = 0; i < logits_rows; i++)
        no_overlay[i] = -1;
    for (uint32_t v = 0; v < step->overlay_count; v++)
        tiles += tiles_of(cuda, logits_rows, v, tiles, &rows_max);
    for (uint32_t s = 0; s < step->segment_count; s++) {
        const bd_segment *segment = &step->segments[s];
        for (uint32_t i = 0; i < segment->row_count; i++) {
            const uint32_t row = segment->first_row + i;
            from[row] = segment->overlay < 0
                            ? NULL
                            : embed_row(cuda, step->overlays[segment->overlay], step->tokens[row]);
        }
    }
    return true;
}

bd_status cuda_whole_embed(bd_cuda *cuda, const bd_step *step, bd_error *err) {
    if (!cuda->whole.any) return BD_OK;
    const k_embed_rows_args args = {.residual = cuda->residual,
                                    .from = cuda->whole.embed_from,
                                    .rows = (int32_t)step->row_count,
                                    .hidden = (int32_t)cuda->shape.hidden,
                                    .scale = cuda->config->embed_scale,
                                    .fp16 = cuda->fp16};
    return cuda_check(cuda, k_embed_rows(&args, cuda->stream), "embedding", err);
}

typedef struct target { /* logits rows of one variant */
    const k_tile *tiles;
    uint32_t tile_count, rows_max;
    float *logits; /* of the table's first row */
    uint32_t stride;
} target;

static bd_status multiply(bd_cuda *cuda, const bd_overlay_rows *rows, const target *to,
                          bd_error *err) {
    bd_status s = BD_OK;
    for (uint32_t first = 0; s == BD_OK && first < rows->count; first += rows->block_rows) {
        const uint32_t left = rows->count - first,
                       n = left < rows->block_rows ? left : rows->block_rows;
        const k_linear_args args = {.x = cuda->head_in,
                                    .w = rows->blocks[first / rows->block_rows],
                                    .y = to->logits + first,
                                    .tiles = to->tiles,
                                    .row_overlay = cuda->whole.no_overlay,
                                    .tile_count = (int32_t)to->tile_count,
                                    .tile_rows_max = (int32_t)to->rows_max,
                                    .n = (int32_t)n,
                                    .k = (int32_t)cuda->shape.hidden,
                                    .y_stride = (int32_t)to->stride,
                                    .fp16 = cuda->fp16};
        s = cuda_check(cuda, k_linear_plain(&args, cuda->stream), "head", err);
    }
    return s;
}

bd_status cuda_whole_head(bd_cuda *cuda, const bd_step *step, float *head, bd_error *err) {
    bd_status s = BD_OK;
    if (!cuda->whole.any) return BD_OK;
    target to = {.tiles = cuda->whole.tiles};
    for (uint32_t v = 0; s == BD_OK && v < step->overlay_count; v++) {
        const bd_overlay *o = step->overlays[v];
        to.tile_count = tiles_of(cuda, step->logits_row_count, v, NULL, &to.rows_max);
        to.logits = head;
        to.stride = cuda->head_stride;
        s = multiply(cuda, &o->full_head, &to, err);
        to.logits = cuda->logits + cuda->vocab_total;
        to.stride = cuda->logits_width;
        if (s == BD_OK) s = multiply(cuda, &o->extra_head, &to, err);
        to.tiles += to.tile_count;
    }
    return s;
}
