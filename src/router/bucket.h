/* bucket.h - a token bucket in whole numbers: `rate` a minute flow in, at most `burst` are kept,
 * who takes more than there is leaves a debt. Exact: a token is 60,000,000 parts, of which `rate`
 * come every microsecond, so nothing is ever rounded. Owner: the caller. Not thread-safe. */
#ifndef BITDELTA_SRC_ROUTER_BUCKET_H
#define BITDELTA_SRC_ROUTER_BUCKET_H

#include <stdbool.h>
#include <stdint.h>

#define BD_BUCKET_MAX 1000000000u /* of rate and burst */

typedef struct bd_bucket {
    uint64_t rate, burst; /* tokens a minute, tokens; rate 0: no limit */
    int64_t parts;        /* what is there, in 1/60,000,000 of a token; below 0: owed */
    uint64_t then_us;     /* up to when what flowed in is counted */
} bd_bucket;

/* A new bucket (all zero) is full. One that changes keeps what was taken from it: a larger burst
 * gives room at once; no debt beyond what was owed before arises from a smaller one. */
void bd_bucket_set(bd_bucket *bucket, uint64_t rate, uint64_t burst, uint64_t now_us);
/* Time only goes forward: an earlier now_us than before counts as that. */
void bd_bucket_refill(bd_bucket *bucket, uint64_t now_us);
/* As of the last refill: microseconds until so many are there; 0: now; UINT64_MAX: never. */
uint64_t bd_bucket_wait_us(const bd_bucket *bucket, uint64_t tokens);
void bd_bucket_take(bd_bucket *bucket, uint64_t tokens);
void bd_bucket_give(bd_bucket *bucket, uint64_t tokens);
/* Whole tokens that are there; 0 when owed. */
uint64_t bd_bucket_left(const bd_bucket *bucket);

#endif
