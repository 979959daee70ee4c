/* chat_tests.c - tests ("is defined") and global functions of templates. Threads: any, a run is one
 * thread's. */
#include <time.h>
#include <utf8proc.h>

#include "chat_internal.h"

/* ---- Tests ---- */

typedef enum bd_chat_test {
    TEST_DEFINED,
    TEST_UNDEFINED,
    TEST_NONE,
    TEST_STRING,
    TEST_MAPPING,
    TEST_ITERABLE,
    TEST_SEQUENCE,
    TEST_NUMBER,
    TEST_INTEGER,
    TEST_FLOAT,
    TEST_BOOLEAN,
    TEST_TRUE,
    TEST_FALSE,
    TEST_CALLABLE,
    TEST_ODD,
    TEST_EVEN,
    TEST_LOWER,
    TEST_UPPER,
    TEST_WITH_ARGUMENT, /* those below take one */
    TEST_EQ = TEST_WITH_ARGUMENT,
    TEST_NE,
    TEST_LT,
    TEST_LE,
    TEST_GT,
    TEST_GE,
    TEST_IN,
    TEST_DIVISIBLE,
} bd_chat_test;

static const struct {
    const char *name;
    bd_chat_test test;
} tests[] = {
    {"defined", TEST_DEFINED},
    {"undefined", TEST_UNDEFINED},
    {"none", TEST_NONE},
    {"string", TEST_STRING},
    {"mapping", TEST_MAPPING},
    {"iterable", TEST_ITERABLE},
    {"sequence", TEST_SEQUENCE},
    {"number", TEST_NUMBER},
    {"integer", TEST_INTEGER},
    {"float", TEST_FLOAT},
    {"boolean", TEST_BOOLEAN},
    {"true", TEST_TRUE},
    {"false", TEST_FALSE},
    {"callable", TEST_CALLABLE},
    {"odd", TEST_ODD},
    {"even", TEST_EVEN},
    {"lower", TEST_LOWER},
    {"upper", TEST_UPPER},
    {"eq", TEST_EQ},
    {"equalto", TEST_EQ},
    {"==", TEST_EQ},
    {"ne", TEST_NE},
    {"!=", TEST_NE},
    {"lt", TEST_LT},
    {"lessthan", TEST_LT},
    {"<", TEST_LT},
    {"le", TEST_LE},
    {"<=", TEST_LE},
    {"gt", TEST_GT},
    {"greaterthan", TEST_GT},
    {">", TEST_GT},
    {"ge", TEST_GE},
    {">=", TEST_GE},
    {"in", TEST_IN},
    {"divisibleby", TEST_DIVISIBLE},
};
enum { TEST_NAME_COUNT = sizeof tests / sizeof tests[0] };

int bd_chat_test_id(const char *name, size_t bytes) {
    for (int i = 0; i < TEST_NAME_COUNT; i++)
        if (strlen(tests[i].name) == bytes && memcmp(tests[i].name, name, bytes) == 0) return i;
    return -1;
}

static bool is_iterable(const bd_chat_value *value) {
    return value->kind == BD_CHAT_UNDEFINED || value->kind == BD_CHAT_STRING ||
           value->kind == BD_CHAT_LIST || value->kind == BD_CHAT_DICT ||
           value->kind == BD_CHAT_LOOP;
}

static bool is_sequence(const bd_chat_value *value) {
    return value->kind == BD_CHAT_UNDEFINED || value->kind == BD_CHAT_STRING ||
           value->kind == BD_CHAT_DICT ||
           (value->kind == BD_CHAT_LIST && value->flavour <= BD_CHAT_RANGE);
}

/* Cased characters are there, and all are of that case. */
static bool has_case(const bd_chat_value *text, bool upper) {
    bool any = false;
    size_t length;
    for (size_t i = 0; i < text->bytes; i += length) {
        utf8proc_int32_t c =
            (utf8proc_int32_t)bd_chat_code_at(text->text + i, text->bytes - i, &length);
        if (upper ? utf8proc_islower(c) : utf8proc_isupper(c)) return false;
        any = any || utf8proc_islower(c) || utf8proc_isupper(c);
    }
    return any;
}

static bool divides(bd_chat_run *run, const bd_chat_value *value, const bd_chat_value *by,
                    int64_t rest, bool *out) {
    const bd_chat_value wanted = bd_chat_int(rest);
    bd_chat_value left;
    return bd_chat_calculate(run, BD_CHAT_OP_MODULO, value, by, &left) &&
           bd_chat_equal(run, &left, &wanted, out);
}

static bool test_case(bd_chat_run *run, const bd_chat_value *value, bool upper, bool *out) {
    bd_chat_value text;
    if (!bd_chat_to_text(run, value, &text)) return false;
    *out = has_case(&text, upper);
    return bd_chat_spend(run, text.bytes / 16);
}

