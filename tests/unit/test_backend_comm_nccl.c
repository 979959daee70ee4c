/* NCCL behind the table of comm.h, with a fake library in its place (fake_nccl.c): sums and gathers
 * of ranks that are threads, and all that goes wrong: no library, an old one, errors at once and
 * later, peers that never come, aborts from other threads. */
#include "base_support.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/comm/nccl_comm.h"
#include "bitdelta/base/clock.h"
#include "bitdelta/base/half.h"
#include "fake_nccl.h"

enum { RANKS_MAX = 8, COUNT = 1003, SHORT_US = 150000, LONG_US = 60000000 };

static bd_status create(uint32_t rank_count, uint64_t wait_us_max, bd_comm_group **out,
                        bd_error *err);

static const bd_comm_ops ops = {
    .name = "nccl",
    .group_create = create,
    .group_destroy = bd_nccl_group_destroy,
    .open = bd_nccl_open,
    .close = bd_nccl_close,
    .all_reduce = bd_nccl_all_reduce,
    .all_gather = bd_nccl_all_gather,
    .poll = bd_nccl_poll,
    .abort = bd_nccl_abort,
};

static bd_status create(uint32_t rank_count, uint64_t wait_us_max, bd_comm_group **out,
                        bd_error *err) {
    return bd_nccl_group_create(&ops, rank_count, wait_us_max, out, err);
}

typedef struct fake {
    void (*reset)(const fake_nccl_plan *plan);
    void (*look)(fake_nccl_seen *out);
} fake;

/* Loaded by its path, it is what "libnccl.so.2" means from now on. */
static void *load(const char *path) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) fail_msg("%s", dlerror());
    return handle;
}

static fake fake_of(void *handle) {
    fake f;
    void *reset = dlsym(handle, "fake_nccl_reset"), *look = dlsym(handle, "fake_nccl_look");
    assert_true(reset && look);
    memcpy(&f.reset, &reset, sizeof reset);
    memcpy(&f.look, &look, sizeof look);
    return f;
}

static fake the_fake;

/* ---- Ranks as threads ------------------------------------------------------------------------ */

typedef struct job job;
typedef struct rank_thread {
    job *job;
    uint32_t rank;
    bd_comm *comm;
    bd_status opened, did;
    bd_error error;
} rank_thread;

struct job {
    bd_comm_group *group;
    uint32_t count;
    bd_status (*act)(rank_thread *t);
    rank_thread threads[RANKS_MAX];
    _Atomic uint32_t acting;
    atomic_bool all_open; /* for those that act only then */
    uint64_t seed;
};

static void *run_rank(void *ctx) {
    rank_thread *t = ctx;
    t->opened = bd_nccl_open(t->job->group, t->rank, 40 + t->rank, &t->comm, &t->error);
    if (t->opened != BD_OK) return NULL;
    atomic_fetch_add(&t->job->acting, 1);
    t->did = t->job->act(t);
    return NULL;
}

static void start(job *j, pthread_t ids[RANKS_MAX], const fake_nccl_plan *plan, uint64_t wait_us) {
    bd_error err = {.message = ""};
    the_fake.reset(plan);
    if (create(j->count, wait_us, &j->group, &err) != BD_OK) fail_msg("%s", err.message);
    for (uint32_t r = 0; r < j->count; r++) {
        j->threads[r] = (rank_thread){.job = j, .rank = r};
        assert_int_equal(pthread_create(&ids[r], NULL, run_rank, &j->threads[r]), 0);
    }
}

static void join(const job *j, const pthread_t ids[RANKS_MAX]) {
    for (uint32_t r = 0; r < j->count; r++)
        pthread_join(ids[r], NULL);
}

/* Closed by one thread, one after another: close waits for nobody. Every communicator was ended. */
static void finish(job *j) {
    fake_nccl_seen seen;
    for (uint32_t r = 0; r < j->count; r++)
        bd_nccl_close(j->threads[r].comm);
    bd_nccl_group_destroy(j->group); /* what ends those of a broken group has ended */
    the_fake.look(&seen);
    assert_int_equal(seen.aborts, seen.inits);
}

static void run(job *j, const fake_nccl_plan *plan, uint64_t wait_us) {
    pthread_t ids[RANKS_MAX];
    start(j, ids, plan, wait_us);
    join(j, ids);
}

static void expect_lost(const rank_thread *t, bd_status status, const char *part) {
    assert_int_equal(status, BD_E_DEVICE);
    assert_string_equal(t->error.subject, "tensor_parallel");
    if (!strstr(t->error.message, part)) fail_msg("%s lacks %s", t->error.message, part);
}

/* ---- What works ------------------------------------------------------------------------------ */

