/* model_reference.h - a second transformer, to test the first: float64, one token after the other,
 * whole matrices W_base + sum of scale * sign, written from the published definitions and sharing
 * no code with src/model or a backend. Also deltas of random data, made from the same list of
 * names. */
#ifndef BITDELTA_TESTS_MODEL_REFERENCE_H
#define BITDELTA_TESTS_MODEL_REFERENCE_H

#include "base_support.h"
#include "model_support.h"

#include <stdarg.h>
#include <unistd.h>
#include <xxhash.h>

#include "bitdelta/base/half.h"

#define MR_TENSORS_MAX 256

typedef struct mr_tensor {
    char name[96];
    uint32_t rows, cols; /* cols 0: a vector */
} mr_tensor;

typedef struct mr_lora { /* a low-rank pair on one matrix: + scale * b a */
    char name[96];
    uint32_t rank, rows, cols;
    float scale;
    float *a, *b; /* [rank, cols], [rows, rank] */
} mr_lora;

typedef struct mr_model {
    bd_model_config config;
    bd_checkpoint *checkpoint;
    bd_safetensors *delta; /* NULL: the base */
    mr_lora *loras;
    uint32_t lora_count;
    mr_tensor tensors[MR_TENSORS_MAX]; /* canonical, in the order of a delta's data */
    uint32_t count;
    /* What deltas of it are like; zero: an ordinary one. */
    uint32_t extra_rows; /* of embedding and head */
    bool full_tables;    /* embedding and head in full */
    bool own_head;       /* a head where the base's is tied */
} mr_model;

static inline bool mr_is_table(const char *name) {
    return strstr(name, "embed_tokens") != NULL || strstr(name, "lm_head") != NULL;
}

/* Rows of the tables as the model now is, with the delta or without. */
static inline uint32_t mr_vocab(const mr_model *m) {
    return m->config.vocab + (m->delta ? m->extra_rows : 0);
}

static inline BD_PRINTF(4, 5) void mr_add(mr_model *m, uint32_t rows, uint32_t cols,
                                          const char *format, ...) {
    va_list args;
    assert_true(m->count < MR_TENSORS_MAX);
    mr_tensor *t = &m->tensors[m->count++];
    va_start(args, format);
    vsnprintf(t->name, sizeof t->name, format, args);
    va_end(args);
    t->rows = rows;
    t->cols = cols;
}

static inline void mr_list_layer(mr_model *m, uint32_t l) {
    const bd_model_config *c = &m->config;
    const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    mr_add(m, c->hidden, 0, "model.layers.%u.input_layernorm.weight", l);
    mr_add(m, q, c->hidden, "model.layers.%u.self_attn.q_proj.weight", l);
    if (c->qkv_bias) mr_add(m, q, 0, "model.layers.%u.self_attn.q_proj.bias", l);
    mr_add(m, kv, c->hidden, "model.layers.%u.self_attn.k_proj.weight", l);
    if (c->qkv_bias) mr_add(m, kv, 0, "model.layers.%u.self_attn.k_proj.bias", l);
    mr_add(m, kv, c->hidden, "model.layers.%u.self_attn.v_proj.weight", l);
    if (c->qkv_bias) mr_add(m, kv, 0, "model.layers.%u.self_attn.v_proj.bias", l);
    if (c->qk_norm) mr_add(m, c->head_dim, 0, "model.layers.%u.self_attn.q_norm.weight", l);
    if (c->qk_norm) mr_add(m, c->head_dim, 0, "model.layers.%u.self_attn.k_norm.weight", l);
    mr_add(m, c->hidden, q, "model.layers.%u.self_attn.o_proj.weight", l);
    mr_add(m, c->hidden, 0, "model.layers.%u.post_attention_layernorm.weight", l);
    if (c->family == BD_FAMILY_GEMMA2) {
        mr_add(m, c->hidden, 0, "model.layers.%u.pre_feedforward_layernorm.weight", l);
        mr_add(m, c->hidden, 0, "model.layers.%u.post_feedforward_layernorm.weight", l);
    }
    mr_add(m, c->ffn, c->hidden, "model.layers.%u.mlp.gate_proj.weight", l);
    mr_add(m, c->ffn, c->hidden, "model.layers.%u.mlp.up_proj.weight", l);
    mr_add(m, c->hidden, c->ffn, "model.layers.%u.mlp.down_proj.weight", l);
}

