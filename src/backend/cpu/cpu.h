/* cpu.h - insides of the CPU backend, shared by its files and its tests.
 * Owner: the rank's executor thread; only plane_put and vector_put run on the loader's thread, and
 * they touch nothing but the memory they are given. Activations are float32, [row][dimension]
 * without padding; the KV cache is float32, [layer][block][kv head][token][head_dim rounded up to
 * 8], keys and values apart. */
#ifndef BITDELTA_BACKEND_CPU_CPU_H
#define BITDELTA_BACKEND_CPU_CPU_H

#include <stddef.h>

#include "bitdelta/backend/backend.h"
#include "bitdelta/base/pool.h"

#define BD_CPU_SIGN_ROWS 8u  /* of one call of sign_dot */
#define BD_CPU_PASS_ROWS 8u  /* that share a pass over a tile */
#define BD_CPU_BAND_ROWS 32u /* that share a pass over weights as they are */
#define BD_CPU_TILE_N    96u
#define BD_CPU_TILE_K    512u /* a multiple of 32, so that a tile's bits start at a whole word */
/* Rows of short segments with sum tables in one operator, which go to segments of few rows first;
 * segments beyond rebuild their weights like long ones. */
#define BD_CPU_TABLE_ROWS_MAX 128u
#define BD_CPU_FEW_ROWS       16u
#define BD_CPU_NO_TABLE       UINT32_MAX
#define BD_CPU_LORA_RANK_MAX  256u
#define BD_CPU_HEAD_DIM_MAX   256u
#define BD_CPU_QUERIES        16u /* queries of one attention task */
#define BD_CPU_KV_TILE        64u /* keys between two rescalings of the running softmax */

typedef struct bd_cpu_matrix { /* row-major [n, k], rows one after the other */
    const uint8_t *data;       /* NULL until put; in a room */
    uint64_t stride_bytes;
    uint32_t n, k;
    bd_dtype dtype; /* F32, BF16 or F16 */
} bd_cpu_matrix;

typedef struct bd_cpu_room { /* memory of weights, freed at close */
    struct bd_cpu_room *next;
    uint8_t *data;
    size_t bytes, used_bytes;
} bd_cpu_room;

#define BD_CPU_PICK_TOKENS 64u /* most likely tokens that a rank tells the others of a row */
#define BD_CPU_WHOLE_ROWS  8u  /* rows of a whole vocabulary at a time */

typedef struct bd_cpu_pick { /* what a rank tells of its part of a row of logits */
    float max;
    bool fault, has_target;
    double sum; /* of exp(logit - max) */
    float target_logit;
    uint32_t count;
    uint32_t ids[BD_CPU_PICK_TOKENS]; /* by descending logit, then id */
    float logits[BD_CPU_PICK_TOKENS];
} bd_cpu_pick;

typedef struct bd_cpu_run {    /* rows of one overlay */
    const bd_overlay *overlay; /* NULL: the base */
    uint32_t first, count;
    uint32_t table_row; /* this operator's first sum table of the run, or BD_CPU_NO_TABLE */
} bd_cpu_run;

/* y[r][i] = sum_k x[r][k] * w[i][k]; nothing is read past a row's k elements. */
typedef struct bd_cpu_dot {
    const float *const *x; /* [rows] */
    float *const *y;       /* [rows], each [n] */
    uint32_t rows, n, k;
    bool add; /* to what y holds */
    const uint8_t *w;
    uint64_t stride_bytes;
} bd_cpu_dot;

/* y[r][i] += scale[i] * sum_k +-x[r][k] for rows first + i of a plane.
 * x comes as a sum table, one lookup of which adds several elements to each of several outputs,
 * where flipping signs takes four operations for eight weights. Plain C and NEON have all eight
 * sums of every three elements, [word][11][8] with 11 triples to 32 elements (the last has two);
 * AVX2 all four of every two, [word][16][4], since its cheap permute works within four lanes;
 * AVX-512 all sixteen of every four, [word][8][16]. */
typedef struct bd_cpu_signs {
    const float *const *table; /* [rows] */
    float *const *y;           /* [rows], each [count] */
    const uint8_t *plane;
    const float *scale;                 /* of row first */
    uint32_t rows, first, count, words; /* rows: at most BD_CPU_SIGN_ROWS */
} bd_cpu_signs;

