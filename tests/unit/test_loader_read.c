/* test_loader_read.c - what reaches the pages is what was written to disk: both readers, odd sizes,
 * several files, chunk sums of every kind, many loads at once, and reads that are cut short,
 * interrupted or refused. The reference is the random content kept in memory, the sums are xxHash's
 * own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <linux/magic.h>
#include <pthread.h>
#include <sys/vfs.h>

#include "loader/workers.h"
#include "loader_fake.h"

static const bd_io_choice readers[] = {BD_IO_URING, BD_IO_PREAD};

typedef struct page_set {
    void **pages;
    uint8_t *memory;
    uint32_t count;
} page_set;

static page_set pages_make(uint64_t total_bytes) {
    page_set set = {.count = fake_pages_for(total_bytes)};
    set.memory = calloc(set.count, FAKE_PAGE_BYTES);
    set.pages = calloc(set.count, sizeof(void *));
    assert_non_null(set.memory);
    assert_non_null(set.pages);
    /* Backwards, so that nothing can count on pages being neighbours. */
    for (uint32_t i = 0; i < set.count; i++)
        set.pages[i] = set.memory + (size_t)(set.count - 1 - i) * FAKE_PAGE_BYTES;
    return set;
}

static void pages_free(page_set *set) {
    free(set->pages);
    free(set->memory);
}

static void check_pages(const page_set *set, const fake_variant *variant) {
    uint64_t at = 0;
    for (uint32_t f = 0; f < variant->delta.shard_count; f++) {
        for (uint64_t b = 0; b < variant->files[f].bytes; b++, at++) {
            const uint8_t *page = set->pages[at / FAKE_PAGE_BYTES];
            if (page[at % FAKE_PAGE_BYTES] == variant->content[f][b]) continue;
            fail_msg("file %u byte %" PRIu64 " is wrong in the pages", f, b);
        }
    }
}

static bd_load load_of(const fake_variant *variant, const page_set *set) {
    return (bd_load){.delta = &variant->delta, .pages = set->pages, .page_count = set->count};
}

static void await(bd_load *load) {
    while (!bd_load_finished(load))
        usleep(200);
}

static bd_loader *loader_make(fake_source *source, bd_io_choice io, uint32_t block_bytes,
                              uint32_t depth, uint32_t parallel) {
    const bd_loader_options options = {.io = io,
                                       .read_threads = 3,
                                       .block_bytes = block_bytes,
                                       .depth = depth,
                                       .loads_in_parallel = parallel};
    const bd_loader_source table = fake_loader_source(source);
    bd_loader *loader = NULL;
    bd_error err = {0};
    bd_status status = bd_loader_create_with(&options, &table, &loader, &err);
    if (status == BD_E_UNSUPPORTED) {
        print_message("io_uring is refused here: %s\n", err.message);
        return NULL;
    }
    assert_int_equal(status, BD_OK);
    assert_string_equal(bd_loader_io_name(loader), io == BD_IO_URING ? "uring" : "pread");
    return loader;
}

/* Host memory for all files, in blocks that have nothing to do with theirs. */
static bd_load_host host_make(uint64_t bytes) {
    const uint64_t block_bytes = 1 + fake_below(70000), count = (bytes - 1) / block_bytes + 1;
    void **blocks = calloc(count, sizeof *blocks);
    assert_non_null(blocks);
    for (uint64_t i = 0; i < count; i++) {
        blocks[i] = malloc(block_bytes);
        assert_non_null(blocks[i]);
    }
    return (bd_load_host){.blocks = blocks, .block_bytes = block_bytes, .bytes = bytes};
}

static void host_free(bd_load_host *host) {
    for (uint64_t i = 0; i < (host->bytes - 1) / host->block_bytes + 1; i++)
        free(host->blocks[i]);
    free((void *)(uintptr_t)host->blocks);
    if (host->filled) host->plan_destroy(&host->plan);
}

