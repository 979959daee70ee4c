// norm_embed.cu - embedding rows (with signs), residual + RMSNorm, gated activation, row gather.
// The residual stream is float32; what feeds an MMA is 16-bit (T). Gamma is looked up by row, since each variant has its own.
#include "elements.cuh"

namespace {

constexpr int NORM_THREADS = 512;

// residual[m][i] = scale * (E[token][i] + sum_p scale_p[token] S_p[token][i]), 0 where the table has no such row. One block per row.
template <typename T> __global__ void __launch_bounds__(256) embed_kernel(const k_embed_args a) {
    const int m = blockIdx.x, token = a.tokens[m] - a.first, overlay = a.row_overlay[m], chunks = (a.hidden + 255) / 256;
    if ((unsigned)token >= (unsigned)a.vocab) {
        for (int i = threadIdx.x; i < a.hidden; i += blockDim.x) a.residual[(size_t)m * a.hidden + i] = 0;
        return;
    }
    const uint16_t *from = a.embed + (size_t)token * a.hidden;
    const k_overlay_linear *o = overlay >= 0 ? a.overlays + (size_t)(token / a.block_rows) * a.overlay_count + overlay : nullptr;
    const int row = token % a.block_rows, planes = o ? (int)o->plane_count : 0;
    for (int i = threadIdx.x; i < a.hidden; i += blockDim.x) {
        float v = T::load(from[i]);
        for (int p = 0; p < planes; p++) v += o->scale[p][row] * sign_at(o->bits[p], row, i, chunks);
        a.residual[(size_t)m * a.hidden + i] = a.scale * v;
    }
}

// If add: residual += post ? rms(proj) * post_gamma : proj. normed = rms(residual) * gamma. One block per row; a thread keeps
// its PARTS pieces of eight neighbours in registers, so that the row is read and written once. Gamma is no kernel's output and
// fetched before the kernel before has ended.
template <typename T, int PARTS> __global__ void __launch_bounds__(NORM_THREADS) norm_kernel(const __grid_constant__ k_norm_args a) {
    __shared__ float red[32];
    constexpr bool EARLY = PARTS <= 2; // as many registers as there are
    let_next_start();
    const int m = blockIdx.x, at = (int)threadIdx.x, step = (int)blockDim.x, pieces = a.width / 8, overlay = a.row_overlay[m];
    const float *own = overlay >= 0 ? a.gammas[overlay] : nullptr, *gamma = own ? own : a.gamma;
    float weight[EARLY ? PARTS : 1][8], r[PARTS][8];
    if (EARLY)
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (at + j * step < pieces) load8(weight[EARLY ? j : 0], gamma, at + j * step);
    wait_for_last();
    const size_t row = (size_t)m * pieces;
#pragma unroll
    for (int j = 0; j < PARTS; j++)
        if (at + j * step < pieces) load8(r[j], a.residual, row + at + j * step);
    const float one = a.plus_one ? 1.f : 0.f;
    if (a.add) {
        float p[PARTS][8], square = 0, factor = 1;
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (at + j * step < pieces) {
                load8_any<T>(p[j], a.proj, row + at + j * step, a.proj_half);
                square += sum_of_squares(p[j]);
            }
        const float *post = nullptr;
        if (a.post_gamma) {
            const float *own_post = overlay >= 0 ? a.post_gammas[overlay] : nullptr;
            post = own_post ? own_post : a.post_gamma;
            factor = rsqrtf(block_sum(square, red) / a.width + a.eps);
        }
#pragma unroll
        for (int j = 0; j < PARTS; j++)
            if (at + j * step < pieces) {
                float g[8];
                if (post) load8(g, post, at + j * step);
#pragma unroll
                for (int i = 0; i < 8; i++) r[j][i] += post ? p[j][i] * factor * (one + g[i]) : p[j][i];
                store8(a.residual, row + at + j * step, r[j]);
            }
    }
    float square = 0;
#pragma unroll
    for (int j = 0; j < PARTS; j++)
        if (at + j * step < pieces) square += sum_of_squares(r[j]);
    const float factor = rsqrtf(block_sum(square, red) / a.width + a.eps);
#pragma unroll
    for (int j = 0; j < PARTS; j++)
        if (at + j * step < pieces) {
            if (!EARLY) load8(weight[0], gamma, at + j * step);
#pragma unroll
            for (int i = 0; i < 8; i++) r[j][i] *= factor * (one + weight[EARLY ? j : 0][i]);
            store8<T>(a.normed, row + at + j * step, r[j]);
        }
}

// act[m][i] = f(gate[m][i]) * up[m][i], eight neighbours a thread
template <typename T> __global__ void __launch_bounds__(256) gate_kernel(const __grid_constant__ k_gate_args a) {
    let_next_start();
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), pieces = a.width / 8;
    const size_t in = (size_t)blockIdx.y * (a.in_stride / 8) + i;
    wait_for_last();
    if (i >= pieces) return;
    float g[8], u[8];
    load8_any<T>(g, a.gate, in, a.in_half);
    load8_any<T>(u, a.up, in, a.in_half);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float v = g[j];
        // gelu: 1 + tanh(t) = 2 / (1 + exp(-2t))
        const float t = a.gelu ? 1.5957691216057308f * (v + 0.044715f * v * v * v) : v;
        g[j] = v / (1.f + __expf(-t)) * u[j];
    }
    store8<T>(a.act, (size_t)blockIdx.y * pieces + i, g);
}

