/* chat_filters.c - filters that templates use. Threads: any, a run is one thread's. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "chat_internal.h"

typedef bool (*filter_fn)(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                          bd_chat_value *out);

enum { PARAMETERS_MAX = 4 };

static bool is_int(const bd_chat_value *value) {
    return value->kind == BD_CHAT_INT || value->kind == BD_CHAT_BOOL;
}

static int64_t int_of(const bd_chat_value *value) {
    return value->kind == BD_CHAT_BOOL ? value->boolean : value->integer;
}

static bool f_trim(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                   bd_chat_value *out) {
    const bd_chat_value *chars =
        bd_chat_given(&args[0]) && args[0].kind != BD_CHAT_NONE ? args : NULL;
    if (chars && chars->kind != BD_CHAT_STRING)
        return bd_chat_fail(run, BD_E_FORMAT, "trim needs a string of characters");
    if (!bd_chat_to_text(run, value, out)) return false;
    size_t before = out->bytes;
    *out = bd_chat_strip(*out, chars, true, true);
    return bd_chat_spend(run, chars ? (before - out->bytes) * (chars->bytes / 8 + 1) : 0);
}

static bool f_length(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                     bd_chat_value *out) {
    int64_t length;
    (void)args;
    if (!bd_chat_length(run, value, &length)) return false;
    *out = bd_chat_int(length);
    return true;
}

static bool change_case(bd_chat_run *run, const bd_chat_value *value, bd_chat_case to,
                        bd_chat_value *out) {
    bd_chat_value text;
    return bd_chat_to_text(run, value, &text) && bd_chat_change_case(run, &text, to, out);
}

static bool f_upper(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    return change_case(run, value, BD_CHAT_UPPER, out);
}

static bool f_lower(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    return change_case(run, value, BD_CHAT_LOWER, out);
}

static bool f_title(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    return change_case(run, value, BD_CHAT_TITLE_WORDS, out);
}

static bool f_capitalize(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                         bd_chat_value *out) {
    (void)args;
    return change_case(run, value, BD_CHAT_CAPITALIZE, out);
}

static bool f_string(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                     bd_chat_value *out) {
    (void)args;
    return bd_chat_to_text(run, value, out);
}

static bool f_list(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                   bd_chat_value *out) {
    bd_chat_list items;
    (void)args;
    if (!bd_chat_elements(run, value, &items) ||
        !bd_chat_list_new(run, BD_CHAT_PLAIN, items.count, out))
        return false;
    for (size_t i = 0; i < items.count; i++)
        if (!bd_chat_list_add(run, out, &items.items[i])) return false;
    return true;
}

static bool f_default(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                      bd_chat_value *out) {
    (void)run;
    bool replaced =
        value->kind == BD_CHAT_UNDEFINED || (bd_chat_truth(&args[1]) && !bd_chat_truth(value));
    *out = !replaced ? *value : bd_chat_given(&args[0]) ? args[0] : bd_chat_text("", 0);
    return true;
}

static bool f_first(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                    bd_chat_value *out) {
    bd_chat_list items;
    (void)args;
    if (!bd_chat_elements(run, value, &items)) return false;
    *out = items.count > 0 ? items.items[0] : bd_chat_undefined("first of nothing", 16);
    return true;
}

static bool f_last(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                   bd_chat_value *out) {
    bd_chat_list items;
    (void)args;
    if (value->kind == BD_CHAT_LIST && value->flavour == BD_CHAT_GENERATOR)
        return bd_chat_fail(run, BD_E_FORMAT, "last of what was not made a list");
    if (!bd_chat_elements(run, value, &items)) return false;
    *out =
        items.count > 0 ? items.items[items.count - 1] : bd_chat_undefined("last of nothing", 15);
    return true;
}

static bool f_reverse(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                      bd_chat_value *out) {
    bd_chat_list items;
    (void)args;
    if (value->kind == BD_CHAT_STRING) {
        size_t count = bd_chat_code_count(value->text, value->bytes);
        return bd_chat_slice_text(run, value, (int64_t)count - 1, -1, count, out);
    }
    if (!bd_chat_elements(run, value, &items) ||
        !bd_chat_list_new(run, BD_CHAT_GENERATOR, items.count, out))
        return false;
    for (size_t i = items.count; i-- > 0;)
        if (!bd_chat_list_add(run, out, &items.items[i])) return false;
    return true;
}

static bool f_items(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                    bd_chat_value *out) {
    (void)args;
    if (value->kind == BD_CHAT_UNDEFINED) return bd_chat_list_new(run, BD_CHAT_GENERATOR, 0, out);
    if (value->kind == BD_CHAT_DICT) return bd_chat_pairs(run, value->dict, BD_CHAT_GENERATOR, out);
    return bd_chat_fail(run, BD_E_FORMAT, "items needs a mapping, got %s",
                        bd_chat_type_name(value));
}

static bool f_replace(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                      bd_chat_value *out) {
    bd_chat_value text, from, to;
    int64_t count = is_int(&args[2]) ? int_of(&args[2]) : -1;
    if (!bd_chat_given(&args[0]) || !bd_chat_given(&args[1]))
        return bd_chat_fail(run, BD_E_FORMAT, "replace needs two arguments");
    return bd_chat_to_text(run, value, &text) && bd_chat_to_text(run, &args[0], &from) &&
           bd_chat_to_text(run, &args[1], &to) &&
           bd_chat_replace(run, &text, &from, &to, count, out);
}

/* A number as Python's int() and float() read it from text: white space around it is fine. */
static bool parse_number(const bd_chat_value *text, bool whole, bd_chat_value *out) {
    char digits[64];
    bd_chat_value core = bd_chat_strip(*text, NULL, true, true);
    if (core.bytes == 0 || core.bytes >= sizeof digits) return false;
    memcpy(digits, core.text, core.bytes);
    digits[core.bytes] = '\0';
    const char *allowed = whole ? "+-0123456789" : "+-0123456789.eE";
    if (strspn(digits, allowed) != core.bytes) return false;
    char *end;
    errno = 0;
    *out = whole ? bd_chat_int(strtoll(digits, &end, 10)) : bd_chat_float(strtod(digits, &end));
    return *end == '\0' && end != digits && !(whole && errno == ERANGE);
}

