/* test_gpu_ranks.c - sums and gathers between ranks: every type and size against sums in the order of the ranks, bit by bit, launched
 * and replayed, over the counter's seams; the sum with residual and norm against float64; ranks that never come; aborts.
 * test_gpu_tp.c says how to run it. */
#include "gpu_ranks.h"

#include <unistd.h>

#define LONG_US 20000000u

static uint64_t rank_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

typedef struct sum_case {
    uint64_t count, seed;
    bd_comm_type type;
    uint32_t times; /* in place, one after another */
    bool gather, nap;
} sum_case;
static sum_case the_case;

static size_t case_bytes(void) { return the_case.count * (the_case.type == BD_COMM_F32 ? 4 : 2); }

static float value_of(bd_comm_type type, const uint8_t *data, uint64_t i) {
    uint16_t half;
    float v;
    if (type == BD_COMM_F32) {
        memcpy(&v, data + 4 * i, 4);
        return v;
    }
    memcpy(&half, data + 2 * i, 2);
    return type == BD_COMM_BF16 ? bd_bf16_to_f32(half) : bd_f16_to_f32(half);
}
static void value_put(bd_comm_type type, uint8_t *data, uint64_t i, float v) {
    const uint16_t half = type == BD_COMM_BF16 ? bd_f32_to_bf16(v) : bd_f32_to_f16(v);
    if (type == BD_COMM_F32) memcpy(data + 4 * i, &v, 4);
    else memcpy(data + 2 * i, &half, 2);
}
static void inputs_of(uint32_t rank, uint8_t *data) {
    uint64_t state = the_case.seed + rank * 7919u;
    for (uint64_t i = 0; i < the_case.count; i++)
        value_put(the_case.type, data, i, (float)((double)(rank_random(&state) >> 11) * 0x1p-53 - 0.5) * 4);
}
static void sum_expected(uint32_t ranks, uint8_t *out) {
    uint8_t *all[BD_COMM_RANKS_MAX];
    for (uint32_t r = 0; r < ranks; r++) {
        all[r] = malloc(case_bytes() + 1);
        inputs_of(r, all[r]);
    }
    for (uint32_t time = 0; time < the_case.times; time++)
        for (uint64_t i = 0; i < the_case.count; i++) {
            float sum = 0;
            for (uint32_t r = 0; r < ranks; r++) sum += value_of(the_case.type, all[r], i);
            for (uint32_t r = 0; r < ranks; r++) value_put(the_case.type, all[r], i, sum);
        }
    memcpy(out, all[0], case_bytes());
    for (uint32_t r = 0; r < ranks; r++) free(all[r]);
}

static bd_status launch(ranks_rank *r) {
    bd_status s = BD_OK;
    for (uint32_t i = 0; s == BD_OK && i < the_case.times; i++)
        s = the_case.gather ? r->comm->ops->all_gather(r->comm, r->a, r->b, case_bytes(), r->stream, &r->error)
                            : r->comm->ops->all_reduce(r->comm, r->a, the_case.count, the_case.type, r->stream, &r->error);
    return s;
}
static void put_inputs(ranks_rank *r) {
    inputs_of(r->rank, r->host);
    RANK_TRY(r, cudaMemcpyAsync(r->a, r->host, case_bytes(), cudaMemcpyHostToDevice, r->stream));
    RANK_TRY(r, cudaStreamSynchronize(r->stream));
}
static void get_outputs(ranks_rank *r) {
    const size_t bytes = case_bytes() * (the_case.gather ? r->team->count : 1);
    RANK_TRY(r, cudaMemcpyAsync(r->host, the_case.gather ? r->b : r->a, bytes, cudaMemcpyDeviceToHost, r->stream));
    RANK_TRY(r, cudaStreamSynchronize(r->stream));
    RANK_OK(r, r->comm->ops->poll(r->comm, &r->error));
}
static void run_case(ranks_rank *r) {
    put_inputs(r);
    if (the_case.nap && r->rank == 1) usleep(60000);
    RANK_OK(r, launch(r));
    get_outputs(r);
}
static void record_case(ranks_rank *r) {
    cudaGraph_t graph = NULL;
    put_inputs(r);
    r->comm->recording = true;
    RANK_TRY(r, cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeRelaxed));
    RANK_OK(r, launch(r));
    RANK_TRY(r, cudaStreamEndCapture(r->stream, &graph));
    r->comm->recording = false;
    if (r->graph) RANK_TRY(r, cudaGraphExecDestroy(r->graph));
    r->graph = NULL;
    RANK_TRY(r, cudaGraphInstantiate(&r->graph, graph, 0));
    RANK_TRY(r, cudaGraphDestroy(graph));
}
static void replay_case(ranks_rank *r) {
    put_inputs(r);
    RANK_TRY(r, cudaGraphLaunch(r->graph, r->stream));
    get_outputs(r);
}

