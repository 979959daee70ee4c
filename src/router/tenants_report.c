/* tenants_report.c - tenants as operators see them: JSON for the admin listener, Prometheus text.
 * The text is made from the accounts and not from the metrics registry: ten thousand tenants that
 * come and go with reloads would fill that for ever. Keys appear nowhere. Threads: any. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/log.h"
#include "bitdelta/router/router.h"
#include "tenants_internal.h"

typedef struct snapshot {
    const bd_tenant *tenant;
    bd_tenant_use use;
    bd_bucket requests, tokens;
    uint32_t sequences_max;
} snapshot;

static snapshot look_at(const bd_tenant *tenant, uint64_t now_us) {
    bd_tenant_account *account = tenant->internal->account;
    pthread_mutex_lock(&account->lock);
    bd_bucket_refill(&account->requests, now_us);
    bd_bucket_refill(&account->tokens, now_us);
    snapshot s = {tenant, account->use, account->requests, account->tokens, account->sequences_max};
    pthread_mutex_unlock(&account->lock);
    return s;
}

static const char *const limit_names[BD_LIMITS] = {[BD_LIMIT_NONE] = "queue",
                                                   [BD_LIMIT_REQUESTS] = "requests",
                                                   [BD_LIMIT_TOKENS] = "tokens",
                                                   [BD_LIMIT_SEQUENCES] = "concurrent"};
static const char *const result_names[BD_TENANT_RESULTS] = {[BD_TENANT_OK] = "ok",
                                                            [BD_TENANT_REFUSED] = "refused",
                                                            [BD_TENANT_CANCELLED] = "cancelled",
                                                            [BD_TENANT_FAILED] = "failed"};

/* ---- JSON ---- */

static void put_limit(bd_strbuf *out, const char *name, uint64_t value) {
    if (value > 0)
        bd_strbuf_printf(out, ",\"%s\":%" PRIu64, name, value);
    else
        bd_strbuf_printf(out, ",\"%s\":null", name);
}

static void put_bucket(bd_strbuf *out, const char *rate, const char *burst, const char *left,
                       const bd_bucket *bucket) {
    put_limit(out, rate, bucket->rate);
    put_limit(out, burst, bucket->burst);
    if (bucket->rate > 0)
        bd_strbuf_printf(out, ",\"%s\":%" PRIu64, left, bd_bucket_left(bucket));
    else
        bd_strbuf_printf(out, ",\"%s\":null", left);
}

static void put_counts(bd_strbuf *out, const char *name, const char *const *names,
                       const uint64_t *counts, uint32_t count) {
    bd_strbuf_printf(out, ",\"%s\":{", name);
    for (uint32_t i = 0; i < count; i++)
        bd_strbuf_printf(out, "%s\"%s\":%" PRIu64, i > 0 ? "," : "", names[i], counts[i]);
    bd_strbuf_puts(out, "}");
}

static void put_variants(bd_strbuf *out, const bd_tenant_internal *in) {
    if (in->every_variant) {
        bd_strbuf_puts(out, ",\"variants\":\"*\"");
        return;
    }
    bd_strbuf_puts(out, ",\"variants\":[");
    for (uint32_t i = 0; i < in->variant_count; i++) {
        if (i > 0) bd_strbuf_puts(out, ",");
        bd_strbuf_json_string(out, in->variants[i], strlen(in->variants[i]));
    }
    bd_strbuf_puts(out, "]");
}

