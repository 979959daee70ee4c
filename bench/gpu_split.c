/* gpu_split.c - a model and deltas from files, split over two ranks: as right as on one, as large
 * as planned, loaded as fast as the disk reads, and what loads cost those who decode meanwhile.
 *
 *   bench_gpu_split 8b|70b|small LAYERS cuda|cpu DIR [--deltas 6] [--rounds 5] [--hot 5]
 *       [--float32 1] [--loads 1] [--cached 1]
 *   bench_gpu_split 8b|70b|small LAYERS files DIR [--deltas 6]      writes the files, no more
 *
 * DIR: where the base and deltas of two shards are written, of random values (about 40 GB for 16
 * layers of 70b), and removed at the end; --cached 1: the base through the page cache, else past
 * it. Opened on two ranks, then on one, and with --float32 1 once more on the CPU, which computes
 * in float32. Sequences of the base and of two variants: a prompt, then tokens, the same for all.
 *
 * same,...: how far the logits of two ways of computing are from each other, by rows: relative L2,
 * mean and worst; largest difference of a log-probability of the first's ten best; rows whose best
 * token is the same; of others the largest gap between the two tokens, in float32's logits where
 * there are (else in one rank's) over the spread of the first two's difference: a near-tie is
 * within SPREADS. Held to, where float32 is there: two ranks are no further from it than RATIO
 * times what one is, since two roundings of parts in place of one of a sum are as large together;
 * and from one no further than APART times that, where what has roundings of its own on both sides
 * has sqrt(2). Without it: the mean distance of two ranks from one is within sqrt(10 layers) 2^-9,
 * ten roundings to bf16 a layer that know nothing of each other, an estimate that is printed beside
 * what was measured in any case. On the CPU, which computes in float32, 1e-5.
 *
 * load,...: both ranks at once; raw: a thread each that reads its shard with io_uring, O_DIRECT and
 * as many blocks in flight; in changing order. hot,...: see hot_lab.h. Exit status 77: fewer than
 * two GPUs. */
#include <cuda_runtime_api.h>
#include <errno.h>
#include <sys/stat.h>

#include "backend/cuda/cuda_internal.h"
#include "bitdelta/hf/checkpoint.h"
#include "gpu_split_files.h"
#include "hot_lab.h"
#include "loader/ranks.h"
#include "model/internal.h"
#include "raw_read.h"

enum { RANKS = 2, DELTAS_MAX = 12, VARIANTS = 2, ROUNDS_MAX = 50, DEPTH = 8 };
enum { SEQS = 6, PROMPT = 24, TAIL = 4, NEW = 9, ROWS = TAIL + NEW - 1, BLOCK = 16, PER_SEQ = 3 };

#define RATIO   1.25
#define APART   1.5
#define SPREADS 6.0

typedef struct answers {
    float *logits; /* [SEQS][ROWS][vocab]: of the prompt's last TAIL rows, then of single tokens */
    int32_t ids[SEQS][NEW];
} answers;

typedef struct reader {                        /* one rank's loader, or raw reads */
    _Atomic uint64_t bytes, first_us, last_us; /* when a read came back */
} reader;

typedef struct bench {
    uint64_t delta_count, rounds, hot_rounds, float32, loads, cached;
    bool cuda;
    const char *dir;
    char base[1000], dirs[DELTAS_MAX][1100];
    gpu_files_shape shape;
    bd_delta deltas[DELTAS_MAX];
    uint64_t base_bytes, delta_bytes;
    reader readers[RANKS];
    bool failed;
} bench;

static void die(const char *what, const char *why) {
    fprintf(stderr, "bench_gpu_split: %s: %s\n", what, why);
    exit(1);
}

#define MUST(call)                                                                                 \
    do {                                                                                           \
        if ((call) != BD_OK) die(err.subject, err.message);                                        \
    } while (0)

static double seconds_since(uint64_t from_us) {
    return (double)(bd_now_us() - from_us) * 1e-6;
}

/* ---- Files ---- */

static void forget_cached(const char *path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) die(path, strerror(errno));
    close(fd);
}

