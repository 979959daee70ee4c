// bitdelta_mixed.cu - some rows of many variants: the base product of all rows at once, and each variant's signs once (sm_90a).
//
//   Y[m][n] = bias[n] + sum_k x[m][k] W[n][k] + scale_v[n] sum_k x[m][k] S_v[n][k],   v = the variant of row m; base rows have no S
//
// Shapes:  rows as groups of at most GW of one variant (GW = 8 or 16; at most GROUPS of them, sorted by variant); W [n][k], x [rows][k],
//          Y [rows][n] bf16 or fp16 (T); sign chunks as in repack.cu; scale, bias float32. k % 256 == 0, n % 8 == 0.
// Rounding: signs are +-1 in T, so both sums are exact products added in float32; Y is rounded once.
// Tile:    128 W rows x N = GW * GROUPS columns; a group's rows are columns GW j .. of it. A unit is one K256 step of one tile; units
//          are dealt to the CTAs as in bitdelta_decode.cu, and split tiles are added up as there (split.cuh).
// Mapping: warpgroups 0, 1 = 64 W rows each. Warp 8 streams W, warp 9 the sign chunks, warp 10 x. Only x waits for the kernel before.
// Memory:  ring 1: stages of W 128x64; ring 2: sign chunks, 4 KB each, in slot order; ring 3: pieces of x, N x 64, of which a unit
//          uses four and frees them at its end. 128-byte swizzle; a box of x is 8 rows, one core-matrix row group.
// Order:   per unit 4 x (4 wgmma of a K64 for all columns), after which W's stages are free; then group by group 4 x (signs of a K64
//          -> +-1 in registers, 4 wgmma of GW columns). The registers are double; one group of wgmma is in flight during the next
//          expansion. A column's sums depend on nothing but its row and (n, k, grid).
#include "decode.cuh"

