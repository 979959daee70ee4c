/* chat_request.c - the fields of POST /v1/chat/completions: those of completions, and messages.
 * Threads: pure. */
#include <string.h>

#include "chat.h"

static bd_view last_member(bd_view object, const char *name) {
    bd_view key, value, found = {NULL};
    size_t bytes = strlen(name);
    char text[32];
    for (bd_view_iter iter = bd_view_begin(object); bd_view_next_member(&iter, &key, &value);) {
        if (bd_view_string_bytes(key) != bytes) continue;
        bd_view_string_copy(key, text);
        if (memcmp(text, name, bytes) == 0) found = value;
    }
    return found;
}

static bool is_text(bd_view value, const char *text) {
    char copy[32];
    size_t bytes = strlen(text);
    if (!value.at || bd_view_kind_of(value) != BD_VIEW_STRING ||
        bd_view_string_bytes(value) != bytes)
        return false;
    bd_view_string_copy(value, copy);
    return memcmp(copy, text, bytes) == 0;
}

static bool check_role(const char *name, bd_view role, size_t index, bd_api_error *err) {
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    if (!role.at || bd_view_kind_of(role) == BD_VIEW_NULL)
        return bd_api_fail(err, BD_API_MISSING, name, "Missing required parameter: '%s[%zu].role'.",
                           name, index);
    if (bd_view_kind_of(role) != BD_VIEW_STRING)
        return bd_field_wrong_type(name, "a string as 'role'", role, err);
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
        if (is_text(role, roles[i])) return true;
    return bd_api_fail(
        err, BD_API_VALUE, name,
        "Invalid '%s[%zu].role': must be system, developer, user, assistant or tool.", name, index);
}

static bool check_parts(const char *name, bd_view parts, size_t index, bd_api_error *err) {
    bd_view part;
    for (bd_view_iter iter = bd_view_begin(parts); bd_view_next_item(&iter, &part);) {
        if (bd_view_kind_of(part) != BD_VIEW_OBJECT)
            return bd_field_wrong_type(name, "content parts that are objects", part, err);
        if (!is_text(last_member(part, "type"), "text"))
            return bd_api_fail(err, BD_API_UNSUPPORTED, name,
                               "Invalid '%s[%zu].content': only parts of the type 'text' are "
                               "supported by this server.",
                               name, index);
        bd_view text = last_member(part, "text");
        if (!text.at || bd_view_kind_of(text) != BD_VIEW_STRING)
            return bd_api_fail(err, BD_API_TYPE, name,
                               "Invalid type for '%s[%zu].content': a text part needs a string as "
                               "'text'.",
                               name, index);
    }
    return true;
}

static bool check_message(const char *name, bd_view message, size_t index, bd_api_error *err) {
    if (bd_view_kind_of(message) != BD_VIEW_OBJECT)
        return bd_field_wrong_type(name, "an array of objects", message, err);
    bd_view role = last_member(message, "role"), content = last_member(message, "content");
    if (!check_role(name, role, index, err)) return false;
    bd_view_kind kind = content.at ? bd_view_kind_of(content) : BD_VIEW_NULL;
    if (kind == BD_VIEW_STRING) return true;
    if (kind == BD_VIEW_ARRAY) return check_parts(name, content, index, err);
    if (kind == BD_VIEW_NULL && is_text(role, "assistant")) return true;
    if (kind == BD_VIEW_NULL)
        return bd_api_fail(err, BD_API_MISSING, name,
                           "Missing required parameter: '%s[%zu].content'.", name, index);
    return bd_field_wrong_type(name, "a string or an array of parts as 'content'", content, err);
}

bool bd_chat_parse_messages(const bd_field_context *context, const char *name, bd_view value,
                            bd_api_error *err) {
    bd_chat_input *input = context->object;
    bd_view message;
    size_t index = 0;
    if (bd_view_kind_of(value) != BD_VIEW_ARRAY)
        return bd_field_wrong_type(name, "an array of messages", value, err);
    for (bd_view_iter iter = bd_view_begin(value); bd_view_next_item(&iter, &message); index++)
        if (!check_message(name, message, index, err)) return false;
    if (index == 0)
        return bd_api_fail(err, BD_API_EMPTY_ARRAY, name, "Invalid '%s': an empty array.", name);
    input->messages = value;
    return true;
}

bool bd_chat_parse_kwargs(const bd_field_context *context, const char *name, bd_view value,
                          bd_api_error *err) {
    static const char *const taken[] = {"messages", "tools", "documents", "add_generation_prompt"};
    bd_chat_input *input = context->object;
    if (bd_view_kind_of(value) != BD_VIEW_OBJECT)
        return bd_field_wrong_type(name, "an object", value, err);
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++)
        if (last_member(value, taken[i]).at)
            return bd_api_fail(err, BD_API_VALUE, name,
                               "Invalid '%s': '%s' is not a variable that may be set here.", name,
                               taken[i]);
    input->kwargs = value;
    return true;
}

static bool parse_documents(const bd_field_context *context, const char *name, bd_view value,
                            bd_api_error *err) {
    bd_chat_input *input = context->object;
    if (bd_view_kind_of(value) != BD_VIEW_ARRAY)
        return bd_field_wrong_type(name, "an array", value, err);
    input->documents = value;
    return true;
}

