/* chat_messages.c - a request's messages as the model's template takes them, and the prompt.
 * Threads: any. */
#include <string.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/json_scan.h"
#include "bitdelta/openai/openai.h"
#include "chat.h"

static bool is_key(bd_view key, const char *name) {
    char text[32];
    size_t bytes = strlen(name);
    if (bd_view_string_bytes(key) != bytes) return false;
    bd_view_string_copy(key, text);
    return memcmp(text, name, bytes) == 0;
}

static void put_raw(bd_view value, bd_strbuf *out) {
    bd_strbuf_append(out, value.at, bd_view_bytes(value));
}

static void put_key(bd_view key, bool *first, bd_strbuf *out) {
    if (!*first) bd_strbuf_puts(out, ",");
    *first = false;
    put_raw(key, out);
    bd_strbuf_puts(out, ":");
}

/* ---- Content ---- */

static bd_view part_text(bd_view part) {
    bd_view key, value, text = {NULL};
    for (bd_view_iter iter = bd_view_begin(part); bd_view_next_member(&iter, &key, &value);)
        if (is_key(key, "text")) text = value;
    return text;
}

/* The literal with the mark before its closing quote. */
static void put_marked(bd_view text, const char *mark, bd_strbuf *out) {
    bd_strbuf_append(out, text.at, bd_view_bytes(text) - 1);
    if (mark) bd_strbuf_puts(out, mark);
    bd_strbuf_puts(out, "\"");
}

static void put_joined_parts(bd_view parts, const char *mark, bd_strbuf *out) {
    bd_view part;
    bd_strbuf_puts(out, "\"");
    for (bd_view_iter iter = bd_view_begin(parts); bd_view_next_item(&iter, &part);) {
        bd_view text = part_text(part);
        /* The inside of the literal, escapes and all. */
        bd_strbuf_append(out, text.at + 1, bd_view_bytes(text) - 2);
    }
    if (mark) bd_strbuf_puts(out, mark);
    bd_strbuf_puts(out, "\"");
}

/* The last part's text carries the mark. */
static void put_parts(bd_view parts, const char *mark, bd_strbuf *out) {
    bd_view part;
    size_t left = bd_view_count(parts);
    bd_strbuf_puts(out, "[");
    for (bd_view_iter iter = bd_view_begin(parts); bd_view_next_item(&iter, &part); left--) {
        if (left > 1) {
            put_raw(part, out);
            bd_strbuf_puts(out, ",");
            continue;
        }
        bd_strbuf_puts(out, "{\"type\":\"text\",\"text\":");
        put_marked(part_text(part), mark, out);
        bd_strbuf_puts(out, "}");
    }
    bd_strbuf_puts(out, "]");
}

static void put_content(bd_view content, const bd_chat_template *tmpl, const char *mark,
                        bd_strbuf *out) {
    bool parts = bd_chat_template_wants_parts(tmpl);
    bd_view_kind kind = bd_view_kind_of(content);
    if (kind == BD_VIEW_ARRAY && !parts) {
        put_joined_parts(content, mark, out);
    } else if (kind == BD_VIEW_ARRAY && mark) {
        put_parts(content, mark, out);
    } else if (kind == BD_VIEW_STRING && parts && !bd_chat_template_tests_string(tmpl)) {
        bd_strbuf_puts(out, "[{\"type\":\"text\",\"text\":");
        put_marked(content, mark, out);
        bd_strbuf_puts(out, "}]");
    } else if (kind == BD_VIEW_STRING) {
        put_marked(content, mark, out);
    } else {
        put_raw(content, out);
    }
}

/* ---- Tool calls: clients send arguments as JSON in a string, templates expect the object ---- */

static bool put_arguments(bd_view value, bd_arena *arena, bd_strbuf *out) {
    static const bd_json_limits limits = {
        .depth_max = 32, .nodes_max = (size_t)1 << 20, .allow_nul_escape = true};
    bd_json_scan scan;
    if (bd_view_kind_of(value) == BD_VIEW_STRING) {
        size_t bytes = bd_view_string_bytes(value);
        char *text = bd_arena_alloc(arena, bytes + 1, 1);
        if (!text) return false;
        bd_view_string_copy(value, text);
        if (bd_json_check(text, bytes, &limits, &scan, NULL) == BD_OK && text[scan.offset] == '{') {
            bd_strbuf_append(out, text + scan.offset, bytes - scan.offset);
            return true;
        }
    }
    put_raw(value, out);
    return true;
}

