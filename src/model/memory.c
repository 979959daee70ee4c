/* memory.c - how large everything is, decided before a weight is read or a byte of the device is
 * touched. */
#include <stdio.h>
#include <string.h>

#include "bitdelta/base/pool.h"
#include "bitdelta/model/overlay.h"
#include "internal.h"
#include "layout.h"
#include "ranks.h"

enum { KV_BLOCK_TOKENS_DEFAULT = 16, KV_CPU_TOKENS_MIN = 16384, KV_CPU_SEQS = 4 };
enum { ROPE_TABLES_OWN_MAX = 32 };

static double mib(uint64_t bytes) {
    return (double)bytes / (1024.0 * 1024.0);
}

static bd_status refuse(const bd_memory_plan *plan, const bd_backend_options *backend,
                        bd_error *err) {
    return bd_fail(err, BD_E_LIMIT, "memory",
                   "does not fit: %.1f MiB = weights %.1f + workspace %.1f + KV cache %.1f (%u "
                   "block%s of %u tokens) "
                   "+ logits %.1f + delta pages %.1f; %.1f MiB are available. Lower the context "
                   "length, the number "
                   "of slots or the rows of a step",
                   mib(plan->total), mib(plan->weights), mib(plan->workspace), mib(plan->kv),
                   backend->kv_block_count, bd_plural(backend->kv_block_count),
                   backend->kv_block_tokens, mib(plan->logits), mib(plan->deltas),
                   mib(plan->available));
}

static bool on_cpu(const bd_model_options *options) {
    return strcmp(options->ops->name, "cpu") == 0;
}

/* The backend's plan, against the memory that the options name. */
static bd_status ask_plan(const bd_model_options *options, const bd_backend_options *backend,
                          bd_memory_plan *plan, bd_error *err) {
    const bd_status s = options->ops->plan(backend, plan, err);
    plan->kv_blocks = backend->kv_block_count;
    if (on_cpu(options)) plan->available /= backend->rank_count; /* one memory for all ranks */
    if (options->device_bytes && strcmp(options->ops->name, "cuda") != 0)
        plan->available = options->device_bytes;
    return s;
}

/* The ranks of a machine's CPU share its cores. */
static uint32_t threads_of(const bd_model_options *options, uint32_t rank, uint32_t ranks) {
    if (ranks == 1) return options->thread_count;
    const uint32_t all = options->thread_count ? options->thread_count : bd_usable_cores();
    const uint32_t share = all / ranks + (rank < all % ranks ? 1 : 0);
    return share ? share : 1;
}

static void fill(const bd_sizing *sizing, bd_backend_options *out) {
    const bd_model_options *options = sizing->options;
    const bd_model_config *config = sizing->config;
    const uint32_t ranks = options->rank_count ? options->rank_count : 1;
    *out = (bd_backend_options){
        .config = sizing->local,
        .rank = sizing->rank,
        .rank_count = ranks,
        .vocab_total = config->vocab,
        .vocab_first = sizing->rank * bd_rank_vocab_rows(config, ranks),
        .vocab_each = bd_rank_vocab_rows(config, ranks),
        .device_index = options->device_index + sizing->rank,
        .thread_count = threads_of(options, sizing->rank, ranks),
        .cpu_kernels = options->cpu_kernels,
        .kernels = options->kernels,
        .dtype = options->dtype,
        .device_bytes = options->device_bytes,
        .rows_max = options->rows_max,
        .seqs_max = options->seqs_max,
        .logits_rows_max = options->logits_rows_max,
        .kv_block_tokens =
            options->kv_block_tokens ? options->kv_block_tokens : KV_BLOCK_TOKENS_DEFAULT,
        .max_model_len = options->max_model_len ? options->max_model_len : config->max_positions,
        .rope_tables_max = options->rope_tables_max ? options->rope_tables_max : 1,
        .extra_vocab_max = options->ops->rows_put ? options->extra_vocab_max : 0,
        .lora_rank_max = options->lora_rank_max,
    };
    bd_layout layout;
    bd_layout_init(&layout, sizing->local, options->ops);
    out->vocab_block_rows = layout.block_rows;
}

uint32_t bd_model_rope_tables(uint32_t variants, uint32_t slots) {
    const uint32_t own = variants > slots ? variants : slots;
    return 1 + (own == 0 ? 1 : own > ROPE_TABLES_OWN_MAX ? ROPE_TABLES_OWN_MAX : own);
}

