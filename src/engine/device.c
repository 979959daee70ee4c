/* device.c - the engine over a real model: its forward pass and its backend's wait behind the
 * executor's two functions. */
#include "internal.h"

static bd_status model_forward(void *ctx, const bd_step *step, bd_error *err) {
    bd_model *model = ctx;
    /* No gate: a lease is given out only when every layer of the variant is ready. */
    return bd_model_forward(model, step, NULL, NULL, err);
}

static bd_status model_wait(void *ctx, const bd_step *step, uint64_t deadline_us,
                            bd_token_result *results, bd_error *err) {
    bd_model *model = ctx;
    return bd_model_ops(model)->step_wait(bd_model_backend(model), step, deadline_us, results, err);
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
    };
    return bd_engine_create_on(options, &device, out, err);
}
