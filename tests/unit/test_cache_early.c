/* test_cache_early.c - leases of variants that still load: when they are given, what they hold back
 * (eviction, the pages of a failed load, an unload), and that everything is back at the end. The
 * loader is the test's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "cache_fake.h"

typedef struct record { /* a waiter that notes what it is told */
    bd_cache_waiter waiter;
    uint32_t calls;
    bd_status status;
    bd_lease lease;
} record;

typedef struct scene {
    cache_fake fake;
    bd_cache *cache;
    bd_variant *v[3];
    bool may;
    record r;
} scene;

static void note(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                 const bd_error *err) {
    record *r = (record *)waiter;
    (void)err;
    r->calls++;
    r->status = status;
    if (lease) r->lease = *lease;
}

static bool may_start(void *ctx, const bd_load *load, uint64_t now_us) {
    const scene *s = ctx;
    assert_non_null(atomic_load(&load->early));
    (void)now_us;
    return s->may;
}

static void begin(scene *s, uint32_t pages) {
    static const char *const names[] = {"a", "b", "c"};
    memset(s, 0, sizeof *s);
    cache_fake_overlays = cache_fake_deltas = 0;
    s->cache = cache_fake_create(&s->fake, pages, 0, 2, NULL);
    bd_cache_stream(s->cache, may_start, s);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(cache_fake_register(s->cache, names[i], 1, false, &s->v[i], NULL), BD_OK);
    s->may = true;
    s->r.waiter.ready = note;
}

static void end(scene *s) {
    while (s->fake.load_count > 0)
        cache_fake_finish(&s->fake, 0, BD_CANCELLED);
    bd_cache_destroy(s->cache);
    assert_int_equal(cache_fake_overlays, 0);
    assert_int_equal(cache_fake_deltas, 0);
}

static bd_status acquire(scene *s, uint32_t i, uint64_t now, bd_lease *lease, record *r) {
    return bd_cache_acquire(s->cache, s->v[i], now, lease, r ? &r->waiter : NULL, NULL);
}

static bd_variant_info info(const scene *s, uint32_t i) {
    return cache_fake_info(s->cache, s->v[i], 0);
}

/* Variant 0 loads, s->r has an early lease of it. */
static void lease_early(scene *s) {
    bd_lease lease;
    assert_int_equal(acquire(s, 0, 1, &lease, &s->r), BD_AGAIN);
    cache_fake_publish(&s->fake, 0);
    bd_cache_poll(s->cache, 2);
    assert_int_equal(s->r.calls, 1);
    assert_int_equal(s->r.status, BD_OK);
    assert_non_null(s->r.lease.load);
    assert_non_null(s->r.lease.overlay);
    assert_int_equal(info(s, 0).state, BD_VARIANT_LOADING);
    assert_int_equal(info(s, 0).references, 1);
}

static void test_given_when_allowed(void **state) {
    (void)state;
    scene s;
    bd_lease second, third;
    begin(&s, 2);
    s.may = false;
    assert_int_equal(acquire(&s, 0, 1, &second, &s.r), BD_AGAIN);
    bd_cache_poll(s.cache, 2); /* nothing is published yet: nobody is asked */
    cache_fake_publish(&s.fake, 0);
    bd_cache_poll(s.cache, 3);
    assert_int_equal(s.r.calls, 0);
    s.may = true;
    assert_int_equal(acquire(&s, 0, 4, &second, NULL), BD_OK);
    assert_non_null(second.load);
    bd_cache_poll(s.cache, 5);
    assert_int_equal(s.r.calls, 1);
    assert_int_equal(info(&s, 0).references, 2);
    const bd_overlay *overlay = second.overlay;
    cache_fake_finish(&s.fake, 0, BD_OK);
    bd_cache_poll(s.cache, 6);
    assert_int_equal(info(&s, 0).state, BD_VARIANT_READY);
    assert_int_equal(info(&s, 0).references, 2);
    assert_int_equal(acquire(&s, 0, 7, &third, NULL), BD_OK);
    assert_null(third.load);
    assert_ptr_equal(third.overlay, overlay);
    bd_cache_release(s.cache, &third, 8);
    bd_cache_release(s.cache, &second, 8);
    bd_cache_release(s.cache, &s.r.lease, 8);
    assert_int_equal(info(&s, 0).references, 0);
    end(&s);
}

