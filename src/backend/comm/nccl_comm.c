/* nccl_comm.c - NCCL behind the table of backend/comm.h. The library is opened at run time: one
 * binary runs with it and without. Its prototypes are declared here, being few and, by its own
 * promise, stable; the configuration is the one of 2.17, which later ones read by its size.
 *
 * Communicators do not block: whatever waits for a peer returns "in progress", and is asked again
 * until it is done, the group is broken, or the deadline is over. What runs on the device is not
 * waited for here: who waits for the step (step_wait has a deadline) calls poll meanwhile, and
 * abort when it gives up, which ends the kernels of every rank.
 *
 * Nothing but the unique id need pass between ranks before they meet, and messages name node, rank
 * and device, so that ranks of another node could join the same way.
 *
 * Threads: a comm's calls are its rank's, abort and close anybody's; each comm's lock is held
 * during its calls into NCCL, none of which waits. The group's lock is taken before a comm's, never
 * after. What ends communicators of a broken group is a thread of its own: the last ncclCommAbort
 * waits until no recorded step names them, and recordings live until their backends are closed. */
#include "nccl_comm.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"

enum { NCCL_OK = 0, NCCL_IN_PROGRESS = 7, NCCL_SUM = 0, NCCL_UINT8 = 1 };
enum { NCCL_MAGIC = (int)0xcafebeef, NCCL_UNDEFINED = INT_MIN, NCCL_CONFIG_VERSION = 21700 };
enum { SPIN_US = 300, ASK_AGAIN_US = 50, ABORT_LOCK_MS = 200, END_WAIT_S = 10 };

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

typedef struct nccl_config {
    size_t size;
    int magic, version;
    int blocking, cga_cluster_size, ctas_min, ctas_max;
    const char *net_name;
} nccl_config;

typedef struct nccl_comm nccl_comm; /* theirs */

typedef struct nccl_library {
    int (*get_version)(int *version);
    int (*get_unique_id)(nccl_id *id);
    int (*init_rank)(nccl_comm **comm, int rank_count, nccl_id id, int rank, nccl_config *config);
    int (*end)(nccl_comm *comm);
    int (*get_async_error)(nccl_comm *comm, int *state);
    int (*all_reduce)(const void *send, void *receive, size_t count, int type, int op,
                      nccl_comm *comm, void *stream);
    int (*all_gather)(const void *send, void *receive, size_t count, int type, nccl_comm *comm,
                      void *stream);
    const char *(*error_text)(int result);
    const char *(*last_error)(nccl_comm *comm);
} nccl_library;

typedef struct rank_comm {
    bd_comm base;
    pthread_mutex_t lock;
    nccl_comm *nccl; /* guarded by lock; NULL once aborted */
    uint32_t device_index;
} rank_comm;

typedef struct ending { /* communicators for a thread to end: its own */
    int (*end)(nccl_comm *comm);
    uint32_t count;
    nccl_comm *comms[BD_COMM_RANKS_MAX];
} ending;

typedef struct nccl_group {
    bd_comm_group base;
    nccl_library library;
    nccl_id id;
    char node[64];
    int version;
    _Atomic bool broken;
    pthread_mutex_t lock;
    char reason[320];                    /* guarded by lock */
    rank_comm *comms[BD_COMM_RANKS_MAX]; /* guarded by lock */
    uint32_t ender_count;                /* guarded by lock */
    pthread_t enders[BD_COMM_RANKS_MAX];
} nccl_group;

static nccl_group *group_of(const rank_comm *comm) {
    return (nccl_group *)comm->base.group;
}

/* ---- The library ---- */

/* ISO C knows no way from an object's pointer to a function's; POSIX says that the bits are one's.
 */
static bool find(void *handle, const char *name, void *function, const char **missing) {
    void *symbol = dlsym(handle, name);
    memcpy(function, &symbol, sizeof symbol);
    if (!symbol) *missing = name;
    return symbol != NULL;
}

