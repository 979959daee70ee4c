/* test_cache_states.c - every way from one state of a variant to another, one at a time: acquire,
 * load, failure with its waiting time, eviction, unload and forget in each state, pins, pages of
 * several planes, and waiters that leave or that call the cache from their callback. The loader is
 * played by the test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "cache_fake.h"

#define SECOND UINT64_C(1000000)

typedef struct wait_record { /* a waiter that notes what it is told */
    bd_cache_waiter waiter;
    uint32_t calls;
    bd_status status;
    bd_lease lease;
    bd_error error;
} wait_record;

static void note_ready(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                       const bd_error *err) {
    wait_record *record = (wait_record *)waiter;
    record->calls++;
    record->status = status;
    if (lease) record->lease = *lease;
    if (err) record->error = *err;
}

static wait_record wait_make(void) {
    return (wait_record){.waiter.ready = note_ready};
}

typedef struct scene {
    cache_fake fake;
    bd_cache *cache;
    bd_variant *v[8];
} scene;

static scene *scene_make(uint32_t pages, uint32_t pinned_top, uint32_t variants,
                         const uint32_t *need) {
    static scene s;
    memset(&s, 0, sizeof s);
    cache_fake_overlays = cache_fake_deltas = 0;
    s.cache = cache_fake_create(&s.fake, pages, pinned_top, 2, NULL);
    for (uint32_t i = 0; i < variants; i++) {
        char name[16];
        snprintf(name, sizeof name, "v%u", i);
        assert_int_equal(
            cache_fake_register(s.cache, name, need ? need[i] : 1, false, &s.v[i], NULL), BD_OK);
    }
    return &s;
}

static void scene_end(scene *s) {
    while (s->fake.load_count > 0)
        cache_fake_finish(&s->fake, 0, BD_CANCELLED);
    bd_cache_destroy(s->cache);
    assert_int_equal(cache_fake_overlays, 0);
    assert_int_equal(cache_fake_deltas, 0);
}

static bd_variant_state state_of(const scene *s, uint32_t i) {
    return cache_fake_info(s->cache, s->v[i], 0).state;
}

static bd_status acquire(scene *s, uint32_t i, uint64_t now, bd_lease *lease, wait_record *record) {
    return bd_cache_acquire(s->cache, s->v[i], now, lease, record ? &record->waiter : NULL, NULL);
}

/* Brings a variant in and leaves it resident without a lease. */
static void make_ready(scene *s, uint32_t i, uint64_t now) {
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[i], now, NULL), BD_AGAIN);
    while (s->fake.load_count > 0) {
        cache_fake_finish(&s->fake, 0, BD_OK);
        bd_cache_poll(s->cache, now);
    }
    assert_int_equal(state_of(s, i), BD_VARIANT_READY);
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[i], now, NULL), BD_OK);
}

static void test_acquire_and_release(void **state) {
    (void)state;
    scene *s = scene_make(2, 0, 1, NULL);
    bd_lease lease;
    wait_record record = wait_make();
    assert_int_equal(state_of(s, 0), BD_VARIANT_ABSENT);
    assert_int_equal(acquire(s, 0, 5, &lease, &record), BD_AGAIN);
    assert_null(lease.variant);
    assert_int_equal(state_of(s, 0), BD_VARIANT_LOADING);
    assert_false(bd_cache_poll(s->cache, 6));
    assert_int_equal(record.calls, 0);
    cache_fake_finish(&s->fake, 0, BD_OK);
    assert_true(bd_cache_poll(s->cache, 7));
    assert_int_equal(record.calls, 1);
    assert_int_equal(record.status, BD_OK);
    assert_non_null(record.lease.overlay);
    assert_int_equal(state_of(s, 0), BD_VARIANT_READY);
    bd_variant_info info = cache_fake_info(s->cache, s->v[0], 8);
    assert_int_equal(info.references, 1);
    assert_int_equal(info.loads, 1);
    assert_int_equal(info.load_us, 1000);
    assert_int_equal(info.page_bytes, CACHE_FAKE_PAGE_BYTES);
    assert_int_equal(acquire(s, 0, 9, &lease, NULL), BD_OK);
    assert_ptr_equal(lease.overlay, record.lease.overlay);
    bd_cache_release(s->cache, &lease, 10);
    bd_cache_release(s->cache, &lease, 10); /* an empty lease: nothing */
    assert_false(bd_cache_poll(s->cache, 10));
    bd_cache_release(s->cache, &record.lease, 11);
    assert_true(bd_cache_poll(s->cache, 11));
    info = cache_fake_info(s->cache, s->v[0], 12);
    assert_int_equal(info.references, 0);
    assert_int_equal(info.last_use_us, 11);
    scene_end(s);
}

