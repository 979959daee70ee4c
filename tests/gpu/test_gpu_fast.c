/* test_gpu_fast.c - the sm_90a kernels against float64: prefill with W_eff rebuilt in registers, decode with the exact delta.
 * With BD_GPU_SMALL set, small cases only: for compute-sanitizer. BD_GPU_KERNELS, of gemm, decode, lean, rows: those only. Bounds: decode rounds only y (1.7e-3 of bf16); prefill also rounds W_eff (2.55e-3 expected together). */
#include "gpu_problem.h"

static CUtensorMap map_make(const void *data, size_t rows, size_t cols, unsigned box_rows) {
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
    assert_int_equal(entry.function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address.data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), CUDA_SUCCESS);
    return map;
}

static void overlays_of(const problem *p, k_overlay_linear *out) {
    memset(out, 0, 16 * sizeof *out);
    for (int v = 0; v < p->c.variants; v++) {
        out[v].plane_count = 1;
        out[v].bits[0] = p->device_bits[v][0].data;
        out[v].scale[0] = p->device_scale[v][0].data;
    }
}

static bool left_out(linear_case c) {
    return getenv("BD_GPU_SMALL") && (double)c.rows * c.n * c.k > 12e6;
}

static bool wanted(const char *kernels) {
    const char *list = getenv("BD_GPU_KERNELS");
    return !list || strstr(list, kernels);
}

