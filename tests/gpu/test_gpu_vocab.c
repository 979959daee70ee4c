/* test_gpu_vocab.c - what fine-tunes do to the vocabulary, on the CUDA backend: rows added to it, embedding and head in full, a head of
 * its own over a tied base, fewer rows than the base; all in one batch with the base, on one rank and on several that share a device,
 * against a float64 forward pass (tests/unit/model_reference.h). And the ways of such rows into their pages. */
#include "gpu_ranks.h"

#include "../unit/model_reference.h"
#include "../unit/tp_support.h"
#include "gpu_model.h"
#include "whole.h"

enum { KINDS = 5, PROMPTS = 2, NEW = 3, LONGEST = 40 };

typedef struct kind {
    const char *what;
    uint32_t extra_max, planes;
    bool full, own_head;
    int32_t vocab_change; /* of config.json, beyond the added rows */
} kind;
static const kind kinds[KINDS] = {{"added rows", 256, 1, false, false, 0}, {"tables in full", 0, 1, true, false, 0}, {"full and added", 40, 1, true, false, 0},
                                  {"a head of its own", 17, 2, false, true, 0}, {"a smaller vocabulary", 0, 1, false, false, -77}};
static const uint32_t prompt_tokens[PROMPTS] = {3, LONGEST};

typedef struct subject { /* one variant of the batch, or the base: kind NULL */
    const kind *kind;
    mr_model reference;
    tp_variant variant;
    const bd_overlay *overlay;
    char dir[256];
    uint32_t vocab;
    int32_t ids[LONGEST + NEW];
} subject;

static void write_vocab(const char *dir, const char *arch, uint32_t vocab) {
    char path[600];
    bd_error err = {0};
    snprintf(path, sizeof path, "%s/config.json", arch);
    cJSON *root = ms_json(path);
    cJSON_DeleteItemFromObjectCaseSensitive(root, "vocab_size");
    assert_non_null(cJSON_AddNumberToObject(root, "vocab_size", vocab));
    char *text = cJSON_Print(root);
    snprintf(path, sizeof path, "%s/config.json", dir);
    MS_OK(bd_file_replace(path, text, strlen(text), &err), err);
    cJSON_free(text);
    cJSON_Delete(root);
}

static void make_subject(subject *s, const kind *k, const char *arch) {
    mr_open(&s->reference, arch);
    s->kind = k;
    s->vocab = s->reference.config.vocab;
    if (k) {
        if (k->own_head && s->reference.config.tied) mr_add_head(&s->reference);
        s->reference.full_tables = k->full;
        if (k->extra_max) s->reference.extra_rows = 1 + (uint32_t)(test_next() % k->extra_max);
        mr_make_delta(&s->reference, &test_state, k->planes, &(mr_fault){0}, s->dir);
        s->vocab += s->reference.extra_rows + (uint32_t)k->vocab_change;
        if (s->vocab != s->reference.config.vocab) write_vocab(s->dir, arch, s->vocab);
    }
    for (int i = 0; i < LONGEST; i++) {
        s->ids[i] = (int32_t)(test_next() % s->vocab);
        if (test_next() % 4 == 0) s->ids[i] = (int32_t)(s->vocab - 1 - test_next() % 16); /* where the added ones are */
    }
}

/* Base columns and added ones apart, since few wrong ones would not show among many right. Of added rows, about 0.6 everywhere, all
 * logits may come near zero together where the state's sum does: their error is also measured by what such a row usually gives. */
static void check_row(const subject *s, const char *what, const double *want, const float *got, uint32_t width, double bound) {
    const uint32_t base = s->reference.config.vocab, known = s->vocab < base ? s->vocab : base, added = s->vocab - known;
    double error = 0, norm = 0;
    CHECK_L2(got, want, known, bound, "%s", what);
    for (uint32_t i = base; i < s->vocab; i++) error += (got[i] - want[i]) * (got[i] - want[i]), norm += want[i] * want[i];
    const double usual = 0.1 * s->reference.config.hidden;
    if (!(sqrt(error) <= bound * (sqrt(norm) + sqrt(added) * usual))) fail_msg("%s: %u added rows are off by %g, of %g", what, added, sqrt(error), sqrt(norm));
    for (uint32_t i = s->vocab; i < width; i++) assert_true(isinf(got[i]) && got[i] < 0);
}

