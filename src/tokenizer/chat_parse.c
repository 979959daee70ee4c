/* chat_parse.c - statements of a template, and what both halves of the parser share. Recursion is
 * bounded by parser->depth, the tree's own depth by bd_chat_make. Threads: any. */
#include <stdio.h>

#include "chat_internal.h"

/* ---- Shared ---- */

bool bd_chat_advance(bd_chat_parser *parser) {
    if (!parser->has_ahead) return bd_chat_lex(&parser->lexer, &parser->token);
    parser->token = parser->ahead;
    parser->has_ahead = false;
    return true;
}

bool bd_chat_peek(bd_chat_parser *parser, const bd_chat_token **token) {
    if (!parser->has_ahead && !bd_chat_lex(&parser->lexer, &parser->ahead)) return false;
    parser->has_ahead = true;
    *token = &parser->ahead;
    return true;
}

bool bd_chat_is_op(const bd_chat_token *token, const char *text) {
    return token->kind == BD_CHAT_T_OPERATOR && token->bytes == strlen(text) &&
           memcmp(token->text, text, token->bytes) == 0;
}

bool bd_chat_is_name(const bd_chat_token *token, const char *text) {
    return token->kind == BD_CHAT_T_NAME && token->bytes == strlen(text) &&
           memcmp(token->text, text, token->bytes) == 0;
}

bool bd_chat_syntax(bd_chat_parser *parser, const char *expected) {
    static const char *const kinds[] = {
        [BD_CHAT_T_END] = "the end of the template",
        [BD_CHAT_T_DATA] = "text",
        [BD_CHAT_T_BLOCK_BEGIN] = "a statement",
        [BD_CHAT_T_BLOCK_END] = "the end of the statement",
        [BD_CHAT_T_VARIABLE_BEGIN] = "an expression",
        [BD_CHAT_T_VARIABLE_END] = "the end of the expression",
        [BD_CHAT_T_STRING] = "a string",
    };
    const bd_chat_token *token = &parser->token;
    if (token->kind == BD_CHAT_T_NAME || token->kind == BD_CHAT_T_OPERATOR ||
        token->kind == BD_CHAT_T_INT || token->kind == BD_CHAT_T_FLOAT)
        return bd_chat_lex_fail(&parser->lexer, token->line, BD_E_FORMAT, "expected %s, got '%.*s'",
                                expected, token->bytes > 60 ? 60 : (int)token->bytes, token->text);
    return bd_chat_lex_fail(&parser->lexer, token->line, BD_E_FORMAT, "expected %s, got %s",
                            expected, kinds[token->kind]);
}

bool bd_chat_refuse(bd_chat_parser *parser, uint32_t line, const char *what, const char *name,
                    size_t bytes) {
    return bd_chat_lex_fail(&parser->lexer, line, BD_E_UNSUPPORTED, "%s '%.*s' is not supported",
                            what, bytes > 60 ? 60 : (int)bytes, name);
}

bool bd_chat_expect_op(bd_chat_parser *parser, const char *text) {
    char expected[8];
    if (bd_chat_is_op(&parser->token, text)) return bd_chat_advance(parser);
    (void)snprintf(expected, sizeof expected, "'%s'", text);
    return bd_chat_syntax(parser, expected);
}

static bool out_of_memory(bd_chat_parser *parser) {
    return bd_chat_lex_fail(&parser->lexer, parser->token.line, BD_E_MEMORY, "out of memory");
}

static bool enter(bd_chat_parser *parser) {
    if (++parser->depth <= BD_CHAT_DEPTH_MAX) return true;
    return bd_chat_lex_fail(&parser->lexer, parser->token.line, BD_E_LIMIT, "nested too deeply");
}

bool bd_chat_intern(bd_chat_parser *parser, const char *text, size_t bytes, uint32_t *id) {
    bd_chat_template *t = parser->out;
    for (*id = 0; *id < t->name_count; (*id)++)
        if (t->names[*id].bytes == bytes && memcmp(t->names[*id].text, text, bytes) == 0)
            return true;
    if (t->name_count == BD_CHAT_NAMES_MAX)
        return bd_chat_lex_fail(&parser->lexer, parser->token.line, BD_E_LIMIT,
                                "more than %d different names", BD_CHAT_NAMES_MAX);
    if (t->name_count == t->name_cap) {
        uint32_t cap = t->name_cap ? t->name_cap * 2 : 64;
        bd_chat_name *names = bd_arena_alloc(t->arena, cap, sizeof *names);
        if (!names) return out_of_memory(parser);
        if (t->name_count) memcpy(names, t->names, t->name_count * sizeof *names);
        t->names = names;
        t->name_cap = cap;
    }
    char *copy = bd_arena_strndup(t->arena, text, bytes);
    if (!copy) return out_of_memory(parser);
    t->names[t->name_count++] = (bd_chat_name){copy, bytes};
    return true;
}

