/* hot_lab.h - what resident variants feel while another is loaded: an engine over a model that is
 * open, deltas from disk, and the times between tokens of sequences that decode. Shared by
 * gpu_loads.c and gpu_split.c. */
#ifndef BITDELTA_BENCH_HOT_LAB_H
#define BITDELTA_BENCH_HOT_LAB_H

#include <inttypes.h>
#include <math.h>

#include "cache/cache_internal.h"
#include "stream_lab.h"

enum { HOT_MAX = 8, HOT_PROMPT = 256, HOT_NEW = 192, HOT_GAPS_MAX = 1 << 16 };

typedef struct hot_gaps {
    double us[HOT_GAPS_MAX];
    uint32_t count;
} hot_gaps;

/* Variants [0, hot) decode; [hot, hot + cold) come and go. */
typedef struct hot_lab {
    lab l;
    uint32_t hot, cold;
    uint32_t load_count; /* of load_us */
    double load_us[4096];
} hot_lab;

static inline int hot_by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts them. */
static inline double hot_median(double *values, uint64_t count) {
    qsort(values, count, sizeof *values, hot_by_value);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static inline double hot_at_share(hot_gaps *g, double share) {
    qsort(g->us, g->count, sizeof *g->us, hot_by_value);
    const uint32_t at = (uint32_t)(share * g->count);
    return g->count ? g->us[at < g->count ? at : g->count - 1] : 0;
}

/* ---- Open and close ---- */

/* The loader's options but for whom it is to notify; dirs[hot + cold]. */
static inline void hot_open(hot_lab *h, bd_loader_options loader, const char *const *dirs,
                            uint64_t host_bytes) {
    lab *l = &h->l;
    bd_error err = {0};
    memset(l, 0, sizeof *l);
    h->load_count = 0;
    pthread_mutex_init(&l->lock, NULL);
    l->metrics = bd_metrics_create(256);
    l->model = loader.model;
    loader.notify = lab_notify;
    loader.notify_ctx = l;
    LAB_MUST(bd_loader_create(&loader, &l->loader, &err), err);
    const bd_cache_options cache = {.model = l->model,
                                    .loader = l->loader,
                                    .page_count = bd_model_page_count(l->model),
                                    .retry_after_us = 1,
                                    .host_bytes = host_bytes,
                                    .metrics = l->metrics};
    LAB_MUST(bd_cache_create(&cache, &l->cache, &err), err);
    for (uint32_t i = 0; i < h->hot + h->cold; i++) {
        bd_delta delta;
        LAB_MUST(bd_delta_open(dirs[i], &delta, &err), err);
        LAB_MUST(bd_cache_register(l->cache, &delta, false, &l->variants[l->variant_count++], &err),
                 err);
    }
    const bd_engine_options options = {
        .model = l->model,
        .cache = l->cache,
        .rows_max = 1024,
        .seqs_max = 16,
        .variants_per_step_max = HOT_MAX,
        .logits_rows_max = 16,
        .decode_delta = true,
        .metrics = l->metrics,
        .hooks = {.ctx = l, .before_step = lab_before_step, .next_wake_us = lab_next_wake}};
    bd_engine *engine;
    LAB_MUST(bd_engine_create(&options, &engine, &err), err);
    pthread_mutex_lock(&l->lock);
    l->engine = engine;
    pthread_mutex_unlock(&l->lock);
    LAB_MUST(bd_engine_start(l->engine, &err), err);
}

/* The model stays open. */
static inline void hot_close(hot_lab *h) {
    lab *l = &h->l;
    bd_engine *engine = l->engine;
    bd_engine_stop(engine);
    pthread_mutex_lock(&l->lock);
    l->engine = NULL;
    pthread_mutex_unlock(&l->lock);
    bd_engine_destroy(engine);
    bd_cache_destroy(l->cache);
    bd_loader_destroy(l->loader);
    bd_metrics_destroy(l->metrics);
    pthread_mutex_destroy(&l->lock);
}

/* ---- Host memory ---- */

static inline void hot_run_host_total(bd_call *call, bd_engine *engine) {
    lab_call *c = (lab_call *)(void *)call;
    (void)engine;
    c->info.host_bytes = bd_host_tier_total_bytes(c->owner->cache->host);
    atomic_store(&c->done, true);
}

/* Until what was asked for has come. */
static inline void hot_wait_host(hot_lab *h, uint64_t host_bytes) {
    const uint64_t until = bd_now_us() + 60000000;
    for (;;) {
        lab_call c = {0};
        lab_run(&h->l, &c, hot_run_host_total);
        if (c.info.host_bytes + (8u << 20) >= host_bytes) return;
        if (bd_now_us() > until) {
            fprintf(stderr, "the host memory does not come\n");
            exit(1);
        }
        lab_sleep_us(1000);
    }
}

/* ---- Rounds ---- */

static inline void hot_run_prefetch(bd_call *call, bd_engine *engine) {
    lab_call *c = (lab_call *)(void *)call;
    bd_error err = {0};
    (void)engine;
    c->status =
        bd_cache_prefetch(c->owner->cache, c->owner->variants[c->variant], bd_now_us(), &err);
    atomic_store(&c->done, true);
}

/* Comes in once and goes. */
static inline void hot_load_once(hot_lab *h, uint32_t variant) {
    lab_call c = {.variant = variant};
    lab_run(&h->l, &c, hot_run_prefetch);
    for (;;) {
        const bd_variant_info info = lab_info(&h->l, variant);
        if (info.failure) {
            fprintf(stderr, "%s: %s\n", info.failure->subject, info.failure->message);
            exit(1);
        }
        if (info.state == BD_VARIANT_READY) {
            if (h->load_count < 4096) h->load_us[h->load_count++] = (double)info.load_us;
            break;
        }
        lab_sleep_us(1000);
    }
    lab_make_cold(&h->l, variant);
}

static inline bool hot_over(const lab_request *hot, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (!atomic_load(&hot[i].done)) return false;
    return true;
}

/* Times between tokens while all decode and, if `loads`, the cold variants come and go one after
 * the other, from number `next` on. Returns how many came. */
static inline uint32_t hot_round(hot_lab *h, bool loads, uint32_t next, hot_gaps *to) {
    static lab_request hot[HOT_MAX];
    uint32_t loaded = 0;
    for (uint32_t i = 0; i < h->hot; i++)
        lab_submit(&h->l, &hot[i], (int32_t)i, HOT_PROMPT, HOT_NEW, i);
    for (uint32_t i = 0; i < h->hot; i++)
        while (atomic_load(&hot[i].count) < 2 && !atomic_load(&hot[i].done))
            lab_sleep_us(500);
    const uint64_t from = bd_now_us();
    for (; loads && !hot_over(hot, h->hot); loaded++)
        hot_load_once(h, h->hot + (next + loaded) % h->cold);
    uint64_t until = UINT64_MAX;
    for (uint32_t i = 0; i < h->hot; i++) {
        lab_wait(&hot[i]);
        if (hot[i].finish != BD_FINISH_LENGTH) {
            fprintf(stderr, "a resident variant failed: %s\n", hot[i].error.message);
            exit(1);
        }
        if (hot[i].at_us[HOT_NEW - 1] < until) until = hot[i].at_us[HOT_NEW - 1];
    }
    to->count = 0;
    for (uint32_t i = 0; i < h->hot; i++)
        for (uint32_t t = 1; t < HOT_NEW; t++)
            if (hot[i].at_us[t - 1] >= from && hot[i].at_us[t] <= until && to->count < HOT_GAPS_MAX)
                to->us[to->count++] = (double)(hot[i].at_us[t] - hot[i].at_us[t - 1]);
    return loaded;
}

typedef struct hot_result {
    double p50_us[2], p99_us[2]; /* of all rounds: nothing loads, loads */
    double p50_ratio, p99_ratio; /* median over the rounds */
    double p50_worst, p99_worst; /* of the rounds' ratios */
    uint32_t loads;
} hot_result;

/* Each way begins in turn. A CSV row a round: hot,round,what,steps,p50_us,p99_us,loads. */
static inline hot_result hot_rounds(hot_lab *h, const char *what, uint64_t rounds) {
    static hot_gaps one, all[2];
    double p50[64], p99[64], p50_of[2], p99_of[2];
    hot_result out = {0};
    all[0].count = all[1].count = 0;
    (void)hot_round(h, false, 0, &one);
    for (uint64_t round = 0; round < rounds; round++) {
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t with = (i + (uint32_t)round) % 2;
            const uint32_t loaded = hot_round(h, with, out.loads, &one);
            out.loads += loaded;
            for (uint32_t k = 0; k < one.count && all[with].count < HOT_GAPS_MAX; k++)
                all[with].us[all[with].count++] = one.us[k];
            p50_of[with] = hot_at_share(&one, 0.5);
            p99_of[with] = hot_at_share(&one, 0.99);
            printf("hot,%" PRIu64 ",%s,%u,%.0f,%.0f,%u\n", round, with ? what : "nothing loads",
                   one.count, p50_of[with], p99_of[with], loaded);
            fflush(stdout);
        }
        p50[round] = p50_of[1] / p50_of[0];
        p99[round] = p99_of[1] / p99_of[0];
        out.p50_worst = fmax(out.p50_worst, p50[round]);
        out.p99_worst = fmax(out.p99_worst, p99[round]);
    }
    for (uint32_t i = 0; i < 2; i++) {
        out.p50_us[i] = hot_at_share(&all[i], 0.5);
        out.p99_us[i] = hot_at_share(&all[i], 0.99);
    }
    out.p50_ratio = hot_median(p50, rounds);
    out.p99_ratio = hot_median(p99, rounds);
    return out;
}

#endif
