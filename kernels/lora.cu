// lora.cu - low-rank adapters on top of what the linears wrote: t = scale x A^T, then y += t B^T, all sums in float32.
//
//   x [rows, k] 16-bit (T), A [rank, k], B [n, rank] float32, t [rows, t_stride] float32, y [rows, y_stride] float32 or T
//
// Precision: into a float32 y the term is added before any rounding. A 16-bit y was rounded once already and is rounded again: of what
// is exact it is off by at most u (|y without the term| + |y|), u = 2^-8 for bf16 and 2^-11 for fp16, where one rounding gives u |y|.
// Order: every sum of a row has an order that follows from k and the rank alone, and no row sees another: alone and in any batch a row
// gets the same bits.
// Launched without overlap: the linear before has ended, and the next kernel finds all of y.
#include "elements.cuh"
#include "lora.h"

namespace {

constexpr int ROWS = K_LORA_ROWS, DOWN_THREADS = 256, DOWN_WARPS = DOWN_THREADS / 32, DOWN_RANKS = 4, UP_COLUMNS = 128, UP_RANKS = 32;
static_assert(ROWS == 8 && ROWS * DOWN_RANKS <= DOWN_THREADS, "a thread a sum; t in two float4");

// Grid: (tile, DOWN_RANKS rows of A, piece). The threads share k, eight neighbours at a time, and each multiplies them for every row.
template <typename T> __global__ void __launch_bounds__(DOWN_THREADS) down_kernel(const __grid_constant__ k_lora_args a) {
    __shared__ float sums[DOWN_WARPS][DOWN_RANKS * ROWS];
    const k_lora_tile tile = a.tiles[blockIdx.x];
    const k_lora_linear l = a.pieces[blockIdx.z].linears[tile.overlay];
    const int r0 = (int)blockIdx.y * DOWN_RANKS, ranks = l.rank - r0, rows = tile.end_row - tile.first_row, warp = (int)threadIdx.x / 32;
    if (ranks <= 0) return;
    float sum[DOWN_RANKS][ROWS] = {};
    for (int i = (int)threadIdx.x; i < a.k / 8; i += DOWN_THREADS) {
        float w[DOWN_RANKS][8] = {};
#pragma unroll
        for (int r = 0; r < DOWN_RANKS; r++)
            if (r < ranks) load8(w[r], l.a + (size_t)(r0 + r) * a.k, i);
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            if (j >= rows) break;
            float x[8];
            load8_any<T>(x, a.x + (size_t)(tile.first_row + j) * a.k, i, true);
#pragma unroll
            for (int r = 0; r < DOWN_RANKS; r++)
#pragma unroll
                for (int e = 0; e < 8; e++) sum[r][j] = fmaf(x[e], w[r][e], sum[r][j]);
        }
    }
#pragma unroll
    for (int r = 0; r < DOWN_RANKS; r++)
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const float v = warp_sum(sum[r][j]);
            if (threadIdx.x % 32 == 0) sums[warp][r * ROWS + j] = v;
        }
    __syncthreads();
    const int r = (int)threadIdx.x / ROWS, j = (int)threadIdx.x % ROWS;
    if (r >= DOWN_RANKS || r >= ranks || j >= rows) return;
    float total = 0;
    for (int w = 0; w < DOWN_WARPS; w++) total += sums[w][threadIdx.x];
    a.t[((size_t)blockIdx.z * a.t_rows + tile.first_row + j) * a.t_stride + r0 + r] = l.scale * total;
}

