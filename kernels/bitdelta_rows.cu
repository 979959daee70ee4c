// bitdelta_rows.cu - up to 64 rows of many variants: the base product of all rows at once, the signs as an exact integer product (sm_90a).
//
//   Y[m][n] = bias[n] + sum_k x[m][k] W[n][k] + scale_v[n] sum_b s[m][b] sum_k sign_v[n][k] xq[m][k],   v = the variant of row m
//
// b runs over the K256 blocks, k over a block; xq = round(x / s), s = max |x| of the block / 32639, is 256 hi + lo with hi and lo in
// [-128, 127]; sign chunks as repack.cu makes them (1 = minus). Both digits' sums are exact; the delta is exact but for the 16-bit rounding of x,
// about 3e-5 of it. Y is rounded once.
// Shapes:  rows as groups of at most GR of one variant (at most G, sorted by variant; base rows have none); W [n][k], x [rows][k], Y [rows][n]
//          bf16 or fp16 (T); k % 256 == 0, n % 8 == 0.
// Tile:    128 W rows x NT tokens; a unit is one K256 step of one tile. Units are dealt to the CTAs as in bitdelta_decode.cu, and split tiles
//          are added up as there (split.cuh; as words up to 32 tokens).
// Mapping: warpgroups 0, 1 = 64 W rows each. Warp 8 streams W and the sign chunks in the order of their use; warps 9 to 11 bring x
//          and make its digits. Only x waits for the kernel before.
// Memory:  ring 1: stages of W 128x64 (128-byte swizzle). Ring 2: sign chunks, 4 KB each. Two tiles of x, K64 by K64 (128-byte
//          swizzle). Two tiles of digits: no swizzle, [16 bytes of K][rows lo, hi of token 0, of token 1, ..][16 bytes], so that
//          GR tokens from any on are an operand of 2 GR rows; 16 bytes more between the pieces of K: their stores meet no bank twice.
// Order:   signs of a group, bytes of 64 and -64, are made in registers, four K32 steps at a time, while the tensor
//          cores do the four before; the base's K64 steps go between the first. A column's sums depend on nothing but its row and (n, k, grid).
//          One K32 step i holds k = 64q + 8i + o (o = 0..7): bit 7 - i of each byte of the chunk.
#include "decode.cuh"
#include "elements.cuh"

namespace {

constexpr int MAKERS = 3, BATCH = 8, SCRATCH = 8 * 1024;  // tokens whose digits are made at once; of the epilogue: a KB a warp

template <int NT, int G, int GR> struct Rows {  // G groups of GR rows
  static constexpr int THREADS = 384, REGS = 208, OTHERS = 88;  // registers of the products' warpgroups and of the others
  static constexpr int SLICE = NT * 32 + 16, SCALES = 16 * SLICE, DIGITS = (SCALES + NT * 4 + 127) & ~127;
  static constexpr int X = NT * 512, STAGES = NT == 64 ? 4 : G <= 4 ? 8 : 6, CHUNKS = NT == 64 || G <= 4 ? 5 : 13, BURST = NT == 64 || G > 4 ? 2 : 4;
  static constexpr int SMEM = 1024 + STAGES * W_BYTES + 2 * X + 2 * DIGITS + CHUNKS * SIGN_BYTES + SCRATCH;
  static_assert(SMEM <= BUDGET);
  static constexpr bool WORDS = NT <= 32;
};

__device__ __forceinline__ uint4 lds128(u32 addr_s) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr_s) : "memory");
  return v;
}
__device__ __forceinline__ void lds_pair(u32 addr_s, u32& a, u32& b) { asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(addr_s) : "memory"); }
__device__ __forceinline__ void sts_float(u32 addr_s, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr_s), "f"(v) : "memory"); }
__device__ __forceinline__ float lds_value(u32 addr_s) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr_s) : "memory");
  return v;
}

// The largest of 8 neighbours' magnitudes, as bits: of numbers that are not negative their order.
__device__ __forceinline__ u32 top_of(const uint4& in) {
  const u32 most = __vimax3_u16x2(in.x & 0x7fff7fffu, in.y & 0x7fff7fffu, __vmaxu2(in.z & 0x7fff7fffu, in.w & 0x7fff7fffu));
  return max(most & 0xffff, most >> 16);
}

