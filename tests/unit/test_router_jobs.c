/* test_router_jobs.c - the router over a fake cache and a fake model, with the demo family's names:
 * every choice of every job must give the tokens it gives alone, done() must come once, leases and
 * reservations must be back at zero. */
#include <errno.h>
#include <sys/stat.h>

#include "router_world.h"

typedef struct client {
    world *world;
    request *requests;
    uint32_t count;
    uint64_t seed;
} client;

static void *run_client(void *arg) {
    client *c = arg;
    fake_rng rng = {c->seed};
    for (uint32_t i = 0; i < c->count; i++) {
        submit(&c->requests[i]);
        if (fake_below(&rng, 4) == 0) fake_sleep_us(fake_below(&rng, 2000));
        request *other = &c->requests[fake_below(&rng, i + 1)];
        if (fake_below(&rng, 8) == 0) bd_router_cancel(c->world->router, &other->job);
    }
    return NULL;
}

static void run_random(uint64_t seed) {
    enum { CLIENTS = 3, EACH = 80 };
    world w;
    fake_rng rng = {seed};
    open_world(&w, 1 + fake_below(&rng, 6), 20000, 0);
    start_world(&w);
    request *requests = calloc(CLIENTS * EACH, sizeof *requests);
    assert_non_null(requests);
    client clients[CLIENTS];
    pthread_t threads[CLIENTS];
    for (uint32_t i = 0; i < CLIENTS * EACH; i++) {
        make_request(&w, &requests[i], &rng, fake_below(&rng, 15));
        if (fake_below(&rng, 8) == 0) requests[i].cancel_at = 1 + fake_below(&rng, 10);
        const bool scores = requests[i].job.params.prompt_logprobs >= 0;
        if (scores && fake_below(&rng, 4) == 0) requests[i].job.params.max_new_tokens = 0;
    }
    for (uint32_t c = 0; c < CLIENTS; c++) {
        clients[c] = (client){&w, requests + c * EACH, EACH, fake_next(&rng)};
        assert_int_equal(pthread_create(&threads[c], NULL, run_client, &clients[c]), 0);
    }
    for (uint32_t c = 0; c < CLIENTS; c++)
        pthread_join(threads[c], NULL);
    assert_true(wait_done(&w, CLIENTS * EACH, 60000));
    uint32_t cancelled = 0;
    for (uint32_t i = 0; i < CLIENTS * EACH; i++) {
        assert_int_equal(requests[i].dones, 1);
        assert_true(requests[i].status == BD_OK || requests[i].status == BD_CANCELLED);
        cancelled += requests[i].status == BD_CANCELLED;
    }
    printf("  pages %u, loads %llu, evictions %llu, cancelled %u\n", w.cache.pages,
           (unsigned long long)w.cache.loads, (unsigned long long)w.cache.evictions, cancelled);
    assert_true(cancelled < CLIENTS * EACH);
    assert_true(w.cache.max_leased <= w.cache.pages);
    assert_true(bd_router_idle(w.router));
    close_world(&w);
    free(requests);
}

static void test_random(void **state) {
    (void)state;
    uint64_t seed = fake_seed();
    for (uint32_t round = 0; round < 6; round++)
        run_random(fake_mix(seed + round));
}

