/* admin.c - GET /admin/variants, POST /admin/variants/{name}/{verb}, GET /admin/tenants and POST
 * /admin/reload. Threads: the admin shard's, which may wait for bd-sched and for a file. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

enum { SPARE_INFOS = 64 };

static const char *const state_names[] = {
    [BD_VARIANT_ABSENT] = "absent",     [BD_VARIANT_QUEUED] = "queued",
    [BD_VARIANT_LOADING] = "loading",   [BD_VARIANT_READY] = "ready",
    [BD_VARIANT_DRAINING] = "draining", [BD_VARIANT_FAILED] = "failed",
};

static void put_seconds(bd_strbuf *out, const char *name, bool known, double seconds) {
    bd_strbuf_printf(out, ",\"%s\":", name);
    if (known)
        bd_strbuf_json_number(out, seconds);
    else
        bd_strbuf_puts(out, "null");
}

static double microseconds(uint64_t from_us, uint64_t to_us) {
    return to_us > from_us ? (double)(to_us - from_us) * 1e-6 : 0;
}

/* Most messages name their subject already. */
static void write_fault(bd_strbuf *out, const bd_error *fault) {
    char text[sizeof fault->subject + sizeof fault->message + 2];
    bool named = !fault->subject[0] || strstr(fault->message, fault->subject);
    int bytes = snprintf(text, sizeof text, "%s%s%s", named ? "" : fault->subject,
                         named ? "" : ": ", fault->message);
    bd_strbuf_json_string(out, text, (size_t)bytes);
}

static void write_variant(const bd_router_info *whole, uint64_t now_us, bd_strbuf *out) {
    const bd_variant_info *info = &whole->cache;
    bd_strbuf_puts(out, "{\"name\":");
    bd_strbuf_json_string(out, info->name, strlen(info->name));
    bd_strbuf_printf(out,
                     ",\"state\":\"%s\",\"page_bytes\":%" PRIu64 ",\"file_bytes\":%" PRIu64
                     ",\"host_bytes\":%" PRIu64,
                     state_names[info->state], info->page_bytes, info->file_bytes,
                     info->host_bytes);
    bd_strbuf_puts(out, ",\"digest\":\"");
    for (size_t i = 0; i < sizeof whole->digest; i++)
        bd_strbuf_printf(out, "%02x", whole->digest[i]);
    bd_strbuf_printf(out, "\",\"retired\":%s", whole->retired ? "true" : "false");
    bd_strbuf_printf(out, ",\"pinned\":%s,\"protected\":%s", info->pinned ? "true" : "false",
                     info->protected_by_rate ? "true" : "false");
    bd_strbuf_printf(out,
                     ",\"references\":%" PRIu32 ",\"waiters\":%" PRIu32 ",\"loads\":%" PRIu64
                     ",\"evictions\":%" PRIu64,
                     info->references, info->waiters, info->loads, info->evictions);
    bd_strbuf_puts(out, ",\"rate_per_s\":");
    bd_strbuf_json_number(out, info->rate_per_s);
    put_seconds(out, "load_seconds", info->load_us > 0, (double)info->load_us * 1e-6);
    put_seconds(out, "idle_seconds", info->last_use_us > 0,
                microseconds(info->last_use_us, now_us));
    put_seconds(out, "retry_in_seconds", info->state == BD_VARIANT_FAILED,
                microseconds(now_us, info->retry_at_us));
    bd_strbuf_puts(out, ",\"failure\":");
    if (info->failure)
        write_fault(out, info->failure);
    else
        bd_strbuf_puts(out, "null");
    bd_strbuf_puts(out, "}");
}

typedef struct refused_list {
    bd_strbuf *out;
    uint32_t count;
} refused_list;

static void write_refused(void *ctx, const char *dir, const char *fault) {
    refused_list *list = ctx;
    bd_strbuf_puts(list->out, list->count++ > 0 ? ",{\"path\":" : "{\"path\":");
    bd_strbuf_json_string(list->out, dir, strlen(dir));
    bd_strbuf_puts(list->out, ",\"failure\":");
    bd_strbuf_json_string(list->out, fault, strlen(fault));
    bd_strbuf_puts(list->out, "}");
}

