/* The JSON checker: the table of what a DOM parser lets through, a thousand documents that Python's
 * strict parser judged (tests/data/base/generate.py), the limits, and the edge of the double range.
 */
#include "base_support.h"

#include "bitdelta/base/json_scan.h"

static const bd_json_limits k_limits = {.depth_max = 64, .nodes_max = 100000};

typedef struct row {
    const char *text;
    size_t bytes; /* 0: strlen */
    bool accept;
} row;

static bd_status check(const char *text, size_t bytes, const bd_json_limits *limits,
                       bd_json_scan *scan, bd_error *err) {
    /* An exact heap copy, so that a sanitizer sees any read past the end. */
    char *copy = malloc(bytes > 0 ? bytes : 1);
    assert_non_null(copy);
    memcpy(copy, text, bytes);
    bd_status status = bd_json_check(copy, bytes, limits, scan, err);
    free(copy);
    return status;
}

static void run_rows(const row *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t bytes = rows[i].bytes > 0 ? rows[i].bytes : strlen(rows[i].text);
        bd_json_scan scan;
        bd_error err = {.status = BD_OK};
        bd_status status = check(rows[i].text, bytes, &k_limits, &scan, &err);
        if ((status == BD_OK) != rows[i].accept) {
            fail_msg("%s: %s (%s)", rows[i].text, bd_status_name(status), err.message);
        }
        if (!rows[i].accept) {
            assert_int_equal(status, BD_E_FORMAT);
            assert_true(scan.offset <= bytes);
            assert_non_null(strstr(err.message, "at byte "));
        }
    }
}

static void test_table(void **state) {
    (void)state;
    static const row k_rows[] = {
        /* bytes after the value */
        {"{}xyz", 0, false},
        {"{}{}", 0, false},
        {"{} \n", 0, true},
        {"{}\0", 3, false},
        /* not JSON at all */
        {"NaN", 0, false},
        {"[NaN]", 0, false},
        {"Infinity", 0, false},
        {"-Infinity", 0, false},
        {"+1", 0, false},
        {".5", 0, false},
        {"/* c */ 1", 0, false},
        {"[1] // c", 0, false},
        {"[1,]", 0, false},
        {"{\"a\":1,}", 0, false},
        {"[,1]", 0, false},
        {"'x'", 0, false},
        {"{a:1}", 0, false},
        {"{\"a\" 1}", 0, false},
        {"{\"a\":}", 0, false},
        {"[1 2]", 0, false},
        {"", 0, false},
        {" ", 0, false},
        {"]", 0, false},
        {"{", 0, false},
        {"[", 0, false},
        {"[1}", 0, false},
        {"{\"a\":1]", 0, false},
        {"tru", 0, false},
        {"truex", 0, false},
        {"nul", 0, false},
        {"\"a", 0, false},
        {"{\"a\":1,\"b\"", 0, false},
        {"{1:2}", 0, false},
        /* numbers */
        {"01", 0, false},
        {"1.", 0, false},
        {"-", 0, false},
        {"-01", 0, false},
        {"1e", 0, false},
        {"1e+", 0, false},
        {"1.e5", 0, false},
        {"0x10", 0, false},
        {"1e999", 0, false},
        {"-1e999", 0, false},
        {"[1e999]", 0, false},
        {"{\"ignored\":1e400}", 0, false},
        {"0", 0, true},
        {"-0", 0, true},
        {"1.0", 0, true},
        {"1.6e1", 0, true},
        {"1E-999", 0, true},
        {"9007199254740993", 0, true},
        /* control bytes, raw NUL */
        {"\"a\x01z\"", 0, false},
        {"\"a\tz\"", 0, false},
        {"\"a\nz\"", 0, false},
        {"\"a\0z\"", 5, false},
        {"[1,\x01 2]", 0, false},
        {"[1,\x0b 2]", 0, false},
        {"[1,\f2]", 0, false},
        {"\x1f{}", 0, false},
        {"[\t1,\r\n2]", 0, true},
        {"\"\x7f\"", 0, true},
        /* escapes */
        {"\"\\u0000\"", 0, false},
        {"\"\\uX000\"", 0, false},
        {"\"\\u12\"", 0, false},
        {"\"\\ud83d\"", 0, false},
        {"\"\\ude00\"", 0, false},
        {"\"\\ud83d\\u0041\"", 0, false},
        {"\"\\ud83dx\"", 0, false},
        {"\"\\ud83d\\ud83d\"", 0, false},
        {"\"\\x41\"", 0, false},
        {"\"\\", 0, false},
        {"\"\\\"", 0, false},
        {"\"\\u", 0, false},
        {"\"\\ud83d\\u", 0, false},
        {"\"\\ud83d\\ude00\"", 0, true},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\"", 0, true},
        {"\"\\0\"", 0, false},
        {"\"\\\0\"", 4, false},
        /* UTF-8 */
        {"\"\xff\"", 0, false},
        {"\"\xc0\xaf\"", 0, false},
        {"\"\xe0\x80\xaf\"", 0, false},
        {"\"\xed\xa0\x80\"", 0, false},
        {"\"\xf4\x90\x80\x80\"", 0, false},
        {"\"\xe2\x82\"", 0, false},
        {"\"\x80\"", 0, false},
        {"\"\xc3\xa9 \xe6\xbc\xa2 \xf0\x9f\x98\x80\"", 0, true},
        {"\xe2\x80\x83{}", 0, false},
        {"{}\xc2\xa0", 0, false},
        /* byte order mark: once, in front */
        {"\xef\xbb\xbf{}", 0, true},
        {"\xef\xbb\xbf\xef\xbb\xbf{}", 0, false},
        {"{}\xef\xbb\xbf", 0, false},
        {"\xef\xbb\xbf", 0, false},
        {" \xef\xbb\xbf{}", 0, false},
        /* duplicates and lone scalars are a matter for the next stage */
        {"{\"a\":1,\"a\":2}", 0, true},
        {"null", 0, true},
        {"\"s\"", 0, true},
    };
    run_rows(k_rows, sizeof k_rows / sizeof k_rows[0]);
}

