/* load_job.c - what a load does in which order: plan, files, blocks, checks, pages, result. */
#include "load_job.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"

void bd_load_job_fail(bd_load_job *job, bd_status status, const bd_error *error) {
    BD_ASSERT(status != BD_OK);
    if (job->status != BD_OK)
        return; /* the first fault is the cause, later ones often its effects */
    job->status = status;
    job->error = *error;
    job->error.status = status;
    atomic_store(&job->stopped, true);
}

void bd_load_job_check_cancel(bd_load_job *job) {
    if (job->status != BD_OK || !bd_load_cancelled(job->load)) return;
    bd_error error;
    bd_status status =
        bd_fail(&error, BD_CANCELLED, job->load->delta->variant, "the load was cancelled");
    bd_load_job_fail(job, status, &error);
}

static void count_read(bd_load *load, uint64_t bytes) {
    atomic_fetch_add(&load->read_bytes, bytes);
    if (load->whole) atomic_fetch_add(&load->whole->read_bytes, bytes);
}

static bool from_host(const bd_load_job *job) {
    return job->load->host && job->load->host->filled;
}

static bd_status make_plan(bd_load_job *job, bd_error *err) {
    const bd_loader_source *source = job->source;
    const bd_load *load = job->load;
    bd_status status = BD_OK;
    if (from_host(job))
        job->plan = load->host->plan;
    else
        status = source->plan_create(source->ctx, load->delta, &job->plan, err);
    if (status != BD_OK) return status;
    job->has_plan = true;
    if (job->plan.page_count > load->page_count)
        return bd_fail(err, BD_E_INTERNAL, load->delta->variant,
                       "the plan needs %" PRIu32 " pages, the load has %" PRIu32,
                       job->plan.page_count, load->page_count);
    for (uint32_t i = 0; i < job->plan.piece_count; i++) {
        BD_ASSERT(job->plan.pieces[i].file_index < load->delta->shard_count);
        job->used[job->plan.pieces[i].file_index] = true;
    }
    status = source->overlay_create(source->ctx, load->delta, &job->plan, load->pages,
                                    &job->overlay, err);
    if (status != BD_OK) return status;
    return source->feed_create(source->ctx, &job->plan, load->pages, &job->feed, err);
}

/* Chunks are checked as they come if they fit a block; else the whole file is checked first. */
static bool has_usable_chunks(const bd_load_job *job, uint32_t file_index) {
    uint64_t chunk_bytes = job->load->delta->files[file_index].chunk_bytes;
    return chunk_bytes > 0 && chunk_bytes <= job->block_bytes;
}

/* Bytes of a file that are checked and fed together. */
static uint64_t stride_bytes(const bd_load_job *job, uint32_t file_index) {
    if (from_host(job)) return job->load->host->block_bytes;
    uint64_t unit = job->load->delta->files[file_index].chunk_bytes;
    if (job->files[file_index].no_chunk_sums) unit = BD_IO_ALIGN_BYTES;
    return job->block_bytes / unit * unit;
}

/* When each ready index is complete, counted in bytes fed: at the end of its last block. */
static void fill_ends(const bd_load_job *job, bd_load_early *early) {
    const bd_overlay_plan *plan = &job->plan;
    uint64_t before = 0; /* bytes of the files already passed */
    uint32_t file = 0;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const bd_overlay_piece *piece = &plan->pieces[i];
        for (; file < piece->file_index; file++)
            if (job->used[file]) before += job->files[file].bytes;
        uint64_t stride = stride_bytes(job, file), end = piece->offset_bytes + piece->bytes;
        end += (stride - end % stride) % stride;
        if (end > job->files[file].bytes) end = job->files[file].bytes;
        if (before + end > early->end_bytes[piece->ready_index])
            early->end_bytes[piece->ready_index] = before + end;
    }
    for (uint32_t i = 1; i < early->count; i++)
        if (early->end_bytes[i] < early->end_bytes[i - 1])
            early->end_bytes[i] = early->end_bytes[i - 1];
}

