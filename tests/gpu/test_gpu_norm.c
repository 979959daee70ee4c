/* test_gpu_norm.c - residual and RMSNorm, gated activation, against float64; the digits that go with them against what they stand for. */
#include "gpu_test.h"

static float *widened(const buffer *b, size_t count, bool fp16) {
    uint16_t *bits = malloc(count * 2);
    float *v = malloc(count * 4);
    buffer_get(b, bits);
    for (size_t i = 0; i < count; i++) v[i] = fp16 ? bd_f16_to_f32(bits[i]) : bd_bf16_to_f32(bits[i]);
    free(bits);
    return v;
}

static void *narrowed(float *v, size_t count, bool narrow, bool fp16) { /* what the device gets; v becomes what that is */
    uint16_t *bits = malloc(count * 2);
    if (!narrow) {
        free(bits);
        float *copy = malloc(count * 4);
        memcpy(copy, v, count * 4);
        return copy;
    }
    for (size_t i = 0; i < count; i++) {
        bits[i] = fp16 ? bd_f32_to_f16(v[i]) : bd_f32_to_bf16(v[i]);
        v[i] = fp16 ? bd_f16_to_f32(bits[i]) : bd_bf16_to_f32(bits[i]);
    }
    return bits;
}

/* Of many outputs rounding is 1.7e-3 in bf16, 2.1e-4 in fp16; of few, the rounding of one weighs. */
static double rounding(size_t count, bool fp16) {
    return (fp16 ? 3e-4 : 2.3e-3) * (1 + 4 / sqrt((double)count));
}

static double rms_factor(const double *v, int width, double eps) {
    double square = 0;
    for (int i = 0; i < width; i++) square += v[i] * v[i];
    return 1 / sqrt(square / width + eps);
}

/* ---- Digits of 16-bit values, digits.cuh ---- */

/* Two launches' rows, and some that are in none. */
static k_digits_sink sink_make(int rows, int width, buffer *to) {
    k_digits_sink sink = {.chunk_count = 0};
    if (width % 256) return sink;
    const int first = rows > 3 ? 1 : 0, cut = rows > 40 ? 37 : rows / 2;
    uint64_t bytes = 0;
    for (int c = 0; c < 2; c++) {
        const k_digits_chunk chunk = {c ? cut : first, c ? rows - cut : cut - first, bytes};
        if (chunk.rows < 1) continue;
        sink.chunks[sink.chunk_count++] = chunk;
        bytes += k_digits_bytes(chunk.rows, width);
    }
    *to = buffer_make(NULL, bytes);
    sink.digits = to->data;
    return sink;
}

/* A block of a token: every value within its rounding, and the correction that its digits call for. */
static void check_block(const uint8_t *tile, int tokens, int token, const float *x, const char *what) {
    float top = 1e-30f, scale;
    int32_t correction[4];
    long sum = 0;
    for (int k = 0; k < 256; k++) top = fmaxf(top, fabsf(x[k]));
    memcpy(correction, tile + tokens * 512 + token * 16, sizeof correction);
    memcpy(&scale, tile + tokens * 528 + token * 4, 4);
    if (fabs((double)scale * 64 * 4079 - (double)top) > 1e-6 * (double)top) fail_msg("%s: scale %g of values up to %g", what, (double)scale, (double)top);
    for (int k = 0; k < 256; k++) {
        const int i = k / 8 % 8, j = i % 4, o = k % 8, piece = 8 * (o / 4) + i, at = (piece * tokens + token) * 32 + k / 64 * 4 + o % 4;
        const int z = 256 * (int8_t)tile[at + 16] + (int8_t)tile[at], step = 1 << j;
        const double unit = (double)top / 4079, value = (j ? -1.0 : 1.0) * z / step * unit;
        if (fabs(value - (double)x[k]) > unit / step * 0.52) fail_msg("%s: value %d: %g for %g", what, k, value, (double)x[k]);
        if (j) sum -= (long)z * (64 >> j);
    }
    if (correction[0] != sum || correction[2] != sum || correction[1] || correction[3]) fail_msg("%s: correction %d, %ld is right", what, correction[0], sum);
}

static void check_digits(const k_digits_sink *sink, const buffer *digits, const float *x, int rows, int width, const char *what) {
    uint8_t *all = malloc(digits->bytes);
    buffer_get(digits, all);
    for (int c = 0; c < sink->chunk_count; c++) {
        const k_digits_chunk *chunk = &sink->chunks[c];
        const int tokens = k_decode_tokens(chunk->rows);
        const size_t each = k_digits_bytes(chunk->rows, 256);
        for (int t = 0; t < chunk->rows && chunk->first_row + t < rows; t++)
            for (int b = 0; b < width / 256; b++)
                check_block(all + chunk->at_bytes + (size_t)b * each, tokens, t, x + (size_t)(chunk->first_row + t) * (size_t)width + b * 256, what);
    }
    free(all);
}

