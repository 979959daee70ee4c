// bitdelta_lean.cu - decode of up to 16 rows as bitdelta_decode.cu does it, arranged so that a launch costs little besides its bytes
// (sm_90a).
//
// Formula, shapes, tiles, rings, order of the products and rounding are those of bitdelta_decode.cu for NT <= 16 (OWN); a row's result
// does not depend on its batch, bitwise. What differs:
//   - The thread that streams W draws the ticket, makes its barriers and fills the whole ring before anything else happens in the CTA.
//   - Tables (each slot's pointers, each row's slot) come into shared memory once, while W is on its way. Scales of a tile go to shared
//     memory by asynchronous copies issued before its main loop, each warp its own 16 rows; biases are looked at only if there are any.
//   - x of the next unit is fetched while the planes of this one are made.
//   - Partials travel as the inverted bits of a float, 0 = not there yet (split.cuh): four to a load.
//   - Two neighbouring outputs leave in one store.
#include "decode.cuh"

namespace {

constexpr int MAKERS = 6, THREADS = 512, REGS = 160;  // warps that make planes; registers of the products' warpgroups, 96 of the others

template <int NT> struct Lean {
  static constexpr int GROUPS = NT / 4;
  static constexpr int PLANES_OFF = NT * 512, META_OFF = PLANES_OFF + NT * PLANE_BYTES, PIECE = (META_OFF + NT * 8 + 1023) & ~1023;
};

__device__ __forceinline__ void copy4_async(u32 dst_s, const void* src, bool there) {  // absent: zero
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst_s), "l"(src), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ float lds_float(u32 addr_s) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr_s) : "memory");
  return v;
}

// x rows of unit blocks -> the swizzled B operand, and from there the planes. Each of the warps makes every MAKERS-th row.
template <typename T, int NT, bool DELTA>
__device__ __forceinline__ void make_pieces(const k_decode_args& a, uint8_t* pieces, u32 pfull, u32 pempty, int u0, int u1, int warp, int lane) {
  typedef Lean<NT> S;
  constexpr int MINE = (NT + MAKERS - 1) / MAKERS;
  const int per_tile = a.k / 256;
  const uint16_t* x = (const uint16_t*)a.x_data + lane * 8;
  uint4 in[MINE];
  auto fetch = [&](int u) {
#pragma unroll
    for (int i = 0; i < MINE; i++)
      if (u < u1 && warp + i * MAKERS < a.rows) in[i] = __ldcg((const uint4*)(x + (size_t)(warp + i * MAKERS) * a.k + (u % per_tile) * 256));
  };
  pdl_wait();
  fetch(u0);
  Ring r = {0, 1};
  for (int u = u0; u < u1; u++, r.next(a.pieces)) {
    mbar_wait(pempty + 8 * r.at, r.phase);
    uint8_t* piece = pieces + r.at * S::PIECE;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int t = warp + i * MAKERS;
      if (t < a.rows) *(uint4*)(piece + (lane / 8) * (NT * 128) + t * 128 + (((lane & 7) ^ (t & 7)) << 4)) = in[i];
    }
    __syncwarp();
    fetch(u + 1);
    if (DELTA) {
      float v[MINE][8];
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        const int t = min(warp + i * MAKERS, NT - 1);
        const uint8_t* from = piece + (lane / 8) * (NT * 128) + t * 128 + (lane & 7) * 2;
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = to_float<T>(*(const uint16_t*)(from + ((j ^ (t & 7)) << 4)));
      }
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        const int t = warp + i * MAKERS;
        if (t >= a.rows) break;
        u32 bytes[4];
        const plane_meta meta = make_planes(bytes, v[i]);
        store_planes(piece + S::PLANES_OFF + t * PLANE_BYTES, bytes, lane);
        if (lane == 0) *(plane_meta*)(piece + S::META_OFF + t * 8) = meta;
      }
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbar_arrive(pfull + 8 * r.at);
  }
}

enum Mode { NONE, ONE, MANY };  // slots: the base alone; one; more

