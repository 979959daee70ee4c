/* Chat templates against what Jinja renders (tests/data/chat/goldens.jsonl, made by
 * make_goldens.py), and what is refused, bounded or loaded. With --lines it reads JSON lines
 * {"template","variables"} and answers {"text"} or {"error","status"}:
 * tests/e2e/test_chat_template.py compares random templates and conversations that way. */
#include "base_support.h"

#include <stdio.h>

#include "bitdelta/base/file.h"
#include "chat_lines.h"

static const bd_json_limits limits = {
    .depth_max = 128, .nodes_max = (size_t)1 << 22, .allow_nul_escape = true};

/* ---- Goldens ---- */

/* In the line, or in a file of the data. */
static char *chat_source(const char *line) {
    char path[256], *name = chat_string(line, "file"), *source = chat_string(line, "template");
    size_t bytes;
    if (name) {
        snprintf(path, sizeof path, "tests/data/chat/templates/%s", name);
        assert_int_equal(bd_file_read(path, BD_CHAT_TEMPLATE_BYTES_MAX, &source, &bytes, NULL),
                         BD_OK);
    }
    free(name);
    assert_non_null(source);
    return source;
}

static void check_line(const char *line, unsigned number) {
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    char *source = chat_source(line), *wanted = chat_string(line, "text");
    bd_status status = chat_render_line(line, source, &out);
    const char *text = out.data ? out.data : "";
    if (wanted && (status != BD_OK || strcmp(text, wanted) != 0))
        fail_msg("line %u: %s: got\n%s\nwanted\n%s", number, bd_status_name(status), text, wanted);
    if (!wanted && status == BD_OK) fail_msg("line %u: must fail, gives\n%s", number, text);
    free(source);
    free(wanted);
    bd_strbuf_deinit(&out);
}

static void test_goldens(void **state) {
    (void)state;
    FILE *file = fopen("tests/data/chat/goldens.jsonl", "r");
    assert_non_null(file);
    char *line = NULL;
    size_t capacity = 0;
    unsigned number = 0;
    setenv("TZ", "UTC", 1);
    for (ssize_t bytes; (bytes = getline(&line, &capacity, file)) > 0;) {
        assert_int_equal(bd_json_check(line, (size_t)bytes, &limits, NULL, NULL), BD_OK);
        check_line(line, ++number);
    }
    free(line);
    fclose(file);
    print_message("%u goldens\n", number);
    assert_true(number > 200);
}

/* ---- Refusals and bounds ---- */

static bd_status parse(const char *source, bd_error *err) {
    bd_chat_template *tmpl;
    bd_error_clear(err);
    bd_status status = bd_chat_template_parse(&tmpl, source, strlen(source), "t", err);
    bd_chat_template_destroy(tmpl);
    return status;
}