static bd_status check_options(const bd_model_options *options, const bd_model_config *config,
                               const bd_backend_options *out, bd_error *err) {
    if (out->rank_count > 1 && !options->ops->comm)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "the %s backend runs the model on one rank, %u were asked for",
                       options->ops->name, out->rank_count);
    if (out->max_model_len > config->max_positions) {
        return bd_fail(err, BD_E_LIMIT, "max_model_len",
                       "max_model_len %u is more than the model's %u positions", out->max_model_len,
                       config->max_positions);
    }
    if (out->rows_max == 0 || out->seqs_max == 0 || out->logits_rows_max == 0) {
        return bd_fail(err, BD_E_ARGUMENT, "rows_max",
                       "a step needs at least one row, sequence and logits row");
    }
    return BD_OK;
}

/* By rank 0's shapes on all ranks: it has the most rows of the vocabulary. */
static bd_status delta_bytes(const bd_sizing *sizing, uint32_t extra_rows, uint64_t *bytes,
                             bd_error *err) {
    const bd_model_options *options = sizing->options;
    bd_model_config first;
    const bd_model_config *config = &first;
    const bd_status s = bd_model_rank_config(sizing->config, 0, options->rank_count, &first, err);
    if (s != BD_OK) return s;
    uint64_t pages = options->delta_pages;
    if (pages == 0) {
        pages = (uint64_t)options->delta_slots *
                (bd_overlay_pages_per_variant(config, options->ops, 1, true) +
                 bd_overlay_extra_pages(config, options->ops, extra_rows) * (config->tied ? 1 : 2));
    }
    if (__builtin_mul_overflow(pages, bd_overlay_page_bytes(config, options->ops), bytes)) {
        return bd_fail(err, BD_E_LIMIT, "slots", "%llu delta pages are more than can be addressed",
                       (unsigned long long)pages);
    }
    return BD_OK;
}

/* Blocks of the KV cache: what was asked for, else the backend's default, cut to what fits but
 * never below one sequence of full length; that much where nobody knows what fits. */
static bd_status kv_blocks(const bd_model_options *options, bd_backend_options *backend,
                           bd_error *err) {
    const uint64_t tokens = backend->kv_block_tokens, len = backend->max_model_len;
    const uint64_t one_seq = (len + tokens - 1) / tokens;
    uint64_t want = options->kv_tokens / tokens + (options->kv_tokens % tokens != 0);
    if (options->kv_tokens == 0) {
        const bool cpu = on_cpu(options);
        const uint64_t cpu_tokens =
            KV_CPU_SEQS * len > KV_CPU_TOKENS_MIN ? KV_CPU_SEQS * len : KV_CPU_TOKENS_MIN;
        want = cpu ? (cpu_tokens + tokens - 1) / tokens : UINT32_MAX;
        bd_memory_plan one, two;
        backend->kv_block_count = 1;
        bd_status s = ask_plan(options, backend, &one, err);
        backend->kv_block_count = 2;
        if (s == BD_OK) s = ask_plan(options, backend, &two, err);
        if (s != BD_OK) return s;
        const uint64_t fixed = one.total - one.kv,
                       block_bytes = two.kv > one.kv ? two.kv - one.kv : 1;
        uint64_t left = one.available > fixed ? one.available - fixed : 0;
        left -= left / 50; /* allocators round up */
        if ((one.available > 0 || !cpu) && want > left / block_bytes) want = left / block_bytes;
        if (want < one_seq) want = one_seq;
    }
    if (want > UINT32_MAX) {
        return bd_fail(err, BD_E_LIMIT, "kv_tokens", "%llu KV blocks are too many",
                       (unsigned long long)want);
    }
    backend->kv_block_count = (uint32_t)want;
    return BD_OK;
}

bd_status bd_model_size(const bd_sizing *sizing, bd_error *err) {
    const bd_model_options *options = sizing->options;
    bd_backend_options *backend = sizing->backend;
    bd_memory_plan *plan = sizing->plan;
    bd_status s =
        bd_model_rank_config(sizing->config, sizing->rank, options->rank_count, sizing->local, err);
    if (s != BD_OK) return s;
    fill(sizing, backend);
    s = check_options(options, sizing->config, backend, err);
    if (s == BD_OK) s = delta_bytes(sizing, backend->extra_vocab_max, &backend->delta_bytes, err);
    backend->kv_block_count = 1;
    if (s == BD_OK) s = options->ops->supports(backend, err);
    if (s == BD_OK) s = kv_blocks(options, backend, err);
    if (s == BD_OK) s = options->ops->supports(backend, err);
    if (s == BD_OK) s = ask_plan(options, backend, plan, err);
    if (s != BD_OK) return s;
    /* 0: the backend cannot tell */
    return plan->available > 0 && plan->total > plan->available ? refuse(plan, backend, err)
                                                                : BD_OK;
}
