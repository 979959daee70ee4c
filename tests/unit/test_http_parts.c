/* Paths, percent decoding, keys and the outbox of events, without a socket. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/rng.h"
#include "http/internal.h"

static void test_routes(void **state) {
    (void)state;
    static const struct {
        const char *path;
        bd_route_id id;
        const char *argument;
    } rows[] = {
        {"/v1/completions", BD_ROUTE_COMPLETIONS, ""},
        {"/v1/completions/", BD_ROUTE_COMPLETIONS, ""},
        {"//v1///completions//", BD_ROUTE_COMPLETIONS, ""},
        {"http://host:80/v1/completions", BD_ROUTE_COMPLETIONS, ""},
        {"HTTPS://host/health", BD_ROUTE_HEALTH, ""},
        {"http://host", BD_ROUTE_UNKNOWN, NULL},
        {"/v1/chat/completions", BD_ROUTE_CHAT, ""},
        {"/v1/models", BD_ROUTE_MODELS, ""},
        {"/v1/models/", BD_ROUTE_MODELS, ""},
        {"/v1//models", BD_ROUTE_MODELS, ""},
        {"/v1/models/a%2Fb", BD_ROUTE_MODEL, "a%2Fb"},
        {"/v1/models/a/b/", BD_ROUTE_MODEL, "a/b"},
        {"/ping", BD_ROUTE_HEALTH, ""},
        {"/", BD_ROUTE_UNKNOWN, NULL},
        {"", BD_ROUTE_UNKNOWN, NULL},
        {"*", BD_ROUTE_ANY, NULL},
        {"/v1", BD_ROUTE_UNKNOWN, NULL},
        {"/V1/completions", BD_ROUTE_UNKNOWN, NULL},
        {"/v1/completionsx", BD_ROUTE_UNKNOWN, NULL},
        {"/v1%2Fcompletions", BD_ROUTE_UNKNOWN, NULL},
        {"/admin/variants", BD_ROUTE_UNKNOWN, NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char path[64];
        const char *argument = NULL;
        strcpy(path, rows[i].path);
        const bd_route *route = bd_route_find(false, path, &argument);
        if ((route ? route->id : BD_ROUTE_UNKNOWN) != rows[i].id) fail_msg("%s", rows[i].path);
        if (rows[i].argument) assert_string_equal(argument, rows[i].argument);
    }
    char admin[] = "/admin/variants/a%2Fb/load";
    const char *argument = NULL;
    assert_int_equal(bd_route_find(true, admin, &argument)->id, BD_ROUTE_ADMIN_VARIANT);
    assert_string_equal(argument, "a%2Fb/load");
    char completions[] = "/v1/completions";
    assert_null(bd_route_find(true, completions, &argument));
}

static void test_percent(void **state) {
    (void)state;
    static const char *const rows[][2] = {
        {"a%2Fb", "a/b"}, {"%41%4a%4A", "AJJ"}, {"%", "%"},       {"%4", "%4"},
        {"%zz", "%zz"},   {"%%41", "%A"},       {"%252F", "%2F"}, {"", ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[16];
        strcpy(text, rows[i][0]);
        assert_int_equal(bd_percent_decode(text), strlen(rows[i][1]));
        assert_string_equal(text, rows[i][1]);
    }
}

static void test_keys(void **state) {
    (void)state;
    bd_server_key keys[2];
    bd_http_server server = {.keys = keys, .key_count = 2};
    bd_key_digest("secret-one", 10, &keys[0]);
    bd_key_digest("secret two", 10, &keys[1]);
    const bd_tenant *tenant;
    assert_true(bd_key_check(&server, false, "Bearer secret-one", &tenant));
    assert_true(bd_key_check(&server, false, "bEARER   secret two", &tenant));
    static const char *const wrong[] = {"Bearer secret-on",
                                        "Bearer secret-one ",
                                        "Bearer SECRET-ONE",
                                        "Bearer ",
                                        "Bearer",
                                        "secret-one",
                                        "Basic secret-one",
                                        "",
                                        "Bearer\tsecret-one"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_false(bd_key_check(&server, false, wrong[i], &tenant));
    assert_false(bd_key_check(&server, false, NULL, &tenant));
    assert_true(
        bd_key_check(&server, true, NULL, &tenant)); /* the admin listener has no key here */
    server.key_count = 0;
    assert_true(bd_key_check(&server, false, "Bearer ", &tenant));
}

/* Against a plain list of events: whatever is pushed comes out whole, in order, in pieces no larger
 * than asked. */
static void test_outbox(void **state) {
    (void)state;
    enum { EVENTS = 20000, LENGTH_MAX = 3000 };
    uint64_t seed = bd_now_us();
    print_message("seed %llu\n", (unsigned long long)seed);
    bd_outbox box = {0};
    uint32_t pushed = 0, popped = 0, at = 0;
    static char event[LENGTH_MAX], out[LENGTH_MAX];
    size_t peak = 0;
    for (uint32_t turn = 0; popped < EVENTS; turn++) {
        bool push = pushed < EVENTS && pushed - popped < 40 && bd_rng_uniform(seed, 0, turn) < 0.55;
        if (push) {
            size_t length = 1 + (size_t)(bd_rng_uniform(seed, 1, pushed) * (LENGTH_MAX - 1));
            for (size_t i = 0; i < length; i++)
                event[i] = (char)(pushed * 31 + i);
            assert_true(bd_outbox_push(&box, event, length));
            pushed++;
            continue;
        }
        size_t max = 1 + (size_t)(bd_rng_uniform(seed, 2, turn) * (LENGTH_MAX - 1));
        size_t got = bd_outbox_pop(&box, out, max);
        assert_int_equal(got == 0, pushed == popped);
        if (got == 0) continue;
        size_t length = 1 + (size_t)(bd_rng_uniform(seed, 1, popped) * (LENGTH_MAX - 1));
        assert_int_equal(got, length - at < max ? length - at : max);
        for (size_t i = 0; i < got; i++)
            assert_int_equal(out[i], (char)(popped * 31 + at + i));
        at += (uint32_t)got;
        if (at == length) popped++, at = 0;
        if (box.cap > peak) peak = box.cap;
    }
    assert_int_equal(bd_outbox_bytes(&box), 0);
    assert_true(peak < 4 * 41 * LENGTH_MAX); /* bounded by what waits, not by what passed */
    free(box.data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_percent),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_outbox),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
