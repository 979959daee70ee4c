/* faulty_backend.h - the CPU backend behind a table whose operators fail on order: what a device
 * does when its memory is full, when an error sticks, when it does not answer. One at a time;
 * orders may come from any thread. */
#ifndef BD_TESTS_FAULTY_BACKEND_H
#define BD_TESTS_FAULTY_BACKEND_H

#include <stdatomic.h>
#include <time.h>

#include "bitdelta/backend/backend.h"

typedef enum faulty_place {
    FAULTY_NOWHERE,
    FAULTY_OPEN,
    FAULTY_BEGIN,
    FAULTY_LINEAR,
    FAULTY_WAIT,
    FAULTY_HANG,
    FAULTY_PLANE
} faulty_place;

static struct {
    bd_backend_ops ops;
    _Atomic int place, status; /* what is ordered */
    _Atomic bool sticky, lost; /* sticky: from then on every call fails */
    _Atomic uint32_t calls;    /* of the place that still succeed */
    _Atomic bool release;      /* ends a hang */
} faulty;

static inline bd_status faulty_pass(faulty_place place, bd_error *err) {
    if (atomic_load(&faulty.lost))
        return bd_fail(err, BD_E_DEVICE, "device", "the device was lost earlier");
    if (atomic_load(&faulty.place) != (int)place) return BD_OK;
    if (atomic_load(&faulty.calls) > 0) {
        atomic_fetch_sub(&faulty.calls, 1);
        return BD_OK;
    }
    if (atomic_load(&faulty.sticky))
        atomic_store(&faulty.lost, true);
    else
        atomic_store(&faulty.place, FAULTY_NOWHERE);
    return bd_fail(err, (bd_status)atomic_load(&faulty.status), "device",
                   "a planted fault: uncorrectable ECC error encountered");
}

static inline bd_status faulty_open(const bd_backend_options *options, bd_backend **out,
                                    bd_error *err) {
    *out = NULL;
    const bd_status s = faulty_pass(FAULTY_OPEN, err);
    return s == BD_OK ? bd_backend_cpu_ops()->open(options, out, err) : s;
}
static inline bd_status faulty_begin(bd_backend *backend, const bd_step *step, bd_error *err) {
    const bd_status s = faulty_pass(FAULTY_BEGIN, err);
    return s == BD_OK ? bd_backend_cpu_ops()->step_begin(backend, step, err) : s;
}
static inline bd_status faulty_linear(bd_backend *backend, const bd_step *step, uint32_t layer,
                                      bd_group group, bd_error *err) {
    const bd_status s = faulty_pass(FAULTY_LINEAR, err);
    return s == BD_OK ? bd_backend_cpu_ops()->linear(backend, step, layer, group, err) : s;
}
static inline bd_status faulty_wait(bd_backend *backend, const bd_step *step, uint64_t deadline_us,
                                    bd_token_result *results, bd_error *err) {
    if (atomic_load(&faulty.place) == FAULTY_HANG)
        while (!atomic_load(&faulty.release))
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    const bd_status s = faulty_pass(FAULTY_WAIT, err);
    return s == BD_OK ? bd_backend_cpu_ops()->step_wait(backend, step, deadline_us, results, err)
                      : s;
}
static inline bd_status faulty_plane(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                                     uint32_t first_row, uint32_t row_count, const void *src,
                                     uint64_t src_stride_bytes, bd_error *err) {
    const bd_status s = faulty_pass(FAULTY_PLANE, err);
    return s == BD_OK ? bd_backend_cpu_ops()->plane_put(backend, dst, n, k, first_row, row_count,
                                                        src, src_stride_bytes, err)
                      : s;
}

/* The table, with nothing ordered. */
static inline const bd_backend_ops *faulty_ops(void) {
    faulty.ops = *bd_backend_cpu_ops();
    faulty.ops.open = faulty_open;
    faulty.ops.step_begin = faulty_begin;
    faulty.ops.linear = faulty_linear;
    faulty.ops.step_wait = faulty_wait;
    faulty.ops.plane_put = faulty_plane;
    atomic_store(&faulty.place, FAULTY_NOWHERE);
    atomic_store(&faulty.sticky, false);
    atomic_store(&faulty.lost, false);
    atomic_store(&faulty.release, false);
    return &faulty.ops;
}

/* Call number `calls` (from 0, of those to come) at `place` fails with `status`. */
static inline void faulty_order(faulty_place place, bd_status status, bool sticky, uint32_t calls) {
    atomic_store(&faulty.status, (int)status);
    atomic_store(&faulty.sticky, sticky);
    atomic_store(&faulty.calls, calls);
    atomic_store(&faulty.place, (int)place);
}

#endif
