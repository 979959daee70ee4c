/* load_decoder.c - the decoder, applied at load as far as it works on single tokens: the bytes of
 * every id. Threads: the loading one. */
#include <stdlib.h>
#include <string.h>

#include "load.h"
#include "unicode.h"

#define DECODED_BYTES_MAX ((size_t)1 << 30)

typedef struct text_replace {
    const char *pattern, *content; /* in the JSON tree */
} text_replace;

typedef struct decoder_parts {
    text_replace replaces[BD_STEPS_MAX];
    uint32_t replace_count;
    bool byte_level, byte_fallback, fused, stripped;
} decoder_parts;

int bd_byte_level_byte(uint32_t code_point) {
    /* Printable bytes of Latin-1 stand for themselves, the other 68 follow from U+0100 on in order.
     */
    if (code_point >= 0x100) {
        uint32_t n = code_point - 0x100;
        if (n < 33) return (int)n;
        if (n < 67) return (int)(127 + n - 33);
        return n == 67 ? 173 : -1;
    }
    bool printable = (code_point >= 33 && code_point <= 126) ||
                     (code_point >= 161 && code_point <= 255 && code_point != 173);
    return printable ? (int)code_point : -1;
}

static bd_status strip_one(bd_load *load, const cJSON *object) {
    const char *where = "decoder", *content;
    const cJSON *start = bd_load_member(object, "start"), *stop = bd_load_member(object, "stop");
    size_t step = 0;
    bd_status s = bd_load_string(load, object, where, "content", &content);
    if (s != BD_OK) return s;
    if (!cJSON_IsNumber(start) || start->valuedouble < 0 || start->valuedouble > 65535 ||
        !cJSON_IsNumber(stop) || content[0] == '\0')
        return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: Strip needs content, start, stop",
                       where);
    if (stop->valuedouble < 0 || stop->valuedouble > 0)
        return bd_load_unsupported(load, where, "Strip with", "stop");
    load->tokenizer->decoder.strip_char = bd_utf8_get((const uint8_t *)content, &step);
    load->tokenizer->decoder.strip_count = (uint32_t)start->valuedouble;
    if (content[step] != '\0')
        return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: Strip takes one character", where);
    return BD_OK;
}

static bd_status replace_one(bd_load *load, const cJSON *object, decoder_parts *parts) {
    const char *where = "decoder";
    bool regex;
    if (parts->replace_count == BD_STEPS_MAX)
        return bd_fail(load->err, BD_E_LIMIT, load->name, "%s: too many parts", where);
    text_replace *replace = &parts->replaces[parts->replace_count++];
    bd_status s = bd_load_pattern(load, object, where, &replace->pattern, &regex);
    if (s != BD_OK) return s;
    if (regex) return bd_load_unsupported(load, where, "Replace by", "Regex");
    return bd_load_string(load, object, where, "content", &replace->content);
}

/* Parts must come as Replace..., ByteFallback, Fuse, Strip, any of them left out, or be ByteLevel.
 */
static bd_status decoder_one(bd_load *load, const cJSON *object, decoder_parts *parts) {
    const char *where = "decoder", *type;
    bd_status s = bd_load_type(load, object, where, &type);
    if (s != BD_OK) return s;
    bool first = !parts->byte_level && !parts->byte_fallback && !parts->fused;
    if (!strcmp(type, "Fuse") && !parts->stripped) {
        parts->fused = true;
        return BD_OK;
    }
    if (!strcmp(type, "ByteLevel") && first && parts->replace_count == 0) {
        parts->byte_level = true;
        return BD_OK;
    }
    if (!strcmp(type, "ByteFallback") && first) {
        parts->byte_fallback = true;
        return BD_OK;
    }
    if (!strcmp(type, "Replace") && first) return replace_one(load, object, parts);
    if (!strcmp(type, "Strip") && parts->fused && !parts->byte_level && !parts->stripped) {
        parts->stripped = true;
        return strip_one(load, object);
    }
    return bd_load_unsupported(load, where, "at this place, type", type);
}

static bd_status read_parts(bd_load *load, const cJSON *object, decoder_parts *parts) {
    const char *type;
    const cJSON *list, *item;
    bd_status s = bd_load_type(load, object, "decoder", &type);
    if (s != BD_OK) return s;
    if (strcmp(type, "Sequence") != 0) return decoder_one(load, object, parts);
    if ((s = bd_load_array(load, object, "decoder", "decoders", &list)) != BD_OK) return s;
    cJSON_ArrayForEach(item, list) {
        if ((s = decoder_one(load, item, parts)) != BD_OK) return s;
    }
    return BD_OK;
}