static int sm_count(void) {
    int count = 0;
    CUDA_OK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

typedef struct device_problem {
    buffer x, w, y, bias, table;
} device_problem;

static device_problem upload(const problem *p, int first_row, int rows) {
    k_overlay_linear overlays[16];
    overlays_of(p, overlays);
    size_t n = (size_t)p->c.n, k = (size_t)p->c.k;
    return (device_problem){buffer_make(p->x + (size_t)first_row * k, (size_t)rows * k * 2), buffer_make(p->w, n * k * 2),
                            buffer_make(NULL, (size_t)rows * n * 2), buffer_make(p->bias, n * 4), buffer_make(overlays, sizeof overlays)};
}

static void download(device_problem *d, bool fp16, float *y) {
    CUDA_OK(cudaDeviceSynchronize());
    size_t count = d->y.bytes / 2;
    uint16_t *half = malloc(d->y.bytes);
    buffer_get(&d->y, half);
    for (size_t i = 0; i < count; i++) y[i] = element_float(half[i], fp16);
    free(half);
    buffer *all[] = {&d->x, &d->w, &d->y, &d->bias, &d->table};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

/* What launches share besides their operands. */
typedef struct splitting {
    buffer work, ticket;
    int sms;
} splitting;

static splitting splitting_make(int sms) {
    splitting s = {buffer_make(NULL, k_decode_workspace_bytes(sms)), buffer_make(NULL, 4), sms};
    CUDA_OK(cudaMemset(s.work.data, 0, s.work.bytes));
    CUDA_OK(cudaMemset(s.ticket.data, 0, 4));
    return s;
}

/* They must be left as they were found. */
static void splitting_free(splitting *s) {
    const size_t zeros = k_decode_workspace_zeros(s->sms);
    uint8_t *left = malloc(zeros), ticket[4];
    CUDA_OK(cudaMemcpy(left, s->work.data, zeros, cudaMemcpyDeviceToHost));
    buffer_get(&s->ticket, ticket);
    for (size_t i = 0; i < zeros; i++)
        if (left[i]) fail_msg("workspace byte %zu is not zero", i);
    if (ticket[0] | ticket[1] | ticket[2] | ticket[3]) fail_msg("the ticket is not zero");
    free(left);
    buffer_free(&s->work);
    buffer_free(&s->ticket);
}

/* Rows of wide_stride floats whose first n are y; the others must be as they were: NaN. */
static void take_wide(const buffer *wide, const problem *p, size_t wide_stride, float *y) {
    const size_t n = (size_t)p->c.n, rows = (size_t)p->c.rows;
    float *all = malloc(wide->bytes);
    buffer_get(wide, all);
    for (size_t m = 0; m < rows; m++) {
        memcpy(y + m * n, all + m * wide_stride, n * 4);
        for (size_t i = n; i < wide_stride; i++)
            if (!isnan(all[m * wide_stride + i])) fail_msg("column %zu of row %zu was written", i, m);
    }
    free(all);
}

/* sms: multiprocessors the launch may use; few make rings wrap. wide: y is not rounded, as the head's. */
static void run_gemm(const problem *p, int tok, int parts, int sms, bool wide, float *y) {
    const linear_case c = p->c;
    device_problem d = upload(p, 0, c.rows);
    k_gemm_tile *tiles = malloc(((size_t)c.rows + 1) * sizeof *tiles);
    int count = 0;
    bool delta = false;
    for (int s = 0; s < p->segment_count; s++) {
        delta |= p->segments[s].overlay >= 0;
        for (int m = p->segments[s].first_row; m < p->segments[s].end_row; m += tok)
            tiles[count++] = (k_gemm_tile){m, m + tok < p->segments[s].end_row ? m + tok : p->segments[s].end_row, p->segments[s].overlay, 0};
    }
    buffer on_device = buffer_make(tiles, (size_t)count * sizeof *tiles);
    free(tiles);
    k_gemm_args args = {.w = map_make(d.w.data, (size_t)c.n, (size_t)c.k, 128), .x = map_make(d.x.data, (size_t)c.rows, (size_t)c.k, (unsigned)tok / 2),
                        .y = map_make(d.y.data, (size_t)c.rows, (size_t)c.n, 32), .w_data = d.w.data, .y_data = d.y.data, .bias = d.bias.data,
                        .overlays = d.table.data, .tiles = on_device.data, .tile_count = count, .n = c.n, .k = c.k, .fp16 = p->fp16, .group = 8, .sm_count = sms, .wide_stride = c.n + 5};
    buffer wide_y = buffer_make(NULL, (size_t)c.rows * (size_t)args.wide_stride * 4);
    if (wide) args.wide = wide_y.data;
    buffer all_w = {0}; /* W somewhere in its map */
    if (wide) {
        const size_t k = (size_t)c.k, before = (size_t)(test_next() % 40), map_rows = before + (size_t)c.n + 3;
        all_w = buffer_make(NULL, map_rows * k * 2);
        uint16_t *w_at = (uint16_t *)all_w.data + before * k;
        CUDA_OK(cudaMemcpy(w_at, p->w, (size_t)c.n * k * 2, cudaMemcpyHostToDevice));
        args.w = map_make(all_w.data, map_rows, k, 128), args.w_data = w_at, args.w_row = (int32_t)before;
    }
    for (int again = 0; again < 3; again++, args.pdl = true) CUDA_OK(k_gemm(&args, tok, parts, delta, NULL));
    download(&d, p->fp16, y);
    if (wide) take_wide(&wide_y, p, (size_t)args.wide_stride, y);
    if (wide) buffer_free(&all_w);
    buffer_free(&wide_y);
    buffer_free(&on_device);
}

enum how { PLAIN, LEAN, ROWS, HOWS }; /* kernels for few rows */
static const char *const how_names[HOWS] = {"decode", "lean decode", "rows"};
static const char *const how_kernels[HOWS] = {"decode", "lean", "rows"};

typedef struct decode_run {
    enum how how;
    int first, rows;
    device_problem d;
    buffer planes, digits, columns, slots, groups, w, wide; /* w: its rows among others; both of wide runs alone */
    splitting split;
    k_decode_args args;
    k_rows_args whole;
} decode_run;

/* Groups of rows [first, first + rows) of one slot each; 0: too many. */
static int groups_fill(const problem *p, int first, int rows, int group_rows, const int32_t *slot, k_gemm_tile *out) {
    int count = 0;
    for (int m = 0; m < rows; m++) {
        k_gemm_tile *last = count ? &out[count - 1] : NULL;
        const bool same = last && last->variant == slot[m] && p->row_overlay[first + m] == p->row_overlay[first + m - 1];
        if (same && (slot[m] < 0 || last->m1 - last->m0 < group_rows)) {
            last->m1++;
            continue;
        }
        if (count == K_ROWS_GROUPS) return 0;
        out[count++] = (k_gemm_tile){first + m, first + m + 1, slot[m], 0};
    }
    return count;
}

/* Rows [first, first + rows) of the problem in one launch, with every buffer of its own. False: not of this kernel. */
static bool decode_prepare(const problem *p, enum how how, int sms, int first, int rows, bool pdl, bool wide, decode_run *r) {
    const linear_case c = p->c;
    int32_t columns[16] = {0}, slot[K_ROWS_GROUPS * K_ROWS_LARGE];
    k_gemm_tile groups[K_ROWS_GROUPS] = {0};
    int variants = 0;
    for (int m = 0; m < rows; m++) {
        int overlay = p->row_overlay[first + m];
        if (overlay >= 0 && (!variants || columns[variants - 1] != overlay)) columns[variants++] = overlay;
        slot[m] = overlay < 0 ? -1 : variants - 1;
    }
    int group_rows = test_next() % 2 ? K_ROWS_LARGE : K_ROWS_SMALL; /* where both will do; a row is the same in either */
    int group_count = how == ROWS && variants ? groups_fill(p, first, rows, group_rows, slot, groups) : 0;
    if (group_count && !k_rows_takes(rows, group_count, group_rows)) group_rows = K_ROWS_SMALL, group_count = groups_fill(p, first, rows, group_rows, slot, groups);
    if ((how == PLAIN && rows > K_DECODE_ROWS) || (how == LEAN && rows > K_LEAN_ROWS) || (how == ROWS && (!group_count || rows > K_DECODE_ROWS))) return false;
    const int tokens = k_decode_tokens(rows);
    *r = (decode_run){.how = how, .first = first, .rows = rows, .d = upload(p, 0, c.rows), .split = splitting_make(sms)};
    const uint8_t *x = (uint8_t *)r->d.x.data + (size_t)first * (size_t)c.k * 2;
    r->planes = buffer_make(NULL, k_planes_bytes(rows, c.k));
    r->digits = buffer_make(NULL, how == ROWS ? k_digits_bytes(rows, c.k) : 1);
    r->columns = buffer_make(columns, sizeof columns);
    r->slots = buffer_make(slot, sizeof slot);
    r->groups = buffer_make(groups, sizeof groups);
    const CUtensorMap w = map_make(r->d.w.data, (size_t)c.n, (size_t)c.k, 128), x_map = map_make(r->d.x.data, (size_t)c.rows, (size_t)c.k, (unsigned)tokens);
    r->args = (k_decode_args){.w = w, .x = x_map, .w_data = r->d.w.data, .x_data = x, .first_row = first, .planes = r->planes.data, .overlays = r->d.table.data,
                              .columns = r->columns.data, .slot = r->slots.data, .bias = r->d.bias.data,
                              .y = (uint16_t *)r->d.y.data + (size_t)first * (size_t)c.n, .workspace = r->split.work.data, .ticket = r->split.ticket.data,
                              .rows = rows, .n = c.n, .k = c.k, .variants = variants, .sm_count = sms, .fp16 = p->fp16, .pdl = pdl};
    r->whole = (k_rows_args){.w = w, .x = x_map, .digits = r->digits.data, .w_data = r->d.w.data, .overlays = r->d.table.data, .columns = r->columns.data, .groups = r->groups.data,
                             .bias = r->d.bias.data, .y = r->d.y.data, .workspace = r->split.work.data, .ticket = r->split.ticket.data, .first_row = first,
                             .rows = rows, .n = c.n, .k = c.k, .group_count = group_count, .variants = variants, .sm_count = sms, .fp16 = p->fp16, .pdl = pdl, .group_rows = group_rows};
    if (wide) {
        const size_t k = (size_t)c.k, before = (size_t)(test_next() % 40), map_rows = before + (size_t)c.n + 3, stride = (size_t)c.n + 5;
        r->w = buffer_make(NULL, map_rows * k * 2);
        r->wide = buffer_make(NULL, (size_t)c.rows * stride * 4);
        uint16_t *w_at = (uint16_t *)r->w.data + before * k;
        float *wide_at = r->wide.data;
        CUDA_OK(cudaMemcpy(w_at, p->w, (size_t)c.n * k * 2, cudaMemcpyHostToDevice));
        r->args.w = r->whole.w = map_make(r->w.data, map_rows, k, 128);
        r->args.w_data = r->whole.w_data = w_at;
        r->args.w_row = r->whole.w_row = (int32_t)before;
        r->args.wide_stride = r->whole.wide_stride = (int32_t)stride;
        r->args.wide = r->whole.wide = wide_at + (size_t)first * stride;
        r->args.y = r->whole.y = NULL;
    }
    return true;
}

static void decode_launch(const decode_run *r, cudaStream_t stream) {
    const k_decode_args *a = &r->args;
    if (r->how == PLAIN && a->variants)
        CUDA_OK(k_planes(r->planes.data, a->x_data, a->rows, a->k, a->fp16, a->pdl, stream));
    if (r->how == PLAIN) CUDA_OK(k_decode(a, stream));
    else if (r->how == LEAN) CUDA_OK(k_decode_lean(a, stream));
    else {
        const k_digits_args digits = {.x = r->d.x.data, .digits = r->digits.data, .chunks[0] = {r->first, r->rows, 0}, .chunk_count = 1, .k = a->k, .fp16 = a->fp16, .pdl = a->pdl};
        CUDA_OK(k_digits(&digits, stream));
        CUDA_OK(k_rows(&r->whole, stream));
    }
}

static void decode_finish(decode_run *r, const problem *p, float *y) {
    const size_t n = (size_t)p->c.n;
    float *all_rows = malloc((size_t)p->c.rows * n * 4);
    download(&r->d, p->fp16, all_rows);
    if (r->wide.data) {
        take_wide(&r->wide, p, n + 5, all_rows);
        buffer_free(&r->w);
        buffer_free(&r->wide);
    }
    memcpy(y, all_rows + (size_t)r->first * n, (size_t)r->rows * n * 4);
    for (size_t i = 0; i < (size_t)p->c.rows * n; i++) /* other rows are as they were: NaN */
        if ((i < (size_t)r->first * n || i >= (size_t)(r->first + r->rows) * n) && !isnan(all_rows[i])) fail_msg("output %zu of another row was written", i);
    free(all_rows);
    splitting_free(&r->split);
    buffer *all[] = {&r->planes, &r->digits, &r->columns, &r->slots, &r->groups};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_free(all[i]);
}

static bool run_decode_wide(const problem *p, enum how how, int sms, int first, int rows, bool pdl, bool wide, float *y) {
    decode_run r;
    if (!decode_prepare(p, how, sms, first, rows, pdl, wide, &r)) return false;
    for (int again = 0; again < 3; again++) decode_launch(&r, NULL);
    decode_finish(&r, p, y);
    return true;
}

static bool run_decode_on(const problem *p, enum how how, int sms, int first, int rows, bool pdl, float *y) {
    return run_decode_wide(p, how, sms, first, rows, pdl, false, y);
}

static bool run_decode(const problem *p, enum how how, int first, int rows, bool pdl, float *y) {
    return run_decode_on(p, how, sm_count(), first, rows, pdl, y);
}

static double *reference_of(const problem *p) {
    double *want = malloc((size_t)p->c.rows * (size_t)p->c.n * 8);
    reference(p, want);
    return want;
}

/* Bounds are of many outputs; of few, the rounding of one weighs. */
static void check(const problem *p, const float *y, const double *want, double bound, const char *what) {
    const size_t count = (size_t)p->c.rows * (size_t)p->c.n;
    CHECK_L2(y, want, count, bound * (1 + 4 / sqrt((double)count)), "%s: rows %d n %d k %d variants %d", what, p->c.rows, p->c.n, p->c.k, p->c.variants);
}

static void test_gemm(void **state) {
    (void)state;
    static const struct { linear_case c; int tok, split, sms; } cases[] = {
        {{257, 256, 256, 1, 1, 1}, 256, 1, 132},  {{64, 136, 512, 1, 1, 1}, 64, 1, 4},      {{65, 264, 512, 3, 1, 5}, 64, 2, 132},
        {{130, 384, 640, 2, 1, 3}, 128, 1, 6},    {{200, 520, 1024, 8, 1, 9}, 128, 2, 132}, {{300, 392, 1024, 4, 1, 7}, 256, 2, 132},
        {{33, 128, 2048, 2, 1, 2}, 256, 4, 132},  {{500, 328, 384, 0, 1, 1}, 256, 1, 4},    {{17, 8, 128, 1, 1, 2}, 64, 1, 132},
        {{300, 1096, 1024, 3, 1, 4}, 256, 1, 16}, {{400, 1096, 512, 2, 1, 3}, 256, 1, 14},  {{150, 1000, 1536, 1, 1, 1}, 128, 1, 8},
        {{70, 1032, 768, 5, 1, 40}, 64, 1, 6},    {{70, 1032, 768, 0, 1, 1}, 64, 1, 6},     {{33, 136, 1024, 0, 1, 1}, 64, 2, 132},
        {{131, 264, 512, 0, 1, 1}, 128, 1, 132},
    };
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        if (left_out(cases[i / 2].c) || !wanted("gemm")) continue;
        problem p = problem_make_element(cases[i / 2].c, i % 2);
        size_t bytes = (size_t)p.c.rows * (size_t)p.c.n * 4;
        float *y = malloc(bytes), *again = malloc(bytes);
        run_gemm(&p, cases[i / 2].tok, cases[i / 2].split, cases[i / 2].sms, false, y);
        double *want = reference_of(&p);
        check(&p, y, want, p.fp16 ? 4.2e-4 : 3.2e-3, "prefill");
        run_gemm(&p, cases[i / 2].tok, cases[i / 2].split, cases[i / 2].sms, false, again);
        assert_memory_equal(y, again, bytes);
        run_gemm(&p, cases[i / 2].tok, cases[i / 2].split, cases[i / 2].sms, true, y);
        check(&p, y, want, !p.c.variants ? 1e-5 : p.fp16 ? 3.2e-4 : 2.6e-3, "head"); /* of variants W_eff is rounded */
        free(want);
        free(y);
        free(again);
        problem_free(&p);
    }
}

/* x = e_m: Y is the column of W_eff rounded to bf16, bitwise. */
static void test_gemm_one_hot(void **state) {
    (void)state;
    if (getenv("BD_GPU_SMALL")) skip();
    problem p = problem_make((linear_case){512, 136, 512, 2, 1, 3});
    size_t k = 512, n = 136;
    memset(p.x, 0, 512 * k * 2);
    memset(p.bias, 0, n * 4);
    for (size_t m = 0; m < 512; m++) p.x[m * k + m] = bd_f32_to_bf16(1);
    float *y = malloc(512 * n * 4);
    for (int tok = 64; wanted("gemm") && tok <= 256; tok *= 2) {
        run_gemm(&p, tok, 1, tok == 128 ? 2 : sm_count(), false, y);
        for (size_t m = 0; m < 512; m++)
            for (size_t i = 0; i < n; i++) {
                int v = p.row_overlay[m];
                float w = bd_bf16_to_f32(p.w[i * k + m]), scale = v < 0 ? 0 : bd_bf16_to_f32(bd_f32_to_bf16(p.scale[v][0][i]));
                float want = bd_bf16_to_f32(bd_f32_to_bf16(w + (v < 0 ? 0 : (float)sign_of(p.bits[v][0], i, m, k) * scale)));
                if (y[m * n + i] != want) fail_msg("tok %d row %zu column %zu: %g, want %g", tok, i, m, (double)y[m * n + i], (double)want);
            }
    }
    free(y);
    problem_free(&p);
}

/* Output rounding alone: 1.7e-3 of bf16, an eighth of that of fp16. */
static double decode_bound(const problem *p) {
    return p->fp16 ? 2.8e-4 : 2.2e-3;
}

static void test_decode(void **state) {
    (void)state;
    if (!wanted(how_kernels[PLAIN]) && !wanted(how_kernels[LEAN]) && !wanted(how_kernels[ROWS])) skip();
    static const linear_case cases[] = {
        {1, 128, 256, 1, 1, 1},    {1, 4096, 1024, 0, 1, 1},  {16, 512, 2048, 14, 1, 16}, {7, 136, 512, 2, 1, 4},    {16, 1000, 1536, 1, 1, 1},
        {9, 264, 4096, 16, 1, 9},  {2, 8, 256, 1, 1, 2},      {4, 6144, 768, 3, 1, 4},    {13, 72, 28672, 5, 1, 6},  {17, 136, 1024, 3, 1, 5},
        {33, 520, 2304, 8, 1, 12}, {64, 392, 4096, 14, 1, 16}, {64, 128, 512, 1, 1, 1},    {31, 2056, 768, 1, 1, 1},  {50, 264, 1280, 0, 1, 1},
        {64, 8, 256, 16, 1, 16},   {48, 5000, 512, 6, 1, 7},  {8, 2048, 4096, 4, 1, 7},   {128, 136, 1024, 9, 1, 8}, {100, 520, 1536, 3, 1, 3},
        {64, 1032, 768, 8, 1, 8},  {12, 392, 512, 16, 1, 12}, {40, 264, 1024, 14, 1, 12}, {88, 520, 768, 3, 1, 3},   {24, 136, 512, 3, 1, 3}};
    int ran[HOWS] = {0};
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        if (left_out(cases[i / 2])) continue;
        problem p = problem_make_element(cases[i / 2], i % 2);
        size_t bytes = (size_t)p.c.rows * (size_t)p.c.n * 4;
        float *y = malloc(bytes);
        double *want = reference_of(&p);
        for (int pdl = 0; pdl < 2; pdl++) {
            const int sms = pdl ? sm_count() : 1 + (int)(test_next() % 5);
            for (int how = PLAIN; how < HOWS; how++) {
                if (!wanted(how_kernels[how])) continue;
                if (!run_decode_on(&p, (enum how)how, sms, 0, p.c.rows, pdl, y)) continue;
                ran[how]++;
                check(&p, y, want, decode_bound(&p), how_names[how]);
            }
        }
        free(want);
        free(y);
        problem_free(&p);
    }
    printf("launches of decode, lean, rows: %d %d %d\n", ran[PLAIN], ran[LEAN], ran[ROWS]);
    for (int how = PLAIN; how < HOWS; how++) assert_true(ran[how] > 0 || !wanted(how_kernels[how]));
}

