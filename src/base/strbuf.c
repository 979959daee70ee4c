/* strbuf.c - the growing byte string and the JSON writers on top of it. Owner: the caller. */
#include "bitdelta/base/strbuf.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

enum { CAP_BYTES_MIN = 256 };

void bd_strbuf_init(bd_strbuf *buf, size_t max_bytes) {
    *buf = (bd_strbuf){.max_bytes = max_bytes};
}

void bd_strbuf_deinit(bd_strbuf *buf) {
    free(buf->data);
    *buf = (bd_strbuf){.max_bytes = buf->max_bytes};
}

void bd_strbuf_clear(bd_strbuf *buf) {
    buf->len_bytes = 0;
    buf->failed = false;
    if (buf->data) buf->data[0] = '\0';
}

/* Room for `more` bytes and the NUL behind them; false sets `failed`. */
static bool reserve(bd_strbuf *buf, size_t more) {
    if (buf->failed) return false;
    if (more > SIZE_MAX / 4 - buf->len_bytes) goto fail;
    size_t need = buf->len_bytes + more;
    if (buf->max_bytes > 0 && need > buf->max_bytes) goto fail;
    if (need < buf->cap_bytes) return true;
    size_t cap = buf->cap_bytes < CAP_BYTES_MIN ? CAP_BYTES_MIN : buf->cap_bytes * 2;
    if (cap < need + 1) cap = need + 1;
    if (buf->max_bytes > 0 && cap > buf->max_bytes + 1) cap = buf->max_bytes + 1;
    char *data = realloc(buf->data, cap);
    if (!data) goto fail;
    buf->data = data;
    buf->cap_bytes = cap;
    return true;
fail:
    buf->failed = true;
    return false;
}

void bd_strbuf_append(bd_strbuf *buf, const void *data, size_t len_bytes) {
    if (!reserve(buf, len_bytes)) return;
    if (len_bytes > 0) memcpy(buf->data + buf->len_bytes, data, len_bytes);
    buf->len_bytes += len_bytes;
    buf->data[buf->len_bytes] = '\0';
}

void bd_strbuf_puts(bd_strbuf *buf, const char *text) {
    bd_strbuf_append(buf, text, strlen(text));
}

void bd_strbuf_printf(bd_strbuf *buf, const char *format, ...) {
    if (buf->failed) return;
    /* Once is enough where there is room. */
    size_t room = buf->data ? buf->cap_bytes - buf->len_bytes : 0;
    va_list args;
    va_start(args, format);
    int length = vsnprintf(room > 0 ? buf->data + buf->len_bytes : NULL, room, format, args);
    va_end(args);
    bool fits = length >= 0 && (size_t)length < room;
    if (!fits && (length < 0 || !reserve(buf, (size_t)length))) {
        if (room > 0) buf->data[buf->len_bytes] = '\0';
        buf->failed = true;
        return;
    }
    if (!fits) {
        va_start(args, format);
        vsnprintf(buf->data + buf->len_bytes, (size_t)length + 1, format, args);
        va_end(args);
    }
    buf->len_bytes += (size_t)length;
}

/* Undo of a composed append that failed halfway. */
static void truncate_to(bd_strbuf *buf, size_t len_bytes) {
    buf->len_bytes = len_bytes;
    if (buf->data) buf->data[len_bytes] = '\0';
}

