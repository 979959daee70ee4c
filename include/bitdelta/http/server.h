/* server.h - the HTTP server: libmicrohttpd under our own epoll loops, one daemon and one thread
 * (`bd-http-n`) each, `bd-work-n` threads for large bodies, an admin listener on a thread of its
 * own. Owner: main. Threads: create, attach, start, drain, stop and destroy from the builder's
 * thread. */
#ifndef BITDELTA_HTTP_SERVER_H
#define BITDELTA_HTTP_SERVER_H

#include "bitdelta/base/metrics.h"
#include "bitdelta/router/router.h"

typedef struct bd_http_server bd_http_server;

typedef enum bd_http_health { BD_HTTP_READY, BD_HTTP_LOADING, BD_HTTP_DEAD } bd_http_health;

typedef struct bd_http_options { /* zero means the default in brackets; strings are copied */
    const char *listen;      /* "127.0.0.1:8080", "[::1]:0", "0.0.0.0:80"; port 0: any free one */
    const char *admin;       /* NULL or "": no admin listener */
    const char *const *keys; /* none: requests need no key */
    uint32_t key_count;
    bd_tenants *tenants; /* the keys are theirs and `keys` is empty; outlives the server; or NULL */
    /* With tenants: /metrics of `listen` shows series of variants and tenants, not only totals. */
    bool metrics_public;
    /* PEM files, both or neither (plain HTTP): the public listener speaks TLS 1.2 and 1.3. The
     * admin listener never does. */
    const char *tls_cert, *tls_key;
    const char *admin_key; /* NULL or "": the admin listener needs none */
    /* vLLM's load_lora_adapter and unload_lora_adapter on the public listener too: asks for the
     * admin key if there is one, else for a key as the other routes do. */
    bool runtime_loading;
    const char *chat_template; /* file for every model, read by attach; NULL: each has its own */
    const char *cors_origin;   /* NULL or "": no CORS headers; "*" is usual */
    bd_metrics *metrics;
    uint32_t shard_count;     /* [2] bd-http-n threads */
    uint32_t worker_count;    /* [2] bd-work-n threads */
    uint32_t connections_max; /* [4096]; lowered when RLIMIT_NOFILE cannot be raised enough */
    size_t body_bytes_max;    /* [32 MiB] */
    size_t upload_bytes_max;  /* [512 MiB] bodies held over all connections */
    /* [1 MiB] events waiting for one reader, echoed prompts not counted. A reader that falls
     * further behind loses its request: generation never waits for a socket, and memory never grows
     * with a reader's slowness. */
    size_t stream_bytes_max;
    size_t response_bytes_max; /* [256 MiB] one response that is not streamed */
    uint32_t header_seconds;   /* [30] from accept to the end of the request head */
    uint32_t body_seconds;     /* [120] from the end of the head to the end of the body */
    uint32_t idle_seconds;     /* [130] between requests of a connection */
    uint32_t comment_seconds;  /* [0: none] `: keep-alive` comments in silent streams */
    /* From any http thread; NULL: ready as soon as a router is attached. */
    bd_http_health (*health)(void *ctx);
    void *health_ctx;
} bd_http_options;

/* Binds the listeners; nothing is accepted before start. BD_E_ARGUMENT: an address or key cannot be
 * used; BD_E_IO: the socket call that failed. */
BD_MUST_CHECK bd_status bd_http_server_create(const bd_http_options *options, bd_http_server **out,
                                              bd_error *err);
/* Serves from now on: 503 model_loading until a router is attached. Logs `listening
 * address=HOST:PORT`. */
BD_MUST_CHECK bd_status bd_http_server_start(bd_http_server *server, bd_error *err);
/* Once. The router outlives destroy. The fingerprints go into system_fingerprint; numerics may be
 * NULL. */
BD_MUST_CHECK bd_status bd_http_server_attach(bd_http_server *server, bd_router *router,
                                              const char *base_fingerprint, const char *numerics,
                                              bd_error *err);
/* "127.0.0.1:43210"; admin "" when there is none. Valid until destroy. */
const char *bd_http_server_address(const bd_http_server *server);
const char *bd_http_server_admin_address(const bd_http_server *server);

/* Reads the files of tls_cert and tls_key again; connections from now on see them. On failure the
 * certificate from before stays. From one thread at a time, between create and destroy. */
BD_MUST_CHECK bd_status bd_http_server_reload_tls(bd_http_server *server, bd_error *err);

/* New work is refused with 503 shutting_down, /health says 503, running requests go on for at most
 * `seconds`, then get the error event (or 503). Returns when no request is left. The engine must
 * still run. */
void bd_http_server_drain(bd_http_server *server, uint32_t seconds);
/* Closes listeners and connections, joins the threads; without drain, running requests are cut. */
void bd_http_server_stop(bd_http_server *server);
/* After stop and after bd_engine_stop (its last sinks still reach the server's memory). NULL is
 * fine. */
void bd_http_server_destroy(bd_http_server *server);

#endif