static int value_of(uint64_t seed, uint32_t rank, uint32_t i) {
    uint64_t state = seed + rank * 1000003u + i;
    return (int)(support_random(&state) % 63) - 31;
}

static bd_status sum_all_types(rank_thread *t) {
    static const bd_comm_type types[] = {BD_COMM_F32, BD_COMM_BF16, BD_COMM_F16};
    union {
        float f32[COUNT];
        uint16_t half[COUNT];
    } data;
    for (size_t k = 0; k < 3; k++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            const float v = (float)value_of(t->job->seed, t->rank, i);
            if (types[k] == BD_COMM_F32)
                data.f32[i] = v;
            else
                data.half[i] = types[k] == BD_COMM_BF16 ? bd_f32_to_bf16(v) : bd_f32_to_f16(v);
        }
        const bd_status s = bd_nccl_all_reduce(t->comm, &data, COUNT, types[k], NULL, &t->error);
        if (s != BD_OK) return s;
        for (uint32_t i = 0; i < COUNT; i++) {
            int sum = 0;
            for (uint32_t r = 0; r < t->job->count; r++)
                sum += value_of(t->job->seed, r, i);
            const float got = types[k] == BD_COMM_F32    ? data.f32[i]
                              : types[k] == BD_COMM_BF16 ? bd_bf16_to_f32(data.half[i])
                                                         : bd_f16_to_f32(data.half[i]);
            if (got != (float)sum) return BD_E_INTERNAL;
        }
    }
    return bd_nccl_poll(t->comm, &t->error);
}

static bd_status gather_all(rank_thread *t) {
    uint8_t all[RANKS_MAX * 13];
    for (uint32_t i = 0; i < 13; i++)
        all[t->rank * 13 + i] = (uint8_t)value_of(t->job->seed, t->rank, i);
    const bd_status s = bd_nccl_all_gather(t->comm, all + t->rank * 13, all, 13, NULL, &t->error);
    for (uint32_t i = 0; i < t->job->count * 13 && s == BD_OK; i++)
        if (all[i] != (uint8_t)value_of(t->job->seed, i / 13, i % 13)) return BD_E_INTERNAL;
    return s;
}

static void test_sums_and_gathers(void **state) {
    (void)state;
    const uint64_t seed = support_seed();
    for (uint32_t count = 2; count <= RANKS_MAX; count *= 2) {
        for (int gather = 0; gather < 2; gather++) {
            fake_nccl_seen seen;
            job j = {.count = count, .act = gather ? gather_all : sum_all_types, .seed = seed};
            run(&j, &(fake_nccl_plan){0}, LONG_US);
            for (uint32_t r = 0; r < count; r++) {
                assert_int_equal(j.threads[r].opened, BD_OK);
                assert_int_equal(j.threads[r].did, BD_OK);
                assert_true(j.threads[r].comm->rank == r && j.threads[r].comm->rank_count == count);
            }
            the_fake.look(&seen);
            assert_int_equal(seen.nvls, 0);
            assert_int_equal(seen.inits, count);
            finish(&j);
        }
    }
}

/* ---- What does not --------------------------------------------------------------------------- */

static bd_status reduce_one(rank_thread *t) {
    float one = 1;
    return bd_nccl_all_reduce(t->comm, &one, 1, BD_COMM_F32, NULL, &t->error);
}

static bd_status poll_until_lost(rank_thread *t) {
    bd_status s = BD_OK;
    while (s == BD_OK)
        s = bd_nccl_poll(t->comm, &t->error);
    return s;
}

static void test_a_peer_never_comes(void **state) {
    (void)state;
    job j = {.count = 4, .act = reduce_one};
    const uint64_t begin_us = bd_now_us();
    run(&j, &(fake_nccl_plan){.init_hang = true, .rank = 2}, SHORT_US);
    assert_true(bd_now_us() - begin_us >= SHORT_US);
    for (uint32_t r = 0; r < 4; r++) {
        expect_lost(&j.threads[r], j.threads[r].opened, "did not come within 150 ms");
        assert_null(j.threads[r].comm);
    }
    finish(&j);
}

static void test_a_rank_fails_to_open(void **state) {
    (void)state;
    job j = {.count = 4, .act = poll_until_lost};
    run(&j, &(fake_nccl_plan){.init_error = true, .rank = 3}, LONG_US);
    for (uint32_t r = 0; r < 4; r++) {
        const rank_thread *t = &j.threads[r];
        expect_lost(t, t->opened == BD_OK ? t->did : t->opened, "unhandled cuda error");
        assert_non_null(strstr(t->error.message, "rank 3 (node "));
        assert_non_null(strstr(t->error.message, "device 43, NCCL 2.28.3), meeting the others: "));
    }
    assert_int_not_equal(j.threads[3].opened, BD_OK);
    finish(&j);
}

