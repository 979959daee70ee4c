/* cuda_internal.h - the CUDA backend's object. Owner: the rank's executor thread; `copy` and the
 * delta staging and uploads belong to the rank's loader thread. Device memory is four arenas
 * (weights, workspace, kv, deltas), allocated at open and never again. */
#ifndef BD_CUDA_INTERNAL_H
#define BD_CUDA_INTERNAL_H

#include <cuda_runtime_api.h>
#include <stdatomic.h>

#include "bitdelta/backend/cuda.h"
#include "fast.h"
#include "kernels.h"
#include "peers.h"

#define CUDA_OVERLAYS_MAX  64u        /* distinct variants in one step */
#define CUDA_EDITS_MAX     (1u << 20) /* logit edits of one step */
#define CUDA_SAMPLE_ROWS   64u        /* rows sampled at a time: bounds the scratch */
#define CUDA_SM_MAX        256        /* more multiprocessors than this are left unused by decode */
#define CUDA_STAGING_BYTES (8u << 20)
#define CUDA_BRING_COUNT   3u
#define CUDA_BRING_BYTES   (8u << 20) /* the largest block of host memory, see host_tier.h */
#define CUDA_MARKS         64u
/* So little is read by a kernel itself across the bus: a copy would wait for its turn behind the
 * next window. */
#define CUDA_SMALL_BYTES (32u << 10)
#define CUDA_SMALL_COUNT 16u
/* Device memory beside the plan's: what a device of a known size lacks from the start; kernels'
 * code, stacks, streams; for each of several ranks NCCL and windows; a layer of one recording,
 * alone and with sums over ranks.
 *
 * Measured on H200 (driver 580, CUDA 13.0): 526 MiB were gone before anything was opened. With 70
 * recordings of the 8B shape on one GPU 64 MiB more; on each of two 1492 MiB more for the 8B
 * shape's 32 layers and 2444 for the 70B shape's 80, which is 290 KiB for a layer of a recording
 * and 857 MiB that did not grow. Of the three sets of recordings made there one after the other one
 * held NCCL's launches, as what is served does from four ranks on. */
#define CUDA_CONTEXT_BYTES      (576u << 20)
#define CUDA_CODE_BYTES         (256u << 20)
#define CUDA_RANKS_BYTES        (1024u << 20)
#define CUDA_RECORD_BYTES       (32u << 10)
#define CUDA_RECORD_RANKS_BYTES (320u << 10)

typedef struct cuda_shape { /* element counts derived from the config, one rank */
    uint32_t hidden, layers, ffn, vocab, head_dim, heads, kv_heads, q_width, kv_width;
    uint32_t linear_n[BD_LINEAR_COUNT], linear_k[BD_LINEAR_COUNT];
} cuda_shape;

typedef struct cuda_staging { /* pinned host buffer and its device twin, used in turn */
    uint8_t *host[2], *device[2];
    cudaEvent_t copied[2], done[2];
    uint32_t turn;
} cuda_staging;

/* Deltas on their way: copies run on the stream `copy` and kernels on one of their own, so that a
 * copy need not wait for what is done with the one before. A window is a copy that several puts
 * take their bytes from. */
typedef struct cuda_uploads {
    cudaStream_t kernels;
    uint8_t *device[CUDA_BRING_COUNT];
    cudaEvent_t copied[CUDA_BRING_COUNT], used[CUDA_BRING_COUNT];
    uint32_t turn;       /* the next window */
    const uint8_t *from; /* of the open window, NULL: none is open */
    uint64_t bytes;
    cudaEvent_t marks[CUDA_MARKS]; /* in turn, as is what is small: page-locked, read by kernels */
    uint64_t mark_count;
    uint8_t *small;
    cudaEvent_t small_done[CUDA_SMALL_COUNT];
    uint32_t small_turn;
} cuda_uploads;

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

typedef struct cuda_attention {
    bool decode, prefill; /* the kernels of attention_decode.cu, attention_sm90.cu */
    bool overlap;         /* programmatic launches exist */
    CUtensorMap q, *kv;   /* kv: [layers] */
    float *partials;      /* workspace of the split-KV kernel */
    unsigned *counters;
} cuda_attention;

