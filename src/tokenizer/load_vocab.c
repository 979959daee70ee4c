/* load_vocab.c - vocabulary and added tokens. Threads: the loading one. */
#include <stdlib.h>
#include <string.h>

#include "load.h"

static bd_status require_absent(bd_load *load, const cJSON *model, const char *key) {
    const cJSON *item = bd_load_member(model, key);
    if (!item || (cJSON_IsString(item) && item->valuestring[0] == '\0')) return BD_OK;
    if (cJSON_IsNumber(item) && item->valuedouble >= 0 && item->valuedouble <= 0) return BD_OK;
    return bd_fail(load->err, BD_E_UNSUPPORTED, load->name, "model: \"%s\" is not supported", key);
}

bd_status bd_load_model_options(bd_load *load, const cJSON *model) {
    bd_bpe *bpe = &load->tokenizer->bpe;
    const char *type = "BPE"; /* files of early versions leave the type out */
    bd_status s;
    if (!cJSON_IsObject(model))
        return bd_fail(load->err, BD_E_FORMAT, load->name, "\"model\" must be an object");
    if (bd_load_member(model, "type") && (s = bd_load_type(load, model, "model", &type)) != BD_OK)
        return s;
    if (strcmp(type, "BPE") != 0) return bd_load_unsupported(load, "model", "type", type);
    if ((s = require_absent(load, model, "dropout")) != BD_OK) return s;
    if ((s = require_absent(load, model, "continuing_subword_prefix")) != BD_OK) return s;
    if ((s = require_absent(load, model, "end_of_word_suffix")) != BD_OK) return s;
    if ((s = bd_load_bool(load, model, "model", "fuse_unk", 0, &bpe->fuse_unk)) != BD_OK) return s;
    if ((s = bd_load_bool(load, model, "model", "byte_fallback", 0, &bpe->byte_fallback)) != BD_OK)
        return s;
    return bd_load_bool(load, model, "model", "ignore_merges", 0, &bpe->ignore_merges);
}

static bd_status check_text(bd_load *load, const char *where, const char *text) {
    if (strlen(text) <= BD_TOKENIZER_TOKEN_BYTES_MAX) return BD_OK;
    return bd_fail(load->err, BD_E_LIMIT, load->name, "%s: the token \"%.40s...\" is too long",
                   where, text);
}

/* Largest id + 1 over vocabulary and added tokens, with every id's form checked. */
static bd_status count_ids(bd_load *load, const cJSON *vocab, const cJSON *added) {
    const cJSON *item;
    uint32_t id, added_count = 0;
    bd_status s;
    cJSON_ArrayForEach(item, vocab) {
        if ((s = bd_load_id(load, item, "model.vocab", &id)) != BD_OK) return s;
        if ((s = check_text(load, "model.vocab", item->string)) != BD_OK) return s;
        if (id >= load->tokenizer->id_count) load->tokenizer->id_count = id + 1;
        load->vocab_count++;
    }
    cJSON_ArrayForEach(item, added) {
        s = bd_load_id(load, bd_load_member(item, "id"), "added_tokens", &id);
        if (s != BD_OK) return s;
        if (id >= load->tokenizer->id_count) load->tokenizer->id_count = id + 1;
        if (++added_count > BD_TOKENIZER_ADDED_MAX)
            return bd_fail(load->err, BD_E_LIMIT, load->name, "more than %u added tokens",
                           BD_TOKENIZER_ADDED_MAX);
    }
    load->tokenizer->added_count = added_count;
    if (load->vocab_count == 0)
        return bd_fail(load->err, BD_E_FORMAT, load->name, "model.vocab is empty");
    return BD_OK;
}

static bd_status set_text(bd_load *load, const char *where, uint32_t id, const char *text) {
    if (load->texts[id] && strcmp(load->texts[id], text) != 0)
        return bd_fail(load->err, BD_E_FORMAT, load->name,
                       "%s: id %u is both \"%.60s\" and \"%.60s\"", where, id, load->texts[id],
                       text);
    if (!load->texts[id]) load->known_count++;
    load->texts[id] = text;
    load->tokenizer->flags[id] |= BD_TOKEN_KNOWN;
    return BD_OK;
}

