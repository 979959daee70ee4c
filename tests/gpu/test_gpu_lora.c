/* test_gpu_lora.c - low-rank adapters on the CUDA backend. The kernels against float64, in every size that cuts their work in another way;
 * then batches of the base, BitDelta variants, adapters of other ranks on each matrix, and variants that are both, on one rank and on
 * several that share a device, against a float64 forward pass (tests/unit/model_reference.h). And an adapter from its files. */
#include "gpu_ranks.h"

#include "../../src/tools/lora.h"
#include "../unit/model_reference.h"
#include "../unit/tp_support.h"
#include "lora.h"

/* ---- The kernels ---- */

enum { VARIANTS = 5, PIECES = 3 };

typedef struct terms { /* rows of several variants, and the matrices of a group */
    int rows, k, t_stride, t_rows, piece_count, y_stride, n[PIECES], first[PIECES], ranks[PIECES][VARIANTS];
    bool fp16, y_half;
    uint16_t *x;
    float *a[PIECES][VARIANTS], *b[PIECES][VARIANTS], scale[PIECES][VARIANTS];
    int *variant; /* [rows] -1: none */
    buffer dx, da[PIECES][VARIANTS], db[PIECES][VARIANTS];
    k_lora_linear table[PIECES][VARIANTS];
} terms;

static int pick(int low, int high) { return low + (int)(test_next() % (uint64_t)(high - low + 1)); }
static float half_float(uint16_t v, bool fp16) { return fp16 ? bd_f16_to_f32(v) : bd_bf16_to_f32(v); }
static uint16_t float_half(float v, bool fp16) { return fp16 ? bd_f32_to_f16(v) : bd_f32_to_bf16(v); }
static uint16_t *halves_random(size_t count, bool fp16) {
    uint16_t *v = malloc((count + 1) * sizeof *v);
    for (size_t i = 0; i < count; i++) v[i] = float_half((float)test_normal(), fp16);
    return v;
}

static void make_pair(terms *p, int piece, int v) {
    static const int ranks[] = {0, 1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 64, 67, 256};
    const int rank = ranks[test_next() % (sizeof ranks / sizeof *ranks)], shift = pick(0, 3); /* floats before A and B: any alignment */
    const size_t a = (size_t)rank * (size_t)p->k, b = (size_t)p->n[piece] * (size_t)rank;
    p->ranks[piece][v] = rank;
    if (!rank) return;
    p->a[piece][v] = floats_random(a + (size_t)shift, 1 / sqrt(p->k)), p->b[piece][v] = floats_random(b + (size_t)shift, 1 / sqrt(rank));
    p->da[piece][v] = buffer_make(p->a[piece][v], (a + (size_t)shift) * 4), p->db[piece][v] = buffer_make(p->b[piece][v], (b + (size_t)shift) * 4);
    p->a[piece][v] += shift, p->b[piece][v] += shift; /* freed with the process: the tests are short */
    p->scale[piece][v] = (float)(0.5 + test_uniform());
    p->table[piece][v] = (k_lora_linear){(const float *)p->da[piece][v].data + shift, (const float *)p->db[piece][v].data + shift, p->scale[piece][v], rank};
}

static terms terms_make(int rows, int k, const int *n, int pieces, bool fp16, bool y_half) {
    terms p = {.rows = rows, .k = k, .piece_count = pieces, .fp16 = fp16, .y_half = y_half, .t_rows = rows + pick(0, 2)};
    p.x = halves_random((size_t)rows * (size_t)k, fp16);
    p.dx = buffer_make(p.x, (size_t)rows * (size_t)k * 2);
    for (int i = 0; i < pieces; i++) {
        p.first[i] = p.y_stride, p.n[i] = n[i], p.y_stride += n[i];
        for (int v = 0; v < VARIANTS; v++) make_pair(&p, i, v);
        for (int v = 0; v < VARIANTS; v++) p.t_stride = p.ranks[i][v] > p.t_stride ? p.ranks[i][v] : p.t_stride;
    }
    p.t_stride += pick(0, 5), p.y_stride += pick(0, 9);
    p.variant = calloc((size_t)rows, sizeof *p.variant);
    for (int m = 0, left = 0, v = -1; m < rows; m++, left--) {
        if (!left) v = pick(-1, VARIANTS - 1), left = pick(1, test_next() % 2 ? 3 : 20);
        p.variant[m] = v;
    }
    return p;
}
static void terms_free(terms *p) {
    for (int i = 0; i < p->piece_count; i++)
        for (int v = 0; v < VARIANTS; v++)
            if (p->ranks[i][v]) buffer_free(&p->da[i][v]), buffer_free(&p->db[i][v]);
    buffer_free(&p->dx);
    free(p->x), free(p->variant);
}