typedef struct cuda_attention_step {
    bool plain; /* all rows by the plain kernel */
    bool decode_sparse;
    const k_attention_item *decode_items;
    const int32_t *decode_count;
    const k_attention_tile *tiles;
    int32_t decode_items_max, tile_count;
} cuda_attention_step;

/* Of a step with variants that keep rows of the vocabulary whole; such a step is never replayed. */
typedef struct cuda_whole {
    bool any;
    bool covers; /* all logits rows have heads in full: the base's is not needed */
    const uint16_t *const *embed_from; /* [rows] NULL: what k_embed makes of the row */
    const k_tile *tiles;               /* of logits rows, of one variant after the other */
    const int32_t *no_overlay;         /* [logits rows] of -1 */
    const int32_t *logits_overlay;     /* on the host */
} cuda_whole;

/* Of a step with low-rank adapters, which is never replayed either. */
typedef struct cuda_lora {
    uint64_t overlays;                   /* a bit for each of the step's that has any; 0: none */
    const struct k_lora_linear *linears; /* items and columns as cuda_step.linears */
    const struct k_lora_tile *tiles, *logits_tiles; /* rows of these overlays */
    uint32_t tile_count, logits_tile_count;
} cuda_lora;

#define CUDA_GRAPH_BUCKETS  7u /* 1, 2, 4 .. 64 rows */
#define CUDA_GRAPH_ROWS_MAX 64u
#define CUDA_GRAPH_VARIANTS 16u
#define CUDA_GRAPH_EDITS    1024u

/* What a step's launches take from the host: equal structures make equal launches, since device
 * addresses follow from the order and the sizes of the reservations. */
typedef struct cuda_launch_key {
    cuda_step step;
    cuda_fast_step fast;
    cuda_attention_step attention;
} cuda_launch_key;

typedef struct cuda_graph {
    cudaGraphExec_t exec; /* NULL: none was recorded */
    cuda_launch_key key;
} cuda_graph;

typedef struct cuda_padded { /* a decode step filled up to a bucket's rows */
    bd_step step;
    int32_t tokens[CUDA_GRAPH_ROWS_MAX];
    uint32_t positions[CUDA_GRAPH_ROWS_MAX], seq_of_row[CUDA_GRAPH_ROWS_MAX];
    bd_seq seqs[CUDA_GRAPH_ROWS_MAX];
    bd_segment segments[CUDA_GRAPH_ROWS_MAX + 1];
    bd_logits_row logits_rows[CUDA_GRAPH_ROWS_MAX];
    uint32_t spare_block; /* one more than the engine knows of: padding writes its keys there */
} cuda_padded;

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
    uint32_t vocab_total;   /* rows of the vocabulary of all ranks */
    uint32_t logits_width;  /* of a row of `logits`: those and room for added ones */
    uint32_t head_stride;   /* of a row that the head makes: logits_width, or of logits_part */
    const k_ranks *ranks;   /* the ranks' own kernels; NULL: not to be used */
    uint32_t own_bytes;     /* most that they sum; the rest is the comm's */
    bool proj_partial;      /* proj is this rank's part of a sum */
    uint16_t *embed, *head; /* head == embed when tied */
    uint16_t *(*linears)[BD_LINEAR_COUNT];
    float *(*biases)[BD_LINEAR_COUNT];
    float *(*norms)[BD_NORM_COUNT];
    /* workspace */
    float *residual, *proj, *q_in, *k_in, *v_in, *gate, *up, *logits, *scratch, *rope;
    float *lora_t;      /* x A^T: [matrices][rows][lora_rank_max]; planned where that is not 0 */
    float *logits_part; /* of several ranks: [logits rows][vocabulary rows of a rank] */
    uint16_t *normed, *q, *attn, *act, *head_in;
    k_sample_result *results, *results_host;
    unsigned *overflow; /* set by the conversion of weights to fp16 */
    cuda_upload upload;
    cuda_staging base_staging, delta_staging;
    cuda_uploads uploads;
    cuda_step step;
    cuda_whole whole;
    cuda_lora lora;
    cuda_fast fast;
    cuda_fast_step fast_step;
    cuda_attention attention;
    cuda_attention_step attention_step;
    bool fp16;                /* element type of weights, activations and KV; else bf16 */
    bool qkv_half, proj_half; /* whether the last qkv and the last o or down product are 16-bit */
    bool recording;           /* operators are being recorded, tables are not uploaded */
    const cuda_graph *replay; /* the step's launches come from this recording, at its end */
    uint64_t waited_us[2];    /* for the last step that was launched, replayed */
    cuda_graph (*graphs)[CUDA_GRAPH_VARIANTS + 1]; /* [CUDA_GRAPH_BUCKETS], NULL: none */
    cuda_padded *padded;
} bd_cuda;

