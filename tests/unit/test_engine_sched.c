/* test_engine_sched.c - the scheduler over a fake model: random arrivals, lengths, cancels and a KV
 * cache so small that preemption never stops. Every sequence must give exactly what it gives alone;
 * no block, lease or call may be left. */
#include <unistd.h>

#include "engine_fake.h"
#include "stopped_child.h"

/* The cache, as far as the engine knows it. */
bool bd_cache_poll(bd_cache *cache, uint64_t now_us) {
    (void)cache;
    (void)now_us;
    return false;
}

void bd_cache_release(bd_cache *cache, bd_lease *lease, uint64_t now_us) {
    (void)cache;
    (void)now_us;
    assert_true(atomic_fetch_sub(&lease->variant->leases, 1) > 0);
    memset(lease, 0, sizeof *lease);
}

enum { PROMPT_MAX = 90, NEW_MAX = 40, PAYERS = 4 };

typedef struct client { /* one sequence of the test, with all it was told */
    struct script *script;
    bd_sequence_options options;
    int32_t prompt[PROMPT_MAX];
    bd_logit_edit bias[3];
    int32_t stop_ids[2];
    bd_sequence *sequence;
    fake_run alone;
    uint64_t arrives_at_turn;
    uint32_t cancel_after, stop_after; /* tokens; UINT32_MAX: never */
    bool added, ended, cancel_sent;
    uint32_t got, prompt_got;
    bd_finish finish;
    int32_t stop_id;
    bd_status error;
} client;

typedef struct script {
    bd_engine *engine;
    fake_device *fake;
    client *clients;
    uint32_t count, ended;
    uint64_t turns;
    fake_rng rng;
    _Atomic bool over;
    _Atomic uint32_t wrong, closed;
    char first_wrong[200];
    bd_error closed_error;
    bool faults_expected;
    bd_payer payers[PAYERS];
    int64_t promised[PAYERS];
    uint64_t charged_prompt, charged_output;
} script;

static void wrong(script *s, const client *c, const char *what, uint32_t at) {
    if (atomic_fetch_add(&s->wrong, 1) == 0)
        snprintf(s->first_wrong, sizeof s->first_wrong, "client %u, %s at %u",
                 (unsigned)(c - s->clients), what, at);
}

static bool same_result(const bd_token_result *a, const bd_token_result *b) {
    if (a->id != b->id || a->logprob != b->logprob || a->rank != b->rank) return false;
    if (a->top_count != b->top_count) return false;
    for (uint32_t i = 0; i < a->top_count; i++)
        if (a->top_ids[i] != b->top_ids[i] || a->top_logprobs[i] != b->top_logprobs[i])
            return false;
    return true;
}

static bool on_token(void *ctx, const bd_token_result *token) {
    client *c = ctx;
    script *s = c->script;
    if (c->ended) wrong(s, c, "token after the end", c->got);
    if (c->got >= c->alone.count || !same_result(token, &c->alone.results[c->got]))
        wrong(s, c, "token", c->got);
    c->got++;
    if (c->got == c->cancel_after) {
        /* Somebody else's turn ends here now and then. */
        client *other = &s->clients[fake_below(&s->rng, s->count)];
        client *victim = fake_below(&s->rng, 3) == 0 && other->added && !other->ended ? other : c;
        victim->cancel_sent = true;
        bd_engine_cancel(s->engine, victim->sequence);
    }
    return c->got < c->stop_after;
}

static void on_prompt(void *ctx, uint32_t first, const bd_token_result *tokens, uint32_t count) {
    client *c = ctx;
    if (first != c->prompt_got + 1) wrong(c->script, c, "prompt position", first);
    for (uint32_t i = 0; i < count; i++)
        if (first + i >= c->options.prompt_tokens ||
            !same_result(&tokens[i], &c->alone.prompt[first + i]))
            wrong(c->script, c, "prompt log-probability", first + i);
    if (c->got > 0) wrong(c->script, c, "prompt after output", first);
    c->prompt_got += count;
}

