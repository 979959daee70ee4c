/* test_gpu_tp.c - models split over ranks on the CUDA backend: every operator beside one rank's, goldens of transformers, mixed
 * variants from deltas of one and of eight shards, recorded steps, a rank that fails, more ranks than devices.
 *
 * With one device all ranks share it and meet through their own kernels (comm "p2p"); with two or more there are NCCL too, alone and
 * with the own kernels beside it. NCCL must be found: LD_LIBRARY_PATH names the folder of libnccl.so.2 (that of PyTorch's packages
 * is nvidia/nccl/lib). Where it is built, and then on a machine with two GPUs (10 minutes are enough for all):
 *
 *   cmake -G Ninja -S . -B build -DBD_CUDA=on -DBD_BENCH=ON -DCMAKE_CUDA_ARCHITECTURES=90a-real
 *   ninja -C build && bench/gpu.sh pack build/gpu.tar.xz        what to carry: this, tests/data/unpack.sh's files, demo/
 *   bench/gpu.sh unpack gpu.tar.xz && tests/data/unpack.sh && bench/gpu.sh ranks
 *   bench/gpu.sh comm
 *
 * bench/gpu.sh ranks runs test_gpu_repack, test_gpu_ranks and test_gpu_tp, comm runs bench_gpu_comm; what was skipped is named. One
 * alone: LD_LIBRARY_PATH=build/lib build/tests/test_gpu_tp [SEED]. What comm has shown goes into peers.h (cuda_own_bytes). */
#include "gpu_ranks.h"

#include <sys/stat.h>
#include <unistd.h>

#include "../unit/tp_support.h"
#include "bitdelta/tools/compress.h"

enum { RUNS = 9, NEW = 6, PROMPT_MAX = 40, VARIANTS = 2 };
#define WAIT_US 30000000u

static char work_dir[] = "/tmp/bd-gpu-tp-XXXXXX";

static bd_model_options options_of(const char *dir, const bd_backend_ops *ops, uint32_t ranks, bd_dtype dtype, bd_kernels kernels) {
    bd_model_options o = ms_options(dir);
    o.ops = ops, o.rank_count = ranks, o.dtype = dtype, o.kernels = kernels;
    o.kv_tokens = 4096, o.rows_max = 256, o.logits_rows_max = 64, o.seqs_max = 16, o.kv_block_tokens = 16;
    o.delta_slots = VARIANTS + 1, o.rank_wait_us = WAIT_US;
    return o;
}

typedef struct opened {
    bd_model *model;
    tp_variant variants[VARIANTS];
    uint32_t variant_count;
} opened;

static void open_model(opened *m, const bd_model_options *options, const char *const *deltas, uint32_t count) {
    bd_error err = {0};
    uint32_t pages = 0;
    memset(m, 0, sizeof *m);
    MS_OK(bd_model_open(options, &m->model, &err), err);
    m->variant_count = count;
    for (uint32_t v = 0; v < count; v++) pages += tp_variant_open(m->model, deltas[v], pages, &m->variants[v]);
}
static void close_model(opened *m) {
    for (uint32_t v = 0; v < m->variant_count; v++) tp_variant_close(&m->variants[v]);
    bd_model_close(m->model);
}

/* ---- Batches of sequences, the first of the base ---- */

typedef struct batch {
    ms_run runs[RUNS];
    int32_t prompts[RUNS][PROMPT_MAX];
    bd_logit_edit edits[RUNS];
    float *logits;
} batch;

