/* chat_eval.c - expressions of a template as values. Threads: any, a run is one thread's. */
#include <math.h>

#include "chat_internal.h"

/* ---- Names, attributes, items ---- */

static const bd_chat_value *find_binding(const bd_chat_run *run, uint32_t name) {
    for (const bd_chat_scope *scope = run->scope; scope; scope = scope->parent)
        for (const bd_chat_binding *b = scope->first; b; b = b->next)
            if (b->name == name) return &b->value;
    return bd_chat_given(&run->variables[name]) ? &run->variables[name] : NULL;
}

static void get_name(const bd_chat_run *run, uint32_t name, bd_chat_value *out) {
    const bd_chat_name *text = &run->tmpl->names[name];
    const bd_chat_value *found = find_binding(run, name);
    int function = found ? -1 : bd_chat_function_id(text->text, text->bytes);
    if (found)
        *out = *found;
    else if (function >= 0)
        *out = (bd_chat_value){.kind = BD_CHAT_FUNCTION, .integer = function};
    else
        *out = bd_chat_undefined(text->text, text->bytes);
}

bool bd_chat_define(bd_chat_run *run, uint32_t name, const bd_chat_value *value) {
    for (bd_chat_binding *b = run->scope->first; b; b = b->next) {
        if (b->name != name) continue;
        b->value = *value;
        return true;
    }
    bd_chat_binding *binding = bd_chat_alloc(run, 1, sizeof *binding);
    if (!binding) return false;
    *binding = (bd_chat_binding){name, *value, run->scope->first};
    run->scope->first = binding;
    return true;
}

static bool fail_undefined(bd_chat_run *run, const bd_chat_value *value) {
    return bd_chat_fail(run, BD_E_FORMAT, "'%.*s' is undefined",
                        value->bytes > 80 ? 80 : (int)value->bytes, value->text);
}

static bool bind_method(bd_chat_run *run, const bd_chat_value *object, int id, bd_chat_value *out) {
    bd_chat_method *method = bd_chat_alloc(run, 1, sizeof *method);
    if (!method) return false;
    *method = (bd_chat_method){*object, (uint32_t)id};
    *out = (bd_chat_value){.kind = BD_CHAT_METHOD, .method = method};
    return true;
}

/* Methods of Python's dict that would hide a member of that name and are not here. */
static bool is_hidden(const bd_chat_value *object, const char *name) {
    static const char *const names[] = {"clear",   "copy",       "fromkeys", "pop",
                                        "popitem", "setdefault", "update"};
    if (object->kind != BD_CHAT_DICT) return false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(names[i], name) == 0) return true;
    return false;
}

bool bd_chat_getattr(bd_chat_run *run, const bd_chat_value *object, const bd_chat_name *name,
                     bd_chat_value *out) {
    int method;
    *out = bd_chat_undefined(name->text, name->bytes);
    if (object->kind == BD_CHAT_UNDEFINED) return fail_undefined(run, object);
    if (object->kind == BD_CHAT_LOOP) return bd_chat_loop_attr(run, object->loop, name, out);
    if (bd_chat_has_method(object, name->text, name->bytes, &method))
        return bind_method(run, object, method, out);
    if (is_hidden(object, name->text))
        return bd_chat_fail(run, BD_E_UNSUPPORTED, "the method '%s' is not supported", name->text);
    if (object->kind != BD_CHAT_DICT && object->kind != BD_CHAT_NAMESPACE) return true;
    const bd_chat_value *found = bd_chat_dict_text(object->dict, name->text, name->bytes);
    if (found) *out = *found;
    return bd_chat_spend(run, object->dict->count / 4);
}

static bool get_index(bd_chat_run *run, const bd_chat_value *object, int64_t index,
                      bd_chat_value *out) {
    int64_t count = 0;
    if (object->kind == BD_CHAT_LIST && object->flavour > BD_CHAT_RANGE) return true;
    if (object->kind != BD_CHAT_LIST && object->kind != BD_CHAT_STRING) return true;
    if (!bd_chat_length(run, object, &count)) return false;
    if (index < 0) index += count;
    if (index < 0 || index >= count) return true;
    if (object->kind == BD_CHAT_STRING) return bd_chat_slice_text(run, object, index, 1, 1, out);
    *out = object->list->items[index];
    return true;
}

