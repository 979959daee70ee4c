/* config.json of every family: what transformers 5 makes of the same file (cases made by
 * tests/data/hf/make_config_cases.py), the published configs of the golden models, and refusals by
 * field. */
#include "hf_support.h"

#include "bitdelta/hf/model_config.h"

#include <math.h>

static support_dir dir;

static int setup(void **state) {
    (void)state;
    dir = support_dir_make();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    support_dir_remove(&dir);
    return 0;
}

static const cJSON *get(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

static double number(const cJSON *object, const char *name, double fallback) {
    const cJSON *value = get(object, name);
    return cJSON_IsNumber(value) ? value->valuedouble : fallback;
}

static void same_number(const char *what, double got, double want) {
    if (!(fabs(got - want) <= 1e-6 * fabs(want)))
        fail_msg("%s: %.9g, expected %.9g", what, got, want);
}

/* transformers' own values, or the default that its functions take for an absent key */
static void compare_rope(const bd_rope_config *rope, const cJSON *want) {
    static const char *const kinds[] = {"default", "linear", "llama3", "yarn"};
    const cJSON *keys = get(want, "rope");
    assert_string_equal(kinds[rope->kind], get(want, "rope_type")->valuestring);
    same_number("theta", rope->theta, number(want, "theta", 0));
    same_number("rotary_dim", rope->rotary_dim, number(want, "rotary_dim", 0));
    if (rope->kind == BD_ROPE_PLAIN) return;
    same_number("factor", rope->factor, number(keys, "factor", 0));
    if (rope->kind == BD_ROPE_LINEAR) return;
    same_number("original_max_positions", rope->original_max_positions,
                number(keys, "original_max_position_embeddings", 0));
    same_number("low", rope->low_freq_factor, number(keys, "low_freq_factor", 0));
    same_number("high", rope->high_freq_factor, number(keys, "high_freq_factor", 0));
    if (rope->kind == BD_ROPE_LLAMA3) return;
    same_number("beta_fast", rope->beta_fast, number(keys, "beta_fast", 32));
    same_number("beta_slow", rope->beta_slow, number(keys, "beta_slow", 1));
    same_number("attention_factor", rope->attention_factor, number(keys, "attention_factor", 0));
    same_number("mscale", rope->mscale, number(keys, "mscale", 0));
    same_number("mscale_all_dim", rope->mscale_all_dim, number(keys, "mscale_all_dim", 0));
    assert_int_equal(rope->truncate, !cJSON_IsFalse(get(keys, "truncate")));
}

static void compare(const bd_model_config *c, const cJSON *want) {
    same_number("hidden", c->hidden, number(want, "hidden", 0));
    same_number("layers", c->layers, number(want, "layers", 0));
    same_number("heads", c->heads, number(want, "heads", 0));
    same_number("kv_heads", c->kv_heads, number(want, "kv_heads", 0));
    same_number("head_dim", c->head_dim, number(want, "head_dim", 0));
    same_number("ffn", c->ffn, number(want, "ffn", 0));
    same_number("vocab", c->vocab, number(want, "vocab", 0));
    same_number("max_positions", c->max_positions, number(want, "max_positions", 0));
    same_number("norm_eps", (double)c->norm_eps, number(want, "norm_eps", 0));
    same_number("window_tokens", c->window_tokens, number(want, "window_tokens", 0));
    same_number("attn_scale", (double)c->attn_scale, number(want, "attn_scale", 0));
    same_number("attn_softcap", (double)c->attn_softcap, number(want, "attn_softcap", 0));
    same_number("logit_softcap", (double)c->logit_softcap, number(want, "logit_softcap", 0));
    same_number("bos_id", c->bos_id, number(want, "bos_id", 0));
    assert_int_equal(c->tied, cJSON_IsTrue(get(want, "tied")));
    assert_int_equal(c->qkv_bias, cJSON_IsTrue(get(want, "qkv_bias")));
    assert_int_equal(c->o_bias, cJSON_IsTrue(get(want, "o_bias")));
    assert_int_equal(c->mlp_bias, cJSON_IsTrue(get(want, "mlp_bias")));
    assert_string_equal(c->activation == BD_ACT_SILU ? "silu" : "gelu_pytorch_tanh",
                        get(want, "activation")->valuestring);
    uint32_t i = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, get(want, "window_layer")) {
        assert_int_equal(c->window_layer[i++], item->valueint);
    }
    assert_int_equal(i, c->layers);
    i = 0;
    cJSON_ArrayForEach(item, get(want, "eos")) {
        assert_int_equal(c->eos_ids[i++], item->valueint);
    }
    assert_int_equal(i, c->eos_count);
    compare_rope(&c->rope, want);
}

