/* ranks.h - how a split model's vocabulary is cut; bd_rank_part_of in model.h is of the other
 * weights too. q, k, v, gate, up and the tables of the vocabulary are cut by rows, o and down by
 * columns, norms are whole on every rank; the biases of o and down are rank 0's alone, since what
 * the ranks make is summed. Key-value heads are repeated where there are more ranks than heads.
 * Inside the model room. Threads: pure. */
#ifndef BITDELTA_SRC_MODEL_RANKS_H
#define BITDELTA_SRC_MODEL_RANKS_H

#include "bitdelta/model/model.h"

/* Rows of the vocabulary on every rank but perhaps the last. */
static inline uint32_t bd_rank_vocab_rows(const bd_model_config *config, uint32_t rank_count) {
    return config->vocab / rank_count + (config->vocab % rank_count != 0 ? 1u : 0u);
}

#endif
