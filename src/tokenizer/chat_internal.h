/* chat_internal.h - the inside of chat templates: values, syntax tree, one rendering. Private to
 * this room. A tree lives in its template's arena and never changes after parsing; values live in
 * the arena of one rendering or are constants of the tree. Threads: a bd_chat_run belongs to one
 * thread. Functions that return bool have set the run's error when they return false. */
#ifndef BITDELTA_TOKENIZER_CHAT_INTERNAL_H
#define BITDELTA_TOKENIZER_CHAT_INTERNAL_H

#include <string.h>

#include "bitdelta/base/arena.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/tokenizer/chat_template.h"

enum {
    BD_CHAT_DEPTH_MAX = 200,     /* of the tree */
    BD_CHAT_RUN_DEPTH_MAX = 600, /* of a rendering's recursion, over nested values too */
    BD_CHAT_RANGE_MAX = 100000,  /* elements of range(), as the reference's sandbox has it */
    BD_CHAT_NAMES_MAX = 4096,    /* different names in a template */
    BD_CHAT_ARGUMENTS_MAX = 16,  /* of one call */
    BD_CHAT_BYTES_PER_STEP = 64, /* text handled for the price of one step */
};
#define BD_CHAT_STEPS_MAX       ((uint64_t)50000000)
#define BD_CHAT_ARENA_BYTES_MAX ((size_t)128 << 20)

/* ---- Values ---- */

typedef enum bd_chat_kind {
    BD_CHAT_UNDEFINED, /* text: the name, for messages; may be NULL */
    BD_CHAT_NONE,
    BD_CHAT_BOOL,
    BD_CHAT_INT,
    BD_CHAT_FLOAT,
    BD_CHAT_STRING, /* UTF-8, not NUL-terminated */
    BD_CHAT_LIST,
    BD_CHAT_DICT,
    BD_CHAT_NAMESPACE, /* a dict that {% set x.y %} may change */
    BD_CHAT_LOOP,
    BD_CHAT_MACRO,
    BD_CHAT_FUNCTION, /* integer: index of a global function */
    BD_CHAT_METHOD,   /* bound to its object */
} bd_chat_kind;

typedef enum bd_chat_flavour { /* of a LIST */
                               BD_CHAT_PLAIN,
                               BD_CHAT_TUPLE,
                               BD_CHAT_RANGE,
                               BD_CHAT_GENERATOR, /* can be gone through once, has no length */
                               BD_CHAT_VIEW,      /* of a dict: no indexing */
} bd_chat_flavour;

typedef struct bd_chat_value {
    uint8_t kind, flavour;
    union {
        bool boolean;
        int64_t integer;
        double number;
        const char *text;
        struct bd_chat_list *list;
        struct bd_chat_dict *dict;
        struct bd_chat_loop *loop;
        const struct bd_chat_macro *macro;
        const struct bd_chat_method *method;
    };
    size_t bytes; /* STRING, UNDEFINED */
} bd_chat_value;

typedef struct bd_chat_list {
    bd_chat_value *items;
    size_t count, capacity;
} bd_chat_list;

typedef struct bd_chat_dict { /* in order of insertion */
    bd_chat_value *keys, *values;
    size_t count, capacity;
} bd_chat_dict;

typedef struct bd_chat_method {
    bd_chat_value object;
    uint32_t id; /* index in the method table */
} bd_chat_method;

static inline bd_chat_value bd_chat_none(void) {
    return (bd_chat_value){.kind = BD_CHAT_NONE};
}
static inline bd_chat_value bd_chat_bool(bool value) {
    return (bd_chat_value){.kind = BD_CHAT_BOOL, .boolean = value};
}
static inline bd_chat_value bd_chat_int(int64_t value) {
    return (bd_chat_value){.kind = BD_CHAT_INT, .integer = value};
}
static inline bd_chat_value bd_chat_float(double value) {
    return (bd_chat_value){.kind = BD_CHAT_FLOAT, .number = value};
}
static inline bd_chat_value bd_chat_text(const char *text, size_t bytes) {
    return (bd_chat_value){.kind = BD_CHAT_STRING, .text = text, .bytes = bytes};
}
static inline bd_chat_value bd_chat_undefined(const char *name, size_t bytes) {
    return (bd_chat_value){.kind = BD_CHAT_UNDEFINED, .text = name, .bytes = bytes};
}

