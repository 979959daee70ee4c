/* tenants.c - tables of tenants: made from the file, replaced by a reload, looked up by key.
 * Threads: any; a table never changes, only which one is in use does. */
#include <errno.h>
#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <nettle/sha2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "tenants_internal.h"

/* ---- Holding ---- */

static void account_release(bd_tenant_account *account) {
    if (!account || atomic_fetch_sub(&account->holders, 1) > 1) return;
    pthread_mutex_destroy(&account->lock);
    free(account);
}

void bd_tenant_hold(const bd_tenant *tenant) {
    if (tenant) atomic_fetch_add(&tenant->internal->holders, 1);
}

void bd_tenant_release(const bd_tenant *tenant) {
    if (!tenant) return;
    bd_tenant_internal *in = tenant->internal;
    if (atomic_fetch_sub(&in->holders, 1) > 1) return;
    for (uint32_t i = 0; i < in->variant_count; i++)
        free(in->variants[i]);
    free(in->variants);
    account_release(in->account);
    free(in);
}

static void table_free(bd_tenant_table *table) {
    if (!table) return;
    for (uint32_t i = 0; table->items && i < table->count; i++)
        bd_tenant_release(&table->items[i]->tenant);
    bd_map_destroy(table->names);
    free(table->items);
    free(table->keys);
    free(table);
}

/* ---- Keys ---- */

/* A key is found by the MAC of its digest under a secret that is made at start and never leaves the
 * process. A search among sorted MACs takes a time that depends on the MAC alone, and of that a
 * client without the secret knows nothing, whatever keys it tries: neither the order of the keys
 * nor how much of one was right. A plain search by digest would show by its time how many leading
 * bits of a digest are those of a key in use. The last comparison takes constant time all the same.
 */
static void mac_of(const bd_tenants *tenants, const uint8_t digest[SHA256_DIGEST_SIZE],
                   uint8_t out[32]) {
    struct hmac_sha256_ctx mac;
    hmac_sha256_set_key(&mac, sizeof tenants->secret, tenants->secret);
    hmac_sha256_update(&mac, SHA256_DIGEST_SIZE, digest);
    hmac_sha256_digest(&mac, 32, out);
}

static int compare_keys(const void *a, const void *b) {
    return memcmp(((const bd_tenant_key *)a)->mac, ((const bd_tenant_key *)b)->mac, 32);
}

static const bd_tenant *find_key(const bd_tenant_table *table, const uint8_t mac[32]) {
    uint32_t low = 0, high = table->key_count;
    while (low < high) { /* the first that is not smaller */
        uint32_t middle = low + (high - low) / 2;
        if (memcmp(table->keys[middle].mac, mac, 32) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == table->key_count || !memeql_sec(table->keys[low].mac, mac, 32)) return NULL;
    return table->keys[low].tenant;
}

const bd_tenant *bd_tenants_by_key(bd_tenants *tenants, const char *key, size_t key_bytes) {
    uint8_t digest[SHA256_DIGEST_SIZE], mac[32];
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, key_bytes, (const uint8_t *)key);
    sha256_digest(&hash, sizeof digest, digest);
    mac_of(tenants, digest, mac);
    pthread_mutex_lock(&tenants->lock);
    const bd_tenant *found = find_key(tenants->table, mac);
    bd_tenant_hold(found);
    pthread_mutex_unlock(&tenants->lock);
    return found;
}

static int compare_name(const void *name, const void *item) {
    return strcmp(name, *(char *const *)item);
}

bool bd_tenant_allows(const bd_tenant *tenant, const char *name) {
    if (!tenant || tenant->internal->every_variant) return true;
    const bd_tenant_internal *in = tenant->internal;
    return bsearch(name, in->variants, in->variant_count, sizeof(char *), compare_name) != NULL;
}

/* ---- Making a table ---- */

static bd_tenant_account *account_create(uint32_t id) {
    bd_tenant_account *account = calloc(1, sizeof *account);
    if (!account) return NULL;
    atomic_init(&account->holders, 1);
    account->id = id;
    pthread_mutex_init(&account->lock, NULL);
    return account;
}

