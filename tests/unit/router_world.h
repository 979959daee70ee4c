/* router_world.h - the router over a fake cache and a fake model, with the demo family's names, and
 * jobs whose every token, log-probability and end is held against what the model gives alone. */
#ifndef BITDELTA_TESTS_ROUTER_WORLD_H
#define BITDELTA_TESTS_ROUTER_WORLD_H

#include "router_fake.h"

enum { BASE = 0, PROMPTS = 3, TOKENS = 40 };

typedef struct world {
    struct bd_model model;
    bd_cache cache;
    bd_router *router;
    bd_engine *engine;
    bd_engine_options options;
    fake_device fake;
    bd_metrics *metrics;
    _Atomic uint32_t done, wrong;
    _Atomic uint64_t clock; /* orders the ends of jobs */
    char first_wrong[160];
} world;

typedef struct request {
    world *world;
    bd_job job;
    bd_prompt prompts[PROMPTS];
    int32_t ids[PROMPTS][TOKENS];
    uint32_t got[PROMPTS * 3];
    bool ended[PROMPTS * 3];
    uint32_t told[PROMPTS]; /* positions of the prompt up to here */
    uint32_t cancel_at, tokens;
    bd_status status, kind;
    uint32_t retry_after_s;
    uint64_t done_at;
    _Atomic uint32_t dones;
    bool again; /* submit anew when done, while keep_going */
    _Atomic bool *keep_going;
} request;

static inline void wrong(world *w, const char *what, uint32_t a, uint32_t b) {
    if (atomic_fetch_add(&w->wrong, 1) == 0)
        snprintf(w->first_wrong, sizeof w->first_wrong, "%s (%u, %u)", what, a, b);
}

static inline void alone(const request *r, uint32_t choice, fake_run *run) {
    bd_sequence_options o = r->job.params;
    const bd_prompt *prompt = &r->prompts[choice / r->job.choices_per_prompt];
    o.prompt = prompt->ids;
    o.prompt_tokens = prompt->count;
    o.sampling.choice = choice % r->job.choices_per_prompt;
    o.lease = (bd_lease){0};
    if (r->job.served->variant) o.lease.overlay = &r->job.served->variant->overlay;
    fake_alone(&o, true, run);
}

/* Each position once, in order, of each prompt's first choice, as the model tells it alone. */
static inline void on_prompt(void *ctx, uint32_t choice, uint32_t first,
                             const bd_token_result *tokens, uint32_t count) {
    request *r = ctx;
    const uint32_t prompt = choice / r->job.choices_per_prompt;
    fake_run run;
    alone(r, choice, &run);
    if (choice % r->job.choices_per_prompt > 0) wrong(r->world, "prompt of", choice, first);
    if (first != r->told[prompt] + 1) wrong(r->world, "prompt from", first, r->told[prompt]);
    for (uint32_t i = 0; i < count; i++)
        if (memcmp(&tokens[i], &run.prompt[first + i], sizeof tokens[i]) != 0)
            wrong(r->world, "prompt", choice, first + i);
    r->told[prompt] += count;
}

static inline bool told_all(const request *r, uint32_t choice) {
    const uint32_t prompt = choice / r->job.choices_per_prompt;
    return r->job.params.prompt_logprobs < 0 || r->told[prompt] + 1 == r->prompts[prompt].count;
}

static inline bool on_token(void *ctx, uint32_t choice, const bd_token_result *token) {
    request *r = ctx;
    fake_run run;
    alone(r, choice, &run);
    if (r->ended[choice] || r->dones > 0) wrong(r->world, "token after the end", choice, 0);
    if (!told_all(r, choice)) wrong(r->world, "token before its prompt", choice, 0);
    if (r->got[choice] >= run.count || run.ids[r->got[choice]] != token->id)
        wrong(r->world, "token", choice, r->got[choice]);
    r->got[choice]++;
    if (++r->tokens == r->cancel_at) bd_router_cancel(r->world->router, &r->job);
    return true;
}

static inline void on_end(void *ctx, uint32_t choice, bd_finish finish, int32_t stop_id) {
    request *r = ctx;
    fake_run run;
    alone(r, choice, &run);
    (void)stop_id;
    if (r->ended[choice]) wrong(r->world, "second end", choice, 0);
    r->ended[choice] = true;
    if (!told_all(r, choice)) wrong(r->world, "end before its prompt", choice, 0);
    if (finish != run.finish || r->got[choice] != run.count)
        wrong(r->world, "end", (uint32_t)finish, r->got[choice]);
}

static inline void submit(request *r);

static inline void on_done(void *ctx, bd_status status, const bd_error *err,
                           uint32_t retry_after_s) {
    request *r = ctx;
    world *w = r->world;
    r->status = status;
    r->kind = err ? err->status : BD_OK;
    r->retry_after_s = retry_after_s;
    r->done_at = atomic_fetch_add(&w->clock, 1) + 1;
    for (uint32_t i = 0; status == BD_OK && i < r->job.prompt_count * r->job.choices_per_prompt;
         i++)
        if (!r->ended[i]) wrong(w, "done without end", i, 0);
    if (r->again && atomic_load(r->keep_going)) {
        memset(r->got, 0, sizeof r->got);
        memset(r->ended, 0, sizeof r->ended);
        memset(r->told, 0, sizeof r->told);
        r->job.params.max_new_tokens = 10 + (uint32_t)(r->done_at * 7 % 20);
        submit(r);
        return;
    }
    if (atomic_fetch_add(&r->dones, 1) > 0) wrong(w, "second done", 0, 0);
    atomic_fetch_add(&w->done, 1);
}

