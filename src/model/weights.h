/* weights.h - which tensor of a checkpoint, and which rows of it, is which weight. Inside the model
 * room. Owner: bd_model_open; the list borrows tensors from the open checkpoint. */
#ifndef BITDELTA_SRC_MODEL_WEIGHTS_H
#define BITDELTA_SRC_MODEL_WEIGHTS_H

#include "bitdelta/backend/backend.h"
#include "bitdelta/hf/checkpoint.h"
#include "ranks.h"

typedef struct bd_weight_item {
    bd_weight_id id;
    const bd_tensor *tensor;
    uint64_t first_row;  /* of a fused tensor; else 0 */
    uint32_t rows, cols; /* cols 0: a vector of `rows` values */
} bd_weight_item;

typedef struct bd_weight_list {
    bd_weight_item *items;
    uint32_t count;
    uint64_t bytes;
} bd_weight_list;

/* Every weight the config asks for, with its shape checked, and nothing in the checkpoint that the
 * forward pass would silently ignore. No tensor data is read, except to compare a stored head with
 * the embedding it is tied to. */
BD_MUST_CHECK bd_status bd_weight_list_create(const bd_model_config *config,
                                              const bd_checkpoint *checkpoint, bd_weight_list *out,
                                              bd_error *err);
void bd_weight_list_destroy(bd_weight_list *list);
/* The item as the backend wants it. The checkpoint stays mapped as long as the backend. */
bd_weight_view bd_weight_item_view(const bd_weight_item *item);
/* What of it a rank has. */
bd_weight_view bd_weight_view_part(const bd_weight_view *whole, const bd_rank_part *part);

#endif
