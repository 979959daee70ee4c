// attention_plain.cu - q/k norm, RoPE and the KV write; causal attention over paged KV for any head_dim <= 256.
//
//   KV of one layer: [block][key, value][kv_head][block_tokens][head_dim], bf16 or fp16
//   RoPE rotates pairs (i, i + rotary_dim / 2), as Hugging Face's rotate_half does; phases come from a float32 table.
#include "elements.cuh"

namespace {

// One warp per (row, head of q, k or v). Heads: [0, heads) q, then kv_heads of k, then kv_heads of v.
template <typename T> __global__ void __launch_bounds__(128) rope_kv_kernel(const k_attention_args a) {
    const int lane = threadIdx.x % 32, all = a.heads + 2 * a.kv_heads;
    const long long item = (long long)blockIdx.x * 4 + threadIdx.x / 32;
    if (item >= (long long)a.rows * all) return;
    const int m = (int)(item / all), h = (int)(item % all), overlay = a.row_overlay[m];
    const bool is_q = h < a.heads, is_v = h >= a.heads + a.kv_heads;
    const int head = is_q ? h : is_v ? h - a.heads - a.kv_heads : h - a.heads;
    const void *from = is_q ? a.q_in : is_v ? a.v_in : a.k_in;
    const size_t at_in = (size_t)m * (is_q ? a.q_stride : a.kv_stride) + (size_t)head * a.head_dim;
    uint16_t *to;
    if (is_q) to = a.q + ((size_t)m * a.heads + head) * a.head_dim;
    else {
        const k_seq s = a.seqs[a.seq_of_row[m]];
        int at = s.kv_before + m - s.first_row, block = a.kv_blocks[s.first_block + at / a.block_tokens];
        const int place = at % a.block_tokens, row = m - s.first_row;
        to = a.kv + ((((size_t)block * 2 + is_v) * a.kv_heads + head) * a.block_tokens + place) * a.head_dim;
        if (row == s.row_count - 1 && row >= place) // the sequence's last token, in a page begun in this step: its tail
            for (int i = a.head_dim + lane; i < (a.block_tokens - place) * a.head_dim; i += 32) to[i] = 0;
    }
    float factor = 1;
    const float *gamma = nullptr;
    if (!is_v && a.q_gamma) {
        const float *own = overlay >= 0 ? (is_q ? a.q_gammas : a.k_gammas)[overlay] : nullptr;
        gamma = own ? own : is_q ? a.q_gamma : a.k_gamma;
        float square = 0;
        for (int i = lane; i < a.head_dim; i += 32) {
            float v = load_any<T>(from, at_in + i, a.in_half);
            square += v * v;
        }
        factor = rsqrtf(warp_sum(square) / a.head_dim + a.eps);
    }
    const float one = a.norm_plus_one ? 1.f : 0.f;
    const int half = a.rotary_dim / 2;
    const float *phase = a.rope + ((size_t)a.row_rope[m] * a.rope_positions + a.positions[m]) * a.rotary_dim;
    for (int i = lane; i < a.head_dim; i += 32) {
        float v = load_any<T>(from, at_in + i, a.in_half) * factor * (gamma ? one + gamma[i] : 1.f);
        if (!is_v && i < a.rotary_dim) {
            int j = i < half ? i + half : i - half;
            float other = load_any<T>(from, at_in + j, a.in_half) * factor * (gamma ? one + gamma[j] : 1.f);
            float cosine = phase[2 * (i % half)], sine = phase[2 * (i % half) + 1];
            v = i < half ? v * cosine - other * sine : v * cosine + other * sine;
        }
        to[i] = T::store(v);
    }
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

} // namespace

extern "C" cudaError_t k_rope_kv_write(const k_attention_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    const long long items = (long long)a->rows * (a->heads + 2 * a->kv_heads);
    const unsigned blocks = (unsigned)((items + 3) / 4);
    if (a->fp16) rope_kv_kernel<fp16_type><<<blocks, 128, 0, stream>>>(*a);
    else rope_kv_kernel<bf16_type><<<blocks, 128, 0, stream>>>(*a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_attention_plain(const k_attention_args *a, cudaStream_t stream) {
    if (a->head_dim > 256 || a->head_dim % 2 || a->heads % a->kv_heads) return cudaErrorInvalidValue;
    if (!a->rows) return cudaSuccess;
    if (a->fp16) launch<fp16_type>(a, stream);
    else launch<bf16_type>(a, stream);
    return cudaGetLastError();
}
