/* memory.c - how large everything is, decided before a weight is read or a byte of the device is
 * touched. */
#include <stdio.h>
#include <string.h>

#include "bitdelta/model/overlay.h"
#include "internal.h"
#include "layout.h"

enum { KV_BLOCK_TOKENS_DEFAULT = 16, KV_CPU_TOKENS_MIN = 16384, KV_CPU_SEQS = 4 };

static double mib(uint64_t bytes) {
    return (double)bytes / (1024.0 * 1024.0);
}

static bd_status refuse(const bd_memory_plan *plan, const bd_backend_options *backend,
                        bd_error *err) {
    return bd_fail(err, BD_E_LIMIT, "memory",
                   "does not fit: %.1f MiB = weights %.1f + workspace %.1f + KV cache %.1f (%u "
                   "blocks of %u tokens) "
                   "+ logits %.1f + delta pages %.1f; %.1f MiB are available. Lower the context "
                   "length, the number "
                   "of slots or the rows of a step",
                   mib(plan->total), mib(plan->weights), mib(plan->workspace), mib(plan->kv),
                   backend->kv_block_count, backend->kv_block_tokens, mib(plan->logits),
                   mib(plan->deltas), mib(plan->available));
}

/* The backend's plan, against the memory that the options name. */
static bd_status ask_plan(const bd_model_options *options, const bd_backend_options *backend,
                          bd_memory_plan *plan, bd_error *err) {
    const bd_status s = options->ops->plan(backend, plan, err);
    plan->kv_blocks = backend->kv_block_count;
    if (options->device_bytes && strcmp(options->ops->name, "cuda") != 0)
        plan->available = options->device_bytes;
    return s;
}

static bd_status fill(const bd_model_options *options, const bd_model_config *config,
                      bd_backend_options *out, bd_error *err) {
    *out = (bd_backend_options){
        .config = config,
        .rank = options->rank,
        .rank_count = options->rank_count ? options->rank_count : 1,
        .device_index = options->device_index,
        .thread_count = options->thread_count,
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
    };
    bd_layout layout;
    bd_layout_init(&layout, config, options->ops);
    out->vocab_block_rows = layout.block_rows;
    if (out->rank_count != 1 || out->rank != 0) {
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "a model split over %u ranks is not supported", out->rank_count);
    }
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

static bd_status delta_bytes(const bd_model_options *options, const bd_model_config *config,
                             uint32_t extra_rows, uint64_t *bytes, bd_error *err) {
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
 * never below one sequence of full length. */
static bd_status kv_blocks(const bd_model_options *options, bd_backend_options *backend,
                           bd_error *err) {
    const uint64_t tokens = backend->kv_block_tokens, len = backend->max_model_len;
    const uint64_t one_seq = (len + tokens - 1) / tokens;
    uint64_t want = options->kv_tokens / tokens + (options->kv_tokens % tokens != 0);
    if (options->kv_tokens == 0) {
        const bool cpu = strcmp(options->ops->name, "cpu") == 0;
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
        if (one.available > 0 && want > left / block_bytes) want = left / block_bytes;
        if (want < one_seq) want = one_seq;
    }
    if (want > UINT32_MAX) {
        return bd_fail(err, BD_E_LIMIT, "kv_tokens", "%llu KV blocks are too many",
                       (unsigned long long)want);
    }
    backend->kv_block_count = (uint32_t)want;
    return BD_OK;
}

bd_status bd_model_size(const bd_model_options *options, const bd_model_config *config,
                        bd_backend_options *backend, bd_memory_plan *plan, bd_error *err) {
    bd_status s = fill(options, config, backend, err);
    if (s == BD_OK)
        s = delta_bytes(options, config, backend->extra_vocab_max, &backend->delta_bytes, err);
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
