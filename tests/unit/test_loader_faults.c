/* test_loader_faults.c - loads that must fail, and say what is wrong with which file: damaged
 * chunks, cut, missing, replaced and unreadable files, disk errors, faults of the rooms above,
 * cancelled loads, and a kernel that refuses io_uring or registered memory (a seccomp filter and a
 * low limit in a child process). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "loader_fake.h"

static const bd_io_choice readers[] = {BD_IO_URING, BD_IO_PREAD};

typedef struct scene { /* one variant of two files, and one loader */
    fake_source source;
    fake_variant variant;
    bd_loader *loader;
    uint8_t *memory;
    void **pages;
    bd_load load;
} scene;

static const uint64_t scene_sizes[2] = {200001, 90000};
#define SCENE_CHUNK 16384u

static bool scene_loader(scene *s, bd_io_choice io) {
    const bd_loader_options options = {.io = io, .block_bytes = SCENE_CHUNK, .depth = 3};
    const bd_loader_source table = fake_loader_source(&s->source);
    bd_status status = bd_loader_create_with(&options, &table, &s->loader, NULL);
    if (status == BD_E_UNSUPPORTED) return false;
    assert_int_equal(status, BD_OK);
    return true;
}

static void scene_fill_in(const char *folder, scene *s, const uint64_t *sizes, uint32_t files,
                          uint64_t chunk_bytes) {
    fake_variant_make_in(folder, &s->variant, "unlucky", sizes, files, chunk_bytes);
    uint32_t count = fake_pages_for(s->variant.total_bytes);
    s->memory = calloc(count, FAKE_PAGE_BYTES);
    s->pages = calloc(count, sizeof(void *));
    assert_non_null(s->memory);
    assert_non_null(s->pages);
    for (uint32_t i = 0; i < count; i++)
        s->pages[i] = s->memory + (size_t)i * FAKE_PAGE_BYTES;
    s->load = (bd_load){.delta = &s->variant.delta, .pages = s->pages, .page_count = count};
}

static void scene_fill(scene *s, const uint64_t *sizes, uint32_t files, uint64_t chunk_bytes) {
    scene_fill_in(P_tmpdir, s, sizes, files, chunk_bytes);
}

static void scene_files(scene *s, uint64_t chunk_bytes) {
    scene_fill(s, scene_sizes, 2, chunk_bytes);
}

static bool scene_make(scene *s, bd_io_choice io, uint64_t chunk_bytes) {
    memset(s, 0, sizeof *s);
    if (!scene_loader(s, io)) return false;
    scene_files(s, chunk_bytes);
    return true;
}

static void scene_submit(scene *s) {
    assert_int_equal(bd_loader_submit(s->loader, &s->load, NULL), BD_OK);
}

static void scene_await(scene *s) {
    while (!bd_load_finished(&s->load))
        usleep(200);
}

/* The loader must be able to go on: the same load again, with everything in order. */
static void scene_end(scene *s) {
    bd_loader_destroy(s->loader);
    fake_variant_remove(&s->variant);
    free(s->memory);
    free(s->pages);
}

static void expect_failure(const scene *s, bd_status status, const char *file, const char *text) {
    if (s->load.status != status || !strstr(s->load.error.subject, file) ||
        !strstr(s->load.error.message, text))
        fail_msg("got %s (%s: %s), want %s (%s: %s)", bd_status_name(s->load.status),
                 s->load.error.subject, s->load.error.message, bd_status_name(status), file, text);
    assert_int_equal(s->load.error.status, status);
    assert_null(s->load.overlay);
}

static void flip_byte(const scene *s, uint32_t file, uint64_t at) {
    char path[1200];
    fake_path(&s->variant, file, path, sizeof path);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    uint8_t wrong = s->variant.content[file][at] ^ 0x10;
    assert_int_equal(pwrite(fd, &wrong, 1, (off_t)at), 1);
    close(fd);
}

