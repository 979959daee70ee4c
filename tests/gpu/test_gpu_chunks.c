/* test_gpu_chunks.c - how rows of a step are cut into launches and groups for the kernels of few rows, which needs no device: counted row by row on random steps. */
#include <math.h>

#include "gpu_test.h"

#include "../../src/backend/cuda/cuda_internal.h"

enum { UPLOAD_BYTES = 1 << 20, SEGMENTS_MAX = 64, ROWS_MAX = 1000 };

typedef struct made_step {
    bd_cuda *cuda;
    bd_step step;
    bd_segment segments[SEGMENTS_MAX];
    int32_t overlay[ROWS_MAX]; /* of each row */
} made_step;

static int longer(const void *a, const void *b) {
    const bd_segment *x = a, *y = b;
    return (x->row_count < y->row_count) - (x->row_count > y->row_count);
}

static void sort_segments(made_step *m) {
    qsort(m->segments, m->step.segment_count, sizeof *m->segments, longer);
    uint32_t row = 0;
    for (uint32_t s = 0; s < m->step.segment_count; s++) {
        m->segments[s].first_row = row;
        for (const uint32_t end = row + m->segments[s].row_count; row < end; row++) m->overlay[row] = m->segments[s].overlay;
    }
}

/* Segments of any lengths, of the base and then of variants in rising order; or as the engine sorts them, the longest first. */
static made_step make_step(uint32_t rows, uint32_t runs) {
    made_step m = {.cuda = calloc(1, sizeof *m.cuda)};
    m.cuda->upload.host = m.cuda->upload.device = calloc(1, UPLOAD_BYTES); /* read back where it was written */
    m.cuda->upload.cap_bytes = UPLOAD_BYTES;
    m.cuda->fast.usable = true;
    m.cuda->fast.sm_count = 132;
    static const uint32_t n[CUDA_GROUPS] = {6144, 4096, 28672, 4096}, k[CUDA_GROUPS] = {4096, 4096, 4096, 14336};
    for (int g = 0; g < (int)CUDA_GROUPS; g++) m.cuda->fast.groups[g] = (cuda_group){.fast = true, .n = n[g], .k = k[g]};
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
    if (test_next() % 2) sort_segments(&m);
    return m;
}

static bool begins(const made_step *m, uint32_t row) {
    for (uint32_t s = 0; s < m->step.segment_count; s++)
        if (m->segments[s].first_row == row) return true;
    return false;
}

static uint32_t kinds[4]; /* ways seen: by nobody, tiles, chunks, both */

static void free_step(made_step *m) {
    free(m->cuda->upload.host);
    free(m->cuda);
}

/* What there would be of either kind. overlay: of each row. */
static void count_groups(const int32_t *overlay, const cuda_chunk *chunk, uint32_t groups[2]) {
    const uint32_t end = chunk->first_row + chunk->rows;
    groups[0] = groups[1] = 0;
    for (uint32_t first = chunk->first_row, stop; first < end; first = stop) {
        for (stop = first + 1; stop < end && overlay[stop] == overlay[first];) stop++;
        for (int large = 0; large < 2; large++) {
            const uint32_t most = large ? K_ROWS_LARGE : K_ROWS_SMALL;
            groups[large] += overlay[first] < 0 ? 1 : (stop - first + most - 1) / most;
        }
    }
}

/* Groups of the chunk: its rows in order, each group of one variant and no larger than it may be, the base's runs whole. */
static void check_groups(const int32_t *overlay, const cuda_chunk *chunk, const k_gemm_tile *groups, const int32_t *columns) {
    uint32_t row = chunk->first_row, runs[2];
    count_groups(overlay, chunk, runs);
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
        for (; row < (uint32_t)group->m1; row++) assert_int_equal(overlay[row], group->variant < 0 ? -1 : columns[group->variant]);
    }
    assert_int_equal(row, chunk->first_row + chunk->rows);
}

