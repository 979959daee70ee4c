/* cache_policy.c - hit rates of the cache's replacement policy on synthetic request traces: the
 * very code that serves (src/cache/policy.c) against LRU, LFU with full history, ARC (Megiddo and
 * Modha, FAST '03) and the clairvoyant optimum (Belady: the variant that is asked for last goes).
 * Every policy must admit what is asked for, as a server must.
 *
 *   cc -O2 -D_GNU_SOURCE -Iinclude -Isrc bench/cache_policy.c src/cache/policy.c -lm
 *   ./a.out [--trace NAME] [--requests N] [--seed N] [--seeds N] > cache_policy.csv
 *   python3 bench/plot_cache_policy.py cache_policy.csv cache_policy.png
 *
 * CSV: trace,variants,slots,seed,requests,lru,lfu,arc,ours,optimum - hit rates in percent of the
 * requests after the first tenth. A summary for people goes to stderr. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/policy.h"

#define PINNED_TOP 6 /* the server's default */
#define NOBODY     UINT32_MAX

typedef struct trace {
    const char *name;
    uint32_t variants, requests;
    uint32_t *id;   /* [requests] */
    uint32_t *next; /* [requests]: when the same id comes again; `requests`: never */
} trace;

static void *must_alloc(size_t count, size_t bytes) {
    void *memory = calloc(count ? count : 1, bytes);
    if (!memory) {
        fprintf(stderr, "cache_policy: out of memory\n");
        exit(1);
    }
    return memory;
}

/* ---- random numbers ---- */

static uint64_t random_next(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double random_unit(uint64_t *state) {
    return (double)(random_next(state) >> 11) * 0x1p-53;
}

static uint32_t random_below(uint64_t *state, uint32_t bound) {
    return (uint32_t)(random_next(state) % bound);
}

static void shuffle(uint32_t *list, uint32_t count, uint64_t *state) {
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = random_below(state, i), kept = list[i - 1];
        list[i - 1] = list[j];
        list[j] = kept;
    }
}

/* ---- traces ---- */

typedef struct sampler { /* a discrete distribution */
    uint32_t count;
    double *upto;
} sampler;

static sampler zipf_make(uint32_t count, double exponent) {
    sampler s = {count, must_alloc(count, sizeof(double))};
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        s.upto[i] = sum += pow(i + 1, -exponent);
    return s;
}

