/* test_engine_device.c - a device that fails under the real engine, cache and loader: what was
 * touched ends with an error that becomes 503, the rest goes on or ends too, the engine says that
 * the device is lost, nothing hangs. The same with two ranks, of which one fails: after a step that
 * a rank did not end the ranks are lost, whatever the fault was. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/router/router.h"
#include "faulty_backend.h"
#include "model_support.h"

enum { DEADLINE_US = 3000000, REQUESTS = 6 };

typedef struct world {
    bd_model *model;
    bd_loader *loader;
    bd_cache *cache;
    bd_router *router;
    pthread_mutex_t lock;
    bd_engine *engine; /* guarded by lock against the loader's thread */
    _Atomic uint32_t done;
} world;

typedef struct request {
    world *world;
    bd_job job;
    bd_prompt prompt;
    bd_status status;
    bd_error error;
    uint32_t count;
} request;

static uint32_t ranks = 1; /* of the worlds to come */

static const int32_t prompt_ids[] = {5, 17, 300, 42, 9, 1200, 77, 3};

static void on_load_moved(void *ctx) {
    world *w = ctx;
    pthread_mutex_lock(&w->lock);
    if (w->engine) bd_engine_wake(w->engine);
    pthread_mutex_unlock(&w->lock);
}

static void report_fault(void *ctx, const char *dir, const bd_error *err) {
    (void)ctx;
    fail_msg("%s: %s", dir, err->message);
}

static bd_model_options model_options(void) {
    return (bd_model_options){.dir = "demo/zen-mini",
                              .ops = faulty_ops(),
                              .rank_count = ranks,
                              .thread_count = 2,
                              .rows_max = 64,
                              .seqs_max = 8,
                              .logits_rows_max = 16,
                              .kv_block_tokens = 16,
                              .kv_tokens = 1024,
                              .rope_tables_max = 1,
                              .max_model_len = 256,
                              .delta_slots = 3};
}

