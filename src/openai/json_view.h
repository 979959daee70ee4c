/* json_view.h - reading values in place from a JSON text that bd_json_check accepted and a NUL byte
 * ends. No tree is built, so memory does not grow with the text, integers keep all their digits and
 * strings their NUL characters. Borrowed from the text. Threads: pure. */
#ifndef BITDELTA_OPENAI_JSON_VIEW_H
#define BITDELTA_OPENAI_JSON_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum bd_json_kind {
    BD_JSON_NULL,
    BD_JSON_BOOL,
    BD_JSON_NUMBER,
    BD_JSON_STRING,
    BD_JSON_ARRAY,
    BD_JSON_OBJECT
} bd_json_kind;

typedef struct bd_json { /* at: the first byte of a value; NULL: no value */
    const char *at;
} bd_json;

typedef enum bd_json_int {
    BD_JSON_INT_OK,
    BD_JSON_INT_FRACTION,
    BD_JSON_INT_LOW,
    BD_JSON_INT_HIGH
} bd_json_int;

bd_json bd_json_root(const char *text); /* skips white space */
bd_json_kind bd_json_kind_of(bd_json value);
const char *bd_json_kind_name(bd_json_kind kind);       /* "a string", for messages */
bool bd_json_true(bd_json value);                       /* of a BOOL */
double bd_json_double(bd_json value);                   /* of a NUMBER */
bd_json_int bd_json_int64(bd_json value, int64_t *out); /* of a NUMBER; 1.6e1 is 16 */
/* Of a STRING: length once decoded, and the decoding into out (that many bytes, no NUL added). */
size_t bd_json_string_bytes(bd_json value);
void bd_json_string_copy(bd_json value, char *out);

typedef struct bd_json_iter {
    const char *at;
} bd_json_iter;

bd_json_iter bd_json_begin(bd_json array_or_object);
bool bd_json_next_item(bd_json_iter *iter, bd_json *item);
bool bd_json_next_member(bd_json_iter *iter, bd_json *key, bd_json *value);
size_t bd_json_count(bd_json array);

#endif
