/* nccl_comm.h - ranks that meet through NCCL: the members of backend/comm.h's table, which
 * backend/cuda/comm_nccl.c puts together with what needs CUDA's headers. Rules: backend/comm.h;
 * what is NCCL's own: nccl_comm.c. */
#ifndef BD_COMM_NCCL_H
#define BD_COMM_NCCL_H

#include "bitdelta/backend/comm.h"

/* ops: the table that groups and comms will name. */
bd_status bd_nccl_group_create(const bd_comm_ops *ops, uint32_t rank_count, uint64_t wait_us_max,
                               bd_comm_group **out, bd_error *err);
void bd_nccl_group_destroy(bd_comm_group *group);
/* The calling thread's current device is the rank's; device_index is for messages. */
bd_status bd_nccl_open(bd_comm_group *group, uint32_t rank, uint32_t device_index, bd_comm **out,
                       bd_error *err);
void bd_nccl_close(bd_comm *comm);
bd_status bd_nccl_all_reduce(bd_comm *comm, void *data, uint64_t count, bd_comm_type type,
                             void *stream, bd_error *err);
bd_status bd_nccl_all_gather(bd_comm *comm, const void *send, void *receive, uint64_t bytes,
                             void *stream, bd_error *err);
bd_status bd_nccl_poll(bd_comm *comm, bd_error *err);
void bd_nccl_abort(bd_comm_group *group);

#endif
