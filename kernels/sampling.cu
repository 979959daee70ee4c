// sampling.cu - one block per logits row: soft cap, log-softmax, rank, top alternatives, edits, truncation, draw.
//
// Log-probabilities, rank and alternatives are of the raw logits (after the model's own soft cap, before edits). Sampling works on
// edited logits / temperature: top_k, then top_p (smallest set whose mass reaches p, ties broken by the lower id), then min_p,
// then the inverse of the cumulative sum in id order at the row's uniform draw. Thresholds are found by bisection over the
// order-preserving integer image of float32, so no sort is needed and the result is exact. All sums run in a fixed order.
#include "common.cuh"

namespace {

constexpr int THREADS = 1024, WARPS = THREADS / 32;

struct best {
    float value;
    int id;
};

// Order-preserving map of float32 to uint32.
__device__ __forceinline__ uint32_t ordered(float v) {
    uint32_t u = __float_as_uint(v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ bool better(float v, int id, const best &than) {
    return v > than.value || (v == than.value && id < than.id);
}

__device__ best block_best(best b, best *red) {
    for (int o = 16; o; o /= 2) {
        float v = __shfl_xor_sync(~0u, b.value, o);
        int id = __shfl_xor_sync(~0u, b.id, o);
        if (better(v, id, b)) b = {v, id};
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = b;
    __syncthreads();
    b = red[0];
    for (int i = 1; i < WARPS; i++)
        if (better(red[i].value, red[i].id, b)) b = red[i];
    return b;
}

// Best element strictly after `limit` in the order (value descending, id ascending).
__device__ best next_best(const float *l, int vocab, best limit, best *red) {
    best b = {-INFINITY, INT32_MAX};
    for (int i = threadIdx.x; i < vocab; i += THREADS) {
        float v = l[i];
        if ((v < limit.value || (v == limit.value && i > limit.id)) && better(v, i, b)) b = {v, i};
    }
    return block_best(b, red);
}

// Number and mass of elements whose image is at least `key`.
__device__ void above(const float *p, const float *l, int vocab, uint32_t key, float *red, float *count, float *mass) {
    float n = 0, sum = 0;
    for (int i = threadIdx.x; i < vocab; i += THREADS)
        if (ordered(l[i]) >= key) n += 1, sum += p ? p[i] : 0;
    *count = block_sum(n, red);
    if (p) *mass = block_sum(sum, red);
}

struct keep { // elements kept: image > key, or image == key and id <= id_max
    uint32_t key;
    int id_max;
};
__device__ __forceinline__ bool kept(float logit, int id, keep k) {
    uint32_t u = ordered(logit);
    return u > k.key || (u == k.key && id <= k.id_max);
}

// Largest key for which `enough` holds; then as many of the ties as are needed, by id.
// target_count > 0: enough elements; else enough mass.
__device__ keep truncate(const float *p, const float *l, int vocab, float target_count, float target_mass, float *red) {
    uint32_t low = 0, high = 0xffffffffu; // invariant: low is enough
    float count, mass = 0;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2 + 1;
        above(target_count > 0 ? nullptr : p, l, vocab, middle, red, &count, &mass);
        bool enough = target_count > 0 ? count >= target_count : mass >= target_mass;
        if (enough) low = middle;
        else high = middle - 1;
    }
    // Elements above the key are not enough; ties at the key fill up in id order.
    float have_count = 0, have_mass = 0;
    if (low != 0xffffffffu) above(target_count > 0 ? nullptr : p, l, vocab, low + 1, red, &have_count, &have_mass);
    __shared__ int id_max;
    __shared__ float filled;
    if (threadIdx.x == 0) id_max = -1, filled = target_count > 0 ? have_count : have_mass;
    __syncthreads();
    if (threadIdx.x < 32) { // one warp walks the ids in order
        int lane = threadIdx.x;
        float sum = filled, target = target_count > 0 ? target_count : target_mass;
        int last = -1;
        for (int i0 = 0; i0 < vocab && !(sum >= target && last >= 0); i0 += 32) {
            bool tie = i0 + lane < vocab && ordered(l[i0 + lane]) == low;
            uint32_t ties = __ballot_sync(~0u, tie);
            while (ties && !(sum >= target && last >= 0)) {
                int i = i0 + __ffs((int)ties) - 1;
                ties &= ties - 1;
                last = i, sum += target_count > 0 ? 1.f : p[i];
            }
        }
        if (lane == 0) id_max = last;
    }
    __syncthreads();
    keep k = {low, id_max};
    __syncthreads();
    return k;
}

// The first id at which the running mass of kept elements exceeds `target`; the last kept id if rounding leaves none.
__device__ int draw(const float *p, int vocab, float uniform, float *chunk, float *red) {
    int per = (vocab + THREADS - 1) / THREADS, from = threadIdx.x * per, to = min(vocab, from + per);
    float sum = 0;
    for (int i = from; i < to; i++) sum += p[i];
    __shared__ int chosen;
    chunk[threadIdx.x] = sum;
    (void)red;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0, run = 0;
        for (int i = 0; i < THREADS; i++) total += chunk[i];
        float target = uniform * total;
        chosen = -1;
        for (int i = 0; i < THREADS && chosen < 0; i++) {
            if (run + chunk[i] > target || i == THREADS - 1) {
                int last = -1;
                for (int j = i * per; j < min(vocab, (i + 1) * per); j++) {
                    if (p[j] <= 0) continue;
                    last = j;
                    run += p[j];
                    if (run > target) {
                        chosen = j;
                        break;
                    }
                }
                if (chosen < 0 && last >= 0) chosen = last;
            } else run += chunk[i];
        }
        for (int j = vocab - 1; chosen < 0 && j >= 0; j--)
            if (p[j] > 0) chosen = j;
    }
    __syncthreads();
    return chosen;
}

__device__ int sample_edited(float *l, float *p, int vocab, const k_sample_row &row, const k_edit *edits, float *red, best *red_best, float *chunk) {
    for (int i = threadIdx.x; i < row.edit_count; i += THREADS) {
        k_edit e = edits[row.first_edit + i];
        if (e.token < 0 || e.token >= vocab) continue;
        float v = l[e.token];
        l[e.token] = (v > 0 ? v / e.repetition : v * e.repetition) + e.add;
    }
    __syncthreads();
    best top = next_best(l, vocab, {INFINITY, -1}, red_best);
    if (row.temperature < 1e-5f || row.top_p <= 0) return top.id;
    float inverse = 1.f / row.temperature, sum = 0;
    for (int i = threadIdx.x; i < vocab; i += THREADS) {
        p[i] = __expf((l[i] - top.value) * inverse);
        sum += p[i];
    }
    sum = block_sum(sum, red);
    if (row.top_k > 0 && row.top_k < (uint32_t)vocab) {
        keep k = truncate(p, l, vocab, (float)row.top_k, 0, red);
        sum = 0;
        for (int i = threadIdx.x; i < vocab; i += THREADS) {
            if (!kept(l[i], i, k)) p[i] = 0;
            sum += p[i];
        }
        sum = block_sum(sum, red);
    }
    if (row.top_p < 1) {
        keep k = truncate(p, l, vocab, 0, row.top_p * sum, red);
        for (int i = threadIdx.x; i < vocab; i += THREADS)
            if (!kept(l[i], i, k)) p[i] = 0;
    }
    if (row.min_p > 0)
        for (int i = threadIdx.x; i < vocab; i += THREADS)
            if (p[i] < row.min_p) p[i] = 0; // p is relative to the most likely token
    __syncthreads();
    return draw(p, vocab, row.uniform, chunk, red);
}

__global__ void __launch_bounds__(THREADS, 1) sample_kernel(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits,
                                                         k_sample_result *results, int width, float softcap) {
    __shared__ float red[WARPS], chunk[THREADS];
    __shared__ best red_best[WARPS];
    const k_sample_row row = rows[blockIdx.x];
    k_sample_result *out = results + blockIdx.x;
    float *l = logits + (size_t)blockIdx.x * width, *p = scratch + (size_t)blockIdx.x * width * 2, *edited = p + width;
    float bad = 0;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        float v = l[i];
        if (softcap > 0) v = softcap * tanhf(v / softcap);
        if (i >= row.vocab) v = -INFINITY;
        bad += isnan(v) ? 1.f : 0.f;
        l[i] = v;
        edited[i] = v;
    }
    bad = block_sum(bad, red);
    if (threadIdx.x == 0) out->fault = bad > 0;
    if (bad > 0) return;
    best top = next_best(l, width, {INFINITY, -1}, red_best);
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += THREADS) sum += __expf(l[i] - top.value);
    const float log_sum = top.value + logf(block_sum(sum, red));
    int id = row.target >= 0 ? row.target : sample_edited(edited, p, width, row, edits, red, red_best, chunk);
    float ahead = 0, mine = l[id];
    for (int i = threadIdx.x; i < width; i += THREADS) ahead += l[i] > mine || (l[i] == mine && i < id) ? 1.f : 0.f;
    ahead = block_sum(ahead, red);
    if (threadIdx.x == 0) out->id = id, out->logprob = mine - log_sum, out->rank = (uint32_t)ahead + 1;
    best limit = {INFINITY, -1};
    for (int j = 0; j < row.top_count; j++) {
        limit = next_best(l, width, limit, red_best);
        if (threadIdx.x == 0) out->top_ids[j] = limit.id, out->top_logprobs[j] = limit.value - log_sum;
    }
}

} // namespace

extern "C" cudaError_t k_sample(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits, k_sample_result *results,
                                int32_t row_count, int32_t vocab, float softcap, cudaStream_t stream) {
    if (!row_count) return cudaSuccess;
    sample_kernel<<<(unsigned)row_count, THREADS, 0, stream>>>(logits, scratch, rows, edits, results, vocab, softcap);
    return cudaGetLastError();
}
