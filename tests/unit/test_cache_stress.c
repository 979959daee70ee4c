/* test_cache_stress.c - random operations against a model of the state machine written down here a
 * second time, in the plainest way: who is in which state, how many leases and waiters, how many
 * pages. The model does not know the policy: which victim went is read back, and judged by the
 * rules (idle, not pinned, not protected, no more than needed). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "cache_fake.h"
#include "loader_fake.h" /* fake_random, fake_seed */

enum { VARIANTS = 9, LEASES = 12, WAITERS = 40, PARALLEL = 2, PAGES = 10 };

typedef struct model_variant {
    bd_variant *real; /* NULL: not registered */
    bd_variant_state state;
    uint32_t need, pages, references, waiters;
    bool pinned, wanted_by_operator, forgotten, load_active;
    uint32_t failures;
    uint64_t retry_at;
} model_variant;

typedef struct waiter_slot {
    bd_cache_waiter waiter;
    uint32_t variant;
    bool waiting, told_next; /* told_next: the next poll must call it */
    bd_status expect;
} waiter_slot;

typedef struct world {
    cache_fake fake;
    bd_cache *cache;
    model_variant v[VARIANTS];
    uint32_t order[VARIANTS], order_count; /* QUEUED ones, in order */
    bd_lease leases[LEASES];
    uint32_t lease_variant[LEASES];
    waiter_slot waiters[WAITERS];
    uint64_t now;
    uint32_t calls, expected_calls;
    bool operating; /* inside a callback: operations are allowed */
    uint32_t loads_ok, loads_failed, busy, evictions;
} world;

static world w;

static uint32_t pages_held(void) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < VARIANTS; i++)
        sum += w.v[i].pages;
    return sum;
}

static uint32_t active_count(void) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < VARIANTS; i++)
        sum += w.v[i].load_active;
    return sum;
}

static void queue_drop(uint32_t index) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < w.order_count; i++)
        if (w.order[i] != index) w.order[kept++] = w.order[i];
    w.order_count = kept;
}

static void model_absent(uint32_t index) {
    model_variant *v = &w.v[index];
    v->state = BD_VARIANT_ABSENT;
    v->pages = 0;
    v->wanted_by_operator = false;
    if (v->forgotten) v->real = NULL;
}

static void model_start_loads(void) {
    while (w.order_count > 0 && active_count() < PARALLEL) {
        model_variant *v = &w.v[w.order[0]];
        queue_drop(w.order[0]);
        v->state = BD_VARIANT_LOADING;
        v->load_active = true;
    }
}

static void check_all(void) {
    uint32_t held = 0;
    for (uint32_t i = 0; i < VARIANTS; i++) {
        const model_variant *v = &w.v[i];
        if (!v->real) continue;
        bd_variant_info info = cache_fake_info(w.cache, v->real, w.now);
        if (info.state != v->state || info.references != v->references ||
            info.waiters != v->waiters || info.page_bytes != v->pages * CACHE_FAKE_PAGE_BYTES ||
            info.pinned != v->pinned)
            fail_msg("variant %u: state %d/%d references %u/%u waiters %u/%u pages %u/%u", i,
                     (int)info.state, (int)v->state, info.references, v->references, info.waiters,
                     v->waiters, (uint32_t)(info.page_bytes / CACHE_FAKE_PAGE_BYTES), v->pages);
        if (v->state == BD_VARIANT_FAILED) assert_int_equal(info.retry_at_us, v->retry_at);
        held += v->pages;
    }
    assert_int_equal(held + bd_cache_pages_free(w.cache), PAGES);
    assert_int_equal(w.fake.load_count, active_count());
    assert_in_range(w.fake.load_count, 0, PARALLEL);
}

static bool real_ready(uint32_t index) {
    return cache_fake_info(w.cache, w.v[index].real, w.now).state == BD_VARIANT_READY;
}

static bool idle(uint32_t index) {
    const model_variant *v = &w.v[index];
    return v->real && v->state == BD_VARIANT_READY && v->references == 0 && !v->pinned;
}

/* Takes over which idle residents went for `need` pages, and checks that they had to. */
static void adopt_victims(uint32_t need) {
    uint32_t free_before = PAGES - pages_held(), freed = 0, smallest = UINT32_MAX;
    for (uint32_t i = 0; i < VARIANTS; i++) {
        if (!idle(i) || real_ready(i)) continue;
        freed += w.v[i].pages;
        if (w.v[i].pages < smallest) smallest = w.v[i].pages;
        model_absent(i);
        w.evictions++;
    }
    assert_true(free_before + freed >= need);
    if (freed > 0) assert_true(free_before + freed - smallest < need);
}

