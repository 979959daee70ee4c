/* The CPU sampler: kept sets against a sorting reference, distributions by chi-square against exact
 * probabilities, greedy and edits, log-probabilities and alternatives against float64, faults.
 * Logits are written into the backend's buffer. */
#include "backend_cpu_support.h"

#include "bitdelta/base/rng.h"

typedef struct bench { /* one row of logits, sampled many times */
    fixture f;
    built_step *b;
    float *logits;
    uint32_t vocab;
} bench;

static bench *bench_open(uint64_t seed, uint32_t vocab, uint32_t threads) {
    bench *s = must_calloc(1, sizeof *s);
    s->f.rng = seed;
    random_config(&s->f, 50);
    s->f.config.vocab = vocab;
    s->f.config.layers = 1;
    s->f.options.thread_count = threads;
    s->f.options.rows_max = STEP_ROWS;
    s->f.options.seqs_max = STEP_ROWS;
    s->f.options.delta_bytes = 4096;
    fixture_open(&s->f, false);
    s->b = step_create(&s->f);
    s->b->step.overlay_count = 0;
    s->vocab = vocab;
    s->logits = must_calloc(vocab, sizeof *s->logits);
    return s;
}

static void bench_close(bench *s) {
    fixture_close(&s->f);
    free(s->b), free(s->logits), free(s);
}

static bd_token_result run_row(bench *s, const bd_sampling *sampling, uint32_t position,
                               int32_t target, uint8_t top, const bd_logit_edit *edits,
                               uint32_t edit_count) {
    bd_error err;
    bd_token_result result;
    bd_step *step = &s->b->step;
    step->row_count = step->seq_count = step->segment_count = 0;
    step_add(&s->f, s->b, -1, position, 1);
    s->b->seqs[0].sampling = *sampling;
    s->b->seqs[0].edits = edits;
    s->b->seqs[0].edit_count = edit_count;
    s->b->logits_rows[0] = (bd_logits_row){.target = target, .top_count = top};
    step->logits_row_count = 1;
    assert_int_equal(s->f.backend->ops->step_begin(s->f.backend, step, &err), BD_OK);
    memcpy(bd_cpu_f32(s->f.cpu, BD_CPU_LOGITS), s->logits, s->vocab * sizeof(float));
    assert_int_equal(s->f.backend->ops->sample(s->f.backend, step, &err), BD_OK);
    assert_memory_equal(bd_cpu_f32(s->f.cpu, BD_CPU_LOGITS), s->logits,
                        s->vocab * sizeof(float)); /* stay raw */
    assert_int_equal(s->f.backend->ops->step_wait(s->f.backend, step, 0, &result, &err), BD_OK);
    return result;
}

static uint32_t *sorted_ids(const float *logits,
                            uint32_t vocab) { /* descending, ties to the lowest id */
    uint32_t *ids = must_calloc(vocab, sizeof *ids);
    for (uint32_t i = 0; i < vocab; i++) {
        uint32_t at = i;
        for (; at > 0 && logits[ids[at - 1]] < logits[i]; at--)
            ids[at] = ids[at - 1];
        ids[at] = i;
    }
    return ids;
}

/* Exact probabilities after temperature, top-k, top-p, min-p. */
static double *ref_probabilities(const float *logits, uint32_t vocab, const bd_sampling *sampling) {
    uint32_t *ids = sorted_ids(logits, vocab), keep = vocab;
    double *p = must_calloc(vocab, sizeof *p), mass = 0.0, run = 0.0;
    for (uint32_t i = 0; i < vocab; i++) {
        p[ids[i]] =
            exp(((double)logits[ids[i]] - (double)logits[ids[0]]) / (double)sampling->temperature);
    }
    if (sampling->top_k > 0 && sampling->top_k < keep) keep = sampling->top_k;
    for (uint32_t i = 0; i < keep; i++)
        mass += p[ids[i]];
    if (sampling->top_p < 1.0f) {
        uint32_t kept = 0;
        do
            run += p[ids[kept++]];
        while (kept < keep && run < (double)sampling->top_p * mass);
        keep = kept;
    }
    mass = 0.0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (i >= keep || p[ids[i]] < (double)sampling->min_p) p[ids[i]] = 0.0;
        mass += p[ids[i]];
    }
    for (uint32_t i = 0; i < vocab; i++)
        p[i] /= mass;
    free(ids);
    return p;
}

