/* futex.h - the two futex calls that base needs. Threads: any. */
#ifndef BITDELTA_SRC_BASE_FUTEX_H
#define BITDELTA_SRC_BASE_FUTEX_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(_Atomic uint32_t) == sizeof(uint32_t), "the kernel sees the plain word");

/* Sleeps while *word == expected; returns early on signals and spuriously. timeout NULL: no limit.
 */
static inline void bd_futex_wait(_Atomic uint32_t *word, uint32_t expected,
                                 const struct timespec *timeout) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, timeout, NULL, 0);
}

static inline void bd_futex_wake(_Atomic uint32_t *word, uint32_t count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static inline void bd_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

#endif
