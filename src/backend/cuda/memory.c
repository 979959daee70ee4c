/* memory.c - the plan of the device's memory, and opening it: every byte is carved at start from
 * four arenas. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/half.h"
#include "bitdelta/base/log.h"
#include "cuda_internal.h"

static size_t aligned(size_t bytes) {
    return (bytes + 255u) & ~(size_t)255u;
}

void cuda_shape_from(const bd_model_config *config, cuda_shape *out) {
    const uint32_t q = config->heads * config->head_dim, kv = config->kv_heads * config->head_dim;
    *out = (cuda_shape){
        .hidden = config->hidden,
        .layers = config->layers,
        .ffn = config->ffn,
        .vocab = config->vocab,
        .head_dim = config->head_dim,
        .heads = config->heads,
        .kv_heads = config->kv_heads,
        .q_width = q,
        .kv_width = kv,
        .linear_n = {q, kv, kv, config->hidden, config->ffn, config->ffn, config->hidden},
        .linear_k = {config->hidden, config->hidden, config->hidden, q, config->hidden,
                     config->hidden, config->ffn}};
}

bd_status cuda_supports(const bd_backend_options *options, bd_error *err) {
    const bd_model_config *config = options->config;
    if (options->rank_count > BD_COMM_RANKS_MAX || options->rank >= options->rank_count)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "rank %u of %u: the CUDA backend takes 1 to %u ranks", options->rank,
                       options->rank_count, BD_COMM_RANKS_MAX);
    if (options->extra_vocab_max > BD_EXTRA_VOCAB_MAX)
        return bd_fail(err, BD_E_UNSUPPORTED, "extra_vocab_max",
                       "the CUDA backend has room for %u added rows of vocabulary, not %u",
                       BD_EXTRA_VOCAB_MAX, options->extra_vocab_max);
    if (config->head_dim > 256 || config->head_dim % 2)
        return bd_fail(err, BD_E_UNSUPPORTED, "head_dim",
                       "the CUDA backend takes an even head_dim up to 256, not %u",
                       config->head_dim);
    if (config->hidden % 8 || config->ffn % 8 || config->heads * config->head_dim % 8)
        return bd_fail(err, BD_E_UNSUPPORTED, "hidden_size",
                       "the CUDA backend takes hidden and intermediate sizes and heads times "
                       "head_dim that are multiples of 8, not %u, %u and %u",
                       config->hidden, config->ffn, config->heads * config->head_dim);
    if (config->hidden > K_NORM_WIDTH_MAX)
        return bd_fail(err, BD_E_UNSUPPORTED, "hidden_size",
                       "the CUDA backend takes a hidden size up to %d, not %u", K_NORM_WIDTH_MAX,
                       config->hidden);
    return BD_OK;
}

/* Weights in the order and sizes they are carved. visit(ctx, slot, bytes): slot is where the
 * pointer goes. */
typedef void (*carve_fn)(void *ctx, void **slot, size_t bytes);

static void weights_carve(bd_cuda *cuda, const cuda_shape *shape, const bd_model_config *config,
                          carve_fn carve, void *ctx) {
    void *unused;
    const size_t table = (size_t)shape->vocab * shape->hidden * 2;
    carve(ctx, cuda ? (void **)&cuda->embed : &unused, table);
    if (!config->tied) carve(ctx, cuda ? (void **)&cuda->head : &unused, table);
    /* A layer's matrices lie one behind the other, and so do its biases: the fast path reads q, k,
     * v (gate, up) as one. */
    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++)
            carve(ctx, cuda ? (void **)&cuda->linears[layer][i] : &unused,
                  (size_t)shape->linear_n[i] * shape->linear_k[i] * 2);
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++)
            carve(ctx, cuda ? (void **)&cuda->biases[layer][i] : &unused,
                  (size_t)shape->linear_n[i] * 4);
    }
    for (uint32_t layer = 0; layer <= shape->layers; layer++)
        for (uint32_t i = 0; i < BD_NORM_COUNT; i++)
            carve(ctx, cuda ? (void **)&cuda->norms[layer][i] : &unused,
                  (size_t)(i >= BD_NORM_Q ? shape->head_dim : shape->hidden) * 4);
}

