/* test_tp_model.c - a model split over ranks against the same on one: logits, greedy tokens, every
 * kind of sampling, log-probabilities, mixed batches of variants; what cannot be split is refused
 * with the arithmetic; variants voided in a gate; a rank that fails or hangs in a step. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "tp_support.h"

enum { RUNS = 12, NEW = 6, PROMPT_MAX = 40, VARIANTS = 3 };

static const char *const variant_dirs[VARIANTS] = {
    "demo/deltas/zen-mini-french", "demo/deltas/zen-mini-coder", "demo/deltas/zen-mini-lexicon"};

typedef struct batch { /* runs over base and variants, in the order of variants */
    ms_run runs[RUNS];
    int32_t prompts[RUNS][PROMPT_MAX];
    bd_logit_edit edits[RUNS][4];
    float *logits;
} batch;

static uint64_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static uint64_t new_seed(void) {
    const uint64_t seed = bd_now_us();
    printf("  seed %llu\n", (unsigned long long)seed);
    return seed;
}

static bd_sampling sampling_of(uint32_t i, uint64_t seed) {
    const bd_sampling kinds[] = {
        {.temperature = 0, .top_p = 1},
        {.temperature = 0.9f, .top_p = 1, .top_k = 5},
        {.temperature = 1.1f, .top_p = 0.8f},
        {.temperature = 0.7f, .top_p = 0.6f, .top_k = 40},
        {.temperature = 1.0f, .top_p = 1, .min_p = 0.05f},
        {.temperature = 1.3f, .top_p = 0.95f, .top_k = 64, .min_p = 0.02f},
        {.temperature = 0.8f, .top_p = 1, .top_k = 65},
    };
    bd_sampling sampling = kinds[i % (sizeof kinds / sizeof kinds[0])];
    sampling.seed = seed + i;
    return sampling;
}

/* sampled false: greedy alone. */
static void make_batch(batch *b, const bd_model *model, uint64_t seed, bool sampled) {
    const uint32_t vocab = bd_model_config_of(model)->vocab;
    uint64_t state = seed;
    memset(b, 0, sizeof *b);
    b->logits = calloc((size_t)RUNS * NEW * bd_model_logits_width(model), sizeof *b->logits);
    assert_non_null(b->logits);
    for (uint32_t i = 0; i < RUNS; i++) {
        ms_run *run = &b->runs[i];
        run->prompt_count = 1 + (uint32_t)(next(&state) % PROMPT_MAX);
        run->new_count = NEW;
        for (uint32_t t = 0; t < run->prompt_count; t++)
            b->prompts[i][t] = (int32_t)(next(&state) % vocab);
        run->prompt = b->prompts[i];
        run->sampling = sampled ? sampling_of(i, seed) : (bd_sampling){.top_p = 1};
        run->top_rows = run->prompt_count < 3 ? run->prompt_count : 3;
        run->logits = b->logits + (size_t)i * NEW * bd_model_logits_width(model);
        if (!sampled || i % 3 != 2) continue;
        for (uint32_t e = 0; e < 4; e++)
            b->edits[i][e] =
                (bd_logit_edit){(int32_t)(next(&state) % (vocab / 4) + e * (vocab / 4)), 1.2f,
                                e == 0 ? -INFINITY : 3.0f};
        run->edits = b->edits[i];
        run->edit_count = 4;
    }
}

typedef struct opened {
    bd_model *model;
    tp_variant variants[VARIANTS];
    uint32_t variant_count;
} opened;

static bd_model_options tp_options(const char *dir, uint32_t ranks) {
    bd_model_options options = ms_options(dir);
    options.rank_count = ranks;
    options.kv_tokens = 4096;
    options.rows_max = 256;
    options.logits_rows_max = 64;
    options.seqs_max = 16;
    return options;
}

static void open_demo(opened *o, uint32_t ranks, uint32_t variants) {
    bd_error err = {0};
    uint32_t pages = 0;
    bd_model_options options = tp_options("demo/zen-mini", ranks);
    options.delta_slots = VARIANTS + 1;
    options.extra_vocab_max = 256;
    memset(o, 0, sizeof *o);
    MS_OK(bd_model_open(&options, &o->model, &err), err);
    assert_int_equal(bd_model_rank_count(o->model), ranks);
    o->variant_count = variants;
    for (uint32_t i = 0; i < variants; i++)
        pages += tp_variant_open(o->model, variant_dirs[i], pages, &o->variants[i]);
}

