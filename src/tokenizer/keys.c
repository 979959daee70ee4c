/* keys.c - open addressing over the token strings. Threads: see keys.h. */
#include "keys.h"

#include <stdlib.h>

bd_status bd_key_table_init(bd_key_table *table, const bd_strtab *texts, uint32_t count) {
    size_t slots = 64;
    while (slots < (size_t)count * 2)
        slots *= 2;
    table->slots = calloc(slots, sizeof *table->slots);
    if (!table->slots) return BD_E_MEMORY;
    table->mask = (uint32_t)(slots - 1);
    table->texts = texts;
    return BD_OK;
}

void bd_key_table_deinit(bd_key_table *table) {
    free(table->slots);
    table->slots = NULL;
}

bool bd_key_table_add(bd_key_table *table, uint32_t id) {
    size_t bytes, other_bytes;
    const char *text = bd_strtab_get(table->texts, id, &bytes);
    uint64_t hash = bd_key_hash(text, bytes);
    uint32_t tag = (uint32_t)(hash >> 32), at = (uint32_t)hash & table->mask;
    for (; table->slots[at].entry; at = (at + 1) & table->mask) {
        if (table->slots[at].tag != tag) continue;
        const char *other = bd_strtab_get(table->texts, table->slots[at].entry - 1, &other_bytes);
        if (bytes == other_bytes && !memcmp(text, other, bytes)) return false;
    }
    table->slots[at] = (bd_key_slot){tag, id + 1};
    return true;
}

int32_t bd_key_table_find(const bd_key_table *table, const void *text, size_t bytes) {
    uint64_t hash = bd_key_hash(text, bytes);
    uint32_t tag = (uint32_t)(hash >> 32), at = (uint32_t)hash & table->mask;
    for (; table->slots[at].entry; at = (at + 1) & table->mask) {
        if (table->slots[at].tag != tag) continue;
        size_t other_bytes;
        const char *other = bd_strtab_get(table->texts, table->slots[at].entry - 1, &other_bytes);
        if (bytes == other_bytes && !memcmp(text, other, bytes))
            return (int32_t)(table->slots[at].entry - 1);
    }
    return -1;
}