static bool f_int(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                  bd_chat_value *out) {
    bd_chat_value number = *value;
    if (bd_chat_given(&args[1]))
        return bd_chat_fail(run, BD_E_UNSUPPORTED, "int with a base is not supported");
    if (value->kind == BD_CHAT_UNDEFINED) return bd_chat_fail(run, BD_E_FORMAT, "int of undefined");
    if (is_int(value)) {
        *out = bd_chat_int(int_of(value));
        return true;
    }
    if (value->kind == BD_CHAT_STRING && parse_number(value, true, out)) return true;
    bool found = value->kind == BD_CHAT_FLOAT ||
                 (value->kind == BD_CHAT_STRING && parse_number(value, false, &number));
    if (found && isfinite(number.number) && fabs(number.number) >= 0x1p63)
        return bd_chat_fail(run, BD_E_LIMIT, "an integer has more than 64 bits");
    if (found && isfinite(number.number))
        *out = bd_chat_int((int64_t)number.number);
    else
        *out = bd_chat_given(&args[0]) ? args[0] : bd_chat_int(0);
    return true;
}

static bool f_float(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                    bd_chat_value *out) {
    if (value->kind == BD_CHAT_UNDEFINED)
        return bd_chat_fail(run, BD_E_FORMAT, "float of undefined");
    if (is_int(value))
        *out = bd_chat_float((double)int_of(value));
    else if (value->kind == BD_CHAT_FLOAT)
        *out = *value;
    else if (value->kind != BD_CHAT_STRING || !parse_number(value, false, out))
        *out = bd_chat_given(&args[0]) ? args[0] : bd_chat_float(0);
    return true;
}

