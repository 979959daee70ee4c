/* chat_template.c - a template's life: parse once, render often. Threads: see chat_template.h. */
#include <stdlib.h>

#include "bitdelta/base/json_scan.h"
#include "chat_internal.h"

/* Line ends become \n and one at the end goes, as Jinja does. */
static char *normalised(const char *text, size_t bytes, size_t *out_bytes) {
    char *copy = malloc(bytes + 1);
    size_t count = 0;
    if (!copy) return NULL;
    for (size_t i = 0; i < bytes; i++) {
        bool pair = text[i] == '\r' && i + 1 < bytes && text[i + 1] == '\n';
        if (!pair) copy[count++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (count > 0 && copy[count - 1] == '\n') count--;
    copy[count] = '\0';
    *out_bytes = count;
    return copy;
}

void bd_chat_template_destroy(bd_chat_template *tmpl) {
    if (!tmpl) return;
    bd_arena_destroy(tmpl->arena);
    free(tmpl->source);
    free(tmpl->subject);
    free(tmpl);
}

bd_status bd_chat_template_parse(bd_chat_template **out, const char *text, size_t bytes,
                                 const char *name, bd_error *err) {
    *out = NULL;
    if (bytes > BD_CHAT_TEMPLATE_BYTES_MAX)
        return bd_fail(err, BD_E_LIMIT, name, "the chat template has more than %zu bytes",
                       BD_CHAT_TEMPLATE_BYTES_MAX);
    if (bd_utf8_valid_prefix(text, bytes) != bytes)
        return bd_fail(err, BD_E_FORMAT, name, "the chat template is not valid UTF-8");
    bd_chat_template *tmpl = calloc(1, sizeof *tmpl);
    if (!tmpl) return bd_fail(err, BD_E_MEMORY, name, "out of memory");
    size_t source_bytes = 0;
    tmpl->source = normalised(text, bytes, &source_bytes);
    tmpl->subject = strdup(name);
    /* A node takes some 100 bytes for 1 to 10 of the source. */
    tmpl->arena = bd_arena_create((size_t)16 << 10, (size_t)128 << 20);
    bd_status status = BD_E_MEMORY;
    if (!tmpl->source || !tmpl->subject || !tmpl->arena) {
        (void)bd_fail(err, BD_E_MEMORY, name, "out of memory");
        goto fail;
    }
    bd_chat_parser *parser = bd_arena_alloc(tmpl->arena, 1, sizeof *parser);
    if (!parser) {
        (void)bd_fail(err, BD_E_MEMORY, name, "out of memory");
        goto fail;
    }
    parser->out = tmpl;
    parser->lexer = (bd_chat_lexer){.begin = tmpl->source,
                                    .at = tmpl->source,
                                    .end = tmpl->source + source_bytes,
                                    .line = 1,
                                    .arena = tmpl->arena,
                                    .subject = tmpl->subject,
                                    .err = err};
    if (!bd_chat_parse_text(parser, &tmpl->root)) {
        status = parser->lexer.status;
        goto fail;
    }
    *out = tmpl;
    return BD_OK;
fail:
    bd_chat_template_destroy(tmpl);
    return status;
}

bool bd_chat_template_wants_parts(const bd_chat_template *tmpl) {
    return tmpl->wants_parts;
}

bool bd_chat_template_tests_string(const bd_chat_template *tmpl) {
    return tmpl->tests_string;
}

bool bd_chat_template_mentions(const bd_chat_template *tmpl, const char *word) {
    return strstr(tmpl->source, word) != NULL;
}

const char *bd_chat_template_source(const bd_chat_template *tmpl) {
    return tmpl->source;
}
