/* cache_fake.h - a cache over a loader that the test plays: loads finish when and how the test
 * says. */
#ifndef BITDELTA_TESTS_CACHE_FAKE_H
#define BITDELTA_TESTS_CACHE_FAKE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/cache_internal.h"

#define CACHE_FAKE_LOADS_MAX  64
#define CACHE_FAKE_PAGE_BYTES 4096u

typedef struct cache_fake {               /* the source's ctx */
    bd_load *loads[CACHE_FAKE_LOADS_MAX]; /* submitted, not finished; oldest first */
    uint32_t load_count, submitted;
    bd_status submit_status;
    uint32_t unused_pages; /* each load reports this many fewer than it got */
    uint8_t arena[1];
} cache_fake;

/* Counted over all overlays and deltas, as the calls that end them carry no context. */
static uint32_t cache_fake_overlays, cache_fake_deltas;

static inline uint32_t cache_fake_pages_for(void *ctx, const bd_delta *delta) {
    (void)ctx;
    return delta->bits; /* as many pages as planes */
}

static inline bd_status cache_fake_submit(void *ctx, bd_load *load, bd_error *err) {
    cache_fake *fake = ctx;
    if (fake->submit_status != BD_OK)
        return bd_fail(err, fake->submit_status, load->delta->variant, "planted submit fault");
    BD_ASSERT(fake->load_count < CACHE_FAKE_LOADS_MAX);
    BD_ASSERT(!load->finished && !load->cancel && load->overlay == NULL);
    fake->loads[fake->load_count++] = load;
    fake->submitted++;
    return BD_OK;
}

static inline void cache_fake_overlay_destroy(bd_overlay *overlay) {
    BD_ASSERT(overlay != NULL && cache_fake_overlays > 0);
    cache_fake_overlays--;
    free(overlay);
}

static inline void cache_fake_delta_close(bd_delta *delta) {
    if (delta->bits) cache_fake_deltas--;
}

/* As the loader does for a load that may be read while it runs. */
static inline void cache_fake_publish(cache_fake *fake, uint32_t index) {
    bd_load *load = fake->loads[index];
    BD_ASSERT(load->stream && !atomic_load(&load->early));
    bd_load_early *early = calloc(1, sizeof *early);
    BD_ASSERT(early != NULL);
    early->overlay = calloc(1, sizeof *early->overlay);
    BD_ASSERT(early->overlay != NULL);
    cache_fake_overlays++;
    atomic_store(&load->early, early);
}

/* Ends the load at `index`. A cancelled one may still end well: the race is the cache's to handle.
 */
static inline void cache_fake_finish(cache_fake *fake, uint32_t index, bd_status status) {
    BD_ASSERT(index < fake->load_count);
    bd_load *load = fake->loads[index];
    memmove(&fake->loads[index], &fake->loads[index + 1],
            (fake->load_count - index - 1) * sizeof fake->loads[0]);
    fake->load_count--;
    load->status = status;
    load->pages_used = load->page_count;
    bd_load_early *early = atomic_load(&load->early);
    if (status == BD_OK) {
        load->overlay = early ? early->overlay : calloc(1, sizeof *load->overlay);
        BD_ASSERT(load->overlay != NULL);
        if (!early) cache_fake_overlays++;
        if (fake->unused_pages < load->page_count) load->pages_used -= fake->unused_pages;
    } else {
        bd_fail(&load->error, status, load->delta->variant, "planted load fault");
    }
    load->finished_us = load->started_us + 1000;
    atomic_store_explicit(&load->finished, true, memory_order_release);
}

static inline bd_cache *cache_fake_create(cache_fake *fake, uint32_t pages, uint32_t pinned_top,
                                          uint32_t parallel, bd_metrics *metrics) {
    const bd_cache_options options = {.page_count = pages,
                                      .pinned_top = pinned_top,
                                      .loads_in_parallel = parallel,
                                      .retry_after_us = 1000000,
                                      .half_life_s = 10,
                                      .metrics = metrics};
    const bd_cache_source source = {.ctx = fake,
                                    .arena = fake->arena,
                                    .page_bytes = CACHE_FAKE_PAGE_BYTES,
                                    .pages_for = cache_fake_pages_for,
                                    .submit = cache_fake_submit,
                                    .overlay_destroy = cache_fake_overlay_destroy,
                                    .delta_close = cache_fake_delta_close};
    bd_cache *cache = NULL;
    bd_status status = bd_cache_create_with(&options, &source, &cache, NULL);
    BD_ASSERT(status == BD_OK);
    return cache;
}

static inline bd_status cache_fake_register(bd_cache *cache, const char *name, uint32_t pages,
                                            bool pinned, bd_variant **out, bd_error *err) {
    bd_delta delta = {.bits = pages};
    snprintf(delta.variant, sizeof delta.variant, "%s", name);
    cache_fake_deltas++;
    bd_status status = bd_cache_register(cache, &delta, pinned, out, err);
    BD_ASSERT(delta.bits == 0); /* moved */
    return status;
}

static inline bd_variant_info cache_fake_info(const bd_cache *cache, const bd_variant *variant,
                                              uint64_t now_us) {
    bd_variant_info info;
    bd_cache_info(cache, variant, now_us, &info);
    return info;
}

#endif
