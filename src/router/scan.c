/* scan.c - a look at every directory that variants come from, and what follows from it for the
 * registry. Threads: the builder until start, then bd-scan; files are read on a pool of its own.
 *
 *   collect: what should be served   match: what of it is served unchanged   open: the rest
 *   settle: who gets which name      apply: on bd-sched, a few at a time */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/pool.h"
#include "internal.h"

enum { PATH_BYTES = 4096, KEY_BYTES = PATH_BYTES + BD_VARIANT_NAME_MAX + 8 };
enum { POOL_FROM = 32, POOL_THREADS_MAX = 16, REFUSALS_MAX = 1000 };

typedef struct wanted {
    const char *name; /* borrowed; NULL: delta.json's */
    char *dir;
    bool pin, keep, pending;
    bool listed;          /* found in a directory, not named */
    bd_router_queue *old; /* served from this very place */
    bd_router_queue *fresh;
    bd_delta delta;
    bd_status status;
    bd_error err;
} wanted;

typedef struct scan {
    bd_router *router;
    wanted *items;
    uint32_t count, cap;
    uint32_t *to_open;
    uint32_t to_open_count;
    bd_map *claims; /* name -> dir, of all that stay or come */
    bd_registry_op *ops;
    uint32_t *op_items; /* which item an op is of; UINT32_MAX: a removal */
    uint32_t op_count;
    bd_refusal *before; /* what the last look refused */
    uint32_t before_count;
    bd_change *change; /* may be NULL */
    bd_fault_report report;
} scan;

/* ---- Collect ---- */

static bd_status add_wanted(scan *s, const char *name, const char *dir, bool pin, bd_error *err) {
    if (s->count == s->cap) {
        uint32_t cap = s->cap ? s->cap * 2 : 64;
        wanted *items = realloc(s->items, cap * sizeof *items);
        if (!items) return bd_fail(err, BD_E_MEMORY, dir, "out of memory for %u variants", cap);
        s->items = items;
        s->cap = cap;
    }
    wanted *item = &s->items[s->count];
    memset(item, 0, sizeof *item);
    item->name = name;
    item->pin = pin;
    item->dir = strdup(dir);
    if (!item->dir) return bd_fail(err, BD_E_MEMORY, dir, "out of memory for the variant's entry");
    s->count++;
    return BD_OK;
}

static bd_status collect_entry(scan *s, const char *root, const char *name, bd_error *err) {
    char path[PATH_BYTES];
    bd_error fault;
    bd_status status = bd_delta_find(root, name, path, sizeof path, &fault);
    if (status == BD_E_NOT_FOUND) return BD_OK;
    bd_status added = add_wanted(s, NULL, path[0] ? path : root, false, err);
    if (added != BD_OK) return added;
    wanted *item = &s->items[s->count - 1];
    item->listed = true;
    item->status = status;
    if (status != BD_OK) item->err = fault;
    return BD_OK;
}

static bd_status collect_root(scan *s, const char *root, bd_error *err) {
    struct dirent **entries = NULL;
    int count = scandir(root, &entries, NULL, alphasort);
    if (count < 0)
        return bd_fail_errno(err, BD_E_IO, root, errno,
                             "%s: the directory of variants cannot be read", root);
    bd_status status = BD_OK;
    for (int i = 0; i < count; i++) {
        if (status == BD_OK) status = collect_entry(s, root, entries[i]->d_name, err);
        free(entries[i]);
    }
    free(entries);
    return status;
}

static bd_status collect(scan *s, bool all, uint32_t first_root, bd_error *err) {
    const bd_router *router = s->router;
    bd_status status = BD_OK;
    for (uint32_t i = 0; all && i < router->source_count && status == BD_OK; i++) {
        const bd_source *source = &router->sources[i];
        status = add_wanted(s, source->name, source->dir, source->pin, err);
    }
    for (uint32_t i = first_root; i < router->root_count && status == BD_OK; i++)
        status = collect_root(s, router->roots[i], err);
    return status;
}