/* Whatever the blocking, a row's result is the same bits alone and in company. */
typedef struct bd_cpu_kernels {
    const char *name;
    /* A segment of fewer rows multiplies the packed bits; a longer one rebuilds its weights tile by
     * tile, once for all of them. As measured: bench/results/cpu_rows.txt. */
    uint32_t short_rows;
    void (*dot[3])(const bd_cpu_dot *dot); /* by bd_dtype F32, BF16, F16 */
    void (*sum_table)(float *table, const float *x, uint32_t k);
    void (*sign_dot)(const bd_cpu_signs *signs);
    /* dot[BD_DTYPE_BF16], not adding, then sign_dot, both of one row and the same y and n: weights
     * and bits in one pass, so that the permutes run while memory is waited for. NULL: no gain. */
    void (*dot_signs)(const bd_cpu_dot *dot, const bd_cpu_signs *signs);
    void (*to_f32)(float *dst, const uint8_t *src, bd_dtype dtype, uint32_t count);
    /* dst[i] = src[i] +- scale; bits: bd_cpu_plane_at of a row; dst == src is fine. */
    void (*add_signs)(float *dst, const float *src, const uint8_t *bits, uint32_t count,
                      float scale);
    /* acc[q][d] += sum_t p[q][t] * v[t][d]; p rows BD_CPU_KV_TILE apart, acc rows
     * BD_CPU_HEAD_DIM_MAX apart; dim is a multiple of 8. */
    void (*weighted_sum)(float *acc, const float *p, uint32_t queries, const float *v,
                         uint32_t tokens, uint32_t dim);
} bd_cpu_kernels;

/* Narrows both to `count` outputs from the i-th on, and one row, whose output goes through y. */
static inline void bd_cpu_take(bd_cpu_dot *dot, bd_cpu_signs *signs, uint32_t i, uint32_t count,
                               float **y) {
    *y = dot->y[0] + i;
    dot->n = signs->count = count;
    dot->w += i * dot->stride_bytes;
    dot->y = signs->y = y;
    signs->first += i;
    signs->scale += i;
}

/* NULL: not in this build, or not on this machine. */
const bd_cpu_kernels *bd_cpu_kernels_plain(void);
const bd_cpu_kernels *bd_cpu_kernels_avx2(void);
const bd_cpu_kernels *bd_cpu_kernels_avx512(void);
const bd_cpu_kernels *bd_cpu_kernels_neon(void);

#define BD_CPU_KERNELS_COUNT 4u
/* All of them, best first; NULL as above. */
const bd_cpu_kernels *bd_cpu_kernels_at(uint32_t index);
/* Those called `name`; NULL or "auto": the best. BD_E_UNSUPPORTED, subject "cpu_kernels", for a
 * name that is unknown or names what this machine lacks. */
bd_status bd_cpu_kernels_pick(const char *name, const bd_cpu_kernels **out, bd_error *err);

typedef enum bd_cpu_buffer {
    BD_CPU_RESIDUAL,
    BD_CPU_NORMED,
    BD_CPU_Q,
    BD_CPU_K,
    BD_CPU_V,
    BD_CPU_ATTN,
    BD_CPU_ACT,
    BD_CPU_PROJ,
    BD_CPU_ROTATION, /* cos and sin of each row */
    BD_CPU_TABLES,   /* sum tables of rows of short segments */
    BD_CPU_LORA,     /* x A^T of each row, for up to three matrices */
    BD_CPU_LOGITS,
    BD_CPU_HEAD_IN,
    BD_CPU_KEYS,
    BD_CPU_VALUES,
    BD_CPU_ROW_OVERLAY, /* const bd_overlay * of each row */
    BD_CPU_RUNS,
    BD_CPU_HEAD_RUNS,
    BD_CPU_TASKS, /* first attention task of each sequence, and one more */
    BD_CPU_RESULTS,
    BD_CPU_PICKS,    /* of a split vocabulary, here and below: this rank's, then all ranks' */
    BD_CPU_RANKS_OF, /* tokens before the one chosen, this rank's and all ranks' */
    BD_CPU_GATHERED, /* a row's logits, rank by rank */
    BD_CPU_WHOLE,    /* rows of logits of the whole vocabulary */
    BD_CPU_ROPE,     /* inv_freq of each table */
    BD_CPU_SMALL,    /* norms and biases, float32 */
    /* One part per worker: */
    BD_CPU_TILES,  /* base tile, then a variant's */
    BD_CPU_UP,     /* a block of the up projection */
    BD_CPU_SCORES, /* queries, accumulators, probabilities */
    BD_CPU_SAMPLE, /* a row's weights (double) and edited logits (float) */
    BD_CPU_DELTAS, /* the delta arena */
    BD_CPU_BUFFER_COUNT
} bd_cpu_buffer;