static void check_loaded(bd_load *load, const page_set *set, const fake_variant *variant) {
    if (load->status != BD_OK) fail_msg("%s: %s", load->error.subject, load->error.message);
    assert_int_equal(load->read_bytes, variant->total_bytes);
    assert_int_equal(load->ready_count, FAKE_READY_COUNT);
    assert_int_equal(load->pages_used, set->count);
    assert_non_null(load->overlay);
    check_pages(set, variant);
    fake_overlay_destroy(load->overlay);
}

/* What the load left in host memory is the files, and opens none. */
static void load_copy(bd_loader *loader, const fake_variant *variant, bd_load_host *host) {
    assert_true(host->filled);
    for (uint32_t i = 0; i < variant->delta.shard_count; i++) {
        char path[1200];
        fake_path(variant, i, path, sizeof path);
        assert_int_equal(unlink(path), 0);
    }
    page_set set = pages_make(variant->total_bytes);
    bd_load load = load_of(variant, &set);
    load.host = host;
    assert_int_equal(bd_loader_submit(loader, &load, NULL), BD_OK);
    await(&load);
    check_loaded(&load, &set, variant);
    assert_true(host->filled);
    pages_free(&set);
}

/* One load of fresh files through one reader; everything must arrive. */
static void load_and_compare(fake_source *source, bd_io_choice io, uint32_t block_bytes,
                             const uint64_t *sizes, uint32_t files, uint64_t chunk_bytes,
                             bool copy) {
    bd_loader *loader = loader_make(source, io, block_bytes, 1 + (uint32_t)fake_below(6), 1);
    if (!loader) return;
    fake_variant variant;
    fake_variant_make(&variant, "v", sizes, files, chunk_bytes);
    page_set set = pages_make(variant.total_bytes);
    bd_load load = load_of(&variant, &set);
    bd_load_host host = host_make(variant.total_bytes);
    if (copy) load.host = &host;
    assert_int_equal(bd_loader_submit(loader, &load, NULL), BD_OK);
    await(&load);
    check_loaded(&load, &set, &variant);
    assert_true(load.finished_us >= load.started_us);
    if (copy) load_copy(loader, &variant, &host);
    bd_loader_destroy(loader);
    host_free(&host);
    pages_free(&set);
    fake_variant_remove(&variant);
}

static void test_sizes(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1,     511,   512,    513,    4095,   4096,
                                     4097,  8191,  65535,  65536,  65537,  131072,
                                     99991, 16384, 123457, 262144, 300001, 524287};
    for (size_t r = 0; r < 2; r++) {
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            fake_source source = {0};
            load_and_compare(&source, readers[r], 65536, &sizes[i], 1, 65536, true);
            assert_int_equal(source.verifies, 0);
        }
    }
}

static void test_random_shapes(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 60; round++) {
        uint64_t sizes[FAKE_FILES_MAX];
        uint32_t files = 1 + (uint32_t)fake_below(FAKE_FILES_MAX);
        for (uint32_t i = 0; i < files; i++)
            sizes[i] = 1 + fake_below(200000);
        uint32_t block = 4096 + (uint32_t)fake_below(60000);
        uint64_t chunk = 1000 + fake_below(2 * block); /* odd, and sometimes larger than a block */
        if (round % 7 == 0) chunk = 0;
        fake_source source = {.anywhere = round % 3 == 1, .later = round % 3 == 2};
        load_and_compare(&source, readers[round % 2], block, sizes, files, chunk, true);
        bool whole = chunk == 0 || chunk > block;
        if (source.plans) assert_int_equal(source.verifies, whole ? files : 0);
    }
}

/* ---- faulty reads ---- */

/* Whole sectors, at least one: a count of 0 would mean the end of the file. */
static int32_t cut_short(int32_t result) {
    int32_t sectors = result / 4096;
    return sectors > 0 ? 4096 * (1 + (int32_t)fake_below((uint64_t)sectors)) : result;
}

static int32_t random_faults(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)source, (void)bytes, (void)offset;
    if (result <= 0) return result;
    switch (fake_below(6)) {
    case 0:
        return -EINTR;
    case 1:
        return -EAGAIN;
    case 2:
        return cut_short(result);
    case 3:
        /* Inside a sector of the alignment; seldom, for nine times in a row are an end. */
        return result > 512 && fake_below(8) == 0 ? 512 : result;
    default:
        return result;
    }
}

