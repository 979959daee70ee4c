/* names.h - canonical tensor names of a model and the weights they mean, both ways. Inside the
 * model room. The base's checkpoint and deltas use these names; only Phi-3's fused weights differ
 * (weights.c). Threads: pure functions. */
#ifndef BITDELTA_SRC_MODEL_NAMES_H
#define BITDELTA_SRC_MODEL_NAMES_H

#include "bitdelta/backend/backend.h"

#define BD_TENSOR_NAME_MAX 128

/* Shape of a weight, cols 0 for a vector. False: this model has no such weight (a tied head, an
 * absent bias). */
bool bd_weight_shape(const bd_model_config *config, bd_weight_id id, uint32_t *rows,
                     uint32_t *cols);
/* "" when the model has no such weight. */
void bd_weight_name(const bd_model_config *config, bd_weight_id id, char *out, size_t out_bytes);
/* The reverse. False: not a weight of this model. */
bool bd_weight_parse(const bd_model_config *config, const char *name, bd_weight_id *out);
/* True and *out when the name is the embedding's or the head's: a delta may have a head of its own
 * also where the base's is tied. */
bool bd_table_parse(const char *name, bd_weight_id *out);

#endif
