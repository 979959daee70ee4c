/* split.c - the split patterns of the common byte-level vocabularies, matched by hand, and PCRE2
 * for any other. By hand because PCRE2's Unicode tables are older than the reference's, and for
 * speed. Threads: any; a bd_pattern_match belongs to one encode call. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <stdio.h>
#include <string.h>

#include "internal.h"
#include "unicode.h"

/* Work allowed for one match attempt; a sane pattern needs a few steps per character of a word. */
#define PATTERN_MATCH_STEPS_MAX 10000000u
#define PATTERN_HEAP_KIB_MAX    16384u

static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
static const char llama3_pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
static const char qwen2_pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

bd_split_kind bd_split_kind_of(const char *pattern) {
    if (!strcmp(pattern, gpt2_pattern)) return BD_SPLIT_GPT2;
    if (!strcmp(pattern, llama3_pattern)) return BD_SPLIT_LLAMA3;
    if (!strcmp(pattern, qwen2_pattern)) return BD_SPLIT_QWEN2;
    return BD_SPLIT_PCRE2;
}

static inline uint8_t class_at(const uint8_t *text, size_t pos, size_t *bytes) {
    return bd_unicode_class(bd_utf8_get(text + pos, bytes));
}

/* End of the longest run of characters of exactly this class from pos on. */
static size_t run_end(const uint8_t *text, size_t bytes, size_t pos, uint8_t wanted) {
    size_t step;
    while (pos < bytes && class_at(text, pos, &step) == wanted)
        pos += step;
    return pos;
}

/* 's|'t|'re|'ve|'m|'ll|'d with the apostrophe at pos; 0: none. */
static size_t contraction_end(const uint8_t *text, size_t bytes, size_t pos, bool any_case) {
    if (pos + 1 >= bytes) return 0;
    uint8_t fold = any_case ? 0x20 : 0;
    uint8_t a = text[pos + 1] | fold, b = pos + 2 < bytes ? text[pos + 2] | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return pos + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return pos + 3;
    /* U+017F, the long s, is an s to a caseless match. */
    if (any_case && pos + 2 < bytes && text[pos + 1] == 0xc5 && text[pos + 2] == 0xbf)
        return pos + 3;
    return 0;
}

/* \s+(?!\S)|\s+ with a space at pos: the whole run at the end of the text, else all but its last.
 */
static size_t spaces_end(const uint8_t *text, size_t bytes, size_t pos, size_t run) {
    if (run == bytes) return run;
    size_t last = bd_utf8_before(text, run);
    return last > pos ? last : run;
}

