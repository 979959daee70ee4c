/* bench/gpu_model.c - whole steps of a model of random weights on one GPU or split over several:
 * time of a step from its tables to its tokens on all ranks.
 *
 *   bench_gpu_model [small|8b|70b] [bf16|fp16] [RANKS]     one CSV row a case
 *
 * RANKS: default 1; each has a thread and a GPU, as in serve. Weights and 14 deltas are made on the
 * GPUs, all memory their own: a block of random numbers, over and over. Of deltas and KV as much as
 * fits by the backend's plan, which is compared with what the GPUs have in use at the end.
 *
 * decode: greedy; sampled: top_k 50, top_p 0.9; prefill: of one prompt, or with several variants of
 * a prompt each; mixed: two prompts' tokens and one more of each of the other sequences. us: as
 * served, recorded where a recording fits; launched_us: without recordings. Of several ranks also
 * nccl_us, all sums by NCCL; twice_us, every sum of the ranks made once more, right after it, as
 * large and by the same means, of zeros that nobody reads; sums_share: what that adds, of us. The
 * step computes what it always does. The ranks have just met then: it is what sums take, with the
 * launch of a kernel each, not what a rank that is ahead waits for the other. Wall-clock medians;
 * every step reads all weights, so nothing stays in a cache between them. Exit status 77: fewer
 * GPUs than ranks, no NCCL, or too little memory. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include "../tests/gpu/gpu_model.h"
#include "backend/cuda/cuda_internal.h"
#include "bitdelta/model/model.h"
#include "bitdelta/model/overlay.h"

#define REPEATS     15
#define REPEATS_FEW 7 /* of steps beyond SHORT_US */
#define SHORT_US    20000
#define WAIT_US     30000000u
#define NOISE_BYTES (64u << 20)
#define ROWS_MAX    2048u
#define SEQS_MAX    256u
#define CONTEXT     512u
#define SPARE_BYTES (1ull << 30) /* so that a plan that leaves too little is seen, not run into */

typedef enum sums { AS_SERVED, BY_NCCL, TWICE, SUMS } sums;

typedef struct rank {
    uint32_t index;
    pthread_t thread;
    gpu_model m;
    bd_model_config local;
    bd_comm *comm;
    void *zeros; /* what is summed a second time */
    const bd_step *step;
    double host_us; /* until the step was launched */
    bd_token_result results[SEQS_MAX];
    bd_status status;
    bd_error error;
} rank;

static struct {
    const char *name;
    gpu_shape shape;
    bd_model_config config;
    uint32_t count;
    bd_comm_group *group;
    bd_backend_ops twice; /* the backend's, with every sum made twice */
    uint16_t *noise;      /* elements in the weights' type */
    uint8_t *signs;
    sums sums;
    pthread_mutex_t lock;
    pthread_cond_t posted, done;
    uint64_t job;
    uint32_t left;
    size_t served_free[BD_COMM_RANKS_MAX]; /* device memory once recorded as served */
    void (*act)(rank *r);
    rank ranks[BD_COMM_RANKS_MAX];
} all = {.lock = PTHREAD_MUTEX_INITIALIZER,
         .posted = PTHREAD_COND_INITIALIZER,
         .done = PTHREAD_COND_INITIALIZER};

/* ---- Ranks as threads ---- */

static void *rank_main(void *arg) {
    rank *r = arg;
    for (uint64_t done = 0;; done++) {
        pthread_mutex_lock(&all.lock);
        while (all.job == done)
            pthread_cond_wait(&all.posted, &all.lock);
        void (*const act)(rank *) = all.act;
        pthread_mutex_unlock(&all.lock);
        act(r);
        pthread_mutex_lock(&all.lock);
        if (--all.left == 0) pthread_cond_signal(&all.done);
        pthread_mutex_unlock(&all.lock);
    }
    return NULL;
}