static void on_end(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err) {
    client *c = ctx;
    if (c->ended) wrong(c->script, c, "second end", c->got);
    c->ended = true;
    c->finish = finish;
    c->stop_id = stop_id;
    if ((finish == BD_FINISH_ERROR) != (err != NULL)) wrong(c->script, c, "error detail", 0);
    c->error = err ? err->status : BD_OK;
    if (++c->script->ended == c->script->count) atomic_store(&c->script->over, true);
}

static const bd_sequence_sink sink = {on_token, on_prompt, on_end};

static void before_step(void *ctx, uint64_t now_us, bool cache_changed) {
    script *s = ctx;
    (void)now_us;
    (void)cache_changed;
    s->turns++;
    for (uint32_t i = 0; i < s->count; i++) {
        client *c = &s->clients[i];
        if (c->added || c->arrives_at_turn > s->turns) continue;
        bd_error err;
        struct bd_variant *variant = c->options.lease.variant;
        if (variant) atomic_fetch_add(&variant->leases, 1);
        bd_status status = bd_engine_add(s->engine, &c->options, &c->sequence, &err);
        if (status != BD_OK && variant) atomic_fetch_sub(&variant->leases, 1);
        if (status == BD_BUSY) return;
        if (status != BD_OK) wrong(s, c, bd_status_name(status), i);
        c->added = true;
    }
}

static uint64_t next_wake_us(void *ctx, uint64_t now_us) {
    script *s = ctx;
    for (uint32_t i = 0; i < s->count; i++)
        if (!s->clients[i].added) return now_us + 50;
    return UINT64_MAX;
}

static void on_charge(void *ctx, bd_payer *payer, int64_t promised, uint32_t prompt_tokens,
                      uint32_t output_tokens) {
    script *s = ctx;
    int64_t *open = &s->promised[payer - s->payers];
    *open += promised;
    if (*open < 0) wrong(s, s->clients, "more computed than promised", prompt_tokens);
    payer->counter += prompt_tokens + 2.0 * output_tokens;
    s->charged_prompt += prompt_tokens;
    s->charged_output += output_tokens;
}

static void on_closed(void *ctx, const bd_error *err) {
    script *s = ctx;
    s->closed_error = *err;
    atomic_fetch_add(&s->closed, 1);
    /* Those never added get no end(). */
    atomic_store(&s->over, true);
}

static void make_variants(struct bd_variant *variants, uint32_t count) {
    memset(variants, 0, count * sizeof *variants);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t word = i + 1;
        memcpy(variants[i].overlay.digest, &word, sizeof word);
    }
}

static float pick_float(fake_rng *rng, float a, float b) {
    return fake_below(rng, 3) == 0 ? a + (b - a) * (float)fake_below(rng, 100) / 100.0f : 0.0f;
}

