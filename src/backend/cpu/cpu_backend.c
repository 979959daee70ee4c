/* cpu_backend.c - the CPU's operator table: what it supports, what it needs, opening and closing.
 * Owner: the rank's executor thread. Everything is allocated in open, but for copies of weights
 * whose memory does not outlive the backend. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

#define PAGE_BYTES 4096u

typedef struct limit {
    const char *field;
    uint64_t value, min, max;
} limit;

static bd_status check_config(const bd_model_config *config, bd_error *err) {
    const limit limits[] = {
        {"layers", config->layers, 1, BD_LAYERS_MAX},
        {"hidden", config->hidden, 1, 1u << 20},
        {"ffn", config->ffn, 1, 1u << 20},
        {"vocab", config->vocab, 1, INT32_MAX - BD_EXTRA_VOCAB_MAX},
        {"heads", config->heads, 1, 1u << 12},
        {"kv_heads", config->kv_heads, 1, config->heads},
        {"head_dim", config->head_dim, 2, BD_CPU_HEAD_DIM_MAX},
        {"rotary_dim", config->rope.rotary_dim, 2, config->head_dim},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        const limit *l = &limits[i];
        if (l->value < l->min || l->value > l->max) {
            return bd_fail(err, BD_E_UNSUPPORTED, l->field,
                           "the cpu backend takes %llu to %llu, not %llu",
                           (unsigned long long)l->min, (unsigned long long)l->max,
                           (unsigned long long)l->value);
        }
    }
    const limit multiples[] = {
        {"head_dim", config->head_dim, 2, 0},
        {"rotary_dim", config->rope.rotary_dim, 2, 0},
        {"heads", config->heads, config->kv_heads, 0},
    };
    for (size_t i = 0; i < sizeof multiples / sizeof multiples[0]; i++) {
        if (multiples[i].value % multiples[i].min != 0) {
            return bd_fail(err, BD_E_UNSUPPORTED, multiples[i].field,
                           "%llu is not a multiple of %llu", (unsigned long long)multiples[i].value,
                           (unsigned long long)multiples[i].min);
        }
    }
    return BD_OK;
}

bd_status bd_cpu_supports(const bd_backend_options *options, bd_error *err) {
    BD_ASSERT(options->config != NULL);
    if (options->rank_count < 1 || options->rank_count > BD_COMM_RANKS_MAX ||
        options->rank >= options->rank_count) {
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "rank %u of %u: the cpu backend takes 1 to %u ranks", options->rank,
                       options->rank_count, BD_COMM_RANKS_MAX);
    }
    const limit limits[] = {
        {"rows_max", options->rows_max, 1, 1u << 20},
        {"seqs_max", options->seqs_max, 1, 1u << 20},
        {"logits_rows_max", options->logits_rows_max, 1, 1u << 20},
        {"kv_block_tokens", options->kv_block_tokens, 1, 1u << 16},
        {"kv_block_count", options->kv_block_count, 1, UINT32_MAX},
        {"max_model_len", options->max_model_len, 1, INT32_MAX},
        {"rope_tables_max", options->rope_tables_max, 1, 1u << 16},
        {"thread_count", options->thread_count, 0, 4096},
        {"extra_vocab_max", options->extra_vocab_max, 0, BD_EXTRA_VOCAB_MAX},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        const limit *l = &limits[i];
        if (l->value < l->min || l->value > l->max) {
            return bd_fail(err, BD_E_UNSUPPORTED, l->field,
                           "the cpu backend takes %llu to %llu, not %llu",
                           (unsigned long long)l->min, (unsigned long long)l->max,
                           (unsigned long long)l->value);
        }
    }
    if ((options->kv_block_tokens & (options->kv_block_tokens - 1)) != 0) {
        return bd_fail(err, BD_E_UNSUPPORTED, "kv_block_tokens", "%u is not a power of two",
                       options->kv_block_tokens);
    }
    if (options->delta_bytes % PAGE_BYTES != 0) {
        return bd_fail(err, BD_E_UNSUPPORTED, "delta_bytes", "%llu is not a multiple of %u",
                       (unsigned long long)options->delta_bytes, PAGE_BYTES);
    }
    const bd_cpu_kernels *kernels;
    const bd_status status = bd_cpu_kernels_pick(options->cpu_kernels, &kernels, err);
    return status != BD_OK ? status : check_config(options->config, err);
}

static uint32_t worker_count(const bd_backend_options *options) {
    return options->thread_count > 0 ? options->thread_count : bd_usable_cores();
}

/* Adds a * b * c to *total; remembers an overflow in *fits. */
static void add_product(uint64_t *total, uint64_t a, uint64_t b, uint64_t c, bool *fits) {
    uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product) ||
        __builtin_add_overflow(*total, product, total)) {
        *fits = false;
    }
}

