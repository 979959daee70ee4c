/* backend_cuda.c - the CUDA backend's table, the probe, and how CUDA's errors become ours. */
#include <stdio.h>

#include "cuda_internal.h"

bd_status cuda_check(bd_cuda *cuda, cudaError_t error, const char *what, bd_error *err) {
    if (error == cudaSuccess) return BD_OK;
    /* Running out of memory, a bad argument and a failed recording leave the context usable;
     * anything else is sticky. */
    const bool recording =
        error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
    const bool passing =
        error == cudaErrorMemoryAllocation || error == cudaErrorInvalidValue || recording;
    if (!passing && cuda) atomic_store(&cuda->lost, true);
    (void)cudaGetLastError(); /* else the next launch would report it again */
    bd_status status = error == cudaErrorMemoryAllocation ? BD_E_MEMORY : BD_E_DEVICE;
    return bd_fail(err, status, what, "CUDA error %d: %s", (int)error, cudaGetErrorString(error));
}

bd_status bd_cuda_probe(char *why, size_t why_bytes) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        snprintf(why, why_bytes, "CUDA error %d: %s", (int)error, cudaGetErrorString(error));
        return BD_E_DEVICE;
    }
    if (count == 0) {
        snprintf(why, why_bytes, "no CUDA device");
        return BD_E_DEVICE;
    }
    struct cudaDeviceProp properties;
    error = cudaGetDeviceProperties(&properties, 0);
    if (error != cudaSuccess || properties.major < 8) {
        snprintf(why, why_bytes, "device 0 has compute capability below 8.0");
        return BD_E_DEVICE;
    }
    if (!cuda_built_for(BD_CUDA_ARCHITECTURES, properties.major, properties.minor)) {
        snprintf(why, why_bytes,
                 "device 0, %s, has compute capability %d.%d, and this build's code is for %s "
                 "(CMAKE_CUDA_ARCHITECTURES)",
                 properties.name, properties.major, properties.minor, BD_CUDA_ARCHITECTURES);
        return BD_E_DEVICE;
    }
    snprintf(why, why_bytes, "%s", properties.name);
    return BD_OK;
}

const bd_backend_ops *bd_backend_cuda_ops(void) {
    static const bd_backend_ops ops = {.name = "cuda",
                                       .page_align_bytes = 2u << 20,
                                       .rows_default = 1024,
                                       .tile_rows = 256, /* cuda_tile_tokens */
                                       .comm = bd_comm_nccl_ops,
                                       .supports = cuda_supports,
                                       .plan = cuda_plan,
                                       .open = cuda_open,
                                       .close = cuda_close,
                                       .weight_put = cuda_weight_put,
                                       .rope_table_put = cuda_rope_table_put,
                                       .delta_arena = cuda_delta_arena,
                                       .plane_bytes = cuda_plane_bytes,
                                       .plane_put = cuda_plane_put,
                                       .plane_part_put = cuda_plane_part_put,
                                       .rows_put = cuda_rows_put,
                                       .vector_put = cuda_vector_put,
                                       .put_flush = cuda_put_flush,
                                       .bring = cuda_bring,
                                       .put_mark = cuda_put_mark,
                                       .put_reached = cuda_put_reached,
                                       .host_alloc = cuda_host_alloc,
                                       .host_free = cuda_host_free,
                                       .host_lock = cuda_host_lock,
                                       .host_unlock = cuda_host_unlock,
                                       .step_begin = cuda_step_begin,
                                       .embed = cuda_embed,
                                       .norm_residual = cuda_norm_residual,
                                       .linear = cuda_linear,
                                       .rope_kv_write = cuda_rope_kv_write,
                                       .attention = cuda_attention_run,
                                       .head = cuda_head,
                                       .sample = cuda_sample,
                                       .step_wait = cuda_step_wait,
                                       .logits_get = cuda_logits_get,
                                       .record = cuda_record};
    return &ops;
}
