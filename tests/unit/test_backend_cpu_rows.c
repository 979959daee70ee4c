/* Embedding, norms, rotary embedding with the KV write, and attention of the CPU backend, each
 * against double precision on the same float32 inputs; sequences in several steps, mixed with
 * others, in shuffled KV blocks. */
#include "backend_cpu_support.h"

#define ROW_TOLERANCE       1e-6
#define ATTENTION_TOLERANCE 3e-6

static void fill(fixture *f, bd_cpu_buffer which, uint32_t rows, uint32_t dim, double size) {
    for (size_t i = 0; i < (size_t)rows * dim; i++)
        bd_cpu_f32(f->cpu, which)[i] = (float)(size * normal(&f->rng));
}

static void begin(fixture *f, built_step *b) {
    bd_error err;
    assert_int_equal(f->backend->ops->step_begin(f->backend, &b->step, &err), BD_OK);
}

static void check_embed(fixture *f, built_step *b) {
    bd_error err;
    const uint32_t hidden = f->config.hidden;
    double *want = must_calloc(hidden, 8), *bound = must_calloc(hidden, 8);
    assert_int_equal(f->backend->ops->embed(f->backend, &b->step, &err), BD_OK);
    for (uint32_t i = 0; i < hidden; i++)
        bound[i] = 6.0 * (double)f->config.embed_scale;
    for (uint32_t r = 0; r < b->step.row_count; r++) {
        ref_embed(f, overlay_of(f, &b->step, r), (uint32_t)b->tokens[r], want);
        check_close("embed", bd_cpu_row(f->cpu, BD_CPU_RESIDUAL, r, hidden), want, bound, hidden,
                    ROW_TOLERANCE);
    }
    free(want), free(bound);
}

static void check_norm(fixture *f, built_step *b) {
    bd_error err;
    const uint32_t hidden = f->config.hidden, rows = b->step.row_count;
    const bool add = pick(&f->rng, 0, 1);
    const uint32_t layer = pick(&f->rng, 0, f->config.layers);
    const bd_norm kind = layer == f->config.layers ? BD_NORM_INPUT
                         : pick(&f->rng, 0, 1)     ? BD_NORM_INPUT
                                                   : BD_NORM_PRE_FFN;
    const uint32_t post_layer = pick(&f->rng, 0, f->config.layers - 1);
    const bd_norm post = pick(&f->rng, 0, 1) ? BD_NORM_COUNT : BD_NORM_POST_FFN;
    fill(f, BD_CPU_RESIDUAL, rows, hidden, 2.0);
    fill(f, BD_CPU_PROJ, rows, hidden, 0.5);
    double *residual = must_calloc((size_t)rows * hidden, 8),
           *proj = must_calloc((size_t)rows * hidden, 8);
    double *bound = must_calloc(hidden, 8);
    to_double(residual, bd_cpu_f32(f->cpu, BD_CPU_RESIDUAL), (size_t)rows * hidden);
    to_double(proj, bd_cpu_f32(f->cpu, BD_CPU_PROJ), (size_t)rows * hidden);
    for (uint32_t i = 0; i < hidden; i++)
        bound[i] = 20.0;
    assert_int_equal(f->backend->ops->norm_residual(f->backend, &b->step, layer, kind, add,
                                                    post_layer, post, &err),
                     BD_OK);
    for (uint32_t r = 0; r < rows; r++) {
        const known_overlay *o = overlay_of(f, &b->step, r);
        double *x = residual + (size_t)r * hidden, *p = proj + (size_t)r * hidden;
        if (add && post != BD_NORM_COUNT) ref_norm(f, ref_gamma(f, o, post_layer, post), p, hidden);
        for (uint32_t i = 0; i < hidden && add; i++)
            x[i] += p[i];
        check_close("residual", bd_cpu_row(f->cpu, BD_CPU_RESIDUAL, r, hidden), x, bound, hidden,
                    ROW_TOLERANCE);
        ref_norm(f, ref_gamma(f, o, layer, kind), x, hidden);
        check_close("normed", bd_cpu_row(f->cpu, BD_CPU_NORMED, r, hidden), x, bound, hidden,
                    ROW_TOLERANCE);
    }
    free(residual), free(proj), free(bound);
}

static void open_model(fixture *f, uint32_t kernels, uint32_t threads) {
    random_config(f, 100);
    f->options.thread_count = threads;
    fixture_open(f, kernels);
    for (uint32_t i = 0; i < OVERLAYS; i++)
        make_overlay(f, &f->overlays[i], i);
}

