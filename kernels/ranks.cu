// ranks.cu - sums and gathers between the devices of one process, through windows in each other's memory.
//
// A call is a turn, which every rank takes in the same order with the same sizes. A rank writes what it has into the window of every
// other in lines of 16 bytes, 8 of them data and with each half the turn's flag, and reads the others' lines from its own window: a
// half and its flag are one 64-bit word, so no fence orders them and one trip over the link is all that passes. Sums are made in
// float32 in the order of the ranks, so all of them have the same bits.
//
// Windows have two slots, used in turn, and nothing is reset: a rank that has every line of turn t + 1 knows that the others have read
// turn t, whose slot comes next. The flag is the number of the turn, kept in device memory so that a recorded launch may be replayed;
// it comes again after 2^31 turns, and every 2^30 a turn of each slot writes all lines, so that an old line is never taken for a new one.
//
// A wait ends at its deadline, or when the host says so: then the rank is lost, this and later turns wait for nobody, their output
// means nothing, and control[1] tells the host. A block waits for the block of the same index alone, after it has written all that
// others wait for. Where ranks share a device, blocks that wait must leave it multiprocessors with nothing on them: a kernel that
// divides shared memory differently starts on no other (blocks_max).
#include "elements.cuh"
#include "ranks.h"

namespace {

constexpr int THREADS = 512;
constexpr uint32_t FLAG = 0x80000000u, CLEAN = 0x3fffffffu;
// Looks at a line between two at the deadline and the host's word, 5 to 10 ms. That one goes over the bus, from every warp that waits: each
// 256 looks they took half a millisecond, in which the others had waited long enough to do the same, and so on from sum to sum.
constexpr uint32_t PATIENCE = 1 << 14;
enum { TURNS, DONE, LOST };

struct turn {
    uint32_t taken;
    size_t slot; // its first line in a window
    bool lost;
    uint64_t since; // when waiting began
};

__device__ __forceinline__ unsigned look(const unsigned *at) {
    unsigned v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ void tell(unsigned *at, unsigned v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }

__device__ __forceinline__ turn turn_begin(const k_ranks &r) {
    const uint32_t taken = look(&r.state[TURNS]);
    return {taken, (size_t)(taken & 1) * r.rank_count * r.lines_max, look(&r.state[LOST]) != 0, 0};
}

// By the last block: none is still to begin.
__device__ __forceinline__ void turn_end(const k_ranks &r, const turn &t) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(&r.state[DONE], 1u) != gridDim.x - 1) return;
    tell(&r.state[DONE], 0);
    tell(&r.state[TURNS], (t.taken + 1) & ~FLAG);
}

__device__ __forceinline__ void push(const k_ranks &r, const turn &t, uint32_t line, uint2 data) {
    const uint64_t flag = (uint64_t)(t.taken | FLAG) << 32, a = flag | data.x, b = flag | data.y;
    const size_t at = (t.slot + (size_t)r.rank * r.lines_max + line) * K_LINE_BYTES;
    for (int i = 1; i < r.rank_count; i++) {
        int to = r.rank + i;
        if (to >= r.rank_count) to -= r.rank_count;
        asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(r.windows[to] + at), "l"(a), "l"(b) : "memory");
    }
}

// The lines that the turn does not use, when it is time.
__device__ __forceinline__ void push_unused(const k_ranks &r, const turn &t, uint32_t used) {
    if ((t.taken & CLEAN) >= 2) return;
    for (uint32_t line = used + blockIdx.x * blockDim.x + threadIdx.x; line < r.lines_max; line += gridDim.x * blockDim.x) push(r, t, line, make_uint2(0, 0));
}

__device__ __forceinline__ bool give_up(const k_ranks &r, turn &t) {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (!t.since) t.since = now;
    const bool late = now - t.since > r.wait_ns;
    if (!late && !look(&r.control[0]) && !look(&r.state[LOST])) return false;
    if (late) tell(&r.control[1], 1);
    tell(&r.state[LOST], 1);
    return true;
}

