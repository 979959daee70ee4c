/* normalize.c - the normalizers: NFC, Prepend, Replace. Text in and out is valid UTF-8.
 * Threads: any; nothing is kept between calls. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "internal.h"
#include "unicode.h"

/* Below this every code point is composed already and composes with nothing before it. */
#define NFC_FIRST_CHANGED 0x300u
#define HANGUL_VOWELS     0x1160u /* conjoining vowels and finals up to 0x11ff */

/* Whether NFC leaves the character alone whatever stands around it, so that text may be cut before
 * it. */
static bool nfc_inert(uint32_t code_point) {
    if (code_point < NFC_FIRST_CHANGED) return true;
    if (code_point >= HANGUL_VOWELS && code_point <= 0x11ff) return false;
    const utf8proc_property_t *property = utf8proc_get_property((utf8proc_int32_t)code_point);
    /* What composes with a character before it is a mark, or a Hangul vowel or final. */
    return property->combining_class == 0 && property->decomp_seqindex == UINT16_MAX &&
           property->category != UTF8PROC_CATEGORY_MN &&
           property->category != UTF8PROC_CATEGORY_MC &&
           property->category != UTF8PROC_CATEGORY_ME && property->category != UTF8PROC_CATEGORY_CN;
}

typedef struct nfc_char {
    uint32_t order; /* place in the run, which makes the sort stable */
    utf8proc_int32_t code_point;
    utf8proc_propval_t class;
} nfc_char;

static int compare_nfc(const void *a, const void *b) {
    const nfc_char *x = a, *y = b;
    if (x->class != y->class) return x->class < y->class ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

/* Canonical ordering of each run of combining characters. utf8proc's own is quadratic in a run's
 * length. */
static bd_status nfc_reorder(utf8proc_int32_t *points, size_t count) {
    nfc_char *run = NULL;
    size_t run_capacity = 0;
    for (size_t at = 0; at < count; at++) {
        if (utf8proc_get_property(points[at])->combining_class == 0) continue;
        size_t end = at;
        while (end < count && utf8proc_get_property(points[end])->combining_class != 0)
            end++;
        size_t length = end - at;
        BD_ASSERT(length > 0);
        if (length > run_capacity) {
            free(run);
            run_capacity = length * 2;
            run = malloc(run_capacity * sizeof *run);
            if (!run) return BD_E_MEMORY;
        }
        for (size_t i = 0; i < length; i++) {
            utf8proc_int32_t point = points[at + i];
            run[i] = (nfc_char){(uint32_t)i, point, utf8proc_get_property(point)->combining_class};
        }
        qsort(run, length, sizeof *run, compare_nfc);
        for (size_t i = 0; i < length; i++)
            points[at + i] = run[i].code_point;
        at = end - 1;
    }
    free(run);
    return BD_OK;
}

/* Full NFC of a stretch that starts at an inert character or the start of the text and ends before
 * one. */
static bd_status nfc_stretch(const uint8_t *text, size_t bytes, bd_strbuf *out) {
    /* A character's canonical decomposition has at most 4 code points. */
    size_t capacity = bytes * 4 + 4, count = 0, step;
    utf8proc_int32_t *points = malloc(capacity * sizeof *points);
    if (!points) return BD_E_MEMORY;
    bd_status s = BD_E_INTERNAL;
    for (size_t at = 0; at < bytes; at += step) {
        utf8proc_int32_t point = (utf8proc_int32_t)bd_utf8_get(text + at, &step);
        utf8proc_ssize_t made =
            utf8proc_decompose_char(point, points + count, (utf8proc_ssize_t)(capacity - count),
                                    UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, NULL);
        if (made < 0 || (size_t)made > capacity - count) goto done;
        count += (size_t)made;
    }
    if ((s = nfc_reorder(points, count)) != BD_OK) goto done;
    utf8proc_ssize_t composed = utf8proc_normalize_utf32(points, (utf8proc_ssize_t)count,
                                                         UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    for (utf8proc_ssize_t i = 0; i < composed; i++) {
        uint8_t utf8[4];
        bd_strbuf_append(out, utf8, bd_utf8_put((uint32_t)points[i], utf8));
    }
done:
    free(points);
    return s;
}

bd_status bd_nfc_append(const uint8_t *text, size_t bytes, bd_strbuf *out) {
    size_t copied = 0, inert = 0, at = 0, step;
    while (at < bytes) {
        if (nfc_inert(bd_utf8_get(text + at, &step))) {
            inert = at;
            at += step;
            continue;
        }
        while (at < bytes && !nfc_inert(bd_utf8_get(text + at, &step)))
            at += step;
        bd_strbuf_append(out, text + copied, inert - copied);
        bd_status s = nfc_stretch(text + inert, at - inert, out);
        if (s != BD_OK) return s;
        copied = inert = at;
    }
    bd_strbuf_append(out, text + copied, bytes - copied);
    return BD_OK;
}

static bool nfc_needed(const uint8_t *text, size_t bytes) {
    size_t step;
    for (size_t at = 0; at < bytes; at += step)
        if (!nfc_inert(bd_utf8_get(text + at, &step))) return true;
    return false;
}

static void replace_append(const bd_normalize_step *step, const char *text, size_t bytes,
                           bd_strbuf *out) {
    const char *end = text + bytes, *hit;
    while ((hit = memmem(text, (size_t)(end - text), step->pattern, step->pattern_bytes)) != NULL) {
        bd_strbuf_append(out, text, (size_t)(hit - text));
        bd_strbuf_append(out, step->content, step->content_bytes);
        text = hit + step->pattern_bytes;
    }
    bd_strbuf_append(out, text, (size_t)(end - text));
}

bool bd_normalize_needed(const bd_tokenizer *tokenizer, const uint8_t *text, size_t bytes) {
    for (uint32_t i = 0; i < tokenizer->normalize_count; i++) {
        if (tokenizer->normalize[i].kind != BD_NORMALIZE_NFC) return bytes > 0;
        if (nfc_needed(text, bytes)) return true;
    }
    return false;
}

bd_status bd_normalize(const bd_tokenizer *tokenizer, const uint8_t *text, size_t bytes,
                       bd_strbuf *out, bd_strbuf *spare) {
    bd_strbuf_clear(out);
    bd_strbuf_append(out, text, bytes);
    for (uint32_t i = 0; i < tokenizer->normalize_count && !out->failed; i++) {
        const bd_normalize_step *step = &tokenizer->normalize[i];
        bd_strbuf_clear(spare);
        if (step->kind == BD_NORMALIZE_NFC) {
            bd_status s = bd_nfc_append((const uint8_t *)out->data, out->len_bytes, spare);
            if (s != BD_OK) return s;
        } else if (step->kind == BD_NORMALIZE_PREPEND) {
            if (out->len_bytes > 0) bd_strbuf_append(spare, step->content, step->content_bytes);
            bd_strbuf_append(spare, out->data, out->len_bytes);
        } else {
            replace_append(step, out->data, out->len_bytes, spare);
        }
        bd_strbuf swap = *out;
        *out = *spare;
        *spare = swap;
    }
    return out->failed ? BD_E_MEMORY : BD_OK;
}
