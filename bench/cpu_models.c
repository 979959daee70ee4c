/* cpu_models.c - bench_cpu_models THREADS: how fast that many threads together read memory, in
 * GB/s, the best of some rounds. bench/cpu_models.py compares the speed of decoding with it.
 * Threads: the main one starts the readers and waits for them. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { THREADS_MAX = 64, ROUNDS = 7, PARTS = 80, EACH = 100800 };
#define READ_BYTES ((size_t)PARTS * 4 * EACH * 8) /* of each thread; more than any cache */
#define HUGE_PAGE  ((size_t)2 << 20)

typedef struct reader {
    const uint64_t *words;
    uint64_t sum; /* keeps the reads from being left out */
} reader;

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Four streams, for the prefetchers' sake, no power of two apart, which would be the same banks. */
static void *read_all(void *argument) {
    reader *r = argument;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t part = 0; part < PARTS; part++) {
        const uint64_t *p = r->words + part * 4 * EACH;
        for (size_t i = 0; i + 2 <= EACH; i += 2) {
            a += p[i] ^ p[i + 1];
            b += p[EACH + i] ^ p[EACH + i + 1];
            c += p[2 * EACH + i] ^ p[2 * EACH + i + 1];
            d += p[3 * EACH + i] ^ p[3 * EACH + i + 1];
        }
    }
    r->sum = a + b + c + d;
    return NULL;
}

static int round_seconds(reader *readers, unsigned count, double *seconds) {
    pthread_t threads[THREADS_MAX];
    const double start = now_seconds();
    unsigned started = 0;
    while (started < count &&
           pthread_create(&threads[started], NULL, read_all, &readers[started]) == 0)
        started++;
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    *seconds = now_seconds() - start;
    return started == count;
}

int main(int argc, char **argv) {
    const unsigned long count = argc == 2 ? strtoul(argv[1], NULL, 10) : 0;
    if (count < 1 || count > THREADS_MAX) {
        fprintf(stderr, "usage: bench_cpu_models THREADS\n");
        return 2;
    }
    reader readers[THREADS_MAX];
    const size_t bytes = (count * READ_BYTES + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uint64_t *words = aligned_alloc(HUGE_PAGE, bytes);
    if (!words) return 1;
    (void)madvise(words, bytes, MADV_HUGEPAGE); /* as the backend's weights */
    memset(words, 1, count * READ_BYTES);
    for (size_t i = 0; i < count; i++)
        readers[i] = (reader){.words = words + i * (READ_BYTES / sizeof *words)};
    double best = 1e9, seconds;
    int good = 1;
    for (int round = 0; good && round < ROUNDS; round++) {
        good = round_seconds(readers, (unsigned)count, &seconds);
        if (seconds < best) best = seconds;
    }
    if (good) printf("%.2f\n", (double)(count * READ_BYTES) / best * 1e-9);
    free(words);
    return good ? 0 : 1;
}
