/* chat_render.c - statements of a template: text, scopes, loops, macros; and the public rendering.
 * Scopes are as Jinja has them: loops, macros and {% set %} bodies have their own, {% if %} has
 * none. Threads: any, a run is one thread's. */
#include <stdio.h>

#include "chat_internal.h"

typedef struct bd_chat_loop {
    bd_chat_list items;
    size_t next;              /* of items */
    const bd_chat_node *node; /* NULL: no condition, or all of it has been applied */
    bd_chat_scope *scope;     /* outside the loop */
    int64_t index0;
    int64_t length; /* -1: not known yet */
    bd_chat_value before, current, after;
    bool has_before, has_after;
} bd_chat_loop;

/* ---- What every part uses ---- */

bool bd_chat_fail(bd_chat_run *run, bd_status status, const char *format, ...) {
    char message[400];
    va_list args;
    if (run->status != BD_OK) return false;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    run->status = bd_fail(run->err, status, run->tmpl->subject, "line %u: %s", run->line, message);
    return false;
}

bool bd_chat_spend(bd_chat_run *run, uint64_t steps) {
    if (run->steps_left < steps)
        return bd_chat_fail(run, BD_E_LIMIT, "the template takes too many steps");
    run->steps_left -= steps;
    return true;
}

void *bd_chat_alloc(bd_chat_run *run, size_t count, size_t size_bytes) {
    void *memory = bd_arena_alloc(run->arena, count, size_bytes);
    if (memory) return memory;
    if (bd_arena_used_bytes(run->arena) > BD_CHAT_ARENA_BYTES_MAX / 4)
        (void)bd_chat_fail(run, BD_E_LIMIT, "the template takes too much memory");
    else
        (void)bd_chat_fail(run, BD_E_MEMORY, "out of memory");
    return NULL;
}

bool bd_chat_enter(bd_chat_run *run) {
    if (run->depth >= BD_CHAT_RUN_DEPTH_MAX)
        return bd_chat_fail(run, BD_E_LIMIT, "nested too deeply");
    run->depth++;
    return true;
}

static bool fail_buffer(bd_chat_run *run, const bd_strbuf *buf) {
    if (buf->max_bytes > 0 && buf->len_bytes > buf->max_bytes / 4)
        return bd_chat_fail(run, BD_E_LIMIT, "the text is too long");
    return bd_chat_fail(run, BD_E_MEMORY, "out of memory");
}

bool bd_chat_take(bd_chat_run *run, bd_strbuf *text, bd_chat_value *out) {
    bool ok = !text->failed || fail_buffer(run, text);
    char *copy = ok ? bd_chat_alloc(run, text->len_bytes, 1) : NULL;
    if (copy && text->len_bytes > 0) memcpy(copy, text->data, text->len_bytes);
    *out = bd_chat_text(copy, text->len_bytes);
    bd_strbuf_deinit(text);
    return copy != NULL;
}

static bool open_scope(bd_chat_run *run, bd_chat_scope *parent) {
    bd_chat_scope *scope = bd_chat_alloc(run, 1, sizeof *scope);
    if (!scope) return false;
    scope->parent = parent;
    run->scope = scope;
    return true;
}

/* The text of a body, run in the current scope. */
static bool capture(bd_chat_run *run, const bd_chat_node *body, bd_chat_value *out) {
    bd_strbuf buf, *outer = run->out;
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    run->out = &buf;
    bool ok = bd_chat_exec(run, body);
    run->out = outer;
    if (ok) return bd_chat_take(run, &buf, out);
    bd_strbuf_deinit(&buf);
    return false;
}

static bool assign(bd_chat_run *run, const bd_chat_node *target, const bd_chat_value *value) {
    bd_chat_list items;
    if (target->op == BD_CHAT_OP_NAME) return bd_chat_define(run, target->name, value);
    if (target->op == BD_CHAT_OP_NS_ATTR) {
        const bd_chat_name *name = &run->tmpl->names[target->id];
        const bd_chat_node space = {
            .op = BD_CHAT_OP_NAME, .line = target->line, .name = target->name};
        bd_chat_value object, key = bd_chat_text(name->text, name->bytes);
        if (!bd_chat_eval(run, &space, &object)) return false;
        if (object.kind != BD_CHAT_NAMESPACE)
            return bd_chat_fail(run, BD_E_FORMAT, "'%.80s' is not a namespace",
                                run->tmpl->names[target->name].text);
        return bd_chat_dict_put(run, object.dict, &key, value);
    }
    if (!bd_chat_elements(run, value, &items)) return false;
    if (items.count != target->count)
        return bd_chat_fail(run, BD_E_FORMAT, "%zu values for %u names", items.count,
                            target->count);
    for (uint32_t i = 0; i < target->count; i++)
        if (!assign(run, target->kids[i], &items.items[i])) return false;
    return true;
}

