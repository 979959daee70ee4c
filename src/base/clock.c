/* clock.c - time from the vDSO clocks. Threads: any. */
#include "bitdelta/base/clock.h"

#include <time.h>

enum { MOMENT_US = 50000 };

uint64_t bd_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

uint64_t bd_wall_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec < 0 ? 0 : (uint64_t)now.tv_sec;
}

bool bd_cond_wait_us(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t *left_us) {
    if (*left_us == 0) return false;
    const uint64_t moment_us = *left_us < MOMENT_US ? *left_us : MOMENT_US, begin_us = bd_now_us(),
                   until_us = begin_us + moment_us;
    const struct timespec until = {.tv_sec = (time_t)(until_us / 1000000u),
                                   .tv_nsec = (long)(until_us % 1000000u * 1000u)};
    (void)pthread_cond_timedwait(cond, lock, &until);
    const uint64_t spent_us = bd_now_us() - begin_us;
    *left_us -= spent_us < moment_us ? spent_us : moment_us;
    return true;
}
