/* fake_nccl.h - what the fake NCCL is told and what it has seen; see fake_nccl.c. */
#ifndef BITDELTA_TESTS_FAKE_NCCL_H
#define BITDELTA_TESTS_FAKE_NCCL_H

#include <stdbool.h>
#include <stdint.h>

typedef struct fake_nccl_plan {
    bool no_id, init_error, init_hang, async_error, call_error, call_hang, end_hang;
    int rank; /* where; call_hang: everywhere */
} fake_nccl_plan;

typedef struct fake_nccl_seen {
    int nvls; /* NCCL_NVLS_ENABLE when the id was made; -1: not set */
    int type; /* of the last call */
    uint32_t inits, aborts, calls, polls;
} fake_nccl_seen;

#endif
