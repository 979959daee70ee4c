/* test_gpu_built.c - which cards a build has code for, by the rules of the CUDA programming guide ("Binary Compatibility", "PTX Compatibility",
 * "Feature Set Compiler Targets"); needs no device. */
#include "gpu_test.h"

#include "../../src/backend/cuda/cuda_internal.h"

static void test_built_for(void **state) {
    (void)state;
    static const struct { const char *architectures, *runs, *does_not; } cases[] = {
        {"80-real 90a-real", "8.0 8.6 8.9 9.0", "7.5 10.0 10.3 12.0"},
        {"90a-real", "9.0", "8.0 8.9 10.0 12.0"},
        {"80", "8.0 8.9 9.0 10.0 12.1", "7.0 7.5"},
        {"89-real", "8.9", "8.0 8.6 9.0"},
        {"86-real  80-virtual", "8.0 8.6 9.0 12.0", "7.5"},
        {"90-virtual", "9.0 10.0 12.0", "8.9 8.0"},
        {"90a-virtual", "9.0", "8.9 10.0"},
        {"100f-real", "10.0 10.3", "9.0 11.0 12.0"},
        {"120a", "12.0", "12.1 10.0"},
        {"native", "7.5 9.0 12.0", ""},
        {"all-major", "7.5 9.0 12.0", ""},
        {"OFF", "9.0", ""},
        {" ", "9.0", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int runs = 0; runs < 2; runs++)
            for (const char *at = runs ? cases[i].runs : cases[i].does_not; *at;) {
                int major, minor, length;
                assert_int_equal(sscanf(at, "%d.%d%n", &major, &minor, &length), 2);
                if (cuda_built_for(cases[i].architectures, major, minor) != runs) fail_msg("%s on %d.%d: not %d", cases[i].architectures, major, minor, runs);
                at += length;
                while (*at == ' ') at++;
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_built_for)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
