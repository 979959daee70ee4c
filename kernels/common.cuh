// common.cuh - small device helpers shared by the kernels: warp reductions, bf16 conversions, the sign layout's addresses.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels.h"

static __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
static __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
static __device__ __forceinline__ float bf16_float(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}
static __device__ __forceinline__ uint16_t float_bf16(float v) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

static __device__ __forceinline__ float exp2_fast(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// Lets the next kernel start fetching what no kernel makes; waits for the kernel before. Both matter on sm_90 only.
static __device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static __device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Sum over the block's threads in a fixed order; every thread gets it. red: one float per warp.
static __device__ __forceinline__ float block_sum(float v, float *red) {
    int warps = blockDim.x / 32;
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < warps; i++) total += red[i];
    return total;
}
static __device__ __forceinline__ float block_max(float v, float *red) {
    int warps = blockDim.x / 32;
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = v;
    __syncthreads();
    float top = red[0];
    for (int i = 1; i < warps; i++) top = fmaxf(top, red[i]);
    return top;
}

// Byte offset of the 8 sign bytes of (row, K64 block) in a plane whose rows have `chunks` = ceil(k / 256) chunks; see repack.cu.
static __device__ __forceinline__ size_t sign_offset(int row, int block64, int chunks) {
    int r = row % 128, half = (block64 / 2) % 2;
    return ((size_t)(row / 128) * chunks + block64 / 4) * 4096 + ((r / 8) * 2 + half) * 128 + (r % 8) * 16 + (block64 % 2) * 8;
}
// Sign of one element: -1 where the stored bit is set.
static __device__ __forceinline__ float sign_at(const uint8_t *bits, int row, int k, int chunks) {
    int o = k % 8, i = (k % 64) / 8; // k = 64b + 8i + o
    return (bits[sign_offset(row, k / 64, chunks) + o] >> (7 - i)) & 1 ? -1.f : 1.f;
}
