/* test_router_service.c - tenants sharing a server, over a fake cache and a fake model: service
 * within the bound of their virtual counters, whatever their prompts, variants and priorities are;
 * the device never without work that is there. */
#include <nettle/sha2.h>

#include "router/internal.h"
#include "router_fake.h"

enum { TENANTS = 3, TOKENS = 40, NEW_MAX = 20, SEQS_MAX = 12, LOAD_UNIT = 100 };

typedef struct world {
    struct bd_model model;
    bd_cache cache;
    bd_router *router;
    bd_engine *engine;
    bd_engine_options options;
    fake_device fake;
    bd_metrics *metrics;
    bd_tenants *tenants;
    const bd_tenant *tenant[TENANTS];
    char path[64];
    fake_rng rng;
    _Atomic uint32_t done;
    /* bd-sched, while it runs: */
    uint32_t began;
    double least, most;       /* of the difference of the shares of tenants 0 and 1 */
    double first[2], last[2]; /* their shares when both had begun to wait, and at the last look */
    bool looked;
    void (*at_token)(struct world *w); /* NULL: look */
    struct request *later;             /* to be submitted by at_token */
    uint32_t later_count;
} world;

typedef struct request {
    world *world;
    bd_job job;
    bd_prompt prompt;
    int32_t ids[TOKENS];
    uint32_t began_at;
    bd_status status;
} request;

/* NULL: nothing of that tenant was submitted yet. */
static const bd_fair_flow *flow_of(const world *w, uint32_t tenant) {
    const char *name = w->tenant[tenant]->name;
    const bd_router_account *account = bd_map_get(w->router->accounts, name, strlen(name));
    return account ? &account->flow : NULL;
}

static double share(const bd_fair_flow *flow) {
    return flow->service / flow->weight;
}

/* While both wait: the difference of what they got since both began to. */
static void look(world *w) {
    const bd_fair_flow *a = flow_of(w, 0), *b = flow_of(w, 1);
    if (!a || !b || a->waiting == 0 || b->waiting == 0) return;
    if (!w->looked) {
        w->first[0] = share(a);
        w->first[1] = share(b);
    }
    w->looked = true;
    w->last[0] = share(a) - w->first[0];
    w->last[1] = share(b) - w->first[1];
    const double difference = w->last[0] - w->last[1];
    if (difference < w->least) w->least = difference;
    if (difference > w->most) w->most = difference;
}

static bool on_token(void *ctx, uint32_t choice, const bd_token_result *token) {
    request *r = ctx;
    (void)choice;
    (void)token;
    if (r->began_at == 0) r->began_at = ++r->world->began;
    look(r->world);
    if (r->world->at_token) r->world->at_token(r->world);
    return true;
}

static void on_done(void *ctx, bd_status status, const bd_error *err, uint32_t retry_after_s) {
    request *r = ctx;
    (void)err;
    (void)retry_after_s;
    r->status = status;
    atomic_fetch_add(&r->world->done, 1);
}

static const bd_job_sink sink = {on_token, NULL, NULL, on_done};

static void submit(request *r, uint32_t tenant) {
    bd_refused why;
    bd_ask ask = {.tenant = r->world->tenant[tenant],
                  .choices = r->job.prompt_count * r->job.choices_per_prompt};
    bd_status status = bd_router_reserve(r->world->router, &ask, &why);
    BD_ASSERT(status == BD_OK);
    r->job.tenant = r->world->tenant[tenant];
    r->job.received_us = bd_now_us();
    bd_router_submit(r->world->router, &r->job);
}

static void make(world *w, request *r, uint32_t served, uint32_t prompt_min, uint32_t prompt_max) {
    memset(r, 0, sizeof *r);
    r->world = w;
    r->prompt = (bd_prompt){r->ids, prompt_min + fake_below(&w->rng, prompt_max - prompt_min + 1)};
    for (uint32_t i = 0; i < r->prompt.count; i++)
        r->ids[i] = (int32_t)fake_below(&w->rng, FAKE_VOCAB);
    r->job = (bd_job){.served = bd_router_served_at(w->router, served),
                      .prompts = &r->prompt,
                      .prompt_count = 1,
                      .choices_per_prompt = 1,
                      .params = {.max_new_tokens = 1 + fake_below(&w->rng, NEW_MAX),
                                 .logprobs = -1,
                                 .prompt_logprobs = -1,
                                 .sampling = {.temperature = 1.0f, .top_p = 1.0f}},
                      .sink = &sink,
                      .sink_ctx = r};
}

