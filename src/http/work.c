/* work.c - what a route does with a whole request, and the threads that do it for large bodies.
 * Threads: bd_work_run on the shard's or a worker's; a request is with one of them at a time. */
#include <stdio.h>
#include <string.h>

#include "bitdelta/base/log.h"
#include "internal.h"

bool bd_health_error(const bd_http_server *server, bool draining_too, bd_api_error *err) {
    bd_http_health health = BD_HTTP_READY;
    if (server->options.health) health = server->options.health(server->options.health_ctx);
    if (health == BD_HTTP_DEAD) {
        bd_api_fail(err, BD_API_DEAD, NULL, "The engine is not running.");
        return true;
    }
    if (draining_too && atomic_load(&server->phase) != BD_PHASE_RUN) {
        bd_api_fail(err, BD_API_SHUTDOWN, NULL, "The server is shutting down.");
        return true;
    }
    if (health == BD_HTTP_LOADING || !atomic_load(&server->openai)) {
        bd_api_fail(err, BD_API_LOADING, NULL, "The model is still loading.");
        err->retry_after_s = 5;
        return true;
    }
    return false;
}

/* false: *err. The request belongs to bd-sched from submit to done(), which a reference of its own
 * covers. */
static bool start_completion(bd_request *request, bd_openai *openai, bd_api_error *err) {
    const char *body = request->body ? request->body : "";
    bool chat = request->route->id == BD_ROUTE_CHAT;
    bd_completion *completion =
        chat ? bd_chat_completion_create(openai, request->tenant, body, request->body_bytes,
                                         request->received_us, err)
             : bd_completion_create(openai, request->tenant, body, request->body_bytes,
                                    request->received_us, err);
    if (!completion) return false;
    bd_request_ref(request);
    pthread_mutex_lock(&request->lock);
    request->completion = completion;
    pthread_mutex_unlock(&request->lock);
    bd_completion_submit_quietly(completion, &bd_request_sink, request);
    pthread_mutex_lock(&request->lock);
    bool cancelled = request->cancelled;
    pthread_mutex_unlock(&request->lock);
    if (cancelled) bd_request_cancel(request, BD_CANCELLED); /* the client left before the submit */
    return true;
}

static bool model_card(bd_request *request, bd_openai *openai, bd_strbuf *out, bd_api_error *err) {
    char id[BD_HTTP_PATH_MAX];
    size_t bytes = strlen(request->argument);
    memcpy(id, request->argument, bytes + 1);
    bytes = bd_percent_decode(id);
    return bd_openai_model(openai, request->tenant, id, bytes, out, err);
}

/* Who uses what is not for everyone to read: where tenants are apart, the public listener gives
 * totals only. */
static bool write_metrics(bd_http_server *server, bool admin, bd_strbuf *out) {
    bd_metrics *metrics = server->options.metrics;
    bd_tenants *tenants = server->options.tenants;
    if (!metrics) return true;
    bd_metric_set(
        bd_metrics_gauge(metrics, "bd_http_connections", "Open client connections.", NULL, 0),
        atomic_load(&server->connection_count));
    bd_metric_set(bd_metrics_gauge(metrics, "bd_http_requests_active",
                                   "Requests that wait for a worker or the engine, and streams.",
                                   NULL, 0),
                  atomic_load(&server->active_count));
    bd_metric_set(
        bd_metrics_gauge(metrics, "bd_http_upload_bytes", "Memory of request bodies.", NULL, 0),
        (double)atomic_load(&server->upload_bytes));
    const bool loaded = atomic_load(&server->openai) != NULL;
    if (!tenants || admin || server->options.metrics_public) {
        bd_metrics_write(metrics, out);
        if (tenants) bd_tenants_write_metrics(tenants, out);
        if (tenants && loaded) bd_router_write_fairness(server->router, out);
    } else {
        const char *base = loaded ? bd_router_served_at(server->router, 0)->name : "";
        const bd_label hidden[] = {{"model_name", base}, {"variant", NULL}, {"tenant", NULL}};
        bd_metrics_write_totals(metrics, hidden, sizeof hidden / sizeof hidden[0], out);
    }
    return !out->failed;
}

