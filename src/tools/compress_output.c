/* compress_output.c - a directory that appears whole or not at all. The temporary one is
 * OUT.tmp-<pid>, locked with flock() while its owner lives: a lock that can be had shows that the
 * owner died, whatever its pid means here (containers number processes anew). Owner: the run. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "bitdelta/base/file.h"
#include "bitdelta/tools/stop.h"
#include "compress_internal.h"

#define SUFFIX     ".tmp-"
#define PATH_BYTES 4096u

/* Splits path into the directory (".", "/", "a/b") and the last part, which is inside path. */
static const char *split(const char *path, char *parent, size_t parent_bytes) {
    const char *slash = strrchr(path, '/');
    const size_t len = !slash ? 0 : slash == path ? 1 : (size_t)(slash - path);
    (void)snprintf(parent, parent_bytes, "%.*s", len ? (int)len : 1, len ? path : ".");
    return slash ? slash + 1 : path;
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *at) {
    (void)info;
    (void)kind;
    (void)at;
    (void)remove(
        path); /* what stays makes the last rmdir fail, which is reported where it matters */
    return 0;
}

static void remove_tree(const char *path) {
    (void)nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* ---- may OUT be written? --------------------------------------------------------------------- */

static bd_status check_existing(const char *path, bool force, bd_error *err) {
    struct stat info;
    char inside[1100];
    if (lstat(path, &info) != 0) {
        if (errno == ENOENT) return BD_OK;
        return bd_fail_errno(err, BD_E_IO, path, errno, "cannot look at %s", path);
    }
    if (!S_ISDIR(info.st_mode))
        return bd_fail(err, BD_E_ARGUMENT, path, "%s exists and is not a directory", path);
    (void)snprintf(inside, sizeof inside, "%s/delta.json", path);
    const bool is_delta = access(inside, F_OK) == 0;
    DIR *dir = opendir(path);
    if (!dir) return bd_fail_errno(err, BD_E_IO, path, errno, "cannot look into %s", path);
    uint32_t entries = 0;
    while (readdir(dir))
        entries++;
    closedir(dir);
    if (entries <= 2) return BD_OK; /* empty: rename(2) replaces it */
    if (!is_delta)
        return bd_fail(err, BD_E_ARGUMENT, path,
                       "%s exists and is not a delta; it is never replaced", path);
    if (!force) return bd_fail(err, BD_E_ARGUMENT, path, "%s exists (--force replaces it)", path);
    return BD_OK;
}

bd_status bd_output_check(const char *path, bool force, bd_output_dir *out, bd_error *err) {
    *out = (bd_output_dir){.lock_fd = -1};
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/')
        len--;
    if (len == 0 || len + 32 > sizeof out->path) {
        return bd_fail(err, BD_E_ARGUMENT, path, "the output path is empty or too long");
    }
    memcpy(out->path, path, len);
    char parent[sizeof out->path];
    const char *name = split(out->path, parent, sizeof parent);
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return bd_fail(err, BD_E_ARGUMENT, path,
                       "%s cannot be an output directory: name one inside it", path);
    }
    struct stat info;
    if (stat(parent, &info) != 0) {
        return bd_fail_errno(err, BD_E_IO, parent, errno,
                             "the directory of the output, %s, cannot be used", parent);
    }
    if (!S_ISDIR(info.st_mode))
        return bd_fail(err, BD_E_ARGUMENT, parent, "%s is not a directory", parent);
    return check_existing(out->path, force, err);
}

/* ---- temporaries ----------------------------------------------------------------------------- */

/* The lock, or -1 if another holds it or the directory is gone. */
static int lock_directory(const char *path) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat held, named;
    if (fd < 0) return -1;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &held) == 0 && lstat(path, &named) == 0 &&
        held.st_ino == named.st_ino && held.st_dev == named.st_dev) {
        return fd;
    }
    close(fd);
    return -1;
}

static bool is_temporary_of(const char *entry, const char *name) {
    const size_t len = strlen(name);
    if (strncmp(entry, name, len) != 0 || strncmp(entry + len, SUFFIX, strlen(SUFFIX)) != 0)
        return false;
    const char *digits = entry + len + strlen(SUFFIX);
    return *digits && strspn(digits, "0123456789") == strlen(digits);
}

static void remove_stale(const char *parent, const char *name) {
    DIR *dir = opendir(parent);
    if (!dir) return;
    for (const struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        char path[2100];
        if (!is_temporary_of(entry->d_name, name)) continue;
        (void)snprintf(path, sizeof path, "%s/%s", parent, entry->d_name);
        const int fd = lock_directory(path);
        if (fd < 0) continue;
        remove_tree(path);
        close(fd);
    }
    closedir(dir);
}

