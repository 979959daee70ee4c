/* gpu_model.h - a model of random weights and several random variants on the CUDA backend, driven through the operator table
 * alone: what the tests and benchmarks of whole steps share. The operators' order is that of src/model/forward.c. */
#ifndef BD_GPU_MODEL_H
#define BD_GPU_MODEL_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/backend/cuda.h"
#include "bitdelta/base/clock.h"
#include "bitdelta/base/half.h"

#define GPU_MODEL_BLOCK    16u
#define GPU_MODEL_VARIANTS 16u
#define GPU_MODEL_NOISE    (1u << 22)

typedef struct gpu_model {
    bd_model_config config;
    bd_backend_options options;
    const bd_backend_ops *ops;
    bd_backend *backend;
    uint16_t *noise; /* values that every weight's rows are cut from, each row at its own place */
    uint32_t variant_count;
    bd_overlay overlays[GPU_MODEL_VARIANTS];
    bd_overlay_linear *linears[GPU_MODEL_VARIANTS]; /* and the blocks of the head behind them */
} gpu_model;

typedef struct gpu_shape {
    uint32_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab, variants, rows, seqs, len, blocks;
    bd_kernels kernels;
    bd_dtype dtype;
    uint32_t head_rows; /* rows of a block of the variants' heads; 0: they have the base's head */
} gpu_shape;

