/* gpu_loads.c - how fast deltas get into the device, as the server brings them there: from
 * page-locked host memory, from the page cache and from disk, each beside the plain copy or the
 * plain reads that it cannot be faster than; and what loads cost the variants that decode
 * meanwhile.
 *
 *   bench_gpu_loads [8b|small] [cuda|cpu] DISK MEMORY [--rounds 5] [--threads 8] [--depth 8]
 *       [--hot 5]
 *
 * DISK, MEMORY: folders for deltas of random bits, on a disk and on a tmpfs (which is page cache,
 * and takes O_DIRECT or refuses it as its kernel does). Made for the run, removed at its end; 8b: 4
 * and 2 of a gigabyte. Rounds alternate between the lanes, since disks and hosts shared with others
 * vary by the minute, and each lane begins in turn. CSV: lane,round,mb,seconds,gb_per_s, then
 * hot,round,what,steps,p50_us,p99_us,loads. The ratios that count go to stderr. */
#include <math.h>
#include <sys/mman.h>

#include <cuda_runtime_api.h>

#include "../tests/gpu/gpu_files.h"
#include "bitdelta/base/half.h"
#include "hot_lab.h"
#include "raw_read.h"

enum { ROUNDS_MAX = 50, DISK_DELTAS = 4, MEMORY_DELTAS = 2, HOT = HOT_MAX, BLOCK_BYTES = 4 << 20 };

typedef struct bench {
    bool large, cuda;
    uint64_t rounds, threads, depth, hot_rounds;
    const char *disk, *memory;
    char base[1100], dirs[DISK_DELTAS + MEMORY_DELTAS][1100];
    gpu_files_shape shape;
    bd_model *model;
    bd_delta deltas[DISK_DELTAS + MEMORY_DELTAS]; /* those in memory last */
    uint64_t bytes;                               /* of a delta's file */
    bd_loader *pread, *uring;
    bd_host_tier *tier;
    bd_load_host *copy; /* of deltas[DISK_DELTAS] */
    uint8_t *locked;    /* page-locked, one delta and the readers' blocks fit */
    void **pages;
    uint32_t page_count;
    cudaStream_t stream;
} bench;

static void die(const char *what, const char *why) {
    fprintf(stderr, "bench_gpu_loads: %s: %s\n", what, why);
    exit(1);
}

#define MUST(call)                                                                                 \
    do {                                                                                           \
        if ((call) != BD_OK) die(err.subject, err.message);                                        \
    } while (0)

/* ---- Weights that come from nowhere ---- */

#define NOISE (1u << 22)
static uint16_t *noise;
static const bd_backend_ops *real_ops;

/* The base is a file of holes; its matrices are rows cut from noise, seven values apart. */
static bd_status put_noise(bd_backend *backend, bd_weight_id id, const bd_weight_view *view,
                           bd_error *err) {
    bd_weight_view other = *view;
    if (view->rows > 1) {
        other.row_stride_bytes = 14;
        other.data = noise + (id.layer * 7919u + id.which * 104729u) % 65536u;
    } else {
        other.data = noise + NOISE; /* ones */
    }
    return real_ops->weight_put(backend, id, &other, err);
}

static const bd_backend_ops *noisy_ops(void) {
    static bd_backend_ops ops;
    real_ops = bd_backend_table(BD_BACKEND_CUDA);
    noise = malloc((NOISE + (1u << 16)) * sizeof *noise);
    if (!real_ops || !noise) die("cuda", "not in this build");
    uint64_t state = 7;
    for (uint32_t i = 0; i < NOISE; i++)
        noise[i] =
            bd_f32_to_bf16(((float)(gpu_files_next(&state) >> 40) * 0x1p-24f - 0.5f) * 0.06f);
    for (uint32_t i = 0; i < 1u << 16; i++)
        noise[NOISE + i] = 0x3f80;
    ops = *real_ops;
    ops.weight_put = put_noise;
    return &ops;
}

/* ---- Making it all ---- */

typedef struct maker {
    pthread_t thread;
    bench *b;
    uint32_t index;
} maker;

static void *make_delta(void *arg) {
    const maker *m = arg;
    char name[32];
    snprintf(name, sizeof name, "random-%u", m->index);
    gpu_files_delta(m->b->dirs[m->index], name, bd_model_fingerprint(m->b->model), &m->b->shape,
                    5e-4f, 1000 + m->index);
    return NULL;
}

