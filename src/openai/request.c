/* request.c - the fields of POST /v1/completions. Threads: pure. */
#include "request.h"

#include <float.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static bool parse_ids(const bd_field_context *context, const char *name, bd_view value,
                      bd_prompt_input *out, bd_api_error *err) {
    size_t count = bd_view_count(value);
    if (count == 0)
        return bd_api_fail(err, BD_API_EMPTY_ARRAY, name,
                           "Invalid '%s': an empty list of token ids.", name);
    if (count > UINT32_MAX)
        return bd_api_fail(err, BD_API_LONG_ARRAY, name, "Invalid '%s': too many token ids.", name);
    int32_t *ids = bd_arena_alloc(context->arena, count, sizeof *ids);
    if (!ids) return bd_out_of_memory(err);
    bd_view item;
    size_t index = 0;
    for (bd_view_iter iter = bd_view_begin(value); bd_view_next_item(&iter, &item); index++) {
        if (bd_view_kind_of(item) != BD_VIEW_NUMBER)
            return bd_field_wrong_type(name, "an integer token id", item, err);
        int64_t id = 0;
        bd_view_int kind = bd_view_int64(item, &id);
        if (kind == BD_VIEW_INT_FRACTION)
            return bd_api_fail(err, BD_API_TYPE, name,
                               "Invalid type for '%s': a token id with a fraction.", name);
        if (kind != BD_VIEW_INT_OK || id < 0 || id > INT32_MAX)
            return bd_api_fail(err, BD_API_VALUE, name,
                               "Invalid '%s': the token id at position %zu is out of range.", name,
                               index);
        ids[index] = (int32_t)id;
    }
    *out = (bd_prompt_input){.is_ids = true, .ids = ids, .count = (uint32_t)count};
    return true;
}

static bool parse_prompt_list(const bd_field_context *context, const char *name, bd_view value,
                              size_t count, bd_api_error *err) {
    bd_completion_request *request = context->object;
    if (count > context->prompts_max)
        return bd_api_fail(err, BD_API_LONG_ARRAY, name,
                           "Invalid '%s': at most %" PRIu32 " prompt%s.", name,
                           context->prompts_max, bd_plural(context->prompts_max));
    request->prompts = bd_arena_alloc(context->arena, count, sizeof *request->prompts);
    if (!request->prompts) return bd_out_of_memory(err);
    bd_view item;
    bd_view_iter iter = bd_view_begin(value);
    bd_view_kind kind = BD_VIEW_NULL;
    while (bd_view_next_item(&iter, &item)) {
        bd_prompt_input *prompt = &request->prompts[request->prompt_count];
        if (request->prompt_count == 0) kind = bd_view_kind_of(item);
        if (bd_view_kind_of(item) != kind)
            return bd_api_fail(err, BD_API_TYPE, name,
                               "Invalid type for '%s': its elements are of different types.", name);
        bool ok = kind == BD_VIEW_STRING ? bd_field_text(context->arena, item, &prompt->text, err)
                                         : parse_ids(context, name, item, prompt, err);
        if (!ok) return false;
        request->prompt_count++;
    }
    return true;
}

static bool parse_prompt(const bd_field_context *context, const char *name, bd_view value,
                         bd_api_error *err) {
    bd_completion_request *request = context->object;
    bd_view_kind kind = bd_view_kind_of(value);
    bd_view first = {NULL};
    if (kind == BD_VIEW_ARRAY) {
        bd_view_iter iter = bd_view_begin(value);
        if (!bd_view_next_item(&iter, &first))
            return bd_api_fail(err, BD_API_EMPTY_ARRAY, name, "Invalid '%s': an empty array.",
                               name);
        bd_view_kind inner = bd_view_kind_of(first);
        if (inner == BD_VIEW_STRING || inner == BD_VIEW_ARRAY)
            return parse_prompt_list(context, name, value, bd_view_count(value), err);
        if (inner != BD_VIEW_NUMBER)
            return bd_field_wrong_type(name, "strings, token ids or arrays of token ids", first,
                                       err);
    } else if (kind != BD_VIEW_STRING) {
        return bd_field_wrong_type(name, "a string or an array", value, err);
    }
    request->prompts = bd_arena_alloc(context->arena, 1, sizeof *request->prompts);
    if (!request->prompts) return bd_out_of_memory(err);
    request->prompt_count = 1;
    if (kind == BD_VIEW_STRING)
        return bd_field_text(context->arena, value, &request->prompts[0].text, err);
    return parse_ids(context, name, value, &request->prompts[0], err);
}

