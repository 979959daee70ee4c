/* map.c - linear probing over a power-of-two table, at most 3/4 full, deletion by shifting back (no
 * tombstones). The hash is keyed with a random seed, so clients cannot choose colliding keys.
 * Not thread-safe. */
#include "bitdelta/base/map.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#include "bitdelta/base/clock.h"

typedef struct map_slot {
    void *key; /* NULL: the slot is free */
    size_t key_bytes;
    uint64_t hash;
    void *value;
} map_slot;

struct bd_map {
    map_slot *slots;
    size_t slot_count; /* a power of two */
    size_t count;
    uint64_t seed;
};

enum { MAP_SLOTS_MIN = 8 };

bd_map *bd_map_create(size_t expected_count) {
    if (expected_count > SIZE_MAX / (4 * sizeof(map_slot))) return NULL;
    size_t slot_count = MAP_SLOTS_MIN;
    while (slot_count / 4 * 3 < expected_count)
        slot_count *= 2;
    bd_map *map = calloc(1, sizeof *map);
    if (!map) return NULL;
    map->slots = calloc(slot_count, sizeof *map->slots);
    if (!map->slots) {
        free(map);
        return NULL;
    }
    map->slot_count = slot_count;
    if (getrandom(&map->seed, sizeof map->seed, GRND_NONBLOCK) != (ssize_t)sizeof map->seed) {
        map->seed = bd_now_us() ^ (uint64_t)(uintptr_t)map;
    }
    return map;
}

void bd_map_destroy(bd_map *map) {
    if (!map) return;
    for (size_t i = 0; i < map->slot_count; i++)
        free(map->slots[i].key);
    free(map->slots);
    free(map);
}

/* The slot that holds the key, or the free one where it belongs. */
static map_slot *find(const bd_map *map, const void *key, size_t key_bytes, uint64_t hash) {
    size_t index = (size_t)hash & (map->slot_count - 1);
    for (;; index = (index + 1) & (map->slot_count - 1)) {
        map_slot *slot = &map->slots[index];
        if (!slot->key) return slot;
        if (slot->hash != hash || slot->key_bytes != key_bytes) continue;
        if (key_bytes == 0 || memcmp(slot->key, key, key_bytes) == 0) return slot;
    }
}

static uint64_t hash_of(const bd_map *map, const void *key, size_t key_bytes) {
    return XXH3_64bits_withSeed(key_bytes > 0 ? key : "", key_bytes, map->seed);
}

static bool grow(bd_map *map) {
    if (map->slot_count > SIZE_MAX / (4 * sizeof(map_slot))) return false;
    bd_map bigger = *map;
    bigger.slot_count = map->slot_count * 2;
    bigger.slots = calloc(bigger.slot_count, sizeof *bigger.slots);
    if (!bigger.slots) return false;
    for (size_t i = 0; i < map->slot_count; i++) {
        const map_slot *old = &map->slots[i];
        if (old->key) *find(&bigger, old->key, old->key_bytes, old->hash) = *old;
    }
    free(map->slots);
    *map = bigger;
    return true;
}

bd_status bd_map_put(bd_map *map, const void *key, size_t key_bytes, void *value) {
    uint64_t hash = hash_of(map, key, key_bytes);
    map_slot *slot = find(map, key, key_bytes, hash);
    if (slot->key) return BD_BUSY;
    if (map->count + 1 > map->slot_count / 4 * 3) {
        if (!grow(map)) return BD_E_MEMORY;
        slot = find(map, key, key_bytes, hash);
    }
    void *copy = malloc(key_bytes > 0 ? key_bytes : 1);
    if (!copy) return BD_E_MEMORY;
    if (key_bytes > 0) memcpy(copy, key, key_bytes);
    *slot = (map_slot){.key = copy, .key_bytes = key_bytes, .hash = hash, .value = value};
    map->count++;
    return BD_OK;
}

void *bd_map_get(const bd_map *map, const void *key, size_t key_bytes) {
    return find(map, key, key_bytes, hash_of(map, key, key_bytes))->value;
}

void *bd_map_take(bd_map *map, const void *key, size_t key_bytes) {
    map_slot *slot = find(map, key, key_bytes, hash_of(map, key, key_bytes));
    if (!slot->key) return NULL;
    void *value = slot->value;
    free(slot->key);
    const size_t mask = map->slot_count - 1;
    size_t hole = (size_t)(slot - map->slots);
    /* Later members of the run move into the hole unless that would put them before their home. */
    for (size_t i = (hole + 1) & mask; map->slots[i].key; i = (i + 1) & mask) {
        size_t home = (size_t)map->slots[i].hash & mask;
        if (((i - home) & mask) < ((i - hole) & mask)) continue;
        map->slots[hole] = map->slots[i];
        hole = i;
    }
    map->slots[hole] = (map_slot){.key = NULL};
    map->count--;
    return value;
}

size_t bd_map_count(const bd_map *map) {
    return map->count;
}

bool bd_map_next(const bd_map *map, size_t *cursor, const void **key, size_t *key_bytes,
                 void **value) {
    for (; *cursor < map->slot_count; (*cursor)++) {
        const map_slot *slot = &map->slots[*cursor];
        if (!slot->key) continue;
        if (key) *key = slot->key;
        if (key_bytes) *key_bytes = slot->key_bytes;
        if (value) *value = slot->value;
        (*cursor)++;
        return true;
    }
    return false;
}
