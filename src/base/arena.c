/* arena.c - chained zeroed blocks; a request larger than a block gets a block of its own.
 * Owner: one thread at a time. */
#include "bitdelta/base/arena.h"

#include <stdlib.h>
#include <string.h>

enum { ARENA_ALIGN = 16 };

typedef struct arena_block {
    struct arena_block *next;
    size_t cap_bytes, used_bytes;
    size_t unused; /* keeps data[] aligned */
    _Alignas(ARENA_ALIGN) unsigned char data[];
} arena_block;

_Static_assert(sizeof(arena_block) % ARENA_ALIGN == 0, "data must start aligned");

struct bd_arena {
    arena_block *blocks; /* the first one is being filled */
    size_t block_bytes, max_bytes;
    size_t reserved_bytes; /* capacity of all blocks, at most max_bytes */
    size_t used_bytes;
};

bd_arena *bd_arena_create(size_t block_bytes, size_t max_bytes) {
    bd_arena *arena = calloc(1, sizeof *arena);
    if (!arena) return NULL;
    if (block_bytes > SIZE_MAX / 2) block_bytes = SIZE_MAX / 2;
    arena->block_bytes = (block_bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    arena->max_bytes = max_bytes;
    return arena;
}

void bd_arena_destroy(bd_arena *arena) {
    if (!arena) return;
    for (arena_block *block = arena->blocks; block;) {
        arena_block *next = block->next;
        free(block);
        block = next;
    }
    free(arena);
}

/* A block with room for `bytes`, at the head of the list unless it is made for this one request. */
static arena_block *add_block(bd_arena *arena, size_t bytes) {
    size_t left = arena->max_bytes - arena->reserved_bytes;
    if (bytes > left) return NULL;
    bool shared = bytes <= arena->block_bytes;
    size_t cap = shared ? arena->block_bytes : bytes;
    if (cap > left) cap = bytes; /* the last, smaller block */
    if (cap > SIZE_MAX - sizeof(arena_block)) return NULL;
    arena_block *block = calloc(1, sizeof *block + cap);
    if (!block) return NULL;
    block->cap_bytes = cap;
    arena->reserved_bytes += cap;
    if (shared || !arena->blocks) {
        block->next = arena->blocks;
        arena->blocks = block;
    } else {
        block->next = arena->blocks->next;
        arena->blocks->next = block;
    }
    return block;
}

void *bd_arena_alloc(bd_arena *arena, size_t count, size_t size_bytes) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size_bytes, &bytes)) return NULL;
    if (bytes > SIZE_MAX - ARENA_ALIGN) return NULL;
    bytes = bytes == 0 ? ARENA_ALIGN : (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    arena_block *block = arena->blocks;
    if (!block || block->cap_bytes - block->used_bytes < bytes) {
        block = add_block(arena, bytes);
        if (!block) return NULL;
    }
    void *memory = block->data + block->used_bytes;
    block->used_bytes += bytes;
    arena->used_bytes += bytes;
    return memory;
}

char *bd_arena_strndup(bd_arena *arena, const char *text, size_t len_bytes) {
    if (len_bytes == SIZE_MAX) return NULL;
    char *copy = bd_arena_alloc(arena, len_bytes + 1, 1);
    if (copy && len_bytes > 0) memcpy(copy, text, len_bytes);
    return copy;
}

size_t bd_arena_used_bytes(const bd_arena *arena) {
    return arena->used_bytes;
}
