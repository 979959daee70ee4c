// sampling.cu - soft cap, log-softmax, rank, top alternatives, edits, truncation, draw. One cluster of blocks per logits row.
//
// Log-probabilities, rank and alternatives are of the raw logits (after the model's own soft cap, before edits). Sampling works on
// edited logits / temperature: top_k, then top_p (smallest set whose mass reaches p, ties broken by the lower id), then min_p,
// then the inverse of the cumulative sum in id order at the row's uniform draw.
//
// On sm_90 the 8 blocks of a row's cluster read it once, each an eighth, and keep it in shared memory; where there are no clusters
// one block does the same from a copy in scratch. An element is compared as one number, the order-preserving integer image of its
// value above its inverted id, so a set of the best elements is a least such number, a cut. select() finds it exactly: a histogram
// of the distances to the best value, then histograms of the image's digits within the one bin that holds the cut, 10 bits at a
// time. Counts and masses are whole numbers (2^40 is the best token's mass), so no result depends on the order of additions.
#include "common.cuh"

namespace {

constexpr int CLUSTER = 8, BINS = 1024, BIN_BITS = 10;
constexpr int SLICE_MAX = 50 * 1024; // elements of a row that a block's shared memory has room for
constexpr float ONE = 0x1p40f, LOG2E = 1.4426950408889634f;
constexpr float BINS_PER_LOGIT = 32, BINS_PER_OCTAVE = BINS / 41.f; // masses: beyond 2^-41 they are 0
constexpr uint32_t KEY_NAN = 0xffffffffu, KEY_LEAST = 0x007fffffu;  // that of -inf

// Order-preserving map of float32 to uint32, and back. There are no zeros below zero: see canonical().
__device__ __forceinline__ uint32_t ordered(float v) {
    const uint32_t u = __float_as_uint(v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
// The greater, the better: higher value, then lower id.
__device__ __forceinline__ uint64_t packed(float v, int id) {
    return (uint64_t)ordered(v) << 32 | (uint32_t)~id;
}
__device__ __forceinline__ int id_of(uint64_t element) {
    return (int)~(uint32_t)element;
}
__device__ __forceinline__ float canonical(float v) {
    return v + 0.f; // -0 is 0
}
__device__ __forceinline__ uint64_t whole(float mass) {
    return __float2ull_rn(mass * ONE);
}
// Never falls as v falls.
__device__ __forceinline__ int bin_of(float v, float best, float scale) {
    const float distance = (best - v) * scale;
    return distance >= BINS - 1 ? BINS - 1 : (int)distance;
}
// The least key whose bin is not beyond `bin`. The whole warp looks for it, 32 keys at a time.
__device__ uint32_t least_key(int bin, float best, float scale) {
    uint32_t low = KEY_LEAST, high = ordered(best); // it is in there
    while (low < high) {
        const uint32_t step = (high - low) / 32 + 1, mine = low + min(step * (threadIdx.x % 32), high - low);
        const uint32_t in = __ballot_sync(~0u, bin_of(value_of(mine), best, scale) <= bin);
        const int first = in ? __ffs((int)in) - 1 : 32; // those before are beyond
        const uint32_t end = first < 32 ? low + min(step * first, high - low) : high;
        if (first) low += step * (first - 1) + 1;
        high = first ? end : low;
    }
    return low;
}

struct alignas(16) shared_state {
    uint32_t low[BINS], high[BINS]; // the histogram: 64 bits a bin, in halves since only 32-bit atomics are fast
    uint64_t slots[2][CLUSTER], warps[32];
    uint64_t list[K_TOP_MAX];
    uint64_t above, weight; // what was found: the weight before it and its own
    int place;              // the bin, the id
    uint32_t listed;
};

// What an element counts: 1, or its mass relative to the most likely token's; 0 below the cut.
struct measure {
    float best, factor; // of the exponent to base 2; 0: count
    uint64_t cut;
    __device__ __forceinline__ float mass(float v) const { return fminf(exp2_fast((v - best) * factor), 1.f); } // 1 if both are infinite
    __device__ __forceinline__ uint64_t operator()(float v, int id) const {
        if (packed(v, id) < cut) return 0;
        return factor > 0 ? whole(mass(v)) : 1;
    }
    __device__ __forceinline__ float bins() const { return factor > 0 ? factor * BINS_PER_OCTAVE : BINS_PER_LOGIT; } // per logit
};

// The blocks of a row, seen from one of its threads. Every member function is called by all threads of all blocks.
template <int BLOCKS> struct team {
    static constexpr int THREADS = BLOCKS == 1 ? 1024 : 512, WARPS = THREADS / 32;
    shared_state *s;
    float *slice; // this block's n elements of the row, from `first` on; room for a multiple of 4
    int rank, first, n, turn;

    // The same place in the shared memory of another block.
    template <class T> static __device__ __forceinline__ T *at(T *mine, int block) {
#if __CUDA_ARCH__ >= 900
        if (BLOCKS > 1) { // volatile: eight addresses of everything would not stay in registers
            uint64_t there;
            asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(mine), "r"(block));
            return (T *)there;
        }
#endif
        (void)block;
        return mine;
    }
    static __device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
        if (BLOCKS > 1) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
    }
    static __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
        if (BLOCKS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
        if (BLOCKS == 1) __syncthreads();
    }
    static __device__ __forceinline__ void sync() { arrive(), wait(); }

    // One number of each block, for all. Two sets of slots: who writes has passed the barrier that came after the last reading.
    __device__ const uint64_t *exchange(uint64_t mine) {
        uint64_t *slots = s->slots[turn];
        turn ^= 1;
        if (threadIdx.x < BLOCKS) *at(&slots[rank], (int)threadIdx.x) = mine;
        sync();
        return slots;
    }
    // f over every thread's number.
    template <class F> __device__ uint64_t combine(uint64_t v, F f) {
#pragma unroll
        for (int o = 16; o; o /= 2) v = f(v, __shfl_xor_sync(~0u, v, o));
        __syncthreads();
        if (threadIdx.x % 32 == 0) s->warps[threadIdx.x / 32] = v;
        __syncthreads();
        v = s->warps[0];
#pragma unroll 4
        for (int i = 1; i < WARPS; i++) v = f(v, s->warps[i]);
        const uint64_t *slots = exchange(v);
        v = slots[0];
        for (int i = 1; i < BLOCKS; i++) v = f(v, slots[i]);
        return v;
    }
    __device__ uint64_t max_of(uint64_t v) {
        return combine(v, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
    }
    __device__ uint64_t sum_of(uint64_t v) {
        return combine(v, [](uint64_t a, uint64_t b) { return a + b; });
    }
    // The sum over the threads before this one, block by block, and over all.
    __device__ uint64_t sum_before(uint64_t mine, uint64_t *total) {
        uint64_t up_to = mine, block = 0, before = 0;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const uint64_t below = __shfl_up_sync(~0u, up_to, o);
            if (threadIdx.x % 32 >= o) up_to += below;
        }
        __syncthreads();
        if (threadIdx.x % 32 == 31) s->warps[threadIdx.x / 32] = up_to;
        __syncthreads();
#pragma unroll 4
        for (int i = 0; i < WARPS; i++) {
            if (i == threadIdx.x / 32) before = block;
            block += s->warps[i];
        }
        const uint64_t *slots = exchange(block);
        *total = 0;
        for (int i = 0; i < BLOCKS; i++) {
            if (i == rank) before += *total;
            *total += slots[i];
        }
        return before + up_to - mine;
    }

    // f(value, index in the slice, whether it is there) for the block's elements; the lanes of a warp stay together.
    template <class F> __device__ __forceinline__ void each(F f) const {
#pragma unroll 1
        for (int from = 0; from < n; from += 4 * THREADS) {
            const int i = from + 4 * (int)threadIdx.x;
            const float4 x = i < n ? *(const float4 *)(slice + i) : float4{};
            f(x.x, i, i < n), f(x.y, i + 1, i + 1 < n), f(x.z, i + 2, i + 2 < n), f(x.w, i + 3, i + 3 < n);
        }
    }
    // The best element, KEY_NAN above all if one is not a number.
    __device__ uint64_t best() {
        float v = -INFINITY;
        int id = 4 * (int)threadIdx.x < n ? first + 4 * (int)threadIdx.x : INT32_MAX;
        bool bad = false;
        each([&](float x, int i, bool in) {
            bad |= in && x != x;
            if (in && x > v) v = x, id = first + i;
        });
        return max_of(bad ? (uint64_t)KEY_NAN << 32 : packed(v, id));
    }

    __device__ __forceinline__ void add_one(int bin, uint64_t weight) {
        const uint32_t low = (uint32_t)weight, was = atomicAdd(&s->low[bin], low), carry = was + low < low;
        const uint32_t high = (uint32_t)(weight >> 32) + carry;
        if (high) atomicAdd(&s->high[bin], high);
    }
    // All lanes: weights, 0 for none, to their bins. The lanes that share the first one's bin add up first, if they are many: in
    // few bins (ties, a flat row) their atomics would wait for one another.
    __device__ __forceinline__ void add(int bin, uint64_t weight) {
        const uint32_t active = __ballot_sync(~0u, weight != 0);
        if (!active) return;
        const int leader = __ffs((int)active) - 1;
        const int shared_bin = __shfl_sync(~0u, bin, leader);
        const uint32_t same = __ballot_sync(~0u, weight != 0 && bin == shared_bin);
        if (!weight) return;
        if (__popc(same) < 6 || !(same >> threadIdx.x % 32 & 1)) {
            add_one(bin, weight);
            return;
        }
        const uint32_t low = __reduce_add_sync(same, (uint32_t)weight & 0xfffffu), high = __reduce_add_sync(same, (uint32_t)(weight >> 20));
        if (threadIdx.x % 32 == leader) add_one(bin, low + ((uint64_t)high << 20));
    }
    // The histogram of the row's weights; digit(value, &bin) says whether an element is counted.
    template <class D, class W> __device__ void fill(D digit, W weight) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) s->low[i] = s->high[i] = 0;
        __syncthreads();
        each([&](float v, int i, bool in) {
            int bin = 0;
            in = digit(v, &bin) && in;
            add(bin, in ? weight(v, first + i) : 0);
        });
        sync();
    }
    // The bin, from 0 on, with which the weight, `above` before bin 0, reaches wanted(all of it). Each block adds up its share of bins.
    template <class N> __device__ int reached(uint64_t above, N wanted, uint64_t *want) {
        constexpr int SHARE = BINS / BLOCKS;
        const int bin = rank * SHARE + (int)threadIdx.x;
        uint64_t mine = 0, total;
        if (threadIdx.x < SHARE)
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) mine += (uint64_t)at(s->high, b)[bin] << 32 | at(s->low, b)[bin];
        const uint64_t before = above + sum_before(mine, &total);
        *want = wanted(total);
        if (before < *want && *want <= before + mine)
            for (int b = 0; b < BLOCKS; b++) {
                shared_state *to = at(s, b);
                to->above = before, to->weight = mine, to->place = bin;
            }
        sync();
        return s->place;
    }
    // The id of the element with which the running weight, in id order, exceeds goal(all of it).
    template <class W, class G> __device__ int locate(W weight, G goal) {
        const int run = (n + THREADS - 1) / THREADS | 1; // odd: the lanes' elements are in different banks
        const int from = min(n, run * (int)threadIdx.x), to = min(n, from + run);
        uint64_t mine = 0, total;
#pragma unroll 1
        for (int i = from; i < to; i++) mine += weight(slice[i], first + i);
        uint64_t before = sum_before(mine, &total);
        const uint64_t limit = goal(total);
        if (before <= limit && limit < before + mine) {
            int i = from;
            for (;; i++) {
                before += weight(slice[i], first + i);
                if (before > limit) break;
            }
            for (int b = 0; b < BLOCKS; b++) at(s, b)->place = first + i;
        }
        sync();
        return s->place;
    }

    // The cut at and above which the weight just reaches `count`, or `share` of all.
    __device__ __noinline__ uint64_t select(const measure weight, uint64_t count, float share) {
        const float best = weight.best, scale = weight.bins();
        fill([&](float v, int *bin) { return *bin = bin_of(v, best, scale), true; }, weight);
        uint64_t want;
        int bin = reached(
            0, [&](uint64_t all) { return count ? count : min(all, max((uint64_t)1, (uint64_t)ceil((double)share * (double)all))); }, &want);
        uint32_t low = least_key(bin, best, scale), high = bin ? least_key(bin - 1, best, scale) - 1 : ordered(best);
        while (s->above + s->weight != want && low < high) { // else: all of them are needed
            const uint64_t above = s->above;
            const int shift = max(0, 32 - BIN_BITS - __clz((int)(high - low)));
            fill(
                [&](float v, int *digit) {
                    const uint32_t up = ordered(v) - low;
                    *digit = BINS - 1 - (int)(up >> shift & (BINS - 1));
                    return up <= high - low;
                },
                weight);
            bin = reached(above, [&](uint64_t) { return want; }, &want);
            low += (uint32_t)(BINS - 1 - bin) << shift;
            high = min(high, low + ((1u << shift) - 1));
        }
        if (s->above + s->weight == want) return (uint64_t)low << 32;
        const uint64_t rest = want - s->above - 1; // of the ties, each of which weighs the same or, below the measure's cut, nothing
        const float tie = value_of(low);
        return packed(tie, locate([&](float v, int id) { return v == tie ? weight(v, id) : 0; }, [&](uint64_t) { return rest; }));
    }
};

