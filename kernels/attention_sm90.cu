// attention_sm90.cu - causal attention of sequences with many rows over paged KV, on wgmma.
//
//   out[m][h] = softmax(q[m][h] K^T scale) V, softcap and window as the model says; KV as attention_plain.cu lays it out
//
// A block owns 128 rows of one sequence for one query head: two consumer warpgroups of 64 rows, and a warp that fetches K and V
// through the block table with bulk tensor copies, one per page and panel of 64 columns (128-byte swizzle), into two stages of
// each. A consumer starts the scores of tile i, then the weighted sum of tile i - 1 behind them, and does its softmax while the
// latter runs.
// Tiles of keys start at multiples of their size whatever the batch, and a key that a row does not see changes nothing, so a
// row's result depends on neither its neighbours nor on how its prompt was cut into chunks. Keys a tile has no page for are
// stood in for by a page the sequence has: whatever meets a zero weight must be finite, which k_rope_kv_write sees to inside
// pages.
#include "elements.cuh"
#include "sm90.cuh"
#include "wgmma_attention.cuh"

namespace {

constexpr int ROWS = 128, THREADS = 384, PRODUCER_REGS = 24, CONSUMER_REGS = 240;

template <int D> struct Sizes {
    static constexpr int KEYS = D <= 128 ? 128 : 64, PANELS = (D + 63) / 64;
    static constexpr int Q_BYTES = PANELS * ROWS * 128, KV_BYTES = PANELS * KEYS * 128;
    static constexpr int SHARED = Q_BYTES + 4 * KV_BYTES + 1024;
};

enum { Q_FULL, K_FULL, V_FULL = K_FULL + 2, K_EMPTY = V_FULL + 2, V_EMPTY = K_EMPTY + 2, BARRIERS = V_EMPTY + 2 };

__device__ __forceinline__ uint32_t bar(uint32_t bars_s, int which) { return bars_s + 8 * which; }

struct span { // what a block works on
    int head, kv_head, rows, first_position, first_key, first_tile, tiles; // first_key: the first that the first row sees
};

// One tile of K (kind 0) or V (1), by a warp: a lane copies one page's panel.
template <int D> __device__ __forceinline__ void fetch(const k_attention_args &a, const CUtensorMap &kv, const int32_t *blocks, const span &w, int kind, int tile, uint32_t dst_s,
                                                       uint32_t full_s) {
    using Z = Sizes<D>;
    const int lane = threadIdx.x % 32, rows = min(a.block_tokens, Z::KEYS), shift = 31 - __clz(a.block_tokens);
    if (lane == 0) mbar_expect(full_s, Z::KV_BYTES);
    __syncwarp();
    if (lane >= Z::KEYS / rows * Z::PANELS) return;
    const int piece = lane / Z::PANELS, panel = lane % Z::PANELS, last = w.first_position + w.rows - 1;
    int t = tile * Z::KEYS + piece * rows;
    t = max(w.first_key & -rows, min(last & -rows, t));
    const int row = ((blocks[t >> shift] * 2 + kind) * a.kv_heads + w.kv_head) * a.block_tokens + (t & (a.block_tokens - 1));
    tma_load(dst_s + (uint32_t)(panel * Z::KEYS + piece * rows) * 128, &kv, panel * 64, row, full_s, SM90_EVICT_NORMAL);
}

template <int D> __device__ void produce(const k_attention_args &a, const CUtensorMap &q, const CUtensorMap &kv, const k_seq &s, const span &w, int first_row, uint32_t q_s,
                                         uint32_t bars_s) {
    using Z = Sizes<D>;
    const int32_t *blocks = a.kv_blocks + s.first_block;
    const uint32_t kv_s = q_s + Z::Q_BYTES;
    if (threadIdx.x % 32 == 0) {
        mbar_expect(bar(bars_s, Q_FULL), Z::Q_BYTES);
        for (int panel = 0; panel < Z::PANELS; panel++)
            tma_load(q_s + panel * ROWS * 128, &q, w.head * D + panel * 64, first_row, bar(bars_s, Q_FULL), SM90_EVICT_NORMAL);
    }
    for (int i = 0; i < 2 * w.tiles; i++) { // K runs one tile ahead of V: K0, K1, V0, K2, V1, ..., K(n-1), V(n-2), V(n-1)
        const bool is_v = i && (i == 2 * w.tiles - 1 || i % 2 == 0);
        const int tile = is_v ? (i == 2 * w.tiles - 1 ? w.tiles - 1 : i / 2 - 1) : (i + 1) / 2, stage = tile % 2;
        if (tile >= 2) mbar_wait(bar(bars_s, (is_v ? V_EMPTY : K_EMPTY) + stage), (uint32_t)(tile / 2 - 1) % 2);
        fetch<D>(a, kv, blocks, w, is_v, w.first_tile + tile, kv_s + (uint32_t)((is_v ? 2 : 0) + stage) * Z::KV_BYTES, bar(bars_s, (is_v ? V_FULL : K_FULL) + stage));
    }
}

// Scores in d -> exponentials; returns by what earlier sums shrink. One thread's two rows.
template <int KEYS> __device__ __forceinline__ void soften(float (&d)[KEYS / 2], float (&top)[2], float (&sum)[2], float (&shrink)[2], const k_attention_args &a, bool masked,
                                                           int key0, const int (&position)[2], int window) {
    const int q = threadIdx.x % 4;
    float factor = a.scale * 1.4426950408889634f;
    if (a.softcap > 0) {
        const float inverse = a.scale / a.softcap;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) d[i] = cap_score(d[i], a.softcap, inverse);
        factor = 1.4426950408889634f;
    }
    if (masked) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            const int t = key0 + 8 * (i / 4) + 2 * q + i % 2, p = position[i / 2 % 2];
            if (t > p || (window && t <= p - window)) d[i] = -INFINITY;
        }
    }