/* A variant that cannot be loaded fails its own requests; nobody else notices. */
static void test_failed_load(void **state) {
    (void)state;
    enum { COUNT = 60 };
    world w;
    fake_rng rng = {fake_seed()};
    open_world(&w, 4, 20000, 0);
    uint32_t bad = 5;
    struct bd_variant *bad_variant = bd_router_served_at(w.router, bad)->variant;
    bad_variant->fails = true;
    start_world(&w);
    request *requests = calloc(COUNT, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i < COUNT; i++) {
        make_request(&w, &requests[i], &rng, i % 3 == 0 ? bad : i % 3 == 1 ? BASE : 1 + i % 4);
        submit(&requests[i]);
    }
    assert_true(wait_done(&w, COUNT, 30000));
    uint32_t corrupt = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        assert_int_equal(requests[i].status, i % 3 == 0 ? BD_E_VARIANT : BD_OK);
        if (i % 3 != 0) continue;
        assert_int_equal(requests[i].retry_after_s, 3); /* 2.5 s, rounded up */
        corrupt += requests[i].kind == BD_E_CORRUPT;
    }
    assert_true(corrupt > 0);
    assert_true(w.cache.loads <= 5);
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_metrics_write(w.metrics, &text);
    assert_non_null(strstr(
        text.data,
        "bitdelta_requests_total{result=\"variant_unavailable\",variant=\"zen-mini-french\"} 20"));
    assert_non_null(strstr(text.data, "vllm:num_requests_running{model_name=\"zen-mini\"} 0"));
    assert_non_null(
        strstr(text.data, "vllm:time_to_first_token_seconds_count{model_name=\"zen-mini\"} 20"));
    bd_strbuf_deinit(&text);
    close_world(&w);
    free(requests);
}

/* One variant's backlog does not delay another's only request. */
static void test_fairness(void **state) {
    (void)state;
    enum { COUNT = 120 };
    world w;
    fake_rng rng = {fake_seed()};
    open_world(&w, 4, 20000, 0);
    request *requests = calloc(COUNT + 1, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i <= COUNT; i++) {
        make_request(&w, &requests[i], &rng, i < COUNT ? 1 : 2);
        requests[i].job.prompt_count = requests[i].job.choices_per_prompt = 1;
        requests[i].job.params.max_new_tokens = 10;
        submit(&requests[i]); /* all before the loop starts */
    }
    start_world(&w);
    assert_true(wait_done(&w, COUNT + 1, 30000));
    assert_true(requests[COUNT].done_at < COUNT / 4);
    close_world(&w);
    free(requests);
}

/* One page, one variant that never stops asking: a second one gets its turn if and only if waiting
 * is bounded. With eight requests of changing length there is never a moment without any. */
static bool cold_gets_through(uint32_t cold_wait_us, uint32_t patience_ms) {
    enum { HOT = 8 };
    world w;
    fake_rng rng = {fake_seed()};
    _Atomic bool keep_going = true;
    open_world(&w, 1, cold_wait_us, 0);
    request *requests = calloc(HOT + 1, sizeof *requests);
    assert_non_null(requests);
    start_world(&w);
    for (uint32_t i = 0; i <= HOT; i++) {
        make_request(&w, &requests[i], &rng, i < HOT ? 1 : 2);
        requests[i].job.prompt_count = requests[i].job.choices_per_prompt = 1;
        if (i == HOT) fake_sleep_us(50000);
        requests[i].job.params.max_new_tokens = 15 + i;
        requests[i].again = i < HOT;
        requests[i].keep_going = &keep_going;
        submit(&requests[i]);
    }
    bool through = wait_done(&w, 1, patience_ms);
    atomic_store(&keep_going, false);
    assert_true(wait_done(&w, HOT + 1, 30000));
    close_world(&w);
    free(requests);
    return through;
}

static void test_cold_wait(void **state) {
    (void)state;
    assert_true(cold_gets_through(30000, 30000));
    assert_false(cold_gets_through(UINT32_MAX, 300));
}

typedef struct order {
    bd_change change; /* first member */
    atomic_bool done;
} order;

static void on_change(bd_change *change) {
    atomic_store(&((order *)change)->done, true);
}

static void retire_astro(world *w) {
    order o = {.change = {.kind = BD_CHANGE_UNLOAD, .name = "zen-mini-astro", .done = on_change}};
    bd_router_change(w->router, &o.change);
    for (uint32_t i = 0; i < 5000 && !atomic_load(&o.done); i++)
        fake_sleep_us(1000);
    assert_true(atomic_load(&o.done));
    assert_int_equal(o.change.status, BD_OK);
}

