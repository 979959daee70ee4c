/* chat_text.c - what Python's str does, on UTF-8 that is known to be valid. Threads: any. */
#include <utf8proc.h>

#include "chat_internal.h"

bool bd_chat_is_space(uint32_t code) {
    if (code < 0x80)
        return code == ' ' || (code >= 9 && code <= 13) || (code >= 0x1c && code <= 0x1f);
    return code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) ||
           code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

uint32_t bd_chat_code_at(const char *text, size_t bytes, size_t *length) {
    const unsigned char *p = (const unsigned char *)text;
    *length = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (*length == 1 || *length > bytes) {
        *length = 1;
        return p[0];
    }
    uint32_t code = p[0] & (0xffu >> (*length + 1));
    for (size_t i = 1; i < *length; i++)
        code = code << 6 | (p[i] & 0x3fu);
    return code;
}

size_t bd_chat_put_code(uint32_t code, char out[4]) {
    return (size_t)utf8proc_encode_char((utf8proc_int32_t)code, (utf8proc_uint8_t *)out);
}

size_t bd_chat_code_count(const char *text, size_t bytes) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += ((unsigned char)text[i] & 0xC0u) != 0x80u;
    return count;
}

const char *bd_chat_search(const char *text, size_t bytes, const char *what, size_t what_bytes) {
    if (what_bytes == 0) return text;
    return memmem(text, bytes, what, what_bytes);
}

static bool is_listed(const char *at, size_t length, const bd_chat_value *chars) {
    if (!chars) {
        size_t unused;
        return bd_chat_is_space(bd_chat_code_at(at, length, &unused));
    }
    return bd_chat_search(chars->text, chars->bytes, at, length) != NULL;
}

bd_chat_value bd_chat_strip(bd_chat_value text, const bd_chat_value *chars, bool left, bool right) {
    const char *from = text.text, *to = from + text.bytes;
    size_t length;
    while (left && from < to) {
        (void)bd_chat_code_at(from, (size_t)(to - from), &length);
        if (!is_listed(from, length, chars)) break;
        from += length;
    }
    while (right && from < to) {
        const char *last = to - 1;
        while (last > from && ((unsigned char)*last & 0xC0u) == 0x80u)
            last--;
        if (!is_listed(last, (size_t)(to - last), chars)) break;
        to = last;
    }
    return bd_chat_text(from, (size_t)(to - from));
}

static bool is_cased(uint32_t code) {
    return utf8proc_isupper((utf8proc_int32_t)code) || utf8proc_islower((utf8proc_int32_t)code) ||
           utf8proc_category((utf8proc_int32_t)code) == UTF8PROC_CATEGORY_LT;
}

/* What stands before a word for the filter title: -, white space, ( { [ <. */
static bool breaks_word(uint32_t code) {
    return bd_chat_is_space(code) || (code < 0x80 && code != 0 && strchr("-({[<", (int)code));
}

bool bd_chat_change_case(bd_chat_run *run, const bd_chat_value *text, bd_chat_case to,
                         bd_chat_value *out) {
    bd_strbuf buf;
    bool first = true; /* the next character begins a word */
    size_t length;
    if (!bd_chat_spend(run, text->bytes / 8)) return false;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    for (size_t i = 0; i < text->bytes; i += length) {
        uint32_t code = bd_chat_code_at(text->text + i, text->bytes - i, &length);
        utf8proc_int32_t c = (utf8proc_int32_t)code;
        bool upper = to == BD_CHAT_UPPER || (to == BD_CHAT_TITLE_WORDS && first);
        bool title = (to == BD_CHAT_TITLE || to == BD_CHAT_CAPITALIZE) && first;
        c = upper ? utf8proc_toupper(c) : title ? utf8proc_totitle(c) : utf8proc_tolower(c);
        first =
            to == BD_CHAT_TITLE ? !is_cased(code) : to == BD_CHAT_TITLE_WORDS && breaks_word(code);
        char bytes[4];
        bd_strbuf_append(&buf, bytes, bd_chat_put_code((uint32_t)c, bytes));
    }
    return bd_chat_take(run, &buf, out);
}

/* With an empty `from`, Python puts `to` before every character and at the end. */
bool bd_chat_replace(bd_chat_run *run, const bd_chat_value *text, const bd_chat_value *from,
                     const bd_chat_value *to, int64_t count, bd_chat_value *out) {
    bd_strbuf buf;
    const char *at = text->text, *end = at + text->bytes;
    if (!bd_chat_spend(run, text->bytes / BD_CHAT_BYTES_PER_STEP)) return false;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    for (; count != 0; count -= count > 0) {
        const char *found = bd_chat_search(at, (size_t)(end - at), from->text, from->bytes);
        if (!found) break;
        bd_strbuf_append(&buf, at, (size_t)(found - at));
        bd_strbuf_append(&buf, to->text, to->bytes);
        at = found + from->bytes;
        if (from->bytes > 0) continue;
        if (at == end) break;
        size_t length;
        (void)bd_chat_code_at(at, (size_t)(end - at), &length);
        bd_strbuf_append(&buf, at, length);
        at += length;
    }
    bd_strbuf_append(&buf, at, (size_t)(end - at));
    return bd_chat_take(run, &buf, out);
}

/* `count` characters from the from-th on, every step-th, backwards for a negative step. */
bool bd_chat_slice_text(bd_chat_run *run, const bd_chat_value *text, int64_t from, int64_t step,
                        size_t count, bd_chat_value *out) {
    if (!bd_chat_spend(run, text->bytes / 8)) return false;
    size_t total = bd_chat_code_count(text->text, text->bytes);
    size_t *starts = bd_chat_alloc(run, total + 1, sizeof *starts);
    char *copy = bd_chat_alloc(run, text->bytes, 1);
    if (!starts || !copy) return false;
    size_t index = 0, bytes = 0;
    for (size_t i = 0; i < text->bytes; i++)
        if (((unsigned char)text->text[i] & 0xC0u) != 0x80u) starts[index++] = i;
    starts[total] = text->bytes;
    for (size_t i = 0; i < count; i++) {
        size_t at = (size_t)(from + (int64_t)i * step);
        memcpy(copy + bytes, text->text + starts[at], starts[at + 1] - starts[at]);
        bytes += starts[at + 1] - starts[at];
    }
    *out = bd_chat_text(copy, bytes);
    return true;
}
