/* chat_json.c - JSON that was checked before, as values. Strings without escapes are borrowed from
 * the text. Threads: any, a run is one thread's. */
#include <stdlib.h>

#include "chat_internal.h"

static void skip_space(const char **at) {
    while (**at == ' ' || **at == '\n' || **at == '\r' || **at == '\t')
        (*at)++;
}

static uint32_t read_hex4(const char *at) {
    char digits[5] = {at[0], at[1], at[2], at[3], '\0'};
    return (uint32_t)strtoul(digits, NULL, 16);
}

/* *at is behind the backslash. */
static size_t unescape(const char **at, char *out) {
    static const char letters[] = "bfnrt", values[] = "\b\f\n\r\t";
    char c = *(*at)++;
    if (c != 'u') {
        const char *letter = strchr(letters, c);
        *out = letter ? values[letter - letters] : c;
        return 1;
    }
    uint32_t code = read_hex4(*at);
    *at += 4;
    if (code >= 0xD800 && code < 0xDC00) {
        code = 0x10000 + ((code - 0xD800) << 10) + (read_hex4(*at + 2) - 0xDC00);
        *at += 6;
    }
    char bytes[4];
    size_t count = bd_chat_put_code(code, bytes);
    memcpy(out, bytes, count);
    return count;
}

static bool read_string(bd_chat_run *run, const char **at, bd_chat_value *out) {
    const char *from = *at + 1, *end = from;
    bool escaped = false;
    for (; *end != '"'; end += *end == '\\' ? 2 : 1)
        escaped = escaped || *end == '\\';
    *at = end + 1;
    *out = bd_chat_text(from, (size_t)(end - from));
    if (!bd_chat_spend(run, out->bytes / BD_CHAT_BYTES_PER_STEP)) return false;
    if (!escaped) return true;
    char *copy = bd_chat_alloc(run, out->bytes, 1);
    if (!copy) return false;
    size_t count = 0;
    while (from < end) {
        if (*from != '\\') {
            copy[count++] = *from++;
            continue;
        }
        from++;
        count += unescape(&from, copy + count);
    }
    *out = bd_chat_text(copy, count);
    return true;
}

static bool read_number(bd_chat_run *run, const char **at, bd_chat_value *out) {
    const char *from = *at, *end = from + strspn(from, "+-0123456789.eE");
    *at = end;
    for (const char *c = from; c < end; c++) {
        if (*c != '.' && *c != 'e' && *c != 'E') continue;
        *out = bd_chat_float(strtod(from, NULL));
        return true;
    }
    bool negative = *from == '-';
    int64_t value = 0;
    for (from += negative; from < end; from++)
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_sub_overflow(value, *from - '0', &value))
            return bd_chat_fail(run, BD_E_LIMIT, "an integer has more than 64 bits");
    if (!negative && value == INT64_MIN)
        return bd_chat_fail(run, BD_E_LIMIT, "an integer has more than 64 bits");
    *out = bd_chat_int(negative ? value : -value);
    return true;
}

static bool read_members(bd_chat_run *run, const char **at, bool dict, bd_chat_value *out) {
    char close = dict ? '}' : ']';
    if (dict ? !bd_chat_dict_new(run, out) : !bd_chat_list_new(run, BD_CHAT_PLAIN, 0, out))
        return false;
    (*at)++;
    for (skip_space(at); **at != close; skip_space(at)) {
        bd_chat_value key, value;
        if (**at == ',') {
            (*at)++;
            skip_space(at);
        }
        if (dict) {
            if (!read_string(run, at, &key)) return false;
            skip_space(at);
            (*at)++; /* the colon */
            skip_space(at);
        }
        if (!bd_chat_read_json(run, at, &value)) return false;
        if (dict ? !bd_chat_dict_put(run, out->dict, &key, &value)
                 : !bd_chat_list_add(run, out, &value))
            return false;
    }
    (*at)++;
    return true;
}

bool bd_chat_read_json(bd_chat_run *run, const char **at, bd_chat_value *out) {
    bool ok;
    if (!bd_chat_spend(run, 1)) return false;
    skip_space(at);
    switch (**at) {
    case '"':
        return read_string(run, at, out);
    case '{':
    case '[':
        if (!bd_chat_enter(run)) return false;
        ok = read_members(run, at, **at == '{', out);
        bd_chat_leave(run);
        return ok;
    case 't':
    case 'f':
        *out = bd_chat_bool(**at == 't');
        *at += out->boolean ? 4 : 5;
        return true;
    case 'n':
        *out = bd_chat_none();
        *at += 4;
        return true;
    default:
        return read_number(run, at, out);
    }
}
