/* fast.c - see fast.h: which groups are fast, and the launches. */
#include "fast.h"

#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

static void group_shape(const bd_cuda *cuda, bd_group group, cuda_group *out) {
    static const bd_linear firsts[CUDA_GROUPS] = {BD_LINEAR_Q, BD_LINEAR_O, BD_LINEAR_GATE,
                                                  BD_LINEAR_DOWN};
    static const uint32_t counts[CUDA_GROUPS] = {3, 1, 2, 1};
    out->first = firsts[group];
    out->count = counts[group];
    out->k = cuda->shape.linear_k[out->first];
    bool aligned = true;
    for (uint32_t i = 0; i < out->count; i++) {
        out->n += cuda->shape.linear_n[out->first + i];
        /* Sign chunks hold 128 rows: a fused matrix's planes are one plane only at such seams. */
        if (out->count > 1 && cuda->shape.linear_n[out->first + i] % 128) aligned = false;
    }
    out->fast = aligned && out->k % 256 == 0 && out->k <= 65536 && out->n % 8 == 0;
}

static const uint32_t box_rows[X_BOX_COUNT] = {128, 64, 32};

static bool head_maps(bd_cuda *cuda) {
    cuda_fast_head *h = &cuda->fast.head;
    const uint32_t rows = cuda->options.logits_rows_max, n = cuda->shape.vocab,
                   k = cuda->shape.hidden;
    if (k % 256 || n % 8) return false;
    h->runs = malloc(rows * sizeof *h->runs);
    if (!h->runs) return false;
    for (uint32_t i = 0; i < X_BOX_COUNT; i++)
        if (!cuda_map_make(&h->x[i], cuda->head_in, rows, k, box_rows[i], cuda->fp16)) return false;
    return cuda_map_make(&h->w, cuda->head, n, k, 128, cuda->fp16);
}

static bool group_maps(bd_cuda *cuda, bd_group group) {
    cuda_group *g = &cuda->fast.groups[group];
    const uint32_t rows = cuda->options.rows_max;
    g->x_data = group == BD_GROUP_O      ? cuda->attn
                : group == BD_GROUP_DOWN ? cuda->act
                                         : cuda->normed;
    g->y_data = g->count > 1 ? cuda->fast.fused : (uint16_t *)(void *)cuda->proj;
    for (uint32_t i = 0; i < X_BOX_COUNT; i++)
        if (!cuda_map_make(&g->x[i], g->x_data, rows, g->k, box_rows[i], cuda->fp16)) return false;
    for (uint32_t layer = 0; layer < cuda->shape.layers; layer++)
        if (!cuda_map_make(&cuda->fast.w[layer][group], cuda->linears[layer][g->first], g->n, g->k,
                           128, cuda->fp16))
            return false;
    return cuda_map_make(&g->y, g->y_data, rows, g->n, 32, cuda->fp16);
}

void cuda_fast_open(bd_cuda *cuda) {
    cuda_fast *fast = &cuda->fast;
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device);
    cudaDeviceGetAttribute(&fast->sm_count, cudaDevAttrMultiProcessorCount, cuda->device);
    if (fast->sm_count > CUDA_SM_MAX) fast->sm_count = CUDA_SM_MAX;
    fast->w = calloc(cuda->shape.layers, sizeof *fast->w);
    fast->usable =
        major == 9 && fast->w &&
        cudaMemset(fast->workspace, 0, k_decode_workspace_bytes(fast->sm_count)) == cudaSuccess &&
        cudaMemset(fast->tickets, 0, CUDA_TICKETS * sizeof *fast->tickets) == cudaSuccess;
    for (uint32_t group = 0; group < CUDA_GROUPS; group++) {
        group_shape(cuda, (bd_group)group, &fast->groups[group]);
        if (!fast->usable || !fast->groups[group].fast || !group_maps(cuda, (bd_group)group))
            fast->groups[group].fast = false;
    }
    fast->head.fast = fast->usable && head_maps(cuda);
}

void cuda_fast_close(bd_cuda *cuda) {
    free(cuda->fast.w);
    free(cuda->fast.head.runs);
}

