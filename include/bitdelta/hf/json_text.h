/* json_text.h - JSON files of models and deltas: checked before cJSON parses them, read strictly,
 * written the way Python's json module writes them. Owner: the caller. Threads: any. */
#ifndef BITDELTA_HF_JSON_TEXT_H
#define BITDELTA_HF_JSON_TEXT_H

#include <cjson/cJSON.h>

#include "bitdelta/base/status.h"
#include "bitdelta/base/strbuf.h"

#define BD_JSON_INTEGER_MAX (1ull << 53) /* beyond it a double no longer counts */

/* bd_json_check, then cJSON; the value must be an object. subject: the path, for messages. Free
 * with cJSON_Delete. */
BD_MUST_CHECK bd_status bd_json_parse(const char *text, size_t bytes, const char *subject,
                                      cJSON **out, bd_error *err);
BD_MUST_CHECK bd_status bd_json_read_file(const char *path, size_t bytes_max, cJSON **out,
                                          bd_error *err);

/* Case-sensitive; NULL when absent. */
const cJSON *bd_json_member(const cJSON *object, const char *name);
/* An integer written as a number, in [0, max] (at most 2^53). */
bool bd_json_u64(const cJSON *value, uint64_t max, uint64_t *out);
uint32_t bd_json_count(const cJSON *container);

/* A string literal in ASCII with quotes: everything else as \uXXXX, as json.dumps does. */
void bd_json_put_ascii(bd_strbuf *buf, const char *text);

#endif