// One long function, for the same reason as decode_kernel.
template <typename T, int NT, Mode MODE> __global__ void __launch_bounds__(THREADS, 1) lean_kernel(const __grid_constant__ k_decode_args a) {
  typedef Lean<NT> S;
  constexpr bool DELTA = MODE != NONE;
  extern __shared__ uint8_t smem_raw[];
  __shared__ __align__(8) u64 bars[6 * MAX_RING + 1];
  __shared__ const float *scale_of[SLOTS_MAX], *bias_of[SLOTS_MAX];
  __shared__ __align__(4) uint8_t group_slots[NT];  // by token; base rows use their neighbour's slot and scale zero
  __shared__ signed char slot_of[NT];               // -1: the base, or past the rows
  __shared__ int ticket, any_bias;
  const u32 base = (smem_u32(smem_raw) + 1023) & ~1023u, pieces = base + a.stages * W_BYTES, chunks = pieces + a.pieces * S::PIECE;
  const u32 scales = chunks + a.chunks * SIGN_BYTES;  // [8 warps][variants][16 rows]
  const u32 full = smem_u32(bars), empty = full + 8 * MAX_RING, pfull = empty + 8 * MAX_RING, pempty = pfull + 8 * MAX_RING, sfull = pempty + 8 * MAX_RING,
            sempty = sfull + 8 * MAX_RING, tables = smem_u32(bars + 6 * MAX_RING);
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  const int per_tile = a.k / 256, units = (a.n + 127) / 128 * per_tile;
  const uint8_t* bits = nullptr;                          // of slot `lane`, in warp 9
  const float *scale = nullptr, *slot_bias = nullptr;     // likewise
  int slot = -1;                                          // of row `lane`, likewise
  int filled = 0;                                         // steps of W whose copies are under way, in warp 8

  if (wg == 2 && warp == 0) {
    if (lane == 0) {
      prefetch_map(&a.w);
      const int cta = draw_ticket(a.ticket, gridDim.x);
      ticket = cta;
      filled = w_begin(a.w, a.w_row, base, full, empty, split_begin(units, cta, gridDim.x), split_begin(units, cta + 1, gridDim.x), per_tile, a.stages, a.burst, 8);
    }
    __syncwarp();
  } else if (wg == 2 && warp == 1) {
    if (DELTA) {
      if (lane < NT && lane < a.rows) slot = a.slot[lane];
      if (lane < a.variants) {
        // A slot without a plane for this linear brings no signs: what lies in its place meets a scale of zero.
        const k_overlay_linear* o = a.overlays + a.columns[lane];
        const int64_t planes = o->plane_count;
        const uint8_t* first = o->bits[0];
        const float *own = o->scale[0], *own_bias = o->bias;
        bits = planes > 0 ? first : nullptr;
        scale = planes > 0 ? own : nullptr;
        slot_bias = own_bias ? own_bias : a.bias;
      }
    }
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < a.pieces; i++) mbar_init(pfull + 8 * i, MAKERS), mbar_init(pempty + 8 * i, 8);
    for (int i = 0; i < a.chunks; i++) mbar_init(sfull + 8 * i, 1), mbar_init(sempty + 8 * i, 8);
    mbar_init(tables, 1);
    mbar_init_fence();
  }
  __syncthreads();
  const int cta = __shfl_sync(~0u, ticket, 0);
  const int u0 = split_begin(units, cta, gridDim.x), u1 = split_begin(units, cta + 1, gridDim.x);
  pdl_launch();

  if (wg >= 2) {
    static_assert(registers_fit(THREADS, REGS, 96));
    reg_dec<96>();
    if (wg == 3) {
      make_pieces<T, NT, DELTA>(a, smem_raw + (pieces - smem_u32(smem_raw)), pfull, pempty, u0, u1, warp + 2, lane);
    } else if (warp == 0) {
      if (lane == 0) w_stream<false>(a.w, a.w_row, base, full, empty, u0, u1, per_tile, a.stages, a.burst, filled);
    } else if (warp == 1) {
      const bool some = __any_sync(~0u, slot_bias != nullptr) || a.bias;
      if (DELTA) {
        if (lane < SLOTS_MAX) scale_of[lane] = scale, bias_of[lane] = slot_bias;
        int near = slot;  // slots rise with the rows, apart from the base's -1
#pragma unroll
        for (int i = 1; i < 32; i *= 2) near = max(near, __shfl_up_sync(~0u, near, i));
        if (lane < NT) slot_of[lane] = (signed char)slot, group_slots[lane] = (uint8_t)max(near, 0);
      }
      if (lane == 0) any_bias = some;
      __syncwarp();
      if (lane == 0) mbar_arrive(tables);
      if (DELTA && lane < a.variants) {
        Ring r = {lane, 1};  // at most a.chunks lanes: no lane waits for what another of its round has yet to load
        for (int u = u0; u < u1; u++) {
          mbar_wait(sempty + 8 * r.at, r.phase);
          if (bits) {
            mbar_expect(sfull + 8 * r.at, SIGN_BYTES);
            bulk_load(chunks + r.at * SIGN_BYTES, bits + (size_t)u * SIGN_BYTES, SIGN_BYTES, sfull + 8 * r.at, SM90_EVICT_FIRST);
          } else mbar_arrive(sfull + 8 * r.at);
          r.at += a.variants;
          if (r.at >= a.chunks) r.at -= a.chunks, r.phase ^= 1;
        }
      }
    } else {
      make_pieces<T, NT, DELTA>(a, smem_raw + (pieces - smem_u32(smem_raw)), pfull, pempty, u0, u1, warp - 2, lane);
    }
    __syncwarp();
  } else {
    reg_inc<REGS>();
    const Split split = {a.workspace, a.sm_count};
    const int q = lane & 3, tid = wg * 128 + warp * 32 + lane;
    const u32 my_scales = scales + (wg * 4 + warp) * (a.variants * 64);
    Ring st = {0, 0}, pc = {0, 0}, ch = {0, 0};
    float d[NT / 2], acc[2 * S::GROUPS];
    int e[2][32];
    mbar_wait(tables, 0);
    for (int u = u0; u < u1;) {
      const int tile = u / per_tile, first = tile * per_tile, end = min(u1, first + per_tile);
      const int row = tile * 128 + wg * 64 + warp * 16 + lane / 4;
      const bool head = u == first;
      if (DELTA) {
        __syncwarp();  // every lane is done with the scales of the tile before
        for (int i = lane; i < a.variants * 16; i += 32) {
          const float* from = scale_of[i / 16];
          const int n = tile * 128 + wg * 64 + warp * 16 + i % 16;
          const bool there = from && n < a.n;
          copy4_async(my_scales + 4 * i, there ? (const void*)(from + n) : a.w_data, there);
        }
      }
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[i] = 0;
#pragma unroll
      for (int i = 0; i < 2 * S::GROUPS; i++) acc[i] = 0;
#pragma unroll 1
      for (; u < end; u++) {
        mbar_wait(pfull + 8 * pc.at, pc.phase);
        const u32 piece = pieces + pc.at * S::PIECE;
        int last = 0;  // stage whose products are in flight
#pragma unroll 1
        for (int b = 0; b < 4; b++) {
          mbar_wait(full + 8 * st.at, st.phase);
          const u64 dw = desc_swizzle128(base + st.at * W_BYTES + wg * 8192), dx = desc_swizzle128(piece + b * (NT * 128));
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
          int at_slot = 0, freed = 0;  // the last slot whose chunk has arrived; slots whose chunk has been handed back
          const int slots_at = ch.at;
          Ring old = ch;
          mbar_wait(sfull + 8 * ch.at, ch.phase);
#pragma unroll
          for (int g = 0; g <= S::GROUPS; g++) {
            int first_slot = a.variants;
            if (g < S::GROUPS) {
              const u64 dp = desc_plain(piece + S::PLANES_OFF + g * 4 * PLANE_BYTES, 128, 256);
              u64 ds[4];
              first_slot = 0;
              if (MODE == MANY) {
                const u32 packed = __shfl_sync(~0u, ((const u32*)group_slots)[g], 0);
                first_slot = packed & 255;
#pragma unroll 1
                for (; at_slot < (int)(packed >> 24); at_slot++) {
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
            fold(acc[2 * g - 2], acc[2 * g - 1], e[(g - 1) & 1], piece + S::META_OFF + (g - 1) * 32, q);
#pragma unroll 1
            for (; freed < first_slot; freed++, old.next(a.chunks))
              if (lane == 0) mbar_arrive(sempty + 8 * old.at);
          }
          ch.next(a.chunks);  // every slot has a row: this was the last
        }
        __syncwarp();  // every lane has read its scales
        if (lane == 0) mbar_arrive(pempty + 8 * pc.at);
        pc.next(a.pieces);
      }
      pin(d);
      if (DELTA) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2 * S::GROUPS; i++) {
          const int mine = slot_of[4 * (i / 2) + q];  // of token 4g + q
          acc[i] *= mine < 0 ? 0.f : lds_float(my_scales + mine * 64 + (lane / 4 + 8 * (i % 2)) * 4);
        }
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
        leave_words(d, split, cta, tid);
        continue;
      }
      if (end < tile_end) add_words(d, split, cta + 1, split_last(units, cta, gridDim.x, tile_end), tid);
      if (any_bias)
#pragma unroll
        for (int i = 0; i < NT / 2; i++) {
          const int t = 8 * (i / 4) + 2 * q + (i & 1), n = row + 8 * ((i >> 1) & 1), mine = DELTA ? slot_of[t] : -1;
          const float* bias = mine < 0 ? a.bias : bias_of[mine];
          if (bias && n < a.n) d[i] += __ldg(bias + n);
        }
      if (a.wide) {
        store_wide(d, a, row, q);
        continue;
      }
      T* Y = (T*)a.y;
#pragma unroll
      for (int i = 0; i < NT / 2; i += 2) {  // rows 2p, 2p + 1 of one token go together: lanes of even and odd row trade tokens
        const bool up = lane & 4;
        const float got = __shfl_xor_sync(~0u, up ? d[i] : d[i + 1], 4);
        const int t = 8 * (i / 4) + 2 * q + up, n = (row & ~1) + 8 * ((i >> 1) & 1);
        if (t < a.rows && n < a.n) *(u32*)(Y + (size_t)t * a.n + n) = up ? Elem<T>::pack(got, d[i + 1]) : Elem<T>::pack(d[i], got);
      }
    }
  }
}

