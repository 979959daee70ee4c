/* test_engine_gate.c - steps over variants that still load, on the fake model: what the gate voided
 * is written as garbage, into KV and results, so that any use of it shows in the tokens. Loads are
 * the test's. What test_engine_stream.c shows with the real loader is not repeated here. */
#include "engine_fake.h"

enum { LAYERS = 3, COUNT = LAYERS + 2, VARIANTS = 3, CLIENTS = 6, PROMPT = 33, NEW_MAX = 20 };

bool bd_cache_poll(bd_cache *cache, uint64_t now_us) {
    (void)cache;
    (void)now_us;
    return false;
}

void bd_cache_release(bd_cache *cache, bd_lease *lease, uint64_t now_us) {
    (void)cache;
    (void)now_us;
    assert_true(atomic_fetch_sub(&lease->variant->leases, 1) > 0);
}

typedef struct client {
    bd_sequence_options options;
    bd_sequence *sequence;
    _Atomic bool wanted, cancel, ended;
    uint32_t count;
    int32_t ids[64];
    bd_finish finish;
    bd_error error;
} client;

typedef struct world {
    fake_device fake; /* first member: the executor's ctx */
    bd_engine_options options;
    bd_engine *engine;
    struct bd_variant variants[VARIANTS];
    bd_load loads[VARIANTS];
    client clients[CLIENTS];
    int32_t prompt[PROMPT];
    _Atomic uint32_t gated, most_loading;
    _Atomic uint64_t deadline_us, waited_us, most_patient_us; /* the last: with company */
    bd_executor_ops ops;
    _Atomic bool ask_stream;     /* whether more of variant 0 would be let in */
    bool may_stream, under_gate; /* bd-sched's; the executor's */
} world;

/* ---- The device ---- */

static void on_void(void *ctx, uint32_t overlay) {
    (void)ctx;
    (void)overlay;
}

static void spoil(world *w, const bd_step *step, const bd_stream_gate *gate) {
    for (uint32_t row = 0; row < step->row_count; row++) {
        const uint32_t seq = step->seq_of_row[row];
        for (uint32_t i = 0; i < step->segment_count; i++) {
            const bd_segment *s = &step->segments[i];
            if (row < s->first_row || row >= s->first_row + s->row_count) continue;
            if (s->overlay < 0 || !gate->voided[s->overlay]) continue;
            *fake_cell_at(&w->fake, &step->seqs[seq], step->positions[row]) = 0xbadbadbad;
            for (uint32_t j = 0; j < step->logits_row_count; j++)
                if (step->logits_rows[j].row == row) w->fake.results[j].id = FAKE_VOCAB - 1;
        }
    }
}

/* What goes on has its layer. */
static void pass(world *w, bd_stream_gate *gate, uint32_t index) {
    bd_stream_gate_pass(gate, index, on_void, NULL);
    for (uint32_t i = 0; i < gate->count; i++) {
        const bd_load *load = gate->loads[i];
        if (!load || gate->voided[i]) continue;
        const uint32_t ready = atomic_load(&load->ready_count);
        if (ready <= index) fake_fault(&w->fake, "layer not there", index, ready);
    }
}

static bd_status forward(void *ctx, const bd_step *step, bd_stream_gate *gate, bd_error *err) {
    world *w = ctx;
    uint32_t loading = 0;
    for (uint32_t i = 0; gate && i < gate->count; i++)
        loading += gate->loads[i] != NULL;
    if (loading > atomic_load(&w->most_loading)) atomic_store(&w->most_loading, loading);
    w->under_gate = gate != NULL;
    if (gate) atomic_fetch_add(&w->gated, 1);
    if (gate && step->segment_count > 1 && gate->patience_us > atomic_load(&w->most_patient_us))
        atomic_store(&w->most_patient_us, gate->patience_us);
    for (uint32_t i = 0; gate && i < COUNT; i++)
        pass(w, gate, i);
    bd_status status = fake_forward(&w->fake, step, gate, err);
    if (gate) {
        spoil(w, step, gate);
        atomic_store(&w->waited_us, gate->waited_us);
    }
    return status;
}

static bd_status wait_step(void *ctx, const bd_step *step, uint64_t deadline_us,
                           bd_token_result *results, bd_error *err) {
    world *w = ctx;
    if (w->under_gate) atomic_store(&w->deadline_us, deadline_us);
    return fake_wait(&w->fake, step, deadline_us, results, err);
}

/* ---- Clients ---- */

