/* chat_lines.h - templates and variables as JSON lines, for goldens and for comparing with another
 * program: {"template": text, "variables": object, "text": wanted} or "fails": true. Threads: one.
 */
#ifndef BITDELTA_TESTS_CHAT_LINES_H
#define BITDELTA_TESTS_CHAT_LINES_H

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/tokenizer/chat_template.h"

/* 2026-03-07 12:30:00 UTC, what the goldens call now. */
#define CHAT_NOW_S ((int64_t)1772886600)

/* First byte of the value of a top-level member; the line was checked. */
static inline const char *chat_member(const char *line, const char *key) {
    size_t bytes = strlen(key);
    int depth = 0;
    for (const char *at = line; *at; at++) {
        if (*at == '"') {
            const char *from = ++at;
            while (*at != '"')
                at += *at == '\\' ? 2 : 1;
            bool found = depth == 1 && (size_t)(at - from) == bytes &&
                         memcmp(from, key, bytes) == 0 && at[1 + strspn(at + 1, " ")] == ':';
            if (!found) continue;
            at += 1 + strspn(at + 1, " ");
            return at + 1 + strspn(at + 1, " ");
        }
        if (*at == '{' || *at == '[') depth++;
        if (*at == '}' || *at == ']') depth--;
    }
    return NULL;
}

/* A member that is a string, decoded and to be freed; NULL: there is none. */
static inline char *chat_string(const char *line, const char *key) {
    const char *at = chat_member(line, key);
    if (!at || *at != '"') return NULL;
    cJSON *item = cJSON_ParseWithOpts(at, NULL, false);
    char *copy = item ? strdup(item->valuestring) : NULL;
    cJSON_Delete(item);
    return copy;
}

/* Renders a line's template; the text, or the error's message, is in *out. */
static inline bd_status chat_render_line(const char *line, const char *source, bd_strbuf *out) {
    bd_chat_template *tmpl;
    bd_error err;
    bd_error_clear(&err);
    const bd_chat_variable variable = {.json = chat_member(line, "variables")};
    bd_status status = bd_chat_template_parse(&tmpl, source, strlen(source), "template", &err);
    if (status == BD_OK) {
        status = bd_chat_template_render(tmpl, &variable, 1, CHAT_NOW_S, out, &err);
        bd_chat_template_destroy(tmpl);
    }
    if (status != BD_OK) {
        bd_strbuf_clear(out);
        bd_strbuf_puts(out, err.message);
    }
    return status;
}

#endif
