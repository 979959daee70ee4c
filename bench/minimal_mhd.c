/* minimal_mhd.c - the least program over libmicrohttpd that sends given bytes, to compare the
 * server's own cost with: no JSON, no tokens, no limits. A body with "stream":true gets EVENT
 * TOKENS times, one each STEP_US microseconds, then DONE; any other gets REPLY at once.
 *   bench_minimal_mhd REPLY_FILE EVENT_FILE DONE_FILE TOKENS STEP_US LOOPS [hop]    prints its port
 * With `hop` the handler answers nothing itself, as no server can whose answers are made by another
 * thread: it suspends the connection and hands the request over, that thread takes all there are
 * and resumes each, and the handler, called again, answers.
 * Threads: LOOPS of the library's, main, which keeps time (STEP_US 0: it sleeps), and with `hop`
 * the one that resumes. */
#include <errno.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FILE_BYTES_MAX = 1 << 16, STREAMS_MAX = 1 << 16 };

typedef struct text {
    char data[FILE_BYTES_MAX];
    size_t bytes;
} text;

typedef struct exchange {
    struct exchange *next; /* in handed_over, guarded by hop_lock */
    struct MHD_Connection *connection;
    char body[1024];
    size_t body_bytes;
    pthread_mutex_t lock;
    unsigned due, sent; /* guarded by lock, as is suspended */
    bool listed, suspended;
    bool resumed; /* by the other thread; the library's lock orders it before the next call */
} exchange;

static text reply, event, done;
static unsigned tokens;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static exchange *streams[STREAMS_MAX];
static size_t stream_count;
static bool hops;
static pthread_mutex_t hop_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t hop_ready = PTHREAD_COND_INITIALIZER;
static exchange *handed_over;

static bool read_text(const char *path, text *out) {
    FILE *file = fopen(path, "rb");
    if (!file) return false;
    out->bytes = fread(out->data, 1, sizeof out->data, file);
    return fclose(file) == 0;
}

static ssize_t next_event(void *cls, uint64_t position, char *out, size_t max) {
    exchange *x = cls;
    (void)position;
    pthread_mutex_lock(&x->lock);
    const text *what = NULL;
    if (x->sent > tokens) {
        pthread_mutex_unlock(&x->lock);
        return MHD_CONTENT_READER_END_OF_STREAM;
    }
    if (x->sent == tokens)
        what = &done;
    else if (x->due > x->sent)
        what = &event;
    if (what)
        x->sent++;
    else
        x->suspended = true;
    if (!what) MHD_suspend_connection(x->connection);
    pthread_mutex_unlock(&x->lock);
    if (!what || what->bytes > max) return 0;
    memcpy(out, what->data, what->bytes);
    return (ssize_t)what->bytes;
}

static void add_headers(struct MHD_Response *response, const char *type) {
    (void)MHD_add_response_header(response, "Content-Type", type);
    (void)MHD_add_response_header(response, "x-request-id", "req-00000000000000000000000000000000");
}

static enum MHD_Result answer(exchange *x, struct MHD_Connection *connection) {
    struct MHD_Response *response;
    if (strstr(x->body, "\"stream\":true")) {
        x->connection = connection;
        pthread_mutex_lock(&list_lock);
        if (stream_count < STREAMS_MAX) {
            streams[stream_count++] = x;
            x->listed = true;
        }
        pthread_mutex_unlock(&list_lock);
        response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, next_event, x, NULL);
        add_headers(response, "text/event-stream; charset=utf-8");
        (void)MHD_add_response_header(response, "Cache-Control", "no-cache");
        (void)MHD_add_response_header(response, "X-Accel-Buffering", "no");
    } else {
        response = MHD_create_response_from_buffer(reply.bytes, reply.data, MHD_RESPMEM_PERSISTENT);
        add_headers(response, "application/json");
    }
    enum MHD_Result result = MHD_queue_response(connection, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return result;
}

/* Only the first of a list wakes the other thread: it takes the whole list. */
static void hand_over(exchange *x, struct MHD_Connection *connection) {
    x->connection = connection;
    MHD_suspend_connection(connection);
    pthread_mutex_lock(&hop_lock);
    bool first = handed_over == NULL;
    x->next = handed_over;
    handed_over = x;
    pthread_mutex_unlock(&hop_lock);
    if (first) pthread_cond_signal(&hop_ready);
}

