// digits.cuh - a row's values as the second operand of the rows kernel: two signed digits of 8 bits a value, with a scale for every 256.
//
//   z[k] = 256 hi + lo = f round(2^j x[k] / s),  s = max |x| of the 256 / 4079,  j = k / 8 % 4,  f = 1 where j = 0, else -1;  hi, lo in [-128, 127]
//
// The rows kernel makes signs of the bits without moving each to the same place (bitdelta_rows.cu): bit 7 - j of a byte becomes 64 or -64 where
// j = 0, else 0 or 2^(7-j). With sign_k = 1 or -1 its sum over k is
//   sum_k a[k] z[k] = 64 sum_k sign_k x'[k] + sum over j > 0 of 2^(6-j) sum_k z[k],  x' = x / s rounded to 1, 1/2, 1/4 and 1/8 by j,
// so each block brings the second part, negated, as its correction. What rounding does to a delta is about 1e-4 of it.
//
// Tile:    of a K256 block of a launch's rows, as k_rows has it in shared memory: [16 pieces of 16 values][NT tokens][lo, hi][16 bytes], then each
//          token's correction {c, 0, c, 0}, from which a lane's four sums of digits begin, and each token's s / 64; NT = 32 or 64. Piece 8h + i,
//          byte 4q + o is k = 64q + 8i + 4h + o. Tokens without a row are left as they are: their columns of the product are nobody's.
#pragma once
#include "elements.cuh"

static __host__ __device__ constexpr int digits_tile_bytes(int tokens) { return tokens * (512 + 16 + 4); }

// The largest of 8 neighbours' magnitudes, as bits: of numbers that are not negative their order.
static __device__ __forceinline__ uint32_t digits_top(const uint4 &in) {
    const uint32_t most = __vmaxu2(__vmaxu2(in.x & 0x7fff7fffu, in.y & 0x7fff7fffu), __vmaxu2(in.z & 0x7fff7fffu, in.w & 0x7fff7fffu));
    return max(most & 0xffff, most >> 16);
}

// factor: f 2^j / s. Returns the sum of z.
template <typename T> static __device__ __forceinline__ int digits_make(const uint4 &in, float factor, uint32_t (&lo)[2], uint32_t (&hi)[2]) {
    const uint32_t pairs[4] = {in.x, in.y, in.z, in.w};
    uint32_t t[8], sum = 0; // 1.5 * 2^23 + 128 + z: byte 1 is hi, byte 0 lo with its top bit turned
#pragma unroll
    for (int i = 0; i < 8; i++) {
        t[i] = __float_as_uint(fmaf(T::load((uint16_t)(pairs[i / 2] >> (i % 2 * 16))), factor, 12583040.f));
        sum += t[i] - 0x4B400080u;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t a = __byte_perm(t[4 * i], t[4 * i + 1], 0x5140), b = __byte_perm(t[4 * i + 2], t[4 * i + 3], 0x5140); // {lo, lo, hi, hi}
        lo[i] = __byte_perm(a, b, 0x5410) ^ 0x80808080u, hi[i] = __byte_perm(a, b, 0x7632);
    }
    return (int)sum;
}

// By a whole warp that has 32 neighbouring pieces of eight values of a row, those of one block. x: piece `piece` of the row.
template <typename T> static __device__ __forceinline__ void digits_store(const k_digits_sink &to, int row, int piece, const uint4 &x) {
    int c = 0;
    while (c < to.chunk_count && (unsigned)(row - to.chunks[c].first_row) >= (unsigned)to.chunks[c].rows) c++;
    if (c == to.chunk_count) return;
    const int token = row - to.chunks[c].first_row, tokens = to.chunks[c].rows <= 32 ? 32 : 64, lane = piece % 32, q = lane / 8, step = lane % 8, j = step % 4;
    const float most = fmaxf(T::load((uint16_t)__reduce_max_sync(~0u, digits_top(x))), 1e-30f), one = __fdividef(4079.f, most);
    uint32_t lo[2], hi[2];
    const int sum = digits_make<T>(x, j ? -one * (float)(1 << j) : one, lo, hi), correction = __reduce_add_sync(~0u, j ? -sum * (64 >> j) : 0);
    uint8_t *tile = to.digits + to.chunks[c].at_bytes + (size_t)(piece / 32) * digits_tile_bytes(tokens);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t *at = (uint32_t *)(tile + ((8 * h + step) * tokens + token) * 32 + q * 4);
        at[0] = lo[h], at[4] = hi[h];
    }
    if (lane) return;
    ((int4 *)(tile + tokens * 512))[token] = make_int4(correction, 0, correction, 0);
    ((float *)(tile + tokens * 528))[token] = most * (1.f / (4079.f * 64.f));
}
