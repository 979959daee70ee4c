/* test_model_rope.c - inv_freq and the factor on cos and sin against transformers' own functions
 * (tests/data/rope.json, made by tests/data/rope_oracle.py). powf differs between math libraries in
 * the last bits, so a few units in the last place are allowed, which is far below what any other
 * formula would give. */
#include "model_support.h"

#include "model/rope.h"

enum { ULP_MAX = 3 };

static double number_or(const cJSON *object, const char *key, double fallback) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNumber(item) ? item->valuedouble : fallback;
}

static bd_rope_config rope_of(const cJSON *test) {
    static const char *const kinds[] = {"default", "linear", "llama3", "yarn"};
    const cJSON *rope = ms_get(test, "rope"),
                *truncate = cJSON_GetObjectItemCaseSensitive(rope, "truncate");
    bd_rope_config out = {
        .theta = number_or(rope, "rope_theta", 0),
        .factor = number_or(rope, "factor", 1),
        .low_freq_factor = number_or(rope, "low_freq_factor", 0),
        .high_freq_factor = number_or(rope, "high_freq_factor", 0),
        .beta_fast = number_or(rope, "beta_fast", 32),
        .beta_slow = number_or(rope, "beta_slow", 1),
        .attention_factor = number_or(rope, "attention_factor", 0),
        .mscale = number_or(rope, "mscale", 0),
        .mscale_all_dim = number_or(rope, "mscale_all_dim", 0),
        .truncate = !cJSON_IsFalse(truncate),
        .original_max_positions = (uint32_t)number_or(rope, "original_max_position_embeddings", 0),
        .rotary_dim = (uint32_t)ms_get(test, "head_dim")->valuedouble,
    };
    while (strcmp(kinds[out.kind], ms_get(rope, "rope_type")->valuestring) != 0)
        out.kind++;
    return out;
}

static void tables_match_transformers(void **state) {
    cJSON *root = ms_json("tests/data/rope.json");
    const cJSON *test;
    int cases = 0;
    (void)state;
    cJSON_ArrayForEach(test, ms_get(root, "cases")) {
        bd_error err = {0};
        float inv_freq[BD_ROTARY_DIM_MAX / 2], scale;
        uint32_t count;
        const bd_rope_config rope = rope_of(test);
        int32_t *bits = ms_ids(ms_get(test, "inv_freq_bits"), &count);
        MS_OK(bd_rope_table(&rope, inv_freq, &scale, &err), err);
        assert_int_equal(count, rope.rotary_dim / 2);
        int32_t worst = 0;
        for (uint32_t i = 0; i < count; i++) {
            int32_t got;
            memcpy(&got, &inv_freq[i], sizeof got);
            if (abs(got - bits[i]) > worst) worst = abs(got - bits[i]);
        }
        const char *name = ms_get(test, "name")->valuestring;
        print_message("%s: %d units in the last place\n", name, worst);
        if (worst > ULP_MAX) fail_msg("%s: %d units off", name, worst);
        if (fabs((double)scale - ms_get(test, "scale")->valuedouble) > 1e-6)
            fail_msg("%s: scale %g", name, (double)scale);
        free(bits);
        cases++;
    }
    assert_int_equal(cases, 10);
    cJSON_Delete(root);
}

static void what_is_not_supported_is_refused(void **state) {
    bd_error err = {0};
    float inv_freq[BD_ROTARY_DIM_MAX / 2], scale;
    bd_rope_config rope = {.kind = BD_ROPE_LONGROPE, .theta = 10000, .rotary_dim = 96};
    (void)state;
    assert_int_equal(bd_rope_table(&rope, inv_freq, &scale, &err), BD_E_UNSUPPORTED);
    assert_non_null(strstr(err.message, "longrope"));
    rope.kind = BD_ROPE_PLAIN;
    rope.rotary_dim = BD_ROTARY_DIM_MAX + 2;
    assert_int_equal(bd_rope_table(&rope, inv_freq, &scale, &err), BD_E_UNSUPPORTED);
    rope.rotary_dim = 33;
    assert_int_equal(bd_rope_table(&rope, inv_freq, &scale, &err), BD_E_UNSUPPORTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_match_transformers),
        cmocka_unit_test(what_is_not_supported_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