static bool on_token(void *ctx, const bd_token_result *token) {
    client *c = ctx;
    c->ids[c->count++] = token->id;
    return true;
}

static void on_end(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err) {
    client *c = ctx;
    (void)stop_id;
    c->finish = finish;
    if (err) c->error = *err;
    c->sequence = NULL;
    atomic_store(&c->ended, true);
}

static const bd_sequence_sink sink = {.token = on_token, .end = on_end};

static void before_step(void *ctx, uint64_t now_us, bool cache_changed) {
    world *w = ctx;
    bd_error err;
    (void)cache_changed;
    if (atomic_load(&w->ask_stream)) {
        w->may_stream = bd_engine_may_stream(w->engine, &w->loads[0], now_us);
        atomic_store(&w->ask_stream, false);
    }
    for (uint32_t i = 0; i < CLIENTS; i++) {
        client *c = &w->clients[i];
        if (atomic_load(&c->wanted)) {
            const bd_status status = bd_engine_add(w->engine, &c->options, &c->sequence, &err);
            if (status == BD_BUSY) continue;
            BD_ASSERT(status == BD_OK);
            atomic_store(&c->wanted, false);
        }
        if (atomic_exchange(&c->cancel, false) && c->sequence)
            bd_engine_cancel(w->engine, c->sequence);
    }
}

static void open_world(world *w, const bd_engine_options *options, uint32_t blocks,
                       uint64_t step_us) {
    bd_error err;
    memset(w, 0, sizeof *w);
    for (uint32_t i = 0; i < VARIANTS; i++) {
        uint64_t word = i + 1;
        memcpy(w->variants[i].overlay.digest, &word, sizeof word);
    }
    for (int32_t i = 0; i < PROMPT; i++)
        w->prompt[i] = i;
    w->options = *options;
    w->options.cache = (bd_cache *)(void *)w;
    w->options.rows_max = 64;
    w->options.seqs_max = CLIENTS;
    w->options.variants_per_step_max = 4;
    w->options.logits_rows_max = 64;
    w->options.hooks = (bd_engine_hooks){.ctx = w, .before_step = before_step};
    fake_device_init(&w->fake, &w->options, blocks, 8, 1);
    w->ops = (bd_executor_ops){.forward = forward, .wait = wait_step};
    w->fake.device.ops = &w->ops;
    w->fake.device.layers = LAYERS;
    assert_int_equal(bd_engine_create_on(&w->options, &w->fake.device, &w->engine, &err), BD_OK);
    for (uint32_t rows = 1; rows <= 64; rows += rows / 2 + 1)
        bd_stream_learn(&w->engine->times, rows, step_us);
    assert_int_equal(bd_engine_start(w->engine, &err), BD_OK);
}

static void close_world(world *w) {
    bd_engine_stats stats;
    bd_engine_stop(w->engine);
    bd_engine_stats_get(w->engine, &stats);
    assert_int_equal(stats.kv_blocks_used, 0);
    if (w->fake.faults) fail_msg("%s", w->fake.fault);
    bd_engine_destroy(w->engine);
    for (uint32_t i = 0; i < VARIANTS; i++) {
        assert_int_equal(w->variants[i].leases, 0);
        free(atomic_load(&w->loads[i].early));
    }
    fake_device_deinit(&w->fake);
}

/* A load with its first layer there and the rest due in a moment, by its rate. */
static void begin_load(world *w, uint32_t variant) {
    bd_load *load = &w->loads[variant];
    free(atomic_load(&load->early));
    bd_load_early *early = calloc(1, sizeof *early + COUNT * sizeof early->end_bytes[0]);
    assert_non_null(early);
    *load = (bd_load){.started_us = bd_now_us() - 1000};
    early->overlay = &w->variants[variant].overlay;
    early->count = COUNT;
    early->bytes = 1000000 + COUNT;
    for (uint32_t i = 0; i < COUNT; i++)
        early->end_bytes[i] = 1000000 + i;
    atomic_store(&load->ready_count, 2);
    atomic_store(&load->read_bytes, 1000000);
    atomic_store(&load->early, early);
}

static void end_load(world *w, uint32_t variant, bd_status status) {
    bd_load *load = &w->loads[variant];
    load->status = status;
    if (status != BD_OK) bd_fail(&load->error, status, "planted", "this load fails");
    if (status == BD_OK) atomic_store(&load->ready_count, COUNT);
    atomic_store(&load->finished, true);
    bd_engine_wake(w->engine);
}

