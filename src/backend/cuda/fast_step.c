/* fast_step.c - how the rows of a step are shared out to the kernels of the fast path: tiles for
 * prefill's, chunks for decode's, and for each group of matrices who takes what. All of it follows
 * from shapes and the step's rows alone, so a step repeated is bitwise equal. */
#include <math.h>
#include <string.h>

#include "cuda_internal.h"
#include "fast.h"

const uint32_t cuda_tile_tokens[CUDA_TILES] = {256, 128, 64};

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

static uint32_t tiles_of(const bd_segment *segment, uint32_t tokens) {
    return (segment->row_count + tokens - 1) / tokens;
}

bool cuda_fast_tiles_fill(bd_cuda *cuda, const bd_segment *segments, uint32_t count,
                          cuda_tiles *out) {
    for (uint32_t t = 0; t < CUDA_TILES; t++) {
        const uint32_t tokens = cuda_tile_tokens[t];
        out->count[t] = 0;
        for (uint32_t s = 0; s < count; s++)
            out->count[t] += tiles_of(&segments[s], tokens);
        k_gemm_tile *tile =
            cuda_upload_reserve(cuda, out->count[t], sizeof *tile, (const void **)&out->at[t]);
        if (!tile) return false;
        for (uint32_t s = 0; s < count; s++) {
            const bd_segment *segment = &segments[s];
            const uint32_t end = segment->first_row + segment->row_count;
            for (uint32_t row = segment->first_row; row < end; row += tokens)
                *tile++ =
                    (k_gemm_tile){(int32_t)row, (int32_t)(row + tokens < end ? row + tokens : end),
                                  segment->overlay, 0};
        }
    }
    return true;
}

/* The chunk's runs of one slot, those of variants cut into groups of at most `most` rows. Returns
 * how many. slot: of the chunk's rows. */
static uint32_t groups_of(const cuda_chunk *chunk, const int32_t *slot, uint32_t most,
                          k_gemm_tile *out) {
    const uint32_t first = chunk->first_row;
    uint32_t count = 0;
    for (uint32_t row = 0, stop; row < chunk->rows; row = stop) {
        stop = row + 1;
        while (stop < chunk->rows && (slot[row] < 0 || stop - row < most) &&
               slot[stop] == slot[row])
            stop++;
        out[count++] = (k_gemm_tile){(int32_t)(first + row), (int32_t)(first + stop), slot[row], 0};
    }
    return count;
}

bool cuda_fast_lists_reserve(bd_cuda *cuda, uint32_t rows, cuda_chunks *out,
                             cuda_chunk_lists *lists) {
    lists->columns =
        cuda_upload_reserve(cuda, rows, sizeof *lists->columns, (const void **)&out->columns);
    lists->slot = cuda_upload_reserve(cuda, rows, sizeof *lists->slot, (const void **)&out->slot);
    lists->groups =
        cuda_upload_reserve(cuda, rows, sizeof *lists->groups, (const void **)&out->groups);
    return lists->columns && lists->slot && lists->groups;
}

/* The chunks' small groups for the rows kernel, or large ones where these are fewer. */
static void groups_fill(const cuda_chunk_lists *lists, cuda_chunks *d) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < d->count; i++) {
        cuda_chunk *chunk = &d->at[i];
        const int32_t *slot = lists->slot + chunk->slot_at;
        k_gemm_tile *groups = lists->groups + count;
        if (!chunk->slots) continue;
        const uint32_t many = groups_of(chunk, slot, K_ROWS_SMALL, groups),
                       few = groups_of(chunk, slot, K_ROWS_LARGE, groups);
        const bool wide = few < many && k_rows_takes((int)chunk->rows, (int)few, K_ROWS_LARGE);
        chunk->group_rows = wide ? K_ROWS_LARGE : K_ROWS_SMALL;
        chunk->first_group = count;
        chunk->groups = groups_of(chunk, slot, chunk->group_rows, groups);
        count += chunk->groups;
    }
}