/* exact: the order of the sum is ours; else it is NCCL's, within a rounding a rank. */
static void check_case(const ranks_team *t, bool exact) {
    const size_t bytes = case_bytes();
    uint8_t *want = malloc(bytes * t->count + 1);
    if (the_case.gather)
        for (uint32_t r = 0; r < t->count; r++) inputs_of(r, want + r * bytes);
    else sum_expected(t->count, want);
    for (uint32_t r = 0; r < t->count; r++) {
        const uint8_t *got = t->ranks[r].host;
        if (memcmp(got, t->ranks[0].host, the_case.gather ? bytes * t->count : bytes)) fail_msg("ranks 0 and %u differ", r);
        for (uint64_t i = 0; i < the_case.count && !the_case.gather; i++) {
            const float a = value_of(the_case.type, got, i), b = value_of(the_case.type, want, i);
            const float unit = the_case.type == BD_COMM_F32 ? 0x1p-23f : the_case.type == BD_COMM_BF16 ? 0x1p-7f : 0x1p-10f;
            const float room = exact ? 0 : 16 * (float)t->count * unit;
            if (!(fabsf(a - b) <= room * (exact ? 1 : (float)pow(t->count, the_case.times))) || (exact && a != b))
                fail_msg("%u ranks, type %d, %llu values: value %llu is %g, not %g", t->count, the_case.type, (unsigned long long)the_case.count,
                         (unsigned long long)i, a, b);
        }
        if (the_case.gather && memcmp(got, want, bytes * t->count)) fail_msg("gathered bytes of rank %u are wrong", r);
    }
    free(want);
}

static void sums_of(ranks_team *t, bool exact) {
    static const uint64_t counts[] = {1, 2, 3, 4, 5, 7, 8, 63, 1027, 4096, 65536, 131072 + 6, 262144 + 512};
    static const bd_comm_type types[] = {BD_COMM_F32, BD_COMM_BF16, BD_COMM_F16};
    for (size_t k = 0; k < 3; k++)
        for (size_t c = 0; c <= sizeof counts / sizeof *counts; c++) {
            the_case = (sum_case){.count = c < sizeof counts / sizeof *counts ? counts[c] : 1 + test_next() % 400000, .seed = test_next(), .type = types[k], .times = 1};
            ranks_run(t, run_case);
            check_case(t, exact);
            if (c % 4) continue;
            the_case.times = 3;
            the_case.seed++;
            ranks_run(t, run_case);
            check_case(t, exact);
            ranks_run(t, record_case); /* nobody replays before all have recorded */
            for (uint32_t i = 0; i < 3; i++) {
                the_case.seed++;
                ranks_run(t, replay_case);
                check_case(t, exact);
            }
        }
    for (uint32_t c = 0; c < 8; c++) {
        the_case = (sum_case){.count = c < 3 ? 1u << (9 * c) : 1 + test_next() % 200000, .seed = test_next(), .type = BD_COMM_F32, .times = 1, .gather = true};
        ranks_run(t, run_case);
        check_case(t, true);
    }
}

static void test_sums_and_gathers(void **state) {
    (void)state;
    for (int kind = 0; kind < RANKS_NCCL_OWN; kind++)
        for (uint32_t count = 2; count <= 8; count *= 2) {
            const char *why = ranks_refusal(kind, count);
            printf("%s, %u ranks%s%s\n", ranks_kind_names[kind], count, why ? ": skipped, " : "", why ? why : "");
            if (why) continue;
            ranks_team *t = ranks_open(kind, count, LONG_US);
            sums_of(t, kind == RANKS_P2P);
            ranks_close(t);
        }
}

