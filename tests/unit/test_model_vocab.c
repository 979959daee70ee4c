/* test_model_vocab.c - what fine-tunes do to the vocabulary, each of fresh random data, against a
 * float64 forward pass (model_reference.h): rows added to it, embedding and head in full, a head of
 * its own over a tied base, and fewer rows than the base; all in one batch with the base, on one
 * rank and split over several. And each contradiction refused by name. */
#include "model_reference.h"
#include "tp_support.h"

enum { PROMPTS = 2, KINDS = 5, WINDOW = 64 };
static const double logits_l2_max = 1e-5;
static const uint32_t prompt_tokens[PROMPTS] = {3, 40}; /* rows multiplied as bits, and rebuilt */

typedef struct kind {
    const char *what;
    uint32_t extra_max, planes;
    bool full, own_head;
    int32_t vocab_change; /* of config.json, beyond the added rows */
} kind;

static const kind kinds[KINDS] = {
    {"added rows", 256, 1, false, false, 0},           {"tables in full", 0, 1, true, false, 0},
    {"full and added", 40, 1, true, false, 0},         {"a head of its own", 17, 2, false, true, 0},
    {"a smaller vocabulary", 0, 1, false, false, -77},
};

static void arch_path(char *out, size_t out_bytes, const char *arch) {
    snprintf(out, out_bytes, "tests/data/arch/%s", arch);
}

static bd_model *open_model(const char *path, uint32_t ranks, uint32_t extra_vocab_max,
                            const bd_backend_ops *ops) {
    bd_error err = {0};
    bd_model *model;
    bd_model_options options = ms_options(path);
    options.rank_count = ranks;
    options.kv_tokens = 1024;
    options.delta_pages = 200;
    options.extra_vocab_max = extra_vocab_max;
    if (ops) options.ops = ops;
    MS_OK(bd_model_open(&options, &model, &err), err);
    return model;
}

static void write_vocab(const char *dir, const char *arch, uint32_t vocab) {
    char path[600];
    bd_error err = {0};
    snprintf(path, sizeof path, "tests/data/arch/%s/config.json", arch);
    cJSON *root = ms_json(path);
    cJSON_DeleteItemFromObjectCaseSensitive(root, "vocab_size");
    assert_non_null(cJSON_AddNumberToObject(root, "vocab_size", vocab));
    char *text = cJSON_Print(root);
    assert_non_null(text);
    snprintf(path, sizeof path, "%s/config.json", dir);
    MS_OK(bd_file_replace(path, text, strlen(text), &err), err);
    cJSON_free(text);
    cJSON_Delete(root);
}

typedef struct subject { /* one variant of the batch */
    mr_model reference;
    ms_variant variant; /* on one rank */
    tp_variant parts;   /* on several */
    const bd_overlay *overlay;
    char dir[256];
    uint32_t vocab;
    int32_t ids[WINDOW];
} subject;

static void make_subject(subject *s, const char *path, const char *arch, const kind *k,
                         uint64_t *random) {
    mr_open(&s->reference, path);
    s->vocab = s->reference.config.vocab;
    if (k) {
        if (k->own_head && s->reference.config.tied) mr_add_head(&s->reference);
        s->reference.full_tables = k->full;
        if (k->extra_max > 0)
            s->reference.extra_rows = 1 + (uint32_t)(support_random(random) % k->extra_max);
        mr_make_delta(&s->reference, random, k->planes, &(mr_fault){0}, s->dir);
        s->vocab += s->reference.extra_rows + (uint32_t)k->vocab_change;
        if (s->vocab != s->reference.config.vocab) write_vocab(s->dir, arch, s->vocab);
    }
    for (int i = 0; i < WINDOW; i++) {
        s->ids[i] = (int32_t)(support_random(random) % s->vocab);
        if (support_random(random) % 4 == 0) /* where the added ones are */
            s->ids[i] = (int32_t)(s->vocab - 1 - support_random(random) % 16);
    }
}

/* Into the pages from `page` on; returns how many it takes. */
static uint32_t load_subject(subject *s, bd_model *model, uint32_t page, uint64_t step_bytes) {
    if (bd_model_rank_count(model) > 1) {
        const uint32_t pages = tp_variant_open(model, s->dir, page, &s->parts);
        s->overlay = s->parts.overlay;
        return pages;
    }
    const uint32_t pages = ms_variant_open(model, s->dir, page, step_bytes, &s->variant);
    assert_int_equal(pages, bd_overlay_pages_of(bd_model_config_of(model), bd_model_ops(model),
                                                &s->variant.delta));
    s->overlay = s->variant.overlay;
    return pages;
}

