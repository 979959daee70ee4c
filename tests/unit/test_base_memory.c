/* Allocation failure: the rooms' sources are compiled into this program with allocators that fail
 * at the n-th call, for every n, and whatever happens is an error value, never a crash or a leak.
 */
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

#undef strdup
#define malloc  fail_malloc
#define calloc  fail_calloc
#define realloc fail_realloc
#define strdup  fail_strdup
#include "base/arena.c"
#include "base/file.c"
#include "base/mailbox.c"
#include "base/map.c"
#include "base/metrics.c"
#include "base/pool.c"
#include "base/strbuf.c"

static bool run_map(void) {
    bd_map *map = bd_map_create(1);
    if (!map) return false;
    bool all = true;
    int value;
    for (uint32_t i = 0; i < 20; i++) {
        bd_status status = bd_map_put(map, &i, sizeof i, &value);
        assert_true(status == BD_OK || status == BD_E_MEMORY);
        assert_ptr_equal(bd_map_get(map, &i, sizeof i), status == BD_OK ? &value : NULL);
        all = all && status == BD_OK;
    }
    bd_map_destroy(map);
    return all;
}

static bool run_metrics(void) {
    bd_metrics *metrics = bd_metrics_create(100);
    if (!metrics) return false;
    const double bounds[] = {1, 2};
    for (int i = 0; i < 12; i++) {
        char name[16];
        snprintf(name, sizeof name, "n%d", i);
        bd_label label = {"k", name};
        bd_metric_add(bd_metrics_counter(metrics, name, "h", &label, 1), 1);
        bd_metric_observe(bd_metrics_histogram(metrics, "h", "h", bounds, 2, &label, 1), 1);
    }
    bd_strbuf buf;
    bd_strbuf_init(&buf, 0);
    bd_metrics_write(metrics, &buf);
    bool all = !buf.failed && buf.data && strstr(buf.data, "h_count{k=\"n11\"} 1\n");
    bd_strbuf_deinit(&buf);
    bd_metrics_destroy(metrics);
    return all;
}

static bool run_others(void) {
    bd_error err = {.status = BD_OK};
    bd_arena *arena = bd_arena_create(64, 1 << 20);
    bool all = arena && bd_arena_alloc(arena, 10, 10) && bd_arena_alloc(arena, 1, 1);
    bd_arena_destroy(arena);
    bd_mailbox *box;
    all = bd_mailbox_create(&box, 1, true, &err) == BD_OK && all;
    bd_mailbox_destroy(box);
    bd_pool *pool;
    all = bd_pool_create(&pool, 2, "t", &err) == BD_OK && all;
    bd_pool_destroy(pool);
    char *text;
    size_t bytes;
    bd_status status = bd_file_read("/proc/self/maps", 1 << 24, &text, &bytes, &err);
    assert_true(status == BD_OK || status == BD_E_MEMORY);
    if (status == BD_OK) free(text);
    return status == BD_OK && all;
}

static void every_call_fails_once(bool (*body)(void)) {
    unsigned calls = 0;
    for (;; calls++) {
        g_calls_left = calls;
        if (body()) break;
        assert_true(calls < 1000);
    }
    assert_true(calls >= 3);
}

static void test_map(void **state) {
    (void)state;
    every_call_fails_once(run_map);
}

static void test_metrics(void **state) {
    (void)state;
    every_call_fails_once(run_metrics);
}

static void test_others(void **state) {
    (void)state;
    every_call_fails_once(run_others);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_map),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