/* ---- The world ---- */

/* A weight of 0: that tenant is not in the file. */
static void write_tenants(const world *w, const double weights[TENANTS]) {
    FILE *file = fopen(w->path, "w");
    const char *between = "";
    assert_non_null(file);
    fputs("{\"tenants\": [", file);
    for (uint32_t i = 0; i < TENANTS; i++) {
        if (!(weights[i] > 0.0)) continue;
        const uint8_t key = (uint8_t)('a' + i);
        uint8_t digest[SHA256_DIGEST_SIZE];
        struct sha256_ctx hash;
        sha256_init(&hash);
        sha256_update(&hash, 1, &key);
        sha256_digest(&hash, sizeof digest, digest);
        fprintf(file,
                "%s{\"name\": \"t%u\", \"variants\": \"*\", \"weight\": %g, \"keys\": [\"sha256:",
                between, i, weights[i]);
        between = ", ";
        for (size_t k = 0; k < sizeof digest; k++)
            fprintf(file, "%02x", digest[k]);
        fputs("\"]}", file);
    }
    fputs("]}", file);
    assert_int_equal(fclose(file), 0);
}

static void find_tenants(world *w) {
    for (uint32_t i = 0; i < TENANTS; i++) {
        const char key = (char)('a' + i);
        bd_tenant_release(w->tenant[i]);
        w->tenant[i] = bd_tenants_by_key(w->tenants, &key, 1);
        assert_non_null(w->tenant[i]);
    }
}

static void open_tenants(world *w, const double weights[TENANTS]) {
    bd_error err;
    snprintf(w->path, sizeof w->path, "/tmp/bd-tenants-XXXXXX");
    int fd = mkstemp(w->path);
    assert_true(fd >= 0);
    close(fd);
    write_tenants(w, weights);
    if (bd_tenants_open(w->path, &w->tenants, &err) != BD_OK) fail_msg("%s", err.message);
    find_tenants(w);
}

static void report_fault(void *ctx, const char *dir, const bd_error *err) {
    (void)ctx;
    fail_msg("%s: %s", dir, err->message);
}

static void open_world(world *w, uint64_t seed, uint32_t pages, double bound, uint32_t seqs_max,
                       const double weights[TENANTS]) {
    bd_error err;
    uint32_t added;
    memset(w, 0, sizeof *w);
    w->rng.state = seed;
    open_tenants(w, weights);
    assert_int_equal(bd_model_config_read("demo/zen-mini", &w->model.config, &err), BD_OK);
    bd_delta delta;
    assert_int_equal(bd_delta_open("demo/deltas/zen-mini-c", &delta, &err), BD_OK);
    memcpy(w->model.fingerprint, delta.base_fingerprint, sizeof w->model.fingerprint);
    bd_delta_close(&delta);
    w->metrics = bd_metrics_create(5000);
    w->cache.pages = pages;
    w->cache.load_us = 300;
    const bd_router_options router = {.cache = &w->cache,
                                      .model = &w->model,
                                      .base_name = "zen-mini",
                                      .base_dir = "demo/zen-mini",
                                      .cold_wait_max_us = UINT32_MAX, /* nothing goes by time */
                                      .fair = {1.0, 2.0, LOAD_UNIT},
                                      .residency_bound = bound,
                                      .metrics = w->metrics};
    assert_int_equal(bd_router_create(&router, &w->router, &err), BD_OK);
    assert_int_equal(
        bd_router_add_directory(w->router, "demo/deltas", report_fault, NULL, &added, &err), BD_OK);
    w->options = (bd_engine_options){.cache = &w->cache,
                                     .model_name = "zen-mini",
                                     .rows_max = 48,
                                     .prefill_chunk_tokens = 16,
                                     .seqs_max = seqs_max,
                                     .variants_per_step_max = 4,
                                     .logits_rows_max = 16,
                                     .decode_delta = true,
                                     .prefix_cache = true,
                                     .hooks = bd_router_hooks(w->router),
                                     .metrics = w->metrics};
    fake_device_init(&w->fake, &w->options, 60, 8, 1);
    assert_int_equal(bd_engine_create_on(&w->options, &w->fake.device, &w->engine, &err), BD_OK);
    bd_router_attach(w->router, w->engine);
}

