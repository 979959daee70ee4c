// bitdelta_decode.cu - decode of 17 to 64 rows: the base product on tensor cores plus an exact integer delta on the binary ones (sm_90a).
//
//   Y[m][n] = bias[n] + sum_k x[m][k] W[n][k] + scale_v[n] sum_b s[m][b] (sum_k xq[m][k] - 2 sum_p 2^p popc(neg_v[n] & plane_p[m]))
//
// b runs over the K256 blocks, k over a block; xq = round(x / s) as 16 two's-complement bit planes (plane 15 counts negative,
// planes.cuh); neg = sign chunks of repack.cu (1 = minus). The delta is exact but for the 16-bit rounding of x, about 3e-5 of it.
// Shapes:  up to NT tokens (32 or 64 columns of the base product) over V <= 16 slots (V = 0: the base alone). A slot is a
//          variant; slots do not fall along the rows. W [n][k], x [rows][k], Y [rows][n] bf16 or fp16; k % 256 == 0, k <= 65536.
// Tile:    128 W rows x NT tokens; a unit is one K256 step of one tile. The n/128 * k/256 units are dealt contiguously to the grid, so
//          every CTA streams the same number of bytes. Splits depend on (n, k, grid) only and a row's sums on nothing but the row: its
//          result does not depend on its batch, bitwise.
// Mapping: warpgroups 0, 1 = 64 W rows each. Warp 8 streams W, warp 9 the sign chunks (lane v = slot v), warp 10 x, warp 11 the planes
//          of k_planes. Only x and the planes wait for the kernel before this one; W and the signs of the first units are on their way
//          by then.
// Memory:  ring 1: stages of W 128x64 + x NTx64 (128-byte swizzle); ring 2: sign chunks, 4 KB each, in slot order; ring 3: pieces:
//          planes of 16 tokens of a unit with their scales and sums.
// Order:   per unit 4 x (4 wgmma of a K64) and then groups of 4 tokens, a binary wgmma each (V = 1: one for the four). One group is
//          in flight while the one before it is folded: plane sums are added over the quad so that lane q of it keeps token 4g + q.
// Split tiles: the CTA that holds the head of a tile owns it, and adds the float32 partials of the CTAs after it in K order
//          (split.cuh); the owner's copies go through the stages, free by then.
#include "decode.cuh"

