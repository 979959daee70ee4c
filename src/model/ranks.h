/* ranks.h - which part of every weight a rank of a split model has. q, k, v, gate, up and the
 * tables of the vocabulary are cut by rows, o and down by columns, norms are whole on every rank;
 * the biases of o and down are rank 0's alone, since what the ranks make is summed. Key-value heads
 * are repeated where there are more ranks than heads. Inside the model room. Threads: pure. */
#ifndef BITDELTA_SRC_MODEL_RANKS_H
#define BITDELTA_SRC_MODEL_RANKS_H

#include "bitdelta/backend/backend.h"

typedef struct bd_rank_part {
    uint32_t first_row, rows, first_col, cols; /* cols 0: a vector */
} bd_rank_part;

/* What rank `rank` of `rank_count` has of a weight of this (whole) config; false: nothing. The
 * weight exists (bd_weight_shape); a head of a tied model counts as its table. */
bool bd_rank_part_of(const bd_model_config *config, uint32_t rank, uint32_t rank_count,
                     bd_weight_id id, bd_rank_part *out);
/* Rows of the vocabulary on every rank but perhaps the last. */
static inline uint32_t bd_rank_vocab_rows(const bd_model_config *config, uint32_t rank_count) {
    return config->vocab / rank_count + (config->vocab % rank_count != 0 ? 1u : 0u);
}

#endif
