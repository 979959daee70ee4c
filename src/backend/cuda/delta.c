/* delta.c - a variant's bytes into its pages: page-locked staging or windows, upload on the copy
 * stream, repack on the kernels' stream. Threads: the rank's loader thread; it shares nothing with
 * the executor but the (read-only) device pointers. */
#include <string.h>

#include "bitdelta/base/half.h"
#include "cuda_internal.h"
#include "upload.h"

/* Of fewer bytes a window saves nothing. */
#define WINDOW_BYTES_MIN (64u << 10)

#define TRY(call, what)                                                                            \
    do {                                                                                           \
        if (s == BD_OK) s = cuda_check(cuda, (call), (what), err);                                 \
    } while (0)

/* ---- Staging ---- */

bd_status cuda_staging_open(bd_cuda *cuda, cuda_staging *staging, bd_error *err) {
    bd_status s = BD_OK;
    for (int i = 0; i < 2; i++) {
        TRY(cudaMallocHost((void **)&staging->host[i], CUDA_STAGING_BYTES), "pinned staging");
        TRY(cudaEventCreateWithFlags(&staging->copied[i], cudaEventDisableTiming), "event");
        TRY(cudaEventCreateWithFlags(&staging->done[i], cudaEventDisableTiming), "event");
    }
    return s;
}

void cuda_staging_close(cuda_staging *staging) {
    for (int i = 0; i < 2; i++) {
        if (staging->copied[i]) cudaEventDestroy(staging->copied[i]);
        if (staging->done[i]) cudaEventDestroy(staging->done[i]);
        if (staging->host[i]) cudaFreeHost(staging->host[i]);
    }
}

bd_status cuda_staging_next(bd_cuda *cuda, cuda_staging *staging, uint32_t *half, bd_error *err) {
    *half = staging->turn;
    staging->turn ^= 1u;
    return cuda_check(cuda, cudaEventSynchronize(staging->done[*half]), "staging", err);
}

/* ---- Windows and marks ---- */

bd_status cuda_uploads_open(bd_cuda *cuda, bd_error *err) {
    cuda_uploads *u = &cuda->uploads;
    bd_status s = BD_OK;
    TRY(cudaStreamCreateWithPriority(&u->kernels, cudaStreamNonBlocking, 0), "stream"); /* least */
    for (uint32_t i = 0; i < CUDA_BRING_COUNT; i++) {
        TRY(cudaEventCreateWithFlags(&u->copied[i], cudaEventDisableTiming), "event");
        TRY(cudaEventCreateWithFlags(&u->used[i], cudaEventDisableTiming), "event");
    }
    for (uint32_t i = 0; i < CUDA_MARKS; i++)
        TRY(cudaEventCreateWithFlags(&u->marks[i], cudaEventDisableTiming), "event");
    TRY(cudaMallocHost((void **)&u->small, (size_t)CUDA_SMALL_COUNT * CUDA_SMALL_BYTES),
        "pinned staging");
    for (uint32_t i = 0; i < CUDA_SMALL_COUNT; i++)
        TRY(cudaEventCreateWithFlags(&u->small_done[i], cudaEventDisableTiming), "event");
    return s;
}

void cuda_uploads_close(bd_cuda *cuda) {
    cuda_uploads *u = &cuda->uploads;
    if (u->kernels) cudaStreamSynchronize(u->kernels);
    for (uint32_t i = 0; i < CUDA_SMALL_COUNT; i++)
        if (u->small_done[i]) cudaEventDestroy(u->small_done[i]);
    if (u->small) cudaFreeHost(u->small);
    for (uint32_t i = 0; i < CUDA_MARKS; i++)
        if (u->marks[i]) cudaEventDestroy(u->marks[i]);
    for (uint32_t i = 0; i < CUDA_BRING_COUNT; i++) {
        if (u->copied[i]) cudaEventDestroy(u->copied[i]);
        if (u->used[i]) cudaEventDestroy(u->used[i]);
    }
    if (u->kernels) cudaStreamDestroy(u->kernels);
}

static uint32_t window_before(uint32_t turn) {
    return (turn + CUDA_BRING_COUNT - 1) % CUDA_BRING_COUNT;
}

/* Its room is free once the kernels launched so far have run. */
static bd_status window_end(bd_cuda *cuda, bd_error *err) {
    cuda_uploads *u = &cuda->uploads;
    if (!u->from) return BD_OK;
    u->from = NULL;
    return cuda_check(cuda, cudaEventRecord(u->used[window_before(u->turn)], u->kernels),
                      "upload of a delta", err);
}

/* Where the open window has these bytes, or NULL. */
static const uint8_t *window_at(const bd_cuda *cuda, const void *data, uint64_t bytes) {
    const cuda_uploads *u = &cuda->uploads;
    const uintptr_t at = (uintptr_t)data, from = (uintptr_t)u->from;
    if (!u->from || at < from || bytes > u->bytes || at - from > u->bytes - bytes) return NULL;
    return u->device[window_before(u->turn)] + (at - from);
}

