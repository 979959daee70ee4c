/* The server without a model, over real sockets: what it answers while loading, CORS, and the
 * absolute deadlines, which are one second here. Times are only compared with generous bounds. */
#include <arpa/inet.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "bitdelta/http/server.h"
#include "router/tenants_internal.h"

static bd_http_server *server;
static bd_http_health health_now;

static bd_http_health health(void *ctx) {
    (void)ctx;
    return health_now;
}

static int open_server(void **state) {
    (void)state;
    const char *const key = "k";
    const bd_http_options options = {
        .listen = "127.0.0.1:0",
        .admin = "127.0.0.1:0",
        .keys = &key,
        .key_count = 1,
        .cors_origin = "*",
        .header_seconds = 1,
        .body_seconds = 1,
        .idle_seconds = 1,
        .body_bytes_max = 1000,
        .health = health,
    };
    bd_error err;
    bd_log_level_set(BD_LOG_ERROR);
    if (bd_http_server_create(&options, &server, &err) != BD_OK) return -1;
    return bd_http_server_start(server, &err) == BD_OK ? 0 : -1;
}

static int close_server(void **state) {
    (void)state;
    bd_http_server_drain(server, 1);
    bd_http_server_stop(server);
    bd_http_server_destroy(server);
    return 0;
}

static int dial(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)atoi(strrchr(bd_http_server_address(server), ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    return fd;
}

static void say(int fd, const char *text) {
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
}

/* Everything until the peer closes or `seconds` pass in silence; true: it closed. */
static bool listen_to(int fd, char *out, size_t max, int seconds) {
    size_t count = 0;
    for (;;) {
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        out[count] = '\0';
        if (poll(&wait, 1, seconds * 1000) <= 0) return false;
        ssize_t got = recv(fd, out + count, max - 1 - count, 0);
        if (got <= 0) return true;
        count += (size_t)got;
    }
}

static void ask(const char *request, const char *const *expected) {
    char answer[8192];
    int fd = dial();
    say(fd, request);
    (void)listen_to(fd, answer, sizeof answer, 5);
    close(fd);
    for (; *expected; expected++)
        if (!strstr(answer, *expected)) fail_msg("no \"%s\" in:\n%s", *expected, answer);
}

#define ASK(request, ...) ask(request, (const char *const[]){__VA_ARGS__, NULL})
#define END               " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
#define KEY               "Authorization: Bearer k\r\n"

static void test_loading(void **state) {
    (void)state;
    health_now = BD_HTTP_READY; /* but there is no router yet */
    ASK("GET /health" END "\r\n", "HTTP/1.1 503", "\"model_loading\"", "Retry-After: 5");
    ASK("GET /v1/models" END "\r\n", "HTTP/1.1 401", "WWW-Authenticate: Bearer",
        "\"invalid_api_key\"");
    ASK("GET /v1/models" END KEY "\r\n", "HTTP/1.1 503", "\"model_loading\"");
    ASK("POST /v1/completions" END KEY "Content-Length: 2\r\n\r\n{}", "HTTP/1.1 503",
        "\"model_loading\"");
    ASK("GET /version" END "\r\n", "HTTP/1.1 200", "{\"version\":\"");
    health_now = BD_HTTP_DEAD;
    ASK("GET /health" END "\r\n", "HTTP/1.1 503", "\"engine_dead\"");
    ASK("POST /tokenize" END KEY "Content-Length: 2\r\n\r\n{}", "HTTP/1.1 503", "\"engine_dead\"");
    health_now = BD_HTTP_READY;
}

static void test_cors(void **state) {
    (void)state;
    ASK("OPTIONS /v1/completions" END "Access-Control-Request-Headers: authorization, x-y\r\n\r\n",
        "HTTP/1.1 204", "Access-Control-Allow-Origin: *",
        "Access-Control-Allow-Methods: GET, POST, OPTIONS",
        "Access-Control-Allow-Headers: authorization, x-y",
        "Access-Control-Max-Age:", "Allow: POST, OPTIONS");
    ASK("GET /nope" END "\r\n", "HTTP/1.1 404", "Access-Control-Allow-Origin: *",
        "Access-Control-Expose-Headers: x-request-id, retry-after");
}

/* Sends one byte every 100 ms, for less than the time that heads and bodies have by default;
 * microseconds until the server cut it off, 0 when it did not. */
static uint64_t drip(int fd, const char *text) {
    uint64_t started_us = bd_now_us();
    for (size_t i = 0; i < 250; i++) {
        char byte = text[i % strlen(text)];
        struct pollfd wait = {.fd = fd, .events = POLLIN | POLLRDHUP};
        if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1 || poll(&wait, 1, 100) > 0)
            return bd_now_us() - started_us;
    }
    return 0;
}