/* ---- Match ---- */

static size_t place_key(char key[KEY_BYTES], const char *name, const char *dir) {
    int bytes = snprintf(key, KEY_BYTES, "%s%c%s", dir, name ? '=' : '.', name ? name : "");
    return bytes > 0 && bytes < KEY_BYTES ? (size_t)bytes : 0;
}

static bool same_mark(bd_variant_mark a, bd_variant_mark b) {
    return a.manifest == b.manifest && a.side_files == b.side_files;
}

/* BD_E_MEMORY only. */
static bd_status match(scan *s, bd_error *err) {
    const bd_router *router = s->router;
    char key[KEY_BYTES];
    bd_map *places = bd_map_create(router->queue_count);
    s->to_open = calloc((size_t)s->count + 1, sizeof *s->to_open);
    bd_status status = places && s->to_open ? BD_OK : BD_E_MEMORY;
    for (uint32_t i = 1; i < router->queue_count && status == BD_OK; i++) {
        bd_router_queue *queue = router->queues[i];
        size_t bytes = place_key(key, queue->given_name, queue->dir);
        status = bd_map_put(places, key, bytes, queue);
        BD_ASSERT(status != BD_BUSY); /* one name each, and a place has one name */
    }
    for (uint32_t i = 0; i < s->count && status == BD_OK; i++) {
        wanted *item = &s->items[i];
        size_t bytes = place_key(key, item->name, item->dir);
        item->old = bd_map_take(places, key, bytes); /* a place listed twice is opened again */
        item->keep = item->old && item->status == BD_OK &&
                     same_mark(item->old->mark, bd_variant_mark_of(item->dir));
        if (!item->keep && item->status == BD_OK) s->to_open[s->to_open_count++] = i;
    }
    bd_map_destroy(places);
    return status == BD_OK
               ? BD_OK
               : bd_fail(err, status, "rescan", "out of memory for %u variants", s->count);
}

/* ---- Open ---- */

static void open_item(void *ctx, uint32_t index, uint32_t worker) {
    scan *s = ctx;
    wanted *item = &s->items[s->to_open[index]];
    (void)worker;
    item->status =
        bd_variant_open(s->router, item->name, item->dir, &item->fresh, &item->delta, &item->err);
    if (item->fresh) item->fresh->pin = item->pin;
}

/* Thousands of delta.json are read on several cores: parsing is what takes the time. */
static void open_all(scan *s) {
    bd_pool *pool = NULL;
    uint32_t cores = bd_usable_cores();
    if (s->to_open_count >= POOL_FROM && cores > 1) {
        bd_status status = bd_pool_create(
            &pool, cores < POOL_THREADS_MAX ? cores : POOL_THREADS_MAX, "bd-scan", NULL);
        if (status != BD_OK) pool = NULL; /* one by one, then */
    }
    if (pool)
        bd_pool_parallel_for(pool, s->to_open_count, open_item, s);
    else
        for (uint32_t i = 0; i < s->to_open_count; i++)
            open_item(s, i, 0);
    bd_pool_destroy(pool);
}

/* ---- Settle ---- */

/* The same contents, touched or written again: nothing to replace. */
static bool is_same(const wanted *item) {
    const bd_router_queue *old = item->old, *fresh = item->fresh;
    return old && fresh &&
           memcmp(old->served.digest, fresh->served.digest, sizeof old->served.digest) == 0 &&
           memcmp(old->served.files_digest, fresh->served.files_digest,
                  sizeof old->served.files_digest) == 0 &&
           strcmp(old->served.name, fresh->served.name) == 0;
}

static void drop_fresh(wanted *item) {
    if (!item->fresh) return;
    bd_delta_close(&item->delta);
    bd_queue_free(item->fresh);
    item->fresh = NULL;
}

