/* loader.h - brings a variant's delta from disk into device pages: a thread per rank that orders it
 * all, and others that read and verify, chunk by chunk. Of a model that is split a load is that of
 * all its ranks: pages are named as rank 0 has them, ready_count is the least of any rank, and a
 * rank that fails fails it. Owner: server. Threads: submit and cancel from bd-sched; the loader's
 * threads write a load's atomics and call `notify`. A load's memory is the submitter's, who leaves
 * it alone from submit until bd_load_finished() is true. */
#ifndef BITDELTA_LOADER_LOADER_H
#define BITDELTA_LOADER_LOADER_H

#include <stdatomic.h>

#include "bitdelta/base/mailbox.h"
#include "bitdelta/base/metrics.h"
#include "bitdelta/model/overlay.h"

typedef struct bd_loader bd_loader;

typedef enum bd_io_choice { BD_IO_AUTO, BD_IO_URING, BD_IO_PREAD } bd_io_choice;

typedef struct bd_loader_options { /* 0 where a default is named */
    bd_model *model;
    uint32_t rank; /* names the threads: bd-load-<rank>; set by the loader of several */
    bd_io_choice io;
    /* How many read at once where no ring does (buffered files, --io pread), but no more than
     * depth; and half as many again for sums and copies meanwhile, or all for files in memory. 8 */
    uint32_t read_threads;
    /* One read; 4 MiB. A file whose chunks are larger is verified whole before it is read. */
    uint32_t block_bytes;
    uint32_t depth;             /* blocks in the ring; staging is for twice as many; 8 */
    uint32_t loads_in_parallel; /* further loads wait in order; 2 */
    /* Called from loader threads whenever a load moved on; must not block; may be NULL. */
    void (*notify)(void *ctx);
    void *notify_ctx;
    bd_metrics *metrics; /* may be NULL */
} bd_loader_options;

/* What a step may know of a load that is still under way. Layers [0, ready_count) of the overlay
 * may be read, no others. */
typedef struct bd_load_early {
    bd_overlay *overlay;
    uint64_t bytes;       /* of all files of the load */
    uint32_t count;       /* ready indices */
    uint64_t end_bytes[]; /* [count] read_bytes at which an index is complete; never falls */
} bd_load_early;

/* A delta's files in host memory, all shards one after the other, cut into blocks. */
typedef struct bd_load_host {
    void *const *blocks; /* [ceil(bytes / block_bytes)] */
    uint64_t block_bytes, bytes;
    /* The load takes everything from here and opens no shard. Else it writes here what it reads and
     * has checked, and sets this if all went well. */
    bool filled;
    bd_overlay_plan plan; /* valid while filled; ended by bd_load_host_clear */
    void (*plan_destroy)(bd_overlay_plan *plan);
    /* Of a model that is split, while filled: the same bytes as each rank takes them, with its
     * plan. The loader's, until bd_load_host_clear. */
    struct bd_load_host *parts;
    uint32_t part_count;
    /* Internal: [files] those that a rank writes already; NULL: there is one to write all. */
    _Atomic bool *claims;
} bd_load_host;

/* Once no load uses it: nothing is filled then. */
void bd_load_host_clear(bd_load_host *host);

typedef struct bd_load {
    bd_message message;    /* internal */
    struct bd_load *whole; /* internal: the load that this is one rank's part of */
    const bd_delta *delta; /* borrowed until finished */
    void *const *pages;    /* in the delta arena; borrowed and written until finished */
    uint32_t page_count;   /* at least the plan's, see bd_overlay_pages_per_variant */
    /* Wants `early`, which is the submitter's once it is set, also when the load fails: free() it
     * after `finished`, and its overlay when the load failed. */
    bool stream;
    /* Set once, soon after the start, if every file has usable chunk sums; else NULL for good. */
    _Atomic(bd_load_early *) early;
    bd_load_host *host;           /* borrowed and used until finished; may be NULL */
    _Atomic uint32_t ready_count; /* ready indices complete and visible so far, see overlay.h */
    _Atomic uint64_t read_bytes;
    _Atomic bool cancel;   /* set by the submitter; the load still finishes, soon */
    _Atomic bool finished; /* last write; everything below is valid afterwards (acquire) */
    bd_status status;      /* BD_OK, BD_CANCELLED, BD_E_IO, BD_E_CORRUPT, BD_E_LENGTH, ... */
    bd_error error;        /* names file, chunk and byte range */
    /* BD_OK: over pages[0 .. pages_used), the submitter's (early's if there was one); else NULL */
    bd_overlay *overlay;
    uint32_t pages_used;
    uint64_t started_us, finished_us;
} bd_load;

/* Counts on the files not being changed in place: replace a variant by renaming a new directory
 * over it. */
BD_MUST_CHECK bd_status bd_loader_create(const bd_loader_options *options, bd_loader **out,
                                         bd_error *err);
void bd_loader_destroy(bd_loader *loader);              /* cancels and waits */
const char *bd_loader_io_name(const bd_loader *loader); /* "uring" or "pread" */
/* One sentence for the log when something better was refused (io_uring, registered buffers);
 * else "". */
const char *bd_loader_io_reason(const bd_loader *loader);
/* Takes a load with the input fields set and all others zero. BD_E_SHUTDOWN after destroy began. */
BD_MUST_CHECK bd_status bd_loader_submit(bd_loader *loader, bd_load *load, bd_error *err);
static inline bool bd_load_finished(const bd_load *load) {
    return atomic_load_explicit(&load->finished, memory_order_acquire);
}

#endif
