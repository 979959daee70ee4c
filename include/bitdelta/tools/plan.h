/* plan.h - `bitdelta plan`: the memory a server would take, from config.json and the deltas'
 * manifests alone. Owner of everything: the call. Threads: the caller's. */
#ifndef BITDELTA_TOOLS_PLAN_H
#define BITDELTA_TOOLS_PLAN_H

#include <stdio.h>

#include "bitdelta/backend/backend.h"

typedef struct bd_plan_request { /* 0 or NULL: the default of `serve` */
    const char *base_dir, *deltas_dir;
    bd_backend_choice backend;
    bd_dtype dtype;
    bd_kernels kernels;
    uint32_t rank_count; /* 0: 1; the table is of each rank */
    uint32_t slots, max_model_len, rows_max, seqs_max, logits_rows_max;
    uint64_t kv_tokens;
    uint64_t device_bytes; /* memory of a rank to plan for; 0: ask the device, if there is one */
    bool json;
} bd_plan_request;

/* The table, or one JSON object, to `out`. BD_E_LIMIT with the sum in the message when it does not
 * fit; the table is written even then. */
BD_MUST_CHECK bd_status bd_plan_run(const bd_plan_request *request, FILE *out, bd_error *err);

#endif