static void test_queue_and_parallel_bound(void **state) {
    (void)state;
    scene *s = scene_make(5, 0, 5, NULL);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(bd_cache_prefetch(s->cache, s->v[i], 0, NULL), BD_AGAIN);
        assert_int_equal(state_of(s, i), i < 2 ? BD_VARIANT_LOADING : BD_VARIANT_QUEUED);
    }
    assert_int_equal(bd_cache_pages_free(s->cache), 0);
    assert_int_equal(s->fake.submitted, 2);
    cache_fake_finish(&s->fake, 1, BD_OK); /* the second first: the order of ends is free */
    bd_cache_poll(s->cache, 1);
    assert_int_equal(state_of(s, 0), BD_VARIANT_LOADING);
    assert_int_equal(state_of(s, 1), BD_VARIANT_READY);
    assert_int_equal(state_of(s, 2), BD_VARIANT_LOADING);
    assert_int_equal(state_of(s, 3), BD_VARIANT_QUEUED);
    /* Unloading one that only waits for its turn gives its page back at once. */
    assert_int_equal(bd_cache_unload(s->cache, s->v[3], NULL), BD_OK);
    assert_int_equal(state_of(s, 3), BD_VARIANT_ABSENT);
    assert_int_equal(bd_cache_pages_free(s->cache), 1);
    cache_fake_finish(&s->fake, 0, BD_OK);
    cache_fake_finish(&s->fake, 0, BD_OK);
    bd_cache_poll(s->cache, 2);
    assert_int_equal(state_of(s, 4), BD_VARIANT_LOADING);
    scene_end(s);
}

static void test_failure_backs_off(void **state) {
    (void)state;
    scene *s = scene_make(1, 0, 1, NULL);
    bd_lease lease;
    uint64_t now = 1, wait = SECOND;
    for (uint32_t round = 0; round < 9; round++) {
        wait_record first = wait_make(), second = wait_make();
        assert_int_equal(acquire(s, 0, now, &lease, &first), BD_AGAIN);
        assert_int_equal(acquire(s, 0, now, &lease, &second), BD_AGAIN);
        cache_fake_finish(&s->fake, 0, BD_E_CORRUPT);
        assert_true(bd_cache_poll(s->cache, now));
        assert_int_equal(first.status, BD_E_CORRUPT);
        assert_int_equal(second.status, BD_E_CORRUPT);
        assert_string_equal(second.error.subject, "v0");
        assert_int_equal(bd_cache_pages_free(s->cache), 1);
        bd_variant_info info = cache_fake_info(s->cache, s->v[0], now);
        assert_int_equal(info.state, BD_VARIANT_FAILED);
        assert_int_equal(info.retry_at_us, now + wait);
        assert_int_equal(info.failure->status, BD_E_CORRUPT);
        bd_error err = {0};
        bd_status status = bd_cache_acquire(s->cache, s->v[0], now + wait - 1, &lease, NULL, &err);
        assert_int_equal(status, BD_E_VARIANT);
        assert_int_equal(err.status, BD_E_CORRUPT);
        assert_int_equal(bd_cache_prefetch(s->cache, s->v[0], now, NULL), BD_E_VARIANT);
        now += wait;
        wait = wait * 2 < 60 * SECOND ? wait * 2 : 60 * SECOND;
    }
    /* A load that works ends the record. */
    make_ready(s, 0, now);
    assert_null(cache_fake_info(s->cache, s->v[0], now).failure);
    assert_int_equal(bd_cache_unload(s->cache, s->v[0], NULL), BD_OK);
    assert_int_equal(acquire(s, 0, now, &lease, NULL), BD_AGAIN);
    cache_fake_finish(&s->fake, 0, BD_E_IO);
    bd_cache_poll(s->cache, now);
    assert_int_equal(cache_fake_info(s->cache, s->v[0], now).retry_at_us, now + SECOND);
    /* The operator may clear it. */
    assert_int_equal(bd_cache_unload(s->cache, s->v[0], NULL), BD_OK);
    assert_int_equal(state_of(s, 0), BD_VARIANT_ABSENT);
    assert_int_equal(acquire(s, 0, now, &lease, NULL), BD_AGAIN);
    scene_end(s);
}

