/* loader.h - brings a variant's delta from disk into device pages: one thread per rank, verified chunk by chunk.
 * Owner: server. Threads: submit and cancel from bd-sched; the loader's threads write a load's atomics and call
 * `notify`. A load's memory belongs to the submitter from submit until bd_load_finished() is true. */
#ifndef BITDELTA_LOADER_LOADER_H
#define BITDELTA_LOADER_LOADER_H

#include <stdatomic.h>

#include "bitdelta/base/mailbox.h"
#include "bitdelta/base/metrics.h"
#include "bitdelta/model/overlay.h"

typedef struct bd_loader bd_loader;

typedef enum bd_io_choice { BD_IO_AUTO, BD_IO_URING, BD_IO_PREAD } bd_io_choice;

typedef struct bd_loader_options {
    bd_model *model;
    bd_io_choice io;
    uint32_t read_threads;        /* pread path */
    uint32_t block_bytes;         /* 4 MiB */
    uint32_t depth;               /* blocks in flight */
    uint32_t loads_in_parallel;
    void (*notify)(void *ctx);    /* called from loader threads whenever a load moved on; must not block */
    void *notify_ctx;
    bd_metrics *metrics;          /* may be NULL */
} bd_loader_options;

typedef struct bd_load {
    bd_message message;           /* internal */
    const bd_delta *delta;        /* borrowed until finished */
    const bd_overlay_plan *plan;
    void *const *pages;
    _Atomic uint32_t ready_count; /* ready indices complete so far, see overlay.h */
    _Atomic uint64_t read_bytes;
    _Atomic bool cancel;          /* set by the submitter */
    _Atomic bool finished;        /* last write; status and error are valid afterwards (acquire) */
    bd_status status;             /* BD_OK, BD_CANCELLED, BD_E_IO, BD_E_CORRUPT, BD_E_FORMAT, ... */
    bd_error error;               /* names file, chunk and byte range */
    uint64_t started_us, finished_us;
} bd_load;

BD_MUST_CHECK bd_status bd_loader_create(const bd_loader_options *options, bd_loader **out, bd_error *err);
void bd_loader_destroy(bd_loader *loader); /* cancels and waits */
const char *bd_loader_io_name(const bd_loader *loader); /* "uring" or "pread" */
BD_MUST_CHECK bd_status bd_loader_submit(bd_loader *loader, bd_load *load, bd_error *err);
static inline bool bd_load_finished(const bd_load *load) {
    return atomic_load_explicit(&load->finished, memory_order_acquire);
}

#endif