static void test_damaged_chunk(void **state) {
    (void)state;
    for (size_t r = 0; r < 2; r++) {
        for (uint32_t round = 0; round < 8; round++) {
            scene s;
            if (!scene_make(&s, readers[r], SCENE_CHUNK)) continue;
            uint32_t file = round % 2;
            uint64_t at = round < 2 ? scene_sizes[file] - 1 : fake_below(scene_sizes[file]);
            flip_byte(&s, file, at);
            scene_submit(&s);
            scene_await(&s);
            char want[96];
            uint64_t chunk = at / SCENE_CHUNK, end = (chunk + 1) * SCENE_CHUNK;
            if (end > scene_sizes[file]) end = scene_sizes[file];
            snprintf(want, sizeof want, "chunk %" PRIu64 " (bytes %" PRIu64 " to %" PRIu64 ")",
                     chunk, chunk * SCENE_CHUNK, end);
            expect_failure(&s, BD_E_CORRUPT, s.variant.names[file], want);
            /* Nothing of the chunk was fed, everything before it was. */
            assert_int_equal(s.source.fed_bytes, (file ? scene_sizes[0] : 0) + chunk * SCENE_CHUNK);
            scene_end(&s);
        }
    }
}

/* A flipped bit in any chunk is found, also where blocks are fed as they come, and no load calls
 * all of it ready. */
static void test_damage_in_every_chunk(void **state) {
    (void)state;
    for (uint32_t n = 0;; n++) {
        scene s = {.source = {.anywhere = n % 4 < 2, .later = n % 4 == 3}};
        if (!scene_loader(&s, readers[n % 2])) continue;
        scene_files(&s, SCENE_CHUNK);
        const uint32_t first = s.variant.files[0].chunk_count, file = n >= first;
        const uint64_t chunk = file ? n - first : n, from = chunk * SCENE_CHUNK;
        const bool over = file && chunk >= s.variant.files[1].chunk_count;
        if (!over) {
            const uint64_t rest = scene_sizes[file] - from;
            flip_byte(&s, file, from + fake_below(rest < SCENE_CHUNK ? rest : SCENE_CHUNK));
        }
        scene_submit(&s);
        scene_await(&s);
        if (!over) {
            char want[96];
            snprintf(want, sizeof want, "chunk %" PRIu64 " (bytes %" PRIu64, chunk, from);
            expect_failure(&s, BD_E_CORRUPT, s.variant.names[file], want);
            assert_true(s.load.ready_count < FAKE_READY_COUNT);
        } else {
            assert_int_equal(s.load.status, BD_OK);
            fake_overlay_destroy(s.load.overlay);
        }
        scene_end(&s);
        if (over) break;
    }
}

/* ---- files that are not what they were ---- */

static void test_files_at_open(void **state) {
    (void)state;
    for (uint32_t what = 0; what < 5; what++) {
        scene s;
        if (!scene_make(&s, readers[what % 2], SCENE_CHUNK)) continue;
        char path[1200];
        fake_path(&s.variant, 1, path, sizeof path);
        if (what == 0) assert_int_equal(truncate(path, 89999), 0);
        if (what == 1) assert_int_equal(truncate(path, 90001), 0);
        if (what >= 2) assert_int_equal(unlink(path), 0);
        if (what == 3) assert_int_equal(mkdir(path, 0700), 0);
        if (what == 4) assert_int_equal(mkfifo(path, 0600), 0);
        scene_submit(&s);
        scene_await(&s);
        if (what == 0)
            expect_failure(&s, BD_E_LENGTH, path, "89999 bytes, delta.json records 90000");
        if (what == 1) expect_failure(&s, BD_E_LENGTH, path, "90001 bytes");
        if (what == 2) expect_failure(&s, BD_E_IO, path, "No such file");
        if (what >= 3) expect_failure(&s, BD_E_IO, path, "not a regular file");
        if (what == 3) rmdir(path);
        assert_int_equal(s.source.fed_bytes, 0);
        scene_end(&s);
    }
}

static void cut(const char *path) {
    BD_ASSERT(truncate(path, 70000) == 0);
}

static void grow(const char *path) {
    BD_ASSERT(truncate(path, 300000) == 0);
}

static void touch(const char *path) {
    const struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    BD_ASSERT(utimensat(AT_FDCWD, path, times, 0) == 0);
}

/* By the first read that ends; no other goes on before it has happened. */
static int32_t change_file(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)offset, (void)bytes;
    if (!atomic_exchange(&source->changing, true)) {
        source->change(source->path);
        atomic_store(&source->changed, true);
    }
    while (!atomic_load(&source->changed))
        usleep(50);
    return result;
}