static void put_tenant(bd_strbuf *out, const snapshot *s) {
    const bd_tenant_use *use = &s->use;
    bd_strbuf_printf(out, "{\"name\":\"%s\",\"id\":%" PRIu32 ",\"keys\":%" PRIu32 ",\"weight\":",
                     s->tenant->name, s->tenant->id, s->tenant->internal->key_count);
    bd_strbuf_json_number(out, s->tenant->weight);
    put_variants(out, s->tenant->internal);
    put_bucket(out, "requests_per_minute", "request_burst", "requests_left", &s->requests);
    put_bucket(out, "tokens_per_minute", "token_burst", "tokens_left", &s->tokens);
    put_limit(out, "max_concurrent", s->sequences_max);
    bd_strbuf_printf(out,
                     ",\"priority_min\":%" PRId64 ",\"requests_now\":%" PRIu64
                     ",\"sequences_now\":%" PRIu64 ",\"admitted\":%" PRIu64
                     ",\"too_large\":%" PRIu64 ",\"prompt_tokens\":%" PRIu64
                     ",\"generated_tokens\":%" PRIu64,
                     s->tenant->priority_min, use->requests_now, use->sequences_now, use->admitted,
                     use->too_large, use->prompt_tokens, use->new_tokens);
    put_counts(out, "results", result_names, use->results, BD_TENANT_RESULTS);
    put_counts(out, "limited", limit_names, use->limited, BD_LIMITS);
    bd_strbuf_puts(out, "}");
}

void bd_tenants_write_json(bd_tenants *tenants, uint64_t now_us, bd_strbuf *out) {
    uint32_t count;
    const bd_tenant **list = bd_tenants_hold_all(tenants, &count);
    if (!list) {
        out->failed = true;
        return;
    }
    bd_strbuf_puts(out, "{\"tenants\":[");
    for (uint32_t i = 0; i < count; i++) {
        snapshot s = look_at(list[i], now_us);
        if (i > 0) bd_strbuf_puts(out, ",");
        put_tenant(out, &s);
        bd_tenant_release(list[i]);
    }
    bd_strbuf_puts(out, "]}");
    free(list);
}

/* ---- Prometheus ---- */

