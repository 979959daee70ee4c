/* Where a chat template and its special tokens come from, file by file. */
#include "base_support.h"

#include <stdio.h>
#include <unistd.h>

#include "bitdelta/base/file.h"
#include "bitdelta/tokenizer/chat_template.h"

static char g_dir[] = "/tmp/bitdelta-chat-XXXXXX";

static void put(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", g_dir, name);
    if (!text) {
        (void)remove(path);
        return;
    }
    assert_int_equal(bd_file_replace(path, text, strlen(text), NULL), BD_OK);
}

static void clear_directory(void) {
    put("chat_template.jinja", NULL);
    put("tokenizer_config.json", NULL);
    put("chat_template.json", NULL);
    put("override.jinja", NULL);
}

static bd_chat *load(const char *override_path, const bd_chat *fallback) {
    bd_chat *chat;
    bd_error err;
    const bd_chat_sources sources = {g_dir, override_path, fallback};
    bd_error_clear(&err);
    if (bd_chat_load(&chat, &sources, &err) != BD_OK) fail_msg("%s", err.message);
    return chat;
}

static void check_text(const bd_chat *chat, const char *wanted) {
    bd_strbuf out;
    bd_error err;
    bd_strbuf_init(&out, 0);
    assert_non_null(chat->tmpl);
    assert_int_equal(bd_chat_template_render(chat->tmpl, NULL, 0, 0, &out, &err), BD_OK);
    assert_string_equal(out.data, wanted);
    bd_strbuf_deinit(&out);
}

static void check_template(const char *override_path, const char *wanted) {
    bd_chat *chat = load(override_path, NULL);
    check_text(chat, wanted);
    bd_chat_destroy(chat);
}

static void test_order_of_files(void **state) {
    (void)state;
    char override_path[256];
    snprintf(override_path, sizeof override_path, "%s/override.jinja", g_dir);
    clear_directory();
    bd_chat *chat = load(NULL, NULL);
    assert_null(chat->tmpl);
    assert_null(chat->bos_token);
    assert_int_equal(chat->fault.status, BD_OK);
    bd_chat_destroy(chat);
    put("chat_template.json", "{\"chat_template\":\"legacy\"}");
    check_template(NULL, "legacy");
    put("tokenizer_config.json", "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"no\"},"
                                 "{\"name\":\"default\",\"template\":\"list\"}]}");
    check_template(NULL, "list");
    put("tokenizer_config.json", "{\"chat_template\":\"config\"}");
    check_template(NULL, "config");
    put("chat_template.jinja", "file\n");
    check_template(NULL, "file");
    put("override.jinja", "override");
    check_template(override_path, "override");
    clear_directory();
}

static void test_tokens(void **state) {
    (void)state;
    clear_directory();
    put("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"eos_token\":{\"__type\":\"AddedToken\","
                                 "\"content\":\"</s>\"},\"pad_token\":null}");
    bd_chat *chat = load(NULL, NULL);
    assert_string_equal(chat->bos_token, "<s>");
    assert_string_equal(chat->eos_token, "</s>");
    assert_null(chat->pad_token);
    assert_null(chat->tmpl);
    bd_chat_destroy(chat);
    clear_directory();
}

/* A variant without files of its own speaks as its base does; with some, those count. */
static void test_fallback(void **state) {
    (void)state;
    clear_directory();
    put("chat_template.jinja", "base");
    put("tokenizer_config.json", "{\"bos_token\":\"<b>\",\"eos_token\":\"<e>\"}");
    bd_chat *base = load(NULL, NULL);
    clear_directory();
    bd_chat *chat = load(NULL, base);
    assert_ptr_equal(chat->tmpl, base->tmpl);
    assert_null(chat->owned);
    assert_string_equal(chat->bos_token, "<b>");
    bd_chat_destroy(chat);
    put("tokenizer_config.json", "{\"eos_token\":\"<own>\",\"chat_template\":\"own\"}");
    chat = load(NULL, base);
    check_text(chat, "own");
    assert_null(chat->bos_token);
    assert_string_equal(chat->eos_token, "<own>");
    bd_chat_destroy(chat);
    bd_chat_destroy(base);
    clear_directory();
}

static void test_faults(void **state) {
    (void)state;
    bd_chat *chat;
    bd_error err;
    const bd_chat_sources sources = {g_dir, NULL, NULL};
    clear_directory();
    put("chat_template.jinja", "a\n{{ x | center }}");
    chat = load(NULL, NULL);
    assert_null(chat->tmpl);
    assert_int_equal(chat->fault.status, BD_E_UNSUPPORTED);
    assert_non_null(strstr(chat->fault.message, "line 2: filter 'center'"));
    assert_non_null(strstr(chat->fault.subject, "chat_template.jinja"));
    bd_chat_destroy(chat);
    put("tokenizer_config.json", "{");
    assert_int_equal(bd_chat_load(&chat, &sources, &err), BD_E_FORMAT);
    assert_null(chat);
    assert_non_null(strstr(err.subject, "tokenizer_config.json"));
    clear_directory();
}

int main(void) {
    if (!mkdtemp(g_dir)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_of_files),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_fallback),
        cmocka_unit_test(test_faults),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    (void)rmdir(g_dir);
    return failed;
}
