/* test_gpu_fast.c - the sm_90a kernels against float64: prefill with W_eff rebuilt in registers, decode with the exact delta.
 * With BD_GPU_SMALL set, small cases only: for compute-sanitizer. Bounds: decode rounds only y (1.7e-3 of bf16); prefill also rounds W_eff (2.55e-3 expected together). */
#include "gpu_problem.h"

static CUtensorMap map_make(const void *data, size_t rows, size_t cols, unsigned box_rows) {
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                  const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    union {
        void *data;
        encode_fn function;
        const void *constant;
    } entry, address;
    enum cudaDriverEntryPointQueryResult found;
    CUDA_OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry.data, 12000, cudaEnableDefault, &found));
    CUtensorMap map;
    cuuint64_t size[2] = {cols, rows}, stride[1] = {cols * 2};
    cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    address.constant = data;
    assert_int_equal(entry.function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address.data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), CUDA_SUCCESS);
    return map;
}

static void overlays_of(const problem *p, k_overlay_linear *out) {
    memset(out, 0, 16 * sizeof *out);
    for (int v = 0; v < p->c.variants; v++) {
        out[v].plane_count = 1;
        out[v].bits[0] = p->device_bits[v][0].data;
        out[v].scale[0] = p->device_scale[v][0].data;
    }
}

static bool left_out(linear_case c) {
    return getenv("BD_GPU_SMALL") && (double)c.rows * c.n * c.k > 12e6;
}

