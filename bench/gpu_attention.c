/* bench/gpu_attention.c - the attention kernels alone: time, TFLOP/s of prefill, GB/s of decode.
 *   bench_gpu_attention        one JSON line a case: {"what", "dim", "heads", "kv_heads", "batch",
 * "before", "rows", "us", "rate"} Event times of CUDA-graph replays, median of several, KV rotated
 * past the cache in decode; bench/gpu_attention.py sets PyTorch beside them. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define BLOCK   16
#define REPEATS 21
#define OK(call)                                                                                   \
    do {                                                                                           \
        const cudaError_t error_ = (call);                                                         \
        if (error_ != cudaSuccess) {                                                               \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_));                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

typedef struct attention_case {
    int dim, heads, kv_heads, batch, before, rows, fp16;
} attention_case;

static void *upload(const void *host, size_t bytes) {
    void *device;
    OK(cudaMalloc(&device, bytes));
    OK(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    return device;
}

/* About normal 16-bit values, made on the host once and repeated. */
static void *random_half(size_t count, int fp16) {
    enum { PERIOD = 1 << 20 };
    uint16_t *host = malloc(PERIOD * 2);
    uint64_t state = 88172645463325252ull + count;
    for (size_t i = 0; i < PERIOD; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const float v = (float)((double)(state >> 11) * 0x1p-53 * 4 - 2);
        uint32_t bits;
        memcpy(&bits, &v, 4);
        host[i] = fp16 ? (uint16_t)((bits >> 16 & 0x8000u) |
                                    (((bits >> 23 & 0xffu) - 112u) << 10 & 0x7c00u) |
                                    (bits >> 13 & 0x3ffu))
                       : (uint16_t)(bits >> 16);
    }
    uint16_t *device;
    OK(cudaMalloc((void **)&device, count * 2));
    for (size_t i = 0; i < count; i += PERIOD)
        OK(cudaMemcpy(device + i, host, (count - i < PERIOD ? count - i : PERIOD) * 2,
                      cudaMemcpyHostToDevice));
    free(host);
    return device;
}

static int by_value(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static CUtensorMap map_make(const void *data, size_t rows, size_t cols, unsigned box_rows,
                            bool fp16) {
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
    OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry.data, 12000,
                                        cudaEnableDefault, &found));
    CUtensorMap map;
    const cuuint64_t size[2] = {cols, rows}, stride[1] = {cols * 2};
    const cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    if (entry.function(&map,
                       fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                       address.data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
        fprintf(stderr, "tensor map refused\n");
        exit(1);
    }
    return map;
}

static cudaError_t launch(const k_attention_args *a, size_t layer_elements, int decode,
                          cudaStream_t stream) {
    if (decode) return k_attention_decode(a, stream);
    const CUtensorMap q = map_make(a->q, (size_t)a->rows, (size_t)(a->heads * a->head_dim),
                                   K_ATTENTION_ROWS, a->fp16);
    const CUtensorMap kv =
        map_make(a->kv, layer_elements / (size_t)a->head_dim, (size_t)a->head_dim,
                 k_attention_box(a->head_dim, a->block_tokens), a->fp16);
    return k_attention_prefill(a, &q, &kv, stream);
}

/* Median microseconds of one launch, `layers` caches used in turn. */
static double time_us(k_attention_args *a, int layers, size_t layer_elements, int decode) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    float ms[REPEATS];
    uint16_t *kv = a->kv;
    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    OK(launch(a, layer_elements, decode, stream)); /* sets the kernel's attributes before capture */
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int l = 0; l < layers; l++) {
        a->kv = kv + (size_t)l * layer_elements;
        OK(launch(a, layer_elements, decode, stream));
    }
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = -3; i < REPEATS; i++) {
        OK(cudaEventRecord(from, stream));
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaEventRecord(to, stream));
        OK(cudaStreamSynchronize(stream));
        if (i >= 0) OK(cudaEventElapsedTime(&ms[i], from, to));
    }
    a->kv = kv;
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(from));
    OK(cudaEventDestroy(to));
    OK(cudaStreamDestroy(stream));
    qsort(ms, REPEATS, sizeof *ms, by_value);
    return (double)ms[REPEATS / 2] * 1e3 / layers;
}

