/* source.c - the table of what a load takes from the model and delta rooms, and the loader made
 * with it. */
#include "loader_internal.h"
#include "ranks.h"

static bd_status plan_create(void *ctx, const bd_delta *delta, bd_overlay_plan *out,
                             bd_error *err) {
    return bd_overlay_plan_create(ctx, delta, out, err);
}

static bd_status overlay_create(void *ctx, const bd_delta *delta, const bd_overlay_plan *plan,
                                void *const *pages, bd_overlay **out, bd_error *err) {
    return bd_overlay_create(ctx, delta, plan, pages, out, err);
}

static bd_status feed_create(void *ctx, const bd_overlay_plan *plan, void *const *pages,
                             bd_overlay_feed **out, bd_error *err) {
    return bd_overlay_feed_create(ctx, plan, pages, out, err);
}

static bool staging_lock(void *ctx, void *memory, uint64_t bytes) {
    return bd_model_ops(ctx)->host_lock(bd_model_backend(ctx), memory, bytes);
}

static void staging_unlock(void *ctx, void *memory) {
    bd_model_ops(ctx)->host_unlock(bd_model_backend(ctx), memory);
}

bd_loader_source bd_loader_source_of(bd_model *model) {
    return (bd_loader_source){
        .ctx = model,
        .feeds_anywhere = bd_overlay_feeds_anywhere(model),
        .feed_settle = bd_overlay_feed_settle,
        .staging_lock = bd_model_ops(model)->host_lock ? staging_lock : NULL,
        .staging_unlock = staging_unlock,
        .plan_create = plan_create,
        .plan_destroy = bd_overlay_plan_destroy,
        .overlay_create = overlay_create,
        .overlay_destroy = bd_overlay_destroy,
        .feed_create = feed_create,
        .feed_bytes = bd_overlay_feed_bytes,
        .feed_ready = bd_overlay_feed_ready,
        .feed_destroy = bd_overlay_feed_destroy,
        .check_chunk = bd_delta_check_chunk,
        .verify_file = bd_delta_verify_shard,
    };
}

static bd_loader_source source_of_rank(void *ctx, uint32_t rank) {
    return bd_loader_source_of(bd_model_rank(ctx, rank));
}

static void *page_on(void *ctx, uint32_t rank, void *page) {
    return bd_overlay_page_on(ctx, rank, page);
}

bd_status bd_loader_create(const bd_loader_options *options, bd_loader **out, bd_error *err) {
    const uint32_t count = bd_model_rank_count(options->model);
    const bd_loader_source source = bd_loader_source_of(options->model);
    if (count == 1) return bd_loader_create_with(options, &source, out, err);
    const bd_ranks_source sources = {.source_of = source_of_rank,
                                     .page_on = page_on,
                                     .join = bd_overlay_join,
                                     .ctx = options->model,
                                     .count = count};
    bd_loader_ranks *ranks;
    *out = NULL;
    const bd_status status = bd_loader_ranks_create(options, &sources, &ranks, err);
    return status == BD_OK ? bd_loader_wrap(ranks, out, err) : status;
}
