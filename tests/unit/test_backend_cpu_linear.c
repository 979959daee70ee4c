/* Linear layers and the head of the CPU backend against double-precision products with the merged
 * weights: mixed segments, 0-4 planes, LoRA, biases, all dtypes, every way of multiplying and row
 * counts on both sides of where one gives way to another, one to three threads. */
#include "backend_cpu_support.h"

/* Float32 sums of up to 1000 terms in eight lanes stay well below this, relative to the sum of
 * absolute terms. */
#define TOLERANCE 2e-6

typedef struct checker {
    double *x, *y, *bound, *other;
} checker;

static checker checker_create(void) {
    return (checker){must_calloc(4096, 8), must_calloc(4096, 8), must_calloc(4096, 8),
                     must_calloc(4096, 8)};
}

static void checker_destroy(checker *c) {
    free(c->x), free(c->y), free(c->bound), free(c->other);
}

static void fill_rows(fixture *f, bd_cpu_buffer which, uint32_t rows, uint32_t dim) {
    for (size_t i = 0; i < (size_t)rows * dim; i++) {
        bd_cpu_f32(f->cpu, which)[i] =
            (float)(normal(&f->rng) + (pick(&f->rng, 0, 50) == 0 ? 10.0 : 0.5));
    }
}

static void check_plain_group(fixture *f, const bd_step *step, uint32_t layer, bd_group group,
                              checker *c) {
    static const bd_cpu_buffer inputs[4] = {BD_CPU_NORMED, BD_CPU_ATTN, BD_CPU_NORMED, BD_CPU_ACT};
    const uint32_t first = group == BD_GROUP_QKV ? BD_LINEAR_Q
                           : group == BD_GROUP_O ? BD_LINEAR_O
                                                 : BD_LINEAR_DOWN;
    const uint32_t count = group == BD_GROUP_QKV ? 3 : 1;
    const bd_cpu_buffer outputs[3] = {group == BD_GROUP_QKV ? BD_CPU_Q : BD_CPU_PROJ, BD_CPU_K,
                                      BD_CPU_V};
    bd_error err;
    const uint32_t k = linear_k_of(&f->config, first);
    fill_rows(f, inputs[group], step->row_count, k);
    assert_int_equal(f->backend->ops->linear(f->backend, step, layer, group, &err), BD_OK);
    for (uint32_t r = 0; r < step->row_count; r++) {
        to_double(c->x, bd_cpu_row(f->cpu, inputs[group], r, k), k);
        for (uint32_t t = 0; t < count; t++) {
            const uint32_t n = linear_n_of(&f->config, first + t);
            char what[64];
            snprintf(what, sizeof what, "group %d matrix %u row %u", (int)group, t, r);
            ref_linear(f, overlay_of(f, step, r), layer, first + t, c->x, c->y, c->bound);
            check_close(what, bd_cpu_row(f->cpu, outputs[t], r, n), c->y, c->bound, n, TOLERANCE);
        }
    }
}

static void check_gated_group(fixture *f, const bd_step *step, uint32_t layer, checker *c) {
    bd_error err;
    const uint32_t k = f->config.hidden, n = f->config.ffn;
    fill_rows(f, BD_CPU_NORMED, step->row_count, k);
    assert_int_equal(f->backend->ops->linear(f->backend, step, layer, BD_GROUP_GATE_UP, &err),
                     BD_OK);
    double *up_bound = must_calloc(n, sizeof *up_bound);
    for (uint32_t r = 0; r < step->row_count; r++) {
        to_double(c->x, bd_cpu_row(f->cpu, BD_CPU_NORMED, r, k), k);
        ref_linear(f, overlay_of(f, step, r), layer, BD_LINEAR_GATE, c->x, c->y, c->bound);
        ref_linear(f, overlay_of(f, step, r), layer, BD_LINEAR_UP, c->x, c->other, up_bound);
        for (uint32_t i = 0; i < n; i++) {
            const double gate = ref_activation(&f->config, c->y[i]);
            c->bound[i] = c->bound[i] * 1.2 * fabs(c->other[i]) + fabs(gate) * up_bound[i] +
                          0.1 * fabs(c->other[i]);
            c->y[i] = gate * c->other[i];
        }
        check_close("gate up", bd_cpu_row(f->cpu, BD_CPU_ACT, r, n), c->y, c->bound, n, TOLERANCE);
    }
    free(up_bound);
}

