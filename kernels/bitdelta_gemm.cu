// bitdelta_gemm.cu - prefill: Y^T = W_eff x^T, W_eff = W + scale * S rebuilt in registers, never in memory (sm_90a).
//
//   Y[m][n] = bias[n] + sum_k x[m][k] (W[n][k] + scale_v[n] S_v[n][k]),   v = the variant of row m; base rows have no S
//
// Shapes:  W [n][k], x [rows][k], Y [rows][n] bf16 or fp16 (T); sign chunks as in repack.cu; scale, bias float32. k % 128 == 0, n % 8 == 0.
// Rounding: W_eff is rounded to T once; sums are float32; Y is rounded once. (See Precision in the README.)
// Tile:    128 W rows x TOK tokens x K64, tokens of one variant: any mix of variants is one launch. Two CTAs of a cluster take
//          neighbouring W tiles and the same tokens; each loads half of x and multicasts it. Persistent; clusters walk tiles in
//          groups of `group` W-tile pairs by all token tiles, so that a W panel leaves memory once and is shared through L2.
// Mapping: warpgroups 0, 1 = 64 W rows each, all tokens; warpgroup 2 = one thread that issues every copy.
// Memory:  STAGES x (W 128x64 + x TOKx64, 128-byte swizzle), a ring of 4 KB sign chunks (one per K256, arriving with the first
//          stage of the chunk), two 4 KB output staging tiles per warpgroup.
// Order:   step s: 4 wgmma of s | wait for s-1, free its stage | wait full s+1, ldmatrix + rebuild into the other registers.
// Split:   SPLIT = 1 as above. SPLIT = 2 or 4 (few tiles): the cluster shares one tile instead and each CTA takes a K range; the
//          float32 partials are added in K order through distributed shared memory, each CTA finishing TOK / SPLIT tokens.
//          (K dealt evenly to the clusters, whatever waves the tiles would make, was slower at all but a few sizes: 0.99 to 1.25.)
// Splits and tile sizes follow from shapes alone, so a step repeated is bitwise equal.
#include "common.cuh"
#include "sm90.cuh"
#include "wgmma.cuh"

