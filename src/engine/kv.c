/* kv.c - block references, the list of free blocks (least recently released first) and the table of
 * published blocks. Everything is sized at create; nothing allocates afterwards. */
#include "kv.h"

#include <stdlib.h>

#define KV_NONE UINT32_MAX

typedef struct kv_block {
    uint32_t references;
    uint32_t prev, next;  /* in the free list, while references == 0 */
    uint32_t same_bucket; /* next published block of the bucket */
    bool published;
    bd_kv_key key;
} kv_block;

struct bd_kv_pool {
    uint32_t block_count, free_count;
    uint32_t oldest, newest; /* free list */
    uint32_t bucket_mask;
    uint32_t *buckets;
    kv_block *blocks;
};

static void free_list_append(bd_kv_pool *pool, uint32_t index) {
    kv_block *block = &pool->blocks[index];
    block->prev = pool->newest;
    block->next = KV_NONE;
    if (pool->newest == KV_NONE)
        pool->oldest = index;
    else
        pool->blocks[pool->newest].next = index;
    pool->newest = index;
    pool->free_count++;
}

/* A block that nobody can find goes first: it costs nothing to reuse. */
static void free_list_prepend(bd_kv_pool *pool, uint32_t index) {
    kv_block *block = &pool->blocks[index];
    block->prev = KV_NONE;
    block->next = pool->oldest;
    if (pool->oldest == KV_NONE)
        pool->newest = index;
    else
        pool->blocks[pool->oldest].prev = index;
    pool->oldest = index;
    pool->free_count++;
}

static void free_list_remove(bd_kv_pool *pool, uint32_t index) {
    const kv_block *block = &pool->blocks[index];
    if (block->prev == KV_NONE)
        pool->oldest = block->next;
    else
        pool->blocks[block->prev].next = block->next;
    if (block->next == KV_NONE)
        pool->newest = block->prev;
    else
        pool->blocks[block->next].prev = block->prev;
    pool->free_count--;
}

bd_status bd_kv_create(bd_kv_pool **out, uint32_t block_count, bd_error *err) {
    *out = NULL;
    if (block_count == 0 || block_count > UINT32_MAX / 4)
        return bd_fail(err, BD_E_ARGUMENT, "KV cache", "%u blocks cannot be managed", block_count);
    uint32_t bucket_count = 16;
    while (bucket_count < block_count)
        bucket_count *= 2;
    bd_kv_pool *pool = calloc(1, sizeof *pool);
    uint32_t *buckets = malloc(bucket_count * sizeof *buckets);
    kv_block *blocks = calloc(block_count, sizeof *blocks);
    if (!pool || !buckets || !blocks) {
        free(pool);
        free(buckets);
        free(blocks);
        return bd_fail(err, BD_E_MEMORY, "KV cache", "out of memory for the table of %u blocks",
                       block_count);
    }
    pool->block_count = block_count;
    pool->oldest = pool->newest = KV_NONE;
    pool->bucket_mask = bucket_count - 1;
    pool->buckets = buckets;
    pool->blocks = blocks;
    for (uint32_t i = 0; i < bucket_count; i++)
        buckets[i] = KV_NONE;
    for (uint32_t i = 0; i < block_count; i++)
        free_list_append(pool, i);
    *out = pool;
    return BD_OK;
}

void bd_kv_destroy(bd_kv_pool *pool) {
    if (!pool) return;
    free(pool->buckets);
    free(pool->blocks);
    free(pool);
}

uint32_t bd_kv_total(const bd_kv_pool *pool) {
    return pool->block_count;
}

uint32_t bd_kv_free_count(const bd_kv_pool *pool) {
    return pool->free_count;
}

static uint32_t *bucket_of(bd_kv_pool *pool, bd_kv_key key) {
    return &pool->buckets[(uint32_t)key.lo & pool->bucket_mask];
}

static uint32_t lookup(bd_kv_pool *pool, bd_kv_key key) {
    uint32_t at = *bucket_of(pool, key);
    while (at != KV_NONE) {
        const kv_block *block = &pool->blocks[at];
        if (block->key.lo == key.lo && block->key.hi == key.hi) break;
        at = block->same_bucket;
    }
    return at;
}

static void unpublish(bd_kv_pool *pool, uint32_t index) {
    kv_block *block = &pool->blocks[index];
    uint32_t *link = bucket_of(pool, block->key);
    while (*link != index) {
        BD_ASSERT(*link != KV_NONE);
        link = &pool->blocks[*link].same_bucket;
    }
    *link = block->same_bucket;
    block->published = false;
}

bool bd_kv_acquire(bd_kv_pool *pool, uint32_t *block) {
    uint32_t index = pool->oldest;
    if (index == KV_NONE) return false;
    BD_ASSERT(pool->blocks[index].references == 0);
    free_list_remove(pool, index);
    if (pool->blocks[index].published) unpublish(pool, index);
    pool->blocks[index].references = 1;
    *block = index;
    return true;
}

void bd_kv_release(bd_kv_pool *pool, uint32_t block) {
    BD_ASSERT(block < pool->block_count);
    BD_ASSERT(pool->blocks[block].references > 0);
    if (--pool->blocks[block].references > 0) return;
    if (pool->blocks[block].published)
        free_list_append(pool, block);
    else
        free_list_prepend(pool, block);
}

bool bd_kv_find(bd_kv_pool *pool, bd_kv_key key, uint32_t *block) {
    uint32_t index = lookup(pool, key);
    if (index == KV_NONE) return false;
    if (pool->blocks[index].references++ == 0) free_list_remove(pool, index);
    *block = index;
    return true;
}

void bd_kv_publish(bd_kv_pool *pool, uint32_t block, bd_kv_key key) {
    BD_ASSERT(block < pool->block_count);
    kv_block *b = &pool->blocks[block];
    BD_ASSERT(b->references > 0);
    if (b->published || lookup(pool, key) != KV_NONE) return;
    uint32_t *bucket = bucket_of(pool, key);
    b->key = key;
    b->published = true;
    b->same_bucket = *bucket;
    *bucket = block;
}
