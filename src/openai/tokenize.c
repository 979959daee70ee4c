/* tokenize.c - POST /tokenize and /detokenize. Threads: any. */
#include <inttypes.h>
#include <string.h>

#include "completion.h"

typedef struct tokenize_request {
    bd_text model, prompt;
    bool add_special_tokens, add_special_sent, return_token_strs;
    bd_chat_input chat;
} tokenize_request;

static const bd_field tokenize_fields[] = {
    {.name = "model", .kind = BD_FIELD_STRING, .offset = offsetof(tokenize_request, model)},
    {.name = "prompt", .kind = BD_FIELD_STRING, .offset = offsetof(tokenize_request, prompt)},
    {.name = "add_special_tokens",
     .kind = BD_FIELD_BOOL,
     .offset = offsetof(tokenize_request, add_special_tokens),
     .sent_offset = offsetof(tokenize_request, add_special_sent)},
    {.name = "return_token_strs",
     .kind = BD_FIELD_BOOL,
     .offset = offsetof(tokenize_request, return_token_strs)},
};

static const bd_field chat_fields[] = {
    {.name = "messages", .kind = BD_FIELD_CUSTOM, .parse = bd_chat_parse_messages},
    {.name = "add_generation_prompt",
     .kind = BD_FIELD_BOOL,
     .offset = offsetof(bd_chat_input, add_generation_prompt),
     .sent_offset = offsetof(bd_chat_input, add_generation_sent)},
    {.name = "continue_final_message",
     .kind = BD_FIELD_BOOL,
     .offset = offsetof(bd_chat_input, continue_final)},
    {.name = "chat_template_kwargs", .kind = BD_FIELD_CUSTOM, .parse = bd_chat_parse_kwargs},
    {.name = "tools", .kind = BD_FIELD_REFUSED},
};

static bool find_tokenizer(const bd_openai *openai, const bd_tenant *tenant, const bd_text *model,
                           const bd_served **served, bd_api_error *err) {
    if (!bd_openai_find_model(openai, tenant, model, served, err)) return false;
    if ((*served)->tokenizer) return true;
    return bd_api_fail(err, BD_API_VALUE, "model", "This model has no tokenizer.");
}

static void write_tokens(const bd_served *served, const bd_token_vec *tokens, bool strings,
                         bd_strbuf *out) {
    bd_strbuf_printf(out, "{\"count\":%zu,\"max_model_len\":%" PRIu32 ",\"tokens\":[",
                     tokens->count, served->max_model_len);
    for (size_t i = 0; i < tokens->count; i++)
        bd_strbuf_printf(out, "%s%" PRId32, i > 0 ? "," : "", tokens->ids[i]);
    bd_strbuf_puts(out, "],\"token_strs\":");
    if (!strings) {
        bd_strbuf_puts(out, "null}");
        return;
    }
    for (size_t i = 0; i < tokens->count; i++) {
        size_t bytes = 0;
        const char *content = bd_tokenizer_token_content(served->tokenizer, tokens->ids[i], &bytes);
        bd_strbuf_puts(out, i > 0 ? "," : "[");
        bd_strbuf_json_string(out, content, bytes);
    }
    bd_strbuf_puts(out, tokens->count > 0 ? "]}" : "[]}");
}

static bool parse_tokenize(const char *body, size_t bytes, bd_arena **arena,
                           tokenize_request *request, bd_api_error *err) {
    bd_view root;
    if (!bd_body_open(body, bytes, &root, arena, err)) return false;
    const bd_field_context context = {.arena = *arena, .object = request};
    const bd_field_context chat = {.arena = *arena, .object = &request->chat};
    if (!bd_fields_parse(&context, tokenize_fields,
                         sizeof tokenize_fields / sizeof tokenize_fields[0], root, err) ||
        !bd_fields_parse(&chat, chat_fields, sizeof chat_fields / sizeof chat_fields[0], root, err))
        return false;
    if (!bd_chat_check_continue(&request->chat, err)) return false;
    if (request->prompt.data || request->chat.messages.at) {
        if (!request->add_special_sent) request->add_special_tokens = request->prompt.data != NULL;
        return true;
    }
    return bd_api_fail(err, BD_API_MISSING, "prompt", "Missing required parameter: 'prompt'.");
}

/* The conversation as text, unless a prompt was sent. */
static bool prompt_text(const bd_openai *openai, const bd_served *served, bd_arena *arena,
                        tokenize_request *request, bd_strbuf *rendered, bd_api_error *err) {
    const bd_chat *chat = NULL;
    if (request->prompt.data) return true;
    if (!bd_chat_book_get(openai->chats, served, &chat, err)) return false;
    bool ok = bd_chat_render(chat, &request->chat, arena, rendered, err);
    bd_chat_book_release(openai->chats, chat);
    if (!ok && !err->param) err->param = "messages";
    request->prompt = (bd_text){rendered->data ? rendered->data : "", rendered->len_bytes};
    return ok;
}

