/* load_merges.c - what BPE needs beside the vocabulary. Threads: the loading one. */
#include <stdio.h>
#include <string.h>

#include "load.h"
#include "unicode.h"

/* A token can be found by its bytes if all of it is written in ByteLevel's alphabet. */
static bool in_byte_level_alphabet(const bd_tokenizer *t, uint32_t id) {
    size_t bytes, step;
    const char *text = bd_strtab_get(&t->content, id, &bytes);
    for (size_t at = 0; at < bytes; at += step)
        if (bd_byte_level_byte(bd_utf8_get((const uint8_t *)text + at, &step)) < 0) return false;
    return bytes > 0;
}

static bd_status byte_level_ids(bd_load *load) {
    bd_tokenizer *t = load->tokenizer;
    if (bd_key_table_init(&t->by_bytes, &t->bytes, load->vocab_count) != BD_OK)
        return bd_load_memory(load);
    for (uint32_t id = 0; id < t->id_count; id++)
        if (t->flags[id] & BD_TOKEN_MODEL && in_byte_level_alphabet(t, id))
            (void)bd_key_table_add(&t->by_bytes, id); /* equal bytes would be equal content */
    for (int byte = 0; byte < 256; byte++) {
        uint8_t one = (uint8_t)byte;
        t->bpe.byte_ids[byte] = bd_key_table_find(&t->by_bytes, &one, 1);
        if (t->bpe.byte_fallback && t->bpe.byte_ids[byte] < 0)
            return bd_fail(load->err, BD_E_UNSUPPORTED, load->name,
                           "model: byte_fallback below ByteLevel is not supported for a vocabulary "
                           "that lacks byte 0x%02X",
                           (unsigned)byte);
    }
    return BD_OK;
}

static void fallback_ids(bd_tokenizer *t) {
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        int bytes = snprintf(text, sizeof text, "<0x%02X>", (unsigned)byte);
        int32_t id = bd_key_table_find(&t->by_content, text, (size_t)bytes);
        t->bpe.byte_ids[byte] = id >= 0 && t->flags[id] & BD_TOKEN_MODEL ? id : -1;
    }
}

/* Both halves of "left right" or ["left", "right"]; false: it is neither. */
static bool merge_halves(const cJSON *item, const char **left, size_t *left_bytes,
                         const char **right) {
    if (cJSON_IsString(item)) {
        const char *space = strchr(item->valuestring, ' ');
        if (!space || strchr(space + 1, ' ')) return false;
        *left = item->valuestring;
        *left_bytes = (size_t)(space - item->valuestring);
        *right = space + 1;
        return true;
    }
    const cJSON *first = item->child, *second = first ? first->next : NULL;
    if (!cJSON_IsArray(item) || !cJSON_IsString(first) || !cJSON_IsString(second) || second->next)
        return false;
    *left = first->valuestring;
    *left_bytes = strlen(first->valuestring);
    *right = second->valuestring;
    return true;
}

static int32_t model_id(const bd_tokenizer *t, const char *text, size_t bytes) {
    int32_t id = bd_key_table_find(&t->by_content, text, bytes);
    return id >= 0 && t->flags[id] & BD_TOKEN_MODEL ? id : -1;
}

static bd_status put_merge(bd_load *load, const cJSON *item, uint32_t rank, bd_strbuf *joined) {
    bd_tokenizer *t = load->tokenizer;
    const char *left, *right;
    size_t left_bytes;
    if (!merge_halves(item, &left, &left_bytes, &right))
        return bd_fail(load->err, BD_E_FORMAT, load->name, "merge %u is not a pair of strings",
                       rank);
    bd_strbuf_clear(joined);
    bd_strbuf_append(joined, left, left_bytes);
    bd_strbuf_puts(joined, right);
    if (joined->failed) return bd_load_memory(load);
    int32_t left_id = model_id(t, left, left_bytes);
    int32_t right_id = model_id(t, right, strlen(right));
    int32_t result = model_id(t, joined->data, joined->len_bytes);
    if (left_id < 0 || right_id < 0 || result < 0)
        return bd_fail(load->err, BD_E_FORMAT, load->name,
                       "merge %u (\"%.40s\"): a part or the result is not in the vocabulary", rank,
                       joined->data);
    bd_bpe_put(&t->bpe, (uint32_t)left_id, (uint32_t)right_id, rank, (uint32_t)result);
    return BD_OK;
}

