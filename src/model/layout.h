/* layout.h - where things lie inside a delta page. The same for every variant of a model, so a page
 * can be reused by any.
 *
 *   layer page, plane p:    | bits q | k | v | o | gate | up | down | scales q .. down | norms |
 * biases | final norm | norms and biases are used in plane 0's page, the final norm in the last
 * layer's plane 0 embedding or head page: | bits of block_rows rows | their scales | page of rows
 * kept whole: | whole_rows rows of bf16 |
 *
 * A variant's pages in order: embedding, layers [layer][plane], head; embedding and head if it has
 * them: [block][plane] or the pages of the whole matrix, then those of added rows. Every part
 * starts on a 64-byte boundary. Configs are those of one rank. Threads: pure. */
#ifndef BITDELTA_SRC_MODEL_LAYOUT_H
#define BITDELTA_SRC_MODEL_LAYOUT_H

#include "bitdelta/backend/backend.h"
#include "bitdelta/delta/delta.h"

typedef struct bd_layout {
    uint64_t page_bytes;
    uint64_t bits[BD_LINEAR_COUNT], scales[BD_LINEAR_COUNT], biases[BD_LINEAR_COUNT];
    uint64_t norms[BD_NORM_COUNT], final_norm;
    uint32_t block_rows, block_count; /* of embedding and head */
    uint64_t block_scales;
    uint32_t whole_rows; /* of the vocabulary, bf16, in a page */
} bd_layout;

void bd_layout_init(bd_layout *layout, const bd_model_config *config, const bd_backend_ops *ops);
/* Pages for `rows` rows kept whole. */
uint32_t bd_layout_whole_pages(const bd_layout *layout, uint64_t rows);
/* Rows of block `index`; only the last may be shorter. */
uint32_t bd_layout_block_rows(const bd_layout *layout, const bd_model_config *config,
                              uint32_t index);
/* Pages of a delta's embedding or head; *extra_at: the first of its added rows, among them. */
uint32_t bd_layout_table_pages(const bd_layout *layout, const bd_model_config *config,
                               const bd_delta *delta, const bd_delta_entry *entry,
                               uint32_t *extra_at);

#endif