static void make_files(bench *b) {
    bd_checkpoint *checkpoint;
    char fingerprint[65];
    bd_error err = {0};
    split_make_noise();
    uint64_t from = bd_now_us();
    b->base_bytes = split_base(b->base, &b->shape, b->cached);
    fprintf(stderr, "base: %.1f GB written in %.1f s\n", (double)b->base_bytes * 1e-9,
            seconds_since(from));
    MUST(bd_checkpoint_open(b->base, &checkpoint, &err));
    MUST(bd_checkpoint_fingerprint(checkpoint, fingerprint, &err));
    bd_checkpoint_close(checkpoint);
    for (uint32_t i = 0; !b->cached && i <= b->shape.layers; i++) { /* of which a part was read */
        char path[1100];
        snprintf(path, sizeof path, "%s/model-%05u.safetensors", b->base, i);
        forget_cached(path);
    }
    from = bd_now_us();
    b->delta_bytes =
        split_deltas(b->dirs, (uint32_t)b->delta_count, fingerprint, &b->shape, RANKS, 8e-4f) /
        b->delta_count;
    fprintf(stderr, "%u deltas of %.2f GB in %u shards written in %.1f s\n",
            (uint32_t)b->delta_count, (double)b->delta_bytes * 1e-9, RANKS, seconds_since(from));
    free(split_noise), free(split_bits);
    for (uint32_t i = 0; i < b->delta_count; i++)
        MUST(bd_delta_open(b->dirs[i], &b->deltas[i], &err));
}

static void remove_files(const char *dir) {
    char command[1200];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command) != 0) fprintf(stderr, "%s is left\n", dir);
}

/* ---- Models ---- */

static uint64_t disk_bytes(void) { /* that this process has had read */
    char line[128];
    unsigned long long bytes = 0;
    FILE *io = fopen("/proc/self/io", "r");
    while (io && fgets(line, sizeof line, io))
        if (sscanf(line, "read_bytes: %llu", &bytes) == 1) break;
    if (io) fclose(io);
    return bytes;
}

static uint64_t device_free(uint32_t device) {
    size_t left = 0, all = 0;
    if (cudaSetDevice((int)device) != cudaSuccess || cudaMemGetInfo(&left, &all) != cudaSuccess)
        die("cudaMemGetInfo", "no answer");
    return left;
}

static bd_model *open_model(const bench *b, const bd_backend_ops *ops, uint32_t ranks,
                            uint32_t slots) {
    const bd_model_options options = {.dir = b->base,
                                      .ops = ops,
                                      .rank_count = ranks,
                                      .rows_max = 1024,
                                      .seqs_max = 16,
                                      .logits_rows_max = SEQS * TAIL,
                                      .kv_block_tokens = BLOCK,
                                      .kv_tokens = 16384,
                                      .rope_tables_max = 1,
                                      .max_model_len = 2048,
                                      .delta_slots = slots};
    const bool cuda = ops != bd_backend_cpu_ops();
    uint64_t before[RANKS] = {0};
    bd_model *model;
    bd_error err = {0};
    for (uint32_t r = 0; cuda && r < ranks; r++)
        before[r] = device_free(r);
    const uint64_t from = bd_now_us(), read = disk_bytes();
    MUST(bd_model_open(&options, &model, &err));
    printf("open,%s,%u ranks,%.1f s,%.2f GB of files,%.2f GB read from disk\n", ops->name, ranks,
           seconds_since(from), (double)b->base_bytes * 1e-9, (double)(disk_bytes() - read) * 1e-9);
    for (uint32_t r = 0; r < ranks; r++) {
        const bd_model *rank = bd_model_rank(model, r);
        const bd_memory_plan *p = bd_model_memory(rank);
        printf("memory,rank %u of %u,MiB planned %" PRIu64 " (weights %" PRIu64 ",deltas %" PRIu64
               ",KV %" PRIu64 ",workspace and logits %" PRIu64 ")",
               r, ranks, p->total >> 20, p->weights >> 20, p->deltas >> 20, p->kv >> 20,
               (p->workspace + p->logits) >> 20);
        if (cuda)
            printf(",in use %" PRIu64 ",beyond the plan %" PRId64 " where it leaves %" PRIu64,
                   (before[r] - device_free(r)) >> 20,
                   ((int64_t)(before[r] - device_free(r)) - (int64_t)p->total) / (1 << 20),
                   cuda_unplanned_bytes(&rank->backend_options) >> 20);
        printf("\n");
    }
    fflush(stdout);
    return model;
}

/* ---- Loaders that count what a rank reads ---- */

