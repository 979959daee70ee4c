/* changes.c - orders that change what is served, one after the other on bd-scan: whatever reads
 * files happens there, whatever changes the registry or the cache on bd-sched. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "bitdelta/base/log.h"
#include "internal.h"

static void finish(bd_change *change, bd_status status) {
    change->status = status;
    change->done(change);
}

void bd_change_clear(bd_change *change) {
    for (uint32_t i = 0; i < change->entry_count; i++) {
        free(change->entries[i].name);
        free(change->entries[i].fault);
    }
    free(change->entries);
    change->entries = NULL;
    change->entry_count = 0;
}

/* ---- Rescan ---- */

static void log_fault(void *ctx, const char *dir, const bd_error *err) {
    (void)ctx;
    (void)dir; /* the message names it */
    bd_log_error("router", "variant refused", err);
}

static void rescan(bd_router *router, bd_change *change) {
    uint64_t started_us = bd_now_us();
    bd_status status = bd_scan_run(router, true, 0, log_fault, NULL, change, &change->error);
    if (status != BD_OK) {
        bd_log_error("router", "rescan failed, nothing was changed", &change->error);
        finish(change, status);
        return;
    }
    uint32_t counts[4] = {0};
    for (uint32_t i = 0; i < change->entry_count; i++)
        counts[change->entries[i].result]++;
    bd_log(BD_LOG_INFO, "router",
           "rescan added=%u replaced=%u removed=%u refused=%u unchanged=%u ms=%" PRIu64,
           counts[BD_CHANGE_ADDED], counts[BD_CHANGE_REPLACED], counts[BD_CHANGE_REMOVED],
           counts[BD_CHANGE_REFUSED], change->unchanged, (bd_now_us() - started_us) / 1000);
    finish(change, BD_OK);
}

/* ---- Unload ---- */

static bd_router_queue *find_name(const bd_router *router, const char *name) {
    return bd_map_get(router->names, name, strlen(name));
}

static bd_status not_found(const bd_change *change, bd_error *err) {
    return bd_fail(err, BD_E_NOT_FOUND, change->name, "no variant has the name %s", change->name);
}

static void remove_name(bd_router *router, bd_router_queue *queue) {
    bd_sources_remove(router, queue->given_name, queue->dir);
    bd_registry_op op = {.before = queue, .keeps_files = true};
    bd_registry_apply(router, &op, 1);
}

static void unload(bd_router *router, bd_change *change) {
    bd_router_queue *queue = find_name(router, change->name);
    bd_status status = BD_OK;
    if (!queue)
        status = not_found(change, &change->error);
    else if (queue->served.is_base)
        status = bd_fail(&change->error, BD_E_ARGUMENT, change->name, "the base is always there");
    if (status == BD_OK) {
        remove_name(router, queue);
        bd_log(BD_LOG_INFO, "router", "removed variant=%s", change->name);
    }
    finish(change, status);
}

/* ---- Load ---- */

static bool below(const char *path, const char *root) {
    size_t bytes = strlen(root);
    if (strncmp(path, root, bytes) != 0) return false;
    return (bytes > 0 && root[bytes - 1] == '/') || path[bytes] == '/';
}

static bool below_a_root(const bd_router *router, const char *path) {
    bool found = false;
    for (uint32_t i = 0; i < router->root_count && !found; i++) {
        char *root = realpath(router->roots[i], NULL);
        found = root && below(path, root);
        free(root);
    }
    return found;
}

/* An entry of a root itself, as a rescan finds it: it may be a link to anywhere, since whoever made
 * it meant that variant to be served. */
static bool is_entry(const bd_router *router, const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash || slash == path || slash[1] == '\0' || slash[1] == '.') return false;
    char *parent = strndup(path, (size_t)(slash - path));
    char *real = parent ? realpath(parent, NULL) : NULL;
    bool found = false;
    for (uint32_t i = 0; real && i < router->root_count && !found; i++) {
        char *root = realpath(router->roots[i], NULL);
        found = root && strcmp(root, real) == 0;
        free(root);
    }
    free(parent);
    free(real);
    return found;
}

/* The place meant, with links and ".." resolved: `change->dir` names it from here on, unless an
 * entry below a root as it was added says the same, so that one place has one name. */
