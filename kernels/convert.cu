// convert.cu - weights from bf16 to fp16 where they lie. What fp16 cannot hold is counted, not clipped.
#include "elements.cuh"

namespace {

__global__ void __launch_bounds__(256) convert_kernel(uint16_t *data, unsigned long long count, unsigned *overflow) {
    bool bad = false;
    for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
        const uint16_t v = fp16_type::store(bf16_type::load(data[i]));
        bad |= (v & 0x7c00) == 0x7c00; // infinite or NaN
        data[i] = v;
    }
    if (bad) atomicOr(overflow, 1u);
}

} // namespace

extern "C" cudaError_t k_bf16_to_fp16(uint16_t *data, uint64_t count, unsigned *overflow, cudaStream_t stream) {
    if (!count) return cudaSuccess;
    const uint64_t blocks = (count + 255) / 256;
    convert_kernel<<<(unsigned)(blocks < 4096 ? blocks : 4096), 256, 0, stream>>>(data, count, overflow);
    return cudaGetLastError();
}
