/* completion.h - the inside of one POST /v1/completions. Owner: the HTTP request that created it.
 * Threads: prepared on any thread, touched by bd-sched alone between submit and done(), then its
 * creator's again; only the cancel reason crosses. */
#ifndef BITDELTA_OPENAI_COMPLETION_H
#define BITDELTA_OPENAI_COMPLETION_H

#include <nettle/sha2.h>

#include "bitdelta/openai/openai.h"
#include "chat.h"
#include "logprobs.h"
#include "request.h"
#include "stop.h"

struct bd_openai {
    bd_router *router;
    uint64_t serial;               /* of this process, from 1 */
    struct sha256_ctx fingerprint; /* of everything but the variant */
    bd_chat_book *chats;
    bd_strbuf tokenizer_info; /* empty: none */
    size_t response_bytes_max;
    uint32_t prompts_max;
};

typedef struct bd_prompt_state {
    bd_token_vec ids;
    bd_strbuf echo;       /* the prompt as text, with echo */
    uint64_t echo_points; /* its code points */
    uint64_t *offsets;    /* [ids.count] where each token starts in it, with echo and logprobs */
    /* What its choices tell of it, made once for all of them. */
    bd_logprob_lists lists; /* with echo and logprobs */
    bd_strbuf logprobs;     /* prompt_logprobs */
    uint32_t next;          /* first position whose result is still to come */
} bd_prompt_state;

typedef struct bd_choice {
    bd_detok detok;
    bd_stop_state stop;
    bd_strbuf text; /* all of it, or this event's delta */
    bd_strbuf token_ids;
    bd_logprob_lists lists;
    uint64_t points; /* code points decoded so far, echo included: text_offset of the next token */
    uint32_t generated;
    bool event_sent, finished;
    bd_finish finish;
    int stop_string;    /* index, -1: none */
    int32_t stop_id;    /* -1: none, or EOS */
    double logprob_sum; /* of the generated tokens */
} bd_choice;

struct bd_completion {
    const bd_openai *openai;
    const bd_served *served; /* held */
    bd_ask ask;              /* what is reserved for it; its tenant is the creator's to hold */
    size_t body_bytes;
    bd_completion_request request;
    bd_strbuf rendered;       /* chat: the prompt as text */
    bd_prompt_state *prompts; /* [request.prompt_count], in the request's arena as all arrays are */
    bd_choice *choices;       /* [choice_count] */
    uint32_t choice_count, max_new;
    uint32_t width; /* choices made of each prompt: n, or best_of */
    bool reserved;  /* queue room and the tenant's share are ours to give back */
    bd_stop_set stops;
    int32_t *stop_ids; /* the user's first, then EOS */
    uint32_t user_stop_count, stop_id_count;
    bd_prompt *job_prompts;
    bd_logit_edit *bias;
    bd_token_names names;

    const bd_completion_sink *sink;
    void *sink_ctx;
    char id[48], fingerprint[24];
    uint64_t created_s, prompt_tokens, generated, random_seed;
    bd_strbuf head;         /* {"id":...,"choices":[{"index": of every event */
    bd_strbuf piece, event; /* scratch */
    size_t held_bytes;      /* output kept so far */
    bool any_event, failed;
    _Atomic int cancel_reason; /* a bd_status; BD_OK: not cancelled */
    bd_job job;                /* ends with its error */
    bd_api_error error;        /* when failed; both are not cleared at first */
};

/* admission.c */
bool bd_completion_reserve(bd_completion *completion, bd_api_error *err);
bool bd_completion_correct(bd_completion *completion, bd_api_error *err); /* all is tokenised */
/* Of a tokenize or detokenize request. */
bool bd_openai_admit(const bd_tenant *tenant, bd_api_error *err);
/* tokenizer_info.c: empty where there is none. */
void bd_tokenizer_info_make(const bd_served *served, const bd_chat *chat, bd_strbuf *out);
/* prepare.c: checks that need the model, and the job. */
bool bd_completion_prepare(bd_completion *completion, uint64_t received_us, bd_api_error *err);
/* sinks.c */
extern const bd_job_sink bd_completion_job_sink;
/* write.c */
void bd_completion_write_event(bd_completion *completion, uint32_t index, bd_strbuf *out);
void bd_completion_write_usage_event(bd_completion *completion, bd_strbuf *out);
void bd_completion_write_body(bd_completion *completion, bd_strbuf *out);
bool bd_completion_write_head(bd_completion *completion);
/* Chat: the event that begins a choice. */
void bd_completion_write_role_event(const bd_completion *completion, uint32_t index,
                                    bd_strbuf *out);
/* openai.c */
/* *out is to be released. */
bool bd_openai_find_model(const bd_openai *openai, const bd_tenant *tenant, const bd_text *model,
                          const bd_served **out, bd_api_error *err);
void bd_openai_fingerprint(const bd_openai *openai, const bd_served *served, char out[24]);

static inline uint64_t bd_code_points(const char *text, size_t bytes) {
    uint64_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += ((unsigned char)text[i] & 0xC0u) != 0x80u;
    return count;
}

#endif