static void test_refused_by_name_and_line(void **state) {
    (void)state;
    static const struct {
        const char *source, *message;
        bd_status status;
    } cases[] = {
        {"a\n{{ x | center }}", "line 2: filter 'center' is not supported", BD_E_UNSUPPORTED},
        {"{{ x is sameas y }}", "line 1: test 'sameas' is not supported", BD_E_UNSUPPORTED},
        {"\n\n{% include 'x' %}", "line 3: statement 'include' is not supported", BD_E_UNSUPPORTED},
        {"{{ x.append(1) }}", "line 1: method 'append' is not supported", BD_E_UNSUPPORTED},
        {"{{ x.format(1) }}", "line 1: method 'format' is not supported", BD_E_UNSUPPORTED},
        {"{{ cycler(1) }}", "line 1: name 'cycler' is not supported", BD_E_UNSUPPORTED},
        {"{{ 2 ** 3 }}", "line 1: operator '**' is not supported", BD_E_UNSUPPORTED},
        {"{% for a in b recursive %}{% endfor %}",
         "line 1: loop modifier 'recursive' is not supported", BD_E_UNSUPPORTED},
        {"{{ x", "line 1: expected the end of the expression, got the end of the template",
         BD_E_FORMAT},
        {"{% if x %}", "line 1: expected elif, got the end of the template", BD_E_FORMAT},
        {"{% endif %}", "line 1: expected a statement to be open, got 'endif'", BD_E_FORMAT},
        {"{{ ) }}", "line 1: unexpected ')'", BD_E_FORMAT},
        {"{{ 'a }}", "line 1: a string does not end", BD_E_FORMAT},
        {"{# a", "line 1: a comment does not end", BD_E_FORMAT},
        {"{% break %}", "line 1: expected a loop around 'break' and 'continue', got 'break'",
         BD_E_FORMAT},
        {"{{ 99999999999999999999 }}", "line 1: a number has more than 64 bits", BD_E_LIMIT},
        {"{{ '\xff' }}", "the chat template is not valid UTF-8", BD_E_FORMAT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bd_error err;
        assert_int_equal(parse(cases[i].source, &err), cases[i].status);
        assert_string_equal(err.message, cases[i].message);
        assert_string_equal(err.subject, "t");
    }
}

static bd_status render(const char *source, const char *json, bd_strbuf *out, bd_error *err) {
    bd_chat_template *tmpl;
    bd_error_clear(err);
    bd_status status = bd_chat_template_parse(&tmpl, source, strlen(source), "t", err);
    if (status != BD_OK) return status;
    const bd_chat_variable variable = {.json = json};
    status = bd_chat_template_render(tmpl, &variable, 1, CHAT_NOW_S, out, err);
    bd_chat_template_destroy(tmpl);
    return status;
}

static void check_render(const char *source, const char *json, bd_status status,
                         const char *message) {
    bd_strbuf out;
    bd_error err;
    bd_strbuf_init(&out, BD_CHAT_OUTPUT_BYTES_MAX);
    bd_status got = render(source, json, &out, &err);
    if (got != status || !strstr(err.message, message))
        fail_msg("%s: %s %s", source, bd_status_name(got), err.message);
    bd_strbuf_deinit(&out);
}

static void test_bounded(void **state) {
    (void)state;
    /* Steps, memory, depth, output, integers. */
    check_render("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
                 "{}", BD_E_LIMIT, "too m");
    check_render("{% set n = namespace(s='0123456789abcdef') %}{% for a in range(60) %}"
                 "{% set n.s = n.s + n.s %}{% endfor %}",
                 "{}", BD_E_LIMIT, "too ");
    check_render(
        "{% set n = namespace(s='0123456789abcdef') %}{% for a in range(20) %}"
        "{% set n.s = n.s + n.s %}{% endfor %}{% for a in range(99) %}{{ n.s }}{% endfor %}",
        "{}", BD_E_LIMIT, "too long");
    check_render("{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}", "{}", BD_E_LIMIT,
                 "nested too deeply");
    check_render("{% set n = namespace(l=[]) %}{% for a in range(9999) %}{% set n.l = [n.l] %}"
                 "{% endfor %}{{ n.l }}",
                 "{}", BD_E_LIMIT, "nested too deeply");
    check_render("{% set n = namespace(l=[]) %}{% for a in range(9999) %}{% set n.l = [n.l] %}"
                 "{% endfor %}{{ n.l | tojson }}",
                 "{}", BD_E_LIMIT, "nested too deeply");
    check_render("{% set n = namespace(l=[], m=[]) %}{% for a in range(9999) %}"
                 "{% set n.l = [n.l] %}{% set n.m = [n.m] %}{% endfor %}{{ n.l == n.m }}",
                 "{}", BD_E_LIMIT, "nested too deeply");
    check_render("{% set n = namespace(t=()) %}{% for a in range(99999) %}{% set n.t = (n.t,) %}"
                 "{% endfor %}{{ n.t in {} }}",
                 "{}", BD_E_FORMAT, "cannot be a key");
    check_render("{{ range(100001) | length }}", "{}", BD_E_LIMIT, "range of more");
    check_render("{{ 'a' * 999999999999 }}", "{}", BD_E_LIMIT, "too");
    check_render("{{ [1] * 999999999999 }}", "{}", BD_E_LIMIT, "too");
    check_render("{{ 9223372036854775807 + 1 }}", "{}", BD_E_LIMIT, "64 bits");
    check_render("{{ (0 - 9223372036854775807 - 1) // -1 }}", "{}", BD_E_LIMIT, "64 bits");
    check_render("{{ a }}", "{\"a\":9223372036854775808}", BD_E_LIMIT, "64 bits");
    check_render("{{ a }}", "{\"a\":-9223372036854775808}", BD_OK, "");
    /* What a template says itself comes as it is. */
    check_render("{{ raise_exception('No\nway') }}", "{}", BD_E_ARGUMENT, "No\nway");
    check_render("\n{{ a.b.c }}", "{\"a\":{}}", BD_E_FORMAT, "line 2: 'b' is undefined");
    check_render("{{ 'a' + 1 }}", "{}", BD_E_FORMAT, "a string and an integer");
}

/* One argument, no arguments. */
static void test_counts_of_arguments(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"{{ 1 is divisibleby }}", "line 1: the test divisibleby takes 1 argument"},
        {"{{ 1 is defined(1) }}", "line 1: the test defined takes 0 arguments"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bd_strbuf out;
        bd_error err;
        bd_strbuf_init(&out, BD_CHAT_OUTPUT_BYTES_MAX);
        assert_int_equal(render(cases[i][0], "{}", &out, &err), BD_E_FORMAT);
        assert_string_equal(err.message, cases[i][1]);
        bd_strbuf_deinit(&out);
    }
}

