/* residency.c - states, pages, loads, leases and waiters of variants; the picture is in
 * cache_internal.h. One thread. Callbacks of waiters may call back into the cache, so every list is
 * detached or popped before a call and no pointer into one is kept over it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bitdelta/base/log.h"
#include "cache_internal.h"

#define RETRY_MAX_US UINT64_C(60000000)

/* ---- lists ---- */

static void waiters_push(bd_waiter_list *list, bd_cache_waiter *waiter) {
    waiter->next = NULL;
    if (list->last)
        list->last->next = waiter;
    else
        list->first = waiter;
    list->last = waiter;
    list->count++;
}

static bd_cache_waiter *waiters_pop(bd_waiter_list *list) {
    bd_cache_waiter *waiter = list->first;
    if (!waiter) return NULL;
    list->first = waiter->next;
    if (!list->first) list->last = NULL;
    list->count--;
    return waiter;
}

static bool waiters_remove(bd_waiter_list *list, const bd_cache_waiter *waiter) {
    bd_cache_waiter *before = NULL, *at = list->first;
    for (; at && at != waiter; at = at->next)
        before = at;
    if (!at) return false;
    if (before)
        before->next = at->next;
    else
        list->first = at->next;
    if (list->last == at) list->last = before;
    list->count--;
    return true;
}

static void waiters_append(bd_waiter_list *list, bd_waiter_list *from) {
    if (!from->first) return;
    if (list->last)
        list->last->next = from->first;
    else
        list->first = from->first;
    list->last = from->last;
    list->count += from->count;
    *from = (bd_waiter_list){0};
}

static void queue_push(bd_cache *cache, bd_variant *variant) {
    variant->next_queued = NULL;
    if (cache->queued.last)
        cache->queued.last->next_queued = variant;
    else
        cache->queued.first = variant;
    cache->queued.last = variant;
}

static void queue_remove(bd_cache *cache, const bd_variant *variant) {
    bd_variant *before = NULL, *at = cache->queued.first;
    for (; at != variant; at = at->next_queued)
        before = at;
    if (before)
        before->next_queued = at->next_queued;
    else
        cache->queued.first = at->next_queued;
    if (cache->queued.last == at) cache->queued.last = before;
}

static void residents_add(bd_cache *cache, bd_variant *variant) {
    BD_ASSERT(cache->resident_count < cache->options.page_count);
    variant->resident_index = cache->resident_count;
    cache->residents[cache->resident_count++] = variant;
}

static void residents_remove(bd_cache *cache, const bd_variant *variant) {
    bd_variant *last = cache->residents[--cache->resident_count];
    cache->residents[variant->resident_index] = last;
    last->resident_index = variant->resident_index;
}

void bd_cache_show_metrics(const bd_cache *cache) {
    if (!cache->metric_resident) return;
    bd_metric_set(cache->metric_resident, cache->resident_count);
    bd_metric_set(cache->metric_pages_free, cache->pages.free_count);
}

static void count_load(const bd_cache *cache, const bd_variant *variant, const char *result) {
    if (!cache->options.metrics) return;
    const bd_label labels[] = {{"variant", variant->delta.variant}, {"result", result}};
    bd_metric_add(bd_metrics_counter(cache->options.metrics, "bitdelta_delta_loads_total",
                                     "Loads of deltas by variant and result.", labels, 2),
                  1);
}

/* ---- going away ---- */

void bd_variant_collect(bd_cache *cache, bd_variant *variant) {
    if (!variant->forgotten || variant->state != BD_VARIANT_ABSENT || variant->load_active ||
        variant->in_delivery_queue)
        return;
    BD_ASSERT(variant->references == 0 && variant->held_pages == 0 && variant->waiters.count == 0);
    bd_variant *last = cache->variants[--cache->variant_count];
    cache->variants[variant->index] = last;
    last->index = variant->index;
    cache->policy.variant_count = cache->variant_count;
    bd_host_copy_drop(cache, variant);
    cache->source.delta_close(&variant->delta);
    free(variant->pages);
    free(variant);
}

static void give_pages(bd_cache *cache, bd_variant *variant, uint32_t keep) {
    BD_ASSERT(keep <= variant->held_pages);
    bd_pages_give(&cache->pages, variant->held_pages - keep, variant->pages + keep);
    variant->held_pages = keep;
    cache->changed = true;
}

