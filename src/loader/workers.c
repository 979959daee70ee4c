/* workers.c - see workers.h. Two queues under one lock; a read that is over gives its place to the
 * next before its block is finished, by the same thread, whose caches have it. */
#include "workers.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct work_queue {
    bd_message *first, *last;
} work_queue;

struct bd_workers {
    bd_workers_options options;
    bd_mailbox *done;
    pthread_mutex_t lock;
    pthread_cond_t wanted;
    work_queue reads, finishes; /* guarded by lock, as is what follows */
    uint32_t reading, share;
    bool stop;
    uint32_t thread_count; /* the owner's */
    pthread_t threads[];
};

static void push(work_queue *queue, bd_message *work) {
    work->next = NULL;
    if (queue->last)
        queue->last->next = work;
    else
        queue->first = work;
    queue->last = work;
}

static void detach(work_queue *queue, bd_message *before, const bd_message *work) {
    if (before)
        before->next = work->next;
    else
        queue->first = work->next;
    if (queue->last == work) queue->last = before;
}

static bd_message *pop(work_queue *queue) {
    bd_message *work = queue->first;
    if (work) detach(queue, NULL, work);
    return work;
}

static bool may_read(const bd_workers *workers, bd_message *work) {
    const bd_workers_options *options = &workers->options;
    const uint32_t of_load = *options->reading(options->ctx, work);
    if (options->copies(options->ctx, work)) return of_load < bd_workers_threads(workers->share);
    return workers->reading < options->read_threads && of_load < workers->share;
}

/* The first whose load has not its share yet: one that reads slowly does not hold up another. */
static bd_message *pop_read(bd_workers *workers) {
    bd_message *before = NULL, *work = workers->reads.first;
    while (work && !may_read(workers, work)) {
        before = work;
        work = work->next;
    }
    if (work) detach(&workers->reads, before, work);
    return work;
}

/* Under the lock, which is given back meanwhile. */
static bool read_work(bd_workers *workers, bd_message *work) {
    const bd_workers_options *options = &workers->options;
    uint32_t *of_load = options->reading(options->ctx, work);
    const uint32_t waits = !options->copies(options->ctx, work);
    workers->reading += waits;
    (*of_load)++;
    pthread_mutex_unlock(&workers->lock);
    const bool came = options->read(options->ctx, work);
    pthread_mutex_lock(&workers->lock);
    workers->reading -= waits;
    (*of_load)--;
    if (workers->reads.first) pthread_cond_signal(&workers->wanted);
    return came;
}

static void do_work(bd_workers *workers, bd_message *work, bool is_read) {
    const bd_workers_options *options = &workers->options;
    const bool came = is_read || read_work(workers, work);
    pthread_mutex_unlock(&workers->lock);
    if (came) options->finish(options->ctx, work);
    const bd_status posted = bd_mailbox_post(workers->done, work);
    BD_ASSERT(posted == BD_OK); /* it has no bound */
    bd_mailbox_wake(options->inbox);
    pthread_mutex_lock(&workers->lock);
}

static void *worker_main(void *arg) {
    bd_workers *workers = arg;
    char name[16];
    snprintf(name, sizeof name, "bd-read-%u", workers->options.rank);
    pthread_setname_np(pthread_self(), name);
    pthread_mutex_lock(&workers->lock);
    while (!workers->stop) {
        bd_message *work = pop(&workers->finishes);
        const bool is_read = work != NULL;
        if (!work) work = pop_read(workers);
        if (work)
            do_work(workers, work, is_read);
        else
            pthread_cond_wait(&workers->wanted, &workers->lock);
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

static void give(bd_workers *workers, work_queue *queue, bd_message *work) {
    pthread_mutex_lock(&workers->lock);
    push(queue, work);
    pthread_cond_signal(&workers->wanted);
    pthread_mutex_unlock(&workers->lock);
}

void bd_workers_set_share(bd_workers *workers, uint32_t share) {
    BD_ASSERT(share > 0);
    pthread_mutex_lock(&workers->lock);
    workers->share = share;
    pthread_cond_broadcast(&workers->wanted);
    pthread_mutex_unlock(&workers->lock);
}

void bd_workers_read(bd_workers *workers, bd_message *work) {
    give(workers, &workers->reads, work);
}

void bd_workers_finish(bd_workers *workers, bd_message *work) {
    give(workers, &workers->finishes, work);
}

bd_message *bd_workers_take(bd_workers *workers) {
    return bd_mailbox_take(workers->done);
}

void bd_workers_destroy(bd_workers *workers) {
    if (!workers) return;
    pthread_mutex_lock(&workers->lock);
    BD_ASSERT(!workers->reads.first && !workers->finishes.first);
    workers->stop = true;
    pthread_cond_broadcast(&workers->wanted);
    pthread_mutex_unlock(&workers->lock);
    for (uint32_t i = 0; i < workers->thread_count; i++)
        pthread_join(workers->threads[i], NULL);
    pthread_cond_destroy(&workers->wanted);
    pthread_mutex_destroy(&workers->lock);
    bd_mailbox_destroy(workers->done);
    free(workers);
}

static int start_threads(bd_workers *workers, uint32_t count) {
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = 0;
    while (workers->thread_count < count && rc == 0) {
        rc = pthread_create(&workers->threads[workers->thread_count], NULL, worker_main, workers);
        if (rc == 0) workers->thread_count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

bd_status bd_workers_create(const bd_workers_options *options, bd_workers **out, bd_error *err) {
    *out = NULL;
    BD_ASSERT(options->read_threads > 0);
    const uint32_t count = bd_workers_threads(options->read_threads);
    bd_workers *workers = calloc(1, sizeof *workers + count * sizeof(pthread_t));
    if (!workers) return bd_fail(err, BD_E_MEMORY, "loader", "out of memory for reader threads");
    const bd_status status = bd_mailbox_create(&workers->done, 0, false, err);
    if (status != BD_OK) {
        free(workers);
        return status;
    }
    workers->options = *options;
    workers->share = options->read_threads;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->wanted, NULL);
    const int rc = start_threads(workers, count);
    if (workers->thread_count == 0) { /* fewer than asked for will do */
        bd_workers_destroy(workers);
        return bd_fail_errno(err, BD_E_MEMORY, "loader", rc, "no reader thread could be started");
    }
    *out = workers;
    return BD_OK;
}
