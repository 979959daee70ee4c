/* internal.h - the server's own types. One shard = one listener, one libmicrohttpd daemon in
 * external epoll mode, one thread that runs all of its callbacks. Whatever other threads have for a
 * request goes through its outbox and flags, under its lock, and a message in the shard's mailbox;
 * only the shard's thread touches connections. */
#ifndef BITDELTA_HTTP_INTERNAL_H
#define BITDELTA_HTTP_INTERNAL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "bitdelta/base/mailbox.h"
#include "bitdelta/http/server.h"
#include "bitdelta/openai/openai.h"
#include "tls.h"

#define BD_HTTP_PATH_MAX     1024               /* longer paths are unknown */
#define BD_HTTP_INLINE_BYTES ((size_t)64 << 10) /* larger bodies go to a bd-work thread */
#define BD_HTTP_CEILING_FACTOR                                                                     \
    4 /* bodies over this many times the limit are cut off, not read to the end */
#define BD_HTTP_ADDRESS_MAX    80
#define BD_HTTP_REQUEST_ID_MAX 128
#define BD_HTTP_HOST_MAX       256

typedef enum bd_route_id {
    BD_ROUTE_UNKNOWN,
    BD_ROUTE_ANY,
    BD_ROUTE_COMPLETIONS,
    BD_ROUTE_CHAT,
    BD_ROUTE_MODELS,
    BD_ROUTE_MODEL,
    BD_ROUTE_HEALTH,
    BD_ROUTE_VERSION,
    BD_ROUTE_METRICS,
    BD_ROUTE_TOKENIZE,
    BD_ROUTE_DETOKENIZE,
    BD_ROUTE_TOKENIZER_INFO,
    BD_ROUTE_DESCRIPTION,
    BD_ROUTE_ADMIN_VARIANTS,
    BD_ROUTE_ADMIN_VARIANT,
    BD_ROUTE_ADMIN_RESCAN,
    BD_ROUTE_ADMIN_RELOAD,
    BD_ROUTE_ADMIN_TENANTS,
    BD_ROUTE_LOAD_ADAPTER,
    BD_ROUTE_UNLOAD_ADAPTER
} bd_route_id;
#define BD_ROUTE_COUNT (BD_ROUTE_UNLOAD_ADAPTER + 1)

typedef struct bd_route {
    bd_route_id id;
    const char *label; /* in metrics */
    const char *path;  /* with `prefix`: what a path starts with */
    const char *allow; /* real methods, HEAD and OPTIONS included */
    bool prefix, get, post;
    bool open; /* needs no key */
    bool takes_body, needs_model, new_work;
    bool runtime; /* on the public listener only with runtime_loading; the admin key guards it if
                     there is one */
} bd_route;

typedef struct bd_server_key {
    uint8_t digest[32]; /* SHA-256 */
} bd_server_key;

typedef enum bd_phase { BD_PHASE_RUN, BD_PHASE_DRAIN, BD_PHASE_ABORT, BD_PHASE_CLOSE } bd_phase;

typedef struct bd_shard bd_shard;
typedef struct bd_conn bd_conn;
typedef struct bd_request bd_request;

typedef struct bd_worker {
    bd_http_server *server;
    bd_mailbox *mailbox;
    pthread_t thread;
    bool started;
} bd_worker;

struct bd_http_server {
    bd_http_options options; /* with defaults; its pointers are replaced by the copies below */
    char *cors_origin;
    bd_tls *tls; /* NULL: the public listener is plain, as the admin one always is */
    char *listen, *admin_listen;
    char address[BD_HTTP_ADDRESS_MAX], admin_address[BD_HTTP_ADDRESS_MAX];
    bd_server_key *keys;
    uint32_t key_count;
    bd_server_key admin_key;
    bool admin_guarded;
    /* Held beyond connections_max, so that they get an answer; and of the admin listener. */
    uint32_t excess_connections, admin_connections;
    bd_shard *shards; /* shard_count, then one for admin if there is one */
    uint32_t shard_total;
    bd_worker *workers;
    atomic_uint next_worker;
    _Atomic(bd_openai *) openai; /* NULL: still loading */
    bd_router *router;
    _Atomic int phase;
    atomic_bool workers_stop;
    _Atomic size_t upload_bytes;                /* body buffers of all requests */
    atomic_uint connection_count, active_count; /* active: requests that wait, or have waited */
    atomic_uint admitted_count;                 /* of the connections: within connections_max */
};

