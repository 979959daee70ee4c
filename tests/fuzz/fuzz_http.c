/* fuzz_http.c - any bytes over a real socket into the real server, with the API behind it and an
 * engine that makes a few tokens. The first byte chooses the listener (odd: admin); 0xff in what
 * follows ends one send and begins the next. After the last the client stops sending; the server
 * answers what it can and closes, and nothing of the connection is left. */
#include "fuzz.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "front.h"
#include "http/internal.h"

enum { PATIENCE_MS = 20000, PIECE_MARK = 0xff };

static bd_http_server *server_of(void) {
    static bd_http_server *kept;
    if (kept) return kept;
    const bd_http_options options = {.listen = "127.0.0.1:0",
                                     .admin = "127.0.0.1:0",
                                     .runtime_loading = true,
                                     .shard_count = 1,
                                     .worker_count = 1,
                                     .connections_max = 8,
                                     .body_bytes_max = 4096,
                                     .response_bytes_max = 1 << 20,
                                     .chat_template =
                                         "tests/fuzz/corpus/chat_template/qwen3.jinja"};
    bd_router *router = fuzz_router();
    BD_ASSERT(bd_http_server_create(&options, &kept, NULL) == BD_OK);
    BD_ASSERT(bd_http_server_start(kept, NULL) == BD_OK);
    BD_ASSERT(bd_http_server_attach(kept, router, "0", NULL, NULL) == BD_OK);
    return kept;
}

/* libFuzzer looks for inputs that take too long by a SIGALRM, which ends any call that waits. */
static void wait_for(int fd, short events) {
    struct pollfd wait = {.fd = fd, .events = events};
    BD_ASSERT(TEMP_FAILURE_RETRY(poll(&wait, 1, PATIENCE_MS)) == 1);
}

static int dial(const char *address) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)atoi(strrchr(address, ':') + 1));
    const struct linger reset = {.l_onoff = 1}; /* no port stays in TIME_WAIT */
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    BD_ASSERT(fd >= 0);
    BD_ASSERT(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset) == 0);
    BD_ASSERT(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    int fault = connect(fd, (const struct sockaddr *)&to, sizeof to) == 0 ? 0 : errno;
    if (fault == EINTR) { /* it goes on by itself */
        wait_for(fd, POLLOUT);
        socklen_t size = sizeof fault;
        BD_ASSERT(getsockopt(fd, SOL_SOCKET, SO_ERROR, &fault, &size) == 0);
    }
    BD_ASSERT(fault == 0);
    return fd;
}

/* Whatever fits between what the server sends; it may have closed already. */
static void send_all(int fd, const uint8_t *data, size_t bytes) {
    while (bytes > 0) {
        const uint8_t *mark = memchr(data, PIECE_MARK, bytes);
        size_t piece = mark ? (size_t)(mark - data) : bytes;
        if (piece > 0 && TEMP_FAILURE_RETRY(send(fd, data, piece, MSG_NOSIGNAL)) < 0) return;
        if (mark) piece++;
        data += piece;
        bytes -= piece;
    }
}

/* Until the server closes. What it says is HTTP. */
static void listen_to_the_end(int fd) {
    char answer[16384];
    size_t count = 0;
    for (;;) {
        wait_for(fd, POLLIN);
        size_t keep = count < sizeof answer / 2 ? count : sizeof answer / 2;
        ssize_t got = TEMP_FAILURE_RETRY(recv(fd, answer + keep, sizeof answer - keep, 0));
        if (got <= 0) break;
        count += (size_t)got;
        if (count >= 9) BD_ASSERT(memcmp(answer, "HTTP/1.", 7) == 0 && answer[8] == ' ');
    }
}

static void wait_until_gone(bd_http_server *server) {
    const struct timespec pause = {.tv_nsec = 20000};
    const uint64_t patience = (uint64_t)PATIENCE_MS * 50;
    uint64_t turns = 0;
    while (atomic_load(&server->connection_count) > 0 || atomic_load(&server->active_count) > 0 ||
           atomic_load(&server->upload_bytes) > 0 || !bd_router_idle(server->router)) {
        BD_ASSERT(turns++ < patience);
        (void)nanosleep(&pause, NULL);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes == 0) return 0;
    bd_http_server *server = server_of();
    bool admin = data[0] % 2 == 1;
    int fd = dial(admin ? bd_http_server_admin_address(server) : bd_http_server_address(server));
    send_all(fd, data + 1, bytes - 1);
    (void)shutdown(fd, SHUT_WR);
    listen_to_the_end(fd);
    close(fd);
    wait_until_gone(server);
    return 0;
}
