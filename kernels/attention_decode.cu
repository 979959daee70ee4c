// attention_decode.cu - attention of sequences with one row over paged KV, their keys split over several blocks.
//
// A block of 4 warps owns one part of one sequence's keys (k_attention_part) for one KV head and up to 16 query heads that share
// it, so that K and V leave memory once for the group. The warps take tiles of 16 keys in turn, each with a ring of its own in
// shared memory, filled by asynchronous copies through the block table; scores and weighted sums are mma.sync m16n8k16 with the
// heads as rows. The warps' sums are merged in warp order; with several parts the block that ends last merges them in the
// parts' order. Both orders follow from the sequence's length alone, so a row's result does not depend on its batch.
#include "elements.cuh"

namespace {

constexpr int WARPS = 4, KEYS = 16, HEADS = 16;

template <int D> struct Sizes {
    static constexpr int ROW_BYTES = D * 2 + 16; // padded: eight rows start in eight different groups of banks
    static constexpr int STAGES = D <= 64 ? 4 : 2, STAGE_BYTES = 2 * KEYS * ROW_BYTES;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES, Q_BYTES = HEADS * ROW_BYTES;
    static constexpr int MERGE_BYTES = WARPS * HEADS * (D + 2) * 4; // over the rings, once they are read
    static constexpr int BODY_BYTES = WARPS * RING_BYTES > MERGE_BYTES ? WARPS * RING_BYTES : MERGE_BYTES;
    static constexpr int SHARED = Q_BYTES + BODY_BYTES;
};

struct keys_range {
    int first, last; // keys that the row sees
    int begin, end;  // of this part, begin a multiple of KEYS
};

template <int D> __device__ __forceinline__ void fetch(const k_attention_args &a, const int32_t *blocks, int kv_head, const keys_range &r, int key0, uint32_t dst_s) {
    const int lane = threadIdx.x % 32, shift = 31 - __clz(a.block_tokens), mask = a.block_tokens - 1;
#pragma unroll
    for (int i = lane; i < KEYS * (D / 8); i += 32) {
        const int row = i / (D / 8), c = i % (D / 8), t = key0 + row;
        const bool there = t >= r.first && t <= r.last; // others may be stale, even NaN
        const int block = there ? blocks[t >> shift] : 0;
        const uint16_t *from = a.kv + (((size_t)block * 2 * a.kv_heads + kv_head) * a.block_tokens + (t & mask)) * D + c * 8;
        copy16_async(dst_s + row * Sizes<D>::ROW_BYTES + c * 16, from, there);
        copy16_async(dst_s + (KEYS + row) * Sizes<D>::ROW_BYTES + c * 16, from + (size_t)a.kv_heads * a.block_tokens * D, there);
    }
}

template <int D> struct partial { // of one warp: rows are heads lane / 4 and lane / 4 + 8
    float out[D / 2], top[2], sum[2];
};

// One tile of 16 keys.
template <typename T, int D> __device__ __forceinline__ void absorb(const k_attention_args &a, partial<D> &p, const keys_range &r, int key0, uint32_t q_s, uint32_t kv_s) {
    using Z = Sizes<D>;
    const int lane = threadIdx.x % 32, q = lane % 4;
    float score[2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t query[4], key[4];
        load_matrices(query, q_s + (lane % 16) * Z::ROW_BYTES + k * 32 + (lane / 16) * 16);
        load_matrices(key, kv_s + (lane % 8 + lane / 16 * 8) * Z::ROW_BYTES + k * 32 + (lane / 8 % 2) * 16);
        T::mma(score[0], query, key[0], key[1]);
        T::mma(score[1], query, key[2], key[3]);
    }
    float factor = a.scale * 1.4426950408889634f;
    if (a.softcap > 0) {
        const float inverse = a.scale / a.softcap;
        factor = 1.4426950408889634f;
#pragma unroll
        for (int i = 0; i < 8; i++) score[i / 4][i % 4] = cap_score(score[i / 4][i % 4], a.softcap, inverse);
    }
    if (key0 < r.first || key0 + KEYS - 1 > r.last)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int t = key0 + 8 * (i / 4) + 2 * q + i % 2;
            if (t < r.first || t > r.last) score[i / 4][i % 4] = -INFINITY;
        }
    uint32_t weight[4];
    float shrink[2];
#pragma unroll
    for (int u = 0; u < 2; u++) {
        float best = fmaxf(fmaxf(score[0][2 * u], score[0][2 * u + 1]), fmaxf(score[1][2 * u], score[1][2 * u + 1]));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(p.top[u], fmaxf(best, __shfl_xor_sync(~0u, best, 2)));
        const float base = best == -INFINITY ? 0.f : best * factor;
        shrink[u] = p.top[u] == best ? 1.f : exp2_fast((p.top[u] - best) * factor);
        p.top[u] = best;
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; i++) e[i] = exp2_fast(fmaf(score[i / 2][2 * u + i % 2], factor, -base));
        weight[u] = T::pack(e[0], e[1]);
        weight[2 + u] = T::pack(e[2], e[3]);
        p.sum[u] = fmaf(p.sum[u], shrink[u], (e[0] + e[1]) + (e[2] + e[3]));
    }
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f))
#pragma unroll
        for (int i = 0; i < D / 2; i++) p.out[i] *= shrink[i / 2 % 2];
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t v[4];
        load_matrices_turned(v, kv_s + (KEYS + lane % 16) * Z::ROW_BYTES + n * 32 + (lane / 16) * 16);
        T::mma(*(float(*)[4])&p.out[8 * n], weight, v[0], v[1]);
        T::mma(*(float(*)[4])&p.out[8 * n + 4], weight, v[2], v[3]);
    }
}

