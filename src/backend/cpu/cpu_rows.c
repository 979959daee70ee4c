/* cpu_rows.c - operators that work row by row: embedding, norms, rotary embedding with the KV
 * write. Owner: the executor thread; rows are spread over the pool. */
#include <math.h>
#include <string.h>

#include "cpu.h"

typedef struct row_job {
    bd_cpu *cpu;
    const bd_step *step;
    uint32_t layer;
    bd_norm kind, post; /* post: BD_NORM_COUNT = none */
    uint32_t post_layer;
    bool add;
} row_job;

static void add_lora_row(float *out, const bd_overlay_linear *linear, uint32_t n, uint32_t k) {
    for (uint32_t j = 0; j < linear->lora_rank; j++) {
        const float weight = linear->lora_scale * linear->lora_b[(size_t)n * linear->lora_rank + j];
        const float *a = linear->lora_a + (size_t)j * k;
        for (uint32_t i = 0; i < k; i++)
            out[i] += weight * a[i];
    }
}

/* A row of the vocabulary that the overlay keeps whole. */
static void whole_row(const bd_cpu *cpu, float *out, const bd_overlay_rows *rows, uint32_t row) {
    BD_ASSERT(row < rows->count);
    const size_t row_bytes = cpu->config->hidden * bd_dtype_bytes(BD_DTYPE_BF16);
    const uint8_t *block = rows->blocks[row / rows->block_rows];
    cpu->kernels->to_f32(out, block + row % rows->block_rows * row_bytes, BD_DTYPE_BF16,
                         cpu->config->hidden);
}

/* The base's row and what the overlay adds to it. token: counted from this rank's first. */
static void delta_row(const bd_cpu *cpu, float *out, const bd_overlay *overlay, uint32_t token) {
    const uint32_t hidden = cpu->config->hidden;
    cpu->kernels->to_f32(out, cpu->embed.data + token * cpu->embed.stride_bytes, cpu->embed.dtype,
                         hidden);
    if (overlay == NULL || overlay->embed == NULL || overlay->block_count == 0) return;
    BD_ASSERT(overlay->block_rows > 0 && token / overlay->block_rows < overlay->block_count);
    const bd_overlay_linear *block = &overlay->embed[token / overlay->block_rows];
    const uint32_t n = token % overlay->block_rows;
    for (uint32_t p = 0; p < block->plane_count; p++) {
        const uint8_t *bits = bd_cpu_plane_at(block->planes[p].bits, hidden, n, 0);
        cpu->kernels->add_signs(out, out, bits, hidden, block->planes[p].scale[n]);
    }
    add_lora_row(out, block, n, hidden);
}

static void embed_row(void *ctx, uint32_t row, uint32_t worker) {
    const row_job *job = ctx;
    bd_cpu *cpu = job->cpu;
    (void)worker;
    const uint32_t hidden = cpu->config->hidden, token = (uint32_t)job->step->tokens[row];
    float *out = bd_cpu_row(cpu, BD_CPU_RESIDUAL, row, hidden);
    const bd_overlay *overlay = bd_cpu_row_overlays(cpu)[row];
    const uint32_t first = cpu->options.vocab_first, total = bd_vocab_total(&cpu->options);
    const bool extra = token >= total;
    if (extra ? cpu->options.rank != 0 : token < first || token - first >= cpu->config->vocab) {
        memset(out, 0, hidden * sizeof *out); /* another rank's */
        return;
    }
    if (extra) {
        whole_row(cpu, out, &overlay->extra_embed, token - total);
    } else if (overlay != NULL && overlay->full_embed.count > 0) {
        whole_row(cpu, out, &overlay->full_embed, token - first);
    } else {
        delta_row(cpu, out, overlay, token - first);
    }
    const float scale = cpu->config->embed_scale;
    for (uint32_t i = 0; i < hidden; i++)
        out[i] *= scale;
}

bd_status bd_cpu_embed(bd_backend *backend, const bd_step *step, bd_error *err) {
    bd_cpu *cpu = bd_cpu_of(backend);
    BD_ASSERT(cpu->embed.data != NULL);
    row_job job = {.cpu = cpu, .step = step};
    bd_cpu_for(cpu, step->row_count, (uint64_t)step->row_count * cpu->config->hidden, embed_row,
               &job);
    return bd_cpu_sum_ranks(cpu, BD_CPU_RESIDUAL, step->row_count, err);
}

const float *bd_cpu_norm_weights(const bd_cpu *cpu, const bd_overlay *overlay, uint32_t layer,
                                 bd_norm kind) {
    const size_t index = (size_t)layer * BD_NORM_COUNT + (size_t)kind;
    if (overlay != NULL && overlay->norms != NULL && overlay->norms[index] != NULL)
        return overlay->norms[index];
    BD_ASSERT(cpu->norms[index] != NULL);
    return cpu->norms[index];
}

void bd_cpu_rms_norm(const bd_cpu *cpu, float *out, const float *x, const float *gamma,
                     uint32_t count) {
    float lanes[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        for (uint32_t l = 0; l < 8; l++)
            lanes[l] += x[i + l] * x[i + l];
    }
    for (; i < count; i++)
        lanes[i % 8] += x[i] * x[i];
    const float sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
                      ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    const float inverse = 1.0f / sqrtf(sum / (float)count + cpu->config->norm_eps);
    const float offset = cpu->config->norm_plus_one ? 1.0f : 0.0f;
    for (i = 0; i < count; i++)
        out[i] = x[i] * inverse * (offset + gamma[i]);
}

