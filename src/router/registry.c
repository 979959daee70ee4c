/* registry.c - served names: what a name stands for, who holds it, and how it comes and goes.
 * Threads: find, release and list any; changes are made on bd-sched, by the builder until the
 * engine runs. */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "internal.h"

enum { OPS_PER_CALL = 32 }; /* bd-sched makes so many changes between two steps */

void bd_queue_free(bd_router_queue *queue) {
    if (!queue) return;
    bd_tokenizer_destroy(queue->tokenizer);
    free(queue->dir);
    free(queue->given_name);
    free(queue);
}

bd_router_queue *bd_queue_create(bd_router *router, const char *name, const char *dir) {
    bd_router_queue *queue = calloc(1, sizeof *queue);
    if (!queue) return NULL;
    queue->dir = strdup(dir ? dir : "");
    if (name) queue->given_name = strdup(name);
    if (!queue->dir || (name && !queue->given_name)) {
        bd_queue_free(queue);
        return NULL;
    }
    atomic_init(&queue->holders, 1); /* the registry, once it is in there */
    queue->router = router;
    queue->served.dir = queue->dir;
    queue->served.internal = queue;
    queue->served.created_s = bd_wall_seconds();
    return queue;
}

/* Room first, so that nothing can fail once the name is in the map. */
static bd_status reserve_slot(bd_router *router, bd_error *err) {
    if (router->queue_count < router->queue_cap) return BD_OK;
    uint32_t cap = router->queue_cap ? router->queue_cap * 2 : 16;
    bd_router_queue **queues = realloc(router->queues, cap * sizeof(bd_router_queue *));
    if (!queues) return bd_fail(err, BD_E_MEMORY, "registry", "out of memory for %u names", cap);
    router->queues = queues;
    router->queue_cap = cap;
    return BD_OK;
}

static void insert_sorted(bd_router *router, bd_router_queue *queue) {
    uint32_t at = router->queue_count++;
    while (at > 1 && strcmp(router->queues[at - 1]->served.name, queue->served.name) > 0) {
        router->queues[at] = router->queues[at - 1];
        at--;
    }
    router->queues[at] = queue;
}

bd_status bd_name_taken(const bd_router_queue *holder, const char *name, const char *dir,
                        bd_error *err) {
    return bd_fail(err, BD_E_ARGUMENT, name, "the name is taken by %s; %s is refused", holder->dir,
                   dir);
}

/* With names_lock. */
static bd_status put_name(bd_router *router, bd_router_queue *queue, bd_error *err) {
    const char *name = queue->served.name;
    bd_status status = reserve_slot(router, err);
    if (status != BD_OK) return status;
    status = bd_map_put(router->names, name, strlen(name), queue);
    if (status == BD_BUSY)
        return bd_name_taken(bd_map_get(router->names, name, strlen(name)), name, queue->dir, err);
    if (status != BD_OK) return bd_fail(err, status, name, "out of memory for the name");
    insert_sorted(router, queue);
    return BD_OK;
}

static void take_name(bd_router *router, const bd_router_queue *queue) {
    (void)bd_map_take(router->names, queue->served.name, strlen(queue->served.name));
    uint32_t at = 0;
    while (router->queues[at] != queue)
        at++;
    router->queue_count--;
    memmove(&router->queues[at], &router->queues[at + 1],
            (router->queue_count - at) * sizeof(bd_router_queue *));
}

