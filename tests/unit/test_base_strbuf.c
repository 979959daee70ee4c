/* The growing string. JSON strings and shortest numbers are compared with expectations that Python
 * made (tests/data/base/generate.py), digits also by reading them back, and under a locale with a
 * comma. */
#include "base_support.h"

#include <locale.h>
#include <math.h>

#include "bitdelta/base/strbuf.h"

static void test_append(void **state) {
    (void)state;
    uint64_t random = support_seed();
    bd_strbuf buf;
    bd_strbuf_init(&buf, 0);
    assert_null(buf.data);
    char want[20000];
    size_t len = 0;
    for (int i = 0; i < 300; i++) {
        char part[64];
        size_t part_len = support_random(&random) % sizeof part;
        for (size_t k = 0; k < part_len; k++)
            part[k] = (char)('!' + support_random(&random) % 90);
        bd_strbuf_append(&buf, part, part_len);
        memcpy(want + len, part, part_len);
        len += part_len;
        assert_int_equal(buf.data[buf.len_bytes], 0);
    }
    assert_int_equal(buf.len_bytes, len);
    assert_memory_equal(buf.data, want, len);
    bd_strbuf_clear(&buf);
    bd_strbuf_printf(&buf, "%d-%s-%05.1f", 7, "x", 2.25);
    assert_string_equal(buf.data, "7-x-002.2");
    bd_strbuf_deinit(&buf);
    assert_null(buf.data);
}

static void test_cap(void **state) {
    (void)state;
    bd_strbuf buf;
    bd_strbuf_init(&buf, 10);
    bd_strbuf_puts(&buf, "0123456789");
    assert_false(buf.failed);
    bd_strbuf_puts(&buf, "");
    assert_false(buf.failed);
    bd_strbuf_puts(&buf, "x");
    assert_true(buf.failed);
    assert_string_equal(buf.data, "0123456789");
    bd_strbuf_clear(&buf);
    bd_strbuf_puts(&buf, "abc");
    bd_strbuf_json_string(&buf, "\x01\x02",
                          2); /* 14 bytes: fails halfway and must leave no trace */
    assert_true(buf.failed);
    assert_string_equal(buf.data, "abc");
    bd_strbuf_puts(&buf, "d");
    assert_string_equal(buf.data, "abc");
    bd_strbuf_clear(&buf);
    bd_strbuf_printf(&buf, "%s", "01234567890");
    assert_true(buf.failed);
    assert_int_equal(buf.len_bytes, 0);
    bd_strbuf_clear(&buf);
    bd_strbuf_append(&buf, "x", SIZE_MAX - 1);
    assert_true(buf.failed);
    bd_strbuf_deinit(&buf);
}

static void test_json_strings(void **state) {
    (void)state;
    FILE *file = fopen("tests/data/base/json_strings.txt", "r");
    assert_non_null(file);
    char in_hex[512], out_hex[1024];
    int count = 0;
    bd_strbuf buf;
    bd_strbuf_init(&buf, 0);
    while (fscanf(file, "%511s %1023s", in_hex, out_hex) == 2) {
        size_t in_bytes, out_bytes;
        char *in = support_unhex(in_hex, &in_bytes);
        char *want = support_unhex(out_hex, &out_bytes);
        bd_strbuf_clear(&buf);
        bd_strbuf_json_string(&buf, in, in_bytes);
        if (buf.len_bytes != out_bytes || memcmp(buf.data, want, out_bytes) != 0) {
            fail_msg("%s: got %s, want %s", in_hex, buf.data, want);
        }
        free(in);
        free(want);
        count++;
    }
    fclose(file);
    bd_strbuf_deinit(&buf);
    assert_int_equal(count, 400);
}

/* Digits without their zeros at either end, and the power of ten of the first digit. */
static void normalise(const char *text, char *digits, int *exponent) {
    int count = 0, point = 0, leading = 0;
    bool fraction = false;
    for (; *text && *text != 'e'; text++) {
        if (*text == '.') fraction = true;
        if (*text < '0' || *text > '9') continue;
        if (!fraction) point++;
        if (count == 0 && *text == '0') {
            leading++;
            continue;
        }
        digits[count++] = *text;
    }
    while (count > 1 && digits[count - 1] == '0')
        count--;
    digits[count] = 0;
    *exponent = point - leading - 1 + (*text ? (int)strtol(text + 1, NULL, 10) : 0);
}