static bool hopper(void) {
    int major = 0;
    CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return major == 9;
}

/* By a kernel of their own, of outliers too. */
static void test_digits(void **state) {
    (void)state;
    if (!hopper()) skip();
    for (int kind = 0; kind < 4; kind++) {
        const bool fp16 = kind & 1;
        const int rows = 2 + (int)(test_next() % 90), width = 256 * (1 + (int)(test_next() % 9));
        const size_t count = (size_t)rows * (size_t)width;
        float *x = floats_random(count, 1);
        for (size_t i = 0; (kind & 2) && i < count; i += 1 + test_next() % 700) x[i] *= 1000;
        for (int k = 0; k < 256; k++) x[count - 1 - (size_t)k] = 0;
        void *bits = narrowed(x, count, true, fp16);
        buffer d_x = buffer_make(bits, count * 2), d_digits;
        const k_digits_args args = {.x = d_x.data, .to = sink_make(rows, width, &d_digits), .k = width, .fp16 = fp16, .pdl = (int)(test_next() % 2)};
        CUDA_OK(k_digits(&args, NULL));
        CUDA_OK(cudaDeviceSynchronize());
        check_digits(&args.to, &d_digits, x, rows, width, "digits");
        buffer_free(&d_x), buffer_free(&d_digits);
        free(x), free(bits);
    }
}

