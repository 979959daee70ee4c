/* internal.h - the engine's own structures.
 * Owner and only thread: bd-sched, but for the fields marked otherwise. A turn of the loop
 * (engine.c) is run calls -> collect finished step (collect.c) -> hooks -> build and launch the
 * next (schedule.c) -> deliver tokens. A sequence is WAITING (no KV), RUNNING, or OVER: out of both
 * lists, its memory kept until the step that still holds its rows has ended and its last tokens are
 * delivered. */
#ifndef BITDELTA_SRC_ENGINE_INTERNAL_H
#define BITDELTA_SRC_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "bitdelta/base/arena.h"
#include "bitdelta/engine/engine.h"
#include "edits.h"
#include "executor.h"
#include "kv.h"
#include "stream.h"

#define BD_GROUP_BASE UINT32_MAX

/* What the engine knows of a model; tests give their own. */
typedef struct bd_engine_device {
    const bd_executor_ops *ops;
    void *ctx;
    uint32_t kv_block_count, kv_block_tokens, max_model_len;
    uint32_t layers; /* for steps over loading variants */
} bd_engine_device;

BD_MUST_CHECK bd_status bd_engine_create_on(const bd_engine_options *options,
                                            const bd_engine_device *device, bd_engine **out,
                                            bd_error *err);

typedef enum bd_sequence_state { BD_SEQ_WAITING, BD_SEQ_RUNNING, BD_SEQ_OVER } bd_sequence_state;

struct bd_sequence {
    bd_sequence *prev, *next; /* in waiting or running; order: bd_list_sort */
    bd_sequence_state state;
    bd_arena *arena; /* all memory of the sequence but this struct */
    uint64_t arrival;
    int64_t priority;
    bd_payer *payer;
    uint32_t charged;  /* prompt tokens that the payer has no more to pay for */
    uint32_t promised; /* prompt tokens that the payer was told of and that are not charged yet */
    bd_lease lease;
    uint32_t group; /* index into engine->groups; BD_GROUP_BASE */
    const bd_sequence_sink *sink;
    void *sink_ctx;

    int32_t *tokens; /* prompt, then output; room for all of it */
    uint32_t prompt_count, count;
    uint32_t max_new, min_new;
    int32_t *stop_ids;
    uint32_t stop_id_count;
    bd_sampling sampling;
    bd_edit_list edits;
    uint8_t top_count, prompt_top_count;
    bool prompt_wanted;
    uint32_t prompt_next; /* next prompt position to report */

    uint32_t computed;  /* tokens whose KV is in its blocks */
    uint32_t scheduled; /* rows in the step that runs now */
    uint32_t passed;    /* steps without its prompt that had room for it, or one behind it */
    uint32_t *blocks;
    uint32_t block_count;
    bool publishes; /* its full blocks go to the prefix cache */
    bd_kv_key identity, chain;
    uint32_t chained_blocks; /* blocks that chain covers */

    bool cancelled;   /* end() is due with BD_FINISH_CANCELLED */
    bool undelivered; /* results are in but not delivered */
    bool ended;       /* end() was called */
    bd_finish finish; /* valid once OVER */
    int32_t stop_id;
};

typedef struct bd_sequence_list {
    bd_sequence *first, *last;
    uint32_t count;
} bd_sequence_list;

/* Sequences of one variant; the base has none. */
typedef struct bd_engine_group {
    const bd_overlay *overlay;
    const bd_load *load; /* not known to be complete; NULL: complete */
    bool whole;          /* was late once: waits for the whole load now */
    uint32_t members;
    uint64_t served_step; /* when it last had rows */
    uint32_t rows;        /* of loading ones: that the next step could have */
    uint32_t claims;      /* sequences with rows to run */
    uint32_t picked_rows; /* of the step that is being built */
    double counter;       /* the least of their payers */
    bool wanted, chosen;
} bd_engine_group;

typedef struct bd_pick { /* rows of one sequence in the step being built */
    bd_sequence *sequence;
    uint32_t group, rows;
} bd_pick;

typedef struct bd_step_buffer {
    bd_step step;
    int32_t *tokens;
    uint32_t *positions, *seq_of_row;
    bd_seq *seqs;
    bd_segment *segments;
    const bd_overlay **overlays;
    bd_logits_row *logits_rows;
    bd_sequence **sequences; /* [seq_count]; NULL once there is nothing to deliver */
    int32_t *overlay_of_seq; /* [seq_count]; -1: the base */
    uint32_t *logits_first;  /* [seq_count + 1] */
    bd_stream_gate gate;     /* loads and voided: [overlay_count] */
    bool gated;
    bd_token_result *results;
    bd_error fault; /* of the whole step */
    bool pending;   /* collected, not delivered */
} bd_step_buffer;

typedef struct bd_engine_metrics {
    bd_metric *running, *kv_usage, *preemptions, *prefix_queries, *prefix_hits;
    bd_metric *streamed, *voided, *steps, *step_rows, *launch_seconds, *wait_seconds;
} bd_engine_metrics;