/* ---- Loops ---- */

/* The next element that passes the condition; it sees the loop's targets alone. */
static bool fetch(bd_chat_run *run, bd_chat_loop *loop, bd_chat_value *out, bool *have) {
    *have = false;
    while (loop->next < loop->items.count && !*have) {
        *out = loop->items.items[loop->next++];
        *have = true;
        if (!loop->node) continue;
        bd_chat_scope *scope = run->scope;
        bd_chat_value passed;
        bool ok = open_scope(run, loop->scope) && assign(run, loop->node->kids[0], out) &&
                  bd_chat_eval(run, loop->node->kids[2], &passed);
        run->scope = scope;
        if (!ok) return false;
        *have = bd_chat_truth(&passed);
    }
    return true;
}

static bool peek(bd_chat_run *run, bd_chat_loop *loop) {
    return loop->has_after || fetch(run, loop, &loop->after, &loop->has_after);
}

static bool advance(bd_chat_run *run, bd_chat_loop *loop, bool *have) {
    if (!peek(run, loop)) return false;
    *have = loop->has_after;
    if (!*have) return true;
    loop->has_before = ++loop->index0 > 0;
    loop->before = loop->current;
    loop->current = loop->after;
    loop->has_after = false;
    return true;
}

/* All that is left is fetched now. */
static bool measure(bd_chat_run *run, bd_chat_loop *loop) {
    bd_chat_value rest, item;
    bool have = true;
    if (loop->length >= 0) return true;
    if (!bd_chat_list_new(run, BD_CHAT_PLAIN, 0, &rest)) return false;
    for (;;) {
        if (!fetch(run, loop, &item, &have)) return false;
        if (!have) break;
        if (!bd_chat_list_add(run, &rest, &item)) return false;
    }
    loop->items = *rest.list;
    loop->next = 0;
    loop->node = NULL;
    loop->length = loop->index0 + 1 + loop->has_after + (int64_t)rest.list->count;
    return true;
}

bool bd_chat_loop_attr(bd_chat_run *run, bd_chat_loop *loop, const bd_chat_name *name,
                       bd_chat_value *out) {
    static const char *const names[] = {"index0",   "index",     "first",    "last",
                                        "length",   "revindex0", "revindex", "previtem",
                                        "nextitem", "depth",     "depth0"};
    enum { INDEX0, INDEX, FIRST, LAST, LENGTH, REV0, REV, PREVIOUS, NEXT, DEPTH, DEPTH0, COUNT };
    int which = 0;
    while (which < COUNT &&
           (strlen(names[which]) != name->bytes || memcmp(names[which], name->text, name->bytes)))
        which++;
    bool ahead = which == LAST || which == NEXT, whole = which >= LENGTH && which <= REV;
    if ((ahead && !peek(run, loop)) || (whole && !measure(run, loop))) return false;
    switch (which) {
    case INDEX0:
    case INDEX:
        *out = bd_chat_int(loop->index0 + (which == INDEX));
        return true;
    case FIRST:
        *out = bd_chat_bool(loop->index0 == 0);
        return true;
    case LAST:
        *out = bd_chat_bool(!loop->has_after);
        return true;
    case LENGTH:
        *out = bd_chat_int(loop->length);
        return true;
    case REV0:
    case REV:
        *out = bd_chat_int(loop->length - loop->index0 - (which == REV0));
        return true;
    case PREVIOUS:
        *out = loop->has_before ? loop->before : bd_chat_undefined("there is no previous item", 25);
        return true;
    case NEXT:
        *out = loop->has_after ? loop->after : bd_chat_undefined("there is no next item", 21);
        return true;
    case DEPTH:
    case DEPTH0:
        *out = bd_chat_int(which == DEPTH);
        return true;
    default:
        *out = bd_chat_undefined("an attribute of loop", 20);
        return true;
    }
}

static bool find_loop_name(const bd_chat_run *run, uint32_t *name) {
    for (*name = 0; *name < run->tmpl->name_count; (*name)++)
        if (strcmp(run->tmpl->names[*name].text, "loop") == 0) return true;
    return false;
}