bd_status cuda_bring(bd_backend *backend, const void *data, uint64_t bytes, bool *brought,
                     bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    cuda_uploads *u = &cuda->uploads;
    const uint32_t window = u->turn, before = window_before(window);
    *brought = false;
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    if (s == BD_OK) s = window_end(cuda, err);
    if (bytes < WINDOW_BYTES_MIN || bytes > CUDA_BRING_BYTES || !cuda_host_locked(data)) {
        TRY(cudaEventSynchronize(u->copied[before]), "upload of a delta");
        return s;
    }
    TRY(cudaStreamWaitEvent(cuda->copy, u->used[window], 0), "upload of a delta");
    TRY(cudaMemcpyAsync(u->device[window], data, bytes, cudaMemcpyHostToDevice, cuda->copy),
        "upload of a delta");
    TRY(cudaEventRecord(u->copied[window], cuda->copy), "upload of a delta");
    TRY(cudaStreamWaitEvent(u->kernels, u->copied[window], 0), "upload of a delta");
    /* With this copy in line behind it, the one before is waited for: its bytes are the caller's
     * again. */
    TRY(cudaEventSynchronize(u->copied[before]), "upload of a delta");
    if (s != BD_OK) return s;
    u->turn = (window + 1) % CUDA_BRING_COUNT;
    u->from = data;
    u->bytes = bytes;
    *brought = true;
    return BD_OK;
}

bd_status cuda_put_mark(bd_backend *backend, uint64_t *mark, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    cuda_uploads *u = &cuda->uploads;
    cudaEvent_t event = u->marks[u->mark_count % CUDA_MARKS];
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    TRY(cudaEventSynchronize(event), "upload of a delta"); /* of CUDA_MARKS marks ago */
    TRY(cudaEventRecord(event, u->kernels), "upload of a delta");
    if (s == BD_OK) *mark = ++u->mark_count;
    return s;
}

bd_status cuda_put_reached(bd_backend *backend, uint64_t mark, bool *reached, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    const cuda_uploads *u = &cuda->uploads;
    BD_ASSERT(mark >= 1 && mark <= u->mark_count);
    *reached = true;
    if (u->mark_count - mark >= CUDA_MARKS) return BD_OK; /* its event has been waited for since */
    const cudaError_t error = cudaEventQuery(u->marks[(mark - 1) % CUDA_MARKS]);
    if (error != cudaErrorNotReady) return cuda_check(cuda, error, "upload of a delta", err);
    (void)cudaGetLastError(); /* else the next launch would report it */
    *reached = false;
    return BD_OK;
}

/* ---- Puts ---- */

void *cuda_delta_arena(bd_backend *backend) {
    return cuda_of(backend)->deltas;
}

uint64_t cuda_plane_bytes(uint32_t n, uint32_t k) {
    return k_sign_bytes(n, k);
}

/* Host memory to be filled, and where a kernel finds what was put there. */
typedef struct stage {
    uint8_t *host, *device;
    cudaEvent_t copied, done; /* copied NULL: there is no copy, the kernel reads the host's */
} stage;

static bd_status stage_take(bd_cuda *cuda, uint64_t bytes, stage *out, bd_error *err) {
    cuda_uploads *u = &cuda->uploads;
    cuda_staging *staging = &cuda->delta_staging;
    if (bytes <= CUDA_SMALL_BYTES) {
        const uint32_t i = u->small_turn;
        u->small_turn = (i + 1) % CUDA_SMALL_COUNT;
        uint8_t *host = u->small + (size_t)i * CUDA_SMALL_BYTES;
        *out = (stage){.host = host, .device = host, .done = u->small_done[i]};
        return cuda_check(cuda, cudaEventSynchronize(out->done), "staging", err);
    }
    uint32_t half;
    const bd_status s = cuda_staging_next(cuda, staging, &half, err);
    if (s == BD_OK)
        *out = (stage){.host = staging->host[half],
                       .device = staging->device[half],
                       .copied = staging->copied[half],
                       .done = staging->done[half]};
    return s;
}

static bd_status stage_send(bd_cuda *cuda, const stage *st, uint64_t bytes, bd_error *err) {
    bd_status s = BD_OK;
    if (!st->copied) return BD_OK;
    TRY(cudaMemcpyAsync(st->device, st->host, bytes, cudaMemcpyHostToDevice, cuda->copy),
        "upload of a delta");
    TRY(cudaEventRecord(st->copied, cuda->copy), "upload of a delta");
    TRY(cudaStreamWaitEvent(cuda->uploads.kernels, st->copied, 0), "upload of a delta");
    return s;
}

/* Some rows of the part, as many as the staging holds. */
static bd_status put_rows(bd_cuda *cuda, uint8_t *dst, uint32_t k, const bd_plane_part *part,
                          uint32_t row, uint32_t count, bd_error *err) {
    const uint32_t row_bytes = part->col_count / 8;
    const uint64_t bytes = (uint64_t)count * row_bytes;
    const k_plane_part piece = {part->first_row + row, count, part->first_col, part->col_count};
    const uint8_t *src = (const uint8_t *)part->src + row * part->src_stride_bytes;
    stage st;
    bd_status s = stage_take(cuda, bytes, &st, err);
    if (s != BD_OK) return s;
    if (part->src_stride_bytes == row_bytes)
        memcpy(st.host, src, bytes);
    else
        for (uint32_t i = 0; i < count; i++)
            memcpy(st.host + (size_t)i * row_bytes, src + i * part->src_stride_bytes, row_bytes);
    s = stage_send(cuda, &st, bytes, err);
    TRY(k_repack_part(dst, st.device, k, &piece, cuda->uploads.kernels), "repack");
    TRY(cudaEventRecord(st.done, cuda->uploads.kernels), "upload of a delta");
    return s;
}