static int sm_count(void) {
    int count = 0;
    CUDA_OK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

typedef struct device_problem {
    buffer x, w, y, bias, table;
} device_problem;

static device_problem upload(const problem *p, int first_row, int rows) {
    k_overlay_linear overlays[16];
    overlays_of(p, overlays);
    size_t n = (size_t)p->c.n, k = (size_t)p->c.k;
    return (device_problem){buffer_make(p->x + (size_t)first_row * k, (size_t)rows * k * 2), buffer_make(p->w, n * k * 2),
                            buffer_make(NULL, (size_t)rows * n * 2), buffer_make(p->bias, n * 4), buffer_make(overlays, sizeof overlays)};
}

static void download(device_problem *d, bool fp16, float *y) {
    CUDA_OK(cudaDeviceSynchronize());
    size_t count = d->y.bytes / 2;
    uint16_t *half = malloc(d->y.bytes);
    buffer_get(&d->y, half);
    for (size_t i = 0; i < count; i++) y[i] = element_float(half[i], fp16);
    free(half);
    buffer *all[] = {&d->x, &d->w, &d->y, &d->bias, &d->table};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

/* sms: multiprocessors the launch may use; few make rings wrap and tiles wait for each other. */
static void run_gemm(const problem *p, int tok, int split, int sms, float *y) {
    const linear_case c = p->c;
    device_problem d = upload(p, 0, c.rows);
    k_gemm_tile *tiles = malloc(((size_t)c.rows + 1) * sizeof *tiles);
    int count = 0;
    bool delta = false;
    for (int s = 0; s < p->segment_count; s++) {
        delta |= p->segments[s].overlay >= 0;
        for (int m = p->segments[s].first_row; m < p->segments[s].end_row; m += tok)
            tiles[count++] = (k_gemm_tile){m, m + tok < p->segments[s].end_row ? m + tok : p->segments[s].end_row, p->segments[s].overlay, 0};
    }
    buffer t = buffer_make(tiles, (size_t)count * sizeof *tiles);
    k_gemm_args args = {.w = map_make(d.w.data, (size_t)c.n, (size_t)c.k, 128), .x = map_make(d.x.data, (size_t)c.rows, (size_t)c.k, (unsigned)tok / 2),
                        .y = map_make(d.y.data, (size_t)c.rows, (size_t)c.n, 32), .w_data = d.w.data, .y_data = d.y.data, .bias = d.bias.data,
                        .overlays = d.table.data, .tiles = t.data, .tile_count = count,
                        .n = c.n, .k = c.k, .fp16 = p->fp16, .group = 8, .sm_count = sms};
    for (int again = 0; again < 3; again++, args.pdl = true) CUDA_OK(k_gemm(&args, tok, split, delta, NULL));
    download(&d, p->fp16, y);
    buffer_free(&t);
    free(tiles);
}

/* Rows [first, first + rows) of the problem in one launch, with every buffer of its own. */
static void run_decode_on(const problem *p, int sms, int first, int rows, bool pdl, float *y) {
    const linear_case c = p->c;
    device_problem d = upload(p, 0, c.rows);
    int32_t columns[16] = {0}, slot[K_DECODE_ROWS];
    int variants = 0;
    for (int m = 0; m < rows; m++) {
        int overlay = p->row_overlay[first + m];
        if (overlay >= 0 && (!variants || columns[variants - 1] != overlay)) columns[variants++] = overlay;
        slot[m] = overlay < 0 ? -1 : variants - 1;
    }
    size_t workspace_bytes = k_decode_workspace_bytes(sms);
    const int tokens = k_decode_tokens(rows);
    const uint8_t *x = (uint8_t *)d.x.data + (size_t)first * (size_t)c.k * 2;
    buffer planes = buffer_make(NULL, k_planes_bytes(rows, c.k));
    buffer cols = buffer_make(columns, sizeof columns), slots = buffer_make(slot, sizeof slot), work = buffer_make(NULL, workspace_bytes), ticket = buffer_make(NULL, 4);
    CUDA_OK(cudaMemset(work.data, 0, workspace_bytes));
    CUDA_OK(cudaMemset(ticket.data, 0, 4));
    k_decode_args args = {.w = map_make(d.w.data, (size_t)c.n, (size_t)c.k, 128), .x = map_make(d.x.data, (size_t)c.rows, (size_t)c.k, (unsigned)tokens),
                          .w_data = d.w.data, .x_data = x, .first_row = first, .planes = planes.data, .overlays = d.table.data, .columns = cols.data,
                          .slot = slots.data, .bias = d.bias.data, .y = (uint16_t *)d.y.data + (size_t)first * (size_t)c.n, .workspace = work.data,
                          .ticket = ticket.data, .rows = rows, .n = c.n, .k = c.k, .variants = variants, .sm_count = sms, .fp16 = p->fp16, .pdl = pdl};
    for (int again = 0; again < 3; again++) { /* the workspace and the ticket must be left as they were found */
        if (variants && tokens > 16) CUDA_OK(k_planes(planes.data, x, rows, c.k, p->fp16, pdl, NULL));
        CUDA_OK(k_decode(&args, NULL));
    }
    float *all_rows = malloc((size_t)c.rows * (size_t)c.n * 4);
    download(&d, p->fp16, all_rows);
    memcpy(y, all_rows + (size_t)first * (size_t)c.n, (size_t)rows * (size_t)c.n * 4);
    free(all_rows);
    uint8_t *left = malloc(workspace_bytes);
    buffer_get(&work, left);
    for (size_t i = 0; i < k_decode_workspace_zeros(sms); i++)
        if (left[i]) fail_msg("workspace byte %zu is not zero", i);
    free(left);
    buffer *all[] = {&planes, &cols, &slots, &work, &ticket};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

static void run_decode(const problem *p, int first, int rows, bool pdl, float *y) {
    run_decode_on(p, sm_count(), first, rows, pdl, y);
}

static void check(const problem *p, const float *y, double bound, const char *what) {
    size_t count = (size_t)p->c.rows * (size_t)p->c.n;
    double *want = malloc(count * 8);
    reference(p, want);
    CHECK_L2(y, want, count, bound, "%s: rows %d n %d k %d variants %d", what, p->c.rows, p->c.n, p->c.k, p->c.variants);
    free(want);
}

static void test_gemm(void **state) {
    (void)state;
    static const struct { linear_case c; int tok, split, sms; } cases[] = {
        {{257, 256, 256, 1, 1, 1}, 256, 1, 132},  {{64, 136, 512, 1, 1, 1}, 64, 1, 4},      {{65, 264, 512, 3, 1, 5}, 64, 2, 132},
        {{130, 384, 640, 2, 1, 3}, 128, 1, 6},    {{200, 520, 1024, 8, 1, 9}, 128, 2, 132}, {{300, 392, 1024, 4, 1, 7}, 256, 2, 132},
        {{33, 128, 2048, 2, 1, 2}, 256, 4, 132},  {{500, 328, 384, 0, 1, 1}, 256, 1, 4},    {{17, 8, 128, 1, 1, 2}, 64, 1, 132},
        {{300, 1096, 1024, 3, 1, 4}, 256, 1, 16}, {{400, 1096, 512, 2, 1, 3}, 256, 1, 14},  {{150, 1000, 1536, 1, 1, 1}, 128, 1, 8},
        {{70, 1032, 768, 5, 1, 40}, 64, 1, 6},
    };
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        if (left_out(cases[i / 2].c)) continue;
        problem p = problem_make_element(cases[i / 2].c, i % 2);
        size_t bytes = (size_t)p.c.rows * (size_t)p.c.n * 4;
        float *y = malloc(bytes), *again = malloc(bytes);
        run_gemm(&p, cases[i / 2].tok, cases[i / 2].split, cases[i / 2].sms, y);
        check(&p, y, p.fp16 ? 4.2e-4 : 3.2e-3, "prefill");
        run_gemm(&p, cases[i / 2].tok, cases[i / 2].split, cases[i / 2].sms, again);
        assert_memory_equal(y, again, bytes);
        free(y);
        free(again);
        problem_free(&p);
    }
}

/* x = e_m: Y is the column of W_eff rounded to bf16, bitwise. */
static void test_gemm_one_hot(void **state) {
    (void)state;
    if (getenv("BD_GPU_SMALL")) skip();
    problem p = problem_make((linear_case){512, 136, 512, 2, 1, 3});
    size_t k = 512, n = 136;
    memset(p.x, 0, 512 * k * 2);
    memset(p.bias, 0, n * 4);
    for (size_t m = 0; m < 512; m++) p.x[m * k + m] = bd_f32_to_bf16(1);
    float *y = malloc(512 * n * 4);
    for (int tok = 64; tok <= 256; tok *= 2) {
        run_gemm(&p, tok, 1, tok == 128 ? 2 : sm_count(), y);
        for (size_t m = 0; m < 512; m++)
            for (size_t i = 0; i < n; i++) {
                int v = p.row_overlay[m];
                float w = bd_bf16_to_f32(p.w[i * k + m]), scale = v < 0 ? 0 : bd_bf16_to_f32(bd_f32_to_bf16(p.scale[v][0][i]));
                float want = bd_bf16_to_f32(bd_f32_to_bf16(w + (v < 0 ? 0 : (float)sign_of(p.bits[v][0], i, m, k) * scale)));
                if (y[m * n + i] != want) fail_msg("tok %d row %zu column %zu: %g, want %g", tok, i, m, (double)y[m * n + i], (double)want);
            }
    }
    free(y);
    problem_free(&p);
}

/* Output rounding alone: 1.7e-3 of bf16, an eighth of that of fp16. */
static double decode_bound(const problem *p) {
    return p->fp16 ? 2.8e-4 : 2.2e-3;
}

static void test_decode(void **state) {
    (void)state;
    static const linear_case cases[] = {
        {1, 128, 256, 1, 1, 1},    {1, 4096, 1024, 0, 1, 1},  {16, 512, 2048, 14, 1, 16}, {7, 136, 512, 2, 1, 4},    {16, 1000, 1536, 1, 1, 1},
        {9, 264, 4096, 16, 1, 9},  {2, 8, 256, 1, 1, 2},      {4, 6144, 768, 3, 1, 4},    {13, 72, 28672, 5, 1, 6},  {17, 136, 1024, 3, 1, 5},
        {33, 520, 2304, 8, 1, 12}, {64, 392, 4096, 14, 1, 16}, {64, 128, 512, 1, 1, 1},    {31, 2056, 768, 1, 1, 1},  {50, 264, 1280, 0, 1, 1},
        {64, 8, 256, 16, 1, 16},   {48, 5000, 512, 6, 1, 7},  {8, 2048, 4096, 4, 1, 7}};
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        if (left_out(cases[i / 2])) continue;
        problem p = problem_make_element(cases[i / 2], i % 2);
        float *y = malloc((size_t)p.c.rows * (size_t)p.c.n * 4);
        for (int pdl = 0; pdl < 2; pdl++) {
            run_decode_on(&p, pdl ? sm_count() : 1 + (int)(test_next() % 5), 0, p.c.rows, pdl, y);
            check(&p, y, decode_bound(&p), "decode");
        }
        free(y);
        problem_free(&p);
    }
}

static void test_decode_delta_alone(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        problem p = problem_make_element((linear_case){i < 2 ? 11 : 37, 392, 1280, 5, 1, 8}, i % 2);
        const int rows = p.c.rows;
        memset(p.w, 0, (size_t)392 * 1280 * 2);
        memset(p.bias, 0, 392 * 4);
        float *y = malloc((size_t)rows * 392 * 4), *mirrored = malloc((size_t)rows * 392 * 4);
        run_decode(&p, 0, rows, true, y);
        check(&p, y, decode_bound(&p), "delta alone");
        for (int v = 0; v < p.c.variants; v++) problem_mirror(&p, v);
        run_decode(&p, 0, rows, true, mirrored);
        for (int j = 0; j < rows * 392; j++)
            if (mirrored[j] != -y[j]) fail_msg("output %d: %g, mirrored signs %g", j, (double)y[j], (double)mirrored[j]);
        free(y);
        free(mirrored);
        problem_free(&p);
    }
}

