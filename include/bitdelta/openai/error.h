/* error.h - what a client is told when a request fails: status, type, code, field and one sentence.
 * Threads: pure values. Wire form: {"error":{"message","type","param","code"}}, all four always
 * there. */
#ifndef BITDELTA_OPENAI_ERROR_H
#define BITDELTA_OPENAI_ERROR_H

#include "bitdelta/base/status.h"
#include "bitdelta/base/strbuf.h"

/* name, HTTP status, type, code */
#define BD_API_LIST(X)                                                                             \
    X(BD_API_INVALID_JSON, 400, "invalid_request_error", "invalid_json")                           \
    X(BD_API_MISSING, 400, "invalid_request_error", "missing_required_parameter")                  \
    X(BD_API_TYPE, 400, "invalid_request_error", "invalid_type")                                   \
    X(BD_API_INTEGER_LOW, 400, "invalid_request_error", "integer_below_min_value")                 \
    X(BD_API_INTEGER_HIGH, 400, "invalid_request_error", "integer_above_max_value")                \
    X(BD_API_DECIMAL_LOW, 400, "invalid_request_error", "decimal_below_min_value")                 \
    X(BD_API_DECIMAL_HIGH, 400, "invalid_request_error", "decimal_above_max_value")                \
    X(BD_API_EMPTY_STRING, 400, "invalid_request_error", "empty_string")                           \
    X(BD_API_LONG_STRING, 400, "invalid_request_error", "string_above_max_length")                 \
    X(BD_API_EMPTY_ARRAY, 400, "invalid_request_error", "empty_array")                             \
    X(BD_API_LONG_ARRAY, 400, "invalid_request_error", "array_above_max_length")                   \
    X(BD_API_VALUE, 400, "invalid_request_error", "invalid_value")                                 \
    X(BD_API_UNSUPPORTED, 400, "invalid_request_error", "unsupported_parameter")                   \
    X(BD_API_CONTEXT, 400, "invalid_request_error", "context_length_exceeded")                     \
    X(BD_API_KEY, 401, "authentication_error", "invalid_api_key")                                  \
    X(BD_API_ORIGIN, 403, "invalid_request_error", "origin_not_allowed")                           \
    X(BD_API_MODEL, 404, "invalid_request_error", "model_not_found")                               \
    X(BD_API_URL, 404, "not_found_error", "unknown_url")                                           \
    X(BD_API_METHOD, 405, "invalid_request_error", "method_not_allowed")                           \
    X(BD_API_SLOW, 408, "invalid_request_error", "request_timeout")                                \
    X(BD_API_CONFLICT, 409, "invalid_request_error", "conflict")                                   \
    X(BD_API_TOO_LARGE, 413, "invalid_request_error", "request_too_large")                         \
    X(BD_API_CONTENT_TYPE, 415, "invalid_request_error", "unsupported_content_type")               \
    X(BD_API_RATE, 429, "rate_limit_error", "rate_limit_exceeded")                                 \
    X(BD_API_INTERNAL, 500, "server_error", "internal_error")                                      \
    X(BD_API_LOADING, 503, "server_error", "model_loading")                                        \
    X(BD_API_VARIANT, 503, "server_error", "variant_unavailable")                                  \
    X(BD_API_SHUTDOWN, 503, "server_error", "shutting_down")                                       \
    X(BD_API_DEAD, 503, "server_error", "engine_dead")

typedef enum bd_api_kind {
    BD_API_OK,
#define BD_API_ENUM(name, http, type, code) name,
    BD_API_LIST(BD_API_ENUM)
#undef BD_API_ENUM
} bd_api_kind;

typedef struct bd_api_error {
    bd_api_kind kind;
    const char *param;      /* a literal: the top-level request field at fault; NULL: null */
    char message[512];      /* valid UTF-8 */
    uint32_t retry_after_s; /* 0: no Retry-After header */
    const char *limit; /* a literal: the server's limit that refuses it, for metrics; or NULL */
} bd_api_error;

/* Fills *err and returns false, so that a check can `return bd_api_fail(...)`. */
bool bd_api_fail(bd_api_error *err, bd_api_kind kind, const char *param, const char *format, ...)
    BD_PRINTF(4, 5);
unsigned bd_api_http_status(bd_api_kind kind);
const char *bd_api_code(bd_api_kind kind);
/* A client's value for a message: at most 100 bytes of it, cut at a character, with U+FFFD for each
 * NUL, where "%s" would end. Returns out->text. */
typedef struct bd_api_quoted {
    char text[304];
} bd_api_quoted;
const char *bd_api_quote(bd_api_quoted *out, const char *text, size_t bytes);
/* What a client is told of a variant that cannot be served (NULL: its load failed): the kind of
 * fault, for the rest is the operator's: paths, offsets, causes. But lengths say more than their
 * kind, and their message has nothing else. */
const char *bd_api_variant_fault(const bd_error *fault);
void bd_api_error_write(const bd_api_error *err, bd_strbuf *out); /* the whole JSON body */

#endif