static void on_all(const char *what, void (*act)(rank *r)) {
    pthread_mutex_lock(&all.lock);
    all.act = act;
    all.left = all.count - 1;
    all.job++;
    pthread_cond_broadcast(&all.posted);
    pthread_mutex_unlock(&all.lock);
    act(&all.ranks[0]);
    pthread_mutex_lock(&all.lock);
    while (all.left > 0)
        pthread_cond_wait(&all.done, &all.lock);
    pthread_mutex_unlock(&all.lock);
    for (uint32_t r = 0; r < all.count; r++) {
        if (all.ranks[r].status == BD_OK) continue;
        fprintf(stderr, "error: %s, rank %u: %s\n", what, r, all.ranks[r].error.message);
        _exit(1); /* the others may hang */
    }
}

/* On a rank's thread: goes on only if all went well, and tells the others. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        if (r->status == BD_OK && (r->status = (call)) != BD_OK && all.group)                      \
            all.group->ops->abort(all.group);                                                      \
    } while (0)
#define CUDA(call) TRY(cuda_check(NULL, (call), #call, &r->error))

static bd_cuda *cuda_of_rank(const rank *r) {
    return (bd_cuda *)r->m.backend;
}

/* ---- The model ---- */

static bool shape_from(const char *name) {
    static const struct {
        const char *name;
        gpu_shape shape;
    } shapes[] = {
        {"small", {1024, 8, 16, 4, 64, 2816, 32000, 14, ROWS_MAX, SEQS_MAX, 8192, 0, 0, 0, 0}},
        {"8b", {4096, 32, 32, 8, 128, 14336, 128256, 14, ROWS_MAX, SEQS_MAX, 8192, 0, 0, 0, 0}},
        {"70b", {8192, 80, 64, 8, 128, 28672, 128256, 14, ROWS_MAX, SEQS_MAX, 8192, 0, 0, 0, 0}}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(name, shapes[i].name) == 0)
            all.name = shapes[i].name, all.shape = shapes[i].shape;
    return all.name != NULL;
}

/* As serve takes for a slot. */
static uint64_t variant_bytes(const rank *r) {
    return bd_overlay_pages_per_variant(&r->local, r->m.ops, 1, true) *
           (uint64_t)bd_overlay_page_bytes(&r->local, r->m.ops);
}

/* Rows of the vocabulary in a page, about as in serve. */
static uint32_t head_rows(const rank *r) {
    const uint64_t page = bd_overlay_page_bytes(&r->local, r->m.ops);
    return (uint32_t)(page / (r->local.hidden / 8 + 4) / 128 * 128);
}

static void configure(rank *r, uint32_t index) {
    const gpu_shape *s = &all.shape;
    bd_error err;
    r->index = index;
    r->m.ops = bd_backend_cuda_ops();
    GPU_MODEL_TRY(bd_model_rank_config(&all.config, index, all.count, &r->local, &err));
    r->m.config = r->local;
    r->m.variant_count = s->variants;
    r->m.options = (bd_backend_options){.config = &r->local,
                                        .rank = index,
                                        .rank_count = all.count,
                                        .vocab_total = s->vocab,
                                        .vocab_each = s->vocab / all.count,
                                        .vocab_first = index * (s->vocab / all.count),
                                        .device_index = index,
                                        .rows_max = s->rows,
                                        .seqs_max = s->seqs,
                                        .logits_rows_max = s->seqs,
                                        .kv_block_tokens = GPU_MODEL_BLOCK,
                                        .kv_block_count = s->blocks,
                                        .max_model_len = s->len,
                                        .rope_tables_max = 1,
                                        .dtype = s->dtype};
    r->m.options.vocab_block_rows = head_rows(r);
    r->m.options.delta_bytes = s->variants * variant_bytes(r);
}

/* As many blocks of KV as the cases want, then fewer, then fewer variants. false: the weights alone
 * are too much. */