// Data of a line that rank `from` writes.
__device__ __forceinline__ uint2 take(const k_ranks &r, turn &t, int from, uint32_t line) {
    const uint8_t *at = r.windows[r.rank] + (t.slot + (size_t)from * r.lines_max + line) * K_LINE_BYTES;
    const uint32_t flag = t.taken | FLAG;
    for (uint32_t asked = 1; !t.lost; asked++) {
        uint64_t a, b;
        asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
        if ((uint32_t)(a >> 32) == flag && (uint32_t)(b >> 32) == flag) return make_uint2((uint32_t)a, (uint32_t)b);
        if (asked % PATIENCE == 0) t.lost = give_up(r, t);
    }
    return make_uint2(0, 0);
}

// Four 16-bit elements or two float32, as float32.
template <typename T> struct piece {
    static constexpr int N = 4;
    static __device__ __forceinline__ void add(float (&sum)[N], uint2 v) {
        sum[0] += T::load((uint16_t)v.x), sum[1] += T::load((uint16_t)(v.x >> 16));
        sum[2] += T::load((uint16_t)v.y), sum[3] += T::load((uint16_t)(v.y >> 16));
    }
    static __device__ __forceinline__ uint2 pack(const float (&v)[N]) { return make_uint2(T::pack(v[0], v[1]), T::pack(v[2], v[3])); }
};
template <> struct piece<float> {
    static constexpr int N = 2;
    static __device__ __forceinline__ void add(float (&sum)[N], uint2 v) { sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y); }
    static __device__ __forceinline__ uint2 pack(const float (&v)[N]) { return make_uint2(__float_as_uint(v[0]), __float_as_uint(v[1])); }
};

template <typename E> __device__ __forceinline__ void sum_line(float (&sum)[piece<E>::N], const k_ranks &r, turn &t, uint32_t line, uint2 own) {
#pragma unroll
    for (int i = 0; i < piece<E>::N; i++) sum[i] = 0;
    for (int from = 0; from < r.rank_count; from++) piece<E>::add(sum, from == r.rank ? own : take(r, t, from, line));
}

// The 8 bytes at a place where `left` bytes are, an even number.
__device__ __forceinline__ uint2 read_line(const uint8_t *from, uint64_t left) {
    const uint32_t *words = (const uint32_t *)from;
    if (left >= 8) return make_uint2(words[0], words[1]);
    const uint16_t *halves = (const uint16_t *)from;
    uint2 v = make_uint2(halves[0], 0);
    if (left > 2) v.x |= (uint32_t)halves[1] << 16;
    if (left > 4) v.y = halves[2];
    return v;
}
__device__ __forceinline__ void write_line(uint8_t *to, uint64_t left, uint2 v) {
    if (left >= 8) {
        ((uint32_t *)to)[0] = v.x, ((uint32_t *)to)[1] = v.y;
        return;
    }
    uint16_t *halves = (uint16_t *)to;
    halves[0] = (uint16_t)v.x;
    if (left > 2) halves[1] = (uint16_t)(v.x >> 16);
    if (left > 4) halves[2] = (uint16_t)v.y;
}

template <typename E> __global__ void __launch_bounds__(THREADS) sum_kernel(const __grid_constant__ k_ranks r, uint8_t *data, uint32_t bytes) {
    turn t = turn_begin(r);
    const uint32_t lines = (bytes + 7) / 8, first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    for (uint32_t line = first; line < lines; line += step) push(r, t, line, read_line(data + (size_t)line * 8, bytes - line * 8));
    push_unused(r, t, lines);
    for (uint32_t line = first; line < lines; line += step) {
        uint8_t *at = data + (size_t)line * 8;
        float sum[piece<E>::N];
        sum_line<E>(sum, r, t, line, read_line(at, bytes - line * 8));
        write_line(at, bytes - line * 8, piece<E>::pack(sum));
    }
    turn_end(r, t);
}