/* ---- Syntax tree ---- */

typedef enum bd_chat_op {
    /* expressions; kids in brackets */
    BD_CHAT_OP_CONST,
    BD_CHAT_OP_NAME,
    BD_CHAT_OP_LIST,
    BD_CHAT_OP_TUPLE,
    BD_CHAT_OP_DICT,   /* [key, value, ...] */
    BD_CHAT_OP_ATTR,   /* [object] name */
    BD_CHAT_OP_ITEM,   /* [object, key] */
    BD_CHAT_OP_SLICE,  /* [object, from, to, step], absent ones NULL */
    BD_CHAT_OP_CALL,   /* [callee, arguments...] */
    BD_CHAT_OP_FILTER, /* [value, arguments...] id; value NULL inside {% set x | f %} */
    BD_CHAT_OP_TEST,   /* [value, arguments...] id */
    BD_CHAT_OP_NOT,
    BD_CHAT_OP_NEGATE,
    BD_CHAT_OP_PLUS,
    BD_CHAT_OP_AND,
    BD_CHAT_OP_OR,
    BD_CHAT_OP_COMPARE, /* [left, right...] compare */
    BD_CHAT_OP_ADD,
    BD_CHAT_OP_SUBTRACT,
    BD_CHAT_OP_MULTIPLY,
    BD_CHAT_OP_DIVIDE,
    BD_CHAT_OP_FLOOR_DIVIDE,
    BD_CHAT_OP_MODULO,
    BD_CHAT_OP_CONCAT,
    BD_CHAT_OP_CHOOSE,  /* [condition, then, else]; else may be NULL */
    BD_CHAT_OP_NS_ATTR, /* only a target: name.attribute */
    /* statements */
    BD_CHAT_OP_BODY,
    BD_CHAT_OP_TEXT,     /* value */
    BD_CHAT_OP_OUTPUT,   /* [expression] */
    BD_CHAT_OP_SET,      /* [target, expression] */
    BD_CHAT_OP_SET_BODY, /* [target, filter or NULL, body] */
    BD_CHAT_OP_FOR,      /* [target, sequence, condition or NULL, body, else body or NULL] */
    BD_CHAT_OP_IF,       /* [condition, body, ..., else body when the count is odd] */
    BD_CHAT_OP_MACRO,    /* name, [parameters..., body, defaults...]; id: parameter count */
    BD_CHAT_OP_SCOPE,    /* [body]: {% generation %} */
    BD_CHAT_OP_BREAK,
    BD_CHAT_OP_CONTINUE,
} bd_chat_op;

typedef enum bd_chat_compare {
    BD_CHAT_EQ,
    BD_CHAT_NE,
    BD_CHAT_LT,
    BD_CHAT_LE,
    BD_CHAT_GT,
    BD_CHAT_GE,
    BD_CHAT_IN,
    BD_CHAT_NOT_IN
} bd_chat_compare;

typedef struct bd_chat_node {
    uint8_t op;
    uint16_t depth; /* of the tree below, itself included */
    uint32_t line, count;
    uint32_t name, id;        /* index into the template's names; index into a table */
    uint32_t keyword_count;   /* the last arguments have names */
    const uint32_t *keywords; /* [keyword_count] */
    const uint8_t *compare;   /* [count - 1] */
    struct bd_chat_node **kids;
    bd_chat_value value;
} bd_chat_node;

typedef struct bd_chat_name {
    const char *text; /* NUL-terminated */
    size_t bytes;
} bd_chat_name;

struct bd_chat_template {
    bd_arena *arena;
    char *source, *subject;
    bd_chat_name *names;
    uint32_t name_count, name_cap;
    bool wants_parts, tests_string;
    bd_chat_node *root;
};

/* ---- Lexer (chat_lexer.c) ---- */