/* Without it the load is one that starts nothing early, no worse. */
static void publish_early(bd_load_job *job) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < job->load->delta->shard_count; i++) {
        if (!job->used[i]) continue;
        if (job->files[i].no_chunk_sums) return;
        bytes += job->files[i].bytes;
    }
    const uint32_t count = job->plan.ready_count;
    bd_load_early *early = calloc(1, sizeof *early + count * sizeof early->end_bytes[0]);
    if (!early) return;
    early->overlay = job->overlay;
    early->bytes = bytes;
    early->count = count;
    fill_ends(job, early);
    job->overlay_shared = true;
    atomic_store_explicit(&job->load->early, early, memory_order_release);
}

static bd_status begin(bd_load_job *job, bd_error *err) {
    const bd_delta *delta = job->load->delta;
    bd_status status = make_plan(job, err);
    for (uint32_t i = 0; i < delta->shard_count && status == BD_OK; i++) {
        job->files[i].bytes = delta->files[i].bytes;
        if (!job->used[i] || from_host(job)) continue;
        status = bd_shard_file_open(&job->files[i], delta->dir, &delta->files[i], err);
        job->files[i].no_chunk_sums = !has_usable_chunks(job, i);
    }
    if (status == BD_OK && job->load->stream) publish_early(job);
    return status;
}

static void free_job(bd_load_job *job) {
    free(job->files);
    free(job->used);
    free(job->done_bytes);
    free(job);
}

bd_load_job *bd_load_job_create(bd_load *load, const bd_loader_source *source, bd_mailbox *inbox,
                                uint32_t block_bytes) {
    uint32_t count = load->delta->shard_count;
    bd_load_job *job = calloc(1, sizeof *job);
    if (!job) return NULL;
    job->load = load;
    job->source = source;
    job->inbox = inbox;
    job->block_bytes = block_bytes;
    job->files = calloc(count ? count : 1, sizeof *job->files);
    job->used = calloc(count ? count : 1, sizeof *job->used);
    job->done_bytes = calloc(count ? count : 1, sizeof *job->done_bytes);
    if (!job->files || !job->used || !job->done_bytes) {
        free_job(job);
        return NULL;
    }
    for (uint32_t i = 0; i < count; i++) {
        job->files[i].fd_direct = -1;
        atomic_init(&job->files[i].fd_buffered, -1);
    }
    bd_error error = {0};
    bd_load_job_check_cancel(job);
    if (job->status != BD_OK) return job;
    bd_status status = begin(job, &error);
    if (status != BD_OK) bd_load_job_fail(job, status, &error);
    return job;
}

static void *verify_main(void *arg) {
    bd_load_job *job = arg;
    pthread_setname_np(pthread_self(), "bd-verify");
    bd_mailbox *inbox = job->inbox; /* outlives the job */
    job->verify_status =
        job->source->verify_file(job->load->delta, job->send_file, &job->verify_error);
    atomic_store(&job->verify_state, BD_VERIFY_DONE);
    bd_mailbox_wake(inbox);
    return NULL;
}

/* True once send_file may be read. The check takes seconds for a large file, so other loads must
 * not wait for it. */
static bool verified(bd_load_job *job) {
    if (!job->files[job->send_file].no_chunk_sums || job->send_from > 0) return true;
    switch ((bd_verify_state)atomic_load(&job->verify_state)) {
    case BD_VERIFY_RUNNING:
        return false;
    case BD_VERIFY_DONE:
        pthread_join(job->verify_thread, NULL);
        atomic_store(&job->verify_state, BD_VERIFY_NONE);
        if (job->verify_status != BD_OK)
            bd_load_job_fail(job, job->verify_status, &job->verify_error);
        return job->verify_status == BD_OK;
    case BD_VERIFY_NONE:
        break;
    }
    atomic_store(&job->verify_state, BD_VERIFY_RUNNING);
    int rc = pthread_create(&job->verify_thread, NULL, verify_main, job);
    if (rc == 0) return false;
    atomic_store(&job->verify_state, BD_VERIFY_NONE);
    bd_error error;
    bd_load_job_fail(job,
                     bd_fail_errno(&error, BD_E_MEMORY, job->files[job->send_file].path, rc,
                                   "no thread for the whole-file check"),
                     &error);
    return false;
}

