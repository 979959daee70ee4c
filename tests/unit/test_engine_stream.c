/* test_engine_stream.c - steps over variants that still load. Whatever happens to the load (it is
 * slow, late, fails, is cut short, its clients leave, it is unloaded meanwhile), every request gets
 * the tokens that it gets from a resident variant, or the load's error; those beside it in the same
 * step get theirs; and all references, pages and blocks come back. Step times are given to the
 * engine beforehand where a test needs the step to begin at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../bench/stream_lab.h"
#include "model/internal.h"

enum { FRENCH, GERMAN, SQL, MATH, FAMILY, LONG = 96, SHORT = 40, NEW = 6 };

static const char *const dirs[FAMILY] = {"demo/deltas/zen-mini-french",
                                         "demo/deltas/zen-mini-german", "demo/deltas/zen-mini-sql",
                                         "demo/deltas/zen-mini-math"};

/* What the tests compare with: each variant's answer when nothing loads. */
static int32_t resident[FAMILY + 1][2][NEW];

static uint32_t prompt_of(uint32_t length) {
    return length == 0 ? LONG : SHORT;
}

static void open_lab(lab *l, uint32_t slots) {
    lab_open(l, slots, 1);
    for (uint32_t i = 0; i < FAMILY; i++)
        lab_add(l, dirs[i]);
}

/* As if steps took so long that every layer came in time. */
static void expect_slow_steps(lab *l, uint64_t us) {
    for (uint32_t rows = 1; rows <= LAB_PROMPT_MAX; rows += rows / 2 + 1)
        bd_stream_learn(&l->engine->times, rows, us);
}

static void ask(lab *l, lab_request *r, int32_t variant, uint32_t length) {
    lab_submit(l, r, variant, prompt_of(length), NEW, 11 + length);
}

static void check_right(const lab_request *r, uint32_t length) {
    if (r->finish == BD_FINISH_ERROR) fail_msg("%s", r->error.message);
    assert_int_equal(r->finish, BD_FINISH_LENGTH);
    assert_int_equal(atomic_load(&r->count), NEW);
    assert_memory_equal(r->ids, resident[r->variant + 1][length], sizeof resident[0][0]);
}

/* A sequence may end while the step that holds its rows still runs: its lease is back soon after.
 */
static void check_back(lab *l, uint32_t variant) {
    for (uint32_t i = 0; i < 120000 && lab_info(l, variant).references > 0; i++)
        lab_sleep_us(500);
    const bd_variant_info info = lab_info(l, variant);
    assert_int_equal(info.references, 0);
    assert_int_equal(info.waiters, 0);
}

static double streamed(const lab *l) {
    return bd_metric_value(l->engine->metrics.streamed);
}

static double voided(const lab *l) {
    return bd_metric_value(l->engine->metrics.voided);
}

static void wait_stalled(lab *l) {
    while (!atomic_load(&l->reader.stalled))
        lab_sleep_us(200);
}

/* Until a step over the loading variant runs. */
static void wait_streamed(lab *l) {
    while (streamed(l) < 1)
        lab_sleep_us(200);
}

static void resume(lab *l) {
    atomic_store(&l->reader.stall_at, 0);
    atomic_store(&l->reader.stalled, false);
}

static int setup(void **state) {
    (void)state;
    lab l;
    lab_request r;
    open_lab(&l, FAMILY);
    lab_begin(&l);
    for (int32_t v = -1; v < FAMILY; v++)
        for (uint32_t length = 0; length < 2; length++) {
            if (v >= 0) { /* resident beforehand: the second of two requests */
                ask(&l, &r, v, length);
                lab_wait(&r);
            }
            ask(&l, &r, v, length);
            lab_wait(&r);
            assert_int_equal(atomic_load(&r.count), NEW);
            memcpy(resident[v + 1][length], r.ids, sizeof resident[0][0]);
        }
    lab_close(&l);
    return 0;
}

/* ---- The plan ---- */

