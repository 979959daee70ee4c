/* peers.c - see peers.h. Windows are allocated, and made reachable, before any rank launches
 * anything that waits for another: both may make the driver wait for a device. They are freed only
 * with the group, when nothing runs any more. */
#include "peers.h"

#include <cuda_runtime_api.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

/* A meeting waits for ranks that load weights, which takes as long as it takes: one that fails
 * aborts. */
#define MEETING_WAIT_US 86400000000u
#define CONTROL_WORDS   32u /* of a rank: a line of its own */
#define WINDOW_LINES    (CUDA_WINDOW_BYTES / 8u)

typedef struct peer {
    bd_comm *meeting;
    int device, sm_count;
    uint8_t *window; /* and behind it the state */
    bool usable;     /* the same on all ranks */
    k_ranks ranks;
} peer;

struct cuda_peers {
    uint32_t rank_count, own_bytes;
    uint64_t wait_us;
    bd_comm_group *meetings;
    unsigned *control; /* [rank_count][CONTROL_WORDS], page-locked; NULL: no windows */
    _Atomic bool aborted;
    peer ranks[BD_COMM_RANKS_MAX];
};

static const bd_comm_ops *meeting_ops(void) {
    return bd_comm_local_ops();
}

bd_status cuda_peers_create(uint32_t rank_count, uint64_t wait_us_max, uint32_t own_bytes,
                            cuda_peers **out, bd_error *err) {
    *out = NULL;
    BD_ASSERT(own_bytes <= CUDA_WINDOW_BYTES);
    cuda_peers *peers = calloc(1, sizeof *peers);
    if (!peers) return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for a group");
    peers->rank_count = rank_count;
    peers->own_bytes = own_bytes;
    peers->wait_us = wait_us_max;
    const bd_status s =
        meeting_ops()->group_create(rank_count, MEETING_WAIT_US, &peers->meetings, err);
    if (s != BD_OK) {
        free(peers);
        return s;
    }
    const size_t bytes = rank_count * CONTROL_WORDS * sizeof *peers->control;
    if (own_bytes) { /* zeroed below; without it there are no windows */
        if (cudaHostAlloc((void **)&peers->control, bytes,
                          cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
            (void)cudaGetLastError();
            peers->control = NULL;
        }
        for (uint32_t i = 0; peers->control && i < rank_count * CONTROL_WORDS; i++)
            peers->control[i] = 0;
    }
    *out = peers;
    return BD_OK;
}

void cuda_peers_destroy(cuda_peers *peers) {
    if (!peers) return;
    for (uint32_t r = 0; r < peers->rank_count; r++) {
        if (!peers->ranks[r].window) continue;
        (void)cudaSetDevice(peers->ranks[r].device);
        (void)cudaFree(peers->ranks[r].window);
    }
    if (peers->control) (void)cudaFreeHost(peers->control);
    meeting_ops()->group_destroy(peers->meetings);
    free(peers);
}

bd_status cuda_peers_meet(cuda_peers *peers, uint32_t rank, bool yes, bool *all, bd_error *err) {
    bd_comm *meeting = peers->ranks[rank].meeting;
    float count = yes ? 1.0f : 0.0f;
    const bd_status s = meeting->ops->all_reduce(meeting, &count, 1, BD_COMM_F32, NULL, err);
    *all = s == BD_OK && count == (float)peers->rank_count;
    return s;
}

static bool window_open(cuda_peers *peers, peer *own) {
    const size_t window = k_ranks_window_bytes((int)peers->rank_count, WINDOW_LINES);
    const size_t bytes = window + K_RANKS_STATE * sizeof(unsigned);
    const bool made = cudaMalloc((void **)&own->window, bytes) == cudaSuccess &&
                      cudaMemset(own->window, 0, bytes) == cudaSuccess &&
                      cudaDeviceGetAttribute(&own->sm_count, cudaDevAttrMultiProcessorCount,
                                             own->device) == cudaSuccess &&
                      cudaDeviceSynchronize() == cudaSuccess;
    (void)cudaGetLastError(); /* no window is no fault */
    return made;
}

static bool reaches(const peer *own, const peer *other) {
    int can = 0;
    if (own->device == other->device) return true;
    cudaError_t error = cudaDeviceCanAccessPeer(&can, own->device, other->device);
    if (error == cudaSuccess && can) {
        error = cudaDeviceEnablePeerAccess(other->device, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
    }
    (void)cudaGetLastError();
    return error == cudaSuccess && can;
}

/* A rank whose turn has not come must find multiprocessors that no waiting rank is on. The same on
 * all ranks. */
static int32_t blocks_max(const cuda_peers *peers) {
    int most = 1, least_sms = peers->ranks[0].sm_count;
    for (uint32_t r = 0; r < peers->rank_count; r++) {
        int here = 0;
        for (uint32_t other = 0; other < peers->rank_count; other++)
            here += peers->ranks[other].device == peers->ranks[r].device ? 1 : 0;
        if (here > most) most = here;
        if (peers->ranks[r].sm_count < least_sms) least_sms = peers->ranks[r].sm_count;
    }
    if (most == 1) return K_RANKS_BLOCKS;
    const int32_t room = least_sms / 2 / (most - 1);
    return room < 1 ? 1 : room < K_RANKS_BLOCKS ? room : K_RANKS_BLOCKS;
}

static void fill(cuda_peers *peers, uint32_t rank) {
    peer *own = &peers->ranks[rank];
    const size_t window = k_ranks_window_bytes((int)peers->rank_count, WINDOW_LINES);
    own->ranks = (k_ranks){.state = (unsigned *)(void *)(own->window + window),
                           .control = peers->control + (size_t)rank * CONTROL_WORDS,
                           .wait_ns = peers->wait_us * 1000u,
                           .lines_max = WINDOW_LINES,
                           .rank = (int32_t)rank,
                           .rank_count = (int32_t)peers->rank_count,
                           .blocks_max = blocks_max(peers),
                           .early = true};
    for (uint32_t r = 0; r < peers->rank_count; r++) {
        own->ranks.windows[r] = peers->ranks[r].window;
        for (uint32_t other = 0; other < r; other++)
            if (peers->ranks[other].device == peers->ranks[r].device) own->ranks.early = false;
    }
}

bd_status cuda_peers_join(cuda_peers *peers, uint32_t rank, uint32_t device, bd_error *err) {
    peer *own = &peers->ranks[rank];
    bool all = false;
    own->device = (int)device;
    bd_status s = meeting_ops()->open(peers->meetings, rank, 0, &own->meeting, err);
    if (s != BD_OK || !peers->own_bytes) return s;
    s = cuda_peers_meet(peers, rank, peers->control && window_open(peers, own), &all, err);
    if (s != BD_OK || !all) return s;
    bool mine = true;
    for (uint32_t r = 0; r < peers->rank_count; r++)
        mine = mine && reaches(own, &peers->ranks[r]);
    s = cuda_peers_meet(peers, rank, mine, &all, err);
    if (s == BD_OK && all) fill(peers, rank);
    own->usable = s == BD_OK && all;
    return s;
}

void cuda_peers_leave(cuda_peers *peers, uint32_t rank) {
    meeting_ops()->close(peers->ranks[rank].meeting);
    peers->ranks[rank].meeting = NULL;
}

/* Words that a kernel reads and writes while the host does. */
static void control_set(cuda_peers *peers, uint32_t rank) {
    if (peers->control)
        __atomic_store_n(&peers->control[(size_t)rank * CONTROL_WORDS], 1u, __ATOMIC_SEQ_CST);
}

void cuda_peers_abort(cuda_peers *peers) {
    atomic_store(&peers->aborted, true);
    for (uint32_t r = 0; r < peers->rank_count; r++)
        control_set(peers, r);
    meeting_ops()->abort(peers->meetings);
}

bd_status cuda_peers_poll(cuda_peers *peers, uint32_t rank, bd_error *err) {
    if (peers->control &&
        __atomic_load_n(&peers->control[(size_t)rank * CONTROL_WORDS + 1], __ATOMIC_SEQ_CST)) {
        cuda_peers_abort(peers); /* what this rank makes means nothing from here on */
        return bd_fail(err, BD_E_DEVICE, "tensor_parallel",
                       "the ranks lost each other: rank %u waited for the others for %" PRIu64
                       " ms",
                       rank, peers->wait_us / 1000u);
    }
    if (!atomic_load(&peers->aborted)) return BD_OK;
    return bd_fail(err, BD_E_DEVICE, "tensor_parallel",
                   "the ranks lost each other: one of them failed");
}

const k_ranks *cuda_peers_ranks(const cuda_peers *peers, uint32_t rank) {
    return peers->ranks[rank].usable ? &peers->ranks[rank].ranks : NULL;
}

uint32_t cuda_peers_own_bytes(const cuda_peers *peers) {
    return peers->own_bytes;
}