// The row into the slices, capped and masked, also where it lies if that changes it.
template <int BLOCKS> __device__ void load(const team<BLOCKS> &t, float *logits, int width, int vocab, float softcap) {
    constexpr int STRIDE = 4 * team<BLOCKS>::THREADS, AT_ONCE = 4;
    float *l = logits + t.first;
    const int from = 4 * (int)threadIdx.x;
    if (width % 4 == 0) {
#pragma unroll 1
        for (int i = from; i < t.n; i += STRIDE * AT_ONCE) {
            float4 x[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (i + STRIDE * k < t.n) x[k] = *(const float4 *)(l + i + STRIDE * k);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (i + STRIDE * k < t.n) *(float4 *)(t.slice + i + STRIDE * k) = {canonical(x[k].x), canonical(x[k].y), canonical(x[k].z), canonical(x[k].w)};
        }
    } else
        for (int i = (int)threadIdx.x; i < t.n; i += team<BLOCKS>::THREADS) t.slice[i] = canonical(l[i]);
    __syncthreads(); // who reads an element need not be who wrote it
    if (softcap <= 0 && t.first + t.n <= vocab) return;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < t.n; i += team<BLOCKS>::THREADS) {
        float v = t.slice[i];
        if (softcap > 0) v = softcap * tanhf(v / softcap);
        if (t.first + i >= vocab) v = -INFINITY;
        t.slice[i] = l[i] = v;
    }
    __syncthreads();
}

