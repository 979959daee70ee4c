/* test_loader_memory.c - files that lie in memory: read in pieces that are summed on the way. What
 * reaches the pages is what was written, damage is named by file and chunk and nothing of it is
 * fed, and a file cut while it is read is told as such. The reference is the random content kept in
 * memory, the sums are xxHash's own. Needs a tmpfs on /dev/shm. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <linux/magic.h>
#include <sys/vfs.h>

#include "loader/shard_file.h"
#include "loader_fake.h"

enum { SCENE_MAX = 3 << 20 };

static const bd_io_choice readers[] = {BD_IO_URING, BD_IO_PREAD};

typedef struct scene {
    fake_source source;
    fake_variant variant;
    uint8_t *memory; /* of the pages, one after the other */
    void **pages;
    bd_loader *loader;
    bd_load load;
} scene;

static bool has_memory(void) {
    struct statfs fs;
    return statfs("/dev/shm", &fs) == 0 && fs.f_type == TMPFS_MAGIC &&
           access("/dev/shm", W_OK) == 0;
}

static void make_files(scene *s, const uint64_t *sizes, uint32_t files, uint64_t chunk_bytes) {
    fake_variant_make_in("/dev/shm", &s->variant, "in memory", sizes, files, chunk_bytes);
    const uint32_t count = fake_pages_for(s->variant.total_bytes);
    s->memory = calloc(count, FAKE_PAGE_BYTES);
    s->pages = calloc(count, sizeof(void *));
    assert_non_null(s->memory);
    assert_non_null(s->pages);
    for (uint32_t i = 0; i < count; i++)
        s->pages[i] = s->memory + (size_t)i * FAKE_PAGE_BYTES;
    s->load = (bd_load){.delta = &s->variant.delta, .pages = s->pages, .page_count = count};
}

static void open_loader(scene *s, bd_io_choice io, uint32_t block_bytes, uint32_t depth) {
    const bd_loader_options options = {.io = io,
                                       .read_threads = 1 + (uint32_t)fake_below(3),
                                       .block_bytes = block_bytes,
                                       .depth = depth,
                                       .loads_in_parallel = 1};
    const bd_loader_source table = fake_loader_source(&s->source);
    bd_status status = bd_loader_create_with(&options, &table, &s->loader, NULL);
    if (status == BD_E_UNSUPPORTED) { /* no ring, which would not read these files anyway */
        bd_loader_options other = options;
        other.io = BD_IO_PREAD;
        status = bd_loader_create_with(&other, &table, &s->loader, NULL);
    }
    assert_int_equal(status, BD_OK);
}

static void run(scene *s) {
    assert_int_equal(bd_loader_submit(s->loader, &s->load, NULL), BD_OK);
    while (!bd_load_finished(&s->load))
        usleep(200);
}

static void end_scene(scene *s) {
    bd_loader_destroy(s->loader);
    if (s->load.overlay) fake_overlay_destroy(s->load.overlay);
    fake_variant_remove(&s->variant);
    free(s->pages);
    free(s->memory);
}

/* ---- The sums alone ---- */

/* Bytes in random pieces from a random chunk on; `damaged`: a byte that is not what was summed. */
static void add_in_pieces(const fake_variant *v, uint64_t damaged) {
    const bd_delta_file *file = &v->files[0];
    const uint32_t first =
        (uint32_t)(damaged < file->bytes ? fake_below(damaged / file->chunk_bytes + 1)
                                         : fake_below(file->chunk_count));
    bd_chunk_sum sum;
    bd_error err = {0};
    bd_status status = BD_OK;
    bd_chunk_sum_begin(&sum, &v->delta, 0, first);
    uint64_t at = first * file->chunk_bytes;
    while (at < file->bytes && status == BD_OK) {
        uint64_t part = fake_below(2) ? 1 + fake_below(64) : 1 + fake_below(3 * file->chunk_bytes);
        if (part > file->bytes - at) part = file->bytes - at;
        status = bd_chunk_sum_add(&sum, v->content[0] + at, part, &err);
        at += part;
    }
    if (damaged >= file->bytes) {
        assert_int_equal(status, BD_OK);
        return;
    }
    const uint64_t from = damaged / file->chunk_bytes * file->chunk_bytes;
    const uint64_t end =
        file->bytes - from < file->chunk_bytes ? file->bytes : from + file->chunk_bytes;
    char where[120];
    snprintf(where, sizeof where, "chunk %" PRIu64 " (bytes %" PRIu64 " to %" PRIu64 ")",
             from / file->chunk_bytes, from, end - 1);
    assert_int_equal(status, BD_E_CORRUPT);
    assert_true(at >= end);
    assert_string_equal(err.subject, file->name);
    assert_non_null(strstr(err.message, where));
}

