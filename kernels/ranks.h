/* ranks.h - C launchers of ranks.cu: sums and gathers between devices of one process, each with a thread that makes the same calls in
 * the same order. Rules as in kernels.h; nothing is waited for on the host. */
#ifndef BITDELTA_KERNELS_RANKS_H
#define BITDELTA_KERNELS_RANKS_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define K_RANKS_MAX        8
#define K_LINE_BYTES       16
#define K_RANKS_STATE      3     /* words */
#define K_RANKS_CONTROL    2
#define K_RANKS_NORM_WIDTH 12000 /* a row in shared memory */
#define K_RANKS_BLOCKS     64    /* of a call, where no two ranks share a device */

typedef struct k_ranks {
    uint8_t *windows[K_RANKS_MAX]; /* each rank's, which all can write to; zero before the first call */
    unsigned *state;   /* this rank's, on its device: turns taken, blocks done, lost; zero before the first call */
    unsigned *control; /* host memory that the device sees: [0] the host ends all waits, [1] a wait came to its deadline */
    uint64_t wait_ns;
    uint32_t lines_max; /* a call is of at most 8 times as many bytes */
    int32_t rank, rank_count;
    int32_t blocks_max; /* of a call, the same on all ranks: those of all other ranks of a device must leave it room */
    bool early;         /* no two ranks share a device: the next kernel may take its place while k_ranks_norm waits */
} k_ranks;
typedef enum k_ranks_type { K_RANKS_F32, K_RANKS_BF16, K_RANKS_F16 } k_ranks_type;
uint64_t k_ranks_window_bytes(int rank_count, uint32_t lines_max);
/* In place; data 4-byte aligned, an even number of bytes. */
cudaError_t k_ranks_sum(const k_ranks *ranks, void *data, uint32_t bytes, k_ranks_type type, cudaStream_t stream);
/* receive + r * stride = rank r's send; all 4-byte aligned, an even number of bytes; send may be its own place in receive. */
cudaError_t k_ranks_gather(const k_ranks *ranks, const void *send, void *receive, uint32_t bytes, uint64_t stride, cudaStream_t stream);
/* k_norm_residual with add, of the sum of all ranks' proj. */
bool k_ranks_norm_takes(const k_ranks *ranks, int rows, int width, bool proj_half);
cudaError_t k_ranks_norm(const k_ranks *ranks, const k_norm_args *args, cudaStream_t stream);
/* whole[row][r * each + i] = parts[r][row][i]; whole: [rows, width], of which the first `total` columns are written */
cudaError_t k_join_logits(float *whole, const float *parts, int rows, int each, int total, int width, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
