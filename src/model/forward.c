/* forward.c - the transformer, once for every family and every backend.
 * What differs between families is in the config the backend was opened with (activation, soft
 * caps, windows, scales, norms of q and k inside rope_kv_write) and here in one place: the norms
 * Gemma-2 puts on a block's output before it is added to the residual. Owner: the rank's executor
 * thread. Operators are asynchronous: a step is launched here and waited for with step_wait. */
#include "internal.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        const bd_status try_status = (call);                                                       \
        if (try_status != BD_OK) return try_status;                                                \
    } while (0)

static bd_status pass_gate(bd_layer_gate gate, void *ctx, uint32_t index, bd_error *err) {
    return gate ? gate(ctx, index, err) : BD_OK;
}

/* residual += attention(norm(residual)), except that the sum is made by the next norm_residual. */
static bd_status run_attention(bd_model *model, const bd_step *step, uint32_t layer,
                               bd_error *err) {
    const bd_backend_ops *ops = model->ops;
    const bd_norm post_ffn = model->config.post_norms ? BD_NORM_POST_FFN : BD_NORM_COUNT;
    const uint32_t before = layer > 0 ? layer - 1 : 0;
    TRY(ops->norm_residual(model->backend, step, layer, BD_NORM_INPUT, layer > 0, before, post_ffn,
                           err));
    TRY(ops->linear(model->backend, step, layer, BD_GROUP_QKV, err));
    TRY(ops->rope_kv_write(model->backend, step, layer, err));
    TRY(ops->attention(model->backend, step, layer, err));
    return ops->linear(model->backend, step, layer, BD_GROUP_O, err);
}

/* residual += attention's output; then the feed-forward block into proj. */
static bd_status run_ffn(bd_model *model, const bd_step *step, uint32_t layer, bd_error *err) {
    const bd_backend_ops *ops = model->ops;
    const bd_norm post_attention =
        model->config.post_norms ? BD_NORM_POST_ATTENTION : BD_NORM_COUNT;
    TRY(ops->norm_residual(model->backend, step, layer, BD_NORM_PRE_FFN, true, layer,
                           post_attention, err));
    TRY(ops->linear(model->backend, step, layer, BD_GROUP_GATE_UP, err));
    return ops->linear(model->backend, step, layer, BD_GROUP_DOWN, err);
}

static bd_status run_head(bd_model *model, const bd_step *step, bd_error *err) {
    const bd_backend_ops *ops = model->ops;
    const uint32_t layers = model->config.layers;
    const bd_norm post_ffn = model->config.post_norms ? BD_NORM_POST_FFN : BD_NORM_COUNT;
    if (step->logits_row_count == 0) return BD_OK; /* a prefill chunk before the last */
    TRY(ops->norm_residual(model->backend, step, layers, BD_NORM_INPUT, true, layers - 1, post_ffn,
                           err));
    TRY(ops->head(model->backend, step, err));
    return ops->sample(model->backend, step, err);
}

bd_status bd_model_forward_rank(bd_model *model, const bd_step *step, bd_layer_gate gate,
                                void *gate_ctx, bd_error *err) {
    const uint32_t layers = model->config.layers;
    TRY(model->ops->step_begin(model->backend, step, err));
    TRY(pass_gate(gate, gate_ctx, 0, err));
    TRY(model->ops->embed(model->backend, step, err));
    for (uint32_t layer = 0; layer < layers; layer++) {
        TRY(pass_gate(gate, gate_ctx, 1 + layer, err));
        TRY(run_attention(model, step, layer, err));
        TRY(run_ffn(model, step, layer, err));
    }
    TRY(pass_gate(gate, gate_ctx, 1 + layers, err));
    return run_head(model, step, err);
}
