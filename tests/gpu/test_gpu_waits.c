/* test_gpu_waits.c - when a step is asked for, which needs no device: steps and sleeps of any length on a clock of the test's own. */
#include "gpu_test.h"

#include "../../src/backend/cuda/cuda_internal.h"

enum { ASK_US = 2 };

typedef struct wait {
    uint64_t late_us, spun_us;
} wait;

/* A sleep ends 50 to 60 us late, as Linux has it by default. */
static wait wait_for(uint64_t step_us, uint64_t expected_us) {
    wait w = {0};
    for (uint64_t now_us = 0;; now_us += ASK_US) {
        if (now_us >= step_us) {
            w.late_us = now_us - step_us;
            return w;
        }
        const uint32_t pause_us = cuda_wait_pause_us(now_us, expected_us);
        if (pause_us) now_us += pause_us + 50 + test_next() % 11;
        else w.spun_us += ASK_US;
    }
}

/* A step like the last is seen at once, whatever its length, and most of a long one is slept. */
static void test_like_the_last(void **state) {
    (void)state;
    for (int i = 0; i < 100000; i++) {
        const uint64_t expected_us = 1 + test_next() % (i % 2 ? 1000 : 60000), off = expected_us / 20 < 200 ? expected_us / 20 : 200;
        const uint64_t step_us = expected_us - off + test_next() % (2 * off + 1);
        const wait w = wait_for(step_us, expected_us);
        if (w.late_us > ASK_US || w.spun_us > 800 || (expected_us > 2000 && w.spun_us > step_us / 3))
            fail_msg("a step of %llu us, the last of %llu: seen %llu us late, spun for %llu us", (unsigned long long)step_us, (unsigned long long)expected_us, (unsigned long long)w.late_us,
                     (unsigned long long)w.spun_us);
    }
}

/* Of any other length it is seen within a sleep, and not spun for without end. */
static void test_unlike_the_last(void **state) {
    (void)state;
    for (int i = 0; i < 100000; i++) {
        const uint64_t expected_us = test_next() % (i % 3 ? 60000 : 300), step_us = test_next() % (i % 2 ? 200000 : 5000);
        const wait w = wait_for(step_us, expected_us);
        if (w.late_us > 270 || w.spun_us > 700)
            fail_msg("a step of %llu us, the last of %llu: seen %llu us late, spun for %llu us", (unsigned long long)step_us, (unsigned long long)expected_us, (unsigned long long)w.late_us,
                     (unsigned long long)w.spun_us);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_like_the_last), cmocka_unit_test(test_unlike_the_last)};
    test_state = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)test_state);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