static void test_sums_in_pieces(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 200; round++) {
        fake_variant v;
        const uint64_t size = 1 + fake_below(30000);
        fake_variant_make(&v, "v", &size, 1, 1 + fake_below(5000));
        add_in_pieces(&v, UINT64_MAX);
        const uint64_t damaged = fake_below(size);
        v.content[0][damaged] ^= (uint8_t)(1u << fake_below(8));
        add_in_pieces(&v, damaged);
        fake_variant_remove(&v);
    }
}

/* ---- Whole loads ---- */

static _Atomic uint32_t too_large;

/* Some are interrupted or short, as any read may be; none asks for more than a piece. */
static int32_t pieces_with_faults(fake_source *source, uint64_t offset, uint32_t bytes,
                                  int32_t result) {
    (void)source, (void)offset;
    if (bytes > BD_IO_PIECE_BYTES) atomic_fetch_add(&too_large, 1);
    if (result <= 0) return result;
    switch (fake_below(6)) {
    case 0:
        return fake_below(2) ? -EINTR : -EAGAIN;
    case 1:
        /* Inside what O_DIRECT would take; seldom, for nine times in a row are an end. */
        return result > 512 && fake_below(8) == 0 ? 512 : result;
    case 2: {
        const int32_t sectors = result / 4096;
        return sectors > 0 ? 4096 * (1 + (int32_t)fake_below((uint64_t)sectors)) : result;
    }
    default:
        return result;
    }
}

static void check_content(const scene *s) {
    uint64_t before = 0;
    for (uint32_t i = 0; i < s->variant.delta.shard_count; i++) {
        assert_memory_equal(s->memory + before, s->variant.content[i], s->variant.files[i].bytes);
        before += s->variant.files[i].bytes;
    }
}

static void test_files_arrive(void **state) {
    (void)state;
    if (!has_memory()) skip();
    atomic_store(&too_large, 0);
    for (uint32_t round = 0; round < 24; round++) {
        uint64_t sizes[FAKE_FILES_MAX];
        const uint32_t files = 1 + (uint32_t)fake_below(FAKE_FILES_MAX);
        for (uint32_t i = 0; i < files; i++)
            sizes[i] = 1 + fake_below(i == 0 ? SCENE_MAX : SCENE_MAX / 4);
        const uint32_t block = (200u << 10) + (uint32_t)fake_below(1 << 20);
        /* Odd, several in a block; sometimes none. */
        const uint64_t chunk = round % 8 == 7 ? 0 : block / 8 + fake_below(block - block / 8);
        scene s = {.source = {.anywhere = round % 3 == 1,
                              .later = round % 3 == 2,
                              .fault = pieces_with_faults}};
        make_files(&s, sizes, files, chunk);
        open_loader(&s, readers[round % 2], block, 1 + (uint32_t)fake_below(5));
        run(&s);
        if (s.load.status != BD_OK) fail_msg("%s: %s", s.load.error.subject, s.load.error.message);
        assert_int_equal(s.load.read_bytes, s.variant.total_bytes);
        assert_int_equal(s.load.ready_count, FAKE_READY_COUNT);
        assert_int_equal(s.source.verifies, chunk == 0 ? files : 0);
        if (chunk != 0) assert_int_equal(s.source.summing, 0); /* once it has been read */
        check_content(&s);
        end_scene(&s);
    }
    assert_int_equal(atomic_load(&too_large), 0);
}

static void damage_byte(const fake_variant *v, uint32_t file, uint64_t at) {
    char path[1200];
    fake_path(v, file, path, sizeof path);
    const uint8_t wrong = (uint8_t)(v->content[file][at] ^ (1u << fake_below(8)));
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, &wrong, 1, (off_t)at), 1);
    close(fd);
}

