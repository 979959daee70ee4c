/* queue.c - from queues to the engine, one lease and one sequence at a time: the tenant next by its
 * virtual counter, of its variants round and round, so that no variant's backlog delays another's
 * first request. bd-sched only. */
#include <math.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "internal.h"

enum { ASK_ACCOUNTS_MAX = 256 }; /* in one turn */

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

bd_status bd_queue_append(bd_router_queue *queue, bd_job *job) {
    job->internal.arrival = queue->router->arrivals++;
    bd_status status = bd_line_append(queue, job);
    if (status != BD_OK) return status;
    job->internal.queued = true;
    queue->router->queued += job->internal.choice_count;
    activate(queue);
    return BD_OK;
}

static void leave_line(bd_router_queue *queue, bd_job *job) {
    bd_line_remove(job, job->internal.choice_count - job->internal.added);
    if (queue->lines) return;
    bd_queue_drop_lease(queue, bd_now_us());
    deactivate(queue);
}

void bd_queue_remove(bd_router_queue *queue, bd_job *job) {
    bd_job_internal *in = &job->internal;
    BD_ASSERT(in->queued);
    in->queued = false;
    uint32_t left = in->choice_count - in->added;
    queue->router->queued -= left;
    atomic_fetch_sub(&queue->router->reserved, left);
    if (!in->aside) leave_line(queue, job);
    in->aside = false;
}