/* As Jinja has it, "else" also runs when no turn reached its end. */
static bool turns(bd_chat_run *run, const bd_chat_node *node, bd_chat_loop *loop, bool *ended) {
    uint32_t loop_name;
    bool named = find_loop_name(run, &loop_name), have;
    const bd_chat_value self = {.kind = BD_CHAT_LOOP, .loop = loop};
    for (*ended = false;;) {
        if (!advance(run, loop, &have)) return false;
        if (!have) return true;
        if (!open_scope(run, loop->scope) || (named && !bd_chat_define(run, loop_name, &self)) ||
            !assign(run, node->kids[0], &loop->current) || !bd_chat_exec(run, node->kids[3]))
            return false;
        bool stop = run->flow == BD_CHAT_BREAK;
        if (run->flow == BD_CHAT_GO_ON) *ended = true;
        run->flow = BD_CHAT_GO_ON;
        if (stop) return true;
    }
}

static bool exec_for(bd_chat_run *run, const bd_chat_node *node) {
    bd_chat_value sequence;
    bd_chat_scope *scope = run->scope;
    bool ended = false;
    bd_chat_loop *loop = bd_chat_alloc(run, 1, sizeof *loop);
    if (!loop || !bd_chat_eval(run, node->kids[1], &sequence) ||
        !bd_chat_elements(run, &sequence, &loop->items))
        return false;
    loop->node = node->kids[2] ? node : NULL;
    loop->scope = scope;
    loop->index0 = -1;
    loop->length = loop->node ? -1 : (int64_t)loop->items.count;
    bool ok = turns(run, node, loop, &ended);
    run->scope = scope;
    if (!ok || ended || !node->kids[4]) return ok;
    ok = open_scope(run, scope) && bd_chat_exec(run, node->kids[4]);
    run->scope = scope;
    return ok;
}

/* ---- Macros ---- */

static bool bind_parameters(bd_chat_run *run, const bd_chat_node *node, const bd_chat_args *args) {
    const char *names[BD_CHAT_ARGUMENTS_MAX] = {NULL};
    bd_chat_value bound[BD_CHAT_ARGUMENTS_MAX];
    uint32_t count = node->id, first_default = count - (node->count - count - 1);
    for (uint32_t i = 0; i < count; i++)
        names[i] = run->tmpl->names[node->kids[i]->name].text;
    if (!bd_chat_bind(run, run->tmpl->names[node->name].text, names, count, args, bound))
        return false;
    for (uint32_t i = 0; i < count; i++) {
        if (!bd_chat_given(&bound[i])) {
            bound[i] = bd_chat_undefined(names[i], strlen(names[i]));
            if (i >= first_default &&
                !bd_chat_eval(run, node->kids[count + 1 + i - first_default], &bound[i]))
                return false;
        }
        if (!bd_chat_define(run, node->kids[i]->name, &bound[i])) return false;
    }
    return true;
}

bool bd_chat_call_macro(bd_chat_run *run, const bd_chat_macro *macro, const bd_chat_args *args,
                        bd_chat_value *out) {
    bd_chat_scope *scope = run->scope;
    bool ok = open_scope(run, macro->scope) && bind_parameters(run, macro->node, args) &&
              capture(run, macro->node->kids[macro->node->id], out);
    run->scope = scope;
    return ok;
}

/* ---- Statements ---- */

static bool exec_output(bd_chat_run *run, const bd_chat_node *node) {
    bd_chat_value value;
    if (!bd_chat_eval(run, node->kids[0], &value) || !bd_chat_write(run, &value, run->out))
        return false;
    return !run->out->failed || fail_buffer(run, run->out);
}

static bool exec_text(bd_chat_run *run, const bd_chat_node *node) {
    bd_strbuf_append(run->out, node->value.text, node->value.bytes);
    if (run->out->failed) return fail_buffer(run, run->out);
    return bd_chat_spend(run, node->value.bytes / BD_CHAT_BYTES_PER_STEP);
}

static bool exec_set(bd_chat_run *run, const bd_chat_node *node) {
    bd_chat_value value, body = bd_chat_none();
    bd_chat_scope *scope = run->scope;
    if (node->op == BD_CHAT_OP_SET)
        return bd_chat_eval(run, node->kids[1], &value) && assign(run, node->kids[0], &value);
    bool ok = open_scope(run, scope) && capture(run, node->kids[2], &body);
    run->scope = scope;
    const bd_chat_value *outer = run->piped;
    value = body;
    run->piped = &body;
    ok = ok && (!node->kids[1] || bd_chat_eval(run, node->kids[1], &value));
    run->piped = outer;
    return ok && assign(run, node->kids[0], &value);
}

static bool exec_if(bd_chat_run *run, const bd_chat_node *node) {
    bd_chat_value condition;
    for (uint32_t i = 0; i + 1 < node->count; i += 2) {
        if (!bd_chat_eval(run, node->kids[i], &condition)) return false;
        if (bd_chat_truth(&condition)) return bd_chat_exec(run, node->kids[i + 1]);
    }
    return node->count % 2 == 0 || bd_chat_exec(run, node->kids[node->count - 1]);
}