static bd_status add_base(bd_router *router, bd_error *err) {
    bd_router_queue *queue = bd_queue_create(router, NULL, router->options.base_dir);
    if (!queue) return bd_fail(err, BD_E_MEMORY, "registry", "out of memory for the base's entry");
    const bd_model_config *config = bd_model_config_of(router->options.model);
    bd_served *served = &queue->served;
    const char *fault = bd_variant_name_fault(router->options.base_name);
    bd_status status = BD_OK;
    if (fault)
        status = bd_fail(err, BD_E_ARGUMENT, queue->dir, "%s: the name \"%.128s\" %s", queue->dir,
                         router->options.base_name, fault);
    if (status == BD_OK) {
        memcpy(served->name, router->options.base_name, strlen(router->options.base_name) + 1);
        served->is_base = true;
        served->tokenizer = router->options.tokenizer;
        bd_queue_take_config(queue, config);
        status = bd_queue_digest_files(queue, err);
    }
    if (status == BD_OK) {
        status = put_name(router, queue, err);
    }
    if (status != BD_OK) {
        bd_queue_free(queue);
        return status;
    }
    router->options.base_name = served->name;
    router->options.base_dir = queue->dir;
    return BD_OK;
}

bd_status bd_router_create(const bd_router_options *options, bd_router **out, bd_error *err) {
    *out = NULL;
    if (!options->model || !options->base_name)
        return bd_fail(err, BD_E_ARGUMENT, "router", "a router needs a model and the base's name");
    bd_router *router = calloc(1, sizeof *router);
    if (!router) return bd_fail(err, BD_E_MEMORY, "router", "out of memory for the router");
    router->options = *options;
    pthread_mutex_init(&router->names_lock, NULL);
    bd_status status = bd_mailbox_create(&router->changes, 0, false, err);
    router->names = bd_map_create(64);
    if (!router->names) status = bd_fail(err, BD_E_MEMORY, "router", "out of memory for names");
    if (status == BD_OK) status = bd_accounts_create(router, err);
    if (status == BD_OK) status = add_base(router, err);
    if (status != BD_OK) {
        bd_router_destroy(router);
        return status;
    }
    if (options->metrics) {
        const bd_label label = {"model_name", router->options.base_name};
        router->waiting = bd_metrics_gauge(options->metrics, "vllm:num_requests_waiting",
                                           "Sequences that wait to run.", &label, 1);
    }
    *out = router;
    return BD_OK;
}

void bd_router_destroy(bd_router *router) {
    if (!router) return;
    bd_router_stop(router);
    for (uint32_t i = 0; i < router->queue_count; i++) {
        BD_ASSERT(!router->queues[i]->lines);
        bd_queue_free(router->queues[i]);
    }
    while (router->retired_first) { /* somebody never released it */
        bd_router_queue *queue = router->retired_first;
        router->retired_first = queue->next_retired;
        bd_queue_free(queue);
    }
    bd_scan_refusals_free(router->refusals, router->refusal_count);
    bd_sources_free(router);
    bd_accounts_destroy(router);
    free(router->queues);
    bd_map_destroy(router->names);
    bd_mailbox_destroy(router->changes);
    pthread_mutex_destroy(&router->names_lock);
    free(router);
}

void bd_router_attach(bd_router *router, bd_engine *engine) {
    router->options.engine = engine;
}

bd_engine_hooks bd_router_hooks(bd_router *router) {
    return (bd_engine_hooks){.ctx = router,
                             .before_step = bd_router_before_step,
                             .next_wake_us = bd_router_next_wake_us,
                             .closed = bd_router_closed,
                             .charge = bd_router_charge};
}

/* ---- Holders ---- */

/* Nobody holds it and nobody can find it: its jobs are over. */
static void run_retire(bd_call *call, bd_engine *engine) {
    bd_router_queue *queue =
        (bd_router_queue *)(void *)((char *)call - offsetof(bd_router_queue, retire_call));
    bd_router *router = queue->router;
    (void)engine;
    BD_ASSERT(queue->retired && !queue->lines && queue->lease_state == BD_LEASE_NONE);
    if (queue->prev_retired)
        queue->prev_retired->next_retired = queue->next_retired;
    else
        router->retired_first = queue->next_retired;
    if (queue->next_retired) queue->next_retired->prev_retired = queue->prev_retired;
    bd_cache_forget(router->options.cache, queue->served.variant);
    bd_queue_free(queue);
}

