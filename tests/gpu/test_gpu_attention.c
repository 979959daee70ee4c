/* test_gpu_attention.c - RoPE, q/k norm, KV write and paged attention against float64 on ragged batches with shuffled blocks. */
#include "gpu_test.h"

typedef struct attention_case {
    int heads, kv_heads, head_dim, rotary_dim, block_tokens, window;
    float softcap;
    bool norm, fp16;
} attention_case;

enum { SEQS = 7, POSITIONS = 1100 };
static const int kv_before[SEQS] = {0, 5, 130, 300, 1000, 0, 767}, row_count[SEQS] = {9, 1, 170, 3, 1, 1, 1};
static int major, sm_count; /* of the device: compute capability, multiprocessors */

typedef struct world {
    attention_case c;
    int rows, blocks, table_count;
    k_seq seqs[SEQS];
    int32_t *table, *positions, *seq_of_row, *zeros, *windows, *no_overlay;
    float *q, *k, *v, *rope, *q_gamma, *k_gamma;
    uint16_t *kv; /* [block][2][kv_head][token][dim]: random where a token was before the step, zero in the rest of its page, NaN elsewhere */
} world;

static uint16_t narrow(const attention_case *c, float v) {
    return c->fp16 ? bd_f32_to_f16(v) : bd_f32_to_bf16(v);
}
static float widen(const attention_case *c, uint16_t v) {
    return c->fp16 ? bd_f16_to_f32(v) : bd_bf16_to_f32(v);
}

static size_t kv_at(const world *w, int seq, int t, int kind, int head) {
    int block = w->table[w->seqs[seq].first_block + t / w->c.block_tokens];
    return ((((size_t)block * 2 + (size_t)kind) * (size_t)w->c.kv_heads + (size_t)head) * (size_t)w->c.block_tokens + (size_t)(t % w->c.block_tokens)) *
           (size_t)w->c.head_dim;
}

static world world_make(attention_case c) {
    world w = {.c = c};
    for (int s = 0; s < SEQS; s++) {
        w.seqs[s] = (k_seq){w.rows, row_count[s], kv_before[s], w.table_count};
        w.rows += row_count[s];
        w.table_count += (kv_before[s] + row_count[s] + c.block_tokens - 1) / c.block_tokens;
    }
    w.blocks = w.table_count + 3;
    w.table = malloc((size_t)w.blocks * 4);
    for (int i = 0; i < w.blocks; i++) w.table[i] = i;
    for (int i = w.blocks - 1; i > 0; i--) {
        int j = (int)(test_next() % (uint64_t)(i + 1)), t = w.table[i];
        w.table[i] = w.table[j], w.table[j] = t;
    }
    size_t rows = (size_t)w.rows;
    w.positions = calloc(rows, 4), w.seq_of_row = calloc(rows, 4), w.zeros = calloc(rows, 4), w.windows = calloc(rows, 4), w.no_overlay = calloc(rows, 4);
    for (int s = 0; s < SEQS; s++)
        for (int i = 0; i < row_count[s]; i++) {
            int m = w.seqs[s].first_row + i;
            w.positions[m] = kv_before[s] + i, w.seq_of_row[m] = s, w.windows[m] = c.window, w.no_overlay[m] = -1;
        }
    w.q = floats_random(rows * (size_t)(c.heads * c.head_dim), 1), w.k = floats_random(rows * (size_t)(c.kv_heads * c.head_dim), 1);
    w.v = floats_random(rows * (size_t)(c.kv_heads * c.head_dim), 1);
    w.q_gamma = floats_random((size_t)c.head_dim, 1), w.k_gamma = floats_random((size_t)c.head_dim, 1);
    w.rope = malloc((size_t)POSITIONS * (size_t)c.rotary_dim * 4);
    for (int p = 0; p < POSITIONS; p++)
        for (int i = 0; i < c.rotary_dim / 2; i++) {
            double phase = p * pow(10000, -2.0 * i / c.rotary_dim);
            w.rope[(p * c.rotary_dim / 2 + i) * 2] = (float)cos(phase), w.rope[(p * c.rotary_dim / 2 + i) * 2 + 1] = (float)sin(phase);
        }
    const size_t kv_count = (size_t)w.blocks * 2 * (size_t)(c.kv_heads * c.block_tokens * c.head_dim);
    w.kv = malloc(kv_count * 2);
    memset(w.kv, 0xFF, kv_count * 2);
    for (int s = 0; s < SEQS; s++) { /* pages that a window hides from every row of the step stay NaN */
        const int hidden = c.window && kv_before[s] + 1 > c.window ? kv_before[s] + 1 - c.window : 0;
        const int end = (kv_before[s] + c.block_tokens - 1) / c.block_tokens * c.block_tokens;
        for (int t = hidden / c.block_tokens * c.block_tokens; t < end; t++)
            for (int kind = 0; kind < 2; kind++)
                for (int h = 0; h < c.kv_heads; h++)
                    for (int i = 0; i < c.head_dim; i++) w.kv[kv_at(&w, s, t, kind, h) + (size_t)i] = t < kv_before[s] ? narrow(&c, (float)test_normal()) : 0;
    }
    return w;
}

