/* origin.c - orders come from programs, not from web pages. A browser lets any page send a POST to
 * an address of this machine, and a page whose own name resolves to such an address also reads the
 * answers. The first names the page in Origin, the second its own name in Host. Threads: pure. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>

#include "internal.h"

/* The host of "host", "host:port", "[v6]:port"; false: too long, or not of that form. */
static bool host_of(const char *authority, char host[BD_HTTP_HOST_MAX]) {
    bool bracket = *authority == '[';
    const char *from = authority + bracket;
    size_t bytes = strcspn(from, bracket ? "]" : ":");
    const char *rest = from + bytes;
    if (bytes == 0 || bytes >= BD_HTTP_HOST_MAX || (bracket && *rest++ != ']')) return false;
    if (*rest != '\0' && (*rest != ':' || strspn(rest + 1, "0123456789") != strlen(rest + 1)))
        return false;
    memcpy(host, from, bytes);
    host[bytes] = '\0';
    return true;
}

typedef enum address_kind { A_NAME, A_ADDRESS, A_LOOPBACK, A_WILDCARD } address_kind;

static address_kind kind_of(const char *host) {
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, host, &v4) == 1) {
        uint32_t address = ntohl(v4.s_addr);
        if (address == INADDR_ANY) return A_WILDCARD;
        return address >> 24 == 127 ? A_LOOPBACK : A_ADDRESS;
    }
    if (inet_pton(AF_INET6, host, &v6) == 1) {
        if (IN6_IS_ADDR_UNSPECIFIED(&v6)) return A_WILDCARD;
        bool mapped = IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127;
        return IN6_IS_ADDR_LOOPBACK(&v6) || mapped ? A_LOOPBACK : A_ADDRESS;
    }
    size_t bytes = strlen(host);
    if (bytes > 0 && host[bytes - 1] == '.') bytes--;
    return bytes == 9 && strncasecmp(host, "localhost", 9) == 0 ? A_LOOPBACK : A_NAME;
}

bool bd_origin_is_loopback(const char *bound) {
    char host[BD_HTTP_HOST_MAX];
    return host_of(bound, host) && kind_of(host) == A_LOOPBACK;
}

/* given: the address as the operator wrote it; bound: what it became. A listener on every address
 * is reached by any of them: no page's name is one. */
bool bd_origin_host_allowed(const char *sent, const char *given, const char *bound) {
    char host[BD_HTTP_HOST_MAX], own[BD_HTTP_HOST_MAX];
    if (!host_of(sent, host)) return false;
    address_kind kind = kind_of(host);
    if (kind == A_LOOPBACK) return true;
    if (given && host_of(given, own) && strcasecmp(own, host) == 0) return true;
    if (!host_of(bound, own)) return false;
    return strcasecmp(own, host) == 0 || (kind != A_NAME && kind_of(own) == A_WILDCARD);
}

/* A page that this listener itself, or a proxy before it, would have served. */
bool bd_origin_is_own(const char *origin, const char *host) {
    size_t scheme = strncasecmp(origin, "http://", 7) == 0    ? 7
                    : strncasecmp(origin, "https://", 8) == 0 ? 8
                                                              : 0;
    return scheme > 0 && host && strcasecmp(origin + scheme, host) == 0;
}

bool bd_origin_check(const bd_request *request, bool keyed, bd_api_error *err) {
    const bd_http_server *server = request->shard->server;
    bool admin = request->shard->admin;
    const char *origin =
        MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "Origin");
    const char *host = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "Host");
    bd_api_quoted quoted;
    if (origin && !bd_origin_is_own(origin, host))
        return bd_api_fail(err, BD_API_ORIGIN, NULL,
                           "Web pages of '%s' must not give orders to this server.",
                           bd_api_quote(&quoted, origin, strlen(origin)));
    if (keyed || !host ||
        bd_origin_host_allowed(host, admin ? server->admin_listen : server->listen,
                               admin ? server->admin_address : server->address))
        return true;
    return bd_api_fail(err, BD_API_ORIGIN, NULL,
                       "Without a key, this is only answered at a loopback or the listen address; "
                       "the Host header says '%s'.",
                       bd_api_quote(&quoted, host, strlen(host)));
}