static bool f_abs(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                  bd_chat_value *out) {
    (void)args;
    *out = *value;
    if (value->kind == BD_CHAT_FLOAT) {
        out->number = fabs(value->number);
        return true;
    }
    if (!is_int(value) || int_of(value) == INT64_MIN)
        return bd_chat_fail(run, BD_E_FORMAT, "abs of %s", bd_chat_type_name(value));
    *out = bd_chat_int(int_of(value) < 0 ? -int_of(value) : int_of(value));
    return true;
}

/* Every line but the first, empty ones only if asked, gets spaces in front. */
static bool f_indent(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                     bd_chat_value *out) {
    int64_t width = bd_chat_given(&args[0]) ? -1 : 4;
    if (is_int(&args[0])) width = int_of(&args[0]);
    if (value->kind != BD_CHAT_STRING || width < 0 || width > 1000)
        return bd_chat_fail(run, BD_E_UNSUPPORTED,
                            "indent of %s, or by more than 1000, is not "
                            "supported",
                            bd_chat_type_name(value));
    bool first = bd_chat_truth(&args[1]), blank = bd_chat_truth(&args[2]);
    bd_strbuf buf;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    const char *at = value->text, *end = at + value->bytes;
    for (bool begins = true;; begins = false) {
        const char *line = memchr(at, '\n', (size_t)(end - at));
        size_t bytes = (size_t)((line ? line : end) - at);
        bool spaces = begins ? first : blank || bytes > 0;
        for (int64_t i = 0; spaces && i < width; i++)
            bd_strbuf_append(&buf, " ", 1);
        bd_strbuf_append(&buf, at, bytes);
        if (!line) break;
        bd_strbuf_append(&buf, "\n", 1);
        at = line + 1;
    }
    return bd_chat_spend(run, buf.len_bytes / 16) ? bd_chat_take(run, &buf, out)
                                                  : (bd_strbuf_deinit(&buf), false);
}

static bool f_tojson(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                     bd_chat_value *out) {
    bd_chat_json_style style = {.ascii = bd_chat_truth(&args[0]),
                                .pretty = is_int(&args[1]),
                                .sort_keys = bd_chat_truth(&args[3])};
    if (style.pretty) style.indent = int_of(&args[1]) > 0 ? int_of(&args[1]) : 0;
    if (style.indent > 64 || args[1].kind == BD_CHAT_STRING)
        return bd_chat_fail(run, BD_E_UNSUPPORTED, "this indent of tojson is not supported");
    const bd_chat_value *two = &args[2];
    if (two->kind == BD_CHAT_LIST && two->list->count == 2 &&
        two->list->items[0].kind == BD_CHAT_STRING && two->list->items[1].kind == BD_CHAT_STRING) {
        style.item_separator = two->list->items[0];
        style.key_separator = two->list->items[1];
    } else if (bd_chat_given(two) && two->kind != BD_CHAT_NONE) {
        return bd_chat_fail(run, BD_E_FORMAT, "separators of tojson are two strings");
    }
    bd_strbuf buf;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    if (bd_chat_write_json(run, value, &style, &buf)) return bd_chat_take(run, &buf, out);
    bd_strbuf_deinit(&buf);
    return false;
}

/* ---- Filters over elements ---- */

static bool all_digits(const bd_chat_value *text) {
    for (size_t i = 0; i < text->bytes; i++)
        if (text->text[i] < '0' || text->text[i] > '9') return false;
    return text->bytes > 0;
}

/* item.a.b for "a.b"; parts of digits are indices. */
static bool follow_path(bd_chat_run *run, const bd_chat_value *item, const bd_chat_value *path,
                        bd_chat_value *out) {
    *out = *item;
    if (path->kind != BD_CHAT_STRING) return bd_chat_getitem(run, item, path, out);
    const char *at = path->text, *end = at + path->bytes;
    for (bool more = true; more;) {
        const char *dot = memchr(at, '.', (size_t)(end - at));
        bd_chat_value key = bd_chat_text(at, (size_t)((dot ? dot : end) - at)), number;
        if (all_digits(&key) && parse_number(&key, true, &number)) key = number;
        bd_chat_value next;
        if (!bd_chat_getitem(run, out, &key, &next)) return false;
        *out = next;
        more = dot != NULL;
        at = dot ? dot + 1 : end;
    }
    return true;
}