/* READY or DRAINING, without a lease or a load: out of memory. */
static void retire(bd_cache *cache, bd_variant *variant) {
    BD_ASSERT(variant->references == 0 && !variant->load_active);
    if (variant->state == BD_VARIANT_READY) residents_remove(cache, variant);
    if (variant->overlay) cache->source.overlay_destroy(variant->overlay);
    variant->overlay = NULL;
    give_pages(cache, variant, 0);
    variant->policy.protected_by_rate = false;
    variant->state = BD_VARIANT_ABSENT;
    bd_cache_show_metrics(cache);
}

static void deliver_later(bd_cache *cache, bd_variant *variant, bool ok, bd_status status,
                          const bd_error *error) {
    if (!variant->waiters.first) return;
    waiters_append(&variant->delivery, &variant->waiters);
    variant->delivery_ok = ok;
    variant->delivery_status = status;
    if (error) variant->delivery_error = *error;
    cache->changed = true;
    if (variant->in_delivery_queue) return;
    variant->in_delivery_queue = true;
    variant->next_delivery = NULL;
    if (cache->delivering.last)
        cache->delivering.last->next_delivery = variant;
    else
        cache->delivering.first = variant;
    cache->delivering.last = variant;
}

void bd_variant_drain(bd_cache *cache, bd_variant *variant, bd_status status, const char *text) {
    bd_error error;
    bd_fail(&error, status, variant->delta.variant, "%s", text);
    deliver_later(cache, variant, false, status, &error);
    variant->prefetched = false;
    switch (variant->state) {
    case BD_VARIANT_QUEUED:
        queue_remove(cache, variant);
        give_pages(cache, variant, 0);
        variant->state = BD_VARIANT_ABSENT;
        break;
    case BD_VARIANT_LOADING:
        /* Those who have begun with it already may end. */
        if (variant->references == 0) atomic_store(&variant->load.cancel, true);
        variant->state = BD_VARIANT_DRAINING;
        break;
    case BD_VARIANT_READY:
        if (variant->references == 0) {
            retire(cache, variant);
            break;
        }
        residents_remove(cache, variant);
        variant->policy.protected_by_rate = false;
        variant->state = BD_VARIANT_DRAINING;
        break;
    case BD_VARIANT_FAILED:
        variant->state = variant->references ? BD_VARIANT_DRAINING : BD_VARIANT_ABSENT;
        break;
    case BD_VARIANT_ABSENT:
    case BD_VARIANT_DRAINING:
        break;
    }
    bd_cache_show_metrics(cache);
}

/* What a failed load kept for the steps that read it. */
static void drop_failed(bd_cache *cache, bd_variant *variant) {
    if (variant->overlay) cache->source.overlay_destroy(variant->overlay);
    variant->overlay = NULL;
    give_pages(cache, variant, 0);
    bd_cache_show_metrics(cache);
}

static void drop_reference(bd_cache *cache, bd_variant *variant) {
    BD_ASSERT(variant->references > 0);
    if (--variant->references > 0) return;
    cache->changed = true; /* a victim more, for those who were told BD_BUSY */
    if (variant->state == BD_VARIANT_FAILED) drop_failed(cache, variant);
    if (variant->state != BD_VARIANT_DRAINING) return;
    if (variant->load_active) { /* its end is the variant's */
        atomic_store(&variant->load.cancel, true);
        return;
    }
    retire(cache, variant);
    bd_variant_collect(cache, variant);
}

/* ---- coming in ---- */

