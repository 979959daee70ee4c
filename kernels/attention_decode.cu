// attention_decode.cu - attention of sequences with one row over paged KV, their keys split into parts.
//
// An item is one part of one sequence's keys (k_attention_part) for one KV head and up to 8 query heads that share it, so that K
// and V leave memory once for the group. A block of 4 warps owns an item: the warps take tiles of 16 keys in turn, each with a ring of
// its own in shared memory that asynchronous copies fill. Scores and weighted sums are mma.sync m16n8k16 with keys, then dimensions
// as rows and the heads as columns. The warps' sums are merged in warp order; of a sequence of several parts the block that ends
// last merges them, in the parts' order. Both orders follow from the sequence's length alone, so a row's result does not depend on
// its batch. Keys of earlier steps are fetched before the kernel before has ended, which writes this step's.
#include "elements.cuh"

namespace {

constexpr int WARPS = 4, KEYS = 16, HEADS = 8, SM_SHARED = 227 * 1024; // bytes of shared memory of a multiprocessor

template <int D> struct Sizes {
    static constexpr int ROW_BYTES = D * 2 + 16; // padded: eight rows start in eight different groups of banks
    static constexpr int STAGES = 2, STAGE_BYTES = 2 * KEYS * ROW_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int MERGE_BYTES = WARPS * HEADS * (D + 2) * 4; // over the rings, once they are read
    static constexpr int SHARED = WARPS * RING_BYTES > MERGE_BYTES ? WARPS * RING_BYTES : MERGE_BYTES;
};

struct item {
    int index, m, split, used; // row of the partial results, and of the step; its part, and how many there are
    int first, last;           // keys that the row sees
    int begin, end;            // of this part, begin a multiple of KEYS
    const int32_t *blocks;
};

__device__ __forceinline__ item item_at(const k_attention_args &a, int at) {
    const int4 low = ((const int4 *)(a.decode_items + at))[0], high = ((const int4 *)(a.decode_items + at))[1];
    const k_attention_item i = {low.x, low.y, low.z, low.w, high.x, high.y, {0, 0}};
    const int part = k_attention_part(i.tokens), first = a.use_window ? i.first_key : 0, from = first / part;
    item w;
    w.index = i.index, w.m = i.row, w.split = i.part, w.used = k_attention_splits(i.tokens) - from;
    w.first = first, w.last = i.tokens - 1, w.blocks = a.kv_blocks + i.first_block;
    w.begin = max((from + i.part) * part, first / KEYS * KEYS), w.end = min((from + i.part + 1) * part, i.tokens);
    return w;
}

struct pages { // where the first and the second eight keys of a tile are
    int low, high;
};
__device__ __forceinline__ pages pages_of(const k_attention_args &a, const item &w, int key) {
    const int shift = 31 - __clz(a.block_tokens), low = w.blocks[key >> shift];
    return {low, key + 8 <= w.last ? w.blocks[(key + 8) >> shift] : low};
}

// The tile of keys key .. key + 15 of a KV head, absent ones zero. A page holds eight keys or more, one head's side by side.
template <int D> __device__ __forceinline__ void fetch(const k_attention_args &a, const item &w, int key, pages at, int kv_head, uint32_t dst_s) {
    const int lane = threadIdx.x % 32, mask = a.block_tokens - 1;
    const size_t page = (size_t)a.block_tokens * D, values = a.kv_heads * page; // elements of a head's keys, from keys to values
    const uint16_t *low = a.kv + ((size_t)at.low * 2 * a.kv_heads + kv_head) * page + (key & mask) * D + lane * 8;
    const uint16_t *high = a.kv + ((size_t)at.high * 2 * a.kv_heads + kv_head) * page + ((key + 8) & mask) * D + lane * 8 - 8 * D;
#pragma unroll
    for (int j = 0; j < KEYS * D / 256; j++) {
        const int i = lane + 32 * j, row = i / (D / 8), column = i % (D / 8);
        const bool there = key + row >= w.first && key + row <= w.last; // others may be stale, even NaN
        const uint16_t *from = (row < 8 ? low : high) + 256 * j;
        const uint32_t to_s = dst_s + row * Sizes<D>::ROW_BYTES + column * 16;
        copy16_async(to_s, from, there);
        copy16_async(to_s + KEYS * Sizes<D>::ROW_BYTES, from + values, there);
    }
}

// Of one warp: columns are heads 2 q and 2 q + 1, q = lane % 4; rows of out are dimensions lane / 4 and lane / 4 + 8 of each sixteen.
template <int D> struct partial {
    float out[D / 16][4], top[2], sum[2]; // sum: of this lane's keys
};

// Of two 16-bit columns of an 8 x 8 matrix, its transpose's.
__device__ __forceinline__ uint32_t turned(uint32_t v) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// One tile of 16 keys.
template <typename T, int D> __device__ __forceinline__ void absorb(const k_attention_args &a, partial<D> &p, const item &w, int key, const uint32_t (&query)[D / 16][2], uint32_t kv_s) {
    using Z = Sizes<D>;
    const int lane = threadIdx.x % 32;
    float score[4] = {}, odd[4] = {}; // two chains of half the length; [key lane / 4, + 8][head]
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t keys[4];
        load_matrices(keys, kv_s + (lane % 16) * Z::ROW_BYTES + k * 32 + (lane / 16) * 16);
        T::mma(k % 2 ? odd : score, keys, query[k][0], query[k][1]);
    }
    float factor = a.scale * 1.4426950408889634f;
#pragma unroll
    for (int i = 0; i < 4; i++) score[i] += odd[i];
    if (a.softcap > 0) {
        const float inverse = a.scale / a.softcap;
        factor = 1.4426950408889634f;
#pragma unroll
        for (int i = 0; i < 4; i++) score[i] = cap_score(score[i], a.softcap, inverse);
    }
    if (key < w.first || key + KEYS - 1 > w.last)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = key + lane / 4 + i / 2 * 8;
            if (t < w.first || t > w.last) score[i] = -INFINITY;
        }
    float shrink[2];
