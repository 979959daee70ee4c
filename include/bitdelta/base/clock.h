/* clock.h - monotonic and wall time. Threads: any. */
#ifndef BITDELTA_BASE_CLOCK_H
#define BITDELTA_BASE_CLOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

uint64_t bd_now_us(void);       /* CLOCK_MONOTONIC */
uint64_t bd_wall_seconds(void); /* CLOCK_REALTIME, Unix seconds */

/* Waits for a condition of CLOCK_MONOTONIC; lock is held. Takes the wait from *left_us, but of a
 * time in which the whole process stood still (SIGSTOP, a frozen container) a moment at most, since
 * those who are waited for stood still as well. Returns early like any such wait; false: nothing
 * was left. */
bool bd_cond_wait_us(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t *left_us);

#endif