/* What holds the only page is retired, before a cold variant asks or while its sequences drain for
 * that one: the cold one gets the page, and what waits for the retired one goes on afterwards. */
static void retired_gives_way(bool before) {
    enum { OLD = 16 };
    world w;
    bd_error err;
    fake_rng rng = {fake_seed()};
    _Atomic bool keep_going = true;
    open_world(&w, 1, 20000, 0);
    request *requests = calloc(OLD + 1, sizeof *requests);
    assert_non_null(requests);
    w.fake.delay_us_max = 4000;
    start_world(&w);
    assert_int_equal(bd_router_start(w.router, &err), BD_OK);
    const bd_served *old = bd_router_find(w.router, "zen-mini-astro", 14, 0);
    const bd_served *cold = bd_router_find(w.router, "zen-mini-sql", 12, 0);
    for (uint32_t i = 0; i <= OLD; i++) {
        request *r = &requests[i];
        make_request(&w, r, &rng, 1);
        r->job.served = i < OLD ? old : cold;
        r->job.prompt_count = r->job.choices_per_prompt = 1;
        r->job.params.max_new_tokens = 60 + i;
        r->again = before && i < OLD;
        r->keep_going = &keep_going;
        if (i == OLD) fake_sleep_us(20000);
        if (i == OLD && before) retire_astro(&w);
        submit(r);
    }
    fake_sleep_us(60000);
    if (!before) retire_astro(&w);
    if (before) assert_true(wait_done(&w, 1, 30000)); /* the old ones come again and again */
    atomic_store(&keep_going, false);
    assert_true(wait_done(&w, OLD + 1, 30000));
    bd_router_release(w.router, old);
    bd_router_release(w.router, cold);
    bd_engine_stop(w.engine);
    bd_router_stop(w.router);
    close_world(&w);
    free(requests);
}

static void test_retired_gives_way(void **state) {
    (void)state;
    retired_gives_way(true);
    retired_gives_way(false);
}

/* Standard error goes to a file between the two; returns what it was. */
static int log_to(FILE *file) {
    const int before = dup(STDERR_FILENO);
    assert_true(before >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    return before;
}

static void log_back(FILE *file, int before, char *text, size_t text_bytes) {
    assert_true(dup2(before, STDERR_FILENO) >= 0);
    close(before);
    rewind(file);
    text[fread(text, 1, text_bytes - 1, file)] = '\0';
    fclose(file);
}

static void run_end_of_world(bool lost) {
    enum { COUNT = 60 };
    world w;
    FILE *log = tmpfile();
    char text[16384];
    assert_non_null(log);
    fake_rng rng = {fake_seed()};
    open_world(&w, 2, 20000, 0);
    const uint64_t held_step = 30;
    atomic_store(&w.fake.hold_from, held_step);
    start_world(&w);
    request *requests = calloc(COUNT + 1, sizeof *requests);
    assert_non_null(requests);
    for (uint32_t i = 0; i < COUNT; i++) {
        make_request(&w, &requests[i], &rng, fake_below(&rng, 15));
        submit(&requests[i]);
    }
    while (atomic_load(&w.fake.steps) < held_step) {
        bd_engine_wake(w.engine);
        fake_sleep_us(500);
    }
    make_request(&w, &requests[COUNT], &rng, 3);
    bd_refused why;
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 9}, &why), BD_OK);
    bd_router_unreserve(w.router, &(bd_ask){.choices = 9});
    uint32_t n = requests[COUNT].job.prompt_count * requests[COUNT].job.choices_per_prompt;
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = n}, &why), BD_OK);
    const int before = log_to(log);
    if (lost)
        atomic_store(&w.fake.lose_device, true);
    else
        bd_engine_stop(w.engine);
    atomic_store(&w.fake.hold_from, 0);
    if (lost) assert_true(wait_done(&w, COUNT, 60000));
    bd_router_submit(w.router, &requests[COUNT].job); /* its reservation was made in time */
    assert_true(wait_done(&w, COUNT + 1, 60000));
    log_back(log, before, text, sizeof text);
    /* An end that nobody ordered has its reason in the log. */
    assert_true(lost == (strstr(text, "level=error mod=router") != NULL));
    assert_true(lost == (strstr(text, "the device is gone") != NULL));
    uint32_t failed = 0;
    for (uint32_t i = 0; i <= COUNT; i++) {
        assert_int_equal(requests[i].dones, 1);
        if (requests[i].status == BD_OK) continue;
        assert_int_equal(requests[i].status, lost ? BD_E_DEVICE : BD_E_SHUTDOWN);
        failed++;
    }
    assert_true(failed > 5);
    assert_int_equal(requests[COUNT].status, lost ? BD_E_DEVICE : BD_E_SHUTDOWN);
    if (lost)
        assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 1}, &why), BD_E_DEVICE);
    w.cache.engine = lost ? w.engine : NULL; /* late calls run on this thread */
    close_world(&w);
    free(requests);
}

