/* Bodies of POST /v1/completions: every JSON rule, every field's type and range, and mutated
 * bodies. Method: tables of bodies with the expected code and field; what must be accepted is read
 * back from the struct; random mutations must never crash (sanitizers watch) and an accepted one
 * must also be JSON to cJSON. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/rng.h"
#include "openai/request.h"

typedef struct refusal {
    const char *body, *code, *param;
} refusal;

/* A copy without slack, so that a sanitizer sees a read past the NUL. */
static bool parse(const char *body, size_t bytes, bd_completion_request *request,
                  bd_api_error *err) {
    char *copy = malloc(bytes + 1);
    assert_non_null(copy);
    memcpy(copy, body, bytes);
    copy[bytes] = '\0';
    *err = (bd_api_error){0};
    bool ok = bd_completion_request_parse(copy, bytes, 1024, request, err);
    memset(copy, '#', bytes);
    free(copy);
    return ok;
}

static bool same(const char *left, const char *right) {
    return (!left && !right) || (left && right && strcmp(left, right) == 0);
}

static void expect_refusals(const refusal *rows, size_t count) {
    int wrong = 0;
    for (size_t i = 0; i < count; i++) {
        bd_completion_request request;
        bd_api_error err;
        bool ok = parse(rows[i].body, strlen(rows[i].body), &request, &err);
        const char *code = ok ? "accepted" : bd_api_code(err.kind);
        if (strcmp(code, rows[i].code) != 0 || (!ok && !same(err.param, rows[i].param))) {
            printf("%s\n  gave %s param %s, expected %s param %s\n", rows[i].body, code,
                   err.param ? err.param : "null", rows[i].code,
                   rows[i].param ? rows[i].param : "null");
            wrong++;
        }
        bd_completion_request_deinit(&request);
    }
    assert_int_equal(wrong, 0);
}

#define REFUSE(rows) expect_refusals(rows, sizeof(rows) / sizeof(rows)[0])
#define P            "\"prompt\":\"x\","

static void test_json_rules(void **state) {
    (void)state;
    static const refusal rows[] = {
        {"", "invalid_json", NULL},
        {"null", "invalid_json", NULL},
        {"[]", "invalid_json", NULL},
        {"\"x\"", "invalid_json", NULL},
        {"5", "invalid_json", NULL},
        {"{\"prompt\":\"x\"}xyz", "invalid_json", NULL},
        {"{\"prompt\":\"x\"}{}", "invalid_json", NULL},
        {"{\"prompt\":\"x\",}", "invalid_json", NULL},
        {"{\"prompt\":'x'}", "invalid_json", NULL},
        {"{" P "\"a\":NaN}", "invalid_json", NULL},
        {"{" P "\"a\":Infinity}", "invalid_json", NULL},
        {"{" P "\"a\":+1}", "invalid_json", NULL},
        {"{" P "\"a\":.5}", "invalid_json", NULL},
        {"{" P "\"a\":01}", "invalid_json", NULL},
        {"{" P "\"a\":1.}", "invalid_json", NULL},
        {"{" P "\"a\":1e999}", "invalid_json", NULL},
        {"{" P "\"a\":/* */1}", "invalid_json", NULL},
        {"{\"prompt\":\"a\tb\"}", "invalid_json", NULL},
        {"{\"prompt\":\x01\"x\"}", "invalid_json", NULL},
        {"{\"prompt\":\"\\uX000\"}", "invalid_json", NULL},
        {"{\"prompt\":\"\\ud83d\"}", "invalid_json", NULL},
        {"{\"prompt\":\"\\udc00\\ud83d\"}", "invalid_json", NULL},
        {"{\"prompt\":\"\xff\"}", "invalid_json", NULL},
        {"{\"prompt\":\"\xc0\x80\"}", "invalid_json", NULL},
        {"{\"prompt\":\"\xed\xa0\x80\"}", "invalid_json", NULL},
        {"{" P "\"a\":\"\xff\"}", "invalid_json", NULL},
        {"\xef\xbb\xbf{\"prompt\":\"x\"}", "accepted", NULL},
        {" \r\n\t{ \"prompt\" : \"x\" } \n", "accepted", NULL},
        {"{\"prompt\":\"\\ud83d\\ude00\"}", "accepted", NULL},
        {"{" P "\"nope\":{\"a\":[1,{\"b\":null}],\"c\":\"]}\\\"\"}}", "accepted", NULL},
        {"{\"Prompt\":\"x\"}", "missing_required_parameter", "prompt"},
        {"{\"prompt\":null}", "missing_required_parameter", "prompt"},
        {"{}", "missing_required_parameter", "prompt"},
        {"{" P "\"n\":\"x\",\"n\":2}", "accepted", NULL},
        {"{" P "\"n\":2,\"n\":\"x\"}", "invalid_type", "n"},
        {"{" P "\"n\":\"x\",\"n\":null}", "accepted", NULL},
        {"{" P "\"n\\u0000\":\"x\"}", "invalid_json", NULL},
        {"{\"pro\\u006dpt\":5}", "invalid_type", "prompt"},
    };
    REFUSE(rows);
    char raw_nul[] = "{\"prompt\":\"a_b\"}";
    raw_nul[12] = '\0';
    bd_completion_request request;
    bd_api_error err;
    assert_false(parse(raw_nul, sizeof raw_nul - 1, &request, &err));
    assert_int_equal(err.kind, BD_API_INVALID_JSON);
    bd_completion_request_deinit(&request);
}