#define GPU_MODEL_TRY(call)                                                                        \
    do {                                                                                           \
        if ((call) != BD_OK) {                                                                     \
            fprintf(stderr, "%s: %s\n", #call, err.message);                                       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static inline bd_status gpu_model_forward(void *ctx, const bd_step *step, bd_error *err) {
    gpu_model *m = ctx;
    const bd_backend_ops *o = m->ops;
    bd_backend *b = m->backend;
    const uint32_t layers = m->config.layers;
    bd_status s = o->step_begin(b, step, err);
    if (s == BD_OK) s = o->embed(b, step, err);
    for (uint32_t l = 0; l < layers; l++) {
        if (s == BD_OK) s = o->norm_residual(b, step, l, BD_NORM_INPUT, l > 0, l ? l - 1 : 0, BD_NORM_COUNT, err);
        if (s == BD_OK) s = o->linear(b, step, l, BD_GROUP_QKV, err);
        if (s == BD_OK) s = o->rope_kv_write(b, step, l, err);
        if (s == BD_OK) s = o->attention(b, step, l, err);
        if (s == BD_OK) s = o->linear(b, step, l, BD_GROUP_O, err);
        if (s == BD_OK) s = o->norm_residual(b, step, l, BD_NORM_PRE_FFN, true, l, BD_NORM_COUNT, err);
        if (s == BD_OK) s = o->linear(b, step, l, BD_GROUP_GATE_UP, err);
        if (s == BD_OK) s = o->linear(b, step, l, BD_GROUP_DOWN, err);
    }
    if (step->logits_row_count == 0) return s;
    if (s == BD_OK) s = o->norm_residual(b, step, layers, BD_NORM_INPUT, true, layers - 1, BD_NORM_COUNT, err);
    if (s == BD_OK) s = o->head(b, step, err);
    return s == BD_OK ? o->sample(b, step, err) : s;
}

static inline void gpu_model_put(gpu_model *m, int kind, uint32_t layer, uint32_t which, uint32_t rows, uint32_t cols) {
    bd_error err;
    const bd_weight_id id = {.kind = (unsigned)kind, .layer = layer, .which = which};
    /* Rows 14 bytes apart in the noise: no two alike, and a gigabyte needs no gigabyte. */
    const uint64_t start = (layer * 7919u + which * 104729u) % 65536u;
    const bd_weight_view view = {.dtype = BD_DTYPE_BF16, .rows = rows, .cols = cols, .row_stride_bytes = 14, .data = m->noise + start};
    GPU_MODEL_TRY(m->ops->weight_put(m->backend, id, &view, &err));
}

static inline void gpu_model_variant(gpu_model *m, uint32_t v, uint8_t *arena) {
    static const float one = 0.0008f;
    bd_error err;
    const bd_model_config *c = &m->config;
    const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const uint32_t n[BD_LINEAR_COUNT] = {q, kv, kv, c->hidden, c->ffn, c->ffn, c->hidden}, k[BD_LINEAR_COUNT] = {c->hidden, c->hidden, c->hidden, q, c->hidden, c->hidden, c->ffn};
    float *scale = malloc((size_t)(c->ffn > q ? c->ffn : q) * 4 + 4 * (size_t)c->hidden);
    m->linears[v] = calloc((size_t)c->layers * BD_LINEAR_COUNT + c->vocab, sizeof(bd_overlay_linear));
    for (uint32_t l = 0; l < c->layers; l++) {
        uint8_t *at = arena;
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++) {
            bd_overlay_linear *o = &m->linears[v][l * BD_LINEAR_COUNT + i];
            *o = (bd_overlay_linear){.plane_count = 1, .planes[0].bits = at};
            const uint8_t *src = (const uint8_t *)m->noise + (v * 1009u + l * 31u + i) % 4096u;
            GPU_MODEL_TRY(m->ops->plane_put(m->backend, at, n[i], k[i], 0, n[i], src, 22, &err));
            at += m->ops->plane_bytes(n[i], k[i]);
        }
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++) {
            for (uint32_t r = 0; r < n[i]; r++) scale[r] = one * (float)(0.5 + (double)((r * 2654435761u + v) % 1000u) / 1000.0);
            GPU_MODEL_TRY(m->ops->vector_put(m->backend, at, 0, scale, n[i], &err));
            m->linears[v][l * BD_LINEAR_COUNT + i].planes[0].scale = (const float *)(const void *)at;
            at += (size_t)n[i] * 4;
        }
        arena = at + (4096 - (size_t)(at - arena) % 4096) % 4096;
    }
    m->overlays[v] = (bd_overlay){.vocab = c->vocab, .linears = m->linears[v]};
    const uint32_t block_rows = m->options.vocab_block_rows;
    for (uint32_t first = 0; block_rows && first < c->vocab; first += block_rows) {
        const uint32_t rows = c->vocab - first < block_rows ? c->vocab - first : block_rows;
        bd_overlay_linear *block = &m->linears[v][c->layers * BD_LINEAR_COUNT + m->overlays[v].block_count++];
        *block = (bd_overlay_linear){.plane_count = 1, .planes[0].bits = arena};
        GPU_MODEL_TRY(m->ops->plane_put(m->backend, arena, rows, c->hidden, 0, rows, (const uint8_t *)m->noise + (v * 1013u + first) % 4096u, 22, &err));
        arena += m->ops->plane_bytes(rows, c->hidden);
        for (uint32_t r = 0; r < rows; r++) scale[r % c->ffn] = one * (float)(0.5 + (double)((r * 2654435761u + v) % 1000u) / 1000.0);
        for (uint32_t r = 0; r < rows; r += c->ffn) GPU_MODEL_TRY(m->ops->vector_put(m->backend, arena, r, scale, rows - r < c->ffn ? rows - r : c->ffn, &err));
        block->planes[0].scale = (const float *)(const void *)arena;
        arena += (4096 + 4 * (size_t)rows) / 4096 * 4096;
    }
    if (block_rows) m->overlays[v].head = &m->linears[v][c->layers * BD_LINEAR_COUNT], m->overlays[v].block_rows = block_rows;
    GPU_MODEL_TRY(m->ops->put_flush(m->backend, &err));
    free(scale);
}

static inline uint64_t gpu_model_variant_bytes(const gpu_model *m) {
    const bd_model_config *c = &m->config;
    const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    uint64_t bytes = 2 * m->ops->plane_bytes(c->ffn, c->hidden) + m->ops->plane_bytes(c->hidden, c->ffn) + m->ops->plane_bytes(q, c->hidden) + 2 * m->ops->plane_bytes(kv, c->hidden) +
                     m->ops->plane_bytes(c->hidden, q) + 4ull * (q + 2 * kv + 2 * c->hidden + 2 * c->ffn);
    bytes = ((bytes + 8191) / 4096 * 4096) * c->layers;
    for (uint32_t first = 0, rows = m->options.vocab_block_rows; rows && first < c->vocab; first += rows) bytes += m->ops->plane_bytes(rows, c->hidden) + 4ull * rows + 8192;
    return (bytes + 4095) / 4096 * 4096;
}

