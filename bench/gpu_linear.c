/* gpu_linear.c - one layer's four fused linears (qkv, o, gate+up, down): the BitDelta kernels
 * against cuBLASLt on the base alone.
 *
 *   bench_gpu_linear [rounds] > table.csv       needs an sm_90 device; shapes 8B, 70B on 1, 2 and 8
 * ranks
 *
 * Every figure is a CUDA-graph replay on cold weights (rotated past the L2 cache), random data,
 * both sides replayed in turn in the same round; the median of the rounds. cuBLASLt: the fastest of
 * its 8 heuristics. The planes of decode are counted. Columns: shape, rows, variants, base_us,
 * bitdelta_us, ratio, bound (bytes or arithmetic: 1 + V/16 in decode, 1 in prefill). */
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

enum { VARIANTS_MAX = 14, ROUNDS_MAX = 101, ALGORITHMS = 8 };
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

typedef struct work { /* one (rows, variants) of one matrix */
    matrix *m;
    int rows, variants, tok, split, nb;
    const void *x;
    void *y;
    k_gemm_tile *tiles;
    int tile_count;
    int32_t *columns, *slot;
    uint8_t *planes;
    float *plane_scale;
    int32_t *plane_sum;
    unsigned long long *workspace;
    unsigned *tickets;
} work;

static void run_base(const work *w, int i) {
    const float one = 1, zero = 0;
    matrix *m = w->m;
    CHECK(cublasLtMatmul(lt, m->desc, &one, m->w[i % m->copies], m->w_layout, w->x, m->x_layout,
                         &zero, w->y, m->y_layout, w->y, m->y_layout, &m->found[m->best].algo,
                         lt_workspace, 64 << 20, stream));
}

