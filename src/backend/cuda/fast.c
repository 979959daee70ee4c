/* fast.c - see fast.h. Choices follow from shapes and the step's rows alone, so a step repeated is
 * bitwise equal. */
#include "fast.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

static const uint32_t tile_tokens[CUDA_TILES] = {256, 128, 64};

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
}

/* Whether the planes (and biases) of a fused group follow each other in this overlay, or are all
 * absent. */
static bool fused_adjacent(const bd_cuda *cuda, const bd_overlay_linear *linears,
                           const cuda_group *g) {
    const bd_overlay_linear *first = &linears[g->first];
    const uint8_t *bits = first->planes[0].bits;
    const float *scale = first->planes[0].scale, *bias = first->bias;
    for (uint32_t i = 0; i < g->count; i++) {
        const bd_overlay_linear *l = &linears[g->first + i];
        const uint32_t n = cuda->shape.linear_n[g->first + i];
        if (l->plane_count != first->plane_count || (l->bias == NULL) != (first->bias == NULL))
            return false;
        if (l->plane_count && (l->planes[0].bits != bits || l->planes[0].scale != scale))
            return false;
        if (l->bias && l->bias != bias) return false;
        bits += k_sign_bytes(n, g->k);
        scale += n;
        if (bias) bias += n;
    }
    return true;
}

static bool overlays_usable(const bd_cuda *cuda, const bd_step *step) {
    for (uint32_t v = 0; v < step->overlay_count; v++)
        for (uint32_t layer = 0; layer < cuda->shape.layers; layer++) {
            const bd_overlay_linear *linears = &step->overlays[v]->linears[layer * BD_LINEAR_COUNT];
            for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++)
                if (linears[i].plane_count > 1) return false;
            for (uint32_t g = 0; g < CUDA_GROUPS; g++)
                if (cuda->fast.groups[g].fast && cuda->fast.groups[g].count > 1 &&
                    !fused_adjacent(cuda, linears, &cuda->fast.groups[g]))
                    return false;
        }
    return true;
}

static bool tiles_fill(bd_cuda *cuda, const bd_step *step, cuda_fast_step *d) {
    for (uint32_t t = 0; t < CUDA_TILES; t++) {
        uint32_t count = 0;
        for (uint32_t s = 0; s < step->segment_count; s++)
            count += (step->segments[s].row_count + tile_tokens[t] - 1) / tile_tokens[t];
        k_gemm_tile *tiles =
            cuda_upload_reserve(cuda, count, sizeof *tiles, (const void **)&d->tiles[t]);
        if (!tiles) return false;
        for (uint32_t s = 0; s < step->segment_count; s++) {
            const bd_segment *segment = &step->segments[s];
            const uint32_t end = segment->first_row + segment->row_count;
            for (uint32_t row = segment->first_row; row < end; row += tile_tokens[t]) {
                const uint32_t stop = row + tile_tokens[t] < end ? row + tile_tokens[t] : end;
                tiles[d->tile_count[t]++] =
                    (k_gemm_tile){(int32_t)row, (int32_t)stop, segment->overlay, 0};
            }
        }
    }
    return true;
}

/* Whether the step's logits are the base's own table times head_in. */
static bool head_plain(const bd_step *step) {
    for (uint32_t v = 0; v < step->overlay_count; v++)
        for (uint32_t b = 0; step->overlays[v]->head && b < step->overlays[v]->block_count; b++)
            if (step->overlays[v]->head[b].plane_count || step->overlays[v]->head[b].bias)
                return false;
    return true;
}