static void test_failed_load_keeps_its_pages(void **state) {
    (void)state;
    scene s;
    bd_lease lease;
    begin(&s, 2);
    lease_early(&s);
    cache_fake_finish(&s.fake, 0, BD_E_IO);
    bd_cache_poll(s.cache, 3);
    assert_int_equal(info(&s, 0).state, BD_VARIANT_FAILED);
    assert_int_equal(info(&s, 0).page_bytes, CACHE_FAKE_PAGE_BYTES);
    assert_int_equal(cache_fake_overlays, 1);
    assert_int_equal(bd_cache_pages_free(s.cache), 1);
    const uint64_t later = info(&s, 0).retry_at_us + 1;
    assert_int_equal(acquire(&s, 0, 4, &lease, NULL), BD_E_VARIANT);
    assert_int_equal(acquire(&s, 0, later, &lease, NULL), BD_BUSY);
    bd_cache_release(s.cache, &s.r.lease, 5);
    assert_int_equal(info(&s, 0).page_bytes, 0);
    assert_int_equal(cache_fake_overlays, 0);
    assert_int_equal(bd_cache_pages_free(s.cache), 2);
    assert_int_equal(acquire(&s, 0, later, &lease, NULL), BD_AGAIN);
    end(&s);
}

/* An unload of what failed waits for the same references. */
static void test_unload_after_failure(void **state) {
    (void)state;
    scene s;
    bd_lease lease;
    begin(&s, 2);
    lease_early(&s);
    cache_fake_finish(&s.fake, 0, BD_E_CORRUPT);
    bd_cache_poll(s.cache, 3);
    assert_int_equal(bd_cache_unload(s.cache, s.v[0], NULL), BD_BUSY);
    assert_int_equal(info(&s, 0).state, BD_VARIANT_DRAINING);
    bd_cache_release(s.cache, &s.r.lease, 5);
    assert_int_equal(info(&s, 0).state, BD_VARIANT_ABSENT);
    assert_int_equal(acquire(&s, 0, 6, &lease, NULL), BD_AGAIN); /* at once */
    end(&s);
}

static void test_unload(void **state) {
    (void)state;
    for (uint32_t left = 0; left < 2;
         left++) { /* whether the last lease comes back before the end */
        for (uint32_t fails = 0; fails < 2; fails++) {
            scene s;
            bd_lease lease;
            begin(&s, 2);
            lease_early(&s);
            const bd_load *load = s.fake.loads[0];
            assert_int_equal(bd_cache_unload(s.cache, s.v[0], NULL), BD_BUSY);
            assert_int_equal(info(&s, 0).state, BD_VARIANT_DRAINING);
            assert_false(atomic_load(&load->cancel)); /* it goes on for those who began */
            assert_int_equal(acquire(&s, 0, 3, &lease, NULL), BD_BUSY);
            if (left) {
                bd_cache_release(s.cache, &s.r.lease, 4);
                assert_true(atomic_load(&load->cancel));
            }
            cache_fake_finish(&s.fake, 0, fails ? BD_E_IO : BD_OK);
            bd_cache_poll(s.cache, 5);
            if (!left) {
                assert_int_equal(info(&s, 0).state, BD_VARIANT_DRAINING);
                bd_cache_release(s.cache, &s.r.lease, 6);
            }
            assert_int_equal(info(&s, 0).state, BD_VARIANT_ABSENT);
            assert_int_equal(bd_cache_pages_free(s.cache), 2);
            assert_int_equal(cache_fake_overlays, 0);
            end(&s);
        }
    }
}

static void test_forget(void **state) {
    (void)state;
    scene s;
    begin(&s, 2);
    lease_early(&s);
    bd_cache_forget(s.cache, s.v[0]);
    assert_int_equal(s.cache->variant_count, 3);
    cache_fake_finish(&s.fake, 0, BD_OK);
    bd_cache_poll(s.cache, 3);
    assert_int_equal(s.cache->variant_count, 3);
    bd_cache_release(s.cache, &s.r.lease, 4);
    assert_int_equal(s.cache->variant_count, 2);
    assert_int_equal(bd_cache_pages_free(s.cache), 2);
    end(&s);
}

/* One page: the next variant gets it neither while the load runs nor while its lease is out. */
static void test_no_eviction(void **state) {
    (void)state;
    scene s;
    bd_lease lease;
    begin(&s, 1);
    lease_early(&s);
    assert_int_equal(acquire(&s, 1, 3, &lease, NULL), BD_BUSY);
    cache_fake_finish(&s.fake, 0, BD_OK);
    bd_cache_poll(s.cache, 4);
    assert_int_equal(acquire(&s, 1, 5, &lease, NULL), BD_BUSY);
    bd_cache_release(s.cache, &s.r.lease, 6);
    assert_int_equal(acquire(&s, 1, 7, &lease, NULL), BD_AGAIN);
    assert_int_equal(info(&s, 0).state, BD_VARIANT_ABSENT);
    end(&s);
}

