/* registry.c - served names: what a name stands for, checked when it is added. Threads: the
 * builder's until the engine starts; read-only afterwards. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "internal.h"

enum { PATH_BYTES = 4096 };

static void queue_free(bd_router_queue *queue) {
    if (!queue) return;
    bd_tokenizer_destroy(queue->tokenizer);
    free(queue->dir);
    free(queue);
}

static bd_router_queue *queue_create(bd_router *router, const char *dir) {
    bd_router_queue *queue = calloc(1, sizeof *queue);
    if (!queue) return NULL;
    queue->dir = strdup(dir ? dir : "");
    if (!queue->dir) {
        free(queue);
        return NULL;
    }
    queue->router = router;
    queue->served.dir = queue->dir;
    queue->served.internal = queue;
    queue->served.created_s = bd_wall_seconds();
    return queue;
}

static void take_config(bd_router_queue *queue, const bd_router *router,
                        const bd_model_config *config) {
    bd_served *served = &queue->served;
    uint32_t limit = bd_model_max_len(router->options.model);
    served->max_model_len = config->max_positions < limit ? config->max_positions : limit;
    served->vocab = config->vocab;
    served->eos_count = config->eos_count;
    memcpy(served->eos_ids, config->eos_ids, sizeof served->eos_ids);
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

static bd_status claim_name(bd_router *router, bd_router_queue *queue, const char *name,
                            bd_error *err) {
    size_t bytes = strlen(name);
    const char *fault = bd_variant_name_fault(name);
    if (fault)
        return bd_fail(err, BD_E_ARGUMENT, queue->dir, "%s: the name \"%.128s\" %s", queue->dir,
                       name, fault);
    memcpy(queue->served.name, name, bytes + 1);
    bd_status status = bd_map_put(router->names, name, bytes, queue);
    if (status == BD_BUSY) {
        const bd_router_queue *holder = bd_map_get(router->names, name, bytes);
        return bd_fail(err, BD_E_ARGUMENT, name, "the name is taken by %s; %s is refused",
                       holder->dir, queue->dir);
    }
    if (status != BD_OK) return bd_fail(err, status, name, "out of memory for the name");
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

static bd_status add_base(bd_router *router, bd_error *err) {
    bd_status status = reserve_slot(router, err);
    if (status != BD_OK) return status;
    bd_router_queue *queue = queue_create(router, router->options.base_dir);
    if (!queue) return bd_fail(err, BD_E_MEMORY, "registry", "out of memory for the base's entry");
    queue->served.is_base = true;
    queue->served.tokenizer = router->options.tokenizer;
    take_config(queue, router, bd_model_config_of(router->options.model));
    if ((status = claim_name(router, queue, router->options.base_name, err)) != BD_OK) {
        queue_free(queue);
        return status;
    }
    router->queues[router->queue_count++] = queue;
    router->options.base_name = queue->served.name;
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
    bd_status status = BD_OK;
    router->names = bd_map_create(64);
    if (!router->names) status = bd_fail(err, BD_E_MEMORY, "router", "out of memory for names");
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
    for (uint32_t i = 0; i < router->queue_count; i++) {
        BD_ASSERT(!router->queues[i]->first);
        queue_free(router->queues[i]);
    }
    free(router->queues);
    bd_map_destroy(router->names);
    free(router);
}

void bd_router_attach(bd_router *router, bd_engine *engine) {
    router->options.engine = engine;
}

bd_engine_hooks bd_router_hooks(bd_router *router) {
    return (bd_engine_hooks){.ctx = router,
                             .before_step = bd_router_before_step,
                             .next_wake_us = bd_router_next_wake_us,
                             .closed = bd_router_closed};
}

/* ---- Variants ---- */

static bd_status load_tokenizer(bd_router *router, bd_router_queue *queue, bd_error *err) {
    char path[PATH_BYTES];
    queue->served.tokenizer = router->options.tokenizer;
    bd_status status = bd_path_join(path, sizeof path, queue->dir, "tokenizer.json", err);
    if (status != BD_OK) return status;
    if (!bd_file_exists(path)) return BD_OK; /* the base's */
    status = bd_tokenizer_load(&queue->tokenizer, path, err);
    if (status == BD_OK) queue->served.tokenizer = queue->tokenizer;
    return status;
}

/* Here already and not only when it is loaded, so that what cannot be served is not listed. */
static bd_status check_base(const bd_router *router, const bd_delta *delta, bd_error *err) {
    const char *fingerprint = bd_model_fingerprint(router->options.model);
    if (strcmp(delta->base_fingerprint, fingerprint) == 0) return BD_OK;
    return bd_fail(
        err, BD_E_MISMATCH, delta->dir,
        "%s: variant %s was made for base %s with fingerprint %.8s, the base served here "
        "has %.8s",
        delta->dir, delta->variant, delta->base, delta->base_fingerprint, fingerprint);
}

