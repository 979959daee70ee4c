/* layout.h - where things lie inside a delta page. The same for every variant of a model, so a page
 * can be reused by any.
 *
 *   layer page, plane p:    | bits q | k | v | o | gate | up | down | scales q .. down | norms |
 * biases | final norm | norms and biases are used in plane 0's page, the final norm in the last
 * layer's plane 0 embedding or head page: | bits of block_rows rows | their scales |
 *
 * A variant's pages in order: embedding [block][plane] if it has one, layers [layer][plane], head
 * [block][plane] if it has one. Every part starts on a 64-byte boundary. Threads: pure. */
#ifndef BITDELTA_SRC_MODEL_LAYOUT_H
#define BITDELTA_SRC_MODEL_LAYOUT_H

#include "bitdelta/backend/backend.h"

typedef struct bd_layout {
    uint64_t page_bytes;
    uint64_t bits[BD_LINEAR_COUNT], scales[BD_LINEAR_COUNT], biases[BD_LINEAR_COUNT];
    uint64_t norms[BD_NORM_COUNT], final_norm;
    uint32_t block_rows, block_count; /* of embedding and head */
    uint64_t block_scales;
} bd_layout;

void bd_layout_init(bd_layout *layout, const bd_model_config *config, const bd_backend_ops *ops);
/* Rows of block `index`; only the last may be shorter. */
uint32_t bd_layout_block_rows(const bd_layout *layout, const bd_model_config *config,
                              uint32_t index);

#endif