static bool size_all(bd_memory_plan plans[]) {
    const uint32_t want = SEQS_MAX * ((CONTEXT + 1 + GPU_MODEL_BLOCK) / GPU_MODEL_BLOCK),
                   least = SEQS_MAX * 8;
    uint64_t left = UINT64_MAX, each = 0;
    bd_error err;
    for (;; all.shape.variants--) {
        for (uint32_t i = 0; i < all.count; i++) {
            bd_memory_plan none, one;
            all.shape.blocks = 0;
            configure(&all.ranks[i], i);
            bd_backend_options o = all.ranks[i].m.options;
            GPU_MODEL_TRY(bd_backend_cuda_ops()->plan(&o, &none, &err));
            o.kv_block_count = 1;
            GPU_MODEL_TRY(bd_backend_cuda_ops()->plan(&o, &one, &err));
            each = one.kv - none.kv;
            const uint64_t here = none.available > none.total + SPARE_BYTES
                                      ? (none.available - none.total - SPARE_BYTES) / each
                                      : 0;
            if (i == 0 || here < left) left = here;
            plans[i] = none;
        }
        if (left >= least || all.shape.variants == 0) break;
    }
    if (left < least) {
        fprintf(stderr,
                "skipped: %" PRIu64 " MiB a GPU, without KV, are too much for %" PRIu64 "\n",
                plans[0].total >> 20, plans[0].available >> 20);
        return false;
    }
    all.shape.blocks = left < want ? (uint32_t)left : want;
    for (uint32_t i = 0; i < all.count; i++) {
        configure(&all.ranks[i], i);
        GPU_MODEL_TRY(bd_backend_cuda_ops()->plan(&all.ranks[i].m.options, &plans[i], &err));
    }
    return true;
}

static void make_noise(void) {
    uint64_t state = 88172645463325252ull;
    all.noise = malloc(NOISE_BYTES);
    all.signs = malloc(NOISE_BYTES);
    if (!all.noise || !all.signs) exit(1);
    for (uint32_t i = 0; i < NOISE_BYTES / 8; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        memcpy(all.signs + 8ull * i, &state, 8);
        for (uint32_t k = 0; k < 4; k++) {
            const float v = ((float)(uint16_t)(state >> (16 * k)) / 65536.0f - 0.5f) * 0.06f;
            all.noise[4 * i + k] =
                all.shape.dtype == BD_DTYPE_F16 ? bd_f32_to_f16(v) : bd_f32_to_bf16(v);
        }
    }
}

/* The block from the host once, then twice as much each time. An odd number of rows is left of it,
 * so that layers differ. */
static void fill(rank *r, uint8_t *to, uint64_t bytes, const void *block) {
    const cudaStream_t stream = cuda_of_rank(r)->stream;
    uint64_t have = NOISE_BYTES - 1234 * 2;
    if (have > bytes) have = bytes;
    CUDA(cudaMemcpyAsync(to, block, have, cudaMemcpyHostToDevice, stream));
    for (; have < bytes;) {
        const uint64_t n = bytes - have < have ? bytes - have : have;
        CUDA(cudaMemcpyAsync(to + have, to, n, cudaMemcpyDeviceToDevice, stream));
        have += n;
    }
    CUDA(cudaStreamSynchronize(stream));
}

static void put_norms(rank *r) {
    const bd_model_config *c = &r->local;
    float *ones = malloc((size_t)c->hidden * 4), inv_freq[128];
    for (uint32_t i = 0; i < c->hidden; i++)
        ones[i] = 1;
    const bd_weight_view gamma = {.dtype = BD_DTYPE_F32,
                                  .rows = 1,
                                  .cols = c->hidden,
                                  .row_stride_bytes = 4ull * c->hidden,
                                  .data = ones};
    for (uint32_t l = 0; l <= c->layers; l++)
        for (uint32_t kind = 0; kind < BD_NORM_Q; kind++) {
            const bd_weight_id id = {.kind = BD_WEIGHT_NORM, .layer = l, .which = kind};
            TRY(r->m.ops->weight_put(r->m.backend, id, &gamma, &r->error));
        }
    for (uint32_t i = 0; i < c->head_dim / 2; i++)
        inv_freq[i] = (float)pow(c->rope.theta, -2.0 * i / c->head_dim);
    TRY(r->m.ops->rope_table_put(r->m.backend, 0, inv_freq, 1, &r->error));
    free(ones);
}