static uint64_t small_floats(const bd_model_config *c) {
    const uint64_t q_dim = (uint64_t)c->heads * c->head_dim,
                   kv_dim = (uint64_t)c->kv_heads * c->head_dim;
    const uint64_t norms = 4ull * c->hidden + 2ull * c->head_dim;
    const uint64_t biases = q_dim + 2 * kv_dim + 2ull * c->hidden + 2ull * c->ffn;
    return c->layers * (norms + biases) + c->hidden;
}

bool bd_cpu_sizes(const bd_backend_options *o, uint32_t workers,
                  uint64_t sizes[BD_CPU_BUFFER_COUNT]) {
    const bd_model_config *c = o->config;
    const uint64_t q_dim = (uint64_t)c->heads * c->head_dim,
                   kv_dim = (uint64_t)c->kv_heads * c->head_dim;
    const uint64_t rows = o->rows_max, logits_rows = o->logits_rows_max, width = bd_logits_width(o);
    const uint64_t whole = (uint64_t)bd_vocab_total(o) + o->extra_vocab_max;
    const bool split = o->rank_count > 1;
    const uint64_t kv_row_bytes = (c->head_dim + 7u) / 8u * 8u * sizeof(float);
    const uint64_t kv_tokens = (uint64_t)o->kv_block_count * o->kv_block_tokens;
    const uint32_t widest = c->ffn > c->hidden ? c->ffn : c->hidden;
    const uint64_t table_bytes =
        bd_cpu_table_floats(q_dim > widest ? (uint32_t)q_dim : widest) * sizeof(float);
    const uint64_t most_rows = rows > logits_rows ? rows : logits_rows;
    const struct {
        bd_cpu_buffer which;
        uint64_t a, b, c;
    } parts[] = {
        {BD_CPU_RESIDUAL, rows, c->hidden, 4},
        {BD_CPU_NORMED, rows, c->hidden, 4},
        {BD_CPU_Q, rows, q_dim, 4},
        {BD_CPU_K, rows, kv_dim, 4},
        {BD_CPU_V, rows, kv_dim, 4},
        {BD_CPU_ATTN, rows, q_dim, 4},
        {BD_CPU_ACT, rows, c->ffn, 4},
        {BD_CPU_PROJ, rows, c->hidden, 4},
        {BD_CPU_ROTATION, rows, c->rope.rotary_dim, 4},
        {BD_CPU_TABLES, most_rows < BD_CPU_TABLE_ROWS_MAX ? most_rows : BD_CPU_TABLE_ROWS_MAX,
         table_bytes, 1},
        {BD_CPU_LORA, most_rows, 3ull * BD_CPU_LORA_RANK_MAX, 4},
        {BD_CPU_LOGITS, logits_rows, width, 4},
        {BD_CPU_HEAD_IN, logits_rows, c->hidden, 4},
        {BD_CPU_KEYS, kv_tokens, (uint64_t)c->layers * c->kv_heads, kv_row_bytes},
        {BD_CPU_VALUES, kv_tokens, (uint64_t)c->layers * c->kv_heads, kv_row_bytes},
        {BD_CPU_ROW_OVERLAY, rows, sizeof(const bd_overlay *), 1},
        {BD_CPU_RUNS, rows, sizeof(bd_cpu_run), 1},
        {BD_CPU_HEAD_RUNS, logits_rows, sizeof(bd_cpu_run), 1},
        {BD_CPU_TASKS, (uint64_t)o->seqs_max + 1, sizeof(uint32_t), 1},
        {BD_CPU_RESULTS, logits_rows, sizeof(bd_token_result), 1},
        {BD_CPU_PICKS, split ? logits_rows : 0, (uint64_t)o->rank_count + 1, sizeof(bd_cpu_pick)},
        {BD_CPU_RANKS_OF, split ? logits_rows : 0, (uint64_t)o->rank_count + 1, sizeof(uint32_t)},
        {BD_CPU_GATHERED, split ? o->rank_count : 0, width, 4},
        {BD_CPU_WHOLE, split ? BD_CPU_WHOLE_ROWS : 0, whole, 4},
        {BD_CPU_ROPE, o->rope_tables_max, c->rope.rotary_dim / 2, 4},
        {BD_CPU_SMALL, small_floats(c), 4, 1},
        {BD_CPU_TILES, workers, 2ull * bd_cpu_tile_floats(), 4},
        {BD_CPU_UP, workers, rows, BD_CPU_TILE_N * 4},
        {BD_CPU_SCORES, workers, bd_cpu_scores_floats(), 4},
        {BD_CPU_SAMPLE, workers, (whole + 1) / 2, 2 * (sizeof(double) + sizeof(float))},
        {BD_CPU_DELTAS, o->delta_bytes, 1, 1},
    };
    bool fits = true;
    memset(sizes, 0, BD_CPU_BUFFER_COUNT * sizeof *sizes);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        add_product(&sizes[parts[i].which], parts[i].a, parts[i].b, parts[i].c, &fits);
        if (sizes[parts[i].which] > SIZE_MAX - PAGE_BYTES) fits = false;
    }
    return fits;
}

