/* The mailbox: order per poster, the bound, wake-ups and the eventfd, with several posting threads.
 * Also run under the thread sanitizer. */
#include "base_support.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/mailbox.h"

enum { POSTERS = 4, PER_POSTER = 20000 };

typedef struct note {
    bd_message message; /* first: a message is its note */
    uint32_t poster, number;
} note;

typedef struct poster {
    bd_mailbox *box;
    note *notes;
    pthread_t thread;
} poster;

static const note *note_of(const bd_message *message) {
    return (const note *)(const void *)message;
}

static void *post_all(void *arg) {
    poster *self = arg;
    for (uint32_t i = 0; i < PER_POSTER; i++) {
        while (bd_mailbox_post(self->box, &self->notes[i].message) == BD_BUSY) {
            struct timespec pause = {.tv_nsec = 20000};
            nanosleep(&pause, NULL);
        }
    }
    return NULL;
}

typedef enum waiting { FUTEX, EVENTFD, EDGES } waiting;

static int watch_edges(bd_mailbox *box) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    bd_mailbox_use_edges(box);
    int fd = epoll_create1(0);
    assert_true(fd >= 0);
    assert_int_equal(epoll_ctl(fd, EPOLL_CTL_ADD, bd_mailbox_eventfd(box), &event), 0);
    return fd;
}

static void wait_for_post(bd_mailbox *box, waiting how, int edges) {
    struct pollfd entry = {.fd = bd_mailbox_eventfd(box), .events = POLLIN};
    struct epoll_event event;
    if (how == FUTEX) bd_mailbox_wait(box, 20000000);
    if (how == EVENTFD) assert_int_equal(poll(&entry, 1, 20000), 1);
    if (how == EDGES) assert_int_equal(epoll_wait(edges, &event, 1, 20000), 1);
}

static void run_posters(size_t count_max, waiting how) {
    bd_mailbox *box;
    bd_error err;
    assert_int_equal(bd_mailbox_create(&box, count_max, how != FUTEX, &err), BD_OK);
    int edges = how == EDGES ? watch_edges(box) : -1;
    poster posters[POSTERS];
    for (uint32_t p = 0; p < POSTERS; p++) {
        posters[p] = (poster){.box = box, .notes = calloc(PER_POSTER, sizeof(note))};
        assert_non_null(posters[p].notes);
        for (uint32_t i = 0; i < PER_POSTER; i++) {
            posters[p].notes[i].poster = p;
            posters[p].notes[i].number = i;
        }
        assert_int_equal(pthread_create(&posters[p].thread, NULL, post_all, &posters[p]), 0);
    }
    uint32_t next[POSTERS] = {0}, total = 0;
    while (total < POSTERS * PER_POSTER) {
        wait_for_post(box, how, edges);
        uint32_t batch = 0;
        for (const bd_message *m = bd_mailbox_take(box); m; m = m->next) {
            const note *got = note_of(m);
            assert_int_equal(got->number, next[got->poster]);
            next[got->poster]++;
            batch++;
        }
        if (count_max > 0) assert_true(batch <= count_max);
        total += batch;
    }
    for (uint32_t p = 0; p < POSTERS; p++) {
        pthread_join(posters[p].thread, NULL);
        free(posters[p].notes);
    }
    assert_null(bd_mailbox_take(box));
    if (edges >= 0) close(edges);
    bd_mailbox_destroy(box);
}

static void test_futex(void **state) {
    (void)state;
    run_posters(0, FUTEX);
}

static void test_bounded(void **state) {
    (void)state;
    run_posters(7, FUTEX);
}

static void test_eventfd(void **state) {
    (void)state;
    run_posters(100, EVENTFD);
}

static void test_edges(void **state) {
    (void)state;
    run_posters(100, EDGES);
    run_posters(7, EDGES);
}

static void test_bound(void **state) {
    (void)state;
    bd_mailbox *box;
    assert_int_equal(bd_mailbox_create(&box, 2, false, NULL), BD_OK);
    assert_int_equal(bd_mailbox_eventfd(box), -1);
    bd_message messages[3];
    assert_int_equal(bd_mailbox_post(box, &messages[0]), BD_OK);
    assert_int_equal(bd_mailbox_post(box, &messages[1]), BD_OK);
    assert_int_equal(bd_mailbox_post(box, &messages[2]), BD_BUSY);
    bd_message *first = bd_mailbox_take(box);
    assert_ptr_equal(first, &messages[0]);
    assert_ptr_equal(first->next, &messages[1]);
    assert_null(first->next->next);
    assert_int_equal(bd_mailbox_post(box, &messages[2]), BD_OK);
    bd_mailbox_destroy(box);
    bd_mailbox_destroy(NULL);
}

typedef struct waker {
    bd_mailbox *box;
    atomic_bool woke;
} waker;