static void open_world(world *w) {
    bd_error err = {0};
    uint32_t added;
    memset(w, 0, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    const bd_model_options model = model_options();
    MS_OK(bd_model_open(&model, &w->model, &err), err);
    const bd_loader_options loader = {
        .model = w->model, .notify = on_load_moved, .notify_ctx = w, .depth = 2};
    MS_OK(bd_loader_create(&loader, &w->loader, &err), err);
    const bd_cache_options cache = {.model = w->model,
                                    .loader = w->loader,
                                    .page_count = bd_model_page_count(w->model),
                                    .pinned_top = 1,
                                    .retry_after_us = 1000000};
    MS_OK(bd_cache_create(&cache, &w->cache, &err), err);
    const bd_router_options router = {.cache = w->cache,
                                      .model = w->model,
                                      .base_name = "zen-mini",
                                      .base_dir = "demo/zen-mini",
                                      .cold_wait_max_us = 50000};
    MS_OK(bd_router_create(&router, &w->router, &err), err);
    MS_OK(bd_router_add_directory(w->router, "demo/deltas", report_fault, NULL, &added, &err), err);
    const bd_engine_options options = {.model = w->model,
                                       .cache = w->cache,
                                       .model_name = "zen-mini",
                                       .rows_max = model.rows_max,
                                       .prefill_chunk_tokens = 32,
                                       .seqs_max = model.seqs_max,
                                       .variants_per_step_max = 4,
                                       .logits_rows_max = model.logits_rows_max,
                                       .step_deadline_us = DEADLINE_US,
                                       .decode_delta = true,
                                       .hooks = bd_router_hooks(w->router)};
    bd_engine *engine;
    MS_OK(bd_engine_create(&options, &engine, &err), err);
    bd_router_attach(w->router, engine);
    pthread_mutex_lock(&w->lock);
    w->engine = engine;
    pthread_mutex_unlock(&w->lock);
    MS_OK(bd_engine_start(engine, &err), err);
}

static void close_world(world *w) {
    bd_engine *engine = w->engine;
    bd_engine_stop(engine);
    pthread_mutex_lock(&w->lock);
    w->engine = NULL;
    pthread_mutex_unlock(&w->lock);
    bd_engine_destroy(engine);
    bd_router_destroy(w->router);
    bd_cache_destroy(w->cache);
    bd_loader_destroy(w->loader);
    bd_model_close(w->model);
    pthread_mutex_destroy(&w->lock);
}

static bool on_token(void *ctx, uint32_t choice, const bd_token_result *token) {
    (void)choice;
    (void)token;
    ((request *)ctx)->count++;
    return true;
}

static void on_done(void *ctx, bd_status status, const bd_error *err, uint32_t retry_after_s) {
    request *r = ctx;
    (void)retry_after_s;
    r->status = status;
    if (err) r->error = *err;
    atomic_fetch_add(&r->world->done, 1);
}

/* BD_OK: queued, on_done will come; else why it was turned away. */
static bd_status submit(world *w, request *r, uint32_t served, uint32_t tokens) {
    static const bd_job_sink sink = {on_token, NULL, NULL, on_done};
    bd_refused why;
    memset(r, 0, sizeof *r);
    r->world = w;
    r->prompt = (bd_prompt){prompt_ids, sizeof prompt_ids / sizeof *prompt_ids};
    r->job.served = bd_router_served_at(w->router, served);
    r->job.prompts = &r->prompt;
    r->job.prompt_count = r->job.choices_per_prompt = 1;
    r->job.params = (bd_sequence_options){
        .max_new_tokens = tokens, .prompt_logprobs = -1, .sampling = {.top_p = 1}};
    r->job.sink = &sink;
    r->job.sink_ctx = r;
    r->job.received_us = bd_now_us();
    const bd_status s = bd_router_reserve(w->router, &(bd_ask){.choices = 1}, &why);
    if (s == BD_OK) bd_router_submit(w->router, &r->job);
    return s;
}

static void wait_done(world *w, uint32_t count) {
    for (uint32_t i = 0; i < 60000 && atomic_load(&w->done) < count; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    assert_int_equal(atomic_load(&w->done), count);
    atomic_store(&w->done, 0);
}

/* Several variants and the base at once; the fault strikes while they run. */
static void run_fault(faulty_place place, bd_status status, bool sticky, uint32_t calls) {
    world w;
    request requests[REQUESTS], after;
    open_world(&w);
    assert_int_equal(submit(&w, &after, 0, 4), BD_OK);
    wait_done(&w, 1);
    assert_int_equal(after.status, BD_OK);
    assert_false(bd_engine_lost(w.engine));
    faulty_order(place, status, sticky, calls);
    const bool lost = status == BD_E_DEVICE || ranks > 1;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        const bd_status s = submit(&w, &requests[i], i % 3, 100);
        if (s == BD_OK) continue;
        assert_true(lost); /* those before were quick to find the fault */
        requests[i].status = s;
        atomic_fetch_add(&w.done, 1);
    }
    wait_done(&w, REQUESTS); /* while a device that does not answer still does not */
    uint32_t failed = 0;
    for (uint32_t i = 0; i < REQUESTS; i++)
        if (requests[i].status != BD_OK) {
            failed++;
            assert_int_equal(bd_status_http(requests[i].status), 503);
        }
    assert_true(lost ? failed == REQUESTS : failed > 0);
    assert_int_equal(bd_engine_lost(w.engine), lost);
    /* Afterwards: a lost device answers at once, another fault was one step's. */
    const bd_status taken = submit(&w, &after, 0, 4);
    if (taken == BD_OK) wait_done(&w, 1);
    const bd_status answer = taken == BD_OK ? after.status : taken;
    assert_int_equal(answer == BD_OK, !lost);
    if (lost) assert_int_equal(bd_status_http(answer), 503);
    atomic_store(&faulty.release, true);
    close_world(&w);
}

static void test_error_that_sticks(void **state) {
    (void)state;
    run_fault(FAULTY_LINEAR, BD_E_DEVICE, true, 40);
    run_fault(FAULTY_BEGIN, BD_E_DEVICE, true, 2);
}
static void test_error_while_waiting(void **state) {
    (void)state;
    run_fault(FAULTY_WAIT, BD_E_DEVICE, true, 3);
}
static void test_out_of_memory_in_a_step(void **state) {
    (void)state;
    run_fault(FAULTY_LINEAR, BD_E_MEMORY, false, 10);
    run_fault(FAULTY_BEGIN, BD_E_MEMORY, false, 1);
}
static void test_device_that_does_not_answer(void **state) {
    (void)state;
    run_fault(FAULTY_HANG, BD_E_DEVICE, true, 0);
}

static void test_fault_of_a_load(void **state) {
    (void)state;
    world w;
    request variant, base;
    open_world(&w);
    faulty_order(FAULTY_PLANE, BD_E_MEMORY, false, 5);
    assert_int_equal(submit(&w, &variant, 4, 4), BD_OK);
    assert_int_equal(submit(&w, &base, 0, 4), BD_OK);
    wait_done(&w, 2);
    assert_int_equal(base.status, BD_OK);
    assert_int_not_equal(variant.status, BD_OK);
    assert_int_equal(bd_status_http(variant.status), 503);
    assert_false(bd_engine_lost(w.engine));
    close_world(&w);
}

static void test_out_of_memory_at_open(void **state) {
    (void)state;
    bd_error err = {0};
    bd_model *model = NULL;
    const bd_model_options options = model_options();
    faulty_order(FAULTY_OPEN, BD_E_MEMORY, false, 0);
    assert_int_equal(bd_model_open(&options, &model, &err), BD_E_MEMORY);
    assert_null(model);
    assert_non_null(strstr(err.message, "planted"));
}

static int two_ranks(void **state) {
    (void)state;
    ranks = 2;
    return 0;
}

static int one_rank(void **state) {
    (void)state;
    ranks = 1;
    return 0;
}

#define OF_TWO(test)                                                                               \
    { #test ", two ranks", test, two_ranks, one_rank, NULL }

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_error_that_sticks),
                                       cmocka_unit_test(test_error_while_waiting),
                                       cmocka_unit_test(test_out_of_memory_in_a_step),
                                       cmocka_unit_test(test_device_that_does_not_answer),
                                       cmocka_unit_test(test_fault_of_a_load),
                                       cmocka_unit_test(test_out_of_memory_at_open),
                                       OF_TWO(test_error_that_sticks),
                                       OF_TWO(test_error_while_waiting),
                                       OF_TWO(test_out_of_memory_in_a_step),
                                       OF_TWO(test_device_that_does_not_answer),
                                       OF_TWO(test_fault_of_a_load),
                                       OF_TWO(test_out_of_memory_at_open)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
