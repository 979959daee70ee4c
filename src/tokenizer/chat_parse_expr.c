/* chat_parse_expr.c - expressions of a template, by Jinja's precedence: choice, or, and, not,
 * comparison, + and -, ~, * / // %, sign, postfix, filters and tests. Threads: any. */
#include "chat_internal.h"

static bool parse_or(bd_chat_parser *parser, bd_chat_node **out);
static bool parse_unary(bd_chat_parser *parser, bool with_filter, bd_chat_node **out);

static bool enter(bd_chat_parser *parser) {
    if (++parser->depth <= BD_CHAT_DEPTH_MAX) return true;
    return bd_chat_lex_fail(&parser->lexer, parser->token.line, BD_E_LIMIT, "nested too deeply");
}

static bool skip_name(bd_chat_parser *parser, const char *name, bool *skipped) {
    *skipped = bd_chat_is_name(&parser->token, name);
    return !*skipped || bd_chat_advance(parser);
}

static bool make_two(bd_chat_parser *parser, bd_chat_op op, bd_chat_node *left, bd_chat_node *right,
                     bd_chat_node **out) {
    bd_chat_node *kids[] = {left, right};
    return bd_chat_make(parser, op, kids, 2, out);
}

static bool make_const(bd_chat_parser *parser, const bd_chat_value *value, bd_chat_node **out) {
    if (!bd_chat_make(parser, BD_CHAT_OP_CONST, NULL, 0, out)) return false;
    (*out)->value = *value;
    return true;
}

bool bd_chat_parse_expression(bd_chat_parser *parser, bool with_choice, bd_chat_node **out) {
    bool more = false;
    if (!enter(parser) || !parse_or(parser, out)) return false;
    while (with_choice) {
        bd_chat_node *kids[3] = {NULL, *out, NULL};
        if (!skip_name(parser, "if", &more)) return false;
        if (!more) break;
        if (!parse_or(parser, &kids[0]) || !skip_name(parser, "else", &more)) return false;
        if (more && !bd_chat_parse_expression(parser, true, &kids[2])) return false;
        if (!bd_chat_make(parser, BD_CHAT_OP_CHOOSE, kids, 3, out)) return false;
    }
    parser->depth--;
    return true;
}

static bool parse_not(bd_chat_parser *parser, bd_chat_node **out);

static bool parse_and(bd_chat_parser *parser, bd_chat_node **out) {
    bool more;
    bd_chat_node *right;
    if (!parse_not(parser, out)) return false;
    for (;;) {
        if (!skip_name(parser, "and", &more)) return false;
        if (!more) return true;
        if (!parse_not(parser, &right) || !make_two(parser, BD_CHAT_OP_AND, *out, right, out))
            return false;
    }
}

static bool parse_or(bd_chat_parser *parser, bd_chat_node **out) {
    bool more;
    bd_chat_node *right;
    if (!parse_and(parser, out)) return false;
    for (;;) {
        if (!skip_name(parser, "or", &more)) return false;
        if (!more) return true;
        if (!parse_and(parser, &right) || !make_two(parser, BD_CHAT_OP_OR, *out, right, out))
            return false;
    }
}

/* ---- Arithmetic ---- */

static bool parse_product(bd_chat_parser *parser, bd_chat_node **out) {
    static const struct {
        const char *text;
        bd_chat_op op;
    } table[] = {{"*", BD_CHAT_OP_MULTIPLY},
                 {"//", BD_CHAT_OP_FLOOR_DIVIDE},
                 {"/", BD_CHAT_OP_DIVIDE},
                 {"%", BD_CHAT_OP_MODULO}};
    if (!parse_unary(parser, true, out)) return false;
    for (;;) {
        size_t i = 0;
        bd_chat_node *right;
        if (bd_chat_is_op(&parser->token, "**"))
            return bd_chat_refuse(parser, parser->token.line, "operator", "**", 2);
        while (i < 4 && !bd_chat_is_op(&parser->token, table[i].text))
            i++;
        if (i == 4) return true;
        if (!bd_chat_advance(parser) || !parse_unary(parser, true, &right) ||
            !make_two(parser, table[i].op, *out, right, out))
            return false;
    }
}

