/* comm_p2p.c - ranks that meet through windows in each other's memory alone (peers.h): what is too
 * much for one call of the kernels is several. Threads: as backend/comm.h says; nothing waits on
 * the host but open. */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "bitdelta/backend/cuda.h"
#include "peers.h"

static void group_abort(bd_comm_group *group) {
    cuda_peers_abort(group->device);
}

static void comm_close(bd_comm *comm) {
    if (!comm) return;
    cuda_peers_leave(comm->group->device, comm->rank);
    free(comm);
}

static bd_status comm_open(bd_comm_group *group, uint32_t rank, uint32_t device_index,
                           bd_comm **out, bd_error *err) {
    *out = NULL;
    BD_ASSERT(rank < group->rank_count);
    bd_status s = BD_OK;
    bd_comm *comm = calloc(1, sizeof *comm);
    const cudaError_t error = cudaSetDevice((int)device_index);
    if (!comm)
        s = bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for rank %u", rank);
    else if (error != cudaSuccess)
        s = bd_fail(err, BD_E_DEVICE, "device", "device %u cannot be used: %s", device_index,
                    cudaGetErrorString(error));
    else
        s = cuda_peers_join(group->device, rank, device_index, err);
    if (s == BD_OK && !cuda_peers_ranks(group->device, rank))
        s = bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                    "the GPUs do not reach each other's memory");
    if (s != BD_OK) {
        group_abort(group); /* the others must not wait for it */
        cuda_peers_leave(group->device, rank);
        free(comm);
        return s;
    }
    *comm =
        (bd_comm){.ops = group->ops, .group = group, .rank = rank, .rank_count = group->rank_count};
    *out = comm;
    return BD_OK;
}

static bd_status launched(cudaError_t error, const char *what, bd_error *err) {
    if (error == cudaSuccess) return BD_OK;
    return bd_fail(err, error == cudaErrorInvalidValue ? BD_E_ARGUMENT : BD_E_DEVICE, what,
                   "CUDA error %d: %s", (int)error, cudaGetErrorString(error));
}

static bd_status comm_all_reduce(bd_comm *comm, void *data, uint64_t count, bd_comm_type type,
                                 void *stream, bd_error *err) {
    static const k_ranks_type types[] = {
        [BD_COMM_F32] = K_RANKS_F32, [BD_COMM_BF16] = K_RANKS_BF16, [BD_COMM_F16] = K_RANKS_F16};
    const k_ranks *ranks = cuda_peers_ranks(comm->group->device, comm->rank);
    const uint64_t bytes = count * (type == BD_COMM_F32 ? 4u : 2u);
    cudaError_t error = cudaSuccess;
    for (uint64_t at = 0; error == cudaSuccess && at < bytes; at += CUDA_WINDOW_BYTES) {
        const uint64_t n = bytes - at < CUDA_WINDOW_BYTES ? bytes - at : CUDA_WINDOW_BYTES;
        error = k_ranks_sum(ranks, (uint8_t *)data + at, (uint32_t)n, types[type], stream);
    }
    return launched(error, "all_reduce", err);
}

static bd_status comm_all_gather(bd_comm *comm, const void *send, void *receive, uint64_t bytes,
                                 void *stream, bd_error *err) {
    const k_ranks *ranks = cuda_peers_ranks(comm->group->device, comm->rank);
    cudaError_t error = bytes % 4 ? cudaErrorInvalidValue : cudaSuccess;
    for (uint64_t at = 0; error == cudaSuccess && at < bytes; at += CUDA_WINDOW_BYTES) {
        const uint64_t n = bytes - at < CUDA_WINDOW_BYTES ? bytes - at : CUDA_WINDOW_BYTES;
        error = k_ranks_gather(ranks, (const uint8_t *)send + at, (uint8_t *)receive + at,
                               (uint32_t)n, bytes, stream);
    }
    return launched(error, "all_gather", err);
}

static bd_status comm_poll(bd_comm *comm, bd_error *err) {
    return cuda_peers_poll(comm->group->device, comm->rank, err);
}

static void group_destroy(bd_comm_group *group) {
    if (!group) return;
    cuda_peers_destroy(group->device);
    free(group);
}

static bd_status group_create(uint32_t rank_count, uint64_t wait_us_max, bd_comm_group **out,
                              bd_error *err) {
    *out = NULL;
    if (rank_count < 2 || rank_count > BD_COMM_RANKS_MAX)
        return bd_fail(err, BD_E_ARGUMENT, "tensor_parallel", "%u ranks are not 2 to %u",
                       rank_count, BD_COMM_RANKS_MAX);
    bd_comm_group *group = calloc(1, sizeof *group);
    if (!group) return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for a group");
    cuda_peers *peers;
    const bd_status s = cuda_peers_create(rank_count, wait_us_max, CUDA_WINDOW_BYTES, &peers, err);
    *group = (bd_comm_group){.ops = bd_comm_p2p_ops(),
                             .rank_count = rank_count,
                             .wait_us_max = wait_us_max,
                             .device = peers};
    if (s != BD_OK) {
        group_destroy(group);
        return s;
    }
    *out = group;
    return BD_OK;
}

static const bd_comm_ops p2p_ops = {
    .name = "p2p",
    .group_create = group_create,
    .group_destroy = group_destroy,
    .open = comm_open,
    .close = comm_close,
    .all_reduce = comm_all_reduce,
    .all_gather = comm_all_gather,
    .poll = comm_poll,
    .abort = group_abort,
};

const bd_comm_ops *bd_comm_p2p_ops(void) {
    return &p2p_ops;
}