static void close_demo(opened *o) {
    for (uint32_t i = 0; i < o->variant_count; i++)
        tp_variant_close(&o->variants[i]);
    bd_model_close(o->model);
}

static void run_batch(opened *o, batch *b, uint32_t chunk) {
    for (uint32_t i = 0; o->variant_count > 0 && i < RUNS; i++) {
        const uint32_t group = i * (VARIANTS + 1) / RUNS;
        const bd_overlay *overlay = group == 0 ? NULL : o->variants[group - 1].overlay;
        b->runs[i].overlay = overlay;
        if (!overlay || overlay->extra_rows == 0) continue; /* a token that the variant added */
        b->prompts[i][b->runs[i].prompt_count / 2] =
            (int32_t)(bd_model_config_of(o->model)->vocab + i % overlay->extra_rows);
    }
    ms_run_all(o->model, b->runs, RUNS, chunk);
}

/* Places of tokens whose logits differ by rounding alone may be exchanged. */
static void compare_result(const bd_token_result *want, const bd_token_result *got) {
    assert_int_equal(got->id, want->id);
    assert_int_equal(got->fault, 0);
    assert_true(fabs((double)got->logprob - (double)want->logprob) < 1e-4);
    assert_true(got->rank <= want->rank + 1 + want->rank / 256 &&
                want->rank <= got->rank + 1 + got->rank / 256);
    assert_int_equal(got->top_count, want->top_count);
    for (uint32_t i = 0; i < want->top_count; i++)
        assert_true(fabs((double)got->top_logprobs[i] - (double)want->top_logprobs[i]) < 1e-4);
}

/* The worst relative L2 of the logits. */
static double compare(const batch *want, const batch *got, uint32_t width) {
    double worst = 0;
    double *wide = calloc(width, sizeof *wide);
    float *finite = calloc(width, sizeof *finite);
    assert_non_null(wide);
    assert_non_null(finite);
    for (uint32_t i = 0; i < RUNS; i++) {
        const ms_run *a = &want->runs[i], *b = &got->runs[i];
        for (uint32_t t = 0; t < NEW; t++) {
            uint32_t count = 0;
            compare_result(&a->results[t], &b->results[t]);
            for (uint32_t k = 0; k < width; k++) {
                const float x = a->logits[(size_t)t * width + k],
                            y = b->logits[(size_t)t * width + k];
                assert_int_equal(isinf(x), isinf(y));
                if (isinf(x)) continue;
                wide[count] = (double)x;
                finite[count++] = y;
            }
            const double l2 = ms_relative_l2(finite, wide, count);
            if (l2 > worst) worst = l2;
        }
        for (uint32_t t = 0; t < a->top_rows; t++)
            compare_result(&a->tops[t], &b->tops[t]);
    }
    free(wide);
    free(finite);
    return worst;
}

static void compare_demo(uint32_t ranks, bool sampled, uint32_t chunk, uint64_t seed) {
    opened one, many;
    batch *want = calloc(1, sizeof *want), *got = calloc(1, sizeof *got);
    assert_non_null(want);
    assert_non_null(got);
    open_demo(&one, 1, VARIANTS);
    open_demo(&many, ranks, VARIANTS);
    make_batch(want, one.model, seed, sampled);
    make_batch(got, many.model, seed, sampled);
    run_batch(&one, want, 20);
    run_batch(&many, got, chunk);
    const double worst = compare(want, got, bd_model_logits_width(one.model));
    printf("  %u ranks, chunks of %u: logits L2 %.1e\n", ranks, chunk, worst);
    assert_true(worst < 1e-5);
    free(want->logits);
    free(got->logits);
    free(want);
    free(got);
    close_demo(&one);
    close_demo(&many);
}

static void demo_greedy(void **state) {
    const uint64_t seed = new_seed();
    (void)state;
    compare_demo(2, false, 20, seed);
    compare_demo(4, false, 7, seed + 1);
}

