/* test_gpu_chunks.c - how rows of a step are cut into launches and groups for the kernels of few rows, which needs no device: counted row by row on random steps. */
#include "gpu_test.h"

#include "../../src/backend/cuda/cuda_internal.h"

enum { UPLOAD_BYTES = 1 << 20, SEGMENTS_MAX = 64 };

typedef struct made_step {
    bd_cuda *cuda;
    bd_step step;
    bd_segment segments[SEGMENTS_MAX];
    int32_t overlay[CUDA_DECODE_ROWS_MAX]; /* of each row */
} made_step;

/* Rows of the base, if any, and then of variants in rising order, as the engine sorts them. */
static made_step make_step(uint32_t rows, uint32_t runs) {
    made_step m = {.cuda = calloc(1, sizeof *m.cuda)};
    m.cuda->upload.host = m.cuda->upload.device = calloc(1, UPLOAD_BYTES); /* read back where it was written */
    m.cuda->upload.cap_bytes = UPLOAD_BYTES;
    m.cuda->fast.usable = true;
    int32_t overlay = (int32_t)(test_next() % 2) - 1;
    for (uint32_t row = 0; row < rows;) {
        const uint32_t left = rows - row, most = 2 * rows / runs + 1, last = m.step.segment_count + 1 == SEGMENTS_MAX;
        uint32_t count = last ? left : 1 + (uint32_t)(test_next() % most);
        if (count > left) count = left;
        m.segments[m.step.segment_count++] = (bd_segment){overlay, row, count};
        for (uint32_t end = row + count; row < end; row++) m.overlay[row] = overlay;
        overlay += 1 + (int32_t)(test_next() % 3);
    }
    m.step.row_count = rows;
    return m;
}

static void free_step(made_step *m) {
    free(m->cuda->upload.host);
    free(m->cuda);
}

/* What there would be of either kind. */
static void count_groups(const made_step *m, const cuda_chunk *chunk, uint32_t groups[2]) {
    const uint32_t end = chunk->first_row + chunk->rows;
    groups[0] = groups[1] = 0;
    for (uint32_t first = chunk->first_row, stop; first < end; first = stop) {
        for (stop = first + 1; stop < end && m->overlay[stop] == m->overlay[first];) stop++;
        for (int large = 0; large < 2; large++) {
            const uint32_t most = large ? K_ROWS_LARGE : K_ROWS_SMALL;
            groups[large] += m->overlay[first] < 0 ? 1 : (stop - first + most - 1) / most;
        }
    }
}

/* Groups of the chunk: its rows in order, each group of one variant and no larger than it may be, the base's runs whole. */
static void check_groups(const made_step *m, const cuda_chunk *chunk, const k_gemm_tile *groups, const int32_t *columns) {
    uint32_t row = chunk->first_row, runs[2];
    count_groups(m, chunk, runs);
    const bool large = runs[1] < runs[0] && k_rows_takes((int)chunk->rows, (int)runs[1], K_ROWS_LARGE);
    assert_true(k_rows_takes((int)chunk->rows, (int)chunk->groups, (int)chunk->group_rows));
    assert_int_equal(chunk->group_rows, large ? K_ROWS_LARGE : K_ROWS_SMALL);
    assert_int_equal(chunk->groups, runs[large]);
    for (uint32_t g = 0; g < chunk->groups; g++) {
        const k_gemm_tile *group = &groups[chunk->first_group + g];
        assert_int_equal(group->m0, row);
        assert_true(group->m1 > group->m0);
        assert_true(group->variant >= -1 && group->variant < (int32_t)chunk->slots);
        if (group->variant >= 0) assert_true(group->m1 - group->m0 <= (int32_t)chunk->group_rows);
        for (; row < (uint32_t)group->m1; row++) assert_int_equal(m->overlay[row], group->variant < 0 ? -1 : columns[group->variant]);
    }
    assert_int_equal(row, chunk->first_row + chunk->rows);
}

static void check_step(uint32_t rows, uint32_t runs) {
    made_step m = make_step(rows, runs);
    m.step.segments = m.segments;
    assert_true(cuda_fast_step_fill(m.cuda, &m.step));
    const cuda_fast_step *d = &m.cuda->fast_step;
    uint32_t row = 0;
    uint64_t digits = 0;
    assert_true(d->chunk_count <= CUDA_CHUNKS_MAX && d->chunk_count <= K_DIGITS_CHUNKS);
    for (uint32_t c = 0; c < d->chunk_count; c++) {
        const cuda_chunk *chunk = &d->chunks[c];
        const int32_t *columns = d->columns + chunk->first_slot;
        assert_int_equal(chunk->first_row, row);
        assert_true(chunk->rows >= 1 && chunk->rows <= K_DECODE_ROWS && chunk->slots <= 16);
        uint32_t groups[2];
        count_groups(&m, chunk, groups);
        assert_true(groups[0] <= K_ROWS_GROUPS);
        if (c + 1 < d->chunk_count) assert_true(chunk->rows == K_DECODE_ROWS || chunk->slots == 16 || groups[0] == K_ROWS_GROUPS);
        for (uint32_t end = row + chunk->rows; row < end; row++) {
            const int32_t slot = d->slot[row];
            assert_true(slot >= -1 && slot < (int32_t)chunk->slots);
            assert_int_equal(slot < 0 ? -1 : columns[slot], m.overlay[row]);
        }
        if (rows > CUDA_DECODE_ONLY_ROWS && chunk->slots) check_groups(&m, chunk, d->chunk_groups, columns);
        else assert_int_equal(chunk->groups, 0);
        digits += k_digits_bytes((int)chunk->rows, 256);
    }
    assert_int_equal(row, rows);
    assert_true(digits <= CUDA_DIGIT_ROWS / 32 * k_digits_bytes(32, 256)); /* what memory.c reserves */
    free_step(&m);
}

static void test_random_steps(void **state) {
    (void)state;
    for (int i = 0; i < 20000; i++) check_step(1 + (uint32_t)(test_next() % CUDA_DECODE_ROWS_MAX), 1 + (uint32_t)(test_next() % 40));
}

/* As many variants as rows, and one of each kind alone. */
static void test_extremes(void **state) {
    (void)state;
    for (uint32_t rows = 1; rows <= CUDA_DECODE_ROWS_MAX; rows++) check_step(rows, 2 * rows), check_step(rows, 1);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_steps), cmocka_unit_test(test_extremes)};
    test_state = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)test_state);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
