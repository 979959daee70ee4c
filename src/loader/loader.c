/* loader.c - the loader's thread: takes loads in order and keeps the blocks of all of them moving,
 * from the ring or the workers that read them, by the workers that check them, to the loads that
 * they are for. Staging is one region made at create, where the backend has such memory one that
 * uploads take their bytes from. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "io.h"
#include "load_job.h"
#include "loader_internal.h"
#include "ranks.h"
#include "workers.h"

#define BLOCK_BYTES_MAX (256u << 20)
#define DEPTH_MAX       1024u
#define HUGE_PAGE_BYTES (2u << 20)

typedef struct loader_metrics {
    bd_metric *seconds, *read_bytes;
} loader_metrics;

struct bd_loader {
    bd_loader_ranks *ranks; /* of a model that is split: they do it all, the rest is not used */
    bd_loader_options options;
    bd_loader_source source;
    loader_metrics metrics;
    bd_mailbox *inbox; /* of bd_load messages */
    _Atomic bool stop;
    pthread_t thread;
    const char *io_name; /* this and the next are fixed before create returns */
    char io_reason[sizeof((bd_error *)0)->message + 64];
    /* The thread's own from here on. */
    bd_ring *ring; /* NULL: workers do all reading */
    bd_workers *workers;
    void *mapping; /* staging lies in it */
    size_t mapping_bytes;
    uint8_t *staging;
    size_t staging_bytes;
    bool staging_locked;
    bd_block *blocks; /* [block_count]: as many as may be read by the ring, and as many again */
    uint32_t block_count, ring_count;
    uint32_t memory_count; /* being copied from files in memory, or queued for it */
    bd_block *free_blocks;
    bd_block *lent_blocks;                    /* fed, but the backend may still copy from them */
    bd_message *waiting_first, *waiting_last; /* loads not begun */
    bd_load_job *jobs;                        /* begun, oldest first */
    uint32_t job_count;
    /* Handshake of create. */
    sem_t started;
    bd_status start_status;
    bd_error start_error;
};

static void notify(const bd_loader *loader) {
    if (loader->options.notify) loader->options.notify(loader->options.notify_ctx);
}

static void finish_load(const bd_loader *loader, bd_load *load) {
    if (load->status == BD_OK && loader->metrics.seconds && !load->whole)
        bd_metric_observe(loader->metrics.seconds,
                          (double)(load->finished_us - load->started_us) * 1e-6);
    atomic_store_explicit(&load->finished, true, memory_order_release);
    notify(loader); /* the load may be gone by now */
}

static void finish_unbegun(const bd_loader *loader, bd_load *load, bd_status status,
                           const char *text) {
    load->status = bd_fail(&load->error, status, load->delta->variant, "%s", text);
    load->finished_us = bd_now_us();
    finish_load(loader, load);
}

/* ---- loads ---- */

static void take_inbox(bd_loader *loader) {
    bd_message *list = bd_mailbox_take(loader->inbox);
    if (!list) return;
    if (loader->waiting_last)
        loader->waiting_last->next = list;
    else
        loader->waiting_first = list;
    while (list->next)
        list = list->next;
    loader->waiting_last = list;
}

static bd_load *next_waiting(bd_loader *loader) {
    bd_message *message = loader->waiting_first;
    if (!message) return NULL;
    loader->waiting_first = message->next;
    if (!loader->waiting_first) loader->waiting_last = NULL;
    return (bd_load *)message;
}

static uint32_t share_of(const bd_loader *loader, uint32_t count) {
    const uint32_t jobs = loader->job_count ? loader->job_count : 1;
    return count > jobs ? count / jobs : 1;
}

/* A thread more than blocks would only sleep. */
static uint32_t read_threads(const bd_loader_options *options) {
    return options->read_threads < options->depth ? options->read_threads : options->depth;
}

static void share_reads(bd_loader *loader) {
    bd_workers_set_share(loader->workers, share_of(loader, read_threads(&loader->options)));
}

static void begin_load(bd_loader *loader, bd_load *load) {
    load->started_us = bd_now_us();
    bd_load_job *job =
        bd_load_job_create(load, &loader->source, loader->inbox, loader->options.block_bytes);
    if (!job) {
        finish_unbegun(loader, load, BD_E_MEMORY, "out of memory to begin the load");
        return;
    }
    bd_load_job **end = &loader->jobs;
    while (*end)
        end = &(*end)->next;
    *end = job;
    loader->job_count++;
    share_reads(loader);
}