static inline void mr_open(mr_model *m, const char *dir) {
    bd_error err = {0};
    memset(m, 0, sizeof *m);
    MS_OK(bd_model_config_read(dir, &m->config, &err), err);
    MS_OK(bd_checkpoint_open(dir, &m->checkpoint, &err), err);
    mr_add(m, m->config.vocab, m->config.hidden, "model.embed_tokens.weight");
    for (uint32_t l = 0; l < m->config.layers; l++)
        mr_list_layer(m, l);
    mr_add(m, m->config.hidden, 0, "model.norm.weight");
    if (!m->config.tied) mr_add(m, m->config.vocab, m->config.hidden, "lm_head.weight");
}

/* A head of its own for deltas of a tied model. */
static inline void mr_add_head(mr_model *m) {
    assert_true(m->config.tied && !m->own_head);
    mr_add(m, m->config.vocab, m->config.hidden, "lm_head.weight");
    m->own_head = true;
}

/* Of random values, as large as the matrix's own; rows and cols as in the list of names. */
static inline mr_lora *mr_add_lora(mr_model *m, uint64_t *random, const char *name, uint32_t rank) {
    m->loras = realloc(m->loras, (m->lora_count + 1) * sizeof *m->loras);
    assert_non_null(m->loras);
    mr_lora *l = &m->loras[m->lora_count++];
    *l = (mr_lora){.rank = rank, .scale = 0.25f + (float)(support_random(random) % 64) / 64};
    snprintf(l->name, sizeof l->name, "%s", name);
    for (uint32_t i = 0; i < m->count; i++)
        if (strcmp(m->tensors[i].name, name) == 0)
            l->rows = m->tensors[i].rows, l->cols = m->tensors[i].cols;
    assert_true(l->rows > 0 && l->cols > 0 && rank > 0);
    const size_t counts[2] = {(size_t)rank * l->cols, (size_t)l->rows * rank};
    float **const values[2] = {&l->a, &l->b};
    for (int k = 0; k < 2; k++) {
        *values[k] = calloc(counts[k], sizeof(float));
        assert_non_null(*values[k]);
        const double size = k == 0 ? 1 / sqrt(l->cols) : 1 / sqrt(rank);
        for (size_t i = 0; i < counts[k]; i++)
            (*values[k])[i] =
                (float)(((double)(support_random(random) >> 40) * 0x1p-23 - 1) * size);
    }
    return l;
}

static inline void mr_close(mr_model *m) {
    for (uint32_t i = 0; i < m->lora_count; i++) {
        free(m->loras[i].a);
        free(m->loras[i].b);
    }
    free(m->loras);
    bd_safetensors_close(m->delta);
    bd_checkpoint_close(m->checkpoint);
}

/* ---- Weights ---- */