// 8 neighbours of a row, inverse = 32639 / top of their block -> where they belong in the tile of digits.
template <typename T> __device__ __forceinline__ void make_digits(const uint4& in, float inverse, u32 (&lo)[2], u32 (&hi)[2]) {
  const u32 pairs[4] = {in.x, in.y, in.z, in.w};
  u32 t[8];  // 1.5 * 2^23 + 128 + xq: byte 1 is hi, byte 0 lo with its top bit turned
#pragma unroll
  for (int i = 0; i < 8; i++) t[i] = __float_as_uint(fmaf(to_float<T>((uint16_t)(pairs[i / 2] >> (i % 2 * 16))), inverse, 12583040.f));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 a = __byte_perm(t[4 * i], t[4 * i + 1], 0x5140), b = __byte_perm(t[4 * i + 2], t[4 * i + 3], 0x5140);  // {lo, lo, hi, hi}
    lo[i] = __byte_perm(a, b, 0x5410) ^ 0x80808080u, hi[i] = __byte_perm(a, b, 0x7632);
  }
}
__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// x of the units [u0, u1), brought by the last maker between two batches, and its digits, every MAKERS-th batch of tokens by one of them.
template <typename T, int NT, int G, int GR>
__device__ __forceinline__ void make_tiles(const k_rows_args& a, uint8_t* shared, u32 x_tiles, u32 digits, u32 xfull, u32 xempty, u32 dfull, u32 dempty, int u0, int u1, int maker, int lane) {
  typedef Rows<NT, G, GR> S;
  const int per_tile = a.k / 256, q = lane / 8, step = lane % 8;
  int next = maker == MAKERS - 1 && lane == 0 ? u0 : u1;  // to be brought
  Ring in = {0, 1}, tile = {0, 0};                        // of x that is brought and that is there; the tiles of digits go with the latter
  auto bring = [&]() {
    mbar_expect(xfull + 8 * in.at, S::X);
    for (int i = 0; i < 4; i++) tma_load(x_tiles + in.at * S::X + i * (NT * 128), &a.x, next % per_tile * 256 + i * 64, a.first_row, xfull + 8 * in.at, SM90_EVICT_LAST);
    in.next(2);
    next++;
  };
  if (next < u1) pdl_wait();
  for (int u = u0; u < u1; u++, tile.next(2)) {
    while (next < u1 && next <= u) {
      mbar_wait_idle(xempty + 8 * in.at, in.phase);
      bring();
    }
    __syncwarp();
    mbar_wait_idle(xfull + 8 * tile.at, tile.phase);
    mbar_wait_idle(dempty + 8 * tile.at, tile.phase ^ 1);
    const u32 from = x_tiles + tile.at * S::X + q * (NT * 128);
    uint8_t* to = shared + digits + tile.at * S::DIGITS;
#pragma unroll 1
    for (int t0 = maker * BATCH; t0 < a.rows; t0 += MAKERS * BATCH) {
      if (next <= u + 1 && next < u1 && mbar_there(xempty + 8 * in.at, in.phase)) bring();
      __syncwarp();
      uint4 x[BATCH];
      u32 top[BATCH];  // step by step for all of them: each waits for the one before
#pragma unroll
      for (int i = 0; i < BATCH; i++) x[i] = lds128(from + (t0 + i) * 128 + ((step ^ ((t0 + i) & 7)) << 4));
#pragma unroll
      for (int i = 0; i < BATCH; i++) top[i] = top_of(x[i]);
#pragma unroll
      for (int i = 0; i < BATCH; i++) top[i] = __reduce_max_sync(~0u, top[i]);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const float most = fmaxf(to_float<T>((uint16_t)top[i]), 1e-30f);
        u32 lo[2], hi[2];
        make_digits<T>(x[i], 32639.f * reciprocal(most), lo, hi);
        u32* slice = (u32*)(to + step * S::SLICE + (t0 + i) * 32 + q * 4);  // positions 4q + o of K32 step `step`: o < 4 in its first 16 bytes, the others behind
        slice[0] = lo[0], slice[4] = hi[0];
        slice[8 * S::SLICE / 4] = lo[1], slice[8 * S::SLICE / 4 + 4] = hi[1];
        if (lane == 0) *(float*)(to + S::SCALES + (t0 + i) * 4) = most * (1.f / (32639.f * 64.f));
      }
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbar_arrive(dfull + 8 * tile.at);
    if (next <= u + 1 && next < u1 && mbar_there(xempty + 8 * in.at, in.phase)) bring();
  }
}

