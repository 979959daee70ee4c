/* Every golden line of five real tokenizers, made by the reference library: ids of the text, text
 * of the ids whole and streamed, cut at random places. */
#include "tokenizer_support.h"

static void check_encode(const bd_tokenizer *t, bd_json_span object, const char *name,
                         size_t line) {
    bd_strbuf text = support_string(object, "text");
    bd_encode_options options = {.add_special_tokens = support_flag(object, "add_special_tokens"),
                                 .parse_special = support_flag(object, "parse_special")};
    bd_token_vec want = {0}, got = {0};
    bd_error err;
    bd_error_clear(&err);
    support_ids(object, "ids", &want);
    bd_status s = bd_tokenizer_encode(t, text.data, text.len_bytes, &options, &got, &err);
    if (s != BD_OK) fail_msg("%s, line %zu: %s", name, line, err.message);
    support_same_ids(&got, &want, name, line);

    /* Exactly as many tokens are allowed as there are; with one less it fails and leaves the list
     * alone. */
    if (want.count > 1) {
        got.count = 1;
        options.tokens_max = want.count - 1;
        s = bd_tokenizer_encode(t, text.data, text.len_bytes, &options, &got, &err);
        assert_int_equal(s, BD_E_LIMIT);
        assert_int_equal(got.count, 1);
        options.tokens_max = want.count;
        s = bd_tokenizer_encode(t, text.data, text.len_bytes, &options, &got, &err);
        assert_int_equal(s, BD_OK);
        assert_int_equal(got.count, want.count + 1);
    }
    bd_strbuf_deinit(&text);
    bd_token_vec_deinit(&want);
    bd_token_vec_deinit(&got);
}

/* Streams the ids, the first `skipped` of them unseen, and compares with the end of the whole text.
 */
static void check_stream(const bd_tokenizer *t, const bd_token_vec *ids, size_t skipped, bool skip,
                         const bd_strbuf *want, const char *name, size_t line) {
    bd_detok seen, detok;
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_strbuf_puts(&text, "");
    bd_detok_init(&seen, t, skip);
    for (size_t i = 0; i < skipped; i++)
        bd_detok_push(&seen, ids->ids[i], &text);
    bd_detok_init(&detok, t, skip);
    assert_true(bd_detok_skip(&detok, ids->ids, skipped));
    assert_int_equal(bd_detok_held_bytes(&detok), bd_detok_held_bytes(&seen));
    for (size_t i = skipped; i < ids->count; i++) {
        bd_detok_push(&detok, ids->ids[i], &text);
        /* Never part of a character, at any time. */
        assert_int_equal(bd_utf8_valid_prefix(text.data, text.len_bytes), text.len_bytes);
    }
    bd_detok_flush(&detok, &text);
    assert_int_equal(bd_detok_held_bytes(&detok), 0);
    support_same_text(&text, want, name, line);
    bd_strbuf_deinit(&text);
    bd_detok_deinit(&seen);
    bd_detok_deinit(&detok);
}

static void check_decode(const bd_tokenizer *t, const bd_token_vec *ids, bool skip,
                         const bd_strbuf *want, const char *name, size_t line, uint64_t *seed) {
    bd_strbuf got = support_decode(t, ids->ids, ids->count, skip);
    support_same_text(&got, want, name, line);
    bd_strbuf_deinit(&got);
    check_stream(t, ids, 0, skip, want, name, line);
    size_t skipped = (size_t)(support_random(seed) % (ids->count + 1));
    check_stream(t, ids, skipped, skip, want, name, line);
}

