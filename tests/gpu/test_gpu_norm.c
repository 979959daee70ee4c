/* test_gpu_norm.c - residual and RMSNorm, gated activation, against float64. */
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
    const k_norm_args args = {.residual = d_residual.data, .proj = d_proj.data, .normed = d_normed.data, .gamma = d_gamma.data, .post_gamma = post ? d_post.data : NULL,
                              .gammas = d_own.data, .post_gammas = post ? d_own_post.data : NULL, .row_overlay = d_overlay.data, .rows = rows, .width = width, .add = add,
                              .plus_one = plus_one, .proj_half = narrow, .fp16 = fp16, .overlap = test_next() % 2, .eps = 1e-5f};
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
    buffer *all[] = {&d_residual, &d_proj, &d_normed, &d_gamma, &d_post, &d_overlay, &d_own, &d_own_post};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
    void *host[] = {residual, proj, gammas, posts, overlay, proj_bits, sum, want, got_sum, got};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
}

static void test_norm(void **state) {
    (void)state;
    static const int widths[] = {8, 40, 264, 4096, 4104, 8192, 12296, K_NORM_WIDTH_MAX};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int kind = 0; kind < 16; kind++) check_norm(1 + (int)(test_next() % 9), widths[i], kind & 1, kind & 2, kind & 4, kind & 8);
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
    const k_gate_args args = {.act = d_act.data, .gate = d_in.data, .up = (uint8_t *)d_in.data + count * each, .rows = rows, .width = width, .in_stride = stride, .in_half = narrow,
                              .gelu = gelu, .fp16 = fp16, .overlap = test_next() % 2};
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
    buffer_free(&d_in), buffer_free(&d_act);
    free(in), free(bits), free(want), free(got);
}

static void test_gate(void **state) {
    (void)state;
    static const int widths[] = {8, 72, 2816, 14336};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (int kind = 0; kind < 8; kind++)
            check_gate(1 + (int)(test_next() % 9), widths[i], widths[i] + 8 * (int)(test_next() % 3), kind & 1, kind & 2, kind & 4);
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_norm), cmocka_unit_test(test_gate)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
