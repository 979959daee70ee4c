/* logprobs.c - see logprobs.h. */
#include "logprobs.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

void bd_token_name_write(const bd_token_names *names, int32_t id, bd_strbuf *out) {
    size_t bytes = 0;
    const char *text = NULL;
    if (!names->as_ids && names->tokenizer)
        text = bd_tokenizer_token_bytes(names->tokenizer, id, &bytes);
    if (text)
        bd_strbuf_json_string(out, text, bytes);
    else
        bd_strbuf_printf(out, "\"token_id:%" PRId32 "\"", id);
}

void bd_logprob_write(float logprob, bd_strbuf *out) {
    if (!(logprob > -9999.0f))
        bd_strbuf_puts(out, "-9999.0");
    else
        bd_strbuf_json_float(out, logprob);
}

static void comma(bd_strbuf *out) {
    if (out->len_bytes > 0) bd_strbuf_append(out, ",", 1);
}

void bd_logprob_lists_clear(bd_logprob_lists *lists) {
    bd_strbuf_clear(&lists->tokens);
    bd_strbuf_clear(&lists->values);
    bd_strbuf_clear(&lists->top);
    bd_strbuf_clear(&lists->offsets);
}

void bd_logprob_lists_deinit(bd_logprob_lists *lists) {
    bd_strbuf_deinit(&lists->tokens);
    bd_strbuf_deinit(&lists->values);
    bd_strbuf_deinit(&lists->top);
    bd_strbuf_deinit(&lists->offsets);
}

size_t bd_logprob_lists_bytes(const bd_logprob_lists *lists) {
    return lists->tokens.len_bytes + lists->values.len_bytes + lists->top.len_bytes +
           lists->offsets.len_bytes;
}

bool bd_logprob_lists_failed(const bd_logprob_lists *lists) {
    return lists->tokens.failed || lists->values.failed || lists->top.failed ||
           lists->offsets.failed;
}

/* Different ids may be shown as the same string. They come by falling log-probability, so the first
 * one under a key stays: a smaller number would make a token look less likely than it was. */
static void top_member(const bd_token_names *names, int32_t id, float logprob, size_t keys[][2],
                       uint32_t *count, bd_strbuf *out) {
    if (out->failed) return;
    size_t before = out->len_bytes;
    if (*count > 0) bd_strbuf_append(out, ",", 1);
    size_t key = out->len_bytes;
    bd_token_name_write(names, id, out);
    if (out->failed) return;
    size_t bytes = out->len_bytes - key;
    for (uint32_t i = 0; i < *count; i++) {
        if (keys[i][1] != bytes || memcmp(out->data + keys[i][0], out->data + key, bytes) != 0)
            continue;
        out->len_bytes = before;
        out->data[before] = '\0';
        return;
    }
    keys[*count][0] = key;
    keys[*count][1] = bytes;
    (*count)++;
    bd_strbuf_append(out, ":", 1);
    bd_logprob_write(logprob, out);
}

static void top_object(const bd_token_names *names, const bd_token_result *token,
                       uint32_t alternatives, bd_strbuf *out) {
    size_t keys[BD_TOP_MAX + 1][2];
    uint32_t count = 0;
    bool actual_seen = false;
    if (alternatives > token->top_count) alternatives = token->top_count;
    bd_strbuf_append(out, "{", 1);
    for (uint32_t i = 0; i < alternatives; i++) {
        bool actual = token->top_ids[i] == token->id;
        actual_seen = actual_seen || actual;
        /* The same number as in token_logprobs, which clients compare with ==. */
        top_member(names, token->top_ids[i], actual ? token->logprob : token->top_logprobs[i], keys,
                   &count, out);
    }
    if (!actual_seen) top_member(names, token->id, token->logprob, keys, &count, out);
    bd_strbuf_append(out, "}", 1);
}

void bd_logprob_lists_add(bd_logprob_lists *lists, const bd_token_names *names,
                          const bd_token_result *token, uint32_t alternatives, uint64_t offset) {
    comma(&lists->tokens);
    bd_token_name_write(names, token->id, &lists->tokens);
    comma(&lists->values);
    bd_logprob_write(token->logprob, &lists->values);
    comma(&lists->top);
    top_object(names, token, alternatives, &lists->top);
    comma(&lists->offsets);
    bd_strbuf_printf(&lists->offsets, "%" PRIu64, offset);
}

void bd_logprob_lists_add_first(bd_logprob_lists *lists, const bd_token_names *names, int32_t id) {
    bd_token_name_write(names, id, &lists->tokens);
    bd_strbuf_puts(&lists->values, "null");
    bd_strbuf_puts(&lists->top, "null");
    bd_strbuf_puts(&lists->offsets, "0");
}

static void put_list(bd_strbuf *out, const char *name, const bd_strbuf *prompt,
                     const bd_strbuf *list) {
    bd_strbuf_printf(out, "\"%s\":[", name);
    if (prompt) bd_strbuf_append(out, prompt->data, prompt->len_bytes);
    if (prompt && prompt->len_bytes > 0 && list->len_bytes > 0) bd_strbuf_append(out, ",", 1);
    bd_strbuf_append(out, list->data, list->len_bytes);
    bd_strbuf_append(out, "]", 1);
}

void bd_logprob_lists_write(const bd_logprob_lists *prompt, const bd_logprob_lists *lists,
                            bd_strbuf *out) {
    bd_strbuf_append(out, "{", 1);
    put_list(out, "tokens", prompt ? &prompt->tokens : NULL, &lists->tokens);
    bd_strbuf_append(out, ",", 1);
    put_list(out, "token_logprobs", prompt ? &prompt->values : NULL, &lists->values);
    bd_strbuf_append(out, ",", 1);
    put_list(out, "top_logprobs", prompt ? &prompt->top : NULL, &lists->top);
    bd_strbuf_append(out, ",", 1);
    put_list(out, "text_offset", prompt ? &prompt->offsets : NULL, &lists->offsets);
    bd_strbuf_append(out, "}", 1);
}

static void prompt_member(const bd_token_names *names, int32_t id, float logprob, uint32_t rank,
                          bd_strbuf *out) {
    const bd_token_names by_text = {.tokenizer = names->tokenizer};
    bd_strbuf_printf(out, "\"%" PRId32 "\":{\"logprob\":", id);
    bd_logprob_write(logprob, out);
    bd_strbuf_printf(out, ",\"rank\":%" PRIu32 ",\"decoded_token\":", rank);
    bd_token_name_write(&by_text, id, out);
    bd_strbuf_append(out, "}", 1);
}

void bd_prompt_logprob_write(const bd_token_names *names, const bd_token_result *token,
                             uint32_t alternatives, bd_strbuf *out) {
    bool actual_seen = false;
    if (alternatives > token->top_count) alternatives = token->top_count;
    bd_strbuf_append(out, "{", 1);
    for (uint32_t i = 0; i < alternatives; i++) {
        actual_seen = actual_seen || token->top_ids[i] == token->id;
        if (i > 0) bd_strbuf_append(out, ",", 1);
        prompt_member(names, token->top_ids[i], token->top_logprobs[i], i + 1, out);
    }
    if (!actual_seen) {
        if (alternatives > 0) bd_strbuf_append(out, ",", 1);
        prompt_member(names, token->id, token->logprob, token->rank, out);
    }
    bd_strbuf_append(out, "}", 1);
}
