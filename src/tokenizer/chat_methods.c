/* chat_methods.c - methods of strings, mappings and lists that templates call. Threads: any, a run
 * is one thread's. */
#include <utf8proc.h>

#include "chat_internal.h"

typedef bool (*method_fn)(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                          bd_chat_value *out);

static bool need_text(bd_chat_run *run, const bd_chat_value *value, const char *what) {
    if (value->kind == BD_CHAT_STRING) return true;
    return bd_chat_fail(run, BD_E_FORMAT, "%s needs a string, got %s", what,
                        bd_chat_type_name(value));
}

/* An argument that may be none or absent. */
static const bd_chat_value *optional(const bd_chat_value *value) {
    return bd_chat_given(value) && value->kind != BD_CHAT_NONE ? value : NULL;
}

static bool optional_int(bd_chat_run *run, const bd_chat_value *value, int64_t fallback,
                         int64_t *out) {
    *out = value->kind == BD_CHAT_INT    ? value->integer
           : value->kind == BD_CHAT_BOOL ? value->boolean
                                         : fallback;
    if (value->kind == BD_CHAT_INT || value->kind == BD_CHAT_BOOL || !bd_chat_given(value))
        return true;
    return bd_chat_fail(run, BD_E_FORMAT, "an integer is needed, got %s", bd_chat_type_name(value));
}

/* ---- Strings ---- */

static bool strip(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args, bool left,
                  bool right, bd_chat_value *out) {
    const bd_chat_value *chars = optional(&args[0]);
    if (chars && !need_text(run, chars, "strip")) return false;
    *out = bd_chat_strip(*self, chars, left, right);
    return bd_chat_spend(run, chars ? (self->bytes - out->bytes) * (chars->bytes / 8 + 1) : 0);
}

static bool m_strip(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    return strip(run, self, args, true, true, out);
}

static bool m_lstrip(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                     bd_chat_value *out) {
    return strip(run, self, args, true, false, out);
}

static bool m_rstrip(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                     bd_chat_value *out) {
    return strip(run, self, args, false, true, out);
}

/* Words between runs of white space; after `most` of them the rest is one piece. */
static bool split_space(bd_chat_run *run, const bd_chat_value *self, int64_t most,
                        bd_chat_value *out) {
    bd_chat_value rest = bd_chat_strip(*self, NULL, true, false);
    while (rest.bytes > 0) {
        size_t end = 0, length;
        while (end < rest.bytes &&
               !bd_chat_is_space(bd_chat_code_at(rest.text + end, rest.bytes - end, &length)))
            end += length;
        if (most-- == 0) end = rest.bytes;
        bd_chat_value word = bd_chat_text(rest.text, end);
        if (!bd_chat_list_add(run, out, &word)) return false;
        rest = bd_chat_strip(bd_chat_text(rest.text + end, rest.bytes - end), NULL, true, false);
    }
    return true;
}

static bool m_split(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    const bd_chat_value *by = optional(&args[0]);
    int64_t most;
    if (by && !need_text(run, by, "split")) return false;
    if (by && by->bytes == 0) return bd_chat_fail(run, BD_E_FORMAT, "split by an empty string");
    if (!optional_int(run, &args[1], -1, &most) ||
        !bd_chat_spend(run, self->bytes / BD_CHAT_BYTES_PER_STEP) ||
        !bd_chat_list_new(run, BD_CHAT_PLAIN, 4, out))
        return false;
    if (!by) return split_space(run, self, most, out);
    const char *at = self->text, *end = at + self->bytes, *found;
    while (most-- != 0 && (found = bd_chat_search(at, (size_t)(end - at), by->text, by->bytes))) {
        bd_chat_value piece = bd_chat_text(at, (size_t)(found - at));
        if (!bd_chat_list_add(run, out, &piece)) return false;
        at = found + by->bytes;
    }
    bd_chat_value rest = bd_chat_text(at, (size_t)(end - at));
    return bd_chat_list_add(run, out, &rest);
}

