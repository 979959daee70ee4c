/* Whole steps of the CPU backend: logits of a mixed batch against a double-precision forward pass
 * of each sequence alone with merged weights; the same sequence alone, chunked and inside a mixed
 * batch; options, plan, loading errors and the registry. */
#include "backend_cpu_support.h"

/* The reference pass of one sequence; caches are [layer][token][dim]. */
typedef struct ref_pass {
    const fixture *f;
    const known_overlay *o;
    uint32_t tokens;
    double *residual, *x, *q, *keys, *values, *attn, *gate, *up, *proj, *bound;
} ref_pass;

static void ref_layer(ref_pass *p, uint32_t layer) {
    const bd_model_config *c = &p->f->config;
    const uint32_t kv = c->kv_heads * c->head_dim, group = c->heads / c->kv_heads;
    for (uint32_t t = 0; t < p->tokens; t++) {
        double *r = p->residual + (size_t)t * c->hidden, *k = p->keys + (size_t)t * kv,
               *v = p->values + (size_t)t * kv;
        memcpy(p->x, r, c->hidden * sizeof *r);
        ref_norm(p->f, ref_gamma(p->f, p->o, layer, BD_NORM_INPUT), p->x, c->hidden);
        ref_linear(p->f, p->o, layer, BD_LINEAR_Q, p->x, p->q, p->bound);
        ref_linear(p->f, p->o, layer, BD_LINEAR_K, p->x, k, p->bound);
        ref_linear(p->f, p->o, layer, BD_LINEAR_V, p->x, v, p->bound);
        for (uint32_t h = 0; h < c->kv_heads; h++) {
            if (c->qk_norm)
                ref_norm(p->f, ref_gamma(p->f, p->o, layer, BD_NORM_K), k + (size_t)h * c->head_dim,
                         c->head_dim);
            ref_rope(p->f, p->o, t, k + (size_t)h * c->head_dim);
        }
        for (uint32_t h = 0; h < c->heads; h++) {
            double *q = p->q + (size_t)h * c->head_dim;
            if (c->qk_norm) ref_norm(p->f, ref_gamma(p->f, p->o, layer, BD_NORM_Q), q, c->head_dim);
            ref_rope(p->f, p->o, t, q);
            const size_t at = (size_t)(h / group) * c->head_dim;
            ref_attend(p->f, layer, p->o, t, q, p->keys + at, p->values + at, kv,
                       p->attn + (size_t)h * c->head_dim);
        }
        ref_linear(p->f, p->o, layer, BD_LINEAR_O, p->attn, p->proj, p->bound);
        if (c->post_norms)
            ref_norm(p->f, ref_gamma(p->f, p->o, layer, BD_NORM_POST_ATTENTION), p->proj,
                     c->hidden);
        for (uint32_t i = 0; i < c->hidden; i++)
            p->x[i] = r[i] += p->proj[i];
        ref_norm(p->f, ref_gamma(p->f, p->o, layer, BD_NORM_PRE_FFN), p->x, c->hidden);
        ref_linear(p->f, p->o, layer, BD_LINEAR_GATE, p->x, p->gate, p->bound);
        ref_linear(p->f, p->o, layer, BD_LINEAR_UP, p->x, p->up, p->bound);
        for (uint32_t i = 0; i < c->ffn; i++)
            p->gate[i] = ref_activation(c, p->gate[i]) * p->up[i];
        ref_linear(p->f, p->o, layer, BD_LINEAR_DOWN, p->gate, p->proj, p->bound);
        if (c->post_norms)
            ref_norm(p->f, ref_gamma(p->f, p->o, layer, BD_NORM_POST_FFN), p->proj, c->hidden);
        for (uint32_t i = 0; i < c->hidden; i++)
            r[i] += p->proj[i];
    }
}

