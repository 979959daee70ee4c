/* test_router_shared.c - jobs whose choices share the log-probabilities of their prompts: computed
 * once, by the first choice of each, while the others wait in nobody's way and lose nothing by it.
 * Held against the model alone, as all jobs are (router_world.h). */
#include "router_world.h"

enum { BLOCK = 8, SEQS_MAX = 12 };

/* One prompt of that many tokens, its log-probabilities wanted. */
static void make_shared(world *w, request *r, fake_rng *rng, uint32_t served, uint32_t width,
                        uint32_t tokens) {
    make_request(w, r, rng, served);
    r->job.prompt_count = 1;
    r->job.choices_per_prompt = width;
    r->prompts[0].count = tokens;
    for (uint32_t i = 0; i < tokens; i++)
        r->ids[0][i] = (int32_t)fake_below(rng, FAKE_VOCAB);
    r->job.params.prompt_logprobs = (int32_t)fake_below(rng, 4);
    r->job.params.max_new_tokens = 1;
}

/* What has no blocks of its own left to compute is the rest behind the last full block. */
static uint64_t rest_of(uint32_t tokens, uint32_t max_new) {
    const uint32_t target = max_new > 0 ? tokens : tokens - 1;
    return target - (target - 1) / BLOCK * BLOCK;
}

static void run_once(fake_rng *rng, uint32_t served) {
    world w;
    request r;
    open_world(&w, 2, 20000, 0);
    start_world(&w);
    make_shared(&w, &r, rng, served, 3, 1);
    r.job.prompt_count = 1 + fake_below(rng, PROMPTS);
    r.job.params.max_new_tokens = fake_below(rng, 3);
    const uint32_t width = r.job.choices_per_prompt = 2 + fake_below(rng, 2);
    const uint32_t max_new = r.job.params.max_new_tokens;
    uint64_t want = 0;
    for (uint32_t p = 0; p < r.job.prompt_count; p++) {
        const uint32_t tokens = 2 + fake_below(rng, TOKENS - 1);
        r.prompts[p] = (bd_prompt){r.ids[p], tokens};
        for (uint32_t i = 0; i < tokens; i++) /* no two begin alike */
            r.ids[p][i] = (int32_t)(i == 0 ? p : fake_below(rng, FAKE_VOCAB));
        want += max_new > 0 ? tokens : tokens - 1;
        if (max_new > 0) want += (width - 1) * rest_of(tokens, max_new);
    }
    submit(&r);
    assert_true(wait_done(&w, 1, 30000));
    assert_int_equal(r.status, BD_OK);
    bd_engine_stats stats;
    bd_engine_stats_get(w.engine, &stats);
    assert_int_equal(stats.preemptions, 0);
    assert_int_equal(stats.prompt_tokens, want);
    close_world(&w);
}

static void test_computed_once(void **state) {
    (void)state;
    fake_rng rng = {fake_seed()};
    for (uint32_t round = 0; round < 30; round++)
        run_once(&rng, round % 2);
}

/* Until the first step has begun, in which the device is held. */
static void await_step(const world *w) {
    for (uint32_t ms = 0; atomic_load(&w->fake.steps) == 0; ms++) {
        assert_true(ms < 30000);
        fake_sleep_us(1000);
    }
}

static bool await_running(const world *w, uint32_t count) {
    bd_engine_stats stats = {0};
    for (uint32_t ms = 0; ms < 10000 && stats.running + stats.waiting != count; ms++) {
        fake_sleep_us(1000);
        bd_engine_stats_get(w->engine, &stats);
    }
    return stats.running + stats.waiting == count;
}

/* The same tenant's next request for the same variant begins while the choices of the one before
 * wait for its prompt. */