/* One rank's error ends the waits of all, and every later call. */
static void test_an_error_that_comes_to_light_later(void **state) {
    (void)state;
    pthread_t ids[RANKS_MAX];
    job j = {.count = 4, .act = poll_until_lost};
    start(&j, ids, &(fake_nccl_plan){0}, LONG_US);
    while (atomic_load(&j.acting) < 4)
        usleep(100);
    fake_nccl_seen seen;
    the_fake.look(&seen);
    assert_int_equal(seen.aborts, 0);
    the_fake.reset(&(fake_nccl_plan){.async_error = true, .rank = 1});
    join(&j, ids);
    for (uint32_t r = 0; r < 4; r++) {
        rank_thread *t = &j.threads[r];
        expect_lost(t, t->did, "rank 1 (node ");
        assert_non_null(strstr(t->error.message, "network error; fake: planned"));
        expect_lost(t, reduce_one(t), "network error");
        uint8_t all[4];
        expect_lost(t, bd_nccl_all_gather(t->comm, all + r, all, 1, NULL, &t->error),
                    "network error");
    }
    for (uint32_t r = 0; r < 4; r++)
        bd_nccl_close(j.threads[r].comm);
    bd_nccl_group_destroy(j.group);
    the_fake.look(&seen);
    assert_int_equal(seen.aborts, 4);
    assert_int_equal(seen.calls, 0);
}

/* As NCCL does while a recorded step names one of them: whoever ends the last waits. */
static void test_an_end_that_takes_long(void **state) {
    (void)state;
    pthread_t ids[RANKS_MAX];
    fake_nccl_seen seen;
    job j = {.count = 4, .act = poll_until_lost};
    start(&j, ids, &(fake_nccl_plan){0}, LONG_US);
    while (atomic_load(&j.acting) < 4)
        usleep(100);
    the_fake.reset(&(fake_nccl_plan){.async_error = true, .end_hang = true, .rank = 1});
    join(&j, ids);
    for (uint32_t r = 0; r < 4; r++) {
        expect_lost(&j.threads[r], j.threads[r].did, "rank 1 (node ");
        expect_lost(&j.threads[r], reduce_one(&j.threads[r]), "network error");
        bd_nccl_close(j.threads[r].comm);
    }
    the_fake.look(&seen);
    assert_int_equal(seen.aborts, 0);
    the_fake.reset(&(fake_nccl_plan){0});
    bd_nccl_group_destroy(j.group);
    the_fake.look(&seen);
    assert_int_equal(seen.aborts, 4);
}

static void test_a_call_is_refused(void **state) {
    (void)state;
    job j = {.count = 2, .act = reduce_one};
    fake_nccl_plan plan = {.call_error = true, .call_hang = true, .rank = 1};
    run(&j, &plan, LONG_US);
    for (uint32_t r = 0; r < 2; r++) { /* rank 0 may still be in open when rank 1 calls */
        const rank_thread *t = &j.threads[r];
        expect_lost(t, t->opened == BD_OK ? t->did : t->opened, "rank 1 (node ");
        assert_non_null(strstr(t->error.message, "all_reduce: invalid argument"));
    }
    finish(&j);
}

static bool refused(const rank_thread *t, bd_status status, const char *part) {
    return status == BD_E_DEVICE && strstr(t->error.message, part);
}

static bd_status fail_to_record(rank_thread *t) {
    uint8_t all[2] = {0};
    if (t->rank != 1) return BD_OK;
    t->comm->recording = true;
    if (!refused(t, reduce_one(t), "NCCL cannot record all_reduce: invalid argument"))
        return BD_E_INTERNAL;
    const bd_status s = bd_nccl_all_gather(t->comm, all + 1, all, 1, NULL, &t->error);
    if (!refused(t, s, "NCCL cannot record all_gather: invalid argument")) return BD_E_INTERNAL;
    t->comm->recording = false;
    return bd_nccl_poll(t->comm, &t->error);
}

/* What could not be recorded was not launched either: the group goes on, until a call fails. */
static void test_a_recording_fails(void **state) {
    (void)state;
    fake_nccl_seen seen;
    job j = {.count = 2, .act = fail_to_record};
    run(&j, &(fake_nccl_plan){.call_error = true, .rank = 1}, LONG_US);
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(j.threads[r].opened, BD_OK);
        assert_int_equal(j.threads[r].did, BD_OK);
        assert_int_equal(bd_nccl_poll(j.threads[r].comm, &j.threads[r].error), BD_OK);
    }
    the_fake.look(&seen);
    assert_int_equal(seen.aborts, 0);
    assert_int_equal(seen.calls, 2);
    expect_lost(&j.threads[1], reduce_one(&j.threads[1]), "all_reduce: invalid argument");
    expect_lost(&j.threads[0], bd_nccl_poll(j.threads[0].comm, &j.threads[0].error), "rank 1 (");
    finish(&j);
}