static void make_client(script *s, client *c, struct bd_variant *variants, uint32_t variant_count,
                        bool decode_delta) {
    fake_rng *rng = &s->rng;
    memset(c, 0, sizeof *c);
    c->script = s;
    bd_sequence_options *o = &c->options;
    o->prompt = c->prompt;
    o->prompt_tokens = 1 + fake_below(rng, fake_below(rng, 3) == 0 ? PROMPT_MAX : 12);
    /* Few different beginnings, so that a prefix cache has something to find. */
    uint64_t beginning = fake_below(rng, 3);
    for (uint32_t i = 0; i < o->prompt_tokens; i++)
        c->prompt[i] = (int32_t)(i < 30 ? fake_mix(beginning * 100 + i) % FAKE_VOCAB
                                        : fake_below(rng, FAKE_VOCAB));
    o->max_new_tokens = fake_below(rng, 8) == 0 ? 0 : 1 + fake_below(rng, NEW_MAX);
    o->min_new_tokens = fake_below(rng, 3) == 0 ? fake_below(rng, o->max_new_tokens + 1) : 0;
    uint32_t v = fake_below(rng, variant_count + 1);
    if (v > 0) o->lease = (bd_lease){&variants[v - 1], &variants[v - 1].overlay, NULL};
    o->sampling = (bd_sampling){.temperature = fake_below(rng, 2) ? 1.0f : 0.0f,
                                .top_p = 1.0f,
                                .seed = fake_next(rng),
                                .choice = fake_below(rng, 4)};
    o->repetition_penalty = 1.0f + pick_float(rng, 0.1f, 1.0f);
    o->presence_penalty = pick_float(rng, -2.0f, 2.0f);
    o->frequency_penalty = pick_float(rng, -1.0f, 2.0f);
    o->bias_count = fake_below(rng, 4);
    for (uint32_t i = 0; i < o->bias_count; i++)
        c->bias[i] = (bd_logit_edit){(int32_t)(i * 17 + fake_below(rng, 17)), 1.0f,
                                     fake_below(rng, 3) ? pick_float(rng, -3.0f, 3.0f) : -INFINITY};
    o->bias = c->bias;
    o->stop_id_count = fake_below(rng, 3);
    for (uint32_t i = 0; i < o->stop_id_count; i++)
        c->stop_ids[i] = (int32_t)fake_below(rng, FAKE_VOCAB);
    o->stop_ids = c->stop_ids;
    o->logprobs = (int32_t)fake_below(rng, 7) - 1;
    o->prompt_logprobs = fake_below(rng, 4) == 0 ? (int32_t)fake_below(rng, 4) : -1;
    o->priority = fake_below(rng, 4) == 0 ? (int64_t)fake_below(rng, 5) - 2 : 0;
    o->sink = &sink;
    o->sink_ctx = c;
    c->arrives_at_turn = fake_below(rng, 200);
    c->cancel_after = fake_below(rng, 6) == 0 ? 1 + fake_below(rng, 20) : UINT32_MAX;
    c->stop_after = fake_below(rng, 6) == 0 ? 1 + fake_below(rng, 20) : UINT32_MAX;
    fake_alone(o, decode_delta, &c->alone);
}

/* From the first turn on, and to its end by length. */
static void make_plain(client *c, uint32_t prompt_tokens, uint32_t max_new_tokens) {
    c->options.prompt_tokens = prompt_tokens;
    c->options.max_new_tokens = max_new_tokens;
    c->options.stop_id_count = 0;
    c->options.prompt_logprobs = -1;
    c->options.min_new_tokens = 0;
    c->options.priority = 0;
    c->stop_after = c->cancel_after = UINT32_MAX;
    c->arrives_at_turn = 0;
    fake_alone(&c->options, true, &c->alone);
}

static bd_engine_options base_options(script *s) {
    bd_engine_options o = {
        .cache = (bd_cache *)s, /* not NULL, never looked into */
        .rows_max = 24,
        .prefill_chunk_tokens = 7,
        .seqs_max = 9,
        .variants_per_step_max = 3,
        .logits_rows_max = 10,
        .decode_delta = true,
        .hooks = {s, before_step, next_wake_us, on_closed, on_charge},
    };
    return o;
}

static void start(script *s, bd_engine_options *options, fake_device *fake) {
    bd_error err;
    s->fake = fake;
    assert_int_equal(bd_engine_create_on(options, &fake->device, &s->engine, &err), BD_OK);
    fake->engine = s->engine;
    assert_int_equal(bd_engine_start(s->engine, &err), BD_OK);
}

static void wait_over(script *s) {
    for (uint32_t i = 0; i < 60000 && !atomic_load(&s->over); i++)
        fake_sleep_us(1000);
    assert_true(atomic_load(&s->over));
}

/* This thread is bd-sched now and then. */
static void help_until_over(script *s) {
    for (uint32_t i = 0; i < 600000 && !atomic_load(&s->over); i++) {
        bd_engine_help(s->engine);
        fake_sleep_us(i % 8 == 0 ? 100 : 1);
    }
}

static void check_client(script *s, client *c) {
    const fake_run *alone = &c->alone;
    if (!c->ended) {
        wrong(s, c, "no end", 0);
        return;
    }
    if (c->cancel_sent && c->finish == BD_FINISH_CANCELLED) return;
    if (c->stop_after <= alone->count) {
        if (c->finish != BD_FINISH_STOP || c->got != c->stop_after) wrong(s, c, "stop", c->got);
        return;
    }
    if (c->cancel_sent) return; /* the last token was faster */
    if (c->finish != alone->finish) wrong(s, c, "finish", (uint32_t)c->finish);
    if (c->stop_id != alone->stop_id) wrong(s, c, "stop id", (uint32_t)c->stop_id);
    if (c->got != alone->count) wrong(s, c, "count", c->got);
    uint32_t prompts = c->options.prompt_logprobs >= 0 ? c->options.prompt_tokens - 1 : 0;
    if (c->prompt_got != prompts) wrong(s, c, "prompt count", c->prompt_got);
}

