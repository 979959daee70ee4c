/* kv.h - who holds which block of the paged KV cache, and which full blocks can be found again by
 * content. Owner and only thread: bd-sched. Blocks are numbers here; their memory is the backend's.
 * A block is free (reference 0) or held by one or more sequences. A published block stays findable
 * after its last release until its memory is handed out again, oldest release first. */
#ifndef BITDELTA_SRC_ENGINE_KV_H
#define BITDELTA_SRC_ENGINE_KV_H

#include "bitdelta/base/status.h"
#include "kv_hash.h"

typedef struct bd_kv_pool bd_kv_pool;

BD_MUST_CHECK bd_status bd_kv_create(bd_kv_pool **out, uint32_t block_count, bd_error *err);
void bd_kv_destroy(bd_kv_pool *pool); /* NULL is fine */

uint32_t bd_kv_total(const bd_kv_pool *pool);
uint32_t bd_kv_free_count(const bd_kv_pool *pool); /* findable ones included */
/* One reference to a free block, its content forgotten; false: none is free. */
BD_MUST_CHECK bool bd_kv_acquire(bd_kv_pool *pool, uint32_t *block);
void bd_kv_release(bd_kv_pool *pool, uint32_t block);

/* Another reference to the block published under the key; false: there is none. */
BD_MUST_CHECK bool bd_kv_find(bd_kv_pool *pool, bd_kv_key key, uint32_t *block);
/* A held block's content is complete; ignored when the key is known already. */
void bd_kv_publish(bd_kv_pool *pool, uint32_t block, bd_kv_key key);

#endif
