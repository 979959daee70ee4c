// attention_plain.cu - q/k norm, RoPE and the KV write; causal attention over paged KV for any head_dim <= 256.
//
//   KV of one layer: [block][key, value][kv_head][block_tokens][head_dim], bf16 or fp16
//   RoPE rotates pairs (i, i + rotary_dim / 2), as Hugging Face's rotate_half does; phases come from a float32 table.
#include "elements.cuh"

namespace {

struct place { // one head of q, k or v of one row: heads [0, heads) are q's, then kv_heads of k, then kv_heads of v
    const void *from;
    size_t at; // its first element there
    uint16_t *to;
    int m, behind; // elements of the page behind it that are to be zeroed: it is the sequence's last token in a page begun in this step
    bool is_q, is_v;
};

__device__ __forceinline__ place place_of(const k_attention_args &a, long long item) {
    const int all = a.heads + 2 * a.kv_heads, m = (int)(item / all), h = (int)(item % all);
    place p;
    p.m = m, p.behind = 0, p.is_q = h < a.heads, p.is_v = h >= a.heads + a.kv_heads;
    const int head = p.is_q ? h : p.is_v ? h - a.heads - a.kv_heads : h - a.heads;
    p.from = p.is_q ? a.q_in : p.is_v ? a.v_in : a.k_in;
    p.at = (size_t)m * (p.is_q ? a.q_stride : a.kv_stride) + (size_t)head * a.head_dim;
    p.to = a.q + ((size_t)m * a.heads + head) * a.head_dim;
    if (p.is_q) return p;
    const k_seq s = a.seqs[a.seq_of_row[m]];
    const int t = s.kv_before + m - s.first_row, block = a.kv_blocks[s.first_block + t / a.block_tokens];
    const int slot = t % a.block_tokens, row = m - s.first_row;
    p.to = a.kv + ((((size_t)block * 2 + p.is_v) * a.kv_heads + head) * a.block_tokens + slot) * a.head_dim;
    if (row == s.row_count - 1 && row >= slot) p.behind = (a.block_tokens - 1 - slot) * a.head_dim;
    return p;
}

// The head's norm weights, NULL: none.
__device__ __forceinline__ const float *gamma_of(const k_attention_args &a, const place &p) {
    if (p.is_v || !a.q_gamma) return nullptr;
    const int overlay = a.row_overlay[p.m];
    const float *own = overlay >= 0 ? (p.is_q ? a.q_gammas : a.k_gammas)[overlay] : nullptr;
    return own ? own : p.is_q ? a.q_gamma : a.k_gamma;
}

__device__ __forceinline__ const float *phase_of(const k_attention_args &a, int m) { // [rotary_dim / 2][cos, sin]
    return a.rope + ((size_t)a.row_rope[m] * a.rope_positions + a.positions[m]) * a.rotary_dim;
}

// One warp per head, any even rotary_dim.
template <typename T> __global__ void __launch_bounds__(128) rope_kv_kernel(const __grid_constant__ k_attention_args a) {
    let_next_start(), wait_for_last();
    const int lane = threadIdx.x % 32;
    const long long item = (long long)blockIdx.x * 4 + threadIdx.x / 32;
    if (item >= (long long)a.rows * (a.heads + 2 * a.kv_heads)) return;
    const place p = place_of(a, item);
    for (int i = lane; i < p.behind; i += 32) p.to[a.head_dim + i] = 0;
    float factor = 1;
    const float *gamma = gamma_of(a, p);
    if (gamma) {
        float square = 0;
        for (int i = lane; i < a.head_dim; i += 32) {
            float v = load_any<T>(p.from, p.at + i, a.in_half);
            square += v * v;
        }
        factor = rsqrtf(warp_sum(square) / a.head_dim + a.eps);
    }
    const float one = a.norm_plus_one ? 1.f : 0.f;
    const int half = a.rotary_dim / 2;
    const float *phase = phase_of(a, p.m);
    for (int i = lane; i < a.head_dim; i += 32) {
        float v = load_any<T>(p.from, p.at + i, a.in_half) * factor * (gamma ? one + gamma[i] : 1.f);
        if (!p.is_v && i < a.rotary_dim) {
            int j = i < half ? i + half : i - half;
            float other = load_any<T>(p.from, p.at + j, a.in_half) * factor * (gamma ? one + gamma[j] : 1.f);
            float cosine = phase[2 * (i % half)], sine = phase[2 * (i % half) + 1];
            v = i < half ? v * cosine - other * sine : v * cosine + other * sine;
        }
        p.to[i] = T::store(v);
    }
}

// LANES lanes per head, each the eight neighbours at 8 l and the eight that they turn with, or eight (sixteen) that do not turn.
template <typename T, int LANES> __global__ void __launch_bounds__(128) rope_kv_wide_kernel(const __grid_constant__ k_attention_args a) {
    let_next_start(), wait_for_last();
    const int lane = threadIdx.x % LANES, turning = a.rotary_dim / 16;
    const long long item = (long long)blockIdx.x * (128 / LANES) + threadIdx.x / LANES, last = (long long)a.rows * (a.heads + 2 * a.kv_heads) - 1;
    const place p = place_of(a, item <= last ? item : last); // lanes without a head go along, for the sums
    const int pieces = item <= last ? a.head_dim / 8 : 0;
    if (pieces)
        for (int i = lane; i < p.behind / 8; i += LANES) ((uint4 *)(p.to + a.head_dim))[i] = make_uint4(0, 0, 0, 0);
    // Pieces of eight: lane l < turning takes l and l + turning, the next ones a pair of what is left.
    const bool turns = lane < turning;
    const int low = turns ? lane : 2 * lane, high = turns ? lane + turning : 2 * lane + 1;
    float v[2][8] = {};
    if (low < pieces) load8_any<T>(v[0], p.from, p.at / 8 + low, a.in_half);
    if (high < pieces) load8_any<T>(v[1], p.from, p.at / 8 + high, a.in_half);
    const float *gamma = gamma_of(a, p);
    if (gamma) {
        float square = sum_of_squares(v[0]) + sum_of_squares(v[1]), g[8];
#pragma unroll
        for (int o = LANES / 2; o; o /= 2) square += __shfl_xor_sync(~0u, square, o);
        const float factor = rsqrtf(square / a.head_dim + a.eps), one = a.norm_plus_one ? 1.f : 0.f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int piece = h ? high : low;
            if (piece >= pieces) continue;
            load8(g, gamma, piece);
#pragma unroll
            for (int i = 0; i < 8; i++) v[h][i] *= factor * (one + g[i]);
        }
    }
    if (turns && !p.is_v) {
        float phase[2][8];
        load8(phase[0], phase_of(a, p.m), 2 * lane), load8(phase[1], phase_of(a, p.m), 2 * lane + 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float cosine = phase[i / 4][i % 4 * 2], sine = phase[i / 4][i % 4 * 2 + 1], x = v[0][i], y = v[1][i];
            v[0][i] = x * cosine - y * sine, v[1][i] = y * cosine + x * sine;
        }
    }
    if (low < pieces) store8<T>(p.to, low, v[0]);
    if (high < pieces) store8<T>(p.to, high, v[1]);
}