static bool parse_concat(bd_chat_parser *parser, bd_chat_node **out) {
    bd_chat_kids kids = {0};
    if (!parse_product(parser, out)) return false;
    if (!bd_chat_is_op(&parser->token, "~")) return true;
    if (!bd_chat_kids_add(parser, &kids, *out)) return false;
    while (bd_chat_is_op(&parser->token, "~"))
        if (!bd_chat_advance(parser) || !parse_product(parser, out) ||
            !bd_chat_kids_add(parser, &kids, *out))
            return false;
    return bd_chat_make(parser, BD_CHAT_OP_CONCAT, kids.items, kids.count, out);
}

static bool parse_sum(bd_chat_parser *parser, bd_chat_node **out) {
    if (!parse_concat(parser, out)) return false;
    for (;;) {
        bool plus = bd_chat_is_op(&parser->token, "+");
        bd_chat_node *right;
        if (!plus && !bd_chat_is_op(&parser->token, "-")) return true;
        if (!bd_chat_advance(parser) || !parse_concat(parser, &right) ||
            !make_two(parser, plus ? BD_CHAT_OP_ADD : BD_CHAT_OP_SUBTRACT, *out, right, out))
            return false;
    }
}

/* Which comparison the token begins; -1: none. "not in" is taken whole by the caller. */
static bool find_compare(bd_chat_parser *parser, int *which) {
    static const char *const texts[] = {
        [BD_CHAT_EQ] = "==", [BD_CHAT_NE] = "!=", [BD_CHAT_LT] = "<",
        [BD_CHAT_LE] = "<=", [BD_CHAT_GT] = ">",  [BD_CHAT_GE] = ">="};
    *which = -1;
    for (int i = 0; i < BD_CHAT_IN; i++)
        if (bd_chat_is_op(&parser->token, texts[i])) *which = i;
    if (bd_chat_is_name(&parser->token, "in")) *which = BD_CHAT_IN;
    if (!bd_chat_is_name(&parser->token, "not")) return true;
    const bd_chat_token *ahead;
    if (!bd_chat_peek(parser, &ahead)) return false;
    if (!bd_chat_is_name(ahead, "in")) return true;
    *which = BD_CHAT_NOT_IN;
    return bd_chat_advance(parser);
}

static bool parse_compare(bd_chat_parser *parser, bd_chat_node **out) {
    bd_chat_kids kids = {0};
    uint8_t ops[BD_CHAT_ARGUMENTS_MAX];
    size_t count = 0;
    if (!parse_sum(parser, out) || !bd_chat_kids_add(parser, &kids, *out)) return false;
    for (;;) {
        int which;
        if (!find_compare(parser, &which)) return false;
        if (which < 0) break;
        if (count == BD_CHAT_ARGUMENTS_MAX) return bd_chat_syntax(parser, "fewer comparisons");
        ops[count++] = (uint8_t)which;
        if (!bd_chat_advance(parser) || !parse_sum(parser, out) ||
            !bd_chat_kids_add(parser, &kids, *out))
            return false;
    }
    if (count == 0) return true;
    if (!bd_chat_make(parser, BD_CHAT_OP_COMPARE, kids.items, kids.count, out)) return false;
    uint8_t *kept = (uint8_t *)bd_arena_strndup(parser->out->arena, (const char *)ops, count);
    if (!kept) return bd_chat_lex_fail(&parser->lexer, (*out)->line, BD_E_MEMORY, "out of memory");
    (*out)->compare = kept;
    return true;
}

static bool parse_not(bd_chat_parser *parser, bd_chat_node **out) {
    if (!bd_chat_is_name(&parser->token, "not")) return parse_compare(parser, out);
    if (!enter(parser) || !bd_chat_advance(parser) || !parse_not(parser, out)) return false;
    parser->depth--;
    return bd_chat_make(parser, BD_CHAT_OP_NOT, out, 1, out);
}

/* ---- Primary expressions ---- */

