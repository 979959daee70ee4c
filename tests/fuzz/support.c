/* support.c - files for the fuzz targets. See fuzz.h. */
#include "fuzz.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"

void fuzz_split(const uint8_t *data, size_t bytes, fuzz_part *first, fuzz_part *second) {
    static const uint8_t nothing;
    if (bytes == 0) data = &nothing;
    const uint8_t *cut = bytes > 0 ? memchr(data, 0, bytes) : NULL;
    size_t length = cut ? (size_t)(cut - data) : bytes;
    *first = (fuzz_part){.data = data, .bytes = length, .present = true};
    *second = (fuzz_part){.data = data};
    if (cut) *second = (fuzz_part){.data = cut + 1, .bytes = bytes - length - 1, .present = true};
}

static void put(int fd, const void *data, size_t bytes) {
    BD_ASSERT(ftruncate(fd, 0) == 0);
    BD_ASSERT(bytes == 0 || pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
}

const char *fuzz_memory_file(const void *data, size_t bytes) {
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        BD_ASSERT(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    put(fd, data, bytes);
    return path;
}

static void remove_directory(void) {
    const char *path = fuzz_directory();
    DIR *list = opendir(path);
    if (!list) return;
    for (const struct dirent *entry; (entry = readdir(list));)
        (void)unlinkat(dirfd(list), entry->d_name, 0); /* "." and ".." refuse */
    closedir(list);
    rmdir(path);
}

const char *fuzz_directory(void) {
    static char path[256];
    if (path[0]) return path;
    const char *parent = getenv("TMPDIR");
    snprintf(path, sizeof path, "%.200s/bd-fuzz-XXXXXX", parent ? parent : P_tmpdir);
    BD_ASSERT(mkdtemp(path) != NULL);
    BD_ASSERT(atexit(remove_directory) == 0);
    return path;
}

void fuzz_write(const char *name, const void *data, size_t bytes) {
    char path[1024];
    BD_ASSERT(bd_path_join(path, sizeof path, fuzz_directory(), name, NULL) == BD_OK);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    BD_ASSERT(fd >= 0);
    put(fd, data, bytes);
    close(fd);
}

void fuzz_remove(const char *name) {
    char path[1024];
    BD_ASSERT(bd_path_join(path, sizeof path, fuzz_directory(), name, NULL) == BD_OK);
    (void)unlink(path);
}

void fuzz_check_error(bd_status status, const bd_error *err) {
    BD_ASSERT(status != BD_OK && status != BD_E_INTERNAL);
    BD_ASSERT(err->status == status);
    const size_t message_bytes = strlen(err->message), subject_bytes = strlen(err->subject);
    BD_ASSERT(message_bytes > 0);
    BD_ASSERT(bd_utf8_valid_prefix(err->message, message_bytes) == message_bytes);
    BD_ASSERT(bd_utf8_valid_prefix(err->subject, subject_bytes) == subject_bytes);
}

void fuzz_read(const void *data, size_t bytes) {
    static volatile uint8_t sink;
    const uint8_t *from = data;
    uint8_t sum = 0;
    for (size_t i = 0; i < bytes; i++)
        sum = (uint8_t)(sum + from[i]);
    sink = (uint8_t)(sink + sum);
}
