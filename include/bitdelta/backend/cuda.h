/* cuda.h - the CUDA backend's entry points; they exist only in builds with BD_CUDA. */
#ifndef BITDELTA_BACKEND_CUDA_H
#define BITDELTA_BACKEND_CUDA_H

#include "bitdelta/backend/backend.h"

const bd_backend_ops *bd_backend_cuda_ops(void);
/* Ranks on as many devices, through NCCL; the library is opened by group_create. */
const bd_comm_ops *bd_comm_nccl_ops(void);
/* The same without NCCL, by kernels that write to each other's memory: low latency for little data,
 * slow for much. Ranks may share a device. Sizes and places of data are multiples of 4 bytes (an
 * all_reduce of 16-bit values: of 2 bytes). BD_E_UNSUPPORTED from open where devices do not reach
 * each other. */
const bd_comm_ops *bd_comm_p2p_ops(void);
/* BD_OK: a usable device answers; else BD_E_DEVICE with CUDA's reason in why. */
BD_MUST_CHECK bd_status bd_cuda_probe(char *why, size_t why_bytes);

#endif