static void check_head(fixture *f, built_step *b, checker *c) {
    bd_error err;
    const bd_model_config *m = &f->config;
    b->step.logits_row_count = pick(&f->rng, 1, b->step.row_count);
    for (uint32_t i = 0; i < b->step.logits_row_count; i++) {
        const uint32_t row = pick(&f->rng, 0, b->step.row_count - 1);
        b->logits_rows[i] = (bd_logits_row){.row = row, .seq = b->seq_of_row[row], .target = -1};
    }
    assert_int_equal(f->backend->ops->step_begin(f->backend, &b->step, &err), BD_OK);
    fill_rows(f, BD_CPU_NORMED, b->step.row_count, m->hidden);
    assert_int_equal(f->backend->ops->head(f->backend, &b->step, &err), BD_OK);
    float *got = must_calloc(m->vocab, sizeof *got);
    for (uint32_t i = 0; i < b->step.logits_row_count; i++) {
        const known_overlay *o = overlay_of(f, &b->step, b->logits_rows[i].row);
        const known_matrix *w = m->tied ? &f->embed : &f->head;
        to_double(c->x, bd_cpu_row(f->cpu, BD_CPU_NORMED, b->logits_rows[i].row, m->hidden),
                  m->hidden);
        const uint32_t rows = o != NULL ? o->overlay.block_rows : m->vocab;
        for (uint32_t n = 0; n < m->vocab; n += rows) {
            known_matrix part = *w;
            part.n = m->vocab - n < rows ? m->vocab - n : rows;
            part.value = w->value + (size_t)n * m->hidden;
            ref_matrix(&part, o != NULL ? &o->head[n / rows] : NULL, NULL, c->x, c->y + n,
                       c->bound + n);
        }
        for (uint32_t n = 0; n < m->vocab; n++)
            c->y[n] = cap(c->y[n], m->logit_softcap);
        assert_int_equal(f->backend->ops->logits_get(f->backend, i, got, &err), BD_OK);
        const uint32_t known = o != NULL ? o->overlay.vocab : m->vocab;
        check_close("logit", got, c->y, c->bound, known, TOLERANCE);
        for (uint32_t n = known; n < m->vocab; n++)
            assert_true(isinf(got[n]) && got[n] < 0.0f);
    }
    assert_int_equal(f->backend->ops->logits_get(f->backend, b->step.logits_row_count, got, &err),
                     BD_E_ARGUMENT);
    free(got);
}

static void run_model(uint64_t seed, uint32_t kernels, uint32_t threads, bool wide) {
    fixture f = {.rng = seed};
    checker c = checker_create();
    random_config(&f, 300);
    if (wide) { /* several tiles deep and several blocks wide */
        f.config.layers = 1;
        f.config.hidden = 8 * pick(&f.rng, 60, 110);
        f.config.ffn = 8 * pick(&f.rng, 60, 110);
        f.config.vocab = pick(&f.rng, 500, 700);
        f.config.tied = true;
    }
    f.options.thread_count = threads;
    f.options.delta_bytes = 128u << 20;
    f.options.rows_max = f.options.seqs_max = f.options.logits_rows_max = STEP_ROWS;
    fixture_open(&f, kernels);
    for (uint32_t i = 0; i < OVERLAYS; i++)
        make_overlay(&f, &f.overlays[i], i);
    const uint32_t end = f.cpu->kernels->short_rows;
    assert_true(end > BD_CPU_SIGN_ROWS && 2 * end + 8 <= STEP_ROWS);
    for (uint32_t round = 0; round < (wide ? 2u : 6u); round++) {
        built_step *b = step_create(&f);
        step_random(&f, b, round % 2 == 0 ? 12 : 2 * end);
        if (round == 0) { /* one variant alone, long: its tile is made in place */
            memset(&b->step.row_count, 0, sizeof b->step.row_count);
            b->step.seq_count = b->step.segment_count = 0;
            step_add(&f, b, 1, 0, pick(&f.rng, end, 2 * end));
        }
        if (round == 1) { /* more rows of short segments than there is room for sum tables */
            while (b->step.row_count < STEP_ROWS) {
                step_add(&f, b, (int32_t)(b->step.seq_count % 2), 0,
                         b->step.row_count % 5 < 4 ? 1 : 2);
                if (b->step.row_count == STEP_ROWS - 1) break;
            }
        }
        bd_error err;
        assert_int_equal(f.backend->ops->step_begin(f.backend, &b->step, &err), BD_OK);
        const uint32_t layer = pick(&f.rng, 0, f.config.layers - 1);
        check_plain_group(&f, &b->step, layer, BD_GROUP_QKV, &c);
        check_plain_group(&f, &b->step, layer, BD_GROUP_O, &c);
        check_plain_group(&f, &b->step, layer, BD_GROUP_DOWN, &c);
        check_gated_group(&f, &b->step, layer, &c);
        check_head(&f, b, &c);
        free(b);
    }
    fixture_close(&f);
    checker_destroy(&c);
}