static void test_depth(void **state) {
    (void)state;
    for (int depth = 60; depth < 70; depth++) {
        char body[400] = "{" P "\"a\":";
        for (int i = 0; i < depth; i++)
            strcat(body, "[");
        for (int i = 0; i < depth; i++)
            strcat(body, "]");
        strcat(body, "}");
        bd_completion_request request;
        bd_api_error err;
        bool ok = parse(body, strlen(body), &request, &err);
        assert_int_equal(ok, depth + 1 <= 64);
        if (!ok) assert_int_equal(err.kind, BD_API_INVALID_JSON);
        bd_completion_request_deinit(&request);
    }
    size_t bytes = 200000;
    char *deep = malloc(bytes);
    memset(deep, '[', bytes);
    bd_completion_request request;
    bd_api_error err;
    assert_false(parse(deep, bytes, &request, &err));
    bd_completion_request_deinit(&request);
    free(deep);
}

static void test_prompt_forms(void **state) {
    (void)state;
    static const refusal rows[] = {
        {"{\"prompt\":5}", "invalid_type", "prompt"},
        {"{\"prompt\":true}", "invalid_type", "prompt"},
        {"{\"prompt\":{}}", "invalid_type", "prompt"},
        {"{\"prompt\":[]}", "empty_array", "prompt"},
        {"{\"prompt\":[[]]}", "empty_array", "prompt"},
        {"{\"prompt\":[[1],[]]}", "empty_array", "prompt"},
        {"{\"prompt\":[1,\"a\"]}", "invalid_type", "prompt"},
        {"{\"prompt\":[\"a\",1]}", "invalid_type", "prompt"},
        {"{\"prompt\":[\"a\",[1]]}", "invalid_type", "prompt"},
        {"{\"prompt\":[[1],\"a\"]}", "invalid_type", "prompt"},
        {"{\"prompt\":[[1],2]}", "invalid_type", "prompt"},
        {"{\"prompt\":[true]}", "invalid_type", "prompt"},
        {"{\"prompt\":[null]}", "invalid_type", "prompt"},
        {"{\"prompt\":[{}]}", "invalid_type", "prompt"},
        {"{\"prompt\":[[[1]]]}", "invalid_type", "prompt"},
        {"{\"prompt\":[[true]]}", "invalid_type", "prompt"},
        {"{\"prompt\":[1.5]}", "invalid_type", "prompt"},
        {"{\"prompt\":[1e-1]}", "invalid_type", "prompt"},
        {"{\"prompt\":[-1]}", "invalid_value", "prompt"},
        {"{\"prompt\":[[-1]]}", "invalid_value", "prompt"},
        {"{\"prompt\":[2147483648]}", "invalid_value", "prompt"},
        {"{\"prompt\":[99999999999999999999999]}", "invalid_value", "prompt"},
        {"{\"prompt\":[1e300]}", "invalid_value", "prompt"},
        {"{\"prompt\":[16.0,1.6e1,160e-1,2147483647]}", "accepted", NULL},
        {"{\"prompt\":\"\"}", "accepted", NULL}, /* the tokenizer decides */
    };
    REFUSE(rows);
    bd_completion_request request;
    bd_api_error err;
    const char body[] = "{\"prompt\":[[16.0, 1.6e1],[0,2147483647 ,1000e-2]]}";
    assert_true(parse(body, sizeof body - 1, &request, &err));
    assert_int_equal(request.prompt_count, 2);
    assert_true(request.prompts[1].is_ids);
    assert_int_equal(request.prompts[0].ids[1], 16);
    assert_int_equal(request.prompts[1].count, 3);
    assert_int_equal(request.prompts[1].ids[1], 2147483647);
    assert_int_equal(request.prompts[1].ids[2], 10);
    bd_completion_request_deinit(&request);
    const char texts[] = "{\"prompt\":[\"a\\u0000b\",\"\\\"\\\\\\/"
                         "\\b\\f\\n\\r\\t\",\"\\u00e9\\u20ac\\ud83d\\ude00\"]}";
    assert_true(parse(texts, sizeof texts - 1, &request, &err));
    assert_int_equal(request.prompt_count, 3);
    assert_int_equal(request.prompts[0].text.bytes, 3);
    assert_memory_equal(request.prompts[0].text.data, "a\0b", 4);
    assert_string_equal(request.prompts[1].text.data, "\"\\/\b\f\n\r\t");
    assert_string_equal(request.prompts[2].text.data, "é€😀");
    bd_completion_request_deinit(&request);
}