// The edits of this block's elements; undo: back to the raw values.
template <int BLOCKS> __device__ void edit(team<BLOCKS> &t, const float *l, const k_edit *edits, int count, bool undo) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += team<BLOCKS>::THREADS) {
        const k_edit e = edits[i];
        if (e.token < t.first || e.token >= t.first + t.n) continue;
        const float v = l[e.token];
        t.slice[e.token - t.first] = canonical(undo ? v : (v > 0 ? v / e.repetition : v * e.repetition) + e.add);
    }
    __syncthreads();
}

// A token from the elements as they are, the best of which is `top`.
template <int BLOCKS> __device__ int sample(team<BLOCKS> &t, const k_sample_row &row, uint64_t top, int width) {
    if (row.temperature < 1e-5f || row.top_p <= 0) return id_of(top);
    const float best = value_of((uint32_t)(top >> 32)), least = row.min_p;
    measure kept = {best, 0, 0};
    if (row.top_k > 0 && row.top_k < (uint32_t)width) kept.cut = t.select(kept, row.top_k, 0);
    kept.factor = LOG2E / row.temperature;
    if (row.top_p < 1) kept.cut = max(kept.cut, t.select(kept, 0, row.top_p));
    return t.locate([=](float v, int id) { return kept.mass(v) < least ? 0 : kept(v, id); },
                    [&](uint64_t all) { return min(all - 1, (uint64_t)((double)row.uniform * (double)all)); });
}

