// sm90.cuh - thin wrappers over the sm_90a instructions the kernels use: mbarrier, bulk copies, wgmma control,
// ldmatrix / stmatrix, register reallocation. Addresses named *_s are 32-bit shared-memory addresses.
#pragma once
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef uint32_t u32;
typedef uint64_t u64;

// ---- mbarrier -------------------------------------------------------------------------------
__device__ __forceinline__ void mbar_init(u32 bar_s, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar_s), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbar_wait(u32 bar_s, u32 parity) {
  asm volatile(
      "{.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar_s),
      "r"(parity)
      : "memory");
}
// The same for a thread with nothing to do that shares its scheduler with busy ones: spinning takes their issue slots.
__device__ __forceinline__ void mbar_wait_idle(u32 bar_s, u32 parity) {
  u32 there;
  do {
    asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(there) : "r"(bar_s), "r"(parity) : "memory");
    if (!there) __nanosleep(40);
  } while (!there);
}
__device__ __forceinline__ void mbar_arrive(u32 bar_s) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar_s) : "memory");
}
// Arrives at the same offset in CTA `cta` of the cluster. No .release.cluster: that costs a MEMBAR.GPU (about 1,400 cycles per
// use, measured), and the only accesses to order are shared-memory reads whose results are already in registers.
__device__ __forceinline__ void mbar_arrive_cta(u32 bar_s, u32 cta) {
  asm volatile("{.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}" ::"r"(bar_s), "r"(cta) : "memory");
}
__device__ __forceinline__ void mbar_expect(u32 bar_s, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar_s), "r"(bytes) : "memory");
}

// ---- bulk copies ----------------------------------------------------------------------------
#define SM90_EVICT_FIRST 0x12F0000000000000ull
#define SM90_EVICT_LAST 0x14F0000000000000ull
#define SM90_EVICT_NORMAL 0x1000000000000000ull
__device__ __forceinline__ void tma_load(u32 dst_s, const CUtensorMap* map, int c0, int c1, u32 bar_s, u64 hint) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst_s),
               "l"(map), "r"(c0), "r"(c1), "r"(bar_s), "l"(hint)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(u32 dst_s, const CUtensorMap* map, int c0, int c1, u32 bar_s, uint16_t mask, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, "
      "%6;" ::"r"(dst_s),
      "l"(map), "r"(c0), "r"(c1), "r"(bar_s), "h"(mask), "l"(hint)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, u32 src_s, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(c0), "r"(c1), "r"(src_s) : "memory");
}
__device__ __forceinline__ void bulk_load(u32 dst_s, const void* src, u32 bytes, u32 bar_s, u64 hint) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst_s), "l"(src),
               "r"(bytes), "r"(bar_s), "l"(hint)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N> __device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- programmatic dependent launch: both are no-ops in a kernel launched without it ---------------
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- wgmma ----------------------------------------------------------------------------------
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving reads or writes of accumulators across this point.
template <int R> __device__ __forceinline__ void pin(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int R> __device__ __forceinline__ void pin(int (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+r"(d[i])::"memory");
}
// Matrix of 128-byte rows, 128-byte swizzle, 1024-byte aligned: 8-row groups are 1024 bytes apart.
__device__ __forceinline__ u64 desc_swizzle128(u32 addr_s) {
  return (u64)((addr_s & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}
// No swizzle, 8-row x 16-byte core matrices: lbo apart along K, sbo apart along rows.
__device__ __forceinline__ u64 desc_plain(u32 addr_s, u32 lbo, u32 sbo) {
  return (u64)((addr_s & 0x3ffff) >> 4) | ((u64)(lbo >> 4) << 16) | ((u64)(sbo >> 4) << 32);
}

// ---- registers <-> shared memory ------------------------------------------------------------
__device__ __forceinline__ void ldsm4(u32& a, u32& b, u32& c, u32& d, u32 addr_s) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(addr_s) : "memory");
}
__device__ __forceinline__ void stsm4t(u32 addr_s, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr_s), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ u32 lds_u16(u32 addr_s) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(addr_s) : "memory");
  return v;
}
// Two warpgroups of a CTA take `products` registers a thread, the others keep `others`: out of what the launch has, which is as many as its
// threads leave room for, in eights. One register more is waited for for ever.
__host__ __device__ constexpr bool registers_fit(int threads, int products, int others) { return 256 * products + (threads - 256) * others <= 65536 / threads / 8 * 8 * threads; }
template <int R> __device__ __forceinline__ void reg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R)); }
template <int R> __device__ __forceinline__ void reg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R)); }
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- element types --------------------------------------------------------------------------
template <typename T> struct Elem;
template <> struct Elem<__nv_bfloat16> {
  static constexpr u32 ONE2 = 0x3f803f80u;
  static __device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 r;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
};
template <> struct Elem<__half> {
  static constexpr u32 ONE2 = 0x3c003c00u;
  static __device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
};
__device__ __forceinline__ u32 and_xor(u32 a, u32 mask, u32 c) {  // (a & mask) ^ c, one LOP3
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "r"(mask), "r"(c));
  return r;
}