/* What asks for no tool is fine, since there are none. */
static bool parse_tool_choice(const bd_field_context *context, const char *name, bd_view value,
                              bd_api_error *err) {
    (void)context;
    return is_text(value, "none") || is_text(value, "auto") ||
           bd_api_fail(err, BD_API_UNSUPPORTED, name, "'%s' is not supported by this server.",
                       name);
}

static bool refuse_true(const bd_field_context *context, const char *name, bd_view value,
                        bd_api_error *err) {
    bool flag = false;
    (void)context;
    if (!bd_field_bool(name, value, &flag, err)) return false;
    return !flag || bd_api_fail(err, BD_API_UNSUPPORTED, name,
                                "'%s' is not supported by this server.", name);
}

#define AT(member)   .offset = offsetof(bd_chat_input, member)
#define SENT(member) .sent_offset = offsetof(bd_chat_input, member)

static const bd_field chat_fields[] = {
    {.name = "messages", .kind = BD_FIELD_CUSTOM, .parse = bd_chat_parse_messages},
    {.name = "max_completion_tokens",
     .kind = BD_FIELD_INT,
     .high = INT32_MAX,
     AT(max_tokens),
     SENT(max_tokens_sent)},
    {.name = "logprobs", .kind = BD_FIELD_BOOL, AT(logprobs)},
    {.name = "top_logprobs",
     .kind = BD_FIELD_INT,
     .high = BD_LOGPROBS_MAX,
     AT(top_logprobs),
     SENT(top_logprobs_sent)},
    {.name = "echo", .kind = BD_FIELD_CUSTOM, .parse = refuse_true},
    {.name = "add_generation_prompt",
     .kind = BD_FIELD_BOOL,
     AT(add_generation_prompt),
     SENT(add_generation_sent)},
    {.name = "continue_final_message", .kind = BD_FIELD_BOOL, AT(continue_final)},
    {.name = "chat_template_kwargs", .kind = BD_FIELD_CUSTOM, .parse = bd_chat_parse_kwargs},
    {.name = "documents", .kind = BD_FIELD_CUSTOM, .parse = parse_documents},
    {.name = "chat_template", .kind = BD_FIELD_REFUSED},
    {.name = "tools", .kind = BD_FIELD_REFUSED},
    {.name = "functions", .kind = BD_FIELD_REFUSED},
    {.name = "tool_choice", .kind = BD_FIELD_CUSTOM, .parse = parse_tool_choice},
    {.name = "function_call", .kind = BD_FIELD_CUSTOM, .parse = parse_tool_choice},
    {.name = "audio", .kind = BD_FIELD_REFUSED},
    {.name = "prediction", .kind = BD_FIELD_REFUSED},
};

#undef AT
#undef SENT

/* What goes on with a message does not begin another. */
bool bd_chat_check_continue(bd_chat_input *input, bd_api_error *err) {
    if (!input->continue_final) return true;
    if (input->add_generation_sent && input->add_generation_prompt)
        return bd_api_fail(err, BD_API_VALUE, "continue_final_message",
                           "'continue_final_message' and 'add_generation_prompt' cannot both be "
                           "true.");
    input->add_generation_prompt = false;
    return true;
}

static bool check_chat(bd_completion_request *out, const bd_chat_input *input, bd_api_error *err) {
    if (!input->messages.at)
        return bd_api_fail(err, BD_API_MISSING, "messages",
                           "Missing required parameter: 'messages'.");
    if (input->top_logprobs_sent && input->top_logprobs > 0 && !input->logprobs)
        return bd_api_fail(err, BD_API_VALUE, "top_logprobs",
                           "'top_logprobs' is only allowed when 'logprobs' is true.");
    if (!bd_chat_check_continue(&out->chat, err)) return false;
    if (input->max_tokens_sent) out->max_tokens = input->max_tokens;
    out->limit_name = input->max_tokens_sent ? "max_completion_tokens" : "max_tokens";
    out->max_tokens_sent = out->max_tokens_sent || input->max_tokens_sent;
    if (input->logprobs) out->logprobs = input->top_logprobs;
    return true;
}

bool bd_chat_request_parse(const char *body, size_t bytes, uint32_t prompts_max,
                           bd_completion_request *out, bd_api_error *err) {
    bd_completion_request_defaults(out);
    out->is_chat = true;
    out->prompt_name = "messages";
    out->max_tokens = INT32_MAX; /* what the context leaves */
    out->add_special_tokens = false;
    out->chat.add_generation_prompt = true;
    bd_view root;
    if (!bd_body_open(body, bytes, &root, &out->arena, err)) return false;
    const bd_field_context chat = {.arena = out->arena, .object = &out->chat};
    const bd_field_context shared = {
        .arena = out->arena, .object = out, .prompts_max = prompts_max};
    const bd_field *fields;
    uint32_t count = bd_completion_shared_fields(&fields);
    if (!bd_fields_parse(&chat, chat_fields, sizeof chat_fields / sizeof chat_fields[0], root,
                         err) ||
        !bd_fields_parse(&shared, fields, count, root, err) || !check_chat(out, &out->chat, err))
        return false;
    out->prompts = bd_arena_alloc(out->arena, 1, sizeof *out->prompts);
    if (!out->prompts) return bd_out_of_memory(err);
    out->prompt_count = 1;
    return bd_completion_request_check(out, prompts_max, err);
}
