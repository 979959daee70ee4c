// repack.cu - sign bits from the disk's layout into the card's.
//
//   disk: bits[n][k / 8], least significant bit first, 1 = plus
//   card: chunk[ceil(n / 128)][ceil(k / 256)] of 4096 bytes, 1 = minus, zero padded
//         row r of the chunk, 128-wide half c of its K    at byte ((r / 8) * 2 + c) * 128 + (r % 8) * 16   (16 bytes)
//         element k = 64b + 8i + o of the half (b = 0..1)  at byte 8b + o, bit 7 - i
//
// That is the no-swizzle K-major core-matrix order of wgmma, with K permuted inside each 64 so that a thread of an MMA
// fragment finds its signs in two 16-bit loads (bitdelta_gemm) and so that binary wgmma can read the same bytes.
// The 8 source bytes of a K64 block become the 8 destination bytes by one inverted 8x8 bit transpose.
// Mapping: one thread per (row, K64 block); rows are independent, so any row range can be repacked on its own, and so can any bytes of
// the rows, one part after another.
// Source rows may start at any byte.
#include "common.cuh"

// Byte o, bit 7 - i of the result = not (byte i, bit o of v): a byte swap, then an 8x8 bit transpose by three delta swaps.
static __device__ __forceinline__ uint64_t transpose_inverted(uint64_t v) {
    uint32_t low = ~(uint32_t)v, high = ~(uint32_t)(v >> 32);
    uint64_t x = ((uint64_t)__byte_perm(low, 0, 0x0123) << 32) | __byte_perm(high, 0, 0x0123), t;
    t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull, x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull, x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull, x ^= t ^ (t << 28);
    return x;
}

// Bits of the bytes [from, to) of a K64 block: byte i of the source is bit 7 - i of every byte.
static __device__ __forceinline__ uint64_t bits_of(int from, int to) {
    const uint32_t bits = (0xffu >> from) & ~(0xffu >> to);
    return bits * 0x0101010101010101ull;
}

// The part's bytes of the blocks from first_byte / 8 on; what other parts have of a block stays. last: the part ends with its rows.
static __global__ void __launch_bounds__(256) repack_kernel(uint8_t *dst, const uint8_t *src, int k, int first_row, int row_count,
                                                            int first_byte, int row_bytes, int blocks, bool last) {
    int chunks = (k + 255) / 256;
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= (size_t)row_count * blocks) return;
    int row = (int)(i / blocks), block = first_byte / 8 + (int)(i % blocks);
    const uint8_t *bytes = src + (size_t)row * row_bytes;
    int begin = max(0, first_byte - block * 8), end = min(8, first_byte + row_bytes - block * 8);
    uint64_t v = 0;
    for (int b = 0; b < 8; b++) // padding columns read as plus after the inversion below
        v |= (uint64_t)(b >= begin && b < end ? bytes[block * 8 + b - first_byte] : 0xff) << (8 * b);
    v = transpose_inverted(v);
    uint64_t *to = (uint64_t *)(dst + sign_offset(first_row + row, block, chunks));
    const uint64_t mine = bits_of(begin, last ? 8 : end);
    *to = ~mine ? (*to & ~mine) | (v & mine) : v;
}

extern "C" uint64_t k_sign_bytes(uint32_t n, uint32_t k) {
    return (uint64_t)((n + 127u) / 128u) * ((k + 255u) / 256u) * 4096u;
}

extern "C" cudaError_t k_repack_part(uint8_t *dst, const uint8_t *src, uint32_t k, const k_plane_part *part, cudaStream_t stream) {
    const uint32_t end = part->first_col + part->col_count;
    if (k % 8 || k > 1u << 20 || end > k || part->first_col % 8 || part->col_count % 8) return cudaErrorInvalidValue;
    // Whoever has a row's last column clears the padding after it too.
    const uint32_t blocks = (end == k ? (k + 255) / 256 * 4 : (end + 63) / 64) - part->first_col / 64;
    size_t count = (size_t)part->row_count * blocks;
    if (!count) return cudaSuccess;
    repack_kernel<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(dst, src, (int)k, (int)part->first_row, (int)part->row_count,
                                                                       (int)(part->first_col / 8), (int)(part->col_count / 8), (int)blocks, end == k);
    return cudaGetLastError();
}

extern "C" cudaError_t k_repack(uint8_t *dst, const uint8_t *src, uint32_t k, uint32_t first_row, uint32_t row_count,
                                cudaStream_t stream) {
    const k_plane_part part = {first_row, row_count, 0, k};
    return k_repack_part(dst, src, k, &part, stream);
}