/* One head's vector after norm and rope, rounded as the cache holds it. */
static void rotate(const world *w, const float *in, const float *gamma, int position, double *out) {
    const int d = w->c.head_dim, half = w->c.rotary_dim / 2;
    double x[256], square = 0;
    for (int i = 0; i < d; i++) square += (double)in[i] * in[i];
    double factor = gamma ? 1 / sqrt(square / d + 1e-6) : 1;
    for (int i = 0; i < d; i++) x[i] = in[i] * factor * (gamma ? (double)gamma[i] : 1);
    for (int i = 0; i < d; i++) {
        double v = x[i];
        if (i < 2 * half) {
            double cosine = w->rope[(position * half + i % half) * 2], sine = w->rope[(position * half + i % half) * 2 + 1];
            v = i < half ? x[i] * cosine - x[i + half] * sine : x[i] * cosine + x[i - half] * sine;
        }
        out[i] = widen(&w->c, narrow(&w->c, (float)v));
    }
}

static void reference(world *w, double *out) {
    const attention_case c = w->c;
    const int d = c.head_dim, group = c.heads / c.kv_heads;
    double turned[256];
    for (int m = 0; m < w->rows; m++)
        for (int h = 0; h < c.kv_heads; h++) {
            int s = w->seq_of_row[m], t = w->positions[m];
            rotate(w, w->k + ((size_t)m * (size_t)c.kv_heads + (size_t)h) * (size_t)d, c.norm ? w->k_gamma : NULL, t, turned);
            for (int i = 0; i < d; i++) {
                w->kv[kv_at(w, s, t, 0, h) + (size_t)i] = narrow(&c, (float)turned[i]);
                w->kv[kv_at(w, s, t, 1, h) + (size_t)i] = narrow(&c, w->v[((size_t)m * (size_t)c.kv_heads + (size_t)h) * (size_t)d + (size_t)i]);
            }
        }
    for (int m = 0; m < w->rows; m++)
        for (int h = 0; h < c.heads; h++) {
            int s = w->seq_of_row[m], last = w->positions[m], first = c.window && last + 1 > c.window ? last + 1 - c.window : 0;
            double q[256], p[POSITIONS], top = -INFINITY, sum = 0, *o = out + ((size_t)m * (size_t)c.heads + (size_t)h) * (size_t)d;
            rotate(w, w->q + ((size_t)m * (size_t)c.heads + (size_t)h) * (size_t)d, c.norm ? w->q_gamma : NULL, last, q);
            for (int t = first; t <= last; t++) {
                double dot = 0;
                for (int i = 0; i < d; i++) dot += q[i] * widen(&c, w->kv[kv_at(w, s, t, 0, h / group) + (size_t)i]);
                dot /= sqrt(d);
                p[t] = c.softcap > 0 ? c.softcap * tanh(dot / c.softcap) : dot;
                if (p[t] > top) top = p[t];
            }
            for (int t = first; t <= last; t++) sum += p[t] = exp(p[t] - top);
            for (int i = 0; i < d; i++) {
                o[i] = 0;
                for (int t = first; t <= last; t++) o[i] += p[t] / sum * widen(&c, w->kv[kv_at(w, s, t, 1, h / group) + (size_t)i]);
            }
        }
}

