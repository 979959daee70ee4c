/* chat_template.h - conversations to prompt text, by the Jinja template of a model.
 * Owner: whoever loaded it. Threads: a bd_chat or bd_chat_template never changes after load, so any
 * number of threads may render with one at the same time.
 *
 * The language is the part of Jinja that chat templates use, and the text is byte for byte what
 * transformers' apply_chat_template gives (trim_blocks, lstrip_blocks, loop controls, its own
 * tojson, raise_exception, strftime_now, {% generation %}). A template with anything else is
 * refused when it is parsed, by name and line. Templates and messages may be hostile: depth, steps,
 * memory and output are bounded. Different from Python: integers have 64 bits, and upper, lower and
 * title change one character into one (no "SS" for a sharp s). */
#ifndef BITDELTA_TOKENIZER_CHAT_TEMPLATE_H
#define BITDELTA_TOKENIZER_CHAT_TEMPLATE_H

#include <stddef.h>

#include "bitdelta/base/status.h"
#include "bitdelta/base/strbuf.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BD_CHAT_TEMPLATE_BYTES_MAX ((size_t)256 << 10)
#define BD_CHAT_OUTPUT_BYTES_MAX   ((size_t)64 << 20)

typedef struct bd_chat_template bd_chat_template;

/* name is the subject of errors: BD_E_FORMAT (syntax), BD_E_UNSUPPORTED, BD_E_LIMIT, BD_E_MEMORY.
 * text need not outlive the call. On failure *out is NULL. */
BD_MUST_CHECK bd_status bd_chat_template_parse(bd_chat_template **out, const char *text,
                                               size_t bytes, const char *name, bd_error *err);
void bd_chat_template_destroy(bd_chat_template *tmpl); /* NULL is fine */
/* It goes through message content piece by piece, so content must be a list of parts... */
bool bd_chat_template_wants_parts(const bd_chat_template *tmpl);
/* ...unless it also asks whether something is a string. */
bool bd_chat_template_tests_string(const bd_chat_template *tmpl);
/* The word stands somewhere in its source. */
bool bd_chat_template_mentions(const bd_chat_template *tmpl, const char *word);
const char *bd_chat_template_source(const bd_chat_template *tmpl); /* lives as long as it */

/* One variable: text (any UTF-8) or, with text NULL, json. json points at the first byte of a value
 * in a text that bd_json_check accepted; it outlives the rendering. name NULL: json is an object
 * whose members become variables. Of equal names the last counts. */
typedef struct bd_chat_variable {
    const char *name, *json;
    const char *text;
    size_t text_bytes;
} bd_chat_variable;

/* Appends the prompt to out. now_s: seconds since 1970 for strftime_now, in local time.
 * BD_E_ARGUMENT: the template raised an exception, err->message is its text; BD_E_FORMAT: the
 * template cannot handle these values, "line N: ..."; BD_E_UNSUPPORTED; BD_E_LIMIT; BD_E_MEMORY. On
 * failure out may hold a part. */
BD_MUST_CHECK bd_status bd_chat_template_render(const bd_chat_template *tmpl,
                                                const bd_chat_variable *variables,
                                                size_t variable_count, int64_t now_s,
                                                bd_strbuf *out, bd_error *err);

/* ---- The chat side of a model directory ---- */

typedef struct bd_chat {
    const bd_chat_template *tmpl; /* NULL: none, or it was refused */
    bd_chat_template *owned;      /* tmpl where it is not the fallback's */
    char *template_path;          /* where it was found; NULL: nowhere */
    bd_error fault;               /* why it was refused; BD_OK: it was not */
    char *bos_token, *eos_token, *pad_token, *unk_token;
} bd_chat;

typedef struct bd_chat_sources {
    const char *dir;
    const char *override_path; /* a template file that wins over all others; NULL: none */
    const bd_chat *fallback;   /* the base's, for what dir does not have; outlives the result */
} bd_chat_sources;

/* Template, first found: override_path; chat_template.jinja; chat_template in tokenizer_config.json
 * (a string, or "default" of a list of {name, template}); chat_template.json; the fallback's.
 * Tokens come from tokenizer_config.json. A template that cannot be used is not an error but
 * `fault`; BD_E_IO, BD_E_FORMAT (not JSON), BD_E_LIMIT and BD_E_MEMORY are. On failure *out is
 * NULL. */
BD_MUST_CHECK bd_status bd_chat_load(bd_chat **out, const bd_chat_sources *sources, bd_error *err);
void bd_chat_destroy(bd_chat *chat); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