struct bd_engine {
    bd_engine_options options;
    uint32_t cap; /* sequences waiting or running */
    uint32_t block_tokens, max_model_len;
    bd_kv_pool *kv;
    uint64_t secret[2]; /* of the prefix keys */
    bd_executor *executor;
    bd_mailbox *inbox;
    pthread_t thread;
    bool started, stuck;
    _Atomic bool stopping, stopped, lost;
    /* Whose thread holds `lock` is bd-sched: its own but while it sleeps, one that helps, or after
     * the loop's end one that posts. `helped` to `sleep_until_us` are the holder's. */
    pthread_mutex_t lock;
    _Atomic(const void *) owner; /* the holder's mark; NULL: nobody */
    bool helped;                 /* this turn is another thread's */
    bool loops;                  /* bd-sched's own thread is in its loop */
    uint64_t sleep_until_us;     /* it sleeps no longer than that */

    bd_sequence_list waiting, running;
    uint32_t over_count;
    bool reap_wanted; /* something was cancelled, or has nothing to compute */
    uint64_t arrivals;
    bd_engine_group *groups;
    uint32_t group_count;
    bd_pick *picks;
    uint32_t base_picked_rows; /* as those of groups */

    bd_step_buffer buffers[2];
    uint32_t next_buffer;
    bd_step_buffer *in_flight;
    void (*detach)(bd_cache *cache); /* the cache asks no more; NULL: it never did */
    bd_step_times times;
    uint32_t layers;
    uint64_t stream_wake_us; /* when a loading variant may start, as of this turn */
    uint64_t give_up_us;     /* the executor itself counts as hung */
    bool overdue;            /* it was given more time once */
    bool closed;
    bd_error closed_error;

    bd_engine_metrics metrics;
    _Atomic uint32_t stat_running, stat_waiting, stat_kv_used;
    _Atomic uint64_t stat_steps, stat_prompt, stat_generated, stat_preemptions;
    _Atomic uint64_t stat_prefix_queries, stat_prefix_hits;
};

static inline void bd_stat_add(_Atomic uint64_t *stat, uint64_t amount) {
    atomic_fetch_add_explicit(stat, amount, memory_order_relaxed);
}

/* sequence.c */
/* The payer with the least counter first, within a payer by (priority, arrival). Insert takes the
 * order for granted, which holds until a counter moves. */
void bd_list_insert(bd_sequence_list *list, bd_sequence *sequence);
void bd_list_remove(bd_sequence_list *list, bd_sequence *sequence);
void bd_list_sort(bd_sequence_list *list);
static inline double bd_payer_counter(const bd_sequence *sequence) {
    return sequence->payer ? sequence->payer->counter : 0.0;
}
/* Tokens of the prompt up to `computed` and `output` generated ones are the payer's. */
void bd_sequence_charge(bd_engine *engine, bd_sequence *sequence, uint32_t output_tokens);
uint32_t bd_sequence_target(const bd_sequence *sequence); /* tokens whose KV or logits are needed */
/* After the prompt the base continues. */
bool bd_sequence_ends_with_base(const bd_engine *engine, const bd_sequence *sequence);
bool bd_sequence_idle(const bd_sequence *sequence); /* nothing is or was ever asked of the model */
uint32_t bd_blocks_for(const bd_engine *engine, uint32_t tokens);
bool bd_sequence_admit(bd_engine *engine,
                       bd_sequence *sequence); /* blocks for what is known; in no list */
void bd_sequence_drop_blocks(bd_engine *engine, bd_sequence *sequence);
void bd_sequence_publish(bd_engine *engine, bd_sequence *sequence); /* newly full blocks */
/* Out of its list, blocks given back unless a running step uses them. end() is still to come. */
void bd_sequence_over(bd_engine *engine, bd_sequence *sequence, bd_finish finish, int32_t stop_id);
/* Calls end() once; frees the sequence if nothing needs it any more. */
void bd_sequence_end(bd_engine *engine, bd_sequence *sequence, const bd_error *err);
void bd_sequence_settle(bd_engine *engine,
                        bd_sequence *sequence); /* free it if over, ended and unused */

/* schedule.c */
void bd_engine_admit(bd_engine *engine);
/* NULL: nothing to run, or the chosen gave up their KV to variants left out, whose turn is next. */
bd_step_buffer *bd_engine_build(bd_engine *engine);

/* loading.c: variants that still load */
/* For bd_cache_stream: whether sequences of this load are worth having here already. */
bool bd_engine_may_stream(void *ctx, const bd_load *load, uint64_t now_us);
/* Takes note of loads that ended. Sequences of failed ones end with the load's error, but for those
 * not delivered yet: theirs is the next call. */
void bd_engine_settle_loads(bd_engine *engine);
/* Marks as wanted those loading groups with rows that the next step may have, beside `rows` rows
 * that it has anyway. */
void bd_engine_want_loading(bd_engine *engine, uint32_t rows, uint64_t now_us);
/* The guard of a step just built, if it needs one. */
void bd_gate_init(bd_engine *engine, bd_step_buffer *buffer);
/* The gate had no rows of this sequence: they are to be computed again. */
bool bd_gate_voided(const bd_step_buffer *buffer, uint32_t seq_index);
/* After a step: what it tells of step times and of loads that were late. */
void bd_gate_learn(bd_engine *engine, const bd_step_buffer *buffer);

/* collect.c */
void bd_engine_collect(bd_engine *engine, bd_step_buffer *buffer, bd_status status,
                       const bd_error *err);
void bd_engine_deliver(bd_engine *engine, bd_step_buffer *buffer);
/* Ends what was cancelled or is idle; true: there was some, so there is room now. Only while
 * nothing is undelivered. */
bool bd_engine_reap(bd_engine *engine);
/* Ends every sequence with err. */
void bd_engine_end_all(bd_engine *engine, const bd_error *err);

#endif
