/* load_job.h - one load under way: its plan, files, overlay and the order of its blocks. Does no
 * reading itself: it says which block comes next, what is to be done with one that was read, and
 * takes it back. Owner and thread: the loader's, but for bd_load_job_work, which runs on the
 * workers, for several blocks at once. */
#ifndef BITDELTA_SRC_LOADER_LOAD_JOB_H
#define BITDELTA_SRC_LOADER_LOAD_JOB_H

#include <pthread.h>

#include "loader_internal.h"
#include "shard_file.h"

typedef struct bd_load_job bd_load_job;

typedef struct bd_block { /* one staging slot; free, or a block of a job in file order */
    bd_span span;         /* first: the reader hands back span.read */
    struct bd_block *next;
    bd_load_job *job;
    uint32_t file_index;
    bool in_ring; /* being read by the ring */
    bool kept;    /* its copy goes to host memory */
    bool read_done;
    bool summed; /* its chunks were checked as they came */
    /* What is wrong with it. It is the load's when it is the block's turn, so that the same damage
     * is told as the same. */
    bd_status status;
    bd_error error;
} bd_block;

typedef enum bd_verify_state { BD_VERIFY_NONE, BD_VERIFY_RUNNING, BD_VERIFY_DONE } bd_verify_state;

struct bd_load_job {
    bd_load_job *next;
    bd_load *load;
    const bd_loader_source *source;
    bd_mailbox *inbox; /* woken when a whole-file check is done */
    uint32_t block_bytes;
    bool has_plan;
    bd_overlay_plan plan;
    bd_overlay *overlay;
    bool overlay_shared; /* the submitter has it since the start, and keeps it */
    bd_overlay_feed *feed;
    bd_shard_file *files; /* [delta->shard_count]; those without pieces stay closed */
    bool *used;           /* [delta->shard_count] */
    uint32_t send_file;   /* the next block to be read */
    uint64_t send_from;
    uint64_t *done_bytes;   /* [delta->shard_count] of blocks taken back */
    bool keeps;             /* it is this rank that writes the file being read to host memory */
    bd_block *first, *last; /* read or being read, in file order */
    uint32_t blocks_flying, blocks_held, blocks_in_ring;
    uint32_t reading; /* the workers' */
    bool unsettled;   /* fed since it was last settled */
    bd_status status; /* anything but BD_OK stops the load once nothing flies */
    bd_error error;
    _Atomic bool stopped; /* the status is not BD_OK: workers need not go on */
    /* A whole-file check of send_file, on its own thread. */
    _Atomic int verify_state; /* DONE is the thread's last write to the job */
    pthread_t verify_thread;
    bd_status verify_status;
    bd_error verify_error;
};

/* Never fails as a call: a load that cannot begin is a job with a status. NULL: out of memory. */
bd_load_job *bd_load_job_create(bd_load *load, const bd_loader_source *source, bd_mailbox *inbox,
                                uint32_t block_bytes);
/* Whether the job's next bytes come from memory, not from a disk. */
bool bd_load_job_in_memory(bd_load_job *job);
/* Gives `block` the job's next span and appends it to the job. false: nothing to read now. */
bool bd_load_job_next(bd_load_job *job, bd_block *block);
/* On a worker that reads a block from memory: the sums of what of it is there already, piece by
 * piece. false: one is wrong, block->error has it. */
typedef struct bd_block_sum {
    bd_chunk_sum chunks;
    uint64_t done_bytes;
} bd_block_sum;
void bd_block_sum_begin(bd_block_sum *sum, const bd_block *block);
bool bd_block_sum_there(bd_block_sum *sum, bd_block *block);
/* On a worker: checks the sums of a block that was read, leaves its copy in host memory and, where
 * feeds can be filled from anywhere, fills the pages. Its faults are the block's. */
void bd_load_job_work(bd_load_job *job, bd_block *block);
/* A block that no thread has any more, detached: the oldest if it was read, or any that was where
 * the order does not matter; else NULL. */
bd_block *bd_load_job_pop(bd_load_job *job);
/* Feeds a popped block, unless a worker has. Returns true when ready_count moved. */
bool bd_load_job_feed(bd_load_job *job, const bd_block *block);
/* When there is nothing to feed for now. Likewise. */
bool bd_load_job_settle(bd_load_job *job);
/* Of a load from host memory: feeds about a block's worth. Returns whether there is more;
 * *moved: ready_count has. */
bool bd_load_job_feed_host(bd_load_job *job, bool *moved);
void bd_load_job_fail(bd_load_job *job, bd_status status, const bd_error *error);
void bd_load_job_check_cancel(bd_load_job *job);
static inline bool bd_load_cancelled(bd_load *load) {
    return atomic_load(&load->cancel) || (load->whole && atomic_load(&load->whole->cancel));
}
/* Nothing flies and nothing is left to do (or the job failed). */
bool bd_load_job_over(bd_load_job *job);
/* Fills the load's results except `finished` and frees the job. */
void bd_load_job_end(bd_load_job *job);

#endif