namespace {

constexpr int W_BYTES = 128 * 64 * 2, SIGN_BYTES = 4096, OUT_BYTES = 32 * 64 * 2;
// Rebuild of one warp's m16 x k64 slice of W_eff in registers, T arithmetic:
//   A[4kk + i] = W + alpha * sign, row g + 8(i&1), columns 16kk + 8(i>>1) + 2q, +1   (g = lane/4, q = lane%4)
// w_s: this lane's ldmatrix address (row lane%16, chunk (lane/16) ^ (row%8)) in the swizzled W stage.
// b_s: address of the two sign bytes of (row g, half, block, q); row g + 8 is 256 bytes on.
// al0, al1: alpha of rows g and g + 8, twice in a register.
template <typename T, bool DELTA> __device__ __forceinline__ void load_w(u32 (&A)[16], u32 w_s, u32 b_s, u32 al0, u32 al1) {
#pragma unroll
  for (int kk = 0; kk < 4; kk++) ldsm4(A[4 * kk], A[4 * kk + 1], A[4 * kk + 2], A[4 * kk + 3], w_s ^ (32 * kk));
  if (DELTA) {
    u32 word = __byte_perm(lds_u16(b_s), lds_u16(b_s + 256), 0x1504);  // {H_g, H_g8, L_g, L_g8}
#pragma unroll
    for (int j = 0; j < 16; j++)
      A[j] = Elem<T>::add2(A[j], and_xor(word << ((j & 1) * 8 + 2 * (j >> 2) + ((j >> 1) & 1)), 0x80008000u, (j & 1) ? al1 : al0));
  }
}

template <int SPLIT> struct Cluster {
  static constexpr int SIZE = SPLIT == 1 ? 2 : SPLIT, PAIR = SPLIT == 1 ? 2 : 1;  // CTAs; W tiles per cluster
};

template <int TOK> struct Plan {
  static constexpr int STAGES = TOK == 256 ? 4 : TOK == 128 ? 6 : 7;
  static constexpr int X_BYTES = TOK * 128, STAGE = W_BYTES + X_BYTES;
  // A chunk buffer is reused SIGN_BUFS chunks later; every chunk spans at least two steps, so STAGES/2 + 1 buffers are
  // never overwritten before their last reader has released its stage.
  static constexpr int SIGN_BUFS = STAGES / 2 + 1;
  static constexpr int SIGN_OFF = STAGES * STAGE, OUT_OFF = SIGN_OFF + SIGN_BUFS * SIGN_BYTES, BAR_OFF = OUT_OFF + 4 * OUT_BYTES;
  static constexpr int SMEM = BAR_OFF + 16 * STAGES + 1024;
};

struct Tile {
  int tn, m0, m1, variant;
};
// Pair-tile p of the walk (two neighbouring W tiles, one token tile) and member 0 or 1 -> tile.
__device__ __forceinline__ Tile tile_at(int p, int pairs, int token_tiles, int group, u32 member, const k_gemm_tile* tiles) {
  int per = group * token_tiles, g = p / per, i = p - g * per, size = min(group, pairs - g * group);
  int4 t = __ldg((const int4*)tiles + i / size);
  return {(g * group + i % size) * 2 + (int)member, t.x, t.y, t.z};
}

__device__ __forceinline__ bool has_plane(const k_gemm_args& a, int variant) { return variant >= 0 && a.overlays[variant].plane_count > 0; }

// This thread's rows g and g + 8 of the accumulators get their bias.
template <int R> __device__ __forceinline__ void add_bias(float (&d)[R], const k_gemm_args& a, int variant, int row) {
  const float* bias = variant >= 0 && a.overlays[variant].bias ? a.overlays[variant].bias : a.bias;
  if (!bias) return;
  const float b0 = row < a.n ? __ldg(bias + row) : 0.f, b1 = row + 8 < a.n ? __ldg(bias + row + 8) : 0.f;
#pragma unroll
  for (int i = 0; i < R; i += 4) d[i] += b0, d[i + 1] += b0, d[i + 2] += b1, d[i + 3] += b1;
}

struct Pipe {  // position in the stage ring and in the sign ring
  u32 stage, phase, chunk;
};

// A stage is refilled by this CTA's producer and, when x is multicast, by the peer's.
template <int PAIR> __device__ __forceinline__ void release_stage(u32 empty_s, int lane) {
  if (PAIR > 1) {
    if (lane < PAIR) mbar_arrive_cta(empty_s, lane);
  } else if (lane == 0) mbar_arrive(empty_s);
}

// Issue the 4 wgmma of the current stage from `cur`; then free the previous stage and fill `nxt` for step k_next.
template <typename T, int TOK, bool DELTA, int PAIR, bool FIRST, bool LAST>
__device__ __forceinline__ void step(float (&d)[TOK / 2], u32 (&cur)[16], u32 (&nxt)[16], Pipe& p, int k_next, u32 base, u32 w_off, u32 b_off, u32 al0, u32 al1,
                                     int lane) {
  typedef Plan<TOK> P;
  const u32 full = base + P::BAR_OFF, empty = full + 8 * P::STAGES;
  u64 db = desc_swizzle128(base + p.stage * P::STAGE + W_BYTES);
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; kk++)
    Mma<T, TOK>::rs(d, cur[4 * kk], cur[4 * kk + 1], cur[4 * kk + 2], cur[4 * kk + 3], db + 2 * kk, FIRST && kk == 0 ? 0 : 1);
  wgmma_commit();
  pin(d);
  u32 prev = p.stage == 0 ? P::STAGES - 1 : p.stage - 1;
  if (++p.stage == P::STAGES) p.stage = 0, p.phase ^= 1;
  wgmma_wait<1>();
  if (!FIRST) release_stage<PAIR>(empty + 8 * prev, lane);
  if (!LAST) {
    if (DELTA && (k_next & 3) == 0) p.chunk = p.chunk + 1 == P::SIGN_BUFS ? 0 : p.chunk + 1;
    mbar_wait(full + 8 * p.stage, p.phase);
    load_w<T, DELTA>(nxt, base + p.stage * P::STAGE + w_off, base + P::SIGN_OFF + p.chunk * SIGN_BYTES + b_off + (k_next & 2) * 64 + (k_next & 1) * 8, al0, al1);
  }
}