static int32_t mostly_short(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)source, (void)bytes, (void)offset;
    return result > 4096 ? 4096 : result;
}

/* What O_DIRECT would refuse must not even be asked for: the loader would fall back to buffered
 * reads and arrive all the same. */
static _Atomic uint32_t unaligned;

static int32_t watch_alignment(fake_source *source, uint64_t offset, uint32_t bytes,
                               int32_t result) {
    if (offset % 4096 != 0 || bytes % 4096 != 0) atomic_fetch_add(&unaligned, 1);
    return random_faults(source, offset, bytes, result);
}

static bool directs(void) { /* whether the tests' directory takes O_DIRECT */
    char path[] = P_tmpdir "/bd-direct-XXXXXX";
    int fd = mkstemp(path);
    BD_ASSERT(fd >= 0);
    close(fd);
    fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd >= 0) close(fd);
    unlink(path);
    return fd >= 0;
}

static void test_direct_reads_stay_aligned(void **state) {
    (void)state;
    static const uint64_t sizes[] = {262145, 70001};
    if (!directs()) skip();
    for (size_t r = 0; r < 2; r++) {
        for (uint32_t round = 0; round < 5; round++) {
            fake_source source = {.fault = watch_alignment};
            load_and_compare(&source, readers[r], 32768, sizes, 2, 32768, true);
        }
    }
    assert_int_equal(atomic_load(&unaligned), 0);
}

static int32_t refuse_once(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    (void)bytes, (void)offset;
    return atomic_load(&source->faults) < 1 ? -EINVAL : result;
}

static void test_faulty_reads_still_arrive(void **state) {
    (void)state;
    int32_t (*const faults[])(fake_source *, uint64_t, uint32_t,
                              int32_t) = {random_faults, mostly_short, refuse_once};
    static const uint64_t sizes[] = {262145, 70001};
    for (size_t f = 0; f < 3; f++) {
        for (size_t r = 0; r < 2; r++) {
            fake_source source = {.fault = faults[f]};
            load_and_compare(&source, readers[r], 32768, sizes, 2, 32768, true);
            if (source.plans) assert_true(source.faults > 0);
        }
    }
}

/* ---- many at once ---- */

enum { MANY = 24 };

static void many_at_once(bd_io_choice io, bool anywhere, bool later) {
    fake_source source = {.anywhere = anywhere, .later = later};
    bd_loader *loader = loader_make(&source, io, 16384, 7, 3);
    if (!loader) return;
    static fake_variant variants[MANY];
    page_set sets[MANY];
    bd_load loads[MANY];
    for (uint32_t i = 0; i < MANY; i++) {
        uint64_t sizes[2] = {1 + fake_below(150000), 1 + fake_below(40000)};
        fake_variant_make(&variants[i], "v", sizes, 2, 16384);
        sets[i] = pages_make(variants[i].total_bytes);
        loads[i] = load_of(&variants[i], &sets[i]);
        assert_int_equal(bd_loader_submit(loader, &loads[i], NULL), BD_OK);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        await(&loads[i]);
        assert_int_equal(loads[i].status, BD_OK);
        check_pages(&sets[i], &variants[i]);
        fake_overlay_destroy(loads[i].overlay);
    }
    bd_loader_destroy(loader);
    assert_int_equal(source.plans, MANY);
    assert_int_equal(source.running, 0);
    assert_in_range(source.running_max, 1, 3);
    for (uint32_t i = 0; i < MANY; i++) {
        pages_free(&sets[i]);
        fake_variant_remove(&variants[i]);
    }
}

static void test_many_at_once(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 6; i++)
        many_at_once(readers[i % 2], i / 2 == 1, i / 2 == 2);
}

/* ---- threads ---- */

