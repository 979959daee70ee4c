/* test_gpu_model.c - whole steps on the CUDA backend: recorded steps give the bits that launched ones give, whatever else is in
 * the batch, and a recording that fails costs nothing but itself; fp16 against bf16 and plain kernels; a kernel that traps takes
 * the device, not the process. */
#include "gpu_test.h"

#include "../../src/backend/cuda/cuda_internal.h"
#include "gpu_model.h"

enum { SEQS_MAX = 150 };

static const gpu_shape small = {.hidden = 512, .layers = 3, .heads = 8, .kv_heads = 2, .head_dim = 64, .ffn = 1024, .vocab = 1003, .variants = 5, .rows = 512, .seqs = 64, .len = 2048,
                                .blocks = 4096};

static float *logits_of(gpu_model *m, uint32_t rows) {
    bd_error err;
    float *out = malloc((size_t)rows * m->config.vocab * 4);
    for (uint32_t i = 0; i < rows; i++) assert_int_equal(m->ops->logits_get(m->backend, i, out + (size_t)i * m->config.vocab, &err), BD_OK);
    return out;
}

static void run(gpu_model *m, const bd_step *step, bd_token_result *results) {
    bd_error err;
    if (gpu_model_step(m, step, results, &err) != BD_OK) fail_msg("%s", err.message);
    for (uint32_t i = 0; i < step->logits_row_count; i++) assert_int_equal(results[i].fault, 0);
}

/* Prefill, then decode with and without recordings: same logits and same draws, bit by bit. Where none is replayed, both are launched as
 * they are. */
static void compare(gpu_model *recorded, gpu_model *launched, uint32_t seqs, uint32_t before, uint32_t variants, bool expect_replay) {
    bd_token_result a[64], b[64];
    gpu_model *both[2] = {recorded, launched};
    for (int i = 0; i < 2; i++) {
        gpu_batch *prefill = gpu_batch_make(both[i], seqs, before, 0, variants);
        run(both[i], &prefill->step, a);
        gpu_batch_free(prefill);
    }
    gpu_batch *x = gpu_batch_make(recorded, seqs, 1, before, variants), *y = gpu_batch_make(launched, seqs, 1, before, variants);
    run(recorded, &x->step, a);
    const bool replayed = ((bd_cuda *)recorded->backend)->replay != NULL;
    if (replayed != expect_replay) fail_msg("%u sequences, %u variants: replayed %d", seqs, variants, replayed);
    run(launched, &y->step, b);
    float *la = logits_of(recorded, seqs), *lb = logits_of(launched, seqs);
    const size_t count = (size_t)seqs * recorded->config.vocab;
    if (memcmp(la, lb, count * 4)) fail_msg("%u sequences, %u variants: logits differ", seqs, variants);
    for (uint32_t i = 0; i < seqs; i++) {
        if (a[i].id != b[i].id || a[i].rank != b[i].rank) fail_msg("sequence %u drew %d, not %d", i, a[i].id, b[i].id);
        assert_memory_equal(a[i].top_ids, b[i].top_ids, 5 * sizeof(int32_t));
    }
    if (seqs > 16) {
        free(la), free(lb);
        gpu_batch_free(x), gpu_batch_free(y);
        return;
    }
    /* Alone, launched: the row's bits do not depend on the batch or on padding. */
    const uint32_t pick = (uint32_t)(test_next() % seqs);
    gpu_batch *alone = gpu_batch_make(launched, 1, 1, before, 0);
    alone->tokens[0] = y->tokens[pick], alone->seq[0].kv_blocks = y->seq[pick].kv_blocks;
    for (uint32_t s = 0; s < y->segments; s++)
        if (pick >= y->segment[s].first_row && pick < y->segment[s].first_row + y->segment[s].row_count && y->segment[s].overlay >= 0) {
            alone->overlays[0] = y->overlays[y->segment[s].overlay];
            alone->segment[0].overlay = 0, alone->step.overlay_count = 1;
        }
    run(launched, &alone->step, b);
    float *lone = logits_of(launched, 1);
    if (memcmp(lone, lb + (size_t)pick * launched->config.vocab, launched->config.vocab * 4u)) fail_msg("row %u of %u (%u variants) alone differs", pick, seqs, variants);
    free(la), free(lb), free(lone);
    gpu_batch_free(x), gpu_batch_free(y), gpu_batch_free(alone);
}

