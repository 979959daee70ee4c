/* test_cache_policy.c - the replacement policy by itself: rates against the formula, ranking
 * against plain counts, victims against exhaustive search, and the behaviours it is there for
 * (cycles, bursts, similar variants, old habits). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>

#include "cache/policy.h"
#include "loader_fake.h" /* fake_random, fake_seed */

enum { ITEMS_MAX = 64 };

typedef struct scene {
    bd_policy policy;
    bd_policy_item items[ITEMS_MAX];
    bd_policy_item *residents[ITEMS_MAX];
    uint32_t count, slots, admissions, victims[ITEMS_MAX];
} scene;

static scene scene_make(uint32_t count, uint32_t slots) {
    scene s = {.count = count, .slots = slots};
    bd_policy_init(&s.policy, 10);
    s.policy.variant_count = count;
    for (uint32_t i = 0; i < count; i++)
        s.items[i].pages = 1;
    return s;
}

static bool is_resident(const scene *s, const bd_policy_item *item) {
    for (uint32_t i = 0; i < s->slots; i++)
        if (s->residents[i] == item) return true;
    return false;
}

/* One request, as the cache does it. Returns whether it hit. */
static bool request(scene *s, uint32_t id) {
    bd_policy_item *item = &s->items[id];
    bd_policy_touch(&s->policy, item, 0);
    if (is_resident(s, item)) return true;
    uint32_t place = 0;
    while (place < s->slots && s->residents[place])
        place++;
    if (place == s->slots) {
        bd_policy_protect(&s->policy, s->residents, s->slots, 2, s->slots - 1);
        assert_int_equal(bd_policy_victims(&s->policy, s->residents, s->slots, 1, s->victims), 1);
        place = s->victims[0];
    }
    s->residents[place] = item;
    item->admission = ++s->admissions;
    item->protected_by_rate = false;
    return false;
}

static double hit_rate(scene *s, uint32_t requests, uint32_t (*next)(uint32_t at)) {
    uint32_t hits = 0;
    for (uint32_t i = 0; i < requests; i++)
        hits += request(s, next(i));
    return (double)hits / requests;
}

static void test_rate(void **state) {
    (void)state;
    scene s = scene_make(1, 1);
    bd_policy_item *item = &s.items[0];
    assert_true(bd_policy_rate(&s.policy, item, 5) <= 0);
    uint64_t now = 0;
    for (uint32_t i = 0; i < 1000; i++)
        bd_policy_touch(&s.policy, item, now += 100000);
    /* 10 a second; the sum of a geometric series is within half a step of the integral. */
    double rate = bd_policy_rate(&s.policy, item, now);
    assert_true(fabs(rate - 10) < 0.05);
    double later = bd_policy_rate(&s.policy, item, now + 10000000);
    assert_true(fabs(later - rate / 2) < 1e-9);
    assert_true(fabs(bd_policy_rate(&s.policy, item, now - 5) - rate) <
                1e-9); /* clock from before */
}

static void test_scores_are_a_distribution(void **state) {
    (void)state;
    scene s = scene_make(20, 4);
    for (uint32_t i = 0; i < 5000; i++) {
        bd_policy_touch(&s.policy, &s.items[fake_below(20)], i);
        double weights = 0, scores = 0;
        for (uint32_t w = 0; w < BD_POLICY_SPANS; w++)
            weights += s.policy.weight[w];
        for (uint32_t k = 0; k < 20; k++)
            scores += bd_policy_score(&s.policy, &s.items[k]);
        assert_true(fabs(weights - 1) < 1e-3);
        assert_true(fabs(scores - weights) < 1e-9);
    }
}

static uint32_t counted[ITEMS_MAX];

static void test_ranks_as_counts_do(void **state) {
    (void)state;
    scene s = scene_make(16, 4);
    for (uint32_t i = 0; i < 40000; i++) {
        uint32_t id = (uint32_t)(fake_below(16) * fake_below(16) / 16); /* low ids more often */
        counted[id]++;
        bd_policy_touch(&s.policy, &s.items[id], i);
    }
    for (uint32_t a = 0; a < 16; a++)
        for (uint32_t b = 0; b < 16; b++)
            if (counted[a] > counted[b] + counted[b] / 2)
                assert_true(bd_policy_score(&s.policy, &s.items[a]) >
                            bd_policy_score(&s.policy, &s.items[b]));
}