/* Loads cancelled while they wait leave the queue without a turn. */
static void drop_cancelled(bd_loader *loader) {
    bd_message *list = loader->waiting_first, *next;
    loader->waiting_first = loader->waiting_last = NULL;
    for (; list; list = next) {
        next = list->next;
        bd_load *load = (bd_load *)list;
        if (atomic_load(&loader->stop) || bd_load_cancelled(load)) {
            load->started_us = bd_now_us();
            finish_unbegun(loader, load, BD_CANCELLED, "the load was cancelled");
            continue;
        }
        list->next = NULL;
        if (loader->waiting_last)
            loader->waiting_last->next = list;
        else
            loader->waiting_first = list;
        loader->waiting_last = list;
    }
}

/* ---- blocks ---- */

static void release_block(bd_loader *loader, bd_block *block) {
    block->job = NULL;
    block->next = loader->free_blocks;
    loader->free_blocks = block;
}

static void release_blocks(bd_loader *loader, bd_block *list) {
    for (bd_block *block = list, *next; block; block = next) {
        next = block->next;
        release_block(loader, block);
    }
}

/* The backend is done with what was fed before. */
static void release_lent(bd_loader *loader) {
    release_blocks(loader, loader->lent_blocks);
    loader->lent_blocks = NULL;
}

/* The blocks that are lent for one load; another's stay, whose bytes are still being copied. */
static bd_block *take_lent_of(bd_loader *loader, const bd_load_job *job) {
    bd_block *taken = NULL;
    for (bd_block **link = &loader->lent_blocks; *link;) {
        bd_block *block = *link;
        if (block->job != job) {
            link = &block->next;
            continue;
        }
        *link = block->next;
        block->next = taken;
        taken = block;
    }
    return taken;
}

static void start_read(bd_loader *loader, bd_block *block) {
    block->in_ring = loader->ring &&
                     (bd_shard_file_suits_ring(block->span.file) || bd_ring_broken(loader->ring));
    loader->memory_count += block->span.file->in_memory;
    if (!block->in_ring) {
        bd_workers_read(loader->workers, &block->span.read.message);
        return;
    }
    bd_ring_submit(loader->ring, &block->span.read);
    loader->ring_count++;
    block->job->blocks_in_ring++;
}

/* A block for each thread and one to go on with: more staging than is used in turns would only be
 * further from the cores' caches. */
static uint32_t memory_max(const bd_loader *loader) {
    return bd_workers_threads(read_threads(&loader->options)) + 1;
}

static bool issue_one(bd_loader *loader, bd_load_job *job) {
    const uint32_t depth = loader->options.depth;
    bd_block *block = loader->free_blocks;
    if (!block || job->blocks_held >= share_of(loader, loader->block_count)) return false;
    if (loader->ring_count >= depth || job->blocks_in_ring >= share_of(loader, depth)) return false;
    if (bd_load_job_in_memory(job) && loader->memory_count >= memory_max(loader)) return false;
    bd_block *rest = block->next;
    if (!bd_load_job_next(job, block)) return false;
    loader->free_blocks = rest;
    start_read(loader, block);
    return true;
}

/* One block per load and round, so that a long load does not hold up a short one. */
static void issue_blocks(bd_loader *loader) {
    bool any = true, submitted = false;
    while (any) {
        any = false;
        for (bd_load_job *job = loader->jobs; job; job = job->next)
            any = issue_one(loader, job) || any;
        submitted = submitted || any;
    }
    if (submitted && loader->ring) bd_ring_kick(loader->ring);
}

static bd_span_state judge(bd_loader *loader, bd_block *block, bd_error *err) {
    const bd_read *read = &block->span.read;
    int32_t result = read->result;
    if (loader->source.on_read)
        result = loader->source.on_read(loader->source.read_ctx, read->offset, read->bytes, result);
    if (result > 0 && loader->metrics.read_bytes)
        bd_metric_add(loader->metrics.read_bytes, (double)result);
    return bd_span_step(&block->span, result, err);
}

