/* test_cache_loader.c - the cache over the real loader and real files: a thousand requests for one
 * cold variant read it once, many variants share few pages without ever seeing each other's bytes,
 * and shutting down under load is clean. Plan, feed and overlay are fakes that copy; what is in a
 * lease's pages is compared with what was written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "cache/cache_internal.h"
#include "loader_fake.h"

enum { VARIANTS = 12, PAGES_EACH = 5, SLOTS = 4 };

typedef struct scene {
    fake_source source;
    bd_loader *loader;
    bd_cache *cache;
    uint8_t *arena;
    fake_variant files[VARIANTS];
    bd_variant *v[VARIANTS];
} scene;

static uint32_t pages_for(void *ctx, const bd_delta *delta) {
    (void)ctx;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < delta->shard_count; i++)
        bytes += delta->files[i].bytes;
    return fake_pages_for(bytes);
}

static bd_status submit(void *ctx, bd_load *load, bd_error *err) {
    return bd_loader_submit(((scene *)ctx)->loader, load, err);
}

static void delta_close(bd_delta *delta) {
    (void)delta; /* the fake variant keeps its memory */
}

static void scene_make(scene *s, bd_io_choice io, uint32_t parallel) {
    memset(s, 0, sizeof *s);
    const bd_loader_options options = {
        .io = io, .block_bytes = 8192, .depth = 4, .loads_in_parallel = parallel};
    const bd_loader_source table = fake_loader_source(&s->source);
    bd_status status = bd_loader_create_with(&options, &table, &s->loader, NULL);
    assert_int_equal(status, BD_OK);
    uint32_t pages = PAGES_EACH * SLOTS;
    s->arena = calloc(pages, FAKE_PAGE_BYTES);
    assert_non_null(s->arena);
    const bd_cache_options cache_options = {.page_count = pages,
                                            .pinned_top = 1,
                                            .loads_in_parallel = parallel,
                                            .retry_after_us = 1000};
    const bd_cache_source source = {.ctx = s,
                                    .arena = s->arena,
                                    .page_bytes = FAKE_PAGE_BYTES,
                                    .pages_for = pages_for,
                                    .submit = submit,
                                    .overlay_destroy = fake_overlay_destroy,
                                    .delta_close = delta_close};
    assert_int_equal(bd_cache_create_with(&cache_options, &source, &s->cache, NULL), BD_OK);
    for (uint32_t i = 0; i < VARIANTS; i++) {
        char name[16];
        snprintf(name, sizeof name, "v%u", i);
        uint64_t size = PAGES_EACH * FAKE_PAGE_BYTES - fake_below(3 * FAKE_PAGE_BYTES);
        fake_variant_make(&s->files[i], name, &size, 1, 8192);
        bd_delta moved = s->files[i].delta;
        assert_int_equal(bd_cache_register(s->cache, &moved, false, &s->v[i], NULL), BD_OK);
    }
}

static void scene_end(scene *s) {
    bd_cache_destroy(s->cache);
    bd_loader_destroy(s->loader);
    for (uint32_t i = 0; i < VARIANTS; i++)
        fake_variant_remove(&s->files[i]);
    free(s->arena);
}

static void check_lease(const scene *s, const bd_lease *lease) {
    uint32_t index = 0;
    while (s->v[index] != lease->variant)
        index++;
    const fake_variant *files = &s->files[index];
    const uint8_t *content = files->content[0];
    for (uint64_t at = 0; at < files->total_bytes; at += FAKE_PAGE_BYTES) {
        uint64_t left = files->total_bytes - at;
        uint64_t part = left < FAKE_PAGE_BYTES ? left : FAKE_PAGE_BYTES;
        const void *page = lease->variant->pages[at / FAKE_PAGE_BYTES];
        if (memcmp(page, content + at, part) != 0) fail_msg("variant %u: foreign bytes", index);
    }
}

typedef struct request {
    bd_cache_waiter waiter;
    bd_lease lease;
    uint32_t calls;
    bd_status status;
} request;

static void note(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                 const bd_error *err) {
    request *r = (request *)waiter;
    (void)err;
    r->calls++;
    r->status = status;
    if (lease) r->lease = *lease;
}

