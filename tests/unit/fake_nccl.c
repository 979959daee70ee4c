/* A libnccl.so.2 over host memory for test_backend_comm_nccl.c: ranks are threads, sums are done at
 * once in float64, "streams" are ignored. fake_nccl_plan says what goes wrong. Built as a shared
 * library of that name; with FAKE_NCCL_OLD it lacks what came with 2.14. */
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_nccl.h"

#define EXPORT __attribute__((visibility("default")))

enum { OK = 0, UNHANDLED_CUDA = 1, INVALID = 4, REMOTE = 6, IN_PROGRESS = 7, RANKS = 8 };

typedef struct fake_id {
    char bytes[128];
} fake_id;

typedef struct fake_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min, max;
    const char *net;
} fake_config;

typedef struct comm {
    int rank, count, state;
    bool waiting; /* for the others, at `turn` */
    uint64_t turn;
} comm;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t met = PTHREAD_COND_INITIALIZER;
static fake_nccl_plan plan;
static fake_nccl_seen seen;
static comm *comms[RANKS]; /* of the one communicator */
static const void *sends[RANKS];
static uint64_t turns[RANKS], turn;
static int here;

EXPORT void fake_nccl_reset(const fake_nccl_plan *to);
EXPORT void fake_nccl_look(fake_nccl_seen *out);

void fake_nccl_reset(const fake_nccl_plan *to) {
    pthread_mutex_lock(&lock);
    plan = *to;
    seen = (fake_nccl_seen){.nvls = -1};
    memset(comms, 0, sizeof comms);
    memset(turns, 0, sizeof turns);
    here = 0;
    turn = 0;
    pthread_mutex_unlock(&lock);
}

void fake_nccl_look(fake_nccl_seen *out) {
    pthread_mutex_lock(&lock);
    *out = seen;
    pthread_mutex_unlock(&lock);
}

EXPORT int ncclGetVersion(int *version);
EXPORT int ncclGetUniqueId(fake_id *out);
EXPORT int ncclCommInitRankConfig(comm **out, int count, fake_id of, int rank, fake_config *config);
EXPORT int ncclCommAbort(comm *c);
EXPORT int ncclCommGetAsyncError(comm *c, int *state);
EXPORT int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, comm *c,
                         void *stream);
EXPORT int ncclAllGather(const void *send, void *receive, size_t count, int type, comm *c,
                         void *stream);
EXPORT const char *ncclGetErrorString(int result);
EXPORT const char *ncclGetLastError(comm *c);

int ncclGetVersion(int *version) {
    *version = 22803;
    return OK;
}

int ncclGetUniqueId(fake_id *out) {
    const char *nvls = getenv("NCCL_NVLS_ENABLE");
    pthread_mutex_lock(&lock);
    seen.nvls = nvls ? atoi(nvls) : -1;
    const int result = plan.no_id ? UNHANDLED_CUDA : OK;
    pthread_mutex_unlock(&lock);
    memset(out->bytes, 0x5a, sizeof out->bytes);
    return result;
}

#ifndef FAKE_NCCL_OLD
/* With the lock held: c has come to its next turn; the last to come lets all go on. */
static void arrive(comm *c) {
    c->waiting = true;
    c->turn = turn;
    if (++here == c->count) {
        here = 0;
        turn++;
        pthread_cond_broadcast(&met);
    }
}

int ncclCommInitRankConfig(comm **out, int count, fake_id of, int rank, fake_config *config) {
    char expected[sizeof of.bytes];
    memset(expected, 0x5a, sizeof expected);
    if (memcmp(of.bytes, expected, sizeof expected) != 0) return INVALID;
    if (config->size < 40 || config->magic != 0xcafebeef || config->version < 21400 ||
        config->blocking != 0 || config->cga != INT_MIN || config->net)
        return INVALID;
    comm *c = calloc(1, sizeof *c);
    if (!c) return UNHANDLED_CUDA;
    *c = (comm){.rank = rank, .count = count};
    pthread_mutex_lock(&lock);
    comms[rank] = c;
    seen.inits++;
    if (plan.init_error && rank == plan.rank) c->state = UNHANDLED_CUDA;
    if (!(plan.init_hang && rank == plan.rank)) arrive(c);
    pthread_mutex_unlock(&lock);
    *out = c;
    return IN_PROGRESS;
}
#endif