static bd_status resolve(const bd_router *router, bd_change *change, bd_error *err) {
    char path[sizeof change->dir];
    bool relative = change->dir[0] != '/';
    const char *root = router->root_count > 0 ? router->roots[0] : NULL;
    if (relative && !root && !change->anywhere)
        return bd_fail(err, BD_E_ARGUMENT, change->dir,
                       "only variants below the directory of deltas may be loaded, and there is "
                       "none");
    if (relative && root) {
        if (bd_path_join(path, sizeof path, root, change->dir, NULL) != BD_OK)
            return bd_fail(err, BD_E_LIMIT, change->dir, "the path is too long");
    } else {
        memcpy(path, change->dir, sizeof path);
    }
    char *real = realpath(path, NULL);
    bool missing = !real && (errno == ENOENT || errno == ENOTDIR);
    bool allowed =
        real && (change->anywhere || below_a_root(router, real) || is_entry(router, path));
    bool fits = real && strlen(real) < sizeof change->dir;
    if (allowed && fits) memcpy(change->dir, real, strlen(real) + 1);
    free(real);
    if (allowed && fits) return BD_OK;
    if (allowed) return bd_fail(err, BD_E_LIMIT, change->dir, "the path is too long");
    /* What lies outside is not told apart from what is not there. */
    if (missing || !change->anywhere)
        return bd_fail(err, BD_E_NOT_FOUND, change->dir, "no adapter found at %s%s", change->dir,
                       change->anywhere ? "" : " below the directory of deltas");
    return bd_fail_errno(err, BD_E_IO, change->dir, errno, "%s cannot be reached", change->dir);
}

static bool same_place(const bd_router_queue *queue, const char *real) {
    char *own = realpath(queue->dir, NULL);
    bool same = own && strcmp(own, real) == 0;
    free(own);
    return same;
}

static bd_status serve_new(bd_router *router, bd_change *change, bd_router_queue *before,
                           bd_error *err) {
    change->of_files = true;
    bd_status status = bd_scan_add(router, change->name, change->dir, false, before, err);
    if (status != BD_OK) return status;
    if (bd_sources_add(router, change->name, change->dir, false, NULL) != BD_OK)
        bd_log(BD_LOG_WARN, "router", "out of memory: a rescan will drop variant=%s", change->name);
    change->fresh = before == NULL;
    bd_log(BD_LOG_INFO, "router", "added variant=%s path=%s", change->name, change->dir);
    return BD_OK;
}

/* The entry to be loaded: there already, replaced, or new. */
static bd_status serve_name(bd_router *router, bd_change *change, bd_error *err) {
    bd_status status = resolve(router, change, err);
    if (status != BD_OK) return status;
    bd_router_queue *queue = find_name(router, change->name);
    if (!queue) return serve_new(router, change, NULL, err);
    if (queue->served.is_base)
        return bd_fail(err, BD_E_ARGUMENT, change->name, "the name is the base model's");
    if (!same_place(queue, change->dir)) {
        change->taken = !change->replace;
        if (change->taken)
            return bd_fail(err, BD_E_ARGUMENT, change->name, "the name is taken by %s", queue->dir);
        char *old_name = queue->given_name ? strdup(queue->given_name) : NULL;
        char *old_dir = strdup(queue->dir);
        if (!old_dir || (queue->given_name && !old_name))
            status = bd_fail(err, BD_E_MEMORY, change->name, "out of memory");
        if (status == BD_OK) status = serve_new(router, change, queue, err);
        if (status == BD_OK) bd_sources_remove(router, old_name, old_dir);
        free(old_name);
        free(old_dir);
        return status;
    }
    bd_variant_mark mark = bd_variant_mark_of(queue->dir);
    if (mark.manifest == queue->mark.manifest && mark.side_files == queue->mark.side_files)
        return BD_OK;
    change->of_files = true;
    return bd_scan_add(router, queue->given_name, queue->dir, queue->pin, queue, err);
}

/* On bd-sched. */
static void on_loaded(bd_load_wait *wait, bd_status status, const bd_error *err) {
    bd_change *change = wait->change;
    if (status == BD_OK) {
        finish(change, BD_OK);
        return;
    }
    change->status = status;
    change->error = *err;
    if (!change->fresh || status == BD_E_SHUTDOWN) {
        finish(change, status);
        return;
    }
    change->undo = true; /* the name goes again, which is bd-scan's to say */
    bd_router_change(wait->router, change);
}