static client *ask(world *w, uint32_t at, int32_t variant, bool loading, uint32_t new_tokens) {
    client *c = &w->clients[at];
    /* Field by field: bd-sched looks at wanted and cancel in every turn. */
    c->sequence = NULL;
    c->count = 0;
    c->finish = BD_FINISH_STOP;
    bd_error_clear(&c->error);
    atomic_store(&c->ended, false);
    c->options = (bd_sequence_options){.prompt = w->prompt,
                                       .prompt_tokens = PROMPT,
                                       .max_new_tokens = new_tokens,
                                       .logprobs = -1,
                                       .prompt_logprobs = -1,
                                       .sink = &sink,
                                       .sink_ctx = c};
    if (variant >= 0) {
        struct bd_variant *v = &w->variants[variant];
        atomic_fetch_add(&v->leases, 1);
        c->options.lease = (bd_lease){v, &v->overlay, loading ? &w->loads[variant] : NULL};
    }
    atomic_store(&c->wanted, true);
    bd_engine_wake(w->engine);
    return c;
}

static void wait_end(client *c) {
    for (uint32_t i = 0; i < 60000 && !atomic_load(&c->ended); i++)
        fake_sleep_us(500);
    assert_true(atomic_load(&c->ended));
}

static void wait_gated(world *w, uint32_t count) {
    for (uint32_t i = 0; i < 60000 && atomic_load(&w->gated) < count; i++)
        fake_sleep_us(500);
    assert_true(atomic_load(&w->gated) >= count);
}

static double voided(const world *w) {
    return bd_metric_value(w->engine->metrics.voided);
}

static void wait_voided(const world *w, double count) {
    for (uint32_t i = 0; i < 60000 && voided(w) < count; i++)
        fake_sleep_us(500);
    assert_true(voided(w) >= count);
}

static bool may_stream(world *w) {
    atomic_store(&w->ask_stream, true);
    bd_engine_wake(w->engine);
    while (atomic_load(&w->ask_stream))
        fake_sleep_us(200);
    return w->may_stream;
}

static void check_right(const world *w, const client *c) {
    fake_run alone;
    fake_alone(&c->options, w->options.decode_delta, &alone);
    assert_int_equal(c->finish, BD_FINISH_LENGTH);
    assert_int_equal(c->count, alone.count);
    assert_memory_equal(c->ids, alone.ids, alone.count * sizeof alone.ids[0]);
}

static void check_failed(const client *c) {
    assert_int_equal(c->finish, BD_FINISH_ERROR);
    assert_int_equal(c->error.status, BD_E_VARIANT);
    assert_int_equal(c->count, 0);
}

static uint64_t prefix_hits(const world *w) {
    bd_engine_stats stats;
    bd_engine_stats_get(w->engine, &stats);
    return stats.prefix_hit_tokens;
}

/* ---- Tests ---- */

/* Late, in the first chunk or a later one: computed again, and nothing else is ever shared. */
static void test_voided_rows_are_not_shared(void **state) {
    (void)state;
    for (uint32_t fails = 0; fails < 2; fails++) {
        world w;
        bd_metrics *metrics = bd_metrics_create(64);
        const bd_engine_options options = {
            .decode_delta = true, .prefix_cache = true, .metrics = metrics};
        open_world(&w, &options, 64, 5000);
        begin_load(&w, 0);
        fake_sleep_us(2000); /* past the plan's time to begin */
        assert_true(may_stream(&w));
        client *c = ask(&w, 0, 0, true, 3);
        wait_voided(&w, 1);           /* its rows lie in the KV as garbage */
        assert_false(may_stream(&w)); /* it was late: others wait outside */
        assert_int_equal(c->count, 0);
        end_load(&w, 0, fails ? BD_E_IO : BD_OK);
        wait_end(c);
        if (fails)
            check_failed(c);
        else
            check_right(&w, c);
        assert_int_equal(prefix_hits(&w), 0);
        client *next = ask(&w, 1, 0, false, 3);
        wait_end(next);
        check_right(&w, next);
        assert_int_equal(prefix_hits(&w), fails ? 0 : 32);
        client *third = ask(&w, 2, 0, false, 3);
        wait_end(third);
        check_right(&w, third);
        close_world(&w);
        bd_metrics_destroy(metrics);
    }
}

