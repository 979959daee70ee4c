/* tenants.h - who sends requests: names, keys, weights, what each may use and how much of it.
 * Owner: server. Threads: a bd_tenant is immutable while it is held; all functions from any thread.
 *
 * For the scheduler's fairness: every job carries `const bd_tenant *tenant` (router.h), NULL for
 * everyone when no tenants are configured; bd_tenant_id and bd_tenant_weight take NULL (id 0,
 * weight 1). An id stays with its name over reloads and is never given to another name, so it may
 * be the key of a map; the weight may differ between two jobs of one id after a reload: the later
 * job's counts. A job's tenant is held until done() of that job: who needs it longer copies the id
 * and the weight, or holds it. */
#ifndef BITDELTA_ROUTER_TENANTS_H
#define BITDELTA_ROUTER_TENANTS_H

#include <stddef.h>

#include "bitdelta/base/status.h"
#include "bitdelta/base/strbuf.h"

#define BD_TENANT_NAME_MAX 64

typedef struct bd_tenants bd_tenants;

/* A tenant as one reading of the file describes it. */
typedef struct bd_tenant {
    uint32_t id;          /* >= 1 */
    double weight;        /* > 0: its share of a busy server against the others' */
    int64_t priority_min; /* the most urgent (lowest) `priority` its requests may ask for */
    char name[BD_TENANT_NAME_MAX + 1];
    struct bd_tenant_internal *internal;
} bd_tenant;

static inline uint32_t bd_tenant_id(const bd_tenant *tenant) {
    return tenant ? tenant->id : 0;
}

static inline double bd_tenant_weight(const bd_tenant *tenant) {
    return tenant ? tenant->weight : 1.0;
}

/* ---- The file ---- */

/* Reads the file; format and limits: config/tenants_file.h. */
BD_MUST_CHECK bd_status bd_tenants_open(const char *path, bd_tenants **out, bd_error *err);
/* Nobody may look up any more; tenants still held live on. NULL is fine. */
void bd_tenants_destroy(bd_tenants *tenants);

typedef struct bd_tenants_change {
    uint32_t total, added, removed;
} bd_tenants_change;

/* Reads the file again; logs the outcome. On failure the tenants stay as they were. Requests go on
 * with the tenant they began with; a name that stays keeps its id, its counters and what it has
 * used up. */
BD_MUST_CHECK bd_status bd_tenants_reload(bd_tenants *tenants, bd_tenants_change *out,
                                          bd_error *err);

struct bd_router;
/* From now on until another or NULL is given (before the router ends), one log line says at once
 * and at each reload which variant a tenant may use that this router does not serve. */
void bd_tenants_watch(bd_tenants *tenants, struct bd_router *router);

/* The tenant of this key, to be released; NULL: nobody's. */
const bd_tenant *bd_tenants_by_key(bd_tenants *tenants, const char *key, size_t key_bytes);
void bd_tenant_hold(const bd_tenant *tenant);    /* NULL is fine */
void bd_tenant_release(const bd_tenant *tenant); /* NULL is fine */

/* May it use this name? NULL: everyone may. */
bool bd_tenant_allows(const bd_tenant *tenant, const char *name);

/* ---- Admission ---- */

typedef enum bd_limit {
    BD_LIMIT_NONE, /* room in the queue of all */
    BD_LIMIT_REQUESTS,
    BD_LIMIT_TOKENS,
    BD_LIMIT_SEQUENCES
} bd_limit;

typedef struct bd_ask {
    const bd_tenant *tenant; /* NULL: everyone */
    uint32_t choices;        /* sequences: prompts x n */
    uint64_t least, tokens;  /* prompts and new tokens: what it needs at least, what to reserve; the
                                latter becomes what was reserved: at most what the limit can hold */
} bd_ask;

typedef struct bd_refused {
    bd_limit limit;
    bool never;             /* more than the limit can ever hold */
    uint64_t most;          /* of a limit that is never enough */
    uint32_t retry_after_s; /* >= 1 unless never: when there will be room if nobody else comes */
} bd_refused;

/* Takes one request, its sequences and its tokens, or nothing at all: BD_BUSY fills *why. */
BD_MUST_CHECK bd_status bd_tenant_admit(bd_ask *ask, uint64_t now_us, bd_refused *why);
/* The estimate becomes exact. More than is left now is a debt that later requests wait for, so that
 * nobody is refused after the work of tokenising; more than the limit can ever hold: BD_BUSY with
 * why->never, ask unchanged. */
BD_MUST_CHECK bd_status bd_tenant_correct(bd_ask *ask, uint64_t least, uint64_t tokens,
                                          uint64_t now_us, bd_refused *why);
/* Undoes admit as if it had not been. */
void bd_tenant_undo(const bd_ask *ask, uint64_t now_us);

typedef enum bd_tenant_result {
    BD_TENANT_OK,
    BD_TENANT_REFUSED, /* after it was admitted: its own fault, or no room for all */
    BD_TENANT_CANCELLED,
    BD_TENANT_FAILED,
    BD_TENANT_RESULTS
} bd_tenant_result;

/* Ends what admit began: sequences are free again, tokens that were not used return. */
void bd_tenant_settle(const bd_ask *ask, uint64_t prompt_tokens, uint64_t new_tokens,
                      bd_tenant_result result, uint64_t now_us);
/* A request began to run after this long. */
void bd_tenant_waited(const bd_tenant *tenant, uint64_t wait_us);

/* ---- For operators ---- */

/* [{"name",...},...] of all tenants in the order of the file, without keys. */
void bd_tenants_write_json(bd_tenants *tenants, uint64_t now_us, bd_strbuf *out);
/* Prometheus text, label tenant. */
void bd_tenants_write_metrics(bd_tenants *tenants, bd_strbuf *out);

#endif
