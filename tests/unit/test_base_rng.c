/* Philox4x32-10 against the known answers published with Random123, and the shape of the uniforms.
 */
#include "base_support.h"

#include <math.h>

#include "bitdelta/base/rng.h"

static void test_known_answers(void **state) {
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } k_rows[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof k_rows / sizeof k_rows[0]; i++) {
        uint32_t got[4];
        bd_philox4x32(k_rows[i].counter, k_rows[i].key, got);
        assert_memory_equal(got, k_rows[i].want, sizeof got);
    }
}

/* The documented mapping, and 53 bits of the first two words. */
static void test_mapping(void **state) {
    (void)state;
    assert_true(bd_rng_uniform(0, 0, 0) == (double)(0x6627e8d5e169c58du >> 11) * 0x1p-53);
    double pi = bd_rng_uniform(0x299f31d0a4093822u, 0, 5);
    uint32_t got[4];
    bd_philox4x32((const uint32_t[4]){5, 0, 0, 0}, (const uint32_t[2]){0xa4093822, 0x299f31d0},
                  got);
    assert_true(pi == (double)(((uint64_t)got[0] << 32 | got[1]) >> 11) * 0x1p-53);
    assert_true(bd_rng_uniform(1, 2, 3) != bd_rng_uniform(1, 3, 2));
}

/* Mean, variance and neighbour correlation within six standard errors of a uniform. */
static void test_moments(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    enum { COUNT = 100000 };
    double sum = 0, square = 0, product = 0, before = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
        double u = bd_rng_uniform(seed, 1, i);
        assert_true(u >= 0 && u < 1);
        sum += u;
        square += (u - 0.5) * (u - 0.5);
        if (i > 0) product += (u - 0.5) * (before - 0.5);
        before = u;
    }
    double root = sqrt((double)COUNT);
    assert_true(fabs(sum / COUNT - 0.5) < 6 * sqrt(1.0 / 12) / root);
    assert_true(fabs(square / COUNT - 1.0 / 12) < 6 * sqrt(1.0 / 180) / root);
    assert_true(fabs(product / COUNT) < 6 * (1.0 / 12) / root);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_mapping),
        cmocka_unit_test(test_moments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