typedef enum bd_chat_token_kind {
    BD_CHAT_T_END,
    BD_CHAT_T_DATA,
    BD_CHAT_T_BLOCK_BEGIN,
    BD_CHAT_T_BLOCK_END,
    BD_CHAT_T_VARIABLE_BEGIN,
    BD_CHAT_T_VARIABLE_END,
    BD_CHAT_T_NAME,
    BD_CHAT_T_STRING, /* value: decoded */
    BD_CHAT_T_INT,
    BD_CHAT_T_FLOAT,
    BD_CHAT_T_OPERATOR, /* text */
} bd_chat_token_kind;

typedef struct bd_chat_token {
    bd_chat_token_kind kind;
    uint32_t line;
    const char *text;
    size_t bytes;
    bd_chat_value value;
} bd_chat_token;

typedef enum bd_chat_mode { BD_CHAT_M_DATA, BD_CHAT_M_BLOCK, BD_CHAT_M_VARIABLE } bd_chat_mode;
typedef enum bd_chat_tag {
    BD_CHAT_TAG_NONE,
    BD_CHAT_TAG_BLOCK,
    BD_CHAT_TAG_VARIABLE,
    BD_CHAT_TAG_COMMENT,
    BD_CHAT_TAG_RAW
} bd_chat_tag;

typedef struct bd_chat_lexer {
    const char *begin, *at, *end;
    uint32_t line;
    bd_chat_mode mode;
    bd_chat_tag pending; /* what the text before `at` ended with; NONE: text is next */
    uint32_t open_count;
    char open[BD_CHAT_DEPTH_MAX];
    bd_arena *arena;
    const char *subject;
    bd_error *err;
    bd_status status;
} bd_chat_lexer;

/* false: lexer->status and err. */
bool bd_chat_lex(bd_chat_lexer *lexer, bd_chat_token *token);
bool bd_chat_lex_fail(bd_chat_lexer *lexer, uint32_t line, bd_status status, const char *format,
                      ...) BD_PRINTF(4, 5);

/* ---- Parser (chat_parse.c statements, chat_parse_expr.c expressions) ---- */

typedef struct bd_chat_parser {
    bd_chat_template *out;
    bd_chat_lexer lexer;
    bd_chat_token token, ahead;
    bool has_ahead;
    uint32_t depth, loops, macros;
} bd_chat_parser;

bool bd_chat_parse_text(bd_chat_parser *parser, bd_chat_node **root);
bool bd_chat_advance(bd_chat_parser *parser);
bool bd_chat_peek(bd_chat_parser *parser, const bd_chat_token **token);
bool bd_chat_is_op(const bd_chat_token *token, const char *text);
bool bd_chat_is_name(const bd_chat_token *token, const char *text);
bool bd_chat_expect_op(bd_chat_parser *parser, const char *text);
bool bd_chat_syntax(bd_chat_parser *parser, const char *expected);
bool bd_chat_refuse(bd_chat_parser *parser, uint32_t line, const char *what, const char *name,
                    size_t bytes);
bool bd_chat_intern(bd_chat_parser *parser, const char *text, size_t bytes, uint32_t *id);
/* kids are copied; NULL ones are allowed. */
bool bd_chat_make(bd_chat_parser *parser, bd_chat_op op, bd_chat_node *const *kids, size_t count,
                  bd_chat_node **out);
bool bd_chat_parse_expression(bd_chat_parser *parser, bool with_choice, bd_chat_node **out);
/* One expression, or several with commas: a tuple. */
bool bd_chat_parse_tuple(bd_chat_parser *parser, bool with_choice, bool parentheses,
                         bd_chat_node **out);
bool bd_chat_parse_target(bd_chat_parser *parser, bool with_namespace, bd_chat_node **out);
bool bd_chat_parse_filter(bd_chat_parser *parser, bd_chat_node *value, bd_chat_node **out);

typedef struct bd_chat_kids { /* a growing list while parsing */
    bd_chat_node **items;
    size_t count, capacity;
} bd_chat_kids;
bool bd_chat_kids_add(bd_chat_parser *parser, bd_chat_kids *kids, bd_chat_node *kid);

/* ---- One rendering ---- */

typedef struct bd_chat_binding {
    uint32_t name;
    bd_chat_value value;
    struct bd_chat_binding *next;
} bd_chat_binding;

typedef struct bd_chat_scope {
    bd_chat_binding *first;
    struct bd_chat_scope *parent;
} bd_chat_scope;