/* Runs rows [first, end) with y as it is given, [rows, y_stride]; tiles of as many rows as there are together, of any number for a test. */
static void terms_run(const terms *p, int first, int end, int tile_rows, void *y, float *t) {
    const size_t size = p->y_half ? 2 : 4, y_bytes = (size_t)p->rows * (size_t)p->y_stride * size, t_bytes = (size_t)p->piece_count * (size_t)p->t_rows * (size_t)p->t_stride * 4 + 4;
    k_lora_tile *tiles = calloc((size_t)p->rows, sizeof *tiles);
    int count = 0;
    for (int m = first, stop; m < end; m = stop) {
        for (stop = m + 1; stop < end && stop - m < tile_rows && p->variant[stop] == p->variant[m];) stop++;
        if (p->variant[m] >= 0) tiles[count++] = (k_lora_tile){m, stop, p->variant[m]};
    }
    buffer dy = buffer_make(y, y_bytes), dt = buffer_make(NULL, t_bytes), dtiles = buffer_make(tiles, (size_t)count * sizeof *tiles + 4), table = buffer_make(p->table, sizeof p->table);
    k_lora_args args = {.x = p->dx.data, .t = dt.data, .tiles = dtiles.data, .piece_count = p->piece_count, .tile_count = count, .k = p->k, .t_rows = p->t_rows, .t_stride = p->t_stride, .y_half = p->y_half, .fp16 = p->fp16};
    for (int i = 0; i < p->piece_count; i++) {
        args.pieces[i] = (k_lora_piece){(const k_lora_linear *)table.data + i * VARIANTS, (uint8_t *)dy.data + (size_t)p->first[i] * size, p->n[i], p->y_stride};
        for (int v = 0; v < VARIANTS; v++) args.rank_max = p->ranks[i][v] > args.rank_max ? p->ranks[i][v] : args.rank_max;
    }
    CUDA_OK(k_lora_down(&args, 0));
    CUDA_OK(k_lora_up(&args, 0));
    CUDA_OK(cudaDeviceSynchronize());
    buffer_get(&dy, y);
    if (t) buffer_get(&dt, t);
    buffer_free(&dy), buffer_free(&dt), buffer_free(&dtiles), buffer_free(&table);
    free(tiles);
}

/* scale x A^T of a row, exactly. */
static void down_exact(const terms *p, int m, int piece, double *t) {
    const int v = p->variant[m];
    for (int r = 0; r < p->ranks[piece][v]; r++) {
        double sum = 0;
        for (int i = 0; i < p->k; i++) sum += (double)half_float(p->x[(size_t)m * (size_t)p->k + (size_t)i], p->fp16) * p->a[piece][v][(size_t)r * (size_t)p->k + (size_t)i];
        t[r] = p->scale[piece][v] * sum;
    }
}

/* What is summed and the sums are about 1, in float32: their roundings grow as sqrt(k) 6e-8. Into 16 bits one more, of the sum with what
 * was there. */
static void check_row(const terms *p, int m, const uint8_t *before, const uint8_t *after, const float *t) {
    const size_t size = p->y_half ? 2 : 4, row = (size_t)m * (size_t)p->y_stride;
    uint8_t *touched = calloc((size_t)p->y_stride, 1);
    double exact[256], unit = p->y_half ? p->fp16 ? 0x1p-11 : 0x1p-8 : 0;
    for (int i = 0; i < p->piece_count && p->variant[m] >= 0; i++) {
        const int v = p->variant[m], rank = p->ranks[i][v];
        if (!rank) continue;
        down_exact(p, m, i, exact);
        for (int r = 0; r < rank; r++) {
            const float got = t[((size_t)i * (size_t)p->t_rows + (size_t)m) * (size_t)p->t_stride + (size_t)r];
            if (!(fabs(got - exact[r]) <= 1e-5)) fail_msg("row %d, piece %d: %d of rank %d is %g, not %g", m, i, r, rank, got, exact[r]);
        }
        for (int n = 0; n < p->n[i]; n++) {
            const size_t at = row + (size_t)(p->first[i] + n);
            touched[p->first[i] + n] = 1;
            double term = 0;
            for (int r = 0; r < rank; r++) term += exact[r] * p->b[i][v][(size_t)n * (size_t)rank + (size_t)r];
            const float y0 = p->y_half ? half_float(((const uint16_t *)(const void *)before)[at], p->fp16) : ((const float *)(const void *)before)[at];
            const float y1 = p->y_half ? half_float(((const uint16_t *)(const void *)after)[at], p->fp16) : ((const float *)(const void *)after)[at];
            const double whole = y0 + term;
            if (!(fabs(y1 - whole) <= unit * fabs(whole) + 2e-5)) fail_msg("row %d, piece %d, output %d, rank %d: %g, not %g", m, i, n, rank, y1, whole);
        }
    }
    for (int n = 0; n < p->y_stride; n++)
        if (!touched[n] && memcmp(before + (row + (size_t)n) * size, after + (row + (size_t)n) * size, size)) fail_msg("row %d: column %d is nobody's", m, n);
    free(touched);
}

