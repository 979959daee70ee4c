// elements.cuh - the two 16-bit element types of activations and KV: conversions, pairs, and mma.sync m16n8k16 over them.
#pragma once
#include <cuda_fp16.h>

#include "common.cuh"

struct bf16_type {
    using native = __nv_bfloat16;
    static __device__ __forceinline__ float load(uint16_t bits) { return bf16_float(bits); }
    static __device__ __forceinline__ uint16_t store(float v) { return float_bf16(v); }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
struct fp16_type {
    using native = __half;
    static __device__ __forceinline__ float load(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
    // Out of range becomes infinite, which reaches the logits as NaN: the sequence then fails, nothing is clipped.
    static __device__ __forceinline__ uint16_t store(float v) { return __half_as_ushort(__float2half_rn(v)); }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// Element i of a float32 array, or of a 16-bit one.
template <typename T> static __device__ __forceinline__ float load_any(const void *data, size_t i, bool narrow) {
    return narrow ? T::load(((const uint16_t *)data)[i]) : ((const float *)data)[i];
}

// Eight neighbours, the i-th eight of an array that starts at a multiple of 16 bytes; norm weights may start at any float.
static __device__ __forceinline__ void load8(float (&v)[8], const float *data, size_t i) {
    if (((uintptr_t)data & 15) == 0) {
        const float4 a = ((const float4 *)data)[2 * i], b = ((const float4 *)data)[2 * i + 1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = data[8 * i + j];
}
template <typename T> static __device__ __forceinline__ void load8_any(float (&v)[8], const void *data, size_t i, bool narrow) {
    if (!narrow) return load8(v, (const float *)data, i);
    const uint4 a = ((const uint4 *)data)[i];
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 4; j++) v[2 * j] = T::load((uint16_t)words[j]), v[2 * j + 1] = T::load((uint16_t)(words[j] >> 16));
}
static __device__ __forceinline__ void store8(float *data, size_t i, const float (&v)[8]) {
    ((float4 *)data)[2 * i] = make_float4(v[0], v[1], v[2], v[3]), ((float4 *)data)[2 * i + 1] = make_float4(v[4], v[5], v[6], v[7]);
}
template <typename T> static __device__ __forceinline__ void store8(uint16_t *data, size_t i, const float (&v)[8]) {
    ((uint4 *)data)[i] = make_uint4(T::pack(v[0], v[1]), T::pack(v[2], v[3]), T::pack(v[4], v[5]), T::pack(v[6], v[7]));
}
static __device__ __forceinline__ float sum_of_squares(const float (&v)[8]) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += v[j] * v[j];
    return sum;
}

static __device__ __forceinline__ void copy16_async(uint32_t dst_s, const void *src, bool there) { // absent: zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst_s), "l"(src), "r"(there ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
static __device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
static __device__ __forceinline__ void load_matrices(uint32_t (&v)[4], uint32_t addr_s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(addr_s) : "memory");
}
static __device__ __forceinline__ void load_matrices_turned(uint32_t (&v)[4], uint32_t addr_s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(addr_s)
                 : "memory");
}
// cap * tanh(v / cap) to float32 accuracy, two special-function calls.
static __device__ __forceinline__ float cap_score(float v, float cap, float inverse_cap) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(exp2_fast(v * inverse_cap * 2.885390081777927f) + 1.f));
    return fmaf(-2.f * cap, r, cap);
}
