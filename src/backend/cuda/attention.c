/* attention.c - which attention kernel takes which rows of a step, and their launches.
 * Sequences of one row go to the split-KV kernel, those of several to the wgmma kernel; a head_dim
 * or a device these do not take goes to the plain kernel with all rows. The choice of a row's
 * kernel depends on its own sequence only. */
#include <stdlib.h>

#include "cuda_internal.h"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

bool cuda_map_make(CUtensorMap *map, const void *data, uint64_t rows, uint64_t cols,
                   uint32_t box_rows, bool fp16) {
    union {
        void *data;
        encode_fn encode;
        const void *constant; /* the driver does not write through it, its prototype lacks const */
    } entry = {.data = NULL}, address = {.constant = data};
    enum cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry.data, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return false;
    const cuuint64_t size[2] = {cols, rows}, stride[1] = {cols * 2};
    const cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    return entry.encode(map,
                        fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        2, address.data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

uint16_t *cuda_layer_kv(const bd_cuda *cuda, uint32_t layer) {
    return (uint16_t *)(void *)cuda->kv + layer * cuda->kv_layer_elements;
}

bool cuda_attention_open(bd_cuda *cuda) {
    cuda_attention *a = &cuda->attention;
    const bd_backend_options *o = &cuda->options;
    const int32_t dim = (int32_t)cuda->shape.head_dim, block = (int32_t)o->kv_block_tokens;
    const size_t counters = (size_t)o->seqs_max * cuda->shape.heads * sizeof *a->counters;
    *a = (cuda_attention){.partials = a->partials, .counters = a->counters};
    if (o->kernels == BD_KERNELS_PLAIN || !k_attention_fast(dim) || block < 8 ||
        cudaMemset(a->counters, 0, counters) != cudaSuccess)
        return false;
    int major = 0, shared_bytes = 0;
    cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda->device);
    if ((uint32_t)shared_bytes < k_attention_shared_bytes(dim)) return false;
    a->decode = true;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device);
    a->overlap = major >= 9;
    a->kv = calloc(cuda->shape.layers, sizeof *a->kv);
    if (major != 9 || !a->kv) return true;
    const bool fp16 = cuda->fp16;
    const uint32_t box = k_attention_box(dim, block);
    bool made =
        cuda_map_make(&a->q, cuda->q, o->rows_max, cuda->shape.q_width, K_ATTENTION_ROWS, fp16);
    for (uint32_t layer = 0; made && layer < cuda->shape.layers; layer++)
        made = cuda_map_make(&a->kv[layer], cuda_layer_kv(cuda, layer),
                             cuda->kv_layer_elements / cuda->shape.head_dim, cuda->shape.head_dim,
                             box, fp16);
    a->prefill = made;
    return true;
}

void cuda_attention_close(bd_cuda *cuda) {
    free(cuda->attention.kv);
}

static int longest_first(const void *a, const void *b) {
    const k_attention_tile *x = a, *y = b;
    if (x->first_row != y->first_row) return x->first_row < y->first_row ? 1 : -1;
    return x->seq < y->seq ? -1 : x->seq > y->seq;
}

static void items_add(k_attention_item *items, int32_t *count, k_attention_item item) {
    const int32_t splits = k_attention_splits(item.tokens);
    for (item.part = 0; item.part < splits; item.part++)
        items[(*count)++] = item;
}

bool cuda_attention_fill(bd_cuda *cuda, const bd_step *step, bool fixed) {
    cuda_attention_step *d = &cuda->attention_step;
    *d = (cuda_attention_step){0};
    uint32_t several = 0, tiles = 0;
    for (uint32_t s = 0; s < step->seq_count; s++) {
        if (step->seqs[s].row_count == 1) continue;
        several++;
        tiles += (step->seqs[s].row_count + K_ATTENTION_ROWS - 1) / K_ATTENTION_ROWS;
    }
    d->plain = !cuda->attention.decode || (several && !cuda->attention.prefill);
    if (d->plain) return true;
    const size_t items_max = (size_t)(step->seq_count - several) * K_ATTENTION_SPLITS;
    k_attention_item *items =
        cuda_upload_reserve(cuda, items_max, sizeof *items, (const void **)&d->decode_items);
    int32_t *item_count =
        cuda_upload_reserve(cuda, 1, sizeof *item_count, (const void **)&d->decode_count);
    k_attention_tile *list =
        cuda_upload_reserve(cuda, tiles, sizeof *list, (const void **)&d->tiles);
    if (!items || !item_count || !list) return false;
    *item_count = 0;
    int32_t index = 0;
    int32_t first_block = 0;
    const uint32_t per = cuda->options.kv_block_tokens;
    for (uint32_t s = 0; s < step->seq_count; s++) {
        const bd_seq *seq = &step->seqs[s];
        const uint32_t tokens = seq->kv_before_tokens + seq->row_count;
        if (seq->row_count == 1) {
            const uint32_t window = cuda_row_window(cuda, step, seq->first_row);
            items_add(items, item_count,
                      (k_attention_item){
                          .row = (int32_t)seq->first_row,
                          .tokens = (int32_t)tokens,
                          .first_key = window && tokens > window ? (int32_t)(tokens - window) : 0,
                          .first_block = first_block,
                          .index = index++});
        } else {
            for (uint32_t r = 0; r < seq->row_count; r += K_ATTENTION_ROWS)
                list[d->tile_count++] = (k_attention_tile){(int32_t)s, (int32_t)r};
        }
        first_block += (int32_t)((tokens + per - 1) / per);
    }
    qsort(list, (size_t)d->tile_count, sizeof *list, longest_first);
    /* A recorded launch must fit any length. */
    d->decode_items_max = fixed ? (int32_t)items_max : *item_count;
    d->decode_sparse = fixed;
    return true;
}