bd_status bd_load_merges(bd_load *load, const cJSON *model) {
    bd_tokenizer *t = load->tokenizer;
    const cJSON *merges, *item;
    uint32_t count = 0, rank = 0;
    bd_status s = bd_load_array(load, model, "model", "merges", &merges);
    if (s != BD_OK) return s;
    cJSON_ArrayForEach(item, merges) {
        if (++count >= BD_TOKENIZER_MERGES_MAX)
            return bd_fail(load->err, BD_E_LIMIT, load->name, "more than %u merges",
                           BD_TOKENIZER_MERGES_MAX - 1);
    }
    if (t->bpe.byte_level) {
        if ((s = byte_level_ids(load)) != BD_OK) return s;
    } else {
        fallback_ids(t);
    }
    if (bd_bpe_init(&t->bpe, count) != BD_OK) return bd_load_memory(load);
    bd_strbuf joined;
    bd_strbuf_init(&joined, 2 * BD_TOKENIZER_TOKEN_BYTES_MAX);
    cJSON_ArrayForEach(item, merges) {
        if ((s = put_merge(load, item, rank++, &joined)) != BD_OK) break;
    }
    bd_strbuf_deinit(&joined);
    return s;
}

/* Whether U+2581 follows another character somewhere in the text. */
static bool mark_inside(const char *text, size_t bytes) {
    size_t at = 0;
    while (bytes - at >= 3 && !memcmp(text + at, "\xe2\x96\x81", 3))
        at += 3;
    return memmem(text + at, bytes - at, "\xe2\x96\x81", 3) != NULL;
}

/* Whether every byte has a token: nothing is ever unknown. */
static bool knows_all_bytes(const bd_bpe *bpe) {
    for (int byte = 0; byte < 256; byte++)
        if (bpe->byte_ids[byte] < 0) return false;
    return bpe->byte_level || bpe->byte_fallback;
}

/* Whether a character can vanish between two others, for lack of any token: its neighbours then
 * merge. */
static bool drops_characters(const bd_bpe *bpe) {
    return bpe->unk_id < 0 && !knows_all_bytes(bpe);
}

/* An unknown character is one token of up to four bytes. */
static uint32_t token_bytes_max(const bd_tokenizer *t) {
    if (!knows_all_bytes(&t->bpe) && (t->bpe.unk_id < 0 || t->bpe.fuse_unk)) return 0;
    size_t longest = 4, bytes;
    for (uint32_t id = 0; id < t->id_count; id++) {
        (void)bd_strtab_get(t->bpe.byte_level ? &t->bytes : &t->content, id, &bytes);
        if (t->flags[id] & BD_TOKEN_MODEL && bytes > longest) longest = bytes;
    }
    return (uint32_t)longest;
}

static bool breaks_at_space(const bd_tokenizer *t) {
    if (t->bpe.byte_level || t->bpe.ignore_merges || drops_characters(&t->bpe)) return false;
    if (model_id(t, "\xe2\x96\x81", 3) < 0) return false;
    for (uint32_t id = 0; id < t->id_count; id++) {
        size_t bytes;
        const char *text = bd_strtab_get(&t->content, id, &bytes);
        if (t->flags[id] & BD_TOKEN_MODEL && mark_inside(text, bytes)) return false;
    }
    return true;
}

/* Marks the tokens that a word spelled like them turns into; most words of a text are such a token,
 * and a look-up is all they cost. */
bd_status bd_load_shortcuts(bd_load *load) {
    bd_tokenizer *t = load->tokenizer;
    bd_scratch scratch;
    bd_scratch_init(&scratch);
    t->bpe.breaks_at_space = breaks_at_space(t);
    t->bpe.token_bytes_max = token_bytes_max(t);
    bd_status s = BD_OK;
    for (uint32_t id = 0; id < t->id_count && s == BD_OK; id++) {
        size_t bytes, count = 0;
        const uint32_t *ids = NULL;
        if (!(t->flags[id] & BD_TOKEN_MODEL)) continue;
        const char *word = bd_strtab_get(t->bpe.byte_level ? &t->bytes : &t->content, id, &bytes);
        if (bd_bpe_lookup(t, (const uint8_t *)word, bytes) != (int32_t)id) continue;
        bool whole = t->bpe.ignore_merges;
        if (!whole) {
            s = bd_bpe_word(t, &scratch, (const uint8_t *)word, bytes, &ids, &count);
            whole = s == BD_OK && count == 1 && ids[0] == id;
        }
        if (whole) t->flags[id] |= BD_TOKEN_WHOLE;
    }
    bd_scratch_deinit(&scratch);
    return s == BD_OK ? BD_OK : bd_load_memory(load);
}
