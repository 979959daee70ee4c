/* backend_cpu_support.h - what the tests of the CPU backend share: a small random model whose every
 * weight is also known in double precision, overlays of random planes, LoRA pairs and biases, and a
 * double-precision forward pass written from the formulas (no tiles, no bits: plain W + delta).
 * Threads: the test's own. */
#ifndef BITDELTA_TESTS_BACKEND_CPU_SUPPORT_H
#define BITDELTA_TESTS_BACKEND_CPU_SUPPORT_H

#include "base_support.h"

#include <math.h>

#include "backend/cpu/cpu.h"
#include "bitdelta/base/half.h"

#define OVERLAYS  3u
#define STEP_ROWS 160u /* of a test's step */

typedef struct known_matrix { /* a matrix as bytes and as numbers */
    uint32_t n, k;
    bd_dtype dtype;
    uint8_t *raw; /* malloc'ed */
    uint64_t offset_bytes, stride_bytes;
    double *value; /* [n][k] */
} known_matrix;

typedef struct known_delta { /* what an overlay adds to a matrix */
    bd_overlay_linear linear;
    double *value; /* [n][k], planes and LoRA together */
    double *bias;  /* NULL: the base's */
} known_delta;

typedef struct known_overlay {
    bd_overlay overlay;
    known_delta *linears;      /* [layers][BD_LINEAR_COUNT] */
    known_delta *embed, *head; /* [block_count] */
    bd_overlay_linear *linear_table, *embed_table, *head_table;
    const float **norms;
} known_overlay;

typedef struct fixture {
    uint64_t rng;
    bd_model_config config;
    bd_backend_options options;
    bd_backend *backend;
    bd_cpu *cpu;
    known_matrix embed, head;
    known_matrix *linears;
    double **biases;
    float **norms;
    float *inv_freq[4]; /* per rope table */
    float rope_scale[4];
    known_overlay overlays[OVERLAYS];
    uint8_t *arena;
    uint64_t arena_used;
} fixture;

static inline uint32_t pick(uint64_t *rng, uint32_t low, uint32_t high) { /* both included */
    return low + (uint32_t)(support_random(rng) % (high - low + 1u));
}

static inline double uniform(uint64_t *rng) {
    return (double)(support_random(rng) >> 11) * 0x1p-53;
}

static inline double normal(uint64_t *rng) {
    return sqrt(-2.0 * log(1.0 - uniform(rng))) * cos(6.283185307179586 * uniform(rng));
}

static inline void *must_calloc(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    assert_non_null(p);
    return p;
}

static inline uint32_t linear_n_of(const bd_model_config *c, uint32_t which) {
    const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const uint32_t n[BD_LINEAR_COUNT] = {q, kv, kv, c->hidden, c->ffn, c->ffn, c->hidden};
    return n[which];
}

static inline uint32_t linear_k_of(const bd_model_config *c, uint32_t which) {
    const uint32_t k[BD_LINEAR_COUNT] = {c->hidden, c->hidden, c->hidden, c->heads * c->head_dim,
                                         c->hidden, c->hidden, c->ffn};
    return k[which];
}

/* Random weights of any dtype, at an odd address, rows further apart than they are long. */
static inline known_matrix make_matrix(fixture *f, uint32_t n, uint32_t k) {
    static const bd_dtype dtypes[4] = {BD_DTYPE_BF16, BD_DTYPE_BF16, BD_DTYPE_F16, BD_DTYPE_F32};
    known_matrix m = {.n = n, .k = k, .dtype = dtypes[pick(&f->rng, 0, 3)]};
    const size_t size = bd_dtype_bytes(m.dtype);
    m.offset_bytes = pick(&f->rng, 0, 3);
    m.stride_bytes = k * size + pick(&f->rng, 0, 5);
    m.raw =
        must_calloc(m.offset_bytes + (n - 1) * m.stride_bytes + k * size, 1); /* not a byte more */
    m.value = must_calloc((size_t)n * k, sizeof *m.value);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < k; j++) {
            uint8_t *at = m.raw + m.offset_bytes + i * m.stride_bytes + j * size;
            float w = (float)(normal(&f->rng) / sqrt((double)k));
            const uint16_t half = m.dtype == BD_DTYPE_BF16 ? bd_f32_to_bf16(w) : bd_f32_to_f16(w);
            if (m.dtype == BD_DTYPE_BF16) w = bd_bf16_to_f32(half);
            if (m.dtype == BD_DTYPE_F16) w = bd_f16_to_f32(half);
            memcpy(at, m.dtype == BD_DTYPE_F32 ? (const void *)&w : (const void *)&half, size);
            m.value[(size_t)i * k + j] = (double)w;
        }
    }
    return m;
}

