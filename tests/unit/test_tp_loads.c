/* test_tp_loads.c - cache and loaders over a model of four ranks: every variant through fewer slots
 * than there are variants, leased as early as may be, gives the logits of one rank; a file that is
 * damaged or gone fails the load on all ranks and leaves nothing behind, and so does what goes
 * wrong on any one rank alone; loads that are cancelled end; what comes back from host memory reads
 * no disk, in however many shards it is. */
#include <dirent.h>
#include <pthread.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/cache/cache.h"
#include "bitdelta/tools/reshard.h"
#include "cache/cache_internal.h"
#include "tp_support.h"

enum { SLOTS = 3, RANKS = 4, NAMES_MAX = 32, TOKENS = 5, ROUNDS = 2 };

static const int32_t tokens[TOKENS] = {5, 17, 300, 42, 9};

typedef struct world {
    bd_model *model;
    bd_loader *loader;
    bd_cache *cache;
    bd_metrics *metrics;
    char names[NAMES_MAX][64];
    bd_variant *v[NAMES_MAX];
    uint32_t count;
    uint64_t step_id;
} world;

/* ---- The CPU backend, one of whose ranks refuses what is loaded, or which takes its time ---- */

enum { FINE = RANKS }; /* no rank does */

static struct {
    bd_backend_ops ops;
    _Atomic uint32_t rank;
    _Atomic int after; /* calls that still go well */
    _Atomic uint32_t delay_us;
} refusing;

static bd_status refuse(bd_error *err) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    const uint32_t rank = atomic_load(&refusing.rank);
    /* Whichever of a rank's threads puts. */
    if (strncmp(name, "bd-load-", 8) != 0 && strncmp(name, "bd-read-", 8) != 0) return BD_OK;
    if ((uint32_t)atoi(name + 8) != rank) return BD_OK;
    if (atomic_fetch_sub(&refusing.after, 1) > 0) return BD_OK;
    return bd_fail(err, BD_E_DEVICE, "device", "a planted fault of rank %u", rank);
}

static bd_status refusing_vector_put(bd_backend *backend, void *dst, uint64_t first,
                                     const float *values, uint64_t count, bd_error *err) {
    const bd_status s = refuse(err);
    const uint32_t delay_us = atomic_load(&refusing.delay_us);
    if (delay_us > 0) usleep(delay_us);
    return s == BD_OK ? bd_backend_cpu_ops()->vector_put(backend, dst, first, values, count, err)
                      : s;
}

static const bd_backend_ops *backend_ops(void) {
    refusing.ops = *bd_backend_cpu_ops();
    refusing.ops.vector_put = refusing_vector_put;
    return &refusing.ops;
}

static bd_model *open_model(uint32_t ranks, uint32_t slots) {
    bd_error err = {0};
    bd_model *model;
    bd_model_options options = tp_demo_options(backend_ops(), ranks, slots);
    options.extra_vocab_max = 256;
    MS_OK(bd_model_open(&options, &model, &err), err);
    return model;
}

static bool at_once(void *ctx, const bd_load *load, uint64_t now_us) {
    (void)ctx;
    (void)now_us;
    return atomic_load(&((bd_load *)(uintptr_t)load)->ready_count) > 0;
}

static bd_variant *add_variant(const world *w, const char *dir) {
    bd_error err = {0};
    bd_delta delta;
    bd_variant *variant = NULL;
    MS_OK(bd_delta_open(dir, &delta, &err), err);
    MS_OK(bd_cache_register(w->cache, &delta, false, &variant, &err), err);
    return variant;
}

static void open_world_host(world *w, bool stream, uint64_t host_bytes) {
    bd_error err = {0};
    memset(w, 0, sizeof *w);
    w->model = open_model(RANKS, SLOTS);
    w->metrics = bd_metrics_create(64);
    const bd_loader_options loader = {.model = w->model, .depth = 2, .metrics = w->metrics};
    MS_OK(bd_loader_create(&loader, &w->loader, &err), err);
    const bd_cache_options cache = {.model = w->model,
                                    .loader = w->loader,
                                    .page_count = bd_model_page_count(w->model),
                                    .retry_after_us = 1,
                                    .host_bytes = host_bytes};
    MS_OK(bd_cache_create(&cache, &w->cache, &err), err);
    while (host_bytes > 0 && bd_host_tier_total_bytes(w->cache->host) < host_bytes)
        usleep(200);
    if (stream) bd_cache_stream(w->cache, at_once, NULL);
    DIR *dir = opendir("demo/deltas");
    assert_non_null(dir);
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL && w->count < NAMES_MAX;) {
        char path[320];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "demo/deltas/%.255s", entry->d_name);
        snprintf(w->names[w->count], sizeof w->names[0], "%.63s", entry->d_name);
        w->v[w->count++] = add_variant(w, path);
    }
    closedir(dir);
    assert_in_range(w->count, SLOTS + 1, NAMES_MAX);
}