namespace {

template <int NT> struct Shape {
  static constexpr int THREADS = 384, REGS = 208;  // of the products' warpgroups; 88 of the others
  static constexpr int GROUPS = NT / 4, PIECE_TOKENS = 16, PIECES = NT / PIECE_TOKENS;  // pieces of a unit
  static constexpr int STAGE = W_BYTES + NT * 128;
  static constexpr int META_OFF = PIECE_TOKENS * PLANE_BYTES;
  static constexpr int PIECE_LOAD = PIECE_TOKENS * (PLANE_BYTES + 8), PIECE = (PIECE_LOAD + 1023) & ~1023;
  static constexpr int PARTIAL = NT * 512;  // bytes of a CTA's accumulators
};

// One warp a (row, K256 block); planes[k / 256][ceil(rows / 16)][16 x (512 + 8) bytes]: planes of 16 rows, then their scales and sums.
template <typename T> __global__ void __launch_bounds__(256) planes_kernel(uint8_t* planes, const uint16_t* x, int rows, int k) {
  const int lane = threadIdx.x % 32, blocks = k / 256, at = blockIdx.x * 8 + threadIdx.x / 32;
  pdl_launch();
  pdl_wait();
  if (at >= rows * blocks) return;
  const int m = at / blocks, b = at % blocks;
  const uint16_t* from = x + (size_t)m * k + b * 256 + 128 * (lane / 16) + 64 * (lane % 16 / 8) + lane % 8;
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = to_float<T>(from[8 * i]);
  u32 bytes[4];
  const plane_meta meta = make_planes(bytes, v);
  uint8_t* piece = planes + ((size_t)b * ((rows + 15) / 16) + m / 16) * (16 * (PLANE_BYTES + 8));
  store_planes(piece + (m % 16) * PLANE_BYTES, bytes, lane);
  if (lane == 0) ((plane_meta*)(piece + 16 * PLANE_BYTES))[m % 16] = meta;
}

// Overlay of a slot with a sign plane for this linear, or null.
__device__ __forceinline__ const k_overlay_linear* slot_overlay(const k_decode_args& a, int slot) {
  const k_overlay_linear* o = slot < 0 ? nullptr : a.overlays + a.columns[slot];
  return o && o->plane_count > 0 ? o : nullptr;
}

enum Mode { NONE, ONE, MANY };  // slots: the base alone; one; more

// One long function: the roles share register budgets and barrier phases, and accumulators cannot leave it without being spilled.
template <typename T, int NT, Mode MODE> __global__ void __launch_bounds__(Shape<NT>::THREADS, 1) decode_kernel(const __grid_constant__ k_decode_args a) {
  typedef Shape<NT> S;
  constexpr bool DELTA = MODE != NONE;
  extern __shared__ uint8_t smem_raw[];
  __shared__ __align__(8) u64 bars[6 * MAX_RING + 1];
  __shared__ const k_overlay_linear* slot_of[SLOTS_MAX];
  __shared__ u32 group_slots[S::GROUPS];  // a byte a token; base rows use their neighbour's slot and scale zero
  __shared__ int ticket;
  const u32 base = (smem_u32(smem_raw) + 1023) & ~1023u, pieces = base + a.stages * S::STAGE, chunks = pieces + a.pieces * S::PIECE;
  const u32 full = smem_u32(bars), empty = full + 8 * MAX_RING, pfull = empty + 8 * MAX_RING, pempty = pfull + 8 * MAX_RING, sfull = pempty + 8 * MAX_RING,
            sempty = sfull + 8 * MAX_RING;
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ticket = draw_ticket(a.ticket, gridDim.x);
    prefetch_map(&a.w);
    prefetch_map(&a.x);
    for (int i = 0; i < a.stages; i++) mbar_init(full + 8 * i, 2), mbar_init(empty + 8 * i, 8);
    for (int i = 0; i < a.pieces; i++) mbar_init(pfull + 8 * i, 1), mbar_init(pempty + 8 * i, 8);
    mbar_init(smem_u32(bars + 6 * MAX_RING), 1);
    for (int i = 0; i < a.chunks; i++) mbar_init(sfull + 8 * i, 1), mbar_init(sempty + 8 * i, 8);
    mbar_init_fence();
  } else if (DELTA && threadIdx.x >= 32 && threadIdx.x < 32 + S::GROUPS) {
    const int g = threadIdx.x - 32;
    u32 packed = 0;
    for (int t = 4 * g; t < 4 * g + 4; t++) {
      int m = min(t, a.rows - 1);
      while (m > 0 && a.slot[m] < 0) m--;
      packed |= (u32)max(a.slot[m], 0) << (8 * (t & 3));
    }
    group_slots[g] = packed;
  } else if (DELTA && threadIdx.x >= 64 && threadIdx.x < 64 + SLOTS_MAX)
    slot_of[threadIdx.x - 64] = threadIdx.x - 64 < a.variants ? slot_overlay(a, threadIdx.x - 64) : nullptr;
  __syncthreads();
  const int cta = __shfl_sync(~0u, ticket, 0), per_tile = a.k / 256, units = (a.n + 127) / 128 * per_tile;
  const int u0 = split_begin(units, cta, gridDim.x), u1 = split_begin(units, cta + 1, gridDim.x);
  pdl_launch();