static batch *batch_make(const opened *m, uint64_t seed, bool sampled) {
    const uint32_t vocab = bd_model_config_of(m->model)->vocab, width = bd_model_logits_width(m->model);
    const uint64_t kept = test_state;
    batch *b = calloc(1, sizeof *b);
    test_state = seed;
    b->logits = calloc((size_t)RUNS * NEW * width, sizeof *b->logits);
    for (uint32_t i = 0; i < RUNS; i++) {
        ms_run *run = &b->runs[i];
        const uint32_t group = i * (m->variant_count + 1) / RUNS;
        run->prompt_count = 1 + (uint32_t)(test_next() % PROMPT_MAX), run->new_count = NEW;
        for (uint32_t t = 0; t < run->prompt_count; t++) b->prompts[i][t] = (int32_t)(test_next() % vocab);
        run->prompt = b->prompts[i];
        run->overlay = group ? m->variants[group - 1].overlay : NULL;
        run->sampling = (bd_sampling){.top_p = 1};
        if (sampled) run->sampling = (bd_sampling){.temperature = i % 3 ? 0.8f : 0, .top_p = i % 2 ? 0.9f : 1, .top_k = i % 4 == 1 ? 20 : 0, .min_p = i == 5 ? 0.05f : 0, .seed = seed + i};
        b->edits[i] = (bd_logit_edit){(int32_t)(test_next() % vocab), 1.3f, 4};
        if (sampled && i % 3 == 2) run->edits = &b->edits[i], run->edit_count = 1;
        run->logits = b->logits + (size_t)i * NEW * width;
    }
    test_state = kept;
    return b;
}
static void batch_free(batch *b) {
    free(b->logits);
    free(b);
}

/* Every step's token is `forced`'s, so that runs stay comparable after a near-tie. */
static void batch_run(const opened *m, batch *b, const batch *forced, uint32_t chunk) {
    ms_step *s = calloc(1, sizeof *s);
    ms_assign_blocks(m->model, b->runs, RUNS);
    for (uint64_t id = 1; ms_step_once(m->model, s, b->runs, RUNS, chunk, id); id++)
        for (uint32_t i = 0; forced && i < RUNS; i++)
            if (b->runs[i].made) b->runs[i].ids[b->runs[i].made - 1] = forced->runs[i].ids[b->runs[i].made - 1];
    for (uint32_t i = 0; i < RUNS; i++) free(b->runs[i].blocks);
    free(s);
}

static double batch_distance(const opened *m, const batch *got, const batch *want) {
    const uint32_t width = bd_model_logits_width(m->model);
    double worst = 0, *wide = calloc(width, sizeof *wide);
    for (uint32_t i = 0; i < RUNS * NEW; i++) {
        for (uint32_t k = 0; k < width; k++) wide[k] = want->logits[(size_t)i * width + k];
        const double l2 = relative_l2(got->logits + (size_t)i * width, wide, width);
        if (!(l2 <= worst)) worst = l2;
    }
    free(wide);
    return worst;
}

/* Of a greedy token the best logit, and what is reported of it, follow from the logits that all ranks have. */
static void check_reports(const opened *m, const batch *b) {
    const uint32_t width = bd_model_logits_width(m->model);
    for (uint32_t i = 0; i < RUNS * NEW; i++) {
        const bd_token_result *result = &b->runs[i / NEW].results[i % NEW];
        const float *logits = b->logits + (size_t)i * width;
        double sum = 0;
        uint32_t best = 0;
        for (uint32_t k = 0; k < width; k++) {
            if (logits[k] > logits[best]) best = k;
            sum += exp((double)logits[k]);
        }
        assert_int_equal(result->top_ids[0], best);
        assert_true(fabs((double)result->top_logprobs[0] - ((double)logits[best] - log(sum))) < 1e-3);
        if (b->runs[i / NEW].sampling.temperature == 0 && !b->runs[i / NEW].edit_count) assert_int_equal(result->id, best);
    }
}

static void same_result(const bd_token_result *a, const bd_token_result *b) {
    assert_true(a->id == b->id && a->rank == b->rank && a->fault == b->fault && a->top_count == b->top_count);
    assert_memory_equal(&a->logprob, &b->logprob, sizeof a->logprob);
    assert_memory_equal(a->top_ids, b->top_ids, a->top_count * sizeof *a->top_ids);
    assert_memory_equal(a->top_logprobs, b->top_logprobs, a->top_count * sizeof *a->top_logprobs);
}

/* ---- Every operator beside one rank's ---- */

