/* cuda_internal.h - the CUDA backend's object. Owner: the rank's executor thread; `copy` and the
 * delta staging belong to the rank's loader thread. Device memory is four arenas (weights,
 * workspace, kv, deltas), allocated at open and never again. */
#ifndef BD_CUDA_INTERNAL_H
#define BD_CUDA_INTERNAL_H

#include <cuda_runtime_api.h>
#include <stdatomic.h>

#include "bitdelta/backend/cuda.h"
#include "fast.h"
#include "kernels.h"

#define CUDA_OVERLAYS_MAX  64u        /* distinct variants in one step */
#define CUDA_EDITS_MAX     (1u << 20) /* logit edits of one step */
#define CUDA_SAMPLE_ROWS   64u        /* rows sampled at a time: bounds the scratch */
#define CUDA_SM_MAX        256        /* more multiprocessors than this are left unused by decode */
#define CUDA_STAGING_BYTES (8u << 20)

typedef struct cuda_shape { /* element counts derived from the config, one rank */
    uint32_t hidden, layers, ffn, vocab, head_dim, heads, kv_heads, q_width, kv_width;
    uint32_t linear_n[BD_LINEAR_COUNT], linear_k[BD_LINEAR_COUNT];
} cuda_shape;

typedef struct cuda_staging { /* pinned host buffer and its device twin, used in turn */
    uint8_t *host[2], *device[2];
    cudaEvent_t done[2];
    uint32_t turn;
} cuda_staging;

typedef struct cuda_upload { /* one step's tables: filled in pinned memory, copied once */
    uint8_t *host, *device;
    size_t used_bytes, cap_bytes;
} cuda_upload;

typedef struct cuda_step { /* device pointers of the current step, inside the upload */
    const int32_t *tokens, *positions, *seq_of_row, *row_overlay, *row_rope, *row_window,
        *kv_blocks;
    const k_seq *seqs;
    const k_segment *segments;
    const k_tile *tiles;
    uint32_t tile_count, tile_rows_max, planes_max;
    const int32_t *logits_rows, *logits_overlay;
    const k_segment *logits_segments;
    const k_tile *logits_tiles;
    uint32_t logits_tile_count, logits_tile_rows_max;
    const k_sample_row *sample_rows;
    const k_edit *edits;
    const k_overlay_linear *linears; /* [layer * BD_LINEAR_COUNT + which, then embed blocks, head
                                        blocks][overlay_count] */
    const float *const *norms;       /* [(layers + 1) * BD_NORM_COUNT][overlay_count] */
    uint32_t overlay_count, block_rows, block_count;
} cuda_step;

typedef struct bd_cuda {
    bd_backend base;
    bd_backend_options options;
    const bd_model_config *config;
    cuda_shape shape;
    bd_memory_plan plan;
    int device;
    cudaStream_t stream, copy;
    cudaEvent_t step_done;
    _Atomic bool lost;
    uint8_t *weights, *workspace, *kv, *deltas; /* arenas */
    size_t kv_layer_elements;
    uint16_t *embed, *head; /* head == embed when tied */
    uint16_t *(*linears)[BD_LINEAR_COUNT];
    float *(*biases)[BD_LINEAR_COUNT];
    float *(*norms)[BD_NORM_COUNT];
    /* workspace */
    float *residual, *proj, *q_in, *k_in, *v_in, *gate, *up, *logits, *scratch, *rope;
    uint16_t *normed, *q, *attn, *act, *head_in;
    k_sample_result *results, *results_host;
    cuda_upload upload;
    cuda_staging base_staging, delta_staging;
    cuda_step step;
    cuda_fast fast;
    cuda_fast_step fast_step;
    bool qkv_bf16, proj_bf16; /* how the last qkv and the last o or down product were left */
} bd_cuda;

static inline bd_cuda *cuda_of(bd_backend *backend) {
    return (bd_cuda *)backend;
}

/* BD_OK or BD_E_DEVICE naming the operation and CUDA's text; marks the device lost on errors that
 * do not go away. */
bd_status cuda_check(bd_cuda *cuda, cudaError_t error, const char *what, bd_error *err);

void cuda_shape_from(const bd_model_config *config, cuda_shape *out);
bd_status cuda_plan(const bd_backend_options *options, bd_memory_plan *plan, bd_error *err);
bd_status cuda_supports(const bd_backend_options *options, bd_error *err);
bd_status cuda_open(const bd_backend_options *options, bd_backend **out, bd_error *err);
void cuda_close(bd_backend *backend);
bd_status cuda_weight_put(bd_backend *backend, bd_weight_id id, const bd_weight_view *view,
                          bd_error *err);
bd_status cuda_rope_table_put(bd_backend *backend, uint32_t table, const float *inv_freq,
                              float scale, bd_error *err);

void *cuda_delta_arena(bd_backend *backend);
uint64_t cuda_plane_bytes(uint32_t n, uint32_t k);
bd_status cuda_plane_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k, uint32_t first_row,
                         uint32_t row_count, const void *src, uint64_t src_stride_bytes,
                         bd_error *err);
bd_status cuda_plane_part_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                              const bd_plane_part *part, bd_error *err);
bd_status cuda_vector_put(bd_backend *backend, void *dst, uint64_t first, const float *src,
                          uint64_t count, bd_error *err);
bd_status cuda_put_flush(bd_backend *backend, bd_error *err);
bd_status cuda_staging_open(bd_cuda *cuda, cuda_staging *staging, bd_error *err);
void cuda_staging_close(cuda_staging *staging);
/* The next staging half, free to be overwritten. */
bd_status cuda_staging_next(bd_cuda *cuda, cuda_staging *staging, uint32_t *half, bd_error *err);

/* Room for count elements: the host address to fill; *device is where the kernels will find it.
 * NULL: it does not fit. */
void *cuda_upload_reserve(bd_cuda *cuda, size_t count, size_t element_bytes, const void **device);
const float *cuda_group_bias(const bd_cuda *cuda, uint32_t layer,
                             bd_group group); /* the base's, NULL: none */
size_t cuda_upload_bytes(const bd_backend_options *options, const cuda_shape *shape);
bd_status cuda_step_begin(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status cuda_step_wait(bd_backend *backend, const bd_step *step, uint64_t deadline_us,
                         bd_token_result *results, bd_error *err);
bd_status cuda_logits_get(bd_backend *backend, uint32_t index, float *out, bd_error *err);

bd_status cuda_embed(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status cuda_norm_residual(bd_backend *backend, const bd_step *step, uint32_t layer, bd_norm kind,
                             bool add, uint32_t post_layer, bd_norm post, bd_error *err);
bd_status cuda_linear(bd_backend *backend, const bd_step *step, uint32_t layer, bd_group group,
                      bd_error *err);
bd_status cuda_rope_kv_write(bd_backend *backend, const bd_step *step, uint32_t layer,
                             bd_error *err);
bd_status cuda_attention(bd_backend *backend, const bd_step *step, uint32_t layer, bd_error *err);
bd_status cuda_head(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status cuda_sample(bd_backend *backend, const bd_step *step, bd_error *err);

#endif