/* x = e_m, base and delta far apart in size: each output is one weight plus one signed scale. */
static void test_decode_one_hot(void **state) {
    (void)state;
    if (getenv("BD_GPU_SMALL")) skip();
    for (int rows = 8; rows <= 64; rows *= 2)
        for (int at = 0; at < 512; at += 512 / 4) {
            problem p = problem_make((linear_case){rows, 200, 512, 3, 1, 5});
            memset(p.x, 0, (size_t)rows * 512 * 2);
            memset(p.bias, 0, 200 * 4);
            for (int m = 0; m < rows; m++) p.x[m * 512 + (at + 7 * m) % 512] = bd_f32_to_bf16(1);
            float *y = malloc((size_t)rows * 200 * 4);
            run_decode(&p, 0, rows, false, y);
            for (int m = 0; m < rows; m++)
                for (size_t n = 0; n < 200; n++) {
                    const size_t k = (size_t)(at + 7 * m) % 512;
                    const int v = p.row_overlay[m];
                    const float w = bd_bf16_to_f32(p.w[n * 512 + k]), delta = v < 0 ? 0 : (float)sign_of(p.bits[v][0], n, k, 512) * p.scale[v][0][n];
                    const float want = w + delta, got = y[(size_t)m * 200 + n];
                    if (!(fabsf(got - want) <= fabsf(want) * 0x1p-8f + 1e-6f)) fail_msg("rows %d row %d output %zu: %g, want %g", rows, m, n, (double)got, (double)want);
                }
            free(y);
            problem_free(&p);
        }
}

