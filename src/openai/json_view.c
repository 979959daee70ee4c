/* json_view.c - see json_view.h. Every walk relies on bd_json_check: brackets match, literals are
 * whole. */
#include "json_view.h"

#include <stdlib.h>
#include <string.h>

static const char *skip_space(const char *at) {
    while (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')
        at++;
    return at;
}

static const char *skip_string(const char *at) {
    at++;
    while (*at != '"')
        at += *at == '\\' ? 2 : 1;
    return at + 1;
}

/* First byte after the value at `at`. */
static const char *skip_value(const char *at) {
    uint32_t depth = 0;
    for (;;) {
        switch (*at) {
        case '"':
            at = skip_string(at);
            break;
        case '[':
        case '{':
            depth++;
            at++;
            break;
        case ']':
        case '}':
            depth--;
            at++;
            break;
        default: /* a number or a literal */
            while (*at > ' ' && *at != ',' && *at != ']' && *at != '}')
                at++;
            break;
        }
        if (depth == 0) return at;
        while (*at == ',' || *at == ':' || *at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')
            at++;
    }
}

bd_view bd_view_root(const char *text) {
    return (bd_view){skip_space(text)};
}

size_t bd_view_bytes(bd_view value) {
    return (size_t)(skip_value(value.at) - value.at);
}

bd_view_kind bd_view_kind_of(bd_view value) {
    switch (*value.at) {
    case 'n':
        return BD_VIEW_NULL;
    case 't':
    case 'f':
        return BD_VIEW_BOOL;
    case '"':
        return BD_VIEW_STRING;
    case '[':
        return BD_VIEW_ARRAY;
    case '{':
        return BD_VIEW_OBJECT;
    default:
        return BD_VIEW_NUMBER;
    }
}

const char *bd_view_kind_name(bd_view_kind kind) {
    static const char *const names[] = {
        [BD_VIEW_NULL] = "null",       [BD_VIEW_BOOL] = "a boolean", [BD_VIEW_NUMBER] = "a number",
        [BD_VIEW_STRING] = "a string", [BD_VIEW_ARRAY] = "an array", [BD_VIEW_OBJECT] = "an object",
    };
    return names[kind];
}

bool bd_view_true(bd_view value) {
    return *value.at == 't';
}

/* The text is followed by a delimiter or its NUL, so strtod stops in time; the process keeps the C
 * locale's numbers. */
double bd_view_double(bd_view value) {
    return strtod(value.at, NULL);
}

typedef struct decimal { /* digits x 10^exponent, from the source text */
    bool negative, overflow;
    uint64_t digits;
    int64_t exponent;
} decimal;

/* One more digit; trailing zeros wait in *zeros until something follows them. */
static void push_digit(decimal *number, int64_t *zeros, unsigned digit) {
    if (digit == 0) {
        if (number->digits != 0) (*zeros)++;
        return;
    }
    for (; *zeros > 0 && !number->overflow; (*zeros)--) {
        if (number->digits > UINT64_MAX / 10) number->overflow = true;
        number->digits *= 10;
    }
    *zeros = 0;
    if (number->digits > (UINT64_MAX - digit) / 10) number->overflow = true;
    number->digits = number->overflow ? 1 : number->digits * 10 + digit;
}

static decimal read_decimal(const char *at) {
    decimal number = {.negative = *at == '-'};
    if (number.negative) at++;
    int64_t zeros = 0, fraction = 0;
    for (; *at >= '0' && *at <= '9'; at++)
        push_digit(&number, &zeros, (unsigned)(*at - '0'));
    if (*at == '.') {
        for (at++; *at >= '0' && *at <= '9'; at++, fraction++)
            push_digit(&number, &zeros, (unsigned)(*at - '0'));
    }
    int64_t exponent = 0;
    if (*at == 'e' || *at == 'E') {
        at++;
        bool negative = *at == '-';
        if (*at == '-' || *at == '+') at++;
        for (; *at >= '0' && *at <= '9'; at++)
            if (exponent < 100000000) exponent = exponent * 10 + (*at - '0');
        if (negative) exponent = -exponent;
    }
    number.exponent = exponent - fraction + zeros;
    return number;
}

bd_view_int bd_view_int64(bd_view value, int64_t *out) {
    decimal number = read_decimal(value.at);
    *out = 0;
    if (number.digits == 0 && !number.overflow) return BD_VIEW_INT_OK;
    if (number.exponent < 0) return BD_VIEW_INT_FRACTION;
    for (; number.exponent > 0 && !number.overflow; number.exponent--) {
        if (number.digits > UINT64_MAX / 10) number.overflow = true;
        number.digits *= 10;
    }
    uint64_t limit = (uint64_t)INT64_MAX + (number.negative ? 1u : 0u);
    if (number.overflow || number.digits > limit)
        return number.negative ? BD_VIEW_INT_LOW : BD_VIEW_INT_HIGH;
    if (!number.negative)
        *out = (int64_t)number.digits;
    else
        *out = number.digits == limit ? INT64_MIN : -(int64_t)number.digits;
    return BD_VIEW_INT_OK;
}

static uint32_t hex4(const char *at) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        char c = at[i];
        uint32_t digit = c <= '9' ? (uint32_t)(c - '0') : (uint32_t)((c | 0x20) - 'a' + 10);
        value = value << 4 | digit;
    }
    return value;
}

