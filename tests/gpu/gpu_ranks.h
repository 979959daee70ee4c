/* gpu_ranks.h - ranks of one process for tests and benchmarks: a thread each, on as many devices as there are, rank r on device
 * r modulo their number. Comms: "p2p" (the ranks' own kernels, also with a device shared), "nccl", and "nccl-own": NCCL with windows
 * beside it, so that what is small is summed by the own kernels. The last two want a device per rank. */
#ifndef BD_GPU_RANKS_H
#define BD_GPU_RANKS_H

#include <dlfcn.h>
#include <pthread.h>

#include "gpu_test.h"

#include "../../src/backend/cuda/cuda_internal.h"
#include "bitdelta/base/clock.h"

enum { RANKS_P2P, RANKS_NCCL, RANKS_NCCL_OWN, RANKS_KINDS };
static const char *const ranks_kind_names[RANKS_KINDS] = {"p2p", "nccl", "nccl-own"};
static int ranks_devices; /* set by ranks_begin */

/* Before the first CUDA call: code that is loaded late, or streams that share a queue, would wait for kernels that wait for them
 * where ranks share a device. */
static inline void ranks_begin(int argc, char **argv) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    gpu_test_begin(argc, argv);
    CUDA_OK(cudaGetDeviceCount(&ranks_devices));
    printf("%d devices\n", ranks_devices);
}

/* Why not, or NULL. */
static inline const char *ranks_refusal(int kind, uint32_t count) {
    if (kind == RANKS_P2P) return count > 4u * (uint32_t)ranks_devices ? "too many ranks for a device" : NULL;
    if (count > (uint32_t)ranks_devices) return "NCCL wants a device per rank";
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) return "libnccl.so.2 is not here";
    dlclose(library);
    return NULL;
}

/* ---- The tables, with the devices mapped ---- */

static inline bd_status ranks_p2p_open(bd_comm_group *group, uint32_t rank, uint32_t device, bd_comm **out, bd_error *err) {
    return bd_comm_p2p_ops()->open(group, rank, device % (uint32_t)ranks_devices, out, err);
}
static inline const bd_comm_ops *ranks_p2p_ops(void) {
    static bd_comm_ops ops; /* first asked for by the main thread */
    if (ops.name) return &ops;
    ops = *bd_comm_p2p_ops();
    ops.open = ranks_p2p_open;
    return &ops;
}
static inline bd_status ranks_own_create(uint32_t count, uint64_t wait_us, bd_comm_group **out, bd_error *err) {
    bd_status s = bd_comm_nccl_ops()->group_create(count, wait_us, out, err);
    if (s != BD_OK) return s;
    cuda_peers *peers;
    if ((s = cuda_peers_create(count, wait_us, CUDA_WINDOW_BYTES, &peers, err)) != BD_OK) return s;
    cuda_peers_destroy((*out)->device);
    (*out)->device = peers;
    return BD_OK;
}
static inline const bd_comm_ops *ranks_own_ops(void) {
    static bd_comm_ops ops;
    if (ops.name) return &ops;
    ops = *bd_comm_nccl_ops();
    ops.group_create = ranks_own_create;
    return &ops;
}
static inline const bd_comm_ops *ranks_comm_ops(int kind) {
    return kind == RANKS_P2P ? ranks_p2p_ops() : kind == RANKS_NCCL ? bd_comm_nccl_ops() : ranks_own_ops();
}

static inline bd_status ranks_backend_open(const bd_backend_options *options, bd_backend **out, bd_error *err) {
    bd_backend_options mapped = *options;
    mapped.device_index %= (uint32_t)ranks_devices;
    return bd_backend_cuda_ops()->open(&mapped, out, err);
}
static inline bd_status ranks_backend_plan(const bd_backend_options *options, bd_memory_plan *plan, bd_error *err) {
    bd_backend_options mapped = *options;
    mapped.device_index %= (uint32_t)ranks_devices;
    return bd_backend_cuda_ops()->plan(&mapped, plan, err);
}
static inline const bd_backend_ops *ranks_backend_ops(int kind) {
    static bd_backend_ops ops[RANKS_KINDS];
    static const bd_comm_ops *(*const comms[RANKS_KINDS])(void) = {ranks_p2p_ops, bd_comm_nccl_ops, ranks_own_ops};
    if (ops[kind].name) return &ops[kind];
    ops[kind] = *bd_backend_cuda_ops();
    ops[kind].comm = comms[kind];
    ops[kind].open = ranks_backend_open;
    ops[kind].plan = ranks_backend_plan;
    return &ops[kind];
}

/* ---- Ranks as threads ---- */

#define RANKS_BUFFER_BYTES (12u << 20)

