/* step.h - one forward step over a ragged, mixed batch: rows of many sequences of many variants.
 * Made by the scheduler, read-only for every executor until step_wait returns. See architecture.md
 * "Contracts". Shared with kernels: no restrict, no _Atomic. */
#ifndef BITDELTA_BACKEND_STEP_H
#define BITDELTA_BACKEND_STEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BD_OVERLAY_PLANES_MAX 4
#define BD_TOP_MAX            20 /* alternatives reported per token */

/* The linears of a layer, in the order of overlay tables. */
typedef enum bd_linear {
    BD_LINEAR_Q,
    BD_LINEAR_K,
    BD_LINEAR_V,
    BD_LINEAR_O,
    BD_LINEAR_GATE,
    BD_LINEAR_UP,
    BD_LINEAR_DOWN,
    BD_LINEAR_COUNT
} bd_linear;

typedef enum bd_norm { /* kinds of norm weights of a layer; the final norm is
                          [layers][BD_NORM_INPUT] */
                       BD_NORM_INPUT,
                       BD_NORM_POST_ATTENTION,
                       BD_NORM_PRE_FFN,
                       BD_NORM_POST_FFN,
                       BD_NORM_Q,
                       BD_NORM_K,
                       BD_NORM_COUNT
} bd_norm;

typedef struct bd_plane {
    const void *bits;   /* backend's layout */
    const float *scale; /* [n of this rank] */
} bd_plane;

/* y = x (W + sum_p scale_p S_p + lora_scale B A)^T + bias */
typedef struct bd_overlay_linear {
    uint8_t plane_count;
    bd_plane planes[BD_OVERLAY_PLANES_MAX];
    uint16_t lora_rank;
    float lora_scale;
    const float *lora_a, *lora_b; /* [rank, k], [n, rank] */
    const float *bias;            /* [n]; NULL: the base's */
} bd_overlay_linear;

/* Rows of the vocabulary kept whole, bf16 [rows, hidden], in blocks of block_rows (the last may be
 * shorter), so that a block fits a delta page. */
typedef struct bd_overlay_rows {
    uint32_t count, block_rows; /* count 0: none */
    const void *const *blocks;  /* [ceil(count / block_rows)] */
} bd_overlay_rows;

/* One resident variant. Owner: cache; a layer's part is immutable once ready; borrowed under a
 * lease. */
typedef struct bd_overlay {
    /* Of the delta, and of the frequencies where the variant has a config.json: of all that its
     * keys and values come of, but for the window. */
    uint8_t digest[32];
    uint32_t vocab;      /* ids at and above it are -inf for this variant */
    uint32_t extra_rows; /* rows of extra_embed and of extra_head */
    uint32_t rope_table; /* index given by the backend's rope_table_put */
    uint32_t window_tokens;
    const bd_overlay_linear *linears; /* [layer][BD_LINEAR_COUNT] */
    /* Embedding and head in blocks of block_rows vocabulary rows (the last may be shorter), so that
     * a block fits a delta page. Tied models: head == embed, unless the variant has a head of its
     * own, which is then coded against the base's embedding. */
    uint32_t block_rows, block_count;
    const bd_overlay_linear *embed, *head;
    /* Replace all rows of the base's; their blocks above then add nothing. */
    bd_overlay_rows full_embed, full_head;
    bd_overlay_rows extra_embed, extra_head; /* rows from the base's vocabulary on */
    const float *const *norms; /* [layers + 1][BD_NORM_COUNT], NULL entries: the base's; float32 */
    /* The same variant on every rank, [rank_count]; steps name rank 0's. NULL: there is one rank.
     */
    const struct bd_overlay *const *ranks;
} bd_overlay;

typedef struct bd_segment {
    int32_t overlay; /* index into bd_step.overlays, -1 = base */
    uint32_t first_row, row_count;
} bd_segment;

typedef struct bd_logit_edit { /* one token's logit: (l > 0 ? l / repetition : l * repetition) + add
                                */
    int32_t token;
    float repetition; /* 1: none */
    float add;        /* -INFINITY bans */
} bd_logit_edit;

typedef struct bd_sampling {
    float temperature; /* 0: greedy, ties to the lowest id */
    float top_p, min_p;
    uint32_t top_k; /* 0: off */
    uint64_t seed;
    uint32_t choice; /* different k of one request draw different streams */
} bd_sampling;

typedef struct bd_seq {
    uint32_t first_row, row_count; /* this step's rows of the sequence */
    uint32_t kv_before_tokens;     /* tokens in the KV cache before this step */
    const uint32_t *kv_blocks; /* block table: ceil((kv_before + row_count) / block_tokens) ids */
    bd_sampling sampling;
    uint32_t edit_count;
    const bd_logit_edit *edits; /* distinct tokens */
} bd_seq;

typedef struct bd_logits_row { /* a row whose logits are wanted */
    uint32_t row, seq;
    int32_t target;    /* >= 0: report this token (prompt logprobs); -1: sample the next token */
    uint8_t top_count; /* 0 .. BD_TOP_MAX */
} bd_logits_row;

typedef struct bd_step {
    uint64_t id;
    uint32_t row_count, seq_count, segment_count, overlay_count, logits_row_count;
    const int32_t *tokens;      /* [row_count] */
    const uint32_t *positions;  /* [row_count] */
    const uint32_t *seq_of_row; /* [row_count] */
    const bd_seq *seqs;         /* [seq_count] */
    const bd_segment *segments; /* sorted by first_row, disjoint, cover all rows */
    const bd_overlay *const *overlays;
    const bd_logits_row *logits_rows;
} bd_step;

/* Result per logits row. Log-probabilities are of the raw logits: before temperature, penalties,
 * bias, truncation. */
typedef struct bd_token_result {
    int32_t id; /* sampled, or the target */
    float logprob;
    uint32_t rank; /* 1 = most likely; of the id, by raw logit */
    uint8_t top_count;
    int32_t top_ids[BD_TOP_MAX]; /* by descending logprob, ties to the lowest id */
    float top_logprobs[BD_TOP_MAX];
    uint8_t fault; /* 1: a logit was NaN; the sequence must fail */
} bd_token_result;

#ifdef __cplusplus
}
#endif
#endif