// Grid: (tile, UP_COLUMNS outputs, piece); a thread an output, for every row. B comes through shared memory, in which its rows are an
// odd number of words apart.
template <typename T> __global__ void __launch_bounds__(UP_COLUMNS) up_kernel(const __grid_constant__ k_lora_args a) {
    __shared__ float b[UP_COLUMNS][UP_RANKS + 1];
    __shared__ float4 t[UP_RANKS][ROWS / 4];
    const k_lora_tile tile = a.tiles[blockIdx.x];
    const k_lora_piece &piece = a.pieces[blockIdx.z];
    const k_lora_linear l = piece.linears[tile.overlay];
    const int at = (int)threadIdx.x, n0 = (int)blockIdx.y * UP_COLUMNS, n = n0 + at, rows = tile.end_row - tile.first_row;
    if (!l.rank || n0 >= piece.n) return;
    const float *from = a.t + ((size_t)blockIdx.z * a.t_rows + tile.first_row) * a.t_stride;
    float sum[ROWS] = {};
    for (int r0 = 0; r0 < l.rank; r0 += UP_RANKS) {
        const int ranks = l.rank - r0 < UP_RANKS ? l.rank - r0 : UP_RANKS;
        __syncthreads();
        for (int i = at; i < UP_COLUMNS * ranks; i += UP_COLUMNS) {
            const int row = i / ranks, r = i % ranks;
            b[row][r] = n0 + row < piece.n ? l.b[(size_t)(n0 + row) * l.rank + r0 + r] : 0;
        }
        for (int i = at; i < ROWS * ranks; i += UP_COLUMNS) {
            const int j = i / ranks, r = i % ranks;
            ((float *)t[r])[j] = j < rows ? from[(size_t)j * a.t_stride + r0 + r] : 0;
        }
        __syncthreads();
        for (int r = 0; r < ranks; r++) {
            const float4 low = t[r][0], high = t[r][1];
            const float v[ROWS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < ROWS; j++) sum[j] = fmaf(v[j], b[at][r], sum[j]);
        }
    }
    if (n >= piece.n) return;
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        if (j >= rows) break;
        const size_t i = (size_t)(tile.first_row + j) * piece.y_stride + n;
        if (a.y_half) {
            uint16_t *y = (uint16_t *)piece.y + i;
            *y = T::store(T::load(*y) + sum[j]);
        } else
            ((float *)piece.y)[i] += sum[j];
    }
}

// Grid: a block a row.
__global__ void __launch_bounds__(256) embed_kernel(const k_lora_embed_args a) {
    const int m = (int)blockIdx.x, token = a.tokens[m] - a.first, overlay = a.row_overlay[m];
    if (overlay < 0 || (unsigned)token >= (unsigned)a.vocab) return;
    const k_lora_linear l = a.linears[(size_t)(token / a.block_rows) * a.overlay_count + overlay];
    const float *b = l.b + (size_t)(token % a.block_rows) * l.rank;
    if (!l.rank) return;
    for (int i = (int)threadIdx.x; i < a.hidden; i += 256) {
        float v = 0;
        for (int r = 0; r < l.rank; r++) v = fmaf(l.scale * b[r], l.a[(size_t)r * a.hidden + i], v);
        a.residual[(size_t)m * a.hidden + i] += a.scale * v;
    }
}

bool takes(const k_lora_args &a) {
    if (a.k % 8 || a.k <= 0 || a.piece_count < 1 || a.piece_count > K_LORA_PIECES_MAX) return false;
    return a.rank_max <= a.t_stride;
}

dim3 grid_of(const k_lora_args &a, int y) { return dim3((unsigned)a.tile_count, (unsigned)y, (unsigned)a.piece_count); }

} // namespace

extern "C" cudaError_t k_lora_down(const k_lora_args *args, cudaStream_t stream) {
    const k_lora_args &a = *args;
    if (!takes(a)) return cudaErrorInvalidValue;
    if (!a.tile_count || !a.rank_max) return cudaSuccess;
    const dim3 grid = grid_of(a, (a.rank_max + DOWN_RANKS - 1) / DOWN_RANKS);
    if (a.fp16) down_kernel<fp16_type><<<grid, DOWN_THREADS, 0, stream>>>(a);
    else down_kernel<bf16_type><<<grid, DOWN_THREADS, 0, stream>>>(a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_lora_up(const k_lora_args *args, cudaStream_t stream) {
    const k_lora_args &a = *args;
    int n = 0;
    if (!takes(a)) return cudaErrorInvalidValue;
    for (int p = 0; p < a.piece_count; p++) n = a.pieces[p].n > n ? a.pieces[p].n : n;
    if (!a.tile_count || !a.rank_max || !n) return cudaSuccess;
    const dim3 grid = grid_of(a, (n + UP_COLUMNS - 1) / UP_COLUMNS);
    if (a.fp16) up_kernel<fp16_type><<<grid, UP_COLUMNS, 0, stream>>>(a);
    else up_kernel<bf16_type><<<grid, UP_COLUMNS, 0, stream>>>(a);
    return cudaGetLastError();
}

extern "C" cudaError_t k_lora_embed(const k_lora_embed_args *args, cudaStream_t stream) {
    if (!args->rows) return cudaSuccess;
    embed_kernel<<<(unsigned)args->rows, 256, 0, stream>>>(*args);
    return cudaGetLastError();
}
