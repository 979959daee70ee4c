/* cache.c - the registry of variants, pins and admin calls, and what the cache takes from model and
 * loader. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cache_internal.h"

#define VARIANTS_MAX (1u << 20)

/* ---- create and destroy ---- */

static void make_metrics(bd_cache *cache) {
    bd_metrics *metrics = cache->options.metrics;
    if (!metrics) return;
    cache->metric_resident = bd_metrics_gauge(metrics, "bitdelta_delta_resident",
                                              "Variants whose delta is resident.", NULL, 0);
    cache->metric_pages_free = bd_metrics_gauge(metrics, "bitdelta_delta_pages_free",
                                                "Free pages of delta memory.", NULL, 0);
    cache->metric_evictions =
        bd_metrics_counter(metrics, "bitdelta_delta_evictions_total",
                           "Deltas evicted to make room for another.", NULL, 0);
    bd_metric_set(
        bd_metrics_gauge(metrics, "bitdelta_delta_pages_total", "Pages of delta memory.", NULL, 0),
        cache->pages.count);
    bd_cache_show_metrics(cache);
}

bd_status bd_cache_create_with(const bd_cache_options *options, const bd_cache_source *source,
                               bd_cache **out, bd_error *err) {
    *out = NULL;
    bd_cache *cache = calloc(1, sizeof *cache);
    if (!cache) return bd_fail(err, BD_E_MEMORY, "cache", "out of memory for the cache");
    cache->options = *options;
    cache->source = *source;
    if (cache->options.loads_in_parallel == 0) cache->options.loads_in_parallel = 2;
    bd_policy_init(&cache->policy, options->half_life_s);
    uint32_t count = options->page_count;
    bd_status status = bd_pages_init(&cache->pages, source->arena, source->page_bytes, count, err);
    if (status != BD_OK) goto fail_free;
    cache->residents = calloc(count, sizeof(bd_variant *));
    cache->resident_items = calloc(count, sizeof(bd_policy_item *));
    cache->victims = calloc(count, sizeof *cache->victims);
    cache->leaving = calloc(count, sizeof(bd_variant *));
    if (!cache->residents || !cache->resident_items || !cache->victims || !cache->leaving) {
        status = bd_fail(err, BD_E_MEMORY, "cache", "out of memory for the cache");
        goto fail_lists;
    }
    if (options->host_bytes > 0) {
        const bd_host_options host = {
            .bytes = options->host_bytes,
            .block_bytes = bd_host_block_bytes(source->page_bytes, options->host_bytes),
            .memory = source->host_memory};
        status = bd_host_tier_create(&host, &cache->host, err);
        if (status != BD_OK) goto fail_lists;
    }
    make_metrics(cache);
    bd_host_metrics_make(cache);
    *out = cache;
    return BD_OK;
fail_lists:
    free(cache->residents);
    free(cache->resident_items);
    free(cache->victims);
    free(cache->leaving);
    bd_pages_deinit(&cache->pages);
fail_free:
    free(cache);
    return status;
}

static uint32_t pages_for(void *ctx, const bd_delta *delta) {
    const bd_cache_options *options = ctx;
    return bd_overlay_pages_for(options->model, delta);
}

static void *host_alloc(void *ctx, uint64_t bytes) {
    bd_model *model = ctx;
    return bd_model_ops(model)->host_alloc(bd_model_backend(model), bytes);
}

static void host_free(void *ctx, void *memory, uint64_t bytes) {
    bd_model *model = ctx;
    bd_model_ops(model)->host_free(bd_model_backend(model), memory, bytes);
}

static bd_status submit(void *ctx, bd_load *load, bd_error *err) {
    const bd_cache_options *options = ctx;
    return bd_loader_submit(options->loader, load, err);
}

bd_status bd_cache_create(const bd_cache_options *options, bd_cache **out, bd_error *err) {
    const bd_backend_ops *ops = bd_model_ops(options->model);
    const bd_cache_source source = {
        .arena = ops->delta_arena(bd_model_backend(options->model)),
        .page_bytes = bd_model_page_bytes(options->model),
        .pages_for = pages_for,
        .submit = submit,
        .overlay_destroy = bd_overlay_destroy,
        .delta_close = bd_delta_close,
        .host_memory = {.ctx = options->model,
                        .alloc = ops->host_alloc ? host_alloc : NULL,
                        .free = ops->host_alloc ? host_free : NULL},
    };
    bd_status status = bd_cache_create_with(options, &source, out, err);
    if (status != BD_OK) return status;
    BD_ASSERT(*out);
    (*out)->source.ctx = &(*out)->options;
    return BD_OK;
}