static void test_plan(void **state) {
    (void)state;
    enum { LAYERS = 4, COUNT = LAYERS + 2 };
    bd_load load = {.started_us = 1000};
    bd_load_early *early = calloc(1, sizeof *early + COUNT * sizeof early->end_bytes[0]);
    assert_non_null(early);
    early->count = COUNT;
    early->bytes = 6000;
    for (uint32_t i = 0; i < COUNT; i++)
        early->end_bytes[i] = 1000 * (i + 1);
    assert_true(bd_stream_start_us(&load, 1e6, 1.2, 5000) == UINT64_MAX); /* nothing to go by */
    atomic_store(&load.early, early);
    assert_true(bd_stream_start_us(&load, 1e6, 1.2, 5000) == UINT64_MAX); /* nothing read */
    atomic_store(&load.read_bytes, 2000);
    assert_true(bd_stream_start_us(&load, 1e6, 1.2, 5000) == UINT64_MAX); /* no embedding */
    atomic_store(&load.ready_count, 2);
    /* 2000 bytes in 2000 us: 1 us a byte; the last is there 4000 us from now. */
    const uint64_t now = 3000;
    assert_true(bd_stream_start_us(&load, 0, 1.2, now) == now + 4000);
    assert_true(bd_stream_start_us(&load, 1e6, 1.2, now) <= now);
    for (double step = 100; step < 20000; step *= 1.3) {
        const uint64_t at = bd_stream_start_us(&load, step, 1.2, now);
        assert_in_range(at, now, now + 4000);
        for (uint32_t i = 2; i < COUNT; i++) {
            const double comes = (double)(now + 1000 * (i - 1));
            const double needed = (double)at + step * (i - 1) / (LAYERS + 0.5);
            assert_true((comes - (double)at) * 1.2 <= needed - (double)at + 2);
        }
    }
    atomic_store(&load.ready_count, COUNT);
    assert_true(bd_stream_start_us(&load, 5, 1.2, now) <= now);
    free(early);
}

static void test_step_times(void **state) {
    (void)state;
    bd_step_times times = {0};
    assert_true(bd_stream_step_us(&times, 100) == 0);
    for (uint32_t i = 0; i < 50; i++) {
        bd_stream_learn(&times, 8, 1000);
        bd_stream_learn(&times, 512, 20000);
    }
    assert_true(bd_stream_step_us(&times, 1) >= 120 && bd_stream_step_us(&times, 1) <= 1000);
    assert_true(fabs(bd_stream_step_us(&times, 8) - 1000) < 1);
    assert_true(fabs(bd_stream_step_us(&times, 512) - 20000) < 1);
    assert_true(bd_stream_step_us(&times, 256) >= 9999);
    assert_true(bd_stream_step_us(&times, 1u << 31) >= 20000);
    for (uint32_t i = 0; i < 50; i++)
        bd_stream_learn(&times, 512, 40000);
    assert_true(fabs(bd_stream_step_us(&times, 512) - 40000) < 100);
}

/* ---- Loads that go well ---- */

static void test_streamed_is_right(void **state) {
    (void)state;
    lab l;
    lab_request hot, cold[3];
    open_lab(&l, FAMILY);
    expect_slow_steps(&l, 60000000);
    atomic_store(&l.reader.stall_at, 600000);
    lab_begin(&l);
    ask(&l, &cold[0], FRENCH, 0);
    ask(&l, &cold[1], FRENCH, 1);
    ask(&l, &hot, -1, 0);
    wait_stalled(&l);
    wait_streamed(&l);
    const bd_variant_info info = lab_info(&l, FRENCH);
    assert_int_equal(info.state, BD_VARIANT_LOADING);
    assert_int_equal(info.references, 2);
    ask(&l, &cold[2], FRENCH, 0); /* comes while the others' step waits */
    resume(&l);
    for (uint32_t i = 0; i < 3; i++)
        lab_wait(&cold[i]);
    lab_wait(&hot);
    check_right(&cold[0], 0);
    check_right(&cold[1], 1);
    check_right(&cold[2], 0);
    check_right(&hot, 0);
    assert_true(streamed(&l) >= 1);
    assert_true(voided(&l) == 0);
    check_back(&l, FRENCH);
    lab_close(&l);
}