static inline void put_known(fixture *f, bd_weight_id id, const known_matrix *m) {
    bd_error err;
    const bd_weight_view view = {.dtype = m->dtype,
                                 .rows = m->n,
                                 .cols = m->k,
                                 .row_stride_bytes = m->stride_bytes,
                                 .data = m->raw + m->offset_bytes};
    assert_int_equal(f->backend->ops->weight_put(f->backend, id, &view, &err), BD_OK);
    memset(m->raw + m->offset_bytes, 0xff, 2); /* a copy was made: ours may change */
}

static inline void put_floats(fixture *f, bd_weight_id id, const float *values, uint32_t count) {
    bd_error err;
    const bd_weight_view view = {.dtype = BD_DTYPE_F32,
                                 .rows = 1,
                                 .cols = count,
                                 .row_stride_bytes = 4ull * count,
                                 .data = values};
    assert_int_equal(f->backend->ops->weight_put(f->backend, id, &view, &err), BD_OK);
}

static inline void *arena_take(fixture *f, uint64_t bytes) {
    uint8_t *at = f->arena + f->arena_used;
    f->arena_used += (bytes + 63) / 64 * 64;
    assert_true(f->arena_used <= f->options.delta_bytes);
    return at;
}

static inline const float *put_vector(fixture *f, const float *values, uint32_t count) {
    bd_error err;
    float *at = arena_take(f, 4ull * count);
    const uint32_t first = count / 3;
    assert_int_equal(
        f->backend->ops->vector_put(f->backend, at, first, values + first, count - first, &err),
        BD_OK);
    assert_int_equal(f->backend->ops->vector_put(f->backend, at, 0, values, first, &err), BD_OK);
    return at;
}

static inline void make_plane(fixture *f, known_delta *d, uint32_t p, uint32_t n, uint32_t k) {
    bd_error err;
    const bd_backend_ops *ops = f->backend->ops;
    const uint32_t bytes = k / 8, first = pick(&f->rng, 0, n);
    uint8_t *bits = must_calloc((size_t)n * bytes, 1);
    float *scale = must_calloc(n, sizeof *scale);
    for (uint32_t i = 0; i < n; i++) {
        scale[i] =
            pick(&f->rng, 0, 9) == 0 ? 0.0f : (float)(0.3 * uniform(&f->rng) / sqrt((double)k));
        for (uint32_t j = 0; j < k; j++) {
            const bool plus = support_random(&f->rng) & 1;
            if (plus) bits[(size_t)i * bytes + j / 8] |= (uint8_t)(1u << j % 8);
            d->value[(size_t)i * k + j] += plus ? (double)scale[i] : -(double)scale[i];
        }
    }
    uint8_t *at = arena_take(f, ops->plane_bytes(n, k));
    memset(at, 0xa5, ops->plane_bytes(n, k)); /* whatever was in the page before */
    assert_int_equal(ops->plane_put(f->backend, at, n, k, first, n - first,
                                    bits + (size_t)first * bytes, bytes, &err),
                     BD_OK);
    assert_int_equal(ops->plane_put(f->backend, at, n, k, 0, first, bits, bytes, &err), BD_OK);
    d->linear.planes[p] = (bd_plane){at, put_vector(f, scale, n)};
    free(bits);
    free(scale);
}