static bool parse_stop_string(const bd_field_context *context, const char *name, bd_view value,
                              bd_api_error *err) {
    bd_completion_request *request = context->object;
    if (bd_view_kind_of(value) != BD_VIEW_STRING)
        return bd_field_wrong_type(name, "a string", value, err);
    if (request->stop_count == BD_STOP_STRINGS_MAX)
        return bd_api_fail(err, BD_API_LONG_ARRAY, name, "Invalid '%s': at most %d stop strings.",
                           name, BD_STOP_STRINGS_MAX);
    bd_text *text = &request->stops[request->stop_count];
    if (!bd_field_text(context->arena, value, text, err)) return false;
    if (text->bytes == 0)
        return bd_api_fail(err, BD_API_EMPTY_STRING, name, "Invalid '%s': an empty string.", name);
    if (text->bytes > BD_STOP_STRING_BYTES_MAX)
        return bd_api_fail(err, BD_API_LONG_STRING, name,
                           "Invalid '%s': a stop string has at most %d bytes.", name,
                           BD_STOP_STRING_BYTES_MAX);
    request->stop_count++;
    return true;
}

static bool parse_stop(const bd_field_context *context, const char *name, bd_view value,
                       bd_api_error *err) {
    if (bd_view_kind_of(value) == BD_VIEW_STRING)
        return parse_stop_string(context, name, value, err);
    if (bd_view_kind_of(value) != BD_VIEW_ARRAY)
        return bd_field_wrong_type(name, "a string or an array of strings", value, err);
    bd_view item;
    for (bd_view_iter iter = bd_view_begin(value); bd_view_next_item(&iter, &item);)
        if (!parse_stop_string(context, name, item, err)) return false;
    return true;
}

static bool parse_stop_ids(const bd_field_context *context, const char *name, bd_view value,
                           bd_api_error *err) {
    bd_completion_request *request = context->object;
    if (bd_view_kind_of(value) != BD_VIEW_ARRAY)
        return bd_field_wrong_type(name, "an array of token ids", value, err);
    size_t count = bd_view_count(value), index = 0;
    if (count > BD_STOP_IDS_MAX)
        return bd_api_fail(err, BD_API_LONG_ARRAY, name, "Invalid '%s': at most %d ids.", name,
                           BD_STOP_IDS_MAX);
    if (count == 0) return true;
    int64_t *ids = bd_arena_alloc(context->arena, count, sizeof *ids);
    if (!ids) return bd_out_of_memory(err);
    bd_view item;
    for (bd_view_iter iter = bd_view_begin(value); bd_view_next_item(&iter, &item); index++)
        if (!bd_field_int(name, item, 0, INT32_MAX, &ids[index], err)) return false;
    request->stop_ids = ids;
    request->stop_id_count = (uint32_t)count;
    return true;
}

/* A key of logit_bias: the plain decimal form of an id. */
static bool parse_bias_key(bd_view key, int64_t *id) {
    char digits[20];
    size_t bytes = bd_view_string_bytes(key);
    if (bytes == 0 || bytes > 18) return false;
    bd_view_string_copy(key, digits);
    if (digits[0] == '0' && bytes > 1) return false;
    *id = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (digits[i] < '0' || digits[i] > '9') return false;
        *id = *id * 10 + (digits[i] - '0');
    }
    return true;
}

static bool parse_bias(const bd_field_context *context, const char *name, bd_view value,
                       bd_api_error *err) {
    bd_completion_request *request = context->object;
    if (bd_view_kind_of(value) != BD_VIEW_OBJECT)
        return bd_field_wrong_type(name, "an object", value, err);
    uint32_t count = 0;
    bd_view key, item;
    for (bd_view_iter iter = bd_view_begin(value); bd_view_next_member(&iter, &key, &item);)
        count++;
    if (count == 0) return true;
    request->bias = bd_arena_alloc(context->arena, count, sizeof *request->bias);
    if (!request->bias) return bd_out_of_memory(err);
    for (bd_view_iter iter = bd_view_begin(value); bd_view_next_member(&iter, &key, &item);) {
        bd_bias_input *bias = &request->bias[request->bias_count++];
        if (!parse_bias_key(key, &bias->id))
            return bd_api_fail(err, BD_API_VALUE, name,
                               "Invalid '%s': keys must be token ids in decimal.", name);
        if (bd_view_kind_of(item) != BD_VIEW_NUMBER)
            return bd_field_wrong_type(name, "numbers as values", item, err);
        double number = bd_view_double(item);
        bias->value = number < -100 ? -100 : number > 100 ? 100 : number;
    }
    return true;
}

typedef struct stream_options {
    bool include_usage, continuous;
} stream_options;

