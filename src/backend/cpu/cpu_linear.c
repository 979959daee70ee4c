/* cpu_linear.c - y = x (W + sum of planes + LoRA)^T + bias for a whole mixed batch, in blocks of
 * output rows.
 *
 * A task is a block of rows of one weight matrix and does everything for it, for all rows of the
 * batch: base rows:   the weights are read as they are, from memory for the first rows and from the
 * cache for the others (dot kernels); short segments:   a base product as above, then their own
 * bits on top (sign_dot, from tables of each row's sums); long segments:   the block is expanded to
 * float32 in cache-sized tiles, tile + planes = the variant's own weights, multiplied by all rows
 * of the segment; a head in full:   the variant's own matrix instead of the base's, read as it is.
 * No matrix is ever expanded as a whole. Owner: the executor thread; blocks are spread over the
 * pool.
 */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "cpu.h"

#define TARGETS_MAX 3u

typedef struct target { /* one matrix of a group */
    const bd_cpu_matrix *w;
    const float *bias; /* the base's, or NULL */
    uint32_t linear;   /* index in bd_overlay.linears; UINT32_MAX: the head */
    float *y;          /* row-major; NULL: the worker's own block (the up projection) */
    uint32_t y_stride;
    uint32_t first_task;
} target;

typedef struct linear_job {
    bd_cpu *cpu;
    const float *x; /* [rows][k] */
    bd_cpu_run *runs;
    uint32_t rows, k, run_count;
    uint32_t target_count, block_n, task_count, table_rows;
    bool gated, lora;
    target targets[TARGETS_MAX];
} linear_job;

typedef struct block { /* of a task */
    const linear_job *job;
    const target *to;
    uint32_t n0, n1;
    float *y; /* of row 0, output n0 */
    uint32_t y_stride, worker;
} block;

/* y (+)= x tile^T, all float32 and row-major; the tile is [n][depth] without gaps. */
typedef struct multiply_job {
    const float *x, *tile;
    float *y;
    uint32_t rows, n, depth, x_stride, y_stride;
    bool add;
} multiply_job;

/* The piece of an overlay that covers output n: outputs [first, end), whose data start at first. */
typedef struct part {
    const bd_overlay_linear *linear; /* NULL: nothing but the base */
    uint32_t first, end;
} part;

static part part_at(const target *to, const bd_overlay *overlay, uint32_t n, uint32_t n1) {
    part piece = {NULL, 0, n1};
    if (overlay == NULL) return piece;
    if (to->linear != UINT32_MAX) {
        if (overlay->linears != NULL) piece.linear = &overlay->linears[to->linear];
        return piece;
    }
    if (overlay->head == NULL || overlay->block_count == 0) return piece;
    BD_ASSERT(overlay->block_rows > 0);
    const uint32_t index = n / overlay->block_rows;
    if (index >= overlay->block_count) return piece;
    piece.linear = &overlay->head[index];
    piece.first = index * overlay->block_rows;
    if (overlay->block_rows < n1 - piece.first) piece.end = piece.first + overlay->block_rows;
    return piece;
}

static bool has_planes(const target *to, const bd_overlay *overlay, uint32_t n0, uint32_t n1) {
    part piece;
    for (uint32_t n = n0; n < n1; n = piece.end) {
        piece = part_at(to, overlay, n, n1);
        if (piece.linear != NULL && piece.linear->plane_count > 0) return true;
    }
    return false;
}

/* Multiplies by its own weights, rebuilt; else by the base's, with planes on top if it has any. */
static bool is_long(const block *b, const bd_cpu_run *run) {
    return run->table_row == BD_CPU_NO_TABLE && has_planes(b->to, run->overlay, b->n0, b->n1);
}

/* Multiplies by a head of its own and never by the base's. */
static bool is_whole(const block *b, const bd_cpu_run *run) {
    return b->to->linear == UINT32_MAX && run->overlay != NULL && run->overlay->full_head.count > 0;
}

static bool is_shared(const block *b, const bd_cpu_run *run) {
    return !is_long(b, run) && !is_whole(b, run);
}

static const uint8_t *matrix_row(const bd_cpu_matrix *w, uint32_t n, uint32_t k) {
    return w->data + n * w->stride_bytes + k * bd_dtype_bytes(w->dtype);
}

