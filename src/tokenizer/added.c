/* added.c - finds added tokens in text: a trie walked from every place where one could start, which
 * gives the leftmost and then the longest match. A walk is as long as the text looks like a token,
 * so the cost per byte is bounded by the longest token. Threads: read-only after load. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "unicode.h"

static uint32_t trie_new_node(bd_trie *trie, uint8_t byte) {
    if (trie->count == trie->capacity) {
        uint32_t capacity = trie->capacity ? trie->capacity * 2 : 256;
        bd_trie_node *grown = realloc(trie->nodes, (size_t)capacity * sizeof *grown);
        if (!grown) return 0;
        trie->nodes = grown;
        trie->capacity = capacity;
        if (trie->count == 0) trie->nodes[trie->count++] = (bd_trie_node){0, 0, -1, 0};
    }
    BD_ASSERT(trie->nodes);
    trie->nodes[trie->count] = (bd_trie_node){0, 0, -1, byte};
    return trie->count++;
}

static uint32_t trie_child(const bd_trie *trie, uint32_t node, uint8_t byte) {
    uint32_t child = trie->nodes[node].child;
    while (child && trie->nodes[child].byte != byte)
        child = trie->nodes[child].sibling;
    return child;
}

bd_status bd_trie_add(bd_trie *trie, const char *text, size_t bytes, int32_t token) {
    BD_ASSERT(bytes > 0);
    uint8_t first = (uint8_t)text[0];
    if (!trie->nodes) trie->only_first = first;
    if (trie->only_first != first) trie->only_first = -1;
    if (!trie->first[first] && !(trie->first[first] = trie_new_node(trie, first)))
        return BD_E_MEMORY;
    uint32_t node = trie->first[first];
    for (size_t i = 1; i < bytes; i++) {
        uint32_t child = trie_child(trie, node, (uint8_t)text[i]);
        if (!child) {
            child = trie_new_node(trie, (uint8_t)text[i]);
            if (!child) return BD_E_MEMORY;
            trie->nodes[child].sibling = trie->nodes[node].child;
            trie->nodes[node].child = child;
        }
        node = child;
    }
    BD_ASSERT(trie->nodes);
    /* Two tokens normalized to the same text: the first one is found. */
    if (trie->nodes[node].token < 0) trie->nodes[node].token = token;
    return BD_OK;
}

void bd_trie_deinit(bd_trie *trie) {
    free(trie->nodes);
    trie->nodes = NULL;
}

/* First position at or after `from` with a byte that some token starts with; bytes: none. */
static size_t next_candidate(const bd_trie *trie, const uint8_t *text, size_t bytes, size_t from) {
    if (trie->only_first >= 0) {
        const uint8_t *hit = memchr(text + from, trie->only_first, bytes - from);
        return hit ? (size_t)(hit - text) : bytes;
    }
    while (from < bytes && !trie->first[text[from]])
        from++;
    return from;
}

bool bd_added_find(const bd_tokenizer *tokenizer, const bd_trie *trie, const uint8_t *text,
                   size_t bytes, size_t from, bd_added_match *match) {
    if (!trie->nodes) return false;
    for (size_t at = next_candidate(trie, text, bytes, from); at < bytes;
         at = next_candidate(trie, text, bytes, at + 1)) {
        match->token = NULL;
        uint32_t node = trie->first[text[at]];
        for (size_t end = at + 1; node; end++) {
            if (trie->nodes[node].token >= 0) {
                match->token = &tokenizer->added[trie->nodes[node].token];
                match->end = end;
            }
            node = end < bytes ? trie_child(trie, node, text[end]) : 0;
        }
        if (match->token) {
            match->start = at;
            return true;
        }
    }
    return false;
}
