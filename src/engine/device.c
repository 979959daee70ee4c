/* device.c - the engine over a real model: its forward pass and its backend's wait behind the
 * executor's two functions. */
#include "internal.h"

typedef struct gated_step {
    bd_model *model;
    const bd_step *step;
    bd_stream_gate *gate;
} gated_step;

static void void_overlay(void *ctx, uint32_t overlay) {
    const gated_step *gated = ctx;
    bd_model_step_void(gated->model, gated->step, overlay);
}

static bd_status pass_layer(void *ctx, uint32_t index, bd_error *err) {
    gated_step *gated = ctx;
    (void)err; /* what is late or lost costs its own rows, not the step */
    bd_stream_gate_pass(gated->gate, index, void_overlay, gated);
    return BD_OK;
}

static bd_status model_forward(void *ctx, const bd_step *step, bd_stream_gate *gate,
                               bd_error *err) {
    bd_model *model = ctx;
    gated_step gated = {model, step, gate};
    return bd_model_forward(model, step, gate ? pass_layer : NULL, &gated, err);
}

static bd_status model_wait(void *ctx, const bd_step *step, uint64_t deadline_us,
                            bd_token_result *results, bd_error *err) {
    return bd_model_wait(ctx, step, deadline_us, results, err);
}

static void stop_streaming(bd_cache *cache) {
    bd_cache_stream(cache, NULL, NULL);
}

bd_status bd_engine_create(const bd_engine_options *options, bd_engine **out, bd_error *err) {
    static const bd_executor_ops ops = {.forward = model_forward, .wait = model_wait};
    *out = NULL;
    if (!options->model) return bd_fail(err, BD_E_ARGUMENT, "engine", "an engine needs a model");
    const bd_engine_device device = {
        .ops = &ops,
        .ctx = options->model,
        .kv_block_count = bd_model_kv_block_count(options->model),
        .kv_block_tokens = bd_model_kv_block_tokens(options->model),
        .max_model_len = bd_model_max_len(options->model),
        .layers = bd_model_config_of(options->model)->layers,
    };
    bd_status status = bd_engine_create_on(options, &device, out, err);
    if (status != BD_OK || !options->cache) return status;
    bd_cache_stream(options->cache, bd_engine_may_stream, *out);
    (*out)->detach = stop_streaming;
    return BD_OK;
}
