/* refuse.c - heads that libmicrohttpd would refuse by itself after reading the whole of them: above
 * all a Content-Length that is no number. 0.9.75 goes on with such a request after its own answer
 * and sends the header block twice. All that it tells is a line of its log, and that comes before
 * it acts: the answer is then ours, and the library finds a socket that takes nothing more.
 * Threads: the shard's. */
#include <string.h>

#include "internal.h"

/* Between the end of a head and the first call of the handler the library does nothing else, so if
 * it logs something meanwhile, that is why there will be no call. */
static bd_conn *refused_conn(const bd_shard *shard) {
    for (bd_conn *conn = shard->conns; conn; conn = conn->next)
        if (conn->in_head &&
            MHD_get_connection_info(conn->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE) &&
            !MHD_get_connection_info(conn->connection, MHD_CONNECTION_INFO_HTTP_STATUS))
            return conn;
    return NULL;
}

static void say_why(const bd_request *request, bd_api_error *err) {
    const size_t bytes_max = request->shard->server->options.body_bytes_max;
    const char *length =
        MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "Content-Length");
    if (!length)
        bd_api_fail(err, BD_API_VALUE, NULL, "The request has a malformed header.");
    else if (length[0] == '\0' || length[strspn(length, "0123456789")] != '\0')
        bd_api_fail(err, BD_API_VALUE, NULL, "The Content-Length header is not a number.");
    else {
        bd_api_fail(err, BD_API_TOO_LARGE, NULL, "The body is larger than %zu bytes.", bytes_max);
        err->limit = "body_bytes";
    }
}

void bd_refuse_first(const bd_shard *shard) {
    bd_conn *conn = refused_conn(shard);
    bd_request *request = conn ? bd_request_create(conn->shard, conn->path) : NULL;
    if (!request) return;
    bd_api_error err = {0};
    conn->in_head = false;
    request->conn = conn;
    request->connection = conn->connection;
    bd_head_request_id(request);
    say_why(request, &err);
    bd_request_set_error(request, &err);
    bd_reply_alone(request);
    bd_request_unref(request);
}