static inline void make_lora(fixture *f, known_delta *d, uint32_t n, uint32_t k, uint32_t rank,
                             const float *a, float scale) {
    float *b = must_calloc((size_t)n * rank, sizeof *b);
    d->linear.lora_rank = (uint16_t)rank;
    d->linear.lora_scale = scale;
    d->linear.lora_a = a;
    for (uint32_t i = 0; i < n * rank; i++)
        b[i] = (float)(0.5 * normal(&f->rng) / sqrt((double)rank));
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < k; j++) {
            double sum = 0.0;
            for (uint32_t r = 0; r < rank; r++)
                sum += (double)b[i * rank + r] * (double)a[(size_t)r * k + j];
            d->value[(size_t)i * k + j] += (double)d->linear.lora_scale * sum;
        }
    }
    d->linear.lora_b = put_vector(f, b, n * rank);
    free(b);
}

static inline const float *make_lora_a(fixture *f, uint32_t rank, uint32_t k) {
    float *a = must_calloc((size_t)rank * k, sizeof *a);
    for (uint32_t i = 0; i < rank * k; i++)
        a[i] = (float)(0.3 * normal(&f->rng) / sqrt((double)k));
    const float *put = put_vector(f, a, rank * k);
    free(a);
    return put;
}

static inline known_delta make_delta(fixture *f, uint32_t n, uint32_t k, const float *lora_a,
                                     uint32_t rank, bool biased) {
    known_delta d = {.value = must_calloc((size_t)n * k, sizeof(double))};
    if (k % 8 == 0) d.linear.plane_count = (uint8_t)pick(&f->rng, 0, BD_OVERLAY_PLANES_MAX);
    for (uint32_t p = 0; p < d.linear.plane_count; p++)
        make_plane(f, &d, p, n, k);
    if (rank > 0) make_lora(f, &d, n, k, rank, lora_a, 0.5f + 0.125f * (float)rank);
    if (!biased) return d;
    float *bias = must_calloc(n, sizeof *bias);
    d.bias = must_calloc(n, sizeof *d.bias);
    for (uint32_t i = 0; i < n; i++)
        d.bias[i] = (double)(bias[i] = (float)normal(&f->rng));
    d.linear.bias = put_vector(f, bias, n);
    free(bias);
    return d;
}

static inline void make_blocks(fixture *f, known_overlay *o, known_delta **out,
                               bd_overlay_linear **table, bool bias) {
    const bd_model_config *c = &f->config;
    const uint32_t rank = pick(&f->rng, 0, 1) * pick(&f->rng, 1, 5);
    const float *a = rank > 0 ? make_lora_a(f, rank, c->hidden) : NULL;
    *out = must_calloc(o->overlay.block_count, sizeof **out);
    *table = must_calloc(o->overlay.block_count, sizeof **table);
    for (uint32_t b = 0; b < o->overlay.block_count; b++) {
        const uint32_t left = c->vocab - b * o->overlay.block_rows;
        const uint32_t n = left < o->overlay.block_rows ? left : o->overlay.block_rows;
        (*out)[b] = make_delta(f, n, c->hidden, a, rank, bias && pick(&f->rng, 0, 1));
        (*table)[b] = (*out)[b].linear;
    }
}

static inline const float *make_norm(fixture *f, uint32_t count) {
    float *values = must_calloc(count, sizeof *values);
    for (uint32_t i = 0; i < count; i++)
        values[i] = (float)((f->config.norm_plus_one ? 0.0 : 1.0) + 0.2 * normal(&f->rng));
    const float *put = put_vector(f, values, count);
    free(values);
    return put;
}

