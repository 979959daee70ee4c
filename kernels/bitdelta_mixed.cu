// bitdelta_mixed.cu - some rows of many variants: the base product of all rows at once, and each variant's signs once (sm_90a).
//
//   Y[m][n] = bias[n] + sum_k x[m][k] W[n][k] + scale_v[n] sum_k x[m][k] S_v[n][k],   v = the variant of row m; base rows have no S
//
// Shapes:  rows as groups of at most 8 of one variant (at most 2 HALF of them, sorted by variant); W [n][k], x [rows][k],
//          Y [rows][n] bf16 or fp16 (T); sign chunks as in repack.cu; scale, bias float32. k % 256 == 0, n % 8 == 0.
// Rounding: signs are +-1 in T, so both sums are exact products added in float32; Y is rounded once.
// Tile:    128 W rows x 8 columns a group. A unit is one K256 step of one tile; units are dealt to the CTAs as in
//          bitdelta_decode.cu, and split tiles are added up as there (split.cuh; as words up to 32 columns).
// Mapping: eight warps multiply by mma.sync, each 32 W rows and HALF groups. Warp 8 streams W, warp 9
//          the sign chunks, warp 10 x. Only x waits for the kernel before.
// Memory:  ring 1: stages of W 128x64; ring 2: sign chunks, 4 KB each, in slot order, those of a unit there at once; ring 3: pieces
//          of x, a K64 of all groups. 128-byte swizzle; a box of x is 8 rows, one group.
// Order:   per K64 the fragments of W, then group by group the products of base and signs; signs -> +-1 of the next group are made
//          between them, without a branch: their instructions fit into what the products leave. A column's sums depend on nothing but
//          its row and (n, k, grid).
// Tried:   wgmma of 8 columns with signs in registers, 1.5 times as long (its latency); 16 warps of 16 rows, 1.03 times; the base by
//          wgmma beside the signs' mma.sync, 1.1 times.
#include <type_traits>

#include "decode.cuh"
#include "elements.cuh"