struct bd_conn { /* shard's thread only */
    bd_conn *next, *previous;
    bd_shard *shard;
    struct MHD_Connection *connection;
    bd_request *request; /* the one being served, or NULL */
    int fd;
    uint32_t slot, generation;
    bool admitted;        /* within connections_max; of the admin listener: always */
    bool watched;         /* in the shard's epoll */
    bool armed;           /* and its event is still to come */
    bool left;            /* the client sends no more; the library may not know yet */
    uint64_t left_us;     /* when; 0: it was us who cut it off, or nobody */
    uint64_t deadline_us; /* 0: none */
    uint64_t moved_in;    /* the run of the library in which it last did */
    bool in_head;         /* from the request line to the first call of the handler */
    bool bad_target;      /* blanks within what is asked for */
    bool path_overlong;
    char path[BD_HTTP_PATH_MAX]; /* raw, without the query */
};

struct bd_shard {
    bd_http_server *server;
    bool admin, started, closing;
    int listen_fd, epoll_fd, library_fd;
    struct MHD_Daemon *daemon;
    bd_mailbox *mailbox;
    pthread_t thread;
    bd_conn *conns;
    uint32_t conn_count;
    bd_conn **slots; /* [slot_count]; watch events name a slot and its generation */
    uint32_t *generations;
    uint32_t slot_count;
    uint64_t sweep_at_us;
    bd_metric *ok[BD_ROUTE_COUNT]; /* requests answered with 200; NULL: none yet */
    uint64_t run;                  /* of the library, counted */
    uint32_t moved;    /* connections that did in this run, without those that wait now */
    bool worked;       /* one moved in this run */
    uint32_t in_place; /* requests that wait without being suspended */
    bool patient;      /* a request may wait in place */
    bool news;         /* the library has to run again before it sleeps */
    uint64_t now_us, leavers_at_us;
    uint32_t submitted, unwoken; /* completions of this turn; those bd-sched was not woken for */
    bool quiet;                  /* few came in the turn before */
    char name[16];
};

typedef struct bd_outbox { /* whole events, each taken out on its own */
    char *data;
    size_t head, tail, cap;
    uint32_t
        left; /* bytes of the event at head that are still to come; 0: its length comes first */
    size_t exempt_bytes; /* of events that do not count against the reader's bound */
} bd_outbox;

typedef struct bd_reply {
    unsigned status;
    bd_strbuf body;
    const char *content_type; /* NULL: none */
    const char *allow;
    uint32_t retry_after_s;
    bool close, challenge;
} bd_reply;

struct bd_request {
    bd_message message; /* first: in a worker's or the shard's mailbox */
    atomic_uint
        refs; /* libmicrohttpd, a worker or bd-sched, the posted message, the stream response */
    bd_shard *shard;
    /* The shard's thread. */
    bd_conn *conn;
    struct MHD_Connection *connection; /* NULL once completed */
    const bd_route *route;
    const char *argument; /* rest of a prefix path, raw; in path */
    bool parked, body_done, work_started, head_only, replied, expects, active;
    bool in_place; /* waits, and is not suspended */
    uint8_t looks; /* that it had in place */
    size_t body_seen;
    uint64_t received_us, last_write_us;
    const bd_tenant *tenant; /* held; NULL: everyone, or not known yet */
    /* The shard's thread, then the worker's. */
    char *body;
    size_t body_bytes, body_cap;
    bd_reply reply;
    /* Guarded by lock. */
    pthread_mutex_t lock;
    bool waiting; /* nothing was there for the shard: whoever has something posts */
    bool posted, cancelled, finished, reply_ready;
    bd_completion *completion;
    bd_outbox outbox;
    /* The shard's thread. */
    char id[BD_HTTP_REQUEST_ID_MAX + 1];
    char path[]; /* raw, without the query; the route's once it is found */
};

/* request.c */
bd_request *bd_request_create(bd_shard *shard, const char *path);
void bd_request_ref(bd_request *request);
void bd_request_unref(bd_request *request);
/* Wakes the request up on its shard if it waits there. Call without the lock. */
void bd_request_post(bd_request *request);
/* Any thread: its job ends soon, its connection without an answer. */
void bd_request_cancel(bd_request *request, bd_status reason);
bool bd_request_append_body(bd_request *request, const char *data,
                            size_t bytes); /* false: no room now */
void bd_request_drop_body(bd_request *request);
void bd_request_set_error(bd_request *request, const bd_api_error *err);
extern const bd_completion_sink bd_request_sink;
bool bd_outbox_push(bd_outbox *box, const char *data, size_t bytes); /* false: out of memory */
size_t bd_outbox_pop(bd_outbox *box, char *out, size_t max);
size_t bd_outbox_bytes(const bd_outbox *box);

/* routes.c */
const bd_route *bd_route_find(bool admin, char *path,
                              const char **argument); /* normalises path in place */
