/* test_cache_host.c - copies of deltas in host memory: a variant that comes back reads no disk and
 * answers as before, also when its files have gone; too small a memory keeps those most wanted; a
 * load that failed leaves none; replaced files, a new variant, find none. And the memory itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../../bench/stream_lab.h"
#include "cache/cache_internal.h"

enum { NEW = 5, PROMPT = 50, MIB = 1 << 20 };

static const char *const dirs[] = {"demo/deltas/zen-mini-french", "demo/deltas/zen-mini-german",
                                   "demo/deltas/zen-mini-sql"};

static void open_lab(lab *l, uint32_t slots, uint64_t host_bytes) {
    lab_open_host(l, slots, 1, host_bytes);
    for (uint32_t i = 0; i < 3; i++)
        lab_add(l, dirs[i]);
    lab_begin(l);
    /* The memory comes from a thread of its own. */
    while (host_bytes > 0 && bd_host_tier_total_bytes(l->cache->host) < host_bytes)
        lab_sleep_us(200);
}

typedef struct touch_call {
    bd_call call;
    lab *owner;
    uint32_t variant;
    _Atomic bool done;
} touch_call;

static void run_touch(bd_call *call, bd_engine *engine) {
    touch_call *c = (touch_call *)(void *)call;
    (void)engine;
    bd_cache_touch(c->owner->cache, c->owner->variants[c->variant], bd_now_us());
    atomic_store(&c->done, true);
}

/* One request, counted as the router does. */
static void answer(lab *l, uint32_t variant, int32_t *ids) {
    static lab_request r;
    touch_call c = {.call = {.run = run_touch}, .owner = l, .variant = variant};
    bd_engine_post(l->engine, &c.call);
    while (!atomic_load(&c.done))
        lab_sleep_us(100);
    lab_submit(l, &r, (int32_t)variant, PROMPT, NEW, 5);
    lab_wait(&r);
    if (r.finish != BD_FINISH_LENGTH) fail_msg("%s: %s", r.error.subject, r.error.message);
    memcpy(ids, r.ids, NEW * sizeof *ids);
}

static uint64_t read_bytes(const lab *l) {
    return atomic_load(&l->reader.bytes);
}

static void test_comes_back(void **state) {
    (void)state;
    lab l;
    int32_t first[3][NEW], again[NEW];
    open_lab(&l, 1, 16 * MIB);
    for (uint32_t i = 0; i < 3; i++)
        answer(&l, i, first[i]);
    const uint64_t read = read_bytes(&l);
    assert_true(read >= 3 * l.files[0].bytes);
    for (uint32_t round = 0; round < 4; round++)
        for (uint32_t i = 0; i < 3; i++) {
            answer(&l, i, again);
            assert_memory_equal(again, first[i], sizeof again);
        }
    assert_true(read_bytes(&l) == read);
    double hits = 0;
    for (uint32_t i = 0; i < 3; i++) {
        const bd_variant_info info = lab_info(&l, i);
        assert_true(info.host_bytes == l.files[i].bytes);
        assert_true(info.host_hits >= 4);
        hits += (double)info.host_hits;
    }
    assert_true(bd_metric_value(l.cache->metric_host_hits) == hits);
    assert_true(bd_metric_value(l.cache->metric_host_misses) == 3);
    assert_true(bd_metric_value(l.cache->metric_host_used) >= 3.0 * (double)l.files[0].bytes);
    lab_close(&l);
}

/* Two copies fit; the third, asked for less often, does not push the others out. */
static void test_too_small(void **state) {
    (void)state;
    lab l;
    int32_t ids[NEW];
    open_lab(&l, 1, 5 * MIB / 2);
    for (uint32_t round = 0; round < 6; round++) {
        answer(&l, 0, ids);
        answer(&l, 1, ids);
    }
    answer(&l, 2, ids);
    assert_true(lab_info(&l, 2).host_bytes == 0);
    assert_true(lab_info(&l, 0).host_bytes > 0 && lab_info(&l, 1).host_bytes > 0);
    for (uint32_t round = 0; round < 12; round++) { /* the demand moves */
        answer(&l, 2, ids);
        answer(&l, 1, ids);
    }
    assert_true(lab_info(&l, 2).host_bytes > 0);
    assert_true(lab_info(&l, 0).host_bytes == 0);
    lab_close(&l);
}

static void test_failed_load_leaves_none(void **state) {
    (void)state;
    lab l;
    lab_request r;
    int32_t ids[NEW];
    open_lab(&l, 1, 16 * MIB);
    atomic_store(&l.reader.fail_at, 700000);
    lab_submit(&l, &r, 0, PROMPT, NEW, 5);
    lab_wait(&r);
    assert_int_equal(r.finish, BD_FINISH_ERROR);
    assert_true(lab_info(&l, 0).host_bytes == 0);
    assert_true(bd_metric_value(l.cache->metric_host_used) == 0);
    atomic_store(&l.reader.fail_at, 0);
    answer(&l, 0, ids);
    assert_true(lab_info(&l, 0).host_bytes > 0);
    assert_int_equal(lab_info(&l, 0).host_hits, 0);
    lab_close(&l);
}

