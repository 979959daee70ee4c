/* chat_lexer.c - template source to tokens, with Jinja's rules for white space around tags
 * (trim_blocks and lstrip_blocks on). Threads: any. */
#include <stdio.h>
#include <stdlib.h>

#include "chat_internal.h"

bool bd_chat_lex_fail(bd_chat_lexer *lexer, uint32_t line, bd_status status, const char *format,
                      ...) {
    char message[320];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    lexer->status = bd_fail(lexer->err, status, lexer->subject, "line %u: %s", line, message);
    return false;
}

static bool out_of_memory(bd_chat_lexer *lexer) {
    lexer->status = bd_fail(lexer->err, BD_E_MEMORY, lexer->subject, "out of memory");
    return false;
}

static void move_to(bd_chat_lexer *lexer, const char *to) {
    for (; lexer->at < to; lexer->at++)
        if (*lexer->at == '\n') lexer->line++;
}

static const char *skip_space(const char *at, const char *end) {
    while (at < end) {
        size_t length;
        if (!bd_chat_is_space(bd_chat_code_at(at, (size_t)(end - at), &length))) break;
        at += length;
    }
    return at;
}

static bool starts(const char *at, const char *end, const char *text) {
    size_t bytes = strlen(text);
    return (size_t)(end - at) >= bytes && memcmp(at, text, bytes) == 0;
}

/* ---- Text between tags ---- */

/* `at` is behind "{%": white space, the word, white space and an end follow. Returns what comes
 * after, or NULL. trim: a line end after a plain "%}" belongs to it. */
static const char *match_word_tag(const char *at, const char *end, const char *word, bool trim) {
    if (at < end && (*at == '-' || *at == '+')) at++;
    at = skip_space(at, end);
    if (!starts(at, end, word)) return NULL;
    at = skip_space(at + strlen(word), end);
    if (starts(at, end, "-%}")) return skip_space(at + 3, end);
    if (trim && starts(at, end, "+%}")) return at + 3;
    if (!starts(at, end, "%}")) return NULL;
    at += 2;
    return trim && at < end && *at == '\n' ? at + 1 : at;
}

static const char *find_tag(const bd_chat_lexer *lexer, bd_chat_tag *tag) {
    for (const char *at = lexer->at; at + 1 < lexer->end; at++) {
        if (*at != '{') continue;
        *tag = at[1] == '{'   ? BD_CHAT_TAG_VARIABLE
               : at[1] == '%' ? BD_CHAT_TAG_BLOCK
               : at[1] == '#' ? BD_CHAT_TAG_COMMENT
                              : BD_CHAT_TAG_NONE;
        if (*tag != BD_CHAT_TAG_NONE) return at;
    }
    return NULL;
}

/* End of the text [from, tag) once the tag's sign and lstrip_blocks have had their part of it. */
static const char *strip_before(const bd_chat_lexer *lexer, const char *from, const char *tag,
                                bool is_variable) {
    char sign = tag + 2 < lexer->end ? tag[2] : ' ';
    bd_chat_value text = bd_chat_text(from, (size_t)(tag - from));
    if (sign == '-') return from + bd_chat_strip(text, NULL, false, true).bytes;
    if (sign == '+' || is_variable) return tag;
    const char *line = tag;
    while (line > from && line[-1] != '\n')
        line--;
    bool line_starting = from == lexer->begin || from[-1] == '\n';
    if (line == from && !line_starting) return tag;
    return skip_space(line, tag) == tag ? line : tag;
}

static void give_data(const bd_chat_lexer *lexer, const char *from, const char *to,
                      bd_chat_token *token) {
    *token = (bd_chat_token){
        .kind = BD_CHAT_T_DATA, .line = lexer->line, .text = from, .bytes = (size_t)(to - from)};
}

static bool skip_comment(bd_chat_lexer *lexer) {
    const char *from = lexer->at;
    const char *close = bd_chat_search(from, (size_t)(lexer->end - from), "#}", 2);
    if (!close) return bd_chat_lex_fail(lexer, lexer->line, BD_E_FORMAT, "a comment does not end");
    char sign = close > from ? close[-1] : ' ';
    const char *next = close + 2;
    if (sign == '-')
        next = skip_space(next, lexer->end);
    else if (sign != '+' && next < lexer->end && *next == '\n')
        next++;
    move_to(lexer, next);
    return true;
}

