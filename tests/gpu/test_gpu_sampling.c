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
    buffer device = buffer_make(logits, (size_t)ROWS * (size_t)vocab * 4), scratch = buffer_make(NULL, (size_t)ROWS * (size_t)vocab * 8);
    buffer device_rows = buffer_make(rows, sizeof rows), device_edits = buffer_make(edits, sizeof edits), device_results = buffer_make(NULL, ROWS * sizeof(k_sample_result));
    CUDA_OK(k_sample(device.data, scratch.data, device_rows.data, device_edits.data, device_results.data, ROWS, vocab, 0, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    k_sample_result results[ROWS];
    buffer_get(&device_results, results);
    entry *set = malloc((size_t)vocab * sizeof *set);
    double *prob = malloc((size_t)vocab * sizeof *prob);
    for (int r = 0; r < ROWS; r++) {
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
                if (!(rows[r].top_p < 1) || fabs((double)l[got->id] - edge) > 1e-3 * (1 + fabs(edge))) fail_msg("vocab %d row %d: id %d is outside the %d allowed", vocab, r, got->id, count);
            }
            /* The draw: running mass in id order passes the uniform inside this element. */
            double below = 0, mine = place < count ? prob[place] : 0;
            for (int i = 0; i < count; i++)
                if (set[i].id < got->id) below += prob[i];
            if (place < count && !((double)rows[r].uniform >= below - 2e-3 && (double)rows[r].uniform <= below + mine + 2e-3))
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
    free(logits);
    buffer *all[] = {&device, &scratch, &device_rows, &device_edits, &device_results};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

static void test_rows(void **state) {
    (void)state;
    check(512, 3);
    check(4096, 1);
    check(128256, 2.5);
    check(1, 1);
    check(33, 5);
}

static void test_nan_is_a_fault(void **state) {
    (void)state;
    float *logits = floats_random(1000, 1);
    logits[777] = NAN;
    k_sample_row row = {.target = -1, .vocab = 1000, .temperature = 1, .top_p = 1};
    buffer device = buffer_make(logits, 4000), scratch = buffer_make(NULL, 8000), rows = buffer_make(&row, sizeof row), results = buffer_make(NULL, sizeof(k_sample_result));
    CUDA_OK(k_sample(device.data, scratch.data, rows.data, NULL, results.data, 1, 1000, 0, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    k_sample_result got;
    buffer_get(&results, &got);
    assert_int_equal(got.fault, 1);
    free(logits);
    buffer *all[] = {&device, &scratch, &rows, &results};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows), cmocka_unit_test(test_nan_is_a_fault)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