/* Makes room for a variant or changes nothing. */
static bool make_room(bd_cache *cache, const bd_variant *wanted) {
    uint32_t need = wanted->need_pages;
    if (need <= cache->pages.free_count) return true;
    for (uint32_t i = 0; i < cache->resident_count; i++) {
        bd_variant *resident = cache->residents[i];
        resident->policy.fixed = resident->references > 0;
        cache->resident_items[i] = &resident->policy;
    }
    /* What is left beside pins and protected ones must take the largest variant, or it would wait
     * for ever. */
    uint32_t reserved = cache->pinned_pages + cache->largest_need_pages;
    uint32_t spare = reserved < cache->pages.count ? cache->pages.count - reserved : 0;
    bd_policy_protect(&cache->policy, cache->resident_items, cache->resident_count,
                      cache->options.pinned_top, spare);
    size_t victims = bd_policy_victims(&cache->policy, cache->resident_items, cache->resident_count,
                                       need - cache->pages.free_count, cache->victims);
    if (victims == 0) return false;
    /* Retiring one moves another's place in the list, so they are looked up first. */
    for (size_t i = 0; i < victims; i++)
        cache->leaving[i] = cache->residents[cache->victims[i]];
    for (size_t i = 0; i < victims; i++) {
        cache->leaving[i]->evictions++;
        if (cache->metric_evictions) bd_metric_add(cache->metric_evictions, 1);
        retire(cache, cache->leaving[i]);
    }
    BD_ASSERT(need <= cache->pages.free_count);
    return true;
}

/* Here, not where requests are answered: a load that nobody waits for fails unseen otherwise, and
 * one that many wait for would be told of many times. The backoff bounds how often. */
static void log_failure(const bd_variant *variant, uint64_t delay_us) {
    char what[BD_VARIANT_NAME_MAX + 96];
    (void)snprintf(what, sizeof what, "load of variant %s failed, retried after %.1f s",
                   variant->delta.variant, (double)delay_us * 1e-6);
    bd_log_error("cache", what, &variant->failure);
}

static void fail_load(bd_cache *cache, bd_variant *variant, bd_status status, const bd_error *error,
                      uint64_t now_us) {
    variant->failure = *error;
    variant->failure.status = status;
    uint64_t delay_us = cache->options.retry_after_us;
    for (uint32_t i = 0; i < variant->failure_count && delay_us < RETRY_MAX_US; i++)
        delay_us *= 2;
    if (delay_us > RETRY_MAX_US) delay_us = RETRY_MAX_US;
    variant->failure_count++;
    variant->retry_at_us = now_us + delay_us;
    variant->state = BD_VARIANT_FAILED;
    variant->prefetched = false;
    if (variant->references == 0) drop_failed(cache, variant);
    deliver_later(cache, variant, false, status, &variant->failure);
    count_load(cache, variant, "failed");
    log_failure(variant, delay_us);
    bd_cache_show_metrics(cache);
}

static void start_loads(bd_cache *cache, uint64_t now_us) {
    while (cache->queued.first && cache->active_count < cache->options.loads_in_parallel) {
        bd_variant *variant = cache->queued.first;
        queue_remove(cache, variant);
        variant->load = (bd_load){
            .delta = &variant->delta,
            .pages = variant->pages,
            .page_count = variant->held_pages,
            .stream = cache->may_start != NULL,
        };
        bd_host_copy_begin(cache, variant);
        variant->state = BD_VARIANT_LOADING;
        bd_error error = {0};
        bd_status status = cache->source.submit(cache->source.ctx, &variant->load, &error);
        if (status != BD_OK) {
            variant->load.status = status;
            bd_host_copy_end(cache, variant);
            fail_load(cache, variant, status, &error, now_us);
            continue;
        }
        variant->load_active = true;
        variant->next_active = cache->active;
        cache->active = variant;
        cache->active_count++;
    }
}

static bd_status report_failure(const bd_variant *variant, bd_error *err) {
    if (err) *err = variant->failure;
    return BD_E_VARIANT;
}

bd_status bd_variant_want(bd_cache *cache, bd_variant *variant, uint64_t now_us, bd_error *err) {
    if (variant->forgotten)
        return bd_fail(err, BD_E_NOT_FOUND, variant->delta.variant, "this variant was removed");
    switch (variant->state) {
    case BD_VARIANT_READY:
    case BD_VARIANT_QUEUED:
    case BD_VARIANT_LOADING:
        return BD_OK;
    case BD_VARIANT_DRAINING:
        return bd_fail(err, BD_BUSY, variant->delta.variant, "the variant is being unloaded");
    case BD_VARIANT_FAILED:
        if (now_us < variant->retry_at_us) return report_failure(variant, err);
        if (variant->references > 0)
            return bd_fail(err, BD_BUSY, variant->delta.variant,
                           "requests that began with the failed load are still ending");
        break;
    case BD_VARIANT_ABSENT:
        break;
    }
    if (!make_room(cache, variant))
        return bd_fail(err, BD_BUSY, variant->delta.variant,
                       "all pages are in use or protected; %" PRIu32 " are needed",
                       variant->need_pages);
    bool taken = bd_pages_take(&cache->pages, variant->need_pages, variant->pages);
    BD_ASSERT(taken);
    variant->held_pages = variant->need_pages;
    variant->state = BD_VARIANT_QUEUED;
    queue_push(cache, variant);
    start_loads(cache, now_us);
    bd_cache_show_metrics(cache);
    return variant->state == BD_VARIANT_FAILED ? report_failure(variant, err) : BD_OK;
}

