// planes.cuh - a row of x as 16 two's-complement bit planes, the second operand of decode's binary products.
//
//   planes[k / 256][nb][512 bytes], scale[nb], sum[nb]:  xq = round(x / scale), scale = max|x| / 32767, sum = sum of xq
//
// Plane p of a K256 block is row p of a 16 x 256-bit matrix in core-matrix order, K permuted as in repack.cu. Rows past the batch get zero
// planes. k % 256 == 0.
#pragma once
#include "common.cuh"

constexpr int PLANE_BYTES = 512;

// Called by a whole block of 256 threads. x: the row (k bf16); blockIdx.y of gridDim.y shares out the K256 blocks; block y = 0 also
// writes scale and sum. Lane l of a warp owns byte l of each plane.
static __device__ __forceinline__ void make_planes(uint8_t *planes, float *scale, int *sum, const uint16_t *x, int m, bool live, int k, int nb) {
    __shared__ float red[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4 *row = (const uint4 *)x;
    float top = 0;
    if (live)
#pragma unroll 4
        for (int i = threadIdx.x; i < k / 8; i += 256) {
            const uint4 v = row[i];
            const uint16_t *e = (const uint16_t *)&v;
#pragma unroll
            for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(bf16_float(e[j])));
        }
    top = block_max(top, red);
    const float inverse = top > 0 ? 32767.f / top : 0.f;
    for (int block = blockIdx.y * 8 + warp; block < k / 256; block += gridDim.y * 8) {
        const int c = lane / 16, b = (lane % 16) / 8, o = lane % 8;
        int q[8];
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = live ? __float2int_rn(bf16_float(x[block * 256 + 128 * c + 64 * b + 8 * i + o]) * inverse) : 0;
        uint8_t *out = planes + ((size_t)block * nb + m) * PLANE_BYTES + c * 128 + lane % 16;
#pragma unroll
        for (int p = 0; p < 16; p++) {
            uint32_t v = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) v |= (uint32_t)((q[i] >> p) & 1) << (7 - i);
            out[(p / 8) * 256 + (p % 8) * 16] = (uint8_t)v;
        }
    }
    if (blockIdx.y) return;
    int total = 0; // below 2^31: k <= 65536
    if (live)
        for (int i = threadIdx.x; i < k; i += 256) total += __float2int_rn(bf16_float(x[i]) * inverse);
    for (int o = 16; o; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    __shared__ int sums[8];
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0;
        for (int i = 0; i < 8; i++) total += sums[i];
        scale[m] = top / 32767.f;
        sum[m] = total;
    }
}
