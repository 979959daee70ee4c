/* handler.c - libmicrohttpd's callbacks: head, body, answer. Threads: the shard's.
 * A response queued in the first call of a request makes the library drop the body and close, so
 * the first call only looks at the head; the answer waits for the last call unless closing is
 * wanted. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static uint64_t seconds_after(uint64_t now_us, uint32_t seconds) {
    return now_us + (uint64_t)seconds * 1000000u;
}

static bd_conn *conn_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

static void set_reply_error(bd_request *request, const bd_api_error *err) {
    bd_request_set_error(request, err);
    pthread_mutex_lock(&request->lock);
    request->reply_ready = true;
    pthread_mutex_unlock(&request->lock);
}

static enum MHD_Result first_call(bd_shard *shard, struct MHD_Connection *connection,
                                  const char *method, const char *version, void **req_cls) {
    const bd_http_options *options = &shard->server->options;
    bd_conn *conn = conn_of(connection);
    bd_request *request = conn ? bd_request_create(shard, conn->path) : NULL;
    if (conn) conn->in_head = false;
    if (!request) return MHD_NO;
    *req_cls = request;
    request->conn = conn;
    request->connection = connection;
    conn->request = request;
    bd_shard_moved(conn);
    bd_head_request_id(request);
    bd_api_error err = {0};
    uint64_t declared_bytes = 0;
    bool has_body = bd_head_body(connection, &declared_bytes);
    if (!bd_head_framing(conn, version, &err)) {
        request->reply.close = true;
        set_reply_error(request, &err);
        return bd_reply_queue(request);
    }
    conn->deadline_us = seconds_after(request->received_us, options->body_seconds);
    if (bd_head_check(request, method, declared_bytes, has_body, &err)) return MHD_YES;
    set_reply_error(request, &err);
    /* The body is not worth reading: the client waits for our word, or sends far too much. */
    bool expects = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Expect") != NULL;
    bool far_too_large = declared_bytes / BD_HTTP_CEILING_FACTOR > options->body_bytes_max;
    if ((has_body && expects) || far_too_large) {
        request->reply.close = true;
        return bd_reply_queue(request);
    }
    return MHD_YES;
}

static enum MHD_Result body_call(bd_request *request, const char *data, size_t *bytes) {
    const bd_http_options *options = &request->shard->server->options;
    size_t count = *bytes;
    bd_shard_moved(request->conn);
    *bytes = 0; /* always all of it: 0.9.75 may hang otherwise */
    request->body_seen += count;
    if (request->body_seen / BD_HTTP_CEILING_FACTOR > options->body_bytes_max) return MHD_NO;
    /* OPTIONS has its answer, too. */
    if (request->reply.status != 0 || request->replied || !request->route->takes_body)
        return MHD_YES;
    bd_api_error err;
    if (request->body_seen > options->body_bytes_max) {
        bd_api_fail(&err, BD_API_TOO_LARGE, NULL, "The body is larger than %zu bytes.",
                    options->body_bytes_max);
        err.limit = "body_bytes";
    } else if (!bd_request_append_body(request, data, count)) {
        bd_api_fail(&err, BD_API_RATE, NULL,
                    "Too many request bodies are being received. Please try again later.");
        err.retry_after_s = 1;
        err.limit = "upload_bytes";
    } else {
        return MHD_YES;
    }
    bd_request_drop_body(request);
    set_reply_error(request, &err);
    return MHD_YES;
}

static void begin_work(bd_request *request) {
    request->work_started = true;
    if (request->reply.status != 0) { /* OPTIONS, or an error of the head or the body */
        pthread_mutex_lock(&request->lock);
        request->reply_ready = true;
        pthread_mutex_unlock(&request->lock);
        return;
    }
    if (request->body_bytes > BD_HTTP_INLINE_BYTES)
        bd_work_post(request);
    else if (bd_work_run(request))
        bd_shard_submitted(request->shard);
}

/* The answer, if there is one by now; else the connection waits. */
static enum MHD_Result go_on(bd_request *request) {
    if (request->replied) return MHD_YES;
    if (!request->work_started) begin_work(request);
    pthread_mutex_lock(&request->lock);
    bool cancelled = request->cancelled, ready = request->reply_ready, finished = request->finished;
    bool streams = request->completion && bd_completion_is_stream(request->completion);
    bool has_events = bd_outbox_bytes(&request->outbox) > 0;
    request->waiting = !cancelled && !ready && !finished && !(streams && has_events);
    pthread_mutex_unlock(&request->lock);
    if (cancelled) return MHD_NO;
    if (ready) return bd_reply_queue(request);
    if (streams && has_events) return bd_reply_queue_stream(request);
    if (finished) {
        bd_api_error err;
        request->reply.status = MHD_HTTP_OK;
        request->reply.content_type = "application/json";
        if (!bd_completion_reply(request->completion, &request->reply.body, &err))
            bd_request_set_error(request, &err);
        return bd_reply_queue(request);
    }
    if (request->shard->closing) return MHD_NO;
    bd_shard_park(request, !streams); /* a stream is suspended sooner or later */
    return MHD_YES;
}

/* NOLINTNEXTLINE(readability-function-size): the parameters are the library's */
enum MHD_Result bd_handle(void *cls, struct MHD_Connection *connection, const char *url,
                          const char *method, const char *version, const char *upload_data,
                          size_t *upload_data_size, void **req_cls) {
    (void)url; /* already decoded; the raw path came with the request line */
    if (!*req_cls) return first_call(cls, connection, method, version, req_cls);
    bd_request *request = *req_cls;
    if (*upload_data_size > 0) return body_call(request, upload_data, upload_data_size);
    if (!request->body_done) {
        request->body_done = true;
        request->conn->deadline_us = 0;
    }
    return go_on(request);
}

void bd_handle_completed(void *cls, struct MHD_Connection *connection, void **req_cls,
                         enum MHD_RequestTerminationCode code) {
    bd_shard *shard = cls;
    bd_request *request = *req_cls;
    (void)connection;
    if (!request) return;
    *req_cls = NULL;
    bd_conn *conn = request->conn;
    conn->request = NULL;
    bd_shard_go_on(request);
    const bd_http_options *options = &shard->server->options;
    /* The time of the last turn will do. */
    conn->deadline_us =
        seconds_after(shard->now_us, options->idle_seconds + options->header_seconds);
    request->connection = NULL;
    request->conn = NULL;
    if (request->active) atomic_fetch_sub(&shard->server->active_count, 1);
    pthread_mutex_lock(&request->lock);
    bool finished = request->finished;
    pthread_mutex_unlock(&request->lock);
    /* Without a status of its own the answer was a stream. */
    bool failed = finished && bd_completion_is_stream(request->completion) &&
                  bd_completion_failed(request->completion) && request->reply.status == 0;
    if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK || !finished)
        bd_request_cancel(request, BD_CANCELLED);
    if (failed) bd_shard_cut(conn); /* a stream that ended in an error closes its connection */
    bd_request_unref(request);
}
