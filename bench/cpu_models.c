/* cpu_models.c - bench_cpu_models THREADS: how fast that many threads together read memory, in
 * GB/s, the best of some rounds. bench/cpu_models.py compares the speed of decoding with it.
 * Threads: the main one starts the readers and waits for them. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS_MAX = 64, ROUNDS = 7, LANES = 8 };
#define READ_BYTES ((size_t)256 << 20) /* of each thread; far more than any cache */

typedef struct reader {
    const uint64_t *words;
    uint64_t sum; /* keeps the reads from being left out */
} reader;

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *read_all(void *argument) {
    reader *r = argument;
    uint64_t lanes[LANES] = {0};
    for (size_t i = 0; i < READ_BYTES / sizeof *r->words; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++)
            lanes[lane] += r->words[i + lane];
    r->sum = 0;
    for (size_t lane = 0; lane < LANES; lane++)
        r->sum += lanes[lane];
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
    uint64_t *words = malloc(count * READ_BYTES);
    if (!words) return 1;
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
