/* test_model_weights.c - checkpoints and options that must not be served, each refused before a
 * weight is read and by the name of what is wrong; and tensors that may be ignored. Every case is a
 * copy of a tiny model with one tensor changed. */
#include "base_support.h"
#include "model_support.h"

#include <unistd.h>

enum { TENSORS_MAX = 64 };

typedef struct edit { /* one change to a checkpoint */
    const char *drop;
    const char *resize; /* a row too many */
    const char *add;    /* a new tensor of add_rows x add_cols zeros */
    uint64_t add_rows, add_cols;
    const char *add_copy_of; /* or with another tensor's shape and bytes */
    bool flip;               /* its last byte changed */
} edit;

static void append(bd_safetensors_writer *writer, const bd_tensor *t, const edit *e) {
    bd_error err = {0};
    const bool added = e->add && strcmp(t->name, e->add) == 0;
    uint8_t *bytes = calloc(1, t->bytes);
    assert_non_null(bytes);
    if (t->data)
        memcpy(bytes, t->data,
               t->bytes - (e->resize && strcmp(t->name, e->resize) == 0 ? 2 * t->shape[1] : 0));
    if (added && e->flip) bytes[t->bytes - 1] ^= 1;
    MS_OK(bd_safetensors_writer_append(writer, bytes, t->bytes, &err), err);
    free(bytes);
}

/* A copy of the model `arch` with the change, in a new directory. */
static void make_checkpoint(const char *arch, const edit *e, char dir[256]) {
    char path[600];
    bd_error err = {0};
    bd_checkpoint *source;
    bd_safetensors_writer *writer;
    bd_tensor tensors[TENSORS_MAX];
    uint32_t count = 0;
    snprintf(path, sizeof path, "tests/data/arch/%s", arch);
    MS_OK(bd_checkpoint_open(path, &source, &err), err);
    for (uint32_t i = 0; i < bd_checkpoint_count(source); i++) {
        const bd_tensor *t = bd_checkpoint_at(source, i);
        if (e->drop && strcmp(t->name, e->drop) == 0) continue;
        tensors[count] = *t;
        if (e->resize && strcmp(t->name, e->resize) == 0) {
            tensors[count].shape[0]++;
            tensors[count].bytes += 2 * t->shape[1];
        }
        count++;
    }
    if (e->add) {
        const bd_tensor *copied =
            e->add_copy_of ? bd_checkpoint_find(source, e->add_copy_of) : NULL;
        bd_tensor t = {.dtype = BD_DTYPE_BF16, .dtype_name = "BF16", .rank = e->add_cols ? 2 : 1};
        t.shape[0] = e->add_rows;
        t.shape[1] = e->add_cols;
        t.bytes = 2 * e->add_rows * (e->add_cols ? e->add_cols : 1);
        if (copied) t = *copied;
        t.name = e->add;
        tensors[count++] = t;
    }
    snprintf(dir, 256, "%s/bitdelta-test-XXXXXX", P_tmpdir);
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    MS_OK(bd_safetensors_writer_create(path, tensors, count, 8, &writer, &err), err);
    for (uint32_t i = 0; i < count; i++)
        append(writer, &tensors[i], e);
    MS_OK(bd_safetensors_writer_finish(writer, &err), err);
    bd_checkpoint_close(source);
    char *config = NULL;
    size_t bytes = 0;
    snprintf(path, sizeof path, "tests/data/arch/%s/config.json", arch);
    MS_OK(bd_file_read(path, 1 << 20, &config, &bytes, &err), err);
    snprintf(path, sizeof path, "%s/config.json", dir);
    MS_OK(bd_file_replace(path, config, bytes, &err), err);
    free(config);
}

static void remove_checkpoint(const char *dir) {
    char path[600];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}

static void expect(const char *arch, const edit *e, bd_status status, const char *subject) {
    char dir[256];
    bd_error err = {0};
    bd_model *model;
    make_checkpoint(arch, e, dir);
    const bd_model_options options = ms_options(dir);
    const bd_status got = bd_model_open(&options, &model, &err);
    if (status == BD_OK) {
        MS_OK(got, err);
        bd_model_close(model);
    } else {
        print_message("%s: %s\n", bd_status_name(got), err.message);
        assert_int_equal(got, status);
        assert_null(model);
        assert_non_null(strstr(err.message, subject));
    }
    remove_checkpoint(dir);
}

static void unchanged_copies_open(void **state) {
    (void)state;
    expect("llama-gqa", &(edit){0}, BD_OK, NULL);
    expect("qwen2", &(edit){0}, BD_OK, NULL);
    expect("gemma2", &(edit){0}, BD_OK, NULL);
}

