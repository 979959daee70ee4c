/* Text and files made to hurt: long runs, random bytes, invalid UTF-8, NULs; cut and mutated files.
 * Under the sanitizers nothing may crash, and a byte-level vocabulary must give the text back. */
#include "tokenizer_support.h"

static const bd_encode_options everything = {.add_special_tokens = true, .parse_special = true};
static const bd_encode_options plain = {.add_special_tokens = false, .parse_special = false};

static void check_round_trip(const bd_tokenizer *t, const char *text, size_t bytes,
                             const char *name) {
    bd_token_vec ids = {0};
    bd_error err;
    bd_error_clear(&err);
    if (bd_tokenizer_encode(t, text, bytes, &plain, &ids, &err) != BD_OK)
        fail_msg("%s: %s", name, err.message);
    bd_strbuf back = support_decode(t, ids.ids, ids.count, false);
    assert_int_equal(back.len_bytes, bytes);
    assert_memory_equal(back.data, text, bytes);
    bd_strbuf_deinit(&back);
    bd_token_vec_deinit(&ids);
}

/* ASCII words and lines with some random characters of any length; no mark that NFC would touch. */
static bd_strbuf random_text(uint64_t *seed, size_t bytes) {
    static const char *const pieces[] = {
        "the ", "of", "  ",  "\n", "\t", "1234", "\xc3\xa9", "\xe6\x9d\xb1", "\xf0\x9f\x98\x80",
        "<|",   "|>", "<s>", "'s", "..."};
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    while (text.len_bytes < bytes) {
        uint64_t roll = support_random(seed);
        char letter = (char)(' ' + roll / 64 % 95);
        if (roll % 4 == 0)
            bd_strbuf_puts(&text, pieces[roll / 64 % 14]);
        else
            bd_strbuf_append(&text, &letter, 1);
    }
    assert_false(text.failed);
    return text;
}

static void test_long_texts(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    bd_strbuf random = random_text(&seed, 1 << 20);
    bd_strbuf run;
    bd_strbuf_init(&run, 0);
    for (int i = 0; i < 100000; i++)
        bd_strbuf_puts(&run, "a");
    for (int i = 0; i < TOKENIZER_COUNT; i++) {
        bd_tokenizer *t = support_load_named(tokenizer_names[i]);
        check_round_trip(t, random.data, random.len_bytes, tokenizer_names[i]);
        const char *letters = "a \n\"<";
        for (int j = 0; j < 5; j++) {
            memset(run.data, letters[j], run.len_bytes);
            check_round_trip(t, run.data, run.len_bytes, tokenizer_names[i]);
        }
        bd_tokenizer_destroy(t);
    }
    bd_strbuf_deinit(&random);
    bd_strbuf_deinit(&run);
}

/* The word is tokenised with room for exactly its tokens and refused with room for one less. */
static void check_room(const bd_tokenizer *t, const bd_strbuf *word, const char *name) {
    bd_encode_options room = plain;
    bd_token_vec ids = {0}, again = {0};
    bd_error err;
    bd_error_clear(&err);
    if (bd_tokenizer_encode(t, word->data, word->len_bytes, &room, &ids, &err) != BD_OK)
        fail_msg("%s: %s", name, err.message);
    room.tokens_max = ids.count;
    if (bd_tokenizer_encode(t, word->data, word->len_bytes, &room, &again, &err) != BD_OK)
        fail_msg("%s: %s", name, err.message);
    assert_int_equal(again.count, ids.count);
    again.count = 0;
    room.tokens_max = ids.count - 1;
    assert_int_equal(bd_tokenizer_encode(t, word->data, word->len_bytes, &room, &again, &err),
                     BD_E_LIMIT);
    assert_int_equal(again.count, 0);
    bd_token_vec_deinit(&ids);
    bd_token_vec_deinit(&again);
}

/* What can be seen to have too many tokens without merging: the longest token there is, many times
 * over, has the fewest for its length. */