// Registers -> bf16/fp16 -> [32 tokens][64 rows] staging -> Y. Whole 32-token pieces go by TMA; a piece that holds the end of
// the segment is stored by the threads, so tokens of the next segment are never touched.
template <typename T, int TOK>
__device__ __forceinline__ void epilogue(float (&d)[TOK / 2], const CUtensorMap* my, T* Y, int N, Tile t, u32 out_s, u32& turn, int wg, int warp, int lane) {
  int n0 = t.tn * 128 + wg * 64, tid = warp * 32 + lane;
#pragma unroll
  for (int j = 0; j < TOK / 32; j++) {
    int m = t.m0 + 32 * j;
    if (m >= t.m1) break;
    const u32 buf = out_s + (turn++ & 1) * OUT_BYTES;
    if (tid == 0) bulk_wait_read<1>();
    named_barrier(1 + wg, 128);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int b = 4 * (4 * j + 2 * h);
      u32 row = 16 * h + 8 * (lane >> 4) + (lane & 7), col = 2 * warp + ((lane >> 3) & 1);
      stsm4t(buf + row * 128 + ((col ^ (row & 7)) * 16), Elem<T>::pack(d[b], d[b + 1]), Elem<T>::pack(d[b + 2], d[b + 3]), Elem<T>::pack(d[b + 4], d[b + 5]),
             Elem<T>::pack(d[b + 6], d[b + 7]));
    }
    if (m + 32 <= t.m1) {
      fence_proxy_async();
      named_barrier(1 + wg, 128);
      if (tid == 0) tma_store(my, buf, n0, m), bulk_commit();
    } else {
      named_barrier(1 + wg, 128);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int row = (tid + 128 * i) / 8, c = tid % 8;
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(buf + row * 128 + ((c ^ (row & 7)) * 16)));
        if (m + row < t.m1 && n0 + 8 * c < N) *(uint4*)(Y + (size_t)(m + row) * N + n0 + 8 * c) = v;
      }
      if (tid == 0) bulk_commit();
    }
  }
}

// Registers -> float32 [rows][wide_stride], 32 bytes of a row at a time: the head's logits, which 16 bits do not hold.
template <int TOK> __device__ __forceinline__ void epilogue_wide(const float (&d)[TOK / 2], const k_gemm_args& a, Tile t, int wg, int warp, int lane) {
  const int n = t.tn * 128 + wg * 64 + warp * 16 + lane / 4, m0 = t.m0 + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < TOK / 2; i++) {
    const int m = m0 + 8 * (i / 4) + (i & 1), row = n + 8 * (i / 2 % 2);
    if (m < t.m1 && row < a.n) a.wide[(size_t)m * a.wide_stride + row] = d[i];
  }
}

template <typename T> __device__ __forceinline__ u32 alpha2(const float* alpha, int row, int N) {
  float a = row < N ? __ldg(alpha + row) : 0.f;
  return Elem<T>::pack(a, a);
}

// Partial accumulators -> own shared memory (stage area) as [slice][i][256 threads] float4; after the cluster barrier every CTA adds
// slice `rank` of all CTAs in K order. f[i]: this thread's fragment of tokens [rank * TOK/SPLIT, +TOK/SPLIT).
template <int TOK, int SPLIT> __device__ __forceinline__ void dump_partial(const float (&d)[TOK / 2], u32 base, int tid) {
#pragma unroll
  for (int i = 0; i < TOK / 8; i++)
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(base + (i * 256 + tid) * 16), "f"(d[4 * i]), "f"(d[4 * i + 1]), "f"(d[4 * i + 2]), "f"(d[4 * i + 3]) : "memory");
}
template <int TOK, int SPLIT> __device__ __forceinline__ void reduce_partial(float (&f)[TOK / SPLIT / 2], u32 base, u32 rank, int tid) {
  constexpr int R = TOK / SPLIT / 8;
#pragma unroll
  for (int c = 0; c < SPLIT; c++) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(base + (rank * R * 256 + tid) * 16), "r"(c));
#pragma unroll
    for (int i = 0; i < R; i++) {
      float4 v;
      asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote + i * 4096) : "memory");
      if (c == 0) f[4 * i] = v.x, f[4 * i + 1] = v.y, f[4 * i + 2] = v.z, f[4 * i + 3] = v.w;
      else f[4 * i] += v.x, f[4 * i + 1] += v.y, f[4 * i + 2] += v.z, f[4 * i + 3] += v.w;
    }
  }
}

