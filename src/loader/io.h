/* io.h - blocks from files into staging memory through one io_uring. One attempt per read: short
 * counts and -errno come back as they are, shard_file.c knows what they mean. Where there is no
 * ring, or a file that is read as fast by a thread, workers.h reads. Owner and only caller: the
 * loader's thread, from create to destroy (rings want one thread). */
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

typedef struct bd_ring bd_ring;

typedef struct bd_ring_options {
    bd_mailbox *inbox; /* with eventfd */
    uint8_t *staging;
    size_t staging_bytes;
    uint32_t depth;
} bd_ring_options;

/* BD_E_UNSUPPORTED: the kernel or a seccomp filter refuses io_uring; err says which. */
BD_MUST_CHECK bd_status bd_ring_create(const bd_ring_options *options, bd_ring **out,
                                       bd_error *err);
/* What could not be had, for one log line; else "". */
const char *bd_ring_note(const bd_ring *ring);
void bd_ring_submit(bd_ring *ring, bd_read *read); /* at most depth reads at once */
void bd_ring_kick(bd_ring *ring);                  /* starts what was submitted */
/* Starts what was submitted and, if `sleep`, waits until a read is finished or the inbox was
 * signalled. Finished reads in any order, or NULL. */
bd_message *bd_ring_wait(bd_ring *ring, bool sleep);
/* It stopped working: all reads come back failed from then on, and those that were under way may
 * still be written to by the kernel. */
bool bd_ring_broken(const bd_ring *ring);
void bd_ring_destroy(bd_ring *ring); /* no read may be under way; NULL is fine */

#endif
