/* json_view.h - reading values in place from a JSON text that bd_json_check accepted and a NUL byte
 * ends. No tree is built, so memory does not grow with the text, integers keep all their digits and
 * strings their NUL characters. Borrowed from the text. Threads: pure. */
#ifndef BITDELTA_OPENAI_JSON_VIEW_H
#define BITDELTA_OPENAI_JSON_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum bd_view_kind {
    BD_VIEW_NULL,
    BD_VIEW_BOOL,
    BD_VIEW_NUMBER,
    BD_VIEW_STRING,
    BD_VIEW_ARRAY,
    BD_VIEW_OBJECT
} bd_view_kind;

typedef struct bd_view { /* at: the first byte of a value; NULL: no value */
    const char *at;
} bd_view;

typedef enum bd_view_int {
    BD_VIEW_INT_OK,
    BD_VIEW_INT_FRACTION,
    BD_VIEW_INT_LOW,
    BD_VIEW_INT_HIGH
} bd_view_int;

bd_view bd_view_root(const char *text); /* skips white space */
size_t bd_view_bytes(bd_view value);    /* of the value in the text */
bd_view_kind bd_view_kind_of(bd_view value);
const char *bd_view_kind_name(bd_view_kind kind);       /* "a string", for messages */
bool bd_view_true(bd_view value);                       /* of a BOOL */
double bd_view_double(bd_view value);                   /* of a NUMBER */
bd_view_int bd_view_int64(bd_view value, int64_t *out); /* of a NUMBER; 1.6e1 is 16 */
/* Of a STRING: length once decoded, and the decoding into out (that many bytes, no NUL added). */
size_t bd_view_string_bytes(bd_view value);
void bd_view_string_copy(bd_view value, char *out);

typedef struct bd_view_iter {
    const char *at;
} bd_view_iter;

bd_view_iter bd_view_begin(bd_view array_or_object);
bool bd_view_next_item(bd_view_iter *iter, bd_view *item);
bool bd_view_next_member(bd_view_iter *iter, bd_view *key, bd_view *value);
size_t bd_view_count(bd_view array);

#endif
