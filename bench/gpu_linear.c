/* gpu_linear.c - a layer's four fused linears (qkv, o, gate+up, down): the BitDelta kernels against
 * cuBLASLt on the base alone.
 *
 *   bench_gpu_linear [rounds] [shape] [rows,rows,..] [variants,variants,..] > table.csv
 *
 * needs an sm_90 device; shapes 8B, 70B on 1, 2 and 8 ranks. Every figure is a CUDA-graph replay on
 * cold weights (rotated past the L2 cache), random data, both sides replayed in turn in the same
 * round; the median of the rounds. cuBLASLt: the fastest of its 8 heuristics. Ours: what the
 * backend would launch, what it makes of x included. Rows are dealt evenly to the variants.
 * Columns: shape, matrix ("layer": the sum), rows, variants, base_us, bitdelta_us, ratio, bound
 * (bytes or arithmetic: 1 + V/16 in decode, 1 in prefill), kernel. With BENCH_CHOICES=1 every
 * choice of kernel is timed too, each in a run of its own: rows "choice" of the table, its estimate
 * in the place of the bound; and a line per (rows, variants) on stderr with the best of them. */
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define CHECK(call)                                                                                \
    do {                                                                                           \
        const int code_ = (int)(call);                                                             \
        if (code_ != 0) {                                                                          \
            fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, code_);              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { VARIANTS_MAX = 14, ROUNDS_MAX = 101, ALGORITHMS = 8, TICKETS = 64 };
#define COLD_BYTES (240u << 20)

typedef struct shape {
    const char *name;
    int n[4], k[4];
} shape;

static const shape shapes[] = {
    {"8B", {6144, 4096, 28672, 4096}, {4096, 4096, 4096, 14336}},
    {"70B-TP1", {10240, 8192, 57344, 8192}, {8192, 8192, 8192, 28672}},
    {"70B-TP2", {5120, 8192, 28672, 8192}, {8192, 4096, 8192, 14336}},
    {"70B-TP8", {1280, 8192, 7168, 8192}, {8192, 1024, 8192, 3584}},
};

static cudaStream_t stream;
static cublasLtHandle_t lt;
static void *lt_workspace;
static int sms;

static uint64_t random_state = 88172645463325252ull;
static uint32_t random_next(void) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7,
        random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* bf16 values of about unit variance times 2^exponent; a random megabyte repeated is random enough
 * for speed and power. */
static void *device_bf16(size_t count, int exponent) {
    static uint16_t block[1 << 19];
    for (size_t i = 0; i < sizeof block / 2; i++) {
        const uint32_t r = random_next();
        block[i] = (uint16_t)((r & 0x8000u) | (uint32_t)(126 + exponent + (int)(r >> 30)) << 7 |
                              (r & 0x7fu));
    }
    uint8_t *data;
    CHECK(cudaMalloc((void **)&data, count * 2));
    for (size_t at = 0; at < count * 2; at += sizeof block)
        CHECK(cudaMemcpy(data + at, block,
                         at + sizeof block <= count * 2 ? sizeof block : count * 2 - at,
                         cudaMemcpyHostToDevice));
    return data;
}

static CUtensorMap map_make(const void *data, size_t rows, size_t cols, unsigned box_rows) {
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                  const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                  const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    union {
        void *data;
        encode_fn function;
        const void *constant;
    } entry, address = {.constant = data};
    enum cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry.data, 12000,
                                           cudaEnableDefault, &found));
    CUtensorMap map;
    const cuuint64_t size[2] = {cols, rows}, stride[1] = {cols * 2};
    const cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    CHECK(entry.function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address.data, size, stride, box,
                         step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

typedef struct matrix { /* `copies` of one linear, used in turn so that the weights are cold */
    int n, k, copies;
    void *w[64];
    uint8_t *bits[VARIANTS_MAX];
    float *scale;
    k_overlay_linear *overlays; /* [VARIANTS_MAX] */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w_layout, x_layout, y_layout;
    cublasLtMatmulHeuristicResult_t found[ALGORITHMS];
    int found_count, best;
} matrix;

static matrix matrix_make(int n, int k) {
    matrix m = {.n = n, .k = k};
    const size_t bytes = (size_t)n * (size_t)k * 2;
    m.copies = (int)(COLD_BYTES / bytes) + 1;
    if (m.copies > 64) m.copies = 64;
    for (int i = 0; i < m.copies; i++)
        m.w[i] = device_bf16((size_t)n * (size_t)k, -7);
    k_overlay_linear overlays[VARIANTS_MAX] = {0};
    m.scale = device_bf16((size_t)n * 2, 0);
    float *scale = calloc((size_t)n, 4);
    for (int i = 0; i < n; i++)
        scale[i] = 1e-3f;
    CHECK(cudaMemcpy(m.scale, scale, (size_t)n * 4, cudaMemcpyHostToDevice));
    free(scale);
    for (int v = 0; v < VARIANTS_MAX; v++) {
        m.bits[v] = device_bf16(k_sign_bytes((uint32_t)n, (uint32_t)k) / 2, 0);
        overlays[v] = (k_overlay_linear){.bits = {m.bits[v]}, .scale = {m.scale}, .plane_count = 1};
    }
    CHECK(cudaMalloc((void **)&m.overlays, sizeof overlays));
    CHECK(cudaMemcpy(m.overlays, overlays, sizeof overlays, cudaMemcpyHostToDevice));
    return m;
}

static void matrix_free(matrix *m) {
    for (int i = 0; i < m->copies; i++)
        CHECK(cudaFree(m->w[i]));
    for (int v = 0; v < VARIANTS_MAX; v++)
        CHECK(cudaFree(m->bits[v]));
    CHECK(cudaFree(m->scale));
    CHECK(cudaFree(m->overlays));
}

enum kind { DECODE, LEAN, ROWS, GEMM };
typedef struct choice {
    enum kind kind;
    int tok, split;
} choice;

static const choice choices[] = {
    {DECODE, 0, 1}, {LEAN, 0, 1},   {ROWS, 0, 1},   {GEMM, 256, 1}, {GEMM, 256, 2},
    {GEMM, 256, 4}, {GEMM, 128, 1}, {GEMM, 128, 2}, {GEMM, 64, 1},  {GEMM, 64, 2},
};
enum { CHOICES = sizeof choices / sizeof *choices, CHUNKED_ROWS = 256, LAUNCHES = 64 };

typedef struct launch { /* of the rows kernel */
    int first_group, groups, first_row, rows, lowest, variants;
} launch;

typedef struct work { /* one (rows, variants) of one matrix */
    matrix *m;
    int rows, variants;
    choice how;
    launch launches[LAUNCHES];
    int launch_count;
    const void *x;
    void *y;
    k_gemm_tile *tiles;
    int tile_count, group_rows;
    int32_t *columns, *slot;
    uint8_t *planes, *digits;
    unsigned long long *workspace;
    unsigned *tickets; /* [TICKETS] */
} work;

static void run_base(const work *w, int i) {
    const float one = 1, zero = 0;
    matrix *m = w->m;
    CHECK(cublasLtMatmul(lt, m->desc, &one, m->w[i % m->copies], m->w_layout, w->x, m->x_layout,
                         &zero, w->y, m->y_layout, w->y, m->y_layout, &m->found[m->best].algo,
                         lt_workspace, 64 << 20, stream));
}

static int variant_of(const work *w, int row) {
    return w->variants ? (int)((long long)row * w->variants / w->rows) : 0;
}

static unsigned turn; /* of the tickets */

static void run_decode(const work *w, int i) {
    matrix *m = w->m;
    for (int first = 0; first < w->rows; first += K_DECODE_ROWS) {
        const int rows = w->rows - first < K_DECODE_ROWS ? w->rows - first : K_DECODE_ROWS;
        const int lowest = variant_of(w, first);
        const uint8_t *x = (const uint8_t *)w->x + (size_t)first * (size_t)m->k * 2;
        const int tokens = k_decode_tokens(rows);
        if (w->variants && w->how.kind == DECODE)
            CHECK(k_planes(w->planes, x, rows, m->k, false, true, stream));
        const k_decode_args args = {
            .w = map_make(m->w[i % m->copies], (size_t)m->n, (size_t)m->k, 128),
            .x = map_make(w->x, (size_t)w->rows, (size_t)m->k, (unsigned)tokens),
            .w_data = m->w[i % m->copies],
            .x_data = x,
            .first_row = first,
            .planes = w->planes,
            .overlays = m->overlays,
            .columns = w->columns + lowest,
            .slot = w->slot + first,
            .y = (uint8_t *)w->y + (size_t)first * (size_t)m->n * 2,
            .workspace = w->workspace,
            .ticket = w->tickets + turn++ % TICKETS,
            .rows = rows,
            .n = m->n,
            .k = m->k,
            .variants = w->variants ? variant_of(w, first + rows - 1) - lowest + 1 : 0,
            .sm_count = sms,
            .pdl = 1};
        CHECK(w->how.kind == LEAN ? k_decode_lean(&args, stream) : k_decode(&args, stream));
    }
}

static void run_rows(const work *w, int i) {
    matrix *m = w->m;
    k_digits_args digits = {.x = w->x, .digits = w->digits, .k = m->k, .pdl = 1};
    uint64_t bytes = 0;
    for (int l = 0; l < w->launch_count; l++) {
        const launch *part = &w->launches[l];
        digits.chunks[digits.chunk_count++] = (k_digits_chunk){part->first_row, part->rows, bytes};
        bytes += k_digits_bytes(part->rows, m->k);
    }
    CHECK(k_digits(&digits, stream));
    for (int l = 0; l < w->launch_count; l++) {
        const launch *part = &w->launches[l];
        const k_rows_args args = {
            .w = map_make(m->w[i % m->copies], (size_t)m->n, (size_t)m->k, 128),
            .w_data = m->w[i % m->copies],
            .x = map_make(w->x, (size_t)w->rows, (size_t)m->k,
                          (unsigned)k_decode_tokens(part->rows)),
            .digits = w->digits + digits.chunks[l].at_bytes,
            .overlays = m->overlays,
            .columns = w->columns + part->lowest,
            .groups = w->tiles + part->first_group,
            .y = w->y,
            .workspace = w->workspace,
            .ticket = w->tickets + turn++ % TICKETS,
            .first_row = part->first_row,
            .rows = part->rows,
            .n = m->n,
            .k = m->k,
            .group_count = part->groups,
            .variants = part->variants,
            .sm_count = sms,
            .group_rows = w->group_rows,
            .pdl = 1};
        CHECK(k_rows(&args, stream));
    }
}

static void run_bitdelta(const work *w, int i) {
    matrix *m = w->m;
    const void *data = m->w[i % m->copies];
    if (w->how.kind != GEMM) {
        (w->how.kind == ROWS ? run_rows : run_decode)(w, i);
        return;
    }
    const k_gemm_args args = {
        .w = map_make(data, (size_t)m->n, (size_t)m->k, 128),
        .x = map_make(w->x, (size_t)w->rows, (size_t)m->k, (unsigned)w->how.tok / 2),
        .y = map_make(w->y, (size_t)w->rows, (size_t)m->n, 32),
        .w_data = data,
        .y_data = w->y,
        .overlays = m->overlays,
        .tiles = w->tiles,
        .tile_count = w->tile_count,
        .n = m->n,
        .k = m->k,
        .group = 8,
        .pdl = 1,
        .sm_count = sms};
    CHECK(k_gemm(&args, w->how.tok, w->how.split, w->variants > 0, stream));
}

static cudaGraphExec_t graph_make(void (*run)(const work *, int), const work *w, int count) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    run(w, 0);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < count; i++)
        run(w, i);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
}

