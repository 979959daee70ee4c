/* reply.c - responses handed to libmicrohttpd. Threads: the shard's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

static void add_header(struct MHD_Response *response, const char *name, const char *value) {
    /* Refused only without memory, or for values that cannot stand in a header; the response goes
     * out without it. */
    (void)MHD_add_response_header(response, name, value);
}

static void add_cors(const bd_request *request, struct MHD_Response *response, bool preflight) {
    const char *origin = request->shard->server->cors_origin;
    if (!origin || request->shard->admin) return;
    add_header(response, "Access-Control-Allow-Origin", origin);
    add_header(response, "Access-Control-Expose-Headers", "x-request-id, retry-after");
    if (!preflight) return;
    const char *wanted = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND,
                                                     "Access-Control-Request-Headers");
    add_header(response, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    if (wanted) add_header(response, "Access-Control-Allow-Headers", wanted);
    add_header(response, "Access-Control-Max-Age", "600");
}

/* The usual ones are looked up in the registry once. */
static void count_reply(const bd_request *request, unsigned status) {
    char code[12];
    bd_metrics *metrics = request->shard->server->options.metrics;
    if (!metrics) return;
    const bd_route *route = request->route;
    bd_metric **kept = route && status == MHD_HTTP_OK ? &request->shard->ok[route->id] : NULL;
    bd_metric *counter = kept ? *kept : NULL;
    if (!counter) {
        snprintf(code, sizeof code, "%u", status);
        const bd_label labels[] = {{"route", route ? route->label : "unknown"}, {"code", code}};
        counter =
            bd_metrics_counter(metrics, "bd_http_requests_total", "Requests answered.", labels, 2);
        if (kept) *kept = counter;
    }
    bd_metric_add(counter, 1);
}

static bd_metric *limit_metric(const bd_http_server *server, const char *limit) {
    const bd_label label = {"limit", limit};
    return bd_metrics_counter(server->options.metrics, "bd_http_limited_total",
                              "Requests refused or connections cut by a limit.", &label, 1);
}

void bd_http_count_limit(const bd_http_server *server, const char *limit) {
    if (server->options.metrics) bd_metric_add(limit_metric(server, limit), 1);
}

void bd_http_register_limits(const bd_http_server *server) {
    static const char *const limits[] = {"connections",    "body_bytes",   "upload_bytes",
                                         "queue",          "stream_bytes", "response_bytes",
                                         "header_seconds", "body_seconds"};
    for (size_t i = 0; server->options.metrics && i < sizeof limits / sizeof limits[0]; i++)
        (void)limit_metric(server, limits[i]);
}

enum MHD_Result bd_reply_queue(bd_request *request) {
    bd_reply *reply = &request->reply;
    if (reply->body.failed) return MHD_NO; /* not even memory for an error */
    struct MHD_Response *response =
        reply->body.data ? MHD_create_response_from_buffer(reply->body.len_bytes, reply->body.data,
                                                           MHD_RESPMEM_MUST_FREE)
                         : MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    if (!response) return MHD_NO;
    reply->body = (bd_strbuf){0}; /* the response frees it */
    char number[12];
    if (reply->content_type) add_header(response, "Content-Type", reply->content_type);
    if (reply->allow) add_header(response, "Allow", reply->allow);
    if (reply->challenge) add_header(response, "WWW-Authenticate", "Bearer");
    if (reply->retry_after_s > 0) {
        snprintf(number, sizeof number, "%u", (unsigned)reply->retry_after_s);
        add_header(response, "Retry-After", number);
    }
    add_header(response, "x-request-id", request->id);
    add_cors(request, response, reply->status == MHD_HTTP_NO_CONTENT);
    if (reply->close || atomic_load(&request->shard->server->phase) != BD_PHASE_RUN)
        add_header(response, "Connection", "close");
    count_reply(request, reply->status);
    request->replied = true;
    bd_shard_go_on(request);
    enum MHD_Result result = MHD_queue_response(request->connection, reply->status, response);
    MHD_destroy_response(response);
    return result;
}

/* Status line, headers and body of an error, closing. */
static void write_alone(const bd_request *request, bd_strbuf *out) {
    const bd_reply *reply = &request->reply;
    const char *origin = request->shard->server->cors_origin;
    bd_strbuf_printf(out, "HTTP/1.1 %u %s\r\nConnection: close\r\nContent-Type: %s\r\n",
                     reply->status,
                     reply->status == MHD_HTTP_BAD_REQUEST ? "Bad Request" : "Content Too Large",
                     reply->content_type);
    bd_strbuf_printf(out, "Content-Length: %zu\r\nx-request-id: %s\r\n", reply->body.len_bytes,
                     request->id);
    if (origin && !request->shard->admin)
        bd_strbuf_printf(out, "Access-Control-Allow-Origin: %s\r\n", origin);
    bd_strbuf_puts(out, "\r\n");
    bd_strbuf_append(out, reply->body.data, reply->body.len_bytes);
}

void bd_reply_alone(bd_request *request) {
    bd_conn *conn = request->conn;
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    write_alone(request, &out);
    /* What does not fit at once is lost; the buffer is empty but for answers to pipelined requests,
     * and this is far smaller. */
    if (!out.failed && !bd_tls_send(conn->connection, out.data, out.len_bytes))
        (void)send(conn->fd, out.data, out.len_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    bd_strbuf_deinit(&out);
    count_reply(request, request->reply.status);
    (void)shutdown(conn->fd, SHUT_WR);
}

static void release_stream(void *cls) {
    bd_request_unref(cls);
}

/* One event per call, so that each is one chunk and one send. */
static ssize_t read_stream(void *cls, uint64_t position, char *out, size_t max) {
    bd_request *request = cls;
    (void)position;
    pthread_mutex_lock(&request->lock);
    size_t bytes = request->cancelled ? 0 : bd_outbox_pop(&request->outbox, out, max);
    bool cancelled = request->cancelled, finished = request->finished;
    request->waiting = bytes == 0 && !cancelled && !finished;
    pthread_mutex_unlock(&request->lock);
    request->last_write_us = bd_now_us();
    bd_shard_moved(request->conn); /* unless it is parked */
    if (bytes > 0) return (ssize_t)bytes;
    if (cancelled || request->shard->closing) return MHD_CONTENT_READER_END_WITH_ERROR;
    if (finished) return MHD_CONTENT_READER_END_OF_STREAM;
    bd_shard_park(request, false); /* returning 0 without this would spin */
    return 0;
}

enum MHD_Result bd_reply_queue_stream(bd_request *request) {
    bd_request_ref(request);
    struct MHD_Response *response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, 32768, read_stream, request, release_stream);
    if (!response) {
        bd_request_unref(request);
        return MHD_NO;
    }
    add_header(response, "Content-Type", "text/event-stream; charset=utf-8");
    add_header(response, "Cache-Control", "no-cache");
    add_header(response, "X-Accel-Buffering", "no");
    add_header(response, "x-request-id", request->id);
    add_cors(request, response, false);
    if (atomic_load(&request->shard->server->phase) != BD_PHASE_RUN)
        add_header(response, "Connection", "close");
    count_reply(request, MHD_HTTP_OK);
    request->replied = true;
    bd_shard_go_on(request);
    enum MHD_Result result = MHD_queue_response(request->connection, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return result;
}