static void set_turns(ranks_team *t, uint32_t turns) {
    for (uint32_t r = 0; r < t->count; r++) {
        CUDA_OK(cudaSetDevice(t->ranks[r].device));
        CUDA_OK(cudaMemcpy(cuda_peers_ranks(t->group->device, r)->state, &turns, sizeof turns, cudaMemcpyHostToDevice));
    }
}

/* The turn's number comes again after 2^31 of them: lines of the old turn must be gone by then. Rank 1 is late, so that a rank that
 * takes old lines for new ones takes them. */
static void test_turns_begin_anew(void **state) {
    (void)state;
    ranks_team *t = ranks_open(RANKS_P2P, 2, LONG_US);
    static const uint32_t seams[] = {0x3ffffffeu, 0x7ffffffeu};
    for (uint32_t i = 0; i < 2; i++) {
        set_turns(t, seams[i]);
        for (uint32_t n = 0; n < 6; n++) {
            the_case = (sum_case){.count = 1 + test_next() % 100000, .seed = test_next(), .type = BD_COMM_F32, .times = 1};
            ranks_run(t, run_case);
            check_case(t, true);
        }
    }
    for (uint32_t round = 0; round < 2; round++) {
        set_turns(t, 0x100u); /* full windows, of both slots */
        for (uint32_t n = 0; n < 2; n++) {
            the_case = (sum_case){.count = CUDA_WINDOW_BYTES / 4, .seed = test_next(), .type = BD_COMM_F32, .times = 1, .nap = round == 1};
            ranks_run(t, run_case);
            check_case(t, true);
        }
        set_turns(t, 0x40000000u); /* 2^30 turns on */
        for (uint32_t n = 0; n < 2; n++) {
            the_case = (sum_case){.count = 5, .seed = test_next(), .type = BD_COMM_F32, .times = 1};
            ranks_run(t, run_case);
            check_case(t, true);
        }
    }
    ranks_close(t);
}

/* ---- The sum with residual and norm ---- */

typedef struct norm_case {
    uint32_t rows, width;
    bool half, fp16, post;
    float *residual, *gamma, *own_gamma, *post_gamma; /* host; own_gamma: of overlay 1, overlay 0 has the base's */
    int32_t *overlay;
    float *proj[BD_COMM_RANKS_MAX];
} norm_case;
static norm_case the_norm;

static size_t place(size_t *at, size_t bytes) {
    const size_t from = *at;
    *at += (bytes + 255) / 256 * 256;
    return from;
}
static uint16_t narrow(float v) { return the_norm.fp16 ? bd_f32_to_f16(v) : bd_f32_to_bf16(v); }
static float widen(uint16_t v) { return the_norm.fp16 ? bd_f16_to_f32(v) : bd_bf16_to_f32(v); }

static void run_norm(ranks_rank *r) {
    const norm_case *n = &the_norm;
    const size_t values = (size_t)n->rows * n->width;
    size_t at = 0;
    const size_t residual = place(&at, values * 4), proj = place(&at, values * 4), gamma = place(&at, n->width * 4), own = place(&at, n->width * 4),
                 post = place(&at, n->width * 4), overlay = place(&at, n->rows * 4), tables = place(&at, 4 * sizeof(float *));
    const float *pointers[4] = {NULL, (const float *)(void *)(r->a + own), NULL, NULL};
    memset(r->host, 0, at);
    memcpy(r->host + residual, n->residual, values * 4);
    for (size_t i = 0; i < values; i++) {
        const uint16_t half = narrow(n->proj[r->rank][i]);
        if (n->half) memcpy(r->host + proj + 2 * i, &half, 2);
        else memcpy(r->host + proj + 4 * i, &n->proj[r->rank][i], 4);
    }
    memcpy(r->host + gamma, n->gamma, n->width * 4);
    memcpy(r->host + own, n->own_gamma, n->width * 4);
    memcpy(r->host + post, n->post_gamma, n->width * 4);
    memcpy(r->host + overlay, n->overlay, n->rows * 4);
    memcpy(r->host + tables, pointers, sizeof pointers);
    RANK_TRY(r, cudaMemcpyAsync(r->a, r->host, at, cudaMemcpyHostToDevice, r->stream));
    const k_norm_args args = {.residual = (float *)(void *)(r->a + residual),
                              .proj = r->a + proj,
                              .normed = (uint16_t *)(void *)r->b,
                              .gamma = (const float *)(void *)(r->a + gamma),
                              .post_gamma = n->post ? (const float *)(void *)(r->a + post) : NULL,
                              .gammas = (const float *const *)(void *)(r->a + tables),
                              .post_gammas = (const float *const *)(void *)(r->a + tables + 2 * sizeof(float *)),
                              .row_overlay = (const int32_t *)(void *)(r->a + overlay),
                              .rows = (int32_t)n->rows,
                              .width = (int32_t)n->width,
                              .add = true,
                              .proj_half = n->half,
                              .fp16 = n->fp16,
                              .eps = 1e-5f};
    RANK_TRY(r, k_ranks_norm(cuda_peers_ranks(r->team->group->device, r->rank), &args, r->stream));
    RANK_TRY(r, cudaMemcpyAsync(r->host, r->a + residual, values * 4, cudaMemcpyDeviceToHost, r->stream));
    RANK_TRY(r, cudaMemcpyAsync(r->host + values * 4, r->b, values * 2, cudaMemcpyDeviceToHost, r->stream));
    RANK_TRY(r, cudaStreamSynchronize(r->stream));
    RANK_OK(r, r->comm->ops->poll(r->comm, &r->error));
}

