/* test_engine_help.c - threads that take bd-sched's turn: one at a time has it, each call runs
 * once, what a helper's turn puts off wakes bd-sched in time, and nothing else does. */
#include "engine_fake.h"

enum { CALLS = 500, HELPERS = 3, POSTERS = 2 };

typedef struct world {
    bd_engine *engine;
    bd_engine_options options;
    fake_device fake;
    /* bd-sched's: */
    uint32_t runs; /* not atomic on purpose */
    uint64_t due_us;
    _Atomic uint32_t fired;
    pthread_t tester;
    _Atomic uint32_t turns_of_others, ends;
    uint32_t turns_before; /* of others, before the step */
} world;

typedef struct call {
    bd_call call;
    world *w;
    uint64_t delay_us; /* before_step is wanted so much later; 0: not */
    pthread_t thread;
    bool on_thread;
    _Atomic uint32_t runs;
} call;

static void run_call(bd_call *base, bd_engine *engine) {
    call *c = (call *)base;
    c->thread = pthread_self();
    c->on_thread = bd_engine_on_thread(engine);
    c->w->runs++;
    if (c->delay_us > 0) c->w->due_us = bd_now_us() + c->delay_us;
    atomic_fetch_add(&c->runs, 1);
}

static void before_step(void *ctx, uint64_t now_us, bool cache_changed) {
    world *w = ctx;
    (void)cache_changed;
    if (!pthread_equal(pthread_self(), w->tester)) atomic_fetch_add(&w->turns_of_others, 1);
    if (w->due_us == 0 || now_us < w->due_us) return;
    w->due_us = 0;
    atomic_fetch_add(&w->fired, 1);
}

static uint64_t next_wake_us(void *ctx, uint64_t now_us) {
    const world *w = ctx;
    (void)now_us;
    return w->due_us > 0 ? w->due_us : UINT64_MAX;
}

static void begin(world *w, uint64_t step_deadline_us) {
    bd_error err;
    memset(w, 0, sizeof *w);
    w->tester = pthread_self();
    w->options = (bd_engine_options){
        .cache = (bd_cache *)w, /* not NULL, never looked into */
        .rows_max = 8,
        .seqs_max = 2,
        .variants_per_step_max = 1,
        .logits_rows_max = 2,
        .step_deadline_us = step_deadline_us,
        .hooks = {.ctx = w, .before_step = before_step, .next_wake_us = next_wake_us}};
    fake_device_init(&w->fake, &w->options, 10, 4, 1);
    assert_int_equal(bd_engine_create_on(&w->options, &w->fake.device, &w->engine, &err), BD_OK);
}

static void start(world *w) {
    bd_error err;
    assert_int_equal(bd_engine_start(w->engine, &err), BD_OK);
}

static void end(world *w) {
    bd_engine_destroy(w->engine);
    fake_device_deinit(&w->fake);
}

static void post_and_help(world *w, call *c, uint64_t delay_us) {
    *c = (call){.call.run = run_call, .w = w, .delay_us = delay_us};
    bd_engine_post_quietly(w->engine, &c->call);
    bd_engine_help(w->engine);
}

static void wait_run(const call *c) {
    while (atomic_load(&c->runs) == 0)
        fake_sleep_us(100);
}

/* bd-sched sleeps sooner or later: then this thread has its turn. */
static bool helped_here(world *w, uint64_t delay_us) {
    for (uint32_t i = 0; i < 20000; i++) {
        call c;
        post_and_help(w, &c, delay_us);
        wait_run(&c);
        assert_true(c.on_thread);
        assert_false(bd_engine_on_thread(w->engine));
        if (pthread_equal(c.thread, pthread_self())) return true;
        fake_sleep_us(500);
    }
    return false;
}

static void test_here(void **state) {
    (void)state;
    world w;
    begin(&w, 0);
    call early;
    post_and_help(&w, &early, 0); /* nobody is bd-sched yet */
    assert_int_equal(early.runs, 0);
    start(&w);
    wait_run(&early);
    assert_true(helped_here(&w, 0));
    bd_engine_stop(w.engine);
    call late;
    post_and_help(&w, &late, 0);
    assert_int_equal(late.runs, 1);
    assert_true(late.on_thread);
    end(&w);
}

/* Nothing else is posted: bd-sched itself comes back for it. */
static void test_timer(void **state) {
    (void)state;
    world w;
    begin(&w, 0);
    start(&w);
    for (uint32_t round = 1; round <= 3; round++) {
        const uint32_t before = atomic_load(&w.fired);
        assert_true(helped_here(&w, 300000));
        for (uint32_t i = 0; i < 60000 && atomic_load(&w.fired) == before; i++)
            fake_sleep_us(1000);
        assert_true(atomic_load(&w.fired) > before);
    }
    end(&w);
}