/* One byte of one file. The block that it is in is fed to nobody, whoever feeds. */
static void test_damage_is_named_and_not_fed(void **state) {
    (void)state;
    if (!has_memory()) skip();
    for (uint32_t round = 0; round < 16; round++) {
        const uint64_t sizes[2] = {1 + fake_below(SCENE_MAX), 1 + fake_below(SCENE_MAX)};
        const uint32_t block = (300u << 10) + (uint32_t)fake_below(1 << 20);
        const uint64_t chunk = block / 4 + fake_below(block / 2), stride = block / chunk * chunk;
        scene s = {.source = {.anywhere = round % 2 == 1, .fault = pieces_with_faults}};
        make_files(&s, sizes, 2, chunk);
        const uint32_t file = (uint32_t)fake_below(2);
        const uint64_t at = fake_below(sizes[file]), from = at / stride * stride;
        const uint64_t end = sizes[file] - from < stride ? sizes[file] : from + stride;
        const uint64_t before = file == 0 ? 0 : sizes[0];
        damage_byte(&s.variant, file, at);
        open_loader(&s, readers[round / 2 % 2], block, 1 + (uint32_t)fake_below(5));
        run(&s);
        char where[64];
        snprintf(where, sizeof where, "chunk %" PRIu64 " (bytes %" PRIu64 " to", at / chunk,
                 at / chunk * chunk);
        assert_int_equal(s.load.status, BD_E_CORRUPT);
        assert_string_equal(s.load.error.subject, s.variant.names[file]);
        assert_non_null(strstr(s.load.error.message, where));
        for (uint64_t i = before + from; i < before + end; i++)
            if (s.memory[i] != 0) fail_msg("byte %" PRIu64 " was fed", i);
        if (!s.source.anywhere) assert_int_equal(s.source.fed_bytes, before + from);
        end_scene(&s);
    }
}

static uint64_t cut_to;

static void cut(const char *path) {
    BD_ASSERT(truncate(path, (off_t)cut_to) == 0);
}

static int32_t cut_after_a_piece(fake_source *source, uint64_t offset, uint32_t bytes,
                                 int32_t result) {
    (void)offset, (void)bytes;
    if (!atomic_exchange(&source->changed, true)) source->change(source->path);
    return result;
}

/* By one thread, between two pieces of its block. */
static void test_cut_between_pieces(void **state) {
    (void)state;
    if (!has_memory()) skip();
    for (uint32_t round = 0; round < 8; round++) {
        const uint64_t size = 2 * BD_IO_PIECE_BYTES + 1 + fake_below(1 << 20);
        scene s = {.source = {.anywhere = round % 2 == 1, .fault = cut_after_a_piece}};
        make_files(&s, &size, 1, SCENE_MAX);
        cut_to = fake_below(size);
        char path[1200];
        fake_path(&s.variant, 0, path, sizeof path);
        s.source.path = path;
        s.source.change = cut;
        open_loader(&s, readers[round / 2 % 2], SCENE_MAX, 2);
        run(&s);
        assert_int_equal(s.load.status, BD_E_LENGTH);
        assert_string_equal(s.load.error.subject, path);
        assert_int_equal(s.source.fed_bytes, 0);
        end_scene(&s);
    }
}

/* Where blocks are large, their memory is whole huge pages; where they are small, just what they
 * need. */
static void test_staging_in_huge_pages(void **state) {
    (void)state;
    const uint64_t huge = 2u << 20, size = 70001;
    for (uint32_t round = 0; round < 2; round++) {
        const uint32_t block = round == 0 ? (1u << 20) + 4096 * (uint32_t)fake_below(100) : 65536;
        scene s = {.source = {.locks = true}};
        fake_variant_make(&s.variant, "v", &size, 1, 65536);
        s.load = (bd_load){.delta = &s.variant.delta};
        open_loader(&s, BD_IO_PREAD, block, 3);
        assert_int_equal((uintptr_t)s.source.locked % huge, 0);
        assert_true(s.source.locked_bytes >= 6 * (block + 8192));
        if (round == 0)
            assert_int_equal(s.source.locked_bytes % huge, 0);
        else
            assert_int_equal(s.source.locked_bytes, 6 * (block + 8192));
        end_scene(&s);
    }
}

int main(void) {
    fake_seed("test_loader_memory");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_in_pieces),
        cmocka_unit_test(test_files_arrive),
        cmocka_unit_test(test_damage_is_named_and_not_fed),
        cmocka_unit_test(test_cut_between_pieces),
        cmocka_unit_test(test_staging_in_huge_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
