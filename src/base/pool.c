/* pool.c - parallel_for over sleeping workers.
 *
 * One 64-bit ticket holds {job number, next index}; a thread claims an index by advancing it, which
 * fails if the job changed meanwhile. So a worker that wakes late finds nothing to do, and the
 * owner waits for indices, never for threads that have not been scheduled yet.
 *
 *   owner:  ticket = {job, CLOSED}; fn, ctx, count, done = 0; ticket = {job, 0}; epoch++; wake
 *   worker: read epoch; claim and run until nothing is left; sleep while epoch is the one read
 *
 * Owner: one thread. Everything that both sides touch is atomic. */
#include "bitdelta/base/pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "futex.h"

enum {
    POOL_THREADS_MAX = 1024,
    POOL_NAME_BYTES_MAX = 10,
    /* Awake between the operators of a step, whose pauses are this short: waking through the kernel
     * takes as long, 240 times in a step of 30 layers (with 3 us two threads gave 29 to 44 tokens
     * a second of bench/cpu_models, with 30 us 45 to 47). Then the core is given back. */
    POOL_SPIN_US = 30,
    POOL_SPINS = 32, /* between two looks at the clock */
};

#define TICKET_CLOSED UINT32_MAX /* no index is below it */

typedef struct pool_worker {
    bd_pool *pool;
    pthread_t thread;
    uint32_t index;
} pool_worker;

struct bd_pool {
    _Atomic uint64_t ticket;
    _Atomic uint32_t epoch; /* futex word of the workers: changes with every job */
    _Atomic uint32_t done;  /* futex word of the owner: indices finished */
    _Atomic uint32_t count;
    _Atomic uint32_t sleeper_count;
    _Atomic(bd_pool_fn) fn;
    _Atomic(void *) ctx;
    atomic_bool stop;
    atomic_bool running; /* guards against nesting */
    uint32_t job;        /* owner only */
    uint32_t width;      /* the owner and the workers */
    uint32_t started;    /* workers that exist */
    pool_worker *workers;
};

static uint64_t ticket_of(uint32_t job, uint32_t index) {
    return (uint64_t)job << 32 | index;
}

/* Runs indices of the current job until none is left. */
static void run_claims(bd_pool *pool, uint32_t worker) {
    uint64_t ticket = atomic_load(&pool->ticket);
    for (;;) {
        /* Read between the load of the ticket and its exchange: if the exchange succeeds the ticket
         * never changed, so these are the values of its job. */
        bd_pool_fn fn = atomic_load(&pool->fn);
        void *ctx = atomic_load(&pool->ctx);
        uint32_t count = atomic_load(&pool->count);
        uint32_t index = (uint32_t)ticket;
        if (index >= count) return;
        if (!atomic_compare_exchange_strong(&pool->ticket, &ticket, ticket + 1)) continue;
        fn(ctx, index, worker);
        if (atomic_fetch_add(&pool->done, 1) + 1 == count) bd_futex_wake(&pool->done, 1);
        ticket = atomic_load(&pool->ticket);
    }
}

/* Whether the word took that value, or gave up this one, in time. */
static bool spin_for(_Atomic uint32_t *word, uint32_t value, bool until_equal) {
    const uint64_t end_us = bd_now_us() + POOL_SPIN_US;
    do {
        for (int i = 0; i < POOL_SPINS; i++) {
            if ((atomic_load(word) == value) == until_equal) return true;
            bd_cpu_relax();
        }
    } while (bd_now_us() < end_us);
    return false;
}

static void sleep_until_next(bd_pool *pool, uint32_t epoch) {
    if (spin_for(&pool->epoch, epoch, false)) return;
    atomic_fetch_add(&pool->sleeper_count, 1);
    bd_futex_wait(&pool->epoch, epoch, NULL);
    atomic_fetch_sub(&pool->sleeper_count, 1);
}