/* Rows side by side that are multiplied by weights as they are. */
typedef struct band {
    const float *x[BD_CPU_BAND_ROWS];
    float *y[BD_CPU_BAND_ROWS];
    uint32_t rows;
} band;

static void multiply_band(const block *b, const band *rows) {
    const linear_job *job = b->job;
    const bd_cpu_matrix *w = b->to->w;
    job->cpu->kernels->dot[w->dtype](&(bd_cpu_dot){.x = rows->x,
                                                   .y = rows->y,
                                                   .rows = rows->rows,
                                                   .n = b->n1 - b->n0,
                                                   .k = job->k,
                                                   .w = matrix_row(w, b->n0, 0),
                                                   .stride_bytes = w->stride_bytes});
}

/* Base product of all rows that share it, straight from the weights, which come from memory for the
 * first rows and from the cache for the others. */
static void base_direct(const block *b) {
    const linear_job *job = b->job;
    band rows = {.rows = 0};
    for (uint32_t i = 0; i < job->run_count; i++) {
        const bd_cpu_run *run = &job->runs[i];
        if (!is_shared(b, run)) continue;
        for (uint32_t r = run->first; r < run->first + run->count; r++) {
            rows.x[rows.rows] = job->x + (size_t)r * job->k;
            rows.y[rows.rows++] = b->y + (size_t)r * b->y_stride;
            if (rows.rows < BD_CPU_BAND_ROWS) continue;
            multiply_band(b, &rows);
            rows.rows = 0;
        }
    }
    if (rows.rows > 0) multiply_band(b, &rows);
}

/* Eight rows at a time, so that they stay in the first cache while the tile streams from the
 * second. They are copied side by side: rows of the batch are often a multiple of 4096 bytes apart
 * and would evict each other. */
static void multiply(const bd_cpu *cpu, const multiply_job *m) {
    static_assert(BD_CPU_LORA_RANK_MAX <= BD_CPU_TILE_K,
                  "a LoRA pair's inner dimension is one tile deep");
    const float *x[BD_CPU_PASS_ROWS];
    float *y[BD_CPU_PASS_ROWS];
    _Alignas(64) float rows_copy[BD_CPU_PASS_ROWS * (BD_CPU_TILE_K + 16u)];
    for (uint32_t first = 0; first < m->rows; first += BD_CPU_PASS_ROWS) {
        const uint32_t rows =
            m->rows - first < BD_CPU_PASS_ROWS ? m->rows - first : BD_CPU_PASS_ROWS;
        for (uint32_t r = 0; r < rows; r++) {
            float *copy = rows_copy + r * (BD_CPU_TILE_K + 16u);
            memcpy(copy, m->x + (size_t)(first + r) * m->x_stride, m->depth * sizeof *copy);
            x[r] = copy;
            y[r] = m->y + (size_t)(first + r) * m->y_stride;
        }
        cpu->kernels->dot[BD_DTYPE_F32](&(bd_cpu_dot){.x = x,
                                                      .y = y,
                                                      .rows = rows,
                                                      .n = m->n,
                                                      .k = m->depth,
                                                      .add = m->add,
                                                      .w = (const uint8_t *)m->tile,
                                                      .stride_bytes = m->depth * sizeof(float)});
    }
}

static void tile_multiply(const block *b, const float *tile, const bd_cpu_run *run, uint32_t k0,
                          uint32_t depth) {
    const linear_job *job = b->job;
    const multiply_job m = {.x = job->x + (size_t)run->first * job->k + k0,
                            .x_stride = job->k,
                            .rows = run->count,
                            .tile = tile,
                            .n = b->n1 - b->n0,
                            .depth = depth,
                            .y = b->y + (size_t)run->first * b->y_stride,
                            .y_stride = b->y_stride,
                            .add = k0 > 0};
    multiply(job->cpu, &m);
}