/* Text of {% raw %}; *given: token has some. */
static bool raw_text(bd_chat_lexer *lexer, bd_chat_token *token, bool *given) {
    const char *from = lexer->at, *next = NULL, *at = from;
    for (; at + 1 < lexer->end && !next; at++)
        if (at[0] == '{' && at[1] == '%') next = match_word_tag(at + 2, lexer->end, "endraw", true);
    if (!next) return bd_chat_lex_fail(lexer, lexer->line, BD_E_FORMAT, "{%% raw %%} does not end");
    const char *to = strip_before(lexer, from, at - 1, false);
    give_data(lexer, from, to, token);
    *given = to > from;
    move_to(lexer, next);
    return true;
}

/* What the text before `at` ended with. *given: token has been filled. */
static bool open_tag(bd_chat_lexer *lexer, bd_chat_token *token, bool *given) {
    bd_chat_tag tag = lexer->pending;
    lexer->pending = BD_CHAT_TAG_NONE;
    *given = false;
    switch (tag) {
    case BD_CHAT_TAG_COMMENT:
        return skip_comment(lexer);
    case BD_CHAT_TAG_RAW:
        return raw_text(lexer, token, given);
    case BD_CHAT_TAG_BLOCK:
    case BD_CHAT_TAG_VARIABLE:
        *given = true;
        lexer->mode = tag == BD_CHAT_TAG_BLOCK ? BD_CHAT_M_BLOCK : BD_CHAT_M_VARIABLE;
        *token = (bd_chat_token){.kind = tag == BD_CHAT_TAG_BLOCK ? BD_CHAT_T_BLOCK_BEGIN
                                                                  : BD_CHAT_T_VARIABLE_BEGIN,
                                 .line = lexer->line};
        return true;
    case BD_CHAT_TAG_NONE:
        break;
    }
    return true;
}

static bool lex_text(bd_chat_lexer *lexer, bd_chat_token *token) {
    for (;;) {
        bool given;
        if (!open_tag(lexer, token, &given)) return false;
        if (given) return true;
        const char *from = lexer->at;
        if (from >= lexer->end) {
            *token = (bd_chat_token){.kind = BD_CHAT_T_END, .line = lexer->line};
            return true;
        }
        bd_chat_tag tag = BD_CHAT_TAG_NONE;
        const char *at = find_tag(lexer, &tag);
        if (!at) {
            give_data(lexer, from, lexer->end, token);
            move_to(lexer, lexer->end);
            return true;
        }
        const char *to = strip_before(lexer, from, at, tag == BD_CHAT_TAG_VARIABLE);
        give_data(lexer, from, to, token);
        const char *next = at + 2;
        if (next < lexer->end && (*next == '-' || *next == '+')) next++;
        if (tag == BD_CHAT_TAG_BLOCK) {
            const char *raw = match_word_tag(at + 2, lexer->end, "raw", false);
            if (raw) {
                tag = BD_CHAT_TAG_RAW;
                next = raw;
            }
        }
        move_to(lexer, next);
        lexer->pending = tag;
        if (to > from) return true;
    }
}

/* ---- Inside tags ---- */

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c);
}

/* Digits, single underscores between them. */
static const char *skip_digits(const char *at, const char *end) {
    while (at < end &&
           (is_digit(*at) || (*at == '_' && at + 1 < end && is_digit(at[1]) && is_digit(at[-1]))))
        at++;
    return at;
}

static const char *match_float(const char *from, const char *end) {
    const char *at = skip_digits(from, end);
    bool fraction = at + 1 < end && *at == '.' && is_digit(at[1]);
    if (fraction) at = skip_digits(at + 1, end);
    const char *exponent = at;
    if (exponent < end && (*exponent == 'e' || *exponent == 'E')) {
        exponent++;
        if (exponent < end && (*exponent == '+' || *exponent == '-')) exponent++;
        if (exponent < end && is_digit(*exponent)) return skip_digits(exponent, end);
    }
    return fraction ? at : NULL;
}