/* Takes the entry's list of variants. */
static bd_tenant_internal *tenant_create(bd_tenants *tenants, const bd_tenant_table *before,
                                         bd_tenant_entry *entry) {
    bd_tenant_internal *in = calloc(1, sizeof *in);
    if (!in) return NULL;
    size_t bytes = strlen(entry->name);
    const bd_tenant_internal *old = before ? bd_map_get(before->names, entry->name, bytes) : NULL;
    atomic_init(&in->holders, 1);
    if (old) {
        in->account = old->account;
        atomic_fetch_add(&in->account->holders, 1);
    } else {
        in->account = account_create(tenants->next_id);
        if (!in->account) {
            free(in);
            return NULL;
        }
        tenants->next_id++;
    }
    in->tenant = (bd_tenant){.id = in->account->id,
                             .weight = entry->weight,
                             .priority_min = entry->priority_min,
                             .internal = in};
    memcpy(in->tenant.name, entry->name, bytes + 1);
    in->every_variant = entry->every_variant;
    in->variants = entry->variants;
    in->variant_count = entry->variant_count;
    in->key_count = entry->key_count;
    entry->variants = NULL;
    in->requests_per_minute = entry->requests_per_minute;
    in->request_burst = entry->request_burst;
    in->tokens_per_minute = entry->tokens_per_minute;
    in->token_burst = entry->token_burst;
    in->max_concurrent = entry->max_concurrent;
    return in;
}

static bool add_tenant(bd_tenants *tenants, const bd_tenant_table *before, bd_tenant_table *table,
                       bd_tenant_entry *entry) {
    bd_tenant_internal *in = tenant_create(tenants, before, entry);
    if (!in) return false;
    table->items[table->count++] = in;
    for (uint32_t i = 0; i < entry->key_count; i++) {
        bd_tenant_key *key = &table->keys[table->key_count++];
        mac_of(tenants, entry->keys[i], key->mac);
        key->tenant = &in->tenant;
    }
    return bd_map_put(table->names, entry->name, strlen(entry->name), in) == BD_OK;
}

static bd_tenant_table *table_create(bd_tenants *tenants, const bd_tenant_table *before,
                                     bd_tenant_list *list) {
    size_t key_count = 0;
    for (uint32_t i = 0; i < list->count; i++)
        key_count += list->items[i].key_count;
    bd_tenant_table *table = calloc(1, sizeof *table);
    if (!table) return NULL;
    table->items = calloc(list->count, sizeof *table->items);
    table->keys = calloc(key_count, sizeof *table->keys);
    table->names = bd_map_create(list->count);
    bool ok = table->items && table->keys && table->names;
    for (uint32_t i = 0; ok && i < list->count; i++)
        ok = add_tenant(tenants, before, table, &list->items[i]);
    if (!ok) {
        table_free(table);
        return NULL;
    }
    qsort(table->keys, table->key_count, sizeof *table->keys, compare_keys);
    return table;
}

static void apply_limits(const bd_tenant_internal *in, uint64_t now_us) {
    bd_tenant_account *account = in->account;
    pthread_mutex_lock(&account->lock);
    bd_bucket_set(&account->requests, in->requests_per_minute, in->request_burst, now_us);
    bd_bucket_set(&account->tokens, in->tokens_per_minute, in->token_burst, now_us);
    account->sequences_max = in->max_concurrent;
    pthread_mutex_unlock(&account->lock);
}

