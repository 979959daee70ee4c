/* file.c - mapping, reading and atomic replacement of whole files. Threads: any. */
#include "bitdelta/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"

static bd_status fail_open(const char *path, int error_number, bd_error *err) {
    bool missing = error_number == ENOENT || error_number == ENOTDIR;
    return bd_fail_errno(err, missing ? BD_E_NOT_FOUND : BD_E_IO, path, error_number,
                         "cannot open %s", path);
}

bd_status bd_file_map(const char *path, bd_mapped_file *out, bd_error *err) {
    *out = (bd_mapped_file){.fd = -1};
    bd_status status = BD_OK;
    /* O_NONBLOCK: opening a FIFO must not wait for a writer before it is refused. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail_open(path, errno, err);
    struct stat info;
    if (fstat(fd, &info) != 0) {
        status = bd_fail_errno(err, BD_E_IO, path, errno, "cannot stat %s", path);
        goto fail_close;
    }
    if (!S_ISREG(info.st_mode)) {
        status = bd_fail(err, BD_E_IO, path, "%s is not a regular file", path);
        goto fail_close;
    }
    size_t bytes = (size_t)info.st_size;
    void *data = NULL;
    if (bytes > 0) {
        data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) {
            status = bd_fail_errno(err, BD_E_IO, path, errno, "cannot map %s", path);
            goto fail_close;
        }
    }
    *out = (bd_mapped_file){.data = data, .bytes = bytes, .fd = fd};
    return BD_OK;
fail_close:
    close(fd);
    return status;
}

void bd_file_unmap(bd_mapped_file *file) {
    if (!file) return;
    /* munmap takes a plain pointer although it writes nothing. */
    union {
        const uint8_t *read_only;
        void *any;
    } address = {.read_only = file->data};
    if (file->data) munmap(address.any, file->bytes);
    if (file->fd >= 0) close(file->fd);
    *file = (bd_mapped_file){.fd = -1};
}

/* read(2) until the buffer is full or the file ends; -1 with errno set on failure. */
static ssize_t read_full(int fd, char *data, size_t bytes) {
    size_t got = 0;
    while (got < bytes) {
        ssize_t part = read(fd, data + got, bytes - got);
        if (part < 0 && errno == EINTR) continue;
        if (part < 0) return -1;
        if (part == 0) break;
        got += (size_t)part;
    }
    return (ssize_t)got;
}

/* Reads fd to its end into *out, growing: sizes from fstat are only a hint (they are 0 under
 * /proc). */
static bd_status read_all(int fd, const char *path, size_t max_bytes, char **out, size_t *bytes,
                          bd_error *err) {
    struct stat info;
    size_t cap = 4096, len = 0;
    if (fstat(fd, &info) == 0 && info.st_size > 0) cap = (size_t)info.st_size + 1;
    if (cap > max_bytes) cap = max_bytes + 1; /* one byte more shows that the file is too long */
    char *data = malloc(cap + 1);
    if (!data) return bd_fail(err, BD_E_MEMORY, path, "out of memory reading %s", path);
    for (;;) {
        ssize_t got = read_full(fd, data + len, cap - len);
        if (got < 0) {
            int error_number = errno;
            free(data);
            return bd_fail_errno(err, BD_E_IO, path, error_number, "cannot read %s", path);
        }
        len += (size_t)got;
        if (len > max_bytes) {
            free(data);
            return bd_fail(err, BD_E_LIMIT, path, "%s is longer than the limit of %zu bytes", path,
                           max_bytes);
        }
        if (len < cap) break;
        cap = cap > max_bytes / 2 ? max_bytes + 1 : cap * 2;
        char *bigger = realloc(data, cap + 1);
        if (!bigger) {
            free(data);
            return bd_fail(err, BD_E_MEMORY, path, "out of memory reading %s", path);
        }
        data = bigger;
    }
    data[len] = '\0';
    *out = data;
    *bytes = len;
    return BD_OK;
}

