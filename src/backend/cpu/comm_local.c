/* comm_local.c - ranks that are threads of this process: sums and gathers through its memory.
 * A collective is two meetings of all ranks with the work between them: after the first every
 * rank's buffer may be read, after the second it is its owner's again. Of a sum each rank makes one
 * part of all the outputs, adding in the order of the ranks, and writes it to everybody, so all
 * have the same bits.
 * Threads: each comm its rank's; the group's words are atomic; a rank sleeps under the lock only.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/backend/comm.h"
#include "bitdelta/base/clock.h"
#include "bitdelta/base/pool.h"

enum { LINE_FLOATS = 16, SPIN_US = 20 };

typedef struct local_group {
    bd_comm_group base;
    pthread_mutex_t lock;
    pthread_cond_t met;
    _Atomic uint64_t meeting; /* number of meetings held; changes when the last rank comes */
    _Atomic bool broken;
    uint32_t here;                    /* guarded by lock: ranks that wait for the others */
    char reason[96];                  /* guarded by lock */
    uint64_t spin_us;                 /* 0: the ranks share cores */
    void *buffers[BD_COMM_RANKS_MAX]; /* each its rank's to write, between meetings */
} local_group;

static local_group *group_of(const bd_comm *comm) {
    return (local_group *)comm->group;
}

static void break_group(local_group *group, const char *reason) {
    if (!atomic_load(&group->broken)) {
        (void)snprintf(group->reason, sizeof group->reason, "%s", reason);
        atomic_store(&group->broken, true);
    }
    pthread_cond_broadcast(&group->met);
}

/* With the lock held. */
static bd_status broken(local_group *group, bd_error *err) {
    return bd_fail(err, BD_E_DEVICE, "tensor_parallel", "the ranks lost each other: %s",
                   group->reason);
}

/* With the lock held; true: the meeting was held. */
static bool sleep_until_met(local_group *group, uint64_t meeting) {
    uint64_t left_us = group->base.wait_us_max;
    while (atomic_load(&group->meeting) == meeting && !atomic_load(&group->broken)) {
        if (bd_cond_wait_us(&group->met, &group->lock, &left_us)) continue;
        char reason[96];
        (void)snprintf(reason, sizeof reason, "%u of %u did not come within %" PRIu64 " ms",
                       group->base.rank_count - group->here, group->base.rank_count,
                       group->base.wait_us_max / 1000u);
        break_group(group, reason);
    }
    return atomic_load(&group->meeting) != meeting;
}

static void spin(const local_group *group, uint64_t meeting) {
    if (group->spin_us == 0) return;
    const uint64_t until_us = bd_now_us() + group->spin_us;
    while (atomic_load_explicit(&group->meeting, memory_order_acquire) == meeting &&
           !atomic_load_explicit(&group->broken, memory_order_relaxed) && bd_now_us() < until_us) {
    }
}

/* Returns when all ranks have called it as often as this one. */
static bd_status meet(local_group *group, bd_error *err) {
    pthread_mutex_lock(&group->lock);
    const uint64_t meeting = atomic_load(&group->meeting);
    bool met = false;
    if (!atomic_load(&group->broken) && ++group->here == group->base.rank_count) {
        group->here = 0;
        atomic_store_explicit(&group->meeting, meeting + 1, memory_order_release);
        pthread_cond_broadcast(&group->met);
        met = true;
    }
    if (!met && !atomic_load(&group->broken)) {
        pthread_mutex_unlock(&group->lock);
        spin(group, meeting);
        pthread_mutex_lock(&group->lock);
        met = sleep_until_met(group, meeting);
    }
    const bd_status status = met ? BD_OK : broken(group, err);
    pthread_mutex_unlock(&group->lock);
    return status;
}

static bd_status meet_with(bd_comm *comm, void *buffer, bd_error *err) {
    local_group *group = group_of(comm);
    group->buffers[comm->rank] = buffer;
    return meet(group, err);
}

/* Floats [from, to) of every buffer become their sum. */
static void sum_part(local_group *group, uint64_t from, uint64_t to) {
    const uint32_t ranks = group->base.rank_count;
    float sum[256];
    for (uint64_t at = from; at < to;) {
        const uint64_t n = to - at < 256 ? to - at : 256;
        memcpy(sum, (const float *)group->buffers[0] + at, n * sizeof *sum);
        for (uint32_t r = 1; r < ranks; r++) {
            const float *other = (const float *)group->buffers[r] + at;
            for (uint64_t i = 0; i < n; i++)
                sum[i] += other[i];
        }
        for (uint32_t r = 0; r < ranks; r++)
            memcpy((float *)group->buffers[r] + at, sum, n * sizeof *sum);
        at += n;
    }
}