static void ref_logits(ref_pass *p, uint32_t token, double *out) {
    const bd_model_config *c = &p->f->config;
    memcpy(p->x, p->residual + (size_t)token * c->hidden, c->hidden * sizeof *p->x);
    ref_norm(p->f, ref_gamma(p->f, p->o, c->layers, BD_NORM_INPUT), p->x, c->hidden);
    const known_matrix *w = c->tied ? &p->f->embed : &p->f->head;
    for (uint32_t n = 0; n < c->vocab; n++) {
        double sum = 0.0;
        const uint32_t rows = p->o != NULL ? p->o->overlay.block_rows : c->vocab;
        const known_delta *d = p->o != NULL ? &p->o->head[n / rows] : NULL;
        for (uint32_t i = 0; i < c->hidden; i++) {
            const double delta = d != NULL ? d->value[(size_t)(n % rows) * c->hidden + i] : 0.0;
            sum += p->x[i] * (w->value[(size_t)n * c->hidden + i] + delta);
        }
        if (d != NULL && d->bias != NULL) sum += d->bias[n % rows];
        out[n] = cap(sum, c->logit_softcap);
        if (p->o != NULL && n >= p->o->overlay.vocab) out[n] = -(double)INFINITY;
    }
}

/* Logits after every token: [tokens][vocab], the caller frees. */
static double *ref_sequence(const fixture *f, int32_t overlay, const int32_t *ids,
                            uint32_t tokens) {
    const bd_model_config *c = &f->config;
    const uint32_t q_dim = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const uint32_t widest = c->ffn + c->hidden + q_dim;
    ref_pass p = {f,
                  overlay < 0 ? NULL : &f->overlays[overlay],
                  tokens,
                  must_calloc((size_t)tokens * c->hidden, 8),
                  must_calloc(c->hidden, 8),
                  must_calloc(q_dim, 8),
                  must_calloc((size_t)tokens * kv, 8),
                  must_calloc((size_t)tokens * kv, 8),
                  must_calloc(q_dim, 8),
                  must_calloc(c->ffn, 8),
                  must_calloc(c->ffn, 8),
                  must_calloc(c->hidden, 8),
                  must_calloc(widest, 8)};
    for (uint32_t t = 0; t < tokens; t++)
        ref_embed(f, p.o, (uint32_t)ids[t], p.residual + (size_t)t * c->hidden);
    for (uint32_t layer = 0; layer < c->layers; layer++)
        ref_layer(&p, layer);
    double *out = must_calloc((size_t)tokens * c->vocab, 8);
    for (uint32_t t = 0; t < tokens; t++)
        ref_logits(&p, t, out + (size_t)t * c->vocab);
    free(p.residual), free(p.x), free(p.q), free(p.keys), free(p.values), free(p.attn),
        free(p.gate), free(p.up);
    free(p.proj), free(p.bound);
    return out;
}

static void forward(fixture *f, const bd_step *step) {
    bd_error err;
    const bd_backend_ops *ops = f->backend->ops;
    bd_backend *b = f->backend;
    const bool post = f->config.post_norms;
    bd_norm after_ffn = BD_NORM_COUNT;
    assert_int_equal(ops->step_begin(b, step, &err), BD_OK);
    assert_int_equal(ops->embed(b, step, &err), BD_OK);
    for (uint32_t l = 0; l < f->config.layers; l++) {
        assert_int_equal(ops->norm_residual(b, step, l, BD_NORM_INPUT, l > 0, l > 0 ? l - 1 : 0,
                                            after_ffn, &err),
                         BD_OK);
        assert_int_equal(ops->linear(b, step, l, BD_GROUP_QKV, &err), BD_OK);
        assert_int_equal(ops->rope_kv_write(b, step, l, &err), BD_OK);
        assert_int_equal(ops->attention(b, step, l, &err), BD_OK);
        assert_int_equal(ops->linear(b, step, l, BD_GROUP_O, &err), BD_OK);
        assert_int_equal(ops->norm_residual(b, step, l, BD_NORM_PRE_FFN, true, l,
                                            post ? BD_NORM_POST_ATTENTION : BD_NORM_COUNT, &err),
                         BD_OK);
        assert_int_equal(ops->linear(b, step, l, BD_GROUP_GATE_UP, &err), BD_OK);
        assert_int_equal(ops->linear(b, step, l, BD_GROUP_DOWN, &err), BD_OK);
        after_ffn = post ? BD_NORM_POST_FFN : BD_NORM_COUNT;
    }
    assert_int_equal(ops->norm_residual(b, step, f->config.layers, BD_NORM_INPUT, true,
                                        f->config.layers - 1, after_ffn, &err),
                     BD_OK);
    assert_int_equal(ops->head(b, step, &err), BD_OK);
    assert_int_equal(ops->sample(b, step, &err), BD_OK);
    bd_token_result *results = must_calloc(step->logits_row_count, sizeof *results);
    assert_int_equal(ops->step_wait(b, step, 0, results, &err), BD_OK);
    for (uint32_t i = 0; i < step->logits_row_count; i++)
        assert_int_equal(results[i].fault, 0);
    free(results);
}

