/* bpe.c - merges one word: repeatedly the leftmost pair of the lowest rank, as the reference does.
 * Words of a few symbols are scanned for the best pair; longer ones keep candidate pairs in a queue
 * whose outdated entries are dropped when they surface, so a word of n symbols takes O(n log n).
 * Threads: any; the scratch belongs to one call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "unicode.h"

#define SLOT_EMPTY  UINT64_MAX
#define RANK_BITS   22u
#define ID_BITS     21u
#define SYMBOL_NONE UINT32_MAX

static inline uint64_t pair_key(uint32_t left, uint32_t right) {
    return (uint64_t)left << ID_BITS | right;
}

static inline uint32_t pair_slot(const bd_bpe *bpe, uint64_t key) {
    return (uint32_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> bpe->slot_shift);
}

static inline uint32_t pair_rank(const bd_bpe *bpe, uint32_t left, uint32_t right) {
    uint64_t key = pair_key(left, right);
    for (uint32_t at = pair_slot(bpe, key);; at = (at + 1) & bpe->slot_mask) {
        uint64_t slot = bpe->slots[at];
        if (slot >> RANK_BITS == key && slot != SLOT_EMPTY)
            return (uint32_t)(slot & ((1u << RANK_BITS) - 1));
        if (slot == SLOT_EMPTY) return BD_RANK_NONE;
    }
}

bd_status bd_bpe_init(bd_bpe *bpe, uint32_t merge_count) {
    BD_ASSERT(merge_count < 1u << RANK_BITS);
    uint32_t bits = 6;
    while ((size_t)1 << bits < (size_t)merge_count * 2)
        bits++;
    size_t slots = (size_t)1 << bits;
    bpe->slots = malloc(slots * sizeof *bpe->slots);
    bpe->result_of = calloc((size_t)merge_count + 1, sizeof *bpe->result_of);
    if (!bpe->slots || !bpe->result_of) return BD_E_MEMORY;
    memset(bpe->slots, 0xff, slots * sizeof *bpe->slots);
    bpe->slot_shift = 64 - bits;
    bpe->slot_mask = (uint32_t)(slots - 1);
    bpe->merge_count = merge_count;
    return BD_OK;
}

void bd_bpe_put(bd_bpe *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t result) {
    BD_ASSERT(left < 1u << ID_BITS && right < 1u << ID_BITS && rank < bpe->merge_count);
    uint64_t key = pair_key(left, right);
    uint32_t at = pair_slot(bpe, key);
    while (bpe->slots[at] != SLOT_EMPTY && bpe->slots[at] >> RANK_BITS != key)
        at = (at + 1) & bpe->slot_mask;
    bpe->slots[at] = key << RANK_BITS | rank;
    bpe->result_of[rank] = result;
}

void bd_bpe_deinit(bd_bpe *bpe) {
    free(bpe->slots);
    free(bpe->result_of);
    bpe->slots = NULL;
    bpe->result_of = NULL;
}

void bd_scratch_init(bd_scratch *scratch) {
    scratch->ids = scratch->ranks = scratch->next = scratch->prev = NULL;
    scratch->capacity = 0;
    bd_pair_queue_init(&scratch->queue);
}

void bd_scratch_deinit(bd_scratch *scratch) {
    free(scratch->ids);
    bd_pair_queue_deinit(&scratch->queue);
    bd_scratch_init(scratch);
}

/* Room for `count` symbols of a long word; contents are not kept. */
static bd_status scratch_reserve(bd_scratch *scratch, size_t count) {
    if (count <= scratch->capacity) return BD_OK;
    if (count > UINT32_MAX / 2) return BD_E_MEMORY;
    uint32_t *block = malloc(count * 4 * sizeof *block);
    if (!block) return BD_E_MEMORY;
    free(scratch->ids);
    scratch->ids = block;
    scratch->ranks = block + count;
    scratch->next = block + 2 * count;
    scratch->prev = block + 3 * count;
    scratch->capacity = count;
    return BD_OK;
}