static void open_world(world *w, bool stream) {
    open_world_host(w, stream, 0);
}

static void close_world(world *w) {
    bd_cache_destroy(w->cache);
    bd_loader_destroy(w->loader);
    bd_model_close(w->model);
    bd_metrics_destroy(w->metrics);
}

typedef struct result {
    bd_cache_waiter waiter;
    bool called;
    bd_status status;
    bd_lease lease;
    bd_error error;
} result;

static void note(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                 const bd_error *err) {
    result *r = (result *)waiter;
    r->called = true;
    r->status = status;
    if (lease) r->lease = *lease;
    if (err) r->error = *err;
}

static result get(const world *w, bd_variant *variant) {
    result r = {.waiter.ready = note};
    bd_cache_touch(w->cache, variant, bd_now_us());
    r.status = bd_cache_acquire(w->cache, variant, bd_now_us(), &r.lease, &r.waiter, &r.error);
    while (r.status == BD_AGAIN && !r.called) {
        usleep(200);
        bd_cache_poll(w->cache, bd_now_us());
    }
    return r;
}

/* Logits after the tokens, through an overlay. */
static void run_step(bd_model *model, const bd_overlay *overlay, uint64_t id, bd_layer_gate gate,
                     void *gate_ctx, float *logits) {
    static const uint32_t positions[TOKENS] = {0, 1, 2, 3, 4}, rows[TOKENS] = {0}, block = 2;
    bd_error err = {0};
    bd_token_result sampled;
    const bd_seq seq = {.row_count = TOKENS, .kv_blocks = &block, .sampling.top_p = 1};
    const bd_segment segment = {0, 0, TOKENS};
    const bd_logits_row logits_row = {.row = TOKENS - 1, .target = -1};
    const bd_step step = {.id = id,
                          .row_count = TOKENS,
                          .seq_count = 1,
                          .segment_count = 1,
                          .overlay_count = 1,
                          .logits_row_count = 1,
                          .tokens = tokens,
                          .positions = positions,
                          .seq_of_row = rows,
                          .seqs = &seq,
                          .segments = &segment,
                          .overlays = &overlay,
                          .logits_rows = &logits_row};
    MS_OK(bd_model_forward(model, &step, gate, gate_ctx, &err), err);
    MS_OK(bd_model_wait(model, &step, UINT64_MAX, &sampled, &err), err);
    MS_OK(bd_model_logits_get(model, 0, logits, &err), err);
}

static bd_status wait_for_layer(void *ctx, uint32_t index, bd_error *err) {
    bd_load *load = ctx;
    (void)err;
    while (atomic_load_explicit(&load->ready_count, memory_order_acquire) <= index)
        usleep(100);
    return BD_OK;
}

/* [count][width] by one rank. */
static float *reference(const world *w, uint32_t width) {
    bd_model *one = open_model(1, 1);
    float *logits = calloc((size_t)w->count * width, sizeof *logits);
    assert_non_null(logits);
    assert_int_equal(bd_model_logits_width(one), width);
    for (uint32_t i = 0; i < w->count; i++) {
        char path[320];
        tp_variant v;
        snprintf(path, sizeof path, "demo/deltas/%.63s", w->names[i]);
        tp_variant_open(one, path, 0, &v);
        run_step(one, v.overlay, i + 1, NULL, NULL, logits + (size_t)i * width);
        tp_variant_close(&v);
    }
    bd_model_close(one);
    return logits;
}