/* Without chunk sums a file is verified whole first, and starts nothing early. */
static void test_whole_file(void **state) {
    (void)state;
    lab l;
    lab_request r;
    open_lab(&l, FAMILY);
    expect_slow_steps(&l, 60000000);
    l.files[FRENCH].chunk_bytes = l.files[FRENCH].chunk_count = 0;
    atomic_store(&l.reader.bytes_per_us, 20.0);
    lab_begin(&l);
    ask(&l, &r, FRENCH, 0);
    lab_wait(&r);
    check_right(&r, 0);
    assert_true(streamed(&l) == 0);
    lab_close(&l);
}

/* false: the machine was so slow that the plan lets no step of `step_us` begin. */
static bool is_late(uint64_t step_us) {
    lab l;
    lab_request hot, cold;
    open_lab(&l, FAMILY);
    expect_slow_steps(&l, step_us);
    atomic_store(&l.reader.bytes_per_us, 100.0);
    atomic_store(&l.reader.stall_at, 500000);
    lab_begin(&l);
    ask(&l, &cold, GERMAN, 0);
    wait_stalled(&l);
    for (uint32_t ms = 0; ms < 1000 && streamed(&l) < 1; ms++)
        lab_sleep_us(1000);
    const bool began = streamed(&l) >= 1;
    while (began && voided(&l) < 1)
        lab_sleep_us(500);
    ask(&l, &hot, -1, 0); /* not held up by the load, or no longer */
    lab_wait(&hot);
    check_right(&hot, 0);
    assert_false(atomic_load(&cold.done));
    resume(&l);
    lab_wait(&cold);
    check_right(&cold, 0);
    assert_int_equal(lab_info(&l, GERMAN).loads, 1);
    check_back(&l, GERMAN);
    lab_close(&l);
    return began;
}

/* The reader stops for longer than the step has patience: the rows are computed again. */
static void test_late(void **state) {
    (void)state;
    uint64_t step_us = 200000;
    while (!is_late(step_us)) {
        step_us *= 4; /* by which a slow load takes longer than expected, too */
        assert_true(step_us < 1000000000);
    }
}

/* ---- Loads that do not ---- */

static void check_failed(const lab_request *r, const char *text) {
    assert_int_equal(r->finish, BD_FINISH_ERROR);
    assert_int_equal(r->error.status, BD_E_VARIANT);
    if (!strstr(r->error.message, text) && !strstr(r->error.subject, text))
        fail_msg("%s: %s", r->error.subject, r->error.message);
}

static void test_fails_in_a_step(void **state) {
    (void)state;
    lab l;
    lab_request hot, cold[2], again;
    open_lab(&l, FAMILY);
    expect_slow_steps(&l, 60000000);
    atomic_store(&l.reader.stall_at, 500000);
    atomic_store(&l.reader.fail_at, 500000);
    lab_begin(&l);
    ask(&l, &cold[0], SQL, 0);
    ask(&l, &cold[1], SQL, 1);
    ask(&l, &hot, -1, 0);
    wait_stalled(&l);
    wait_streamed(&l);
    resume(&l);
    for (uint32_t i = 0; i < 2; i++) {
        lab_wait(&cold[i]);
        check_failed(&cold[i], "shard-00-of-01");
        assert_int_equal(atomic_load(&cold[i].count), 0);
    }
    lab_wait(&hot);
    check_right(&hot, 0);
    assert_int_equal(lab_info(&l, SQL).state, BD_VARIANT_FAILED);
    check_back(&l, SQL);
    assert_int_equal(lab_info(&l, SQL).page_bytes, 0);
    atomic_store(&l.reader.fail_at, 0);
    ask(&l, &again, SQL, 0); /* and is tried again */
    lab_wait(&again);
    check_right(&again, 0);
    lab_close(&l);
}

/* A backend that counts what it is told to leave out. */
static _Atomic uint32_t left_out;

static void count_void(bd_backend *backend, const bd_step *step, uint32_t overlay) {
    atomic_fetch_add(&left_out, 1);
    bd_backend_cpu_ops()->step_void(backend, step, overlay);
}

