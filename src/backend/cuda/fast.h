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

/* Steps of up to DECODE_ONLY rows are decode's: a row does not see its batch. Up to DECODE_ROWS_MAX
 * it is decode, in chunks, or prefill, whichever costs less, and of any step the short segments at
 * its end, of as many rows together, may be decode's while the others are prefill's. All chunks but
 * the last have K_DECODE_ROWS rows, 16 slots or as many groups as the rows kernel takes, so 16 rows
 * at least. */
#define CUDA_DECODE_ONLY_ROWS 16u
#define CUDA_DECODE_ROWS_MAX  256u
#define CUDA_SHORT_ROWS       64u /* most rows of a short segment */
#define CUDA_CHUNKS_MAX       17u
#define CUDA_DIGIT_ROWS       (2 * CUDA_DECODE_ROWS_MAX + 32) /* of launches of 32 or 64 */
#define CUDA_GROUPS           4u                              /* bd_group */
#define CUDA_TICKETS          64u
#define CUDA_TILES            3u /* of 256, 128, 64 tokens */

enum { X_BOX_128, X_BOX_64, X_BOX_32, X_BOX_COUNT }; /* rows of a box of x */

typedef struct cuda_group {
    bool fast;
    bd_linear first; /* its matrices are first .. first + count - 1 */
    uint32_t count, n, k;
    CUtensorMap x[X_BOX_COUNT], y;
    const uint16_t *x_data;
    uint16_t *y_data;
} cuda_group;

typedef struct cuda_fast_head {
    bool fast;
    CUtensorMap w, x[X_BOX_COUNT];
    bd_segment *runs; /* [logits_rows_max] */
} cuda_fast_head;

typedef struct cuda_fast {
    bool usable; /* sm_90 and the driver encodes tensor maps */
    int sm_count;
    cuda_group groups[CUDA_GROUPS];
    CUtensorMap (*w)[CUDA_GROUPS]; /* [layers] */
    cuda_fast_head head;
    uint16_t *fused;               /* [rows_max, widest fused output] */
    uint8_t *planes, *digits;      /* of x: of a chunk; of all chunks */
    unsigned long long *workspace; /* of tiles that several blocks share */
    unsigned *tickets;             /* [CUDA_TICKETS] */
    uint32_t next_ticket;
} cuda_fast;

typedef struct cuda_chunk { /* rows for one launch of the decode or the rows kernel, and their slots
                             */
    uint32_t first_row, rows, first_slot, slots;
    uint32_t slot_at;                         /* where its rows' slots begin */
    uint32_t first_group, groups, group_rows; /* of the rows kernel; groups 0: not its */
} cuda_chunk;

/* Who takes a group's rows: tiles from the first on, by the prefill kernel, and the chunks. */
typedef struct cuda_way {             /* without padding: see cuda_fast_step_fill */
    uint32_t tile_count, tile, split; /* tile: which size */
    uint32_t delta, chunked;          /* whether a tile has a variant, whether the chunks are */
    float cost_us;                    /* as estimated */
} cuda_way;

typedef struct cuda_chunks {
    const int32_t *columns, *slot; /* overlay column of each slot; slot in its chunk of each row
                                      from the first chunk's on */
    const k_gemm_tile *groups;
    uint32_t count, unused;
    cuda_chunk at[CUDA_CHUNKS_MAX];
} cuda_chunks;

typedef struct cuda_tiles { /* of each size */
    const k_gemm_tile *at[CUDA_TILES];
    uint32_t count[CUDA_TILES], unused;
} cuda_tiles;

/* Of rows of logits: chunks, or else tiles. */
typedef struct cuda_head_step {
    uint32_t usable; /* else the head is the plain kernel's */
    uint32_t delta;  /* whether a variant has a head of its own, in tiles */
    cuda_tiles tiles;
    cuda_chunks chunks;
} cuda_head_step;

/* Device pointers of the step's lists, in the upload. */
typedef struct cuda_fast_step {
    bool usable; /* at most one plane, fused planes adjacent */
    cuda_way ways[CUDA_GROUPS];
    cuda_tiles tiles;   /* of all rows; none where decode takes every row */
    cuda_chunks chunks; /* of the rows at the step's end, of all or of none */
    cuda_head_step head;
} cuda_fast_step;

/* After the arenas are carved. Never fails: what cannot be fast is left to the plain kernels. */
void cuda_fast_open(struct bd_cuda *cuda);
void cuda_fast_close(struct bd_cuda *cuda);
extern const uint32_t cuda_tile_tokens[CUDA_TILES];

/* fast_step.c. Fills the lists of the step; false: the upload is full. */
bool cuda_fast_step_fill(struct bd_cuda *cuda, const bd_step *step);
/* The group's outputs in groups[group].y_data, 16-bit. */
bd_status cuda_fast_linear(struct bd_cuda *cuda, uint32_t layer, bd_group group, bd_error *err);

/* The tiles that take least for W [n, k] where there are tile_count of each size. */
cuda_way cuda_fast_tile(const cuda_fast *fast, uint32_t n, uint32_t k,
                        const uint32_t tile_count[CUDA_TILES]);
typedef struct cuda_chunk_lists { /* on the host, in the upload, for as many rows as there may be */
    int32_t *columns, *slot;
    k_gemm_tile *groups;
} cuda_chunk_lists;
/* false: the upload is full. */
bool cuda_fast_lists_reserve(struct bd_cuda *cuda, uint32_t rows, cuda_chunks *out,
                             cuda_chunk_lists *lists);
/* The rows of `count` segments, which lie together, in chunks of K_DECODE_ROWS at most, and in each
 * the runs of one variant as its slots; of more small groups than the rows kernel takes there are
 * two chunks. grouped: for that kernel too. Replaces what was there. */
void cuda_fast_chunks_fill(const bd_segment *segments, uint32_t count, bool grouped,
                           const cuda_chunk_lists *lists, cuda_chunks *out);
/* Tiles of every segment; false: the upload is full. */
bool cuda_fast_tiles_fill(struct bd_cuda *cuda, const bd_segment *segments, uint32_t count,
                          cuda_tiles *out);
/* Estimated microseconds of the chunks for W [n, k]. */
double cuda_fast_chunks_cost(const cuda_fast *fast, uint32_t n, uint32_t k,
                             const cuda_chunks *chunks);
/* Whether the rows kernel takes the chunk of W [n, k], else decode's. */
bool cuda_fast_takes_rows(const cuda_fast *fast, uint32_t n, uint32_t k, const cuda_chunk *chunk);

/* fast_head.c. As cuda_fast_step_fill, of the head. */
bool cuda_fast_head_fill(struct bd_cuda *cuda, const bd_step *step);
/* Logits of head_in, float32, where the step's head is usable. */
bd_status cuda_fast_head_run(struct bd_cuda *cuda, float *logits, bd_error *err);

#endif
