/* Whole files: mapping, bounded reading, replacement that leaves the old file when it fails. */
#include "base_support.h"

#include <sys/stat.h>
#include <unistd.h>

#include "bitdelta/base/file.h"

static char g_dir[256]; /* a temporary directory of this test */

static const char *in_dir(const char *name) {
    static char path[512];
    bd_status status = bd_path_join(path, sizeof path, g_dir, name, NULL);
    assert_int_equal(status, BD_OK);
    return path;
}

static int setup(void **state) {
    (void)state;
    snprintf(g_dir, sizeof g_dir, "%s/bd-file-XXXXXX", P_tmpdir);
    return mkdtemp(g_dir) ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -r '%s'", g_dir);
    return system(command);
}

static void test_round_trip(void **state) {
    (void)state;
    uint64_t random = support_seed();
    static char data[300000];
    bd_error err = {.message = ""};
    for (int round = 0; round < 12; round++) {
        size_t bytes = round < 2 ? (size_t)round : support_random(&random) % sizeof data;
        for (size_t i = 0; i < bytes; i++)
            data[i] = (char)support_random(&random);
        assert_int_equal(bd_file_replace(in_dir("f"), data, bytes, &err), BD_OK);
        bd_mapped_file map;
        assert_int_equal(bd_file_map(in_dir("f"), &map, &err), BD_OK);
        assert_int_equal(map.bytes, bytes);
        if (bytes > 0) assert_memory_equal(map.data, data, bytes);
        if (bytes == 0) assert_null(map.data);
        bd_file_unmap(&map);
        bd_file_unmap(&map); /* harmless */
        char *text;
        size_t got;
        assert_int_equal(bd_file_read(in_dir("f"), bytes, &text, &got, &err), BD_OK);
        assert_int_equal(got, bytes);
        assert_memory_equal(text, data, bytes);
        assert_int_equal(text[bytes], 0);
        free(text);
        if (bytes == 0) continue;
        assert_int_equal(bd_file_read(in_dir("f"), bytes - 1, &text, &got, &err), BD_E_LIMIT);
        assert_null(text);
    }
    assert_true(bd_file_exists(in_dir("f")));
    struct stat info;
    assert_int_equal(stat(in_dir("f"), &info), 0);
    mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(info.st_mode & 0777, 0666 & ~mask);
}

/* A file without a size: its end is only found by reading. */
static void test_read_proc(void **state) {
    (void)state;
    char *text;
    size_t bytes;
    assert_int_equal(bd_file_read("/proc/self/status", 1 << 20, &text, &bytes, NULL), BD_OK);
    assert_non_null(strstr(text, "VmSize"));
    assert_int_equal(strlen(text), bytes);
    free(text);
    assert_int_equal(bd_file_read("/proc/self/status", 10, &text, &bytes, NULL), BD_E_LIMIT);
}

static void test_faults(void **state) {
    (void)state;
    bd_error err;
    bd_mapped_file map;
    char *text;
    size_t bytes;
    assert_int_equal(bd_file_map(in_dir("none"), &map, &err), BD_E_NOT_FOUND);
    assert_string_equal(err.subject, in_dir("none"));
    assert_non_null(strstr(err.message, "No such file"));
    assert_int_equal(bd_file_map(g_dir, &map, &err), BD_E_IO);
    assert_non_null(strstr(err.message, "not a regular file"));
    assert_int_equal(mkfifo(in_dir("fifo"), 0600), 0);
    assert_int_equal(bd_file_map(in_dir("fifo"), &map, &err), BD_E_IO);
    assert_int_equal(bd_file_read(g_dir, 100, &text, &bytes, &err), BD_E_IO);
    assert_int_equal(bd_file_read(in_dir("none"), 100, &text, &bytes, &err), BD_E_NOT_FOUND);
    assert_false(bd_file_exists(in_dir("none")));
    assert_false(bd_file_exists(in_dir("fifo/below")));
    assert_int_equal(symlink("none", in_dir("nowhere")), 0);
    assert_int_equal(symlink("circle", in_dir("circle")), 0);
    assert_true(bd_file_exists(in_dir("nowhere")) && bd_file_exists(in_dir("circle/below")));
    assert_int_equal(bd_file_replace(in_dir("no/such/dir"), "x", 1, &err), BD_E_IO);
}

/* rename onto a directory fails after everything was written: no temporary file may stay. */
static void test_replace_failure_is_clean(void **state) {
    (void)state;
    bd_error err;
    assert_int_equal(mkdir(in_dir("target"), 0700), 0);
    assert_int_equal(mkdir(in_dir("target/inner"), 0700), 0);
    assert_int_equal(bd_file_replace(in_dir("target"), "x", 1, &err), BD_E_IO);
    char command[400];
    snprintf(command, sizeof command, "ls '%s' | grep -q tmp-", g_dir);
    assert_int_not_equal(system(command), 0);
}

static void test_join(void **state) {
    (void)state;
    char out[8];
    bd_error err;
    assert_int_equal(bd_path_join(out, sizeof out, "ab", "cdef", &err), BD_OK);
    assert_string_equal(out, "ab/cdef");
    assert_int_equal(bd_path_join(out, sizeof out, "ab/", "cd", &err), BD_OK);
    assert_string_equal(out, "ab/cd");
    assert_int_equal(bd_path_join(out, sizeof out, "", "cd", &err), BD_OK);
    assert_string_equal(out, "cd");
    assert_int_equal(bd_path_join(out, sizeof out, "ab", "cdefg", &err), BD_E_LIMIT);
    assert_string_equal(err.subject, "cdefg");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_read_proc),
        cmocka_unit_test(test_faults),     cmocka_unit_test(test_replace_failure_is_clean),
        cmocka_unit_test(test_join),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