#pragma unroll
    for (int u = 0; u < 2; u++) {
        float best = top[u];
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) best = fmaxf(best, fmaxf(d[4 * i + 2 * u], d[4 * i + 2 * u + 1]));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
        const float base = best == -INFINITY ? 0.f : best * factor; // a row that sees nothing yet
        shrink[u] = top[u] == best ? 1.f : exp2_fast((top[u] - best) * factor); // exactly 1 when a tile brings nothing
        top[u] = best;
        float total = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &v = d[4 * i + 2 * u + e];
                v = exp2_fast(fmaf(v, factor, -base));
                total += v;
            }
        sum[u] = fmaf(sum[u], shrink[u], total);
    }
}

template <typename T, int D> __device__ void consume(const k_attention_args &a, const span &w, int first_row, uint32_t q_s, uint32_t bars_s) {
    using Z = Sizes<D>;
    using N = typename T::native;
    constexpr int KEYS = Z::KEYS;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int r0 = 64 * group + 16 * warp + lane / 4; // rows r0 and r0 + 8 of the block
    const int position[2] = {w.first_position + r0, w.first_position + r0 + 8};
    const int low = w.first_position + 64 * group, high = low + 63;
    const int window = a.use_window ? a.row_window[first_row] : 0;
    const uint32_t k_s = q_s + Z::Q_BYTES, v_s = k_s + 2 * Z::KV_BYTES;
    float out[D / 2], score[KEYS / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, shrink[2];
    uint32_t weight[KEYS / 4];
    mbar_wait(bar(bars_s, Q_FULL), 0);
    const auto values = [&](int tile, bool first) { // out += weight V
        const uint32_t from = v_s + (uint32_t)(tile % 2) * Z::KV_BYTES;
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const u64 d = (u64)(((from + k * 2048) & 0x3ffff) >> 4) | ((u64)(KEYS * 128 >> 4) << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
            Attn<N, D>::values(out, weight[4 * k], weight[4 * k + 1], weight[4 * k + 2], weight[4 * k + 3], d, k || !first);
        }
        wgmma_commit();
    };
    for (int i = 0; i < w.tiles; i++) {
        const int stage = i % 2;
        mbar_wait(bar(bars_s, K_FULL + stage), (uint32_t)(i / 2) % 2);
        pin(score);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const u64 dq = desc_swizzle128(q_s + (k / 4) * ROWS * 128 + group * 64 * 128 + (k % 4) * 32);
            const u64 dk = desc_swizzle128(k_s + (uint32_t)stage * Z::KV_BYTES + (k / 4) * KEYS * 128 + (k % 4) * 32);
            Attn<N, KEYS>::scores(score, dq, dk, k > 0);
        }
        wgmma_commit();
        if (i) {
            mbar_wait(bar(bars_s, V_FULL + (i - 1) % 2), (uint32_t)((i - 1) / 2) % 2);
            pin(out);
            wgmma_fence();
            values(i - 1, i == 1);
            wgmma_wait<1>();
        } else wgmma_wait<0>();
        pin(score);
        if (lane == 0) mbar_arrive(bar(bars_s, K_EMPTY + stage));
        const int key0 = (w.first_tile + i) * KEYS;
        const bool masked = key0 + KEYS - 1 > low || (window && key0 <= high - window);
        soften<KEYS>(score, top, sum, shrink, a, masked, key0, position, window);
        if (i) {
            wgmma_wait<0>();
            pin(out);
            if (lane == 0) mbar_arrive(bar(bars_s, V_EMPTY + (i - 1) % 2));
#pragma unroll
            for (int j = 0; j < D / 2; j++) out[j] *= shrink[j / 2 % 2];
        }
#pragma unroll
        for (int j = 0; j < KEYS / 4; j++) weight[j] = T::pack(score[2 * j], score[2 * j + 1]);
    }
    const int last = w.tiles - 1;
    mbar_wait(bar(bars_s, V_FULL + last % 2), (uint32_t)(last / 2) % 2);
    pin(out);
    wgmma_fence();
    values(last, last == 0);
    wgmma_wait<0>();
    pin(out);
#pragma unroll
    for (int u = 0; u < 2; u++) {
        sum[u] += __shfl_xor_sync(~0u, sum[u], 1);
        sum[u] += __shfl_xor_sync(~0u, sum[u], 2);
        const int r = r0 + 8 * u;
        if (r >= w.rows) continue;
        const float inverse = 1.f / sum[u];
        uint32_t *to = (uint32_t *)(a.out + ((size_t)(first_row + r) * a.heads + w.head) * D) + lane % 4;
#pragma unroll
        for (int j = 0; j < D / 8; j++) to[4 * j] = T::pack(out[4 * j + 2 * u] * inverse, out[4 * j + 2 * u + 1] * inverse);
    }
}

