/* shard_file.c - opening a shard past the page cache, and the rules for read attempts: interrupted
 * ones are repeated, short ones continued, what refuses O_DIRECT is read buffered, the rest fails
 * with file and offset. */
#include "shard_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "bitdelta/base/file.h"

#define RETRIES_MAX 10000u
#define STALLS_MAX  8u

static bd_status open_buffered(bd_shard_file *file, bd_error *err) {
    if (atomic_load(&file->fd_buffered) >= 0) return BD_OK;
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot open the shard");
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    int none = -1;
    if (!atomic_compare_exchange_strong(&file->fd_buffered, &none, fd))
        close(fd); /* another thread was first */
    return BD_OK;
}

static int any_fd(const bd_shard_file *file) {
    const int buffered = atomic_load(&((bd_shard_file *)(uintptr_t)file)->fd_buffered);
    return buffered >= 0 ? buffered : file->fd_direct;
}

static bool lies_in_memory(int fd) {
    struct statfs fs;
    return fstatfs(fd, &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
}

bd_status bd_shard_file_open(bd_shard_file *file, const char *dir, const bd_delta_file *entry,
                             bd_error *err) {
    BD_ASSERT(file->fd_direct < 0 && atomic_load(&file->fd_buffered) < 0);
    file->bytes = entry->bytes;
    bd_status status = bd_path_join(file->path, sizeof file->path, dir, entry->name, err);
    if (status != BD_OK) return status;
    /* Looked at before it is opened: opening a pipe would wait for a writer. */
    if (stat(file->path, &file->at_open) != 0)
        return bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot open the shard");
    if (!S_ISREG(file->at_open.st_mode))
        return bd_fail(err, BD_E_IO, file->path, "the shard is not a regular file");
    file->fd_direct = open(file->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (file->fd_direct < 0 && (errno == EINVAL || errno == EOPNOTSUPP))
        status = open_buffered(file, err);
    else if (file->fd_direct < 0)
        status = bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot open the shard");
    if (status == BD_OK && fstat(any_fd(file), &file->at_open) != 0)
        status = bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot look at the shard");
    if (status == BD_OK && (uint64_t)file->at_open.st_size != file->bytes)
        status = bd_fail(err, BD_E_LENGTH, file->path,
                         "the shard has %" PRIu64 " bytes, delta.json records %" PRIu64,
                         (uint64_t)file->at_open.st_size, file->bytes);
    if (status == BD_OK) file->in_memory = lies_in_memory(any_fd(file));
    if (status != BD_OK) bd_shard_file_close(file);
    return status;
}

void bd_shard_file_close(bd_shard_file *file) {
    const int buffered = atomic_exchange(&file->fd_buffered, -1);
    if (file->fd_direct >= 0) close(file->fd_direct);
    if (buffered >= 0) close(buffered);
    file->fd_direct = -1;
}

static bool same_time(const struct timespec *a, const struct timespec *b) {
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

bd_status bd_shard_file_unchanged(const bd_shard_file *file, bd_error *err) {
    struct stat now, named;
    if (fstat(any_fd(file), &now) != 0)
        return bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot look at the shard");
    if (now.st_size != file->at_open.st_size)
        return bd_fail(err, BD_E_LENGTH, file->path,
                       "the shard's size changed from %" PRIu64 " to %" PRIu64
                       " bytes while it was read",
                       file->bytes, (uint64_t)now.st_size);
    if (!file->no_chunk_sums) return BD_OK;
    /* Verified by name, then read through the descriptor: both must be the same unchanged file. */
    bool same = stat(file->path, &named) == 0 && named.st_dev == now.st_dev &&
                named.st_ino == now.st_ino && same_time(&now.st_mtim, &file->at_open.st_mtim);
    if (same) return BD_OK;
    return bd_fail(err, BD_E_CORRUPT, file->path,
                   "the shard was changed or replaced while it was read");
}

void bd_shard_file_drop_cache(const bd_shard_file *file, uint64_t from, uint64_t bytes) {
    const int buffered = atomic_load(&((bd_shard_file *)(uintptr_t)file)->fd_buffered);
    if (buffered >= 0 && !file->in_memory)
        (void)posix_fadvise(buffered, (off_t)from, (off_t)bytes, POSIX_FADV_DONTNEED);
}

static void next_attempt(bd_span *span) {
    const bd_shard_file *file = span->file;
    span->read.fd = any_fd(file);
    span->read.data = span->staging + span->got_bytes;
    span->read.offset = span->read_from + span->got_bytes;
    const uint64_t left = span->ask_bytes - span->got_bytes;
    span->read.bytes = (uint32_t)(left < span->piece_bytes ? left : span->piece_bytes);
}

void bd_span_begin(bd_span *span, bd_shard_file *file, uint64_t from, uint64_t bytes) {
    const uint64_t mask = BD_IO_ALIGN_BYTES - 1;
    span->file = file;
    span->from = from;
    span->bytes = bytes;
    span->read_from = from & ~mask;
    span->need_bytes = from + bytes - span->read_from;
    /* A file's tail is asked for beyond its end: the exact length would not be a multiple. */
    span->ask_bytes = (span->need_bytes + mask) & ~mask;
    span->got_bytes = 0;
    span->piece_bytes = file->in_memory ? BD_IO_PIECE_BYTES : UINT64_MAX;
    span->retries = span->stalls = 0;
    next_attempt(span);
}

static bd_span_state step_error(bd_span *span, int error_number, bd_error *err) {
    bool repeat = error_number == EINTR || error_number == EAGAIN;
    if (repeat && ++span->retries <= RETRIES_MAX) return BD_SPAN_AGAIN;
    bool direct = span->read.fd == span->file->fd_direct;
    if (direct && (error_number == EINVAL || error_number == EOPNOTSUPP)) {
        if (open_buffered(span->file, err) != BD_OK) return BD_SPAN_FAILED;
        next_attempt(span);
        return BD_SPAN_AGAIN;
    }
    bd_fail_errno(err, BD_E_IO, span->file->path, error_number,
                  "reading bytes %" PRIu64 " to %" PRIu64 " failed", span->read.offset,
                  span->read.offset + span->read.bytes);
    return BD_SPAN_FAILED;
}

bd_span_state bd_span_step(bd_span *span, int32_t result, bd_error *err) {
    if (result < 0) return step_error(span, -result, err);
    BD_ASSERT((uint32_t)result <= span->read.bytes);
    uint64_t got = span->got_bytes + (uint32_t)result;
    if (got >= span->need_bytes) {
        span->got_bytes = got;
        return BD_SPAN_DONE;
    }
    /* A direct read that ends inside a sector ended with the file, or has to be continued from the
     * sector's start. */
    if (span->read.fd == span->file->fd_direct) got &= ~(uint64_t)(BD_IO_ALIGN_BYTES - 1);
    bool stalled = got <= span->got_bytes;
    if (stalled && (result == 0 || ++span->stalls > STALLS_MAX)) {
        bd_fail(err, BD_E_LENGTH, span->file->path,
                "the shard ends at byte %" PRIu64 " of the %" PRIu64
                " it had: it was cut while it was read",
                span->read.offset + (uint32_t)result, span->file->bytes);
        return BD_SPAN_FAILED;
    }
    if (!stalled) {
        span->got_bytes = got;
        span->stalls = 0;
    }
    next_attempt(span);
    return BD_SPAN_AGAIN;
}