/* No thread has the block any more. */
static void block_back(bd_loader *loader, bd_block *block) {
    loader->memory_count -= block->span.file->in_memory; /* it was read once */
    block->read_done = true;
    block->job->blocks_flying--;
}

static void read_finished(bd_loader *loader, bd_block *block) {
    bd_load_job *job = block->job;
    loader->ring_count--;
    job->blocks_in_ring--;
    bd_load_job_check_cancel(job);
    if (job->status != BD_OK) {
        block_back(loader, block);
        return;
    }
    switch (judge(loader, block, &block->error)) {
    case BD_SPAN_AGAIN:
        start_read(loader, block);
        return;
    case BD_SPAN_DONE:
        bd_workers_finish(loader->workers, &block->span.read.message);
        return;
    case BD_SPAN_FAILED:
        block->status = block->error.status;
        block_back(loader, block);
    }
}

/* On a worker. */
static bd_span_state read_once(bd_loader *loader, bd_block *block) {
    bd_read *read = &block->span.read;
    const ssize_t got = pread(read->fd, read->data, read->bytes, (off_t)read->offset);
    read->result = got < 0 ? -errno : (int32_t)got;
    return judge(loader, block, &block->error);
}

static bool work_read(void *ctx, bd_message *work) {
    bd_loader *loader = ctx;
    bd_block *block = (bd_block *)work;
    const bool sums = block->span.file->in_memory && !block->span.file->no_chunk_sums;
    bd_span_state state = BD_SPAN_AGAIN;
    bd_block_sum sum;
    if (sums) bd_block_sum_begin(&sum, block);
    while (state == BD_SPAN_AGAIN && !atomic_load(&block->job->stopped)) {
        state = read_once(loader, block);
        if (sums && state != BD_SPAN_FAILED && !bd_block_sum_there(&sum, block))
            state = BD_SPAN_FAILED;
    }
    if (state == BD_SPAN_FAILED) block->status = block->error.status;
    return state == BD_SPAN_DONE;
}

static bool work_copies(void *ctx, bd_message *work) {
    (void)ctx;
    return ((bd_block *)work)->span.file->in_memory;
}

static uint32_t *work_reading(void *ctx, bd_message *work) {
    (void)ctx;
    return &((bd_block *)work)->job->reading;
}

static void work_finish(void *ctx, bd_message *work) {
    bd_block *block = (bd_block *)work;
    (void)ctx;
    bd_load_job_work(block->job, block);
}

/* The backend copies from a block that it was fed until it was fed the next, or the feed ends. */
static void end_block(bd_loader *loader, bd_block *block, bool fed) {
    const bool lent = fed && !loader->source.feeds_anywhere;
    if (lent && block->job->status == BD_OK) release_lent(loader);
    if (!lent) {
        release_block(loader, block);
        return;
    }
    block->next = loader->lent_blocks;
    loader->lent_blocks = block;
}

/* Feeds what is next of each load and refills the queue after every block. */
static void feed_blocks(bd_loader *loader) {
    for (bd_load_job *job = loader->jobs; job; job = job->next) {
        bd_block *block;
        while ((block = bd_load_job_pop(job)) != NULL) {
            const bool feeds = job->status == BD_OK, moved = bd_load_job_feed(job, block);
            end_block(loader, block, feeds);
            issue_blocks(loader);
            if (moved) notify(loader);
        }
    }
}

static void settle_jobs(bd_loader *loader) {
    for (bd_load_job *job = loader->jobs; job; job = job->next)
        if (bd_load_job_settle(job)) notify(loader);
}

/* A block's worth of each load from host memory, so that reads are not left lying; then the next
 * wait is to return at once. */
static void feed_from_host(bd_loader *loader) {
    bool more = false;
    for (bd_load_job *job = loader->jobs; job; job = job->next) {
        bool moved;
        more = bd_load_job_feed_host(job, &moved) || more;
        if (moved) notify(loader);
    }
    if (more) bd_mailbox_wake(loader->inbox);
}

static bool end_jobs(bd_loader *loader) {
    bool any = false;
    for (bd_load_job **link = &loader->jobs; *link;) {
        bd_load_job *job = *link;
        bd_load_job_check_cancel(job);
        if (!bd_load_job_over(job)) {
            link = &job->next;
            continue;
        }
        BD_ASSERT(job->first == NULL);
        *link = job->next;
        loader->job_count--;
        share_reads(loader);
        any = true;
        bd_load *load = job->load;
        bd_block *lent = take_lent_of(loader, job);
        bd_load_job_end(job); /* a feed's end waits for all that it was given */
        release_blocks(loader, lent);
        finish_load(loader, load);
    }
    return any;
}