constexpr int WARPS = 8;

// One block per (row, query head). The warps take tiles of 32 keys in turn: each lane scores one key, then the lanes share out the
// head's dimensions for the weighted sum. Partial (max, sum, out) of the warps are merged in warp order: a fixed order whatever
// else is in the batch.
template <typename T, int PER_LANE> __global__ void __launch_bounds__(WARPS * 32, 2) attention_kernel(const k_attention_args a) {
    __shared__ float q[256], part_out[WARPS][256], part_max[WARPS], part_sum[WARPS];
    const int m = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = a.head_dim;
    const k_seq s = a.seqs[a.seq_of_row[m]];
    const int last = s.kv_before + m - s.first_row; // the row sees keys first..last
    const int window = a.use_window ? a.row_window[m] : 0, first = window && last + 1 > window ? last + 1 - window : 0;
    const int kv_head = head / (a.heads / a.kv_heads);
    const int32_t *blocks = a.kv_blocks + s.first_block;
    for (int i = threadIdx.x; i < d; i += WARPS * 32) q[i] = T::load(a.q[((size_t)m * a.heads + head) * d + i]) * a.scale;
    __syncthreads();
    float top = -INFINITY, sum = 0, out[PER_LANE] = {};
    for (int t0 = first / 32 * 32 + 32 * warp; t0 <= last; t0 += 32 * WARPS) {
        int t = t0 + lane;
        float score = -INFINITY;
        if (t >= first && t <= last) {
            const uint16_t *key = a.kv + (((size_t)blocks[t / a.block_tokens] * 2 * a.kv_heads + kv_head) * a.block_tokens + t % a.block_tokens) * d;
            float dot = 0;
            for (int i = 0; i < d; i += 2) {
                uint32_t pair = *(const uint32_t *)(key + i);
                dot += q[i] * T::load((uint16_t)pair) + q[i + 1] * T::load((uint16_t)(pair >> 16));
            }
            score = a.softcap > 0 ? a.softcap * tanhf(dot / a.softcap) : dot;
        }
        float tile_top = fmaxf(top, warp_max(score));
        if (tile_top == -INFINITY) continue;
        float p = __expf(score - tile_top), shrink = __expf(top - tile_top);
        sum = sum * shrink + warp_sum(p);
        top = tile_top;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) out[j] *= shrink;
        int from = max(0, first - t0), count = min(32, last + 1 - t0);
        for (int i = from; i < count; i++) {
            float weight = __shfl_sync(~0u, p, i);
            int at = t0 + i;
            const uint16_t *value = a.kv + ((((size_t)blocks[at / a.block_tokens] * 2 + 1) * a.kv_heads + kv_head) * a.block_tokens + at % a.block_tokens) * d;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                if (lane + 32 * j < d) out[j] += weight * T::load(value[lane + 32 * j]);
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) part_out[warp][lane + 32 * j] = out[j];
    if (lane == 0) part_max[warp] = top, part_sum[warp] = sum;
    __syncthreads();
    float all_top = part_max[0], all_sum = 0;
    for (int w = 1; w < WARPS; w++) all_top = fmaxf(all_top, part_max[w]);
    for (int w = 0; w < WARPS; w++) all_sum += part_sum[w] * __expf(part_max[w] - all_top);
    for (int i = threadIdx.x; i < d; i += WARPS * 32) {
        float v = 0;
        for (int w = 0; w < WARPS; w++) v += part_out[w][i] * __expf(part_max[w] - all_top);
        a.out[((size_t)m * a.heads + head) * d + i] = T::store(v / all_sum);
    }
}