/* The library gives an added token its id in the vocabulary, or else the next free one, and passes
 * over what the file says. A file that says something else has two readings, so it is refused. */
static bd_status place_added(bd_load *load, const cJSON *added) {
    uint8_t *flags = load->tokenizer->flags;
    uint32_t id, next = load->vocab_count;
    const cJSON *item;
    const char *text;
    bd_status s;
    cJSON_ArrayForEach(item, added) {
        if ((s = bd_load_string(load, item, "added_tokens", "content", &text)) != BD_OK) return s;
        if ((s = check_text(load, "added_tokens", text)) != BD_OK) return s;
        if ((s = bd_load_id(load, bd_load_member(item, "id"), "added_tokens", &id)) != BD_OK)
            return s;
        if (text[0] == '\0')
            return bd_fail(load->err, BD_E_FORMAT, load->name, "added_tokens: empty content");
        if (!(flags[id] & (BD_TOKEN_MODEL | BD_TOKEN_ADDED)) && id != next)
            return bd_fail(load->err, BD_E_FORMAT, load->name,
                           "added_tokens: \"%.80s\" has id %u where %u comes next", text, id, next);
        if ((s = set_text(load, "added_tokens", id, text)) != BD_OK) return s;
        flags[id] |= BD_TOKEN_ADDED;
        if (id >= next) next = id + 1;
    }
    return BD_OK;
}

static bd_status build_content(bd_load *load) {
    bd_tokenizer *t = load->tokenizer;
    size_t total = 0;
    for (uint32_t id = 0; id < t->id_count; id++)
        if (load->texts[id]) total += strlen(load->texts[id]);
    BD_ASSERT(total <= BD_TOKENIZER_FILE_BYTES_MAX);
    t->content.blob = malloc(total + 1);
    t->content.offsets = calloc((size_t)t->id_count + 1, sizeof *t->content.offsets);
    if (!t->content.blob || !t->content.offsets) return bd_load_memory(load);
    size_t at = 0;
    for (uint32_t id = 0; id < t->id_count; id++) {
        t->content.offsets[id] = (uint32_t)at;
        if (!load->texts[id]) continue;
        size_t bytes = strlen(load->texts[id]);
        memcpy(t->content.blob + at, load->texts[id], bytes);
        at += bytes;
    }
    t->content.offsets[t->id_count] = (uint32_t)at;
    if (bd_key_table_init(&t->by_content, &t->content, load->known_count) != BD_OK)
        return bd_load_memory(load);
    for (uint32_t id = 0; id < t->id_count; id++)
        if (load->texts[id] && !bd_key_table_add(&t->by_content, id))
            return bd_fail(load->err, BD_E_FORMAT, load->name, "the token \"%.80s\" has two ids",
                           load->texts[id]);
    return BD_OK;
}

bd_status bd_load_vocab(bd_load *load, const cJSON *model, const cJSON *added) {
    bd_tokenizer *t = load->tokenizer;
    const cJSON *vocab = bd_load_member(model, "vocab"), *item;
    bd_status s;
    if (!cJSON_IsObject(vocab))
        return bd_fail(load->err, BD_E_FORMAT, load->name, "model.vocab must be an object");
    if (added && !cJSON_IsArray(added))
        return bd_fail(load->err, BD_E_FORMAT, load->name, "\"added_tokens\" must be an array");
    if ((s = count_ids(load, vocab, added)) != BD_OK) return s;
    load->texts = calloc(t->id_count, sizeof *load->texts);
    t->flags = calloc(t->id_count, sizeof *t->flags);
    if (!load->texts || !t->flags) return bd_load_memory(load);
    cJSON_ArrayForEach(item, vocab) {
        uint32_t id = (uint32_t)item->valuedouble;
        if ((s = set_text(load, "model.vocab", id, item->string)) != BD_OK) return s;
        t->flags[id] |= BD_TOKEN_MODEL;
    }
    if ((s = place_added(load, added)) != BD_OK) return s;
    if ((s = build_content(load)) != BD_OK) return s;
    t->bpe.unk_id = -1;
    if (!bd_load_member(model, "unk_token")) return BD_OK;
    const char *unk;
    if ((s = bd_load_string(load, model, "model", "unk_token", &unk)) != BD_OK) return s;
    t->bpe.unk_id = bd_key_table_find(&t->by_content, unk, strlen(unk));
    if (t->bpe.unk_id >= 0 && t->flags[t->bpe.unk_id] & BD_TOKEN_MODEL) return BD_OK;
    return bd_fail(load->err, BD_E_FORMAT, load->name,
                   "model: unk_token \"%.80s\" is not in the vocabulary", unk);
}