typedef struct bd_chat_macro {
    const bd_chat_node *node;
    bd_chat_scope *scope; /* where it was defined */
} bd_chat_macro;

typedef struct bd_chat_run {
    const bd_chat_template *tmpl;
    bd_arena *arena;
    bd_error *err;
    bd_status status;
    uint64_t steps_left;
    uint32_t depth, line;
    int64_t now_s;
    bd_strbuf *out;
    bd_chat_scope *scope;
    const bd_chat_value *variables; /* [name_count], UNDEFINED with text NULL: not given */
    const bd_chat_value *piped;     /* the body that filters of a {% set %} begin with */
    enum { BD_CHAT_GO_ON, BD_CHAT_BREAK, BD_CHAT_CONTINUE } flow;
} bd_chat_run;

typedef struct bd_chat_args {
    const bd_chat_value *items;
    size_t count;             /* positional and named */
    size_t keyword_count;     /* the last ones are named */
    const uint32_t *keywords; /* names */
} bd_chat_args;

bool bd_chat_fail(bd_chat_run *run, bd_status status, const char *format, ...) BD_PRINTF(3, 4);
bool bd_chat_spend(bd_chat_run *run, uint64_t steps);
void *bd_chat_alloc(bd_chat_run *run, size_t count, size_t size_bytes); /* NULL: failed */
bool bd_chat_enter(bd_chat_run *run); /* one level of recursion; leave afterwards */
static inline void bd_chat_leave(bd_chat_run *run) {
    run->depth--;
}
/* The string a strbuf holds, copied; the strbuf is emptied and freed. */
bool bd_chat_take(bd_chat_run *run, bd_strbuf *text, bd_chat_value *out);

/* chat_value.c */
const char *bd_chat_type_name(const bd_chat_value *value);
bool bd_chat_truth(const bd_chat_value *value);
bool bd_chat_equal(bd_chat_run *run, const bd_chat_value *a, const bd_chat_value *b, bool *out);
bool bd_chat_order(bd_chat_run *run, const bd_chat_value *a, const bd_chat_value *b, int *out);
bool bd_chat_contains(bd_chat_run *run, const bd_chat_value *item, const bd_chat_value *in,
                      bool *out);
bool bd_chat_list_new(bd_chat_run *run, bd_chat_flavour flavour, size_t capacity,
                      bd_chat_value *out);
bool bd_chat_list_add(bd_chat_run *run, bd_chat_value *list, const bd_chat_value *item);
bool bd_chat_dict_new(bd_chat_run *run, bd_chat_value *out);
bool bd_chat_dict_put(bd_chat_run *run, bd_chat_dict *dict, const bd_chat_value *key,
                      const bd_chat_value *value);
/* *found NULL: absent. */
bool bd_chat_dict_find(bd_chat_run *run, const bd_chat_dict *dict, const bd_chat_value *key,
                       const bd_chat_value **found);
const bd_chat_value *bd_chat_dict_text(const bd_chat_dict *dict, const char *key, size_t bytes);
/* Whether Python lets it be a key: no list, no mapping, also inside a tuple. */
bool bd_chat_hashable(const bd_chat_value *value);
bool bd_chat_pairs(bd_chat_run *run, const bd_chat_dict *dict, bd_chat_flavour flavour,
                   bd_chat_value *out);
/* What iteration gives: a list for a list, keys of a dict, characters of a string. */
bool bd_chat_elements(bd_chat_run *run, const bd_chat_value *value, bd_chat_list *out);
bool bd_chat_length(bd_chat_run *run, const bd_chat_value *value, int64_t *out);

/* chat_write.c: str(), repr() and JSON */
bool bd_chat_write(bd_chat_run *run, const bd_chat_value *value, bd_strbuf *out);
bool bd_chat_to_text(bd_chat_run *run, const bd_chat_value *value, bd_chat_value *out);
typedef struct bd_chat_json_style {
    bool ascii, sort_keys, pretty;
    int64_t indent;
    bd_chat_value item_separator, key_separator; /* text NULL: the default */
} bd_chat_json_style;
bool bd_chat_write_json(bd_chat_run *run, const bd_chat_value *value,
                        const bd_chat_json_style *style, bd_strbuf *out);