static void open_model(fixture *f, uint32_t kernels, uint32_t threads) {
    random_config(f, 60);
    f->config.logit_softcap = 0.0f; /* it would hide differences */
    f->options.thread_count = threads;
    fixture_open(f, kernels);
    for (uint32_t i = 0; i < OVERLAYS; i++)
        make_overlay(f, &f->overlays[i], i);
}

/* Blocks of sequence `index`: its own range of the cache. */
static void give_blocks(const fixture *f, built_step *b, uint32_t index, uint32_t sequence) {
    const uint32_t per_seq = STEP_ROWS / f->options.kv_block_tokens + 1;
    for (uint32_t i = 0; i < per_seq; i++)
        b->blocks[index][i] = sequence * per_seq + (per_seq - 1 - i);
}

static void want_all_rows(built_step *b) {
    b->step.logits_row_count = b->step.row_count;
    for (uint32_t r = 0; r < b->step.row_count; r++) {
        b->logits_rows[r] = (bd_logits_row){
            .row = r, .seq = b->seq_of_row[r], .target = b->tokens[r], .top_count = 1};
    }
}

/* Feeds ids[from, to) of a sequence and copies its logits to out[from..]. Others ride along. */
static void feed(fixture *f, int32_t overlay, const int32_t *ids, uint32_t from, uint32_t to,
                 bool company, float *out) {
    bd_error err;
    built_step *b = step_create(f);
    if (company) {
        give_blocks(
            f, b, step_add(f, b, (int32_t)pick(&f->rng, 0, OVERLAYS) - 1, 0, pick(&f->rng, 1, 12)),
            1);
        give_blocks(f, b, step_add(f, b, (int32_t)pick(&f->rng, 0, OVERLAYS) - 1, 0, 1), 2);
    }
    const uint32_t first = b->step.row_count, index = step_add(f, b, overlay, from, to - from);
    give_blocks(f, b, index, 0);
    memcpy(b->tokens + first, ids + from, (to - from) * sizeof *ids);
    if (company)
        give_blocks(f, b,
                    step_add(f, b, (int32_t)pick(&f->rng, 0, OVERLAYS) - 1, 0, pick(&f->rng, 1, 9)),
                    3);
    want_all_rows(b);
    forward(f, &b->step);
    for (uint32_t t = from; t < to; t++) {
        assert_int_equal(f->backend->ops->logits_get(f->backend, first + t - from,
                                                     out + (size_t)t * f->config.vocab, &err),
                         BD_OK);
    }
    free(b);
}

static void check_sequence(fixture *f, const float *got, const double *want, uint32_t tokens,
                           double tolerance, const char *what) {
    for (uint32_t t = 0; t < tokens; t++) {
        const double off = l2_distance(got + (size_t)t * f->config.vocab,
                                       want + (size_t)t * f->config.vocab, f->config.vocab);
        if (!(off <= tolerance)) fail_msg("%s, token %u: relative distance %.3g", what, t, off);
    }
}

static void test_logits(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < 16; i++) {
        fixture f = {.rng = support_random(&seed)};
        open_model(&f, i % 4 == 0, 1 + i % 3);
        const int32_t overlay = (int32_t)(i % (OVERLAYS + 1)) - 1;
        const uint32_t tokens = pick(&f.rng, 2, 40), vocab = f.config.vocab;
        int32_t ids[40];
        for (uint32_t t = 0; t < tokens; t++)
            ids[t] = (int32_t)pick(&f.rng, 0, vocab - 1);
        double *want = ref_sequence(&f, overlay, ids, tokens),
               *alone_wide = must_calloc((size_t)tokens * vocab, 8);
        float *alone = must_calloc((size_t)tokens * vocab, 4),
              *other = must_calloc((size_t)tokens * vocab, 4);
        feed(&f, overlay, ids, 0, tokens, false, alone);
        check_sequence(&f, alone, want, tokens, 1e-5, "alone, against float64");
        to_double(alone_wide, alone, (size_t)tokens * vocab);
        feed(&f, overlay, ids, 0, tokens, true, other);
        check_sequence(&f, other, alone_wide, tokens, 1e-5, "in a mixed batch");
        for (uint32_t t = 0, n; t < tokens; t += n) {
            n = pick(&f.rng, 1, 1 + (tokens - t) / 2);
            feed(&f, overlay, ids, t, t + n, pick(&f.rng, 0, 1), other);
        }
        check_sequence(&f, other, alone_wide, tokens, 1e-5, "chunked");
        free(want), free(alone_wide), free(alone), free(other);
        fixture_close(&f);
    }
}

