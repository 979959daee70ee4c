/* request.c - one HTTP request: references, body, outbox. Threads: see internal.h. */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

/* Most bodies are small, and come at once: this much malloc has at hand. */
enum { BODY_BYTES_MIN = 1000 };

bd_request *bd_request_create(bd_shard *shard, const char *path) {
    size_t path_bytes = strlen(path) + 1;
    bd_request *request = malloc(sizeof *request + path_bytes);
    if (!request) return NULL;
    memset(request, 0, sizeof *request);
    memcpy(request->path, path, path_bytes);
    if (pthread_mutex_init(&request->lock, NULL) != 0) {
        free(request);
        return NULL;
    }
    atomic_init(&request->refs, 1);
    request->shard = shard;
    request->received_us = bd_now_us();
    return request;
}

void bd_request_ref(bd_request *request) {
    atomic_fetch_add(&request->refs, 1);
}

void bd_request_unref(bd_request *request) {
    if (atomic_fetch_sub(&request->refs, 1) > 1) return;
    bd_request_drop_body(request);
    bd_completion_destroy(request->completion);
    bd_tenant_release(request->tenant);
    bd_strbuf_deinit(&request->reply.body);
    free(request->outbox.data);
    pthread_mutex_destroy(&request->lock);
    free(request);
}

/* With the lock held: true when the caller must post, and has a reference to give away for it. */
static bool claim_post(bd_request *request) {
    if (!request->waiting || request->posted) return false;
    request->posted = true;
    bd_request_ref(request);
    return true;
}

static void post_claimed(bd_request *request) {
    bd_status status = bd_mailbox_post(request->shard->mailbox, &request->message);
    BD_ASSERT(status == BD_OK); /* the box has no bound */
}

void bd_request_post(bd_request *request) {
    pthread_mutex_lock(&request->lock);
    bool claimed = claim_post(request);
    pthread_mutex_unlock(&request->lock);
    if (claimed) post_claimed(request);
}

void bd_request_cancel(bd_request *request, bd_status reason) {
    pthread_mutex_lock(&request->lock);
    bd_completion *running = request->finished ? NULL : request->completion;
    if (reason == BD_CANCELLED) request->cancelled = true;
    pthread_mutex_unlock(&request->lock);
    /* The completion lives as long as the request, of which the caller has a reference. */
    if (running) bd_completion_cancel(running, reason);
}

bool bd_request_append_body(bd_request *request, const char *data, size_t bytes) {
    bd_http_server *server = request->shard->server;
    size_t need = request->body_bytes + bytes + 1;
    if (need > request->body_cap) {
        size_t cap = request->body_cap == 0 ? BODY_BYTES_MIN : request->body_cap * 2;
        if (cap < need) cap = need;
        size_t more = cap - request->body_cap;
        if (atomic_fetch_add(&server->upload_bytes, more) + more >
            server->options.upload_bytes_max) {
            atomic_fetch_sub(&server->upload_bytes, more);
            return false;
        }
        char *body = realloc(request->body, cap);
        if (!body) {
            atomic_fetch_sub(&server->upload_bytes, more);
            return false;
        }
        request->body = body;
        request->body_cap = cap;
    }
    memcpy(request->body + request->body_bytes, data, bytes);
    request->body_bytes += bytes;
    request->body[request->body_bytes] = '\0';
    return true;
}

void bd_request_drop_body(bd_request *request) {
    atomic_fetch_sub(&request->shard->server->upload_bytes, request->body_cap);
    free(request->body);
    request->body = NULL;
    request->body_bytes = request->body_cap = 0;
}

void bd_request_set_error(bd_request *request, const bd_api_error *err) {
    bd_reply *reply = &request->reply;
    if (err->limit) bd_http_count_limit(request->shard->server, err->limit);
    bd_strbuf_clear(&reply->body);
    bd_api_error_write(err, &reply->body);
    reply->status = bd_api_http_status(err->kind);
    reply->content_type = "application/json";
    reply->retry_after_s = err->retry_after_s;
    reply->challenge = err->kind == BD_API_KEY;
    reply->close = reply->close || err->kind == BD_API_TOO_LARGE;
}

/* ---- outbox: [length][bytes] after each other; emptied from the front ---- */

size_t bd_outbox_bytes(const bd_outbox *box) {
    return box->tail - box->head;
}

bool bd_outbox_push(bd_outbox *box, const char *data, size_t bytes) {
    uint32_t length = (uint32_t)bytes;
    if (bytes == 0 || bytes > UINT32_MAX / 2) return false;
    size_t need = sizeof length + bytes;
    if (box->head > 0 && box->tail + need > box->cap) {
        memmove(box->data, box->data + box->head, box->tail - box->head);
        box->tail -= box->head;
        box->head = 0;
    }
    if (box->tail + need > box->cap) {
        size_t cap = box->cap < 1024 ? 1024 : box->cap * 2;
        if (cap < box->tail + need) cap = box->tail + need;
        char *grown = realloc(box->data, cap);
        if (!grown) return false;
        box->data = grown;
        box->cap = cap;
    }
    memcpy(box->data + box->tail, &length, sizeof length);
    memcpy(box->data + box->tail + sizeof length, data, bytes);
    box->tail += need;
    return true;
}

size_t bd_outbox_pop(bd_outbox *box, char *out, size_t max) {
    if (box->head == box->tail) return 0;
    if (box->left == 0) {
        memcpy(&box->left, box->data + box->head, sizeof box->left);
        box->head += sizeof box->left;
    }
    size_t bytes = box->left < max ? box->left : max;
    memcpy(out, box->data + box->head, bytes);
    box->head += bytes;
    box->left -= (uint32_t)bytes;
    if (box->head == box->tail) {
        box->head = box->tail = 0;
        box->exempt_bytes = 0;
    }
    return bytes;
}

/* ---- sink of the completion, on bd-sched ---- */

static bool on_event(void *ctx, const char *data, size_t bytes, bool exempt) {
    bd_request *request = ctx;
    size_t limit = request->shard->server->options.stream_bytes_max;
    pthread_mutex_lock(&request->lock);
    bd_outbox *box = &request->outbox;
    bool slow =
        !request->cancelled && !exempt && bd_outbox_bytes(box) + bytes > limit + box->exempt_bytes;
    bool taken = !request->cancelled && !slow && bd_outbox_push(box, data, bytes);
    if (taken && exempt) box->exempt_bytes += bytes;
    bool claimed = taken && claim_post(request);
    pthread_mutex_unlock(&request->lock);
    if (claimed) post_claimed(request);
    if (slow) bd_http_count_limit(request->shard->server, "stream_bytes");
    return taken;
}

static void on_done(void *ctx) {
    bd_request *request = ctx;
    pthread_mutex_lock(&request->lock);
    request->finished = true;
    bool claimed = claim_post(request);
    pthread_mutex_unlock(&request->lock);
    if (claimed) post_claimed(request);
    bd_request_unref(request);
}

const bd_completion_sink bd_request_sink = {.event = on_event, .done = on_done};