static void test_submit_fails(void **state) {
    (void)state;
    scene *s = scene_make(1, 0, 1, NULL);
    s->fake.submit_status = BD_E_SHUTDOWN;
    bd_lease lease;
    wait_record record = wait_make();
    bd_error err = {0};
    assert_int_equal(bd_cache_acquire(s->cache, s->v[0], 1, &lease, &record.waiter, &err),
                     BD_E_VARIANT);
    assert_int_equal(err.status, BD_E_SHUTDOWN);
    assert_int_equal(state_of(s, 0), BD_VARIANT_FAILED);
    bd_cache_poll(s->cache, 1);
    assert_int_equal(record.calls, 0);
    scene_end(s);
}

static void test_eviction_spares_the_used(void **state) {
    (void)state;
    scene *s = scene_make(2, 0, 4, NULL);
    bd_lease held, lease;
    make_ready(s, 0, 1);
    make_ready(s, 1, 2);
    assert_int_equal(acquire(s, 0, 3, &held, NULL), BD_OK);
    wait_record record = wait_make();
    assert_int_equal(acquire(s, 2, 4, &lease, &record), BD_AGAIN);
    assert_int_equal(state_of(s, 1), BD_VARIANT_ABSENT);
    assert_int_equal(cache_fake_info(s->cache, s->v[1], 4).evictions, 1);
    /* One is leased, one is loading: nothing can go, and nothing changes. */
    assert_int_equal(acquire(s, 3, 5, &lease, NULL), BD_BUSY);
    assert_int_equal(state_of(s, 3), BD_VARIANT_ABSENT);
    bd_cache_poll(s->cache, 5);
    cache_fake_finish(&s->fake, 0, BD_OK);
    assert_true(bd_cache_poll(s->cache, 6));
    /* Just loaded and handed to its waiter in the same pass: still nothing can go. */
    assert_int_equal(acquire(s, 3, 7, &lease, NULL), BD_BUSY);
    bd_cache_release(s->cache, &record.lease, 8);
    assert_true(bd_cache_poll(s->cache, 8));
    assert_int_equal(acquire(s, 3, 9, &lease, NULL), BD_AGAIN);
    assert_int_equal(state_of(s, 2), BD_VARIANT_ABSENT);
    assert_int_equal(state_of(s, 0), BD_VARIANT_READY);
    bd_cache_release(s->cache, &held, 10);
    scene_end(s);
}

static void test_planes_need_pages(void **state) {
    (void)state;
    static const uint32_t need[] = {1, 1, 1, 4, 2};
    scene *s = scene_make(4, 0, 5, need);
    make_ready(s, 0, 1);
    make_ready(s, 1, 1);
    make_ready(s, 2, 1);
    bd_lease held, lease;
    assert_int_equal(acquire(s, 1, 2, &held, NULL), BD_OK);
    /* Four pages cannot be had while one is leased: the others must not be evicted for nothing. */
    assert_int_equal(acquire(s, 3, 2, &lease, NULL), BD_BUSY);
    assert_int_equal(state_of(s, 0), BD_VARIANT_READY);
    assert_int_equal(state_of(s, 2), BD_VARIANT_READY);
    assert_int_equal(acquire(s, 4, 3, &lease, NULL), BD_AGAIN); /* one free, one evicted */
    assert_int_equal(bd_cache_pages_free(s->cache), 0);
    cache_fake_finish(&s->fake, 0, BD_OK);
    bd_cache_poll(s->cache, 4);
    bd_cache_release(s->cache, &held, 5);
    assert_int_equal(acquire(s, 3, 6, &lease, NULL), BD_AGAIN);
    assert_int_equal(cache_fake_info(s->cache, s->v[3], 6).page_bytes, 4 * CACHE_FAKE_PAGE_BYTES);
    /* What the plan did not need comes back. */
    s->fake.unused_pages = 1;
    cache_fake_finish(&s->fake, 0, BD_OK);
    bd_cache_poll(s->cache, 7);
    assert_int_equal(bd_cache_pages_free(s->cache), 1);
    scene_end(s);
}