static void check_golden(const bd_tokenizer *t, const char *name, uint64_t *seed) {
    support_lines lines = support_lines_open(name, "golden.jsonl");
    bd_json_span object;
    while (support_lines_next(&lines, &object)) {
        check_encode(t, object, name, lines.number);
        bd_token_vec ids = {0};
        support_ids(object, "ids", &ids);
        bd_strbuf all = support_string(object, "decoded");
        bd_strbuf plain = support_string(object, "decoded_skip_special");
        check_decode(t, &ids, false, &all, name, lines.number, seed);
        check_decode(t, &ids, true, &plain, name, lines.number, seed);
        bd_strbuf_deinit(&all);
        bd_strbuf_deinit(&plain);
        bd_token_vec_deinit(&ids);
    }
    assert_true(lines.number > 500);
}

static void check_decode_lines(const bd_tokenizer *t, const char *name, uint64_t *seed) {
    support_lines lines = support_lines_open(name, "decode.jsonl");
    bd_json_span object;
    while (support_lines_next(&lines, &object)) {
        bd_token_vec ids = {0};
        support_ids(object, "ids", &ids);
        bd_strbuf want = support_string(object, "decoded");
        check_decode(t, &ids, support_flag(object, "skip_special_tokens"), &want, name,
                     lines.number, seed);
        bd_strbuf_deinit(&want);
        bd_token_vec_deinit(&ids);
    }
    assert_true(lines.number >= 120);
}

static void test_golden(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (int i = 0; i < TOKENIZER_COUNT; i++) {
        bd_tokenizer *t = support_load_named(tokenizer_names[i]);
        check_golden(t, tokenizer_names[i], &seed);
        check_decode_lines(t, tokenizer_names[i], &seed);
        bd_tokenizer_destroy(t);
    }
}

typedef struct token_case {
    const char *name, *content;
    int32_t id;
    bool special;
    const char *bytes;
} token_case;

/* Ids and flags as written in the files. */
static const token_case token_cases[] = {
    {"gpt2", "<|endoftext|>", 50256, true, "<|endoftext|>"},
    {"gpt2", "\xc4\xa0the", 262, false, " the"},
    {"gpt2", "\xc4\x8a", 198, false, "\n"},
    {"llama3", "<|begin_of_text|>", 128000, true, "<|begin_of_text|>"},
    {"llama3", "<|eot_id|>", 128009, true, "<|eot_id|>"},
    {"qwen3", "<think>", 151667, false, "<think>"},
    {"qwen3", "<|im_start|>", 151644, true, "<|im_start|>"},
    {"llama2", "</s>", 2, true, "</s>"},
    {"llama2", "<0xE4>", 231, false, "\xe4"},
    {"llama2", "\xe2\x96\x81the", 278, false, " the"},
    {"phi3-mini", "<|user|>", 32010, true, "<|user|>"},
    {"phi3-mini", "</s>", 2, false, "</s>"},
};

static void test_tokens(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof token_cases / sizeof *token_cases; i++) {
        const token_case *c = &token_cases[i];
        bd_tokenizer *t = support_load_named(c->name);
        size_t bytes;
        assert_int_equal(bd_tokenizer_token_id(t, c->content, strlen(c->content)), c->id);
        assert_true(bd_tokenizer_is_known(t, c->id));
        assert_int_equal(bd_tokenizer_is_special(t, c->id), c->special);
        const char *text = bd_tokenizer_token_bytes(t, c->id, &bytes);
        assert_int_equal(bytes, strlen(c->bytes));
        assert_memory_equal(text, c->bytes, bytes);
        text = bd_tokenizer_token_content(t, c->id, &bytes);
        assert_int_equal(bytes, strlen(c->content));
        assert_memory_equal(text, c->content, bytes);
        bd_tokenizer_destroy(t);
    }
}