static void random_logits(bench *s, uint32_t levels) {
    for (uint32_t i = 0; i < s->vocab; i++) {
        s->logits[i] = levels > 0 ? (float)pick(&s->f.rng, 0, levels) - 2.0f
                                  : (float)(2.0 * normal(&s->f.rng));
    }
}

static bd_sampling random_sampling(uint64_t *rng) {
    static const float top_ps[] = {0.0f, 0.1f, 0.5f, 0.9f, 0.999f, 1.0f, 1.0f};
    static const float min_ps[] = {0.0f, 0.0f, 0.05f, 0.5f, 1.0f};
    return (bd_sampling){.temperature = (float)(0.2 + 1.5 * uniform(rng)),
                         .top_p = top_ps[pick(rng, 0, 6)],
                         .min_p = min_ps[pick(rng, 0, 4)],
                         .top_k = pick(rng, 0, 1) * pick(rng, 1, 30),
                         .seed = support_random(rng),
                         .choice = pick(rng, 0, 5)};
}

/* The drawn token is where the uniform falls in id order, so the sets and masses must agree
 * exactly. */
static void test_draws_are_exact(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t round = 0; round < 60; round++) {
        bench *s = bench_open(support_random(&seed), pick(&seed, 1, 400), 1);
        for (uint32_t i = 0; i < 40; i++) {
            random_logits(s, i % 2 == 0 ? 0 : pick(&seed, 1, 8)); /* many ties, or none */
            const bd_sampling sampling = random_sampling(&seed);
            const uint32_t position = pick(&seed, 0, 300);
            double *p = ref_probabilities(s->logits, s->vocab, &sampling);
            const double u = bd_rng_uniform(sampling.seed, sampling.choice, position);
            const bd_token_result got = run_row(s, &sampling, position, -1, 0, NULL, 0);
            assert_in_range(got.id, 0, s->vocab - 1);
            if (!(p[got.id] > 0.0)) fail_msg("token %d is outside the set (round %u)", got.id, i);
            double below = 0.0;
            for (int32_t t = 0; t < got.id; t++)
                below += p[t];
            if (u < below - 1e-9 || u > below + p[got.id] + 1e-9) {
                fail_msg("uniform %.12g is not in [%.12g, %.12g) of token %d", u, below,
                         below + p[got.id], got.id);
            }
            free(p);
        }
        bench_close(s);
    }
}

/* Where the cumulated probabilities of a set meet top-p within rounding, one token more or less is
 * right; none of the values above comes that close, so a wrong set shows as a draw outside it. Here
 * every member must come up. */
static void test_chi_square(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t round = 0; round < 8; round++) {
        bench *s = bench_open(support_random(&seed), 40, 1);
        random_logits(s, 0);
        bd_sampling sampling = random_sampling(&seed);
        if (round == 0) sampling = (bd_sampling){.temperature = 1.0f, .top_p = 1.0f};
        const uint32_t draws = 4000;
        uint32_t counts[40] = {0};
        for (uint32_t i = 0; i < draws; i++) {
            sampling.seed = support_random(&seed);
            counts[run_row(s, &sampling, i % 100, -1, 0, NULL, 0).id]++;
        }
        double *p = ref_probabilities(s->logits, 40, &sampling), chi = 0.0, rest = 0.0,
               rest_seen = 0.0;
        uint32_t cells = 0;
        for (uint32_t i = 0; i < 40; i++) {
            const double expected = p[i] * draws;
            if (expected == 0.0) assert_int_equal(counts[i], 0);
            if (expected < 8.0) {
                rest += expected;
                rest_seen += counts[i];
                continue;
            }
            chi += (counts[i] - expected) * (counts[i] - expected) / expected;
            cells++;
        }
        if (rest >= 1.0) {
            chi += (rest_seen - rest) * (rest_seen - rest) / rest;
            cells++;
        }
        /* Wilson-Hilferty: six standard deviations, one false alarm in 1e9 rounds. */
        const double k = cells > 1 ? cells - 1.0 : 1.0,
                     z = (cbrt(chi / k) - (1.0 - 2.0 / (9.0 * k))) / sqrt(2.0 / (9.0 * k));
        if (z > 6.0) fail_msg("chi-square %.1f with %u cells", chi, cells);
        free(p);
        bench_close(s);
    }
}