/* The code point of the \u escape at `at` (which points at the 'u'); *length: source bytes from
 * there. */
static uint32_t unicode_escape(const char *at, size_t *length) {
    uint32_t code = hex4(at + 1);
    *length = 5;
    if (code >= 0xD800 && code < 0xDC00) {
        code = 0x10000 + ((code - 0xD800) << 10) + (hex4(at + 7) - 0xDC00);
        *length = 11;
    }
    return code;
}

static size_t utf8_put(uint32_t code, char out[4]) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xE0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3F));
        out[2] = (char)(0x80 | (code & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3F));
    out[2] = (char)(0x80 | (code >> 6 & 0x3F));
    out[3] = (char)(0x80 | (code & 0x3F));
    return 4;
}

static char simple_escape(char letter) {
    switch (letter) {
    case 'b':
        return '\b';
    case 'f':
        return '\f';
    case 'n':
        return '\n';
    case 'r':
        return '\r';
    case 't':
        return '\t';
    default:
        return letter;
    }
}

/* Decodes into out, or only counts when out is NULL. */
static size_t decode_string(const char *at, char *out) {
    size_t count = 0;
    at++;
    while (*at != '"') {
        size_t run = strcspn(at, "\"\\");
        if (run > 0) {
            if (out) memcpy(out + count, at, run);
            count += run;
            at += run;
            continue;
        }
        at++; /* the backslash */
        char bytes[4];
        size_t width = 1, length = 1;
        if (*at == 'u')
            width = utf8_put(unicode_escape(at, &length), bytes);
        else
            bytes[0] = simple_escape(*at);
        if (out) memcpy(out + count, bytes, width);
        count += width;
        at += length;
    }
    return count;
}

size_t bd_view_string_bytes(bd_view value) {
    return decode_string(value.at, NULL);
}

void bd_view_string_copy(bd_view value, char *out) {
    (void)decode_string(value.at, out);
}

bd_view_iter bd_view_begin(bd_view array_or_object) {
    return (bd_view_iter){skip_space(array_or_object.at + 1)};
}

bool bd_view_next_item(bd_view_iter *iter, bd_view *item) {
    if (*iter->at == ']') return false;
    item->at = iter->at;
    const char *at = skip_space(skip_value(iter->at));
    iter->at = *at == ',' ? skip_space(at + 1) : at;
    return true;
}

bool bd_view_next_member(bd_view_iter *iter, bd_view *key, bd_view *value) {
    if (*iter->at == '}') return false;
    key->at = iter->at;
    const char *at = skip_space(skip_string(iter->at));
    value->at = skip_space(at + 1); /* after the colon */
    at = skip_space(skip_value(value->at));
    iter->at = *at == ',' ? skip_space(at + 1) : at;
    return true;
}

size_t bd_view_count(bd_view array) {
    size_t count = 0;
    bd_view item;
    for (bd_view_iter iter = bd_view_begin(array); bd_view_next_item(&iter, &item);)
        count++;
    return count;
}