bool bd_chat_getitem(bd_chat_run *run, const bd_chat_value *object, const bd_chat_value *key,
                     bd_chat_value *out) {
    const bd_chat_value *found;
    int method;
    *out = bd_chat_undefined("an element", 10);
    if (key->kind == BD_CHAT_STRING) *out = bd_chat_undefined(key->text, key->bytes);
    if (object->kind == BD_CHAT_UNDEFINED) return fail_undefined(run, object);
    if (object->kind == BD_CHAT_DICT || object->kind == BD_CHAT_NAMESPACE) {
        if (object->kind == BD_CHAT_NAMESPACE && key->kind != BD_CHAT_STRING) return true;
        if (!bd_chat_dict_find(run, object->dict, key, &found)) return false;
        if (found) *out = *found;
        if (found) return true;
    }
    if (key->kind == BD_CHAT_STRING) {
        const bd_chat_name name = {key->text, key->bytes};
        if (object->kind == BD_CHAT_LOOP) return bd_chat_loop_attr(run, object->loop, &name, out);
        return !bd_chat_has_method(object, key->text, key->bytes, &method) ||
               bind_method(run, object, method, out);
    }
    if (key->kind == BD_CHAT_INT) return get_index(run, object, key->integer, out);
    if (key->kind == BD_CHAT_BOOL) return get_index(run, object, key->boolean, out);
    return true;
}

/* ---- Slices ---- */

static bool slice_bound(bd_chat_run *run, const bd_chat_node *node, int64_t *value, bool *given) {
    bd_chat_value number = bd_chat_none();
    if (node && !bd_chat_eval(run, node, &number)) return false;
    *given = number.kind == BD_CHAT_INT || number.kind == BD_CHAT_BOOL;
    if (*given) *value = number.kind == BD_CHAT_INT ? number.integer : number.boolean;
    return *given || number.kind == BD_CHAT_NONE ||
           bd_chat_fail(run, BD_E_FORMAT, "a slice takes integers, got %s",
                        bd_chat_type_name(&number));
}

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

static bool eval_slice(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value object;
    int64_t bounds[3] = {0, 0, 1}, count = 0;
    bool given[3];
    if (!bd_chat_eval(run, node->kids[0], &object)) return false;
    for (size_t i = 0; i < 3; i++)
        if (!slice_bound(run, node->kids[i + 1], &bounds[i], &given[i])) return false;
    if (object.kind == BD_CHAT_UNDEFINED) return fail_undefined(run, &object);
    bool list = object.kind == BD_CHAT_LIST && object.flavour <= BD_CHAT_RANGE;
    run->line = node->line;
    if (!list && object.kind != BD_CHAT_STRING)
        return bd_chat_fail(run, BD_E_FORMAT, "%s cannot be sliced", bd_chat_type_name(&object));
    if (!bd_chat_length(run, &object, &count)) return false;
    if (bounds[2] == 0) return bd_chat_fail(run, BD_E_FORMAT, "a slice by steps of 0");
    int64_t step = clamp(bounds[2], -count - 1, count + 1);
    int64_t low = step > 0 ? 0 : -1, high = step > 0 ? count : count - 1;
    int64_t from = step > 0 ? low : high, to = step > 0 ? high : low;
    if (given[0]) from = clamp(bounds[0] < 0 ? bounds[0] + count : bounds[0], low, high);
    if (given[1]) to = clamp(bounds[1] < 0 ? bounds[1] + count : bounds[1], low, high);
    int64_t distance = step > 0 ? to - from : from - to, stride = step > 0 ? step : -step;
    size_t taken = distance > 0 ? (size_t)((distance - 1) / stride + 1) : 0;
    if (!list) return bd_chat_slice_text(run, &object, from, step, taken, out);
    if (!bd_chat_list_new(run, (bd_chat_flavour)object.flavour, taken, out)) return false;
    for (size_t i = 0; i < taken; i++)
        if (!bd_chat_list_add(run, out, &object.list->items[from + (int64_t)i * step]))
            return false;
    return true;
}

/* ---- Arithmetic ---- */

static bool as_number(const bd_chat_value *value, bd_chat_value *out) {
    *out = value->kind == BD_CHAT_BOOL ? bd_chat_int(value->boolean) : *value;
    return out->kind == BD_CHAT_INT || out->kind == BD_CHAT_FLOAT;
}

static double as_double(const bd_chat_value *number) {
    return number->kind == BD_CHAT_INT ? (double)number->integer : number->number;
}