static void test_room_for_one_word(void **state) {
    (void)state;
    for (int i = 0; i <= TOKENIZER_COUNT; i++) {
        const char *name = i < TOKENIZER_COUNT ? tokenizer_names[i] : "zen-mini";
        bd_tokenizer *t =
            i < TOKENIZER_COUNT ? support_load_named(name) : support_load(ZEN_MINI_FILE);
        size_t longest = 0;
        bd_strbuf word;
        bd_strbuf_init(&word, 0);
        for (int32_t id = 0; id < (int32_t)bd_tokenizer_vocab_size(t); id++) {
            bd_strbuf text = support_decode(t, &id, 1, false);
            if (text.len_bytes > longest &&
                bd_utf8_valid_prefix(text.data, text.len_bytes) == text.len_bytes) {
                longest = text.len_bytes;
                bd_strbuf_clear(&word);
                for (int times = 0; times < 500; times++)
                    bd_strbuf_append(&word, text.data, text.len_bytes);
            }
            bd_strbuf_deinit(&text);
        }
        assert_true(longest > 4);
        check_room(t, &word, name);
        memset(word.data, 'q', word.len_bytes);
        check_room(t, &word, name);
        bd_strbuf_deinit(&word);
        bd_tokenizer_destroy(t);
    }
}

static void test_nul_and_controls(void **state) {
    (void)state;
    static const char text[] = "a\0b\0\0\x01\x7f\0";
    for (int i = 0; i < TOKENIZER_COUNT; i++) {
        bd_tokenizer *t = support_load_named(tokenizer_names[i]);
        check_round_trip(t, text, sizeof text - 1, tokenizer_names[i]);
        bd_tokenizer_destroy(t);
    }
}

static void test_invalid_utf8(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t valid;
    } cases[] = {{"abc\xff", 3},        {"\x80", 0},
                 {"ab\xc3", 2},         {"\xc0\xaf", 0},
                 {"x\xed\xa0\x80y", 1}, {"\xf4\x90\x80\x80", 0},
                 {"\xf0\x9f\x98", 0},   {"\xc3\xa9\xe2\x82", 2}};
    bd_tokenizer *t = support_load(ZEN_MINI_FILE);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bd_token_vec ids = {0};
        bd_error err;
        char offset[32];
        snprintf(offset, sizeof offset, "at byte %zu", cases[i].valid);
        bd_status s =
            bd_tokenizer_encode(t, cases[i].text, strlen(cases[i].text), &everything, &ids, &err);
        assert_int_equal(s, BD_E_FORMAT);
        assert_non_null(strstr(err.message, "UTF-8"));
        assert_non_null(strstr(err.message, offset));
        assert_int_equal(ids.count, 0);
        bd_token_vec_deinit(&ids);
    }
    bd_tokenizer_destroy(t);
}

/* Random bytes pushed as ids of byte-level tokens: valid UTF-8 must come out, whatever went in. */
static void test_random_ids(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (int i = 0; i < TOKENIZER_COUNT; i++) {
        bd_tokenizer *t = support_load_named(tokenizer_names[i]);
        for (int round = 0; round < 2000; round++) {
            int32_t ids[64];
            uint32_t range = round % 2 ? 300 : bd_tokenizer_vocab_size(t) + 2;
            for (int j = 0; j < 64; j++)
                ids[j] = (int32_t)(support_random(&seed) % range);
            bd_strbuf text = support_decode(t, ids, 64, round % 3 == 0);
            assert_int_equal(bd_utf8_valid_prefix(text.data, text.len_bytes), text.len_bytes);
            bd_strbuf_deinit(&text);
        }
        bd_tokenizer_destroy(t);
    }
}