static void make_files(bench *b) {
    maker makers[DISK_DELTAS + MEMORY_DELTAS];
    bd_error err = {0};
    const uint64_t from = bd_now_us();
    for (uint32_t i = 0; i < DISK_DELTAS + MEMORY_DELTAS; i++) {
        makers[i] = (maker){.b = b, .index = i};
        snprintf(b->dirs[i], sizeof b->dirs[i], "%s/bd-loads-delta-%u",
                 i < DISK_DELTAS ? b->disk : b->memory, i);
        if (pthread_create(&makers[i].thread, NULL, make_delta, &makers[i]) != 0)
            die("thread", strerror(errno));
    }
    for (uint32_t i = 0; i < DISK_DELTAS + MEMORY_DELTAS; i++) {
        pthread_join(makers[i].thread, NULL);
        MUST(bd_delta_open(b->dirs[i], &b->deltas[i], &err));
    }
    b->bytes = b->deltas[0].files[0].bytes;
    fprintf(stderr, "%u deltas of %.0f MB made in %.1f s\n", DISK_DELTAS + MEMORY_DELTAS,
            (double)b->bytes * 1e-6, (double)(bd_now_us() - from) * 1e-6);
}

static void open_model(bench *b) {
    bd_error err = {0};
    const uint64_t from = bd_now_us();
    snprintf(b->base, sizeof b->base, "%s/bd-loads-base", b->disk);
    gpu_files_base(b->base, &b->shape, true, 0);
    const bd_model_options options = {.dir = b->base,
                                      .ops = b->cuda ? noisy_ops() : bd_backend_cpu_ops(),
                                      .rows_max = 1024,
                                      .seqs_max = 16,
                                      .logits_rows_max = 16,
                                      .kv_block_tokens = 16,
                                      .kv_tokens = 16384,
                                      .rope_tables_max = 1,
                                      .max_model_len = 2048,
                                      .delta_slots = HOT + 1};
    MUST(bd_model_open(&options, &b->model, &err));
    fprintf(stderr, "model opened in %.1f s, %u pages of %.1f MB\n",
            (double)(bd_now_us() - from) * 1e-6, bd_model_page_count(b->model),
            (double)bd_model_page_bytes(b->model) * 1e-6);
}