static void test_ranges(void **state) {
    (void)state;
    static const refusal rows[] = {
        {"{" P "\"max_tokens\":-1}", "integer_below_min_value", "max_tokens"},
        {"{" P "\"max_tokens\":\"16\"}", "invalid_type", "max_tokens"},
        {"{" P "\"max_tokens\":true}", "invalid_type", "max_tokens"},
        {"{" P "\"max_tokens\":1.5}", "invalid_type", "max_tokens"},
        {"{" P "\"max_tokens\":1e30}", "integer_above_max_value", "max_tokens"},
        {"{" P "\"max_tokens\":0}", "accepted", NULL},
        {"{" P "\"max_tokens\":null}", "accepted", NULL},
        {"{" P "\"n\":0}", "integer_below_min_value", "n"},
        {"{" P "\"n\":129}", "integer_above_max_value", "n"},
        {"{" P "\"n\":128}", "accepted", NULL},
        {"{\"prompt\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\",\"i\"],\"n\":128}",
         "invalid_value", "n"},
        {"{" P "\"best_of\":0}", "integer_below_min_value", "best_of"},
        {"{" P "\"best_of\":21}", "integer_above_max_value", "best_of"},
        {"{" P "\"best_of\":2}", "accepted", NULL},
        {"{" P "\"best_of\":2,\"stream\":true}", "invalid_value", "best_of"},
        {"{" P "\"n\":2,\"best_of\":1}", "invalid_value", "best_of"},
        {"{" P "\"n\":2,\"best_of\":2}", "accepted", NULL},
        {"{" P "\"n\":25,\"best_of\":25}", "accepted", NULL},
        {"{" P "\"logprobs\":-1}", "integer_below_min_value", "logprobs"},
        {"{" P "\"logprobs\":21}", "integer_above_max_value", "logprobs"},
        {"{" P "\"logprobs\":true}", "invalid_type", "logprobs"},
        {"{" P "\"logprobs\":20}", "accepted", NULL},
        {"{" P "\"temperature\":-0.1}", "decimal_below_min_value", "temperature"},
        {"{" P "\"temperature\":2.1}", "decimal_above_max_value", "temperature"},
        {"{" P "\"temperature\":\"1\"}", "invalid_type", "temperature"},
        {"{" P "\"temperature\":false}", "invalid_type", "temperature"},
        {"{" P "\"temperature\":1e-300}", "accepted", NULL},
        {"{" P "\"top_p\":-1}", "decimal_below_min_value", "top_p"},
        {"{" P "\"top_p\":1.01}", "decimal_above_max_value", "top_p"},
        {"{" P "\"top_p\":0}", "accepted", NULL},
        {"{" P "\"presence_penalty\":-2.5}", "decimal_below_min_value", "presence_penalty"},
        {"{" P "\"frequency_penalty\":2.5}", "decimal_above_max_value", "frequency_penalty"},
        {"{" P "\"seed\":9223372036854775808}", "integer_above_max_value", "seed"},
        {"{" P "\"seed\":-9223372036854775809}", "integer_below_min_value", "seed"},
        {"{" P "\"seed\":18446744073709551616}", "integer_above_max_value", "seed"},
        {"{" P "\"seed\":0.5}", "invalid_type", "seed"},
        {"{" P "\"stream\":2}", "invalid_type", "stream"},
        {"{" P "\"stream\":\"true\"}", "invalid_type", "stream"},
        {"{" P "\"stream\":1}", "accepted", NULL},
        {"{" P "\"echo\":0}", "accepted", NULL},
        {"{" P "\"top_k\":-2}", "integer_below_min_value", "top_k"},
        {"{" P "\"top_k\":-1}", "accepted", NULL},
        {"{" P "\"min_p\":1.5}", "decimal_above_max_value", "min_p"},
        {"{" P "\"repetition_penalty\":0}", "decimal_below_min_value", "repetition_penalty"},
        {"{" P "\"repetition_penalty\":1.0}", "accepted", NULL},
        {"{" P "\"min_tokens\":17}", "invalid_value", "min_tokens"},
        {"{" P "\"min_tokens\":5,\"max_tokens\":4}", "invalid_value", "min_tokens"},
        {"{" P "\"min_tokens\":-1}", "integer_below_min_value", "min_tokens"},
        {"{" P "\"prompt_logprobs\":-1}", "integer_below_min_value", "prompt_logprobs"},
        {"{" P "\"prompt_logprobs\":1,\"stream\":true}", "invalid_value", "prompt_logprobs"},
        {"{" P "\"prompt_logprobs\":0,\"stream\":true}", "accepted", NULL},
        {"{" P "\"priority\":9223372036854775808}", "integer_above_max_value", "priority"},
        {"{" P "\"model\":5}", "invalid_type", "model"},
        {"{" P "\"model\":null,\"user\":5,\"metadata\":[],\"store\":1}", "accepted", NULL},
    };
    REFUSE(rows);
}

