/* test_model_arch.c - eight tiny models of six families against Hugging Face transformers
 * (tests/data/arch/README.md): all logits after each prompt, and the greedy continuation with its
 * log-probabilities. The prompts of a model run side by side, so that sequences of different
 * lengths share each step. */
#include "model_support.h"

enum { PROMPTS_MAX = 4, NEW = 16 };
static const double logits_l2_max = 1e-5, logprob_diff_max = 1e-4;

static void check_prompt(const char *arch, const cJSON *golden, const ms_run *run, uint32_t vocab) {
    uint32_t logit_count, id_count, logprob_count;
    const cJSON *greedy = ms_get(golden, "greedy");
    double *logits = ms_numbers(ms_get(golden, "logits"), &logit_count);
    double *logprobs = ms_numbers(ms_get(greedy, "logprobs"), &logprob_count);
    int32_t *ids = ms_ids(ms_get(greedy, "ids"), &id_count);
    assert_int_equal(logit_count, vocab);
    assert_int_equal(id_count, NEW);
    const double l2 = ms_relative_l2(run->logits, logits, vocab);
    print_message("%s: prompt of %u, logits' relative L2 %.2e\n", arch, run->prompt_count, l2);
    if (!(l2 <= logits_l2_max)) fail_msg("%s: logits are off by %g", arch, l2);
    for (uint32_t i = 0; i < NEW; i++) {
        if (run->ids[i] != ids[i])
            fail_msg("%s: token %u is %d, not %d", arch, i, run->ids[i], ids[i]);
        const double diff = fabs((double)run->results[i].logprob - logprobs[i]);
        if (!(diff <= logprob_diff_max)) fail_msg("%s: logprob %u is off by %g", arch, i, diff);
    }
    free(logits);
    free(logprobs);
    free(ids);
}

static void check_arch(const char *arch) {
    char path[256];
    bd_error err = {0};
    bd_model *model;
    ms_run runs[PROMPTS_MAX] = {0};
    uint32_t count = 0;
    snprintf(path, sizeof path, "tests/data/arch/%s", arch);
    bd_model_options options = ms_options(path);
    options.kv_tokens = 1024;
    MS_OK(bd_model_open(&options, &model, &err), err);
    const uint32_t vocab = bd_model_config_of(model)->vocab;
    snprintf(path, sizeof path, "tests/data/arch/%s/golden.json", arch);
    cJSON *golden = ms_json(path);
    const cJSON *prompt, *prompts = ms_get(golden, "prompts");
    int32_t *ids[PROMPTS_MAX];
    cJSON_ArrayForEach(prompt, prompts) {
        ms_run *run = &runs[count];
        ids[count] = ms_ids(ms_get(prompt, "ids"), &run->prompt_count);
        run->prompt = ids[count++];
        run->new_count = NEW;
        run->logits = calloc((size_t)NEW * vocab, sizeof *run->logits);
        assert_non_null(run->logits);
    }
    assert_int_equal(count, 3);
    ms_run_all(model, runs, count, MS_ROWS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        check_prompt(arch, cJSON_GetArrayItem(prompts, (int)i), &runs[i], vocab);
        free(ids[i]);
        free(runs[i].logits);
    }
    cJSON_Delete(golden);
    bd_model_close(model);
}

#define ARCH_TEST(function, name)                                                                  \
    static void function(void **state) {                                                           \
        (void)state;                                                                               \
        check_arch(name);                                                                          \
    }

ARCH_TEST(llama3_rope, "llama3-rope")
ARCH_TEST(llama_gqa, "llama-gqa")
ARCH_TEST(mistral_window, "mistral-window")
ARCH_TEST(qwen2, "qwen2")
ARCH_TEST(qwen3, "qwen3")
ARCH_TEST(phi3, "phi3")
ARCH_TEST(gemma2, "gemma2")
ARCH_TEST(llama_odd, "llama-odd")

typedef struct gate_log {
    uint32_t calls, fail_at;
    bool in_order;
} gate_log;

static bd_status log_gate(void *ctx, uint32_t index, bd_error *err) {
    gate_log *log = ctx;
    log->in_order = log->in_order && index == log->calls;
    log->calls++;
    return index == log->fail_at ? bd_fail(err, BD_E_VARIANT, "gate", "not loaded") : BD_OK;
}

/* A step stops at the gate of a layer that will not come: nothing of that layer runs. */
static void gates_are_passed_in_order(void **state) {
    bd_error err = {0};
    bd_model *model;
    (void)state;
    bd_model_options options = ms_options("tests/data/arch/qwen3");
    options.kv_tokens = 64;
    MS_OK(bd_model_open(&options, &model, &err), err);
    const int32_t token = 7;
    const uint32_t zero = 0;
    const bd_seq seq = {.row_count = 1, .kv_blocks = &zero};
    const bd_segment segment = {.overlay = -1, .row_count = 1};
    const bd_logits_row row = {.target = -1};
    const bd_step step = {
        .id = 1,
        .row_count = 1,
        .seq_count = 1,
        .segment_count = 1,
        .logits_row_count = 1,
        .tokens = &token,
        .positions = &zero,
        .seq_of_row = &zero,
        .seqs = &seq,
        .segments = &segment,
        .logits_rows = &row,
    };
    gate_log log = {.fail_at = UINT32_MAX, .in_order = true};
    MS_OK(bd_model_forward(model, &step, log_gate, &log, &err), err);
    assert_true(log.in_order);
    assert_int_equal(log.calls, bd_model_config_of(model)->layers + 2);
    log = (gate_log){.fail_at = 2, .in_order = true};
    assert_int_equal(bd_model_forward(model, &step, log_gate, &log, &err), BD_E_VARIANT);
    assert_int_equal(log.calls, 3);
    bd_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama3_rope),
        cmocka_unit_test(llama_gqa),
        cmocka_unit_test(mistral_window),
        cmocka_unit_test(qwen2),
        cmocka_unit_test(qwen3),
        cmocka_unit_test(phi3),
        cmocka_unit_test(gemma2),
        cmocka_unit_test(llama_odd),
        cmocka_unit_test(gates_are_passed_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