/* A variant's planes, its head's too, laid out as gpu_model_variant does; the signs are there, a
 * layer's scales come behind them. */
static void put_variant(rank *r, uint32_t v, uint8_t *at) {
    gpu_model *m = &r->m;
    const bd_model_config *c = &r->local;
    const cuda_shape *s = &cuda_of_rank(r)->shape;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++)
        rows += s->linear_n[i];
    const uint32_t vocab = s->vocab, block_rows = m->options.vocab_block_rows,
                   most = rows > block_rows ? rows : block_rows;
    float *scales = malloc(4ull * most);
    for (uint32_t i = 0; i < most; i++)
        scales[i] = 0.0008f * (0.5f + (float)((i * 2654435761u + v) % 1000u) / 1000.0f);
    const uint32_t blocks = (vocab + block_rows - 1) / block_rows;
    m->linears[v] = calloc((size_t)c->layers * BD_LINEAR_COUNT + blocks, sizeof(bd_overlay_linear));
    bd_overlay_linear *head = &m->linears[v][c->layers * BD_LINEAR_COUNT];
    for (uint32_t l = 0; l < c->layers; l++) {
        bd_overlay_linear *linears = &m->linears[v][l * BD_LINEAR_COUNT];
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++) {
            linears[i] = (bd_overlay_linear){.plane_count = 1, .planes[0].bits = at};
            at += m->ops->plane_bytes(s->linear_n[i], s->linear_k[i]);
        }
        TRY(m->ops->vector_put(m->backend, at, 0, scales, rows, &r->error));
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; at += 4ull * s->linear_n[i++])
            linears[i].planes[0].scale = (const float *)(const void *)at;
        at += (4096 - (size_t)at % 4096) % 4096;
    }
    for (uint32_t b = 0; b < blocks; b++) {
        const uint32_t here =
            vocab - b * block_rows < block_rows ? vocab - b * block_rows : block_rows;
        head[b] = (bd_overlay_linear){.plane_count = 1, .planes[0].bits = at};
        at += m->ops->plane_bytes(here, c->hidden);
        TRY(m->ops->vector_put(m->backend, at, 0, scales, here, &r->error));
        head[b].planes[0].scale = (const float *)(const void *)at;
        at += (4096 + 4ull * here) / 4096 * 4096;
    }
    m->overlays[v] = (bd_overlay){.vocab = c->vocab,
                                  .linears = m->linears[v],
                                  .head = head,
                                  .block_rows = block_rows,
                                  .block_count = blocks};
    free(scales);
}

static void open_rank(rank *r) {
    gpu_model *m = &r->m;
    if (all.group) TRY(all.group->ops->open(all.group, r->index, r->index, &r->comm, &r->error));
    m->options.comm = r->comm;
    TRY(m->ops->open(&m->options, &m->backend, &r->error));
    if (r->status != BD_OK) return;
    bd_cuda *cuda = cuda_of_rank(r);
    fill(r, cuda->weights, cuda->plan.weights, all.noise);
    put_norms(r);
    if (!m->variant_count) return;
    uint8_t *arena = m->ops->delta_arena(m->backend);
    fill(r, arena, m->options.delta_bytes, all.signs);
    for (uint32_t v = 0; v < m->variant_count; v++)
        put_variant(r, v, arena + v * variant_bytes(r));
    TRY(m->ops->put_flush(m->backend, &r->error));
}

static void close_rank(rank *r) {
    (void)cudaFree(r->zeros);
    r->m.ops->close(r->m.backend);
    for (uint32_t v = 0; v < r->m.variant_count; v++)
        free(r->m.linears[v]);
}

/* ---- How sums are made ---- */

