/* model.h - the base model on one rank: weights in a backend, and the one forward pass for all
 * families. Owner: the server (or a tool). Threads: open/close anywhere; forward on the rank's
 * executor thread only; the const accessors from any thread. */
#ifndef BITDELTA_MODEL_MODEL_H
#define BITDELTA_MODEL_MODEL_H

#include "bitdelta/backend/backend.h"
#include "bitdelta/hf/checkpoint.h"

typedef struct bd_model bd_model;

typedef struct bd_model_options {
    const char *dir;
    const bd_backend_ops *ops;
    uint32_t rank, rank_count, device_index, thread_count;
    const char *cpu_kernels; /* as in bd_backend_options */
    bd_kernels kernels;      /* likewise, and the three below */
    bd_dtype dtype;
    uint64_t device_bytes;
    bool no_recording;      /* steps are launched operator by operator */
    uint32_t max_model_len; /* 0: config's max_positions; more than that is refused */
    uint32_t rows_max, seqs_max, logits_rows_max;
    uint32_t kv_block_tokens;
    uint64_t kv_tokens; /* 0: what fits: CPU 4 x max_model_len (at least 16384), CUDA the rest of
                           the memory */
    uint32_t rope_tables_max;
    uint32_t delta_pages; /* pages of bd_overlay_page_bytes each */
    uint32_t delta_slots; /* alternative to delta_pages: room for this many one-plane variants */
    uint32_t extra_vocab_max; /* vocabulary rows that variants may add; taken as 0 where the backend
                                 cannot */
    /* Progress while weights load; may be NULL. */
    void (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_ctx;
} bd_model_options;

/* Config, names, shapes and memory are checked before any weight is read; faults name the field or
 * tensor. */
BD_MUST_CHECK bd_status bd_model_open(const bd_model_options *options, bd_model **out,
                                      bd_error *err);
void bd_model_close(bd_model *model);

const bd_model_config *bd_model_config_of(const bd_model *model);
const char *bd_model_fingerprint(const bd_model *model); /* 64 hex digits */
const bd_backend_ops *bd_model_ops(const bd_model *model);
bd_backend *bd_model_backend(const bd_model *model);
uint32_t bd_model_max_len(const bd_model *model);
uint32_t bd_model_kv_block_count(const bd_model *model);
uint32_t bd_model_kv_block_tokens(const bd_model *model);
const bd_memory_plan *bd_model_memory(const bd_model *model);

/* Columns of a row of logits, and one more than the largest id that any variant may have. */
uint32_t bd_model_logits_width(const bd_model *model);
uint32_t bd_model_page_count(const bd_model *model); /* delta pages in the backend's arena */

/* The memory a model of this config would take, without opening one (options->dir is not read).
 * BD_E_LIMIT with the arithmetic in the message when it does not fit; *plan is filled even then. */
BD_MUST_CHECK bd_status bd_model_plan(const bd_model_options *options,
                                      const bd_model_config *config, bd_memory_plan *plan,
                                      bd_error *err);

/* Called before a layer's first operator when some overlay of the step is still loading; returns
 * when the layer is ready or its segment has been voided. index 0 = embedding, 1 + l = layer l, 1 +
 * layers = final norm and head. */
typedef bd_status (*bd_layer_gate)(void *ctx, uint32_t index, bd_error *err);

/* Launches one whole step (step_begin .. sample). Wait with the backend's step_wait. gate may be
 * NULL. */
BD_MUST_CHECK bd_status bd_model_forward(bd_model *model, const bd_step *step, bd_layer_gate gate,
                                         void *gate_ctx, bd_error *err);

#endif