/* ---- the thread ---- */

static void turn(bd_loader *loader) {
    bool again = true;
    while (again) {
        take_inbox(loader);
        drop_cancelled(loader);
        while (loader->job_count < loader->options.loads_in_parallel) {
            bd_load *load = next_waiting(loader);
            if (!load) break;
            begin_load(loader, load);
        }
        feed_blocks(loader);
        issue_blocks(loader);
        feed_from_host(loader);
        again = end_jobs(loader);
    }
}

/* What came back in the meantime, which first is waited for if nothing has. */
static void take_back(bd_loader *loader) {
    bd_message *next, *work = bd_workers_take(loader->workers), *done = NULL;
    if (!work) settle_jobs(loader);
    if (!work) work = bd_workers_take(loader->workers);
    if (loader->ring)
        done = bd_ring_wait(loader->ring, !work);
    else if (!work)
        bd_mailbox_wait(loader->inbox, UINT64_MAX);
    if (!work) work = bd_workers_take(loader->workers);
    for (; work; work = next) {
        next = work->next;
        block_back(loader, (bd_block *)work);
    }
    for (; done; done = next) {
        next = done->next; /* a repeated read is linked anew */
        read_finished(loader, (bd_block *)done);
    }
    if (loader->ring) bd_ring_kick(loader->ring);
}

static void stop_jobs(bd_loader *loader) {
    for (bd_load_job *job = loader->jobs; job; job = job->next)
        atomic_store(&job->load->cancel, true);
}

/* Rings belong to the thread that waits on them, so the reader is made here. */
static bd_status open_ring(bd_loader *loader, bd_error *err) {
    const bd_ring_options options = {
        .inbox = loader->inbox,
        .staging = loader->staging,
        .staging_bytes = loader->staging_bytes,
        .depth = loader->options.depth,
    };
    loader->io_name = "pread";
    if (loader->options.io == BD_IO_PREAD) return BD_OK;
    bd_error why = {0};
    const bd_status status = bd_ring_create(&options, &loader->ring, &why);
    if (status == BD_OK) {
        loader->io_name = "uring";
        snprintf(loader->io_reason, sizeof loader->io_reason, "%s", bd_ring_note(loader->ring));
        return BD_OK;
    }
    if (loader->options.io == BD_IO_URING) {
        if (err) *err = why;
        return status;
    }
    snprintf(loader->io_reason, sizeof loader->io_reason, "reading with pread threads: %s",
             why.message);
    return BD_OK;
}

static bd_status open_io(bd_loader *loader, bd_error *err) {
    const bd_loader_options *options = &loader->options;
    const bd_status status = open_ring(loader, err);
    if (status != BD_OK) return status;
    const bd_workers_options workers = {
        .rank = options->rank,
        .read_threads = read_threads(options),
        .inbox = loader->inbox,
        .ctx = loader,
        .read = work_read,
        .finish = work_finish,
        .reading = work_reading,
        .copies = work_copies,
    };
    return bd_workers_create(&workers, &loader->workers, err);
}

static void close_io(bd_loader *loader) {
    bd_workers_destroy(loader->workers);
    bd_ring_destroy(loader->ring);
}

static void *loader_main(void *arg) {
    bd_loader *loader = arg;
    char name[16];
    snprintf(name, sizeof name, "bd-load-%" PRIu32, loader->options.rank);
    pthread_setname_np(pthread_self(), name);
    bool opened = (loader->start_status = open_io(loader, &loader->start_error)) == BD_OK;
    if (!opened) close_io(loader);
    sem_post(&loader->started);
    if (!opened) return NULL;
    for (;;) {
        if (atomic_load(&loader->stop)) stop_jobs(loader);
        turn(loader);
        if (atomic_load(&loader->stop) && !loader->jobs && !loader->waiting_first) break;
        take_back(loader);
    }
    close_io(loader);
    return NULL;
}

/* ---- create and destroy ---- */

