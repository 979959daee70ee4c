/* test_gpu_peers.c - the host's side of ranks, which needs no device: meetings and what they agree on, aborts from another thread, and
 * ranks whose device is not there, none of which may leave another waiting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>

#include "../../src/backend/cuda/cuda_internal.h"
#include "bitdelta/base/clock.h"

#define ROUNDS 40

typedef struct rank {
    uint32_t index;
    pthread_t thread;
    bd_comm *comm;
    bd_status joined, met;
    uint32_t agreed;
    bd_error error;
} rank;

static struct {
    uint32_t count;
    cuda_peers *peers;
    bd_comm_group *group;
    uint64_t answers[ROUNDS]; /* a bit a rank */
    _Atomic uint32_t inside;
    rank ranks[BD_COMM_RANKS_MAX];
} team;

static void run(uint32_t count, void *(*act)(void *rank)) {
    team.count = count;
    atomic_store(&team.inside, 0);
    for (uint32_t r = 0; r < count; r++) {
        team.ranks[r] = (rank){.index = r};
        assert_int_equal(pthread_create(&team.ranks[r].thread, NULL, act, &team.ranks[r]), 0);
    }
}
static void join(void) {
    for (uint32_t r = 0; r < team.count; r++) pthread_join(team.ranks[r].thread, NULL);
}

static void *meet_often(void *arg) {
    rank *r = arg;
    r->joined = cuda_peers_join(team.peers, r->index, r->index, &r->error);
    for (uint32_t i = 0; r->joined == BD_OK && r->met == BD_OK && i < ROUNDS; i++) {
        bool all = false;
        r->met = cuda_peers_meet(team.peers, r->index, team.answers[i] >> r->index & 1, &all, &r->error);
        r->agreed += all ? 1u : 0u;
    }
    return NULL;
}

static void test_meetings_agree(void **state) {
    (void)state;
    bd_error err = {0};
    uint64_t seed = bd_now_us();
    for (uint32_t count = 2; count <= BD_COMM_RANKS_MAX; count *= 2) {
        uint32_t yes = 0;
        const uint64_t full = (1u << count) - 1;
        for (uint32_t i = 0; i < ROUNDS; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            team.answers[i] = seed >> 62 ? full & ~(1ull << (seed >> 33) % count) : full; /* one in four: all */
            yes += team.answers[i] == full;
        }
        assert_int_equal(cuda_peers_create(count, 1000, 0, &team.peers, &err), BD_OK);
        run(count, meet_often);
        join();
        for (uint32_t r = 0; r < count; r++) {
            assert_int_equal(team.ranks[r].met, BD_OK);
            assert_int_equal(team.ranks[r].agreed, yes);
            assert_int_equal(cuda_peers_poll(team.peers, r, &err), BD_OK);
            assert_null(cuda_peers_ranks(team.peers, r)); /* no windows were asked for */
            cuda_peers_leave(team.peers, r);
        }
        cuda_peers_destroy(team.peers);
    }
    cuda_peers_destroy(NULL);
}

static void *meet_without_rank_0(void *arg) {
    rank *r = arg;
    bool all = false;
    r->joined = cuda_peers_join(team.peers, r->index, r->index, &r->error);
    if (r->joined != BD_OK || r->index == 0) return NULL;
    atomic_fetch_add(&team.inside, 1);
    r->met = cuda_peers_meet(team.peers, r->index, true, &all, &r->error);
    r->agreed = all;
    return NULL;
}

static void test_abort_ends_meetings(void **state) {
    (void)state;
    bd_error err = {0};
    assert_int_equal(cuda_peers_create(4, 1000, 0, &team.peers, &err), BD_OK);
    run(4, meet_without_rank_0);
    while (atomic_load(&team.inside) < 3) usleep(100);
    cuda_peers_abort(team.peers);
    cuda_peers_abort(team.peers); /* again: nothing */
    join();
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(team.ranks[r].joined, BD_OK);
        assert_int_equal(team.ranks[r].met, r ? BD_E_DEVICE : BD_OK);
        assert_int_equal(team.ranks[r].agreed, 0);
        assert_int_equal(cuda_peers_poll(team.peers, r, &err), BD_E_DEVICE);
        assert_string_equal(err.subject, "tensor_parallel");
        cuda_peers_leave(team.peers, r);
    }
    cuda_peers_destroy(team.peers);
}