void bd_router_release(bd_router *router, const bd_served *served) {
    if (!served || served->is_base) return;
    bd_router_queue *queue = bd_queue_of(served);
    unsigned before = atomic_fetch_sub(&queue->holders, 1);
    BD_ASSERT(before > 0);
    if (before > 1) return;
    queue->retire_call.run = run_retire;
    bd_engine_post(router->options.engine, &queue->retire_call);
}

const bd_served *bd_router_find(bd_router *router, const char *name, size_t name_bytes,
                                const bd_tenant *tenant) {
    pthread_mutex_lock(&router->names_lock);
    bd_router_queue *queue = bd_map_get(router->names, name, name_bytes);
    if (queue) atomic_fetch_add(&queue->holders, 1);
    pthread_mutex_unlock(&router->names_lock);
    if (!queue) return NULL;
    if (bd_tenant_allows(tenant, queue->served.name)) return &queue->served;
    bd_router_release(router, &queue->served);
    return NULL;
}

const bd_served **bd_router_list(bd_router *router, const bd_tenant *tenant, uint32_t *count) {
    uint32_t kept = 0, found = 0;
    pthread_mutex_lock(&router->names_lock);
    const bd_served **list = calloc(router->queue_count, sizeof(const bd_served *));
    for (; list && found < router->queue_count; found++) {
        atomic_fetch_add(&router->queues[found]->holders, 1);
        list[found] = &router->queues[found]->served;
    }
    pthread_mutex_unlock(&router->names_lock);
    for (uint32_t i = 0; i < found; i++) {
        if (bd_tenant_allows(tenant, list[i]->name))
            list[kept++] = list[i];
        else
            bd_router_release(router, list[i]);
    }
    *count = kept;
    return list;
}

void bd_router_list_release(bd_router *router, const bd_served **list, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        bd_router_release(router, list[i]);
    free(list);
}

uint32_t bd_router_served_count(bd_router *router) {
    pthread_mutex_lock(&router->names_lock);
    uint32_t count = router->queue_count;
    pthread_mutex_unlock(&router->names_lock);
    return count;
}

const bd_served *bd_router_served_at(bd_router *router, uint32_t index) {
    pthread_mutex_lock(&router->names_lock);
    const bd_served *served = index < router->queue_count ? &router->queues[index]->served : NULL;
    pthread_mutex_unlock(&router->names_lock);
    return served;
}

/* ---- Changes ---- */

/* The registry lets go. Its pin goes at once, and so does its place among the most wanted: the
 * pages are wanted for what replaces it. */
static void retire(bd_router *router, bd_router_queue *queue) {
    queue->retired = true;
    /* Its pages could not be read again: if others can give way in its place, they are to. */
    if (!queue->keeps_files) queue->paused = false;
    queue->next_retired = router->retired_first;
    if (router->retired_first) router->retired_first->prev_retired = queue;
    router->retired_first = queue;
    bd_cache_retire(router->options.cache, queue->served.variant);
    bd_router_release(router, &queue->served);
}

/* Registers op->after. A pin that does not fit is no reason to serve nothing: it is left out. */
static void register_one(bd_router *router, bd_registry_op *op, bool pinned) {
    bd_cache *cache = router->options.cache;
    bd_served *served = &op->after->served;
    const uint32_t slots = router->options.slots;
    bd_error fault;
    op->status = bd_cache_register(cache, op->delta, false, &served->variant, &op->err);
    if (op->status != BD_OK || !pinned) return;
    if (bd_cache_pin(cache, served->variant, true, &fault) == BD_OK) return;
    op->after->pin = false;
    if (slots > 0)
        bd_log(BD_LOG_WARN, "router",
               "variant=%s is served unpinned: %s: %s; slots=%u allow %u pin%s of one plane, one "
               "slot is for the others",
               served->name, served->dir, fault.message, slots, slots - 1, bd_plural(slots - 1));
    else
        bd_log(BD_LOG_WARN, "router", "variant=%s is served unpinned: %s: %s", served->name,
               served->dir, fault.message);
}

