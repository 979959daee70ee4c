/* test_engine_kv.c - the block pool against a naive model, the prefix key against OpenSSL's
 * SipHash, and what the prefix cache may and may not share. */
#include "engine_fake.h"

bool bd_cache_poll(bd_cache *cache, uint64_t now_us) {
    (void)cache;
    (void)now_us;
    return false;
}

void bd_cache_release(bd_cache *cache, bd_lease *lease, uint64_t now_us) {
    (void)cache;
    (void)now_us;
    assert_true(atomic_fetch_sub(&lease->variant->leases, 1) > 0);
}

/* openssl mac -macopt hexkey:000102..0f -macopt size:16 -in FILE SIPHASH, FILE = bytes 0, 1, 2 ...
 */
static void test_hash(void **state) {
    (void)state;
    static const struct {
        uint32_t bytes;
        uint8_t mac[16];
    } vectors[] = {
        {0, "\xA3\x81\x7F\x04\xBA\x25\xA8\xE6\x6D\xF6\x72\x14\xC7\x55\x02\x93"},
        {1, "\xDA\x87\xC1\xD8\x6B\x99\xAF\x44\x34\x76\x59\x11\x9B\x22\xFC\x45"},
        {7, "\xA1\xF1\xEB\xBE\xD8\xDB\xC1\x53\xC0\xB8\x4A\xA6\x1F\xF0\x82\x39"},
        {8, "\x3B\x62\xA9\xBA\x62\x58\xF5\x61\x0F\x83\xE2\x64\xF3\x14\x97\xB4"},
        {15, "\x54\x93\xE9\x99\x33\xB0\xA8\x11\x7E\x08\xEC\x0F\x97\xCF\xC3\xD9"},
        {16, "\x6E\xE2\xA4\xCA\x67\xB0\x54\xBB\xFD\x33\x15\xBF\x85\x23\x05\x77"},
        {63, "\x51\x50\xD1\x77\x2F\x50\x83\x4A\x50\x3E\x06\x9A\x97\x3F\xBD\x7C"},
    };
    const uint64_t secret[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
    uint8_t data[64];
    for (uint32_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)i;
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        bd_kv_key key = bd_kv_hash(secret, data, vectors[i].bytes);
        assert_memory_equal(&key.lo, vectors[i].mac, 8);
        assert_memory_equal(&key.hi, vectors[i].mac + 8, 8);
    }
}

enum { BLOCKS = 37, KEYS = 60 };

typedef struct naive { /* the pool's promises, written down the slow way */
    uint32_t references[BLOCKS];
    int32_t key[BLOCKS]; /* -1: not published */
    uint64_t released_at[BLOCKS];
} naive;

static uint32_t naive_free(const naive *n) {
    uint32_t free_count = 0;
    for (uint32_t i = 0; i < BLOCKS; i++)
        free_count += n->references[i] == 0;
    return free_count;
}

static int32_t naive_find(const naive *n, int32_t key) {
    for (int32_t i = 0; i < BLOCKS; i++)
        if (n->key[i] == key) return i;
    return -1;
}

static bd_kv_key key_of(int32_t key) {
    /* Few different low words, so that buckets have chains. */
    return (bd_kv_key){(uint64_t)(key % 5), (uint64_t)key};
}

static void naive_acquire(naive *n, bd_kv_pool *pool, uint64_t now) {
    uint32_t block;
    bool got = bd_kv_acquire(pool, &block);
    assert_int_equal(got, naive_free(n) > 0);
    if (!got) return;
    assert_true(block < BLOCKS);
    assert_int_equal(n->references[block], 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (n->references[i] != 0 || n->key[block] < 0) continue;
        /* A findable block goes only when all free ones are findable, the oldest first. */
        assert_true(n->key[i] >= 0);
        assert_true(n->released_at[block] <= n->released_at[i]);
    }
    n->references[block] = 1;
    n->key[block] = -1;
    n->released_at[block] = now;
}