/* The logits of a lease are `want`, whose width is the model's. Gives it back. */
static void check_logits(world *w, result *r, const char *name, const float *want) {
    const uint32_t width = bd_model_logits_width(w->model);
    float *got = calloc(width, sizeof *got);
    double *wide = calloc(width, sizeof *wide);
    assert_non_null(got);
    assert_non_null(wide);
    assert_int_equal(r->status, BD_OK);
    assert_non_null(r->lease.overlay->ranks);
    bd_load *load = (bd_load *)(uintptr_t)r->lease.load;
    run_step(w->model, r->lease.overlay, ++w->step_id, load ? wait_for_layer : NULL, load, got);
    uint32_t count = 0;
    for (uint32_t k = 0; k < width; k++) {
        assert_int_equal(isinf(want[k]), isinf(got[k]));
        if (isinf(want[k])) continue;
        wide[count] = (double)want[k];
        got[count++] = got[k];
    }
    const double l2 = ms_relative_l2(got, wide, count);
    if (!(l2 < 1e-5)) fail_msg("%s: %g", name, l2);
    bd_cache_release(w->cache, &r->lease, bd_now_us());
    free(got);
    free(wide);
}

static void check_all(bool stream) {
    world w;
    open_world(&w, stream);
    const uint32_t width = bd_model_logits_width(w.model);
    float *want = reference(&w, width);
    uint32_t early = 0;
    for (uint32_t n = 0; n < ROUNDS * w.count; n++) {
        const uint32_t i = n * 5 % w.count;
        result r = get(&w, w.v[i]);
        if (r.status == BD_OK && r.lease.load) early++;
        check_logits(&w, &r, w.names[i], want + (size_t)i * width);
    }
    printf("  %u of %u leases were early\n", early, ROUNDS * w.count);
    free(want);
    close_world(&w);
}

static void every_variant(void **state) {
    (void)state;
    check_all(false);
}

static void every_variant_early(void **state) {
    (void)state;
    check_all(true);
}

/* A copy of a variant with one byte changed near the end of its file. */
static void make_damaged(const char *name, const char *to, bool gone) {
    char from[320], path[320];
    char *bytes;
    size_t count;
    bd_error err = {0};
    static const char *const files[] = {"delta.json", "shard-00-of-01.safetensors"};
    for (uint32_t i = 0; i < 2; i++) {
        snprintf(from, sizeof from, "demo/deltas/%s/%s", name, files[i]);
        snprintf(path, sizeof path, "%s/%s", to, files[i]);
        if (i == 1 && gone) break;
        MS_OK(bd_file_read(from, 64 << 20, &bytes, &count, &err), err);
        if (i == 1) bytes[count - 100] ^= 1;
        FILE *file = fopen(path, "wb");
        assert_non_null(file);
        assert_int_equal(fwrite(bytes, 1, count, file), count);
        fclose(file);
        free(bytes);
    }
}

static void remove_damaged(const char *dir) {
    char path[320];
    snprintf(path, sizeof path, "%s/delta.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/shard-00-of-01.safetensors", dir);
    unlink(path);
    rmdir(dir);
}

static void faults_of_files(void **state) {
    (void)state;
    for (uint32_t k = 0; k < 4; k++) {
        char dir[] = "/tmp/bd-tp-XXXXXX";
        world w;
        assert_non_null(mkdtemp(dir));
        const bool gone = k % 2 == 1;
        make_damaged("zen-mini-sql", dir, gone);
        open_world(&w, k >= 2);
        bd_variant *bad = add_variant(&w, dir);
        const uint32_t pages = bd_cache_pages_free(w.cache);
        for (uint32_t n = 0; n < 3; n++) {
            result r = get(&w, bad);
            if (r.status == BD_OK) { /* leased early: it fails while it is used */
                while (!bd_load_finished(r.lease.load))
                    usleep(200);
                assert_int_not_equal(r.lease.load->status, BD_OK);
                bd_cache_poll(w.cache, bd_now_us());
                bd_cache_release(w.cache, &r.lease, bd_now_us());
            } else {
                assert_int_equal(r.status, gone ? BD_E_NOT_FOUND : BD_E_CORRUPT);
                assert_non_null(strstr(r.error.message, "shard-00-of-01"));
            }
            bd_cache_poll(w.cache, bd_now_us());
            assert_int_equal(bd_cache_pages_free(w.cache), pages);
            usleep(1000); /* beyond retry_after_us, doubled each time */
        }
        result good = get(&w, w.v[0]);
        assert_int_equal(good.status, BD_OK);
        bd_cache_release(w.cache, &good.lease, bd_now_us());
        close_world(&w);
        remove_damaged(dir);
    }
}

/* Whichever rank it is, at whatever moment of its load: the variant is nowhere, its pages are free,
 * the fault is that rank's, and the next load is a whole one. */