static int32_t count_read(void *ctx, uint64_t offset, uint32_t bytes, int32_t result) {
    reader *r = ctx;
    (void)offset, (void)bytes;
    if (result > 0) atomic_fetch_add(&r->bytes, (uint64_t)result);
    uint64_t none = 0;
    atomic_store(&r->last_us, bd_now_us());
    atomic_compare_exchange_strong(&r->first_us, &none, atomic_load(&r->last_us));
    return result;
}

static bench *counting; /* whose readers */

static bd_loader_source counted_source(void *ctx, uint32_t rank) {
    bd_loader_source source = bd_loader_source_of(bd_model_rank(ctx, rank));
    source.on_read = count_read;
    source.read_ctx = &counting->readers[rank];
    return source;
}

static void *page_on(void *ctx, uint32_t rank, void *page) {
    return bd_overlay_page_on(ctx, rank, page);
}

static bd_loader *open_loader(bench *b, bd_model *model) {
    const bd_loader_options options = {.model = model, .depth = DEPTH};
    const bd_ranks_source sources = {.source_of = counted_source,
                                     .page_on = page_on,
                                     .join = bd_overlay_join,
                                     .ctx = model,
                                     .count = bd_model_rank_count(model)};
    bd_loader_ranks *ranks;
    bd_loader *loader;
    bd_error err = {0};
    counting = b;
    if (bd_model_rank_count(model) == 1) {
        const bd_loader_source source = counted_source(model, 0);
        MUST(bd_loader_create_with(&options, &source, &loader, &err));
        return loader;
    }
    MUST(bd_loader_ranks_create(&options, &sources, &ranks, &err));
    MUST(bd_loader_wrap(ranks, &loader, &err));
    return loader;
}

/* Into the pages from number `first` on. Seconds; *overlay is the caller's; *from_us when it was
 * asked for. */
static double load_from(bd_model *model, bd_loader *loader, const bd_delta *delta, uint32_t first,
                        bd_overlay **overlay, uint64_t *from_us) {
    bd_error err = {0};
    const uint32_t count = bd_overlay_pages_for(model, delta);
    uint8_t *arena = bd_model_ops(model)->delta_arena(bd_model_backend(model));
    void **pages = calloc(count, sizeof *pages);
    if (!pages || first + count > bd_model_page_count(model)) die("pages", "too few");
    for (uint32_t i = 0; i < count; i++)
        pages[i] = arena + (uint64_t)(first + count - 1 - i) * bd_model_page_bytes(model);
    bd_load l = {.delta = delta, .pages = pages, .page_count = count};
    *from_us = bd_now_us();
    MUST(bd_loader_submit(loader, &l, &err));
    while (!bd_load_finished(&l))
        lab_sleep_us(200);
    if (l.status != BD_OK) die(l.error.subject, l.error.message);
    free(pages);
    *overlay = l.overlay;
    return (double)(l.finished_us - *from_us) * 1e-6;
}

static double load(bd_model *model, bd_loader *loader, const bd_delta *delta, uint32_t first,
                   bd_overlay **overlay) {
    uint64_t from_us;
    return load_from(model, loader, delta, first, overlay, &from_us);
}

/* ---- The same steps on each ---- */