/* A linear for decode's kernels and the rows of x that are theirs. */
typedef struct few_rows {
    const char *what;
    const CUtensorMap *w, *x; /* x: by box */
    const void *w_data;
    const uint16_t *x_data;
    const k_overlay_linear *overlays;
    const float *bias;
    uint16_t *y; /* NULL: wide */
    float *wide;
    uint32_t n, k, w_row, wide_stride;
    const cuda_chunks *chunks;
    uint32_t by_rows; /* bit c: chunk c is the rows kernel's */
} few_rows;

static const CUtensorMap *box_of(const few_rows *l, const cuda_chunk *chunk) {
    return &l->x[k_decode_tokens((int)chunk->rows) == 64 ? X_BOX_64 : X_BOX_32];
}

static float *wide_of(const few_rows *l, const cuda_chunk *chunk) {
    return l->wide ? l->wide + (size_t)chunk->first_row * l->wide_stride : NULL;
}

static bd_status decode(bd_cuda *cuda, const few_rows *l, const cuda_chunk *chunk, bd_error *err) {
    cuda_fast *fast = &cuda->fast;
    const bool lean = chunk->rows <= K_LEAN_ROWS;
    const uint16_t *x = l->x_data + (size_t)chunk->first_row * l->k;
    if (chunk->slots && !lean) {
        const cudaError_t error =
            k_planes(fast->planes, x, (int)chunk->rows, (int)l->k, cuda->fp16, true, cuda->stream);
        const bd_status s = cuda_check(cuda, error, "bit planes", err);
        if (s != BD_OK) return s;
    }
    const k_decode_args args = {.w = *l->w,
                                .x = *box_of(l, chunk),
                                .w_data = l->w_data,
                                .x_data = x,
                                .first_row = (int32_t)chunk->first_row,
                                .planes = fast->planes,
                                .overlays = l->overlays,
                                .columns = l->chunks->columns + chunk->first_slot,
                                .slot = l->chunks->slot + chunk->slot_at,
                                .bias = l->bias,
                                .y = l->y ? l->y + (size_t)chunk->first_row * l->n : NULL,
                                .wide = wide_of(l, chunk),
                                .wide_stride = (int32_t)l->wide_stride,
                                .w_row = (int32_t)l->w_row,
                                .workspace = fast->workspace,
                                .ticket = &fast->tickets[fast->next_ticket++ % CUDA_TICKETS],
                                .rows = (int32_t)chunk->rows,
                                .n = (int32_t)l->n,
                                .k = (int32_t)l->k,
                                .variants = (int32_t)chunk->slots,
                                .sm_count = fast->sm_count,
                                .fp16 = cuda->fp16,
                                .pdl = 1};
    return cuda_check(cuda, (lean ? k_decode_lean : k_decode)(&args, cuda->stream), l->what, err);
}

_Static_assert(CUDA_CHUNKS_MAX <= K_DIGITS_CHUNKS, "one launch makes the digits of all chunks");
_Static_assert(CUDA_CHUNKS_MAX <= 32, "a bit a chunk");

/* Which chunks are the rows kernel's, by W [n, k], and what it takes of their x; at[]: where each
 * chunk's begin. */
static bd_status digits(bd_cuda *cuda, few_rows *l, uint32_t n, uint64_t at[CUDA_CHUNKS_MAX],
                        bd_error *err) {
    k_digits_args args = {.x = l->x_data,
                          .digits = cuda->fast.digits,
                          .k = (int32_t)l->k,
                          .fp16 = cuda->fp16,
                          .pdl = 1};
    uint64_t bytes = 0;
    for (uint32_t c = 0; c < l->chunks->count; c++) {
        const cuda_chunk *chunk = &l->chunks->at[c];
        if (!cuda_fast_takes_rows(&cuda->fast, n, l->k, chunk)) continue;
        l->by_rows |= 1u << c;
        at[c] = bytes;
        args.chunks[args.chunk_count++] =
            (k_digits_chunk){(int32_t)chunk->first_row, (int32_t)chunk->rows, bytes};
        bytes += k_digits_bytes((int)chunk->rows, (int)l->k);
    }
    if (!args.chunk_count) return BD_OK;
    return cuda_check(cuda, k_digits(&args, cuda->stream), "digits", err);
}