static bool more_to_send(bd_load_job *job) {
    const bd_delta *delta = job->load->delta;
    while (job->send_file < delta->shard_count) {
        if (job->used[job->send_file] && job->send_from < job->files[job->send_file].bytes)
            return true;
        job->send_file++;
        job->send_from = 0;
    }
    return false;
}

/* Whether this load writes the next block's copy: of a file that other ranks may read too, the
 * first that comes to it writes all. */
static bool claims(bd_load_job *job) {
    const bd_load_host *host = job->load->host;
    if (!host || !host->claims) return host != NULL;
    if (job->send_from == 0) job->keeps = !atomic_exchange(&host->claims[job->send_file], true);
    return job->keeps;
}

bool bd_load_job_in_memory(bd_load_job *job) {
    return more_to_send(job) && job->files[job->send_file].in_memory;
}

bool bd_load_job_next(bd_load_job *job, bd_block *block) {
    if (from_host(job)) return false;
    if (job->status != BD_OK || !more_to_send(job) || !verified(job)) return false;
    bd_shard_file *file = &job->files[job->send_file];
    uint64_t bytes = stride_bytes(job, job->send_file);
    if (bytes > file->bytes - job->send_from) bytes = file->bytes - job->send_from;
    bd_span_begin(&block->span, file, job->send_from, bytes);
    block->job = job;
    block->file_index = job->send_file;
    block->in_ring = block->read_done = block->summed = false;
    block->kept = claims(job);
    block->status = BD_OK;
    block->next = NULL;
    if (job->last)
        job->last->next = block;
    else
        job->first = block;
    job->last = block;
    job->blocks_held++;
    job->blocks_flying++;
    job->send_from += bytes;
    return true;
}

bd_block *bd_load_job_pop(bd_load_job *job) {
    bd_block *before = NULL, *block = job->first;
    while (block && !block->read_done && job->source->feeds_anywhere) {
        before = block;
        block = block->next;
    }
    if (!block || !block->read_done) return NULL;
    if (before)
        before->next = block->next;
    else
        job->first = block->next;
    if (job->last == block) job->last = before;
    job->blocks_held--;
    return block;
}

void bd_block_sum_begin(bd_block_sum *sum, const bd_block *block) {
    const bd_delta *delta = block->job->load->delta;
    const uint64_t chunk_bytes = delta->files[block->file_index].chunk_bytes;
    bd_chunk_sum_begin(&sum->chunks, delta, block->file_index,
                       (uint32_t)(block->span.from / chunk_bytes));
    sum->done_bytes = 0;
}

bool bd_block_sum_there(bd_block_sum *sum, bd_block *block) {
    const uint64_t from = sum->done_bytes;
    sum->done_bytes = bd_span_there(&block->span);
    block->summed = sum->done_bytes == block->span.bytes;
    return bd_chunk_sum_add(&sum->chunks, bd_span_data(&block->span) + from, sum->done_bytes - from,
                            &block->error) == BD_OK;
}

static bd_status check_chunks(const bd_load_job *job, const bd_block *block, bd_error *err) {
    if (block->span.file->no_chunk_sums || block->summed) return BD_OK;
    const bd_delta *delta = job->load->delta;
    uint64_t chunk_bytes = delta->files[block->file_index].chunk_bytes;
    const uint8_t *data = bd_span_data(&block->span);
    bd_status status = BD_OK;
    for (uint64_t at = 0; at < block->span.bytes && status == BD_OK; at += chunk_bytes) {
        uint64_t left = block->span.bytes - at;
        uint32_t chunk = (uint32_t)((block->span.from + at) / chunk_bytes);
        status = job->source->check_chunk(delta, block->file_index, chunk, data + at,
                                          left < chunk_bytes ? left : chunk_bytes, err);
    }
    return status;
}