static inline void make_overlay(fixture *f, known_overlay *o, uint32_t index) {
    const bd_model_config *c = &f->config;
    o->overlay.vocab = pick(&f->rng, 0, 1) ? c->vocab : pick(&f->rng, c->vocab / 2 + 1, c->vocab);
    o->overlay.rope_table = index + 1;
    o->overlay.window_tokens = pick(&f->rng, 0, 1) ? c->window_tokens : pick(&f->rng, 1, 30);
    o->overlay.block_rows = pick(&f->rng, 1, c->vocab + 3);
    if (o->overlay.block_rows > c->vocab) o->overlay.block_rows = c->vocab;
    o->overlay.block_count = (c->vocab + o->overlay.block_rows - 1) / o->overlay.block_rows;
    o->linears = must_calloc((size_t)c->layers * BD_LINEAR_COUNT, sizeof *o->linears);
    o->linear_table = must_calloc((size_t)c->layers * BD_LINEAR_COUNT, sizeof *o->linear_table);
    o->norms = must_calloc(((size_t)c->layers + 1) * BD_NORM_COUNT, sizeof *o->norms);
    for (uint32_t i = 0; i < c->layers * BD_LINEAR_COUNT; i++) {
        const uint32_t n = linear_n_of(c, i % BD_LINEAR_COUNT),
                       k = linear_k_of(c, i % BD_LINEAR_COUNT);
        const uint32_t rank = pick(&f->rng, 0, 1) *
                              (pick(&f->rng, 0, 1) ? 8 * pick(&f->rng, 1, 3) : pick(&f->rng, 1, 9));
        const float *a = rank > 0 ? make_lora_a(f, rank, k) : NULL;
        o->linears[i] = make_delta(f, n, k, a, rank, pick(&f->rng, 0, 1) == 1);
        o->linear_table[i] = o->linears[i].linear;
    }
    for (uint32_t i = 0; i < c->layers * BD_NORM_COUNT + 1; i++) {
        const uint32_t kind = i % BD_NORM_COUNT;
        if (pick(&f->rng, 0, 1))
            o->norms[i] =
                make_norm(f, kind == BD_NORM_Q || kind == BD_NORM_K ? c->head_dim : c->hidden);
    }
    o->overlay.linears = o->linear_table;
    o->overlay.norms = o->norms;
    make_blocks(f, o, &o->embed, &o->embed_table, false);
    o->overlay.embed = o->embed_table;
    if (c->tied) {
        o->overlay.head = o->embed_table;
        o->head = o->embed;
    } else {
        make_blocks(f, o, &o->head, &o->head_table, true);
        o->overlay.head = o->head_table;
    }
}

static inline void free_deltas(known_delta *deltas, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        free(deltas[i].value);
        free(deltas[i].bias);
    }
    free(deltas);
}

static inline void fixture_close(fixture *f) {
    const bd_model_config *c = &f->config;
    f->backend->ops->close(f->backend);
    free(f->embed.raw), free(f->embed.value), free(f->head.raw), free(f->head.value);
    for (uint32_t i = 0; i < c->layers * BD_LINEAR_COUNT; i++) {
        free(f->linears[i].raw), free(f->linears[i].value), free(f->biases[i]);
    }
    for (uint32_t i = 0; i < (c->layers + 1) * BD_NORM_COUNT; i++)
        free(f->norms[i]);
    free(f->linears), free((void *)f->biases), free((void *)f->norms);
    for (uint32_t i = 0; i < 4; i++)
        free(f->inv_freq[i]);
    for (uint32_t i = 0; i < OVERLAYS; i++) {
        known_overlay *o = &f->overlays[i];
        if (o->linears == NULL) continue;
        free_deltas(o->linears, c->layers * BD_LINEAR_COUNT);
        free_deltas(o->embed, o->overlay.block_count);
        if (o->head != o->embed) free_deltas(o->head, o->overlay.block_count);
        free(o->linear_table), free(o->embed_table), free(o->head_table), free((void *)o->norms);
    }
}

/* The which-th of the kernels that this machine has, and around again. */
static inline const bd_cpu_kernels *kernels_here(uint32_t which) {
    const bd_cpu_kernels *here[BD_CPU_KERNELS_COUNT];
    uint32_t count = 0;
    for (uint32_t i = 0; i < BD_CPU_KERNELS_COUNT; i++) {
        here[count] = bd_cpu_kernels_at(i);
        if (here[count] != NULL) count++;
    }
    assert_true(count > 0);
    return here[which % count];
}

/* Opens a backend with random base weights for f->config; options that were left 0 get defaults.
 * kernels: 0 for the machine's best, 1 for the next best, ... */
