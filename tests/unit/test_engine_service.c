/* test_engine_service.c - who comes first when sequences have different payers: for KV, for rows of
 * a step, for variants of a step; and what the payers are charged. */
#include "engine_fake.h"

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

enum { CLIENTS_MAX = 16, PROMPT_MAX = 200, PAYERS = 3 };

typedef struct client {
    struct script *script;
    bd_sequence_options options;
    int32_t prompt[PROMPT_MAX];
    bd_status added;                  /* what bd_engine_add said; asked again while BD_BUSY */
    bool gone;                        /* added, or never will be */
    uint32_t after;                   /* only when this client has ended; CLIENTS_MAX: at once */
    uint32_t refused;                 /* BD_BUSY */
    uint32_t got, began_at, ended_at; /* places in the order of first tokens and of ends */
    uint32_t others_at_end;           /* tokens that the other payer's clients had by then */
} client;

typedef struct script {
    bd_engine *engine;
    client clients[CLIENTS_MAX];
    uint32_t count, began, ended;
    struct bd_variant variants[4];
    bd_payer payers[PAYERS];
    uint32_t counting; /* so many payers' counters go by what they are charged */
    int64_t promised[PAYERS];
    uint64_t prompt_tokens[PAYERS], output_tokens[PAYERS];
    _Atomic bool over;
    fake_device fake;
    bd_engine_options options;
} script;

static bool on_token(void *ctx, const bd_token_result *token) {
    client *c = ctx;
    (void)token;
    if (c->got++ == 0) c->began_at = ++c->script->began;
    return true;
}

static void on_end(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err) {
    client *c = ctx;
    script *s = c->script;
    (void)stop_id;
    (void)err;
    if (finish != BD_FINISH_LENGTH) fake_fault(&s->fake, "finish", (uint64_t)finish, 0);
    for (uint32_t i = 0; i < s->count; i++)
        if (s->clients[i].options.payer != c->options.payer) c->others_at_end += s->clients[i].got;
    c->ended_at = ++s->ended;
    if (s->ended == s->count) atomic_store(&s->over, true);
}

static const bd_sequence_sink sink = {.token = on_token, .end = on_end};

static void before_step(void *ctx, uint64_t now_us, bool cache_changed) {
    script *s = ctx;
    (void)now_us;
    (void)cache_changed;
    for (uint32_t i = 0; i < s->count; i++) {
        client *c = &s->clients[i];
        bd_sequence *sequence;
        bd_error err;
        if (c->gone || (c->after < CLIENTS_MAX && s->clients[c->after].ended_at == 0)) continue;
        struct bd_variant *variant = c->options.lease.variant;
        if (variant) atomic_fetch_add(&variant->leases, 1);
        c->added = bd_engine_add(s->engine, &c->options, &sequence, &err);
        if (variant && c->added != BD_OK) atomic_fetch_sub(&variant->leases, 1);
        if (c->added == BD_BUSY)
            c->refused++;
        else
            c->gone = true;
    }
}

static void on_charge(void *ctx, bd_payer *payer, int64_t promised, uint32_t prompt_tokens,
                      uint32_t output_tokens) {
    script *s = ctx;
    const size_t at = (size_t)(payer - s->payers);
    s->promised[at] += promised;
    if (s->promised[at] < 0) fake_fault(&s->fake, "promised", at, prompt_tokens);
    s->prompt_tokens[at] += prompt_tokens;
    s->output_tokens[at] += output_tokens;
    if (at < s->counting) payer->counter += prompt_tokens + 2.0 * output_tokens;
}

static void set_up(script *s, uint32_t block_count) {
    memset(s, 0, sizeof *s);
    s->options =
        (bd_engine_options){.cache = (bd_cache *)s, /* not NULL, never looked into */
                            .rows_max = 64,
                            .prefill_chunk_tokens = 8,
                            .seqs_max = 12,
                            .variants_per_step_max = 4,
                            .logits_rows_max = 16,
                            .decode_delta = true,
                            .hooks = {.ctx = s, .before_step = before_step, .charge = on_charge}};
    fake_device_init(&s->fake, &s->options, block_count, 4, 1);
    for (uint32_t i = 0; i < PAYERS; i++)
        s->payers[i].id = i;
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t word = i + 1;
        memcpy(s->variants[i].overlay.digest, &word, sizeof word);
    }
}

