/* config_file.c - JSON keys to options: nested objects are addressed as "cache.slots". Strict: a
 * key that the table does not know, a wrong type, a value out of range or a key given twice stops
 * the start. Threads: the caller's. */
#include "config_file.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"
#include "value.h"

enum { FILE_BYTES_MAX = 4 << 20, FILE_DEPTH_MAX = 16, FILE_NODES_MAX = 100000, KEY_BYTES_MAX = 96 };

typedef struct reader {
    const char *path;
    bd_serve_options *options;
    bd_error *err;
} reader;

static bd_status fail_key(const reader *r, const char *key, const char *what) {
    return bd_fail(r->err, BD_E_ARGUMENT, r->path, "%s: %s: %s", r->path, key, what);
}

static const char *expected_of(option_type type) {
    switch (type) {
    case OPTION_SWITCH:
    case OPTION_BOOL:
        return "must be true or false";
    case OPTION_U32:
    case OPTION_U64:
        return "must be a whole number";
    case OPTION_SIZE:
        return "must be a number of bytes or a string such as \"64GiB\"";
    case OPTION_DOUBLE:
        return "must be a number";
    case OPTION_IDS:
        return "must be a list of numbers";
    case OPTION_STRINGS:
        return "must be a list of strings";
    case OPTION_VARIANTS:
        return "must be a list of objects";
    case OPTION_ENUM:
    case OPTION_STRING:
    case OPTION_PATH:
    case OPTION_ADDRESS:
        return "must be a string";
    }
    return "has an unknown type";
}

static bd_status set_text(const reader *r, const option_row *row, const char *key,
                          const char *text) {
    char label[512];
    snprintf(label, sizeof label, "%s: %s", r->path, key);
    const value_place place = {.subject = r->path, .label = label};
    void *field = bd_table_field(row, BD_COMMAND_SERVE, r->options);
    return bd_value_parse(row, field, text, &place, r->err);
}

/* A number is parsed from its text, the same way as a flag's. */
static bd_status set_number(const reader *r, const option_row *row, const char *key,
                            const cJSON *item) {
    const double value = item->valuedouble;
    bool whole = value == floor(value) &&
                 fabs(value) <= 0x1p53; /* beyond it a double holds no exact count */
    if (row->type != OPTION_DOUBLE && !whole) return fail_key(r, key, expected_of(row->type));
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    if (row->type == OPTION_DOUBLE) {
        bd_strbuf_json_number(&text, value);
    } else {
        bd_strbuf_printf(&text, "%.0f", value);
    }
    bd_status status = text.failed
                           ? bd_fail(r->err, BD_E_MEMORY, r->path, "%s: out of memory", r->path)
                           : set_text(r, row, key, text.data);
    bd_strbuf_deinit(&text);
    return status;
}

static bd_status set_scalar(const reader *r, const option_row *row, const char *key,
                            const cJSON *item) {
    bool truth = row->type == OPTION_BOOL || row->type == OPTION_SWITCH;
    bool number = row->type == OPTION_U32 || row->type == OPTION_U64 || row->type == OPTION_SIZE ||
                  row->type == OPTION_DOUBLE;
    bool text = (!truth && !number) || row->type == OPTION_SIZE;
    if (truth && cJSON_IsBool(item))
        return set_text(r, row, key, cJSON_IsTrue(item) ? "true" : "false");
    if (text && cJSON_IsString(item)) return set_text(r, row, key, item->valuestring);
    if (number && cJSON_IsNumber(item)) return set_number(r, row, key, item);
    return fail_key(r, key, expected_of(row->type));
}