static bool head_fill(bd_cuda *cuda, const bd_step *step, cuda_fast_step *d) {
    const uint32_t rows = step->logits_row_count;
    if (!cuda->fast.head.fast || rows <= CUDA_DECODE_ONLY_ROWS || !head_plain(step)) return true;
    for (uint32_t t = 0; t < CUDA_TILES; t++) {
        const uint32_t count = (rows + tile_tokens[t] - 1) / tile_tokens[t];
        k_gemm_tile *tiles =
            cuda_upload_reserve(cuda, count, sizeof *tiles, (const void **)&d->head_tiles[t]);
        if (!tiles) return false;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t row = i * tile_tokens[t], end = row + tile_tokens[t];
            tiles[i] = (k_gemm_tile){(int32_t)row, (int32_t)(end < rows ? end : rows), -1, 0};
        }
        d->head_tile_count[t] = count;
    }
    return true;
}

/* The chunk's runs of one slot, those of variants cut into groups of at most `most` rows. Returns
 * how many. */
static uint32_t groups_of(const cuda_chunk *chunk, const int32_t *slot, uint32_t most,
                          k_gemm_tile *out) {
    const uint32_t end = chunk->first_row + chunk->rows;
    uint32_t count = 0;
    for (uint32_t row = chunk->first_row, stop; row < end; row = stop) {
        stop = row + 1;
        while (stop < end && (slot[row] < 0 || stop - row < most) && slot[stop] == slot[row])
            stop++;
        out[count++] = (k_gemm_tile){(int32_t)row, (int32_t)stop, slot[row], 0};
    }
    return count;
}

/* The chunks' small groups for the rows kernel, or large ones where these are fewer. */
static bool groups_fill(bd_cuda *cuda, const bd_step *step, const int32_t *slot,
                        cuda_fast_step *d) {
    k_gemm_tile *groups =
        cuda_upload_reserve(cuda, step->row_count, sizeof *groups, (const void **)&d->chunk_groups);
    if (!groups) return false;
    uint32_t count = 0;
    for (uint32_t i = 0; i < d->chunk_count; i++) {
        cuda_chunk *chunk = &d->chunks[i];
        const int rows = (int)chunk->rows;
        if (!chunk->slots) continue;
        const uint32_t many = groups_of(chunk, slot, K_ROWS_SMALL, groups + count),
                       few = groups_of(chunk, slot, K_ROWS_LARGE, groups + count);
        const bool wide = few < many && k_rows_takes(rows, (int)few, K_ROWS_LARGE);
        chunk->group_rows = wide ? K_ROWS_LARGE : K_ROWS_SMALL;
        chunk->first_group = count;
        chunk->groups = groups_of(chunk, slot, chunk->group_rows, groups + count);
        count += chunk->groups;
    }
    return true;
}

/* Rows in chunks of K_DECODE_ROWS at most, and in each the runs of one variant as its slots; of
 * more small groups than the rows kernel takes there are two chunks. */
static bool slots_fill(bd_cuda *cuda, const bd_step *step, cuda_fast_step *d) {
    int32_t *columns =
        cuda_upload_reserve(cuda, step->row_count, sizeof *columns, (const void **)&d->columns);
    int32_t *slot =
        cuda_upload_reserve(cuda, step->row_count, sizeof *slot, (const void **)&d->slot);
    if (!columns || !slot) return false;
    uint32_t slots = 0, groups = 0, run = 0; /* groups of the chunk, rows of the last */
    cuda_chunk *chunk = NULL;
    for (uint32_t s = 0; s < step->segment_count; s++) {
        const int32_t overlay = step->segments[s].overlay;
        const uint32_t end = step->segments[s].first_row + step->segments[s].row_count;
        for (uint32_t row = step->segments[s].first_row; row < end; row++) {
            const bool begins = row == step->segments[s].first_row,
                       grows = begins || (overlay >= 0 && run == K_ROWS_SMALL);
            bool fresh = overlay >= 0 && begins;
            if (!chunk || chunk->rows == K_DECODE_ROWS || (fresh && chunk->slots == 16) ||
                (grows && groups == K_ROWS_GROUPS)) {
                chunk = &d->chunks[d->chunk_count++];
                chunk->first_row = row;
                chunk->first_slot = slots;
                fresh = overlay >= 0;
                groups = 1, run = 0;
            } else if (grows) {
                groups++, run = 0;
            }
            if (fresh) columns[slots++] = overlay, chunk->slots++;
            chunk->rows++, run++;
            slot[row] = overlay < 0 ? -1 : (int32_t)chunk->slots - 1;
        }
    }
    return step->row_count <= CUDA_DECODE_ONLY_ROWS || groups_fill(cuda, step, slot, d);
}