/* With reload_lock, or before anybody else knows of it. */
static bd_status load(bd_tenants *tenants, bd_tenants_change *out, bd_error *err) {
    bd_tenant_list list;
    bd_tenant_table *before = tenants->table; /* nobody else replaces it */
    bd_status status = bd_tenant_list_read(tenants->path, &list, err);
    if (status != BD_OK) return status;
    bd_tenant_table *table = table_create(tenants, before, &list);
    bd_tenant_list_deinit(&list);
    if (!table) return bd_fail(err, BD_E_MEMORY, tenants->path, "%s: out of memory", tenants->path);
    uint32_t stay = 0;
    for (uint32_t i = 0; before && i < table->count; i++)
        stay += bd_map_get(before->names, table->items[i]->tenant.name,
                           strlen(table->items[i]->tenant.name)) != NULL;
    *out = (bd_tenants_change){.total = table->count,
                               .added = table->count - stay,
                               .removed = before ? before->count - stay : 0};
    uint64_t now_us = bd_now_us();
    for (uint32_t i = 0; i < table->count; i++)
        apply_limits(table->items[i], now_us);
    pthread_mutex_lock(&tenants->lock);
    tenants->table = table;
    pthread_mutex_unlock(&tenants->lock);
    table_free(before);
    return BD_OK;
}

bd_status bd_tenants_open(const char *path, bd_tenants **out, bd_error *err) {
    *out = NULL;
    bd_tenants *tenants = calloc(1, sizeof *tenants);
    if (!tenants) return bd_fail(err, BD_E_MEMORY, path, "%s: out of memory", path);
    pthread_mutex_init(&tenants->lock, NULL);
    pthread_mutex_init(&tenants->reload_lock, NULL);
    tenants->next_id = 1;
    bd_tenants_change change;
    bd_status status = BD_OK;
    tenants->path = strdup(path);
    if (!tenants->path)
        status = bd_fail(err, BD_E_MEMORY, path, "%s: out of memory", path);
    else if (getrandom(tenants->secret, sizeof tenants->secret, 0) !=
             (ssize_t)sizeof tenants->secret)
        status = bd_fail_errno(err, BD_E_IO, "getrandom", errno, "no random bytes for keys");
    if (status == BD_OK) status = load(tenants, &change, err);
    if (status != BD_OK) {
        bd_tenants_destroy(tenants);
        return status;
    }
    bd_log(BD_LOG_INFO, "tenants", "read path=%s tenants=%u", path, (unsigned)change.total);
    *out = tenants;
    return BD_OK;
}

bd_status bd_tenants_reload(bd_tenants *tenants, bd_tenants_change *out, bd_error *err) {
    pthread_mutex_lock(&tenants->reload_lock);
    bd_error fault;
    bd_status status = load(tenants, out, &fault);
    if (status == BD_OK) bd_tenants_report_unknown(tenants);
    pthread_mutex_unlock(&tenants->reload_lock);
    if (status != BD_OK) {
        bd_log_error("tenants", "not reloaded", &fault);
        if (err) *err = fault;
        return status;
    }
    bd_log(BD_LOG_INFO, "tenants", "reloaded tenants=%u added=%u removed=%u", (unsigned)out->total,
           (unsigned)out->added, (unsigned)out->removed);
    return BD_OK;
}

void bd_tenants_watch(bd_tenants *tenants, struct bd_router *router) {
    pthread_mutex_lock(&tenants->reload_lock);
    tenants->router = router;
    bd_tenants_report_unknown(tenants);
    pthread_mutex_unlock(&tenants->reload_lock);
}

void bd_tenants_destroy(bd_tenants *tenants) {
    if (!tenants) return;
    table_free(tenants->table);
    pthread_mutex_destroy(&tenants->lock);
    pthread_mutex_destroy(&tenants->reload_lock);
    free(tenants->path);
    free(tenants);
}

const bd_tenant **bd_tenants_hold_all(bd_tenants *tenants, uint32_t *count) {
    pthread_mutex_lock(&tenants->lock);
    const bd_tenant_table *table = tenants->table;
    const bd_tenant **list = calloc(table->count, sizeof(const bd_tenant *));
    *count = list ? table->count : 0;
    for (uint32_t i = 0; i < *count; i++) {
        list[i] = &table->items[i]->tenant;
        bd_tenant_hold(list[i]);
    }
    pthread_mutex_unlock(&tenants->lock);
    return list;
}
