/* fields.c - bodies checked against a table of fields: types, ranges, repeated keys. Threads: pure.
 */
#include "request.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"

/* With its block's header a size that malloc has at hand. */
enum { FIELDS_MAX = 64, KEY_BYTES_MAX = 40, ARENA_BLOCK_BYTES = 960 };

bool bd_out_of_memory(bd_api_error *err) {
    return bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
}

bool bd_body_open(const char *body, size_t bytes, bd_view *root, bd_arena **arena,
                  bd_api_error *err) {
    /* Nodes cost nothing here (no tree is built), so only their number in the largest body bounds
     * them. */
    const bd_json_limits limits = {
        .depth_max = 64, .nodes_max = SIZE_MAX / 2, .allow_nul_escape = true};
    bd_json_scan scan;
    bd_error fault = {0};
    *arena = NULL;
    if (bd_json_check(body, bytes, &limits, &scan, &fault) != BD_OK)
        return bd_api_fail(err, BD_API_INVALID_JSON, NULL, "The body is not valid JSON: %.300s.",
                           fault.message);
    *root = bd_view_root(body + scan.offset);
    if (bd_view_kind_of(*root) != BD_VIEW_OBJECT)
        return bd_api_fail(err, BD_API_INVALID_JSON, NULL,
                           "The body must be a JSON object, not %s.",
                           bd_view_kind_name(bd_view_kind_of(*root)));
    /* Decoded strings and id lists are at most 4 times the text ("[1,1,..." is two bytes for a four
     * byte id). The rest is for what is kept of a thousand choices. */
    size_t max_bytes = bytes > SIZE_MAX / 16 ? SIZE_MAX / 2 : bytes * 8 + ((size_t)2 << 20);
    *arena = bd_arena_create(ARENA_BLOCK_BYTES, max_bytes);
    if (!*arena) return bd_out_of_memory(err);
    return true;
}

bool bd_field_wrong_type(const char *name, const char *expected, bd_view value, bd_api_error *err) {
    return bd_api_fail(err, BD_API_TYPE, name, "Invalid type for '%s': expected %s, got %s.", name,
                       expected, bd_view_kind_name(bd_view_kind_of(value)));
}

bool bd_field_int(const char *name, bd_view value, int64_t low, int64_t high, int64_t *out,
                  bd_api_error *err) {
    if (bd_view_kind_of(value) != BD_VIEW_NUMBER)
        return bd_field_wrong_type(name, "an integer", value, err);
    bd_view_int kind = bd_view_int64(value, out);
    if (kind == BD_VIEW_INT_FRACTION)
        return bd_api_fail(
            err, BD_API_TYPE, name,
            "Invalid type for '%s': expected an integer, got a number with a fraction.", name);
    if (kind == BD_VIEW_INT_LOW || (kind == BD_VIEW_INT_OK && *out < low))
        return bd_api_fail(err, BD_API_INTEGER_LOW, name,
                           "Invalid '%s': must be at least %" PRId64 ".", name, low);
    if (kind == BD_VIEW_INT_HIGH || *out > high)
        return bd_api_fail(err, BD_API_INTEGER_HIGH, name,
                           "Invalid '%s': must be at most %" PRId64 ".", name, high);
    return true;
}

static bool number_field(const bd_field *field, bd_view value, double *out, bd_api_error *err) {
    if (bd_view_kind_of(value) != BD_VIEW_NUMBER)
        return bd_field_wrong_type(field->name, "a number", value, err);
    double number = bd_view_double(value);
    bool low_ok = field->low_open ? number > field->number_low : number >= field->number_low;
    if (!low_ok)
        return bd_api_fail(err, BD_API_DECIMAL_LOW, field->name, "Invalid '%s': must be %s %g.",
                           field->name, field->low_open ? "greater than" : "at least",
                           field->number_low);
    if (!(number <= field->number_high))
        return bd_api_fail(err, BD_API_DECIMAL_HIGH, field->name,
                           "Invalid '%s': must be at most %g.", field->name, field->number_high);
    *out = number;
    return true;
}

bool bd_field_bool(const char *name, bd_view value, bool *out, bd_api_error *err) {
    bd_view_kind kind = bd_view_kind_of(value);
    if (kind == BD_VIEW_BOOL) {
        *out = bd_view_true(value);
        return true;
    }
    int64_t number = -1;
    if (kind == BD_VIEW_NUMBER && bd_view_int64(value, &number) == BD_VIEW_INT_OK &&
        (number == 0 || number == 1)) {
        *out = number == 1;
        return true;
    }
    return bd_field_wrong_type(name, "a boolean", value, err);
}

