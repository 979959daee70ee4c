/* kv_hash.h - SipHash-2-4 with 128 bits of output: the prefix key. A keyed pseudo-random function,
 * so that no client can search for two prompts with one key. Pure function; any thread. */
#ifndef BITDELTA_SRC_ENGINE_KV_HASH_H
#define BITDELTA_SRC_ENGINE_KV_HASH_H

#include <stddef.h>
#include <stdint.h>

typedef struct bd_kv_key {
    uint64_t lo, hi;
} bd_kv_key;

bd_kv_key bd_kv_hash(const uint64_t secret[2], const void *data, size_t bytes);

#endif