/* The head's: float32, any n, W's rows somewhere in its map, variants without a plane. Nothing is rounded but x where it meets signs: to 16 bits, or
   to 13 at least by the rows kernel. */
static void test_wide(void **state) {
    (void)state;
    if (!wanted(how_kernels[PLAIN]) && !wanted(how_kernels[LEAN]) && !wanted(how_kernels[ROWS])) skip();
    static const linear_case cases[] = {{1, 133, 256, 1, 1, 1},   {1, 1000, 4096, 0, 1, 1}, {16, 519, 2048, 14, 1, 16}, {7, 2001, 512, 2, 1, 4}, {9, 137, 512, 4, 1, 6},
                                        {16, 8, 1536, 1, 1, 1},   {12, 263, 1024, 3, 1, 5}, {16, 4099, 768, 8, 1, 9},   {33, 261, 1024, 5, 1, 7},
                                        {64, 3001, 512, 14, 1, 16}, {47, 133, 2048, 1, 1, 3}, {29, 1007, 768, 8, 1, 9}, {60, 519, 1024, 0, 1, 1}};
    int ran[HOWS] = {0};
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        if (left_out(cases[i / 2])) continue;
        problem p = problem_make_element(cases[i / 2], i % 2);
        float *y = malloc((size_t)p.c.rows * (size_t)p.c.n * 4);
        double *want = reference_of(&p);
        const int sms = i % 3 ? sm_count() : 1 + (int)(test_next() % 5);
        for (int how = PLAIN; how < HOWS; how++) {
            if (!wanted(how_kernels[how]) || !run_decode_wide(&p, (enum how)how, sms, 0, p.c.rows, i % 2, true, y)) continue;
            ran[how]++;
            check(&p, y, want, how == ROWS ? 3e-5 : 1e-5, how_names[how]);
        }
        free(want);
        free(y);
        problem_free(&p);
    }
    for (int how = PLAIN; how < HOWS; how++) assert_true(ran[how] > 0 || !wanted(how_kernels[how]));
}