static void test_embed_and_norm(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < 12; i++) {
        fixture f = {.rng = support_random(&seed)};
        open_model(&f, i % 2 == 0, 1 + i % 3);
        for (uint32_t round = 0; round < 4; round++) {
            built_step *b = step_create(&f);
            step_random(&f, b, 60);
            begin(&f, b);
            check_embed(&f, b);
            check_norm(&f, b);
            free(b);
        }
        fixture_close(&f);
    }
}

/* ---- rope and attention: the reference keeps whole sequences ---- */

#define SEQS       4u
#define TOKENS_MAX 220u

typedef struct history { /* one sequence: keys and values as the cache must hold them */
    int32_t overlay;
    uint32_t tokens, blocks[512];
    double *keys, *values; /* [TOKENS_MAX][kv_dim] */
} history;

static void histories_create(fixture *f, history h[SEQS]) {
    uint32_t *shuffled = must_calloc(f->options.kv_block_count, sizeof *shuffled), used = 0;
    for (uint32_t i = 0; i < f->options.kv_block_count; i++) {
        const uint32_t j = pick(&f->rng, 0, i);
        shuffled[i] = shuffled[j];
        shuffled[j] = i;
    }
    for (uint32_t s = 0; s < SEQS; s++) {
        h[s] = (history){.overlay = (int32_t)pick(&f->rng, 0, OVERLAYS) - 1};
        h[s].keys = must_calloc((size_t)TOKENS_MAX * f->cpu->kv_dim, 8);
        h[s].values = must_calloc((size_t)TOKENS_MAX * f->cpu->kv_dim, 8);
        for (uint32_t b = 0; b * f->options.kv_block_tokens < TOKENS_MAX; b++)
            h[s].blocks[b] = shuffled[used++];
    }
    free(shuffled);
}

/* Rows of random length for some of the sequences. One that is full begins anew in its blocks, as
 * the next owner of freed blocks would. */
static void plan_step(fixture *f, built_step *b, history h[SEQS], uint32_t seq_of[SEQS]) {
    for (uint32_t s = 0; s < SEQS; s++) {
        if (s > 0 && pick(&f->rng, 0, 3) == 0) continue;
        const uint32_t rows = pick(&f->rng, 0, 1) ? 1 : pick(&f->rng, 1, STEP_ROWS / SEQS);
        if (rows > TOKENS_MAX - h[s].tokens) h[s].tokens = 0;
        const uint32_t index = step_add(f, b, h[s].overlay, h[s].tokens, rows);
        seq_of[index] = s;
        memcpy(b->blocks[index], h[s].blocks, sizeof h[s].blocks);
    }
}

static void ref_rope_rows(fixture *f, built_step *b, uint32_t layer, history h[SEQS],
                          const uint32_t seq_of[SEQS], double *q) {
    const uint32_t head_dim = f->config.head_dim, q_dim = f->cpu->q_dim, kv_dim = f->cpu->kv_dim;
    for (uint32_t r = 0; r < b->step.row_count; r++) {
        const known_overlay *o = overlay_of(f, &b->step, r);
        history *seq = &h[seq_of[b->seq_of_row[r]]];
        const bd_seq *s = &b->seqs[b->seq_of_row[r]];
        const size_t at = (size_t)(s->kv_before_tokens + r - s->first_row) * kv_dim;
        to_double(seq->values + at, bd_cpu_row(f->cpu, BD_CPU_V, r, kv_dim), kv_dim);
        for (uint32_t head = 0; head < f->config.kv_heads; head++) {
            double *k = seq->keys + at + (size_t)head * head_dim;
            to_double(k, bd_cpu_row(f->cpu, BD_CPU_K, r, kv_dim) + (size_t)head * head_dim,
                      head_dim);
            if (f->config.qk_norm) ref_norm(f, ref_gamma(f, o, layer, BD_NORM_K), k, head_dim);
            ref_rope(f, o, b->positions[r], k);
        }
        for (uint32_t head = 0; head < f->config.heads; head++) {
            double *x = q + (size_t)r * q_dim + (size_t)head * head_dim;
            to_double(x, bd_cpu_row(f->cpu, BD_CPU_Q, r, q_dim) + (size_t)head * head_dim,
                      head_dim);
            if (f->config.qk_norm) ref_norm(f, ref_gamma(f, o, layer, BD_NORM_Q), x, head_dim);
            ref_rope(f, o, b->positions[r], x);
        }
    }
}

