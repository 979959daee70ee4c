/* source.c - the table of what a load takes from the model and delta rooms, and the loader made
 * with it. */
#include "loader_internal.h"

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

bd_loader_source bd_loader_source_of(bd_model *model) {
    return (bd_loader_source){
        .ctx = model,
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

bd_status bd_loader_create(const bd_loader_options *options, bd_loader **out, bd_error *err) {
    const bd_loader_source source = bd_loader_source_of(options->model);
    return bd_loader_create_with(options, &source, out, err);
}