static void compare_number(const char *kind, uint64_t bits, const char *want, bd_strbuf *buf) {
    char got_digits[64], want_digits[64];
    int got_exponent, want_exponent;
    bd_strbuf_clear(buf);
    if (*kind == 'd') {
        double value;
        memcpy(&value, &bits, sizeof value);
        bd_strbuf_json_number(buf, value);
    } else {
        uint32_t narrow = (uint32_t)bits;
        float value;
        memcpy(&value, &narrow, sizeof value);
        bd_strbuf_json_float(buf, value);
    }
    normalise(buf->data, got_digits, &got_exponent);
    normalise(want, want_digits, &want_exponent);
    if (strcmp(got_digits, want_digits) != 0 || got_exponent != want_exponent ||
        (buf->data[0] == '-') != (want[0] == '-')) {
        fail_msg("%s %llx: got %s, want %s", kind, (unsigned long long)bits, buf->data, want);
    }
}

static void numbers_against_python(void) {
    FILE *file = fopen("tests/data/base/numbers.txt", "r");
    assert_non_null(file);
    char kind[2], hex[32], want[64];
    int count = 0;
    bd_strbuf buf;
    bd_strbuf_init(&buf, 0);
    while (fscanf(file, "%1s %31s %63s", kind, hex, want) == 3) {
        compare_number(kind, strtoull(hex, NULL, 16), want, &buf);
        count++;
    }
    fclose(file);
    bd_strbuf_deinit(&buf);
    assert_true(count > 1500);
}

static void test_numbers(void **state) {
    (void)state;
    numbers_against_python();
}

/* The same numbers where printf and strtod use another decimal point. Skipped without such a
 * locale. */
static void test_numbers_in_locale(void **state) {
    (void)state;
    static const char *const k_names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8",
                                          "ps_AF.UTF-8"};
    bool found = false;
    for (size_t i = 0; i < sizeof k_names / sizeof k_names[0] && !found; i++) {
        found = setlocale(LC_NUMERIC, k_names[i]) != NULL;
    }
    if (!found) skip();
    numbers_against_python();
    setlocale(LC_NUMERIC, "C");
}

static void test_number_layout(void **state) {
    (void)state;
    static const struct {
        double value;
        const char *text;
    } k_rows[] = {
        {0.0, "0"},
        {-0.0, "-0.0"},
        {1.0, "1"},
        {-1.5, "-1.5"},
        {1e15, "1000000000000000"},
        {1e16, "1e16"},
        {1.25e17, "1.25e17"},
        {0.00001, "0.00001"},
        {0.000001, "1e-6"},
        {1.5e-7, "1.5e-7"},
        {123456.789, "123456.789"},
        {9007199254740993.0, "9007199254740992"},
        {(double)NAN, "null"},
        {(double)INFINITY, "null"},
        {-(double)INFINITY, "null"},
    };
    bd_strbuf buf;
    bd_strbuf_init(&buf, 0);
    for (size_t i = 0; i < sizeof k_rows / sizeof k_rows[0]; i++) {
        bd_strbuf_clear(&buf);
        bd_strbuf_json_number(&buf, k_rows[i].value);
        assert_string_equal(buf.data, k_rows[i].text);
    }
    bd_strbuf_deinit(&buf);
}

static void test_random_floats_read_back(void **state) {
    (void)state;
    uint64_t random = support_seed();
    bd_strbuf buf;
    bd_strbuf_init(&buf, 0);
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = support_random(&random);
        double wide, wide_back;
        float narrow, narrow_back;
        memcpy(&wide, &bits, sizeof wide);
        memcpy(&narrow, &bits, sizeof narrow);
        if (isfinite(wide)) {
            bd_strbuf_clear(&buf);
            bd_strbuf_json_number(&buf, wide);
            wide_back = strtod(buf.data, NULL);
            assert_memory_equal(&wide, &wide_back, sizeof wide);
        }
        if (isfinite(narrow)) {
            bd_strbuf_clear(&buf);
            bd_strbuf_json_float(&buf, narrow);
            narrow_back = strtof(buf.data, NULL);
            assert_memory_equal(&narrow, &narrow_back, sizeof narrow);
        }
    }
    bd_strbuf_deinit(&buf);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_append),
        cmocka_unit_test(test_cap),
        cmocka_unit_test(test_json_strings),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_numbers_in_locale),
        cmocka_unit_test(test_number_layout),
        cmocka_unit_test(test_random_floats_read_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