static bd_status claim(scan *s, wanted *item, bd_router_queue *queue) {
    const char *name = queue->served.name;
    bd_status status = bd_map_put(s->claims, name, strlen(name), queue);
    if (status != BD_BUSY) return status;
    const bd_router_queue *holder = bd_map_get(s->claims, name, strlen(name));
    if (item->listed && strcmp(holder->dir, item->dir) == 0) return BD_AGAIN; /* named before */
    return bd_name_taken(holder, name, item->dir, &item->err);
}

/* What is served and cannot be read now stays as it is: its weights may be resident and good. But
 * a variant that was named and whose directory is gone goes, as one in a directory does. */
static bool is_gone(const wanted *item) {
    char path[PATH_BYTES];
    if (bd_path_join(path, sizeof path, item->dir, "delta.json", NULL) != BD_OK) return true;
    return !bd_file_exists(path);
}

static void settle_item(scan *s, wanted *item) {
    bd_router_queue *queue = item->keep ? item->old : item->fresh;
    if (!queue) return;
    bd_status status = claim(s, item, queue);
    if (status == BD_OK) return;
    item->keep = false;
    drop_fresh(item);
    if (status != BD_AGAIN) item->status = status;
}

static bool has_its_name(const wanted *item) {
    if (item->keep) return true;
    return item->old && item->fresh &&
           strcmp(item->old->served.name, item->fresh->served.name) == 0;
}

/* Who is served under a name keeps it; then the others, in order. */
static void settle_items(scan *s) {
    for (uint32_t i = 0; i < s->count; i++) {
        wanted *item = &s->items[i];
        if (is_same(item)) {
            item->old->mark = item->fresh->mark;
            item->keep = true;
            drop_fresh(item);
        }
        if (item->status != BD_OK && item->old && !is_gone(item)) item->keep = true;
        if (has_its_name(item))
            settle_item(s, item);
        else
            item->pending = true;
    }
    for (uint32_t i = 0; i < s->count; i++)
        if (s->items[i].pending) settle_item(s, &s->items[i]);
}

static void add_op(scan *s, uint32_t item, bd_router_queue *before) {
    wanted *w = item == UINT32_MAX ? NULL : &s->items[item];
    s->op_items[s->op_count] = item;
    bd_registry_op *op = &s->ops[s->op_count++];
    *op = (bd_registry_op){
        .before = before, .after = w ? w->fresh : NULL, .delta = w ? &w->delta : NULL};
    if (before) memcpy(op->name, before->served.name, sizeof op->name);
}

/* Ops: removals first, so that their names and pins are free; a name that passes from one place to
 * another is one op. */
static bd_status make_ops(scan *s, bool all, bd_error *err) {
    const bd_router *router = s->router;
    size_t most = (size_t)s->count + router->queue_count;
    s->ops = calloc(most, sizeof *s->ops);
    s->op_items = calloc(most, sizeof *s->op_items);
    if (!s->ops || !s->op_items)
        return bd_fail(err, BD_E_MEMORY, "rescan", "out of memory for %zu changes", most);
    for (uint32_t i = 1; all && i < router->queue_count; i++) {
        bd_router_queue *queue = router->queues[i];
        const char *name = queue->served.name;
        if (!bd_map_get(s->claims, name, strlen(name))) add_op(s, UINT32_MAX, queue);
    }
    for (uint32_t i = 0; i < s->count; i++) {
        const bd_router_queue *fresh = s->items[i].fresh;
        if (!fresh) continue;
        const char *name = fresh->served.name;
        add_op(s, i, bd_map_get(router->names, name, strlen(name)));
    }
    return BD_OK;
}

static bd_status settle(scan *s, bool all, bd_error *err) {
    const bd_router *router = s->router;
    s->claims = bd_map_create((size_t)s->count + router->queue_count);
    if (!s->claims) return bd_fail(err, BD_E_MEMORY, "rescan", "out of memory for names");
    /* Names that are not up for change: the base's, or, when a directory is added, all. */
    for (uint32_t i = 0; i < (all ? 1 : router->queue_count); i++) {
        const char *name = router->queues[i]->served.name;
        bd_status status = bd_map_put(s->claims, name, strlen(name), router->queues[i]);
        if (status != BD_OK) return bd_fail(err, status, name, "out of memory for the name");
    }
    settle_items(s);
    return make_ops(s, all, err);
}

