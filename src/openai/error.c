/* error.c - error values of the API and their wire form. Threads: any. */
#include "bitdelta/openai/error.h"

#include <stdio.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"

typedef struct api_row {
    unsigned http_status;
    const char *type, *code;
} api_row;

static const api_row rows[] = {[BD_API_OK] = {200, "", ""},
#define API_ROW(name, http, type, code) [name] = {http, type, code},
                               BD_API_LIST(API_ROW)
#undef API_ROW
};

bool bd_api_fail(bd_api_error *err, bd_api_kind kind, const char *param, const char *format, ...) {
    *err = (bd_api_error){.kind = kind, .param = param};
    va_list args;
    va_start(args, format);
    (void)vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    /* Cut at a character when the text did not fit. */
    err->message[bd_utf8_valid_prefix(err->message, strlen(err->message))] = '\0';
    return false;
}

unsigned bd_api_http_status(bd_api_kind kind) {
    return rows[kind].http_status;
}

const char *bd_api_code(bd_api_kind kind) {
    return rows[kind].code;
}

const char *bd_api_quote(bd_api_quoted *out, const char *text, size_t bytes) {
    size_t cut = bytes <= 100 ? bytes : 100;
    while (cut > 0 && cut < bytes && ((unsigned char)text[cut] & 0xC0u) == 0x80u)
        cut--;
    char *to = out->text;
    for (size_t i = 0; i < cut; i++) {
        if (text[i] != '\0') {
            *to++ = text[i];
            continue;
        }
        memcpy(to, "\xEF\xBF\xBD", 3);
        to += 3;
    }
    *to = '\0';
    return out->text;
}

const char *bd_api_variant_fault(const bd_error *fault) {
    if (!fault) return bd_status_text(BD_E_VARIANT);
    if (fault->status == BD_E_LENGTH) return fault->message;
    if (fault->status == BD_E_NOT_FOUND) return "a file of its delta was not found";
    return bd_status_text(fault->status);
}

void bd_api_error_write(const bd_api_error *err, bd_strbuf *out) {
    const api_row *row = &rows[err->kind];
    bd_strbuf_puts(out, "{\"error\":{\"message\":");
    bd_strbuf_json_string(out, err->message, strlen(err->message));
    bd_strbuf_printf(out, ",\"type\":\"%s\",\"param\":", row->type);
    if (err->param)
        bd_strbuf_json_string(out, err->param, strlen(err->param));
    else
        bd_strbuf_puts(out, "null");
    bd_strbuf_printf(out, ",\"code\":\"%s\"}}", row->code);
}
