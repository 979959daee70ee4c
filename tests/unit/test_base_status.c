/* Statuses, error values, log lines, clocks and the arena. Log lines are read back through a pipe.
 */
#include "base_support.h"

#include <errno.h>
#include <unistd.h>

#include "bitdelta/base/arena.h"
#include "bitdelta/base/clock.h"
#include "bitdelta/base/json_scan.h"
#include "bitdelta/base/log.h"

static void test_names(void **state) {
    (void)state;
    assert_string_equal(bd_status_name(BD_E_CORRUPT), "BD_E_CORRUPT");
    assert_string_equal(bd_status_text(BD_E_IO), "input/output error");
    assert_int_equal(bd_status_http(BD_BUSY), 429);
    assert_int_equal(bd_status_http(BD_OK), 200);
    assert_string_equal(bd_status_name((bd_status)12345), "BD_E_INTERNAL");
}

static void test_fail(void **state) {
    (void)state;
    bd_error err;
    assert_int_equal(bd_fail(NULL, BD_E_IO, "x", "y"), BD_E_IO);
    assert_int_equal(bd_fail(&err, BD_E_LIMIT, NULL, "%d of %d", 3, 2), BD_E_LIMIT);
    assert_string_equal(err.message, "3 of 2");
    assert_string_equal(err.subject, "");
    /* An error may be wrapped with its own text as an argument. */
    bd_status status = bd_fail(&err, BD_E_FORMAT, err.message, "outer: %s", err.message);
    assert_int_equal(status, BD_E_FORMAT);
    assert_string_equal(err.message, "outer: 3 of 2");
    assert_string_equal(err.subject, "3 of 2");
    bd_error_clear(&err);
    assert_int_equal(err.status, BD_OK);
    assert_string_equal(err.message, "");
}

static void test_fail_cuts_at_character(void **state) {
    (void)state;
    char text[1500];
    for (size_t lead = 0; lead < 4; lead++) {
        memset(text, 'a', lead);
        size_t at = lead;
        while (at + 5 < sizeof text) {
            memcpy(text + at, "\xf0\x9f\x98\x80", 4);
            at += 4;
        }
        text[at] = 0;
        bd_error err;
        bd_status status = bd_fail(&err, BD_E_IO, text, "%s", text);
        assert_int_equal(status, BD_E_IO);
        assert_true(strlen(err.message) > sizeof err.message - 6);
        assert_true(strlen(err.subject) > sizeof err.subject - 6);
        assert_int_equal(bd_utf8_valid_prefix(err.message, strlen(err.message)),
                         strlen(err.message));
        assert_int_equal(bd_utf8_valid_prefix(err.subject, strlen(err.subject)),
                         strlen(err.subject));
        /* The reason of a system error survives however long the text before it is. */
        status = bd_fail_errno(&err, BD_E_IO, text, ENOENT, "%s", text);
        assert_int_equal(status, BD_E_IO);
        assert_non_null(strstr(err.message, ": No such file or directory"));
        assert_int_equal(bd_utf8_valid_prefix(err.message, strlen(err.message)),
                         strlen(err.message));
    }
}

/* A caller's own cut and bytes that never were text: no bad byte gets into a message. */
static void test_bad_bytes(void **state) {
    (void)state;
    bd_error err;
    bd_status status =
        bd_fail(&err, BD_E_IO, "a\xff/b", "\"%.3s\" \xc0\xaf %s", "a\xe2\x82\xac", "\xc3\xa9");
    assert_int_equal(status, BD_E_IO);
    assert_string_equal(err.subject, "a?/b");
    assert_string_equal(err.message, "\"a??\" ?? \xc3\xa9");
}

/* What one call writes to stderr. */
static size_t capture(char *out, size_t cap, void (*emit)(void *), void *arg) {
    int pipe_fds[2];
    assert_int_equal(pipe(pipe_fds), 0);
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    dup2(pipe_fds[1], STDERR_FILENO);
    close(pipe_fds[1]);
    emit(arg);
    dup2(saved, STDERR_FILENO);
    close(saved);
    size_t len = 0;
    for (ssize_t got; (got = read(pipe_fds[0], out + len, cap - 1 - len)) > 0;)
        len += (size_t)got;
    close(pipe_fds[0]);
    out[len] = 0;
    return len;
}

static void emit_text(void *arg) {
    bd_log(BD_LOG_INFO, "unit", "%s", (const char *)arg);
}

