/* shard_file.h - one file of a delta while it is loaded, and one block of it while it is read: what
 * short counts and errors of a read attempt mean. Knows nothing of rings. Owner: the loader's
 * thread; a span is whoever's that reads it, and several threads may read one file. */
#ifndef BITDELTA_SRC_LOADER_SHARD_FILE_H
#define BITDELTA_SRC_LOADER_SHARD_FILE_H

#include <stdatomic.h>
#include <sys/stat.h>

#include "bitdelta/delta/delta.h"
#include "io.h"

/* O_DIRECT wants offsets, lengths and addresses in these; right for every disk, 512-byte sectors or
 * 4K. */
#define BD_IO_ALIGN_BYTES 4096u
/* What is copied from memory at once, so that a core's own cache still has it when it is summed. */
#define BD_IO_PIECE_BYTES (256u << 10)

typedef struct bd_shard_file {
    char path[1024 + 256 + 2];
    uint64_t bytes;          /* recorded in delta.json and found on disk */
    int fd_direct;           /* -1: not open */
    _Atomic int fd_buffered; /* likewise; opened by whichever thread finds that it has to be */
    bool in_memory;          /* a read is a copy: nothing is gained by not waiting for it */
    bool no_chunk_sums; /* the whole file was verified before, so not even its time may change */
    struct stat at_open;
} bd_shard_file;

/* Refuses anything but a regular file of exactly the recorded size. */
BD_MUST_CHECK bd_status bd_shard_file_open(bd_shard_file *file, const char *dir,
                                           const bd_delta_file *entry, bd_error *err);
void bd_shard_file_close(bd_shard_file *file); /* closed already: fine */
/* Whether reads are best left to a ring: they go past the page cache and take their time. */
static inline bool bd_shard_file_suits_ring(bd_shard_file *file) {
    return file->fd_direct >= 0 && !file->in_memory && atomic_load(&file->fd_buffered) < 0;
}
/* After the last byte: the file must still be what it was. */
BD_MUST_CHECK bd_status bd_shard_file_unchanged(const bd_shard_file *file, bd_error *err);
/* These bytes will not be read again: keeps a buffered load from pushing others out of the page
 * cache. */
void bd_shard_file_drop_cache(const bd_shard_file *file, uint64_t from, uint64_t bytes);

typedef struct bd_span { /* bytes [from, from + bytes) of a file on their way into staging */
    bd_read read;        /* first: the attempt under way */
    bd_shard_file *file;
    uint8_t *staging; /* BD_IO_ALIGN_BYTES aligned, bytes rounded outwards to that fit */
    uint64_t from, bytes;
    uint64_t read_from, need_bytes, ask_bytes, got_bytes; /* from read_from on */
    uint64_t piece_bytes;                                 /* of one attempt at most */
    uint32_t retries, stalls;
} bd_span;

typedef enum bd_span_state { BD_SPAN_DONE, BD_SPAN_AGAIN, BD_SPAN_FAILED } bd_span_state;

/* Fills span->read for the first attempt. */
void bd_span_begin(bd_span *span, bd_shard_file *file, uint64_t from, uint64_t bytes);
/* Judges the attempt. AGAIN: span->read is the next one. FAILED: *err names file and offset. */
bd_span_state bd_span_step(bd_span *span, int32_t result, bd_error *err);
/* So many of its bytes are there. */
static inline uint64_t bd_span_there(const bd_span *span) {
    const uint64_t before = span->from - span->read_from;
    if (span->got_bytes <= before) return 0;
    const uint64_t there = span->got_bytes - before;
    return there < span->bytes ? there : span->bytes;
}
static inline const uint8_t *bd_span_data(const bd_span *span) {
    return span->staging + (span->from - span->read_from);
}

#endif
