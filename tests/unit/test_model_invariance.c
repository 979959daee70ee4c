/* test_model_invariance.c - what a sequence gets must not depend on what else is in the batch, nor
 * on how its prompt is cut. 32 sequences of the base and 14 variants run alone, then side by side
 * with whole prompts and with chunks of 1, 7 and 64: the same tokens, greedy and sampled, and
 * logits that differ by rounding only. Prompts are the goldens' texts and seeds are fixed, so that
 * no choice is a near tie by chance. */
#include "model_support.h"

enum { SEQS = 32, VARIANTS = 14, NEW = 8, PROMPT_MAX = 150 };
static const double logits_l2_max = 1e-5;

static const char *const names[VARIANTS] = {"coder",   "c",       "shell",  "sql",    "math",
                                            "writer",  "legal",   "astro",  "french", "german",
                                            "spanish", "russian", "config", "lexicon"};

typedef struct fixture {
    bd_model *model;
    ms_variant variants[VARIANTS];
    int32_t *prompts[SEQS];
    uint32_t prompt_counts[SEQS];
    const bd_overlay *overlays[SEQS];
    float *want[SEQS]; /* logits alone */
    int32_t want_ids[SEQS][NEW];
} fixture;

/* Sequence i is of variant i * 15 / 32, 0 being the base: neighbours share a variant. */
static void load_sequences(fixture *f) {
    char path[256];
    for (uint32_t i = 0; i < SEQS; i++) {
        const uint32_t variant = i * (VARIANTS + 1) / SEQS;
        snprintf(path, sizeof path, "tests/data/golden/%s.json", "base/zen-mini");
        if (variant > 0) {
            snprintf(path, sizeof path, "tests/data/golden/bitdelta/zen-mini-%s.json",
                     names[variant - 1]);
            f->overlays[i] = f->variants[variant - 1].overlay;
        }
        cJSON *golden = ms_json(path);
        const cJSON *prompt =
            cJSON_GetArrayItem(ms_get(golden, "prompts"), (int)(i % 5)); /* the sixth is long */
        f->prompts[i] = ms_ids(ms_get(prompt, "ids"), &f->prompt_counts[i]);
        assert_true(f->prompt_counts[i] <= PROMPT_MAX);
        cJSON_Delete(golden);
    }
}

static int setup(void **state) {
    bd_error err = {0};
    char path[256];
    uint32_t page = 0;
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    bd_model_options options = ms_options("demo/zen-mini");
    options.delta_slots = VARIANTS;
    MS_OK(bd_model_open(&options, &f->model, &err), err);
    for (int i = 0; i < VARIANTS; i++) {
        snprintf(path, sizeof path, "demo/deltas/zen-mini-%s", names[i]);
        page += ms_variant_open(f->model, path, page, 0, &f->variants[i]);
    }
    load_sequences(f);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    for (int i = 0; i < SEQS; i++) {
        free(f->prompts[i]);
        free(f->want[i]);
    }
    for (int i = 0; i < VARIANTS; i++)
        ms_variant_close(&f->variants[i]);
    bd_model_close(f->model);
    free(f);
    return 0;
}

static ms_run make_run(const fixture *f, uint32_t i) {
    const bd_sampling sampled = {
        .temperature = 0.8f, .top_p = 0.95f, .top_k = 50, .seed = 1000 + i, .choice = i % 3};
    ms_run run = {
        .prompt = f->prompts[i],
        .prompt_count = f->prompt_counts[i],
        .new_count = NEW,
        .overlay = f->overlays[i],
        .sampling = i % 2 ? sampled : (bd_sampling){.top_p = 1},
    };
    run.logits = calloc((size_t)NEW * bd_model_config_of(f->model)->vocab, sizeof *run.logits);
    assert_non_null(run.logits);
    return run;
}

static void run_alone(void **state) {
    fixture *f = *state;
    for (uint32_t i = 0; i < SEQS; i++) {
        ms_run run = make_run(f, i);
        ms_run_all(f->model, &run, 1, MS_ROWS_MAX);
        memcpy(f->want_ids[i], run.ids, sizeof f->want_ids[i]);
        f->want[i] = run.logits;
    }
}

static void run_together(fixture *f, uint32_t chunk) {
    const uint32_t vocab = bd_model_config_of(f->model)->vocab;
    ms_run runs[SEQS];
    double worst = 0, *want = calloc(vocab, sizeof *want);
    assert_non_null(want);
    for (uint32_t i = 0; i < SEQS; i++)
        runs[i] = make_run(f, i);
    ms_run_all(f->model, runs, SEQS, chunk);
    for (uint32_t i = 0; i < SEQS; i++) {
        for (uint32_t t = 0; t < NEW; t++) {
            if (runs[i].ids[t] != f->want_ids[i][t])
                fail_msg("chunks of %u: sequence %u, token %u differs", chunk, i, t);
            for (uint32_t j = 0; j < vocab; j++)
                want[j] = (double)f->want[i][t * vocab + j];
            worst = fmax(worst, ms_relative_l2(runs[i].logits + (size_t)t * vocab, want, vocab));
        }
        free(runs[i].logits);
    }
    free(want);
    print_message("chunks of %u: worst relative L2 %.2e\n", chunk, worst);
    if (!(worst <= logits_l2_max)) fail_msg("chunks of %u: logits are off by %g", chunk, worst);
}

static void mixed_whole_prompts(void **state) {
    run_together(*state, PROMPT_MAX);
}
static void mixed_chunks_of_64(void **state) {
    run_together(*state, 64);
}
static void mixed_chunks_of_7(void **state) {
    run_together(*state, 7);
}
static void mixed_chunks_of_1(void **state) {
    run_together(*state, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(run_alone),          cmocka_unit_test(mixed_whole_prompts),
        cmocka_unit_test(mixed_chunks_of_64), cmocka_unit_test(mixed_chunks_of_7),
        cmocka_unit_test(mixed_chunks_of_1),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