static void test_recorded_steps(void **state) {
    (void)state;
    for (int plain = 0; plain < 2; plain++)
        for (int fp16 = 0; fp16 < 2; fp16++) {
            gpu_shape s = small;
            s.kernels = plain ? BD_KERNELS_PLAIN : BD_KERNELS_AUTO;
            s.dtype = fp16 ? BD_DTYPE_F16 : BD_DTYPE_BF16;
            if (fp16) s.vocab = 1008, s.head_rows = 300;
            gpu_model *recorded = gpu_model_open(s, true), *launched = gpu_model_open(s, false);
            static const uint32_t cases[][3] = {{1, 7, 0}, {1, 100, 1}, {2, 33, 2}, {3, 20, 0}, {5, 9, 3}, {8, 17, 5}, {13, 16, 5}, {16, 31, 1}, {16, 5, 0}};
            for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) compare(recorded, launched, cases[i][0], cases[i][1], cases[i][2], true);
            /* Of more rows only the base's own are recorded, and what the fast kernels launch for them follows from the padding too. */
            static const uint32_t wide[][4] = {{33, 7, 4, false}, {50, 3, 5, false}, {20, 4, 3, false}, {64, 2, 1, false}, {45, 3, 5, false}, {33, 3, 0, false}, {32, 9, 0, true}, {64, 3, 0, true}};
            for (size_t i = 0; !plain && i < sizeof wide / sizeof *wide; i++) compare(recorded, launched, wide[i][0], wide[i][1], wide[i][2], wide[i][3]);
            gpu_model_close(recorded);
            gpu_model_close(launched);
        }
}

/* Both element types and both sets of kernels compute the same model. parts: the long segments of a linear at least go another way than the short ones; -1: as it comes. */
static void precision(gpu_shape shape, uint32_t seqs, const gpu_seq *list, uint32_t variants, int parts) {
    float *logits[4];
    double norm = 0, error[4] = {0};
    const size_t count = (size_t)seqs * shape.vocab;
    for (int i = 0; i < 4; i++) {
        gpu_shape s = shape;
        s.kernels = i / 2 ? BD_KERNELS_AUTO : BD_KERNELS_PLAIN;
        s.dtype = i % 2 ? BD_DTYPE_BF16 : BD_DTYPE_F16;
        gpu_model *m = gpu_model_open(s, false);
        bd_token_result results[SEQS_MAX];
        gpu_batch *b = gpu_batch_of(m, seqs, list, variants);
        run(m, &b->step, results);
        bool some = false;
        const cuda_fast_step *d = &((bd_cuda *)m->backend)->fast_step;
        for (int g = 0; g < 4; g++) some = some || (d->ways[g].tile_count > 0 && d->ways[g].chunked);
        if (i / 2 && parts >= 0) assert_int_equal(some, parts);
        if (i / 2) assert_int_equal(d->head.usable, s.vocab % 8 == 0);
        logits[i] = logits_of(m, seqs);
        gpu_batch_free(b);
        gpu_model_close(m);
    }
    for (size_t k = 0; k < count; k++) {
        norm += (double)logits[0][k] * logits[0][k];
        for (int i = 1; i < 4; i++) error[i] += (double)(logits[i][k] - logits[0][k]) * (logits[i][k] - logits[0][k]);
    }
    printf("relative L2 against plain fp16: plain bf16 %.2e, auto fp16 %.2e, auto bf16 %.2e\n", sqrt(error[1] / norm), sqrt(error[2] / norm), sqrt(error[3] / norm));
    assert_true(sqrt(error[1] / norm) < 2e-2 && sqrt(error[2] / norm) < 3e-3 && sqrt(error[3] / norm) < 2e-2);
    for (int i = 0; i < 4; i++) free(logits[i]);
}

static void test_precision(void **state) {
    (void)state;
    static const uint32_t rows[] = {50, 20, 7};
    for (int i = 0; i < 3; i++) {
        gpu_seq list[6];
        for (int s = 0; s < 6; s++) list[s] = (gpu_seq){rows[i], 0, s / 2};
        precision(small, 6, list, 3, false);
    }
}

