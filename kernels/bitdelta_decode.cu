// bitdelta_decode.cu - decode: the base product on tensor cores plus an exact integer delta on the binary tensor cores (sm_90a).
//
//   Y[m][n] = bias[n] + sum_k x[m][k] W[n][k] + scale_v[n] s[m] (sum_k xq[m][k] - 2 sum_p 2^p popc(neg_v[n] & plane_p[m]))
//
// xq = round(x / s), s = max|x| / 32767, as 16 two's-complement bit planes (plane 15 counts negative); neg = sign chunks of
// repack.cu (1 = minus). The delta is exact but for the 16-bit rounding of x, about 3e-5 of it.
// Shapes:  rows <= NB <= NT tokens (NT = 8 or 16 columns of the base product) over V <= 16 variants (ONE: V = 1; NONE: the base
//          alone, no planes); W [n][k], x [rows][k], Y [rows][n] bf16; k % 256 == 0, k <= 65536 (int32 plane sums).
// Tile:    128 W rows x NT tokens; a unit is one K256 step of one tile. The n/128 * k/256 units are dealt contiguously to the grid, so
//          every CTA streams the same number of bytes. Splits depend on (n, k, grid) only: a row's result does not depend on its batch.
// Mapping: warpgroups 0, 1 = 64 rows each. Warp 8 streams W and x, warp 9 the sign chunks (lane v = variant v) and the planes.
// Memory:  ring 1: stages of W 128x64 + x NTx64 (128-byte swizzle); ring 2: frames of V sign chunks + NB x 512 bytes of planes.
// Split tiles: the CTA that holds the head of a tile owns it. The CTAs after it send their float32 partials as 64-bit words {1, value}
//          (value and flag in one store: no fence, no counter); the owner polls them, adds them in K order, clears the words.
//          A CTA's range follows from a ticket it draws when it starts, later ranges first: an owner only waits for CTAs that are
//          already running, whatever order the hardware starts blocks in, so it cannot hang.
#include "planes.cuh"
#include "sm90.cuh"
#include "wgmma.cuh"