static void workspace_carve(bd_cuda *cuda, const cuda_shape *shape, const bd_backend_options *o,
                            carve_fn carve, void *ctx) {
    void *unused;
    const size_t rows = o->rows_max, logits = o->logits_rows_max;
#define CARVE(member, bytes) carve(ctx, cuda ? (void **)&cuda->member : &unused, bytes)
    CARVE(residual, rows * shape->hidden * 4);
    CARVE(proj, rows * shape->hidden * 4);
    CARVE(normed, rows * shape->hidden * 2);
    CARVE(q_in, rows * shape->q_width * 4);
    CARVE(k_in, rows * shape->kv_width * 4);
    CARVE(v_in, rows * shape->kv_width * 4);
    CARVE(q, rows * shape->q_width * 2);
    CARVE(attn, rows * shape->q_width * 2);
    CARVE(gate, rows * shape->ffn * 4);
    CARVE(up, rows * shape->ffn * 4);
    CARVE(act, rows * shape->ffn * 2);
    CARVE(head_in, logits * shape->hidden * 2);
    CARVE(results, logits * sizeof(k_sample_result));
    CARVE(overflow, sizeof *cuda->overflow);
    CARVE(rope, (size_t)o->rope_tables_max * o->max_model_len * o->config->rope.rotary_dim * 4);
    CARVE(upload.device, cuda_upload_bytes(o, shape));
    if (o->lora_rank_max) { /* of q, k and v side by side, or of the head */
        const size_t most = 3 * rows > logits ? 3 * rows : logits;
        CARVE(lora_t, most * o->lora_rank_max * 4);
    }
    const size_t fused = shape->q_width + 2 * (size_t)shape->kv_width,
                 gated = 2 * (size_t)shape->ffn;
    CARVE(fast.fused, rows * (fused > gated ? fused : gated) * 2);
    const size_t inner = shape->ffn > shape->q_width ? shape->ffn : shape->q_width,
                 k_max = inner > shape->hidden ? inner : shape->hidden;
    CARVE(fast.planes, k_planes_bytes(K_DECODE_ROWS, (int)k_max));
    CARVE(fast.digits, CUDA_DIGIT_ROWS / 32 * k_digits_bytes(32, (int)k_max));
    CARVE(fast.workspace, k_decode_workspace_bytes(CUDA_SM_MAX));
    CARVE(fast.tickets, CUDA_TICKETS * sizeof(unsigned));
    if (o->kernels != BD_KERNELS_PLAIN && k_attention_fast((int32_t)shape->head_dim)) {
        const size_t heads = (size_t)o->seqs_max * shape->heads;
        CARVE(attention.partials, heads * K_ATTENTION_SPLITS * (shape->head_dim + 2u) * 4);
        CARVE(attention.counters, heads * sizeof(unsigned));
    }
    for (int i = 0; i < 2; i++)
        CARVE(delta_staging.device[i], CUDA_STAGING_BYTES);
    for (uint32_t i = 0; i < CUDA_BRING_COUNT; i++)
        CARVE(uploads.device[i], CUDA_BRING_BYTES);
#undef CARVE
}

/* Added rows in eights, so that rows of logits stay on the bounds that the base's have. */
static uint32_t logits_width(const bd_backend_options *o) {
    return bd_vocab_total(o) + (o->extra_vocab_max + 7u) / 8u * 8u;
}

static void logits_carve(bd_cuda *cuda, const bd_backend_options *o, carve_fn carve, void *ctx) {
    void *unused;
    const size_t rows = o->logits_rows_max, width = logits_width(o), each = bd_vocab_each(o);
    carve(ctx, cuda ? (void **)&cuda->logits : &unused, rows * width * 4);
    /* The sampling's, and before it what the ranks gather, of which the last has columns to spare.
     */
    carve(ctx, cuda ? (void **)&cuda->scratch : &unused,
          (size_t)CUDA_SAMPLE_ROWS * (width + BD_COMM_RANKS_MAX) * 4);
    if (o->rank_count > 1)
        carve(ctx, cuda ? (void **)&cuda->logits_part : &unused, rows * each * 4);
}

static void carve_count(void *ctx, void **slot, size_t bytes) {
    (void)slot;
    *(uint64_t *)ctx += aligned(bytes);
}

static void carve_take(void *ctx, void **slot, size_t bytes) {
    uint8_t **at = ctx;
    *slot = *at;
    *at += aligned(bytes);
}