static void test_small_shapes(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < 18; i++)
        run_model(support_random(&seed), i, 1 + i / 2 % 3, false);
}

static void test_wide_shapes(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < 4; i++)
        run_model(support_random(&seed), i, 1 + i % 3, true);
}

/* Whether the attention output's matrix of a variant has planes. */
static bool has_planes(const fixture *f, int32_t overlay) {
    return overlay >= 0 && f->overlays[overlay].linear_table[BD_LINEAR_O].plane_count > 0;
}

/* How the last operator multiplied a segment: by its bits, on top of the base, or rebuilt. */
static bool was_short(const fixture *f, uint32_t segment) {
    const bd_cpu_run *runs = f->cpu->buffers[BD_CPU_RUNS];
    return runs[segment].table_row != BD_CPU_NO_TABLE;
}

static void check_step(fixture *f, built_step *b, checker *c) {
    bd_error err;
    assert_int_equal(f->backend->ops->step_begin(f->backend, &b->step, &err), BD_OK);
    check_plain_group(f, &b->step, 0, BD_GROUP_O, c);
}

/* A segment of `rows` rows, alone and beside single rows of the others. */
static void check_count(fixture *f, checker *c, int32_t overlay, uint32_t rows) {
    for (uint32_t beside = 0; beside < 4; beside += 3) {
        built_step *b = step_create(f);
        step_add(f, b, overlay, 0, rows);
        for (int32_t i = -1; i + 1 < (int32_t)beside; i++)
            step_add(f, b, i == overlay ? 2 : i, 0, 1);
        check_step(f, b, c);
        assert_int_equal(was_short(f, 0),
                         has_planes(f, overlay) && rows < f->cpu->kernels->short_rows);
        free(b);
    }
}

/* One layer, the attention output's matrix more than a tile deep at times. */
static void open_one_layer(fixture *f, uint32_t kernels) {
    bd_model_config *m = &f->config;
    random_config(f, 40);
    m->layers = m->kv_heads = 1;
    m->head_dim = m->rope.rotary_dim = 64;
    m->heads = pick(&f->rng, 1, 12);
    m->hidden = 8 * pick(&f->rng, 1, 30); /* planes come in whole bytes */
    m->ffn = 8 * pick(&f->rng, 1, 30);
    f->options.seqs_max = STEP_ROWS;
    fixture_open(f, kernels);
    for (uint32_t i = 0; i < OVERLAYS; i++)
        make_overlay(f, &f->overlays[i], i);
}

/* On both sides of every count at which rows are cut into passes, or multiplied in another way. */
static void test_row_counts(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < BD_CPU_KERNELS_COUNT; i++) {
        fixture f = {.rng = support_random(&seed)};
        checker c = checker_create();
        open_one_layer(&f, i);
        const uint32_t end = f.cpu->kernels->short_rows;
        const uint32_t counts[] = {1,
                                   BD_CPU_SIGN_ROWS - 1,
                                   BD_CPU_SIGN_ROWS,
                                   BD_CPU_SIGN_ROWS + 1,
                                   BD_CPU_BAND_ROWS - 1,
                                   BD_CPU_BAND_ROWS,
                                   BD_CPU_BAND_ROWS + 1,
                                   2 * BD_CPU_BAND_ROWS,
                                   3 * BD_CPU_BAND_ROWS + 1,
                                   end - 1,
                                   end,
                                   end + 1,
                                   BD_CPU_TABLE_ROWS_MAX + 1};
        for (uint32_t j = 0; j < sizeof counts / sizeof counts[0]; j++) {
            for (int32_t overlay = -1; overlay < 2; overlay++)
                check_count(&f, &c, overlay, counts[j]);
        }
        fixture_close(&f);
        checker_destroy(&c);
    }
}

