// bitdelta_rows.cu - up to 64 rows of many variants: the base product of all rows at once, the signs as an exact integer product (sm_90a).
//
//   Y[m][n] = bias[n] + sum_k x[m][k] W[n][k] + scale_v[n] sum_b s[m][b] sum_k sign_v[n][k] xq[m][k],   v = the variant of row m
//
// b runs over the K256 blocks, k over a block; s and xq = x / s, rounded to 1/8 at the finest, are bitdelta_digits.cu's, sign chunks repack.cu's
// (1 = minus). Sums over a block are exact; the delta is exact but for that rounding, about 1e-4 of it, and for float32. Y is rounded once.
// Shapes:  rows as groups of at most GR of one variant (at most G, sorted by variant; of the base of any number); W [n][k], x [rows][k], Y [rows][n]
//          bf16 or fp16 (T); k % 256 == 0, n % 8 == 0.
// Tile:    128 W rows x NT tokens; a unit is one K256 step of one tile. Units are dealt to the CTAs as in bitdelta_decode.cu, and split tiles
//          are added up as there (split.cuh; as words).
// Mapping: warpgroups 0, 1 = 64 W rows each. Warp 8 streams W, warp 9 x and its digits, warp 10 the sign chunks. Only x and its digits wait for
//          the kernel before.
// Memory:  ring 1: stages of W 128x64 (128-byte swizzle). Ring 2: sign chunks, 4 KB each. One or two tiles of x, K64 by K64 (128-byte swizzle), and two
//          of its digits: GR tokens from any on are an operand of 2 GR rows.
// Order:   a group's bytes are made of its sign bits in registers, four K32 steps at a time, while the tensor cores do the four before; the
//          base's K64 steps go between the first; the bits of the group to come are fetched meanwhile. A column's sums depend on nothing but
//          its row and (n, k, grid). One K32 step i holds k = 64q + 8i + o (o = 0..7): bit 7 - i of each byte of the chunk. The bits of
//          steps 0 to 3 are used where they are, those of 4 to 7 after one shift (bitdelta_digits.cu says why that is right).
#include "decode.cuh"

namespace {

template <int NT, int G, int GR> struct Rows {  // G groups of GR rows
  static constexpr int THREADS = 384, REGS = 232, OTHERS = 40;  // registers of the products' warpgroups and of the others
  static constexpr int SLICE = NT * 32, CORRECTIONS = 16 * SLICE, SCALES = CORRECTIONS + NT * 16, DIGITS = digits_tile_bytes(NT);
  static constexpr int X = NT * 512, XS = NT == 64 && G > 4 ? 1 : 2;  // tiles of x: it is wanted for a unit's first groups alone
  static constexpr int STAGES = NT == 64 ? 4 : G <= 4 ? 8 : 6, CHUNKS = NT == 32 && G > 4 || XS == 1 ? 15 : 7, BURST = NT == 64 || G > 4 ? 2 : 4;
  static constexpr int SMEM = 1024 + STAGES * W_BYTES + XS * X + 2 * DIGITS + CHUNKS * SIGN_BYTES;
  static_assert(SMEM <= BUDGET);
  static constexpr bool EARLY = G * GR < 128;  // scales are fetched at a tile's beginning, where registers allow
};

__device__ __forceinline__ void lds_pair(u32 addr_s, u32& a, u32& b) { asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(addr_s) : "memory"); }
__device__ __forceinline__ float lds_value(u32 addr_s) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(addr_s) : "memory");
  return v;
}