static void test_stop(void **state) {
    (void)state;
    run_end_of_world(false);
}

static void test_lost(void **state) {
    (void)state;
    run_end_of_world(true);
}

static void test_reserve(void **state) {
    (void)state;
    world w;
    bd_refused why;
    open_world(&w, 2, 20000, 10);
    assert_true(bd_router_idle(w.router));
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 7}, &why), BD_OK);
    assert_false(bd_router_idle(w.router));
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 4}, &why), BD_BUSY);
    assert_in_range(why.retry_after_s, 1, 60);
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 3}, &why), BD_OK);
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 1}, &why), BD_BUSY);
    bd_router_unreserve(w.router, &(bd_ask){.choices = 10});
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 40}, &why),
                     BD_OK); /* alone */
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 1}, &why), BD_BUSY);
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = UINT32_MAX}, &why), BD_BUSY);
    bd_router_unreserve(w.router, &(bd_ask){.choices = 40});
    bd_router_drain(w.router);
    assert_int_equal(bd_router_reserve(w.router, &(bd_ask){.choices = 1}, &why), BD_E_SHUTDOWN);
    close_world(&w);
}

static void count_fault(void *ctx, const char *dir, const bd_error *err) {
    uint32_t *faults = ctx;
    assert_non_null(strstr(dir, "bad-variant"));
    assert_int_not_equal(err->status, BD_OK);
    ++*faults;
}