static bool integer_result(bd_chat_run *run, bd_chat_op op, int64_t a, int64_t b,
                           bd_chat_value *out) {
    int64_t result = 0;
    bool overflow = false;
    if (op == BD_CHAT_OP_ADD) overflow = __builtin_add_overflow(a, b, &result);
    if (op == BD_CHAT_OP_SUBTRACT) overflow = __builtin_sub_overflow(a, b, &result);
    if (op == BD_CHAT_OP_MULTIPLY) overflow = __builtin_mul_overflow(a, b, &result);
    if (op == BD_CHAT_OP_FLOOR_DIVIDE || op == BD_CHAT_OP_MODULO) {
        overflow = a == INT64_MIN && b == -1;
        int64_t quotient = overflow ? 0 : a / b, rest = overflow ? 0 : a % b;
        if (rest != 0 && (rest < 0) != (b < 0)) {
            quotient--;
            rest += b;
        }
        result = op == BD_CHAT_OP_MODULO ? rest : quotient;
    }
    *out = bd_chat_int(result);
    return !overflow || bd_chat_fail(run, BD_E_LIMIT, "an integer has more than 64 bits");
}

static double float_result(bd_chat_op op, double a, double b) {
    double rest;
    switch ((int)op) {
    case BD_CHAT_OP_ADD:
        return a + b;
    case BD_CHAT_OP_SUBTRACT:
        return a - b;
    case BD_CHAT_OP_MULTIPLY:
        return a * b;
    case BD_CHAT_OP_DIVIDE:
        return a / b;
    default:
        break;
    }
    /* In CPython's order, whose roundings and signs of zero these are. */
    rest = fmod(a, b);
    double quotient = (a - rest) / b;
    if (rest != 0 && (rest < 0) != (b < 0)) {
        rest += b;
        quotient -= 1;
    }
    if (op == BD_CHAT_OP_MODULO) return rest == 0 ? copysign(0, b) : rest;
    if (quotient == 0) return copysign(0, a / b);
    const double whole = floor(quotient);
    return quotient - whole > 0.5 ? whole + 1 : whole;
}

/* text * n and list * n, either way round. */
static bool repeat(bd_chat_run *run, const bd_chat_value *what, int64_t times, bd_chat_value *out) {
    if (times < 0) times = 0;
    if (what->kind == BD_CHAT_STRING) {
        bd_strbuf buf;
        if (what->bytes == 0) times = 0;
        if ((uint64_t)times > BD_CHAT_OUTPUT_BYTES_MAX || !bd_chat_spend(run, (uint64_t)times))
            return run->status != BD_OK || bd_chat_fail(run, BD_E_LIMIT, "a string is too long");
        bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
        for (int64_t i = 0; i < times && !buf.failed; i++)
            bd_strbuf_append(&buf, what->text, what->bytes);
        return bd_chat_take(run, &buf, out);
    }
    if (!bd_chat_list_new(run, (bd_chat_flavour)what->flavour, 0, out)) return false;
    for (int64_t i = 0; what->list->count > 0 && i < times; i++)
        for (size_t j = 0; j < what->list->count; j++)
            if (!bd_chat_list_add(run, out, &what->list->items[j])) return false;
    return true;
}

static bool is_repeatable(const bd_chat_value *value) {
    return value->kind == BD_CHAT_STRING ||
           (value->kind == BD_CHAT_LIST && value->flavour <= BD_CHAT_TUPLE);
}

static bool join_lists(bd_chat_run *run, const bd_chat_value *a, const bd_chat_value *b,
                       bd_chat_value *out) {
    if (!bd_chat_list_new(run, (bd_chat_flavour)a->flavour, a->list->count + b->list->count, out))
        return false;
    for (size_t i = 0; i < a->list->count; i++)
        if (!bd_chat_list_add(run, out, &a->list->items[i])) return false;
    for (size_t i = 0; i < b->list->count; i++)
        if (!bd_chat_list_add(run, out, &b->list->items[i])) return false;
    return true;
}