#pragma unroll
    for (int u = 0; u < 2; u++) {
        float best = fmaxf(score[u], score[2 + u]);
#pragma unroll
        for (int o = 4; o < 32; o *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, o));
        best = fmaxf(best, p.top[u]);
        const float base = best == -INFINITY ? 0.f : best * factor;
        shrink[u] = p.top[u] == best ? 1.f : exp2_fast((p.top[u] - best) * factor);
        p.top[u] = best;
        score[u] = exp2_fast(fmaf(score[u], factor, -base)), score[2 + u] = exp2_fast(fmaf(score[2 + u], factor, -base));
        p.sum[u] = fmaf(p.sum[u], shrink[u], score[u] + score[2 + u]);
    }
    const uint32_t low = turned(T::pack(score[0], score[1])), high = turned(T::pack(score[2], score[3]));
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f))
#pragma unroll
        for (int n = 0; n < D / 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) p.out[n][i] *= shrink[i % 2];
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t values[4];
        load_matrices_turned(values, kv_s + (KEYS + lane % 8 + lane / 16 * 8) * Z::ROW_BYTES + n * 32 + (lane / 8 % 2) * 16);
        T::mma(p.out[n], values, low, high);
    }
}

// The heads' vectors as columns, zero where there is no head.
template <int D> __device__ __forceinline__ void load_query(uint32_t (&query)[D / 16][2], const uint16_t *q, int heads) {
    const int head = threadIdx.x % 32 / 4;
    const uint32_t *from = (const uint32_t *)(q + head * D) + threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < D / 16; k++) query[k][0] = head < heads ? from[8 * k] : 0, query[k][1] = head < heads ? from[8 * k + 4] : 0;
}

// This warp's sums to shared memory, [warp][head][D out, top, sum], out relative to top, which is in units of the raw score.
template <int D> __device__ __forceinline__ void put_down(partial<D> &p, float *merge) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int u = 0; u < 2; u++) {
#pragma unroll
        for (int o = 4; o < 32; o *= 2) p.sum[u] += __shfl_xor_sync(~0u, p.sum[u], o);
        float *row = merge + (warp * HEADS + 2 * (lane % 4) + u) * (D + 2);
#pragma unroll
        for (int n = 0; n < D / 16; n++) row[16 * n + lane / 4] = p.out[n][u], row[16 * n + 8 + lane / 4] = p.out[n][2 + u];
        if (lane < 4) row[D] = p.top[u], row[D + 1] = p.sum[u];
    }
}

