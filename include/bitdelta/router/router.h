/* router.h - names to variants, queues per variant, admission, and changes of what is served.
 * Owner: server. Threads: find, release, list, reserve, submit, cancel, drain, idle, infos, admin
 * and change from any thread but bd-sched (submit, cancel, release and unreserve also from there);
 * create .. start from the builder, add_* before the engine starts. Order of life: router_create,
 * engine_create (bd_router_hooks), router_attach, add_*, engine_start, router_start .. engine_stop,
 * router_stop, engine_destroy, router_destroy, cache_destroy. Every lease is back after
 * engine_stop. */
#ifndef BITDELTA_ROUTER_ROUTER_H
#define BITDELTA_ROUTER_ROUTER_H

#include "bitdelta/engine/engine.h"
#include "bitdelta/router/fair.h"
#include "bitdelta/router/tenants.h"
#include "bitdelta/tokenizer/tokenizer.h"

typedef struct bd_router bd_router;

/* A served name; immutable. It lives while somebody holds it: whoever got it from bd_router_find or
 * bd_router_list, until release, and until done() of a job whose creator holds it. A variant that
 * was removed or replaced goes on for its holders and leaves the cache with the last of them. */
typedef struct bd_served {
    char name[BD_VARIANT_NAME_MAX + 1];
    bool is_base;
    uint64_t created_s;
    uint32_t max_model_len, vocab;
    const bd_tokenizer *tokenizer; /* NULL: the model has none; only id prompts work */
    const char *dir;    /* variant directory or base directory, for messages to operators only */
    uint8_t digest[32]; /* of the variant's delta.json; zeros for the base */
    /* Of the small files beside the weights (configuration, tokenizer, chat template) as they were
     * when the name was added. */
    uint8_t files_digest[32];
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
    /* Of the first choice of each prompt, for all of them: before any token() or end() of these. */
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

/* The router's part of a job; zero before submit, but for error. */
typedef struct bd_job_internal {
    bd_call submit_call, cancel_call;
    _Atomic uint32_t cancel_state;
    bd_router *router;
    struct bd_job *prev, *next;  /* in line */
    struct bd_router_line *line; /* of its tenant and variant; NULL: not queued, or aside */
    struct bd_router_choice *choices;
    uint32_t choice_count, added, live;
    uint64_t arrival; /* at the router */
    bool queued, failed, over;
    bool aside; /* queued, but in no line: the next choice waits for what another has to tell */
    bd_status status;
    uint32_t retry_after_s;
    uint64_t first_token_us, generated_tokens;
    bd_error error; /* once failed */
} bd_job_internal;

/* One request; filled and owned by its creator, untouched between submit and done(). */
struct bd_job {
    const bd_served *served;
    const bd_tenant *tenant;                   /* held by the creator; NULL: everyone */
    uint64_t reserved_tokens;                  /* of the tenant's */
    const bd_prompt *prompts;                  /* alive until done() */
    uint32_t prompt_count, choices_per_prompt; /* both >= 1; the product is what was reserved */
    /* Template, its arrays alive until done(). The router fills prompt, lease, tenant, sink and
     * sampling.choice = choice number; one seed serves all choices. prompt_logprobs are asked of
     * the first choice of each prompt; the others begin when it has told them. */
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
    bd_fair_options fair;      /* costs of what tenants are charged for */
    /* How far a tenant may get ahead of the least served one that waits for a variant which is not
     * resident, in units of cost by weight. */
    double residency_bound;
    uint32_t slots; /* one-plane variants that fit at once, for messages about pins; 0: unknown */
    bd_metrics *metrics;
} bd_router_options;

BD_MUST_CHECK bd_status bd_router_create(const bd_router_options *options, bd_router **out,
                                         bd_error *err);
void bd_router_destroy(bd_router *router); /* after bd_engine_stop */
void bd_router_attach(bd_router *router, bd_engine *engine);
bd_engine_hooks bd_router_hooks(bd_router *router); /* for bd_engine_options */

/* Before the engine starts. name NULL: delta.json's. A faulty variant is an error that names it;
 * the caller logs it and goes on with the others. Duplicates and names that
 * bd_variant_name_fault refuses: BD_E_ARGUMENT; a delta of another base: BD_E_MISMATCH. One that
 * does not fit as a pinned one is served unpinned, with a warning. A rescan looks at it again. */
BD_MUST_CHECK bd_status bd_router_add_variant(bd_router *router, const char *name, const char *dir,
                                              bool pinned, bd_error *err);
/* Every sub-directory with a delta.json, in name order, hidden ones and NAME.tmp-<digits> left out;
 * the first of a name has it, duplicates are refused; faults go to `report` one by one, those of
 * delta.json files that cannot be reached too. Many delta.json files are read on all cores. A
 * rescan looks into the directory again. */
BD_MUST_CHECK bd_status bd_router_add_directory(bd_router *router, const char *dir,
                                                void (*report)(void *ctx, const char *dir,
                                                               const bd_error *err),
                                                void *ctx, uint32_t *added, bd_error *err);

/* Any thread. NULL: no such name (or not for this tenant). To be released. */
const bd_served *bd_router_find(bd_router *router, const char *name, size_t name_bytes,
                                const bd_tenant *tenant);
void bd_router_release(bd_router *router, const bd_served *served); /* NULL is fine */
/* All names of this tenant, the base first, then by name, in malloc'ed memory (NULL: none left).
 * To be given back with list_release. */
const bd_served **bd_router_list(bd_router *router, const bd_tenant *tenant, uint32_t *count);
void bd_router_list_release(bd_router *router, const bd_served **list, uint32_t count);
uint32_t bd_router_served_count(bd_router *router);
/* The base first, then by name. Borrowed: index 0 for ever, the others until a change. */
const bd_served *bd_router_served_at(bd_router *router, uint32_t index);

/* Any thread: what the tenant may still use and room for its choices in the queue, all or nothing;
 * BD_BUSY fills *why, BD_E_SHUTDOWN and BD_E_DEVICE do not. More choices than queue_max can ever
 * hold are taken when the queue is empty. Give back with unreserve unless submit took it over. */
BD_MUST_CHECK bd_status bd_router_reserve(bd_router *router, bd_ask *ask, bd_refused *why);
void bd_router_unreserve(bd_router *router, const bd_ask *ask);
/* Any thread. Takes over the reservation; done() is called exactly once, on bd-sched. */
void bd_router_submit(bd_router *router, bd_job *job);
/* The same for several jobs at one go: bd-sched is not woken, bd_router_wake or bd_router_help (as
 * bd_engine_help) is to follow. */
void bd_router_submit_quietly(bd_router *router, bd_job *job);
void bd_router_wake(bd_router *router);
void bd_router_help(bd_router *router);
/* Any thread, after submit and before the creator frees the job; done() still comes. */
void bd_router_cancel(bd_router *router, bd_job *job);
void bd_router_drain(bd_router *router);      /* any thread: refuse new work from now on */
bool bd_router_idle(const bd_router *router); /* any thread: nothing reserved, queued or running */

/* Any thread: what the tenants were served, as Prometheus text, label tenant. */
void bd_router_write_fairness(bd_router *router, bd_strbuf *out);

typedef struct bd_router_info {
    bd_variant_info cache; /* .name and .failure point into this struct */
    char name[BD_VARIANT_NAME_MAX + 1];
    bool retired; /* removed or replaced, still in use by requests that came before */
    uint8_t digest[32];
    bd_error failure;
} bd_router_info;

/* A snapshot for the admin listener: fills up to `max` infos (of the variants by name, then of the
 * retired) on bd-sched and waits for it. Not from bd-sched. */
uint32_t bd_router_infos(bd_router *router, bd_router_info *out, uint32_t max);
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

/* ---- Changes of what is served ---- */

typedef enum bd_change_kind {
    /* Looks again at every directory and variant that was added: new ones appear, those that are
     * gone are removed, those with other contents are replaced. A fault concerns its variant alone;
     * one that is served already stays as it is. BD_E_IO: a directory of variants cannot be read,
     * nothing was changed. */
    BD_CHANGE_RESCAN,
    /* Serves `dir` as `name` and loads it; done() when it is resident or has failed, in which case
     * the name is gone again if it was new. A name that has this directory already is loaded.
     * BD_E_ARGUMENT: the name has another directory, or is unfit; BD_E_NOT_FOUND: no such
     * directory; BD_BUSY: no room within a minute. */
    BD_CHANGE_LOAD,
    /* Removes the name; requests that came before finish. A sub-directory of an added directory
     * comes back with the next rescan. BD_E_NOT_FOUND: no such name. */
    BD_CHANGE_UNLOAD
} bd_change_kind;

typedef enum bd_change_result {
    BD_CHANGE_ADDED,
    BD_CHANGE_REPLACED,
    BD_CHANGE_REMOVED,
    BD_CHANGE_REFUSED
} bd_change_result;

typedef struct bd_change_entry {
    bd_change_result result;
    char *name;  /* REFUSED: the directory */
    char *fault; /* REFUSED only */
} bd_change_entry;

typedef struct bd_change {
    bd_message message; /* internal, first */
    bd_router *router;  /* internal */
    bd_change_kind kind;
    char name[BD_VARIANT_NAME_MAX + 1]; /* LOAD, UNLOAD */
    char dir[1024]; /* LOAD; a relative one is looked for in the first added directory */
    bool anywhere;  /* LOAD: dir may lie outside the added directories */
    bool replace;   /* LOAD: a name with another directory is given this one */
    /* On bd-scan or bd-sched (after stop: on the stopping thread), once; must not block. The change
     * is the creator's again, its results are freed with bd_change_clear. */
    void (*done)(struct bd_change *change);
    void *ctx;
    bd_status status;
    bd_error error;
    bd_change_entry *entries; /* RESCAN */
    uint32_t entry_count, unchanged;
    bool taken;       /* LOAD: refused because the name has another directory */
    bool of_files;    /* LOAD: the error is of what lies there, and may hold its path */
    bool incomplete;  /* memory ran out for entries */
    bool fresh, undo; /* internal */
} bd_change;

/* Starts `bd-scan`, the thread that reads files for changes; after the engine's start. */
BD_MUST_CHECK bd_status bd_router_start(bd_router *router, bd_error *err);
/* After engine_stop: changes that wait end with BD_E_SHUTDOWN. Also done by destroy. */
void bd_router_stop(bd_router *router);
/* Any thread, between start and stop; changes are made one after the other. */
void bd_router_change(bd_router *router, bd_change *change);
void bd_change_clear(bd_change *change);
/* Loads the pinned variants, then the named ones while pages are free; returns at once. Names that
 * are not served are logged. */
void bd_router_prefetch(bd_router *router, const char *const *names, uint32_t count);
/* What the last look at the directories refused: calls visit with each, under a lock. */
void bd_router_refused(bd_router *router,
                       void (*visit)(void *ctx, const char *dir, const char *fault), void *ctx);

#endif
