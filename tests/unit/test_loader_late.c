/* test_loader_late.c - cache, host memory, loaders and feeds over a device that copies as late as
 * it may (late_backend.h), in random order: many loads at once, more variants than pages and than
 * host memory, early leases, cancelled and failing loads, damaged files, removed variants, an end
 * in the middle. Whatever is called ready must be in the pages of every rank: the bytes that the
 * CPU, which copies at once, made of the same files. Memory that was lent must stay as it is until
 * it is given back, and nothing may be on its way at the end. */
#include <dirent.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "late_backend.h"

#include "bitdelta/base/clock.h"
#include "cache/cache_internal.h"
#include "tp_support.h"

enum { NAMES_MAX = 32, USED = 9, DAMAGED = 2, RANKS_MAX = 2, PLACES = 10, ROUNDS = 7, SLOTS = 3 };

typedef struct file_of {
    char dir[256];
    bool damaged;
    /* Of each rank, made twice over pages of other bytes: what both have was put there. */
    bd_overlay_plan plans[RANKS_MAX];
    uint8_t *want[RANKS_MAX][2];
} file_of;

typedef struct place { /* somebody who wants a variant, has it or waits for it */
    bd_cache_waiter waiter;
    bool waiting, called;
    bd_status status;
    bd_lease lease;
    uint32_t file;
} place;

typedef struct world {
    uint64_t random;
    uint32_t ranks;
    char folder[64], memory_folder[64];
    file_of files[USED];
    bd_model *model;
    uint64_t page_bytes;
    bd_loader *loader;
    bd_cache *cache;
    bd_variant *v[USED];
    place places[PLACES];
    uint32_t quiet; /* one turn in so many does a thing of each kind */
    uint64_t looks, early_looks, loads, hits, failures;
} world;

static world w;

static uint32_t below(uint64_t bound) {
    return (uint32_t)(support_random(&w.random) % bound);
}

/* ---- Files ---- */