static void check_terms(int rows, int k, const int *n, int pieces, bool fp16, bool y_half) {
    terms p = terms_make(rows, k, n, pieces, fp16, y_half);
    const size_t count = (size_t)rows * (size_t)p.y_stride, bytes = count * (y_half ? 2 : 4);
    void *before = y_half ? (void *)halves_random(count, fp16) : floats_random(count, 1), *after = malloc(bytes), *again = malloc(bytes);
    float *t = malloc((size_t)pieces * (size_t)p.t_rows * (size_t)p.t_stride * 4 + 4);
    for (int m = 0; m < rows; m++) /* -0 behind the last piece: who adds nothing there makes it +0 */
        for (size_t i = (size_t)m * (size_t)p.y_stride + (size_t)(p.first[pieces - 1] + n[pieces - 1]); i < (size_t)(m + 1) * (size_t)p.y_stride; i++)
            y_half ? (void)(((uint16_t *)before)[i] = 0x8000) : (void)(((float *)before)[i] = -0.0f);
    memcpy(after, before, bytes), memcpy(again, before, bytes);
    terms_run(&p, 0, rows, K_LORA_ROWS, after, t);
    for (int m = 0; m < rows; m++) check_row(&p, m, before, after, t);
    for (int m = 0; m < rows;) { /* alone or beside others, a row gets the same bits */
        const int end = rows - m < 3 ? rows : m + pick(1, 3);
        terms_run(&p, m, end, pick(1, K_LORA_ROWS), again, NULL);
        m = end;
    }
    assert_memory_equal(again, after, bytes);
    free(before), free(after), free(again), free(t);
    terms_free(&p);
}

static void test_terms(void **state) {
    (void)state;
    static const struct {
        int rows, k, pieces, n[PIECES];
    } cases[] = {{1, 8, 1, {1}}, {1, 4096, 3, {256, 128, 128}}, {7, 40, 2, {127, 129}}, {37, 264, 3, {128, 1, 300}}, {9, 2056, 1, {130}}, {70, 328, 2, {72, 72}}};
    for (size_t i = 0; i < 4 * (sizeof cases / sizeof *cases); i++) check_terms(cases[i / 4].rows, cases[i / 4].k, cases[i / 4].n, cases[i / 4].pieces, i % 2, i / 2 % 2);
}

