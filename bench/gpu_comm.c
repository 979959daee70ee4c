/* bench/gpu_comm.c - the sum over the ranks, with residual and norm, of a decode step: NCCL and
 * then the norm's kernel beside the ranks' own kernel that does both. bench_gpu_comm [RANKS] RANKS:
 * default every power of two of the devices there are, from 2. One CSV row a case: microseconds of
 * one sum and norm, in a CUDA graph of CHAIN of them, each rank a thread that replays its own; the
 * median of REPEATS replays on the slowest rank. norm_us: the norm alone. own_pdl_us: launched as
 * the backend does on sm_90, before the kernel in front has ended. sum_norm_us: the own kernel's
 * sum, then the norm's kernel. Before a case is timed all ranks must have the same bits from the
 * own kernel, and near those of NCCL. At the end: up to how many bytes the own kernel won in every
 * case, which is what cuda_own_bytes may be. Exit status 77: fewer than two devices, or no NCCL. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/peers.h"
#include "bitdelta/backend/cuda.h"
#include "bitdelta/base/half.h"

#define CHAIN   64
#define REPEATS 31
#define WAIT_US 20000000u

enum { NORM, NCCL, OWN, OWN_PDL, SUM_NORM, KINDS };

typedef struct rank {
    uint32_t index;
    pthread_t thread;
    bd_comm *nccl, *own;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    float *residual, *gamma, *host;
    const float **gammas;
    int32_t *overlay;
    uint16_t *proj, *partial, *normed, *host_normed;
    double us[KINDS];
    bool ok;
} rank;

static struct {
    uint32_t ranks, rows, hidden;
    bd_comm_group *nccl, *own;
    rank rank[BD_COMM_RANKS_MAX];
    pthread_barrier_t meet;
} run;

#define CUDA(call)                                                                                 \
    do {                                                                                           \
        const cudaError_t error_ = (call);                                                         \
        if (error_ != cudaSuccess) {                                                               \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_));                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define TRY(call)                                                                                  \
    do {                                                                                           \
        if ((call) != BD_OK) {                                                                     \
            fprintf(stderr, "%s: %s\n", #call, err.message);                                       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void allocate(rank *r) {
    const size_t most = 64u * 8192u;
    CUDA(cudaSetDevice((int)r->index));
    CUDA(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&r->begin));
    CUDA(cudaEventCreate(&r->end));
    CUDA(cudaMalloc((void **)&r->residual, most * 4));
    CUDA(cudaMalloc((void **)&r->gamma, 8192 * 4));
    CUDA(cudaMalloc((void **)&r->gammas, sizeof *r->gammas));
    CUDA(cudaMalloc((void **)&r->overlay, 64 * 4));
    CUDA(cudaMalloc((void **)&r->proj, most * 2));
    CUDA(cudaMalloc((void **)&r->partial, most * 2));
    CUDA(cudaMalloc((void **)&r->normed, most * 2));
    CUDA(cudaMallocHost((void **)&r->host, most * 4));
    CUDA(cudaMallocHost((void **)&r->host_normed, most * 2));
    CUDA(cudaMemset(r->overlay, 0xff, 64 * 4)); /* the base */
    CUDA(cudaMemset(r->residual, 0, most * 4));
    for (uint32_t i = 0; i < 8192; i++)
        r->host[i] = 1;
    CUDA(cudaMemcpy(r->gamma, r->host, 8192 * 4, cudaMemcpyHostToDevice));
    uint64_t state = 88172645463325252ull + r->index;
    for (size_t i = 0; i < most; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        r->host_normed[i] = bd_f32_to_bf16((float)((double)(state >> 11) * 0x1p-53 - 0.5));
    }
    CUDA(cudaMemcpy(r->partial, r->host_normed, most * 2, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
}

static k_norm_args norm_args(const rank *r, bool pdl) {
    return (k_norm_args){.residual = r->residual,
                         .proj = r->proj,
                         .normed = r->normed,
                         .gamma = r->gamma,
                         .gammas = r->gammas,
                         .row_overlay = r->overlay,
                         .rows = (int32_t)run.rows,
                         .width = (int32_t)run.hidden,
                         .add = true,
                         .proj_half = true,
                         .overlap = pdl,
                         .eps = 1e-5f};
}

static void launch(rank *r, int kind) {
    bd_error err = {0};
    const uint64_t count = (uint64_t)run.rows * run.hidden;
    const k_ranks *ranks = cuda_peers_ranks(run.own->device, r->index);
    const k_norm_args args = norm_args(r, kind == OWN_PDL);
    if (kind == NCCL)
        TRY(r->nccl->ops->all_reduce(r->nccl, r->proj, count, BD_COMM_BF16, r->stream, &err));
    if (kind == SUM_NORM)
        CUDA(k_ranks_sum(ranks, r->proj, (uint32_t)count * 2, K_RANKS_BF16, r->stream));
    if (kind == OWN || kind == OWN_PDL)
        CUDA(k_ranks_norm(ranks, &args, r->stream));
    else
        CUDA(k_norm_residual(&args, r->stream));
}

static void reset(rank *r) {
    const size_t count = (size_t)run.rows * run.hidden;
    CUDA(cudaMemcpyAsync(r->proj, r->partial, count * 2, cudaMemcpyDeviceToDevice, r->stream));
    CUDA(cudaMemsetAsync(r->residual, 0, count * 4, r->stream));
}

/* One of each: what the own kernel makes is NCCL's within the roundings of its sum, and the same on
 * all ranks. */
static bool check(rank *r) {
    const size_t count = (size_t)run.rows * run.hidden;
    double error = 0, norm = 0;
    float *nccl = malloc(count * 4);
    reset(r);
    launch(r, NCCL);
    CUDA(cudaMemcpyAsync(r->host, r->residual, count * 4, cudaMemcpyDeviceToHost, r->stream));
    CUDA(cudaStreamSynchronize(r->stream));
    memcpy(nccl, r->host, count * 4);
    reset(r);
    launch(r, OWN);
    CUDA(cudaMemcpyAsync(r->host, r->residual, count * 4, cudaMemcpyDeviceToHost, r->stream));
    CUDA(cudaStreamSynchronize(r->stream));
    for (size_t i = 0; i < count; i++) {
        error += ((double)nccl[i] - (double)r->host[i]) * ((double)nccl[i] - (double)r->host[i]);
        norm += (double)nccl[i] * (double)nccl[i];
    }
    free(nccl);
    pthread_barrier_wait(&run.meet);
    const bool same = memcmp(r->host, run.rank[0].host, count * 4) == 0;
    pthread_barrier_wait(&run.meet);
    return same && norm > 0 && sqrt(error / norm) < 1e-2;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double time_us(rank *r, int kind) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    double us[REPEATS];
    reset(r);
    launch(r, kind); /* connections are made, code is loaded */
    CUDA(cudaStreamSynchronize(r->stream));
    pthread_barrier_wait(&run.meet);
    CUDA(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < CHAIN; i++)
        launch(r, kind);
    CUDA(cudaStreamEndCapture(r->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphUpload(exec, r->stream));
    CUDA(cudaStreamSynchronize(r->stream));
    for (int i = -3; i < REPEATS; i++) {
        float ms = 0;
        pthread_barrier_wait(&run.meet);
        CUDA(cudaEventRecord(r->begin, r->stream));
        CUDA(cudaGraphLaunch(exec, r->stream));
        CUDA(cudaEventRecord(r->end, r->stream));
        CUDA(cudaEventSynchronize(r->end));
        CUDA(cudaEventElapsedTime(&ms, r->begin, r->end));
        if (i >= 0) us[i] = (double)ms * 1e3 / CHAIN;
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    pthread_barrier_wait(&run.meet);
    qsort(us, REPEATS, sizeof *us, by_value);
    return us[REPEATS / 2];
}

static void *open_rank(void *arg) {
    rank *r = arg;
    bd_error err = {0};
    TRY(run.nccl->ops->open(run.nccl, r->index, r->index, &r->nccl, &err));
    TRY(run.own->ops->open(run.own, r->index, r->index, &r->own, &err));
    return NULL;
}

static void *measure(void *arg) {
    rank *r = arg;
    bd_error err = {0};
    CUDA(cudaSetDevice((int)r->index));
    r->ok = check(r);
    for (int kind = 0; kind < KINDS; kind++)
        r->us[kind] = time_us(r, kind);
    TRY(r->nccl->ops->poll(r->nccl, &err));
    TRY(r->own->ops->poll(r->own, &err));
    return NULL;
}

static void on_all(void *(*work)(void *rank)) {
    for (uint32_t i = 0; i < run.ranks; i++)
        if (pthread_create(&run.rank[i].thread, NULL, work, &run.rank[i])) exit(1);
    for (uint32_t i = 0; i < run.ranks; i++)
        pthread_join(run.rank[i].thread, NULL);
}

/* false: the own kernel's sum is wrong. *won: whether it was faster. */
static bool one_case(bool *won) {
    double us[KINDS] = {0};
    bool ok = true;
    on_all(measure);
    for (uint32_t i = 0; i < run.ranks; i++) {
        ok = ok && run.rank[i].ok;
        for (int kind = 0; kind < KINDS; kind++)
            if (run.rank[i].us[kind] > us[kind]) us[kind] = run.rank[i].us[kind];
    }
    printf("%u,%u,%u,%u,%.2f,%.2f,%.2f,%.2f,%.2f,%s\n", run.ranks, run.hidden, run.rows,
           run.rows * run.hidden * 2, us[NORM], us[NCCL], us[OWN], us[OWN_PDL], us[SUM_NORM],
           ok ? "right" : "WRONG");
    fflush(stdout);
    *won = us[OWN] < us[NCCL] && us[OWN_PDL] < us[NCCL];
    return ok;
}

static bool with_ranks(uint32_t ranks) {
    static const uint32_t widths[] = {4096, 8192}, rows[] = {1, 2, 4, 8, 16, 32, 64};
    bd_error err = {0};
    bool ok = true;
    uint32_t least_lost = UINT32_MAX, most_won = 0;
    run.ranks = ranks;
    TRY(bd_comm_nccl_ops()->group_create(ranks, WAIT_US, &run.nccl, &err));
    TRY(bd_comm_p2p_ops()->group_create(ranks, WAIT_US, &run.own, &err));
    pthread_barrier_init(&run.meet, NULL, ranks);
    for (uint32_t i = 0; i < ranks; i++) {
        memset(&run.rank[i], 0, sizeof run.rank[i]);
        run.rank[i].index = i;
        allocate(&run.rank[i]);
    }
    on_all(open_rank);
    for (size_t w = 0; w < 2; w++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            bool won;
            run.hidden = widths[w], run.rows = rows[i];
            const uint32_t bytes = run.hidden * run.rows * 2;
            if (bytes > CUDA_WINDOW_BYTES) continue;
            ok = one_case(&won) && ok;
            if (!won && bytes < least_lost) least_lost = bytes;
            if (won && bytes > most_won) most_won = bytes;
        }
    while (most_won >= least_lost)
        most_won /= 2;
    printf("# %u ranks: the own kernel wins up to %u bytes\n", ranks, most_won);
    for (uint32_t i = 0; i < ranks; i++) {
        bd_comm_nccl_ops()->close(run.rank[i].nccl);
        bd_comm_p2p_ops()->close(run.rank[i].own);
    }
    bd_comm_nccl_ops()->group_destroy(run.nccl);
    bd_comm_p2p_ops()->group_destroy(run.own);
    pthread_barrier_destroy(&run.meet);
    return ok;
}

int main(int argc, char **argv) {
    bd_error err = {0};
    bd_comm_group *group;
    int devices = 0;
    bool ok = true;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2) {
        fprintf(stderr, "fewer than two devices: skipped\n");
        return 77;
    }
    if (bd_comm_nccl_ops()->group_create(2, WAIT_US, &group, &err) != BD_OK) {
        fprintf(stderr, "skipped: %s\n", err.message);
        return 77;
    }
    bd_comm_nccl_ops()->group_destroy(group);
    const uint32_t only = argc > 1 ? (uint32_t)atoi(argv[1]) : 0;
    printf("ranks,hidden,rows,bytes,norm_us,nccl_us,own_us,own_pdl_us,sum_norm_us,check\n");
    for (uint32_t ranks = 2; ranks <= (uint32_t)devices && ranks <= BD_COMM_RANKS_MAX; ranks *= 2)
        if (!only || only == ranks) ok = with_ranks(ranks) && ok;
    return ok ? 0 : 1;
}
