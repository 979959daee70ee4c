/* bucket.c - the token bucket of requests and tokens a minute. Threads: under its owner's lock. */
#include "bucket.h"

/* What never comes near the ends of an int64_t: a burst is at most 6e16 parts, a debt 4e18. */
enum { PARTS = 60000000 };
#define DEBT_MAX ((int64_t)4000000000000000000)

static int64_t parts_of(uint64_t tokens) {
    return (int64_t)(tokens > BD_BUCKET_MAX ? BD_BUCKET_MAX : tokens) * PARTS;
}

void bd_bucket_set(bd_bucket *bucket, uint64_t rate, uint64_t burst, uint64_t now_us) {
    bd_bucket_refill(bucket, now_us);
    int64_t before = bucket->parts, full = parts_of(burst);
    int64_t taken = bucket->rate ? parts_of(bucket->burst) - before : 0;
    int64_t owed = before < 0 && bucket->rate ? before : 0;
    bucket->rate = rate;
    bucket->burst = burst;
    bucket->parts = full - taken > owed ? full - taken : owed;
    bucket->then_us = now_us > bucket->then_us ? now_us : bucket->then_us;
}

void bd_bucket_refill(bd_bucket *bucket, uint64_t now_us) {
    if (now_us <= bucket->then_us) return;
    uint64_t passed_us = now_us - bucket->then_us;
    uint64_t missing = (uint64_t)(parts_of(bucket->burst) - bucket->parts);
    bucket->then_us = now_us;
    if (bucket->rate == 0) return;
    if (passed_us > missing / bucket->rate)
        bucket->parts = parts_of(bucket->burst);
    else
        bucket->parts += (int64_t)(passed_us * bucket->rate);
}

uint64_t bd_bucket_wait_us(const bd_bucket *bucket, uint64_t tokens) {
    if (bucket->rate == 0) return 0;
    if (tokens > bucket->burst) return UINT64_MAX;
    int64_t needed = parts_of(tokens);
    if (needed <= bucket->parts) return 0;
    return ((uint64_t)(needed - bucket->parts) + bucket->rate - 1) / bucket->rate;
}

void bd_bucket_take(bd_bucket *bucket, uint64_t tokens) {
    if (bucket->rate == 0) return;
    bucket->parts -= parts_of(tokens);
    if (bucket->parts < -DEBT_MAX) bucket->parts = -DEBT_MAX;
}

void bd_bucket_give(bd_bucket *bucket, uint64_t tokens) {
    if (bucket->rate == 0) return;
    int64_t full = parts_of(bucket->burst);
    bucket->parts += parts_of(tokens);
    if (bucket->parts > full) bucket->parts = full;
}

uint64_t bd_bucket_left(const bd_bucket *bucket) {
    return bucket->parts > 0 ? (uint64_t)bucket->parts / PARTS : 0;
}