/* Bytes, and what Python's bytes.decode("utf-8", "replace") makes of them. */
static const char *const byte_cases[][2] = {
    {"eda080", "efbfbdefbfbdefbfbd"},
    {"edbf", "efbfbdefbfbd"},
    {"e08080", "efbfbdefbfbdefbfbd"},
    {"e09fbf61", "efbfbdefbfbdefbfbd61"},
    {"f0808080", "efbfbdefbfbdefbfbdefbfbd"},
    {"f08fbfbf", "efbfbdefbfbdefbfbdefbfbd"},
    {"f48fbfbf", "f48fbfbf"},
    {"f4908080", "efbfbdefbfbdefbfbdefbfbd"},
    {"f580", "efbfbdefbfbd"},
    {"c1bf", "efbfbdefbfbd"},
    {"c2", "efbfbd"},
    {"c261", "efbfbd61"},
    {"e282e282ac", "efbfbde282ac"},
    {"f09f98f09f9880", "efbfbdf09f9880"},
    {"f09f98", "efbfbd"},
    {"80bf", "efbfbdefbfbd"},
    {"61ff62fe", "61efbfbd62efbfbd"},
    {"ed9fbfee8080", "ed9fbfee8080"},
    {"e180c3a9", "efbfbdc3a9"},
    {"f18080e18080", "efbfbde18080"},
};

static void test_invalid_bytes(void **state) {
    (void)state;
    bd_tokenizer *t = support_load_named("gpt2");
    int32_t byte_ids[256];
    for (int32_t id = 0; id < (int32_t)bd_tokenizer_vocab_size(t); id++) {
        size_t bytes;
        const char *text = bd_tokenizer_token_bytes(t, id, &bytes);
        if (bytes == 1) byte_ids[(uint8_t)text[0]] = id;
    }
    for (size_t i = 0; i < sizeof byte_cases / sizeof *byte_cases; i++) {
        bd_token_vec ids = {0};
        size_t count;
        bd_strbuf want = {0};
        char *raw = support_unhex(byte_cases[i][0], &count);
        want.data = support_unhex(byte_cases[i][1], &want.len_bytes);
        ids.ids = calloc(count, sizeof *ids.ids);
        assert_non_null(ids.ids);
        for (size_t j = 0; j < count; j++)
            ids.ids[ids.count++] = byte_ids[(uint8_t)raw[j]];
        check_stream(t, &ids, 0, false, &want, byte_cases[i][0], i);
        for (size_t j = 1; j <= count; j++)
            check_stream(t, &ids, j, false, &want, byte_cases[i][0], i);
        free(raw);
        bd_strbuf_deinit(&want);
        bd_token_vec_deinit(&ids);
    }
    bd_tokenizer_destroy(t);
}

static void test_unknown_ids(void **state) {
    (void)state;
    bd_tokenizer *t = support_load(ZEN_MINI_FILE);
    assert_int_equal(bd_tokenizer_vocab_size(t), 4096);
    const int32_t ids[] = {-1, INT32_MIN, 4096, INT32_MAX};
    size_t bytes = 1;
    for (size_t i = 0; i < 4; i++) {
        assert_false(bd_tokenizer_is_known(t, ids[i]));
        assert_false(bd_tokenizer_is_special(t, ids[i]));
        assert_null(bd_tokenizer_token_bytes(t, ids[i], &bytes));
        assert_int_equal(bytes, 0);
        assert_null(bd_tokenizer_token_content(t, ids[i], &bytes));
    }
    assert_int_equal(bd_tokenizer_token_id(t, "no such token", 13), -1);
    assert_int_equal(bd_tokenizer_token_id(t, "", 0), -1);
    bd_strbuf text = support_decode(t, ids, 4, false);
    assert_int_equal(text.len_bytes, 0);
    bd_strbuf_deinit(&text);

    int32_t id = bd_tokenizer_token_id(t, "a", 1);
    bd_strbuf_init(&text, 3);
    int32_t many[] = {id, id, id, id};
    bd_error err;
    assert_int_equal(bd_tokenizer_decode(t, many, 3, false, &text, &err), BD_OK);
    assert_string_equal(text.data, "aaa");
    assert_int_equal(bd_tokenizer_decode(t, many, 4, false, &text, &err), BD_E_LIMIT);
    bd_strbuf_deinit(&text);
    bd_tokenizer_destroy(t);
    bd_tokenizer_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_invalid_bytes),
        cmocka_unit_test(test_unknown_ids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
