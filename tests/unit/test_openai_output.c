/* Error bodies and log-probability objects, read back by cJSON. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/json_scan.h"
#include "bitdelta/base/rng.h"
#include "bitdelta/openai/error.h"
#include "openai/logprobs.h"

static bd_tokenizer *tokenizer;

static int open_tokenizer(void **state) {
    (void)state;
    bd_error err;
    return bd_tokenizer_load(&tokenizer, "demo/zen-mini/tokenizer.json", &err) == BD_OK ? 0 : -1;
}

static int close_tokenizer(void **state) {
    (void)state;
    bd_tokenizer_destroy(tokenizer);
    return 0;
}

static cJSON *read_back(const bd_strbuf *text) {
    assert_false(text->failed);
    assert_int_equal(bd_utf8_valid_prefix(text->data, text->len_bytes), text->len_bytes);
    const char *end = NULL;
    cJSON *tree = cJSON_ParseWithLengthOpts(text->data, text->len_bytes + 1, &end, 1);
    if (!tree) print_message("not JSON: %s\n", text->data);
    assert_non_null(tree);
    return tree;
}

static void test_error_bodies(void **state) {
    (void)state;
    char noise[700];
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (char)(1 + i * 7 % 255);
    for (int kind = BD_API_INVALID_JSON; kind <= BD_API_DEAD; kind++) {
        bd_api_error err;
        const char *param = kind % 2 ? "stop" : NULL;
        assert_false(bd_api_fail(&err, (bd_api_kind)kind, param, "quote \" and \\ and é: %.*s",
                                 (int)(kind * 20), noise));
        assert_true(bd_utf8_valid_prefix(err.message, strlen(err.message)) == strlen(err.message));
        bd_strbuf out;
        bd_strbuf_init(&out, 0);
        bd_api_error_write(&err, &out);
        cJSON *tree = read_back(&out);
        cJSON *error = cJSON_GetObjectItemCaseSensitive(tree, "error");
        assert_int_equal(cJSON_GetArraySize(tree), 1);
        assert_int_equal(cJSON_GetArraySize(error), 4);
        assert_string_equal(cJSON_GetObjectItemCaseSensitive(error, "message")->valuestring,
                            err.message);
        assert_string_equal(cJSON_GetObjectItemCaseSensitive(error, "code")->valuestring,
                            bd_api_code(err.kind));
        assert_true(cJSON_IsString(cJSON_GetObjectItemCaseSensitive(error, "type")));
        cJSON *got = cJSON_GetObjectItemCaseSensitive(error, "param");
        assert_true(param ? strcmp(got->valuestring, param) == 0 : cJSON_IsNull(got));
        cJSON_Delete(tree);
        bd_strbuf_deinit(&out);
    }
}

static void test_quote_cuts_at_characters(void **state) {
    (void)state;
    char text[300];
    for (size_t shift = 0; shift < 4; shift++) {
        memset(text, 'x', sizeof text);
        for (size_t i = shift; i + 4 <= sizeof text; i += 4)
            memcpy(text + i, "😀", 4);
        bd_api_quoted quoted;
        size_t bytes = strlen(bd_api_quote(&quoted, text, sizeof text));
        assert_true(bytes > 96 && bytes <= 100);
        assert_int_equal(bd_utf8_valid_prefix(quoted.text, bytes), bytes);
        assert_memory_equal(quoted.text, text, bytes);
    }
    bd_api_quoted quoted;
    assert_string_equal(bd_api_quote(&quoted, "a\0b\0", 4), "a\xEF\xBF\xBD"
                                                            "b\xEF\xBF\xBD");
    char nuls[200] = {0};
    assert_int_equal(strlen(bd_api_quote(&quoted, nuls, sizeof nuls)), 300);
}

static bd_token_result random_result(uint64_t seed, uint32_t round) {
    bd_token_result token = {.top_count = BD_TOP_MAX};
    float logprob = 0;
    for (uint32_t i = 0; i < BD_TOP_MAX; i++) {
        logprob -= (float)bd_rng_uniform(seed, round, 2 * i);
        token.top_logprobs[i] = logprob;
        token.top_ids[i] =
            (int32_t)(bd_rng_uniform(seed, round, 2 * i + 1) * 4096) / BD_TOP_MAX * BD_TOP_MAX +
            (int32_t)i;
    }
    uint32_t actual = (uint32_t)(bd_rng_uniform(seed, round, 99) * 25);
    token.rank = actual + 1;
    token.id = actual < BD_TOP_MAX ? token.top_ids[actual] : 4001;
    token.logprob = actual < BD_TOP_MAX ? token.top_logprobs[actual]
                    : actual == 24      ? -INFINITY
                                        : logprob - 3;
    return token;
}

static void check_entry(const cJSON *top, const cJSON *value, const bd_token_result *token,
                        uint32_t k, const char *name) {
    const cJSON *member = cJSON_GetObjectItemCaseSensitive(top, name);
    assert_non_null(member);
    double expected = token->logprob > -9999.0f ? (double)token->logprob : -9999.0;
    assert_true((float)value->valuedouble == (float)expected);
    assert_true(member->valuedouble >=
                value->valuedouble); /* equal unless another token has the same name */
    assert_true(cJSON_GetArraySize(top) <= (int)k + 1 && cJSON_GetArraySize(top) >= 1);
    /* Each key is there once, with the largest number of all tokens so named. */
    for (const cJSON *at = top->child; at; at = at->next)
        assert_ptr_equal(cJSON_GetObjectItemCaseSensitive(top, at->string), at);
}