static void *wake_later(void *arg) {
    waker *self = arg;
    struct timespec pause = {.tv_nsec = 30000000};
    nanosleep(&pause, NULL);
    atomic_store(&self->woke, true);
    bd_mailbox_wake(self->box);
    return NULL;
}

/* A sleeper is woken by wake() long before its time; a wake() before the sleep counts once. */
static void test_wake(void **state) {
    (void)state;
    waker self = {.woke = false};
    assert_int_equal(bd_mailbox_create(&self.box, 0, true, NULL), BD_OK);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, wake_later, &self), 0);
    uint64_t start = bd_now_us();
    while (!atomic_load(&self.woke) && bd_now_us() - start < 60000000) {
        bd_mailbox_wait(self.box, UINT64_MAX);
    }
    assert_true(atomic_load(&self.woke));
    pthread_join(thread, NULL);
    assert_null(bd_mailbox_take(self.box));
    struct pollfd entry = {.fd = bd_mailbox_eventfd(self.box), .events = POLLIN};
    assert_int_equal(poll(&entry, 1, 0), 0);

    bd_mailbox_wake(self.box);
    assert_int_equal(poll(&entry, 1, 0), 1);
    bd_mailbox_wait(self.box, UINT64_MAX); /* would hang if the wake were lost */
    start = bd_now_us();
    bd_mailbox_wait(self.box, 5000);
    assert_true(bd_now_us() - start >= 4000); /* used up: this one lasted its time */
    bd_mailbox_wait(self.box, 0);
    bd_mailbox_destroy(self.box);
}

static void *take_and_post(void *arg) {
    waker *self = arg;
    struct timespec pause = {.tv_nsec = 30000000};
    nanosleep(&pause, NULL); /* the owner sleeps by then, most likely */
    assert_null(bd_mailbox_take_for_owner(self->box));
    atomic_store(&self->woke, true);
    bd_mailbox_wake(self->box);
    return NULL;
}

/* Who takes for the owner leaves it its signal: a sleeper is woken all the same, and a wake() that
 * came before counts. */
static void test_take_for_owner(void **state) {
    (void)state;
    waker self = {.woke = false};
    assert_int_equal(bd_mailbox_create(&self.box, 0, false, NULL), BD_OK);
    bd_message messages[2];
    assert_int_equal(bd_mailbox_post(self.box, &messages[0]), BD_OK);
    assert_int_equal(bd_mailbox_post(self.box, &messages[1]), BD_OK);
    const bd_message *first = bd_mailbox_take_for_owner(self.box);
    assert_ptr_equal(first, &messages[0]);
    assert_ptr_equal(first->next, &messages[1]);
    assert_null(first->next->next);
    bd_mailbox_wait(self.box, UINT64_MAX); /* would hang if the signal were gone */
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, take_and_post, &self), 0);
    while (!atomic_load(&self.woke))
        bd_mailbox_wait(self.box, UINT64_MAX);
    pthread_join(thread, NULL);
    bd_mailbox_destroy(self.box);
}

/* Posted quietly, a message is there but tells nobody; one wake() tells of all of them, and the
 * descriptor is readable no longer than there is something to tell. */
static void test_quiet(void **state) {
    (void)state;
    bd_mailbox *box;
    bd_message messages[3];
    assert_int_equal(bd_mailbox_create(&box, 3, true, NULL), BD_OK);
    struct pollfd entry = {.fd = bd_mailbox_eventfd(box), .events = POLLIN};
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 3; i++)
            assert_int_equal(bd_mailbox_post_quietly(box, &messages[i]), BD_OK);
        bd_message more;
        assert_int_equal(bd_mailbox_post_quietly(box, &more), BD_BUSY);
        assert_int_equal(poll(&entry, 1, 0), 0);
        if (round == 1) bd_mailbox_wait(box, UINT64_MAX); /* sees them without a wake() */
        if (round > 0) bd_mailbox_wake(box);
        if (round > 0) bd_mailbox_wake(box);
        assert_int_equal(poll(&entry, 1, 0), round > 0);
        const bd_message *first = bd_mailbox_take(box);
        for (int i = 0; i < 3; i++, first = first->next)
            assert_ptr_equal(first, &messages[i]);
        assert_null(first);
        assert_int_equal(poll(&entry, 1, 0), 0);
    }
    /* A wake that wait() used up leaves the descriptor readable until the next take(). */
    bd_mailbox_wake(box);
    bd_mailbox_wait(box, UINT64_MAX);
    bd_mailbox_wake(box);
    assert_null(bd_mailbox_take(box));
    assert_int_equal(poll(&entry, 1, 0), 0);
    bd_mailbox_destroy(box);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_futex),          cmocka_unit_test(test_bounded),
        cmocka_unit_test(test_eventfd),        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_bound),          cmocka_unit_test(test_wake),
        cmocka_unit_test(test_take_for_owner), cmocka_unit_test(test_quiet),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