namespace {

constexpr int W_BYTES = 128 * 64 * 2, SIGN_BYTES = 4096, MAX_RING = 16;

__device__ __forceinline__ void store_word(unsigned long long* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
__device__ __forceinline__ u64 load_word(const unsigned long long* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// One block of 256 threads a row and share of the K256 blocks (planes.cuh).
__global__ void __launch_bounds__(256) planes_kernel(uint8_t* planes, float* scale, int* sum, const uint16_t* x, int rows, int k, int nb) {
  pdl_launch();
  make_planes(planes, scale, sum, x + (size_t)blockIdx.x * k, blockIdx.x, (int)blockIdx.x < rows, k, nb);
}

enum Mode { NONE, ONE, MANY };  // variants in the batch

// Overlay of a slot with a sign plane for this linear, or null.
__device__ __forceinline__ const k_overlay_linear* slot_overlay(const k_decode_args& a, int slot) {
  const k_overlay_linear* o = slot < 0 ? nullptr : a.overlays + a.columns[slot];
  return o && o->plane_count > 0 ? o : nullptr;
}

// One long function: the roles share register budgets and barrier phases, and accumulators cannot leave it without being spilled.
template <typename T, int NT, int NB, Mode MODE> __global__ void __launch_bounds__(384, 1) decode_kernel(const __grid_constant__ k_decode_args a) {
  extern __shared__ uint8_t smem_raw[];
  const int X_BYTES = NT * 128, STAGE = W_BYTES + X_BYTES;
  __shared__ __align__(8) u64 bars[4 * MAX_RING];
  const u32 base = (smem_u32(smem_raw) + 1023) & ~1023u, frames = base + a.stages * STAGE, frame_bytes = a.variants * SIGN_BYTES + NB * PLANE_BYTES;
  const u32 full = smem_u32(bars), empty = full + 8 * MAX_RING, ffull = empty + 8 * MAX_RING, fempty = ffull + 8 * MAX_RING;
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  __shared__ int ticket;
  if (threadIdx.x == 0) {
    unsigned drawn = atomicAdd(a.ticket, 1u);
    if (drawn == gridDim.x - 1) atomicExch(a.ticket, 0u); // all are drawn: ready for the launch after next that uses this counter
    ticket = (int)(gridDim.x - 1 - drawn);
    prefetch_map(&a.w), prefetch_map(&a.x);
    for (int i = 0; i < a.stages; i++) mbar_init(full + 8 * i, 1), mbar_init(empty + 8 * i, 8);
    for (int i = 0; i < a.frames; i++) mbar_init(ffull + 8 * i, 1), mbar_init(fempty + 8 * i, 8);
    mbar_init_fence();
  }
  __syncthreads();
  const int cta = ticket, per_tile = a.k / 256, units = (a.n + 127) / 128 * per_tile;
  const int u0 = (int)((long long)units * cta / gridDim.x), u1 = (int)((long long)units * (cta + 1) / gridDim.x);
  pdl_launch();

  if (wg == 2) {
    reg_dec<40>();
    if (warp == 0 && lane == 0) {
      // W does not depend on the previous kernel: four stages of it are on their way before x is waited for (more would only
      // queue in front of x).
      int steps = (u1 - u0) * 4, ahead = 4;
      auto load_w_tile = [&](int s, int st) {
        int u = u0 + s / 4, tile = u / per_tile, k64 = (u % per_tile) * 4 + (s & 3);
        u32 dst = base + st * STAGE;
        mbar_expect(full + 8 * st, STAGE);
        tma_load(dst, &a.w, k64 * 64, tile * 128, full + 8 * st, SM90_EVICT_FIRST);
      };
      auto load_x_tile = [&](int s, int st) {
        int k64 = ((u0 + s / 4) % per_tile) * 4 + (s & 3);
        tma_load(base + st * STAGE + W_BYTES, &a.x, k64 * 64, 0, full + 8 * st, SM90_EVICT_LAST);
      };
      for (int s = 0; s < ahead; s++) load_w_tile(s, s);
      pdl_wait();
      for (int s = 0; s < ahead; s++) load_x_tile(s, s);
      int st = ahead == a.stages ? 0 : ahead;
      u32 ph = ahead == a.stages ? 0 : 1;  // stages after `ahead` are fresh: their first wait must pass
      // In bursts, so that neighbouring 128-byte pieces of a W row reach the memory together.
      for (int s = ahead; s < steps; s += a.burst) {
        int n = min(a.burst, steps - s), st0 = st;
        u32 p = ph;
        for (int i = 0; i < n; i++) {
          mbar_wait(empty + 8 * st, ph);
          if (++st == a.stages) st = 0, ph ^= 1;
        }
        st = st0, ph = p;
        for (int i = 0; i < n; i++) {
          load_w_tile(s + i, st);
          if (++st == a.stages) st = 0, ph ^= 1;
        }
        st = st0, ph = p;
        for (int i = 0; i < n; i++) {
          load_x_tile(s + i, st);
          if (++st == a.stages) st = 0, ph ^= 1;
        }
      }
    } else if (MODE != NONE && warp == 1) {
      int nu = u1 - u0, ahead = 1, fr = 1;
      u32 ph = 1;
      // A slot without a plane for this linear streams W's bytes in its place; its scale is zero.
      const k_overlay_linear* overlay = lane < a.variants ? slot_overlay(a, lane) : nullptr;
      const uint8_t* bits = overlay ? overlay->bits[0] : (const uint8_t*)a.w_data;
      auto load_signs = [&](int i, int f) {
        if (lane == 0) mbar_expect(ffull + 8 * f, frame_bytes);
        __syncwarp();
        if (lane < a.variants) bulk_load(frames + f * frame_bytes + lane * SIGN_BYTES, bits + (size_t)(u0 + i) * SIGN_BYTES, SIGN_BYTES, ffull + 8 * f, SM90_EVICT_FIRST);
      };
      auto load_planes = [&](int i, int f) {
        if (lane == 0)
          bulk_load(frames + f * frame_bytes + a.variants * SIGN_BYTES, a.planes + (size_t)((u0 + i) % per_tile) * NB * PLANE_BYTES, NB * PLANE_BYTES, ffull + 8 * f,
                    SM90_EVICT_LAST);
      };
      for (int i = 0; i < ahead; i++) load_signs(i, i);
      pdl_wait();
      for (int i = 0; i < ahead; i++) load_planes(i, i);
      for (int i = ahead; i < nu; i++) {
        mbar_wait(fempty + 8 * fr, ph);
        load_signs(i, fr);
        load_planes(i, fr);
        if (++fr == a.frames) fr = 0, ph ^= 1;
      }
    }
    __syncwarp();
  } else {
    reg_inc<232>();
    const int q = lane & 3, tid = wg * 128 + warp * 32 + lane;
    int st = 0, fr = 0;
    u32 ph = 0, fph = 0;
    u64 slots = 0;  // 4 bits per token: index of its variant among the frame's chunks
#pragma unroll
    for (int t = 0; t < NB; t++) slots |= MODE != MANY ? 0 : (u64)(t < a.rows && a.slot[t] >= 0 ? a.slot[t] & 15 : 0) << (4 * t);
    // This thread's tokens 8j + 2q + e, as c = 2j + e.
    const float* al[NT / 4];
    float sx[NT / 4];
    int sum[NT / 4];
#pragma unroll
    for (int c = 0; c < NT / 4; c++) {
      int t = 8 * (c / 2) + 2 * q + (c & 1);
      const k_overlay_linear* overlay = MODE != NONE && t < a.rows ? slot_overlay(a, a.slot[t]) : nullptr;
      al[c] = overlay ? overlay->scale[0] : nullptr;
    }
    pdl_wait();
#pragma unroll
    for (int c = 0; c < NT / 4; c++) {
      int t = 8 * (c / 2) + 2 * q + (c & 1);
      sx[c] = MODE != NONE && t < a.rows ? a.scale[t] : 0.f, sum[c] = MODE != NONE && t < a.rows ? a.sum[t] : 0;
    }
    float d[NT / 2];
    int e[NB * 8];  // token t: e[8t ..], the m64n16 fragment of its 16 planes
    for (int u = u0; u < u1;) {
      const int tile = u / per_tile, first = tile * per_tile, end = min(u1, first + per_tile), begin = u;
      const int row = tile * 128 + wg * 64 + warp * 16 + lane / 4;
      const bool head = begin == first;
      float alpha[NT / 4][2];  // loaded now, used after the main loop
#pragma unroll
      for (int c = 0; c < NT / 4; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) alpha[c][h] = al[c] && row + 8 * h < a.n ? __ldg(al[c] + row + 8 * h) : 0.f;
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[i] = 0;
#pragma unroll
      for (int i = 0; i < NB * 8; i++) e[i] = 0;
#pragma unroll 1
      for (; u < end; u++) {
#pragma unroll 1
        for (int b = 0; b < 4; b++) {
          mbar_wait(full + 8 * st, ph);
          u32 s = base + st * STAGE;
          u64 dw = desc_swizzle128(s + wg * 8192), dx = desc_swizzle128(s + W_BYTES);
          pin(d);
          wgmma_fence();
#pragma unroll
          for (int kk = 0; kk < 4; kk++) Mma<T, NT>::ss(d, dw + 2 * kk, dx + 2 * kk, 1);
          wgmma_commit();
          wgmma_wait<0>();
          pin(d);
          if (lane == 0) mbar_arrive(empty + 8 * st);
          if (++st == a.stages) st = 0, ph ^= 1;
        }
        if (MODE == NONE) continue;
        mbar_wait(ffull + 8 * fr, fph);
        u32 f = frames + fr * frame_bytes;
        u64 ds = desc_plain(f + wg * 2048, 128, 256), dp = desc_plain(f + a.variants * SIGN_BYTES, 128, 256);
        pin(e);
        wgmma_fence();
        if (MODE == ONE) Bmma<16 * NB>::ss(e, ds, dp);  // one variant: the planes of all tokens are one [16 NB][256 bits] operand
        else {
#pragma unroll
          for (int t = 0; t < NB; t++)
            Bmma<16>::ss(*(int(*)[8])(e + 8 * t), ds + ((slots >> (4 * t)) & 15) * (SIGN_BYTES / 16), dp + t * (PLANE_BYTES / 16));
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(e);
        if (lane == 0) mbar_arrive(fempty + 8 * fr);
        if (++fr == a.frames) fr = 0, fph ^= 1;
      }
      // d[4j + 2u + e] += delta of token 8j + 2q + e, row g + 8u; the plane sums end up in all four lanes of a quad.
#pragma unroll
      for (int t = 0; t < (MODE == NONE ? 0 : NB); t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int b = 8 * t + 2 * h;
          int s = (e[b] << (2 * q)) + (e[b + 1] << (2 * q + 1)) + (e[b + 4] << (8 + 2 * q)), top = e[b + 5] << (9 + 2 * q);
          s += q == 3 ? -top : top;
          s += __shfl_xor_sync(~0u, s, 1);
          s += __shfl_xor_sync(~0u, s, 2);
          const int c = 2 * (t / 8) + (t & 1);
          if (((t & 7) >> 1) == q) d[4 * (t / 8) + 2 * h + (t & 1)] += alpha[c][h] * sx[c] * (float)((head ? sum[c] : 0) - 2 * s);
        }
      const int tile_end = first + per_tile;
      if (!head) {  // only a CTA's first tile can lack its head: one partial per CTA, [cta][NT/2][256]
#pragma unroll
        for (int i = 0; i < NT / 2; i++) store_word(a.workspace + ((size_t)cta * (NT / 2) + i) * 256 + tid, (u64)1 << 32 | __float_as_uint(d[i]));
        continue;
      }
      if (end < tile_end) {
        int c1 = cta + 1;  // contributors: CTAs cta + 1 .. c1 - 1
        while (c1 < (int)gridDim.x && (int)((long long)units * c1 / gridDim.x) < tile_end) c1++;
        for (int c = cta + 1; c < c1; c += 4) {  // four in flight
          u64 w[4][NT / 2];
          bool ready;
          do {
            ready = true;
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
              for (int i = 0; i < NT / 2; i++) {
                w[k][i] = load_word(a.workspace + ((size_t)min(c + k, c1 - 1) * (NT / 2) + i) * 256 + tid);
                ready &= (w[k][i] >> 32) != 0;
              }
          } while (!ready);
#pragma unroll
          for (int k = 0; k < 4; k++)
            if (c + k < c1)
#pragma unroll
              for (int i = 0; i < NT / 2; i++) {
                d[i] += __uint_as_float((u32)w[k][i]);
                store_word(a.workspace + ((size_t)(c + k) * (NT / 2) + i) * 256 + tid, 0);
              }
        }
      }
      {
        T* Y = (T*)a.y;
#pragma unroll
        for (int i = 0; i < NT / 2; i++) {
          int t = 8 * (i / 4) + 2 * q + (i & 1), n = row + 8 * ((i >> 1) & 1);
          if (t >= a.rows || n >= a.n) continue;
          const float* own = MODE != NONE && a.slot[t] >= 0 ? a.overlays[a.columns[a.slot[t]]].bias : nullptr;
          const float* bias = own ? own : a.bias;
          Y[(size_t)t * a.n + n] = (T)(bias ? d[i] + __ldg(bias + n) : d[i]);
        }
      }
    }
  }
}

template <typename T, int NT, int NB, Mode MODE> cudaError_t launch_mode(k_decode_args a, cudaStream_t s) {
  const int stage = W_BYTES + NT * 128, frame = MODE == NONE ? 0 : a.variants * SIGN_BYTES + NB * PLANE_BYTES, budget = 224 * 1024;
  a.stages = (budget - 2 * frame) / stage / 4 * 4;
  if (a.stages > 12) a.stages = 12;
  a.burst = a.stages >= 8 ? 4 : 2;
  a.frames = frame ? (budget - a.stages * stage) / frame : 0;
  if (a.frames > 4) a.frames = 4;
  int smem = a.stages * stage + a.frames * frame + 1024, units = (a.n + 127) / 128 * (a.k / 256);
  cudaError_t e = cudaFuncSetAttribute(decode_kernel<T, NT, NB, MODE>, cudaFuncAttributeMaxDynamicSharedMemorySize, budget + 1024);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(a.sm_count < units ? a.sm_count : units));  // every CTA must own at least one unit: the split counts on it
  c.blockDim = dim3(384), c.dynamicSmemBytes = (size_t)smem, c.stream = s, c.attrs = at, c.numAttrs = a.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, decode_kernel<T, NT, NB, MODE>, a);
}
template <int NT, int NB> cudaError_t launch(const k_decode_args& a, cudaStream_t s) {
  typedef __nv_bfloat16 T;
  return a.variants == 0 ? launch_mode<T, NT, NB, NONE>(a, s) : a.variants == 1 ? launch_mode<T, NT, NB, ONE>(a, s) : launch_mode<T, NT, NB, MANY>(a, s);
}

}  // namespace

extern "C" uint64_t k_decode_workspace_bytes(int sm_count) { return (uint64_t)sm_count * 8 * 256 * 8; }

// nb: tokens the planes are laid out for (k_planes_bf16): 1, 2, 4, 8 or 16, at least rows.
extern "C" cudaError_t k_decode_bf16(const k_decode_args* a, int nb, cudaStream_t s) {
  if (a->k % 256 || a->k > 65536 || a->variants < 0 || a->variants > 16 || a->rows < 1 || a->rows > nb) return cudaErrorInvalidValue;
  switch (nb) {
    case 1: return launch<8, 1>(*a, s);
    case 2: return launch<8, 2>(*a, s);
    case 4: return launch<8, 4>(*a, s);
    case 8: return launch<8, 8>(*a, s);
    case 16: return launch<16, 16>(*a, s);
  }
  return cudaErrorInvalidValue;
}

extern "C" cudaError_t k_planes_bf16(uint8_t* planes, float* scale, int32_t* sum, const uint16_t* x, int rows, int k, int nb, cudaStream_t s) {
  if (k % 256 || rows > nb) return cudaErrorInvalidValue;
  dim3 grid((unsigned)nb, (unsigned)(k / 256 + 15) / 16);
  planes_kernel<<<grid, 256, 0, s>>>(planes, scale, sum, x, rows, k, nb);
  return cudaGetLastError();
}