bool bd_chat_make(bd_chat_parser *parser, bd_chat_op op, bd_chat_node *const *kids, size_t count,
                  bd_chat_node **out) {
    bd_arena *arena = parser->out->arena;
    bd_chat_node *node = bd_arena_alloc(arena, 1, sizeof *node);
    if (node) node->kids = bd_arena_alloc(arena, count, sizeof *node->kids);
    if (!node || !node->kids || count > UINT32_MAX) return out_of_memory(parser);
    node->op = (uint8_t)op;
    node->line = parser->token.line;
    node->count = (uint32_t)count;
    for (size_t i = 0; i < count; i++) {
        node->kids[i] = kids[i];
        if (kids[i] && kids[i]->depth > node->depth) node->depth = kids[i]->depth;
        if (i == 0 && kids[i]) node->line = kids[i]->line;
    }
    if (++node->depth > BD_CHAT_DEPTH_MAX)
        return bd_chat_lex_fail(&parser->lexer, node->line, BD_E_LIMIT, "nested too deeply");
    *out = node;
    return true;
}

bool bd_chat_kids_add(bd_chat_parser *parser, bd_chat_kids *kids, bd_chat_node *kid) {
    if (kids->count == kids->capacity) {
        size_t capacity = kids->capacity ? kids->capacity * 2 : 8;
        bd_chat_node **items = bd_arena_alloc(parser->out->arena, capacity, sizeof(bd_chat_node *));
        if (!items) return out_of_memory(parser);
        if (kids->count) memcpy(items, kids->items, kids->count * sizeof(bd_chat_node *));
        kids->items = items;
        kids->capacity = capacity;
    }
    kids->items[kids->count++] = kid;
    return true;
}

/* ---- Statements ---- */

static bool parse_body(bd_chat_parser *parser, const char *const *ends, bd_chat_node **out);

static bool block_end(bd_chat_parser *parser) {
    if (parser->token.kind == BD_CHAT_T_BLOCK_END) return bd_chat_advance(parser);
    return bd_chat_syntax(parser, "the end of the statement");
}

/* The rest of an opening tag, then statements up to one of the ends, whose name is the token
 * afterwards. */
static bool parse_block(bd_chat_parser *parser, const char *const *ends, bd_chat_node **out) {
    if (bd_chat_is_op(&parser->token, ":") && !bd_chat_advance(parser)) return false;
    return block_end(parser) && parse_body(parser, ends, out);
}

static bool parse_set(bd_chat_parser *parser, bd_chat_node **out) {
    static const char *const ends[] = {"endset", NULL};
    bd_chat_node *kids[3] = {NULL};
    if (!bd_chat_advance(parser) || !bd_chat_parse_target(parser, true, &kids[0])) return false;
    if (bd_chat_is_op(&parser->token, "="))
        return bd_chat_advance(parser) && bd_chat_parse_tuple(parser, true, false, &kids[1]) &&
               bd_chat_make(parser, BD_CHAT_OP_SET, kids, 2, out);
    while (bd_chat_is_op(&parser->token, "|"))
        if (!bd_chat_parse_filter(parser, kids[1], &kids[1])) return false;
    return parse_block(parser, ends, &kids[2]) && bd_chat_advance(parser) &&
           bd_chat_make(parser, BD_CHAT_OP_SET_BODY, kids, 3, out);
}

/* Whether the loop goes over a message's content. */
static bool is_content(const bd_chat_parser *parser, const bd_chat_node *node) {
    while (node->op == BD_CHAT_OP_FILTER && node->kids[0])
        node = node->kids[0];
    if (node->op == BD_CHAT_OP_ITEM && node->kids[1]->op == BD_CHAT_OP_CONST)
        return node->kids[1]->value.kind == BD_CHAT_STRING && node->kids[1]->value.bytes == 7 &&
               memcmp(node->kids[1]->value.text, "content", 7) == 0;
    return (node->op == BD_CHAT_OP_ATTR || node->op == BD_CHAT_OP_NAME) &&
           strcmp(parser->out->names[node->name].text, "content") == 0;
}

