// norm_embed.cu - embedding rows (with signs), residual + RMSNorm, gated activation, row gather.
// The residual stream is float32; what feeds an MMA is 16-bit (T). Gamma is looked up by row, since each variant has its own.
#include "elements.cuh"

namespace {

// Lets the next kernel start fetching its weights, then waits for the kernel before (both matter on sm_90 only).
__device__ __forceinline__ void overlap() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

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

// If add: residual += post ? rms(proj) * post_gamma : proj. normed = rms(residual) * gamma. One block per row.
template <typename T> __global__ void __launch_bounds__(256) norm_kernel(const k_norm_args a) {
    __shared__ float red[8];
    overlap();
    const int m = blockIdx.x;
    const int overlay = a.row_overlay[m];
    const float *own = overlay >= 0 ? a.gammas[overlay] : nullptr, *gamma = own ? own : a.gamma;
    const float one = a.plus_one ? 1.f : 0.f;
    float *r = a.residual + (size_t)m * a.width;
    if (a.add) {
        const size_t p = (size_t)m * a.width;
        float factor = 1;
        const float *post = nullptr;
        if (a.post_gamma) {
            const float *own_post = overlay >= 0 ? a.post_gammas[overlay] : nullptr;
            post = own_post ? own_post : a.post_gamma;
            float square = 0;
            for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
                float v = load_any<T>(a.proj, p + i, a.proj_half);
                square += v * v;
            }
            factor = rsqrtf(block_sum(square, red) / a.width + a.eps);
        }
        for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
            float v = load_any<T>(a.proj, p + i, a.proj_half);
            r[i] += post ? v * factor * (one + post[i]) : v;
        }
    }
    float square = 0;
    for (int i = threadIdx.x; i < a.width; i += blockDim.x) square += r[i] * r[i];
    float factor = rsqrtf(block_sum(square, red) / a.width + a.eps);
    for (int i = threadIdx.x; i < a.width; i += blockDim.x)
        a.normed[(size_t)m * a.width + i] = T::store(r[i] * factor * (one + gamma[i]));
}

// act[m][i] = f(gate[m][i]) * up[m][i]
template <typename T> __global__ void __launch_bounds__(256) gate_kernel(const k_gate_args a) {
    overlap();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
    if (i >= a.width) return;
    float g = load_any<T>(a.gate, (size_t)m * a.in_stride + i, a.in_half);
    float f = a.gelu ? 0.5f * g * (1.f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g))) : g / (1.f + expf(-g));
    a.act[(size_t)m * a.width + i] = T::store(f * load_any<T>(a.up, (size_t)m * a.in_stride + i, a.in_half));
}

__global__ void __launch_bounds__(256) gather_kernel(uint16_t *dst, const uint16_t *src, const int32_t *rows, int width) {
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        dst[(size_t)blockIdx.x * width + i] = src[(size_t)rows[blockIdx.x] * width + i];
}

template <typename A> cudaError_t launch(void (*kernel)(A), const A &args, dim3 grid, bool overlap, cudaStream_t stream) {
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at[1];
    at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = grid, c.blockDim = dim3(256), c.stream = stream, c.attrs = at, c.numAttrs = overlap ? 1 : 0;
    return cudaLaunchKernelEx(&c, kernel, args);
}

} // namespace

extern "C" cudaError_t k_embed(const k_embed_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    return launch(a->fp16 ? embed_kernel<fp16_type> : embed_kernel<bf16_type>, *a, dim3((unsigned)a->rows), false, stream);
}

extern "C" cudaError_t k_norm_residual(const k_norm_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    return launch(a->fp16 ? norm_kernel<fp16_type> : norm_kernel<bf16_type>, *a, dim3((unsigned)a->rows), a->overlap, stream);
}

extern "C" cudaError_t k_gate(const k_gate_args *a, cudaStream_t stream) {
    if (!a->rows) return cudaSuccess;
    const dim3 grid((unsigned)(a->width + 255) / 256, (unsigned)a->rows);
    return launch(a->fp16 ? gate_kernel<fp16_type> : gate_kernel<bf16_type>, *a, grid, a->overlap, stream);
}

extern "C" cudaError_t k_gather_rows(uint16_t *dst, const uint16_t *src, const int32_t *rows, int32_t count, int32_t width, cudaStream_t stream) {
    if (!count) return cudaSuccess;
    gather_kernel<<<(unsigned)count, 256, 0, stream>>>(dst, src, rows, width);
    return cudaGetLastError();
}