static void test_registry(void **state) {
    (void)state;
    world w;
    bd_error err;
    uint32_t added, faults = 0;
    open_world(&w, 2, 20000, 10);
    assert_string_equal(bd_router_served_at(w.router, 0)->name, "zen-mini");
    assert_string_equal(bd_router_served_at(w.router, 1)->name, "zen-mini-astro");
    assert_string_equal(bd_router_served_at(w.router, 14)->name, "zen-mini-writer");
    assert_null(bd_router_served_at(w.router, 15));
    for (uint32_t i = 0; i < 15; i++) {
        const bd_served *s = bd_router_served_at(w.router, i);
        assert_ptr_equal(bd_router_find(w.router, s->name, strlen(s->name), 0), s);
        assert_int_equal(s->max_model_len, 512);
        assert_int_equal(s->vocab, 4096);
        assert_int_equal(s->eos_count, w.model.config.eos_count);
        assert_int_equal(s->variant == NULL, i == 0);
    }
    assert_null(bd_router_find(w.router, "zen-mini-astr", 13, 0));
    assert_null(bd_router_find(w.router, "", 0, 0));
    /* The same names again are refused, each by name; a name of its own is fine. */
    assert_int_equal(bd_router_add_variant(w.router, NULL, "demo/deltas/zen-mini-c", false, &err),
                     BD_E_ARGUMENT);
    assert_string_equal(err.subject, "zen-mini-c");
    assert_int_equal(
        bd_router_add_variant(w.router, "zen-mini", "demo/deltas/zen-mini-c", false, &err),
        BD_E_ARGUMENT);
    assert_int_equal(
        bd_router_add_variant(w.router, "a/new name", "demo/deltas/zen-mini-c", true, &err), BD_OK);
    assert_string_equal(bd_router_served_at(w.router, 1)->name, "a/new name");
    assert_string_equal(bd_router_served_at(w.router, 1)->variant->name, "a/new name");
    assert_true(bd_router_served_at(w.router, 1)->variant->pinned);
    assert_int_equal(
        bd_router_add_variant(w.router, "too-large", "demo/deltas/zen-mini-c", false, &err),
        BD_E_LIMIT);
    assert_null(bd_router_find(w.router, "too-large", 9, 0));
    assert_int_not_equal(bd_router_add_variant(w.router, NULL, "demo/no-such", false, &err), BD_OK);
    assert_non_null(strstr(err.subject, "demo/no-such"));
    assert_int_equal(bd_router_add_variant(w.router, "", "demo/deltas/zen-mini-c", false, &err),
                     BD_E_ARGUMENT);
    /* A directory with one that is broken. */
    char root[] = "/tmp/bd-router-XXXXXX", path[128];
    assert_non_null(mkdtemp(root));
    snprintf(path, sizeof path, "%s/bad-variant", root);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/bad-variant/delta.json", root);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("{\"format\": \"something else\"}", file);
    fclose(file);
    assert_int_equal(bd_router_add_directory(w.router, root, count_fault, &faults, &added, &err),
                     BD_OK);
    assert_int_equal(faults, 1);
    assert_int_equal(added, 0);
    unlink(path);
    snprintf(path, sizeof path, "%s/bad-variant", root);
    rmdir(path);
    rmdir(root);
    assert_int_equal(bd_router_add_directory(w.router, root, NULL, NULL, &added, &err), BD_E_IO);
    assert_non_null(strstr(err.message, strerror(ENOENT)));
    close_world(&w);
}

static void test_names(void **state) {
    (void)state;
    static const char *const bad[] = {"a\nb", "\x7f", "a\"b", "it's", "a`b",  "a\\b",   " a",
                                      "a ",   " ",    "..",   "../a", "a/..", "a/../b", "a//../b"};
    static const char *const good[] = {"org/model", "a b",        "a..b", "a/..b",
                                       "a../b",     "v \xc3\xbc", "...",  "a:1"};
    char longest[BD_VARIANT_NAME_MAX + 2];
    world w;
    bd_error err;
    open_world(&w, 2, 20000, 10);
    const char *dir = "demo/deltas/zen-mini-c";
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_int_equal(bd_router_add_variant(w.router, longest, dir, false, &err), BD_E_ARGUMENT);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(bd_router_add_variant(w.router, bad[i], dir, false, &err), BD_E_ARGUMENT);
        assert_non_null(strstr(err.message, dir));
        assert_null(bd_router_find(w.router, bad[i], strlen(bad[i]), 0));
    }
    longest[BD_VARIANT_NAME_MAX] = '\0';
    assert_int_equal(bd_router_add_variant(w.router, longest, dir, false, &err), BD_OK);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        assert_int_equal(bd_router_add_variant(w.router, good[i], dir, false, &err), BD_OK);
    close_world(&w);
}

typedef struct seen_faults {
    uint32_t count;
    char dir[160];
    bd_error err;
} seen_faults;

static void see_fault(void *ctx, const char *dir, const bd_error *err) {
    seen_faults *seen = ctx;
    seen->count++;
    snprintf(seen->dir, sizeof seen->dir, "%s", dir);
    seen->err = *err;
}

/* Leftovers of a compress and what is no variant are passed over; what cannot be looked at is told.
 */