static void test_files_changed_while_read(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 6; round++) {
        scene s = {.source = {.anywhere = fake_below(2) == 0}};
        if (!scene_loader(&s, readers[round % 2])) continue;
        scene_files(&s, round < 4 ? SCENE_CHUNK : 0);
        char path[1200];
        fake_path(&s.variant, 0, path, sizeof path);
        s.source.path = path;
        s.source.change = round < 2 ? cut : round < 4 ? grow : touch;
        s.source.fault = change_file;
        scene_submit(&s);
        scene_await(&s);
        if (round < 2)
            expect_failure(&s, BD_E_LENGTH, path, "cut while it was read");
        else if (round < 4)
            expect_failure(&s, BD_E_LENGTH, path, "size changed from 200001 to 300000");
        else
            expect_failure(&s, BD_E_CORRUPT, path, "changed or replaced");
        assert_true(s.load.ready_count < FAKE_READY_COUNT);
        scene_end(&s);
    }
}

/* Holds the loader back until the workers have filled everything: of the first block that it takes
 * back on, nothing but the blocks it has not taken back tells that the load is not over. */
static uint32_t ready_when_all_is_fed(const bd_overlay_feed *feed) {
    fake_source *source = feed->source;
    for (uint32_t tries = 0; atomic_load(&feed->fed) < feed->total; tries++) {
        BD_ASSERT(tries < 600000);
        usleep(100);
    }
    if (source->change && !atomic_exchange(&source->changing, true)) source->change(source->path);
    return fake_feed_ready(feed);
}

/* Everything is in its pages, but the file turns out to have grown when its last block is taken
 * back: no load calls all of it ready before. */
static void test_last_index_waits_for_the_last_block(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 4; round++) {
        scene s = {.source = {.anywhere = true, .together = 2}};
        const uint64_t bytes = SCENE_CHUNK + 1 + fake_below(SCENE_CHUNK);
        const bd_loader_options options = {
            .io = readers[round % 2], .block_bytes = SCENE_CHUNK, .depth = 2};
        bd_loader_source table = fake_loader_source(&s.source);
        table.feed_ready = ready_when_all_is_fed;
        bd_status status = bd_loader_create_with(&options, &table, &s.loader, NULL);
        if (status == BD_E_UNSUPPORTED) continue;
        assert_int_equal(status, BD_OK);
        scene_fill(&s, &bytes, 1, SCENE_CHUNK);
        char path[1200];
        fake_path(&s.variant, 0, path, sizeof path);
        s.source.path = path;
        s.source.change = round < 2 ? grow : NULL;
        scene_submit(&s);
        scene_await(&s);
        assert_int_equal(s.source.fed_bytes, bytes);
        if (round < 2) {
            expect_failure(&s, BD_E_LENGTH, path, "size changed");
            assert_int_equal(s.load.ready_count, FAKE_READY_COUNT - 1);
        } else {
            assert_int_equal(s.load.status, BD_OK);
            assert_int_equal(s.load.ready_count, FAKE_READY_COUNT);
            fake_overlay_destroy(s.load.overlay);
        }
        scene_end(&s);
    }
}

static void test_whole_file_check(void **state) {
    (void)state;
    for (size_t r = 0; r < 2; r++) {
        scene s;
        if (!scene_make(&s, readers[r], 0)) continue;
        s.source.verify_status = BD_E_CORRUPT;
        scene_submit(&s);
        scene_await(&s);
        expect_failure(&s, BD_E_CORRUPT, s.variant.names[0], "planted verify fault");
        assert_int_equal(s.source.fed_bytes, 0);
        /* A cancelled load waits for its running check: the check uses the load's delta. */
        s.source.verify_status = BD_OK;
        s.source.verify_sleep_us = 20000;
        bd_load again = {
            .delta = s.load.delta, .pages = s.load.pages, .page_count = s.load.page_count};
        assert_int_equal(bd_loader_submit(s.loader, &again, NULL), BD_OK);
        while (atomic_load(&s.source.verifies) < 2)
            usleep(100);
        bd_loader_destroy(s.loader);
        assert_true(bd_load_finished(&again));
        assert_int_equal(again.status, BD_CANCELLED);
        s.loader = NULL;
        scene_end(&s);
    }
}

/* ---- read errors ---- */

static int32_t disk_error(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)source, (void)bytes;
    return offset == 3 * SCENE_CHUNK ? -EIO : result;
}