__global__ void __launch_bounds__(THREADS) gather_kernel(const __grid_constant__ k_ranks r, const uint8_t *send, uint8_t *receive, uint32_t bytes, uint64_t stride) {
    turn t = turn_begin(r);
    const uint32_t lines = (bytes + 7) / 8, first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    for (uint32_t line = first; line < lines; line += step) push(r, t, line, read_line(send + (size_t)line * 8, bytes - line * 8));
    push_unused(r, t, lines);
    for (uint32_t line = first; line < lines; line += step) {
        const uint32_t left = bytes - line * 8;
        const uint2 own = read_line(send + (size_t)line * 8, left);
        for (int from = 0; from < r.rank_count; from++)
            write_line(receive + from * stride + (size_t)line * 8, left, from == r.rank ? own : take(r, t, from, line));
    }
    turn_end(r, t);
}

// The sum over the ranks of proj, then norm_embed.cu's norm_kernel with add. A block takes whole rows; the row's sum, and then its
// residual, are in shared memory, each element its thread's. T: element type, E: proj's.
template <typename T, typename E> __global__ void __launch_bounds__(THREADS) sum_norm_kernel(const __grid_constant__ k_ranks r, const __grid_constant__ k_norm_args a) {
    constexpr int N = piece<E>::N;
    extern __shared__ __align__(16) float row[]; // [width]
    __shared__ float red[THREADS / 32];
    // What comes next may take what this device has left, which others need when ranks share it: then it must wait.
    if (r.early) let_next_start();
    wait_for_last();
    turn t = turn_begin(r);
    const uint2 *proj = (const uint2 *)a.proj;
    const uint32_t per_row = a.width / N;
    for (int m = blockIdx.x; m < a.rows; m += gridDim.x)
        for (uint32_t i = threadIdx.x; i < per_row; i += THREADS) push(r, t, m * per_row + i, proj[(size_t)m * per_row + i]);
    push_unused(r, t, a.rows * per_row);
    const float one = a.plus_one ? 1.f : 0.f;
    for (int m = blockIdx.x; m < a.rows; m += gridDim.x) {
        const int overlay = a.row_overlay[m];
        const float *own = overlay >= 0 ? a.gammas[overlay] : nullptr, *gamma = own ? own : a.gamma, *post = nullptr;
        float square = 0, factor = 1;
        for (uint32_t i = threadIdx.x; i < per_row; i += THREADS) {
            float sum[N];
            sum_line<E>(sum, r, t, m * per_row + i, proj[(size_t)m * per_row + i]);
#pragma unroll
            for (int e = 0; e < N; e++) row[i * N + e] = sum[e], square += sum[e] * sum[e];
        }
        if (a.post_gamma) {
            const float *own_post = overlay >= 0 ? a.post_gammas[overlay] : nullptr;
            post = own_post ? own_post : a.post_gamma;
            factor = rsqrtf(block_sum(square, red) / a.width + a.eps);
        }
        float *residual = a.residual + (size_t)m * a.width;
        square = 0;
        for (uint32_t i = threadIdx.x; i < per_row; i += THREADS)
#pragma unroll
            for (int e = 0; e < N; e++) {
                const uint32_t c = i * N + e;
                const float v = residual[c] + (post ? row[c] * factor * (one + post[c]) : row[c]);
                residual[c] = row[c] = v;
                square += v * v;
            }
        factor = rsqrtf(block_sum(square, red) / a.width + a.eps);
        for (uint32_t i = threadIdx.x; i < per_row; i += THREADS)
#pragma unroll
            for (int e = 0; e < N; e++) {
                const uint32_t c = i * N + e;
                a.normed[(size_t)m * a.width + c] = T::store(row[c] * factor * (one + gamma[c]));
            }
    }
    if (!r.early) let_next_start();
    turn_end(r, t);
}

