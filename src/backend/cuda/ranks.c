/* ranks.c - what the ranks of a split model do together: sums of what each has made, the gathering
 * of their logits, and agreement before steps are recorded. A rank's launches are asynchronous and
 * in the order of its stream, so of two ranks the one that is behind never waits for the other but
 * on the device, where a wait has a deadline. Nothing here is called for one rank. */
#include "cuda_internal.h"

static bd_status ranks_lost(bd_cuda *cuda, bd_status s) {
    atomic_store(&cuda->lost, true);
    return s;
}

bd_status cuda_ranks_sum(bd_cuda *cuda, void *data, uint64_t count, bd_comm_type type,
                         bd_error *err) {
    static const k_ranks_type types[] = {
        [BD_COMM_F32] = K_RANKS_F32, [BD_COMM_BF16] = K_RANKS_BF16, [BD_COMM_F16] = K_RANKS_F16};
    bd_comm *comm = cuda->options.comm;
    const uint64_t bytes = count * (type == BD_COMM_F32 ? 4u : 2u);
    if (cuda->ranks && bytes <= cuda->own_bytes)
        return cuda_check(
            cuda, k_ranks_sum(cuda->ranks, data, (uint32_t)bytes, types[type], cuda->stream),
            "sum over the ranks", err);
    return comm->ops->all_reduce(comm, data, count, type, cuda->stream, err);
}

bd_status cuda_ranks_norm(bd_cuda *cuda, k_norm_args *args, bool *done, bd_error *err) {
    const uint64_t count = (uint64_t)args->rows * (uint64_t)args->width,
                   bytes = count * (args->proj_half ? 2u : 4u);
    const bd_comm_type half = cuda->fp16 ? BD_COMM_F16 : BD_COMM_BF16;
    *done = cuda->ranks && bytes <= cuda->own_bytes &&
            k_ranks_norm_takes(cuda->ranks, args->rows, args->width, args->proj_half);
    if (*done) {
        k_norm_args own = *args;
        /* Begun early, all blocks of many rows lie on the few multiprocessors that the kernel
         * before leaves first: steps of 64 rows of 1 to 14 variants on two H200 took 1.5 to 6%
         * longer. */
        own.overlap = args->overlap && args->rows <= (int32_t)CUDA_DECODE_ONLY_ROWS;
        return cuda_check(cuda, k_ranks_norm(cuda->ranks, &own, cuda->stream), "sum over the ranks",
                          err);
    }
    return cuda_ranks_sum(cuda, cuda->proj, count, args->proj_half ? half : BD_COMM_F32, err);
}

bd_status cuda_ranks_logits(bd_cuda *cuda, uint32_t row, uint32_t rows, bd_error *err) {
    bd_comm *comm = cuda->options.comm;
    const uint32_t each = bd_vocab_each(&cuda->options), width = cuda->logits_width;
    const float *part = cuda->logits_part + (size_t)row * each;
    const bd_status s = comm->ops->all_gather(comm, part, cuda->scratch, (uint64_t)rows * each * 4,
                                              cuda->stream, err);
    if (s != BD_OK) return s;
    return cuda_check(cuda,
                      k_join_logits(cuda->logits + (size_t)row * width, cuda->scratch,
                                    (int32_t)rows, (int32_t)each, (int32_t)cuda->vocab_total,
                                    (int32_t)width, cuda->stream),
                      "logits", err);
}

bd_status cuda_ranks_poll(bd_cuda *cuda, bd_error *err) {
    bd_comm *comm = cuda->options.comm;
    const bd_status s = comm->ops->poll(comm, err);
    return s == BD_OK ? BD_OK : ranks_lost(cuda, s);
}

/* A group without meetings (that of a test) has nobody to disagree. */
bd_status cuda_ranks_agree(bd_cuda *cuda, bool *yes, bd_error *err) {
    bd_comm *comm = cuda->options.comm;
    if (!comm || !comm->group->device) return BD_OK;
    const bd_status s = cuda_peers_meet(comm->group->device, comm->rank, *yes, yes, err);
    return s == BD_OK ? BD_OK : ranks_lost(cuda, s);
}

void cuda_ranks_recording(bd_cuda *cuda, bool recording) {
    if (cuda->options.comm) cuda->options.comm->recording = recording;
}

void cuda_ranks_open(bd_cuda *cuda) {
    bd_comm *comm = cuda->options.comm;
    if (!comm || !comm->group->device) return;
    cuda->ranks = cuda_peers_ranks(comm->group->device, comm->rank);
    cuda->own_bytes = cuda_peers_own_bytes(comm->group->device);
}