static float replay_us(cudaGraphExec_t exec, int count) {
    static cudaEvent_t begin, end;
    if (!begin) {
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
    }
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1000 / (float)count;
}

static int by_value(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static float median(float *v, int count) {
    qsort(v, (size_t)count, sizeof *v, by_value);
    return v[count / 2];
}

static void base_prepare(work *w) {
    matrix *m = w->m;
    const cublasOperation_t transpose = CUBLAS_OP_T;
    CHECK(cublasLtMatmulDescCreate(&m->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(cublasLtMatmulDescSetAttribute(m->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                         sizeof transpose));
    CHECK(cublasLtMatrixLayoutCreate(&m->w_layout, CUDA_R_16BF, (uint64_t)m->k, (uint64_t)m->n,
                                     m->k));
    CHECK(cublasLtMatrixLayoutCreate(&m->x_layout, CUDA_R_16BF, (uint64_t)m->k, (uint64_t)w->rows,
                                     m->k));
    CHECK(cublasLtMatrixLayoutCreate(&m->y_layout, CUDA_R_16BF, (uint64_t)m->n, (uint64_t)w->rows,
                                     m->n));
    cublasLtMatmulPreference_t preference;
    const uint64_t bytes = 64 << 20;
    CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &bytes, sizeof bytes));
    CHECK(cublasLtMatmulAlgoGetHeuristic(lt, m->desc, m->w_layout, m->x_layout, m->y_layout,
                                         m->y_layout, preference, ALGORITHMS, m->found,
                                         &m->found_count));
    CHECK(cublasLtMatmulPreferenceDestroy(preference));
    float least = 1e30f;
    int best = 0;
    const int count = m->copies < 8 ? 8 : m->copies;
    for (int a = 0; a < m->found_count; a++) {
        m->best = a;
        cudaGraphExec_t exec = graph_make(run_base, w, count);
        float us[3];
        for (int r = 0; r < 3; r++)
            us[r] = replay_us(exec, count);
        CHECK(cudaGraphExecDestroy(exec));
        const float mid = median(us, 3);
        if (mid < least) least = mid, best = a;
    }
    m->best = best;
}

static void tiles_fill(work *w, int most) {
    k_gemm_tile *tiles = malloc(((size_t)w->rows + 16) * sizeof *tiles);
    w->tile_count = 0;
    for (int m = 0; m < w->rows;) {
        int end = m + 1;
        while (end < w->rows && end - m < most && variant_of(w, end) == variant_of(w, m))
            end++;
        tiles[w->tile_count++] = (k_gemm_tile){m, end, w->variants ? variant_of(w, m) : -1, 0};
        m = end;
    }
    w->launch_count = 0;
    launch *part = NULL;
    for (int t = 0; w->how.kind == ROWS && t < w->tile_count; t++) {
        const int variant = tiles[t].variant, rows = tiles[t].m1 - tiles[t].m0;
        if (!part || part->groups == K_ROWS_GROUPS || variant - part->lowest >= 16 ||
            part->rows + rows > K_DECODE_ROWS) {
            part = &w->launches[w->launch_count++];
            *part = (launch){.first_group = t, .first_row = tiles[t].m0, .lowest = variant};
        }
        part->rows += rows;
        part->groups++;
        part->variants = variant - part->lowest + 1;
        tiles[t].variant -= part->lowest;
    }
    CHECK(
        cudaMemcpy(w->tiles, tiles, (size_t)w->tile_count * sizeof *tiles, cudaMemcpyHostToDevice));
    free(tiles);
}

/* Large groups where they are fewer: as the backend does where all launches are alike. */
static void rows_groups_fill(work *w) {
    tiles_fill(w, w->group_rows = K_ROWS_SMALL);
    const int many = w->tile_count;
    tiles_fill(w, w->group_rows = K_ROWS_LARGE);
    bool takes = w->tile_count < many;
    for (int l = 0; l < w->launch_count; l++)
        takes = takes && k_rows_takes(w->launches[l].rows, w->launches[l].groups, K_ROWS_LARGE);
    if (!takes) tiles_fill(w, w->group_rows = K_ROWS_SMALL);
}

/* Sets the choice; false: it does not apply. Up to K_LEAN_ROWS rows the backend takes the lean
 * kernel alone, so that a row does not see its batch. */
static bool choice_set(work *w, int c) {
    w->how = choices[c];
    if (w->how.kind != ROWS && (w->how.kind == LEAN) != (w->rows <= K_LEAN_ROWS)) return false;
    if (w->how.kind == LEAN || w->how.kind == DECODE) return w->rows <= 256;
    if (w->how.kind == ROWS ? w->rows > CHUNKED_ROWS || !w->variants
                            : w->m->k % (256 * w->how.split) != 0)
        return false;
    if (w->how.kind == ROWS)
        rows_groups_fill(w);
    else
        tiles_fill(w, w->how.tok);
    return true;
}

static const char *choice_name(const work *w, char (*text)[32]) {
    static const char *const names[] = {"decode", "lean", "rows"};
    if (w->how.kind != GEMM)
        snprintf(*text, sizeof *text, "%s", names[w->how.kind]);
    else
        snprintf(*text, sizeof *text, "gemm %d/%d", w->how.tok, w->how.split);
    return *text;
}

static double choice_cost(const work *w) {
    double cost = 0;
    if (w->how.kind == GEMM)
        return k_gemm_cost(w->m->n, w->m->k, w->how.tok, w->how.split, w->tile_count, sms);
    for (int l = 0; w->how.kind == ROWS && l < w->launch_count; l++) {
        const launch *part = &w->launches[l];
        if (w->rows <= K_LEAN_ROWS)
            return 1e30; /* not the backend's: a row must not see its batch */
        cost += k_rows_cost(w->m->n, w->m->k, part->rows, part->groups, w->group_rows,
                            part->variants, sms);
    }
    if (w->how.kind == ROWS) return cost;
    for (int first = 0; first < w->rows; first += K_DECODE_ROWS) {
        const int last = first + K_DECODE_ROWS < w->rows ? first + K_DECODE_ROWS - 1 : w->rows - 1;
        cost += k_decode_cost(w->m->n, w->m->k, last - first + 1,
                              variant_of(w, last) - variant_of(w, first) + 1, sms);
    }
    return cost;
}

/* What the backend would choose. */
static void choose(work *w) {
    double least = 1e300;
    int best = 0;
    for (int c = 0; c < CHOICES; c++) {
        if (!choice_set(w, c)) continue;
        const double cost = choice_cost(w);
        if (cost < least * 0.999) least = cost, best = c;
    }
    choice_set(w, best);
}

static void report(const char *model, const char *name, const work *w, float base, float delta,
                   const char *kernel) {
    printf("%s,%s,%d,%d,%.1f,%.1f,%.3f,%.3f,%s\n", model, name, w->rows, w->variants, (double)base,
           (double)delta, (double)(delta / base), w->rows <= 64 ? 1 + w->variants / 16.0 : 1.0,
           kernel);
    fflush(stdout);
}

static const char *const matrix_names[4] = {"qkv", "o", "gate_up", "down"};

/* Every choice, `rounds` times; the least median, and whose it is in best. */
static float choices_measure(work w, const char *model, const char *name, float base, int rounds,
                             char (*best)[32]) {
    cudaGraphExec_t graphs[CHOICES] = {0};
    static float us[CHOICES][ROUNDS_MAX];
    const int count = w.m->copies < 8 ? 8 : w.m->copies;
    for (int c = 0; c < CHOICES; c++) /* tiles are the choice's: it is recorded and run by itself */
        if (choice_set(&w, c)) {
            graphs[c] = graph_make(run_bitdelta, &w, count);
            replay_us(graphs[c], count);
            for (int r = 0; r < rounds; r++)
                us[c][r] = replay_us(graphs[c], count);
            CHECK(cudaGraphExecDestroy(graphs[c]));
        }
    float least = 1e30f;
    for (int c = 0; c < CHOICES; c++) {
        if (!choice_set(&w, c)) continue;
        char text[32];
        const float mid = median(us[c], rounds);
        printf("%s,choice %s,%d,%d,%.1f,%.1f,%.3f,%.4g,%s\n", model, name, w.rows, w.variants,
               (double)base, (double)mid, (double)(mid / base), choice_cost(&w),
               choice_name(&w, &text));
        if (mid < least) least = mid, choice_name(&w, best);
    }
    return least;
}

static void measure(work w, const char *model, matrix *m, int rounds) {
    float base_sum = 0, delta_sum = 0, best_sum = 0;
    char best[4][32];
    int32_t slot[256];
    for (int t = 0; t < w.rows && t < 256; t++)
        slot[t] = variant_of(&w, t) - variant_of(&w, t / K_DECODE_ROWS * K_DECODE_ROWS);
    CHECK(cudaMemcpy(w.slot, slot, sizeof slot, cudaMemcpyHostToDevice));
    for (int i = 0; i < 4; i++) {
        w.m = &m[i];
        choose(&w);
        const int count = m[i].copies < 8 ? 8 : m[i].copies;
        cudaGraphExec_t a = graph_make(run_base, &w, count),
                        b = graph_make(run_bitdelta, &w, count);
        float base_us[ROUNDS_MAX], delta_us[ROUNDS_MAX];
        replay_us(a, count), replay_us(b, count);
        for (int n = 0; n < rounds; n++)
            base_us[n] = replay_us(a, count), delta_us[n] = replay_us(b, count);
        CHECK(cudaGraphExecDestroy(a));
        CHECK(cudaGraphExecDestroy(b));
        const float base = median(base_us, rounds), delta = median(delta_us, rounds);
        char kernel[32];
        report(model, matrix_names[i], &w, base, delta, choice_name(&w, &kernel));
        base_sum += base, delta_sum += delta;
        if (getenv("BENCH_CHOICES"))
            best_sum += choices_measure(w, model, matrix_names[i], base, rounds, &best[i]);
    }
    report(model, "layer", &w, base_sum, delta_sum, "");
    if (best_sum > 0)
        fprintf(stderr,
                "%s rows %d variants %d: base %.1f, now %.1f (%.3f), best %.1f (%.3f): %s, %s, %s, "
                "%s\n",
                model, w.rows, w.variants, (double)base_sum, (double)delta_sum,
                (double)(delta_sum / base_sum), (double)best_sum, (double)(best_sum / base_sum),
                best[0], best[1], best[2], best[3]);
}

/* Whether text, a list with commas or NULL for anything, names value. */
static bool listed(const char *text, int value) {
    for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (atoi(at) == value) return true;
    return !text;
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 7;
    const char *only = argc > 2 ? argv[2] : NULL, *only_rows = argc > 3 ? argv[3] : NULL,
               *only_variants = argc > 4 ? argv[4] : NULL;
    if (rounds < 1 || rounds > ROUNDS_MAX) return 2;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cublasLtCreate(&lt));
    CHECK(cudaMalloc(&lt_workspace, 64 << 20));
    static const int rows[] = {1, 2, 4, 8, 12, 14, 16, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096},
                     variants[] = {1, 2, 4, 8, 14};
    work w = {0};
    CHECK(cudaMalloc((void **)&w.tiles, 8192 * sizeof *w.tiles));
    int32_t columns[16];
    for (int i = 0; i < 16; i++)
        columns[i] = i;
    CHECK(cudaMalloc((void **)&w.columns, sizeof columns));
    CHECK(cudaMemcpy(w.columns, columns, sizeof columns, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc((void **)&w.slot, 256 * 4));
    CHECK(cudaMalloc((void **)&w.planes, k_planes_bytes(K_DECODE_ROWS, 28672)));
    CHECK(cudaMalloc((void **)&w.digits, K_DIGITS_CHUNKS * k_digits_bytes(K_DECODE_ROWS, 28672)));
    CHECK(cudaMalloc((void **)&w.workspace, k_decode_workspace_bytes(sms)));
    CHECK(cudaMemset(w.workspace, 0, k_decode_workspace_bytes(sms)));
    CHECK(cudaMalloc((void **)&w.tickets, TICKETS * 4));
    CHECK(cudaMemset(w.tickets, 0, TICKETS * 4));
    w.x = device_bf16((size_t)4096 * 28672, 0);
    CHECK(cudaMalloc(&w.y, (size_t)4096 * 57344 * 2));
    printf("shape,matrix,rows,variants,base_us,bitdelta_us,ratio,bound,kernel\n");
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        if (only && *only && strcmp(only, shapes[s].name) != 0) continue;
        matrix m[4];
        for (int i = 0; i < 4; i++)
            m[i] = matrix_make(shapes[s].n[i], shapes[s].k[i]);
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            if (!listed(only_rows, rows[r])) continue;
            w.rows = rows[r];
            for (int i = 0; i < 4; i++) {
                work base = w;
                base.m = &m[i];
                base_prepare(&base);
            }
            for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
                if (variants[v] > rows[r] || !listed(only_variants, variants[v])) continue;
                if (rows[r] > 64 && variants[v] != 1 && variants[v] != 8) continue;
                w.variants = variants[v];
                measure(w, shapes[s].name, m, rounds);
            }
        }
        for (int i = 0; i < 4; i++)
            matrix_free(&m[i]);
    }
    return 0;
}