/* BD_BUSY is right only if everything that may go would not do. */
static void check_busy(uint32_t need) {
    uint32_t could = PAGES - pages_held();
    for (uint32_t i = 0; i < VARIANTS; i++) {
        if (!idle(i)) continue;
        assert_true(real_ready(i));
        if (!cache_fake_info(w.cache, w.v[i].real, w.now).protected_by_rate) could += w.v[i].pages;
    }
    assert_true(could < need);
    w.busy++;
}

/* What acquire and prefetch share. Returns the status both must have given, BD_AGAIN for a load to
 * come. */
static bd_status model_want(uint32_t index, bd_status got) {
    model_variant *v = &w.v[index];
    if (v->forgotten) return BD_E_NOT_FOUND;
    switch (v->state) {
    case BD_VARIANT_READY:
        return BD_OK;
    case BD_VARIANT_QUEUED:
    case BD_VARIANT_LOADING:
        return BD_AGAIN;
    case BD_VARIANT_DRAINING:
        return BD_BUSY;
    case BD_VARIANT_FAILED:
        if (w.now < v->retry_at) return BD_E_VARIANT;
        break;
    case BD_VARIANT_ABSENT:
        break;
    }
    if (got == BD_BUSY) {
        check_busy(v->need);
        return BD_BUSY;
    }
    adopt_victims(v->need);
    v->pages = v->need;
    v->state = BD_VARIANT_QUEUED;
    w.order[w.order_count++] = index;
    model_start_loads();
    return BD_AGAIN;
}

static void told(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                 const bd_error *err);

static void do_acquire(uint32_t index) {
    model_variant *v = &w.v[index];
    uint32_t slot = 0, hold = 0;
    while (slot < WAITERS && w.waiters[slot].waiting)
        slot++;
    while (hold < LEASES && w.leases[hold].variant)
        hold++;
    if (!v->real || slot == WAITERS || hold == LEASES) return;
    w.waiters[slot].waiter.ready = told;
    if (!v->forgotten && fake_below(3) > 0) bd_cache_touch(w.cache, v->real, w.now);
    bd_lease lease;
    bd_status got =
        bd_cache_acquire(w.cache, v->real, w.now, &lease, &w.waiters[slot].waiter, NULL);
    bd_status want = model_want(index, got);
    if (got != want)
        fail_msg("acquire of %u: %s, not %s", index, bd_status_name(got), bd_status_name(want));
    if (got == BD_OK) {
        v->references++;
        w.leases[hold] = lease;
        w.lease_variant[hold] = index;
    }
    if (got == BD_AGAIN) {
        v->waiters++;
        w.waiters[slot].variant = index;
        w.waiters[slot].waiting = true;
        w.waiters[slot].told_next = false;
    }
}

static void do_prefetch(uint32_t index) {
    model_variant *v = &w.v[index];
    if (!v->real) return;
    bd_status got = bd_cache_prefetch(w.cache, v->real, w.now, NULL);
    bd_status want = model_want(index, got);
    assert_int_equal(got, want);
    if (v->state == BD_VARIANT_QUEUED) v->wanted_by_operator = true;
}

static void model_drop_reference(uint32_t index) {
    model_variant *v = &w.v[index];
    assert_true(v->references > 0);
    if (--v->references == 0 && v->state == BD_VARIANT_DRAINING) model_absent(index);
}

/* Of the lease at `hold`, or the next one that is held. */
static void do_release(uint32_t hold) {
    for (uint32_t i = 0; i < LEASES && !w.leases[hold].variant; i++)
        hold = (hold + 1) % LEASES;
    if (!w.leases[hold].variant) return;
    bd_cache_release(w.cache, &w.leases[hold], w.now);
    assert_null(w.leases[hold].variant);
    model_drop_reference(w.lease_variant[hold]);
}

static void do_wait_cancel(uint32_t slot) {
    waiter_slot *s = &w.waiters[slot];
    if (!s->waiting) return;
    model_variant *v = &w.v[s->variant];
    bd_cache_wait_cancel(w.cache, &s->waiter);
    s->waiting = false;
    if (s->told_next) { /* its result was known already */
        w.expected_calls--;
        if (s->expect == BD_OK) model_drop_reference(s->variant);
        return;
    }
    v->waiters--;
    if (v->state == BD_VARIANT_QUEUED && v->waiters == 0 && !v->wanted_by_operator) {
        queue_drop(s->variant);
        model_absent(s->variant);
    }
}

