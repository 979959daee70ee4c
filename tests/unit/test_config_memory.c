/* Allocation failure while options are read: the sources are compiled in with allocators that fail
 * at the n-th call, for every n. The outcome is an error value and nothing is lost. */
#include "base_support.h"

static unsigned g_calls_left; /* the call that finds 0 fails, and all after it */

static bool spend(void) {
    if (g_calls_left == 0) return false;
    g_calls_left--;
    return true;
}

static void *fail_malloc(size_t bytes) {
    return spend() ? malloc(bytes) : NULL;
}

static void *fail_calloc(size_t count, size_t bytes) {
    return spend() ? calloc(count, bytes) : NULL;
}

static void *fail_realloc(void *memory, size_t bytes) {
    return spend() ? realloc(memory, bytes) : NULL;
}

static char *fail_strdup(const char *text) {
    return spend() ? strdup(text) : NULL;
}

static char *fail_strndup(const char *text, size_t bytes) {
    return spend() ? strndup(text, bytes) : NULL;
}

static void plain_free(void *memory) {
    free(memory);
}

#undef strdup
#undef strndup
#define malloc  fail_malloc
#define calloc  fail_calloc
#define realloc fail_realloc
#define strdup  fail_strdup
#define strndup fail_strndup
#include "base/file.c"
#include "base/strbuf.c"
#include "config/config_file.c"
#include "config/options.c"
#include "config/value.c"

static bool run(int count, const char *const *args) {
    bd_invocation inv;
    bd_error err;
    bd_status status = bd_invocation_parse(&inv, count, args, &err);
    if (status == BD_OK) {
        bd_invocation_deinit(&inv);
        return true;
    }
    assert_int_equal(status, BD_E_MEMORY);
    assert_non_null(strstr(err.message, "out of memory"));
    return false;
}

static void every_call_fails_once(int count, const char *const *args) {
    unsigned calls = 0;
    for (;; calls++) {
        g_calls_left = calls;
        if (run(count, args)) break;
        assert_true(calls < 1000);
    }
    assert_true(calls > 2);
}

static void test_serve(void **state) {
    (void)state;
    cJSON_Hooks hooks = {.malloc_fn = fail_malloc, .free_fn = plain_free};
    cJSON_InitHooks(&hooks);
    const char *args[] = {
        "serve",     "--config", "configs/zen-mini.json", "--variant", "a=b", "--variant", "c=d",
        "--api-key", "k",        "--admin-key=x"};
    every_call_fails_once(10, args);
    cJSON_InitHooks(NULL);
}

static void test_generate(void **state) {
    (void)state;
    const char *args[] = {"generate", "--base", "x", "--prompt-ids", "1,2,3", "--delta", "d"};
    every_call_fails_once(7, args);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_serve),
        cmocka_unit_test(test_generate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
