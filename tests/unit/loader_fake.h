/* loader_fake.h - for tests of loader and cache: variants made of random bytes on disk, and a plan,
 * feed and overlay that copy a file's bytes one after another into pages, so that pages can be
 * compared with what was written. */
#ifndef BITDELTA_TESTS_LOADER_FAKE_H
#define BITDELTA_TESTS_LOADER_FAKE_H

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "loader/loader_internal.h"

#define FAKE_FILES_MAX   3
#define FAKE_PAGE_BYTES  8192u
#define FAKE_READY_COUNT 7u

static _Atomic uint64_t fake_random_state; /* reads are faulted on several threads */

static uint64_t fake_random(void) { /* splitmix64 */
    uint64_t z = atomic_fetch_add(&fake_random_state, 0x9e3779b97f4a7c15u) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t fake_below(uint64_t bound) {
    return fake_random() % bound;
}

/* A fresh seed each run, printed; BD_TEST_SEED repeats one. */
static inline void fake_seed(const char *test) {
    const char *given = getenv("BD_TEST_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    fake_random_state =
        given ? strtoull(given, NULL, 0) : (uint64_t)now.tv_nsec * 1000003u + (uint64_t)now.tv_sec;
    printf("%s: BD_TEST_SEED=%" PRIu64 "\n", test, fake_random_state);
}

typedef struct fake_variant {
    bd_delta delta;
    bd_delta_file files[FAKE_FILES_MAX];
    char names[FAKE_FILES_MAX][32];
    uint8_t *content[FAKE_FILES_MAX];
    uint64_t *sums[FAKE_FILES_MAX];
    uint64_t total_bytes;
} fake_variant;

static inline void fake_path(const fake_variant *variant, uint32_t file, char *out, size_t bytes) {
    snprintf(out, bytes, "%.1023s/%.31s", variant->delta.dir, variant->names[file]);
}

static inline void fake_write_file(const char *path, const uint8_t *data, uint64_t bytes) {
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    BD_ASSERT(fd >= 0);
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t written = write(fd, data + done, bytes - done);
        BD_ASSERT(written > 0);
        done += (uint64_t)written;
    }
    close(fd);
}

/* Random files of the given sizes in a new directory. chunk_bytes 0: no sums. */
static inline void fake_variant_make_in(const char *folder, fake_variant *out, const char *name,
                                        const uint64_t *sizes, uint32_t count,
                                        uint64_t chunk_bytes) {
    memset(out, 0, sizeof *out);
    snprintf(out->delta.dir, sizeof out->delta.dir, "%.1000s/bd-test-XXXXXX", folder);
    BD_ASSERT(mkdtemp(out->delta.dir) != NULL);
    snprintf(out->delta.variant, sizeof out->delta.variant, "%s", name);
    out->delta.bits = 1;
    out->delta.shard_count = count;
    out->delta.files = out->files;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = sizes[i];
        out->content[i] = malloc(bytes + 8);
        BD_ASSERT(out->content[i] != NULL);
        for (uint64_t b = 0; b < bytes; b += 8) {
            uint64_t value = fake_random();
            memcpy(out->content[i] + b, &value, 8);
        }
        snprintf(out->names[i], sizeof out->names[i], "shard-%02u.safetensors", i);
        bd_delta_file *file = &out->files[i];
        file->name = out->names[i];
        file->bytes = bytes;
        file->chunk_bytes = chunk_bytes;
        out->total_bytes += bytes;
        if (chunk_bytes) {
            file->chunk_count = (uint32_t)((bytes + chunk_bytes - 1) / chunk_bytes);
            out->sums[i] = calloc(file->chunk_count, sizeof(uint64_t));
            BD_ASSERT(out->sums[i] != NULL);
            for (uint32_t c = 0; c < file->chunk_count; c++) {
                uint64_t from = c * chunk_bytes;
                uint64_t part = bytes - from < chunk_bytes ? bytes - from : chunk_bytes;
                out->sums[i][c] = XXH3_64bits(out->content[i] + from, part);
            }
            file->chunk_xxh3 = out->sums[i];
        }
        char path[1200];
        fake_path(out, i, path, sizeof path);
        fake_write_file(path, out->content[i], bytes);
    }
}

