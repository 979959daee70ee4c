/* decode.c - ids to text. One state machine serves whole lists and streams, so both give the same
 * text. Threads: any; a bd_detok belongs to one thread. */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "internal.h"
#include "unicode.h"

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

typedef enum part_kind { PART_VALID, PART_INVALID, PART_UNFINISHED } part_kind;

/* Looks at one character at p: valid with its length; invalid with the length of the maximal part
 * that one U+FFFD stands for; or unfinished, where more bytes could complete it. */
static part_kind utf8_part(const uint8_t *p, size_t bytes, size_t *length) {
    uint8_t low = 0x80, high = 0xbf;
    size_t need = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    *length = 1;
    if (need == 1) return PART_VALID;
    if (p[0] < 0xc2 || p[0] > 0xf4) return PART_INVALID;
    if (p[0] == 0xe0) low = 0xa0;
    if (p[0] == 0xed) high = 0x9f;
    if (p[0] == 0xf0) low = 0x90;
    if (p[0] == 0xf4) high = 0x8f;
    for (; *length < need; (*length)++) {
        if (*length == bytes) return PART_UNFINISHED;
        if (p[*length] < low || p[*length] > high) return PART_INVALID;
        low = 0x80;
        high = 0xbf;
    }
    return PART_VALID;
}

/* Adds one byte to the unfinished character and looks at it again. */
static part_kind held_add(bd_detok *d, uint8_t byte, size_t *length) {
    BD_ASSERT(d->held_count < sizeof d->held);
    d->held[d->held_count++] = byte;
    return utf8_part(d->held, d->held_count, length);
}

static void bytes_push(bd_detok *d, const char *data, size_t bytes, bd_strbuf *out) {
    size_t at = 0, length;
    while (d->held_count > 0 && at < bytes) {
        part_kind kind = held_add(d, (uint8_t)data[at], &length);
        if (kind == PART_UNFINISHED) {
            at++;
            continue;
        }
        if (kind == PART_VALID) {
            bd_strbuf_append(out, d->held, length);
            at++;
        } else {
            bd_strbuf_append(out, replacement, 3); /* the new byte is looked at on its own */
        }
        d->held_count = 0;
    }
    while (at < bytes) {
        size_t valid = bd_utf8_valid_prefix(data + at, bytes - at);
        bd_strbuf_append(out, data + at, valid);
        at += valid;
        if (at == bytes) return;
        if (utf8_part((const uint8_t *)data + at, bytes - at, &length) == PART_UNFINISHED) {
            memcpy(d->held, data + at, bytes - at);
            d->held_count = (uint8_t)(bytes - at);
            return;
        }
        bd_strbuf_append(out, replacement, 3);
        at += length;
    }
}

/* Text of the fused string; drops what Strip drops at its start. */
static void text_emit(bd_detok *d, const char *text, size_t bytes, bd_strbuf *out) {
    size_t at = 0, step;
    while (d->strip_left > 0 && at < bytes) {
        uint32_t code_point = bd_utf8_get((const uint8_t *)text + at, &step);
        if (code_point != d->tokenizer->decoder.strip_char) {
            d->strip_left = 0;
            break;
        }
        d->strip_left--;
        at += step;
    }
    bd_strbuf_append(out, text + at, bytes - at);
}

static void replacements_emit(bd_detok *d, size_t count, bd_strbuf *out) {
    for (size_t i = 0; i < count; i++)
        text_emit(d, replacement, 3, out);
}

/* A run of byte tokens is text if all of it is valid, else every byte of it becomes U+FFFD. */
static void run_push(bd_detok *d, uint8_t byte, bd_strbuf *out) {
    size_t length;
    if (d->run_bad) {
        replacements_emit(d, 1, out);
        return;
    }
    bd_strbuf_append(&d->run, &byte, 1);
    if (d->run.failed) out->failed = true;
    part_kind kind = held_add(d, byte, &length);
    if (kind == PART_UNFINISHED) return;
    d->held_count = 0;
    if (kind == PART_VALID) return;
    d->run_bad = true;
    replacements_emit(d, d->run.len_bytes, out);
    bd_strbuf_clear(&d->run);
}

static void run_close(bd_detok *d, bd_strbuf *out) {
    if (d->held_count > 0)
        replacements_emit(d, d->run.len_bytes, out);
    else if (d->run.len_bytes > 0)
        text_emit(d, d->run.data, d->run.len_bytes, out);
    if (d->run.len_bytes > 0) bd_strbuf_clear(&d->run);
    d->held_count = 0;
    d->run_bad = false;
}

void bd_detok_init(bd_detok *detok, const bd_tokenizer *tokenizer, bool skip_special) {
    *detok = (bd_detok){.tokenizer = tokenizer, .skip_special = skip_special};
    detok->strip_left = tokenizer->decoder.strip_count;
    bd_strbuf_init(&detok->run, 0);
}

void bd_detok_deinit(bd_detok *detok) {
    bd_strbuf_deinit(&detok->run);
    detok->held_count = 0;
}

void bd_detok_push(bd_detok *d, int32_t id, bd_strbuf *out) {
    const bd_tokenizer *t = d->tokenizer;
    size_t bytes;
    const char *data = bd_tokenizer_token_bytes(t, id, &bytes);
    if (!data || (d->skip_special && t->flags[id] & BD_TOKEN_SPECIAL)) return;
    if (t->decoder.kind == BD_DECODER_BYTES) {
        bytes_push(d, data, bytes, out);
    } else if (t->flags[id] & BD_TOKEN_BYTE) {
        run_push(d, (uint8_t)data[0], out);
    } else {
        run_close(d, out);
        if (t->decoder.kind == BD_DECODER_SPACED && d->any_token) bd_strbuf_append(out, " ", 1);
        text_emit(d, data, bytes, out);
    }
    d->any_token = true;
}

bool bd_detok_skip(bd_detok *detok, const int32_t *ids, size_t count) {
    bd_strbuf dropped;
    bd_strbuf_init(&dropped, 0);
    bool failed = false;
    for (size_t i = 0; i < count && !failed; i++) {
        bd_detok_push(detok, ids[i], &dropped);
        failed = dropped.failed;
        bd_strbuf_clear(&dropped);
    }
    bd_strbuf_deinit(&dropped);
    return !failed;
}

void bd_detok_flush(bd_detok *detok, bd_strbuf *out) {
    if (detok->tokenizer->decoder.kind != BD_DECODER_BYTES) {
        run_close(detok, out);
    } else if (detok->held_count > 0) {
        bd_strbuf_append(out, replacement, 3);
        detok->held_count = 0;
    }
}

size_t bd_detok_held_bytes(const bd_detok *detok) {
    if (detok->tokenizer->decoder.kind == BD_DECODER_BYTES) return detok->held_count;
    return detok->run.len_bytes;
}

bd_status bd_tokenizer_decode(const bd_tokenizer *tokenizer, const int32_t *ids, size_t count,
                              bool skip_special, bd_strbuf *out, bd_error *err) {
    bd_detok detok;
    bd_detok_init(&detok, tokenizer, skip_special);
    for (size_t i = 0; i < count && !out->failed; i++)
        bd_detok_push(&detok, ids[i], out);
    bd_detok_flush(&detok, out);
    bd_detok_deinit(&detok);
    if (!out->failed) return BD_OK;
    if (out->max_bytes > 0)
        return bd_fail(err, BD_E_LIMIT, "text", "the text has more than %zu bytes", out->max_bytes);
    return bd_fail(err, BD_E_MEMORY, "text", "out of memory while ids were decoded");
}