/* record: decode steps are replayed where they can be. */
static inline gpu_model *gpu_model_open(gpu_shape s, bool record) {
    bd_error err;
    gpu_model *m = calloc(1, sizeof *m);
    m->ops = bd_backend_cuda_ops();
    m->config = (bd_model_config){.hidden = s.hidden, .layers = s.layers, .heads = s.heads, .kv_heads = s.kv_heads, .head_dim = s.head_dim, .ffn = s.ffn, .vocab = s.vocab,
                                  .max_positions = s.len, .norm_eps = 1e-5f, .embed_scale = 1, .attn_scale = (float)(1 / sqrt(s.head_dim)), .tied = true,
                                  .rope = {.theta = 10000, .rotary_dim = s.head_dim}};
    m->variant_count = s.variants;
    m->options = (bd_backend_options){.config = &m->config, .rank_count = 1, .rows_max = s.rows, .seqs_max = s.seqs, .logits_rows_max = s.seqs < 64 ? 64 : s.seqs,
                                      .kv_block_tokens = GPU_MODEL_BLOCK, .kv_block_count = s.blocks, .max_model_len = s.len, .rope_tables_max = 1, .kernels = s.kernels, .dtype = s.dtype, .vocab_block_rows = s.head_rows};
    m->options.delta_bytes = s.variants * gpu_model_variant_bytes(m);
    m->noise = malloc(2 * GPU_MODEL_NOISE);
    uint64_t state = 88172645463325252ull;
    for (uint32_t i = 0; i < GPU_MODEL_NOISE; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        m->noise[i] = bd_f32_to_bf16((float)((double)(state >> 11) * 0x1p-53 - 0.5) * 0.06f);
    }
    GPU_MODEL_TRY(m->ops->open(&m->options, &m->backend, &err));
    const bd_model_config *c = &m->config;
    const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const uint32_t n[BD_LINEAR_COUNT] = {q, kv, kv, c->hidden, c->ffn, c->ffn, c->hidden}, k[BD_LINEAR_COUNT] = {c->hidden, c->hidden, c->hidden, q, c->hidden, c->hidden, c->ffn};
    gpu_model_put(m, BD_WEIGHT_EMBED, 0, 0, c->vocab, c->hidden);
    float *ones = malloc((size_t)c->hidden * 4);
    for (uint32_t i = 0; i < c->hidden; i++) ones[i] = 1;
    const bd_weight_view gamma = {.dtype = BD_DTYPE_F32, .rows = 1, .cols = c->hidden, .row_stride_bytes = 4ull * c->hidden, .data = ones};
    for (uint32_t l = 0; l <= c->layers; l++)
        for (uint32_t kind = 0; kind < BD_NORM_Q; kind++) {
            const bd_weight_id id = {.kind = BD_WEIGHT_NORM, .layer = l, .which = kind};
            GPU_MODEL_TRY(m->ops->weight_put(m->backend, id, &gamma, &err));
        }
    free(ones);
    for (uint32_t l = 0; l < c->layers; l++)
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++) gpu_model_put(m, BD_WEIGHT_LINEAR, l, i, n[i], k[i]);
    float inv_freq[128];
    for (uint32_t i = 0; i < s.head_dim / 2; i++) inv_freq[i] = (float)pow(10000, -2.0 * i / s.head_dim);
    GPU_MODEL_TRY(m->ops->rope_table_put(m->backend, 0, inv_freq, 1, &err));
    for (uint32_t v = 0; v < s.variants; v++) gpu_model_variant(m, v, (uint8_t *)m->ops->delta_arena(m->backend) + v * gpu_model_variant_bytes(m));
    if (record) GPU_MODEL_TRY(m->ops->record(m->backend, gpu_model_forward, m, &err));
    return m;
}

static inline void gpu_model_close(gpu_model *m) {
    m->ops->close(m->backend);
    for (uint32_t v = 0; v < m->variant_count; v++) free(m->linears[v]);
    free(m->noise);
    free(m);
}

typedef struct gpu_batch { /* sequences, their blocks one after another */
    uint32_t seqs, segments;
    int32_t *tokens;
    uint32_t *positions, *seq_of_row, *blocks;
    bd_seq *seq;
    bd_segment *segment;
    bd_logits_row *logits;
    const bd_overlay *overlays[GPU_MODEL_VARIANTS];
    bd_step step;
} gpu_batch;