static void run_bitdelta(const work *w, int i) {
    matrix *m = w->m;
    const void *data = m->w[i % m->copies];
    if (w->nb) {
        if (w->variants)
            CHECK(k_planes_bf16(w->planes, w->plane_scale, w->plane_sum, w->x, w->rows, m->k, w->nb,
                                stream));
        const k_decode_args args = {
            .w = map_make(data, (size_t)m->n, (size_t)m->k, 128),
            .x = map_make(w->x, (size_t)w->rows, (size_t)m->k, w->nb == 16 ? 16 : 8),
            .w_data = data,
            .planes = w->planes,
            .scale = w->plane_scale,
            .sum = w->plane_sum,
            .overlays = m->overlays,
            .columns = w->columns,
            .slot = w->slot,
            .y = w->y,
            .workspace = w->workspace,
            .ticket = w->tickets + i % 64,
            .rows = w->rows,
            .n = m->n,
            .k = m->k,
            .variants = w->variants,
            .sm_count = sms,
            .pdl = w->variants > 0};
        CHECK(k_decode_bf16(&args, w->nb, stream));
        return;
    }
    const k_gemm_args args = {
        .w = map_make(data, (size_t)m->n, (size_t)m->k, 128),
        .x = map_make(w->x, (size_t)w->rows, (size_t)m->k, (unsigned)w->tok / 2),
        .y = map_make(w->y, (size_t)w->rows, (size_t)m->n, 32),
        .w_data = data,
        .y_data = w->y,
        .overlays = m->overlays,
        .tiles = w->tiles,
        .tile_count = w->tile_count,
        .n = m->n,
        .k = m->k,
        .group = 8,
        .sm_count = sms};
    if (w->tok == 256 && w->split == 1)
        CHECK(k_gemm_waves_bf16(&args, w->variants > 0, stream));
    else
        CHECK(k_gemm_bf16(&args, w->tok, w->split, w->variants > 0, stream));
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

static void tiles_fill(work *w) {
    k_gemm_tile *tiles = malloc(((size_t)w->rows + 16) * sizeof *tiles);
    const int segments = w->variants ? w->variants : 1;
    w->tile_count = 0;
    for (int s = 0; s < segments; s++) {
        const int first = (int)((long long)w->rows * s / segments),
                  end = (int)((long long)w->rows * (s + 1) / segments);
        for (int m = first; m < end; m += w->tok)
            tiles[w->tile_count++] =
                (k_gemm_tile){m, m + w->tok < end ? m + w->tok : end, w->variants ? s : -1, 0};
    }
    CHECK(
        cudaMemcpy(w->tiles, tiles, (size_t)w->tile_count * sizeof *tiles, cudaMemcpyHostToDevice));
    free(tiles);
}

/* The fastest (tok, split) of the prefill kernel, as the base gets the fastest of its algorithms.
 */
static void bitdelta_prepare(work *w) {
    if (w->nb) return;
    static const int choices[][2] = {{256, 1}, {256, 2}, {256, 4}, {128, 1},
                                     {128, 2}, {64, 1},  {64, 2}};
    float least = 1e30f;
    int best = 0;
    const int count = w->m->copies < 8 ? 8 : w->m->copies;
    for (int c = 0; c < 7; c++) {
        if (w->m->k % (256 * choices[c][1])) continue;
        w->tok = choices[c][0], w->split = choices[c][1];
        tiles_fill(w);
        cudaGraphExec_t exec = graph_make(run_bitdelta, w, count);
        float us[3];
        for (int r = 0; r < 3; r++)
            us[r] = replay_us(exec, count);
        CHECK(cudaGraphExecDestroy(exec));
        const float mid = median(us, 3);
        if (mid < least) least = mid, best = c;
    }
    w->tok = choices[best][0], w->split = choices[best][1];
    tiles_fill(w);
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 7;
    const char *only = argc > 2 ? argv[2] : NULL;
    if (rounds < 1 || rounds > ROUNDS_MAX) return 2;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cublasLtCreate(&lt));
    CHECK(cudaMalloc(&lt_workspace, 64 << 20));
    static const int rows[] = {1, 2, 4, 8, 14, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096},
                     variants[] = {1, 2, 4, 8, 14};
    work w = {0};
    CHECK(cudaMalloc((void **)&w.tiles, 8192 * sizeof *w.tiles));
    int32_t columns[16], slot[16];
    for (int i = 0; i < 16; i++)
        columns[i] = i;
    CHECK(cudaMalloc((void **)&w.columns, sizeof columns));
    CHECK(cudaMemcpy(w.columns, columns, sizeof columns, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc((void **)&w.slot, sizeof slot));
    CHECK(cudaMalloc((void **)&w.planes, 28672 / 256 * 16 * 512));
    CHECK(cudaMalloc((void **)&w.plane_scale, 64));
    CHECK(cudaMalloc((void **)&w.plane_sum, 64));
    CHECK(cudaMalloc((void **)&w.workspace, k_decode_workspace_bytes(sms)));
    CHECK(cudaMemset(w.workspace, 0, k_decode_workspace_bytes(sms)));
    CHECK(cudaMalloc((void **)&w.tickets, 256));
    CHECK(cudaMemset(w.tickets, 0, 256));
    void *x = device_bf16((size_t)4096 * 28672, 0), *y;
    CHECK(cudaMalloc(&y, (size_t)4096 * 57344 * 2));
    printf("shape,rows,variants,base_us,bitdelta_us,ratio,bound\n");
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        if (only && strcmp(only, shapes[s].name) != 0) continue;
        matrix m[4];
        for (int i = 0; i < 4; i++)
            m[i] = matrix_make(shapes[s].n[i], shapes[s].k[i]);
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            for (int i = 0; i < 4; i++) {
                work base = {.m = &m[i], .rows = rows[r], .x = x, .y = y};
                base_prepare(&base);
            }
            for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
                if (variants[v] > rows[r] ||
                    (rows[r] > 16 && rows[r] < 1024 && variants[v] != 1 && variants[v] != 8))
                    continue;
                if (rows[r] >= 1024 && variants[v] != 1 && variants[v] != 8) continue;
                float base_sum = 0, delta_sum = 0;
                for (int i = 0; i < 4; i++) {
                    work this = w;
                    this.m = &m[i], this.rows = rows[r], this.variants = variants[v], this.x = x,
                    this.y = y;
                    for (this.nb = rows[r] <= 16; this.nb && this.nb < rows[r];)
                        this.nb *= 2;
                    for (int t = 0; t < 16; t++)
                        slot[t] = t % variants[v];
                    CHECK(cudaMemcpy(w.slot, slot, sizeof slot, cudaMemcpyHostToDevice));
                    bitdelta_prepare(&this);
                    const int count = m[i].copies < 8 ? 8 : m[i].copies;
                    cudaGraphExec_t a = graph_make(run_base, &this, count),
                                    b = graph_make(run_bitdelta, &this, count);
                    float base_us[ROUNDS_MAX], delta_us[ROUNDS_MAX];
                    replay_us(a, count), replay_us(b, count);
                    for (int n = 0; n < rounds; n++)
                        base_us[n] = replay_us(a, count), delta_us[n] = replay_us(b, count);
                    base_sum += median(base_us, rounds), delta_sum += median(delta_us, rounds);
                    CHECK(cudaGraphExecDestroy(a));
                    CHECK(cudaGraphExecDestroy(b));
                }
                printf("%s,%d,%d,%.1f,%.1f,%.3f,%.3f\n", shapes[s].name, rows[r], variants[v],
                       (double)base_sum, (double)delta_sum, (double)(delta_sum / base_sum),
                       rows[r] <= 64 ? 1 + variants[v] / 16.0 : 1.0);
                fflush(stdout);
            }
        }
        for (int i = 0; i < 4; i++)
            matrix_free(&m[i]);
    }
    return 0;
}
