/* rng.c - Philox4x32-10, written from the paper's definition. Threads: pure functions. */
#include "bitdelta/base/rng.h"

enum { PHILOX_ROUNDS = 10 };

void bd_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t product0 = (uint64_t)0xd2511f53u * c0;
        uint64_t product1 = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)product0;
        k0 += 0x9e3779b9u; /* golden ratio */
        k1 += 0xbb67ae85u; /* sqrt(3) - 1 */
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double bd_rng_uniform(uint64_t seed, uint32_t choice, uint32_t position) {
    const uint32_t counter[4] = {position, choice, 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t out[4];
    bd_philox4x32(counter, key, out);
    uint64_t bits = ((uint64_t)out[0] << 32 | out[1]) >> 11;
    return (double)bits * 0x1p-53;
}
