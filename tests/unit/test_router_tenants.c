/* Tenants: the file against hostile ones, the bucket against exact arithmetic in another form,
 * keys and reloads, and that everything reserved comes back, also from many threads during reloads.
 * The latter also run under the thread sanitizer. */
#include "base_support.h"

#include <nettle/sha2.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "bitdelta/base/log.h"
#include "bitdelta/config/tenants_file.h"
#include "bitdelta/router/tenants.h"
#include "router/bucket.h"

static char path[64];

static int make_path(void **state) {
    (void)state;
    snprintf(path, sizeof path, "/tmp/bd-tenants-XXXXXX");
    int fd = mkstemp(path);
    if (fd < 0) return -1;
    close(fd);
    bd_log_level_set(BD_LOG_ERROR);
    return 0;
}

static int drop_path(void **state) {
    (void)state;
    return unlink(path);
}

static void put_file(const char *text) {
    assert_int_equal(bd_file_replace(path, text, strlen(text), NULL), BD_OK);
}

/* "sha256:..." of a key, by another road than the one that is tested: the digest of the text. */
static const char *hash_of(const char *key, char out[80]) {
    uint8_t digest[32];
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, strlen(key), (const uint8_t *)key);
    sha256_digest(&hash, 32, digest);
    memcpy(out, "sha256:", 8);
    for (int i = 0; i < 32; i++)
        snprintf(out + 7 + 2 * i, 3, "%02x", digest[i]);
    return out;
}

/* ---- The file ---- */

#define H1 "\"sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\""
#define H2 "\"sha256:10112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\""
#define T(members)                                                                                 \
    "{\"tenants\":[{\"name\":\"a\",\"keys\":[" H1 "],\"variants\":\"*\"" members "}]}"

static void test_file(void **state) {
    (void)state;
    bd_tenant_list list;
    bd_error err;
    put_file(
        "\xef\xbb\xbf{\"tenants\":[{\"name\":\"a.b-c_1\",\"keys\":[" H1 "," H2
        "],\"variants\":[\"zz\",\"m\",\"org/x\"],\"weight\":0.5,\"requests_per_minute\":60,"
        "\"tokens_per_minute\":1e3,\"token_burst\":50,\"max_concurrent\":3,\"priority_min\":-2},"
        "{\"variants\":\"*\",\"name\":\"B\",\"keys\":[\"sha256:"
        "20112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\"]}]}");
    assert_int_equal(bd_tenant_list_read(path, &list, &err), BD_OK);
    assert_int_equal(list.count, 2);
    const bd_tenant_entry *a = &list.items[0], *b = &list.items[1];
    assert_string_equal(a->name, "a.b-c_1");
    assert_int_equal(a->key_count, 2);
    assert_int_equal(a->keys[1][0], 0x10);
    assert_int_equal(a->keys[1][31], 0xff);
    assert_int_equal(a->variant_count, 3);
    assert_string_equal(a->variants[0], "m"); /* sorted */
    assert_string_equal(a->variants[2], "zz");
    assert_false(a->every_variant);
    assert_true(a->weight == 0.5);
    assert_int_equal(a->requests_per_minute, 60);
    assert_int_equal(a->request_burst, 60); /* a minute's worth */
    assert_int_equal(a->tokens_per_minute, 1000);
    assert_int_equal(a->token_burst, 50);
    assert_int_equal(a->max_concurrent, 3);
    assert_int_equal(a->priority_min, -2);
    assert_true(b->every_variant && b->weight == 1.0 && b->variant_count == 0);
    assert_int_equal(b->requests_per_minute + b->request_burst + b->tokens_per_minute +
                         b->token_burst + b->max_concurrent,
                     0);
    bd_tenant_list_deinit(&list);
    bd_tenant_list_deinit(&list); /* nothing is left */
}