// One long function, for the same reason as decode_kernel: roles share register budgets and barrier phases.
template <typename T, int TOK, bool DELTA, int SPLIT>
__global__ void __cluster_dims__(Cluster<SPLIT>::SIZE) __launch_bounds__(384, 1) prefill_kernel(const __grid_constant__ k_gemm_args a) {
  typedef Plan<TOK> P;
  constexpr int CLUSTER = Cluster<SPLIT>::SIZE, PAIR = Cluster<SPLIT>::PAIR;
  extern __shared__ uint8_t smem_raw[];
  u32 base = (smem_u32(smem_raw) + 1023) & ~1023u;
  const u32 full = base + P::BAR_OFF, empty = full + 8 * P::STAGES;
  const u32 rank = cluster_rank();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  const int pairs = (a.n + 255) / 256, chunks = (a.k + 255) / 256, nk = a.k / 64 / SPLIT;
  // SPLIT = 1: cluster item p = pair-tile p. SPLIT > 1: items 2p, 2p + 1 = its two tiles.
  const int begin = a.first * (3 - PAIR), total = begin + a.count * (3 - PAIR), stride = gridDim.x / CLUSTER;
  const int k_off = SPLIT > 1 ? (int)rank * nk : 0;  // first K64 step of this CTA; a multiple of 4
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::STAGES; i++) mbar_init(full + 8 * i, 1), mbar_init(empty + 8 * i, 8 * PAIR);
    mbar_init_fence();
    prefetch_map(&a.w), prefetch_map(&a.x), prefetch_map(&a.y);
  }
  cluster_sync();
  pdl_launch();

  if (wg == 2) {
    static_assert(registers_fit(384, 224, 56));
    reg_dec<56>();
    if (warp == 0 && lane == 0) {
      u32 st = 0, ph = 0, chunk = 0;
      bool primed = false;
      for (int p = begin + blockIdx.x / CLUSTER; p < total; p += stride) {
        Tile t = tile_at(PAIR > 1 ? p : p / 2, pairs, a.tile_count, a.group, PAIR > 1 ? rank : p & 1, a.tiles);
        const int tn = min(t.tn, (a.n + 127) / 128 - 1);
        // Base rows beside variants read W's bytes as if they were signs and multiply them by zero.
        const uint8_t* bits = !DELTA ? nullptr : has_plane(a, t.variant) ? a.overlays[t.variant].bits[0] : (const uint8_t*)a.w_data;
        const uint8_t* signs = bits + ((size_t)tn * chunks + k_off / 4) * SIGN_BYTES;
        auto load_weights = [&](int k) {
          bool with_signs = DELTA && (k & 3) == 0;
          u32 s = base + st * P::STAGE, fb = full + 8 * st;
          mbar_expect(fb, P::STAGE + (with_signs ? SIGN_BYTES : 0));
          tma_load(s, &a.w, (k_off + k) * 64, a.w_row + t.tn * 128, fb, SM90_EVICT_NORMAL);
          if (with_signs) {
            chunk = chunk + 1 == P::SIGN_BUFS ? 0 : chunk + 1;
            bulk_load(base + P::SIGN_OFF + chunk * SIGN_BYTES, signs + (size_t)(k >> 2) * SIGN_BYTES, SIGN_BYTES, fb, SM90_EVICT_NORMAL);
          }
        };
        auto load_tokens = [&](int k) {
          u32 s = base + st * P::STAGE + W_BYTES, fb = full + 8 * st;
          if (PAIR > 1) tma_load_multicast(s + rank * (P::X_BYTES / 2), &a.x, (k_off + k) * 64, t.m0 + rank * (TOK / 2), fb, (1 << PAIR) - 1, SM90_EVICT_NORMAL);
          else {
            tma_load(s, &a.x, (k_off + k) * 64, t.m0, fb, SM90_EVICT_NORMAL);
            tma_load(s + P::X_BYTES / 2, &a.x, (k_off + k) * 64, t.m0 + TOK / 2, fb, SM90_EVICT_NORMAL);
          }
        };
        int k = 0;
        if (!primed) {  // weights do not depend on the previous kernel: half fill the ring with them before waiting for x
          primed = true;
          int n = min(nk, P::STAGES / 2);
          for (; k < n; k++, st++) load_weights(k);
          pdl_wait();
          for (k = 0, st = 0; k < n; k++, st++) load_tokens(k);
          ph = 1;  // stages n.. are still fresh: their first wait must pass
        }
        for (; k < nk; k++) {
          mbar_wait(empty + 8 * st, ph);
          load_weights(k);
          load_tokens(k);
          if (++st == P::STAGES) st = 0, ph ^= 1;
        }
      }
    }
    __syncwarp();
    if (SPLIT > 1) cluster_sync();  // pairs with the one between dump and reduce: one tile per cluster
  } else {
    reg_inc<224>();
    const int r = wg * 64 + warp * 16 + (lane & 15), g = wg * 64 + warp * 16 + lane / 4;
    const u32 w_off = r * 128 + (((lane >> 4) ^ (r & 7)) * 16), b_off = (g >> 3) * 256 + (g & 7) * 16 + (lane & 3) * 2;
    Pipe pp = {0, 0, 0};
    float d[TOK / 2];
    u32 A0[16], A1[16], turn = 0;
    for (int p = begin + blockIdx.x / CLUSTER; p < total; p += stride) {
      Tile t = tile_at(PAIR > 1 ? p : p / 2, pairs, a.tile_count, a.group, PAIR > 1 ? rank : p & 1, a.tiles);
      u32 al0 = 0, al1 = 0;
      if (DELTA && has_plane(a, t.variant)) {
        const float* scale = a.overlays[t.variant].scale[0];
        al0 = alpha2<T>(scale, t.tn * 128 + g, a.n), al1 = alpha2<T>(scale, t.tn * 128 + g + 8, a.n);
      }
      if (DELTA) pp.chunk = pp.chunk + 1 == P::SIGN_BUFS ? 0 : pp.chunk + 1;
      mbar_wait(full + 8 * pp.stage, pp.phase);
      load_w<T, DELTA>(A0, base + pp.stage * P::STAGE + w_off, base + P::SIGN_OFF + pp.chunk * SIGN_BYTES + b_off, al0, al1);
#define STEP(CUR, NXT, FIRST, LAST, KN) step<T, TOK, DELTA, PAIR, FIRST, LAST>(d, CUR, NXT, pp, KN, base, w_off, b_off, al0, al1, lane)
      STEP(A0, A1, true, false, 1);
#pragma unroll 1
      for (int k = 2; k < nk; k += 2) {
        STEP(A1, A0, false, false, k);
        STEP(A0, A1, false, false, k + 1);
      }
      STEP(A1, A0, false, true, 0);
#undef STEP
      wgmma_wait<0>();
      pin(d);
      if constexpr (SPLIT == 1) {
        release_stage<PAIR>(empty + 8 * (pp.stage == 0 ? P::STAGES - 1 : pp.stage - 1), lane);
        add_bias(d, a, t.variant, t.tn * 128 + g);
        if (a.wide) epilogue_wide<TOK>(d, a, t, wg, warp, lane);
        else epilogue<T, TOK>(d, &a.y, (T*)a.y_data, a.n, t, base + P::OUT_OFF + wg * 2 * OUT_BYTES, turn, wg, warp, lane);
      } else {
        named_barrier(3, 256);  // both warpgroups are done with the stages
        dump_partial<TOK, SPLIT>(d, base, threadIdx.x);
        cluster_sync();
        float f[TOK / SPLIT / 2];
        reduce_partial<TOK, SPLIT>(f, base, rank, threadIdx.x);
        add_bias(f, a, t.variant, t.tn * 128 + g);
        t.m0 += rank * (TOK / SPLIT);
        if (a.wide) epilogue_wide<TOK / SPLIT>(f, a, t, wg, warp, lane);
        else epilogue<T, TOK / SPLIT>(f, &a.y, (T*)a.y_data, a.n, t, base + P::OUT_OFF + wg * 2 * OUT_BYTES, turn, wg, warp, lane);
      }
    }
    if (warp == 0 && lane == 0) bulk_wait<0>();
    __syncwarp();
  }
  cluster_sync();  // the peer may still arrive on this CTA's barriers or multicast into it
}