/* Blocks of the table, tokens of another rank's part, rows of no adapter. */
static void test_embed(void **state) {
    (void)state;
    enum { ROWS = 29, HIDDEN = 328, VOCAB = 97, BLOCK = 40, BLOCKS = 3, FIRST = 13 };
    k_lora_linear table[BLOCKS][VARIANTS] = {0};
    float *a[VARIANTS], *b[BLOCKS][VARIANTS];
    buffer da[VARIANTS], db[BLOCKS][VARIANTS];
    int32_t tokens[ROWS], overlay[ROWS];
    for (int v = 0; v < VARIANTS; v++) {
        const int rank = v == 2 ? 0 : pick(1, 40);
        a[v] = floats_random((size_t)rank * HIDDEN, 0.2), da[v] = buffer_make(a[v], (size_t)rank * HIDDEN * 4 + 4);
        for (int k = 0; k < BLOCKS; k++) {
            b[k][v] = floats_random((size_t)rank * BLOCK, 0.2), db[k][v] = buffer_make(b[k][v], (size_t)rank * BLOCK * 4 + 4);
            if (rank) table[k][v] = (k_lora_linear){da[v].data, db[k][v].data, 0.75f + (float)v, rank};
        }
    }
    for (int m = 0; m < ROWS; m++) tokens[m] = (int32_t)pick(0, FIRST + VOCAB + 20), overlay[m] = pick(-1, VARIANTS - 1);
    tokens[0] = FIRST, tokens[1] = FIRST + VOCAB - 1, tokens[2] = FIRST + VOCAB, tokens[3] = FIRST - 1, tokens[4] = FIRST + BLOCK, tokens[5] = FIRST + BLOCK - 1;
    for (int m = 0; m < 6; m++) overlay[m] = 1;
    float *before = floats_random(ROWS * HIDDEN, 1), *got = malloc(ROWS * HIDDEN * 4);
    buffer residual = buffer_make(before, ROWS * HIDDEN * 4), dtable = buffer_make(table, sizeof table), dtokens = buffer_make(tokens, sizeof tokens), doverlay = buffer_make(overlay, sizeof overlay);
    const k_lora_embed_args args = {.residual = residual.data, .tokens = dtokens.data, .row_overlay = doverlay.data, .linears = dtable.data, .rows = ROWS, .hidden = HIDDEN, .block_rows = BLOCK, .overlay_count = VARIANTS, .first = FIRST, .vocab = VOCAB, .scale = 1.5f};
    CUDA_OK(k_lora_embed(&args, 0));
    CUDA_OK(cudaDeviceSynchronize());
    buffer_get(&residual, got);
    for (int m = 0; m < ROWS; m++) {
        const int token = tokens[m] - FIRST, v = overlay[m];
        const bool there = v >= 0 && token >= 0 && token < VOCAB && table[0][v < 0 ? 0 : v].rank;
        for (int i = 0; i < HIDDEN; i++) {
            double want = before[m * HIDDEN + i];
            for (int r = 0; there && r < table[0][v].rank; r++) want += 1.5 * table[0][v].scale * (double)b[token / BLOCK][v][token % BLOCK * table[0][v].rank + r] * a[v][r * HIDDEN + i];
            if (!(fabs(got[m * HIDDEN + i] - want) <= (there ? 2e-5 : 0))) fail_msg("row %d, column %d: %g, not %g", m, i, got[m * HIDDEN + i], want);
        }
    }
    for (int v = 0; v < VARIANTS; v++) {
        for (int k = 0; k < BLOCKS; k++) buffer_free(&db[k][v]), free(b[k][v]);
        buffer_free(&da[v]), free(a[v]);
    }
    buffer_free(&residual), buffer_free(&dtable), buffer_free(&dtokens), buffer_free(&doverlay);
    free(before), free(got);
}

/* ---- Whole models ---- */

enum { KINDS = 5, PROMPTS = 2, NEW = 2, LONGEST = 27, RANK_MAX = 33, BLOCK_ROWS = 97 };

typedef struct kind {
    const char *what;
    bool delta, linears, tables;
} kind;
static const kind kinds[KINDS] = {{"an adapter", false, true, false}, {"signs and an adapter", true, true, false}, {"signs", true, false, false}, {"an adapter of the tables too", false, true, true}, {"signs and adapted tables", true, false, true}};
static const uint32_t prompt_tokens[PROMPTS] = {3, LONGEST};

typedef struct subject { /* one variant of the batch, or the base: kind NULL */
    const kind *kind;
    mr_model reference;
    tp_variant variant; /* of its signs */
    bd_overlay overlays[BD_COMM_RANKS_MAX];
    const bd_overlay *ranks[BD_COMM_RANKS_MAX];
    bd_overlay_linear *linears[BD_COMM_RANKS_MAX], *tables[BD_COMM_RANKS_MAX]; /* tables: embed, then head */
    char dir[256];
    int32_t ids[LONGEST + NEW];
} subject;

static const char *const modules[BD_LINEAR_COUNT] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"};
static const char *linear_name(uint32_t layer, uint32_t which) {
    static char name[96];
    snprintf(name, sizeof name, "model.layers.%u.%s.weight", layer, modules[which]);
    return name;
}

static void make_subject(subject *s, const kind *k, const char *arch) {
    mr_open(&s->reference, arch);
    const bd_model_config *c = &s->reference.config;
    s->kind = k;
    if (k && k->delta) mr_make_delta(&s->reference, &test_state, 1, &(mr_fault){.drop = "no tensor"}, s->dir); /* signs of all: else the fast linears do not take it */
    for (uint32_t i = 0; k && k->linears && i < c->layers * BD_LINEAR_COUNT; i++) /* of some matrices none, each of its own rank */
        if (test_next() % 8) mr_add_lora(&s->reference, &test_state, linear_name(i / BD_LINEAR_COUNT, i % BD_LINEAR_COUNT), test_next() % 4 ? (uint32_t)pick(1, 20) : RANK_MAX);
    if (k && k->tables) mr_add_lora(&s->reference, &test_state, "model.embed_tokens.weight", (uint32_t)pick(1, 9));
    if (k && k->tables && !c->tied) mr_add_lora(&s->reference, &test_state, "lm_head.weight", (uint32_t)pick(1, 9));
    for (int i = 0; i < LONGEST; i++) s->ids[i] = (int32_t)(test_next() % c->vocab);
}