/* Until `count` jobs are done. */
static void run_world(world *w, uint32_t count) {
    bd_error err;
    w->cache.engine = w->engine;
    w->fake.engine = w->engine;
    assert_int_equal(bd_engine_start(w->engine, &err), BD_OK);
    for (uint32_t i = 0; i < 120000 && atomic_load(&w->done) < count; i++) {
        bd_engine_wake(w->engine); /* what the loader's notify does */
        fake_sleep_us(500);
    }
    assert_int_equal(atomic_load(&w->done), count);
    bd_engine_stop(w->engine);
}

static void close_world(world *w) {
    assert_true(bd_router_idle(w->router));
    assert_int_equal(w->router->running, 0);
    if (w->fake.faults > 0) fail_msg("%s", w->fake.fault);
    for (uint32_t i = 0; i < w->cache.count; i++)
        assert_int_equal(w->cache.variants[i].leases, 0);
    for (uint32_t i = 0; i < TENANTS; i++) {
        const bd_fair_flow *flow = flow_of(w, i);
        if (flow) assert_int_equal(flow->promised, 0);
        if (flow) assert_int_equal(flow->waiting, 0);
        bd_tenant_release(w->tenant[i]);
    }
    /* Work that was there never waited for work that was not. */
    assert_true(bd_metric_value(w->router->idle) == 0.0);
    bd_engine_destroy(w->engine);
    bd_router_destroy(w->router);
    bd_tenants_destroy(w->tenants);
    fake_device_deinit(&w->fake);
    fake_cache_deinit(&w->cache);
    bd_metrics_destroy(w->metrics);
    unlink(w->path);
}

/* U: what may be in the engine at once, all of it as dear as output. */
static double unit_of(double weight_min) {
    return 2.0 * SEQS_MAX * (TOKENS + NEW_MAX) / weight_min;
}

static void check_shares(const world *w, double bound, double units_at_least) {
    assert_true(w->looked);
    if (w->most - w->least > bound)
        fail_msg("the shares differ by %g to %g, the bound is %g", w->least, w->most, bound);
    /* So that the bound says something. */
    assert_true(w->last[0] > units_at_least * unit_of(1.0));
}

/* ---- Tests ---- */

/* Reads the metrics all the time; what they say of one moment stays within the bound, too. */
typedef struct reader {
    world *world;
    _Atomic bool over;
    double most_apart;
} reader;

static double value_of(const char *text, const char *series) {
    const char *at = text ? strstr(text, series) : NULL;
    return at ? strtod(at + strlen(series), NULL) : 0.0;
}

static void *run_reader(void *arg) {
    reader *r = arg;
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    while (!atomic_load(&r->over)) {
        bd_strbuf_clear(&text);
        bd_router_write_fairness(r->world->router, &text);
        const char *all = text.data;
        double a = value_of(all, "\nbitdelta_tenant_service_tokens_total{tenant=\"t0\"} "),
               b = value_of(all, "\nbitdelta_tenant_service_tokens_total{tenant=\"t1\"} "),
               waiting = value_of(all, "\nbitdelta_tenant_waiting{tenant=\"t0\"} ") *
                         value_of(all, "\nbitdelta_tenant_waiting{tenant=\"t1\"} ");
        double apart = fabs(a - b / r->world->tenant[1]->weight);
        if (waiting > 0.0 && apart > r->most_apart) r->most_apart = apart;
    }
    bd_strbuf_deinit(&text);
    return NULL;
}

/* All is there from the start; tenant 1 has long prompts and another weight, and asks to be served
 * first. */