static void norm_reference(uint32_t ranks, double *residual, double *normed) {
    const norm_case *n = &the_norm;
    for (uint32_t m = 0; m < n->rows; m++) {
        double *x = residual + (size_t)m * n->width, square = 0;
        const float *gamma = n->overlay[m] == 1 ? n->own_gamma : n->gamma;
        double *sum = calloc(n->width, sizeof *sum);
        for (uint32_t i = 0; i < n->width; i++) {
            for (uint32_t r = 0; r < ranks; r++) {
                const float v = n->proj[r][(size_t)m * n->width + i];
                sum[i] += n->half ? widen(narrow(v)) : v;
            }
            square += sum[i] * sum[i];
        }
        const double factor = n->post ? 1 / sqrt(square / n->width + 1e-5) : 1;
        square = 0;
        for (uint32_t i = 0; i < n->width; i++) {
            x[i] = n->residual[(size_t)m * n->width + i] + sum[i] * factor * (n->post ? n->post_gamma[i] : 1);
            square += x[i] * x[i];
        }
        for (uint32_t i = 0; i < n->width; i++) normed[(size_t)m * n->width + i] = x[i] / sqrt(square / n->width + 1e-5) * gamma[i];
        free(sum);
    }
}

static void check_norm(ranks_team *t) {
    norm_case *n = &the_norm;
    const size_t values = (size_t)n->rows * n->width;
    n->residual = floats_random(values, 2), n->gamma = floats_random(n->width, 1), n->own_gamma = floats_random(n->width, 1), n->post_gamma = floats_random(n->width, 1);
    n->overlay = malloc(n->rows * 4);
    for (uint32_t m = 0; m < n->rows; m++) n->overlay[m] = (int32_t)(test_next() % 3) - 1;
    for (uint32_t r = 0; r < t->count; r++) n->proj[r] = floats_random(values, 1);
    ranks_run(t, run_norm);
    double *residual = calloc(values, sizeof *residual), *normed = calloc(values, sizeof *normed);
    float *got = calloc(values, sizeof *got);
    norm_reference(t->count, residual, normed);
    for (uint32_t r = 0; r < t->count; r++) {
        const uint8_t *host = t->ranks[r].host;
        if (memcmp(host, t->ranks[0].host, values * 6)) fail_msg("ranks 0 and %u differ", r);
        memcpy(got, host, values * 4);
        CHECK_L2(got, residual, values, 1e-6, "%u ranks, residual %u x %u", t->count, n->rows, n->width);
        for (size_t i = 0; i < values; i++) {
            uint16_t half;
            memcpy(&half, host + values * 4 + 2 * i, 2);
            got[i] = widen(half);
        }
        CHECK_L2(got, normed, values, n->fp16 ? 4e-4 : 3e-3, "%u ranks, normed %u x %u", t->count, n->rows, n->width);
    }
    free(residual), free(normed), free(got), free(n->residual), free(n->gamma), free(n->own_gamma), free(n->post_gamma), free(n->overlay);
    for (uint32_t r = 0; r < t->count; r++) free(n->proj[r]);
}

