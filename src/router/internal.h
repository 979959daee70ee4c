/* internal.h - the router's own structures.
 * The registry (queues, names) is written by the builder until the engine runs and by bd-sched
 * afterwards, under names_lock; others read it under that lock, bd-sched without. What bd-scan
 * decides it hands to bd-sched as bd_registry_ops and waits, so it may read without the lock too.
 * `reserved`, `jobs` and the flags are atomics; all other state is bd-sched's. */
#ifndef BITDELTA_SRC_ROUTER_INTERNAL_H
#define BITDELTA_SRC_ROUTER_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "bitdelta/base/map.h"
#include "bitdelta/router/fair.h"
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

typedef enum bd_result_kind {
    BD_RESULT_OK,
    BD_RESULT_CANCELLED,
    BD_RESULT_VARIANT,
    BD_RESULT_SHUTDOWN,
    BD_RESULT_DEVICE,
    BD_RESULT_ERROR,
    BD_RESULT_COUNT
} bd_result_kind;

typedef struct bd_router_series { /* of one served name; made with its first request */
    bool ready;
    bd_metric *first_token, *inter_token, *end_to_end, *queue_time, *prompt_size, *output_size;
    bd_metric *prompt_tokens, *output_tokens;
    bd_metric *finished[BD_FINISHED_COUNT];
    bd_metric *results[BD_RESULT_COUNT]; /* NULL: there was none yet */
} bd_router_series;

typedef enum bd_lease_state { BD_LEASE_NONE, BD_LEASE_WAITING, BD_LEASE_HELD } bd_lease_state;

typedef struct bd_variant_mark { /* does a directory still hold what was read? */
    uint64_t manifest, side_files;
} bd_variant_mark;

typedef struct bd_source { /* a variant that was added by itself */
    char *name;            /* NULL: delta.json's */
    char *dir;
    bool pin;
} bd_source;

typedef struct bd_router_queue { /* one per served name, the base included */
    bd_served served;
    bd_router *router;
    char *dir;           /* owned */
    atomic_uint holders; /* the registry and all who found it; not counted for the base */
    bd_call retire_call; /* to bd-sched when nobody holds it any more */
    bool retired;        /* not in the registry: in router->retired */
    bool keeps_files;    /* once retired: its directory still holds what it was */
    struct bd_router_queue *prev_retired, *next_retired;
    /* bd-scan (before that: the builder): */
    char *given_name; /* owned; NULL: the name is delta.json's */
    bool pin;         /* loaded at start; not where the pin did not fit */
    bd_variant_mark mark;
    uint32_t positions;      /* max_position_embeddings, of which served.max_model_len are served */
    bd_tokenizer *tokenizer; /* owned; NULL: the base's */
    /* bd-sched: */
    bd_cache_waiter waiter;
    bd_lease_state lease_state; /* the lease for the next sequence */
    bd_lease lease;
    struct bd_router_line *lines;        /* jobs with choices that are not in the engine yet */
    struct bd_router_queue *prev, *next; /* in router->active while there are lines */
    bool active;
    bool paused;         /* gives way so that a colder variant gets its pages */
    uint64_t refused_us; /* since when the cache has no pages for it; 0: it has not said so */
    uint64_t ask_us;
    bd_router_series series;
} bd_router_queue;

/* A tenant's jobs for one variant that have choices which are not in the engine yet; never empty.
 * In the order of (priority, arrival). */
typedef struct bd_router_line {
    bd_router_queue *queue;
    struct bd_router_account *account;
    bd_job *first, *last;
    struct bd_router_line *prev, *next;                   /* in account */
    struct bd_router_line *prev_of_queue, *next_of_queue; /* in queue->lines */
} bd_router_line;

typedef struct bd_router_account { /* of a tenant, from its first request on; id 0: everyone */
    bd_fair_flow flow;             /* first member */
    struct bd_router_account *next;
    bd_router_line *first, *last, *cursor; /* the cursor goes round and round */
    uint32_t line_count;
    uint32_t ranked;     /* jobs in lines whose priority is not 0 */
    uint64_t blocked_us; /* since when nothing of it could start; 0: something could */
    char name[BD_TENANT_NAME_MAX + 1]; /* "": everyone */
    struct {
        _Atomic double counter, service, load_bytes, waiting;
    } shown; /* to metrics */
} bd_router_account;

