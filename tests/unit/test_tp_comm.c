/* test_tp_comm.c - ranks that meet in memory: sums in the order of the ranks, the same bits for
 * all, whatever the sizes; a rank that stays away or gives up does not hold the others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bitdelta/backend/comm.h"
#include "bitdelta/base/clock.h"
#include "stopped_child.h"

enum { FLOATS_MAX = 3000, ROUNDS = 200, LONG_US = 60000000 };

typedef struct rank {
    bd_comm_group *group;
    uint32_t index, count;
    uint64_t seed;
    bool stays_away; /* from the third call on */
    bd_status status;
    bd_error error;
    uint32_t wrong;
} rank;

static const bd_comm_ops *ops(void) {
    return bd_comm_local_ops();
}

static uint64_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* What rank r has in round n at i; sums of it depend on their order. */
static float value(uint64_t seed, uint32_t r, uint32_t n, uint32_t i) {
    uint64_t state = seed ^ ((uint64_t)r << 40 | (uint64_t)n << 20 | i);
    (void)next(&state);
    return ((float)next(&state) / 1e9f - 1.0f) * (i % 3 == 0 ? 1e6f : 1.0f);
}

static uint32_t size_of(uint64_t seed, uint32_t n) {
    static const uint32_t sizes[] = {0, 1, 15, 16, 17, 127, 255, 256, 257, FLOATS_MAX};
    uint64_t state = seed + n;
    return n < 10 ? sizes[n] : (uint32_t)(next(&state) % FLOATS_MAX);
}

static void check_sum(rank *own, bd_comm *comm, uint32_t n, float *data) {
    const uint32_t size = size_of(own->seed, n);
    for (uint32_t i = 0; i < size; i++)
        data[i] = value(own->seed, own->index, n, i);
    data[size] = 42.0f;
    own->status = ops()->all_reduce(comm, data, size, BD_COMM_F32, NULL, &own->error);
    if (own->status != BD_OK) return;
    for (uint32_t i = 0; i < size; i++) {
        float sum = value(own->seed, 0, n, i);
        for (uint32_t r = 1; r < own->count; r++)
            sum += value(own->seed, r, n, i);
        if (memcmp(&sum, &data[i], sizeof sum) != 0) own->wrong++;
    }
    if (data[size] != 42.0f) own->wrong++;
}

static void check_gather(rank *own, bd_comm *comm, uint32_t n, float *data, float *all) {
    const uint32_t size = size_of(own->seed, n);
    for (uint32_t i = 0; i < size; i++)
        data[i] = value(own->seed, own->index, n, i);
    own->status = ops()->all_gather(comm, data, all, size * sizeof *data, NULL, &own->error);
    for (uint32_t i = 0; own->status == BD_OK && i < size * own->count; i++)
        if (all[i] != value(own->seed, i / size, n, i % size)) own->wrong++;
}

static void *run(void *arg) {
    rank *own = arg;
    bd_comm *comm = NULL;
    float *data = calloc(FLOATS_MAX + 1, sizeof *data);
    float *all = calloc((size_t)FLOATS_MAX * BD_COMM_RANKS_MAX, sizeof *all);
    own->status =
        data && all ? ops()->open(own->group, own->index, 0, &comm, &own->error) : BD_E_MEMORY;
    for (uint32_t n = 0; n < ROUNDS && own->status == BD_OK; n++) {
        if (own->stays_away && n == 3) break;
        check_sum(own, comm, n, data);
        if (own->status == BD_OK) check_gather(own, comm, n, data, all);
        if (own->status == BD_OK) own->status = ops()->poll(comm, &own->error);
    }
    if (comm) ops()->close(comm);
    free(data);
    free(all);
    return NULL;
}

static void run_ranks(rank *ranks, uint32_t count, uint64_t wait_us, bd_comm_group **group) {
    pthread_t threads[BD_COMM_RANKS_MAX];
    const uint64_t seed = bd_now_us();
    printf("  seed %llu\n", (unsigned long long)seed);
    assert_int_equal(ops()->group_create(count, wait_us, group, NULL), BD_OK);
    for (uint32_t r = 0; r < count; r++) {
        ranks[r].group = *group;
        ranks[r].index = r;
        ranks[r].count = count;
        ranks[r].seed = seed;
        assert_int_equal(pthread_create(&threads[r], NULL, run, &ranks[r]), 0);
    }
    for (uint32_t r = 0; r < count; r++)
        pthread_join(threads[r], NULL);
}

