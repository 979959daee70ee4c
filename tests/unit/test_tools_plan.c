/* test_tools_plan.c - `bitdelta plan`: the table agrees with what a model opened with the same
 * options takes, and what does not fit is refused with its sum. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "bitdelta/model/model.h"
#include "bitdelta/model/overlay.h"
#include "bitdelta/tools/plan.h"

#define BASE "demo/zen-mini"

static uint64_t number(const char *json, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(json, quoted);
    if (!at) fail_msg("%s is not in %s", key, json);
    return strtoull(at + strlen(quoted), NULL, 10);
}

static bd_status run(const bd_plan_request *request, char *text, size_t bytes, bd_error *err) {
    FILE *out = fmemopen(text, bytes, "w");
    assert_non_null(out);
    bd_error_clear(err);
    const bd_status s = bd_plan_run(request, out, err);
    fclose(out);
    return s;
}

static const bd_plan_request plain = {.base_dir = BASE,
                                      .deltas_dir = "demo/deltas",
                                      .backend = BD_BACKEND_CPU,
                                      .rows_max = 64,
                                      .seqs_max = 8,
                                      .logits_rows_max = 16,
                                      .max_model_len = 512,
                                      .kv_tokens = 4096,
                                      .slots = 3,
                                      .json = true,
                                      .dtype = BD_DTYPE_OTHER};

static void test_agrees_with_an_open_model(void **state) {
    (void)state;
    char text[4096];
    bd_error err;
    assert_int_equal(run(&plain, text, sizeof text, &err), BD_OK);
    const bd_model_options options = {.dir = BASE,
                                      .ops = bd_backend_cpu_ops(),
                                      .rank_count = 1,
                                      .max_model_len = 512,
                                      .rows_max = 64,
                                      .seqs_max = 8,
                                      .logits_rows_max = 16,
                                      .kv_block_tokens = 16,
                                      .kv_tokens = 4096,
                                      .rope_tables_max = 15,
                                      .delta_slots = 3};
    bd_model *model;
    assert_int_equal(bd_model_open(&options, &model, &err), BD_OK);
    const bd_memory_plan *plan = bd_model_memory(model);
    assert_int_equal(number(text, "weights_bytes"), plan->weights);
    assert_int_equal(number(text, "workspace_bytes"), plan->workspace);
    assert_int_equal(number(text, "logits_bytes"), plan->logits);
    assert_int_equal(number(text, "delta_bytes"), plan->deltas);
    assert_int_equal(number(text, "kv_bytes"), plan->kv);
    assert_int_equal(number(text, "kv_tokens"), 4096);
    assert_int_equal(number(text, "deltas"), 14);
    assert_int_equal(number(text, "delta_bytes"),
                     number(text, "page_bytes") * number(text, "pages_per_slot") * 3);
    assert_int_equal(number(text, "total_bytes"),
                     number(text, "weights_bytes") + number(text, "workspace_bytes") +
                         number(text, "logits_bytes") + number(text, "delta_bytes") +
                         number(text, "kv_bytes"));
    bd_model_close(model);
}

static void test_refuses_with_the_sum(void **state) {
    (void)state;
    char text[4096];
    bd_error err;
    bd_plan_request tight = plain;
    assert_int_equal(run(&plain, text, sizeof text, &err), BD_OK);
    const uint64_t total = number(text, "total_bytes");
    tight.device_bytes = total;
    assert_int_equal(run(&tight, text, sizeof text, &err), BD_OK);
    assert_int_equal(number(text, "available_bytes"), total);
    tight.device_bytes = total - 1;
    assert_int_equal(run(&tight, text, sizeof text, &err), BD_E_LIMIT);
    assert_non_null(strstr(text, "\"fits\":false"));
    const char *const parts[] = {"weights", "workspace",   "KV cache",
                                 "logits",  "delta pages", "available"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        assert_non_null(strstr(err.message, parts[i]));
}

static void test_slots_and_kv_give_way(void **state) {
    (void)state;
    char text[4096];
    bd_error err;
    bd_plan_request loose = plain;
    loose.slots = 0, loose.kv_tokens = 0;
    assert_int_equal(run(&loose, text, sizeof text, &err), BD_OK);
    assert_int_equal(number(text, "slots"), 14);
    loose.device_bytes = number(text, "weights_bytes") + number(text, "workspace_bytes") +
                         number(text, "logits_bytes") +
                         512 * number(text, "kv_bytes") / number(text, "kv_tokens") +
                         5 * number(text, "page_bytes") * number(text, "pages_per_slot") + 1000000;
    assert_int_equal(run(&loose, text, sizeof text, &err), BD_OK);
    assert_in_range(number(text, "slots"), 5, 13);
    assert_true(number(text, "kv_tokens") >= 512 &&
                number(text, "total_bytes") <= loose.device_bytes);
}

static void test_text_and_faults(void **state) {
    (void)state;
    char text[4096];
    bd_error err;
    bd_plan_request text_request = plain;
    text_request.json = false;
    assert_int_equal(run(&text_request, text, sizeof text, &err), BD_OK);
    assert_non_null(strstr(text, "base weights"));
    assert_non_null(strstr(text, "remains"));
    bd_plan_request absent = plain;
    absent.base_dir = "demo/no-such-model";
    assert_int_not_equal(run(&absent, text, sizeof text, &err), BD_OK);
    assert_non_null(strstr(err.message, "demo/no-such-model"));
    absent = plain;
    absent.deltas_dir = "demo/no-such-deltas";
    assert_int_equal(run(&absent, text, sizeof text, &err), BD_E_NOT_FOUND);
}

static void test_cuda_plan_needs_no_device(void **state) {
    (void)state;
    if (!bd_backend_table(BD_BACKEND_CUDA)) skip();
    char text[4096];
    bd_error err;
    bd_plan_request request = plain;
    request.backend = BD_BACKEND_CUDA;
    request.device_bytes = 80ull << 30;
    assert_int_equal(run(&request, text, sizeof text, &err), BD_OK);
    /* Context and code, and 19 recordings of 8 layers: of 1, 2, 4, 8 rows with a variant to each or
     * to fewer. */
    const uint64_t none = (576u + 256u) << 20, a_layer = 32u << 10;
    assert_int_equal(number(text, "available_bytes"), (80ull << 30) - none - 19 * 8 * a_layer);
    assert_int_equal(number(text, "page_bytes") % (2u << 20), 0);
    request.kernels = BD_KERNELS_PLAIN; /* without the split-KV workspace */
    const uint64_t before = number(text, "workspace_bytes");
    assert_int_equal(run(&request, text, sizeof text, &err), BD_OK);
    assert_true(number(text, "workspace_bytes") <= before);
    request.device_bytes = none + (300ull << 20);
    assert_int_equal(run(&request, text, sizeof text, &err), BD_OK);
    request.device_bytes = none + (6u << 20);
    assert_int_equal(run(&request, text, sizeof text, &err), BD_E_LIMIT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_agrees_with_an_open_model),
        cmocka_unit_test(test_refuses_with_the_sum), cmocka_unit_test(test_slots_and_kv_give_way),
        cmocka_unit_test(test_text_and_faults), cmocka_unit_test(test_cuda_plan_needs_no_device)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