/* ---- Host memory ---- */

static uint64_t host_offset(const bd_load_job *job, uint32_t file_index) {
    uint64_t before = 0;
    for (uint32_t i = 0; i < file_index; i++)
        before += job->load->delta->files[i].bytes;
    return before;
}

/* Where byte `at` is, and how many follow it there. */
static uint8_t *host_at(const bd_load_host *host, uint64_t at, uint64_t *run_bytes) {
    *run_bytes = host->block_bytes - at % host->block_bytes;
    return (uint8_t *)host->blocks[at / host->block_bytes] + at % host->block_bytes;
}

static void keep_in_host(const bd_load_job *job, const bd_block *block) {
    const bd_load_host *host = job->load->host;
    const bd_span *span = &block->span;
    if (!block->kept) return;
    const uint8_t *data = bd_span_data(span);
    const uint64_t start = host_offset(job, block->file_index) + span->from;
    BD_ASSERT(start + span->bytes <= host->bytes);
    uint64_t run = 0;
    for (uint64_t at = 0; at < span->bytes; at += run) {
        uint8_t *to = host_at(host, start + at, &run);
        if (run > span->bytes - at) run = span->bytes - at;
        memcpy(to, data + at, run);
    }
}

static bd_status feed_run(bd_load_job *job, uint64_t *left, bd_error *err) {
    const bd_load_host *host = job->load->host;
    const uint64_t rest = job->files[job->send_file].bytes - job->send_from;
    uint64_t run;
    const uint8_t *data = host_at(host, host_offset(job, job->send_file) + job->send_from, &run);
    if (run > rest) run = rest;
    bd_status status =
        job->source->feed_bytes(job->feed, job->send_file, job->send_from, data, run, err);
    job->send_from += run;
    *left = run < *left ? *left - run : 0;
    count_read(job->load, run);
    return status;
}

/* The last index only with the last block, whose file is looked at once more. */
static bool publish_ready(bd_load_job *job) {
    uint32_t ready = job->source->feed_ready(job->feed);
    if (job->blocks_held > 0 && ready == job->plan.ready_count) ready--;
    if (ready == atomic_load(&job->load->ready_count)) return false;
    atomic_store_explicit(&job->load->ready_count, ready, memory_order_release);
    return true;
}

bool bd_load_job_feed_host(bd_load_job *job, bool *moved) {
    *moved = false;
    if (!from_host(job)) return false;
    bd_error error = {0};
    bd_status status = BD_OK;
    uint64_t left = job->block_bytes;
    bd_load_job_check_cancel(job);
    while (job->status == BD_OK && left > 0 && more_to_send(job)) {
        status = feed_run(job, &left, &error);
        if (status != BD_OK) bd_load_job_fail(job, status, &error);
    }
    if (job->status == BD_OK) *moved = publish_ready(job);
    return job->status == BD_OK && more_to_send(job);
}

void bd_load_host_clear(bd_load_host *host) {
    if (!host->filled) return;
    for (uint32_t i = 0; i < host->part_count; i++)
        bd_load_host_clear(&host->parts[i]);
    if (!host->parts) host->plan_destroy(&host->plan);
    free(host->parts);
    host->parts = NULL;
    host->part_count = 0;
    host->filled = false;
}

/* ---- Blocks read ---- */

