/* head.c - checks on the head of a request, before any of its body is read. Threads: the shard's.
 */
#include <string.h>

#include "internal.h"

enum { ID_BYTES = 16 };

typedef struct framing {
    unsigned lengths, encodings, hosts;
    bool bad_encoding, bad_name, bad_value;
} framing;

static bool name_is(const char *key, size_t key_size, const char *name) {
    return strlen(name) == key_size && strncasecmp(key, name, key_size) == 0;
}

static enum MHD_Result look_at_header(void *cls, enum MHD_ValueKind kind, const char *key,
                                      size_t key_size, const char *value, size_t value_size) {
    framing *found = cls;
    (void)kind;
    for (size_t i = 0; i < key_size; i++)
        if ((unsigned char)key[i] <= ' ' || key[i] == 0x7F) found->bad_name = true;
    if (key_size == 0) found->bad_name = true;
    /* Control characters, a lone CR above all, which others may take for the end of the line. */
    for (size_t i = 0; value && i < value_size; i++)
        if (((unsigned char)value[i] < ' ' && value[i] != '\t') || value[i] == 0x7F)
            found->bad_value = true;
    if (name_is(key, key_size, "Content-Length")) found->lengths++;
    if (name_is(key, key_size, "Host")) found->hosts++;
    if (name_is(key, key_size, "Transfer-Encoding")) {
        found->encodings++;
        if (!value || value_size != 7 || strncasecmp(value, "chunked", 7) != 0)
            found->bad_encoding = true;
    }
    return MHD_YES;
}

/* The library takes the first of two lengths, and a length beside a transfer encoding; a proxy
 * before us may not. */
bool bd_head_framing(const bd_conn *conn, const char *version, bd_api_error *err) {
    framing found = {0};
    bool is_1_0 = strcmp(version, "HTTP/1.0") == 0;
    MHD_get_connection_values_n(conn->connection, MHD_HEADER_KIND, look_at_header, &found);
    if (conn->bad_target)
        return bd_api_fail(err, BD_API_VALUE, NULL, "The request line has a blank in its target.");
    if (found.bad_name || found.bad_value)
        return bd_api_fail(err, BD_API_VALUE, NULL, "The request has a malformed header.");
    if (found.lengths > 1)
        return bd_api_fail(err, BD_API_VALUE, NULL,
                           "The request has more than one Content-Length header.");
    if (found.encodings > 1 || found.bad_encoding)
        return bd_api_fail(err, BD_API_VALUE, NULL, "The only transfer encoding is 'chunked'.");
    if (found.encodings > 0 && (found.lengths > 0 || is_1_0))
        return bd_api_fail(err, BD_API_VALUE, NULL,
                           "Transfer-Encoding is not allowed with Content-Length or in HTTP/1.0.");
    if (found.hosts > 1 || (found.hosts == 0 && !is_1_0))
        return bd_api_fail(err, BD_API_VALUE, NULL,
                           "The request must have exactly one Host header.");
    return true;
}

bool bd_head_body(struct MHD_Connection *connection, uint64_t *declared_bytes) {
    const char *length = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Content-Length");
    const char *encoding =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Transfer-Encoding");
    *declared_bytes = 0;
    for (; length && *length >= '0' && *length <= '9'; length++) {
        if (*declared_bytes > UINT64_MAX / 16) return true;
        *declared_bytes = *declared_bytes * 10 + (uint64_t)(*length - '0');
    }
    return encoding || *declared_bytes > 0;
}

void bd_head_request_id(bd_request *request) {
    const char *sent =
        MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "x-request-id");
    size_t bytes = sent ? strlen(sent) : 0;
    bool usable = bytes >= 1 && bytes <= BD_HTTP_REQUEST_ID_MAX;
    for (size_t i = 0; usable && i < bytes; i++)
        usable = sent[i] > ' ' && sent[i] < 0x7F;
    if (usable) {
        memcpy(request->id, sent, bytes + 1);
        return;
    }
    uint8_t random[ID_BYTES];
    bd_openai_random(random, sizeof random);
    memcpy(request->id, "req-", 4);
    bd_openai_hex(random, sizeof random * 2, request->id + 4);
}