/* out = tile + the overlay's planes, for the tile at depth k0; out == tile is fine. */
static void tile_add_planes(const block *b, const bd_overlay *overlay, float *out,
                            const float *tile, uint32_t k0, uint32_t depth) {
    const bd_cpu_kernels *kernels = b->job->cpu->kernels;
    part piece;
    for (uint32_t n = b->n0; n < b->n1; n = piece.end) {
        piece = part_at(b->to, overlay, n, b->n1);
        const uint32_t planes = piece.linear != NULL ? piece.linear->plane_count : 0;
        for (uint32_t i = n; i < piece.end; i++) {
            const float *from = tile + (size_t)(i - b->n0) * depth;
            float *row = out + (size_t)(i - b->n0) * depth;
            if (planes == 0 && row != from) memcpy(row, from, depth * sizeof *row);
            for (uint32_t p = 0; p < planes; p++) {
                const bd_plane *plane = &piece.linear->planes[p];
                const uint8_t *bits = bd_cpu_plane_at(plane->bits, b->job->k, i - piece.first, k0);
                kernels->add_signs(row, p == 0 ? from : row, bits, depth,
                                   plane->scale[i - piece.first]);
            }
        }
    }
}

static void long_tiled(const block *b) {
    const linear_job *job = b->job;
    const bd_cpu_matrix *w = b->to->w;
    float *tile = bd_cpu_row(job->cpu, BD_CPU_TILES, b->worker, 2 * bd_cpu_tile_floats());
    /* One run alone needs no copy of the base tile. */
    float *own = job->run_count == 1 ? tile : tile + bd_cpu_tile_floats();
    for (uint32_t k0 = 0; k0 < job->k; k0 += BD_CPU_TILE_K) {
        const uint32_t depth = job->k - k0 < BD_CPU_TILE_K ? job->k - k0 : BD_CPU_TILE_K;
        for (uint32_t n = b->n0; n < b->n1; n++) {
            job->cpu->kernels->to_f32(tile + (size_t)(n - b->n0) * depth, matrix_row(w, n, k0),
                                      w->dtype, depth);
        }
        for (uint32_t i = 0; i < job->run_count; i++) {
            const bd_cpu_run *run = &job->runs[i];
            if (!is_long(b, run)) continue;
            tile_add_planes(b, run->overlay, own, tile, k0, depth);
            tile_multiply(b, own, run, k0, depth);
        }
    }
}

static float *sum_table(const linear_job *job, uint32_t table_row) {
    return bd_cpu_f32(job->cpu, BD_CPU_TABLES) + table_row * bd_cpu_table_floats(job->k);
}

static bd_cpu_signs signs_of(const block *b, const part *piece, uint32_t plane, uint32_t n) {
    const bd_plane *bits = &piece->linear->planes[plane];
    return (bd_cpu_signs){.plane = bits->bits,
                          .scale = bits->scale + (n - piece->first),
                          .first = n - piece->first,
                          .count = piece->end - n,
                          .words = bd_cpu_plane_words(b->job->k)};
}

/* A plane of a piece, from output n on, for all rows of a run. */
static void add_plane(const block *b, const bd_cpu_run *run, const part *piece, uint32_t plane,
                      uint32_t n) {
    const linear_job *job = b->job;
    const float *tables[BD_CPU_SIGN_ROWS];
    float *y[BD_CPU_SIGN_ROWS];
    bd_cpu_signs signs = signs_of(b, piece, plane, n);
    signs.table = tables;
    signs.y = y;
    for (uint32_t r = 0; r < run->count; r += signs.rows) {
        signs.rows = run->count - r < BD_CPU_SIGN_ROWS ? run->count - r : BD_CPU_SIGN_ROWS;
        for (uint32_t i = 0; i < signs.rows; i++) {
            tables[i] = sum_table(job, run->table_row + r + i);
            y[i] = b->y + (size_t)(run->first + r + i) * b->y_stride + (n - b->n0);
        }
        job->cpu->kernels->sign_dot(&signs);
    }
}

/* The planes from `first_plane` on. */
static void add_short_signs(const block *b, const bd_cpu_run *run, uint32_t first_plane) {
    part piece;
    for (uint32_t n = b->n0; n < b->n1; n = piece.end) {
        piece = part_at(b->to, run->overlay, n, b->n1);
        const uint32_t planes = piece.linear != NULL ? piece.linear->plane_count : 0;
        for (uint32_t p = first_plane; p < planes; p++)
            add_plane(b, run, &piece, p, n);
    }
}

/* The base product of a block's only row and its first plane in one pass, where that is possible.
 */