/* The pages of what is given up are not read any more: the load may be writing them. */
static void test_backend_is_told(void **state) {
    (void)state;
    lab l;
    lab_request hot, cold;
    bd_backend_ops ops = *bd_backend_cpu_ops();
    ops.step_void = count_void;
    atomic_store(&left_out, 0);
    open_lab(&l, FAMILY);
    l.model->ops = &ops;
    expect_slow_steps(&l, 60000000);
    atomic_store(&l.reader.stall_at, 500000);
    atomic_store(&l.reader.fail_at, 500000);
    lab_begin(&l);
    ask(&l, &cold, FRENCH, 0);
    ask(&l, &hot, -1, 1);
    wait_stalled(&l);
    wait_streamed(&l);
    resume(&l);
    lab_wait(&cold);
    lab_wait(&hot);
    check_failed(&cold, "shard-00-of-01");
    check_right(&hot, 1);
    check_back(&l, FRENCH); /* the step has ended that began with it */
    assert_int_equal(atomic_load(&left_out), 1);
    lab_close(&l);
}

/* The file is cut short under the reader: no row of it is used. */
static void test_cut_in_a_step(void **state) {
    (void)state;
    char dir[] = "/tmp/bitdelta-stream-XXXXXX", command[256], path[300];
    assert_non_null(mkdtemp(dir));
    snprintf(command, sizeof command, "cp %s/* %s", dirs[MATH], dir);
    assert_int_equal(system(command), 0);
    lab l;
    lab_request hot, cold;
    lab_open(&l, FAMILY, 1);
    const uint32_t variant = lab_add(&l, dir);
    snprintf(path, sizeof path, "%s/shard-00-of-01.safetensors", dir);
    snprintf(l.reader.cut_path, sizeof l.reader.cut_path, "%s", path);
    expect_slow_steps(&l, 60000000);
    atomic_store(&l.reader.stall_at, 400000);
    atomic_store(&l.reader.cut_at, 400000);
    lab_begin(&l);
    ask(&l, &cold, (int32_t)variant, 0);
    ask(&l, &hot, -1, 0);
    wait_stalled(&l);
    wait_streamed(&l);
    resume(&l);
    lab_wait(&cold);
    lab_wait(&hot);
    check_failed(&cold, path);
    check_right(&hot, 0);
    check_back(&l, variant);
    lab_close(&l);
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

/* ---- Clients and operators ---- */

static void test_clients_leave(void **state) {
    (void)state;
    lab l;
    lab_request first, second;
    open_lab(&l, FAMILY);
    expect_slow_steps(&l, 60000000);
    atomic_store(&l.reader.stall_at, 500000);
    lab_begin(&l);
    ask(&l, &first, FRENCH, 0);
    wait_stalled(&l);
    wait_streamed(&l);
    lab_cancel(&l, &first);
    ask(&l, &second, FRENCH, 1);
    resume(&l);
    lab_wait(&first);
    assert_int_equal(first.finish, BD_FINISH_CANCELLED);
    lab_wait(&second);
    check_right(&second, 1);
    check_back(&l, FRENCH);
    assert_int_equal(lab_info(&l, FRENCH).loads, 1); /* the first's load served the second */
    lab_close(&l);
}

static void test_unload_while_loading(void **state) {
    (void)state;
    for (uint32_t leaves = 0; leaves < 2; leaves++) {
        lab l;
        lab_request r, after;
        open_lab(&l, FAMILY);
        expect_slow_steps(&l, 60000000);
        atomic_store(&l.reader.stall_at, 500000);
        lab_begin(&l);
        ask(&l, &r, GERMAN, 0);
        wait_stalled(&l);
        wait_streamed(&l);
        assert_int_equal(lab_unload(&l, GERMAN), BD_BUSY);
        assert_int_equal(lab_info(&l, GERMAN).state, BD_VARIANT_DRAINING);
        ask(&l, &after, GERMAN, 1); /* waits for the unload, then loads again */
        if (leaves) lab_cancel(&l, &r);
        resume(&l);
        lab_wait(&r);
        lab_wait(&after);
        if (leaves)
            assert_int_equal(r.finish, BD_FINISH_CANCELLED);
        else
            check_right(&r, 0);
        check_right(&after, 1);
        check_back(&l, GERMAN);
        lab_close(&l);
    }
}

/* One slot: who has begun with a load under way cannot be evicted by the next. */
static void test_eviction_waits(void **state) {
    (void)state;
    lab l;
    lab_request r[3];
    open_lab(&l, 1);
    expect_slow_steps(&l, 60000000);
    atomic_store(&l.reader.stall_at, 500000);
    lab_begin(&l);
    ask(&l, &r[0], FRENCH, 0);
    wait_stalled(&l);
    wait_streamed(&l);
    ask(&l, &r[1], GERMAN, 0);
    ask(&l, &r[2], SQL, 1);
    resume(&l);
    for (uint32_t i = 0; i < 3; i++) {
        lab_wait(&r[i]);
        check_right(&r[i], i == 2);
    }
    for (uint32_t v = 0; v < FAMILY; v++)
        check_back(&l, v);
    lab_close(&l);
}

/* ---- Everything at once ---- */

static void check_either(const lab_request *r, uint32_t length, bool left) {
    if (left && r->finish == BD_FINISH_CANCELLED) return;
    if (r->finish == BD_FINISH_ERROR) {
        assert_true(r->error.status != BD_E_INTERNAL);
        return;
    }
    check_right(r, length);
}

#if defined(__SANITIZE_THREAD__)
#define TSAN 1
#elif defined(__has_feature)
#define TSAN __has_feature(thread_sanitizer)
#else
#define TSAN 0
#endif

static void test_storm(void **state) {
    (void)state;
    enum { ROUNDS = TSAN ? 3 : 15, AT_ONCE = 10 }; /* a step takes thirty times as long there */
    const char *given = getenv("BD_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : bd_now_us();
    printf("seed %llu (BD_TEST_SEED)\n", (unsigned long long)seed);
    static lab_request r[AT_ONCE];
    lab l;
    open_lab(&l, 2);
    expect_slow_steps(&l, 20000);
    lab_begin(&l);
    uint32_t right = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t lengths[AT_ONCE];
        bool left[AT_ONCE] = {false};
        uint64_t x[4];
        for (uint32_t i = 0; i < 4; i++)
            x[i] = (seed = seed * 6364136223846793005u + 1442695040888963407u) >> 33;
        atomic_store(&l.reader.bytes_per_us, (double)(20 + x[0] % 400));
        atomic_store(&l.reader.fail_at,
                     x[1] % 3 == 0 ? atomic_load(&l.reader.bytes) + x[2] % 2000000 : 0);
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            lengths[i] = seed >> 40 & 1;
            ask(&l, &r[i], (int32_t)((seed >> 33) % (FAMILY + 1)) - 1, lengths[i]);
            if ((seed >> 50) % 4 == 0) lab_sleep_us((seed >> 52) % 4000);
            if ((seed >> 54) % 8 == 0) (void)lab_unload(&l, (uint32_t)(seed >> 60) % FAMILY);
            left[i] = (seed >> 57) % 5 == 0;
            if (left[i]) lab_cancel(&l, &r[i - i / 2]), left[i - i / 2] = true;
        }
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            lab_wait(&r[i]);
            check_either(&r[i], lengths[i], left[i]);
            right += r[i].finish == BD_FINISH_LENGTH;
        }
        for (uint32_t v = 0; v < FAMILY; v++)
            check_back(&l, v);
    }
    printf("  %u of %u answered, %.0f streamed steps, %.0f voided\n", right, ROUNDS * AT_ONCE,
           streamed(&l), voided(&l));
    assert_true(right > 0);
    lab_close(&l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"plan", test_plan, NULL, NULL, NULL},
        {"step times", test_step_times, NULL, NULL, NULL},
        {"streamed is right", test_streamed_is_right, NULL, NULL, NULL},
        {"whole file", test_whole_file, NULL, NULL, NULL},
        {"late", test_late, NULL, NULL, NULL},
        {"fails in a step", test_fails_in_a_step, NULL, NULL, NULL},
        {"backend is told", test_backend_is_told, NULL, NULL, NULL},
        {"cut in a step", test_cut_in_a_step, NULL, NULL, NULL},
        {"clients leave", test_clients_leave, NULL, NULL, NULL},
        {"unload while loading", test_unload_while_loading, NULL, NULL, NULL},
        {"eviction waits", test_eviction_waits, NULL, NULL, NULL},
        {"storm", test_storm, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("engine_stream", tests, setup, NULL);
}
