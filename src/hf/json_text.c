/* json_text.c - see json_text.h. Lists are walked by ->next: cJSON's indexed access is linear each
 * time. */
#include "bitdelta/hf/json_text.h"

#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"

/* Model JSON is shallow; the node bound keeps a DOM of a 100 MB header below about 1 GB. */
static const bd_json_limits file_limits = {.depth_max = 64, .nodes_max = 8u << 20};

bd_status bd_json_parse(const char *text, size_t bytes, const char *subject, cJSON **out,
                        bd_error *err) {
    *out = NULL;
    bd_json_scan scan;
    bd_error inner;
    bd_error_clear(&inner);
    const bd_status status = bd_json_check(text, bytes, &file_limits, &scan, &inner);
    if (status != BD_OK) return bd_fail(err, status, subject, "%s: %s", subject, inner.message);
    /* From the value on: cJSON fails on a byte order mark with a single byte behind it. */
    cJSON *root = cJSON_ParseWithLength(text + scan.offset, bytes - scan.offset);
    if (!root) return bd_fail(err, BD_E_MEMORY, subject, "%s: out of memory for its JSON", subject);
    if (!cJSON_IsObject(root)) {
        cJSON_Delete(root);
        return bd_fail(err, BD_E_FORMAT, subject, "%s: the JSON is not an object", subject);
    }
    *out = root;
    return BD_OK;
}

bd_status bd_json_read_file(const char *path, size_t bytes_max, cJSON **out, bd_error *err) {
    *out = NULL;
    char *text = NULL;
    size_t bytes = 0;
    bd_status status = bd_file_read(path, bytes_max, &text, &bytes, err);
    if (status != BD_OK) return status;
    status = bd_json_parse(text, bytes, path, out, err);
    free(text);
    return status;
}

const cJSON *bd_json_member(const cJSON *object, const char *name) {
    for (const cJSON *item = object ? object->child : NULL; item; item = item->next) {
        if (item->string && strcmp(item->string, name) == 0) return item;
    }
    return NULL;
}

bool bd_json_u64(const cJSON *value, uint64_t max, uint64_t *out) {
    if (!value || !cJSON_IsNumber(value)) return false;
    const double number = value->valuedouble;
    if (!(number >= 0.0 && number <= (double)BD_JSON_INTEGER_MAX)) return false;
    const uint64_t integer = (uint64_t)number;
    if ((double)integer < number || integer > max) return false;
    *out = integer;
    return true;
}

uint32_t bd_json_count(const cJSON *container) {
    uint32_t count = 0;
    for (const cJSON *item = container ? container->child : NULL; item; item = item->next)
        count++;
    return count;
}

/* The code point at *at (valid UTF-8 is assumed to be the common case; a stray byte becomes
 * U+FFFD). */
static uint32_t next_code_point(const unsigned char **at) {
    const unsigned char *p = *at;
    const uint32_t lead = *p;
    const uint32_t more = lead < 0x80    ? 0
                          : lead >= 0xf0 ? 3
                          : lead >= 0xe0 ? 2
                          : lead >= 0xc0 ? 1
                                         : 4;
    if (more == 4) {
        *at = p + 1;
        return 0xfffd;
    }
    uint32_t code = more == 0 ? lead : lead & (0x3fu >> more);
    for (uint32_t i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            *at = p + i;
            return 0xfffd;
        }
        code = code << 6 | (p[i] & 0x3fu);
    }
    *at = p + more + 1;
    return code;
}

static void put_code_point(bd_strbuf *buf, uint32_t code) {
    static const char named[] = "\"\"\\\\\bb\ff\nn\rr\tt";
    for (const char *p = named; *p; p += 2) {
        if (code == (uint32_t)(unsigned char)p[0]) {
            bd_strbuf_printf(buf, "\\%c", p[1]);
            return;
        }
    }
    if (code >= 0x20 && code < 0x80) {
        bd_strbuf_printf(buf, "%c", (int)code);
    } else if (code < 0x10000) {
        bd_strbuf_printf(buf, "\\u%04x", code);
    } else {
        const uint32_t rest = code - 0x10000;
        bd_strbuf_printf(buf, "\\u%04x\\u%04x", 0xd800 + (rest >> 10), 0xdc00 + (rest & 0x3ff));
    }
}

void bd_json_put_ascii(bd_strbuf *buf, const char *text) {
    bd_strbuf_puts(buf, "\"");
    for (const unsigned char *p = (const unsigned char *)text; *p;)
        put_code_point(buf, next_code_point(&p));
    bd_strbuf_puts(buf, "\"");
}