static bd_cuda *cuda_of_rank(const opened *m, uint32_t r) { return (bd_cuda *)bd_model_backend(bd_model_rank(m->model, r)); }

static float *floats_get(const bd_cuda *cuda, const float *device, size_t count) {
    float *out = malloc(count * 4 + 4);
    CUDA_OK(cudaMemcpy(out, device, count * 4, cudaMemcpyDeviceToHost));
    (void)cuda;
    return out;
}
static float *halves_get(const bd_cuda *cuda, const uint16_t *device, size_t count) {
    uint16_t *halves = malloc(count * 2 + 2);
    float *out = malloc(count * 4 + 4);
    CUDA_OK(cudaMemcpy(halves, device, count * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) out[i] = cuda->fp16 ? bd_f16_to_f32(halves[i]) : bd_bf16_to_f32(halves[i]);
    free(halves);
    return out;
}

/* Columns [first, first + cols) of `whole`, rows of `width`, against a rank's rows of `cols`. */
static void compare_slice(const char *what, uint32_t layer, uint32_t rank, const float *got, const float *whole, uint32_t rows, uint32_t cols, uint32_t width, uint32_t first, double bound) {
    double *want = calloc((size_t)rows * cols, sizeof *want);
    for (uint32_t m = 0; m < rows; m++)
        for (uint32_t c = 0; c < cols; c++) want[(size_t)m * cols + c] = whole[(size_t)m * width + first + c];
    CHECK_L2(got, want, (size_t)rows * cols, bound, "%s, layer %u, rank %u", what, layer, rank);
    free(want);
}

typedef struct side { /* one of the two models in lockstep */
    opened *m;
    uint32_t ranks;
    bd_step *steps; /* with each rank's overlays */
} side;

#define LOCKSTEP(s, call)                                                                          \
    for (uint32_t r = 0; r < (s)->ranks; r++) {                                                    \
        bd_error err = {0};                                                                        \
        bd_backend *backend = bd_model_backend(bd_model_rank((s)->m->model, r));                   \
        const bd_backend_ops *ops = bd_model_ops((s)->m->model);                                   \
        const bd_step *step = &(s)->steps[r];                                                      \
        CUDA_OK(cudaSetDevice(((bd_cuda *)backend)->device));                                      \
        MS_OK(call, err);                                                                          \
    }
static void settle(const side *s) {
    for (uint32_t r = 0; r < s->ranks; r++) CUDA_OK(cudaStreamSynchronize(cuda_of_rank(s->m, r)->stream));
}

/* A 16-bit array's or a float32's columns of each rank; parts < ranks: repeated. */
static void compare_columns(const char *what, uint32_t layer, const side *one, const side *many, size_t member, bool half, uint32_t rows, uint32_t width, uint32_t parts, double bound) {
    const bd_cuda *first = cuda_of_rank(one->m, 0);
    const void *whole_at = *(void *const *)(const void *)((const char *)first + member);
    float *whole = half ? halves_get(first, whole_at, (size_t)rows * width) : floats_get(first, whole_at, (size_t)rows * width);
    for (uint32_t r = 0; r < many->ranks; r++) {
        const bd_cuda *cuda = cuda_of_rank(many->m, r);
        const void *at = *(void *const *)(const void *)((const char *)cuda + member);
        const uint32_t cols = width / parts, part = r * parts / many->ranks;
        float *got = half ? halves_get(cuda, at, (size_t)rows * cols) : floats_get(cuda, at, (size_t)rows * cols);
        compare_slice(what, layer, r, got, whole, rows, cols, width, part * cols, bound);
        free(got);
    }
    free(whole);
}

/* On all ranks the same bits, and near the one's. */
static void compare_stream(const char *what, uint32_t layer, const side *one, const side *many, uint32_t rows, double bound) {
    const uint32_t hidden = bd_model_config_of(one->m->model)->hidden;
    compare_columns(what, layer, one, many, offsetof(bd_cuda, residual), false, rows, hidden, 1, bound);
    float *first = floats_get(NULL, cuda_of_rank(many->m, 0)->residual, (size_t)rows * hidden);
    for (uint32_t r = 1; r < many->ranks; r++) {
        float *other = floats_get(NULL, cuda_of_rank(many->m, r)->residual, (size_t)rows * hidden);
        if (memcmp(first, other, (size_t)rows * hidden * 4)) fail_msg("%s, layer %u: ranks 0 and %u differ", what, layer, r);
        free(other);
    }
    free(first);
}

static void both_layers(side *one, side *many, uint32_t rows, bool fp16) {
    const bd_model_config *c = bd_model_config_of(one->m->model);
    const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, kv_parts = c->kv_heads < many->ranks ? c->kv_heads : many->ranks;
    const double bound = fp16 ? 5e-3 : 3e-2;
    side *sides[2] = {one, many};
    for (uint32_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < 2; i++) {
            LOCKSTEP(sides[i], ops->norm_residual(backend, step, l, BD_NORM_INPUT, l > 0, l ? l - 1 : 0, BD_NORM_COUNT, &err));
            LOCKSTEP(sides[i], ops->linear(backend, step, l, BD_GROUP_QKV, &err));
            settle(sides[i]);
        }
        compare_stream("down", l, one, many, rows, bound);
        compare_columns("q", l, one, many, offsetof(bd_cuda, q_in), false, rows, q, many->ranks, bound);
        compare_columns("k", l, one, many, offsetof(bd_cuda, k_in), false, rows, kv, kv_parts, bound);
        compare_columns("v", l, one, many, offsetof(bd_cuda, v_in), false, rows, kv, kv_parts, bound);
        for (int i = 0; i < 2; i++) {
            LOCKSTEP(sides[i], ops->rope_kv_write(backend, step, l, &err));
            LOCKSTEP(sides[i], ops->attention(backend, step, l, &err));
            LOCKSTEP(sides[i], ops->linear(backend, step, l, BD_GROUP_O, &err));
            settle(sides[i]);
        }
        compare_columns("attention", l, one, many, offsetof(bd_cuda, attn), true, rows, q, many->ranks, bound);
        for (int i = 0; i < 2; i++) {
            LOCKSTEP(sides[i], ops->norm_residual(backend, step, l, BD_NORM_PRE_FFN, true, l, BD_NORM_COUNT, &err));
            LOCKSTEP(sides[i], ops->linear(backend, step, l, BD_GROUP_GATE_UP, &err));
            settle(sides[i]);
        }
        compare_stream("o", l, one, many, rows, bound);
        compare_columns("gate and up", l, one, many, offsetof(bd_cuda, act), true, rows, c->ffn, many->ranks, bound);
        for (int i = 0; i < 2; i++) LOCKSTEP(sides[i], ops->linear(backend, step, l, BD_GROUP_DOWN, &err));
    }
}