static void demo_sampled(void **state) {
    const uint64_t seed = new_seed();
    (void)state;
    compare_demo(2, true, 16, seed);
    compare_demo(4, true, 20, seed + 1);
}

static void compare_models(const char *dir, uint32_t ranks, uint64_t seed) {
    bd_error err = {0};
    opened one = {0}, many = {0};
    batch *want = calloc(1, sizeof *want), *got = calloc(1, sizeof *got);
    assert_non_null(want);
    assert_non_null(got);
    const bd_model_options a = tp_options(dir, 1), b = tp_options(dir, ranks);
    MS_OK(bd_model_open(&a, &one.model, &err), err);
    MS_OK(bd_model_open(&b, &many.model, &err), err);
    make_batch(want, one.model, seed, false);
    make_batch(got, many.model, seed, false);
    run_batch(&one, want, 20);
    run_batch(&many, got, 20);
    const double worst = compare(want, got, bd_model_logits_width(one.model));
    printf("  %s, %u ranks: logits L2 %.1e\n", dir, ranks, worst);
    assert_true(worst < 1e-5);
    free(want->logits);
    free(got->logits);
    free(want);
    free(got);
    bd_model_close(one.model);
    bd_model_close(many.model);
}

/* Families whose heads divide, with biases, norms of heads, soft caps, fused tensors, windows. */
static void families(void **state) {
    static const struct {
        const char *dir;
        uint32_t ranks;
    } cases[] = {{"tests/data/arch/gemma2", 2},         {"tests/data/arch/gemma2", 4},
                 {"tests/data/arch/mistral-window", 2}, {"tests/data/arch/mistral-window", 4},
                 {"tests/data/arch/phi3", 2},           {"tests/data/arch/qwen2", 2},
                 {"tests/data/arch/qwen3", 2},          {"tests/data/arch/qwen3", 4}};
    const uint64_t seed = new_seed();
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++)
        compare_models(cases[c].dir, cases[c].ranks, seed + c);
}

/* ---- A model with a bias on every linear, which no golden has ---- */

enum { B_HIDDEN = 64, B_KV = 16, B_FFN = 128, B_VOCAB = 301, B_LAYERS = 2, B_TENSORS = 64 };

typedef struct made { /* tensors of random values */
    bd_tensor tensors[B_TENSORS];
    char names[B_TENSORS][64];
    uint32_t count;
} made;

static void declare(made *m, uint32_t rows, uint32_t cols, const char *format, uint32_t layer) {
    const uint32_t i = m->count++;
    assert_true(i < B_TENSORS);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(m->names[i], sizeof m->names[i], format, layer);
#pragma GCC diagnostic pop
    m->tensors[i] = (bd_tensor){.name = m->names[i],
                                .dtype = BD_DTYPE_F32,
                                .dtype_name = "F32",
                                .rank = cols ? 2 : 1,
                                .shape = {rows, cols},
                                .bytes = 4ull * rows * (cols ? cols : 1)};
}

static void declare_layer(made *m, uint32_t layer) {
    declare(m, B_HIDDEN, 0, "model.layers.%u.input_layernorm.weight", layer);
    declare(m, B_HIDDEN, 0, "model.layers.%u.post_attention_layernorm.weight", layer);
    declare(m, B_HIDDEN, B_HIDDEN, "model.layers.%u.self_attn.q_proj.weight", layer);
    declare(m, B_HIDDEN, 0, "model.layers.%u.self_attn.q_proj.bias", layer);
    declare(m, B_KV, B_HIDDEN, "model.layers.%u.self_attn.k_proj.weight", layer);
    declare(m, B_KV, 0, "model.layers.%u.self_attn.k_proj.bias", layer);
    declare(m, B_KV, B_HIDDEN, "model.layers.%u.self_attn.v_proj.weight", layer);
    declare(m, B_KV, 0, "model.layers.%u.self_attn.v_proj.bias", layer);
    declare(m, B_HIDDEN, B_HIDDEN, "model.layers.%u.self_attn.o_proj.weight", layer);
    declare(m, B_HIDDEN, 0, "model.layers.%u.self_attn.o_proj.bias", layer);
    declare(m, B_FFN, B_HIDDEN, "model.layers.%u.mlp.gate_proj.weight", layer);
    declare(m, B_FFN, 0, "model.layers.%u.mlp.gate_proj.bias", layer);
    declare(m, B_FFN, B_HIDDEN, "model.layers.%u.mlp.up_proj.weight", layer);
    declare(m, B_FFN, 0, "model.layers.%u.mlp.up_proj.bias", layer);
    declare(m, B_HIDDEN, B_FFN, "model.layers.%u.mlp.down_proj.weight", layer);
    declare(m, B_HIDDEN, 0, "model.layers.%u.mlp.down_proj.bias", layer);
}