static void test_against_transformers(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    cJSON *root = support_json("tests/data/hf", "config_cases.json");
    const cJSON *item;
    int count = 0;
    cJSON_ArrayForEach(item, get(root, "cases")) {
        char *text = cJSON_PrintUnformatted(get(item, "config"));
        bd_model_config config;
        support_write_text(dir.path, "config.json", text);
        print_message("%d %s\n", count, text);
        assert_ok(bd_model_config_read(dir.path, &config, &err));
        compare(&config, get(item, "expected"));
        free(text);
        count++;
    }
    assert_true(count >= 50);
    cJSON_Delete(root);
}

static bd_model_config read_ok(const char *path) {
    bd_error err = {.message = ""};
    bd_model_config config;
    assert_ok(bd_model_config_read(path, &config, &err));
    return config;
}

static void test_golden_models(void **state) {
    (void)state;
    bd_model_config c = read_ok("demo/zen-mini");
    assert_true(c.family == BD_FAMILY_LLAMA && c.hidden == 256 && c.layers == 8 && c.heads == 4 &&
                c.kv_heads == 2);
    assert_true(c.head_dim == 64 && c.ffn == 768 && c.vocab == 4096 && c.tied &&
                c.max_positions == 2048);
    assert_true(c.bos_id == 4080 && c.eos_count == 1 && c.eos_ids[0] == 4081);
    c = read_ok("tests/data/arch/llama3-rope");
    assert_true(c.rope.kind == BD_ROPE_LLAMA3 && c.rope.original_max_positions == 32 && !c.tied);
    c = read_ok("tests/data/arch/llama-gqa");
    assert_true(c.head_dim == 32 && c.kv_heads == 3 && c.rope.kind == BD_ROPE_PLAIN);
    c = read_ok("tests/data/arch/mistral-window");
    assert_true(c.window_tokens == 16 && c.window_layer[0] && c.window_layer[2] &&
                c.head_dim == 24);
    c = read_ok("tests/data/arch/qwen2");
    assert_true(c.qkv_bias && !c.o_bias && c.tied && c.window_tokens == 0 && !c.window_layer[1]);
    c = read_ok("tests/data/arch/qwen3");
    assert_true(c.qk_norm && !c.qkv_bias && c.head_dim == 32 && c.rope.theta > 999999.0);
    c = read_ok("tests/data/arch/phi3");
    assert_true(c.family == BD_FAMILY_PHI3 && c.window_tokens == 2047 &&
                c.rope.rotary_dim == c.head_dim);
    c = read_ok("tests/data/arch/gemma2");
    assert_true(c.norm_plus_one && c.post_norms && c.window_layer[0] && !c.window_layer[1] &&
                c.window_tokens == 16);
    same_number("embed_scale", (double)c.embed_scale, 8.0);
    same_number("attn_scale", (double)c.attn_scale, 1.0 / sqrt(24.0));
    assert_true(c.activation == BD_ACT_GELU_TANH && c.tied);
}

#define LLAMA                                                                                      \
    "\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_layers\":" \
    "2,\"vocab_size\":99"
#define HEADS ",\"num_attention_heads\":4"