static bd_status sum_again(bd_backend *backend, const bd_step *step, bool half, bd_error *err) {
    bd_cuda *cuda = (bd_cuda *)backend;
    const uint64_t count = (uint64_t)step->row_count * cuda->shape.hidden;
    const bd_comm_type type = !half ? BD_COMM_F32 : cuda->fp16 ? BD_COMM_F16 : BD_COMM_BF16;
    uint32_t r = 0;
    while (all.ranks[r].m.backend != backend)
        r++;
    return cuda_ranks_sum(cuda, all.ranks[r].zeros, count, type, err);
}

static bd_status embed_twice(bd_backend *backend, const bd_step *step, bd_error *err) {
    const bd_status s = bd_backend_cuda_ops()->embed(backend, step, err);
    if (s != BD_OK || ((bd_cuda *)backend)->replay) return s;
    return sum_again(backend, step, false, err);
}

static bd_status norm_twice(bd_backend *backend, const bd_step *step, uint32_t layer, bd_norm kind,
                            bool add, uint32_t post_layer, bd_norm post, bd_error *err) {
    const bd_cuda *cuda = (bd_cuda *)backend;
    const bool summed = add && cuda->proj_partial, half = cuda->proj_half;
    const bd_status s = bd_backend_cuda_ops()->norm_residual(backend, step, layer, kind, add,
                                                             post_layer, post, err);
    return s != BD_OK || cuda->replay || !summed ? s : sum_again(backend, step, half, err);
}

static void set_sums(rank *r) {
    bd_cuda *cuda = cuda_of_rank(r);
    if (!r->comm) return;
    cuda->own_bytes = all.sums == BY_NCCL ? 0 : cuda_peers_own_bytes(all.group->device);
    r->m.ops = all.sums == TWICE ? &all.twice : bd_backend_cuda_ops();
    if (all.sums != TWICE || r->zeros) return;
    const size_t bytes = 4ull * ROWS_MAX * all.shape.hidden;
    CUDA(cudaSetDevice((int)r->index));
    CUDA(cudaMalloc(&r->zeros, bytes));
    CUDA(cudaMemset(r->zeros, 0, bytes));
    CUDA(cudaDeviceSynchronize());
}

static void record(rank *r) {
    CUDA(cudaSetDevice((int)r->index));
    cuda_graphs_close(cuda_of_rank(r));
    TRY(r->m.ops->record(r->m.backend, gpu_model_forward, &r->m, &r->error));
}

/* ---- Cases ---- */

typedef struct bench_case {
    const char *what;
    uint32_t seqs, rows_each, before, variants;
    bool all_sums; /* timed with every way of summing */
    double us[SUMS], launched_us, host_us[SUMS];
} bench_case;

static bench_case cases[] = {
    {"decode", 1, 1, CONTEXT, 0, true, {0}, 0, {0}},
    {"decode", 1, 1, CONTEXT, 1, true, {0}, 0, {0}},
    {"decode", 16, 1, CONTEXT, 0, true, {0}, 0, {0}},
    {"decode", 16, 1, CONTEXT, 1, false, {0}, 0, {0}},
    {"decode", 16, 1, CONTEXT, 6, false, {0}, 0, {0}},
    {"decode", 16, 1, CONTEXT, 14, true, {0}, 0, {0}},
    {"decode", 64, 1, CONTEXT, 0, true, {0}, 0, {0}},
    {"decode", 64, 1, CONTEXT, 1, false, {0}, 0, {0}},
    {"decode", 32, 1, CONTEXT, 8, false, {0}, 0, {0}},
    {"decode", 64, 1, CONTEXT, 6, false, {0}, 0, {0}},
    {"decode", 64, 1, CONTEXT, 14, true, {0}, 0, {0}},
    {"decode", 256, 1, CONTEXT, 0, true, {0}, 0, {0}},
    {"decode", 256, 1, CONTEXT, 1, false, {0}, 0, {0}},
    {"decode", 256, 1, CONTEXT, 6, false, {0}, 0, {0}},
    {"decode", 256, 1, CONTEXT, 14, true, {0}, 0, {0}},
    {"sampled", 64, 1, CONTEXT, 0, false, {0}, 0, {0}},
    {"prefill", 1, 512, 0, 0, true, {0}, 0, {0}},
    {"prefill", 1, 512, 0, 1, false, {0}, 0, {0}},
    {"prefill", 1, 2048, 0, 0, true, {0}, 0, {0}},
    {"prefill", 1, 2048, 0, 1, false, {0}, 0, {0}},
    {"prefill", 8, 256, 0, 8, false, {0}, 0, {0}},
    {"prefill", 8, 64, 0, 0, false, {0}, 0, {0}},
    {"prefill", 8, 64, 0, 8, false, {0}, 0, {0}},
    {"mixed", 26, 244, CONTEXT, 0, false, {0}, 0, {0}},
    {"mixed", 26, 244, CONTEXT, 8, false, {0}, 0, {0}},
};
enum { CASES = sizeof cases / sizeof *cases };

