/* tenants_file.c - reads the file of tenants, strictly. Threads: any. */
#include "bitdelta/config/tenants_file.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"
#include "bitdelta/base/map.h"

enum { FILE_DEPTH_MAX = 8, FILE_NODES_MAX = 1000000, DIGEST_BYTES = 32 };

typedef struct reader {
    const char *path;
    bd_map *names, *keys; /* of all tenants so far */
    uint32_t index;       /* of the tenant that is read */
    bd_error *err;
} reader;

/* The file, the member and what is wrong with it. The member's text is the file's: it is cut. */
static bd_status fail_at(const reader *r, const char *member, const char *what) {
    return bd_fail(r->err, BD_E_ARGUMENT, r->path, "%s: tenants[%u]%s%.64s: %s", r->path,
                   (unsigned)r->index, member[0] ? "." : "", member, what);
}

static bd_status no_memory(const reader *r) {
    return bd_fail(r->err, BD_E_MEMORY, r->path, "%s: out of memory", r->path);
}

static bool is_alphanumeric(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static bool is_name(const char *text) {
    size_t bytes = strlen(text);
    if (bytes == 0 || bytes > BD_TENANT_NAME_BYTES_MAX || !is_alphanumeric(text[0])) return false;
    for (size_t i = 0; i < bytes; i++)
        if (!is_alphanumeric(text[i]) && !strchr("._-", text[i])) return false;
    return true;
}

/* ---- Members ---- */

static bd_status read_name(const reader *r, const cJSON *item, bd_tenant_entry *out) {
    if (!cJSON_IsString(item)) return fail_at(r, "name", "must be a string");
    const char *name = item->valuestring;
    if (!is_name(name))
        return fail_at(r, "name",
                       "must be 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first");
    bd_status status = bd_map_put(r->names, name, strlen(name), r->names);
    if (status == BD_BUSY) return fail_at(r, "name", "another tenant has this name");
    if (status != BD_OK || !(out->name = strdup(name))) return no_memory(r);
    return BD_OK;
}

static int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

static bool read_digest(const char *text, uint8_t out[DIGEST_BYTES]) {
    static const char prefix[] = "sha256:";
    const size_t skip = sizeof prefix - 1;
    if (strncmp(text, prefix, skip) != 0 || strlen(text) != skip + (size_t)2 * DIGEST_BYTES)
        return false;
    for (size_t i = 0; i < DIGEST_BYTES; i++) {
        int high = hex_value(text[skip + 2 * i]), low = hex_value(text[skip + 2 * i + 1]);
        if (high < 0 || low < 0) return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* What does not look like a hash may be a key in the clear, so it is not quoted. */
static bd_status read_key(const reader *r, const cJSON *item, bd_tenant_entry *out) {
    char member[32];
    snprintf(member, sizeof member, "keys[%u]", (unsigned)out->key_count);
    uint8_t *digest = out->keys[out->key_count];
    if (!cJSON_IsString(item) || !read_digest(item->valuestring, digest))
        return fail_at(r, member,
                       "must be \"sha256:\" and 64 lower-case hex digits, as `bitdelta hash-key` "
                       "prints them");
    out->key_count++;
    bd_status status = bd_map_put(r->keys, digest, DIGEST_BYTES, r->keys);
    if (status == BD_BUSY) return fail_at(r, member, "the same key is in the file already");
    return status == BD_OK ? BD_OK : no_memory(r);
}

static bd_status read_keys(const reader *r, const cJSON *item, bd_tenant_entry *out) {
    int count = cJSON_IsArray(item) ? cJSON_GetArraySize(item) : 0;
    if (count < 1 || count > BD_TENANT_KEYS_MAX)
        return fail_at(r, "keys", "must be a list of 1 to 64 hashed keys");
    out->keys = calloc((size_t)count, sizeof *out->keys);
    if (!out->keys) return no_memory(r);
    const cJSON *key;
    cJSON_ArrayForEach(key, item) {
        bd_status status = read_key(r, key, out);
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

static int compare_texts(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bd_status read_variants(const reader *r, const cJSON *item, bd_tenant_entry *out) {
    static const char wanted[] =
        "must be \"*\" or a list of 1 to 10000 names (1 to 128 bytes), each once";
    if (cJSON_IsString(item) && strcmp(item->valuestring, "*") == 0) {
        out->every_variant = true;
        return BD_OK;
    }
    int count = cJSON_IsArray(item) ? cJSON_GetArraySize(item) : 0;
    if (count < 1 || count > BD_TENANT_VARIANTS_MAX) return fail_at(r, "variants", wanted);
    out->variants = calloc((size_t)count, sizeof(char *));
    if (!out->variants) return no_memory(r);
    const cJSON *name;
    cJSON_ArrayForEach(name, item) {
        size_t bytes = cJSON_IsString(name) ? strlen(name->valuestring) : 0;
        /* A "*" in a list would look as if it meant all of them. */
        if (bytes == 0 || bytes > BD_TENANT_VARIANT_NAME_MAX || strchr(name->valuestring, '*'))
            return fail_at(r, "variants", wanted);
        char *copy = strdup(name->valuestring);
        if (!copy) return no_memory(r);
        out->variants[out->variant_count++] = copy;
    }
    qsort(out->variants, out->variant_count, sizeof(char *), compare_texts);
    for (uint32_t i = 1; i < out->variant_count; i++)
        if (strcmp(out->variants[i - 1], out->variants[i]) == 0)
            return fail_at(r, "variants", wanted);
    return BD_OK;
}

static bd_status read_weight(const reader *r, const cJSON *item, bd_tenant_entry *out) {
    double value = cJSON_IsNumber(item) ? item->valuedouble : 0;
    if (!(value >= BD_TENANT_WEIGHT_MIN && value <= BD_TENANT_WEIGHT_MAX))
        return fail_at(r, "weight", "must be a number from 0.001 to 1000");
    out->weight = value;
    return BD_OK;
}

static bd_status read_whole(const reader *r, const cJSON *item, double min, double max,
                            double *out) {
    char what[96];
    double value = cJSON_IsNumber(item) ? item->valuedouble : min - 1;
    if (!(value >= min && value <= max && value == floor(value))) {
        snprintf(what, sizeof what, "must be a whole number from %.0f to %.0f", min, max);
        return fail_at(r, item->string, what);
    }
    *out = value;
    return BD_OK;
}

static bd_status read_priority(const reader *r, const cJSON *item, bd_tenant_entry *out) {
    double value = 0;
    bd_status status = read_whole(r, item, -1e9, 1e9, &value);
    out->priority_min = (int64_t)value;
    return status;
}

static bd_status read_concurrent(const reader *r, const cJSON *item, bd_tenant_entry *out) {
    double value = 0;
    bd_status status = read_whole(r, item, 1, 1e6, &value);
    out->max_concurrent = (uint32_t)value;
    return status;
}

typedef struct member {
    const char *name;
    bd_status (*read)(const reader *r, const cJSON *item, bd_tenant_entry *out);
    size_t rate_at; /* read NULL: a rate or burst, offset of its uint64_t */
    bool required;
} member;

static const member members[] = {
    {"name", read_name, 0, true},
    {"keys", read_keys, 0, true},
    {"variants", read_variants, 0, true},
    {"weight", read_weight, 0, false},
    {"requests_per_minute", NULL, offsetof(bd_tenant_entry, requests_per_minute), false},
    {"request_burst", NULL, offsetof(bd_tenant_entry, request_burst), false},
    {"tokens_per_minute", NULL, offsetof(bd_tenant_entry, tokens_per_minute), false},
    {"token_burst", NULL, offsetof(bd_tenant_entry, token_burst), false},
    {"max_concurrent", read_concurrent, 0, false},
    {"priority_min", read_priority, 0, false},
};
enum { MEMBER_COUNT = sizeof members / sizeof members[0] };

static bd_status read_member(const reader *r, const cJSON *item, bool seen[MEMBER_COUNT],
                             bd_tenant_entry *out) {
    size_t i = 0;
    while (i < MEMBER_COUNT && strcmp(members[i].name, item->string) != 0)
        i++;
    if (i == MEMBER_COUNT) return fail_at(r, item->string, "unknown member");
    if (seen[i]) return fail_at(r, item->string, "given twice");
    seen[i] = true;
    if (members[i].read) return members[i].read(r, item, out);
    double value = 0;
    bd_status status = read_whole(r, item, 1, BD_TENANT_RATE_MAX, &value);
    uint64_t rate = (uint64_t)value;
    memcpy((char *)out + members[i].rate_at, &rate, sizeof rate);
    return status;
}

static bd_status fill_bursts(const reader *r, bd_tenant_entry *out) {
    if (out->request_burst && !out->requests_per_minute)
        return fail_at(r, "request_burst", "needs requests_per_minute");
    if (out->token_burst && !out->tokens_per_minute)
        return fail_at(r, "token_burst", "needs tokens_per_minute");
    if (!out->request_burst) out->request_burst = out->requests_per_minute;
    if (!out->token_burst) out->token_burst = out->tokens_per_minute;
    return BD_OK;
}

static bd_status read_tenant(const reader *r, const cJSON *object, bd_tenant_entry *out) {
    bool seen[MEMBER_COUNT] = {false};
    out->weight = 1.0;
    if (!cJSON_IsObject(object)) return fail_at(r, "", "must be an object");
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        bd_status status = read_member(r, item, seen, out);
        if (status != BD_OK) return status;
    }
    for (size_t i = 0; i < MEMBER_COUNT; i++)
        if (members[i].required && !seen[i]) return fail_at(r, members[i].name, "is missing");
    return fill_bursts(r, out);
}

/* ---- The file ---- */

static bd_status read_root(reader *r, const cJSON *root, bd_tenant_list *out) {
    const cJSON *list = cJSON_IsObject(root) ? root->child : NULL;
    if (!list || strcmp(list->string, "tenants") != 0 || list->next || !cJSON_IsArray(list))
        return bd_fail(r->err, BD_E_ARGUMENT, r->path,
                       "%s: must hold one object with one member, the list \"tenants\"", r->path);
    int count = cJSON_GetArraySize(list);
    if (count < 1 || count > BD_TENANTS_MAX)
        return bd_fail(r->err, BD_E_ARGUMENT, r->path, "%s: tenants: %d of them, must be 1 to %d",
                       r->path, count, BD_TENANTS_MAX);
    out->items = calloc((size_t)count, sizeof *out->items);
    r->names = bd_map_create((size_t)count);
    r->keys = bd_map_create((size_t)count);
    if (!out->items || !r->names || !r->keys) return no_memory(r);
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        r->index = out->count;
        bd_status status = read_tenant(r, item, &out->items[out->count++]);
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

bd_status bd_tenant_list_read(const char *path, bd_tenant_list *out, bd_error *err) {
    *out = (bd_tenant_list){0};
    reader r = {.path = path, .err = err};
    const bd_json_limits limits = {.depth_max = FILE_DEPTH_MAX, .nodes_max = FILE_NODES_MAX};
    bd_json_scan scan;
    bd_error fault;
    char *text = NULL;
    size_t bytes = 0;
    bd_status status = bd_file_read(path, BD_TENANTS_FILE_MAX, &text, &bytes, err);
    if (status != BD_OK) return status;
    cJSON *root = NULL;
    status = bd_json_check(text, bytes, &limits, &scan, &fault);
    if (status != BD_OK) {
        status = bd_fail(err, BD_E_ARGUMENT, path, "%s: not valid JSON: %s", path, fault.message);
        goto done;
    }
    root = cJSON_ParseWithLength(text + scan.offset, bytes - scan.offset);
    status = root ? read_root(&r, root, out) : no_memory(&r);
    if (status != BD_OK) bd_tenant_list_deinit(out);
done:
    cJSON_Delete(root);
    bd_map_destroy(r.names);
    bd_map_destroy(r.keys);
    free(text);
    return status;
}

void bd_tenant_list_deinit(bd_tenant_list *list) {
    for (uint32_t i = 0; i < list->count; i++) {
        bd_tenant_entry *entry = &list->items[i];
        for (uint32_t v = 0; entry->variants && v < entry->variant_count; v++)
            free(entry->variants[v]);
        free(entry->variants);
        free(entry->keys);
        free(entry->name);
    }
    free(list->items);
    *list = (bd_tenant_list){0};
}