/* No sum is compared before two are being made. */
static void test_sums_at_once(void **state) {
    (void)state;
    const uint64_t size = 400001;
    for (uint32_t i = 0; i < 4; i++) {
        fake_source source = {.together = 2, .anywhere = i / 2 == 1};
        bd_loader *loader = loader_make(&source, readers[i % 2], 16384, 4, 1);
        if (!loader) continue;
        fake_variant variant;
        fake_variant_make(&variant, "v", &size, 1, 16384);
        page_set set = pages_make(size);
        bd_load load = load_of(&variant, &set);
        assert_int_equal(bd_loader_submit(loader, &load, NULL), BD_OK);
        await(&load);
        check_loaded(&load, &set, &variant);
        bd_loader_destroy(loader);
        pages_free(&set);
        fake_variant_remove(&variant);
    }
}

/* What a device copies from is what was read into, and is given back as it came. */
static void test_staging_is_locked(void **state) {
    (void)state;
    const uint64_t sizes[2] = {150001, 70000};
    for (uint32_t i = 0; i < 4; i++) {
        fake_source source = {.locks = true, .refuses_lock = i / 2 == 1, .later = true};
        load_and_compare(&source, readers[i % 2], 16384, sizes, 2, 16384, false);
        if (source.plans) assert_int_equal(source.unlocks, source.refuses_lock ? 0 : 1);
    }
}

static _Atomic uint32_t by_ring, by_workers;

static int32_t watch_thread(fake_source *source, uint64_t offset, uint32_t bytes, int32_t result) {
    char name[16] = "";
    (void)source, (void)offset, (void)bytes;
    pthread_getname_np(pthread_self(), name, sizeof name);
    atomic_fetch_add(strncmp(name, "bd-read-", 8) == 0 ? &by_workers : &by_ring, 1);
    return result;
}

/* A ring would copy what lies in memory on the loader's own thread. */
static void test_memory_is_read_by_workers(void **state) {
    (void)state;
    const uint64_t size = 300001;
    struct statfs fs;
    fake_source source = {.fault = watch_thread};
    if (statfs("/dev/shm", &fs) != 0 || fs.f_type != TMPFS_MAGIC || access("/dev/shm", W_OK) != 0)
        skip();
    bd_loader *loader = loader_make(&source, BD_IO_URING, 16384, 4, 1);
    if (!loader) skip();
    fake_variant variant;
    fake_variant_make_in("/dev/shm", &variant, "v", &size, 1, 16384);
    page_set set = pages_make(size);
    bd_load load = load_of(&variant, &set);
    atomic_store(&by_ring, 0);
    atomic_store(&by_workers, 0);
    assert_int_equal(bd_loader_submit(loader, &load, NULL), BD_OK);
    await(&load);
    check_loaded(&load, &set, &variant);
    assert_int_equal(by_ring, 0);
    assert_true(by_workers >= 19);
    bd_loader_destroy(loader);
    pages_free(&set);
    fake_variant_remove(&variant);
}

/* Works of a few loads, some of which take for ever: not more than its share of the reading threads
 * is one load's, not more than there are read at once, and what is read comes back finished. Load
 * 2's are copies, which have the other threads too. */
enum { WORKS = 64, LOADS = 4, READ_THREADS = 4 };

typedef struct work {
    bd_message message;
    uint32_t load;
    bool is_read, finished;
} work;

static struct {
    uint32_t reading[LOADS]; /* guarded by the workers' lock */
    _Atomic uint32_t now[LOADS], most[LOADS], all_now, all_most;
    _Atomic bool hang; /* this load: */
    uint32_t slow;
} place;

static void note_most(_Atomic uint32_t *most, uint32_t now) {
    uint32_t before = atomic_load(most);
    while (before < now && !atomic_compare_exchange_weak(most, &before, now)) {
    }
}

static bool read_one(void *ctx, bd_message *message) {
    work *w = (work *)message;
    (void)ctx;
    const uint32_t waits = w->load != 2;
    note_most(&place.all_most, atomic_fetch_add(&place.all_now, waits) + waits);
    note_most(&place.most[w->load], atomic_fetch_add(&place.now[w->load], 1) + 1);
    while (w->load == place.slow && atomic_load(&place.hang))
        usleep(100);
    w->is_read = true;
    atomic_fetch_sub(&place.now[w->load], 1);
    atomic_fetch_sub(&place.all_now, waits);
    return w->load != 3; /* the last load's cannot be read */
}