/* Copies the digits without underscores. */
static bool copy_number(bd_chat_lexer *lexer, const bd_chat_token *token, char out[64]) {
    size_t count = 0;
    for (size_t i = 0; i < token->bytes; i++) {
        if (token->text[i] == '_') continue;
        if (count == 63)
            return bd_chat_lex_fail(lexer, lexer->line, BD_E_LIMIT, "a number is too long");
        out[count++] = token->text[i];
    }
    out[count] = '\0';
    return true;
}

static bool lex_number(bd_chat_lexer *lexer, bd_chat_token *token) {
    const char *from = lexer->at, *end = lexer->end;
    const char *to = from > lexer->begin && from[-1] == '.' ? NULL : match_float(from, end);
    char digits[64];
    token->text = from;
    if (to) {
        token->kind = BD_CHAT_T_FLOAT;
        token->bytes = (size_t)(to - from);
        if (!copy_number(lexer, token, digits)) return false;
        token->value = bd_chat_float(strtod(digits, NULL));
        move_to(lexer, to);
        return true;
    }
    to = skip_digits(from, end);
    if (*from == '0' && from + 1 < end && (is_word(from[1]) && from[1] != '0'))
        return bd_chat_lex_fail(lexer, lexer->line, BD_E_UNSUPPORTED,
                                "a number that starts with 0 is not supported");
    token->kind = BD_CHAT_T_INT;
    token->bytes = (size_t)(to - from);
    if (!copy_number(lexer, token, digits)) return false;
    int64_t value = 0;
    for (const char *at = digits; *at; at++)
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, *at - '0', &value))
            return bd_chat_lex_fail(lexer, lexer->line, BD_E_LIMIT,
                                    "a number has more than 64 bits");
    token->value = bd_chat_int(value);
    move_to(lexer, to);
    return true;
}

static int hex_value(char c) {
    if (is_digit(c)) return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* \x, \u, \U: `digits` hexadecimal digits follow *at. */
static bool read_hex(bd_chat_lexer *lexer, const char **at, const char *end, int digits,
                     uint32_t *code) {
    *code = 0;
    for (int i = 0; i < digits; i++, (*at)++) {
        int value = *at < end ? hex_value(**at) : -1;
        if (value < 0)
            return bd_chat_lex_fail(lexer, lexer->line, BD_E_FORMAT, "a bad escape in a string");
        *code = *code << 4 | (uint32_t)value;
    }
    if (*code > 0x10FFFF || (*code >= 0xD800 && *code < 0xE000))
        return bd_chat_lex_fail(lexer, lexer->line, BD_E_UNSUPPORTED,
                                "an escape in a string is no character");
    return true;
}

static uint32_t read_octal(const char **at, const char *end) {
    uint32_t code = 0;
    for (int i = 0; i < 3 && *at < end && **at >= '0' && **at <= '7'; i++, (*at)++)
        code = code * 8 + (uint32_t)(**at - '0');
    return code;
}

/* One escape; *at is behind the backslash. Writes at most 4 bytes, fewer than the source has. */
static bool unescape(bd_chat_lexer *lexer, const char **at, const char *end, char *out,
                     size_t *count) {
    static const char letters[] = "abfnrtv'\"\\", values[] = "\a\b\f\n\r\t\v'\"\\";
    char c = **at;
    uint32_t code;
    const char *letter = strchr(letters, c);
    if (c != '\0' && letter) {
        (*at)++;
        out[(*count)++] = values[letter - letters];
        return true;
    }
    if (c == '\n') {
        (*at)++;
        return true;
    }
    if ((unsigned char)c >= 0x80 || c == 'N')
        return bd_chat_lex_fail(lexer, lexer->line, BD_E_UNSUPPORTED,
                                "an escape in a string is not supported");
    if (c >= '0' && c <= '7') {
        code = read_octal(at, end);
    } else if (c == 'x' || c == 'u' || c == 'U') {
        (*at)++;
        if (!read_hex(lexer, at, end, c == 'x' ? 2 : c == 'u' ? 4 : 8, &code)) return false;
    } else { /* the backslash stays */
        out[(*count)++] = '\\';
        out[(*count)++] = c;
        (*at)++;
        return true;
    }
    *count += bd_chat_put_code(code, out + *count);
    return true;
}

static bool lex_string(bd_chat_lexer *lexer, bd_chat_token *token) {
    const char *from = lexer->at + 1, *close = from;
    char quote = *lexer->at;
    while (close < lexer->end && *close != quote)
        close += *close == '\\' ? 2 : 1;
    if (close >= lexer->end)
        return bd_chat_lex_fail(lexer, lexer->line, BD_E_FORMAT, "a string does not end");
    char *out = bd_arena_alloc(lexer->arena, (size_t)(close - from) + 1, 1);
    if (!out) return out_of_memory(lexer);
    size_t count = 0;
    for (const char *at = from; at < close;) {
        if (*at != '\\') {
            out[count++] = *at++;
            continue;
        }
        at++;
        if (!unescape(lexer, &at, close, out, &count)) return false;
    }
    token->kind = BD_CHAT_T_STRING;
    token->text = from;
    token->bytes = (size_t)(close - from);
    token->value = bd_chat_text(out, count);
    move_to(lexer, close + 1);
    return true;
}

static bool balance(bd_chat_lexer *lexer, char c) {
    static const char opening[] = "([{", closing[] = ")]}";
    const char *open = strchr(opening, c), *close = strchr(closing, c);
    if (open) {
        if (lexer->open_count == BD_CHAT_DEPTH_MAX)
            return bd_chat_lex_fail(lexer, lexer->line, BD_E_LIMIT,
                                    "brackets are nested too deeply");
        lexer->open[lexer->open_count++] = closing[open - opening];
    } else if (close) {
        if (lexer->open_count == 0 || lexer->open[--lexer->open_count] != c)
            return bd_chat_lex_fail(lexer, lexer->line, BD_E_FORMAT, "unexpected '%c'", c);
    }
    return true;
}

static bool lex_operator(bd_chat_lexer *lexer, bd_chat_token *token) {
    static const char *const operators[] = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "/",
                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++) {
        if (!starts(lexer->at, lexer->end, operators[i])) continue;
        token->kind = BD_CHAT_T_OPERATOR;
        token->text = operators[i];
        token->bytes = strlen(operators[i]);
        if (!balance(lexer, operators[i][0])) return false;
        move_to(lexer, lexer->at + token->bytes);
        return true;
    }
    return bd_chat_lex_fail(lexer, lexer->line, BD_E_FORMAT, "unexpected character 0x%02x",
                            (unsigned)(unsigned char)*lexer->at);
}

