/* team.h - the ranks of a model that is split, and the threads that run ranks 1 and up. Rank 0 runs
 * on the thread of whoever calls; a step is given to all at once. Inside the model room. Owner:
 * rank 0's model. Threads: as bd_model_forward; destroy from wherever the model is closed. */
#ifndef BITDELTA_SRC_MODEL_TEAM_H
#define BITDELTA_SRC_MODEL_TEAM_H

#include "internal.h"
#include "weights.h"

typedef struct bd_team bd_team;

/* The other ranks' models, empty, and their threads. `first` is rank 0's. */
BD_MUST_CHECK bd_status bd_team_create(bd_model *first, const bd_model_options *options,
                                       bd_team **out, bd_error *err);
/* Opens all ranks, which are sized, side by side. */
BD_MUST_CHECK bd_status bd_team_open(bd_team *team, const bd_model_options *options,
                                     const bd_weight_list *list, bd_error *err);
/* Ends threads and the other ranks' models; false: a rank hangs, so nothing may be freed. */
BD_MUST_CHECK bool bd_team_destroy(bd_team *team);
bd_model *bd_team_rank(bd_team *team, uint32_t rank);

/* model.c, for the team. */
BD_MUST_CHECK bd_status bd_model_create(const bd_backend_ops *ops, uint32_t rank,
                                        uint32_t rank_count, bd_model **out, bd_error *err);
void bd_model_free(bd_model *model); /* NULL is fine */
/* Backend, rope table and weights of one rank. */
BD_MUST_CHECK bd_status bd_model_open_rank(bd_model *model, const bd_model_options *options,
                                           const bd_weight_list *list, bd_error *err);

#endif