/* Lines end at what Python's splitlines takes for a line end. */
static size_t line_end(const char *at, size_t bytes) {
    size_t length;
    uint32_t code = bd_chat_code_at(at, bytes, &length);
    if (code == '\r' && bytes > 1 && at[1] == '\n') return 2;
    bool ends = (code >= 10 && code <= 13) || (code >= 0x1c && code <= 0x1e) || code == 0x85 ||
                code == 0x2028 || code == 0x2029;
    return ends ? length : 0;
}

static bool m_splitlines(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                         bd_chat_value *out) {
    bool keep = bd_chat_truth(&args[0]);
    size_t from = 0;
    if (!bd_chat_spend(run, self->bytes / 16) || !bd_chat_list_new(run, BD_CHAT_PLAIN, 4, out))
        return false;
    for (size_t i = 0, length; i < self->bytes; i += length) {
        size_t ends = line_end(self->text + i, self->bytes - i);
        (void)bd_chat_code_at(self->text + i, self->bytes - i, &length);
        bool last = i + length >= self->bytes;
        if (ends > 0) length = ends;
        if (ends == 0 && !last) continue;
        size_t to = ends == 0 || keep ? i + length : i;
        bd_chat_value line = bd_chat_text(self->text + from, to - from);
        if (!bd_chat_list_add(run, out, &line)) return false;
        from = i + length;
    }
    return true;
}

static bool has_affix(const bd_chat_value *self, const bd_chat_value *affix, bool end) {
    if (affix->bytes > self->bytes) return false;
    const char *at = end ? self->text + self->bytes - affix->bytes : self->text;
    return memcmp(at, affix->text, affix->bytes) == 0;
}

/* The argument is a string or a tuple of them, of which none is looked at after one that fits. */
static bool affix(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *arg, bool end,
                  bd_chat_value *out) {
    bool tuple = arg->kind == BD_CHAT_LIST && arg->flavour == BD_CHAT_TUPLE;
    size_t count = tuple ? arg->list->count : 1;
    const bd_chat_value *items = tuple ? arg->list->items : arg;
    bool found = false;
    for (size_t i = 0; i < count && !found; i++) {
        if (!need_text(run, &items[i], end ? "endswith" : "startswith")) return false;
        found = has_affix(self, &items[i], end);
    }
    *out = bd_chat_bool(found);
    return true;
}

static bool m_startswith(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                         bd_chat_value *out) {
    return affix(run, self, &args[0], false, out);
}

static bool m_endswith(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                       bd_chat_value *out) {
    return affix(run, self, &args[0], true, out);
}

static bool m_removeprefix(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                           bd_chat_value *out) {
    if (!need_text(run, &args[0], "removeprefix")) return false;
    size_t cut = has_affix(self, &args[0], false) ? args[0].bytes : 0;
    *out = bd_chat_text(self->text + cut, self->bytes - cut);
    return true;
}

static bool m_removesuffix(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                           bd_chat_value *out) {
    if (!need_text(run, &args[0], "removesuffix")) return false;
    size_t cut = has_affix(self, &args[0], true) ? args[0].bytes : 0;
    *out = bd_chat_text(self->text, self->bytes - cut);
    return true;
}

static bool m_upper(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    return bd_chat_change_case(run, self, BD_CHAT_UPPER, out);
}

static bool m_lower(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    return bd_chat_change_case(run, self, BD_CHAT_LOWER, out);
}

static bool m_title(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    return bd_chat_change_case(run, self, BD_CHAT_TITLE, out);
}

static bool m_capitalize(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                         bd_chat_value *out) {
    (void)args;
    return bd_chat_change_case(run, self, BD_CHAT_CAPITALIZE, out);
}

static bool m_replace(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                      bd_chat_value *out) {
    int64_t count;
    return need_text(run, &args[0], "replace") && need_text(run, &args[1], "replace") &&
           optional_int(run, &args[2], -1, &count) &&
           bd_chat_replace(run, self, &args[0], &args[1], count, out);
}