static void unload_subject(subject *s, uint32_t ranks) {
    if (ranks > 1)
        tp_variant_close(&s->parts);
    else
        ms_variant_close(&s->variant);
    mr_remove_delta(s->dir);
}

static void check_run(subject *s, const ms_run *run, uint32_t width, const char *what) {
    const uint32_t base_vocab = s->reference.config.vocab;
    double *want = mr_logits(&s->reference, run->prompt, run->prompt_count);
    const double l2 = ms_relative_l2(run->logits, want, s->vocab);
    print_message("  %s, %u rows for %u, %u tokens: relative L2 %.2e\n", what, s->vocab, base_vocab,
                  run->prompt_count, l2);
    if (!(l2 <= logits_l2_max)) fail_msg("%s: logits are off by %g", what, l2);
    uint32_t best = 0;
    double sum = 0;
    for (uint32_t i = 0; i < width; i++) {
        if (i >= s->vocab) assert_true(isinf(run->logits[i]) && run->logits[i] < 0);
        if (i < s->vocab) sum += exp(want[i]);
        if (run->logits[i] > run->logits[best]) best = i;
    }
    assert_int_equal(run->ids[0], best);
    assert_true(fabs((double)run->results[0].logprob - (want[best] - log(sum))) < 1e-4);
    free(want);
}

static void check_arch(const char *arch, uint32_t ranks, uint64_t *random) {
    char path[600];
    bd_error err = {0};
    subject *subjects = calloc(KINDS + 1, sizeof *subjects);
    ms_run runs[(KINDS + 1) * PROMPTS] = {0};
    uint32_t page = 0;
    assert_non_null(subjects);
    arch_path(path, sizeof path, arch);
    bd_model *model = open_model(path, ranks, BD_EXTRA_VOCAB_MAX, NULL);
    const uint32_t width = bd_model_logits_width(model);
    assert_int_equal(width, bd_model_config_of(model)->vocab + 256);
    print_message("%s, ranks: %u\n", arch, ranks);
    for (uint32_t i = 0; i <= KINDS; i++) { /* the base in between */
        subject *s = &subjects[i];
        const kind *k = i < 2 ? &kinds[i] : i == 2 ? NULL : &kinds[i - 1];
        make_subject(s, path, arch, k, random);
        const uint64_t step_bytes = i % 2 ? 0 : 1 + support_random(random) % 997;
        if (k) page += load_subject(s, model, page, step_bytes);
        for (uint32_t p = 0; p < PROMPTS; p++) {
            ms_run *run = &runs[i * PROMPTS + p];
            *run = (ms_run){.prompt = s->ids,
                            .prompt_count = prompt_tokens[p],
                            .new_count = 1,
                            .overlay = s->overlay,
                            .logits = calloc(width, sizeof(float))};
            assert_non_null(run->logits);
        }
    }
    ms_run_all(model, runs, (KINDS + 1) * PROMPTS, MS_ROWS_MAX);
    for (uint32_t i = 0; i <= KINDS; i++) {
        subject *s = &subjects[i];
        const bool base = i == 2;
        const bd_delta *delta = ranks > 1 ? &s->parts.delta : &s->variant.delta;
        if (!base) MS_OK(bd_delta_open_shard(delta, 0, true, &s->reference.delta, &err), err);
        for (uint32_t p = 0; p < PROMPTS; p++) {
            ms_run *run = &runs[i * PROMPTS + p];
            check_run(s, run, width, base ? "the base" : kinds[i < 2 ? i : i - 1].what);
            free(run->logits);
        }
        mr_close(&s->reference);
        if (!base) unload_subject(s, ranks);
    }
    bd_model_close(model);
    free(subjects);
}

static void vocabularies_match_float64(void **state) {
    static const char *const archs[] = {"llama-gqa", "qwen2", "qwen3", "gemma2"};
    uint64_t random = support_seed();
    (void)state;
    for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++)
        check_arch(archs[i], 1, &random);
}

/* Also where the last ranks have nothing of a smaller vocabulary, or of the base's the last few. */
static void split_vocabularies_match_float64(void **state) {
    static const struct {
        const char *arch;
        uint32_t ranks;
    } cases[] = {{"qwen2", 2},    {"gemma2", 2},   {"qwen3", 4},   {"gemma2", 4},
                 {"tp-qwen2", 4}, {"tp-llama", 2}, {"tp-llama", 8}};
    uint64_t random = support_seed();
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_arch(cases[i].arch, cases[i].ranks, &random);
}

/* Makes a delta of this kind and expects planning, creating or feeding it to fail with `told` in
 * the message. vocab_change: of config.json against what the delta holds; INT32_MAX: no file. */