/* What there is no room for is cut: contexts, and cases of more variants. */
static bool fits(bench_case *c) {
    const uint32_t blocks = all.shape.blocks / c->seqs;
    if (c->variants > all.shape.variants) return false;
    if ((c->before + c->rows_each + GPU_MODEL_BLOCK) / GPU_MODEL_BLOCK > blocks)
        c->before = blocks * GPU_MODEL_BLOCK - GPU_MODEL_BLOCK - c->rows_each;
    return true;
}

/* Two prompts of rows_each tokens, of two variants, beside the others' next tokens: as served. */
#define PROMPTS 2u
static gpu_batch *mixed_batch(rank *r, const bench_case *c) {
    gpu_seq list[SEQS_MAX];
    uint32_t count = 0;
    for (uint32_t v = 0; v < (c->variants ? c->variants : 1); v++) {
        const int32_t overlay = c->variants ? (int32_t)v : -1;
        for (uint32_t p = 0; p < PROMPTS; p++)
            if (!c->variants || p == v) list[count++] = (gpu_seq){c->rows_each, 0, overlay};
        for (uint32_t s = 0; s < c->seqs - PROMPTS; s++)
            if (!c->variants || s % c->variants == v)
                list[count++] = (gpu_seq){1, c->before, overlay};
    }
    return gpu_batch_of(&r->m, count, list, c->variants);
}

static bool is_mixed(const bench_case *c) {
    return strcmp(c->what, "mixed") == 0;
}

static uint32_t rows_of(const bench_case *c) {
    return is_mixed(c) ? PROMPTS * (c->rows_each - 1) + c->seqs : c->seqs * c->rows_each;
}

static gpu_batch *batch_of(rank *r, const bench_case *c) {
    gpu_batch *b = is_mixed(c)
                       ? mixed_batch(r, c)
                       : gpu_batch_make(&r->m, c->seqs, c->rows_each, c->before, c->variants);
    const bool sampled = strcmp(c->what, "sampled") == 0;
    for (uint32_t i = 0; i < b->seqs; i++) {
        b->seq[i].sampling = (bd_sampling){.top_p = 1, .seed = i};
        if (sampled)
            b->seq[i].sampling =
                (bd_sampling){.temperature = 0.8f, .top_p = 0.9f, .top_k = 50, .seed = i};
        b->logits[i].top_count = 0;
    }
    return b;
}

