/* chat.h - what POST /v1/chat/completions adds to a completion: its request, the model's template,
 * the prompt. Threads: as the functions say. */
#ifndef BITDELTA_OPENAI_CHAT_H
#define BITDELTA_OPENAI_CHAT_H

#include "bitdelta/router/router.h"
#include "bitdelta/tokenizer/chat_template.h"
#include "logprobs.h"
#include "request.h"

/* ---- Templates of the served models (chat_book.c); any thread ---- */

typedef struct bd_chat_book bd_chat_book;

/* Reads the base's; one that cannot be used is logged. override_path: a template for every model,
 * NULL: none. An unusable override is an error. */
BD_MUST_CHECK bd_status bd_chat_book_create(bd_chat_book **out, const char *base_dir,
                                            const char *override_path, bd_error *err);
void bd_chat_book_destroy(bd_chat_book *book); /* NULL is fine */
const bd_chat *bd_chat_book_base(const bd_chat_book *book);
/* Reads a variant's files with its first use. *out is to be given back. */
bool bd_chat_book_get(bd_chat_book *book, const bd_served *served, const bd_chat **out,
                      bd_api_error *err);
void bd_chat_book_release(bd_chat_book *book, const bd_chat *chat);

/* ---- Request ---- */

/* Like bd_completion_request_parse; out->chat points into the body. */
bool bd_chat_request_parse(const char *body, size_t bytes, uint32_t prompts_max,
                           bd_completion_request *out, bd_api_error *err);
/* A field's parse function for "messages", shared with /tokenize: context->object is a
 * bd_chat_input. */
bool bd_chat_parse_messages(const bd_field_context *context, const char *name, bd_view value,
                            bd_api_error *err);
bool bd_chat_parse_kwargs(const bd_field_context *context, const char *name, bd_view value,
                          bd_api_error *err);

/* Rules over more than one of the fields of both: sets add_generation_prompt. */
bool bd_chat_check_continue(bd_chat_input *input, bd_api_error *err);

/* Messages as the template takes them, as a JSON array. mark: put behind the text of the last one,
 * which must have some; NULL: nothing. */
bool bd_chat_messages_write(bd_view messages, const bd_chat_template *tmpl, const char *mark,
                            bd_arena *arena, bd_strbuf *out);
/* Appends the prompt. */
bool bd_chat_render(const bd_chat *chat, const bd_chat_input *input, bd_arena *arena,
                    bd_strbuf *out, bd_api_error *err);

/* ---- Log-probabilities: one array of tokens ---- */

void bd_chat_logprob_add(bd_strbuf *list, const bd_token_names *names, const bd_token_result *token,
                         uint32_t alternatives);

#endif