// The warps' sums of one head and dimension: out, relative to the common top.
template <int D> __device__ __forceinline__ float merged(const float *from, int i, float factor, float *top, float *sum) {
    float best = -INFINITY, total = 0, v = 0;
#pragma unroll
    for (int s = 0; s < WARPS; s++) best = fmaxf(best, from[s * HEADS * (D + 2) + D]);
#pragma unroll
    for (int s = 0; s < WARPS; s++) {
        const float *part = from + s * HEADS * (D + 2), weight = exp2_fast((part[D] - best) * factor);
        total += part[D + 1] * weight;
        v += part[i] * weight;
    }
    *top = best, *sum = total;
    return v;
}

// The parts of one sequence, [head][part][D + 2] as above, to its output: a warp a head, whose lane s knows part s.
template <typename T, int D> __device__ __forceinline__ void merge_parts(const float *parts, uint16_t *out, int heads, int count, float factor) {
    const int lane = threadIdx.x % 32;
    for (int h = threadIdx.x / 32; h < heads; h += WARPS) {
        const float *from = parts + (size_t)h * K_ATTENTION_SPLITS * (D + 2);
        const float2 mine = lane < count ? __ldcg((const float2 *)(from + lane * (D + 2) + D)) : make_float2(-INFINITY, 0.f);
        const float weight = exp2_fast((mine.x - warp_max(mine.x)) * factor), inverse = 1.f / warp_sum(mine.y * weight);
#pragma unroll
        for (int j = 0; j < (D + 63) / 64; j++) {
            const int c = 64 * j + 2 * lane;
            const bool there = D % 64 == 0 || c < D;
            float2 v = make_float2(0.f, 0.f);
#pragma unroll 4
            for (int s = 0; s < count; s++) {
                const float2 x = there ? __ldcg((const float2 *)(from + s * (D + 2) + c)) : make_float2(0.f, 0.f);
                const float share = __shfl_sync(~0u, weight, s);
                v.x = fmaf(x.x, share, v.x), v.y = fmaf(x.y, share, v.y);
            }
            if (there) *(uint32_t *)(out + h * D + c) = T::pack(v.x * inverse, v.y * inverse);
        }
    }
}
static_assert(K_ATTENTION_SPLITS <= 32, "a lane a part");