static void test_unload(void **state) {
    (void)state;
    scene *s = scene_make(2, 0, 2, NULL);
    bd_lease lease, other;
    wait_record record = wait_make();
    assert_int_equal(bd_cache_unload(s->cache, s->v[0], NULL), BD_OK); /* ABSENT */
    /* LOADING: the load is stopped, its waiter told; the pages come back when the loader lets go.
     */
    assert_int_equal(acquire(s, 0, 1, &lease, &record), BD_AGAIN);
    assert_int_equal(bd_cache_unload(s->cache, s->v[0], NULL), BD_BUSY);
    assert_true(s->fake.loads[0]->cancel);
    assert_int_equal(state_of(s, 0), BD_VARIANT_DRAINING);
    assert_int_equal(acquire(s, 0, 2, &lease, NULL), BD_BUSY);
    assert_int_equal(record.calls, 0);
    assert_true(bd_cache_poll(s->cache, 2));
    assert_int_equal(record.calls, 1);
    assert_int_equal(record.status, BD_E_VARIANT);
    assert_int_equal(bd_cache_pages_free(s->cache), 1);
    cache_fake_finish(&s->fake, 0, BD_OK); /* it was done before it saw the wish */
    assert_true(bd_cache_poll(s->cache, 3));
    assert_int_equal(state_of(s, 0), BD_VARIANT_ABSENT);
    assert_int_equal(bd_cache_pages_free(s->cache), 2);
    assert_int_equal(cache_fake_overlays, 0);
    /* READY and leased twice: drains with the last one. */
    make_ready(s, 0, 4);
    assert_int_equal(acquire(s, 0, 5, &lease, NULL), BD_OK);
    assert_int_equal(acquire(s, 0, 5, &other, NULL), BD_OK);
    bd_error err;
    assert_int_equal(bd_cache_unload(s->cache, s->v[0], NULL), BD_BUSY);
    assert_int_equal(bd_cache_unload(s->cache, s->v[0], &err), BD_BUSY);
    assert_string_equal(err.message, "2 requests still use it; it goes when they end");
    bd_cache_release(s->cache, &lease, 6);
    assert_int_equal(state_of(s, 0), BD_VARIANT_DRAINING);
    assert_int_equal(bd_cache_unload(s->cache, s->v[0], &err), BD_BUSY);
    assert_string_equal(err.message, "1 request still uses it; it goes when that one ends");
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[0], 6, NULL), BD_BUSY);
    bd_cache_release(s->cache, &other, 6);
    assert_int_equal(state_of(s, 0), BD_VARIANT_ABSENT);
    assert_true(bd_cache_poll(s->cache, 6));
    /* READY and free: at once. */
    make_ready(s, 1, 7);
    assert_int_equal(bd_cache_unload(s->cache, s->v[1], NULL), BD_OK);
    assert_int_equal(bd_cache_pages_free(s->cache), 2);
    scene_end(s);
}