/* "%}", "}}" and their signed forms; false: another token is here. */
static bool lex_end(bd_chat_lexer *lexer, bd_chat_token *token) {
    bool block = lexer->mode == BD_CHAT_M_BLOCK;
    const char *plain = block ? "%}" : "}}", *at = lexer->at, *end = lexer->end, *next;
    if (lexer->open_count > 0) return false;
    if (at < end && *at == '-' && starts(at + 1, end, plain))
        next = skip_space(at + 3, end);
    else if (block && at < end && *at == '+' && starts(at + 1, end, plain))
        next = at + 3;
    else if (!starts(at, end, plain))
        return false;
    else
        next = block && at + 2 < end && at[2] == '\n' ? at + 3 : at + 2;
    token->kind = block ? BD_CHAT_T_BLOCK_END : BD_CHAT_T_VARIABLE_END;
    lexer->mode = BD_CHAT_M_DATA;
    move_to(lexer, next);
    return true;
}

bool bd_chat_lex(bd_chat_lexer *lexer, bd_chat_token *token) {
    if (lexer->mode == BD_CHAT_M_DATA) return lex_text(lexer, token);
    *token = (bd_chat_token){.kind = BD_CHAT_T_END, .line = lexer->line};
    if (lex_end(lexer, token)) return true;
    move_to(lexer, skip_space(lexer->at, lexer->end));
    token->line = lexer->line;
    if (lex_end(lexer, token) || lexer->at >= lexer->end) return true;
    char c = *lexer->at;
    if (is_digit(c)) return lex_number(lexer, token);
    if (c == '\'' || c == '"') return lex_string(lexer, token);
    if (!is_word(c)) return lex_operator(lexer, token);
    const char *to = lexer->at;
    while (to < lexer->end && is_word(*to))
        to++;
    token->kind = BD_CHAT_T_NAME;
    token->text = lexer->at;
    token->bytes = (size_t)(to - lexer->at);
    move_to(lexer, to);
    return true;
}