/* Where it says the same as the base nothing is lost that the base has. */
static void log_cut_context(const bd_router *router, const bd_router_queue *queue) {
    const bd_served *served = &queue->served;
    const uint32_t base = bd_model_config_of(router->options.model)->max_positions;
    if (queue->positions <= served->max_model_len || queue->positions == base) return;
    bd_log(BD_LOG_WARN, "router",
           "variant=%s has max_position_embeddings=%u and is served with max_model_len=%u, the "
           "most that the server was started with",
           served->name, queue->positions, served->max_model_len);
}

/* The pin of what is replaced passes on: it was a person's word about the name. */
static void apply_one(bd_router *router, bd_registry_op *op) {
    bd_cache *cache = router->options.cache;
    bd_variant_info info = {.pinned = op->after && op->after->pin};
    bd_variant *old = op->before ? op->before->served.variant : NULL;
    if (old) bd_cache_info(cache, old, bd_now_us(), &info);
    bool gone = op->before != NULL;
    op->status = BD_OK;
    if (op->after) {
        if (old && info.pinned) op->status = bd_cache_pin(cache, old, false, &op->err);
        if (op->status == BD_OK) register_one(router, op, info.pinned);
        gone = gone && op->status == BD_OK;
    }
    pthread_mutex_lock(&router->names_lock);
    if (gone) take_name(router, op->before);
    if (op->after && op->status == BD_OK) {
        op->status = put_name(router, op->after, &op->err);
        if (op->status != BD_OK) {
            bd_cache_forget(cache, op->after->served.variant);
            /* Without memory for either name both are gone. */
            gone = gone && put_name(router, op->before, NULL) != BD_OK;
        }
    }
    pthread_mutex_unlock(&router->names_lock);
    if (op->after && op->status == BD_OK) log_cut_context(router, op->after);
    if (gone) {
        op->before->keeps_files = op->keeps_files;
        retire(router, op->before);
    } else if (old && info.pinned) {
        bd_status back = bd_cache_pin(cache, old, true, NULL);
        (void)back; /* its own pages, given back a moment ago */
    }
}

typedef struct apply_call {
    bd_call call; /* first member */
    bd_router *router;
    bd_registry_op *ops;
    uint32_t count;
    pthread_mutex_t lock;
    pthread_cond_t answered;
    bool done; /* guarded by lock */
} apply_call;

static void run_apply(bd_call *base, bd_engine *engine) {
    apply_call *call = (apply_call *)base;
    (void)engine;
    for (uint32_t i = 0; i < call->count; i++)
        apply_one(call->router, &call->ops[i]);
    pthread_mutex_lock(&call->lock); /* the call is on the asker's stack: gone once unlocked */
    call->done = true;
    pthread_cond_signal(&call->answered);
    pthread_mutex_unlock(&call->lock);
}

void bd_registry_apply(bd_router *router, bd_registry_op *ops, uint32_t count) {
    if (!router->scanning) {
        for (uint32_t i = 0; i < count; i++)
            apply_one(router, &ops[i]);
        return;
    }
    for (uint32_t first = 0; first < count; first += OPS_PER_CALL) {
        uint32_t left = count - first;
        apply_call call = {.router = router,
                           .ops = ops + first,
                           .count = left < OPS_PER_CALL ? left : OPS_PER_CALL};
        pthread_mutex_init(&call.lock, NULL);
        pthread_cond_init(&call.answered, NULL);
        call.call.run = run_apply;
        bd_engine_post(router->options.engine, &call.call);
        pthread_mutex_lock(&call.lock);
        while (!call.done)
            pthread_cond_wait(&call.answered, &call.lock);
        pthread_mutex_unlock(&call.lock);
        pthread_cond_destroy(&call.answered);
        pthread_mutex_destroy(&call.lock);
    }
}