static void test_forget(void **state) {
    (void)state;
    scene *s = scene_make(3, 0, 4, NULL);
    bd_lease lease, again;
    wait_record loading = wait_make(), queued = wait_make();
    bd_cache_forget(s->cache, s->v[0]); /* ABSENT: gone */
    assert_int_equal(cache_fake_deltas, 3);
    make_ready(s, 1, 1);
    assert_int_equal(acquire(s, 1, 1, &lease, NULL), BD_OK);
    bd_cache_forget(s->cache, s->v[1]);
    bd_cache_forget(s->cache, s->v[1]);
    assert_int_equal(acquire(s, 1, 2, &again, NULL), BD_E_NOT_FOUND);
    assert_int_equal(bd_cache_pin(s->cache, s->v[1], true, NULL), BD_E_NOT_FOUND);
    assert_int_equal(bd_cache_unload(s->cache, s->v[1], NULL), BD_E_NOT_FOUND);
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[1], 2, NULL), BD_E_NOT_FOUND);
    assert_non_null(lease.overlay); /* still valid */
    bd_cache_release(s->cache, &lease, 3);
    assert_int_equal(cache_fake_deltas, 2);
    assert_int_equal(cache_fake_overlays, 0);
    assert_int_equal(bd_cache_pages_free(s->cache), 3);
    /* LOADING with a waiter; the entry stays until the loader is through with it. */
    assert_int_equal(acquire(s, 2, 4, &again, &loading), BD_AGAIN);
    assert_int_equal(acquire(s, 3, 4, &again, &queued), BD_AGAIN);
    bd_cache_forget(s->cache, s->v[2]);
    bd_cache_forget(s->cache, s->v[3]);
    assert_int_equal(cache_fake_deltas, 2);
    bd_cache_poll(s->cache, 5);
    assert_int_equal(loading.status, BD_E_NOT_FOUND);
    assert_int_equal(queued.status, BD_E_NOT_FOUND);
    cache_fake_finish(&s->fake, 0, BD_CANCELLED);
    cache_fake_finish(&s->fake, 0, BD_E_IO);
    bd_cache_poll(s->cache, 6);
    assert_int_equal(cache_fake_deltas, 0);
    assert_int_equal(bd_cache_pages_free(s->cache), 3);
    scene_end(s);
}

static void test_waiters_leave(void **state) {
    (void)state;
    scene *s = scene_make(3, 0, 3, NULL);
    bd_lease lease;
    wait_record a = wait_make(), b = wait_make(), c = wait_make();
    bd_cache_wait_cancel(s->cache, &a.waiter); /* waits for nothing: fine */
    assert_int_equal(acquire(s, 0, 1, &lease, &a), BD_AGAIN);
    assert_int_equal(acquire(s, 0, 1, &lease, &b), BD_AGAIN);
    assert_int_equal(acquire(s, 0, 1, &lease, &c), BD_AGAIN);
    assert_int_equal(cache_fake_info(s->cache, s->v[0], 1).waiters, 3);
    bd_cache_wait_cancel(s->cache, &b.waiter);
    bd_cache_wait_cancel(s->cache, &c.waiter);
    cache_fake_finish(&s->fake, 0, BD_OK);
    bd_cache_poll(s->cache, 2);
    assert_int_equal(a.calls + b.calls + c.calls, 1);
    assert_int_equal(cache_fake_info(s->cache, s->v[0], 1).references, 1);
    bd_cache_release(s->cache, &a.lease, 2);
    /* A running load goes on without its last waiter. */
    assert_int_equal(acquire(s, 1, 3, &lease, &a), BD_AGAIN);
    bd_cache_wait_cancel(s->cache, &a.waiter);
    assert_int_equal(state_of(s, 1), BD_VARIANT_LOADING);
    scene_end(s);
}

static void test_last_waiter_of_queued(void **state) {
    (void)state;
    scene *s = scene_make(4, 0, 4, NULL);
    bd_lease lease;
    wait_record a = wait_make(), b = wait_make();
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[0], 0, NULL), BD_AGAIN);
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[1], 0, NULL), BD_AGAIN);
    assert_int_equal(acquire(s, 2, 0, &lease, &a), BD_AGAIN);
    assert_int_equal(acquire(s, 3, 0, &lease, &b), BD_AGAIN);
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[3], 0, NULL), BD_AGAIN);
    bd_cache_wait_cancel(s->cache, &a.waiter);
    bd_cache_wait_cancel(s->cache, &b.waiter);
    assert_int_equal(state_of(s, 2), BD_VARIANT_ABSENT);
    assert_int_equal(state_of(s, 3), BD_VARIANT_QUEUED); /* the operator asked for it too */
    assert_int_equal(bd_cache_pages_free(s->cache), 1);
    scene_end(s);
}