static void run_shares(uint64_t seed, double weight) {
    enum { COUNT = 1400 };
    const double weights[TENANTS] = {1.0, weight, 1.0};
    world w;
    open_world(&w, seed, 4, 0.0, SEQS_MAX, weights);
    request *requests = calloc(COUNT, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i < COUNT; i++) {
        bool second = i % 2 == 1;
        make(&w, &requests[i], 0, second ? 30 : 1, second ? TOKENS : 8);
        requests[i].job.params.priority = second ? -(int64_t)(i % 5) : 0;
        submit(&requests[i], i % 2);
    }
    reader r = {.world = &w};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, run_reader, &r), 0);
    run_world(&w, COUNT);
    atomic_store(&r.over, true);
    pthread_join(thread, NULL);
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(requests[i].status, BD_OK);
    check_shares(&w, 2.0 * unit_of(1.0), 5.0);
    assert_true(r.most_apart <= 2.0 * unit_of(1.0));
    close_world(&w);
    free(requests);
}

static void test_shares(void **state) {
    (void)state;
    uint64_t seed = fake_seed();
    run_shares(fake_mix(seed), 1.0);
    run_shares(fake_mix(seed + 1), 3.0);
}

/* Tenant 0 has the base, which is always there; tenant 1 goes through 14 variants for which there
 * is room for `pages`. Each load is charged once. */
