/* cache.h - which variants are resident: pages, states, leases, policy. States and contract:
 * architecture.md "Cache". Owner and only thread: bd-sched (before it runs: the thread that builds
 * the server). Loader progress is read from the loads' atomics in bd_cache_poll. */
#ifndef BITDELTA_CACHE_CACHE_H
#define BITDELTA_CACHE_CACHE_H

#include "bitdelta/loader/loader.h"

typedef struct bd_cache bd_cache;
typedef struct bd_variant bd_variant; /* one delta known to the cache; lives until forgotten */

typedef enum bd_variant_state {
    BD_VARIANT_ABSENT,
    BD_VARIANT_QUEUED,
    BD_VARIANT_LOADING,
    BD_VARIANT_READY,
    BD_VARIANT_DRAINING,
    BD_VARIANT_FAILED
} bd_variant_state;

typedef struct bd_cache_options {
    bd_model *model;
    bd_loader *loader;
    uint32_t page_count;
    uint32_t pinned_top; /* so many, by request rate, are never victims; one variant always fits */
    uint32_t loads_in_parallel; /* 0: 2 */
    uint64_t retry_after_us; /* negative caching of a failed load, doubled per failure up to 60 s */
    double half_life_s;      /* of the request rate; <= 0: 60 */
    /* Host memory that keeps the file bytes of deltas loaded, so that they come back without the
     * disk; 0: none. */
    uint64_t host_bytes;
    bd_metrics *metrics; /* may be NULL */
} bd_cache_options;

typedef struct bd_lease { /* a counted reference; the overlay stays valid until release */
    bd_variant *variant;
    const bd_overlay *overlay;
    /* NULL: every layer is there. Else the load under way, valid until release: layers
     * [0, ready_count) may be read; once it is finished, all of them or, if it failed, none. */
    const bd_load *load;
} bd_lease;

typedef struct bd_cache_waiter { /* caller's memory; linked while waiting */
    struct bd_cache_waiter *next;
    /* On bd-sched, inside bd_cache_poll: BD_OK with a lease, or the error of the failed load. */
    void (*ready)(struct bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                  const bd_error *err);
    bd_variant *variant; /* internal */
} bd_cache_waiter;

typedef struct bd_variant_info {
    const char *name;
    bd_variant_state state;
    uint64_t page_bytes, file_bytes, load_us, last_use_us, loads, evictions;
    uint64_t host_bytes; /* of a complete copy in host memory, else 0 */
    uint64_t host_hits;  /* loads from there */
    uint32_t references, waiters;
    bool pinned, protected_by_rate;
    double rate_per_s;
    uint64_t retry_at_us;
    const bd_error *failure; /* of the last failed load, else NULL */
} bd_variant_info;

BD_MUST_CHECK bd_status bd_cache_create(const bd_cache_options *options, bd_cache **out,
                                        bd_error *err);
void bd_cache_destroy(bd_cache *cache); /* no lease may be out; cancels loads, calls no waiter */

/* Leases of variants still loading: from now on a load's waiters get theirs as soon as
 * may_start(ctx, load, now) says so, asked in every poll once load->early is set, and for every
 * caller of acquire. NULL: none. A load that fails keeps its pages and overlay until those leases
 * are back. */
void bd_cache_stream(bd_cache *cache,
                     bool (*may_start)(void *ctx, const bd_load *load, uint64_t now_us), void *ctx);

/* Takes ownership of *delta (moved, also when this fails). Reads no file. BD_E_LIMIT: needs more
 * pages than exist beside the pinned variants, or a pin too many. A pinned variant is loaded by the
 * first request or by bd_cache_prefetch. */
BD_MUST_CHECK bd_status bd_cache_register(bd_cache *cache, bd_delta *delta, bool pinned,
                                          bd_variant **out, bd_error *err);
/* The entry goes away when its last lease does (at once when there is none: the pointer is dead
 * then); until that new acquires fail with BD_E_NOT_FOUND. Waiters get BD_E_NOT_FOUND in the next
 * poll. */
void bd_cache_forget(bd_cache *cache, bd_variant *variant);
/* Nobody new will ask for it: it loses its pin and its place among the most wanted for good. Those
 * who ask nevertheless are served as before. */
void bd_cache_retire(bd_cache *cache, bd_variant *variant);

/* Counts one request for the rate. */
void bd_cache_touch(bd_cache *cache, bd_variant *variant, uint64_t now_us);

/* BD_OK: *lease taken. BD_AGAIN: loading, waiter is on the list. BD_BUSY: no pages can be freed
 * yet, or the variant is draining; ask again when bd_cache_poll returns true. waiter NULL: nobody
 * waits, ask again. BD_E_VARIANT: failed, retry at info.retry_at_us; err has the load's own error.
 */
BD_MUST_CHECK bd_status bd_cache_acquire(bd_cache *cache, bd_variant *variant, uint64_t now_us,
                                         bd_lease *lease, bd_cache_waiter *waiter, bd_error *err);
void bd_cache_wait_cancel(bd_cache *cache, bd_cache_waiter *waiter);
void bd_cache_release(bd_cache *cache, bd_lease *lease, uint64_t now_us);

/* Moves loads on, calls waiters (which may call the cache again, but not poll or destroy). Returns
 * true when anything changed since the last poll (a BD_BUSY caller should ask again). */
bool bd_cache_poll(bd_cache *cache, uint64_t now_us);

/* Admin. Pins beyond what leaves one variant's pages evictable: BD_E_LIMIT. prefetch: BD_OK when
 * resident, BD_AGAIN when on its way, BD_BUSY and BD_E_VARIANT as for acquire. unload: BD_BUSY
 * while leased or while its load is being stopped (it drains, waiters get BD_E_VARIANT; a load
 * whose early leases are out goes on for them); of a failed variant: it may be tried again at
 * once. */
BD_MUST_CHECK bd_status bd_cache_pin(bd_cache *cache, bd_variant *variant, bool pinned,
                                     bd_error *err);
BD_MUST_CHECK bd_status bd_cache_prefetch(bd_cache *cache, bd_variant *variant, uint64_t now_us,
                                          bd_error *err);
BD_MUST_CHECK bd_status bd_cache_unload(bd_cache *cache, bd_variant *variant, bd_error *err);
void bd_cache_info(const bd_cache *cache, const bd_variant *variant, uint64_t now_us,
                   bd_variant_info *out);
uint32_t bd_cache_pages_free(const bd_cache *cache);

#endif