static void missing_tensors_are_named(void **state) {
    static const struct {
        const char *arch, *name;
    } cases[] = {
        {"llama-gqa", "model.layers.1.mlp.down_proj.weight"},
        {"llama-gqa", "lm_head.weight"},
        {"qwen2", "model.layers.0.self_attn.k_proj.bias"},
        {"gemma2", "model.layers.1.pre_feedforward_layernorm.weight"},
        {"phi3", "model.layers.0.self_attn.qkv_proj.weight"},
        {"llama-gqa", "model.norm.weight"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect(cases[i].arch, &(edit){.drop = cases[i].name}, BD_E_NOT_FOUND, cases[i].name);
    }
}

static void misshapen_tensors_are_named(void **state) {
    (void)state;
    expect("llama-gqa", &(edit){.resize = "model.layers.0.self_attn.q_proj.weight"}, BD_E_MISMATCH,
           "model.layers.0.self_attn.q_proj.weight");
    expect("phi3", &(edit){.resize = "model.layers.1.mlp.gate_up_proj.weight"}, BD_E_MISMATCH,
           "model.layers.1.mlp.gate_up_proj.weight");
}

static void tensors_nobody_reads_are_named(void **state) {
    static const struct {
        const char *arch, *name;
    } cases[] = {
        {"llama-gqa", "model.layers.0.self_attn.q_proj.bias"},
        {"llama-gqa", "model.layers.0.self_attn.q_norm.weight"},
        {"llama-gqa", "model.layers.2.mlp.up_proj.weight"},
        {"phi3", "model.layers.0.self_attn.q_proj.weight"},
        {"llama-gqa", "model.layers.01.mlp.up_proj.weight"},
        {"qwen2", "score.weight"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect(cases[i].arch, &(edit){.add = cases[i].name, .add_rows = 96, .add_cols = 96},
               BD_E_UNSUPPORTED, cases[i].name);
    }
}

static void harmless_tensors_are_ignored(void **state) {
    (void)state;
    expect("llama-gqa",
           &(edit){.add = "model.layers.0.self_attn.rotary_emb.inv_freq", .add_rows = 16}, BD_OK,
           NULL);
    expect("qwen2", &(edit){.add = "lm_head.weight", .add_copy_of = "model.embed_tokens.weight"},
           BD_OK, NULL);
}

static void tied_head_that_differs_is_named(void **state) {
    (void)state;
    expect(
        "qwen2",
        &(edit){.add = "lm_head.weight", .add_copy_of = "model.embed_tokens.weight", .flip = true},
        BD_E_MISMATCH, "lm_head.weight");
}

static void expect_options(const bd_model_options *options, bd_status status, const char *part) {
    bd_error err = {0};
    bd_model *model;
    const bd_status got = bd_model_open(options, &model, &err);
    print_message("%s: %s\n", bd_status_name(got), err.message);
    assert_int_equal(got, status);
    assert_non_null(strstr(err.message, part));
}

static void sizes_are_checked(void **state) {
    bd_model_options options = ms_options("tests/data/arch/llama-gqa");
    (void)state;
    options.max_model_len = 257;
    expect_options(&options, BD_E_LIMIT, "257 is more than the model's 256 positions");
    options.max_model_len = 0;
    options.kv_tokens = 1ull << 34;
    expect_options(&options, BD_E_LIMIT, "MiB = weights");
    options.kv_tokens = UINT64_MAX;
    expect_options(&options, BD_E_LIMIT, "KV blocks are too many");
    options.kv_tokens = 0;
    options.delta_pages = 1u << 31;
    expect_options(&options, BD_E_LIMIT, "delta pages");
    options.delta_pages = 0;
    options.rank_count = 3;
    expect_options(&options, BD_E_UNSUPPORTED, "not 3");
    options.rank_count = 8;
    expect_options(&options, BD_E_UNSUPPORTED, "do not divide by 8 ranks");
    options.rank_count = 1;
    options.rows_max = 0;
    expect_options(&options, BD_E_ARGUMENT, "at least one row");
    options = ms_options("tests/data/arch/no-such-model");
    expect_options(&options, BD_E_NOT_FOUND, "no-such-model");
}

/* The default on a CPU: four sequences of full length, and at least 16384 tokens. */
static void kv_default_is_as_promised(void **state) {
    bd_error err = {0};
    bd_model *model;
    bd_model_options options = ms_options("tests/data/arch/llama-gqa");
    (void)state;
    options.kv_tokens = 0;
    MS_OK(bd_model_open(&options, &model, &err), err);
    assert_int_equal(bd_model_kv_block_count(model), 16384 / 8);
    assert_int_equal(bd_model_kv_block_tokens(model), 8);
    assert_int_equal(bd_model_max_len(model), 256);
    bd_memory_plan plan;
    MS_OK(bd_model_plan(&options, bd_model_config_of(model), &plan, &err), err);
    assert_int_equal(plan.total, bd_model_memory(model)->total);
    assert_int_equal(plan.total,
                     plan.weights + plan.workspace + plan.kv + plan.logits + plan.deltas);
    bd_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unchanged_copies_open),
        cmocka_unit_test(missing_tensors_are_named),
        cmocka_unit_test(misshapen_tensors_are_named),
        cmocka_unit_test(tensors_nobody_reads_are_named),
        cmocka_unit_test(harmless_tensors_are_ignored),
        cmocka_unit_test(tied_head_that_differs_is_named),
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test(kv_default_is_as_promised),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