static void test_lists(void **state) {
    (void)state;
    uint64_t seed = bd_now_us();
    print_message("seed %llu\n", (unsigned long long)seed);
    for (uint32_t as_ids = 0; as_ids < 2; as_ids++) {
        for (uint32_t k = 0; k <= BD_TOP_MAX; k += 5) {
            const bd_token_names names = {tokenizer, as_ids != 0};
            /* The prompt's part first, which others share; k == 0 has the prompt alone. */
            bd_logprob_lists prompt = {0}, own = {0};
            enum { COUNT = 200 };
            bd_token_result tokens[COUNT];
            bd_logprob_lists_add_first(&prompt, &names, 4080);
            for (uint32_t i = 1; i < COUNT; i++) {
                tokens[i] = random_result(seed, k * 1000 + i);
                bd_logprob_lists_add(i <= COUNT - k * 3 ? &prompt : &own, &names, &tokens[i], k,
                                     i * 3);
            }
            bd_strbuf out;
            bd_strbuf_init(&out, 0);
            bd_logprob_lists_write(&prompt, &own, &out);
            cJSON *tree = read_back(&out);
            const cJSON *name = cJSON_GetObjectItemCaseSensitive(tree, "tokens")->child;
            const cJSON *value = cJSON_GetObjectItemCaseSensitive(tree, "token_logprobs")->child;
            const cJSON *top = cJSON_GetObjectItemCaseSensitive(tree, "top_logprobs")->child;
            const cJSON *offset = cJSON_GetObjectItemCaseSensitive(tree, "text_offset")->child;
            assert_true(cJSON_IsNull(value) && cJSON_IsNull(top) && offset->valueint == 0);
            assert_string_equal(name->valuestring, as_ids ? "token_id:4080" : "<|begin_of_text|>");
            for (uint32_t i = 1; i < COUNT; i++) {
                name = name->next, value = value->next, top = top->next, offset = offset->next;
                check_entry(top, value, &tokens[i], k, name->valuestring);
                assert_int_equal(offset->valueint, i * 3);
            }
            assert_true(!name->next && !value->next && !top->next && !offset->next);
            cJSON_Delete(tree);
            bd_strbuf_deinit(&out);
            bd_logprob_lists_deinit(&prompt);
            bd_logprob_lists_deinit(&own);
        }
    }
}

/* Two ids shown alike: bytes that are no character by themselves. The larger number stays under the
 * shared key. */
static void test_shared_names(void **state) {
    (void)state;
    int32_t broken[2];
    uint32_t found = 0;
    for (int32_t id = 0; id < 4096 && found < 2; id++) {
        size_t bytes = 0;
        const char *text = bd_tokenizer_token_bytes(tokenizer, id, &bytes);
        if (bytes == 1 && (unsigned char)text[0] >= 0x80) broken[found++] = id;
    }
    assert_int_equal(found, 2);
    bd_token_result token = {.id = broken[1],
                             .logprob = -3,
                             .top_count = 1,
                             .top_ids = {broken[0]},
                             .top_logprobs = {-1.5f}};
    const bd_token_names names = {tokenizer, false};
    bd_logprob_lists lists = {0};
    bd_logprob_lists_add(&lists, &names, &token, 1, 0);
    assert_string_equal(lists.top.data, "{\"\xef\xbf\xbd\":-1.5}");
    assert_string_equal(lists.tokens.data, "\"\xef\xbf\xbd\"");
    bd_logprob_lists_deinit(&lists);
}

static void test_prompt_entries(void **state) {
    (void)state;
    const bd_token_names names = {tokenizer, false};
    for (uint32_t round = 0; round < 200; round++) {
        bd_token_result token = random_result(7, round);
        uint32_t k = round % (BD_TOP_MAX + 1);
        bd_strbuf out;
        bd_strbuf_init(&out, 0);
        bd_prompt_logprob_write(&names, &token, k, &out);
        cJSON *tree = read_back(&out);
        char id[16];
        snprintf(id, sizeof id, "%d", (int)token.id);
        const cJSON *actual = cJSON_GetObjectItemCaseSensitive(tree, id);
        assert_non_null(actual);
        assert_int_equal(cJSON_GetObjectItemCaseSensitive(actual, "rank")->valueint, token.rank);
        assert_int_equal(cJSON_GetArraySize(tree), (int)k + (token.rank > k ? 1 : 0));
        cJSON_Delete(tree);
        bd_strbuf_deinit(&out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_bodies),   cmocka_unit_test(test_quote_cuts_at_characters),
        cmocka_unit_test(test_lists),          cmocka_unit_test(test_shared_names),
        cmocka_unit_test(test_prompt_entries),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