void cuda_fast_chunks_fill(const bd_segment *segments, uint32_t count, bool grouped,
                           const cuda_chunk_lists *lists, cuda_chunks *d) {
    uint32_t slots = 0, at = 0, groups = 0, run = 0; /* groups of the chunk, rows of the last */
    cuda_chunk *chunk = NULL;
    memset(d->at, 0, sizeof d->at);
    d->count = 0;
    for (uint32_t s = 0; s < count; s++) {
        const bd_segment *segment = &segments[s];
        const int32_t overlay = segment->overlay;
        for (uint32_t i = 0; i < segment->row_count; i++) {
            const bool grows = i == 0 || (overlay >= 0 && run == K_ROWS_SMALL);
            bool fresh = overlay >= 0 && i == 0;
            if (!chunk || chunk->rows == K_DECODE_ROWS || (fresh && chunk->slots == 16) ||
                (grows && groups == K_ROWS_GROUPS)) {
                chunk = &d->at[d->count++];
                chunk->first_row = segment->first_row + i;
                chunk->first_slot = slots;
                chunk->slot_at = at;
                fresh = overlay >= 0;
                groups = 1, run = 0;
            } else if (grows) {
                groups++, run = 0;
            }
            if (fresh) lists->columns[slots++] = overlay, chunk->slots++;
            chunk->rows++, run++;
            lists->slot[at++] = overlay < 0 ? -1 : (int32_t)chunk->slots - 1;
        }
    }
    if (grouped) groups_fill(lists, d);
}

/* ---- What it costs ---- */

static double decode_cost(const cuda_fast *fast, uint32_t n, uint32_t k, const cuda_chunk *chunk) {
    return k_decode_cost((int)n, (int)k, (int)chunk->rows, (int)chunk->slots, fast->sm_count);
}

static double rows_cost(const cuda_fast *fast, uint32_t n, uint32_t k, const cuda_chunk *chunk) {
    if (!chunk->groups) return 1e300;
    return k_rows_cost((int)n, (int)k, (int)chunk->rows, (int)chunk->groups, (int)chunk->group_rows,
                       (int)chunk->slots, fast->sm_count);
}

bool cuda_fast_takes_rows(const cuda_fast *fast, uint32_t n, uint32_t k, const cuda_chunk *chunk) {
    return rows_cost(fast, n, k, chunk) < decode_cost(fast, n, k, chunk);
}

double cuda_fast_chunks_cost(const cuda_fast *fast, uint32_t n, uint32_t k,
                             const cuda_chunks *chunks) {
    double cost = 0;
    for (uint32_t c = 0; c < chunks->count; c++)
        cost +=
            fmin(decode_cost(fast, n, k, &chunks->at[c]), rows_cost(fast, n, k, &chunks->at[c]));
    return cost;
}

cuda_way cuda_fast_tile(const cuda_fast *fast, uint32_t n, uint32_t k,
                        const uint32_t tile_count[CUDA_TILES]) {
    double least = 1e300;
    cuda_way best = {0};
    for (uint32_t t = 0; t < CUDA_TILES; t++)
        for (uint32_t split = 1; split <= (t == 0 ? 4 : 2); split *= 2) {
            const double cost = k_gemm_cost((int)n, (int)k, (int)cuda_tile_tokens[t], (int)split,
                                            (int)tile_count[t], fast->sm_count);
            if (cost >= least * 0.999) continue;
            least = cost;
            best = (cuda_way){.tile_count = tile_count[t], .tile = t, .split = split};
        }
    best.cost_us = (float)least;
    return best;
}

/* ---- Who takes what ---- */

/* The group's rows of segments [0, end) as tiles. */
static cuda_way prefill_way(const cuda_fast *fast, const cuda_group *g, const bd_step *step,
                            uint32_t end) {
    uint32_t count[CUDA_TILES] = {0}, delta = 0;
    for (uint32_t s = 0; s < end; s++) {
        if (step->segments[s].overlay >= 0) delta = 1;
        for (uint32_t t = 0; t < CUDA_TILES; t++)
            count[t] += tiles_of(&step->segments[s], cuda_tile_tokens[t]);
    }
    cuda_way way = {.cost_us = 0};
    if (end) way = cuda_fast_tile(fast, g->n, g->k, count);
    way.delta = delta;
    return way;
}