static bd_status put_part(bd_cuda *cuda, uint8_t *dst, uint32_t k, const bd_plane_part *part,
                          bd_error *err) {
    const uint32_t row_bytes = part->col_count / 8, rows_per = CUDA_STAGING_BYTES / row_bytes;
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    const uint8_t *there = NULL;
    if (part->src_stride_bytes == row_bytes)
        there = window_at(cuda, part->src, (uint64_t)part->row_count * row_bytes);
    if (there) {
        const k_plane_part piece = {part->first_row, part->row_count, part->first_col,
                                    part->col_count};
        TRY(k_repack_part(dst, there, k, &piece, cuda->uploads.kernels), "repack");
        return s;
    }
    for (uint32_t row = 0; s == BD_OK && row < part->row_count; row += rows_per) {
        const uint32_t left = part->row_count - row;
        s = put_rows(cuda, dst, k, part, row, left < rows_per ? left : rows_per, err);
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

/* bf16 values as fp16; false: one is beyond its range. */
static bool halves_of(uint16_t *to, const uint8_t *from, uint64_t bytes) {
    bool fits = true;
    for (uint64_t i = 0; i < bytes / 2; i++) {
        uint16_t value;
        memcpy(&value, from + 2 * i, 2);
        to[i] = bd_f32_to_f16(bd_bf16_to_f32(value));
        fits &= (to[i] & 0x7c00u) != 0x7c00u;
    }
    return fits;
}

/* Some of the bytes, as many as the staging holds. */
static bd_status put_some(bd_cuda *cuda, uint8_t *dst, const uint8_t *src, uint64_t bytes,
                          bd_error *err) {
    stage st;
    bd_status s = stage_take(cuda, bytes, &st, err);
    if (s != BD_OK) return s;
    if (!cuda->fp16)
        memcpy(st.host, src, bytes);
    else if (!halves_of((uint16_t *)(void *)st.host, src, bytes))
        return bd_fail(err, BD_E_UNSUPPORTED, "dtype",
                       "it has a value that fp16 cannot hold (beyond 65504); use --dtype bf16");
    s = stage_send(cuda, &st, bytes, err);
    TRY(k_put_bytes(dst, st.device, bytes, cuda->uploads.kernels), "upload of a delta");
    TRY(cudaEventRecord(st.done, cuda->uploads.kernels), "upload of a delta");
    return s;
}

bd_status cuda_rows_put(bd_backend *backend, void *dst, uint64_t offset, const void *src,
                        uint64_t bytes, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    uint8_t *to = (uint8_t *)dst + offset;
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    const uint8_t *from = cuda->fp16 ? NULL : window_at(cuda, src, bytes);
    if (from) {
        TRY(k_put_bytes(to, from, bytes, cuda->uploads.kernels), "upload of a delta");
        return s;
    }
    for (uint64_t i = 0; s == BD_OK && i < bytes; i += CUDA_STAGING_BYTES) {
        const uint64_t left = bytes - i, n = left < CUDA_STAGING_BYTES ? left : CUDA_STAGING_BYTES;
        s = put_some(cuda, to + i, (const uint8_t *)src + i, n, err);
    }
    return s;
}

bd_status cuda_vector_put(bd_backend *backend, void *dst, uint64_t first, const float *src,
                          uint64_t count, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    const uint64_t per = CUDA_STAGING_BYTES / 4;
    float *to = (float *)dst + first;
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    const uint8_t *from = window_at(cuda, src, count * 4);
    if (from) {
        TRY(k_put_bytes(to, from, count * 4, cuda->uploads.kernels), "upload of a delta");
        return s;
    }
    for (uint64_t i = 0; s == BD_OK && i < count; i += per) {
        const uint64_t n = count - i < per ? count - i : per;
        stage st;
        if ((s = stage_take(cuda, n * 4, &st, err)) != BD_OK) return s;
        memcpy(st.host, src + i, n * 4);
        s = stage_send(cuda, &st, n * 4, err);
        TRY(k_put_bytes(to + i, st.device, n * 4, cuda->uploads.kernels), "upload of a delta");
        TRY(cudaEventRecord(st.done, cuda->uploads.kernels), "upload of a delta");
    }
    return s;
}

bd_status cuda_put_flush(bd_backend *backend, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    if (s == BD_OK) s = window_end(cuda, err);
    TRY(cudaStreamSynchronize(cuda->copy), "upload of a delta");
    TRY(cudaStreamSynchronize(cuda->uploads.kernels), "upload of a delta");
    return s;
}