static bool parse_list(bd_chat_parser *parser, bool dict, bd_chat_node **out) {
    const char *close = dict ? "}" : "]";
    bd_chat_kids kids = {0};
    bd_chat_node *item;
    if (!bd_chat_advance(parser)) return false;
    while (!bd_chat_is_op(&parser->token, close)) {
        if (kids.count > 0 && !bd_chat_expect_op(parser, ",")) return false;
        if (bd_chat_is_op(&parser->token, close)) break;
        if (!bd_chat_parse_expression(parser, true, &item) ||
            !bd_chat_kids_add(parser, &kids, item))
            return false;
        if (!dict) continue;
        if (!bd_chat_expect_op(parser, ":") || !bd_chat_parse_expression(parser, true, &item) ||
            !bd_chat_kids_add(parser, &kids, item))
            return false;
    }
    return bd_chat_advance(parser) && bd_chat_make(parser, dict ? BD_CHAT_OP_DICT : BD_CHAT_OP_LIST,
                                                   kids.items, kids.count, out);
}

static bool parse_name(bd_chat_parser *parser, bd_chat_node **out) {
    bd_chat_token token = parser->token;
    bool is_true = bd_chat_is_name(&token, "true") || bd_chat_is_name(&token, "True");
    bool is_false = bd_chat_is_name(&token, "false") || bd_chat_is_name(&token, "False");
    bd_chat_value value = is_true || is_false ? bd_chat_bool(is_true) : bd_chat_none();
    if (is_true || is_false || bd_chat_is_name(&token, "none") || bd_chat_is_name(&token, "None"))
        return make_const(parser, &value, out) && bd_chat_advance(parser);
    static const char *const absent[] = {"cycler",  "joiner", "lipsum", "caller",
                                         "varargs", "kwargs", "self",   "super"};
    for (size_t i = 0; i < sizeof absent / sizeof absent[0]; i++)
        if (bd_chat_is_name(&token, absent[i]) && (i < 3 || parser->macros > 0 || i > 5))
            return bd_chat_refuse(parser, token.line, "name", token.text, token.bytes);
    uint32_t name;
    if (!bd_chat_make(parser, BD_CHAT_OP_NAME, NULL, 0, out) ||
        !bd_chat_intern(parser, token.text, token.bytes, &name))
        return false;
    (*out)->name = name;
    return bd_chat_advance(parser);
}

/* Strings side by side are one. */
static bool parse_strings(bd_chat_parser *parser, bd_chat_node **out) {
    bd_chat_value whole = parser->token.value;
    if (!make_const(parser, &whole, out) || !bd_chat_advance(parser)) return false;
    while (parser->token.kind == BD_CHAT_T_STRING) {
        const bd_chat_value *more = &parser->token.value;
        char *joined = bd_arena_alloc(parser->out->arena, whole.bytes + more->bytes, 1);
        if (!joined)
            return bd_chat_lex_fail(&parser->lexer, parser->token.line, BD_E_MEMORY,
                                    "out of memory");
        memcpy(joined, whole.text, whole.bytes);
        memcpy(joined + whole.bytes, more->text, more->bytes);
        whole = bd_chat_text(joined, whole.bytes + more->bytes);
        if (!bd_chat_advance(parser)) return false;
    }
    (*out)->value = whole;
    return true;
}

static bool parse_primary(bd_chat_parser *parser, bd_chat_node **out) {
    const bd_chat_token *token = &parser->token;
    if (token->kind == BD_CHAT_T_NAME) return parse_name(parser, out);
    if (token->kind == BD_CHAT_T_STRING) return parse_strings(parser, out);
    if (token->kind == BD_CHAT_T_INT || token->kind == BD_CHAT_T_FLOAT)
        return make_const(parser, &token->value, out) && bd_chat_advance(parser);
    if (bd_chat_is_op(token, "("))
        return bd_chat_advance(parser) && bd_chat_parse_tuple(parser, true, true, out) &&
               bd_chat_expect_op(parser, ")");
    if (bd_chat_is_op(token, "[")) return parse_list(parser, false, out);
    if (bd_chat_is_op(token, "{")) return parse_list(parser, true, out);
    return bd_chat_syntax(parser, "a value");
}

static bool tuple_ends(const bd_chat_token *token) {
    return token->kind == BD_CHAT_T_VARIABLE_END || token->kind == BD_CHAT_T_BLOCK_END ||
           bd_chat_is_op(token, ")");
}

