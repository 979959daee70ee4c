/* tokenizer_support.h - golden lines and small helpers shared by the tokenizer's tests. Threads:
 * any. */
#ifndef BITDELTA_TESTS_TOKENIZER_SUPPORT_H
#define BITDELTA_TESTS_TOKENIZER_SUPPORT_H

#include "base_support.h"

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"
#include "bitdelta/tokenizer/tokenizer.h"
#include "tools/json_line.h"

#define TOKENIZER_COUNT 5
static const char *const tokenizer_names[TOKENIZER_COUNT] = {"gpt2", "llama3", "qwen3", "llama2",
                                                             "phi3-mini"};
#define ZEN_MINI_FILE "demo/zen-mini/tokenizer.json"

static inline bd_tokenizer *support_load(const char *path) {
    bd_tokenizer *tokenizer = NULL;
    bd_error err;
    bd_error_clear(&err);
    if (bd_tokenizer_load(&tokenizer, path, &err) != BD_OK)
        fail_msg("%s: %s (tests/data/unpack.sh unpacks the test data)", err.subject, err.message);
    return tokenizer;
}

static inline bd_tokenizer *support_load_named(const char *name) {
    char path[128];
    snprintf(path, sizeof path, "tests/data/tokenizers/%s/tokenizer.json", name);
    return support_load(path);
}

/* One line of a JSON lines file at a time. */
typedef struct support_lines {
    char *data;
    size_t bytes, at, number;
} support_lines;

static inline support_lines support_lines_open(const char *name, const char *file) {
    support_lines lines = {0};
    bd_error err;
    char path[128];
    snprintf(path, sizeof path, "tests/data/tokenizers/%s/%s", name, file);
    if (bd_file_read(path, (size_t)1 << 24, &lines.data, &lines.bytes, &err) != BD_OK)
        fail_msg("%s: %s", err.subject, err.message);
    return lines;
}

static inline bool support_lines_next(support_lines *lines, bd_json_span *object) {
    static const bd_json_limits limits = {
        .depth_max = 8, .nodes_max = 1000000, .allow_nul_escape = true};
    if (lines->at >= lines->bytes) {
        free(lines->data);
        return false;
    }
    char *line = lines->data + lines->at, *end = strchr(line, '\n');
    size_t bytes = end ? (size_t)(end - line) : lines->bytes - lines->at;
    bd_json_scan scan;
    bd_error err;
    if (bd_json_check(line, bytes, &limits, &scan, &err) != BD_OK) fail_msg("%s", err.message);
    *object = bd_json_span_of(line, bytes);
    lines->at += bytes + 1;
    lines->number++;
    return true;
}

/* The caller deinits. */
static inline bd_strbuf support_string(bd_json_span object, const char *key) {
    bd_strbuf text;
    bd_json_span value;
    bd_strbuf_init(&text, 0);
    bd_strbuf_puts(&text, "");
    assert_true(bd_json_object_get(object, key, &value));
    assert_true(bd_json_string_append(value, &text));
    assert_false(text.failed);
    return text;
}

static inline bool support_flag(bd_json_span object, const char *key) {
    bd_json_span value;
    bool flag;
    assert_true(bd_json_object_get(object, key, &value));
    assert_true(bd_json_bool(value, &flag));
    return flag;
}

/* Ids into a vec that must be empty; the caller deinits. */
static inline void support_ids(bd_json_span object, const char *key, bd_token_vec *ids) {
    bd_json_span list, item;
    size_t cursor = 0;
    assert_true(bd_json_object_get(object, key, &list));
    while (bd_json_array_next(list, &cursor, &item)) {
        if (ids->count == ids->capacity) {
            ids->capacity = ids->capacity ? ids->capacity * 2 : 64;
            ids->ids = realloc(ids->ids, ids->capacity * sizeof *ids->ids);
            assert_non_null(ids->ids);
        }
        assert_true(bd_json_int32(item, &ids->ids[ids->count++]));
    }
}

static inline bd_strbuf support_decode(const bd_tokenizer *t, const int32_t *ids, size_t count,
                                       bool skip_special) {
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_strbuf_puts(&text, "");
    assert_int_equal(bd_tokenizer_decode(t, ids, count, skip_special, &text, NULL), BD_OK);
    return text;
}

static inline void support_same_text(const bd_strbuf *got, const bd_strbuf *want, const char *name,
                                     size_t line) {
    if (got->len_bytes == want->len_bytes && !memcmp(got->data, want->data, want->len_bytes))
        return;
    fail_msg("%s, line %zu: got \"%s\", want \"%s\"", name, line, got->data, want->data);
}

static inline void support_same_ids(const bd_token_vec *got, const bd_token_vec *want,
                                    const char *name, size_t line) {
    for (size_t i = 0; i < got->count && i < want->count; i++)
        if (got->ids[i] != want->ids[i])
            fail_msg("%s, line %zu: id %zu is %d, want %d", name, line, i, got->ids[i],
                     want->ids[i]);
    if (got->count != want->count)
        fail_msg("%s, line %zu: %zu ids, want %zu", name, line, got->count, want->count);
}

#endif