typedef struct device_world {
    buffer q_in, k_in, v_in, q, kv, out, rope, zeros, windows, positions, seq_of_row, seqs, table, q_gamma, k_gamma, none, tiles, items, item_count, partials, counters;
    int window;
    k_attention_args args;
    k_attention_tile host_tiles[64];
    CUtensorMap q_map, kv_map;
} device_world;

static CUtensorMap map_make(const void *data, size_t rows, size_t cols, unsigned box_rows, bool fp16) {
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                  const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    union {
        void *data;
        encode_fn function;
        const void *constant;
    } entry, address;
    enum cudaDriverEntryPointQueryResult found;
    CUDA_OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry.data, 12000, cudaEnableDefault, &found));
    CUtensorMap map;
    cuuint64_t size[2] = {cols, rows}, stride[1] = {cols * 2};
    cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    address.constant = data;
    assert_int_equal(entry.function(&map, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address.data, size, stride, box, step,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), CUDA_SUCCESS);
    return map;
}

/* Tiles of sequences of several rows, a list of those of one row. */
static void work_list(device_world *d, const k_seq *seqs, int count) {
    k_attention_args *a = &d->args;
    k_attention_item items[SEQS * K_ATTENTION_SPLITS] = {0};
    int32_t item_count = 0, index = 0;
    a->tile_count = 0;
    for (int s = 0; s < count; s++) {
        const int splits = k_attention_splits(seqs[s].kv_before + 1);
        if (seqs[s].row_count == 1) {
            const int tokens = seqs[s].kv_before + 1, window = d->window;
            for (int i = 0; i < splits; i++)
                items[item_count++] = (k_attention_item){seqs[s].first_row, tokens, window && tokens > window ? tokens - window : 0, seqs[s].first_block, index, i, {0}};
            index++;
            continue;
        }
        for (int r = 0; r < seqs[s].row_count; r += K_ATTENTION_ROWS) d->host_tiles[a->tile_count++] = (k_attention_tile){s, r};
    }
    a->decode_sparse = test_next() % 2; /* as in a recording */
    a->decode_items_max = a->decode_sparse ? SEQS * K_ATTENTION_SPLITS : item_count;
    CUDA_OK(cudaMemcpy(d->items.data, items, sizeof items, cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemcpy(d->item_count.data, &item_count, 4, cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemcpy(d->tiles.data, d->host_tiles, sizeof d->host_tiles, cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemcpy(d->seqs.data, seqs, (size_t)count * sizeof *seqs, cudaMemcpyHostToDevice));
}

static device_world world_upload(const world *w) {
    const attention_case c = w->c;
    size_t rows = (size_t)w->rows, wide = rows * (size_t)(c.heads * c.head_dim), slim = rows * (size_t)(c.kv_heads * c.head_dim);
    size_t kv_count = (size_t)w->blocks * 2 * (size_t)(c.kv_heads * c.block_tokens * c.head_dim);
    const size_t counters = SEQS * (size_t)c.heads, partials = counters * K_ATTENTION_SPLITS * (size_t)(c.head_dim + 2) * 4;
    device_world d = {buffer_make(w->q, wide * 4), buffer_make(w->k, slim * 4), buffer_make(w->v, slim * 4), buffer_make(NULL, wide * 2), buffer_make(w->kv, kv_count * 2),
                      buffer_make(NULL, wide * 2), buffer_make(w->rope, (size_t)POSITIONS * (size_t)c.rotary_dim * 4), buffer_make(w->zeros, rows * 4),
                      buffer_make(w->windows, rows * 4), buffer_make(w->positions, rows * 4), buffer_make(w->seq_of_row, rows * 4), buffer_make(NULL, 64 * sizeof(k_seq)),
                      buffer_make(w->table, (size_t)w->blocks * 4), buffer_make(w->q_gamma, (size_t)c.head_dim * 4), buffer_make(w->k_gamma, (size_t)c.head_dim * 4),
                      buffer_make(w->no_overlay, rows * 4), buffer_make(NULL, 64 * sizeof(k_attention_tile)), buffer_make(NULL, SEQS * K_ATTENTION_SPLITS * sizeof(k_attention_item)), buffer_make(NULL, 4), buffer_make(NULL, partials),
                      buffer_make(NULL, counters * 4), .window = c.window};
    CUDA_OK(cudaMemset(d.counters.data, 0, counters * 4));
    d.args = (k_attention_args){.q_in = d.q_in.data, .k_in = d.k_in.data, .v_in = d.v_in.data, .q = d.q.data, .kv = d.kv.data, .out = d.out.data, .rope = d.rope.data,
                                .row_rope = d.zeros.data, .row_window = d.windows.data, .positions = d.positions.data, .seq_of_row = d.seq_of_row.data, .seqs = d.seqs.data,
                                .kv_blocks = d.table.data, .q_gamma = c.norm ? d.q_gamma.data : NULL, .k_gamma = c.norm ? d.k_gamma.data : NULL, .row_overlay = d.none.data,
                                .tiles = d.tiles.data, .decode_items = d.items.data, .decode_count = d.item_count.data, .sm_count = sm_count, .partials = d.partials.data, .counters = d.counters.data, .rows = w->rows,
                                .q_stride = c.heads * c.head_dim, .kv_stride = c.kv_heads * c.head_dim, .heads = c.heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim,
                                .rotary_dim = c.rotary_dim, .block_tokens = c.block_tokens, .rope_positions = POSITIONS, .use_window = c.window > 0, .fp16 = c.fp16, .overlap = major >= 9,
                                .scale = (float)(1 / sqrt(c.head_dim)), .softcap = c.softcap, .eps = 1e-6f};
    if (major == 9 && k_attention_fast(c.head_dim)) {
        d.q_map = map_make(d.q.data, rows, (size_t)(c.heads * c.head_dim), K_ATTENTION_ROWS, c.fp16);
        d.kv_map = map_make(d.kv.data, kv_count / (size_t)c.head_dim, (size_t)c.head_dim, k_attention_box(c.head_dim, c.block_tokens), c.fp16);
    }
    work_list(&d, w->seqs, SEQS);
    return d;
}

/* The fast kernels' output; rows of several-row sequences by the plain kernel where the device lacks wgmma. */
static void run_fast(device_world *d, uint16_t *out) {
    CUDA_OK(cudaMemset(d->out.data, 0xFF, d->out.bytes));
    if (major == 9) CUDA_OK(k_attention_prefill(&d->args, &d->q_map, &d->kv_map, NULL));
    else CUDA_OK(k_attention_plain(&d->args, NULL));
    CUDA_OK(k_attention_decode(&d->args, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    buffer_get(&d->out, out);
}

/* A sequence alone, one cut into two chunks, and a second run give the same bits. */
static void check_invariance(const world *w, device_world *d, const uint16_t *want, uint16_t *got) {
    const size_t row = (size_t)(w->c.heads * w->c.head_dim);
    run_fast(d, got);
    assert_memory_equal(got, want, d->out.bytes);
    for (int s = 0; s < SEQS; s++) {
        const k_seq one = w->seqs[s];
        work_list(d, &one, 1);
        if (major != 9 && row_count[s] > 1) continue;
        run_fast(d, got);
        if (memcmp(got + (size_t)one.first_row * row, want + (size_t)one.first_row * row, (size_t)one.row_count * row * 2)) fail_msg("sequence %d alone differs", s);
        if (one.row_count < 9) continue;
        const int cut = 2 + (int)(test_next() % (uint64_t)(one.row_count - 4));
        const k_seq halves[2] = {{one.first_row, cut, one.kv_before, one.first_block}, {one.first_row + cut, one.row_count - cut, one.kv_before + cut, one.first_block}};
        work_list(d, halves, 2);
        run_fast(d, got);
        if (memcmp(got + (size_t)one.first_row * row, want + (size_t)one.first_row * row, (size_t)one.row_count * row * 2)) {
            size_t at = (size_t)one.first_row * row;
            while (got[at] == want[at]) at++;
            fail_msg("sequence %d cut at %d differs in row %zu of it, column %zu: %x, %x", s, cut, at / row - (size_t)one.first_row, at % row, got[at], want[at]);
        }
    }
}

static void compare(const attention_case *c, const uint16_t *got, const double *want, size_t count, const char *what) {
    float *wide = malloc(count * 4);
    for (size_t i = 0; i < count; i++) wide[i] = widen(c, got[i]);
    /* The output's rounding is 1.7e-3 (bf16) or 2.1e-4 (fp16); weights rounded for the tensor cores and a rare 1-ulp difference in a
     * rotated q or k add as much again. */
    CHECK_L2(wide, want, count, c->fp16 ? 6e-4 : 3.5e-3, "%s: heads %d/%d dim %d rotary %d block %d window %d cap %g norm %d fp16 %d", what, c->heads, c->kv_heads, c->head_dim,
             c->rotary_dim, c->block_tokens, c->window, (double)c->softcap, c->norm, c->fp16);
    free(wide);
}

static void check(attention_case c) {
    world w = world_make(c);
    const size_t wide = (size_t)w.rows * (size_t)(c.heads * c.head_dim), kv_count = (size_t)w.blocks * 2 * (size_t)(c.kv_heads * c.block_tokens * c.head_dim);
    device_world d = world_upload(&w);
    CUDA_OK(k_rope_kv_write(&d.args, NULL));
    CUDA_OK(k_attention_plain(&d.args, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    uint16_t *plain = malloc(wide * 2), *fast = malloc(wide * 2), *again = malloc(wide * 2), *kv = malloc(kv_count * 2);
    double *want = malloc(wide * 8);
    reference(&w, want);
    buffer_get(&d.out, plain);
    compare(&c, plain, want, wide, "plain");
    buffer_get(&d.kv, kv);
    for (size_t i = 0; i < kv_count; i++) { /* all but this step's keys is untouched */
        const float a = widen(&c, kv[i]), b = widen(&c, w.kv[i]);
        if (b != b && a == 0) continue; /* the tail of a page begun in this step */
        if (isnan(a) != isnan(b) || fabs((double)(a - b)) > 0.01 * fabs((double)b) + 1e-3) fail_msg("KV cache element %zu: %g, want %g", i, (double)a, (double)b);
    }
    if (k_attention_fast(c.head_dim)) {
        run_fast(&d, fast);
        compare(&c, fast, want, wide, "fast");
        check_invariance(&w, &d, fast, again);
    }
    buffer *all[] = {&d.q_in, &d.k_in, &d.v_in, &d.q, &d.kv, &d.out, &d.rope, &d.zeros, &d.windows, &d.positions, &d.seq_of_row, &d.seqs, &d.table, &d.q_gamma, &d.k_gamma, &d.none,
                     &d.tiles, &d.items, &d.item_count, &d.partials, &d.counters};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
    void *host[] = {plain, fast, again, kv, want, w.table, w.positions, w.seq_of_row, w.zeros, w.windows, w.no_overlay, w.q, w.k, w.v, w.rope, w.q_gamma, w.k_gamma, w.kv};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
}

static void test_shapes(void **state) {
    (void)state;
    static const attention_case cases[] = {
        {4, 2, 64, 64, 16, 0, 0, false, false}, {4, 4, 128, 128, 16, 0, 0, false, false}, {8, 1, 80, 80, 32, 0, 0, true, false},
        {6, 3, 24, 24, 16, 16, 0, false, false}, {2, 1, 256, 256, 16, 100, 50, false, false}, {4, 2, 96, 48, 8, 0, 30, true, false},
        {3, 1, 32, 32, 16, 1, 0, false, false}, {8, 2, 128, 128, 16, 200, 0, false, false}, {20, 1, 64, 64, 64, 33, 0, false, false},
        {4, 2, 128, 64, 16, 0, 20, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int fp16 = 0; fp16 < 2; fp16++) {
            attention_case c = cases[i];
            c.fp16 = fp16;
            check(c);
        }
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
        cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0) != cudaSuccess)
        return 1;
    if (test_next() % 2) sm_count = 1; /* then a block takes many items */
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
