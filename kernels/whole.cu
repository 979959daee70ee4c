// whole.cu - rows of the embedding that variants keep whole, over those that the base's table gave. Grid: a block of 256 threads a row.
#include "whole.h"

#include "elements.cuh"

template <typename T> static __global__ void __launch_bounds__(256) embed_rows_kernel(const k_embed_rows_args a) {
    const uint16_t *from = a.from[blockIdx.x];
    float *to = a.residual + (size_t)blockIdx.x * a.hidden;
    if (!from) return;
    for (int i = threadIdx.x; i < a.hidden; i += 256) to[i] = a.scale * T::load(from[i]);
}

extern "C" cudaError_t k_embed_rows(const k_embed_rows_args *args, cudaStream_t stream) {
    if (!args->rows) return cudaSuccess;
    if (args->fp16) embed_rows_kernel<fp16_type><<<(unsigned)args->rows, 256, 0, stream>>>(*args);
    else embed_rows_kernel<bf16_type><<<(unsigned)args->rows, 256, 0, stream>>>(*args);
    return cudaGetLastError();
}
