/* safetensors.h - read (mmap) and write safetensors files. The header is hostile input: every
 * number is checked before it is used. Owner: the caller; an open file is immutable, so any thread
 * may read it. */
#ifndef BITDELTA_HF_SAFETENSORS_H
#define BITDELTA_HF_SAFETENSORS_H

#include <stddef.h>

#include "bitdelta/base/status.h"

#define BD_TENSOR_RANK_MAX              8
#define BD_SAFETENSORS_HEADER_BYTES_MAX (100u << 20)

typedef enum bd_dtype {
    BD_DTYPE_F32,
    BD_DTYPE_BF16,
    BD_DTYPE_F16,
    BD_DTYPE_U8,
    BD_DTYPE_OTHER /* known to the format, of no use here; refused by name where a weight is wanted
                    */
} bd_dtype;

typedef struct bd_tensor {
    const char *name;    /* borrowed from the file object */
    char dtype_name[12]; /* as in the file, e.g. "BF16", "F8_E4M3" */
    bd_dtype dtype;
    uint32_t rank;
    uint64_t shape[BD_TENSOR_RANK_MAX];
    uint64_t offset_bytes; /* from the start of the file */
    uint64_t bytes;
    const uint8_t *data; /* into the mapping, NOT aligned; NULL when opened header-only */
    uint32_t file_index; /* which file of a checkpoint */
} bd_tensor;

typedef struct bd_safetensors bd_safetensors;

/* map_data false: only the header is read (the loader reads the data its own way).
 * Checks: header size, UTF-8 JSON, known members, offsets in order without holes or overlap,
 * product of shape times dtype size equals the span, data ends at the end of the file. Faults name
 * file and tensor. */
BD_MUST_CHECK bd_status bd_safetensors_open(const char *path, bool map_data, bd_safetensors **out,
                                            bd_error *err);
void bd_safetensors_close(bd_safetensors *file);
uint32_t bd_safetensors_count(const bd_safetensors *file);
const bd_tensor *bd_safetensors_at(const bd_safetensors *file, uint32_t index); /* in data order */
const bd_tensor *bd_safetensors_find(const bd_safetensors *file, const char *name); /* or NULL */
uint64_t bd_safetensors_file_bytes(const bd_safetensors *file);

/* Writing: declare all tensors in order, then stream their bytes in the same order.
 * The file is `path` + temporary suffix until finish() has fsynced and renamed it.
 * align_bytes: the data section starts at a multiple of it (header padded with spaces). */
typedef struct bd_safetensors_writer bd_safetensors_writer;
BD_MUST_CHECK bd_status bd_safetensors_writer_create(const char *path, const bd_tensor *tensors,
                                                     uint32_t tensor_count, uint32_t align_bytes,
                                                     bd_safetensors_writer **out, bd_error *err);
/* The size of the file that such a writer would make. */
BD_MUST_CHECK bd_status bd_safetensors_measure(const bd_tensor *tensors, uint32_t tensor_count,
                                               uint32_t align_bytes, uint64_t *file_bytes,
                                               bd_error *err);
BD_MUST_CHECK bd_status bd_safetensors_writer_append(bd_safetensors_writer *writer,
                                                     const void *data, size_t bytes, bd_error *err);
/* Total declared bytes must have been appended. The writer is gone afterwards, whatever is
 * returned. */
BD_MUST_CHECK bd_status bd_safetensors_writer_finish(bd_safetensors_writer *writer, bd_error *err);
void bd_safetensors_writer_abort(bd_safetensors_writer *writer); /* removes the temporary file */

size_t bd_dtype_bytes(bd_dtype dtype); /* 0 for BD_DTYPE_OTHER */
/* Elements [first, first + count) of a F32, BF16 or F16 tensor as float32. Needs mapped data. */
void bd_tensor_to_f32(const bd_tensor *tensor, uint64_t first, uint64_t count, float *out);
/* Mapped data that will not be needed soon: lets the kernel take the pages back. A hint. */
void bd_tensor_release(const bd_tensor *tensor);

#endif