static bool parse_stream_options(const bd_field_context *context, const char *name, bd_view value,
                                 bd_api_error *err) {
    static const bd_field fields[] = {
        {.name = "include_usage",
         .kind = BD_FIELD_BOOL,
         .offset = offsetof(stream_options, include_usage)},
        {.name = "continuous_usage_stats",
         .kind = BD_FIELD_BOOL,
         .offset = offsetof(stream_options, continuous)},
    };
    bd_completion_request *request = context->object;
    if (bd_view_kind_of(value) != BD_VIEW_OBJECT)
        return bd_field_wrong_type(name, "an object", value, err);
    bd_view key, item;
    bd_view_iter iter = bd_view_begin(value);
    bool empty = !bd_view_next_member(&iter, &key, &item);
    if (!empty && !request->stream)
        return bd_api_fail(err, BD_API_VALUE, name, "'%s' is only allowed when 'stream' is true.",
                           name);
    stream_options options = {0};
    const bd_field_context inner = {.arena = context->arena, .object = &options};
    if (!bd_fields_parse(&inner, fields, sizeof fields / sizeof fields[0], value, err)) {
        err->param = name;
        return false;
    }
    request->include_usage = options.include_usage;
    request->continuous_usage = options.include_usage && options.continuous;
    return true;
}

static bool parse_suffix(const bd_field_context *context, const char *name, bd_view value,
                         bd_api_error *err) {
    (void)context;
    if (bd_view_kind_of(value) != BD_VIEW_STRING)
        return bd_field_wrong_type(name, "a string", value, err);
    if (bd_view_string_bytes(value) == 0) return true;
    return bd_api_fail(err, BD_API_UNSUPPORTED, name, "'%s' is not supported by this server.",
                       name);
}

#define AT(member)          .offset = offsetof(bd_completion_request, member)
#define SENT(member)        .sent_offset = offsetof(bd_completion_request, member)
#define INT(low_, high_)    .kind = BD_FIELD_INT, .low = (low_), .high = (high_)
#define NUMBER(low_, high_) .kind = BD_FIELD_NUMBER, .number_low = (low_), .number_high = (high_)

/* Checked in this order, those of completions alone first. stream stands before what depends on
 * it. */
static const bd_field completion_fields[] = {
    {.name = "prompt", .kind = BD_FIELD_CUSTOM, .parse = parse_prompt},
    {.name = "best_of", INT(1, BD_CHOICES_MAX), AT(best_of), SENT(best_of_sent)},
    {.name = "echo", .kind = BD_FIELD_BOOL, AT(echo)},
    {.name = "logprobs", INT(0, BD_LOGPROBS_MAX), AT(logprobs)},
    {.name = "suffix", .kind = BD_FIELD_CUSTOM, .parse = parse_suffix},
    {.name = "tools", .kind = BD_FIELD_REFUSED},
};

static const bd_field shared_fields[] = {
    {.name = "model", .kind = BD_FIELD_STRING, AT(model)},
    {.name = "max_tokens", INT(0, INT32_MAX), AT(max_tokens), SENT(max_tokens_sent)},
    {.name = "n", INT(1, BD_CHOICES_MAX), AT(n)},
    {.name = "temperature", NUMBER(0, 2), AT(temperature)},
    {.name = "top_p", NUMBER(0, 1), AT(top_p)},
    {.name = "presence_penalty", NUMBER(-2, 2), AT(presence_penalty)},
    {.name = "frequency_penalty", NUMBER(-2, 2), AT(frequency_penalty)},
    {.name = "logit_bias", .kind = BD_FIELD_CUSTOM, .parse = parse_bias},
    {.name = "seed", INT(INT64_MIN, INT64_MAX), AT(seed), SENT(seed_sent)},
    {.name = "stop", .kind = BD_FIELD_CUSTOM, .parse = parse_stop},
    {.name = "stream", .kind = BD_FIELD_BOOL, AT(stream)},
    {.name = "stream_options", .kind = BD_FIELD_CUSTOM, .parse = parse_stream_options},
    {.name = "top_k", INT(-1, INT32_MAX), AT(top_k)},
    {.name = "min_p", NUMBER(0, 1), AT(min_p)},
    {.name = "repetition_penalty", NUMBER(0, DBL_MAX), .low_open = true, AT(repetition_penalty)},
    {.name = "ignore_eos", .kind = BD_FIELD_BOOL, AT(ignore_eos)},
    {.name = "min_tokens", INT(0, INT32_MAX), AT(min_tokens)},
    {.name = "stop_token_ids", .kind = BD_FIELD_CUSTOM, .parse = parse_stop_ids},
    {.name = "skip_special_tokens", .kind = BD_FIELD_BOOL, AT(skip_special_tokens)},
    {.name = "add_special_tokens", .kind = BD_FIELD_BOOL, AT(add_special_tokens)},
    {.name = "include_stop_str_in_output", .kind = BD_FIELD_BOOL, AT(include_stop)},
    {.name = "return_token_ids", .kind = BD_FIELD_BOOL, AT(return_token_ids)},
    {.name = "return_tokens_as_token_ids", .kind = BD_FIELD_BOOL, AT(tokens_as_ids)},
    {.name = "prompt_logprobs", INT(0, BD_LOGPROBS_MAX), AT(prompt_logprobs)},
    {.name = "priority", INT(INT64_MIN, INT64_MAX), AT(priority), SENT(priority_sent)},
    {.name = "truncate_prompt_tokens", .kind = BD_FIELD_REFUSED},
    {.name = "allowed_token_ids", .kind = BD_FIELD_REFUSED},
    {.name = "bad_words", .kind = BD_FIELD_REFUSED},
    {.name = "response_format", .kind = BD_FIELD_REFUSED},
    {.name = "structured_outputs", .kind = BD_FIELD_REFUSED},
    {.name = "guided_json", .kind = BD_FIELD_REFUSED},
    {.name = "guided_regex", .kind = BD_FIELD_REFUSED},
    {.name = "guided_choice", .kind = BD_FIELD_REFUSED},
    {.name = "guided_grammar", .kind = BD_FIELD_REFUSED},
};