static void naive_step(naive *n, bd_kv_pool *pool, fake_rng *rng, uint64_t now) {
    uint32_t block = fake_below(rng, BLOCKS), found;
    int32_t key = (int32_t)fake_below(rng, KEYS);
    switch (fake_below(rng, 4)) {
    case 0:
        naive_acquire(n, pool, now);
        break;
    case 1:
        if (n->references[block] == 0) break;
        bd_kv_release(pool, block);
        if (--n->references[block] == 0) n->released_at[block] = now;
        break;
    case 2:
        if (n->references[block] == 0) break;
        bd_kv_publish(pool, block, key_of(key));
        if (n->key[block] < 0 && naive_find(n, key) < 0) n->key[block] = key;
        break;
    default:
        assert_int_equal(bd_kv_find(pool, key_of(key), &found), naive_find(n, key) >= 0);
        if (naive_find(n, key) < 0) break;
        assert_int_equal(found, naive_find(n, key));
        n->references[found]++;
    }
    assert_int_equal(bd_kv_free_count(pool), naive_free(n));
}

static void test_pool(void **state) {
    (void)state;
    bd_error err;
    bd_kv_pool *pool;
    fake_rng rng = {fake_seed()};
    naive n = {.key = {0}};
    for (uint32_t i = 0; i < BLOCKS; i++)
        n.key[i] = -1;
    assert_int_equal(bd_kv_create(&pool, BLOCKS, &err), BD_OK);
    assert_int_equal(bd_kv_total(pool), BLOCKS);
    for (uint64_t i = 1; i < 200000; i++)
        naive_step(&n, pool, &rng, i);
    bd_kv_destroy(pool);
    assert_int_equal(bd_kv_create(&pool, 0, &err), BD_E_ARGUMENT);
    assert_null(pool);
}

/* ---- Sharing ---- */

typedef struct sharer {
    bd_engine *engine;
    bd_sequence_options next; /* added by the hook when `wanted` */
    _Atomic bool wanted, ended;
    int32_t output[64];
    uint32_t output_count;
} sharer;

static void before_step(void *ctx, uint64_t now_us, bool cache_changed) {
    sharer *s = ctx;
    bd_sequence *sequence;
    bd_error err;
    (void)now_us;
    (void)cache_changed;
    if (!atomic_exchange(&s->wanted, false)) return;
    BD_ASSERT(bd_engine_add(s->engine, &s->next, &sequence, &err) == BD_OK);
}

static bool on_token(void *ctx, const bd_token_result *token) {
    sharer *s = ctx;
    s->output[s->output_count++] = token->id;
    return true;
}

static void on_end(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err) {
    sharer *s = ctx;
    (void)stop_id;
    (void)err;
    BD_ASSERT(finish == BD_FINISH_LENGTH);
    atomic_store(&s->ended, true);
}

static const bd_sequence_sink sink = {.token = on_token, .end = on_end};

/* Tokens of the prompt that were found, of 33 in blocks of 8. */
static uint64_t run_one(sharer *s, const bd_sequence_options *options) {
    bd_engine_stats before, after;
    bd_engine_stats_get(s->engine, &before);
    atomic_store(&s->ended, false);
    s->output_count = 0;
    s->next = *options;
    if (options->lease.variant) atomic_fetch_add(&options->lease.variant->leases, 1);
    atomic_store(&s->wanted, true);
    bd_engine_wake(s->engine);
    for (uint32_t i = 0; i < 20000 && !atomic_load(&s->ended); i++)
        fake_sleep_us(500);
    assert_true(atomic_load(&s->ended));
    bd_engine_stats_get(s->engine, &after);
    return after.prefix_hit_tokens - before.prefix_hit_tokens;
}

static void start(sharer *s, bd_engine_options *options, fake_device *fake,
                  struct bd_variant *variants) {
    bd_error err;
    memset(s, 0, sizeof *s);
    memset(variants, 0, 2 * sizeof *variants);
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t word = i + 1;
        memcpy(variants[i].overlay.digest, &word, sizeof word);
    }
    *options = (bd_engine_options){.cache = (bd_cache *)(void *)s,
                                   .rows_max = 64,
                                   .seqs_max = 4,
                                   .variants_per_step_max = 4,
                                   .logits_rows_max = 64,
                                   .decode_delta = options->decode_delta,
                                   .prefix_cache = true,
                                   .hooks = {.ctx = s, .before_step = before_step}};
    fake_device_init(fake, options, 64, 8, 1);
    assert_int_equal(bd_engine_create_on(options, &fake->device, &s->engine, &err), BD_OK);
    assert_int_equal(bd_engine_start(s->engine, &err), BD_OK);
}

