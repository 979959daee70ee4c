/* backend.h - the operator table: everything the forward pass asks of a device, once per rank.
 * Owner: the rank's executor thread calls everything except plane_put and vector_put, which the
 * rank's loader thread may call at the same time on pages no step reads yet. Operators are
 * asynchronous on the device's stream (the CPU runs them at once); nothing allocates after open;
 * optional members may be NULL. All activations live in the backend's own workspace; operators know
 * where they read and write. */
#ifndef BITDELTA_BACKEND_BACKEND_H
#define BITDELTA_BACKEND_BACKEND_H

#include <stdbool.h>
#include <stddef.h>

#include "bitdelta/backend/comm.h"
#include "bitdelta/backend/step.h"
#include "bitdelta/base/status.h"
#include "bitdelta/hf/model_config.h"
#include "bitdelta/hf/safetensors.h"

typedef struct bd_backend bd_backend; /* each backend embeds it as its first member */

typedef enum bd_kernels {                  /* CUDA: which kernels are used */
                          BD_KERNELS_AUTO, /* the fastest that take a matrix's shape on this device
                                            */
                          BD_KERNELS_PLAIN /* those that take any shape on any device */
} bd_kernels;

typedef struct bd_backend_options {
    /* Of this rank: its heads, its part of ffn, its rows of the vocabulary. Borrowed for the
     * backend's life. */
    const bd_model_config *config;
    uint32_t rank, rank_count;
    bd_comm *comm; /* NULL: one rank */
    /* Of a split vocabulary: all rows, this rank's first, and rows of a rank, which the last may
     * have fewer of. 0: not split. */
    uint32_t vocab_total, vocab_first, vocab_each;
    uint32_t device_index;
    uint32_t thread_count;   /* CPU: worker pool width, 0 = all cores */
    const char *cpu_kernels; /* CPU: avx512, avx2, neon or plain; NULL or "auto": the best here */
    bd_kernels kernels;
    bd_dtype dtype;            /* CUDA: F16 or (anything else) BF16 weights, activations and KV */
    uint64_t device_bytes;     /* CUDA: plan for so much memory, without asking a device; 0: ask */
    uint32_t vocab_block_rows; /* block_rows of the overlays that will come; 0: not known yet */
    uint32_t rows_max;         /* rows of a step */
    uint32_t seqs_max;
    uint32_t logits_rows_max;
    uint32_t kv_block_tokens; /* a power of two */
    uint32_t kv_block_count;
    uint32_t max_model_len;   /* rope tables reach this far */
    uint32_t rope_tables_max; /* 1 + variants with their own rope */
    uint64_t delta_bytes;     /* arena for delta pages, page_align_bytes aligned */
    /* vocabulary rows that a variant may add, at most BD_EXTRA_VOCAB_MAX */
    uint32_t extra_vocab_max;
    uint32_t lora_rank_max; /* CUDA: the largest rank of low-rank adapters that will come */
} bd_backend_options;

/* Rows of the whole vocabulary. */
static inline uint32_t bd_vocab_total(const bd_backend_options *options) {
    return options->vocab_total ? options->vocab_total : options->config->vocab;
}
static inline uint32_t bd_vocab_each(const bd_backend_options *options) {
    return options->vocab_each ? options->vocab_each : options->config->vocab;
}

/* Columns of a rank's row of logits: its part of the base's vocabulary and room for what variants
 * add, which is the last rank's (-inf on the others). */
static inline uint32_t bd_logits_width(const bd_backend_options *options) {
    return bd_vocab_each(options) + options->extra_vocab_max;
}

typedef enum bd_group { BD_GROUP_QKV, BD_GROUP_O, BD_GROUP_GATE_UP, BD_GROUP_DOWN } bd_group;

typedef struct bd_memory_plan { /* bytes on the device */
    uint64_t weights, workspace, kv, logits, deltas, total, available;
    uint64_t kept;      /* of the device's, not in available: for what no plan counts */
    uint32_t kv_blocks; /* that the engine may use; filled by the model */
} bd_memory_plan;

typedef struct bd_weight_id {
    enum { BD_WEIGHT_EMBED, BD_WEIGHT_HEAD, BD_WEIGHT_LINEAR, BD_WEIGHT_BIAS, BD_WEIGHT_NORM } kind;
    uint32_t layer; /* norms: == layers for the final norm */
    uint32_t which; /* bd_linear or bd_norm */
} bd_weight_id;

/* A (slice of a) matrix or vector in host memory, rows row_stride_bytes apart; vectors have rows
 * = 1. The caller's: nothing points there once weight_put has returned. */
