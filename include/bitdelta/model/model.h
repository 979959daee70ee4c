/* model.h - the base model: weights in a backend, and the one forward pass for all families.
 * A model split over ranks is opened as one: what open gives is rank 0's, with the others behind
 * it; forward and wait run a step on all of them, ranks 1 and up on threads of their own
 * (bd-exec-<rank>). Owner: the server (or a tool). Threads: open/close anywhere; forward and wait
 * on the executor's thread only; the const accessors from any thread. */
#ifndef BITDELTA_MODEL_MODEL_H
#define BITDELTA_MODEL_MODEL_H

#include "bitdelta/backend/backend.h"
#include "bitdelta/hf/checkpoint.h"

typedef struct bd_model bd_model;

typedef struct bd_model_options {
    const char *dir;
    const bd_backend_ops *ops;
    uint32_t rank_count;     /* 0: 1 */
    uint32_t device_index;   /* of rank 0; the others' follow */
    uint32_t thread_count;   /* CPU: of all ranks together */
    uint64_t rank_wait_us;   /* a rank waits so long for another, then all are lost; 0: 60 s */
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
    uint32_t lora_rank_max;   /* as in bd_backend_options */
    /* Progress while weights load; may be NULL. */
    void (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_ctx;
} bd_model_options;

/* Config, names, shapes and memory are checked before any weight is read; faults name the field or
 * tensor. */
BD_MUST_CHECK bd_status bd_model_open(const bd_model_options *options, bd_model **out,
                                      bd_error *err);
void bd_model_close(bd_model *model);

const bd_model_config *bd_model_config_of(const bd_model *model); /* of the whole model */
const char *bd_model_fingerprint(const bd_model *model);          /* 64 hex digits */
const bd_backend_ops *bd_model_ops(const bd_model *model);
bd_backend *bd_model_backend(const bd_model *model); /* of this rank */
uint32_t bd_model_rank_count(const bd_model *model);
/* The model on one of the ranks, for what is put into its backend; 0 is the model itself. */
bd_model *bd_model_rank(bd_model *model, uint32_t rank);
uint32_t bd_model_max_len(const bd_model *model);
uint32_t bd_model_kv_block_count(const bd_model *model);
uint32_t bd_model_kv_block_tokens(const bd_model *model);
const bd_memory_plan *bd_model_memory(const bd_model *model);

/* Columns of a row of logits, and one more than the largest id that any variant may have. */
uint32_t bd_model_logits_width(const bd_model *model);
/* Delta pages in each rank's arena, and their size; a variant has the same pages on all ranks. */
uint32_t bd_model_page_count(const bd_model *model);
uint64_t bd_model_page_bytes(const bd_model *model);

/* Tables for a server that starts with so many variants and has so many slots for those that come:
 * the base's, and one for each that may have a rope of its own, up to 32. */
uint32_t bd_model_rope_tables(uint32_t variants, uint32_t slots);

/* What one rank has of a config: its heads, its part of ffn, its rows of the vocabulary.
 * BD_E_UNSUPPORTED with the arithmetic when the model cannot be split over so many. */
BD_MUST_CHECK bd_status bd_model_rank_config(const bd_model_config *config, uint32_t rank,
                                             uint32_t rank_count, bd_model_config *out,
                                             bd_error *err);

typedef struct bd_rank_part {
    uint32_t first_row, rows, first_col, cols; /* cols 0: a vector */
} bd_rank_part;

/* What rank `rank` of `rank_count` has of a weight of this (whole) config; false: nothing. The
 * weight exists in such a model; a head of a tied model counts as its table. */
bool bd_rank_part_of(const bd_model_config *config, uint32_t rank, uint32_t rank_count,
                     bd_weight_id id, bd_rank_part *out);

/* The memory a model of this config would take on each rank, without opening one (options->dir is
 * not read).
 * BD_E_LIMIT with the arithmetic in the message when it does not fit; *plan is filled even then. */
BD_MUST_CHECK bd_status bd_model_plan(const bd_model_options *options,
                                      const bd_model_config *config, bd_memory_plan *plan,
                                      bd_error *err);

/* Called before a layer's first operator when some overlay of the step is still loading; returns
 * when the layer is ready or its segment has been voided. index 0 = embedding, 1 + l = layer l, 1 +
 * layers = final norm and head. */
typedef bd_status (*bd_layer_gate)(void *ctx, uint32_t index, bd_error *err);

/* Launches one whole step (step_begin .. sample). gate may be NULL; of several ranks rank 0 asks it
 * for all. The step is in use until bd_model_wait. A rank that fails in a step loses the device:
 * BD_E_DEVICE. */
BD_MUST_CHECK bd_status bd_model_forward(bd_model *model, const bd_step *step, bd_layer_gate gate,
                                         void *gate_ctx, bd_error *err);
/* Waits for the step that forward launched, on every rank: the backend's step_wait. Ranks that do
 * not agree about a token are BD_E_INTERNAL. */
BD_MUST_CHECK bd_status bd_model_wait(bd_model *model, const bd_step *step, uint64_t deadline_us,
                                      bd_token_result *results, bd_error *err);
/* From inside a gate: the backend's step_void, on every rank. */
void bd_model_step_void(bd_model *model, const bd_step *step, uint32_t overlay);
/* After bd_model_wait: the backend's logits_get, of the whole vocabulary: [bd_model_logits_width].
 */
BD_MUST_CHECK bd_status bd_model_logits_get(bd_model *model, uint32_t index, float *out,
                                            bd_error *err);

#endif