static void test_decode_delta_alone(void **state) {
    (void)state;
    for (int i = 0; i < 4 * HOWS; i++) {
        const enum how how = (enum how)(i / 4);
        if (!wanted(how_kernels[how])) continue;
        problem p = problem_make_element((linear_case){i % 4 < 2 ? 11 : 37, 392, 1280, 5, 1, 6}, i % 2);
        const int rows = p.c.rows;
        memset(p.w, 0, (size_t)392 * 1280 * 2);
        memset(p.bias, 0, 392 * 4);
        float *y = malloc((size_t)rows * 392 * 4), *mirrored = malloc((size_t)rows * 392 * 4);
        if (run_decode(&p, how, 0, rows, true, y)) {
            double *want = reference_of(&p);
            check(&p, y, want, decode_bound(&p), "delta alone");
            free(want);
            for (int v = 0; v < p.c.variants; v++) problem_mirror(&p, v);
            run_decode(&p, how, 0, rows, true, mirrored);
            for (int j = 0; j < rows * 392; j++)
                if (mirrored[j] != -y[j]) fail_msg("%s: output %d: %g, mirrored signs %g", how_names[how], j, (double)y[j], (double)mirrored[j]);
        }
        free(y);
        free(mirrored);
        problem_free(&p);
    }
}