/* A small file with every component there is. */
static const char small_file[] =
    "{\"version\":\"1.0\",\"truncation\":null,\"added_tokens\":[{\"id\":14,\"content\":\"<s>\","
    "\"single_word\":false,"
    "\"lstrip\":true,\"rstrip\":true,\"normalized\":false,\"special\":true},{\"id\":15,\"content\":"
    "\"\xc3\xa9 x\","
    "\"single_word\":true,\"lstrip\":false,\"rstrip\":false,\"normalized\":true,\"special\":false}]"
    ","
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":"
    "\"Prepend\",\"prepend\":\"_\"},"
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" "
    "\"},\"content\":\"_\"}]},\"pre_tokenizer\":{\"type\":\"Split\","
    "\"pattern\":{\"Regex\":\"[a-c]+|\\\\s\"},\"behavior\":\"Isolated\",\"invert\":false},\"post_"
    "processor\":{"
    "\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},"
    "{\"Sequence\":{"
    "\"id\":\"A\",\"type_id\":0}}],\"pair\":[{\"Sequence\":{\"id\":\"A\",\"type_id\":0}},{"
    "\"Sequence\":{\"id\":\"B\",\"type_id\":1}}],\"special_tokens\":{\"<s>\":{\"id\":\"<s>\","
    "\"ids\":[14],"
    "\"tokens\":[\"<s>\"]}}},"
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{"
    "\"String\":\"_\"},"
    "\"content\":\" "
    "\"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \","
    "\"start\":1,\"stop\":0}]},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":\"<unk>"
    "\","
    "\"fuse_unk\":true,\"byte_fallback\":true,\"ignore_merges\":false,\"vocab\":{\"<unk>\":0,\"a\":"
    "1,\"b\":2,\"_\":3,"
    "\"ab\":4,\"abab\":5,\"_a\":6,\"<0x41>\":7,\"<0xC3>\":8,\"<0xA9>\":9,\"c\":10,\"bc\":11,"
    "\"abc\":12,\"x\":13},"
    "\"merges\":[\"a b\",\"ab ab\",\"_ a\",\"b c\",\"a bc\"]}}";

/* Loads, and uses it if it loads; true if so. An error must name the file. */
static bool try_file(const char *json, size_t bytes) {
    bd_tokenizer *t;
    bd_error err;
    bd_error_clear(&err);
    bd_status s = bd_tokenizer_parse(&t, json, bytes, "small.json", &err);
    if (s != BD_OK) {
        assert_null(t);
        assert_string_equal(err.subject, "small.json");
        assert_true(err.message[0] != '\0');
        return false;
    }
    static const char text[] = "abab  ca<s> \xc3\xa9 x A\xcc\x81 babc\xe6\x9d\xb1\xe6\x9d\xb1<s>";
    bd_token_vec ids = {0};
    s = bd_tokenizer_encode(t, text, sizeof text - 1, &everything, &ids, &err);
    assert_true(s == BD_OK || s == BD_E_LIMIT);
    bd_strbuf back = support_decode(t, ids.ids, ids.count, false);
    assert_int_equal(bd_utf8_valid_prefix(back.data, back.len_bytes), back.len_bytes);
    bd_strbuf_deinit(&back);
    bd_token_vec_deinit(&ids);
    bd_tokenizer_destroy(t);
    return true;
}

/* Ids by the `tokenizers` package 0.22.2. "abc" is a token that no merge leads to: "ab" comes
 * first. */
static const struct {
    const char *text;
    size_t count;
    int32_t ids[8];
} small_cases[] = {
    {"abc", 4, {14, 3, 4, 10}},
    {"abab ab", 5, {14, 3, 5, 3, 4}},
    {"bc abcabc", 8, {14, 3, 11, 3, 4, 10, 4, 10}},
    {"aabbabab", 6, {14, 3, 1, 4, 2, 5}},
    {"a <s> b", 6, {14, 3, 1, 14, 3, 2}},
    {"\xc3\xa9 xA", 7, {14, 3, 8, 9, 3, 13, 7}},
    {"\xe6\x9d\xb1\xe4\xba\xac \xe6\x9d\xb1"
     "a",
     6,
     {14, 3, 0, 3, 0, 1}},
    {"Ae\xcc\x81\xcc\xa3", 4, {14, 3, 7, 0}},
};

static void test_small_file(void **state) {
    (void)state;
    bd_tokenizer *t;
    assert_int_equal(bd_tokenizer_parse(&t, small_file, sizeof small_file - 1, "small", NULL),
                     BD_OK);
    for (size_t i = 0; i < sizeof small_cases / sizeof *small_cases; i++) {
        bd_token_vec ids = {0}, want = {0};
        const char *text = small_cases[i].text;
        assert_int_equal(bd_tokenizer_encode(t, text, strlen(text), &everything, &ids, NULL),
                         BD_OK);
        int32_t copy[8];
        memcpy(copy, small_cases[i].ids, sizeof copy);
        want.ids = copy;
        want.count = small_cases[i].count;
        support_same_ids(&ids, &want, text, i);
        bd_token_vec_deinit(&ids);
    }
    bd_tokenizer_destroy(t);
}

static void test_cut_files(void **state) {
    (void)state;
    size_t bytes = sizeof small_file - 1;
    assert_true(try_file(small_file, bytes));
    for (size_t cut = 0; cut < bytes; cut++) {
        char *copy = malloc(cut + 1); /* its own block, so that a read behind the end is seen */
        assert_non_null(copy);
        memcpy(copy, small_file, cut);
        assert_false(try_file(copy, cut));
        free(copy);
    }
    char *zen;
    size_t zen_bytes;
    bd_error err;
    assert_int_equal(bd_file_read(ZEN_MINI_FILE, 1 << 24, &zen, &zen_bytes, &err), BD_OK);
    for (size_t cut = 0; cut < zen_bytes; cut += 9973)
        assert_false(try_file(zen, cut));
    free(zen);
}

static void test_mutated_files(void **state) {
    (void)state;
    static const char *const values[] = {"null",
                                         "-1",
                                         "1e9",
                                         "2097151",
                                         "2097152",
                                         "0.5",
                                         "[]",
                                         "{}",
                                         "\"\"",
                                         "\"x\"",
                                         "true",
                                         "18446744073709551616",
                                         "[[\"a\",\"b\",\"c\"]]",
                                         "{\"type\":\"Fuse\"}",
                                         "\"(\"",
                                         "\"(a|b)*c\""};
    uint64_t seed = support_seed();
    size_t bytes = sizeof small_file - 1, loaded = 0;
    for (int round = 0; round < 30000; round++) {
        bd_strbuf file;
        bd_strbuf_init(&file, 0);
        size_t at = (size_t)(support_random(&seed) % bytes);
        if (round % 3 == 0) { /* one byte */
            bd_strbuf_append(&file, small_file, bytes);
            file.data[at] = small_file[support_random(&seed) % bytes];
        } else if (round % 3 == 1) { /* a piece of the file over another */
            size_t from = (size_t)(support_random(&seed) % bytes);
            size_t length = (size_t)(support_random(&seed) % 40);
            bd_strbuf_append(&file, small_file, at);
            bd_strbuf_append(&file, small_file + from, from + length < bytes ? length : 0);
            bd_strbuf_append(&file, small_file + at, bytes - at);
        } else { /* another value after a colon */
            const char *colon = strchr(small_file + at, ':');
            size_t head = colon ? (size_t)(colon - small_file) + 1 : bytes;
            size_t tail = head + strcspn(small_file + head, ",}]");
            bd_strbuf_append(&file, small_file, head);
            bd_strbuf_puts(&file, values[support_random(&seed) % 16]);
            bd_strbuf_append(&file, small_file + tail, bytes - tail);
        }
        assert_false(file.failed);
        if (try_file(file.data, file.len_bytes)) loaded++;
        bd_strbuf_deinit(&file);
    }
    assert_true(loaded > 300); /* the mutations reach behind the parser */
}

typedef struct refusal {
    const char *from, *to; /* replaced in small_file, once */
    bd_status status;
    const char *words;
} refusal;

static const refusal refusals[] = {
    {"\"NFC\"", "\"NFKC\"", BD_E_UNSUPPORTED, "normalizer: type \"NFKC\""},
    {"\"Split\"", "\"Metaspace\"", BD_E_UNSUPPORTED, "pre_tokenizer: type \"Metaspace\""},
    {"\"Isolated\"", "\"Contiguous\"", BD_E_UNSUPPORTED, "Contiguous"},
    {"[a-c]+", "[a-c+", BD_E_UNSUPPORTED, "[a-c+"},
    {"[a-c]+", "[a&&b]", BD_E_UNSUPPORTED, "&&"},
    {"\"TemplateProcessing\"", "\"BertProcessing\"", BD_E_UNSUPPORTED, "BertProcessing"},
    {"\"ids\":[14]", "\"ids\":[99]", BD_E_FORMAT, "id 99"},
    {"\"id\":\"A\"", "\"id\":\"B\"", BD_E_UNSUPPORTED, "sequence \"B\""},
    {"\"stop\":0", "\"stop\":1", BD_E_UNSUPPORTED, "Strip"},
    {"\"ByteFallback\"", "\"CTC\"", BD_E_UNSUPPORTED, "CTC"},
    {"\"BPE\"", "\"WordPiece\"", BD_E_UNSUPPORTED, "WordPiece"},
    {"\"dropout\":null", "\"dropout\":0.1", BD_E_UNSUPPORTED, "dropout"},
    {"\"unk_token\":\"<unk>\"", "\"unk_token\":\"none\"", BD_E_FORMAT, "none"},
    {"\"abc\":12", "\"abc\":11", BD_E_FORMAT, "id 11"},
    {"\"abc\":12", "\"ab\":12", BD_E_FORMAT, "\"ab\" has two ids"},
    {"\"abc\":12", "\"abc\":2097152", BD_E_FORMAT, "token id"},
    {"\"abc\":12", "\"abc\":-1", BD_E_FORMAT, "token id"},
    {"\"abc\":12", "\"abc\":1.5", BD_E_FORMAT, "token id"},
    {"\"id\":15", "\"id\":17", BD_E_FORMAT, "has id 17"},
    {"\"a b\"", "\"a q\"", BD_E_FORMAT, "merge 0"},
    {"\"a b\"", "\"a b c\"", BD_E_FORMAT, "merge 0"},
    {"\"ab ab\"", "[\"ab\"]", BD_E_FORMAT, "merge 1"},
    {"\"ab ab\"", "[\"ab\",\"ab\",\"ab\"]", BD_E_FORMAT, "merge 1"},
    {"\"version\"", "\"\\u0000\"", BD_E_FORMAT, ""},
    {"\"lstrip\":true", "\"lstrip\":1", BD_E_FORMAT, "lstrip"},
};

static void test_refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refusal *r = &refusals[i];
        const char *at = strstr(small_file, r->from);
        assert_non_null(at);
        bd_strbuf file;
        bd_strbuf_init(&file, 0);
        bd_strbuf_append(&file, small_file, (size_t)(at - small_file));
        bd_strbuf_puts(&file, r->to);
        bd_strbuf_puts(&file, at + strlen(r->from));
        bd_tokenizer *t;
        bd_error err;
        bd_status s = bd_tokenizer_parse(&t, file.data, file.len_bytes, "small.json", &err);
        if (s != r->status || !strstr(err.message, r->words))
            fail_msg("%s -> %s: status %d, message \"%s\"", r->from, r->to, (int)s,
                     s == BD_OK ? "" : err.message);
        bd_tokenizer_destroy(t);
        bd_strbuf_deinit(&file);
    }
}

