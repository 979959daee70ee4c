/* ops.c - the operators of one step: arguments for the kernels, launched on the rank's stream. */
#include "cuda_internal.h"

static const k_overlay_linear *linear_table(const bd_cuda *cuda, uint32_t item) {
    return cuda->step.linears + (size_t)item * cuda->step.overlay_count;
}

const float *const *cuda_norm_table(const bd_cuda *cuda, uint32_t layer, bd_norm kind) {
    return cuda->step.norms + ((size_t)layer * BD_NORM_COUNT + kind) * cuda->step.overlay_count;
}

bd_status cuda_embed(bd_backend *backend, const bd_step *step, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda->replay) return BD_OK;
    const k_embed_args args = {.residual = cuda->residual,
                               .embed = cuda->embed,
                               .tokens = cuda->step.tokens,
                               .row_overlay = cuda->step.row_overlay,
                               .overlays = linear_table(cuda, cuda->shape.layers * BD_LINEAR_COUNT),
                               .rows = (int32_t)step->row_count,
                               .hidden = (int32_t)cuda->shape.hidden,
                               .block_rows = (int32_t)cuda->step.block_rows,
                               .overlay_count = (int32_t)cuda->step.overlay_count,
                               .first = (int32_t)cuda->options.vocab_first,
                               .vocab = (int32_t)cuda->shape.vocab,
                               .scale = cuda->config->embed_scale,
                               .fp16 = cuda->fp16};
    bd_status s = cuda_check(cuda, k_embed(&args, cuda->stream), "embedding", err);
    if (s == BD_OK) s = cuda_lora_embed(cuda, step, err);
    if (s == BD_OK) s = cuda_whole_embed(cuda, step, err);
    if (s != BD_OK || !cuda->options.comm) return s;
    const uint64_t count = (uint64_t)step->row_count * cuda->shape.hidden;
    return cuda_ranks_sum(cuda, cuda->residual, count, BD_COMM_F32, err);
}

bd_status cuda_norm_residual(bd_backend *backend, const bd_step *step, uint32_t layer, bd_norm kind,
                             bool add, uint32_t post_layer, bd_norm post, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda->replay) return BD_OK;
    const bool with_post = add && post != BD_NORM_COUNT;
    k_norm_args args = {.residual = cuda->residual,
                        .proj = cuda->proj,
                        .proj_half = cuda->proj_half,
                        .normed = cuda->normed,
                        .gamma = cuda->norms[layer][kind],
                        .post_gamma = with_post ? cuda->norms[post_layer][post] : NULL,
                        .gammas = cuda_norm_table(cuda, layer, kind),
                        .post_gammas = with_post ? cuda_norm_table(cuda, post_layer, post) : NULL,
                        .row_overlay = cuda->step.row_overlay,
                        .rows = (int32_t)step->row_count,
                        .width = (int32_t)cuda->shape.hidden,
                        .add = add,
                        .plus_one = cuda->config->norm_plus_one,
                        .eps = cuda->config->norm_eps,
                        .fp16 = cuda->fp16,
                        .overlap = cuda->fast.usable};
    if (add && cuda->proj_partial) {
        bool done;
        cuda->proj_partial = false;
        const bd_status s = cuda_ranks_norm(cuda, &args, &done, err);
        if (s != BD_OK || done) return s;
    }
    return cuda_check(cuda, k_norm_residual(&args, cuda->stream), "norm", err);
}