/* Unloaded, asked for and unloaded again before anyone was told. */
static void test_unload_twice_between_polls(void **state) {
    (void)state;
    scene *s = scene_make(3, 0, 3, NULL);
    bd_lease lease;
    wait_record a = wait_make(), b = wait_make(), c = wait_make();
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[0], 0, NULL), BD_AGAIN);
    assert_int_equal(bd_cache_prefetch(s->cache, s->v[1], 0, NULL), BD_AGAIN);
    assert_int_equal(acquire(s, 2, 0, &lease, &a), BD_AGAIN);
    assert_int_equal(bd_cache_unload(s->cache, s->v[2], NULL), BD_OK);
    assert_int_equal(acquire(s, 2, 0, &lease, &b), BD_AGAIN);
    assert_int_equal(bd_cache_unload(s->cache, s->v[2], NULL), BD_OK);
    assert_int_equal(acquire(s, 2, 0, &lease, &c), BD_AGAIN);
    bd_cache_poll(s->cache, 1);
    assert_int_equal(a.calls, 1);
    assert_int_equal(b.calls, 1);
    assert_int_equal(c.calls, 0);
    assert_int_equal(b.status, BD_E_VARIANT);
    assert_int_equal(state_of(s, 2), BD_VARIANT_QUEUED);
    scene_end(s);
}

static void test_pins(void **state) {
    (void)state;
    scene *s = scene_make(4, 0, 3, NULL);
    bd_variant *big = NULL;
    bd_error err = {0};
    assert_int_equal(cache_fake_register(s->cache, "too-big", 5, false, &big, &err), BD_E_LIMIT);
    assert_string_equal(err.subject, "too-big");
    assert_int_equal(cache_fake_register(s->cache, "big", 2, false, &big, NULL), BD_OK);
    assert_int_equal(bd_cache_pin(s->cache, s->v[0], true, NULL), BD_OK);
    assert_int_equal(bd_cache_pin(s->cache, s->v[0], true, NULL), BD_OK); /* again: the same pin */
    assert_int_equal(bd_cache_pin(s->cache, s->v[1], true, NULL), BD_OK);
    /* Two pages must stay for the largest. */
    assert_int_equal(bd_cache_pin(s->cache, s->v[2], true, &err), BD_E_LIMIT);
    bd_variant *none = NULL;
    assert_int_equal(cache_fake_register(s->cache, "pin", 1, true, &none, NULL), BD_E_LIMIT);
    assert_int_equal(cache_fake_register(s->cache, "three", 3, false, &none, NULL), BD_E_LIMIT);
    assert_int_equal(bd_cache_pin(s->cache, s->v[1], false, NULL), BD_OK);
    assert_int_equal(bd_cache_pin(s->cache, s->v[2], true, NULL), BD_OK);
    /* A pinned resident is no victim, however little it is asked for. */
    make_ready(s, 0, 1);
    make_ready(s, 1, 2);
    make_ready(s, 2, 2);
    for (uint32_t i = 0; i < 9; i++)
        bd_cache_touch(s->cache, s->v[1], 3);
    bd_lease lease;
    assert_int_equal(bd_cache_acquire(s->cache, big, 4, &lease, NULL, NULL), BD_AGAIN);
    assert_int_equal(state_of(s, 0), BD_VARIANT_READY);
    assert_int_equal(state_of(s, 1), BD_VARIANT_ABSENT);
    assert_int_equal(state_of(s, 2), BD_VARIANT_READY);
    bd_cache_forget(s->cache, s->v[2]);
    assert_int_equal(bd_cache_pin(s->cache, s->v[1], true, NULL), BD_OK);
    scene_end(s);
}

