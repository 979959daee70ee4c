/* json_scan.c - an iterative RFC 8259 checker; it builds nothing. Threads: pure functions.
 * The open containers are one bit each (1 = object), so depth costs no stack. */
#include "bitdelta/base/json_scan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

enum { DEPTH_CEILING = 1024 };

typedef struct scanner {
    const uint8_t *data;
    size_t bytes, at;
    const bd_json_limits *limits;
    bd_json_scan *out;
    bd_error *err;
    uint32_t depth, depth_max;
    uint8_t object_bits[DEPTH_CEILING / 8];
} scanner;

static bd_status fault(scanner *s, bd_status status, size_t at, const char *what) {
    s->out->offset = at;
    return bd_fail(s->err, status, "json", "%s at byte %zu", what, at);
}

static bd_status fault_here(scanner *s, const char *what) {
    return fault(s, BD_E_FORMAT, s->at,
                 s->at >= s->bytes ? "unexpected end of the JSON text" : what);
}

static void skip_space(scanner *s) {
    while (s->at < s->bytes) {
        uint8_t c = s->data[s->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
        s->at++;
    }
}

static bd_status count_node(scanner *s) {
    if (s->out->nodes >= s->limits->nodes_max) {
        return fault(s, BD_E_LIMIT, s->at, "too many JSON values");
    }
    s->out->nodes++;
    return BD_OK;
}

static bool inside_object(const scanner *s) {
    uint32_t level = s->depth - 1;
    return ((unsigned)s->object_bits[level / 8] >> (level % 8) & 1u) != 0;
}

static bd_status push(scanner *s, bool object) {
    if (s->depth >= s->depth_max) return fault(s, BD_E_LIMIT, s->at, "JSON nested too deeply");
    uint8_t bit = (uint8_t)(1u << (s->depth % 8));
    uint8_t *byte = &s->object_bits[s->depth / 8];
    *byte = (uint8_t)(object ? *byte | bit : *byte & ~bit);
    s->depth++;
    return BD_OK;
}

/* --- strings --- */

/* Four hex digits at s->at; -1 when there are none. */
static int32_t hex4(const scanner *s) {
    if (s->bytes - s->at < 4) return -1;
    int32_t value = 0;
    for (size_t i = 0; i < 4; i++) {
        uint8_t c = s->data[s->at + i];
        int32_t digit;
        if (c >= '0' && c <= '9') {
            digit = c - '0';
        } else if (c >= 'a' && c <= 'f') {
            digit = c - 'a' + 10;
        } else if (c >= 'A' && c <= 'F') {
            digit = c - 'A' + 10;
        } else {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

/* At the 'u' of \uXXXX; leaves s->at behind the escape and, for a surrogate, behind its second
 * half. */
static bd_status scan_unicode_escape(scanner *s, bool is_key) {
    const size_t start = s->at - 1;
    s->at++;
    int32_t unit = hex4(s);
    if (unit < 0) return fault(s, BD_E_FORMAT, start, "bad \\u escape");
    s->at += 4;
    if (unit == 0 && (is_key || !s->limits->allow_nul_escape)) {
        return fault(s, BD_E_FORMAT, start, "\\u0000 is not allowed");
    }
    if (unit < 0xd800 || unit > 0xdfff) return BD_OK;
    bool paired = unit < 0xdc00 && s->bytes - s->at >= 6 && s->data[s->at] == '\\' &&
                  s->data[s->at + 1] == 'u';
    if (paired) {
        s->at += 2;
        int32_t second = hex4(s);
        paired = second >= 0xdc00 && second <= 0xdfff;
        s->at += 4;
    }
    return paired ? BD_OK : fault(s, BD_E_FORMAT, start, "lone surrogate escape");
}

static bd_status scan_escape(scanner *s, bool is_key) {
    s->at++;
    if (s->at >= s->bytes) return fault_here(s, "");
    uint8_t c = s->data[s->at];
    if (c == 'u') return scan_unicode_escape(s, is_key);
    if (c == 0 || !strchr("\"\\/bfnrt", c)) {
        return fault(s, BD_E_FORMAT, s->at - 1, "bad escape");
    }
    s->at++;
    return BD_OK;
}

/* At the opening quote. A NUL in a key is never allowed: a DOM would cut it and match another name.
 */
static bd_status scan_string(scanner *s, bool is_key) {
    s->at++;
    while (s->at < s->bytes) {
        uint8_t c = s->data[s->at];
        if (c == '"') {
            s->at++;
            return BD_OK;
        }
        if (c < 0x20u) return fault_here(s, "control byte inside a string");
        if (c == '\\') {
            bd_status status = scan_escape(s, is_key);
            if (status != BD_OK) return status;
            continue;
        }
        bool valid;
        size_t step = bd_utf8_step(s->data + s->at, s->bytes - s->at, &valid);
        if (!valid) return fault_here(s, "invalid UTF-8");
        s->at += step;
    }
    return fault_here(s, "");
}

/* --- numbers --- */

/* The least number that rounds to infinity has 309 digits, so cutting longer ones never crosses it.
 */
enum { NUMBER_DIGITS_MAX = 400 };

/* True when the number in [from, to) rounds to infinity. Locale-free: strtod gets the digits as
 * "<digits>e<exponent>". */
static bool overflows(const uint8_t *text, size_t from, size_t to) {
    char digits[NUMBER_DIGITS_MAX + 32];
    size_t kept = 0;
    int64_t exponent = 0, written = 0;
    bool fraction = false, negative = false;
    size_t i = from;
    for (; i < to && text[i] != 'e' && text[i] != 'E'; i++) {
        uint8_t c = text[i];
        if (c == '.') fraction = true;
        if (c < '0' || c > '9') continue;
        if (fraction) exponent--;
        if (kept == 0 && c == '0') continue;
        if (kept < NUMBER_DIGITS_MAX) {
            digits[kept++] = (char)c;
        } else {
            exponent++;
        }
    }
    if (kept == 0) return false;
    for (i++; i < to; i++) {
        if (text[i] == '-') negative = true;
        if (text[i] < '0' || text[i] > '9') continue;
        if (written < 1000000000000) written = written * 10 + (text[i] - '0');
    }
    exponent += negative ? -written : written;
    int64_t magnitude = exponent + (int64_t)kept; /* 0.ddd * 10^magnitude */
    if (magnitude < 309) return false;
    if (magnitude > 309) return true;
    snprintf(digits + kept, sizeof digits - kept, "e%lld", (long long)exponent);
    return isinf(strtod(digits, NULL));
}

static size_t skip_digits(scanner *s) {
    size_t start = s->at;
    while (s->at < s->bytes && s->data[s->at] >= '0' && s->data[s->at] <= '9')
        s->at++;
    return s->at - start;
}

static bd_status scan_number(scanner *s) {
    const size_t start = s->at;
    if (s->data[s->at] == '-') s->at++;
    bool zero = s->at < s->bytes && s->data[s->at] == '0';
    size_t whole = skip_digits(s);
    if (whole == 0) return fault_here(s, "a number needs a digit");
    if (zero && whole > 1) return fault(s, BD_E_FORMAT, start, "a number with leading zeros");
    if (s->at < s->bytes && s->data[s->at] == '.') {
        s->at++;
        if (skip_digits(s) == 0) return fault_here(s, "a decimal point needs a digit behind it");
    }
    if (s->at < s->bytes && (s->data[s->at] == 'e' || s->data[s->at] == 'E')) {
        s->at++;
        if (s->at < s->bytes && (s->data[s->at] == '+' || s->data[s->at] == '-')) s->at++;
        if (skip_digits(s) == 0) return fault_here(s, "an exponent needs a digit");
    }
    if (overflows(s->data, start, s->at)) {
        return fault(s, BD_E_FORMAT, start, "a number too large for a double");
    }
    return BD_OK;
}

/* --- structure --- */

static bd_status scan_word(scanner *s, const char *word) {
    size_t len = strlen(word);
    if (s->bytes - s->at < len || memcmp(s->data + s->at, word, len) != 0) {
        return fault_here(s, "unexpected character");
    }
    s->at += len;
    return BD_OK;
}

/* A member's key and colon, up to its value. */
static bd_status scan_key(scanner *s) {
    if (s->at >= s->bytes || s->data[s->at] != '"') return fault_here(s, "expected a key");
    bd_status status = count_node(s);
    if (status == BD_OK) status = scan_string(s, true);
    if (status != BD_OK) return status;
    skip_space(s);
    if (s->at >= s->bytes || s->data[s->at] != ':') return fault_here(s, "expected ':'");
    s->at++;
    skip_space(s);
    return BD_OK;
}

/* An opening bracket. *complete: the container was empty and is closed again. */
static bd_status scan_open(scanner *s, bool object, bool *complete) {
    bd_status status = push(s, object);
    if (status != BD_OK) return status;
    s->at++;
    skip_space(s);
    *complete = s->at < s->bytes && s->data[s->at] == (object ? '}' : ']');
    if (*complete) {
        s->at++;
        s->depth--;
        return BD_OK;
    }
    return object ? scan_key(s) : BD_OK;
}

/* The start of one value: a whole scalar, or an opened container whose first value comes next. */
static bd_status scan_value(scanner *s, bool *complete) {
    if (s->at >= s->bytes) return fault_here(s, "");
    bd_status status = count_node(s);
    if (status != BD_OK) return status;
    *complete = true;
    switch (s->data[s->at]) {
    case '{':
        return scan_open(s, true, complete);
    case '[':
        return scan_open(s, false, complete);
    case '"':
        return scan_string(s, false);
    case 't':
        return scan_word(s, "true");
    case 'f':
        return scan_word(s, "false");
    case 'n':
        return scan_word(s, "null");
    default:
        break;
    }
    uint8_t c = s->data[s->at];
    if (c == '-' || (c >= '0' && c <= '9')) return scan_number(s);
    return fault_here(s, "unexpected character");
}

/* After a complete value: closes containers, or stops before the next value. */
static bd_status scan_after(scanner *s) {
    while (s->depth > 0) {
        bool object = inside_object(s);
        skip_space(s);
        uint8_t c = s->at < s->bytes ? s->data[s->at] : 0;
        if (c == ',') {
            s->at++;
            skip_space(s);
            return object ? scan_key(s) : BD_OK;
        }
        if (c != (object ? '}' : ']')) {
            return fault_here(s, object ? "expected ',' or '}'" : "expected ',' or ']'");
        }
        s->at++;
        s->depth--;
    }
    return BD_OK;
}

bd_status bd_json_check(const char *data, size_t bytes, const bd_json_limits *limits,
                        bd_json_scan *out, bd_error *err) {
    bd_json_scan ignored;
    scanner s = {.data = (const uint8_t *)data, .bytes = bytes, .limits = limits, .err = err};
    s.out = out ? out : &ignored;
    *s.out = (bd_json_scan){.nodes = 0};
    s.depth_max = limits->depth_max < DEPTH_CEILING ? limits->depth_max : DEPTH_CEILING;
    if (bytes >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0) s.at = 3;
    skip_space(&s);
    const size_t first = s.at;
    bd_status status;
    do {
        bool complete = false;
        status = scan_value(&s, &complete);
        if (status == BD_OK && complete) status = scan_after(&s);
    } while (status == BD_OK && s.depth > 0);
    if (status != BD_OK) return status;
    skip_space(&s);
    if (s.at < bytes) return fault(&s, BD_E_FORMAT, s.at, "bytes after the JSON value");
    s.out->offset = first;
    return BD_OK;
}

size_t bd_utf8_valid_prefix(const char *data, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        bool valid;
        size_t step = bd_utf8_step((const uint8_t *)data + at, bytes - at, &valid);
        if (!valid) break;
        at += step;
    }
    return at;
}
