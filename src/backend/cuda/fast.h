/* fast.h - the sm_90a path of the linears: which groups of a model qualify, tensor maps, tile
 * lists, launches. A group is fused: q, k, v (and gate, up) are one matrix, since their weights,
 * their sign planes and their scales lie one behind the other. What does not qualify goes through
 * the plain kernels (ops.c); the choice is per group and logged once by the server. */
#ifndef BD_CUDA_FAST_H
#define BD_CUDA_FAST_H

#include <cuda.h>

#include "bitdelta/backend/backend.h"
#include "kernels.h"

struct bd_cuda;

#define CUDA_GROUPS          4u /* bd_group */
#define CUDA_DECODE_ROWS_MAX 16u
#define CUDA_TICKETS         64u

enum { X_BOX_128, X_BOX_64, X_BOX_32, X_BOX_16, X_BOX_8, X_BOX_COUNT }; /* rows of a box of x */

typedef struct cuda_group {
    bool fast;
    bd_linear first; /* its matrices are first .. first + count - 1 */
    uint32_t count, n, k;
    CUtensorMap x[X_BOX_COUNT], y;
    const uint16_t *x_data;
    uint16_t *y_data;
} cuda_group;

typedef struct cuda_fast {
    bool usable; /* sm_90 and the driver encodes tensor maps */
    int sm_count;
    cuda_group groups[CUDA_GROUPS];
    CUtensorMap (*w)[CUDA_GROUPS]; /* [layers] */
    uint16_t *fused;               /* [rows_max, widest fused output] bf16 */
    uint8_t *planes;
    float *plane_scale;
    int32_t *plane_sum;
    unsigned long long *workspace;
    unsigned *tickets;
    uint32_t next_ticket;
} cuda_fast;

/* Device pointers of the step's lists, in the upload. */
typedef struct cuda_fast_step {
    bool usable;                 /* at most one plane, fused planes adjacent */
    const k_gemm_tile *tiles[3]; /* of 256, 128, 64 tokens */
    uint32_t tile_count[3];
    const int32_t *columns, *slot; /* decode: overlay column of each slot, slot of each row */
    uint32_t variants;
    bool any_delta, decode;
    bool planes_made; /* the norm kernel just launched made the planes of its rows */
} cuda_fast_step;

/* After the arenas are carved. Never fails: what cannot be fast is left to the plain kernels. */
void cuda_fast_open(struct bd_cuda *cuda);
void cuda_fast_close(struct bd_cuda *cuda);
/* Fills the lists of the step; false: the upload is full. */
bool cuda_fast_step_fill(struct bd_cuda *cuda, const bd_step *step);
/* Whether the norm before a layer's qkv or gate/up should make the bit planes of its rows, and for
 * how many rows. */
bool cuda_fast_wants_planes(const struct bd_cuda *cuda, uint32_t layer);
int cuda_fast_planes_nb(const bd_step *step);
/* The group's outputs in groups[group].y_data, bf16. */
bd_status cuda_fast_linear(struct bd_cuda *cuda, const bd_step *step, uint32_t layer,
                           bd_group group, bd_error *err);

#endif