static bd_status rows(bd_cuda *cuda, const few_rows *l, const cuda_chunk *chunk, uint64_t digits_at,
                      bd_error *err) {
    cuda_fast *fast = &cuda->fast;
    const k_rows_args args = {.w = *l->w,
                              .x = *box_of(l, chunk),
                              .digits = fast->digits + digits_at,
                              .w_data = l->w_data,
                              .overlays = l->overlays,
                              .columns = l->chunks->columns + chunk->first_slot,
                              .groups = l->chunks->groups + chunk->first_group,
                              .bias = l->bias,
                              .y = l->y,
                              .wide = wide_of(l, chunk),
                              .wide_stride = (int32_t)l->wide_stride,
                              .w_row = (int32_t)l->w_row,
                              .workspace = fast->workspace,
                              .ticket = &fast->tickets[fast->next_ticket++ % CUDA_TICKETS],
                              .group_rows = (int32_t)chunk->group_rows,
                              .first_row = (int32_t)chunk->first_row,
                              .rows = (int32_t)chunk->rows,
                              .n = (int32_t)l->n,
                              .k = (int32_t)l->k,
                              .group_count = (int32_t)chunk->groups,
                              .variants = (int32_t)chunk->slots,
                              .sm_count = fast->sm_count,
                              .fp16 = cuda->fp16,
                              .pdl = 1};
    return cuda_check(cuda, k_rows(&args, cuda->stream), l->what, err);
}

/* at: where the digits of its chunks are. */
static bd_status launch_chunks(bd_cuda *cuda, const few_rows *l, const uint64_t at[CUDA_CHUNKS_MAX],
                               bd_error *err) {
    bd_status s = BD_OK;
    for (uint32_t c = 0; s == BD_OK && c < l->chunks->count; c++)
        s = l->by_rows >> c & 1 ? rows(cuda, l, &l->chunks->at[c], at[c], err)
                                : decode(cuda, l, &l->chunks->at[c], err);
    return s;
}

static const int boxes[CUDA_TILES] = {X_BOX_128, X_BOX_64, X_BOX_32}; /* half a tile of x */

/* Rows [first, first + n) of the head; overlays: of their block. */
static bd_status head_tiles(bd_cuda *cuda, uint32_t first, uint32_t n,
                            const k_overlay_linear *overlays, float *logits, bd_error *err) {
    const cuda_fast *fast = &cuda->fast;
    const cuda_head_step *d = &cuda->fast_step.head;
    const cuda_way way = cuda_fast_tile(fast, n, cuda->shape.hidden, d->tiles.count);
    const uint32_t t = way.tile;
    const k_gemm_args args = {.w = fast->head.w,
                              .x = fast->head.x[boxes[t]],
                              .y = fast->head.x[X_BOX_32], /* none; a map that can be fetched */
                              .w_data = cuda->head + (size_t)first * cuda->shape.hidden,
                              .w_row = (int32_t)first,
                              .wide = logits + first,
                              .wide_stride = (int32_t)cuda->head_stride,
                              .overlays = overlays,
                              .tiles = d->tiles.at[t],
                              .tile_count = (int32_t)d->tiles.count[t],
                              .n = (int32_t)n,
                              .k = (int32_t)cuda->shape.hidden,
                              .fp16 = cuda->fp16,
                              .group = 8,
                              .sm_count = fast->sm_count,
                              .pdl = 1};
    return cuda_check(
        cuda, k_gemm(&args, (int)cuda_tile_tokens[t], (int)way.split, d->delta != 0, cuda->stream),
        "head", err);
}