// Merges `count` partial results of one head, each [D out, top, sum] `stride` floats apart; 128 threads, each its own columns.
// The tops are in units of the raw score; result: out unnormalised relative to the common top.
template <int D> __device__ __forceinline__ float merged(const float *from, size_t stride, int count, int i, float factor, float *top, float *sum) {
    float best = -INFINITY, total = 0, v = 0;
    for (int s = 0; s < count; s++) best = fmaxf(best, from[s * stride + D]);
    for (int s = 0; s < count; s++) {
        const float *part = from + s * stride, weight = exp2_fast((part[D] - best) * factor);
        total += part[D + 1] * weight;
        v += part[i] * weight;
    }
    *top = best, *sum = total;
    return v;
}

// Long, since the ring, the two merges and the counter share its registers and barriers.
template <typename T, int D> __global__ void __launch_bounds__(WARPS * 32) decode_kernel(const __grid_constant__ k_attention_args a) {
    using Z = Sizes<D>;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ bool is_last;
    const int4 work = *(const int4 *)(a.decode_rows + blockIdx.z);
    const int m = work.x, tokens = work.y, part = k_attention_part(tokens), first = a.use_window ? work.z : 0;
    const int from_split = first / part, split = from_split + (int)blockIdx.x, splits = k_attention_splits(tokens);
    if (split >= splits) return;
    const int per_kv = a.heads / a.kv_heads, head_blocks = (per_kv + HEADS - 1) / HEADS;
    const int kv_head = blockIdx.y / head_blocks, head0 = kv_head * per_kv + blockIdx.y % head_blocks * HEADS;
    const int heads = min(HEADS, (kv_head + 1) * per_kv - head0);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t *blocks = a.kv_blocks + work.w;
    const keys_range r = {first, tokens - 1, max(split * part, first / KEYS * KEYS), min((split + 1) * part, tokens)};
    const uint32_t q_s = shared_address(shared), ring_s = q_s + Z::Q_BYTES + warp * Z::RING_BYTES;
    const int tiles = (r.end - r.begin + KEYS - 1) / KEYS, mine = (tiles - warp + WARPS - 1) / WARPS;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory"); // q and this step's keys are the previous kernel's
#endif
#pragma unroll
    for (int i = 0; i < Z::STAGES - 1; i++) {
        if (i < mine) fetch<D>(a, blocks, kv_head, r, r.begin + (warp + i * WARPS) * KEYS, ring_s + i * Z::STAGE_BYTES);
        copy_commit();
    }
    for (int i = threadIdx.x; i < HEADS * (D / 8); i += WARPS * 32) {
        const int h = i / (D / 8), c = i % (D / 8);
        const uint4 v = h < heads ? *(const uint4 *)(a.q + ((size_t)m * a.heads + head0 + h) * D + c * 8) : make_uint4(0, 0, 0, 0);
        *(uint4 *)(shared + h * Z::ROW_BYTES + c * 16) = v;
    }
    __syncthreads();
    partial<D> p;
#pragma unroll
    for (int i = 0; i < D / 2; i++) p.out[i] = 0;
    p.top[0] = p.top[1] = -INFINITY, p.sum[0] = p.sum[1] = 0;
    for (int i = 0; i < mine; i++) {
        copy_wait<Z::STAGES - 2>();
        __syncwarp();
        const int next = i + Z::STAGES - 1;
        if (next < mine) fetch<D>(a, blocks, kv_head, r, r.begin + (warp + next * WARPS) * KEYS, ring_s + next % Z::STAGES * Z::STAGE_BYTES);
        copy_commit();
        absorb<T, D>(a, p, r, r.begin + (warp + i * WARPS) * KEYS, q_s, ring_s + i % Z::STAGES * Z::STAGE_BYTES);
        __syncwarp();
    }
    copy_wait<0>();
    __syncthreads(); // the rings become the place to merge in: [warp][head][D + 2]
    float *merge = (float *)(shared + Z::Q_BYTES);
#pragma unroll
    for (int u = 0; u < 2; u++) {
        p.sum[u] += __shfl_xor_sync(~0u, p.sum[u], 1);
        p.sum[u] += __shfl_xor_sync(~0u, p.sum[u], 2);
        float *row = merge + (warp * HEADS + lane / 4 + 8 * u) * (D + 2);
#pragma unroll
        for (int j = 0; j < D / 8; j++) row[8 * j + 2 * (lane % 4)] = p.out[4 * j + 2 * u], row[8 * j + 2 * (lane % 4) + 1] = p.out[4 * j + 2 * u + 1];
        if (lane % 4 == 0) row[D] = p.top[u], row[D + 1] = p.sum[u];
    }
    __syncthreads();
    const float factor = 1.4426950408889634f * (a.softcap > 0 ? 1.f : a.scale);
    const int used = splits - from_split;
    float *parts = a.partials + ((size_t)blockIdx.z * a.heads + head0) * K_ATTENTION_SPLITS * (D + 2);
    for (int i = threadIdx.x; i < heads * D; i += WARPS * 32) {
        const int h = i / D, c = i % D;
        float top, sum;
        const float v = merged<D>(merge + h * (D + 2), HEADS * (D + 2), WARPS, c, factor, &top, &sum);
        if (used == 1) {
            a.out[((size_t)m * a.heads + head0 + h) * D + c] = T::store(v / sum);
            continue;
        }
        float *to = parts + ((size_t)h * K_ATTENTION_SPLITS + blockIdx.x) * (D + 2);
        to[c] = v;
        if (c == 0) to[D] = top, to[D + 1] = sum;
    }
    if (used == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned *counter = a.counters + (size_t)blockIdx.z * a.heads + head0;
        is_last = atomicAdd(counter, 1u) == (unsigned)used - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < heads * D; i += WARPS * 32) {
        const int h = i / D, c = i % D;
        float top, sum;
        const float v = merged<D>(parts + (size_t)h * K_ATTENTION_SPLITS * (D + 2), D + 2, used, c, factor, &top, &sum);
        a.out[((size_t)m * a.heads + head0 + h) * D + c] = T::store(v / sum);
    }
}

