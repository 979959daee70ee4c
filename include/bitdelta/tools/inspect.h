/* inspect.h - what is in a delta directory, a safetensors file or a model directory, and is it
 * whole? Owner of everything: the call. Threads: the caller's. */
#ifndef BITDELTA_TOOLS_INSPECT_H
#define BITDELTA_TOOLS_INSPECT_H

#include <stdio.h>

#include "bitdelta/base/status.h"

typedef struct bd_inspect_request {
    const char *
        path; /* a directory with delta.json or model weights, delta.json, or a .safetensors file */
    bool verify; /* of a delta: every chunk sum and sha256 */
    bool json;
} bd_inspect_request;

/* The report goes to `out`, also where verification fails; err then has the first fault: file,
 * chunk, byte range. */
BD_MUST_CHECK bd_status bd_inspect_run(const bd_inspect_request *request, FILE *out, bd_error *err);

#endif
