/* request.h - the body of POST /v1/completions, or of its chat form, as checked values. Owner: its
 * completion. Threads: parse anywhere; read-only afterwards. Nothing in it points into the body. */
#ifndef BITDELTA_OPENAI_REQUEST_H
#define BITDELTA_OPENAI_REQUEST_H

#include "bitdelta/base/arena.h"
#include "bitdelta/openai/error.h"
#include "json_view.h"

#define BD_STOP_STRINGS_MAX      16
#define BD_STOP_STRING_BYTES_MAX 4096
#define BD_STOP_IDS_MAX          256
#define BD_CHOICES_MAX           128
#define BD_LOGPROBS_MAX          20

typedef struct bd_text {
    const char *data; /* may hold NUL bytes; a NUL follows it */
    size_t bytes;
} bd_text;

typedef struct bd_prompt_input {
    bool is_ids;
    bd_text text;
    const int32_t *ids; /* >= 0; the upper bound is the model's */
    uint32_t count;
} bd_prompt_input;

typedef struct bd_bias_input {
    int64_t id;   /* >= 0 */
    double value; /* -100 .. 100 */
} bd_bias_input;

/* What only chat completions have. The views point into the body, which lives until the completion
 * is prepared. */
typedef struct bd_chat_input {
    bd_view messages, documents, kwargs; /* at NULL: not sent */
    int64_t max_tokens, top_logprobs;
    bool max_tokens_sent, top_logprobs_sent, logprobs;
    bool add_generation_prompt, add_generation_sent, continue_final;
} bd_chat_input;

typedef struct bd_completion_request {
    bool is_chat;
    bd_chat_input chat;
    const char *prompt_name, *limit_name; /* fields that errors name */
    bd_text model;                        /* data NULL: not sent */
    bd_prompt_input *prompts;
    uint32_t prompt_count;
    bool max_tokens_sent, seed_sent, best_of_sent, priority_sent;
    int64_t max_tokens, n, best_of, logprobs, prompt_logprobs; /* logprobs: -1 none */
    int64_t top_k, min_tokens, priority, seed;
    double temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
    bool echo, stream, ignore_eos, skip_special_tokens, add_special_tokens, include_stop;
    bool return_token_ids, tokens_as_ids, include_usage, continuous_usage;
    uint32_t stop_count, stop_id_count, bias_count;
    bd_text stops[BD_STOP_STRINGS_MAX];
    const int64_t *stop_ids;
    bd_bias_input *bias; /* as sent: unsorted, perhaps the same id twice */
    bd_arena *arena;     /* owns all of the above */
} bd_completion_request;

/* prompts_max bounds prompts and prompts x n. deinit is right after failure too. */
bool bd_completion_request_parse(const char *body, size_t bytes, uint32_t prompts_max,
                                 bd_completion_request *out, bd_api_error *err);
void bd_completion_request_deinit(bd_completion_request *request);

/* ---- Pieces shared with the other bodies ---- */

/* Checks the body and finds its root object; *arena receives a new arena for what is lifted out of
 * it. */
bool bd_body_open(const char *body, size_t bytes, bd_view *root, bd_arena **arena,
                  bd_api_error *err);

typedef enum bd_field_kind {
    BD_FIELD_INT,
    BD_FIELD_NUMBER,
    BD_FIELD_BOOL,
    BD_FIELD_STRING,
    BD_FIELD_CUSTOM,
    BD_FIELD_REFUSED
} bd_field_kind;

typedef struct bd_field_context {
    bd_arena *arena;
    void *object;
    uint32_t prompts_max;
} bd_field_context;

typedef struct bd_field {
    const char *name;
    bd_field_kind kind;
    uint16_t offset;      /* of the value inside the object */
    uint16_t sent_offset; /* of a bool set when the field is there; 0: none */
    int64_t low, high;    /* INT */
    double number_low, number_high;
    bool low_open; /* NUMBER: low itself is refused */
    bool (*parse)(const bd_field_context *context, const char *name, bd_view value,
                  bd_api_error *err); /* CUSTOM */
} bd_field;

void bd_completion_request_defaults(bd_completion_request *out);
/* Fields that completions and chat completions have in common, over a bd_completion_request. */
uint32_t bd_completion_shared_fields(const bd_field **out);
/* Rules over more than one field. */
bool bd_completion_request_check(const bd_completion_request *request, uint32_t prompts_max,
                                 bd_api_error *err);

/* Goes over the root's members (the last of a repeated key wins, unknown ones are ignored, null
 * means absent), then over the table in its order. fields_max is at most 64. */
bool bd_fields_parse(const bd_field_context *context, const bd_field *fields, uint32_t field_count,
                     bd_view root, bd_api_error *err);
bool bd_field_wrong_type(const char *name, const char *expected, bd_view value, bd_api_error *err);
bool bd_field_int(const char *name, bd_view value, int64_t low, int64_t high, int64_t *out,
                  bd_api_error *err);
bool bd_field_bool(const char *name, bd_view value, bool *out, bd_api_error *err);
bool bd_field_text(bd_arena *arena, bd_view value, bd_text *out, bd_api_error *err);
bool bd_out_of_memory(bd_api_error *err);

#endif