template <typename T, int D> __global__ void __launch_bounds__(THREADS, 1) prefill_kernel(const __grid_constant__ k_attention_args a, const __grid_constant__ CUtensorMap q,
                                                                                    const __grid_constant__ CUtensorMap kv) {
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t barriers[BARRIERS];
    const uint32_t q_s = (shared_address(shared) + 1023) & ~1023u, bars_s = shared_address(barriers);
    const k_attention_tile tile = a.tiles[blockIdx.y];
    const k_seq s = a.seqs[tile.seq];
    const int first_row = s.first_row + tile.first_row;
    span w;
    w.head = blockIdx.x;
    w.kv_head = w.head / (a.heads / a.kv_heads);
    w.rows = min(ROWS, s.row_count - tile.first_row);
    w.first_position = s.kv_before + tile.first_row;
    const int window = a.use_window ? a.row_window[first_row] : 0;
    w.first_key = window && w.first_position + 1 > window ? w.first_position + 1 - window : 0;
    w.first_tile = w.first_key / Sizes<D>::KEYS;
    w.tiles = (w.first_position + w.rows - 1) / Sizes<D>::KEYS - w.first_tile + 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < K_EMPTY; i++) mbar_init(bar(bars_s, i), 1);
        for (int i = K_EMPTY; i < BARRIERS; i++) mbar_init(bar(bars_s, i), 8);
        mbar_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        static_assert(registers_fit(THREADS, CONSUMER_REGS, PRODUCER_REGS));
        reg_dec<PRODUCER_REGS>();
        if (threadIdx.x < 288) produce<D>(a, q, kv, s, w, first_row, q_s, bars_s);
    } else {
        reg_inc<CONSUMER_REGS>();
        consume<T, D>(a, w, first_row, q_s, bars_s);
    }
}

template <typename T, int D> cudaError_t launch(const k_attention_args *a, const CUtensorMap *q, const CUtensorMap *kv, cudaStream_t stream) {
    constexpr int bytes = Sizes<D>::SHARED;
    // Each time: every device has its own.
    const cudaError_t raised = cudaFuncSetAttribute(prefill_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (raised != cudaSuccess) return raised;
    prefill_kernel<T, D><<<dim3((unsigned)a->heads, (unsigned)a->tile_count), THREADS, bytes, stream>>>(*a, *q, *kv);
    return cudaGetLastError();
}

template <typename T> cudaError_t choose(const k_attention_args *a, const CUtensorMap *q, const CUtensorMap *kv, cudaStream_t stream) {
    switch (a->head_dim) {
    case 64: return launch<T, 64>(a, q, kv, stream);
    case 80: return launch<T, 80>(a, q, kv, stream);
    case 96: return launch<T, 96>(a, q, kv, stream);
    case 128: return launch<T, 128>(a, q, kv, stream);
    case 256: return launch<T, 256>(a, q, kv, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

extern "C" cudaError_t k_attention_prefill(const k_attention_args *a, const CUtensorMap *q, const CUtensorMap *kv, cudaStream_t stream) {
    if (a->heads % a->kv_heads || a->block_tokens < 8 || (a->block_tokens & (a->block_tokens - 1))) return cudaErrorInvalidValue;
    if (!a->tile_count) return cudaSuccess;
    return a->fp16 ? choose<fp16_type>(a, q, kv, stream) : choose<bf16_type>(a, q, kv, stream);
}