static bd_status load(nccl_group *group, bd_error *err) {
    nccl_library *l = &group->library;
    const struct {
        const char *name;
        void *to; /* a pointer to a function */
    } names[] = {
        {"ncclGetVersion", &l->get_version},
        {"ncclGetUniqueId", &l->get_unique_id},
        {"ncclCommInitRankConfig", &l->init_rank},
        {"ncclCommAbort", &l->end},
        {"ncclCommGetAsyncError", &l->get_async_error},
        {"ncclAllReduce", &l->all_reduce},
        {"ncclAllGather", &l->all_gather},
        {"ncclGetErrorString", &l->error_text},
        {"ncclGetLastError", &l->last_error},
    };
    const char *missing = NULL;
    /* It keeps threads of its own, so it is never unloaded. */
    void *handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!handle)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "several GPUs need NCCL, which cannot be opened: %s", dlerror());
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (find(handle, names[i].name, names[i].to, &missing)) continue;
        dlclose(handle);
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "libnccl.so.2 lacks %s: NCCL 2.14 or later is needed", missing);
    }
    dlclose(handle);
    return BD_OK;
}

/* ---- Breaking ---- */

/* One rank's communicator, which it then has no more; NULL: none, or the rank's thread is inside
 * NCCL, keeps the lock, and will find the group broken when it comes back. */
static nccl_comm *take_comm(rank_comm *comm) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ABORT_LOCK_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    if (pthread_mutex_timedlock(&comm->lock, &until) != 0) return NULL;
    nccl_comm *nccl = comm->nccl;
    comm->nccl = NULL;
    pthread_mutex_unlock(&comm->lock);
    return nccl;
}

/* Ends the communicators and what they have on the devices. */
static void *end_all(void *arg) {
    ending *e = arg;
    for (uint32_t i = 0; i < e->count; i++)
        (void)e->end(e->comms[i]);
    free(e);
    return NULL;
}

/* With the group's lock held. Again for a rank whose thread was inside NCCL before. */
static void start_ending(nccl_group *group) {
    ending *e = calloc(1, sizeof *e);
    if (!e) return; /* closing ends them */
    e->end = group->library.end;
    for (uint32_t r = 0; r < group->base.rank_count; r++) {
        nccl_comm *nccl = group->comms[r] ? take_comm(group->comms[r]) : NULL;
        if (nccl) e->comms[e->count++] = nccl;
    }
    if (e->count == 0) {
        free(e);
        return;
    }
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&group->enders[group->ender_count], NULL, end_all, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0)
        group->ender_count++; /* each has a communicator: there are no more than ranks */
    else
        (void)end_all(e);
}

/* The first reason stays. No comm's lock is held by the caller. */
static void break_group(nccl_group *group, const char *reason) {
    pthread_mutex_lock(&group->lock);
    if (!atomic_load(&group->broken)) {
        (void)snprintf(group->reason, sizeof group->reason, "%s", reason);
        atomic_store(&group->broken, true);
    }
    start_ending(group);
    pthread_mutex_unlock(&group->lock);
}

static bd_status broken(nccl_group *group, bd_error *err) {
    pthread_mutex_lock(&group->lock);
    const bd_status status = bd_fail(err, BD_E_DEVICE, "tensor_parallel",
                                     "the ranks lost each other: %s", group->reason);
    pthread_mutex_unlock(&group->lock);
    return status;
}

static bd_status break_with(rank_comm *comm, const char *what, const char *text, bd_error *err) {
    nccl_group *group = group_of(comm);
    char reason[sizeof group->reason];
    (void)snprintf(reason, sizeof reason, "rank %u (node %s, device %u, NCCL %d.%d.%d), %s: %s",
                   comm->base.rank, group->node, comm->device_index, group->version / 10000,
                   group->version / 100 % 100, group->version % 100, what, text);
    break_group(group, reason);
    return broken(group, err);
}

static bd_status nccl_fault(rank_comm *comm, const char *what, int result, bd_error *err) {
    const nccl_library *l = &group_of(comm)->library;
    char text[200];
    pthread_mutex_lock(&comm->lock);
    const char *last = comm->nccl ? l->last_error(comm->nccl) : NULL;
    (void)snprintf(text, sizeof text, "%s%s%s", l->error_text(result), last && *last ? "; " : "",
                   last ? last : "");
    pthread_mutex_unlock(&comm->lock);
    return break_with(comm, what, text, err);
}

/* ---- Waiting ---- */

/* The state of what was called before; NCCL_OK where the communicator is gone, as `broken` tells.
 */