typedef struct bd_weight_view {
    bd_dtype dtype; /* BF16, F16 or F32 */
    uint64_t rows, cols, row_stride_bytes;
    const void *data; /* not aligned */
} bd_weight_view;

typedef struct bd_plane_part { /* a rectangle of a sign plane, packed as on disk */
    uint32_t first_row, row_count, first_col, col_count; /* columns: multiples of 8 */
    const void *src;
    uint64_t src_stride_bytes;
} bd_plane_part;

typedef bd_status (*bd_backend_forward)(void *ctx, const bd_step *step, bd_error *err);

typedef struct bd_backend_ops {
    const char *name;          /* "cpu", "cuda" */
    uint32_t page_align_bytes; /* delta pages are multiples of this: 2 MiB on cuda, 4 KiB on cpu */
    uint32_t rows_default;     /* rows of a step where nobody says how many */
    uint32_t tile_rows; /* of one variant, that take as long as fewer; 0: each row takes its time */
    /* How ranks meet: after O and DOWN and in embed the backend sums over the ranks, in sample it
     * gathers. Optional. NULL: one rank only. */
    const bd_comm_ops *(*comm)(void);

    /* BD_E_UNSUPPORTED names the field that this backend cannot do. No device memory is touched. */
    bd_status (*supports)(const bd_backend_options *options, bd_error *err);
    bd_status (*plan)(const bd_backend_options *options, bd_memory_plan *plan, bd_error *err);
    bd_status (*open)(const bd_backend_options *options, bd_backend **out, bd_error *err);
    void (*close)(bd_backend *backend); /* NULL is fine */

    /* Loading the base; head is put only when untied. Each weight exactly once. */
    bd_status (*weight_put)(bd_backend *backend, bd_weight_id id, const bd_weight_view *view,
                            bd_error *err);
    /* inv_freq: [rotary_dim / 2] float32, scale multiplies cos and sin. Table 0 is the base's. */
    bd_status (*rope_table_put)(bd_backend *backend, uint32_t table, const float *inv_freq,
                                float scale, bd_error *err);

    /* Delta pages: addresses inside the delta arena. */
    void *(*delta_arena)(bd_backend *backend); /* base address, delta_bytes long; device memory */
    /* one sign plane in this backend's layout, 64-byte multiple */
    uint64_t (*plane_bytes)(uint32_t n, uint32_t k);
    /* Packed bits as on disk (rows of k / 8 bytes, any alignment) into the backend's layout at dst.
     * Rows [first_row, first_row + row_count) of a plane of n rows, so that a load may proceed
     * piece by piece. */
    bd_status (*plane_put)(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                           uint32_t first_row, uint32_t row_count, const void *src,
                           uint64_t src_stride_bytes, bd_error *err);
    /* Optional: as plane_put for some of the columns, for deltas whose matrices are cut by columns.
     * NULL: such deltas are refused. Parts of one plane may come in any order; they must not
     * overlap. */
    bd_status (*plane_part_put)(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                                const bd_plane_part *part, bd_error *err);
    /* Optional: bytes of bf16 rows (bd_overlay_rows) to dst + offset, as they are or as fp16 where
     * the backend computes in it; BD_E_UNSUPPORTED: one does not fit there. NULL: this backend
     * takes neither matrices in full nor added vocabulary. */
    bd_status (*rows_put)(bd_backend *backend, void *dst, uint64_t offset, const void *src,
                          uint64_t bytes, bd_error *err);
    /* count float32 values (already converted) to dst + 4 * first. */
    bd_status (*vector_put)(bd_backend *backend, void *dst, uint64_t first, const float *src,
                            uint64_t count, bd_error *err);
    /* Puts to different places may run beside each other, on any threads, and are the callers' own
     * stores; without put_flush and bring. false: all puts come from one thread. */
    bool puts_anywhere;
    /* optional: wait for earlier puts to be visible */
    bd_status (*put_flush)(bd_backend *backend, bd_error *err);
    /* Optional, all three or none, for sources in memory of host_alloc or host_lock. bring: the
     * puts up to the next bring, or put_flush, take their sources from these bytes, which are
     * copied at once and not put by put. *brought: so it is, and the bytes must stay as they are
     * until the next call of bring or of put_flush has gone well; else puts go as they always do.
     */
    bd_status (*bring)(bd_backend *backend, const void *data, uint64_t bytes, bool *brought,
                       bd_error *err);
    /* Instead of waiting: *mark stands for all earlier puts; *reached: they are visible. */
    bd_status (*put_mark)(bd_backend *backend, uint64_t *mark, bd_error *err);
    bd_status (*put_reached)(bd_backend *backend, uint64_t mark, bool *reached, bd_error *err);

    /* Optional: host memory that uploads best come from (page-locked), for deltas kept beside the
     * device; slow, so from a thread of its own. NULL from alloc: not to be had. NULL members:
     * plain memory is as good. */
    void *(*host_alloc)(bd_backend *backend, uint64_t bytes);
    void (*host_free)(bd_backend *backend, void *memory, uint64_t bytes);
    /* Optional, both: makes whole pages of the caller's own memory as good, so that files can be
     * read into it past the page cache too. false: it stays plain memory, from which uploads copy
     * once more. */
    bool (*host_lock)(bd_backend *backend, void *memory, uint64_t bytes);
    void (*host_unlock)(bd_backend *backend, void *memory);

    /* One step. Buffers: residual, normed, q, k, v, attn, act, proj, logits. */
    bd_status (*step_begin)(bd_backend *backend, const bd_step *step, bd_error *err);
    /* -> residual (scaled) */
    bd_status (*embed)(bd_backend *backend, const bd_step *step, bd_error *err);
    /* If add: residual += post_norm(proj) (post: BD_NORM_COUNT = no post norm). Then normed =
     * rms(residual) * gamma. */
    bd_status (*norm_residual)(bd_backend *backend, const bd_step *step, uint32_t layer,
                               bd_norm kind, bool add, uint32_t post_layer, bd_norm post,
                               bd_error *err);
    /* QKV: normed -> q, k, v. O: attn -> proj. GATE_UP: normed -> act = activation(gate) * up.
     * DOWN: act -> proj. */
    bd_status (*linear)(bd_backend *backend, const bd_step *step, uint32_t layer, bd_group group,
                        bd_error *err);
    /* q/k norm too */
    bd_status (*rope_kv_write)(bd_backend *backend, const bd_step *step, uint32_t layer,
                               bd_error *err);
    /* q, KV -> attn */
    bd_status (*attention)(bd_backend *backend, const bd_step *step, uint32_t layer, bd_error *err);
    /* rows of normed -> logits, soft-capped */
    bd_status (*head)(bd_backend *backend, const bd_step *step, bd_error *err);
    /* logits -> results */
    bd_status (*sample)(bd_backend *backend, const bd_step *step, bd_error *err);
    /* Optional, between two operators of a step: nobody wants the rows of overlay `overlay` any
     * more and its pages must not be read from here on. NULL: they go on with what the pages hold,
     * which must do no harm beyond these rows. */
    void (*step_void)(bd_backend *backend, const bd_step *step, uint32_t overlay);
    /* Waits for the step; results[logits_row_count] in order of step->logits_rows. BD_E_DEVICE at
     * the deadline. */
    bd_status (*step_wait)(bd_backend *backend, const bd_step *step, uint64_t deadline_us,
                           bd_token_result *results, bd_error *err);
    /* After step_wait: raw logits of row `index` of the step's logits rows, [bd_logits_width]
     * float32, this rank's, -inf past the row's own vocabulary on the cpu (tools and tests). */
    bd_status (*logits_get)(bd_backend *backend, uint32_t index, float *out, bd_error *err);
    /* Optional, once, after the weights: `forward` launches a whole step (step_begin .. sample);
     * the backend calls it with steps of its own making and keeps what their operators launch, to
     * replay it for later steps of the same shape. Without it every step is launched operator by
     * operator, with the same results. */
    bd_status (*record)(bd_backend *backend, bd_backend_forward forward, void *ctx, bd_error *err);
} bd_backend_ops;

struct bd_backend {
    const bd_backend_ops *ops;
};

typedef enum bd_backend_choice {
    BD_BACKEND_AUTO,
    BD_BACKEND_CUDA,
    BD_BACKEND_CPU
} bd_backend_choice;

/* The registry. auto: cuda when a device answers, else cpu with the reason in `why` (for one log
 * line); cuda: BD_E_DEVICE naming the CUDA error. */
BD_MUST_CHECK bd_status bd_backend_select(bd_backend_choice choice, const bd_backend_ops **out,
                                          char *why, size_t why_bytes, bd_error *err);
const bd_backend_ops *bd_backend_cpu_ops(void);
/* The table whether or not a device answers. NULL: not in this build. */
const bd_backend_ops *bd_backend_table(bd_backend_choice choice);

#endif