static const bd_job_sink sink = {on_token, on_prompt, on_end, on_done};

static inline void submit(request *r) {
    bd_refused why;
    memset(&r->job.internal, 0, sizeof r->job.internal);
    uint32_t choices = r->job.prompt_count * r->job.choices_per_prompt;
    bd_status status = bd_router_reserve(r->world->router, &(bd_ask){.choices = choices}, &why);
    if (status != BD_OK) {
        wrong(r->world, "reserve", (uint32_t)status, why.retry_after_s);
        return;
    }
    r->job.received_us = bd_now_us();
    bd_router_submit(r->world->router, &r->job);
}

static inline void make_request(world *w, request *r, fake_rng *rng, uint32_t served) {
    memset(r, 0, sizeof *r);
    r->world = w;
    r->job.served = bd_router_served_at(w->router, served);
    r->job.prompts = r->prompts;
    r->job.prompt_count = 1 + fake_below(rng, fake_below(rng, 3) ? 1 : PROMPTS);
    r->job.choices_per_prompt = 1 + fake_below(rng, fake_below(rng, 3) ? 1 : 3);
    for (uint32_t p = 0; p < r->job.prompt_count; p++) {
        r->prompts[p] = (bd_prompt){r->ids[p], 1 + fake_below(rng, TOKENS)};
        for (uint32_t i = 0; i < r->prompts[p].count; i++)
            r->ids[p][i] = (int32_t)fake_below(rng, FAKE_VOCAB);
    }
    r->job.params = (bd_sequence_options){.max_new_tokens = 1 + fake_below(rng, 20),
                                          .logprobs = -1,
                                          .prompt_logprobs = -1,
                                          .sampling = {.temperature = 1.0f, .top_p = 1.0f}};
    r->job.params.sampling.seed = fake_next(rng);
    if (fake_below(rng, 3) == 0) r->job.params.prompt_logprobs = (int32_t)fake_below(rng, 4);
    r->job.sink = &sink;
    r->job.sink_ctx = r;
    r->cancel_at = UINT32_MAX;
}

static inline void report_fault(void *ctx, const char *dir, const bd_error *err) {
    (void)ctx;
    fail_msg("%s: %s", dir, err->message);
}

static inline void open_world(world *w, uint32_t pages, uint32_t cold_wait_us, uint32_t queue_max) {
    bd_error err;
    uint32_t added;
    memset(w, 0, sizeof *w);
    assert_int_equal(bd_model_config_read("demo/zen-mini", &w->model.config, &err), BD_OK);
    bd_delta delta;
    assert_int_equal(bd_delta_open("demo/deltas/zen-mini-c", &delta, &err), BD_OK);
    memcpy(w->model.fingerprint, delta.base_fingerprint, sizeof w->model.fingerprint);
    bd_delta_close(&delta);
    w->metrics = bd_metrics_create(5000);
    w->cache.pages = pages;
    w->cache.load_us = 3000;
    const bd_router_options router = {.cache = &w->cache,
                                      .model = &w->model,
                                      .base_name = "zen-mini",
                                      .base_dir = "demo/zen-mini",
                                      .queue_max = queue_max,
                                      .cold_wait_max_us = cold_wait_us,
                                      .metrics = w->metrics};
    assert_int_equal(bd_router_create(&router, &w->router, &err), BD_OK);
    assert_int_equal(
        bd_router_add_directory(w->router, "demo/deltas", report_fault, NULL, &added, &err), BD_OK);
    assert_int_equal(added, 14);
    assert_int_equal(bd_router_served_count(w->router), 15);
    w->options = (bd_engine_options){.cache = &w->cache,
                                     .model_name = "zen-mini",
                                     .rows_max = 48,
                                     .prefill_chunk_tokens = 16,
                                     .seqs_max = 12,
                                     .variants_per_step_max = 4,
                                     .logits_rows_max = 16,
                                     .decode_delta = true,
                                     .prefix_cache = true,
                                     .hooks = bd_router_hooks(w->router),
                                     .metrics = w->metrics};
    fake_device_init(&w->fake, &w->options, 40, 8, 1);
    assert_int_equal(bd_engine_create_on(&w->options, &w->fake.device, &w->engine, &err), BD_OK);
    bd_router_attach(w->router, w->engine);
}

static inline void start_world(world *w) {
    bd_error err;
    w->cache.engine = w->engine;
    w->fake.engine = w->engine;
    assert_int_equal(bd_engine_start(w->engine, &err), BD_OK);
}

static inline bool wait_done(world *w, uint32_t count, uint32_t ms) {
    for (uint32_t i = 0; i < ms && atomic_load(&w->done) < count; i++) {
        bd_engine_wake(w->engine); /* what the loader's notify does */
        fake_sleep_us(1000);
    }
    return atomic_load(&w->done) >= count;
}

static inline void close_world(world *w) {
    bd_engine_stop(w->engine);
    assert_true(bd_router_idle(w->router));
    if (w->wrong > 0) fail_msg("%u wrong: %s", w->wrong, w->first_wrong);
    if (w->fake.faults > 0) fail_msg("%s", w->fake.fault);
    for (uint32_t i = 0; i < w->cache.count; i++) {
        assert_int_equal(w->cache.variants[i].leases, 0);
        assert_null(w->cache.variants[i].waiters);
    }
    bd_engine_destroy(w->engine);
    bd_router_destroy(w->router);
    fake_device_deinit(&w->fake);
    fake_cache_deinit(&w->cache);
    bd_metrics_destroy(w->metrics);
}

#endif