/* Heads of the variants' own, in blocks of odd sizes: as few rows as the lean kernel takes, and more, in one launch and in several. */
static void test_precision_of_heads(void **state) {
    (void)state;
    static const uint32_t seqs[] = {1, 8, 15, 16, 40, 60, 64, 19, SEQS_MAX}, base[] = {0, 2, 0, 9, 3, 33, 0, 0, 70};
    gpu_shape s = small;
    s.vocab = 1008, s.seqs = SEQS_MAX;
    for (int i = 0; i < 9; i++) {
        gpu_seq list[SEQS_MAX];
        for (uint32_t q = 0; q < seqs[i]; q++) list[q] = (gpu_seq){1 + (uint32_t)(test_next() % 3), 0, q < base[i] ? -1 : (int32_t)((q - base[i]) * 5 / (seqs[i] - base[i]))};
        s.head_rows = i % 2 ? 256 : 261 + (uint32_t)(test_next() % 500);
        precision(s, seqs[i], list, 5, -1);
    }
}

/* Prompts of two variants beside short ones of all and of the base, as many as make a chunk and many chunks. */
static void test_precision_of_parts(void **state) {
    (void)state;
    static const uint32_t shorts[] = {5, 12, 24};
    gpu_shape s = small;
    s.hidden = 2048, s.ffn = 4096, s.heads = 32, s.layers = 1, s.vocab = 1008;
    for (int i = 0; i < 3; i++) {
        s.head_rows = i == 1 ? 0 : 333;
        gpu_seq list[64] = {{150 + (uint32_t)(test_next() % 100), 0, 0}, {90 + (uint32_t)(test_next() % 40), 0, 1}};
        for (uint32_t q = 0; q < shorts[i]; q++) list[2 + q] = (gpu_seq){1 + (uint32_t)(test_next() % 3), 0, (int32_t)(q * 5 / shorts[i]) - 1};
        for (uint32_t q = 0; q < shorts[i]; q++)
            if (list[2 + q].overlay == 1) list[2 + q].overlay = 4;
        precision(s, 2 + shorts[i], list, 5, true);
    }
}

/* A step in whose middle something happens that no recording can hold: waiting for the stream that is being recorded. */
typedef struct spoiler {
    gpu_model *m;
    uint32_t after; /* this many steps are left alone */
    bool says;      /* the step fails too, as an operator would that had seen it; else only the recording's end tells */
    bool plain;     /* fails before anything is recorded: a step that was to be launched */
    uint32_t spoilt;
} spoiler;

static bd_status spoilt_forward(void *ctx, const bd_step *step, bd_error *err) {
    spoiler *sp = ctx;
    bd_cuda *cuda = (bd_cuda *)sp->m->backend;
    bd_status s = gpu_model_forward(sp->m, step, err);
    if (s != BD_OK || cuda->recording == sp->plain) return s;
    if (sp->after && sp->after--) return s;
    sp->spoilt++;
    if (sp->plain) return bd_fail(err, BD_E_DEVICE, "test", "a step that failed");
    const cudaError_t error = cudaStreamSynchronize(cuda->stream);
    if (error == cudaSuccess) fail_msg("a stream that is recorded let itself be waited for");
    if (sp->says) return cuda_check(cuda, error, "test", err);
    (void)cudaGetLastError();
    return BD_OK;
}

/* A recording that fails, at once or after some that went well, is no fault: steps are launched then, and give what they always do. */
static void test_failed_recording(void **state) {
    (void)state;
    gpu_model *launched = gpu_model_open(small, false);
    for (uint32_t i = 0; i < 6; i++) {
        bd_error err = {0};
        gpu_model *m = gpu_model_open(small, false);
        bd_cuda *cuda = (bd_cuda *)m->backend;
        spoiler sp = {.m = m, .after = i % 2 ? 1 + (uint32_t)(test_next() % (i == 5 ? 6 : 20)) : 0, .says = i / 2 == 0, .plain = i / 2 == 2};
        const bd_status s = m->ops->record(m->backend, spoilt_forward, &sp, &err);
        if (s != BD_OK) fail_msg("case %u: %s", i, err.message);
        assert_int_equal(sp.spoilt, 1); /* nothing is recorded after that */
        assert_null(cuda->graphs);
        assert_false(atomic_load(&cuda->lost));
        assert_false(cuda->recording);
        compare(m, launched, 1, 30, 1, false);
        compare(m, launched, 5, 9, 3, false);
        compare(m, launched, 16, 5, 0, false);
        gpu_model_close(m);
    }
    gpu_model_close(launched);
}