static int32_t always_again(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)source, (void)bytes;
    return offset == 3 * SCENE_CHUNK ? -EAGAIN : result;
}

static int32_t always_refused(fake_source *source, uint64_t offset, uint32_t bytes,
                              int32_t result) {
    (void)source, (void)bytes, (void)offset, (void)result;
    return -EINVAL;
}

static int32_t nothing_more(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)source, (void)bytes;
    return offset == 3 * SCENE_CHUNK ? 0 : result;
}

static void test_read_errors(void **state) {
    (void)state;
    for (size_t r = 0; r < 2; r++) {
        for (uint32_t what = 0; what < 4; what++) {
            scene s;
            if (!scene_make(&s, readers[r], SCENE_CHUNK)) continue;
            int32_t (*const faults[])(fake_source *, uint64_t, uint32_t, int32_t) = {
                disk_error, always_again, always_refused, nothing_more};
            s.source.fault = faults[what];
            scene_submit(&s);
            scene_await(&s);
            const char *file = s.variant.names[0];
            if (what == 0)
                expect_failure(&s, BD_E_IO, file,
                               "reading bytes 49152 to 65536 failed: Input/output");
            if (what == 1)
                expect_failure(&s, BD_E_IO, file,
                               "reading bytes 49152 to 65536 failed: Resource temp");
            if (what == 2) expect_failure(&s, BD_E_IO, file, "Invalid argument");
            if (what == 3)
                expect_failure(&s, BD_E_LENGTH, file, "ends at byte 49152 of the 200001");
            scene_end(&s);
        }
    }
}

/* ---- faults from above, and cancelling ---- */

static void test_other_rooms_fail(void **state) {
    (void)state;
    for (uint32_t what = 0; what < 4; what++) {
        scene s;
        if (!scene_make(&s, readers[what % 2], SCENE_CHUNK)) continue;
        if (what == 0) s.source.plan_status = BD_E_MISMATCH;
        if (what == 1) s.source.overlay_status = BD_E_UNSUPPORTED;
        if (what == 2) s.source.feed_status = BD_E_DEVICE;
        if (what == 2) s.source.feed_fails_at = 100000;
        if (what == 3) s.load.page_count--;
        scene_submit(&s);
        scene_await(&s);
        if (what == 0) expect_failure(&s, BD_E_MISMATCH, "unlucky", "planted plan");
        if (what == 1) expect_failure(&s, BD_E_UNSUPPORTED, "unlucky", "planted overlay");
        if (what == 2) expect_failure(&s, BD_E_DEVICE, "feed", "planted feed");
        if (what == 3) expect_failure(&s, BD_E_INTERNAL, "unlucky", "pages");
        scene_end(&s);
    }
}

static int32_t cancel_when_read(fake_source *source, uint64_t offset, uint32_t bytes,
                                int32_t result) {
    (void)bytes;
    union { /* the path carries the load here */
        const char *path;
        bd_load *load;
    } carried = {.path = source->path};
    if (offset >= 5 * SCENE_CHUNK) atomic_store(&carried.load->cancel, true);
    return result;
}

static void test_cancel(void **state) {
    (void)state;
    for (size_t r = 0; r < 2; r++) {
        for (uint32_t when = 0; when < 2; when++) {
            scene s;
            if (!scene_make(&s, readers[r], SCENE_CHUNK)) continue;
            union {
                const char *path;
                bd_load *load;
            } carried = {.load = &s.load};
            if (when == 0) atomic_store(&s.load.cancel, true);
            s.source.path = carried.path;
            s.source.fault = cancel_when_read;
            scene_submit(&s);
            scene_await(&s);
            expect_failure(&s, BD_CANCELLED, "unlucky", "cancelled");
            assert_true(s.load.read_bytes < s.variant.total_bytes);
            if (when == 0) assert_int_equal(s.source.plans, 0);
            scene_end(&s);
        }
    }
}

static int32_t slow(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)source, (void)bytes, (void)offset;
    usleep(1000);
    return result;
}