static bool base_and_signs(const block *b, const bd_cpu_run *run) {
    const linear_job *job = b->job;
    const bd_cpu_matrix *w = b->to->w;
    if (run->count != 1 || run->table_row == BD_CPU_NO_TABLE || w->dtype != BD_DTYPE_BF16)
        return false;
    const part piece = part_at(b->to, run->overlay, b->n0, b->n1);
    if (piece.linear == NULL || piece.linear->plane_count == 0 || piece.end != b->n1) return false;
    if (job->cpu->kernels->dot_signs == NULL) return false;
    const float *x = job->x + (size_t)run->first * job->k, *table = sum_table(job, run->table_row);
    float *y = b->y + (size_t)run->first * b->y_stride;
    bd_cpu_signs signs = signs_of(b, &piece, 0, b->n0);
    signs.table = &table;
    signs.y = &y;
    signs.rows = 1;
    job->cpu->kernels->dot_signs(&(bd_cpu_dot){.x = &x,
                                               .y = &y,
                                               .rows = 1,
                                               .n = b->n1 - b->n0,
                                               .k = job->k,
                                               .w = matrix_row(w, b->n0, 0),
                                               .stride_bytes = w->stride_bytes},
                                 &signs);
    return true;
}

static float *lora_row(const linear_job *job, uint32_t row, const target *to) {
    return bd_cpu_row(job->cpu, BD_CPU_LORA, row, TARGETS_MAX * BD_CPU_LORA_RANK_MAX) +
           (size_t)(to - job->targets) * BD_CPU_LORA_RANK_MAX;
}

static void add_lora(const block *b, const bd_cpu_run *run, const part *piece, uint32_t n) {
    const linear_job *job = b->job;
    const bd_overlay_linear *linear = piece->linear;
    const uint32_t rank = linear->lora_rank, count = piece->end - n;
    const float *weights = linear->lora_b + (size_t)(n - piece->first) * rank;
    float *y = b->y + (size_t)run->first * b->y_stride + (n - b->n0);
    const float *t = lora_row(job, run->first, b->to);
    const uint32_t t_stride = TARGETS_MAX * BD_CPU_LORA_RANK_MAX;
    const multiply_job m = {.x = t,
                            .x_stride = t_stride,
                            .tile = weights,
                            .y = y,
                            .y_stride = b->y_stride,
                            .rows = run->count,
                            .n = count,
                            .depth = rank,
                            .add = true};
    multiply(job->cpu, &m);
}

/* What comes on top of the products: LoRA, then the bias, the overlay's if it has one. */
static void finish_run(const block *b, const bd_cpu_run *run) {
    part piece;
    for (uint32_t n = b->n0; n < b->n1; n = piece.end) {
        piece = part_at(b->to, run->overlay, n, b->n1);
        if (piece.linear != NULL && piece.linear->lora_rank > 0) add_lora(b, run, &piece, n);
        const float *bias = b->to->bias != NULL ? b->to->bias + n : NULL;
        if (piece.linear != NULL && piece.linear->bias != NULL)
            bias = piece.linear->bias + (n - piece.first);
        if (bias == NULL) continue;
        for (uint32_t r = run->first; r < run->first + run->count; r++) {
            float *y = b->y + (size_t)r * b->y_stride + (n - b->n0);
            for (uint32_t i = 0; i < piece.end - n; i++)
                y[i] += bias[i];
        }
    }
}

/* The head's outputs [n0, n1) of a run from rows that its overlay keeps whole; y: of the first
 * logits row, output n0. */
static void multiply_whole(const linear_job *job, const bd_cpu_run *run,
                           const bd_overlay_rows *rows, uint32_t n0, uint32_t n1, float *y) {
    const uint32_t stride = job->targets[0].y_stride, run_end = run->first + run->count;
    const float *from[BD_CPU_BAND_ROWS];
    float *to[BD_CPU_BAND_ROWS];
    const size_t row_bytes = job->k * bd_dtype_bytes(BD_DTYPE_BF16);
    for (uint32_t n = n0, end; n < n1; n = end) {
        const uint32_t index = n / rows->block_rows, at = n % rows->block_rows,
                       left = rows->block_rows - at;
        end = left < n1 - n ? n + left : n1;
        for (uint32_t r = run->first; r < run_end;) {
            uint32_t count = 0;
            for (; count < BD_CPU_BAND_ROWS && r < run_end; r++, count++) {
                from[count] = job->x + (size_t)r * job->k;
                to[count] = y + (size_t)r * stride + (n - n0);
            }
            job->cpu->kernels->dot[BD_DTYPE_BF16](
                &(bd_cpu_dot){.x = from,
                              .y = to,
                              .rows = count,
                              .n = end - n,
                              .k = job->k,
                              .w = (const uint8_t *)rows->blocks[index] + at * row_bytes,
                              .stride_bytes = row_bytes});
        }
    }
}

