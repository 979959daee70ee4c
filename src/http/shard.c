/* shard.c - one listener's loop: libmicrohttpd's epoll, in which the mailbox is too, and an epoll
 * of our own over the sockets of all clients. Threads: init, start and deinit by the builder, the
 * rest on the shard's thread.
 *
 * A request whose answer is made elsewhere waits for it. Suspending its connection costs two
 * changes of the library's epoll and a read in vain, more than all else that an answer needs from
 * the kernel, so that a request stays in place for its first looks and the first milliseconds: the
 * library then calls the handler with every run, and the loop sleeps although the library says that
 * it has something to do.
 *
 * A suspended connection is blind: libmicrohttpd neither times it out nor sees its client leave. So
 * every socket is watched here for EPOLLRDHUP, which also fires for a half-close: while a request
 * is worked on, both count as leaving.
 *
 * The library reads once per edge of its epoll and takes a short read for the last: when data and
 * the end come together, it never reads the end. A read side that ended is therefore shut down
 * here, which takes nothing from it but makes another edge, until the library has closed. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "internal.h"

enum {
    SWEEP_US = 250000,
    LEFT_SWEEP_US = 2000, /* after somebody left */
    LEAVERS_US = 1000,    /* between looks for those who left, when there is other work */
    WAIT_MS_MAX = 1000,
    EVENTS_MAX = 128,
    /* With 128 events at once 0.9.75 goes back to sleep before it handles them: only with fewer
     * connections may it sleep itself. */
    WAIT_INSIDE_MAX = 120,
    LEFT_US_MAX = 5000000, /* to an end that the library was told of */
    CLOSE_SECONDS_MAX = 3,
    IN_PLACE_MS = 10,
    LOOKS_MAX = 4,   /* of a request in place, before it is suspended */
    WAKE_EVERY = 32, /* requests of a turn */
    HELP_MAX = 2,    /* requests of the turn before */
    BACKLOG = 1024,
    EXCESS_SECONDS = 2 /* for the head of a request that is refused anyway */
};

/* ---- connections ---- */

static bool take_slot(bd_shard *shard, bd_conn *conn) {
    uint32_t slot = 0;
    while (slot < shard->slot_count && shard->slots[slot])
        slot++;
    if (slot == shard->slot_count) {
        uint32_t count = shard->slot_count == 0 ? 64 : shard->slot_count * 2;
        bd_conn **slots = realloc(shard->slots, count * sizeof *slots);
        if (slots) shard->slots = slots;
        uint32_t *generations = realloc(shard->generations, count * sizeof *generations);
        if (generations) shard->generations = generations;
        if (!slots || !generations) return false;
        memset(slots + slot, 0, (count - slot) * sizeof *slots);
        memset(generations + slot, 0, (count - slot) * sizeof *generations);
        shard->slot_count = count;
    }
    shard->slots[slot] = conn;
    shard->generations[slot]++;
    if (shard->generations[slot] == 0) shard->generations[slot] = 1;
    conn->slot = slot;
    conn->generation = shard->generations[slot];
    return true;
}

/* A client that vanished without a word is noticed by the kernel; a reader that stalls fills a
 * small buffer soon. */
static void set_socket_options(int fd) {
    const struct {
        int level, name, value;
    } options[] = {
        {SOL_SOCKET, SO_KEEPALIVE, 1},          {IPPROTO_TCP, TCP_KEEPIDLE, 30},
        {IPPROTO_TCP, TCP_KEEPINTVL, 10},       {IPPROTO_TCP, TCP_KEEPCNT, 3},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, 30000}, {SOL_SOCKET, SO_SNDBUF, 64 << 10},
        {IPPROTO_TCP, TCP_NODELAY, 1},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0];
         i++) /* each is only an improvement */
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value,
                         sizeof options[i].value);
}

/* How many connections are held beyond the limit (of the admin listener: at all), so that they get
 * an answer. What comes on top of that is closed unread: the library would leave it waiting. */
static enum MHD_Result on_accept(void *cls, const struct sockaddr *address, socklen_t bytes) {
    const bd_shard *shard = cls;
    const bd_http_server *server = shard->server;
    (void)address;
    (void)bytes;
    bool full = shard->admin ? shard->conn_count >= server->admin_connections
                             : atomic_load(&server->connection_count) >=
                                   server->options.connections_max + server->excess_connections;
    if (!full) return MHD_YES;
    bd_http_count_limit(server, "connections");
    return MHD_NO;
}

