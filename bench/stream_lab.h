/* stream_lab.h - an engine over the demo model whose deltas come from disk at a chosen rate, with
 * chosen faults: what bench/stream.c measures and tests/unit/test_engine_stream.c checks. Requests
 * come from the caller's thread; everything else runs where the server has it. */
#ifndef BITDELTA_BENCH_STREAM_LAB_H
#define BITDELTA_BENCH_STREAM_LAB_H

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "cache/cache_internal.h"
#include "engine/internal.h"
#include "loader/loader_internal.h"

enum { LAB_VARIANTS_MAX = 16, LAB_CHUNK_BYTES = 16384, LAB_PROMPT_MAX = 768, LAB_NEW_MAX = 512 };

#define LAB_MUST(call, err)                                                                        \
    do {                                                                                           \
        if ((call) != BD_OK) {                                                                     \
            fprintf(stderr, "%s: %s\n", #call, (err).message);                                     \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

typedef struct lab_reader {      /* on_read's; the loader's thread */
    _Atomic double bytes_per_us; /* 0: as fast as it goes */
    double due_us;
    _Atomic uint64_t bytes;                     /* read so far, all loads together */
    _Atomic uint64_t stall_at, fail_at, cut_at; /* of those; 0: never */
    _Atomic bool stalled;
    char cut_path[1280]; /* file to shorten at cut_at */
} lab_reader;

typedef struct lab {
    bd_model *model;
    bd_loader *loader;
    bd_cache *cache;
    bd_metrics *metrics;
    bd_engine *engine;
    pthread_mutex_t lock; /* of engine against the loader's notify */
    lab_reader reader;
    uint32_t variant_count;
    bd_variant *variants[LAB_VARIANTS_MAX];
    bd_delta_file files[LAB_VARIANTS_MAX];
    struct lab_request *pending; /* bd-sched */
} lab;

typedef struct lab_request {
    bd_call call;
    bd_cache_waiter waiter;
    lab *owner;
    struct lab_request *next;
    int32_t variant; /* -1: the base */
    int32_t prompt[LAB_PROMPT_MAX];
    uint32_t prompt_tokens, new_tokens;
    bd_lease lease;
    bool waiting, leased;
    bd_sequence *sequence;
    /* Out: */
    int32_t ids[LAB_NEW_MAX];
    uint64_t at_us[LAB_NEW_MAX], asked_us;
    _Atomic uint32_t count;
    bd_finish finish;
    bd_error error;
    _Atomic bool done;
} lab_request;

static inline void lab_sleep_us(uint64_t us) {
    const struct timespec span = {(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
    nanosleep(&span, NULL);
}

/* ---- The reader ---- */

/* Some load's first layers are there: a stalled loader thread takes nothing that workers summed,
 * and a block that one of them has had since long may be the first. No load begins meanwhile. */
static inline bool lab_early(const lab *l) {
    for (uint32_t i = 0; i < l->variant_count; i++) {
        const bd_load *load = &l->variants[i]->load;
        if (!bd_load_finished(load) && atomic_load(&load->ready_count) > 0) return true;
    }
    return false;
}

static inline int32_t lab_on_read(void *ctx, uint64_t offset, uint32_t bytes, int32_t result) {
    lab_reader *reader = ctx;
    const lab *l = (const lab *)(void *)((char *)ctx - offsetof(lab, reader));
    (void)offset;
    (void)bytes;
    if (result <= 0) return result;
    const uint64_t total = atomic_fetch_add(&reader->bytes, (uint64_t)result) + (uint64_t)result;
    const double rate = atomic_load(&reader->bytes_per_us);
    const double now_us = (double)bd_now_us();
    if (reader->due_us < now_us - 100000 || rate <= 0) reader->due_us = now_us;
    if (rate > 0) reader->due_us += (double)result / rate;
    if (reader->due_us > now_us) lab_sleep_us((uint64_t)(reader->due_us - now_us));
    for (;;) {
        const uint64_t stall_at = atomic_load(&reader->stall_at);
        if (stall_at == 0 || total < stall_at) break;
        if (!atomic_load(&reader->stalled) && !lab_early(l)) {
            lab_sleep_us(100000); /* the next block, then, and its faults */
            return result;
        }
        atomic_store(&reader->stalled, true);
        lab_sleep_us(200);
    }
    const uint64_t cut_at = atomic_load(&reader->cut_at);
    if (cut_at > 0 && total >= cut_at) {
        atomic_store(&reader->cut_at, 0);
        if (truncate(reader->cut_path, 4096) != 0) abort();
    }
    const uint64_t fail_at = atomic_load(&reader->fail_at);
    return fail_at > 0 && total >= fail_at ? -EIO : result;
}

static inline void lab_notify(void *ctx) {
    lab *l = ctx;
    pthread_mutex_lock(&l->lock);
    if (l->engine) bd_engine_wake(l->engine);
    pthread_mutex_unlock(&l->lock);
}

/* ---- Requests, on bd-sched ---- */

static inline void lab_end(lab_request *r, bd_finish finish, const bd_error *err) {
    r->finish = finish;
    if (err) r->error = *err;
    atomic_store(&r->done, true);
}

static inline void lab_ready(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                             const bd_error *err) {
    lab_request *r = (lab_request *)(void *)((char *)waiter - offsetof(lab_request, waiter));
    r->waiting = false;
    if (status == BD_OK) {
        r->lease = *lease;
        r->leased = true;
        return;
    }
    lab_request **link = &r->owner->pending;
    while (*link != r)
        link = &(*link)->next;
    *link = r->next;
    lab_end(r, BD_FINISH_ERROR, err);
}

static inline bool lab_token(void *ctx, const bd_token_result *token) {
    lab_request *r = ctx;
    const uint32_t at = atomic_load(&r->count);
    r->ids[at] = token->id;
    r->at_us[at] = bd_now_us();
    atomic_store(&r->count, at + 1);
    return true;
}

static inline void lab_over(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err) {
    lab_request *r = ctx;
    (void)stop_id;
    r->sequence = NULL;
    lab_end(r, finish, err);
}

static const bd_sequence_sink lab_sink = {.token = lab_token, .end = lab_over};

/* BD_OK: has begun; BD_BUSY: stays; else it has ended. */
static inline bd_status lab_start(lab *l, lab_request *r, uint64_t now_us) {
    bd_error err = {0};
    if (!r->leased && r->variant >= 0) {
        if (r->waiting) return BD_BUSY;
        r->waiter.ready = lab_ready;
        bd_status status = bd_cache_acquire(l->cache, l->variants[r->variant], now_us, &r->lease,
                                            &r->waiter, &err);
        r->waiting = status == BD_AGAIN;
        r->leased = status == BD_OK;
        if (status == BD_AGAIN || status == BD_BUSY) return BD_BUSY;
        if (status != BD_OK) {
            lab_end(r, BD_FINISH_ERROR, &err);
            return status;
        }
    }
    const bd_sequence_options options = {.prompt = r->prompt,
                                         .prompt_tokens = r->prompt_tokens,
                                         .max_new_tokens = r->new_tokens,
                                         .lease = r->lease,
                                         .logprobs = -1,
                                         .prompt_logprobs = -1,
                                         .sink = &lab_sink,
                                         .sink_ctx = r};
    bd_status status = bd_engine_add(l->engine, &options, &r->sequence, &err);
    if (status == BD_OK || status == BD_BUSY) return status;
    if (r->leased) bd_cache_release(l->cache, &r->lease, now_us);
    lab_end(r, BD_FINISH_ERROR, &err);
    return status;
}

static inline void lab_before_step(void *ctx, uint64_t now_us, bool cache_changed) {
    lab *l = ctx;
    (void)cache_changed;
    for (lab_request **link = &l->pending; *link;) {
        lab_request *r = *link, *next = r->next;
        if (lab_start(l, r, now_us) == BD_BUSY)
            link = &r->next;
        else
            *link = next;
    }
}

static inline uint64_t lab_next_wake(void *ctx, uint64_t now_us) {
    const lab *l = ctx;
    return l->pending ? now_us + 1000 : UINT64_MAX;
}

static inline void lab_arrive(bd_call *call, bd_engine *engine) {
    lab_request *r = (lab_request *)(void *)call;
    (void)engine;
    lab_request **link = &r->owner->pending;
    while (*link)
        link = &(*link)->next;
    r->next = NULL;
    *link = r;
}

/* ---- From the caller's thread ---- */

static inline void lab_submit(lab *l, lab_request *r, int32_t variant, uint32_t prompt_tokens,
                              uint32_t new_tokens, uint64_t seed) {
    memset(r, 0, sizeof *r);
    r->owner = l;
    r->variant = variant;
    r->prompt_tokens = prompt_tokens;
    r->new_tokens = new_tokens;
    for (uint32_t i = 0; i < prompt_tokens; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        r->prompt[i] = (int32_t)(seed >> 33) % 500;
    }
    r->call.run = lab_arrive;
    r->asked_us = bd_now_us();
    bd_engine_post(l->engine, &r->call);
}

static inline void lab_wait(const lab_request *r) {
    while (!atomic_load(&r->done))
        lab_sleep_us(300);
}

typedef struct lab_call { /* runs something on bd-sched and waits for it */
    bd_call call;
    lab *owner;
    lab_request *request;
    uint32_t variant;
    bd_status status;
    bd_variant_info info;
    _Atomic bool done;
} lab_call;

static inline void lab_run(lab *l, lab_call *c, void (*run)(bd_call *call, bd_engine *engine)) {
    c->owner = l;
    c->call.run = run;
    bd_engine_post(l->engine, &c->call);
    while (!atomic_load(&c->done))
        lab_sleep_us(100);
}

static inline void lab_run_cancel(bd_call *call, bd_engine *engine) {
    lab_call *c = (lab_call *)(void *)call;
    lab_request *r = c->request;
    if (r->sequence) {
        bd_engine_cancel(engine, r->sequence);
    } else if (!atomic_load(&r->done)) {
        lab_request **link = &c->owner->pending;
        while (*link != r)
            link = &(*link)->next;
        *link = r->next;
        if (r->waiting) bd_cache_wait_cancel(c->owner->cache, &r->waiter);
        if (r->leased) bd_cache_release(c->owner->cache, &r->lease, bd_now_us());
        lab_end(r, BD_FINISH_CANCELLED, NULL);
    }
    atomic_store(&c->done, true);
}

static inline void lab_run_unload(bd_call *call, bd_engine *engine) {
    lab_call *c = (lab_call *)(void *)call;
    (void)engine;
    c->status = bd_cache_unload(c->owner->cache, c->owner->variants[c->variant], NULL);
    atomic_store(&c->done, true);
}

static inline void lab_run_info(bd_call *call, bd_engine *engine) {
    lab_call *c = (lab_call *)(void *)call;
    (void)engine;
    bd_cache_info(c->owner->cache, c->owner->variants[c->variant], bd_now_us(), &c->info);
    atomic_store(&c->done, true);
}

static inline void lab_cancel(lab *l, lab_request *r) {
    lab_call c = {.request = r};
    lab_run(l, &c, lab_run_cancel);
}

static inline bd_status lab_unload(lab *l, uint32_t variant) {
    lab_call c = {.variant = variant};
    lab_run(l, &c, lab_run_unload);
    return c.status;
}

static inline bd_variant_info lab_info(lab *l, uint32_t variant) {
    lab_call c = {.variant = variant};
    lab_run(l, &c, lab_run_info);
    return c.info;
}

/* Out of memory, whatever it was. */
static inline void lab_make_cold(lab *l, uint32_t variant) {
    while (lab_unload(l, variant) != BD_OK || lab_info(l, variant).state != BD_VARIANT_ABSENT)
        lab_sleep_us(500);
}

/* ---- Building ---- */

/* The shard's sums anew, in chunks small enough that layers come one after the other. */
static inline void lab_small_chunks(bd_delta *delta, bd_delta_file *file) {
    char path[1280], *data = NULL;
    size_t bytes = 0;
    bd_error err = {0};
    *file = delta->files[0];
    LAB_MUST(bd_path_join(path, sizeof path, delta->dir, file->name, &err), err);
    LAB_MUST(bd_file_read(path, 64u << 20, &data, &bytes, &err), err);
    file->chunk_bytes = LAB_CHUNK_BYTES;
    file->chunk_count = (uint32_t)((bytes + LAB_CHUNK_BYTES - 1) / LAB_CHUNK_BYTES);
    uint64_t *sums = calloc(file->chunk_count, sizeof *sums);
    if (!sums) abort();
    for (uint32_t i = 0; i < file->chunk_count; i++) {
        const size_t from = (size_t)i * LAB_CHUNK_BYTES, left = bytes - from;
        sums[i] = XXH3_64bits(data + from, left < LAB_CHUNK_BYTES ? left : LAB_CHUNK_BYTES);
    }
    file->chunk_xxh3 = sums;
    delta->files = file;
    free(data);
}

static inline uint32_t lab_add(lab *l, const char *dir) {
    bd_error err = {0};
    bd_delta delta;
    const uint32_t at = l->variant_count++;
    LAB_MUST(bd_delta_open(dir, &delta, &err), err);
    lab_small_chunks(&delta, &l->files[at]);
    LAB_MUST(bd_cache_register(l->cache, &delta, false, &l->variants[at], &err), err);
    return at;
}

static inline void lab_open_base(lab *l, const char *base, uint32_t slots, uint32_t threads,
                                 uint64_t host_bytes) {
    bd_error err = {0};
    memset(l, 0, sizeof *l);
    pthread_mutex_init(&l->lock, NULL);
    l->metrics = bd_metrics_create(256);
    const bd_model_options model = {.dir = base,
                                    .ops = bd_backend_cpu_ops(),
                                    .rank_count = 1,
                                    .thread_count = threads,
                                    .rows_max = LAB_PROMPT_MAX,
                                    .seqs_max = 16,
                                    .logits_rows_max = 16,
                                    .kv_block_tokens = 16,
                                    .kv_tokens = 16384,
                                    .rope_tables_max = 1,
                                    .max_model_len = 2048,
                                    .delta_slots = slots};
    LAB_MUST(bd_model_open(&model, &l->model, &err), err);
    bd_loader_source source = bd_loader_source_of(l->model);
    source.on_read = lab_on_read;
    source.read_ctx = &l->reader;
    const bd_loader_options loader = {.model = l->model,
                                      .notify = lab_notify,
                                      .notify_ctx = l,
                                      .block_bytes = LAB_CHUNK_BYTES,
                                      .depth = 4};
    LAB_MUST(bd_loader_create_with(&loader, &source, &l->loader, &err), err);
    const bd_cache_options cache = {.model = l->model,
                                    .loader = l->loader,
                                    .page_count = bd_model_page_count(l->model),
                                    .retry_after_us = 1,
                                    .host_bytes = host_bytes,
                                    .metrics = l->metrics};
    LAB_MUST(bd_cache_create(&cache, &l->cache, &err), err);
    const bd_engine_options options = {
        .model = l->model,
        .cache = l->cache,
        .rows_max = LAB_PROMPT_MAX,
        .seqs_max = 16,
        .variants_per_step_max = 8,
        .logits_rows_max = 16,
        .decode_delta = true,
        .metrics = l->metrics,
        .hooks = {.ctx = l, .before_step = lab_before_step, .next_wake_us = lab_next_wake}};
    bd_engine *engine;
    LAB_MUST(bd_engine_create(&options, &engine, &err), err);
    pthread_mutex_lock(&l->lock);
    l->engine = engine;
    pthread_mutex_unlock(&l->lock);
}

static inline void lab_open_host(lab *l, uint32_t slots, uint32_t threads, uint64_t host_bytes) {
    lab_open_base(l, "demo/zen-mini", slots, threads, host_bytes);
}

static inline void lab_open(lab *l, uint32_t slots, uint32_t threads) {
    lab_open_host(l, slots, threads, 0);
}

static inline void lab_begin(lab *l) {
    bd_error err = {0};
    LAB_MUST(bd_engine_start(l->engine, &err), err);
}

/* Everything must be back where it came from. */
static inline void lab_close(lab *l) {
    bd_engine *engine = l->engine;
    bd_engine_stop(engine);
    bd_engine_stats stats;
    bd_engine_stats_get(engine, &stats);
    BD_ASSERT(stats.kv_blocks_used == 0);
    pthread_mutex_lock(&l->lock);
    l->engine = NULL;
    pthread_mutex_unlock(&l->lock);
    bd_engine_destroy(engine);
    bd_cache_destroy(l->cache); /* asserts that no lease is out and every page is back */
    bd_loader_destroy(l->loader);
    bd_model_close(l->model);
    bd_metrics_destroy(l->metrics);
    for (uint32_t i = 0; i < l->variant_count; i++)
        free((void *)(uintptr_t)l->files[i].chunk_xxh3);
    pthread_mutex_destroy(&l->lock);
}

#endif