static uint32_t sample(const sampler *s, uint64_t *state) {
    double at = random_unit(state) * s->upto[s->count - 1];
    uint32_t low = 0, high = s->count - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (s->upto[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static void fill_zipf(trace *t, double exponent, uint32_t shift_every, uint64_t *state) {
    sampler s = zipf_make(t->variants, exponent);
    uint32_t *name = must_alloc(t->variants, sizeof *name);
    for (uint32_t i = 0; i < t->variants; i++)
        name[i] = i;
    for (uint32_t r = 0; r < t->requests; r++) {
        if (shift_every && r % shift_every == 0) shuffle(name, t->variants, state);
        t->id[r] = name[sample(&s, state)];
    }
    free(name);
    free(s.upto);
}

/* Popularity drifts: now and then one variant takes the rank of another. */
static void fill_drift(trace *t, double exponent, uint32_t swap_every, uint64_t *state) {
    sampler s = zipf_make(t->variants, exponent);
    uint32_t *name = must_alloc(t->variants, sizeof *name);
    for (uint32_t i = 0; i < t->variants; i++)
        name[i] = i;
    for (uint32_t r = 0; r < t->requests; r++) {
        if (r % swap_every == 0) {
            uint32_t a = sample(&s, state), b = random_below(state, t->variants), kept = name[a];
            name[a] = name[b];
            name[b] = kept;
        }
        t->id[r] = name[sample(&s, state)];
    }
    free(name);
    free(s.upto);
}

/* Each variant has its hours: Zipf 0.9 times a bump of the day, four days. */
static void fill_diurnal(trace *t, uint64_t *state) {
    double *phase = must_alloc(t->variants, sizeof *phase);
    for (uint32_t i = 0; i < t->variants; i++)
        phase[i] = random_unit(state);
    sampler s = {t->variants, must_alloc(t->variants, sizeof(double))};
    uint32_t step = t->requests / 400 ? t->requests / 400 : 1;
    for (uint32_t r = 0; r < t->requests; r++) {
        if (r % step == 0) {
            double day = 4.0 * r / t->requests, sum = 0;
            for (uint32_t i = 0; i < t->variants; i++) {
                double bump = 0.5 + 0.5 * cos(6.283185307179586 * (day + phase[i]));
                s.upto[i] = sum += pow(i + 1, -0.9) * (0.02 + bump * bump * bump);
            }
        }
        t->id[r] = sample(&s, state);
    }
    free(phase);
    free(s.upto);
}

/* Half the requests: Zipf 0.6. The other half: three variants at a time are in a burst of about 200
 * requests. */
static void fill_bursts(trace *t, uint64_t *state) {
    enum { BURSTS = 3 };
    uint32_t burst[BURSTS];
    sampler s = zipf_make(t->variants, 0.6);
    for (uint32_t b = 0; b < BURSTS; b++)
        burst[b] = random_below(state, t->variants);
    for (uint32_t r = 0; r < t->requests; r++) {
        uint32_t b = random_below(state, BURSTS);
        if (random_below(state, 400) == 0) burst[b] = random_below(state, t->variants);
        t->id[r] = random_below(state, 2) ? burst[b] : sample(&s, state);
    }
    free(s.upto);
}

static void fill_cyclic(trace *t, uint64_t *state) {
    (void)state;
    for (uint32_t r = 0; r < t->requests; r++)
        t->id[r] = r % t->variants;
}

/* Zipf 0.9 interrupted by scans over all variants: a nightly evaluation of everything. */
static void fill_scans(trace *t, uint64_t *state) {
    sampler s = zipf_make(t->variants, 0.9);
    uint32_t scan = t->variants;
    for (uint32_t r = 0; r < t->requests; r++) {
        if (scan >= t->variants && random_below(state, 4 * t->variants) == 0) scan = 0;
        bool scanning = scan < t->variants && random_below(state, 2) == 0;
        t->id[r] = scanning ? scan++ : sample(&s, state);
    }
    free(s.upto);
}

enum { TRACE_COUNT = 9 };
static const char *const trace_names[TRACE_COUNT] = {
    "zipf-0.6", "zipf-0.9", "zipf-1.2", "shift", "drift", "diurnal", "bursts", "cyclic", "scans"};

static trace trace_make(uint32_t kind, uint32_t variants, uint32_t requests, uint64_t seed) {
    trace t = {.name = trace_names[kind], .variants = variants, .requests = requests};
    t.id = must_alloc(requests, sizeof *t.id);
    t.next = must_alloc(requests, sizeof *t.next);
    uint64_t state = seed * 1000003u + kind * 7919u + variants;
    switch (kind) {
    case 0:
        fill_zipf(&t, 0.6, 0, &state);
        break;
    case 1:
        fill_zipf(&t, 0.9, 0, &state);
        break;
    case 2:
        fill_zipf(&t, 1.2, 0, &state);
        break;
    case 3:
        fill_zipf(&t, 0.9, 20 * variants > 1000 ? 20 * variants : 1000, &state);
        break;
    case 4:
        fill_drift(&t, 0.9, 20, &state);
        break;
    case 5:
        fill_diurnal(&t, &state);
        break;
    case 6:
        fill_bursts(&t, &state);
        break;
    case 7:
        fill_cyclic(&t, &state);
        break;
    default:
        fill_scans(&t, &state);
        break;
    }
    uint32_t *last = must_alloc(variants, sizeof *last);
    for (uint32_t i = 0; i < variants; i++)
        last[i] = requests;
    for (uint32_t r = requests; r-- > 0;) {
        t.next[r] = last[t.id[r]];
        last[t.id[r]] = r;
    }
    free(last);
    return t;
}

/* ---- policies that rank residents: least value goes ---- */

typedef struct table {
    uint32_t slots, count;
    uint32_t *resident; /* [slots] ids */
    uint32_t *place;    /* [variants], NOBODY: absent */
    double *value;      /* [variants] */
} table;

static table table_make(uint32_t variants, uint32_t slots) {
    table t = {.slots = slots};
    t.resident = must_alloc(slots, sizeof *t.resident);
    t.place = must_alloc(variants, sizeof *t.place);
    t.value = must_alloc(variants, sizeof *t.value);
    for (uint32_t i = 0; i < variants; i++)
        t.place[i] = NOBODY;
    return t;
}

static void table_free(table *t) {
    free(t->resident);
    free(t->place);
    free(t->value);
}

static void table_replace(table *t, uint32_t place, uint32_t id) {
    if (place < t->count)
        t->place[t->resident[place]] = NOBODY;
    else
        t->count++;
    t->resident[place] = id;
    t->place[id] = place;
}

typedef enum ranking { RANK_LRU, RANK_LFU, RANK_OPTIMUM } ranking;

static double run_ranking(const trace *t, uint32_t slots, ranking kind) {
    table c = table_make(t->variants, slots);
    uint32_t hits = 0, warm = t->requests / 10;
    for (uint32_t r = 0; r < t->requests; r++) {
        uint32_t id = t->id[r];
        bool hit = c.place[id] != NOBODY;
        hits += hit && r >= warm;
        if (!hit) {
            uint32_t worst = 0;
            for (uint32_t p = 1; p < c.count; p++)
                if (c.value[c.resident[p]] < c.value[c.resident[worst]]) worst = p;
            table_replace(&c, c.count < slots ? c.count : worst, id);
        }
        switch (kind) {
        case RANK_LRU:
            c.value[id] = r;
            break;
        case RANK_LFU:
            c.value[id] = floor(c.value[id]) + 1 + (double)r / t->requests;
            break;
        case RANK_OPTIMUM:
            c.value[id] = -(double)t->next[r];
            break;
        }
    }
    table_free(&c);
    return 100.0 * hits / (t->requests - warm);
}

/* ---- ARC ---- */

enum { T1, T2, B1, B2, LISTS, NOWHERE = LISTS };

typedef struct arc {
    uint32_t slots;
    double target;         /* of T1 */
    uint32_t *next, *prev; /* [variants + LISTS]: the last LISTS are the lists' heads */
    uint8_t *where;        /* [variants] */
    uint32_t count[LISTS], variants;
} arc;

static void arc_unlink(arc *a, uint32_t id) {
    if (a->where[id] == NOWHERE) return;
    a->count[a->where[id]]--;
    a->next[a->prev[id]] = a->next[id];
    a->prev[a->next[id]] = a->prev[id];
    a->where[id] = NOWHERE;
}

static void arc_front(arc *a, uint32_t id, uint8_t list) { /* most recent end */
    arc_unlink(a, id);
    uint32_t head = a->variants + list;
    a->next[id] = a->next[head];
    a->prev[id] = head;
    a->prev[a->next[head]] = id;
    a->next[head] = id;
    a->where[id] = list;
    a->count[list]++;
}

static uint32_t arc_last(const arc *a, uint8_t list) {
    return a->prev[a->variants + list];
}

static void arc_replace(arc *a, bool in_b2) {
    bool from_t1 = a->count[T1] > 0 &&
                   (a->count[T1] > a->target || (in_b2 && a->count[T1] == (uint32_t)a->target));
    if (!from_t1 && a->count[T2] == 0) from_t1 = true;
    if (from_t1)
        arc_front(a, arc_last(a, T1), B1);
    else
        arc_front(a, arc_last(a, T2), B2);
}

static void arc_miss(arc *a, uint32_t id) {
    uint8_t where = a->where[id];
    if (where == B1) {
        double step = a->count[B1] >= a->count[B2] ? 1 : (double)a->count[B2] / a->count[B1];
        a->target = fmin(a->slots, a->target + step);
        arc_replace(a, false);
        arc_front(a, id, T2);
        return;
    }
    if (where == B2) {
        double step = a->count[B2] >= a->count[B1] ? 1 : (double)a->count[B1] / a->count[B2];
        a->target = fmax(0, a->target - step);
        arc_replace(a, true);
        arc_front(a, id, T2);
        return;
    }
    uint32_t l1 = a->count[T1] + a->count[B1];
    uint32_t all = l1 + a->count[T2] + a->count[B2];
    if (l1 == a->slots) {
        if (a->count[T1] < a->slots) {
            arc_unlink(a, arc_last(a, B1));
            arc_replace(a, false);
        } else {
            arc_unlink(a, arc_last(a, T1));
        }
    } else if (all >= a->slots) {
        if (all == 2 * a->slots) arc_unlink(a, arc_last(a, B2));
        arc_replace(a, false);
    }
    arc_front(a, id, T1);
}

static double run_arc(const trace *t, uint32_t slots) {
    arc a = {.slots = slots, .variants = t->variants};
    a.next = must_alloc(t->variants + LISTS, sizeof *a.next);
    a.prev = must_alloc(t->variants + LISTS, sizeof *a.prev);
    a.where = must_alloc(t->variants, 1);
    memset(a.where, NOWHERE, t->variants);
    for (uint32_t l = 0; l < LISTS; l++)
        a.next[t->variants + l] = a.prev[t->variants + l] = t->variants + l;
    uint32_t hits = 0, warm = t->requests / 10;
    for (uint32_t r = 0; r < t->requests; r++) {
        uint32_t id = t->id[r];
        bool hit = a.where[id] == T1 || a.where[id] == T2;
        hits += hit && r >= warm;
        if (hit)
            arc_front(&a, id, T2);
        else
            arc_miss(&a, id);
    }
    free(a.next);
    free(a.prev);
    free(a.where);
    return 100.0 * hits / (t->requests - warm);
}

/* ---- ours ---- */

static double run_ours(const trace *t, uint32_t slots) {
    table c = table_make(t->variants, slots);
    bd_policy policy;
    bd_policy_init(&policy, 60);
    policy.variant_count = t->variants;
    bd_policy_item *items = must_alloc(t->variants, sizeof *items);
    bd_policy_item **residents = must_alloc(slots, sizeof(bd_policy_item *));
    uint32_t *victims = must_alloc(slots, sizeof *victims);
    uint32_t hits = 0, warm = t->requests / 10, admissions = 0;
    for (uint32_t i = 0; i < t->variants; i++)
        items[i].pages = 1;
    for (uint32_t r = 0; r < t->requests; r++) {
        uint32_t id = t->id[r];
        bool hit = c.place[id] != NOBODY;
        hits += hit && r >= warm;
        bd_policy_touch(&policy, &items[id], (uint64_t)r * 100000);
        if (hit) continue;
        uint32_t place = c.count;
        if (c.count == slots) {
            for (uint32_t p = 0; p < slots; p++)
                residents[p] = &items[c.resident[p]];
            bd_policy_protect(&policy, residents, slots, PINNED_TOP, slots - 1);
            if (bd_policy_victims(&policy, residents, slots, 1, victims) != 1) exit(3);
            place = victims[0];
            residents[place]->protected_by_rate = false;
        }
        table_replace(&c, place, id);
        items[id].admission = ++admissions;
    }
    free(items);
    free(residents);
    free(victims);
    table_free(&c);
    return 100.0 * hits / (t->requests - warm);
}

/* ---- all of it ---- */

static void run_trace(uint32_t kind, uint32_t variants, const uint32_t *slots, uint32_t requests,
                      uint64_t seed) {
    trace t = trace_make(kind, variants, requests, seed);
    double worst = 1e9, best = -1e9, sum = 0, to_optimum = 0;
    uint32_t count = 0;
    for (; slots[count] != 0; count++) {
        uint32_t n = slots[count];
        double lru = run_ranking(&t, n, RANK_LRU), lfu = run_ranking(&t, n, RANK_LFU);
        double adaptive = run_arc(&t, n), ours = run_ours(&t, n);
        double optimum = run_ranking(&t, n, RANK_OPTIMUM);
        printf("%s,%" PRIu32 ",%" PRIu32 ",%" PRIu64 ",%" PRIu32 ",%.3f,%.3f,%.3f,%.3f,%.3f\n",
               t.name, variants, n, seed, requests, lru, lfu, adaptive, ours, optimum);
        double lead = ours - fmax(lru, fmax(lfu, adaptive));
        if (lead < worst) worst = lead;
        if (lead > best) best = lead;
        sum += lead;
        to_optimum += optimum - ours;
    }
    fprintf(stderr,
            "%-9s %5" PRIu32 " variants: lead over the best of the three %+6.2f (%+6.2f to "
            "%+6.2f) points, to the optimum %5.2f\n",
            t.name, variants, sum / count, worst, best, to_optimum / count);
    free(t.id);
    free(t.next);
}

static const char *text_after(const char *name, int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0) return argv[i + 1];
    return NULL;
}

static bool number_after(const char *name, int argc, char **argv, uint64_t *out) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0) {
            char *end = NULL;
            *out = strtoull(argv[i + 1], &end, 10);
            return *end == '\0' && *out > 0 && *out <= 100000000;
        }
    return true;
}