static void compare_operators(const char *dir, const char *const *deltas, uint32_t variants, uint32_t ranks, bool fp16) {
    const bd_dtype dtype = fp16 ? BD_DTYPE_F16 : BD_DTYPE_BF16;
    bd_model_options a = options_of(dir, ranks_backend_ops(RANKS_P2P), 1, dtype, BD_KERNELS_PLAIN), b = options_of(dir, ranks_backend_ops(RANKS_P2P), ranks, dtype, BD_KERNELS_PLAIN);
    opened models[2];
    a.no_recording = b.no_recording = true;
    enum { ROWS = 24 };
    int32_t tokens[ROWS];
    uint32_t positions[ROWS], seq_of_row[ROWS], blocks[3] = {5, 2, 7};
    bd_seq seqs[3];
    bd_segment segments[3];
    bd_logits_row logits_rows[3];
    bd_step steps[2][BD_COMM_RANKS_MAX];
    const bd_overlay *overlays[2][BD_COMM_RANKS_MAX][2];
    open_model(&models[0], &a, deltas, variants);
    open_model(&models[1], &b, deltas, variants);
    const uint32_t vocab = bd_model_config_of(models[0].model)->vocab;
    for (uint32_t i = 0; i < ROWS; i++) tokens[i] = (int32_t)(test_next() % vocab), positions[i] = i % 8, seq_of_row[i] = i / 8;
    tokens[3] = 0, tokens[4] = (int32_t)vocab - 1, tokens[11] = (int32_t)(vocab / ranks), tokens[12] = (int32_t)((vocab + ranks - 1) / ranks);
    for (uint32_t s = 0; s < 3; s++) {
        seqs[s] = (bd_seq){.first_row = 8 * s, .row_count = 8, .kv_blocks = &blocks[s], .sampling.top_p = 1};
        segments[s] = (bd_segment){s < variants + 1 ? (int32_t)s - 1 : -1, 8 * s, 8};
        logits_rows[s] = (bd_logits_row){.row = 8 * s + 7, .seq = s, .target = -1, .top_count = 5};
    }
    side sides[2] = {{&models[0], 1, steps[0]}, {&models[1], ranks, steps[1]}};
    for (int i = 0; i < 2; i++)
        for (uint32_t r = 0; r < sides[i].ranks; r++) {
            for (uint32_t v = 0; v < variants; v++) {
                const bd_overlay *o = models[i].variants[v].overlay;
                overlays[i][r][v] = o->ranks ? o->ranks[r] : o;
            }
            steps[i][r] = (bd_step){.id = 1, .row_count = ROWS, .seq_count = 3, .segment_count = 3, .overlay_count = variants, .logits_row_count = 3, .tokens = tokens, .positions = positions,
                                    .seq_of_row = seq_of_row, .seqs = seqs, .segments = segments, .overlays = overlays[i][r], .logits_rows = logits_rows};
        }
    for (int i = 0; i < 2; i++) {
        LOCKSTEP(&sides[i], ops->step_begin(backend, step, &err));
        LOCKSTEP(&sides[i], ops->embed(backend, step, &err));
        settle(&sides[i]);
    }
    compare_stream("embedding", 0, &sides[0], &sides[1], ROWS, 0); /* one rank has the row: the sum is exact */
    both_layers(&sides[0], &sides[1], ROWS, fp16);
    bd_token_result results[2][BD_COMM_RANKS_MAX][3];
    const uint32_t layers = bd_model_config_of(models[0].model)->layers;
    for (int i = 0; i < 2; i++) {
        LOCKSTEP(&sides[i], ops->norm_residual(backend, step, layers, BD_NORM_INPUT, true, layers - 1, BD_NORM_COUNT, &err));
        LOCKSTEP(&sides[i], ops->head(backend, step, &err));
        LOCKSTEP(&sides[i], ops->sample(backend, step, &err));
        LOCKSTEP(&sides[i], ops->step_wait(backend, step, bd_now_us() + WAIT_US, results[i][r], &err));
    }
    compare_columns("logits", layers, &sides[0], &sides[1], offsetof(bd_cuda, logits), false, 3, vocab, 1, fp16 ? 5e-3 : 3e-2);
    for (uint32_t r = 1; r < ranks; r++)
        for (int i = 0; i < 3; i++) same_result(&results[1][0][i], &results[1][r][i]);
    close_model(&models[0]);
    close_model(&models[1]);
}