bd_status cuda_fast_head_run(bd_cuda *cuda, float *logits, bd_error *err) {
    const cuda_head_step *d = &cuda->fast_step.head;
    const cuda_step *step = &cuda->step;
    const uint32_t hidden = cuda->shape.hidden, vocab = cuda->shape.vocab;
    const bool tiles = d->chunks.count == 0;
    if (tiles && !d->delta) return head_tiles(cuda, 0, vocab, NULL, logits, err);
    few_rows l = {.what = "head",
                  .w = &cuda->fast.head.w,
                  .x = cuda->fast.head.x,
                  .x_data = cuda->head_in,
                  .k = hidden,
                  .wide_stride = cuda->head_stride,
                  .chunks = &d->chunks};
    uint64_t at[CUDA_CHUNKS_MAX];
    bd_status s = digits(cuda, &l, step->block_rows, at, err);
    for (uint32_t b = 0; s == BD_OK && b < step->block_count; b++) {
        l.w_row = b * step->block_rows;
        l.n = vocab - l.w_row < step->block_rows ? vocab - l.w_row : step->block_rows;
        l.w_data = cuda->head + (size_t)l.w_row * hidden;
        l.wide = logits + l.w_row;
        l.overlays =
            step->linears + (size_t)(cuda->shape.layers * BD_LINEAR_COUNT + step->block_count + b) *
                                step->overlay_count;
        s = tiles ? head_tiles(cuda, l.w_row, l.n, l.overlays, logits, err)
                  : launch_chunks(cuda, &l, at, err);
    }
    return s;
}

static bd_status prefill(bd_cuda *cuda, uint32_t layer, bd_group group, bd_error *err) {
    cuda_fast *fast = &cuda->fast;
    const cuda_group *g = &fast->groups[group];
    const cuda_fast_step *d = &cuda->fast_step;
    const cuda_way *way = &d->ways[group];
    const uint32_t t = way->tile;
    const k_gemm_args args = {.w = fast->w[layer][group],
                              .x = g->x[boxes[t]],
                              .y = g->y,
                              .w_data = cuda->linears[layer][g->first],
                              .y_data = g->y_data,
                              .bias = cuda_group_bias(cuda, layer, group),
                              .overlays = cuda->step.linears +
                                          (size_t)(layer * BD_LINEAR_COUNT + g->first) *
                                              cuda->step.overlay_count,
                              .tiles = d->tiles.at[t],
                              .tile_count = (int32_t)way->tile_count,
                              .n = (int32_t)g->n,
                              .k = (int32_t)g->k,
                              .fp16 = cuda->fp16,
                              .group = 8,
                              .sm_count = fast->sm_count,
                              .pdl = 1};
    return cuda_check(
        cuda, k_gemm(&args, (int)cuda_tile_tokens[t], (int)way->split, way->delta, cuda->stream),
        "prefill", err);
}

static bd_status chunked(bd_cuda *cuda, uint32_t layer, bd_group group, bd_error *err) {
    const cuda_fast *fast = &cuda->fast;
    const cuda_fast_step *d = &cuda->fast_step;
    const cuda_group *g = &fast->groups[group];
    few_rows l = {.what = "decode",
                  .w = &fast->w[layer][group],
                  .x = g->x,
                  .w_data = cuda->linears[layer][g->first],
                  .x_data = g->x_data,
                  .overlays = cuda->step.linears + (size_t)(layer * BD_LINEAR_COUNT + g->first) *
                                                       cuda->step.overlay_count,
                  .bias = cuda_group_bias(cuda, layer, group),
                  .y = g->y_data,
                  .n = g->n,
                  .k = g->k,
                  .chunks = &d->chunks};
    uint64_t at[CUDA_CHUNKS_MAX];
    const bd_status s = digits(cuda, &l, g->n, at, err);
    return s == BD_OK ? launch_chunks(cuda, &l, at, err) : s;
}

bd_status cuda_fast_linear(bd_cuda *cuda, uint32_t layer, bd_group group, bd_error *err) {
    const cuda_way *way = &cuda->fast_step.ways[group];
    bd_status s = BD_OK;
    if (way->tile_count) s = prefill(cuda, layer, group, err);
    if (way->chunked && s == BD_OK) s = chunked(cuda, layer, group, err);
    return s;
}