static bd_status try_open(const bd_backend_options *o, bd_error *err) {
    bd_backend *backend = NULL;
    const bd_status status = bd_backend_cpu_ops()->open(o, &backend, err);
    if (status == BD_OK) bd_backend_cpu_ops()->close(backend);
    if (status != BD_OK) assert_null(backend);
    return status;
}

static void test_bad_options(void **state) {
    (void)state;
    fixture f = {.rng = support_seed()};
    bd_error err;
    random_config(&f, 60);
    const bd_backend_options good = {.config = &f.config,
                                     .rank_count = 1,
                                     .thread_count = 1,
                                     .rows_max = 8,
                                     .seqs_max = 4,
                                     .logits_rows_max = 4,
                                     .kv_block_tokens = 16,
                                     .kv_block_count = 8,
                                     .max_model_len = 64,
                                     .rope_tables_max = 1};
    assert_int_equal(try_open(&good, &err), BD_OK);
    const struct {
        const char *field;
        size_t offset;
        uint32_t value;
    } faults[] = {
        {"tensor_parallel", offsetof(bd_backend_options, rank_count), 2},
        {"rows_max", offsetof(bd_backend_options, rows_max), 0},
        {"seqs_max", offsetof(bd_backend_options, seqs_max), 0},
        {"logits_rows_max", offsetof(bd_backend_options, logits_rows_max), 0},
        {"kv_block_tokens", offsetof(bd_backend_options, kv_block_tokens), 24},
        {"kv_block_count", offsetof(bd_backend_options, kv_block_count), 0},
        {"max_model_len", offsetof(bd_backend_options, max_model_len), 0},
        {"rope_tables_max", offsetof(bd_backend_options, rope_tables_max), 0},
        {"delta_bytes", offsetof(bd_backend_options, delta_bytes), 100},
    };
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        bd_backend_options bad = good;
        memcpy((uint8_t *)&bad + faults[i].offset, &faults[i].value, sizeof faults[i].value);
        assert_int_equal(try_open(&bad, &err), BD_E_UNSUPPORTED);
        assert_string_equal(err.subject, faults[i].field);
    }
    bd_model_config config = f.config;
    bd_backend_options bad = good;
    bad.cpu_kernels = "plain";
    assert_int_equal(try_open(&bad, &err), BD_OK);
    bad.cpu_kernels = "mmx";
    assert_int_equal(try_open(&bad, &err), BD_E_UNSUPPORTED);
    assert_string_equal(err.subject, "cpu_kernels");
    bad.cpu_kernels = NULL;
    bad.config = &config;
    config.hidden = 0;
    assert_int_equal(try_open(&bad, &err), BD_E_UNSUPPORTED);
    assert_string_equal(err.subject, "hidden");
    config = f.config;
    config.head_dim = 258;
    assert_int_equal(try_open(&bad, &err), BD_E_UNSUPPORTED);
    assert_string_equal(err.subject, "head_dim");
    config = f.config;
    config.rope.rotary_dim = config.head_dim + 2;
    assert_int_equal(try_open(&bad, &err), BD_E_UNSUPPORTED);
    assert_string_equal(err.subject, "rotary_dim");
    bad = good;
    bad.kv_block_count = UINT32_MAX;
    bad.kv_block_tokens = 1u << 16;
    config = f.config;
    config.layers = 256;
    config.head_dim = 256;
    config.kv_heads = config.heads = 4096;
    bad.config = &config;
    assert_int_equal(try_open(&bad, &err), BD_E_LIMIT);
    bd_memory_plan plan;
    assert_int_equal(bd_backend_cpu_ops()->plan(&bad, &plan, &err), BD_E_LIMIT);
}

