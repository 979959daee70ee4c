/* router.h - names to variants, queues per variant, admission.
 * Owner: server. Threads: find, reserve, submit, cancel, drain, served_*, idle, infos and admin
 * from any thread but bd-sched (submit, cancel and unreserve also from there); create .. add_* from
 * the builder, before the engine starts. Order of life: router_create, engine_create
 * (bd_router_hooks), router_attach, add_*, engine_start .. engine_stop, engine_destroy,
 * router_destroy, cache_destroy. Every lease is back after engine_stop. */
#ifndef BITDELTA_ROUTER_ROUTER_H
#define BITDELTA_ROUTER_ROUTER_H

#include "bitdelta/engine/engine.h"
#include "bitdelta/tokenizer/tokenizer.h"

typedef struct bd_router bd_router;

/* A served name; immutable, lives as long as the router. */
typedef struct bd_served {
    char name[BD_VARIANT_NAME_MAX + 1];
    bool is_base;
    uint64_t created_s;
    uint32_t max_model_len, vocab;
    const bd_tokenizer *tokenizer; /* NULL: the model has none; only id prompts work */
    const char *dir; /* variant directory or base directory, for messages to operators only */
    uint32_t eos_count;
    int32_t eos_ids[BD_EOS_IDS_MAX];
    bd_variant *variant; /* NULL for the base */
    void *internal;      /* the router's queue */
} bd_served;

typedef struct bd_job bd_job;
struct bd_router_choice;

typedef struct bd_job_sink { /* on bd-sched; must not block. choice = prompt_number * n + k */
    bool (*token)(void *ctx, uint32_t choice,
                  const bd_token_result *token); /* false: stop this choice */
    void (*prompt)(void *ctx, uint32_t choice, uint32_t first, const bd_token_result *tokens,
                   uint32_t count);
    void (*end)(void *ctx, uint32_t choice, bd_finish finish, int32_t stop_id);
    /* Last call for the job, exactly once: BD_OK after all choices had their end(); else what the
     * whole job failed with, some choices without an end(): BD_E_VARIANT (retry_after_s >= 1),
     * BD_CANCELLED, BD_E_SHUTDOWN, BD_E_DEVICE, BD_E_LIMIT, BD_E_MEMORY, BD_E_INTERNAL. err is NULL
     * for BD_OK and BD_CANCELLED; for BD_E_VARIANT it is the load's own error, whose status is the
     * kind of fault. The job is the creator's again. */
    void (*done)(void *ctx, bd_status status, const bd_error *err, uint32_t retry_after_s);
} bd_job_sink;

typedef struct bd_prompt {
    const int32_t *ids;
    uint32_t count;
} bd_prompt;

/* The router's part of a job; zero before submit. */
typedef struct bd_job_internal {
    bd_call submit_call, cancel_call;
    _Atomic uint32_t cancel_state;
    bd_router *router;
    struct bd_job *prev, *next; /* in the queue of its variant */
    struct bd_router_choice *choices;
    uint32_t choice_count, added, live;
    bool queued, failed, over;
    bd_status status;
    uint32_t retry_after_s;
    uint64_t first_token_us, generated_tokens;
    bd_error error;
} bd_job_internal;

/* One request; filled and owned by its creator, untouched between submit and done(). */
struct bd_job {
    const bd_served *served;
    uint32_t tenant;
    const bd_prompt *prompts;                  /* alive until done() */
    uint32_t prompt_count, choices_per_prompt; /* both >= 1; the product is what was reserved */
    /* Template, its arrays alive until done(). The router fills prompt, lease, tenant, sink and
     * sampling.choice = choice number; one seed serves all choices. */
    bd_sequence_options params;
    const bd_job_sink *sink;
    void *sink_ctx;
    uint64_t received_us; /* bd_now_us() when the request came in, for the latency histograms */
    bd_job_internal internal;
};