/* ---- Report ---- */

static void record(scan *s, bd_change_result result, const char *name, const char *fault) {
    bd_change *change = s->change;
    if (!change) return;
    bd_change_entry entry = {.result = result, .name = strdup(name)};
    if (fault) entry.fault = strdup(fault);
    /* Grown by doubling: at powers of two. */
    bd_change_entry *entries = change->entries;
    uint32_t count = change->entry_count;
    if ((count & (count - 1)) == 0)
        entries = realloc(entries, (count ? 2 * (size_t)count : 1) * sizeof *entries);
    if (entries) change->entries = entries;
    if (!entries || !entry.name || (fault && !entry.fault)) {
        free(entry.name);
        free(entry.fault);
        change->incomplete = true;
        return;
    }
    entries[change->entry_count++] = entry;
}

void bd_scan_refusals_free(bd_refusal *list, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        free(list[i].dir);
        free(list[i].fault);
    }
    free(list);
}

/* The list begins anew; the old one stays for comparison. */
static void take_refusals(scan *s) {
    bd_router *router = s->router;
    pthread_mutex_lock(&router->names_lock);
    s->before = router->refusals;
    s->before_count = router->refusal_count;
    router->refusals = NULL;
    router->refusal_count = 0;
    pthread_mutex_unlock(&router->names_lock);
}

/* Refused for the same reason by the last look, with the same files: nothing to report again. Those
 * that the list had no room for are. */
static bool was_refused(const scan *s, const wanted *item) {
    const bd_variant_mark mark = bd_variant_mark_of(item->dir);
    for (uint32_t i = 0; i < s->before_count; i++) {
        const bd_refusal *old = &s->before[i];
        if (strcmp(old->dir, item->dir) == 0 && same_mark(old->mark, mark) &&
            strcmp(old->fault, item->err.message) == 0)
            return true;
    }
    return false;
}

void bd_scan_refuse(bd_router *router, const char *dir, const bd_error *err) {
    if (router->refusal_count >= REFUSALS_MAX) return; /* the log has them all */
    bd_refusal one = {
        .dir = strdup(dir), .fault = strdup(err->message), .mark = bd_variant_mark_of(dir)};
    pthread_mutex_lock(&router->names_lock);
    bd_refusal *list =
        realloc(router->refusals, ((size_t)router->refusal_count + 1) * sizeof *list);
    if (list) router->refusals = list;
    bool kept = list && one.dir && one.fault;
    if (kept) list[router->refusal_count++] = one;
    pthread_mutex_unlock(&router->names_lock);
    if (kept) return;
    free(one.dir);
    free(one.fault);
}

void bd_router_refused(bd_router *router,
                       void (*visit)(void *ctx, const char *dir, const char *fault), void *ctx) {
    pthread_mutex_lock(&router->names_lock);
    for (uint32_t i = 0; i < router->refusal_count; i++)
        visit(ctx, router->refusals[i].dir, router->refusals[i].fault);
    pthread_mutex_unlock(&router->names_lock);
}

/* Results, to whoever wants them. */
static void tell(scan *s, void *ctx) {
    for (uint32_t i = 0; i < s->op_count; i++) {
        const bd_registry_op *op = &s->ops[i];
        wanted *item = s->op_items[i] == UINT32_MAX ? NULL : &s->items[s->op_items[i]];
        if (op->status == BD_OK) {
            record(s,
                   !op->after   ? BD_CHANGE_REMOVED
                   : op->before ? BD_CHANGE_REPLACED
                                : BD_CHANGE_ADDED,
                   op->after ? op->after->served.name : op->name, NULL);
            continue;
        }
        item->status = op->status;
        item->err = op->err;
        drop_fresh(item);
    }
    for (uint32_t i = 0; i < s->count; i++) {
        const wanted *item = &s->items[i];
        if (item->keep && s->change) s->change->unchanged++;
        if (item->status == BD_OK) continue;
        record(s, BD_CHANGE_REFUSED, item->dir, item->err.message);
        bd_scan_refuse(s->router, item->dir, &item->err);
        if (s->report && !was_refused(s, item)) s->report(ctx, item->dir, &item->err);
    }
}