static void compute_block(const block *b) {
    const linear_job *job = b->job;
    const bd_cpu_run *only = NULL; /* of the shared ones, when their rows are one */
    uint32_t shared_rows = 0;
    bool any_long = false;
    for (uint32_t i = 0; i < job->run_count; i++) {
        if (is_long(b, &job->runs[i])) any_long = true;
        if (!is_shared(b, &job->runs[i])) continue;
        shared_rows += job->runs[i].count;
        only = &job->runs[i];
    }
    if (any_long) long_tiled(b);
    const bd_cpu_run *fused = shared_rows == 1 && base_and_signs(b, only) ? only : NULL;
    if (shared_rows > 0 && fused == NULL) base_direct(b);
    for (uint32_t i = 0; i < job->run_count; i++) {
        const bd_cpu_run *run = &job->runs[i];
        if (is_whole(b, run))
            multiply_whole(job, run, &run->overlay->full_head, b->n0, b->n1, b->y);
        if (run->table_row != BD_CPU_NO_TABLE) add_short_signs(b, run, run == fused ? 1 : 0);
        finish_run(b, run);
    }
}

/* act = activation(gate) * up, where gate is in act already. */
static void apply_gate(const bd_cpu *cpu, const block *gate, const block *up) {
    const uint32_t count = gate->n1 - gate->n0;
    for (uint32_t r = 0; r < gate->job->rows; r++) {
        float *g = gate->y + (size_t)r * gate->y_stride;
        const float *u = up->y + (size_t)r * up->y_stride;
        for (uint32_t i = 0; i < count; i++) {
            const float x = g[i];
            if (cpu->config->activation == BD_ACT_SILU) {
                g[i] = x / (1.0f + expf(-x)) * u[i];
            } else {
                const float root_two_over_pi = 0.797884560802865356f;
                g[i] = 0.5f * x * (1.0f + tanhf(root_two_over_pi * (x + 0.044715f * x * x * x))) *
                       u[i];
            }
        }
    }
}

static void linear_task(void *ctx, uint32_t index, uint32_t worker) {
    const linear_job *job = ctx;
    uint32_t t = 0;
    while (t + 1 < job->target_count && index >= job->targets[t + 1].first_task)
        t++;
    const target *to = &job->targets[t];
    const uint32_t n0 = (index - to->first_task) * job->block_n;
    const uint32_t n1 = to->w->n - n0 < job->block_n ? to->w->n : n0 + job->block_n;
    const block first = {job, to, n0, n1, to->y + n0, to->y_stride, worker};
    compute_block(&first);
    if (!job->gated) return;
    const block second = {
        job,
        &job->targets[1],
        n0,
        n1,
        bd_cpu_row(job->cpu, BD_CPU_UP, worker, job->cpu->options.rows_max * BD_CPU_TILE_N),
        BD_CPU_TILE_N,
        worker};
    compute_block(&second);
    apply_gate(job->cpu, &first, &second);
}

static void scale_rows(float *const *rows, uint32_t count, uint32_t columns, float scale) {
    for (uint32_t r = 0; r < count; r++) {
        for (uint32_t j = 0; j < columns; j++)
            rows[r][j] *= scale;
    }
}