/* A block of a token as k_digits says: every value within its rounding, and the correction that its digits call for. */
static void check_digits(const uint8_t *tile, int tokens, int token, const float *x) {
    float top = 1e-30f, scale;
    int32_t correction[4];
    long sum = 0;
    for (int k = 0; k < 256; k++) top = fmaxf(top, fabsf(x[k]));
    memcpy(correction, tile + tokens * 512 + token * 16, sizeof correction);
    memcpy(&scale, tile + tokens * 528 + token * 4, 4);
    if (fabs((double)scale * 64 * 4079 - (double)top) > 1e-6 * (double)top) fail_msg("digits: scale %g of values up to %g", (double)scale, (double)top);
    for (int k = 0; k < 256; k++) {
        const int i = k / 8 % 8, j = i % 4, o = k % 8, piece = 8 * (o / 4) + i, at = (piece * tokens + token) * 32 + k / 64 * 4 + o % 4;
        const int z = 256 * (int8_t)tile[at + 16] + (int8_t)tile[at], step = 1 << j;
        const double unit = (double)top / 4079, value = (j ? -1.0 : 1.0) * z / step * unit;
        if (fabs(value - (double)x[k]) > unit / step * 0.52) fail_msg("digits: value %d: %g for %g", k, value, (double)x[k]);
        if (j) sum -= (long)z * (64 >> j);
    }
    if (correction[0] != sum || correction[2] != sum || correction[1] || correction[3]) fail_msg("digits: correction %d, %ld is right", correction[0], sum);
}

