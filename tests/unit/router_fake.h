/* router_fake.h - cache.h with one page a variant and loads that take a while, for the router's
 * tests. It checks that all calls come from bd-sched, that leases are balanced and that waiters are
 * answered once. */
#ifndef BITDELTA_TESTS_ROUTER_FAKE_H
#define BITDELTA_TESTS_ROUTER_FAKE_H

#include "bitdelta/router/router.h"
#include "engine_fake.h"

enum {
    FAKE_FILE_BYTES = 3000, /* of every variant */
    /* A failed load stays failed, and its retry as far away, however slow the machine. */
    FAKE_RETRY_US = 2500000,
};

/* A model as far as the registry knows it. */
struct bd_model {
    bd_model_config config;
    char fingerprint[65];
};

const bd_model_config *bd_model_config_of(const bd_model *model) {
    return &model->config;
}

const char *bd_model_fingerprint(const bd_model *model) {
    return model->fingerprint;
}

uint32_t bd_model_max_len(const bd_model *model) {
    (void)model;
    return 512;
}

uint32_t bd_model_logits_width(const bd_model *model) {
    return model->config.vocab;
}

struct bd_cache {
    struct bd_variant variants[FAKE_VARIANTS_MAX];
    bd_delta deltas[FAKE_VARIANTS_MAX];
    uint32_t count, pages, pages_used;
    uint64_t load_us;
    bool changed;
    uint64_t loads, evictions;
    uint64_t loads_at_first_end; /* begun when the first of them ended */
    uint32_t forgotten;
    bool fail_next;      /* load */
    bd_engine *engine;   /* NULL: before it runs */
    uint32_t max_leased; /* variants with a lease at once */
};

static inline void fake_cache_check(const bd_cache *cache) {
    if (cache->engine) BD_ASSERT(bd_engine_on_thread(cache->engine));
}

bd_status bd_cache_register(bd_cache *cache, bd_delta *delta, bool pinned, bd_variant **out,
                            bd_error *err) {
    BD_ASSERT(cache->count < FAKE_VARIANTS_MAX);
    if (strcmp(delta->variant, "too-large") == 0) {
        bd_delta_close(delta);
        return bd_fail(err, BD_E_LIMIT, "too-large", "needs more pages than exist");
    }
    struct bd_variant *v = &cache->variants[cache->count];
    uint64_t word = cache->count + 1;
    cache->deltas[cache->count++] = *delta;
    memcpy(v->overlay.digest, &word, sizeof word);
    memcpy(v->name, delta->variant, sizeof v->name);
    v->pinned = pinned;
    *out = v;
    return BD_OK;
}

void bd_cache_forget(bd_cache *cache, bd_variant *variant) {
    fake_cache_check(cache);
    BD_ASSERT(!variant->waiters && !variant->forgotten);
    variant->forgotten = true;
    cache->forgotten++;
}

void bd_cache_touch(bd_cache *cache, bd_variant *variant, uint64_t now_us) {
    fake_cache_check(cache);
    variant->rate += 1.0;
    variant->last_use_us = now_us;
}

static inline bool fake_cache_evict(bd_cache *cache) {
    struct bd_variant *victim = NULL;
    for (uint32_t i = 0; i < cache->count; i++) {
        struct bd_variant *v = &cache->variants[i];
        if (v->state != BD_VARIANT_READY || v->leases > 0 || v->pinned) continue;
        if (!victim || v->last_use_us < victim->last_use_us) victim = v;
    }
    if (!victim) return false;
    victim->state = BD_VARIANT_ABSENT;
    cache->pages_used--;
    cache->evictions++;
    return true;
}

static inline void fake_cache_lease(bd_cache *cache, bd_variant *v, bd_lease *lease) {
    atomic_fetch_add(&v->leases, 1);
    *lease = (bd_lease){v, &v->overlay, NULL};
    uint32_t leased = 0;
    for (uint32_t i = 0; i < cache->count; i++)
        leased += cache->variants[i].leases > 0;
    if (leased > cache->max_leased) cache->max_leased = leased;
}

bd_status bd_cache_acquire(bd_cache *cache, bd_variant *v, uint64_t now_us, bd_lease *lease,
                           bd_cache_waiter *waiter, bd_error *err) {
    fake_cache_check(cache);
    BD_ASSERT(!v->forgotten);
    if (v->state == BD_VARIANT_FAILED)
        return bd_fail(err, BD_E_VARIANT, v->name, "planted: a chunk is corrupt");
    if (v->state == BD_VARIANT_READY) {
        fake_cache_lease(cache, v, lease);
        return BD_OK;
    }
    if (v->state == BD_VARIANT_ABSENT) {
        if (cache->pages_used == cache->pages && !fake_cache_evict(cache))
            return bd_fail(err, BD_BUSY, v->name, "no pages");
        cache->pages_used++;
        cache->loads++;
        if (cache->fail_next) v->fails = true;
        cache->fail_next = false;
        v->state = BD_VARIANT_LOADING;
        v->loading_until_us = now_us + cache->load_us;
    }
    for (bd_cache_waiter *w = v->waiters; w; w = w->next)
        BD_ASSERT(w != waiter);
    if (!waiter) return BD_AGAIN;
    waiter->variant = v;
    waiter->next = v->waiters;
    v->waiters = waiter;
    return BD_AGAIN;
}