static void test_plan(void **state) {
    (void)state;
    fixture f = {.rng = support_seed()};
    bd_error err;
    bd_memory_plan plan;
    random_config(&f, 60);
    fixture_open(&f, 0);
    const bd_model_config *c = &f.config;
    assert_int_equal(f.backend->ops->plan(&f.options, &plan, &err), BD_OK);
    uint64_t params = (uint64_t)c->vocab * c->hidden * (c->tied ? 1 : 2);
    for (uint32_t i = 0; i < c->layers * BD_LINEAR_COUNT; i++)
        params += (uint64_t)f.linears[i].n * f.linears[i].k;
    assert_true(plan.weights >= 2 * params);
    assert_true(plan.logits == 4ull * c->vocab * f.options.logits_rows_max);
    assert_true(plan.deltas == f.options.delta_bytes);
    assert_true(plan.kv == 2ull * 4 * c->layers * c->kv_heads * ((c->head_dim + 7) / 8 * 8) *
                               f.options.kv_block_count * f.options.kv_block_tokens);
    assert_true(plan.total == plan.weights + plan.workspace + plan.kv + plan.logits + plan.deltas);
    assert_true(plan.available > 0);
    fixture_close(&f);
}

static void test_loading_errors(void **state) {
    (void)state;
    fixture f = {.rng = support_seed()};
    bd_error err;
    random_config(&f, 60);
    f.config.tied = true;
    fixture_open(&f, 0);
    const bd_backend_ops *ops = f.backend->ops;
    const uint32_t q = f.cpu->q_dim;
    bd_weight_view view = {.dtype = BD_DTYPE_BF16,
                           .rows = q,
                           .cols = f.config.hidden,
                           .row_stride_bytes = 2ull * f.config.hidden,
                           .data = f.arena};
    const bd_weight_id id = {BD_WEIGHT_LINEAR, 0, BD_LINEAR_Q};
    assert_int_equal(ops->weight_put(f.backend, id, &view, &err), BD_E_ARGUMENT); /* twice */
    assert_int_equal(ops->weight_put(f.backend, (bd_weight_id){BD_WEIGHT_HEAD, 0, 0}, &view, &err),
                     BD_E_ARGUMENT);
    memset(&f.cpu->linears[BD_LINEAR_Q].data, 0, sizeof(void *));
    view.rows++;
    assert_int_equal(ops->weight_put(f.backend, id, &view, &err), BD_E_MISMATCH);
    assert_string_equal(err.subject, "layer 0 q");
    view.dtype = BD_DTYPE_U8;
    assert_int_equal(ops->weight_put(f.backend, id, &view, &err), BD_E_UNSUPPORTED);
    assert_int_equal(ops->rope_table_put(f.backend, 4, f.inv_freq[0], 1.0f, &err), BD_E_LIMIT);
    assert_int_equal(ops->rope_table_put(f.backend, 0, f.inv_freq[0], NAN, &err), BD_E_ARGUMENT);
    ops->close(NULL);
    fixture_close(&f);
}

/* A plane put row by row from an odd address and stride reads back as what a whole put gives. */
static void test_plane_layout(void **state) {
    (void)state;
    uint64_t rng = support_seed();
    bd_error err;
    for (uint32_t round = 0; round < 50; round++) {
        const uint32_t n = pick(&rng, 1, 40), k = 8 * pick(&rng, 1, 30),
                       src_stride = k / 8 + pick(&rng, 0, 3);
        const uint64_t bytes = bd_cpu_plane_bytes(n, k);
        assert_true(bytes % 64 == 0 && bytes >= (uint64_t)n * k / 8);
        uint8_t *src = must_calloc((size_t)n * src_stride + 1, 1), *whole = must_calloc(bytes, 1),
                *rows = must_calloc(bytes, 1);
        for (uint32_t i = 0; i <= n * src_stride; i++)
            src[i] = (uint8_t)support_random(&rng);
        assert_int_equal(bd_cpu_plane_put(NULL, whole, n, k, 0, n, src + 1, src_stride, &err),
                         BD_OK);
        for (uint32_t r = 0; r < n; r++) {
            assert_int_equal(bd_cpu_plane_put(NULL, rows, n, k, r, 1,
                                              src + 1 + (size_t)r * src_stride, src_stride, &err),
                             BD_OK);
        }
        assert_memory_equal(whole, rows, bytes);
        float *zero = must_calloc(k, 4), *signs = must_calloc(k, 4);
        const uint32_t row = pick(&rng, 0, n - 1);
        bd_cpu_kernels_plain()->add_signs(signs, zero, bd_cpu_plane_at(whole, k, row, 0), k, 2.0f);
        for (uint32_t j = 0; j < k; j++) {
            const bool plus = src[1 + (size_t)row * src_stride + j / 8] >> j % 8 & 1;
            assert_true(signs[j] == (plus ? 2.0f : -2.0f));
        }
        free(src), free(whole), free(rows), free(zero), free(signs);
    }
}