bool bd_shard_admit(bd_conn *conn) {
    bd_http_server *server = conn->shard->server;
    unsigned count = atomic_load(&server->admitted_count);
    while (!conn->admitted && count < server->options.connections_max)
        conn->admitted = atomic_compare_exchange_weak(&server->admitted_count, &count, count + 1);
    return conn->admitted;
}

static void open_conn(bd_shard *shard, struct MHD_Connection *connection, void **socket_context) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    bd_conn *conn = calloc(1, sizeof *conn);
    if (!conn || !info ||
        !take_slot(shard, conn)) { /* its first request is refused for the missing context */
        free(conn);
        return;
    }
    conn->shard = shard;
    conn->connection = connection;
    conn->fd = info->connect_fd;
    uint32_t seconds = shard->server->options.header_seconds;
    conn->admitted = shard->admin;
    if (!shard->admin) atomic_fetch_add(&shard->server->connection_count, 1);
    if (!bd_shard_admit(conn)) seconds = seconds < EXCESS_SECONDS ? seconds : EXCESS_SECONDS;
    conn->deadline_us = bd_now_us() + (uint64_t)seconds * 1000000u;
    conn->next = shard->conns;
    if (conn->next) conn->next->previous = conn;
    shard->conns = conn;
    shard->conn_count++;
    set_socket_options(conn->fd);
    if (shard->server->tls && !shard->admin) bd_tls_attach(shard->server->tls, connection);
    bd_shard_watch(conn);
    *socket_context = conn;
}