bool bd_chat_calculate(bd_chat_run *run, bd_chat_op op, const bd_chat_value *a,
                       const bd_chat_value *b, bd_chat_value *out) {
    bd_chat_value x, y;
    if (a->kind == BD_CHAT_UNDEFINED) return fail_undefined(run, a);
    if (b->kind == BD_CHAT_UNDEFINED) return fail_undefined(run, b);
    bool a_number = as_number(a, &x), b_number = as_number(b, &y);
    if (a_number && b_number) {
        bool whole = x.kind == BD_CHAT_INT && y.kind == BD_CHAT_INT && op != BD_CHAT_OP_DIVIDE;
        if (op >= BD_CHAT_OP_DIVIDE && as_double(&y) == 0)
            return bd_chat_fail(run, BD_E_FORMAT, "division by zero");
        if (whole) return integer_result(run, op, x.integer, y.integer, out);
        *out = bd_chat_float(float_result(op, as_double(&x), as_double(&y)));
        return true;
    }
    if (op == BD_CHAT_OP_MULTIPLY && is_repeatable(a) && y.kind == BD_CHAT_INT)
        return repeat(run, a, y.integer, out);
    if (op == BD_CHAT_OP_MULTIPLY && is_repeatable(b) && x.kind == BD_CHAT_INT)
        return repeat(run, b, x.integer, out);
    if (op == BD_CHAT_OP_ADD && a->kind == BD_CHAT_LIST && b->kind == BD_CHAT_LIST &&
        a->flavour == b->flavour && a->flavour <= BD_CHAT_TUPLE)
        return join_lists(run, a, b, out);
    if (op == BD_CHAT_OP_MODULO && a->kind == BD_CHAT_STRING)
        return bd_chat_fail(run, BD_E_UNSUPPORTED, "formatting by %% is not supported");
    return bd_chat_fail(run, BD_E_FORMAT, "%s and %s do not go together here", bd_chat_type_name(a),
                        bd_chat_type_name(b));
}

/* a + b + c ...: one buffer for all of it where it is text. */
static bool eval_sum(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    const bd_chat_node *terms[BD_CHAT_DEPTH_MAX], *at = node;
    size_t count = 0;
    bool joined = false, ok = true;
    for (; at->op == BD_CHAT_OP_ADD; at = at->kids[0])
        terms[count++] = at->kids[1];
    bd_chat_value term;
    if (!bd_chat_eval(run, at, out)) return false;
    bd_strbuf buf;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    while (count-- > 0 && ok) {
        bd_chat_value sum = *out;
        ok = bd_chat_eval(run, terms[count], &term);
        run->line = node->line;
        if (ok && out->kind == BD_CHAT_STRING && term.kind == BD_CHAT_STRING) {
            if (!joined) bd_strbuf_append(&buf, out->text, out->bytes);
            bd_strbuf_append(&buf, term.text, term.bytes);
            ok = bd_chat_spend(run, term.bytes / BD_CHAT_BYTES_PER_STEP) && !buf.failed;
            joined = true;
        } else if (ok) {
            ok = bd_chat_calculate(run, BD_CHAT_OP_ADD, &sum, &term, out);
        }
    }
    if (joined && run->status == BD_OK) return bd_chat_take(run, &buf, out);
    bd_strbuf_deinit(&buf);
    return ok;
}

static bool eval_two(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value left, right;
    if (!bd_chat_eval(run, node->kids[0], &left) || !bd_chat_eval(run, node->kids[1], &right))
        return false;
    run->line = node->line;
    return bd_chat_calculate(run, (bd_chat_op)node->op, &left, &right, out);
}

static bool eval_sign(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value value, zero = bd_chat_int(0);
    if (!bd_chat_eval(run, node->kids[0], &value)) return false;
    if (value.kind == BD_CHAT_FLOAT)
        *out = bd_chat_float(node->op == BD_CHAT_OP_NEGATE ? -value.number : value.number);
    else
        return bd_chat_calculate(
            run, node->op == BD_CHAT_OP_NEGATE ? BD_CHAT_OP_SUBTRACT : BD_CHAT_OP_ADD, &zero,
            &value, out);
    return true;
}

static bool eval_concat(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_strbuf buf;
    bool ok = true;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    for (uint32_t i = 0; i < node->count && ok; i++)
        ok = bd_chat_eval(run, node->kids[i], out) && bd_chat_write(run, out, &buf);
    if (ok) return bd_chat_take(run, &buf, out);
    bd_strbuf_deinit(&buf);
    return false;
}

/* ---- Comparison and logic ---- */