bool cuda_fast_step_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_fast_step *d = &cuda->fast_step;
    memset(d, 0, sizeof *d); /* with its padding: recorded steps are found by its bytes */
    d->usable = cuda->fast.usable && overlays_usable(cuda, step);
    if (!d->usable) return true;
    if (!head_fill(cuda, step, d)) return false;
    for (uint32_t s = 0; s < step->segment_count; s++)
        d->any_delta |= step->segments[s].overlay >= 0;
    if (step->row_count <= CUDA_DECODE_ROWS_MAX && !slots_fill(cuda, step, d)) return false;
    return step->row_count <= CUDA_DECODE_ONLY_ROWS || tiles_fill(cuda, step, d);
}

static bd_status decode(bd_cuda *cuda, uint32_t layer, bd_group group, const cuda_chunk *chunk,
                        bd_error *err) {
    cuda_fast *fast = &cuda->fast;
    const cuda_group *g = &fast->groups[group];
    const cuda_fast_step *d = &cuda->fast_step;
    const bool lean = chunk->rows <= K_LEAN_ROWS;
    const uint16_t *x = g->x_data + (size_t)chunk->first_row * g->k;
    if (chunk->slots && !lean) {
        const cudaError_t error =
            k_planes(fast->planes, x, (int)chunk->rows, (int)g->k, cuda->fp16, true, cuda->stream);
        const bd_status s = cuda_check(cuda, error, "bit planes", err);
        if (s != BD_OK) return s;
    }
    const k_decode_args args = {
        .w = fast->w[layer][group],
        .x = g->x[k_decode_tokens((int)chunk->rows) == 64 ? X_BOX_64 : X_BOX_32],
        .w_data = cuda->linears[layer][g->first],
        .x_data = x,
        .first_row = (int32_t)chunk->first_row,
        .planes = fast->planes,
        .overlays = cuda->step.linears +
                    (size_t)(layer * BD_LINEAR_COUNT + g->first) * cuda->step.overlay_count,
        .columns = d->columns + chunk->first_slot,
        .slot = d->slot + chunk->first_row,
        .bias = cuda_group_bias(cuda, layer, group),
        .y = g->y_data + (size_t)chunk->first_row * g->n,
        .workspace = fast->workspace,
        .ticket = &fast->tickets[fast->next_ticket++ % CUDA_TICKETS],
        .rows = (int32_t)chunk->rows,
        .n = (int32_t)g->n,
        .k = (int32_t)g->k,
        .variants = (int32_t)chunk->slots,
        .sm_count = fast->sm_count,
        .fp16 = cuda->fp16,
        .pdl = 1};
    return cuda_check(cuda, (lean ? k_decode_lean : k_decode)(&args, cuda->stream), "decode", err);
}

static double decode_cost(const cuda_fast *fast, const cuda_group *g, const cuda_chunk *chunk) {
    return k_decode_cost((int)g->n, (int)g->k, (int)chunk->rows, (int)chunk->slots, fast->sm_count);
}

static double rows_cost(const cuda_fast *fast, const cuda_group *g, const cuda_chunk *chunk) {
    if (!chunk->groups) return 1e300;
    return k_rows_cost((int)g->n, (int)g->k, (int)chunk->rows, (int)chunk->groups,
                       (int)chunk->group_rows, (int)chunk->slots, fast->sm_count);
}

static bool takes_rows(const cuda_fast *fast, const cuda_group *g, const cuda_chunk *chunk) {
    return rows_cost(fast, g, chunk) < decode_cost(fast, g, chunk);
}