/* variant 0: the base */
static client *add(script *s, uint32_t payer, uint32_t variant, uint32_t prompt, uint32_t output) {
    client *c = &s->clients[s->count];
    c->script = s;
    c->after = CLIENTS_MAX;
    for (uint32_t i = 0; i < prompt; i++)
        c->prompt[i] = (int32_t)(fake_mix(s->count * 1000 + i) % FAKE_VOCAB);
    c->options = (bd_sequence_options){.prompt = c->prompt,
                                       .prompt_tokens = prompt,
                                       .max_new_tokens = output,
                                       .tenant = payer,
                                       .payer = &s->payers[payer],
                                       .sampling = {.temperature = 1.0f, .top_p = 1.0f},
                                       .logprobs = -1,
                                       .prompt_logprobs = -1,
                                       .sink = &sink,
                                       .sink_ctx = c};
    if (variant > 0)
        c->options.lease =
            (bd_lease){&s->variants[variant - 1], &s->variants[variant - 1].overlay, NULL};
    s->count++;
    return c;
}

static void run(script *s, bd_engine_stats *stats) {
    bd_error err;
    assert_int_equal(bd_engine_create_on(&s->options, &s->fake.device, &s->engine, &err), BD_OK);
    s->fake.engine = s->engine;
    assert_int_equal(bd_engine_start(s->engine, &err), BD_OK);
    for (uint32_t i = 0; i < 60000 && !atomic_load(&s->over); i++)
        fake_sleep_us(1000);
    assert_true(atomic_load(&s->over));
    bd_engine_stop(s->engine);
    bd_engine_stats_get(s->engine, stats);
    bd_engine_destroy(s->engine);
    if (s->fake.faults > 0) fail_msg("%s", s->fake.fault);
    for (uint32_t i = 0; i < PAYERS; i++)
        assert_int_equal(s->promised[i], 0);
    fake_device_deinit(&s->fake);
}

/* Two grow in KV for one and a half: the one that was served more gives way, old as it is. */
static void test_gives_way(void **state) {
    (void)state;
    for (uint32_t served = 0; served < 2; served++) {
        script s;
        bd_engine_stats stats;
        set_up(&s, 15);
        s.payers[served].counter = 1000.0;
        add(&s, 0, 0, 8, 32);
        add(&s, 1, 0, 8, 32);
        run(&s, &stats);
        assert_true(stats.preemptions > 0);
        assert_int_equal(s.clients[served].ended_at, 2);
        /* What is computed a second time is charged once. */
        assert_true(stats.prompt_tokens > 16);
        for (uint32_t i = 0; i < 2; i++) {
            assert_int_equal(s.prompt_tokens[i], 8);
            assert_int_equal(s.output_tokens[i], 32);
        }
    }
}

/* Prompts of 200 in steps of 8 rows: first all of the least served, priority or not; within a payer
 * by priority, then as they came. */
static void test_rows(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.rows_max = s.options.logits_rows_max = 8;
    s.payers[0].counter = 7.0;
    add(&s, 0, 0, 200, 1)->options.priority = -5;
    add(&s, 1, 0, 200, 1);
    add(&s, 1, 0, 200, 1);
    add(&s, 1, 0, 200, 1)->options.priority = -1;
    add(&s, 0, 0, 200, 1)->options.priority = -6;
    run(&s, &stats);
    static const uint32_t order[] = {5, 2, 3, 1, 4};
    for (uint32_t i = 0; i < s.count; i++)
        assert_int_equal(s.clients[i].began_at, order[i]);
}

/* The order follows the counters: payer 0 comes first until it has been served more than payer 1
 * had been at the start, for KV and for rows. */