void bd_cache_destroy(bd_cache *cache) {
    if (!cache) return;
    bd_cache_stop_loads(cache);
    for (uint32_t i = 0; i < cache->variant_count; i++) {
        bd_variant *variant = cache->variants[i];
        BD_ASSERT(variant->references == 0);
        if (variant->overlay) cache->source.overlay_destroy(variant->overlay);
        bd_host_copy_drop(cache, variant);
        cache->source.delta_close(&variant->delta);
        free(variant->pages);
        free(variant);
    }
    bd_host_tier_destroy(cache->host);
    bd_pages_deinit(&cache->pages);
    free(cache->variants);
    free(cache->residents);
    free(cache->resident_items);
    free(cache->victims);
    free(cache->leaving);
    free(cache);
}

void bd_cache_stream(bd_cache *cache,
                     bool (*may_start)(void *ctx, const bd_load *load, uint64_t now_us),
                     void *ctx) {
    cache->may_start = may_start;
    cache->may_start_ctx = ctx;
}

/* ---- registry ---- */

static bool grow_registry(bd_cache *cache) {
    if (cache->variant_count < cache->variant_cap) return true;
    if (cache->variant_cap >= VARIANTS_MAX) return false;
    uint32_t cap = cache->variant_cap ? 2 * cache->variant_cap : 16;
    bd_variant **grown = realloc(cache->variants, cap * sizeof(bd_variant *));
    if (!grown) return false;
    cache->variants = grown;
    cache->variant_cap = cap;
    return true;
}

/* Every registered variant must fit beside the pins, and the largest beside one pin more. */
static bd_status check_pages(const bd_cache *cache, const bd_delta *delta, uint32_t need_pages,
                             bool pin_more, bd_error *err) {
    uint64_t pinned = cache->pinned_pages;
    uint64_t largest =
        need_pages > cache->largest_need_pages ? need_pages : cache->largest_need_pages;
    if (need_pages == 0 || need_pages > cache->pages.count)
        return bd_fail(err, BD_E_LIMIT, delta->variant,
                       "needs %" PRIu32 " page%s of delta memory, there %s %" PRIu32
                       "; more --slots give more pages",
                       need_pages, bd_plural(need_pages), cache->pages.count == 1 ? "is" : "are",
                       cache->pages.count);
    if (need_pages > cache->pages.count - pinned)
        return bd_fail(err, BD_E_LIMIT, delta->variant,
                       "needs %" PRIu32 " page%s of delta memory, %" PRIu64 " of %" PRIu32
                       " %s pinned",
                       need_pages, bd_plural(need_pages), pinned, cache->pages.count,
                       pinned == 1 ? "is" : "are");
    if (pin_more && pinned + need_pages + largest > cache->pages.count)
        return bd_fail(err, BD_E_LIMIT, delta->variant,
                       "cannot be pinned: with %" PRIu64 " of %" PRIu32
                       " pages pinned, the %" PRIu64 " of the largest variant would not be left",
                       pinned + need_pages, cache->pages.count, largest);
    return BD_OK;
}

bd_status bd_cache_register(bd_cache *cache, bd_delta *delta, bool pinned, bd_variant **out,
                            bd_error *err) {
    *out = NULL;
    bd_variant *variant = NULL;
    uint32_t need_pages = cache->source.pages_for(cache->source.ctx, delta);
    bd_status status = check_pages(cache, delta, need_pages, pinned, err);
    if (status != BD_OK) goto fail;
    status = bd_fail(err, BD_E_MEMORY, delta->variant, "out of memory for another variant");
    if (!grow_registry(cache)) goto fail;
    variant = calloc(1, sizeof *variant);
    if (!variant) goto fail;
    variant->pages = calloc(need_pages, sizeof(void *));
    if (!variant->pages) goto fail;
    bd_error_clear(err);
    variant->delta = *delta;
    memset(delta, 0, sizeof *delta);
    variant->need_pages = need_pages;
    variant->policy.pages = need_pages;
    variant->policy.pinned = pinned;
    variant->index = cache->variant_count;
    cache->variants[cache->variant_count++] = variant;
    cache->policy.variant_count = cache->variant_count;
    if (pinned) cache->pinned_pages += need_pages;
    if (need_pages > cache->largest_need_pages) cache->largest_need_pages = need_pages;
    *out = variant;
    return BD_OK;
fail:
    free(variant);
    cache->source.delta_close(delta);
    memset(delta, 0, sizeof *delta);
    return status;
}