static int state_of(rank_comm *comm) {
    int state = NCCL_OK;
    pthread_mutex_lock(&comm->lock);
    if (comm->nccl) {
        const int result = group_of(comm)->library.get_async_error(comm->nccl, &state);
        if (result != NCCL_OK && result != NCCL_IN_PROGRESS) state = result;
    }
    pthread_mutex_unlock(&comm->lock);
    return state;
}

/* What a call left in progress is done, failed, or takes too long. */
static bd_status wait_ready(rank_comm *comm, const char *what, bd_error *err) {
    nccl_group *group = group_of(comm);
    const uint64_t begin_us = bd_now_us(), wait_us = group->base.wait_us_max;
    const struct timespec pause = {.tv_nsec = ASK_AGAIN_US * 1000L};
    for (;;) {
        if (atomic_load(&group->broken)) return broken(group, err);
        const int state = state_of(comm);
        if (state == NCCL_OK) return atomic_load(&group->broken) ? broken(group, err) : BD_OK;
        if (state != NCCL_IN_PROGRESS) return nccl_fault(comm, what, state, err);
        const uint64_t waited_us = bd_now_us() - begin_us;
        if (waited_us > wait_us) {
            char text[80];
            (void)snprintf(text, sizeof text, "the others did not come within %llu ms",
                           (unsigned long long)(wait_us / 1000u));
            return break_with(comm, what, text, err);
        }
        /* A launch is "in progress" for some 20 us: NCCL makes it on a thread of its own. */
        if (waited_us < SPIN_US)
            (void)sched_yield();
        else
            (void)nanosleep(&pause, NULL);
    }
}

static bd_status after_call(rank_comm *comm, const char *what, int result, bd_error *err) {
    if (result == NCCL_IN_PROGRESS) return wait_ready(comm, what, err);
    if (result != NCCL_OK && comm->base.recording)
        return bd_fail(err, BD_E_DEVICE, "tensor_parallel", "NCCL cannot record %s: %s", what,
                       group_of(comm)->library.error_text(result));
    if (result != NCCL_OK) return nccl_fault(comm, what, result, err);
    return BD_OK;
}

/* ---- Collectives ---- */

static int type_of(bd_comm_type type) {
    switch (type) {
    case BD_COMM_F32:
        return 7;
    case BD_COMM_BF16:
        return 9;
    case BD_COMM_F16:
        break;
    }
    return 6;
}

bd_status bd_nccl_all_reduce(bd_comm *base, void *data, uint64_t count, bd_comm_type type,
                             void *stream, bd_error *err) {
    rank_comm *comm = (rank_comm *)base;
    int result = NCCL_OK;
    pthread_mutex_lock(&comm->lock);
    nccl_comm *nccl = comm->nccl;
    if (nccl)
        result = group_of(comm)->library.all_reduce(data, data, (size_t)count, type_of(type),
                                                    NCCL_SUM, nccl, stream);
    pthread_mutex_unlock(&comm->lock);
    return nccl ? after_call(comm, "all_reduce", result, err) : broken(group_of(comm), err);
}

bd_status bd_nccl_all_gather(bd_comm *base, const void *send, void *receive, uint64_t bytes,
                             void *stream, bd_error *err) {
    rank_comm *comm = (rank_comm *)base;
    int result = NCCL_OK;
    pthread_mutex_lock(&comm->lock);
    nccl_comm *nccl = comm->nccl;
    if (nccl)
        result = group_of(comm)->library.all_gather(send, receive, (size_t)bytes, NCCL_UINT8, nccl,
                                                    stream);
    pthread_mutex_unlock(&comm->lock);
    return nccl ? after_call(comm, "all_gather", result, err) : broken(group_of(comm), err);
}

bd_status bd_nccl_poll(bd_comm *base, bd_error *err) {
    rank_comm *comm = (rank_comm *)base;
    const int state = state_of(comm);
    if (state != NCCL_OK && state != NCCL_IN_PROGRESS)
        return nccl_fault(comm, "a call before", state, err);
    return atomic_load(&group_of(comm)->broken) ? broken(group_of(comm), err) : BD_OK;
}

/* ---- Groups and comms ---- */

void bd_nccl_abort(bd_comm_group *base) {
    break_group((nccl_group *)base, "one of them failed");
}

void bd_nccl_group_destroy(bd_comm_group *base) {
    nccl_group *group = (nccl_group *)base;
    if (!group) return;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += END_WAIT_S;
    for (uint32_t i = 0; i < group->ender_count; i++)
        if (pthread_timedjoin_np(group->enders[i], NULL, &until) != 0)
            pthread_detach(group->enders[i]);
    pthread_mutex_destroy(&group->lock);
    free(group);
}

