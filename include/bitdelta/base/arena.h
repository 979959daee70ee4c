/* arena.h - bump allocation for one request or one load: many allocations, one destroy.
 * Owner: one thread at a time. Memory from it is 16-byte aligned and zeroed. */
#ifndef BITDELTA_BASE_ARENA_H
#define BITDELTA_BASE_ARENA_H

#include <stddef.h>

#include "bitdelta/base/status.h"

typedef struct bd_arena bd_arena;

/* max_bytes bounds all blocks together. NULL when out of memory. */
bd_arena *bd_arena_create(size_t block_bytes, size_t max_bytes);
void bd_arena_destroy(bd_arena *arena); /* NULL is fine */
/* NULL when the cap or the memory is reached; count * size is checked for overflow. */
void *bd_arena_alloc(bd_arena *arena, size_t count, size_t size_bytes);
char *bd_arena_strndup(bd_arena *arena, const char *text, size_t len_bytes);
size_t bd_arena_used_bytes(const bd_arena *arena);

#endif