typedef struct bd_cpu {
    bd_backend base; /* first */
    bd_backend_options options;
    const bd_model_config *config;
    const bd_cpu_kernels *kernels;
    bd_pool *pool;
    uint32_t workers;
    uint32_t q_dim, kv_dim, head_stride; /* head_stride: head_dim rounded up to 8 */
    void *buffers[BD_CPU_BUFFER_COUNT];
    bd_cpu_matrix embed, head;
    bd_cpu_room *rooms;         /* the newest first */
    bd_cpu_matrix *linears;     /* [layers][BD_LINEAR_COUNT] */
    const float **biases;       /* [layers][BD_LINEAR_COUNT], NULL: none */
    const float **norms;        /* [layers + 1][BD_NORM_COUNT], NULL: none */
    float *rope_scales;         /* [rope_tables_max], 0: not put */
    uint64_t small_used_floats; /* of BD_CPU_SMALL */
    uint32_t run_count, head_run_count, attention_tasks;
    uint64_t sampled_step; /* id of the step whose results are in BD_CPU_RESULTS */
    uint32_t result_count;
} bd_cpu;

static inline bd_cpu *bd_cpu_of(bd_backend *backend) {
    return (bd_cpu *)backend;
}

static inline uint32_t bd_cpu_logits_width(const bd_cpu *cpu) {
    return bd_logits_width(&cpu->options);
}

/* Ids of the whole model: one more than the largest. */
static inline uint32_t bd_cpu_id_end(const bd_cpu *cpu) {
    return bd_vocab_total(&cpu->options) + cpu->options.extra_vocab_max;
}
/* What variants add to the vocabulary is embedded by rank 0 and has its logits on the last. */
static inline bool bd_cpu_has_extra_logits(const bd_cpu *cpu) {
    return cpu->options.rank + 1 == cpu->options.rank_count;
}
/* The token of a column of this rank's logits. */
static inline uint32_t bd_cpu_id_of(const bd_cpu *cpu, uint32_t column) {
    const uint32_t each = bd_vocab_each(&cpu->options);
    return column < each ? cpu->options.vocab_first + column
                         : bd_vocab_total(&cpu->options) + (column - each);
}

static inline float *bd_cpu_f32(const bd_cpu *cpu, bd_cpu_buffer which) {
    return cpu->buffers[which];
}

static inline float *bd_cpu_row(const bd_cpu *cpu, bd_cpu_buffer which, uint32_t row,
                                uint32_t dim) {
    return bd_cpu_f32(cpu, which) + (size_t)row * dim;
}

static inline const bd_overlay *const *bd_cpu_row_overlays(const bd_cpu *cpu) {
    return cpu->buffers[BD_CPU_ROW_OVERLAY];
}

/* A plane in our layout: rows in groups of eight; of a group the first 32-bit word of each row,
 * then the second, ... Element 32w + b of a row is bit b of its word w; 1 = minus, so that a bit
 * moved to the top flips a float's sign; 0 in the padding of a row. */
static inline uint32_t bd_cpu_plane_words(uint32_t k) {
    return (k + 31u) / 32u;
}

static inline size_t bd_cpu_plane_offset(uint32_t words, uint32_t n, uint32_t word) {
    return (((size_t)(n / 8u) * words + word) * 8u + n % 8u) * 4u;
}

/* The word of row n that holds element k0, a multiple of 32; the row's next words are 32 bytes
 * apart. */
static inline const uint8_t *bd_cpu_plane_at(const void *plane, uint32_t k, uint32_t n,
                                             uint32_t k0) {
    return (const uint8_t *)plane + bd_cpu_plane_offset(bd_cpu_plane_words(k), n, k0 / 32u);
}

#define BD_CPU_PLANE_STEP 32u /* bytes from word to word of a row */
#define BD_CPU_TRIPLES    11u
#define BD_CPU_PAIRS      16u
#define BD_CPU_QUADS      8u
#define BD_CPU_FOLD_WORDS                                                                          \
    16u /* words summed before the sum joins the total: keeps rounding errors down */