/* Two launches' rows, and one that is in none; of even values, and with outliers; a block of zeros. */
static void test_digits(void **state) {
    (void)state;
    if (!wanted("rows")) skip();
    for (int kind = 0; kind < 4; kind++) {
        const bool fp16 = kind & 1;
        const int rows = 3 + (int)(test_next() % 90), blocks = 1 + (int)(test_next() % 9), width = 256 * blocks, cut = rows > 65 ? 65 - (int)(test_next() % 30) : 2;
        const size_t count = (size_t)rows * (size_t)width;
        float *x = floats_random(count, 1);
        uint16_t *bits = malloc(count * 2);
        for (size_t i = 0; (kind & 2) && i < count; i += 1 + test_next() % 700) x[i] *= 1000;
        for (size_t k = 0; k < 256; k++) x[count - 1 - k] = 0;
        for (size_t i = 0; i < count; i++) {
            bits[i] = fp16 ? bd_f32_to_f16(x[i]) : bd_f32_to_bf16(x[i]);
            x[i] = fp16 ? bd_f16_to_f32(bits[i]) : bd_bf16_to_f32(bits[i]);
        }
        k_digits_args args = {.chunks = {{1, cut - 1, 0}, {cut, rows - cut, k_digits_bytes(cut - 1, width)}}, .chunk_count = 2, .k = width, .fp16 = fp16, .pdl = (int)(test_next() % 2)};
        buffer d_x = buffer_make(bits, count * 2), d_digits = buffer_make(NULL, args.chunks[1].at_bytes + k_digits_bytes(rows - cut, width));
        args.x = d_x.data, args.digits = d_digits.data;
        CUDA_OK(k_digits(&args, NULL));
        CUDA_OK(cudaDeviceSynchronize());
        uint8_t *tiles = malloc(d_digits.bytes);
        buffer_get(&d_digits, tiles);
        for (int c = 0; c < 2; c++) {
            const k_digits_chunk *chunk = &args.chunks[c];
            for (int t = 0; t < chunk->rows; t++)
                for (int b = 0; b < blocks; b++)
                    check_digits(tiles + chunk->at_bytes + (size_t)b * k_digits_bytes(chunk->rows, 256), k_decode_tokens(chunk->rows), t,
                                 x + (size_t)(chunk->first_row + t) * (size_t)width + b * 256);
        }
        buffer_free(&d_x), buffer_free(&d_digits);
        free(x), free(bits), free(tiles);
    }
}