static size_t gpt2_end(const uint8_t *text, size_t bytes, size_t pos) {
    size_t step, after;
    if (text[pos] == '\'' && (after = contraction_end(text, bytes, pos, false)) != 0) return after;
    size_t body = pos;
    if (text[pos] == ' ' && pos + 1 < bytes) body = pos + 1;
    uint8_t class = class_at(text, body, &step);
    if (class != BD_CLASS_SPACE) return run_end(text, bytes, body + step, class);
    return spaces_end(text, bytes, pos, run_end(text, bytes, pos, BD_CLASS_SPACE));
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ with a space at pos. */
static size_t lines_or_spaces_end(const uint8_t *text, size_t bytes, size_t pos) {
    size_t run = pos, newline_end = 0, step;
    while (run < bytes && class_at(text, run, &step) == BD_CLASS_SPACE) {
        if (text[run] == '\n' || text[run] == '\r') newline_end = run + 1;
        run += step;
    }
    return newline_end ? newline_end : spaces_end(text, bytes, pos, run);
}

static size_t numbers_end(const uint8_t *text, size_t bytes, size_t pos, uint32_t count_max) {
    size_t step;
    for (uint32_t i = 0; i < count_max && pos < bytes; i++) {
        if (class_at(text, pos, &step) != BD_CLASS_NUMBER) break;
        pos += step;
    }
    return pos;
}

static size_t llama3_end(const uint8_t *text, size_t bytes, size_t pos, uint32_t digits_max) {
    size_t step, next_step = 0, after;
    if (text[pos] == '\'' && (after = contraction_end(text, bytes, pos, true)) != 0) return after;
    uint8_t class = class_at(text, pos, &step);
    if (class == BD_CLASS_LETTER) return run_end(text, bytes, pos + step, BD_CLASS_LETTER);
    if (class == BD_CLASS_NUMBER) return numbers_end(text, bytes, pos, digits_max);
    size_t next = pos + step;
    bool newline = text[pos] == '\n' || text[pos] == '\r';
    uint8_t next_class = next < bytes ? class_at(text, next, &next_step) : BD_CLASS_SPACE;
    if (!newline && next_class == BD_CLASS_LETTER)
        return run_end(text, bytes, next + next_step, BD_CLASS_LETTER);
    if (class == 0 || (text[pos] == ' ' && next_class == 0)) {
        after = run_end(text, bytes, next, 0);
        while (after < bytes && (text[after] == '\n' || text[after] == '\r'))
            after++;
        return after;
    }
    return lines_or_spaces_end(text, bytes, pos);
}

static size_t digits_end(const uint8_t *text, size_t bytes, size_t pos, bool alone) {
    size_t end = numbers_end(text, bytes, pos, alone ? 1 : UINT32_MAX), step;
    if (end > pos) return end;
    while (end < bytes && class_at(text, end, &step) != BD_CLASS_NUMBER)
        end += step;
    return end;
}

size_t bd_split_end(bd_split_kind kind, const uint8_t *text, size_t bytes, size_t pos) {
    if (kind == BD_SPLIT_GPT2) return gpt2_end(text, bytes, pos);
    if (kind == BD_SPLIT_DIGIT || kind == BD_SPLIT_DIGITS)
        return digits_end(text, bytes, pos, kind == BD_SPLIT_DIGIT);
    return llama3_end(text, bytes, pos, kind == BD_SPLIT_LLAMA3 ? 3 : 1);
}

/* The reference's engine is Oniguruma. Where the same text means something else to PCRE2: \s has
 * U+180E here and gets its property's name instead; \h and && are refused. false: refused. */
static bool pattern_translate(const char *pattern, bd_strbuf *out) {
    for (const char *p = pattern; *p; p++) {
        if (p[0] == '&' && p[1] == '&') return false;
        if (p[0] != '\\' || p[1] == '\0') {
            bd_strbuf_append(out, p, 1);
            continue;
        }
        p++;
        if (*p == 'h' || *p == 'H') return false;
        if (*p == 's' || *p == 'S')
            bd_strbuf_puts(out, *p == 's' ? "\\p{White_Space}" : "\\P{White_Space}");
        else
            bd_strbuf_append(out, p - 1, 2);
    }
    return true;
}

static bd_status pattern_compile(void **code, const char *pattern, uint32_t options,
                                 char message[128]) {
    int number;
    PCRE2_SIZE offset;
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options, &number, &offset, NULL);
    if (!compiled) {
        PCRE2_UCHAR text[96];
        pcre2_get_error_message(number, text, sizeof text);
        snprintf(message, 128, "%s", (const char *)text);
        return number == PCRE2_ERROR_HEAP_FAILED ? BD_E_MEMORY : BD_E_UNSUPPORTED;
    }
    /* Without JIT (not built in, or executable memory refused) the interpreter does the same. */
    (void)pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
    *code = compiled;
    return BD_OK;
}

bd_status bd_pattern_compile(void **code, const char *pattern, bool literal, char message[128]) {
    if (literal) return pattern_compile(code, pattern, PCRE2_UTF | PCRE2_LITERAL, message);
    bd_strbuf translated;
    bd_strbuf_init(&translated, 0);
    bd_strbuf_puts(&translated, "");
    bd_status s = BD_E_UNSUPPORTED;
    if (!pattern_translate(pattern, &translated))
        snprintf(message, 128, "it has \\h, \\H or &&");
    else if (translated.failed)
        s = BD_E_MEMORY;
    else
        s = pattern_compile(code, translated.data, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                            message);
    bd_strbuf_deinit(&translated);
    return s;
}

void bd_pattern_destroy(void *code) {
    pcre2_code_free(code);
}

static bd_status pattern_match_init(bd_pattern_match *match) {
    pcre2_match_context *context = pcre2_match_context_create(NULL);
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    if (!context || !data) {
        pcre2_match_context_free(context);
        pcre2_match_data_free(data);
        return BD_E_MEMORY;
    }
    pcre2_set_match_limit(context, PATTERN_MATCH_STEPS_MAX);
    pcre2_set_heap_limit(context, PATTERN_HEAP_KIB_MAX);
    match->context = context;
    match->data = data;
    return BD_OK;
}

bd_status bd_pattern_next(const void *code, bd_pattern_match *match, const uint8_t *text,
                          size_t bytes, size_t *start, size_t *end) {
    if (!match->data && pattern_match_init(match) != BD_OK) return BD_E_MEMORY;
    size_t from = *start, step;
    while (from < bytes) {
        int found =
            pcre2_match(code, text, bytes, from, PCRE2_NO_UTF_CHECK, match->data, match->context);
        if (found == PCRE2_ERROR_NOMATCH) return BD_AGAIN;
        if (found == PCRE2_ERROR_NOMEMORY) return BD_E_MEMORY;
        if (found < 0) return BD_E_LIMIT;
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match->data);
        /* \K in a lookahead can put the start behind the end; such a match is as good as empty. */
        if (range[1] > range[0] && range[0] >= from) {
            *start = range[0];
            *end = range[1];
            return BD_OK;
        }
        (void)bd_utf8_get(text + from, &step);
        from += step;
    }
    return BD_AGAIN;
}

void bd_pattern_match_deinit(bd_pattern_match *match) {
    pcre2_match_context_free(match->context);
    pcre2_match_data_free(match->data);
    *match = (bd_pattern_match){0};
}
