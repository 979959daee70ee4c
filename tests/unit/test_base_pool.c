/* parallel_for: every index exactly once, no two threads under one worker number, many small jobs
 * in a row; and the reading of control-group quotas from made-up trees. Also run under the thread
 * sanitizer. */
#include "base_support.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cores.h"
#include "bitdelta/base/pool.h"

enum { WIDTH_MAX = 9, COUNT_MAX = 3000 };

typedef struct job {
    atomic_uint runs[COUNT_MAX];
    atomic_bool inside[WIDTH_MAX];
    uint32_t plain[COUNT_MAX]; /* not atomic: parallel_for itself must order it */
    uint32_t width, stamp;
} job;

static void run_index(void *ctx, uint32_t index, uint32_t worker) {
    job *work = ctx;
    if (worker >= work->width || atomic_exchange(&work->inside[worker], true)) abort();
    atomic_fetch_add(&work->runs[index], 1);
    work->plain[index] = work->stamp + index;
    atomic_store(&work->inside[worker], false);
}

static void test_every_index_once(void **state) {
    (void)state;
    uint64_t random = support_seed();
    static job work;
    for (uint32_t width = 1; width <= WIDTH_MAX; width++) {
        bd_pool *pool;
        bd_error err;
        assert_int_equal(bd_pool_create(&pool, width, "test-name-too-long", &err), BD_OK);
        assert_int_equal(bd_pool_width(pool), width);
        for (int round = 0; round < 400; round++) {
            uint32_t count =
                (uint32_t)(support_random(&random) % (round % 20 == 0 ? COUNT_MAX : 40));
            memset(work.plain, 0, sizeof work.plain);
            for (uint32_t i = 0; i < COUNT_MAX; i++)
                atomic_store(&work.runs[i], 0);
            work.width = width;
            work.stamp = (uint32_t)round * 7;
            bd_pool_parallel_for(pool, count, run_index, &work);
            for (uint32_t i = 0; i < COUNT_MAX; i++) {
                assert_int_equal(atomic_load(&work.runs[i]), i < count);
                assert_int_equal(work.plain[i], i < count ? work.stamp + i : 0);
            }
        }
        bd_pool_destroy(pool);
    }
    bd_pool_destroy(NULL);
}

static void add_index(void *ctx, uint32_t index, uint32_t worker) {
    (void)worker;
    atomic_fetch_add((_Atomic uint64_t *)ctx, index);
}

/* Jobs follow each other at once, on a stack that changes: a worker that wakes late must find
 * nothing. */
static void test_small_jobs(void **state) {
    (void)state;
    bd_pool *pool;
    assert_int_equal(bd_pool_create(&pool, 4, "t", NULL), BD_OK);
    for (uint64_t i = 0; i < 30000; i++) {
        _Atomic uint64_t sum = 0;
        uint64_t count = i % 7;
        bd_pool_parallel_for(pool, (uint32_t)count, add_index, &sum);
        assert_int_equal(atomic_load(&sum), count > 0 ? count * (count - 1) / 2 : 0);
    }
    bd_pool_destroy(pool);
}

static void sleep_index(void *ctx, uint32_t index, uint32_t worker) {
    (void)index;
    struct timespec pause = {.tv_nsec = 20000000};
    atomic_uint *seen = ctx;
    nanosleep(&pause, NULL);
    atomic_fetch_add(&seen[worker], 1);
}

/* Work that waits is spread over all threads, also after they all went to sleep. */
static void test_spread(void **state) {
    (void)state;
    bd_pool *pool;
    assert_int_equal(bd_pool_create(&pool, 3, "t", NULL), BD_OK);
    for (int round = 0; round < 3; round++) {
        atomic_uint seen[3] = {0, 0, 0};
        struct timespec pause = {.tv_nsec = 5000000};
        nanosleep(&pause, NULL);
        bd_pool_parallel_for(pool, 30, sleep_index, seen);
        for (int i = 0; i < 3; i++)
            assert_true(atomic_load(&seen[i]) > 0);
    }
    bd_pool_destroy(pool);
}

static void test_create(void **state) {
    (void)state;
    bd_pool *pool;
    bd_error err;
    assert_int_equal(bd_pool_create(&pool, 1000000, "t", &err), BD_E_ARGUMENT);
    assert_null(pool);
    assert_int_equal(bd_pool_create(&pool, 0, "t", &err), BD_OK);
    assert_int_equal(bd_pool_width(pool), bd_usable_cores());
    bd_pool_destroy(pool);
    assert_in_range(bd_usable_cores(), 1, (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
}

static char g_root[256]; /* a temporary directory of this test */

static void put_file(const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", g_root, name);
    for (char *slash = strchr(path + strlen(g_root) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static uint32_t cores_with(const char *proc_text) {
    char proc[512], root[512];
    put_file("proc", proc_text);
    snprintf(proc, sizeof proc, "%s/proc", g_root);
    snprintf(root, sizeof root, "%s/sys", g_root);
    return bd_cgroup_cores(proc, root);
}

static void test_cgroup(void **state) {
    (void)state;
    snprintf(g_root, sizeof g_root, "%s/bd-pool-XXXXXX", P_tmpdir);
    assert_non_null(mkdtemp(g_root));
    put_file("sys/a/b/cpu.max", "max 100000\n");
    assert_int_equal(cores_with("0::/a/b\n"), 0);
    put_file("sys/a/cpu.max", "350000 100000\n");
    assert_int_equal(cores_with("0::/a/b\n"), 4); /* 3.5, rounded up */
    put_file("sys/cpu.max", "200000 100000\n");
    assert_int_equal(cores_with("0::/a/b\n"), 2); /* the smallest on the way up */
    assert_int_equal(cores_with("0::/\n"), 2);
    assert_int_equal(cores_with("0::/not/there\n"), 2);
    put_file("sys/cpu.max", "50000 100000\n");
    assert_int_equal(cores_with("0::/a/b\n"), 1);
    put_file("sys/cpu.max", "nonsense");
    assert_int_equal(cores_with("0::/\n"), 0);
    put_file("sys/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "600000\n");
    put_file("sys/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n");
    assert_int_equal(cores_with("7:memory:/\n4:cpu,cpuacct:/docker/x\n"), 6);
    assert_int_equal(cores_with("4:cpuset:/docker/x\n"), 0);
    put_file("sys/cpu/cpu.cfs_quota_us", "-1\n");
    put_file("sys/cpu/cpu.cfs_period_us", "100000\n");
    assert_int_equal(cores_with("3:cpu:/docker/y\n"), 0);
    put_file("sys/cpu/cpu.cfs_quota_us", "300000\n");
    assert_int_equal(cores_with("3:cpuacct,cpu:/docker/y\n"), 3);
    assert_int_equal(cores_with("garbage\n::\n:\n"), 0);
    assert_int_equal(bd_cgroup_cores("/nonexistent", "/nonexistent"), 0);
    char command[300];
    snprintf(command, sizeof command, "rm -r '%s'", g_root);
    assert_int_equal(system(command), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_index_once), cmocka_unit_test(test_small_jobs),
        cmocka_unit_test(test_spread),           cmocka_unit_test(test_create),
        cmocka_unit_test(test_cgroup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
