/* fuzz_json.c - three readers of JSON agree on any bytes: what bd_json_check accepts parses in
 * cJSON and reads the same through bd_view; strings and numbers survive being written again. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/base/strbuf.h"
#include "openai/json_view.h"

enum { DEPTH_MAX = 64 };

static void check_string(bd_view view, const char *expected) {
    const size_t bytes = bd_view_string_bytes(view);
    BD_ASSERT(bytes == strlen(expected));
    char *copy = malloc(bytes + 1); /* its own block: a byte too many is seen */
    BD_ASSERT(copy);
    bd_view_string_copy(view, copy);
    BD_ASSERT(memcmp(copy, expected, bytes) == 0);
    bd_strbuf again;
    bd_strbuf_init(&again, 0);
    bd_strbuf_json_string(&again, copy, bytes);
    BD_ASSERT(!again.failed && bd_view_string_bytes(bd_view_root(again.data)) == bytes);
    bd_view_string_copy(bd_view_root(again.data), copy);
    BD_ASSERT(memcmp(copy, expected, bytes) == 0);
    bd_strbuf_deinit(&again);
    free(copy);
}

static void check_number(bd_view view, double expected) {
    int64_t integer;
    const double value = bd_view_double(view);
    BD_ASSERT(memcmp(&value, &expected, sizeof value) == 0);
    switch (bd_view_int64(view, &integer)) {
    case BD_VIEW_INT_OK:
        BD_ASSERT((double)integer == value);
        break;
    case BD_VIEW_INT_LOW:
        BD_ASSERT(value <= -0x1p63);
        break;
    case BD_VIEW_INT_HIGH:
        BD_ASSERT(value >= 0x1p63);
        break;
    case BD_VIEW_INT_FRACTION:
        break;
    }
    bd_strbuf again;
    bd_strbuf_init(&again, 0);
    bd_strbuf_json_number(&again, value);
    BD_ASSERT(!again.failed && strtod(again.data, NULL) == value);
    bd_strbuf_deinit(&again);
}

/* Recursion is as deep as the text, which DEPTH_MAX bounds. Returns values and keys. */
static size_t compare(bd_view view, const cJSON *item) {
    size_t nodes = 1;
    bd_view key, value;
    bd_view_iter iter;
    const cJSON *child = item->child;
    switch (bd_view_kind_of(view)) {
    case BD_VIEW_NULL:
        BD_ASSERT(cJSON_IsNull(item));
        break;
    case BD_VIEW_BOOL:
        BD_ASSERT(cJSON_IsBool(item) && (cJSON_IsTrue(item) != 0) == bd_view_true(view));
        break;
    case BD_VIEW_NUMBER:
        BD_ASSERT(cJSON_IsNumber(item));
        check_number(view, item->valuedouble);
        break;
    case BD_VIEW_STRING:
        BD_ASSERT(cJSON_IsString(item));
        check_string(view, item->valuestring);
        break;
    case BD_VIEW_ARRAY:
        BD_ASSERT(cJSON_IsArray(item) && bd_view_count(view) == (size_t)cJSON_GetArraySize(item));
        for (iter = bd_view_begin(view); bd_view_next_item(&iter, &value); child = child->next)
            nodes += compare(value, child);
        BD_ASSERT(!child);
        break;
    case BD_VIEW_OBJECT:
        BD_ASSERT(cJSON_IsObject(item));
        iter = bd_view_begin(view);
        for (; bd_view_next_member(&iter, &key, &value); child = child->next) {
            check_string(key, child->string);
            nodes += 1 + compare(value, child);
        }
        BD_ASSERT(!child);
        break;
    }
    return nodes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const bd_json_limits limits = {.depth_max = DEPTH_MAX, .nodes_max = SIZE_MAX / 2};
    bd_json_limits with_nul = limits;
    with_nul.allow_nul_escape = true;
    bd_json_scan scan;
    bd_error err;
    char *text = malloc(bytes + 1);
    BD_ASSERT(text);
    if (bytes > 0) memcpy(text, data, bytes);
    text[bytes] = '\0';
    bd_error_clear(&err);
    bd_status status = bd_json_check((const char *)data, bytes, &limits, &scan, &err);
    if (status == BD_OK) {
        cJSON *root = cJSON_ParseWithLength(text + scan.offset, bytes - scan.offset);
        BD_ASSERT(root);
        BD_ASSERT(compare(bd_view_root(text + scan.offset), root) == scan.nodes);
        cJSON_Delete(root);
        BD_ASSERT(bd_json_check((const char *)data, bytes, &with_nul, NULL, NULL) == BD_OK);
        bd_json_limits fewer = limits;
        fewer.nodes_max = scan.nodes - 1;
        status = bd_json_check((const char *)data, bytes, &fewer, NULL, &err);
        BD_ASSERT(status == BD_E_LIMIT);
    }
    fuzz_check_error(status, &err);
    free(text);
    return 0;
}