static void *resume_all(void *arg) {
    (void)arg;
    for (;;) {
        pthread_mutex_lock(&hop_lock);
        while (!handed_over)
            pthread_cond_wait(&hop_ready, &hop_lock);
        exchange *x = handed_over;
        handed_over = NULL;
        pthread_mutex_unlock(&hop_lock);
        while (x) {
            exchange *next = x->next; /* the exchange may be gone once it is resumed */
            x->resumed = true;
            MHD_resume_connection(x->connection);
            x = next;
        }
    }
    return NULL;
}

/* NOLINTNEXTLINE(readability-function-size): the parameters are the library's */
static enum MHD_Result handle(void *cls, struct MHD_Connection *connection, const char *url,
                              const char *method, const char *version, const char *upload,
                              size_t *upload_bytes, void **req_cls) {
    (void)cls, (void)url, (void)method, (void)version;
    exchange *x = *req_cls;
    if (!x) {
        x = calloc(1, sizeof *x);
        if (!x) return MHD_NO;
        pthread_mutex_init(&x->lock, NULL);
        *req_cls = x;
        return MHD_YES;
    }
    if (*upload_bytes == 0 && hops && !x->resumed) {
        hand_over(x, connection);
        return MHD_YES;
    }
    if (*upload_bytes == 0) return answer(x, connection);
    size_t room = sizeof x->body - 1 - x->body_bytes;
    size_t count = *upload_bytes < room ? *upload_bytes : room;
    memcpy(x->body + x->body_bytes, upload, count);
    x->body_bytes += count;
    *upload_bytes = 0;
    return MHD_YES;
}

static void completed(void *cls, struct MHD_Connection *connection, void **req_cls,
                      enum MHD_RequestTerminationCode code) {
    (void)cls, (void)connection, (void)code;
    exchange *x = *req_cls;
    if (!x) return;
    pthread_mutex_lock(&list_lock);
    for (size_t i = 0; x->listed && i < stream_count; i++)
        if (streams[i] == x) {
            streams[i] = streams[--stream_count];
            break;
        }
    pthread_mutex_unlock(&list_lock);
    pthread_mutex_destroy(&x->lock);
    free(x);
}

static void tick(void) {
    pthread_mutex_lock(&list_lock);
    for (size_t i = 0; i < stream_count; i++) {
        exchange *x = streams[i];
        pthread_mutex_lock(&x->lock);
        x->due++;
        if (x->suspended) {
            x->suspended = false;
            MHD_resume_connection(x->connection);
        }
        pthread_mutex_unlock(&x->lock);
    }
    pthread_mutex_unlock(&list_lock);
}

int main(int argc, char **argv) {
    if (argc < 7 || argc > 8 || !read_text(argv[1], &reply) || !read_text(argv[2], &event) ||
        !read_text(argv[3], &done)) {
        fprintf(stderr, "usage: %s REPLY_FILE EVENT_FILE DONE_FILE TOKENS STEP_US LOOPS [hop]\n",
                argv[0]);
        return 2;
    }
    tokens = (unsigned)strtoul(argv[4], NULL, 10);
    long step_us = strtol(argv[5], NULL, 10);
    unsigned loops = (unsigned)strtoul(argv[6], NULL, 10);
    hops = argc == 8 && strcmp(argv[7], "hop") == 0;
    pthread_t resumer;
    if (hops && pthread_create(&resumer, NULL, resume_all, NULL) != 0) return 1;
    struct sockaddr_in loopback = {.sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct MHD_Daemon *daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, handle, NULL,
        MHD_OPTION_SOCK_ADDR, (struct sockaddr *)&loopback, MHD_OPTION_CONNECTION_LIMIT, 8192u,
        MHD_OPTION_NOTIFY_COMPLETED, completed, NULL,
        loops > 1 ? MHD_OPTION_THREAD_POOL_SIZE : MHD_OPTION_END, loops, MHD_OPTION_END);
    if (!daemon) return 1;
    printf("%u\n", (unsigned)MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port);
    fflush(stdout);
    while (step_us == 0)
        pause();
    struct timespec next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    for (;;) {
        next.tv_nsec += step_us * 1000;
        next.tv_sec += next.tv_nsec / 1000000000;
        next.tv_nsec %= 1000000000;
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL) == EINTR) {
        }
        tick();
    }
}
