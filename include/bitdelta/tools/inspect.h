/* inspect.h - what is in a delta directory, a safetensors file or a model directory, and is it
 * whole? Owner of everything: the call. Threads: the caller's. */
#ifndef BITDELTA_TOOLS_INSPECT_H
#define BITDELTA_TOOLS_INSPECT_H

#include <stdio.h>

#include "bitdelta/base/status.h"

/* path: a directory with delta.json or with model weights, delta.json itself, or a .safetensors
 * file. verify: of a delta, every chunk sum and sha256. The report (text or JSON) goes to `out`,
 * also where a check fails; err then has the first fault: file, chunk, byte range. */
BD_MUST_CHECK bd_status bd_inspect_run(const char *path, bool verify, bool json, FILE *out,
                                       bd_error *err);

#endif
