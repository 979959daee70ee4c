// split.cuh - tiles whose K is shared by several CTAs: the ticket that orders them and the float32 partials they leave.
//
// Work is a row of units (a piece of K of one tile), dealt contiguously to the CTAs. The CTA that holds the head of a tile owns it and
// adds the partials of the CTAs after it in K order. A CTA's range follows from a ticket it draws when it starts, later ranges first:
// an owner only waits for CTAs that are already running, whatever order the hardware starts blocks in, so it cannot hang.
//
// Workspace, of sm_count CTAs: 64-bit words {1, value} or 32-bit words of a value's inverted bits (0 = not there yet; value and flag
// in one store: no fence, no counter), then a flag a CTA, then the partials that stand behind a flag. Words and flags are zero
// between launches: the owner clears what it has read.
#pragma once
#include "sm90.cuh"
#include "split.h"

namespace {

constexpr int SPLIT_WORDS = 8 * 256, SPLIT_PARTIAL = 128 * 256 * 4;  // 64-bit words and bytes of a partial, a CTA

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
__device__ __forceinline__ void lower_flag(unsigned* flag) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(0u) : "memory"); }

// The accumulators of 256 threads, R floats each.
template <int R> __device__ __forceinline__ void leave_partial(const float (&d)[R], const Split& split, int cta, int tid) {
  float4* to = (float4*)split.partial(cta) + tid;
#pragma unroll
  for (int i = 0; i < R / 4; i++) __stcg(to + i * 256, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  __threadfence();
  named_barrier(1, 256);
  if (tid == 0) raise_flag(split.flag(cta));
}

// Adds the partials of CTAs [c0, c1), at most `room` at a time through shared memory at base.
template <int R>
__device__ __forceinline__ void fetch_partials(float (&d)[R], const Split& split, int c0, int c1, int tid, u32 base, int room, u32 bar_s) {
  constexpr int BYTES = R * 1024;
  u32 phase = 0;
  for (int c = c0; c < c1; c += room, phase ^= 1) {
    const int n = min(room, c1 - c);
    named_barrier(1, 256);  // both warpgroups are done with the stages, or with the round before
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
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(base + p * BYTES + (i * 256 + tid) * 16));
        d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
      }
  }
}

}  // namespace