static inline size_t bd_cpu_table_floats(uint32_t k) {
    return (size_t)bd_cpu_plane_words(k) * BD_CPU_QUADS * 16u; /* the largest kind */
}

/* Sizes of all buffers for `workers`; false when a product overflows. */
bool bd_cpu_sizes(const bd_backend_options *options, uint32_t workers,
                  uint64_t sizes[BD_CPU_BUFFER_COUNT]);
static inline uint32_t bd_cpu_tile_floats(void) {
    return BD_CPU_TILE_N * BD_CPU_TILE_K;
}
static inline uint32_t bd_cpu_scores_floats(void) {
    return BD_CPU_QUERIES * (2u * BD_CPU_HEAD_DIM_MAX + BD_CPU_KV_TILE);
}

/* Runs on the pool when there is enough work to wake it, else here as worker 0. */
void bd_cpu_for(bd_cpu *cpu, uint32_t count, uint64_t work, bd_pool_fn fn, void *ctx);

bd_status bd_cpu_supports(const bd_backend_options *options, bd_error *err);
bd_status bd_cpu_plan(const bd_backend_options *options, bd_memory_plan *plan, bd_error *err);
void bd_cpu_rooms_free(bd_cpu *cpu);
bd_status bd_cpu_weight_put(bd_backend *backend, bd_weight_id id, const bd_weight_view *view,
                            bd_error *err);
bd_status bd_cpu_rope_table_put(bd_backend *backend, uint32_t table, const float *inv_freq,
                                float scale, bd_error *err);
uint64_t bd_cpu_plane_bytes(uint32_t n, uint32_t k);
bd_status bd_cpu_plane_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                           uint32_t first_row, uint32_t row_count, const void *src,
                           uint64_t src_stride_bytes, bd_error *err);
bd_status bd_cpu_plane_part_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                                const bd_plane_part *part, bd_error *err);
bd_status bd_cpu_rows_put(bd_backend *backend, void *dst, uint64_t offset, const void *src,
                          uint64_t bytes, bd_error *err);
bd_status bd_cpu_vector_put(bd_backend *backend, void *dst, uint64_t first, const float *src,
                            uint64_t count, bd_error *err);
bd_status bd_cpu_step_begin(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status bd_cpu_embed(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status bd_cpu_norm_residual(bd_backend *backend, const bd_step *step, uint32_t layer,
                               bd_norm kind, bool add, uint32_t post_layer, bd_norm post,
                               bd_error *err);
bd_status bd_cpu_linear(bd_backend *backend, const bd_step *step, uint32_t layer, bd_group group,
                        bd_error *err);
bd_status bd_cpu_rope_kv_write(bd_backend *backend, const bd_step *step, uint32_t layer,
                               bd_error *err);
bd_status bd_cpu_attention(bd_backend *backend, const bd_step *step, uint32_t layer, bd_error *err);
bd_status bd_cpu_head(bd_backend *backend, const bd_step *step, bd_error *err);
bd_status bd_cpu_sample(bd_backend *backend, const bd_step *step, bd_error *err);
void bd_cpu_step_void(bd_backend *backend, const bd_step *step, uint32_t overlay);
bd_status bd_cpu_step_wait(bd_backend *backend, const bd_step *step, uint64_t deadline_us,
                           bd_token_result *results, bd_error *err);
bd_status bd_cpu_logits_get(bd_backend *backend, uint32_t index, float *out, bd_error *err);

/* Sum over the ranks of `rows` rows of activations; nothing to do on one. */
static inline bd_status bd_cpu_sum_ranks(bd_cpu *cpu, bd_cpu_buffer which, uint32_t rows,
                                         bd_error *err) {
    bd_comm *comm = cpu->options.comm;
    if (!comm) return BD_OK;
    return comm->ops->all_reduce(comm, cpu->buffers[which], (uint64_t)rows * cpu->config->hidden,
                                 BD_COMM_F32, NULL, err);
}
bd_status bd_cpu_sample_split(bd_cpu *cpu, const bd_step *step, bd_error *err);

/* Norm weights of a row: its overlay's, else the base's. */
const float *bd_cpu_norm_weights(const bd_cpu *cpu, const bd_overlay *overlay, uint32_t layer,
                                 bd_norm kind);
/* out[i] = x[i] / rms(x) * gamma[i]; out == x is fine. */
void bd_cpu_rms_norm(const bd_cpu *cpu, float *out, const float *x, const float *gamma,
                     uint32_t count);

#endif
