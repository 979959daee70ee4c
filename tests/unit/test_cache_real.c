/* test_cache_real.c - cache, loader, delta and model rooms together on the demo family: both
 * readers bring the same bytes into the pages, scales in the pages are those of the file, and a
 * damaged copy is refused naming file and chunk while the others stay served. Three variants' worth
 * of pages for all of them, so that most evict another. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <dirent.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "cache/cache_internal.h"
#include "loader_fake.h"
#include "tp_support.h"

#define FAMILY "demo/deltas"

enum { NAMES_MAX = 32, SLOTS = 3 };

typedef struct world {
    bd_model *model;
    bd_loader *loader;
    bd_cache *cache;
    char names[NAMES_MAX][64];
    bd_variant *v[NAMES_MAX];
    uint32_t count;
} world;

static void must(bd_status status, const bd_error *err) {
    if (status != BD_OK) fail_msg("%s: %s", err->subject, err->message);
}

static void open_model(world *w) {
    const bd_model_options options = tp_demo_options(bd_backend_cpu_ops(), 1, SLOTS);
    bd_error err = {0};
    must(bd_model_open(&options, &w->model, &err), &err);
}

static void open_cache(world *w, bd_io_choice io) {
    bd_error err = {0};
    const bd_loader_options loader = {.model = w->model, .io = io};
    must(bd_loader_create(&loader, &w->loader, &err), &err);
    const bd_cache_options cache = {.model = w->model,
                                    .loader = w->loader,
                                    .page_count = bd_model_page_count(w->model),
                                    .retry_after_us = 1};
    must(bd_cache_create(&cache, &w->cache, &err), &err);
}

static void close_cache(world *w) {
    bd_cache_destroy(w->cache);
    bd_loader_destroy(w->loader);
}

static bd_variant *add_variant(const world *w, const char *dir) {
    bd_error err = {0};
    bd_delta delta;
    bd_variant *variant = NULL;
    must(bd_delta_open(dir, &delta, &err), &err);
    must(bd_cache_register(w->cache, &delta, false, &variant, &err), &err);
    return variant;
}

static void add_family(world *w) {
    DIR *dir = opendir(FAMILY);
    assert_non_null(dir);
    w->count = 0;
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL && w->count < NAMES_MAX;) {
        char path[320];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, FAMILY "/%.255s", entry->d_name);
        snprintf(w->names[w->count], sizeof w->names[0], "%.63s", entry->d_name);
        w->v[w->count++] = add_variant(w, path);
    }
    closedir(dir);
    assert_in_range(w->count, SLOTS + 1, NAMES_MAX);
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

static uint64_t hash_pages(const world *w, const bd_variant *variant) {
    XXH3_state_t *state = XXH3_createState();
    assert_non_null(state);
    XXH3_64bits_reset(state);
    for (uint32_t i = 0; i < variant->held_pages; i++)
        XXH3_64bits_update(state, variant->pages[i], w->cache->pages.page_bytes);
    uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return hash;
}

/* What a page holds beyond its variant's own bytes is left over from others. */
static void blank_arena(const world *w) {
    memset(w->cache->pages.arena, 0, w->cache->pages.count * w->cache->pages.page_bytes);
}

static void check_scales(const bd_variant *variant, const bd_overlay *overlay) {
    static const char name[] = "model.layers.0.self_attn.q_proj.weight.scale";
    bd_error err = {0};
    bd_safetensors *file = NULL;
    must(bd_delta_open_shard(&variant->delta, 0, true, &file, &err), &err);
    const bd_tensor *tensor = bd_safetensors_find(file, name);
    assert_non_null(tensor);
    const bd_plane *plane = &overlay->linears[BD_LINEAR_Q].planes[0];
    assert_memory_equal(plane->scale, tensor->data, tensor->bytes);
    assert_memory_equal(overlay->digest, variant->delta.digest, sizeof overlay->digest);
    bd_safetensors_close(file);
}