static void test_sum_and_norm(void **state) {
    (void)state;
    static const uint32_t shapes[][2] = {{1, 64}, {1, 4096}, {2, 8192}, {3, 200}, {16, 8192}, {31, 4096}, {64, 4096}, {65, 256}, {200, 1024}};
    for (uint32_t count = 2; count <= 4; count *= 2) {
        if (ranks_refusal(RANKS_P2P, count)) continue;
        ranks_team *t = ranks_open(RANKS_P2P, count, LONG_US);
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int mix = 0; mix < 8; mix++) {
                the_norm = (norm_case){.rows = shapes[s][0], .width = shapes[s][1], .half = mix & 1, .fp16 = mix & 2, .post = mix & 4};
                if (k_ranks_norm_takes(cuda_peers_ranks(t->group->device, 0), (int)the_norm.rows, (int)the_norm.width, the_norm.half)) check_norm(t);
            }
        ranks_close(t);
    }
    const k_ranks none = {.lines_max = 1024, .rank_count = 2};
    assert_false(k_ranks_norm_takes(&none, 2, 4096, true)); /* too much for a window */
    assert_false(k_ranks_norm_takes(&none, 1, 12, true));
}

/* ---- What does not come ---- */

static void only_rank_0(ranks_rank *r) {
    if (r->rank != 0) return;
    const uint64_t begin_us = bd_now_us();
    RANK_OK(r, launch(r));
    RANK_TRY(r, cudaStreamSynchronize(r->stream));
    r->ctx = (void *)(uintptr_t)(bd_now_us() - begin_us);
}
static uint64_t took_us(const ranks_team *t) { return (uint64_t)(uintptr_t)t->ranks[0].ctx; }

static void expect_lost(ranks_team *t, const char *words) {
    for (uint32_t r = 0; r < t->count; r++) {
        bd_error err = {0};
        assert_int_equal(t->ops->poll(t->ranks[r].comm, &err), BD_E_DEVICE);
        assert_string_equal(err.subject, "tensor_parallel");
        if (r == 0 && !strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
    }
}

static void test_a_peer_never_comes(void **state) {
    (void)state;
    ranks_team *t = ranks_open(RANKS_P2P, 2, 300000);
    the_case = (sum_case){.count = 5000, .seed = 1, .type = BD_COMM_F32, .times = 1};
    ranks_run(t, only_rank_0);
    printf("gave up after %llu ms\n", (unsigned long long)(took_us(t) / 1000));
    assert_true(took_us(t) >= 250000);
    expect_lost(t, "rank 0 waited for the others for 300 ms");
    the_case.times = 20; /* later ones wait for nobody: else it would be six seconds */
    ranks_run(t, only_rank_0);
    assert_true(took_us(t) < 3000000);
    ranks_close(t);
}

static ranks_team *to_abort;
static void *abort_soon(void *arg) {
    (void)arg;
    usleep(200000);
    to_abort->ops->abort(to_abort->group);
    return NULL;
}

static void test_abort_ends_waits(void **state) {
    (void)state;
    for (int kind = 0; kind < RANKS_NCCL_OWN; kind++) {
        if (ranks_refusal(kind, 2)) continue;
        ranks_team *t = ranks_open(kind, 2, 60000000);
        pthread_t thread;
        the_case = (sum_case){.count = 5000, .seed = 1, .type = BD_COMM_F32, .times = 2};
        ranks_run(t, run_case); /* so that what follows is launched without meeting anybody */
        to_abort = t;
        the_case.times = 1;
        if (pthread_create(&thread, NULL, abort_soon, NULL)) fail_msg("no thread");
        ranks_run(t, only_rank_0);
        pthread_join(thread, NULL);
        printf("%s: ended after %llu ms\n", ranks_kind_names[kind], (unsigned long long)(took_us(t) / 1000));
        assert_true(took_us(t) >= 150000 && took_us(t) < 30000000);
        expect_lost(t, "one of them failed");
        ranks_close(t);
    }
}

int main(int argc, char **argv) {
    ranks_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sums_and_gathers), cmocka_unit_test(test_turns_begin_anew), cmocka_unit_test(test_sum_and_norm),
                                       cmocka_unit_test(test_a_peer_never_comes), cmocka_unit_test(test_abort_ends_waits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