static void test_protected_by_rate(void **state) {
    (void)state;
    scene *s = scene_make(3, 2, 4, NULL);
    for (uint32_t i = 0; i < 3; i++)
        make_ready(s, i, 1);
    for (uint32_t i = 0; i < 20; i++) {
        bd_cache_touch(s->cache, s->v[0], i * SECOND);
        bd_cache_touch(s->cache, s->v[1], i * SECOND);
    }
    bd_lease lease, other;
    assert_int_equal(acquire(s, 2, 20 * SECOND, &lease, NULL), BD_OK);
    /* The two popular ones are kept even though only the third is in use. */
    assert_int_equal(acquire(s, 3, 20 * SECOND, &other, NULL), BD_BUSY);
    assert_true(cache_fake_info(s->cache, s->v[0], 20 * SECOND).protected_by_rate);
    assert_true(cache_fake_info(s->cache, s->v[1], 20 * SECOND).protected_by_rate);
    double rate = cache_fake_info(s->cache, s->v[0], 20 * SECOND).rate_per_s;
    assert_true(rate > 0.6 && rate < 1.0); /* one a second for two half-lives: 1 - 1/4 and a bit */
    bd_cache_release(s->cache, &lease, 21 * SECOND);
    assert_int_equal(acquire(s, 3, 21 * SECOND, &other, NULL), BD_AGAIN);
    assert_int_equal(state_of(s, 2), BD_VARIANT_ABSENT);
    scene_end(s);
}

/* What was replaced keeps its memory neither by its old popularity nor by its pin. */
static void test_retired_are_not_protected(void **state) {
    (void)state;
    scene *s = scene_make(2, 2, 4, NULL);
    for (uint32_t i = 0; i < 2; i++)
        make_ready(s, i, 1);
    for (uint32_t i = 0; i < 20; i++)
        bd_cache_touch(s->cache, s->v[0], i * SECOND);
    assert_int_equal(bd_cache_pin(s->cache, s->v[0], true, NULL), BD_OK);
    bd_lease lease, other;
    assert_int_equal(acquire(s, 1, 20 * SECOND, &lease, NULL), BD_OK);
    assert_int_equal(acquire(s, 2, 20 * SECOND, &other, NULL), BD_BUSY);
    assert_int_equal(bd_cache_pin(s->cache, s->v[0], false, NULL), BD_OK);
    assert_int_equal(acquire(s, 2, 20 * SECOND, &other, NULL), BD_BUSY); /* by its rate */
    assert_int_equal(bd_cache_pin(s->cache, s->v[0], true, NULL), BD_OK);
    bd_cache_retire(s->cache, s->v[0]);
    bd_variant_info info = cache_fake_info(s->cache, s->v[0], 20 * SECOND);
    assert_false(info.pinned || info.protected_by_rate);
    assert_true(bd_cache_poll(s->cache, 20 * SECOND)); /* so that those who were told BD_BUSY ask */
    assert_int_equal(acquire(s, 2, 20 * SECOND, &other, NULL), BD_AGAIN);
    assert_int_equal(state_of(s, 0), BD_VARIANT_ABSENT);
    bd_cache_release(s->cache, &lease, 21 * SECOND);
    scene_end(s);
}

/* ---- callbacks that call back ---- */

typedef struct busy_waiter {
    bd_cache_waiter waiter;
    scene *s;
    uint32_t what, calls;
    bd_cache_waiter *others;
    bd_lease lease;
} busy_waiter;

static void busy_ready(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                       const bd_error *err) {
    busy_waiter *busy = (busy_waiter *)waiter;
    scene *s = busy->s;
    (void)err;
    busy->calls++;
    if (lease) busy->lease = *lease;
    switch (busy->what) {
    case 0: /* forget the variant just delivered, give it back */
        bd_cache_forget(s->cache, s->v[0]);
        bd_cache_release(s->cache, &busy->lease, 1);
        break;
    case 1: /* take the others' turn away */
        bd_cache_wait_cancel(s->cache, busy->others);
        bd_cache_wait_cancel(s->cache, busy->others);
        bd_cache_release(s->cache, &busy->lease, 1);
        break;
    case 2: /* ask for what just failed: not before its time */
        assert_int_equal(status, BD_E_IO);
        assert_int_equal(bd_cache_acquire(s->cache, s->v[0], 1, &busy->lease, waiter, NULL),
                         BD_E_VARIANT);
        break;
    default: /* ask again when the time is over: a second load, and no endless loop */
        if (busy->calls == 1)
            assert_int_equal(
                bd_cache_acquire(s->cache, s->v[0], 9 * SECOND, &busy->lease, waiter, NULL),
                BD_AGAIN);
        break;
    }
}

