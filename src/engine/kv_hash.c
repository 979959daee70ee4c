/* kv_hash.c - SipHash-2-4-128 (Aumasson and Bernstein, "SipHash: a fast short-input PRF"),
 * little-endian words. */
#include "kv_hash.h"

#include <string.h>

typedef struct sip_state {
    uint64_t v0, v1, v2, v3;
} sip_state;

static uint64_t rotate(uint64_t x, unsigned bits) {
    return x << bits | x >> (64 - bits);
}

static void sip_rounds(sip_state *s, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        s->v0 += s->v1;
        s->v2 += s->v3;
        s->v1 = rotate(s->v1, 13) ^ s->v0;
        s->v3 = rotate(s->v3, 16) ^ s->v2;
        s->v0 = rotate(s->v0, 32);
        s->v2 += s->v1;
        s->v0 += s->v3;
        s->v1 = rotate(s->v1, 17) ^ s->v2;
        s->v3 = rotate(s->v3, 21) ^ s->v0;
        s->v2 = rotate(s->v2, 32);
    }
}

static void sip_word(sip_state *s, uint64_t word) {
    s->v3 ^= word;
    sip_rounds(s, 2);
    s->v0 ^= word;
}

bd_kv_key bd_kv_hash(const uint64_t secret[2], const void *data, size_t bytes) {
    /* The constants spell "somepseudorandomlygeneratedbytes"; 0xee marks the 128-bit form. */
    sip_state s = {secret[0] ^ 0x736f6d6570736575u, secret[1] ^ 0x646f72616e646f6du ^ 0xeeu,
                   secret[0] ^ 0x6c7967656e657261u, secret[1] ^ 0x7465646279746573u};
    const unsigned char *at = data;
    size_t left = bytes;
    for (; left >= 8; left -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        sip_word(&s, word);
    }
    uint64_t last = (uint64_t)bytes << 56;
    for (size_t i = 0; i < left; i++)
        last |= (uint64_t)at[i] << (8 * i);
    sip_word(&s, last);
    bd_kv_key key;
    s.v2 ^= 0xeeu;
    sip_rounds(&s, 4);
    key.lo = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    s.v1 ^= 0xddu;
    sip_rounds(&s, 4);
    key.hi = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    return key;
}