/* chat_json.c: the value that starts at *at in a text that bd_json_check accepted. */
bool bd_chat_read_json(bd_chat_run *run, const char **at, bd_chat_value *out);

/* chat_text.c: Python's view of UTF-8 text */
bool bd_chat_is_space(uint32_t code);
uint32_t bd_chat_code_at(const char *text, size_t bytes, size_t *length);
size_t bd_chat_put_code(uint32_t code, char out[4]);
size_t bd_chat_code_count(const char *text, size_t bytes);
bd_chat_value bd_chat_strip(bd_chat_value text, const bd_chat_value *chars, bool left, bool right);
const char *bd_chat_search(const char *text, size_t bytes, const char *what, size_t what_bytes);
typedef enum bd_chat_case {
    BD_CHAT_UPPER,
    BD_CHAT_LOWER,
    BD_CHAT_TITLE,
    BD_CHAT_CAPITALIZE,
    BD_CHAT_TITLE_WORDS /* the filter's own idea of words */
} bd_chat_case;
bool bd_chat_change_case(bd_chat_run *run, const bd_chat_value *text, bd_chat_case to,
                         bd_chat_value *out);
bool bd_chat_replace(bd_chat_run *run, const bd_chat_value *text, const bd_chat_value *from,
                     const bd_chat_value *to, int64_t count, bd_chat_value *out);
bool bd_chat_slice_text(bd_chat_run *run, const bd_chat_value *text, int64_t from, int64_t step,
                        size_t count, bd_chat_value *out);

/* chat_methods.c, chat_filters.c, chat_tests.c, chat_functions.c: -1: there is none. */
int bd_chat_method_id(const char *name, size_t bytes);
/* Whether the object's type has the method, so that obj.name is it and not a member. */
bool bd_chat_has_method(const bd_chat_value *object, const char *name, size_t bytes, int *id);
bool bd_chat_call_method(bd_chat_run *run, const bd_chat_method *method, const bd_chat_args *args,
                         bd_chat_value *out);
int bd_chat_filter_id(const char *name, size_t bytes);
bool bd_chat_apply_filter(bd_chat_run *run, uint32_t id, const bd_chat_value *value,
                          const bd_chat_args *args, bd_chat_value *out);
int bd_chat_test_id(const char *name, size_t bytes);
bool bd_chat_apply_test(bd_chat_run *run, uint32_t id, const bd_chat_value *value,
                        const bd_chat_args *args, bool *out);
int bd_chat_function_id(const char *name, size_t bytes);
bool bd_chat_call_function(bd_chat_run *run, uint32_t id, const bd_chat_args *args,
                           bd_chat_value *out);
/* Arguments by position or by one of the parameters' names; an absent one is UNDEFINED with text
 * NULL. Fails for more or unknown ones; `what` names the callee. */
bool bd_chat_bind(bd_chat_run *run, const char *what, const char *const *parameters, size_t count,
                  const bd_chat_args *args, bd_chat_value *out);
static inline bool bd_chat_given(const bd_chat_value *value) {
    return value->kind != BD_CHAT_UNDEFINED || value->text;
}

/* chat_eval.c, chat_render.c */
bool bd_chat_eval(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out);
bool bd_chat_getattr(bd_chat_run *run, const bd_chat_value *object, const bd_chat_name *name,
                     bd_chat_value *out);
bool bd_chat_getitem(bd_chat_run *run, const bd_chat_value *object, const bd_chat_value *key,
                     bd_chat_value *out);
bool bd_chat_calculate(bd_chat_run *run, bd_chat_op op, const bd_chat_value *a,
                       const bd_chat_value *b, bd_chat_value *out);
bool bd_chat_define(bd_chat_run *run, uint32_t name, const bd_chat_value *value);
bool bd_chat_exec(bd_chat_run *run, const bd_chat_node *node);
bool bd_chat_call_macro(bd_chat_run *run, const bd_chat_macro *macro, const bd_chat_args *args,
                        bd_chat_value *out);
bool bd_chat_loop_attr(bd_chat_run *run, struct bd_chat_loop *loop, const bd_chat_name *name,
                       bd_chat_value *out);
bool bd_chat_eval_args(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *items,
                       bd_chat_args *out);

#endif