// The best `count` elements, best first.
template <int BLOCKS> __device__ void alternatives(team<BLOCKS> &t, int count, float best, int width, float log_sum, k_sample_result *out) {
    const int there = min(count, width);
    const uint64_t cut = t.select({best, 0, 0}, (uint64_t)there, 0);
    t.each([&](float v, int i, bool in) {
        const uint64_t element = packed(v, t.first + i);
        if (!in || element < cut) return;
        shared_state *to = t.at(t.s, 0);
        to->list[atomicAdd(&to->listed, 1u)] = element;
    });
    t.sync();
    const int i = (int)threadIdx.x;
    if (t.rank || i >= count) return;
    const uint64_t mine = i < there ? t.s->list[i] : 0;
    int place = i < there ? 0 : i;
    for (int j = 0; i < there && j < there; j++) place += t.s->list[j] > mine;
    out->top_ids[place] = i < there ? id_of(mine) : INT32_MAX;
    out->top_logprobs[place] = i < there ? value_of((uint32_t)(mine >> 32)) - log_sum : -INFINITY;
}

template <int BLOCKS>
__global__ void __launch_bounds__(team<BLOCKS>::THREADS, BLOCKS == 1 ? 1 : 2)
    sample_kernel(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits, k_sample_result *results, int width, int slice, float softcap) {
    extern __shared__ __align__(16) uint8_t memory[];
    const int r = (int)blockIdx.x / BLOCKS, rank = (int)blockIdx.x % BLOCKS;
    team<BLOCKS> t = {(shared_state *)memory, (float *)(memory + sizeof(shared_state)), rank, rank * slice, 0, 0};
    if (BLOCKS == 1) t.slice = scratch + (size_t)r * slice;
    t.n = max(0, min(slice, width - t.first));
    if (threadIdx.x == 0) t.s->listed = 0;
    t.arrive();
    const k_sample_row &row = rows[r];
    k_sample_result *out = results + r;
    float *l = logits + (size_t)r * width;
    const bool drawn = row.target < 0, writes = rank == 0 && threadIdx.x == 0;
    load(t, l, width, row.vocab, softcap);
    t.wait(); // for the other blocks to have begun, too
    const uint64_t top = t.best();
    const bool fault = top >> 32 == KEY_NAN;
    if (writes) out->fault = fault;
    if (fault) return;
    const float best = value_of((uint32_t)(top >> 32));
    float sum = 0; // of a few elements
    t.each([&](float v, int, bool in) { sum += in ? exp2_fast((v - best) * LOG2E) : 0; });
    const float log_sum = best + logf((float)t.sum_of(whole(sum)) / ONE);
    if (row.top_count > 0) alternatives(t, row.top_count, best, width, log_sum, out);
    int id = row.target;
    if (drawn) {
        const bool edits_it = row.edit_count > 0;
        if (edits_it) edit(t, l, edits + row.first_edit, row.edit_count, false);
        const uint64_t first = edits_it ? t.best() : top;
        // All banned: there must still be an answer.
        id = first >> 32 == KEY_LEAST ? id_of(top) : sample(t, row, first, width);
        if (edits_it) edit(t, l, edits + row.first_edit, row.edit_count, true);
    }
    uint64_t ahead = 0;
    if (id != id_of(top)) {
        const uint64_t mine = packed(canonical(l[id]), id);
        t.each([&](float v, int i, bool in) { ahead += in && packed(v, t.first + i) > mine; });
        ahead = t.sum_of(ahead);
    }
    if (writes) out->id = id, out->logprob = l[id] - log_sum, out->rank = (uint32_t)ahead + 1;
}

