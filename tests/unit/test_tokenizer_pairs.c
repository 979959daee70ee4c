/* The queue of a long word's candidate pairs, with heap and buckets, against a search through all
 * that is in it: pushes and takes in random order, ranks below what was taken last included. */
#include "base_support.h"
#include "tokenizer/internal.h"

enum { ROUNDS = 200, STEPS = 600, RANKS = 24, POSITIONS = 400, HUGE_COUNT = 1 << 16 };

typedef struct pair {
    uint32_t rank, pos;
} pair;

static size_t least(const pair *pairs, size_t count) {
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (pairs[i].rank < pairs[best].rank ||
            (pairs[i].rank == pairs[best].rank && pairs[i].pos < pairs[best].pos))
            best = i;
    return best;
}

static void push(bd_pair_queue *queue, pair *pairs, size_t *count, uint64_t *seed) {
    pair one = {(uint32_t)(support_random(seed) % RANKS),
                (uint32_t)(support_random(seed) % POSITIONS)};
    assert_int_equal(bd_pair_queue_push(queue, one.rank, one.pos), BD_OK);
    pairs[(*count)++] = one;
}

static void take(bd_pair_queue *queue, pair *pairs, size_t *count) {
    uint32_t rank, pos, soon;
    if (*count == 0) {
        assert_int_equal(bd_pair_queue_pop(queue, &rank, &pos, &soon), BD_AGAIN);
        return;
    }
    size_t best = least(pairs, *count);
    assert_int_equal(bd_pair_queue_pop(queue, &rank, &pos, &soon), BD_OK);
    assert_int_equal(rank, pairs[best].rank);
    assert_int_equal(pos, pairs[best].pos);
    assert_true(soon < POSITIONS);
    pairs[best] = pairs[--*count];
}

static void run_round(bd_pair_queue *queue, size_t symbols, uint64_t *seed) {
    pair pairs[2 * STEPS];
    size_t count = 0;
    assert_int_equal(bd_pair_queue_begin(queue, symbols, RANKS), BD_OK);
    for (int i = 0; i < STEPS; i++)
        push(queue, pairs, &count, seed);
    const uint64_t pushes = support_random(seed) % 10; /* in ten steps */
    for (int i = 0; i < STEPS; i++) {
        if (support_random(seed) % 10 < pushes)
            push(queue, pairs, &count, seed);
        else
            take(queue, pairs, &count);
    }
    /* Some rounds end with pairs left, as when memory runs out. */
    if (support_random(seed) % 2 == 0) return;
    do
        take(queue, pairs, &count);
    while (count > 0);
    take(queue, pairs, &count);
}

static void test_order(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    bd_pair_queue queue;
    bd_pair_queue_init(&queue);
    for (int i = 0; i < ROUNDS; i++)
        run_round(&queue, i % 3 == 0 ? HUGE_COUNT - 1 : HUGE_COUNT, &seed);
    bd_pair_queue_deinit(&queue);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_order)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
