/* logprobs.h - the completions logprobs object, four parallel arrays grown token by token. Owner: a
 * choice. */
#ifndef BITDELTA_OPENAI_LOGPROBS_H
#define BITDELTA_OPENAI_LOGPROBS_H

#include "bitdelta/backend/step.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/tokenizer/tokenizer.h"

typedef struct bd_token_names {    /* how ids are shown */
    const bd_tokenizer *tokenizer; /* NULL: none */
    bool as_ids;                   /* "token_id:5" for every token */
} bd_token_names;

typedef struct bd_logprob_lists { /* each without its brackets */
    bd_strbuf tokens, values, top, offsets;
} bd_logprob_lists;

void bd_token_name_write(const bd_token_names *names, int32_t id,
                         bd_strbuf *out);             /* a JSON string */
void bd_logprob_write(float logprob, bd_strbuf *out); /* finite: -9999.0 for -inf */

void bd_logprob_lists_clear(bd_logprob_lists *lists);
void bd_logprob_lists_deinit(bd_logprob_lists *lists);
size_t bd_logprob_lists_bytes(const bd_logprob_lists *lists);
bool bd_logprob_lists_failed(const bd_logprob_lists *lists);
/* alternatives: how many of token->top_* are wanted. */
void bd_logprob_lists_add(bd_logprob_lists *lists, const bd_token_names *names,
                          const bd_token_result *token, uint32_t alternatives, uint64_t offset);
void bd_logprob_lists_add_first(bd_logprob_lists *lists, const bd_token_names *names,
                                int32_t id); /* nulls */
/* Those of `prompt` first, where that is not NULL. */
void bd_logprob_lists_write(const bd_logprob_lists *prompt, const bd_logprob_lists *lists,
                            bd_strbuf *out);
/* One entry of the prompt_logprobs array. */
void bd_prompt_logprob_write(const bd_token_names *names, const bd_token_result *token,
                             uint32_t alternatives, bd_strbuf *out);

#endif
