/* keys.h - the strings of all tokens in one block, and a hash table from string to id over such a
 * block. Owner: bd_tokenizer. Threads: written during load only. */
#ifndef BITDELTA_TOKENIZER_KEYS_H
#define BITDELTA_TOKENIZER_KEYS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "bitdelta/base/status.h"

typedef struct bd_strtab { /* text of id i: blob[offsets[i]] up to blob[offsets[i + 1]] */
    char *blob;
    uint32_t *offsets; /* [id_count + 1] */
} bd_strtab;

static inline const char *bd_strtab_get(const bd_strtab *table, uint32_t id, size_t *bytes) {
    *bytes = table->offsets[id + 1] - table->offsets[id];
    return table->blob + table->offsets[id];
}

typedef struct bd_key_slot {
    uint32_t tag;   /* upper half of the hash */
    uint32_t entry; /* id + 1; 0: empty */
} bd_key_slot;

typedef struct bd_key_table {
    bd_key_slot *slots; /* at most half full */
    uint32_t mask;
    const bd_strtab *texts; /* borrowed */
} bd_key_table;

static inline uint64_t bd_key_hash(const void *text, size_t bytes) {
    const uint8_t *p = text;
    const uint64_t k = UINT64_C(0x9fb21c651e98df25);
    uint64_t hash = bytes * UINT64_C(0xd6e8feb86659fd93), word;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        memcpy(&word, p, 8);
        hash = (hash ^ word) * k;
        hash ^= hash >> 31;
    }
    word = 0;
    if (bytes >= 4) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + bytes - 4, 4);
        word = (uint64_t)high << 32 | low;
    } else if (bytes > 0) {
        word = (uint64_t)p[0] << 16 | (uint64_t)p[bytes >> 1] << 8 | p[bytes - 1];
    }
    hash = (hash ^ word) * k;
    return hash ^ hash >> 29;
}

/* Room for `count` keys. */
BD_MUST_CHECK bd_status bd_key_table_init(bd_key_table *table, const bd_strtab *texts,
                                          uint32_t count);
void bd_key_table_deinit(bd_key_table *table);
/* Adds id under its text. false: another id has the same text (the table keeps that one). */
bool bd_key_table_add(bd_key_table *table, uint32_t id);
int32_t bd_key_table_find(const bd_key_table *table, const void *text, size_t bytes); /* -1: none */

#endif