static void run_cold(uint64_t seed, uint32_t pages, double bound, bool both) {
    enum { COUNT = 900 };
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    open_world(&w, seed, pages, bound, SEQS_MAX, weights);
    request *requests = calloc(COUNT, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t served = i % 2 == 1 ? 1 + i / 2 % 14 : both ? 1 + i / 2 % 9 : 0;
        make(&w, &requests[i], served, 1, TOKENS);
        submit(&requests[i], i % 2);
    }
    run_world(&w, COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(requests[i].status, BD_OK);
    printf("  pages %u, loads %llu, held %g\n", pages, (unsigned long long)w.cache.loads,
           bd_metric_value(w.router->held));
    const uint64_t charged = flow_of(&w, 0)->loaded_bytes + flow_of(&w, 1)->loaded_bytes;
    assert_int_equal(charged, w.cache.loads * FAKE_FILE_BYTES);
    if (!both) assert_int_equal(flow_of(&w, 0)->loaded_bytes, 0);
    const double load = (double)FAKE_FILE_BYTES / LOAD_UNIT;
    check_shares(&w, 2.0 * (unit_of(1.0) + bound + load), 3.0);
    close_world(&w);
    free(requests);
}

static void test_cold(void **state) {
    (void)state;
    uint64_t seed = fake_seed();
    for (uint32_t round = 0; round < 2; round++) {
        const bool both = round == 1;
        run_cold(fake_mix(seed + 10 * round), 1, 0.0, both);
        run_cold(fake_mix(seed + 10 * round + 1), 3, 0.0, both);
        run_cold(fake_mix(seed + 10 * round + 2), 3, 500.0, both);
        run_cold(fake_mix(seed + 10 * round + 3), 14, 100.0, both);
    }
}

/* Tenant 1 sends nothing until tenant 0 has been served much: the difference is counted from when
 * both wait. */
static void submit_later(world *w) {
    const bd_fair_flow *a = flow_of(w, 0);
    if (!a || a->service < 4.0 * unit_of(1.0)) return;
    for (uint32_t i = 0; i < w->later_count; i++)
        submit(&w->later[i], 1);
    w->later_count = 0;
}

static void test_idle_then_back(void **state) {
    (void)state;
    enum { COUNT = 1400, LATE = 500 };
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    open_world(&w, fake_seed(), 4, 0.0, SEQS_MAX, weights);
    request *requests = calloc(COUNT, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i < COUNT; i++) {
        make(&w, &requests[i], 0, 1, TOKENS);
        if (i >= LATE) submit(&requests[i], 0);
    }
    w.later = requests + 1; /* the first of all shows that it was there before */
    w.later_count = LATE - 1;
    w.at_token = submit_later;
    submit(&requests[0], 1);
    run_world(&w, COUNT);
    assert_true(w.first[0] - w.first[1] > 3.0 * unit_of(1.0));
    check_shares(&w, 2.0 * unit_of(1.0), 2.0);
    close_world(&w);
    free(requests);
}

/* Tenant 0's variant never finishes its load: tenant 1, further ahead of it all the time, gets its
 * own variant loaded nevertheless. */
static void submit_stuck(world *w) {
    w->later_count++;
    if (w->later_count == 1) submit(&w->later[0], 0);
    if (w->later_count == 5) submit(&w->later[1], 1); /* some tokens ahead by now */
}

static void test_stuck_load(void **state) {
    (void)state;
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    request requests[3];
    open_world(&w, fake_seed(), 4, 0.0, SEQS_MAX, weights);
    w.router->options.cold_wait_max_us = 20000;
    struct bd_variant *stuck = bd_router_served_at(w.router, 1)->variant;
    stuck->state = BD_VARIANT_LOADING;
    stuck->loading_until_us = UINT64_MAX;
    w.cache.pages_used++;
    for (uint32_t i = 0; i < 3; i++) {
        make(&w, &requests[i], i == 2 ? 0 : 1 + i, 10, 10);
        requests[i].job.params.max_new_tokens = NEW_MAX;
    }
    w.later = requests;
    w.at_token = submit_stuck;
    submit(&requests[2], 1);
    run_world(&w, 2);
    assert_int_equal(requests[0].status, BD_E_SHUTDOWN);
    assert_int_equal(requests[1].status, BD_OK);
    assert_int_equal(requests[2].status, BD_OK);
    close_world(&w);
}

/* A load that is under way when requests come, as a prefetch is, is charged to none of them. */
static void test_load_of_others(void **state) {
    (void)state;
    enum { PROMPT = 10, OUTPUT = 5 };
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    request requests[3];
    open_world(&w, fake_seed(), 4, 0.0, SEQS_MAX, weights);
    w.cache.load_us = 30000;
    assert_int_equal(bd_load_begin(w.router, bd_router_served_at(w.router, 1), true, NULL, NULL),
                     BD_OK);
    for (uint32_t i = 0; i < 3; i++) {
        make(&w, &requests[i], i < 2 ? 1 : 2, PROMPT, PROMPT); /* the last begins a load itself */
        requests[i].job.params.max_new_tokens = OUTPUT;
        submit(&requests[i], i);
    }
    run_world(&w, 3);
    assert_int_equal(w.cache.loads, 2);
    for (uint32_t i = 0; i < 3; i++) {
        const double tokens = PROMPT + 2.0 * OUTPUT, load = FAKE_FILE_BYTES / LOAD_UNIT;
        assert_int_equal(requests[i].status, BD_OK);
        assert_int_equal(flow_of(&w, i)->loaded_bytes, i < 2 ? 0 : FAKE_FILE_BYTES);
        assert_true(flow_of(&w, i)->service == tokens + (i < 2 ? 0.0 : load));
    }
    close_world(&w);
}

static void submit_cold(world *w) {
    w->later_count++;
    if (w->later_count == 1) submit(&w->later[0], 0);
    if (w->later_count == 5) submit(&w->later[1], 1); /* some tokens ahead by now */
}

/* Tenant 0 waits for a load. Tenant 1 is further ahead of it than the bound: while the load lasts,
 * it gets none of its own, not even when nothing else is left to do; then it does. */
static void test_load_beyond_bound(void **state) {
    (void)state;
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    request requests[3];
    open_world(&w, fake_seed(), 4, 0.0, SEQS_MAX, weights);
    w.cache.load_us = 50000;
    /* Begun by nobody, so that its cost is not what decides. */
    assert_int_equal(bd_load_begin(w.router, bd_router_served_at(w.router, 1), true, NULL, NULL),
                     BD_OK);
    for (uint32_t i = 0; i < 3; i++) {
        make(&w, &requests[i], i == 2 ? 0 : 1 + i, 10, 10);
        requests[i].job.params.max_new_tokens = NEW_MAX;
    }
    w.later = requests;
    w.at_token = submit_cold;
    submit(&requests[2], 1); /* of the base: it ends long before the load does */
    run_world(&w, 3);
    assert_int_equal(w.cache.loads_at_first_end, 1);
    assert_int_equal(w.cache.loads, 2);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(requests[i].status, BD_OK);
    close_world(&w);
}

/* One place: each tenant's requests by priority, then as they came; the tenants in turns. */
static void test_priority(void **state) {
    (void)state;
    enum { COUNT = 60 };
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    uint32_t expected[COUNT], at = 0;
    open_world(&w, fake_seed(), 4, 0.0, 1, weights);
    request *requests = calloc(COUNT, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i < COUNT; i++) {
        make(&w, &requests[i], 0, 20, 20);
        requests[i].job.params.max_new_tokens = 5;
        requests[i].job.params.priority = (int64_t)fake_below(&w.rng, 3) - 1 - (i % 2 ? 0 : 9);
        submit(&requests[i], i % 2);
    }
    for (int64_t priority = -10; priority <= 1; priority++)
        for (uint32_t i = 0; i < COUNT; i++)
            if (requests[i].job.params.priority == priority) expected[at++] = i;
    run_world(&w, COUNT);
    for (uint32_t i = 0; i < COUNT / 2; i++) { /* tenant 0's are first in the list */
        assert_in_range(requests[expected[i]].began_at, 2 * i + 1, 2 * i + 2);
        assert_in_range(requests[expected[COUNT / 2 + i]].began_at, 2 * i + 1, 2 * i + 2);
    }
    close_world(&w);
    free(requests);
}

/* Without tenants, one place: a variant's requests as they came, the variants in turns. */
static void test_one_for_all(void **state) {
    (void)state;
    enum { EACH = 20, NAMES = 3, COUNT = EACH * NAMES };
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    open_world(&w, fake_seed(), NAMES, 0.0, 1, weights);
    for (uint32_t i = 1; i < NAMES; i++) {
        bd_router_served_at(w.router, i)->variant->state = BD_VARIANT_READY;
        w.cache.pages_used++;
    }
    request *requests = calloc(COUNT, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i < COUNT; i++) {
        make(&w, &requests[i], i / EACH, 1, TOKENS); /* all of one name, then all of the next */
        bd_refused why;
        assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 1}, &why), BD_OK);
        bd_router_submit(w.router, &requests[i].job);
    }
    run_world(&w, COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(requests[i].began_at, i % EACH * NAMES + i / EACH + 1);
    close_world(&w);
    free(requests);
}