/* Rows [first_row, end_row) in chunks, none of which could have had one more. */
static void check_chunks(const int32_t *overlay, const cuda_chunks *chunks, uint32_t first_row, uint32_t end_row, bool grouped) {
    uint32_t row = first_row;
    uint64_t digits = 0;
    assert_true(chunks->count <= CUDA_CHUNKS_MAX && chunks->count <= K_DIGITS_CHUNKS);
    for (uint32_t c = 0; c < chunks->count; c++) {
        const cuda_chunk *chunk = &chunks->at[c];
        const int32_t *columns = chunks->columns + chunk->first_slot, *slots = chunks->slot + chunk->slot_at;
        assert_int_equal(chunk->first_row, row);
        assert_int_equal(chunk->slot_at, row - first_row);
        assert_true(chunk->rows >= 1 && chunk->rows <= K_DECODE_ROWS && chunk->slots <= 16);
        uint32_t groups[2];
        int32_t highest = -1;
        count_groups(overlay, chunk, groups);
        assert_true(groups[0] <= K_ROWS_GROUPS);
        if (c + 1 < chunks->count) assert_true(chunk->rows == K_DECODE_ROWS || chunk->slots == 16 || groups[0] == K_ROWS_GROUPS);
        for (uint32_t i = 0; i < chunk->rows; i++, row++) { /* slots rise, and a variant's signs come once */
            if (overlay[row] >= 0 && (highest < 0 || columns[highest] != overlay[row])) highest++;
            assert_int_equal(slots[i], overlay[row] < 0 ? -1 : highest);
            if (slots[i] >= 0) assert_int_equal(columns[slots[i]], overlay[row]);
        }
        assert_int_equal(chunk->slots, highest + 1);
        if (grouped && chunk->slots) check_groups(overlay, chunk, chunks->groups, columns);
        else assert_int_equal(chunk->groups, 0);
        digits += k_digits_bytes((int)chunk->rows, 256);
    }
    assert_int_equal(row, end_row);
    assert_true(digits <= CUDA_DIGIT_ROWS / 32 * k_digits_bytes(32, 256)); /* what memory.c reserves */
}

/* The tiles are of every row once, of one segment each, in order. */
static void check_tiles(const made_step *m, const cuda_tiles *tiles) {
    for (uint32_t t = 0; t < CUDA_TILES; t++)
        for (uint32_t i = 0, row = 0; row < m->step.row_count; i++) {
            const k_gemm_tile *tile = &tiles->at[t][i];
            assert_true(i < tiles->count[t]);
            assert_int_equal(tile->m0, row);
            assert_true(tile->m1 > tile->m0 && tile->m1 - tile->m0 <= (int32_t)cuda_tile_tokens[t]);
            for (; row < (uint32_t)tile->m1; row++) assert_int_equal(m->overlay[row], tile->variant);
            if (row < m->step.row_count && m->overlay[row] == tile->variant) assert_true(tile->m1 - tile->m0 == (int32_t)cuda_tile_tokens[t] || begins(m, row));
        }
}

/* ---- What is estimated to take least, counted anew ---- */

/* Rows of segments [0, end) as tiles of the best size. */
static double tiles_cost(const made_step *m, const cuda_group *g, uint32_t end) {
    double least = end ? 1e300 : 0;
    for (uint32_t t = 0; t < CUDA_TILES && end; t++)
        for (int split = 1; split <= (t == 0 ? 4 : 2); split *= 2) {
            uint32_t count = 0;
            for (uint32_t s = 0; s < end; s++) count += (m->segments[s].row_count - 1) / cuda_tile_tokens[t] + 1;
            least = fmin(least, k_gemm_cost((int)g->n, (int)g->k, (int)cuda_tile_tokens[t], split, (int)count, m->cuda->fast.sm_count));
        }
    return least;
}

