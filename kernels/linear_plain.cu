// linear_plain.cu - y = x (W + sum_p scale_p S_p)^T + bias for any n, any k that is a multiple of 8, any mix of variants.
//
//   x [rows, k], W [n, k] row-major, both bf16 or both fp16 (T), S sign chunks (repack.cu), scale, bias float32, y [rows, y_stride] float32
//
// Precision: two accumulators, x W^T and x S^T with S as exact +-1; scale multiplies in float32. So the delta is exact to
// float32 and W_eff is never rounded.
// Mapping: a block of 4 warps owns 16 outputs and one tile of up to 32 rows. The warps take K64 steps in turn (a fixed split)
// and their sums are added in warp order, so results do not depend on the batch: a row alone and in any mix is bitwise equal,
// since rows of other variants meet a zeroed operand and columns of an MMA are independent.
// W leaves memory once for all variants of the tile, each variant's bits once.
// K order: inside a K64 step lane q of a quad takes k = 16q .. 16q + 15 (two 16-byte loads); W, x and signs agree on it.
#include "elements.cuh"

namespace {

template <typename T> __device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const uint32_t a[4] = {a0, a1, a2, a3};
    T::mma(d, a, b0, b1);
}

// 16 elements of a row starting at column c, as 8 pairs; columns at and past k, and absent rows, are zero.
__device__ __forceinline__ void load16(uint32_t (&v)[8], const uint16_t *row, int c, int k, bool there) {
    uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 a = there && c < k ? __ldg((const uint4 *)(row + c)) : zero;
    uint4 b = there && c + 8 < k ? __ldg((const uint4 *)(row + c + 8)) : zero;
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// The 8 sign bytes of a row's K64 block -> this lane's 8 pairs of +-1.
template <typename T> __device__ __forceinline__ void expand16(uint32_t (&v)[8], uint2 bytes, int q) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint32_t word = j % 4 < 2 ? bytes.x : bytes.y;
        uint32_t pair = __byte_perm(word, 0, j % 2 ? 0x3424 : 0x1404); // the two bytes in bits 8..15 and 24..31
        v[j] = T::pack(1.f, 1.f) ^ ((pair << (2 * q + j / 4)) & 0x80008000u);
    }
}

// The tile's segments that have a plane in this pass.
struct Planes {
    const uint8_t *bits[K_TILE_TOKENS];
    int first_row[K_TILE_TOKENS], end_row[K_TILE_TOKENS];
    int count;
};

// By warp 0. What a step needs of a segment is here then, instead of behind three loads that wait for each other.
__device__ __forceinline__ void planes_fill(Planes &p, const k_linear_args &a, const k_tile &tile, int plane, int lane) {
    const int s = tile.first_segment + lane;
    k_segment segment = {-1, 0, 0};
    const uint8_t *bits = nullptr;
    if (s < tile.end_segment) segment = a.segments[s];
    if (segment.overlay >= 0 && plane < a.overlays[segment.overlay].plane_count) bits = a.overlays[segment.overlay].bits[plane];
    const unsigned there = __ballot_sync(~0u, bits != nullptr);
    const int at = __popc(there & ((1u << lane) - 1));
    if (bits) p.bits[at] = bits, p.first_row[at] = segment.first_row, p.end_row[at] = segment.end_row;
    if (lane == 0) p.count = __popc(there);
}

