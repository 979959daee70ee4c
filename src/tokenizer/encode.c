/* encode.c - the pipeline from text to ids. Threads: any; all state is in the encoder on the stack.
 */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "internal.h"
#include "unicode.h"

#define TEXT_BYTES_MAX ((size_t)1 << 30)

typedef struct encoder {
    const bd_tokenizer *tokenizer;
    bool parse_special;
    bd_token_vec *out;
    size_t count_max;     /* out->count may not pass it */
    bool pattern_gave_up; /* BD_E_LIMIT came from a split pattern */
    bd_scratch scratch;
    bd_pattern_match match;
    bd_strbuf normalized, spare, prefixed;
} encoder;

void bd_token_vec_deinit(bd_token_vec *vec) {
    free(vec->ids);
    *vec = (bd_token_vec){0};
}

static bd_status push_many(encoder *e, const uint32_t *ids, size_t count) {
    bd_token_vec *out = e->out;
    if (count > e->count_max - out->count) return BD_E_LIMIT;
    if (count > out->capacity - out->count) {
        size_t capacity = (out->count + count) * 2 < 64 ? 64 : (out->count + count) * 2;
        int32_t *grown = realloc(out->ids, capacity * sizeof *grown);
        if (!grown) return BD_E_MEMORY;
        out->ids = grown;
        out->capacity = capacity;
    }
    for (size_t i = 0; i < count; i++)
        out->ids[out->count + i] = (int32_t)ids[i];
    out->count += count;
    return BD_OK;
}

static bd_status push(encoder *e, int32_t id) {
    uint32_t one = (uint32_t)id;
    return push_many(e, &one, 1);
}

static bd_status encode_word(encoder *e, const uint8_t *word, size_t bytes) {
    int32_t id = bd_bpe_lookup(e->tokenizer, word, bytes);
    if (id >= 0 && e->tokenizer->flags[id] & BD_TOKEN_WHOLE) return push(e, id);
    /* What gives too many tokens in any case is not merged to find out. */
    const uint32_t each = e->tokenizer->bpe.token_bytes_max;
    if (each > 0 && bytes / each > e->count_max - e->out->count) return BD_E_LIMIT;
    const uint32_t *ids;
    size_t count;
    bd_status s = bd_bpe_word(e->tokenizer, &e->scratch, word, bytes, &ids, &count);
    return s == BD_OK ? push_many(e, ids, count) : s;
}

/* Start of the next U+2581 behind another character, after the word's leading ones; bytes: none. */
static size_t next_space_mark(const uint8_t *text, size_t bytes, size_t from) {
    while (bytes - from >= 3 && !memcmp(text + from, "\xe2\x96\x81", 3))
        from += 3;
    const uint8_t *hit = memmem(text + from, bytes - from, "\xe2\x96\x81", 3);
    return hit ? (size_t)(hit - text) : bytes;
}

/* No token and so no merge crosses such a place: each part is a word of its own, with the same ids.
 */