namespace {

constexpr int CHUNKS_MAX = 32, PIECES_MAX = 6;

template <int HALF> struct Mixed {
  static constexpr int GROUPS = 2 * HALF, THREADS = 384, REGS = 224;  // 56 of the producers
  static constexpr int SUMS = HALF * 8;                               // floats of a thread: [2 row tiles][HALF][4]
  static constexpr int KS = HALF > 3 ? 2 : 4;                         // K16 steps whose fragments are held at once
  static constexpr int PIECE = GROUPS * 1024, PIECES = HALF > 4 ? 4 : 6;
  static constexpr bool WORDS = HALF <= 2;
};

// This thread's +-1 fragment of K16 step `step` of a K64 (as load_w of bitdelta_gemm.cu, without W); word: sign_word's.
template <typename T> __device__ __forceinline__ void expand_signs(u32 (&A)[4], u32 word, int step) {
#pragma unroll
  for (int i = 0; i < 4; i++) A[i] = and_xor(word << ((i & 1) * 8 + 2 * step + (i >> 1)), 0x80008000u, Elem<T>::ONE2);
}
__device__ __forceinline__ u32 sign_word(u32 b_s) { return __byte_perm(lds_u16(b_s), lds_u16(b_s + 256), 0x1504); }  // {H_g, H_g8, L_g, L_g8}

// One long function, for the same reason as decode_kernel.
template <typename T, int HALF>
__global__ void __launch_bounds__(Mixed<HALF>::THREADS, 1) mixed_kernel(const __grid_constant__ k_mixed_args a) {
  typedef Mixed<HALF> S;
  typedef typename std::conditional<std::is_same<T, __half>::value, fp16_type, bf16_type>::type Type;
  constexpr int GROUPS = S::GROUPS, KS = S::KS;
  extern __shared__ uint8_t smem_raw[];
  __shared__ __align__(8) u64 bars[2 * (MAX_RING + PIECES_MAX + CHUNKS_MAX) + 1];
  __shared__ const float *scale_of[SLOTS_MAX], *bias_of[SLOTS_MAX];
  __shared__ short first_of[GROUPS], end_of[GROUPS];
  __shared__ signed char slot_of[GROUPS], near_of[GROUPS];  // near: the base's groups, whose slot is -1, take their neighbour's signs
  __shared__ int ticket;
  const u32 base = (smem_u32(smem_raw) + 1023) & ~1023u, pieces = base + a.stages * W_BYTES, chunks = pieces + S::PIECES * S::PIECE;
  const u32 full = smem_u32(bars), empty = full + 8 * MAX_RING, pfull = empty + 8 * MAX_RING, pempty = pfull + 8 * PIECES_MAX, sfull = pempty + 8 * PIECES_MAX,
            sempty = sfull + 8 * CHUNKS_MAX, landed = sempty + 8 * CHUNKS_MAX;
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  const int per_tile = a.k / 256, units = (a.n + 127) / 128 * per_tile;
  const uint8_t* bits = nullptr;  // of slot `lane`, in warp 9
  int filled = 0;                 // steps of W whose copies are under way, in warp 8

  if (wg == 2 && warp == 0) {
    if (lane == 0) {
      prefetch_map(&a.w);
      const int cta = draw_ticket(a.ticket, gridDim.x);
      ticket = cta;
      filled = w_begin(a.w, base, full, empty, split_begin(units, cta, gridDim.x), split_begin(units, cta + 1, gridDim.x), per_tile, a.stages, a.burst, 8);
    }
    __syncwarp();
  } else if (wg == 2 && warp == 1) {
    if (lane < a.variants) {
      // A slot without a plane for this linear streams W's bytes in its place; its scale is zero.
      const k_overlay_linear* o = a.overlays + a.columns[lane];
      const bool some = o->plane_count > 0;
      bits = some ? o->bits[0] : (const uint8_t*)a.w_data;
      scale_of[lane] = some ? o->scale[0] : nullptr;
      bias_of[lane] = o->bias ? o->bias : a.bias;
    }
  } else if (wg == 2 && warp == 2) {
    if (lane == 0) prefetch_map(&a.x);
    const k_gemm_tile t = lane < a.group_count ? a.groups[lane] : k_gemm_tile{0, 0, -1, 0};
    int near = t.variant;  // slots rise with the groups, apart from the base's -1
#pragma unroll
    for (int i = 1; i < GROUPS; i *= 2) near = max(near, __shfl_up_sync(~0u, near, i));
    if (lane < GROUPS) first_of[lane] = (short)t.m0, end_of[lane] = (short)t.m1, slot_of[lane] = (signed char)t.variant, near_of[lane] = (signed char)max(near, 0);
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < S::PIECES; i++) mbar_init(pfull + 8 * i, 1), mbar_init(pempty + 8 * i, 8);
    for (int i = 0; i < a.chunks; i++) mbar_init(sfull + 8 * i, 1), mbar_init(sempty + 8 * i, 8);
    mbar_init(landed, 1);
    mbar_init_fence();
  }
  __syncthreads();
  const int cta = __shfl_sync(~0u, ticket, 0);
  const int u0 = split_begin(units, cta, gridDim.x), u1 = split_begin(units, cta + 1, gridDim.x);
  pdl_launch();