static inline bd_cuda *cuda_of(bd_backend *backend) {
    return (bd_cuda *)backend;
}

/* BD_OK or BD_E_DEVICE naming the operation and CUDA's text; marks the device lost on errors that
 * do not go away. */
bd_status cuda_check(bd_cuda *cuda, cudaError_t error, const char *what, bd_error *err);
/* architectures: CMAKE_CUDA_ARCHITECTURES, with spaces between. */
bool cuda_built_for(const char *architectures, int major, int minor);

void cuda_shape_from(const bd_model_config *config, cuda_shape *out);
bd_status cuda_plan(const bd_backend_options *options, bd_memory_plan *plan, bd_error *err);
/* What a plan leaves of the memory that is free before anything is opened. */
uint64_t cuda_unplanned_bytes(const bd_backend_options *options);
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
bd_status cuda_rows_put(bd_backend *backend, void *dst, uint64_t offset, const void *src,
                        uint64_t bytes, bd_error *err);
bd_status cuda_vector_put(bd_backend *backend, void *dst, uint64_t first, const float *src,
                          uint64_t count, bd_error *err);
bd_status cuda_put_flush(bd_backend *backend, bd_error *err);
bd_status cuda_bring(bd_backend *backend, const void *data, uint64_t bytes, bool *brought,
                     bd_error *err);
bd_status cuda_put_mark(bd_backend *backend, uint64_t *mark, bd_error *err);
bd_status cuda_put_reached(bd_backend *backend, uint64_t mark, bool *reached, bd_error *err);
bd_status cuda_uploads_open(bd_cuda *cuda, bd_error *err);
void cuda_uploads_close(bd_cuda *cuda);
bd_status cuda_staging_open(bd_cuda *cuda, cuda_staging *staging, bd_error *err);
void cuda_staging_close(cuda_staging *staging);
void *cuda_host_alloc(bd_backend *backend, uint64_t bytes);
void cuda_host_free(bd_backend *backend, void *memory, uint64_t bytes);
bool cuda_host_lock(bd_backend *backend, void *memory, uint64_t bytes);
void cuda_host_unlock(bd_backend *backend, void *memory);
bool cuda_host_locked(const void *memory); /* the device can read it at any time */
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
/* For all that was launched; BD_E_DEVICE at the deadline, or when the ranks lost each other. */
bd_status cuda_stream_wait(bd_cuda *cuda, uint64_t deadline_us, bd_error *err);
/* How long to sleep before a step is asked for again, which the thread has waited for so long; 0:
 * at once. expected_us: what another took. */
uint32_t cuda_wait_pause_us(uint64_t waited_us, uint64_t expected_us);
bd_status cuda_logits_get(bd_backend *backend, uint32_t index, float *out, bd_error *err);

/* Tables of the step into the upload's host side; `fixed` reserves by the step's rows alone, so
 * that all steps of as many rows and variants have one layout. BD_E_LIMIT: they do not fit. */
bd_status cuda_tables_fill(bd_cuda *cuda, const bd_step *step, bool fixed, bd_error *err);
/* Window of a row's variant, 0: none. */
uint32_t cuda_row_window(const bd_cuda *cuda, const bd_step *step, uint32_t row);

/* whole.c: rows of the vocabulary that variants keep whole. */
bool cuda_step_has_whole(const bd_step *step);
/* Tables for the two below. false: they do not fit. */
bool cuda_whole_fill(bd_cuda *cuda, const bd_step *step);
bd_status cuda_whole_embed(bd_cuda *cuda, const bd_step *step, bd_error *err);
/* Over the base's logits, in `head` (the rank's part), and those of added rows behind them. */
bd_status cuda_whole_head(bd_cuda *cuda, const bd_step *step, float *head, bd_error *err);