static void test_readers_agree(void **state) {
    (void)state;
    static world w;
    uint64_t hashes[2][NAMES_MAX];
    open_model(&w);
    for (uint32_t r = 0; r < 2; r++) {
        open_cache(&w, r == 0 ? BD_IO_AUTO : BD_IO_PREAD);
        add_family(&w);
        for (uint32_t i = 0; i < w.count; i++) {
            /* Alone in memory, so that the arena can be blanked before. */
            blank_arena(&w);
            result got = get(&w, w.v[i]);
            if (got.status != BD_OK) fail_msg("%s: %s", w.names[i], got.error.message);
            check_scales(w.v[i], got.lease.overlay);
            hashes[r][i] = hash_pages(&w, w.v[i]);
            bd_cache_release(w.cache, &got.lease, bd_now_us());
            assert_int_equal(bd_cache_unload(w.cache, w.v[i], NULL), BD_OK);
        }
        assert_int_equal(bd_cache_pages_free(w.cache), bd_model_page_count(w.model));
        close_cache(&w);
    }
    for (uint32_t i = 0; i < w.count; i++) {
        assert_int_equal(hashes[0][i], hashes[1][i]);
        for (uint32_t k = 0; k < i; k++)
            assert_true(hashes[0][i] != hashes[0][k]);
    }
    bd_model_close(w.model);
}

static void copy_variant(const char *from, char *dir, uint64_t flip_at) {
    char source[400], target[400];
    snprintf(dir, 64, P_tmpdir "/bd-test-XXXXXX");
    assert_non_null(mkdtemp(dir));
    static const char *const files[] = {"delta.json", "shard-00-of-01.safetensors"};
    for (uint32_t i = 0; i < 2; i++) {
        bd_error err = {0};
        char *data = NULL;
        size_t bytes = 0;
        snprintf(source, sizeof source, "%.255s/%s", from, files[i]);
        snprintf(target, sizeof target, "%.63s/%s", dir, files[i]);
        must(bd_file_read(source, 64u << 20, &data, &bytes, &err), &err);
        if (i == 1 && flip_at < bytes) data[flip_at] ^= 1;
        fake_write_file(target, (const uint8_t *)data, bytes);
        free(data);
    }
}

static void remove_copy(const char *dir) {
    char path[320];
    snprintf(path, sizeof path, "%s/delta.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/shard-00-of-01.safetensors", dir);
    unlink(path);
    rmdir(dir);
}

static void test_damaged_copy(void **state) {
    (void)state;
    static world w;
    open_model(&w);
    open_cache(&w, BD_IO_AUTO);
    add_family(&w);
    char dir[64], from[320];
    snprintf(from, sizeof from, FAMILY "/%s", w.names[0]);
    copy_variant(from, dir, 500000);
    bd_variant *damaged = add_variant(&w, dir);
    result bad = get(&w, damaged);
    assert_int_equal(bad.status, BD_E_CORRUPT);
    assert_non_null(strstr(bad.error.subject, "shard-00-of-01.safetensors"));
    assert_non_null(strstr(bad.error.message, "chunk 0"));
    result good = get(&w, w.v[0]);
    assert_int_equal(good.status, BD_OK);
    bd_cache_release(w.cache, &good.lease, 1);
    remove_copy(dir);
    /* Directory gone: the same variant, later, names the file that is missing. */
    usleep(10);
    bad = get(&w, damaged);
    assert_int_equal(bad.status, BD_E_NOT_FOUND);
    assert_non_null(strstr(bad.error.message, "shard-00-of-01.safetensors"));
    close_cache(&w);
    bd_model_close(w.model);
}

/* More variants than slots, in random order. */
static void test_family_takes_turns(void **state) {
    (void)state;
    static world w;
    open_model(&w);
    open_cache(&w, BD_IO_AUTO);
    add_family(&w);
    for (uint32_t i = 0; i < 60; i++) {
        bd_variant *variant = w.v[fake_below(w.count)];
        result got = get(&w, variant);
        assert_int_equal(got.status, BD_OK);
        check_scales(variant, got.lease.overlay);
        bd_cache_release(w.cache, &got.lease, bd_now_us());
    }
    uint64_t evictions = 0;
    for (uint32_t i = 0; i < w.count; i++) {
        bd_variant_info info;
        bd_cache_info(w.cache, w.v[i], 0, &info);
        evictions += info.evictions;
        assert_int_equal(info.references, 0);
    }
    assert_true(evictions > 10);
    close_cache(&w);
    bd_model_close(w.model);
}

int main(void) {
    fake_seed("test_cache_real");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_readers_agree),
        cmocka_unit_test(test_damaged_copy),
        cmocka_unit_test(test_family_takes_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
