// split.cuh - tiles whose K is shared by several CTAs: the ticket that orders them and the float32 partials they leave.
//
// Work is a row of units (a piece of K of one tile), dealt contiguously to the CTAs. The CTA that holds the head of a tile owns it and
// adds the partials of the CTAs after it in K order. A CTA's range follows from a ticket it draws when it starts, later ranges first:
// an owner only waits for CTAs that are already running, whatever order the hardware starts blocks in, so it cannot hang.
//
// Workspace, of sm_count CTAs: words of a value's inverted bits (0 = not there yet; value and flag in one store: no fence, no counter),
// then a flag a CTA, then the partials that stand behind a flag. Words and flags are zero
// between launches: the owner clears what it has read.
#pragma once
#include "sm90.cuh"
#include "split.h"

namespace {

constexpr int SPLIT_WORDS = 16 * 256, SPLIT_PARTIAL = 64 * 256 * 4;  // pairs of words and bytes of a partial, a CTA

struct Split {
  unsigned long long* workspace;
  int sm_count;
  __device__ __forceinline__ unsigned long long* words(int cta) const { return workspace + (size_t)cta * SPLIT_WORDS; }
  __device__ __forceinline__ unsigned* flag(int cta) const { return (unsigned*)(workspace + (size_t)sm_count * SPLIT_WORDS) + cta; }
  __device__ __forceinline__ uint8_t* partial(int cta) const {
    return (uint8_t*)(workspace + (size_t)sm_count * (SPLIT_WORDS + 2)) + (size_t)cta * SPLIT_PARTIAL;
  }
};

// The range of this CTA (or cluster); by one thread.
__device__ __forceinline__ int draw_ticket(unsigned* ticket, unsigned count) {
  const unsigned drawn = atomicAdd(ticket, 1u);
  if (drawn == count - 1) atomicExch(ticket, 0u);  // all are drawn: ready for the launch after next that uses this counter
  return (int)(count - 1 - drawn);
}

__device__ __forceinline__ void raise_flag(unsigned* flag) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1u) : "memory"); }
__device__ __forceinline__ void await_flag(const unsigned* flag) {
  unsigned raised;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  while (!raised);
}

// A float as it travels: never 0.
__device__ __forceinline__ u32 word_of(float v) {
  const u32 w = ~__float_as_uint(v);
  return w ? w : 0x80000000u;  // the one NaN that would be 0 becomes another
}
__device__ __forceinline__ void store_words(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint4 load_words(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// The accumulators of THREADS threads, R floats each, as words: [R / 4][THREADS] of four.
template <int R, int THREADS = 256> __device__ __forceinline__ void leave_words(const float (&d)[R], const Split& split, int cta, int tid) {
  uint4* to = (uint4*)split.words(cta) + tid;
#pragma unroll
  for (int i = 0; i < R / 4; i++)
    store_words(to + i * THREADS, make_uint4(word_of(d[4 * i]), word_of(d[4 * i + 1]), word_of(d[4 * i + 2]), word_of(d[4 * i + 3])));
}
// Adds those of CTAs [c0, c1) in their order and clears them; as many CTAs' loads in flight as registers allow.
template <int R, int THREADS = 256> __device__ __forceinline__ void add_words(float (&d)[R], const Split& split, int c0, int c1, int tid) {
  constexpr int AT_ONCE = R <= 16 ? 4 : 2;
  for (int c = c0; c < c1; c += AT_ONCE) {
    uint4 w[AT_ONCE][R / 4];
    bool ready;
    do {
      ready = true;
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
        for (int i = 0; i < R / 4; i++) {
          w[k][i] = c + k < c1 ? load_words((const uint4*)split.words(c + k) + i * THREADS + tid) : make_uint4(1, 1, 1, 1);
        }
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
        for (int i = 0; i < R / 4; i++) ready &= w[k][i].x && w[k][i].y && w[k][i].z && w[k][i].w;
    } while (!ready);
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
      if (c + k < c1)
#pragma unroll
        for (int i = 0; i < R / 4; i++) {
          d[4 * i] += __uint_as_float(~w[k][i].x), d[4 * i + 1] += __uint_as_float(~w[k][i].y);
          d[4 * i + 2] += __uint_as_float(~w[k][i].z), d[4 * i + 3] += __uint_as_float(~w[k][i].w);
          store_words((uint4*)split.words(c + k) + i * THREADS + tid, make_uint4(0, 0, 0, 0));
        }
  }
}

// The accumulators of THREADS threads, R floats each.
template <int R, int THREADS = 256> __device__ __forceinline__ void leave_partial(const float (&d)[R], const Split& split, int cta, int tid) {
  float4* to = (float4*)split.partial(cta) + tid;
#pragma unroll
  for (int i = 0; i < R / 4; i++) __stcg(to + i * THREADS, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  __threadfence();
  named_barrier(1, THREADS);
  if (tid == 0) raise_flag(split.flag(cta));
}

// Adds the partials of CTAs [c0, c1), at most `room` at a time through shared memory at base.
template <int R, int THREADS = 256>
__device__ __forceinline__ void fetch_partials(float (&d)[R], const Split& split, int c0, int c1, int tid, u32 base, int room, u32 bar_s) {
  constexpr int BYTES = R * THREADS * 4;
  u32 phase = 0;
  for (int c = c0; c < c1; c += room, phase ^= 1) {
    const int n = min(room, c1 - c);
    named_barrier(1, THREADS);  // all are done with the stages, or with the round before
    if (tid == 0) {
      mbar_expect(bar_s, n * BYTES);
      for (int i = 0; i < n; i++) {
        await_flag(split.flag(c + i));
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;\nfence.proxy.async;" ::"l"(split.flag(c + i)), "r"(0u) : "memory");
        bulk_load(base + i * BYTES, split.partial(c + i), BYTES, bar_s, SM90_EVICT_FIRST);
      }
    }
    mbar_wait(bar_s, phase);
    for (int p = 0; p < n; p++)
#pragma unroll
      for (int i = 0; i < R / 4; i++) {
        float4 v;
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(base + p * BYTES + (i * THREADS + tid) * 16));
        d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
      }
  }
}

}  // namespace