static inline const mr_tensor *mr_find(const mr_model *m, const char *name) {
    for (uint32_t i = 0; i < m->count; i++) {
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i];
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

static inline void mr_read(const bd_tensor *t, uint64_t first, uint64_t count, double *out) {
    float *values = calloc(count, sizeof *values);
    assert_non_null(values);
    bd_tensor_to_f32(t, first, count, values);
    for (uint64_t i = 0; i < count; i++)
        out[i] = (double)values[i];
    free(values);
}

/* Phi-3's fused tensors: the linear's part of the rows. */
static inline const bd_tensor *mr_fused(const mr_model *m, const char *name, uint64_t *first_row) {
    static const struct {
        const char *part, *fused;
    } table[] = {{"q_proj", "qkv_proj"},
                 {"k_proj", "qkv_proj"},
                 {"v_proj", "qkv_proj"},
                 {"gate_proj", "gate_up_proj"},
                 {"up_proj", "gate_up_proj"}};
    const uint64_t q = m->config.heads * m->config.head_dim,
                   kv = m->config.kv_heads * m->config.head_dim;
    const uint64_t firsts[] = {0, q, q + kv, 0, m->config.ffn};
    for (size_t i = 0; i < 5; i++) {
        char full[128];
        const char *at = strstr(name, table[i].part);
        if (!at || at[-1] != '.') continue;
        snprintf(full, sizeof full, "%.*s%s.weight", (int)(at - name), name, table[i].fused);
        *first_row = firsts[i];
        return bd_checkpoint_find(m->checkpoint, full);
    }
    return NULL;
}

/* The variant's weight in float64 but for low-rank pairs; the caller frees. */
static inline double *mr_weight_of_files(const mr_model *m, const char *name) {
    const mr_tensor *t = mr_find(m, name);
    const uint64_t cols = t->cols ? t->cols : 1, count = t->rows * cols;
    uint64_t first_row = 0;
    const uint64_t extra = m->delta && mr_is_table(name) ? m->extra_rows * cols : 0;
    double *w = calloc(count + extra, sizeof *w);
    assert_non_null(w);
    const bd_tensor *base = bd_checkpoint_find(m->checkpoint, name);
    if (!base && mr_is_table(name))
        base = bd_checkpoint_find(m->checkpoint, "model.embed_tokens.weight");
    if (!base) base = mr_fused(m, name, &first_row);
    if (!base) fail_msg("no tensor for %s", name);
    mr_read(base, first_row * cols, count, w);
    if (!m->delta) return w;
    const bd_tensor *full = bd_safetensors_find(m->delta, name);
    if (full) mr_read(full, 0, count, w);
    if (extra > 0) {
        char extra_name[128];
        snprintf(extra_name, sizeof extra_name, "%s.extra", name);
        mr_read(bd_safetensors_find(m->delta, extra_name), 0, extra, w + count);
    }
    for (uint32_t plane = 0; plane < BD_PLANES_MAX; plane++) {
        char sign_name[128], scale_name[128], suffix[8] = "";
        if (plane > 0) snprintf(suffix, sizeof suffix, "%u", plane);
        snprintf(sign_name, sizeof sign_name, "%s.sign%s", name, suffix);
        snprintf(scale_name, sizeof scale_name, "%s.scale%s", name, suffix);
        const bd_tensor *sign = bd_safetensors_find(m->delta, sign_name);
        const bd_tensor *scale = bd_safetensors_find(m->delta, scale_name);
        if (!sign) break;
        for (uint64_t i = 0; i < count; i++) {
            float s;
            memcpy(&s, scale->data + 4 * (i / cols), sizeof s);
            w[i] += sign->data[i / 8] >> (i % 8) & 1 ? (double)s : -(double)s;
        }
    }
    return w;
}

/* The variant's weight in float64; the caller frees. */
static inline double *mr_weight(const mr_model *m, const char *name) {
    double *w = mr_weight_of_files(m, name);
    for (uint32_t i = 0; i < m->lora_count; i++) {
        const mr_lora *l = &m->loras[i];
        if (strcmp(l->name, name) != 0) continue;
        for (uint32_t row = 0; row < l->rows; row++)
            for (uint32_t r = 0; r < l->rank; r++) {
                const double b = (double)l->scale * (double)l->b[(size_t)row * l->rank + r];
                for (uint32_t c = 0; c < l->cols; c++)
                    w[(size_t)row * l->cols + c] += b * (double)l->a[(size_t)r * l->cols + c];
            }
    }
    return w;
}

static inline BD_PRINTF(2, 3) double *mr_get(const mr_model *m, const char *format, ...) {
    char name[96];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return mr_weight(m, name);
}

/* ---- Arithmetic ---- */

/* y [tokens, n] = x [tokens, k] w^T, and bias if given; frees w and bias. */
static inline double *mr_linear(const double *x, uint32_t tokens, double *w, double *bias,
                                uint32_t n, uint32_t k) {
    double *y = calloc((size_t)tokens * n, sizeof *y);
    assert_non_null(y);
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t i = 0; i < n; i++) {
            double sum = bias ? bias[i] : 0;
            for (uint32_t j = 0; j < k; j++)
                sum += x[(size_t)t * k + j] * w[(size_t)i * k + j];
            y[(size_t)t * n + i] = sum;
        }
    }
    free(w);
    free(bias);
    return y;
}

/* Rows of n values normalised to out (may be x); frees gamma. */
static inline void mr_norm(const mr_model *m, double *out, const double *x, size_t rows, uint32_t n,
                           double *gamma) {
    for (size_t r = 0; r < rows; r++) {
        double squares = 0;
        for (uint32_t i = 0; i < n; i++)
            squares += x[r * n + i] * x[r * n + i];
        const double inverse = 1 / sqrt(squares / n + (double)m->config.norm_eps);
        for (uint32_t i = 0; i < n; i++) {
            out[r * n + i] =
                x[r * n + i] * inverse * (gamma[i] + (m->config.norm_plus_one ? 1 : 0));
        }
    }
    free(gamma);
}