static inline void fake_variant_make(fake_variant *out, const char *name, const uint64_t *sizes,
                                     uint32_t count, uint64_t chunk_bytes) {
    fake_variant_make_in(P_tmpdir, out, name, sizes, count, chunk_bytes);
}

static inline void fake_variant_remove(fake_variant *variant) {
    for (uint32_t i = 0; i < variant->delta.shard_count; i++) {
        char path[1200];
        fake_path(variant, i, path, sizeof path);
        unlink(path);
        free(variant->content[i]);
        free(variant->sums[i]);
    }
    rmdir(variant->delta.dir);
}

static inline uint32_t fake_pages_for(uint64_t total_bytes) {
    return (uint32_t)((total_bytes + FAKE_PAGE_BYTES - 1) / FAKE_PAGE_BYTES);
}

/* ---- the source ---- */

typedef struct fake_source { /* what tests turn and look at; the loader's ctx */
    bd_status plan_status, overlay_status, feed_status;
    uint64_t feed_fails_at; /* with feed_status: total bytes fed before */
    _Atomic uint32_t plans, overlays, feeds, verifies, running, running_max;
    _Atomic uint64_t fed_bytes;
    bd_status verify_status;
    uint32_t verify_sleep_us;
    bool anywhere; /* feeds_anywhere */
    /* As a device that copies by itself: what is fed is taken at the next feed of anybody, or the
     * settle or destroy of its own, from where it was. */
    bool later;
    struct { /* the loader's thread's */
        bd_overlay_feed *feed;
        const uint8_t *data;
        uint64_t at, bytes;
    } pending;
    bool locks, refuses_lock; /* the staging; what is fed lies in it then */
    const uint8_t *locked;
    uint64_t locked_bytes;
    uint32_t unlocks;
    uint32_t together; /* so many sums are made at once, or the test waits for it */
    _Atomic uint32_t summing;
    /* Read faults. */
    int32_t (*fault)(struct fake_source *source, uint64_t offset, uint32_t bytes, int32_t result);
    _Atomic uint32_t attempts, faults;
    const char *path; /* for faults that change the file, once: reads end on several threads */
    void (*change)(const char *path);
    _Atomic bool changing, changed;
} fake_source;

struct bd_overlay_feed {
    fake_source *source;
    const bd_overlay_plan *plan;
    void *const *pages;
    _Atomic uint64_t fed; /* and taken */
    uint64_t told;        /* and perhaps not taken yet */
    uint64_t total;
    uint32_t file_index;
    uint64_t next_from;
};

static inline bd_status fake_plan_create(void *ctx, const bd_delta *delta, bd_overlay_plan *out,
                                         bd_error *err) {
    fake_source *source = ctx;
    if (source->plan_status != BD_OK)
        return bd_fail(err, source->plan_status, delta->variant, "planted plan fault");
    /* One piece a file: enough to say which files are used. */
    bd_overlay_piece *pieces = calloc(delta->shard_count, sizeof *pieces);
    BD_ASSERT(pieces != NULL);
    uint64_t total = 0;
    for (uint32_t i = 0; i < delta->shard_count; i++) {
        pieces[i].file_index = i;
        pieces[i].bytes = delta->files[i].bytes;
        total += delta->files[i].bytes;
    }
    *out = (bd_overlay_plan){.page_count = fake_pages_for(total),
                             .piece_count = delta->shard_count,
                             .ready_count = FAKE_READY_COUNT,
                             .pieces = pieces,
                             .storage = pieces};
    atomic_fetch_add(&source->plans, 1);
    uint32_t running = atomic_fetch_add(&source->running, 1) + 1;
    if (running > atomic_load(&source->running_max)) atomic_store(&source->running_max, running);
    return BD_OK;
}

static inline void fake_plan_destroy(bd_overlay_plan *plan) {
    free(plan->storage);
    memset(plan, 0, sizeof *plan);
}