/* The most rows from `row` on that one launch may have. */
static cuda_chunk longest_chunk(const made_step *m, uint32_t row) {
    cuda_chunk chunk = {.first_row = row};
    for (cuda_chunk longer = chunk; row + chunk.rows < m->step.row_count; chunk = longer) {
        uint32_t groups[2];
        const uint32_t last = row + longer.rows++;
        if (m->overlay[last] >= 0 && (last == row || m->overlay[last] != m->overlay[last - 1])) longer.slots++;
        count_groups(m->overlay, &longer, groups);
        if (longer.rows > K_DECODE_ROWS || longer.slots > 16 || groups[0] > K_ROWS_GROUPS) break;
        const bool large = groups[1] < groups[0] && k_rows_takes((int)longer.rows, (int)groups[1], K_ROWS_LARGE);
        longer.groups = longer.slots && m->step.row_count > CUDA_DECODE_ONLY_ROWS ? groups[large] : 0;
        longer.group_rows = large ? K_ROWS_LARGE : K_ROWS_SMALL;
    }
    return chunk;
}

/* All rows from `row` on by decode's and the rows kernel. */
static double chunks_cost(const made_step *m, const cuda_group *g, uint32_t row) {
    const int sms = m->cuda->fast.sm_count;
    double cost = 0;
    for (cuda_chunk c; row < m->step.row_count; row += c.rows) {
        c = longest_chunk(m, row);
        const double decode = k_decode_cost((int)g->n, (int)g->k, (int)c.rows, (int)c.slots, sms);
        const double rows = c.groups ? k_rows_cost((int)g->n, (int)g->k, (int)c.rows, (int)c.groups, (int)c.group_rows, (int)c.slots, sms) : decode;
        cost += fmin(decode, rows);
    }
    return cost;
}

/* The step's linears if decode's kernels may take the segments from `from` on. */
static double step_cost(const made_step *m, uint32_t from) {
    const uint32_t count = m->step.segment_count;
    double sum = 0;
    for (uint32_t g = 0; g < CUDA_GROUPS; g++) {
        const cuda_group *group = &m->cuda->fast.groups[g];
        const double parts = from < count ? tiles_cost(m, group, from) + chunks_cost(m, group, m->segments[from].first_row) : 1e300;
        sum += fmin(tiles_cost(m, group, count), parts);
    }
    return sum;
}

/* No place where lengths fall among the short segments at the end is better, nor all rows as tiles, nor none of a small step's; but that a tenth of a percent
   changes no tile. */
static void check_least(const made_step *m, const cuda_fast_step *d) {
    double cost = 0;
    for (uint32_t g = 0; g < CUDA_GROUPS; g++) cost += (double)d->ways[g].cost_us;
    const uint32_t rows = m->step.row_count, count = m->step.segment_count, from = d->chunks.count ? d->chunks.at[0].first_row : rows;
    uint32_t at = 0;
    while (at < count && m->segments[at].first_row < from) at++;
    assert_true(fabs(cost - step_cost(m, at)) <= 2e-3 * cost);
    if (rows <= CUDA_DECODE_ROWS_MAX) assert_true(cost <= step_cost(m, 0) * 1.002);
    for (uint32_t s = count; s > 0 && m->segments[s - 1].row_count <= K_DECODE_ROWS && rows - m->segments[s - 1].first_row <= CUDA_DECODE_ROWS_MAX; s--)
        if (s == count || m->segments[s - 1].row_count > m->segments[s].row_count) assert_true(cost <= step_cost(m, s) * 1.002);
}

