/* delta.c - a variant's bytes into its pages: pinned staging, upload and repack on the copy stream.
 * Threads: the rank's loader thread; it shares nothing with the executor but the (read-only) device
 * pointers. */
#include <string.h>

#include "cuda_internal.h"

bd_status cuda_staging_open(bd_cuda *cuda, cuda_staging *staging, bd_error *err) {
    for (int i = 0; i < 2; i++) {
        bd_status s =
            cuda_check(cuda, cudaMallocHost((void **)&staging->host[i], CUDA_STAGING_BYTES),
                       "pinned staging", err);
        if (s != BD_OK) return s;
        s = cuda_check(cuda, cudaEventCreateWithFlags(&staging->done[i], cudaEventDisableTiming),
                       "event", err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

void cuda_staging_close(cuda_staging *staging) {
    for (int i = 0; i < 2; i++) {
        if (staging->done[i]) cudaEventDestroy(staging->done[i]);
        if (staging->host[i]) cudaFreeHost(staging->host[i]);
    }
}

bd_status cuda_staging_next(bd_cuda *cuda, cuda_staging *staging, uint32_t *half, bd_error *err) {
    *half = staging->turn;
    staging->turn ^= 1u;
    return cuda_check(cuda, cudaEventSynchronize(staging->done[*half]), "staging", err);
}

void *cuda_delta_arena(bd_backend *backend) {
    return cuda_of(backend)->deltas;
}

uint64_t cuda_plane_bytes(uint32_t n, uint32_t k) {
    return k_sign_bytes(n, k);
}

/* Rows of the part, as many at a time as the staging holds. */
static bd_status put_part(bd_cuda *cuda, uint8_t *dst, uint32_t k, const bd_plane_part *part,
                          bd_error *err) {
    const uint32_t row_bytes = part->col_count / 8, rows_per = CUDA_STAGING_BYTES / row_bytes;
    /* Page-locked bytes stay where they are until the flush at the load's end. */
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    const bool direct =
        s == BD_OK && part->src_stride_bytes == row_bytes && cuda_host_locked(part->src);
    for (uint32_t row = 0; s == BD_OK && row < part->row_count; row += rows_per) {
        const uint32_t left = part->row_count - row, count = left < rows_per ? left : rows_per;
        const k_plane_part piece = {part->first_row + row, count, part->first_col, part->col_count};
        cuda_staging *staging = &cuda->delta_staging;
        uint32_t half;
        if ((s = cuda_staging_next(cuda, staging, &half, err)) != BD_OK) return s;
        const uint8_t *from = (const uint8_t *)part->src + row * part->src_stride_bytes;
        if (direct)
            (void)from;
        else if (part->src_stride_bytes == row_bytes)
            memcpy(staging->host[half], from, (size_t)count * row_bytes);
        else
            for (uint32_t i = 0; i < count; i++)
                memcpy(staging->host[half] + (size_t)i * row_bytes,
                       from + i * part->src_stride_bytes, row_bytes);
        s = cuda_check(cuda,
                       cudaMemcpyAsync(
                           staging->device[half], direct ? (const void *)from : staging->host[half],
                           (size_t)count * row_bytes, cudaMemcpyHostToDevice, cuda->copy),
                       "upload of a delta", err);
        if (s != BD_OK) return s;
        s = cuda_check(cuda, k_repack_part(dst, staging->device[half], k, &piece, cuda->copy),
                       "repack", err);
        if (s != BD_OK) return s;
        s = cuda_check(cuda, cudaEventRecord(staging->done[half], cuda->copy), "upload of a delta",
                       err);
    }
    return s;
}

bd_status cuda_plane_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k, uint32_t first_row,
                         uint32_t row_count, const void *src, uint64_t src_stride_bytes,
                         bd_error *err) {
    const bd_plane_part part = {.first_row = first_row,
                                .row_count = row_count,
                                .col_count = k,
                                .src = src,
                                .src_stride_bytes = src_stride_bytes};
    BD_ASSERT(first_row + row_count <= n);
    return put_part(cuda_of(backend), dst, k, &part, err);
}

bd_status cuda_plane_part_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                              const bd_plane_part *part, bd_error *err) {
    BD_ASSERT(part->first_row + part->row_count <= n && part->first_col + part->col_count <= k);
    return put_part(cuda_of(backend), dst, k, part, err);
}

bd_status cuda_vector_put(bd_backend *backend, void *dst, uint64_t first, const float *src,
                          uint64_t count, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    const uint64_t per = CUDA_STAGING_BYTES / 4;
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    for (uint64_t i = 0; s == BD_OK && i < count; i += per) {
        const uint64_t n = count - i < per ? count - i : per;
        uint32_t half;
        if ((s = cuda_staging_next(cuda, &cuda->delta_staging, &half, err)) != BD_OK) return s;
        memcpy(cuda->delta_staging.host[half], src + i, n * 4);
        s = cuda_check(cuda,
                       cudaMemcpyAsync((float *)dst + first + i, cuda->delta_staging.host[half],
                                       n * 4, cudaMemcpyHostToDevice, cuda->copy),
                       "upload of a delta", err);
        if (s != BD_OK) return s;
        s = cuda_check(cuda, cudaEventRecord(cuda->delta_staging.done[half], cuda->copy),
                       "upload of a delta", err);
    }
    return s;
}

bd_status cuda_put_flush(bd_backend *backend, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    const bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    return s == BD_OK
               ? cuda_check(cuda, cudaStreamSynchronize(cuda->copy), "upload of a delta", err)
               : s;
}