/* What a load cut short had read is no copy. */
static void test_cut_short_leaves_none(void **state) {
    (void)state;
    lab l;
    lab_request r;
    int32_t ids[NEW], again[NEW];
    open_lab(&l, 1, 16 * MIB);
    /* So slow that nobody begins early: a load that is in use already is not cut short. */
    atomic_store(&l.reader.bytes_per_us, 4.0);
    atomic_store(&l.reader.stall_at, 600000);
    lab_submit(&l, &r, 0, PROMPT, NEW, 5);
    while (!atomic_load(&l.reader.stalled))
        lab_sleep_us(200);
    assert_int_equal(lab_unload(&l, 0), BD_BUSY);
    atomic_store(&l.reader.stall_at, 0);
    lab_wait(&r);
    assert_int_equal(r.finish, BD_FINISH_ERROR);
    atomic_store(&l.reader.bytes_per_us, 0.0);
    lab_make_cold(&l, 0);
    assert_true(lab_info(&l, 0).host_bytes == 0);
    assert_true(bd_metric_value(l.cache->metric_host_used) == 0);
    const uint64_t read = read_bytes(&l);
    answer(&l, 0, ids);
    assert_true(read_bytes(&l) - read >= l.files[0].bytes);
    assert_int_equal(lab_info(&l, 0).host_hits, 0);
    lab_make_cold(&l, 0);
    answer(&l, 0, again);
    assert_int_equal(lab_info(&l, 0).host_hits, 1);
    assert_memory_equal(ids, again, sizeof ids);
    lab_close(&l);
}

static void shell(const char *command) {
    assert_int_equal(system(command), 0);
}

static void test_replaced_files(void **state) {
    (void)state;
    char dir[] = "/tmp/bitdelta-host-XXXXXX", command[512];
    assert_non_null(mkdtemp(dir));
    snprintf(command, sizeof command, "cp %s/* %s", dirs[0], dir);
    shell(command);
    lab l;
    int32_t old[NEW], other[NEW], ids[NEW];
    lab_open_host(&l, 1, 1, 16 * MIB);
    const uint32_t was = lab_add(&l, dir), beside = lab_add(&l, dirs[2]);
    lab_begin(&l);
    while (bd_host_tier_total_bytes(l.cache->host) == 0)
        lab_sleep_us(200);
    answer(&l, was, old);
    answer(&l, beside, other);
    snprintf(command, sizeof command, "rm %s/* && cp %s/* %s", dir, dirs[1], dir);
    shell(command);
    answer(&l, was, ids); /* what was registered, not what lies there now */
    assert_memory_equal(ids, old, sizeof ids);
    lab_close(&l);

    lab_open_host(&l, 1, 1, 16 * MIB); /* as registered anew */
    const uint32_t now = lab_add(&l, dir), german = lab_add(&l, dirs[1]);
    lab_begin(&l);
    answer(&l, now, ids);
    answer(&l, german, other);
    assert_memory_equal(ids, other, sizeof ids);
    assert_int_equal(lab_info(&l, now).host_hits, 0);
    lab_close(&l);
    snprintf(command, sizeof command, "rm -r %s", dir);
    shell(command);
}

/* ---- The memory ---- */

typedef struct source {
    uint32_t left, out;
} source;

static void *limited(void *ctx, uint64_t bytes) {
    source *s = ctx;
    if (s->left == 0) return NULL;
    s->left--;
    s->out++;
    return malloc(bytes);
}

static void back(void *ctx, void *memory, uint64_t bytes) {
    source *s = ctx;
    (void)bytes;
    s->out--;
    free(memory);
}

static void test_memory(void **state) {
    (void)state;
    source s = {.left = 3};
    const bd_host_options options = {.bytes = 10 * 4096 + 17,
                                     .block_bytes = 4096,
                                     .step_bytes = 2 * 4096 + 5,
                                     .memory = {.ctx = &s, .alloc = limited, .free = back}};
    bd_host_tier *tier;
    bd_error err = {0};
    assert_int_equal(bd_host_tier_create(&options, &tier, &err), BD_OK);
    while (bd_host_tier_total_bytes(tier) < 6 * 4096) /* three steps of two, then no more */
        lab_sleep_us(100);
    assert_null(bd_host_tier_take(tier, 6 * 4096 + 1));
    assert_null(bd_host_tier_take(tier, 0));
    bd_load_host *a = bd_host_tier_take(tier, 4097), *b = bd_host_tier_take(tier, 4 * 4096);
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal(bd_host_tier_free_bytes(tier), 0);
    assert_int_equal(bd_host_tier_used_bytes(tier), 6 * 4096);
    memset(a->blocks[1], 1, 4096);
    memset(b->blocks[3], 2, 4096);
    assert_int_equal(((uint8_t *)a->blocks[1])[4095], 1);
    bd_host_tier_give(tier, a);
    bd_host_tier_give(tier, b);
    bd_host_tier_give(tier, NULL);
    bd_host_tier_destroy(tier);
    assert_int_equal(s.out, 0);
    const bd_host_options none = {.bytes = 100};
    assert_int_equal(bd_host_tier_create(&none, &tier, &err), BD_E_ARGUMENT);
    assert_null(tier);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"comes back", test_comes_back, NULL, NULL, NULL},
        {"too small", test_too_small, NULL, NULL, NULL},
        {"a failed load leaves none", test_failed_load_leaves_none, NULL, NULL, NULL},
        {"a load cut short leaves none", test_cut_short_leaves_none, NULL, NULL, NULL},
        {"replaced files", test_replaced_files, NULL, NULL, NULL},
        {"memory", test_memory, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("cache_host", tests, NULL, NULL);
}
