/* slices.h - what one rank of a tensor-parallel server, or one file of a delta cut anew, takes from
 * the files of a delta, and which models can be cut at all. Arithmetic only: nothing is opened,
 * nothing allocated. T ranks cut a matrix as T shards would (delta.h, bd_delta_part_of), so with S
 * = T a rank takes its own file and with S = 1 its slice of the only one. Of vectors the biases of
 * q, k, v, gate and up are cut like the rows of their matrix; norms and the biases of o and down
 * are whole. Threads: any. */
#ifndef BITDELTA_DELTA_SLICES_H
#define BITDELTA_DELTA_SLICES_H

#include "bitdelta/delta/delta.h"
#include "bitdelta/hf/model_config.h"

typedef struct bd_delta_cut {
    uint32_t ranks, rank; /* T and which of them */
    uint32_t shards;      /* S: files of the delta */
    uint32_t kv_heads;    /* of the base */
} bd_delta_cut;

/* Which tensor of an entry. */
typedef enum bd_delta_tensor {
    BD_DELTA_TENSOR_BITS,   /* .sign, any plane */
    BD_DELTA_TENSOR_SCALES, /* .scale, any plane */
    BD_DELTA_TENSOR_WHOLE,  /* the entry's own name: a vector, or a table in full */
    BD_DELTA_TENSOR_EXTRA   /* .extra: added rows, whole on every rank */
} bd_delta_tensor;

/* Rows and columns (elements; of bits multiples of 8) of the tensor in one file, and where they go
 * in the rank's own part. Vectors and scales have one column. */
typedef struct bd_delta_slice {
    uint32_t file_index;
    uint64_t file_row, file_col;   /* first, inside the file's tensor */
    uint64_t file_rows, file_cols; /* of the whole tensor in the file, to check it by */
    uint64_t rows, cols;
    uint64_t row, col; /* first, inside the rank's part */
} bd_delta_slice;

/* May a model of this shape be cut into `parts`? The refusal, BD_E_ARGUMENT on `subject`, starts
 * with option and parts ("--shards 8: ...") and says which number does not divide. */
BD_MUST_CHECK bd_status bd_delta_check_parts(const bd_model_config *config, uint32_t parts,
                                             const char *option, const char *subject,
                                             bd_error *err);

/* May T ranks serve a delta of S shards? Yes where S is 1 or a multiple of T; else BD_E_UNSUPPORTED
 * naming `dir` and the reshard command that helps. */
BD_MUST_CHECK bd_status bd_delta_check_ranks(const char *dir, uint32_t shards, uint32_t ranks,
                                             bd_error *err);

/* The rank's part of a tensor, in the coordinates of the whole one. False: it cannot be cut. */
bool bd_delta_rank_part(const bd_delta_cut *cut, const bd_delta_entry *entry, bd_delta_tensor what,
                        bd_delta_part *out);

/* The slices that make up the rank's part, each element once, in the order of their place there;
 * files of the rank's own group (from rank * S / T) are preferred where several hold the same. A
 * part without rows (a table's end) has none. S and T are free here, up to BD_DELTA_SHARDS_MAX
 * files. False: cannot be cut. */
bool bd_delta_rank_slices(const bd_delta_cut *cut, const bd_delta_entry *entry,
                          bd_delta_tensor what, bd_delta_slice out[BD_DELTA_SHARDS_MAX],
                          uint32_t *count);

#endif