typedef struct bd_router_choice {
    bd_job *job;
    bd_sequence *sequence; /* NULL: not in the engine */
    uint32_t index;
    uint64_t last_token_us;
    bool early; /* its variant was loading when it began, and there is no token yet */
    bool told;  /* the log-probabilities of its prompt, or there are none to tell */
} bd_router_choice;

/* One change of the registry: before goes, after comes; either may be NULL. */
typedef struct bd_registry_op {
    bd_router_queue *before, *after;
    bd_delta *delta;                    /* of after; taken, also when the change fails */
    char name[BD_VARIANT_NAME_MAX + 1]; /* of before: it may be gone afterwards */
    bool keeps_files;                   /* before's directory is as it was */
    bd_status status;                   /* not BD_OK: nothing changed, after is the caller's */
    bd_error err;
} bd_registry_op;

typedef struct bd_refusal {
    char *dir, *fault;
    bd_variant_mark mark; /* of the directory then */
} bd_refusal;

/* Somebody who wants a variant resident; bd-sched only once posted. */
typedef struct bd_load_wait {
    bd_call call; /* first member */
    bd_router *router;
    const bd_served *served; /* held */
    bd_cache_waiter waiter;
    bool waiting;    /* on the cache's list; else it asks for pages, or for the end of the load */
    bool begun;      /* there was a lease before the load had ended */
    bool while_free; /* give up when pages would have to be freed */
    uint64_t ask_us, give_up_us;
    struct bd_load_wait *prev, *next;
    /* BD_OK resident; BD_BUSY no pages; BD_E_VARIANT with the load's error; BD_E_SHUTDOWN. */
    void (*done)(struct bd_load_wait *wait, bd_status status, const bd_error *err);
    bd_change *change;
} bd_load_wait;

struct bd_router {
    bd_router_options options;
    pthread_mutex_t names_lock;
    bd_map *names;
    bd_router_queue **queues; /* the base first, then by name */
    uint32_t queue_count, queue_cap;
    /* bd-scan (before that: the builder): */
    bd_source *sources;
    uint32_t source_count;
    char **roots; /* directories of variants */
    uint32_t root_count;
    bd_refusal *refusals; /* guarded by names_lock */
    uint32_t refusal_count;
    bd_mailbox *changes;
    pthread_t scan_thread;
    bool scanning; /* the thread runs */
    atomic_bool scan_stop;
    _Atomic uint32_t reserved; /* choices promised room or queued */
    _Atomic uint32_t jobs;     /* submitted, done() not called */
    _Atomic uint32_t started_per_s;
    _Atomic bool draining;
    /* bd-sched: */
    bool closed;
    bd_error closed_error;
    bd_router_queue *retired_first;
    bd_load_wait *loads_first;
    uint32_t loads_asking;
    bd_router_queue *active_first, *active_last;
    bd_fair *fair;
    bd_map *accounts;              /* by name of the tenant; "": everyone without tenants */
    bd_map *lines;                 /* by queue and account */
    pthread_mutex_t accounts_lock; /* for the list's sake: metrics walk it */
    bd_router_account *accounts_first;
    uint32_t account_count;
    _Atomic uint64_t shown_version; /* odd: an account's `shown` is changing */
    double ask_limit;               /* accounts behind it start no loads in this turn */
    bool load_held;                 /* there was one: time alone may change that */
    uint32_t running;               /* choices in the engine, but for those that went there early */
    bd_metric *held, *idle;
    uint32_t refused_count;    /* active queues with refused_us != 0 */
    bd_router_queue *squeezer; /* the cold variant that others give way to */
    uint64_t squeeze_check_us, squeeze_next_us;
    uint64_t arrivals; /* jobs so far */
    uint32_t queued;   /* choices in queues */
    uint32_t started;  /* since rate_us */
    uint64_t rate_us;
    bd_metric *waiting;
};

static inline bd_router_queue *bd_queue_of(const bd_served *served) {
    return served->internal;
}

/* account.c: bd-sched only, but create and destroy */
bd_status bd_accounts_create(bd_router *router, bd_error *err);
void bd_accounts_destroy(bd_router *router);
/* BD_E_MEMORY: nothing was done. */
BD_MUST_CHECK bd_status bd_line_append(bd_router_queue *queue, bd_job *job);
void bd_line_leave(bd_router_line *line, uint32_t choices); /* these do not wait any more */
void bd_line_remove(bd_job *job, uint32_t choices_left);
void bd_router_charge(void *ctx, bd_payer *payer, int64_t promised, uint32_t prompt_tokens,
                      uint32_t output_tokens);
void bd_account_charge_load(bd_router *router, bd_router_account *account, uint64_t bytes);