// One long function: a step's x, in registers, meets W and every plane, whose sums stay there too. A tile has a segment a row at most.
template <typename T, int GROUPS> __global__ void __launch_bounds__(128) linear_kernel(const k_linear_args a) {
    __shared__ float sums[4][GROUPS * 8][17];
    __shared__ Planes planes;
    constexpr int AT_ONCE = GROUPS == 4 ? 2 : 4; // segments whose signs are fetched before the first of them is used
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const k_tile tile = a.tiles[blockIdx.y];
    const int n0 = blockIdx.x * 16, steps = (a.k + 63) / 64, chunks = (a.k + 255) / 256;
    const int row0 = n0 + g, row1 = n0 + g + 8;
    const uint16_t *w0 = a.w + (size_t)row0 * a.k, *w1 = a.w + (size_t)row1 * a.k;
    float total[GROUPS][4] = {};
    for (int plane = 0; plane <= a.planes_max; plane++) { // pass 0: the base and plane 0; pass p: plane p; none: the base alone
        if (plane && plane == a.planes_max) break;
        float base[GROUPS][4] = {}, delta[GROUPS][4] = {};
        if (a.planes_max) {
            __syncthreads();
            if (warp == 0) planes_fill(planes, a, tile, plane, lane);
            __syncthreads();
        }
        const int count = a.planes_max ? planes.count : 0;
        for (int step = warp; step < steps; step += 4) {
            const int c = step * 64 + 16 * q;
            uint32_t x[GROUPS][8];
#pragma unroll
            for (int j = 0; j < GROUPS; j++) {
                int m = tile.first_row + 8 * j + g;
                load16(x[j], a.x + (size_t)m * a.k, c, a.k, m < tile.end_row);
            }
            uint2 s0[AT_ONCE], s1[AT_ONCE];
            auto fetch = [&](int first) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    if (first + i >= count) break;
                    const uint8_t *bits = planes.bits[first + i];
                    s0[i] = row0 < a.n ? __ldg((const uint2 *)(bits + sign_offset(row0, step, chunks))) : make_uint2(0, 0);
                    s1[i] = row1 < a.n ? __ldg((const uint2 *)(bits + sign_offset(row1, step, chunks))) : make_uint2(0, 0);
                }
            };
            fetch(0);
            if (plane == 0) {
                uint32_t u[8], v[8];
                load16(u, w0, c, a.k, row0 < a.n);
                load16(v, w1, c, a.k, row1 < a.n);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < GROUPS; j++) mma<T>(base[j], u[2 * i], v[2 * i], u[2 * i + 1], v[2 * i + 1], x[j][2 * i], x[j][2 * i + 1]);
            }
            for (int first = 0; first < count; first += AT_ONCE) {
                if (first) fetch(first);
#pragma unroll
                for (int at = 0; at < AT_ONCE; at++) {
                    if (first + at >= count) break;
                    const int begin = planes.first_row[first + at], end = planes.end_row[first + at];
                    uint32_t u[8], v[8];
                    expand16<T>(u, s0[at], q);
                    expand16<T>(v, s1[at], q);
#pragma unroll
                    for (int j = 0; j < GROUPS; j++) {
                        int m = tile.first_row + 8 * j + g; // this lane's column of the MMA
                        if (begin >= tile.first_row + 8 * j + 8 || end <= tile.first_row + 8 * j) continue;
                        bool mine = m >= begin && m < end;
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            mma<T>(delta[j], u[2 * i], v[2 * i], u[2 * i + 1], v[2 * i + 1], mine ? x[j][2 * i] : 0, mine ? x[j][2 * i + 1] : 0);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int m = tile.first_row + 8 * j + 2 * q + (i & 1), n = i < 2 ? row0 : row1;
                int overlay = m < tile.end_row ? a.row_overlay[m] : -1;
                float scale = 0;
                if (overlay >= 0 && n < a.n && plane < a.overlays[overlay].plane_count) scale = a.overlays[overlay].scale[plane][n];
                total[j][i] += base[j][i] + scale * delta[j][i];
            }
    }
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[warp][8 * j + 2 * q + (i & 1)][g + 8 * (i / 2)] = total[j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < GROUPS * 8 * 16; i += 128) {
        int t = i / 16, m = tile.first_row + t, n = n0 + i % 16;
        if (m >= tile.end_row || n >= a.n) continue;
        float y = sums[0][t][i % 16] + sums[1][t][i % 16] + sums[2][t][i % 16] + sums[3][t][i % 16];
        int overlay = a.row_overlay[m];
        const float *bias = overlay >= 0 && a.overlays[overlay].bias ? a.overlays[overlay].bias : a.bias;
        a.y[(size_t)m * a.y_stride + n] = bias ? y + bias[n] : y;
    }
}

template <typename T> void launch(const k_linear_args &a, dim3 grid, cudaStream_t stream) {
    if (a.tile_rows_max <= 8) linear_kernel<T, 1><<<grid, 128, 0, stream>>>(a);
    else if (a.tile_rows_max <= 16) linear_kernel<T, 2><<<grid, 128, 0, stream>>>(a);
    else linear_kernel<T, 4><<<grid, 128, 0, stream>>>(a);
}

} // namespace

extern "C" cudaError_t k_linear_plain(const k_linear_args *args, cudaStream_t stream) {
    const k_linear_args &a = *args;
    if (a.k % 8 || a.n <= 0 || a.k <= 0 || a.tile_rows_max > K_TILE_TOKENS) return cudaErrorInvalidValue;
    if (!a.tile_count) return cudaSuccess;
    dim3 grid((unsigned)((a.n + 15) / 16), (unsigned)a.tile_count);
    if (a.fp16) launch<fp16_type>(a, grid, stream);
    else launch<bf16_type>(a, grid, stream);
    return cudaGetLastError();
}
