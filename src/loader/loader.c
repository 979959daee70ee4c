/* loader.c - the loader's thread: takes loads in order, keeps `depth` blocks in flight over all of
 * them, and hands each block to its load as soon as those before it are done. Staging is one region
 * made at create. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bitdelta/base/clock.h"
#include "io.h"
#include "load_job.h"
#include "loader_internal.h"
#include "ranks.h"

#define BLOCK_BYTES_MAX (256u << 20)
#define DEPTH_MAX       1024u

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
    bd_io *io;
    uint8_t *staging;
    size_t staging_bytes;
    bd_block *blocks; /* [depth] */
    bd_block *free_blocks;
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

static bool issue_one(bd_loader *loader, bd_load_job *job, uint32_t share) {
    bd_block *block = loader->free_blocks;
    if (!block || job->blocks_held >= share) return false;
    bd_block *rest = block->next;
    if (!bd_load_job_next(job, block)) return false;
    loader->free_blocks = rest;
    loader->io->ops->submit(loader->io, &block->span.read);
    return true;
}

/* One block per load and round, so that a long load does not hold up a short one. */
static void issue_blocks(bd_loader *loader) {
    uint32_t share = loader->options.depth / (loader->job_count ? loader->job_count : 1);
    if (share == 0) share = 1;
    bool any = true, submitted = false;
    while (any) {
        any = false;
        for (bd_load_job *job = loader->jobs; job; job = job->next)
            any = issue_one(loader, job, share) || any;
        submitted = submitted || any;
    }
    if (submitted && loader->io->ops->kick) loader->io->ops->kick(loader->io);
}

static void read_finished(bd_loader *loader, bd_block *block) {
    bd_load_job *job = block->job;
    bd_read *read = &block->span.read;
    int32_t result = read->result;
    if (loader->source.on_read)
        result = loader->source.on_read(loader->source.read_ctx, read->offset, read->bytes, result);
    if (result > 0 && loader->metrics.read_bytes)
        bd_metric_add(loader->metrics.read_bytes, (double)result);
    bd_error error = {0};
    bd_load_job_check_cancel(job);
    bd_span_state state = BD_SPAN_DONE;
    if (job->status == BD_OK) state = bd_span_step(&block->span, result, &error);
    if (state == BD_SPAN_AGAIN) {
        loader->io->ops->submit(loader->io, read);
        return;
    }
    if (state == BD_SPAN_FAILED) bd_load_job_fail(job, error.status, &error);
    block->read_done = true;
    job->blocks_flying--;
}

/* Feeds what is next in file order and refills the queue after every block. */
static void feed_blocks(bd_loader *loader) {
    for (bd_load_job *job = loader->jobs; job; job = job->next) {
        bd_block *block;
        while ((block = bd_load_job_pop(job)) != NULL) {
            bool moved = bd_load_job_feed(job, block);
            release_block(loader, block);
            issue_blocks(loader);
            if (moved) notify(loader);
        }
    }
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
        any = true;
        bd_load *load = job->load;
        bd_load_job_end(job);
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

static void stop_jobs(bd_loader *loader) {
    for (bd_load_job *job = loader->jobs; job; job = job->next)
        atomic_store(&job->load->cancel, true);
}

/* Rings belong to the thread that waits on them, so the reader is made here. */
static bd_status open_io(bd_loader *loader, bd_error *err) {
    const bd_io_options options = {
        .inbox = loader->inbox,
        .staging = loader->staging,
        .staging_bytes = loader->staging_bytes,
        .depth = loader->options.depth,
        .read_threads = loader->options.read_threads,
        .rank = loader->options.rank,
    };
    bd_status status = BD_E_UNSUPPORTED;
    if (loader->options.io != BD_IO_PREAD) {
        status = bd_io_uring_create(&options, &loader->io, err);
        if (status != BD_OK && loader->options.io == BD_IO_URING) return status;
        if (status != BD_OK && err)
            snprintf(loader->io_reason, sizeof loader->io_reason, "reading with pread threads: %s",
                     err->message);
    }
    if (status != BD_OK) status = bd_io_pread_create(&options, &loader->io, err);
    if (status != BD_OK) return status;
    loader->io_name = loader->io->ops->name;
    if (loader->io->note[0])
        snprintf(loader->io_reason, sizeof loader->io_reason, "%s", loader->io->note);
    return BD_OK;
}

static void *loader_main(void *arg) {
    bd_loader *loader = arg;
    char name[16];
    snprintf(name, sizeof name, "bd-load-%" PRIu32, loader->options.rank);
    pthread_setname_np(pthread_self(), name);
    bool opened = (loader->start_status = open_io(loader, &loader->start_error)) == BD_OK;
    sem_post(&loader->started);
    if (!opened) return NULL;
    for (;;) {
        if (atomic_load(&loader->stop)) stop_jobs(loader);
        turn(loader);
        if (atomic_load(&loader->stop) && !loader->jobs && !loader->waiting_first) break;
        bd_message *next, *done = loader->io->ops->wait(loader->io);
        for (; done; done = next) {
            next = done->next; /* a repeated read is linked anew */
            read_finished(loader, (bd_block *)done);
        }
    }
    loader->io->ops->destroy(loader->io);
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

static bd_status make_staging(bd_loader *loader, bd_error *err) {
    /* A block may begin inside one aligned unit and end inside another. */
    const size_t unit = BD_IO_ALIGN_BYTES;
    size_t slot_bytes = (loader->options.block_bytes + unit - 1) / unit * unit + 2 * unit;
    uint32_t depth = loader->options.depth;
    loader->staging_bytes = slot_bytes * depth;
    void *memory = mmap(NULL, loader->staging_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return bd_fail_errno(err, BD_E_MEMORY, "loader", errno,
                             "no memory for %zu bytes of staging", loader->staging_bytes);
    loader->staging = memory;
    loader->blocks = calloc(depth, sizeof *loader->blocks);
    if (!loader->blocks) {
        munmap(memory, loader->staging_bytes);
        return bd_fail(err, BD_E_MEMORY, "loader", "out of memory for blocks");
    }
    for (uint32_t i = depth; i-- > 0;) {
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
    free(loader->blocks);
    munmap(loader->staging, loader->staging_bytes);
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
    free(loader->blocks);
    munmap(loader->staging, loader->staging_bytes);
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
