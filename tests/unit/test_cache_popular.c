/* test_cache_popular.c - goal: under Zipf traffic the most wanted variants never leave memory, and
 * the others share what is left. Method: the real cache with a played loader, 14 variants, 8 pages,
 * 6 of them for the most wanted, 6 clients that each wait for their answer, in a time of its own;
 * many fixed seeds, so that what holds for one order of requests holds for all. Draws are
 * stratified: of a hundred each rank has its share, rounded up or down by chance. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>

#include "cache_fake.h"
#include "loader_fake.h" /* fake_random */

enum { VARIANTS = 14, SLOTS = 8, TOP = 6, CLIENTS = 6, DECK = 100, PARALLEL = 2 };
enum { SEEDS = 500, WARM = 3000, MEASURED = 1500 };
static const double exponent = 1.1;

typedef enum client_state { IDLE, ASKING, WAITING, SERVED } client_state;

typedef struct client {
    bd_cache_waiter waiter; /* first member */
    struct world *world;
    client_state state;
    bd_variant *variant;
    bd_lease lease;
    uint64_t until_ms;
} client;

typedef struct pace { /* longest times of an answer and of a load; they are drawn evenly */
    uint32_t answer_ms, load_ms;
} pace;

typedef struct world {
    cache_fake fake;
    bd_cache *cache;
    bd_variant *v[VARIANTS]; /* by rank */
    client clients[CLIENTS];
    pace pace;
    uint32_t deck[DECK], cards, drawn;
    uint64_t now_ms, load_until_ms[PARALLEL];
    uint32_t loads;
} world;

static uint64_t chance_up_to(uint32_t most) {
    return 1 + fake_below(most);
}

static void serve(client *c) {
    c->state = SERVED;
    c->until_ms = c->world->now_ms + chance_up_to(c->world->pace.answer_ms);
}

static void on_ready(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                     const bd_error *err) {
    client *c = (client *)waiter;
    (void)err;
    assert_int_equal(status, BD_OK);
    c->lease = *lease;
    serve(c);
}

static void fill_deck(world *w) {
    double upto[VARIANTS], sum = 0;
    for (uint32_t i = 0; i < VARIANTS; i++)
        upto[i] = sum += pow(i + 1, -exponent);
    const double start = (double)(fake_random() >> 11) * 0x1p-53;
    uint32_t rank = 0;
    for (uint32_t i = 0; i < DECK; i++) {
        while (rank < VARIANTS - 1 && (i + start) * sum / DECK >= upto[rank])
            rank++;
        w->deck[i] = rank;
    }
    for (uint32_t i = DECK; i > 1; i--) {
        uint32_t j = (uint32_t)fake_below(i), kept = w->deck[i - 1];
        w->deck[i - 1] = w->deck[j];
        w->deck[j] = kept;
    }
    w->cards = DECK;
}

static void step_client(world *w, client *c) {
    const uint64_t now_us = w->now_ms * 1000;
    if (c->state == SERVED && w->now_ms >= c->until_ms) {
        bd_cache_release(w->cache, &c->lease, now_us);
        c->state = IDLE;
    }
    if (c->state == IDLE) {
        if (w->cards == 0) fill_deck(w);
        c->variant = w->v[w->deck[--w->cards]];
        c->state = ASKING;
        w->drawn++;
        bd_cache_touch(w->cache, c->variant, now_us);
    }
    if (c->state != ASKING) return;
    bd_status status = bd_cache_acquire(w->cache, c->variant, now_us, &c->lease, &c->waiter, NULL);
    if (status == BD_OK)
        serve(c);
    else if (status == BD_AGAIN)
        c->state = WAITING;
    else
        assert_int_equal(status, BD_BUSY);
}

static void step_loads(world *w) {
    while (w->loads < w->fake.load_count)
        w->load_until_ms[w->loads++] = w->now_ms + chance_up_to(w->pace.load_ms);
    for (uint32_t i = 0; i < w->loads;) {
        if (w->now_ms < w->load_until_ms[i]) {
            i++;
            continue;
        }
        cache_fake_finish(&w->fake, i, BD_OK);
        w->loads--;
        memmove(&w->load_until_ms[i], &w->load_until_ms[i + 1],
                (w->loads - i) * sizeof w->load_until_ms[0]);
    }
    (void)bd_cache_poll(w->cache, w->now_ms * 1000);
}

static void run(world *w, uint32_t requests) {
    const uint32_t end = w->drawn + requests;
    while (w->drawn < end) {
        w->now_ms++;
        for (uint32_t i = 0; i < CLIENTS; i++)
            step_client(w, &w->clients[i]);
        step_loads(w);
    }
}

static void world_open(world *w, pace speed) {
    memset(w, 0, sizeof *w);
    w->pace = speed;
    w->cache = cache_fake_create(&w->fake, SLOTS, TOP, PARALLEL, NULL);
    for (uint32_t i = 0; i < VARIANTS; i++) {
        char name[16];
        snprintf(name, sizeof name, "rank-%u", i + 1);
        assert_int_equal(cache_fake_register(w->cache, name, 1, false, &w->v[i], NULL), BD_OK);
    }
    for (uint32_t i = 0; i < CLIENTS; i++) {
        w->clients[i].world = w;
        w->clients[i].waiter.ready = on_ready;
    }
}

static void world_close(world *w) {
    for (uint32_t i = 0; i < CLIENTS; i++) {
        client *c = &w->clients[i];
        if (c->state == SERVED) bd_cache_release(w->cache, &c->lease, w->now_ms * 1000);
        if (c->state == WAITING) bd_cache_wait_cancel(w->cache, &c->waiter);
    }
    while (w->fake.load_count > 0)
        cache_fake_finish(&w->fake, 0, BD_OK);
    (void)bd_cache_poll(w->cache, w->now_ms * 1000);
    bd_cache_destroy(w->cache);
}

static void check_seed(pace speed) {
    world w;
    uint64_t before[VARIANTS];
    world_open(&w, speed);
    run(&w, WARM);
    for (uint32_t i = 0; i < VARIANTS; i++)
        before[i] = cache_fake_info(w.cache, w.v[i], 0).evictions;
    run(&w, MEASURED);
    for (uint32_t i = 0; i < VARIANTS; i++) {
        const bd_variant_info info = cache_fake_info(w.cache, w.v[i], 0);
        if (i < TOP && (info.evictions != before[i] || info.state != BD_VARIANT_READY))
            fail_msg("rank %u of the most wanted was evicted", i + 1);
        if (i >= TOP && info.evictions == before[i])
            fail_msg("rank %u was never evicted: the others do not share", i + 1);
    }
    world_close(&w);
}

/* Answers and loads of about one length, loads much longer, answers much longer. */
static void test_popular_ones_stay(void **state) {
    static const pace paces[] = {{40, 10}, {5, 100}, {200, 10}, {3, 3}};
    (void)state;
    for (uint32_t seed = 0; seed < SEEDS; seed++) {
        fake_random_state = (uint64_t)seed * 1000003u + 17u;
        check_seed(paces[seed % 4]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_popular_ones_stay)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
