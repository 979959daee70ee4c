/* server.c - the server object: options, listeners, drain, stop. Threads: the builder's. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "internal.h"

enum { DRAIN_POLL_US = 10000, ABORT_SECONDS_MAX = 5 };
/* Of the process without connections, threads of connections aside: 32 on a CPU, about 100 with 8
 * GPUs. Of such a thread: listener, two epolls, eventfd, and one that is accepted to be refused. */
enum { OWN_DESCRIPTORS = 160, SHARD_DESCRIPTORS = 5, SIDE_CONNECTIONS = 64 };

static void fill_defaults(bd_http_options *options) {
    if (options->shard_count == 0) options->shard_count = 2;
    if (options->worker_count == 0) options->worker_count = 2;
    if (options->connections_max == 0) options->connections_max = 4096;
    if (options->body_bytes_max == 0) options->body_bytes_max = (size_t)32 << 20;
    if (options->upload_bytes_max == 0) options->upload_bytes_max = (size_t)512 << 20;
    if (options->stream_bytes_max == 0) options->stream_bytes_max = (size_t)1 << 20;
    if (options->header_seconds == 0) options->header_seconds = 30;
    if (options->body_seconds == 0) options->body_seconds = 120;
    if (options->idle_seconds == 0) options->idle_seconds = 130;
}

/* One descriptor per connection; what the rest of the process may need is not given to clients: out
 * of descriptors the server could not even take a connection to refuse it. */
static bd_status share_descriptors(bd_http_server *server, bd_error *err) {
    bd_http_options *options = &server->options;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return bd_fail_errno(err, BD_E_IO, "open files", errno, "getrlimit failed");
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
    uint64_t all = limit.rlim_cur;
    uint64_t own = all / 2 < OWN_DESCRIPTORS ? all / 2 : OWN_DESCRIPTORS;
    own += (uint64_t)SHARD_DESCRIPTORS * (options->shard_count + 1u);
    uint64_t room = all > own ? all - own : 0;
    uint64_t side = room / 8 < SIDE_CONNECTIONS ? room / 8 : SIDE_CONNECTIONS;
    if (side == 0)
        return bd_fail(err, BD_E_LIMIT, "open files",
                       "the limit of %llu open files (ulimit -n) leaves none for connections",
                       (unsigned long long)all);
    server->excess_connections = server->admin_connections = (uint32_t)side;
    room -= 2 * side;
    if (room >= options->connections_max) return BD_OK;
    options->connections_max = (uint32_t)room;
    bd_log(BD_LOG_WARN, "http",
           "open file limit %llu: connections_max lowered to %u, %u more for refusals, %u for the "
           "admin listener, %u kept for files",
           (unsigned long long)all, (unsigned)room, (unsigned)side, (unsigned)side, (unsigned)own);
    return BD_OK;
}

static char *copy_or_null(const char *text, bool *failed) {
    if (!text || !text[0]) return NULL;
    char *copy = strdup(text);
    if (!copy) *failed = true;
    return copy;
}

static bd_status copy_options(bd_http_server *server, const bd_http_options *options,
                              bd_error *err) {
    bool failed = false;
    server->options = *options;
    fill_defaults(&server->options);
    server->listen = copy_or_null(options->listen, &failed);
    server->admin_listen = copy_or_null(options->admin, &failed);
    server->cors_origin = copy_or_null(options->cors_origin, &failed);
    server->keys = options->key_count > 0 ? calloc(options->key_count, sizeof *server->keys) : NULL;
    if (failed || (options->key_count > 0 && !server->keys))
        return bd_fail(err, BD_E_MEMORY, "http", "out of memory");
    if (!server->listen) return bd_fail(err, BD_E_ARGUMENT, "listen", "no listen address");
    for (uint32_t i = 0; i < options->key_count; i++) {
        const char *key = options->keys[i];
        if (!key || !key[0])
            return bd_fail(err, BD_E_ARGUMENT, "api key", "key %u is empty", (unsigned)i);
        bd_key_digest(key, strlen(key), &server->keys[i]);
    }
    server->key_count = options->key_count;
    server->admin_guarded = options->admin_key && options->admin_key[0];
    if (server->admin_guarded)
        bd_key_digest(options->admin_key, strlen(options->admin_key), &server->admin_key);
    /* Nothing borrowed may outlive create. */
    if (options->tls_cert || options->tls_key) {
        if (!options->tls_cert || !options->tls_key)
            return bd_fail(err, BD_E_ARGUMENT, options->tls_cert ? "tls_key" : "tls_cert",
                           "tls_cert and tls_key belong together: one of them is missing");
        bd_status status = bd_tls_create(&server->tls, options->tls_cert, options->tls_key, err);
        if (status != BD_OK) return status;
    }
    server->options.listen = server->options.admin = server->options.admin_key =
        server->options.cors_origin = NULL;
    server->options.keys = NULL;
    server->options.tls_cert = server->options.tls_key = NULL;
    return BD_OK;
}

/* All public shards share one port; port 0 becomes the first one's. */
static bd_status open_listeners(bd_http_server *server, bd_error *err) {
    uint32_t count = server->options.shard_count;
    const char *address = server->listen;
    for (uint32_t i = 0; i < count; i++) {
        int fd = -1;
        bd_status status = bd_listen_open(address, count > 1, i == 0, &fd, err);
        if (status != BD_OK) return status;
        status = bd_shard_init(&server->shards[server->shard_total++], server, fd, false, i, err);
        if (status == BD_OK && i == 0) status = bd_listen_address(fd, server->address, err);
        if (status != BD_OK) return status;
        address = server->address;
    }
    if (!server->admin_listen) return BD_OK;
    int fd = -1;
    bd_status status = bd_listen_open(server->admin_listen, false, true, &fd, err);
    if (status != BD_OK) return status;
    status = bd_shard_init(&server->shards[server->shard_total++], server, fd, true, 0, err);
    return status == BD_OK ? bd_listen_address(fd, server->admin_address, err) : status;
}