static void run_step(rank *r) {
    const uint64_t from = bd_now_us();
    TRY(gpu_model_forward(&r->m, r->step, &r->error));
    r->host_us = (double)(bd_now_us() - from);
    TRY(r->m.ops->step_wait(r->m.backend, r->step, bd_now_us() + WAIT_US, r->results, &r->error));
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Median microseconds of a step, and of launching it on rank 0. */
static double time_us(const bench_case *c, double *host_us) {
    double us[REPEATS], host[REPEATS];
    gpu_batch *batches[BD_COMM_RANKS_MAX];
    int repeats = REPEATS;
    for (uint32_t r = 0; r < all.count; r++) {
        batches[r] = batch_of(&all.ranks[r], c);
        all.ranks[r].step = &batches[r]->step;
    }
    for (int i = -2; i < repeats; i++) {
        const uint64_t from = bd_now_us();
        on_all(c->what, run_step);
        const double took = (double)(bd_now_us() - from);
        if (i >= 0) us[i] = took, host[i] = all.ranks[0].host_us;
        if (i == -1 && took > SHORT_US) repeats = REPEATS_FEW;
    }
    for (uint32_t r = 0; r < all.count; r++)
        gpu_batch_free(batches[r]);
    qsort(us, (size_t)repeats, sizeof *us, by_value);
    qsort(host, (size_t)repeats, sizeof *host, by_value);
    *host_us = host[repeats / 2];
    return us[repeats / 2];
}

static void served_memory(void) {
    size_t there;
    for (uint32_t r = 0; r < all.count; r++)
        if (cudaSetDevice((int)r) != cudaSuccess ||
            cudaMemGetInfo(&all.served_free[r], &there) != cudaSuccess)
            exit(1);
    (void)cudaSetDevice(0);
}

static void run_cases(void) {
    for (int i = 0; i < CASES; i++)
        if (fits(&cases[i]) && cases[i].seqs <= CUDA_GRAPH_ROWS_MAX && cases[i].rows_each == 1)
            cases[i].launched_us = time_us(&cases[i], &cases[i].host_us[0]);
    for (all.sums = AS_SERVED; all.sums < (all.count > 1 ? SUMS : BY_NCCL); all.sums++) {
        const uint64_t from = bd_now_us();
        on_all("sums", set_sums);
        on_all("recording", record);
        fprintf(stderr, "recorded in %.2f s\n", (double)(bd_now_us() - from) * 1e-6);
        for (int i = 0; i < CASES; i++)
            if (fits(&cases[i]) && (all.sums == AS_SERVED || cases[i].all_sums))
                cases[i].us[all.sums] = time_us(&cases[i], &cases[i].host_us[all.sums]);
        if (all.sums == AS_SERVED) served_memory();
    }
    all.sums = AS_SERVED;
    on_all("sums", set_sums);
}

static void print_case(const bench_case *c) {
    const double us = c->us[AS_SERVED];
    printf("%s,%s,%s,%u,%u,%u,%u,%.0f,%.1f,", c->what, all.name,
           all.shape.dtype == BD_DTYPE_F16 ? "fp16" : "bf16", all.count, c->seqs,
           c->before + (is_mixed(c) ? 1 : c->rows_each), c->variants, us, rows_of(c) * 1e6 / us);
    if (c->launched_us > 0) printf("%.0f", c->launched_us);
    if (c->us[TWICE] > 0)
        printf(",%.0f,%.0f,%.3f", c->us[BY_NCCL], c->us[TWICE], c->us[TWICE] / us - 1);
    else
        printf(",,,");
    printf(",%.0f\n", c->host_us[AS_SERVED]);
}

static void print_memory(const bd_memory_plan plans[], const size_t before[]) {
    for (uint32_t r = 0; r < all.count; r++) {
        const bd_memory_plan *p = &plans[r];
        size_t left = 0, there = 0;
        if (cudaSetDevice((int)r) != cudaSuccess || cudaMemGetInfo(&left, &there) != cudaSuccess)
            exit(1);
        const uint64_t used = there - left;
        printf("# rank %u, MiB: planned %" PRIu64 " (weights %" PRIu64 ", %u deltas %" PRIu64
               ", KV of %u tokens %" PRIu64 ", workspace and logits %" PRIu64 "); in use %" PRIu64
               " of %" PRIu64 ", %" PRIu64 " beyond the plan, of which %" PRIu64
               " before anything was opened and %" PRIu64
               " once recorded as served; the plan leaves %" PRIu64 " for what is opened\n",
               r, p->total >> 20, p->weights >> 20, all.shape.variants, p->deltas >> 20,
               all.shape.blocks * GPU_MODEL_BLOCK, p->kv >> 20, (p->workspace + p->logits) >> 20,
               used >> 20, (uint64_t)there >> 20, (used - p->total) >> 20,
               (uint64_t)(there - before[r]) >> 20,
               (uint64_t)(there - all.served_free[r] - p->total) >> 20,
               cuda_unplanned_bytes(&all.ranks[r].m.options) >> 20);
    }
}

static void usage(void) {
    fprintf(stderr, "bench_gpu_model [small|8b|70b] [bf16|fp16] [RANKS]\n");
    exit(2);
}

/* false: not here. */
static bool start(void) {
    bd_error err;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || (uint32_t)devices < all.count) {
        fprintf(stderr, "skipped: %u ranks, %d GPUs\n", all.count, devices);
        return false;
    }
    if (all.count == 1) return true;
    const bd_comm_ops *ops = bd_comm_nccl_ops();
    if (ops->group_create(all.count, WAIT_US, &all.group, &err) != BD_OK) {
        fprintf(stderr, "skipped: %s\n", err.message);
        return false;
    }
    all.twice = *bd_backend_cuda_ops();
    all.twice.embed = embed_twice;
    all.twice.norm_residual = norm_twice;
    return true;
}

