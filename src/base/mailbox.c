/* mailbox.c - many posters push onto a lock-free stack; the one owner detaches all of it and
 * reverses it. Taking everything at once is what makes the stack free of the ABA problem. Owner:
 * the thread that takes. Posters must be done with the box before it is destroyed. */
#include "bitdelta/base/mailbox.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "futex.h"

/* Values of `signal`. Only a poster that finds it not RAISED has someone to tell. */
enum { SIGNAL_CLEAR, SIGNAL_RAISED, SIGNAL_SLEEPING };

struct bd_mailbox {
    _Atomic(bd_message *) head; /* newest first */
    _Atomic size_t count;       /* posted or being posted */
    _Atomic uint32_t signal;    /* futex word */
    size_t count_max;           /* 0: no bound */
    int event_fd;               /* -1: none */
    bool edges;                 /* event_fd is never read */
    int64_t owed;               /* the owner's: signals seen, less those read from event_fd */
};

bd_status bd_mailbox_create(bd_mailbox **out, size_t count_max, bool with_eventfd, bd_error *err) {
    *out = NULL;
    bd_mailbox *box = calloc(1, sizeof *box);
    if (!box) return bd_fail(err, BD_E_MEMORY, "mailbox", "out of memory for a mailbox");
    box->count_max = count_max;
    box->event_fd = -1;
    if (with_eventfd) {
        box->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (box->event_fd < 0) {
            int error_number = errno;
            free(box);
            return bd_fail_errno(err, BD_E_IO, "mailbox", error_number, "eventfd failed");
        }
    }
    *out = box;
    return BD_OK;
}

void bd_mailbox_destroy(bd_mailbox *box) {
    if (!box) return;
    if (box->event_fd >= 0) close(box->event_fd);
    free(box);
}

static void raise_signal(bd_mailbox *box) {
    uint32_t before = atomic_exchange(&box->signal, SIGNAL_RAISED);
    if (before == SIGNAL_RAISED) return; /* the owner has not looked since the last one */
    if (before == SIGNAL_SLEEPING) bd_futex_wake(&box->signal, 1);
    if (box->event_fd >= 0) {
        uint64_t one = 1;
        ssize_t written;
        do {
            written = write(box->event_fd, &one, sizeof one);
        } while (written < 0 && errno == EINTR);
        /* EAGAIN: the counter is at its top, so the descriptor is readable all the same. */
    }
}

bd_status bd_mailbox_post_quietly(bd_mailbox *box, bd_message *message) {
    size_t before = atomic_fetch_add(&box->count, 1);
    if (box->count_max > 0 && before >= box->count_max) {
        atomic_fetch_sub(&box->count, 1);
        return BD_BUSY;
    }
    bd_message *head = atomic_load(&box->head);
    do {
        message->next = head;
    } while (!atomic_compare_exchange_weak(&box->head, &head, message));
    return BD_OK;
}

bd_status bd_mailbox_post(bd_mailbox *box, bd_message *message) {
    bd_status status = bd_mailbox_post_quietly(box, message);
    if (status == BD_OK) raise_signal(box);
    return status;
}

/* Each time the signal is raised, one is written to the descriptor, perhaps a moment later. The
 * owner reads only what it knows to be there or on its way: most turns have nothing to read. */
static void clear_signal(bd_mailbox *box) {
    if (atomic_exchange(&box->signal, SIGNAL_CLEAR) == SIGNAL_RAISED) box->owed++;
}

static void read_event(bd_mailbox *box) {
    uint64_t value;
    ssize_t got;
    do {
        got = read(box->event_fd, &value, sizeof value);
    } while (got < 0 && errno == EINTR);
    if (got == (ssize_t)sizeof value) box->owed -= (int64_t)value;
}

bd_message *bd_mailbox_take_for_owner(bd_mailbox *box) {
    bd_message *newest = atomic_exchange(&box->head, NULL);
    bd_message *ordered = NULL;
    size_t count = 0;
    while (newest) {
        bd_message *next = newest->next;
        newest->next = ordered;
        ordered = newest;
        newest = next;
        count++;
    }
    if (count > 0) atomic_fetch_sub(&box->count, count);
    return ordered;
}

bd_message *bd_mailbox_take(bd_mailbox *box) {
    /* The signal is cleared before the list is read: a post that still saw it raised had already
     * pushed its message, and a later one raises it anew. */
    if (box->event_fd >= 0 && !box->edges &&
        (box->owed > 0 || atomic_load(&box->signal) == SIGNAL_RAISED))
        read_event(box);
    clear_signal(box);
    return bd_mailbox_take_for_owner(box);
}

void bd_mailbox_wait(bd_mailbox *box, uint64_t timeout_us) {
    if (atomic_load(&box->head)) return;
    uint32_t expected = SIGNAL_CLEAR;
    if (timeout_us > 0 &&
        atomic_compare_exchange_strong(&box->signal, &expected, SIGNAL_SLEEPING)) {
        const uint64_t forever_us = UINT64_C(1) << 50; /* over 30 years */
        const struct timespec limit = {.tv_sec = (time_t)(timeout_us / 1000000u),
                                       .tv_nsec = (long)(timeout_us % 1000000u * 1000u)};
        bd_futex_wait(&box->signal, SIGNAL_SLEEPING, timeout_us < forever_us ? &limit : NULL);
    }
    /* A wake() is used up here; what was posted stays visible in the list. */
    clear_signal(box);
}

void bd_mailbox_wake(bd_mailbox *box) {
    raise_signal(box);
}

void bd_mailbox_use_edges(bd_mailbox *box) {
    box->edges = true;
}

int bd_mailbox_eventfd(const bd_mailbox *box) {
    return box->event_fd;
}