  if (wg >= 2) {
    static_assert(registers_fit(S::THREADS, S::REGS, 88));
    reg_dec<88>();
    if (warp == 0) {
      if (lane == 0) {
        // In bursts, so that neighbouring 128-byte pieces of a W row reach the memory together.
        Ring r = {0, 1};
        for (int s = 4 * u0; s < 4 * u1; s += a.burst) {
          Ring w = r;
          for (int i = 0; i < a.burst; i++, w.next(a.stages)) mbar_wait(empty + 8 * w.at, w.phase);
          for (int i = 0; i < a.burst; i++, r.next(a.stages)) {
            mbar_expect(full + 8 * r.at, W_BYTES);
            tma_load(base + r.at * S::STAGE, &a.w, (s + i) % (4 * per_tile) * 64, a.w_row + (s + i) / (4 * per_tile) * 128, full + 8 * r.at, SM90_EVICT_FIRST);
          }
        }
      }
    } else if (warp == 1) {
      if (DELTA && lane < a.variants) {
        // A slot without a plane for this linear streams W's bytes in its place; its scale is zero.
        const uint8_t* bits = slot_of[lane] ? slot_of[lane]->bits[0] : (const uint8_t*)a.w_data;
        Ring r = {lane, 1};  // at most a.chunks lanes: no lane waits for what another of its round has yet to load
        for (int u = u0; u < u1; u++) {
          mbar_wait(sempty + 8 * r.at, r.phase);
          mbar_expect(sfull + 8 * r.at, SIGN_BYTES);
          bulk_load(chunks + r.at * SIGN_BYTES, bits + (size_t)u * SIGN_BYTES, SIGN_BYTES, sfull + 8 * r.at, SM90_EVICT_FIRST);
          r.at += a.variants;
          if (r.at >= a.chunks) r.at -= a.chunks, r.phase ^= 1;
        }
      }
    } else if (warp == 2) {
      if (lane == 0) {
        pdl_wait();
        Ring r = {0, 1};
        for (int s = 4 * u0; s < 4 * u1; s++, r.next(a.stages)) {
          mbar_wait(empty + 8 * r.at, r.phase);
          mbar_expect(full + 8 * r.at, NT * 128);
          tma_load(base + r.at * S::STAGE + W_BYTES, &a.x, s % (4 * per_tile) * 64, a.first_row, full + 8 * r.at, SM90_EVICT_LAST);
        }
      }
    } else if (DELTA && lane == 0) {
      pdl_wait();
      Ring r = {0, 1};
      const int live = (a.rows + 15) / 16;
      for (int u = u0; u < u1; u++)
        for (int i = 0; i < S::PIECES; i++, r.next(a.pieces)) {  // past the rows: any planes
          mbar_wait(pempty + 8 * r.at, r.phase);
          mbar_expect(pfull + 8 * r.at, S::PIECE_LOAD);
          bulk_load(pieces + r.at * S::PIECE, a.planes + ((size_t)(u % per_tile) * live + min(i, live - 1)) * S::PIECE_LOAD, S::PIECE_LOAD, pfull + 8 * r.at, SM90_EVICT_LAST);
        }
    }
    __syncwarp();
  } else {
    reg_inc<S::REGS>();
    const int q = lane & 3, tid = wg * 128 + warp * 32 + lane;
    Ring st = {0, 0}, pc = {0, 0}, ch = {0, 0};
    float d[NT / 2], acc[2 * S::GROUPS];
    int e[2][32];
    for (int u = u0; u < u1;) {
      const int tile = u / per_tile, first = tile * per_tile, end = min(u1, first + per_tile);
      const int row = tile * 128 + wg * 64 + warp * 16 + lane / 4;
      const bool head = u == first;
      auto load_alpha = [&](int g, int h) {  // of token 4g + q
        const int t = 4 * g + q;
        if (t >= a.rows || a.slot[t] < 0 || row + 8 * h >= a.n) return 0.f;
        const k_overlay_linear* o = slot_of[a.slot[t]];
        return o ? __ldg(o->scale[0] + row + 8 * h) : 0.f;
      };
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[i] = 0;
#pragma unroll
      for (int i = 0; i < 2 * S::GROUPS; i++) acc[i] = 0;
#pragma unroll 1
      for (; u < end; u++) {
        int last = 0;  // stage whose products are in flight
#pragma unroll 1
        for (int b = 0; b < 4; b++) {
          mbar_wait(full + 8 * st.at, st.phase);
          const u32 s = base + st.at * S::STAGE;
          const u64 dw = desc_swizzle128(s + wg * 8192), dx = desc_swizzle128(s + W_BYTES);
          pin(d);
          wgmma_fence();
#pragma unroll
          for (int kk = 0; kk < 4; kk++) Mma<T, NT>::ss(d, dw + 2 * kk, dx + 2 * kk, 1);
          wgmma_commit();
          if (b) {
            wgmma_wait<1>();
            if (lane == 0) mbar_arrive(empty + 8 * last);
          }
          last = st.at;
          st.next(a.stages);
        }
        if (!DELTA) {
          wgmma_wait<0>();
          if (lane == 0) mbar_arrive(empty + 8 * last);
        }
        if (DELTA) {
          int slot = 0, freed = 0;  // the last slot whose chunk has arrived; slots whose chunk has been handed back
          const int slots_at = ch.at;
          Ring old = ch, piece_at = pc;
          u32 meta[2] = {0, 0};
          mbar_wait(sfull + 8 * ch.at, ch.phase);
#pragma unroll
          for (int g = 0; g <= S::GROUPS; g++) {
            int first_slot = a.variants;
            if (g < S::GROUPS) {
              if (g % 4 == 0) {
                if (g) piece_at.next(a.pieces);
                mbar_wait(pfull + 8 * piece_at.at, piece_at.phase);
              }
              const u32 piece = pieces + piece_at.at * S::PIECE, in_piece = g % (S::PIECE_TOKENS / 4);
              const u64 dp = desc_plain(piece + in_piece * 4 * PLANE_BYTES, 128, 256);
              meta[g & 1] = piece + S::META_OFF + in_piece * 32;
              u64 ds[4];
              first_slot = 0;
              if (MODE == MANY) {
                const u32 packed = __shfl_sync(~0u, group_slots[g], 0);
                first_slot = packed & 255;
#pragma unroll 1
                for (; slot < (int)(packed >> 24); slot++) {
                  ch.next(a.chunks);
                  mbar_wait(sfull + 8 * ch.at, ch.phase);
                }
#pragma unroll
                for (int t = 0; t < 4; t++) {
                  const int at = slots_at + (int)((packed >> (8 * t)) & 255);
                  ds[t] = desc_plain(chunks + (at >= a.chunks ? at - a.chunks : at) * SIGN_BYTES + wg * 2048, 128, 256);
                }
              } else ds[0] = desc_plain(chunks + slots_at * SIGN_BYTES + wg * 2048, 128, 256);
              pin(e[g & 1]);
              wgmma_fence();
              if (MODE == ONE) Bmma<64>::ss(e[g & 1], ds[0], dp);
              else
#pragma unroll
                for (int t = 0; t < 4; t++) Bmma<16>::ss(*(int(*)[8])(e[g & 1] + 8 * t), ds[t], dp + t * (PLANE_BYTES / 16));
              wgmma_commit();
            }
            if (g < S::GROUPS) wgmma_wait<1>();
            else wgmma_wait<0>();
            if (g == 0) {
              if (lane == 0) mbar_arrive(empty + 8 * last);
              continue;
            }
            pin(e[(g - 1) & 1]);
            fold(acc[2 * g - 2], acc[2 * g - 1], e[(g - 1) & 1], meta[(g - 1) & 1], q);
#pragma unroll 1
            for (; freed < first_slot; freed++, old.next(a.chunks))
              if (lane == 0) mbar_arrive(sempty + 8 * old.at);
            if (g % 4 == 0) {
              __syncwarp();  // every lane has read its scales
              if (lane == 0) mbar_arrive(pempty + 8 * pc.at);
              pc.next(a.pieces);
            }
          }
          ch.next(a.chunks);  // every slot has a row: this was the last
        }
      }
      pin(d);
      if (DELTA) {
#pragma unroll
        for (int i = 0; i < 2 * S::GROUPS; i++) acc[i] *= load_alpha(i / 2, i % 2);
        // d[4j + 2h + e] += delta of token 8j + 2q + e, held by lane (2q + e) % 4 of the quad for group 2j + q / 2.
#pragma unroll
        for (int i = 0; i < NT / 2; i++) {
          const int j = i / 4, h = (i >> 1) & 1, from = (lane & ~3) | ((2 * q + (i & 1)) & 3);
          const float low = __shfl_sync(~0u, acc[4 * j + h], from), high = __shfl_sync(~0u, acc[4 * j + 2 + h], from);
          d[i] += q & 2 ? high : low;
        }
      }
      const int tile_end = first + per_tile;
      if (!head) {  // only a CTA's first tile can lack its head: one partial per CTA
        leave_partial(d, Split{a.workspace, a.sm_count}, cta, tid);
        continue;
      }
      if (end < tile_end)
        fetch_partials(d, Split{a.workspace, a.sm_count}, cta + 1, split_last(units, cta, gridDim.x, tile_end), tid, base, a.stages * S::STAGE / S::PARTIAL,
                       smem_u32(bars + 6 * MAX_RING));
      {
        T* Y = (T*)a.y;
#pragma unroll
        for (int i = 0; i < NT / 2; i++) {
          int t = 8 * (i / 4) + 2 * q + (i & 1), n = row + 8 * ((i >> 1) & 1);
          if (t >= a.rows || n >= a.n) continue;
          const float* own = DELTA && a.slot[t] >= 0 ? a.overlays[a.columns[a.slot[t]]].bias : nullptr;
          const float* bias = own ? own : a.bias;
          const float v = bias ? d[i] + __ldg(bias + n) : d[i];
          if (a.wide) a.wide[(size_t)t * a.wide_stride + n] = v;
          else Y[(size_t)t * a.n + n] = (T)v;
        }
      }
    }
  }
}

