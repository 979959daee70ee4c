// decode.cuh - what the decode kernels share: rings, the stream of W, and plane counts folded into a token's sum.
#pragma once
#include "planes.cuh"
#include "split.cuh"
#include "wgmma.cuh"

namespace {

constexpr int W_BYTES = 128 * 64 * 2, SIGN_BYTES = 4096, MAX_RING = 16, SLOTS_MAX = 16;
constexpr int BUDGET = 225 * 1024;

// Digits, scales and corrections of a K256 block, bitdelta_digits.cu.
__host__ __device__ constexpr int digits_tile_bytes(int tokens) { return tokens * (512 + 16 + 4); }

struct Ring {  // a position in a ring of `size` places
  int at;
  u32 phase;
  __device__ __forceinline__ void next(int size) {
    if (++at == size) at = 0, phase ^= 1;
  }
};

// W's ring of 128 x 64 stages, by one thread. w_begin makes its barriers (readers: warps that hand a stage back) and fills it before anything else happens in the CTA: returns
// the K64 steps whose copies are under way. w_stream loads the rest of units [u0, u1), in bursts, so that neighbouring 128-byte pieces of
// a W row reach the memory together. row0: of the map, where the launch's first W row is.
__device__ __forceinline__ int w_begin(const CUtensorMap& map, int row0, u32 base, u32 full, u32 empty, int u0, int u1, int per_tile, int stages, int burst, int readers) {
  for (int i = 0; i < stages; i++) mbar_init(full + 8 * i, 1), mbar_init(empty + 8 * i, readers);
  mbar_init_fence();
  const int steps = 4 * per_tile, filled = min(stages / burst * burst, 4 * (u1 - u0));
  for (int i = 0; i < filled; i++) {
    mbar_expect(full + 8 * i, W_BYTES);
    tma_load(base + i * W_BYTES, &map, (4 * u0 + i) % steps * 64, row0 + (4 * u0 + i) / steps * 128, full + 8 * i, SM90_EVICT_FIRST);
  }
  return filled;
}
template <bool IDLE> __device__ __forceinline__ void w_stream(const CUtensorMap& map, int row0, u32 base, u32 full, u32 empty, int u0, int u1, int per_tile, int stages, int burst, int filled) {
  const int steps = 4 * per_tile;
  Ring r = {filled, 0};
  if (r.at == stages) r.at = 0;
  else r.phase = 1;  // stages past the whole bursts are still fresh: their first wait must pass
  for (int s = 4 * u0 + filled; s < 4 * u1; s += burst) {
    Ring w = r;
    for (int i = 0; i < burst; i++, w.next(stages)) IDLE ? mbar_wait_idle(empty + 8 * w.at, w.phase) : mbar_wait(empty + 8 * w.at, w.phase);
    for (int i = 0; i < burst; i++, r.next(stages)) {
      mbar_expect(full + 8 * r.at, W_BYTES);
      tma_load(base + r.at * W_BYTES, &map, (s + i) % steps * 64, row0 + (s + i) / steps * 128, full + 8 * r.at, SM90_EVICT_FIRST);
    }
  }
}

// Sums of a tile -> float32 [rows][wide_stride]; row: of W, of this lane's first.
template <int R, typename Args> __device__ __forceinline__ void store_wide(const float (&d)[R], const Args& a, int row, int q) {
#pragma unroll
  for (int i = 0; i < R; i++) {
    const int t = 8 * (i / 4) + 2 * q + (i & 1), n = row + 8 * ((i >> 1) & 1);
    if (t < a.rows && n < a.n) a.wide[(size_t)t * a.wide_stride + n] = d[i];
  }
}

template <typename T> __device__ __forceinline__ float to_float(uint16_t bits);
template <> __device__ __forceinline__ float to_float<__nv_bfloat16>(uint16_t bits) { return bf16_float(bits); }
template <> __device__ __forceinline__ float to_float<__half>(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

__device__ __forceinline__ void lds_meta(u32 addr_s, float& scale, int& sum) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(scale), "=r"(sum) : "r"(addr_s) : "memory");
}

// Group g's plane counts -> this lane's token 4g + q: acc[u] += s (sum - 2 sum_p 2^p count_p), row g + 8u of the fragment.
__device__ __forceinline__ void fold(float& acc0, float& acc1, const int (&e)[32], u32 meta_s, int q) {
  const int top = q == 3 ? -512 : 512;
  int v[4][2];
#pragma unroll
  for (int t = 0; t < 4; t++)
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const int b = 8 * t + 2 * u;
      v[t][u] = (e[b] + 2 * e[b + 1] + 256 * e[b + 4] + top * e[b + 5]) << (2 * q);
    }
  float scale;
  int sum;
  lds_meta(meta_s + q * 8, scale, sum);
#pragma unroll
  for (int u = 0; u < 2; u++) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const int keep = q & 2 ? v[t + 2][u] : v[t][u], send = q & 2 ? v[t][u] : v[t + 2][u];
      v[t][u] = keep + __shfl_xor_sync(~0u, send, 2);
    }
    const int keep = q & 1 ? v[1][u] : v[0][u], send = q & 1 ? v[0][u] : v[1][u];
    const float value = scale * (float)(sum - 2 * (keep + __shfl_xor_sync(~0u, send, 1)));
    if (u) acc1 += value;
    else acc0 += value;
  }
}

}  // namespace