/* The load fails under the step: neither tokens nor KV of it are used; others in the step are. */
static void test_fails_under_a_step(void **state) {
    (void)state;
    world w;
    bd_metrics *metrics = bd_metrics_create(64);
    const bd_engine_options options = {
        .decode_delta = true, .prefix_cache = true, .metrics = metrics};
    open_world(&w, &options, 64, 20000000);
    begin_load(&w, 0);
    begin_load(&w, 1);
    client *a = ask(&w, 0, 0, true, 1), *b = ask(&w, 1, 1, true, 1),
           *base = ask(&w, 2, -1, false, 4);
    wait_gated(&w, 1);
    end_load(&w, 0, BD_E_CORRUPT);
    fake_sleep_us(3000);
    end_load(&w, 1, BD_OK);
    wait_end(a);
    wait_end(b);
    wait_end(base);
    check_failed(a);
    check_right(&w, b);
    check_right(&w, base);
    client *again = ask(&w, 0, 0, false, 5);
    wait_end(again);
    check_right(&w, again);
    assert_int_equal(prefix_hits(&w), 0);
    close_world(&w);
    bd_metrics_destroy(metrics);
}

/* Two loading variants in one step keep each other waiting: the patience of company is theirs. */
static void test_two_loading(void **state) {
    (void)state;
    world w;
    bd_metrics *metrics = bd_metrics_create(64);
    const bd_engine_options options = {.decode_delta = true, .metrics = metrics};
    open_world(&w, &options, 64, 2000000);
    atomic_store(&w.fake.hold_from, 1); /* until both are in the engine */
    w.fake.engine = w.engine;
    client *base = ask(&w, 2, -1, false, 1);
    while (atomic_load(&w.fake.steps) < 1)
        fake_sleep_us(500);
    begin_load(&w, 0);
    begin_load(&w, 1);
    client *a = ask(&w, 0, 0, true, 3), *b = ask(&w, 1, 1, true, 3);
    bd_engine_stats stats = {0};
    while (stats.running < 3) {
        fake_sleep_us(500);
        bd_engine_stats_get(w.engine, &stats);
    }
    atomic_store(&w.fake.hold_from, 0);
    wait_gated(&w, 1);
    end_load(&w, 1, BD_OK);
    fake_sleep_us(2000);
    end_load(&w, 0, BD_OK);
    wait_end(a);
    wait_end(b);
    wait_end(base);
    assert_int_equal(atomic_load(&w.most_loading), 2);
    assert_in_range(atomic_load(&w.most_patient_us), 1, 1000000);
    check_right(&w, a);
    check_right(&w, b);
    close_world(&w);
    bd_metrics_destroy(metrics);
}

/* A small KV cache, chunks of half a block, cancels, one token or many, with and without the delta
 * in decoding: loads that come late, fail, or end well. */
static void test_all_kinds(void **state) {
    (void)state;
    fake_rng rng = {fake_seed()};
    for (uint32_t round = 0; round < 60; round++) {
        static world w;
        bd_metrics *metrics = bd_metrics_create(64);
        const bd_engine_options options = {.decode_delta = fake_below(&rng, 2),
                                           .prefix_cache = fake_below(&rng, 2),
                                           .prefill_chunk_tokens = fake_below(&rng, 2) ? 11 : 0,
                                           .metrics = metrics};
        open_world(&w, &options, 14 + fake_below(&rng, 10), 1000 + fake_below(&rng, 20000));
        bool loading[VARIANTS], fails[VARIANTS], cancelled[CLIENTS];
        for (uint32_t v = 0; v < VARIANTS; v++) {
            loading[v] = fake_below(&rng, 3) > 0;
            fails[v] = loading[v] && fake_below(&rng, 3) == 0;
            if (loading[v]) begin_load(&w, v);
        }
        for (uint32_t i = 0; i < CLIENTS; i++) {
            const int32_t v = (int32_t)fake_below(&rng, VARIANTS + 1) - 1;
            const uint32_t tokens = fake_below(&rng, 2) ? 1 : 1 + fake_below(&rng, NEW_MAX);
            (void)ask(&w, i, v, v >= 0 && loading[v], tokens);
        }
        for (uint32_t v = 0; v < VARIANTS; v++) {
            if (!loading[v]) continue;
            fake_sleep_us(fake_below(&rng, 4000));
            while (atomic_load(&w.loads[v].ready_count) < COUNT && fake_below(&rng, 4) > 0)
                atomic_fetch_add(&w.loads[v].ready_count, 1);
            if (fails[v] && atomic_load(&w.loads[v].ready_count) == COUNT) fails[v] = false;
        }
        for (uint32_t i = 0; i < CLIENTS; i++) {
            cancelled[i] = fake_below(&rng, 5) == 0;
            if (cancelled[i]) atomic_store(&w.clients[i].cancel, true);
        }
        for (uint32_t v = 0; v < VARIANTS; v++)
            if (loading[v]) end_load(&w, v, fails[v] ? BD_E_IO : BD_OK);
        for (uint32_t i = 0; i < CLIENTS; i++) {
            client *c = &w.clients[i];
            const bd_variant *variant = c->options.lease.variant;
            wait_end(c);
            if (cancelled[i] && c->finish == BD_FINISH_CANCELLED) continue;
            if (variant && fails[variant - w.variants])
                check_failed(c);
            else
                check_right(&w, c);
        }
        close_world(&w);
        bd_metrics_destroy(metrics);
    }
}