static void test_fp16_refuses_what_it_cannot_hold(void **state) {
    (void)state;
    bd_error err;
    gpu_shape s = small;
    s.dtype = BD_DTYPE_F16;
    gpu_model *m = gpu_model_open(s, false);
    float row[512] = {1, 65504, -65504};
    bd_weight_view view = {.dtype = BD_DTYPE_F32, .rows = 1, .cols = 512, .row_stride_bytes = sizeof row, .data = row};
    const bd_weight_id id = {.kind = BD_WEIGHT_LINEAR, .which = BD_LINEAR_Q};
    assert_int_equal(m->ops->weight_put(m->backend, id, &view, &err), BD_OK);
    row[300] = 70000;
    assert_int_equal(m->ops->weight_put(m->backend, id, &view, &err), BD_E_UNSUPPORTED);
    assert_non_null(strstr(err.message, "fp16"));
    uint16_t brain[512]; /* bf16 is converted on the device */
    for (int i = 0; i < 512; i++) brain[i] = bd_f32_to_bf16((float)(i - 200) * 327.0f);
    view = (bd_weight_view){.dtype = BD_DTYPE_BF16, .rows = 1, .cols = 512, .row_stride_bytes = sizeof brain, .data = brain};
    assert_int_equal(m->ops->weight_put(m->backend, id, &view, &err), BD_E_UNSUPPORTED); /* 311 * 327 > 65504 */
    for (int i = 0; i < 512; i++) brain[i] = bd_f32_to_bf16((float)(i - 200) * 200.0f);
    assert_int_equal(m->ops->weight_put(m->backend, id, &view, &err), BD_OK); /* and the fault was that tensor's */
    uint16_t got[512];
    CUDA_OK(cudaMemcpy(got, ((bd_cuda *)m->backend)->linears[0][BD_LINEAR_Q], sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 512; i++) assert_int_equal(got[i], bd_f32_to_f16(bd_bf16_to_f32(brain[i])));
    gpu_model_close(m);
}

/* Memory that is not there is an error at open that names what it was for. */
static void test_out_of_memory_at_open(void **state) {
    (void)state;
    bd_error err;
    gpu_model *m = gpu_model_open(small, false);
    bd_backend_options options = m->options;
    bd_backend *none = m->backend;
    options.kv_block_count = 200000000;
    assert_int_equal(m->ops->open(&options, &none, &err), BD_E_MEMORY);
    assert_null(none);
    assert_non_null(strstr(err.subject, "KV"));
    bd_token_result results[64]; /* and the context lives on */
    gpu_batch *b = gpu_batch_make(m, 2, 5, 0, 0);
    run(m, &b->step, results);
    gpu_batch_free(b);
    gpu_model_close(m);
}

/* Last, since nothing of CUDA works in this process afterwards: a KV block far outside the arena makes a kernel fault. */
static void test_a_sticky_fault_is_an_answer(void **state) {
    (void)state;
    bd_error err;
    gpu_model *m = gpu_model_open(small, false);
    bd_token_result results[64];
    gpu_batch *b = gpu_batch_make(m, 4, 1, 40, 2);
    run(m, &b->step, results);
    b->blocks[0] = 0x7ffffff0u;
    const uint64_t start_us = bd_now_us();
    assert_int_equal(gpu_model_step(m, &b->step, results, &err), BD_E_DEVICE);
    printf("fault: %s\n", err.message);
    assert_true(bd_now_us() - start_us < 25000000u);
    assert_non_null(strstr(err.message, "CUDA error"));
    b->blocks[0] = 0;
    assert_int_equal(gpu_model_step(m, &b->step, results, &err), BD_E_DEVICE); /* at once, and for good */
    assert_non_null(strstr(err.message, "lost"));
    assert_int_not_equal(m->ops->plane_put(m->backend, m->ops->delta_arena(m->backend), 512, 512, 0, 512, m->noise, 64, &err), BD_OK);
    gpu_batch_free(b);
    gpu_model_close(m); /* must not hang either */
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_recorded_steps), cmocka_unit_test(test_failed_recording), cmocka_unit_test(test_precision), cmocka_unit_test(test_precision_of_parts), cmocka_unit_test(test_precision_of_heads), cmocka_unit_test(test_fp16_refuses_what_it_cannot_hold),
                                       cmocka_unit_test(test_out_of_memory_at_open), cmocka_unit_test(test_a_sticky_fault_is_an_answer)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