__global__ void __launch_bounds__(256) join_logits_kernel(float *whole, const float *parts, int rows, int each, int total, int width) {
    const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= total) return;
    const int rank = i / each;
    whole[(size_t)row * width + i] = parts[((size_t)rank * rows + row) * each + i % each];
}

dim3 grid_for(const k_ranks *ranks, uint32_t lines) {
    const uint32_t blocks = (lines + THREADS - 1) / THREADS, most = (uint32_t)ranks->blocks_max;
    return dim3(blocks < most ? blocks : most);
}

bool fits(const k_ranks *ranks, uint32_t bytes) { return bytes % 2 == 0 && (bytes + 7) / 8 <= ranks->lines_max; }

} // namespace

extern "C" uint64_t k_ranks_window_bytes(int rank_count, uint32_t lines_max) { return (uint64_t)2 * rank_count * lines_max * K_LINE_BYTES; }

extern "C" cudaError_t k_ranks_sum(const k_ranks *ranks, void *data, uint32_t bytes, k_ranks_type type, cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    if (!fits(ranks, bytes)) return cudaErrorInvalidValue;
    const dim3 grid = grid_for(ranks, (bytes + 7) / 8);
    uint8_t *at = (uint8_t *)data;
    if (type == K_RANKS_F32) sum_kernel<float><<<grid, THREADS, 0, stream>>>(*ranks, at, bytes);
    else if (type == K_RANKS_BF16) sum_kernel<bf16_type><<<grid, THREADS, 0, stream>>>(*ranks, at, bytes);
    else sum_kernel<fp16_type><<<grid, THREADS, 0, stream>>>(*ranks, at, bytes);
    return cudaGetLastError();
}

extern "C" cudaError_t k_ranks_gather(const k_ranks *ranks, const void *send, void *receive, uint32_t bytes, uint64_t stride, cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    if (!fits(ranks, bytes)) return cudaErrorInvalidValue;
    gather_kernel<<<grid_for(ranks, (bytes + 7) / 8), THREADS, 0, stream>>>(*ranks, (const uint8_t *)send, (uint8_t *)receive, bytes, stride);
    return cudaGetLastError();
}

extern "C" bool k_ranks_norm_takes(const k_ranks *ranks, int rows, int width, bool proj_half) {
    const uint64_t lines = (uint64_t)rows * width / (proj_half ? 4 : 2);
    return width % 8 == 0 && width <= K_RANKS_NORM_WIDTH && lines <= ranks->lines_max;
}

extern "C" cudaError_t k_ranks_norm(const k_ranks *ranks, const k_norm_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    if (!a->add || !k_ranks_norm_takes(ranks, a->rows, a->width, a->proj_half)) return cudaErrorInvalidValue;
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at[1];
    at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3((unsigned)(a->rows < ranks->blocks_max ? a->rows : ranks->blocks_max)), c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = (size_t)a->width * 4, c.stream = stream, c.attrs = at, c.numAttrs = a->overlap ? 1 : 0;
    void (*const kernel)(k_ranks, k_norm_args) = a->fp16 ? a->proj_half ? sum_norm_kernel<fp16_type, fp16_type> : sum_norm_kernel<fp16_type, float>
                                               : a->proj_half ? sum_norm_kernel<bf16_type, bf16_type> : sum_norm_kernel<bf16_type, float>;
    return cudaLaunchKernelEx(&c, kernel, *ranks, *a);
}

extern "C" cudaError_t k_join_logits(float *whole, const float *parts, int rows, int each, int total, int width, cudaStream_t stream) {
    if (!rows) return cudaSuccess;
    join_logits_kernel<<<dim3((unsigned)(total + 255) / 256, (unsigned)rows), 256, 0, stream>>>(whole, parts, rows, each, total, width);
    return cudaGetLastError();
}