typedef struct ranks_team ranks_team;
typedef struct ranks_rank {
    ranks_team *team;
    uint32_t rank;
    int device;
    bd_comm *comm;
    cudaStream_t stream;
    cudaGraphExec_t graph;
    uint8_t *a, *b;    /* device, RANKS_BUFFER_BYTES each */
    uint8_t *host;     /* page-locked, as large */
    void (*act)(struct ranks_rank *rank);
    pthread_t thread;
    char fault[640];   /* what went wrong on the thread; "": nothing */
    bd_error error;
    void *ctx;
} ranks_rank;

struct ranks_team {
    const bd_comm_ops *ops;
    bd_comm_group *group;
    uint32_t count;
    ranks_rank ranks[BD_COMM_RANKS_MAX];
};

/* On a rank's thread: a fault is kept, since only the main thread may fail a test. */
#define RANK_TRY(r, call)                                                                                                      \
    do {                                                                                                                       \
        const cudaError_t error_ = (call);                                                                                     \
        if (error_ != cudaSuccess && !(r)->fault[0]) snprintf((r)->fault, sizeof(r)->fault, "%s: %s", #call, cudaGetErrorString(error_)); \
    } while (0)
#define RANK_OK(r, call)                                                                                                       \
    do {                                                                                                                       \
        if ((call) != BD_OK && !(r)->fault[0]) snprintf((r)->fault, sizeof(r)->fault, "%s: %s", #call, (r)->error.message);     \
    } while (0)

static inline void *ranks_main(void *arg) {
    ranks_rank *r = arg;
    RANK_TRY(r, cudaSetDevice(r->device));
    r->act(r);
    return NULL;
}
static inline void ranks_run(ranks_team *t, void (*act)(ranks_rank *rank)) {
    for (uint32_t i = 0; i < t->count; i++) {
        ranks_rank *r = &t->ranks[i];
        r->act = act;
        r->fault[0] = 0;
        if (pthread_create(&r->thread, NULL, ranks_main, r)) fail_msg("no thread");
    }
    for (uint32_t i = 0; i < t->count; i++) pthread_join(t->ranks[i].thread, NULL);
    for (uint32_t i = 0; i < t->count; i++)
        if (t->ranks[i].fault[0]) fail_msg("rank %u: %s", i, t->ranks[i].fault);
}
static inline void ranks_join(ranks_rank *r) {
    RANK_OK(r, r->team->ops->open(r->team->group, r->rank, (uint32_t)r->device, &r->comm, &r->error));
}
/* All that is allocated is, before anything runs that waits. */
static inline ranks_team *ranks_open(int kind, uint32_t count, uint64_t wait_us) {
    bd_error err = {0};
    ranks_team *t = calloc(1, sizeof *t);
    t->ops = ranks_comm_ops(kind);
    t->count = count;
    if (t->ops->group_create(count, wait_us, &t->group, &err) != BD_OK) fail_msg("%s", err.message);
    for (uint32_t i = 0; i < count; i++) {
        ranks_rank *r = &t->ranks[i];
        r->team = t, r->rank = i, r->device = (int)i % ranks_devices;
        CUDA_OK(cudaSetDevice(r->device));
        CUDA_OK(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
        CUDA_OK(cudaMalloc((void **)&r->a, RANKS_BUFFER_BYTES));
        CUDA_OK(cudaMalloc((void **)&r->b, RANKS_BUFFER_BYTES));
        CUDA_OK(cudaMallocHost((void **)&r->host, RANKS_BUFFER_BYTES));
        CUDA_OK(cudaMemset(r->a, 0xff, RANKS_BUFFER_BYTES));
        CUDA_OK(cudaMemset(r->b, 0xff, RANKS_BUFFER_BYTES));
        CUDA_OK(cudaDeviceSynchronize());
    }
    ranks_run(t, ranks_join);
    return t;
}
static inline void ranks_close(ranks_team *t) {
    for (uint32_t i = 0; i < t->count; i++) CUDA_OK(cudaStreamSynchronize(t->ranks[i].stream));
    for (uint32_t i = 0; i < t->count; i++) {
        ranks_rank *r = &t->ranks[i];
        CUDA_OK(cudaSetDevice(r->device));
        if (r->graph) CUDA_OK(cudaGraphExecDestroy(r->graph));
        t->ops->close(r->comm);
        CUDA_OK(cudaStreamDestroy(r->stream));
        CUDA_OK(cudaFree(r->a));
        CUDA_OK(cudaFree(r->b));
        CUDA_OK(cudaFreeHost(r->host));
    }
    t->ops->group_destroy(t->group);
    CUDA_OK(cudaSetDevice(0));
    free(t);
}

#endif
