/* What a new part takes from the files of a delta, against brute force: a tensor whose elements are
 * their own numbers is cut into files and into parts element by element, by the rule as the format
 * states it; the slices must copy each part from the files. Random shapes, every pair of
 * shards and parts. */
#include "hf_support.h"

#include "bitdelta/delta/slices.h"

enum { CASES = 150, PARTS_MAX = 16 };

typedef enum rule { RULE_ROWS, RULE_KV, RULE_COLS, RULE_TABLE, RULE_WHOLE } rule;

typedef struct grid { /* elements in row-major order */
    uint32_t *values;
    uint64_t rows, cols;
} grid;

static bool holds(rule by, uint64_t row, uint64_t col, uint64_t rows, uint64_t cols,
                  uint64_t kv_heads, uint64_t part, uint64_t parts) {
    const uint64_t each = (rows + parts - 1) / parts;
    switch (by) {
    case RULE_ROWS:
        return row * parts / rows == part;
    case RULE_KV: {
        const uint64_t head = row / (rows / kv_heads);
        return kv_heads >= parts ? head / (kv_heads / parts) == part
                                 : head == part * kv_heads / parts;
    }
    case RULE_COLS:
        return col * parts / cols == part;
    case RULE_TABLE:
        return row / each == part;
    case RULE_WHOLE:
        return true;
    }
    return false;
}

/* The part of the tensor of rows x cols, whose elements are 1 and on. */
static grid cut(rule by, uint64_t rows, uint64_t cols, uint64_t kv_heads, uint64_t part,
                uint64_t parts) {
    grid g = {.values = calloc(rows * cols + 1, sizeof *g.values)};
    assert_non_null(g.values);
    uint64_t used = 0;
    for (uint64_t row = 0; row < rows; row++) {
        const uint64_t before = used;
        for (uint64_t col = 0; col < cols; col++)
            if (holds(by, row, col, rows, cols, kv_heads, part, parts))
                g.values[used++] = (uint32_t)(row * cols + col + 1);
        if (used > before) {
            g.rows++;
            g.cols = used - before;
        }
    }
    return g;
}

typedef struct shape {
    const char *name;
    bd_delta_tensor what;
    uint32_t rank;
    rule by;
} shape;

static const shape shapes[] = {
    {"l.self_attn.q_proj.weight", BD_DELTA_TENSOR_BITS, 2, RULE_ROWS},
    {"l.self_attn.q_proj.weight", BD_DELTA_TENSOR_SCALES, 2, RULE_ROWS},
    {"l.self_attn.k_proj.weight", BD_DELTA_TENSOR_BITS, 2, RULE_KV},
    {"l.self_attn.v_proj.weight", BD_DELTA_TENSOR_SCALES, 2, RULE_KV},
    {"l.self_attn.o_proj.weight", BD_DELTA_TENSOR_BITS, 2, RULE_COLS},
    {"l.self_attn.o_proj.weight", BD_DELTA_TENSOR_SCALES, 2, RULE_WHOLE},
    {"l.mlp.up_proj.weight", BD_DELTA_TENSOR_BITS, 2, RULE_ROWS},
    {"l.mlp.down_proj.weight", BD_DELTA_TENSOR_BITS, 2, RULE_COLS},
    {"model.embed_tokens.weight", BD_DELTA_TENSOR_BITS, 2, RULE_TABLE},
    {"lm_head.weight", BD_DELTA_TENSOR_SCALES, 2, RULE_TABLE},
    {"lm_head.weight", BD_DELTA_TENSOR_WHOLE, 2, RULE_TABLE},
    {"lm_head.weight", BD_DELTA_TENSOR_EXTRA, 2, RULE_WHOLE},
    {"model.norm.weight", BD_DELTA_TENSOR_WHOLE, 1, RULE_WHOLE},
    {"l.self_attn.o_proj.bias", BD_DELTA_TENSOR_WHOLE, 1, RULE_WHOLE},
};

