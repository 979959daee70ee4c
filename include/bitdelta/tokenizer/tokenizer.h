/* tokenizer.h - text to token ids and back, from a Hugging Face `tokenizer.json` with a BPE model.
 * Owner: whoever loaded it. Threads: a bd_tokenizer never changes after load, so any number of
 * threads may use one at the same time; a bd_detok or a bd_token_vec belongs to one thread at a
 * time.
 *
 * Text is UTF-8 by pointer and length and may contain NUL bytes. Results are those of the
 * `tokenizers` library on the same file; a file with a component that is not implemented is refused
 * by its name. */
#ifndef BITDELTA_TOKENIZER_TOKENIZER_H
#define BITDELTA_TOKENIZER_TOKENIZER_H

#include <stddef.h>

#include "bitdelta/base/status.h"
#include "bitdelta/base/strbuf.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BD_TOKENIZER_FILE_BYTES_MAX  ((size_t)128 << 20)
#define BD_TOKENIZER_VOCAB_MAX       ((uint32_t)1 << 21) /* ids are below this */
#define BD_TOKENIZER_MERGES_MAX      ((uint32_t)1 << 22)
#define BD_TOKENIZER_ADDED_MAX       ((uint32_t)1 << 16)
#define BD_TOKENIZER_TOKEN_BYTES_MAX ((size_t)1 << 16) /* one vocabulary entry */

typedef struct bd_tokenizer bd_tokenizer;

/* Reads and checks the whole file. On failure *out is NULL and err names file and component:
 * BD_E_IO, BD_E_LIMIT, BD_E_FORMAT, BD_E_UNSUPPORTED or BD_E_MEMORY. */
BD_MUST_CHECK bd_status bd_tokenizer_load(bd_tokenizer **out, const char *path, bd_error *err);
/* The same from memory; name is only for messages. json need not outlive the call. */
BD_MUST_CHECK bd_status bd_tokenizer_parse(bd_tokenizer **out, const char *json, size_t json_bytes,
                                           const char *name, bd_error *err);
void bd_tokenizer_destroy(bd_tokenizer *tokenizer); /* NULL is fine */

/* ---- Encoding ---- */

/* A growing list of ids. Zero-initialise it (`{0}`) or reuse one; count = 0 empties it and keeps
 * the memory. */
typedef struct bd_token_vec {
    int32_t *ids;
    size_t count, capacity;
} bd_token_vec;

void bd_token_vec_deinit(bd_token_vec *vec); /* frees and zeroes */

typedef struct bd_encode_options {
    bool add_special_tokens; /* the file's template adds its tokens (a BOS, say) */
    bool parse_special; /* special tokens written in the text become their ids; when false they are
                         * plain text. Added tokens that are not special match either way */
    size_t tokens_max;  /* more tokens than this: BD_E_LIMIT, work stops early; 0: no cap */
} bd_encode_options;

/* Appends the ids of text to out. BD_E_FORMAT: not valid UTF-8 (message has the byte offset);
 * BD_E_LIMIT: above tokens_max; BD_E_MEMORY. On failure out->count is as before. Time is
 * O(bytes log bytes) for any text. */
BD_MUST_CHECK bd_status bd_tokenizer_encode(const bd_tokenizer *tokenizer, const char *text,
                                            size_t text_bytes, const bd_encode_options *options,
                                            bd_token_vec *out, bd_error *err);

/* ---- Single tokens; every function takes any id, known or not ---- */

/* Largest known id + 1. Ids below may be unknown; the model's logits may be wider or narrower. */
uint32_t bd_tokenizer_vocab_size(const bd_tokenizer *tokenizer);
bool bd_tokenizer_is_known(const bd_tokenizer *tokenizer, int32_t id);
/* An added token marked "special": left out of text by skip_special. */
bool bd_tokenizer_is_special(const bd_tokenizer *tokenizer, int32_t id);
/* The id of a token by its content as written in the file ("<|eot_id|>", "</s>"); -1: there is
 * none. */
int32_t bd_tokenizer_token_id(const bd_tokenizer *tokenizer, const char *content,
                              size_t content_bytes);
/* The token's own bytes: leading space included, special tokens by name, perhaps part of a UTF-8
 * character. Borrowed from the tokenizer, not NUL-terminated; NULL with *bytes = 0 for an unknown
 * id. */
const char *bd_tokenizer_token_bytes(const bd_tokenizer *tokenizer, int32_t id, size_t *bytes);
/* The content as written in the file ("\xc4\xa0the" and the like); NULL with *bytes = 0 for an
 * unknown id. */
const char *bd_tokenizer_token_content(const bd_tokenizer *tokenizer, int32_t id, size_t *bytes);

/* ---- Decoding; unknown ids give no text ---- */

/* Appends the text of the ids: always valid UTF-8, U+FFFD for bytes that cannot be part of it.
 * BD_E_LIMIT or BD_E_MEMORY when out has failed (its cap, or memory). */
BD_MUST_CHECK bd_status bd_tokenizer_decode(const bd_tokenizer *tokenizer, const int32_t *ids,
                                            size_t count, bool skip_special, bd_strbuf *out,
                                            bd_error *err);

/* Streaming detokeniser: what push and flush append is, joined, exactly what bd_tokenizer_decode
 * gives for all ids pushed. Held back is only what later ids can still change: an unfinished UTF-8
 * character (at most 3 bytes) and, for vocabularies with byte fallback, the current run of byte
 * tokens (the whole run turns into U+FFFD if it ends invalid). Fields are private. */
typedef struct bd_detok {
    const bd_tokenizer *tokenizer; /* borrowed until deinit */
    bool skip_special;
    bool any_token;      /* something was decoded already */
    bool run_bad;        /* the byte run can no longer become valid; its U+FFFD are out */
    uint8_t held_count;  /* bytes in held */
    uint8_t held[4];     /* unfinished character */
    uint32_t strip_left; /* leading characters that may still be dropped */
    bd_strbuf run;       /* byte-fallback run so far */
} bd_detok;

void bd_detok_init(bd_detok *detok, const bd_tokenizer *tokenizer, bool skip_special);
void bd_detok_deinit(bd_detok *detok);
/* Appends what is certain after this id (maybe nothing). Lack of memory shows in out->failed. */
void bd_detok_push(bd_detok *detok, int32_t id, bd_strbuf *out);
/* Pushes ids and drops their text: start from a prompt, so that the first new token is decoded as a
 * continuation (its leading space kept) and a character begun in the prompt can be finished.
 * false: out of memory. */
BD_MUST_CHECK bool bd_detok_skip(bd_detok *detok, const int32_t *ids, size_t count);
/* End of the sequence: appends what was held back (as U+FFFD where invalid). Nothing may follow but
 * deinit, or init for a new sequence after deinit. */
void bd_detok_flush(bd_detok *detok, bd_strbuf *out);
/* Bytes held back now; 0 means the text so far is final. */
size_t bd_detok_held_bytes(const bd_detok *detok);

#ifdef __cplusplus
}
#endif
#endif