static void emit_debug(void *arg) {
    bd_log(BD_LOG_DEBUG, "unit", "%s", (const char *)arg);
}

static void emit_error(void *arg) {
    bd_log_error("unit", "load", arg);
}

static void test_log(void **state) {
    (void)state;
    char line[8192], expected[64];
    char text[] = "a=1 b=\"x\ny\" \x1b[31m";
    capture(line, sizeof line, emit_text, text);
    unsigned long long seconds;
    int end = 0;
    assert_int_equal(sscanf(line, "t=%llu.%*6u level=info %n", &seconds, &end), 1);
    assert_string_equal(line + end, "mod=unit a=1 b=\"x?y\" ?[31m\n");
    assert_int_equal(capture(line, sizeof line, emit_debug, text), 0);
    bd_log_level_set(BD_LOG_DEBUG);
    assert_true(capture(line, sizeof line, emit_debug, text) > 0);
    bd_log_level_set(BD_LOG_INFO);

    bd_error err;
    bd_status status = bd_fail(&err, BD_E_CORRUPT, "a \"b\"", "chunk 3");
    assert_int_equal(status, BD_E_CORRUPT);
    capture(line, sizeof line, emit_error, &err);
    snprintf(expected, sizeof expected, "subject=\"a 'b'\" error=\"chunk 3\"\n");
    assert_non_null(strstr(line, "level=error mod=unit what=\"load\" status=BD_E_CORRUPT"));
    assert_non_null(strstr(line, expected));
}

static void test_log_cut(void **state) {
    (void)state;
    char text[6000], line[8192];
    for (size_t lead = 0; lead < 3; lead++) {
        memset(text, 'a', lead);
        size_t at = lead;
        for (; at + 4 < sizeof text; at += 3)
            memcpy(text + at, "\xe6\xbc\xa2", 3);
        text[at] = 0;
        size_t len = capture(line, sizeof line, emit_text, text);
        assert_in_range(len, 2040, 2048);
        assert_int_equal(line[len - 1], '\n');
        assert_int_equal(bd_utf8_valid_prefix(line, len), len);
    }
}

static void test_clock(void **state) {
    (void)state;
    uint64_t first = bd_now_us();
    struct timespec pause = {.tv_nsec = 2000000};
    nanosleep(&pause, NULL);
    assert_true(bd_now_us() - first >= 2000);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t want_us = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
    assert_in_range(bd_now_us(), want_us, want_us + 10000000u);
    time_t wall = time(NULL);
    assert_in_range(bd_wall_seconds(), (uint64_t)wall, (uint64_t)wall + 5);
}

static void test_arena(void **state) {
    (void)state;
    uint64_t random = support_seed();
    bd_arena *arena = bd_arena_create(1000, 1 << 16);
    assert_non_null(arena);
    unsigned char *parts[64];
    size_t sizes[64];
    for (size_t i = 0; i < 64; i++) {
        sizes[i] = support_random(&random) % (i % 8 == 0 ? 3000 : 200);
        parts[i] = bd_arena_alloc(arena, sizes[i], 1);
        assert_non_null(parts[i]);
        assert_int_equal((uintptr_t)parts[i] % 16, 0);
        for (size_t k = 0; k < sizes[i]; k++)
            assert_int_equal(parts[i][k], 0);
        memset(parts[i], (int)i + 1, sizes[i]);
    }
    for (size_t i = 0; i < 64; i++) {
        for (size_t k = 0; k < sizes[i]; k++)
            assert_int_equal(parts[i][k], i + 1);
    }
    assert_true(bd_arena_used_bytes(arena) <= 1 << 16);
    char *copy = bd_arena_strndup(arena, "hello world", 5);
    assert_string_equal(copy, "hello");
    assert_null(bd_arena_alloc(arena, SIZE_MAX / 2, 3));
    assert_null(bd_arena_alloc(arena, SIZE_MAX, 1));
    assert_null(bd_arena_alloc(arena, 1 << 16, 1));
    assert_null(bd_arena_strndup(arena, "", SIZE_MAX));
    size_t total = 0;
    while (bd_arena_alloc(arena, 1, 64))
        total += 64;
    assert_true(total > 0);
    assert_true(bd_arena_used_bytes(arena) <= 1 << 16);
    bd_arena_destroy(arena);
    bd_arena_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_fail),
        cmocka_unit_test(test_fail_cuts_at_character),
        cmocka_unit_test(test_bad_bytes),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_log_cut),
        cmocka_unit_test(test_clock),
        cmocka_unit_test(test_arena),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
