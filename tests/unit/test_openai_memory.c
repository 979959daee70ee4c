/* Allocation failure anywhere in the life of a completion: the sources are compiled in with
 * allocators that fail at the n-th call, for every n, over a router of this file that hands the
 * job's sink a fixed run of tokens. The outcome is a whole answer or an error, the queue room is
 * back, and (sanitizers) nothing is lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>
#undef fail /* a function of the sources below */

static unsigned calls_left; /* the call that finds 0 fails, and all after it */

static bool spend(void) {
    if (calls_left == 0) return false;
    calls_left--;
    return true;
}

static void *fail_malloc(size_t bytes) {
    return spend() ? malloc(bytes) : NULL;
}

static void *fail_calloc(size_t count, size_t bytes) {
    return spend() ? calloc(count, bytes) : NULL;
}

static void *fail_realloc(void *memory, size_t bytes) {
    return spend() ? realloc(memory, bytes) : NULL;
}

#define malloc  fail_malloc
#define calloc  fail_calloc
#define realloc fail_realloc
#include "base/arena.c"
#undef ARENA_ALIGN
#define decimal strbuf_decimal /* both files have one */
#include "base/strbuf.c"
#undef decimal
#include "openai/error.c"
#include "openai/fields.c"
#include "openai/json_view.c"
#include "openai/logprobs.c"
#include "openai/openai.c"
#define reserve prepare_reserve /* and this */
#include "openai/prepare.c"
#undef reserve
#include "openai/request.c"
#include "openai/sinks.c"
#include "openai/stop.c"
#include "openai/write.c"
#undef malloc
#undef calloc
#undef realloc

static bd_served served = {.name = "zen",
                           .is_base = true,
                           .max_model_len = 64,
                           .vocab = 4096,
                           .eos_count = 1,
                           .eos_ids = {4081}};
static uint32_t reserved_now;
static bool cancelled;
static bd_job *submitted;

uint32_t bd_router_served_count(bd_router *router) {
    (void)router;
    return 1;
}

const bd_served *bd_router_served_at(bd_router *router, uint32_t index) {
    (void)router;
    (void)index;
    return &served;
}

const bd_served *bd_router_find(bd_router *router, const char *name, size_t name_bytes,
                                const bd_tenant *tenant) {
    (void)router;
    (void)tenant;
    return name_bytes == 3 && memcmp(name, "zen", 3) == 0 ? &served : NULL;
}

void bd_router_release(bd_router *router, const bd_served *which) {
    (void)router;
    (void)which;
}

const bd_served **bd_router_list(bd_router *router, const bd_tenant *tenant, uint32_t *count) {
    (void)router;
    (void)tenant;
    const bd_served **list = calloc(1, sizeof(const bd_served *));
    *count = list ? 1 : 0;
    if (list) list[0] = &served;
    return list;
}

void bd_router_list_release(bd_router *router, const bd_served **list, uint32_t count) {
    (void)router;
    (void)count;
    free(list);
}

bd_status bd_router_reserve(bd_router *router, bd_ask *ask, bd_refused *why) {
    (void)router;
    (void)why;
    reserved_now += ask->choices;
    return BD_OK;
}

void bd_router_unreserve(bd_router *router, const bd_ask *ask) {
    (void)router;
    reserved_now -= ask->choices;
}

void bd_router_wake(bd_router *router) {
    (void)router;
}

void bd_router_help(bd_router *router) {
    (void)router;
}

void bd_router_submit_quietly(bd_router *router, bd_job *job) {
    (void)router;
    reserved_now -= job->prompt_count * job->choices_per_prompt;
    submitted = job;
}

void bd_router_cancel(bd_router *router, bd_job *job) {
    (void)router;
    (void)job;
    cancelled = true;
}

/* What the engine would do with the job: prompt results, then four tokens for every choice. */
static void run_job(bd_job *job) {
    bd_token_result results[64] = {{.id = 0}};
    for (uint32_t choice = 0; choice < job->prompt_count * job->choices_per_prompt && !cancelled;
         choice++) {
        const bd_prompt *prompt = &job->prompts[choice / job->choices_per_prompt];
        for (uint32_t i = 1; i < prompt->count; i++)
            results[i] = (bd_token_result){
                .id = prompt->ids[i], .logprob = -1.5f, .rank = 2, .top_count = 1, .top_ids = {9}};
        if (job->params.prompt_logprobs >= 0 && choice % job->choices_per_prompt == 0)
            job->sink->prompt(job->sink_ctx, choice, 1, results + 1, prompt->count - 1);
        for (int32_t i = 0; i < 4 && !cancelled; i++) {
            bd_token_result token = {.id = 100 + i,
                                     .logprob = -0.25f,
                                     .rank = 1,
                                     .top_count = 1,
                                     .top_ids = {100 + i},
                                     .top_logprobs = {-0.25f}};
            if (!job->sink->token(job->sink_ctx, choice, &token)) break;
        }
        if (!cancelled) job->sink->end(job->sink_ctx, choice, BD_FINISH_LENGTH, -1);
    }
    job->sink->done(job->sink_ctx, cancelled ? BD_CANCELLED : BD_OK, NULL, 0);
}