// W and signs of the units [u0, u1) by one thread, in the order in which the products give places back, so that it waits for none while
// another is free. fresh: groups that begin a slot; filled: steps of W whose copies are under way.
template <typename S, int G>
__device__ __forceinline__ void stream(const k_rows_args& a, const uint8_t* const* bits_of, u32 fresh, u32 base, u32 full, u32 empty, u32 chunks, u32 sfull, u32 sempty, int u0, int u1, int filled) {
  const int steps = a.k / 64;
  Ring w = {filled, 0}, c = {0, 1};
  if (w.at == S::STAGES) w.at = 0;
  else w.phase = 1;  // stages past the first filling are still fresh: their first wait must pass
  int s = 4 * u0 + filled, unit = u0, slot = 0;  // what is next of W, and of signs
  auto signs = [&]() {
    if (unit == u1) return;
    mbar_wait_idle(sempty + 8 * c.at, c.phase);
    mbar_expect(sfull + 8 * c.at, SIGN_BYTES);
    bulk_load(chunks + c.at * SIGN_BYTES, bits_of[slot] + (size_t)unit * SIGN_BYTES, SIGN_BYTES, sfull + 8 * c.at, SM90_EVICT_FIRST);
    c.next(S::CHUNKS);
    if (++slot == a.variants) slot = 0, unit++;
  };
  auto weights = [&]() {  // several at a time, so that neighbouring pieces of a W row reach the memory together
    Ring r = w;
    for (int i = 0; i < S::BURST; i++, r.next(S::STAGES)) mbar_wait_idle(empty + 8 * r.at, r.phase);
    for (int i = 0; i < S::BURST; i++, s++, w.next(S::STAGES)) {
      mbar_expect(full + 8 * w.at, W_BYTES);
      tma_load(base + w.at * W_BYTES, &a.w, s % steps * 64, s / steps * 128, full + 8 * w.at, SM90_EVICT_FIRST);
    }
  };
  for (int i = 0; i < S::CHUNKS; i++) signs();
  for (int u = u0; u < u1; u++)
    for (int g = 0; g < G; g++) {
      if (g == G - 1 || (fresh >> (g + 1) & 1)) signs();
      while (s < 4 * u1 && s + S::BURST <= 4 * u + min(2 * g + 2, 4) + S::STAGES) weights();
    }
}

// Sums of the digits of the group's tokens -> acc[2 j + h]: token 4j + q, row g + 8h of the fragment. scales_s: of the first token.
template <int GR> __device__ __forceinline__ void fold_digits(float (&acc)[GR / 2], const int (&e)[GR], u32 scales_s, int q) {
#pragma unroll
  for (int j = 0; j < GR / 4; j++) {
    const float scale = lds_value(scales_s + (4 * j + q) * 4);
#pragma unroll
    for (int h = 0; h < 2; h++) acc[2 * j + h] = fmaf(scale, (float)(e[4 * j + 2 * h] + 256 * e[4 * j + 2 * h + 1]), acc[2 * j + h]);
  }
}