static void *open_p2p(void *arg) {
    rank *r = arg;
    /* Rank 0's device may be there; no machine has the last one. */
    const uint32_t device = r->index + 1 == team.count ? 4000 : r->index;
    r->joined = bd_comm_p2p_ops()->open(team.group, r->index, device, &r->comm, &r->error);
    return NULL;
}

static void test_a_device_that_is_not_there(void **state) {
    (void)state;
    bd_error err = {0};
    assert_int_equal(bd_comm_p2p_ops()->group_create(1, 1, &team.group, &err), BD_E_ARGUMENT);
    assert_int_equal(bd_comm_p2p_ops()->group_create(9, 1, &team.group, &err), BD_E_ARGUMENT);
    for (uint32_t count = 2; count <= 4; count *= 2) {
        assert_int_equal(bd_comm_p2p_ops()->group_create(count, 60000000, &team.group, &err), BD_OK);
        run(count, open_p2p);
        join();
        for (uint32_t r = 0; r < count; r++) {
            assert_int_equal(team.ranks[r].joined, BD_E_DEVICE);
            assert_null(team.ranks[r].comm);
        }
        assert_non_null(strstr(team.ranks[count - 1].error.message, "device 4000 cannot be used"));
        bd_comm_p2p_ops()->group_destroy(team.group);
    }
    bd_comm_p2p_ops()->group_destroy(NULL);
    bd_comm_p2p_ops()->close(NULL);
}

/* The arithmetic of a rank's plan. */
static void test_plans_of_ranks(void **state) {
    (void)state;
    bd_error err = {0};
    bd_model_config whole = {.hidden = 4096, .layers = 32, .heads = 32, .kv_heads = 8, .head_dim = 128, .ffn = 14336, .vocab = 128256, .max_positions = 8192, .rope.rotary_dim = 128};
    bd_memory_plan plans[2];
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t ranks = i ? 2 : 1;
        bd_model_config local = whole;
        local.heads /= ranks, local.kv_heads /= ranks, local.ffn /= ranks, local.vocab /= ranks;
        const bd_backend_options o = {.config = &local, .rank_count = ranks, .vocab_total = whole.vocab, .vocab_each = local.vocab, .device_bytes = 80ull << 30, .rows_max = 512, .seqs_max = 64, .logits_rows_max = 256,
                                      .kv_block_tokens = 16, .kv_block_count = 1000, .max_model_len = 8192, .rope_tables_max = 1};
        assert_int_equal(bd_backend_cuda_ops()->supports(&o, &err), BD_OK);
        assert_int_equal(bd_backend_cuda_ops()->plan(&o, &plans[i], &err), BD_OK);
    }
    const double weights = (double)plans[1].weights / (double)plans[0].weights, kv = (double)plans[1].kv / (double)plans[0].kv;
    assert_true(weights > 0.5 && weights < 0.501 && kv == 0.5); /* norms are whole on every rank */
    /* All rows whole on every rank, as on one, and before that its part of them. */
    const uint64_t part = 256ull * 128256 / 2 * 4;
    assert_true(plans[1].logits >= plans[0].logits + part && plans[1].logits < plans[0].logits + part + 4096);
    /* NCCL, and what 7 recordings of 32 layers take more. */
    assert_int_equal(plans[0].available - plans[1].available, (1024ull << 20) + 7 * 32 * (288ull << 10));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_meetings_agree), cmocka_unit_test(test_abort_ends_meetings), cmocka_unit_test(test_a_device_that_is_not_there),
                                       cmocka_unit_test(test_plans_of_ranks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