/* The escape of an ASCII byte that may not stand in a JSON string as it is. */
static void append_escape(bd_strbuf *buf, unsigned char c) {
    static const char k_short[0x20] = {
        ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r'};
    char text[7] = {'\\', (char)c};
    size_t len = 2;
    if (c < 0x20u && k_short[c]) {
        text[1] = k_short[c];
    } else if (c < 0x20u) {
        len = (size_t)snprintf(text, sizeof text, "\\u%04x", (unsigned)c);
    }
    bd_strbuf_append(buf, text, len);
}

void bd_strbuf_json_string(bd_strbuf *buf, const char *text, size_t len_bytes) {
    const size_t start = buf->len_bytes;
    if (buf->failed) return;
    bd_strbuf_append(buf, "\"", 1);
    size_t plain = 0; /* start of the run that needs no change */
    size_t i = 0;
    while (i < len_bytes && !buf->failed) {
        unsigned char c = (unsigned char)text[i];
        bool valid;
        size_t step = bd_utf8_step((const uint8_t *)text + i, len_bytes - i, &valid);
        if (valid && c >= 0x20u && c != '"' && c != '\\') {
            i += step;
            continue;
        }
        bd_strbuf_append(buf, text + plain, i - plain);
        if (valid) {
            append_escape(buf, c);
        } else {
            bd_strbuf_append(buf, "\xef\xbf\xbd", 3);
        }
        i += step;
        plain = i;
    }
    if (len_bytes > plain) bd_strbuf_append(buf, text + plain, len_bytes - plain);
    bd_strbuf_append(buf, "\"", 1);
    if (buf->failed) truncate_to(buf, start);
}

/* --- shortest numbers ---
 * printf and strtod follow the locale only in the decimal point, so digits are taken from "%.*e"
 * without it, checked as "<digits>e<exponent>", and laid out here. */

typedef struct decimal {
    char digits[20]; /* no leading and no trailing zeros, at least one digit */
    int digit_count;
    int exponent; /* value = d.ddd * 10^exponent */
} decimal;

static decimal decimal_of(double magnitude, int digit_count) {
    char text[40];
    decimal dec = {.digit_count = 0};
    snprintf(text, sizeof text, "%.*e", digit_count - 1, magnitude);
    const char *p = text;
    for (; *p && *p != 'e'; p++) {
        if (*p >= '0' && *p <= '9') dec.digits[dec.digit_count++] = *p;
    }
    dec.exponent = *p ? (int)strtol(p + 1, NULL, 10) : 0;
    return dec;
}

/* One unit more in the last digit. */
static decimal decimal_next(decimal dec) {
    int i = dec.digit_count - 1;
    while (i >= 0 && dec.digits[i] == '9')
        dec.digits[i--] = '0';
    if (i >= 0) {
        dec.digits[i]++;
    } else {
        dec.digits[0] = '1'; /* 999 became 1000: the zeros after it are already there */
        dec.exponent++;
    }
    return dec;
}

static bool decimal_reads_back(const decimal *dec, double magnitude, bool as_float) {
    char text[48];
    snprintf(text, sizeof text, "%.*se%d", dec->digit_count, dec->digits,
             dec->exponent - dec->digit_count + 1);
    if (as_float) return strtof(text, NULL) == (float)magnitude;
    return strtod(text, NULL) == magnitude;
}

static decimal shortest(double magnitude, bool as_float) {
    /* Normal numbers keep any decimal of so many digits, so shorter ones show up as trailing zeros;
     * subnormals do not. */
    bool normal = magnitude >= (as_float ? (double)FLT_MIN : DBL_MIN);
    int first = !normal ? 1 : as_float ? FLT_DIG : DBL_DIG;
    int last = as_float ? FLT_DECIMAL_DIG : DBL_DECIMAL_DIG;
    decimal dec = decimal_of(magnitude, last);
    for (int count = first; count < last; count++) {
        decimal near = decimal_of(magnitude, count);
        if (!decimal_reads_back(&near, magnitude, as_float)) {
            /* At a power of two the gap above is twice the gap below: the decimal just above can be
             * the right one although the one just below is nearer. */
            near = decimal_next(near);
            if (!decimal_reads_back(&near, magnitude, as_float)) continue;
        }
        dec = near;
        break;
    }
    while (dec.digit_count > 1 && dec.digits[dec.digit_count - 1] == '0')
        dec.digit_count--;
    return dec;
}

static size_t put_text(char *out, size_t at, const char *text, int count) {
    memcpy(out + at, text, (size_t)count);
    return at + (size_t)count;
}

static size_t put_zeros(char *out, size_t at, int count) {
    if (count > 0) memset(out + at, '0', (size_t)count);
    return count > 0 ? at + (size_t)count : at;
}

static void append_number(bd_strbuf *buf, double value, bool as_float) {
    if (!isfinite(value)) {
        bd_strbuf_puts(buf, "null");
        return;
    }
    if (value == 0.0) {
        bd_strbuf_puts(buf, signbit(value) ? "-0.0" : "0");
        return;
    }
    decimal dec = shortest(fabs(value), as_float);
    char out[64];
    size_t at = 0;
    if (value < 0) out[at++] = '-';
    int point = dec.exponent + 1; /* digits before the decimal point */
    if (dec.exponent < -5 || dec.exponent > 15) {
        at = put_text(out, at, dec.digits, 1);
        if (dec.digit_count > 1) out[at++] = '.';
        at = put_text(out, at, dec.digits + 1, dec.digit_count - 1);
        at += (size_t)snprintf(out + at, sizeof out - at, "e%d", dec.exponent);
    } else if (point <= 0) {
        at = put_text(out, at, "0.", 2);
        at = put_zeros(out, at, -point);
        at = put_text(out, at, dec.digits, dec.digit_count);
    } else if (point >= dec.digit_count) {
        at = put_text(out, at, dec.digits, dec.digit_count);
        at = put_zeros(out, at, point - dec.digit_count);
    } else {
        at = put_text(out, at, dec.digits, point);
        out[at++] = '.';
        at = put_text(out, at, dec.digits + point, dec.digit_count - point);
    }
    bd_strbuf_append(buf, out, at);
}

void bd_strbuf_json_number(bd_strbuf *buf, double value) {
    append_number(buf, value, false);
}

void bd_strbuf_json_float(bd_strbuf *buf, float value) {
    append_number(buf, (double)value, true);
}