static inline void fixture_open(fixture *f, uint32_t kernels) {
    bd_error err;
    const bd_model_config *c = &f->config;
    bd_backend_options *o = &f->options;
    o->config = c;
    o->rank_count = 1;
    if (o->rows_max == 0) o->rows_max = STEP_ROWS;
    if (o->seqs_max == 0) o->seqs_max = 20;
    if (o->logits_rows_max == 0) o->logits_rows_max = STEP_ROWS;
    if (o->kv_block_tokens == 0) o->kv_block_tokens = 1u << pick(&f->rng, 0, 7);
    if (o->max_model_len == 0) o->max_model_len = 512;
    if (o->kv_block_count == 0) o->kv_block_count = 4096 / o->kv_block_tokens;
    o->rope_tables_max = 4;
    if (o->delta_bytes == 0) o->delta_bytes = 64u << 20;
    if (bd_backend_cpu_ops()->open(o, &f->backend, &err) != BD_OK)
        fail_msg("open: %s: %s", err.subject, err.message);
    f->cpu = bd_cpu_of(f->backend);
    f->cpu->kernels = kernels_here(kernels);
    f->arena = f->backend->ops->delta_arena(f->backend);
    f->linears = must_calloc((size_t)c->layers * BD_LINEAR_COUNT, sizeof *f->linears);
    f->biases = must_calloc((size_t)c->layers * BD_LINEAR_COUNT, sizeof *f->biases);
    f->norms = must_calloc(((size_t)c->layers + 1) * BD_NORM_COUNT, sizeof *f->norms);
    f->embed = make_matrix(f, c->vocab, c->hidden);
    put_known(f, (bd_weight_id){BD_WEIGHT_EMBED, 0, 0}, &f->embed);
    if (!c->tied) {
        f->head = make_matrix(f, c->vocab, c->hidden);
        put_known(f, (bd_weight_id){BD_WEIGHT_HEAD, 0, 0}, &f->head);
    }
    for (uint32_t i = 0; i < c->layers * BD_LINEAR_COUNT; i++) {
        const uint32_t layer = i / BD_LINEAR_COUNT, which = i % BD_LINEAR_COUNT,
                       n = linear_n_of(c, which);
        f->linears[i] = make_matrix(f, n, linear_k_of(c, which));
        put_known(f, (bd_weight_id){BD_WEIGHT_LINEAR, layer, which}, &f->linears[i]);
        if (pick(&f->rng, 0, 1)) continue;
        float *bias = must_calloc(n, sizeof *bias);
        f->biases[i] = must_calloc(n, sizeof *f->biases[i]);
        for (uint32_t j = 0; j < n; j++)
            f->biases[i][j] = (double)(bias[j] = (float)normal(&f->rng));
        put_floats(f, (bd_weight_id){BD_WEIGHT_BIAS, layer, which}, bias, n);
        free(bias);
    }
    for (uint32_t i = 0; i < c->layers * BD_NORM_COUNT + 1; i++) {
        const uint32_t kind = i % BD_NORM_COUNT;
        const uint32_t count = kind == BD_NORM_Q || kind == BD_NORM_K ? c->head_dim : c->hidden;
        f->norms[i] = must_calloc(count, sizeof(float));
        for (uint32_t j = 0; j < count; j++) {
            f->norms[i][j] = (float)((c->norm_plus_one ? 0.0 : 1.0) + 0.2 * normal(&f->rng));
        }
        put_floats(f, (bd_weight_id){BD_WEIGHT_NORM, i / BD_NORM_COUNT, kind}, f->norms[i], count);
    }
    for (uint32_t t = 0; t < 4; t++) {
        f->inv_freq[t] = must_calloc(c->rope.rotary_dim / 2, sizeof(float));
        for (uint32_t i = 0; i < c->rope.rotary_dim / 2; i++) {
            f->inv_freq[t][i] = (float)pow(10000.0 + 5000.0 * t, -2.0 * i / c->rope.rotary_dim);
        }
        f->rope_scale[t] = t == 0 ? 1.0f : 1.0f + 0.1f * (float)t;
        assert_int_equal(
            f->backend->ops->rope_table_put(f->backend, t, f->inv_freq[t], f->rope_scale[t], &err),
            BD_OK);
    }
}