static void run_step(bd_model *model, bd_overlay *const *overlays, uint64_t id, uint32_t rows,
                     uint32_t before, const int32_t *tokens, uint32_t tail, uint32_t first_row,
                     answers *to) {
    static uint32_t positions[SEQS * PROMPT], seq_of_row[SEQS * PROMPT], blocks[SEQS][PER_SEQ];
    static bd_token_result results[SEQS * TAIL];
    const bd_overlay *used[VARIANTS];
    bd_seq seqs[SEQS];
    bd_segment segments[1 + VARIANTS];
    bd_logits_row logits_rows[SEQS * TAIL];
    bd_error err = {0};
    const size_t width = bd_model_logits_width(model);
    for (uint32_t v = 0; v < VARIANTS; v++)
        used[v] = overlays[v];
    for (uint32_t s = 0; s < SEQS; s++) {
        for (uint32_t i = 0; i < PER_SEQ; i++)
            blocks[s][i] = (s * PER_SEQ + i) * 5 % (SEQS * PER_SEQ);
        seqs[s] = (bd_seq){.first_row = s * rows,
                           .row_count = rows,
                           .kv_before_tokens = before,
                           .kv_blocks = blocks[s],
                           .sampling.top_p = 1};
        for (uint32_t i = 0; i < rows; i++)
            positions[s * rows + i] = before + i, seq_of_row[s * rows + i] = s;
        for (uint32_t i = 0; i < tail; i++)
            logits_rows[s * tail + i] = (bd_logits_row){
                .row = (s + 1) * rows - tail + i, .seq = s, .target = i + 1 < tail ? 0 : -1};
    }
    const uint32_t each = SEQS / (1 + VARIANTS) * rows;
    for (uint32_t v = 0; v <= VARIANTS; v++)
        segments[v] = (bd_segment){(int32_t)v - 1, v * each, each};
    const bd_step step = {.id = id,
                          .row_count = SEQS * rows,
                          .seq_count = SEQS,
                          .segment_count = 1 + VARIANTS,
                          .overlay_count = VARIANTS,
                          .logits_row_count = SEQS * tail,
                          .tokens = tokens,
                          .positions = positions,
                          .seq_of_row = seq_of_row,
                          .seqs = seqs,
                          .segments = segments,
                          .overlays = used,
                          .logits_rows = logits_rows};
    MUST(bd_model_forward(model, &step, NULL, NULL, &err));
    MUST(bd_model_wait(model, &step, UINT64_MAX, results, &err));
    for (uint32_t s = 0; s < SEQS; s++)
        for (uint32_t i = 0; i < tail; i++) {
            float *row = to->logits + (s * ROWS + first_row + i) * width;
            MUST(bd_model_logits_get(model, s * tail + i, row, &err));
            if (first_row + i + 1 >= TAIL) /* from the prompt's last on they are new tokens */
                to->ids[s][first_row + i + 1 - TAIL] = results[s * tail + i].id;
        }
}

/* forced: whose tokens go on; NULL: its own. */
static void answer(bench *b, bd_model *model, const answers *forced, answers *to) {
    static int32_t prompt[SEQS * PROMPT];
    int32_t next[SEQS];
    bd_overlay *overlays[VARIANTS];
    uint64_t state = 7;
    const uint64_t from = bd_now_us();
    bd_loader *loader = open_loader(b, model);
    for (uint32_t v = 0; v < VARIANTS; v++)
        (void)load(model, loader, &b->deltas[v], v * bd_overlay_pages_for(model, &b->deltas[v]),
                   &overlays[v]);
    to->logits = malloc((size_t)SEQS * ROWS * bd_model_logits_width(model) * sizeof(float));
    if (!to->logits) die("logits", "no memory");
    for (uint32_t i = 0; i < SEQS * PROMPT; i++)
        prompt[i] = (int32_t)(gpu_files_next(&state) % b->shape.vocab);
    run_step(model, overlays, 1, PROMPT, 0, prompt, TAIL, 0, to);
    for (uint32_t i = 0; i + 1 < NEW; i++) {
        for (uint32_t s = 0; s < SEQS; s++)
            next[s] = (forced ? forced : to)->ids[s][i];
        run_step(model, overlays, 2 + i, 1, PROMPT + i, next, 1, TAIL + i, to);
    }
    for (uint32_t v = 0; v < VARIANTS; v++)
        bd_overlay_destroy(overlays[v]);
    bd_loader_destroy(loader);
    fprintf(stderr, "two deltas loaded and %u steps in %.1f s\n", NEW, seconds_since(from));
}

/* ---- How far apart ---- */

typedef struct distance {
    double l2, l2_worst, top10_worst,
        spread;          /* spread: of a logit's difference, largest of a row */
    double margin_worst; /* of rows whose best token differs, in spreads */
    uint32_t rows, same;
} distance;

static double worse(double a, double b) { /* NaN is the worst */
    return isnan(a) || b <= a ? a : b;
}

static uint32_t best_of(const float *row, uint32_t vocab) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < vocab; i++)
        if (row[i] > row[best]) best = i;
    return best;
}

static double log_sum(const float *row, uint32_t vocab) {
    const double most = (double)row[best_of(row, vocab)];
    double sum = 0;
    for (uint32_t i = 0; i < vocab; i++)
        sum += exp((double)row[i] - most);
    return most + log(sum);
}

