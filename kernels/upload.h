/* upload.h - C launcher of upload.cu. Rules as in kernels.h. */
#ifndef BITDELTA_KERNELS_UPLOAD_H
#define BITDELTA_KERNELS_UPLOAD_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* dst on the device; src there too, or page-locked host memory that the device can read. */
cudaError_t k_put_bytes(void *dst, const void *src, uint64_t bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