size_t bd_percent_decode(char *text);                 /* in place; new length */
/* head.c: what the head of a request is refused for; false fills *err. */
bool bd_head_framing(const bd_conn *conn, const char *version, bd_api_error *err);
bool bd_head_check(bd_request *request, const char *method, uint64_t declared_bytes, bool has_body,
                   bd_api_error *err);
void bd_head_request_id(bd_request *request);
bool bd_head_body(struct MHD_Connection *connection,
                  uint64_t *declared_bytes); /* true: a body follows */
/* origin.c: orders that a web page may have sent. keyed: the request needs a key, which no page
 * has. */
bool bd_origin_check(const bd_request *request, bool keyed, bd_api_error *err);
bool bd_origin_host_allowed(const char *sent, const char *given, const char *bound);
bool bd_origin_is_own(const char *origin, const char *host);
bool bd_origin_is_loopback(const char *bound);
/* auth.c */
void bd_key_digest(const char *key, size_t bytes, bd_server_key *out);
/* Of a public route whose key names a tenant: that tenant, to be released; else NULL. */
bool bd_key_check(const bd_http_server *server, bool admin, const char *header,
                  const bd_tenant **tenant);
/* configs/openapi.json, put in by CMakeLists.txt */
extern const unsigned char bd_openapi_text[];
extern const size_t bd_openapi_bytes;
/* work.c */
bd_status bd_workers_start(bd_http_server *server, bd_error *err);
void bd_workers_stop(bd_http_server *server);
/* The route's own work, on this thread; true: bd-sched has something to do and was not woken. */
bool bd_work_run(bd_request *request);
void bd_work_post(bd_request *request);
bool bd_health_error(const bd_http_server *server, bool draining_too,
                     bd_api_error *err); /* true: *err says why not */
/* admin.c */
bool bd_admin_variants(bd_http_server *server, bd_strbuf *out, bd_api_error *err);
bool bd_admin_tenants(bd_http_server *server, bd_strbuf *out, bd_api_error *err);
bool bd_admin_reload(bd_http_server *server, bd_strbuf *out, bd_api_error *err);
bool bd_admin_variant(bd_http_server *server, const char *argument, bd_strbuf *out,
                      bd_api_error *err);
/* admin_change.c: true: the answer comes later, from bd-scan or bd-sched. */
bool bd_admin_change(bd_request *request, bd_api_error *err);
/* refuse.c: with every line of the library's log: is it about to refuse a whole head? */
void bd_refuse_first(const bd_shard *shard);
/* handler.c: libmicrohttpd's callbacks, cls = shard */
enum MHD_Result bd_handle(void *cls, struct MHD_Connection *connection, const char *url,
                          const char *method, const char *version, const char *upload_data,
                          size_t *upload_data_size, void **req_cls);
void bd_handle_completed(void *cls, struct MHD_Connection *connection, void **req_cls,
                         enum MHD_RequestTerminationCode code);
/* reply.c */
/* Any thread: a request was refused or cut by this limit, one of those that register lists. */
void bd_http_count_limit(const bd_http_server *server, const char *limit);
void bd_http_register_limits(const bd_http_server *server); /* at 0 until they are met */
enum MHD_Result bd_reply_queue(bd_request *request);
enum MHD_Result bd_reply_queue_stream(bd_request *request);
/* An error, past the library and straight to the socket, which takes no more after it. */
void bd_reply_alone(bd_request *request);
/* listen.c */
/* first: of the sockets that share the port with reuse_port. */
bd_status bd_listen_open(const char *address, bool reuse_port, bool first, int *out, bd_error *err);
bd_status bd_listen_address(int fd, char out[BD_HTTP_ADDRESS_MAX], bd_error *err);
/* shard.c */
bd_status bd_shard_init(bd_shard *shard, bd_http_server *server, int listen_fd, bool admin,
                        uint32_t index, bd_error *err);
bd_status bd_shard_start(bd_shard *shard, bd_error *err);
void bd_shard_deinit(bd_shard *shard);
void bd_shard_watch(bd_conn *conn); /* tell when the client leaves */
/* Whether the connection is within connections_max: since it came, or because there is room by now.
 */
bool bd_shard_admit(bd_conn *conn);
void bd_shard_cut(bd_conn *conn); /* the library closes it soon */
/* It waits: suspended, or, if it may stay, in place for a while: the handler is called again, at
 * times in vain. */
void bd_shard_park(bd_request *request, bool may_stay);
/* With every callback that is not followed by waiting: the library may have more to do for it. */
void bd_shard_moved(bd_conn *conn);
void bd_shard_go_on(bd_request *request); /* moved, and waits no more for its answer */
void bd_shard_submitted(bd_shard *shard); /* bd-sched is woken for it before this turn ends */

#endif