static bd_status read_added(bd_load *load, const cJSON *item, bd_added_token *token) {
    const char *where = "added_tokens";
    bd_status s;
    token->id = (int32_t)bd_load_member(item, "id")->valuedouble;
    if ((s = bd_load_bool(load, item, where, "single_word", 0, &token->single_word)) != BD_OK)
        return s;
    if ((s = bd_load_bool(load, item, where, "lstrip", 0, &token->lstrip)) != BD_OK) return s;
    if ((s = bd_load_bool(load, item, where, "rstrip", 0, &token->rstrip)) != BD_OK) return s;
    if ((s = bd_load_bool(load, item, where, "special", 0, &token->special)) != BD_OK) return s;
    /* The library's own default. */
    return bd_load_bool(load, item, where, "normalized", !token->special, &token->normalized);
}

/* Keeps the text to look for; text pointers are set when all are there, as the buffer moves. */
static bd_status added_text(bd_load *load, bd_added_token *token, bd_strbuf *texts,
                            bd_strbuf *normal, bd_strbuf *spare) {
    bd_tokenizer *t = load->tokenizer;
    const char *text = bd_strtab_get(&t->content, (uint32_t)token->id, &token->bytes);
    if (token->normalized) {
        if (bd_normalize(t, (const uint8_t *)text, token->bytes, normal, spare) != BD_OK)
            return bd_load_memory(load);
        text = normal->data;
        token->bytes = normal->len_bytes;
    }
    bd_strbuf_append(texts, text, token->bytes);
    return texts->failed ? bd_load_memory(load) : BD_OK;
}

static bd_status fill_tries(bd_load *load) {
    bd_tokenizer *t = load->tokenizer;
    size_t at = 0;
    for (uint32_t i = 0; i < t->added_count; i++) {
        bd_added_token *token = &t->added[i];
        token->text = t->added_texts + at;
        at += token->bytes;
        if (token->bytes == 0) continue; /* normalized away: nothing to find */
        for (int parse_special = token->special ? 1 : 0; parse_special < 2; parse_special++)
            if (bd_trie_add(&t->tries[parse_special][token->normalized], token->text, token->bytes,
                            (int32_t)i) != BD_OK)
                return bd_load_memory(load);
    }
    return BD_OK;
}

bd_status bd_load_added(bd_load *load, const cJSON *added) {
    bd_tokenizer *t = load->tokenizer;
    if (t->added_count == 0) return BD_OK;
    t->added = calloc(t->added_count, sizeof *t->added);
    if (!t->added) return bd_load_memory(load);
    bd_strbuf texts, normal, spare;
    bd_strbuf_init(&texts, BD_TOKENIZER_FILE_BYTES_MAX * 4);
    bd_strbuf_init(&normal, BD_TOKENIZER_FILE_BYTES_MAX);
    bd_strbuf_init(&spare, BD_TOKENIZER_FILE_BYTES_MAX);
    bd_status s = BD_OK;
    const cJSON *item;
    uint32_t count = 0;
    cJSON_ArrayForEach(item, added) {
        bd_added_token *token = &t->added[count];
        if ((s = read_added(load, item, token)) != BD_OK) break;
        if (!(t->flags[token->id] & BD_TOKEN_ADDED)) continue; /* the first of equal ones counts */
        t->flags[token->id] &= (uint8_t)~BD_TOKEN_ADDED;
        if (token->special) t->flags[token->id] |= BD_TOKEN_SPECIAL;
        if ((s = added_text(load, token, &texts, &normal, &spare)) != BD_OK) break;
        count++;
    }
    t->added_count = count;
    t->added_texts = texts.data; /* ours from here on */
    bd_strbuf_deinit(&normal);
    bd_strbuf_deinit(&spare);
    return s == BD_OK ? fill_tries(load) : s;
}