/* Position of the first or last occurrence in characters; -1: none. */
static bool find(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *what, bool last,
                 bd_chat_value *out) {
    if (!need_text(run, what, "find") ||
        !bd_chat_spend(run, self->bytes / BD_CHAT_BYTES_PER_STEP + 1))
        return false;
    const char *at = bd_chat_search(self->text, self->bytes, what->text, what->bytes), *next = at;
    if (last && what->bytes == 0) at = self->text + self->bytes;
    while (last && what->bytes > 0 && next) {
        at = next;
        size_t left = self->bytes - (size_t)(at + 1 - self->text);
        next = bd_chat_search(at + 1, left, what->text, what->bytes);
    }
    *out =
        bd_chat_int(at ? (int64_t)bd_chat_code_count(self->text, (size_t)(at - self->text)) : -1);
    return true;
}

static bool m_find(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                   bd_chat_value *out) {
    return find(run, self, &args[0], false, out);
}

static bool m_rfind(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    return find(run, self, &args[0], true, out);
}

static bool m_count(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    int64_t count = 0;
    if (!need_text(run, &args[0], "count") ||
        !bd_chat_spend(run, self->bytes / BD_CHAT_BYTES_PER_STEP))
        return false;
    const char *at = self->text, *end = at + self->bytes;
    if (args[0].bytes == 0) count = (int64_t)bd_chat_code_count(at, self->bytes) + 1;
    while (args[0].bytes > 0 &&
           (at = bd_chat_search(at, (size_t)(end - at), args[0].text, args[0].bytes))) {
        at += args[0].bytes;
        count++;
    }
    *out = bd_chat_int(count);
    return true;
}

static bool m_join(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                   bd_chat_value *out) {
    bd_chat_list items;
    bd_strbuf buf;
    if (!bd_chat_elements(run, &args[0], &items)) return false;
    for (size_t i = 0; i < items.count; i++)
        if (!need_text(run, &items.items[i], "join")) return false;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    for (size_t i = 0; i < items.count; i++) {
        if (i > 0) bd_strbuf_append(&buf, self->text, self->bytes);
        bd_strbuf_append(&buf, items.items[i].text, items.items[i].bytes);
    }
    return bd_chat_take(run, &buf, out);
}

static bool all_of(const bd_chat_value *self, bool (*is)(uint32_t)) {
    size_t length;
    for (size_t i = 0; i < self->bytes; i += length)
        if (!is(bd_chat_code_at(self->text + i, self->bytes - i, &length))) return false;
    return self->bytes > 0;
}

static bool is_decimal(uint32_t code) {
    return utf8proc_category((utf8proc_int32_t)code) == UTF8PROC_CATEGORY_ND;
}

static bool m_isspace(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                      bd_chat_value *out) {
    (void)args;
    *out = bd_chat_bool(all_of(self, bd_chat_is_space));
    return bd_chat_spend(run, self->bytes / 16);
}

static bool m_isdecimal(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                        bd_chat_value *out) {
    (void)args;
    *out = bd_chat_bool(all_of(self, is_decimal));
    return bd_chat_spend(run, self->bytes / 16);
}

/* ---- Mappings ---- */

static bool m_items(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    return bd_chat_pairs(run, self->dict, BD_CHAT_VIEW, out);
}

static bool copy_list(bd_chat_run *run, const bd_chat_value *from, size_t count,
                      bd_chat_value *out) {
    if (!bd_chat_list_new(run, BD_CHAT_VIEW, count, out)) return false;
    for (size_t i = 0; i < count; i++)
        if (!bd_chat_list_add(run, out, &from[i])) return false;
    return true;
}

static bool m_keys(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                   bd_chat_value *out) {
    (void)args;
    return copy_list(run, self->dict->keys, self->dict->count, out);
}

static bool m_values(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                     bd_chat_value *out) {
    (void)args;
    return copy_list(run, self->dict->values, self->dict->count, out);
}

static bool m_get(bd_chat_run *run, const bd_chat_value *self, const bd_chat_value *args,
                  bd_chat_value *out) {
    const bd_chat_value *found;
    if (!bd_chat_hashable(&args[0]))
        return bd_chat_fail(run, BD_E_FORMAT, "%s cannot be a key", bd_chat_type_name(&args[0]));
    if (!bd_chat_dict_find(run, self->dict, &args[0], &found)) return false;
    *out = found ? *found : bd_chat_given(&args[1]) ? args[1] : bd_chat_none();
    return true;
}

