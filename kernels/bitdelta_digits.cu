// bitdelta_digits.cu - digits of x (digits.cuh) where no kernel that makes x has made them (sm_90a). A warp a (row, block).
#include "decode.cuh"
#include "digits.cuh"

namespace {

template <typename T> __global__ void __launch_bounds__(256) digits_kernel(const __grid_constant__ k_digits_args a) {
  const k_digits_chunk& chunk = a.to.chunks[blockIdx.y];
  const int lane = threadIdx.x % 32, blocks = a.k / 256, block = blockIdx.x % blocks, row = chunk.first_row + blockIdx.x / blocks * 8 + threadIdx.x / 32;
  pdl_launch();
  pdl_wait();
  if (row >= chunk.first_row + chunk.rows) return;
  digits_store<T>(a.to, row, block * 32 + lane, __ldcg((const uint4*)((const uint16_t*)a.x + (size_t)row * a.k) + block * 32 + lane));
}

}  // namespace

extern "C" uint64_t k_digits_bytes(int rows, int k) { return (uint64_t)(k / 256) * digits_tile_bytes(k_decode_tokens(rows)); }

extern "C" cudaError_t k_digits(const k_digits_args* a, cudaStream_t s) {
  if (a->k % 256 || a->to.chunk_count < 1 || a->to.chunk_count > K_DIGITS_CHUNKS) return cudaErrorInvalidValue;
  int most = 1;
  for (int i = 0; i < a->to.chunk_count; i++) most = a->to.chunks[i].rows > most ? a->to.chunks[i].rows : most;
  if (most > K_DECODE_ROWS) return cudaErrorInvalidValue;
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute at[1];
  at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, at[0].val.programmaticStreamSerializationAllowed = 1;
  c.gridDim = dim3((unsigned)(a->k / 256 * ((most + 7) / 8)), (unsigned)a->to.chunk_count), c.blockDim = dim3(256), c.stream = s, c.attrs = at, c.numAttrs = a->pdl ? 1 : 0;
  return a->fp16 ? cudaLaunchKernelEx(&c, digits_kernel<fp16_type>, *a) : cudaLaunchKernelEx(&c, digits_kernel<bf16_type>, *a);
}