/* What the machine can still give: the kernel's estimate, or the container's limit if that is less.
 * 0: not known. */
static uint64_t available_bytes(void) {
    unsigned long long available = 0, limit_bytes = 0, used_bytes = 0;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    if (file != NULL) {
        while (fgets(line, sizeof line, file) != NULL) {
            if (sscanf(line, "MemAvailable: %llu", &available) == 1) break;
        }
        fclose(file);
    }
    available *= 1024;
    file = fopen("/sys/fs/cgroup/memory.max", "re");
    if (file == NULL) return available;
    const bool limited = fscanf(file, "%llu", &limit_bytes) == 1;
    fclose(file);
    file = fopen("/sys/fs/cgroup/memory.current", "re");
    if (file != NULL) {
        if (fscanf(file, "%llu", &used_bytes) != 1) used_bytes = 0;
        fclose(file);
    }
    if (!limited) return available;
    const uint64_t rest = limit_bytes > used_bytes ? limit_bytes - used_bytes : 0;
    return rest < available ? rest : available;
}

/* Matrices count two bytes a weight, as in a bf16 checkpoint, the usual case. */
static uint64_t matrix_bytes(const bd_model_config *c, bool *fits) {
    const uint64_t q_dim = (uint64_t)c->heads * c->head_dim,
                   kv_dim = (uint64_t)c->kv_heads * c->head_dim;
    uint64_t bytes = 0;
    add_product(&bytes, c->vocab, c->hidden, c->tied ? 2 : 4, fits);
    add_product(&bytes, c->layers, c->hidden, 2 * (2 * q_dim + 2 * kv_dim + 3ull * c->ffn), fits);
    return bytes;
}

bd_status bd_cpu_plan(const bd_backend_options *options, bd_memory_plan *plan, bd_error *err) {
    const bd_status status = bd_cpu_supports(options, err);
    if (status != BD_OK) return status;
    uint64_t sizes[BD_CPU_BUFFER_COUNT];
    bool fits = bd_cpu_sizes(options, worker_count(options), sizes);
    memset(plan, 0, sizeof *plan);
    plan->weights = matrix_bytes(options->config, &fits) + sizes[BD_CPU_SMALL];
    plan->logits = sizes[BD_CPU_LOGITS];
    plan->deltas = sizes[BD_CPU_DELTAS];
    add_product(&plan->kv, sizes[BD_CPU_KEYS], 2, 1, &fits);
    for (int i = 0; i < BD_CPU_DELTAS; i++) {
        if (i == BD_CPU_SMALL || i == BD_CPU_LOGITS || i == BD_CPU_KEYS || i == BD_CPU_VALUES)
            continue;
        add_product(&plan->workspace, sizes[i], 1, 1, &fits);
    }
    const uint64_t parts[] = {plan->weights, plan->workspace, plan->kv, plan->logits, plan->deltas};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        add_product(&plan->total, parts[i], 1, 1, &fits);
    plan->available = available_bytes();
    if (!fits) return bd_fail(err, BD_E_LIMIT, "memory", "the sizes asked for exceed 64 bits");
    return BD_OK;
}

static bd_status allocate(bd_cpu *cpu, const uint64_t sizes[BD_CPU_BUFFER_COUNT], bd_error *err) {
    for (int i = 0; i < BD_CPU_BUFFER_COUNT; i++) {
        if (sizes[i] == 0) continue;
        const size_t bytes = ((size_t)sizes[i] + 63u) / 64u * 64u;
        cpu->buffers[i] =
            aligned_alloc(sizes[i] >= PAGE_BYTES && i == BD_CPU_DELTAS ? PAGE_BYTES : 64u, bytes);
        if (cpu->buffers[i] == NULL) {
            return bd_fail(err, BD_E_MEMORY, "workspace", "%llu bytes are not to be had",
                           (unsigned long long)bytes);
        }
    }
    const bd_model_config *c = cpu->config;
    cpu->linears = calloc((size_t)c->layers * BD_LINEAR_COUNT, sizeof *cpu->linears);
    cpu->biases = calloc((size_t)c->layers * BD_LINEAR_COUNT, sizeof *cpu->biases);
    cpu->norms = calloc(((size_t)c->layers + 1) * BD_NORM_COUNT, sizeof *cpu->norms);
    cpu->rope_scales = calloc(cpu->options.rope_tables_max, sizeof *cpu->rope_scales);
    if (cpu->linears == NULL || cpu->biases == NULL || cpu->norms == NULL ||
        cpu->rope_scales == NULL) {
        return bd_fail(err, BD_E_MEMORY, "workspace", "the weight tables could not be allocated");
    }
    return BD_OK;
}