/* `application/json`, `application/<something>+json`; parameters do not matter. */
static bool is_json_type(const char *type) {
    while (*type == ' ' || *type == '\t')
        type++;
    size_t bytes = strcspn(type, "; \t");
    if (bytes < 12 || strncasecmp(type, "application/", 12) != 0) return false;
    if (bytes == 16 && strncasecmp(type + 12, "json", 4) == 0) return true;
    return bytes > 17 && strncasecmp(type + bytes - 5, "+json", 5) == 0;
}

/* `curl -d` declares a form unless told otherwise, and curl is how people try a server. Only curl
 * is believed: the reason for refusing forms is that any web page can make a browser send one, and
 * no page can make it call itself curl. */
static bool is_curl_default(struct MHD_Connection *connection, const char *type) {
    const char *agent = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "User-Agent");
    return strcasecmp(type, "application/x-www-form-urlencoded") == 0 && agent &&
           strncmp(agent, "curl/", 5) == 0;
}

static bool check_content(struct MHD_Connection *connection, bd_api_error *err) {
    const char *type = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Content-Type");
    if (type && !is_json_type(type) && !is_curl_default(connection, type))
        return bd_api_fail(err, BD_API_CONTENT_TYPE, NULL,
                           "Unsupported Content-Type: the body must be application/json.");
    const char *encoding =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Content-Encoding");
    if (encoding && strcasecmp(encoding, "identity") != 0)
        return bd_api_fail(err, BD_API_CONTENT_TYPE, NULL,
                           "Unsupported Content-Encoding: the body must not be compressed.");
    return true;
}

static bool check_path(bd_request *request, bd_api_error *err) {
    bd_conn *conn = request->conn;
    if (!conn->path_overlong)
        request->route = bd_route_find(request->shard->admin, request->path, &request->argument);
    if (request->route && request->route->runtime &&
        !request->shard->server->options.runtime_loading)
        request->route = NULL;
    if (!request->route) return bd_api_fail(err, BD_API_URL, NULL, "Unknown URL.");
    if (strstr(request->path, "%00"))
        return bd_api_fail(err, BD_API_VALUE, NULL, "The path holds an encoded NUL byte.");
    return true;
}

static bool check_method(bd_request *request, const char *method, bd_api_error *err) {
    const bd_route *route = request->route;
    request->head_only = strcmp(method, "HEAD") == 0;
    bool is_get = request->head_only || strcmp(method, "GET") == 0;
    if ((is_get && route->get) || (strcmp(method, "POST") == 0 && route->post)) return true;
    request->reply.allow = route->allow;
    return bd_api_fail(err, BD_API_METHOD, NULL, "Method not allowed: use one of %s.",
                       route->allow);
}

/* Spec section 1.4: path, the page an order comes from, OPTIONS, method, key, readiness, declared
 * size, content type. */
bool bd_head_check(bd_request *request, const char *method, uint64_t declared_bytes, bool has_body,
                   bd_api_error *err) {
    const bd_http_server *server = request->shard->server;
    bool known = check_path(request, err);
    const bd_route *route = request->route;
    bool admin = request->shard->admin || (known && route->runtime && server->admin_guarded);
    if (request->shard->admin || (known && route->runtime)) {
        bool keyed =
            admin ? server->admin_guarded : server->key_count > 0 || server->options.tenants;
        if (!bd_origin_check(request, keyed, err)) return false;
    }
    if (!known) return false;
    if (strcmp(method, "OPTIONS") == 0) {
        request->reply.allow = route->allow;
        request->reply.status = MHD_HTTP_NO_CONTENT;
        return true;
    }
    if (!check_method(request, method, err)) return false;
    const char *header =
        MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "Authorization");
    if (!route->open && !bd_key_check(server, admin, header, &request->tenant))
        return bd_api_fail(err, BD_API_KEY, NULL, "Incorrect API key provided or no key given.");
    if (!bd_shard_admit(request->conn)) {
        request->reply.close = true;
        if (route->id == BD_ROUTE_HEALTH) return true;
        bd_api_fail(err, BD_API_RATE, NULL,
                    "Too many connections are open. Please try again later.");
        err->retry_after_s = 1;
        err->limit = "connections";
        return false;
    }
    if (route->needs_model && bd_health_error(server, route->new_work, err)) return false;
    if (!route->takes_body) return true;
    if (declared_bytes > server->options.body_bytes_max) {
        bd_api_fail(err, BD_API_TOO_LARGE, NULL, "The body is larger than %zu bytes.",
                    server->options.body_bytes_max);
        err->limit = "body_bytes";
        return false;
    }
    return !has_body || check_content(request->connection, err);
}