void bd_cache_wait_cancel(bd_cache *cache, bd_cache_waiter *waiter) {
    fake_cache_check(cache);
    bd_cache_waiter **link = &waiter->variant->waiters;
    while (*link != waiter) {
        BD_ASSERT(*link);
        link = &(*link)->next;
    }
    *link = waiter->next;
}

void bd_cache_release(bd_cache *cache, bd_lease *lease, uint64_t now_us) {
    fake_cache_check(cache);
    BD_ASSERT(atomic_fetch_sub(&lease->variant->leases, 1) > 0);
    lease->variant->last_use_us = now_us;
    memset(lease, 0, sizeof *lease);
    cache->changed = true;
}

static inline void fake_cache_finish(bd_cache *cache, struct bd_variant *v) {
    bd_error err;
    bd_status status = BD_OK;
    if (cache->loads_at_first_end == 0) cache->loads_at_first_end = cache->loads;
    if (v->fails) {
        v->state = BD_VARIANT_FAILED;
        cache->pages_used--;
        status = bd_fail(&err, BD_E_CORRUPT, v->name, "planted: a chunk is corrupt");
        v->failure = err;
    } else {
        v->state = BD_VARIANT_READY;
    }
    while (v->waiters) {
        bd_cache_waiter *w = v->waiters;
        v->waiters = w->next;
        bd_lease lease = {0};
        if (status == BD_OK) fake_cache_lease(cache, v, &lease);
        w->ready(w, status, status == BD_OK ? &lease : NULL, status == BD_OK ? NULL : &err);
    }
    cache->changed = true;
}

bool bd_cache_poll(bd_cache *cache, uint64_t now_us) {
    for (uint32_t i = 0; i < cache->count; i++) {
        struct bd_variant *v = &cache->variants[i];
        if (v->state == BD_VARIANT_LOADING && now_us >= v->loading_until_us)
            fake_cache_finish(cache, v);
    }
    bool changed = cache->changed;
    cache->changed = false;
    return changed;
}

void bd_cache_retire(bd_cache *cache, bd_variant *variant) {
    fake_cache_check(cache);
    variant->pinned = false;
}

bd_status bd_cache_pin(bd_cache *cache, bd_variant *variant, bool pinned, bd_error *err) {
    fake_cache_check(cache);
    (void)err;
    variant->pinned = pinned;
    return BD_OK;
}

bd_status bd_cache_prefetch(bd_cache *cache, bd_variant *variant, uint64_t now_us, bd_error *err) {
    bd_lease lease;
    bd_status status = bd_cache_acquire(cache, variant, now_us, &lease, NULL, err);
    if (status == BD_OK) bd_cache_release(cache, &lease, now_us);
    return status;
}

bd_status bd_cache_unload(bd_cache *cache, bd_variant *variant, bd_error *err) {
    fake_cache_check(cache);
    if (variant->leases > 0) return bd_fail(err, BD_BUSY, variant->name, "in use");
    if (variant->state != BD_VARIANT_READY) return BD_OK;
    variant->state = BD_VARIANT_ABSENT;
    cache->pages_used--;
    return BD_OK;
}

void bd_cache_info(const bd_cache *cache, const bd_variant *variant, uint64_t now_us,
                   bd_variant_info *out) {
    fake_cache_check(cache);
    const bool failed = variant->state == BD_VARIANT_FAILED;
    *out = (bd_variant_info){.name = variant->name,
                             .state = variant->state,
                             .file_bytes = FAKE_FILE_BYTES,
                             .references = (uint32_t)variant->leases,
                             .pinned = variant->pinned,
                             .rate_per_s = variant->rate,
                             .retry_at_us = failed ? now_us + FAKE_RETRY_US : 0,
                             .failure = variant->failure.status ? &variant->failure : NULL};
}

uint32_t bd_cache_pages_free(const bd_cache *cache) {
    return cache->pages - cache->pages_used;
}

static inline void fake_cache_deinit(bd_cache *cache) {
    for (uint32_t i = 0; i < cache->count; i++)
        bd_delta_close(&cache->deltas[i]);
}

#endif