static void test_directory(void **state) {
    (void)state;
    static const char *const skipped[] = {"x.tmp-4711", ".hidden", "plain", "file"};
    world w;
    bd_error err;
    seen_faults seen = {0};
    uint32_t added;
    char root[] = "/tmp/bd-router-XXXXXX", path[128], demo[1024], *cwd = getcwd(NULL, 0);
    open_world(&w, 2, 20000, 10);
    assert_non_null(mkdtemp(root));
    snprintf(demo, sizeof demo, "%s/demo/deltas/zen-mini-c", cwd);
    free(cwd);
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", root, skipped[i]);
        if (i < 2)
            assert_int_equal(symlink(demo, path), 0);
        else if (i == 2)
            assert_int_equal(mkdir(path, 0700), 0);
        else
            assert_int_equal(symlink("/dev/null", path), 0);
    }
    assert_int_equal(bd_router_add_directory(w.router, root, see_fault, &seen, &added, &err),
                     BD_OK);
    assert_int_equal(seen.count, 0);
    assert_int_equal(added, 0);
    snprintf(path, sizeof path, "%s/loop", root);
    assert_int_equal(symlink("loop", path), 0);
    assert_int_equal(bd_router_add_directory(w.router, root, see_fault, &seen, &added, &err),
                     BD_OK);
    assert_int_equal(seen.count, 1);
    assert_string_equal(seen.dir, path);
    assert_int_equal(seen.err.status, BD_E_IO);
    assert_non_null(strstr(seen.err.message, strerror(ELOOP)));
    unlink(path);
    snprintf(path, sizeof path, "%s/x.tmp-", root); /* a name like any other, but taken */
    assert_int_equal(symlink(demo, path), 0);
    assert_int_equal(bd_router_add_directory(w.router, root, see_fault, &seen, &added, &err),
                     BD_OK);
    assert_int_equal(seen.count, 2);
    assert_string_equal(seen.dir, path);
    unlink(path);
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", root, skipped[i]);
        if (unlink(path) != 0) rmdir(path);
    }
    assert_int_equal(rmdir(root), 0);
    close_world(&w);
}

static void test_another_base(void **state) {
    (void)state;
    world w;
    bd_error err;
    char was[65], is[65];
    open_world(&w, 2, 20000, 10);
    /* Up to the digit that differs, but 16 at least. */
    for (size_t at = 0; at < 64; at++) {
        char *digit = &w.model.fingerprint[at];
        const char before = *digit;
        memcpy(was, w.model.fingerprint, sizeof was);
        *digit = before == '0' ? '1' : '0';
        memcpy(is, w.model.fingerprint, sizeof is);
        was[at < 16 ? 16 : at + 1] = is[at < 16 ? 16 : at + 1] = '\0';
        assert_int_equal(
            bd_router_add_variant(w.router, "x", "demo/deltas/zen-mini-c", false, &err),
            BD_E_MISMATCH);
        assert_non_null(strstr(err.message, "zen-mini-c"));
        assert_non_null(strstr(err.message, was));
        assert_non_null(strstr(err.message, is));
        *digit = before;
    }
    assert_null(bd_router_find(w.router, "x", 1, 0));
    assert_int_equal(bd_router_served_count(w.router), 15);
    close_world(&w);
}

typedef struct no_pages {
    bd_call call; /* first member */
    bd_cache *cache;
} no_pages;

/* On bd-sched, whose the cache is. */
static void take_pages(bd_call *call, bd_engine *engine) {
    bd_cache *cache = ((no_pages *)(void *)call)->cache;
    (void)engine;
    cache->pages = cache->pages_used = 0;
    for (uint32_t i = 0; i < cache->count; i++)
        if (cache->variants[i].state == BD_VARIANT_LOADING)
            cache->variants[i].state = BD_VARIANT_ABSENT;
}

