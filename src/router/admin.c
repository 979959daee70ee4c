/* admin.c - questions and orders of the admin listener: run on bd-sched, the asking thread waits.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

typedef struct admin_call {
    bd_call call; /* first member */
    bd_router *router;
    pthread_mutex_t lock;
    pthread_cond_t answered;
    bool done; /* guarded by lock */
    /* infos */
    bd_router_info *infos;
    uint32_t max, count;
    /* orders */
    bd_admin_verb verb;
    bd_router_queue *queue;
    bd_status status;
    bd_error *err;
} admin_call;

static void ask(admin_call *call, void (*run)(bd_call *call, bd_engine *engine)) {
    bd_engine *engine = call->router->options.engine;
    BD_ASSERT(!bd_engine_on_thread(engine));
    pthread_mutex_init(&call->lock, NULL);
    pthread_cond_init(&call->answered, NULL);
    call->call.run = run;
    bd_engine_post(engine, &call->call);
    pthread_mutex_lock(&call->lock);
    while (!call->done)
        pthread_cond_wait(&call->answered, &call->lock);
    pthread_mutex_unlock(&call->lock);
    pthread_cond_destroy(&call->answered);
    pthread_mutex_destroy(&call->lock);
}

static void answer(admin_call *call) {
    pthread_mutex_lock(&call->lock); /* the call is on the asker's stack: gone once unlocked */
    call->done = true;
    pthread_cond_signal(&call->answered);
    pthread_mutex_unlock(&call->lock);
}

static void fill_info(bd_router_info *info, const bd_router_queue *queue, uint64_t now_us) {
    memset(info, 0, sizeof *info);
    bd_cache_info(queue->router->options.cache, queue->served.variant, now_us, &info->cache);
    memcpy(info->name, queue->served.name, sizeof info->name);
    memcpy(info->digest, queue->served.digest, sizeof info->digest);
    info->cache.name = info->name;
    info->retired = queue->retired;
    if (!info->cache.failure) return;
    info->failure = *info->cache.failure; /* bd-sched's memory */
    info->cache.failure = &info->failure;
}

static void run_infos(bd_call *base, bd_engine *engine) {
    admin_call *call = (admin_call *)base;
    const bd_router *router = call->router;
    uint64_t now_us = bd_now_us();
    (void)engine;
    for (uint32_t i = 1; i < router->queue_count && call->count < call->max; i++)
        fill_info(&call->infos[call->count++], router->queues[i], now_us);
    for (const bd_router_queue *q = router->retired_first; q && call->count < call->max;
         q = q->next_retired)
        fill_info(&call->infos[call->count++], q, now_us);
    answer(call);
}

uint32_t bd_router_infos(bd_router *router, bd_router_info *out, uint32_t max) {
    admin_call call = {.router = router, .infos = out, .max = max};
    ask(&call, run_infos);
    return call.count;
}

/* Pages that a load is filling are in use only until it has ended, which the order's giver should
 * know. */
static void add_loading(const bd_router *router, uint64_t now_us, bd_error *err) {
    const bd_router_queue *loading = NULL, *retired = router->retired_first;
    bd_variant_info info;
    for (uint32_t i = 1; !loading && (i < router->queue_count || retired); i++) {
        const bd_router_queue *queue = i < router->queue_count ? router->queues[i] : retired;
        if (queue == retired) retired = retired->next_retired;
        bd_cache_info(router->options.cache, queue->served.variant, now_us, &info);
        if (info.state == BD_VARIANT_LOADING) loading = queue;
    }
    if (!loading) return;
    size_t bytes = strlen(err->message);
    snprintf(err->message + bytes, sizeof err->message - bytes,
             "; variant %.128s is still loading: try again once it is ready", loading->served.name);
}

static bd_status order_load(bd_router *router, bd_variant *variant, uint64_t now_us,
                            bd_error *err) {
    bd_status status = bd_cache_prefetch(router->options.cache, variant, now_us, err);
    bd_variant_info info;
    if (status != BD_BUSY || !err) return status;
    bd_cache_info(router->options.cache, variant, now_us, &info);
    if (info.state == BD_VARIANT_ABSENT) add_loading(router, now_us, err);
    return status;
}

static void run_order(bd_call *base, bd_engine *engine) {
    admin_call *call = (admin_call *)base;
    bd_cache *cache = call->router->options.cache;
    bd_variant *variant = call->queue->served.variant;
    uint64_t now_us = bd_now_us();
    (void)engine;
    switch (call->verb) {
    case BD_ADMIN_LOAD:
        call->status = order_load(call->router, variant, now_us, call->err);
        break;
    case BD_ADMIN_UNLOAD:
        /* What waits in the queue is not a user: it loads the variant again afterwards. */
        if (call->queue->lease_state == BD_LEASE_HELD) bd_queue_drop_lease(call->queue, now_us);
        call->status = bd_cache_unload(cache, variant, call->err);
        break;
    case BD_ADMIN_PIN:
        call->status = bd_cache_pin(cache, variant, true, call->err);
        break;
    case BD_ADMIN_UNPIN:
        call->status = bd_cache_pin(cache, variant, false, call->err);
        break;
    }
    answer(call);
}

bd_status bd_router_admin(bd_router *router, bd_admin_verb verb, const bd_served *served,
                          bd_error *err) {
    if (served->is_base)
        return bd_fail(err, BD_E_ARGUMENT, served->name, "the base is always there");
    admin_call call = {.router = router, .verb = verb, .queue = bd_queue_of(served), .err = err};
    ask(&call, run_order);
    return call.status;
}