static void load(bd_router *router, bd_change *change) {
    const char *fault = bd_variant_name_fault(change->name);
    bd_status status = BD_OK;
    if (fault)
        status = bd_fail(&change->error, BD_E_ARGUMENT, change->name, "the name \"%.128s\" %s",
                         change->name, fault);
    if (status == BD_OK) status = serve_name(router, change, &change->error);
    const bd_router_queue *queue = status == BD_OK ? find_name(router, change->name) : NULL;
    if (queue) {
        change->of_files = true;
        if (bd_load_begin(router, &queue->served, false, on_loaded, change) == BD_OK) return;
        status = bd_fail(&change->error, BD_E_MEMORY, change->name, "out of memory");
    }
    if (status != BD_OK) bd_log_error("router", "load refused", &change->error);
    finish(change, status);
}

/* The load of a new name failed. */
static void undo(bd_router *router, bd_change *change) {
    bd_router_queue *queue = find_name(router, change->name);
    if (queue && strcmp(queue->dir, change->dir) == 0) remove_name(router, queue);
    finish(change, change->status);
}

/* ---- bd-scan ---- */

static void run_change(bd_router *router, bd_change *change) {
    if (atomic_load(&router->scan_stop)) {
        finish(change,
               bd_fail(&change->error, BD_E_SHUTDOWN, "router", "the server is shutting down"));
        return;
    }
    if (change->undo) {
        undo(router, change);
        return;
    }
    switch (change->kind) {
    case BD_CHANGE_RESCAN:
        rescan(router, change);
        break;
    case BD_CHANGE_LOAD:
        load(router, change);
        break;
    case BD_CHANGE_UNLOAD:
        unload(router, change);
        break;
    }
}

static void run_changes(bd_router *router) {
    bd_message *message = bd_mailbox_take(router->changes);
    while (message) {
        bd_change *change = (bd_change *)message;
        message = message->next; /* done() may free the change */
        run_change(router, change);
    }
}

static void *scan_main(void *arg) {
    bd_router *router = arg;
    (void)pthread_setname_np(pthread_self(), "bd-scan");
    while (!atomic_load(&router->scan_stop)) {
        run_changes(router);
        bd_mailbox_wait(router->changes, UINT64_MAX);
    }
    return NULL;
}

bd_status bd_router_start(bd_router *router, bd_error *err) {
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    router->scanning = true;
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int fault = pthread_create(&router->scan_thread, NULL, scan_main, router);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (fault == 0) return BD_OK;
    router->scanning = false;
    return bd_fail_errno(err, BD_E_MEMORY, "bd-scan", fault, "the thread could not be started");
}

void bd_router_stop(bd_router *router) {
    if (!router || !router->scanning) return;
    atomic_store(&router->scan_stop, true);
    bd_mailbox_wake(router->changes);
    pthread_join(router->scan_thread, NULL);
    router->scanning = false;
    run_changes(router);
}

void bd_router_change(bd_router *router, bd_change *change) {
    change->router = router;
    bd_status status = bd_mailbox_post(router->changes, &change->message);
    BD_ASSERT(status == BD_OK); /* no bound: each is a connection or a signal */
}

/* ---- Prefetch ---- */

void bd_router_prefetch(bd_router *router, const char *const *names, uint32_t count) {
    pthread_mutex_lock(&router->names_lock); /* what is in the registry lives */
    for (uint32_t i = 1; i < router->queue_count; i++) {
        const bd_router_queue *queue = router->queues[i];
        if (queue->pin && bd_load_begin(router, &queue->served, false, NULL, NULL) != BD_OK) break;
    }
    pthread_mutex_unlock(&router->names_lock);
    for (uint32_t i = 0; i < count; i++) {
        const bd_served *served = bd_router_find(router, names[i], strlen(names[i]), 0);
        if (!served || served->is_base)
            bd_log(BD_LOG_WARN, "router", "prefetch: no variant has the name %s", names[i]);
        else if (bd_load_begin(router, served, true, NULL, NULL) != BD_OK)
            bd_log(BD_LOG_WARN, "router", "prefetch: out of memory for variant=%s", names[i]);
        bd_router_release(router, served);
    }
}