static uint32_t next_cycle(uint32_t at) {
    return at % 20;
}

/* LRU never hits here; the best possible is (slots - 1) / (variants - 1). */
static void test_cycle(void **state) {
    (void)state;
    scene s = scene_make(20, 14);
    hit_rate(&s, 2000, next_cycle);
    assert_true(hit_rate(&s, 2000, next_cycle) > 13.0 / 19 - 0.06);
}

static void test_burst_leaves(void **state) {
    (void)state;
    scene s = scene_make(40, 8);
    for (uint32_t i = 0; i < 20000; i++)
        request(&s, (uint32_t)fake_below(6));
    for (uint32_t i = 0; i < 300; i++)
        request(&s, i % 2 ? 30 : (uint32_t)fake_below(6));
    assert_true(is_resident(&s, &s.items[30]));
    /* It is over. The steady ones stay, and before long the burst's variant gives way to
     * passers-by. */
    for (uint32_t i = 0; i < 500; i++)
        request(&s, i % 5 ? (uint32_t)fake_below(6) : 7 + (uint32_t)fake_below(20));
    assert_false(is_resident(&s, &s.items[30]));
    for (uint32_t i = 0; i < 6; i++)
        assert_true(is_resident(&s, &s.items[i]));
}

/* After very long steady traffic a change must still be followed at once. */
static void test_old_habits(void **state) {
    (void)state;
    scene s = scene_make(40, 8);
    for (uint32_t i = 0; i < 400000; i++)
        request(&s, (uint32_t)fake_below(8));
    uint32_t hits = 0;
    for (uint32_t i = 0; i < 1000; i++)
        hits += request(&s, 20 + (uint32_t)fake_below(6));
    assert_in_range(hits, 900, 1000);
}

static void test_similar_ones_do_not_trade_places(void **state) {
    (void)state;
    scene s = scene_make(10, 10);
    for (uint32_t i = 0; i < 10; i++)
        s.residents[i] = &s.items[i];
    for (uint32_t i = 0; i < 20000; i++)
        bd_policy_touch(&s.policy, &s.items[fake_below(10)], i);
    bd_policy_protect(&s.policy, s.residents, 10, 4, 10);
    bool before[10];
    for (uint32_t i = 0; i < 10; i++)
        before[i] = s.items[i].protected_by_rate;
    uint32_t swaps = 0;
    for (uint32_t round = 0; round < 2000; round++) {
        bd_policy_touch(&s.policy, &s.items[fake_below(10)], round);
        bd_policy_protect(&s.policy, s.residents, 10, 4, 10);
        uint32_t marked = 0;
        for (uint32_t i = 0; i < 10; i++) {
            marked += s.items[i].protected_by_rate;
            swaps += s.items[i].protected_by_rate && !before[i];
            before[i] = s.items[i].protected_by_rate;
        }
        assert_int_equal(marked, 4);
    }
    assert_in_range(swaps, 0, 20);
}

/* Whoever was lucky at first does not keep the place of one that is a little better for ever. */
static void test_luck_does_not_last(void **state) {
    (void)state;
    scene s = scene_make(10, 10);
    for (uint32_t i = 0; i < 10; i++)
        s.residents[i] = &s.items[i];
    for (uint32_t i = 0; i < 40; i++)
        bd_policy_touch(&s.policy, &s.items[1], i);
    bd_policy_protect(&s.policy, s.residents, 10, 1, 10);
    assert_true(s.items[1].protected_by_rate);
    for (uint32_t i = 0; i < 40000; i++) { /* 0 comes 28 times where 1 comes 25 times */
        uint32_t at = i * 89 % 149;        /* evenly, so that no other stroke of luck helps */
        bd_policy_touch(&s.policy, &s.items[at < 28 ? 0 : at < 53 ? 1 : 2 + at % 8], i);
        if (i % 10 == 0) bd_policy_protect(&s.policy, s.residents, 10, 1, 10);
    }
    assert_true(s.items[0].protected_by_rate && !s.items[1].protected_by_rate);
}

