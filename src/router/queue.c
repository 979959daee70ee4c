/* queue.c - from queues to the engine: one lease and one sequence at a time, round and round over
 * the variants, so that no variant's backlog delays another's first request. bd-sched only. */
#include "bitdelta/base/clock.h"
#include "internal.h"

/* ---- The ring of queues with work ---- */

static void activate(bd_router_queue *queue) {
    bd_router *router = queue->router;
    if (queue->active) return;
    queue->active = true;
    queue->prev = router->active_last;
    queue->next = NULL;
    if (router->active_last)
        router->active_last->next = queue;
    else
        router->active_first = queue;
    router->active_last = queue;
}

static void set_refused(bd_router_queue *queue, uint64_t since_us) {
    if (queue->refused_us == 0 && since_us != 0) queue->router->refused_count++;
    if (queue->refused_us != 0 && since_us == 0) queue->router->refused_count--;
    queue->refused_us = since_us;
}

static void deactivate(bd_router_queue *queue) {
    bd_router *router = queue->router;
    if (!queue->active) return;
    queue->active = false;
    if (router->cursor == queue) router->cursor = queue->next;
    if (queue->prev)
        queue->prev->next = queue->next;
    else
        router->active_first = queue->next;
    if (queue->next)
        queue->next->prev = queue->prev;
    else
        router->active_last = queue->prev;
    queue->prev = queue->next = NULL;
    set_refused(queue, 0);
    if (router->squeezer == queue) bd_squeeze_end(router);
}

void bd_queue_append(bd_router_queue *queue, bd_job *job) {
    bd_job_internal *in = &job->internal;
    in->queued = true;
    in->prev = queue->last;
    in->next = NULL;
    if (queue->last)
        queue->last->internal.next = job;
    else
        queue->first = job;
    queue->last = job;
    queue->router->queued += in->choice_count;
    activate(queue);
}

void bd_queue_remove(bd_router_queue *queue, bd_job *job) {
    bd_job_internal *in = &job->internal;
    BD_ASSERT(in->queued);
    in->queued = false;
    if (in->prev)
        in->prev->internal.next = in->next;
    else
        queue->first = in->next;
    if (in->next)
        in->next->internal.prev = in->prev;
    else
        queue->last = in->prev;
    in->prev = in->next = NULL;
    uint32_t left = in->choice_count - in->added;
    queue->router->queued -= left;
    atomic_fetch_sub(&queue->router->reserved, left);
    if (queue->first) return;
    bd_queue_drop_lease(queue, bd_now_us());
    deactivate(queue);
}

/* ---- Leases ---- */

void bd_queue_drop_lease(bd_router_queue *queue, uint64_t now_us) {
    bd_cache *cache = queue->router->options.cache;
    bd_lease_state before = queue->lease_state;
    queue->lease_state = BD_LEASE_NONE;
    if (queue->served.is_base) return;
    if (before == BD_LEASE_HELD) bd_cache_release(cache, &queue->lease, now_us);
    if (before == BD_LEASE_WAITING) bd_cache_wait_cancel(cache, &queue->waiter);
}

static void fail_all(bd_router_queue *queue, bd_status status, const bd_error *err,
                     uint32_t retry_after_s) {
    while (queue->first)
        bd_job_fail(queue->first, status, err, retry_after_s);
}

/* The variant's load failed, or it is gone. */
static void fail_variant(bd_router_queue *queue, const bd_error *err, uint64_t now_us) {
    bd_variant_info info;
    bd_cache_info(queue->router->options.cache, queue->served.variant, now_us, &info);
    uint64_t wait_us = info.retry_at_us > now_us ? info.retry_at_us - now_us : 0;
    uint64_t wait_s = 1 + wait_us / 1000000u;
    fail_all(queue, BD_E_VARIANT, err, (uint32_t)(wait_s < 60 ? wait_s : 60));
}

static void on_ready(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                     const bd_error *err) {
    bd_router_queue *queue =
        (bd_router_queue *)(void *)((char *)waiter - offsetof(bd_router_queue, waiter));
    queue->lease_state = BD_LEASE_NONE;
    if (status != BD_OK) {
        fail_variant(queue, err, bd_now_us());
        return;
    }
    queue->lease = *lease;
    queue->lease_state = BD_LEASE_HELD;
    BD_ASSERT(queue->first); /* an empty queue waits for nothing */
}

/* While somebody is squeezed for pages, only what is resident or under way may be leased: freed
 * pages are spoken for. */
static bool may_ask(const bd_router_queue *queue, uint64_t now_us, bool cache_changed) {
    const bd_router *router = queue->router;
    if (queue->paused) return false;
    if (queue->refused_us != 0 && !cache_changed && now_us < queue->ask_us) return false;
    if (!router->squeezer || router->squeezer == queue) return true;
    bd_variant_info info;
    bd_cache_info(router->options.cache, queue->served.variant, now_us, &info);
    return info.state != BD_VARIANT_ABSENT;
}