static void check_run(subject *s, const ms_run *run, uint32_t width, double bound) {
    int32_t ids[LONGEST + NEW];
    char what[80];
    memcpy(ids, run->prompt, run->prompt_count * sizeof *ids);
    for (uint32_t n = 0; n < NEW; n++) {
        const float *got = run->logits + (size_t)n * width;
        double *want = mr_logits(&s->reference, ids, run->prompt_count + n), sum = 0;
        uint32_t best = 0;
        snprintf(what, sizeof what, "%s, %u tokens and %u", s->kind ? s->kind->what : "the base", run->prompt_count, n);
        check_row(s, what, want, got, width, bound);
        for (uint32_t i = 0; i < s->vocab; i++) {
            if (got[i] > got[best]) best = i;
            sum += exp((double)got[i]);
        }
        assert_int_equal(run->ids[n], best);
        assert_true(fabs((double)run->results[n].logprob - (got[best] - log(sum))) < 1e-3);
        ids[run->prompt_count + n] = run->ids[n];
        free(want);
    }
}

static const void *replayed(bd_model *model) {
    return ((bd_cuda *)bd_model_backend(model))->replay;
}

/* Steps of the base alone are still replayed, those of the others not. */
static void check_arch(const char *arch, uint32_t ranks, bd_dtype dtype, bd_kernels kernels) {
    bd_error err = {0};
    subject *subjects = calloc(KINDS + 1, sizeof *subjects);
    ms_run runs[(KINDS + 1) * PROMPTS] = {0};
    bd_model *model;
    bd_model_options options = ms_options(arch);
    options.ops = ranks_backend_ops(RANKS_P2P), options.rank_count = ranks, options.dtype = dtype, options.kernels = kernels;
    options.rows_max = 512, options.seqs_max = 16, options.logits_rows_max = 128, options.kv_tokens = 4096, options.kv_block_tokens = 16;
    options.delta_pages = 120, options.extra_vocab_max = BD_EXTRA_VOCAB_MAX, options.rank_wait_us = 30000000u;
    MS_OK(bd_model_open(&options, &model, &err), err);
    const uint32_t width = bd_model_logits_width(model);
    uint32_t page = 0;
    assert_int_equal(width, bd_model_config_of(model)->vocab + BD_EXTRA_VOCAB_MAX);
    for (uint32_t i = 0; i <= KINDS; i++) {
        subject *s = &subjects[i];
        make_subject(s, i < 2 ? &kinds[i] : i == 2 ? NULL : &kinds[i - 1], arch); /* the base in between */
        if (s->kind) page += tp_variant_open(model, s->dir, page, &s->variant), s->overlay = s->variant.overlay;
        for (uint32_t p = 0; p < PROMPTS; p++)
            runs[i * PROMPTS + p] = (ms_run){.prompt = s->ids, .prompt_count = prompt_tokens[p], .new_count = NEW, .overlay = s->overlay, .sampling.top_p = 1, .top_rows = p ? MS_TOP_ROWS : 0, .logits = calloc((size_t)NEW * width, sizeof(float))};
    }
    ms_run_all(model, runs, (KINDS + 1) * PROMPTS, 20); /* so that a step has more rows of logits than are sampled at a time, 17 of a variant */
    assert_null(replayed(model));
    const double bound = dtype == BD_DTYPE_F16 ? 6e-3 : 3e-2;
    for (uint32_t i = 0; i <= KINDS; i++) {
        subject *s = &subjects[i];
        if (s->kind) MS_OK(bd_delta_open_shard(&s->variant.delta, 0, true, &s->reference.delta, &err), err);
        for (uint32_t p = 0; p < PROMPTS; p++) check_run(s, &runs[i * PROMPTS + p], width, bound);
    }
    ms_run alone[2] = {runs[2 * PROMPTS], runs[PROMPTS]}; /* the base, and tables in full, for which the base's are not read */
    for (uint32_t i = 0; i < 2; i++) {
        alone[i].logits = calloc((size_t)NEW * width, sizeof(float));
        ms_run_all(model, &alone[i], 1, 64);
        assert_int_equal(replayed(model) != NULL, i == 0);
        check_run(&subjects[2 - i], &alone[i], width, bound);
        free(alone[i].logits);
    }
    for (uint32_t i = 0; i <= KINDS; i++) {
        subject *s = &subjects[i];
        for (uint32_t p = 0; p < PROMPTS; p++) free(runs[i * PROMPTS + p].logits);
        mr_close(&s->reference);
        if (s->kind) tp_variant_close(&s->variant), mr_remove_delta(s->dir);
    }
    bd_model_close(model);
    free(subjects);
}