/* Each group's least: all rows as tiles, or those of segments [0, first) as tiles and the others by
 * the chunks as they are. Returns the sum. */
static double ways_fill(const cuda_fast *fast, const bd_step *step, uint32_t first,
                        const cuda_chunks *chunks, cuda_way ways[CUDA_GROUPS]) {
    double sum = 0;
    for (uint32_t i = 0; i < CUDA_GROUPS; i++) {
        const cuda_group *g = &fast->groups[i];
        if (!g->fast) continue;
        const cuda_way all = prefill_way(fast, g, step, step->segment_count);
        ways[i] = prefill_way(fast, g, step, first);
        ways[i].chunked = chunks->count > 0;
        ways[i].cost_us += (float)cuda_fast_chunks_cost(fast, g->n, g->k, chunks);
        if (all.cost_us <= ways[i].cost_us) ways[i] = all;
        sum += (double)ways[i].cost_us;
    }
    return sum;
}

/* The first of the segments at the step's end that are short, and of few rows together. */
static uint32_t first_short(const bd_step *step) {
    uint32_t s = step->segment_count, rows = 0;
    while (s > 0 && step->segments[s - 1].row_count <= CUDA_SHORT_ROWS &&
           rows + step->segments[s - 1].row_count <= CUDA_DECODE_ROWS_MAX)
        rows += step->segments[--s].row_count;
    return s;
}

/* Where the segments that decode's kernels may take begin: 0 if these take every row, or what costs
 * least of the places where lengths fall. */
static void choose(const cuda_fast *fast, const bd_step *step, const cuda_chunk_lists *lists,
                   cuda_fast_step *d) {
    const uint32_t shorts = first_short(step), count = step->segment_count;
    const uint32_t lowest = step->row_count <= CUDA_DECODE_ROWS_MAX ? 0 : shorts;
    double least = 1e300;
    uint32_t best = count;
    cuda_way ways[CUDA_GROUPS];
    for (uint32_t s = lowest; s <= count; s = s < shorts ? shorts : s + 1) {
        if (s > lowest && s < count &&
            step->segments[s - 1].row_count <= step->segments[s].row_count)
            continue;
        cuda_fast_chunks_fill(step->segments + s, count - s, true, lists, &d->chunks);
        const double cost = ways_fill(fast, step, s, &d->chunks, ways);
        if (cost < least) least = cost, best = s;
    }
    cuda_fast_chunks_fill(step->segments + best, count - best, true, lists, &d->chunks);
    (void)ways_fill(fast, step, best, &d->chunks, d->ways);
}

_Static_assert(sizeof(cuda_way) == 5 * sizeof(uint32_t) + sizeof(float), "no padding");

bool cuda_fast_step_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_fast_step *d = &cuda->fast_step;
    memset(d, 0, sizeof *d); /* with its padding: recorded steps are found by its bytes */
    d->usable = cuda->fast.usable && overlays_usable(cuda, step);
    if (!d->usable) return true;
    if (!cuda_fast_head_fill(cuda, step)) return false;
    cuda_chunk_lists lists;
    const uint32_t rows =
        step->row_count < CUDA_DECODE_ROWS_MAX ? step->row_count : CUDA_DECODE_ROWS_MAX;
    if (!cuda_fast_lists_reserve(cuda, rows, &d->chunks, &lists)) return false;
    if (step->row_count > CUDA_DECODE_ONLY_ROWS) {
        if (!cuda_fast_tiles_fill(cuda, step->segments, step->segment_count, &d->tiles))
            return false;
        choose(&cuda->fast, step, &lists, d);
        return true;
    }
    cuda_fast_chunks_fill(step->segments, step->segment_count, false, &lists, &d->chunks);
    for (uint32_t i = 0; i < CUDA_GROUPS; i++)
        d->ways[i].chunked = 1;
    return true;
}
