/* chat_value.c - what values are to Python: truth, equality, order, elements. Work that grows with
 * a value is paid in steps. Threads: any, a run is one thread's. */
#include <math.h>

#include "chat_internal.h"

const char *bd_chat_type_name(const bd_chat_value *value) {
    static const char *const names[] = {
        [BD_CHAT_UNDEFINED] = "undefined",   [BD_CHAT_NONE] = "none",
        [BD_CHAT_BOOL] = "a boolean",        [BD_CHAT_INT] = "an integer",
        [BD_CHAT_FLOAT] = "a float",         [BD_CHAT_STRING] = "a string",
        [BD_CHAT_LIST] = "a list",           [BD_CHAT_DICT] = "a mapping",
        [BD_CHAT_NAMESPACE] = "a namespace", [BD_CHAT_LOOP] = "a loop",
        [BD_CHAT_MACRO] = "a macro",         [BD_CHAT_FUNCTION] = "a function",
        [BD_CHAT_METHOD] = "a method",
    };
    return names[value->kind];
}

bool bd_chat_truth(const bd_chat_value *value) {
    switch ((bd_chat_kind)value->kind) {
    case BD_CHAT_UNDEFINED:
    case BD_CHAT_NONE:
        return false;
    case BD_CHAT_BOOL:
        return value->boolean;
    case BD_CHAT_INT:
        return value->integer != 0;
    case BD_CHAT_FLOAT:
        return value->number != 0;
    case BD_CHAT_STRING:
        return value->bytes > 0;
    case BD_CHAT_LIST:
        return value->flavour == BD_CHAT_GENERATOR || value->list->count > 0;
    case BD_CHAT_DICT:
        return value->dict->count > 0;
    case BD_CHAT_NAMESPACE:
    case BD_CHAT_LOOP:
    case BD_CHAT_MACRO:
    case BD_CHAT_FUNCTION:
    case BD_CHAT_METHOD:
        break;
    }
    return true;
}

static bool is_number(const bd_chat_value *value) {
    return value->kind == BD_CHAT_BOOL || value->kind == BD_CHAT_INT ||
           value->kind == BD_CHAT_FLOAT;
}

static int64_t as_int(const bd_chat_value *value) {
    return value->kind == BD_CHAT_BOOL ? value->boolean : value->integer;
}

/* -1, 0, 1; 2: one is NaN. An integer and a float are compared exactly. */
static int compare_numbers(const bd_chat_value *a, const bd_chat_value *b) {
    if (a->kind != BD_CHAT_FLOAT && b->kind != BD_CHAT_FLOAT) {
        int64_t x = as_int(a), y = as_int(b);
        return x < y ? -1 : x > y;
    }
    if (a->kind == BD_CHAT_FLOAT && b->kind == BD_CHAT_FLOAT) {
        if (isnan(a->number) || isnan(b->number)) return 2;
        return a->number < b->number ? -1 : a->number > b->number;
    }
    if (a->kind == BD_CHAT_FLOAT) {
        int other = compare_numbers(b, a);
        return other == 2 ? 2 : -other;
    }
    double number = b->number;
    if (isnan(number)) return 2;
    if (number >= 0x1p63) return -1;
    if (number < -0x1p63) return 1;
    int64_t x = as_int(a), whole = (int64_t)number;
    if (x != whole) return x < whole ? -1 : 1;
    double rest = number - (double)whole;
    return rest > 0 ? -1 : rest < 0;
}

static bool equal_lists(bd_chat_run *run, const bd_chat_value *a, const bd_chat_value *b,
                        bool *out) {
    *out = a->list == b->list;
    if (*out || a->flavour != b->flavour || a->flavour == BD_CHAT_GENERATOR ||
        a->list->count != b->list->count)
        return true;
    *out = true;
    for (size_t i = 0; i < a->list->count && *out; i++)
        if (!bd_chat_equal(run, &a->list->items[i], &b->list->items[i], out)) return false;
    return true;
}