/* When sum tables run out, single rows have theirs and what lies before them has none. */
static void test_few_rows_first(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < 2 * BD_CPU_KERNELS_COUNT; i++) {
        fixture f = {.rng = support_random(&seed)};
        checker c = checker_create();
        open_one_layer(&f, i);
        const uint32_t rows = f.cpu->kernels->short_rows - 1;
        built_step *b = step_create(&f);
        while (b->step.row_count + rows <= BD_CPU_TABLE_ROWS_MAX)
            step_add(&f, b, (int32_t)(b->step.segment_count % 2), 0, rows);
        while (b->step.row_count < BD_CPU_TABLE_ROWS_MAX + 4)
            step_add(&f, b, (int32_t)(b->step.segment_count % 2), 0, 1);
        check_step(&f, b, &c);
        for (uint32_t s = 0; rows >= BD_CPU_FEW_ROWS && s < b->step.segment_count; s++) {
            const bd_segment *g = &b->step.segments[s];
            if (g->row_count == 1) assert_int_equal(was_short(&f, s), has_planes(&f, g->overlay));
        }
        free(b);
        fixture_close(&f);
        checker_destroy(&c);
    }
}

/* A row's product is the same bits whatever other short rows are in the batch, and however many. */
static void check_rows_do_not_mix(uint64_t seed, uint32_t kernels) {
    fixture f = {.rng = seed};
    bd_error err;
    random_config(&f, 40);
    f.config.layers = 1;
    f.options.seqs_max = STEP_ROWS;
    fixture_open(&f, kernels);
    for (uint32_t i = 0; i < OVERLAYS; i++)
        make_overlay(&f, &f.overlays[i], i);
    const uint32_t hidden = f.config.hidden, q = f.cpu->q_dim;
    float *x = must_calloc(hidden, 4), *alone = must_calloc(q, 4);
    for (uint32_t i = 0; i < hidden; i++)
        x[i] = (float)normal(&f.rng);
    for (int32_t overlay = -1; overlay < (int32_t)OVERLAYS; overlay++) {
        for (uint32_t others = 0; others < BD_CPU_TABLE_ROWS_MAX; others += others < 7 ? 1 : 12) {
            built_step *b = step_create(&f);
            for (uint32_t i = 0; i < others; i++)
                step_add(&f, b, (int32_t)pick(&f.rng, 0, OVERLAYS) - 1, 0, 1);
            step_add(&f, b, overlay, 0, 1);
            assert_int_equal(f.backend->ops->step_begin(f.backend, &b->step, &err), BD_OK);
            fill_rows(&f, BD_CPU_NORMED, others, hidden);
            memcpy(bd_cpu_row(f.cpu, BD_CPU_NORMED, others, hidden), x, hidden * sizeof *x);
            assert_int_equal(f.backend->ops->linear(f.backend, &b->step, 0, BD_GROUP_QKV, &err),
                             BD_OK);
            const float *got = bd_cpu_row(f.cpu, BD_CPU_Q, others, q);
            if (others == 0) memcpy(alone, got, q * sizeof *got);
            assert_memory_equal(got, alone, q * sizeof *got);
            free(b);
        }
    }
    free(x), free(alone);
    fixture_close(&f);
}

static void test_rows_do_not_mix(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < 2 * BD_CPU_KERNELS_COUNT; i++)
        check_rows_do_not_mix(support_random(&seed), i);
}

static void test_lora_rank_limit(void **state) {
    (void)state;
    fixture f = {.rng = support_seed()};
    bd_error err;
    random_config(&f, 40);
    fixture_open(&f, 0);
    make_overlay(&f, &f.overlays[0], 0);
    f.overlays[0].linear_table[BD_LINEAR_V].lora_rank = BD_CPU_LORA_RANK_MAX + 1;
    built_step *b = step_create(&f);
    step_add(&f, b, 0, 0, 1);
    assert_int_equal(f.backend->ops->step_begin(f.backend, &b->step, &err), BD_OK);
    fill_rows(&f, BD_CPU_NORMED, 1, f.config.hidden);
    assert_int_equal(f.backend->ops->linear(f.backend, &b->step, 0, BD_GROUP_QKV, &err),
                     BD_E_UNSUPPORTED);
    assert_string_equal(err.subject, "lora_rank");
    free(b);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_shapes),    cmocka_unit_test(test_wide_shapes),
        cmocka_unit_test(test_row_counts),      cmocka_unit_test(test_few_rows_first),
        cmocka_unit_test(test_rows_do_not_mix), cmocka_unit_test(test_lora_rank_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