static bool compare(bd_chat_run *run, bd_chat_compare how, const bd_chat_value *a,
                    const bd_chat_value *b, bool *out) {
    int order;
    if (how == BD_CHAT_IN || how == BD_CHAT_NOT_IN) {
        if (!bd_chat_contains(run, a, b, out)) return false;
        *out = *out == (how == BD_CHAT_IN);
        return true;
    }
    if (how == BD_CHAT_EQ || how == BD_CHAT_NE) {
        if (!bd_chat_equal(run, a, b, out)) return false;
        *out = *out == (how == BD_CHAT_EQ);
        return true;
    }
    if (!bd_chat_order(run, a, b, &order)) return false;
    *out = how == BD_CHAT_LT   ? order == -1
           : how == BD_CHAT_LE ? order == -1 || order == 0
           : how == BD_CHAT_GT ? order == 1
                               : order == 1 || order == 0;
    return true;
}

static bool eval_compare(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value left, right;
    bool holds = true;
    if (!bd_chat_eval(run, node->kids[0], &left)) return false;
    for (uint32_t i = 1; i < node->count && holds; i++) {
        if (!bd_chat_eval(run, node->kids[i], &right)) return false;
        run->line = node->line;
        if (!compare(run, (bd_chat_compare)node->compare[i - 1], &left, &right, &holds))
            return false;
        left = right;
    }
    *out = bd_chat_bool(holds);
    return true;
}

static bool eval_logic(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    if (!bd_chat_eval(run, node->kids[0], out)) return false;
    if (bd_chat_truth(out) == (node->op == BD_CHAT_OP_OR)) return true;
    return bd_chat_eval(run, node->kids[1], out);
}

static bool eval_choice(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    if (!bd_chat_eval(run, node->kids[0], out)) return false;
    if (bd_chat_truth(out)) return bd_chat_eval(run, node->kids[1], out);
    if (node->kids[2]) return bd_chat_eval(run, node->kids[2], out);
    *out = bd_chat_undefined("an if without else", 18);
    return true;
}

/* ---- Calls ---- */

bool bd_chat_eval_args(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *items,
                       bd_chat_args *out) {
    for (uint32_t i = 1; i < node->count; i++)
        if (!bd_chat_eval(run, node->kids[i], &items[i - 1])) return false;
    *out = (bd_chat_args){items, node->count - 1, node->keyword_count, node->keywords};
    return true;
}

static bool eval_cycle(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    static const bd_chat_name index0 = {"index0", 6};
    bd_chat_value items[BD_CHAT_ARGUMENTS_MAX], loop, index;
    bd_chat_args args;
    if (!bd_chat_eval(run, node->kids[0]->kids[0], &loop) ||
        !bd_chat_eval_args(run, node, items, &args))
        return false;
    if (loop.kind != BD_CHAT_LOOP || args.count == 0)
        return bd_chat_fail(run, BD_E_FORMAT, "cycle belongs to a loop and takes values");
    if (!bd_chat_loop_attr(run, loop.loop, &index0, &index)) return false;
    *out = items[(uint64_t)index.integer % args.count];
    return true;
}

static bool eval_call(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    const bd_chat_node *callee = node->kids[0];
    bd_chat_value items[BD_CHAT_ARGUMENTS_MAX], function;
    bd_chat_args args;
    if (callee->op == BD_CHAT_OP_ATTR && strcmp(run->tmpl->names[callee->name].text, "cycle") == 0)
        return eval_cycle(run, node, out);
    if (!bd_chat_eval(run, callee, &function) || !bd_chat_eval_args(run, node, items, &args))
        return false;
    run->line = node->line;
    if (function.kind == BD_CHAT_FUNCTION)
        return bd_chat_call_function(run, (uint32_t)function.integer, &args, out);
    if (function.kind == BD_CHAT_METHOD)
        return bd_chat_call_method(run, function.method, &args, out);
    if (function.kind == BD_CHAT_MACRO) return bd_chat_call_macro(run, function.macro, &args, out);
    if (function.kind == BD_CHAT_UNDEFINED) return fail_undefined(run, &function);
    return bd_chat_fail(run, BD_E_FORMAT, "%s cannot be called", bd_chat_type_name(&function));
}

static bool eval_filter(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value items[BD_CHAT_ARGUMENTS_MAX], value;
    bd_chat_args args;
    if (node->kids[0] ? !bd_chat_eval(run, node->kids[0], &value) : !run->piped) return false;
    if (!node->kids[0]) value = *run->piped;
    if (!bd_chat_eval_args(run, node, items, &args)) return false;
    run->line = node->line;
    return bd_chat_apply_filter(run, node->id, &value, &args, out);
}