static bool equal_dicts(bd_chat_run *run, const bd_chat_dict *a, const bd_chat_dict *b, bool *out) {
    *out = a == b || a->count == b->count;
    for (size_t i = 0; a != b && i < a->count && *out; i++) {
        const bd_chat_value *found;
        if (!bd_chat_dict_find(run, b, &a->keys[i], &found)) return false;
        *out = found != NULL;
        if (found && !bd_chat_equal(run, &a->values[i], found, out)) return false;
    }
    return true;
}

bool bd_chat_equal(bd_chat_run *run, const bd_chat_value *a, const bd_chat_value *b, bool *out) {
    *out = false;
    if (!bd_chat_spend(run, 1)) return false;
    if (is_number(a) && is_number(b)) {
        *out = compare_numbers(a, b) == 0;
        return true;
    }
    if (a->kind != b->kind) return true;
    bool ok = true;
    switch ((bd_chat_kind)a->kind) {
    case BD_CHAT_STRING:
        *out = a->bytes == b->bytes && memcmp(a->text, b->text, a->bytes) == 0;
        return bd_chat_spend(run, a->bytes / BD_CHAT_BYTES_PER_STEP);
    case BD_CHAT_LIST:
    case BD_CHAT_DICT:
        if (!bd_chat_enter(run)) return false;
        ok = a->kind == BD_CHAT_LIST ? equal_lists(run, a, b, out)
                                     : equal_dicts(run, a->dict, b->dict, out);
        bd_chat_leave(run);
        return ok;
    case BD_CHAT_UNDEFINED:
    case BD_CHAT_NONE:
        *out = true;
        return true;
    case BD_CHAT_NAMESPACE:
        *out = a->dict == b->dict;
        return true;
    case BD_CHAT_FUNCTION:
        *out = a->integer == b->integer;
        return true;
    case BD_CHAT_LOOP:
        *out = a->loop == b->loop;
        return true;
    case BD_CHAT_MACRO:
        *out = a->macro == b->macro;
        return true;
    case BD_CHAT_BOOL:
    case BD_CHAT_INT:
    case BD_CHAT_FLOAT:
    case BD_CHAT_METHOD:
        break;
    }
    return true;
}

/* *out: -1, 0, 1 as for <; 2: neither is less nor equal (NaN). Only what Python orders. */
bool bd_chat_order(bd_chat_run *run, const bd_chat_value *a, const bd_chat_value *b, int *out) {
    if (is_number(a) && is_number(b)) {
        *out = compare_numbers(a, b);
        return true;
    }
    if (a->kind == BD_CHAT_STRING && b->kind == BD_CHAT_STRING) {
        /* UTF-8 bytes are in the order of their code points. */
        int order = memcmp(a->text, b->text, a->bytes < b->bytes ? a->bytes : b->bytes);
        *out = order != 0 ? (order < 0 ? -1 : 1) : a->bytes < b->bytes ? -1 : a->bytes > b->bytes;
        return true;
    }
    bool lists = a->kind == BD_CHAT_LIST && b->kind == BD_CHAT_LIST && a->flavour == b->flavour &&
                 a->flavour <= BD_CHAT_TUPLE;
    if (!lists)
        return bd_chat_fail(run, BD_E_FORMAT, "%s and %s cannot be ordered", bd_chat_type_name(a),
                            bd_chat_type_name(b));
    for (size_t i = 0; i < a->list->count && i < b->list->count; i++) {
        bool same;
        if (!bd_chat_equal(run, &a->list->items[i], &b->list->items[i], &same)) return false;
        if (same) continue;
        if (!bd_chat_enter(run)) return false;
        bool ok = bd_chat_order(run, &a->list->items[i], &b->list->items[i], out);
        bd_chat_leave(run);
        return ok;
    }
    *out = a->list->count < b->list->count ? -1 : a->list->count > b->list->count;
    return true;
}

