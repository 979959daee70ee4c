/* listen.c - listening sockets. Threads: the builder's. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

/* "host:port", "[v6]:port", ":port" */
static bd_status split_address(const char *address, char *host, size_t host_bytes,
                               const char **port, bd_error *err) {
    const char *colon = strrchr(address, ':');
    const char *from = address, *to = colon;
    if (!colon || colon[1] == '\0')
        return bd_fail(err, BD_E_ARGUMENT, address,
                       "a listen address is HOST:PORT, for example 127.0.0.1:8080");
    if (*from == '[') {
        from++;
        to = colon > address ? colon - 1 : colon;
        if (*to != ']')
            return bd_fail(err, BD_E_ARGUMENT, address, "a listen address with '[' needs ']:PORT'");
    }
    size_t bytes = (size_t)(to - from);
    if (to < from || bytes >= host_bytes)
        return bd_fail(err, BD_E_ARGUMENT, address, "the host is too long");
    memcpy(host, from, bytes);
    host[bytes] = '\0';
    *port = colon + 1;
    for (const char *at = *port; *at; at++)
        if (*at < '0' || *at > '9')
            return bd_fail(err, BD_E_ARGUMENT, address, "the port is not a number");
    return BD_OK;
}

/* A bound socket, or -1 with errno. */
static int bind_socket(const struct addrinfo *to, bool reuse_port) {
    int on = 1;
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    bool ok = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
              (!reuse_port || setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) == 0) &&
              bind(fd, to->ai_addr, to->ai_addrlen) == 0;
    if (ok) return fd;
    int error_number = errno;
    close(fd);
    errno = error_number;
    return -1;
}

bd_status bd_listen_open(const char *address, bool reuse_port, bool first, int *out,
                         bd_error *err) {
    char host[256] = "";
    const char *port = NULL;
    *out = -1;
    bd_status status = split_address(address, host, sizeof host, &port, err);
    if (status != BD_OK) return status;
    const struct addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICSERV,
                                   .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    int fault = getaddrinfo(host[0] ? host : NULL, port, &hints, &found);
    if (fault != 0)
        return bd_fail(err, BD_E_ARGUMENT, address, "the address cannot be used: %s",
                       gai_strerror(fault));
    /* A shared port would also be shared with another server of the same user, which must be an
     * error: the first socket of ours finds the port free of anyone. */
    int probe = reuse_port && first ? bind_socket(found, false) : -1;
    bool free_port = !reuse_port || !first || probe >= 0;
    if (probe >= 0) close(probe);
    int fd = free_port ? bind_socket(found, reuse_port) : -1;
    int error_number = errno;
    freeaddrinfo(found);
    if (fd < 0) return bd_fail_errno(err, BD_E_IO, address, error_number, "cannot listen");
    *out = fd;
    return BD_OK;
}

bd_status bd_listen_address(int fd, char out[BD_HTTP_ADDRESS_MAX], bd_error *err) {
    struct sockaddr_storage bound = {.ss_family = AF_UNSPEC};
    socklen_t bytes = sizeof bound;
    char host[64], port[8];
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) != 0 ||
        getnameinfo((struct sockaddr *)&bound, bytes, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return bd_fail_errno(err, BD_E_IO, "listener", errno, "cannot read the bound address");
    snprintf(out, BD_HTTP_ADDRESS_MAX, bound.ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host,
             port);
    return BD_OK;
}
