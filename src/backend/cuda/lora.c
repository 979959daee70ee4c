/* lora.c - low-rank adapters: what they add to the linears, the embedding and the head, by kernels
 * of their own after those that make the rest (lora.cu). A step without adapters launches what it
 * always did; one with them is never replayed, since its recording would lack these launches.
 * Of several ranks each adds its part before what they have is summed: of o and down, which are cut
 * by columns, x A^T of its columns of A times all of B; of the others its rows of B. So the sum has
 * the term once. The workspace is planned for options.lora_rank_max. Owner: the executor thread. */
#include "lora.h"

#include <assert.h>

#include "cuda_internal.h"

static bd_status check_linear(const bd_cuda *cuda, const bd_overlay_linear *l, bool *any,
                              bd_error *err) {
    if (!l->lora_rank) return BD_OK;
    *any = true;
    if (l->lora_rank <= cuda->options.lora_rank_max) return BD_OK;
    return bd_fail(err, BD_E_LIMIT, "lora_rank",
                   "an adapter of rank %u, but the memory was planned for ranks up to %u",
                   l->lora_rank, cuda->options.lora_rank_max);
}

bd_status cuda_lora_check(bd_cuda *cuda, const bd_step *step, bd_error *err) {
    const uint32_t count = cuda->shape.layers * BD_LINEAR_COUNT;
    bd_status s = BD_OK;
    static_assert(CUDA_OVERLAYS_MAX <= 64, "an overlay is a bit");
    cuda->lora = (cuda_lora){0};
    for (uint32_t v = 0; v < step->overlay_count; v++) {
        const bd_overlay *o = step->overlays[v];
        bool any = false;
        for (uint32_t i = 0; s == BD_OK && i < count; i++)
            s = check_linear(cuda, &o->linears[i], &any, err);
        for (uint32_t b = 0; s == BD_OK && b < o->block_count; b++) {
            if (o->embed) s = check_linear(cuda, &o->embed[b], &any, err);
            if (s == BD_OK && o->head) s = check_linear(cuda, &o->head[b], &any, err);
        }
        if (s != BD_OK) return s;
        if (any) cuda->lora.overlays |= (uint64_t)1 << v;
    }
    return BD_OK;
}

static bool adapted(const bd_cuda *cuda, int32_t overlay) {
    return overlay >= 0 && (cuda->lora.overlays >> overlay & 1) != 0;
}

/* Rows [first, end) of one overlay; out NULL: only counted. */
static uint32_t tiles_add(k_lora_tile *out, uint32_t first, uint32_t end, int32_t overlay) {
    uint32_t count = 0;
    for (uint32_t row = first; row < end; row += K_LORA_ROWS, count++) {
        const uint32_t stop = end - row < K_LORA_ROWS ? end : row + K_LORA_ROWS;
        if (out) out[count] = (k_lora_tile){(int32_t)row, (int32_t)stop, overlay};
    }
    return count;
}

static uint32_t step_tiles(const bd_cuda *cuda, const bd_step *step, k_lora_tile *out) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < step->segment_count; i++) {
        const bd_segment *s = &step->segments[i];
        if (adapted(cuda, s->overlay))
            count += tiles_add(out ? out + count : NULL, s->first_row, s->first_row + s->row_count,
                               s->overlay);
    }
    return count;
}

static uint32_t logits_tiles(const bd_cuda *cuda, const bd_step *step, k_lora_tile *out) {
    const size_t at = (size_t)((const uint8_t *)cuda->step.logits_overlay - cuda->upload.device);
    const int32_t *overlays = (const int32_t *)(const void *)(cuda->upload.host + at);
    uint32_t count = 0;
    for (uint32_t row = 0, end; row < step->logits_row_count; row = end) {
        for (end = row + 1; end < step->logits_row_count && overlays[end] == overlays[row];)
            end++;
        if (adapted(cuda, overlays[row]))
            count += tiles_add(out ? out + count : NULL, row, end, overlays[row]);
    }
    return count;
}

static k_lora_linear pair_of(const bd_overlay_linear *l) {
    if (!l->lora_rank) return (k_lora_linear){0};
    return (k_lora_linear){l->lora_a, l->lora_b, l->lora_scale, (int32_t)l->lora_rank};
}

/* Items and columns as in cuda_step.linears. */
static void pairs_fill(const bd_cuda *cuda, const bd_step *step, k_lora_linear *table) {
    const uint32_t n = step->overlay_count, count = cuda->shape.layers * BD_LINEAR_COUNT,
                   blocks = cuda->step.block_count;
    static const bd_overlay_linear none = {0};
    for (uint32_t v = 0; v < n; v++) {
        const bd_overlay *o = step->overlays[v];
        for (uint32_t i = 0; i < count; i++)
            table[(size_t)i * n + v] = pair_of(&o->linears[i]);
        for (uint32_t b = 0; b < blocks; b++) {
            const bool there = b < o->block_count;
            table[(size_t)(count + b) * n + v] = pair_of(there && o->embed ? &o->embed[b] : &none);
            table[(size_t)(count + blocks + b) * n + v] =
                pair_of(there && o->head ? &o->head[b] : &none);
        }
    }
}