static void test_nobody_waits_behind(void **state) {
    (void)state;
    fake_rng rng = {fake_seed()};
    world w;
    request first, second;
    open_world(&w, 2, 20000, 0);
    atomic_store(&w.fake.hold_from, 1);
    make_shared(&w, &first, &rng, BASE, 3, TOKENS); /* more than a step takes */
    make_shared(&w, &second, &rng, BASE, 1, TOKENS);
    start_world(&w);
    submit(&first);
    await_step(&w);
    submit(&second);
    assert_true(await_running(&w, 2));
    assert_int_equal(first.told[0], 0);
    atomic_store(&w.fake.hold_from, 0);
    assert_true(wait_done(&w, 2, 30000));
    close_world(&w);
}

/* Cancelled, or the device lost, while choices wait: the job ends, and what was reserved is free.
 */
static void run_end_while_aside(fake_rng *rng, bool lost) {
    world w;
    request r;
    open_world(&w, 2, 20000, 0);
    atomic_store(&w.fake.hold_from, 1);
    make_shared(&w, &r, rng, BASE, 3, TOKENS);
    start_world(&w);
    submit(&r);
    await_step(&w);
    assert_true(await_running(&w, 1));
    if (lost)
        atomic_store(&w.fake.lose_device, true);
    else
        bd_router_cancel(w.router, &r.job);
    atomic_store(&w.fake.hold_from, lost ? 0 : 1);
    if (!lost) { /* at once: the step in which its first choice is need not end before */
        assert_true(wait_done(&w, 1, 30000));
        assert_true(bd_router_idle(w.router));
        atomic_store(&w.fake.hold_from, 0);
    }
    assert_true(wait_done(&w, 1, 30000));
    assert_int_equal(r.status, lost ? BD_E_DEVICE : BD_CANCELLED);
    assert_true(bd_router_idle(w.router));
    close_world(&w);
}

static void test_end_while_aside(void **state) {
    (void)state;
    fake_rng rng = {fake_seed()};
    run_end_while_aside(&rng, false);
    run_end_while_aside(&rng, true);
}

/* Back in line they are before those who came later: the engine is full of others, and the place of
 * the first choice is the only one that becomes free. */
static void test_place_in_line(void **state) {
    (void)state;
    fake_rng rng = {fake_seed()};
    world w;
    request others[SEQS_MAX - 1], shared, later;
    open_world(&w, 2, 20000, 0);
    for (uint32_t i = 0; i < SEQS_MAX - 1; i++) {
        make_shared(&w, &others[i], &rng, BASE, 1, 2);
        others[i].job.params.prompt_logprobs = -1;
        others[i].job.params.max_new_tokens = 20;
        submit(&others[i]);
    }
    make_shared(&w, &shared, &rng, BASE, 2, BLOCK);
    shared.job.params.max_new_tokens = 2; /* its prompt is told before the place is free */
    make_shared(&w, &later, &rng, BASE, 1, 1);
    submit(&shared);
    submit(&later);
    start_world(&w);
    assert_true(wait_done(&w, SEQS_MAX + 1, 30000));
    for (uint32_t i = 0; i < SEQS_MAX - 1; i++)
        assert_true(others[i].done_at > later.done_at);
    assert_true(shared.done_at < later.done_at);
    close_world(&w);
}

/* The first choice ends with the step that tells its prompt. Its variant stays for the others, who
 * have no lease yet, though another one waits for the only page. */
static void test_variant_stays(void **state) {
    (void)state;
    fake_rng rng = {fake_seed()};
    world w;
    request shared, cold;
    open_world(&w, 1, 600000000, 0);
    make_shared(&w, &shared, &rng, 1, 3, TOKENS);
    make_shared(&w, &cold, &rng, 2, 1, 1);
    submit(&shared);
    submit(&cold);
    start_world(&w);
    assert_true(wait_done(&w, 2, 30000));
    assert_int_equal(w.cache.loads, 2);
    assert_true(shared.done_at < cold.done_at);
    close_world(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_computed_once),   cmocka_unit_test(test_nobody_waits_behind),
        cmocka_unit_test(test_end_while_aside), cmocka_unit_test(test_place_in_line),
        cmocka_unit_test(test_variant_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