/* One block more than the engine knows of: the padding of recorded steps writes there. */
static size_t kv_layer_elements(const bd_backend_options *o, const cuda_shape *shape) {
    return ((size_t)o->kv_block_count + 1) * 2 * shape->kv_width * o->kv_block_tokens;
}

uint64_t cuda_unplanned_bytes(const bd_backend_options *o) {
    const bool alone = o->rank_count <= 1;
    return CUDA_CODE_BYTES + (alone ? 0 : CUDA_RANKS_BYTES) +
           (uint64_t)cuda_recordings(o) * o->config->layers *
               (alone ? CUDA_RECORD_BYTES : CUDA_RECORD_RANKS_BYTES);
}

bd_status cuda_plan(const bd_backend_options *o, bd_memory_plan *plan, bd_error *err) {
    (void)err;
    cuda_shape shape;
    cuda_shape_from(o->config, &shape);
    *plan = (bd_memory_plan){0};
    weights_carve(NULL, &shape, o->config, carve_count, &plan->weights);
    workspace_carve(NULL, &shape, o, carve_count, &plan->workspace);
    logits_carve(NULL, o, carve_count, &plan->logits);
    plan->kv = (uint64_t)kv_layer_elements(o, &shape) * shape.layers * 2;
    plan->deltas = o->delta_bytes;
    plan->total = plan->weights + plan->workspace + plan->logits + plan->kv + plan->deltas;
    size_t available = 0, all = 0;
    const uint64_t kept = cuda_unplanned_bytes(o), none = kept + CUDA_CONTEXT_BYTES;
    /* Nothing left is not the 0 of "unknown". */
    plan->kept = o->device_bytes ? none : kept;
    plan->available = o->device_bytes > none ? o->device_bytes - none : o->device_bytes ? 1 : 0;
    if (o->device_bytes) return BD_OK;
    if (cudaSetDevice((int)o->device_index) == cudaSuccess &&
        cudaMemGetInfo(&available, &all) == cudaSuccess) /* without what the context took */
        plan->available = available > kept ? available - kept : 0;
    (void)cudaGetLastError();
    return BD_OK;
}

static bd_status arenas_open(bd_cuda *cuda, bd_error *err) {
    const bd_memory_plan *plan = &cuda->plan;
    bd_status s;
    if ((s = cuda_check(cuda, cudaMalloc((void **)&cuda->weights, plan->weights), "base weights",
                        err)) != BD_OK)
        return s;
    if ((s = cuda_check(cuda, cudaMalloc((void **)&cuda->workspace, plan->workspace + plan->logits),
                        "workspace", err)) != BD_OK)
        return s;
    if (plan->kv &&
        (s = cuda_check(cuda, cudaMalloc((void **)&cuda->kv, plan->kv), "KV cache", err)) != BD_OK)
        return s;
    if (plan->deltas && (s = cuda_check(cuda, cudaMalloc((void **)&cuda->deltas, plan->deltas),
                                        "delta pages", err)) != BD_OK)
        return s;
    uint8_t *at = cuda->weights;
    weights_carve(cuda, &cuda->shape, cuda->config, carve_take, &at);
    if (cuda->config->tied) cuda->head = cuda->embed;
    at = cuda->workspace;
    workspace_carve(cuda, &cuda->shape, &cuda->options, carve_take, &at);
    logits_carve(cuda, &cuda->options, carve_take, &at);
    /* Norms and biases that the model lacks stay zero; everything else is written before it is
     * read. */
    s = cuda_check(cuda, cudaMemset(cuda->overflow, 0, sizeof *cuda->overflow), "workspace", err);
    return s == BD_OK
               ? cuda_check(cuda, cudaMemset(cuda->weights, 0, plan->weights), "base weights", err)
               : s;
}