static bd_status set_strings(const reader *r, const option_row *row, const char *key,
                             const cJSON *list) {
    if (!cJSON_IsArray(list)) return fail_key(r, key, expected_of(row->type));
    /* Whoever took the last key out must not open the server to everybody by it. */
    if (row->is_key && !list->child)
        return fail_key(r, key, "the list is empty; leave it out to serve without keys");
    bd_value_clear(row, bd_table_field(row, BD_COMMAND_SERVE, r->options));
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        if (!cJSON_IsString(item)) return fail_key(r, key, expected_of(row->type));
        bd_status status = set_text(r, row, key, item->valuestring);
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

static bd_status check_twice(const reader *r, const char *prefix, const cJSON *item) {
    for (const cJSON *later = item->next; later; later = later->next) {
        if (strcmp(later->string, item->string) != 0) continue;
        char key[KEY_BYTES_MAX];
        snprintf(key, sizeof key, "%s%.64s", prefix, item->string);
        return fail_key(r, key, "given twice");
    }
    return BD_OK;
}

/* One {"name", "path", "pin"}. */
static bd_status add_variant(const reader *r, const cJSON *object, uint32_t index) {
    char prefix[32], key[KEY_BYTES_MAX], label[512];
    const char *name = NULL, *path = NULL;
    bool pin = false;
    snprintf(prefix, sizeof prefix, "variants[%u].", index);
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        bd_status status = check_twice(r, prefix, item);
        if (status != BD_OK) return status;
        snprintf(key, sizeof key, "%s%.48s", prefix, item->string);
        if (strcmp(item->string, "pin") == 0) {
            if (!cJSON_IsBool(item)) return fail_key(r, key, expected_of(OPTION_BOOL));
            pin = cJSON_IsTrue(item);
        } else if (strcmp(item->string, "name") == 0 || strcmp(item->string, "path") == 0) {
            if (!cJSON_IsString(item)) return fail_key(r, key, expected_of(OPTION_STRING));
            *(item->string[0] == 'n' ? &name : &path) = item->valuestring;
        } else {
            return fail_key(r, key, "unknown key");
        }
    }
    snprintf(key, sizeof key, "variants[%u]", index);
    if (!path) return fail_key(r, key, "path is missing");
    snprintf(label, sizeof label, "%s: %s", r->path, key);
    const value_place place = {.subject = r->path, .label = label};
    return bd_value_add_variant(&r->options->variants, name, path, pin, &place, r->err);
}

static bd_status set_variants(const reader *r, const option_row *row, const char *key,
                              const cJSON *list) {
    if (!cJSON_IsArray(list)) return fail_key(r, key, expected_of(row->type));
    bd_value_clear(row, &r->options->variants);
    uint32_t index = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        if (!cJSON_IsObject(item)) return fail_key(r, key, expected_of(row->type));
        bd_status status = add_variant(r, item, index++);
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

/* True when some key of the table lies below "prefix.". */
static bool is_group(const char *prefix) {
    size_t len = strlen(prefix);
    for (size_t i = 0; i < bd_table_count(); i++) {
        const char *key = bd_table_row(i)->key;
        if (key && strncmp(key, prefix, len) == 0 && key[len] == '.') return true;
    }
    return false;
}

static bd_status set_key(const reader *r, const char *key, const cJSON *item) {
    const option_row *row = bd_table_by_key(key);
    if (!row) return fail_key(r, key, "unknown key");
    if (row->type == OPTION_VARIANTS) return set_variants(r, row, key, item);
    if (row->type == OPTION_STRINGS) return set_strings(r, row, key, item);
    return set_scalar(r, row, key, item);
}

/* Keys are two levels deep at most, so the recursion ends at once. */
static bd_status read_object(const reader *r, const char *prefix, const cJSON *object) {
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        char key[KEY_BYTES_MAX], inner[KEY_BYTES_MAX];
        bd_status status = check_twice(r, prefix, item);
        if (status != BD_OK) return status;
        int len = snprintf(key, sizeof key, "%s%.64s", prefix, item->string);
        /* A dot in a member's name would address the inside of another object. */
        if (len < 0 || strchr(item->string, '.')) return fail_key(r, key, "unknown key");
        if (!is_group(key)) {
            status = set_key(r, key, item);
        } else if (!cJSON_IsObject(item)) {
            status = fail_key(r, key, "must be an object");
        } else {
            snprintf(inner, sizeof inner, "%.90s.", key);
            status = read_object(r, inner, item);
        }
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

bd_status bd_config_file_load(const char *path, bd_serve_options *options, bd_error *err) {
    const reader r = {.path = path, .options = options, .err = err};
    const bd_json_limits limits = {.depth_max = FILE_DEPTH_MAX, .nodes_max = FILE_NODES_MAX};
    bd_json_scan scan;
    char *text = NULL;
    size_t bytes = 0;
    cJSON *root = NULL;
    bd_status status = bd_file_read(path, FILE_BYTES_MAX, &text, &bytes, err);
    if (status != BD_OK) return status;
    bd_error fault;
    status = bd_json_check(text, bytes, &limits, &scan, &fault);
    if (status != BD_OK) {
        status = bd_fail(err, BD_E_ARGUMENT, path, "%s: not valid JSON: %s", path, fault.message);
        goto done;
    }
    root = cJSON_ParseWithLength(text + scan.offset, bytes - scan.offset);
    if (!root) {
        status = bd_fail(err, BD_E_MEMORY, path, "%s: out of memory", path);
    } else if (!cJSON_IsObject(root)) {
        status = bd_fail(err, BD_E_ARGUMENT, path, "%s: must hold one JSON object", path);
    } else {
        status = read_object(&r, "", root);
    }
    cJSON_Delete(root);
done:
    free(text);
    return status;
}
