/* host_tier.h - host memory for the file bytes of deltas, between disk and device: equal blocks,
 * got in large steps by a thread of its own, since page-locking them takes seconds. Owner: the
 * cache; everything on its thread but the steps' making. Which entry gives way is the caller's
 * matter. */
#ifndef BITDELTA_SRC_CACHE_HOST_TIER_H
#define BITDELTA_SRC_CACHE_HOST_TIER_H

#include "bitdelta/loader/loader.h"

typedef struct bd_host_tier bd_host_tier;

typedef struct bd_host_memory { /* where steps come from; NULL members: the system */
    void *ctx;
    void *(*alloc)(void *ctx, uint64_t bytes);
    void (*free)(void *ctx, void *memory, uint64_t bytes);
} bd_host_memory;

typedef struct bd_host_options {
    uint64_t bytes;                   /* in all; rounded down to whole blocks */
    uint64_t block_bytes, step_bytes; /* 0: 256 KiB, 1 GiB */
    bd_host_memory memory;
} bd_host_options;

/* For deltas in pages of this size: large, so that a device gets few long copies, but small beside
 * a delta, whose last block is in part empty. */
uint64_t bd_host_block_bytes(uint64_t page_bytes, uint64_t host_bytes);

BD_MUST_CHECK bd_status bd_host_tier_create(const bd_host_options *options, bd_host_tier **out,
                                            bd_error *err);
void bd_host_tier_destroy(bd_host_tier *tier); /* every entry is back; NULL is fine */

uint64_t bd_host_tier_used_bytes(const bd_host_tier *tier);
/* What has come by now; grows up to the option's. */
uint64_t bd_host_tier_total_bytes(bd_host_tier *tier);
/* Blocks that an entry of `bytes` takes and that are free, in bytes. */
uint64_t bd_host_tier_need_bytes(const bd_host_tier *tier, uint64_t bytes);
uint64_t bd_host_tier_free_bytes(bd_host_tier *tier);

/* An empty entry for a load to fill, or NULL when it does not fit now. */
bd_load_host *bd_host_tier_take(bd_host_tier *tier, uint64_t bytes);
/* With its plan, if it was filled. NULL is fine. */
void bd_host_tier_give(bd_host_tier *tier, bd_load_host *entry);

#endif