static void one_rank_refuses(bool stream, uint64_t *random) {
    world w;
    open_world(&w, stream);
    const uint32_t pages = bd_cache_pages_free(w.cache);
    for (uint32_t n = 0; n < 3 * RANKS; n++) {
        bd_variant *variant = w.v[n % w.count];
        char words[64];
        *random = *random * 6364136223846793005u + 1442695040888963407u;
        atomic_store(&refusing.after, n < RANKS ? 0 : (int)(*random >> 33) % 60);
        atomic_store(&refusing.rank, n % RANKS);
        snprintf(words, sizeof words, "a planted fault of rank %u", n % RANKS);
        result r = get(&w, variant);
        if (r.status == BD_OK) { /* leased early */
            assert_non_null(r.lease.load);
            while (!bd_load_finished(r.lease.load))
                usleep(200);
            assert_int_equal(r.lease.load->status, BD_E_DEVICE);
            assert_non_null(strstr(r.lease.load->error.message, words));
            bd_cache_poll(w.cache, bd_now_us());
            bd_cache_release(w.cache, &r.lease, bd_now_us());
        } else {
            assert_int_equal(r.status, BD_E_DEVICE);
            assert_non_null(strstr(r.error.message, words));
        }
        bd_cache_poll(w.cache, bd_now_us());
        assert_int_equal(bd_cache_pages_free(w.cache), pages);
        atomic_store(&refusing.rank, FINE);
        usleep(1000); /* beyond retry_after_us */
        r = get(&w, variant);
        assert_int_equal(r.status, BD_OK);
        while (r.lease.load && !bd_load_finished(r.lease.load))
            usleep(200);
        assert_true(!r.lease.load || r.lease.load->status == BD_OK);
        bd_cache_poll(w.cache, bd_now_us());
        bd_cache_release(w.cache, &r.lease, bd_now_us());
        bd_error err = {0};
        MS_OK(bd_cache_unload(w.cache, variant, &err), err);
    }
    close_world(&w);
}

static void any_rank_alone(void **state) {
    uint64_t random = bd_now_us();
    (void)state;
    printf("  seed %llu\n", (unsigned long long)random);
    one_rank_refuses(false, &random);
    atomic_store(&refusing.delay_us, 100);
    one_rank_refuses(true, &random);
    atomic_store(&refusing.delay_us, 0);
}

/* At any moment of a load; the last of them by the cache's end. */
static void cancelled_loads_end(void **state) {
    (void)state;
    world w;
    bd_error err = {0};
    open_world(&w, true);
    for (uint32_t n = 0; n < 40; n++) {
        bd_variant *variant = w.v[n % w.count];
        const bd_status s = bd_cache_prefetch(w.cache, variant, bd_now_us(), &err);
        assert_true(s == BD_OK || s == BD_AGAIN || s == BD_BUSY);
        usleep(n * 50);
        bd_cache_poll(w.cache, bd_now_us());
        if (n + 1 < 40) {
            const bd_status gone = bd_cache_unload(w.cache, variant, &err);
            assert_true(gone == BD_OK || gone == BD_BUSY);
        }
    }
    close_world(&w);
}

/* ---- Host memory ---- */

static double disk_bytes(const world *w) {
    return bd_metric_value(bd_metrics_counter(w->metrics, "bitdelta_delta_read_bytes_total",
                                              "Bytes of deltas read from disk.", NULL, 0));
}

/* Out of the ranks' pages, whatever it was. */
static void make_cold(world *w, bd_variant *variant) {
    bd_error err = {0};
    bd_variant_info info;
    do {
        bd_cache_poll(w->cache, bd_now_us());
        const bd_status s = bd_cache_unload(w->cache, variant, &err);
        assert_true(s == BD_OK || s == BD_BUSY);
        bd_cache_info(w->cache, variant, bd_now_us(), &info);
    } while (info.state != BD_VARIANT_ABSENT);
}

/* The first variant once more, in `shards` files. */
static bd_variant *add_resharded(world *w, const char *folder, uint32_t shards) {
    char from[320], to[320];
    bd_error err = {0};
    snprintf(from, sizeof from, "demo/deltas/%.63s", w->names[0]);
    snprintf(to, sizeof to, "%s/%u", folder, shards);
    const bd_reshard_request request = {
        .delta_dir = from, .out_dir = to, .base_dir = "demo/zen-mini", .shards = shards};
    FILE *none = fopen("/dev/null", "w");
    assert_non_null(none);
    MS_OK(bd_reshard_run(&request, none, none, &err), err);
    fclose(none);
    bd_variant *variant = add_variant(w, to);
    assert_int_equal(variant->delta.shard_count, shards);
    return variant;
}

