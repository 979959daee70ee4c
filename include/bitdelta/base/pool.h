/* pool.h - worker threads for parallel_for, blocking on a futex when idle.
 * Owner: one rank's executor (or one tool). Threads: parallel_for from the owner thread only, not
 * nested. */
#ifndef BITDELTA_BASE_POOL_H
#define BITDELTA_BASE_POOL_H

#include "bitdelta/base/status.h"

typedef struct bd_pool bd_pool;

/* worker: 0 .. bd_pool_width - 1, the caller is worker 0. */
typedef void (*bd_pool_fn)(void *ctx, uint32_t index, uint32_t worker);

/* thread_count includes the caller; 0 means the number of usable cores (cgroup quota and affinity
 * respected). name: thread name prefix, at most 10 bytes. */
BD_MUST_CHECK bd_status bd_pool_create(bd_pool **out, uint32_t thread_count, const char *name,
                                       bd_error *err);
void bd_pool_destroy(bd_pool *pool);
uint32_t bd_pool_width(const bd_pool *pool);
/* Runs fn for every index in [0, count), in no particular order or thread; returns when all are
 * done. */
void bd_pool_parallel_for(bd_pool *pool, uint32_t count, bd_pool_fn fn, void *ctx);
uint32_t bd_usable_cores(void);

#endif