static double top10_difference(const float *a, const float *b, uint32_t vocab) {
    const double a_sum = log_sum(a, vocab), b_sum = log_sum(b, vocab);
    double worst = 0;
    uint32_t top[10], count = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        uint32_t at = count < 10 ? count++ : 10;
        if (at == 10 && !(a[i] > a[top[9]])) continue;
        if (at == 10) at = 9;
        for (; at > 0 && a[i] > a[top[at - 1]]; at--)
            top[at] = top[at - 1];
        top[at] = i;
    }
    for (uint32_t k = 0; k < count; k++)
        worst = worse(worst, fabs(((double)b[top[k]] - b_sum) - ((double)a[top[k]] - a_sum)));
    return worst;
}

static void add_row(distance *d, const float *a, const float *b, const float *judge,
                    uint32_t vocab) {
    double difference = 0, norm = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        difference += ((double)b[i] - (double)a[i]) * ((double)b[i] - (double)a[i]);
        norm += (double)a[i] * (double)a[i];
    }
    const double l2 = sqrt(difference / norm), spread = sqrt(difference / vocab);
    const uint32_t a_best = best_of(a, vocab), b_best = best_of(b, vocab);
    d->rows++;
    d->l2 += l2;
    d->l2_worst = worse(d->l2_worst, l2);
    d->spread = worse(d->spread, spread);
    d->top10_worst = worse(d->top10_worst, top10_difference(a, b, vocab));
    if (a_best == b_best) {
        d->same++;
        return;
    }
    const double margin = fabs((double)judge[a_best] - (double)judge[b_best]);
    d->margin_worst = worse(d->margin_worst, margin / spread);
}

/* Rows of the base or of variants, of the prompt or of single tokens. */
static distance apart(const bench *b, const answers *x, const answers *y, const answers *judge,
                      bool variants, bool decode) {
    distance d = {0};
    const uint32_t vocab = b->shape.vocab, base = SEQS / (1 + VARIANTS);
    for (uint32_t s = variants ? base : 0; s < (variants ? SEQS : base); s++)
        for (uint32_t i = decode ? TAIL : 0; i < (decode ? ROWS : TAIL); i++) {
            const size_t at = (size_t)(s * ROWS + i) * vocab;
            add_row(&d, x->logits + at, y->logits + at, judge->logits + at, vocab);
        }
    d.l2 /= d.rows;
    return d;
}

static void print_distance(const char *pair, bool variants, bool decode, const distance *d) {
    printf("same,%s,%s,%s,%u,%.3e,%.3e,%.4f,%u,%.2f\n", pair, variants ? "variants" : "base",
           decode ? "decode" : "prefill", d->rows, d->l2, d->l2_worst, d->top10_worst, d->same,
           d->margin_worst);
}

static void judge(bench *b, const char *what, bool right) {
    printf("# %s: %s\n", what, right ? "held" : "NOT HELD");
    b->failed = b->failed || !right;
}

static void compare(bench *b, const answers *one, const answers *two, const answers *exact) {
    double ratio = 0, of_one = 0, margin = 0, l2 = 0;
    printf("same,pair,of,what,rows,l2_mean,l2_worst,top10_worst,same_best,gap_in_spreads\n");
    for (int group = 0; group < 4; group++) {
        const bool variants = group / 2, decode = group % 2;
        const distance d = apart(b, one, two, exact ? exact : one, variants, decode);
        print_distance("one-two", variants, decode, &d);
        margin = worse(margin, d.margin_worst);
        l2 = worse(l2, d.l2);
        if (!exact) continue;
        const distance e1 = apart(b, exact, one, exact, variants, decode),
                       e2 = apart(b, exact, two, exact, variants, decode);
        print_distance("float32-one", variants, decode, &e1);
        print_distance("float32-two", variants, decode, &e2);
        ratio = worse(ratio, e2.l2 / e1.l2);
        of_one = worse(of_one, d.l2 / e1.l2);
    }
    const double bound = b->cuda ? sqrt(10.0 * b->shape.layers) * 0x1p-9 : 1e-5;
    printf("# mean distance of two ranks from one at most %.2e, %s %.2e\n", l2,
           b->cuda ? "ten roundings a layer" : "bound", bound);
    if (!b->cuda || !exact) judge(b, "two ranks and one are within roundings", l2 <= bound);
    if (b->cuda && exact) {
        printf("# two's distance from float32 at most %.3f of one's, two's from one %.3f\n", ratio,
               of_one);
        judge(b, "two ranks are as near float32 as one", ratio <= RATIO && of_one <= APART);
    }
    judge(b, "other best tokens are near-ties", margin <= SPREADS);
}

