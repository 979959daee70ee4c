/* hf_support.h - what the unit tests of hf, delta and the file tools share. Threads: the test's
 * own. */
#ifndef BITDELTA_TESTS_HF_SUPPORT_H
#define BITDELTA_TESTS_HF_SUPPORT_H

#include "base_support.h"

#include <cjson/cJSON.h>
#include <unistd.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/status.h"

/* Fails with the message where a call should have worked. */
#define assert_ok(call)                                                                            \
    do {                                                                                           \
        const bd_status support_status = (call);                                                   \
        if (support_status != BD_OK) fail_msg("%s: %s", #call, err.message);                       \
    } while (0)

typedef struct support_dir {
    char path[128];
} support_dir;

static inline support_dir support_dir_make(void) {
    support_dir dir;
    snprintf(dir.path, sizeof dir.path, "%s/bd-test-XXXXXX", P_tmpdir);
    assert_non_null(mkdtemp(dir.path));
    return dir;
}

static inline void support_dir_remove(const support_dir *dir) {
    char command[200];
    snprintf(command, sizeof command, "rm -rf '%s'", dir->path);
    assert_int_equal(system(command), 0);
}

static inline void support_write(const char *dir, const char *name, const void *data,
                                 size_t bytes) {
    char path[1024];
    assert_int_equal(bd_path_join(path, sizeof path, dir, name, NULL), BD_OK);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static inline void support_write_text(const char *dir, const char *name, const char *text) {
    support_write(dir, name, text, strlen(text));
}

/* The caller frees. */
static inline char *support_read(const char *dir, const char *name, size_t *bytes) {
    char path[1024], *data = NULL;
    bd_error err = {.message = ""};
    assert_int_equal(bd_path_join(path, sizeof path, dir, name, NULL), BD_OK);
    assert_ok(bd_file_read(path, (size_t)1 << 30, &data, bytes, &err));
    return data;
}

static inline cJSON *support_json(const char *dir, const char *name) {
    size_t bytes;
    char *text = support_read(dir, name, &bytes);
    cJSON *root = cJSON_ParseWithLength(text, bytes);
    free(text);
    assert_non_null(root);
    return root;
}

#endif