bool bd_chat_parse_tuple(bd_chat_parser *parser, bool with_choice, bool parentheses,
                         bd_chat_node **out) {
    bd_chat_kids kids = {0};
    bool is_tuple = false;
    while (!tuple_ends(&parser->token)) {
        if (!bd_chat_parse_expression(parser, with_choice, out) ||
            !bd_chat_kids_add(parser, &kids, *out))
            return false;
        if (!bd_chat_is_op(&parser->token, ",")) break;
        is_tuple = true;
        if (!bd_chat_advance(parser)) return false;
    }
    if (!is_tuple && kids.count == 1) return true;
    if (!is_tuple && !parentheses) return bd_chat_syntax(parser, "an expression");
    return bd_chat_make(parser, BD_CHAT_OP_TUPLE, kids.items, kids.count, out);
}

static bool parse_target_name(bd_chat_parser *parser, bool with_namespace, bd_chat_node **out) {
    static const char *const reserved[] = {"true",  "false", "none", "True",
                                           "False", "None",  "loop"};
    if (parser->token.kind != BD_CHAT_T_NAME) return bd_chat_syntax(parser, "a name");
    for (size_t i = 0; i < sizeof reserved / sizeof reserved[0]; i++)
        if (bd_chat_is_name(&parser->token, reserved[i]))
            return bd_chat_syntax(parser, "a name that may be set");
    uint32_t name, attribute;
    if (!bd_chat_make(parser, BD_CHAT_OP_NAME, NULL, 0, out) ||
        !bd_chat_intern(parser, parser->token.text, parser->token.bytes, &name) ||
        !bd_chat_advance(parser))
        return false;
    (*out)->name = name;
    if (!with_namespace || !bd_chat_is_op(&parser->token, ".")) return true;
    if (!bd_chat_advance(parser)) return false;
    if (parser->token.kind != BD_CHAT_T_NAME) return bd_chat_syntax(parser, "a name");
    if (!bd_chat_intern(parser, parser->token.text, parser->token.bytes, &attribute)) return false;
    (*out)->op = BD_CHAT_OP_NS_ATTR;
    (*out)->id = attribute;
    return bd_chat_advance(parser);
}

bool bd_chat_parse_target(bd_chat_parser *parser, bool with_namespace, bd_chat_node **out) {
    bd_chat_kids kids = {0};
    bool parentheses = bd_chat_is_op(&parser->token, "("), is_tuple = false;
    if (parentheses && !bd_chat_advance(parser)) return false;
    while (parser->token.kind == BD_CHAT_T_NAME && !bd_chat_is_name(&parser->token, "in")) {
        if (!parse_target_name(parser, with_namespace, out) ||
            !bd_chat_kids_add(parser, &kids, *out))
            return false;
        if (!bd_chat_is_op(&parser->token, ",")) break;
        is_tuple = true;
        if (!bd_chat_advance(parser)) return false;
    }
    if (kids.count == 0) return bd_chat_syntax(parser, "a name");
    if (parentheses && !bd_chat_expect_op(parser, ")")) return false;
    if (!is_tuple) return true;
    return bd_chat_make(parser, BD_CHAT_OP_TUPLE, kids.items, kids.count, out);
}

/* ---- Postfix ---- */

/* [from:to:step] as far as it is there. */
static bool parse_subscript(bd_chat_parser *parser, bd_chat_node *object, bd_chat_node **out) {
    bd_chat_node *kids[4] = {object, NULL, NULL, NULL};
    bool is_slice = false;
    if (!bd_chat_advance(parser)) return false;
    if (!bd_chat_is_op(&parser->token, ":") && !bd_chat_parse_expression(parser, true, &kids[1]))
        return false;
    for (size_t i = 2; i < 4 && bd_chat_is_op(&parser->token, ":"); i++) {
        is_slice = true;
        if (!bd_chat_advance(parser)) return false;
        if (!bd_chat_is_op(&parser->token, ":") && !bd_chat_is_op(&parser->token, "]") &&
            !bd_chat_parse_expression(parser, true, &kids[i]))
            return false;
    }
    if (!bd_chat_expect_op(parser, "]")) return false;
    return bd_chat_make(parser, is_slice ? BD_CHAT_OP_SLICE : BD_CHAT_OP_ITEM, kids,
                        is_slice ? 4 : 2, out);
}