/* A fault that is part of the test names itself. */
static void check_clean(script *s, struct bd_variant *variants, uint32_t variant_count) {
    bd_engine_stats stats;
    bd_engine_stop(s->engine);
    bd_engine_stats_get(s->engine, &stats);
    assert_int_equal(stats.kv_blocks_used, 0);
    assert_int_equal(stats.running, 0);
    assert_int_equal(stats.waiting, 0);
    assert_int_equal(s->closed, 1);
    for (uint32_t i = 0; i < variant_count; i++)
        assert_int_equal(variants[i].leases, 0);
    for (uint32_t i = 0; i < PAYERS; i++)
        assert_int_equal(s->promised[i], 0);
    assert_true(s->charged_prompt <= stats.prompt_tokens);
    assert_true(s->charged_output <= stats.generated_tokens);
    if (s->fake->faults > 0) fail_msg("%s", s->fake->fault);
    if (s->wrong > 0) fail_msg("%u wrong: %s", s->wrong, s->first_wrong);
    bd_engine_destroy(s->engine);
    fake_device_deinit(s->fake);
}

/* unpolled: all is there from the start and no clock wakes the loop, so that it has to see by
 * itself whether there is more to do. */
static void run_random(uint64_t seed, bool prefix_cache, bool decode_delta, bool unpolled) {
    enum { CLIENTS = 120, VARIANTS = 7 };
    struct bd_variant variants[VARIANTS];
    script s = {.count = CLIENTS, .rng = {seed}};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    options.decode_delta = decode_delta;
    options.prefix_cache = prefix_cache;
    options.rows_max = 1 + fake_below(&s.rng, 40);
    options.seqs_max = 1 + fake_below(&s.rng, 14);
    options.logits_rows_max = 1 + fake_below(&s.rng, 20);
    options.prefill_chunk_tokens = fake_below(&s.rng, 20);
    options.tile_rows = fake_below(&s.rng, 2) * fake_below(&s.rng, 24);
    options.variants_per_step_max = 1 + fake_below(&s.rng, 5);
    uint32_t block_tokens = 1u << fake_below(&s.rng, 5);
    uint32_t least_blocks = (PROMPT_MAX + NEW_MAX) / block_tokens + 1;
    fake_device_init(&fake, &options, least_blocks + fake_below(&s.rng, least_blocks), block_tokens,
                     seed);
    fake.delay_us_max = fake_below(&s.rng, 2) * 100;
    make_variants(variants, VARIANTS);
    s.clients = calloc(CLIENTS, sizeof *s.clients);
    assert_non_null(s.clients);
    for (uint32_t i = 0; i < CLIENTS; i++)
        make_client(&s, &s.clients[i], variants, VARIANTS, decode_delta);
    for (uint32_t i = 0; i < CLIENTS && unpolled; i++)
        s.clients[i].arrives_at_turn = 0;
    const uint32_t payers = fake_below(&s.rng, 2) * fake_below(&s.rng, PAYERS + 1);
    for (uint32_t i = 0; i < PAYERS; i++)
        s.payers[i] = (bd_payer){.id = i};
    for (uint32_t i = 0; i < CLIENTS && payers > 0; i++)
        s.clients[i].options.payer = &s.payers[fake_below(&s.rng, payers)];
    if (unpolled) options.hooks.next_wake_us = NULL;
    const bool helped = fake_below(&s.rng, 2) == 0;
    start(&s, &options, &fake);
    if (helped) help_until_over(&s);
    wait_over(&s);
    bd_engine_stats stats;
    bd_engine_stats_get(s.engine, &stats);
    printf("  steps %llu, preemptions %llu, prefix %llu of %llu\n", (unsigned long long)stats.steps,
           (unsigned long long)stats.preemptions, (unsigned long long)stats.prefix_hit_tokens,
           (unsigned long long)stats.prefix_query_tokens);
    for (uint32_t i = 0; i < CLIENTS; i++)
        check_client(&s, &s.clients[i]);
    check_clean(&s, variants, VARIANTS);
    if (payers > 0) assert_int_equal(s.charged_output, stats.generated_tokens);
    if (payers > 0 && stats.preemptions == 0)
        assert_int_equal(s.charged_prompt, stats.prompt_tokens);
    free(s.clients);
}