static void test_refusals(void **state) {
    (void)state;
    static const struct {
        const char *text, *field;
    } cases[] = {
        {"{" LLAMA HEADS ",\"quantization_config\":{\"bits\":4}}", "quantization_config"},
        {"{" LLAMA HEADS ",\"num_local_experts\":8}", "num_local_experts"},
        {"{" LLAMA HEADS ",\"num_experts\":8}", "num_experts"},
        {"{" LLAMA HEADS ",\"hidden_act\":\"relu\"}", "hidden_act"},
        {"{" LLAMA HEADS ",\"hidden_act\":\"gelu\"}", "hidden_act"},
        {"{" LLAMA HEADS ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2.0}}", "type"},
        {"{" LLAMA HEADS ",\"rope_scaling\":{\"rope_type\":\"longrope\"}}", "rope_type"},
        {"{" LLAMA HEADS ",\"rope_scaling\":{\"rope_type\":\"default\",\"mrope_section\":[1]}}",
         "mrope_section"},
        {"{" LLAMA HEADS ",\"rope_scaling\":{\"rope_type\":\"linear\"}}", "factor"},
        {"{" LLAMA HEADS ",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":-2}}", "factor"},
        {"{" LLAMA HEADS
         ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
         "\"high_freq_factor\":4}}",
         "high_freq_factor"},
        {"{" LLAMA HEADS ",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}}",
         "full_attention"},
        {"{" LLAMA HEADS ",\"rope_scaling\":[1]}", "rope_scaling"},
        {"{" LLAMA HEADS ",\"partial_rotary_factor\":0.5}", "partial_rotary_factor"},
        {"{" LLAMA HEADS ",\"rope_theta\":\"10000\"}", "rope_theta"},
        {"{" LLAMA HEADS ",\"num_key_value_heads\":3}", "num_key_value_heads"},
        {"{" LLAMA HEADS ",\"head_dim\":258}", "head_dim"},
        {"{" LLAMA HEADS ",\"head_dim\":7}", "head_dim"},
        {"{" LLAMA ",\"num_attention_heads\":3}", "num_attention_heads"},
        {"{" LLAMA ",\"num_attention_heads\":0}", "num_attention_heads"},
        {"{" LLAMA ",\"num_attention_heads\":2.5}", "num_attention_heads"},
        {"{" LLAMA "}", "num_attention_heads"},
        {"{" LLAMA HEADS ",\"attention_bias\":1}", "attention_bias"},
        {"{" LLAMA HEADS ",\"tie_word_embeddings\":\"yes\"}", "tie_word_embeddings"},
        {"{" LLAMA HEADS ",\"rms_norm_eps\":0}", "rms_norm_eps"},
        {"{" LLAMA HEADS ",\"rms_norm_eps\":1e-60}", "rms_norm_eps"},
        {"{" LLAMA HEADS ",\"rope_theta\":1e300}", "rope_theta"},
        {"{" LLAMA HEADS ",\"eos_token_id\":-1}", "eos_token_id"},
        {"{" LLAMA HEADS ",\"eos_token_id\":[1,2,3,4,5,6,7,8,9]}", "eos_token_id"},
        {"{" LLAMA HEADS ",\"layer_types\":[\"full_attention\",\"chunked_attention\"]}",
         "layer_types"},
        {"{" LLAMA HEADS ",\"layer_types\":[\"full_attention\",\"sliding_attention\"]}",
         "layer_types"},
        {"{" LLAMA HEADS ",\"architectures\":[\"LlamaForSequenceClassification\"]}",
         "architectures"},
        {"{\"model_type\":\"mixtral\"}", "model_type"},
        {"{\"hidden_size\":64}", "model_type"},
        {"{\"model_type\":\"llama\",\"hidden_size\":0,\"intermediate_size\":128}", "hidden_size"},
        {"{\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":1e99}",
         "intermediate_size"},
        {"{\"model_type\":\"phi3\",\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_"
         "layers\":2,"
         "\"vocab_size\":99" HEADS ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2}}",
         "type"},
        {"{\"model_type\":\"mistral\",\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_"
         "layers\":2,"
         "\"vocab_size\":99" HEADS ",\"num_key_value_heads\":2,\"mlp_bias\":true}",
         "mlp_bias"},
        {"{\"model_type\":\"gemma2\",\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_"
         "layers\":2,"
         "\"vocab_size\":99" HEADS ",\"sliding_window\":null}",
         "sliding_window"},
        {"{\"model_type\":\"gemma2\",\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_"
         "layers\":2,"
         "\"vocab_size\":99" HEADS ",\"query_pre_attn_scalar\":1e308}",
         "query_pre_attn_scalar"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bd_error err = {.message = ""};
        bd_model_config config;
        support_write_text(dir.path, "config.json", cases[i].text);
        const bd_status status = bd_model_config_read(dir.path, &config, &err);
        if (status == BD_OK) fail_msg("accepted: %s", cases[i].text);
        if (strcmp(err.subject, cases[i].field) != 0 || !strstr(err.message, cases[i].field)) {
            fail_msg("%s names \"%s\" (%s), expected %s", cases[i].text, err.subject, err.message,
                     cases[i].field);
        }
    }
    support_write_text(dir.path, "config.json", "{" LLAMA HEADS "}");
    (void)read_ok(dir.path); /* the frame of the cases is itself fine */
}