static bool parse_attribute(bd_chat_parser *parser, bd_chat_node *object, bd_chat_node **out) {
    if (!bd_chat_advance(parser)) return false;
    bd_chat_node *key;
    if (parser->token.kind == BD_CHAT_T_INT)
        return make_const(parser, &parser->token.value, &key) && bd_chat_advance(parser) &&
               make_two(parser, BD_CHAT_OP_ITEM, object, key, out);
    if (parser->token.kind != BD_CHAT_T_NAME) return bd_chat_syntax(parser, "a name or number");
    uint32_t name;
    if (!bd_chat_intern(parser, parser->token.text, parser->token.bytes, &name) ||
        !bd_chat_make(parser, BD_CHAT_OP_ATTR, &object, 1, out))
        return false;
    (*out)->name = name;
    return bd_chat_advance(parser);
}

/* name=value: *named. */
static bool parse_keyword(bd_chat_parser *parser, bool *named, uint32_t *name) {
    const bd_chat_token *ahead;
    *named = false;
    if (parser->token.kind != BD_CHAT_T_NAME) return true;
    if (!bd_chat_peek(parser, &ahead)) return false;
    if (!bd_chat_is_op(ahead, "=")) return true;
    *named = true;
    return bd_chat_intern(parser, parser->token.text, parser->token.bytes, name) &&
           bd_chat_advance(parser) && bd_chat_advance(parser);
}

/* (arguments) behind kids[0]. */
static bool parse_arguments(bd_chat_parser *parser, bd_chat_op op, bd_chat_node *first,
                            bd_chat_node **out) {
    bd_chat_kids kids = {0};
    uint32_t names[BD_CHAT_ARGUMENTS_MAX], named_count = 0;
    bd_chat_node *item;
    if (!bd_chat_kids_add(parser, &kids, first)) return false;
    bool given = bd_chat_is_op(&parser->token, "(");
    if (given && !bd_chat_advance(parser)) return false;
    while (given && !bd_chat_is_op(&parser->token, ")")) {
        bool named;
        uint32_t name = 0;
        if (kids.count > 1 && !bd_chat_expect_op(parser, ",")) return false;
        if (kids.count > 1 && bd_chat_is_op(&parser->token, ")")) break;
        if (bd_chat_is_op(&parser->token, "*") || bd_chat_is_op(&parser->token, "**"))
            return bd_chat_refuse(parser, parser->token.line, "argument form", parser->token.text,
                                  parser->token.bytes);
        if (kids.count > BD_CHAT_ARGUMENTS_MAX)
            return bd_chat_syntax(parser, "16 arguments at most");
        if (!parse_keyword(parser, &named, &name)) return false;
        if (!named && named_count > 0) return bd_chat_syntax(parser, "a named argument");
        if (named) names[named_count++] = name;
        if (!bd_chat_parse_expression(parser, true, &item) ||
            !bd_chat_kids_add(parser, &kids, item))
            return false;
    }
    if (given && !bd_chat_advance(parser)) return false;
    if (!bd_chat_make(parser, op, kids.items, kids.count, out)) return false;
    uint32_t *kept = bd_arena_alloc(parser->out->arena, named_count, sizeof *kept);
    if (!kept) return bd_chat_lex_fail(&parser->lexer, (*out)->line, BD_E_MEMORY, "out of memory");
    for (uint32_t i = 0; i < named_count; i++)
        kept[i] = names[i];
    (*out)->keywords = kept;
    (*out)->keyword_count = named_count;
    return true;
}

/* A method nobody has is a mistake of the template, or one that is missing here. */
static bool parse_call(bd_chat_parser *parser, bd_chat_node *callee, bd_chat_node **out) {
    if (callee->op == BD_CHAT_OP_ATTR) {
        const bd_chat_name *name = &parser->out->names[callee->name];
        if (bd_chat_method_id(name->text, name->bytes) < 0 && strcmp(name->text, "cycle") != 0)
            return bd_chat_refuse(parser, callee->line, "method", name->text, name->bytes);
    }
    return parse_arguments(parser, BD_CHAT_OP_CALL, callee, out);
}

static bool parse_postfix(bd_chat_parser *parser, bd_chat_node **node) {
    for (;;) {
        bool ok = true;
        if (bd_chat_is_op(&parser->token, "."))
            ok = parse_attribute(parser, *node, node);
        else if (bd_chat_is_op(&parser->token, "["))
            ok = parse_subscript(parser, *node, node);
        else if (bd_chat_is_op(&parser->token, "("))
            ok = parse_call(parser, *node, node);
        else
            return true;
        if (!ok) return false;
    }
}

