/* status.c - names, texts and HTTP codes of the statuses, and the caller-owned error. Threads: any.
 */
#include "bitdelta/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

typedef struct status_row {
    const char *name, *text;
    int http;
} status_row;

static const status_row k_status_rows[] = {
#define STATUS_ROW(name, http, text) [name] = {#name, text, http},
    BD_STATUS_LIST(STATUS_ROW)
#undef STATUS_ROW
};

static const status_row *row_of(bd_status status) {
    size_t index = (size_t)status;
    if (index >= sizeof k_status_rows / sizeof k_status_rows[0]) index = BD_E_INTERNAL;
    return &k_status_rows[index];
}

const char *bd_status_name(bd_status status) {
    return row_of(status)->name;
}

const char *bd_status_text(bd_status status) {
    return row_of(status)->text;
}

int bd_status_http(bd_status status) {
    return row_of(status)->http;
}

/* Copies at most out_bytes - 1 bytes and never ends inside a UTF-8 sequence. */
static void copy_cut(char *out, size_t out_bytes, const char *text) {
    size_t len = strlen(text);
    if (len >= out_bytes) {
        len = out_bytes - 1;
        while (len > 0 && ((unsigned char)text[len] & 0xc0u) == 0x80u)
            len--;
    }
    memcpy(out, text, len);
    out[len] = '\0';
}

/* Callers shorten what they quote with "%.64s", which may end inside a character, and a file's name
 * may hold any bytes: every bad byte becomes '?'. */
static void mend_utf8(char *text) {
    size_t bytes = strlen(text);
    for (size_t at = 0; at < bytes;) {
        bool valid;
        size_t step = bd_utf8_step((const uint8_t *)text + at, bytes - at, &valid);
        if (!valid) memset(text + at, '?', step);
        at += step;
    }
}

/* The texts are built aside first: callers wrap an error by passing its own message as an argument.
 */
static void fill(bd_error *err, bd_status status, const char *subject, const char *message) {
    char subject_copy[sizeof err->subject];
    copy_cut(subject_copy, sizeof subject_copy, subject ? subject : "");
    err->status = status;
    memcpy(err->subject, subject_copy, sizeof err->subject);
    copy_cut(err->message, sizeof err->message, message);
    mend_utf8(err->subject);
    mend_utf8(err->message);
}

enum {
    MESSAGE_WORK_BYTES = 1024
}; /* longer than the field, so that the cut sees whole characters */

bd_status bd_fail(bd_error *err, bd_status status, const char *subject, const char *format, ...) {
    if (!err) return status;
    char message[MESSAGE_WORK_BYTES];
    va_list args;
    va_start(args, format);
    int written = vsnprintf(message, sizeof message, format, args);
    va_end(args);
    fill(err, status, subject, written < 0 ? bd_status_text(status) : message);
    return status;
}

bd_status bd_fail_errno(bd_error *err, bd_status status, const char *subject, int error_number,
                        const char *format, ...) {
    if (!err) return status;
    char message[MESSAGE_WORK_BYTES], reason_buffer[128];
    va_list args;
    va_start(args, format);
    int written = vsnprintf(message, sizeof message - sizeof reason_buffer, format, args);
    va_end(args);
    if (written < 0) copy_cut(message, sizeof message, bd_status_text(status));
    const char *reason = strerror_r(error_number, reason_buffer, sizeof reason_buffer);
    /* The reason must survive the cut, so the text before it is shortened first. */
    char head[sizeof err->message];
    size_t reason_len = strlen(reason);
    if (reason_len > 96) reason_len = 96;
    copy_cut(head, sizeof head - reason_len - 2, message);
    snprintf(message, sizeof message, "%s: %.*s", head, (int)reason_len, reason);
    fill(err, status, subject, message);
    return status;
}

void bd_error_clear(bd_error *err) {
    if (!err) return;
    err->status = BD_OK;
    err->subject[0] = '\0';
    err->message[0] = '\0';
}

void bd_assert_failed(const char *expression, const char *file, int line) {
    fprintf(stderr, "bitdelta: %s:%d: assertion failed: %s\n", file, line, expression);
    fflush(stderr);
    abort();
}
