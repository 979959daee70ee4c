/* squeeze.c - bounded waiting of cold variants. While every page is leased, a cold variant is told
 * BD_BUSY; when that has lasted cold_wait_max_us, the least wanted resident variant gets no new
 * sequences until its pages are free. bd-sched only. */
#include "internal.h"

enum { SQUEEZE_CHECK_US = 5000 };

static bd_router_queue *longest_refused(const bd_router *router, uint64_t now_us) {
    bd_router_queue *longest = NULL;
    for (bd_router_queue *q = router->active_first; q; q = q->next) {
        if (q->refused_us == 0 || q->paused) continue;
        if (now_us - q->refused_us < router->options.cold_wait_max_us) continue;
        if (!longest || q->refused_us < longest->refused_us) longest = q;
    }
    return longest;
}

/* Those that are served, then those that are not any more but still have requests or pages: a
 * squeeze is about both, for a variant may be retired at any moment of one. */
static bd_router_queue *first_variant(const bd_router *router) {
    return router->queue_count > 1 ? router->queues[1] : router->retired_first;
}

static bd_router_queue *next_variant(const bd_router *router, const bd_router_queue *queue,
                                     uint32_t *at) {
    if (queue->retired) return queue->next_retired;
    return ++*at < router->queue_count ? router->queues[*at] : router->retired_first;
}

/* Its weights could not be read again. */
static bool is_lost(const bd_router_queue *queue, const bd_variant_info *info) {
    return queue->retired && !queue->keeps_files && info->host_bytes == 0;
}

/* Variants that the cache would not evict anyway, pinned or among the most wanted, gain nobody
 * anything. One whose files are gone would not come back for those who wait for it, so it gives way
 * only when nobody else can. */
static bd_router_queue *least_wanted(const bd_router *router, uint64_t now_us, bool *draining,
                                     bool *lost) {
    bd_router_queue *least = NULL;
    double least_rate = 0.0;
    uint32_t at = 1;
    *draining = false;
    *lost = true;
    for (bd_router_queue *q = first_variant(router); q; q = next_variant(router, q, &at)) {
        bd_variant_info info;
        if (q == router->squeezer) continue;
        bd_cache_info(router->options.cache, q->served.variant, now_us, &info);
        if (info.references == 0 || info.pinned || info.protected_by_rate) continue;
        if (q->paused) {
            *draining = true;
            continue;
        }
        const bool q_lost = is_lost(q, &info);
        if (least && (q_lost != *lost ? q_lost : info.rate_per_s >= least_rate)) continue;
        least = q;
        least_rate = info.rate_per_s;
        *lost = q_lost;
    }
    return least;
}

/* Those who wait for what nobody can read again get its successor when they ask again. */
static void dismiss(bd_router_queue *queue) {
    bd_error err;
    (void)bd_fail(&err, BD_BUSY, queue->served.name,
                  "variant %s was replaced or removed while requests waited for it, and its pages "
                  "went to another",
                  queue->served.name);
    bd_queue_fail_all(queue, BD_E_VARIANT, &err, 1);
}

void bd_squeeze_update(bd_router *router, uint64_t now_us) {
    if (router->refused_count == 0 || now_us < router->squeeze_check_us) return;
    router->squeeze_check_us = now_us + SQUEEZE_CHECK_US;
    if (!router->squeezer) router->squeezer = longest_refused(router, now_us);
    if (!router->squeezer) return;
    bool draining, lost;
    bd_router_queue *victim = least_wanted(router, now_us, &draining, &lost);
    if (!victim || (draining && (lost || now_us < router->squeeze_next_us))) return;
    /* The next one follows only if this one's sequences take as long again. */
    router->squeeze_next_us = now_us + router->options.cold_wait_max_us;
    victim->paused = true;
    bd_queue_drop_lease(victim, now_us);
    if (lost) dismiss(victim);
}

void bd_squeeze_end(bd_router *router) {
    router->squeezer = NULL;
    uint32_t at = 1;
    for (bd_router_queue *q = first_variant(router); q; q = next_variant(router, q, &at))
        q->paused = false;
}