static void test_hostile_files(void **state) {
    (void)state;
    static const char *const rows[][2] = {
        {"", "not valid JSON"},
        {"{", "not valid JSON"},
        {"[]", "one object with one member"},
        {"{}", "one object with one member"},
        {"{\"tenant\":[]}", "one object with one member"},
        {"{\"tenants\":{}}", "one object with one member"},
        {"{\"tenants\":[],\"x\":1}", "one object with one member"},
        {"{\"tenants\":[]}", "tenants: 0 of them"},
        {"{\"tenants\":[1]}", "tenants[0]: must be an object"},
        {"{\"tenants\":[{}]}", "tenants[0].name: is missing"},
        {"{\"tenants\":[{\"name\":\"a\",\"variants\":\"*\"}]}", "tenants[0].keys: is missing"},
        {"{\"tenants\":[{\"name\":\"a\",\"keys\":[" H1 "]}]}", "tenants[0].variants: is missing"},
        {T(",\"wieght\":1"), "tenants[0].wieght: unknown member"},
        {T(",\"Weight\":1"), "tenants[0].Weight: unknown member"},
        {T(",\"weight\":1,\"weight\":1"), "tenants[0].weight: given twice"},
        {T(",\"name\":\"b\""), "tenants[0].name: given twice"},
        {T(",\"weight\":0"), "tenants[0].weight: must be a number from 0.001"},
        {T(",\"weight\":-1"), "tenants[0].weight"},
        {T(",\"weight\":1e999"), "not valid JSON"},
        {T(",\"weight\":\"1\""), "tenants[0].weight"},
        {T(",\"weight\":1001"), "tenants[0].weight"},
        {T(",\"requests_per_minute\":0"), "requests_per_minute: must be a whole number from 1"},
        {T(",\"requests_per_minute\":1.5"), "tenants[0].requests_per_minute"},
        {T(",\"requests_per_minute\":-1"), "tenants[0].requests_per_minute"},
        {T(",\"requests_per_minute\":null"), "tenants[0].requests_per_minute"},
        {T(",\"requests_per_minute\":true"), "tenants[0].requests_per_minute"},
        {T(",\"tokens_per_minute\":1000000001"), "tenants[0].tokens_per_minute"},
        {T(",\"tokens_per_minute\":1e300"), "tenants[0].tokens_per_minute"},
        {T(",\"token_burst\":5"), "tenants[0].token_burst: needs tokens_per_minute"},
        {T(",\"request_burst\":5"), "tenants[0].request_burst: needs requests_per_minute"},
        {T(",\"max_concurrent\":0"), "tenants[0].max_concurrent"},
        {T(",\"max_concurrent\":1000001"), "tenants[0].max_concurrent"},
        {T(",\"priority_min\":0.5"), "tenants[0].priority_min"},
        {T(",\"priority_min\":-9e18"), "tenants[0].priority_min"},
        {"{\"tenants\":[{\"name\":\"\"}]}", "tenants[0].name: must be 1 to 64"},
        {"{\"tenants\":[{\"name\":\"-a\"}]}", "tenants[0].name"},
        {"{\"tenants\":[{\"name\":\"a b\"}]}", "tenants[0].name"},
        {"{\"tenants\":[{\"name\":\"a\\\"b\"}]}", "tenants[0].name"},
        {"{\"tenants\":[{\"name\":\"\xc3\xa9\"}]}", "tenants[0].name"},
        {"{\"tenants\":[{\"name\":\"a\\u0000b\"}]}", "not valid JSON"},
        {"{\"tenants\":[{\"name\":7}]}", "tenants[0].name: must be a string"},
        {"{\"tenants\":[{\"keys\":[]}]}", "tenants[0].keys: must be a list of 1 to 64"},
        {"{\"tenants\":[{\"keys\":" H1 "}]}", "tenants[0].keys"},
        {"{\"tenants\":[{\"keys\":[7]}]}", "tenants[0].keys[0]"},
        {"{\"tenants\":[{\"keys\":[" H1 ",\"sk-in-the-clear\"]}]}", "tenants[0].keys[1]"},
        {"{\"tenants\":[{\"keys\":[\"sha256:00\"]}]}", "tenants[0].keys[0]"},
        {"{\"tenants\":[{\"keys\":"
         "[\"sha256:00112233445566778899AABBCCDDEEFF00112233445566778899aabbccddeeff\"]}]}",
         "tenants[0].keys[0]"},
        {"{\"tenants\":[{\"keys\":[" H1 "," H1 "]}]}",
         "tenants[0].keys[1]: the same key is in the file already"},
        {"{\"tenants\":[{\"variants\":[]}]}", "tenants[0].variants"},
        {"{\"tenants\":[{\"variants\":\"all\"}]}", "tenants[0].variants"},
        {"{\"tenants\":[{\"variants\":[\"*\"]}]}", "tenants[0].variants"},
        {"{\"tenants\":[{\"variants\":[\"a\",7]}]}", "tenants[0].variants"},
        {"{\"tenants\":[{\"variants\":[\"a\",\"b\",\"a\"]}]}", "tenants[0].variants"},
        {"{\"tenants\":[{\"variants\":[\"\"]}]}", "tenants[0].variants"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bd_tenant_list list;
        bd_error err = {0};
        put_file(rows[i][0]);
        if (bd_tenant_list_read(path, &list, &err) == BD_OK) fail_msg("taken: %s", rows[i][0]);
        assert_true(err.status == BD_E_ARGUMENT);
        if (!strstr(err.message, rows[i][1]) || !strstr(err.message, path))
            fail_msg("%s: \"%s\" lacks \"%s\"", rows[i][0], err.message, rows[i][1]);
        assert_null(strstr(err.message, "in-the-clear"));
        assert_null(list.items);
    }
}

static void test_same_name_or_key(void **state) {
    (void)state;
    bd_tenant_list list;
    bd_error err;
#define ONE(name, key) "{\"name\":\"" name "\",\"keys\":[" key "],\"variants\":\"*\"}"
    put_file("{\"tenants\":[" ONE("a", H1) "," ONE("a", H2) "]}");
    assert_int_equal(bd_tenant_list_read(path, &list, &err), BD_E_ARGUMENT);
    assert_non_null(strstr(err.message, "tenants[1].name: another tenant has this name"));
    put_file("{\"tenants\":[" ONE("a", H1) "," ONE("b", H1) "]}");
    assert_int_equal(bd_tenant_list_read(path, &list, &err), BD_E_ARGUMENT);
    assert_non_null(strstr(err.message, "tenants[1].keys[0]: the same key"));
    assert_int_equal(bd_tenant_list_read("/no/such/file", &list, &err), BD_E_NOT_FOUND);
}

static char *many_tenants(uint32_t count) {
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_strbuf_puts(&text, "{\"tenants\":[");
    for (uint32_t i = 0; i < count; i++)
        bd_strbuf_printf(&text,
                         "%s{\"name\":\"t%u\",\"keys\":[\"sha256:%064x\"],\"variants\":\"*\"}",
                         i > 0 ? "," : "", i, i);
    bd_strbuf_puts(&text, "]}");
    assert_false(text.failed);
    return text.data;
}

static void test_many(void **state) {
    (void)state;
    bd_tenant_list list;
    bd_error err;
    char *text = many_tenants(BD_TENANTS_MAX);
    put_file(text);
    free(text);
    assert_int_equal(bd_tenant_list_read(path, &list, &err), BD_OK);
    assert_int_equal(list.count, BD_TENANTS_MAX);
    bd_tenant_list_deinit(&list);
    text = many_tenants(BD_TENANTS_MAX + 1);
    put_file(text);
    free(text);
    assert_int_equal(bd_tenant_list_read(path, &list, &err), BD_E_ARGUMENT);
    assert_non_null(strstr(err.message, "10001 of them"));
    char *large = malloc(BD_TENANTS_FILE_MAX + 1);
    assert_non_null(large);
    memset(large, ' ', BD_TENANTS_FILE_MAX + 1);
    assert_int_equal(bd_file_replace(path, large, BD_TENANTS_FILE_MAX + 1, NULL), BD_OK);
    free(large);
    assert_int_equal(bd_tenant_list_read(path, &list, &err), BD_E_LIMIT);
}

/* ---- The bucket ---- */

__extension__ typedef __int128 wide;

/* The same promise as a theoretical arrival time instead of a level: `due` is the moment, times
 * the rate, at which the bucket would be full again. */
typedef struct reference {
    wide due;
    uint64_t rate, burst;
} reference;

enum { MINUTE_US = 60000000 };

static wide due_at(const reference *r, uint64_t now_us) {
    wide now = (wide)now_us * r->rate;
    return r->due > now ? r->due : now;
}

static bool reference_has(const reference *r, uint64_t now_us, uint64_t tokens) {
    return due_at(r, now_us) + (wide)tokens * MINUTE_US <=
           (wide)now_us * r->rate + (wide)r->burst * MINUTE_US;
}

static void reference_take(reference *r, uint64_t now_us, uint64_t tokens) {
    r->due = due_at(r, now_us) + (wide)tokens * MINUTE_US;
}

static void reference_give(reference *r, uint64_t now_us, uint64_t tokens) {
    r->due = due_at(r, now_us) - (wide)tokens * MINUTE_US;
}

static uint64_t random_size(uint64_t *rng, uint64_t most) {
    uint64_t bits = support_random(rng) % 31;
    uint64_t value = support_random(rng) >> (63 - bits);
    return 1 + value % most;
}

static void run_trace(uint64_t *rng) {
    reference r = {.rate = random_size(rng, BD_BUCKET_MAX),
                   .burst = random_size(rng, BD_BUCKET_MAX)};
    bd_bucket bucket = {0};
    uint64_t now_us = support_random(rng) % 1000000000000u, taken = 0;
    bd_bucket_set(&bucket, r.rate, r.burst, now_us);
    r.due = (wide)now_us * r.rate;
    for (int i = 0; i < 400; i++) {
        if (support_random(rng) % 4 > 0) now_us += random_size(rng, (uint64_t)5 * MINUTE_US);
        bd_bucket_refill(&bucket, now_us);
        uint64_t tokens = random_size(rng, r.burst + r.burst / 8 + 1);
        if (tokens > BD_BUCKET_MAX) tokens = BD_BUCKET_MAX;
        uint64_t wait_us = bd_bucket_wait_us(&bucket, tokens);
        assert_true((wait_us == 0) == reference_has(&r, now_us, tokens));
        assert_true((wait_us == UINT64_MAX) == (tokens > r.burst));
        if (wait_us > 0 && wait_us < UINT64_MAX) {
            assert_true(reference_has(&r, now_us + wait_us, tokens));
            assert_false(reference_has(&r, now_us + wait_us - 1, tokens));
        }
        if (taken > 0 && support_random(rng) % 4 == 0) {
            uint64_t back = 1 + support_random(rng) % taken;
            bd_bucket_give(&bucket, back);
            reference_give(&r, now_us, back);
            taken = 0;
        } else if (wait_us == 0 || support_random(rng) % 16 == 0) { /* else a debt, now and then */
            taken = tokens;
            bd_bucket_take(&bucket, tokens);
            reference_take(&r, now_us, tokens);
        }
        wide left =
            ((wide)now_us * r.rate + (wide)r.burst * MINUTE_US - due_at(&r, now_us)) / MINUTE_US;
        assert_true(bd_bucket_left(&bucket) == (uint64_t)(left > 0 ? left : 0));
    }
}

static void test_bucket(void **state) {
    (void)state;
    uint64_t rng = support_seed();
    for (int i = 0; i < 2000; i++)
        run_trace(&rng);
}

static void test_bucket_changes(void **state) {
    (void)state;
    bd_bucket b = {0};
    assert_int_equal(bd_bucket_wait_us(&b, UINT64_MAX), 0); /* no limit */
    bd_bucket_set(&b, 60, 60, 1000);
    assert_int_equal(bd_bucket_left(&b), 60);
    bd_bucket_take(&b, 60);
    assert_int_equal(bd_bucket_wait_us(&b, 1), 1000000);
    bd_bucket_refill(&b, 500); /* the past changes nothing */
    assert_int_equal(bd_bucket_wait_us(&b, 1), 1000000);
    bd_bucket_set(&b, 60, 100, 1000); /* more room at once */
    assert_int_equal(bd_bucket_left(&b), 40);
    bd_bucket_set(&b, 6, 10, 1000); /* 60 are taken of 10: not owed */
    assert_int_equal(bd_bucket_left(&b), 0);
    assert_int_equal(bd_bucket_wait_us(&b, 1), 10000000);
    bd_bucket_take(&b, 5);
    assert_int_equal(bd_bucket_wait_us(&b, 1), 60000000);
    bd_bucket_set(&b, 6, 4, 1000); /* what was owed before stays owed */
    assert_int_equal(bd_bucket_wait_us(&b, 1), 60000000);
    bd_bucket_set(&b, 0, 0, 1000);
    assert_int_equal(bd_bucket_wait_us(&b, 1000), 0);
    bd_bucket_take(&b, 1000);
    bd_bucket_set(&b, 6, 4, 2000); /* a limit anew: full */
    assert_int_equal(bd_bucket_left(&b), 4);
    for (int i = 0; i < 200; i++)
        bd_bucket_take(&b, UINT64_MAX); /* a debt of any size is one */
    assert_int_equal(bd_bucket_left(&b), 0);
    bd_bucket_refill(&b, UINT64_MAX);
    assert_int_equal(bd_bucket_left(&b), 4);
}

/* ---- Keys and reloads ---- */

static void put_tenants(const char *members_a, const char *members_b) {
    char a[80], a2[80], b[80];
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_strbuf_printf(&text, "{\"tenants\":[{\"name\":\"a\",\"keys\":[\"%s\",\"%s\"]%s}",
                     hash_of("key-a", a), hash_of("key-a2", a2), members_a);
    if (members_b)
        bd_strbuf_printf(&text, ",{\"name\":\"b\",\"keys\":[\"%s\"]%s}", hash_of("key-b", b),
                         members_b);
    bd_strbuf_puts(&text, "]}");
    assert_false(text.failed);
    put_file(text.data);
    bd_strbuf_deinit(&text);
}

#define ALL ",\"variants\":\"*\""

static const bd_tenant *by_key(bd_tenants *tenants, const char *key) {
    return bd_tenants_by_key(tenants, key, strlen(key));
}

static void test_keys(void **state) {
    (void)state;
    bd_tenants *tenants;
    bd_error err;
    put_tenants(",\"weight\":2,\"variants\":[\"zen\",\"zen-c\"]", ALL);
    assert_int_equal(bd_tenants_open(path, &tenants, &err), BD_OK);
    const bd_tenant *a = by_key(tenants, "key-a"), *a2 = by_key(tenants, "key-a2"),
                    *b = by_key(tenants, "key-b");
    assert_non_null(a);
    assert_ptr_equal(a, a2);
    assert_string_equal(a->name, "a");
    assert_string_equal(b->name, "b");
    assert_true(a->weight == 2 && bd_tenant_weight(a) == 2 && bd_tenant_weight(NULL) == 1);
    assert_true(bd_tenant_id(a) != bd_tenant_id(b) && bd_tenant_id(a) > 0);
    assert_int_equal(bd_tenant_id(NULL), 0);
    static const char *const wrong[] = {"", "key", "key-A", "key-a ", "key-b\n", "sha256:"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_null(by_key(tenants, wrong[i]));
    char hash[80]; /* who reads the file cannot use what stands there */
    assert_null(by_key(tenants, hash_of("key-a", hash)));
    assert_true(bd_tenant_allows(a, "zen") && bd_tenant_allows(a, "zen-c"));
    assert_false(bd_tenant_allows(a, "zen-") || bd_tenant_allows(a, "") ||
                 bd_tenant_allows(a, "*"));
    assert_true(bd_tenant_allows(b, "anything") && bd_tenant_allows(NULL, "anything"));
    bd_tenants_destroy(tenants); /* those that are held live on */
    assert_string_equal(a->name, "a");
    bd_tenant_release(a);
    bd_tenant_release(a2);
    bd_tenant_release(b);
}

/* Every key of a full table finds its own tenant. */
static void test_every_key(void **state) {
    (void)state;
    enum { COUNT = 1000 };
    bd_strbuf text;
    bd_tenants *tenants;
    char hash[80], key[32];
    bd_strbuf_init(&text, 0);
    for (int i = 0; i < COUNT; i++) {
        snprintf(key, sizeof key, "key %d", i);
        bd_strbuf_printf(&text, "%s{\"name\":\"t%d\",\"keys\":[\"%s\"],\"variants\":\"*\"}",
                         i > 0 ? "," : "{\"tenants\":[", i, hash_of(key, hash));
    }
    bd_strbuf_puts(&text, "]}");
    put_file(text.data);
    bd_strbuf_deinit(&text);
    assert_int_equal(bd_tenants_open(path, &tenants, NULL), BD_OK);
    for (int i = 0; i < COUNT; i++) {
        snprintf(key, sizeof key, "key %d", i);
        const bd_tenant *found = by_key(tenants, key);
        assert_non_null(found);
        assert_int_equal(atoi(found->name + 1), i);
        bd_tenant_release(found);
    }
    for (int i = COUNT; i < 30 * COUNT; i++) { /* no other is near enough to one of them */
        snprintf(key, sizeof key, "key %d", i);
        assert_null(by_key(tenants, key));
    }
    bd_tenants_destroy(tenants);
}

static void test_reload(void **state) {
    (void)state;
    bd_tenants *tenants;
    bd_tenants_change change;
    bd_error err;
    bd_refused why;
    put_tenants(ALL ",\"requests_per_minute\":1", ALL);
    assert_int_equal(bd_tenants_open(path, &tenants, &err), BD_OK);
    const bd_tenant *a = by_key(tenants, "key-a"), *b = by_key(tenants, "key-b");
    const uint32_t id_a = a->id, id_b = b->id;
    bd_ask ask = {.tenant = a, .choices = 1};
    assert_int_equal(bd_tenant_admit(&ask, bd_now_us(), &why), BD_OK);

    put_file("{\"tenants\":[{\"name\":\"a\"}]}"); /* a bad file changes nothing */
    assert_int_equal(bd_tenants_reload(tenants, &change, &err), BD_E_ARGUMENT);
    assert_non_null(strstr(err.message, path));
    const bd_tenant *same = by_key(tenants, "key-a");
    assert_ptr_equal(same, a);
    bd_tenant_release(same);

    put_tenants(",\"variants\":[\"x\"],\"weight\":3,\"requests_per_minute\":1", NULL);
    assert_int_equal(bd_tenants_reload(tenants, &change, &err), BD_OK);
    assert_int_equal(change.total, 1);
    assert_int_equal(change.added, 0);
    assert_int_equal(change.removed, 1);
    assert_null(by_key(tenants, "key-b"));
    const bd_tenant *newer = by_key(tenants, "key-a");
    assert_true(newer != a && newer->id == id_a && newer->weight == 3 && a->weight == 1);
    assert_true(bd_tenant_allows(a, "y") && !bd_tenant_allows(newer, "y"));
    bd_ask again = {.tenant = newer, .choices = 1}; /* the minute's one request is used up */
    assert_int_equal(bd_tenant_admit(&again, bd_now_us(), &why), BD_BUSY);
    assert_int_equal(why.limit, BD_LIMIT_REQUESTS);
    bd_tenant_settle(&ask, 1, 1, BD_TENANT_OK, bd_now_us());
    bd_tenant_release(a);
    bd_tenant_release(newer);

    put_tenants(ALL, ALL); /* b is another one than before */
    assert_int_equal(bd_tenants_reload(tenants, &change, &err), BD_OK);
    assert_int_equal(change.added, 1);
    const bd_tenant *b2 = by_key(tenants, "key-b");
    assert_true(b2->id != id_b && b2->id != id_a);
    bd_ask free_ask = {.tenant = b, .choices = 3, .tokens = UINT64_MAX};
    assert_int_equal(bd_tenant_admit(&free_ask, bd_now_us(), &why), BD_OK);
    bd_tenant_settle(&free_ask, 0, 0, BD_TENANT_CANCELLED, bd_now_us());
    bd_tenant_release(b);
    bd_tenant_release(b2);

    bd_strbuf json;
    bd_strbuf_init(&json, 0);
    bd_tenants_write_json(tenants, bd_now_us(), &json);
    char hash[80];
    assert_null(strstr(json.data, hash_of("key-a", hash) + 7));
    assert_null(strstr(json.data, "sha256"));
    assert_non_null(strstr(json.data, "\"name\":\"a\",\"id\":1,\"keys\":2"));
    assert_non_null(strstr(json.data, "\"prompt_tokens\":1,\"generated_tokens\":1"));
    bd_strbuf_deinit(&json);
    bd_tenants_destroy(tenants);
}

/* ---- Admission ---- */

static void test_limits(void **state) {
    (void)state;
    bd_tenants *tenants;
    bd_refused why;
    put_tenants(ALL ",\"requests_per_minute\":6,\"request_burst\":2,\"tokens_per_minute\":600,"
                    "\"token_burst\":100,\"max_concurrent\":4",
                ALL);
    assert_int_equal(bd_tenants_open(path, &tenants, NULL), BD_OK);
    const bd_tenant *a = by_key(tenants, "key-a");
    uint64_t now = bd_now_us() + 1000000;
    bd_ask one = {.tenant = a, .choices = 1, .least = 60, .tokens = 60}, two = one;
    assert_int_equal(bd_tenant_admit(&one, now, &why), BD_OK);
    /* Refused for its tokens: the request was not counted either. */
    assert_int_equal(bd_tenant_admit(&two, now, &why), BD_BUSY);
    assert_true(why.limit == BD_LIMIT_TOKENS && !why.never && why.retry_after_s == 2);
    assert_int_equal(bd_tenant_admit(&two, now + 1999999, &why), BD_BUSY);
    assert_int_equal(why.retry_after_s, 1);
    assert_int_equal(bd_tenant_admit(&two, now + 2000000, &why), BD_OK);
    now += 2000000;
    bd_tenant_settle(&one, 10, 5, BD_TENANT_OK, now); /* 45 come back */
    bd_tenant_settle(&two, 60, 0, BD_TENANT_FAILED, now);
    bd_ask small = {.tenant = a, .choices = 1, .least = 1, .tokens = 1};
    assert_int_equal(bd_tenant_admit(&small, now, &why), BD_BUSY); /* 0.2 requests have come */
    assert_true(why.limit == BD_LIMIT_REQUESTS && why.retry_after_s == 8);
    now += 60000000;
    /* More at once than ever fits: not something to wait for; an estimate that is too high is. */
    bd_ask huge = {.tenant = a, .choices = 1, .least = 101, .tokens = 101};
    assert_int_equal(bd_tenant_admit(&huge, now, &why), BD_BUSY);
    assert_true(why.never && why.limit == BD_LIMIT_TOKENS && why.most == 100);
    bd_ask wide_ask = {.tenant = a, .choices = 5};
    assert_int_equal(bd_tenant_admit(&wide_ask, now, &why), BD_BUSY);
    assert_true(why.never && why.limit == BD_LIMIT_SEQUENCES && why.most == 4);
    bd_ask vague = {.tenant = a, .choices = 3, .least = 1, .tokens = 5000};
    assert_int_equal(bd_tenant_admit(&vague, now, &why), BD_OK);
    assert_int_equal(vague.tokens, 100);
    assert_int_equal(bd_tenant_correct(&vague, 101, 101, now, &why), BD_BUSY);
    assert_true(why.never && vague.tokens == 100);
    assert_int_equal(bd_tenant_correct(&vague, 30, 30, now, &why), BD_OK);
    bd_ask more = {.tenant = a, .choices = 2, .least = 1, .tokens = 1};
    assert_int_equal(bd_tenant_admit(&more, now, &why), BD_BUSY);
    assert_true(why.limit == BD_LIMIT_SEQUENCES && !why.never && why.retry_after_s >= 1);
    /* A correction upwards is a debt. */
    more.choices = 1;
    more.tokens = 70;
    assert_int_equal(bd_tenant_admit(&more, now, &why), BD_OK);
    assert_int_equal(bd_tenant_correct(&more, 90, 90, now, &why), BD_OK);
    bd_tenant_undo(&more, now); /* as if it had never been: its request counts again */
    bd_tenant_settle(&vague, 30, 0, BD_TENANT_OK, now);
    bd_ask last = {.tenant = a, .choices = 4, .least = 70, .tokens = 70};
    assert_int_equal(bd_tenant_admit(&last, now, &why), BD_OK);
    bd_tenant_settle(&last, 0, 0, BD_TENANT_REFUSED, now);
    bd_tenant_release(a);
    bd_tenants_destroy(tenants);
}

static bd_status admit_choices(bd_tenants *tenants, uint32_t choices, bd_ask *ask,
                               bd_refused *why) {
    *ask = (bd_ask){.tenant = by_key(tenants, "key-a"), .choices = choices};
    bd_status status = bd_tenant_admit(ask, bd_now_us(), why);
    if (status != BD_OK) bd_tenant_release(ask->tenant);
    return status;
}

/* A reload changes every limit of those that stay, up and down, also while they have much running.
 */
static void test_limits_change(void **state) {
    (void)state;
    static const uint32_t limits[] = {4, 2, 0, 3};
    bd_tenants *tenants;
    bd_tenants_change change;
    bd_refused why;
    bd_ask held, ask;
    char members[160];
    put_tenants(ALL ",\"max_concurrent\":9", ALL);
    assert_int_equal(bd_tenants_open(path, &tenants, NULL), BD_OK);
    assert_int_equal(admit_choices(tenants, 1, &held, &why), BD_OK);
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        const uint32_t most = limits[i];
        if (most > 0)
            snprintf(members, sizeof members, ALL ",\"max_concurrent\":%u,\"tokens_per_minute\":%u",
                     most, most);
        put_tenants(most > 0 ? members : ALL, ALL);
        assert_int_equal(bd_tenants_reload(tenants, &change, NULL), BD_OK);
        if (most == 0) {
            assert_int_equal(admit_choices(tenants, 1000, &ask, &why), BD_OK);
            bd_tenant_settle(&ask, 0, 0, BD_TENANT_OK, bd_now_us());
            bd_tenant_release(ask.tenant);
            continue;
        }
        assert_int_equal(admit_choices(tenants, most, &ask, &why), BD_BUSY); /* one is held */
        assert_true(why.limit == BD_LIMIT_SEQUENCES && !why.never);
        assert_int_equal(admit_choices(tenants, most + 1, &ask, &why), BD_BUSY);
        assert_true(why.never && why.most == most);
        assert_int_equal(admit_choices(tenants, most - 1, &ask, &why), BD_OK);
        assert_int_equal(bd_tenant_correct(&ask, most + 1, most + 1, bd_now_us(), &why), BD_BUSY);
        assert_true(why.limit == BD_LIMIT_TOKENS && why.most == most);
        bd_tenant_undo(&ask, bd_now_us());
        bd_tenant_release(ask.tenant);
    }
    bd_tenant_settle(&held, 0, 0, BD_TENANT_OK, bd_now_us());
    bd_tenant_release(held.tenant);
    bd_tenants_destroy(tenants);
}

/* Waits of every length are told as they are, in whole seconds, and never as none. */
static void test_waits(void **state) {
    (void)state;
    static const struct {
        const char *limit;
        uint64_t used, wanted;
        uint32_t wait_s;
    } rows[] = {
        {"\"tokens_per_minute\":1,\"token_burst\":1000", 1000, 1, 60},
        {"\"tokens_per_minute\":1,\"token_burst\":1000", 990, 21, 660},
        {"\"tokens_per_minute\":7,\"token_burst\":50", 50, 50, 429}, /* 428.6 */
        {"\"tokens_per_minute\":60,\"token_burst\":60", 60, 31, 31},
        {"\"tokens_per_minute\":1000000,\"token_burst\":10", 10, 1, 1},
        {"\"tokens_per_minute\":1,\"token_burst\":1000000000", 1000000000, 1000000000, UINT32_MAX}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bd_tenants *tenants;
        bd_refused why;
        char members[120];
        snprintf(members, sizeof members, ALL ",%s", rows[i].limit);
        put_tenants(members, NULL);
        assert_int_equal(bd_tenants_open(path, &tenants, NULL), BD_OK);
        const bd_tenant *a = by_key(tenants, "key-a");
        const uint64_t now = bd_now_us() + 1000000;
        bd_ask first = {.tenant = a, .choices = 1, .least = rows[i].used, .tokens = rows[i].used};
        bd_ask next = {
            .tenant = a, .choices = 1, .least = rows[i].wanted, .tokens = rows[i].wanted};
        assert_int_equal(bd_tenant_admit(&first, now, &why), BD_OK);
        assert_int_equal(bd_tenant_admit(&next, now, &why), BD_BUSY);
        assert_int_equal(why.retry_after_s, rows[i].wait_s);
        assert_true(why.limit == BD_LIMIT_TOKENS && !why.never);
        bd_tenant_settle(&first, rows[i].used, 0, BD_TENANT_OK, now);
        bd_tenant_release(a);
        bd_tenants_destroy(tenants);
    }
}

/* A wait counts in the first bucket whose bound it does not exceed. */
static void test_wait_buckets(void **state) {
    (void)state;
    static const uint64_t waits_us[] = {0,       10000,    10001,    50000,
                                        2500001, 60000000, 60000001, 3600000000u};
    static const char *const lines[] = {"_bucket{tenant=\"a\",le=\"0.01\"} 2\n",
                                        "_bucket{tenant=\"a\",le=\"0.05\"} 4\n",
                                        "_bucket{tenant=\"a\",le=\"2.5\"} 4\n",
                                        "_bucket{tenant=\"a\",le=\"5\"} 5\n",
                                        "_bucket{tenant=\"a\",le=\"10\"} 5\n",
                                        "_bucket{tenant=\"a\",le=\"60\"} 6\n",
                                        "_bucket{tenant=\"a\",le=\"+Inf\"} 8\n",
                                        "_sum{tenant=\"a\"} 3722.570003\n",
                                        "_count{tenant=\"a\"} 8\n"};
    bd_tenants *tenants;
    bd_refused why;
    bd_ask ask;
    bd_strbuf out;
    put_tenants(ALL, ALL);
    assert_int_equal(bd_tenants_open(path, &tenants, NULL), BD_OK);
    assert_int_equal(admit_choices(tenants, 1, &ask, &why), BD_OK);
    for (size_t i = 0; i < sizeof waits_us / sizeof waits_us[0]; i++)
        bd_tenant_waited(ask.tenant, waits_us[i]);
    bd_strbuf_init(&out, 0);
    bd_tenants_write_metrics(tenants, &out);
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        if (!strstr(out.data, lines[i])) fail_msg("no \"%s\" in:\n%s", lines[i], out.data);
    assert_null(strstr(out.data, "tenant=\"b\"")); /* nobody has heard of it */
    bd_strbuf_deinit(&out);
    bd_tenant_settle(&ask, 0, 0, BD_TENANT_OK, bd_now_us());
    bd_tenant_release(ask.tenant);
    bd_tenants_destroy(tenants);
}

enum { THREADS = 6, ROUNDS = 4000, RELOADS = 40 };

typedef struct shared {
    bd_tenants *tenants;
    atomic_uint_least64_t admitted, busy, prompt_tokens;
    atomic_bool stop;
    uint64_t seed;
} shared;

typedef struct worker {
    shared *all;
    uint32_t number;
} worker;

static void one_request(shared *all, uint64_t *rng) {
    static const char *const keys[] = {"key-a", "key-a2", "key-b"};
    const bd_tenant *tenant = by_key(all->tenants, keys[support_random(rng) % 3]);
    bd_refused why;
    if (!tenant) return; /* b comes and goes */
    bd_ask ask = {.tenant = tenant,
                  .choices = (uint32_t)(support_random(rng) % 4),
                  .tokens = support_random(rng) % 500};
    if (bd_tenant_admit(&ask, bd_now_us(), &why) == BD_OK) {
        atomic_fetch_add(&all->admitted, 1);
        uint64_t exact = support_random(rng) % 600;
        if (bd_tenant_correct(&ask, 0, exact, bd_now_us(), &why) != BD_OK) exact = ask.tokens;
        if (support_random(rng) % 4 == 0) sched_yield();
        if (support_random(rng) % 8 == 0) {
            bd_tenant_undo(&ask, bd_now_us());
        } else {
            bd_tenant_waited(tenant, support_random(rng) % 1000000);
            bd_tenant_settle(&ask, exact, 1,
                             (bd_tenant_result)(support_random(rng) % BD_TENANT_RESULTS),
                             bd_now_us());
        }
    } else {
        atomic_fetch_add(&all->busy, 1);
    }
    bd_tenant_release(tenant);
}

static void *work(void *arg) {
    const worker *self = arg;
    uint64_t rng = self->all->seed + self->number;
    for (int i = 0; i < ROUNDS; i++)
        one_request(self->all, &rng);
    return NULL;
}

static void *report(void *arg) {
    shared *all = arg;
    while (!atomic_load(&all->stop)) {
        bd_strbuf out;
        bd_strbuf_init(&out, 0);
        bd_tenants_write_json(all->tenants, bd_now_us(), &out);
        bd_tenants_write_metrics(all->tenants, &out);
        BD_ASSERT(!out.failed);
        bd_strbuf_deinit(&out);
    }
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    shared all = {.seed = support_seed()};
    worker workers[THREADS];
    pthread_t threads[THREADS], reporter;
    put_tenants(ALL ",\"requests_per_minute\":100000,\"tokens_per_minute\":5000000,"
                    "\"max_concurrent\":6",
                ALL);
    assert_int_equal(bd_tenants_open(path, &all.tenants, NULL), BD_OK);
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){&all, i + 1};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    assert_int_equal(pthread_create(&reporter, NULL, report, &all), 0);
    for (int i = 0; i < RELOADS; i++) {
        bd_tenants_change change;
        put_tenants(i % 2 ? ALL ",\"requests_per_minute\":100000,\"max_concurrent\":6"
                          : ALL ",\"tokens_per_minute\":1000,\"max_concurrent\":2",
                    i % 4 < 2 ? ALL ",\"max_concurrent\":3" : NULL);
        assert_int_equal(bd_tenants_reload(all.tenants, &change, NULL), BD_OK);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&all.stop, true);
    pthread_join(reporter, NULL);
    assert_true(atomic_load(&all.admitted) > 0);
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    bd_tenants_write_json(all.tenants, bd_now_us(), &out);
    const char *at = out.data;
    uint32_t seen = 0;
    while ((at = strstr(at, "\"requests_now\":"))) {
        static const char zero[] = "\"requests_now\":0,\"sequences_now\":0,";
        if (strncmp(at, zero, sizeof zero - 1) != 0) fail_msg("not all came back: %s", out.data);
        at++;
        seen++;
    }
    assert_true(seen >= 1);
    bd_strbuf_deinit(&out);
    bd_tenants_destroy(all.tenants);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_hostile_files),
        cmocka_unit_test(test_same_name_or_key),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_bucket),
        cmocka_unit_test(test_bucket_changes),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_every_key),
        cmocka_unit_test(test_reload),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_limits_change),
        cmocka_unit_test(test_waits),
        cmocka_unit_test(test_wait_buckets),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, make_path, drop_path);
}