static void check_norm(int rows, int width, bool add, bool post, bool narrow, bool fp16) {
    enum { VARIANTS = 3 };
    const size_t count = (size_t)rows * (size_t)width, w = (size_t)width;
    const bool plus_one = test_next() % 2;
    float *residual = floats_random(count, 2), *proj = floats_random(count, 1), *gammas = floats_random((VARIANTS + 1) * w, 1), *posts = floats_random((VARIANTS + 1) * w, 1);
    int32_t *overlay = malloc((size_t)rows * 4);
    for (int m = 0; m < rows; m++) overlay[m] = (int32_t)(test_next() % (VARIANTS + 1)) - 1;
    void *proj_bits = narrowed(proj, count, narrow, fp16);
    buffer d_residual = buffer_make(residual, count * 4), d_proj = buffer_make(proj_bits, count * (narrow ? 2 : 4)), d_normed = buffer_make(NULL, count * 2);
    /* Variants' weights lie at any float; the last variant has none of its own. */
    buffer d_gamma = buffer_make(NULL, (VARIANTS + 1) * w * 4 + 16), d_post = buffer_make(NULL, (VARIANTS + 1) * w * 4 + 16), d_overlay = buffer_make(overlay, (size_t)rows * 4);
    const float *own[VARIANTS] = {0}, *own_post[VARIANTS] = {0};
    for (int v = 0; v <= VARIANTS; v++) {
        float *at = (float *)d_gamma.data + (size_t)v * w + (v ? v : 0), *post_at = (float *)d_post.data + (size_t)v * w + (v ? v : 0);
        CUDA_OK(cudaMemcpy(at, gammas + (size_t)v * w, w * 4, cudaMemcpyHostToDevice));
        CUDA_OK(cudaMemcpy(post_at, posts + (size_t)v * w, w * 4, cudaMemcpyHostToDevice));
        if (v && v < VARIANTS) own[v - 1] = at, own_post[v - 1] = post_at;
    }
    buffer d_own = buffer_make(own, sizeof own), d_own_post = buffer_make(own_post, sizeof own_post);
    buffer d_digits = {0};
    const k_norm_args args = {.residual = d_residual.data, .proj = d_proj.data, .normed = d_normed.data, .gamma = d_gamma.data, .post_gamma = post ? d_post.data : NULL,
                              .gammas = d_own.data, .post_gammas = post ? d_own_post.data : NULL, .row_overlay = d_overlay.data, .rows = rows, .width = width, .add = add,
                              .plus_one = plus_one, .proj_half = narrow, .fp16 = fp16, .overlap = test_next() % 2, .eps = 1e-5f, .digits = sink_make(rows, width, &d_digits)};
    CUDA_OK(k_norm_residual(&args, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    double *sum = malloc(count * 8), *want = malloc(count * 8);
    for (int m = 0; m < rows; m++) {
        const size_t at = (size_t)m * w;
        const int v = overlay[m] >= 0 && own[overlay[m]] ? overlay[m] + 1 : 0;
        double p[K_NORM_WIDTH_MAX], factor = 1;
        for (int i = 0; i < width; i++) p[i] = proj[at + (size_t)i];
        if (post) factor = rms_factor(p, width, (double)args.eps);
        for (int i = 0; i < width; i++)
            sum[at + (size_t)i] = residual[at + (size_t)i] + (add ? p[i] * (post ? factor * (plus_one + (double)posts[(size_t)v * w + (size_t)i]) : 1) : 0);
        factor = rms_factor(sum + at, width, (double)args.eps);
        for (int i = 0; i < width; i++) want[at + (size_t)i] = sum[at + (size_t)i] * factor * (plus_one + (double)gammas[(size_t)v * w + (size_t)i]);
    }
    float *got_sum = malloc(count * 4), *got = widened(&d_normed, count, fp16);
    buffer_get(&d_residual, got_sum);
    CHECK_L2(got_sum, sum, count, 1e-6, "residual: rows %d width %d add %d post %d narrow %d fp16 %d", rows, width, add, post, narrow, fp16);
    CHECK_L2(got, want, count, rounding(count, fp16), "norm: rows %d width %d add %d post %d narrow %d fp16 %d", rows, width, add, post, narrow, fp16);
    if (args.digits.chunk_count) check_digits(&args.digits, &d_digits, got, rows, width, "norm's digits");
    buffer *all[] = {&d_residual, &d_proj, &d_normed, &d_gamma, &d_post, &d_overlay, &d_own, &d_own_post, &d_digits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->data) buffer_free(all[i]);
    void *host[] = {residual, proj, gammas, posts, overlay, proj_bits, sum, want, got_sum, got};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
}

static void test_norm(void **state) {
    (void)state;
    static const int widths[] = {8, 40, 264, 4096, 4104, 8192, 12296, K_NORM_WIDTH_MAX};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int kind = 0; kind < 16; kind++) check_norm(1 + (int)(test_next() % (widths[i] % 256 ? 9 : 70)), widths[i], kind & 1, kind & 2, kind & 4, kind & 8);
    k_norm_args none = {.rows = 1, .width = 12};
    assert_int_equal(k_norm_residual(&none, NULL), cudaErrorInvalidValue);
    none.width = K_NORM_WIDTH_MAX + 8;
    assert_int_equal(k_norm_residual(&none, NULL), cudaErrorInvalidValue);
}

static void check_gate(int rows, int width, int stride, bool narrow, bool gelu, bool fp16) {
    const size_t count = (size_t)rows * (size_t)stride, kept = (size_t)rows * (size_t)width, each = narrow ? 2 : 4;
    float *in = floats_random(2 * count, 3);
    in[0] = -60, in[1] = 60, in[2] = 0; /* where exp is none of use */
    void *bits = narrowed(in, 2 * count, narrow, fp16);
    buffer d_in = buffer_make(bits, 2 * count * each), d_act = buffer_make(NULL, kept * 2);
    buffer d_digits = {0};
    const k_gate_args args = {.act = d_act.data, .gate = d_in.data, .up = (uint8_t *)d_in.data + count * each, .rows = rows, .width = width, .in_stride = stride, .in_half = narrow,
                              .gelu = gelu, .fp16 = fp16, .overlap = test_next() % 2, .digits = sink_make(rows, width, &d_digits)};
    CUDA_OK(k_gate(&args, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    double *want = malloc(kept * 8);
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < width; i++) {
            const double g = in[(size_t)m * (size_t)stride + (size_t)i], u = in[count + (size_t)m * (size_t)stride + (size_t)i];
            want[(size_t)m * (size_t)width + (size_t)i] = u * (gelu ? 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) : g / (1 + exp(-g)));
        }
    float *got = widened(&d_act, kept, fp16);
    CHECK_L2(got, want, kept, rounding(kept, fp16), "gate: rows %d width %d stride %d narrow %d gelu %d fp16 %d", rows, width, stride, narrow, gelu, fp16);
    if (args.digits.chunk_count) check_digits(&args.digits, &d_digits, got, rows, width, "the gate's digits");
    buffer_free(&d_in), buffer_free(&d_act);
    if (d_digits.data) buffer_free(&d_digits);
    free(in), free(bits), free(want), free(got);
}

static void test_gate(void **state) {
    (void)state;
    static const int widths[] = {8, 72, 2816, 14336};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int kind = 0; kind < 8; kind++)
            check_gate(1 + (int)(test_next() % (widths[i] % 256 ? 9 : 70)), widths[i], widths[i] + 8 * (int)(test_next() % 3), kind & 1, kind & 2, kind & 4);
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_digits), cmocka_unit_test(test_norm), cmocka_unit_test(test_gate)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
