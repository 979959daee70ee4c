/* json_line.c - see the header; every function relies on the text being valid JSON. */
#include "json_line.h"

#include <stdlib.h>
#include <string.h>

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t skip_space(const char *text, size_t bytes, size_t at) {
    while (at < bytes && is_space(text[at]))
        at++;
    return at;
}

/* Index behind the string whose opening quote is at `at`. */
static size_t string_end(const char *text, size_t bytes, size_t at) {
    for (at++; at < bytes && text[at] != '"'; at++)
        if (text[at] == '\\') at++;
    return at < bytes ? at + 1 : bytes;
}

/* Index behind the value that starts at `at`. */
static size_t value_end(const char *text, size_t bytes, size_t at) {
    size_t depth = 0;
    while (at < bytes) {
        char c = text[at];
        if (c == '"') {
            at = string_end(text, bytes, at);
            if (depth == 0) return at;
            continue;
        }
        if ((c == ']' || c == '}') && depth == 0) return at;
        if (depth == 0 && (c == ',' || is_space(c))) return at;
        at++;
        if (c == '[' || c == '{') depth++;
        if ((c == ']' || c == '}') && --depth == 0) return at;
    }
    return at;
}

bd_json_span bd_json_span_of(const char *text, size_t bytes) {
    size_t start = skip_space(text, bytes, 0);
    while (bytes > start && is_space(text[bytes - 1]))
        bytes--;
    return (bd_json_span){text + start, bytes - start};
}

bool bd_json_array_next(bd_json_span array, size_t *cursor, bd_json_span *value) {
    if (array.bytes < 2 || array.text[0] != '[') return false;
    size_t at = skip_space(array.text, array.bytes, *cursor + 1);
    if (at + 1 >= array.bytes) return false;
    size_t end = value_end(array.text, array.bytes, at);
    *value = (bd_json_span){array.text + at, end - at};
    *cursor = skip_space(array.text, array.bytes, end); /* at the comma or the bracket */
    return true;
}

/* Whether the key, with quotes, spells the name. */
static bool key_is(bd_json_span key, const char *name) {
    size_t bytes = strlen(name);
    if (!memchr(key.text, '\\', key.bytes))
        return key.bytes == bytes + 2 && !memcmp(key.text + 1, name, bytes);
    bd_strbuf plain;
    bd_strbuf_init(&plain, 0);
    bool same = bd_json_string_append(key, &plain) && !plain.failed && plain.len_bytes == bytes &&
                !memcmp(plain.data, name, bytes);
    bd_strbuf_deinit(&plain);
    return same;
}

bool bd_json_object_get(bd_json_span object, const char *key, bd_json_span *value) {
    const char *text = object.text;
    bool found = false;
    if (object.bytes < 2 || text[0] != '{') return false;
    size_t at = skip_space(text, object.bytes, 1);
    while (at < object.bytes && text[at] == '"') {
        size_t key_end = string_end(text, object.bytes, at);
        bd_json_span name = {text + at, key_end - at};
        size_t colon = skip_space(text, object.bytes, key_end);
        size_t start = skip_space(text, object.bytes, colon + 1);
        size_t end = value_end(text, object.bytes, start);
        if (key_is(name, key)) {
            *value = (bd_json_span){text + start, end - start};
            found = true;
        }
        at = skip_space(text, object.bytes, end);
        if (at < object.bytes && text[at] == ',') at = skip_space(text, object.bytes, at + 1);
    }
    return found;
}

static uint32_t hex4(const char *text) {
    char digits[5] = {text[0], text[1], text[2], text[3], '\0'};
    return (uint32_t)strtoul(digits, NULL, 16);
}

/* Appends the escape whose backslash is at text; returns its length. */
static size_t escape_append(const char *text, bd_strbuf *out) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *name = strchr(names, text[1]);
    if (text[1] != 'u') {
        bd_strbuf_append(out, name ? &values[name - names] : "?", 1);
        return 2;
    }
    uint32_t c = hex4(text + 2);
    size_t used = 6;
    if (c >= 0xd800 && c < 0xdc00) { /* a valid text has the other half behind it */
        c = 0x10000 + ((c - 0xd800) << 10) + (hex4(text + 8) - 0xdc00);
        used = 12;
    }
    uint8_t utf8[4];
    size_t count = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = count; i-- > 1; c >>= 6)
        utf8[i] = (uint8_t)(0x80 | (c & 0x3f));
    utf8[0] = (uint8_t)(lead[count] | c);
    bd_strbuf_append(out, utf8, count);
    return used;
}

bool bd_json_string_append(bd_json_span value, bd_strbuf *out) {
    if (value.bytes < 2 || value.text[0] != '"') return false;
    size_t at = 1, end = value.bytes - 1;
    while (at < end) {
        const char *escape = memchr(value.text + at, '\\', end - at);
        size_t plain = (escape ? (size_t)(escape - value.text) : end) - at;
        bd_strbuf_append(out, value.text + at, plain);
        at += plain;
        if (escape) at += escape_append(escape, out);
    }
    return true;
}

bool bd_json_int32(bd_json_span value, int32_t *number) {
    size_t at = value.bytes > 0 && value.text[0] == '-' ? 1 : 0;
    int64_t n = 0;
    if (at == value.bytes || value.bytes - at > 10) return false;
    bool negative = at == 1;
    for (; at < value.bytes; at++) {
        if (value.text[at] < '0' || value.text[at] > '9') return false;
        n = n * 10 + (value.text[at] - '0');
    }
    if (negative) n = -n;
    if (n < INT32_MIN || n > INT32_MAX) return false;
    *number = (int32_t)n;
    return true;
}

bool bd_json_bool(bd_json_span value, bool *flag) {
    bool is_true = value.bytes == 4 && !memcmp(value.text, "true", 4);
    bool is_false = value.bytes == 5 && !memcmp(value.text, "false", 5);
    *flag = is_true;
    return is_true || is_false;
}