/* A random small model: odd sizes, every option on or off. */
static inline void random_config(fixture *f, uint32_t vocab_max) {
    static const uint32_t head_dims[] = {24, 64, 80, 128, 256, 8, 12, 20};
    bd_model_config *c = &f->config;
    memset(c, 0, sizeof *c);
    c->family = BD_FAMILY_LLAMA;
    /* Without planes, which come in whole bytes, a matrix may have any number of columns. */
    const bool odd = pick(&f->rng, 0, 2) == 0;
    c->hidden = odd ? pick(&f->rng, 1, 130) : 8 * pick(&f->rng, 1, 16);
    c->ffn = odd ? pick(&f->rng, 1, 560) : 8 * pick(&f->rng, 1, 70);
    c->layers = pick(&f->rng, 1, 2);
    c->head_dim = head_dims[pick(&f->rng, 0, 7)];
    c->kv_heads = pick(&f->rng, 1, 2);
    c->heads = c->kv_heads * pick(&f->rng, 1, 4);
    while (!odd && c->heads * c->head_dim % 8 != 0)
        c->heads += c->kv_heads;
    if (c->head_dim >= 128) {
        c->kv_heads = 1;
        c->heads = pick(&f->rng, 1, 2);
    }
    c->vocab = pick(&f->rng, 3, vocab_max);
    c->max_positions = 512;
    c->window_tokens = pick(&f->rng, 0, 1) * pick(&f->rng, 1, 40);
    c->window_layer[0] = (uint8_t)pick(&f->rng, 0, 1);
    c->window_layer[1] = (uint8_t)!c->window_layer[0];
    c->norm_eps = 1e-5f;
    c->norm_plus_one = pick(&f->rng, 0, 1);
    c->qk_norm = pick(&f->rng, 0, 1);
    c->post_norms = pick(&f->rng, 0, 1);
    c->tied = pick(&f->rng, 0, 1);
    c->activation = pick(&f->rng, 0, 1) ? BD_ACT_SILU : BD_ACT_GELU_TANH;
    c->embed_scale = pick(&f->rng, 0, 1) ? 1.0f : 5.65625f;
    c->attn_scale = (float)(1.0 / sqrt((double)c->head_dim));
    c->attn_softcap = pick(&f->rng, 0, 1) ? 0.0f : 2.0f;
    c->logit_softcap = pick(&f->rng, 0, 1) ? 0.0f : 3.0f;
    c->rope.rotary_dim = pick(&f->rng, 0, 1) ? c->head_dim : c->head_dim / 4 * 2;
}

/* ---- the reference ---- */

static inline const known_overlay *overlay_of(const fixture *f, const bd_step *step, uint32_t row) {
    for (uint32_t s = 0; s < step->segment_count; s++) {
        const bd_segment *g = &step->segments[s];
        if (row < g->first_row || row >= g->first_row + g->row_count) continue;
        for (uint32_t i = 0; g->overlay >= 0 && i < OVERLAYS; i++) {
            if (&f->overlays[i].overlay == step->overlays[g->overlay]) return &f->overlays[i];
        }
    }
    return NULL;
}

/* y = x (W + delta)^T + bias of one row; bound: sum of |x w|, what rounding is relative to. */
static inline void ref_matrix(const known_matrix *w, const known_delta *d, const double *base_bias,
                              const double *x, double *y, double *bound) {
    for (uint32_t i = 0; i < w->n; i++) {
        double sum = 0.0, size = 0.0;
        for (uint32_t k = 0; k < w->k; k++) {
            const double delta = d != NULL ? d->value[(size_t)i * w->k + k] : 0.0;
            const double base = w->value[(size_t)i * w->k + k];
            sum += x[k] * (base + delta);
            size += fabs(x[k]) * (fabs(base) + fabs(delta));
        }
        const double *bias = d != NULL && d->bias != NULL ? d->bias : base_bias;
        y[i] = sum + (bias != NULL ? bias[i] : 0.0);
        bound[i] = size + fabs(y[i]);
    }
}