/* ---- Loads ---- */

static char *shard_path(const bench *b, uint32_t delta, uint32_t rank, char *out, size_t bytes) {
    snprintf(out, bytes, "%s/%s", b->deltas[delta].dir, b->deltas[delta].files[rank].name);
    return out;
}

static void drop_cache(const bench *b, uint32_t delta) {
    char path[1300];
    for (uint32_t r = 0; r < RANKS; r++)
        forget_cached(shard_path(b, delta, r, path, sizeof path));
}

typedef struct raw {
    pthread_t thread;
    raw_reader reader;
    char path[1300];
    uint64_t bytes;
} raw;

static void *raw_main(void *arg) {
    raw *r = arg;
    raw_read(&r->reader, r->path, r->bytes);
    return NULL;
}

static double read_both(const bench *b, uint32_t delta) {
    raw raws[RANKS];
    for (uint32_t r = 0; r < RANKS; r++) {
        shard_path(b, delta, r, raws[r].path, sizeof raws[r].path);
        raws[r].bytes = b->deltas[delta].files[r].bytes;
        raw_read_open(&raws[r].reader, DEPTH);
    }
    const uint64_t from = bd_now_us();
    for (uint32_t r = 0; r < RANKS; r++)
        if (pthread_create(&raws[r].thread, NULL, raw_main, &raws[r]) != 0) die("thread", "none");
    for (uint32_t r = 0; r < RANKS; r++)
        pthread_join(raws[r].thread, NULL);
    const double seconds = seconds_since(from);
    for (uint32_t r = 0; r < RANKS; r++)
        raw_read_close(&raws[r].reader);
    return seconds;
}

/* What the rank keeps of the delta. */
static uint64_t kept_bytes(bd_model *rank, const bd_delta *delta) {
    bd_overlay_plan plan;
    bd_error err = {0};
    uint64_t bytes = 0;
    MUST(bd_overlay_plan_create(rank, delta, &plan, &err));
    for (uint32_t i = 0; i < plan.piece_count; i++)
        bytes += plan.pieces[i].bytes;
    bd_overlay_plan_destroy(&plan);
    return bytes;
}

static void check_reads(bench *b, bd_model *model, bd_loader *loader) {
    const uint64_t tensor = (uint64_t)b->shape.vocab * b->shape.hidden / 8;
    bd_overlay *overlay;
    bool right = true;
    for (uint32_t r = 0; r < RANKS; r++)
        atomic_store(&b->readers[r].bytes, 0);
    (void)load(model, loader, &b->deltas[0], 0, &overlay);
    bd_overlay_destroy(overlay);
    for (uint32_t r = 0; r < RANKS; r++) {
        const uint64_t read = atomic_load(&b->readers[r].bytes),
                       kept = kept_bytes(bd_model_rank(model, r), &b->deltas[0]);
        printf("# rank %u read %.1f MB of a delta of %.1f MB and keeps %.1f MB\n", r,
               (double)read * 1e-6, (double)b->delta_bytes * 1e-6, (double)kept * 1e-6);
        right = right && read <= kept + tensor;
    }
    judge(b, "no rank reads more than it keeps and a tensor", right);
}

/* A line more of a load: when the ranks' first and last reads had come back, and its end. */
static double cold_load(bench *b, bd_model *model, bd_loader *loader, const bd_delta *delta) {
    bd_overlay *overlay;
    uint64_t from, first[RANKS], last[RANKS];
    for (uint32_t r = 0; r < RANKS; r++)
        atomic_store(&b->readers[r].first_us, 0);
    const double took = load_from(model, loader, delta, 0, &overlay, &from);
    bd_overlay_destroy(overlay);
    for (uint32_t r = 0; r < RANKS; r++) {
        first[r] = atomic_load(&b->readers[r].first_us) - from;
        last[r] = atomic_load(&b->readers[r].last_us) - from;
    }
    printf("ends,ms,first reads,%.1f,%.1f,last reads,%.1f,%.1f,load,%.1f\n",
           (double)first[0] * 1e-3, (double)first[1] * 1e-3, (double)last[0] * 1e-3,
           (double)last[1] * 1e-3, took * 1e3);
    return took;
}