/* x = e_m: each output is one weight plus one signed scale, to the bits that x is left with. */
static void one_hot(enum how how, int rows, int at) {
    problem p = problem_make((linear_case){rows, 200, 512, 3, 1, 5});
    memset(p.x, 0, (size_t)rows * 512 * 2);
    memset(p.bias, 0, 200 * 4);
    for (int m = 0; m < rows; m++) p.x[m * 512 + (at + 7 * m) % 512] = bd_f32_to_bf16(1);
    float *y = malloc((size_t)rows * 200 * 4);
    const bool ran = run_decode(&p, how, 0, rows, false, y);
    for (int m = 0; ran && m < rows; m++)
        for (size_t n = 0; n < 200; n++) {
            const size_t k = (size_t)(at + 7 * m) % 512;
            const int v = p.row_overlay[m];
            const float w = bd_bf16_to_f32(p.w[n * 512 + k]), delta = v < 0 ? 0 : (float)sign_of(p.bits[v][0], n, k, 512) * p.scale[v][0][n];
            const float want = w + delta, got = y[(size_t)m * 200 + n];
            const bool right = fabsf(got - want) <= fabsf(want) * 0x1p-8f + 1e-6f;
            if (!right) fail_msg("%s: rows %d row %d output %zu: %g, want %g", how_names[how], rows, m, n, (double)got, (double)want);
        }
    free(y);
    problem_free(&p);
}

static void test_decode_one_hot(void **state) {
    (void)state;
    if (getenv("BD_GPU_SMALL")) skip();
    for (int how = PLAIN; how < HOWS; how++)
        for (int rows = 8; wanted(how_kernels[how]) && rows <= 128; rows *= 2)
            for (int at = 0; at < 512; at += 512 / 4) one_hot((enum how)how, rows, at);
}