bd_metric *bd_loader_seconds(bd_metrics *metrics) {
    static const double bounds[] = {0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120};
    if (!metrics) return NULL;
    return bd_metrics_histogram(metrics, "bitdelta_delta_load_seconds",
                                "Time to bring one variant's delta from disk to the device.",
                                bounds, sizeof bounds / sizeof bounds[0], NULL, 0);
}

static void make_metrics(bd_loader *loader) {
    bd_metrics *metrics = loader->options.metrics;
    if (!metrics) return;
    loader->metrics.seconds = bd_loader_seconds(metrics);
    loader->metrics.read_bytes = bd_metrics_counter(metrics, "bitdelta_delta_read_bytes_total",
                                                    "Bytes of deltas read from disk.", NULL, 0);
    const bd_label kind = {"kind", loader->io_name};
    bd_metric_set(bd_metrics_gauge(metrics, "bitdelta_loader_io",
                                   "How deltas are read: uring or pread.", &kind, 1),
                  1);
}

static void set_defaults(bd_loader_options *options) {
    if (options->read_threads == 0) options->read_threads = 8;
    if (options->block_bytes == 0) options->block_bytes = BD_DELTA_CHUNK_BYTES;
    if (options->depth == 0) options->depth = 8;
    if (options->loads_in_parallel == 0) options->loads_in_parallel = 2;
}

static bd_status check_options(const bd_loader_options *options, bd_error *err) {
    if (options->block_bytes < BD_IO_ALIGN_BYTES || options->block_bytes > BLOCK_BYTES_MAX)
        return bd_fail(err, BD_E_ARGUMENT, "block_bytes", "must be %u to %u bytes",
                       BD_IO_ALIGN_BYTES, BLOCK_BYTES_MAX);
    if (options->depth > DEPTH_MAX)
        return bd_fail(err, BD_E_ARGUMENT, "depth", "must be at most %u blocks", DEPTH_MAX);
    /* Each running load needs a block, or it could not move. */
    if (options->loads_in_parallel > options->depth)
        return bd_fail(err, BD_E_ARGUMENT, "loads_in_parallel",
                       "must be at most the depth of %" PRIu32 " blocks", options->depth);
    return BD_OK;
}

static void free_staging(bd_loader *loader) {
    free(loader->blocks);
    if (loader->staging_locked) loader->source.staging_unlock(loader->source.ctx, loader->staging);
    munmap(loader->mapping, loader->mapping_bytes);
}

/* Memory of the system's own: what a device's driver gives not every kernel reads files into past
 * the page cache. In huge pages where there are any: a request of a disk takes only so many pieces
 * of memory, and of small pages a block needs several requests. */
