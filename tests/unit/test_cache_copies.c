/* test_cache_copies.c - which copies in host memory stay and go while loads use them, with loads
 * that the test plays: a copy that a load reads or fills does not give way, one of a load that did
 * not end well is none, and the memory given is never exceeded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <time.h>

#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "cache_fake.h"

enum { BLOCK = 262144, VARIANTS = 6 };

static uint32_t plans; /* of copies; the call that ends one carries no context */

static void plan_destroy(bd_overlay_plan *plan) {
    assert_non_null(plan->storage);
    plan->storage = NULL;
    assert_true(plans > 0);
    plans--;
}

typedef struct scene {
    cache_fake fake;
    bd_cache *cache;
    bd_variant *v[VARIANTS];
    bd_delta_file files[VARIANTS];
    uint64_t now;
} scene;

static void begin(scene *s, uint32_t pages, uint32_t blocks) {
    static const char *const names[VARIANTS] = {"a", "b", "c", "d", "e", "f"};
    memset(s, 0, sizeof *s);
    cache_fake_overlays = cache_fake_deltas = plans = 0;
    const bd_cache_options options = {.page_count = pages,
                                      .loads_in_parallel = 3,
                                      .half_life_s = 10,
                                      .host_bytes = (uint64_t)blocks * BLOCK};
    const bd_cache_source source = {.ctx = &s->fake,
                                    .arena = s->fake.arena,
                                    .page_bytes = CACHE_FAKE_PAGE_BYTES,
                                    .pages_for = cache_fake_pages_for,
                                    .submit = cache_fake_submit,
                                    .overlay_destroy = cache_fake_overlay_destroy,
                                    .delta_close = cache_fake_delta_close};
    assert_int_equal(bd_cache_create_with(&options, &source, &s->cache, NULL), BD_OK);
    while (bd_host_tier_total_bytes(s->cache->host) < options.host_bytes) {
        const struct timespec pause = {.tv_nsec = 200000};
        nanosleep(&pause, NULL);
    }
    for (uint32_t i = 0; i < VARIANTS; i++) {
        assert_int_equal(cache_fake_register(s->cache, names[i], 1, false, &s->v[i], NULL), BD_OK);
        s->files[i].bytes = BLOCK - i;
        s->v[i]->delta.files = &s->files[i];
        s->v[i]->delta.shard_count = 1;
    }
    s->now = 1;
}

/* The oldest load ends. What it read of the disk is in its copy, complete if it ended well. */
static void finish(scene *s, bd_status status) {
    bd_load_host *host = s->fake.loads[0]->host;
    if (host && !host->filled && status == BD_OK) {
        host->filled = true;
        host->plan.storage = &plans;
        host->plan_destroy = plan_destroy;
        plans++;
    }
    cache_fake_finish(&s->fake, 0, status);
    bd_cache_poll(s->cache, ++s->now);
}

static void end(scene *s) {
    while (s->fake.load_count > 0)
        finish(s, BD_CANCELLED);
    bd_cache_destroy(s->cache);
    assert_int_equal(cache_fake_overlays, 0);
    assert_int_equal(plans, 0);
}

static uint64_t copy_bytes(const scene *s, uint32_t i) {
    return cache_fake_info(s->cache, s->v[i], s->now).host_bytes;
}

static void want(scene *s, uint32_t i, uint32_t times) {
    bd_lease lease;
    for (uint32_t t = 0; t < times; t++)
        bd_cache_touch(s->cache, s->v[i], ++s->now);
    bd_status status = bd_cache_acquire(s->cache, s->v[i], ++s->now, &lease, NULL, NULL);
    assert_true(status == BD_OK || status == BD_AGAIN || status == BD_BUSY);
    if (status == BD_OK) bd_cache_release(s->cache, &lease, s->now);
}

static void bring(scene *s, uint32_t i, uint32_t times) {
    want(s, i, times);
    assert_int_equal(s->fake.load_count, 1);
    finish(s, BD_OK);
}

static void out(scene *s, uint32_t i) {
    assert_int_equal(bd_cache_unload(s->cache, s->v[i], NULL), BD_OK);
}