/* Scales of zero: the base, bitwise. */
static void test_decode_zero_scale_is_the_base(void **state) {
    (void)state;
    for (int rows = 5; rows <= 60; rows += 11)
        for (int how = PLAIN; how < HOWS; how++) {
            if (!wanted(how_kernels[how])) continue;
            problem p = problem_make((linear_case){rows, 264, 1024, 4, 1, 6});
            for (int v = 0; v < 4; v++) problem_scale(&p, v, 0);
            float *y = malloc((size_t)rows * 264 * 4), *base = malloc((size_t)rows * 264 * 4);
            if (run_decode(&p, (enum how)how, 0, rows, true, y)) {
                for (int m = 0; m < rows; m++) p.row_overlay[m] = -1;
                run_decode(&p, how == LEAN ? LEAN : PLAIN, 0, rows, true, base);
                if (memcmp(y, base, (size_t)rows * 264 * 4) != 0) fail_msg("%s: %d rows of zero scales are not the base's", how_names[how], rows);
            }
            free(y);
            free(base);
            problem_free(&p);
        }
}

static void test_decode_rows_do_not_depend_on_their_batch(void **state) {
    (void)state;
    if (getenv("BD_GPU_SMALL")) skip();
    static const linear_case cases[] = {{16, 648, 1024, 14, 1, 16}, {64, 648, 1024, 14, 1, 16}, {27, 2056, 2048, 3, 1, 9}, {61, 648, 1024, 9, 1, 7}};
    for (size_t i = 0; i < HOWS * (sizeof cases / sizeof *cases); i++) {
        const enum how how = (enum how)(i % HOWS);
        if (!wanted(how_kernels[how])) continue;
        problem p = problem_make(cases[i / HOWS]);
        const int n = p.c.n;
        float *y = malloc((size_t)p.c.rows * (size_t)n * 4), *alone = malloc((size_t)n * 4);
        const bool ran = run_decode(&p, how, 0, p.c.rows, true, y);
        for (int m = 0; ran && m < p.c.rows; m++) {
            if (!run_decode(&p, how, m, 1, true, alone)) continue; /* a base row is not for every kernel */
            for (int j = 0; j < n; j++)
                if (alone[j] != y[m * n + j])
                    fail_msg("%s: %d rows, row %d output %d: alone %g, in the batch %g", how_names[how], p.c.rows, m, j, (double)alone[j], (double)y[m * n + j]);
        }
        free(y);
        free(alone);
        problem_free(&p);
    }
}

/* Two launches share the multiprocessors, each waiting for its own blocks: neither may keep the other's out for good. */
static void test_two_streams(void **state) {
    (void)state;
    const int repeats = getenv("BD_GPU_SMALL") ? 2 : 40;
    cudaStream_t streams[2];
    for (int s = 0; s < 2; s++) CUDA_OK(cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking));
    problem p = problem_make((linear_case){16, 1032, 1024, 3, 1, 4});
    const size_t bytes = (size_t)16 * 1032 * 4;
    float *alone = malloc(bytes), *y = malloc(bytes);
    for (int how = PLAIN; how < HOWS; how++) {
        decode_run runs[2];
        if (!wanted(how_kernels[how]) || !run_decode(&p, (enum how)how, 0, 16, true, alone)) continue;
        for (int s = 0; s < 2; s++) decode_prepare(&p, (enum how)how, sm_count(), 0, 16, false, false, &runs[s]);
        for (int i = 0; i < repeats; i++)
            for (int s = 0; s < 2; s++) decode_launch(&runs[s], streams[s]);
        for (int s = 0; s < 2; s++) {
            decode_finish(&runs[s], &p, y);
            if (memcmp(y, alone, bytes) != 0) fail_msg("%s: beside another launch the outputs differ", how_names[how]);
        }
    }
    for (int s = 0; s < 2; s++) CUDA_OK(cudaStreamDestroy(streams[s]));
    free(alone);
    free(y);
    problem_free(&p);
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major != 9) {
        printf("not an sm_90 device: skipped\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gemm), cmocka_unit_test(test_gemm_one_hot), cmocka_unit_test(test_decode),
                                       cmocka_unit_test(test_wide), cmocka_unit_test(test_decode_delta_alone), cmocka_unit_test(test_digits), cmocka_unit_test(test_decode_one_hot),
                                       cmocka_unit_test(test_decode_zero_scale_is_the_base), cmocka_unit_test(test_decode_rows_do_not_depend_on_their_batch),
                                       cmocka_unit_test(test_two_streams)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