static void test_random(void **state) {
    (void)state;
    uint64_t seed = fake_seed();
    for (uint32_t round = 0; round < 24; round++)
        run_random(fake_mix(seed + round), round % 2 == 1, round % 3 != 2, false);
}

static void test_random_unpolled(void **state) {
    (void)state;
    uint64_t seed = fake_seed();
    for (uint32_t round = 0; round < 24; round++)
        run_random(fake_mix(seed + round), round % 2 == 1, round % 3 != 2, true);
}

/* A sequence is preempted while the base decodes for it, and another's prompt begins with all that
 * it has: the blocks of that prompt were computed by the variant and are not its own. */
static void test_prefix_beyond_prompt(void **state) {
    (void)state;
    run_random(fake_mix(102653283537969u + 11u), true, false, true);
}

/* Sequences that ask nothing of the model end without a step, and make room for those behind. One
 * in `every` runs, and needs all of the KV. */
static void run_idle(uint32_t every) {
    enum { CLIENTS = 50, VARIANTS = 2 };
    struct bd_variant variants[VARIANTS];
    script s = {.count = CLIENTS, .rng = {fake_seed()}};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    options.seqs_max = 2;
    options.hooks.next_wake_us = NULL;
    fake_device_init(&fake, &options, 4, 4, 1);
    make_variants(variants, VARIANTS);
    s.clients = calloc(CLIENTS, sizeof *s.clients);
    assert_non_null(s.clients);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        make_client(&s, &s.clients[i], variants, VARIANTS, true);
        bool runs = every > 0 && i % every == every - 1;
        make_plain(&s.clients[i], runs ? 14 : 5, runs ? 3 : 0);
    }
    start(&s, &options, &fake);
    wait_over(&s);
    for (uint32_t i = 0; i < CLIENTS; i++)
        check_client(&s, &s.clients[i]);
    check_clean(&s, variants, VARIANTS);
    free(s.clients);
}

static void test_idle(void **state) {
    (void)state;
    run_idle(0);
}

static void test_idle_before_waiting(void **state) {
    (void)state;
    run_idle(2);
    run_idle(3);
}

/* The only sequence of the step's only variant finds no block and gives way: the other variant's
 * runs then. */
static void test_chosen_gives_way(void **state) {
    (void)state;
    enum { CLIENTS = 2, VARIANTS = 2 };
    struct bd_variant variants[VARIANTS];
    script s = {.count = CLIENTS, .rng = {fake_seed()}};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    options.variants_per_step_max = 1;
    options.hooks.next_wake_us = NULL;
    fake_device_init(&fake, &options, 4, 4, 1);
    make_variants(variants, VARIANTS);
    s.clients = calloc(CLIENTS, sizeof *s.clients);
    assert_non_null(s.clients);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        make_client(&s, &s.clients[i], variants, VARIANTS, true);
        s.clients[i].options.lease = (bd_lease){&variants[i], &variants[i].overlay, NULL};
        make_plain(&s.clients[i], i == 0 ? 1 : 5, i == 0 ? 10 : 8);
    }
    start(&s, &options, &fake);
    wait_over(&s);
    bd_engine_stats stats;
    bd_engine_stats_get(s.engine, &stats);
    assert_true(stats.preemptions > 0);
    for (uint32_t i = 0; i < CLIENTS; i++)
        check_client(&s, &s.clients[i]);
    check_clean(&s, variants, VARIANTS);
    free(s.clients);
}