#undef AT
#undef SENT
#undef INT
#undef NUMBER

uint32_t bd_completion_shared_fields(const bd_field **out) {
    *out = shared_fields;
    return sizeof shared_fields / sizeof shared_fields[0];
}

bool bd_completion_request_check(const bd_completion_request *request, uint32_t prompts_max,
                                 bd_api_error *err) {
    if (!request->prompts)
        return bd_api_fail(err, BD_API_MISSING, "prompt", "Missing required parameter: 'prompt'.");
    if (request->best_of_sent && request->best_of < request->n)
        return bd_api_fail(err, BD_API_VALUE, "best_of",
                           "Invalid 'best_of': must be at least 'n' (%" PRId64 ").", request->n);
    if (request->best_of_sent && request->best_of > 20 && request->best_of != request->n)
        return bd_api_fail(err, BD_API_INTEGER_HIGH, "best_of",
                           "Invalid 'best_of': must be at most 20.");
    const bool best = request->best_of_sent && request->best_of > request->n;
    if (best && request->stream)
        return bd_api_fail(err, BD_API_VALUE, "best_of",
                           "'best_of' greater than 'n' is not available with 'stream': the best "
                           "are known at the end.");
    const char *name = best ? "best_of" : "n";
    if ((uint64_t)(best ? request->best_of : request->n) * request->prompt_count > prompts_max)
        return bd_api_fail(err, BD_API_VALUE, name,
                           "Invalid '%s': '%s' times the number of prompts must be at most "
                           "%" PRIu32 ".",
                           name, name, prompts_max);
    if (request->min_tokens > request->max_tokens)
        return bd_api_fail(err, BD_API_VALUE, "min_tokens",
                           "Invalid 'min_tokens': must not be greater than 'max_tokens' (%" PRId64
                           ").",
                           request->max_tokens);
    if (request->prompt_logprobs > 0 && request->stream)
        return bd_api_fail(err, BD_API_VALUE, "prompt_logprobs",
                           "'prompt_logprobs' is not available with 'stream'.");
    return true;
}

void bd_completion_request_defaults(bd_completion_request *out) {
    *out = (bd_completion_request){
        .prompt_name = "prompt",
        .limit_name = "max_tokens",
        .max_tokens = 16,
        .n = 1,
        .logprobs = -1,
        .prompt_logprobs = -1,
        .temperature = 1,
        .top_p = 1,
        .repetition_penalty = 1,
        .skip_special_tokens = true,
        .add_special_tokens = true,
    };
}

bool bd_completion_request_parse(const char *body, size_t bytes, uint32_t prompts_max,
                                 bd_completion_request *out, bd_api_error *err) {
    bd_completion_request_defaults(out);
    bd_view root;
    if (!bd_body_open(body, bytes, &root, &out->arena, err)) return false;
    const bd_field_context context = {
        .arena = out->arena, .object = out, .prompts_max = prompts_max};
    const uint32_t own_count = sizeof completion_fields / sizeof completion_fields[0];
    const bd_field *shared;
    const uint32_t shared_count = bd_completion_shared_fields(&shared);
    return bd_fields_parse(&context, completion_fields, own_count, root, err) &&
           bd_fields_parse(&context, shared, shared_count, root, err) &&
           bd_completion_request_check(out, prompts_max, err);
}

void bd_completion_request_deinit(bd_completion_request *request) {
    bd_arena_destroy(request->arena);
    *request = (bd_completion_request){0};
}
