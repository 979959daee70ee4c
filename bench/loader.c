/* loader.c - how fast the loader brings a large file into memory, against plain reading loops of
 * the same shape that check and keep nothing. Rounds alternate between the readers, because disks
 * shared with others vary by the minute.
 *
 *   bench_loader FILE [--mib 4096] [--rounds 5] [--depth 8] [--block-mib 4] [--threads 8]
 *       [--copy 1] [--fio 1] [--first-round 0]
 *
 * FILE is written with random bytes first unless it has the size already; its sums are kept in
 * FILE.sums. Readers: fio (io_uring, same block and depth; --fio 1), raw-uring (one ring,
 * registered buffers) and raw-pread (threads; without --fio), uring and pread (the loader: chunk
 * sums checked, bytes copied to pages by whoever read them, or with --copy 0 fed in order and taken
 * from where they are, as by a device). All of them use O_DIRECT where the file system has it; a
 * FILE on a tmpfs is page cache, which the loader copies and sums with half as many threads again.
 * Memory is in huge pages, but fio's. CSV: reader,round,mib,seconds,gb_per_s,cpu_s; medians go to
 * stderr, and those of the rounds' ratios to raw-pread. bench/loader.sh runs it against fio. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <liburing.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "bitdelta/base/clock.h"
#include "loader/loader_internal.h"
#include "raw_read.h"

#define PAGE_BYTES (2u << 20)
#define PAGES_REAL 64u /* the rest are these again: memory for the whole file is not wanted */

typedef struct bench {
    const char *path;
    uint64_t mib, rounds, depth, block_mib, threads, copy, fio, first_round;
    uint64_t bytes, block_bytes;
    bd_delta delta;
    bd_delta_file file;
    uint64_t *sums;
    uint8_t *memory;       /* of the pages */
    uint8_t *staging;      /* of the plain loops */
    bd_loader *loaders[3]; /* by bd_io_choice */
    void **pages;
    uint32_t page_count;
} bench;