  if (wg == 2) {
    static_assert(registers_fit(S::THREADS, S::REGS, 56));
    reg_dec<56>();
    if (warp == 0) {
      if (lane == 0) w_stream<true>(a.w, base, full, empty, u0, u1, per_tile, a.stages, a.burst, filled);
    } else if (warp == 1) {
      Ring r = {0, 1};
      for (int u = u0; u < u1; u++)
        for (int v = 0; v < a.variants; v++, r.next(a.chunks)) {
          const uint8_t* from = (const uint8_t*)__shfl_sync(~0u, (unsigned long long)bits, v);
          if (lane == 0) {
            mbar_wait_idle(sempty + 8 * r.at, r.phase);
            mbar_expect(sfull + 8 * r.at, SIGN_BYTES);
            bulk_load(chunks + r.at * SIGN_BYTES, from + (size_t)u * SIGN_BYTES, SIGN_BYTES, sfull + 8 * r.at, SM90_EVICT_FIRST);
          }
          __syncwarp();
        }
    } else if (warp == 2) {
      const int row = lane < a.group_count ? first_of[lane] : 0;
      pdl_wait();
      Ring r = {0, 1};
      for (int s = 4 * u0; s < 4 * u1; s++, r.next(S::PIECES)) {
        mbar_wait_idle(pempty + 8 * r.at, r.phase);
        if (lane == 0) mbar_expect(pfull + 8 * r.at, a.group_count * 1024);
        __syncwarp();
        if (lane < a.group_count) tma_load(pieces + r.at * S::PIECE + lane * 1024, &a.x, s % (4 * per_tile) * 64, row, pfull + 8 * r.at, SM90_EVICT_LAST);
      }
    }
    __syncwarp();
  } else {
    reg_inc<S::REGS>();
    const Split split = {a.workspace, a.sm_count};
    // Warpgroup 0 takes the first HALF groups, the other the rest: one fewer if their number is odd, whose place holds anything.
    const int q = lane & 3, tid = wg * 128 + warp * 32 + lane, j0 = wg * HALF, count = min(HALF, a.group_count - j0);
    // Row lane % 16 of the first row tile for ldmatrix, this lane's sign bytes; the second row tile is 16 rows further.
    const u32 w_row = (warp * 32 + (lane & 15)) * 128, w_turn = (lane >> 4) ^ (lane & 7), x_row = (lane & 7) * 128, x_turn = (lane >> 3) ^ (lane & 7);
    const u32 b_off = warp * 1024 + (lane >> 2) * 16 + q * 2;
    Ring st = {0, 0}, xp = {0, 0}, ch = {0, 0};
    float d[2 * HALF][4], e[2 * HALF][4];
    for (int u = u0; u < u1;) {
      const int tile = u / per_tile, first = tile * per_tile, end = min(u1, first + per_tile), tile_end = first + per_tile;
      const int row = tile * 128 + warp * 32 + lane / 4;
      const bool head = u == first;
      if (lane < a.variants && scale_of[lane])  // this warp's 32 scales of each slot will be wanted
        asm volatile("prefetch.global.L2 [%0];" ::"l"(scale_of[lane] + min(tile * 128 + warp * 32, a.n - 1)));
#pragma unroll
      for (int i = 0; i < 8 * HALF; i++) d[i / 4][i % 4] = 0, e[i / 4][i % 4] = 0;
#pragma unroll 1
      for (; u < end; u++) {
        u32 chunk = 0;  // of slot `lane`: its place in the ring
        if (lane < a.variants) {
          const bool wraps = ch.at + lane >= a.chunks;
          chunk = wraps ? ch.at + lane - a.chunks : ch.at + lane;
          mbar_wait(sfull + 8 * chunk, ch.phase ^ wraps);
        }
        __syncwarp();
        u32 places[(HALF + 3) / 4] = {};  // of each group's signs in the ring, a byte each
#pragma unroll
        for (int j = 0; j < HALF; j++) places[j / 4] |= __shfl_sync(~0u, chunk, near_of[min(j0 + j, GROUPS - 1)]) << (j % 4 * 8);
#pragma unroll 1
        for (int b = 0; b < 4; b++) {
          const u32 stage = base + st.at * W_BYTES + w_row, piece = pieces + xp.at * S::PIECE + j0 * 1024 + x_row;
          const u32 signs = chunks + b_off + (b & 2) * 64 + (b & 1) * 8;
          u32 words[2 * HALF];  // signs of this K64: of each group's first row tile, of its second; ahead of their use, where registers are left
          auto word = [&](int i) { return sign_word(signs + (places[i / 8] >> (i / 2 % 4 * 8) & 255) * SIGN_BYTES + i % 2 * 512); };
#pragma unroll
          for (int i = 0; HALF < 8 && i < 2 * HALF; i++) words[i] = word(i);
          mbar_wait(full + 8 * st.at, st.phase);
          mbar_wait(pfull + 8 * xp.at, xp.phase);
#pragma unroll
          for (int part = 0; part < 4 / KS; part++) {
            u32 W[2][KS][4], A[2][2][KS][4], x[2][2 * KS];  // A, x: of a group and of the next one
            auto load_x = [&](int j) {
#pragma unroll
              for (int i = 0; i < KS / 2; i++) {
                u32* to = x[HALF < 8 ? j % 2 : 0] + 4 * i;
                ldsm4(to[0], to[1], to[2], to[3], piece + j * 1024 + (((4 * (part * KS / 2 + i)) ^ x_turn) << 4));
              }
            };
            if (HALF < 8) load_x(0);
#pragma unroll
            for (int i = 0; i < 2 * KS; i++) {
              u32(&w)[4] = W[i / KS][i % KS];
              ldsm4(w[0], w[1], w[2], w[3], stage + i / KS * 2048 + ((2 * (part * KS + i % KS) ^ w_turn) << 4));
            }
#pragma unroll
            for (int i = 0; HALF == 8 && i < 2; i++) words[i] = word(i);
#pragma unroll
            for (int i = 0; i < 2 * KS; i++) expand_signs<T>(A[0][i / KS][i % KS], words[i / KS], part * KS + i % KS);
#pragma unroll
            for (int j = 0; j < HALF; j++) {
              if (HALF == 8) load_x(j);
              else if (j + 1 < HALF) load_x(j + 1);
#pragma unroll
              for (int i = 2; HALF == 8 && j + 1 < HALF && i < 4; i++) words[2 * j + i] = word(2 * j + i);
#pragma unroll
              for (int i = 0; i < KS; i++) {
                const u32 *in = x[HALF < 8 ? j % 2 : 0] + 2 * i, low = in[0], high = in[1];
                Type::mma(d[j], W[0][i], low, high);
                if (j + 1 < HALF) expand_signs<T>(A[(j + 1) % 2][0][i], words[2 * j + 2], part * KS + i);
                Type::mma(d[HALF + j], W[1][i], low, high);
                if (j + 1 < HALF) expand_signs<T>(A[(j + 1) % 2][1][i], words[2 * j + 3], part * KS + i);
                Type::mma(e[j], A[j % 2][0][i], low, high);
                Type::mma(e[HALF + j], A[j % 2][1][i], low, high);
              }
            }
          }
          __syncwarp();  // every lane has read W, x and its signs
          if (lane == 0) mbar_arrive(empty + 8 * st.at), mbar_arrive(pempty + 8 * xp.at);
          st.next(a.stages);
          xp.next(S::PIECES);
        }
        if (lane < a.variants) mbar_arrive(sempty + 8 * chunk);
        ch.at += a.variants;
        if (ch.at >= a.chunks) ch.at -= a.chunks, ch.phase ^= 1;
      }
#pragma unroll
      for (int j = 0; j < HALF; j++) {
        const int slot = j < count ? slot_of[j0 + j] : -1;
        const float* scale = slot >= 0 ? scale_of[slot] : nullptr;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float factor = scale && row + 8 * i < a.n ? __ldg(scale + row + 8 * i) : 0.f;
          const int t = i / 2 * HALF + j, c = i % 2 * 2;
          d[t][c] = fmaf(factor, e[t][c], d[t][c]), d[t][c + 1] = fmaf(factor, e[t][c + 1], d[t][c + 1]);
        }
      }
      float(&sums)[S::SUMS] = *(float(*)[S::SUMS])d;
      if (!head) {  // only a CTA's first tile can lack its head
        if (S::WORDS) leave_words(sums, split, cta, tid);
        else leave_partial(sums, split, cta, tid);
        continue;
      }
      if (end < tile_end) {  // and only its last its end: the stages are free by then
        const int last = split_last(units, cta, gridDim.x, tile_end);
        if (S::WORDS) add_words(sums, split, cta + 1, last, tid);
        else fetch_partials(sums, split, cta + 1, last, tid, base, a.stages * W_BYTES / (S::SUMS * 1024), landed);
      }
      T* Y = (T*)a.y;
#pragma unroll
      for (int j = 0; j < HALF; j++) {
        if (j >= count) break;
        const int slot = slot_of[j0 + j], m = first_of[j0 + j] + 2 * q + ((lane >> 2) & 1);
        const float* bias = slot >= 0 ? bias_of[slot] : a.bias;
#pragma unroll
        for (int i = 0; i < 4; i++) {  // rows 2p, 2p + 1 of one column go together: lanes of even and odd row trade columns
          const int r = row + 8 * i, n = r & ~1;
          const float add = bias && r < a.n ? __ldg(bias + r) : 0.f, even = d[i / 2 * HALF + j][i % 2 * 2] + add, odd = d[i / 2 * HALF + j][i % 2 * 2 + 1] + add;
          const bool up = lane & 4;
          const float got = __shfl_xor_sync(~0u, up ? even : odd, 4);
          if (m < end_of[j0 + j] && n < a.n) *(u32*)(Y + (size_t)m * a.n + n) = up ? Elem<T>::pack(got, odd) : Elem<T>::pack(even, got);
        }
      }
    }
  }
}