int main(int argc, char **argv) {
    static const uint32_t few[] = {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0};
    static const uint32_t some[] = {2, 4, 6, 8, 10, 14, 20, 28, 40, 56, 75, 90, 100, 0};
    static const uint32_t many[] = {2, 4, 8, 14, 28, 56, 112, 224, 448, 700, 1000, 0};
    uint64_t requests = 40000, seed = 1, seeds = 1;
    const char *only = text_after("--trace", argc, argv);
    if (!number_after("--requests", argc, argv, &requests) ||
        !number_after("--seed", argc, argv, &seed) ||
        !number_after("--seeds", argc, argv, &seeds)) {
        fprintf(stderr,
                "usage: cache_policy [--trace NAME] [--requests N] [--seed N] [--seeds N]\n");
        return 2;
    }
    printf("trace,variants,slots,seed,requests,lru,lfu,arc,ours,optimum\n");
    for (uint64_t s = seed; s < seed + seeds; s++)
        for (uint32_t kind = 0; kind < TRACE_COUNT; kind++) {
            if (only && strcmp(only, trace_names[kind]) != 0) continue;
            run_trace(kind, 14, few, (uint32_t)requests, s);
            run_trace(kind, 100, some, (uint32_t)requests, s);
            run_trace(kind, 1000, many, (uint32_t)requests, s);
        }
    return 0;
}