static void *host_alloc(void *ctx, uint64_t bytes) {
    const bench *b = ctx;
    const bd_backend_ops *ops = bd_model_ops(b->model);
    if (ops->host_alloc) return ops->host_alloc(bd_model_backend(b->model), bytes);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void host_free(void *ctx, void *memory, uint64_t bytes) {
    const bench *b = ctx;
    const bd_backend_ops *ops = bd_model_ops(b->model);
    if (ops->host_free)
        ops->host_free(bd_model_backend(b->model), memory, bytes);
    else
        munmap(memory, bytes);
}

static bd_loader *open_loader(const bench *b, bd_io_choice io, void (*notify)(void *), void *ctx) {
    bd_error err = {0};
    bd_loader *loader = NULL;
    const bd_loader_options options = {.model = b->model,
                                       .io = io,
                                       .read_threads = (uint32_t)b->threads,
                                       .depth = (uint32_t)b->depth,
                                       .notify = notify,
                                       .notify_ctx = ctx};
    MUST(bd_loader_create(&options, &loader, &err));
    fprintf(stderr, "loader: %s %s\n", bd_loader_io_name(loader), bd_loader_io_reason(loader));
    return loader;
}

/* Pages from the arena's end, in falling order: an order that a copy cannot profit from. */
static void take_pages(bench *b) {
    uint8_t *arena = bd_model_ops(b->model)->delta_arena(bd_model_backend(b->model));
    b->page_count = bd_overlay_pages_for(b->model, &b->deltas[0]);
    b->pages = calloc(b->page_count, sizeof *b->pages);
    if (!b->pages || b->page_count > bd_model_page_count(b->model)) die("pages", "too few");
    for (uint32_t i = 0; i < b->page_count; i++)
        b->pages[i] =
            arena + (bd_model_page_count(b->model) - 1 - i) * bd_model_page_bytes(b->model);
}

static uint64_t locked_bytes(const bench *b) {
    const uint64_t blocks = b->threads * BLOCK_BYTES;
    return blocks > b->bytes ? blocks : b->bytes;
}

/* ---- Lanes: each brings one delta somewhere, and says how long that took ---- */

static double load(bench *b, bd_loader *loader, const bd_delta *delta, bd_load_host *host) {
    bd_error err = {0};
    bd_load l = {.delta = delta, .pages = b->pages, .page_count = b->page_count, .host = host};
    const uint64_t from = bd_now_us();
    MUST(bd_loader_submit(loader, &l, &err));
    while (!bd_load_finished(&l))
        lab_sleep_us(200);
    if (l.status != BD_OK) die(l.error.subject, l.error.message);
    bd_overlay_destroy(l.overlay);
    return (double)(l.finished_us - from) * 1e-6;
}

static void open_copy(bench *b) {
    bd_error err = {0};
    const uint64_t from = bd_now_us();
    const bd_host_options options = {
        .bytes = b->bytes + (64u << 20),
        .block_bytes = bd_host_block_bytes(bd_model_page_bytes(b->model), b->bytes),
        .memory = {.ctx = b, .alloc = host_alloc, .free = host_free}};
    MUST(bd_host_tier_create(&options, &b->tier, &err));
    while (bd_host_tier_total_bytes(b->tier) < b->bytes) {
        lab_sleep_us(1000);
        if (bd_now_us() - from > 60000000) die("host memory", "does not come");
    }
    fprintf(stderr, "host memory came in %.1f s\n", (double)(bd_now_us() - from) * 1e-6);
    b->copy = bd_host_tier_take(b->tier, b->bytes);
    if (!b->copy) die("host memory", "too little");
    (void)load(b, b->uring, &b->deltas[DISK_DELTAS], b->copy);
}

static double run_copy(bench *b, uint64_t round) {
    (void)round;
    uint8_t *to = bd_model_ops(b->model)->delta_arena(bd_model_backend(b->model));
    const uint64_t from = bd_now_us();
    if (!b->cuda) {
        memcpy(to, b->locked, b->bytes);
    } else if (cudaMemcpyAsync(to, b->locked, b->bytes, cudaMemcpyHostToDevice, b->stream) !=
                   cudaSuccess ||
               cudaStreamSynchronize(b->stream) != cudaSuccess) {
        die("copy", "CUDA");
    }
    return (double)(bd_now_us() - from) * 1e-6;
}

static double run_host(bench *b, uint64_t round) {
    (void)round;
    return load(b, b->uring, &b->deltas[DISK_DELTAS], b->copy);
}

static const bd_delta *in_memory(const bench *b, uint64_t round) {
    return &b->deltas[DISK_DELTAS + round % MEMORY_DELTAS];
}

/* Both that are compared get the same file in a round, and another in the next. */
static const bd_delta *on_disk(const bench *b, uint64_t round) {
    const bd_delta *delta = &b->deltas[round % DISK_DELTAS];
    char path[1400];
    snprintf(path, sizeof path, "%s/%s", delta->dir, delta->files[0].name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) die(path, strerror(errno));
    close(fd);
    return delta;
}

static int open_file(const bd_delta *delta, int flags) {
    char path[1400];
    snprintf(path, sizeof path, "%s/%s", delta->dir, delta->files[0].name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (fd < 0) die(path, strerror(errno));
    return fd;
}

typedef struct reader {
    pthread_t thread;
    uint8_t *to;
    _Atomic uint64_t *next;
    uint64_t bytes;
    int fd;
} reader;

static void *read_blocks(void *arg) {
    const reader *r = arg;
    for (;;) {
        const uint64_t at = atomic_fetch_add(r->next, BLOCK_BYTES);
        if (at >= r->bytes) return NULL;
        if (pread(r->fd, r->to, BLOCK_BYTES, (off_t)at) <= 0) die("read", strerror(errno));
    }
}

static double run_read_pages(bench *b, uint64_t round) {
    static reader readers[256];
    _Atomic uint64_t next = 0;
    const uint64_t from = bd_now_us();
    const int fd = open_file(in_memory(b, round), 0);
    for (uint64_t i = 0; i < b->threads; i++) {
        readers[i] =
            (reader){.to = b->locked + i * BLOCK_BYTES, .next = &next, .bytes = b->bytes, .fd = fd};
        if (pthread_create(&readers[i].thread, NULL, read_blocks, &readers[i]) != 0)
            die("thread", strerror(errno));
    }
    for (uint64_t i = 0; i < b->threads; i++)
        pthread_join(readers[i].thread, NULL);
    close(fd);
    return (double)(bd_now_us() - from) * 1e-6;
}

static double run_load_pages_pread(bench *b, uint64_t round) {
    return load(b, b->pread, in_memory(b, round), NULL);
}

static double run_load_pages_uring(bench *b, uint64_t round) {
    return load(b, b->uring, in_memory(b, round), NULL);
}

static double run_read_disk(bench *b, uint64_t round) {
    const bd_delta *delta = on_disk(b, round);
    char path[1400];
    snprintf(path, sizeof path, "%s/%s", delta->dir, delta->files[0].name);
    raw_reader raw;
    raw_read_open(&raw, b->depth);
    const uint64_t from = bd_now_us();
    raw_read(&raw, path, b->bytes);
    const double seconds = (double)(bd_now_us() - from) * 1e-6;
    raw_read_close(&raw);
    return seconds;
}

static double run_load_disk(bench *b, uint64_t round) {
    const bd_delta *delta = on_disk(b, round);
    return load(b, b->uring, delta, NULL);
}

/* ---- Rounds ---- */

enum { COPY, HOST, READ_PAGES, PAGES_PREAD, PAGES_URING, READ_DISK, DISK, LANES };

typedef struct lane {
    const char *name;
    double (*run)(bench *b, uint64_t round);
    double speed[ROUNDS_MAX]; /* bytes per second */
} lane;

static double median(const double *values, uint64_t count) {
    double sorted[ROUNDS_MAX];
    memcpy(sorted, values, count * sizeof *values);
    return hot_median(sorted, count);
}

/* The smaller of two limits, if there are two. */
static void show_ratio(const char *what, const lane *got, const lane *limit, const lane *other,
                       uint64_t rounds) {
    double ratios[ROUNDS_MAX];
    for (uint64_t i = 0; i < rounds; i++) {
        const double most = other ? fmin(limit->speed[i], other->speed[i]) : limit->speed[i];
        ratios[i] = got->speed[i] / most;
    }
    qsort(ratios, rounds, sizeof *ratios, hot_by_value);
    fprintf(stderr, "%-46s %.3f (%.3f to %.3f)\n", what, median(ratios, rounds), ratios[0],
            ratios[rounds - 1]);
}

static void run_lanes(bench *b) {
    static lane lanes[LANES] = {
        [COPY] = {.name = "copy", .run = run_copy},
        [HOST] = {.name = "host", .run = run_host},
        [READ_PAGES] = {.name = "read-pages", .run = run_read_pages},
        [PAGES_PREAD] = {.name = "pages-pread", .run = run_load_pages_pread},
        [PAGES_URING] = {.name = "pages-uring", .run = run_load_pages_uring},
        [READ_DISK] = {.name = "read-disk", .run = run_read_disk},
        [DISK] = {.name = "disk", .run = run_load_disk}};
    for (uint32_t i = 0; i < LANES; i++)
        (void)lanes[i].run(b, 0); /* code and memory are there afterwards */
    printf("lane,round,mb,seconds,gb_per_s\n");
    for (uint64_t round = 0; round < b->rounds; round++)
        for (uint32_t i = 0; i < LANES; i++) {
            lane *l = &lanes[(i + round) % LANES];
            const double seconds = l->run(b, round);
            l->speed[round] = (double)b->bytes / seconds;
            printf("%s,%" PRIu64 ",%.0f,%.4f,%.3f\n", l->name, round, (double)b->bytes * 1e-6,
                   seconds, l->speed[round] * 1e-9);
            fflush(stdout);
        }
    for (uint32_t i = 0; i < LANES; i++)
        fprintf(stderr, "%-12s %.2f GB/s\n", lanes[i].name,
                median(lanes[i].speed, b->rounds) * 1e-9);
    const lane *l = lanes;
    show_ratio("host memory / one copy", &l[HOST], &l[COPY], NULL, b->rounds);
    show_ratio("page cache, pread / the threads reading", &l[PAGES_PREAD], &l[READ_PAGES], NULL,
               b->rounds);
    show_ratio("page cache, io_uring / the threads reading", &l[PAGES_URING], &l[READ_PAGES], NULL,
               b->rounds);
    show_ratio("page cache, pread / lesser of reading, copy", &l[PAGES_PREAD], &l[READ_PAGES],
               &l[COPY], b->rounds);
    show_ratio("page cache, io_uring / lesser of the same", &l[PAGES_URING], &l[READ_PAGES],
               &l[COPY], b->rounds);
    show_ratio("disk / io_uring reading", &l[DISK], &l[READ_DISK], NULL, b->rounds);
}

/* ---- What hot variants feel ---- */

static void hot_variants(bench *b, const char *what, uint64_t host_bytes) {
    static hot_lab h = {.hot = HOT, .cold = 1};
    const char *dirs[HOT + 1];
    const bd_loader_options loader = {
        .model = b->model, .read_threads = (uint32_t)b->threads, .depth = (uint32_t)b->depth};
    for (uint32_t i = 0; i <= HOT; i++)
        dirs[i] = in_memory(b, i)->dir;
    hot_open(&h, loader, dirs, host_bytes);
    if (host_bytes) hot_wait_host(&h, host_bytes);
    if (host_bytes) hot_load_once(&h, HOT); /* the only one whose copy fits, since it comes first */
    const uint64_t begin = bd_now_us();
    const hot_result r = hot_rounds(&h, what, b->hot_rounds);
    fprintf(stderr,
            "%s: %u loads, host hits %.0f, %.1f s; between tokens P50 %.0f -> %.0f us, P99 %.0f -> "
            "%.0f us, ratio %.3f; median of %" PRIu64 " rounds' ratios %.3f\n",
            what, r.loads, host_bytes ? bd_metric_value(h.l.cache->metric_host_hits) : 0,
            (double)(bd_now_us() - begin) * 1e-6, r.p50_us[0], r.p50_us[1], r.p99_us[0],
            r.p99_us[1], r.p99_us[1] / r.p99_us[0], b->hot_rounds, r.p99_ratio);
    hot_close(&h);
}

/* ---- Main ---- */

static bool option(const char *name, uint64_t max, int argc, char **argv, uint64_t *out) {
    for (int i = 5; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], name) != 0) continue;
        char *end = NULL;
        *out = strtoull(argv[i + 1], &end, 10);
        return *end == '\0' && end != argv[i + 1] && *out >= 1 && *out <= max;
    }
    return true;
}

