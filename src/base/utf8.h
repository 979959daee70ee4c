/* utf8.h - one step of strict UTF-8 decoding, shared inside base (Unicode 15, table 3-7).
 * Threads: pure functions. */
#ifndef BITDELTA_SRC_BASE_UTF8_H
#define BITDELTA_SRC_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Looks at the sequence that starts at p (bytes > 0). Valid: *valid is true, its length is
 * returned. Invalid: the length of the maximal part that one U+FFFD stands for, at least 1. */
static inline size_t bd_utf8_step(const uint8_t *p, size_t bytes, bool *valid) {
    uint8_t lead = p[0];
    *valid = false;
    if (lead < 0x80u) {
        *valid = true;
        return 1;
    }
    /* The second byte's range excludes overlong forms, surrogates and code points over 10FFFF. */
    uint8_t low = 0x80u, high = 0xbfu;
    size_t length;
    if (lead >= 0xc2u && lead <= 0xdfu) {
        length = 2;
    } else if (lead >= 0xe0u && lead <= 0xefu) {
        length = 3;
        if (lead == 0xe0u) low = 0xa0u;
        if (lead == 0xedu) high = 0x9fu;
    } else if (lead >= 0xf0u && lead <= 0xf4u) {
        length = 4;
        if (lead == 0xf0u) low = 0x90u;
        if (lead == 0xf4u) high = 0x8fu;
    } else {
        return 1;
    }
    for (size_t i = 1; i < length; i++) {
        if (i >= bytes || p[i] < low || p[i] > high) return i;
        low = 0x80u;
        high = 0xbfu;
    }
    *valid = true;
    return length;
}

#endif