static bd_status linear_one(bd_cuda *cuda, uint32_t layer, bd_linear which, const uint16_t *x,
                            float *y, bool bias, bd_error *err) {
    const k_linear_args args = {.x = x,
                                .w = cuda->linears[layer][which],
                                .y = y,
                                .bias = bias ? cuda->biases[layer][which] : NULL,
                                .overlays = linear_table(cuda, layer * BD_LINEAR_COUNT + which),
                                .tiles = cuda->step.tiles,
                                .segments = cuda->step.segments,
                                .row_overlay = cuda->step.row_overlay,
                                .tile_count = (int32_t)cuda->step.tile_count,
                                .tile_rows_max = (int32_t)cuda->step.tile_rows_max,
                                .n = (int32_t)cuda->shape.linear_n[which],
                                .k = (int32_t)cuda->shape.linear_k[which],
                                .y_stride = (int32_t)cuda->shape.linear_n[which],
                                .planes_max = (int32_t)cuda->step.planes_max,
                                .fp16 = cuda->fp16};
    return cuda_check(cuda, k_linear_plain(&args, cuda->stream), "linear", err);
}

const float *cuda_group_bias(const bd_cuda *cuda, uint32_t layer, bd_group group) {
    const bd_model_config *config = cuda->config;
    switch (group) {
    case BD_GROUP_QKV:
        return config->qkv_bias ? cuda->biases[layer][BD_LINEAR_Q] : NULL;
    case BD_GROUP_O:
        return config->o_bias ? cuda->biases[layer][BD_LINEAR_O] : NULL;
    case BD_GROUP_GATE_UP:
        return config->mlp_bias ? cuda->biases[layer][BD_LINEAR_GATE] : NULL;
    case BD_GROUP_DOWN:
        return config->mlp_bias ? cuda->biases[layer][BD_LINEAR_DOWN] : NULL;
    }
    return NULL;
}

static bd_status plain_linear(bd_cuda *cuda, uint32_t layer, bd_group group, bd_error *err) {
    bd_status s;
    const bool bias = cuda_group_bias(cuda, layer, group) != NULL;
    switch (group) {
    case BD_GROUP_QKV:
        if ((s = linear_one(cuda, layer, BD_LINEAR_Q, cuda->normed, cuda->q_in, bias, err)) !=
            BD_OK)
            return s;
        if ((s = linear_one(cuda, layer, BD_LINEAR_K, cuda->normed, cuda->k_in, bias, err)) !=
            BD_OK)
            return s;
        return linear_one(cuda, layer, BD_LINEAR_V, cuda->normed, cuda->v_in, bias, err);
    case BD_GROUP_O:
        return linear_one(cuda, layer, BD_LINEAR_O, cuda->attn, cuda->proj, bias, err);
    case BD_GROUP_GATE_UP:
        if ((s = linear_one(cuda, layer, BD_LINEAR_GATE, cuda->normed, cuda->gate, bias, err)) !=
            BD_OK)
            return s;
        return linear_one(cuda, layer, BD_LINEAR_UP, cuda->normed, cuda->up, bias, err);
    case BD_GROUP_DOWN:
        return linear_one(cuda, layer, BD_LINEAR_DOWN, cuda->act, cuda->proj, bias, err);
    }
    return bd_fail(err, BD_E_INTERNAL, "linear", "unknown group");
}

static bd_status activate(bd_cuda *cuda, const bd_step *step, bool fast, bd_error *err) {
    const uint32_t ffn = cuda->shape.ffn;
    const k_gate_args args = {.act = cuda->act,
                              .gate = fast ? (const void *)cuda->fast.fused : cuda->gate,
                              .up = fast ? (const void *)(cuda->fast.fused + ffn) : cuda->up,
                              .rows = (int32_t)step->row_count,
                              .width = (int32_t)ffn,
                              .in_stride = (int32_t)(fast ? 2 * ffn : ffn),
                              .in_half = fast,
                              .fp16 = cuda->fp16,
                              .overlap = cuda->fast.usable,
                              .gelu = cuda->config->activation == BD_ACT_GELU_TANH};
    return cuda_check(cuda, k_gate(&args, cuda->stream), "activation", err);
}

