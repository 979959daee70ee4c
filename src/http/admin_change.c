/* admin_change.c - POST /admin/rescan and vLLM's load_lora_adapter and unload_lora_adapter: given
 * to the router, answered when it is done. Threads: begun on a shard or a worker, answered from
 * bd-scan or bd-sched. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

typedef struct pending_change {
    bd_change change;    /* first member */
    bd_request *request; /* a reference */
} pending_change;

/* ---- Answers ---- */

static void write_list(const bd_change *change, bd_change_result result, const char *key,
                       bd_strbuf *out) {
    uint32_t written = 0;
    bd_strbuf_printf(out, "\"%s\":[", key);
    for (uint32_t i = 0; i < change->entry_count; i++) {
        const bd_change_entry *entry = &change->entries[i];
        if (entry->result != result) continue;
        if (written++ > 0) bd_strbuf_puts(out, ",");
        if (entry->fault) bd_strbuf_puts(out, "{\"path\":");
        bd_strbuf_json_string(out, entry->name, strlen(entry->name));
        if (!entry->fault) continue;
        bd_strbuf_puts(out, ",\"failure\":");
        bd_strbuf_json_string(out, entry->fault, strlen(entry->fault));
        bd_strbuf_puts(out, "}");
    }
    bd_strbuf_puts(out, "],");
}

static bool answer_rescan(const bd_change *change, bd_reply *reply, bd_api_error *err) {
    if (change->status != BD_OK)
        return bd_api_fail(err, BD_API_CONFLICT, NULL, "%.400s", change->error.message);
    bd_strbuf *out = &reply->body;
    bd_strbuf_printf(out, "{\"ok\":true,\"complete\":%s,", change->incomplete ? "false" : "true");
    write_list(change, BD_CHANGE_ADDED, "added", out);
    write_list(change, BD_CHANGE_REPLACED, "replaced", out);
    write_list(change, BD_CHANGE_REMOVED, "removed", out);
    write_list(change, BD_CHANGE_REFUSED, "refused", out);
    bd_strbuf_printf(out, "\"unchanged\":%u}", (unsigned)change->unchanged);
    reply->content_type = "application/json";
    return !out->failed || bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
}

/* The file or field at fault, by its name within the variant. NULL: all of it, or none. */
static const char *part_at_fault(const bd_change *change) {
    const char *subject = change->error.subject;
    size_t bytes = strlen(change->dir);
    if (strncmp(subject, change->dir, bytes) == 0 && subject[bytes] == '/') subject += bytes + 1;
    bool whole = !*subject || strchr(subject, '/') || strcmp(subject, change->name) == 0;
    return whole ? NULL : subject;
}

/* For clients of the API, who are told no paths; the log has them. */
static bool fail_files(const bd_change *change, bd_api_kind kind, bd_api_error *err) {
    const char *part = part_at_fault(change);
    return bd_api_fail(err, kind, "lora_path", "Loading the lora adapter '%s' failed: %s%s%s%s.",
                       change->name, bd_api_variant_fault(&change->error), part ? " (" : "",
                       part ? part : "", part ? ")" : "");
}

/* Texts and statuses as vLLM's, whose clients compare them. */
static bool answer_adapter(const bd_change *change, bool operator, bd_reply * reply,
                           bd_api_error *err) {
    bool load = change->kind == BD_CHANGE_LOAD;
    if (change->status == BD_OK) {
        bd_strbuf_printf(&reply->body, "Success: LoRA adapter '%s' %s successfully.", change->name,
                         load ? "added" : "removed");
        reply->content_type = "text/plain; charset=utf-8";
        return !reply->body.failed ||
               bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
    }
    if (change->status == BD_E_SHUTDOWN)
        return bd_api_fail(err, BD_API_SHUTDOWN, NULL, "The server is shutting down.");
    if (change->status == BD_E_NOT_FOUND && !load)
        return bd_api_fail(err, BD_API_MODEL, "lora_name", "The lora adapter '%s' cannot be found.",
                           change->name);
    if (change->taken)
        return bd_api_fail(err, BD_API_VALUE, "lora_name",
                           "The lora adapter '%s' has already been loaded. If you want to load the "
                           "adapter in place, set 'load_inplace' to True.",
                           change->name);
    bd_api_kind kind = change->status == BD_E_NOT_FOUND ? BD_API_MODEL
                       : change->status == BD_BUSY      ? BD_API_VARIANT
                                                        : BD_API_VALUE;
    if (change->of_files && !operator) return fail_files(change, kind, err);
    bool unfit_name =
        change->status == BD_E_ARGUMENT && strcmp(change->error.subject, change->name) == 0;
    return bd_api_fail(err, kind, load && !unfit_name ? "lora_path" : "lora_name", "%.400s",
                       change->error.message);
}

static void on_done(bd_change *change) {
    pending_change *pending = (pending_change *)change;
    bd_request *request = pending->request;
    bd_api_error err;
    bool rescan = change->kind == BD_CHANGE_RESCAN;
    bool ok = rescan ? answer_rescan(change, &request->reply, &err)
                     : answer_adapter(change, request->shard->admin, &request->reply, &err);
    if (ok)
        request->reply.status = MHD_HTTP_OK;
    else
        bd_request_set_error(request, &err);
    bd_change_clear(change);
    free(pending);
    pthread_mutex_lock(&request->lock);
    request->reply_ready = true;
    pthread_mutex_unlock(&request->lock);
    bd_request_post(request);
    bd_request_unref(request);
}

/* ---- Orders ---- */

static bool fill_adapter(bd_request *request, bool load, bd_change *change, bd_api_error *err) {
    const bd_http_server *server = request->shard->server;
    bd_lora_request parsed;
    if (!bd_openai_lora_request(request->body ? request->body : "", request->body_bytes, load,
                                &parsed, err))
        return false;
    change->kind = load ? BD_CHANGE_LOAD : BD_CHANGE_UNLOAD;
    memcpy(change->name, parsed.name, sizeof change->name);
    memcpy(change->dir, parsed.path, sizeof change->dir);
    change->replace = parsed.load_inplace;
    /* Only who has the operator's key may name any place on this machine. */
    change->anywhere = request->shard->admin && server->admin_guarded;
    return true;
}

bool bd_admin_change(bd_request *request, bd_api_error *err) {
    pending_change *pending = calloc(1, sizeof *pending);
    if (!pending) return bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
    bool load = request->route->id == BD_ROUTE_LOAD_ADAPTER;
    pending->change.kind = BD_CHANGE_RESCAN;
    pending->change.done = on_done;
    pending->request = request;
    if (request->route->id != BD_ROUTE_ADMIN_RESCAN &&
        !fill_adapter(request, load, &pending->change, err)) {
        free(pending);
        return false;
    }
    bd_request_ref(request);
    bd_router_change(request->shard->server->router, &pending->change);
    return true;
}
