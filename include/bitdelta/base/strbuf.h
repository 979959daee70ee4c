/* strbuf.h - a growing byte string with a cap. Owner: the caller; not thread-safe.
 * A failed append (cap or memory) sets `failed` and leaves the content as it was; later appends do
 * nothing, so a writer checks once at the end. data is always NUL-terminated once non-NULL. */
#ifndef BITDELTA_BASE_STRBUF_H
#define BITDELTA_BASE_STRBUF_H

#include <stdarg.h>
#include <stddef.h>

#include "bitdelta/base/status.h"

typedef struct bd_strbuf {
    char *data;
    size_t len_bytes;
    size_t cap_bytes;
    size_t max_bytes; /* 0: no cap */
    bool failed;
} bd_strbuf;

void bd_strbuf_init(bd_strbuf *buf, size_t max_bytes);
void bd_strbuf_deinit(bd_strbuf *buf);
void bd_strbuf_clear(bd_strbuf *buf); /* keeps the memory, clears `failed` */
void bd_strbuf_append(bd_strbuf *buf, const void *data, size_t len_bytes);
void bd_strbuf_puts(bd_strbuf *buf, const char *text);
void bd_strbuf_printf(bd_strbuf *buf, const char *format, ...) BD_PRINTF(2, 3);

/* Append a JSON string literal with quotes. Input is any bytes: invalid UTF-8 becomes U+FFFD (one
 * per maximal invalid part), control characters are escaped, NUL is \u0000, other text stays as it
 * is. */
void bd_strbuf_json_string(bd_strbuf *buf, const char *text, size_t len_bytes);
/* Shortest digits that read back as the same double; locale-free; NaN and infinities become null.
 */
void bd_strbuf_json_number(bd_strbuf *buf, double value);
/* Shortest digits that read back as the same float (used for logprobs). */
void bd_strbuf_json_float(bd_strbuf *buf, float value);

#endif
