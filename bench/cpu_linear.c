/* cpu_linear.c - how near the CPU backend's linear layers come to the machine: decode against
 * measured memory bandwidth, prefill against the rate of sgemm (OpenBLAS, one thread), base and
 * one-plane variants side by side, in one run. Decode has each row of a variant of its own (up to
 * VARIANTS different ones, then around again) and all rows of one. Every figure is the best of
 * several rounds; the reading loop and sgemm run just before the layers they are compared with. An
 * OpenBLAS that does not know the machine may choose kernels of an older one: OPENBLAS_CORETYPE.
 * Usage: bench_cpu_linear [threads] [hidden] [ffn] [kernels]. */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "backend/cpu/cpu.h"

#define ROUNDS   5
#define ROWS_MAX 512u
#define LAYERS   2u
#define VARIANTS 8u

static uint64_t rng = 88172645463325252u;

static uint32_t next(void) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)(rng >> 32);
}

static void *must_alloc(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (p == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

static void must(bd_status status, const bd_error *err) {
    if (status == BD_OK) return;
    fprintf(stderr, "%s: %s\n", err->subject, err->message);
    exit(1);
}

typedef struct setup {
    bd_model_config config;
    bd_backend *backend;
    bd_cpu *cpu;
    uint16_t *weights;
    uint64_t weight_bytes, plane_bytes;
    bd_overlay overlay[VARIANTS];
    bd_overlay_linear linears[VARIANTS][LAYERS * BD_LINEAR_COUNT];
    bd_segment segments[ROWS_MAX];
    const bd_overlay *overlays[VARIANTS];
    bd_seq seq;
    bd_step step;
    int32_t tokens[ROWS_MAX];
    uint32_t positions[ROWS_MAX], seq_of_row[ROWS_MAX], blocks[ROWS_MAX];
} setup;

/* With one thread the process's CPU time, so that other work on the machine distorts less. */
static double now_seconds(const setup *s) {
    struct timespec t;
    clock_gettime(s->cpu->workers == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t linear_size(const bd_model_config *c, uint32_t which, uint32_t *n, uint32_t *k) {
    const uint32_t kv = c->kv_heads * c->head_dim;
    const uint32_t ns[BD_LINEAR_COUNT] = {c->hidden, kv, kv, c->hidden, c->ffn, c->ffn, c->hidden};
    *n = ns[which];
    *k = which == BD_LINEAR_DOWN ? c->ffn : c->hidden;
    return (uint64_t)*n * *k;
}

static void put_weights(setup *s) {
    bd_error err;
    uint32_t n, k;
    uint64_t total = 0, at = 0;
    for (uint32_t i = 0; i < LAYERS * BD_LINEAR_COUNT; i++)
        total += linear_size(&s->config, i % BD_LINEAR_COUNT, &n, &k);
    s->weights = aligned_alloc((size_t)2 << 20, (total * 2 / (2 << 20) + 1) * (2 << 20));
    if (s->weights == NULL) exit(1);
    /* What they are read from at best, in the pages that the backend's copy has. */
    (void)madvise(s->weights, total * 2, MADV_HUGEPAGE);
    s->weight_bytes = total * 2;
    for (uint64_t i = 0; i < total; i++)
        s->weights[i] = (uint16_t)(0x3c00u + (next() & 0x80ffu)); /* about 0.01 */
    uint8_t *arena = s->backend->ops->delta_arena(s->backend), *bits = must_alloc(total / 8);
    for (uint64_t i = 0; i < total / 8; i++)
        bits[i] = (uint8_t)next();
    for (uint32_t i = 0; i < LAYERS * BD_LINEAR_COUNT; i++) {
        const uint64_t size = linear_size(&s->config, i % BD_LINEAR_COUNT, &n, &k);
        const bd_weight_view view = {BD_DTYPE_BF16, n, k, 2ull * k, s->weights + at};
        const bd_weight_id id = {BD_WEIGHT_LINEAR, i / BD_LINEAR_COUNT, i % BD_LINEAR_COUNT};
        must(s->backend->ops->weight_put(s->backend, id, &view, &err), &err);
        for (uint32_t v = 0; v < VARIANTS; v++) {
            must(s->backend->ops->plane_put(s->backend, arena, n, k, 0, n, bits + at / 8, k / 8,
                                            &err),
                 &err);
            float *scale = (float *)(void *)(arena + bd_cpu_plane_bytes(n, k));
            for (uint32_t j = 0; j < n; j++)
                scale[j] = 1e-3f;
            s->linears[v][i] = (bd_overlay_linear){.plane_count = 1, .planes = {{arena, scale}}};
            arena += bd_cpu_plane_bytes(n, k) + (4ull * n + 63) / 64 * 64;
        }
        s->plane_bytes += bd_cpu_plane_bytes(n, k);
        at += size;
    }
    free(bits);
}

static setup *open_setup(uint32_t threads, uint32_t hidden, uint32_t ffn, const char *kernels) {
    setup *s = calloc(1, sizeof *s);
    bd_error err;
    if (s == NULL) exit(1);
    s->config = (bd_model_config){.hidden = hidden,
                                  .ffn = ffn,
                                  .layers = LAYERS,
                                  .heads = hidden / 64,
                                  .kv_heads = hidden / 64,
                                  .head_dim = 64,
                                  .vocab = 256,
                                  .embed_scale = 1.0f,
                                  .attn_scale = 0.125f,
                                  .rope = {.rotary_dim = 64}};
    const uint64_t weights = LAYERS * (4ull * hidden * hidden + 3ull * hidden * ffn);
    const bd_backend_options o = {.config = &s->config,
                                  .rank_count = 1,
                                  .thread_count = threads,
                                  .rows_max = ROWS_MAX,
                                  .seqs_max = 1,
                                  .logits_rows_max = 1,
                                  .kv_block_tokens = 1,
                                  .kv_block_count = ROWS_MAX,
                                  .max_model_len = ROWS_MAX,
                                  .rope_tables_max = 1,
                                  .delta_bytes =
                                      VARIANTS * ((weights / 4 + (1u << 20)) / 4096 * 4096)};
    must(bd_backend_cpu_ops()->open(&o, &s->backend, &err), &err);
    s->cpu = bd_cpu_of(s->backend);
    must(bd_cpu_kernels_pick(kernels, &s->cpu->kernels, &err), &err);
    put_weights(s);
    float ones[32];
    for (uint32_t i = 0; i < 32; i++)
        ones[i] = 1.0f;
    must(s->backend->ops->rope_table_put(s->backend, 0, ones, 1.0f, &err), &err);
    for (uint32_t v = 0; v < VARIANTS; v++) {
        s->overlay[v] = (bd_overlay){.vocab = 256, .linears = s->linears[v]};
        s->overlays[v] = &s->overlay[v];
    }
    for (uint32_t i = 0; i < ROWS_MAX; i++)
        s->blocks[i] = s->positions[i] = i;
    s->step = (bd_step){.id = 1,
                        .seq_count = 1,
                        .overlay_count = VARIANTS,
                        .tokens = s->tokens,
                        .positions = s->positions,
                        .seq_of_row = s->seq_of_row,
                        .seqs = &s->seq,
                        .segments = s->segments,
                        .overlays = s->overlays};
    s->seq.kv_blocks = s->blocks;
    for (uint32_t i = 0; i < ROWS_MAX * hidden; i++)
        bd_cpu_f32(s->cpu, BD_CPU_NORMED)[i] = (float)(next() & 255u) / 256.0f;
    for (uint32_t i = 0; i < ROWS_MAX * hidden; i++)
        bd_cpu_f32(s->cpu, BD_CPU_ATTN)[i] = (float)(next() & 255u) / 256.0f;
    return s;
}

/* Seconds for all linears of all layers with `rows` rows, in segments of `each` rows (0: the base).
 */
static double time_linears(setup *s, uint32_t rows, uint32_t each) {
    bd_error err;
    double best = 1e9;
    s->step.row_count = s->seq.row_count = rows;
    s->step.segment_count = each == 0 ? 1 : rows / each;
    for (uint32_t i = 0; i < s->step.segment_count; i++) {
        s->segments[i] = each == 0 ? (bd_segment){-1, 0, rows}
                                   : (bd_segment){(int32_t)(i % VARIANTS), i * each, each};
    }
    must(s->backend->ops->step_begin(s->backend, &s->step, &err), &err);
    for (int round = 0; round < ROUNDS; round++) {
        const double start = now_seconds(s);
        for (uint32_t l = 0; l < LAYERS; l++) {
            for (int g = BD_GROUP_QKV; g <= BD_GROUP_DOWN; g++) {
                must(s->backend->ops->linear(s->backend, &s->step, l, (bd_group)g, &err), &err);
            }
        }
        const double seconds = now_seconds(s) - start;
        if (seconds < best) best = seconds;
    }
    return best;
}

typedef struct reading {
    const uint64_t *data;
    uint64_t words, part;
    uint64_t sums[1024];
} reading;

static void read_part(void *ctx, uint32_t index, uint32_t worker) {
    reading *r = ctx;
    const uint64_t *p = r->data + index * r->part;
    const uint64_t quarter = r->part / 4; /* four streams, for the prefetchers' sake */
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (uint64_t i = 0; i + 2 <= quarter; i += 2) {
        a += p[i] ^ p[i + 1];
        b += p[quarter + i] ^ p[quarter + i + 1];
        c += p[2 * quarter + i] ^ p[2 * quarter + i + 1];
        d += p[3 * quarter + i] ^ p[3 * quarter + i + 1];
    }
    r->sums[worker] += a + b + c + d;
}

static double read_bandwidth(setup *s) {
    double best = 0.0;
    reading r = {.data = (const uint64_t *)(const void *)s->weights, .words = s->weight_bytes / 8};
    const uint32_t parts = 64;
    r.part = r.words / parts;
    for (int round = 0; round < ROUNDS; round++) {
        const double start = now_seconds(s);
        bd_pool_parallel_for(s->cpu->pool, parts, read_part, &r);
        const double rate = (double)s->weight_bytes / (now_seconds(s) - start) * 1e-9;
        if (rate > best) best = rate;
    }
    return best;
}

static double sgemm_rate(const setup *s, uint32_t rows, uint32_t n, uint32_t k) {
    float *x = must_alloc(4ull * rows * k), *w = must_alloc(4ull * n * k),
          *y = must_alloc(4ull * rows * n);
    double best = 0.0;
    for (uint64_t i = 0; i < (uint64_t)rows * k; i++)
        x[i] = (float)(next() & 255u);
    for (uint64_t i = 0; i < (uint64_t)n * k; i++)
        w[i] = (float)(next() & 255u);
    for (int round = 0; round < ROUNDS; round++) {
        const double start = now_seconds(s);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)n, (int)k, 1.0f, x,
                    (int)k, w, (int)k, 0.0f, y, (int)n);
        const double rate = 2.0 * rows * n * k / (now_seconds(s) - start) * 1e-9;
        if (rate > best) best = rate;
    }
    free(x), free(w), free(y);
    return best;
}

int main(int argc, char **argv) {
    const uint32_t threads = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 0;
    const uint32_t hidden = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2048;
    const uint32_t ffn = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 8192;
    setup *s = open_setup(threads, hidden, ffn, argc > 4 ? argv[4] : NULL);
    const double bytes = (double)s->weight_bytes, planes = (double)s->plane_bytes,
                 weights = bytes / 2;
    printf("threads %u, kernels %s, hidden %u, ffn %u, %u layers, %.0f MB of bf16 weights\n",
           s->cpu->workers, s->cpu->kernels->name, hidden, ffn, LAYERS, bytes * 1e-6);
    const double bandwidth = read_bandwidth(s);
    printf("memory read: %.2f GB/s\n%8s %8s %10s %10s %12s %12s\n", bandwidth, "rows", "each", "ms",
           "GB/s", "of memory", "vs base");
    const uint32_t decode[] = {1, 2, 4, 7, 8, 15, 16, 24, 32, 48, 64};
    for (size_t i = 0; i < sizeof decode / sizeof decode[0]; i++) {
        const uint32_t rows = decode[i];
        const double base = time_linears(s, rows, 0);
        printf("%8u %8s %10.2f %10.2f %11.0f%%\n", rows, "base", base * 1e3, bytes / base * 1e-9,
               bytes / base * 1e-7 / bandwidth);
        for (uint32_t together = 0; together < (rows > 1 ? 2 : 1); together++) {
            const uint32_t each = together ? rows : 1;
            const double own = time_linears(s, rows, each), read = bytes + planes * (rows / each);
            printf("%8u %8u %10.2f %10.2f %11.0f%% %11.2fx\n", rows, each, own * 1e3,
                   read / own * 1e-9, read / own * 1e-7 / bandwidth, own / base);
        }
    }
    const double blas = sgemm_rate(s, 512, 1024, hidden);
    printf("sgemm, one thread, kernels %s: %.1f GFLOP/s\n%8s %8s %10s %10s %12s %12s\n",
           openblas_get_corename(), blas, "rows", "each", "ms", "GFLOP/s", "of sgemm", "vs base");
    const uint32_t prefill[] = {64, 128, 512};
    for (size_t i = 0; i < sizeof prefill / sizeof prefill[0]; i++) {
        const double flops = 2.0 * weights * prefill[i], all = blas * s->cpu->workers;
        const double base = time_linears(s, prefill[i], 0),
                     own = time_linears(s, prefill[i], prefill[i]);
        printf("%8u %8s %10.2f %10.1f %11.0f%%\n", prefill[i], "base", base * 1e3,
               flops / base * 1e-9, flops / base * 1e-7 / all);
        printf("%8u %8u %10.2f %10.1f %11.0f%% %11.2fx\n", prefill[i], prefill[i], own * 1e3,
               flops / own * 1e-9, flops / own * 1e-7 / all, own / base);
    }
    free(s->weights);
    s->backend->ops->close(s->backend);
    free(s);
    return 0;
}