bd_status bd_http_server_create(const bd_http_options *options, bd_http_server **out,
                                bd_error *err) {
    *out = NULL;
    bd_http_server *server = calloc(1, sizeof *server);
    if (!server) return bd_fail(err, BD_E_MEMORY, "http", "out of memory");
    bd_status status = copy_options(server, options, err);
    if (status != BD_OK) goto fail;
    if ((status = share_descriptors(server, err)) != BD_OK) goto fail;
    server->shards = calloc(server->options.shard_count + 1u, sizeof *server->shards);
    server->workers = calloc(server->options.worker_count, sizeof *server->workers);
    if (!server->shards || !server->workers) {
        status = bd_fail(err, BD_E_MEMORY, "http", "out of memory");
        goto fail;
    }
    if ((status = open_listeners(server, err)) != BD_OK) goto fail;
    *out = server;
    return BD_OK;
fail:
    bd_http_server_destroy(server);
    return status;
}

bd_status bd_http_server_start(bd_http_server *server, bd_error *err) {
    /* Signals are main's; SIGPIPE in particular must not reach a thread that writes to sockets. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bd_http_register_limits(server);
    bd_status status = bd_workers_start(server, err);
    for (uint32_t i = 0; i < server->shard_total && status == BD_OK; i++)
        status = bd_shard_start(&server->shards[i], err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != BD_OK) {
        bd_http_server_stop(server);
        return status;
    }
    bd_log(BD_LOG_INFO, "http", "listening address=%s%s", server->address,
           server->tls ? " tls=on" : "");
    if (server->admin_listen)
        bd_log(BD_LOG_INFO, "http", "admin-listening address=%s", server->admin_address);
    if (server->admin_listen && !server->admin_guarded &&
        !bd_origin_is_loopback(server->admin_address))
        bd_log(BD_LOG_WARN, "http",
               "admin address=%s asks for no key and is no loopback: whoever reaches it gives "
               "orders; see --admin-key",
               server->admin_address);
    return BD_OK;
}

bd_status bd_http_server_attach(bd_http_server *server, bd_router *router,
                                const char *base_fingerprint, const char *numerics, bd_error *err) {
    const bd_openai_options options = {
        .router = router,
        .base_fingerprint = base_fingerprint,
        .numerics = numerics,
        .chat_template_path = server->options.chat_template,
        .response_bytes_max = server->options.response_bytes_max,
    };
    bd_openai *openai = NULL;
    BD_ASSERT(!atomic_load(&server->openai));
    bd_status status = bd_openai_create(&options, &openai, err);
    if (status != BD_OK) return status;
    server->router = router;
    atomic_store(&server->openai, openai); /* publishes router too */
    if (server->options.tenants) bd_tenants_watch(server->options.tenants, router);
    return BD_OK;
}

bd_status bd_http_server_reload_tls(bd_http_server *server, bd_error *err) {
    return server->tls ? bd_tls_reload(server->tls, err) : BD_OK;
}

const char *bd_http_server_address(const bd_http_server *server) {
    return server->address;
}

const char *bd_http_server_admin_address(const bd_http_server *server) {
    return server->admin_address;
}

static void set_phase(bd_http_server *server, bd_phase phase) {
    atomic_store(&server->phase, phase);
    for (uint32_t i = 0; i < server->shard_total; i++)
        if (server->shards[i].mailbox) bd_mailbox_wake(server->shards[i].mailbox);
}

/* false: requests were still there at the deadline. */
static bool wait_for_requests(const bd_http_server *server, uint64_t seconds) {
    const struct timespec pause = {.tv_nsec = DRAIN_POLL_US * 1000L};
    uint64_t deadline_us = bd_now_us() + seconds * 1000000u;
    while (atomic_load(&server->active_count) > 0) {
        if (bd_now_us() >= deadline_us) return false;
        (void)nanosleep(&pause, NULL);
    }
    return true;
}

void bd_http_server_drain(bd_http_server *server, uint32_t seconds) {
    if (server->router) bd_router_drain(server->router);
    set_phase(server, BD_PHASE_DRAIN);
    if (wait_for_requests(server, seconds)) return;
    bd_log(BD_LOG_WARN, "http", "drain time over requests=%u", atomic_load(&server->active_count));
    set_phase(server, BD_PHASE_ABORT);
    (void)wait_for_requests(server, ABORT_SECONDS_MAX);
}

void bd_http_server_stop(bd_http_server *server) {
    set_phase(server, BD_PHASE_CLOSE);
    for (uint32_t i = 0; i < server->shard_total; i++) {
        if (!server->shards[i].started) continue;
        (void)pthread_join(server->shards[i].thread, NULL);
        server->shards[i].started = false;
    }
    bd_workers_stop(server);
    if (server->options.tenants) bd_tenants_watch(server->options.tenants, NULL);
}

void bd_http_server_destroy(bd_http_server *server) {
    if (!server) return;
    for (uint32_t i = 0; i < server->shard_total; i++)
        bd_shard_deinit(&server->shards[i]);
    for (uint32_t i = 0; server->workers && i < server->options.worker_count; i++)
        bd_mailbox_destroy(server->workers[i].mailbox);
    bd_openai_destroy(atomic_load(&server->openai));
    free(server->shards);
    free(server->workers);
    free(server->keys);
    free(server->listen);
    free(server->admin_listen);
    free(server->cors_origin);
    bd_tls_destroy(server->tls);
    free(server);
}