template <typename T, int TOK, bool DELTA, int SPLIT> cudaError_t launch(const k_gemm_args* a, cudaStream_t s) {
  typedef Cluster<SPLIT> C;
  auto kernel = prefill_kernel<T, TOK, DELTA, SPLIT>;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan<TOK>::SMEM);
  if (e != cudaSuccess) return e;
  k_gemm_args b = *a;
  if (!b.count) b.first = 0, b.count = (b.n + 255) / 256 * b.tile_count;
  int items = b.count * (3 - C::PAIR);
  int clusters = SPLIT > 1 || b.sm_count / C::SIZE > items ? items : b.sm_count / C::SIZE;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(clusters * C::SIZE)), c.blockDim = dim3(384), c.dynamicSmemBytes = Plan<TOK>::SMEM, c.stream = s, c.attrs = at;
  c.numAttrs = b.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, kernel, b);
}

template <typename T, bool DELTA> cudaError_t launch_tok(const k_gemm_args* a, int tok, int split, cudaStream_t s) {
  switch (tok * 10 + split) {
    case 2561: return launch<T, 256, DELTA, 1>(a, s);
    case 2562: return launch<T, 256, DELTA, 2>(a, s);
    case 2564: return launch<T, 256, DELTA, 4>(a, s);
    case 1281: return launch<T, 128, DELTA, 1>(a, s);
    case 1282: return launch<T, 128, DELTA, 2>(a, s);
    case 641: return launch<T, 64, DELTA, 1>(a, s);
    case 642: return launch<T, 64, DELTA, 2>(a, s);
  }
  return cudaErrorInvalidValue;
}
template <typename T> cudaError_t launch_delta(const k_gemm_args* a, int tok, int split, bool delta, cudaStream_t s) {
  return delta ? launch_tok<T, true>(a, tok, split, s) : launch_tok<T, false>(a, tok, split, s);
}