static bool exec_macro(bd_chat_run *run, const bd_chat_node *node) {
    bd_chat_macro *macro = bd_chat_alloc(run, 1, sizeof *macro);
    if (!macro) return false;
    *macro = (bd_chat_macro){node, run->scope};
    const bd_chat_value value = {.kind = BD_CHAT_MACRO, .macro = macro};
    return bd_chat_define(run, node->name, &value);
}

static bool exec_scope(bd_chat_run *run, const bd_chat_node *node) {
    bd_chat_scope *scope = run->scope;
    bool ok = open_scope(run, scope) && bd_chat_exec(run, node->kids[0]);
    run->scope = scope;
    return ok;
}

static bool exec_body(bd_chat_run *run, const bd_chat_node *node) {
    for (uint32_t i = 0; i < node->count && run->flow == BD_CHAT_GO_ON; i++)
        if (!bd_chat_exec(run, node->kids[i])) return false;
    return true;
}

static bool exec_node(bd_chat_run *run, const bd_chat_node *node) {
    switch ((int)node->op) {
    case BD_CHAT_OP_BODY:
        return exec_body(run, node);
    case BD_CHAT_OP_TEXT:
        return exec_text(run, node);
    case BD_CHAT_OP_OUTPUT:
        return exec_output(run, node);
    case BD_CHAT_OP_SET:
    case BD_CHAT_OP_SET_BODY:
        return exec_set(run, node);
    case BD_CHAT_OP_FOR:
        return exec_for(run, node);
    case BD_CHAT_OP_IF:
        return exec_if(run, node);
    case BD_CHAT_OP_MACRO:
        return exec_macro(run, node);
    case BD_CHAT_OP_SCOPE:
        return exec_scope(run, node);
    default:
        run->flow = node->op == BD_CHAT_OP_BREAK ? BD_CHAT_BREAK : BD_CHAT_CONTINUE;
        return true;
    }
}

bool bd_chat_exec(bd_chat_run *run, const bd_chat_node *node) {
    if (!bd_chat_spend(run, 1) || !bd_chat_enter(run)) return false;
    run->line = node->line;
    bool ok = exec_node(run, node);
    bd_chat_leave(run);
    return ok;
}

/* ---- The public rendering ---- */

static void set_variable(const bd_chat_run *run, bd_chat_value *variables, const char *name,
                         size_t bytes, const bd_chat_value *value) {
    for (uint32_t i = 0; i < run->tmpl->name_count; i++)
        if (run->tmpl->names[i].bytes == bytes &&
            memcmp(run->tmpl->names[i].text, name, bytes) == 0)
            variables[i] = *value;
}

static bool read_variables(bd_chat_run *run, const bd_chat_variable *variables, size_t count,
                           bd_chat_value *values) {
    for (size_t i = 0; i < count; i++) {
        const bd_chat_variable *variable = &variables[i];
        bd_chat_value value = bd_chat_text(variable->text, variable->text_bytes);
        const char *at = variable->json;
        if (!variable->text && !bd_chat_read_json(run, &at, &value)) return false;
        if (variable->name) {
            set_variable(run, values, variable->name, strlen(variable->name), &value);
            continue;
        }
        if (value.kind != BD_CHAT_DICT)
            return bd_chat_fail(run, BD_E_FORMAT, "variables must be an object");
        for (size_t j = 0; j < value.dict->count; j++)
            set_variable(run, values, value.dict->keys[j].text, value.dict->keys[j].bytes,
                         &value.dict->values[j]);
    }
    return true;
}

bd_status bd_chat_template_render(const bd_chat_template *tmpl, const bd_chat_variable *variables,
                                  size_t variable_count, int64_t now_s, bd_strbuf *out,
                                  bd_error *err) {
    bd_chat_run run = {.tmpl = tmpl,
                       .err = err,
                       .steps_left = BD_CHAT_STEPS_MAX,
                       .now_s = now_s,
                       .out = out,
                       .line = 1};
    run.arena = bd_arena_create((size_t)16 << 10, BD_CHAT_ARENA_BYTES_MAX);
    if (!run.arena) return bd_fail(err, BD_E_MEMORY, tmpl->subject, "out of memory");
    bd_chat_value *values = bd_chat_alloc(&run, tmpl->name_count, sizeof *values);
    for (uint32_t i = 0; values && i < tmpl->name_count; i++)
        values[i] = bd_chat_undefined(NULL, 0);
    run.variables = values;
    if (values && read_variables(&run, variables, variable_count, values) && open_scope(&run, NULL))
        (void)bd_chat_exec(&run, tmpl->root);
    bd_arena_destroy(run.arena);
    return run.status;
}