__global__ void __launch_bounds__(256) gather_kernel(uint16_t *dst, const uint16_t *src, const int32_t *rows, int width) {
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        dst[(size_t)blockIdx.x * width + i] = src[(size_t)rows[blockIdx.x] * width + i];
}

template <typename A> cudaError_t launch(void (*kernel)(A), const A &args, dim3 grid, unsigned threads, bool overlap, cudaStream_t stream) {
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at[1];
    at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = grid, c.blockDim = dim3(threads), c.stream = stream, c.attrs = at, c.numAttrs = overlap ? 1 : 0;
    return cudaLaunchKernelEx(&c, kernel, args);
}

template <typename T> cudaError_t launch_norm(const k_norm_args &a, cudaStream_t stream) {
    const int pieces = a.width / 8, parts = (pieces + NORM_THREADS - 1) / NORM_THREADS;
    const unsigned threads = parts > 1 ? NORM_THREADS : (unsigned)(pieces + 31) / 32 * 32;
    const dim3 grid((unsigned)a.rows);
    if (parts <= 1) return launch(norm_kernel<T, 1>, a, grid, threads, a.overlap, stream);
    if (parts <= 2) return launch(norm_kernel<T, 2>, a, grid, threads, a.overlap, stream);
    if (parts <= 4) return launch(norm_kernel<T, 4>, a, grid, threads, a.overlap, stream);
    return cudaErrorInvalidValue;
}

} // namespace

extern "C" cudaError_t k_embed(const k_embed_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    return launch(a->fp16 ? embed_kernel<fp16_type> : embed_kernel<bf16_type>, *a, dim3((unsigned)a->rows), 256, false, stream);
}

extern "C" cudaError_t k_norm_residual(const k_norm_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    if (a->width % 8) return cudaErrorInvalidValue;
    return a->fp16 ? launch_norm<fp16_type>(*a, stream) : launch_norm<bf16_type>(*a, stream);
}

extern "C" cudaError_t k_gate(const k_gate_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    if (a->width % 8 || a->in_stride % 8) return cudaErrorInvalidValue;
    const dim3 grid((unsigned)(a->width / 8 + 255) / 256, (unsigned)a->rows);
    return launch(a->fp16 ? gate_kernel<fp16_type> : gate_kernel<bf16_type>, *a, grid, 256, a->overlap, stream);
}

extern "C" cudaError_t k_gather_rows(uint16_t *dst, const uint16_t *src, const int32_t *rows, int32_t count, int32_t width, cudaStream_t stream) {
    if (!count) return cudaSuccess;
    gather_kernel<<<(unsigned)count, 256, 0, stream>>>(dst, src, rows, width);
    return cudaGetLastError();
}