typedef struct place { /* where the next matrix of a rank goes */
    bd_model *model;
    uint8_t *at, *end;
} place;

/* Rows [row, row + rows) and columns [col, col + cols) of a matrix, in pieces, and back: they must be the same bits. */
static const float *put(place *p, const float *from, uint32_t width, uint32_t row, uint32_t rows, uint32_t col, uint32_t cols) {
    bd_error err = {0};
    const bd_backend_ops *ops = bd_model_ops(p->model);
    const size_t count = (size_t)rows * cols;
    float *values = malloc(count * 4), *got = malloc(count * 4), *to = (float *)(void *)(p->at + 4 * (test_next() % 4));
    for (uint32_t r = 0; r < rows; r++) memcpy(values + (size_t)r * cols, from + (size_t)(row + r) * width + col, (size_t)cols * 4);
    for (size_t i = 0, n; i < count; i += n) {
        n = count - i < 20000 ? count - i : 20000;
        MS_OK(ops->vector_put(bd_model_backend(p->model), to, i, values + i, n, &err), err);
    }
    MS_OK(ops->put_flush(bd_model_backend(p->model), &err), err);
    CUDA_OK(cudaMemcpy(got, to, count * 4, cudaMemcpyDeviceToHost));
    assert_memory_equal(got, values, count * 4);
    p->at += count * 4 + 16;
    assert_true(p->at <= p->end);
    free(values), free(got);
    return to;
}

static bd_rank_part part_of(const bd_model_config *c, uint32_t rank, uint32_t count, int of, uint32_t i) {
    bd_rank_part part;
    const bd_weight_id id = {.kind = (unsigned)of, .layer = i / BD_LINEAR_COUNT, .which = i % BD_LINEAR_COUNT};
    assert_true(bd_rank_part_of(c, rank, count, id, &part));
    return part;
}

static void add_pair(place *p, const mr_lora *l, bd_overlay_linear *to, bd_rank_part part, const float *a) {
    to->lora_rank = (uint16_t)l->rank, to->lora_scale = l->scale;
    to->lora_a = a ? a : put(p, l->a, l->cols, 0, l->rank, part.first_col, part.cols);
    to->lora_b = put(p, l->b, l->rank, part.first_row, part.rows, 0, l->rank);
}

static void add_table(place *p, const mr_lora *l, bd_overlay_linear *to, bd_rank_part part, uint32_t block_rows) {
    const float *a = NULL;
    for (uint32_t row = 0; row < part.rows; row += block_rows, to++) {
        bd_rank_part block = part;
        block.first_row += row, block.rows = part.rows - row < block_rows ? part.rows - row : block_rows;
        add_pair(p, l, to, block, a);
        a = to->lora_a;
    }
}

static const mr_lora *lora_of(const subject *s, const char *name) {
    for (uint32_t i = 0; i < s->reference.lora_count; i++)
        if (strcmp(s->reference.loras[i].name, name) == 0) return &s->reference.loras[i];
    return NULL;
}

/* The rank's overlay of the signs, or nothing, with the adapter's pairs. */
static void make_overlay(subject *s, bd_model *whole, uint32_t rank, uint32_t block_rows, place *p) {
    const uint32_t count = bd_model_rank_count(whole);
    const bd_model_config *c = &s->reference.config;
    const bd_overlay *signs = !s->kind->delta ? NULL : count > 1 ? s->variant.overlay->ranks[rank] : s->variant.overlay;
    const bool own_head = !c->tied;
    const uint32_t linears = c->layers * BD_LINEAR_COUNT;
    static const float *no_norms[(64 + 1) * BD_NORM_COUNT];
    bd_rank_part part = part_of(c, rank, count, BD_WEIGHT_EMBED, 0);
    const uint32_t blocks = (part.rows + block_rows - 1) / block_rows;
    s->linears[rank] = calloc(linears, sizeof **s->linears), s->tables[rank] = calloc(2 * blocks, sizeof **s->tables);
    bd_overlay_linear *embed = s->tables[rank], *head = own_head ? embed + blocks : embed;
    if (signs) {
        assert_int_equal(signs->block_rows, block_rows);
        assert_int_equal(signs->block_count, blocks);
        s->overlays[rank] = *signs;
        memcpy(s->linears[rank], signs->linears, linears * sizeof **s->linears);
        memcpy(embed, signs->embed, blocks * sizeof *embed);
        if (own_head) memcpy(head, signs->head, blocks * sizeof *head);
    } else
        s->overlays[rank] = (bd_overlay){.vocab = c->vocab, .window_tokens = c->window_tokens, .block_rows = block_rows, .block_count = blocks, .norms = no_norms};
    for (uint32_t i = 0; i < linears; i++) {
        const mr_lora *l = lora_of(s, linear_name(i / BD_LINEAR_COUNT, i % BD_LINEAR_COUNT));
        if (l) add_pair(p, l, &s->linears[rank][i], part_of(c, rank, count, BD_WEIGHT_LINEAR, i), NULL);
    }
    const mr_lora *on_embed = lora_of(s, "model.embed_tokens.weight"), *on_head = lora_of(s, "lm_head.weight");
    if (on_embed) add_table(p, on_embed, embed, part, block_rows);
    if (on_head) add_table(p, on_head, head, part_of(c, rank, count, BD_WEIGHT_HEAD, 0), block_rows);
    s->overlays[rank].linears = s->linears[rank], s->overlays[rank].embed = embed, s->overlays[rank].head = head;
    s->ranks[rank] = &s->overlays[rank];
    s->overlays[rank].ranks = rank == 0 && count > 1 ? s->ranks : NULL;
}

