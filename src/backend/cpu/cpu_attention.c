/* cpu_attention.c - causal attention over the paged KV cache with grouped heads, windows and soft
 * caps. A task is up to BD_CPU_QUERIES queries that share a key-value head: rows of one sequence
 * times heads of one group. Keys come in tiles that start at multiples of BD_CPU_KV_TILE tokens of
 * the sequence, so that a row's result does not depend on how its sequence was cut into steps.
 * Softmax runs along with a maximum and a sum per query. Owner: the executor thread; tasks are
 * spread over the pool. */
#include <math.h>
#include <string.h>

#include "cpu.h"

typedef struct attention_job {
    bd_cpu *cpu;
    const bd_step *step;
    uint32_t layer;
    uint32_t group;                 /* query heads on one key-value head */
    uint32_t task_heads, task_rows; /* of a task */
    uint32_t head_parts;            /* tasks that cover a group */
} attention_job;

typedef struct attention_task {
    const bd_seq *seq;
    uint32_t kv_head, first_head, heads;
    uint32_t first_row, rows; /* of the step */
    uint32_t queries;         /* rows * heads, row-major */
    uint32_t first_token;     /* of first_row in the sequence */
    float *q, *acc,
        *p; /* scratch: [BD_CPU_QUERIES][BD_CPU_HEAD_DIM_MAX] twice, [BD_CPU_QUERIES][KV_TILE] */
    float max[BD_CPU_QUERIES], sum[BD_CPU_QUERIES];
    uint32_t lo[BD_CPU_QUERIES], hi[BD_CPU_QUERIES]; /* tokens that a query sees: [lo, hi) */
} attention_task;

static uint32_t task_window(const attention_job *job, uint32_t row) {
    const bd_model_config *c = job->cpu->config;
    if (!c->window_layer[job->layer]) return 0;
    const bd_overlay *overlay = bd_cpu_row_overlays(job->cpu)[row];
    return overlay != NULL ? overlay->window_tokens : c->window_tokens;
}

static void find_task(const attention_job *job, uint32_t index, attention_task *task) {
    const bd_model_config *c = job->cpu->config;
    const uint32_t *first = job->cpu->buffers[BD_CPU_TASKS];
    uint32_t s = 0;
    while (index >= first[s + 1])
        s++;
    const uint32_t part = index - first[s], per_rows = c->kv_heads * job->head_parts;
    const bd_seq *seq = &job->step->seqs[s];
    const uint32_t head_part = part % job->head_parts, row = part / per_rows * job->task_rows;
    task->seq = seq;
    task->kv_head = part % per_rows / job->head_parts;
    task->first_head = task->kv_head * job->group + head_part * job->task_heads;
    task->heads = job->group - head_part * job->task_heads;
    if (task->heads > job->task_heads) task->heads = job->task_heads;
    task->rows = seq->row_count - row < job->task_rows ? seq->row_count - row : job->task_rows;
    task->first_row = seq->first_row + row;
    task->first_token = seq->kv_before_tokens + row;
    task->queries = task->rows * task->heads;
}

static void start_task(const attention_job *job, attention_task *task, uint32_t worker) {
    const bd_cpu *cpu = job->cpu;
    const uint32_t head_dim = cpu->config->head_dim;
    task->q = bd_cpu_row(cpu, BD_CPU_SCORES, worker, bd_cpu_scores_floats());
    task->acc = task->q + BD_CPU_QUERIES * BD_CPU_HEAD_DIM_MAX;
    task->p = task->acc + BD_CPU_QUERIES * BD_CPU_HEAD_DIM_MAX;
    for (uint32_t i = 0; i < task->queries; i++) {
        const uint32_t row = task->first_row + i / task->heads,
                       head = task->first_head + i % task->heads;
        const uint32_t token = task->first_token + i / task->heads, window = task_window(job, row);
        float *q = task->q + (size_t)i * BD_CPU_HEAD_DIM_MAX,
              *acc = task->acc + (size_t)i * BD_CPU_HEAD_DIM_MAX;
        memcpy(q, bd_cpu_row(cpu, BD_CPU_Q, row, cpu->q_dim) + (size_t)head * head_dim,
               head_dim * sizeof *q);
        memset(q + head_dim, 0, (cpu->head_stride - head_dim) * sizeof *q);
        memset(acc, 0, cpu->head_stride * sizeof *acc);
        task->max[i] = -INFINITY;
        task->sum[i] = 0.0f;
        task->hi[i] = token + 1;
        task->lo[i] = window > 0 && token + 1 > window ? token + 1 - window : 0;
    }
}

/* Where token's key of this task's head lies, and how many tokens follow it in its block, itself
 * included. */
static size_t key_offset(const attention_job *job, const attention_task *task, uint32_t token,
                         uint32_t *run) {
    const bd_cpu *cpu = job->cpu;
    const uint32_t tokens = cpu->options.kv_block_tokens;
    const uint64_t block =
        (uint64_t)job->layer * cpu->options.kv_block_count + task->seq->kv_blocks[token / tokens];
    *run = tokens - token % tokens;
    return (size_t)((block * cpu->config->kv_heads + task->kv_head) * tokens + token % tokens) *
           cpu->head_stride;
}

