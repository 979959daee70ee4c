/* stop.h - stop strings in a text that arrives in pieces. Withheld is exactly the longest suffix of
 * the text that is a proper prefix of some stop string; since that suffix is a copy of the prefix,
 * no text is buffered. Owner: a set by its request, a state by its choice. Threads: a set is
 * read-only after init. */
#ifndef BITDELTA_OPENAI_STOP_H
#define BITDELTA_OPENAI_STOP_H

#include "request.h"

typedef struct bd_stop_set {
    uint32_t count;
    const bd_text *strings; /* borrowed; 1 .. BD_STOP_STRING_BYTES_MAX bytes each */
    const uint16_t
        *borders[BD_STOP_STRINGS_MAX]; /* [bytes]: longest proper border of each prefix (KMP) */
} bd_stop_set;

typedef struct bd_stop_state {             /* zero at the start of the text */
    uint16_t matched[BD_STOP_STRINGS_MAX]; /* bytes of each string that end the text so far */
    uint16_t held_bytes;                   /* the largest of them */
    uint8_t held_string;                   /* the string it belongs to */
} bd_stop_state;

/* false: out of memory. */
bool bd_stop_set_init(bd_stop_set *set, const bd_text *strings, uint32_t count, bd_arena *arena);

/* Takes a piece of the text and appends to out what can be released. Returns the string that
 * matched within the text so far (the earliest start, on equal start the longest), or -1. After a
 * match out ends before it, or behind it with keep_match, and the state is done. */
int bd_stop_feed(const bd_stop_set *set, bd_stop_state *state, const char *text, size_t bytes,
                 bool keep_match, bd_strbuf *out);
/* The text ends without a match: appends what was withheld. */
void bd_stop_release(const bd_stop_set *set, bd_stop_state *state, bd_strbuf *out);

#endif
