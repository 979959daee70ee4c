/* mailbox.h - bounded queue of messages from many threads to one owner thread.
 * Messages are caller-owned nodes (intrusive), so posting never allocates; take() detaches the
 * whole list at once in posting order. The owner sleeps in wait() (futex) or polls the eventfd. */
#ifndef BITDELTA_BASE_MAILBOX_H
#define BITDELTA_BASE_MAILBOX_H

#include <stddef.h>

#include "bitdelta/base/status.h"

typedef struct bd_message {
    struct bd_message *next; /* owned by the mailbox while posted */
} bd_message;

typedef struct bd_mailbox bd_mailbox;

/* count_max 0: no bound. with_eventfd: the mailbox also signals an eventfd for epoll users. */
BD_MUST_CHECK bd_status bd_mailbox_create(bd_mailbox **out, size_t count_max, bool with_eventfd,
                                          bd_error *err);
/* No post or wake may be running. Messages still inside stay the poster's. */
void bd_mailbox_destroy(bd_mailbox *box);
/* BD_BUSY: full. A message may be posted once at a time. */
BD_MUST_CHECK bd_status bd_mailbox_post(bd_mailbox *box, bd_message *message);
/* The same, but the owner is not woken: the poster calls wake() once it has posted all it has. */
BD_MUST_CHECK bd_status bd_mailbox_post_quietly(bd_mailbox *box, bd_message *message);
/* Owner thread: whole list in order (linked by next), or NULL. Clears the eventfd. */
bd_message *bd_mailbox_take(bd_mailbox *box);
/* Any thread: the same while the owner may sleep in wait(), and goes on to. */
bd_message *bd_mailbox_take_for_owner(bd_mailbox *box);
/* Owner thread: sleep until something is posted, wake() is called or timeout_us passed. May return
 * early. */
void bd_mailbox_wait(bd_mailbox *box, uint64_t timeout_us);
void bd_mailbox_wake(bd_mailbox *box); /* any thread */
/* The owner waits for each new signal on the eventfd (EPOLLET), so that nothing has to be read from
 * it. Before the first post. */
void bd_mailbox_use_edges(bd_mailbox *box);
int bd_mailbox_eventfd(const bd_mailbox *box); /* -1 without one */

#endif