/* Until the variant of infos[at] is in the state that its load ends in. */
static void await_state(world *w, uint32_t at, bd_variant_state state) {
    bd_router_info infos[14];
    for (uint32_t ms = 0;; ms++) {
        assert_int_equal(bd_router_infos(w->router, infos, 14), 14);
        if (infos[at].cache.state == state) return;
        assert_true(ms < 60000);
        bd_engine_wake(w->engine); /* what the loader's notify does */
        fake_sleep_us(1000);
    }
}

static void test_admin(void **state) {
    (void)state;
    world w;
    bd_error err;
    open_world(&w, 2, 20000, 10);
    bd_router_served_at(w.router, 3)->variant->fails = true;
    start_world(&w);
    static bd_router_info infos[20];
    const bd_served *astro = bd_router_served_at(w.router, 1);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_LOAD, astro, &err), BD_AGAIN);
    await_state(&w, 0, BD_VARIANT_READY);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_LOAD, astro, &err), BD_OK);
    assert_int_equal(bd_router_infos(w.router, infos, 20), 14);
    assert_null(infos[2].cache.failure);
    assert_string_equal(infos[0].name, "zen-mini-astro");
    assert_int_equal(infos[0].cache.state, BD_VARIANT_READY);
    assert_int_equal(infos[1].cache.state, BD_VARIANT_ABSENT);
    assert_int_equal(bd_router_infos(w.router, infos, 3), 3);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_PIN, astro, &err), BD_OK);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_UNLOAD, astro, &err), BD_OK);
    assert_int_equal(bd_router_infos(w.router, infos, 1), 1);
    assert_true(infos[0].cache.pinned);
    assert_int_equal(infos[0].cache.state, BD_VARIANT_ABSENT);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_UNPIN, astro, &err), BD_OK);
    assert_int_equal(
        bd_router_admin(w.router, BD_ADMIN_LOAD, bd_router_served_at(w.router, 0), &err),
        BD_E_ARGUMENT);
    /* A failed one: its error for the order and, copied, in the list. */
    const bd_served *bad = bd_router_served_at(w.router, 3);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_LOAD, bad, &err), BD_AGAIN);
    await_state(&w, 2, BD_VARIANT_FAILED);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_LOAD, bad, &err), BD_E_VARIANT);
    assert_string_equal(err.message, "planted: a chunk is corrupt");
    assert_int_equal(bd_router_infos(w.router, infos, 20), 14);
    assert_int_equal(infos[2].cache.state, BD_VARIANT_FAILED);
    assert_ptr_equal(infos[2].cache.failure, &infos[2].failure);
    assert_string_equal(infos[2].failure.message, "planted: a chunk is corrupt");
    assert_null(infos[0].cache.failure);
    /* No pages while others load, and no pages for good: it says which. */
    w.cache.load_us = 60000000;
    for (uint32_t i = 4; i < 6; i++)
        assert_int_equal(
            bd_router_admin(w.router, BD_ADMIN_LOAD, bd_router_served_at(w.router, i), &err),
            BD_AGAIN);
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_LOAD, astro, &err), BD_BUSY);
    assert_non_null(strstr(err.message, "no pages; variant "));
    assert_non_null(strstr(err.message, " is still loading"));
    no_pages taken = {.call.run = take_pages, .cache = &w.cache};
    bd_engine_post(w.engine, &taken.call);
    /* Calls run in order: the order that follows finds it done. */
    assert_int_equal(bd_router_admin(w.router, BD_ADMIN_LOAD, astro, &err), BD_BUSY);
    assert_string_equal(err.message, "no pages");
    close_world(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_registry),
        cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_fairness),
        cmocka_unit_test(test_failed_load),
        cmocka_unit_test(test_cold_wait),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_lost),
        cmocka_unit_test(test_admin),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_directory),
        cmocka_unit_test(test_another_base),
        cmocka_unit_test(test_retired_gives_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