static void *worker_main(void *arg) {
    const pool_worker *self = arg;
    bd_pool *pool = self->pool;
    for (;;) {
        uint32_t epoch = atomic_load(&pool->epoch);
        if (atomic_load(&pool->stop)) return NULL;
        run_claims(pool, self->index);
        sleep_until_next(pool, epoch);
    }
}

static void announce(bd_pool *pool, uint32_t wake_max) {
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleeper_count) > 0) bd_futex_wake(&pool->epoch, wake_max);
}

static int start_worker(bd_pool *pool, uint32_t index, const char *name) {
    pool_worker *worker = &pool->workers[index - 1];
    *worker = (pool_worker){.pool = pool, .index = index};
    int error_number = pthread_create(&worker->thread, NULL, worker_main, worker);
    if (error_number != 0) return error_number;
    char full_name[16];
    snprintf(full_name, sizeof full_name, "%.*s-%u", POOL_NAME_BYTES_MAX, name, index % 10000u);
    pthread_setname_np(worker->thread, full_name); /* only for people; may fail */
    pool->started++;
    return 0;
}

bd_status bd_pool_create(bd_pool **out, uint32_t thread_count, const char *name, bd_error *err) {
    *out = NULL;
    if (thread_count == 0) thread_count = bd_usable_cores();
    if (thread_count > POOL_THREADS_MAX) {
        return bd_fail(err, BD_E_ARGUMENT, name, "a pool of %u threads is over the limit of %d",
                       thread_count, POOL_THREADS_MAX);
    }
    bd_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return bd_fail(err, BD_E_MEMORY, name, "out of memory for a worker pool");
    pool->width = thread_count;
    atomic_store(&pool->ticket, ticket_of(0, TICKET_CLOSED));
    pool->workers = calloc(thread_count, sizeof *pool->workers);
    if (!pool->workers) {
        free(pool);
        return bd_fail(err, BD_E_MEMORY, name, "out of memory for a worker pool");
    }
    /* Workers inherit a full mask: signals are for the main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error_number = 0;
    for (uint32_t i = 1; i < thread_count && error_number == 0; i++) {
        error_number = start_worker(pool, i, name);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error_number != 0) {
        bd_pool_destroy(pool);
        return bd_fail_errno(err, BD_E_MEMORY, name, error_number, "cannot start %u threads",
                             thread_count);
    }
    *out = pool;
    return BD_OK;
}

void bd_pool_destroy(bd_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stop, true);
    announce(pool, INT32_MAX);
    for (uint32_t i = 0; i < pool->started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    free(pool->workers);
    free(pool);
}

uint32_t bd_pool_width(const bd_pool *pool) {
    return pool->width;
}

static void wait_done(bd_pool *pool, uint32_t count) {
    if (spin_for(&pool->done, count, true)) return;
    for (;;) {
        uint32_t done = atomic_load(&pool->done);
        if (done == count) return;
        bd_futex_wait(&pool->done, done, NULL);
    }
}

void bd_pool_parallel_for(bd_pool *pool, uint32_t count, bd_pool_fn fn, void *ctx) {
    if (count == 0) return;
    BD_ASSERT(!atomic_exchange(&pool->running, true));
    if (pool->width == 1 || count == 1) {
        for (uint32_t i = 0; i < count; i++)
            fn(ctx, i, 0);
    } else {
        pool->job++;
        atomic_store(&pool->ticket, ticket_of(pool->job, TICKET_CLOSED));
        atomic_store(&pool->fn, fn);
        atomic_store(&pool->ctx, ctx);
        atomic_store(&pool->count, count);
        atomic_store(&pool->done, 0);
        atomic_store(&pool->ticket, ticket_of(pool->job, 0));
        uint32_t helpers = count - 1 < pool->width - 1 ? count - 1 : pool->width - 1;
        announce(pool, helpers);
        run_claims(pool, 0);
        wait_done(pool, count);
    }
    atomic_store(&pool->running, false);
}