/* lora_scale * x A^T of rows [8 index, 8 index + 8), for every run and matrix with a LoRA pair. */
static void lora_task(void *ctx, uint32_t index, uint32_t worker) {
    const linear_job *job = ctx;
    (void)worker;
    const uint32_t begin = index * BD_CPU_PASS_ROWS;
    const uint32_t end =
        job->rows - begin < BD_CPU_PASS_ROWS ? job->rows : begin + BD_CPU_PASS_ROWS;
    for (uint32_t i = 0; i < job->run_count; i++) {
        const bd_cpu_run *run = &job->runs[i];
        const uint32_t from = run->first > begin ? run->first : begin;
        const uint32_t to = run->first + run->count < end ? run->first + run->count : end;
        if (from >= to) continue;
        for (uint32_t t = 0; t < job->target_count; t++) {
            const target *matrix = &job->targets[t];
            const bd_overlay_linear *linear = part_at(matrix, run->overlay, 0, matrix->w->n).linear;
            if (linear == NULL || linear->lora_rank == 0) continue;
            const float *x[BD_CPU_PASS_ROWS];
            float *y[BD_CPU_PASS_ROWS];
            for (uint32_t r = from; r < to; r++) {
                x[r - from] = job->x + (size_t)r * job->k;
                y[r - from] = lora_row(job, r, matrix);
            }
            job->cpu->kernels->dot[BD_DTYPE_F32](
                &(bd_cpu_dot){.x = x,
                              .y = y,
                              .rows = to - from,
                              .n = linear->lora_rank,
                              .k = job->k,
                              .w = (const uint8_t *)linear->lora_a,
                              .stride_bytes = job->k * sizeof(float)});
            scale_rows(y, to - from, linear->lora_rank, linear->lora_scale);
        }
    }
}

/* Notes whether any run has a LoRA pair; its rank must fit the workspace, and all blocks of a head
 * share one A and one scale. */
static bd_status check_lora(linear_job *job, bd_error *err) {
    for (uint32_t i = 0; i < job->run_count; i++) {
        for (uint32_t t = 0; t < job->target_count; t++) {
            const target *to = &job->targets[t];
            const bd_overlay_linear *first = part_at(to, job->runs[i].overlay, 0, to->w->n).linear;
            part piece;
            for (uint32_t n = 0; n < to->w->n; n = piece.end) {
                piece = part_at(to, job->runs[i].overlay, n, to->w->n);
                if (piece.linear == NULL || piece.linear->lora_rank == 0) continue;
                if (piece.linear->lora_rank > BD_CPU_LORA_RANK_MAX) {
                    return bd_fail(err, BD_E_UNSUPPORTED, "lora_rank",
                                   "%u is above the cpu backend's %u", piece.linear->lora_rank,
                                   BD_CPU_LORA_RANK_MAX);
                }
                BD_ASSERT(first != NULL); /* a block behind the first one exists only with it */
                BD_ASSERT(piece.linear->lora_a == first->lora_a &&
                          piece.linear->lora_rank == first->lora_rank);
                BD_ASSERT(piece.linear->lora_scale == first->lora_scale);
                job->lora = true;
            }
        }
    }
    return BD_OK;
}

static void table_task(void *ctx, uint32_t index, uint32_t worker) {
    const linear_job *job = ctx;
    (void)worker;
    for (uint32_t i = 0; i < job->run_count; i++) {
        const bd_cpu_run *run = &job->runs[i];
        if (run->table_row == BD_CPU_NO_TABLE || index < run->table_row ||
            index - run->table_row >= run->count)
            continue;
        const float *x = job->x + (size_t)(run->first + (index - run->table_row)) * job->k;
        job->cpu->kernels->sum_table(sum_table(job, index), x, job->k);
        return;
    }
}

/* Gives runs of [from, to) rows with planes their sum tables, as far as there is room. */
static void give_tables(linear_job *job, uint32_t from, uint32_t to) {
    for (uint32_t i = 0; i < job->run_count; i++) {
        bd_cpu_run *run = &job->runs[i];
        if (run->count < from || run->count >= to ||
            run->count > BD_CPU_TABLE_ROWS_MAX - job->table_rows)
            continue;
        bool planes = false;
        for (uint32_t t = 0; t < job->target_count; t++) {
            planes = planes || has_planes(&job->targets[t], run->overlay, 0, job->targets[t].w->n);
        }
        if (!planes) continue;
        run->table_row = job->table_rows;
        job->table_rows += run->count;
    }
}

/* The sum tables of all short runs. */
static void make_tables(linear_job *job) {
    for (uint32_t i = 0; i < job->run_count; i++)
        job->runs[i].table_row = BD_CPU_NO_TABLE;
    const uint32_t end = job->cpu->kernels->short_rows,
                   few = end < BD_CPU_FEW_ROWS ? end : BD_CPU_FEW_ROWS;
    give_tables(job, 0, few);
    give_tables(job, few, end);
    bd_cpu_for(job->cpu, job->table_rows, 4ull * job->table_rows * job->k, table_task, job);
}

