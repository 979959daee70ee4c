/* Allocation failure anywhere in front of the engine: every call of malloc, calloc or realloc that
 * a request makes on its way through template, tokenizer, API, router and sinks fails once, alone
 * and together with all that follow. The linker puts the functions below in their place; the
 * engine is fake_engine.c, so all of it happens on this thread. The outcome is the whole answer or
 * an error, nothing stays reserved, and (sanitizers) nothing is lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../fuzz/front.h"
#include "bitdelta/openai/openai.h"

enum { NONE = INT32_MAX };

static _Thread_local int32_t calls_left = NONE; /* the call that finds 0 fails */
static _Thread_local bool for_good;             /* and all after it */
static _Thread_local uint32_t failures;

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);

static bool spend(void) {
    if (calls_left == NONE) return true;
    if (calls_left > 0 || (calls_left < 0 && !for_good)) {
        calls_left--;
        return true;
    }
    calls_left = -1;
    failures++;
    return false;
}

void *__wrap_malloc(size_t bytes) {
    return spend() ? __real_malloc(bytes) : NULL;
}

void *__wrap_calloc(size_t count, size_t bytes) {
    return spend() ? __real_calloc(count, bytes) : NULL;
}

void *__wrap_realloc(void *memory, size_t bytes) {
    return spend() ? __real_realloc(memory, bytes) : NULL;
}

typedef struct outcome {
    uint32_t events, dones;
} outcome;

static bool take_event(void *ctx, const char *data, size_t bytes, bool exempt) {
    (void)exempt;
    BD_ASSERT(bytes > 8 && memcmp(data, "data: ", 6) == 0);
    ((outcome *)ctx)->events++;
    return true;
}

static void take_done(void *ctx) {
    ((outcome *)ctx)->dones++;
}

typedef enum route { COMPLETION, CHAT, TOKENIZE, DETOKENIZE } route;

static bool complete(const bd_openai *openai, route where, const char *body, bd_strbuf *out,
                     bd_api_error *err) {
    static const bd_completion_sink sink = {.event = take_event, .done = take_done};
    outcome seen = {0};
    bd_completion *completion =
        where == CHAT ? bd_chat_completion_create(openai, NULL, body, strlen(body), 1, err)
                      : bd_completion_create(openai, NULL, body, strlen(body), 1, err);
    if (!completion) return false;
    bd_completion_submit(completion, &sink, &seen);
    BD_ASSERT(seen.dones == 1);
    bool ok = !bd_completion_failed(completion);
    if (!bd_completion_is_stream(completion) || !ok) ok = bd_completion_reply(completion, out, err);
    bd_completion_destroy(completion);
    return ok;
}

/* true: the whole answer came. */
static bool attempt(route where, const char *body, int32_t fail_at) {
    const bd_openai_options options = {.router = fuzz_router(),
                                       .base_fingerprint = "0",
                                       .chat_template_path =
                                           "tests/fuzz/corpus/chat_template/qwen3.jinja"};
    bd_openai *openai = NULL;
    bd_api_error err = {.kind = BD_API_OK};
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    /* A new one each time: it reads the template when it is first asked for. */
    assert_int_equal(bd_openai_create(&options, &openai, NULL), BD_OK);
    calls_left = fail_at;
    bool ok = where == TOKENIZE ? bd_openai_tokenize(openai, NULL, body, strlen(body), &out, &err)
              : where == DETOKENIZE
                  ? bd_openai_detokenize(openai, NULL, body, strlen(body), &out, &err)
                  : complete(openai, where, body, &out, &err);
    calls_left = NONE;
    if (!ok && err.kind != BD_API_INTERNAL)
        fail_msg("failure %d is answered with kind %d: %s", fail_at, (int)err.kind, err.message);
    assert_true(bd_router_idle(fuzz_router()));
    bd_strbuf_deinit(&out);
    bd_openai_destroy(openai);
    return ok;
}

static void every_failure(route where, const char *body) {
    assert_true(attempt(where, body, NONE)); /* what is made once is there */
    for (int both = 0; both < 2; both++) {
        for_good = both == 1;
        int32_t n = 0;
        for (;; n++) {
            failures = 0;
            bool whole = attempt(where, body, n);
            if (failures == 0) {
                assert_true(whole);
                break;
            }
            assert_true(n < 20000);
        }
        print_message("%d allocations\n", (int)n);
        assert_true(n > 2);
    }
}

#define MESSAGES                                                                                   \
    "\"messages\":[{\"role\":\"system\",\"content\":\"Be kind\"},{\"role\":\"user\",\"content\":[" \
    "{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]},{\"role\":"           \
    "\"assistant\",\"content\":\"<think>c</think>d\",\"tool_calls\":[{\"id\":\"1\",\"type\":"      \
    "\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"x\\\":1}\"}}]},{\"role\":"     \
    "\"tool\",\"content\":\"3\"}]"

static void test_chat(void **state) {
    (void)state;
    every_failure(CHAT, "{\"model\":\"zen-mini\"," MESSAGES
                        ",\"n\":2,\"logprobs\":true,\"top_logprobs\":2,\"stop\":[\"qq\"],"
                        "\"chat_template_kwargs\":{\"enable_thinking\":false},\"max_tokens\":5}");
}

static void test_chat_stream(void **state) {
    (void)state;
    every_failure(CHAT, "{" MESSAGES ",\"stream\":true,\"stream_options\":{\"include_usage\":"
                        "true},\"logit_bias\":{\"5\":1}}");
}

static void test_completion(void **state) {
    (void)state;
    every_failure(COMPLETION, "{\"prompt\":[\"Hello there\",\"b\"],\"n\":2,\"echo\":true,"
                              "\"logprobs\":1,\"prompt_logprobs\":1,\"return_token_ids\":true}");
    every_failure(COMPLETION, "{\"prompt\":[[1,2,3]],\"stream\":true,\"ignore_eos\":true}");
}

static void test_tokens(void **state) {
    (void)state;
    every_failure(TOKENIZE, "{" MESSAGES ",\"return_token_strs\":true}");
    every_failure(TOKENIZE, "{\"prompt\":\"Once upon a time, xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
                            "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\"}");
    every_failure(DETOKENIZE, "{\"tokens\":[1,2,300,4080]}");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_chat_stream),
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