void bd_load_job_work(bd_load_job *job, bd_block *block) {
    const bd_span *span = &block->span;
    if (atomic_load(&job->stopped)) return;
    block->status = check_chunks(job, block, &block->error);
    if (block->status != BD_OK) return;
    keep_in_host(job, block);
    if (job->source->feeds_anywhere)
        block->status = job->source->feed_bytes(job->feed, block->file_index, span->from,
                                                bd_span_data(span), span->bytes, &block->error);
    bd_shard_file_drop_cache(span->file, span->from, span->bytes);
}

static bd_status feed_block(bd_load_job *job, const bd_block *block, bd_error *err) {
    const bd_span *span = &block->span;
    bd_status status = BD_OK;
    if (!job->source->feeds_anywhere) {
        status = job->source->feed_bytes(job->feed, block->file_index, span->from,
                                         bd_span_data(span), span->bytes, err);
        job->unsettled = true;
    }
    if (status != BD_OK) return status;
    count_read(job->load, span->bytes);
    job->done_bytes[block->file_index] += span->bytes;
    if (job->done_bytes[block->file_index] == span->file->bytes)
        status = bd_shard_file_unchanged(span->file, err);
    return status;
}

bool bd_load_job_feed(bd_load_job *job, const bd_block *block) {
    bd_load_job_check_cancel(job);
    if (job->status != BD_OK) return false;
    bd_error error = block->error;
    bd_status status = block->status;
    if (status == BD_OK) status = feed_block(job, block, &error);
    if (status != BD_OK) {
        bd_load_job_fail(job, status, &error);
        return false;
    }
    return publish_ready(job);
}

bool bd_load_job_settle(bd_load_job *job) {
    if (!job->unsettled || job->status != BD_OK || !job->source->feed_settle) return false;
    bd_error error = {0};
    const bd_status status = job->source->feed_settle(job->feed, &error);
    job->unsettled = false;
    if (status != BD_OK) {
        bd_load_job_fail(job, status, &error);
        return false;
    }
    return publish_ready(job);
}

bool bd_load_job_over(bd_load_job *job) {
    if (job->blocks_flying > 0) return false;
    /* While a check runs its thread uses the job, so even a failed load waits for it. */
    if (atomic_load(&job->verify_state) == BD_VERIFY_RUNNING) return false;
    if (job->status != BD_OK) return true;
    return job->blocks_held == 0 && !more_to_send(job);
}

static void check_complete(bd_load_job *job) {
    if (job->status != BD_OK) return;
    uint32_t ready = job->source->feed_ready(job->feed);
    if (ready == job->plan.ready_count) return;
    bd_error error;
    bd_status status =
        bd_fail(&error, BD_E_INTERNAL, job->load->delta->variant,
                "all files are read but only %" PRIu32 " of %" PRIu32 " layers are complete", ready,
                job->plan.ready_count);
    bd_load_job_fail(job, status, &error);
}

/* To the host copy, if that is complete now. */
static void end_plan(bd_load_job *job) {
    bd_load_host *host = job->load->host;
    if (!host || job->status != BD_OK) {
        job->source->plan_destroy(&job->plan);
        return;
    }
    host->plan = job->plan;
    host->plan_destroy = job->source->plan_destroy;
    host->filled = true;
}

void bd_load_job_end(bd_load_job *job) {
    const bd_loader_source *source = job->source;
    bd_load *load = job->load;
    if (atomic_load(&job->verify_state) == BD_VERIFY_DONE) pthread_join(job->verify_thread, NULL);
    check_complete(job);
    load->status = job->status;
    load->error = job->error;
    load->pages_used = job->has_plan ? job->plan.page_count : 0;
    if (job->feed) source->feed_destroy(job->feed);
    if (job->status == BD_OK) {
        load->overlay = job->overlay;
    } else if (job->overlay && !job->overlay_shared) {
        source->overlay_destroy(job->overlay);
    }
    for (uint32_t i = 0; i < load->delta->shard_count; i++)
        bd_shard_file_close(&job->files[i]);
    if (job->has_plan && !from_host(job)) end_plan(job);
    free_job(job);
    load->finished_us = bd_now_us();
}
