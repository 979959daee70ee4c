/* test_model_bring.c - feeding a backend that does what it is told later: one whose puts lie in a
 * queue and take their bytes from what was brought, as a device does that copies by itself. What a
 * feed calls ready is in the pages; when it is complete or given up nothing is on its way; bytes in
 * the queue are those of the file. */
#include "model_reference.h"

enum { QUEUE_MAX = 65536, MARKS_MAX = 4096 };

typedef struct put {
    bool plane;
    uint8_t *dst;
    uint32_t n, k;
    bd_plane_part part;
    uint64_t first, count;
    const void *src;
    void *kept; /* copied at once: what was not brought; or what was, by the window's end */
} put;

static struct {
    const bd_backend_ops *real;
    bd_backend_ops ops;
    bd_backend *backend;
    put queue[QUEUE_MAX];
    uint32_t put_count, done;
    uint32_t marks[MARKS_MAX], mark_count;
    const uint8_t *from; /* the open window */
    uint64_t bytes;
    uint32_t refused_of_100; /* are not brought */
    uint32_t brought, flushes, in_window;
    uint64_t random;
} later;

static void run_until(uint32_t count) {
    bd_error err = {0};
    for (; later.done < count; later.done++) {
        put *p = &later.queue[later.done];
        p->part.src = p->kept;
        if (p->plane)
            MS_OK(later.real->plane_put(later.backend, p->dst, p->n, p->k, p->part.first_row,
                                        p->part.row_count, p->kept, p->part.src_stride_bytes, &err),
                  err);
        else
            MS_OK(later.real->vector_put(later.backend, p->dst, p->first, p->kept, p->count, &err),
                  err);
        free(p->kept);
        p->kept = NULL;
    }
}

static bool in_window(const void *src, uint64_t bytes) {
    const uintptr_t at = (uintptr_t)src, from = (uintptr_t)later.from;
    return later.from && at >= from && at + bytes <= from + later.bytes;
}

/* What the open window's puts want is copied now, and no sooner. */
static void window_end(void) {
    for (uint32_t i = later.done; later.from && i < later.put_count; i++) {
        put *p = &later.queue[i];
        if (p->kept) continue;
        const uint64_t bytes =
            p->plane ? p->part.row_count * p->part.src_stride_bytes : 4 * p->count;
        p->kept = malloc(bytes);
        assert_non_null(p->kept);
        memcpy(p->kept, p->src, bytes);
    }
    later.from = NULL;
}

static bd_status add(put p, uint64_t bytes) {
    assert_true(later.put_count < QUEUE_MAX);
    if (in_window(p.src, bytes)) {
        later.in_window++;
    } else {
        p.kept = malloc(bytes);
        assert_non_null(p.kept);
        memcpy(p.kept, p.src, bytes);
    }
    later.queue[later.put_count++] = p;
    return BD_OK;
}

static bd_status later_plane_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                                 uint32_t first_row, uint32_t row_count, const void *src,
                                 uint64_t src_stride_bytes, bd_error *err) {
    later.backend = backend;
    (void)err;
    return add((put){.plane = true,
                     .dst = dst,
                     .n = n,
                     .k = k,
                     .part = {.first_row = first_row,
                              .row_count = row_count,
                              .src_stride_bytes = src_stride_bytes},
                     .src = src},
               row_count * src_stride_bytes);
}

static bd_status later_vector_put(bd_backend *backend, void *dst, uint64_t first, const float *src,
                                  uint64_t count, bd_error *err) {
    later.backend = backend;
    (void)err;
    return add((put){.dst = dst, .first = first, .count = count, .src = src}, 4 * count);
}

static bd_status later_flush(bd_backend *backend, bd_error *err) {
    (void)backend, (void)err;
    window_end();
    run_until(later.put_count);
    later.flushes++;
    return BD_OK;
}