static bool f_join(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *args,
                   bd_chat_value *out) {
    bd_chat_list items;
    bd_chat_value by = bd_chat_text("", 0), item;
    if (!bd_chat_elements(run, value, &items)) return false;
    if (bd_chat_given(&args[0]) && !bd_chat_to_text(run, &args[0], &by)) return false;
    bool path = bd_chat_given(&args[1]) && args[1].kind != BD_CHAT_NONE, ok = true;
    bd_strbuf buf;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    for (size_t i = 0; i < items.count && ok; i++) {
        item = items.items[i];
        if (i > 0) bd_strbuf_append(&buf, by.text, by.bytes);
        if (path) ok = follow_path(run, &items.items[i], &args[1], &item);
        ok = ok && bd_chat_write(run, &item, &buf) && !buf.failed;
    }
    if (run->status == BD_OK) return bd_chat_take(run, &buf, out);
    bd_strbuf_deinit(&buf);
    return false;
}

static bool apply_map(bd_chat_run *run, const bd_chat_value *value, const bd_chat_args *args,
                      bd_chat_value *out) {
    static const char *const parameters[] = {"attribute", "default"};
    bd_chat_value bound[2] = {{0}};
    bd_chat_list items;
    if (!bd_chat_truth(value)) return bd_chat_list_new(run, BD_CHAT_GENERATOR, 0, out);
    bool by_name = args->count > args->keyword_count;
    if (!by_name && !bd_chat_bind(run, "map", parameters, 2, args, bound)) return false;
    if (!by_name && !bd_chat_given(&bound[0]))
        return bd_chat_fail(run, BD_E_FORMAT, "map needs an attribute or a filter");
    int id = by_name && args->items[0].kind == BD_CHAT_STRING
                 ? bd_chat_filter_id(args->items[0].text, args->items[0].bytes)
                 : -1;
    if (by_name && id < 0)
        return bd_chat_fail(run, BD_E_UNSUPPORTED, "the filter given to map is not supported");
    bd_chat_args rest = *args;
    if (by_name) {
        rest.items++;
        rest.count--;
    }
    if (!bd_chat_elements(run, value, &items) ||
        !bd_chat_list_new(run, BD_CHAT_GENERATOR, items.count, out))
        return false;
    for (size_t i = 0; i < items.count; i++) {
        bd_chat_value item;
        bool ok = by_name ? bd_chat_apply_filter(run, (uint32_t)id, &items.items[i], &rest, &item)
                          : follow_path(run, &items.items[i], &bound[0], &item);
        if (!ok) return false;
        if (!by_name && item.kind == BD_CHAT_UNDEFINED && bd_chat_given(&bound[1])) item = bound[1];
        if (!bd_chat_list_add(run, out, &item)) return false;
    }
    return true;
}

/* select, reject and their attr forms. */
static bool apply_select(bd_chat_run *run, const bd_chat_value *value, const bd_chat_args *args,
                         bool by_attr, bool wanted, bd_chat_value *out) {
    bd_chat_list items;
    bd_chat_args rest = *args;
    if (!bd_chat_truth(value)) return bd_chat_list_new(run, BD_CHAT_GENERATOR, 0, out);
    size_t skip = by_attr ? 1 : 0;
    if (args->keyword_count > 0 || args->count < skip)
        return bd_chat_fail(run, BD_E_FORMAT, "select and reject take a test and its argument");
    const bd_chat_value *test = args->count > skip ? &args->items[skip] : NULL;
    int id = test && test->kind == BD_CHAT_STRING ? bd_chat_test_id(test->text, test->bytes) : -1;
    if (test && id < 0)
        return bd_chat_fail(run, BD_E_UNSUPPORTED, "the test given to select is not supported");
    rest.items += skip + (test != NULL);
    rest.count -= skip + (test != NULL);
    if (!bd_chat_elements(run, value, &items) || !bd_chat_list_new(run, BD_CHAT_GENERATOR, 0, out))
        return false;
    for (size_t i = 0; i < items.count; i++) {
        bd_chat_value item = items.items[i];
        if (by_attr && !follow_path(run, &items.items[i], &args->items[0], &item)) return false;
        bool passed = bd_chat_truth(&item);
        if (test && !bd_chat_apply_test(run, (uint32_t)id, &item, &rest, &passed)) return false;
        if (passed == wanted && !bd_chat_list_add(run, out, &items.items[i])) return false;
    }
    return true;
}