static void stop(sharer *s, fake_device *fake) {
    bd_engine_stop(s->engine);
    assert_int_equal(fake->faults, 0);
    bd_engine_destroy(s->engine);
    fake_device_deinit(fake);
}

static void test_sharing(void **state) {
    (void)state;
    sharer s;
    fake_device fake;
    struct bd_variant variants[2];
    int32_t prompt[33];
    bd_engine_options options = {.decode_delta = true};
    start(&s, &options, &fake, variants);
    for (int32_t i = 0; i < 33; i++)
        prompt[i] = i;
    bd_sequence_options o = {.prompt = prompt,
                             .prompt_tokens = 33,
                             .max_new_tokens = 2,
                             .logprobs = -1,
                             .prompt_logprobs = -1,
                             .sink = &sink,
                             .sink_ctx = &s};
    assert_int_equal(run_one(&s, &o), 0);
    assert_int_equal(run_one(&s, &o), 32);
    o.prompt_tokens = 32; /* one token is always computed */
    assert_int_equal(run_one(&s, &o), 24);
    o.prompt_tokens = 33;
    o.tenant = 1;
    assert_int_equal(run_one(&s, &o), 0);
    assert_int_equal(run_one(&s, &o), 32);
    o.lease = (bd_lease){&variants[0], &variants[0].overlay, NULL};
    assert_int_equal(run_one(&s, &o), 0);
    assert_int_equal(run_one(&s, &o), 32);
    o.lease = (bd_lease){&variants[1], &variants[1].overlay, NULL};
    assert_int_equal(run_one(&s, &o), 0);
    o.prompt_logprobs = 0; /* every row is needed */
    assert_int_equal(run_one(&s, &o), 0);
    o.prompt_logprobs = -1;
    assert_int_equal(run_one(&s, &o), 32);
    prompt[12] = 60; /* in the second block: only the first is shared */
    assert_int_equal(run_one(&s, &o), 8);
    variants[1].overlay.rope_table = 1; /* same delta, other config */
    assert_int_equal(run_one(&s, &o), 0);
    variants[1].overlay.window_tokens = 20;
    assert_int_equal(run_one(&s, &o), 0);
    assert_int_equal(run_one(&s, &o), 32);
    variants[1].overlay.digest[31] ^= 1; /* replaced weights under the same name and place */
    assert_int_equal(run_one(&s, &o), 0);
    assert_int_equal(run_one(&s, &o), 32);
    o.tenant = 2;
    assert_int_equal(run_one(&s, &o), 0);
    assert_int_equal(run_one(&s, &o), 32);
    /* Of no digest, yet not the base. */
    o.lease = (bd_lease){0};
    assert_int_equal(run_one(&s, &o), 0);
    memset(&variants[1].overlay, 0, sizeof variants[1].overlay);
    o.lease = (bd_lease){&variants[1], &variants[1].overlay, NULL};
    assert_int_equal(run_one(&s, &o), 0);
    stop(&s, &fake);
}

/* A prompt that continues what a variant wrote. What the base wrote for it is not reused. */
static void run_continuation(bool decode_delta, uint64_t expected) {
    sharer s;
    fake_device fake;
    struct bd_variant variants[2];
    int32_t prompt[64] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    bd_engine_options options = {.decode_delta = decode_delta};
    start(&s, &options, &fake, variants);
    bd_sequence_options o = {.prompt = prompt,
                             .prompt_tokens = 9,
                             .max_new_tokens = 20,
                             .lease = {.variant = &variants[0], .overlay = &variants[0].overlay},
                             .logprobs = -1,
                             .prompt_logprobs = -1,
                             .sink = &sink,
                             .sink_ctx = &s};
    assert_int_equal(run_one(&s, &o), 0);
    assert_int_equal(s.output_count, 20);
    memcpy(prompt + 9, s.output, 20 * sizeof *prompt);
    o.prompt_tokens = 29;
    o.max_new_tokens = 1;
    fake_run alone;
    fake_alone(&o, decode_delta, &alone);
    assert_int_equal(run_one(&s, &o), expected);
    assert_int_equal(s.output[0], alone.ids[0]);
    stop(&s, &fake);
}

static void test_continuation(void **state) {
    (void)state;
    run_continuation(true, 24);
    run_continuation(false, 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_pool),
        cmocka_unit_test(test_sharing),
        cmocka_unit_test(test_continuation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