bd_status cuda_linear(bd_backend *backend, const bd_step *step, uint32_t layer, bd_group group,
                      bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda->replay) return BD_OK;
    const bool fast = cuda->fast_step.usable && cuda->fast.groups[group].fast;
    bd_status s =
        fast ? cuda_fast_linear(cuda, layer, group, err) : plain_linear(cuda, layer, group, err);
    if (s == BD_OK) s = cuda_lora_linear(cuda, step, layer, group, fast, err);
    if (s != BD_OK) return s;
    if (group == BD_GROUP_QKV) cuda->qkv_half = fast;
    if (group == BD_GROUP_O || group == BD_GROUP_DOWN) {
        cuda->proj_half = fast;
        cuda->proj_partial = cuda->options.comm != NULL; /* summed by whoever reads it */
    }
    return group == BD_GROUP_GATE_UP ? activate(cuda, step, fast, err) : BD_OK;
}

/* Of the base's table and the signs. */
static bd_status table_head(bd_cuda *cuda, float *logits, bd_error *err) {
    const cuda_step *d = &cuda->step;
    const uint32_t hidden = cuda->shape.hidden, vocab = cuda->shape.vocab;
    bd_status s = BD_OK;
    if (cuda->fast_step.head.usable) return cuda_fast_head_run(cuda, logits, err);
    for (uint32_t b = 0; s == BD_OK && b < d->block_count; b++) {
        const uint32_t first = b * d->block_rows,
                       n = vocab - first < d->block_rows ? vocab - first : d->block_rows;
        const k_linear_args args = {
            .x = cuda->head_in,
            .w = cuda->head + (size_t)first * hidden,
            .y = logits + first,
            .overlays =
                linear_table(cuda, cuda->shape.layers * BD_LINEAR_COUNT + d->block_count + b),
            .tiles = d->logits_tiles,
            .segments = d->logits_segments,
            .row_overlay = d->logits_overlay,
            .tile_count = (int32_t)d->logits_tile_count,
            .tile_rows_max = (int32_t)d->logits_tile_rows_max,
            .n = (int32_t)n,
            .k = (int32_t)hidden,
            .y_stride = (int32_t)cuda->head_stride,
            .planes_max = (int32_t)d->planes_max,
            .fp16 = cuda->fp16};
        s = cuda_check(cuda, k_linear_plain(&args, cuda->stream), "head", err);
    }
    return s;
}

bd_status cuda_head(bd_backend *backend, const bd_step *step, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda->replay) return BD_OK;
    float *logits = cuda->options.comm ? cuda->logits_part : cuda->logits;
    bd_status s = cuda_check(cuda,
                             k_gather_rows(cuda->head_in, cuda->normed, cuda->step.logits_rows,
                                           (int32_t)step->logits_row_count,
                                           (int32_t)cuda->shape.hidden, cuda->stream),
                             "head", err);
    if (s == BD_OK && !cuda->whole.covers) s = table_head(cuda, logits, err);
    if (s == BD_OK && !cuda->whole.covers) s = cuda_lora_head(cuda, step, logits, err);
    return s == BD_OK ? cuda_whole_head(cuda, step, logits, err) : s;
}

bd_status cuda_sample(bd_backend *backend, const bd_step *step, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda->replay)
        return cuda_check(cuda, cudaGraphLaunch(cuda->replay->exec, cuda->stream), "step", err);
    const uint32_t width = cuda->logits_width;
    for (uint32_t row = 0; row < step->logits_row_count; row += CUDA_SAMPLE_ROWS) {
        const uint32_t count = step->logits_row_count - row < CUDA_SAMPLE_ROWS
                                   ? step->logits_row_count - row
                                   : CUDA_SAMPLE_ROWS;
        /* Then every rank samples as one would, from the same numbers. */
        bd_status s = cuda->options.comm ? cuda_ranks_logits(cuda, row, count, err) : BD_OK;
        if (s != BD_OK) return s;
        const cudaError_t error =
            k_sample(cuda->logits + (size_t)row * width, cuda->scratch,
                     cuda->step.sample_rows + row, cuda->step.edits, cuda->results + row,
                     (int32_t)count, (int32_t)width, cuda->config->logit_softcap, cuda->stream);
        s = cuda_check(cuda, error, "sampling", err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}