static size_t merge_small(const bd_bpe *bpe, bd_scratch *scratch, size_t count) {
    uint32_t *ids = scratch->small_ids, *ranks = scratch->small_ranks;
    for (size_t i = 0; i + 1 < count; i++)
        ranks[i] = pair_rank(bpe, ids[i], ids[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++)
            if (ranks[i] < ranks[best]) best = i;
        if (ranks[best] == BD_RANK_NONE) break;
        ids[best] = bpe->result_of[ranks[best]];
        count--;
        memmove(ids + best + 1, ids + best + 2, (count - best - 1) * sizeof *ids);
        memmove(ranks + best, ranks + best + 1, (count - best - 1) * sizeof *ranks);
        if (best > 0) ranks[best - 1] = pair_rank(bpe, ids[best - 1], ids[best]);
        if (best + 1 < count) ranks[best] = pair_rank(bpe, ids[best], ids[best + 1]);
    }
    return count;
}

/* Ranks the pair that starts at pos and queues it if it can merge. */
static inline bd_status pair_queue(const bd_bpe *bpe, bd_scratch *scratch, uint32_t pos) {
    uint32_t after = scratch->next[pos];
    scratch->ranks[pos] = after == SYMBOL_NONE
                              ? BD_RANK_NONE
                              : pair_rank(bpe, scratch->ids[pos], scratch->ids[after]);
    if (scratch->ranks[pos] == BD_RANK_NONE) return BD_OK;
    return bd_pair_queue_push(&scratch->queue, scratch->ranks[pos], pos);
}

/* Links the symbols and queues all pairs. */
static bd_status begin_long(const bd_bpe *bpe, bd_scratch *scratch, uint32_t n) {
    uint32_t *next = scratch->next, *prev = scratch->prev;
    if (bd_pair_queue_begin(&scratch->queue, n, bpe->merge_count) != BD_OK) return BD_E_MEMORY;
    for (uint32_t i = 0; i < n; i++) {
        next[i] = i + 1 < n ? i + 1 : SYMBOL_NONE;
        prev[i] = i > 0 ? i - 1 : SYMBOL_NONE;
    }
    for (uint32_t i = 0; i < n; i++)
        if (pair_queue(bpe, scratch, i) != BD_OK) return BD_E_MEMORY;
    return BD_OK;
}

static bd_status merge_long(const bd_bpe *bpe, bd_scratch *scratch, size_t *count) {
    uint32_t *ids = scratch->ids, *ranks = scratch->ranks;
    uint32_t *next = scratch->next, *prev = scratch->prev;
    uint32_t rank, pos, soon;
    bd_status s = begin_long(bpe, scratch, (uint32_t)*count);
    if (s != BD_OK) return s;
    while ((s = bd_pair_queue_pop(&scratch->queue, &rank, &pos, &soon)) == BD_OK) {
        /* In a word that is larger than the caches most of the time would go into waiting. */
        __builtin_prefetch(ranks + soon);
        __builtin_prefetch(ids + soon);
        __builtin_prefetch(next + soon);
        __builtin_prefetch(prev + soon);
        /* Outdated when the pair at pos changed since; a symbol merged away has no rank. */
        if (ranks[pos] != rank) continue;
        uint32_t gone = next[pos];
        ids[pos] = bpe->result_of[rank];
        next[pos] = next[gone];
        if (next[gone] != SYMBOL_NONE) prev[next[gone]] = pos;
        ranks[gone] = BD_RANK_NONE;
        if (pair_queue(bpe, scratch, pos) != BD_OK) return BD_E_MEMORY;
        if (prev[pos] != SYMBOL_NONE && pair_queue(bpe, scratch, prev[pos]) != BD_OK)
            return BD_E_MEMORY;
    }
    if (s != BD_AGAIN) return s;
    size_t kept = 0;
    for (uint32_t i = 0; i != SYMBOL_NONE; i = next[i])
        ids[kept++] = ids[i];
    *count = kept;
    return BD_OK;
}