static void test_crossing(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 15);
    s.counting = 1;
    s.payers[1].counter = 30.0;
    add(&s, 0, 0, 8, 32);
    add(&s, 1, 0, 8, 32);
    run(&s, &stats);
    assert_true(stats.preemptions > 0);
    assert_int_equal(s.clients[0].ended_at, 2);

    set_up(&s, 400);
    s.options.rows_max = s.options.logits_rows_max = 8;
    s.counting = 1;
    s.payers[1].counter = 50.0;
    for (uint32_t i = 0; i < 8; i++)
        add(&s, i % 2, 0, 100, 1);
    run(&s, &stats);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(s.clients[i].began_at, 1 + i / 2 + (i % 2 == 0 ? 4 : 0));
}

/* Equal counters: never a mixture by priority, whoever has them. */
static void test_equal(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.rows_max = s.options.logits_rows_max = 8;
    add(&s, 1, 0, 100, 1)->options.priority = -5;
    add(&s, 0, 0, 100, 1)->options.priority = 5;
    add(&s, 1, 0, 100, 1)->options.priority = -7;
    add(&s, 0, 0, 100, 1);
    run(&s, &stats);
    static const uint32_t order[] = {4, 2, 3, 1};
    for (uint32_t i = 0; i < s.count; i++)
        assert_int_equal(s.clients[i].began_at, order[i]);
}

/* One variant a step, three payers' variants against one: by tokens, not by variants. */
static void test_variants(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.variants_per_step_max = 1;
    s.counting = PAYERS;
    for (uint32_t i = 0; i < 3; i++)
        add(&s, 0, 1 + i, 4, 60);
    client *single = add(&s, 1, 4, 4, 60);
    run(&s, &stats);
    assert_in_range(single->others_at_end, 50, 62); /* the prompts count too: 8 tokens more */
    assert_int_equal(s.output_tokens[0], 180);
    assert_int_equal(s.output_tokens[1], 60);
}

/* What is left of a step after the prompt of best claim goes to its own variant before others. */
static void test_company(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.rows_max = 16;
    static const uint32_t variants[] = {1, 2, 1, 0, 2, 0}, order[] = {1, 3, 2, 5, 4, 6};
    for (uint32_t i = 0; i < 6; i++)
        add(&s, 0, variants[i], 8, 1);
    run(&s, &stats);
    assert_int_equal(stats.steps, 3);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(s.clients[i].began_at, order[i]);

    /* One served less is first all the same. */
    set_up(&s, 400);
    s.options.rows_max = 16;
    s.payers[0].counter = 5.0;
    for (uint32_t i = 0; i < 3; i++)
        add(&s, 0, 1, 8, 1);
    client *first = add(&s, 1, 2, 8, 1);
    run(&s, &stats);
    assert_in_range(first->began_at, 1, 2); /* with another of its step */
    assert_int_equal(stats.steps, 2);
}

/* A prompt is passed eight times, whoever has the prompts behind it, and then waits for none of
 * them, however long it is. */
static void test_passed_enough(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        script s;
        bd_engine_stats stats;
        set_up(&s, 400);
        s.options.rows_max = s.options.seqs_max = 16;
        s.payers[1].counter = 5.0;
        s.payers[2].counter = 10.0;
        add(&s, 0, 1, 200, 1); /* half of each step while others want the rest */
        client *passed = add(&s, i % 2, 2, i < 2 ? 8 : 24, 1);
        while (s.count < CLIENTS_MAX)
            add(&s, i % 2 * 2, 1, 8, 1);
        uint32_t tokens = 0;
        for (uint32_t c = 0; c < s.count; c++)
            tokens += s.clients[c].options.prompt_tokens;
        run(&s, &stats);
        assert_int_equal(passed->began_at, 9);
        assert_int_equal(stats.steps, (tokens + 15) / 16);
    }

    /* A row a step is what is left: not worth it at first. */
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.rows_max = 16;
    s.options.prefill_chunk_tokens = 15;
    add(&s, 0, 1, 195, 1);
    add(&s, 0, 2, 5, 1);
    run(&s, &stats);
    assert_int_equal(stats.steps, 13);
}

/* A long prompt leaves others their part of a step; one that ends in it has what it needs, and what
 * nobody else takes is a long one's too. */