static void check_run(subject *s, const ms_run *run, uint32_t width, double bound) {
    int32_t ids[LONGEST + NEW];
    memcpy(ids, run->prompt, run->prompt_count * sizeof *ids);
    for (uint32_t n = 0; n < NEW; n++) {
        double *want = mr_logits(&s->reference, ids, run->prompt_count + n);
        CHECK_L2(run->logits + (size_t)n * width, want, s->reference.config.vocab, bound, "%s, %u tokens and %u", s->kind ? s->kind->what : "the base", run->prompt_count, n);
        ids[run->prompt_count + n] = run->ids[n];
        free(want);
    }
}

/* Twice what rounding alone was seen to make (gemma2, whose logits are small); bf16 is eight times coarser. */
static double bound_of(bd_dtype dtype) { return dtype == BD_DTYPE_F16 ? 6e-3 : 8 * 6e-3; }

static const void *replayed(bd_model *model) { return ((bd_cuda *)bd_model_backend(model))->replay; }

/* A rank that nothing was planned for is refused by its name. */
static void check_refusal(bd_model *model, subject *s) {
    bd_error err = {0};
    bd_overlay_linear *l = s->linears[0];
    const uint16_t had = l->lora_rank;
    const bd_overlay *overlays[] = {&s->overlays[0]};
    const bd_step step = {.overlay_count = 1, .overlays = overlays};
    l->lora_rank = RANK_MAX + 1;
    assert_int_equal(bd_model_ops(model)->step_begin(bd_model_backend(model), &step, &err), BD_E_LIMIT);
    assert_string_equal(err.subject, "lora_rank");
    l->lora_rank = had;
}

/* Alone a sequence gets the logits of the batch, bit by bit where rounding does not depend on the batch; steps of the base and of signs
 * are replayed, an adapter's are not. */
static void check_alone(bd_model *model, subject *s, const ms_run *of, uint32_t width, double bound, bool plain) {
    ms_run alone = *of;
    alone.logits = calloc((size_t)NEW * width, sizeof(float));
    ms_run_all(model, &alone, 1, 20);
    assert_int_equal(replayed(model) != NULL, !s->reference.lora_count);
    if (plain) assert_memory_equal(alone.logits, of->logits, (size_t)NEW * width * sizeof(float));
    else check_run(s, &alone, width, bound);
    free(alone.logits);
}

static void check_batch(bd_model *model, subject *subjects, uint32_t count, uint32_t width, double bound, bool plain) {
    ms_run runs[(KINDS + 1) * PROMPTS] = {0};
    for (uint32_t i = 0; i < count * PROMPTS; i++) {
        subject *s = &subjects[i / PROMPTS];
        runs[i] = (ms_run){.prompt = s->ids, .prompt_count = prompt_tokens[i % PROMPTS], .new_count = NEW, .overlay = s->kind ? &s->overlays[0] : NULL, .sampling.top_p = 1, .top_rows = i % PROMPTS ? MS_TOP_ROWS : 0, .logits = calloc((size_t)NEW * width, sizeof(float))};
    }
    ms_run_all(model, runs, count * PROMPTS, 20);
    assert_null(replayed(model));
    for (uint32_t i = 0; i < count * PROMPTS; i++) check_run(&subjects[i / PROMPTS], &runs[i], width, bound);
    for (uint32_t i = 0; i < count; i++) check_alone(model, &subjects[i], &runs[i * PROMPTS], width, bound, plain);
    for (uint32_t i = 0; i < count * PROMPTS; i++) free(runs[i].logits);
}