bool cuda_lora_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_lora *d = &cuda->lora;
    if (!d->overlays) return true;
    const size_t items = (size_t)cuda->shape.layers * BD_LINEAR_COUNT + 2u * cuda->step.block_count;
    d->tile_count = step_tiles(cuda, step, NULL);
    d->logits_tile_count = logits_tiles(cuda, step, NULL);
    k_lora_linear *table = cuda_upload_reserve(cuda, items * step->overlay_count, sizeof *table,
                                               (const void **)&d->linears);
    k_lora_tile *tiles =
        cuda_upload_reserve(cuda, d->tile_count, sizeof *tiles, (const void **)&d->tiles);
    k_lora_tile *logits = cuda_upload_reserve(cuda, d->logits_tile_count, sizeof *logits,
                                              (const void **)&d->logits_tiles);
    if (!table || !tiles || !logits) return false;
    pairs_fill(cuda, step, table);
    step_tiles(cuda, step, tiles);
    logits_tiles(cuda, step, logits);
    return true;
}

static const k_lora_linear *pairs(const bd_cuda *cuda, const bd_step *step, uint32_t item) {
    return cuda->lora.linears + (size_t)item * step->overlay_count;
}

bd_status cuda_lora_embed(bd_cuda *cuda, const bd_step *step, bd_error *err) {
    if (!cuda->lora.overlays) return BD_OK;
    const k_lora_embed_args args = {.residual = cuda->residual,
                                    .tokens = cuda->step.tokens,
                                    .row_overlay = cuda->step.row_overlay,
                                    .linears =
                                        pairs(cuda, step, cuda->shape.layers * BD_LINEAR_COUNT),
                                    .rows = (int32_t)step->row_count,
                                    .hidden = (int32_t)cuda->shape.hidden,
                                    .block_rows = (int32_t)cuda->step.block_rows,
                                    .overlay_count = (int32_t)step->overlay_count,
                                    .first = (int32_t)cuda->options.vocab_first,
                                    .vocab = (int32_t)cuda->shape.vocab,
                                    .scale = cuda->config->embed_scale};
    return cuda_check(cuda, k_lora_embed(&args, cuda->stream), "adapters", err);
}

/* args: all but what is the step's alike. */
static bd_status add(bd_cuda *cuda, k_lora_args *args, bd_error *err) {
    args->t = cuda->lora_t;
    args->t_stride = (int32_t)cuda->options.lora_rank_max;
    args->fp16 = cuda->fp16;
    if (!args->rank_max) return BD_OK;
    const bd_status s = cuda_check(cuda, k_lora_down(args, cuda->stream), "adapters", err);
    return s == BD_OK ? cuda_check(cuda, k_lora_up(args, cuda->stream), "adapters", err) : s;
}

static void most(int32_t *rank_max, const bd_overlay_linear *l) {
    if ((int32_t)l->lora_rank > *rank_max) *rank_max = (int32_t)l->lora_rank;
}

bd_status cuda_lora_linear(bd_cuda *cuda, const bd_step *step, uint32_t layer, bd_group group,
                           bool fast, bd_error *err) {
    if (!cuda->lora.overlays) return BD_OK;
    const cuda_group *g = &cuda->fast.groups[group];
    float *const outputs[BD_LINEAR_COUNT] = {cuda->q_in, cuda->k_in, cuda->v_in, cuda->proj,
                                             cuda->gate, cuda->up,   cuda->proj};
    k_lora_args args = {.x = group == BD_GROUP_O      ? cuda->attn
                             : group == BD_GROUP_DOWN ? cuda->act
                                                      : cuda->normed,
                        .tiles = cuda->lora.tiles,
                        .piece_count = (int32_t)g->count,
                        .tile_count = (int32_t)cuda->lora.tile_count,
                        .k = (int32_t)g->k,
                        .t_rows = (int32_t)step->row_count,
                        .y_half = fast};
    uint32_t column = 0;
    for (uint32_t i = 0; i < g->count; i++) {
        const uint32_t which = g->first + i, item = layer * BD_LINEAR_COUNT + which,
                       n = cuda->shape.linear_n[which];
        args.pieces[i] =
            (k_lora_piece){.linears = pairs(cuda, step, item),
                           .y = fast ? (void *)(g->y_data + column) : (void *)outputs[which],
                           .n = (int32_t)n,
                           .y_stride = (int32_t)(fast ? g->n : n)};
        column += n;
        for (uint32_t v = 0; v < step->overlay_count; v++)
            most(&args.rank_max, &step->overlays[v]->linears[item]);
    }
    return add(cuda, &args, err);
}

bd_status cuda_lora_head(bd_cuda *cuda, const bd_step *step, float *logits, bd_error *err) {
    const cuda_step *d = &cuda->step;
    const uint32_t vocab = cuda->shape.vocab,
                   heads = cuda->shape.layers * BD_LINEAR_COUNT + d->block_count;
    bd_status s = BD_OK;
    if (!cuda->lora.overlays) return BD_OK;
    for (uint32_t b = 0; s == BD_OK && b < d->block_count; b++) {
        const uint32_t first = b * d->block_rows,
                       n = vocab - first < d->block_rows ? vocab - first : d->block_rows;
        k_lora_args args = {.x = cuda->head_in,
                            .tiles = cuda->lora.logits_tiles,
                            .pieces[0] = {.linears = pairs(cuda, step, heads + b),
                                          .y = logits + first,
                                          .n = (int32_t)n,
                                          .y_stride = (int32_t)cuda->head_stride},
                            .piece_count = 1,
                            .tile_count = (int32_t)cuda->lora.logits_tile_count,
                            .k = (int32_t)cuda->shape.hidden,
                            .t_rows = (int32_t)step->logits_row_count};
        for (uint32_t v = 0; v < step->overlay_count; v++) {
            const bd_overlay *o = step->overlays[v];
            if (o->head && b < o->block_count) most(&args.rank_max, &o->head[b]);
        }
        s = add(cuda, &args, err);
    }
    return s;
}