/* A job's weight is that of its day; what was counted stays. Everybody has their series. */
static void test_weights_and_metrics(void **state) {
    (void)state;
    const double weights[TENANTS] = {1.0, 1.0, 1.0}, later[TENANTS] = {2.5, 1.0, 1.0};
    world w;
    bd_error err;
    bd_tenants_change change;
    bd_strbuf text;
    open_world(&w, fake_seed(), 4, 0.0, 1, weights);
    request requests[3];
    for (uint32_t i = 0; i < 2; i++) {
        make(&w, &requests[i], i, 10, 10); /* the base, and a variant that is loaded for it */
        requests[i].job.params.max_new_tokens = 5;
        submit(&requests[i], 0);
    }
    write_tenants(&w, later);
    assert_int_equal(bd_tenants_reload(w.tenants, &change, &err), BD_OK);
    const bd_tenant *before = w.tenant[0];
    bd_tenant_hold(before);
    find_tenants(&w);
    make(&w, &requests[2], 0, 30, 30);
    requests[2].job.params.max_new_tokens = 1;
    submit(&requests[2], 0);
    run_world(&w, 3);
    bd_tenant_release(before);
    const bd_fair_flow *flow = flow_of(&w, 0);
    assert_true(flow->weight == 2.5);
    assert_true(flow->service == 20.0 + 20.0 + 32.0 + 30.0);
    bd_strbuf_init(&text, 0);
    bd_router_write_fairness(w.router, &text);
    assert_non_null(strstr(text.data, "bitdelta_tenant_service_tokens_total{tenant=\"t0\"} 102\n"));
    assert_non_null(strstr(text.data, "bitdelta_tenant_load_bytes_total{tenant=\"t0\"} 3000\n"));
    assert_non_null(strstr(text.data, "# TYPE bitdelta_tenant_virtual_tokens gauge\n"));
    assert_null(strstr(text.data, "t1"));
    bd_strbuf_deinit(&text);
    close_world(&w);
}

