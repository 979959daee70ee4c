/* stopped_child.h - a child process that stands still for a while (SIGSTOP, as a frozen container
 * does), in the middle of what it does. */
#ifndef BITDELTA_TESTS_STOPPED_CHILD_H
#define BITDELTA_TESTS_STOPPED_CHILD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static inline void stopped_child_rest(void) {
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
}

/* The child runs `body`, which writes a byte to `here` when it is where it is to be stopped, goes
 * on with what needs no other and finishes once it can read one from `go`. Its result is to be 0.
 */
static inline void stopped_child(int (*body)(int here, int go), unsigned stopped_s) {
    int here[2], go[2], status;
    char byte;
    assert_int_equal(pipe(here), 0);
    assert_int_equal(pipe(go), 0);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(body(here[1], go[0]));
    close(here[1]); /* so that a child that failed is heard of */
    assert_int_equal(read(here[0], &byte, 1), 1);
    stopped_child_rest(); /* until it sleeps */
    assert_int_equal(kill(child, SIGSTOP), 0);
    nanosleep(&(struct timespec){.tv_sec = (time_t)stopped_s}, NULL);
    assert_int_equal(kill(child, SIGCONT), 0);
    stopped_child_rest(); /* for one that gives up */
    assert_int_equal(write(go[1], "", 1), 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(here[0]);
    close(go[0]);
    close(go[1]);
}

#endif