/* ---- leases ---- */

/* Not by the state: one that drains may still load for those who have begun. */
static bd_lease lease_of(bd_variant *variant) {
    return (bd_lease){.variant = variant,
                      .overlay = variant->overlay,
                      .load = variant->load_active ? &variant->load : NULL};
}

/* Whether a lease may be given out while the variant loads; the overlay is there then. Asked for
 * every one: of a load that stopped moving, those who come later wait here, not in the engine. */
static bool may_lease_early(const bd_cache *cache, bd_variant *variant, uint64_t now_us) {
    if (variant->state != BD_VARIANT_LOADING || !cache->may_start) return false;
    /* Others are being told right now: nobody is to wait behind them. */
    if (variant->overlay && variant->delivery.first) return true;
    const bd_load *load = &variant->load;
    const bd_load_early *early = atomic_load_explicit(&load->early, memory_order_acquire);
    /* A finished one is ready, or failed, in a moment. */
    if (!early || bd_load_finished(load)) return false;
    if (!cache->may_start(cache->may_start_ctx, load, now_us)) return false;
    variant->overlay = early->overlay;
    return true;
}

static void lease_early(bd_cache *cache, uint64_t now_us) {
    for (bd_variant *v = cache->active; v; v = v->next_active) {
        if (!v->waiters.first || !may_lease_early(cache, v, now_us)) continue;
        v->references += v->waiters.count;
        deliver_later(cache, v, true, BD_OK, NULL);
    }
}

bd_status bd_cache_acquire(bd_cache *cache, bd_variant *variant, uint64_t now_us, bd_lease *lease,
                           bd_cache_waiter *waiter, bd_error *err) {
    *lease = (bd_lease){0};
    bd_status status = bd_variant_want(cache, variant, now_us, err);
    if (status != BD_OK) return status;
    variant->last_use_us = now_us;
    if (variant->state == BD_VARIANT_READY || may_lease_early(cache, variant, now_us)) {
        variant->references++;
        *lease = lease_of(variant);
        return BD_OK;
    }
    if (waiter) {
        waiter->variant = variant;
        waiters_push(&variant->waiters, waiter);
    } else {
        variant->prefetched = true; /* nobody's leaving may drop it from the queue */
    }
    return BD_AGAIN;
}

void bd_cache_wait_cancel(bd_cache *cache, bd_cache_waiter *waiter) {
    bd_variant *variant = waiter->variant;
    if (!variant) return;
    waiter->variant = NULL;
    if (waiters_remove(&variant->delivery, waiter)) {
        if (variant->delivery_ok) drop_reference(cache, variant);
        return;
    }
    bool found = waiters_remove(&variant->waiters, waiter);
    BD_ASSERT(found);
    /* Nobody wants it any more and nothing was read yet. A load under way is worth finishing. */
    if (variant->state != BD_VARIANT_QUEUED || variant->waiters.first || variant->prefetched)
        return;
    queue_remove(cache, variant);
    give_pages(cache, variant, 0);
    variant->state = BD_VARIANT_ABSENT;
    bd_cache_show_metrics(cache);
}

void bd_cache_release(bd_cache *cache, bd_lease *lease, uint64_t now_us) {
    bd_variant *variant = lease->variant;
    if (!variant) return;
    *lease = (bd_lease){0};
    variant->last_use_us = now_us;
    drop_reference(cache, variant);
}

/* ---- poll ---- */