// Long, since the ring, the two merges and the counter share its registers and barriers.
template <typename T, int D> __global__ void __launch_bounds__(WARPS * 32) decode_kernel(const __grid_constant__ k_attention_args a) {
    using Z = Sizes<D>;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ bool is_last;
    const int per_kv = a.heads / a.kv_heads, head_blocks = (per_kv + HEADS - 1) / HEADS;
    const int kv_head = blockIdx.y / head_blocks, head0 = kv_head * per_kv + blockIdx.y % head_blocks * HEADS;
    const int heads = min(HEADS, (kv_head + 1) * per_kv - head0), warp = threadIdx.x / 32;
    const uint32_t ring_s = shared_address(shared) + warp * Z::RING_BYTES;
    const float factor = 1.4426950408889634f * (a.softcap > 0 ? 1.f : a.scale);
    float *merge = (float *)shared;
    bool waited = false;
    let_next_start();
    for (int at = blockIdx.x, count = *a.decode_count; at < count; at += gridDim.x) {
        const item w = item_at(a, at);
        if (w.split >= w.used) continue; // a part that the window hides
        const int tiles = (w.end - w.begin + KEYS - 1) / KEYS, mine = (tiles - warp + WARPS - 1) / WARPS;
        auto key_of = [&](int i) { return w.begin + (warp + i * WARPS) * KEYS; };
        auto fetch_tile = [&](int i, pages where) { fetch<D>(a, w, key_of(i), where, kv_head, ring_s + i % 2 * Z::STAGE_BYTES); };
        pages next = {0, 0};
        if (waited) __syncthreads(); // all of the item before has been read
        const bool early = mine > 0 && (waited || key_of(0) + KEYS <= w.last);
        if (mine > 0) next = pages_of(a, w, key_of(0));
        if (early) fetch_tile(0, next);
        if (!waited) wait_for_last(); // q, and the row's own key, are the previous kernel's
        waited = true;
        if (mine > 0 && !early) fetch_tile(0, next);
        copy_commit();
        if (mine > 1) next = pages_of(a, w, key_of(1));
        uint32_t query[D / 16][2];
        load_query<D>(query, a.q + ((size_t)w.m * a.heads + head0) * D, heads);
        partial<D> p;
#pragma unroll
        for (int i = 0; i < D / 4; i++) p.out[i / 4][i % 4] = 0;
        p.top[0] = p.top[1] = -INFINITY, p.sum[0] = p.sum[1] = 0;
        for (int i = 0; i < mine; i++) {
            copy_wait<0>();
            __syncwarp();
            if (i + 1 < mine) fetch_tile(i + 1, next);
            copy_commit();
            if (i + 2 < mine) next = pages_of(a, w, key_of(i + 2));
            absorb<T, D>(a, p, w, key_of(i), query, ring_s + i % 2 * Z::STAGE_BYTES);
            __syncwarp();
        }
        __syncthreads(); // the rings become the place to merge in
        put_down<D>(p, merge);
        __syncthreads();
        float *parts = a.partials + ((size_t)w.index * a.heads + head0) * K_ATTENTION_SPLITS * (D + 2);
        uint16_t *out = a.out + ((size_t)w.m * a.heads + head0) * D;
        for (int i = threadIdx.x; i < heads * D; i += WARPS * 32) {
            const int h = i / D, c = i % D;
            float top, sum;
            const float v = merged<D>(merge + h * (D + 2), c, factor, &top, &sum);
            if (w.used == 1) {
                out[i] = T::store(v / sum);
                continue;
            }
            float *to = parts + ((size_t)h * K_ATTENTION_SPLITS + w.split) * (D + 2);
            to[c] = v;
            if (c == 0) to[D] = top, to[D + 1] = sum;
        }
        if (w.used == 1) continue;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned *counter = a.counters + (size_t)w.index * a.heads + head0;
            is_last = atomicAdd(counter, 1u) == (unsigned)w.used - 1;
            if (is_last) *counter = 0;
        }
        __syncthreads();
        if (!is_last) continue;
        __threadfence();
        merge_parts<T, D>(parts, out, heads, w.used, factor);
    }
}

template <typename T, int D> cudaError_t launch(const k_attention_args *a, cudaStream_t stream) {
    constexpr int bytes = Sizes<D>::SHARED;
    // Each time: every device has its own.
    const cudaError_t raised = cudaFuncSetAttribute(decode_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (raised != cudaSuccess) return raised;
    const int per_kv = a->heads / a->kv_heads, sides = a->kv_heads * ((per_kv + HEADS - 1) / HEADS);
    // A block an item; in a recording, where most items may not be there, some fewer, but as many as can be resident.
    const int resident = a->sm_count * (SM_SHARED / (bytes + 1024)) / sides, items = a->decode_items_max;
    const dim3 grid((unsigned)(!a->decode_sparse || items < resident ? items : items / 4 > resident ? items / 4 : resident < 1 ? 1 : resident), (unsigned)sides);
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(WARPS * 32), config.dynamicSmemBytes = bytes, config.stream = stream;
    config.attrs = &overlap, config.numAttrs = a->overlap && !a->tile_count ? 1 : 0;
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
    if (a->heads % a->kv_heads || a->block_tokens < 8 || (a->block_tokens & (a->block_tokens - 1))) return cudaErrorInvalidValue;
    if (!a->decode_items_max) return cudaSuccess;
    return a->fp16 ? choose<fp16_type>(a, stream) : choose<bf16_type>(a, stream);
}
