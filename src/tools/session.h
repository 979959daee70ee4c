/* session.h - one model, perhaps with one variant, and one sequence: what tools need to run text
 * through a model. It has its own KV block table (block i of the cache is block i of the sequence)
 * and no scheduler. Owner: one tool, one thread. */
#ifndef BITDELTA_SRC_TOOLS_SESSION_H
#define BITDELTA_SRC_TOOLS_SESSION_H

#include "bitdelta/model/model.h"

typedef struct bd_session bd_session;

typedef struct bd_session_options {
    const char *base_dir;
    const char *delta_dir, *finetuned_dir, *lora_dir; /* at most one */
    bd_backend_choice backend;
    bd_dtype dtype; /* BD_DTYPE_OTHER: the backend's own */
    bd_kernels kernels;
    uint32_t device_index, thread_count;
    uint32_t rank_count;      /* 0: 1 */
    uint32_t tokens_max;      /* length of the sequence */
    uint32_t rows_max;        /* tokens of one feed */
    uint32_t logits_rows_max; /* logits rows of one feed */
} bd_session_options;

/* The config of what the options would run (a variant's own fields applied), before weights are
 * touched. */
BD_MUST_CHECK bd_status bd_session_config(const bd_session_options *options, bd_model_config *out,
                                          bd_error *err);
BD_MUST_CHECK bd_status bd_session_open(const bd_session_options *options, bd_session **out,
                                        bd_error *err);
void bd_session_close(bd_session *session); /* NULL is fine */
bd_model *bd_session_model(bd_session *session);

/* Appends `count` tokens to the sequence. The last logits_count of them give a result each, in
 * order: the target's log-probability where targets[i] >= 0, else a token sampled by `sampling`;
 * targets NULL means sample. */
BD_MUST_CHECK bd_status bd_session_feed(bd_session *session, const int32_t *ids, uint32_t count,
                                        uint32_t logits_count, const int32_t *targets,
                                        const bd_sampling *sampling, bd_token_result *results,
                                        bd_error *err);
/* Forgets the sequence; the next feed starts at position 0. */
void bd_session_reset(bd_session *session);

#endif