/* A pattern that backtracks without end must give up with a clear error. */
static void test_hostile_pattern(void **state) {
    (void)state;
    const char *at = strstr(small_file, "[a-c]+|\\\\s");
    bd_strbuf file, text;
    bd_strbuf_init(&file, 0);
    bd_strbuf_init(&text, 0);
    bd_strbuf_append(&file, small_file, (size_t)(at - small_file));
    bd_strbuf_puts(&file, "(a|a|aa)+(?=c)");
    bd_strbuf_puts(&file, at + strlen("[a-c]+|\\\\s"));
    for (int i = 0; i < 60; i++)
        bd_strbuf_puts(&text, "a");
    bd_tokenizer *t;
    bd_error err;
    bd_token_vec ids = {0};
    assert_int_equal(bd_tokenizer_parse(&t, file.data, file.len_bytes, "small.json", &err), BD_OK);
    bd_status s = bd_tokenizer_encode(t, text.data, text.len_bytes, &plain, &ids, &err);
    assert_int_equal(s, BD_E_LIMIT);
    assert_non_null(strstr(err.message, "pattern"));
    assert_int_equal(ids.count, 0);
    bd_token_vec_deinit(&ids);
    bd_tokenizer_destroy(t);
    bd_strbuf_deinit(&file);
    bd_strbuf_deinit(&text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long_texts),       cmocka_unit_test(test_room_for_one_word),
        cmocka_unit_test(test_nul_and_controls), cmocka_unit_test(test_invalid_utf8),
        cmocka_unit_test(test_random_ids),       cmocka_unit_test(test_small_file),
        cmocka_unit_test(test_cut_files),        cmocka_unit_test(test_mutated_files),
        cmocka_unit_test(test_refusals),         cmocka_unit_test(test_hostile_pattern),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
