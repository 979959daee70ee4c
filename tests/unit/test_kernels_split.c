/* test_kernels_split.c - how the GPU kernels deal units of work: every unit to one CTA, and of each
 * tile the CTA with its head knows exactly those that leave it partials. Against counting unit by
 * unit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "../../kernels/split.h"

static void check(int tiles, int per_tile, int sms) {
    const int units = tiles * per_tile, count = split_count(units, per_tile, sms);
    const int most = (units + sms - 1) / sms; /* what one of them has, however they are dealt */
    assert_true(count >= 1 && count <= sms);
    int *owner = malloc((size_t)units * sizeof *owner);
    int next = 0;
    for (int cta = 0; cta < count; cta++) {
        const int begin = split_begin(units, cta, (unsigned)count);
        const int end = split_begin(units, cta + 1, (unsigned)count);
        assert_int_equal(begin, next);
        assert_true(end > begin); /* none is without work: its neighbours would wait for it */
        assert_true(end - begin <= most);
        for (int u = begin; u < end; u++)
            owner[u] = cta;
        next = end;
    }
    assert_int_equal(next, units);
    for (int t = 0; t < tiles; t++) {
        const int first = t * per_tile, end = first + per_tile, head = owner[first];
        /* Only the first tile of a range can lack its head, only the last its end. */
        for (int u = first + 1; u < end; u++)
            if (owner[u] != owner[u - 1])
                assert_int_equal(split_begin(units, owner[u], (unsigned)count), u);
        assert_int_equal(split_last(units, head, (unsigned)count, end), owner[end - 1] + 1);
    }
    free(owner);
}

static void test_all_shapes(void **state) {
    (void)state;
    /* The matrices of Llama-3.1 8B and 70B whole and cut in 2 and 8, and small ones; GPUs of 1 to
     * 148 multiprocessors. */
    static const int shapes[][2] = {{6144, 4096},  {4096, 4096}, {28672, 4096}, {4096, 14336},
                                    {10240, 8192}, {8192, 8192}, {57344, 8192}, {8192, 28672},
                                    {5120, 8192},  {8192, 4096}, {28672, 8192}, {8192, 14336},
                                    {1280, 8192},  {8192, 1024}, {7168, 8192},  {8192, 3584},
                                    {8, 256},      {136, 512},   {128, 28672}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int sms = 1; sms <= 148; sms++)
            check((shapes[i][0] + 127) / 128, shapes[i][1] / 256, sms);
}

static void test_random_shapes(void **state) {
    (void)state;
    const unsigned seed = (unsigned)time(NULL);
    printf("seed %u\n", seed);
    srand(seed);
    for (int i = 0; i < 20000; i++)
        check(1 + rand() % 40, 1 + rand() % 120, 1 + rand() % 260);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all_shapes),
                                       cmocka_unit_test(test_random_shapes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
