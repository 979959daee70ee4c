/* comm_nccl.c - NCCL's comms with the device they are for: NCCL takes the thread's current one.
 * Threads: as comm/nccl_comm.c. */
#include <cuda_runtime_api.h>

#include "../comm/nccl_comm.h"
#include "bitdelta/backend/cuda.h"

static bd_status open_on_device(bd_comm_group *group, uint32_t rank, uint32_t device_index,
                                bd_comm **out, bd_error *err) {
    *out = NULL;
    const cudaError_t error = cudaSetDevice((int)device_index);
    if (error == cudaSuccess) return bd_nccl_open(group, rank, device_index, out, err);
    bd_nccl_abort(group); /* the others must not wait for it */
    return bd_fail(err, BD_E_DEVICE, "device", "device %u cannot be used: %s", device_index,
                   cudaGetErrorString(error));
}

static bd_status group_create(uint32_t rank_count, uint64_t wait_us_max, bd_comm_group **out,
                              bd_error *err) {
    return bd_nccl_group_create(bd_comm_nccl_ops(), rank_count, wait_us_max, out, err);
}

static const bd_comm_ops nccl_ops = {
    .name = "nccl",
    .group_create = group_create,
    .group_destroy = bd_nccl_group_destroy,
    .open = open_on_device,
    .close = bd_nccl_close,
    .all_reduce = bd_nccl_all_reduce,
    .all_gather = bd_nccl_all_gather,
    .poll = bd_nccl_poll,
    .abort = bd_nccl_abort,
};

const bd_comm_ops *bd_comm_nccl_ops(void) {
    return &nccl_ops;
}
