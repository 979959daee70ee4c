/* tokenizer_info.c - GET /tokenizer_info: what the base's tokenizer_config.json says, with the
 * special tokens, the class and the chat template as texts. Threads: made with the API object, read
 * by any. */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"
#include "bitdelta/base/log.h"
#include "completion.h"

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

/* Members that are written from what the server itself goes by. */
static bool is_ours(bd_view key) {
    static const char *const names[] = {"tokenizer_class", "bos_token", "eos_token",
                                        "pad_token",       "unk_token", "chat_template"};
    char text[32];
    const size_t bytes = bd_view_string_bytes(key);
    if (bytes >= sizeof text) return false;
    bd_view_string_copy(key, text);
    text[bytes] = '\0';
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(text, names[i]) == 0) return true;
    return false;
}

static void put_text(const char *name, const char *text, size_t bytes, bd_strbuf *out) {
    bd_strbuf_printf(out, ",\"%s\":", name);
    if (text)
        bd_strbuf_json_string(out, text, bytes);
    else
        bd_strbuf_puts(out, "null");
}

static void put_token(const char *name, const char *text, bd_strbuf *out) {
    put_text(name, text, text ? strlen(text) : 0, out);
}

/* Harnesses take its presence for a working tokenizer: without an end token there is none. */
static bool put_end(const bd_served *served, const bd_chat *chat, bd_strbuf *out) {
    size_t bytes = 0;
    const char *text = chat->eos_token;
    if (text) {
        bytes = strlen(text);
    } else if (served->eos_count > 0) {
        text = bd_tokenizer_token_content(served->tokenizer, served->eos_ids[0], &bytes);
    }
    if (text) put_text("eos_token", text, bytes, out);
    return text != NULL;
}

static bool write_info(const bd_served *served, const bd_chat *chat, bd_view root, bd_strbuf *out) {
    bd_view key, value, class = {NULL};
    bool first = true;
    bd_strbuf_puts(out, "{");
    for (bd_view_iter iter = bd_view_begin(root); bd_view_next_member(&iter, &key, &value);) {
        if (bd_view_bytes(key) == 17 && strncmp(key.at, "\"tokenizer_class\"", 17) == 0)
            class = value;
        if (is_ours(key)) continue;
        if (!first) bd_strbuf_puts(out, ",");
        first = false;
        bd_strbuf_append(out, key.at, bd_view_bytes(key));
        bd_strbuf_puts(out, ":");
        bd_strbuf_append(out, value.at, bd_view_bytes(value));
    }
    bd_strbuf_puts(out, first ? "\"tokenizer_class\":" : ",\"tokenizer_class\":");
    if (class.at && bd_view_kind_of(class) == BD_VIEW_STRING)
        bd_strbuf_append(out, class.at, bd_view_bytes(class));
    else
        bd_strbuf_puts(out, "\"PreTrainedTokenizerFast\"");
    put_token("bos_token", chat->bos_token, out);
    put_token("pad_token", chat->pad_token, out);
    put_token("unk_token", chat->unk_token, out);
    put_token("chat_template", chat->tmpl ? bd_chat_template_source(chat->tmpl) : NULL, out);
    const bool complete = put_end(served, chat, out);
    bd_strbuf_puts(out, "}");
    return complete;
}

void bd_tokenizer_info_make(const bd_served *served, const bd_chat *chat, bd_strbuf *out) {
    static const bd_json_limits limits = {
        .depth_max = 64, .nodes_max = (size_t)1 << 22, .allow_nul_escape = true};
    char path[4096], *text = NULL;
    size_t bytes = 0;
    bd_json_scan scan = {0};
    bd_error fault;
    bd_error_clear(&fault);
    bd_strbuf_init(out, 0);
    if (!served->tokenizer ||
        bd_path_join(path, sizeof path, served->dir, "tokenizer_config.json", &fault) != BD_OK ||
        !bd_file_exists(path))
        return;
    bd_status status = bd_file_read(path, CONFIG_BYTES_MAX, &text, &bytes, &fault);
    if (status == BD_OK) status = bd_json_check(text, bytes, &limits, &scan, &fault);
    if (status != BD_OK) bd_log_error("openai", "/tokenizer_info is not served", &fault);
    const bool usable = status == BD_OK &&
                        bd_view_kind_of(bd_view_root(text + scan.offset)) == BD_VIEW_OBJECT &&
                        write_info(served, chat, bd_view_root(text + scan.offset), out);
    if (!usable || out->failed) bd_strbuf_deinit(out);
    free(text);
}

bool bd_openai_tokenizer_info(const bd_openai *openai, bd_strbuf *out, bd_api_error *err) {
    const bd_strbuf *info = &openai->tokenizer_info;
    if (info->len_bytes == 0)
        return bd_api_fail(err, BD_API_URL, NULL,
                           "The base has no tokenizer_config.json that names its end token.");
    bd_strbuf_append(out, info->data, info->len_bytes);
    return !out->failed || bd_out_of_memory(err);
}