/* get, and the load is over: nothing is read any more, and its copy is whole. */
static result get_whole(world *w, bd_variant *variant) {
    result r = get(w, variant);
    while (r.status == BD_OK && r.lease.load && !bd_load_finished(r.lease.load))
        usleep(200);
    return r;
}

/* A rank that fails while the copy is written, or while it is read: no copy is left, and then a
 * whole one is made. */
static void fail_once(world *w, bd_variant *variant, uint32_t rank, bool copied) {
    bd_variant_info info;
    make_cold(w, variant);
    bd_cache_info(w->cache, variant, bd_now_us(), &info);
    assert_true((info.host_bytes > 0) == copied);
    atomic_store(&refusing.after, 20);
    atomic_store(&refusing.rank, rank);
    result r = get(w, variant);
    assert_int_equal(r.status, BD_E_DEVICE);
    atomic_store(&refusing.rank, FINE);
    bd_cache_info(w->cache, variant, bd_now_us(), &info);
    assert_int_equal(info.host_bytes, 0);
    usleep(1000); /* beyond retry_after_us */
}

/* Stopped while its copy is being written: the next load does not take that for whole. */
static void stop_and_ask(world *w, uint32_t i, const float *want) {
    bd_error err = {0};
    const bd_status s = bd_cache_prefetch(w->cache, w->v[i], bd_now_us(), &err);
    assert_true(s == BD_AGAIN || s == BD_OK);
    usleep(i * 100);
    make_cold(w, w->v[i]);
    bd_variant_info info;
    bd_cache_info(w->cache, w->v[i], bd_now_us(), &info);
    const double before = disk_bytes(w);
    result r = get_whole(w, w->v[i]);
    check_logits(w, &r, w->names[i], want);
    assert_true((disk_bytes(w) > before) == (info.host_bytes == 0));
}

static void check_host(bool stream) {
    char folder[] = "/tmp/bd-tp-XXXXXX", command[64];
    world w;
    assert_non_null(mkdtemp(folder));
    open_world_host(&w, stream, 64u << 20);
    const uint32_t width = bd_model_logits_width(w.model);
    float *want = reference(&w, width);
    bd_variant *variants[] = {w.v[0], w.v[1], add_resharded(&w, folder, 2),
                              add_resharded(&w, folder, 4)};
    const char *const names[] = {"one shard", "another variant", "two shards", "four shards"};
    enum { COUNT = sizeof variants / sizeof variants[0] };
    double read[COUNT];
    for (uint32_t n = 0; n < 3 * COUNT; n++) {
        const uint32_t i = n % COUNT;
        if (n >= COUNT) make_cold(&w, variants[i]);
        const double before = disk_bytes(&w);
        result r = get_whole(&w, variants[i]);
        check_logits(&w, &r, names[i], want + (i == 1) * width);
        bd_cache_poll(w.cache, bd_now_us());
        read[i] = disk_bytes(&w) - before;
        bd_variant_info info;
        bd_cache_info(w.cache, variants[i], bd_now_us(), &info);
        assert_int_equal(info.host_hits, n / COUNT);
        assert_true(info.host_bytes > 0 && info.host_bytes == info.file_bytes);
        if (n >= COUNT)
            assert_true(read[i] == 0);
        else
            assert_true(read[i] >= (double)info.file_bytes);
    }
    if (!stream)
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            bd_variant *variant = variants[rank];
            fail_once(&w, variant, rank, true);
            fail_once(&w, variant, rank, false);
            result r = get(&w, variant);
            check_logits(&w, &r, names[rank], want + (rank == 1) * width);
        }
    for (uint32_t i = 2; i < w.count; i++)
        stop_and_ask(&w, i, want + (size_t)i * width);
    free(want);
    close_world(&w);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

static void from_host_memory(void **state) {
    (void)state;
    check_host(false);
    check_host(true);
}

int main(void) {
    atomic_store(&refusing.rank, FINE);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_variant),       cmocka_unit_test(every_variant_early),
        cmocka_unit_test(faults_of_files),     cmocka_unit_test(any_rank_alone),
        cmocka_unit_test(cancelled_loads_end), cmocka_unit_test(from_host_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
