/* tenants_internal.h - accounts and tables of tenants. An account is what outlives readings of the
 * file: identity, counters, what is used up. A bd_tenant is what one reading says; a table is all
 * tenants of one reading. */
#ifndef BITDELTA_SRC_ROUTER_TENANTS_INTERNAL_H
#define BITDELTA_SRC_ROUTER_TENANTS_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "bitdelta/base/map.h"
#include "bitdelta/config/tenants_file.h"
#include "bitdelta/router/tenants.h"
#include "bucket.h"

#define BD_TENANT_WAIT_BOUNDS 10
#define BD_LIMITS             4 /* of bd_limit */

typedef struct bd_tenant_use {
    uint64_t admitted, results[BD_TENANT_RESULTS];
    uint64_t limited[BD_LIMITS]; /* refused for now, by the limit in the way */
    uint64_t too_large;          /* refused for good */
    uint64_t prompt_tokens, new_tokens;
    uint64_t requests_now, sequences_now;
    uint64_t waits[BD_TENANT_WAIT_BOUNDS + 1], wait_us;
} bd_tenant_use;

typedef struct bd_tenant_account {
    atomic_uint holders; /* tenants */
    uint32_t id;
    pthread_mutex_t lock; /* of all below */
    bd_bucket requests, tokens;
    uint32_t sequences_max; /* 0: no limit */
    bd_tenant_use use;
} bd_tenant_account;

typedef struct bd_tenant_internal {
    bd_tenant tenant;
    atomic_uint holders; /* the table and requests */
    bd_tenant_account *account;
    bool every_variant;
    char **variants; /* sorted */
    uint32_t variant_count;
    uint32_t key_count;
    /* What the account gets when the table comes into use. */
    uint64_t requests_per_minute, request_burst, tokens_per_minute, token_burst;
    uint32_t max_concurrent;
} bd_tenant_internal;

typedef struct bd_tenant_key {
    uint8_t mac[32];
    const bd_tenant *tenant;
} bd_tenant_key;

typedef struct bd_tenant_table {
    bd_tenant_internal **items; /* in the order of the file */
    uint32_t count;
    bd_tenant_key *keys; /* sorted by mac */
    uint32_t key_count;
    bd_map *names; /* to bd_tenant_internal */
} bd_tenant_table;

struct bd_tenants {
    char *path;
    uint8_t secret[32];          /* made at start */
    pthread_mutex_t reload_lock; /* one reading at a time; of next_id */
    uint32_t next_id;
    struct bd_router *router; /* NULL: nothing to compare names with; of reload_lock too */
    pthread_mutex_t lock;     /* of table */
    bd_tenant_table *table;
};

extern const uint64_t bd_tenant_wait_bounds_us[BD_TENANT_WAIT_BOUNDS];

/* tenants_report.c; with reload_lock: names that the router does not serve. */
void bd_tenants_report_unknown(bd_tenants *tenants);
/* All tenants of now, held, in malloc'ed memory; NULL: none left. */
const bd_tenant **bd_tenants_hold_all(bd_tenants *tenants, uint32_t *count);

#endif