static bd_status run_job(linear_job *job, bd_error *err) {
    bd_cpu *cpu = job->cpu;
    const bd_status status = check_lora(job, err);
    if (status != BD_OK) return status;
    uint64_t n = 0;
    for (uint32_t t = 0; t < job->target_count; t++) {
        BD_ASSERT(job->targets[t].w->data != NULL && job->targets[t].w->k == job->k);
        n += job->targets[t].w->n;
    }
    const uint64_t work = n * job->k * job->rows;
    /* Four tasks a worker level out their speeds; below 24 outputs a task is mostly overhead. */
    uint64_t block_n = n / (4ull * cpu->workers) / 24u * 24u;
    if (block_n > BD_CPU_TILE_N) block_n = BD_CPU_TILE_N;
    job->block_n = block_n < 24 ? 24 : (uint32_t)block_n;
    job->task_count = 0;
    make_tables(job);
    for (uint32_t t = 0; t < job->target_count; t++) {
        job->targets[t].first_task = job->task_count;
        if (job->gated && t > 0) break;
        job->task_count += (job->targets[t].w->n + job->block_n - 1) / job->block_n;
    }
    if (job->lora) {
        const uint32_t parts = (job->rows + BD_CPU_PASS_ROWS - 1) / BD_CPU_PASS_ROWS;
        bd_cpu_for(cpu, parts, (uint64_t)job->rows * job->k * 16u, lora_task, job);
    }
    bd_cpu_for(cpu, job->task_count, work, linear_task, job);
    return BD_OK;
}

static void add_target(linear_job *job, uint32_t layer, bd_linear which, float *y,
                       uint32_t y_stride) {
    const bd_cpu *cpu = job->cpu;
    const uint32_t index = layer * BD_LINEAR_COUNT + (uint32_t)which;
    job->targets[job->target_count++] = (target){.w = &cpu->linears[index],
                                                 .bias = cpu->biases[index],
                                                 .linear = index,
                                                 .y = y,
                                                 .y_stride = y_stride};
}

bd_status bd_cpu_linear(bd_backend *backend, const bd_step *step, uint32_t layer, bd_group group,
                        bd_error *err) {
    bd_cpu *cpu = bd_cpu_of(backend);
    const bd_model_config *c = cpu->config;
    BD_ASSERT(layer < c->layers);
    linear_job job = {.cpu = cpu,
                      .rows = step->row_count,
                      .runs = cpu->buffers[BD_CPU_RUNS],
                      .run_count = cpu->run_count,
                      .x = bd_cpu_f32(cpu, BD_CPU_NORMED),
                      .k = c->hidden};
    switch (group) {
    case BD_GROUP_QKV:
        add_target(&job, layer, BD_LINEAR_Q, bd_cpu_f32(cpu, BD_CPU_Q), cpu->q_dim);
        add_target(&job, layer, BD_LINEAR_K, bd_cpu_f32(cpu, BD_CPU_K), cpu->kv_dim);
        add_target(&job, layer, BD_LINEAR_V, bd_cpu_f32(cpu, BD_CPU_V), cpu->kv_dim);
        break;
    case BD_GROUP_O:
        job.x = bd_cpu_f32(cpu, BD_CPU_ATTN);
        job.k = cpu->q_dim;
        add_target(&job, layer, BD_LINEAR_O, bd_cpu_f32(cpu, BD_CPU_PROJ), c->hidden);
        break;
    case BD_GROUP_GATE_UP:
        job.gated = true;
        add_target(&job, layer, BD_LINEAR_GATE, bd_cpu_f32(cpu, BD_CPU_ACT), c->ffn);
        add_target(&job, layer, BD_LINEAR_UP, NULL, BD_CPU_TILE_N);
        break;
    case BD_GROUP_DOWN:
        job.x = bd_cpu_f32(cpu, BD_CPU_ACT);
        job.k = c->ffn;
        add_target(&job, layer, BD_LINEAR_DOWN, bd_cpu_f32(cpu, BD_CPU_PROJ), c->hidden);
        break;
    }
    const bd_status status = run_job(&job, err);
    if (status != BD_OK || group == BD_GROUP_QKV || group == BD_GROUP_GATE_UP) return status;
    return bd_cpu_sum_ranks(cpu, BD_CPU_PROJ, step->row_count, err);
}

static void cap(const bd_model_config *c, float *logits, uint32_t count) {
    for (uint32_t i = 0; c->logit_softcap > 0.0f && i < count; i++)
        logits[i] = c->logit_softcap * tanhf(logits[i] / c->logit_softcap);
}

