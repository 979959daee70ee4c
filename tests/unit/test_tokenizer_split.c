/* Split patterns matched by hand against PCRE2 running the patterns themselves, and NFC against
 * utf8proc's own whole-text routine, on random text from blocks that have not changed since long
 * before both libraries' Unicode versions. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer_support.h"

#include <pcre2.h>
#include <utf8proc.h>

#include "tokenizer/internal.h"
#include "tokenizer/unicode.h"

typedef struct block {
    uint32_t first, last;
} block;

static const block blocks[] = {
    {'a', 'z'},         {'A', 'Z'},       {'0', '9'},       {0, 0x7f},        {0x80, 0x24f},
    {0x391, 0x3a1},     {0x410, 0x44f},   {0x300, 0x345},   {0x660, 0x669},   {0x905, 0x939},
    {0x2000, 0x200a},   {0x2028, 0x2029}, {0x2160, 0x2188}, {0x2200, 0x22ff}, {0x3000, 0x3003},
    {0x4e00, 0x9fa5},   {0xac00, 0xd7a3}, {0xfb00, 0xfb06}, {0xff10, 0xff19}, {0x1f600, 0x1f64f},
    {0x1d400, 0x1d454}, {0x17f, 0x17f},   {'\'', '\''},     {' ', ' '},       {'\t', '\r'},
};

static size_t random_text(uint64_t *seed, uint8_t *out, size_t bytes_max) {
    static const char *const snippets[] = {"'s", "'RE", "'ll",       "'Ve", "\r\n", "  ",
                                           " a", " 1",  "'\xc5\xbf", "'l",  "n't"};
    size_t bytes = 0;
    while (bytes + 8 < bytes_max) {
        if (support_random(seed) % 3 == 0) {
            const char *snippet = snippets[support_random(seed) % 11];
            memcpy(out + bytes, snippet, strlen(snippet));
            bytes += strlen(snippet);
            continue;
        }
        block b = blocks[support_random(seed) % (sizeof blocks / sizeof *blocks)];
        uint32_t c = b.first + (uint32_t)(support_random(seed) % (b.last - b.first + 1));
        bytes += bd_utf8_put(c, out + bytes);
    }
    return bytes;
}

static const struct {
    bd_split_kind kind;
    const char *pattern;
} known[] = {
    {BD_SPLIT_GPT2,
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    {BD_SPLIT_LLAMA3, "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
                      "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
    {BD_SPLIT_QWEN2, "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
                     "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
    /* Not written as patterns in tokenizer.json, but what its "Digits" does. */
    {BD_SPLIT_DIGIT, "\\p{N}|\\P{N}+"},
    {BD_SPLIT_DIGITS, "\\p{N}+|\\P{N}+"},
};

static void test_split_against_pcre2(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    uint8_t text[160];
    for (int k = 0; k < 5; k++) {
        if (k < 3) assert_int_equal(bd_split_kind_of(known[k].pattern), known[k].kind);
        int number;
        PCRE2_SIZE offset;
        pcre2_code *code = pcre2_compile((PCRE2_SPTR)known[k].pattern, PCRE2_ZERO_TERMINATED,
                                         PCRE2_UTF | PCRE2_UCP, &number, &offset, NULL);
        assert_non_null(code);
        pcre2_match_data *data = pcre2_match_data_create(1, NULL);
        for (int round = 0; round < 20000; round++) {
            size_t bytes = random_text(&seed, text, 10 + support_random(&seed) % 150);
            for (size_t at = 0; at < bytes;) {
                size_t end = bd_split_end(known[k].kind, text, bytes, at);
                assert_int_equal(pcre2_match(code, text, bytes, at, 0, data, NULL), 1);
                const PCRE2_SIZE *range = pcre2_get_ovector_pointer(data);
                assert_int_equal(range[0], at);
                if (range[1] != end)
                    fail_msg("pattern %d, \"%.*s\" at %zu: ends at %zu, PCRE2 at %zu", k,
                             (int)bytes, (const char *)text, at, end, range[1]);
                at = end;
            }
        }
        pcre2_match_data_free(data);
        pcre2_code_free(code);
    }
    assert_int_equal(bd_split_kind_of("\\s+"), BD_SPLIT_PCRE2);
}

static void test_nfc_against_utf8proc(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    /* What composes, reorders, decomposes or looks like it: Latin, marks, Hangul, Indic vowels,
     * exclusions. */
    static const block parts[] = {
        {'a', 'z'},       {0xc0, 0x17f},    {0x300, 0x345},     {0x1100, 0x1112}, {0x1161, 0x1175},
        {0x11a8, 0x11c2}, {0xac00, 0xac1c}, {0x9c7, 0x9d7},     {0x958, 0x95f},   {0x1ea0, 0x1ef9},
        {0x212a, 0x212b}, {0xf900, 0xf910}, {0x1d15e, 0x1d164}, {0x5b0, 0x5bd},   {0x1f00, 0x1f15}};
    for (int round = 0; round < 50000; round++) {
        uint8_t text[64];
        size_t bytes = 0, bytes_max = 4 + support_random(&seed) % 56;
        while (bytes + 4 <= bytes_max) {
            block b = parts[support_random(&seed) % (sizeof parts / sizeof *parts)];
            uint32_t c = b.first + (uint32_t)(support_random(&seed) % (b.last - b.first + 1));
            bytes += bd_utf8_put(c, text + bytes);
        }
        uint8_t *want = NULL;
        utf8proc_ssize_t want_bytes =
            utf8proc_map(text, (utf8proc_ssize_t)bytes, &want, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        assert_true(want_bytes >= 0);
        bd_strbuf got;
        bd_strbuf_init(&got, 0);
        assert_int_equal(bd_nfc_append(text, bytes, &got), BD_OK);
        if (got.len_bytes != (size_t)want_bytes || memcmp(got.data, want, got.len_bytes) != 0)
            fail_msg("NFC of \"%.*s\" is \"%s\", utf8proc has \"%s\"", (int)bytes,
                     (const char *)text, got.data, (const char *)want);
        bd_strbuf_deinit(&got);
        free(want);
    }
}

/* An endless run of marks in the wrong order: a quadratic sort would not come back. */
static void test_nfc_long_run(void **state) {
    (void)state;
    size_t count = 300000;
    bd_strbuf text, out;
    bd_strbuf_init(&text, 0);
    bd_strbuf_init(&out, 0);
    bd_strbuf_puts(&text, "x");
    for (size_t i = 0; i < count; i++)
        bd_strbuf_puts(&text, i % 2 ? "\xcc\xa3" : "\xcc\x81");
    assert_int_equal(bd_nfc_append((const uint8_t *)text.data, text.len_bytes, &out), BD_OK);
    /* x with a dot below composes only for the x that Unicode has none of: all marks stay, sorted.
     */
    assert_int_equal(out.len_bytes, text.len_bytes);
    assert_memory_equal(out.data + 1, "\xcc\xa3\xcc\xa3", 4);
    assert_memory_equal(out.data + out.len_bytes - 4, "\xcc\x81\xcc\x81", 4);
    bd_strbuf_deinit(&text);
    bd_strbuf_deinit(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_against_pcre2),
        cmocka_unit_test(test_nfc_against_utf8proc),
        cmocka_unit_test(test_nfc_long_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
