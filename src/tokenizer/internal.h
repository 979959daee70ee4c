/* internal.h - the parts of a loaded tokenizer, private to this room. All of it is immutable after
 * load; what encoding needs besides lives in a bd_scratch on the caller's stack.
 *
 *   text ─ added tokens (not normalized) ─ normalizer ─ added tokens (normalized) ─ split ─ BPE ─
 * template */
#ifndef BITDELTA_TOKENIZER_INTERNAL_H
#define BITDELTA_TOKENIZER_INTERNAL_H

#include "bitdelta/tokenizer/tokenizer.h"
#include "keys.h"

/* ---- BPE (bpe.c) ---- */

#define BD_RANK_NONE UINT32_MAX

typedef struct bd_bpe {
    uint64_t *slots;     /* left id << 43 | right id << 22 | rank; all ones: empty */
    uint32_t slot_shift; /* hash >> slot_shift is a slot */
    uint32_t slot_mask;
    uint32_t *result_of; /* [merge_count] id made by the merge of this rank */
    uint32_t merge_count;
    int32_t unk_id;        /* -1: characters without an id are dropped */
    int32_t byte_ids[256]; /* byte_level: id of each byte; else of "<0xNN>" where byte_fallback */
    bool byte_level;       /* symbols are bytes and not characters */
    bool fuse_unk, byte_fallback, ignore_merges;
    bool breaks_at_space; /* no token has U+2581 after another character: words may be cut there */
    uint32_t token_bytes_max; /* no token takes more of a word; 0: text may vanish or be fused */
} bd_bpe;

/* ---- Added tokens (added.c) ---- */

typedef struct bd_added_token {
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
    const char *text; /* what is looked for: the content, normalized if `normalized` */
    size_t bytes;
} bd_added_token;

typedef struct bd_trie_node {
    uint32_t child, sibling; /* 0: none (the root is nobody's child) */
    int32_t token;           /* index of the added token that ends here, -1: none */
    uint8_t byte;
} bd_trie_node;

typedef struct bd_trie {
    bd_trie_node *nodes; /* NULL: no tokens */
    uint32_t count, capacity;
    uint32_t first[256]; /* node of each first byte, 0: none */
    int only_first;      /* the one first byte there is, or -1 */
} bd_trie;

/* ---- Normalizer (normalize.c) and splitting (split.c) ---- */

#define BD_STEPS_MAX 16u

typedef enum bd_normalize_kind {
    BD_NORMALIZE_NFC,
    BD_NORMALIZE_PREPEND,
    BD_NORMALIZE_REPLACE
} bd_normalize_kind;

typedef struct bd_normalize_step {
    bd_normalize_kind kind;
    char *pattern, *content; /* owned; pattern only for REPLACE */
    size_t pattern_bytes, content_bytes;
} bd_normalize_step;

typedef enum bd_split_kind {
    BD_SPLIT_GPT2,   /* ByteLevel's own pattern */
    BD_SPLIT_LLAMA3, /* \p{N}{1,3} */
    BD_SPLIT_QWEN2,  /* \p{N} */
    BD_SPLIT_DIGIT,  /* Digits: each \p{N} alone, and what lies between */
    BD_SPLIT_DIGITS, /* Digits: runs of \p{N}, and what lies between */
    BD_SPLIT_PCRE2   /* any other pattern */
} bd_split_kind;

typedef struct bd_split_step {
    bd_split_kind kind;
    bool keep_gaps; /* text between matches is kept as words of its own */
    void *code;     /* PCRE2 only: pcre2_code, owned */
} bd_split_step;

/* ---- Decoder (decode.c, load_decoder.c) ---- */

typedef enum bd_decoder_kind {
    BD_DECODER_BYTES, /* bytes joined, invalid UTF-8 replaced */
    BD_DECODER_TEXT,  /* strings joined, byte tokens by ByteFallback's rule */
    BD_DECODER_SPACED /* no decoder in the file: strings joined by a space */
} bd_decoder_kind;

typedef struct bd_decoder {
    bd_decoder_kind kind;
    bool byte_fallback;
    uint32_t strip_count; /* characters dropped at the start of the whole text */
    uint32_t strip_char;
} bd_decoder;

enum {
    BD_TOKEN_KNOWN = 1,
    BD_TOKEN_SPECIAL = 2,
    BD_TOKEN_MODEL = 4,  /* in the model's vocabulary, not only added */
    BD_TOKEN_BYTE = 8,   /* decoder: one byte of a byte-fallback run */
    BD_TOKEN_WHOLE = 16, /* a word spelled like this token encodes to it alone */
    BD_TOKEN_ADDED = 32  /* in added_tokens */
};

struct bd_tokenizer {
    uint32_t id_count; /* largest id + 1 */
    uint8_t *flags;    /* [id_count] BD_TOKEN_* */
    bd_strtab content; /* as in the file */
    bd_strtab bytes;   /* as decoded */
    bd_key_table by_content;
    bd_key_table by_bytes; /* byte_level: tokens spelled in ByteLevel's alphabet, by their bytes */
    bd_bpe bpe;
    bd_added_token *added; /* [added_count] */
    char *added_texts;     /* what bd_added_token.text points into */
    uint32_t added_count;
    bd_trie tries[2][2]; /* [parse_special][normalized] */
    bd_normalize_step normalize[BD_STEPS_MAX];
    uint32_t normalize_count;
    bd_split_step split[BD_STEPS_MAX];
    uint32_t split_count;
    bool add_prefix_space;
    int32_t *prefix, *suffix; /* the template's tokens */
    uint32_t prefix_count, suffix_count;
    bd_decoder decoder;
};