static inline bd_status fake_overlay_create(void *ctx, const bd_delta *delta,
                                            const bd_overlay_plan *plan, void *const *pages,
                                            bd_overlay **out, bd_error *err) {
    fake_source *source = ctx;
    (void)plan;
    if (source->overlay_status != BD_OK)
        return bd_fail(err, source->overlay_status, delta->variant, "planted overlay fault");
    bd_overlay *overlay = calloc(1, sizeof *overlay);
    BD_ASSERT(overlay != NULL && pages != NULL);
    memcpy(overlay->digest, delta->digest, sizeof overlay->digest);
    *out = overlay;
    atomic_fetch_add(&source->overlays, 1);
    return BD_OK;
}

static inline void fake_overlay_destroy(bd_overlay *overlay) {
    free(overlay);
}

static inline bd_status fake_feed_create(void *ctx, const bd_overlay_plan *plan, void *const *pages,
                                         bd_overlay_feed **out, bd_error *err) {
    (void)err;
    bd_overlay_feed *feed = calloc(1, sizeof *feed);
    BD_ASSERT(feed != NULL);
    feed->source = ctx;
    feed->plan = plan;
    feed->pages = pages;
    for (uint32_t i = 0; i < plan->piece_count; i++)
        feed->total += plan->pieces[i].bytes;
    *out = feed;
    atomic_fetch_add(&feed->source->feeds, 1);
    return BD_OK;
}

static inline void fake_take(const bd_overlay_feed *feed, uint64_t at, const uint8_t *data,
                             uint64_t bytes) {
    for (uint64_t done = 0; done < bytes;) {
        uint64_t in_page = (at + done) % FAKE_PAGE_BYTES, part = FAKE_PAGE_BYTES - in_page;
        if (part > bytes - done) part = bytes - done;
        memcpy((uint8_t *)feed->pages[(at + done) / FAKE_PAGE_BYTES] + in_page, data + done, part);
        done += part;
    }
    atomic_fetch_add(&((bd_overlay_feed *)(uintptr_t)feed)->fed, bytes);
}

static inline void fake_take_pending(fake_source *source) {
    if (source->pending.feed)
        fake_take(source->pending.feed, source->pending.at, source->pending.data,
                  source->pending.bytes);
    source->pending.feed = NULL;
}

static inline void fake_take_own(const bd_overlay_feed *feed) {
    if (feed->source->pending.feed == feed) fake_take_pending(feed->source);
}

static inline bd_status fake_feed_settle(bd_overlay_feed *feed, bd_error *err) {
    (void)err;
    fake_take_own(feed);
    return BD_OK;
}

static inline uint64_t fake_offset(const bd_overlay_feed *feed, uint32_t file_index) {
    uint64_t before = 0;
    for (uint32_t i = 0; i < file_index; i++)
        before += feed->plan->pieces[i].bytes;
    return before;
}

/* Holds the loader to its word: every byte once, in order, file after file. */
static inline bd_status fake_feed_bytes(bd_overlay_feed *feed, uint32_t file_index, uint64_t from,
                                        const uint8_t *data, uint64_t bytes, bd_error *err) {
    if (feed->source->locked_bytes > 0) {
        const uint64_t at = (uint64_t)(data - feed->source->locked);
        BD_ASSERT(at < feed->source->locked_bytes && bytes <= feed->source->locked_bytes - at);
    }
    if (feed->source->anywhere) {
        fake_take(feed, fake_offset(feed, file_index) + from, data, bytes);
        atomic_fetch_add(&feed->source->fed_bytes, bytes);
        return BD_OK;
    }
    fake_take_pending(feed->source);
    if (file_index != feed->file_index) {
        BD_ASSERT(file_index == feed->file_index + 1);
        BD_ASSERT(feed->next_from == feed->plan->pieces[feed->file_index].bytes);
        feed->file_index = file_index;
        feed->next_from = 0;
    }
    BD_ASSERT(from == feed->next_from);
    feed->next_from += bytes;
    if (feed->source->feed_status != BD_OK && feed->told >= feed->source->feed_fails_at)
        return bd_fail(err, feed->source->feed_status, "feed", "planted feed fault");
    fake_source *source = feed->source;
    source->pending.feed = feed;
    source->pending.at = feed->told;
    source->pending.data = data;
    source->pending.bytes = bytes;
    feed->told += bytes;
    if (!source->later || feed->told == feed->total) fake_take_pending(source);
    atomic_fetch_add(&source->fed_bytes, bytes);
    return BD_OK;
}