static void test_registry(void **state) {
    (void)state;
    const bd_backend_ops *ops = NULL;
    bd_error err;
    char why[64] = "x";
    assert_int_equal(bd_backend_select(BD_BACKEND_CPU, &ops, why, sizeof why, &err), BD_OK);
    assert_ptr_equal(ops, bd_backend_cpu_ops());
    assert_string_equal(why, "");
    assert_int_equal(bd_backend_select(BD_BACKEND_AUTO, &ops, why, sizeof why, &err), BD_OK);
    assert_non_null(ops);
    if (strcmp(ops->name, "cpu") == 0) assert_true(strlen(why) > 0);
    assert_int_equal(bd_backend_select(BD_BACKEND_AUTO, &ops, NULL, 0, NULL), BD_OK);
    const bd_status cuda = bd_backend_select(BD_BACKEND_CUDA, &ops, why, sizeof why, &err);
    if (cuda == BD_OK) {
        assert_string_equal(ops->name, "cuda");
    } else {
        assert_int_equal(cuda, BD_E_DEVICE);
        assert_null(ops);
    }
}

static void test_unsampled_step(void **state) {
    (void)state;
    fixture f = {.rng = support_seed()};
    bd_error err;
    bd_token_result result;
    open_model(&f, false, 1);
    built_step *b = step_create(&f);
    step_add(&f, b, -1, 0, 1);
    want_all_rows(b);
    assert_int_equal(f.backend->ops->step_begin(f.backend, &b->step, &err), BD_OK);
    assert_int_equal(f.backend->ops->step_wait(f.backend, &b->step, 0, &result, &err),
                     BD_E_INTERNAL);
    free(b);
    fixture_close(&f);
}

/* A plane put in rectangles, in any order, is the plane put at once, whatever the page held before.
 */
static void test_plane_parts(void **state) {
    (void)state;
    uint64_t rng = support_seed();
    bd_error err;
    for (int round = 0; round < 60; round++) {
        const uint32_t n = pick(&rng, 1, 40), k = 8 * pick(&rng, 1, 60), parts = pick(&rng, 1, 5);
        const uint64_t bytes = bd_cpu_plane_bytes(n, k), stride = k / 8 + pick(&rng, 0, 3);
        uint8_t *src = must_calloc(n * stride + 1, 1), *whole = must_calloc(bytes, 1);
        uint8_t *pieces = must_calloc(bytes, 1);
        for (uint64_t i = 0; i < n * stride; i++)
            src[i + 1] = (uint8_t)support_random(&rng);
        memset(whole, 0x5a, bytes);
        memset(pieces, 0x5a, bytes);
        assert_int_equal(bd_cpu_plane_put(NULL, whole, n, k, 0, n, src + 1, stride, &err), BD_OK);
        for (uint32_t p = parts; p-- > 0;) {
            const uint32_t from = 8 * (k / 8 * p / parts), to = 8 * (k / 8 * (p + 1) / parts);
            const uint32_t cut = pick(&rng, 0, n);
            bd_plane_part part = {.first_row = cut,
                                  .row_count = n - cut,
                                  .first_col = from,
                                  .col_count = to - from,
                                  .src = src + 1 + cut * stride + from / 8,
                                  .src_stride_bytes = stride};
            assert_int_equal(bd_cpu_plane_part_put(NULL, pieces, n, k, &part, &err), BD_OK);
            part.first_row = 0;
            part.row_count = cut;
            part.src = src + 1 + from / 8;
            assert_int_equal(bd_cpu_plane_part_put(NULL, pieces, n, k, &part, &err), BD_OK);
        }
        assert_memory_equal(whole, pieces, bytes);
        free(src);
        free(whole);
        free(pieces);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits),       cmocka_unit_test(test_bad_options),
        cmocka_unit_test(test_plan),         cmocka_unit_test(test_loading_errors),
        cmocka_unit_test(test_plane_layout), cmocka_unit_test(test_registry),
        cmocka_unit_test(test_plane_parts),  cmocka_unit_test(test_unsampled_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
