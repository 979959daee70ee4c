/* Half precision, exhaustively: every 16-bit pattern against its value computed with ldexp, and
 * around every point where rounding changes, against a search over the table of those values (and
 * the compiler's own _Float16 where it has one). */
#include "base_support.h"

#include <math.h>

#include "bitdelta/base/half.h"

static double value_of(uint32_t bits, int exponent_bits, int fraction_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = (int)(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
    double fraction = (double)(bits & ((1u << fraction_bits) - 1u));
    double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
        return fraction > 0 ? (double)NAN : sign * (double)INFINITY;
    }
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + (double)(1u << fraction_bits), exponent - bias - fraction_bits);
}

static void test_widen(void **state) {
    (void)state;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        double half = value_of(bits, 5, 10), brain = value_of(bits, 8, 7);
        double got_half = (double)bd_f16_to_f32((uint16_t)bits);
        double got_brain = (double)bd_bf16_to_f32((uint16_t)bits);
        assert_int_equal(isnan(half), isnan(got_half));
        assert_int_equal(isnan(brain), isnan(got_brain));
        if (!isnan(half)) assert_true(half == got_half && signbit(half) == signbit(got_half));
        if (!isnan(brain)) assert_true(brain == got_brain && signbit(brain) == signbit(got_brain));
        /* Narrowing what was widened gives it back. */
        if (!isnan(half)) assert_int_equal(bd_f32_to_f16((float)half), bits);
        if (!isnan(brain)) assert_int_equal(bd_f32_to_bf16((float)brain), bits);
    }
}

/* The nearest of the two neighbours, by distance in double, ties to the even pattern. */
static uint32_t nearest(double magnitude, uint32_t low, int exponent_bits, int fraction_bits) {
    double below = value_of(low, exponent_bits, fraction_bits);
    double above = value_of(low + 1, exponent_bits, fraction_bits);
    if (isinf(above)) above = 2 * below - value_of(low - 1, exponent_bits, fraction_bits);
    double down = magnitude - below, up = above - magnitude;
    if (down != up) return down < up ? low : low + 1;
    return low % 2 == 0 ? low : low + 1;
}

static void check_between(uint32_t low, int exponent_bits, int fraction_bits, uint64_t *random) {
    bool brain = exponent_bits == 8;
    double below = value_of(low, exponent_bits, fraction_bits);
    double above = value_of(low + 1, exponent_bits, fraction_bits);
    if (isinf(above)) above = 2 * below - value_of(low - 1, exponent_bits, fraction_bits);
    double middle_wide = below + (above - below) / 2;
    float middle = (float)middle_wide;
    float points[8] = {middle, nextafterf(middle, 0.0f), nextafterf(middle, INFINITY),
                       nextafterf((float)below, INFINITY), (float)below};
    for (int i = 5; i < 8; i++) {
        double part = (double)(support_random(random) >> 11) * 0x1p-53;
        points[i] = (float)(below + part * (above - below));
    }
    for (int i = 0; i < 8; i++) {
        if ((double)points[i] < below || (double)points[i] >= above) continue;
        uint32_t want = nearest((double)points[i], low, exponent_bits, fraction_bits);
        uint32_t plus = brain ? bd_f32_to_bf16(points[i]) : bd_f32_to_f16(points[i]);
        uint32_t minus = brain ? bd_f32_to_bf16(-points[i]) : bd_f32_to_f16(-points[i]);
        if (plus != want || minus != (want | 0x8000u)) {
            fail_msg("%a: got %04x and %04x, want %04x", (double)points[i], plus, minus, want);
        }
#ifdef __FLT16_MANT_DIG__
        if (!brain) {
            __extension__ _Float16 native = (_Float16)points[i];
            uint16_t native_bits;
            memcpy(&native_bits, &native, sizeof native_bits);
            assert_int_equal(native_bits, want);
        }
#endif
    }
}

static void test_narrow(void **state) {
    (void)state;
    uint64_t random = support_seed();
    for (uint32_t low = 0; low < 0x7c00; low++)
        check_between(low, 5, 10, &random);
    for (uint32_t low = 0; low < 0x7f80; low++)
        check_between(low, 8, 7, &random);
}

static void test_special(void **state) {
    (void)state;
    assert_int_equal(bd_f32_to_f16(INFINITY), 0x7c00);
    assert_int_equal(bd_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(bd_f32_to_f16(3e38f), 0x7c00);
    assert_int_equal(bd_f32_to_f16(1e-40f), 0);
    assert_int_equal(bd_f32_to_f16(-0.0f), 0x8000);
    assert_int_equal(bd_f32_to_bf16(3.4028235e38f), 0x7f80);
    assert_int_equal(bd_f32_to_bf16(-INFINITY), 0xff80);
    /* Every NaN stays one, also when only bits that are cut off are set. */
    for (uint32_t fraction = 1; fraction < 1u << 23; fraction += fraction < 20000 ? 1 : 997) {
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t u = sign << 31 | 0x7f800000u | fraction;
            float nan_value;
            memcpy(&nan_value, &u, sizeof nan_value);
            assert_true(isnan(bd_f16_to_f32(bd_f32_to_f16(nan_value))));
            assert_true(isnan(bd_bf16_to_f32(bd_f32_to_bf16(nan_value))));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_widen),
        cmocka_unit_test(test_narrow),
        cmocka_unit_test(test_special),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