static void make_biased(const char *dir, uint64_t seed) {
    static const char config[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_act\":"
        "\"silu\","
        "\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":8,\"num_key_value_heads\":2,\"head_dim\":8,\"vocab_size\":301,"
        "\"max_position_embeddings\":128,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,"
        "\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":false,"
        "\"bos_token_id\":1,\"eos_token_id\":2,\"torch_dtype\":\"float32\"}";
    char path[300];
    bd_error err = {0};
    bd_safetensors_writer *writer;
    made *m = calloc(1, sizeof *m);
    assert_non_null(m);
    declare(m, B_VOCAB, B_HIDDEN, "model.embed_tokens.weight", 0);
    for (uint32_t layer = 0; layer < B_LAYERS; layer++)
        declare_layer(m, layer);
    declare(m, B_HIDDEN, 0, "model.norm.weight", 0);
    declare(m, B_VOCAB, B_HIDDEN, "lm_head.weight", 0);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    MS_OK(bd_safetensors_writer_create(path, m->tensors, m->count, 8, &writer, &err), err);
    for (uint32_t i = 0; i < m->count; i++) {
        for (uint64_t at = 0; at < m->tensors[i].bytes; at += 4) {
            const float value = (float)next(&seed) / 1.5e9f - 0.7f;
            MS_OK(bd_safetensors_writer_append(writer, &value, 4, &err), err);
        }
    }
    MS_OK(bd_safetensors_writer_finish(writer, &err), err);
    snprintf(path, sizeof path, "%s/config.json", dir);
    MS_OK(bd_file_replace(path, config, sizeof config - 1, &err), err);
    free(m);
}

static void biases_are_added_once(void **state) {
    const uint64_t seed = new_seed();
    char dir[] = "/tmp/bd-tp-XXXXXX", path[300];
    (void)state;
    assert_non_null(mkdtemp(dir));
    make_biased(dir, seed);
    for (uint32_t ranks = 2; ranks <= 8; ranks *= 2)
        compare_models(dir, ranks, seed);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}

/* What is reported follows from the logits themselves, computed here anew. */
static void reports_follow_from_logits(void **state) {
    const uint64_t seed = new_seed();
    opened o;
    batch b;
    (void)state;
    open_demo(&o, 4, 0);
    make_batch(&b, o.model, seed, false);
    run_batch(&o, &b, 20);
    const uint32_t width = bd_model_logits_width(o.model);
    for (uint32_t i = 0; i < RUNS * NEW; i++) {
        const bd_token_result *result = &b.runs[i / NEW].results[i % NEW];
        const float *logits = b.logits + (size_t)i * width;
        double sum = 0;
        uint32_t best = 0, second = 0, before = 0;
        for (uint32_t k = 0; k < width; k++) {
            sum += exp((double)logits[k]);
            if (logits[k] > logits[best]) best = k;
        }
        for (uint32_t k = 0; k < width; k++) {
            if (k != best && (second == best || logits[k] > logits[second])) second = k;
            if (logits[k] > logits[result->id]) before++;
        }
        assert_int_equal(result->id, best);
        assert_int_equal(result->rank, before + 1);
        assert_int_equal(result->top_ids[0], best);
        assert_true(logits[result->top_ids[1]] == logits[second]);
        assert_true(fabs((double)result->logprob - ((double)logits[best] - log(sum))) < 1e-5);
    }
    free(b.logits);
    close_demo(&o);
}

static void expect_refusal(const char *dir, uint32_t ranks, const char *words) {
    bd_error err = {0};
    bd_model *model;
    const bd_model_options options = tp_options(dir, ranks);
    assert_int_equal(bd_model_open(&options, &model, &err), BD_E_UNSUPPORTED);
    assert_string_equal(err.subject, "tensor_parallel");
    if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
}

static void what_cannot_be_split(void **state) {
    (void)state;
    expect_refusal("demo/zen-mini", 8, "4 attention heads do not divide by 8 ranks");
    expect_refusal("demo/zen-mini", 3, "1, 2, 4 or 8 ranks, not 3");
    expect_refusal("demo/zen-mini", 16, "not 16");
    expect_refusal("tests/data/arch/llama-gqa", 2, "3 key-value heads");
    expect_refusal("tests/data/arch/phi3", 4, "144 is not a multiple of 32");
}

/* ---- Gates ---- */

typedef struct gate_ctx {
    bd_model *model;
    const bd_step *step;
    uint32_t at; /* the ready index at which overlay 0 is voided */
} gate_ctx;

static bd_status void_at(void *ctx, uint32_t index, bd_error *err) {
    const gate_ctx *gate = ctx;
    (void)err;
    if (index == gate->at) bd_model_step_void(gate->model, gate->step, 0);
    return BD_OK;
}

/* One sequence of the base and one of a variant in a step; the base's logits are the same whatever
 * happens to the other. */
static void a_voided_variant_harms_nobody(void **state) {
    opened o;
    bd_error err = {0};
    (void)state;
    open_demo(&o, 4, 1);
    const uint32_t width = bd_model_logits_width(o.model), layers = 8;
    float *want = calloc(width, sizeof *want), *got = calloc(width, sizeof *got);
    const int32_t tokens[] = {5, 17, 300, 42, 5, 17, 300, 42};
    const uint32_t positions[] = {0, 1, 2, 3, 0, 1, 2, 3}, rows[] = {0, 0, 0, 0, 1, 1, 1, 1};
    const uint32_t blocks[] = {3, 9};
    const bd_seq seqs[] = {
        {.row_count = 4, .kv_blocks = &blocks[0], .sampling.top_p = 1},
        {.first_row = 4, .row_count = 4, .kv_blocks = &blocks[1], .sampling.top_p = 1}};
    const bd_segment segments[] = {{-1, 0, 4}, {0, 4, 4}};
    const bd_overlay *overlays[] = {o.variants[0].overlay};
    const bd_logits_row logits_rows[] = {{.row = 3, .seq = 0, .target = -1},
                                         {.row = 7, .seq = 1, .target = -1}};
    bd_token_result results[2];
    bd_step step = {.row_count = 8,
                    .seq_count = 2,
                    .segment_count = 2,
                    .overlay_count = 1,
                    .logits_row_count = 2,
                    .tokens = tokens,
                    .positions = positions,
                    .seq_of_row = rows,
                    .seqs = seqs,
                    .segments = segments,
                    .overlays = overlays,
                    .logits_rows = logits_rows};
    for (uint32_t at = 0; at <= layers + 2; at++) { /* the last: never */
        gate_ctx gate = {o.model, &step, at == 0 ? UINT32_MAX : at};
        step.id = at + 1;
        MS_OK(bd_model_forward(o.model, &step, void_at, &gate, &err), err);
        MS_OK(bd_model_wait(o.model, &step, UINT64_MAX, results, &err), err);
        MS_OK(bd_model_logits_get(o.model, 0, at == 0 ? want : got, &err), err);
        if (at > 0) assert_memory_equal(want, got, width * sizeof *want);
    }
    free(want);
    free(got);
    close_demo(&o);
}

/* ---- Ranks that fail ---- */

static struct {
    bd_backend_ops ops;
    _Atomic uint32_t rank; /* that fails or hangs; UINT32_MAX: none */
    _Atomic bool hangs, release;
} planted;

static bd_status planted_open(const bd_backend_options *options, bd_backend **out, bd_error *err) {
    return bd_backend_cpu_ops()->open(options, out, err);
}

static _Thread_local uint32_t this_rank; /* by the thread's name */

static uint32_t rank_of_thread(void) {
    char name[16] = "";
    if (this_rank != 0) return this_rank - 1;
    pthread_getname_np(pthread_self(), name, sizeof name);
    this_rank = strncmp(name, "bd-exec-", 8) == 0 ? (uint32_t)atoi(name + 8) + 1 : 1;
    return this_rank - 1;
}

static bd_status planted_linear(bd_backend *backend, const bd_step *step, uint32_t layer,
                                bd_group group, bd_error *err) {
    if (layer == 3 && group == BD_GROUP_GATE_UP && rank_of_thread() == atomic_load(&planted.rank)) {
        while (atomic_load(&planted.hangs) && !atomic_load(&planted.release))
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        if (!atomic_load(&planted.hangs))
            return bd_fail(err, BD_E_MEMORY, "device", "a planted fault");
    }
    return bd_backend_cpu_ops()->linear(backend, step, layer, group, err);
}

static void open_planted(bd_model **model, uint64_t wait_us) {
    bd_error err = {0};
    bd_model_options options = tp_options("demo/zen-mini", 4);
    planted.ops = *bd_backend_cpu_ops();
    planted.ops.open = planted_open;
    planted.ops.linear = planted_linear;
    atomic_store(&planted.rank, UINT32_MAX);
    atomic_store(&planted.hangs, false);
    atomic_store(&planted.release, false);
    options.ops = &planted.ops;
    options.rank_wait_us = wait_us;
    MS_OK(bd_model_open(&options, model, &err), err);
}

static bd_status one_step(bd_model *model, uint64_t id, bd_error *err) {
    const int32_t token = 7;
    const uint32_t zero = 0;
    const bd_seq seq = {.row_count = 1, .kv_blocks = &zero, .sampling.top_p = 1};
    const bd_segment segment = {-1, 0, 1};
    const bd_logits_row logits_row = {.target = -1};
    bd_token_result result;
    const bd_step step = {.id = id,
                          .row_count = 1,
                          .seq_count = 1,
                          .segment_count = 1,
                          .logits_row_count = 1,
                          .tokens = &token,
                          .positions = &zero,
                          .seq_of_row = &zero,
                          .seqs = &seq,
                          .segments = &segment,
                          .logits_rows = &logits_row};
    const bd_status s = bd_model_forward(model, &step, NULL, NULL, err);
    return s == BD_OK ? bd_model_wait(model, &step, UINT64_MAX, &result, err) : s;
}

static void a_rank_that_fails(void **state) {
    (void)state;
    for (uint32_t r = 0; r < 4; r++) {
        bd_model *model;
        bd_error err = {0};
        open_planted(&model, 60000000);
        MS_OK(one_step(model, 1, &err), err);
        atomic_store(&planted.rank, r);
        assert_int_equal(one_step(model, 2, &err), BD_E_DEVICE);
        char words[64];
        snprintf(words, sizeof words, "rank %u: a planted fault", r);
        if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
        atomic_store(&planted.rank, UINT32_MAX);
        assert_int_equal(one_step(model, 3, &err), BD_E_DEVICE); /* lost for good */
        bd_model_close(model);
    }
}

static void a_rank_that_hangs(void **state) {
    bd_model *model;
    bd_error err = {0};
    (void)state;
    open_planted(&model, 3000000);
    MS_OK(one_step(model, 1, &err), err);
    atomic_store(&planted.hangs, true);
    atomic_store(&planted.rank, 2);
    assert_int_equal(one_step(model, 2, &err), BD_E_DEVICE);
    assert_int_equal(one_step(model, 3, &err), BD_E_DEVICE);
    atomic_store(&planted.release, true); /* else nothing could be freed */
    bd_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(demo_greedy),
        cmocka_unit_test(demo_sampled),
        cmocka_unit_test(families),
        cmocka_unit_test(biases_are_added_once),
        cmocka_unit_test(reports_follow_from_logits),
        cmocka_unit_test(what_cannot_be_split),
        cmocka_unit_test(a_voided_variant_harms_nobody),
        cmocka_unit_test(a_rank_that_fails),
        cmocka_unit_test(a_rank_that_hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