/* ---- Goldens ---- */

static char *delta_path(const char *name, uint32_t shards) {
    static char paths[8][300];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s-%u", work_dir, name, shards);
    return path;
}
static char *base_path(const char *name) {
    static char paths[4][300];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "tests/data/arch/%s", name);
    return path;
}
static const char *compressed(const char *name, uint32_t shards) {
    struct stat there;
    char *out = delta_path(name, shards), tuned[320];
    bd_error err = {0};
    if (stat(out, &there) == 0) return out;
    snprintf(tuned, sizeof tuned, "%s/tuned", base_path(name));
    const bd_compress_request request = {.base_dir = base_path(name), .finetuned_dir = tuned, .out_dir = out, .base_name = "base", .variant_name = "variant", .shards = shards, .json = true};
    FILE *null = fopen("/dev/null", "w");
    MS_OK(bd_compress_run(&request, null, null, &err), err);
    fclose(null);
    return out;
}

static void check_golden(const opened *m, const cJSON *prompts, bool variant, double bound) {
    const cJSON *prompt;
    const uint32_t width = bd_model_logits_width(m->model);
    cJSON_ArrayForEach(prompt, prompts) {
        uint32_t count, wanted;
        int32_t *ids = ms_ids(ms_get(prompt, "ids"), &count);
        double *logits = ms_numbers(ms_get(prompt, "logits"), &wanted);
        assert_int_equal(wanted, width);
        float *got = calloc(width, sizeof *got);
        ms_run run = {.prompt = ids, .prompt_count = count, .new_count = 1, .overlay = variant ? m->variants[0].overlay : NULL, .sampling.top_p = 1, .logits = got};
        ms_run_all(m->model, &run, 1, 64);
        CHECK_L2(got, logits, width, bound, "%u ids, variant %d", count, variant);
        uint32_t best = 0;
        double second = -INFINITY;
        for (uint32_t k = 1; k < width; k++)
            if (logits[k] > logits[best]) best = k;
        for (uint32_t k = 0; k < width; k++)
            if (k != best && logits[k] > second) second = logits[k];
        if (logits[best] - second > 0.2) assert_int_equal(run.results[0].id, best);
        free(ids), free(logits), free(got);
    }
}