static bd_status later_bring(bd_backend *backend, const void *data, uint64_t bytes, bool *brought,
                             bd_error *err) {
    (void)backend, (void)err;
    window_end();
    *brought = support_random(&later.random) % 100 >= later.refused_of_100;
    if (!*brought) return BD_OK;
    later.from = data;
    later.bytes = bytes;
    later.brought++;
    return BD_OK;
}

static bd_status later_mark(bd_backend *backend, uint64_t *mark, bd_error *err) {
    (void)backend, (void)err;
    assert_true(later.mark_count < MARKS_MAX);
    later.marks[later.mark_count++] = later.put_count;
    *mark = later.mark_count;
    return BD_OK;
}

static bd_status later_reached(bd_backend *backend, uint64_t mark, bool *reached, bd_error *err) {
    (void)backend, (void)err;
    assert_true(mark >= 1 && mark <= later.mark_count);
    const uint32_t left = later.put_count - later.done;
    window_end(); /* asked between windows: what is not copied yet cannot be run */
    run_until(later.done + (uint32_t)(support_random(&later.random) % (left + 1)));
    *reached = later.done >= later.marks[mark - 1];
    return BD_OK;
}

static void reset(const bd_backend_ops *real, uint64_t random) {
    memset(&later, 0, sizeof later);
    later.real = real;
    later.random = random;
    later.ops = *real;
    later.ops.plane_put = later_plane_put;
    later.ops.vector_put = later_vector_put;
    later.ops.plane_part_put = NULL;
    later.ops.rows_put = NULL;
    later.ops.put_flush = later_flush;
    later.ops.bring = later_bring;
    later.ops.put_mark = later_mark;
    later.ops.put_reached = later_reached;
}

/* ---- */

typedef struct scene {
    char path[600], dir[256];
    mr_model reference;
    bd_model *plain, *model;
    ms_variant want, got;
    bd_mapped_file map;
    uint64_t random;
} scene;

static void *const *pages_for(bd_model *model, ms_variant *v, const char *dir) {
    bd_error err = {0};
    const uint64_t page_bytes =
        bd_overlay_page_bytes(bd_model_config_of(model), bd_model_ops(model));
    MS_OK(bd_delta_open(dir, &v->delta, &err), err);
    MS_OK(bd_overlay_plan_create(model, &v->delta, &v->plan, &err), err);
    v->pages = calloc(v->plan.page_count, sizeof *v->pages);
    assert_non_null(v->pages);
    uint8_t *arena = bd_model_ops(model)->delta_arena(bd_model_backend(model));
    for (uint32_t i = 0; i < v->plan.page_count; i++) {
        v->pages[i] = arena + i * page_bytes;
        memset(v->pages[i], 0xEE, page_bytes);
    }
    return v->pages;
}

static void open_scene(scene *sc) {
    bd_error err = {0};
    memset(sc, 0, sizeof *sc);
    sc->random = support_seed();
    snprintf(sc->path, sizeof sc->path, "tests/data/arch/qwen2"); /* has biases */
    mr_open(&sc->reference, sc->path);
    mr_make_delta(&sc->reference, &sc->random, 2, &(mr_fault){0}, sc->dir);
    reset(bd_backend_cpu_ops(), support_random(&sc->random));
    for (int i = 0; i < 2; i++) {
        bd_model_options options = ms_options(sc->path);
        options.kv_tokens = 1024;
        options.delta_slots = 2;
        if (i) options.ops = &later.ops;
        MS_OK(bd_model_open(&options, i ? &sc->model : &sc->plain, &err), err);
    }
    pages_for(sc->plain, &sc->want, sc->dir);
    MS_OK(ms_feed(sc->plain, &sc->want, 0, &err), err);
    pages_for(sc->model, &sc->got, sc->dir);
    snprintf(sc->path, sizeof sc->path, "%s/shard-00-of-01.safetensors", sc->dir);
    MS_OK(bd_file_map(sc->path, &sc->map, &err), err);
}

static void close_scene(scene *sc) {
    bd_file_unmap(&sc->map);
    ms_variant_close(&sc->want);
    ms_variant_close(&sc->got);
    mr_remove_delta(sc->dir);
    bd_model_close(sc->plain);
    bd_model_close(sc->model);
    mr_close(&sc->reference);
}