static inline double mr_inv_freq(const bd_rope_config *rope, uint32_t i) {
    const double pi = 3.14159265358979323846;
    const double inv = pow(rope->theta, -2.0 * i / rope->rotary_dim);
    if (rope->kind == BD_ROPE_PLAIN) return inv;
    assert_int_equal(rope->kind, BD_ROPE_LLAMA3);
    const double turns = rope->original_max_positions * inv / (2 * pi);
    double smooth =
        (turns - rope->low_freq_factor) / (rope->high_freq_factor - rope->low_freq_factor);
    smooth = smooth < 0 ? 0 : smooth > 1 ? 1 : smooth;
    return inv * (smooth + (1 - smooth) / rope->factor);
}

/* Rotates each head of x [tokens, heads, head_dim]; halves are paired. */
static inline void mr_rope(const mr_model *m, double *x, uint32_t tokens, uint32_t heads) {
    const uint32_t dim = m->config.head_dim, half = m->config.rope.rotary_dim / 2;
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t h = 0; h < heads; h++) {
            double *head = x + ((size_t)t * heads + h) * dim;
            for (uint32_t i = 0; i < half; i++) {
                const double angle = t * mr_inv_freq(&m->config.rope, i), a = head[i],
                             b = head[i + half];
                head[i] = a * cos(angle) - b * sin(angle);
                head[i + half] = b * cos(angle) + a * sin(angle);
            }
        }
    }
}

static inline double mr_softcap(double x, float cap) {
    return cap > 0 ? (double)cap * tanh(x / (double)cap) : x;
}

static inline void mr_attend(const mr_model *m, uint32_t layer, const double *q, const double *k,
                             const double *v, uint32_t t, uint32_t h, double *out) {
    const bd_model_config *c = &m->config;
    const uint32_t dim = c->head_dim, kv_head = h / (c->heads / c->kv_heads);
    const uint32_t window = c->window_layer[layer] ? c->window_tokens : 0;
    const uint32_t first = window && t + 1 > window ? t + 1 - window : 0;
    double weights[256], max = -(double)INFINITY, sum = 0;
    assert_true(t < 256);
    for (uint32_t s = first; s <= t; s++) {
        double dot = 0;
        for (uint32_t i = 0; i < dim; i++) {
            dot += q[((size_t)t * c->heads + h) * dim + i] *
                   k[((size_t)s * c->kv_heads + kv_head) * dim + i];
        }
        weights[s] = mr_softcap(dot * (double)c->attn_scale, c->attn_softcap);
        if (weights[s] > max) max = weights[s];
    }
    for (uint32_t s = first; s <= t; s++)
        sum += weights[s] = exp(weights[s] - max);
    for (uint32_t i = 0; i < dim; i++)
        out[i] = 0;
    for (uint32_t s = first; s <= t; s++) {
        const double *row = v + ((size_t)s * c->kv_heads + kv_head) * dim;
        for (uint32_t i = 0; i < dim; i++)
            out[i] += weights[s] / sum * row[i];
    }
}

static inline double *mr_bias(const mr_model *m, uint32_t layer, char which) {
    return m->config.qkv_bias ? mr_get(m, "model.layers.%u.self_attn.%c_proj.bias", layer, which)
                              : NULL;
}

/* attention(x) for normed x [tokens, hidden] */
static inline double *mr_attention(const mr_model *m, uint32_t l, const double *x,
                                   uint32_t tokens) {
    const bd_model_config *c = &m->config;
    const uint32_t q_dim = c->heads * c->head_dim, kv_dim = c->kv_heads * c->head_dim;
    double *q = mr_linear(x, tokens, mr_get(m, "model.layers.%u.self_attn.q_proj.weight", l),
                          mr_bias(m, l, 'q'), q_dim, c->hidden);
    double *k = mr_linear(x, tokens, mr_get(m, "model.layers.%u.self_attn.k_proj.weight", l),
                          mr_bias(m, l, 'k'), kv_dim, c->hidden);
    double *v = mr_linear(x, tokens, mr_get(m, "model.layers.%u.self_attn.v_proj.weight", l),
                          mr_bias(m, l, 'v'), kv_dim, c->hidden);
    if (c->qk_norm) {
        mr_norm(m, q, q, (size_t)tokens * c->heads, c->head_dim,
                mr_get(m, "model.layers.%u.self_attn.q_norm.weight", l));
        mr_norm(m, k, k, (size_t)tokens * c->kv_heads, c->head_dim,
                mr_get(m, "model.layers.%u.self_attn.k_norm.weight", l));
    }
    mr_rope(m, q, tokens, c->heads);
    mr_rope(m, k, tokens, c->kv_heads);
    double *mixed = calloc((size_t)tokens * q_dim, sizeof *mixed);
    assert_non_null(mixed);
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t h = 0; h < c->heads; h++) {
            mr_attend(m, l, q, k, v, t, h, mixed + ((size_t)t * c->heads + h) * c->head_dim);
        }
    }
    double *out = mr_linear(mixed, tokens, mr_get(m, "model.layers.%u.self_attn.o_proj.weight", l),
                            NULL, c->hidden, q_dim);
    free(q);
    free(k);
    free(v);
    free(mixed);
    return out;
}

