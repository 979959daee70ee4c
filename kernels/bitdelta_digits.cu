// bitdelta_digits.cu - x as the rows kernel's second operand: two signed digits of 8 bits a value, with a scale for every 256 (sm_90a).
//
//   z[k] = 256 hi + lo = f round(2^j x[k] / s),  s = max |x| of the 256 / 4079,  j = k / 8 % 4,  f = 1 where j = 0, else -1;  hi, lo in [-128, 127]
//
// The rows kernel makes signs of the bits without moving each to the same place (bitdelta_rows.cu): bit 7 - j of a byte becomes 64 or -64 where
// j = 0, else 0 or 2^(7-j). With sign_k = 1 or -1 its sum over k is
//   sum_k a[k] z[k] = 64 sum_k sign_k x'[k] + sum over j > 0 of 2^(6-j) sum_k z[k],  x' = x / s rounded to 1, 1/2, 1/4 and 1/8 by j,
// so each block brings the second part, negated, as its correction. What rounding does to a delta is about 1e-4 of it.
//
// Tile:    of a K256 block of a launch's rows, as k_rows has it in shared memory: [16 pieces of 16 values][NT tokens][lo, hi][16 bytes], then each
//          token's correction {c, 0, c, 0}, from which a lane's four sums of digits begin, and each token's s / 64; NT = k_decode_tokens(rows). Piece 8h + i, byte 4q + o is k = 64q + 8i + 4h + o.
//          Tokens from `rows` on are left as they are: their columns of the product are nobody's.
// Mapping: a warp a (row, block), 8 neighbours a lane.
#include "decode.cuh"

namespace {

// The largest of 8 neighbours' magnitudes, as bits: of numbers that are not negative their order.
__device__ __forceinline__ u32 top_of(const uint4& in) {
  const u32 most = __vimax3_u16x2(in.x & 0x7fff7fffu, in.y & 0x7fff7fffu, __vmaxu2(in.z & 0x7fff7fffu, in.w & 0x7fff7fffu));
  return max(most & 0xffff, most >> 16);
}

// factor: f 2^j / s. Returns the sum of z.
template <typename T> __device__ __forceinline__ int make_digits(const uint4& in, float factor, u32 (&lo)[2], u32 (&hi)[2]) {
  const u32 pairs[4] = {in.x, in.y, in.z, in.w};
  u32 t[8], sum = 0;  // 1.5 * 2^23 + 128 + z: byte 1 is hi, byte 0 lo with its top bit turned
#pragma unroll
  for (int i = 0; i < 8; i++) {
    t[i] = __float_as_uint(fmaf(to_float<T>((uint16_t)(pairs[i / 2] >> (i % 2 * 16))), factor, 12583040.f));
    sum += t[i] - 0x4B400080u;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 a = __byte_perm(t[4 * i], t[4 * i + 1], 0x5140), b = __byte_perm(t[4 * i + 2], t[4 * i + 3], 0x5140);  // {lo, lo, hi, hi}
    lo[i] = __byte_perm(a, b, 0x5410) ^ 0x80808080u, hi[i] = __byte_perm(a, b, 0x7632);
  }
  return (int)sum;
}

template <typename T> __global__ void __launch_bounds__(256) digits_kernel(const __grid_constant__ k_digits_args a) {
  const k_digits_chunk chunk = a.chunks[blockIdx.y];
  const int lane = threadIdx.x % 32, q = lane / 8, step = lane % 8, blocks = a.k / 256;
  const int block = blockIdx.x % blocks, token = blockIdx.x / blocks * 8 + threadIdx.x / 32, tokens = chunk.rows <= 32 ? 32 : 64;
  pdl_launch();
  pdl_wait();
  if (token >= chunk.rows) return;
  const uint4 x = __ldcg((const uint4*)((const uint16_t*)a.x + (size_t)(chunk.first_row + token) * a.k + block * 256) + lane);
  const float most = fmaxf(to_float<T>((uint16_t)__reduce_max_sync(~0u, top_of(x))), 1e-30f), one = 4079.f / most;
  const int j = step % 4;
  u32 lo[2], hi[2];
  const int sum = make_digits<T>(x, j ? -one * (float)(1 << j) : one, lo, hi);
  const int correction = __reduce_add_sync(~0u, j ? -sum * (64 >> j) : 0);
  uint8_t* tile = a.digits + chunk.at_bytes + (size_t)block * digits_tile_bytes(tokens);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32* piece = (u32*)(tile + ((8 * h + step) * tokens + token) * 32 + q * 4);
    piece[0] = lo[h], piece[4] = hi[h];
  }
  if (lane == 0) {
    ((int4*)(tile + tokens * 512))[token] = make_int4(correction, 0, correction, 0);
    ((float*)(tile + tokens * 528))[token] = most * (1.f / (4079.f * 64.f));
  }
}

}  // namespace

extern "C" uint64_t k_digits_bytes(int rows, int k) { return (uint64_t)(k / 256) * digits_tile_bytes(k_decode_tokens(rows)); }

extern "C" cudaError_t k_digits(const k_digits_args* a, cudaStream_t s) {
  if (a->k % 256 || a->chunk_count < 1 || a->chunk_count > K_DIGITS_CHUNKS) return cudaErrorInvalidValue;
  int most = 1;
  for (int i = 0; i < a->chunk_count; i++) most = a->chunks[i].rows > most ? a->chunks[i].rows : most;
  if (most > K_DECODE_ROWS) return cudaErrorInvalidValue;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(a->k / 256 * ((most + 7) / 8)), (unsigned)a->chunk_count), c.blockDim = dim3(256), c.stream = s, c.attrs = at, c.numAttrs = a->pdl ? 1 : 0;
  return a->fp16 ? cudaLaunchKernelEx(&c, digits_kernel<__half>, *a) : cudaLaunchKernelEx(&c, digits_kernel<__nv_bfloat16>, *a);
}