static bool eval_test(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value items[BD_CHAT_ARGUMENTS_MAX], value;
    bd_chat_args args;
    bool passed = false;
    if (!bd_chat_eval(run, node->kids[0], &value) || !bd_chat_eval_args(run, node, items, &args))
        return false;
    run->line = node->line;
    if (!bd_chat_apply_test(run, node->id, &value, &args, &passed)) return false;
    *out = bd_chat_bool(passed);
    return true;
}

/* ---- Literals ---- */

static bool eval_list(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value list, item;
    bd_chat_flavour flavour = node->op == BD_CHAT_OP_TUPLE ? BD_CHAT_TUPLE : BD_CHAT_PLAIN;
    if (!bd_chat_list_new(run, flavour, node->count, &list)) return false;
    for (uint32_t i = 0; i < node->count; i++)
        if (!bd_chat_eval(run, node->kids[i], &item) || !bd_chat_list_add(run, &list, &item))
            return false;
    *out = list;
    return true;
}

static bool eval_dict(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value dict, key, value;
    if (!bd_chat_dict_new(run, &dict)) return false;
    for (uint32_t i = 0; i + 1 < node->count; i += 2)
        if (!bd_chat_eval(run, node->kids[i], &key) ||
            !bd_chat_eval(run, node->kids[i + 1], &value) ||
            !bd_chat_dict_put(run, dict.dict, &key, &value))
            return false;
    *out = dict;
    return true;
}

static bool eval_item(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    bd_chat_value object, key;
    if (!bd_chat_eval(run, node->kids[0], &object)) return false;
    run->line = node->line;
    if (node->op == BD_CHAT_OP_ATTR)
        return bd_chat_getattr(run, &object, &run->tmpl->names[node->name], out);
    return bd_chat_eval(run, node->kids[1], &key) && bd_chat_getitem(run, &object, &key, out);
}

/* NOLINTNEXTLINE(readability-function-size): one line per kind of node */
static bool eval_node(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    switch ((int)node->op) {
    case BD_CHAT_OP_CONST:
        *out = node->value;
        return true;
    case BD_CHAT_OP_NAME:
        get_name(run, node->name, out);
        return true;
    case BD_CHAT_OP_LIST:
    case BD_CHAT_OP_TUPLE:
        return eval_list(run, node, out);
    case BD_CHAT_OP_DICT:
        return eval_dict(run, node, out);
    case BD_CHAT_OP_ATTR:
    case BD_CHAT_OP_ITEM:
        return eval_item(run, node, out);
    case BD_CHAT_OP_SLICE:
        return eval_slice(run, node, out);
    case BD_CHAT_OP_CALL:
        return eval_call(run, node, out);
    case BD_CHAT_OP_FILTER:
        return eval_filter(run, node, out);
    case BD_CHAT_OP_TEST:
        return eval_test(run, node, out);
    case BD_CHAT_OP_NOT:
        if (!bd_chat_eval(run, node->kids[0], out)) return false;
        *out = bd_chat_bool(!bd_chat_truth(out));
        return true;
    case BD_CHAT_OP_NEGATE:
    case BD_CHAT_OP_PLUS:
        return eval_sign(run, node, out);
    case BD_CHAT_OP_AND:
    case BD_CHAT_OP_OR:
        return eval_logic(run, node, out);
    case BD_CHAT_OP_COMPARE:
        return eval_compare(run, node, out);
    case BD_CHAT_OP_ADD:
        return eval_sum(run, node, out);
    case BD_CHAT_OP_SUBTRACT:
    case BD_CHAT_OP_MULTIPLY:
    case BD_CHAT_OP_DIVIDE:
    case BD_CHAT_OP_FLOOR_DIVIDE:
    case BD_CHAT_OP_MODULO:
        return eval_two(run, node, out);
    case BD_CHAT_OP_CONCAT:
        return eval_concat(run, node, out);
    default:
        return eval_choice(run, node, out);
    }
}

bool bd_chat_eval(bd_chat_run *run, const bd_chat_node *node, bd_chat_value *out) {
    if (!bd_chat_spend(run, 1) || !bd_chat_enter(run)) return false;
    run->line = node->line;
    bool ok = eval_node(run, node, out);
    bd_chat_leave(run);
    return ok;
}