/* The reply of every route that answers at once. */
static bool simple_route(bd_request *request, bd_openai *openai, bd_api_error *err) {
    bd_http_server *server = request->shard->server;
    bd_strbuf *out = &request->reply.body;
    const char *body = request->body ? request->body : "";
    request->reply.content_type = "application/json";
    switch (request->route->id) {
    case BD_ROUTE_MODELS:
        return bd_openai_models(openai, request->tenant, out, err);
    case BD_ROUTE_MODEL:
        return model_card(request, openai, out, err);
    case BD_ROUTE_TOKENIZE:
        return bd_openai_tokenize(openai, request->tenant, body, request->body_bytes, out, err);
    case BD_ROUTE_DETOKENIZE:
        return bd_openai_detokenize(openai, request->tenant, body, request->body_bytes, out, err);
    case BD_ROUTE_TOKENIZER_INFO:
        return bd_openai_tokenizer_info(openai, out, err);
    case BD_ROUTE_DESCRIPTION:
        bd_strbuf_append(out, (const char *)bd_openapi_text, bd_openapi_bytes);
        return !out->failed ||
               bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
    case BD_ROUTE_VERSION:
        bd_strbuf_puts(out, "{\"version\":\"" BD_VERSION "\"}");
        return true;
    case BD_ROUTE_HEALTH:
        request->reply.content_type = NULL;
        return !bd_health_error(server, true, err);
    case BD_ROUTE_METRICS:
        request->reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
        return write_metrics(server, request->shard->admin, out) ||
               bd_api_fail(err, BD_API_INTERNAL, NULL, "The server is out of memory.");
    case BD_ROUTE_ADMIN_VARIANTS:
        return bd_admin_variants(server, out, err);
    case BD_ROUTE_ADMIN_VARIANT:
        return bd_admin_variant(server, request->argument, out, err);
    case BD_ROUTE_ADMIN_TENANTS:
        return bd_admin_tenants(server, out, err);
    case BD_ROUTE_ADMIN_RELOAD:
        return bd_admin_reload(server, out, err);
    case BD_ROUTE_CHAT:
    case BD_ROUTE_COMPLETIONS:
    case BD_ROUTE_ADMIN_RESCAN:
    case BD_ROUTE_LOAD_ADAPTER:
    case BD_ROUTE_UNLOAD_ADAPTER:
    case BD_ROUTE_UNKNOWN:
    case BD_ROUTE_ANY:
        break;
    }
    return bd_api_fail(err, BD_API_INTERNAL, NULL, "The server had an internal error.");
}

/* Whether the answer comes later and from elsewhere. */
static bool is_completion(const bd_route *route) {
    return route->id == BD_ROUTE_COMPLETIONS || route->id == BD_ROUTE_CHAT;
}

static bool is_deferred(const bd_route *route) {
    return is_completion(route) || route->id == BD_ROUTE_ADMIN_RESCAN ||
           route->id == BD_ROUTE_LOAD_ADAPTER || route->id == BD_ROUTE_UNLOAD_ADAPTER;
}

bool bd_work_run(bd_request *request) {
    bd_openai *openai = atomic_load(&request->shard->server->openai);
    bd_api_error err = {0};
    bool deferred = is_deferred(request->route), ok;
    if (!deferred)
        ok = simple_route(request, openai, &err);
    else if (is_completion(request->route))
        ok = start_completion(request, openai, &err);
    else
        ok = bd_admin_change(request, &err);
    bd_request_drop_body(request);
    if (ok && deferred) return is_completion(request->route);
    if (ok)
        request->reply.status = MHD_HTTP_OK;
    else
        bd_request_set_error(request, &err);
    if (!ok && err.kind == BD_API_INTERNAL)
        bd_log(BD_LOG_ERROR, "http", "request %s: %s", request->id, err.message);
    pthread_mutex_lock(&request->lock);
    request->reply_ready = true;
    pthread_mutex_unlock(&request->lock);
    return false;
}

/* ---- bd-work-n ---- */

void bd_work_post(bd_request *request) {
    bd_http_server *server = request->shard->server;
    uint32_t index = atomic_fetch_add(&server->next_worker, 1) % server->options.worker_count;
    bd_request_ref(request);
    bd_status status = bd_mailbox_post(server->workers[index].mailbox, &request->message);
    BD_ASSERT(status == BD_OK); /* no bound: each message is a connection */
}

static void work_on(bd_request *request) {
    pthread_mutex_lock(&request->lock);
    bool cancelled = request->cancelled;
    pthread_mutex_unlock(&request->lock);
    if (!cancelled && bd_work_run(request))
        bd_openai_wake(atomic_load(&request->shard->server->openai));
    else
        bd_request_post(request);
    bd_request_unref(request);
}

static void *run(void *arg) {
    bd_worker *worker = arg;
    for (;;) {
        bd_message *message = bd_mailbox_take(worker->mailbox);
        if (!message && atomic_load(&worker->server->workers_stop)) return NULL;
        if (!message) bd_mailbox_wait(worker->mailbox, UINT64_MAX);
        while (message) {
            bd_request *request = (bd_request *)message;
            message = message->next;
            work_on(request);
        }
    }
}

bd_status bd_workers_start(bd_http_server *server, bd_error *err) {
    for (uint32_t i = 0; i < server->options.worker_count; i++) {
        bd_worker *worker = &server->workers[i];
        worker->server = server;
        bd_status status = bd_mailbox_create(&worker->mailbox, 0, false, err);
        if (status != BD_OK) return status;
        int fault = pthread_create(&worker->thread, NULL, run, worker);
        if (fault != 0)
            return bd_fail_errno(err, BD_E_IO, "bd-work", fault, "cannot start a thread");
        worker->started = true;
        char name[16];
        snprintf(name, sizeof name, "bd-work-%u", (unsigned)(i % 1000));
        (void)pthread_setname_np(worker->thread, name);
    }
    return BD_OK;
}

void bd_workers_stop(bd_http_server *server) {
    atomic_store(&server->workers_stop, true);
    for (uint32_t i = 0; i < server->options.worker_count; i++) {
        bd_worker *worker = &server->workers[i];
        if (!worker->started) continue;
        bd_mailbox_wake(worker->mailbox);
        (void)pthread_join(worker->thread, NULL);
        worker->started = false;
    }
}