static bool plain_test(bd_chat_run *run, bd_chat_test test, const bd_chat_value *value, bool *out) {
    const bd_chat_value two = bd_chat_int(2);
    bool is_bool = value->kind == BD_CHAT_BOOL;
    switch ((int)test) {
    case TEST_DEFINED:
    case TEST_UNDEFINED:
        *out = (value->kind == BD_CHAT_UNDEFINED) == (test == TEST_UNDEFINED);
        return true;
    case TEST_NONE:
        *out = value->kind == BD_CHAT_NONE;
        return true;
    case TEST_STRING:
        *out = value->kind == BD_CHAT_STRING;
        return true;
    case TEST_MAPPING:
        *out = value->kind == BD_CHAT_DICT;
        return true;
    case TEST_ITERABLE:
        *out = is_iterable(value);
        return true;
    case TEST_SEQUENCE:
        *out = is_sequence(value);
        return true;
    case TEST_NUMBER:
        *out = is_bool || value->kind == BD_CHAT_INT || value->kind == BD_CHAT_FLOAT;
        return true;
    case TEST_INTEGER:
        *out = value->kind == BD_CHAT_INT;
        return true;
    case TEST_FLOAT:
        *out = value->kind == BD_CHAT_FLOAT;
        return true;
    case TEST_BOOLEAN:
        *out = is_bool;
        return true;
    case TEST_TRUE:
    case TEST_FALSE:
        *out = is_bool && value->boolean == (test == TEST_TRUE);
        return true;
    case TEST_CALLABLE:
        /* Jinja's undefined has a call, which fails. */
        *out = value->kind >= BD_CHAT_MACRO || value->kind == BD_CHAT_UNDEFINED;
        return true;
    case TEST_ODD:
    case TEST_EVEN:
        return divides(run, value, &two, test == TEST_ODD, out);
    default:
        return test_case(run, value, test == TEST_UPPER, out);
    }
}

bool bd_chat_apply_test(bd_chat_run *run, uint32_t id, const bd_chat_value *value,
                        const bd_chat_args *args, bool *out) {
    bd_chat_test test = tests[id].test;
    size_t wanted = test >= TEST_WITH_ARGUMENT ? 1 : 0;
    int order;
    if (args->count != wanted || args->keyword_count > 0)
        return bd_chat_fail(run, BD_E_FORMAT, "the test %s takes %zu argument%s", tests[id].name,
                            wanted, bd_plural(wanted));
    const bd_chat_value *other = args->items;
    if (test < TEST_WITH_ARGUMENT) return plain_test(run, test, value, out);
    if (test == TEST_IN) return bd_chat_contains(run, value, other, out);
    if (test == TEST_DIVISIBLE) return divides(run, value, other, 0, out);
    if (test == TEST_EQ || test == TEST_NE) {
        if (!bd_chat_equal(run, value, other, out)) return false;
        *out = *out == (test == TEST_EQ);
        return true;
    }
    if (!bd_chat_order(run, value, other, &order)) return false;
    *out = test == TEST_LT   ? order == -1
           : test == TEST_LE ? order == -1 || order == 0
           : test == TEST_GT ? order == 1
                             : order == 1 || order == 0;
    return true;
}

/* ---- Arguments ---- */

bool bd_chat_bind(bd_chat_run *run, const char *what, const char *const *parameters, size_t count,
                  const bd_chat_args *args, bd_chat_value *out) {
    size_t positional = args->count - args->keyword_count;
    for (size_t i = 0; i < count; i++)
        out[i] = i < positional ? args->items[i] : bd_chat_undefined(NULL, 0);
    for (size_t i = 0; i < positional && i < count; i++)
        if (!bd_chat_given(&out[i])) out[i].text = "an argument";
    if (positional > count)
        return bd_chat_fail(run, BD_E_FORMAT, "%s takes at most %zu argument%s", what, count,
                            bd_plural(count));
    for (size_t i = 0; i < args->keyword_count; i++) {
        const bd_chat_name *name = &run->tmpl->names[args->keywords[i]];
        size_t at = 0;
        while (at < count && strcmp(parameters[at], name->text) != 0)
            at++;
        if (at == count)
            return bd_chat_fail(run, BD_E_UNSUPPORTED, "%s has no argument '%.40s'", what,
                                name->text);
        out[at] = args->items[positional + i];
    }
    return true;
}

/* ---- Global functions ---- */

enum { FUNCTION_RAISE, FUNCTION_STRFTIME, FUNCTION_RANGE, FUNCTION_NAMESPACE, FUNCTION_DICT };
static const char *const functions[] = {"raise_exception", "strftime_now", "range", "namespace",
                                        "dict"};

int bd_chat_function_id(const char *name, size_t bytes) {
    for (int i = 0; i <= FUNCTION_DICT; i++)
        if (strlen(functions[i]) == bytes && memcmp(functions[i], name, bytes) == 0) return i;
    return -1;
}

