/* loader_internal.h - what a load takes from other rooms, as one table, so that tests can put fakes
 * and faults in its place. Threads: everything is called on the loader's thread but verify_file,
 * which runs on a thread of its own, and check_chunk, on_read and, with feeds_anywhere, feed_bytes,
 * which run on the workers, several at once. */
#ifndef BITDELTA_SRC_LOADER_INTERNAL_H
#define BITDELTA_SRC_LOADER_INTERNAL_H

#include "bitdelta/loader/loader.h"

typedef struct bd_loader_source {
    void *ctx; /* the model */
    bd_status (*plan_create)(void *ctx, const bd_delta *delta, bd_overlay_plan *out, bd_error *err);
    void (*plan_destroy)(bd_overlay_plan *plan);
    bd_status (*overlay_create)(void *ctx, const bd_delta *delta, const bd_overlay_plan *plan,
                                void *const *pages, bd_overlay **out, bd_error *err);
    void (*overlay_destroy)(bd_overlay *overlay);
    bd_status (*feed_create)(void *ctx, const bd_overlay_plan *plan, void *const *pages,
                             bd_overlay_feed **out, bd_error *err);
    bool feeds_anywhere; /* see overlay.h, as for what becomes of the bytes fed */
    bd_status (*feed_bytes)(bd_overlay_feed *feed, uint32_t file_index, uint64_t from,
                            const uint8_t *data, uint64_t bytes, bd_error *err);
    bd_status (*feed_settle)(bd_overlay_feed *feed, bd_error *err); /* optional */
    uint32_t (*feed_ready)(const bd_overlay_feed *feed); /* what it counts is visible to steps */
    void (*feed_destroy)(bd_overlay_feed *feed);
    /* Of files in memory the sums are made while they are read, by bd_chunk_sum_add. */
    bd_status (*check_chunk)(const bd_delta *delta, uint32_t file_index, uint32_t chunk,
                             const void *data, size_t bytes, bd_error *err);
    bd_status (*verify_file)(const bd_delta *delta, uint32_t file_index, bd_error *err);
    /* Optional, both: makes the staging memory that uploads take their bytes from. false: it cannot
     * be had. */
    bool (*staging_lock)(void *ctx, void *memory, uint64_t bytes);
    void (*staging_unlock)(void *ctx, void *memory);
    /* Optional, for tests: what one read attempt is to have returned instead (bytes or -errno). */
    int32_t (*on_read)(void *read_ctx, uint64_t offset, uint32_t bytes, int32_t result);
    void *read_ctx;
} bd_loader_source;

/* The real one, for a model's rank. */
bd_loader_source bd_loader_source_of(bd_model *model);
/* Of the time of whole loads; NULL without metrics. */
bd_metric *bd_loader_seconds(bd_metrics *metrics);
BD_MUST_CHECK bd_status bd_loader_create_with(const bd_loader_options *options,
                                              const bd_loader_source *source, bd_loader **out,
                                              bd_error *err);

#endif