// x and its digits of the units [u0, u1), by one thread.
template <typename S> __device__ __forceinline__ void bring_x(const k_rows_args& a, u32 x_tiles, u32 digits, u32 xfull, u32 xempty, u32 dfull, u32 dempty, int u0, int u1) {
  const int per_tile = a.k / 256;
  Ring x = {0, 1}, d = {0, 1};
  pdl_wait();
  for (int u = u0; u < u1; u++, x.next(S::XS), d.next(2)) {
    mbar_wait_idle(dempty + 8 * d.at, d.phase);
    mbar_expect(dfull + 8 * d.at, S::DIGITS);
    bulk_load(digits + d.at * S::DIGITS, a.digits + (size_t)(u % per_tile) * S::DIGITS, S::DIGITS, dfull + 8 * d.at, SM90_EVICT_LAST);
    mbar_wait_idle(xempty + 8 * x.at, x.phase);
    mbar_expect(xfull + 8 * x.at, S::X);
    for (int i = 0; i < 4; i++) tma_load(x_tiles + x.at * S::X + i * (S::X / 4), &a.x, u % per_tile * 256 + i * 64, a.first_row, xfull + 8 * x.at, SM90_EVICT_LAST);
  }
}

// Sign chunks of the units [u0, u1), by one thread, and one more: the products fetch signs ahead without asking whether there are any.
template <typename S> __device__ __forceinline__ void stream_signs(const k_rows_args& a, const uint8_t* const* bits_of, u32 chunks, u32 sfull, u32 sempty, int u0, int u1) {
  Ring to = {0, 1};
  auto chunk = [&](int u, int slot) {
    mbar_wait_idle(sempty + 8 * to.at, to.phase);
    mbar_expect(sfull + 8 * to.at, SIGN_BYTES);
    bulk_load(chunks + to.at * SIGN_BYTES, bits_of[slot] + (size_t)u * SIGN_BYTES, SIGN_BYTES, sfull + 8 * to.at, SM90_EVICT_FIRST);
    to.next(S::CHUNKS);
  };
  for (int u = u0; u < u1; u++)
    for (int slot = 0; slot < a.variants; slot++) chunk(u, slot);
  chunk(u1 - 1, 0);
}

// What the sums of the digits of a group's tokens begin with. corrections_s: of the first.
template <int GR> __device__ __forceinline__ void begin_digits(int (&e)[GR], u32 corrections_s, int q) {
#pragma unroll
  for (int j = 0; j < GR; j += 4)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(e[j]), "=r"(e[j + 1]), "=r"(e[j + 2]), "=r"(e[j + 3]) : "r"(corrections_s + (j + q) * 16) : "memory");
}
// Sums of the digits of the group's tokens -> acc[2 j + h]: token 4j + q, row g + 8h of the fragment. scales_s: of the first.
template <int GR> __device__ __forceinline__ void fold_digits(float (&acc)[GR / 2], const int (&e)[GR], u32 scales_s, int q) {
#pragma unroll
  for (int j = 0; j < GR / 4; j++) {
    const float scale = lds_value(scales_s + (4 * j + q) * 4);
#pragma unroll
    for (int h = 0; h < 2; h++) acc[2 * j + h] = fmaf(scale, (float)(e[4 * j + 2 * h] + 256 * e[4 * j + 2 * h + 1]), acc[2 * j + h]);
  }
}

// A group's sums from where its product left them (acc[2j + h]: its token 4j + q, row g + 8h) to where the base has those tokens (acc[4m + 2h + e]:
// token 2q + e of the m-th eight from the one in which it begins on; what is before its first token there is of the eight after its last).
// count: of its tokens; the others become 0. first: its first token.
template <int GR> __device__ __forceinline__ void turn_group(float (&acc)[GR / 2], int first, int count, int q) {
  float out[GR / 2];
#pragma unroll
  for (int i = 0; i < GR / 2; i++) {
    const int m = i / 4, h = i / 2 % 2, e = i % 2, token = (8 * m + 2 * q + e - first % 8) & (GR - 1);
    float v = 0;
#pragma unroll
    for (int j = 0; j < GR / 4; j++) {
      const float got = __shfl_sync(~0u, acc[2 * j + h], token & 3, 4);
      v = token >> 2 == j ? got : v;
    }
    out[i] = token < count ? v : 0.f;
  }
#pragma unroll
  for (int i = 0; i < GR / 2; i++) acc[i] = out[i];
}