static bool raise_exception(bd_chat_run *run, const bd_chat_value *message) {
    bd_chat_value text;
    if (!bd_chat_to_text(run, message, &text)) return false;
    run->status = bd_fail(run->err, BD_E_ARGUMENT, run->tmpl->subject, "%.*s",
                          text.bytes > 400 ? 400 : (int)text.bytes, text.text);
    return false;
}

static bool strftime_now(bd_chat_run *run, const bd_chat_value *format, bd_chat_value *out) {
    char pattern[128], text[512];
    time_t seconds = (time_t)run->now_s;
    struct tm now;
    if (format->kind != BD_CHAT_STRING || format->bytes >= sizeof pattern ||
        !localtime_r(&seconds, &now))
        return bd_chat_fail(run, BD_E_FORMAT, "strftime_now needs a short format");
    memcpy(pattern, format->text, format->bytes);
    pattern[format->bytes] = '\0';
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* the template's own; strftime is bounded */
    size_t bytes = strftime(text, sizeof text, pattern, &now);
#pragma GCC diagnostic pop
    char *copy = bd_chat_alloc(run, bytes, 1);
    if (!copy) return false;
    memcpy(copy, text, bytes);
    *out = bd_chat_text(copy, bytes);
    return true;
}

static bool range(bd_chat_run *run, const bd_chat_args *args, bd_chat_value *out) {
    int64_t numbers[3] = {0, 0, 1};
    if (args->count < 1 || args->count > 3 || args->keyword_count > 0)
        return bd_chat_fail(run, BD_E_FORMAT, "range takes 1 to 3 integers");
    for (size_t i = 0; i < args->count; i++) {
        const bd_chat_value *number = &args->items[i];
        if (number->kind != BD_CHAT_INT && number->kind != BD_CHAT_BOOL)
            return bd_chat_fail(run, BD_E_FORMAT, "range takes integers, got %s",
                                bd_chat_type_name(number));
        numbers[args->count == 1 ? 1 : i] =
            number->kind == BD_CHAT_INT ? number->integer : number->boolean;
    }
    int64_t from = numbers[0], to = numbers[1], step = numbers[2];
    if (step == 0) return bd_chat_fail(run, BD_E_FORMAT, "range by steps of 0");
    if (!bd_chat_list_new(run, BD_CHAT_RANGE, 0, out)) return false;
    for (int64_t at = from; step > 0 ? at < to : at > to;) {
        bd_chat_value number = bd_chat_int(at);
        if (out->list->count == BD_CHAT_RANGE_MAX)
            return bd_chat_fail(run, BD_E_LIMIT, "range of more than %d numbers",
                                BD_CHAT_RANGE_MAX);
        if (!bd_chat_list_add(run, out, &number)) return false;
        if (__builtin_add_overflow(at, step, &at)) break;
    }
    return true;
}

/* namespace(...) and dict(...): a mapping's members, then named arguments. */
static bool make_mapping(bd_chat_run *run, bd_chat_kind kind, const bd_chat_args *args,
                         bd_chat_value *out) {
    size_t positional = args->count - args->keyword_count;
    if (positional > 1 || (positional == 1 && args->items[0].kind != BD_CHAT_DICT))
        return bd_chat_fail(run, BD_E_UNSUPPORTED,
                            "this use of namespace or dict is not supported");
    if (!bd_chat_dict_new(run, out)) return false;
    for (size_t i = 0; positional == 1 && i < args->items[0].dict->count; i++)
        if (!bd_chat_dict_put(run, out->dict, &args->items[0].dict->keys[i],
                              &args->items[0].dict->values[i]))
            return false;
    for (size_t i = 0; i < args->keyword_count; i++) {
        const bd_chat_name *name = &run->tmpl->names[args->keywords[i]];
        bd_chat_value key = bd_chat_text(name->text, name->bytes);
        if (!bd_chat_dict_put(run, out->dict, &key, &args->items[positional + i])) return false;
    }
    out->kind = (uint8_t)kind;
    return true;
}

bool bd_chat_call_function(bd_chat_run *run, uint32_t id, const bd_chat_args *args,
                           bd_chat_value *out) {
    static const char *const parameters[] = {"message", "format"};
    bd_chat_value bound = {0};
    if (id == FUNCTION_RANGE) return range(run, args, out);
    if (id == FUNCTION_NAMESPACE) return make_mapping(run, BD_CHAT_NAMESPACE, args, out);
    if (id == FUNCTION_DICT) return make_mapping(run, BD_CHAT_DICT, args, out);
    if (!bd_chat_bind(run, functions[id], &parameters[id], 1, args, &bound)) return false;
    return id == FUNCTION_RAISE ? raise_exception(run, &bound) : strftime_now(run, &bound, out);
}
