/* openai.h - the OpenAI-style API without its transport: bodies in, jobs to the router, bodies and
 * events out. Owner: the HTTP server. Threads: a bd_openai never changes after create and serves
 * any number of threads. */
#ifndef BITDELTA_OPENAI_OPENAI_H
#define BITDELTA_OPENAI_OPENAI_H

#include "bitdelta/openai/error.h"
#include "bitdelta/router/router.h"

typedef struct bd_openai bd_openai;

typedef struct bd_openai_options {
    bd_router *router; /* all variants are registered already; outlives the object */
    /* Parts of system_fingerprint beside the version, the variant's digests and the template below:
     * the base's, and backend, dtype and the like. May be NULL. */
    const char *base_fingerprint, *numerics;
    const char *chat_template_path; /* a template for all models; NULL: each has its own */
    size_t response_bytes_max;      /* memory of one response; 0: 256 MiB */
    uint32_t prompts_max;           /* prompts, and prompts x n, of one request; 0: 1024 */
} bd_openai_options;

/* On failure *out is NULL. */
BD_MUST_CHECK bd_status bd_openai_create(const bd_openai_options *options, bd_openai **out,
                                         bd_error *err);
void bd_openai_destroy(bd_openai *openai); /* after the last completion; NULL is fine */

/* The functions below append a whole JSON body to out, or fill *err and return false. `body` must
 * be followed by a NUL byte that bytes does not count. */
bool bd_openai_models(const bd_openai *openai, const bd_tenant *tenant, bd_strbuf *out,
                      bd_api_error *err);
bool bd_openai_model(const bd_openai *openai, const bd_tenant *tenant, const char *id,
                     size_t id_bytes, bd_strbuf *out, bd_api_error *err);
bool bd_openai_tokenize(const bd_openai *openai, const bd_tenant *tenant, const char *body,
                        size_t bytes, bd_strbuf *out, bd_api_error *err);
bool bd_openai_detokenize(const bd_openai *openai, const bd_tenant *tenant, const char *body,
                          size_t bytes, bd_strbuf *out, bd_api_error *err);

/* Of the base; BD_API_URL where its directory does not say enough. */
bool bd_openai_tokenizer_info(const bd_openai *openai, bd_strbuf *out, bd_api_error *err);

/* What vLLM's load_lora_adapter and unload_lora_adapter are sent. */
typedef struct bd_lora_request {
    char name[BD_VARIANT_NAME_MAX + 1];
    char path[1024]; /* load only */
    bool load_inplace;
} bd_lora_request;
bool bd_openai_lora_request(const char *body, size_t bytes, bool load, bd_lora_request *out,
                            bd_api_error *err);

/* For ids that must not repeat; at most 256 bytes. */
void bd_openai_random(uint8_t *out, size_t bytes);
void bd_openai_hex(const uint8_t *bytes, size_t digits, char *out); /* digits, then a NUL */

/* ---- POST /v1/completions and /v1/chat/completions ---- */

typedef struct bd_completion bd_completion;

typedef struct bd_completion_sink { /* on bd-sched; must not block */
    /* One complete server-sent event. exempt: it carries an echoed prompt or ends the stream, and
     * must be taken whatever the reader's bound says. false: the reader is gone or too slow; the
     * completion cancels itself. */
    bool (*event)(void *ctx, const char *data, size_t bytes, bool exempt);
    /* Last call: nothing more will come, the completion is its creator's alone. */
    void (*done)(void *ctx);
} bd_completion_sink;

/* Checks the body, finds the model, reserves queue room, tokenises. Any thread. NULL: *err says
 * why. The body is not needed afterwards. */
bd_completion *bd_completion_create(const bd_openai *openai, const bd_tenant *tenant,
                                    const char *body, size_t bytes, uint64_t received_us,
                                    bd_api_error *err);
/* The same for POST /v1/chat/completions. */
bd_completion *bd_chat_completion_create(const bd_openai *openai, const bd_tenant *tenant,
                                         const char *body, size_t bytes, uint64_t received_us,
                                         bd_api_error *err);
bool bd_completion_is_stream(const bd_completion *completion);
bool bd_completion_failed(const bd_completion *completion); /* after done() */
/* Any thread, once; done() is called exactly once afterwards, perhaps before this returns. */
void bd_completion_submit(bd_completion *completion, const bd_completion_sink *sink, void *ctx);
/* The same for several at one go: bd-sched is not woken, bd_openai_wake is to follow, or
 * bd_openai_help, which is as bd_engine_help. */
void bd_completion_submit_quietly(bd_completion *completion, const bd_completion_sink *sink,
                                  void *ctx);
void bd_openai_wake(const bd_openai *openai);
void bd_openai_help(const bd_openai *openai);
/* Any thread, any time before destroy. reason BD_CANCELLED: the client left; BD_E_SHUTDOWN: the
 * server ends. done() still comes. */
void bd_completion_cancel(bd_completion *completion, bd_status reason);
/* After done(). Not streamed, or failed before the first event: true appends the 200 body, false
 * fills *err. */
bool bd_completion_reply(bd_completion *completion, bd_strbuf *out, bd_api_error *err);
/* After done(), or instead of submit. */
void bd_completion_destroy(bd_completion *completion);

#endif