static bool parse_for(bd_chat_parser *parser, bd_chat_node **out) {
    static const char *const ends[] = {"endfor", "else", NULL}, *const last[] = {"endfor", NULL};
    bd_chat_node *kids[5] = {NULL};
    if (!bd_chat_advance(parser) || !bd_chat_parse_target(parser, false, &kids[0])) return false;
    if (!bd_chat_is_name(&parser->token, "in")) return bd_chat_syntax(parser, "'in'");
    if (!bd_chat_advance(parser) || !bd_chat_parse_tuple(parser, false, false, &kids[1]))
        return false;
    if (is_content(parser, kids[1])) parser->out->wants_parts = true;
    if (bd_chat_is_name(&parser->token, "if") &&
        (!bd_chat_advance(parser) || !bd_chat_parse_expression(parser, true, &kids[2])))
        return false;
    if (bd_chat_is_name(&parser->token, "recursive"))
        return bd_chat_refuse(parser, parser->token.line, "loop modifier", "recursive", 9);
    parser->loops++;
    bool ok = parse_block(parser, ends, &kids[3]);
    parser->loops--;
    if (!ok) return false;
    bool has_else = bd_chat_is_name(&parser->token, "else");
    if (!bd_chat_advance(parser)) return false;
    if (has_else && (!parse_block(parser, last, &kids[4]) || !bd_chat_advance(parser)))
        return false;
    return bd_chat_make(parser, BD_CHAT_OP_FOR, kids, 5, out);
}

static bool parse_if(bd_chat_parser *parser, bd_chat_node **out) {
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    static const char *const last[] = {"endif", NULL};
    bd_chat_kids kids = {0};
    bd_chat_node *node;
    for (bool again = true; again;) {
        if (!bd_chat_advance(parser) || !bd_chat_parse_tuple(parser, false, false, &node) ||
            !bd_chat_kids_add(parser, &kids, node) || !parse_block(parser, ends, &node) ||
            !bd_chat_kids_add(parser, &kids, node))
            return false;
        again = bd_chat_is_name(&parser->token, "elif");
    }
    if (bd_chat_is_name(&parser->token, "else") &&
        (!bd_chat_advance(parser) || !parse_block(parser, last, &node) ||
         !bd_chat_kids_add(parser, &kids, node)))
        return false;
    return bd_chat_advance(parser) &&
           bd_chat_make(parser, BD_CHAT_OP_IF, kids.items, kids.count, out);
}

/* (a, b=1): names and default values. */
static bool parse_signature(bd_chat_parser *parser, bd_chat_kids *names, bd_chat_kids *defaults) {
    bd_chat_node *node;
    if (!bd_chat_expect_op(parser, "(")) return false;
    while (!bd_chat_is_op(&parser->token, ")")) {
        if (names->count > 0 && !bd_chat_expect_op(parser, ",")) return false;
        if (parser->token.kind != BD_CHAT_T_NAME || names->count == BD_CHAT_ARGUMENTS_MAX)
            return bd_chat_syntax(parser, "a parameter, 16 at most,");
        uint32_t name;
        if (!bd_chat_intern(parser, parser->token.text, parser->token.bytes, &name) ||
            !bd_chat_make(parser, BD_CHAT_OP_NAME, NULL, 0, &node))
            return false;
        node->name = name;
        if (!bd_chat_advance(parser) || !bd_chat_kids_add(parser, names, node)) return false;
        if (bd_chat_is_op(&parser->token, "=")) {
            if (!bd_chat_advance(parser) || !bd_chat_parse_expression(parser, true, &node) ||
                !bd_chat_kids_add(parser, defaults, node))
                return false;
        } else if (defaults->count > 0) {
            return bd_chat_syntax(parser, "a default value");
        }
    }
    return bd_chat_advance(parser);
}

static bool parse_macro(bd_chat_parser *parser, bd_chat_node **out) {
    static const char *const ends[] = {"endmacro", NULL};
    bd_chat_kids names = {0}, defaults = {0};
    bd_chat_node *body;
    uint32_t name;
    if (!bd_chat_advance(parser)) return false;
    if (parser->token.kind != BD_CHAT_T_NAME) return bd_chat_syntax(parser, "a macro's name");
    if (!bd_chat_intern(parser, parser->token.text, parser->token.bytes, &name) ||
        !bd_chat_advance(parser) || !parse_signature(parser, &names, &defaults))
        return false;
    uint32_t loops = parser->loops;
    parser->loops = 0; /* a break belongs to a loop of the macro's own */
    parser->macros++;
    bool ok = parse_block(parser, ends, &body);
    parser->loops = loops;
    parser->macros--;
    uint32_t parameters = (uint32_t)names.count;
    if (!ok || !bd_chat_kids_add(parser, &names, body)) return false;
    for (size_t i = 0; i < defaults.count; i++)
        if (!bd_chat_kids_add(parser, &names, defaults.items[i])) return false;
    if (!bd_chat_advance(parser) ||
        !bd_chat_make(parser, BD_CHAT_OP_MACRO, names.items, names.count, out))
        return false;
    (*out)->name = name;
    (*out)->id = parameters;
    return true;
}