/* Twenty variants of two sequences each, four per step: nobody waits more than a full rotation. */
static void test_rotation(void **state) {
    (void)state;
    enum { VARIANTS = 20, CLIENTS = 40 };
    struct bd_variant variants[VARIANTS];
    script s = {.count = CLIENTS, .rng = {fake_seed()}};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    options.rows_max = 100;
    options.seqs_max = CLIENTS;
    options.logits_rows_max = CLIENTS;
    options.variants_per_step_max = 4;
    options.prefill_chunk_tokens = 0;
    fake_device_init(&fake, &options, 1000, 4, 1);
    make_variants(variants, VARIANTS);
    s.clients = calloc(CLIENTS, sizeof *s.clients);
    assert_non_null(s.clients);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        client *c = &s.clients[i];
        make_client(&s, c, variants, VARIANTS, true);
        c->options.lease =
            (bd_lease){&variants[i % VARIANTS], &variants[i % VARIANTS].overlay, NULL};
        make_plain(c, 3, 30);
    }
    start(&s, &options, &fake);
    wait_over(&s);
    for (uint32_t i = 0; i < CLIENTS; i++)
        check_client(&s, &s.clients[i]);
    assert_int_equal(fake.variants_seen_max, 4);
    assert_true(fake.longest_gap <= VARIANTS / 4);
    for (uint32_t i = 0; i < VARIANTS; i++)
        assert_int_equal(fake.served[i], 30);
    check_clean(&s, variants, VARIANTS);
    free(s.clients);
}

/* By then much is running and much is still to come: the first clients have a token a step at most,
 * and half of theirs left. */
enum { HELD_STEP = NEW_MAX / 2, STEADY = 8 };

typedef enum trouble {
    TROUBLE_STOP,
    TROUBLE_LOST,
    TROUBLE_HANG,
    TROUBLE_STEP,
    TROUBLE_NAN
} trouble;

static void make_trouble(script *s, fake_device *fake, trouble kind) {
    while (atomic_load(&fake->steps) < HELD_STEP)
        fake_sleep_us(500);
    if (kind == TROUBLE_LOST) atomic_store(&fake->lose_device, true);
    if (kind == TROUBLE_HANG) atomic_store(&fake->hang, true);
    if (kind == TROUBLE_STEP) atomic_store(&fake->fail_step, true);
    if (kind == TROUBLE_STOP) bd_engine_stop(s->engine);
    atomic_store(&fake->hold_from, 0);
    wait_over(s);
}

static void check_trouble(script *s, trouble kind) {
    static const bd_status expected[] = {BD_E_SHUTDOWN, BD_E_DEVICE, BD_E_DEVICE, BD_E_INTERNAL,
                                         BD_E_INTERNAL};
    uint32_t failed = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        client *c = &s->clients[i];
        if (!c->added) continue;
        assert_true(c->ended);
        if (c->finish != BD_FINISH_ERROR)
            check_client(s, c);
        else if (c->error != expected[kind])
            wrong(s, c, "error", (uint32_t)c->error);
        if (c->finish == BD_FINISH_ERROR) failed++;
    }
    assert_true(failed > 0);
    bool lost = kind == TROUBLE_LOST || kind == TROUBLE_HANG;
    assert_int_equal(bd_engine_lost(s->engine), lost);
    if (lost) assert_int_equal(s->closed_error.status, BD_E_DEVICE);
    if (kind == TROUBLE_STEP || kind == TROUBLE_NAN) assert_true(failed < s->count);
}

static void run_trouble(trouble kind) {
    enum { CLIENTS = 60, VARIANTS = 5 };
    struct bd_variant variants[VARIANTS];
    script s = {.count = CLIENTS, .rng = {fake_seed()}};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    options.step_deadline_us = kind == TROUBLE_HANG ? 50000 : 0;
    fake_device_init(&fake, &options, 60, 4, 1);
    fake.nan_token = 7;
    if (kind == TROUBLE_NAN) atomic_store(&fake.nan, true);
    make_variants(variants, VARIANTS);
    s.clients = calloc(CLIENTS, sizeof *s.clients);
    assert_non_null(s.clients);
    for (uint32_t i = 0; i < CLIENTS; i++)
        make_client(&s, &s.clients[i], variants, VARIANTS, true);
    for (uint32_t i = 0; i < STEADY; i++)
        make_plain(&s.clients[i], 3, NEW_MAX);
    atomic_store(&fake.hold_from, HELD_STEP);
    start(&s, &options, &fake);
    make_trouble(&s, &fake, kind);
    if (kind == TROUBLE_HANG) atomic_store(&fake.hang, false); /* the device comes back too late */
    bd_engine_stop(s.engine);
    check_trouble(&s, kind);
    check_clean(&s, variants, VARIANTS);
    free(s.clients);
}