static void put_head(bd_strbuf *out, const char *name, const char *type, const char *help) {
    bd_strbuf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* One sample per name of a label. Names of tenants need no escaping. */
static void put_samples(bd_strbuf *out, const char *name, const snapshot *s, const char *label,
                        const char *const *names, const uint64_t *counts, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        bd_strbuf_printf(out, "%s{%s=\"%s\",tenant=\"%s\"} %" PRIu64 "\n", name, label, names[i],
                         s->tenant->name, counts[i]);
}

static void put_sample(bd_strbuf *out, const char *name, const snapshot *s, uint64_t value) {
    bd_strbuf_printf(out, "%s{tenant=\"%s\"} %" PRIu64 "\n", name, s->tenant->name, value);
}

static void put_wait(bd_strbuf *out, const snapshot *s) {
    static const char name[] = "bitdelta_tenant_wait_seconds";
    uint64_t total = 0;
    for (uint32_t i = 0; i <= BD_TENANT_WAIT_BOUNDS; i++) {
        total += s->use.waits[i];
        bd_strbuf_printf(out, "%s_bucket{tenant=\"%s\",le=\"", name, s->tenant->name);
        if (i < BD_TENANT_WAIT_BOUNDS)
            bd_strbuf_json_number(out, (double)bd_tenant_wait_bounds_us[i] / 1e6);
        else
            bd_strbuf_puts(out, "+Inf");
        bd_strbuf_printf(out, "\"} %" PRIu64 "\n", total);
    }
    bd_strbuf_printf(out, "%s_sum{tenant=\"%s\"} ", name, s->tenant->name);
    bd_strbuf_json_number(out, (double)s->use.wait_us / 1e6);
    bd_strbuf_printf(out, "\n%s_count{tenant=\"%s\"} %" PRIu64 "\n", name, s->tenant->name, total);
}

typedef enum part {
    PART_REQUESTS,
    PART_LIMITED,
    PART_TOO_LARGE,
    PART_PROMPT,
    PART_GENERATED,
    PART_NOW,
    PART_WAIT,
    PART_COUNT
} part;

static const struct {
    const char *name, *type, *help;
} parts[PART_COUNT] = {
    [PART_REQUESTS] = {"bitdelta_tenant_requests_total", "counter",
                       "Admitted requests of a tenant by the way they ended."},
    [PART_LIMITED] = {"bitdelta_tenant_limited_total", "counter",
                      "Requests answered 429, by the limit that was in the way."},
    [PART_TOO_LARGE] = {"bitdelta_tenant_too_large_total", "counter",
                        "Requests that no waiting would let through."},
    [PART_PROMPT] = {"bitdelta_tenant_prompt_tokens_total", "counter", "Prompt tokens that ran."},
    [PART_GENERATED] = {"bitdelta_tenant_generation_tokens_total", "counter", "Generated tokens."},
    [PART_NOW] = {"bitdelta_tenant_sequences", "gauge", "Sequences that wait or run."},
    [PART_WAIT] = {"bitdelta_tenant_wait_seconds", "histogram",
                   "From arrival until a request runs."},
};

static void put_part(bd_strbuf *out, part which, const snapshot *s) {
    const char *name = parts[which].name;
    const bd_tenant_use *use = &s->use;
    switch (which) {
    case PART_REQUESTS:
        put_samples(out, name, s, "result", result_names, use->results, BD_TENANT_RESULTS);
        break;
    case PART_LIMITED:
        put_samples(out, name, s, "limit", limit_names, use->limited, BD_LIMITS);
        break;
    case PART_TOO_LARGE:
        put_sample(out, name, s, use->too_large);
        break;
    case PART_PROMPT:
        put_sample(out, name, s, use->prompt_tokens);
        break;
    case PART_GENERATED:
        put_sample(out, name, s, use->new_tokens);
        break;
    case PART_NOW:
        put_sample(out, name, s, use->sequences_now);
        break;
    case PART_WAIT:
        put_wait(out, s);
        break;
    case PART_COUNT:
        break;
    }
}

static bool is_used(const bd_tenant_use *use) {
    uint64_t refused = use->too_large;
    for (uint32_t i = 0; i < BD_LIMITS; i++)
        refused += use->limited[i];
    return use->admitted + refused > 0;
}

/* Tenants that were never heard of have no series. */
void bd_tenants_write_metrics(bd_tenants *tenants, bd_strbuf *out) {
    uint32_t count, used = 0;
    const bd_tenant **list = bd_tenants_hold_all(tenants, &count);
    snapshot *all = calloc(count > 0 ? count : 1, sizeof *all);
    for (uint32_t i = 0; all && i < count; i++) {
        all[used] = look_at(list[i], 0);
        if (is_used(&all[used].use)) used++;
    }
    if (!all) out->failed = true;
    for (part which = 0; all && used > 0 && which < PART_COUNT; which++) {
        put_head(out, parts[which].name, parts[which].type, parts[which].help);
        for (uint32_t i = 0; i < used; i++)
            put_part(out, which, &all[i]);
    }
    for (uint32_t i = 0; list && i < count; i++)
        bd_tenant_release(list[i]);
    free(all);
    free(list);
}

/* One line, whatever is amiss: a variant may well come later, and a misspelt name is one to look
 * for. */
void bd_tenants_report_unknown(bd_tenants *tenants) {
    const bd_tenant_table *table = tenants->table; /* reload_lock: nobody replaces it */
    const char *tenant = NULL, *variant = NULL;
    uint64_t more = 0;
    for (uint32_t i = 0; tenants->router && i < table->count; i++) {
        const bd_tenant_internal *in = table->items[i];
        for (uint32_t v = 0; v < in->variant_count; v++) {
            const char *name = in->variants[v];
            const bd_served *served = bd_router_find(tenants->router, name, strlen(name), NULL);
            if (served) {
                bd_router_release(tenants->router, served);
            } else if (!variant) {
                tenant = in->tenant.name;
                variant = name;
            } else {
                more++;
            }
        }
    }
    if (variant)
        bd_log(BD_LOG_WARN, "tenants",
               "tenant=%s may use variant=%s, which is not served (nor are %" PRIu64
               " more names of the file)",
               tenant, variant, more);
}