/* What training code marks as the assistant's own words; for us its text, in a scope of its own. */
static bool parse_generation(bd_chat_parser *parser, bd_chat_node **out) {
    static const char *const ends[] = {"endgeneration", NULL};
    bd_chat_node *body;
    uint32_t loops = parser->loops;
    parser->loops = 0;
    bool ok = bd_chat_advance(parser) && parse_block(parser, ends, &body);
    parser->loops = loops;
    return ok && bd_chat_advance(parser) && bd_chat_make(parser, BD_CHAT_OP_SCOPE, &body, 1, out);
}

static bool parse_jump(bd_chat_parser *parser, bd_chat_op op, bd_chat_node **out) {
    if (parser->loops == 0) return bd_chat_syntax(parser, "a loop around 'break' and 'continue'");
    return bd_chat_make(parser, op, NULL, 0, out) && bd_chat_advance(parser);
}

static bool parse_statement(bd_chat_parser *parser, bd_chat_node **out) {
    const bd_chat_token *token = &parser->token;
    if (token->kind != BD_CHAT_T_NAME) return bd_chat_syntax(parser, "the name of a statement");
    if (bd_chat_is_name(token, "set")) return parse_set(parser, out);
    if (bd_chat_is_name(token, "for")) return parse_for(parser, out);
    if (bd_chat_is_name(token, "if")) return parse_if(parser, out);
    if (bd_chat_is_name(token, "macro")) return parse_macro(parser, out);
    if (bd_chat_is_name(token, "generation")) return parse_generation(parser, out);
    if (bd_chat_is_name(token, "break")) return parse_jump(parser, BD_CHAT_OP_BREAK, out);
    if (bd_chat_is_name(token, "continue")) return parse_jump(parser, BD_CHAT_OP_CONTINUE, out);
    if (token->bytes > 3 && memcmp(token->text, "end", 3) == 0)
        return bd_chat_syntax(parser, "a statement to be open");
    return bd_chat_refuse(parser, token->line, "statement", token->text, token->bytes);
}

static bool parse_output(bd_chat_parser *parser, bd_chat_node **out) {
    bd_chat_node *value;
    if (!bd_chat_advance(parser) || !bd_chat_parse_tuple(parser, true, false, &value)) return false;
    if (parser->token.kind != BD_CHAT_T_VARIABLE_END)
        return bd_chat_syntax(parser, "the end of the expression");
    return bd_chat_advance(parser) && bd_chat_make(parser, BD_CHAT_OP_OUTPUT, &value, 1, out);
}

static bool parse_data(bd_chat_parser *parser, bd_chat_node **out) {
    bd_chat_token token = parser->token;
    if (!bd_chat_make(parser, BD_CHAT_OP_TEXT, NULL, 0, out)) return false;
    (*out)->value = bd_chat_text(token.text, token.bytes);
    return bd_chat_advance(parser);
}

static bool is_one_of(const bd_chat_token *token, const char *const *names) {
    for (; names && *names; names++)
        if (bd_chat_is_name(token, *names)) return true;
    return false;
}

/* One piece of a body; *end: an end was found instead, its name is the token. */
static bool parse_piece(bd_chat_parser *parser, const char *const *ends, bd_chat_node **out,
                        bool *end) {
    switch ((int)parser->token.kind) {
    case BD_CHAT_T_DATA:
        return parse_data(parser, out);
    case BD_CHAT_T_VARIABLE_BEGIN:
        return parse_output(parser, out);
    case BD_CHAT_T_BLOCK_BEGIN:
        if (!bd_chat_advance(parser)) return false;
        *end = is_one_of(&parser->token, ends);
        return *end || (parse_statement(parser, out) && block_end(parser));
    default:
        if (ends) return bd_chat_syntax(parser, *ends);
        *end = true;
        return true;
    }
}

static bool parse_body(bd_chat_parser *parser, const char *const *ends, bd_chat_node **out) {
    bd_chat_kids kids = {0};
    bd_chat_node *piece;
    bool end = false;
    if (!enter(parser)) return false;
    while (!end) {
        if (!parse_piece(parser, ends, &piece, &end)) return false;
        if (!end && !bd_chat_kids_add(parser, &kids, piece)) return false;
    }
    parser->depth--;
    return bd_chat_make(parser, BD_CHAT_OP_BODY, kids.items, kids.count, out);
}

bool bd_chat_parse_text(bd_chat_parser *parser, bd_chat_node **root) {
    return bd_chat_advance(parser) && parse_body(parser, NULL, root);
}