/* queue.c: bd-sched only */
BD_MUST_CHECK bd_status bd_queue_append(bd_router_queue *queue, bd_job *job);
void bd_queue_remove(bd_router_queue *queue, bd_job *job);
/* Out of its line, so that others go on, and back; the room in the queue stays the job's. */
void bd_queue_set_aside(bd_router_queue *queue, bd_job *job);
BD_MUST_CHECK bd_status bd_queue_take_back(bd_router_queue *queue, bd_job *job);
void bd_queue_drop_lease(bd_router_queue *queue,
                         uint64_t now_us); /* back to NONE, whatever it was */
void bd_queue_fail_all(bd_router_queue *queue, bd_status status, const bd_error *err,
                       uint32_t retry_after_s);
void bd_router_before_step(void *ctx, uint64_t now_us, bool cache_changed);
uint64_t bd_router_next_wake_us(void *ctx, uint64_t now_us);
void bd_router_closed(void *ctx, const bd_error *err);

/* squeeze.c: bd-sched only */
void bd_squeeze_update(bd_router *router, uint64_t now_us);
void bd_squeeze_end(bd_router *router);

/* job.c: bd-sched only */
bd_status bd_job_start_choice(bd_job *job, bd_router_queue *queue, uint64_t now_us, bd_error *err);
/* The next choice is to begin when the first one of its prompt has told what both need. */
bool bd_job_must_wait(const bd_job *job);
/* The job may be gone afterwards. */
void bd_job_fail(bd_job *job, bd_status status, const bd_error *err, uint32_t retry_after_s);

/* registry.c */
bd_router_queue *bd_queue_create(bd_router *router, const char *name, const char *dir);
void bd_queue_free(bd_router_queue *queue);
bd_status bd_name_taken(const bd_router_queue *holder, const char *name, const char *dir,
                        bd_error *err);
/* Makes the changes on bd-sched, a few at a time, and waits; before the engine runs, here. */
void bd_registry_apply(bd_router *router, bd_registry_op *ops, uint32_t count);

/* variant.c: any thread */
/* Everything of a variant's directory but its shards. given_name NULL: delta.json's. */
bd_status bd_variant_open(bd_router *router, const char *given_name, const char *dir,
                          bd_router_queue **out, bd_delta *delta, bd_error *err);
bd_variant_mark bd_variant_mark_of(const char *dir);
void bd_queue_take_config(bd_router_queue *queue, const bd_model_config *config);
/* Fills served.files_digest; a file that is not there counts as none. */
BD_MUST_CHECK bd_status bd_queue_digest_files(bd_router_queue *queue, bd_error *err);

/* scan.c: bd-scan, or the builder */
typedef void (*bd_fault_report)(void *ctx, const char *dir, const bd_error *err);
/* Sub-directories of roots from `first_root` on. all: the sources too, and what is not found any
 * more goes. */
bd_status bd_scan_run(bd_router *router, bool all, uint32_t first_root, bd_fault_report report,
                      void *report_ctx, bd_change *change, bd_error *err);
/* One more variant, or another in the place of the one that has its name and is `before`. */
bd_status bd_scan_add(bd_router *router, const char *name, const char *dir, bool pin,
                      bd_router_queue *before, bd_error *err);
void bd_scan_refusals_free(bd_refusal *list, uint32_t count);
void bd_scan_refuse(bd_router *router, const char *dir, const bd_error *err);

/* sources.c */
bd_status bd_sources_add(bd_router *router, const char *name, const char *dir, bool pin,
                         bd_error *err);
void bd_sources_remove(bd_router *router, const char *name, const char *dir);
bd_status bd_roots_add(bd_router *router, const char *dir, bd_error *err);
void bd_sources_free(bd_router *router);

/* loads.c: begin from any thread that knows the entry to live, the rest on bd-sched. BD_E_MEMORY:
 * done() will not come. done NULL: a failure is the cache's to log, nobody else waits. */
bd_status bd_load_begin(bd_router *router, const bd_served *served, bool while_free,
                        void (*done)(bd_load_wait *wait, bd_status status, const bd_error *err),
                        bd_change *change);
void bd_loads_before_step(bd_router *router, uint64_t now_us, bool cache_changed);
void bd_loads_close(bd_router *router, const bd_error *err);

/* series.c: bd-sched only */
void bd_series_prepare(bd_router_queue *queue);
void bd_series_job_over(const bd_job *job, uint64_t now_us);

#endif