static bd_status encode_unsplit(encoder *e, const uint8_t *text, size_t bytes) {
    if (!e->tokenizer->bpe.breaks_at_space) return encode_word(e, text, bytes);
    for (size_t at = 0, end; at < bytes; at = end) {
        end = next_space_mark(text, bytes, at);
        bd_status s = encode_word(e, text + at, end - at);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

static bd_status split_from(encoder *e, uint32_t index, const uint8_t *text, size_t bytes);

static bd_status split_by_pattern(encoder *e, uint32_t index, const uint8_t *text, size_t bytes) {
    const bd_split_step *step = &e->tokenizer->split[index];
    for (size_t at = 0, start, end; at < bytes; at = end) {
        start = at;
        bd_status s = bd_pattern_next(step->code, &e->match, text, bytes, &start, &end);
        e->pattern_gave_up = s == BD_E_LIMIT;
        if (s == BD_AGAIN) {
            start = end = bytes;
        } else if (s != BD_OK) {
            return s;
        }
        if (start > at && step->keep_gaps) {
            s = split_from(e, index + 1, text + at, start - at);
            if (s != BD_OK) return s;
        }
        if (end > start && (s = split_from(e, index + 1, text + start, end - start)) != BD_OK)
            return s;
    }
    return BD_OK;
}

/* Recursion is as deep as there are split steps, at most BD_STEPS_MAX. */
static bd_status split_from(encoder *e, uint32_t index, const uint8_t *text, size_t bytes) {
    const bd_tokenizer *t = e->tokenizer;
    if (index == t->split_count)
        return t->bpe.byte_level ? encode_word(e, text, bytes) : encode_unsplit(e, text, bytes);
    bd_split_kind kind = t->split[index].kind;
    if (kind == BD_SPLIT_PCRE2) return split_by_pattern(e, index, text, bytes);
    for (size_t at = 0, end; at < bytes; at = end) {
        end = bd_split_end(kind, text, bytes, at);
        bd_status s = split_from(e, index + 1, text + at, end - at);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

/* Text between added tokens, normalized. */
static bd_status encode_piece(encoder *e, const uint8_t *text, size_t bytes) {
    if (e->tokenizer->add_prefix_space && text[0] != ' ') {
        bd_strbuf_clear(&e->prefixed);
        bd_strbuf_append(&e->prefixed, " ", 1);
        bd_strbuf_append(&e->prefixed, text, bytes);
        if (e->prefixed.failed) return BD_E_MEMORY;
        text = (const uint8_t *)e->prefixed.data;
        bytes = e->prefixed.len_bytes;
    }
    return split_from(e, 0, text, bytes);
}

static bool word_char_at(const uint8_t *text, size_t at) {
    size_t step;
    return bd_unicode_is_word(bd_utf8_get(text + at, &step));
}

static bool space_at(const uint8_t *text, size_t at, size_t *step) {
    return bd_unicode_class(bd_utf8_get(text + at, step)) == BD_CLASS_SPACE;
}

/* Applies single_word, lstrip and rstrip. false: the match does not count. */
static bool match_adjust(const uint8_t *text, size_t bytes, size_t from, bd_added_match *match) {
    const bd_added_token *token = match->token;
    size_t step;
    if (token->single_word &&
        ((match->start > 0 && word_char_at(text, bd_utf8_before(text, match->start))) ||
         (match->end < bytes && word_char_at(text, match->end))))
        return false;
    if (token->lstrip) {
        while (match->start > from) {
            size_t before = bd_utf8_before(text, match->start);
            if (!space_at(text, before, &step)) break;
            match->start = before;
        }
    }
    if (token->rstrip)
        while (match->end < bytes && space_at(text, match->end, &step))
            match->end += step;
    return true;
}

typedef bd_status (*piece_fn)(encoder *e, const uint8_t *text, size_t bytes);

/* Ids of the added tokens in text, and piece() on what lies between them. */
static bd_status cut_added(encoder *e, bool normalized, const uint8_t *text, size_t bytes,
                           piece_fn piece) {
    const bd_trie *trie = &e->tokenizer->tries[e->parse_special][normalized];
    size_t from = 0, search = 0;
    bd_added_match match;
    bd_status s;
    while (bd_added_find(e->tokenizer, trie, text, bytes, search, &match)) {
        /* The search goes on behind the content even where rstrip takes more, as the reference's
         * does. */
        search = match.end;
        if (!match_adjust(text, bytes, from, &match)) continue;
        if (match.start > from && (s = piece(e, text + from, match.start - from)) != BD_OK)
            return s;
        if ((s = push(e, match.token->id)) != BD_OK) return s;
        from = match.end;
    }
    return from < bytes ? piece(e, text + from, bytes - from) : BD_OK;
}

/* Text between added tokens that are looked for before normalizing. */
static bd_status normalize_piece(encoder *e, const uint8_t *text, size_t bytes) {
    if (bd_normalize_needed(e->tokenizer, text, bytes)) {
        bd_status s = bd_normalize(e->tokenizer, text, bytes, &e->normalized, &e->spare);
        if (s != BD_OK) return s;
        text = (const uint8_t *)e->normalized.data;
        bytes = e->normalized.len_bytes;
    }
    return cut_added(e, true, text, bytes, encode_piece);
}

static bd_status encode_all(encoder *e, const uint8_t *text, size_t bytes, bool add_special) {
    const bd_tokenizer *t = e->tokenizer;
    bd_status s = BD_OK;
    for (uint32_t i = 0; add_special && i < t->prefix_count && s == BD_OK; i++)
        s = push(e, t->prefix[i]);
    if (s == BD_OK && bytes > 0) s = cut_added(e, false, text, bytes, normalize_piece);
    for (uint32_t i = 0; add_special && i < t->suffix_count && s == BD_OK; i++)
        s = push(e, t->suffix[i]);
    return s;
}

static bd_status encode_failure(const encoder *e, bd_status s, size_t tokens_max, bd_error *err) {
    if (s == BD_E_MEMORY)
        return bd_fail(err, s, "text", "out of memory while the text was tokenised");
    if (e->pattern_gave_up)
        return bd_fail(err, s, "text", "the tokenizer's split pattern needs too much work on it");
    return bd_fail(err, s, "text", "the text has more than %zu tokens", tokens_max);
}

bd_status bd_tokenizer_encode(const bd_tokenizer *tokenizer, const char *text, size_t text_bytes,
                              const bd_encode_options *options, bd_token_vec *out, bd_error *err) {
    if (text_bytes > TEXT_BYTES_MAX)
        return bd_fail(err, BD_E_LIMIT, "text", "the text has more than %zu bytes", TEXT_BYTES_MAX);
    size_t valid = bd_utf8_valid_prefix(text, text_bytes);
    if (valid < text_bytes)
        return bd_fail(err, BD_E_FORMAT, "text", "the text is not valid UTF-8 at byte %zu", valid);
    size_t before = out->count;
    encoder e = {.tokenizer = tokenizer, .parse_special = options->parse_special, .out = out};
    e.count_max = SIZE_MAX / 16;
    if (options->tokens_max > 0 && options->tokens_max < e.count_max - before)
        e.count_max = before + options->tokens_max;
    bd_scratch_init(&e.scratch);
    bd_strbuf_init(&e.normalized, TEXT_BYTES_MAX * 4);
    bd_strbuf_init(&e.spare, TEXT_BYTES_MAX * 4);
    bd_strbuf_init(&e.prefixed, 0);
    bd_status s = encode_all(&e, (const uint8_t *)text, text_bytes, options->add_special_tokens);
    bd_scratch_deinit(&e.scratch);
    bd_pattern_match_deinit(&e.match);
    bd_strbuf_deinit(&e.normalized);
    bd_strbuf_deinit(&e.spare);
    bd_strbuf_deinit(&e.prefixed);
    if (s == BD_OK) return s;
    out->count = before;
    return encode_failure(&e, s, options->tokens_max, err);
}