template <typename T, int NT, Mode MODE> cudaError_t launch(k_decode_args a, cudaStream_t s) {
  typedef Lean<NT> S;
  auto kernel = lean_kernel<T, NT, MODE>;
  const int units = (a.n + 127) / 128 * (a.k / 256), scale_bytes = a.variants * 512;
  a.chunks = MODE == NONE ? 0 : a.variants > 8 ? 16 : a.variants > 2 ? 2 * a.variants : 4;
  a.pieces = 3;
  a.stages = (BUDGET - 1024 - a.pieces * S::PIECE - a.chunks * SIGN_BYTES - scale_bytes) / W_BYTES;
  if (a.stages > 12) a.stages = 12;
  a.burst = a.stages >= 8 ? 4 : 2;
  const int smem = a.stages * W_BYTES + a.pieces * S::PIECE + a.chunks * SIGN_BYTES + scale_bytes + 1024;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BUDGET);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)split_count(units, a.k / 256, a.sm_count));
  c.blockDim = dim3(THREADS), c.dynamicSmemBytes = (size_t)smem, c.stream = s, c.attrs = at, c.numAttrs = a.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, kernel, a);
}
template <typename T, int NT> cudaError_t launch_delta(const k_decode_args& a, cudaStream_t s) {
  return a.variants == 0 ? launch<T, NT, NONE>(a, s) : a.variants == 1 ? launch<T, NT, ONE>(a, s) : launch<T, NT, MANY>(a, s);
}
template <typename T> cudaError_t launch_rows(const k_decode_args& a, cudaStream_t s) {
  return a.rows <= 8 ? launch_delta<T, 8>(a, s) : launch_delta<T, 16>(a, s);
}

}  // namespace

extern "C" cudaError_t k_decode_lean(const k_decode_args* a, cudaStream_t s) {
  if (a->k % 256 || a->k > 65536 || (a->n % 8 && !a->wide) || a->variants < 0 || a->variants > SLOTS_MAX || a->rows < 1 || a->rows > K_LEAN_ROWS) return cudaErrorInvalidValue;
  return a->fp16 ? launch_rows<__half>(*a, s) : launch_rows<__nv_bfloat16>(*a, s);
}