// d += a turned group that begins in eight `eight`, which is in [LO, HI).
template <int NT, int GR, int LO = 0, int HI = NT / 8> __device__ __forceinline__ void add_group(float (&d)[NT / 2], const float (&v)[GR / 2], int eight, int before, int q) {
  if constexpr (HI - LO > 1) {
    if (eight < (LO + HI) / 2) add_group<NT, GR, LO, (LO + HI) / 2>(d, v, eight, before, q);
    else add_group<NT, GR, (LO + HI) / 2, HI>(d, v, eight, before, q);
  } else {
#pragma unroll
    for (int i = 0; i < GR / 2; i++) {
      const bool here = i >= 4 || 2 * q + i % 2 >= before;
      if (here && LO + i / 4 < NT / 8) d[4 * (LO + i / 4) + i % 4] += v[i];
      if (!here && LO + GR / 8 < NT / 8) d[4 * (LO + GR / 8) + i % 4] += v[i];
    }
  }
}

// One long function, for the same reason as decode_kernel.
template <typename T, int NT, int G, int GR> __global__ void __launch_bounds__(Rows<NT, G, GR>::THREADS, 1) rows_kernel(const __grid_constant__ k_rows_args a) {
  typedef Rows<NT, G, GR> S;
  extern __shared__ uint8_t smem_raw[];
  __shared__ __align__(8) u64 bars[2 * (S::STAGES + S::CHUNKS + S::XS + 2)];
  __shared__ const uint8_t* bits_of[SLOTS_MAX];
  __shared__ const float *scale_of[SLOTS_MAX], *bias_of[SLOTS_MAX];
  __shared__ short first_of[G], end_of[G];  // rows, from first_row on
  __shared__ signed char slot_of[G];        // -1: the base
  __shared__ uint8_t last_of[G];            // end_of; 0: the base
  __shared__ u32 fresh_mask;                // groups whose signs are not those of the group before
  __shared__ int ticket, any_bias;
  const u32 base = (smem_u32(smem_raw) + 1023) & ~1023u, x_tiles = base + S::STAGES * W_BYTES, digits = x_tiles + S::XS * S::X, chunks = digits + 2 * S::DIGITS;
  const u32 full = smem_u32(bars), empty = full + 8 * S::STAGES, sfull = empty + 8 * S::STAGES, sempty = sfull + 8 * S::CHUNKS, xfull = sempty + 8 * S::CHUNKS,
            xempty = xfull + 8 * S::XS, dfull = xempty + 8 * S::XS, dempty = dfull + 16;
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, (threadIdx.x / 32) % 4, 0), lane = threadIdx.x % 32;
  const int per_tile = a.k / 256, units = (a.n + 127) / 128 * per_tile;
  int filled = 0;  // steps of W whose copies are under way, in warp 8

  if (wg == 2 && warp == 0) {
    if (lane == 0) {
      prefetch_map(&a.w), prefetch_map(&a.x);
      const int cta = draw_ticket(a.ticket, gridDim.x);
      ticket = cta;
      filled = w_begin(a.w, a.w_row, base, full, empty, split_begin(units, cta, gridDim.x), split_begin(units, cta + 1, gridDim.x), per_tile, S::STAGES, S::BURST, 8);
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
    if (lane < G) first_of[lane] = (short)first, end_of[lane] = (short)end, slot_of[lane] = (signed char)t.variant, last_of[lane] = (uint8_t)(t.variant >= 0 ? end : 0);
    if (lane == 0) fresh_mask = fresh;
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < S::CHUNKS; i++) mbar_init(sfull + 8 * i, 1), mbar_init(sempty + 8 * i, 8);
    for (int i = 0; i < S::XS; i++) mbar_init(xfull + 8 * i, 1), mbar_init(xempty + 8 * i, 8);
    for (int i = 0; i < 2; i++) mbar_init(dfull + 8 * i, 1), mbar_init(dempty + 8 * i, 8);
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
      if (lane == 0) w_stream<true>(a.w, a.w_row, base, full, empty, u0, u1, per_tile, S::STAGES, S::BURST, filled);
    } else if (warp == 1) {
      if (lane == 0) bring_x<S>(a, x_tiles, digits, xfull, xempty, dfull, dempty, u0, u1);
    } else if (warp == 2 && lane == 0) {
      stream_signs<S>(a, bits_of, chunks, sfull, sempty, u0, u1);
    }
    __syncwarp();
  } else {
    reg_inc<S::REGS>();
    const Split split = {a.workspace, a.sm_count};
    const int q = lane & 3, tid = wg * 128 + warp * 32 + lane;
    const u32 b_off = (wg * 8 + warp * 2) * 256 + (q / 2) * 128 + (lane >> 2) * 16 + (q & 1) * 8;  // this lane's 8 sign bytes of its first row
    const u32 fresh = __shfl_sync(~0u, fresh_mask, 0);
    u32 firsts[(G + 3) / 4] = {};  // first row of each group, a byte each
#pragma unroll
    for (int g = 0; g < G; g++) firsts[g / 4] |= (u32)__shfl_sync(~0u, (int)first_of[g], 0) << (g % 4 * 8);
    auto first_row = [&](int g) { return (firsts[g / 4] >> (g % 4 * 8)) & 255; };
    Ring st = {0, 0}, ch = {0, 0}, xt = {0, 0}, tl = {0, 0};  // of W, of signs, of x, of its digits
    float d[NT / 2], acc[G][GR / 2];
    int e[2][GR];
    u32 A[2][16], ahead[2][2];  // signs of the group to come: of rows g and g + 8
    auto fetch_signs = [&]() {
      mbar_wait(sfull + 8 * ch.at, ch.phase);
      const u32 chunk = chunks + ch.at * SIGN_BYTES + b_off;
      lds_pair(chunk, ahead[0][0], ahead[0][1]);
      lds_pair(chunk + 256, ahead[1][0], ahead[1][1]);
    };
    fetch_signs();
    for (int u = u0; u < u1;) {
      const int tile = u / per_tile, first = tile * per_tile, end = min(u1, first + per_tile), tile_end = first + per_tile;
      const bool head = u == first;
      const int row = tile * 128 + wg * 64 + warp * 16 + lane / 4;
      float factor[S::EARLY ? G : 1][2];
      auto load_factor = [&](float (&to)[2], int g) {  // of the group's rows of W; without a scale 0
        const float* scale = slot_of[g] >= 0 ? scale_of[slot_of[g]] : nullptr;
#pragma unroll
        for (int h = 0; h < 2; h++) to[h] = scale ? __ldg(scale + min(row + 8 * h, a.n - 1)) : 0.f;
      };
      if constexpr (S::EARLY) {
#pragma unroll
        for (int g = 0; g < G; g++) load_factor(factor[g], g);
      }
#pragma unroll
      for (int i = 0; i < NT / 2; i++) d[i] = 0;
#pragma unroll
      for (int i = 0; i < G * GR / 2; i++) acc[i / (GR / 2)][i % (GR / 2)] = 0;
#pragma unroll 1
      for (; u < end; u++) {
        const u32 tile_s = digits + tl.at * S::DIGITS, corrections = tile_s + S::CORRECTIONS, scales = tile_s + S::SCALES;
        const u64 digits_at = desc_plain(tile_s, 8 * S::SLICE, 128), x_at = desc_swizzle128(x_tiles + xt.at * S::X);
        mbar_wait(dfull + 8 * tl.at, tl.phase);
        begin_digits<GR>(e[0], corrections + first_row(0) * 16, q);
        mbar_wait(xfull + 8 * xt.at, xt.phase);
#pragma unroll
        for (int g = 0; g < G; g++) {
          u32 signs[2][2];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            asm volatile("" : "+r"(ahead[i / 2][i % 2]));  // not before: what was fetched is only just on its way
            signs[i / 2][i % 2] = ahead[i / 2][i % 2];
          }
          const u64 group_at = digits_at + 2 * first_row(g);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            if (h) signs[0][0] <<= 4, signs[0][1] <<= 4, signs[1][0] <<= 4, signs[1][1] <<= 4;
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
            for (int i = 0; i < 16; i++) A[h][i] = i < 4 ? and_xor(signs[i & 1][i / 2 & 1], 0x80808080u, 0x40404040u) : signs[i & 1][i / 2 & 1] & 0x80808080u >> i / 4;
            pin((int(&)[16])A[h]);
            pin(e[g & 1]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
              Imma<2 * GR>::rs(e[g & 1], A[h][4 * i], A[h][4 * i + 1], A[h][4 * i + 2], A[h][4 * i + 3], group_at + (4 * h + i) * (S::SLICE / 16), 1);
            wgmma_commit();
            wgmma_wait<1>();
            if (t < 4) {
              if (lane == 0) mbar_arrive(empty + 8 * st.at);
              st.next(S::STAGES);
              if (t == 3) {
                if (lane == 0) mbar_arrive(xempty + 8 * xt.at);
                xt.next(S::XS);
              }
            }
            if (h == 0 && (g == G - 1 || (fresh >> (g + 1) & 1))) {  // every lane has its signs of this slot
              __syncwarp();
              if (lane == 0) mbar_arrive(sempty + 8 * ch.at);
              ch.next(S::CHUNKS);
              fetch_signs();
            }
            if (h == 0 && g > 0) {
              pin(e[(g - 1) & 1]);
              fold_digits<GR>(acc[g > 0 ? g - 1 : 0], e[(g - 1) & 1], scales + first_row(g > 0 ? g - 1 : 0) * 4, q);
            }
            if (h == 0 && g < G - 1) begin_digits<GR>(e[(g + 1) & 1], corrections + first_row(g < G - 1 ? g + 1 : 0) * 16, q);
          }
        }
        wgmma_wait<0>();
        pin(e[(G - 1) & 1]);
        fold_digits<GR>(acc[G - 1], e[(G - 1) & 1], scales + first_row(G - 1) * 4, q);
        __syncwarp();  // every lane has read its scales
        if (lane == 0) mbar_arrive(dempty + 8 * tl.at);
        tl.next(2);
      }
      pin(d);
#pragma unroll
      for (int g = 0; g < G; g++) {
        if constexpr (!S::EARLY) load_factor(factor[0], g);
#pragma unroll
        for (int i = 0; i < GR / 2; i++) acc[g][i] *= factor[S::EARLY ? g : 0][i & 1];
      }
#pragma unroll 1
      for (int g = 0; g < G; g += 2) {  // code for two, since it is run once a tile and comes from far
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int first = first_of[g + i], last = last_of[g + i];
          if (!last) continue;
          turn_group<GR>(acc[i], first, last - first, q);
          add_group<NT, GR>(d, acc[i], first / 8, first % 8, q);
        }
#pragma unroll
        for (int i = 0; i < (G - 2) * GR / 2; i++) acc[i / (GR / 2)][i % (GR / 2)] = acc[i / (GR / 2) + 2][i % (GR / 2)];
      }
      if (!head) {  // only a CTA's first tile can lack its head
        leave_words(d, split, cta, tid);
        continue;
      }
      if (end < tile_end) {  // and only its last its end
        const int last = split_last(units, cta, gridDim.x, tile_end);
        add_words(d, split, cta + 1, last, tid);
      }
      if (any_bias) {
#pragma unroll 1
        for (int g = 0; g < a.group_count; g++) {
          const float* bias = slot_of[g] >= 0 ? bias_of[slot_of[g]] : a.bias;
          const float add[2] = {bias && row < a.n ? __ldg(bias + row) : 0.f, bias && row + 8 < a.n ? __ldg(bias + row + 8) : 0.f};
#pragma unroll
          for (int i = 0; i < NT / 2; i++) {
            const int t = i / 4 * 8 + 2 * q + (i & 1);
            if (t >= first_of[g] && t < end_of[g]) d[i] += add[i >> 1 & 1];
          }
        }
      }
      if (a.wide) {
        store_wide(d, a, row, q);
        continue;
      }
      T* Y = (T*)a.y + (size_t)a.first_row * a.n;