static void test_against_python(void **state) {
    (void)state;
    FILE *file = fopen("tests/data/base/json_cases.txt", "r");
    assert_non_null(file);
    static char hex[1024];
    int nodes, count = 0, accepted = 0;
    while (fscanf(file, "%d %1023s", &nodes, hex) == 2) {
        size_t bytes;
        char *text = support_unhex(hex, &bytes);
        bd_json_scan scan;
        bd_error err = {.status = BD_OK};
        bd_status status = check(text, bytes, &k_limits, &scan, &err);
        if ((status == BD_OK) != (nodes >= 0)) fail_msg("%s: %s", text, err.message);
        if (status == BD_OK) assert_int_equal(scan.nodes, nodes);
        accepted += nodes >= 0;
        free(text);
        count++;
    }
    fclose(file);
    assert_true(count > 1000);
    assert_in_range(accepted, 300, 900);
}

static void test_limits(void **state) {
    (void)state;
    char text[4096];
    bd_json_scan scan;
    bd_error err;
    for (size_t depth = 1; depth < 140; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        bd_status want = depth <= 64 ? BD_OK : BD_E_LIMIT;
        assert_int_equal(check(text, 2 * depth, &k_limits, &scan, &err), want);
        if (want != BD_OK) assert_int_equal(scan.offset, 64);
    }
    /* Objects and arrays mixed, also inside a member nobody reads. */
    size_t at = 0;
    for (int i = 0; i < 40; i++) {
        memcpy(text + at, "{\"x\":[", 6);
        at += 6;
    }
    assert_int_equal(check(text, at, &k_limits, &scan, &err), BD_E_LIMIT);
    const bd_json_limits few = {.depth_max = 8, .nodes_max = 5};
    assert_int_equal(check("[1,2,3,4]", 9, &few, &scan, &err), BD_OK);
    assert_int_equal(scan.nodes, 5);
    assert_int_equal(check("[1,2,3,4,5]", 11, &few, &scan, &err), BD_E_LIMIT);
    assert_int_equal(check("{\"a\":1,\"b\":2}", 13, &few, NULL, NULL), BD_OK);
    assert_int_equal(check("{\"a\":1,\"b\":[]}", 14, &few, NULL, NULL), BD_OK);
    assert_int_equal(check("{\"a\":1,\"b\":[0]}", 15, &few, NULL, NULL), BD_E_LIMIT);
    const bd_json_limits deep = {.depth_max = UINT32_MAX, .nodes_max = 100000};
    memset(text, '[', sizeof text);
    assert_int_equal(check(text, sizeof text, &deep, &scan, &err), BD_E_LIMIT);
    assert_int_equal(scan.offset, 1024);
}

static void test_nul_escape(void **state) {
    (void)state;
    const bd_json_limits allow = {.depth_max = 8, .nodes_max = 99, .allow_nul_escape = true};
    assert_int_equal(check("[\"a\\u0000b\"]", 12, &allow, NULL, NULL), BD_OK);
    /* Never in a key: cut at the NUL it would pass for another key. */
    assert_int_equal(check("{\"a\\u0000\":1}", 13, &allow, NULL, NULL), BD_E_FORMAT);
    assert_int_equal(check("[\"a\0b\"]", 7, &allow, NULL, NULL), BD_E_FORMAT);
}