typedef struct bd_router_options {
    bd_engine *engine; /* set by bd_router_attach when NULL here */
    bd_cache *cache;
    bd_model *model;
    const char *base_name, *base_dir;
    const bd_tokenizer *tokenizer;
    uint32_t queue_max;        /* choices waiting over all variants; 0: no bound */
    uint32_t cold_wait_max_us; /* bounded waiting of a cold variant before it gets the next pages */
    /* Which tenant sees which name; NULL: all see all. Any thread. */
    bool (*allowed)(void *ctx, const bd_served *served, uint32_t tenant);
    void *allowed_ctx;
    bd_metrics *metrics;
} bd_router_options;

BD_MUST_CHECK bd_status bd_router_create(const bd_router_options *options, bd_router **out,
                                         bd_error *err);
void bd_router_destroy(bd_router *router); /* after bd_engine_stop */
void bd_router_attach(bd_router *router, bd_engine *engine);
bd_engine_hooks bd_router_hooks(bd_router *router); /* for bd_engine_options */

/* Before the engine starts. name NULL: delta.json's. A faulty variant is an error that names it;
 * the caller logs it and goes on with the others. Duplicates and names that
 * bd_variant_name_fault refuses: BD_E_ARGUMENT; a delta of another base: BD_E_MISMATCH. */
BD_MUST_CHECK bd_status bd_router_add_variant(bd_router *router, const char *name, const char *dir,
                                              bool pinned, bd_error *err);
/* Every sub-directory with a delta.json, in name order, hidden ones and NAME.tmp-<digits> left out;
 * faults go to `report` one by one, those of delta.json files that cannot be reached too. */
BD_MUST_CHECK bd_status bd_router_add_directory(bd_router *router, const char *dir,
                                                void (*report)(void *ctx, const char *dir,
                                                               const bd_error *err),
                                                void *ctx, uint32_t *added, bd_error *err);

/* Any thread. NULL: no such name (or not for this tenant). */
const bd_served *bd_router_find(const bd_router *router, const char *name, size_t name_bytes,
                                uint32_t tenant);
uint32_t bd_router_served_count(const bd_router *router);
const bd_served *bd_router_served_at(const bd_router *router,
                                     uint32_t index); /* the base first, then by name */

/* Any thread: room for `choices` more in the queue, atomically taken; BD_BUSY -> 429 with
 * *retry_after_s 1..60, BD_E_SHUTDOWN and BD_E_DEVICE -> 503. More choices than queue_max can ever
 * hold are taken when the queue is empty. Give back with unreserve unless submit took it over. */
BD_MUST_CHECK bd_status bd_router_reserve(bd_router *router, const bd_served *served,
                                          uint32_t tenant, uint32_t choices,
                                          uint32_t *retry_after_s);
void bd_router_unreserve(bd_router *router, const bd_served *served, uint32_t tenant,
                         uint32_t choices);
/* Any thread. Takes over the reservation; done() is called exactly once, on bd-sched. */
void bd_router_submit(bd_router *router, bd_job *job);
/* Any thread, after submit and before the creator frees the job; done() still comes. */
void bd_router_cancel(bd_router *router, bd_job *job);
void bd_router_drain(bd_router *router);      /* any thread: refuse new work from now on */
bool bd_router_idle(const bd_router *router); /* any thread: nothing reserved, queued or running */

/* A snapshot for the admin listener: fills up to `max` infos (of the variants, by name) on bd-sched
 * and waits for it. Not from bd-sched. `failure` is NULL or the element of `failures` ([max], NULL:
 * not wanted) with the same number; `name` is the served name. */
uint32_t bd_router_infos(bd_router *router, bd_variant_info *out, bd_error *failures, uint32_t max);
typedef enum bd_admin_verb {
    BD_ADMIN_LOAD,
    BD_ADMIN_UNLOAD,
    BD_ADMIN_PIN,
    BD_ADMIN_UNPIN
} bd_admin_verb;
/* Done on bd-sched, waited for. The base: BD_E_ARGUMENT. LOAD: BD_OK when resident,
 * BD_AGAIN when on its way, BD_E_VARIANT with the load's own error while a failed one may not be
 * tried again. */
BD_MUST_CHECK bd_status bd_router_admin(bd_router *router, bd_admin_verb verb,
                                        const bd_served *served, bd_error *err);

#endif
