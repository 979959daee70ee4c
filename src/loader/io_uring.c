/* io_uring.c - reads through one io_uring, with registered staging where the memlock limit allows
 * it. The inbox's eventfd is polled through the ring, so one wait covers finished reads and new
 * loads. Owner and thread: the loader's thread alone; DEFER_TASKRUN requires that. */
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"

struct bd_ring {
    struct io_uring ring;
    bd_mailbox *inbox;
    bd_read **flying; /* [depth], packed */
    uint32_t flying_count, depth;
    bool poll_armed, fixed;
    int broken; /* -errno of a ring that stopped working; later reads fail with it */
    char note[160];
};

static bd_message *prepend(bd_message *list, bd_read *read) {
    read->message.next = list;
    return &read->message;
}

static void forget_read(bd_ring *io, const bd_read *read) {
    uint32_t i = 0;
    while (i < io->flying_count && io->flying[i] != read)
        i++;
    BD_ASSERT(i < io->flying_count); /* only what was submitted comes back */
    io->flying[i] = io->flying[--io->flying_count];
}

static void arm_poll(bd_ring *io) {
    if (io->poll_armed) return;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);
    if (!sqe) return; /* next time */
    io_uring_prep_poll_add(sqe, bd_mailbox_eventfd(io->inbox), POLLIN);
    io_uring_sqe_set_data(sqe, NULL);
    io->poll_armed = true;
}

void bd_ring_submit(bd_ring *io, bd_read *read) {
    BD_ASSERT(io->flying_count < io->depth);
    io->flying[io->flying_count++] = read;
    if (io->broken) return; /* wait() hands it back */
    struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);
    BD_ASSERT(sqe != NULL); /* the ring has room for depth reads and the poll */
    if (io->fixed)
        io_uring_prep_read_fixed(sqe, read->fd, read->data, read->bytes, read->offset, 0);
    else
        io_uring_prep_read(sqe, read->fd, read->data, read->bytes, read->offset);
    io_uring_sqe_set_data(sqe, read);
}

/* What a file would be read in another way for is the ring's fault here, not the file's. */
static void note_result(bd_ring *io, int rc) {
    if (rc >= 0 || rc == -EINTR || rc == -EAGAIN || rc == -EBUSY || rc == -ETIME) return;
    io->broken = rc == -EINVAL || rc == -EOPNOTSUPP ? -EIO : rc;
}

bool bd_ring_broken(const bd_ring *io) {
    return io->broken != 0;
}

void bd_ring_kick(bd_ring *io) {
    if (!io->broken) note_result(io, io_uring_submit(&io->ring));
}

/* The kernel may still write into these reads' staging, but after this no load gets as far as using
 * any: the loader reads in no other way either. */
static bd_message *fail_flying(bd_ring *io, bool sleep) {
    bd_message *list = NULL;
    while (io->flying_count > 0) {
        bd_read *read = io->flying[--io->flying_count];
        read->result = io->broken;
        list = prepend(list, read);
    }
    if (!list && sleep) bd_mailbox_wait(io->inbox, UINT64_MAX);
    return list;
}

bd_message *bd_ring_wait(bd_ring *io, bool sleep) {
    arm_poll(io);
    if (!io->broken)
        note_result(io, sleep ? io_uring_submit_and_wait(&io->ring, 1)
                              : io_uring_submit_and_get_events(&io->ring));
    if (io->broken) return fail_flying(io, sleep);
    bd_message *list = NULL;
    struct io_uring_cqe *cqe;
    unsigned head, seen = 0;
    io_uring_for_each_cqe(&io->ring, head, cqe) {
        seen++;
        bd_read *read = io_uring_cqe_get_data(cqe);
        if (!read) {
            io->poll_armed = false;
            continue;
        }
        read->result = cqe->res;
        forget_read(io, read);
        list = prepend(list, read);
    }
    io_uring_cq_advance(&io->ring, seen);
    return list;
}

void bd_ring_destroy(bd_ring *io) {
    if (!io) return;
    BD_ASSERT(io->flying_count == 0);
    io_uring_queue_exit(&io->ring);
    free(io->flying);
    free(io);
}

const char *bd_ring_note(const bd_ring *io) {
    return io->note;
}

/* Newer flags cost fewer interrupts; older kernels answer EINVAL. */
static int ring_init(struct io_uring *ring, uint32_t entries) {
    static const unsigned flags[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
                                     IORING_SETUP_COOP_TASKRUN, 0};
    int rc = -EINVAL;
    for (size_t i = 0; i < sizeof flags / sizeof flags[0] && rc == -EINVAL; i++)
        rc = io_uring_queue_init(entries, ring, flags[i]);
    return rc;
}

static bd_status check_opcodes(struct io_uring *ring, bd_error *err) {
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    bool complete = probe && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                    io_uring_opcode_supported(probe, IORING_OP_READ_FIXED) &&
                    io_uring_opcode_supported(probe, IORING_OP_POLL_ADD);
    io_uring_free_probe(probe);
    if (complete) return BD_OK;
    return bd_fail(err, BD_E_UNSUPPORTED, "io_uring", "this kernel's io_uring has no plain reads");
}

static void register_staging(bd_ring *io, const bd_ring_options *options) {
    const struct iovec whole = {.iov_base = options->staging, .iov_len = options->staging_bytes};
    int rc = io_uring_register_buffers(&io->ring, &whole, 1);
    io->fixed = rc == 0;
    if (rc == -ENOMEM)
        snprintf(
            io->note, sizeof io->note,
            "io_uring without registered buffers: RLIMIT_MEMLOCK is below %zu bytes of staging",
            options->staging_bytes);
    else if (rc < 0)
        snprintf(io->note, sizeof io->note, "io_uring without registered buffers: %s",
                 strerror(-rc));
}

bd_status bd_ring_create(const bd_ring_options *options, bd_ring **out, bd_error *err) {
    *out = NULL;
    bd_status status = BD_E_MEMORY;
    bd_ring *io = calloc(1, sizeof *io);
    if (!io) return bd_fail(err, BD_E_MEMORY, "io_uring", "out of memory for the ring");
    io->flying = calloc(options->depth, sizeof(bd_read *));
    if (!io->flying) {
        bd_fail(err, BD_E_MEMORY, "io_uring", "out of memory for the ring");
        goto fail_free;
    }
    int rc = ring_init(&io->ring, options->depth + 2);
    if (rc < 0) {
        status = bd_fail_errno(err, BD_E_UNSUPPORTED, "io_uring", -rc, "io_uring is refused%s",
                               rc == -EPERM    ? " (seccomp or kernel.io_uring_disabled)"
                               : rc == -ENOMEM ? " (RLIMIT_MEMLOCK?)"
                                               : "");
        goto fail_free;
    }
    if ((status = check_opcodes(&io->ring, err)) != BD_OK) goto fail_ring;
    io->inbox = options->inbox;
    io->depth = options->depth;
    register_staging(io, options);
    *out = io;
    return BD_OK;
fail_ring:
    io_uring_queue_exit(&io->ring);
fail_free:
    free(io->flying);
    free(io);
    return status;
}