static void find_largest(bd_cache *cache) {
    cache->largest_need_pages = 0;
    for (uint32_t i = 0; i < cache->variant_count; i++) {
        const bd_variant *variant = cache->variants[i];
        if (!variant->forgotten && variant->need_pages > cache->largest_need_pages)
            cache->largest_need_pages = variant->need_pages;
    }
}

static void set_pinned(bd_cache *cache, bd_variant *variant, bool pinned) {
    if (variant->policy.pinned == pinned) return;
    variant->policy.pinned = pinned;
    if (pinned)
        cache->pinned_pages += variant->need_pages;
    else
        cache->pinned_pages -= variant->need_pages;
    cache->changed = true;
}

void bd_cache_forget(bd_cache *cache, bd_variant *variant) {
    if (variant->forgotten) return;
    variant->forgotten = true;
    set_pinned(cache, variant, false);
    find_largest(cache);
    bd_variant_drain(cache, variant, BD_E_NOT_FOUND, "this variant was removed");
    bd_variant_collect(cache, variant);
}

void bd_cache_retire(bd_cache *cache, bd_variant *variant) {
    set_pinned(cache, variant, false);
    variant->policy.retired = true;
    variant->policy.protected_by_rate = false;
    cache->changed = true;
}

void bd_cache_touch(bd_cache *cache, bd_variant *variant, uint64_t now_us) {
    bd_policy_touch(&cache->policy, &variant->policy, now_us);
}

/* ---- admin ---- */

bd_status bd_cache_pin(bd_cache *cache, bd_variant *variant, bool pinned, bd_error *err) {
    if (variant->forgotten)
        return bd_fail(err, BD_E_NOT_FOUND, variant->delta.variant, "this variant was removed");
    if (pinned && !variant->policy.pinned) {
        bd_status status = check_pages(cache, &variant->delta, variant->need_pages, true, err);
        if (status != BD_OK) return status;
    }
    set_pinned(cache, variant, pinned);
    return BD_OK;
}

bd_status bd_cache_prefetch(bd_cache *cache, bd_variant *variant, uint64_t now_us, bd_error *err) {
    bd_status status = bd_variant_want(cache, variant, now_us, err);
    if (status != BD_OK || variant->state == BD_VARIANT_READY) return status;
    if (variant->state == BD_VARIANT_QUEUED) variant->prefetched = true;
    return BD_AGAIN;
}

bd_status bd_cache_unload(bd_cache *cache, bd_variant *variant, bd_error *err) {
    if (variant->forgotten)
        return bd_fail(err, BD_E_NOT_FOUND, variant->delta.variant, "this variant was removed");
    variant->failure_count = 0;
    variant->failure.status = BD_OK;
    bd_variant_drain(cache, variant, BD_E_VARIANT, "the variant was unloaded while it was loading");
    if (variant->state == BD_VARIANT_ABSENT) return BD_OK;
    if (variant->load_active && variant->references == 0)
        return bd_fail(err, BD_BUSY, variant->delta.variant, "its load is being stopped");
    const bool one = variant->references == 1;
    return bd_fail(err, BD_BUSY, variant->delta.variant,
                   "%" PRIu32 " request%s still use%s it; it goes when %s", variant->references,
                   one ? "" : "s", one ? "s" : "", one ? "that one ends" : "they end");
}

void bd_cache_info(const bd_cache *cache, const bd_variant *variant, uint64_t now_us,
                   bd_variant_info *out) {
    *out = (bd_variant_info){
        .name = variant->delta.variant,
        .state = variant->state,
        .page_bytes = variant->held_pages * cache->pages.page_bytes,
        .load_us = variant->load_us,
        .last_use_us = variant->last_use_us,
        .loads = variant->loads,
        .evictions = variant->evictions,
        .host_bytes = variant->host_whole ? variant->host->bytes : 0,
        .host_hits = variant->host_hits,
        .references = variant->references,
        .waiters = variant->waiters.count,
        .pinned = variant->policy.pinned,
        .protected_by_rate = variant->policy.protected_by_rate,
        .rate_per_s = bd_policy_rate(&cache->policy, &variant->policy, now_us),
        .retry_at_us = variant->state == BD_VARIANT_FAILED ? variant->retry_at_us : 0,
        .failure = variant->failure.status != BD_OK ? &variant->failure : NULL,
    };
    for (uint32_t i = 0; i < variant->delta.shard_count; i++)
        out->file_bytes += variant->delta.files[i].bytes;
}

uint32_t bd_cache_pages_free(const bd_cache *cache) {
    return cache->pages.free_count;
}