#pragma unroll
      for (int i = 0; i < NT / 2; i += 2) {  // rows 2p, 2p + 1 of one column go together: lanes of even and odd row trade columns
        const int n = (row + 8 * (i >> 1 & 1)) & ~1, t = i / 4 * 8 + 2 * q + (lane >> 2 & 1);
        const bool up = lane & 4;
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
  c.gridDim = dim3((unsigned)split_count(units, a.k / 256, a.sm_count));
  c.blockDim = dim3(S::THREADS), c.dynamicSmemBytes = S::SMEM, c.stream = s, c.attrs = at, c.numAttrs = a.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&c, kernel, a);
}
template <typename T, int NT> cudaError_t launch_eights(const k_rows_args& a, cudaStream_t s) {
  const int groups = a.group_count;
  return groups <= 8 ? launch<T, NT, 8, 8>(a, s) : groups <= 12 ? launch<T, NT, 12, 8>(a, s) : groups <= 14 ? launch<T, NT, 14, 8>(a, s) : launch<T, NT, 16, 8>(a, s);
}
template <typename T> cudaError_t launch_groups(const k_rows_args& a, cudaStream_t s) {
  const int groups = a.group_count;
  if (a.group_rows == K_ROWS_LARGE) {
    if (a.rows <= 32) return groups <= 2 ? launch<T, 32, 2, 16>(a, s) : launch<T, 32, 4, 16>(a, s);
    return groups <= 4 ? launch<T, 64, 4, 16>(a, s) : launch<T, 64, 8, 16>(a, s);
  }
  if (a.rows <= 32 && groups <= 4) return launch<T, 32, 4, 8>(a, s);
  return a.rows <= 32 ? launch_eights<T, 32>(a, s) : launch_eights<T, 64>(a, s);
}

}  // namespace

