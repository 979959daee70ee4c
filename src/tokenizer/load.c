/* load.c - from a file to a tokenizer, step by step. Threads: any, one per tokenizer being loaded.
 */
#include <stdlib.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"
#include "load.h"

static const bd_json_limits json_limits = {.depth_max = 32, .nodes_max = (size_t)12 << 20};

/* "truncation" and "padding" are left out on purpose: they are settings of a training batch, and a
 * server must not cut a prompt silently. */
static bd_status load_parts(bd_load *load, const cJSON *root) {
    const cJSON *model = bd_load_member(root, "model");
    const cJSON *added = bd_load_member(root, "added_tokens");
    bd_status s;
    if ((s = bd_load_model_options(load, model)) != BD_OK) return s;
    if ((s = bd_load_vocab(load, model, added)) != BD_OK) return s;
    if ((s = bd_load_pre_tokenizer(load, bd_load_member(root, "pre_tokenizer"))) != BD_OK) return s;
    if ((s = bd_load_decoder(load, bd_load_member(root, "decoder"))) != BD_OK) return s;
    if ((s = bd_load_merges(load, model)) != BD_OK) return s;
    if ((s = bd_load_normalizer(load, bd_load_member(root, "normalizer"))) != BD_OK) return s;
    if ((s = bd_load_added(load, added)) != BD_OK) return s;
    if ((s = bd_load_post_processor(load, bd_load_member(root, "post_processor"))) != BD_OK)
        return s;
    return bd_load_shortcuts(load);
}

static bd_status load_root(bd_tokenizer **out, const cJSON *root, const char *name, bd_error *err) {
    bd_load load = {.name = name, .err = err};
    if (!cJSON_IsObject(root))
        return bd_fail(err, BD_E_FORMAT, name, "a tokenizer must be a JSON object");
    load.tokenizer = calloc(1, sizeof *load.tokenizer);
    if (!load.tokenizer) return bd_load_memory(&load);
    bd_status s = load_parts(&load, root);
    free(load.texts);
    if (s != BD_OK) {
        bd_tokenizer_destroy(load.tokenizer);
        return s;
    }
    *out = load.tokenizer;
    return BD_OK;
}

bd_status bd_tokenizer_parse(bd_tokenizer **out, const char *json, size_t json_bytes,
                             const char *name, bd_error *err) {
    *out = NULL;
    if (json_bytes > BD_TOKENIZER_FILE_BYTES_MAX)
        return bd_fail(err, BD_E_LIMIT, name, "has more than %zu bytes",
                       BD_TOKENIZER_FILE_BYTES_MAX);
    bd_json_scan scan = {0};
    bd_error fault;
    bd_error_clear(&fault);
    bd_status s = bd_json_check(json, json_bytes, &json_limits, &scan, &fault);
    if (s != BD_OK) return bd_fail(err, s, name, "not usable JSON: %.300s", fault.message);
    cJSON *root =
        cJSON_ParseWithLengthOpts(json + scan.offset, json_bytes - scan.offset, NULL, false);
    if (!root) return bd_fail(err, BD_E_MEMORY, name, "out of memory while it was parsed");
    s = load_root(out, root, name, err);
    cJSON_Delete(root);
    return s;
}

bd_status bd_tokenizer_load(bd_tokenizer **out, const char *path, bd_error *err) {
    *out = NULL;
    char *json = NULL;
    size_t bytes = 0;
    bd_status s = bd_file_read(path, BD_TOKENIZER_FILE_BYTES_MAX, &json, &bytes, err);
    if (s != BD_OK) return s;
    bd_error fault;
    bd_error_clear(&fault);
    s = bd_tokenizer_parse(out, json, bytes, path, &fault);
    free(json);
    /* Where only the message is shown, it has to say which file it is about. */
    return s == BD_OK ? BD_OK : bd_fail(err, s, path, "%.200s: %.240s", path, fault.message);
}