namespace {

template <int GW, int GROUPS> struct Mixed {
  static constexpr int N = GW * GROUPS, THREADS = 384, REGS = 216;  // 72 of the producers
  static constexpr int PIECE = N * 128, PIECES = N == 128 ? 6 : 8, PARTIAL = N * 512;
};

// This thread's +-1 fragment (as load_w of bitdelta_gemm.cu, without W) from the sign bytes of rows g and g + 8.
template <typename T> __device__ __forceinline__ void expand_signs(u32 (&A)[16], u32 b_s) {
  const u32 word = __byte_perm(lds_u16(b_s), lds_u16(b_s + 256), 0x1504);  // {H_g, H_g8, L_g, L_g8}
#pragma unroll
  for (int j = 0; j < 16; j++) A[j] = and_xor(word << ((j & 1) * 8 + 2 * (j >> 2) + ((j >> 1) & 1)), 0x80008000u, Elem<T>::ONE2);
}

// One long function, for the same reason as decode_kernel.
template <typename T, int GW, int GROUPS>
__global__ void __launch_bounds__(Mixed<GW, GROUPS>::THREADS, 1) mixed_kernel(const __grid_constant__ k_mixed_args a) {
  typedef Mixed<GW, GROUPS> S;
  constexpr int N = S::N;
  extern __shared__ uint8_t smem_raw[];
  __shared__ __align__(8) u64 bars[6 * MAX_RING + 1];
  __shared__ const float *scale_of[SLOTS_MAX], *bias_of[SLOTS_MAX];
  __shared__ short first_of[GROUPS], end_of[GROUPS];
  __shared__ signed char slot_of[GROUPS];  // -1: the base
  __shared__ int ticket;
  const u32 base = (smem_u32(smem_raw) + 1023) & ~1023u, pieces = base + a.stages * W_BYTES, chunks = pieces + S::PIECES * S::PIECE;
  const u32 full = smem_u32(bars), empty = full + 8 * MAX_RING, pfull = empty + 8 * MAX_RING, pempty = pfull + 8 * MAX_RING, sfull = pempty + 8 * MAX_RING,
            sempty = sfull + 8 * MAX_RING;
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  const uint8_t* bits = nullptr;  // of slot `lane`, in warp 9
  if (threadIdx.x == 0) {
    ticket = draw_ticket(a.ticket, gridDim.x);
    prefetch_map(&a.w), prefetch_map(&a.x);
    for (int i = 0; i < a.stages; i++) mbar_init(full + 8 * i, 1), mbar_init(empty + 8 * i, 8);
    for (int i = 0; i < S::PIECES; i++) mbar_init(pfull + 8 * i, 1), mbar_init(pempty + 8 * i, 8);
    for (int i = 0; i < a.chunks; i++) mbar_init(sfull + 8 * i, 1), mbar_init(sempty + 8 * i, 8);
    mbar_init(smem_u32(bars + 6 * MAX_RING), 1);
    mbar_init_fence();
  } else if (threadIdx.x >= 32 && threadIdx.x < 32 + GROUPS) {
    const int j = threadIdx.x - 32;
    const k_gemm_tile t = j < a.group_count ? a.groups[j] : k_gemm_tile{0, 0, -1, 0};
    first_of[j] = (short)t.m0, end_of[j] = (short)t.m1, slot_of[j] = (signed char)t.variant;
  } else if (wg == 2 && warp == 1 && lane < a.variants) {
    // A slot without a plane for this linear streams W's bytes in its place; its scale is zero.
    const k_overlay_linear* o = a.overlays + a.columns[lane];
    const bool some = o->plane_count > 0;
    bits = some ? o->bits[0] : (const uint8_t*)a.w_data;
    scale_of[lane] = some ? o->scale[0] : nullptr;
    bias_of[lane] = o->bias ? o->bias : a.bias;
  }
  __syncthreads();
  const int per_tile = a.k / 256, units = (a.n + 127) / 128 * per_tile;
  pdl_launch();

  if (wg == 2) {
    reg_dec<72>();
    const int u0 = split_begin(units, ticket, gridDim.x), u1 = split_begin(units, ticket + 1, gridDim.x);
    if (warp == 0) {
      if (lane == 0) {
        Ring r = {0, 1};
        for (int s = 4 * u0; s < 4 * u1; s += a.burst) {
          Ring w = r;
          for (int i = 0; i < a.burst; i++, w.next(a.stages)) mbar_wait(empty + 8 * w.at, w.phase);
          for (int i = 0; i < a.burst; i++, r.next(a.stages)) {
            mbar_expect(full + 8 * r.at, W_BYTES);
            tma_load(base + r.at * W_BYTES, &a.w, (s + i) % (4 * per_tile) * 64, (s + i) / (4 * per_tile) * 128, full + 8 * r.at, SM90_EVICT_FIRST);
          }
        }
      }
    } else if (warp == 1) {
      Ring r = {0, 1};
      for (int u = u0; u < u1; u++)
        for (int v = 0; v < a.variants; v++, r.next(a.chunks)) {
          const uint8_t* from = (const uint8_t*)__shfl_sync(~0u, (unsigned long long)bits, v);
          if (lane == 0) {
            mbar_wait(sempty + 8 * r.at, r.phase);
            mbar_expect(sfull + 8 * r.at, SIGN_BYTES);
            bulk_load(chunks + r.at * SIGN_BYTES, from + (size_t)u * SIGN_BYTES, SIGN_BYTES, sfull + 8 * r.at, SM90_EVICT_FIRST);
          }
          __syncwarp();
        }
    } else if (warp == 2) {
      const int live = a.group_count * (GW / 8);  // boxes
      const int row = lane < live ? first_of[lane / (GW / 8)] + lane % (GW / 8) * 8 : 0;
      pdl_wait();
      Ring r = {0, 1};
      for (int s = 4 * u0; s < 4 * u1; s++, r.next(S::PIECES)) {
        mbar_wait(pempty + 8 * r.at, r.phase);
        if (lane == 0) mbar_expect(pfull + 8 * r.at, live * 1024);
        __syncwarp();
        if (lane < live) tma_load(pieces + r.at * S::PIECE + lane * 1024, &a.x, s % (4 * per_tile) * 64, row, pfull + 8 * r.at, SM90_EVICT_LAST);
      }
    }
    __syncwarp();
  } else {
    reg_inc<S::REGS>();
    const int cta = __shfl_sync(~0u, ticket, 0), u0 = split_begin(units, cta, gridDim.x), u1 = split_begin(units, cta + 1, gridDim.x);
    const Split split = {a.workspace, a.sm_count};
    const int q = lane & 3, g = wg * 64 + warp * 16 + lane / 4, tid = wg * 128 + warp * 32 + lane;
    const u32 b_off = (g >> 3) * 256 + (g & 7) * 16 + q * 2;
    Ring st = {0, 0}, xp = {0, 0}, ch = {0, 0};
    float d[N / 2], e[GROUPS][GW / 2];
    u32 A[2][16];
    for (int u = u0; u < u1;) {
      const int tile = u / per_tile, first = tile * per_tile, end = min(u1, first + per_tile), tile_end = first + per_tile;
      const int row = tile * 128 + g;
      const bool head = u == first;
      if (lane < a.variants && scale_of[lane])  // this warp's 16 scales of each slot will be wanted
        asm volatile("prefetch.global.L2 [%0];" ::"l"(scale_of[lane] + min(tile * 128 + wg * 64 + warp * 16, a.n - 1)));
#pragma unroll
      for (int i = 0; i < N / 2; i++) d[i] = 0;
#pragma unroll
      for (int i = 0; i < N / 2; i++) e[i / (GW / 2)][i % (GW / 2)] = 0;
#pragma unroll 1
      for (; u < end; u++) {
        int last = 0;  // stage of W whose products are in flight, -1: handed back
        const int x0 = xp.at;
#pragma unroll 1
        for (int b = 0; b < 4; b++) {
          mbar_wait(full + 8 * st.at, st.phase);
          mbar_wait(pfull + 8 * xp.at, xp.phase);
          const u64 dw = desc_swizzle128(base + st.at * W_BYTES + wg * 8192), dx = desc_swizzle128(pieces + xp.at * S::PIECE);
          pin(d);
          wgmma_fence();
#pragma unroll
          for (int kk = 0; kk < 4; kk++) Mma<T, N>::ss(d, dw + 2 * kk, dx + 2 * kk, 1);
          wgmma_commit();
          if (b) {
            wgmma_wait<1>();
            if (lane == 0) mbar_arrive(empty + 8 * last);
          }
          last = st.at;
          st.next(a.stages);
          xp.next(S::PIECES);
        }
        int slot = 0;  // the slot whose chunk is ch
        mbar_wait(sfull + 8 * ch.at, ch.phase);
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
          const int mine = __shfl_sync(~0u, (int)slot_of[j], 0);
          if (j < a.group_count && mine >= 0) {
#pragma unroll 1
            for (; slot < mine; slot++) {
              __syncwarp();  // every lane has read its signs
              if (lane == 0) mbar_arrive(sempty + 8 * ch.at);
              ch.next(a.chunks);
              mbar_wait(sfull + 8 * ch.at, ch.phase);
            }
            const u32 signs = chunks + ch.at * SIGN_BYTES + b_off;
#pragma unroll
            for (int b = 0; b < 4; b++) {
              const int at = x0 + b >= S::PIECES ? x0 + b - S::PIECES : x0 + b;
              const u64 dx = desc_swizzle128(pieces + at * S::PIECE + j * GW * 128);
              wgmma_wait<1>();  // the products before the last ones have read their registers
              if (b == 1 && last >= 0) {
                if (lane == 0) mbar_arrive(empty + 8 * last);
                last = -1;
              }
              expand_signs<T>(A[b & 1], signs + (b & 2) * 64 + (b & 1) * 8);
              pin(e[j]);
              wgmma_fence();
#pragma unroll
              for (int kk = 0; kk < 4; kk++)
                Mma<T, GW>::rs(e[j], A[b & 1][4 * kk], A[b & 1][4 * kk + 1], A[b & 1][4 * kk + 2], A[b & 1][4 * kk + 3], dx + 2 * kk, 1);
              wgmma_commit();
            }
          }
        }
        wgmma_wait<0>();
        __syncwarp();
        if (lane == 0) {
          if (last >= 0) mbar_arrive(empty + 8 * last);
          mbar_arrive(sempty + 8 * ch.at);  // every slot has a group: this was the last
#pragma unroll
          for (int b = 0; b < 4; b++) mbar_arrive(pempty + 8 * (x0 + b >= S::PIECES ? x0 + b - S::PIECES : x0 + b));
        }
        ch.next(a.chunks);
      }
      pin(d);
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        pin(e[j]);
        const float* scale = j < a.group_count && slot_of[j] >= 0 ? scale_of[slot_of[j]] : nullptr;
        const float low = scale && row < a.n ? __ldg(scale + row) : 0.f, high = scale && row + 8 < a.n ? __ldg(scale + row + 8) : 0.f;
#pragma unroll
        for (int i = 0; i < GW / 2; i++) d[j * (GW / 2) + i] = fmaf(i & 2 ? high : low, e[j][i], d[j * (GW / 2) + i]);
      }
      if (!head) {  // only a CTA's first tile can lack its head
        leave_partial(d, split, cta, tid);
        continue;
      }
      if (end < tile_end)  // and only its last its end: the stages are free by then
        fetch_partials(d, split, cta + 1, split_last(units, cta, gridDim.x, tile_end), tid, base, a.stages * W_BYTES / S::PARTIAL,
                       smem_u32(bars + 6 * MAX_RING));
      T* Y = (T*)a.y;
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        if (j >= a.group_count) break;
        const float* bias = slot_of[j] >= 0 ? bias_of[slot_of[j]] : a.bias;
        const float low = bias && row < a.n ? __ldg(bias + row) : 0.f, high = bias && row + 8 < a.n ? __ldg(bias + row + 8) : 0.f;
#pragma unroll
        for (int i = 0; i < GW / 2; i += 2) {  // rows 2p, 2p + 1 of one column go together: lanes of even and odd g trade columns
          const float add = i & 2 ? high : low, even = d[j * (GW / 2) + i] + add, odd = d[j * (GW / 2) + i + 1] + add;
          const bool up = lane & 4;
          const float got = __shfl_xor_sync(~0u, up ? even : odd, 4);
          const int m = first_of[j] + i / 4 * 8 + 2 * q + up, n = (row & ~1) + (i & 2) * 4;
          if (m < end_of[j] && n < a.n) *(u32*)(Y + (size_t)m * a.n + n) = up ? Elem<T>::pack(got, odd) : Elem<T>::pack(even, got);
        }
      }
    }
  }
}

