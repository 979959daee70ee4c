/* tokenizer.c - looking up single tokens, and the end of a tokenizer. Threads: see the header. */
#include "bitdelta/tokenizer/tokenizer.h"

#include <stdlib.h>

#include "internal.h"

uint32_t bd_tokenizer_vocab_size(const bd_tokenizer *tokenizer) {
    return tokenizer->id_count;
}

bool bd_tokenizer_is_known(const bd_tokenizer *tokenizer, int32_t id) {
    return id >= 0 && (uint32_t)id < tokenizer->id_count && tokenizer->flags[id] & BD_TOKEN_KNOWN;
}

bool bd_tokenizer_is_special(const bd_tokenizer *tokenizer, int32_t id) {
    return bd_tokenizer_is_known(tokenizer, id) && tokenizer->flags[id] & BD_TOKEN_SPECIAL;
}

int32_t bd_tokenizer_token_id(const bd_tokenizer *tokenizer, const char *content,
                              size_t content_bytes) {
    return bd_key_table_find(&tokenizer->by_content, content, content_bytes);
}

const char *bd_tokenizer_token_bytes(const bd_tokenizer *tokenizer, int32_t id, size_t *bytes) {
    *bytes = 0;
    if (!bd_tokenizer_is_known(tokenizer, id)) return NULL;
    return bd_strtab_get(&tokenizer->bytes, (uint32_t)id, bytes);
}

const char *bd_tokenizer_token_content(const bd_tokenizer *tokenizer, int32_t id, size_t *bytes) {
    *bytes = 0;
    if (!bd_tokenizer_is_known(tokenizer, id)) return NULL;
    return bd_strtab_get(&tokenizer->content, (uint32_t)id, bytes);
}

static void strtab_deinit(bd_strtab *table) {
    free(table->blob);
    free(table->offsets);
}

void bd_tokenizer_destroy(bd_tokenizer *tokenizer) {
    if (!tokenizer) return;
    free(tokenizer->flags);
    strtab_deinit(&tokenizer->content);
    strtab_deinit(&tokenizer->bytes);
    bd_key_table_deinit(&tokenizer->by_content);
    bd_key_table_deinit(&tokenizer->by_bytes);
    bd_bpe_deinit(&tokenizer->bpe);
    free(tokenizer->added);
    free(tokenizer->added_texts);
    for (int i = 0; i < 4; i++)
        bd_trie_deinit(&tokenizer->tries[i / 2][i % 2]);
    for (uint32_t i = 0; i < tokenizer->normalize_count; i++) {
        free(tokenizer->normalize[i].pattern);
        free(tokenizer->normalize[i].content);
    }
    for (uint32_t i = 0; i < tokenizer->split_count; i++)
        bd_pattern_destroy(tokenizer->split[i].code);
    free(tokenizer->prefix);
    free(tokenizer->suffix);
    free(tokenizer);
}
