/* checkpoint.h - a Hugging Face model directory: model.safetensors, or shards named by the index
 * (files the index does not name are ignored). Owner: the caller; immutable once open. */
#ifndef BITDELTA_HF_CHECKPOINT_H
#define BITDELTA_HF_CHECKPOINT_H

#include "bitdelta/hf/safetensors.h"

typedef struct bd_checkpoint bd_checkpoint;

BD_MUST_CHECK bd_status bd_checkpoint_open(const char *dir, bd_checkpoint **out, bd_error *err);
void bd_checkpoint_close(bd_checkpoint *checkpoint);
const char *bd_checkpoint_dir(const bd_checkpoint *checkpoint);
uint32_t bd_checkpoint_count(const bd_checkpoint *checkpoint);
const bd_tensor *bd_checkpoint_at(const bd_checkpoint *checkpoint,
                                  uint32_t index); /* by name, bytewise */
const bd_tensor *bd_checkpoint_find(const bd_checkpoint *checkpoint, const char *name);
/* As find, but absence is BD_E_NOT_FOUND, a wrong rank or shape BD_E_MISMATCH and a dtype other
 * than F32, BF16, F16 BD_E_UNSUPPORTED, each naming the tensor and the file. cols 0: rank 1
 * expected. */
BD_MUST_CHECK bd_status bd_checkpoint_need(const bd_checkpoint *checkpoint, const char *name,
                                           uint64_t rows, uint64_t cols, const bd_tensor **out,
                                           bd_error *err);
/* The files behind bd_tensor.file_index, for readers that do not use the mapping. */
uint32_t bd_checkpoint_file_count(const bd_checkpoint *checkpoint);
const char *bd_checkpoint_file_path(const bd_checkpoint *checkpoint, uint32_t file_index);
uint64_t bd_checkpoint_bytes(const bd_checkpoint *checkpoint); /* all tensor bytes */

/* Base fingerprint (architecture.md "The delta on disk"): lower-case hex SHA-256. */
BD_MUST_CHECK bd_status bd_checkpoint_fingerprint(const bd_checkpoint *checkpoint, char hex[65],
                                                  bd_error *err);
/* How many digits of two fingerprints to print so that they are seen to differ; at least 16. */
int bd_fingerprint_digits(const char *a, const char *b);

#endif