/* ---- The whole ---- */

static void scan_free(scan *s) {
    for (uint32_t i = 0; i < s->count; i++) {
        drop_fresh(&s->items[i]);
        free(s->items[i].dir);
    }
    free(s->items);
    free(s->to_open);
    free(s->ops);
    free(s->op_items);
    bd_map_destroy(s->claims);
    bd_scan_refusals_free(s->before, s->before_count);
}

static void apply(scan *s) {
    bd_registry_apply(s->router, s->ops, s->op_count);
    for (uint32_t i = 0; i < s->op_count; i++) {
        const bd_registry_op *op = &s->ops[i];
        if (op->status != BD_OK || !op->after) continue;
        s->items[s->op_items[i]].fresh = NULL; /* the registry's */
        if (s->router->scanning && op->after->pin &&
            bd_load_begin(s->router, &op->after->served, false, NULL, NULL) != BD_OK)
            return; /* no memory to wait for it: its first request loads it */
    }
}

bd_status bd_scan_run(bd_router *router, bool all, uint32_t first_root, bd_fault_report report,
                      void *report_ctx, bd_change *change, bd_error *err) {
    scan s = {.router = router, .change = change, .report = report};
    bd_status status = collect(&s, all, first_root, err);
    if (status == BD_OK) status = match(&s, err);
    if (status == BD_OK) {
        open_all(&s);
        status = settle(&s, all, err);
    }
    if (status == BD_OK) {
        if (all) take_refusals(&s);
        apply(&s);
        tell(&s, report_ctx);
    }
    scan_free(&s);
    return status;
}

bd_status bd_scan_add(bd_router *router, const char *name, const char *dir, bool pin,
                      bd_router_queue *before, bd_error *err) {
    bd_router_queue *fresh;
    bd_delta delta;
    bd_status status = bd_variant_open(router, name, dir, &fresh, &delta, err);
    if (status != BD_OK) return status;
    fresh->pin = pin;
    name = fresh->served.name;
    const bd_router_queue *holder = bd_map_get(router->names, name, strlen(name));
    if (holder && holder != before) {
        status = bd_name_taken(holder, name, dir, err);
        bd_delta_close(&delta);
    } else {
        bd_registry_op op = {.before = before, .after = fresh, .delta = &delta};
        bd_registry_apply(router, &op, 1);
        status = op.status;
        if (status != BD_OK && err) *err = op.err;
    }
    if (status != BD_OK) bd_queue_free(fresh);
    return status;
}

bd_status bd_router_add_variant(bd_router *router, const char *name, const char *dir, bool pinned,
                                bd_error *err) {
    bd_error fault;
    bd_status status = bd_sources_add(router, name, dir, pinned, &fault);
    if (status == BD_OK) status = bd_scan_add(router, name, dir, pinned, NULL, &fault);
    if (status == BD_OK) return BD_OK;
    bd_scan_refuse(router, dir, &fault);
    if (err) *err = fault;
    return status;
}

bd_status bd_router_add_directory(bd_router *router, const char *dir, bd_fault_report report,
                                  void *ctx, uint32_t *added, bd_error *err) {
    uint32_t before = router->queue_count;
    *added = 0;
    bd_status status = bd_roots_add(router, dir, err);
    if (status != BD_OK) return status;
    status = bd_scan_run(router, false, router->root_count - 1, report, ctx, NULL, err);
    *added = router->queue_count - before;
    return status;
}
