// sampling.cu - one block per logits row: soft cap, log-softmax, rank, top alternatives, edits, truncation, draw.
//
// Log-probabilities, rank and alternatives are of the raw logits (after the model's own soft cap, before edits). Sampling works on
// edited logits / temperature: top_k, then top_p (smallest set whose mass reaches p, ties broken by the lower id), then min_p,
// then the inverse of the cumulative sum in id order at the row's uniform draw. Thresholds are found by bisection over the
// order-preserving integer image of float32, so no sort is needed and the result is exact. All sums run in a fixed order.
// A row is read as seldom as can be: a histogram of the distances to the best logit gives a cut that at most CANDIDATES elements
// pass; these are gathered in id order in shared memory, and alternatives, truncation and draw go on there. Where the cut is too
// high for what is asked (a nucleus of thousands, no truncation at all) the same steps work on the whole row.
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

// f(value, index) for every element, 16 bytes a load where the row's place allows it.
template <class F> __device__ __forceinline__ void sweep(const float *l, int n, F f) {
    if (n % 4 == 0 && ((uintptr_t)l & 15) == 0) {
        const float4 *v = (const float4 *)l;
#pragma unroll 4
        for (int i = threadIdx.x; i < n / 4; i += THREADS) {
            const float4 x = v[i];
            f(x.x, 4 * i), f(x.y, 4 * i + 1), f(x.z, 4 * i + 2), f(x.w, 4 * i + 3);
        }
    } else
#pragma unroll 4
        for (int i = threadIdx.x; i < n; i += THREADS) f(l[i], i);
}

// Number and mass of elements whose image is at least `key`. p NULL: the number alone.
__device__ void above(const float *p, const float *l, int vocab, uint32_t key, float *red, float *count, float *mass) {
    float n = 0, sum = 0;
    if (p && vocab % 4 == 0 && (((uintptr_t)l | (uintptr_t)p) & 15) == 0) {
        const float4 *l4 = (const float4 *)l, *p4 = (const float4 *)p;
#pragma unroll 4
        for (int i = threadIdx.x; i < vocab / 4; i += THREADS) {
            const float4 v = l4[i], m = p4[i];
            const bool a = ordered(v.x) >= key, b = ordered(v.y) >= key, c = ordered(v.z) >= key, d = ordered(v.w) >= key;
            n += (a ? 1.f : 0.f) + (b ? 1.f : 0.f) + (c ? 1.f : 0.f) + (d ? 1.f : 0.f);
            sum += ((a ? m.x : 0.f) + (b ? m.y : 0.f)) + ((c ? m.z : 0.f) + (d ? m.w : 0.f));
        }
    } else
        sweep(l, vocab, [&](float v, int i) {
            if (ordered(v) >= key) n += 1, sum += p ? p[i] : 0;
        });
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

// The first index at which the running mass exceeds uniform * total; the last with any mass if rounding leaves none. Each warp
// owns a run of `p`.
__device__ int draw(const float *p, int n, float uniform) {
    __shared__ float warp_mass[WARPS];
    __shared__ int chosen;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, run = (n + WARPS * 32 - 1) / (WARPS * 32) * 32;
    const int from = warp * run, to = min(n, from + run);
    float sum = 0;
#pragma unroll 4
    for (int i = from + lane; i < to; i += 32) sum += p[i];
    sum = warp_sum(sum);
    __syncthreads();
    if (lane == 0) warp_mass[warp] = sum;
    if (threadIdx.x == 0) chosen = -1;
    __syncthreads();
    float total = 0, before = 0;
    int mine = -1, last = 0; // the warp whose run holds the target
    for (int w = 0; w < WARPS; w++) total += warp_mass[w];
    const float target = uniform * total;
    for (int w = 0; w < WARPS && mine < 0; w++) {
        if (warp_mass[w] > 0) last = w;
        if (before + warp_mass[w] > target) mine = w;
        else before += warp_mass[w];
    }
    if (mine < 0) { // rounding: the last run that has any
        mine = last, before = 0;
        for (int w = 0; w < last; w++) before += warp_mass[w];
    }
    if (warp == mine) {
        int found = -1, latest = -1;
        for (int i0 = from; i0 < to && found < 0; i0 += 32) {
            const float v = i0 + lane < to ? p[i0 + lane] : 0.f;
            float up_to = v;
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                const float below = __shfl_up_sync(~0u, up_to, o);
                if (lane >= o) up_to += below;
            }
            const uint32_t over = __ballot_sync(~0u, v > 0 && before + up_to > target), any = __ballot_sync(~0u, v > 0);
            if (any) latest = i0 + 31 - __clz((int)any);
            if (over) found = i0 + __ffs((int)over) - 1;
            before += __shfl_sync(~0u, up_to, 31);
        }
        if (lane == 0) chosen = found >= 0 ? found : latest;
    }
    __syncthreads();
    return chosen;
}

