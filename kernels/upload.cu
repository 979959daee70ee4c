// upload.cu - small parts of a delta (scales, norms) to their places, and a step's tables, by a kernel: a copy engine would put them in
// line behind megabytes of deltas, a step's tables behind a whole delta whose blocks follow each other. Any alignment; 16 bytes or
// words where all three allow it. Grid: 256 threads a block, an element each.
#include "upload.h"

template <typename T> static __global__ void __launch_bounds__(256) put_kernel(T *dst, const T *src, uint64_t count) {
    const uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x;
    if (i < count) dst[i] = src[i];
}

extern "C" cudaError_t k_put_bytes(void *dst, const void *src, uint64_t bytes, cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    const uintptr_t all = (uintptr_t)dst | (uintptr_t)src | bytes;
    const uint64_t count = all % 16 == 0 ? bytes / 16 : all % 4 == 0 ? bytes / 4 : bytes, blocks = (count + 255) / 256;
    if (blocks > 0x7fffffffu) return cudaErrorInvalidValue;
    if (all % 16 == 0)
        put_kernel<<<(unsigned)blocks, 256, 0, stream>>>((uint4 *)dst, (const uint4 *)src, count);
    else if (all % 4 == 0)
        put_kernel<<<(unsigned)blocks, 256, 0, stream>>>((uint32_t *)dst, (const uint32_t *)src, count);
    else
        put_kernel<<<(unsigned)blocks, 256, 0, stream>>>((uint8_t *)dst, (const uint8_t *)src, count);
    return cudaGetLastError();
}