static void cap_row(void *ctx, uint32_t index, uint32_t worker) {
    const linear_job *job = ctx;
    (void)worker;
    const bd_model_config *c = job->cpu->config;
    const uint32_t width = bd_cpu_logits_width(job->cpu);
    const uint32_t total = bd_vocab_total(&job->cpu->options);
    float *logits = bd_cpu_row(job->cpu, BD_CPU_LOGITS, index, width);
    uint32_t vocab = total;
    for (uint32_t i = 0; i < job->run_count; i++) {
        const bd_cpu_run *run = &job->runs[i];
        if (index < run->first || index - run->first >= run->count) continue;
        if (run->overlay != NULL) vocab = run->overlay->vocab;
    }
    const uint32_t first = job->cpu->options.vocab_first, each = bd_vocab_each(&job->cpu->options);
    uint32_t known = vocab > first ? vocab - first : 0; /* of this rank's part of the base's */
    if (known > c->vocab) known = c->vocab;
    const bool has_extra = vocab > total && bd_cpu_has_extra_logits(job->cpu);
    const uint32_t extra_end = has_extra ? each + (vocab - total) : each;
    cap(c, logits, known);
    cap(c, logits + each, extra_end - each);
    for (uint32_t i = known; i < each; i++)
        logits[i] = -INFINITY;
    for (uint32_t i = extra_end; i < width; i++)
        logits[i] = -INFINITY;
}

#define EXTRA_TASK_ROWS 32u

/* Logits of EXTRA_TASK_ROWS added vocabulary rows of every run that has them. */
static void extra_task(void *ctx, uint32_t index, uint32_t worker) {
    const linear_job *job = ctx;
    (void)worker;
    const uint32_t n0 = index * EXTRA_TASK_ROWS;
    float *y = job->targets[0].y + bd_vocab_each(&job->cpu->options) + n0;
    for (uint32_t i = 0; i < job->run_count; i++) {
        const bd_cpu_run *run = &job->runs[i];
        const uint32_t extra = run->overlay != NULL ? run->overlay->extra_rows : 0;
        const uint32_t n1 = extra < n0 + EXTRA_TASK_ROWS ? extra : n0 + EXTRA_TASK_ROWS;
        if (n0 < n1) multiply_whole(job, run, &run->overlay->extra_head, n0, n1, y);
    }
}

bd_status bd_cpu_head(bd_backend *backend, const bd_step *step, bd_error *err) {
    bd_cpu *cpu = bd_cpu_of(backend);
    const bd_model_config *c = cpu->config;
    if (step->logits_row_count == 0) return BD_OK;
    for (uint32_t i = 0; i < step->logits_row_count; i++) {
        memcpy(bd_cpu_row(cpu, BD_CPU_HEAD_IN, i, c->hidden),
               bd_cpu_row(cpu, BD_CPU_NORMED, step->logits_rows[i].row, c->hidden),
               c->hidden * sizeof(float));
    }
    linear_job job = {.cpu = cpu,
                      .rows = step->logits_row_count,
                      .runs = cpu->buffers[BD_CPU_HEAD_RUNS],
                      .run_count = cpu->head_run_count,
                      .x = bd_cpu_f32(cpu, BD_CPU_HEAD_IN),
                      .k = c->hidden};
    job.targets[job.target_count++] = (target){.w = c->tied ? &cpu->embed : &cpu->head,
                                               .linear = UINT32_MAX,
                                               .y = bd_cpu_f32(cpu, BD_CPU_LOGITS),
                                               .y_stride = bd_cpu_logits_width(cpu)};
    const bd_status status = run_job(&job, err);
    if (status != BD_OK) return status;
    const uint32_t extra = bd_cpu_has_extra_logits(cpu) ? cpu->options.extra_vocab_max : 0;
    bd_cpu_for(cpu, (extra + EXTRA_TASK_ROWS - 1) / EXTRA_TASK_ROWS,
               (uint64_t)extra * c->hidden * job.rows, extra_task, &job);
    const uint64_t cost = c->logit_softcap > 0.0f ? 16 : 1;
    bd_cpu_for(cpu, step->logits_row_count, cost * step->logits_row_count * c->vocab, cap_row,
               &job);
    return BD_OK;
}