// One long function, for the same reason as decode_kernel.
template <typename T, int NT, int G, int GR> __global__ void __launch_bounds__(Rows<NT, G, GR>::THREADS, 1) rows_kernel(const __grid_constant__ k_rows_args a) {
  typedef Rows<NT, G, GR> S;
  extern __shared__ uint8_t smem_raw[];
  __shared__ __align__(8) u64 bars[2 * (S::STAGES + S::CHUNKS) + 9];
  __shared__ const uint8_t* bits_of[SLOTS_MAX];
  __shared__ const float *scale_of[SLOTS_MAX], *bias_of[SLOTS_MAX];
  __shared__ short first_of[G], end_of[G];  // rows, from first_row on
  __shared__ signed char slot_of[G];        // -1: the base
  __shared__ uint8_t last_of[G];            // end_of; 0: the base
  __shared__ u32 fresh_mask, live[2];       // groups whose signs are not those of the group before; rows with a variant
  __shared__ int ticket, any_bias;
  const u32 base = (smem_u32(smem_raw) + 1023) & ~1023u, x_tiles = base + S::STAGES * W_BYTES, digits = x_tiles + 2 * S::X, chunks = digits + 2 * S::DIGITS,
            scratches = chunks + S::CHUNKS * SIGN_BYTES;
  const u32 full = smem_u32(bars), empty = full + 8 * S::STAGES, sfull = empty + 8 * S::STAGES, sempty = sfull + 8 * S::CHUNKS, dfull = sempty + 8 * S::CHUNKS, dempty = dfull + 16,
            xfull = dempty + 16, xempty = xfull + 16, landed = xempty + 16;
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  const int per_tile = a.k / 256, units = (a.n + 127) / 128 * per_tile;
  int filled = 0;  // steps of W whose copies are under way, in warp 8

  if (wg == 2 && warp == 0) {
    if (lane == 0) {
      prefetch_map(&a.w), prefetch_map(&a.x);
      const int cta = draw_ticket(a.ticket, gridDim.x);
      ticket = cta;
      filled = w_begin(a.w, base, full, empty, split_begin(units, cta, gridDim.x), split_begin(units, cta + 1, gridDim.x), per_tile, S::STAGES, S::BURST, 8);
    }
    __syncwarp();
  } else if (wg == 2 && warp == 1) {
    const float* own = nullptr;
    if (lane < a.variants) {
      // A slot without a plane for this linear streams W's bytes in its place; its scale is zero.
      const k_overlay_linear* o = a.overlays + a.columns[lane];
      const bool some = o->plane_count > 0;
      own = o->bias ? o->bias : a.bias;
      bits_of[lane] = some ? o->bits[0] : (const uint8_t*)a.w_data;
      scale_of[lane] = some ? o->scale[0] : nullptr;
      bias_of[lane] = own;
    }
    const bool some = __any_sync(~0u, own != nullptr) || a.bias;
    if (lane == 0) any_bias = some;
  } else if (wg == 2 && warp == 2) {
    const k_gemm_tile t = lane < a.group_count ? a.groups[lane] : k_gemm_tile{a.first_row, a.first_row, -1, 0};
    const int first = t.m0 - a.first_row, end = t.m1 - a.first_row;
    int near = t.variant;  // slots rise with the groups, apart from the base's -1, which takes its neighbour's signs
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int below = __shfl_up_sync(~0u, near, i);
      if (lane >= i) near = max(near, below);
    }
    near = max(near, 0);
    const int before = __shfl_up_sync(~0u, near, 1);
    const u32 fresh = __ballot_sync(~0u, lane > 0 && lane < G && near != before);
    const u64 rows = t.variant >= 0 ? ((2ull << (end - first - 1)) - 1) << first : 0;
    const u32 low = __reduce_or_sync(~0u, (u32)rows), high = __reduce_or_sync(~0u, (u32)(rows >> 32));
    if (lane < G) first_of[lane] = (short)first, end_of[lane] = (short)end, slot_of[lane] = (signed char)t.variant, last_of[lane] = (uint8_t)(t.variant >= 0 ? end : 0);
    if (lane == 0) fresh_mask = fresh, live[0] = low, live[1] = high;
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < S::CHUNKS; i++) mbar_init(sfull + 8 * i, 1), mbar_init(sempty + 8 * i, 8);
    for (int i = 0; i < 2; i++) mbar_init(dfull + 8 * i, MAKERS), mbar_init(dempty + 8 * i, 8), mbar_init(xfull + 8 * i, 1), mbar_init(xempty + 8 * i, 8);
    mbar_init(landed, 1);
    mbar_init_fence();
  }
  __syncthreads();
  const int cta = __shfl_sync(~0u, ticket, 0);
  const int u0 = split_begin(units, cta, gridDim.x), u1 = split_begin(units, cta + 1, gridDim.x);
  pdl_launch();

  if (wg == 2) {
    static_assert(registers_fit(S::THREADS, S::REGS, S::OTHERS));
    reg_dec<S::OTHERS>();
    if (warp == 0) {
      if (lane == 0) stream<S, G>(a, bits_of, fresh_mask, base, full, empty, chunks, sfull, sempty, u0, u1, filled);
    } else {
      make_tiles<T, NT, G, GR>(a, smem_raw - smem_u32(smem_raw), x_tiles, digits, xfull, xempty, dfull, dempty, u0, u1, warp - 1, lane);
    }
    __syncwarp();
  } else {
    reg_inc<S::REGS>();
    const Split split = {a.workspace, a.sm_count};
    const int q = lane & 3, tid = wg * 128 + warp * 32 + lane;
    const u32 b_off = (wg * 8 + warp * 2) * 256 + (q / 2) * 128 + (lane >> 2) * 16 + (q & 1) * 8;  // this lane's 8 sign bytes of its first row
    const u32 scratch = scratches + (wg * 4 + warp) * 1024;
    const u32 fresh = __shfl_sync(~0u, fresh_mask, 0);
    u32 firsts[(G + 3) / 4] = {};  // first row of each group, a byte each
#pragma unroll
    for (int g = 0; g < G; g++) firsts[g / 4] |= (u32)__shfl_sync(~0u, (int)first_of[g], 0) << (g % 4 * 8);
    auto first_row = [&](int g) { return (firsts[g / 4] >> (g % 4 * 8)) & 255; };
    Ring st = {0, 0}, ch = {0, 0}, tl = {0, 0};  // of W, of signs, of x and its digits
    float d[NT / 2], acc[G][GR / 2];
    int e[2][GR];
    u32 A[2][16];
    for (int u = u0; u < u1;) {
      const int tile = u / per_tile, first = tile * per_tile, end = min(u1, first + per_tile), tile_end = first + per_tile;
      const bool head = u == first;
      if (lane < a.variants && scale_of[lane])  // this warp's 16 scales of each slot will be wanted
        asm volatile("prefetch.global.L2 [%0];" ::"l"(scale_of[lane] + min(tile * 128 + wg * 64 + warp * 16, a.n - 1)));
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[i] = 0;
#pragma unroll
      for (int i = 0; i < G * GR / 2; i++) acc[i / (GR / 2)][i % (GR / 2)] = 0;
#pragma unroll 1
      for (; u < end; u++) {
        const u32 tile_s = digits + tl.at * S::DIGITS, scales = tile_s + S::SCALES;
        const u64 digits_at = desc_plain(tile_s, 8 * S::SLICE, 128), x_at = desc_swizzle128(x_tiles + tl.at * S::X);
        mbar_wait(dfull + 8 * tl.at, tl.phase);
        mbar_wait(xfull + 8 * tl.at, tl.phase);
#pragma unroll
        for (int g = 0; g < G; g++) {
          if (g > 0 && (fresh >> g & 1)) ch.next(S::CHUNKS);
          mbar_wait(sfull + 8 * ch.at, ch.phase);
          u32 signs[2][2];  // of rows g and g + 8
          const u32 chunk = chunks + ch.at * SIGN_BYTES + b_off;
          lds_pair(chunk, signs[0][0], signs[0][1]);
          lds_pair(chunk + 256, signs[1][0], signs[1][1]);
          const u64 group_at = digits_at + 2 * first_row(g);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int t = 2 * g + h;
            if (t < 4) {
              mbar_wait(full + 8 * st.at, st.phase);
              const u64 w_at = desc_swizzle128(base + st.at * W_BYTES + wg * 8192);
              pin(d);
              wgmma_fence();
#pragma unroll
              for (int i = 0; i < 4; i++) Mma<T, NT>::ss(d, w_at + 2 * i, x_at + t * (NT * 128 / 16) + 2 * i, 1);
              wgmma_commit();
            }
#pragma unroll
            for (int i = 0; i < 16; i++) A[h][i] = and_xor(signs[i & 1][i / 2 & 1] << (4 * h + i / 4), 0x80808080u, 0x40404040u);
            pin((int(&)[16])A[h]);
            pin(e[g & 1]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
              Imma<2 * GR>::rs(e[g & 1], A[h][4 * i], A[h][4 * i + 1], A[h][4 * i + 2], A[h][4 * i + 3], group_at + (4 * h + i) * (S::SLICE / 16), h || i);
            wgmma_commit();
            wgmma_wait<1>();
            if (t < 4) {
              if (lane == 0) mbar_arrive(empty + 8 * st.at);
              st.next(S::STAGES);
              if (t == 3 && lane == 0) mbar_arrive(xempty + 8 * tl.at);
            }
            if (h == 0 && (g == G - 1 || (fresh >> (g + 1) & 1))) {  // every lane has its signs of this slot
              __syncwarp();
              if (lane == 0) mbar_arrive(sempty + 8 * ch.at);
            }
            if (h == 0 && g > 0) {
              pin(e[(g - 1) & 1]);
              fold_digits<GR>(acc[g > 0 ? g - 1 : 0], e[(g - 1) & 1], scales + first_row(g > 0 ? g - 1 : 0) * 4, q);
            }
          }
        }
        wgmma_wait<0>();
        pin(e[(G - 1) & 1]);
        fold_digits<GR>(acc[G - 1], e[(G - 1) & 1], scales + first_row(G - 1) * 4, q);
        __syncwarp();  // every lane has read its scales
        if (lane == 0) mbar_arrive(dempty + 8 * tl.at);
        ch.next(S::CHUNKS);
        tl.next(2);
      }
      pin(d);
      // Each group's token 4j + q to the lanes that have its column of the base: 16 tokens at a time, [token][16 rows].
      int own = lane;  // opaque: what follows from it must not be kept in registers all through the products
      asm volatile("" : "+r"(own));
      const int token = own & 3, r0 = own >> 2, row = tile * 128 + wg * 64 + warp * 16 + r0;
      float factor[G][2];
      u32 scaled = 0;
#pragma unroll
      for (int g = 0; g < G; g++) {  // all under way before the first is waited for; without one from anywhere
        const float* scale = slot_of[g] >= 0 ? scale_of[slot_of[g]] : nullptr;
        const float* from = scale ? scale : (const float*)a.overlays;
        if (scale) scaled |= 1u << g;
#pragma unroll
        for (int h = 0; h < 2; h++) factor[g][h] = __ldg(from + (scale ? min(row + 8 * h, a.n - 1) : 0));
      }
#pragma unroll
      for (int i = 0; i < G * GR / 2; i++) acc[i / (GR / 2)][i % (GR / 2)] *= scaled >> (i / (GR / 2)) & 1 ? factor[i / (GR / 2)][i & 1] : 0.f;
#pragma unroll
      for (int r = 0; r < NT / 16; r++) {
        __syncwarp();
#pragma unroll
        for (int g = 0; g < G; g++) {
          const int first = first_row(g), last = last_of[g];
          if (first >= 16 * r + 16 || last <= 16 * r) continue;
#pragma unroll
          for (int j = 0; j < GR / 4; j++) {
            const int t = first + 4 * j + token, at = t - 16 * r;
            if (t < last && at >= 0 && at < 16) {
              sts_float(scratch + (at * 16 + r0) * 4, acc[g][2 * j]);
              sts_float(scratch + (at * 16 + r0 + 8) * 4, acc[g][2 * j + 1]);
            }
          }
        }
        __syncwarp();
        const u32 there = live[r / 2] >> (r % 2 * 16);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // d[4j + 2h + e]: token 8j + 2q + e, row g + 8h
          const int at = i / 4 * 8 + 2 * token + (i & 1);
          if (there >> at & 1) d[8 * r + i] += lds_value(scratch + (at * 16 + r0 + (i >> 1 & 1) * 8) * 4);
        }
      }
      if (!head) {  // only a CTA's first tile can lack its head
        if (S::WORDS) leave_words(d, split, cta, tid);
        else leave_partial(d, split, cta, tid);
        continue;
      }
      if (end < tile_end) {  // and only its last its end: the stages are free by then
        const int last = split_last(units, cta, gridDim.x, tile_end);
        if (S::WORDS) add_words(d, split, cta + 1, last, tid);
        else fetch_partials(d, split, cta + 1, last, tid, base, S::STAGES * W_BYTES / (NT * 512), landed);
      }
      if (any_bias) {
#pragma unroll 1
        for (int g = 0; g < a.group_count; g++) {
          const float* bias = slot_of[g] >= 0 ? bias_of[slot_of[g]] : a.bias;
          const float add[2] = {bias && row < a.n ? __ldg(bias + row) : 0.f, bias && row + 8 < a.n ? __ldg(bias + row + 8) : 0.f};
#pragma unroll
          for (int i = 0; i < NT / 2; i++) {
            const int t = i / 4 * 8 + 2 * token + (i & 1);
            if (t >= first_of[g] && t < end_of[g]) d[i] += add[i >> 1 & 1];
          }
        }
      }
      T* Y = (T*)a.y + (size_t)a.first_row * a.n;
#pragma unroll
      for (int i = 0; i < NT / 2; i += 2) {  // rows 2p, 2p + 1 of one column go together: lanes of even and odd row trade columns
        const int n = (row + 8 * (i >> 1 & 1)) & ~1, t = i / 4 * 8 + 2 * token + (r0 & 1);
        const bool up = own & 4;
        const float got = __shfl_xor_sync(~0u, up ? d[i] : d[i + 1], 4);
        if (t < a.rows && n < a.n) *(u32*)(Y + (size_t)t * a.n + n) = up ? Elem<T>::pack(got, d[i + 1]) : Elem<T>::pack(d[i], got);
      }
    }
  }
}

