// planes.cuh - 256 values of a row of x as 16 two's-complement bit planes, the second operand of decode's binary products.
//
//   xq[k] = round(x[k] / scale), scale = max |x| of the 256 / 32767
//   plane p, 32 bytes: bit p of xq, K permuted as in repack.cu; plane p of a block is row p of a 16 x 256-bit matrix in
//   core-matrix order, so the byte of lane l (see below) is at (p / 8) * 256 + (p % 8) * 16 + (l / 16) * 128 + l % 16
//
// A block has a scale of its own, so whoever holds 256 neighbouring values of a row can make its planes: no pass over the
// row comes first, and one large value costs precision in its own block only. A block whose largest value is under
// 1e-30 counts as zero.
#pragma once
#include "common.cuh"

constexpr int PLANE_BYTES = 512; // 16 planes of 32 bytes

struct plane_meta {
    float scale;
    int sum; // of xq
};

// Called by a whole warp. v[i]: the value at k = 128 (lane / 16) + 64 (lane % 16 / 8) + 8i + lane % 8 of the block.
// Byte p of out is this lane's byte of plane p.
static __device__ __forceinline__ plane_meta make_planes(uint32_t (&out)[4], const float (&v)[8]) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
    top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top))); // of floats that are not negative: their order
    const bool some = top >= 1e-30f;
    const float inverse = some ? __fdividef(32767.f, top) : 0.f;
    uint32_t f[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f[i] = __float_as_uint(fmaf(v[i], inverse, 12582912.f)); // 1.5 * 2^23: the low bits are the rounded integer
        sum += f[i] - 0x4B400000u;
    }
    sum = __reduce_add_sync(~0u, sum);
    // Byte j of word {0, 1} of half h: byte h of f[7 - j - 4 word].
    uint32_t w[4], x[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = __byte_perm(f[7 - 2 * i], f[6 - 2 * i], 0x5410);
#pragma unroll
    for (int i = 0; i < 2; i++) x[0][i] = __byte_perm(w[2 * i], w[2 * i + 1], 0x6420), x[1][i] = __byte_perm(w[2 * i], w[2 * i + 1], 0x7531);
#pragma unroll
    for (int h = 0; h < 2; h++) { // 8x8 bit transposes by three delta swaps
        uint32_t t;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            t = (x[h][i] ^ (x[h][i] >> 7)) & 0x00AA00AAu, x[h][i] ^= t ^ (t << 7);
            t = (x[h][i] ^ (x[h][i] >> 14)) & 0x0000CCCCu, x[h][i] ^= t ^ (t << 14);
        }
        t = (x[h][0] ^ (x[h][1] << 4)) & 0xF0F0F0F0u;
        out[2 * h] = x[h][0] ^ t, out[2 * h + 1] = x[h][1] ^ (t >> 4);
    }
    return {some ? top * (1.f / 32767.f) : 0.f, (int)sum};
}

// Stores the lane's bytes into the 512 of the block.
static __device__ __forceinline__ void store_planes(uint8_t *block, const uint32_t (&bytes)[4], int lane) {
    uint8_t *to = block + (lane / 16) * 128 + lane % 16;
#pragma unroll
    for (int p = 0; p < 16; p++) to[(p / 8) * 256 + (p % 8) * 16] = (uint8_t)(bytes[p / 4] >> (8 * (p % 4)));
}