static void test_lists_and_objects(void **state) {
    (void)state;
    static const refusal rows[] = {
        {"{" P "\"stop\":5}", "invalid_type", "stop"},
        {"{" P "\"stop\":[5]}", "invalid_type", "stop"},
        {"{" P "\"stop\":[null]}", "invalid_type", "stop"},
        {"{" P "\"stop\":[\"a\",\"\"]}", "empty_string", "stop"},
        {"{" P "\"stop\":\"\"}", "empty_string", "stop"},
        {"{" P "\"stop\":[]}", "accepted", NULL},
        {"{" P "\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\","
         "\"d\",\"e\",\"f\",\"g\"]}",
         "accepted", NULL},
        {"{" P "\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\","
         "\"d\",\"e\",\"f\",\"g\",\"h\"]}",
         "array_above_max_length", "stop"},
        {"{" P "\"logit_bias\":[]}", "invalid_type", "logit_bias"},
        {"{" P "\"logit_bias\":{\"a\":1}}", "invalid_value", "logit_bias"},
        {"{" P "\"logit_bias\":{\"\":1}}", "invalid_value", "logit_bias"},
        {"{" P "\"logit_bias\":{\"-1\":1}}", "invalid_value", "logit_bias"},
        {"{" P "\"logit_bias\":{\"01\":1}}", "invalid_value", "logit_bias"},
        {"{" P "\"logit_bias\":{\"1.0\":1}}", "invalid_value", "logit_bias"},
        {"{" P "\"logit_bias\":{\"99999999999999999999\":1}}", "invalid_value", "logit_bias"},
        {"{" P "\"logit_bias\":{\"1\":\"1\"}}", "invalid_type", "logit_bias"},
        {"{" P "\"logit_bias\":{\"1\":null}}", "invalid_type", "logit_bias"},
        {"{" P "\"logit_bias\":{}}", "accepted", NULL},
        {"{" P "\"stop_token_ids\":5}", "invalid_type", "stop_token_ids"},
        {"{" P "\"stop_token_ids\":[\"5\"]}", "invalid_type", "stop_token_ids"},
        {"{" P "\"stop_token_ids\":[-1]}", "integer_below_min_value", "stop_token_ids"},
        {"{" P "\"stop_token_ids\":[99999999999]}", "integer_above_max_value", "stop_token_ids"},
        {"{" P "\"stream_options\":{\"include_usage\":true}}", "invalid_value", "stream_options"},
        {"{" P "\"stream_options\":{}}", "accepted", NULL},
        {"{" P "\"stream_options\":null}", "accepted", NULL},
        {"{" P "\"stream\":true,\"stream_options\":5}", "invalid_type", "stream_options"},
        {"{" P "\"stream\":true,\"stream_options\":{\"include_usage\":5}}", "invalid_type",
         "stream_options"},
        {"{" P "\"stream\":true,\"stream_options\":{\"include_obfuscation\":false}}", "accepted",
         NULL},
        {"{" P "\"suffix\":\"x\"}", "unsupported_parameter", "suffix"},
        {"{" P "\"suffix\":\"\"}", "accepted", NULL},
        {"{" P "\"tools\":[]}", "accepted", NULL},
        {"{" P "\"tools\":[{}]}", "unsupported_parameter", "tools"},
        {"{" P "\"response_format\":{\"type\":\"text\"}}", "accepted", NULL},
        {"{" P "\"response_format\":{\"type\":\"json_object\"}}", "unsupported_parameter",
         "response_format"},
        {"{" P "\"response_format\":{\"type\":\"text\",\"x\":1}}", "unsupported_parameter",
         "response_format"},
        {"{" P "\"allowed_token_ids\":[1]}", "unsupported_parameter", "allowed_token_ids"},
        {"{" P "\"truncate_prompt_tokens\":5}", "unsupported_parameter", "truncate_prompt_tokens"},
        {"{" P "\"bad_words\":[]}", "accepted", NULL},
        {"{" P "\"structured_outputs\":{\"json\":{}}}", "unsupported_parameter",
         "structured_outputs"},
    };
    REFUSE(rows);
}