static void test_deadlines(void **state) {
    (void)state;
    char answer[4096];
    int fd = dial();
    say(fd, "GET /version HTTP/1.1\r\nX: ");
    uint64_t head_us = drip(fd, "y");
    close(fd);
    assert_true(head_us > 500000);
    fd = dial();
    say(fd, "POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n");
    uint64_t body_us = drip(fd, "y");
    close(fd);
    assert_true(body_us > 500000);
    fd = dial(); /* between requests: idle and header time together */
    say(fd, "GET /version HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_true(listen_to(fd, answer, sizeof answer, 8));
    assert_non_null(strstr(answer, "HTTP/1.1 200"));
    close(fd);
}

static void test_options_are_checked(void **state) {
    (void)state;
    static const char *const wrong[] = {"",
                                        "x",
                                        "127.0.0.1",
                                        "127.0.0.1:",
                                        "127.0.0.1:x",
                                        "[::1:5",
                                        "1.2.3.4:70000",
                                        "not.a.host.invalid:1"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        bd_http_server *none = server;
        bd_error err = {0};
        const bd_http_options options = {.listen = wrong[i]};
        bd_status status = bd_http_server_create(&options, &none, &err);
        assert_true(status != BD_OK && err.message[0] != '\0');
        assert_null(none);
    }
    const char *const empty = "";
    const bd_http_options no_key = {.listen = "127.0.0.1:0", .keys = &empty, .key_count = 1};
    bd_http_server *none = server;
    assert_int_equal(bd_http_server_create(&no_key, &none, NULL), BD_E_ARGUMENT);
    const bd_http_options unstarted = {.listen = "127.0.0.1:0"};
    assert_int_equal(bd_http_server_create(&unstarted, &none, NULL), BD_OK);
    bd_http_server_destroy(none); /* never started */
}

/* Each request holds its tenant as long as it lives and no longer, whatever became of it. */
static void test_tenants_are_let_go(void **state) {
    (void)state;
    char path[] = "/tmp/bd-tenants-XXXXXX";
    static const char file[] = /* the key is "k" */
        "{\"tenants\":[{\"name\":\"a\",\"variants\":\"*\",\"keys\":[\"sha256:"
        "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a\"]}]}";
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, file, sizeof file - 1) == (ssize_t)sizeof file - 1);
    close(fd);
    bd_tenants *tenants;
    bd_http_server *before = server;
    bd_error err;
    assert_int_equal(bd_tenants_open(path, &tenants, &err), BD_OK);
    const bd_http_options options = {
        .listen = "127.0.0.1:0", .tenants = tenants, .health = health, .body_bytes_max = 1000};
    assert_int_equal(bd_http_server_create(&options, &server, &err), BD_OK);
    assert_int_equal(bd_http_server_start(server, &err), BD_OK);
    ASK("GET /v1/models" END KEY "\r\n", "HTTP/1.1 503", "\"model_loading\"");
    ASK("GET /v1/models" END "Authorization: Bearer kk\r\n\r\n", "HTTP/1.1 401");
    ASK("POST /v1/completions" END KEY "Content-Length: 2\r\n\r\n{}", "HTTP/1.1 503");
    ASK("POST /v1/completions" END KEY "Content-Length: 5000\r\n\r\n", "HTTP/1.1 503");
    fd = dial(); /* gone before its body came */
    say(fd, "POST /v1/completions" END KEY "Content-Length: 2\r\n\r\n{");
    close(fd);
    bd_http_server_drain(server, 5);
    bd_http_server_stop(server);
    bd_http_server_destroy(server);
    server = before;
    const bd_tenant *tenant = bd_tenants_by_key(tenants, "k", 1);
    assert_non_null(tenant);
    assert_int_equal(atomic_load(&tenant->internal->holders), 2); /* the table and this test */
    bd_tenant_release(tenant);
    bd_tenants_destroy(tenants);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loading),
        cmocka_unit_test(test_cors),
        cmocka_unit_test(test_deadlines),
        cmocka_unit_test(test_options_are_checked),
        cmocka_unit_test(test_tenants_are_let_go),
    };
    return cmocka_run_group_tests(tests, open_server, close_server);
}