static void random_residents(scene *s) {
    for (uint32_t i = 0; i < s->count; i++) {
        bd_policy_item *item = &s->items[i];
        item->pages = 1 + (uint32_t)fake_below(4);
        item->fixed = fake_below(4) == 0;
        item->pinned = fake_below(8) == 0;
        item->retired = fake_below(8) == 0;
        item->protected_by_rate = fake_below(8) == 0;
        item->admission = i + 1;
        s->residents[i] = item;
        for (uint64_t k = fake_below(5); k > 0; k--)
            bd_policy_touch(&s->policy, item, 0);
    }
}

static void test_protect_keeps_to_its_bounds(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 300; round++) {
        scene s = scene_make(1 + (uint32_t)fake_below(12), 0);
        random_residents(&s);
        uint32_t top = (uint32_t)fake_below(6), pages_max = (uint32_t)fake_below(12);
        bd_policy_protect(&s.policy, s.residents, s.count, top, pages_max);
        uint32_t marked = 0, pages = 0;
        for (uint32_t i = 0; i < s.count; i++) {
            if (!s.items[i].protected_by_rate) continue;
            assert_false(s.items[i].pinned || s.items[i].retired);
            marked++;
            pages += s.items[i].pages;
        }
        assert_true(marked <= top && pages <= pages_max);
    }
}

static void test_victims(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 2000; round++) {
        scene s = scene_make(1 + (uint32_t)fake_below(10), 0);
        random_residents(&s);
        uint32_t need = 1 + (uint32_t)fake_below(9), available = 0;
        for (uint32_t i = 0; i < s.count; i++) {
            const bd_policy_item *item = &s.items[i];
            if (!item->fixed && !item->pinned && !item->protected_by_rate) available += item->pages;
        }
        size_t count = bd_policy_victims(&s.policy, s.residents, s.count, need, s.victims);
        assert_int_equal(count > 0, available >= need);
        uint32_t freed = 0, smallest = UINT32_MAX;
        bool taken[ITEMS_MAX] = {false};
        for (size_t v = 0; v < count; v++) {
            const bd_policy_item *item = s.residents[s.victims[v]];
            assert_false(item->fixed || item->pinned || item->protected_by_rate);
            assert_false(taken[s.victims[v]]);
            taken[s.victims[v]] = true;
            freed += item->pages;
            if (item->pages < smallest) smallest = item->pages;
        }
        if (count == 0) continue;
        assert_true(freed >= need && freed - smallest < need); /* no one goes in vain */
        if (need == 1 && count == 1) {                         /* the least valuable page of all */
            double gone = bd_policy_score(&s.policy, s.residents[s.victims[0]]) /
                          s.residents[s.victims[0]]->pages;
            for (uint32_t i = 0; i < s.count; i++) {
                const bd_policy_item *item = &s.items[i];
                if (item->fixed || item->pinned || item->protected_by_rate) continue;
                double kept = bd_policy_score(&s.policy, item) / item->pages;
                assert_true(gone <= kept * (1 + s.policy.margin) + 1e-12);
            }
        }
    }
    assert_int_equal(bd_policy_victims(&(bd_policy){0}, NULL, 0, 1, NULL), 0);
}

int main(void) {
    fake_seed("test_cache_policy");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rate),
        cmocka_unit_test(test_scores_are_a_distribution),
        cmocka_unit_test(test_ranks_as_counts_do),
        cmocka_unit_test(test_cycle),
        cmocka_unit_test(test_burst_leaves),
        cmocka_unit_test(test_old_habits),
        cmocka_unit_test(test_similar_ones_do_not_trade_places),
        cmocka_unit_test(test_luck_does_not_last),
        cmocka_unit_test(test_protect_keeps_to_its_bounds),
        cmocka_unit_test(test_victims),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