static void check_attention(fixture *f, built_step *b, uint32_t layer, history h[SEQS],
                            const uint32_t seq_of[SEQS], const double *q) {
    const uint32_t head_dim = f->config.head_dim, q_dim = f->cpu->q_dim,
                   group = f->config.heads / f->config.kv_heads;
    double *want = must_calloc(q_dim, 8), *bound = must_calloc(q_dim, 8);
    for (uint32_t i = 0; i < q_dim; i++)
        bound[i] = 4.0; /* values are of that size */
    for (uint32_t r = 0; r < b->step.row_count; r++) {
        const bd_seq *s = &b->seqs[b->seq_of_row[r]];
        const history *seq = &h[seq_of[b->seq_of_row[r]]];
        for (uint32_t head = 0; head < f->config.heads; head++) {
            const size_t kv = (size_t)(head / group) * head_dim, at = (size_t)head * head_dim;
            ref_attend(f, layer, overlay_of(f, &b->step, r), s->kv_before_tokens + r - s->first_row,
                       q + (size_t)r * q_dim + at, seq->keys + kv, seq->values + kv, f->cpu->kv_dim,
                       want + at);
        }
        check_close("attention", bd_cpu_row(f->cpu, BD_CPU_ATTN, r, q_dim), want, bound, q_dim,
                    ATTENTION_TOLERANCE);
    }
    free(want), free(bound);
}

static void run_attention_step(fixture *f, history h[SEQS], uint32_t layer) {
    bd_error err;
    uint32_t seq_of[SEQS] = {0};
    built_step *b = step_create(f);
    plan_step(f, b, h, seq_of);
    begin(f, b);
    const uint32_t rows = b->step.row_count, q_dim = f->cpu->q_dim;
    fill(f, BD_CPU_Q, rows, q_dim, 1.5);
    fill(f, BD_CPU_K, rows, f->cpu->kv_dim, 1.0);
    fill(f, BD_CPU_V, rows, f->cpu->kv_dim, 1.0);
    double *q = must_calloc((size_t)rows * q_dim, 8), *bound = must_calloc(q_dim, 8);
    for (uint32_t i = 0; i < q_dim; i++)
        bound[i] = 20.0;
    ref_rope_rows(f, b, layer, h, seq_of, q);
    assert_int_equal(f->backend->ops->rope_kv_write(f->backend, &b->step, layer, &err), BD_OK);
    for (uint32_t r = 0; r < rows; r++) {
        check_close("rotated q", bd_cpu_row(f->cpu, BD_CPU_Q, r, q_dim), q + (size_t)r * q_dim,
                    bound, q_dim, ROW_TOLERANCE);
    }
    assert_int_equal(f->backend->ops->attention(f->backend, &b->step, layer, &err), BD_OK);
    check_attention(f, b, layer, h, seq_of, q);
    for (uint32_t i = 0; i < b->step.seq_count; i++)
        h[seq_of[i]].tokens += b->seqs[i].row_count;
    free(q), free(bound), free(b);
}

static void test_rope_and_attention(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    for (uint32_t i = 0; i < 16; i++) {
        fixture f = {.rng = support_random(&seed)};
        history h[SEQS];
        open_model(&f, i % 2 == 0, 1 + i % 3);
        histories_create(&f, h);
        const uint32_t layer = pick(&f.rng, 0, f.config.layers - 1);
        for (uint32_t step = 0; step < 12; step++)
            run_attention_step(&f, h, layer);
        for (uint32_t s = 0; s < SEQS; s++)
            free(h[s].keys), free(h[s].values);
        fixture_close(&f);
    }
}

/* More query heads on one key-value head than a task takes, and the widest head. */
static void test_wide_groups(void **state) {
    (void)state;
    uint64_t seed = support_seed();
    static const uint32_t shapes[][2] = {{35, 24}, {16, 8}, {17, 256}, {3, 80}};
    for (uint32_t i = 0; i < 4; i++) {
        fixture f = {.rng = support_random(&seed)};
        history h[SEQS];
        random_config(&f, 50);
        f.config.kv_heads = 1;
        f.config.heads = shapes[i][0];
        f.config.head_dim = shapes[i][1];
        f.config.rope.rotary_dim = shapes[i][1] / 2;
        f.config.hidden = 16;
        f.options.thread_count = 2;
        fixture_open(&f, i % 2 == 0);
        for (uint32_t o = 0; o < OVERLAYS; o++)
            make_overlay(&f, &f.overlays[o], o);
        histories_create(&f, h);
        for (uint32_t step = 0; step < 6; step++)
            run_attention_step(&f, h, 0);
        for (uint32_t s = 0; s < SEQS; s++)
            free(h[s].keys), free(h[s].values);
        fixture_close(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embed_and_norm),
        cmocka_unit_test(test_rope_and_attention),
        cmocka_unit_test(test_wide_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