static bd_status local_all_reduce(bd_comm *comm, void *data, uint64_t count, bd_comm_type type,
                                  void *stream, bd_error *err) {
    (void)stream;
    if (type != BD_COMM_F32)
        return bd_fail(err, BD_E_UNSUPPORTED, "all_reduce", "threads sum float32 alone");
    local_group *group = group_of(comm);
    bd_status status = meet_with(comm, data, err);
    if (status != BD_OK) return status;
    /* Whole cache lines, so that no two ranks write to one. */
    const uint64_t lines = (count + LINE_FLOATS - 1) / LINE_FLOATS;
    uint64_t from = lines * comm->rank / comm->rank_count * LINE_FLOATS,
             to = lines * (comm->rank + 1) / comm->rank_count * LINE_FLOATS;
    if (to > count) to = count;
    if (from < to) sum_part(group, from, to);
    return meet(group, err);
}

static bd_status local_all_gather(bd_comm *comm, const void *send, void *receive, uint64_t bytes,
                                  void *stream, bd_error *err) {
    (void)stream;
    local_group *group = group_of(comm);
    /* Read only; the array is the same for sums. */
    bd_status status = meet_with(comm, (void *)(uintptr_t)send, err);
    if (status != BD_OK) return status;
    for (uint32_t r = 0; r < comm->rank_count; r++) {
        uint8_t *to = (uint8_t *)receive + r * bytes;
        if (bytes > 0 && to != group->buffers[r]) memcpy(to, group->buffers[r], (size_t)bytes);
    }
    return meet(group, err);
}

static bd_status local_poll(bd_comm *comm, bd_error *err) {
    local_group *group = group_of(comm);
    if (!atomic_load(&group->broken)) return BD_OK;
    pthread_mutex_lock(&group->lock);
    const bd_status status = broken(group, err);
    pthread_mutex_unlock(&group->lock);
    return status;
}

static void local_abort(bd_comm_group *base) {
    local_group *group = (local_group *)base;
    pthread_mutex_lock(&group->lock);
    break_group(group, "one of them failed");
    pthread_mutex_unlock(&group->lock);
}

static bd_status local_group_create(uint32_t rank_count, uint64_t wait_us_max, bd_comm_group **out,
                                    bd_error *err) {
    *out = NULL;
    if (rank_count < 2 || rank_count > BD_COMM_RANKS_MAX)
        return bd_fail(err, BD_E_ARGUMENT, "tensor_parallel", "%u ranks are not 2 to %u",
                       rank_count, BD_COMM_RANKS_MAX);
    local_group *group = calloc(1, sizeof *group);
    if (!group) return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for a group");
    group->base = (bd_comm_group){
        .ops = bd_comm_local_ops(), .rank_count = rank_count, .wait_us_max = wait_us_max};
    group->spin_us = bd_usable_cores() >= rank_count ? SPIN_US : 0;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&group->lock, NULL);
    pthread_cond_init(&group->met, &attributes);
    pthread_condattr_destroy(&attributes);
    *out = &group->base;
    return BD_OK;
}

static void local_group_destroy(bd_comm_group *base) {
    if (!base) return;
    local_group *group = (local_group *)base;
    pthread_cond_destroy(&group->met);
    pthread_mutex_destroy(&group->lock);
    free(group);
}

static bd_status local_open(bd_comm_group *base, uint32_t rank, uint32_t device_index,
                            bd_comm **out, bd_error *err) {
    (void)device_index;
    *out = NULL;
    BD_ASSERT(rank < base->rank_count);
    bd_comm *comm = calloc(1, sizeof *comm);
    if (!comm) { /* the others must not wait for it */
        local_abort(base);
        return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for rank %u", rank);
    }
    *comm =
        (bd_comm){.ops = base->ops, .group = base, .rank = rank, .rank_count = base->rank_count};
    const bd_status status = meet((local_group *)base, err);
    if (status != BD_OK) {
        free(comm);
        return status;
    }
    *out = comm;
    return BD_OK;
}

static void local_close(bd_comm *comm) {
    free(comm);
}

static const bd_comm_ops local_ops = {
    .name = "local",
    .group_create = local_group_create,
    .group_destroy = local_group_destroy,
    .open = local_open,
    .close = local_close,
    .all_reduce = local_all_reduce,
    .all_gather = local_all_gather,
    .poll = local_poll,
    .abort = local_abort,
};

const bd_comm_ops *bd_comm_local_ops(void) {
    return &local_ops;
}