/* The pieces of what is ready are in the pages. */
static void check_ready(const scene *sc, uint32_t ready) {
    const bd_backend_ops *ops = later.real;
    for (uint32_t i = 0; i < sc->got.plan.piece_count; i++) {
        const bd_overlay_piece *piece = &sc->got.plan.pieces[i];
        if (piece->ready_index >= ready) continue;
        const uint64_t at = piece->page_offset_bytes,
                       bytes = piece->kind == BD_PIECE_BITS
                                   ? ops->plane_bytes(piece->n, piece->k)
                                   : piece->bytes / bd_dtype_bytes(piece->dtype) * sizeof(float);
        if (memcmp((uint8_t *)sc->got.pages[piece->page] + at,
                   (uint8_t *)sc->want.pages[piece->page] + at, bytes))
            fail_msg("%s is called ready, but not there", piece->tensor);
    }
}

/* Feeds until `until`, in steps of any size up to step_max. */
static void feed_some(scene *sc, bd_overlay_feed *feed, uint64_t until, uint64_t step_max) {
    bd_error err = {0};
    for (uint64_t from = 0; from < until;) {
        uint64_t n = 1 + support_random(&sc->random) % step_max;
        if (n > until - from) n = until - from;
        MS_OK(bd_overlay_feed_bytes(feed, 0, from, sc->map.data + from, n, &err), err);
        check_ready(sc, bd_overlay_feed_ready(feed));
        from += n;
    }
}

static void ready_is_in_the_pages(void **state) {
    static const uint64_t steps[] = {500, 5000, 60000, 10000000};
    (void)state;
    for (uint32_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        scene sc;
        bd_error err = {0};
        bd_overlay_feed *feed;
        open_scene(&sc);
        MS_OK(bd_overlay_feed_create(sc.model, &sc.got.plan, sc.got.pages, &feed, &err), err);
        feed_some(&sc, feed, sc.map.bytes, steps[i]);
        assert_int_equal(bd_overlay_feed_ready(feed), sc.got.plan.ready_count);
        assert_int_equal(later.done, later.put_count);
        assert_int_equal(later.flushes, 1); /* nothing was waited for before the end */
        assert_true(later.brought > 0 && later.in_window > 0);
        bd_overlay_feed_destroy(feed);
        assert_int_equal(later.flushes, 1);
        close_scene(&sc);
    }
}

/* Where nothing is brought every layer is waited for, as ever; and all mixtures are right too. */
static void refused(void **state) {
    static const uint32_t parts[] = {100, 90, 50, 10};
    (void)state;
    for (uint32_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        scene sc;
        bd_error err = {0};
        bd_overlay_feed *feed;
        open_scene(&sc);
        later.refused_of_100 = parts[i];
        MS_OK(bd_overlay_feed_create(sc.model, &sc.got.plan, sc.got.pages, &feed, &err), err);
        feed_some(&sc, feed, sc.map.bytes, 5000);
        assert_int_equal(bd_overlay_feed_ready(feed), sc.got.plan.ready_count);
        assert_int_equal(later.done, later.put_count);
        if (parts[i] == 100) assert_true(later.flushes > 1 && later.mark_count == 0);
        bd_overlay_feed_destroy(feed);
        close_scene(&sc);
    }
}

static void given_up(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 5; i++) {
        scene sc;
        bd_error err = {0};
        bd_overlay_feed *feed;
        open_scene(&sc);
        MS_OK(bd_overlay_feed_create(sc.model, &sc.got.plan, sc.got.pages, &feed, &err), err);
        feed_some(&sc, feed, sc.map.bytes / 4 + support_random(&sc.random) % (sc.map.bytes / 2),
                  5000);
        bd_overlay_feed_destroy(feed);
        assert_int_equal(later.done, later.put_count);
        assert_null(later.from);
        close_scene(&sc);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ready_is_in_the_pages),
        cmocka_unit_test(refused),
        cmocka_unit_test(given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