static int sm_count(void) {
    int count = 0;
    OK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

static void run(attention_case c) {
    const int decode = c.rows == 1, tokens = c.before + c.rows,
              per_seq = (tokens + BLOCK - 1) / BLOCK, rows = c.batch * c.rows;
    const int blocks = per_seq * c.batch;
    const size_t layer = (size_t)blocks * 2 * (size_t)(c.kv_heads * BLOCK * c.dim),
                 q_count = (size_t)rows * (size_t)(c.heads * c.dim);
    const int layers = decode ? 1 + (int)(300000000u / (layer * 2)) : 4;
    k_seq *seqs = calloc((size_t)c.batch, sizeof *seqs);
    int32_t *table = calloc((size_t)blocks, 4), *zero = calloc((size_t)rows, 4);
    k_attention_tile *tiles = calloc((size_t)(rows / K_ATTENTION_ROWS + c.batch), sizeof *tiles);
    int tile_count = 0;
    for (int b = 0; b < blocks; b++)
        table[b] = (int32_t)((uint64_t)b * 7919u %
                             (uint64_t)blocks); /* scattered; distinct unless 7919 divides */
    for (int s = 0; s < c.batch; s++)
        seqs[s] = (k_seq){s * c.rows, c.rows, c.before, s * per_seq};
    const int parts = k_attention_splits(tokens), item_count = c.batch * parts;
    k_attention_item *items = calloc((size_t)item_count, sizeof *items);
    for (int i = 0; i < item_count; i++)
        items[i] = (k_attention_item){.row = i / parts * c.rows,
                                      .tokens = tokens,
                                      .first_block = i / parts * per_seq,
                                      .index = i / parts,
                                      .part = i % parts};
    for (int r = (c.rows - 1) / K_ATTENTION_ROWS * K_ATTENTION_ROWS; r >= 0;
         r -= K_ATTENTION_ROWS) /* the longest first */
        for (int s = 0; s < c.batch; s++)
            tiles[tile_count++] = (k_attention_tile){s, r};
    k_attention_args a = {.q = random_half(q_count, c.fp16),
                          .kv = random_half(layer * (size_t)layers, c.fp16),
                          .row_window = upload(zero, (size_t)rows * 4),
                          .seqs = upload(seqs, (size_t)c.batch * sizeof *seqs),
                          .kv_blocks = upload(table, (size_t)blocks * 4),
                          .tiles = upload(tiles, (size_t)tile_count * sizeof *tiles),
                          .decode_items = upload(items, (size_t)item_count * sizeof *items),
                          .decode_count = upload(&item_count, 4),
                          .tile_count = tile_count,
                          .decode_items_max = item_count,
                          .sm_count = sm_count(),
                          .rows = rows,
                          .heads = c.heads,
                          .kv_heads = c.kv_heads,
                          .head_dim = c.dim,
                          .block_tokens = BLOCK,
                          .fp16 = c.fp16 != 0,
                          .scale = 1.f / sqrtf((float)c.dim)};
    const size_t counters = (size_t)(c.batch * c.heads);
    OK(cudaMalloc((void **)&a.out, q_count * 2));
    OK(cudaMalloc((void **)&a.partials, counters * K_ATTENTION_SPLITS * (size_t)(c.dim + 2) * 4));
    OK(cudaMalloc((void **)&a.counters, counters * 4));
    OK(cudaMemset(a.counters, 0, counters * 4));
    const double us = time_us(&a, layers, layer, decode);
    const double pairs =
        (double)c.batch * ((double)c.rows * c.before + (double)c.rows * (c.rows + 1) / 2);
    const double rate = decode ? (double)c.batch * tokens * 2 * c.kv_heads * c.dim * 2 / us * 1e-3
                               : pairs * 4 * c.heads * c.dim / us * 1e-6;
    printf("{\"what\": \"%s\", \"dim\": %d, \"heads\": %d, \"kv_heads\": %d, \"batch\": %d, "
           "\"before\": %d, \"rows\": %d, \"fp16\": %d, \"us\": %.2f, \"rate\": %.1f}\n",
           decode ? "decode" : "prefill", c.dim, c.heads, c.kv_heads, c.batch, c.before, c.rows,
           c.fp16, us, rate);
    fflush(stdout);
    void *device[] = {a.q,
                      a.kv,
                      a.out,
                      a.partials,
                      a.counters,
                      (void *)(uintptr_t)a.row_window,
                      (void *)(uintptr_t)a.seqs,
                      (void *)(uintptr_t)a.kv_blocks,
                      (void *)(uintptr_t)a.tiles,
                      (void *)(uintptr_t)a.decode_count,
                      (void *)(uintptr_t)a.decode_items};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        OK(cudaFree(device[i]));
    free(seqs), free(table), free(items), free(zero), free(tiles);
}

int main(void) {
    static const attention_case cases[] = {
        {128, 32, 8, 1, 0, 512, 0},   {128, 32, 8, 1, 0, 2048, 0},    {128, 32, 8, 1, 0, 8192, 0},
        {128, 32, 8, 4, 0, 2048, 0},  {128, 32, 8, 1, 6144, 2048, 0}, {128, 32, 8, 1, 0, 8192, 1},
        {64, 32, 8, 1, 0, 4096, 0},   {80, 32, 32, 1, 0, 4096, 0},    {96, 32, 32, 1, 0, 4096, 0},
        {256, 16, 8, 1, 0, 4096, 0},  {128, 32, 8, 1, 511, 1, 0},     {128, 32, 8, 1, 8191, 1, 0},
        {128, 32, 8, 16, 2047, 1, 0}, {128, 32, 8, 64, 511, 1, 0},    {128, 32, 8, 64, 2047, 1, 0},
        {128, 32, 8, 64, 8191, 1, 0}, {128, 64, 8, 64, 2047, 1, 0},   {64, 32, 8, 64, 2047, 1, 0},
        {256, 16, 8, 64, 2047, 1, 0}, {96, 32, 32, 16, 2047, 1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        run(cases[i]);
    return 0;
}
