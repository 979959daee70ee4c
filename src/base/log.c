/* log.c - log lines on stderr. A line is formatted on the caller's stack and leaves in one
 * write(2), so lines of different threads never mix. Nobody waits for whoever reads them. Threads:
 * any. */
#include "bitdelta/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"

enum { LOG_LINE_BYTES = 2048, LOG_PIPE_BYTES = 1 << 20 };

static _Atomic int g_log_level = BD_LOG_INFO;
static pthread_mutex_t g_log_lock =
    PTHREAD_MUTEX_INITIALIZER; /* from asking for room to using it */
static uint64_t g_log_lost;    /* lines, under g_log_lock */

static const char *const k_level_names[] = {"error", "warn", "info", "debug"};

void bd_log_level_set(bd_log_level level) {
    atomic_store(&g_log_level, (int)level);
}

bool bd_log_enabled(bd_log_level level) {
    return (int)level <= atomic_load(&g_log_level);
}

void bd_log_widen(void) {
    (void)fcntl(STDERR_FILENO, F_SETPIPE_SZ, LOG_PIPE_BYTES);
}

/* A pipe that polls writable takes PIPE_BUF (4096) bytes, more than a line, without waiting. */
static bool has_room(void) {
    struct pollfd wait = {.fd = STDERR_FILENO, .events = POLLOUT};
    int ready;
    while ((ready = poll(&wait, 1, 0)) < 0 && errno == EINTR)
        continue;
    return ready == 1 && (wait.revents & POLLOUT);
}

static void write_whole(const char *line, size_t bytes) {
    while (bytes > 0) {
        ssize_t written = write(STDERR_FILENO, line, bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return; /* nowhere left to report it */
        line += written;
        bytes -= (size_t)written;
    }
}

/* A reader that has stopped costs lines, counted before the first that finds room again, but holds
 * up no thread: those who log serve requests. */
static void write_line(const char *line, size_t bytes) {
    char text[LOG_LINE_BYTES + 256]; /* both in one write: a pipe may have room for just one */
    pthread_mutex_lock(&g_log_lock);
    if (!has_room()) {
        g_log_lost++;
    } else if (g_log_lost == 0) {
        write_whole(line, bytes);
    } else {
        const uint64_t now_us = bd_now_us();
        const int length =
            snprintf(text, sizeof text - LOG_LINE_BYTES,
                     "t=%llu.%06llu level=warn mod=log lines=%llu lost: the log's "
                     "reader did not take them\n",
                     (unsigned long long)(now_us / 1000000u),
                     (unsigned long long)(now_us % 1000000u), (unsigned long long)g_log_lost);
        memcpy(text + length, line, bytes);
        write_whole(text, (size_t)length + bytes);
        g_log_lost = 0;
    }
    pthread_mutex_unlock(&g_log_lock);
}

/* Length of the line so far after a snprintf of `written` at `len`, kept inside the buffer. */
static size_t advance(size_t len, int written, size_t limit) {
    if (written < 0) return len;
    size_t next = len + (size_t)written;
    return next > limit ? limit : next;
}

void bd_log(bd_log_level level, const char *module, const char *format, ...) {
    if (!bd_log_enabled(level)) return;
    int saved_errno = errno;
    char line[LOG_LINE_BYTES + 1];
    const size_t limit = LOG_LINE_BYTES - 1; /* leaves room for the newline */
    uint64_t now_us = bd_now_us();
    int written = snprintf(line, limit + 1, "t=%llu.%06llu level=%s mod=%s ",
                           (unsigned long long)(now_us / 1000000u),
                           (unsigned long long)(now_us % 1000000u), k_level_names[level], module);
    size_t len = advance(0, written, limit);
    va_list args;
    va_start(args, format);
    written = vsnprintf(line + len, limit + 1 - len, format, args);
    va_end(args);
    size_t full = written < 0 ? len : len + (size_t)written;
    len = advance(len, written, limit);
    /* A cut line must not end inside a character. */
    if (full > limit) {
        size_t start = len;
        while (start > 0 && ((unsigned char)line[start - 1] & 0xc0u) == 0x80u)
            start--;
        if (start > 0 && (unsigned char)line[start - 1] >= 0xc0u) len = start - 1;
    }
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)line[i];
        if (c < 0x20u || c == 0x7fu) line[i] = '?';
    }
    line[len++] = '\n';
    write_line(line, len);
    errno = saved_errno;
}

/* Values are quoted; a quote inside would end the value early. */
static void without_quotes(char *out, size_t out_bytes, const char *text) {
    size_t i = 0;
    for (; text[i] && i + 1 < out_bytes; i++)
        out[i] = text[i] == '"' ? '\'' : text[i];
    out[i] = '\0';
}

void bd_log_error(const char *module, const char *what, const bd_error *err) {
    char subject[sizeof err->subject], message[sizeof err->message];
    without_quotes(subject, sizeof subject, err->subject);
    without_quotes(message, sizeof message, err->message);
    bd_log(BD_LOG_ERROR, module, "what=\"%s\" status=%s subject=\"%s\" error=\"%s\"", what,
           bd_status_name(err->status), subject, message);
}