static void on_end(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err) {
    world *w = ctx;
    (void)finish;
    (void)stop_id;
    (void)err;
    atomic_fetch_add(&w->ends, 1);
}

static void run_add(bd_call *base, bd_engine *engine) {
    static const int32_t prompt[] = {1, 2, 3};
    static const bd_sequence_sink sink = {.end = on_end};
    call *c = (call *)base;
    const bd_sequence_options options = {.prompt = prompt,
                                         .prompt_tokens = 3,
                                         .max_new_tokens = 1,
                                         .sampling = {.top_p = 1.0f},
                                         .logprobs = -1,
                                         .prompt_logprobs = -1,
                                         .sink = &sink,
                                         .sink_ctx = c->w};
    bd_sequence *sequence;
    bd_error err;
    assert_int_equal(bd_engine_add(engine, &options, &sequence, &err), BD_OK);
    run_call(base, engine);
}

/* Begins a step that the device holds; true: it was this thread that did. */
static bool begin_step(world *w, call *c) {
    assert_true(helped_here(w, 0));
    const uint64_t steps = atomic_load(&w->fake.steps);
    atomic_store(&w->fake.hold_from, steps + 1);
    w->turns_before = atomic_load(&w->turns_of_others);
    *c = (call){.call.run = run_add, .w = w};
    bd_engine_post_quietly(w->engine, &c->call);
    bd_engine_help(w->engine);
    wait_run(c);
    while (atomic_load(&w->fake.steps) == steps)
        fake_sleep_us(100);
    return pthread_equal(c->thread, pthread_self());
}

/* The step has a deadline, and yet bd-sched sleeps on until it ends. */
static void test_step(void **state) {
    (void)state;
    world w;
    begin(&w, 1000000000);
    w.fake.engine = w.engine;
    start(&w);
    bool undisturbed = false;
    for (uint32_t round = 1; round <= 50 && !undisturbed; round++) {
        call c;
        const bool here = begin_step(&w, &c);
        fake_sleep_us(50000);
        undisturbed = here && atomic_load(&w.turns_of_others) == w.turns_before;
        atomic_store(&w.fake.hold_from, 0);
        while (atomic_load(&w.ends) < round)
            fake_sleep_us(100);
    }
    assert_true(undisturbed);
    end(&w);
}

/* And it notices a step of another thread that does not end. */
static bool hang_is_noticed(void) {
    world w;
    begin(&w, 50000);
    w.fake.engine = w.engine;
    start(&w);
    call c;
    const bool here = begin_step(&w, &c);
    for (uint32_t i = 0; here && i < 60000 && !bd_engine_lost(w.engine); i++)
        fake_sleep_us(1000);
    if (here) assert_true(bd_engine_lost(w.engine));
    end(&w);
    assert_int_equal(w.ends, 1);
    return here;
}

static void test_hang(void **state) {
    (void)state;
    uint32_t rounds = 50;
    while (!hang_is_noticed())
        assert_true(--rounds > 0);
}

typedef struct worker {
    world *w;
    bool helps;
    call calls[CALLS];
} worker;

static void *work(void *arg) {
    worker *self = arg;
    for (uint32_t i = 0; i < CALLS; i++) {
        call *c = &self->calls[i];
        if (self->helps) {
            post_and_help(self->w, c, 0);
        } else {
            *c = (call){.call.run = run_call, .w = self->w};
            bd_engine_post(self->w->engine, &c->call);
        }
        if (i % 16 == 0) wait_run(c); /* so that bd-sched sleeps now and then */
    }
    return NULL;
}

static void test_crowd(void **state) {
    (void)state;
    enum { WORKERS = HELPERS + POSTERS };
    world w;
    begin(&w, 0);
    start(&w);
    worker *workers = calloc(WORKERS, sizeof *workers);
    pthread_t threads[WORKERS];
    assert_non_null(workers);
    for (uint32_t i = 0; i < WORKERS; i++) {
        workers[i].w = &w;
        workers[i].helps = i < HELPERS;
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < WORKERS; i++)
        pthread_join(threads[i], NULL);
    bd_engine_stop(w.engine);
    for (uint32_t i = 0; i < WORKERS; i++)
        for (uint32_t k = 0; k < CALLS; k++) {
            assert_int_equal(workers[i].calls[k].runs, 1);
            assert_true(workers[i].calls[k].on_thread);
        }
    assert_int_equal(w.runs, WORKERS * CALLS);
    end(&w);
    free(workers);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_here), cmocka_unit_test(test_timer), cmocka_unit_test(test_step),
        cmocka_unit_test(test_hang), cmocka_unit_test(test_crowd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
