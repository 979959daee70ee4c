/* clock.h - monotonic and wall time. Threads: any. */
#ifndef BITDELTA_BASE_CLOCK_H
#define BITDELTA_BASE_CLOCK_H

#include <stdint.h>

uint64_t bd_now_us(void);       /* CLOCK_MONOTONIC */
uint64_t bd_wall_seconds(void); /* CLOCK_REALTIME, Unix seconds */

#endif