static void score_tile(const attention_job *job, const attention_task *task, uint32_t begin,
                       uint32_t end) {
    const bd_cpu *cpu = job->cpu;
    const float *x[BD_CPU_QUERIES];
    float *y[BD_CPU_QUERIES];
    uint32_t run = 0;
    for (uint32_t t = begin; t < end; t += run) {
        const float *keys = bd_cpu_f32(cpu, BD_CPU_KEYS) + key_offset(job, task, t, &run);
        if (run > end - t) run = end - t;
        for (uint32_t i = 0; i < task->queries; i++) {
            x[i] = task->q + (size_t)i * BD_CPU_HEAD_DIM_MAX;
            y[i] = task->p + (size_t)i * BD_CPU_KV_TILE + (t - begin);
        }
        cpu->kernels->dot[BD_DTYPE_F32](
            &(bd_cpu_dot){.x = x,
                          .y = y,
                          .rows = task->queries,
                          .n = run,
                          .k = cpu->head_stride,
                          .w = (const uint8_t *)keys,
                          .stride_bytes = cpu->head_stride * sizeof(float)});
    }
}

/* Scores of one query become weights; what was summed so far is rescaled to the new maximum. */
static void soften_tile(const attention_job *job, attention_task *task, uint32_t i, uint32_t begin,
                        uint32_t end) {
    const bd_model_config *c = job->cpu->config;
    float *p = task->p + (size_t)i * BD_CPU_KV_TILE,
          *acc = task->acc + (size_t)i * BD_CPU_HEAD_DIM_MAX;
    const uint32_t count = end - begin;
    const uint32_t from = task->lo[i] > begin ? task->lo[i] - begin : 0;
    const uint32_t to = task->hi[i] < end ? (task->hi[i] > begin ? task->hi[i] - begin : 0) : count;
    float max = task->max[i];
    for (uint32_t t = from; t < to; t++) {
        p[t] *= c->attn_scale;
        if (c->attn_softcap > 0.0f) p[t] = c->attn_softcap * tanhf(p[t] / c->attn_softcap);
        if (p[t] > max || isnan(p[t])) max = p[t];
    }
    if (from >= to) {
        memset(p, 0, count * sizeof *p);
        return;
    }
    const float shrink = task->sum[i] > 0.0f ? expf(task->max[i] - max) : 1.0f;
    float sum = task->sum[i] * shrink;
    if (shrink != 1.0f) { /* NaN must spread as well */
        for (uint32_t d = 0; d < job->cpu->head_stride; d++)
            acc[d] *= shrink;
    }
    for (uint32_t t = 0; t < count; t++) {
        p[t] = t >= from && t < to ? expf(p[t] - max) : 0.0f;
        sum += p[t];
    }
    task->max[i] = max;
    task->sum[i] = sum;
}

static void add_values(const attention_job *job, const attention_task *task, uint32_t begin,
                       uint32_t end) {
    const bd_cpu *cpu = job->cpu;
    uint32_t run = 0;
    for (uint32_t t = begin; t < end; t += run) {
        const float *values = bd_cpu_f32(cpu, BD_CPU_VALUES) + key_offset(job, task, t, &run);
        if (run > end - t) run = end - t;
        cpu->kernels->weighted_sum(task->acc, task->p + (t - begin), task->queries, values, run,
                                   cpu->head_stride);
    }
}

static void attend(void *ctx, uint32_t index, uint32_t worker) {
    const attention_job *job = ctx;
    const bd_cpu *cpu = job->cpu;
    const uint32_t head_dim = cpu->config->head_dim;
    attention_task task = {0};
    find_task(job, index, &task);
    BD_ASSERT(task.queries >= 1 && task.queries <= BD_CPU_QUERIES);
    start_task(job, &task, worker);
    const uint32_t last = task.hi[task.queries - 1];
    uint32_t begin = task.lo[0] / BD_CPU_KV_TILE * BD_CPU_KV_TILE;
    for (; begin < last; begin += BD_CPU_KV_TILE) {
        const uint32_t end = last - begin < BD_CPU_KV_TILE ? last : begin + BD_CPU_KV_TILE;
        score_tile(job, &task, begin, end);
        for (uint32_t i = 0; i < task.queries; i++)
            soften_tile(job, &task, i, begin, end);
        add_values(job, &task, begin, end);
    }
    for (uint32_t i = 0; i < task.queries; i++) {
        const uint32_t row = task.first_row + i / task.heads,
                       head = task.first_head + i % task.heads;
        float *out = bd_cpu_row(cpu, BD_CPU_ATTN, row, cpu->q_dim) + (size_t)head * head_dim;
        const float *acc = task.acc + (size_t)i * BD_CPU_HEAD_DIM_MAX, inverse = 1.0f / task.sum[i];
        for (uint32_t d = 0; d < head_dim; d++)
            out[d] = acc[d] * inverse;
    }
}

bd_status bd_cpu_attention(bd_backend *backend, const bd_step *step, uint32_t layer,
                           bd_error *err) {
    (void)err;
    bd_cpu *cpu = bd_cpu_of(backend);
    const bd_model_config *c = cpu->config;
    BD_ASSERT(layer < c->layers);
    attention_job job = {.cpu = cpu, .step = step, .layer = layer, .group = c->heads / c->kv_heads};
    job.task_heads = job.group < BD_CPU_QUERIES ? job.group : BD_CPU_QUERIES;
    job.task_rows = BD_CPU_QUERIES / job.task_heads;
    job.head_parts = (job.group + job.task_heads - 1) / job.task_heads;
    uint32_t *first = cpu->buffers[BD_CPU_TASKS], count = 0;
    uint64_t work = 0;
    for (uint32_t s = 0; s < step->seq_count; s++) {
        const bd_seq *seq = &step->seqs[s];
        first[s] = count;
        count +=
            (seq->row_count + job.task_rows - 1) / job.task_rows * c->kv_heads * job.head_parts;
        work += 2ull * seq->row_count * (seq->kv_before_tokens + seq->row_count) * cpu->q_dim;
    }
    first[step->seq_count] = count;
    bd_cpu_for(cpu, count, work, attend, &job);
    return BD_OK;
}