/* Every group's rows are taken once: by as many tiles as reach to where the chunks begin, or to the end. */
static void check_ways(const made_step *m, const cuda_fast_step *d) {
    const uint32_t rows = m->step.row_count, chunked_from = d->chunks.count ? d->chunks.at[0].first_row : rows;
    for (uint32_t g = 0; g < CUDA_GROUPS; g++) {
        const cuda_way *way = &d->ways[g];
        uint32_t end = 0;
        bool delta = false;
        for (uint32_t i = 0; i < way->tile_count; i++) end = (uint32_t)d->tiles.at[way->tile][i].m1, delta |= d->tiles.at[way->tile][i].variant >= 0;
        assert_int_equal(end, way->chunked ? chunked_from : rows);
        if (end) assert_int_equal(way->delta, delta);
        if (way->chunked) assert_true(d->chunks.count > 0);
        kinds[(end > 0) + 2 * (way->chunked > 0)]++;
    }
    /* Decode's are all rows of a small step, or segments at the end, each short. */
    assert_true(rows - chunked_from <= CUDA_DECODE_ROWS_MAX);
    for (uint32_t s = 0; s < m->step.segment_count && chunked_from; s++)
        if (m->segments[s].first_row >= chunked_from) assert_true(m->segments[s].row_count <= K_DECODE_ROWS);
    assert_true(chunked_from == rows || begins(m, chunked_from));
}

static __attribute__((noinline)) void leave_on_the_stack(int byte) {
    char bytes[16384];
    memset(bytes, byte, sizeof bytes);
    __asm__ volatile("" : : "r"(bytes) : "memory");
}

/* The same bytes whatever was there before: recorded steps are found by them. And no more of the upload than is counted on. */
static void fill(made_step *m) {
    cuda_fast_step first;
    for (int i = 0; i < 2; i++) {
        m->cuda->upload.used_bytes = 0;
        memset(&m->cuda->fast_step, i ? 0xff : 0x5a, sizeof m->cuda->fast_step);
        leave_on_the_stack(i ? 0xff : 0x5a);
        assert_true(cuda_fast_step_fill(m->cuda, &m->step));
        if (i == 0) memcpy(&first, &m->cuda->fast_step, sizeof first);
    }
    assert_memory_equal(&first, &m->cuda->fast_step, sizeof first);
    const size_t lists = CUDA_TILES + 3, tiles = m->step.row_count * CUDA_TILES * sizeof(k_gemm_tile);
    assert_true(m->cuda->upload.used_bytes <= tiles + CUDA_DECODE_ROWS_MAX * (2 * 4 + sizeof(k_gemm_tile)) + lists * 256);
}

static void check_step(uint32_t rows, uint32_t runs) {
    made_step m = make_step(rows, runs);
    m.step.segments = m.segments;
    fill(&m);
    const cuda_fast_step *d = &m.cuda->fast_step;
    const uint32_t first_row = d->chunks.count ? d->chunks.at[0].first_row : rows;
    check_chunks(m.overlay, &d->chunks, first_row, rows, rows > CUDA_DECODE_ONLY_ROWS);
    check_ways(&m, d);
    if (rows > CUDA_DECODE_ONLY_ROWS) check_tiles(&m, &d->tiles), check_least(&m, d);
    else assert_true(d->chunks.count > 0 && first_row == 0);
    free_step(&m);
}

static uint32_t head_ways[4]; /* heads seen: of no rows, tiles, one chunk, several */

/* The rows of logits as a step of their own. base: as if all were the base's. */
static made_step step_of_head(const made_step *m, const int32_t *overlay, uint32_t count, bool base) {
    made_step h = {.cuda = m->cuda, .step.row_count = count};
    for (uint32_t row = 0; row < count; row++) {
        h.overlay[row] = base ? -1 : overlay[row];
        if (row == 0 || h.overlay[row] != h.overlay[row - 1]) h.segments[h.step.segment_count++] = (bd_segment){h.overlay[row], row, 0};
        h.segments[h.step.segment_count - 1].row_count++;
    }
    return h;
}