static void test_stop_with_work(void **state) {
    (void)state;
    run_trouble(TROUBLE_STOP);
}

static void test_device_lost(void **state) {
    (void)state;
    run_trouble(TROUBLE_LOST);
}

static void test_device_hangs(void **state) {
    (void)state;
    run_trouble(TROUBLE_HANG);
}

/* ---- The process is stopped while a step is launched, for longer than a step may take ---- */

enum { SLOW_DEADLINE_US = 4000000, STOPPED_S = 9 };

static struct { /* the child's */
    int here, go;
    bool asked;
} paused;

static bd_status forward_when_told(void *ctx, const bd_step *step, bd_stream_gate *gate,
                                   bd_error *err) {
    char byte;
    if (!paused.asked) {
        paused.asked = true;
        if (write(paused.here, "", 1) != 1 || read(paused.go, &byte, 1) != 1)
            return bd_fail(err, BD_E_INTERNAL, "planted", "the other end is gone");
    }
    return fake_forward(ctx, step, gate, err);
}

static bd_status wait_or_lose(void *ctx, const bd_step *step, uint64_t deadline_us,
                              bd_token_result *results, bd_error *err) {
    if (bd_now_us() >= deadline_us)
        return bd_fail(err, BD_E_DEVICE, "planted", "the deadline is over");
    return fake_wait(ctx, step, deadline_us, results, err);
}

/* Exit status 0: the sequence got all its tokens. */
static int run_paused(int here, int go) {
    paused.here = here;
    paused.go = go;
    static const bd_executor_ops ops = {.forward = forward_when_told, .wait = wait_or_lose};
    static client c;
    script s = {.count = 1, .clients = &c, .rng = {1}};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    options.step_deadline_us = SLOW_DEADLINE_US;
    fake_device_init(&fake, &options, 60, 4, 1);
    fake.device.ops = &ops;
    make_client(&s, &c, NULL, 0, true);
    make_plain(&c, 3, 5);
    start(&s, &options, &fake);
    wait_over(&s);
    check_client(&s, &c);
    if (c.finish == BD_FINISH_ERROR) (void)fprintf(stderr, "%s\n", s.closed_error.message);
    return bd_engine_lost(s.engine) ? 2 : s.wrong > 0;
}

static void test_paused(void **state) {
    (void)state;
    stopped_child(run_paused, STOPPED_S);
}

static void test_step_fails(void **state) {
    (void)state;
    run_trouble(TROUBLE_STEP);
}

static void test_nan(void **state) {
    (void)state;
    run_trouble(TROUBLE_NAN);
}

typedef struct counted_call {
    bd_call call;
    _Atomic uint32_t *runs;
    bool on_thread;
} counted_call;

static void count_run(bd_call *call, bd_engine *engine) {
    counted_call *counted = (counted_call *)call;
    counted->on_thread = bd_engine_on_thread(engine);
    atomic_fetch_add(counted->runs, 1);
}

/* Calls run exactly once: before start, while running, after stop, from several threads. */
typedef struct poster {
    bd_engine *engine;
    counted_call calls[500];
} poster;

static void *post_all(void *arg) {
    poster *p = arg;
    for (uint32_t i = 0; i < 500; i++)
        bd_engine_post(p->engine, &p->calls[i].call);
    return NULL;
}

