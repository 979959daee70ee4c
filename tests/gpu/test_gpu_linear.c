/* test_gpu_linear.c - repack and the plain linear against float64, on fresh random data.
 * Goal: W_base + scale * sign within float32 rounding for every mix of variants; rows independent of their batch, bitwise. */
#include "gpu_problem.h"

/* Runs rows [first, end) of the problem as a step of their own; y: [end - first, n]. */
static void run_rows(const problem *p, int first, int end, float *y) {
    const linear_case c = p->c;
    int rows = end - first, tiles = 0, rows_max = 0;
    k_overlay_linear overlays[16] = {0};
    for (int v = 0; v < c.variants; v++) {
        overlays[v].plane_count = c.planes;
        for (int q = 0; q < c.planes; q++) {
            overlays[v].bits[q] = p->device_bits[v][q].data;
            overlays[v].scale[q] = p->device_scale[v][q].data;
        }
    }
    k_segment *segments = calloc((size_t)p->segment_count + 1, sizeof *segments);
    int segment_count = 0;
    for (int s = 0; s < p->segment_count; s++) {
        int a = p->segments[s].first_row > first ? p->segments[s].first_row : first, b = p->segments[s].end_row < end ? p->segments[s].end_row : end;
        if (a < b) segments[segment_count++] = (k_segment){p->segments[s].overlay, a - first, b - first};
    }
    k_tile *tile = calloc((size_t)rows / K_TILE_TOKENS + 1, sizeof *tile);
    for (int at = 0; at < rows; at += K_TILE_TOKENS) {
        int stop = at + K_TILE_TOKENS < rows ? at + K_TILE_TOKENS : rows, s0 = 0, s1;
        while (segments[s0].end_row <= at) s0++;
        for (s1 = s0; s1 < segment_count && segments[s1].first_row < stop; s1++) continue;
        tile[tiles++] = (k_tile){at, stop, s0, s1};
        if (stop - at > rows_max) rows_max = stop - at;
    }
    size_t n = (size_t)c.n, k = (size_t)c.k;
    buffer x = buffer_make(p->x + (size_t)first * k, (size_t)rows * k * 2), w = buffer_make(p->w, n * k * 2);
    buffer out = buffer_make(NULL, (size_t)rows * n * 4), bias = buffer_make(p->bias, n * 4), table = buffer_make(overlays, sizeof overlays);
    buffer s = buffer_make(segments, (size_t)segment_count * sizeof *segments), t = buffer_make(tile, (size_t)tiles * sizeof *tile);
    buffer ro = buffer_make(p->row_overlay + first, (size_t)rows * 4);
    k_linear_args args = {.x = x.data, .w = w.data, .y = out.data, .bias = bias.data, .overlays = table.data, .tiles = t.data,
                          .segments = s.data, .row_overlay = ro.data, .tile_count = tiles, .tile_rows_max = rows_max, .n = c.n, .k = c.k,
                          .y_stride = c.n, .fp16 = p->fp16, .planes_max = c.variants ? c.planes : 0};
    CUDA_OK(k_linear_plain(&args, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    buffer_get(&out, y);
    buffer *all[] = {&x, &w, &out, &bias, &table, &s, &t, &ro};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
    free(segments);
    free(tile);
}

static const linear_case cases[] = {
    {1, 16, 64, 0, 0, 1},   {1, 128, 256, 1, 1, 1},  {1, 17, 8, 1, 1, 1},     {7, 33, 200, 2, 1, 3},  {8, 130, 264, 3, 2, 5},
    {9, 40, 1000, 2, 1, 4}, {16, 256, 512, 14, 1, 16}, {31, 100, 96, 5, 1, 9}, {33, 129, 72, 3, 3, 7}, {64, 64, 320, 14, 1, 30},
    {70, 72, 1096, 4, 4, 6}, {128, 272, 768, 1, 1, 1}, {5, 1, 8, 1, 1, 2},     {40, 15, 24, 16, 1, 40},
};

static void test_against_float64(void **state) {
    (void)state;
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        problem p = problem_make_element(cases[i / 2], i % 2);
        size_t count = (size_t)p.c.rows * (size_t)p.c.n;
        float *y = malloc(count * 4);
        double *want = malloc(count * 8);
        run_rows(&p, 0, p.c.rows, y);
        reference(&p, want);
        /* Inputs are exact, products and sums in float32: about 1e-7 sqrt(k). */
        CHECK_L2(y, want, count, 2e-6, "case %zu: rows %d n %d k %d variants %d planes %d", i, p.c.rows, p.c.n, p.c.k, p.c.variants, p.c.planes);
        free(y);
        free(want);
        problem_free(&p);
    }
}

static void test_rows_do_not_depend_on_their_batch(void **state) {
    (void)state;
    linear_case c = {64, 130, 520, 14, 1, 25};
    problem p = problem_make(c);
    float *y = malloc((size_t)c.rows * (size_t)c.n * 4), *alone = malloc((size_t)c.n * 4);
    run_rows(&p, 0, c.rows, y);
    for (int m = 0; m < c.rows; m += 1 + (int)(test_next() % 7)) {
        run_rows(&p, m, m + 1, alone);
        assert_memory_equal(alone, y + (size_t)m * (size_t)c.n, (size_t)c.n * 4);
    }
    free(y);
    free(alone);
    problem_free(&p);
}

/* x = e_k picks a column: every bit's place shows. scale 2^-3 and W of few bits make the sum exact. */
static void test_every_bit_is_where_it_belongs(void **state) {
    (void)state;
    linear_case c = {264, 136, 264, 1, 1, 1};
    problem p = problem_make(c);
    size_t k = (size_t)c.k, n = (size_t)c.n;
    memset(p.x, 0, (size_t)c.rows * k * 2);
    for (size_t m = 0; m < (size_t)c.rows; m++) p.x[m * k + m] = bd_f32_to_bf16(1);
    for (size_t i = 0; i < n; i++) p.scale[0][0][i] = 0.125f, p.bias[i] = 0;
    CUDA_OK(cudaMemcpy(p.device_scale[0][0].data, p.scale[0][0], n * 4, cudaMemcpyHostToDevice));
    for (size_t i = 0; i < n * k; i++) p.w[i] = bd_f32_to_bf16((float)(int)(test_next() % 9) / 4 - 1);
    float *y = malloc((size_t)c.rows * n * 4);
    run_rows(&p, 0, c.rows, y);
    for (size_t m = 0; m < k; m++)
        for (size_t i = 0; i < n; i++) {
            float want = bd_bf16_to_f32(p.w[i * k + m]) + (float)sign_of(p.bits[0][0], i, m, k) * 0.125f;
            if (y[m * n + i] != want) fail_msg("row %zu column %zu: %g, want %g", i, m, (double)y[m * n + i], (double)want);
        }
    free(y);
    problem_free(&p);
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_float64), cmocka_unit_test(test_rows_do_not_depend_on_their_batch),
                                       cmocka_unit_test(test_every_bit_is_where_it_belongs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