/* Everything of the directory but the delta itself. */
static bd_status read_side_files(bd_router *router, bd_router_queue *queue, bd_error *err) {
    bd_model_config config;
    bd_status status = bd_model_config_read_variant(
        queue->dir, bd_model_config_of(router->options.model), &config, err);
    if (status != BD_OK) return status;
    uint32_t most = bd_model_logits_width(router->options.model);
    if (config.vocab > most)
        return bd_fail(err, BD_E_UNSUPPORTED, "vocab_size",
                       "%s: vocab_size %u, there is room for %u", queue->dir, config.vocab, most);
    take_config(queue, router, &config);
    return load_tokenizer(router, queue, err);
}

bd_status bd_router_add_variant(bd_router *router, const char *name, const char *dir, bool pinned,
                                bd_error *err) {
    bd_delta delta;
    bd_status status = reserve_slot(router, err);
    if (status != BD_OK) return status;
    bd_router_queue *queue = queue_create(router, dir);
    if (!queue) return bd_fail(err, BD_E_MEMORY, dir, "out of memory for the variant's entry");
    if ((status = bd_delta_open(dir, &delta, err)) != BD_OK) goto fail_queue;
    if ((status = check_base(router, &delta, err)) != BD_OK) goto fail_delta;
    if ((status = claim_name(router, queue, name ? name : delta.variant, err)) != BD_OK)
        goto fail_delta;
    /* From here on logs and metrics of the cache use the served name too. */
    memcpy(delta.variant, queue->served.name, sizeof delta.variant);
    if ((status = read_side_files(router, queue, err)) != BD_OK) goto fail_name;
    status = bd_cache_register(router->options.cache, &delta, pinned, &queue->served.variant, err);
    if (status != BD_OK) goto fail_moved;
    insert_sorted(router, queue);
    return BD_OK;
fail_moved: /* the cache took the delta with it */
    (void)bd_map_take(router->names, queue->served.name, strlen(queue->served.name));
    queue_free(queue);
    return status;
fail_name:
    (void)bd_map_take(router->names, queue->served.name, strlen(queue->served.name));
fail_delta:
    bd_delta_close(&delta);
fail_queue:
    queue_free(queue);
    return status;
}

/* What a killed compress leaves: NAME.tmp-<process>. */
static bool is_leftover(const char *name) {
    const char *end = name + strlen(name), *digits = end;
    while (digits > name && digits[-1] >= '0' && digits[-1] <= '9')
        digits--;
    return digits < end && digits - name > 5 && memcmp(digits - 5, ".tmp-", 5) == 0;
}

/* BD_E_NOT_FOUND: this is no variant. Any other fault is for people: a variant whose files cannot
 * be reached is not silently left out. */
static bd_status find_delta(const char *name, const char *dir, char path[PATH_BYTES],
                            bd_error *err) {
    char file[PATH_BYTES];
    if (name[0] == '.' || is_leftover(name)) return BD_E_NOT_FOUND;
    bd_status status = bd_path_join(path, PATH_BYTES, dir, name, err);
    if (status == BD_OK) status = bd_path_join(file, sizeof file, path, "delta.json", err);
    if (status != BD_OK) return status;
    if (access(file, F_OK) == 0) return BD_OK;
    if (errno == ENOENT || errno == ENOTDIR) return BD_E_NOT_FOUND;
    return bd_fail_errno(err, BD_E_IO, file, errno, "%s cannot be reached", file);
}

bd_status bd_router_add_directory(bd_router *router, const char *dir,
                                  void (*report)(void *ctx, const char *dir, const bd_error *err),
                                  void *ctx, uint32_t *added, bd_error *err) {
    struct dirent **entries = NULL;
    *added = 0;
    int count = scandir(dir, &entries, NULL, alphasort);
    if (count < 0)
        return bd_fail_errno(err, BD_E_IO, dir, errno,
                             "%s: the directory of variants cannot be read", dir);
    for (int i = 0; i < count; i++) {
        char path[PATH_BYTES];
        bd_error fault;
        bd_status status = find_delta(entries[i]->d_name, dir, path, &fault);
        bool absent = status == BD_E_NOT_FOUND;
        if (status == BD_OK) status = bd_router_add_variant(router, NULL, path, false, &fault);
        if (status == BD_OK)
            ++*added;
        else if (!absent && report)
            report(ctx, path[0] ? path : dir, &fault);
        free(entries[i]);
    }
    free(entries);
    return BD_OK;
}

/* ---- Lookup ---- */

const bd_served *bd_router_find(const bd_router *router, const char *name, size_t name_bytes,
                                uint32_t tenant) {
    const bd_router_queue *queue = bd_map_get(router->names, name, name_bytes);
    if (!queue) return NULL;
    const bd_router_options *o = &router->options;
    if (o->allowed && !o->allowed(o->allowed_ctx, &queue->served, tenant)) return NULL;
    return &queue->served;
}

uint32_t bd_router_served_count(const bd_router *router) {
    return router->queue_count;
}

const bd_served *bd_router_served_at(const bd_router *router, uint32_t index) {
    return index < router->queue_count ? &router->queues[index]->served : NULL;
}
