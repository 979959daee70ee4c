/* test_gpu_sampling.c - log-probabilities, rank, alternatives, truncation and draws against an exact float64 sampler. */
#include "gpu_test.h"

typedef struct entry {
    double logit;
    int id;
} entry;

static int by_logit(const void *a, const void *b) {
    const entry *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->id - y->id;
}

/* The set a row may draw from, in probability order. Returns its size; prob[i] is the renormalised probability. */
static int allowed(const float *logits, const k_sample_row *row, const k_edit *edits, entry *set, double *prob) {
    for (int i = 0; i < row->vocab; i++) set[i] = (entry){logits[i], i};
    for (int e = 0; e < row->edit_count; e++) {
        k_edit edit = edits[row->first_edit + e];
        double v = logits[edit.token];
        set[edit.token].logit = (v > 0 ? v / (double)edit.repetition : v * (double)edit.repetition) + (double)edit.add;
    }
    qsort(set, (size_t)row->vocab, sizeof *set, by_logit);
    if (row->temperature < 1e-5f || row->top_p <= 0) {
        prob[0] = 1;
        return 1;
    }
    int count = row->vocab;
    double sum = 0, mass = 0;
    for (int i = 0; i < count; i++) prob[i] = exp((set[i].logit - set[0].logit) / (double)row->temperature);
    if (row->top_k && (int)row->top_k < count) count = (int)row->top_k;
    for (int i = 0; i < count; i++) sum += prob[i];
    if (row->top_p < 1) {
        int keep = 0;
        while (keep < count && mass < (double)row->top_p * sum) mass += prob[keep++];
        count = keep;
    }
    while (count > 1 && prob[count - 1] < (double)row->min_p) count--;
    sum = 0;
    for (int i = 0; i < count; i++) sum += prob[i];
    for (int i = 0; i < count; i++) prob[i] /= sum;
    return count;
}

enum { ROWS = 64 };

