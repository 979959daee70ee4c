/* test_model_demo.c - the demo family against Hugging Face transformers (demo/README.md): the base,
 * every delta over it, and the whole fine-tune where its weights are unpacked. Six prompts each:
 * the greedy continuation of 32 tokens must be the same, and the ten most probable tokens after
 * each of the last 16 prompt positions must have the recorded log-probabilities. */
#include "model_support.h"

enum { PROMPTS = 6, NEW = 32, VARIANTS = 14 };

static const char *const variants[VARIANTS] = {"coder",   "c",       "shell",  "sql",    "math",
                                               "writer",  "legal",   "astro",  "french", "german",
                                               "spanish", "russian", "config", "lexicon"};

static double logprob_of(const bd_token_result *top, int32_t id) {
    for (uint32_t i = 0; i < top->top_count; i++) {
        if (top->top_ids[i] == id) return (double)top->top_logprobs[i];
    }
    return (double)NAN;
}

static void check_tops(const char *name, const cJSON *golden, const ms_run *run, double bound) {
    const cJSON *top, *tops = ms_get(golden, "top");
    uint32_t row = 0;
    cJSON_ArrayForEach(top, tops) {
        uint32_t id_count, logprob_count;
        int32_t *ids = ms_ids(ms_get(top, "ids"), &id_count);
        double *logprobs = ms_numbers(ms_get(top, "logprobs"), &logprob_count);
        assert_int_equal(ms_get(top, "position")->valueint,
                         run->prompt_count - run->top_rows + row);
        for (uint32_t i = 0; i < id_count; i++) {
            const double diff = fabs(logprob_of(&run->tops[row], ids[i]) - logprobs[i]);
            if (!(diff <= bound))
                fail_msg("%s: row %u, token %d: logprob off by %g", name, row, ids[i], diff);
        }
        free(ids);
        free(logprobs);
        row++;
    }
    assert_int_equal(row, run->top_rows);
}

static void check_golden(bd_model *model, const bd_overlay *overlay, const char *path) {
    ms_run runs[PROMPTS] = {0};
    int32_t *prompts[PROMPTS];
    cJSON *golden = ms_json(path);
    const cJSON *list = ms_get(golden, "prompts");
    assert_int_equal(cJSON_GetArraySize(list), PROMPTS);
    for (int i = 0; i < PROMPTS; i++) {
        const cJSON *prompt = cJSON_GetArrayItem(list, i);
        prompts[i] = ms_ids(ms_get(prompt, "ids"), &runs[i].prompt_count);
        runs[i].prompt = prompts[i];
        runs[i].new_count = NEW;
        runs[i].overlay = overlay;
        runs[i].top_rows = (uint32_t)cJSON_GetArraySize(ms_get(prompt, "top"));
    }
    ms_run_all(model, runs, PROMPTS, MS_ROWS_MAX);
    for (int i = 0; i < PROMPTS; i++) {
        const cJSON *prompt = cJSON_GetArrayItem(list, i), *greedy = ms_get(prompt, "greedy");
        uint32_t id_count, logprob_count;
        int32_t *ids = ms_ids(ms_get(greedy, "ids"), &id_count);
        double *logprobs = ms_numbers(ms_get(greedy, "logprobs"), &logprob_count);
        const double bound = fmax(1e-4, 4 * ms_get(prompt, "float64_max_abs_diff")->valuedouble);
        check_tops(path, prompt, &runs[i], bound);
        assert_int_equal(id_count, NEW);
        for (uint32_t t = 0; t < NEW; t++) {
            if (runs[i].ids[t] != ids[t]) fail_msg("%s: prompt %d, token %u differs", path, i, t);
            const double diff = fabs((double)runs[i].results[t].logprob - logprobs[t]);
            if (!(diff <= bound))
                fail_msg("%s: prompt %d, logprob %u is off by %g", path, i, t, diff);
        }
        free(ids);
        free(logprobs);
        free(prompts[i]);
    }
    cJSON_Delete(golden);
}

static void base_matches(void **state) {
    bd_error err = {0};
    bd_model *model;
    (void)state;
    const bd_model_options options = ms_options("demo/zen-mini");
    MS_OK(bd_model_open(&options, &model, &err), err);
    assert_string_equal(bd_model_fingerprint(model),
                        "b55327472f0ae7ea76e76f27338af55ed50f2746b78b813ef5735d4497285924");
    check_golden(model, NULL, "tests/data/golden/base/zen-mini.json");
    bd_model_close(model);
}

/* All deltas are resident at once; a page that lands in another's place would show. */
static void deltas_match(void **state) {
    bd_error err = {0};
    bd_model *model;
    ms_variant open[VARIANTS] = {0};
    char path[256];
    uint32_t page = 0;
    (void)state;
    bd_model_options options = ms_options("demo/zen-mini");
    options.delta_slots = VARIANTS;
    MS_OK(bd_model_open(&options, &model, &err), err);
    for (int i = 0; i < VARIANTS; i++) {
        snprintf(path, sizeof path, "demo/deltas/zen-mini-%s", variants[i]);
        page += ms_variant_open(model, path, page, 0, &open[i]);
    }
    for (int i = 0; i < VARIANTS; i++) {
        snprintf(path, sizeof path, "tests/data/golden/bitdelta/zen-mini-%s.json", variants[i]);
        check_golden(model, open[i].overlay, path);
        ms_variant_close(&open[i]);
    }
    bd_model_close(model);
}

static void finetune_matches(void **state) {
    bd_error err = {0};
    bd_model *model;
    (void)state;
    if (!bd_file_exists("demo/finetuned/zen-mini-coder/model.safetensors")) skip();
    const bd_model_options options = ms_options("demo/finetuned/zen-mini-coder");
    MS_OK(bd_model_open(&options, &model, &err), err);
    check_golden(model, NULL, "tests/data/golden/finetuned/zen-mini-coder.json");
    bd_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(base_matches),
        cmocka_unit_test(deltas_match),
        cmocka_unit_test(finetune_matches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