constexpr int CANDIDATES = 4096, BUCKETS = 1024;
constexpr float BUCKETS_PER_LOGIT = 32;

struct candidates { // in shared memory, ids ascending: every element above a cut
    float l[CANDIDATES], p[CANDIDATES];
    int id[CANDIDATES];
    uint32_t histogram[BUCKETS];
    int warp_count[WARPS], cut, count;
};

__device__ __forceinline__ int bucket_of(float v, float top) {
    const float distance = (top - v) * BUCKETS_PER_LOGIT;
    return distance < BUCKETS ? (int)distance : BUCKETS; // BUCKETS: too far, never a candidate
}

// Gathers the elements of the best buckets, as many as fit. Returns their number, 0 if the best bucket alone is too full.
__device__ int gather(candidates *c, const float *l, int n, float top) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) c->histogram[i] = 0;
    __syncthreads();
    sweep(l, n, [&](float v, int) {
        const int b = bucket_of(v, top);
        if (b < BUCKETS) atomicAdd(&c->histogram[b], 1u);
    });
    __syncthreads();
    if (warp == 0) { // lane i: buckets 32 i ..
        uint32_t mine = 0;
        for (int i = 0; i < BUCKETS / 32; i++) mine += c->histogram[lane * (BUCKETS / 32) + i];
        uint32_t up_to = mine;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const uint32_t below = __shfl_up_sync(~0u, up_to, o);
            if (lane >= o) up_to += below;
        }
        uint32_t sum = up_to - mine;
        int cut = lane * (BUCKETS / 32);
        for (int i = 0; i < BUCKETS / 32 && sum + c->histogram[lane * (BUCKETS / 32) + i] <= CANDIDATES; i++) sum += c->histogram[lane * (BUCKETS / 32) + i], cut++;
        // The cut lies in the first lane that could not take all of its own.
        const uint32_t stuck = __ballot_sync(~0u, cut < (lane + 1) * (BUCKETS / 32));
        const int at = stuck ? __ffs((int)stuck) - 1 : 31;
        cut = __shfl_sync(~0u, cut, at);
        if (lane == 0) c->cut = cut;
    }
    __syncthreads();
    const int cut = c->cut, run = (n + WARPS * 32 - 1) / (WARPS * 32) * 32, from = warp * run, to = min(n, from + run);
    int have = 0;
#pragma unroll 4
    for (int i = from + lane; i < to; i += 32) have += bucket_of(l[i], top) < cut;
    for (int o = 16; o; o /= 2) have += __shfl_xor_sync(~0u, have, o);
    if (lane == 0) c->warp_count[warp] = have;
    __syncthreads();
    int at = 0, all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) at = all;
        all += c->warp_count[w];
    }
    if (have)
        for (int i0 = from; i0 < to; i0 += 32) {
            const float v = i0 + lane < to ? l[i0 + lane] : -INFINITY;
            const bool in = bucket_of(v, top) < cut;
            const uint32_t in_warp = __ballot_sync(~0u, in);
            const int place = at + __popc(in_warp & ((1u << lane) - 1));
            if (in) c->l[place] = v, c->id[place] = i0 + lane;
            at += __popc(in_warp);
        }
    __syncthreads();
    return all;
}

// Truncation and draw over n elements of l; p: relative probabilities, overwritten. sum: mass that top_p is a share of.
__device__ int choose(const float *l, float *p, int n, const k_sample_row &row, float sum, float *red) {
    if (row.top_k > 0 && row.top_k < (uint32_t)n) {
        const keep k = truncate(p, l, n, (float)row.top_k, 0, red);
        sum = 0;
        for (int i = threadIdx.x; i < n; i += THREADS) {
            if (!kept(l[i], i, k)) p[i] = 0;
            sum += p[i];
        }
        sum = block_sum(sum, red);
    }
    if (row.top_p < 1) {
        const keep k = truncate(p, l, n, 0, row.top_p * sum, red);
        for (int i = threadIdx.x; i < n; i += THREADS)
            if (!kept(l[i], i, k)) p[i] = 0;
    }
    if (row.min_p > 0)
        for (int i = threadIdx.x; i < n; i += THREADS)
            if (p[i] < row.min_p) p[i] = 0; // p is relative to the most likely token
    __syncthreads();
    return draw(p, n, row.uniform);
}

