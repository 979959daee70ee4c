/* engine.h - continuous batching: sequences, paged KV, the step loop.
 * Threads: bd_engine_create/start/stop/destroy from the builder; post, wake, lost and stats from
 * any thread; everything else on bd-sched only, that is inside posted calls, hooks and sinks. One
 * executor thread per rank runs the steps; bd-sched prepares step n+1 as soon as the results of
 * step n are in, and delivers the tokens of n while n+1 runs. */
#ifndef BITDELTA_ENGINE_ENGINE_H
#define BITDELTA_ENGINE_ENGINE_H

#include "bitdelta/cache/cache.h"

typedef struct bd_engine bd_engine;
typedef struct bd_sequence bd_sequence;

typedef enum bd_finish {
    BD_FINISH_STOP,
    BD_FINISH_LENGTH,
    BD_FINISH_CANCELLED,
    BD_FINISH_ERROR
} bd_finish;

/* A call to run on bd-sched. Caller's memory until run() is called; run may free it. */
typedef struct bd_call {
    bd_message message; /* first member */
    void (*run)(struct bd_call *call, bd_engine *engine);
} bd_call;

/* Whose account a sequence is on. The sequences of whoever has the least counter come first, those
 * of the greatest give way first; within one payer by (priority, arrival). The owner keeps the
 * counter, on bd-sched; the payer lives until the last of its sequences is gone. */
typedef struct bd_payer {
    double counter;
    uint32_t id; /* orders payers of equal counters; different for each */
} bd_payer;

typedef struct bd_engine_hooks { /* the router's; on bd-sched; each may be NULL */
    void *ctx;
    /* Admit work: bd_engine_add. cache_changed: what bd_cache_poll said in this turn. */
    void (*before_step)(void *ctx, uint64_t now_us, bool cache_changed);
    /* UINT64_MAX: only when something is posted. */
    uint64_t (*next_wake_us)(void *ctx, uint64_t now_us);
    /* Once: nothing can be added any more, every sequence has ended. err: BD_E_DEVICE or
     * BD_E_SHUTDOWN. */
    void (*closed)(void *ctx, const bd_error *err);
    /* Of a sequence with a payer. prompt_tokens: computed for the first time, so neither what was
     * found in the prefix cache nor what a preemption makes the server do again. promised: how many
     * more (or, < 0, fewer) of its prompt's tokens will be computed; the sum over a sequence's life
     * is 0. */
    void (*charge)(void *ctx, bd_payer *payer, int64_t promised, uint32_t prompt_tokens,
                   uint32_t output_tokens);
} bd_engine_hooks;

typedef struct bd_engine_options {
    bd_model *model; /* one rank for now; borrowed */
    /* polled once per turn; may be NULL in tests (leases are then dropped unseen) */
    bd_cache *cache;
    const char *model_name; /* label of the engine's metrics: the base's served name; copied */
    uint32_t rows_max;      /* token budget of a step */
    /* of one prompt in a step that it does not end in, if others can fill it; 0: rows_max */
    uint32_t prefill_chunk_tokens;
    uint32_t tile_rows; /* as the backend's; 0: none */
    /* sequences in the engine at once; rows_max and logits_rows_max bound it too */
    uint32_t seqs_max;
    uint32_t variants_per_step_max; /* 16; the base does not count */
    uint32_t logits_rows_max;
    uint64_t step_deadline_us; /* the device counts as lost beyond it; 0: no deadline */
    bool decode_delta;         /* false: the base decodes after a variant's prefill (if it added no
                                  vocabulary) */
    bool prefix_cache;         /* keep full KV blocks for prompts that start alike */
    bd_engine_hooks hooks;
    bd_metrics *metrics; /* may be NULL */
} bd_engine_options;

typedef struct bd_sequence_sink { /* all on bd-sched; must not block; each may be NULL */
    /* Next generated token, a stop id included. false: stop now (a stop string matched), finish is
     * BD_FINISH_STOP. */
    bool (*token)(void *ctx, const bd_token_result *token);
    /* Log-probabilities of prompt tokens [first, first + count), ascending; position 0 is never
     * reported. */
    void (*prompt)(void *ctx, uint32_t first, const bd_token_result *tokens, uint32_t count);
    /* Last call; the sequence is gone afterwards. stop_id: the id that stopped it, -1 otherwise.
     * err is NULL unless finish is BD_FINISH_ERROR. */
    void (*end)(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err);
} bd_sequence_sink;