/* All waiters of a variant get `status` in the next poll (or in the one under way). */
static void expect_told(uint32_t index, bd_status status) {
    for (uint32_t i = 0; i < WAITERS; i++) {
        waiter_slot *s = &w.waiters[i];
        if (!s->waiting || s->told_next || s->variant != index) continue;
        s->told_next = true;
        s->expect = status;
        w.expected_calls++;
        w.v[index].waiters--;
    }
}

static void model_drain(uint32_t index, bd_status status) {
    model_variant *v = &w.v[index];
    expect_told(index, status);
    v->wanted_by_operator = false;
    if (v->state == BD_VARIANT_QUEUED) queue_drop(index);
    bool stays = v->load_active || v->references > 0;
    if (stays)
        v->state = BD_VARIANT_DRAINING;
    else
        model_absent(index);
}

static void do_unload(uint32_t index) {
    model_variant *v = &w.v[index];
    if (!v->real) return;
    bd_status got = bd_cache_unload(w.cache, v->real, NULL);
    if (v->forgotten) {
        assert_int_equal(got, BD_E_NOT_FOUND);
        return;
    }
    v->failures = 0;
    model_drain(index, BD_E_VARIANT);
    assert_int_equal(got, v->state == BD_VARIANT_ABSENT ? BD_OK : BD_BUSY);
}

/* The real entry may outlive the model's: it waits for its waiters to be told. Then no more is
 * asked of it. */
static void do_forget(uint32_t index) {
    model_variant *v = &w.v[index];
    if (!v->real || v->forgotten) return;
    bd_cache_forget(w.cache, v->real);
    v->forgotten = true;
    v->pinned = false;
    model_drain(index, BD_E_NOT_FOUND);
}

static uint32_t pinned_pages(void) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < VARIANTS; i++)
        if (w.v[i].real && w.v[i].pinned) sum += w.v[i].need;
    return sum;
}

static uint32_t largest_need(void) {
    uint32_t largest = 0;
    for (uint32_t i = 0; i < VARIANTS; i++)
        if (w.v[i].real && !w.v[i].forgotten && w.v[i].need > largest) largest = w.v[i].need;
    return largest;
}

static void do_register(uint32_t index) {
    model_variant *v = &w.v[index];
    for (uint32_t i = 0; i < WAITERS; i++) /* the old one's waiters first */
        if (w.waiters[i].waiting && w.waiters[i].variant == index) return;
    if (v->real) return;
    char name[16];
    snprintf(name, sizeof name, "v%u", index);
    *v = (model_variant){.need = 1 + (uint32_t)fake_below(4)};
    bool pinned = fake_below(5) == 0;
    uint32_t largest = largest_need() > v->need ? largest_need() : v->need;
    bool fits = v->need + pinned_pages() + (pinned ? largest : 0) <= PAGES;
    bd_status got = cache_fake_register(w.cache, name, v->need, pinned, &v->real, NULL);
    assert_int_equal(got, fits ? BD_OK : BD_E_LIMIT);
    v->pinned = fits && pinned;
}

static void do_pin(uint32_t index) {
    model_variant *v = &w.v[index];
    if (!v->real) return;
    bool pinned = fake_below(2) == 0;
    bool fits = !pinned || v->pinned || pinned_pages() + v->need + largest_need() <= PAGES;
    bd_status got = bd_cache_pin(w.cache, v->real, pinned, NULL);
    if (v->forgotten) {
        assert_int_equal(got, BD_E_NOT_FOUND);
        return;
    }
    assert_int_equal(got, fits ? BD_OK : BD_E_LIMIT);
    if (fits) v->pinned = pinned;
}

static uint32_t some(uint32_t bound) {
    return (uint32_t)fake_below(bound);
}

static void random_operation(void) {
    switch (some(16)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4:
    case 5:
        do_acquire(some(VARIANTS));
        break;
    case 6:
    case 7:
    case 8:
    case 9:
        do_release(some(LEASES));
        break;
    case 10:
    case 11:
        do_wait_cancel(some(WAITERS));
        break;
    case 12:
        do_prefetch(some(VARIANTS));
        break;
    case 13:
        if (some(4) == 0) do_unload(some(VARIANTS));
        break;
    case 14:
        do_pin(some(VARIANTS));
        break;
    default:
        if (some(12) == 0)
            do_forget(some(VARIANTS));
        else
            do_register(some(VARIANTS));
        break;
    }
}