/* The base and variants of every kind, or adapters without signs, whose tables then have several blocks. */
static void check_arch(const char *arch, uint32_t ranks, bd_dtype dtype, bd_kernels kernels, bool signs) {
    bd_error err = {0};
    subject *subjects = calloc(KINDS + 1, sizeof *subjects);
    bd_model *model;
    bd_model_options options = ms_options(arch);
    options.ops = ranks_backend_ops(RANKS_P2P), options.rank_count = ranks, options.dtype = dtype, options.kernels = kernels;
    options.rows_max = 512, options.seqs_max = 16, options.logits_rows_max = 128, options.kv_tokens = 4096, options.kv_block_tokens = 16;
    options.delta_pages = 120, options.rank_wait_us = 30000000u, options.lora_rank_max = RANK_MAX;
    MS_OK(bd_model_open(&options, &model, &err), err);
    uint32_t page = 0, count = 0;
    make_subject(&subjects[count++], NULL, arch);
    for (uint32_t k = 0; k < KINDS; k++) {
        if (!signs && kinds[k].delta) continue;
        subject *s = &subjects[count++];
        make_subject(s, &kinds[k], arch);
        if (s->kind->delta) page += tp_variant_open(model, s->dir, page, &s->variant);
    }
    uint8_t *next[BD_COMM_RANKS_MAX] = {0};
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t r = 0; r < ranks; r++) {
            bd_model *own = bd_model_rank(model, r);
            uint8_t *arena = bd_model_ops(own)->delta_arena(bd_model_backend(own));
            place p = {own, next[r] ? next[r] : arena + page * bd_model_page_bytes(model), arena + bd_model_page_count(model) * bd_model_page_bytes(model)};
            make_overlay(&subjects[i], model, r, signs ? ((bd_cuda *)bd_model_backend(own))->options.vocab_block_rows : BLOCK_ROWS, &p);
            next[r] = p.at;
        }
    check_refusal(model, &subjects[1]);
    for (uint32_t i = 1; i < count; i++)
        if (subjects[i].kind->delta) MS_OK(bd_delta_open_shard(&subjects[i].variant.delta, 0, true, &subjects[i].reference.delta, &err), err);
    check_batch(model, subjects, count, bd_model_logits_width(model), bound_of(dtype), kernels == BD_KERNELS_PLAIN);
    for (uint32_t i = 0; i < count; i++) {
        subject *s = &subjects[i];
        mr_close(&s->reference);
        for (uint32_t r = 0; r < ranks; r++) free(s->linears[r]), free(s->tables[r]);
        if (s->kind && s->kind->delta) tp_variant_close(&s->variant), mr_remove_delta(s->dir);
    }
    bd_model_close(model);
    free(subjects);
}

static void test_one_rank(void **state) {
    (void)state;
    static const char *const archs[] = {"tests/data/arch/llama-gqa", "tests/data/arch/qwen2", "tests/data/arch/gemma2"};
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        check_arch(archs[i], 1, BD_DTYPE_BF16, i % 2 ? BD_KERNELS_AUTO : BD_KERNELS_PLAIN, true);
        check_arch(archs[i], 1, BD_DTYPE_F16, i % 2 ? BD_KERNELS_PLAIN : BD_KERNELS_AUTO, false);
    }
    check_arch("demo/zen-mini", 1, BD_DTYPE_BF16, BD_KERNELS_AUTO, true); /* the fast linears and head */
    check_arch("demo/zen-mini", 1, BD_DTYPE_F16, BD_KERNELS_AUTO, false);
}

static void test_ranks(void **state) {
    (void)state;
    check_arch("tests/data/arch/tp-llama", 2, BD_DTYPE_BF16, BD_KERNELS_AUTO, true);
    check_arch("tests/data/arch/tp-qwen2", 4, BD_DTYPE_F16, BD_KERNELS_AUTO, false);
    check_arch("tests/data/arch/gemma2", 2, BD_DTYPE_F16, BD_KERNELS_PLAIN, true);
}

/* ---- From files ---- */

