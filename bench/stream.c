/* stream.c - cold starts over a small model with deltas read at a set rate: time to first token of
 * a cold variant against its load and its prefill alone, streamed and one after the other; and what
 * the load of one variant costs the others, as the P99 of their inter-token times with and without
 * it. Rounds alternate, so that ratios hold on a machine that is shared. Models of
 * real size have more layers and relatively smaller embeddings than the demo: bench/stream.sh makes
 * one up. */
#include "stream_lab.h"

enum { PROMPT = 384, ROUNDS = 5, HOT_ROUNDS = 10, HOT = 4, HOT_TOKENS = 160, GAPS_MAX = 65536 };

typedef struct gaps {
    double us[GAPS_MAX];
    uint32_t count;
} gaps;

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double at_share(double *values, uint32_t count, double share) {
    qsort(values, count, sizeof *values, by_value);
    uint32_t at = (uint32_t)(share * count);
    return values[at < count ? at : count - 1];
}

static double first_token_us(lab *l, int32_t variant, uint64_t seed) {
    static lab_request r;
    lab_submit(l, &r, variant, PROMPT, 1, seed);
    lab_wait(&r);
    if (r.finish != BD_FINISH_LENGTH) {
        fprintf(stderr, "%s\n", r.error.message);
        abort();
    }
    return (double)(r.at_us[0] - r.asked_us);
}

typedef struct off_call {
    bd_call call;
    lab *owner;
    bool on;
    _Atomic bool done;
} off_call;

static void run_streaming(bd_call *call, bd_engine *engine) {
    off_call *c = (off_call *)(void *)call;
    bd_cache_stream(c->owner->cache, c->on ? bd_engine_may_stream : NULL, engine);
    atomic_store(&c->done, true);
}

static void set_streaming(lab *l, bool on) {
    off_call c = {.call = {.run = run_streaming}, .owner = l, .on = on};
    bd_engine_post(l->engine, &c.call);
    while (!atomic_load(&c.done))
        lab_sleep_us(100);
}

static double cold_us(lab *l, bool streaming, uint64_t seed) {
    lab_make_cold(l, 0);
    set_streaming(l, streaming);
    return first_token_us(l, 0, seed);
}

static void cold_starts(lab *l) {
    static const double ratios[] = {0.25, 0.5, 1, 2, 4};
    printf("cold start, prompt of %d tokens, %.2f MB of delta; medians of %d rounds (of the ratio "
           "too), ms\n",
           PROMPT, (double)l->files[0].bytes * 1e-6, ROUNDS);
    printf("%6s %9s %9s %9s %9s %22s\n", "ratio", "load", "prefill", "streamed", "in turn",
           "streamed / max(l, p)");
    for (uint32_t i = 0; i < sizeof ratios / sizeof ratios[0]; i++) {
        double load[ROUNDS], prefill[ROUNDS], streamed[ROUNDS], in_turn[ROUNDS], part[ROUNDS];
        uint64_t seed = 100 * i;
        atomic_store(&l->reader.bytes_per_us, 0.0);
        (void)first_token_us(l, 0, seed++);
        const double step_us = first_token_us(l, 0, seed++);
        atomic_store(&l->reader.bytes_per_us, (double)l->files[0].bytes / (step_us * ratios[i]));
        for (uint32_t n = 0; n < ROUNDS; n++) {
            streamed[n] = cold_us(l, true, seed++);
            load[n] = (double)lab_info(l, 0).load_us;
            prefill[n] = first_token_us(l, 0, seed++);
            in_turn[n] = cold_us(l, false, seed++);
            part[n] = streamed[n] / (load[n] > prefill[n] ? load[n] : prefill[n]);
        }
        const double l_us = at_share(load, ROUNDS, 0.5), p_us = at_share(prefill, ROUNDS, 0.5);
        const double s_us = at_share(streamed, ROUNDS, 0.5);
        printf("%6.2f %9.1f %9.1f %9.1f %9.1f %22.3f\n", ratios[i], l_us * 1e-3, p_us * 1e-3,
               s_us * 1e-3, at_share(in_turn, ROUNDS, 0.5) * 1e-3, at_share(part, ROUNDS, 0.5));
    }
}