template <typename T, int NT, Mode MODE> cudaError_t launch(k_decode_args a, cudaStream_t s) {
  typedef Shape<NT> S;
  const int units = (a.n + 127) / 128 * (a.k / 256);
  a.chunks = MODE == NONE ? 0 : a.variants > 8 ? 16 : a.variants > 2 ? 2 * a.variants : 4;
  a.pieces = MODE != NONE ? S::PIECES + 1 : 0;
  a.stages = (BUDGET - a.pieces * S::PIECE - a.chunks * SIGN_BYTES) / S::STAGE;
  if (a.stages > 12) a.stages = 12;
  a.burst = a.stages >= 8 ? 4 : 2;
  const int smem = a.stages * S::STAGE + a.pieces * S::PIECE + a.chunks * SIGN_BYTES + 1024;
  cudaError_t e = cudaFuncSetAttribute(decode_kernel<T, NT, MODE>, cudaFuncAttributeMaxDynamicSharedMemorySize, BUDGET + 1024);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)split_count(units, a.k / 256, a.sm_count));
  c.blockDim = dim3(S::THREADS), c.dynamicSmemBytes = (size_t)smem, c.stream = s, c.attrs = at, c.numAttrs = a.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, decode_kernel<T, NT, MODE>, a);
}
template <typename T, int NT> cudaError_t launch_delta(const k_decode_args& a, cudaStream_t s) {
  return a.variants == 0 ? launch<T, NT, NONE>(a, s) : a.variants == 1 ? launch<T, NT, ONE>(a, s) : launch<T, NT, MANY>(a, s);
}
template <typename T> cudaError_t launch_rows(const k_decode_args& a, cudaStream_t s) {
  return k_decode_tokens(a.rows) == 32 ? launch_delta<T, 32>(a, s) : launch_delta<T, 64>(a, s);
}

}  // namespace

