/* raw_read.h - files read once with io_uring, past the page cache, into memory that is overwritten:
 * as fast as loads could be. */
#ifndef BITDELTA_BENCH_RAW_READ_H
#define BITDELTA_BENCH_RAW_READ_H

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RAW_READ_BYTES = 4 << 20, RAW_READ_DEPTH_MAX = 1024 };

typedef struct raw_reader {
    struct io_uring ring;
    uint8_t *to; /* [depth][RAW_READ_BYTES] */
    uint64_t depth;
    bool fixed; /* registered, which not everybody may */
} raw_reader;

static inline void raw_read_die(const char *path, int error) {
    fprintf(stderr, "%s: %s\n", path, strerror(error));
    exit(1);
}

/* In huge pages, there already: a disk's requests take few pieces of memory each. NULL: none. */
static inline void *raw_read_memory(size_t bytes) {
    void *memory = NULL;
    errno = posix_memalign(&memory, 2u << 20, bytes);
    if (errno != 0) return NULL;
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memset(memory, 1, bytes);
}

static inline void raw_read_open(raw_reader *r, uint64_t depth) {
    const size_t all = depth * RAW_READ_BYTES;
    r->depth = depth;
    r->to = raw_read_memory(all);
    const struct iovec whole = {r->to, all};
    if (!r->to || io_uring_queue_init((unsigned)depth, &r->ring, 0) != 0)
        raw_read_die("io_uring", errno);
    r->fixed = io_uring_register_buffers(&r->ring, &whole, 1) == 0;
}

static inline void raw_read_close(raw_reader *r) {
    io_uring_queue_exit(&r->ring);
    free(r->to);
}

/* `depth` blocks in flight. */
static inline void raw_read(raw_reader *r, const char *path, uint64_t bytes) {
    uint64_t sent = 0, done = 0, free_count = r->depth, slots[RAW_READ_DEPTH_MAX];
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0) raw_read_die(path, errno);
    for (uint64_t i = 0; i < r->depth; i++)
        slots[i] = i;
    while (done < bytes) {
        for (; free_count > 0 && sent < bytes; sent += RAW_READ_BYTES) {
            struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);
            const uint64_t slot = slots[--free_count];
            uint8_t *at = r->to + slot * RAW_READ_BYTES;
            if (r->fixed)
                io_uring_prep_read_fixed(sqe, fd, at, RAW_READ_BYTES, sent, 0);
            else
                io_uring_prep_read(sqe, fd, at, RAW_READ_BYTES, sent);
            io_uring_sqe_set_data64(sqe, slot);
        }
        io_uring_submit_and_wait(&r->ring, 1);
        struct io_uring_cqe *cqe;
        while (io_uring_peek_cqe(&r->ring, &cqe) == 0) {
            if (cqe->res <= 0) raw_read_die(path, -cqe->res);
            done += (uint64_t)cqe->res;
            slots[free_count++] = io_uring_cqe_get_data64(cqe);
            io_uring_cqe_seen(&r->ring, cqe);
        }
    }
    close(fd);
}

#endif