static void test_greedy_and_edits(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t round = 0; round < 300; round++) {
        bench *s = bench_open(support_random(&seed), pick(&seed, 2, 60), 1);
        random_logits(s, pick(&seed, 0, 5));
        bd_logit_edit edits[3];
        float *edited = must_calloc(s->vocab, sizeof *edited);
        memcpy(edited, s->logits, s->vocab * sizeof *edited);
        const uint32_t count = s->vocab >= 3 ? pick(&seed, 0, 3) : 0;
        for (uint32_t e = 0; e < count; e++) {
            const float adds[] = {0.0f, 1.5f, -100.0f, -INFINITY, 100.0f};
            edits[e] = (bd_logit_edit){(int32_t)e, pick(&seed, 0, 1) ? 1.0f : 1.7f,
                                       adds[pick(&seed, 0, 4)]};
            float l = s->logits[e];
            l = l > 0.0f ? l / edits[e].repetition : l * edits[e].repetition;
            edited[e] = l + edits[e].add;
        }
        uint32_t *ids = sorted_ids(edited, s->vocab);
        /* Temperature 0 ignores everything else; top_p 0 and top_k 1 leave the top token; so does a
         * tiny temperature. */
        const bd_sampling ways[] = {
            {.temperature = 0.0f, .top_p = 0.5f, .top_k = 7, .seed = 5},
            {.temperature = 1.0f, .top_p = 0.0f, .seed = support_random(&seed)},
            {.temperature = 1.3f, .top_p = 1.0f, .top_k = 1, .seed = support_random(&seed)},
            {.temperature = 1e-30f, .top_p = 1.0f, .seed = support_random(&seed)}};
        for (uint32_t w = 0; w < 4; w++) {
            assert_int_equal(run_row(s, &ways[w], 3, -1, 0, edits, count).id, ids[0]);
        }
        free(ids), free(edited);
        bench_close(s);
    }
}

static void test_everything_banned(void **state) {
    (void)state;
    bench *s = bench_open(support_seed(), 3, 1);
    const bd_logit_edit edits[3] = {
        {0, 1.0f, -INFINITY}, {1, 1.0f, -INFINITY}, {2, 1.0f, -INFINITY}};
    s->logits[1] = 1.0f;
    const bd_sampling sampling = {.temperature = 1.0f, .top_p = 1.0f};
    const bd_token_result got = run_row(s, &sampling, 0, -1, 0, edits, 3);
    assert_int_equal(got.id, 1);
    assert_int_equal(got.fault, 0);
    bench_close(s);
}

static void test_reports(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t round = 0; round < 200; round++) {
        bench *s = bench_open(support_random(&seed), pick(&seed, 1, 300), 1);
        random_logits(s, round % 2 * 6);
        if (round % 3 == 0 && s->vocab > 1)
            s->logits[s->vocab - 1] = -INFINITY; /* beyond the variant's vocabulary */
        uint32_t *ids = sorted_ids(s->logits, s->vocab);
        double sum = 0.0;
        for (uint32_t i = 0; i < s->vocab; i++)
            sum += exp((double)s->logits[i]);
        const uint8_t top = (uint8_t)pick(&seed, 0, BD_TOP_MAX);
        const uint32_t place = pick(&seed, 0, s->vocab - 1);
        const bd_logit_edit edit = {0, 2.0f, 50.0f}; /* must not show */
        const bd_sampling sampling = {.temperature = 3.0f, .top_p = 0.3f, .top_k = 2};
        const bd_token_result got = run_row(s, &sampling, 0, (int32_t)ids[place], top, &edit, 1);
        assert_int_equal(got.id, ids[place]);
        assert_int_equal(got.rank, place + 1);
        assert_int_equal(got.fault, 0);
        const double want = (double)s->logits[ids[place]] - log(sum);
        assert_true(isinf(want) ? isinf(got.logprob) : fabs((double)got.logprob - want) < 1e-5);
        assert_int_equal(got.top_count, top < s->vocab ? top : s->vocab);
        for (uint32_t i = 0; i < got.top_count; i++) {
            assert_int_equal(got.top_ids[i], ids[i]);
            const double each = (double)s->logits[ids[i]] - log(sum);
            assert_true(isinf(each) ? isinf(got.top_logprobs[i])
                                    : fabs((double)got.top_logprobs[i] - each) < 1e-5);
            if (i == place)
                assert_true(got.top_logprobs[i] == got.logprob ||
                            isinf(got.logprob)); /* the same number */
        }
        free(ids);
        bench_close(s);
    }
}

