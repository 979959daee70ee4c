/* io_pread.c - the same reads by a few threads with pread, where io_uring is not allowed.
 * Owner: the loader's thread; the threads bd-read-<n> take reads from one queue and post them back.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "io.h"

typedef struct pread_io {
    bd_io base;
    bd_mailbox *inbox, *done;
    pthread_mutex_t lock;
    pthread_cond_t wanted;
    bd_message *first, *last; /* guarded by lock */
    bool stop;                /* guarded by lock */
    uint32_t rank, thread_count;
    pthread_t threads[];
} pread_io;

static bd_read *next_read(pread_io *io) {
    pthread_mutex_lock(&io->lock);
    while (!io->first && !io->stop)
        pthread_cond_wait(&io->wanted, &io->lock);
    bd_message *message = io->first;
    if (message) {
        io->first = message->next;
        if (!io->first) io->last = NULL;
    }
    pthread_mutex_unlock(&io->lock);
    return (bd_read *)message;
}

static void *reader_main(void *arg) {
    pread_io *io = arg;
    char name[16];
    snprintf(name, sizeof name, "bd-read-%u", io->rank);
    pthread_setname_np(pthread_self(), name);
    for (bd_read *read = next_read(io); read; read = next_read(io)) {
        ssize_t got = pread(read->fd, read->data, read->bytes, (off_t)read->offset);
        read->result = got < 0 ? -errno : (int32_t)got;
        bd_status posted = bd_mailbox_post(io->done, &read->message);
        BD_ASSERT(posted == BD_OK); /* it has no bound */
        bd_mailbox_wake(io->inbox);
    }
    return NULL;
}

static void pread_submit(bd_io *base, bd_read *read) {
    pread_io *io = (pread_io *)base;
    read->message.next = NULL;
    pthread_mutex_lock(&io->lock);
    if (io->last)
        io->last->next = &read->message;
    else
        io->first = &read->message;
    io->last = &read->message;
    pthread_cond_signal(&io->wanted);
    pthread_mutex_unlock(&io->lock);
}

static bd_message *pread_wait(bd_io *base) {
    pread_io *io = (pread_io *)base;
    bd_message *done = bd_mailbox_take(io->done);
    if (done) return done;
    bd_mailbox_wait(io->inbox, UINT64_MAX);
    return bd_mailbox_take(io->done);
}

static void stop_threads(pread_io *io) {
    pthread_mutex_lock(&io->lock);
    io->stop = true;
    pthread_cond_broadcast(&io->wanted);
    pthread_mutex_unlock(&io->lock);
    for (uint32_t i = 0; i < io->thread_count; i++)
        pthread_join(io->threads[i], NULL);
}

static void pread_destroy(bd_io *base) {
    pread_io *io = (pread_io *)base;
    stop_threads(io);
    pthread_cond_destroy(&io->wanted);
    pthread_mutex_destroy(&io->lock);
    bd_mailbox_destroy(io->done);
    free(io);
}

static const bd_io_ops pread_ops = {
    .name = "pread",
    .submit = pread_submit,
    .wait = pread_wait,
    .destroy = pread_destroy,
};

bd_status bd_io_pread_create(const bd_io_options *options, bd_io **out, bd_error *err) {
    *out = NULL;
    /* A thread more than blocks would only sleep. */
    uint32_t threads =
        options->read_threads < options->depth ? options->read_threads : options->depth;
    pread_io *io = calloc(1, sizeof *io + threads * sizeof(pthread_t));
    if (!io) return bd_fail(err, BD_E_MEMORY, "loader", "out of memory for reader threads");
    bd_status status = bd_mailbox_create(&io->done, 0, false, err);
    if (status != BD_OK) goto fail_free;
    io->base.ops = &pread_ops;
    io->inbox = options->inbox;
    io->rank = options->rank;
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->wanted, NULL);
    int rc = 0;
    while (io->thread_count < threads && rc == 0) {
        rc = pthread_create(&io->threads[io->thread_count], NULL, reader_main, io);
        if (rc == 0) io->thread_count++;
    }
    if (io->thread_count == 0) { /* fewer than asked for will do */
        status = bd_fail_errno(err, BD_E_MEMORY, "loader", rc, "no reader thread could be started");
        goto fail_lock;
    }
    *out = &io->base;
    return BD_OK;
fail_lock:
    pthread_cond_destroy(&io->wanted);
    pthread_mutex_destroy(&io->lock);
    bd_mailbox_destroy(io->done);
fail_free:
    free(io);
    return status;
}