static void die(const char *what) {
    fprintf(stderr, "bench_loader: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- the file ---- */

static void fill_random(uint64_t *words, size_t count, uint64_t *state) {
    for (size_t i = 0; i < count; i++) {
        uint64_t z = (*state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        words[i] = z ^ (z >> 27);
    }
}

static void write_file(const bench *b) {
    uint64_t *chunk = malloc(BD_DELTA_CHUNK_BYTES);
    int fd = open(b->path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    if (!chunk || fd < 0) die(b->path);
    uint64_t state = 1;
    for (uint64_t at = 0; at < b->bytes; at += BD_DELTA_CHUNK_BYTES) {
        fill_random(chunk, BD_DELTA_CHUNK_BYTES / 8, &state);
        if (write(fd, chunk, BD_DELTA_CHUNK_BYTES) != BD_DELTA_CHUNK_BYTES) die(b->path);
    }
    if (fsync(fd) != 0) die(b->path);
    close(fd);
    free(chunk);
}

/* O_DIRECT, so that no reader finds a file of a disk in the page cache. */
static int open_direct(const bench *b) {
    int fd = open(b->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == EINVAL) fd = open(b->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) die(b->path);
    return fd;
}

static void sum_file(bench *b) {
    void *chunk = NULL;
    int fd = open_direct(b);
    if (!b->sums || posix_memalign(&chunk, 4096, BD_DELTA_CHUNK_BYTES) != 0) die(b->path);
    for (uint32_t i = 0; i < b->file.chunk_count; i++) {
        if (read(fd, chunk, BD_DELTA_CHUNK_BYTES) != BD_DELTA_CHUNK_BYTES) die(b->path);
        b->sums[i] = XXH3_64bits(chunk, BD_DELTA_CHUNK_BYTES);
    }
    close(fd);
    free(chunk);
}

/* Sums of an earlier run spare reading it all. */
static bool sums_kept(bench *b, const char *path) {
    b->file.chunk_count = (uint32_t)(b->bytes / BD_DELTA_CHUNK_BYTES);
    b->sums = calloc(b->file.chunk_count, sizeof *b->sums);
    FILE *file = fopen(path, "rb");
    if (!b->sums) die("sums");
    if (!file) return false;
    bool all = fread(b->sums, sizeof *b->sums, b->file.chunk_count, file) == b->file.chunk_count &&
               fgetc(file) == EOF;
    fclose(file);
    return all;
}

static void keep_sums(const bench *b, const char *path) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(b->sums, sizeof *b->sums, b->file.chunk_count, file) != b->file.chunk_count)
        die(path);
    fclose(file);
}

static void make_delta(bench *b) {
    struct stat st;
    char sums[4096];
    snprintf(sums, sizeof sums, "%s.sums", b->path);
    bool old = stat(b->path, &st) == 0 && (uint64_t)st.st_size == b->bytes;
    if (!old) write_file(b);
    if (!sums_kept(b, sums) || !old) {
        sum_file(b);
        keep_sums(b, sums);
    }
    const char *slash = strrchr(b->path, '/');
    snprintf(b->delta.dir, sizeof b->delta.dir, "%.*s", slash ? (int)(slash - b->path) : 1,
             slash ? b->path : ".");
    snprintf(b->delta.variant, sizeof b->delta.variant, "bench");
    b->file.name = slash ? slash + 1 : b->path;
    b->file.bytes = b->bytes;
    b->file.chunk_bytes = BD_DELTA_CHUNK_BYTES;
    b->file.chunk_xxh3 = b->sums;
    b->delta.files = &b->file;
    b->delta.shard_count = 1;
    b->page_count = (uint32_t)(b->bytes / PAGE_BYTES);
    b->pages = calloc(b->page_count, sizeof(void *));
    b->memory = mmap(NULL, PAGES_REAL * PAGE_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (!b->pages || b->memory == MAP_FAILED) die("memory for the pages");
    for (uint32_t i = 0; i < b->page_count; i++)
        b->pages[i] = b->memory + (size_t)(i % PAGES_REAL) * PAGE_BYTES;
}

/* ---- the loader, over a plan that copies ---- */

struct bd_overlay_feed {
    void *const *pages;
    _Atomic uint64_t fed;
    uint64_t bytes;
};

static bd_status plan_create(void *ctx, const bd_delta *delta, bd_overlay_plan *out,
                             bd_error *err) {
    bd_overlay_piece *piece = calloc(1, sizeof *piece);
    (void)ctx;
    if (!piece) return bd_fail(err, BD_E_MEMORY, "plan", "out of memory");
    piece->bytes = delta->files[0].bytes;
    *out = (bd_overlay_plan){.page_count = (uint32_t)(piece->bytes / PAGE_BYTES),
                             .piece_count = 1,
                             .ready_count = 1,
                             .pieces = piece,
                             .storage = piece};
    return BD_OK;
}

static void plan_destroy(bd_overlay_plan *plan) {
    free(plan->storage);
}

static bd_status overlay_create(void *ctx, const bd_delta *delta, const bd_overlay_plan *plan,
                                void *const *pages, bd_overlay **out, bd_error *err) {
    (void)ctx, (void)delta, (void)plan, (void)pages;
    *out = calloc(1, sizeof **out);
    return *out ? BD_OK : bd_fail(err, BD_E_MEMORY, "overlay", "out of memory");
}

static void overlay_destroy(bd_overlay *overlay) {
    free(overlay);
}

static bd_status feed_create(void *ctx, const bd_overlay_plan *plan, void *const *pages,
                             bd_overlay_feed **out, bd_error *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) return bd_fail(err, BD_E_MEMORY, "feed", "out of memory");
    (*out)->pages = ctx ? pages : NULL;
    (*out)->bytes = plan->pieces[0].bytes;
    return BD_OK;
}

static bd_status feed_bytes(bd_overlay_feed *feed, uint32_t file_index, uint64_t from,
                            const uint8_t *data, uint64_t bytes, bd_error *err) {
    (void)file_index, (void)err;
    for (uint64_t done = 0; feed->pages && done < bytes;) {
        uint64_t at = (from + done) % PAGE_BYTES, part = PAGE_BYTES - at;
        if (part > bytes - done) part = bytes - done;
        memcpy((uint8_t *)feed->pages[(from + done) / PAGE_BYTES] + at, data + done, part);
        done += part;
    }
    feed->fed += bytes;
    return BD_OK;
}

static uint32_t feed_ready(const bd_overlay_feed *feed) {
    return atomic_load(&((bd_overlay_feed *)(uintptr_t)feed)->fed) == feed->bytes;
}

static void feed_destroy(bd_overlay_feed *feed) {
    free(feed);
}

static bd_status verify_file(const bd_delta *delta, uint32_t file_index, bd_error *err) {
    return bd_fail(err, BD_E_UNSUPPORTED, delta->files[file_index].name, "blocks under 4 MiB");
}

/* Made once, as a server's is. */
static void open_loader(bench *b, bd_io_choice io) {
    const bd_loader_source source = {.ctx = b->copy ? b : NULL,
                                     .feeds_anywhere = b->copy,
                                     .plan_create = plan_create,
                                     .plan_destroy = plan_destroy,
                                     .overlay_create = overlay_create,
                                     .overlay_destroy = overlay_destroy,
                                     .feed_create = feed_create,
                                     .feed_bytes = feed_bytes,
                                     .feed_ready = feed_ready,
                                     .feed_destroy = feed_destroy,
                                     .check_chunk = bd_delta_check_chunk,
                                     .verify_file = verify_file};
    const bd_loader_options options = {.io = io,
                                       .read_threads = (uint32_t)b->threads,
                                       .block_bytes = (uint32_t)b->block_bytes,
                                       .depth = (uint32_t)b->depth,
                                       .loads_in_parallel = 1};
    bd_error err = {0};
    if (bd_loader_create_with(&options, &source, &b->loaders[io], &err) != BD_OK) {
        fprintf(stderr, "bench_loader: %s: %s\n", err.subject, err.message);
        exit(1);
    }
}

static void load_with(bench *b, bd_io_choice io) {
    bd_error err = {0};
    bd_load load = {.delta = &b->delta, .pages = b->pages, .page_count = b->page_count};
    if (bd_loader_submit(b->loaders[io], &load, &err) != BD_OK) {
        fprintf(stderr, "bench_loader: %s: %s\n", err.subject, err.message);
        exit(1);
    }
    while (!bd_load_finished(&load))
        usleep(200);
    if (load.status != BD_OK) {
        fprintf(stderr, "bench_loader: %s: %s\n", load.error.subject, load.error.message);
        exit(1);
    }
    overlay_destroy(load.overlay);
}

static void read_uring(bench *b) {
    load_with(b, BD_IO_URING);
}

static void read_pread(bench *b) {
    load_with(b, BD_IO_PREAD);
}

/* ---- plain loops ---- */

static void raw_uring(bench *b) {
    int fd = open_direct(b);
    uint8_t *staging = b->staging;
    struct io_uring ring;
    const struct iovec whole = {staging, b->depth * b->block_bytes};
    errno = -io_uring_queue_init((unsigned)b->depth, &ring, 0);
    if (errno) die("io_uring");
    bool fixed = io_uring_register_buffers(&ring, &whole, 1) == 0;
    uint64_t sent = 0, done = 0, slot_free = b->depth;
    uint64_t slots[1024];
    for (uint64_t i = 0; i < b->depth; i++)
        slots[i] = i;
    while (done < b->bytes) {
        for (; slot_free > 0 && sent < b->bytes; sent += b->block_bytes) {
            struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
            uint64_t slot = slots[--slot_free];
            uint8_t *to = staging + slot * b->block_bytes;
            if (fixed)
                io_uring_prep_read_fixed(sqe, fd, to, (unsigned)b->block_bytes, sent, 0);
            else
                io_uring_prep_read(sqe, fd, to, (unsigned)b->block_bytes, sent);
            io_uring_sqe_set_data64(sqe, slot);
        }
        io_uring_submit_and_wait(&ring, 1);
        struct io_uring_cqe *cqe;
        while (io_uring_peek_cqe(&ring, &cqe) == 0) {
            if (cqe->res <= 0) die("read");
            done += (uint64_t)cqe->res;
            slots[slot_free++] = io_uring_cqe_get_data64(cqe);
            io_uring_cqe_seen(&ring, cqe);
        }
    }
    io_uring_queue_exit(&ring);
    close(fd);
}

typedef struct copier {
    const bench *b;
    uint8_t *to;
    _Atomic uint64_t *next;
    int fd;
} copier;

static void *copier_main(void *arg) {
    const copier *r = arg;
    for (;;) {
        uint64_t at = atomic_fetch_add(r->next, r->b->block_bytes);
        if (at >= r->b->bytes) return NULL;
        if (pread(r->fd, r->to, r->b->block_bytes, (off_t)at) <= 0) die("read");
    }
}

static void raw_pread(bench *b) {
    pthread_t threads[1024];
    copier readers[1024];
    _Atomic uint64_t next = 0;
    int fd = open_direct(b);
    uint8_t *staging = b->staging;
    uint64_t count = b->threads < b->depth ? b->threads : b->depth;
    for (uint64_t i = 0; i < count; i++) {
        readers[i] = (copier){b, staging + i * b->block_bytes, &next, fd};
        if (pthread_create(&threads[i], NULL, copier_main, &readers[i]) != 0) die("thread");
    }
    for (uint64_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    close(fd);
}

/* ---- rounds ---- */

static double cpu_seconds(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* fio's own account of one pass: its start and end are not the disk's. */
static double run_fio(bench *b) {
    char command[8192], line[4096];
    snprintf(command, sizeof command,
             "fio --name=b --filename='%s' --readonly --rw=read --direct=1 --ioengine=io_uring "
             "--bs=%" PRIu64 "M --iodepth=%" PRIu64 " --size=%" PRIu64 "M --fixedbufs=1 "
             "--output-format=terse --terse-version=3",
             b->path, b->block_mib, b->depth, b->bytes >> 20);
    FILE *out = popen(command, "r");
    double ms = 0;
    if (!out || !fgets(line, sizeof line, out)) die("fio");
    const char *at = line;
    for (int field = 0; field < 8 && at; field++) /* ;runtime is the ninth */
        at = (at = strchr(at, ';')) ? at + 1 : NULL;
    if (at) ms = strtod(at, NULL);
    if (pclose(out) != 0 || ms <= 0) die("fio");
    return ms * 1e-3;
}

static double timed(bench *b, void (*run)(bench *b)) {
    uint64_t before = bd_now_us();
    run(b);
    return (double)(bd_now_us() - before) * 1e-6;
}

enum { READERS = 5, ROUNDS_MAX = 100 };

typedef struct reader {
    const char *name;
    void (*run)(bench *b); /* NULL: fio */
    double speed[ROUNDS_MAX], cpu[ROUNDS_MAX], ratio[ROUNDS_MAX];
} reader;

static void run_one(bench *b, reader *r, uint64_t round) {
    double cpu_before = cpu_seconds();
    double seconds = r->run ? timed(b, r->run) : run_fio(b);
    r->speed[round] = (double)b->bytes / seconds * 1e-9;
    r->cpu[round] = cpu_seconds() - cpu_before;
    printf("%s,%" PRIu64 ",%" PRIu64 ",%.3f,%.3f,%.3f\n", r->name, b->first_round + round, b->mib,
           seconds, r->speed[round], r->cpu[round]);
    fflush(stdout);
}

static void run_rounds(bench *b) {
    static reader readers[READERS] = {{.name = "fio"},
                                      {.name = "uring", .run = read_uring},
                                      {.name = "pread", .run = read_pread},
                                      {.name = "raw-uring", .run = raw_uring},
                                      {.name = "raw-pread", .run = raw_pread}};
    uint32_t first = b->fio ? 0 : 1, count = b->fio ? 3 : 4;
    if (b->first_round == 0) printf("reader,round,mib,seconds,gb_per_s,cpu_s\n");
    for (uint64_t round = 0; round < b->rounds; round++)
        for (uint32_t r = 0; r < count; r++) /* each is first in turn */
            run_one(b, &readers[first + (r + b->first_round + round) % count], round);
    for (uint32_t i = first; i < first + count; i++)
        for (uint64_t round = 0; round < b->rounds; round++)
            readers[i].ratio[round] =
                readers[i].speed[round] / readers[b->fio ? 0 : READERS - 1].speed[round];
    for (uint32_t i = first; i < first + count; i++) {
        reader *r = &readers[i];
        qsort(r->ratio, b->rounds, sizeof(double), ascending);
        qsort(r->speed, b->rounds, sizeof(double), ascending);
        qsort(r->cpu, b->rounds, sizeof(double), ascending);
        fprintf(stderr, "%-9s %.2f GB/s (%.2f to %.2f), CPU %.2f s, %.3f of %s\n", r->name,
                r->speed[b->rounds / 2], r->speed[0], r->speed[b->rounds - 1],
                r->cpu[b->rounds / 2], r->ratio[b->rounds / 2],
                readers[b->fio ? 0 : READERS - 1].name);
    }
}

static bool option(const char *name, uint64_t max, int argc, char **argv, uint64_t *out) {
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], name) != 0) continue;
        char *end = NULL;
        *out = strtoull(argv[i + 1], &end, 10);
        return *end == '\0' && end != argv[i + 1] && *out <= max;
    }
    return true;
}