static void close_conn(bd_shard *shard, bd_conn *conn) {
    if (conn->watched) (void)epoll_ctl(shard->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
    shard->slots[conn->slot] = NULL;
    if (conn->previous)
        conn->previous->next = conn->next;
    else
        shard->conns = conn->next;
    if (conn->next) conn->next->previous = conn->previous;
    shard->conn_count--;
    if (!shard->admin) {
        atomic_fetch_sub(&shard->server->connection_count, 1);
        if (conn->admitted) atomic_fetch_sub(&shard->server->admitted_count, 1);
    }
    free(conn);
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **socket_context,
                          enum MHD_ConnectionNotificationCode code) {
    bd_shard *shard = cls;
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        open_conn(shard, connection, socket_context);
    else if (*socket_context)
        close_conn(shard, *socket_context);
}

/* The request line as it came, before the library decodes it. */
static void *on_request_line(void *cls, const char *uri, struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    bd_conn *conn = info ? info->socket_context : NULL;
    (void)cls;
    if (!conn) return NULL;
    conn->in_head = true;
    conn->bad_target = uri[strcspn(uri, " \t\v\f\r")] != '\0';
    size_t bytes = strcspn(uri, "?#");
    conn->path_overlong = bytes >= sizeof conn->path;
    if (conn->path_overlong) bytes = 0;
    memcpy(conn->path, uri, bytes);
    conn->path[bytes] = '\0';
    return NULL; /* the first call of the handler makes the request */
}

static void on_library_log(void *cls, const char *format, va_list args) {
    char text[512];
    bd_refuse_first(cls);
    if (!bd_log_enabled(BD_LOG_DEBUG)) return;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    vsnprintf(text, sizeof text, format, args);
#pragma GCC diagnostic pop
    bd_log(BD_LOG_DEBUG, "http", "library: %.*s", (int)strcspn(text, "\n"), text);
}

/* ---- parking, waking, watching ---- */

void bd_shard_moved(bd_conn *conn) {
    bd_shard *shard = conn->shard;
    if (conn->moved_in == shard->run) return;
    conn->moved_in = shard->run;
    shard->moved++;
    shard->worked = true;
}

static void rest(bd_conn *conn) {
    if (conn->moved_in != conn->shard->run) return;
    conn->moved_in = 0;
    conn->shard->moved--;
}

static bool has_patience(bd_request *request) {
    if (request->looks == LOOKS_MAX || !request->shard->patient) return false;
    request->looks++;
    return true;
}

static void set_in_place(bd_request *request, bool in_place) {
    if (in_place && !request->in_place) request->shard->in_place++;
    if (!in_place && request->in_place) request->shard->in_place--;
    request->in_place = in_place;
}

void bd_shard_park(bd_request *request, bool may_stay) {
    if (!request->active) atomic_fetch_add(&request->shard->server->active_count, 1);
    request->active = true;
    bd_shard_watch(request->conn);
    rest(request->conn);
    set_in_place(request, may_stay && has_patience(request));
    if (request->in_place) return;
    request->parked = true;
    MHD_suspend_connection(request->connection);
}

void bd_shard_go_on(bd_request *request) {
    bd_shard_moved(request->conn);
    set_in_place(request, false);
}

static void wake(bd_request *request) {
    if (!request->connection || (!request->parked && !request->in_place)) return;
    request->shard->news = true;
    if (!request->parked) return;
    request->parked = false;
    MHD_resume_connection(request->connection);
}

void bd_shard_watch(bd_conn *conn) {
    if (conn->armed) return;
    struct epoll_event event = {
        .events = EPOLLRDHUP | EPOLLONESHOT,
        .data.u64 = (uint64_t)conn->generation << 32 | conn->slot,
    };
    int operation = conn->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (epoll_ctl(conn->shard->epoll_fd, operation, conn->fd, &event) == 0)
        conn->watched = conn->armed = true;
}

void bd_shard_cut(bd_conn *conn) {
    conn->left = true;
    (void)shutdown(conn->fd, SHUT_RDWR);
}

/* A request that is being worked on has what it needs from its client. */
static void nudge(bd_conn *conn, uint64_t now_us) {
    if (!conn->left || (conn->request && conn->request->body_done)) return;
    (void)shutdown(conn->fd, SHUT_RD);
    if (conn->left_us > 0 && now_us > conn->left_us + LEFT_US_MAX) bd_shard_cut(conn);
}

static void client_left(bd_shard *shard, uint64_t tag) {
    uint32_t slot = (uint32_t)tag, generation = (uint32_t)(tag >> 32);
    bd_conn *conn = slot < shard->slot_count ? shard->slots[slot] : NULL;
    if (!conn || conn->generation != generation) return;
    conn->armed = false;
    uint64_t now_us = bd_now_us();
    if (conn->left_us == 0) conn->left_us = now_us;
    conn->left = true;
    nudge(conn, now_us);
    /* The library may read what came before the end only now, and the end not at all. */
    if (shard->sweep_at_us > now_us + LEFT_SWEEP_US) shard->sweep_at_us = now_us + LEFT_SWEEP_US;
    if (!conn->request || !conn->request->body_done) return;
    bd_request_cancel(conn->request, BD_CANCELLED);
    wake(conn->request);
}

static void wake_sched(bd_shard *shard) {
    const bd_openai *openai = atomic_load(&shard->server->openai);
    if (shard->unwoken == 0) return;
    if (shard->quiet)
        bd_openai_help(openai);
    else
        bd_openai_wake(openai);
    shard->unwoken = 0;
}

/* Waking bd-sched costs more than most of what it does for a request: the first of a turn does, one
 * in so many, and the turn's end. Where they come one by one this thread does it itself. */
void bd_shard_submitted(bd_shard *shard) {
    shard->unwoken++;
    if (shard->submitted++ % WAKE_EVERY == 0) wake_sched(shard);
}

static void read_mailbox(bd_shard *shard) {
    for (bd_message *message = bd_mailbox_take(shard->mailbox); message;) {
        bd_request *request = (bd_request *)message;
        message = message->next;
        pthread_mutex_lock(&request->lock);
        request->posted = request->waiting = false;
        pthread_mutex_unlock(&request->lock);
        wake(request);
        bd_request_unref(request);
    }
}

/* ---- time ---- */

static void send_comment(bd_request *request, uint64_t now_us) {
    static const char comment[] = ": keep-alive\n\n";
    uint64_t interval_us = (uint64_t)request->shard->server->options.comment_seconds * 1000000u;
    if (interval_us == 0 || !request->parked || !request->replied ||
        now_us - request->last_write_us < interval_us)
        return;
    pthread_mutex_lock(&request->lock);
    bool pushed =
        !request->finished && bd_outbox_push(&request->outbox, comment, sizeof comment - 1);
    pthread_mutex_unlock(&request->lock);
    if (pushed) wake(request);
}

/* A head or body that drips in never counts as idle, hence the absolute deadlines. */
static void sweep(bd_shard *shard, uint64_t now_us) {
    int phase = atomic_load(&shard->server->phase);
    for (bd_conn *conn = shard->conns; conn; conn = conn->next) {
        if (conn->deadline_us > 0 && now_us > conn->deadline_us) {
            conn->deadline_us = 0;
            bd_http_count_limit(shard->server, conn->request ? "body_seconds" : "header_seconds");
            bd_shard_cut(conn);
        }
        nudge(conn, now_us);
        if (!conn->request) continue;
        if (phase == BD_PHASE_ABORT) bd_request_cancel(conn->request, BD_E_SHUTDOWN);
        send_comment(conn->request, now_us);
    }
}

/* ---- the loop ---- */

/* While requests stay in place the library always says 0. Then it has more to do if a connection
 * has moved in its last run; the one thing that does not show, the rest of a head that filled the
 * buffer, waits with them. */
static uint64_t library_wait_ms(bd_shard *shard) {
    MHD_UNSIGNED_LONG_LONG library_ms = WAIT_MS_MAX;
    if (shard->in_place > 0) return shard->moved > 0 ? 0 : IN_PLACE_MS;
    return MHD_get_timeout(shard->daemon, &library_ms) == MHD_YES ? library_ms : WAIT_MS_MAX;
}

static uint64_t own_wait_ms(const bd_shard *shard) {
    if (shard->news) return 0;
    if (shard->conn_count == 0) return WAIT_MS_MAX;
    return shard->sweep_at_us > shard->now_us ? (shard->sweep_at_us - shard->now_us) / 1000 + 1 : 0;
}

/* Sleeps until the library has something to do, without it. */
static void wait_outside(bd_shard *shard, uint64_t ms) {
    uint64_t library_ms = library_wait_ms(shard);
    struct pollfd library = {.fd = shard->library_fd, .events = POLLIN};
    if (library_ms < ms) ms = library_ms;
    if (ms > 0 && poll(&library, 1, (int)ms) == 0) shard->patient = false;
}

/* Its sleep in its own epoll_wait saves one look at the descriptors. What TLS has already decrypted
 * no descriptor shows, hence nobody in place. */
static void run_library(bd_shard *shard) {
    uint64_t ms = own_wait_ms(shard);
    bool inside = shard->in_place == 0 && shard->conn_count < WAIT_INSIDE_MAX;
    shard->patient = !shard->server->tls;
    if (!inside && ms > 0) {
        wait_outside(shard, ms);
        read_mailbox(shard);
    }
    shard->news = shard->worked = false;
    shard->moved = 0;
    shard->run++;
    (void)MHD_run_wait(shard->daemon, inside ? (int32_t)ms : 0);
    wake_sched(shard);
    shard->quiet = shard->submitted <= HELP_MAX;
    shard->submitted = 0;
}

static void look_for_leavers(bd_shard *shard) {
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(shard->epoll_fd, events, EVENTS_MAX, 0);
    for (int i = 0; i < count; i++)
        client_left(shard, events[i].data.u64);
}

/* The library is run again as long as anything is new: an answer takes it two or three runs. */
static void turn(bd_shard *shard) {
    run_library(shard);
    read_mailbox(shard);
    uint64_t now_us = shard->now_us = bd_now_us();
    bool woken_for_nothing = !shard->worked && !shard->news;
    if (woken_for_nothing || now_us >= shard->leavers_at_us) {
        shard->leavers_at_us = now_us + LEAVERS_US;
        look_for_leavers(shard);
    }
    if (now_us >= shard->sweep_at_us) {
        shard->sweep_at_us = now_us + SWEEP_US;
        sweep(shard, now_us);
    }
}

/* Every connection is woken and cut; none is suspended again, or stopping the daemon would abort
 * the process. */
static void close_all(bd_shard *shard) {
    shard->closing = true;
    MHD_socket listener = MHD_quiesce_daemon(shard->daemon);
    if (listener != MHD_INVALID_SOCKET) close(listener);
    shard->listen_fd = -1;
    uint64_t give_up_us = bd_now_us() + (uint64_t)CLOSE_SECONDS_MAX * 1000000u;
    for (bd_conn *conn = shard->conns; conn; conn = conn->next) {
        if (conn->request) {
            bd_request_cancel(conn->request, BD_CANCELLED);
            wake(conn->request);
        }
        bd_shard_cut(conn);
    }
    while (shard->conn_count > 0 && bd_now_us() < give_up_us)
        turn(shard);
    BD_ASSERT(shard->conn_count > 0 || shard->in_place == 0);
}

static void *run(void *arg) {
    bd_shard *shard = arg;
    (void)pthread_setname_np(pthread_self(), shard->name);
    while (atomic_load(&shard->server->phase) != BD_PHASE_CLOSE)
        turn(shard);
    close_all(shard);
    MHD_stop_daemon(shard->daemon);
    shard->daemon = NULL;
    return NULL;
}

bd_status bd_shard_init(bd_shard *shard, bd_http_server *server, int listen_fd, bool admin,
                        uint32_t index, bd_error *err) {
    *shard = (bd_shard){.server = server, .admin = admin, .listen_fd = listen_fd, .epoll_fd = -1};
    if (admin)
        snprintf(shard->name, sizeof shard->name, "bd-http-admin");
    else
        snprintf(shard->name, sizeof shard->name, "bd-http-%u", (unsigned)(index % 1000));
    shard->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (shard->epoll_fd < 0)
        return bd_fail_errno(err, BD_E_IO, shard->name, errno, "epoll_create1 failed");
    return bd_mailbox_create(&shard->mailbox, 0, true, err);
}

static bd_status start_daemon(bd_shard *shard, bd_error *err) {
    const bd_http_options *options = &shard->server->options;
    if (listen(shard->listen_fd, BACKLOG) != 0)
        return bd_fail_errno(err, BD_E_IO,
                             shard->admin ? shard->server->admin_address : shard->server->address,
                             errno, "cannot listen");
    const bool tls = shard->server->tls && !shard->admin;
    /* Never reached, as on_accept comes first; at its limit the library would stop accepting. Not
     * strict, or it would refuse a missing Host itself, with its header block twice. */
    const unsigned connections = options->connections_max + shard->server->excess_connections +
                                 shard->server->admin_connections;
    /* The list of options ends at the first MHD_OPTION_END: without TLS before those of TLS. */
    shard->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | (tls ? MHD_USE_TLS : 0u), 0,
        on_accept, shard, bd_handle, shard, MHD_OPTION_EXTERNAL_LOGGER, on_library_log, shard,
        MHD_OPTION_LISTEN_SOCKET, shard->listen_fd, MHD_OPTION_NOTIFY_COMPLETED,
        bd_handle_completed, shard, MHD_OPTION_NOTIFY_CONNECTION, on_connection, shard,
        MHD_OPTION_URI_LOG_CALLBACK, on_request_line, shard, MHD_OPTION_CONNECTION_LIMIT,
        connections, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)options->idle_seconds,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)32 << 10,
        tls ? MHD_OPTION_HTTPS_CERT_CALLBACK : MHD_OPTION_END, bd_tls_certificate,
        MHD_OPTION_HTTPS_PRIORITIES, BD_TLS_PRIORITIES, MHD_OPTION_END);
    if (!shard->daemon) return bd_fail(err, BD_E_IO, shard->name, "libmicrohttpd did not start");
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(shard->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    /* The library passes over events without a pointer: they only end its sleep. */
    struct epoll_event mailbox = {.events = EPOLLIN | EPOLLET}, watches = {.events = EPOLLIN};
    if (info) shard->library_fd = info->epoll_fd;
    bd_mailbox_use_edges(shard->mailbox);
    if (info && epoll_ctl(info->epoll_fd, EPOLL_CTL_ADD, shard->epoll_fd, &watches) == 0 &&
        epoll_ctl(info->epoll_fd, EPOLL_CTL_ADD, bd_mailbox_eventfd(shard->mailbox), &mailbox) == 0)
        return BD_OK;
    return bd_fail_errno(err, BD_E_IO, shard->name, errno, "epoll_ctl failed");
}

bd_status bd_shard_start(bd_shard *shard, bd_error *err) {
    bd_status status = start_daemon(shard, err);
    if (status != BD_OK) return status;
    int fault = pthread_create(&shard->thread, NULL, run, shard);
    if (fault != 0) return bd_fail_errno(err, BD_E_IO, shard->name, fault, "cannot start a thread");
    shard->started = true;
    return BD_OK;
}

void bd_shard_deinit(bd_shard *shard) {
    if (shard->daemon) MHD_stop_daemon(shard->daemon); /* started, but its thread was not */
    if (shard->daemon) shard->listen_fd = -1;
    if (shard->mailbox) read_mailbox(shard); /* what the engine's last sinks posted */
    bd_mailbox_destroy(shard->mailbox);
    if (shard->listen_fd >= 0) close(shard->listen_fd);
    if (shard->epoll_fd >= 0) close(shard->epoll_fd);
    free(shard->slots);
    free(shard->generations);
}