static inline void ref_linear(const fixture *f, const known_overlay *o, uint32_t layer,
                              uint32_t which, const double *x, double *y, double *bound) {
    const uint32_t i = layer * BD_LINEAR_COUNT + which;
    ref_matrix(&f->linears[i], o != NULL ? &o->linears[i] : NULL, f->biases[i], x, y, bound);
}

static inline double ref_activation(const bd_model_config *c, double x) {
    if (c->activation == BD_ACT_SILU) return x / (1.0 + exp(-x));
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static inline const float *ref_gamma(const fixture *f, const known_overlay *o, uint32_t layer,
                                     uint32_t kind) {
    const uint32_t i = layer * BD_NORM_COUNT + kind;
    return o != NULL && o->norms[i] != NULL ? o->norms[i] : f->norms[i];
}

static inline void ref_norm(const fixture *f, const float *gamma, double *x, uint32_t count) {
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    const double inverse = 1.0 / sqrt(sum / count + (double)f->config.norm_eps);
    for (uint32_t i = 0; i < count; i++)
        x[i] *= inverse * ((f->config.norm_plus_one ? 1.0 : 0.0) + (double)gamma[i]);
}

static inline void ref_embed(const fixture *f, const known_overlay *o, uint32_t token,
                             double *out) {
    const uint32_t hidden = f->config.hidden;
    for (uint32_t i = 0; i < hidden; i++) {
        out[i] = f->embed.value[(size_t)token * hidden + i];
        if (o != NULL) {
            const uint32_t rows = o->overlay.block_rows;
            out[i] += o->embed[token / rows].value[(size_t)(token % rows) * hidden + i];
        }
        out[i] *= (double)f->config.embed_scale;
    }
}

static inline void ref_rope(const fixture *f, const known_overlay *o, uint32_t position,
                            double *x) {
    const uint32_t table = o != NULL ? o->overlay.rope_table : 0,
                   half = f->config.rope.rotary_dim / 2;
    for (uint32_t i = 0; i < half; i++) {
        const double angle =
            (double)((float)position * f->inv_freq[table][i]); /* float32 by definition */
        const double c = cos(angle) * (double)f->rope_scale[table],
                     s = sin(angle) * (double)f->rope_scale[table];
        const double a = x[i], b = x[half + i];
        x[i] = a * c - b * s;
        x[half + i] = b * c + a * s;
    }
}

static inline double cap(double x, float limit) {
    return limit > 0.0f ? (double)limit * tanh(x / (double)limit) : x;
}

/* Attention of one head for the query at token `t`: keys and values are [token][head_dim], `stride`
 * apart. */
static inline void ref_attend(const fixture *f, uint32_t layer, const known_overlay *o, uint32_t t,
                              const double *q, const double *keys, const double *values,
                              uint32_t stride, double *out) {
    const bd_model_config *c = &f->config;
    uint32_t window = o != NULL ? o->overlay.window_tokens : c->window_tokens;
    if (!c->window_layer[layer]) window = 0;
    double *p = must_calloc(t + 1, sizeof *p), max = -(double)INFINITY, sum = 0.0;
    for (uint32_t i = 0; i <= t; i++) {
        p[i] = -(double)INFINITY;
        if (window > 0 && i + window <= t) continue;
        double dot = 0.0;
        for (uint32_t d = 0; d < c->head_dim; d++)
            dot += q[d] * keys[(size_t)i * stride + d];
        p[i] = cap(dot * (double)c->attn_scale, c->attn_softcap);
        max = fmax(max, p[i]);
    }
    for (uint32_t i = 0; i <= t; i++)
        sum += p[i] = exp(p[i] - max);
    for (uint32_t d = 0; d < c->head_dim; d++) {
        out[d] = 0.0;
        for (uint32_t i = 0; i <= t; i++)
            out[d] += p[i] / sum * values[(size_t)i * stride + d];
    }
    free(p);
}

static inline void to_double(double *out, const float *in, size_t count) {
    for (size_t i = 0; i < count; i++)
        out[i] = (double)in[i];
}

static inline void check_close(const char *what, const float *got, const double *want,
                               const double *bound, uint32_t count, double tolerance) {
    for (uint32_t i = 0; i < count; i++) {
        const double allowed = tolerance * (bound != NULL ? bound[i] : 1.0) + 1e-30;
        if (!(fabs((double)got[i] - want[i]) <= allowed)) {
            fail_msg("%s[%u]: got %.9g, want %.9g, off by %.3g, allowed %.3g", what, i,
                     (double)got[i], want[i], fabs((double)got[i] - want[i]), allowed);
        }
    }
}

static inline double l2_distance(const float *a, const double *b, uint32_t count) {
    double diff = 0.0, size = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        if (isinf(b[i])) {
            assert_true(isinf(a[i]));
            continue;
        }
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += b[i] * b[i];
    }
    return sqrt(diff / (size > 0.0 ? size : 1.0));
}