bd_status bd_file_read(const char *path, size_t max_bytes, char **out, size_t *bytes,
                       bd_error *err) {
    *out = NULL;
    *bytes = 0;
    if (max_bytes > SIZE_MAX / 4) max_bytes = SIZE_MAX / 4;
    /* As in bd_file_map: a FIFO is refused, not waited for. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail_open(path, errno, err);
    struct stat info;
    bd_status status = BD_OK;
    if (fstat(fd, &info) != 0)
        status = bd_fail_errno(err, BD_E_IO, path, errno, "cannot stat %s", path);
    else if (!S_ISREG(info.st_mode))
        status = bd_fail(err, BD_E_IO, path, "%s is not a regular file", path);
    else
        status = read_all(fd, path, max_bytes, out, bytes, err);
    close(fd);
    return status;
}

static int write_full(int fd, const char *data, size_t bytes) {
    while (bytes > 0) {
        ssize_t part = write(fd, data, bytes);
        if (part < 0 && errno == EINTR) continue;
        if (part < 0) return errno;
        data += part;
        bytes -= (size_t)part;
    }
    return 0;
}

/* The directory entry itself must reach the disk, or a crash brings the old file back. */
static int sync_directory_of(const char *path) {
    char dir[4096];
    const char *slash = strrchr(path, '/');
    size_t len = !slash ? 0 : slash == path ? 1 : (size_t)(slash - path);
    if (len >= sizeof dir) return ENAMETOOLONG;
    memcpy(dir, path, len);
    dir[len] = '\0';
    int fd = open(len > 0 ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno;
    int error_number = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    return error_number == EINVAL ? 0 : error_number; /* some file systems have nothing to sync */
}

/* Creates "<path>.tmp-<random>" with the permissions of a new file. Returns the descriptor or -1.
 */
static int create_temporary(const char *path, char *name, size_t name_bytes) {
    for (int attempt = 0; attempt < 16; attempt++) {
        uint32_t random = 0;
        if (getrandom(&random, sizeof random, GRND_NONBLOCK) != (ssize_t)sizeof random) {
            random = (uint32_t)bd_now_us() ^ (uint32_t)getpid();
        }
        int length = snprintf(name, name_bytes, "%s.tmp-%08x", path, random);
        if (length < 0 || (size_t)length >= name_bytes) {
            errno = ENAMETOOLONG;
            return -1;
        }
        int fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

bd_status bd_file_replace(const char *path, const void *data, size_t bytes, bd_error *err) {
    char name[4096];
    int fd = create_temporary(path, name, sizeof name);
    if (fd < 0) {
        return bd_fail_errno(err, BD_E_IO, path, errno, "cannot create a file beside %s", path);
    }
    int error_number = write_full(fd, data, bytes);
    if (error_number == 0 && fsync(fd) != 0) error_number = errno;
    if (close(fd) != 0 && error_number == 0) error_number = errno;
    if (error_number == 0 && rename(name, path) != 0) error_number = errno;
    if (error_number != 0) {
        unlink(name);
        return bd_fail_errno(err, BD_E_IO, path, error_number, "cannot write %s", path);
    }
    error_number = sync_directory_of(path);
    if (error_number != 0) {
        return bd_fail_errno(err, BD_E_IO, path, error_number, "cannot sync the directory of %s",
                             path);
    }
    return BD_OK;
}

bool bd_file_exists(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

bd_status bd_path_join(char *out, size_t out_bytes, const char *dir, const char *name,
                       bd_error *err) {
    size_t dir_len = strlen(dir);
    const char *separator = dir_len == 0 || dir[dir_len - 1] == '/' ? "" : "/";
    int length = snprintf(out, out_bytes, "%s%s%s", dir, separator, name);
    if (length < 0 || (size_t)length >= out_bytes) {
        if (out_bytes > 0) out[0] = '\0';
        return bd_fail(err, BD_E_LIMIT, name, "the path of %s in %s is over %zu bytes", name, dir,
                       out_bytes);
    }
    return BD_OK;
}