static void test_faults(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    const bd_sampling sampling = {.temperature = 1.0f, .top_p = 0.9f};
    bench *s = bench_open(seed, 37, 1);
    random_logits(s, 0);
    s->logits[pick(&seed, 0, 36)] = NAN;
    assert_int_equal(run_row(s, &sampling, 0, -1, 5, NULL, 0).fault, 1);
    assert_int_equal(run_row(s, &sampling, 0, 4, 5, NULL, 0).fault, 1);
    random_logits(s, 0);
    s->logits[5] = INFINITY;
    assert_int_equal(run_row(s, &sampling, 0, -1, 5, NULL, 0).fault, 1);
    for (uint32_t i = 0; i < 37; i++)
        s->logits[i] = 3e38f; /* finite, though sums of exponents tempt to overflow */
    const bd_token_result got = run_row(s, &sampling, 0, -1, 5, NULL, 0);
    assert_int_equal(got.fault, 0);
    assert_true(fabs((double)got.logprob + log(37.0)) < 1e-5 || (double)got.logprob == 0.0);
    bench_close(s);
}

/* Many rows at once give what each gives alone, whatever the thread. */
static void test_rows_and_threads(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t threads = 1; threads <= 3; threads++) {
        bench *s = bench_open(support_random(&seed), 2000, threads);
        bd_error err;
        bd_token_result together[30];
        float *all = must_calloc(30 * 2000, sizeof *all);
        bd_sampling samplings[30];
        bd_step *step = &s->b->step;
        for (uint32_t i = 0; i < 30; i++) {
            random_logits(s, 0);
            memcpy(all + i * 2000, s->logits, 2000 * sizeof *all);
            samplings[i] = random_sampling(&seed);
            step_add(&s->f, s->b, -1, i, 1);
            s->b->seqs[i].sampling = samplings[i];
            s->b->logits_rows[i] =
                (bd_logits_row){.row = i, .seq = i, .target = -1, .top_count = 3};
        }
        step->logits_row_count = 30;
        assert_int_equal(s->f.backend->ops->step_begin(s->f.backend, step, &err), BD_OK);
        memcpy(bd_cpu_f32(s->f.cpu, BD_CPU_LOGITS), all, 30 * 2000 * sizeof *all);
        assert_int_equal(s->f.backend->ops->sample(s->f.backend, step, &err), BD_OK);
        assert_int_equal(s->f.backend->ops->step_wait(s->f.backend, step, 0, together, &err),
                         BD_OK);
        for (uint32_t i = 0; i < 30; i++) {
            memcpy(s->logits, all + i * 2000, 2000 * sizeof *all);
            const bd_token_result alone = run_row(s, &samplings[i], i, -1, 3, NULL, 0);
            assert_memory_equal(&alone, &together[i], sizeof alone);
        }
        free(all);
        bench_close(s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draws_are_exact),  cmocka_unit_test(test_chi_square),
        cmocka_unit_test(test_greedy_and_edits), cmocka_unit_test(test_everything_banned),
        cmocka_unit_test(test_reports),          cmocka_unit_test(test_faults),
        cmocka_unit_test(test_rows_and_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