static void test_values(void **state) {
    (void)state;
    bd_completion_request request;
    bd_api_error err;
    const char body[] = "{\"prompt\":\"x\",\"seed\":-9223372036854775808,\"priority\":"
                        "9007199254740993,\"temperature\":0.1,\"n\":3,"
                        "\"logit_bias\":{\"5\":-300,\"7\":1e9,\"5\":2.5},\"stop\":\"\\u0000z\","
                        "\"stream\":true,\"max_tokens\":1.6e1,"
                        "\"stream_options\":{\"include_usage\":1,\"continuous_usage_stats\":true},"
                        "\"skip_special_tokens\":false,"
                        "\"stop_token_ids\":[3,1e1],\"logprobs\":0}";
    assert_true(parse(body, sizeof body - 1, &request, &err));
    assert_true(request.seed == INT64_MIN && request.seed_sent);
    assert_true(request.priority == INT64_C(9007199254740993));
    assert_true(request.temperature == 0.1);
    assert_int_equal(request.n, 3);
    assert_int_equal(request.bias_count, 3);
    assert_true(request.bias[0].value == -100 && request.bias[1].value == 100 &&
                request.bias[2].value == 2.5);
    assert_int_equal(request.stops[0].bytes, 2);
    assert_true(request.include_usage && request.continuous_usage && request.stream);
    assert_int_equal(request.max_tokens, 16);
    assert_false(request.skip_special_tokens);
    assert_int_equal(request.stop_ids[1], 10);
    assert_int_equal(request.logprobs, 0);
    bd_completion_request_deinit(&request);
}