bool bd_field_text(bd_arena *arena, bd_view value, bd_text *out, bd_api_error *err) {
    size_t bytes = bd_view_string_bytes(value);
    char *data = bd_arena_alloc(arena, bytes + 1, 1);
    if (!data) return bd_out_of_memory(err);
    bd_view_string_copy(value, data);
    *out = (bd_text){.data = data, .bytes = bytes};
    return true;
}

/* Understood but not implemented: only values that ask for nothing pass. */
static bool refused_field(const char *name, bd_view value, bd_api_error *err) {
    bd_view_kind kind = bd_view_kind_of(value);
    bd_view key, item;
    bd_view_iter iter;
    if (kind == BD_VIEW_STRING && bd_view_string_bytes(value) == 0) return true;
    if (kind == BD_VIEW_ARRAY) {
        iter = bd_view_begin(value);
        if (!bd_view_next_item(&iter, &item)) return true;
    }
    if (kind == BD_VIEW_OBJECT) {
        iter = bd_view_begin(value);
        if (!bd_view_next_member(&iter, &key, &item)) return true;
        bool is_text = strncmp(key.at, "\"type\"", 6) == 0 && strncmp(item.at, "\"text\"", 6) == 0;
        if (is_text && !bd_view_next_member(&iter, &key, &item)) return true;
    }
    return bd_api_fail(err, BD_API_UNSUPPORTED, name, "'%s' is not supported by this server.",
                       name);
}

static bool store_field(const bd_field_context *context, const bd_field *field, bd_view value,
                        bd_api_error *err) {
    char *at = (char *)context->object + field->offset;
    bool ok = false;
    int64_t integer = 0;
    double number = 0;
    bool flag = false;
    bd_text text = {0};
    switch (field->kind) {
    case BD_FIELD_INT:
        ok = bd_field_int(field->name, value, field->low, field->high, &integer, err);
        if (ok) memcpy(at, &integer, sizeof integer);
        break;
    case BD_FIELD_NUMBER:
        ok = number_field(field, value, &number, err);
        if (ok) memcpy(at, &number, sizeof number);
        break;
    case BD_FIELD_BOOL:
        ok = bd_field_bool(field->name, value, &flag, err);
        if (ok) memcpy(at, &flag, sizeof flag);
        break;
    case BD_FIELD_STRING:
        if (bd_view_kind_of(value) != BD_VIEW_STRING)
            return bd_field_wrong_type(field->name, "a string", value, err);
        ok = bd_field_text(context->arena, value, &text, err);
        if (ok) memcpy(at, &text, sizeof text);
        break;
    case BD_FIELD_CUSTOM:
        ok = field->parse(context, field->name, value, err);
        break;
    case BD_FIELD_REFUSED:
        ok = refused_field(field->name, value, err);
        break;
    }
    if (ok && field->sent_offset > 0) {
        flag = true;
        memcpy((char *)context->object + field->sent_offset, &flag, sizeof flag);
    }
    return ok;
}

/* Index of the field a key names, or field_count. Escapes in keys count as the characters they
 * stand for. */
static uint32_t find_field(const bd_field *fields, uint32_t field_count, bd_view key) {
    char name[KEY_BYTES_MAX];
    size_t bytes = bd_view_string_bytes(key);
    if (bytes == 0 || bytes > sizeof name) return field_count;
    bd_view_string_copy(key, name);
    for (uint32_t i = 0; i < field_count; i++)
        if (fields[i].name[0] == name[0] && strlen(fields[i].name) == bytes &&
            memcmp(fields[i].name, name, bytes) == 0)
            return i;
    return field_count;
}

bool bd_fields_parse(const bd_field_context *context, const bd_field *fields, uint32_t field_count,
                     bd_view root, bd_api_error *err) {
    BD_ASSERT(field_count <= FIELDS_MAX);
    bd_view values[FIELDS_MAX] = {{NULL}};
    bd_view key, value;
    for (bd_view_iter iter = bd_view_begin(root); bd_view_next_member(&iter, &key, &value);) {
        uint32_t index = find_field(fields, field_count, key);
        if (index < field_count) values[index] = value;
    }
    for (uint32_t i = 0; i < field_count; i++) {
        if (!values[i].at || bd_view_kind_of(values[i]) == BD_VIEW_NULL) continue;
        if (!store_field(context, &fields[i], values[i], err)) return false;
    }
    return true;
}
