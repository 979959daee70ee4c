/* internal.h - the router's own structures.
 * The registry (queues, names) is built before the engine starts and never changes afterwards, so
 * any thread may read it. `reserved`, `jobs` and the flags are atomics; all other state is
 * bd-sched's. */
#ifndef BITDELTA_SRC_ROUTER_INTERNAL_H
#define BITDELTA_SRC_ROUTER_INTERNAL_H

#include <stdatomic.h>

#include "bitdelta/base/map.h"
#include "bitdelta/router/router.h"

#define BD_ROUTER_ASK_AGAIN_US                                                                     \
    50000u /* a variant refused for pages asks again at the latest then */

typedef enum bd_finish_kind {
    BD_FINISHED_STOP,
    BD_FINISHED_LENGTH,
    BD_FINISHED_ABORT,
    BD_FINISHED_ERROR,
    BD_FINISHED_COUNT
} bd_finish_kind;

typedef struct bd_router_series { /* of one served name; made with its first request */
    bool ready;
    bd_metric *first_token, *inter_token, *end_to_end, *queue_time, *prompt_size, *output_size;
    bd_metric *prompt_tokens, *output_tokens;
    bd_metric *finished[BD_FINISHED_COUNT];
} bd_router_series;

typedef enum bd_lease_state { BD_LEASE_NONE, BD_LEASE_WAITING, BD_LEASE_HELD } bd_lease_state;

typedef struct bd_router_queue { /* one per served name, the base included */
    bd_served served;
    bd_router *router;
    char *dir;               /* owned */
    bd_tokenizer *tokenizer; /* owned; NULL: the base's */
    /* bd-sched: */
    bd_cache_waiter waiter;
    bd_lease_state lease_state; /* the lease for the next sequence */
    bd_lease lease;
    bd_job *first, *last;                /* jobs with choices that are not in the engine yet */
    struct bd_router_queue *prev, *next; /* in router->active while first is not NULL */
    bool active;
    bool paused;         /* gives way so that a colder variant gets its pages */
    uint64_t refused_us; /* since when the cache has no pages for it; 0: it has not said so */
    uint64_t ask_us;
    bd_router_series series;
} bd_router_queue;

typedef struct bd_router_choice {
    bd_job *job;
    bd_sequence *sequence; /* NULL: not in the engine */
    uint32_t index;
    uint64_t last_token_us;
} bd_router_choice;

struct bd_router {
    bd_router_options options;
    bd_map *names;
    bd_router_queue **queues; /* the base first, then by name */
    uint32_t queue_count, queue_cap;
    _Atomic uint32_t reserved; /* choices promised room or queued */
    _Atomic uint32_t jobs;     /* submitted, done() not called */
    _Atomic uint32_t started_per_s;
    _Atomic bool draining;
    /* bd-sched: */
    bool closed;
    bd_error closed_error;
    bd_router_queue *active_first, *active_last, *cursor;
    uint32_t refused_count;    /* active queues with refused_us != 0 */
    bd_router_queue *squeezer; /* the cold variant that others give way to */
    uint64_t squeeze_check_us, squeeze_next_us;
    uint32_t queued;  /* choices in queues */
    uint32_t started; /* since rate_us */
    uint64_t rate_us;
    bd_metric *waiting;
};

static inline bd_router_queue *bd_queue_of(const bd_served *served) {
    return served->internal;
}

/* queue.c: bd-sched only */
void bd_queue_append(bd_router_queue *queue, bd_job *job);
void bd_queue_remove(bd_router_queue *queue, bd_job *job);
void bd_queue_drop_lease(bd_router_queue *queue,
                         uint64_t now_us); /* back to NONE, whatever it was */
void bd_router_before_step(void *ctx, uint64_t now_us, bool cache_changed);
uint64_t bd_router_next_wake_us(void *ctx, uint64_t now_us);
void bd_router_closed(void *ctx, const bd_error *err);

/* squeeze.c: bd-sched only */
void bd_squeeze_update(bd_router *router, uint64_t now_us);
void bd_squeeze_end(bd_router *router);

/* job.c: bd-sched only */
bd_status bd_job_start_choice(bd_job *job, bd_router_queue *queue, uint64_t now_us, bd_error *err);
/* The job may be gone afterwards. */
void bd_job_fail(bd_job *job, bd_status status, const bd_error *err, uint32_t retry_after_s);

/* series.c: bd-sched only */
void bd_series_prepare(bd_router_queue *queue);
void bd_series_job_over(const bd_job *job, uint64_t now_us);

#endif