/* A token with any character outside ByteLevel's alphabet stands for its own UTF-8. */
static void append_byte_level(const char *text, size_t bytes, bd_strbuf *out) {
    size_t start = out->len_bytes, step;
    for (size_t at = 0; at < bytes; at += step) {
        int byte = bd_byte_level_byte(bd_utf8_get((const uint8_t *)text + at, &step));
        if (byte < 0) {
            out->len_bytes = start;
            bd_strbuf_append(out, text, bytes);
            return;
        }
        uint8_t one = (uint8_t)byte;
        bd_strbuf_append(out, &one, 1);
    }
}

static void append_replaced(const decoder_parts *parts, const char *text, size_t bytes,
                            bd_strbuf *out, bd_strbuf *spare) {
    bd_strbuf_clear(out);
    bd_strbuf_append(out, text, bytes);
    for (uint32_t i = 0; i < parts->replace_count && !out->failed && !spare->failed; i++) {
        const char *pattern = parts->replaces[i].pattern, *at = out->data, *hit;
        bd_strbuf_clear(spare);
        while ((hit = strstr(at, pattern)) != NULL) {
            bd_strbuf_append(spare, at, (size_t)(hit - at));
            bd_strbuf_puts(spare, parts->replaces[i].content);
            at = hit + strlen(pattern);
        }
        bd_strbuf_puts(spare, at);
        bd_strbuf swap = *out;
        *out = *spare;
        *spare = swap;
    }
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The byte of "<0xNN>", else -1. */
static int fallback_byte(const char *text, size_t bytes) {
    if (bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    int high = text[3] == '+' ? 0 : hex_digit(text[3]); /* the library's parser takes a sign */
    int low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* Replaces and byte tokens; what is left for decoding is to join them. */
static bd_status append_text(bd_load *load, const decoder_parts *parts, uint32_t id, bd_strbuf *out,
                             bd_strbuf work[2]) {
    size_t bytes;
    const char *text = bd_strtab_get(&load->tokenizer->content, id, &bytes);
    append_replaced(parts, text, bytes, &work[0], &work[1]);
    if (work[0].failed || work[1].failed) return BD_E_MEMORY;
    int byte = parts->byte_fallback ? fallback_byte(work[0].data, work[0].len_bytes) : -1;
    if (byte < 0) {
        bd_strbuf_append(out, work[0].data, work[0].len_bytes);
        return BD_OK;
    }
    uint8_t one = (uint8_t)byte;
    bd_strbuf_append(out, &one, 1);
    load->tokenizer->flags[id] |= BD_TOKEN_BYTE;
    return BD_OK;
}

static bd_status build_bytes(bd_load *load, const decoder_parts *parts) {
    bd_tokenizer *t = load->tokenizer;
    bd_strbuf out, work[2];
    bd_strbuf_init(&out, DECODED_BYTES_MAX);
    bd_strbuf_init(&work[0], DECODED_BYTES_MAX);
    bd_strbuf_init(&work[1], DECODED_BYTES_MAX);
    bd_strbuf_append(&out, "", 0); /* data is never NULL, even without any text */
    t->bytes.offsets = calloc((size_t)t->id_count + 1, sizeof *t->bytes.offsets);
    bd_status s = t->bytes.offsets ? BD_OK : BD_E_MEMORY;
    for (uint32_t id = 0; id < t->id_count && s == BD_OK; id++) {
        size_t bytes;
        const char *text = bd_strtab_get(&t->content, id, &bytes);
        if (parts->byte_level)
            append_byte_level(text, bytes, &out);
        else
            s = append_text(load, parts, id, &out, work);
        if (s == BD_OK) t->bytes.offsets[id + 1] = (uint32_t)out.len_bytes;
    }
    if (out.failed) s = BD_E_MEMORY;
    bd_strbuf_deinit(&work[0]);
    bd_strbuf_deinit(&work[1]);
    t->bytes.blob = out.data; /* ours from here on */
    return s == BD_OK ? BD_OK : bd_load_memory(load);
}

bd_status bd_load_decoder(bd_load *load, const cJSON *object) {
    bd_decoder *decoder = &load->tokenizer->decoder;
    decoder_parts parts = {.byte_level = false};
    if (object) {
        bd_status s = read_parts(load, object, &parts);
        if (s != BD_OK) return s;
    }
    decoder->byte_fallback = parts.byte_fallback;
    decoder->kind = !object            ? BD_DECODER_SPACED
                    : parts.byte_level ? BD_DECODER_BYTES
                                       : BD_DECODER_TEXT;
    if (load->tokenizer->bpe.byte_level && !parts.byte_level)
        return bd_fail(load->err, BD_E_UNSUPPORTED, load->name,
                       "a ByteLevel pre_tokenizer without a ByteLevel decoder is not supported");
    return build_bytes(load, &parts);
}