static k_attention_args attention_args(const bd_cuda *cuda, const bd_step *step, uint32_t layer) {
    const bd_model_config *config = cuda->config;
    const cuda_attention_step *d = &cuda->attention_step;
    const bool norm = config->qk_norm, fast = cuda->qkv_half;
    const uint32_t q = cuda->shape.q_width, kv = cuda->shape.kv_width;
    const uint16_t *fused = cuda->fast.fused;
    return (k_attention_args){.q_in = fast ? (const void *)fused : cuda->q_in,
                              .k_in = fast ? (const void *)(fused + q) : cuda->k_in,
                              .v_in = fast ? (const void *)(fused + q + kv) : cuda->v_in,
                              .q_stride = (int32_t)(fast ? q + 2 * kv : q),
                              .kv_stride = (int32_t)(fast ? q + 2 * kv : kv),
                              .in_half = fast,
                              .fp16 = cuda->fp16,
                              .q = cuda->q,
                              .kv = cuda_layer_kv(cuda, layer),
                              .out = cuda->attn,
                              .rope = cuda->rope,
                              .row_rope = cuda->step.row_rope,
                              .row_window = cuda->step.row_window,
                              .positions = cuda->step.positions,
                              .seq_of_row = cuda->step.seq_of_row,
                              .seqs = cuda->step.seqs,
                              .kv_blocks = cuda->step.kv_blocks,
                              .q_gamma = norm ? cuda->norms[layer][BD_NORM_Q] : NULL,
                              .k_gamma = norm ? cuda->norms[layer][BD_NORM_K] : NULL,
                              .q_gammas = cuda_norm_table(cuda, layer, BD_NORM_Q),
                              .k_gammas = cuda_norm_table(cuda, layer, BD_NORM_K),
                              .row_overlay = cuda->step.row_overlay,
                              .tiles = d->tiles,
                              .decode_items = d->decode_items,
                              .decode_count = d->decode_count,
                              .partials = cuda->attention.partials,
                              .counters = cuda->attention.counters,
                              .tile_count = d->tile_count,
                              .decode_items_max = d->decode_items_max,
                              .decode_sparse = d->decode_sparse,
                              .sm_count = cuda->fast.sm_count,
                              .rows = (int32_t)step->row_count,
                              .heads = (int32_t)cuda->shape.heads,
                              .kv_heads = (int32_t)cuda->shape.kv_heads,
                              .head_dim = (int32_t)cuda->shape.head_dim,
                              .rotary_dim = (int32_t)config->rope.rotary_dim,
                              .block_tokens = (int32_t)cuda->options.kv_block_tokens,
                              .rope_positions = (int32_t)cuda->options.max_model_len,
                              .use_window = config->window_layer[layer] != 0,
                              .norm_plus_one = config->norm_plus_one,
                              .overlap = cuda->attention.overlap,
                              .scale = config->attn_scale,
                              .softcap = config->attn_softcap,
                              .eps = config->norm_eps};
}

bd_status cuda_rope_kv_write(bd_backend *backend, const bd_step *step, uint32_t layer,
                             bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda->replay) return BD_OK;
    const k_attention_args args = attention_args(cuda, step, layer);
    return cuda_check(cuda, k_rope_kv_write(&args, cuda->stream), "rope", err);
}

bd_status cuda_attention_run(bd_backend *backend, const bd_step *step, uint32_t layer,
                             bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    if (cuda->replay) return BD_OK;
    const k_attention_args args = attention_args(cuda, step, layer);
    if (cuda->attention_step.plain)
        return cuda_check(cuda, k_attention_plain(&args, cuda->stream), "attention", err);
    const cudaError_t error = args.tile_count
                                  ? k_attention_prefill(&args, &cuda->attention.q,
                                                        &cuda->attention.kv[layer], cuda->stream)
                                  : cudaSuccess;
    const bd_status s = cuda_check(cuda, error, "attention", err);
    return s == BD_OK ? cuda_check(cuda, k_attention_decode(&args, cuda->stream), "attention", err)
                      : s;
}
