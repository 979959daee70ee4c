/* slices.h - which models can be cut into shards, and what a shard takes from a delta that is cut
 * already, into another number of them. Arithmetic only: nothing is opened, nothing allocated.
 * Threads: any. */
#ifndef BITDELTA_DELTA_SLICES_H
#define BITDELTA_DELTA_SLICES_H

#include "bitdelta/delta/delta.h"
#include "bitdelta/hf/model_config.h"

typedef struct bd_delta_cut {
    uint32_t parts, part; /* how the tensor is to be cut, and which part is asked about */
    uint32_t shards;      /* how it is cut */
    uint32_t kv_heads;    /* of the base */
} bd_delta_cut;

/* Which tensor of an entry. */
typedef enum bd_delta_tensor {
    BD_DELTA_TENSOR_BITS,   /* .sign, any plane */
    BD_DELTA_TENSOR_SCALES, /* .scale, any plane */
    BD_DELTA_TENSOR_WHOLE,  /* the entry's own name: a vector, or a table in full */
    BD_DELTA_TENSOR_EXTRA   /* .extra: added rows, whole in every part */
} bd_delta_tensor;

/* Rows and columns (elements; of bits multiples of 8) of the tensor in one file, and where they go
 * in the part. Vectors and scales have one column. */
typedef struct bd_delta_slice {
    uint32_t file_index;
    uint64_t file_row, file_col;   /* first, inside the file's tensor */
    uint64_t file_rows, file_cols; /* of the whole tensor in the file, to check it by */
    uint64_t rows, cols;
    uint64_t row, col; /* first, inside the part */
} bd_delta_slice;

/* May a model of this shape be cut into `parts`? The refusal, BD_E_ARGUMENT on `subject`, starts
 * with option and parts ("--shards 8: ...") and says which number does not divide. */
BD_MUST_CHECK bd_status bd_delta_check_parts(const bd_model_config *config, uint32_t parts,
                                             const char *option, const char *subject,
                                             bd_error *err);

/* The part of a tensor, in the coordinates of the whole one. False: it cannot be cut. */
bool bd_delta_cut_part(const bd_delta_cut *cut, const bd_delta_entry *entry, bd_delta_tensor what,
                       bd_delta_part *out);

/* The slices that make up the part, each element once, in the order of their place there; files of
 * the part's own group (from part * shards / parts) are preferred where several hold the same. A
 * part without rows (a table's end) has none. False: cannot be cut. */
bool bd_delta_cut_slices(const bd_delta_cut *cut, const bd_delta_entry *entry, bd_delta_tensor what,
                         bd_delta_slice out[BD_DELTA_SHARDS_MAX], uint32_t *count);

#endif