static void test_one_rank(void **state) {
    (void)state;
    static const char *const archs[] = {"tests/data/arch/llama-gqa", "tests/data/arch/qwen2", "tests/data/arch/gemma2", "demo/zen-mini"}; /* of the last the fast head */
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        check_arch(archs[i], 1, BD_DTYPE_BF16, BD_KERNELS_AUTO);
        check_arch(archs[i], 1, BD_DTYPE_F16, i % 2 ? BD_KERNELS_PLAIN : BD_KERNELS_AUTO);
    }
}

static void test_ranks(void **state) {
    (void)state;
    check_arch("tests/data/arch/tp-llama", 2, BD_DTYPE_BF16, BD_KERNELS_AUTO);
    check_arch("tests/data/arch/tp-qwen2", 4, BD_DTYPE_F16, BD_KERNELS_AUTO);
    check_arch("tests/data/arch/gemma2", 2, BD_DTYPE_F16, BD_KERNELS_PLAIN);
}

/* ---- Rows into pages ---- */

static const gpu_shape shape = {.hidden = 512, .layers = 3, .heads = 8, .kv_heads = 2, .head_dim = 64, .ffn = 1024, .vocab = 1003, .variants = 16, .rows = 64, .seqs = 4, .len = 256, .blocks = 64};

