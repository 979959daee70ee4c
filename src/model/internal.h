/* internal.h - the model object, shared by the files of the model room. */
#ifndef BITDELTA_SRC_MODEL_INTERNAL_H
#define BITDELTA_SRC_MODEL_INTERNAL_H

#include <pthread.h>

#include "bitdelta/model/model.h"
#include "rope.h"

typedef struct bd_rope_slot { /* one rope table of the backend */
    uint32_t references;      /* overlays that use it; slot 0 belongs to the base */
    float scale;
    float inv_freq[BD_ROTARY_DIM_MAX / 2];
} bd_rope_slot;

struct bd_team;

struct bd_model { /* on one rank */
    const bd_backend_ops *ops;
    bd_model_config config; /* of the whole model */
    bd_model_config local;  /* of this rank: its shapes */
    uint32_t rank, rank_count;
    struct bd_team *team; /* rank 0's, of several: it owns the others; else NULL */
    bd_backend_options backend_options;
    bd_memory_plan memory;
    bd_checkpoint *checkpoint; /* rank 0's; stays mapped: backends may keep pointers into it */
    bd_backend *backend;
    char fingerprint[65];
    pthread_mutex_t rope_lock;
    bd_rope_slot *rope_slots; /* guarded by rope_lock; [backend_options.rope_tables_max] */
};

typedef struct bd_sizing { /* of one rank */
    const bd_model_options *options;
    const bd_model_config *config; /* of the whole model */
    uint32_t rank;
    bd_model_config *local; /* out: the rank's, which *backend then refers to */
    bd_backend_options *backend;
    bd_memory_plan *plan;
} bd_sizing;

/* Fills the backend's options and plan from the model's; refuses what does not fit. memory.c. */
BD_MUST_CHECK bd_status bd_model_size(const bd_sizing *sizing, bd_error *err);

/* The step on this rank alone. forward.c. */
BD_MUST_CHECK bd_status bd_model_forward_rank(bd_model *model, const bd_step *step,
                                              bd_layer_gate gate, void *gate_ctx, bd_error *err);

/* The index of a rope table with these frequencies, put when it is new; one reference. BD_E_LIMIT:
 * no table is free. Any thread: no step reads a table before an overlay names it. */
BD_MUST_CHECK bd_status bd_model_rope_acquire(bd_model *model, const bd_rope_config *rope,
                                              uint32_t *table, bd_error *err);
void bd_model_rope_release(bd_model *model, uint32_t table);

#endif
