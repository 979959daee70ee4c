/* ranks.h - loads of a model that is split: one loader per rank, and what is put together from
 * their parts. A load is as far as the slowest rank's part; one that fails fails all. Inside the
 * loader room. Threads: as loader.h. */
#ifndef BITDELTA_SRC_LOADER_RANKS_H
#define BITDELTA_SRC_LOADER_RANKS_H

#include "loader_internal.h"

typedef struct bd_loader_ranks bd_loader_ranks;

/* source_of(ctx, rank): what the rank's loader takes from other rooms. */
typedef struct bd_ranks_source {
    bd_loader_source (*source_of)(void *ctx, uint32_t rank);
    /* Where the rank has the page that is `page` on rank 0. */
    void *(*page_on)(void *ctx, uint32_t rank, void *page);
    void (*join)(bd_overlay *const *overlays, uint32_t count);
    void *ctx;
    uint32_t count;
} bd_ranks_source;

BD_MUST_CHECK bd_status bd_loader_ranks_create(const bd_loader_options *options,
                                               const bd_ranks_source *source, bd_loader_ranks **out,
                                               bd_error *err);
void bd_loader_ranks_destroy(bd_loader_ranks *ranks);
BD_MUST_CHECK bd_status bd_loader_ranks_submit(bd_loader_ranks *ranks, bd_load *load,
                                               bd_error *err);
const bd_loader *bd_loader_ranks_first(const bd_loader_ranks *ranks);

/* loader.c: a loader that hands everything to these. Takes them over, also when it fails. */
BD_MUST_CHECK bd_status bd_loader_wrap(bd_loader_ranks *ranks, bd_loader **out, bd_error *err);

#endif