static void cold_loads(bench *b, bd_model *model) {
    double ratios[ROUNDS_MAX], speeds[2][ROUNDS_MAX];
    bd_loader *loader = open_loader(b, model);
    fprintf(stderr, "loader: %s %s\n", bd_loader_io_name(loader), bd_loader_io_reason(loader));
    check_reads(b, model, loader);
    (void)read_both(b, 0);
    printf("load,round,what,mb,seconds,gb_per_s\n");
    for (uint32_t round = 0; round < b->rounds; round++) {
        const uint32_t delta = round % (uint32_t)b->delta_count;
        for (uint32_t i = 0; i < 2; i++) {
            const bool loads = (i + round) % 2;
            drop_cache(b, delta);
            const double took =
                loads ? cold_load(b, model, loader, &b->deltas[delta]) : read_both(b, delta);
            speeds[loads][round] = (double)b->delta_bytes / took * 1e-9;
            printf("load,%u,%s,%.0f,%.4f,%.3f\n", round, loads ? "load" : "raw",
                   (double)b->delta_bytes * 1e-6, took, speeds[loads][round]);
            fflush(stdout);
        }
        ratios[round] = speeds[1][round] / speeds[0][round];
    }
    const double middle = hot_median(ratios, b->rounds);
    printf("# cold load by two ranks at once %.2f GB/s, raw %.2f GB/s, ratio %.3f (%.3f to %.3f)\n",
           hot_median(speeds[1], b->rounds), hot_median(speeds[0], b->rounds), middle, ratios[0],
           ratios[b->rounds - 1]);
    bd_loader_destroy(loader);
}

/* host_bytes 0: from disk; else the two cold ones come first, so that their copies have the room.
 */
static void hot_loads(bench *b, bd_model *model, const char *what, uint64_t host_bytes) {
    static hot_lab h = {.hot = 4, .cold = 2};
    const char *dirs[HOT_MAX];
    if (b->delta_count < h.hot + h.cold) die("--deltas", "residents and two more are wanted");
    for (uint32_t i = 0; i < h.hot + h.cold; i++)
        dirs[i] = b->deltas[i].dir;
    hot_open(&h, (bd_loader_options){.model = model, .depth = DEPTH}, dirs, host_bytes);
    if (host_bytes) hot_wait_host(&h, host_bytes);
    for (uint32_t i = 0; host_bytes && i < h.cold; i++)
        hot_load_once(&h, h.hot + i);
    h.load_count = 0;
    printf("hot,round,what,steps,p50_us,p99_us,loads\n");
    const hot_result r = hot_rounds(&h, what, b->hot_rounds);
    const double load_us = hot_median(h.load_us, h.load_count);
    printf("# %s: %.3f s, %.2f GB/s, %" PRIu64 " of %u from host memory\n", what, load_us * 1e-6,
           (double)b->delta_bytes / load_us * 1e-3,
           host_bytes ? lab_info(&h.l, h.hot).host_hits + lab_info(&h.l, h.hot + 1).host_hits : 0,
           r.loads);
    printf("# %u residents, %u loads beside them: between tokens P50 %.0f -> %.0f us, rounds' "
           "ratios %.3f (worst %.3f); P99 %.0f -> %.0f us, %.3f (worst %.3f)\n",
           h.hot, r.loads, r.p50_us[0], r.p50_us[1], r.p50_ratio, r.p50_worst, r.p99_us[0],
           r.p99_us[1], r.p99_ratio, r.p99_worst);
    hot_close(&h);
}

/* ---- Main ---- */

static bool option(const char *name, uint64_t max, int argc, char **argv, uint64_t *out) {
    for (int i = 5; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], name) != 0) continue;
        char *end = NULL;
        *out = strtoull(argv[i + 1], &end, 10);
        return *end == '\0' && end != argv[i + 1] && *out <= max;
    }
    return true;
}

static bool shape_from(bench *b, const char *name, const char *layers) {
    static const struct {
        const char *name;
        gpu_files_shape shape;
    } shapes[] = {{"small", {512, 4, 8, 2, 64, 2048, 4096, false}},
                  {"8b", {4096, 32, 32, 8, 128, 14336, 128256, false}},
                  {"70b", {8192, 80, 64, 8, 128, 28672, 128256, false}}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (strcmp(name, shapes[i].name) != 0) continue;
        b->shape = shapes[i].shape;
        const int wanted = atoi(layers);
        if (wanted < 1 || (uint32_t)wanted > b->shape.layers) return false;
        b->shape.layers = (uint32_t)wanted;
        return true;
    }
    return false;
}