int main(int argc, char **argv) {
    static bench b = {
        .mib = 4096, .rounds = 5, .depth = 8, .block_mib = 4, .threads = 8, .copy = 1};
    bool ok = argc >= 2 && argc % 2 == 0 && option("--mib", 1 << 20, argc, argv, &b.mib) &&
              option("--rounds", 100, argc, argv, &b.rounds) &&
              option("--depth", 1024, argc, argv, &b.depth) &&
              option("--block-mib", 256, argc, argv, &b.block_mib) &&
              option("--threads", 1024, argc, argv, &b.threads) &&
              option("--copy", 1, argc, argv, &b.copy) && option("--fio", 1, argc, argv, &b.fio) &&
              option("--first-round", 1000, argc, argv, &b.first_round) && b.block_mib > 0 &&
              b.block_mib % 4 == 0 && b.mib > 0 && b.rounds > 0 && b.depth > 0 && b.threads > 0;
    if (!ok) {
        fprintf(stderr, "usage: bench_loader FILE [--mib N] [--rounds N] [--depth N] "
                        "[--block-mib N, a multiple of 4] [--threads N] [--copy 0|1] "
                        "[--fio 1] [--first-round N]\n");
        return 2;
    }
    b.path = argv[1];
    b.block_bytes = b.block_mib << 20;
    b.bytes = ((b.mib << 20) + b.block_bytes - 1) / b.block_bytes * b.block_bytes;
    make_delta(&b);
    b.staging = raw_read_memory(b.depth * b.block_bytes);
    if (!b.staging) die("memory for staging");
    open_loader(&b, BD_IO_URING);
    open_loader(&b, BD_IO_PREAD);
    load_with(&b, BD_IO_URING); /* its memory is there afterwards, as the plain loops' is */
    load_with(&b, BD_IO_PREAD);
    run_rounds(&b);
    bd_loader_destroy(b.loaders[BD_IO_URING]);
    bd_loader_destroy(b.loaders[BD_IO_PREAD]);
    free(b.staging);
    munmap(b.memory, PAGES_REAL * PAGE_BYTES);
    free(b.pages);
    free(b.sums);
    return 0;
}