/* k_sample over `count` rows, from fresh copies. */
static void sample(const float *logits, const k_sample_row *rows, const k_edit *edits, k_sample_result *results, int count, int vocab) {
    const size_t width = ((size_t)vocab + 3) / 4 * 4;
    buffer device = buffer_make(logits, (size_t)count * (size_t)vocab * 4), scratch = buffer_make(NULL, (size_t)count * width * 4);
    buffer device_rows = buffer_make(rows, (size_t)count * sizeof *rows), device_edits = buffer_make(edits, ROWS * 3 * sizeof *edits);
    buffer device_results = buffer_make(NULL, (size_t)count * sizeof *results);
    CUDA_OK(k_sample(device.data, scratch.data, device_rows.data, device_edits.data, device_results.data, count, vocab, 0, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    buffer_get(&device_results, results);
    buffer *all[] = {&device, &scratch, &device_rows, &device_edits, &device_results};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

/* slack: of the draw, for what float32 makes of masses and edges. */
static void verify(const float *logits, const k_sample_row *rows, const k_edit *edits, const k_sample_result *results, int row_count, int vocab, double slack) {
    entry *set = malloc((size_t)vocab * sizeof *set);
    double *prob = malloc((size_t)vocab * sizeof *prob);
    for (int r = 0; r < row_count; r++) {
        const float *l = logits + (size_t)r * (size_t)vocab;
        const k_sample_result *got = &results[r];
        assert_int_equal(got->fault, 0);
        int count = allowed(l, &rows[r], edits, set, prob), place = 0;
        if (rows[r].target >= 0) assert_int_equal(got->id, rows[r].target);
        else {
            while (place < count && set[place].id != got->id) place++;
            if (place == count) {
                /* At the edge of a nucleus float32 mass may include one element more or less. */
                double edge = set[count].logit;
                while (place < rows[r].vocab && set[place].id != got->id) place++;
                if (!(rows[r].top_p < 1) || place > count + 2 + count / 10000 || fabs((double)l[got->id] - edge) > 1e-3 * (1 + fabs(edge))) fail_msg("vocab %d row %d: id %d is outside the %d allowed", vocab, r, got->id, count);
            }
            /* The draw: running mass in id order passes the uniform inside this element. */
            double below = 0, mine = place < count ? prob[place] : 0;
            for (int i = 0; i < count; i++)
                if (set[i].id < got->id) below += prob[i];
            if (place < count && !((double)rows[r].uniform >= below - slack && (double)rows[r].uniform <= below + mine + slack))
                fail_msg("vocab %d row %d: uniform %g is not in [%g, %g]", vocab, r, (double)rows[r].uniform, below, below + mine);
        }
        double top = -INFINITY, sum = 0;
        for (int i = 0; i < rows[r].vocab; i++) top = fmax(top, l[i]);
        for (int i = 0; i < rows[r].vocab; i++) sum += exp(l[i] - top), set[i] = (entry){l[i], i};
        double log_sum = top + log(sum);
        assert_true(fabs((double)got->logprob - (l[got->id] - log_sum)) < 1e-4 * (1 + fabs((double)got->logprob)));
        qsort(set, (size_t)rows[r].vocab, sizeof *set, by_logit);
        assert_int_equal(set[got->rank - 1].id, got->id);
        for (int i = 0; i < rows[r].top_count; i++) assert_int_equal(got->top_ids[i], set[i].id);
    }
    free(set);
    free(prob);
}

static void check(int vocab, double spread) {
    float *logits = floats_random((size_t)ROWS * (size_t)vocab, spread);
    k_sample_row rows[ROWS];
    k_edit edits[ROWS * 3];
    for (int r = 0; r < ROWS; r++) {
        float *l = logits + (size_t)r * (size_t)vocab;
        if (r % 3 == 0)
            for (int i = 0; i < vocab; i++) l[i] = (float)(round(l[i] * 4) / 4); /* many ties */
        rows[r] = (k_sample_row){.target = r % 5 == 4 ? (int32_t)(test_next() % (uint64_t)vocab) : -1, .top_count = r % 21, .vocab = r % 7 == 6 && vocab > 40 ? vocab - 13 : vocab,
                                 .first_edit = 3 * r, .edit_count = r % 4, .top_k = r % 2 ? (uint32_t)(test_next() % 50) : 0,
                                 .temperature = r % 6 == 0 ? 0 : (float)(0.05 + test_uniform() * 1.9), .top_p = r % 8 == 1 ? 1 : (float)test_uniform(),
                                 .min_p = r % 9 == 2 ? 0.1f : 0, .uniform = (float)(test_uniform() * 0.9999)};
        if (rows[r].target >= rows[r].vocab) rows[r].target = 0;
        if (rows[r].top_count > rows[r].vocab) rows[r].top_count = rows[r].vocab;
        for (int e = 0; e < 3; e++) edits[3 * r + e] = (k_edit){(int32_t)((test_next() % (uint64_t)(rows[r].vocab / 3 ? rows[r].vocab / 3 : 1)) * 3 % (uint64_t)rows[r].vocab), 1.3f, (float)test_normal()};
        if (rows[r].edit_count >= 2) edits[3 * r + 1].token = (edits[3 * r].token + 1) % rows[r].vocab;
        if (rows[r].edit_count == 3) edits[3 * r + 2].token = (edits[3 * r].token + 2) % rows[r].vocab;
        if (rows[r].vocab < 4) rows[r].edit_count = 0;
    }
    k_sample_result results[ROWS];
    sample(logits, rows, edits, results, ROWS, vocab);
    verify(logits, rows, edits, results, ROWS, vocab, 2e-3);
    free(logits);
}

static void test_rows(void **state) {
    (void)state;
    check(512, 3);
    check(4096, 1);
    check(128256, 2.5);
    check(1, 1);
    check(33, 5);
}

/* Rows whose nucleus is a great part of the vocabulary: nearly flat, falling with the id (so that a draw close to 1 is at the edge), in few
 * values, all equal. */
static float *flat_logits(int vocab) {
    float *logits = floats_random((size_t)ROWS * (size_t)vocab, 1);
    for (int r = 0; r < ROWS; r++) {
        float *l = logits + (size_t)r * (size_t)vocab;
        for (int i = 0; i < vocab; i++) {
            if (r % 5 == 0) l[i] = 12 + l[i] * 0.01f;
            if (r % 5 == 1) l[i] = 1 - 2 * (float)i / (float)vocab;
            if (r % 5 == 2) l[i] = roundf(l[i] * 2) / 4;
            if (r % 5 == 3) l[i] = -3;
        }
    }
    return logits;
}

static void test_flat(void **state) {
    (void)state;
    const int vocab = 128256;
    float *logits = flat_logits(vocab);
    const k_edit edits[ROWS * 3] = {{0}};
    k_sample_row rows[ROWS];
    k_sample_result results[ROWS], alone;
    for (int r = 0; r < ROWS; r++) {
        rows[r] = (k_sample_row){.target = -1, .top_count = r % 2 ? 20 : 0, .vocab = vocab, .temperature = 0.8f, .top_p = 1, .uniform = r % 3 ? (float)(test_uniform() * 0.9999) : 0.99999f};
        const int kind = r / 5 % 6;
        if (kind == 0 || kind == 2) rows[r].top_p = 0.9f;
        if (kind == 1 || kind == 2) rows[r].top_k = 1000;
        if (kind == 3) rows[r].min_p = 0.7f;
        if (kind == 4) rows[r].top_p = (float)test_uniform(), rows[r].top_k = (uint32_t)(test_next() % (uint64_t)vocab);
    }
    sample(logits, rows, edits, results, ROWS, vocab);
    verify(logits, rows, edits, results, ROWS, vocab, 1e-3);
    for (int r = 0; r < ROWS; r += 7) { /* the same alone, to the bit */
        sample(logits + (size_t)r * (size_t)vocab, &rows[r], edits, &alone, 1, vocab);
        assert_memory_equal(&alone, &results[r], sizeof alone);
    }
    free(logits);
}

static void test_cap_and_mask_are_in_place(void **state) {
    (void)state;
    enum { VOCAB = 1001, KNOWN = 990 };
    float *logits = floats_random(VOCAB, 4), got[VOCAB];
    const k_sample_row row = {.target = 3, .vocab = KNOWN, .temperature = 1, .top_p = 1};
    buffer device = buffer_make(logits, sizeof got), scratch = buffer_make(NULL, (VOCAB + 3) * 4), rows = buffer_make(&row, sizeof row), results = buffer_make(NULL, sizeof(k_sample_result));
    CUDA_OK(k_sample(device.data, scratch.data, rows.data, NULL, results.data, 1, VOCAB, 5, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    buffer_get(&device, got);
    for (int i = 0; i < KNOWN; i++)
        if (!(fabs((double)got[i] - 5 * tanh((double)logits[i] / 5)) < 1e-5)) fail_msg("%d: %g from %g", i, (double)got[i], (double)logits[i]);
    for (int i = KNOWN; i < VOCAB; i++) assert_true(isinf(got[i]) && got[i] < 0);
    free(logits);
    buffer *all[] = {&device, &scratch, &rows, &results};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

static void test_nan_is_a_fault(void **state) {
    (void)state;
    for (int sign = 0; sign < 2; sign++) {
        float *logits = floats_random(1000, 1);
        logits[777] = sign ? -NAN : NAN;
        const k_sample_row row = {.target = -1, .vocab = 1000, .temperature = 1, .top_p = 1};
        const k_edit edits[ROWS * 3] = {{0}};
        k_sample_result got;
        sample(logits, &row, edits, &got, 1, 1000);
        assert_int_equal(got.fault, 1);
        free(logits);
    }
}

/* Microseconds of one k_sample, of 50 in a graph. */
static double microseconds(const float *logits, k_sample_row row, int count, int vocab) {
    enum { TIMES = 50 };
    k_sample_row rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = row, rows[r].uniform = (float)r / ROWS;
    buffer device = buffer_make(logits, (size_t)count * (size_t)vocab * 4), scratch = buffer_make(NULL, (size_t)count * (size_t)(vocab + 3) * 4);
    buffer device_rows = buffer_make(rows, sizeof rows), results = buffer_make(NULL, ROWS * sizeof(k_sample_result));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_OK(cudaEventCreate(&begin));
    CUDA_OK(cudaEventCreate(&end));
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < TIMES; i++) CUDA_OK(k_sample(device.data, scratch.data, device_rows.data, NULL, results.data, count, vocab, 0, stream));
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    float best = INFINITY, ms;
    for (int i = 0; i < 5; i++) {
        CUDA_OK(cudaEventRecord(begin, stream));
        CUDA_OK(cudaGraphLaunch(exec, stream));
        CUDA_OK(cudaEventRecord(end, stream));
        CUDA_OK(cudaEventSynchronize(end));
        CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
        best = fminf(best, ms);
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaEventDestroy(begin));
    CUDA_OK(cudaEventDestroy(end));
    CUDA_OK(cudaStreamDestroy(stream));
    buffer *all[] = {&device, &scratch, &device_rows, &results};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
    return (double)best * 1e3 / TIMES;
}

/* Argument "bench": no test but a table of times. */
static void bench(void **state) {
    (void)state;
    enum { VOCAB = 128256 };
    const struct {
        const char *name;
        k_sample_row row;
        double spread;
    } kinds[] = {{"greedy", {.target = -1, .top_p = 1}, 3},
                 {"greedy, top 20", {.target = -1, .top_p = 1, .top_count = 20}, 3},
                 {"target", {.target = 77, .top_p = 1}, 3},
                 {"top_p 0.9, peaked", {.target = -1, .temperature = 0.8f, .top_p = 0.9f}, 5},
                 {"top_p 0.9, flat", {.target = -1, .temperature = 0.8f, .top_p = 0.9f}, 0.3},
                 {"top_k 50, top_p 0.9, peaked", {.target = -1, .temperature = 0.8f, .top_k = 50, .top_p = 0.9f}, 5},
                 {"top_k 50000, top_p 0.9, flat", {.target = -1, .temperature = 0.8f, .top_k = 50000, .top_p = 0.9f}, 0.3},
                 {"no truncation, flat", {.target = -1, .temperature = 0.8f, .top_p = 1}, 0.3},
                 {"top_p 0.9, all equal", {.target = -1, .temperature = 0.8f, .top_p = 0.9f}, 0}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        float *logits = floats_random((size_t)ROWS * VOCAB, kinds[k].spread);
        k_sample_row row = kinds[k].row;
        row.vocab = VOCAB;
        printf("%-30s", kinds[k].name);
        for (int count = 1; count <= ROWS; count *= count == 1 ? 16 : 4) printf("  %2d rows %7.1f us", count, microseconds(logits, row, count, VOCAB));
        printf("\n");
        free(logits);
    }
}

int main(int argc, char **argv) {
    const bool times = argc > 1 && !strcmp(argv[1], "bench");
    gpu_test_begin(times ? 1 : argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows), cmocka_unit_test(test_flat), cmocka_unit_test(test_cap_and_mask_are_in_place),
                                       cmocka_unit_test(test_nan_is_a_fault)};
    const struct CMUnitTest benches[] = {cmocka_unit_test(bench)};
    return times ? cmocka_run_group_tests(benches, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
