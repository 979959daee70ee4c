/* json_line.h - read values out of JSON text that bd_json_check() has accepted, where a DOM will
 * not do: strings may hold NUL characters. Nothing is copied but decoded strings. Threads: any. */
#ifndef BITDELTA_TOOLS_JSON_LINE_H
#define BITDELTA_TOOLS_JSON_LINE_H

#include <stddef.h>

#include "bitdelta/base/strbuf.h"

typedef struct bd_json_span { /* one value, without space around it */
    const char *text;
    size_t bytes;
} bd_json_span;

/* The value in text, which may have space around it. */
bd_json_span bd_json_span_of(const char *text, size_t bytes);
/* Next element of an array; start with *cursor = 0. false: no more, or not an array. */
bool bd_json_array_next(bd_json_span array, size_t *cursor, bd_json_span *value);
/* The last member named key; false: none, or not an object. */
bool bd_json_object_get(bd_json_span object, const char *key, bd_json_span *value);
/* Appends the string's UTF-8 to out; false: not a string. Check out->failed. */
bool bd_json_string_append(bd_json_span value, bd_strbuf *out);
/* A whole number without fraction or exponent that fits; false: it is not. */
bool bd_json_int32(bd_json_span value, int32_t *number);
/* true or false into *flag; false: it is neither. */
bool bd_json_bool(bd_json_span value, bool *flag);

#endif