static void golden_model(const char *name, int kind, uint32_t ranks, bd_dtype dtype, bd_kernels kernels) {
    char path[320];
    snprintf(path, sizeof path, "%s/golden.json", base_path(name));
    cJSON *golden = ms_json(path);
    for (uint32_t shards = 1; shards <= 8; shards *= 8) {
        const char *delta = compressed(name, shards);
        opened m;
        bd_model_options options = options_of(base_path(name), ranks_backend_ops(kind), ranks, dtype, kernels);
        options.no_recording = true; /* they are prompts, which are launched */
        open_model(&m, &options, &delta, 1);
        check_golden(&m, ms_get(golden, "base"), false, dtype == BD_DTYPE_F16 ? 4e-3 : 2e-2); /* as check_goldens.py */
        check_golden(&m, ms_get(golden, "variant"), true, dtype == BD_DTYPE_F16 ? 4e-3 : 2e-2);
        close_model(&m);
    }
    cJSON_Delete(golden);
}

#define FOR_COMMS(kind, ranks, most)                                                                                           \
    for (int kind = 0; kind < RANKS_KINDS; kind++)                                                                             \
        for (uint32_t ranks = 2; ranks <= (most); ranks *= 2)                                                                  \
            if (ranks_refusal(kind, ranks)) printf("%s, %u ranks: skipped, %s\n", ranks_kind_names[kind], ranks, ranks_refusal(kind, ranks)); \
            else

static void test_goldens(void **state) {
    (void)state;
    static const char *const names[] = {"tp-llama", "tp-qwen2"};
    FOR_COMMS(kind, ranks, 8) {
        printf("%s, %u ranks\n", ranks_kind_names[kind], ranks);
        for (int n = 0; n < 2; n++) {
            golden_model(names[n], kind, ranks, BD_DTYPE_BF16, BD_KERNELS_AUTO);
            golden_model(names[n], kind, ranks, BD_DTYPE_F16, BD_KERNELS_PLAIN);
        }
    }
}

static const char *const demo_deltas[VARIANTS] = {"demo/deltas/zen-mini-french", "demo/deltas/zen-mini-coder"};

static void test_operators(void **state) {
    (void)state;
    for (uint32_t ranks = 2; ranks <= 4; ranks *= 2) {
        if (ranks_refusal(RANKS_P2P, ranks)) continue;
        for (int fp16 = 0; fp16 < 2; fp16++) {
            compare_operators("demo/zen-mini", demo_deltas, VARIANTS, ranks, fp16);
            const char *llama[] = {compressed("tp-llama", 1), compressed("tp-llama", 8)}, *qwen[] = {compressed("tp-qwen2", 8), compressed("tp-qwen2", 1)};
            compare_operators(base_path("tp-llama"), llama, 2, ranks, fp16);
            compare_operators(base_path("tp-qwen2"), qwen, 2, ranks, fp16);
        }
    }
}