/* lora.c: low-rank adapters. Which of the step's variants have any; BD_E_LIMIT: one of a rank that
 * the workspace was not planned for. */
bd_status cuda_lora_check(bd_cuda *cuda, const bd_step *step, bd_error *err);
/* Tables for the three below, after cuda_step's. false: they do not fit. */
bool cuda_lora_fill(bd_cuda *cuda, const bd_step *step);
bd_status cuda_lora_embed(bd_cuda *cuda, const bd_step *step, bd_error *err);
/* Over what the group's linears wrote, before anybody reads it; fast: 16-bit, where fast.c puts it.
 */
bd_status cuda_lora_linear(bd_cuda *cuda, const bd_step *step, uint32_t layer, bd_group group,
                           bool fast, bd_error *err);
/* Over the logits in `logits`, the rank's part. */
bd_status cuda_lora_head(bd_cuda *cuda, const bd_step *step, float *logits, bd_error *err);

/* graphs.c: recordings of whole decode steps. */
uint32_t cuda_recordings(const bd_backend_options *options); /* how many will be made */
bd_status cuda_record(bd_backend *backend, bd_backend_forward forward, void *ctx, bd_error *err);
void cuda_graphs_close(bd_cuda *cuda);
/* Fills the tables for a recording and returns it; NULL: the step is to be launched as it is. */
const cuda_graph *cuda_graph_begin(bd_cuda *cuda, const bd_step *step);
cuda_launch_key cuda_launch_key_of(const bd_cuda *cuda);

/* ranks.c: for several ranks. */
void cuda_ranks_open(bd_cuda *cuda);
/* data[i] = the sum of all ranks'. */
bd_status cuda_ranks_sum(bd_cuda *cuda, void *data, uint64_t count, bd_comm_type type,
                         bd_error *err);
/* Sums args->proj over the ranks; *done: the rest of k_norm_residual(args) is done too. */
bd_status cuda_ranks_norm(bd_cuda *cuda, k_norm_args *args, bool *done, bd_error *err);
/* Rows of logits_part of all ranks into whole rows of logits. */
bd_status cuda_ranks_logits(bd_cuda *cuda, uint32_t row, uint32_t rows, bd_error *err);
/* A fault of the ranks' calls that are under way; the device is then lost. */
bd_status cuda_ranks_poll(bd_cuda *cuda, bd_error *err);
/* Waits for all ranks; *yes becomes whether all said so. Also for one rank. */
bd_status cuda_ranks_agree(bd_cuda *cuda, bool *yes, bd_error *err);
void cuda_ranks_recording(bd_cuda *cuda, bool recording); /* also for one rank */

/* attention.c. Open returns whether any fast kernel is used; both after the arenas are carved. */
bool cuda_attention_open(bd_cuda *cuda);
void cuda_attention_close(bd_cuda *cuda);
bool cuda_attention_fill(bd_cuda *cuda, const bd_step *step, bool fixed);
/* Row-major [rows, cols] of 16-bit elements in boxes of box_rows x 64, 128-byte swizzle. */
bool cuda_map_make(CUtensorMap *map, const void *data, uint64_t rows, uint64_t cols,
                   uint32_t box_rows, bool fp16);
uint16_t *cuda_layer_kv(const bd_cuda *cuda, uint32_t layer);
const float *const *cuda_norm_table(const bd_cuda *cuda, uint32_t layer, bd_norm kind);

bd_status cuda_embed(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status cuda_norm_residual(bd_backend *backend, const bd_step *step, uint32_t layer, bd_norm kind,
                             bool add, uint32_t post_layer, bd_norm post, bd_error *err);
bd_status cuda_linear(bd_backend *backend, const bd_step *step, uint32_t layer, bd_group group,
                      bd_error *err);
bd_status cuda_rope_kv_write(bd_backend *backend, const bd_step *step, uint32_t layer,
                             bd_error *err);
bd_status cuda_attention_run(bd_backend *backend, const bd_step *step, uint32_t layer,
                             bd_error *err);
bd_status cuda_head(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status cuda_sample(bd_backend *backend, const bd_step *step, bd_error *err);

#endif