static void write_adapter(const mr_model *m, uint32_t rank, float alpha, const char *dir) {
    bd_error err = {0};
    char path[400], config[200], (*names)[160] = calloc(2 * m->lora_count, sizeof *names);
    bd_tensor *tensors = calloc(2 * m->lora_count, sizeof *tensors);
    bd_safetensors_writer *writer;
    for (uint32_t i = 0; i < 2 * m->lora_count; i++) {
        const mr_lora *l = &m->loras[i / 2];
        snprintf(names[i], sizeof *names, "base_model.model.%.*s.lora_%c.weight", (int)(strlen(l->name) - strlen(".weight")), l->name, i % 2 ? 'B' : 'A');
        tensors[i] = (bd_tensor){.name = names[i], .dtype = BD_DTYPE_F32, .dtype_name = "F32", .rank = 2, .shape = {i % 2 ? l->rows : rank, i % 2 ? rank : l->cols}};
        tensors[i].bytes = tensors[i].shape[0] * tensors[i].shape[1] * 4;
    }
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    MS_OK(bd_safetensors_writer_create(path, tensors, 2 * m->lora_count, 64, &writer, &err), err);
    for (uint32_t i = 0; i < 2 * m->lora_count; i++) MS_OK(bd_safetensors_writer_append(writer, i % 2 ? m->loras[i / 2].b : m->loras[i / 2].a, tensors[i].bytes, &err), err);
    MS_OK(bd_safetensors_writer_finish(writer, &err), err);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    snprintf(config, sizeof config, "{\"peft_type\": \"LORA\", \"r\": %u, \"lora_alpha\": %.9g}", rank, alpha);
    MS_OK(bd_file_replace(path, config, strlen(config), &err), err);
    free(names), free(tensors);
}

/* As bitdelta generate --lora does it; what is planned for the rank, and nothing without one. */
static void check_files(const char *arch, uint32_t ranks, bd_dtype dtype) {
    bd_error err = {0};
    subject s = {0};
    bd_lora *lora;
    bd_model *model;
    char dir[] = "/tmp/bitdelta-test-XXXXXX", path[400];
    static const kind from_files = {"an adapter from its files", false, true, false};
    const uint32_t rank = (uint32_t)pick(1, 64);
    mr_open(&s.reference, arch);
    s.kind = &from_files;
    for (uint32_t i = 0; i < s.reference.config.layers * BD_LINEAR_COUNT; i++) mr_add_lora(&s.reference, &test_state, linear_name(i / BD_LINEAR_COUNT, i % BD_LINEAR_COUNT), rank)->scale = 0.75f;
    for (int i = 0; i < LONGEST; i++) s.ids[i] = (int32_t)(test_next() % s.reference.config.vocab);
    assert_non_null(mkdtemp(dir));
    write_adapter(&s.reference, rank, 0.75f * (float)rank, dir);
    MS_OK(bd_lora_open(dir, &s.reference.config, &lora, &err), err);
    assert_int_equal(bd_lora_rank(lora), rank);
    bd_model_options options = ms_options(arch);
    options.ops = ranks_backend_ops(RANKS_P2P), options.rank_count = ranks, options.dtype = dtype, options.no_recording = true, options.rank_wait_us = 30000000u;
    options.rows_max = 64, options.seqs_max = 1, options.logits_rows_max = 64, options.kv_tokens = 256, options.kv_block_tokens = 16;
    options.delta_pages = (uint32_t)(bd_lora_device_bytes(lora, ranks) / (1u << 20)) + 1;
    bd_memory_plan without, with;
    MS_OK(bd_model_plan(&options, &s.reference.config, &without, &err), err);
    options.lora_rank_max = rank;
    MS_OK(bd_model_plan(&options, &s.reference.config, &with, &err), err);
    assert_true(with.workspace >= without.workspace + 3u * options.rows_max * rank * 4 && with.total - without.total == with.workspace - without.workspace);
    MS_OK(bd_model_open(&options, &model, &err), err);
    ms_run run = {.prompt = s.ids, .prompt_count = LONGEST, .new_count = NEW, .sampling.top_p = 1, .logits = calloc((size_t)NEW * bd_model_logits_width(model), sizeof(float))};
    MS_OK(bd_lora_load(lora, model, &run.overlay, &err), err);
    ms_run_all(model, &run, 1, 64);
    check_run(&s, &run, bd_model_logits_width(model), bound_of(dtype));
    bd_model_close(model);
    bd_lora_close(lora);
    mr_close(&s.reference);
    free(run.logits);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir), unlink(path);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir), unlink(path);
    rmdir(dir);
}

static void test_files(void **state) {
    (void)state;
    check_files("tests/data/arch/llama-gqa", 1, BD_DTYPE_BF16);
    check_files("demo/zen-mini", 1, BD_DTYPE_F16);
    check_files("tests/data/arch/tp-llama", 2, BD_DTYPE_F16);
}

int main(int argc, char **argv) {
    ranks_begin(argc, argv);
    const struct CMUnitTest kernels[] = {cmocka_unit_test(test_terms), cmocka_unit_test(test_embed)};
    const struct CMUnitTest models[] = {cmocka_unit_test(test_one_rank), cmocka_unit_test(test_ranks), cmocka_unit_test(test_files)};
    const int failed = cmocka_run_group_tests(kernels, NULL, NULL);
    return getenv("BD_GPU_SMALL") ? failed : failed + cmocka_run_group_tests(models, NULL, NULL);
}