template <typename T, int NT, int G, int GR> cudaError_t launch(const k_rows_args& a, cudaStream_t s) {
  typedef Rows<NT, G, GR> S;
  auto kernel = rows_kernel<T, NT, G, GR>;
  const int units = (a.n + 127) / 128 * (a.k / 256);
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SMEM);
  if (e != cudaSuccess) return e;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(a.sm_count < units ? a.sm_count : units));  // every CTA must own at least one unit: the split counts on it
  c.blockDim = dim3(S::THREADS), c.dynamicSmemBytes = S::SMEM, c.stream = s, c.attrs = at, c.numAttrs = a.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, kernel, a);
}
template <typename T, int NT> cudaError_t launch_eights(const k_rows_args& a, cudaStream_t s) {
  const int groups = a.group_count;
  return groups <= 8 ? launch<T, NT, 8, 8>(a, s) : groups <= 12 ? launch<T, NT, 12, 8>(a, s) : groups <= 14 ? launch<T, NT, 14, 8>(a, s) : launch<T, NT, 16, 8>(a, s);
}
template <typename T> cudaError_t launch_groups(const k_rows_args& a, cudaStream_t s) {
  const int groups = a.group_count;
  if (a.group_rows == 16) {
    if (a.rows <= 32) return groups <= 2 ? launch<T, 32, 2, 16>(a, s) : launch<T, 32, 4, 16>(a, s);
    return groups <= 4 ? launch<T, 64, 4, 16>(a, s) : launch<T, 64, 8, 16>(a, s);
  }
  if (a.rows <= 32 && groups <= 4) return launch<T, 32, 4, 8>(a, s);
  return a.rows <= 32 ? launch_eights<T, 32>(a, s) : launch_eights<T, 64>(a, s);
}

}  // namespace