static void become_ready(bd_cache *cache, bd_variant *variant) {
    bd_load *load = &variant->load;
    BD_ASSERT(load->pages_used <= variant->held_pages);
    if (load->pages_used > 0 && load->pages_used < variant->held_pages)
        give_pages(cache, variant, load->pages_used);
    variant->policy.pages = variant->held_pages;
    variant->policy.admission = ++cache->admissions;
    variant->failure_count = 0;
    variant->failure.status = BD_OK;
    variant->loads++;
    variant->load_us = load->finished_us - load->started_us;
    variant->state = BD_VARIANT_READY;
    variant->prefetched = false;
    residents_add(cache, variant);
    /* Every waiter has its reference before anyone is called: what just came in cannot be evicted
     * by the first of them. */
    variant->references += variant->waiters.count;
    deliver_later(cache, variant, true, BD_OK, NULL);
    count_load(cache, variant, "ok");
    bd_cache_show_metrics(cache);
}

/* The overlay that the load leaves behind, if any; what was shared while it ran ends here. */
static bd_overlay *take_overlay(bd_load *load) {
    bd_load_early *early = atomic_load(&load->early);
    bd_overlay *overlay = load->status == BD_OK ? load->overlay : NULL;
    if (early) overlay = early->overlay;
    atomic_store(&load->early, NULL);
    free(early);
    return overlay;
}

static void load_finished(bd_cache *cache, bd_variant *variant, uint64_t now_us) {
    variant->load_active = false;
    cache->active_count--;
    cache->changed = true;
    bd_load *load = &variant->load;
    variant->overlay = take_overlay(load);
    bd_host_copy_end(cache, variant);
    if (variant->state == BD_VARIANT_LOADING) {
        if (load->status == BD_OK)
            become_ready(cache, variant);
        else
            fail_load(cache, variant, load->status, &load->error, now_us);
        return;
    }
    BD_ASSERT(variant->state == BD_VARIANT_DRAINING);
    count_load(cache, variant, "cancelled");
    if (variant->references > 0) return;
    retire(cache, variant);
    bd_variant_collect(cache, variant);
}

static void finish_loads(bd_cache *cache, uint64_t now_us) {
    bd_variant *still = NULL, *next;
    bd_variant *active = cache->active;
    cache->active = NULL;
    for (; active; active = next) {
        next = active->next_active;
        if (bd_load_finished(&active->load)) {
            load_finished(cache, active, now_us);
            continue;
        }
        active->next_active = still;
        still = active;
    }
    cache->active = still;
}

static void call_waiter(bd_variant *variant, bd_cache_waiter *waiter) {
    waiter->variant = NULL;
    if (variant->delivery_ok) {
        const bd_lease lease = lease_of(variant);
        waiter->ready(waiter, BD_OK, &lease, NULL);
        return;
    }
    /* A copy: the waiter may start the next load, which may fail at once and write another error.
     */
    const bd_error error = variant->delivery_error;
    waiter->ready(waiter, variant->delivery_status, NULL, &error);
}

static void deliver(bd_cache *cache) {
    bd_variant *variant;
    while ((variant = cache->delivering.first) != NULL) {
        bd_cache_waiter *waiter = waiters_pop(&variant->delivery);
        if (waiter) {
            call_waiter(variant, waiter);
            continue;
        }
        cache->delivering.first = variant->next_delivery;
        if (!cache->delivering.first) cache->delivering.last = NULL;
        variant->in_delivery_queue = false;
        bd_variant_collect(cache, variant);
    }
}

bool bd_cache_poll(bd_cache *cache, uint64_t now_us) {
    /* What was decided between polls first, so that a variant's waiters of then and of now do not
     * mix. */
    deliver(cache);
    finish_loads(cache, now_us);
    start_loads(cache, now_us);
    lease_early(cache, now_us);
    deliver(cache);
    bool changed = cache->changed;
    cache->changed = false;
    return changed;
}

void bd_cache_stop_loads(bd_cache *cache) {
    for (bd_variant *v = cache->active; v; v = v->next_active)
        atomic_store(&v->load.cancel, true);
    for (bd_variant *v = cache->active; v; v = v->next_active) {
        while (!bd_load_finished(&v->load)) {
            const struct timespec pause = {.tv_nsec = 200000};
            nanosleep(&pause, NULL);
        }
        bd_overlay *overlay = take_overlay(&v->load);
        if (overlay) cache->source.overlay_destroy(overlay);
        v->overlay = NULL;
    }
    cache->active = NULL;
    cache->active_count = 0;
}
