/* peers.h - what the ranks of one process on several GPUs share beside NCCL: meetings on the host,
 * and windows in each other's memory for the kernels of ranks.cu. Owner: the comms' group
 * (bd_comm_group.device). Threads: join, meet and poll the rank's, abort anybody's; create and
 * destroy before and after all ranks. */
#ifndef BD_CUDA_PEERS_H
#define BD_CUDA_PEERS_H

#include "bitdelta/backend/comm.h"
#include "ranks.h"

#define CUDA_WINDOW_BYTES (1u << 20) /* most that one call of the own kernels takes */

/* Up to so many bytes the ranks' own kernel sums instead of NCCL. Two ranks: all that it takes,
 * where it was the faster in every case on H200s joined by NVLink (bench/gpu_comm.c,
 * bench/results/gpu_comm_h200.csv). More ranks have not been measured. What a rank is sent grows
 * with their number, so they have it for what makes that at most half of what was measured. */
static inline uint32_t cuda_own_bytes(uint32_t rank_count) {
    return rank_count <= 2 ? CUDA_WINDOW_BYTES : CUDA_WINDOW_BYTES / (rank_count <= 4 ? 8u : 16u);
}

typedef struct cuda_peers cuda_peers;

/* own_bytes 0: no windows. */
bd_status cuda_peers_create(uint32_t rank_count, uint64_t wait_us_max, uint32_t own_bytes,
                            cuda_peers **out, bd_error *err);
void cuda_peers_destroy(cuda_peers *peers); /* once no rank has anything running; NULL is fine */
/* All ranks at once, each with its device current. Devices that do not reach each other are no
 * fault: cuda_peers_ranks tells, the same to all. */
bd_status cuda_peers_join(cuda_peers *peers, uint32_t rank, uint32_t device, bd_error *err);
void cuda_peers_leave(cuda_peers *peers, uint32_t rank);

/* Returns when all ranks have come: whether all of them said yes. BD_E_DEVICE: aborted. */
bd_status cuda_peers_meet(cuda_peers *peers, uint32_t rank, bool yes, bool *all, bd_error *err);
/* Ends meetings and the waits of kernels. */
void cuda_peers_abort(cuda_peers *peers);
/* BD_E_DEVICE: aborted, or a kernel of this rank waited too long. */
bd_status cuda_peers_poll(cuda_peers *peers, uint32_t rank, bd_error *err);

/* For the launchers of ranks.h; NULL: there are no windows. */
const k_ranks *cuda_peers_ranks(const cuda_peers *peers, uint32_t rank);
uint32_t cuda_peers_own_bytes(const cuda_peers *peers);

#endif