bd_status bd_nccl_group_create(const bd_comm_ops *ops, uint32_t rank_count, uint64_t wait_us_max,
                               bd_comm_group **out, bd_error *err) {
    *out = NULL;
    if (rank_count < 2 || rank_count > BD_COMM_RANKS_MAX)
        return bd_fail(err, BD_E_ARGUMENT, "tensor_parallel", "%u ranks are not 2 to %u",
                       rank_count, BD_COMM_RANKS_MAX);
    nccl_group *group = calloc(1, sizeof *group);
    if (!group) return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for a group");
    group->base = (bd_comm_group){.ops = ops, .rank_count = rank_count, .wait_us_max = wait_us_max};
    pthread_mutex_init(&group->lock, NULL);
    if (gethostname(group->node, sizeof group->node - 1) != 0)
        (void)snprintf(group->node, sizeof group->node, "unknown");
    /* Sums in the switch (NVLS) make multicast objects in the NVSwitches, which all programs of the
     * host share: one that dies with them can leave GPUs unusable until they are reset. The sums of
     * a decode step are small, where NVLS gains nothing. An operator's own setting stays. */
    (void)setenv("NCCL_NVLS_ENABLE", "0", 0);
    bd_status status = load(group, err);
    if (status == BD_OK) {
        int result = group->library.get_version(&group->version);
        if (result == NCCL_OK) result = group->library.get_unique_id(&group->id);
        if (result != NCCL_OK)
            status = bd_fail(err, BD_E_DEVICE, "tensor_parallel", "NCCL cannot start: %s",
                             group->library.error_text(result));
    }
    if (status != BD_OK) {
        bd_nccl_group_destroy(&group->base);
        return status;
    }
    *out = &group->base;
    return BD_OK;
}

/* ncclCommDestroy would wait for the other ranks. */
void bd_nccl_close(bd_comm *base) {
    rank_comm *comm = (rank_comm *)base;
    if (!comm) return;
    nccl_group *group = group_of(comm);
    pthread_mutex_lock(&group->lock);
    group->comms[comm->base.rank] = NULL;
    pthread_mutex_unlock(&group->lock);
    nccl_comm *nccl = take_comm(comm);
    if (nccl) (void)group->library.end(nccl);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

bd_status bd_nccl_open(bd_comm_group *base, uint32_t rank, uint32_t device_index, bd_comm **out,
                       bd_error *err) {
    nccl_group *group = (nccl_group *)base;
    nccl_config config = {.size = sizeof config,
                          .magic = NCCL_MAGIC,
                          .version = NCCL_CONFIG_VERSION,
                          .blocking = 0,
                          .cga_cluster_size = NCCL_UNDEFINED,
                          .ctas_min = NCCL_UNDEFINED,
                          .ctas_max = NCCL_UNDEFINED};
    *out = NULL;
    BD_ASSERT(rank < base->rank_count);
    rank_comm *comm = calloc(1, sizeof *comm);
    if (!comm) { /* the others must not wait for it */
        break_group(group, "one of them had no memory");
        return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for rank %u", rank);
    }
    comm->base =
        (bd_comm){.ops = base->ops, .group = base, .rank = rank, .rank_count = base->rank_count};
    comm->device_index = device_index;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_mutex_lock(&group->lock);
    BD_ASSERT(!group->comms[rank]);
    group->comms[rank] = comm;
    pthread_mutex_unlock(&group->lock);
    bd_status status = BD_OK;
    if (atomic_load(&group->broken)) {
        status = broken(group, err);
    } else {
        pthread_mutex_lock(&comm->lock);
        const int result = group->library.init_rank(&comm->nccl, (int)base->rank_count, group->id,
                                                    (int)rank, &config);
        pthread_mutex_unlock(&comm->lock);
        status = after_call(comm, "meeting the others", result, err);
        /* Broken between the look and the call: nobody else would end it. */
        if (status == BD_OK && atomic_load(&group->broken)) status = broken(group, err);
    }
    if (status != BD_OK) {
        bd_nccl_close(&comm->base);
        return status;
    }
    *out = &comm->base;
    return BD_OK;
}