static void test_callbacks_call_back(void **state) {
    (void)state;
    for (uint32_t what = 0; what < 4; what++) {
        scene *s = scene_make(1, 0, 1, NULL);
        busy_waiter first = {.waiter.ready = busy_ready, .s = s, .what = what};
        wait_record second = wait_make();
        first.others = &second.waiter;
        bd_lease lease;
        bd_status status = bd_cache_acquire(s->cache, s->v[0], 0, &lease, &first.waiter, NULL);
        assert_int_equal(status, BD_AGAIN);
        assert_int_equal(acquire(s, 0, 0, &lease, &second), BD_AGAIN);
        cache_fake_finish(&s->fake, 0, what < 2 ? BD_OK : BD_E_IO);
        bd_cache_poll(s->cache, 1);
        assert_int_equal(first.calls, 1);
        assert_int_equal(second.calls, what == 1 ? 0 : 1);
        if (what == 0) { /* the second still got its lease, and is the last to hold it */
            assert_int_equal(second.status, BD_OK);
            assert_int_equal(cache_fake_overlays, 1);
            bd_cache_release(s->cache, &second.lease, 2);
            assert_int_equal(cache_fake_deltas, 0);
        }
        if (what == 1) assert_int_equal(cache_fake_info(s->cache, s->v[0], 1).references, 0);
        if (what == 3) {
            assert_int_equal(s->fake.submitted, 2);
            cache_fake_finish(&s->fake, 0, BD_E_IO);
            bd_cache_poll(s->cache, 9 * SECOND);
            assert_int_equal(first.calls, 2);
        }
        assert_int_equal(bd_cache_pages_free(s->cache), what == 1 ? 0 : 1);
        scene_end(s);
    }
}

static void test_metrics(void **state) {
    (void)state;
    bd_metrics *metrics = bd_metrics_create(64);
    cache_fake fake = {0};
    bd_cache *cache = cache_fake_create(&fake, 1, 0, 1, metrics);
    bd_variant *a = NULL, *b = NULL;
    assert_int_equal(cache_fake_register(cache, "a", 1, false, &a, NULL), BD_OK);
    assert_int_equal(cache_fake_register(cache, "b", 1, false, &b, NULL), BD_OK);
    assert_int_equal(bd_cache_prefetch(cache, a, 0, NULL), BD_AGAIN);
    cache_fake_finish(&fake, 0, BD_OK);
    bd_cache_poll(cache, 1);
    assert_int_equal(bd_cache_prefetch(cache, b, 2, NULL), BD_AGAIN);
    cache_fake_finish(&fake, 0, BD_E_IO);
    bd_cache_poll(cache, 3);
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_metrics_write(metrics, &text);
    static const char *const lines[] = {
        "bitdelta_delta_loads_total{result=\"ok\",variant=\"a\"} 1\n",
        "bitdelta_delta_loads_total{result=\"failed\",variant=\"b\"} 1\n",
        "bitdelta_delta_evictions_total 1\n",
        "bitdelta_delta_resident 0\n",
        "bitdelta_delta_pages_free 1\n",
        "bitdelta_delta_pages_total 1\n"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        if (!strstr(text.data, lines[i])) fail_msg("%s is missing in\n%s", lines[i], text.data);
    bd_strbuf_deinit(&text);
    bd_cache_destroy(cache);
    bd_metrics_destroy(metrics);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_acquire_and_release),
        cmocka_unit_test(test_queue_and_parallel_bound),
        cmocka_unit_test(test_failure_backs_off),
        cmocka_unit_test(test_submit_fails),
        cmocka_unit_test(test_eviction_spares_the_used),
        cmocka_unit_test(test_planes_need_pages),
        cmocka_unit_test(test_unload),
        cmocka_unit_test(test_forget),
        cmocka_unit_test(test_waiters_leave),
        cmocka_unit_test(test_last_waiter_of_queued),
        cmocka_unit_test(test_unload_twice_between_polls),
        cmocka_unit_test(test_pins),
        cmocka_unit_test(test_protected_by_rate),
        cmocka_unit_test(test_retired_are_not_protected),
        cmocka_unit_test(test_callbacks_call_back),
        cmocka_unit_test(test_metrics),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