static void test_calls(void **state) {
    (void)state;
    script s = {.count = 0};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    fake_device_init(&fake, &options, 10, 4, 1);
    bd_error err;
    assert_int_equal(bd_engine_create_on(&options, &fake.device, &s.engine, &err), BD_OK);
    poster *posters = calloc(3, sizeof *posters);
    pthread_t threads[3];
    _Atomic uint32_t runs = 0;
    for (uint32_t t = 0; t < 3; t++) {
        posters[t].engine = s.engine;
        for (uint32_t i = 0; i < 500; i++)
            posters[t].calls[i] = (counted_call){.call.run = count_run, .runs = &runs};
        assert_int_equal(pthread_create(&threads[t], NULL, post_all, &posters[t]), 0);
        if (t == 0) assert_int_equal(bd_engine_start(s.engine, &err), BD_OK);
    }
    bd_engine_stop(s.engine);
    for (uint32_t t = 0; t < 3; t++)
        pthread_join(threads[t], NULL);
    counted_call last = {.call.run = count_run, .runs = &runs};
    bd_engine_post(s.engine, &last.call);
    assert_int_equal(runs, 1501);
    assert_true(last.on_thread);
    for (uint32_t t = 0; t < 3; t++)
        for (uint32_t i = 0; i < 500; i++)
            assert_true(posters[t].calls[i].on_thread);
    bd_sequence *sequence;
    const int32_t prompt[1] = {1};
    bd_sequence_options o = {
        .prompt = prompt, .prompt_tokens = 1, .max_new_tokens = 1, .sink = &sink};
    assert_int_equal(bd_engine_add(s.engine, &o, &sequence, &err), BD_E_SHUTDOWN);
    bd_engine_destroy(s.engine);
    fake_device_deinit(&fake);
    free(posters);
}

static void test_limits(void **state) {
    (void)state;
    script s = {.count = 2};
    fake_device fake;
    bd_engine_options options = base_options(&s);
    fake_device_init(&fake, &options, 4, 4, 1); /* 16 tokens of KV, a context of 512 */
    bd_error err;
    assert_int_equal(bd_engine_create_on(&options, &fake.device, &s.engine, &err), BD_OK);
    bd_sequence *sequence = NULL;
    const int32_t prompt[600] = {1};
    client c[2] = {{.script = &s}, {.script = &s}};
    bd_sequence_options o = {
        .prompt = prompt, .sink = &sink, .sink_ctx = &c[0], .prompt_logprobs = -1};
    assert_int_equal(bd_engine_add(s.engine, &o, &sequence, &err), BD_E_ARGUMENT);
    o.prompt_tokens = 10;
    o.max_new_tokens = 8; /* 17 need KV */
    assert_int_equal(bd_engine_add(s.engine, &o, &sequence, &err), BD_E_LIMIT);
    assert_null(sequence);
    o.prompt_tokens = 500;
    o.max_new_tokens = 13;
    assert_int_equal(bd_engine_add(s.engine, &o, &sequence, &err), BD_E_LIMIT);
    assert_non_null(strstr(err.message, "513"));
    o.prompt_tokens = 10;
    o.max_new_tokens = 7;
    assert_int_equal(bd_engine_add(s.engine, &o, &sequence, &err), BD_OK);
    o.prompt_tokens = 9; /* waits for KV */
    o.sink_ctx = &c[1];
    assert_int_equal(bd_engine_add(s.engine, &o, &sequence, &err), BD_OK);
    assert_int_equal(bd_engine_add(s.engine, &o, &sequence, &err), BD_BUSY);
    options.rows_max = 0;
    bd_engine *other;
    assert_int_equal(bd_engine_create_on(&options, &fake.device, &other, &err), BD_E_ARGUMENT);
    bd_engine_stop(s.engine); /* never started: its two sequences end all the same */
    assert_int_equal(s.ended, 2);
    assert_int_equal(s.wrong, 0);
    assert_int_equal(c[0].error, BD_E_SHUTDOWN);
    bd_engine_destroy(s.engine);
    fake_device_deinit(&fake);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_rotation),
        cmocka_unit_test(test_idle),
        cmocka_unit_test(test_idle_before_waiting),
        cmocka_unit_test(test_chosen_gives_way),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_random_unpolled),
        cmocka_unit_test(test_prefix_beyond_prompt),
        cmocka_unit_test(test_stop_with_work),
        cmocka_unit_test(test_device_lost),
        cmocka_unit_test(test_device_hangs),
        cmocka_unit_test(test_paused),
        cmocka_unit_test(test_step_fails),
        cmocka_unit_test(test_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