static void finish_one(void *ctx, bd_message *message) {
    (void)ctx;
    ((work *)message)->finished = true;
}

static uint32_t *reading_of(void *ctx, bd_message *message) {
    (void)ctx;
    return &place.reading[((work *)message)->load];
}

static bool copies_one(void *ctx, bd_message *message) {
    (void)ctx;
    return ((work *)message)->load == 2;
}

static uint32_t take_some(bd_workers *workers, bd_mailbox *inbox) {
    uint32_t count = 0;
    bd_mailbox_wait(inbox, 20000);
    for (bd_message *m = bd_workers_take(workers), *next; m; m = next) {
        next = m->next;
        const work *w = (work *)m;
        assert_true(w->is_read);
        assert_int_equal(w->finished, w->load != 3);
        count++;
    }
    return count;
}

static void test_a_share_of_threads(void **state) {
    (void)state;
    static work works[WORKS];
    bd_workers *workers;
    bd_mailbox *inbox;
    memset(&place, 0, sizeof place);
    memset(works, 0, sizeof works);
    assert_int_equal(bd_mailbox_create(&inbox, 0, true, NULL), BD_OK);
    const bd_workers_options options = {.read_threads = READ_THREADS,
                                        .inbox = inbox,
                                        .read = read_one,
                                        .finish = finish_one,
                                        .reading = reading_of,
                                        .copies = copies_one};
    assert_int_equal(bd_workers_create(&options, &workers, NULL), BD_OK);
    bd_workers_set_share(workers, 2);
    atomic_store(&place.hang, true);
    uint32_t hanging = 0, back = 0;
    for (uint32_t i = 0; i < WORKS; i++) { /* the slow load's first */
        works[i].load = i < WORKS / 2 ? 0 : 1 + (uint32_t)fake_below(LOADS - 1);
        works[i].is_read = works[i].load != 0 && fake_below(4) == 0 && works[i].load != 3;
        hanging += works[i].load == 0;
        if (works[i].is_read)
            bd_workers_finish(workers, &works[i].message);
        else
            bd_workers_read(workers, &works[i].message);
    }
    for (uint32_t looks = 0; back < WORKS - hanging; looks++) {
        if (looks > 1000) fail_msg("one load has all threads");
        back += take_some(workers, inbox);
    }
    assert_int_equal(back, WORKS - hanging); /* and none of the slow one's */
    atomic_store(&place.hang, false);
    while (back < WORKS)
        back += take_some(workers, inbox);
    for (uint32_t i = 0; i < LOADS; i++)
        assert_in_range(place.most[i], 0, i == 2 ? bd_workers_threads(2) : 2);
    assert_in_range(place.all_most, 1, READ_THREADS);
    bd_workers_destroy(workers);
    bd_mailbox_destroy(inbox);
}

/* The works of one load take for ever, which were first, the others are `other`'s: these all come
 * back meanwhile. */
static void others_go_on(uint32_t slow, uint32_t slow_count, uint32_t other, uint32_t share) {
    static work works[WORKS];
    bd_workers *workers;
    bd_mailbox *inbox;
    memset(&place, 0, sizeof place);
    memset(works, 0, sizeof works);
    assert_int_equal(bd_mailbox_create(&inbox, 0, true, NULL), BD_OK);
    const bd_workers_options options = {.read_threads = READ_THREADS,
                                        .inbox = inbox,
                                        .read = read_one,
                                        .finish = finish_one,
                                        .reading = reading_of,
                                        .copies = copies_one};
    assert_int_equal(bd_workers_create(&options, &workers, NULL), BD_OK);
    bd_workers_set_share(workers, share);
    place.slow = slow;
    atomic_store(&place.hang, true);
    for (uint32_t i = 0; i < WORKS; i++) {
        works[i].load = i < slow_count ? slow : other;
        bd_workers_read(workers, &works[i].message);
    }
    uint32_t back = 0;
    for (uint32_t looks = 0; back < WORKS - slow_count; looks++) {
        if (looks > 1000) fail_msg("load %u waits for load %u", other, slow);
        back += take_some(workers, inbox);
    }
    for (uint32_t i = 0; i < WORKS; i++)
        assert_int_equal(works[i].finished, works[i].load == other);
    atomic_store(&place.hang, false);
    while (back < WORKS)
        back += take_some(workers, inbox);
    bd_workers_destroy(workers);
    bd_mailbox_destroy(inbox);
}