static bool encode_prompt(const bd_served *served, const tokenize_request *request,
                          bd_token_vec *tokens, bd_api_error *err) {
    const bd_encode_options options = {.add_special_tokens = request->add_special_tokens,
                                       .parse_special = true};
    const char *name = request->chat.messages.at ? "messages" : "prompt";
    bd_error fault = {0};
    bd_status status = bd_tokenizer_encode(served->tokenizer, request->prompt.data,
                                           request->prompt.bytes, &options, tokens, &fault);
    if (status == BD_E_MEMORY) return bd_out_of_memory(err);
    return status == BD_OK ||
           bd_api_fail(err, BD_API_VALUE, name, "Invalid '%s': %.200s.", name, fault.message);
}

bool bd_openai_tokenize(const bd_openai *openai, const bd_tenant *tenant, const char *body,
                        size_t bytes, bd_strbuf *out, bd_api_error *err) {
    tokenize_request request = {.add_special_tokens = true, .chat.add_generation_prompt = true};
    const bd_served *served = NULL;
    bd_arena *arena = NULL;
    bd_token_vec tokens = {0};
    bd_strbuf rendered;
    bd_strbuf_init(&rendered, BD_CHAT_OUTPUT_BYTES_MAX);
    bool ok = parse_tokenize(body, bytes, &arena, &request, err) &&
              find_tokenizer(openai, tenant, &request.model, &served, err) &&
              bd_openai_admit(tenant, err) &&
              prompt_text(openai, served, arena, &request, &rendered, err) &&
              encode_prompt(served, &request, &tokens, err);
    if (ok) write_tokens(served, &tokens, request.return_token_strs, out);
    if (ok && out->failed) ok = bd_out_of_memory(err);
    bd_token_vec_deinit(&tokens);
    bd_strbuf_deinit(&rendered);
    bd_router_release(openai->router, served);
    bd_arena_destroy(arena);
    return ok;
}

typedef struct detokenize_request {
    bd_text model;
    bd_view tokens;
} detokenize_request;

static bool keep_tokens(const bd_field_context *context, const char *name, bd_view value,
                        bd_api_error *err) {
    detokenize_request *request = context->object;
    if (bd_view_kind_of(value) != BD_VIEW_ARRAY)
        return bd_field_wrong_type(name, "an array of token ids", value, err);
    request->tokens = value;
    return true;
}

static const bd_field detokenize_fields[] = {
    {.name = "model", .kind = BD_FIELD_STRING, .offset = offsetof(detokenize_request, model)},
    {.name = "tokens", .kind = BD_FIELD_CUSTOM, .parse = keep_tokens},
};

static bool read_tokens(bd_arena *arena, bd_view list, const bd_served *served, const int32_t **out,
                        size_t *count, bd_api_error *err) {
    *count = bd_view_count(list);
    int32_t *ids = bd_arena_alloc(arena, *count + 1, sizeof *ids);
    if (!ids) return bd_out_of_memory(err);
    bd_view item;
    size_t index = 0;
    for (bd_view_iter iter = bd_view_begin(list); bd_view_next_item(&iter, &item); index++) {
        int64_t id = 0;
        if (!bd_field_int("tokens", item, 0, (int64_t)served->vocab - 1, &id, err)) return false;
        ids[index] = (int32_t)id;
    }
    *out = ids;
    return true;
}

bool bd_openai_detokenize(const bd_openai *openai, const bd_tenant *tenant, const char *body,
                          size_t bytes, bd_strbuf *out, bd_api_error *err) {
    detokenize_request request = {0};
    bd_field_context context = {.object = &request};
    const bd_served *served = NULL;
    const int32_t *ids = NULL;
    size_t count = 0;
    bd_strbuf text;
    bd_view root;
    bd_strbuf_init(&text, 0);
    bool ok = bd_body_open(body, bytes, &root, &context.arena, err) &&
              bd_fields_parse(&context, detokenize_fields,
                              sizeof detokenize_fields / sizeof detokenize_fields[0], root, err);
    if (ok && !request.tokens.at)
        ok = bd_api_fail(err, BD_API_MISSING, "tokens", "Missing required parameter: 'tokens'.");
    ok = ok && find_tokenizer(openai, tenant, &request.model, &served, err) &&
         bd_openai_admit(tenant, err) &&
         read_tokens(context.arena, request.tokens, served, &ids, &count, err);
    if (ok && bd_tokenizer_decode(served->tokenizer, ids, count, false, &text, NULL) != BD_OK)
        ok = bd_out_of_memory(err);
    if (ok) {
        bd_strbuf_puts(out, "{\"prompt\":");
        bd_strbuf_json_string(out, text.data, text.len_bytes);
        bd_strbuf_puts(out, "}");
        if (out->failed) ok = bd_out_of_memory(err);
    }
    bd_strbuf_deinit(&text);
    bd_router_release(openai->router, served);
    bd_arena_destroy(context.arena);
    return ok;
}