/* The engine is full of what waits for a load: when it fails, who was refused gets the room, though
 * nothing else wakes the engine. */
static void test_fails_before_any_step(void **state) {
    (void)state;
    world w;
    bd_metrics *metrics = bd_metrics_create(64);
    const bd_engine_options options = {.decode_delta = true, .metrics = metrics};
    open_world(&w, &options, 8, 1000); /* blocks of one such request, not of two */
    w.loads[0].started_us = bd_now_us();
    client *first = ask(&w, 0, 0, true, 5), *second = ask(&w, 1, 0, true, 5);
    bd_engine_stats stats = {0};
    while (stats.running + stats.waiting < 2) {
        fake_sleep_us(500);
        bd_engine_stats_get(w.engine, &stats);
    }
    client *refused = ask(&w, 2, -1, false, 5);
    (void)may_stream(&w); /* two turns: in the first it may have come too late */
    (void)may_stream(&w);
    assert_true(atomic_load(&refused->wanted));
    end_load(&w, 0, BD_E_IO);
    wait_end(first);
    wait_end(second);
    wait_end(refused);
    check_failed(first);
    check_failed(second);
    check_right(&w, refused);
    close_world(&w);
    bd_metrics_destroy(metrics);
}

/* What a step waits at the gate is neither the device's time nor without an end. */
static void test_deadline(void **state) {
    (void)state;
    world w;
    bd_metrics *metrics = bd_metrics_create(64);
    const bd_engine_options options = {
        .decode_delta = true, .step_deadline_us = 400000, .metrics = metrics};
    open_world(&w, &options, 64, 60000000); /* planned waits far beyond the deadline */
    begin_load(&w, 0);
    const uint64_t before_us = bd_now_us();
    client *c = ask(&w, 0, 0, true, 2), *base = ask(&w, 1, -1, false, 1);
    wait_voided(&w, 1);
    assert_true(atomic_load(&w.waited_us) >= 190000);
    assert_true(atomic_load(&w.deadline_us) >= before_us + 400000 + atomic_load(&w.waited_us));
    end_load(&w, 0, BD_OK);
    wait_end(c);
    wait_end(base);
    check_right(&w, c);
    check_right(&w, base);
    assert_false(bd_engine_lost(w.engine));
    close_world(&w);
    bd_metrics_destroy(metrics);
}

/* The engine is told to end while a step waits for a layer that never comes. */
static void test_stop(void **state) {
    (void)state;
    world w;
    bd_metrics *metrics = bd_metrics_create(64);
    const bd_engine_options options = {.decode_delta = true, .metrics = metrics};
    open_world(&w, &options, 64, 100000);
    begin_load(&w, 0);
    client *c = ask(&w, 0, 0, true, 2);
    wait_gated(&w, 1);
    close_world(&w);
    assert_int_equal(c->finish, BD_FINISH_ERROR);
    assert_int_equal(c->error.status, BD_E_SHUTDOWN);
    assert_int_equal(c->count, 0);
    bd_metrics_destroy(metrics);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"voided rows are not shared", test_voided_rows_are_not_shared, NULL, NULL, NULL},
        {"fails under a step", test_fails_under_a_step, NULL, NULL, NULL},
        {"two loading", test_two_loading, NULL, NULL, NULL},
        {"all kinds", test_all_kinds, NULL, NULL, NULL},
        {"fails before any step", test_fails_before_any_step, NULL, NULL, NULL},
        {"deadline", test_deadline, NULL, NULL, NULL},
        {"stop", test_stop, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("engine_gate", tests, NULL, NULL);
}
