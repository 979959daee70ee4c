/* io.h - how blocks get from files into staging memory: one table, two implementations (io_uring,
 * threads with pread). One attempt per read: short counts and -errno come back as they are,
 * shard_file.c knows what they mean. Owner and only caller: the loader's thread, from create to
 * destroy (io_uring's rings want one thread). */
#ifndef BITDELTA_SRC_LOADER_IO_H
#define BITDELTA_SRC_LOADER_IO_H

#include <stddef.h>

#include "bitdelta/base/mailbox.h"

typedef struct bd_read {
    bd_message message; /* first: finished reads are linked by it */
    int fd;
    uint32_t bytes;
    uint64_t offset;
    uint8_t *data;  /* inside the staging */
    int32_t result; /* bytes read or -errno */
} bd_read;

typedef struct bd_io bd_io;

typedef struct bd_io_ops {
    const char *name;
    void (*submit)(bd_io *io, bd_read *read); /* at most depth reads at once */
    void (*kick)(bd_io *io);                  /* optional: starts what was submitted */
    /* Starts what was submitted and sleeps until a read is finished or the inbox was signalled.
     * Finished reads in any order, or NULL. */
    bd_message *(*wait)(bd_io *io);
    void (*destroy)(bd_io *io); /* no read may be under way */
} bd_io_ops;

struct bd_io { /* first member of each implementation */
    const bd_io_ops *ops;
    char note[160]; /* what could not be had, for one log line; else "" */
};

typedef struct bd_io_options {
    bd_mailbox *inbox; /* with eventfd */
    uint8_t *staging;
    size_t staging_bytes;
    uint32_t depth;
    uint32_t read_threads; /* pread only */
    uint32_t rank;
} bd_io_options;

/* BD_E_UNSUPPORTED: the kernel or a seccomp filter refuses io_uring; err says which. */
BD_MUST_CHECK bd_status bd_io_uring_create(const bd_io_options *options, bd_io **out,
                                           bd_error *err);
BD_MUST_CHECK bd_status bd_io_pread_create(const bd_io_options *options, bd_io **out,
                                           bd_error *err);

#endif