static inline uint32_t fake_feed_ready(const bd_overlay_feed *feed) {
    const uint64_t fed = atomic_load(&((bd_overlay_feed *)(uintptr_t)feed)->fed);
    return (uint32_t)(fed * FAKE_READY_COUNT / (feed->total ? feed->total : 1));
}

static inline void fake_feed_destroy(bd_overlay_feed *feed) {
    fake_take_own(feed);
    atomic_fetch_sub(&feed->source->running, 1);
    free(feed);
}

/* Checks know their fake_source by this; one test at a time. */
static fake_source *fake_verify_source;

static inline bd_status fake_check_chunk(const bd_delta *delta, uint32_t file_index, uint32_t chunk,
                                         const void *data, size_t bytes, bd_error *err) {
    const bd_delta_file *file = &delta->files[file_index];
    fake_source *source = fake_verify_source;
    BD_ASSERT(chunk < file->chunk_count);
    atomic_fetch_add(&source->summing, 1);
    for (uint32_t ms = 0; atomic_load(&source->summing) < source->together; ms++) {
        BD_ASSERT(ms < 60000); /* they are made one after the other */
        usleep(1000);
    }
    if (XXH3_64bits(data, bytes) == file->chunk_xxh3[chunk]) return BD_OK;
    uint64_t from = chunk * file->chunk_bytes;
    return bd_fail(err, BD_E_CORRUPT, file->name, "chunk %u (bytes %" PRIu64 " to %" PRIu64 ")",
                   chunk, from, from + bytes);
}

static inline bd_status fake_verify_file(const bd_delta *delta, uint32_t file_index,
                                         bd_error *err) {
    fake_source *source = fake_verify_source;
    atomic_fetch_add(&source->verifies, 1);
    if (source->verify_sleep_us) usleep(source->verify_sleep_us);
    if (source->verify_status == BD_OK) return BD_OK;
    return bd_fail(err, source->verify_status, delta->files[file_index].name,
                   "planted verify fault");
}

static inline int32_t fake_on_read(void *ctx, uint64_t offset, uint32_t bytes, int32_t result) {
    fake_source *source = ctx;
    atomic_fetch_add(&source->attempts, 1);
    int32_t changed = source->fault ? source->fault(source, offset, bytes, result) : result;
    if (changed != result) atomic_fetch_add(&source->faults, 1);
    return changed;
}

static inline bool fake_staging_lock(void *ctx, void *memory, uint64_t bytes) {
    fake_source *source = ctx;
    if (source->refuses_lock) return false;
    BD_ASSERT((uintptr_t)memory % 4096 == 0);
    source->locked = memory;
    source->locked_bytes = bytes;
    return true;
}

static inline void fake_staging_unlock(void *ctx, void *memory) {
    fake_source *source = ctx;
    BD_ASSERT(memory == source->locked);
    source->locked_bytes = 0;
    source->unlocks++;
}

static inline bd_loader_source fake_loader_source(fake_source *source) {
    fake_verify_source = source;
    return (bd_loader_source){
        .ctx = source,
        .plan_create = fake_plan_create,
        .plan_destroy = fake_plan_destroy,
        .overlay_create = fake_overlay_create,
        .overlay_destroy = fake_overlay_destroy,
        .feed_create = fake_feed_create,
        .feeds_anywhere = source->anywhere,
        .feed_bytes = fake_feed_bytes,
        .feed_settle = fake_feed_settle,
        .feed_ready = fake_feed_ready,
        .feed_destroy = fake_feed_destroy,
        .check_chunk = fake_check_chunk,
        .verify_file = fake_verify_file,
        .staging_lock = source->locks ? fake_staging_lock : NULL,
        .staging_unlock = fake_staging_unlock,
        .on_read = fake_on_read,
        .read_ctx = source,
    };
}

#endif
