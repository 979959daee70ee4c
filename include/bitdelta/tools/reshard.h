/* reshard.h - `bitdelta reshard`: a delta of some number of shards becomes one of another number,
 * byte for byte what compress would have written with that number. Owner of everything: the call.
 * Threads: the caller's; the old files are mapped and one weight is in work at a time, so peak
 * memory is that of the largest one. */
#ifndef BITDELTA_TOOLS_RESHARD_H
#define BITDELTA_TOOLS_RESHARD_H

#include <stdio.h>

#include "bitdelta/base/status.h"

typedef struct bd_reshard_request {
    const char *delta_dir, *out_dir;
    const char *base_dir; /* for more shards than there are, whose heads are told by its
                             config.json; NULL: that of the delta, if it has one */
    uint32_t shards;      /* 1, 2, 4 or 8 */
    bool force;           /* replace an existing delta, which may be delta_dir itself */
    bool json;            /* progress as JSON lines, the result as a JSON object */
} bd_reshard_request;

/* The result goes to `out` (JSON), progress and remarks to `progress`. Every sum of the old delta
 * is checked first. OUT appears complete or not at all, as with compress. All other files of the
 * variant's directory are copied; its sub-directories are not. */
BD_MUST_CHECK bd_status bd_reshard_run(const bd_reshard_request *request, FILE *out, FILE *progress,
                                       bd_error *err);

#endif
