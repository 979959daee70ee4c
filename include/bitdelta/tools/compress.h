/* compress.h - one fine-tuned model becomes a delta directory: one bit per weight and plane, one
 * scale per row. Owner of everything: the call. Threads: its own pool; one tensor is in work at a
 * time, so peak memory is that of the largest tensor of both models (mapped) plus its packed bits.
 */
#ifndef BITDELTA_TOOLS_COMPRESS_H
#define BITDELTA_TOOLS_COMPRESS_H

#include <stdio.h>

#include "bitdelta/base/status.h"

typedef struct bd_compress_request {
    const char *base_dir, *finetuned_dir, *out_dir;
    const char *scale;                    /* row | matrix; NULL: row */
    const char *embeddings;               /* sign | full | base; NULL: sign */
    const char *base_name, *variant_name; /* NULL: the last part of base_dir, of out_dir */
    uint32_t bits;                        /* planes, 1 to 4; 0: 1 */
    uint32_t shards;  /* 1, 2, 4 or 8; 0: 1, which serves every degree of tensor parallelism */
    uint32_t threads; /* 0: all usable cores */
    bool dry_run;     /* report sizes, write nothing */
    bool force;       /* replace an existing delta; accept a base that does not seem to fit */
    bool json;        /* progress as JSON lines, the result as a JSON object */
} bd_compress_request;

/* The result goes to `out` (a JSON object, or the table of a dry run), progress and remarks to
 * `progress`. OUT appears complete or not at all: everything is written in OUT.tmp-<pid>, synced,
 * and renamed. Temporaries of runs that died are removed by the next run for the same OUT. */
BD_MUST_CHECK bd_status bd_compress_run(const bd_compress_request *request, FILE *out,
                                        FILE *progress, bd_error *err);

#endif