/* Names of filters and tests may have dots in Jinja; those of chat templates have none. */
static bool no_dot(bd_chat_parser *parser, const char *what) {
    return !bd_chat_is_op(&parser->token, ".") ||
           bd_chat_refuse(parser, parser->token.line, what, "with a dot in its name", 22);
}

bool bd_chat_parse_filter(bd_chat_parser *parser, bd_chat_node *value, bd_chat_node **out) {
    if (!bd_chat_advance(parser)) return false;
    if (parser->token.kind != BD_CHAT_T_NAME) return bd_chat_syntax(parser, "a filter's name");
    bd_chat_token name = parser->token;
    int id = bd_chat_filter_id(name.text, name.bytes);
    if (id < 0) return bd_chat_refuse(parser, name.line, "filter", name.text, name.bytes);
    if (!bd_chat_advance(parser) || !no_dot(parser, "filter") ||
        !parse_arguments(parser, BD_CHAT_OP_FILTER, value, out))
        return false;
    (*out)->id = (uint32_t)id;
    (*out)->line = name.line;
    return true;
}

/* Whether a test's argument follows without parentheses. */
static bool starts_argument(const bd_chat_token *token) {
    static const char *const not_here[] = {"else", "or", "and"};
    for (size_t i = 0; i < 3; i++)
        if (bd_chat_is_name(token, not_here[i])) return false;
    return token->kind == BD_CHAT_T_NAME || token->kind == BD_CHAT_T_STRING ||
           token->kind == BD_CHAT_T_INT || token->kind == BD_CHAT_T_FLOAT ||
           bd_chat_is_op(token, "[") || bd_chat_is_op(token, "{");
}

static bool parse_test(bd_chat_parser *parser, bd_chat_node *value, bd_chat_node **out) {
    bool negated;
    if (!bd_chat_advance(parser) || !skip_name(parser, "not", &negated)) return false;
    if (parser->token.kind != BD_CHAT_T_NAME) return bd_chat_syntax(parser, "a test's name");
    bd_chat_token name = parser->token;
    int id = bd_chat_test_id(name.text, name.bytes);
    if (id < 0) return bd_chat_refuse(parser, name.line, "test", name.text, name.bytes);
    if (bd_chat_is_name(&name, "string")) parser->out->tests_string = true;
    if (!bd_chat_advance(parser) || !no_dot(parser, "test")) return false;
    if (starts_argument(&parser->token)) {
        bd_chat_node *argument;
        if (bd_chat_is_name(&parser->token, "is")) return bd_chat_syntax(parser, "one test only");
        if (!parse_primary(parser, &argument) || !parse_postfix(parser, &argument) ||
            !make_two(parser, BD_CHAT_OP_TEST, value, argument, out))
            return false;
    } else if (!parse_arguments(parser, BD_CHAT_OP_TEST, value, out)) {
        return false;
    }
    (*out)->id = (uint32_t)id;
    (*out)->line = name.line;
    return !negated || bd_chat_make(parser, BD_CHAT_OP_NOT, out, 1, out);
}

static bool parse_filters(bd_chat_parser *parser, bd_chat_node **node) {
    for (;;) {
        bool ok;
        if (bd_chat_is_op(&parser->token, "|"))
            ok = bd_chat_parse_filter(parser, *node, node);
        else if (bd_chat_is_name(&parser->token, "is"))
            ok = parse_test(parser, *node, node);
        else if (bd_chat_is_op(&parser->token, "("))
            ok = parse_call(parser, *node, node);
        else
            return true;
        if (!ok) return false;
    }
}

static bool parse_unary(bd_chat_parser *parser, bool with_filter, bd_chat_node **out) {
    bool minus = bd_chat_is_op(&parser->token, "-");
    if (minus || bd_chat_is_op(&parser->token, "+")) {
        if (!enter(parser) || !bd_chat_advance(parser) || !parse_unary(parser, false, out) ||
            !bd_chat_make(parser, minus ? BD_CHAT_OP_NEGATE : BD_CHAT_OP_PLUS, out, 1, out))
            return false;
        parser->depth--;
    } else if (!parse_primary(parser, out)) {
        return false;
    }
    if (!parse_postfix(parser, out)) return false;
    return !with_filter || parse_filters(parser, out);
}
