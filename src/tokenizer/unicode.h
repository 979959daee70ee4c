/* unicode.h - code points of valid UTF-8 and the character classes that split patterns use.
 * Threads: pure functions over constant tables. */
#ifndef BITDELTA_TOKENIZER_UNICODE_H
#define BITDELTA_TOKENIZER_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BD_CLASS_LETTER = 1, BD_CLASS_NUMBER = 2, BD_CLASS_SPACE = 4 }; /* \p{L}, \p{N}, \s */

/* OR of BD_CLASS_*; 0 for everything else. Unicode 16, as the reference's regex engine has it. */
uint8_t bd_unicode_class(uint32_t code_point);
/* Regex \w: letters, marks, decimal digits, connectors, joiners. */
bool bd_unicode_is_word(uint32_t code_point);

/* Code point at p, which must be the first byte of a valid UTF-8 character. */
static inline uint32_t bd_utf8_get(const uint8_t *p, size_t *bytes) {
    uint32_t b = p[0];
    if (b < 0x80) {
        *bytes = 1;
        return b;
    }
    if (b < 0xe0) {
        *bytes = 2;
        return (b & 0x1f) << 6 | (p[1] & 0x3fu);
    }
    if (b < 0xf0) {
        *bytes = 3;
        return (b & 0x0f) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
    }
    *bytes = 4;
    return (b & 0x07) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
}

/* Start of the character that ends just before text + end (end > 0, valid UTF-8). */
static inline size_t bd_utf8_before(const uint8_t *text, size_t end) {
    size_t at = end - 1;
    while (at > 0 && (text[at] & 0xc0) == 0x80)
        at--;
    return at;
}

/* Writes 1 to 4 bytes for a code point below 0x110000; returns how many. */
static inline size_t bd_utf8_put(uint32_t code_point, uint8_t out[4]) {
    if (code_point < 0x80) {
        out[0] = (uint8_t)code_point;
        return 1;
    }
    if (code_point < 0x800) {
        out[0] = (uint8_t)(0xc0 | code_point >> 6);
        out[1] = (uint8_t)(0x80 | (code_point & 0x3f));
        return 2;
    }
    if (code_point < 0x10000) {
        out[0] = (uint8_t)(0xe0 | code_point >> 12);
        out[1] = (uint8_t)(0x80 | (code_point >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (code_point & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | code_point >> 18);
    out[1] = (uint8_t)(0x80 | (code_point >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (code_point >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (code_point & 0x3f));
    return 4;
}

#endif