/* Plain memory and page-locked, in a window and outside one, pieces smaller and larger than the staging, at any even address. */
static void rows_put(bd_dtype dtype) {
    bd_error err = {0};
    gpu_shape s = shape;
    s.dtype = dtype;
    gpu_model *m = gpu_model_open(s, false);
    const bool fp16 = dtype == BD_DTYPE_F16;
    const uint64_t most = 9u << 20, window = 4u << 20;
    uint8_t *plain = malloc(most + 2), *locked = m->ops->host_alloc(m->backend, window);
    uint8_t *page = m->ops->delta_arena(m->backend);
    uint16_t *got = malloc(most);
    assert_true(plain && locked && got && most + 4096 <= m->options.delta_bytes);
    static const uint64_t sizes[] = {1024, 40000, 100002, 3u << 20, 9u << 20};
    for (size_t i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++) {
        const uint64_t bytes = sizes[i / 2], offset = 2 * (test_next() % 1000);
        const bool bring = i % 2 && bytes + 64 <= window;
        uint8_t *src = bring ? locked + 2 * (test_next() % 16) : plain + 2 * (test_next() % 2);
        bool brought = false;
        for (uint64_t k = 0; k < bytes / 2; k++) {
            const uint16_t value = bd_f32_to_bf16((float)(test_normal() * 0.1));
            memcpy(src + 2 * k, &value, 2);
        }
        CUDA_OK(cudaMemset(page, 0xff, most + 4096));
        CUDA_OK(cudaDeviceSynchronize());
        if (bring) MS_OK(m->ops->bring(m->backend, locked, window, &brought, &err), err);
        assert_int_equal(brought, bring);
        MS_OK(m->ops->rows_put(m->backend, page, offset, src, bytes, &err), err);
        MS_OK(m->ops->put_flush(m->backend, &err), err);
        CUDA_OK(cudaMemcpy(got, page + offset, bytes, cudaMemcpyDeviceToHost));
        for (uint64_t k = 0; k < bytes / 2; k++) {
            uint16_t value;
            memcpy(&value, src + 2 * k, 2);
            if (got[k] != (fp16 ? bd_f32_to_f16(bd_bf16_to_f32(value)) : value)) fail_msg("%u bytes at %u: value %u", (unsigned)bytes, (unsigned)offset, (unsigned)k);
        }
        uint16_t band[2];
        CUDA_OK(cudaMemcpy(band, page + offset + bytes, 4, cudaMemcpyDeviceToHost));
        assert_true(band[0] == 0xffff && band[1] == 0xffff);
    }
    uint16_t row[512] = {0};
    row[300] = bd_f32_to_bf16(70000);
    assert_int_equal(m->ops->rows_put(m->backend, page, 0, row, sizeof row, &err), fp16 ? BD_E_UNSUPPORTED : BD_OK);
    if (fp16) assert_non_null(strstr(err.message, "fp16"));
    MS_OK(m->ops->put_flush(m->backend, &err), err);
    m->ops->host_free(m->backend, locked, window);
    free(plain), free(got);
    gpu_model_close(m);
}

static void test_rows_put(void **state) {
    (void)state;
    rows_put(BD_DTYPE_BF16);
    rows_put(BD_DTYPE_F16);
}

static void test_embed_rows(void **state) {
    (void)state;
    enum { ROWS = 9, WIDTH = 328 };
    for (int fp16 = 0; fp16 < 2; fp16++) {
        uint16_t *host = bf16_random(ROWS * WIDTH, 1);
        float *before = floats_random(ROWS * WIDTH, 1), *got = malloc(ROWS * WIDTH * 4);
        const uint16_t *from[ROWS];
        if (fp16)
            for (int i = 0; i < ROWS * WIDTH; i++) host[i] = bd_f32_to_f16(bd_bf16_to_f32(host[i]));
        buffer rows = buffer_make(host, ROWS * WIDTH * 2), residual = buffer_make(before, ROWS * WIDTH * 4);
        for (int m = 0; m < ROWS; m++) from[m] = m % 3 == 1 ? NULL : (const uint16_t *)rows.data + (size_t)(ROWS - 1 - m) * WIDTH;
        buffer pointers = buffer_make(from, sizeof from);
        const k_embed_rows_args args = {.residual = residual.data, .from = pointers.data, .rows = ROWS, .hidden = WIDTH, .scale = 1.75f, .fp16 = fp16};
        CUDA_OK(k_embed_rows(&args, 0));
        CUDA_OK(cudaDeviceSynchronize());
        buffer_get(&residual, got);
        for (int i = 0; i < ROWS * WIDTH; i++) {
            const uint16_t value = host[(ROWS - 1 - i / WIDTH) * WIDTH + i % WIDTH];
            const float want = i / WIDTH % 3 == 1 ? before[i] : 1.75f * (fp16 ? bd_f16_to_f32(value) : bd_bf16_to_f32(value));
            if (got[i] != want) fail_msg("row %d, column %d: %g, not %g", i / WIDTH, i % WIDTH, got[i], want);
        }
        buffer_free(&rows), buffer_free(&residual), buffer_free(&pointers);
        free(host), free(before), free(got);
    }
}

int main(int argc, char **argv) {
    ranks_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_embed_rows), cmocka_unit_test(test_rows_put), cmocka_unit_test(test_one_rank), cmocka_unit_test(test_ranks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