/* ---- The table ---- */

static const struct {
    const char *name;
    bd_chat_kind kind;
    uint8_t needed, most; /* arguments */
    const char *const parameters[3];
    method_fn call;
} methods[] = {
    {"strip", BD_CHAT_STRING, 0, 1, {"chars"}, m_strip},
    {"lstrip", BD_CHAT_STRING, 0, 1, {"chars"}, m_lstrip},
    {"rstrip", BD_CHAT_STRING, 0, 1, {"chars"}, m_rstrip},
    {"split", BD_CHAT_STRING, 0, 2, {"sep", "maxsplit"}, m_split},
    {"splitlines", BD_CHAT_STRING, 0, 1, {"keepends"}, m_splitlines},
    {"startswith", BD_CHAT_STRING, 1, 1, {"prefix"}, m_startswith},
    {"endswith", BD_CHAT_STRING, 1, 1, {"suffix"}, m_endswith},
    {"removeprefix", BD_CHAT_STRING, 1, 1, {"prefix"}, m_removeprefix},
    {"removesuffix", BD_CHAT_STRING, 1, 1, {"suffix"}, m_removesuffix},
    {"upper", BD_CHAT_STRING, 0, 0, {NULL}, m_upper},
    {"lower", BD_CHAT_STRING, 0, 0, {NULL}, m_lower},
    {"title", BD_CHAT_STRING, 0, 0, {NULL}, m_title},
    {"capitalize", BD_CHAT_STRING, 0, 0, {NULL}, m_capitalize},
    {"replace", BD_CHAT_STRING, 2, 3, {"old", "new", "count"}, m_replace},
    {"find", BD_CHAT_STRING, 1, 1, {"sub"}, m_find},
    {"rfind", BD_CHAT_STRING, 1, 1, {"sub"}, m_rfind},
    {"count", BD_CHAT_STRING, 1, 1, {"sub"}, m_count},
    {"join", BD_CHAT_STRING, 1, 1, {"iterable"}, m_join},
    {"isspace", BD_CHAT_STRING, 0, 0, {NULL}, m_isspace},
    {"isdecimal", BD_CHAT_STRING, 0, 0, {NULL}, m_isdecimal},
    {"items", BD_CHAT_DICT, 0, 0, {NULL}, m_items},
    {"keys", BD_CHAT_DICT, 0, 0, {NULL}, m_keys},
    {"values", BD_CHAT_DICT, 0, 0, {NULL}, m_values},
    {"get", BD_CHAT_DICT, 1, 2, {"key", "default"}, m_get},
};
enum { METHOD_COUNT = sizeof methods / sizeof methods[0] };

int bd_chat_method_id(const char *name, size_t bytes) {
    for (int i = 0; i < METHOD_COUNT; i++)
        if (strlen(methods[i].name) == bytes && memcmp(methods[i].name, name, bytes) == 0) return i;
    return -1;
}

bool bd_chat_has_method(const bd_chat_value *object, const char *name, size_t bytes, int *id) {
    *id = bd_chat_method_id(name, bytes);
    return *id >= 0 && methods[*id].kind == (bd_chat_kind)object->kind;
}

bool bd_chat_call_method(bd_chat_run *run, const bd_chat_method *method, const bd_chat_args *args,
                         bd_chat_value *out) {
    bd_chat_value bound[3];
    const char *name = methods[method->id].name;
    if (!bd_chat_bind(run, name, methods[method->id].parameters, methods[method->id].most, args,
                      bound))
        return false;
    if (args->count < methods[method->id].needed)
        return bd_chat_fail(run, BD_E_FORMAT, "%s needs more arguments", name);
    for (size_t i = methods[method->id].most; i < 3; i++)
        bound[i] = bd_chat_undefined(NULL, 0);
    return methods[method->id].call(run, &method->object, bound, out);
}