static void remove_files(const bench *b) {
    gpu_files_remove(b->base);
    for (uint32_t i = 0; i < DISK_DELTAS + MEMORY_DELTAS; i++)
        gpu_files_remove(b->dirs[i]);
}

int main(int argc, char **argv) {
    static bench b = {.rounds = 5, .threads = 8, .depth = 8, .hot_rounds = 5};
    const bool ok = argc >= 5 && argc % 2 == 1 &&
                    option("--rounds", ROUNDS_MAX, argc, argv, &b.rounds) &&
                    option("--threads", 256, argc, argv, &b.threads) &&
                    option("--depth", 1024, argc, argv, &b.depth) &&
                    option("--hot", ROUNDS_MAX, argc, argv, &b.hot_rounds);
    if (!ok) {
        fprintf(stderr, "usage: bench_gpu_loads 8b|small cuda|cpu DISK MEMORY [--rounds N] "
                        "[--threads N] [--depth N] [--hot N]\n");
        return 2;
    }
    b.large = strcmp(argv[1], "8b") == 0;
    b.cuda = strcmp(argv[2], "cuda") == 0;
    b.disk = argv[3], b.memory = argv[4];
    b.shape = b.large ? (gpu_files_shape){4096, 32, 32, 8, 128, 14336, 128256, false}
                      : (gpu_files_shape){512, 4, 8, 2, 64, 2048, 4096, false};
    open_model(&b);
    make_files(&b);
    take_pages(&b);
    if (b.cuda && cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking) != cudaSuccess)
        die("stream", "CUDA");
    b.locked = host_alloc(&b, locked_bytes(&b));
    if (!b.locked) die("host memory", "none");
    memset(b.locked, 1, locked_bytes(&b));
    b.pread = open_loader(&b, BD_IO_PREAD, NULL, NULL);
    b.uring = open_loader(&b, BD_IO_AUTO, NULL, NULL);
    open_copy(&b);
    run_lanes(&b);
    bd_loader_destroy(b.pread);
    bd_loader_destroy(b.uring);
    bd_host_tier_give(b.tier, b.copy);
    bd_host_tier_destroy(b.tier);
    printf("hot,round,what,steps,p50_us,p99_us,loads\n");
    hot_variants(&b, "loads from the page cache", 0);
    hot_variants(&b, "loads from host memory", b.bytes + (64u << 20));
    host_free(&b, b.locked, locked_bytes(&b));
    for (uint32_t i = 0; i < DISK_DELTAS + MEMORY_DELTAS; i++)
        bd_delta_close(&b.deltas[i]);
    bd_model_close(b.model);
    remove_files(&b);
    free(b.pages);
    free(noise);
    return 0;
}