static void test_offset(void **state) {
    (void)state;
    bd_json_scan scan;
    assert_int_equal(check("\xef\xbb\xbf {}", 6, &k_limits, &scan, NULL), BD_OK);
    assert_int_equal(scan.offset, 4);
    assert_int_equal(check("[1,x]", 5, &k_limits, &scan, NULL), BD_E_FORMAT);
    assert_int_equal(scan.offset, 3);
    assert_int_equal(check("[1,2", 4, &k_limits, &scan, NULL), BD_E_FORMAT);
    assert_int_equal(scan.offset, 4);
}

/* The first decimal that rounds to infinity is 2^1024 - 2^970; strtod is the judge of everything
 * near it. */
static void test_double_edge(void **state) {
    (void)state;
    uint64_t random = support_seed();
    static const char k_edge[] =
        "17976931348623158079372897140530341507993413271003782693617377898044496829276475"
        "09466490179775872070963302864166928879109465555478519404026306574886715058206819"
        "08902000708383676273854845817711531764475730270069855571366959622842914819860834"
        "936475292719074168444365510704342711559699508093042880177904174497792";
    char text[2048];
    for (int i = 0; i < 3000; i++) {
        size_t len = strlen(k_edge);
        memcpy(text, k_edge, len);
        if (i % 3 != 0)
            text[1 + support_random(&random) % (len - 1)] =
                (char)('0' + support_random(&random) % 10);
        size_t digits = len;
        if (i % 2 == 0) { /* a long tail of fraction digits, all zero but perhaps the last */
            text[digits++] = '.';
            size_t tail = 1 + support_random(&random) % 300;
            memset(text + digits, '0', tail);
            digits += tail;
            if (i % 4 == 0) text[digits - 1] = '1';
        } else { /* the point moved, the exponent makes up for it */
            int shift = (int)(support_random(&random) % 300) + 1;
            size_t point = len - (size_t)shift > 0 && (size_t)shift < len ? len - (size_t)shift : 1;
            memmove(text + point + 1, text + point, len - point);
            text[point] = '.';
            digits = len + 1;
            digits += (size_t)snprintf(text + digits, 32, "E+%zu", len - point);
        }
        text[digits] = 0;
        bool infinite = strtod(text, NULL) > 1.7976931348623157e308;
        bd_status status = check(text, digits, &k_limits, NULL, NULL);
        if ((status != BD_OK) != infinite) fail_msg("%s: strtod disagrees", text);
    }
    assert_int_equal(check("1e99999999999999999999", 22, &k_limits, NULL, NULL), BD_E_FORMAT);
    assert_int_equal(check("0e99999999999999999999", 22, &k_limits, NULL, NULL), BD_OK);
    assert_int_equal(check("1e-99999999999999999999", 23, &k_limits, NULL, NULL), BD_OK);
}

static void test_utf8_prefix(void **state) {
    (void)state;
    /* Every two-byte and three-byte string, against the definition by code points. */
    for (uint32_t value = 0; value < 1u << 24; value += value < 1u << 16 ? 1 : 7) {
        const unsigned char bytes[3] = {(unsigned char)(value >> 16), (unsigned char)(value >> 8),
                                        (unsigned char)value};
        if (bytes[0] < 0xe0 || bytes[0] > 0xef) continue;
        uint32_t code = (bytes[0] & 15u) << 12 | (bytes[1] & 63u) << 6 | (bytes[2] & 63u);
        bool want = (bytes[1] & 0xc0u) == 0x80u && (bytes[2] & 0xc0u) == 0x80u && code >= 0x800 &&
                    (code < 0xd800 || code > 0xdfff);
        size_t got = bd_utf8_valid_prefix((const char *)bytes, 3);
        if ((got == 3) != want) fail_msg("%06x: %zu", value, got);
    }
    assert_int_equal(bd_utf8_valid_prefix("ab\xe2\x82", 4), 2);
    assert_int_equal(bd_utf8_valid_prefix("\xf0\x9f\x98\x80x\x80", 6), 5);
    assert_int_equal(bd_utf8_valid_prefix("", 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),       cmocka_unit_test(test_against_python),
        cmocka_unit_test(test_limits),      cmocka_unit_test(test_nul_escape),
        cmocka_unit_test(test_offset),      cmocka_unit_test(test_double_edge),
        cmocka_unit_test(test_utf8_prefix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