bool bd_admin_variants(bd_http_server *server, bd_strbuf *out, bd_api_error *err) {
    /* Some may come, and some retired ones are listed too. */
    uint32_t max = bd_router_served_count(server->router) + SPARE_INFOS;
    bd_router_info *infos = calloc(max, sizeof *infos); /* failures are touched where one failed */
    if (!infos) return bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
    uint32_t count = bd_router_infos(server->router, infos, max);
    uint64_t now_us = bd_now_us();
    bd_strbuf_puts(out, "{\"variants\":[");
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0) bd_strbuf_puts(out, ",");
        write_variant(&infos[i], now_us, out);
    }
    free(infos);
    refused_list refused = {.out = out};
    bd_strbuf_puts(out, "],\"refused\":[");
    bd_router_refused(server->router, write_refused, &refused);
    bd_strbuf_puts(out, "]}");
    return !out->failed || bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
}

static bool find_verb(const char *text, bd_admin_verb *verb) {
    static const char *const names[] = {[BD_ADMIN_LOAD] = "load",
                                        [BD_ADMIN_UNLOAD] = "unload",
                                        [BD_ADMIN_PIN] = "pin",
                                        [BD_ADMIN_UNPIN] = "unpin"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        *verb = (bd_admin_verb)i;
        return true;
    }
    return false;
}

bool bd_admin_variant(bd_http_server *server, const char *argument, bd_strbuf *out,
                      bd_api_error *err) {
    char name[BD_HTTP_PATH_MAX];
    bd_admin_verb verb;
    const char *slash = strrchr(argument, '/');
    if (!slash || !find_verb(slash + 1, &verb))
        return bd_api_fail(err, BD_API_URL, NULL, "Unknown URL.");
    memcpy(name, argument, (size_t)(slash - argument));
    name[slash - argument] = '\0';
    size_t bytes = bd_percent_decode(name);
    const bd_served *served = bd_router_find(server->router, name, bytes, 0);
    bd_api_quoted quoted;
    if (!served)
        return bd_api_fail(err, BD_API_MODEL, NULL, "The model '%s' does not exist.",
                           bd_api_quote(&quoted, name, bytes));
    bd_error fault = {0};
    bd_status status = bd_router_admin(server->router, verb, served, &fault);
    bd_router_release(server->router, served);
    if (status == BD_OK || status == BD_AGAIN) {
        bd_strbuf_printf(out, "{\"ok\":true,\"pending\":%s}",
                         status == BD_AGAIN ? "true" : "false");
        return true;
    }
    bd_api_kind kind = status == BD_E_ARGUMENT  ? BD_API_VALUE
                       : status == BD_E_VARIANT ? BD_API_VARIANT
                                                : BD_API_CONFLICT;
    return bd_api_fail(err, kind, NULL, "%.400s",
                       fault.message[0] ? fault.message : bd_status_text(status));
}

bool bd_admin_tenants(bd_http_server *server, bd_strbuf *out, bd_api_error *err) {
    if (server->options.tenants)
        bd_tenants_write_json(server->options.tenants, bd_now_us(), out);
    else
        bd_strbuf_puts(out, "{\"tenants\":[]}");
    return !out->failed || bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
}

bool bd_admin_reload(bd_http_server *server, bd_strbuf *out, bd_api_error *err) {
    bd_tenants_change change;
    bd_error fault = {0};
    if (!server->options.tenants)
        return bd_api_fail(err, BD_API_CONFLICT, NULL, "No file of tenants is configured.");
    if (bd_tenants_reload(server->options.tenants, &change, &fault) != BD_OK)
        return bd_api_fail(err, BD_API_CONFLICT, NULL, "%.400s", fault.message);
    bd_strbuf_printf(
        out, "{\"ok\":true,\"tenants\":%" PRIu32 ",\"added\":%" PRIu32 ",\"removed\":%" PRIu32 "}",
        change.total, change.added, change.removed);
    return true;
}