static bool put_function(bd_view function, bd_arena *arena, bd_strbuf *out) {
    bd_view key, value;
    bool first = true, ok = true;
    bd_strbuf_puts(out, "{");
    for (bd_view_iter iter = bd_view_begin(function);
         ok && bd_view_next_member(&iter, &key, &value);) {
        put_key(key, &first, out);
        if (is_key(key, "arguments"))
            ok = put_arguments(value, arena, out);
        else
            put_raw(value, out);
    }
    bd_strbuf_puts(out, "}");
    return ok;
}

static bool put_tool_calls(bd_view calls, bd_arena *arena, bd_strbuf *out) {
    bd_view call, key, value;
    bool first_call = true, ok = true;
    bd_strbuf_puts(out, "[");
    for (bd_view_iter iter = bd_view_begin(calls); ok && bd_view_next_item(&iter, &call);) {
        bool first = true;
        if (!first_call) bd_strbuf_puts(out, ",");
        first_call = false;
        if (bd_view_kind_of(call) != BD_VIEW_OBJECT) {
            put_raw(call, out);
            continue;
        }
        bd_strbuf_puts(out, "{");
        for (bd_view_iter inner = bd_view_begin(call);
             ok && bd_view_next_member(&inner, &key, &value);) {
            put_key(key, &first, out);
            if (is_key(key, "function") && bd_view_kind_of(value) == BD_VIEW_OBJECT)
                ok = put_function(value, arena, out);
            else
                put_raw(value, out);
        }
        bd_strbuf_puts(out, "}");
    }
    bd_strbuf_puts(out, "]");
    return ok;
}

/* ---- Messages ---- */

static bd_view last_content(bd_view message) {
    bd_view key, value, found = {NULL};
    for (bd_view_iter iter = bd_view_begin(message); bd_view_next_member(&iter, &key, &value);)
        if (is_key(key, "content")) found = value;
    return found;
}

/* Later members of the same name count when the JSON is read, so all may be copied; but of contents
 * only the last was checked. */
static bool put_message(bd_view message, const bd_chat_template *tmpl, const char *mark,
                        bd_arena *arena, bd_strbuf *out) {
    bd_view key, value, content = last_content(message);
    bool first = true, ok = true;
    bd_strbuf_puts(out, "{");
    for (bd_view_iter iter = bd_view_begin(message);
         ok && bd_view_next_member(&iter, &key, &value);) {
        put_key(key, &first, out);
        if (is_key(key, "role") && bd_view_kind_of(value) == BD_VIEW_STRING &&
            is_key(value, "developer") && !bd_chat_template_mentions(tmpl, "developer"))
            bd_strbuf_puts(out, "\"system\"");
        else if (value.at == content.at)
            put_content(value, tmpl, mark, out);
        else if (is_key(key, "tool_calls") && bd_view_kind_of(value) == BD_VIEW_ARRAY)
            ok = put_tool_calls(value, arena, out);
        else
            put_raw(value, out);
    }
    bd_strbuf_puts(out, "}");
    return ok;
}

bool bd_chat_messages_write(bd_view messages, const bd_chat_template *tmpl, const char *mark,
                            bd_arena *arena, bd_strbuf *out) {
    bd_view message;
    size_t left = bd_view_count(messages);
    bd_strbuf_puts(out, "[");
    for (bd_view_iter iter = bd_view_begin(messages); bd_view_next_item(&iter, &message); left--) {
        if (!put_message(message, tmpl, left == 1 ? mark : NULL, arena, out)) return false;
        if (left > 1) bd_strbuf_puts(out, ",");
    }
    bd_strbuf_puts(out, "]");
    return !out->failed;
}

/* ---- The prompt ---- */

static bool render_failed(bd_status status, const bd_error *fault, bd_api_error *err) {
    if (status == BD_E_MEMORY) return bd_out_of_memory(err);
    if (status == BD_E_ARGUMENT)
        return bd_api_fail(err, BD_API_VALUE, "messages",
                           "The chat template does not accept these messages: %.300s",
                           fault->message);
    return bd_api_fail(err, BD_API_VALUE, "messages",
                       "The chat template cannot handle these messages: %.300s.", fault->message);
}

/* ---- Going on with the last message ---- */