/* Two blocks. One copy is being read by its load: much wanted newcomers get the other, no more. */
static void test_not_while_read(void **state) {
    (void)state;
    scene s;
    begin(&s, 4, 2);
    bring(&s, 0, 1);
    bring(&s, 1, 1);
    assert_true(copy_bytes(&s, 0) == BLOCK && copy_bytes(&s, 1) == BLOCK - 1);
    out(&s, 0);
    want(&s, 0, 0);
    const bd_load *reads = s.fake.loads[0];
    const bd_load_host *copy = reads->host;
    assert_non_null(copy);
    assert_true(copy->filled);
    want(&s, 2, 50);
    assert_true(s.fake.loads[1]->host && s.fake.loads[1]->host != copy);
    want(&s, 3, 500);
    assert_null(s.fake.loads[2]->host); /* what is being filled does not give way either */
    assert_true(copy->filled && reads->host == copy);
    assert_int_equal(plans, 1);
    for (uint32_t i = 0; i < 3; i++)
        finish(&s, BD_OK);
    assert_true(copy_bytes(&s, 0) == BLOCK && copy_bytes(&s, 2) == BLOCK - 2);
    assert_true(copy_bytes(&s, 1) == 0 && copy_bytes(&s, 3) == 0);
    end(&s);
}

static void test_ends_of_loads(void **state) {
    (void)state;
    scene s;
    begin(&s, 4, 2);
    const bd_status ends[] = {BD_E_IO, BD_E_CORRUPT, BD_CANCELLED};
    for (uint32_t i = 0; i < 3; i++) { /* of loads that fill one */
        want(&s, i, 1);
        assert_non_null(s.fake.loads[0]->host);
        if (ends[i] == BD_CANCELLED)
            assert_int_equal(bd_cache_unload(s.cache, s.v[i], NULL), BD_BUSY);
        finish(&s, ends[i]);
        assert_true(copy_bytes(&s, i) == 0);
        assert_true(bd_host_tier_used_bytes(s.cache->host) == 0);
    }
    bring(&s, 3, 1);
    for (uint32_t i = 0; i < 3; i++) { /* of loads that read one */
        if (i == 1) bring(&s, 3, 1);
        out(&s, 3);
        want(&s, 3, 1);
        assert_non_null(s.fake.loads[0]->host);
        assert_true(s.fake.loads[0]->host->filled);
        if (i == 0) { /* a load cut short says nothing against it */
            assert_int_equal(bd_cache_unload(s.cache, s.v[3], NULL), BD_BUSY);
            finish(&s, BD_CANCELLED);
            assert_true(copy_bytes(&s, 3) == BLOCK - 3);
            continue;
        }
        finish(&s, BD_E_MEMORY);
        assert_true(copy_bytes(&s, 3) == 0);
        break;
    }
    end(&s);
}

/* Forgotten while its load fills it or reads it, and with nothing under way. */
static void test_forgotten(void **state) {
    (void)state;
    scene s;
    begin(&s, 4, 3);
    bring(&s, 0, 1);
    bring(&s, 1, 1);
    out(&s, 1);
    want(&s, 1, 1);
    want(&s, 2, 1);
    for (uint32_t i = 0; i < 3; i++)
        bd_cache_forget(s.cache, s.v[i]);
    assert_true(bd_host_tier_used_bytes(s.cache->host) == 2 * BLOCK);
    finish(&s, BD_CANCELLED);
    finish(&s, BD_OK);
    assert_true(bd_host_tier_used_bytes(s.cache->host) == 0);
    assert_int_equal(s.cache->variant_count, VARIANTS - 3);
    end(&s);
}

static void test_never_more_than_given(void **state) {
    (void)state;
    const char *given = getenv("BD_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : bd_now_us();
    printf("seed %llu (BD_TEST_SEED)\n", (unsigned long long)seed);
    scene s;
    begin(&s, 3, 3);
    uint32_t whole = 0;
    for (uint32_t turn = 0; turn < 4000; turn++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const uint32_t i = (uint32_t)(seed >> 33) % VARIANTS;
        if ((seed >> 60) < 9)
            want(&s, i, (uint32_t)(seed >> 50) % 4);
        else if (s.fake.load_count > 0)
            finish(&s, (seed >> 45) % 5 == 0 ? BD_E_IO : BD_OK);
        uint64_t copies = 0;
        for (uint32_t v = 0; v < VARIANTS; v++)
            copies += s.v[v]->host != NULL;
        whole += copy_bytes(&s, i) > 0;
        assert_true(copies <= 3);
        assert_true(bd_host_tier_used_bytes(s.cache->host) == copies * BLOCK);
        for (uint32_t l = 0; l < s.fake.load_count; l++) { /* no two loads on one block */
            const bd_load_host *a = s.fake.loads[l]->host;
            for (uint32_t m = 0; a && m < l; m++)
                if (s.fake.loads[m]->host)
                    assert_ptr_not_equal(a->blocks[0], s.fake.loads[m]->host->blocks[0]);
        }
    }
    assert_true(whole > 0);
    end(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"not while read", test_not_while_read, NULL, NULL, NULL},
        {"ends of loads", test_ends_of_loads, NULL, NULL, NULL},
        {"forgotten", test_forgotten, NULL, NULL, NULL},
        {"never more than given", test_never_more_than_given, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("cache_copies", tests, NULL, NULL);
}