template <int BLOCKS> cudaError_t launch(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits, k_sample_result *results, int count,
                                         int width, float softcap, cudaStream_t stream) {
    const int slice = ((width + BLOCKS - 1) / BLOCKS + 3) / 4 * 4;
    const size_t shared = sizeof(shared_state) + (BLOCKS > 1 ? (size_t)slice * 4 : 0);
    if (BLOCKS > 1) { // each time, since every device has its own; the same for all vocabularies, since recorded launches use it too
        const cudaError_t raised =
            cudaFuncSetAttribute(sample_kernel<BLOCKS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(sizeof(shared_state) + SLICE_MAX * 4));
        if (raised != cudaSuccess) return raised;
    }
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at[1];
    at[0].id = cudaLaunchAttributeClusterDimension, at[0].val.clusterDim.x = BLOCKS, at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
    c.gridDim = dim3((unsigned)count * BLOCKS), c.blockDim = dim3(team<BLOCKS>::THREADS), c.dynamicSmemBytes = shared, c.stream = stream;
    c.attrs = at, c.numAttrs = BLOCKS > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&c, sample_kernel<BLOCKS>, logits, scratch, rows, edits, results, width, slice, softcap);
}

} // namespace

extern "C" cudaError_t k_sample(float *logits, float *scratch, const k_sample_row *rows, const k_edit *edits, k_sample_result *results,
                                int32_t row_count, int32_t vocab, float softcap, cudaStream_t stream) {
    if (!row_count) return cudaSuccess;
    int device, major;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) return error;
    return (major >= 9 && vocab <= CLUSTER * SLICE_MAX ? launch<CLUSTER> : launch<1>)(logits, scratch, rows, edits, results, row_count, vocab, softcap, stream);
}