/* The word's first symbols: one per byte, at most `bytes` of them. */
static size_t symbols_from_bytes(const bd_bpe *bpe, const uint8_t *word, size_t bytes,
                                 uint32_t *ids) {
    size_t count = 0;
    bool after_unknown = false;
    for (size_t i = 0; i < bytes; i++) {
        int32_t id = bpe->byte_ids[word[i]];
        bool unknown = id < 0;
        if (unknown) id = bpe->unk_id;
        if (id >= 0 && !(unknown && after_unknown && bpe->fuse_unk)) ids[count++] = (uint32_t)id;
        after_unknown = unknown;
    }
    return count;
}

/* Appends the byte tokens of one character; 0 when the vocabulary lacks one of them. */
static size_t fallback_bytes(const bd_bpe *bpe, const uint8_t *text, size_t bytes, uint32_t *ids) {
    if (!bpe->byte_fallback) return 0;
    for (size_t i = 0; i < bytes; i++) {
        if (bpe->byte_ids[text[i]] < 0) return 0;
        ids[i] = (uint32_t)bpe->byte_ids[text[i]];
    }
    return bytes;
}

/* The same with one symbol per character. An unknown one is held as pending because fuse_unk makes
 * one symbol of several; as in the reference, byte tokens in between neither end nor overtake it.
 */
static size_t symbols_from_characters(const bd_tokenizer *tokenizer, const uint8_t *word,
                                      size_t bytes, uint32_t *ids) {
    const bd_bpe *bpe = &tokenizer->bpe;
    size_t count = 0, step;
    bool pending = false;
    for (size_t at = 0; at < bytes; at += step) {
        (void)bd_utf8_get(word + at, &step);
        int32_t id = bd_bpe_lookup(tokenizer, word + at, step);
        if (id >= 0) {
            if (pending) ids[count++] = (uint32_t)bpe->unk_id;
            pending = false;
            ids[count++] = (uint32_t)id;
            continue;
        }
        size_t added = fallback_bytes(bpe, word + at, step, ids + count);
        count += added;
        if (added > 0 || bpe->unk_id < 0) continue;
        if (pending && !bpe->fuse_unk) ids[count++] = (uint32_t)bpe->unk_id;
        pending = true;
    }
    if (pending) ids[count++] = (uint32_t)bpe->unk_id;
    return count;
}

int32_t bd_bpe_lookup(const bd_tokenizer *tokenizer, const uint8_t *word, size_t bytes) {
    if (tokenizer->bpe.byte_level) return bd_key_table_find(&tokenizer->by_bytes, word, bytes);
    int32_t id = bd_key_table_find(&tokenizer->by_content, word, bytes);
    return id >= 0 && tokenizer->flags[id] & BD_TOKEN_MODEL ? id : -1;
}

bd_status bd_bpe_word(const bd_tokenizer *tokenizer, bd_scratch *scratch, const uint8_t *word,
                      size_t bytes, const uint32_t **ids, size_t *count) {
    const bd_bpe *bpe = &tokenizer->bpe;
    bool small = bytes <= BD_SMALL_WORD;
    if (!small && scratch_reserve(scratch, bytes) != BD_OK) return BD_E_MEMORY;
    uint32_t *symbols = small ? scratch->small_ids : scratch->ids;
    size_t n = bpe->byte_level ? symbols_from_bytes(bpe, word, bytes, symbols)
                               : symbols_from_characters(tokenizer, word, bytes, symbols);
    *ids = symbols;
    *count = n;
    if (n < 2) return BD_OK;
    if (!small) return merge_long(bpe, scratch, count);
    *count = merge_small(bpe, scratch, n);
    return BD_OK;
}