/* Copies begin while all that may read at once do; reads begin while copies have their share. */
static void test_copies_take_no_turns(void **state) {
    (void)state;
    others_go_on(0, READ_THREADS, 2, READ_THREADS);
    others_go_on(2, 2 * READ_THREADS, 1, READ_THREADS - 1);
}

static void count_notify(void *ctx) {
    atomic_fetch_add((_Atomic uint32_t *)ctx, 1);
}

static void test_metrics_and_notify(void **state) {
    (void)state;
    fake_source source = {0};
    const bd_loader_source table = fake_loader_source(&source);
    bd_metrics *metrics = bd_metrics_create(64);
    assert_non_null(metrics);
    _Atomic uint32_t notified = 0;
    const bd_loader_options options = {
        .block_bytes = 4096, .metrics = metrics, .notify = count_notify, .notify_ctx = &notified};
    bd_loader *loader = NULL;
    assert_int_equal(bd_loader_create_with(&options, &table, &loader, NULL), BD_OK);
    fake_variant variant;
    const uint64_t size = 100001;
    fake_variant_make(&variant, "v", &size, 1, 4096);
    page_set set = pages_make(size);
    bd_load load = load_of(&variant, &set);
    assert_int_equal(bd_loader_submit(loader, &load, NULL), BD_OK);
    await(&load);
    assert_int_equal(load.status, BD_OK);
    fake_overlay_destroy(load.overlay);
    bd_loader_destroy(loader);
    assert_int_equal(notified, FAKE_READY_COUNT + 1); /* each layer, and the end */
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_metrics_write(metrics, &text);
    assert_non_null(strstr(text.data, "bitdelta_delta_read_bytes_total 100001\n"));
    assert_non_null(strstr(text.data, "bitdelta_delta_load_seconds_count 1\n"));
    assert_non_null(strstr(text.data, "bitdelta_loader_io{kind=\""));
    bd_strbuf_deinit(&text);
    bd_metrics_destroy(metrics);
    pages_free(&set);
    fake_variant_remove(&variant);
}

static void test_options(void **state) {
    (void)state;
    fake_source source = {0};
    const bd_loader_source table = fake_loader_source(&source);
    const bd_loader_options bad[] = {{.block_bytes = 100},
                                     {.block_bytes = 1u << 30},
                                     {.depth = 100000},
                                     {.depth = 2, .loads_in_parallel = 3}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        bd_loader *loader = NULL;
        bd_error err = {0};
        assert_int_equal(bd_loader_create_with(&bad[i], &table, &loader, &err), BD_E_ARGUMENT);
        assert_null(loader);
        assert_true(err.subject[0] != '\0');
    }
    bd_load empty = {0};
    bd_loader *loader = loader_make(&source, BD_IO_PREAD, 0, 0, 0);
    assert_int_equal(bd_loader_submit(loader, &empty, NULL), BD_E_ARGUMENT);
    bd_loader_destroy(loader);
    bd_loader_destroy(NULL);
}

int main(void) {
    fake_seed("test_loader_read");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_random_shapes),
        cmocka_unit_test(test_faulty_reads_still_arrive),
        cmocka_unit_test(test_direct_reads_stay_aligned),
        cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_sums_at_once),
        cmocka_unit_test(test_staging_is_locked),
        cmocka_unit_test(test_memory_is_read_by_workers),
        cmocka_unit_test(test_a_share_of_threads),
        cmocka_unit_test(test_copies_take_no_turns),
        cmocka_unit_test(test_metrics_and_notify),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