static void add_gaps(gaps *to, const lab_request *r) {
    for (uint32_t i = 1; i < atomic_load(&r->count) && to->count < GAPS_MAX; i++)
        to->us[to->count++] = (double)(r->at_us[i] - r->at_us[i - 1]);
}

/* Variants 1 .. HOT decode; variant 0 comes in meanwhile, if `cold`. */
static void hot_round(lab *l, bool cold, gaps *to) {
    static lab_request hot[HOT], r;
    lab_make_cold(l, 0);
    for (uint32_t i = 0; i < HOT; i++)
        lab_submit(l, &hot[i], (int32_t)i + 1, 16, HOT_TOKENS, i);
    while (atomic_load(&hot[HOT - 1].count) < 8)
        lab_sleep_us(500);
    if (cold) lab_submit(l, &r, 0, 16, 1, 77);
    for (uint32_t i = 0; i < HOT; i++) {
        lab_wait(&hot[i]);
        add_gaps(to, &hot[i]);
    }
    if (cold) lab_wait(&r);
}

static void hot_variants(lab *l) {
    static gaps with, without;
    set_streaming(l, true);
    atomic_store(&l->reader.bytes_per_us, 0.0);
    for (int32_t i = 1; i <= HOT; i++)
        (void)first_token_us(l, i, 7);
    /* The load takes about as long as the hot requests do. */
    gaps *probe = calloc(1, sizeof *probe);
    if (!probe) abort();
    hot_round(l, false, probe);
    double total = 0;
    for (uint32_t i = 0; i < probe->count; i++)
        total += probe->us[i] / HOT;
    free(probe);
    atomic_store(&l->reader.bytes_per_us, (double)l->files[0].bytes / (total * 0.8));
    double ratios[HOT_ROUNDS];
    for (uint32_t n = 0; n < HOT_ROUNDS; n++) {
        static gaps a, b;
        a.count = b.count = 0;
        hot_round(l, n % 2 == 0, n % 2 == 0 ? &a : &b);
        hot_round(l, n % 2 != 0, n % 2 != 0 ? &a : &b);
        memcpy(with.us + with.count, a.us, a.count * sizeof a.us[0]);
        with.count += a.count;
        memcpy(without.us + without.count, b.us, b.count * sizeof b.us[0]);
        without.count += b.count;
        ratios[n] = at_share(a.us, a.count, 0.99) / at_share(b.us, b.count, 0.99);
    }
    const double p50[2] = {at_share(without.us, without.count, 0.5),
                           at_share(with.us, with.count, 0.5)};
    const double p99[2] = {at_share(without.us, without.count, 0.99),
                           at_share(with.us, with.count, 0.99)};
    printf("inter-token times of %d hot variants, %u tokens each way, us\n", HOT, with.count);
    printf("%24s %9s %9s\n", "", "P50", "P99");
    printf("%24s %9.0f %9.0f\n", "nothing loads", p50[0], p99[0]);
    printf("%24s %9.0f %9.0f\n", "a cold variant loads", p50[1], p99[1]);
    printf("%24s %9.3f %9.3f   median of %d rounds' P99 ratios: %.3f\n", "ratio", p50[1] / p50[0],
           p99[1] / p99[0], HOT_ROUNDS, at_share(ratios, HOT_ROUNDS, 0.5));
}

int main(int argc, char **argv) {
    static lab l;
    const char *only = argc == 4 ? argv[3] : "";
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: bench_stream BASE DELTA [cold|hot]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    lab_open_base(&l, argv[1], HOT + 1, 1, 0);
    for (uint32_t i = 0; i <= HOT; i++)
        lab_add(&l, argv[2]); /* the same files, but variants of their own */
    lab_begin(&l);
    if (strcmp(only, "hot") != 0) cold_starts(&l);
    if (strcmp(only, "cold") != 0) hot_variants(&l);
    printf("steps over loading variants %.0f, given up %.0f\n",
           bd_metric_value(l.engine->metrics.streamed), bd_metric_value(l.engine->metrics.voided));
    lab_close(&l);
    return 0;
}