static bd_status map_staging(bd_loader *loader, bd_error *err) {
    loader->mapping_bytes = loader->staging_bytes + HUGE_PAGE_BYTES;
    loader->mapping = mmap(NULL, loader->mapping_bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (loader->mapping == MAP_FAILED)
        return bd_fail_errno(err, BD_E_MEMORY, "loader", errno,
                             "no memory for %zu bytes of staging", loader->mapping_bytes);
    const uintptr_t at = (uintptr_t)loader->mapping;
    loader->staging = (uint8_t *)loader->mapping + (HUGE_PAGE_BYTES - at % HUGE_PAGE_BYTES);
    (void)madvise(loader->staging, loader->staging_bytes, MADV_HUGEPAGE);
    return BD_OK;
}

static bd_status get_memory(bd_loader *loader, bd_error *err) {
    const bd_loader_source *source = &loader->source;
    const bd_status status = map_staging(loader, err);
    if (status != BD_OK || !source->staging_lock) return status;
    loader->staging_locked =
        source->staging_lock(source->ctx, loader->staging, loader->staging_bytes);
    if (!loader->staging_locked)
        bd_log(BD_LOG_WARN, "loader",
               "staging of bytes=%zu could not be page-locked: uploads copy it once more",
               loader->staging_bytes);
    return BD_OK;
}

static bd_status make_staging(bd_loader *loader, bd_error *err) {
    /* A block may begin inside one aligned unit and end inside another. */
    const size_t unit = BD_IO_ALIGN_BYTES;
    size_t slot_bytes = (loader->options.block_bytes + unit - 1) / unit * unit + 2 * unit;
    loader->block_count = 2 * loader->options.depth;
    loader->staging_bytes = slot_bytes * loader->block_count;
    /* To the end of its last huge page: a ring takes them as such only if there are no others. */
    if (loader->staging_bytes > HUGE_PAGE_BYTES)
        loader->staging_bytes =
            (loader->staging_bytes + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    const bd_status status = get_memory(loader, err);
    if (status != BD_OK) return status;
    loader->blocks = calloc(loader->block_count, sizeof *loader->blocks);
    if (!loader->blocks) {
        free_staging(loader);
        return bd_fail(err, BD_E_MEMORY, "loader", "out of memory for blocks");
    }
    for (uint32_t i = loader->block_count; i-- > 0;) {
        loader->blocks[i].span.staging = loader->staging + slot_bytes * i;
        release_block(loader, &loader->blocks[i]);
    }
    return BD_OK;
}

static bd_status start_thread(bd_loader *loader, bd_error *err) {
    int rc = pthread_create(&loader->thread, NULL, loader_main, loader);
    if (rc != 0)
        return bd_fail_errno(err, BD_E_MEMORY, "loader", rc, "the loader thread did not start");
    while (sem_wait(&loader->started) != 0 && errno == EINTR)
        continue;
    if (loader->start_status == BD_OK) return BD_OK;
    pthread_join(loader->thread, NULL);
    if (err) *err = loader->start_error;
    return loader->start_status;
}

bd_status bd_loader_create_with(const bd_loader_options *options, const bd_loader_source *source,
                                bd_loader **out, bd_error *err) {
    *out = NULL;
    bd_loader_options checked = *options;
    set_defaults(&checked);
    bd_status status = check_options(&checked, err);
    if (status != BD_OK) return status;
    bd_loader *loader = calloc(1, sizeof *loader);
    if (!loader) return bd_fail(err, BD_E_MEMORY, "loader", "out of memory for the loader");
    loader->options = checked;
    loader->source = *source;
    if ((status = bd_mailbox_create(&loader->inbox, 0, true, err)) != BD_OK) goto fail_free;
    if ((status = make_staging(loader, err)) != BD_OK) goto fail_inbox;
    sem_init(&loader->started, 0, 0);
    if ((status = start_thread(loader, err)) != BD_OK) goto fail_staging;
    make_metrics(loader);
    *out = loader;
    return BD_OK;
fail_staging:
    sem_destroy(&loader->started);
    free_staging(loader);
fail_inbox:
    bd_mailbox_destroy(loader->inbox);
fail_free:
    free(loader);
    return status;
}

bd_status bd_loader_wrap(bd_loader_ranks *ranks, bd_loader **out, bd_error *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) {
        bd_loader_ranks_destroy(ranks);
        return bd_fail(err, BD_E_MEMORY, "loader", "out of memory for the loader");
    }
    (*out)->ranks = ranks;
    return BD_OK;
}

void bd_loader_destroy(bd_loader *loader) {
    if (!loader) return;
    if (loader->ranks) {
        bd_loader_ranks_destroy(loader->ranks);
        free(loader);
        return;
    }
    atomic_store(&loader->stop, true);
    bd_mailbox_wake(loader->inbox);
    pthread_join(loader->thread, NULL);
    sem_destroy(&loader->started);
    free_staging(loader);
    bd_mailbox_destroy(loader->inbox);
    free(loader);
}

const char *bd_loader_io_name(const bd_loader *loader) {
    return loader->ranks ? bd_loader_ranks_first(loader->ranks)->io_name : loader->io_name;
}

const char *bd_loader_io_reason(const bd_loader *loader) {
    return loader->ranks ? bd_loader_ranks_first(loader->ranks)->io_reason : loader->io_reason;
}

bd_status bd_loader_submit(bd_loader *loader, bd_load *load, bd_error *err) {
    if (loader->ranks) return bd_loader_ranks_submit(loader->ranks, load, err);
    if (!load->delta || !load->pages || load->page_count == 0)
        return bd_fail(err, BD_E_ARGUMENT, "load", "a load needs a delta and pages");
    if (atomic_load(&loader->stop))
        return bd_fail(err, BD_E_SHUTDOWN, load->delta->variant, "the loader is shutting down");
    return bd_mailbox_post(loader->inbox, &load->message);
}
