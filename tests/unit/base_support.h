/* base_support.h - what the unit tests of base and config share: cmocka in the right order, a
 * printed seed, a small generator, hex, lines of a file. Threads: the test's own. */
#ifndef BITDELTA_TESTS_BASE_SUPPORT_H
#define BITDELTA_TESTS_BASE_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Fresh each run; BD_TEST_SEED repeats one. */
static inline uint64_t support_seed(void) {
    const char *given = getenv("BD_TEST_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed = given ? strtoull(given, NULL, 10)
                          : (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    print_message("BD_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

static inline uint64_t support_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Decodes hex in place of a new buffer; the caller frees. */
static inline char *support_unhex(const char *hex, size_t *bytes) {
    size_t count = strspn(hex, "0123456789abcdef") / 2;
    char *out = malloc(count + 1);
    assert_non_null(out);
    for (size_t i = 0; i < count; i++) {
        char pair[3] = {hex[2 * i], hex[2 * i + 1], 0};
        out[i] = (char)strtoul(pair, NULL, 16);
    }
    out[count] = 0;
    *bytes = count;
    return out;
}

#endif