/* Copies what the slices say; every place of the part must be filled once. */
static void gather(const bd_delta_cut *by, const shape *s, const grid *files,
                   const bd_delta_slice *slices, uint32_t count, grid *part) {
    for (uint32_t i = 0; i < count; i++) {
        const bd_delta_slice *slice = &slices[i];
        assert_true(slice->file_index < by->shards);
        const grid *file = &files[slice->file_index];
        assert_int_equal(slice->file_rows, file->rows);
        assert_int_equal(slice->file_cols, file->cols);
        assert_true(slice->file_row + slice->rows <= file->rows);
        assert_true(slice->file_col + slice->cols <= file->cols);
        if (s->what == BD_DELTA_TENSOR_BITS) /* whole bytes */
            assert_int_equal((slice->file_col | slice->cols | slice->col) % 8, 0);
        for (uint64_t row = 0; row < slice->rows; row++) {
            for (uint64_t col = 0; col < slice->cols; col++) {
                uint32_t *to = &part->values[(slice->row + row) * part->cols + slice->col + col];
                assert_int_equal(*to, 0);
                *to = file->values[(slice->file_row + row) * file->cols + slice->file_col + col];
            }
        }
    }
}

static void check_part(const bd_delta_cut *by, const bd_delta_entry *entry, const shape *s,
                       const grid *files, const grid *expected) {
    bd_delta_slice slices[BD_DELTA_SHARDS_MAX];
    bd_delta_part mine;
    uint32_t count;
    assert_true(bd_delta_cut_part(by, entry, s->what, &mine));
    assert_int_equal(mine.rows, expected->rows);
    if (mine.rows > 0) assert_int_equal(mine.cols, expected->cols);
    if (mine.rows > 0) /* the place in the whole */
        assert_int_equal(expected->values[0],
                         mine.first_row * (s->by == RULE_COLS ? entry->shape[1] : mine.cols) +
                             mine.first_col + 1);
    assert_true(bd_delta_cut_slices(by, entry, s->what, slices, &count));
    grid part = {.values = calloc(mine.rows * mine.cols + 1, sizeof *part.values),
                 .rows = mine.rows,
                 .cols = mine.cols};
    assert_non_null(part.values);
    gather(by, s, files, slices, count, &part);
    if (memcmp(part.values, expected->values, mine.rows * mine.cols * sizeof *part.values) != 0)
        fail_msg("%s, tensor %d: %u shards, part %u of %u, %u kv heads", s->name, (int)s->what,
                 by->shards, by->part, by->parts, by->kv_heads);
    /* A part's own files suffice, but for tables, whose cuts need not meet. */
    const uint32_t each = by->shards / by->parts; /* 0: fewer files than parts */
    for (uint32_t i = 0; i < count && each > 0 && s->by != RULE_TABLE; i++)
        assert_int_equal(slices[i].file_index / each, by->part);
    free(part.values);
}

static uint64_t below(uint64_t *rng, uint64_t end) {
    return support_random(rng) % end;
}

/* A random shape that divides as its rule wants. */
static bd_delta_entry random_entry(const shape *s, uint64_t *rng, uint64_t kv_heads) {
    const uint64_t odd = 1 + below(rng, 7);
    bd_delta_entry entry = {.name = s->name, .rank = s->rank, .shape = {1, 1}};
    const bool by_columns = strstr(s->name, "o_proj.weight") || strstr(s->name, "down_proj.weight");
    entry.shape[0] = s->by == RULE_ROWS ? odd * PARTS_MAX
                     : s->by == RULE_KV ? odd * kv_heads
                                        : 1 + below(rng, 70);
    if (s->rank == 2) entry.shape[1] = by_columns ? 8 * PARTS_MAX * (1 + odd % 3) : 8 * odd;
    if (s->what == BD_DELTA_TENSOR_EXTRA) entry.extra_rows = 1 + below(rng, 9);
    return entry;
}

static void check_shape(const shape *s, uint64_t *rng, uint32_t shards, uint32_t parts) {
    static const uint32_t kv_choices[] = {1, 2, 4, 8, 16, 24};
    const uint32_t most = shards > parts ? shards : parts,
                   kv_heads = kv_choices[below(rng, most > 8 ? 5 : 6)];
    const bd_delta_entry entry = random_entry(s, rng, kv_heads);
    const uint64_t rows = s->what == BD_DELTA_TENSOR_EXTRA ? entry.extra_rows : entry.shape[0],
                   cols = s->what == BD_DELTA_TENSOR_SCALES ? 1 : entry.shape[1];
    grid files[PARTS_MAX];
    for (uint32_t i = 0; i < shards; i++)
        files[i] = cut(s->by, rows, cols, kv_heads, i, shards);
    for (uint32_t part = 0; part < parts; part++) {
        const bd_delta_cut by = {
            .parts = parts, .part = part, .shards = shards, .kv_heads = kv_heads};
        grid expected = cut(s->by, rows, cols, kv_heads, part, parts);
        check_part(&by, &entry, s, files, &expected);
        free(expected.values);
    }
    for (uint32_t i = 0; i < shards; i++)
        free(files[i].values);
}