// A token for the row from its (edited) logits, whose best is `top`; `gathered` of them are in c, 0: none yet.
__device__ int sample(candidates *c, const float *l, float *p, int n, const k_sample_row &row, const best &top, int gathered, float *red) {
    if (row.temperature < 1e-5f || row.top_p <= 0) return top.id;
    const float inverse = 1.f / row.temperature;
    const bool by_count = row.top_k > 0 && row.top_k < (uint32_t)n;
    if (by_count || row.top_p < 1) {
        if (!gathered) gathered = gather(c, l, n, top.value);
        float mass = 0, sum = 0;
        for (int i = threadIdx.x; i < gathered; i += THREADS) {
            c->p[i] = __expf((c->l[i] - top.value) * inverse);
            mass += c->p[i];
        }
        mass = block_sum(mass, red);
        if (!by_count) {
            sweep(l, n, [&](float v, int) { sum += __expf((v - top.value) * inverse); });
            sum = block_sum(sum, red);
        }
        __syncthreads();
        if (by_count ? row.top_k <= (uint32_t)gathered : mass * 0.999f >= row.top_p * sum) return c->id[choose(c->l, c->p, gathered, row, sum, red)];
    }
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        p[i] = __expf((l[i] - top.value) * inverse);
        sum += p[i];
    }
    return choose(l, p, n, row, block_sum(sum, red), red);
}

__global__ void __launch_bounds__(THREADS, 1) sample_kernel(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits,
                                                         k_sample_result *results, int width, float softcap) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float red[WARPS];
    __shared__ best red_best[WARPS];
    candidates *c = (candidates *)shared;
    const k_sample_row row = rows[blockIdx.x];
    k_sample_result *out = results + blockIdx.x;
    float *l = logits + (size_t)blockIdx.x * width, *p = scratch + (size_t)blockIdx.x * width * 2, *edited = p + width;
    const bool drawn = row.target < 0, edit = drawn && row.edit_count > 0;
    float bad = 0;
    best top = {-INFINITY, INT32_MAX};
    sweep(l, width, [&](float v, int i) {
        if (softcap > 0) v = softcap * tanhf(v / softcap);
        if (i >= row.vocab) v = -INFINITY;
        bad += isnan(v) ? 1.f : 0.f;
        if (better(v, i, top)) top = {v, i};
        if (softcap > 0 || i >= row.vocab) l[i] = v;
        if (edit) edited[i] = v;
    });
    bad = block_sum(bad, red);
    if (threadIdx.x == 0) out->fault = bad > 0;
    if (bad > 0) return;
    top = block_best(top, red_best);
    float sum = 0;
    sweep(l, width, [&](float v, int) { sum += __expf(v - top.value); });
    const float log_sum = top.value + logf(block_sum(sum, red));
    int id = row.target;
    if (edit) {
        for (int i = threadIdx.x; i < row.edit_count; i += THREADS) {
            const k_edit e = edits[row.first_edit + i];
            if (e.token < 0 || e.token >= width) continue;
            const float v = edited[e.token];
            edited[e.token] = (v > 0 ? v / e.repetition : v * e.repetition) + e.add;
        }
        __syncthreads();
        id = sample(c, edited, p, width, row, next_best(edited, width, {INFINITY, -1}, red_best), 0, red);
        __syncthreads();
    }
    const bool picks = drawn && !edit && row.temperature >= 1e-5f && row.top_p > 0 && (row.top_k > 0 || row.top_p < 1);
    const int gathered = row.top_count > 0 || picks ? gather(c, l, width, top.value) : 0;
    if (drawn && !edit) id = sample(c, l, p, width, row, top, gathered, red);
    float ahead = 0;
    if (id != top.id) {
        const float mine = l[id];
        sweep(l, width, [&](float v, int i) { ahead += v > mine || (v == mine && i < id) ? 1.f : 0.f; });
        ahead = block_sum(ahead, red);
    }
    if (threadIdx.x == 0) out->id = id, out->logprob = l[id] - log_sum, out->rank = (uint32_t)ahead + 1;
    best limit = {INFINITY, -1};
    const bool few = row.top_count <= gathered;
    for (int j = 0; j < row.top_count; j++) {
        limit = few ? next_best(c->l, gathered, limit, red_best) : next_best(l, width, limit, red_best);
        if (threadIdx.x == 0) out->top_ids[j] = few ? c->id[limit.id] : limit.id, out->top_logprobs[j] = limit.value - log_sum;
    }
}

} // namespace

extern "C" cudaError_t k_sample(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits, k_sample_result *results,
                                int32_t row_count, int32_t vocab, float softcap, cudaStream_t stream) {
    if (!row_count) return cudaSuccess;
    // Each time: every device has its own.
    const cudaError_t raised = cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(candidates));
    if (raised != cudaSuccess) return raised;
    sample_kernel<<<(unsigned)row_count, THREADS, sizeof(candidates), stream>>>(logits, scratch, rows, edits, results, vocab, softcap);
    return cudaGetLastError();
}
