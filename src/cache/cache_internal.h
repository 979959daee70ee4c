/* cache_internal.h - the cache's structs, shared by cache.c (registry, admin) and residency.c
 * (states, loads, leases), and the table of what it takes from other rooms, so that tests can put a
 * loader of their own in its place.
 *
 *   ABSENT --acquire--> QUEUED --a loader slot--> LOADING --done--> READY --evicted--> ABSENT
 *   LOADING --failed--> FAILED --acquire after retry_at--> QUEUED
 *   READY, LOADING --unload, forget--> DRAINING --last lease, load finished--> ABSENT
 *
 * Pages are held from QUEUED on, so two loads can never count on the same victim. LOADING has
 * references when leases were given out early; if such a load fails, FAILED keeps pages and overlay
 * until they are back. */
#ifndef BITDELTA_SRC_CACHE_INTERNAL_H
#define BITDELTA_SRC_CACHE_INTERNAL_H

#include "bitdelta/cache/cache.h"
#include "host_tier.h"
#include "pages.h"
#include "policy.h"

typedef struct bd_cache_source {
    void *ctx;
    void *arena;
    uint64_t page_bytes;
    uint32_t (*pages_for)(void *ctx, const bd_delta *delta);
    bd_status (*submit)(void *ctx, bd_load *load, bd_error *err);
    void (*overlay_destroy)(bd_overlay *overlay);
    void (*delta_close)(bd_delta *delta);
    bd_host_memory host_memory;
} bd_cache_source;

typedef struct bd_waiter_list {
    bd_cache_waiter *first, *last;
    uint32_t count;
} bd_waiter_list;

struct bd_variant {
    bd_policy_item policy; /* .fixed is set when victims are looked for */
    bd_delta delta;
    bd_variant_state state;
    uint32_t index;          /* in cache->variants */
    uint32_t resident_index; /* in cache->residents, READY only */
    uint32_t need_pages, held_pages;
    void **pages;        /* [need_pages as registered] */
    bd_overlay *overlay; /* READY, DRAINING after READY, and wherever early leases were given */
    uint32_t references;
    bool forgotten, prefetched;
    bd_waiter_list waiters; /* QUEUED, LOADING */
    /* Waiters whose result is known, until the poll under way or the next one has called them. */
    bd_waiter_list delivery;
    bool delivery_ok; /* their references are counted already */
    bool in_delivery_queue;
    bd_variant *next_delivery;
    bd_status delivery_status;
    bd_error delivery_error;
    bd_variant *next_queued;
    bd_variant *next_active; /* the loader has `load` */
    bool load_active;
    bd_load load;
    bd_load_host *host; /* copy of the files in host memory, complete or being filled */
    bool host_whole;    /* it is complete */
    uint64_t host_hits;
    uint32_t failure_count; /* in a row */
    uint64_t retry_at_us;
    bd_error failure; /* of the last failed load; status BD_OK: none */
    uint64_t loads, evictions, load_us, last_use_us;
};

typedef struct bd_variant_queue {
    bd_variant *first, *last;
} bd_variant_queue;

struct bd_cache {
    bd_cache_options options;
    bd_cache_source source;
    bool (*may_start)(void *ctx, const bd_load *load, uint64_t now_us);
    void *may_start_ctx;
    bd_pages pages;
    bd_host_tier *host; /* NULL: none */
    bd_policy policy;
    bd_variant **variants;
    uint32_t variant_count, variant_cap;
    bd_variant **residents;          /* READY ones, packed; [page_count] */
    bd_policy_item **resident_items; /* scratch for the policy, same order */
    uint32_t *victims;               /* scratch, as the next */
    bd_variant **leaving;
    uint32_t resident_count;
    uint32_t admissions;
    uint32_t pinned_pages, largest_need_pages;
    bd_variant_queue queued, delivering;
    bd_variant *active; /* loads the loader has */
    uint32_t active_count;
    bool changed; /* since the last poll */
    bd_metric *metric_resident, *metric_pages_free, *metric_evictions;
    bd_metric *metric_host_used, *metric_host_total, *metric_host_hits, *metric_host_misses;
};

BD_MUST_CHECK bd_status bd_cache_create_with(const bd_cache_options *options,
                                             const bd_cache_source *source, bd_cache **out,
                                             bd_error *err);

/* host_copies.c */

/* What the load about to start is to use of the host's memory: the variant's copy, room for one
 * (others of lower score give way), or nothing. */
void bd_host_copy_begin(bd_cache *cache, bd_variant *variant);
/* After the load: keeps a complete copy, drops another. */
void bd_host_copy_end(bd_cache *cache, bd_variant *variant);
void bd_host_copy_drop(bd_cache *cache, bd_variant *variant);
void bd_host_metrics_make(bd_cache *cache);

/* residency.c, for cache.c */

/* Frees a forgotten variant that nothing uses any more; *variant may be gone afterwards. */
void bd_variant_collect(bd_cache *cache, bd_variant *variant);
/* Takes the variant out of memory, now or when its leases and its load end. Its waiters get the
 * status with the variant's name and `text`. */
void bd_variant_drain(bd_cache *cache, bd_variant *variant, bd_status status, const char *text);
void bd_cache_show_metrics(const bd_cache *cache);
/* Never from callbacks: the cache's end. Waits for the loader to let go of every load. */
void bd_cache_stop_loads(bd_cache *cache);
/* QUEUED or beyond afterwards, or BD_BUSY, or a failure as bd_cache_acquire reports it. */
BD_MUST_CHECK bd_status bd_variant_want(bd_cache *cache, bd_variant *variant, uint64_t now_us,
                                        bd_error *err);

#endif