/* Nesting in the source: each is refused, none takes the stack. */
static void test_deep_source(void **state) {
    (void)state;
    static const char *const pieces[] = {
        "{{ (", "{{ [", "{{ not ", "{{ - ", "{{ a.a", "{{ 1 if 1 else ", "{{ {1:", "{% if 1 %}"};
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        bd_strbuf source;
        bd_error err;
        bd_strbuf_init(&source, 0);
        bool statement = pieces[i][1] == '%';
        bd_strbuf_puts(&source, pieces[i]);
        for (int j = 0; j < 20000; j++)
            bd_strbuf_puts(&source, statement             ? pieces[i]
                                    : pieces[i][3] == 'a' ? ".a"
                                                          : pieces[i] + 3);
        if (pieces[i][3] == 'a') bd_strbuf_puts(&source, "}}");
        assert_false(source.failed);
        bd_status status = parse(source.data, &err);
        assert_int_equal(status, BD_E_LIMIT);
        bd_strbuf_deinit(&source);
    }
}

/* ---- JSON lines ---- */

static int answer_lines(void) {
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t bytes; (bytes = getline(&line, &capacity, stdin)) > 0;) {
        bd_strbuf text, out;
        bd_strbuf_init(&text, BD_CHAT_OUTPUT_BYTES_MAX);
        bd_strbuf_init(&out, 0);
        if (bd_json_check(line, (size_t)bytes, &limits, NULL, NULL) != BD_OK) return 2;
        char *source = chat_string(line, "template");
        if (!source) return 2;
        bd_status status = chat_render_line(line, source, &text);
        bd_strbuf_puts(&out, status == BD_OK ? "{\"text\":" : "{\"error\":");
        bd_strbuf_json_string(&out, text.data ? text.data : "", text.len_bytes);
        bd_strbuf_printf(&out, ",\"status\":\"%s\"}\n", bd_status_name(status));
        if (out.failed || fwrite(out.data, 1, out.len_bytes, stdout) != out.len_bytes ||
            fflush(stdout) != 0)
            return 2;
        free(source);
        bd_strbuf_deinit(&text);
        bd_strbuf_deinit(&out);
    }
    free(line);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "--lines") == 0) return answer_lines();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goldens),     cmocka_unit_test(test_refused_by_name_and_line),
        cmocka_unit_test(test_bounded),     cmocka_unit_test(test_counts_of_arguments),
        cmocka_unit_test(test_deep_source),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