int ncclCommAbort(comm *c) {
    pthread_mutex_lock(&lock);
    while (plan.end_hang) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        pthread_mutex_lock(&lock);
    }
    seen.aborts++;
    comms[c->rank] = NULL;
    pthread_mutex_unlock(&lock);
    memset(c, 0xee, sizeof *c); /* whoever still uses it is seen */
    free(c);
    return OK;
}

int ncclCommGetAsyncError(comm *c, int *state) {
    pthread_mutex_lock(&lock);
    seen.polls++;
    *state = c->state;
    if (plan.async_error && c->rank == plan.rank) *state = REMOTE;
    if (*state == OK && c->waiting) {
        if (turn > c->turn)
            c->waiting = false;
        else
            *state = IN_PROGRESS;
    }
    if (*state == OK && plan.init_hang && c->rank == plan.rank) *state = IN_PROGRESS;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Values in the tests are whole numbers below 1024, exact in all types. */
static float element(const void *data, size_t i, int type) {
    const uint16_t *halves = data;
    float value;
    uint32_t bits = (uint32_t)((type == 7 ? 0 : halves[i]) & 0x7fff);
    if (type == 7) return ((const float *)data)[i];
    if (type == 9) {
        bits <<= 16;
    } else if (bits > 0) { /* fp16: another bias, 13 bits less */
        bits = (bits << 13) + ((127u - 15u) << 23);
    }
    memcpy(&value, &bits, sizeof value);
    return halves[i] & 0x8000 ? -value : value;
}

static void put(void *data, size_t i, int type, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (type == 7) {
        ((float *)data)[i] = value;
        return;
    }
    const uint32_t sign = bits >> 31 << 15, rest = bits & 0x7fffffff;
    const uint32_t fp16 = rest == 0 ? 0 : (rest - ((127u - 15u) << 23)) >> 13;
    ((uint16_t *)data)[i] = (uint16_t)(sign | (type == 9 ? rest >> 16 : fp16));
}

/* Blocks until all ranks have called it, as the device would; false: it is planned to go wrong. */
static bool meet(comm *c, const void *send) {
    const uint64_t now = turn;
    sends[c->rank] = send;
    if (++here == c->count) {
        here = 0;
        turn++;
        pthread_cond_broadcast(&met);
        return true;
    }
    while (turn == now)
        pthread_cond_wait(&met, &lock);
    return true;
}

static int begin(comm *c, int type, bool *done) {
    seen.calls++;
    seen.type = type;
    *done = true;
    if (plan.call_error && c->rank == plan.rank) return INVALID;
    if (plan.call_hang) { /* the peers never come: in progress for ever */
        c->state = IN_PROGRESS;
        return IN_PROGRESS;
    }
    *done = false;
    return OK;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, comm *c,
                  void *stream) {
    (void)stream;
    bool done;
    pthread_mutex_lock(&lock);
    const int result = begin(c, type, &done);
    if (done || op != 0) {
        pthread_mutex_unlock(&lock);
        return done ? result : INVALID;
    }
    float *sums = calloc(count + 1, sizeof *sums);
    if (!sums) abort();
    (void)meet(c, send);
    for (int r = 0; r < c->count; r++)
        for (size_t i = 0; i < count; i++)
            sums[i] += element(sends[r], i, type);
    (void)meet(c, send); /* all have read before any writes in place */
    for (size_t i = 0; i < count; i++)
        put(receive, i, type, sums[i]);
    pthread_mutex_unlock(&lock);
    free(sums);
    return result;
}

int ncclAllGather(const void *send, void *receive, size_t count, int type, comm *c, void *stream) {
    (void)stream;
    bool done;
    pthread_mutex_lock(&lock);
    const int result = begin(c, type, &done);
    if (!done) {
        (void)meet(c, send);
        for (int r = 0; r < c->count; r++)
            if ((char *)receive + (size_t)r * count != (const char *)sends[r])
                memcpy((char *)receive + (size_t)r * count, sends[r], count);
        (void)meet(c, send);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

const char *ncclGetErrorString(int result) {
    return result == REMOTE    ? "remote process exited or there was a network error"
           : result == INVALID ? "invalid argument"
                               : "unhandled cuda error";
}

const char *ncclGetLastError(comm *c) {
    (void)c;
    return "fake: planned";
}