_Static_assert(CUDA_CHUNKS_MAX <= K_DIGITS_CHUNKS, "one launch makes the digits of all chunks");

/* What the rows kernel takes of x, of all chunks that are its; at[]: where each chunk's begin. */
static bd_status digits(bd_cuda *cuda, bd_group group, uint64_t at[CUDA_CHUNKS_MAX],
                        bd_error *err) {
    const cuda_fast *fast = &cuda->fast;
    const cuda_group *g = &fast->groups[group];
    const cuda_fast_step *d = &cuda->fast_step;
    k_digits_args args = {
        .x = g->x_data, .digits = fast->digits, .k = (int32_t)g->k, .fp16 = cuda->fp16, .pdl = 1};
    uint64_t bytes = 0;
    for (uint32_t c = 0; c < d->chunk_count; c++) {
        const cuda_chunk *chunk = &d->chunks[c];
        if (!takes_rows(fast, g, chunk)) continue;
        at[c] = bytes;
        args.chunks[args.chunk_count++] =
            (k_digits_chunk){(int32_t)chunk->first_row, (int32_t)chunk->rows, bytes};
        bytes += k_digits_bytes((int)chunk->rows, (int)g->k);
    }
    if (!args.chunk_count) return BD_OK;
    return cuda_check(cuda, k_digits(&args, cuda->stream), "digits", err);
}

static bd_status rows(bd_cuda *cuda, uint32_t layer, bd_group group, const cuda_chunk *chunk,
                      uint64_t digits_at, bd_error *err) {
    cuda_fast *fast = &cuda->fast;
    const cuda_group *g = &fast->groups[group];
    const cuda_fast_step *d = &cuda->fast_step;
    const k_rows_args args = {
        .w = fast->w[layer][group],
        .x = g->x[k_decode_tokens((int)chunk->rows) == 64 ? X_BOX_64 : X_BOX_32],
        .digits = fast->digits + digits_at,
        .w_data = cuda->linears[layer][g->first],
        .overlays = cuda->step.linears +
                    (size_t)(layer * BD_LINEAR_COUNT + g->first) * cuda->step.overlay_count,
        .columns = d->columns + chunk->first_slot,
        .groups = d->chunk_groups + chunk->first_group,
        .bias = cuda_group_bias(cuda, layer, group),
        .y = g->y_data,
        .workspace = fast->workspace,
        .ticket = &fast->tickets[fast->next_ticket++ % CUDA_TICKETS],
        .group_rows = (int32_t)chunk->group_rows,
        .first_row = (int32_t)chunk->first_row,
        .rows = (int32_t)chunk->rows,
        .n = (int32_t)g->n,
        .k = (int32_t)g->k,
        .group_count = (int32_t)chunk->groups,
        .variants = (int32_t)chunk->slots,
        .sm_count = fast->sm_count,
        .fp16 = cuda->fp16,
        .pdl = 1};
    return cuda_check(cuda, k_rows(&args, cuda->stream), "rows of many variants", err);
}

typedef struct gemm_choice {
    uint32_t tile; /* index of tile_tokens */
    int split;
    double cost;
} gemm_choice;

static gemm_choice choose_tile(const cuda_fast *fast, uint32_t n, uint32_t k,
                               const uint32_t tile_count[CUDA_TILES]) {
    gemm_choice best = {.cost = 1e300};
    for (uint32_t t = 0; t < CUDA_TILES; t++)
        for (int split = 1; split <= (t == 0 ? 4 : 2); split *= 2) {
            const double cost = k_gemm_cost((int)n, (int)k, (int)tile_tokens[t], split,
                                            (int)tile_count[t], fast->sm_count);
            if (cost < best.cost * 0.999) best = (gemm_choice){t, split, cost};
        }
    return best;
}