template <typename T, int HALF> cudaError_t launch(k_mixed_args a, cudaStream_t s) {
  typedef Mixed<HALF> S;
  auto kernel = mixed_kernel<T, HALF>;
  const int units = (a.n + 127) / 128 * (a.k / 256), pieces = S::PIECES * S::PIECE;
  const int room = (BUDGET - 1024 - pieces - 4 * W_BYTES) / SIGN_BYTES;  // for chunks, beside the fewest stages
  a.chunks = a.variants <= 4 ? 4 * a.variants : 2 * a.variants;
  if (a.chunks > room) a.chunks = room;
  a.stages = (BUDGET - 1024 - pieces - a.chunks * SIGN_BYTES) / W_BYTES;
  if (a.stages > 12) a.stages = 12;
  a.burst = a.stages >= 8 ? 4 : 2;
  const int smem = a.stages * W_BYTES + pieces + a.chunks * SIGN_BYTES + 1024;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BUDGET);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(a.sm_count < units ? a.sm_count : units));  // every CTA must own at least one unit: the split counts on it
  c.blockDim = dim3(S::THREADS), c.dynamicSmemBytes = (size_t)smem, c.stream = s, c.attrs = at, c.numAttrs = a.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, kernel, a);
}
template <typename T> cudaError_t launch_groups(const k_mixed_args& a, cudaStream_t s) {
  switch ((a.group_count + 1) / 2) {
  case 1: return launch<T, 1>(a, s);
  case 2: return launch<T, 2>(a, s);
  case 3: return launch<T, 3>(a, s);
  case 4: return launch<T, 4>(a, s);
  case 5: return launch<T, 5>(a, s);
  case 6: return launch<T, 6>(a, s);
  case 7: return launch<T, 7>(a, s);
  default: return launch<T, 8>(a, s);
  }
}

}  // namespace

extern "C" cudaError_t k_mixed(const k_mixed_args* a, cudaStream_t s) {
  if (a->k % 256 || a->n % 8 || a->variants < 1 || a->variants > SLOTS_MAX || a->group_count < 1 || a->group_count > K_MIXED_GROUPS) return cudaErrorInvalidValue;
  return a->fp16 ? launch_groups<__half>(*a, s) : launch_groups<__nv_bfloat16>(*a, s);
}

extern "C" double k_mixed_cost(int n, int k, int groups, int variants, int sm_count) {
  if (k % 256) return 1e300;
  // Microseconds of a unit's products by half the groups, measured on an H200 (of 3, 5 and 6: between their neighbours).
  static const double products[8] = {2.0, 2.4, 3.1, 3.9, 5.2, 6.4, 7.6, 7.6};
  const double unit = products[(groups + 1) / 2 - 1], bytes = (W_BYTES * 4 + SIGN_BYTES * variants) / 33e3;
  return (double)((n + 127) / 128) * (k / 256) / sm_count * (bytes > unit ? bytes : unit) + 4.5 + 1.1 * groups;
}
