/* comm_nccl.c - NCCL's comms with the device they are for (NCCL takes the thread's current one),
 * and beside them the ranks' own windows and meetings. Threads: as comm/nccl_comm.c. */
#include <cuda_runtime_api.h>

#include "../comm/nccl_comm.h"
#include "bitdelta/backend/cuda.h"
#include "peers.h"

static void group_abort(bd_comm_group *group) {
    bd_nccl_abort(group);
    cuda_peers_abort(group->device);
}

static void comm_close(bd_comm *comm) {
    if (!comm) return;
    cuda_peers_leave(comm->group->device, comm->rank);
    bd_nccl_close(comm);
}

static bd_status open_on_device(bd_comm_group *group, uint32_t rank, uint32_t device_index,
                                bd_comm **out, bd_error *err) {
    *out = NULL;
    const cudaError_t error = cudaSetDevice((int)device_index);
    bd_status s;
    if (error != cudaSuccess)
        s = bd_fail(err, BD_E_DEVICE, "device", "device %u cannot be used: %s", device_index,
                    cudaGetErrorString(error));
    else
        s = bd_nccl_open(group, rank, device_index, out, err);
    if (s == BD_OK) {
        s = cuda_peers_join(group->device, rank, device_index, err);
        if (s == BD_OK) return BD_OK;
        comm_close(*out);
        *out = NULL;
    }
    group_abort(group); /* the others must not wait for it */
    return s;
}

static bd_status comm_poll(bd_comm *comm, bd_error *err) {
    const bd_status s = bd_nccl_poll(comm, err);
    return s == BD_OK ? cuda_peers_poll(comm->group->device, comm->rank, err) : s;
}

static void group_destroy(bd_comm_group *group) {
    if (!group) return;
    cuda_peers_destroy(group->device);
    bd_nccl_group_destroy(group);
}

static bd_status group_create(uint32_t rank_count, uint64_t wait_us_max, bd_comm_group **out,
                              bd_error *err) {
    cuda_peers *peers;
    int devices = 0;
    *out = NULL;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    if ((uint32_t)devices < rank_count)
        return bd_fail(err, BD_E_DEVICE, "tensor_parallel", "%u ranks take a GPU each, %d answer",
                       rank_count, devices);
    bd_status s = bd_nccl_group_create(bd_comm_nccl_ops(), rank_count, wait_us_max, out, err);
    if (s != BD_OK) return s;
    s = cuda_peers_create(rank_count, wait_us_max, cuda_own_bytes(rank_count), &peers, err);
    (*out)->device = peers;
    if (s == BD_OK) return BD_OK;
    group_destroy(*out);
    *out = NULL;
    return s;
}

static const bd_comm_ops nccl_ops = {
    .name = "nccl",
    .group_create = group_create,
    .group_destroy = group_destroy,
    .open = open_on_device,
    .close = comm_close,
    .all_reduce = bd_nccl_all_reduce,
    .all_gather = bd_nccl_all_gather,
    .poll = comm_poll,
    .abort = group_abort,
};

const bd_comm_ops *bd_comm_nccl_ops(void) {
    return &nccl_ops;
}