static double chunks_cost(const cuda_fast *fast, const cuda_group *g, const cuda_fast_step *d) {
    double cost = 0;
    for (uint32_t c = 0; c < d->chunk_count; c++)
        cost += fmin(decode_cost(fast, g, &d->chunks[c]), rows_cost(fast, g, &d->chunks[c]));
    return cost;
}

static const int boxes[CUDA_TILES] = {X_BOX_128, X_BOX_64, X_BOX_32}; /* half a tile of x */

bd_status cuda_fast_head_run(bd_cuda *cuda, float *logits, bd_error *err) {
    const cuda_fast *fast = &cuda->fast;
    const cuda_fast_step *d = &cuda->fast_step;
    const gemm_choice choice =
        choose_tile(fast, cuda->shape.vocab, cuda->shape.hidden, d->head_tile_count);
    const uint32_t t = choice.tile;
    const k_gemm_args args = {.w = fast->head.w,
                              .x = fast->head.x[boxes[t]],
                              .y = fast->head.x[X_BOX_32], /* none; a map that can be fetched */
                              .wide = logits,
                              .wide_stride = (int32_t)cuda->head_stride,
                              .tiles = d->head_tiles[t],
                              .tile_count = (int32_t)d->head_tile_count[t],
                              .n = (int32_t)cuda->shape.vocab,
                              .k = (int32_t)cuda->shape.hidden,
                              .fp16 = cuda->fp16,
                              .group = 8,
                              .sm_count = fast->sm_count,
                              .pdl = 1};
    return cuda_check(cuda, k_gemm(&args, (int)tile_tokens[t], choice.split, false, cuda->stream),
                      "head", err);
}

static bd_status prefill(bd_cuda *cuda, uint32_t layer, bd_group group, gemm_choice choice,
                         bd_error *err) {
    cuda_fast *fast = &cuda->fast;
    const cuda_group *g = &fast->groups[group];
    const cuda_fast_step *d = &cuda->fast_step;
    const uint32_t t = choice.tile;
    const k_gemm_args args = {.w = fast->w[layer][group],
                              .x = g->x[boxes[t]],
                              .y = g->y,
                              .w_data = cuda->linears[layer][g->first],
                              .y_data = g->y_data,
                              .bias = cuda_group_bias(cuda, layer, group),
                              .overlays = cuda->step.linears +
                                          (size_t)(layer * BD_LINEAR_COUNT + g->first) *
                                              cuda->step.overlay_count,
                              .tiles = d->tiles[t],
                              .tile_count = (int32_t)d->tile_count[t],
                              .n = (int32_t)g->n,
                              .k = (int32_t)g->k,
                              .fp16 = cuda->fp16,
                              .group = 8,
                              .sm_count = fast->sm_count,
                              .pdl = 1};
    return cuda_check(cuda,
                      k_gemm(&args, (int)tile_tokens[t], choice.split, d->any_delta, cuda->stream),
                      "prefill", err);
}

bd_status cuda_fast_linear(bd_cuda *cuda, uint32_t layer, bd_group group, bd_error *err) {
    const cuda_fast_step *d = &cuda->fast_step;
    const cuda_group *g = &cuda->fast.groups[group];
    bd_status s = BD_OK;
    if (d->tiles[0]) {
        const gemm_choice choice = choose_tile(&cuda->fast, g->n, g->k, d->tile_count);
        const double chunked = d->chunk_count ? chunks_cost(&cuda->fast, g, d) : 1e300;
        if (choice.cost <= chunked) return prefill(cuda, layer, group, choice, err);
    }
    uint64_t at[CUDA_CHUNKS_MAX];
    s = digits(cuda, group, at, err);
    for (uint32_t c = 0; s == BD_OK && c < d->chunk_count; c++) {
        const cuda_chunk *chunk = &d->chunks[c];
        if (takes_rows(&cuda->fast, g, chunk))
            s = rows(cuda, layer, group, chunk, at[c], err);
        else
            s = decode(cuda, layer, group, chunk, err);
    }
    return s;
}
