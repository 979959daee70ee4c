/* Every kind of kernels that this machine can run, each against double-precision sums: sizes that
 * are no multiple of anything, buffers without a byte to spare, rows alone and in company. */
#include "backend_cpu_support.h"

/* Of the sum of absolute terms; float32 sums of some 700 terms in eight lanes stay well below. */
#define TOLERANCE 2e-6
#define ROWS_MAX  33u
#define N_MAX     70u
#define K_MAX     700u

typedef struct kernel_case {
    uint64_t rng;
    const bd_cpu_kernels *kernels;
    uint32_t rows, n, k;
    bd_dtype dtype;
    uint64_t offset_bytes, stride_bytes;
    uint8_t *raw;  /* weights */
    double *value; /* [n][k] */
    float *x[ROWS_MAX], *y[ROWS_MAX];
    uint8_t *plane;
    uint32_t plane_rows, first; /* of the plane's rows, [first, first + n) are asked for */
    double *sign;               /* [plane_rows][k], 1 or -1 */
    float *scale;               /* [n] */
    float *table[ROWS_MAX];
} kernel_case;

static float *floats(kernel_case *c, size_t count) {
    float *values = must_calloc(count, sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(normal(&c->rng) * (pick(&c->rng, 0, 50) == 0 ? 20.0 : 1.0));
    return values;
}

/* Most sizes are odd; some are whole tiles, some smaller than a register. */
static uint32_t any_size(kernel_case *c, uint32_t max) {
    const uint32_t kind = pick(&c->rng, 0, 5);
    if (kind == 0) return pick(&c->rng, 1, max < 20 ? max : 20);
    if (kind == 1 && max >= 32) return 32 * pick(&c->rng, 1, max / 32);
    return pick(&c->rng, 1, max);
}

static void make_weights(kernel_case *c) {
    static const bd_dtype dtypes[3] = {BD_DTYPE_BF16, BD_DTYPE_F16, BD_DTYPE_F32};
    c->rows = any_size(c, ROWS_MAX);
    c->n = any_size(c, N_MAX);
    c->k = any_size(c, K_MAX);
    c->dtype = dtypes[pick(&c->rng, 0, 2)];
    const size_t size = bd_dtype_bytes(c->dtype);
    c->offset_bytes = pick(&c->rng, 0, 3);
    c->stride_bytes = c->k * size + pick(&c->rng, 0, 5);
    c->raw = must_calloc(c->offset_bytes + (c->n - 1) * c->stride_bytes + c->k * size, 1);
    c->value = must_calloc((size_t)c->n * c->k, sizeof *c->value);
    for (size_t i = 0; i < (size_t)c->n * c->k; i++) {
        uint8_t *at = c->raw + c->offset_bytes + i / c->k * c->stride_bytes + i % c->k * size;
        float w = (float)normal(&c->rng);
        const uint16_t half = c->dtype == BD_DTYPE_BF16 ? bd_f32_to_bf16(w) : bd_f32_to_f16(w);
        if (c->dtype == BD_DTYPE_BF16) w = bd_bf16_to_f32(half);
        if (c->dtype == BD_DTYPE_F16) w = bd_f16_to_f32(half);
        memcpy(at, c->dtype == BD_DTYPE_F32 ? (const void *)&w : (const void *)&half, size);
        c->value[i] = (double)w;
    }
    for (uint32_t r = 0; r < c->rows; r++) {
        c->x[r] = floats(c, c->k);
        c->y[r] = floats(c, c->n);
    }
}

/* A plane of k signs a row, of which the last few may be none of the disk format's. */
static void make_signs(kernel_case *c) {
    for (; c->rows > BD_CPU_SIGN_ROWS; c->rows--)
        free(c->x[c->rows - 1]), free(c->y[c->rows - 1]);
    c->first = pick(&c->rng, 0, 1) * pick(&c->rng, 1, 30);
    c->plane_rows = c->first + c->n + pick(&c->rng, 0, 1) * pick(&c->rng, 1, 20);
    c->plane = must_calloc(bd_cpu_plane_bytes(c->plane_rows, c->k), 1);
    c->sign = must_calloc((size_t)c->plane_rows * c->k, sizeof *c->sign);
    for (uint32_t i = 0; i < c->plane_rows; i++) {
        for (uint32_t j = 0; j < c->k; j++) {
            const bool minus = support_random(&c->rng) & 1;
            c->sign[(size_t)i * c->k + j] = minus ? -1.0 : 1.0;
            uint8_t *word = c->plane + bd_cpu_plane_offset(bd_cpu_plane_words(c->k), i, j / 32u);
            if (minus) word[j % 32u / 8u] |= (uint8_t)(1u << j % 8u);
        }
    }
    c->scale = floats(c, c->n);
    for (uint32_t r = 0; r < c->rows; r++) {
        c->table[r] = must_calloc(bd_cpu_table_floats(c->k), sizeof(float));
        c->kernels->sum_table(c->table[r], c->x[r], c->k);
    }
}

static void free_case(kernel_case *c) {
    for (uint32_t r = 0; r < c->rows; r++)
        free(c->x[r]), free(c->y[r]), free(c->table[r]);
    free(c->raw), free(c->value), free(c->plane), free(c->sign), free(c->scale);
}

static bd_cpu_dot dot_of(const kernel_case *c, float *const *y) {
    return (bd_cpu_dot){.x = (const float *const *)c->x,
                        .y = y,
                        .rows = c->rows,
                        .n = c->n,
                        .k = c->k,
                        .w = c->raw + c->offset_bytes,
                        .stride_bytes = c->stride_bytes};
}

static bd_cpu_signs signs_of(const kernel_case *c, float *const *y) {
    return (bd_cpu_signs){.table = (const float *const *)c->table,
                          .y = y,
                          .plane = c->plane,
                          .scale = c->scale,
                          .rows = c->rows,
                          .first = c->first,
                          .count = c->n,
                          .words = bd_cpu_plane_words(c->k)};
}

/* y against before + factor * sum of x[k] * weight[k], for a row and all its outputs. */
static void check_row(const kernel_case *c, const char *what, uint32_t r, const float *before,
                      const double *weights, const float *factor) {
    for (uint32_t i = 0; i < c->n; i++) {
        const double f = factor != NULL ? (double)factor[i] : 1.0;
        double want = before != NULL ? (double)before[i] : 0.0, bound = fabs(want);
        for (uint32_t j = 0; j < c->k; j++) {
            const double term = f * (double)c->x[r][j] * weights[(size_t)i * c->k + j];
            want += term;
            bound += fabs(term);
        }
        if (!(fabs((double)c->y[r][i] - want) <= TOLERANCE * bound)) {
            fail_msg("%s %s, %u x %u x %u, first %u: row %u output %u is %.9g, not %.9g",
                     c->kernels->name, what, c->rows, c->n, c->k, c->first, r, i,
                     (double)c->y[r][i], want);
        }
    }
}

static void check_dot(kernel_case *c) {
    float *before[ROWS_MAX];
    make_weights(c);
    bd_cpu_dot dot = dot_of(c, c->y);
    dot.add = pick(&c->rng, 0, 1);
    for (uint32_t r = 0; r < c->rows; r++) {
        before[r] = must_calloc(c->n, sizeof(float));
        if (dot.add) memcpy(before[r], c->y[r], c->n * sizeof(float));
    }
    c->kernels->dot[c->dtype](&dot);
    for (uint32_t r = 0; r < c->rows; r++)
        check_row(c, "dot", r, before[r], c->value, NULL);
    float *alone = must_calloc(c->n, sizeof *alone); /* the last row again, without the others */
    memcpy(alone, before[c->rows - 1], c->n * sizeof *alone);
    dot.x += c->rows - 1;
    dot.y = &alone;
    dot.rows = 1;
    c->kernels->dot[c->dtype](&dot);
    assert_memory_equal(alone, c->y[c->rows - 1], c->n * sizeof *alone);
    for (uint32_t r = 0; r < c->rows; r++)
        free(before[r]);
    free(alone);
    free_case(c);
}

static void check_sign_dot(kernel_case *c) {
    float *before[ROWS_MAX];
    make_weights(c);
    make_signs(c);
    for (uint32_t r = 0; r < c->rows; r++) {
        before[r] = must_calloc(c->n, sizeof(float));
        memcpy(before[r], c->y[r], c->n * sizeof(float));
    }
    bd_cpu_signs signs = signs_of(c, c->y);
    c->kernels->sign_dot(&signs);
    const double *rows = c->sign + (size_t)c->first * c->k;
    for (uint32_t r = 0; r < c->rows; r++)
        check_row(c, "sign_dot", r, before[r], rows, c->scale);
    float *alone = before[c->rows - 1];
    signs.table += c->rows - 1;
    signs.y = &alone;
    signs.rows = 1;
    c->kernels->sign_dot(&signs);
    assert_memory_equal(alone, c->y[c->rows - 1], c->n * sizeof *alone);
    for (uint32_t r = 0; r < c->rows; r++)
        free(before[r]);
    free_case(c);
}

/* The pass over weights and bits together gives the bits of the two passes. */
static void check_dot_signs(kernel_case *c) {
    make_weights(c);
    if (c->dtype != BD_DTYPE_BF16 || c->kernels->dot_signs == NULL) {
        free_case(c);
        return;
    }
    make_signs(c);
    float *y = floats(c, c->n);
    bd_cpu_dot dot = dot_of(c, c->y);
    bd_cpu_signs signs = signs_of(c, c->y);
    dot.rows = signs.rows = 1;
    c->kernels->dot[BD_DTYPE_BF16](&dot);
    check_row(c, "dot", 0, NULL, c->value, NULL);
    c->kernels->sign_dot(&signs);
    dot.y = signs.y = &y;
    c->kernels->dot_signs(&dot, &signs);
    assert_memory_equal(y, c->y[0], c->n * sizeof *y);
    free(y);
    free_case(c);
}

static void check_conversions(kernel_case *c) {
    make_weights(c);
    make_signs(c);
    float *wide = must_calloc(c->k, sizeof *wide), *sum = must_calloc(c->k, sizeof *sum);
    for (uint32_t i = 0; i < c->n; i++) {
        c->kernels->to_f32(wide, c->raw + c->offset_bytes + i * c->stride_bytes, c->dtype, c->k);
        for (uint32_t j = 0; j < c->k; j++)
            assert_true((double)wide[j] == c->value[(size_t)i * c->k + j]);
        const uint8_t *bits = bd_cpu_plane_at(c->plane, c->k, c->first + i, 0);
        c->kernels->add_signs(sum, wide, bits, c->k, c->scale[i]);
        for (uint32_t j = 0; j < c->k; j++) {
            const float sign = (float)c->sign[(size_t)(c->first + i) * c->k + j];
            assert_true(sum[j] == wide[j] + sign * c->scale[i]);
        }
        c->kernels->add_signs(wide, wide, bits, c->k, c->scale[i]);
        assert_memory_equal(wide, sum, c->k * sizeof *sum);
    }
    free(wide), free(sum);
    free_case(c);
}

static void check_weighted_sum(kernel_case *c) {
    const uint32_t queries = pick(&c->rng, 1, BD_CPU_QUERIES),
                   tokens = pick(&c->rng, 1, BD_CPU_KV_TILE),
                   dim = 8 * pick(&c->rng, 1, BD_CPU_HEAD_DIM_MAX / 8);
    float *p = floats(c, (size_t)queries * BD_CPU_KV_TILE), *v = floats(c, (size_t)tokens * dim);
    float *acc = floats(c, (size_t)(queries - 1) * BD_CPU_HEAD_DIM_MAX + dim);
    float *before = must_calloc((size_t)queries * BD_CPU_HEAD_DIM_MAX, sizeof *before);
    memcpy(before, acc, ((size_t)(queries - 1) * BD_CPU_HEAD_DIM_MAX + dim) * sizeof *acc);
    c->kernels->weighted_sum(acc, p, queries, v, tokens, dim);
    for (uint32_t q = 0; q < queries; q++) {
        for (uint32_t d = 0; d < BD_CPU_HEAD_DIM_MAX; d++) {
            const size_t at = (size_t)q * BD_CPU_HEAD_DIM_MAX + d;
            double want = (double)before[at], bound = fabs(want);
            if (d >= dim && q == queries - 1) break;
            for (uint32_t t = 0; d < dim && t < tokens; t++) {
                const double term =
                    (double)p[q * BD_CPU_KV_TILE + t] * (double)v[(size_t)t * dim + d];
                want += term;
                bound += fabs(term);
            }
            assert_true(fabs((double)acc[at] - want) <= TOLERANCE * bound);
        }
    }
    free(p), free(v), free(acc), free(before);
}

static void for_each(void (*check)(kernel_case *), uint32_t rounds) {
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < BD_CPU_KERNELS_COUNT; i++) {
        const bd_cpu_kernels *kernels = bd_cpu_kernels_at(i);
        if (kernels == NULL) continue;
        print_message("%s\n", kernels->name);
        for (uint32_t round = 0; round < rounds; round++) {
            kernel_case c = {.rng = support_random(&seed), .kernels = kernels};
            check(&c);
        }
    }
}