static void test_generation_ids(void **state) {
    (void)state;
    support_dir d = support_dir_make();
    support_write_text(d.path, "config.json",
                       "{" LLAMA HEADS ",\"eos_token_id\":5,\"bos_token_id\":null}");
    support_write_text(d.path, "generation_config.json", "{\"eos_token_id\":[5,9]}");
    const bd_model_config c = read_ok(d.path);
    assert_true(c.bos_id == -1 && c.eos_count == 2 && c.eos_ids[0] == 5 && c.eos_ids[1] == 9);
    support_dir_remove(&d);
}

static void test_variants(void **state) {
    (void)state;
    static const struct {
        const char *text, *field; /* field NULL: allowed */
    } cases[] = {
        {"{" LLAMA HEADS ",\"rope_theta\":5e5,\"max_position_embeddings\":7,\"eos_token_id\":3}",
         NULL},
        {"{" LLAMA HEADS ",\"vocab_size\":99,\"pad_token_id\":1,\"rope_scaling\":{\"type\":"
         "\"linear\",\"factor\":2}}",
         NULL},
        {"{" LLAMA HEADS ",\"rms_norm_eps\":1e-5}", "rms_norm_eps"},
        {"{" LLAMA HEADS ",\"tie_word_embeddings\":true,\"rope_theta\":5e5}", NULL},
        {"{" LLAMA HEADS ",\"hidden_act\":\"gelu_pytorch_tanh\"}", "hidden_act"},
        {"{" LLAMA ",\"num_attention_heads\":8}", "num_attention_heads"},
        {"{" LLAMA HEADS ",\"mlp_bias\":true}", "mlp_bias"},
    };
    support_dir d = support_dir_make();
    support_write_text(dir.path, "config.json", "{" LLAMA HEADS "}");
    const bd_model_config base = read_ok(dir.path);
    bd_model_config config;
    bd_error err = {.message = ""};
    assert_ok(
        bd_model_config_read_variant(d.path, &base, &config, &err)); /* no files: the base's */
    assert_false(bd_model_config_variant_differs(&base, &config));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        support_write_text(d.path, "config.json", cases[i].text);
        const bd_status status = bd_model_config_read_variant(d.path, &base, &config, &err);
        if (!cases[i].field) {
            if (status != BD_OK) fail_msg("%s", err.message);
            assert_true(bd_model_config_variant_differs(&base, &config));
            continue;
        }
        assert_int_equal(status, BD_E_MISMATCH);
        assert_string_equal(err.subject, cases[i].field);
    }
    support_dir_remove(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_transformers),
        cmocka_unit_test(test_golden_models),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_generation_ids),
        cmocka_unit_test(test_variants),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