static uint32_t count_of(const char *text, const char *part) {
    uint32_t count = 0;
    for (const char *at = text; (at = strstr(at, part)); at++)
        count++;
    return count;
}

/* Who leaves the file and comes back is another tenant with other limits, but no series is there
 * twice, and the service of before is not forgotten. */
static void test_left_and_back(void **state) {
    (void)state;
    const double with[TENANTS] = {1.0, 1.0, 1.0}, without[TENANTS] = {0.0, 1.0, 1.0};
    world w;
    bd_error err;
    bd_tenants_change change;
    bd_strbuf text;
    request requests[2];
    open_world(&w, fake_seed(), 4, 0.0, 1, with);
    const bd_tenant *before = w.tenant[0];
    bd_tenant_hold(before);
    for (uint32_t i = 0; i < 2; i++) {
        make(&w, &requests[i], 0, 10, 10);
        requests[i].job.params.max_new_tokens = 5;
        submit(&requests[i], 0);
        if (i > 0) break;
        write_tenants(&w, without);
        assert_int_equal(bd_tenants_reload(w.tenants, &change, &err), BD_OK);
        assert_int_equal(change.removed, 1);
        write_tenants(&w, with);
        assert_int_equal(bd_tenants_reload(w.tenants, &change, &err), BD_OK);
        assert_int_equal(change.added, 1);
        find_tenants(&w);
        assert_true(w.tenant[0]->id != before->id);
    }
    run_world(&w, 2);
    bd_strbuf_init(&text, 0);
    bd_router_write_fairness(w.router, &text);
    assert_int_equal(count_of(text.data, "{tenant=\"t0\"}"), 4); /* one of each family */
    assert_non_null(strstr(text.data, "bitdelta_tenant_service_tokens_total{tenant=\"t0\"} 40\n"));
    assert_true(flow_of(&w, 0)->service == 2.0 * (10.0 + 2.0 * 5.0));
    bd_strbuf_deinit(&text);
    bd_tenant_release(before);
    close_world(&w);
}

static void cancel_at_prompt(void *ctx, uint32_t choice, uint32_t first,
                             const bd_token_result *tokens, uint32_t count) {
    request *r = ctx;
    (void)choice, (void)first, (void)tokens, (void)count;
    bd_router_cancel(r->world->router, &r->job);
}

/* Choices that share what is told of their prompts: when it is cancelled, the first of each has
 * begun, and the tenant pays for both prompts, though no other choice has. */
static void test_prompts_begun(void **state) {
    (void)state;
    static const bd_job_sink cancelling = {.prompt = cancel_at_prompt, .done = on_done};
    const double weights[TENANTS] = {1.0, 1.0, 1.0};
    world w;
    bd_strbuf text;
    request r;
    open_world(&w, fake_seed(), 4, 0.0, SEQS_MAX, weights);
    make(&w, &r, 0, 20, TOKENS); /* more than a step computes of it */
    const bd_prompt prompts[2] = {{r.ids, r.prompt.count}, {r.ids + 1, r.prompt.count - 1}};
    r.job.prompts = prompts;
    r.job.prompt_count = 2;
    r.job.choices_per_prompt = 3;
    r.job.params.prompt_logprobs = 0;
    r.job.sink = &cancelling;
    submit(&r, 0);
    run_world(&w, 1);
    assert_int_equal(r.status, BD_CANCELLED);
    bd_strbuf_init(&text, 0);
    bd_tenants_write_metrics(w.tenants, &text);
    const double paid =
        value_of(text.data, "\nbitdelta_tenant_prompt_tokens_total{tenant=\"t0\"} ");
    assert_int_equal((int)paid, prompts[0].count + prompts[1].count);
    bd_strbuf_deinit(&text);
    close_world(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_cold),
        cmocka_unit_test(test_idle_then_back),
        cmocka_unit_test(test_priority),
        cmocka_unit_test(test_stuck_load),
        cmocka_unit_test(test_load_of_others),
        cmocka_unit_test(test_load_beyond_bound),
        cmocka_unit_test(test_one_for_all),
        cmocka_unit_test(test_weights_and_metrics),
        cmocka_unit_test(test_left_and_back),
        cmocka_unit_test(test_prompts_begun),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