static void test_dot(void **state) {
    (void)state;
    for_each(check_dot, 80);
}

static void test_sign_dot(void **state) {
    (void)state;
    for_each(check_sign_dot, 80);
}

static void test_dot_signs(void **state) {
    (void)state;
    for_each(check_dot_signs, 120);
}

static void test_conversions(void **state) {
    (void)state;
    for_each(check_conversions, 40);
}

static void test_weighted_sum(void **state) {
    (void)state;
    for_each(check_weighted_sum, 40);
}

static void test_pick(void **state) {
    (void)state;
    static const char *const names[] = {"avx512", "avx2", "neon", "plain"};
    const bd_cpu_kernels *kernels = NULL, *best = NULL;
    bd_error err;
    for (uint32_t i = 0; i < BD_CPU_KERNELS_COUNT; i++) {
        const bd_status status = bd_cpu_kernels_pick(names[i], &kernels, &err);
        if (status == BD_OK) {
            assert_string_equal(kernels->name, names[i]);
            if (best == NULL) best = kernels;
        } else {
            assert_int_equal(status, BD_E_UNSUPPORTED);
            assert_string_equal(err.subject, "cpu_kernels");
            assert_null(kernels);
        }
    }
    assert_int_equal(bd_cpu_kernels_pick(NULL, &kernels, &err), BD_OK);
    assert_ptr_equal(kernels, best);
    assert_int_equal(bd_cpu_kernels_pick("auto", &kernels, &err), BD_OK);
    assert_ptr_equal(kernels, best);
    assert_int_equal(bd_cpu_kernels_pick("", &kernels, &err), BD_E_UNSUPPORTED);
    assert_int_equal(bd_cpu_kernels_pick("sse", &kernels, &err), BD_E_UNSUPPORTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dot),          cmocka_unit_test(test_sign_dot),
        cmocka_unit_test(test_dot_signs),    cmocka_unit_test(test_conversions),
        cmocka_unit_test(test_weighted_sum), cmocka_unit_test(test_pick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