extern "C" bool k_rows_takes(int rows, int groups, int group_rows) {
  return groups >= 1 && groups <= (group_rows == K_ROWS_LARGE ? (rows <= 32 ? 4 : 8) : K_ROWS_GROUPS);
}

extern "C" double k_rows_cost(int n, int k, int rows, int groups, int group_rows, int variants, int sm_count) {
  if (k % 256) return 1e300;
  // Microseconds of a unit's products and of a launch with its digits, of up to 32 and 64 rows, by groups: of 16 rows the smaller kernel and the
  // larger, then of 8 up to 8 (and 4), 12, 14 and 16. Measured on an H200, each with as many variants as groups.
  static const double products[2][7] = {{2.0, 2.35, 2.3, 2.75, 3.55, 4.0, 4.6}, {2.4, 3.35, 2.95, 2.95, 3.65, 4.2, 4.75}};
  static const double launch[2][7] = {{7.9, 9.2, 8.2, 10.4, 12.7, 13.5, 15.7}, {11.4, 15.5, 11.8, 11.8, 14, 15, 16.5}};
  const int wide = rows > 32, at = group_rows == K_ROWS_LARGE ? groups > (wide ? 4 : 2) : groups <= 4 ? 2 : groups <= 8 ? 3 : groups <= 12 ? 4 : groups <= 14 ? 5 : 6;
  const double bytes = (W_BYTES * 4 + SIGN_BYTES * variants) / 33.4e3, unit = products[wide][at];
  return (double)((n + 127) / 128) * (k / 256) / sm_count * (bytes > unit ? bytes : unit) + launch[wide][at];
}

extern "C" cudaError_t k_rows(const k_rows_args* a, cudaStream_t s) {
  if (a->k % 256 || (a->n % 8 && !a->wide) || a->variants < 1 || a->variants > SLOTS_MAX || a->rows < 1 || a->rows > K_DECODE_ROWS || (a->group_rows != K_ROWS_SMALL && a->group_rows != K_ROWS_LARGE) ||
      !k_rows_takes(a->rows, a->group_count, a->group_rows))
    return cudaErrorInvalidValue;
  return a->fp16 ? launch_groups<__half>(*a, s) : launch_groups<__nv_bfloat16>(*a, s);
}