static void told(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                 const bd_error *err) {
    waiter_slot *s = (waiter_slot *)waiter;
    w.calls++;
    assert_true(s->waiting && s->told_next);
    assert_int_equal(status, s->expect);
    s->waiting = s->told_next = false;
    if (status == BD_OK) {
        assert_non_null(lease->overlay);
        uint32_t hold = 0;
        while (hold < LEASES && w.leases[hold].variant)
            hold++;
        if (hold < LEASES) {
            w.leases[hold] = *lease;
            w.lease_variant[hold] = s->variant;
        } else {
            bd_lease copy = *lease;
            bd_cache_release(w.cache, &copy, w.now);
            model_drop_reference(s->variant);
        }
    } else {
        assert_int_equal(err->status, status);
    }
    if (!w.operating) return;
    for (uint32_t i = some(3); i > 0; i--)
        random_operation();
}

static void model_finish(const model_variant *seen, bd_status status) {
    uint32_t index = (uint32_t)(seen - w.v);
    model_variant *v = &w.v[index];
    v->load_active = false;
    if (v->state == BD_VARIANT_DRAINING) {
        model_absent(index);
        return;
    }
    v->wanted_by_operator = false;
    if (status == BD_OK) {
        v->state = BD_VARIANT_READY;
        v->failures = 0;
        v->references += v->waiters;
        w.loads_ok++;
    } else {
        uint64_t delay = UINT64_C(1000000) << (v->failures < 10 ? v->failures : 10);
        v->failures++;
        v->retry_at = w.now + (delay < 60000000 ? delay : 60000000);
        v->state = BD_VARIANT_FAILED;
        v->pages = 0;
        w.loads_failed++;
    }
    expect_told(index, status);
}

/* First what was decided before, then the loads that end now; only then may callbacks act, as the
 * model has caught up. */
static void do_poll(void) {
    w.operating = false;
    bd_cache_poll(w.cache, w.now);
    for (uint32_t i = 0; i < WAITERS; i++)
        assert_false(w.waiters[i].waiting && w.waiters[i].told_next);
    for (uint32_t i = w.fake.load_count; i-- > 0;) {
        if (some(3) > 0) continue;
        const bd_load *load = w.fake.loads[i];
        bd_status status = some(4) > 0 ? BD_OK : BD_E_CORRUPT;
        const model_variant *v = w.v;
        while (!v->real || &v->real->load != load)
            v++;
        cache_fake_finish(&w.fake, i, status);
        model_finish(v, status);
    }
    model_start_loads();
    w.operating = true;
    bd_cache_poll(w.cache, w.now);
    assert_int_equal(w.calls, w.expected_calls);
}

static void drain_everything(void) {
    for (uint32_t i = 0; i < LEASES; i++)
        do_release(i);
    for (uint32_t i = 0; i < WAITERS; i++)
        do_wait_cancel(i);
    while (w.fake.load_count > 0 || w.order_count > 0) {
        do_poll();
        for (uint32_t i = 0; i < LEASES; i++)
            do_release(i);
        for (uint32_t i = 0; i < WAITERS; i++)
            do_wait_cancel(i);
    }
    for (uint32_t i = 0; i < VARIANTS; i++) {
        if (w.v[i].real) assert_int_equal(w.v[i].references + w.v[i].waiters, 0);
        do_unload(i);
    }
    check_all();
    assert_int_equal(bd_cache_pages_free(w.cache), PAGES);
    assert_int_equal(cache_fake_overlays, 0);
}

static void test_stress(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 60; round++) {
        memset(&w, 0, sizeof w);
        cache_fake_overlays = cache_fake_deltas = 0;
        w.cache = cache_fake_create(&w.fake, PAGES, some(4), PARALLEL, NULL);
        w.now = 1;
        for (uint32_t i = 0; i < VARIANTS; i++)
            do_register(i);
        for (uint32_t step = 0; step < 3000; step++) {
            w.now += fake_below(200000);
            if (some(4) == 0)
                do_poll();
            else
                random_operation();
            check_all();
        }
        drain_everything();
        if (round == 0)
            print_message("%u loads, %u failed, %u evictions, %u busy\n", w.loads_ok,
                          w.loads_failed, w.evictions, w.busy);
        assert_true(w.loads_ok > 0 && w.loads_failed > 0 && w.evictions > 0 && w.busy > 0);
        bd_cache_destroy(w.cache);
        assert_int_equal(cache_fake_overlays, 0);
        assert_int_equal(cache_fake_deltas, 0);
    }
}

int main(void) {
    fake_seed("test_cache_stress");
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_stress)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