static inline double mr_activation(const bd_model_config *c, double x) {
    if (c->activation == BD_ACT_SILU) return x / (1 + exp(-x));
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static inline double *mr_ffn(const mr_model *m, uint32_t l, const double *x, uint32_t tokens) {
    const bd_model_config *c = &m->config;
    double *gate = mr_linear(x, tokens, mr_get(m, "model.layers.%u.mlp.gate_proj.weight", l), NULL,
                             c->ffn, c->hidden);
    double *up = mr_linear(x, tokens, mr_get(m, "model.layers.%u.mlp.up_proj.weight", l), NULL,
                           c->ffn, c->hidden);
    for (size_t i = 0; i < (size_t)tokens * c->ffn; i++)
        gate[i] = mr_activation(c, gate[i]) * up[i];
    double *out = mr_linear(gate, tokens, mr_get(m, "model.layers.%u.mlp.down_proj.weight", l),
                            NULL, c->hidden, c->ffn);
    free(gate);
    free(up);
    return out;
}

static inline void mr_add_to(double *x, double *y, size_t count) {
    for (size_t i = 0; i < count; i++)
        x[i] += y[i];
    free(y);
}

/* Logits after the last token, [mr_vocab]; the caller frees. */
static inline double *mr_logits(const mr_model *m, const int32_t *ids, uint32_t tokens) {
    const bd_model_config *c = &m->config;
    const size_t count = (size_t)tokens * c->hidden;
    const bool gemma = c->family == BD_FAMILY_GEMMA2;
    double *x = calloc(count, sizeof *x), *normed = calloc(count, sizeof *normed), *y;
    double *embed = mr_weight(m, "model.embed_tokens.weight");
    assert_true(x && normed);
    for (size_t i = 0; i < count; i++) {
        const size_t row = (size_t)ids[i / c->hidden];
        x[i] = embed[row * c->hidden + i % c->hidden] * (double)c->embed_scale;
    }
    free(embed);
    for (uint32_t l = 0; l < c->layers; l++) {
        mr_norm(m, normed, x, tokens, c->hidden,
                mr_get(m, "model.layers.%u.input_layernorm.weight", l));
        y = mr_attention(m, l, normed, tokens);
        double *post = mr_get(m, "model.layers.%u.post_attention_layernorm.weight", l);
        if (gemma) {
            mr_norm(m, y, y, tokens, c->hidden, post);
            post = mr_get(m, "model.layers.%u.pre_feedforward_layernorm.weight", l);
        }
        mr_add_to(x, y, count);
        mr_norm(m, normed, x, tokens, c->hidden, post);
        y = mr_ffn(m, l, normed, tokens);
        if (gemma) {
            mr_norm(m, y, y, tokens, c->hidden,
                    mr_get(m, "model.layers.%u.post_feedforward_layernorm.weight", l));
        }
        mr_add_to(x, y, count);
    }
    mr_norm(m, normed, x, tokens, c->hidden, mr_weight(m, "model.norm.weight"));
    const bool tied = c->tied && !(m->delta && m->own_head);
    double *head = mr_weight(m, tied ? "model.embed_tokens.weight" : "lm_head.weight");
    double *logits = mr_linear(normed + count - c->hidden, 1, head, NULL, mr_vocab(m), c->hidden);
    for (uint32_t i = 0; i < mr_vocab(m); i++)
        logits[i] = mr_softcap(logits[i], c->logit_softcap);
    free(x);
    free(normed);
    return logits;
}

/* ---- Deltas of random data ---- */

typedef struct mr_fault { /* what to get wrong on purpose; zero: nothing */
    const char *drop;     /* tensor of the file that is left out */
    const char *narrow;   /* entry whose shape is one row short, in the manifest and in the file */
    const char *rename;   /* entry that gets a name the model does not know */
    bool foreign_base;
    bool nan_scale;
    const char *nan_row; /* tensor of whole rows that gets one NaN */
} mr_fault;

typedef struct mr_delta_maker {
    const mr_model *model;
    uint64_t *random;
    const mr_fault *fault;
    uint32_t planes;
    bd_tensor *tensors; /* of the file */
    uint32_t tensor_count;
    bd_delta_entry *entries;
    uint32_t entry_count;
    char (*names)[128];
    uint8_t *data;
    size_t data_bytes;
} mr_delta_maker;

static inline void mr_put_tensor(mr_delta_maker *d, const char *name, bd_dtype dtype, uint32_t rank,
                                 uint64_t rows, uint64_t cols) {
    static const char *const dtypes[] = {"F32", "BF16", "F16", "U8"};
    const uint64_t count = rank == 2 ? rows * cols : rows;
    if (d->fault->drop && strcmp(d->fault->drop, name) == 0) return;
    bd_tensor *t = &d->tensors[d->tensor_count];
    snprintf(d->names[d->tensor_count], sizeof d->names[0], "%s", name);
    *t = (bd_tensor){
        .name = d->names[d->tensor_count++], .dtype = dtype, .rank = rank, .shape = {rows, cols}};
    snprintf(t->dtype_name, sizeof t->dtype_name, "%s", dtypes[dtype]);
    t->bytes = count * bd_dtype_bytes(dtype);
    d->data = realloc(d->data, d->data_bytes + t->bytes);
    assert_non_null(d->data);
    for (uint64_t i = 0; i < count; i++) {
        const float uniform = (float)(support_random(d->random) >> 40) * 0x1p-24f;
        const float value = rank == 1 && strstr(name, ".scale") ? 0.01f * uniform : uniform + 0.1f;
        const bool nan_row = d->fault->nan_row && strstr(name, d->fault->nan_row) && i == count - 3;
        const float stored = d->fault->nan_scale && i == 3 ? NAN : value;
        const uint16_t bf16 = nan_row ? 0x7fc1 : bd_f32_to_bf16(value), f16 = bd_f32_to_f16(value);
        const uint8_t byte = (uint8_t)support_random(d->random);
        const void *sources[] = {&stored, &bf16, &f16, &byte};
        memcpy(d->data + d->data_bytes + i * bd_dtype_bytes(dtype), sources[dtype],
               bd_dtype_bytes(dtype));
    }
    d->data_bytes += t->bytes;
}

static inline void mr_put_entry(mr_delta_maker *d, const mr_tensor *t) {
    bd_delta_entry *e = &d->entries[d->entry_count++];
    const uint32_t rows =
        t->rows - (d->fault->narrow && strcmp(d->fault->narrow, t->name) == 0 ? 1 : 0);
    const char *name = d->fault->rename && strcmp(d->fault->rename, t->name) == 0
                           ? "model.layers.0.odd.weight"
                           : t->name;
    *e = (bd_delta_entry){
        .name = name,
        .kind = t->cols ? BD_DELTA_SIGN : BD_DELTA_FULL,
        .rank = t->cols ? 2 : 1,
        .shape = {rows, t->cols},
    };
    if (!t->cols) {
        mr_put_tensor(d, name, (bd_dtype)(support_random(d->random) % 3), 1, rows, 0);
        return;
    }
    if (mr_is_table(name)) e->extra_rows = d->model->extra_rows;
    if (mr_is_table(name) && d->model->full_tables) {
        e->kind = BD_DELTA_FULL;
        mr_put_tensor(d, name, BD_DTYPE_BF16, 2, rows, t->cols);
    }
    for (uint32_t plane = 0; e->kind == BD_DELTA_SIGN && plane < d->planes; plane++) {
        char plane_name[128];
        bd_delta_plane_name(plane_name, sizeof plane_name, name, true, plane);
        mr_put_tensor(d, plane_name, BD_DTYPE_U8, 2, rows, t->cols / 8);
        bd_delta_plane_name(plane_name, sizeof plane_name, name, false, plane);
        mr_put_tensor(d, plane_name, BD_DTYPE_F32, 1, rows, 0);
    }
    if (e->extra_rows > 0) {
        char extra_name[128];
        snprintf(extra_name, sizeof extra_name, "%s.extra", name);
        mr_put_tensor(d, extra_name, BD_DTYPE_BF16, 2, e->extra_rows, t->cols);
    }
}

static inline void mr_write_file(mr_delta_maker *d, const char *dir, bd_delta_file *file) {
    bd_error err = {0};
    char path[600];
    bd_safetensors_writer *writer;
    bd_mapped_file map;
    snprintf(path, sizeof path, "%s/%s", dir, file->name);
    MS_OK(bd_safetensors_writer_create(path, d->tensors, d->tensor_count, 4096, &writer, &err),
          err);
    MS_OK(bd_safetensors_writer_append(writer, d->data, d->data_bytes, &err), err);
    MS_OK(bd_safetensors_writer_finish(writer, &err), err);
    MS_OK(bd_file_map(path, &map, &err), err);
    file->bytes = map.bytes;
    file->chunk_bytes = BD_DELTA_CHUNK_BYTES;
    file->chunk_count = (uint32_t)((map.bytes + BD_DELTA_CHUNK_BYTES - 1) / BD_DELTA_CHUNK_BYTES);
    uint64_t *sums = calloc(file->chunk_count, sizeof *sums);
    assert_non_null(sums);
    for (uint32_t i = 0; i < file->chunk_count; i++) {
        const size_t from = (size_t)i * BD_DELTA_CHUNK_BYTES, left = map.bytes - from;
        sums[i] =
            XXH3_64bits(map.data + from, left < BD_DELTA_CHUNK_BYTES ? left : BD_DELTA_CHUNK_BYTES);
    }
    memset(file->sha256, '0', 64); /* not checked when a delta is loaded */
    file->chunk_xxh3 = sums;
    bd_file_unmap(&map);
}

/* A directory with a delta of random signs, scales, norms and biases; about one tensor in eight
 * stays the base's, but no table that the model says is changed. dir receives its name. */
static inline void mr_make_delta(const mr_model *m, uint64_t *random, uint32_t planes,
                                 const mr_fault *fault, char dir[256]) {
    bd_error err = {0};
    const uint32_t tensors_max = m->count * (2 * planes + 1);
    mr_delta_maker d = {.model = m, .random = random, .fault = fault, .planes = planes};
    d.tensors = calloc(tensors_max, sizeof *d.tensors);
    d.names = calloc(tensors_max, sizeof *d.names);
    d.entries = calloc(m->count, sizeof *d.entries);
    assert_true(d.tensors && d.names && d.entries);
    const bool any_fault = fault->drop || fault->narrow || fault->rename;
    const bool all_tables = m->extra_rows > 0 || m->own_head || m->full_tables;
    for (uint32_t i = 0; i < m->count; i++) {
        const bool needed = any_fault || (all_tables && mr_is_table(m->tensors[i].name));
        if (needed || support_random(random) % 8 != 0) mr_put_entry(&d, &m->tensors[i]);
    }
    snprintf(dir, 256, "%s/bitdelta-test-XXXXXX", P_tmpdir);
    assert_non_null(mkdtemp(dir));
    bd_delta_file file = {.name = "shard-00-of-01.safetensors"};
    mr_write_file(&d, dir, &file);
    bd_delta delta = {
        .variant = "random", .base = "tiny", .embeddings = "sign", .scale = "row", .bits = planes};
    snprintf(delta.dir, sizeof delta.dir, "%s", dir);
    MS_OK(bd_checkpoint_fingerprint(m->checkpoint, delta.base_fingerprint, &err), err);
    if (fault->foreign_base)
        delta.base_fingerprint[40] = delta.base_fingerprint[40] == '0' ? '1' : '0';
    delta.shard_count = 1;
    delta.entry_count = d.entry_count;
    delta.entries = d.entries;
    delta.files = &file;
    MS_OK(bd_delta_write_manifest(&delta, &err), err);
    free((void *)(uintptr_t)file.chunk_xxh3);
    free(d.tensors);
    free(d.names);
    free(d.entries);
    free(d.data);
}

static inline void mr_remove_delta(const char *dir) {
    char path[600];
    snprintf(path, sizeof path, "%s/delta.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/shard-00-of-01.safetensors", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}

#endif