void bd_queue_set_aside(bd_router_queue *queue, bd_job *job) {
    BD_ASSERT(job->internal.queued && !job->internal.aside);
    job->internal.aside = true;
    leave_line(queue, job);
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

void bd_queue_fail_all(bd_router_queue *queue, bd_status status, const bd_error *err,
                       uint32_t retry_after_s) {
    while (queue->lines)
        bd_job_fail(queue->lines->first, status, err, retry_after_s);
}

/* The variant's load failed, or it is gone. */
static void fail_variant(bd_router_queue *queue, const bd_error *err, uint64_t now_us) {
    bd_variant_info info;
    bd_cache_info(queue->router->options.cache, queue->served.variant, now_us, &info);
    uint64_t wait_us = info.retry_at_us > now_us ? info.retry_at_us - now_us : 0;
    uint64_t wait_s = 1 + wait_us / 1000000u;
    bd_queue_fail_all(queue, BD_E_VARIANT, err, (uint32_t)(wait_s < 60 ? wait_s : 60));
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
    BD_ASSERT(queue->lines); /* an empty queue waits for nothing */
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

/* Only a tenant that is not far ahead of the others may have a variant loaded, but for the one that
 * others made room for already. */
static bool may_load(const bd_router_queue *queue, const bd_router_account *account) {
    bd_router *router = queue->router;
    if (router->squeezer == queue) return true;
    if (bd_fair_key(router->fair, &account->flow) <= router->ask_limit) return true;
    router->load_held = true;
    return false;
}

static bd_status acquire(bd_router_queue *queue, bd_router_account *account,
                         const bd_variant_info *before, uint64_t now_us, bd_error *err) {
    bd_router *router = queue->router;
    queue->waiter.ready = on_ready;
    queue->ask_us = now_us + BD_ROUTER_ASK_AGAIN_US;
    bd_status status = bd_cache_acquire(router->options.cache, queue->served.variant, now_us,
                                        &queue->lease, &queue->waiter, err);
    /* Whose job began the load is charged for it, at once and alone, whoever else gets to use it.
     */
    bool cold = before->state == BD_VARIANT_ABSENT || before->state == BD_VARIANT_FAILED;
    if (cold && status == BD_AGAIN) bd_account_charge_load(router, account, before->file_bytes);
    return status;
}

/* For a job of this account. */
static void ask_lease(bd_router_queue *queue, bd_router_account *account, uint64_t now_us,
                      bool cache_changed) {
    bd_router *router = queue->router;
    if (queue->lease_state != BD_LEASE_NONE || !queue->lines) return;
    if (queue->served.is_base) {
        queue->lease = (bd_lease){0};
        queue->lease_state = BD_LEASE_HELD;
        return;
    }
    if (!may_ask(queue, now_us, cache_changed)) return;
    bd_error err;
    bd_variant_info info;
    bd_cache_info(router->options.cache, queue->served.variant, now_us, &info);
    if (info.state == BD_VARIANT_ABSENT && !may_load(queue, account)) return;
    bd_status status = acquire(queue, account, &info, now_us, &err);
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

/* The lease is asked for here, while the choice that it waited for has one: nothing takes the
 * variant away in between. */
bd_status bd_queue_take_back(bd_router_queue *queue, bd_job *job) {
    BD_ASSERT(job->internal.queued && job->internal.aside);
    bd_status status = bd_line_append(queue, job);
    if (status != BD_OK) return status;
    job->internal.aside = false;
    activate(queue);
    ask_lease(queue, job->internal.line->account, bd_now_us(), true);
    return BD_OK;
}

static void ask_account(bd_router_account *account, uint64_t now_us, bool cache_changed) {
    bd_router_line *next;
    for (bd_router_line *line = account->first; line; line = next) {
        next = line->next; /* a refusal takes away this line alone */
        ask_lease(line->queue, account, now_us, cache_changed);
    }
}

static bd_router_account *account_of(bd_fair_flow *flow) {
    return (bd_router_account *)(void *)flow; /* first member */
}

/* An account that waits for pages or a load holds back those that are too far ahead of it, but not
 * longer than a cold variant may wait at most: a load that hangs is no reason to do nothing. */
static double limit_of(const bd_router *router, const bd_router_account *account, uint64_t now_us) {
    bool hangs = account->blocked_us != 0 &&
                 now_us - account->blocked_us >= router->options.cold_wait_max_us;
    if (hangs) return HUGE_VAL;
    return bd_fair_key(router->fair, &account->flow) + router->options.residency_bound;
}

/* Leases and loads are asked for in the order in which their jobs will start, ahead of it. */
static void ask_all(bd_router *router, uint64_t now_us, bool cache_changed) {
    bd_fair_flow *flow = bd_fair_first(router->fair);
    bool alone = bd_fair_waiting(router->fair) < 2;
    router->load_held = false;
    router->ask_limit = alone ? HUGE_VAL : limit_of(router, account_of(flow), now_us);
    if (router->squeezer)
        ask_lease(router->squeezer, router->squeezer->lines->account, now_us, cache_changed);
    for (uint32_t n = 0; n < ASK_ACCOUNTS_MAX && (flow = bd_fair_first(router->fair)); n++) {
        if (bd_fair_key(router->fair, flow) > router->ask_limit) {
            router->load_held = true; /* or may be */
            break;
        }
        ask_account(account_of(flow), now_us, cache_changed);
        if (flow->waiting > 0) bd_fair_set_aside(router->fair, flow);
    }
    bd_fair_take_back(router->fair);
}

/* ---- Into the engine ---- */

typedef enum start { STARTED, NOTHING, ENGINE_FULL } start;

/* One choice of the line's first job. BD_BUSY: the engine is full. */
static bd_status start_one(bd_router_line *line, uint64_t now_us) {
    bd_router_queue *queue = line->queue;
    bd_router_account *account = line->account;
    bd_router *router = queue->router;
    bd_job *job = line->first;
    bd_error err;
    bd_status status = bd_job_start_choice(job, queue, now_us, &err);
    if (status == BD_BUSY) return BD_BUSY;
    if (status != BD_OK) {
        bd_job_fail(job, status, &err, 0);
        return BD_OK;
    }
    queue->lease_state = BD_LEASE_NONE; /* the sequence has it now */
    router->queued--;
    router->started++;
    atomic_fetch_sub(&router->reserved, 1);
    bd_line_leave(line, 1);
    if (job->internal.added == job->internal.choice_count)
        bd_queue_remove(queue, job);
    else if (bd_job_must_wait(job))
        bd_queue_set_aside(queue, job);
    else
        ask_lease(queue, account, now_us, true);
    return BD_OK;
}

/* The line whose turn it is: from the cursor on the first whose variant is there, unless one that
 * is there has a job of lower priority. */
static bd_router_line *next_line(bd_router_account *account, uint64_t now_us) {
    bd_router_line *best = NULL;
    for (uint32_t n = account->line_count; n > 0 && account->first; n--) {
        bd_router_line *line = account->cursor ? account->cursor : account->first;
        bd_router_queue *queue = line->queue;
        account->cursor = line->next;
        ask_lease(queue, account, now_us, false);
        /* A refused variant may have lost all its jobs, and the line is gone with them. */
        if (!queue->lines || queue->lease_state != BD_LEASE_HELD) continue;
        if (!best || line->first->params.priority < best->first->params.priority) best = line;
        if (account->ranked == 0) break;
    }
    return best;
}

static start start_from(bd_router_account *account, uint64_t now_us) {
    bd_router_line *line = next_line(account, now_us);
    if (!line) return NOTHING;
    account->blocked_us = 0;
    account->cursor = line;
    bd_router_line *after = line->next;
    if (start_one(line, now_us) == BD_BUSY) return ENGINE_FULL;
    if (account->cursor == line) account->cursor = after;
    return STARTED;
}

/* While somebody needs pages, those who may not start anyway do not keep theirs, unless they could
 * not be read again. */
static void drop_leases_beyond(bd_router *router, double limit, uint64_t now_us) {
    for (bd_router_queue *q = router->active_first; q; q = q->next) {
        bool wanted =
            q->served.is_base || q->lease_state != BD_LEASE_HELD || (q->retired && !q->keeps_files);
        for (const bd_router_line *l = q->lines; l && !wanted; l = l->next_of_queue)
            wanted = bd_fair_key(router->fair, &l->account->flow) <= limit;
        if (!wanted) bd_queue_drop_lease(q, now_us);
    }
}

/* The least served first. Whoever has nothing that could start, for its variants are not resident,
 * is passed by those that are not too far ahead of it; by others only when nothing runs at all.
 * false: the engine is full. */
static bool start_all(bd_router *router, uint64_t now_us) {
    double limit = HUGE_VAL;
    bool held = false;
    start result = NOTHING;
    bd_fair_flow *flow;
    while ((flow = bd_fair_first(router->fair))) {
        bd_router_account *account = account_of(flow);
        held = router->running > 0 && bd_fair_key(router->fair, flow) > limit;
        if (held) break;
        result = start_from(account, now_us);
        if (result == ENGINE_FULL) break;
        if (result == STARTED || flow->waiting == 0) continue;
        if (account->blocked_us == 0) account->blocked_us = now_us;
        if (isinf(limit)) limit = limit_of(router, account, now_us);
        bd_fair_set_aside(router->fair, flow);
    }
    bd_fair_take_back(router->fair);
    if (held && router->held) bd_metric_add(router->held, 1.0);
    if (held && router->refused_count > 0) drop_leases_beyond(router, limit, now_us);
    return result != ENGINE_FULL;
}

/* With room in the engine and nothing of substance there, no job may be left whose variant is. */
static void note_idle(const bd_router *router) {
    if (!router->idle || router->running > 0) return;
    for (const bd_router_queue *q = router->active_first; q; q = q->next) {
        if (q->lease_state != BD_LEASE_HELD || q->lease.load) continue;
        bd_metric_add(router->idle, 1.0);
        return;
    }
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
        if (start_all(router, now_us)) note_idle(router);
    }
    if (!router->waiting) return;
    bd_engine_stats stats;
    bd_engine_stats_get(router->options.engine, &stats);
    bd_metric_set(router->waiting, (double)router->queued + stats.waiting);
}

uint64_t bd_router_next_wake_us(void *ctx, uint64_t now_us) {
    const bd_router *router = ctx;
    bool asks = router->refused_count + router->loads_asking > 0 || router->load_held;
    return asks ? now_us + BD_ROUTER_ASK_AGAIN_US : UINT64_MAX;
}

void bd_router_closed(void *ctx, const bd_error *err) {
    bd_router *router = ctx;
    router->closed = true;
    router->closed_error = *err;
    if (err->status != BD_E_SHUTDOWN)
        bd_log_error("router", "requests are answered 503 until the server is started again", err);
    while (router->active_first)
        bd_queue_fail_all(router->active_first, err->status, err, 0);
    bd_loads_close(router, err);
}