template <typename T, int D> cudaError_t launch(const k_attention_args *a, cudaStream_t stream) {
    constexpr int bytes = Sizes<D>::SHARED;
    // Each time: every device has its own.
    const cudaError_t raised = cudaFuncSetAttribute(decode_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (raised != cudaSuccess) return raised;
    const int per_kv = a->heads / a->kv_heads, head_blocks = (per_kv + HEADS - 1) / HEADS;
    const dim3 grid((unsigned)a->split_count, (unsigned)(a->kv_heads * head_blocks), (unsigned)a->decode_count);
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(WARPS * 32), config.dynamicSmemBytes = bytes, config.stream = stream;
    config.attrs = &overlap, config.numAttrs = a->overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, decode_kernel<T, D>, *a);
}

template <typename T> cudaError_t choose(const k_attention_args *a, cudaStream_t stream) {
    switch (a->head_dim) {
    case 64: return launch<T, 64>(a, stream);
    case 80: return launch<T, 80>(a, stream);
    case 96: return launch<T, 96>(a, stream);
    case 128: return launch<T, 128>(a, stream);
    case 256: return launch<T, 256>(a, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

extern "C" bool k_attention_fast(int32_t d) {
    return d == 64 || d == 80 || d == 96 || d == 128 || d == 256;
}

extern "C" uint32_t k_attention_shared_bytes(int32_t d) {
    return d <= 64 ? Sizes<64>::SHARED : d <= 80 ? Sizes<80>::SHARED : d <= 96 ? Sizes<96>::SHARED : d <= 128 ? Sizes<128>::SHARED : Sizes<256>::SHARED;
}

extern "C" cudaError_t k_attention_decode(const k_attention_args *a, cudaStream_t stream) {
    if (a->heads % a->kv_heads || a->block_tokens <= 0 || (a->block_tokens & (a->block_tokens - 1))) return cudaErrorInvalidValue;
    if (a->split_count < 1 || a->split_count > K_ATTENTION_SPLITS) return cudaErrorInvalidValue;
    if (!a->decode_count) return cudaSuccess;
    return a->fp16 ? choose<fp16_type>(a, stream) : choose<bf16_type>(a, stream);
}