/* ---- Candidate pairs of a long word (pair_queue.c) ---- */

typedef struct bd_pair_bucket bd_pair_bucket;
typedef struct bd_pair_chunk bd_pair_chunk;

typedef struct bd_pair_queue {
    bool bucketed, begun;
    uint64_t *heap; /* rank << 32 | position */
    size_t heap_count, heap_capacity;
    bd_pair_bucket *buckets; /* [merge_count] */
    uint32_t *ranks;         /* [merge_count] a heap: those whose bucket is not empty */
    size_t rank_count;
    bd_pair_chunk *chunks;
    size_t chunk_count, chunk_capacity;
    uint32_t free_chunk;
    uint32_t *batch; /* positions of batch_rank, ascending */
    size_t batch_count, batch_at, batch_capacity;
    uint32_t batch_rank;
} bd_pair_queue;

void bd_pair_queue_init(bd_pair_queue *queue);
void bd_pair_queue_deinit(bd_pair_queue *queue);
BD_MUST_CHECK bd_status bd_pair_queue_begin(bd_pair_queue *queue, size_t symbol_count,
                                            uint32_t merge_count);
BD_MUST_CHECK bd_status bd_pair_queue_push(bd_pair_queue *queue, uint32_t rank, uint32_t pos);
/* soon: a position that will come up, or pos. BD_AGAIN: empty. */
BD_MUST_CHECK bd_status bd_pair_queue_pop(bd_pair_queue *queue, uint32_t *rank, uint32_t *pos,
                                          uint32_t *soon);

/* ---- Scratch of one encode call (bpe.c) ---- */

#define BD_SMALL_WORD 48u /* symbols; a longer word goes through the heap */

typedef struct bd_scratch {
    uint32_t small_ids[BD_SMALL_WORD], small_ranks[BD_SMALL_WORD];
    uint32_t *ids, *ranks, *next, *prev; /* [capacity] for long words, one block at ids */
    size_t capacity;
    bd_pair_queue queue;
} bd_scratch;

void bd_scratch_init(bd_scratch *scratch);
void bd_scratch_deinit(bd_scratch *scratch);

/* Merges one word. *ids points into scratch until the next call. BD_E_MEMORY only. */
BD_MUST_CHECK bd_status bd_bpe_word(const bd_tokenizer *tokenizer, bd_scratch *scratch,
                                    const uint8_t *word, size_t bytes, const uint32_t **ids,
                                    size_t *count);
/* Id of the token spelled exactly like the word in the model's vocabulary, or -1. */
int32_t bd_bpe_lookup(const bd_tokenizer *tokenizer, const uint8_t *word, size_t bytes);

BD_MUST_CHECK bd_status bd_bpe_init(bd_bpe *bpe, uint32_t merge_count);
/* The pair's rank becomes `rank`, whatever it was: the last of equal merges counts. */
void bd_bpe_put(bd_bpe *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t result);
void bd_bpe_deinit(bd_bpe *bpe);

/* ---- Added tokens ---- */

typedef struct bd_added_match {
    size_t start, end; /* of the content itself */
    const bd_added_token *token;
} bd_added_match;

BD_MUST_CHECK bd_status bd_trie_add(bd_trie *trie, const char *text, size_t bytes, int32_t token);
void bd_trie_deinit(bd_trie *trie);
/* Leftmost and then longest match at or after `from`; false: none. */
bool bd_added_find(const bd_tokenizer *tokenizer, const bd_trie *trie, const uint8_t *text,
                   size_t bytes, size_t from, bd_added_match *match);

/* ---- Normalizer ---- */

/* Whether any step could change this text; if not it may be used as it is. */
bool bd_normalize_needed(const bd_tokenizer *tokenizer, const uint8_t *text, size_t bytes);
/* Appends the normalized text to out (empty before). a is a second buffer. */
BD_MUST_CHECK bd_status bd_normalize(const bd_tokenizer *tokenizer, const uint8_t *text,
                                     size_t bytes, bd_strbuf *out, bd_strbuf *spare);
BD_MUST_CHECK bd_status bd_nfc_append(const uint8_t *text, size_t bytes, bd_strbuf *out);

/* ---- Splitting ---- */

/* End of the word that begins at pos by a kind that is not PCRE2; such a kind leaves no gaps. */
size_t bd_split_end(bd_split_kind kind, const uint8_t *text, size_t bytes, size_t pos);
/* The kind for a pattern as written in tokenizer.json; BD_SPLIT_PCRE2 when it is not a known one.
 */
bd_split_kind bd_split_kind_of(const char *pattern);
/* code: pcre2_code. message (128 bytes) says what is wrong with the pattern. */
BD_MUST_CHECK bd_status bd_pattern_compile(void **code, const char *pattern, bool literal,
                                           char message[128]);
void bd_pattern_destroy(void *code);

typedef struct bd_pattern_match {
    void *data, *context; /* pcre2_match_data, pcre2_match_context; NULL until first used */
} bd_pattern_match;

/* Next non-empty match at or after *start: BD_OK with [*start, *end), BD_AGAIN none, BD_E_LIMIT the
 * pattern needs too much work on this text, BD_E_MEMORY. */
BD_MUST_CHECK bd_status bd_pattern_next(const void *code, bd_pattern_match *match,
                                        const uint8_t *text, size_t bytes, size_t *start,
                                        size_t *end);
void bd_pattern_match_deinit(bd_pattern_match *match);

#endif