/* Against one rank of the CUDA backend and one of the CPU; with recordings and without, bit by bit; every rank replays. */
static void demo_case(int kind, uint32_t ranks, bd_dtype dtype, const batch *want, const batch *cpu) {
    bd_model_options options = options_of("demo/zen-mini", ranks_backend_ops(kind), ranks, dtype, BD_KERNELS_AUTO);
    opened recorded, launched;
    const double bound = dtype == BD_DTYPE_F16 ? 1e-2 : 6e-2; /* two runs, each within the goldens' half of it */
    open_model(&recorded, &options, demo_deltas, VARIANTS);
    options.no_recording = true;
    open_model(&launched, &options, demo_deltas, VARIANTS);
    const uint64_t seed = test_next();
    for (int sampled = 0; sampled < 2; sampled++) {
        batch *a = batch_make(&recorded, sampled ? seed : 7, sampled), *b = batch_make(&launched, sampled ? seed : 7, sampled);
        batch_run(&recorded, a, sampled ? NULL : want, 20);
        for (uint32_t r = 0; r < ranks; r++) assert_non_null(cuda_of_rank(&recorded, r)->replay);
        batch_run(&launched, b, sampled ? NULL : want, 20);
        for (uint32_t r = 0; r < ranks; r++) assert_null(cuda_of_rank(&launched, r)->replay);
        /* NCCL adds more than two in an order that depends on how many values there are, and recorded steps have more. */
        const bool same = kind != RANKS_NCCL || ranks == 2;
        for (uint32_t i = 0; same && i < RUNS * NEW; i++) same_result(&a->runs[i / NEW].results[i % NEW], &b->runs[i / NEW].results[i % NEW]);
        if (same) assert_memory_equal(a->logits, b->logits, (size_t)RUNS * NEW * bd_model_logits_width(recorded.model) * 4);
        check_reports(&recorded, a);
        check_reports(&launched, b);
        if (!sampled) {
            const double to_one = batch_distance(&recorded, a, want), to_cpu = batch_distance(&recorded, a, cpu);
            printf("%s, %u ranks, %s: logits L2 %.1e to one rank, %.1e to the CPU\n", ranks_kind_names[kind], ranks, dtype == BD_DTYPE_F16 ? "fp16" : "bf16", to_one, to_cpu);
            assert_true(to_one < bound && to_cpu < bound);
        }
        batch_free(a);
        batch_free(b);
    }
    close_model(&recorded);
    close_model(&launched);
}

static void test_demo(void **state) {
    (void)state;
    const bd_model_options on_cpu = options_of("demo/zen-mini", bd_backend_cpu_ops(), 1, BD_DTYPE_BF16, BD_KERNELS_AUTO);
    opened one;
    open_model(&one, &on_cpu, demo_deltas, VARIANTS);
    batch *cpu = batch_make(&one, 7, false);
    batch_run(&one, cpu, NULL, 20);
    close_model(&one);
    for (int fp16 = 0; fp16 < 2; fp16++) {
        const bd_dtype dtype = fp16 ? BD_DTYPE_F16 : BD_DTYPE_BF16;
        const bd_model_options options = options_of("demo/zen-mini", ranks_backend_ops(RANKS_P2P), 1, dtype, BD_KERNELS_AUTO);
        open_model(&one, &options, demo_deltas, VARIANTS);
        batch *want = batch_make(&one, 7, false);
        batch_run(&one, want, cpu, 20);
        for (uint32_t i = 0; i < RUNS; i++) memcpy(want->runs[i].ids, cpu->runs[i].ids, sizeof cpu->runs[i].ids);
        close_model(&one);
        FOR_COMMS(kind, ranks, 4) demo_case(kind, ranks, dtype, want, cpu);
        batch_free(want);
    }
    batch_free(cpu);
}

/* ---- A rank that fails ---- */