static void cold_thousand(bd_io_choice io, bool damaged) {
    enum { REQUESTS = 1000 };
    static scene s;
    static request requests[REQUESTS];
    scene_make(&s, io, 2);
    memset(requests, 0, sizeof requests);
    if (damaged) {
        char path[1200];
        fake_path(&s.files[0], 0, path, sizeof path);
        assert_int_equal(truncate(path, 100), 0);
    }
    for (uint32_t i = 0; i < REQUESTS; i++) {
        requests[i].waiter.ready = note;
        bd_cache_touch(s.cache, s.v[0], i);
        bd_status status =
            bd_cache_acquire(s.cache, s.v[0], 1, &requests[i].lease, &requests[i].waiter, NULL);
        assert_int_equal(status, BD_AGAIN);
    }
    while (requests[REQUESTS - 1].calls == 0) {
        bd_cache_poll(s.cache, 1);
        usleep(100);
    }
    assert_int_equal(s.source.plans, 1);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        assert_int_equal(requests[i].calls, 1);
        assert_int_equal(requests[i].status, damaged ? BD_E_LENGTH : BD_OK);
    }
    bd_variant_info info;
    bd_cache_info(s.cache, s.v[0], 1, &info);
    assert_int_equal(info.references, damaged ? 0 : REQUESTS);
    if (!damaged) check_lease(&s, &requests[0].lease);
    for (uint32_t i = 0; i < REQUESTS; i++)
        bd_cache_release(s.cache, &requests[i].lease, 2);
    bd_cache_info(s.cache, s.v[0], 1, &info);
    assert_int_equal(info.references, 0);
    scene_end(&s);
}

static void test_cold_thousand(void **state) {
    (void)state;
    cold_thousand(BD_IO_AUTO, false);
    cold_thousand(BD_IO_PREAD, false);
    cold_thousand(BD_IO_AUTO, true);
}

/* One request at a time in each of a few places, as a scheduler would hold them. */
static void churn(bd_io_choice io, uint32_t steps) {
    enum { PLACES = 6 };
    static scene s;
    request places[PLACES];
    bool waiting[PLACES] = {false};
    scene_make(&s, io, 2);
    memset(places, 0, sizeof places);
    uint32_t served = 0, busy = 0;
    while (served < steps) {
        uint32_t p = (uint32_t)fake_below(PLACES);
        request *r = &places[p];
        uint64_t now = bd_now_us();
        if (waiting[p] && r->calls > 0) {
            waiting[p] = false;
            assert_int_equal(r->status, BD_OK);
        }
        if (r->lease.variant) {
            check_lease(&s, &r->lease);
            bd_cache_release(s.cache, &r->lease, now);
            served++;
        } else if (!waiting[p]) {
            uint32_t want = (uint32_t)(fake_below(VARIANTS) * fake_below(VARIANTS) / VARIANTS);
            *r = (request){.waiter.ready = note};
            bd_cache_touch(s.cache, s.v[want], now);
            bd_status status =
                bd_cache_acquire(s.cache, s.v[want], now, &r->lease, &r->waiter, NULL);
            assert_true(status == BD_OK || status == BD_AGAIN || status == BD_BUSY);
            waiting[p] = status == BD_AGAIN;
            busy += status == BD_BUSY;
        }
        bd_cache_poll(s.cache, now);
    }
    print_message("%u served, %u loads, %u busy\n", served, s.source.plans, busy);
    /* The places that still wait leave before the end. */
    for (uint32_t p = 0; p < PLACES; p++) {
        bd_cache_wait_cancel(s.cache, &places[p].waiter);
        bd_cache_release(s.cache, &places[p].lease, 1);
    }
    scene_end(&s);
}

static void test_churn(void **state) {
    (void)state;
    churn(BD_IO_AUTO, 400);
    churn(BD_IO_PREAD, 400);
}

static void test_destroy_while_loading(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 10; round++) {
        static scene s;
        scene_make(&s, round % 2 ? BD_IO_AUTO : BD_IO_PREAD, 1 + round % 3);
        for (uint32_t i = 0; i < SLOTS; i++)
            assert_int_equal(bd_cache_prefetch(s.cache, s.v[i], 0, NULL), BD_AGAIN);
        if (round > 4) usleep((useconds_t)fake_below(2000));
        if (round > 7) bd_cache_poll(s.cache, 1);
        if (round == 3) {
            bd_status status = bd_cache_unload(s.cache, s.v[0], NULL);
            assert_true(status == BD_BUSY || status == BD_OK);
        }
        scene_end(&s);
    }
}

int main(void) {
    fake_seed("test_cache_loader");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cold_thousand),
        cmocka_unit_test(test_churn),
        cmocka_unit_test(test_destroy_while_loading),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