/* Scales of zero: the base, bitwise. */
static void test_decode_zero_scale_is_the_base(void **state) {
    (void)state;
    for (int rows = 5; rows <= 60; rows += 11) {
        problem p = problem_make((linear_case){rows, 264, 1024, 4, 1, 6});
        for (int v = 0; v < 4; v++) problem_scale(&p, v, 0);
        float *y = malloc((size_t)rows * 264 * 4), *base = malloc((size_t)rows * 264 * 4);
        run_decode(&p, 0, rows, true, y);
        for (int m = 0; m < rows; m++) p.row_overlay[m] = -1;
        run_decode(&p, 0, rows, true, base);
        assert_memory_equal(y, base, (size_t)rows * 264 * 4);
        free(y);
        free(base);
        problem_free(&p);
    }
}

static void test_decode_rows_do_not_depend_on_their_batch(void **state) {
    (void)state;
    if (getenv("BD_GPU_SMALL")) skip();
    static const linear_case cases[] = {{16, 648, 1024, 14, 1, 16}, {64, 648, 1024, 14, 1, 16}, {27, 2056, 2048, 3, 1, 9}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        problem p = problem_make(cases[i]);
        const int n = p.c.n;
        float *y = malloc((size_t)p.c.rows * (size_t)n * 4), *alone = malloc((size_t)n * 4);
        run_decode(&p, 0, p.c.rows, true, y);
        for (int m = 0; m < p.c.rows; m++) {
            run_decode(&p, m, 1, true, alone);
            for (int j = 0; j < n; j++)
                if (alone[j] != y[m * n + j])
                    fail_msg("%d rows, row %d output %d: alone %g, in the batch %g", p.c.rows, m, j, (double)alone[j], (double)y[m * n + j]);
        }
        free(y);
        free(alone);
        problem_free(&p);
    }
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major != 9) {
        printf("not an sm_90 device: skipped\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gemm), cmocka_unit_test(test_gemm_one_hot), cmocka_unit_test(test_decode),
                                       cmocka_unit_test(test_decode_delta_alone), cmocka_unit_test(test_decode_one_hot),
                                       cmocka_unit_test(test_decode_zero_scale_is_the_base), cmocka_unit_test(test_decode_rows_do_not_depend_on_their_batch)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