/* ---- steps ---- */

typedef struct built_step { /* a step and the arrays it points to */
    bd_step step;
    int32_t tokens[STEP_ROWS];
    uint32_t positions[STEP_ROWS], seq_of_row[STEP_ROWS];
    bd_seq seqs[STEP_ROWS];
    bd_segment segments[STEP_ROWS];
    const bd_overlay *overlays[OVERLAYS];
    bd_logits_row logits_rows[STEP_ROWS];
    uint32_t blocks[STEP_ROWS][512];
} built_step;

static inline built_step *step_create(const fixture *f) {
    built_step *b = must_calloc(1, sizeof *b);
    b->step = (bd_step){.id = 1,
                        .tokens = b->tokens,
                        .positions = b->positions,
                        .seq_of_row = b->seq_of_row,
                        .seqs = b->seqs,
                        .segments = b->segments,
                        .overlays = b->overlays,
                        .overlay_count = OVERLAYS,
                        .logits_rows = b->logits_rows};
    for (uint32_t i = 0; i < OVERLAYS; i++)
        b->overlays[i] = &f->overlays[i].overlay;
    return b;
}

/* Adds `rows` rows of a sequence that has `before` tokens in the cache already; each row joins the
 * last segment if that is of the same overlay, so segments may hold several sequences. */
static inline uint32_t step_add(fixture *f, built_step *b, int32_t overlay, uint32_t before,
                                uint32_t rows) {
    bd_step *s = &b->step;
    const uint32_t index = s->seq_count++;
    assert_true(s->row_count + rows <= STEP_ROWS);
    b->seqs[index] = (bd_seq){.first_row = s->row_count,
                              .row_count = rows,
                              .kv_before_tokens = before,
                              .kv_blocks = b->blocks[index]};
    for (uint32_t r = 0; r < rows; r++) {
        b->tokens[s->row_count + r] = (int32_t)pick(&f->rng, 0, f->config.vocab - 1);
        b->positions[s->row_count + r] = before + r;
        b->seq_of_row[s->row_count + r] = index;
    }
    if (s->segment_count > 0 && b->segments[s->segment_count - 1].overlay == overlay) {
        b->segments[s->segment_count - 1].row_count += rows;
    } else {
        b->segments[s->segment_count++] = (bd_segment){overlay, s->row_count, rows};
    }
    s->row_count += rows;
    return index;
}

/* A random mixed step of single rows and chunks, overlays in any order. */
static inline void step_random(fixture *f, built_step *b, uint32_t row_max) {
    const uint32_t goal = pick(&f->rng, 1, row_max);
    while (b->step.row_count < goal && b->step.seq_count < f->options.seqs_max) {
        uint32_t rows = pick(&f->rng, 0, 1) ? 1 : pick(&f->rng, 1, goal);
        if (rows > goal - b->step.row_count) rows = goal - b->step.row_count;
        step_add(f, b, (int32_t)pick(&f->rng, 0, OVERLAYS) - 1, 0, rows);
    }
}

#endif