typedef struct gpu_seq { /* rows of one sequence; those of one overlay lie together */
    uint32_t rows, before;
    int32_t overlay; /* -1: the base */
} gpu_seq;

/* Logits of last rows. variants: overlays are below it. */
static inline gpu_batch *gpu_batch_of(gpu_model *m, uint32_t seqs, const gpu_seq *list, uint32_t variants) {
    gpu_batch *b = calloc(1, sizeof *b);
    uint32_t rows = 0, blocks = 0;
    for (uint32_t s = 0; s < seqs; s++) rows += list[s].rows, blocks += (list[s].before + list[s].rows + GPU_MODEL_BLOCK) / GPU_MODEL_BLOCK;
    b->seqs = seqs;
    b->tokens = calloc(rows, 4), b->positions = calloc(rows, 4), b->seq_of_row = calloc(rows, 4), b->blocks = calloc(blocks, 4);
    b->seq = calloc(seqs, sizeof *b->seq), b->segment = calloc(seqs + 1, sizeof *b->segment), b->logits = calloc(seqs, sizeof *b->logits);
    for (uint32_t i = 0; i < blocks; i++) b->blocks[i] = i;
    uint32_t row = 0, block = 0;
    for (uint32_t s = 0; s < seqs; s++) {
        const gpu_seq *q = &list[s];
        b->seq[s] = (bd_seq){.first_row = row, .row_count = q->rows, .kv_before_tokens = q->before, .kv_blocks = b->blocks + block,
                             .sampling = {.temperature = s % 2 ? 0.8f : 0, .top_p = 0.9f, .top_k = s % 4 == 3 ? 0 : 50, .seed = s}};
        b->logits[s] = (bd_logits_row){.row = row + q->rows - 1, .seq = s, .target = -1, .top_count = 5};
        bd_segment *last = b->segments ? &b->segment[b->segments - 1] : NULL;
        if (last && last->overlay == q->overlay) last->row_count += q->rows;
        else b->segment[b->segments++] = (bd_segment){q->overlay, row, q->rows};
        for (uint32_t i = 0; i < q->rows; i++, row++) {
            b->tokens[row] = (int32_t)((row * 2654435761u + q->before * 40503u) % m->config.vocab);
            b->positions[row] = q->before + i, b->seq_of_row[row] = s;
        }
        block += (q->before + q->rows + GPU_MODEL_BLOCK) / GPU_MODEL_BLOCK;
    }
    for (uint32_t v = 0; v < variants; v++) b->overlays[v] = &m->overlays[v];
    b->step = (bd_step){.id = 1, .row_count = rows, .seq_count = seqs, .segment_count = b->segments, .overlay_count = variants, .logits_row_count = seqs, .tokens = b->tokens,
                        .positions = b->positions, .seq_of_row = b->seq_of_row, .seqs = b->seq, .segments = b->segment, .overlays = b->overlays, .logits_rows = b->logits};
    return b;
}

/* Sequences of equal length; `variants` of them shared out over the sequences in order (variants 0: the base). */
static inline gpu_batch *gpu_batch_make(gpu_model *m, uint32_t seqs, uint32_t rows_each, uint32_t before, uint32_t variants) {
    gpu_seq *list = calloc(seqs, sizeof *list);
    for (uint32_t s = 0; s < seqs; s++) list[s] = (gpu_seq){rows_each, before, variants == 0 ? -1 : (int32_t)(s * variants / seqs)};
    gpu_batch *b = gpu_batch_of(m, seqs, list, variants);
    free(list);
    return b;
}

static inline void gpu_batch_free(gpu_batch *b) {
    void *all[] = {b->tokens, b->positions, b->seq_of_row, b->blocks, b->seq, b->segment, b->logits, b};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static inline bd_status gpu_model_step(gpu_model *m, const bd_step *step, bd_token_result *results, bd_error *err) {
    const bd_status s = gpu_model_forward(m, step, err);
    return s == BD_OK ? m->ops->step_wait(m->backend, step, bd_now_us() + 30000000u, results, err) : s;
}

#endif