static void bd_cpu_close(bd_backend *backend) {
    if (backend == NULL) return;
    bd_cpu *cpu = bd_cpu_of(backend);
    bd_pool_destroy(cpu->pool);
    bd_cpu_rooms_free(cpu);
    free(cpu->linears);
    free((void *)cpu->biases);
    free((void *)cpu->norms);
    free(cpu->rope_scales);
    for (int i = 0; i < BD_CPU_BUFFER_COUNT; i++)
        free(cpu->buffers[i]);
    free(cpu);
}

static bd_status bd_cpu_open(const bd_backend_options *options, bd_backend **out, bd_error *err) {
    *out = NULL;
    bd_status status = bd_cpu_supports(options, err);
    if (status != BD_OK) return status;
    if (options->rank_count > 1 && !options->comm)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "one of %u ranks needs a way to the others", options->rank_count);
    bd_cpu *cpu = calloc(1, sizeof *cpu);
    if (cpu == NULL) return bd_fail(err, BD_E_MEMORY, "cpu", "the backend could not be allocated");
    const bd_model_config *c = options->config;
    cpu->base.ops = bd_backend_cpu_ops();
    cpu->options = *options;
    cpu->config = c;
    cpu->q_dim = c->heads * c->head_dim;
    cpu->kv_dim = c->kv_heads * c->head_dim;
    cpu->head_stride = (c->head_dim + 7u) / 8u * 8u;
    cpu->sampled_step = UINT64_MAX;
    uint64_t sizes[BD_CPU_BUFFER_COUNT];
    if ((status = bd_cpu_kernels_pick(options->cpu_kernels, &cpu->kernels, err)) != BD_OK)
        goto fail;
    if ((status = bd_pool_create(&cpu->pool, options->thread_count, "bd-cpu", err)) != BD_OK)
        goto fail;
    cpu->workers = bd_pool_width(cpu->pool);
    if (!bd_cpu_sizes(options, cpu->workers, sizes)) {
        status = bd_fail(err, BD_E_LIMIT, "memory", "the sizes asked for exceed 64 bits");
        goto fail;
    }
    if ((status = allocate(cpu, sizes, err)) != BD_OK) goto fail;
    *out = &cpu->base;
    return BD_OK;
fail:
    bd_cpu_close(&cpu->base);
    return status;
}

static void *bd_cpu_delta_arena(bd_backend *backend) {
    return bd_cpu_of(backend)->buffers[BD_CPU_DELTAS];
}

void bd_cpu_for(bd_cpu *cpu, uint32_t count, uint64_t work, bd_pool_fn fn, void *ctx) {
    /* Waking the pool costs some 10 us; that many multiply-adds take about as long. */
    const uint64_t worth_waking = 1u << 16;
    if (count > 1 && cpu->workers > 1 && work >= worth_waking) {
        bd_pool_parallel_for(cpu->pool, count, fn, ctx);
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        fn(ctx, i, 0);
}

static const bd_backend_ops cpu_ops = {
    .name = "cpu",
    .page_align_bytes = PAGE_BYTES,
    .rows_default = 512,
    .comm = bd_comm_local_ops,
    .supports = bd_cpu_supports,
    .plan = bd_cpu_plan,
    .open = bd_cpu_open,
    .close = bd_cpu_close,
    .weight_put = bd_cpu_weight_put,
    .rope_table_put = bd_cpu_rope_table_put,
    .delta_arena = bd_cpu_delta_arena,
    .plane_bytes = bd_cpu_plane_bytes,
    .plane_put = bd_cpu_plane_put,
    .plane_part_put = bd_cpu_plane_part_put,
    .rows_put = bd_cpu_rows_put,
    .vector_put = bd_cpu_vector_put,
    .puts_anywhere = true,
    .put_flush = NULL, /* a store is visible to whoever learns of it through a queue */
    .step_begin = bd_cpu_step_begin,
    .embed = bd_cpu_embed,
    .norm_residual = bd_cpu_norm_residual,
    .linear = bd_cpu_linear,
    .rope_kv_write = bd_cpu_rope_kv_write,
    .attention = bd_cpu_attention,
    .head = bd_cpu_head,
    .sample = bd_cpu_sample,
    .step_void = bd_cpu_step_void,
    .step_wait = bd_cpu_step_wait,
    .logits_get = bd_cpu_logits_get,
};

const bd_backend_ops *bd_backend_cpu_ops(void) {
    return &cpu_ops;
}