static struct {
    bd_backend_ops ops;
    int kind;
    bd_backend *victim;
} planted;

static bd_status planted_linear(bd_backend *backend, const bd_step *step, uint32_t layer, bd_group group, bd_error *err) {
    if (backend == planted.victim && layer == 3 && group == BD_GROUP_GATE_UP) return bd_fail(err, BD_E_MEMORY, "device", "a planted fault");
    return ranks_backend_ops(planted.kind)->linear(backend, step, layer, group, err);
}

static bd_status one_step(bd_model *model, uint64_t id, bd_error *err) {
    const int32_t token = 7;
    const uint32_t zero = 0;
    const bd_seq seq = {.row_count = 1, .kv_blocks = &zero, .sampling.top_p = 1};
    const bd_segment segment = {-1, 0, 1};
    const bd_logits_row logits_row = {.target = -1};
    bd_token_result result;
    const bd_step step = {.id = id, .row_count = 1, .seq_count = 1, .segment_count = 1, .logits_row_count = 1, .tokens = &token, .positions = &zero, .seq_of_row = &zero, .seqs = &seq,
                          .segments = &segment, .logits_rows = &logits_row};
    const bd_status s = bd_model_forward(model, &step, NULL, NULL, err);
    return s == BD_OK ? bd_model_wait(model, &step, bd_now_us() + WAIT_US, &result, err) : s;
}

/* The others wait for it on their devices: they are freed, the step fails, and closing does not hang. */
static void test_a_rank_fails(void **state) {
    (void)state;
    FOR_COMMS(kind, ranks, 2) {
        for (uint32_t r = 0; r < ranks; r++) {
            bd_error err = {0};
            bd_model *model;
            planted.kind = kind;
            planted.ops = *ranks_backend_ops(kind);
            planted.ops.linear = planted_linear;
            planted.victim = NULL;
            bd_model_options options = options_of("demo/zen-mini", &planted.ops, ranks, BD_DTYPE_BF16, BD_KERNELS_AUTO);
            options.no_recording = true;
            MS_OK(bd_model_open(&options, &model, &err), err);
            MS_OK(one_step(model, 1, &err), err);
            planted.victim = bd_model_backend(bd_model_rank(model, r));
            const uint64_t begin_us = bd_now_us();
            assert_int_equal(one_step(model, 2, &err), BD_E_DEVICE);
            char words[64];
            snprintf(words, sizeof words, "rank %u: a planted fault", r);
            if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
            assert_int_equal(one_step(model, 3, &err), BD_E_DEVICE);
            bd_model_close(model);
            printf("%s, rank %u: over after %llu ms\n", ranks_kind_names[kind], r, (unsigned long long)((bd_now_us() - begin_us) / 1000));
            assert_true(bd_now_us() - begin_us < 2 * WAIT_US);
        }
    }
}

static void test_more_ranks_than_devices(void **state) {
    (void)state;
    bd_error err = {0};
    bd_model *model;
    char words[64];
    uint32_t ranks = 2;
    while (ranks <= (uint32_t)ranks_devices) ranks *= 2;
    if (ranks > BD_COMM_RANKS_MAX) return;
    const bd_model_options options = options_of(base_path("tp-llama"), bd_backend_cuda_ops(), ranks, BD_DTYPE_BF16, BD_KERNELS_AUTO);
    assert_int_equal(bd_model_open(&options, &model, &err), BD_E_DEVICE);
    assert_string_equal(err.subject, "tensor_parallel");
    snprintf(words, sizeof words, "%u ranks take a GPU each, %d answer", ranks, ranks_devices);
    assert_string_equal(err.message, words);
}

int main(int argc, char **argv) {
    ranks_begin(argc, argv);
    if (!mkdtemp(work_dir)) return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_more_ranks_than_devices), cmocka_unit_test(test_operators), cmocka_unit_test(test_goldens), cmocka_unit_test(test_demo),
                                       cmocka_unit_test(test_a_rank_fails)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", work_dir);
    return system(command) == 0 ? failed : 1;
}