/* Destroy while loads run and wait: all of them finish, as cancelled or done. */
static void test_destroy_under_load(void **state) {
    (void)state;
    for (size_t r = 0; r < 2; r++) {
        scene s;
        if (!scene_make(&s, readers[r], SCENE_CHUNK)) continue;
        s.source.fault = slow;
        bd_load loads[6];
        for (uint32_t i = 0; i < 6; i++) {
            loads[i] = (bd_load){
                .delta = s.load.delta, .pages = s.load.pages, .page_count = s.load.page_count};
            assert_int_equal(bd_loader_submit(s.loader, &loads[i], NULL), BD_OK);
        }
        usleep(3000);
        bd_loader_destroy(s.loader);
        uint32_t cancelled = 0;
        for (uint32_t i = 0; i < 6; i++) {
            assert_true(bd_load_finished(&loads[i]));
            if (loads[i].status == BD_CANCELLED)
                cancelled++;
            else
                fake_overlay_destroy(loads[i].overlay);
        }
        assert_true(cancelled >= 4);
        s.loader = NULL;
        scene_end(&s);
    }
}

/* ---- a kernel that says no ---- */

static void forbid_io_uring(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = 4, .filter = filter};
    BD_ASSERT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    BD_ASSERT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* 0: as expected. Runs in a child, so it reports by its exit status. */
static int refused_child(void) {
    forbid_io_uring();
    fake_source source = {0};
    const bd_loader_source table = fake_loader_source(&source);
    bd_loader_options options = {.io = BD_IO_URING};
    bd_loader *loader = NULL;
    bd_error err = {0};
    if (bd_loader_create_with(&options, &table, &loader, &err) != BD_E_UNSUPPORTED) return 1;
    if (loader || !strstr(err.message, "seccomp")) return 2;
    options.io = BD_IO_AUTO;
    if (bd_loader_create_with(&options, &table, &loader, &err) != BD_OK) return 3;
    int rc = 0;
    if (strcmp(bd_loader_io_name(loader), "pread") != 0) rc = 4;
    if (!strstr(bd_loader_io_reason(loader), "io_uring is refused (seccomp")) rc = 5;
    bd_loader_destroy(loader);
    return rc;
}

/* Whether no ring at all can be made here. */
static bool forbidden(void) {
    struct io_uring_params params = {0};
    const long fd = syscall(SYS_io_uring_setup, 2, &params);
    if (fd >= 0) close((int)fd);
    return fd < 0;
}

static int memlock_child(void) {
    const struct rlimit limit = {.rlim_cur = 65536, .rlim_max = 65536};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 1;
    /* Root is exempt from the limit. It counts all of a user: newer kernels the rings too, also
     * those of a run beside this one. */
    if (geteuid() == 0 && setuid(100000 + (uid_t)getpid()) != 0) return 2;
    scene s = {0};
    int rc = 0;
    /* Larger staging than the limit: registering fails, reading works. */
    const bd_loader_options options = {.io = BD_IO_URING, .block_bytes = SCENE_CHUNK, .depth = 64};
    const bd_loader_source table = fake_loader_source(&s.source);
    const bd_status status = bd_loader_create_with(&options, &table, &s.loader, NULL);
    if (status != BD_OK) return status == BD_E_UNSUPPORTED && forbidden() ? 77 : 3;
    scene_files(&s, SCENE_CHUNK);
    if (!strstr(bd_loader_io_reason(s.loader), "RLIMIT_MEMLOCK")) rc = 4;
    scene_submit(&s);
    scene_await(&s);
    if (s.load.status != BD_OK) rc = 5;
    fake_overlay_destroy(s.load.overlay);
    if (memcmp(s.memory, s.variant.content[0], scene_sizes[0]) != 0) rc = 6;
    scene_end(&s);
    return rc;
}

static void forbid_direct(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_DIRECT, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = 6, .filter = filter};
    BD_ASSERT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    BD_ASSERT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* A file system that takes no O_DIRECT: both readers read buffered. */
static int no_direct_child(void) {
    forbid_direct();
    for (size_t r = 0; r < 2; r++) {
        scene s;
        if (!scene_make(&s, readers[r], SCENE_CHUNK)) continue;
        char path[1200];
        fake_path(&s.variant, 0, path, sizeof path);
        if (open(path, O_RDONLY | O_DIRECT | O_CLOEXEC) >= 0 || errno != EINVAL) return 1;
        scene_submit(&s);
        scene_await(&s);
        if (s.load.status != BD_OK) return 2;
        fake_overlay_destroy(s.load.overlay);
        if (memcmp(s.memory, s.variant.content[0], scene_sizes[0]) != 0) return 3;
        scene_end(&s);
    }
    return 0;
}