static bd_status reduce_when_all_are_open(rank_thread *t) {
    while (!atomic_load(&t->job->all_open))
        usleep(100);
    return reduce_one(t);
}

/* They meet in whatever time it takes; after that little of it is allowed. */
static void test_a_call_never_ends(void **state) {
    (void)state;
    pthread_t ids[RANKS_MAX];
    job j = {.count = 2, .act = reduce_when_all_are_open};
    start(&j, ids, &(fake_nccl_plan){.call_hang = true}, LONG_US);
    while (atomic_load(&j.acting) < 2)
        usleep(100);
    j.group->wait_us_max = SHORT_US;
    atomic_store(&j.all_open, true);
    join(&j, ids);
    for (uint32_t r = 0; r < 2; r++)
        expect_lost(&j.threads[r], j.threads[r].did, "all_reduce: the others did not come");
    finish(&j);
}

/* From a thread that is no rank's, while all wait. */
static void test_abort(void **state) {
    (void)state;
    for (int opening = 0; opening < 2; opening++) {
        pthread_t ids[RANKS_MAX];
        fake_nccl_seen seen = {0};
        job j = {.count = 3, .act = reduce_one};
        const fake_nccl_plan plan = {.init_hang = opening, .call_hang = true, .rank = 0};
        start(&j, ids, &plan, LONG_US);
        while (opening ? seen.inits < 3 : seen.calls < 3) {
            usleep(100);
            the_fake.look(&seen);
        }
        bd_nccl_abort(j.group);
        bd_nccl_abort(j.group); /* again: nothing */
        join(&j, ids);
        for (uint32_t r = 0; r < 3; r++) {
            const rank_thread *t = &j.threads[r];
            expect_lost(t, opening ? t->opened : t->did, "one of them failed");
        }
        finish(&j);
    }
}

static void test_groups_that_cannot_be(void **state) {
    (void)state;
    bd_comm_group *group;
    bd_error err = {.message = ""};
    the_fake.reset(&(fake_nccl_plan){.no_id = true});
    assert_int_equal(create(1, 1, &group, &err), BD_E_ARGUMENT);
    assert_int_equal(create(9, 1, &group, &err), BD_E_ARGUMENT);
    assert_int_equal(create(2, 1, &group, &err), BD_E_DEVICE);
    assert_string_equal(err.message, "NCCL cannot start: unhandled cuda error");
    assert_null(group);
    bd_nccl_group_destroy(NULL);
    bd_nccl_close(NULL);
}

/* In a process of its own, before the fake is loaded. There may be a real library, but without a
 * file descriptor nothing can be opened. Returns the step that failed, 0: none. */
static int without_library(void) {
    bd_comm_group *group = NULL;
    bd_error err = {.message = ""};
    struct rlimit files, none;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 1;
    none = files;
    none.rlim_cur = 0;
    if (setrlimit(RLIMIT_NOFILE, &none) != 0) return 2;
    if (create(2, 1, &group, &err) != BD_E_UNSUPPORTED || group) return 3;
    if (!strstr(err.message, "several GPUs need NCCL, which cannot be opened: ")) return 4;
    if (setrlimit(RLIMIT_NOFILE, &files) != 0) return 5;
    if (!dlopen(BD_FAKE_NCCL_OLD, RTLD_NOW | RTLD_LOCAL)) return 6;
    if (create(2, 1, &group, &err) != BD_E_UNSUPPORTED || group) return 7;
    return strstr(err.message, "libnccl.so.2 lacks ncclCommInitRankConfig") ? 0 : 8;
}

static int library_status = -1; /* of without_library, from before the tests */

static void test_no_library_and_an_old_one(void **state) {
    (void)state;
    assert_int_equal(library_status, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_library_and_an_old_one),
        cmocka_unit_test(test_sums_and_gathers),
        cmocka_unit_test(test_a_peer_never_comes),
        cmocka_unit_test(test_a_rank_fails_to_open),
        cmocka_unit_test(test_an_error_that_comes_to_light_later),
        cmocka_unit_test(test_an_end_that_takes_long),
        cmocka_unit_test(test_a_call_is_refused),
        cmocka_unit_test(test_a_recording_fails),
        cmocka_unit_test(test_a_call_never_ends),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_groups_that_cannot_be),
    };
    int status = -1;
    const pid_t child = fork();
    if (child == 0) _exit(without_library());
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 1;
    library_status = WEXITSTATUS(status);
    the_fake = fake_of(load(BD_FAKE_NCCL));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
