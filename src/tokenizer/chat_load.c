/* chat_load.c - the chat template and special tokens of a model directory. Threads: any, one per
 * object being loaded. */
#include <cjson/cJSON.h>
#include <stdlib.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"
#include "chat_internal.h"

enum { PATH_BYTES = 4096 };
#define CONFIG_BYTES_MAX ((size_t)16 << 20)

typedef struct chat_load {
    const bd_chat_sources *sources;
    bd_chat *chat;
    bd_error *err;
    cJSON *config; /* tokenizer_config.json; NULL: there is none */
    char path[PATH_BYTES];
} chat_load;

static bd_status out_of_memory(const chat_load *load) {
    return bd_fail(load->err, BD_E_MEMORY, load->path, "out of memory");
}

static const cJSON *member(const cJSON *object, const char *key) {
    const cJSON *found = NULL, *item;
    cJSON_ArrayForEach(item, object) {
        if (item->string && strcmp(item->string, key) == 0) found = item;
    }
    return found;
}

/* load->path = dir/name; *there. */
static bd_status find_file(chat_load *load, const char *name, bool *there) {
    bd_status status =
        bd_path_join(load->path, sizeof load->path, load->sources->dir, name, load->err);
    *there = status == BD_OK && bd_file_exists(load->path);
    return status;
}

/* The template in load->path or inside the file of that name. One that is refused is kept as the
 * fault. */
static bd_status take_template(chat_load *load, const char *text, size_t bytes) {
    bd_chat *chat = load->chat;
    chat->template_path = strdup(load->path);
    if (!chat->template_path) return out_of_memory(load);
    bd_status status = bd_chat_template_parse(&chat->owned, text, bytes, load->path, &chat->fault);
    if (status == BD_E_MEMORY) return out_of_memory(load);
    if (status == BD_OK) bd_error_clear(&chat->fault);
    chat->tmpl = chat->owned;
    return BD_OK;
}

static bd_status read_template(chat_load *load) {
    char *text = NULL;
    size_t bytes = 0;
    bd_status status =
        bd_file_read(load->path, BD_CHAT_TEMPLATE_BYTES_MAX, &text, &bytes, load->err);
    if (status == BD_OK) status = take_template(load, text, bytes);
    free(text);
    return status;
}

static bd_status read_json(chat_load *load, cJSON **out) {
    static const bd_json_limits limits = {.depth_max = 32, .nodes_max = (size_t)1 << 20};
    char *text = NULL;
    size_t bytes = 0;
    bd_json_scan scan = {0};
    bd_error fault;
    bd_error_clear(&fault);
    *out = NULL;
    bd_status status = bd_file_read(load->path, CONFIG_BYTES_MAX, &text, &bytes, load->err);
    if (status != BD_OK) return status;
    status = bd_json_check(text, bytes, &limits, &scan, &fault);
    if (status != BD_OK)
        status = bd_fail(load->err, status, load->path, "not usable JSON: %.300s", fault.message);
    else if (!(*out = cJSON_Parse(text + scan.offset)))
        status = out_of_memory(load);
    free(text);
    return status;
}

/* A string, or the element called "default" of a list of {name, template}. *found NULL: neither. */
static void default_template(const cJSON *value, const char **found) {
    const cJSON *item;
    *found = cJSON_IsString(value) ? value->valuestring : NULL;
    if (!cJSON_IsArray(value)) return;
    cJSON_ArrayForEach(item, value) {
        const cJSON *name = member(item, "name"), *text = member(item, "template");
        if (cJSON_IsString(name) && cJSON_IsString(text) &&
            strcmp(name->valuestring, "default") == 0)
            *found = text->valuestring;
    }
}

/* A token is its text or an object with "content". */
static bd_status take_token(chat_load *load, const char *key, const char *fallback, char **out) {
    const cJSON *value = member(load->config, key);
    if (cJSON_IsObject(value)) value = member(value, "content");
    const char *text = cJSON_IsString(value) ? value->valuestring : NULL;
    if (!load->config) text = fallback;
    if (text && !(*out = strdup(text))) return out_of_memory(load);
    return BD_OK;
}

static bd_status read_config(chat_load *load) {
    const bd_chat *fallback = load->sources->fallback;
    bool there;
    bd_status status = find_file(load, "tokenizer_config.json", &there);
    if (status == BD_OK && there) status = read_json(load, &load->config);
    if (status != BD_OK) return status;
    bd_chat *chat = load->chat;
    const struct {
        const char *key, *fallback;
        char **out;
    } tokens[] = {
        {"bos_token", fallback ? fallback->bos_token : NULL, &chat->bos_token},
        {"eos_token", fallback ? fallback->eos_token : NULL, &chat->eos_token},
        {"pad_token", fallback ? fallback->pad_token : NULL, &chat->pad_token},
        {"unk_token", fallback ? fallback->unk_token : NULL, &chat->unk_token},
    };
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0] && status == BD_OK; i++)
        status = take_token(load, tokens[i].key, tokens[i].fallback, tokens[i].out);
    return status;
}

/* chat_template.json holds {"chat_template": ...}, as older processors wrote it. */
static bd_status read_legacy(chat_load *load, bool *found) {
    const char *text = NULL;
    cJSON *root;
    bd_status status = find_file(load, "chat_template.json", found);
    if (status != BD_OK || !*found) return status;
    if ((status = read_json(load, &root)) != BD_OK) return status;
    default_template(member(root, "chat_template"), &text);
    *found = text != NULL;
    if (text) status = take_template(load, text, strlen(text));
    cJSON_Delete(root);
    return status;
}

static bd_status find_template(chat_load *load) {
    const bd_chat_sources *sources = load->sources;
    const char *text = NULL;
    bool there;
    bd_status status;
    if (sources->override_path) {
        if (strlen(sources->override_path) >= sizeof load->path)
            return bd_fail(load->err, BD_E_LIMIT, "chat_template", "the path is too long");
        memcpy(load->path, sources->override_path, strlen(sources->override_path) + 1);
        return read_template(load);
    }
    if ((status = find_file(load, "chat_template.jinja", &there)) != BD_OK) return status;
    if (there) return read_template(load);
    default_template(member(load->config, "chat_template"), &text);
    if ((status = find_file(load, "tokenizer_config.json", &there)) != BD_OK) return status;
    if (text) return take_template(load, text, strlen(text));
    status = read_legacy(load, &there);
    if (status != BD_OK || there || !sources->fallback) return status;
    load->chat->tmpl = sources->fallback->tmpl;
    load->chat->fault = sources->fallback->fault;
    return BD_OK;
}

void bd_chat_destroy(bd_chat *chat) {
    if (!chat) return;
    bd_chat_template_destroy(chat->owned);
    free(chat->template_path);
    free(chat->bos_token);
    free(chat->eos_token);
    free(chat->pad_token);
    free(chat->unk_token);
    free(chat);
}

bd_status bd_chat_load(bd_chat **out, const bd_chat_sources *sources, bd_error *err) {
    chat_load load = {.sources = sources, .err = err};
    *out = NULL;
    load.chat = calloc(1, sizeof *load.chat);
    if (!load.chat) return bd_fail(err, BD_E_MEMORY, sources->dir, "out of memory");
    bd_status status = read_config(&load);
    if (status == BD_OK) status = find_template(&load);
    cJSON_Delete(load.config);
    if (status != BD_OK) {
        bd_chat_destroy(load.chat);
        return status;
    }
    *out = load.chat;
    return BD_OK;
}