static void ask_lease(bd_router_queue *queue, uint64_t now_us, bool cache_changed) {
    bd_router *router = queue->router;
    if (queue->lease_state != BD_LEASE_NONE || !queue->first) return;
    if (queue->served.is_base) {
        queue->lease = (bd_lease){0};
        queue->lease_state = BD_LEASE_HELD;
        return;
    }
    if (!may_ask(queue, now_us, cache_changed)) return;
    bd_error err;
    queue->waiter.ready = on_ready;
    bd_status status = bd_cache_acquire(router->options.cache, queue->served.variant, now_us,
                                        &queue->lease, &queue->waiter, &err);
    queue->ask_us = now_us + BD_ROUTER_ASK_AGAIN_US;
    if (status == BD_BUSY) {
        if (queue->refused_us == 0) set_refused(queue, now_us);
        return;
    }
    set_refused(queue, 0);
    if (router->squeezer == queue) bd_squeeze_end(router);
    if (status == BD_OK)
        queue->lease_state = BD_LEASE_HELD;
    else if (status == BD_AGAIN)
        queue->lease_state = BD_LEASE_WAITING;
    else
        fail_variant(queue, &err, now_us);
}

static void ask_all(bd_router *router, uint64_t now_us, bool cache_changed) {
    if (router->squeezer) ask_lease(router->squeezer, now_us, cache_changed);
    bd_router_queue *next;
    for (bd_router_queue *q = router->active_first; q; q = next) {
        next = q->next;
        ask_lease(q, now_us, cache_changed);
    }
}

/* ---- Into the engine ---- */

/* One choice of the queue's first job. BD_BUSY: the engine is full. */
static bd_status start_one(bd_router_queue *queue, uint64_t now_us) {
    bd_job *job = queue->first;
    bd_error err;
    bd_status status = bd_job_start_choice(job, queue, now_us, &err);
    if (status == BD_BUSY) return BD_BUSY;
    if (status != BD_OK) {
        bd_job_fail(job, status, &err, 0);
        return BD_OK;
    }
    queue->lease_state = BD_LEASE_NONE; /* the sequence has it now */
    queue->router->queued--;
    queue->router->started++;
    atomic_fetch_sub(&queue->router->reserved, 1);
    if (job->internal.added == job->internal.choice_count)
        bd_queue_remove(queue, job);
    else
        ask_lease(queue, now_us, true);
    return BD_OK;
}

/* One round from the cursor; false: nothing could be started. */
static bool start_round(bd_router *router, uint64_t now_us) {
    bool progress = false;
    if (!router->cursor) router->cursor = router->active_first;
    while (router->cursor) {
        bd_router_queue *queue = router->cursor;
        ask_lease(queue, now_us, false);
        /* A refused variant may have lost all its jobs, and its place in the ring with them. */
        if (queue->first && queue->lease_state == BD_LEASE_HELD) {
            if (start_one(queue, now_us) == BD_BUSY) return false;
            progress = true;
        }
        if (router->cursor == queue) router->cursor = queue->next;
    }
    return progress;
}

/* ---- Hooks ---- */

static void update_rate(bd_router *router, uint64_t now_us) {
    const uint64_t span_us = now_us - router->rate_us;
    if (span_us < 1000000u) return;
    uint64_t rate = (uint64_t)router->started * 1000000u / span_us;
    uint64_t before = atomic_load(&router->started_per_s);
    atomic_store(&router->started_per_s, (uint32_t)((before + rate + 1) / 2));
    router->started = 0;
    router->rate_us = now_us;
}

void bd_router_before_step(void *ctx, uint64_t now_us, bool cache_changed) {
    bd_router *router = ctx;
    update_rate(router, now_us);
    bd_loads_before_step(router, now_us, cache_changed);
    if (router->active_first) {
        ask_all(router, now_us, cache_changed);
        bd_squeeze_update(router, now_us);
        while (start_round(router, now_us)) {
        }
    }
    if (!router->waiting) return;
    bd_engine_stats stats;
    bd_engine_stats_get(router->options.engine, &stats);
    bd_metric_set(router->waiting, (double)router->queued + stats.waiting);
}

uint64_t bd_router_next_wake_us(void *ctx, uint64_t now_us) {
    const bd_router *router = ctx;
    return router->refused_count + router->loads_asking > 0 ? now_us + BD_ROUTER_ASK_AGAIN_US
                                                            : UINT64_MAX;
}

void bd_router_closed(void *ctx, const bd_error *err) {
    bd_router *router = ctx;
    router->closed = true;
    router->closed_error = *err;
    while (router->active_first)
        fail_all(router->active_first, err->status, err, 0);
    bd_loads_close(router, err);
}
