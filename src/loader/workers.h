/* workers.h - the threads bd-read-<rank>, which do with a block what takes time: read it, where no
 * ring does, and what is to be done with it once it is there. Work is taken in order, but what is
 * read already comes first. Reading is by at most read_threads of them at once, for one load by its
 * share of these; half as many again are there so that a read need not wait for the sums of those
 * before it. Reads that wait for nothing are copies, and work as sums are: by all threads. Owner
 * and only caller: the loader's thread, but for the functions of the options, which run on the
 * workers. */
#ifndef BITDELTA_SRC_LOADER_WORKERS_H
#define BITDELTA_SRC_LOADER_WORKERS_H

#include "bitdelta/base/mailbox.h"

typedef struct bd_workers bd_workers;

typedef struct bd_workers_options {
    uint32_t rank, read_threads;
    bd_mailbox *inbox; /* woken whenever something is done */
    void *ctx;
    bool (*read)(void *ctx, bd_message *work); /* false: not read, nothing is to be done with it */
    void (*finish)(void *ctx, bd_message *work);
    /* How many of the work's load are being read: kept here, counted by the workers. Short, and
     * under their lock, as is the next. */
    uint32_t *(*reading)(void *ctx, bd_message *work);
    bool (*copies)(void *ctx, bd_message *work); /* reading it waits for nothing */
} bd_workers_options;

/* The threads there are, or a load's share of them, to so many that may read. */
static inline uint32_t bd_workers_threads(uint32_t reading) {
    return reading + (reading + 1) / 2;
}
BD_MUST_CHECK bd_status bd_workers_create(const bd_workers_options *options, bd_workers **out,
                                          bd_error *err);
void bd_workers_destroy(bd_workers *workers); /* all work was taken back; NULL is fine */
/* At most so many reads of one load at once from now on; read_threads at first. */
void bd_workers_set_share(bd_workers *workers, uint32_t share);
void bd_workers_read(bd_workers *workers, bd_message *work);   /* to be read and finished */
void bd_workers_finish(bd_workers *workers, bd_message *work); /* is read, to be finished */
bd_message *bd_workers_take(bd_workers *workers);              /* all that is done, or NULL */

#endif