/* Integers against the C library: digits with a point and an exponent put anywhere. */
static void test_integer_forms(void **state) {
    (void)state;
    uint64_t seed = bd_now_us();
    print_message("seed %llu\n", (unsigned long long)seed);
    for (uint32_t round = 0; round < 20000; round++) {
        double u = bd_rng_uniform(seed, 0, round);
        int64_t number = (int64_t)((u - 0.5) * 4e9) >> (int)(bd_rng_uniform(seed, 1, round) * 31);
        int shift = (int)(bd_rng_uniform(seed, 2, round) * 12);
        char text[64];
        if (round % 3 == 0)
            snprintf(text, sizeof text, "%lld.%0*d", (long long)number, shift + 1, 0);
        else if (round % 3 == 1)
            snprintf(text, sizeof text, "%.*e", 18, (double)number);
        else
            snprintf(text, sizeof text, "%lld%0*de-%d", (long long)number, shift + 1, 0, shift + 1);
        int64_t got = 0;
        assert_int_equal(bd_view_int64((bd_view){text}, &got), BD_VIEW_INT_OK);
        assert_int_equal(got, number);
    }
}

static const char *const fuzz_seeds[] = {
    "{\"model\":\"zen\",\"prompt\":\"Hello "
    "\\u00e9\\ud83d\\ude00\",\"max_tokens\":16,\"temperature\":0.5,\"stop\":[\"a\",\"b\\n\"]}",
    "{\"prompt\":[[1,2,3],[4,5]],\"n\":2,\"logit_bias\":{\"50256\":-100,\"1\":2.5},\"stream\":true,"
    "\"stream_options\":{\"include_usage\":true},\"seed\":123456789012345678}",
    "{\"prompt\":[\"a\",\"b\"],\"logprobs\":5,\"echo\":true,\"x\":{\"y\":[{},[],null,true,false,-1."
    "5e-7]},\"tools\":[]}",
};

static uint32_t draw(uint64_t seed, uint32_t choice, uint32_t *position, uint32_t below) {
    return (uint32_t)(bd_rng_uniform(seed, choice, (*position)++) * below);
}

static void test_mutations(void **state) {
    (void)state;
    static const char bytes[] = "{}[]\",:\\u0d8\x00\xff\xc3\xa9 \t\n1e9-.tfn";
    uint64_t seed = bd_now_us();
    print_message("seed %llu\n", (unsigned long long)seed);
    uint32_t accepted = 0;
    for (uint32_t round = 0; round < 30000; round++) {
        char body[512];
        uint32_t position = 0;
        const char *from = fuzz_seeds[round % 3];
        size_t length = strlen(from);
        memcpy(body, from, length);
        for (uint32_t edits = 1 + draw(seed, round, &position, 4); edits > 0; edits--) {
            size_t at = draw(seed, round, &position, (uint32_t)length),
                   span = 1 + draw(seed, round, &position, 8);
            char byte = bytes[draw(seed, round, &position, sizeof bytes - 1)];
            switch (draw(seed, round, &position, 4)) {
            case 0:
                body[at] = byte;
                break;
            case 1:
                if (at + span < length)
                    memmove(body + at, body + at + span, length - at - span), length -= span;
                break;
            case 2:
                memmove(body + at + 1, body + at, length - at);
                body[at] = byte;
                length++;
                break;
            default:
                if (at + span < length && length + span < sizeof body - 8)
                    memmove(body + at + span, body + at, length - at), length += span;
            }
        }
        bd_completion_request request;
        bd_api_error err;
        bool ok = parse(body, length, &request, &err);
        if (ok) {
            accepted++;
            body[length] = '\0';
            const char *end = NULL;
            cJSON *tree = cJSON_ParseWithLengthOpts(body, length + 1, &end, 1);
            assert_true(cJSON_IsObject(tree));
            cJSON_Delete(tree);
        } else {
            assert_true(err.kind != BD_API_OK && err.message[0] != '\0');
            assert_true(bd_api_http_status(err.kind) == 400);
        }
        bd_completion_request_deinit(&request);
    }
    assert_true(accepted > 100);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json_rules),        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_prompt_forms),      cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_lists_and_objects), cmocka_unit_test(test_values),
        cmocka_unit_test(test_integer_forms),     cmocka_unit_test(test_mutations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