static void sums_and_gathers(void **state) {
    (void)state;
    for (uint32_t count = 2; count <= BD_COMM_RANKS_MAX; count++) {
        rank ranks[BD_COMM_RANKS_MAX] = {0};
        bd_comm_group *group;
        run_ranks(ranks, count, LONG_US, &group);
        for (uint32_t r = 0; r < count; r++) {
            assert_int_equal(ranks[r].status, BD_OK);
            assert_int_equal(ranks[r].wrong, 0);
        }
        ops()->group_destroy(group);
    }
}

/* The others get an error that says so, and every later call fails at once. */
static void a_rank_that_stays_away(void **state) {
    (void)state;
    rank ranks[4] = {[2] = {.stays_away = true}};
    bd_comm_group *group;
    run_ranks(ranks, 4, 3000000, &group);
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(ranks[r].wrong, 0);
        if (r == 2) continue;
        assert_int_equal(ranks[r].status, BD_E_DEVICE);
        assert_non_null(strstr(ranks[r].error.message, "1 of 4 did not come within 3000 ms"));
    }
    bd_comm *late = NULL;
    bd_error err = {0};
    assert_int_equal(ops()->open(group, 2, 0, &late, &err), BD_E_DEVICE);
    assert_null(late);
    ops()->group_destroy(group);
}

static void *abort_soon(void *arg) {
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    ops()->abort(arg);
    return NULL;
}

/* A wait of a minute ends with the abort. */
static void an_abort_wakes(void **state) {
    (void)state;
    bd_comm_group *group;
    bd_comm *comm;
    bd_error err = {0};
    pthread_t thread;
    assert_int_equal(ops()->group_create(2, (uint64_t)LONG_US * 60, &group, NULL), BD_OK);
    assert_int_equal(pthread_create(&thread, NULL, abort_soon, group), 0);
    assert_int_equal(ops()->open(group, 0, 0, &comm, &err), BD_E_DEVICE);
    assert_non_null(strstr(err.message, "one of them failed"));
    pthread_join(thread, NULL);
    ops()->group_destroy(group);
}

enum { STOPPED_S = 6, PATIENCE_US = 5000000 };

typedef struct late_rank {
    bd_comm_group *group;
    int go; /* comes when a byte does */
    bd_status status;
} late_rank;

static void *come_late(void *arg) {
    late_rank *own = arg;
    bd_comm *comm = NULL;
    char byte;
    float one = 1;
    own->status = ops()->open(own->group, 1, 0, &comm, NULL);
    if (own->status == BD_OK && read(own->go, &byte, 1) != 1) own->status = BD_E_IO;
    if (own->status == BD_OK)
        own->status = ops()->all_reduce(comm, &one, 1, BD_COMM_F32, NULL, NULL);
    if (comm) ops()->close(comm);
    return NULL;
}

/* The child: rank 0 waits for rank 1, says so before. Exit status 0: they met. */
static int wait_through_a_stop(int here, int go) {
    late_rank late = {.go = go};
    pthread_t thread;
    bd_comm *comm;
    bd_error err = {0};
    float two = 2;
    if (ops()->group_create(2, PATIENCE_US, &late.group, NULL) != BD_OK) return 2;
    if (pthread_create(&thread, NULL, come_late, &late) != 0) return 3;
    if (ops()->open(late.group, 0, 0, &comm, NULL) != BD_OK || write(here, "", 1) != 1) return 4;
    const bd_status status = ops()->all_reduce(comm, &two, 1, BD_COMM_F32, NULL, &err);
    if (status != BD_OK) (void)fprintf(stderr, "%s\n", err.message);
    pthread_join(thread, NULL);
    ops()->close(comm);
    ops()->group_destroy(late.group);
    return status == BD_OK && late.status == BD_OK && two == 3.0f ? 0 : 5;
}

/* Longer than a rank waits: nobody has stayed away, all stood still. */
static void a_stopped_process_loses_nobody(void **state) {
    (void)state;
    stopped_child(wait_through_a_stop, STOPPED_S);
}

static void sizes_are_checked(void **state) {
    (void)state;
    bd_comm_group *group;
    bd_error err = {0};
    assert_int_equal(ops()->group_create(1, 1, &group, &err), BD_E_ARGUMENT);
    assert_int_equal(ops()->group_create(9, 1, &group, &err), BD_E_ARGUMENT);
    assert_non_null(strstr(err.message, "2 to 8"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_and_gathers),  cmocka_unit_test(a_rank_that_stays_away),
        cmocka_unit_test(an_abort_wakes),    cmocka_unit_test(a_stopped_process_loses_nobody),
        cmocka_unit_test(sizes_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