static void expect_refused(const kind *k, const mr_fault *fault, uint32_t room,
                           const bd_backend_ops *ops, bd_status status, const char *told) {
    char path[600], dir[256];
    bd_error err = {0};
    mr_model reference;
    ms_variant v = {0};
    uint64_t random = support_seed();
    arch_path(path, sizeof path, "qwen2");
    mr_open(&reference, path);
    reference.extra_rows = k->extra_max;
    reference.full_tables = k->full;
    if (k->own_head && reference.config.tied) mr_add_head(&reference);
    bd_model *model = open_model(path, 1, room, ops);
    mr_make_delta(&reference, &random, k->planes, fault, dir);
    const uint32_t vocab = reference.config.vocab + reference.extra_rows;
    if (k->vocab_change != INT32_MAX)
        write_vocab(dir, "qwen2", (uint32_t)((int32_t)vocab + k->vocab_change));
    MS_OK(bd_delta_open(dir, &v.delta, &err), err);
    bd_status got = bd_overlay_plan_create(model, &v.delta, &v.plan, &err);
    if (got == BD_OK) {
        v.pages = calloc(v.plan.page_count, sizeof *v.pages);
        assert_non_null(v.pages);
        uint8_t *arena = bd_model_ops(model)->delta_arena(bd_model_backend(model));
        for (uint32_t i = 0; i < v.plan.page_count; i++)
            v.pages[i] =
                arena + i * bd_overlay_page_bytes(bd_model_config_of(model), bd_model_ops(model));
        got = bd_overlay_create(model, &v.delta, &v.plan, v.pages, &v.overlay, &err);
        if (got == BD_OK) got = ms_feed(model, &v, 100, &err);
    }
    print_message("%s: %s\n", bd_status_name(got), err.message);
    assert_int_equal(got, status);
    assert_non_null(strstr(err.message, told));
    ms_variant_close(&v);
    mr_remove_delta(dir);
    bd_model_close(model);
    mr_close(&reference);
}

static void contradictions_are_refused(void **state) {
    (void)state;
    const mr_fault none = {0};
    const kind longer = {"", 5, 1, false, false, 1}, shorter = {"", 5, 1, false, false, -1},
               silent = {"", 5, 1, false, false, INT32_MAX}, added = {"", 5, 1, false, false, 0},
               grown = {"", 0, 1, false, false, 3};
    expect_refused(&longer, &none, 256, NULL, BD_E_MISMATCH,
                   "the base has 512 rows and the delta adds 5");
    expect_refused(&shorter, &none, 256, NULL, BD_E_MISMATCH, "vocab_size 516");
    expect_refused(&silent, &none, 256, NULL, BD_E_MISMATCH, "vocab_size 512");
    expect_refused(&grown, &none, 256, NULL, BD_E_MISMATCH, "vocab_size 515");
    expect_refused(&added, &none, 4, NULL, BD_E_UNSUPPORTED,
                   "model.embed_tokens.weight has 5 added rows, there is room for 4");
    expect_refused(&added, &none, 0, NULL, BD_E_UNSUPPORTED, "there is room for 0");
}

static void values_that_are_not_finite_are_named(void **state) {
    (void)state;
    const kind added = {"", 5, 1, false, false, 0}, full = {"", 0, 1, true, true, 0};
    expect_refused(&added, &(mr_fault){.nan_row = "embed_tokens.weight.extra"}, 256, NULL,
                   BD_E_FORMAT, "model.embed_tokens.weight.extra");
    expect_refused(&full, &(mr_fault){.nan_row = "lm_head.weight"}, 256, NULL, BD_E_FORMAT,
                   "lm_head.weight");
}

/* A backend without the operators says which tensor it cannot take. */
static void backends_that_cannot_say_so(void **state) {
    bd_backend_ops ops = *bd_backend_cpu_ops();
    (void)state;
    ops.name = "plain";
    ops.rows_put = NULL;
    ops.plane_part_put = NULL;
    const kind added = {"", 5, 1, false, false, 0}, full = {"", 0, 1, true, true, 0};
    const mr_fault none = {0};
    expect_refused(&added, &none, 256, &ops, BD_E_UNSUPPORTED,
                   "model.embed_tokens.weight has added rows, which the plain backend");
    expect_refused(&full, &none, 256, &ops, BD_E_UNSUPPORTED,
                   "is stored in full, which the plain backend");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vocabularies_match_float64),
        cmocka_unit_test(split_vocabularies_match_float64),
        cmocka_unit_test(contradictions_are_refused),
        cmocka_unit_test(values_that_are_not_finite_are_named),
        cmocka_unit_test(backends_that_cannot_say_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