static bd_status streams_open(bd_cuda *cuda, bd_error *err) {
    bd_status s;
    /* Steps first: what a load has for the device to do takes the room that they leave. */
    int least = 0, greatest = 0;
    if ((s = cuda_check(cuda, cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream",
                        err)) != BD_OK)
        return s;
    if ((s = cuda_check(
             cuda, cudaStreamCreateWithPriority(&cuda->stream, cudaStreamNonBlocking, greatest),
             "stream", err)) != BD_OK)
        return s;
    if ((s = cuda_check(cuda,
                        cudaStreamCreateWithPriority(&cuda->copy, cudaStreamNonBlocking, least),
                        "copy stream", err)) != BD_OK)
        return s;
    if ((s = cuda_check(cuda, cudaEventCreateWithFlags(&cuda->step_done, cudaEventDisableTiming),
                        "event", err)) != BD_OK)
        return s;
    cuda->upload.cap_bytes = cuda_upload_bytes(&cuda->options, &cuda->shape);
    if ((s = cuda_check(cuda, cudaMallocHost((void **)&cuda->upload.host, cuda->upload.cap_bytes),
                        "pinned memory", err)) != BD_OK)
        return s;
    const size_t results_bytes = cuda->options.logits_rows_max * sizeof(k_sample_result);
    if ((s = cuda_check(cuda, cudaMallocHost((void **)&cuda->results_host, results_bytes),
                        "pinned memory", err)) != BD_OK)
        return s;
    if ((s = cuda_staging_open(cuda, &cuda->base_staging, err)) != BD_OK) return s;
    if ((s = cuda_staging_open(cuda, &cuda->delta_staging, err)) != BD_OK) return s;
    return cuda_uploads_open(cuda, err);
}

/* Once: which kernels each group of matrices gets, and attention. */
static void log_kernels(bd_cuda *cuda) {
    static const char *const names[2] = {"plain", "sm90"};
    if (cuda->options.kernels == BD_KERNELS_PLAIN) {
        cuda->fast.usable = false;
        for (uint32_t g = 0; g < CUDA_GROUPS; g++)
            cuda->fast.groups[g].fast = false;
    }
    const cuda_group *g = cuda->fast.groups;
    const cuda_attention *a = &cuda->attention;
    bd_log(
        BD_LOG_INFO, "cuda",
        "kernels qkv=%s o=%s gate_up=%s down=%s prefill_attention=%s decode_attention=%s dtype=%s",
        names[g[BD_GROUP_QKV].fast], names[g[BD_GROUP_O].fast], names[g[BD_GROUP_GATE_UP].fast],
        names[g[BD_GROUP_DOWN].fast], names[a->prefill], a->decode ? "split" : "plain",
        cuda->fp16 ? "fp16" : "bf16");
}

bd_status cuda_open(const bd_backend_options *options, bd_backend **out, bd_error *err) {
    *out = NULL;
    bd_status s = cuda_supports(options, err);
    if (s != BD_OK) return s;
    if (options->rank_count > 1 && !options->comm)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "one of %u ranks needs a way to the others", options->rank_count);
    bd_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda) return bd_fail(err, BD_E_MEMORY, "cuda", "out of memory");
    cuda->base.ops = bd_backend_cuda_ops();
    cuda->options = *options;
    cuda->config = options->config;
    cuda->device = (int)options->device_index;
    cuda->fp16 = options->dtype == BD_DTYPE_F16;
    cuda_shape_from(options->config, &cuda->shape);
    cuda->kv_layer_elements = kv_layer_elements(options, &cuda->shape);
    cuda->vocab_total = bd_vocab_total(options);
    cuda->logits_width = logits_width(options);
    cuda->head_stride = options->comm ? bd_vocab_each(options) : cuda->logits_width;
    const uint32_t layers = cuda->shape.layers;
    cuda->linears = calloc(layers, sizeof *cuda->linears);
    cuda->biases = calloc(layers, sizeof *cuda->biases);
    cuda->norms = calloc(layers + 1u, sizeof *cuda->norms);
    if (!cuda->linears || !cuda->biases || !cuda->norms) {
        s = bd_fail(err, BD_E_MEMORY, "cuda", "out of memory");
        goto fail;
    }
    if ((s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err)) != BD_OK) goto fail;
    if ((s = cuda_plan(options, &cuda->plan, err)) != BD_OK) goto fail;
    if ((s = arenas_open(cuda, err)) != BD_OK) goto fail;
    if ((s = streams_open(cuda, err)) != BD_OK) goto fail;
    cuda_fast_open(cuda);
    cuda_attention_open(cuda);
    cuda_ranks_open(cuda);
    log_kernels(cuda);
    *out = &cuda->base;
    return BD_OK;
fail:
    cuda_close(&cuda->base);
    return s;
}

