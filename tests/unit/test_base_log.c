/* test_base_log.c - a log that nobody reads holds nobody up, and says what was lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bitdelta/base/log.h"

enum { THREADS = 4, LINES = 500, PIPE_BYTES = 4096, TEXT_BYTES = 1 << 22 };

static int g_stderr;

/* stderr becomes a small pipe; returns the end to read. */
static int begin(void) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    assert_true(fcntl(ends[1], F_SETPIPE_SZ, PIPE_BYTES) >= PIPE_BYTES);
    assert_int_equal(fcntl(ends[0], F_SETFL, O_NONBLOCK), 0);
    g_stderr = dup(STDERR_FILENO);
    assert_true(g_stderr >= 0 && dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
    close(ends[1]);
    return ends[0];
}

static void end(int from) {
    assert_true(dup2(g_stderr, STDERR_FILENO) == STDERR_FILENO);
    close(g_stderr);
    close(from);
}

/* What is in the pipe, added to text. */
static void take(int from, char *text, size_t *bytes) {
    ssize_t got;
    while ((got = read(from, text + *bytes, TEXT_BYTES - 1 - *bytes)) > 0)
        *bytes += (size_t)got;
    text[*bytes] = '\0';
}

static void *talk(void *arg) {
    char filler[900];
    memset(filler, 'x', sizeof filler - 1);
    filler[sizeof filler - 1] = '\0';
    for (int i = 0; i < LINES; i++)
        bd_log(BD_LOG_INFO, "test", "said=%d %s", i, filler + (size_t)(i * 37 % 800));
    return arg;
}

static void say_all(void) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, talk, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

/* Lines of the text with the word; every line is whole. */
static uint64_t lines_of(const char *text, const char *word) {
    uint64_t count = 0;
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        const char *stop = strchr(line, '\n'), *found = strstr(line, word);
        assert_true(stop != NULL && strncmp(line, "t=", 2) == 0);
        if (found && found < stop) count++;
    }
    return count;
}

static void test_nobody_reads(void **state) {
    (void)state;
    char *text = calloc(TEXT_BYTES, 1);
    size_t bytes = 0;
    assert_non_null(text);
    const int from = begin();
    say_all(); /* comes back, although the pipe is soon full */
    take(from, text, &bytes);
    const uint64_t kept = lines_of(text, "said=");
    assert_true(kept > 0 && kept < THREADS * LINES);
    assert_null(strstr(text, "lost"));
    bd_log(BD_LOG_ERROR, "test", "heard again");
    take(from, text, &bytes);
    end(from);
    const char *lost = strstr(text, "mod=log lines=");
    assert_non_null(lost);
    assert_true(strtoull(lost + strlen("mod=log lines="), NULL, 10) == THREADS * LINES - kept);
    assert_int_equal(lines_of(text, "lost"), 1);
    assert_true(strstr(lost, "heard again") != NULL);
    free(text);
}

typedef struct listener {
    int from;
    char *text;
    size_t bytes;
} listener;

static void *listen_all(void *arg) {
    listener *l = arg;
    ssize_t got;
    while ((got = read(l->from, l->text + l->bytes, TEXT_BYTES - 1 - l->bytes)) > 0)
        l->bytes += (size_t)got;
    l->text[l->bytes] = '\0';
    return NULL;
}

/* A reader at work while others talk: what arrives is whole lines, those that do not are counted.
 */
static void test_slow_reader(void **state) {
    (void)state;
    listener l = {.from = begin(), .text = calloc(TEXT_BYTES, 1)};
    pthread_t reader;
    assert_non_null(l.text);
    assert_int_equal(fcntl(l.from, F_SETFL, 0), 0);
    assert_int_equal(pthread_create(&reader, NULL, listen_all, &l), 0);
    say_all();
    struct pollfd room = {.fd = STDERR_FILENO, .events = POLLOUT};
    assert_int_equal(poll(&room, 1, -1), 1);
    bd_log(BD_LOG_INFO, "test", "the last");                     /* with what was lost until now */
    assert_true(dup2(g_stderr, STDERR_FILENO) == STDERR_FILENO); /* the pipe's last writer */
    assert_int_equal(pthread_join(reader, NULL), 0);
    close(g_stderr), close(l.from);
    uint64_t lost = 0;
    for (const char *at = l.text; (at = strstr(at, "mod=log lines=")) != NULL;) {
        at += strlen("mod=log lines=");
        lost += strtoull(at, NULL, 10);
    }
    assert_int_equal(lines_of(l.text, "the last"), 1);
    assert_int_equal(lines_of(l.text, "said=") + lost, THREADS * LINES);
    free(l.text);
}

static void test_no_stderr(void **state) {
    (void)state;
    const int from = begin();
    close(STDERR_FILENO);
    talk(NULL);
    end(from);
    bd_log(BD_LOG_INFO, "test", "there again");
}

int main(void) {
    alarm(120); /* a log that waits never comes back */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_reads),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_no_stderr),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