static int run_child(int (*body)(void)) {
    fflush(NULL);
    pid_t pid = fork();
    BD_ASSERT(pid >= 0);
    if (pid == 0) _exit(body());
    int wait_status = 0;
    BD_ASSERT(waitpid(pid, &wait_status, 0) == pid);
    return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 1000 + wait_status;
}

static void test_io_uring_refused(void **state) {
    (void)state;
    assert_int_equal(run_child(refused_child), 0);
}

static void test_memlock_limit(void **state) {
    (void)state;
    int rc = run_child(memlock_child);
    if (rc == 77) skip();
    assert_int_equal(rc, 0);
}

/* /dev/null in the place of this process's ring. */
static bool break_ring(void) {
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    bool found = false;
    for (int fd = 0; fd < 256 && !found; fd++) {
        char name[32], target[64] = "";
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        if (readlink(name, target, sizeof target - 1) < 0) continue;
        if (strstr(target, "io_uring")) found = dup2(null, fd) == fd;
    }
    close(null);
    return found;
}

/* Of a ring that stops working the kernel may write into blocks later: nothing is read into them in
 * any other way, from memory either, and every load fails. */
static int broken_ring_child(void) {
    scene s = {0};
    if (!scene_loader(&s, BD_IO_URING) || !break_ring()) return 77;
    for (uint32_t i = 0; i < 4; i++) {
        const char *folder = i % 2 || access("/dev/shm", W_OK) != 0 ? P_tmpdir : "/dev/shm";
        scene_fill_in(folder, &s, scene_sizes, 2, SCENE_CHUNK);
        scene_submit(&s);
        scene_await(&s);
        /* The first may be read before the ring is asked for anything. */
        if (i > 0 && s.load.status != BD_E_IO) return 1 + (int)i;
        fake_overlay_destroy(s.load.overlay);
        fake_variant_remove(&s.variant);
        free(s.memory);
        free(s.pages);
    }
    bd_loader_destroy(s.loader);
    return 0;
}

static void test_broken_ring(void **state) {
    (void)state;
    const int rc = run_child(broken_ring_child);
    if (rc == 77) skip();
    assert_int_equal(rc, 0);
}

static void test_no_direct(void **state) {
    (void)state;
    assert_int_equal(run_child(no_direct_child), 0);
}

/* Killed while reads fly, again and again: nothing is left behind that hurts the next process. */
static void test_killed_while_loading(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 12; round++) {
        scene s = {0};
        scene_files(&s, SCENE_CHUNK);
        fflush(NULL);
        pid_t pid = fork(); /* before any loader: sanitizers want no threads around it */
        assert_true(pid >= 0);
        if (pid == 0) {
            if (!scene_loader(&s, readers[round % 2])) pause();
            for (;;) {
                bd_load load = {
                    .delta = s.load.delta, .pages = s.load.pages, .page_count = s.load.page_count};
                if (bd_loader_submit(s.loader, &load, NULL) != BD_OK) _exit(2);
                while (!bd_load_finished(&load))
                    usleep(50);
                fake_overlay_destroy(load.overlay);
            }
        }
        usleep((useconds_t)(2000 + fake_below(20000)));
        assert_int_equal(kill(pid, SIGKILL), 0);
        int status = 0;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        if (scene_loader(&s, readers[round % 2])) {
            scene_submit(&s);
            scene_await(&s);
            assert_int_equal(s.load.status, BD_OK);
            fake_overlay_destroy(s.load.overlay);
            assert_memory_equal(s.memory, s.variant.content[0], scene_sizes[0]);
        }
        scene_end(&s);
    }
}

int main(void) {
    fake_seed("test_loader_faults");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damaged_chunk),
        cmocka_unit_test(test_damage_in_every_chunk),
        cmocka_unit_test(test_files_at_open),
        cmocka_unit_test(test_files_changed_while_read),
        cmocka_unit_test(test_last_index_waits_for_the_last_block),
        cmocka_unit_test(test_whole_file_check),
        cmocka_unit_test(test_read_errors),
        cmocka_unit_test(test_other_rooms_fail),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_destroy_under_load),
        cmocka_unit_test(test_io_uring_refused),
        cmocka_unit_test(test_memlock_limit),
        cmocka_unit_test(test_broken_ring),
        cmocka_unit_test(test_no_direct),
        cmocka_unit_test(test_killed_while_loading),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