/* Everybody has left: the load is worth finishing, and the variant an ordinary resident. */
static void test_all_leave(void **state) {
    (void)state;
    scene s;
    bd_lease lease;
    begin(&s, 1);
    lease_early(&s);
    bd_cache_release(s.cache, &s.r.lease, 3);
    assert_false(atomic_load(&s.fake.loads[0]->cancel));
    assert_int_equal(acquire(&s, 1, 4, &lease, NULL), BD_BUSY);
    assert_int_equal(acquire(&s, 0, 4, &lease, NULL), BD_OK);
    bd_cache_release(s.cache, &lease, 5);
    cache_fake_finish(&s.fake, 0, BD_OK);
    bd_cache_poll(s.cache, 6);
    assert_int_equal(info(&s, 0).state, BD_VARIANT_READY);
    assert_int_equal(acquire(&s, 1, 7, &lease, NULL), BD_AGAIN);
    end(&s);
}

/* A load that no longer moves: those who come later wait for it outside. */
static void test_asked_for_everyone(void **state) {
    (void)state;
    scene s;
    bd_lease lease;
    record late = {.waiter.ready = note};
    begin(&s, 1);
    lease_early(&s);
    s.may = false;
    assert_int_equal(acquire(&s, 0, 3, &lease, &late), BD_AGAIN);
    bd_cache_poll(s.cache, 4);
    assert_int_equal(late.calls, 0);
    assert_int_equal(info(&s, 0).references, 1);
    cache_fake_finish(&s.fake, 0, BD_OK);
    bd_cache_poll(s.cache, 5);
    assert_int_equal(late.calls, 1);
    assert_int_equal(late.status, BD_OK);
    assert_null(late.lease.load);
    bd_cache_release(s.cache, &late.lease, 6);
    bd_cache_release(s.cache, &s.r.lease, 6);
    end(&s);
}

typedef struct meddler { /* a waiter that unloads the variant and asks again, when called */
    record r;
    scene *scene;
    bd_status unload, again;
    bd_lease lease;
} meddler;

static void meddle(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                   const bd_error *err) {
    meddler *m = (meddler *)(void *)waiter;
    scene *s = m->scene;
    note(waiter, status, lease, err);
    s->may = false;
    m->again = acquire(s, 0, 3, &m->lease, &s->r);
    m->unload = bd_cache_unload(s->cache, s->v[0], NULL);
}

/* Several early leases at once, and the first of them has the variant unloaded: the others' are
 * still of a load under way. */
static void test_unload_among_early_leases(void **state) {
    (void)state;
    scene s;
    bd_lease lease;
    begin(&s, 1);
    meddler m = {.r.waiter.ready = meddle, .scene = &s};
    record second = {.waiter.ready = note};
    assert_int_equal(acquire(&s, 0, 1, &lease, &m.r), BD_AGAIN);
    assert_int_equal(acquire(&s, 0, 1, &lease, &second), BD_AGAIN);
    cache_fake_publish(&s.fake, 0);
    bd_cache_poll(s.cache, 2);
    assert_int_equal(m.unload, BD_BUSY);
    assert_int_equal(m.again, BD_OK);
    assert_int_equal(second.calls, 1);
    assert_int_equal(second.status, BD_OK);
    assert_non_null(m.r.lease.load);
    assert_non_null(m.lease.load);
    assert_non_null(second.lease.load);
    assert_int_equal(info(&s, 0).references, 3);
    assert_int_equal(info(&s, 0).state, BD_VARIANT_DRAINING);
    assert_false(atomic_load(&s.fake.loads[0]->cancel));
    cache_fake_finish(&s.fake, 0, BD_E_IO);
    bd_cache_poll(s.cache, 3);
    assert_int_equal(cache_fake_overlays, 1);
    bd_cache_release(s.cache, &m.lease, 4);
    bd_cache_release(s.cache, &m.r.lease, 4);
    assert_int_equal(cache_fake_overlays, 1);
    bd_cache_release(s.cache, &second.lease, 4);
    assert_int_equal(cache_fake_overlays, 0);
    assert_int_equal(bd_cache_pages_free(s.cache), 1);
    end(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_given_when_allowed),
        cmocka_unit_test(test_failed_load_keeps_its_pages),
        cmocka_unit_test(test_unload_after_failure),
        cmocka_unit_test(test_unload),
        cmocka_unit_test(test_forget),
        cmocka_unit_test(test_no_eviction),
        cmocka_unit_test(test_all_leave),
        cmocka_unit_test(test_asked_for_everyone),
        cmocka_unit_test(test_unload_among_early_leases),
    };
    return cmocka_run_group_tests_name("cache_early", tests, NULL, NULL);
}
