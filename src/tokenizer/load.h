/* load.h - reading tokenizer.json into a bd_tokenizer, private to this room. Each step fills its
 * part and on failure leaves what it has made to bd_tokenizer_destroy(). Threads: the loading one.
 */
#ifndef BITDELTA_TOKENIZER_LOAD_H
#define BITDELTA_TOKENIZER_LOAD_H

#include <cjson/cJSON.h>

#include "internal.h"

typedef struct bd_load {
    bd_tokenizer *tokenizer;
    const char *name; /* of the file, the subject of every error */
    bd_error *err;
    const char **texts;   /* [id_count] content of each id, in the JSON tree; NULL: unknown id */
    uint32_t vocab_count; /* entries of the model's vocabulary */
    uint32_t known_count; /* ids with a text */
} bd_load;

/* ---- JSON (load_json.c): `where` names the component in messages ---- */

/* The last member of that name, as most parsers have it; NULL: none, or it is null. */
const cJSON *bd_load_member(const cJSON *object, const char *key);
BD_MUST_CHECK bd_status bd_load_type(bd_load *load, const cJSON *object, const char *where,
                                     const char **type);
BD_MUST_CHECK bd_status bd_load_string(bd_load *load, const cJSON *object, const char *where,
                                       const char *key, const char **value);
/* fallback: 0 or 1 when the member may be missing, -1 when it may not. */
BD_MUST_CHECK bd_status bd_load_bool(bd_load *load, const cJSON *object, const char *where,
                                     const char *key, int fallback, bool *value);
BD_MUST_CHECK bd_status bd_load_array(bd_load *load, const cJSON *object, const char *where,
                                      const char *key, const cJSON **value);
/* A token id: a whole number from 0 up to BD_TOKENIZER_VOCAB_MAX - 1. */
BD_MUST_CHECK bd_status bd_load_id(bd_load *load, const cJSON *item, const char *where,
                                   uint32_t *id);
/* A pattern {"String": s} or {"Regex": s}. */
BD_MUST_CHECK bd_status bd_load_pattern(bd_load *load, const cJSON *object, const char *where,
                                        const char **pattern, bool *regex);
bd_status bd_load_unsupported(bd_load *load, const char *where, const char *what,
                              const char *value);
bd_status bd_load_memory(bd_load *load);

/* ---- Steps, in this order ---- */

/* load_vocab.c: options of the model, then every id's text, flags and the tables over them. */
BD_MUST_CHECK bd_status bd_load_model_options(bd_load *load, const cJSON *model);
BD_MUST_CHECK bd_status bd_load_vocab(bd_load *load, const cJSON *model, const cJSON *added);
/* load_pipeline.c */
BD_MUST_CHECK bd_status bd_load_pre_tokenizer(bd_load *load, const cJSON *object);
BD_MUST_CHECK bd_status bd_load_normalizer(bd_load *load, const cJSON *object);
BD_MUST_CHECK bd_status bd_load_post_processor(bd_load *load, const cJSON *object);
/* load_decoder.c: the decoder, and bytes of every id. */
BD_MUST_CHECK bd_status bd_load_decoder(bd_load *load, const cJSON *object);
/* load_merges.c: byte ids and merges, then what is known once the model is complete. */
BD_MUST_CHECK bd_status bd_load_merges(bd_load *load, const cJSON *model);
BD_MUST_CHECK bd_status bd_load_shortcuts(bd_load *load);
/* load_vocab.c: needs the normalizer. */
BD_MUST_CHECK bd_status bd_load_added(bd_load *load, const cJSON *added);

/* Byte for a character of ByteLevel's alphabet, -1: not in it. */
int bd_byte_level_byte(uint32_t code_point);

#endif