static void finish(void) {
    for (uint32_t r = 0; r < all.count; r++)
        close_rank(&all.ranks[r]); /* before the comms, which recordings may use */
    for (uint32_t r = 0; r < all.count && all.group; r++)
        all.group->ops->close(all.ranks[r].comm);
    if (all.group) all.group->ops->group_destroy(all.group);
    free(all.noise);
    free(all.signs);
}

int main(int argc, char **argv) {
    bd_memory_plan plans[BD_COMM_RANKS_MAX];
    size_t before[BD_COMM_RANKS_MAX], there;
    if (!shape_from(argc > 1 ? argv[1] : "small")) usage();
    if (argc > 2 && strcmp(argv[2], "fp16") && strcmp(argv[2], "bf16")) usage();
    all.count = argc > 3 ? (uint32_t)atoi(argv[3]) : 1;
    if (all.count < 1 || all.count > BD_COMM_RANKS_MAX || (all.count & (all.count - 1))) usage();
    all.shape.dtype = argc > 2 && strcmp(argv[2], "fp16") == 0 ? BD_DTYPE_F16 : BD_DTYPE_BF16;
    const gpu_shape *s = &all.shape;
    all.config = (bd_model_config){.hidden = s->hidden,
                                   .layers = s->layers,
                                   .heads = s->heads,
                                   .kv_heads = s->kv_heads,
                                   .head_dim = s->head_dim,
                                   .ffn = s->ffn,
                                   .vocab = s->vocab,
                                   .max_positions = s->len,
                                   .norm_eps = 1e-5f,
                                   .embed_scale = 1,
                                   .attn_scale = (float)(1 / sqrt(s->head_dim)),
                                   .rope = {.theta = 500000, .rotary_dim = s->head_dim}};
    if (!start()) return 77;
    for (uint32_t r = 0; r < all.count; r++)
        if (cudaSetDevice((int)r) != cudaSuccess || cudaMemGetInfo(&before[r], &there)) return 1;
    if (!size_all(plans)) return 77;
    make_noise();
    for (uint32_t r = 1; r < all.count; r++)
        if (pthread_create(&all.ranks[r].thread, NULL, rank_main, &all.ranks[r])) return 1;
    const uint64_t from = bd_now_us();
    on_all("opening", open_rank);
    fprintf(stderr, "opened in %.1f s\n", (double)(bd_now_us() - from) * 1e-6);
    run_cases();
    printf("what,model,dtype,ranks,batch,context,variants,us,tokens_per_s,launched_us,nccl_us,"
           "twice_us,sums_share,host_us\n");
    for (int i = 0; i < CASES; i++)
        if (fits(&cases[i])) print_case(&cases[i]);
    print_memory(plans, before);
    finish();
    return 0;
}