/* "continue-", 32 hex digits and a space, whose absence in the rendering shows that the template
 * trims messages. No message holds it, so it stands where the last one ends. */
enum { MARK_BYTES = 42 };

static void make_mark(char mark[MARK_BYTES + 1]) {
    memcpy(mark, "continue-", 9);
    uint8_t random[16];
    bd_openai_random(random, sizeof random);
    bd_openai_hex(random, 32, mark + 9);
    memcpy(mark + MARK_BYTES - 1, " ", 2);
}

static bool has_text(bd_view messages) {
    bd_view message, last = {NULL};
    for (bd_view_iter iter = bd_view_begin(messages); bd_view_next_item(&iter, &message);)
        last = message;
    bd_view content = last_content(last);
    if (!content.at) return false;
    bd_view_kind kind = bd_view_kind_of(content);
    return kind == BD_VIEW_STRING || (kind == BD_VIEW_ARRAY && bd_view_count(content) > 0);
}

/* Cuts the rendering, which begins at `from`, behind the last message. */
static bool cut_at_mark(bd_strbuf *out, size_t from, const char *mark, bd_api_error *err) {
    size_t at = out->len_bytes, bytes = MARK_BYTES - 1;
    while (at >= from + bytes && memcmp(out->data + at - bytes, mark, bytes) != 0)
        at--;
    if (at < from + bytes)
        return bd_api_fail(err, BD_API_VALUE, "messages",
                           "The chat template does not show the last message as it is, so it "
                           "cannot be continued.");
    const bool trims = at == out->len_bytes || out->data[at] != ' ';
    at -= bytes;
    while (trims && at > from && strchr(" \t\n\v\f\r", out->data[at - 1]) && out->data[at - 1])
        at--;
    out->len_bytes = at;
    out->data[at] = '\0';
    return true;
}

bool bd_chat_render(const bd_chat *chat, const bd_chat_input *input, bd_arena *arena,
                    bd_strbuf *out, bd_api_error *err) {
    if (!chat->tmpl && chat->fault.status != BD_OK)
        return bd_api_fail(err, BD_API_UNSUPPORTED, NULL,
                           "This model's chat template is not supported by this server: %.300s.",
                           chat->fault.message);
    if (!chat->tmpl)
        return bd_api_fail(err, BD_API_UNSUPPORTED, NULL,
                           "This model has no chat template. Use /v1/completions.");
    char mark[MARK_BYTES + 1];
    const size_t from = out->len_bytes;
    if (input->continue_final && !has_text(input->messages))
        return bd_api_fail(err, BD_API_VALUE, "messages",
                           "The last message has no text that could be continued.");
    if (input->continue_final) make_mark(mark);
    bd_strbuf messages;
    bd_strbuf_init(&messages, 0);
    if (!bd_chat_messages_write(input->messages, chat->tmpl, input->continue_final ? mark : NULL,
                                arena, &messages)) {
        bd_strbuf_deinit(&messages);
        return bd_out_of_memory(err);
    }
    bd_chat_variable variables[10];
    size_t count = 0;
    const struct {
        const char *name, *text;
    } tokens[] = {{"bos_token", chat->bos_token},
                  {"eos_token", chat->eos_token},
                  {"pad_token", chat->pad_token},
                  {"unk_token", chat->unk_token}};
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++)
        if (tokens[i].text)
            variables[count++] = (bd_chat_variable){.name = tokens[i].name,
                                                    .text = tokens[i].text,
                                                    .text_bytes = strlen(tokens[i].text)};
    if (input->kwargs.at) variables[count++] = (bd_chat_variable){.json = input->kwargs.at};
    variables[count++] = (bd_chat_variable){.name = "messages", .json = messages.data};
    variables[count++] = (bd_chat_variable){.name = "tools", .json = "null"};
    variables[count++] = (bd_chat_variable){
        .name = "documents", .json = input->documents.at ? input->documents.at : "null"};
    variables[count++] = (bd_chat_variable){
        .name = "add_generation_prompt", .json = input->add_generation_prompt ? "true" : "false"};
    bd_error fault;
    bd_error_clear(&fault);
    bd_status status = bd_chat_template_render(chat->tmpl, variables, count,
                                               (int64_t)bd_wall_seconds(), out, &fault);
    bd_strbuf_deinit(&messages);
    if (status != BD_OK) return render_failed(status, &fault, err);
    return !input->continue_final || cut_at_mark(out, from, mark, err);
}