bool bd_chat_contains(bd_chat_run *run, const bd_chat_value *item, const bd_chat_value *in,
                      bool *out) {
    const bd_chat_value *found;
    *out = false;
    switch ((int)in->kind) {
    case BD_CHAT_UNDEFINED:
        return true;
    case BD_CHAT_STRING:
        if (item->kind != BD_CHAT_STRING)
            return bd_chat_fail(run, BD_E_FORMAT, "%s cannot be in a string",
                                bd_chat_type_name(item));
        *out = bd_chat_search(in->text, in->bytes, item->text, item->bytes) != NULL;
        return bd_chat_spend(run, in->bytes / BD_CHAT_BYTES_PER_STEP);
    case BD_CHAT_LIST:
        for (size_t i = 0; i < in->list->count && !*out; i++)
            if (!bd_chat_equal(run, item, &in->list->items[i], out)) return false;
        return true;
    case BD_CHAT_DICT:
        if (!bd_chat_hashable(item))
            return bd_chat_fail(run, BD_E_FORMAT, "%s cannot be a key", bd_chat_type_name(item));
        if (!bd_chat_dict_find(run, in->dict, item, &found)) return false;
        *out = found != NULL;
        return true;
    default:
        return bd_chat_fail(run, BD_E_FORMAT, "nothing is in %s", bd_chat_type_name(in));
    }
}

/* ---- Lists and dicts ---- */

bool bd_chat_list_new(bd_chat_run *run, bd_chat_flavour flavour, size_t capacity,
                      bd_chat_value *out) {
    bd_chat_list *list = bd_chat_alloc(run, 1, sizeof *list);
    if (!list) return false;
    list->items = bd_chat_alloc(run, capacity, sizeof *list->items);
    if (!list->items) return false;
    list->capacity = capacity;
    *out = (bd_chat_value){.kind = BD_CHAT_LIST, .flavour = (uint8_t)flavour, .list = list};
    return true;
}