/* heads: one in so many variants has a head of its own; 0: none. */
static void check_head(uint32_t rows, uint32_t runs, uint32_t heads) {
    static bd_overlay overlays[3 * SEGMENTS_MAX];
    static bd_logits_row logits[ROWS_MAX];
    static bd_overlay_linear block = {.plane_count = 1};
    const bd_overlay *list[3 * SEGMENTS_MAX];
    made_step m = make_step(rows, runs);
    m.step.segments = m.segments;
    m.step.overlays = list;
    m.step.logits_rows = logits;
    bd_segment room[ROWS_MAX];
    m.cuda->fast.head = (cuda_fast_head){.fast = true, .runs = room};
    m.cuda->step.block_rows = 1000, m.cuda->shape.hidden = 4096;
    for (uint32_t s = 0; s < m.step.segment_count; s++)
        while (m.segments[s].overlay >= (int32_t)m.step.overlay_count) m.step.overlay_count++;
    bool plain = true;
    for (uint32_t v = 0; v < m.step.overlay_count; v++) {
        const bool own = heads && test_next() % heads == 0;
        list[v] = &overlays[v];
        overlays[v] = (bd_overlay){.head = own ? &block : NULL, .block_count = own, .block_rows = 1000};
        plain = plain && !own;
    }
    const uint64_t share = 1 + test_next() % 20;
    int32_t overlay[ROWS_MAX]; /* of each row of logits */
    for (uint32_t row = 0; row < rows; row++)
        if (test_next() % share == 0) overlay[m.step.logits_row_count] = m.overlay[row], logits[m.step.logits_row_count++] = (bd_logits_row){.row = row, .target = -1};
    const uint32_t count = m.step.logits_row_count;
    assert_true(cuda_fast_head_fill(m.cuda, &m.step));
    const cuda_head_step *d = &m.cuda->fast_step.head;
    const bool few = count <= K_LEAN_ROWS || (!plain && count <= K_DECODE_ROWS), chunks = d->chunks.count > 0;
    assert_int_equal(d->usable, count > 0);
    if (few) assert_int_equal(chunks, count > 0);
    if (plain || count > CUDA_DECODE_ROWS_MAX) assert_int_equal(chunks, count > 0 && few);
    check_chunks(overlay, &d->chunks, 0, chunks ? count : 0, count > K_LEAN_ROWS);
    if (count > 0 && !few) {
        const made_step h = step_of_head(&m, overlay, count, plain);
        const cuda_group head = {.n = 1000, .k = 4096};
        assert_int_equal(d->delta, !plain);
        check_tiles(&h, &d->tiles);
        if (!plain && count <= CUDA_DECODE_ROWS_MAX) {
            const double by_chunks = chunks_cost(&h, &head, 0), by_tiles = tiles_cost(&h, &head, h.step.segment_count);
            assert_true(chunks ? by_chunks < by_tiles * 1.002 : by_tiles < by_chunks * 1.002);
        }
    }
    head_ways[count == 0 ? 0 : !chunks ? 1 : 2 + (d->chunks.count > 1)]++;
    free_step(&m);
}

static void test_heads(void **state) {
    (void)state;
    for (int i = 0; i < 20000; i++) check_head(1 + (uint32_t)(test_next() % (i % 2 ? 40 : ROWS_MAX)), 1 + (uint32_t)(test_next() % 40), (uint32_t)(test_next() % 4));
    printf("heads by tiles %u, one chunk %u, several %u\n", head_ways[1], head_ways[2], head_ways[3]);
    for (int i = 1; i < 4; i++) assert_true(head_ways[i] > 100);
}

static void test_random_steps(void **state) {
    (void)state;
    for (int i = 0; i < 20000; i++) check_step(1 + (uint32_t)(test_next() % (i % 2 ? ROWS_MAX : CUDA_DECODE_ROWS_MAX)), 1 + (uint32_t)(test_next() % 40));
    printf("groups by tiles %u, chunks %u, both %u\n", kinds[1], kinds[2], kinds[3]);
    assert_true(kinds[1] > 1000 && kinds[2] > 1000 && kinds[3] > 1000);
    assert_int_equal(kinds[0], 0);
}

/* As many variants as rows, and one of each kind alone. */
static void test_extremes(void **state) {
    (void)state;
    for (uint32_t rows = 1; rows <= CUDA_DECODE_ROWS_MAX; rows++) check_step(rows, 2 * rows), check_step(rows, 1);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_steps), cmocka_unit_test(test_extremes), cmocka_unit_test(test_heads)};
    test_state = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)test_state);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