void cuda_close(bd_backend *backend) {
    if (!backend) return;
    bd_cuda *cuda = cuda_of(backend);
    (void)cudaSetDevice(cuda->device);
    if (cuda->stream) cudaStreamSynchronize(cuda->stream);
    if (cuda->copy) cudaStreamSynchronize(cuda->copy);
    cuda_uploads_close(cuda);
    cuda_staging_close(&cuda->delta_staging);
    cuda_staging_close(&cuda->base_staging);
    if (cuda->results_host) cudaFreeHost(cuda->results_host);
    if (cuda->upload.host) cudaFreeHost(cuda->upload.host);
    if (cuda->step_done) cudaEventDestroy(cuda->step_done);
    if (cuda->copy) cudaStreamDestroy(cuda->copy);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
    cudaFree(cuda->deltas);
    cudaFree(cuda->kv);
    cudaFree(cuda->workspace);
    cudaFree(cuda->weights);
    cuda_graphs_close(cuda);
    cuda_attention_close(cuda);
    cuda_fast_close(cuda);
    free(cuda->norms);
    free(cuda->biases);
    free(cuda->linears);
    free(cuda);
}

/* cols values of any supported dtype as float32. */
static void row_to_f32(bd_dtype dtype, const uint8_t *src, uint64_t cols, float *dst) {
    for (uint64_t i = 0; i < cols; i++) {
        uint16_t half;
        if (dtype == BD_DTYPE_F32) {
            memcpy(&dst[i], src + 4 * i, 4);
            continue;
        }
        memcpy(&half, src + 2 * i, 2);
        dst[i] = dtype == BD_DTYPE_BF16 ? bd_bf16_to_f32(half) : bd_f16_to_f32(half);
    }
}

/* False: a value is out of fp16's range. bf16 stays bf16: the device converts it. */
static bool row_to_half(const bd_cuda *cuda, bd_dtype dtype, const uint8_t *src, uint64_t cols,
                        uint16_t *dst) {
    if (dtype == BD_DTYPE_BF16 || (cuda->fp16 && dtype == BD_DTYPE_F16)) {
        memcpy(dst, src, cols * 2);
        return true;
    }
    bool fits = true;
    for (uint64_t i = 0; i < cols; i++) {
        float value;
        row_to_f32(dtype, src + i * bd_dtype_bytes(dtype), 1, &value);
        dst[i] = cuda->fp16 ? bd_f32_to_f16(value) : bd_f32_to_bf16(value);
        if (cuda->fp16) fits &= (dst[i] & 0x7c00u) != 0x7c00u;
    }
    return fits;
}

static bd_status out_of_range(bd_error *err) {
    return bd_fail(err, BD_E_UNSUPPORTED, "dtype",
                   "it has a value that fp16 cannot hold (beyond 65504); use --dtype bf16");
}

/* What upload left as bf16, into fp16. Waits, so that a fault is this tensor's. */
static bd_status convert(bd_cuda *cuda, void *data, uint64_t count, bd_error *err) {
    unsigned overflow = 0;
    bd_status s = cuda_check(cuda, k_bf16_to_fp16(data, count, cuda->overflow, cuda->stream),
                             "conversion to fp16", err);
    if (s == BD_OK)
        s = cuda_check(cuda,
                       cudaMemcpyAsync(&overflow, cuda->overflow, sizeof overflow,
                                       cudaMemcpyDeviceToHost, cuda->stream),
                       "conversion to fp16", err);
    if (s == BD_OK)
        s = cuda_check(cuda, cudaStreamSynchronize(cuda->stream), "conversion to fp16", err);
    if (s != BD_OK || !overflow) return s;
    s = cuda_check(cuda, cudaMemsetAsync(cuda->overflow, 0, sizeof *cuda->overflow, cuda->stream),
                   "conversion to fp16", err);
    return s == BD_OK ? out_of_range(err) : s;
}

/* Rows [row, row + count) of the view into a pinned half. */
static bool fill_half(const bd_cuda *cuda, const bd_weight_view *view, uint64_t row, uint64_t count,
                      bool matrix, uint8_t *host) {
    const size_t row_bytes = view->cols * (matrix ? 2u : 4u);
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *src = (const uint8_t *)view->data + (row + i) * view->row_stride_bytes;
        void *to = host + i * row_bytes;
        if (!matrix)
            row_to_f32(view->dtype, src, view->cols, to);
        else if (!row_to_half(cuda, view->dtype, src, view->cols, to))
            return false;
    }
    return true;
}