static void run(bench *b) {
    const bd_backend_ops *ops = b->cuda ? bd_backend_table(BD_BACKEND_CUDA) : bd_backend_cpu_ops();
    const uint32_t slots = b->loads ? 5 : VARIANTS;
    answers one, two, exact;
    bd_model *model = open_model(b, ops, RANKS, slots);
    answer(b, model, NULL, &two);
    if (b->loads && b->rounds) cold_loads(b, model);
    if (b->loads && b->hot_rounds) {
        hot_loads(b, model, "loads from disk", 0);
        hot_loads(b, model, "loads from host memory", 2 * (b->delta_bytes + (16u << 20)));
    }
    bd_model_close(model);
    model = open_model(b, ops, 1, VARIANTS);
    answer(b, model, &two, &one);
    bd_model_close(model);
    if (b->float32) {
        model = open_model(b, bd_backend_cpu_ops(), 1, VARIANTS);
        answer(b, model, &two, &exact);
        bd_model_close(model);
    }
    compare(b, &one, &two, b->float32 ? &exact : NULL);
    free(one.logits), free(two.logits);
    if (b->float32) free(exact.logits);
}

/* DIR/base and DIR/deltas/variant-N, to stay: for a server. */
static int files_alone(bench *b, const char *dir) {
    char deltas[1100];
    snprintf(b->base, sizeof b->base, "%s/base", dir);
    snprintf(deltas, sizeof deltas, "%s/deltas", dir);
    if (mkdir(deltas, 0777) != 0) die(deltas, strerror(errno));
    for (uint32_t i = 0; i < b->delta_count; i++)
        snprintf(b->dirs[i], sizeof b->dirs[i], "%s/deltas/variant-%u", dir, i);
    make_files(b);
    for (uint32_t i = 0; i < b->delta_count; i++)
        bd_delta_close(&b->deltas[i]);
    return 0;
}

int main(int argc, char **argv) {
    static bench b = {.delta_count = 6, .rounds = 5, .hot_rounds = 5};
    int devices = 0;
    const bool right = argc >= 5 && argc % 2 == 1 && shape_from(&b, argv[1], argv[2]) &&
                       option("--deltas", DELTAS_MAX, argc, argv, &b.delta_count) &&
                       option("--rounds", ROUNDS_MAX, argc, argv, &b.rounds) &&
                       option("--hot", ROUNDS_MAX, argc, argv, &b.hot_rounds) &&
                       option("--float32", 1, argc, argv, &b.float32) &&
                       option("--loads", 1, argc, argv, &b.loads) &&
                       option("--cached", 1, argc, argv, &b.cached);
    setvbuf(stdout, NULL, _IOLBF, 0); /* a run that is stopped has said what it knows */
    if (!right || b.delta_count < VARIANTS) {
        fprintf(stderr,
                "usage: bench_gpu_split 8b|70b|small LAYERS cuda|cpu|files DIR [--deltas N] "
                "[--rounds N] [--hot N] [--float32 1] [--loads 1] [--cached 1]\n");
        return 2;
    }
    b.cuda = strcmp(argv[3], "cuda") == 0;
    if (b.cuda && (cudaGetDeviceCount(&devices) != cudaSuccess || devices < RANKS)) {
        fprintf(stderr, "skipped: fewer than two GPUs\n");
        return 77;
    }
    if (strcmp(argv[3], "files") == 0) return files_alone(&b, argv[4]);
    snprintf(b.base, sizeof b.base, "%s/bd-split-base", argv[4]);
    for (uint32_t i = 0; i < b.delta_count; i++)
        snprintf(b.dirs[i], sizeof b.dirs[i], "%s/bd-split-delta-%u", argv[4], i);
    make_files(&b);
    run(&b);
    for (uint32_t i = 0; i < b.delta_count; i++) {
        bd_delta_close(&b.deltas[i]);
        remove_files(b.dirs[i]);
    }
    remove_files(b.base);
    return b.failed ? 1 : 0;
}
