// decode.cuh - what the decode kernels share: rings, a slot's overlay, and plane counts folded into a token's sum.
#pragma once
#include "planes.cuh"
#include "split.cuh"
#include "wgmma.cuh"

namespace {

constexpr int W_BYTES = 128 * 64 * 2, SIGN_BYTES = 4096, MAX_RING = 16, SLOTS_MAX = 16;
constexpr int BUDGET = 225 * 1024;

struct Ring {  // a position in a ring of `size` places
  int at;
  u32 phase;
  __device__ __forceinline__ void next(int size) {
    if (++at == size) at = 0, phase ^= 1;
  }
};

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