/* rows x cols to the device through the pinned halves, as 16-bit (matrices) or float32 (vectors).
 */
static bd_status upload(bd_cuda *cuda, void *dst, const bd_weight_view *view, bool matrix,
                        bd_error *err) {
    const size_t row_bytes = view->cols * (matrix ? 2u : 4u);
    if (row_bytes > CUDA_STAGING_BYTES)
        return bd_fail(err, BD_E_LIMIT, "weights", "a row of %zu bytes exceeds the staging buffer",
                       row_bytes);
    const uint64_t rows_per = CUDA_STAGING_BYTES / row_bytes;
    for (uint64_t row = 0; row < view->rows; row += rows_per) {
        const uint64_t count = view->rows - row < rows_per ? view->rows - row : rows_per;
        uint32_t half;
        bd_status s = cuda_staging_next(cuda, &cuda->base_staging, &half, err);
        if (s != BD_OK) return s;
        uint8_t *host = cuda->base_staging.host[half];
        if (!fill_half(cuda, view, row, count, matrix, host)) return out_of_range(err);
        uint8_t *to = (uint8_t *)dst + row * row_bytes;
        s = cuda_check(
            cuda,
            cudaMemcpyAsync(to, host, count * row_bytes, cudaMemcpyHostToDevice, cuda->stream),
            "upload of weights", err);
        if (s != BD_OK) return s;
        s = cuda_check(cuda, cudaEventRecord(cuda->base_staging.done[half], cuda->stream),
                       "upload of weights", err);
        if (s != BD_OK) return s;
    }
    if (!matrix || !cuda->fp16 || view->dtype != BD_DTYPE_BF16) return BD_OK;
    return convert(cuda, dst, view->rows * view->cols, err);
}

bd_status cuda_weight_put(bd_backend *backend, bd_weight_id id, const bd_weight_view *view,
                          bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    const bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    if (s != BD_OK) return s;
    switch (id.kind) {
    case BD_WEIGHT_EMBED:
        return upload(cuda, cuda->embed, view, true, err);
    case BD_WEIGHT_HEAD:
        return upload(cuda, cuda->head, view, true, err);
    case BD_WEIGHT_LINEAR:
        return upload(cuda, cuda->linears[id.layer][id.which], view, true, err);
    case BD_WEIGHT_BIAS:
        return upload(cuda, cuda->biases[id.layer][id.which], view, false, err);
    case BD_WEIGHT_NORM:
        return upload(cuda, cuda->norms[id.layer][id.which], view, false, err);
    }
    return bd_fail(err, BD_E_INTERNAL, "weights", "unknown kind of weight");
}

bd_status cuda_rope_table_put(bd_backend *backend, uint32_t table, const float *inv_freq,
                              float scale, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (table >= cuda->options.rope_tables_max)
        return bd_fail(err, BD_E_LIMIT, "rope", "table %u, but only %u were planned", table,
                       cuda->options.rope_tables_max);
    const uint32_t half = cuda->config->rope.rotary_dim / 2,
                   positions = cuda->options.max_model_len;
    const size_t count = (size_t)positions * half * 2;
    float *host = malloc(count * sizeof *host);
    if (!host) return bd_fail(err, BD_E_MEMORY, "rope", "out of memory");
    for (uint32_t p = 0; p < positions; p++)
        for (uint32_t i = 0; i < half; i++) {
            const float phase = (float)p * inv_freq[i]; /* float32, as transformers does */
            host[((size_t)p * half + i) * 2] = cosf(phase) * scale;
            host[((size_t)p * half + i) * 2 + 1] = sinf(phase) * scale;
        }
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    if (s == BD_OK)
        s = cuda_check(
            cuda, cudaMemcpy(cuda->rope + table * count, host, count * 4, cudaMemcpyHostToDevice),
            "rope table", err);
    /* From memory that is not page-locked a copy may return before the device has it all, and no
     * stream of ours waits for it. */
    if (s == BD_OK)
        s = cuda_check(cuda, cudaStreamSynchronize(cudaStreamLegacy), "rope table", err);
    free(host);
    return s;
}
