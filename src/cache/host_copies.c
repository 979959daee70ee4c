/* host_copies.c - which variants have their file bytes in host memory. Every load from disk leaves
 * a copy there if those that must give way for it are less likely to be wanted, by the same score
 * that decides over the device's pages. A copy belongs to its variant, and a variant to one
 * delta.json: replaced files are a new variant, which finds none. One thread, the cache's. */
#include "cache_internal.h"

static uint64_t file_bytes(const bd_variant *variant) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < variant->delta.shard_count; i++)
        bytes += variant->delta.files[i].bytes;
    return bytes;
}

static void show(bd_cache *cache) {
    if (!cache->metric_host_used) return;
    bd_metric_set(cache->metric_host_used, (double)bd_host_tier_used_bytes(cache->host));
    bd_metric_set(cache->metric_host_total, (double)bd_host_tier_total_bytes(cache->host));
}

/* A copy that may go, of the lowest score below the newcomer's; NULL: none. */
static bd_variant *least_wanted(const bd_cache *cache, double below) {
    bd_variant *least = NULL;
    for (uint32_t i = 0; i < cache->variant_count; i++) {
        bd_variant *variant = cache->variants[i];
        if (!variant->host || variant->load_active) continue;
        const double score = bd_policy_score(&cache->policy, &variant->policy);
        if (score >= below) continue;
        least = variant;
        below = score;
    }
    return least;
}

/* Bytes that would be free if all copies of a lower score went. */
static uint64_t reachable(bd_cache *cache, double below) {
    uint64_t bytes = bd_host_tier_free_bytes(cache->host);
    for (uint32_t i = 0; i < cache->variant_count; i++) {
        const bd_variant *variant = cache->variants[i];
        if (!variant->host || variant->load_active) continue;
        if (bd_policy_score(&cache->policy, &variant->policy) < below)
            bytes += bd_host_tier_need_bytes(cache->host, variant->host->bytes);
    }
    return bytes;
}

static void make_copy(bd_cache *cache, bd_variant *variant) {
    const uint64_t bytes = file_bytes(variant);
    const uint64_t need = bd_host_tier_need_bytes(cache->host, bytes);
    const double score = bd_policy_score(&cache->policy, &variant->policy);
    if (need > reachable(cache, score)) return;
    while (bd_host_tier_free_bytes(cache->host) < need) {
        bd_variant *least = least_wanted(cache, score);
        BD_ASSERT(least);
        bd_host_copy_drop(cache, least);
    }
    variant->host = bd_host_tier_take(cache->host, bytes);
}

void bd_host_copy_begin(bd_cache *cache, bd_variant *variant) {
    if (!cache->host) return;
    const bool hit = variant->host != NULL;
    if (hit) variant->host_hits++;
    bd_metric *metric = hit ? cache->metric_host_hits : cache->metric_host_misses;
    if (metric) bd_metric_add(metric, 1);
    if (!hit) make_copy(cache, variant);
    variant->load.host = variant->host;
    show(cache);
}

void bd_host_copy_end(bd_cache *cache, bd_variant *variant) {
    const bool failed = variant->load.status != BD_OK && variant->load.status != BD_CANCELLED;
    variant->load.host = NULL;
    if (variant->host && (!variant->host->filled || failed)) bd_host_copy_drop(cache, variant);
    variant->host_whole = variant->host != NULL;
}

void bd_host_copy_drop(bd_cache *cache, bd_variant *variant) {
    if (!variant->host) return;
    bd_host_tier_give(cache->host, variant->host);
    variant->host = NULL;
    variant->host_whole = false;
    show(cache);
}

void bd_host_metrics_make(bd_cache *cache) {
    bd_metrics *metrics = cache->options.metrics;
    if (!metrics || !cache->host) return;
    cache->metric_host_used = bd_metrics_gauge(metrics, "bitdelta_delta_host_bytes",
                                               "Host memory that copies of deltas take.", NULL, 0);
    cache->metric_host_total = bd_metrics_gauge(metrics, "bitdelta_delta_host_bytes_total",
                                                "Host memory for copies of deltas.", NULL, 0);
    cache->metric_host_hits = bd_metrics_counter(metrics, "bitdelta_delta_host_hits_total",
                                                 "Loads that came from host memory.", NULL, 0);
    cache->metric_host_misses =
        bd_metrics_counter(metrics, "bitdelta_delta_host_misses_total",
                           "Loads that had to read the disk beside host memory.", NULL, 0);
    show(cache);
}
