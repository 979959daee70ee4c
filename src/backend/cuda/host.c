/* host.c - page-locked host memory for deltas kept beside the device, for all ranks' devices.
 * Uploads from it need no copy into the staging first. Threads: alloc from the cache's own thread
 * for it (page-locking runs at 1 to 2 GB/s), free after that thread has ended, locked from the
 * loader thread. */
#include "cuda_internal.h"

void *cuda_host_alloc(bd_backend *backend, uint64_t bytes) {
    bd_cuda *cuda = cuda_of(backend);
    void *memory = NULL;
    if (cuda_check(cuda, cudaSetDevice(cuda->device), "device", NULL) != BD_OK) return NULL;
    if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable) == cudaSuccess) return memory;
    (void)cudaGetLastError(); /* a limit reached is no fault of the device */
    return NULL;
}

void cuda_host_free(bd_backend *backend, void *memory, uint64_t bytes) {
    (void)bytes;
    (void)cudaSetDevice(cuda_of(backend)->device);
    (void)cudaFreeHost(memory);
}

bool cuda_host_lock(bd_backend *backend, void *memory, uint64_t bytes) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda_check(cuda, cudaSetDevice(cuda->device), "device", NULL) != BD_OK) return false;
    if (cudaHostRegister(memory, bytes, cudaHostRegisterPortable) == cudaSuccess) return true;
    (void)cudaGetLastError(); /* a limit reached is no fault of the device */
    return false;
}

void cuda_host_unlock(bd_backend *backend, void *memory) {
    (void)cudaSetDevice(cuda_of(backend)->device);
    (void)cudaHostUnregister(memory);
}

bool cuda_host_locked(const void *memory) {
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess)
        return attributes.type == cudaMemoryTypeHost;
    (void)cudaGetLastError();
    return false;
}