static bd_status check_space(const char *parent, uint64_t needed_bytes, bd_error *err) {
    struct statvfs info;
    if (statvfs(parent, &info) != 0 || info.f_blocks == 0)
        return BD_OK; /* unknown: writing will tell */
    const uint64_t free_bytes = (uint64_t)info.f_bavail * info.f_frsize;
    if (free_bytes >= needed_bytes) return BD_OK;
    return bd_fail(err, BD_E_IO, parent,
                   "no space left in %s: %llu bytes are needed, %llu are free", parent,
                   (unsigned long long)needed_bytes, (unsigned long long)free_bytes);
}

bd_status bd_output_begin(bd_output_dir *dir, uint64_t needed_bytes, bd_error *err) {
    char parent[sizeof dir->path];
    const char *name = split(dir->path, parent, sizeof parent);
    remove_stale(parent, name);
    bd_status status = check_space(parent, needed_bytes, err);
    if (status != BD_OK) return status;
    bd_stop_begin();
    (void)snprintf(dir->temporary, sizeof dir->temporary, "%.*s" SUFFIX "%ld",
                   (int)(sizeof dir->temporary - 32), dir->path, (long)getpid());
    /* Another run may take a directory that is not locked yet for a dead one's: then make it again.
     */
    for (uint32_t attempt = 0; attempt < 16; attempt++) {
        if (mkdir(dir->temporary, 0777) != 0) {
            return bd_fail_errno(err, BD_E_IO, dir->temporary, errno, "cannot create %s",
                                 dir->temporary);
        }
        dir->lock_fd = lock_directory(dir->temporary);
        if (dir->lock_fd >= 0) return BD_OK;
        (void)rmdir(dir->temporary);
    }
    return bd_fail(err, BD_E_IO, dir->temporary, "cannot lock %s", dir->temporary);
}

bd_status bd_output_copy(const bd_output_dir *dir, const char *from_dir, const char *const *names,
                         uint32_t count, bd_error *err) {
    bd_status status = BD_OK;
    for (uint32_t i = 0; i < count && status == BD_OK; i++) {
        char from[PATH_BYTES], to[PATH_BYTES], *data = NULL;
        size_t bytes = 0;
        status = bd_path_join(from, sizeof from, from_dir, names[i], err);
        if (status == BD_OK) status = bd_path_join(to, sizeof to, dir->temporary, names[i], err);
        if (status == BD_OK) status = bd_file_read(from, SIDE_FILE_BYTES_MAX, &data, &bytes, err);
        if (status == BD_OK) status = bd_file_replace(to, data, bytes, err);
        free(data);
    }
    return status;
}

/* ---- the end --------------------------------------------------------------------------------- */

static bd_status sync_directory(const char *path, bd_error *err) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int error_number = fd < 0 || fsync(fd) != 0 ? errno : 0;
    if (fd >= 0) close(fd);
    return error_number ? bd_fail_errno(err, BD_E_IO, path, error_number, "cannot sync %s", path)
                        : BD_OK;
}

/* Onto nothing or an empty directory a plain rename is atomic; a full one is exchanged, so that OUT
 * is never absent. Where the file system cannot exchange, the old one steps aside under a name that
 * the next run would remove. */
static int replace(const bd_output_dir *dir) {
    char aside[sizeof dir->temporary + 8];
    if (rename(dir->temporary, dir->path) == 0) return 0;
    if (errno != ENOTEMPTY && errno != EEXIST) return errno;
    if (renameat2(AT_FDCWD, dir->temporary, AT_FDCWD, dir->path, RENAME_EXCHANGE) == 0) {
        remove_tree(dir->temporary);
        return 0;
    }
    if (errno != ENOSYS && errno != EINVAL) return errno;
    (void)snprintf(aside, sizeof aside, "%s0", dir->temporary);
    if (rename(dir->path, aside) != 0) return errno;
    if (rename(dir->temporary, dir->path) != 0) {
        const int error_number = errno;
        (void)rename(aside, dir->path);
        return error_number;
    }
    remove_tree(aside);
    return 0;
}

bd_status bd_output_commit(bd_output_dir *dir, bd_error *err) {
    char parent[sizeof dir->path];
    (void)split(dir->path, parent, sizeof parent);
    bd_status status = sync_directory(dir->temporary, err);
    if (status == BD_OK) status = bd_stop_check(dir->path, err);
    if (status != BD_OK) return status;
    const int error_number = replace(dir);
    if (error_number) {
        return bd_fail_errno(err, BD_E_IO, dir->path, error_number, "cannot rename %s to %s",
                             dir->temporary, dir->path);
    }
    close(dir->lock_fd);
    dir->lock_fd = -1;
    bd_stop_end();
    return sync_directory(parent, err);
}

void bd_output_abort(bd_output_dir *dir) {
    if (dir->lock_fd >= 0) {
        remove_tree(dir->temporary);
        close(dir->lock_fd);
        dir->lock_fd = -1;
    }
    bd_stop_end();
}