static void norm_row(void *ctx, uint32_t row, uint32_t worker) {
    const row_job *job = ctx;
    bd_cpu *cpu = job->cpu;
    (void)worker;
    const uint32_t hidden = cpu->config->hidden;
    const bd_overlay *overlay = bd_cpu_row_overlays(cpu)[row];
    float *residual = bd_cpu_row(cpu, BD_CPU_RESIDUAL, row, hidden);
    float *out = bd_cpu_row(cpu, BD_CPU_NORMED, row, hidden);
    if (job->add) {
        float *proj = bd_cpu_row(cpu, BD_CPU_PROJ, row, hidden);
        if (job->post != BD_NORM_COUNT) {
            bd_cpu_rms_norm(cpu, proj, proj,
                            bd_cpu_norm_weights(cpu, overlay, job->post_layer, job->post), hidden);
        }
        for (uint32_t i = 0; i < hidden; i++)
            residual[i] += proj[i];
    }
    bd_cpu_rms_norm(cpu, out, residual, bd_cpu_norm_weights(cpu, overlay, job->layer, job->kind),
                    hidden);
}

bd_status bd_cpu_norm_residual(bd_backend *backend, const bd_step *step, uint32_t layer,
                               bd_norm kind, bool add, uint32_t post_layer, bd_norm post,
                               bd_error *err) {
    (void)err;
    bd_cpu *cpu = bd_cpu_of(backend);
    const uint32_t layers = cpu->config->layers;
    BD_ASSERT(kind < BD_NORM_Q && (layer < layers || (layer == layers && kind == BD_NORM_INPUT)));
    BD_ASSERT(post == BD_NORM_COUNT || (post < BD_NORM_Q && post_layer < layers));
    row_job job = {cpu, step, layer, kind, post, post_layer, add};
    bd_cpu_for(cpu, step->row_count, 2ull * step->row_count * cpu->config->hidden, norm_row, &job);
    return BD_OK;
}

/* Half-split rotation of the first rotary_dim dimensions, as transformers' rotate_half. */
static void rotate(float *x, const float *rotation, uint32_t half) {
    for (uint32_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i], c = rotation[i], s = rotation[half + i];
        x[i] = a * c - b * s;
        x[half + i] = b * c + a * s;
    }
}

static void rope_heads(const row_job *job, uint32_t row, float *x, uint32_t heads, bd_norm norm) {
    const bd_cpu *cpu = job->cpu;
    const uint32_t head_dim = cpu->config->head_dim, half = cpu->config->rope.rotary_dim / 2;
    const float *rotation = bd_cpu_row(cpu, BD_CPU_ROTATION, row, 2 * half);
    const float *gamma = NULL;
    if (cpu->config->qk_norm)
        gamma = bd_cpu_norm_weights(cpu, bd_cpu_row_overlays(cpu)[row], job->layer, norm);
    for (uint32_t h = 0; h < heads; h++, x += head_dim) {
        if (gamma != NULL) bd_cpu_rms_norm(cpu, x, x, gamma, head_dim);
        rotate(x, rotation, half);
    }
}

static void rope_row(void *ctx, uint32_t row, uint32_t worker) {
    const row_job *job = ctx;
    bd_cpu *cpu = job->cpu;
    (void)worker;
    const bd_model_config *c = cpu->config;
    const bd_seq *seq = &job->step->seqs[job->step->seq_of_row[row]];
    float *k = bd_cpu_row(cpu, BD_CPU_K, row, cpu->kv_dim);
    const float *v = bd_cpu_row(cpu, BD_CPU_V, row, cpu->kv_dim);
    rope_heads(job, row, bd_cpu_row(cpu, BD_CPU_Q, row, cpu->q_dim), c->heads, BD_NORM_Q);
    rope_heads(job, row, k, c->kv_heads, BD_NORM_K);

    const uint32_t token = seq->kv_before_tokens + (row - seq->first_row),
                   tokens = cpu->options.kv_block_tokens;
    const uint64_t block =
        (uint64_t)job->layer * cpu->options.kv_block_count + seq->kv_blocks[token / tokens];
    const uint32_t pad = cpu->head_stride - c->head_dim;
    for (uint32_t h = 0; h < c->kv_heads; h++) {
        const size_t at =
            (size_t)((block * c->kv_heads + h) * tokens + token % tokens) * cpu->head_stride;
        float *key = bd_cpu_f32(cpu, BD_CPU_KEYS) + at,
              *value = bd_cpu_f32(cpu, BD_CPU_VALUES) + at;
        memcpy(key, k + (size_t)h * c->head_dim, c->head_dim * sizeof *key);
        memcpy(value, v + (size_t)h * c->head_dim, c->head_dim * sizeof *value);
        memset(key + c->head_dim, 0, pad * sizeof *key);
        memset(value + c->head_dim, 0, pad * sizeof *value);
    }
}

bd_status bd_cpu_rope_kv_write(bd_backend *backend, const bd_step *step, uint32_t layer,
                               bd_error *err) {
    (void)err;
    bd_cpu *cpu = bd_cpu_of(backend);
    BD_ASSERT(layer < cpu->config->layers);
    row_job job = {.cpu = cpu, .step = step, .layer = layer};
    const uint64_t work = (uint64_t)step->row_count * (cpu->q_dim + 3ull * cpu->kv_dim);
    bd_cpu_for(cpu, step->row_count, work, rope_row, &job);
    return BD_OK;
}