/* ---- The table ---- */

enum { FILTER_MAP, FILTER_SELECT, FILTER_REJECT, FILTER_SELECTATTR, FILTER_REJECTATTR };

static const struct {
    const char *name;
    uint8_t most;
    const char *const parameters[PARAMETERS_MAX];
    filter_fn call;
} filters[] = {
    [FILTER_MAP] = {"map", 0, {NULL}, NULL},
    [FILTER_SELECT] = {"select", 0, {NULL}, NULL},
    [FILTER_REJECT] = {"reject", 0, {NULL}, NULL},
    [FILTER_SELECTATTR] = {"selectattr", 0, {NULL}, NULL},
    [FILTER_REJECTATTR] = {"rejectattr", 0, {NULL}, NULL},
    {"trim", 1, {"chars"}, f_trim},
    {"length", 0, {NULL}, f_length},
    {"count", 0, {NULL}, f_length},
    {"upper", 0, {NULL}, f_upper},
    {"lower", 0, {NULL}, f_lower},
    {"title", 0, {NULL}, f_title},
    {"capitalize", 0, {NULL}, f_capitalize},
    {"string", 0, {NULL}, f_string},
    {"list", 0, {NULL}, f_list},
    {"default", 2, {"default_value", "boolean"}, f_default},
    {"d", 2, {"default_value", "boolean"}, f_default},
    {"first", 0, {NULL}, f_first},
    {"last", 0, {NULL}, f_last},
    {"reverse", 0, {NULL}, f_reverse},
    {"items", 0, {NULL}, f_items},
    {"replace", 3, {"old", "new", "count"}, f_replace},
    {"int", 2, {"default", "base"}, f_int},
    {"float", 1, {"default"}, f_float},
    {"abs", 0, {NULL}, f_abs},
    {"indent", 3, {"width", "first", "blank"}, f_indent},
    {"tojson", 4, {"ensure_ascii", "indent", "separators", "sort_keys"}, f_tojson},
    {"join", 2, {"d", "attribute"}, f_join},
};
enum { FILTER_COUNT = sizeof filters / sizeof filters[0] };

int bd_chat_filter_id(const char *name, size_t bytes) {
    for (int i = 0; i < FILTER_COUNT; i++)
        if (strlen(filters[i].name) == bytes && memcmp(filters[i].name, name, bytes) == 0) return i;
    return -1;
}

bool bd_chat_apply_filter(bd_chat_run *run, uint32_t id, const bd_chat_value *value,
                          const bd_chat_args *args, bd_chat_value *out) {
    bool attr = id == FILTER_SELECTATTR || id == FILTER_REJECTATTR;
    bool wanted = id == FILTER_SELECT || id == FILTER_SELECTATTR, ok;
    bd_chat_value bound[PARAMETERS_MAX];
    if (id <= FILTER_REJECTATTR) {
        /* map('map', ...) and the like. */
        if (!bd_chat_enter(run)) return false;
        ok = id == FILTER_MAP ? apply_map(run, value, args, out)
                              : apply_select(run, value, args, attr, wanted, out);
        bd_chat_leave(run);
        return ok;
    }
    if (!bd_chat_bind(run, filters[id].name, filters[id].parameters, filters[id].most, args, bound))
        return false;
    for (size_t i = filters[id].most; i < PARAMETERS_MAX; i++)
        bound[i] = bd_chat_undefined(NULL, 0);
    return filters[id].call(run, value, bound, out);
}