extern "C" bool k_rows_takes(int rows, int groups, int group_rows) {
  return groups >= 1 && groups <= (group_rows == 16 ? (rows <= 32 ? 4 : 8) : K_MIXED_GROUPS);
}

extern "C" double k_rows_cost(int n, int k, int rows, int groups, int group_rows, int variants, int sm_count) {
  if (k % 256) return 1e300;
  // Microseconds of a unit's products by groups, those of 16 rows first, and of a launch; of up to 32 and 64 rows. Measured on an H200 (of 8
  // groups of 16, of 12 and of 16: between their neighbours).
  static const double products[2][6] = {{2.0, 2.3, 3.33, 4.5, 5.14, 5.8}, {2.7, 4.2, 3.87, 5.0, 5.65, 6.3}};
  static const double launch[2][6] = {{8.3, 9.6, 9.5, 10, 10, 10.5}, {14.4, 17, 18.6, 18.7, 18.8, 19}};
  const int wide = rows > 32, at = group_rows == 16 ? (wide ? groups > 4 : groups > 2) : groups <= 4 && !wide ? 1 : groups <= 8 ? 2 : groups <= 12 ? 3 : groups <= 14 ? 4 : 5;
  const double bytes = (W_BYTES * 4 + SIGN_BYTES * variants) / 33.4e3, unit = products[wide][at];
  return (double)((n + 127) / 128) * (k / 256) / sm_count * (bytes > unit ? bytes : unit) + launch[wide][at];
}

extern "C" cudaError_t k_rows(const k_rows_args* a, cudaStream_t s) {
  if (a->k % 256 || a->n % 8 || a->variants < 1 || a->variants > SLOTS_MAX || a->rows < 1 || a->rows > K_DECODE_ROWS || (a->group_rows != 8 && a->group_rows != 16) ||
      !k_rows_takes(a->rows, a->group_count, a->group_rows))
    return cudaErrorInvalidValue;
  return a->fp16 ? launch_groups<__half>(*a, s) : launch_groups<__nv_bfloat16>(*a, s);
}