static unsigned events, dones;

static bool take_event(void *ctx, const char *data, size_t bytes, bool exempt) {
    (void)ctx;
    (void)exempt;
    assert_true(bytes > 8 && memcmp(data, "data: ", 6) == 0 &&
                memcmp(data + bytes - 2, "\n\n", 2) == 0);
    events++;
    return true;
}

static void take_done(void *ctx) {
    (void)ctx;
    dones++;
}

/* true: the answer came whole. */
static bool attempt(const char *body, bool stream) {
    static const bd_completion_sink sink = {.event = take_event, .done = take_done};
    const bd_openai openai = {.response_bytes_max = 1 << 20, .prompts_max = 8};
    bd_api_error err = {0};
    cancelled = false;
    events = dones = 0;
    bd_completion *completion = bd_completion_create(&openai, 0, body, strlen(body), 1, &err);
    if (!completion) {
        assert_int_equal(err.kind, BD_API_INTERNAL);
        assert_int_equal(reserved_now, 0);
        return false;
    }
    bd_completion_submit(completion, &sink, NULL);
    run_job(submitted);
    assert_int_equal(dones, 1);
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    bool whole = !bd_completion_failed(completion);
    if (!stream) whole = bd_completion_reply(completion, &out, &err);
    if (whole && !stream) {
        cJSON *tree = cJSON_Parse(out.data);
        assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(tree, "choices")), 4);
        cJSON_Delete(tree);
    }
    bd_strbuf_deinit(&out);
    bd_completion_destroy(completion);
    assert_int_equal(reserved_now, 0);
    return whole;
}

static void every_failure(const char *body, bool stream) {
    unsigned n = 0;
    for (;; n++) {
        calls_left = n;
        if (attempt(body, stream)) break;
        assert_true(n < 5000);
    }
    print_message("%u allocations\n", n);
    assert_true(n > 20);
}

#define FIELDS                                                                                     \
    "{\"model\":\"zen\",\"prompt\":[\"Hello "                                                      \
    "there\",\"b\"],\"n\":2,\"echo\":true,\"logprobs\":1,\"prompt_logprobs\":0,"                   \
    "\"stop\":[\"zzz\",\"yy\"],\"logit_bias\":{\"5\":1,\"3\":2},\"stop_token_ids\":[7],\"return_"  \
    "token_ids\":true,"                                                                            \
    "\"max_tokens\":4"

static void test_whole(void **state) {
    (void)state;
    every_failure(FIELDS "}", false);
}

static void test_stream(void **state) {
    (void)state;
    every_failure(FIELDS ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}", true);
    assert_int_equal(events, 4 * 4 + 2);
}

/* A response over its bound ends in an error that says so. */
static void test_too_large(void **state) {
    (void)state;
    static const bd_completion_sink sink = {.event = take_event, .done = take_done};
    const bd_openai openai = {.response_bytes_max = 300, .prompts_max = 8};
    bd_api_error err = {0};
    calls_left = UINT32_MAX;
    cancelled = false;
    bd_completion *completion =
        bd_completion_create(&openai, 0, FIELDS "}", strlen(FIELDS "}"), 1, &err);
    assert_non_null(completion);
    bd_completion_submit(completion, &sink, NULL);
    run_job(submitted);
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    assert_false(bd_completion_reply(completion, &out, &err));
    assert_int_equal(err.kind, BD_API_VALUE);
    assert_true(cancelled);
    bd_completion_destroy(completion);
}

static int open_tokenizer(void **state) {
    bd_tokenizer *tokenizer = NULL;
    calls_left = UINT32_MAX;
    (void)state;
    if (bd_tokenizer_load(&tokenizer, "demo/zen-mini/tokenizer.json", NULL) != BD_OK) return -1;
    served.tokenizer = tokenizer;
    *state = tokenizer;
    return 0;
}

static int close_tokenizer(void **state) {
    bd_tokenizer_destroy(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_too_large),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