template <typename T, int GW, int GROUPS> cudaError_t launch(k_mixed_args a, cudaStream_t s) {
  typedef Mixed<GW, GROUPS> S;
  auto kernel = mixed_kernel<T, GW, GROUPS>;
  const int units = (a.n + 127) / 128 * (a.k / 256);
  a.chunks = a.variants < 3 ? 4 : 8;
  a.stages = (BUDGET - S::PIECES * S::PIECE - a.chunks * SIGN_BYTES) / W_BYTES;
  if (a.stages > 12) a.stages = 12;
  a.burst = a.stages >= 8 ? 4 : 2;
  const int smem = a.stages * W_BYTES + S::PIECES * S::PIECE + a.chunks * SIGN_BYTES + 1024;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(a.sm_count < units ? a.sm_count : units));  // every CTA must own at least one unit: the split counts on it
  c.blockDim = dim3(S::THREADS), c.dynamicSmemBytes = (size_t)smem, c.stream = s, c.attrs = at, c.numAttrs = a.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, kernel, a);
}
template <typename T> cudaError_t launch_width(const k_mixed_args& a, int width, cudaStream_t s) {
  if (width == 16) return a.group_count <= 4 ? launch<T, 16, 4>(a, s) : launch<T, 16, 8>(a, s);
  return a.group_count <= 4 ? launch<T, 8, 4>(a, s) : a.group_count <= 8 ? launch<T, 8, 8>(a, s) : launch<T, 8, 16>(a, s);
}

}  // namespace

extern "C" cudaError_t k_mixed(const k_mixed_args* a, int width, cudaStream_t s) {
  if (a->k % 256 || a->n % 8 || a->variants < 1 || a->variants > SLOTS_MAX || (width != 8 && width != 16) || a->group_count < 1 ||
      a->group_count * width > K_MIXED_COLUMNS)
    return cudaErrorInvalidValue;
  return a->fp16 ? launch_width<__half>(*a, width, s) : launch_width<__nv_bfloat16>(*a, width, s);
}

extern "C" double k_mixed_cost(int n, int k, int groups, int width, int variants, int sm_count) {
  if (k % 256) return 1e300;
  // Cycles of a unit's products on the tensor cores: RS wgmma of up to 16 columns 13, SS of N columns N / 2 and 24 at least.
  const int columns = groups * width <= 32 ? 32 : groups * width <= 64 ? 64 : 128;
  const double products = (16.0 * groups * 2 * 13 + 16.0 * 2 * (columns < 48 ? 24 : columns / 2)) / 1.8e3 * 1.15, bytes = (W_BYTES * 4 + SIGN_BYTES * variants) / 33e3;
  return (double)((n + 127) / 128) * (k / 256) / sm_count * (bytes > products ? bytes : products) + 6;
}