// How many CTAs a tile of the last part-wave of 256-token tiles is split over, and the tiles before it.
int last_wave(int items, int sm_count, int k, int* full) {
  const int per = sm_count / 2, rest = items - items / per * per;
  *full = items - rest;
  return !*full || !rest ? 1 : rest * 8 <= sm_count && k % 1024 == 0 ? 4 : rest * 4 <= sm_count && k % 512 == 0 ? 2 : 1;
}

} // namespace

// (tok, split) must be one of launch_tok's. split > 1 needs k % (256 * split) == 0.
extern "C" cudaError_t k_gemm(const k_gemm_args* a, int tok, int split, bool delta, cudaStream_t s) {
  if (a->k % 128 || (split > 1 && a->k % (256 * split)) || (a->n % 8 && !a->wide) || a->tile_count <= 0 || a->group <= 0) return cudaErrorInvalidValue;
  k_gemm_args b = *a;
  const int last = tok == 256 && split == 1 && !b.count ? last_wave((b.n + 255) / 256 * b.tile_count, b.sm_count, b.k, &b.count) : 1;
  if (last == 1) b.count = a->count;
  cudaError_t e = b.fp16 ? launch_delta<__half>(&b, tok, split, delta, s) : launch_delta<__nv_bfloat16>(&b, tok, split, delta, s);
  if (e != cudaSuccess || last == 1) return e;
  // Whole waves of 256-token tiles, then a last part-wave of at most half the SMs split along K (a second launch).
  b.first = b.count, b.count = (b.n + 255) / 256 * b.tile_count - b.first;
  return k_gemm(&b, 256, last, delta, s);
}

extern "C" double k_gemm_cost(int n, int k, int tok, int split, int tile_count, int sm_count) {
  // Microseconds of a K64 step of a pair of CTAs, measured on an H200; of small tiles by how many pairs share the memory.
  const int pairs = (n + 255) / 256 * tile_count, per = sm_count / 2;
  const double busy = (double)split * pairs / per, shared = busy < 0.48 ? 0 : busy < 1 ? busy - 0.48 : 0.52;
  const double step = tok == 256 ? 0.76 : tok == 128 ? 0.45 : 0.24 + 0.327 * shared;
  // A split pays within one wave only: its CTAs do not share x.
  if (k % (split > 1 ? 256 * split : 128) || split > 2 || (split == 2 && 2 * pairs > per)) return 1e300;
  int full = 0;
  const int last = tok == 256 && split == 1 ? last_wave(pairs, sm_count, k, &full) : 1;
  const double waves = split == 2 ? 0.5 : last > 1 ? full / per + 1.0 / last + 0.08 : (pairs + per - 1) / per;
  const double bytes = (double)n * k * 2 / (4.2e6 * sm_count / 132), time = waves * (k / 64) * step;
  return 5 + (time > bytes ? time : bytes);
}