static void test_against_brute_force(void **state) {
    (void)state;
    uint64_t rng = support_seed();
    for (uint32_t i = 0; i < CASES * sizeof shapes / sizeof shapes[0]; i++)
        for (uint32_t shards = 1; shards <= PARTS_MAX; shards *= 2)
            for (uint32_t parts = 1; parts <= PARTS_MAX; parts *= 2)
                check_shape(&shapes[i % (sizeof shapes / sizeof shapes[0])], &rng, shards, parts);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static bool can(const char *name, uint64_t rows, uint64_t cols, bd_delta_cut by) {
    const bd_delta_entry entry = {.name = name, .rank = 2, .shape = {rows, cols}};
    bd_delta_slice slices[BD_DELTA_SHARDS_MAX];
    uint32_t count;
    return bd_delta_cut_slices(&by, &entry, BD_DELTA_TENSOR_BITS, slices, &count);
}

static void test_what_cannot_be_cut(void **state) {
    (void)state;
    assert_true(can("q_proj.weight", 32, 8, (bd_delta_cut){2, 1, 8, 8}));
    assert_true(can("q_proj.weight", 48, 8, (bd_delta_cut){4, 1, 6, 8})); /* cuts that cross */
    assert_false(can("q_proj.weight", 30, 8, (bd_delta_cut){4, 0, 4, 8}));
    assert_false(can("q_proj.weight", 32, 8, (bd_delta_cut){2, 2, 2, 8})); /* no such part */
    assert_false(can("q_proj.weight", 32, 8, (bd_delta_cut){0, 0, 1, 8}));
    assert_false(can("q_proj.weight", 32, 8, (bd_delta_cut){1, 0, 0, 8}));
    assert_false(can("q_proj.weight", 128, 8, (bd_delta_cut){1, 0, 128, 8}));
    assert_true(can("o_proj.weight", 3, 64, (bd_delta_cut){8, 7, 8, 8}));
    assert_false(can("o_proj.weight", 3, 32, (bd_delta_cut){8, 7, 8, 8})); /* half bytes */
    assert_false(can("k_proj.weight", 24, 8, (bd_delta_cut){4, 0, 4, 6})); /* mid-head */
    assert_false(can("k_proj.weight", 24, 8, (bd_delta_cut){4, 0, 4, 0}));
    assert_true(can("lm_head.weight", 3, 8, (bd_delta_cut){8, 7, 8, 8})); /* no rows, no slices */
}

static void expect_parts(uint32_t parts, bd_model_config config, const char *message) {
    bd_error err = {.message = ""};
    const bd_status status = bd_delta_check_parts(&config, parts, "--shards", "shards", &err);
    assert_int_equal(status, message ? BD_E_ARGUMENT : BD_OK);
    if (message) assert_string_equal(err.message, message);
}

static void test_messages(void **state) {
    (void)state;
    const bd_model_config good = {.heads = 16, .kv_heads = 4, .head_dim = 12, .ffn = 128};
    bd_model_config bad = good;
    for (uint32_t parts = 1; parts <= 8; parts *= 2)
        expect_parts(parts, good, NULL);
    bad.heads = 12;
    expect_parts(8, bad, "--shards 8: num_attention_heads of the base is 12, not a multiple of 8");
    bad = good, bad.head_dim = 2;
    expect_parts(8, bad,
                 "--shards 8: num_attention_heads x head_dim (the width of o_proj) of the base is "
                 "32, not a multiple of 64");
    bad = good, bad.ffn = 136;
    expect_parts(4, bad,
                 "--shards 4: intermediate_size (the width of down_proj) of the base is 136, not a "
                 "multiple of 32");
    bad = good, bad.kv_heads = 6;
    expect_parts(4, bad,
                 "--shards 4: num_key_value_heads of the base is 6; neither is a multiple of the "
                 "other");
    expect_parts(2, bad, NULL);
    expect_parts(0, good, "--shards 0: nothing can be cut so");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_brute_force),
        cmocka_unit_test(test_what_cannot_be_cut),
        cmocka_unit_test(test_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