bool bd_chat_list_add(bd_chat_run *run, bd_chat_value *value, const bd_chat_value *item) {
    bd_chat_list *list = value->list;
    if (!bd_chat_spend(run, 1)) return false;
    if (list->count == list->capacity) {
        size_t capacity = list->capacity < 4 ? 8 : list->capacity * 2;
        bd_chat_value *items = bd_chat_alloc(run, capacity, sizeof *items);
        if (!items) return false;
        if (list->count) memcpy(items, list->items, list->count * sizeof *items);
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = *item;
    return true;
}

static bool hashable(const bd_chat_value *value, int depth) {
    if (value->kind == BD_CHAT_DICT || depth > BD_CHAT_DEPTH_MAX) return false;
    if (value->kind != BD_CHAT_LIST || value->flavour == BD_CHAT_RANGE) return true;
    bool ok = value->flavour == BD_CHAT_TUPLE;
    for (size_t i = 0; ok && i < value->list->count; i++)
        ok = hashable(&value->list->items[i], depth + 1);
    return ok;
}

bool bd_chat_hashable(const bd_chat_value *value) {
    return hashable(value, 0);
}

bool bd_chat_dict_new(bd_chat_run *run, bd_chat_value *out) {
    bd_chat_dict *dict = bd_chat_alloc(run, 1, sizeof *dict);
    if (!dict) return false;
    *out = (bd_chat_value){.kind = BD_CHAT_DICT, .dict = dict};
    return true;
}

bool bd_chat_dict_find(bd_chat_run *run, const bd_chat_dict *dict, const bd_chat_value *key,
                       const bd_chat_value **found) {
    *found = NULL;
    if (key->kind == BD_CHAT_STRING) {
        *found = bd_chat_dict_text(dict, key->text, key->bytes);
        return bd_chat_spend(run, 1 + dict->count / 4);
    }
    for (size_t i = 0; i < dict->count; i++) {
        bool same;
        if (!bd_chat_equal(run, key, &dict->keys[i], &same)) return false;
        if (!same) continue;
        *found = &dict->values[i];
        return true;
    }
    return true;
}

const bd_chat_value *bd_chat_dict_text(const bd_chat_dict *dict, const char *key, size_t bytes) {
    for (size_t i = 0; i < dict->count; i++) {
        const bd_chat_value *have = &dict->keys[i];
        if (have->kind == BD_CHAT_STRING && have->bytes == bytes &&
            memcmp(have->text, key, bytes) == 0)
            return &dict->values[i];
    }
    return NULL;
}

static bool grow_dict(bd_chat_run *run, bd_chat_dict *dict) {
    size_t capacity = dict->capacity ? dict->capacity * 2 : 8;
    bd_chat_value *keys = bd_chat_alloc(run, capacity, sizeof *keys);
    bd_chat_value *values = bd_chat_alloc(run, capacity, sizeof *values);
    if (!keys || !values) return false;
    if (dict->count) {
        memcpy(keys, dict->keys, dict->count * sizeof *keys);
        memcpy(values, dict->values, dict->count * sizeof *values);
    }
    dict->keys = keys;
    dict->values = values;
    dict->capacity = capacity;
    return true;
}

bool bd_chat_dict_put(bd_chat_run *run, bd_chat_dict *dict, const bd_chat_value *key,
                      const bd_chat_value *value) {
    const bd_chat_value *found;
    if (!bd_chat_hashable(key))
        return bd_chat_fail(run, BD_E_FORMAT, "%s cannot be a key", bd_chat_type_name(key));
    if (!bd_chat_dict_find(run, dict, key, &found)) return false;
    if (found) {
        dict->values[found - dict->values] = *value;
        return true;
    }
    if (dict->count == dict->capacity && !grow_dict(run, dict)) return false;
    dict->keys[dict->count] = *key;
    dict->values[dict->count++] = *value;
    return true;
}

bool bd_chat_pairs(bd_chat_run *run, const bd_chat_dict *dict, bd_chat_flavour flavour,
                   bd_chat_value *out) {
    if (!bd_chat_list_new(run, flavour, dict->count, out)) return false;
    for (size_t i = 0; i < dict->count; i++) {
        bd_chat_value pair;
        if (!bd_chat_list_new(run, BD_CHAT_TUPLE, 2, &pair) ||
            !bd_chat_list_add(run, &pair, &dict->keys[i]) ||
            !bd_chat_list_add(run, &pair, &dict->values[i]) || !bd_chat_list_add(run, out, &pair))
            return false;
    }
    return true;
}

static bool characters(bd_chat_run *run, const bd_chat_value *text, bd_chat_list *out) {
    size_t count = bd_chat_code_count(text->text, text->bytes), length;
    if (!bd_chat_spend(run, count)) return false;
    out->items = bd_chat_alloc(run, count, sizeof *out->items);
    if (!out->items) return false;
    for (size_t i = 0; i < text->bytes; i += length) {
        (void)bd_chat_code_at(text->text + i, text->bytes - i, &length);
        out->items[out->count++] = bd_chat_text(text->text + i, length);
    }
    return true;
}

bool bd_chat_elements(bd_chat_run *run, const bd_chat_value *value, bd_chat_list *out) {
    *out = (bd_chat_list){0};
    switch ((int)value->kind) {
    case BD_CHAT_UNDEFINED:
        return true;
    case BD_CHAT_STRING:
        return characters(run, value, out);
    case BD_CHAT_LIST:
        *out = *value->list;
        /* A generator is empty afterwards. */
        if (value->flavour == BD_CHAT_GENERATOR) *value->list = (bd_chat_list){0};
        return true;
    case BD_CHAT_DICT:
        out->items = value->dict->keys;
        out->count = value->dict->count;
        return true;
    default:
        return bd_chat_fail(run, BD_E_FORMAT, "%s cannot be gone through",
                            bd_chat_type_name(value));
    }
}

bool bd_chat_length(bd_chat_run *run, const bd_chat_value *value, int64_t *out) {
    *out = 0;
    switch ((int)value->kind) {
    case BD_CHAT_UNDEFINED:
        return true;
    case BD_CHAT_STRING:
        *out = (int64_t)bd_chat_code_count(value->text, value->bytes);
        return bd_chat_spend(run, value->bytes / BD_CHAT_BYTES_PER_STEP);
    case BD_CHAT_LIST:
        if (value->flavour == BD_CHAT_GENERATOR) break;
        *out = (int64_t)value->list->count;
        return true;
    case BD_CHAT_DICT:
        *out = (int64_t)value->dict->count;
        return true;
    default:
        break;
    }
    return bd_chat_fail(run, BD_E_FORMAT, "%s has no length", bd_chat_type_name(value));
}