typedef struct bd_sequence_options {
    const int32_t *prompt;  /* copied; ids are in range, the caller checked */
    uint32_t prompt_tokens; /* >= 1 */
    /* 0: prompt log-probabilities only; prompt + max_new <= max_model_len */
    uint32_t max_new_tokens;
    uint32_t min_new_tokens; /* stop ids are masked before */
    bd_lease lease;          /* variant NULL: the base. Taken over; released at the end */
    uint64_t tenant;         /* sequences of different tenants share no cached prefix */
    bd_sampling sampling;
    /* 1, 0, 0: none (a repetition of 0 counts as 1). Repetition looks at prompt and output, the
     * others at output. */
    float repetition_penalty, presence_penalty, frequency_penalty;
    const bd_logit_edit *bias; /* copied; distinct tokens, repetition 1 */
    uint32_t bias_count;
    const int32_t *stop_ids; /* copied; a negative id never matches */
    uint32_t stop_id_count;
    int32_t logprobs;        /* -1 none, else alternatives 0..20 */
    int32_t prompt_logprobs; /* -1 none, else alternatives 0..20 */
    int64_t priority;        /* lower first; equal: arrival order */
    bd_payer *payer;         /* NULL: all such sequences have one that has counted nothing */
    const bd_sequence_sink *sink;
    void *sink_ctx;
} bd_sequence_options;

BD_MUST_CHECK bd_status bd_engine_create(const bd_engine_options *options, bd_engine **out,
                                         bd_error *err);
BD_MUST_CHECK bd_status bd_engine_start(bd_engine *engine,
                                        bd_error *err); /* bd-sched and bd-exec-r threads */
/* Running sequences end with BD_E_SHUTDOWN; joins the threads. Calls posted later run at once on
 * the posting thread, one at a time. If a device hangs for good its executor thread is left behind,
 * and with it the engine's memory. */
void bd_engine_stop(bd_engine *engine);
void bd_engine_destroy(bd_engine *engine); /* stops first if need be; NULL is fine */
void bd_engine_post(bd_engine *engine,
                    bd_call *call); /* any thread; never fails; run() comes exactly once */
/* The same for several calls at one go: bd-sched is not woken, bd_engine_wake or bd_engine_help is
 * to follow. */
void bd_engine_post_quietly(bd_engine *engine, bd_call *call);
void bd_engine_wake(bd_engine *engine); /* any thread: another turn of the loop */
/* Any thread that holds no lock which a call or a sink takes: if bd-sched sleeps, this thread is
 * bd-sched for a turn, in which it runs what was posted; else as bd_engine_wake. */
void bd_engine_help(bd_engine *engine);
bool bd_engine_on_thread(const bd_engine *engine); /* this thread is bd-sched now */
bool bd_engine_lost(const bd_engine *engine);      /* any thread: the device is gone */

/* BD_BUSY: seqs_max in the engine, or one waiting for KV whose payer is not behind this one; ask
 * again in before_step. On anything but
 * BD_OK the lease stays the caller's. KV that runs out later preempts (recompute), never fails.
 * BD_E_LIMIT: could not run even alone. */
BD_MUST_CHECK bd_status bd_engine_add(bd_engine *engine, const bd_sequence_options *options,
                                      bd_sequence **out, bd_error *err);
/* The sink's end() comes with BD_FINISH_CANCELLED, within a step and not from inside this call;
 * safe inside sinks of any sequence. Not after end(). */
void bd_engine_cancel(bd_engine *engine, bd_sequence *sequence);

typedef struct bd_engine_stats {
    uint32_t running, waiting, kv_blocks_used, kv_blocks_total;
    uint64_t steps, prompt_tokens, generated_tokens, preemptions;
    uint64_t prefix_query_tokens, prefix_hit_tokens;
} bd_engine_stats;
void bd_engine_stats_get(const bd_engine *engine,
                         bd_engine_stats *out); /* any thread, a recent snapshot */

#endif
