/* The hash map, against a plain array of the same pairs under random operations. */
#include "base_support.h"

#include "bitdelta/base/map.h"

enum { KEY_COUNT = 700 };

static size_t key_of(uint32_t index, char *out) { /* keys with NUL bytes, and lengths 0..12 */
    memset(out, 0, 16);
    memcpy(out, &index, sizeof index);
    return index == 0 ? 0 : 4 + index % 9;
}

static void check_all(const bd_map *map, void *const *values) {
    size_t present = 0;
    char key[16];
    for (uint32_t i = 0; i < KEY_COUNT; i++) {
        size_t len = key_of(i, key);
        assert_ptr_equal(bd_map_get(map, key, len), values[i]);
        present += values[i] != NULL;
    }
    assert_int_equal(bd_map_count(map), present);
    size_t cursor = 0, seen = 0, key_bytes;
    const void *walked;
    void *value;
    while (bd_map_next(map, &cursor, &walked, &key_bytes, &value)) {
        uint32_t index = 0;
        if (key_bytes >= sizeof index) memcpy(&index, walked, sizeof index);
        assert_true(index < KEY_COUNT);
        assert_int_equal(key_bytes, key_of(index, key));
        assert_memory_equal(walked, key, key_bytes);
        assert_ptr_equal(value, values[index]);
        seen++;
    }
    assert_int_equal(seen, present);
}

static void test_random_operations(void **state) {
    (void)state;
    uint64_t random = support_seed();
    static char targets[KEY_COUNT * 2];
    void *values[KEY_COUNT] = {NULL};
    bd_map *map = bd_map_create(3);
    assert_non_null(map);
    for (int step = 0; step < 40000; step++) {
        uint32_t index = (uint32_t)(support_random(&random) % KEY_COUNT);
        char key[16];
        size_t len = key_of(index, key);
        if (support_random(&random) % 2 == 0) {
            void *value = &targets[index * 2 + (uint32_t)step % 2];
            bd_status want = values[index] ? BD_BUSY : BD_OK;
            assert_int_equal(bd_map_put(map, key, len, value), want);
            if (want == BD_OK) values[index] = value;
        } else {
            assert_ptr_equal(bd_map_take(map, key, len), values[index]);
            values[index] = NULL;
        }
        if (step % 5000 == 0) check_all(map, values);
    }
    check_all(map, values);
    bd_map_destroy(map);
}

static void test_edges(void **state) {
    (void)state;
    bd_map *map = bd_map_create(0);
    assert_non_null(map);
    int value;
    assert_null(bd_map_get(map, "a", 1));
    assert_null(bd_map_take(map, "a", 1));
    assert_int_equal(bd_map_put(map, NULL, 0, &value), BD_OK);
    assert_ptr_equal(bd_map_get(map, "", 0), &value);
    assert_int_equal(bd_map_put(map, "a\0b", 3, &value), BD_OK);
    assert_null(bd_map_get(map, "a", 1));
    assert_null(bd_map_get(map, "a\0c", 3));
    assert_int_equal(bd_map_count(map), 2);
    bd_map_destroy(map);
    bd_map_destroy(NULL);
    assert_null(bd_map_create(SIZE_MAX));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_operations),
        cmocka_unit_test(test_edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