static void test_shares(void **state) {
    (void)state;
    static const struct {
        uint32_t prompts[3], began[3], steps;
    } cases[] = {
        {{200, 0, 0}, {1}, 4},          /* all of each step */
        {{60, 60, 0}, {1, 2}, 2},       /* first come */
        {{200, 20, 30}, {3, 1, 2}, 4},  /* 14 beside those behind it, which do not wait */
        {{200, 40, 200}, {2, 1, 3}, 7}, /* by 32; the first ends in the sixth with 40 */
        {{70, 50, 0}, {2, 1}, 2},       /* 14 and 50, 56 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        script s;
        bd_engine_stats stats;
        set_up(&s, 400);
        s.options.prefill_chunk_tokens = i == 3 ? 32 : 8;
        for (uint32_t c = 0; c < 3 && cases[i].prompts[c]; c++)
            add(&s, 0, 1, cases[i].prompts[c], 1);
        run(&s, &stats);
        for (uint32_t c = 0; c < s.count; c++)
            if (s.clients[c].began_at != cases[i].began[c])
                fail_msg("case %zu: prompt %u began as number %u", i, c, s.clients[c].began_at);
        if (stats.steps != cases[i].steps) fail_msg("case %zu: %u steps", i, (unsigned)stats.steps);
    }
}

/* Steps of 64 rows. Rows of one variant, whoever's they are, make whole tiles where a prompt goes
 * on; a rest of half a tile and more is one too, and no prompt waits for a tile that no step has.
 */
static void test_tiles(void **state) {
    (void)state;
    static const struct {
        uint32_t rows, tile, variants[2], prompts[2], steps;
    } cases[] = {
        {64, 0, {1, 2}, {43, 85}, 2},   /* 21 and 64 */
        {64, 16, {1, 2}, {43, 85}, 3},  /* 16, 64, 5 */
        {64, 16, {1, 2}, {40, 88}, 2},  /* 24 and 64 */
        {64, 16, {1, 1}, {9, 119}, 2},  /* 9 + 55 are four tiles */
        {64, 16, {1, 2}, {9, 119}, 3},  /* 48, 64, 7 */
        {60, 128, {1, 1}, {120, 0}, 2}, /* all of each step */
        {70, 0, {1, 1}, {64, 76}, 2},   /* 6 and 70 */
        {70, 16, {1, 1}, {64, 76}, 3},  /* none, since 6 begin a tile; 64, 12 */
        {70, 16, {1, 1}, {62, 72}, 2},  /* 2 end one; 70 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        script s;
        bd_engine_stats stats;
        set_up(&s, 400);
        s.options.rows_max = cases[i].rows;
        s.options.tile_rows = cases[i].tile;
        s.options.prefill_chunk_tokens = 0;
        for (uint32_t c = 0; c < 2 && cases[i].prompts[c]; c++)
            add(&s, 0, cases[i].variants[c], cases[i].prompts[c], 1);
        run(&s, &stats);
        if (stats.steps != cases[i].steps)
            fail_msg("case %zu: %u steps, not %u", i, (unsigned)stats.steps, cases[i].steps);
    }
}

/* Waiting for those before it, nobody is passed: the others of its variant still come along. */
static void test_waits_unpassed(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.rows_max = s.options.prefill_chunk_tokens = 16;
    add(&s, 0, 1, 144, 1); /* nine steps */
    static const uint32_t variants[] = {2, 3, 2, 3}, order[] = {2, 4, 3, 5};
    for (uint32_t i = 0; i < 4; i++)
        add(&s, 0, variants[i], 8, 1);
    run(&s, &stats);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(s.clients[1 + i].began_at, order[i]);
}

/* What decoding leaves is the first prompt's, little as it is. */
static void test_beside_decoding(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.rows_max = s.options.seqs_max = 16;
    for (uint32_t i = 0; i < 15; i++)
        add(&s, 0, 1, 1, 30);
    s.payers[1].counter = 5.0;
    client *single = add(&s, 1, 2, 5, 1);
    run(&s, &stats);
    assert_int_equal(single->others_at_end, 15 * 6); /* not in the first step, among prompts */
}

/* What an empty step would not have more of is no splinter: here logits rows are the limit. */
static void test_no_splinter(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.logits_rows_max = 4;
    s.options.prefill_chunk_tokens = 56;
    add(&s, 0, 1, 168, 1);
    add(&s, 0, 2, 13, 1)->options.prompt_logprobs = 0;
    run(&s, &stats);
    assert_int_equal(stats.steps, 5); /* 4, 4, none beside the first's token, 4, 1 */
}

/* A further variant's prompt is not begun with less than an eighth of a step, unless that is all.
 */
static void test_splinters(void **state) {
    (void)state;
    static const struct {
        uint32_t second, variant, steps;
    } cases[] = {{68, 2, 3}, {72, 2, 3}, {68, 1, 2}, {4, 2, 1}, {64, 2, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        script s;
        bd_engine_stats stats;
        set_up(&s, 400);
        s.options.prefill_chunk_tokens = 64;
        add(&s, 0, 1, 60, 1);
        add(&s, 0, cases[i].variant, cases[i].second, 1);
        run(&s, &stats);
        if (stats.steps != cases[i].steps)
            fail_msg("%u tokens: %u steps, not %u", cases[i].second, (unsigned)stats.steps,
                     cases[i].steps);
    }
    script s; /* an eighth is enough */
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.prefill_chunk_tokens = 64;
    add(&s, 0, 1, 56, 1);
    add(&s, 0, 2, 72, 1);
    run(&s, &stats);
    assert_int_equal(stats.steps, 2);
}

/* Who waits for KV is passed by one whose payer was served less, and by nobody else. */
static void test_passes(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 20);
    s.payers[0].counter = 10.0;
    add(&s, 0, 0, 60, 10);                 /* runs: 15 to 18 of 20 blocks */
    client *waits = add(&s, 0, 0, 40, 10); /* in the engine, waits for KV */
    client *later = add(&s, 0, 0, 4, 1);   /* BD_BUSY for now */
    client *first = add(&s, 1, 0, 60, 10); /* waits too, before that one */
    client *second = add(&s, 1, 0, 4, 1);  /* BD_BUSY: its own payer's waits */
    s.payers[2].counter = 20.0;
    client *third = add(&s, 2, 0, 4, 1); /* BD_BUSY: it was served more than those that wait */
    run(&s, &stats);
    assert_int_equal(stats.preemptions, 0);
    assert_int_equal(waits->refused, 0);
    assert_int_equal(first->refused, 0);
    assert_true(later->refused > 0 && second->refused > 0 && third->refused > 0);
    assert_true(first->began_at < waits->began_at);
}

/* What the prefix cache has nobody pays for; who asks for log-probabilities has it computed. */
static void test_cached(void **state) {
    (void)state;
    script s;
    bd_engine_stats stats;
    set_up(&s, 400);
    s.options.prefix_cache = true;
    add(&s, 0, 0, 41, 5);
    client *again = add(&s, 0, 0, 41, 5), *other = add(&s, 1, 0, 41, 5);
    again->after = other->after = 0;
    memcpy(again->prompt, s.clients[0].prompt, sizeof again->prompt);
    memcpy(other->prompt, s.clients[0].prompt, sizeof other->prompt);
    client *reports = add(&s, 1, 0, 41, 0);
    memcpy(reports->prompt, s.clients[0].prompt, sizeof reports->prompt);
    reports->options.prompt_logprobs = 0;
    reports->after = 2;
    run(&s, &stats);
    assert_int_equal(s.prompt_tokens[0], 41 + 1);
    assert_int_equal(s.prompt_tokens[1], 41 + 40); /* of the last prompt token nothing is asked */
    assert_int_equal(s.output_tokens[0], 10);
    assert_int_equal(s.output_tokens[1], 5);
    assert_int_equal(stats.prefix_hit_tokens, 40);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gives_way),       cmocka_unit_test(test_rows),
        cmocka_unit_test(test_equal),           cmocka_unit_test(test_crossing),
        cmocka_unit_test(test_variants),        cmocka_unit_test(test_passes),
        cmocka_unit_test(test_cached),          cmocka_unit_test(test_company),
        cmocka_unit_test(test_splinters),       cmocka_unit_test(test_passed_enough),
        cmocka_unit_test(test_no_splinter),     cmocka_unit_test(test_waits_unpassed),
        cmocka_unit_test(test_shares),          cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_beside_decoding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