template <typename T> void launch(const k_attention_args *a, cudaStream_t stream) {
    const dim3 grid((unsigned)a->rows, (unsigned)a->heads);
    if (a->head_dim <= 64) attention_kernel<T, 2><<<grid, WARPS * 32, 0, stream>>>(*a);
    else if (a->head_dim <= 128) attention_kernel<T, 4><<<grid, WARPS * 32, 0, stream>>>(*a);
    else attention_kernel<T, 8><<<grid, WARPS * 32, 0, stream>>>(*a);
}

template <typename T> cudaError_t launch_rope(const k_attention_args *a, cudaStream_t stream) {
    const bool wide = a->head_dim % 8 == 0 && a->rotary_dim % 16 == 0;
    const int lanes = !wide ? 32 : a->head_dim <= 128 ? 8 : 16, each = 128 / lanes;
    const long long items = (long long)a->rows * (a->heads + 2 * a->kv_heads);
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)((items + each - 1) / each)), config.blockDim = dim3(128), config.stream = stream;
    config.attrs = &overlap, config.numAttrs = a->overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, !wide ? rope_kv_kernel<T> : lanes == 8 ? rope_kv_wide_kernel<T, 8> : rope_kv_wide_kernel<T, 16>, *a);
}

} // namespace

extern "C" cudaError_t k_rope_kv_write(const k_attention_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    return a->fp16 ? launch_rope<fp16_type>(a, stream) : launch_rope<bf16_type>(a, stream);
}

extern "C" cudaError_t k_attention_plain(const k_attention_args *a, cudaStream_t stream) {
    if (a->head_dim > 256 || a->head_dim % 2 || a->heads % a->kv_heads) return cudaErrorInvalidValue;
    if (!a->rows) return cudaSuccess;
    if (a->fp16) launch<fp16_type>(a, stream);
    else launch<bf16_type>(a, stream);
    return cudaGetLastError();
}