static void copy_file(const char *from, const char *to, bool damaged) {
    char *bytes;
    size_t count;
    bd_error err = {0};
    MS_OK(bd_file_read(from, 64 << 20, &bytes, &count, &err), err);
    if (damaged) bytes[count / 4 + below(count * 3 / 4)] ^= 1;
    FILE *file = fopen(to, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    fclose(file);
    free(bytes);
}

/* The same delta with sums of smaller chunks, so that a load has many blocks; or with none. */
static void write_manifest(bd_delta *delta, const char *dir, uint64_t chunk_bytes) {
    char path[1400];
    bd_mapped_file map;
    bd_error err = {0};
    bd_delta_file file = delta->files[0];
    MS_OK(bd_path_join(path, sizeof path, delta->dir, file.name, &err), err);
    MS_OK(bd_file_map(path, &map, &err), err);
    file.chunk_bytes = chunk_bytes;
    file.chunk_count = chunk_bytes ? (uint32_t)((map.bytes + chunk_bytes - 1) / chunk_bytes) : 0;
    uint64_t *sums = calloc(file.chunk_count + 1u, sizeof *sums);
    assert_non_null(sums);
    for (uint32_t i = 0; i < file.chunk_count; i++) {
        const uint64_t from = i * chunk_bytes, left = map.bytes - from;
        sums[i] = XXH3_64bits(map.data + from, left < chunk_bytes ? left : chunk_bytes);
    }
    file.chunk_xxh3 = sums;
    bd_delta changed = *delta;
    changed.files = &file;
    snprintf(changed.dir, sizeof changed.dir, "%s", dir);
    MS_OK(bd_delta_write_manifest(&changed, &err), err);
    bd_file_unmap(&map);
    free(sums);
}

static void make_file(file_of *f, const char *name, uint32_t index) {
    char from[600], to[600], source[300];
    bd_delta delta;
    bd_error err = {0};
    snprintf(source, sizeof source, "demo/deltas/%s", name);
    snprintf(f->dir, sizeof f->dir, "%s/%u", index % 2 ? w.memory_folder : w.folder, index);
    assert_int_equal(mkdir(f->dir, 0700), 0);
    f->damaged = index < DAMAGED;
    MS_OK(bd_delta_open(source, &delta, &err), err);
    snprintf(from, sizeof from, "%s/%s", source, delta.files[0].name);
    snprintf(to, sizeof to, "%s/%s", f->dir, delta.files[0].name);
    write_manifest(&delta, f->dir, index == DAMAGED ? 0 : 4096u << below(3));
    copy_file(from, to, f->damaged);
    bd_delta_close(&delta);
}

static void make_files(void) {
    uint32_t count = 0;
    snprintf(w.folder, sizeof w.folder, "%s/bd-late-XXXXXX", P_tmpdir);
    snprintf(w.memory_folder, sizeof w.memory_folder, "%s/bd-late-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : P_tmpdir);
    if (!mkdtemp(w.folder) || !mkdtemp(w.memory_folder)) fail_msg("no folder for files");
    DIR *dir = opendir("demo/deltas");
    assert_non_null(dir);
    for (const struct dirent *entry; count < USED && (entry = readdir(dir)) != NULL;)
        if (entry->d_name[0] != '.') {
            make_file(&w.files[count], entry->d_name, count);
            count++;
        }
    closedir(dir);
    assert_int_equal(count, USED);
}

static void remove_files(void) {
    char command[160];
    snprintf(command, sizeof command, "rm -r %s %s", w.folder, w.memory_folder);
    assert_int_equal(system(command), 0);
}

/* ---- What is right ---- */

static bd_model *open_model(const bd_backend_ops *ops, uint32_t slots) {
    bd_error err = {0};
    bd_model *model;
    const bd_model_options options = tp_demo_options(ops, w.ranks, slots);
    MS_OK(bd_model_open(&options, &model, &err), err);
    return model;
}

/* Loads the delta over pages full of `fill`, and keeps the pages. */
static void make_want(bd_model *plain, file_of *f, uint32_t which, int fill) {
    tp_variant v;
    for (uint32_t r = 0; r < w.ranks; r++) {
        bd_model *rank = bd_model_rank(plain, r);
        memset(bd_model_ops(rank)->delta_arena(bd_model_backend(rank)), fill,
               bd_model_page_count(plain) * w.page_bytes);
    }
    tp_variant_open(plain, f->dir, 0, &v);
    for (uint32_t r = 0; r < w.ranks; r++) {
        f->want[r][which] = malloc(v.plans[r].page_count * w.page_bytes);
        assert_non_null(f->want[r][which]);
        for (uint32_t i = 0; i < v.plans[r].page_count; i++)
            memcpy(f->want[r][which] + i * w.page_bytes, v.pages[r][i], w.page_bytes);
    }
    tp_variant_close(&v);
}

static void make_wants(void) {
    bd_error err = {0};
    bd_model *plain = open_model(bd_backend_cpu_ops(), 1);
    w.page_bytes = bd_model_page_bytes(plain);
    assert_int_equal(w.page_bytes, bd_model_page_bytes(w.model));
    for (uint32_t i = 0; i < USED; i++) {
        file_of *f = &w.files[i];
        bd_delta delta;
        make_want(plain, f, 0, 0x00);
        make_want(plain, f, 1, 0xff);
        MS_OK(bd_delta_open(f->dir, &delta, &err), err);
        for (uint32_t r = 0; r < w.ranks; r++)
            MS_OK(bd_overlay_plan_create(bd_model_rank(w.model, r), &delta, &f->plans[r], &err),
                  err);
        bd_delta_close(&delta);
    }
    bd_model_close(plain);
}

static void drop_wants(void) {
    for (uint32_t i = 0; i < USED; i++)
        for (uint32_t r = 0; r < w.ranks; r++) {
            bd_overlay_plan_destroy(&w.files[i].plans[r]);
            free(w.files[i].want[r][0]);
            free(w.files[i].want[r][1]);
        }
}

/* One piece of what was ready is in its page. */
static void check_piece(const file_of *f, uint32_t rank, const bd_overlay_piece *piece,
                        const uint8_t *page) {
    uint64_t at = piece->page_offset_bytes, bytes = 0;
    if (piece->kind == BD_PIECE_BITS) {
        bytes = bd_backend_cpu_ops()->plane_bytes(piece->n, piece->k);
    } else if (piece->kind == BD_PIECE_FLOATS) {
        at += 4 * (uint64_t)piece->first_row;
        bytes = piece->bytes / bd_dtype_bytes(piece->dtype) * 4;
    } else {
        at += piece->first_row * piece->row_bytes;
        bytes = piece->bytes;
    }
    const uint8_t *zero = f->want[rank][0] + piece->page * w.page_bytes + at,
                  *ones = f->want[rank][1] + piece->page * w.page_bytes + at;
    for (uint64_t i = 0; i < bytes; i++)
        if (page[at + i] != zero[i] && zero[i] == ones[i])
            fail_msg("%s: byte %llu of %s on rank %u is not the file's", f->dir,
                     (unsigned long long)i, piece->tensor, rank);
}

static void check_lease(const place *p) {
    const file_of *f = &w.files[p->file];
    const bd_load *load = p->lease.load;
    const bd_variant *variant = p->lease.variant;
    uint32_t ready = UINT32_MAX;
    if (load && bd_load_finished(load)) {
        if (load->status != BD_OK) return;
    } else if (load) {
        ready =
            atomic_load_explicit(&((bd_load *)(uintptr_t)load)->ready_count, memory_order_acquire);
        w.early_looks++;
    }
    if (f->damaged && ready == UINT32_MAX) fail_msg("%s is damaged, and was loaded", f->dir);
    w.looks++;
    for (uint32_t r = 0; r < w.ranks; r++)
        for (uint32_t i = 0; i < f->plans[r].piece_count; i++) {
            const bd_overlay_piece *piece = &f->plans[r].pieces[i];
            if (piece->ready_index < ready)
                check_piece(f, r, piece,
                            bd_overlay_page_on(w.model, r, variant->pages[piece->page]));
        }
}

/* ---- Cache and loader ---- */

static bool at_once(void *ctx, const bd_load *load, uint64_t now_us) {
    (void)ctx, (void)load, (void)now_us;
    return true;
}

static void add_variant(uint32_t file) {
    bd_error err = {0};
    bd_delta delta;
    MS_OK(bd_delta_open(w.files[file].dir, &delta, &err), err);
    MS_OK(bd_cache_register(w.cache, &delta, false, &w.v[file], &err), err);
}

static void open_cache(void) {
    bd_error err = {0};
    const uint32_t depth = 2 + below(5), parallel = 1 + below(depth < 4 ? depth : 4);
    const uint64_t host_bytes = below(3) == 0 ? 0 : (3u << 20) + below(3u << 20);
    const bd_loader_options loader = {.model = w.model,
                                      .io = below(2) ? BD_IO_AUTO : BD_IO_PREAD,
                                      .read_threads = 1 + below(3),
                                      .block_bytes = 16384u << below(3),
                                      .depth = depth,
                                      .loads_in_parallel = parallel};
    w.quiet = below(2) ? 40 : 120;
    late.refused_of_100 = below(2) ? 0 : below(101);
    MS_OK(bd_loader_create(&loader, &w.loader, &err), err);
    const bd_cache_options cache = {.model = w.model,
                                    .loader = w.loader,
                                    .page_count = bd_model_page_count(w.model),
                                    .loads_in_parallel = parallel,
                                    .retry_after_us = 1,
                                    .host_bytes = host_bytes};
    MS_OK(bd_cache_create(&cache, &w.cache, &err), err);
    if (below(2)) bd_cache_stream(w.cache, at_once, NULL);
    for (uint32_t i = 0; i < USED; i++)
        add_variant(i);
}

static void note(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                 const bd_error *err) {
    place *p = (place *)waiter;
    (void)err;
    p->called = true;
    p->waiting = false;
    p->status = status;
    if (lease) p->lease = *lease;
    if (status != BD_OK) w.failures++;
}

static void release(place *p) {
    if (!p->lease.variant) return;
    check_lease(p);
    bd_cache_release(w.cache, &p->lease, bd_now_us());
}

static void stop_waiting(place *p) {
    if (!p->waiting) return;
    bd_cache_wait_cancel(w.cache, &p->waiter);
    p->waiting = false;
}

static void ask(place *p) {
    bd_error err = {0};
    const uint32_t file = (uint32_t)((uint64_t)below(USED) * below(USED) / USED);
    *p = (place){.waiter.ready = note, .file = USED - 1 - file};
    bd_variant *variant = w.v[p->file];
    bd_cache_touch(w.cache, variant, bd_now_us());
    p->status = bd_cache_acquire(w.cache, variant, bd_now_us(), &p->lease, &p->waiter, &err);
    p->waiting = p->status == BD_AGAIN;
    if (p->status == BD_OK) check_lease(p);
}

static void count(const bd_variant *variant) {
    w.loads += variant->loads;
    w.hits += variant->host_hits;
}

/* What operators do, and what goes wrong. */
static void disturb(void) {
    bd_error err = {0};
    const place *p = &w.places[below(PLACES)];
    /* Rather one that is being loaded. */
    const uint32_t file = p->waiting && below(4) > 0 ? p->file : below(USED);
    bd_variant *variant = w.v[file];
    bd_status s = BD_OK;
    switch (below(w.quiet)) {
    case 0:
    case 1:
        s = bd_cache_unload(w.cache, variant, &err);
        break;
    case 2:
        s = bd_cache_prefetch(w.cache, variant, bd_now_us(), &err);
        break;
    case 3:
        count(variant);
        bd_cache_forget(w.cache, variant);
        add_variant(file);
        break;
    case 4:
        atomic_store(&late.calls_left, (int)below(300));
        break;
    default:
        break;
    }
    (void)s; /* all of them are right */
}

static void turn(void) {
    place *p = &w.places[below(PLACES)];
    if (p->lease.variant) {
        if (below(4) == 0)
            check_lease(p);
        else if (below(3) == 0)
            release(p);
    } else if (!p->waiting) {
        ask(p);
    } else if (below(40) == 0) {
        stop_waiting(p);
    }
    disturb();
    if (below(4) == 0) usleep(below(400));
    bd_cache_poll(w.cache, bd_now_us());
}

static void close_cache(void) {
    bd_error err = {0};
    for (uint32_t i = 0; i < PLACES; i++) {
        stop_waiting(&w.places[i]);
        release(&w.places[i]);
    }
    for (uint32_t i = 0; i < USED && below(4) > 0; i++) { /* then the end comes in the middle */
        const bd_status s = bd_cache_prefetch(w.cache, w.v[i], bd_now_us(), &err);
        (void)s;
    }
    usleep(below(3000));
    if (below(2)) bd_cache_poll(w.cache, bd_now_us());
    for (uint32_t i = 0; i < USED; i++)
        count(w.v[i]);
    bd_cache_destroy(w.cache);
    if (below(2)) late_check_idle("when no load is left");
    bd_loader_destroy(w.loader);
    late_check_idle("after the loader");
    atomic_store(&late.calls_left, LATE_CALLS_GO_WELL);
}

static void run(uint32_t ranks) {
    w = (world){.random = support_seed(), .ranks = ranks};
    make_files();
    w.model = open_model(late_ops(support_random(&w.random)), SLOTS);
    make_wants();
    const uint64_t until_us = bd_now_us() + 3500000; /* a slow machine takes fewer turns */
    for (uint32_t round = 0; round < ROUNDS && (round < 2 || bd_now_us() < until_us); round++) {
        open_cache();
        for (uint32_t n = 0; n < 2500 && (n < 300 || bd_now_us() < until_us); n++)
            turn();
        close_cache();
    }
    print_message("%u ranks: %llu loads, %llu from host memory, %llu told of a failure; %llu looks "
                  "at leases, %llu of them early; %llu windows, %llu flushes, %llu marks asked\n",
                  ranks, (unsigned long long)w.loads, (unsigned long long)w.hits,
                  (unsigned long long)w.failures, (unsigned long long)w.looks,
                  (unsigned long long)w.early_looks, (unsigned long long)atomic_load(&late.brought),
                  (unsigned long long)atomic_load(&late.flushed),
                  (unsigned long long)atomic_load(&late.asked));
    drop_wants();
    bd_model_close(w.model);
    remove_files();
}

static void one_rank(void **state) {
    (void)state;
    run(1);
}

static void two_ranks(void **state) {
    (void)state;
    run(2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank),
        cmocka_unit_test(two_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