extern "C" uint64_t k_decode_workspace_bytes(int sm_count) { return (uint64_t)sm_count * ((SPLIT_WORDS + 2) * 8 + SPLIT_PARTIAL); }
extern "C" uint64_t k_decode_workspace_zeros(int sm_count) { return (uint64_t)sm_count * (SPLIT_WORDS + 2) * 8; }
extern "C" uint64_t k_planes_bytes(int rows, int k) { return (uint64_t)(k / 256) * (unsigned)((rows + 15) / 16) * 16 * (PLANE_BYTES + 8); }
extern "C" int k_decode_tokens(int rows) { return rows <= 32 ? 32 : 64; }

extern "C" double k_decode_cost(int n, int k, int rows, int slots, int sm_count) {
  // Microseconds of a unit's products, of one slot and of many, and of a launch with its planes, for up to 8, 16 (lean), 32 and 64 rows;
  // measured on an H200.
  static const double products[2][4] = {{2.0, 2.1, 2.2, 3.7}, {2.1, 2.5, 3.4, 6.6}}, launch[4] = {5, 8, 24, 32};
  const int size = rows <= 8 ? 0 : rows <= 16 ? 1 : rows <= 32 ? 2 : 3;
  const double units = (double)((n + 127) / 128) * (k / 256) / sm_count, bytes = (W_BYTES * 4 + SIGN_BYTES * slots) / 33e3;
  const double most = bytes > products[slots > 1][size] ? bytes : products[slots > 1][size];
  return units * most + launch[size];
}

extern "C" cudaError_t k_decode(const k_decode_args* a, cudaStream_t s) {
  if (a->k % 256 || a->k > 65536 || a->variants < 0 || a->variants > SLOTS_MAX || a->rows < 1 || a->rows > K_DECODE_ROWS) return cudaErrorInvalidValue;
  return a->fp16 ? launch_rows<__half>(*a, s) : launch_rows<__nv_bfloat16>(*a, s);
}

extern "C" cudaError_t k_planes(uint8_t* planes, const void* x, int rows, int k, bool fp16, bool pdl, cudaStream_t s) {
  if (k % 256 || rows < 1 || rows > K_DECODE_ROWS) return cudaErrorInvalidValue;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(rows * (k / 256) + 7) / 8), c.blockDim = dim3(256), c.stream = s, c.attrs = at, c.numAttrs = pdl ? 1 : 0;
  return fp16 ? cudaLaunchKernelEx(&c, planes_kernel<__half>, planes, (const uint16_t*)x, rows, k)
                          : cudaLaunchKernelEx(&c, planes_kernel<__nv_bfloat16>, planes, (const uint16_t*)x, rows, k);
}
