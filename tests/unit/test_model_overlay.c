/* test_model_overlay.c - deltas of fresh random data over the seven tiny models, fed in pieces of
 * odd sizes, against a float64 forward pass over W_base + scale * sign (model_reference.h); and
 * deltas that do not fit, each refused by the name of what is wrong. */
#include <pthread.h>
#include <stdatomic.h>

#include "model_reference.h"

enum { PROMPTS = 3, PLANES_MAX = 2, ARCHS = 7 };
static const double logits_l2_max = 1e-5;
static const uint32_t prompt_tokens[PROMPTS] = {1, 23, 40};

static const char *const archs[ARCHS] = {"llama-gqa", "qwen2", "llama3-rope", "mistral-window",
                                         "qwen3",     "phi3",  "gemma2"};

static void arch_path(char *out, size_t out_bytes, const char *arch) {
    snprintf(out, out_bytes, "tests/data/arch/%s", arch);
}

static bd_model *open_model(const char *path, uint32_t slots) {
    bd_error err = {0};
    bd_model *model;
    bd_model_options options = ms_options(path);
    options.kv_tokens = 1024;
    options.delta_slots = slots;
    MS_OK(bd_model_open(&options, &model, &err), err);
    return model;
}

/* One batch: the base, and a delta of one plane and one of two, each with every prompt. */
static void check_arch(const char *arch, uint64_t *random) {
    char path[600], dirs[PLANES_MAX][256];
    bd_error err = {0};
    mr_model reference;
    ms_variant variants[PLANES_MAX] = {0};
    ms_run runs[(PLANES_MAX + 1) * PROMPTS] = {0};
    int32_t ids[64];
    uint32_t page = 0;
    arch_path(path, sizeof path, arch);
    mr_open(&reference, path);
    bd_model *model = open_model(path, 3);
    const uint32_t vocab = reference.config.vocab;
    for (int i = 0; i < 64; i++)
        ids[i] = (int32_t)(support_random(random) % vocab);
    for (uint32_t p = 0; p < PLANES_MAX; p++) {
        const mr_fault none = {0};
        mr_make_delta(&reference, random, p + 1, &none, dirs[p]);
        page += ms_variant_open(model, dirs[p], page, p == 0 ? 0 : 1 + support_random(random) % 997,
                                &variants[p]);
    }
    for (uint32_t i = 0; i < (PLANES_MAX + 1) * PROMPTS; i++) {
        const uint32_t which = i / PROMPTS;
        runs[i] =
            (ms_run){.prompt = ids, .prompt_count = prompt_tokens[i % PROMPTS], .new_count = 1};
        runs[i].overlay = which == 0 ? NULL : variants[which - 1].overlay;
        runs[i].logits = calloc(vocab, sizeof *runs[i].logits);
        assert_non_null(runs[i].logits);
    }
    ms_run_all(model, runs, (PLANES_MAX + 1) * PROMPTS, MS_ROWS_MAX);
    for (uint32_t i = 0; i < (PLANES_MAX + 1) * PROMPTS; i++) {
        if (i == PROMPTS || i == 2 * PROMPTS) {
            bd_safetensors_close(reference.delta);
            MS_OK(bd_delta_open_shard(&variants[i / PROMPTS - 1].delta, 0, true, &reference.delta,
                                      &err),
                  err);
        }
        double *want = mr_logits(&reference, ids, runs[i].prompt_count);
        const double l2 = ms_relative_l2(runs[i].logits, want, vocab);
        print_message("%s, %u planes, %u tokens: relative L2 %.2e\n", arch, i / PROMPTS,
                      runs[i].prompt_count, l2);
        if (!(l2 <= logits_l2_max)) fail_msg("%s: logits are off by %g", arch, l2);
        free(want);
        free(runs[i].logits);
    }
    for (uint32_t p = 0; p < PLANES_MAX; p++) {
        ms_variant_close(&variants[p]);
        mr_remove_delta(dirs[p]);
    }
    bd_model_close(model);
    mr_close(&reference);
}

static void random_deltas_match_float64(void **state) {
    uint64_t random = support_seed();
    (void)state;
    for (uint32_t i = 0; i < ARCHS; i++)
        check_arch(archs[i], &random);
}

/* Fingerprints that begin alike are shown as far as they differ. */
static void expect_unlike(const char *message) {
    char theirs[65], ours[65];
    assert_int_equal(
        sscanf(message, "%*[^(](%64[0-9a-f]...), not for this one (%64[0-9a-f]...)", theirs, ours),
        2);
    assert_string_not_equal(theirs, ours);
}

/* Makes a delta with one fault, and expects its refusal to name `subject`. */
static void expect_refused(const mr_fault *fault, bd_status status, const char *subject) {
    char path[600], dir[256];
    bd_error err = {0};
    mr_model reference;
    ms_variant v = {0};
    uint64_t random = support_seed();
    arch_path(path, sizeof path, "qwen2");
    mr_open(&reference, path);
    bd_model *model = open_model(path, 1);
    mr_make_delta(&reference, &random, 1, fault, dir);
    MS_OK(bd_delta_open(dir, &v.delta, &err), err);
    const bd_status got = bd_overlay_plan_create(model, &v.delta, &v.plan, &err);
    print_message("%s: %s\n", bd_status_name(got), err.message);
    assert_int_equal(got, status);
    assert_non_null(strstr(err.message, subject));
    if (fault->foreign_base) expect_unlike(err.message);
    assert_int_equal(v.plan.piece_count, 0);
    bd_delta_close(&v.delta);
    mr_remove_delta(dir);
    bd_model_close(model);
    mr_close(&reference);
}

static void foreign_base_is_refused(void **state) {
    (void)state;
    expect_refused(&(mr_fault){.foreign_base = true}, BD_E_MISMATCH, "was made for base tiny");
}

static void missing_tensor_is_named(void **state) {
    (void)state;
    const char *name = "model.layers.1.self_attn.k_proj.weight.scale";
    expect_refused(&(mr_fault){.drop = name}, BD_E_FORMAT, name);
}

static void misshapen_tensor_is_named(void **state) {
    (void)state;
    expect_refused(&(mr_fault){.narrow = "model.layers.0.mlp.up_proj.weight"}, BD_E_MISMATCH,
                   "model.layers.0.mlp.up_proj.weight");
    expect_refused(&(mr_fault){.narrow = "model.layers.1.self_attn.q_proj.bias"}, BD_E_MISMATCH,
                   "model.layers.1.self_attn.q_proj.bias");
}

static void unknown_tensor_is_named(void **state) {
    (void)state;
    expect_refused(&(mr_fault){.rename = "model.layers.0.mlp.up_proj.weight"}, BD_E_MISMATCH,
                   "model.layers.0.odd.weight");
}

static void value_that_is_not_finite_is_named(void **state) {
    char path[600], dir[256];
    bd_error err = {0};
    mr_model reference;
    ms_variant v = {0};
    uint64_t random = support_seed();
    (void)state;
    arch_path(path, sizeof path, "llama-gqa");
    mr_open(&reference, path);
    bd_model *model = open_model(path, 1);
    mr_make_delta(&reference, &random, 1, &(mr_fault){.nan_scale = true}, dir);
    MS_OK(bd_delta_open(dir, &v.delta, &err), err);
    MS_OK(bd_overlay_plan_create(model, &v.delta, &v.plan, &err), err);
    v.pages = calloc(v.plan.page_count, sizeof *v.pages);
    assert_non_null(v.pages);
    const uint64_t page_bytes =
        bd_overlay_page_bytes(bd_model_config_of(model), bd_model_ops(model));
    uint8_t *arena = bd_model_ops(model)->delta_arena(bd_model_backend(model));
    for (uint32_t i = 0; i < v.plan.page_count; i++)
        v.pages[i] = arena + i * page_bytes;
    assert_int_equal(ms_feed(model, &v, 100, &err), BD_E_FORMAT);
    assert_non_null(strstr(err.message, "value 3 of "));
    ms_variant_close(&v);
    mr_remove_delta(dir);
    bd_model_close(model);
    mr_close(&reference);
}

/* Ready indices only ever count what is wholly in place, whenever it came. */
static void feed_waits_for_holes(void **state) {
    char path[600], dir[256];
    bd_error err = {0};
    mr_model reference;
    ms_variant v = {0};
    bd_overlay_feed *feed;
    bd_mapped_file map;
    uint64_t random = support_seed();
    (void)state;
    arch_path(path, sizeof path, "llama-gqa");
    mr_open(&reference, path);
    bd_model *model = open_model(path, 1);
    mr_make_delta(&reference, &random, 1, &(mr_fault){0}, dir);
    ms_variant_open(model, dir, 0, 0, &v);
    snprintf(path, sizeof path, "%s/shard-00-of-01.safetensors", dir);
    MS_OK(bd_file_map(path, &map, &err), err);
    MS_OK(bd_overlay_feed_create(model, &v.plan, v.pages, &feed, &err), err);
    /* All but one byte of some piece: what it belongs to is not ready, nor is anything after it. */
    const bd_overlay_piece *piece = &v.plan.pieces[support_random(&random) % v.plan.piece_count];
    const uint64_t hole = piece->offset_bytes + support_random(&random) % piece->bytes;
    MS_OK(bd_overlay_feed_bytes(feed, 0, 0, map.data, hole, &err), err);
    MS_OK(bd_overlay_feed_bytes(feed, 0, hole + 1, map.data + hole + 1, map.bytes - hole - 1, &err),
          err);
    assert_int_equal(bd_overlay_feed_ready(feed), piece->ready_index);
    MS_OK(bd_overlay_feed_bytes(feed, 0, hole, map.data + hole, 1, &err), err);
    assert_int_equal(bd_overlay_feed_ready(feed), v.plan.ready_count);
    bd_overlay_feed_destroy(feed);
    bd_file_unmap(&map);
    ms_variant_close(&v);
    mr_remove_delta(dir);
    bd_model_close(model);
    mr_close(&reference);
}

static void write_config(const char *dir, const char *arch, const char *key, double value) {
    char path[600];
    bd_error err = {0};
    snprintf(path, sizeof path, "tests/data/arch/%s/config.json", arch);
    cJSON *root = ms_json(path);
    cJSON_DeleteItemFromObjectCaseSensitive(root, key);
    assert_non_null(cJSON_AddNumberToObject(root, key, value));
    char *text = cJSON_Print(root);
    assert_non_null(text);
    snprintf(path, sizeof path, "%s/config.json", dir);
    MS_OK(bd_file_replace(path, text, strlen(text), &err), err);
    cJSON_free(text);
    cJSON_Delete(root);
}

/* A variant with its own rope_theta: the reference is told the same theta. Tables are shared, and
 * come back when the overlay goes. */
/* ---- Bytes in any order, by several threads ---- */

enum { FEEDERS = 4 };

typedef struct cuts { /* a file, cut anywhere, in a random order */
    bd_overlay_feed *feed;
    const uint8_t *data;
    uint64_t *from, *bytes; /* [count] */
    uint32_t count;
    _Atomic uint32_t next;
} cuts;

static void *feed_some(void *arg) {
    cuts *c = arg;
    bd_error err = {0};
    for (;;) {
        const uint32_t i = atomic_fetch_add(&c->next, 1);
        if (i >= c->count) return NULL;
        const uint64_t from = c->from[i];
        if (bd_overlay_feed_bytes(c->feed, 0, from, c->data + from, c->bytes[i], &err) != BD_OK)
            return c;
    }
}

static void cut(cuts *c, uint64_t bytes, uint64_t *random) {
    const uint64_t average = bytes / (4 + support_random(random) % 400) + 1;
    c->from = calloc(bytes, sizeof *c->from);
    c->bytes = calloc(bytes, sizeof *c->bytes);
    assert_true(c->from && c->bytes);
    c->count = 0;
    for (uint64_t at = 0; at < bytes; c->count++) {
        uint64_t n = 1 + support_random(random) % (2 * average);
        if (n > bytes - at) n = bytes - at;
        const uint64_t k = support_random(random) % (c->count + 1);
        c->from[c->count] = c->from[k], c->bytes[c->count] = c->bytes[k];
        c->from[k] = at, c->bytes[k] = n;
        at += n;
    }
}

static void feed_anyhow(const uint8_t *data, uint64_t bytes, bd_overlay_feed *feed,
                        uint64_t *random) {
    pthread_t threads[FEEDERS];
    cuts c = {.feed = feed, .data = data};
    cut(&c, bytes, random);
    for (uint32_t i = 0; i < FEEDERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, feed_some, &c), 0);
    for (uint32_t i = 0; i < FEEDERS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    free(c.from);
    free(c.bytes);
}

/* The pages are those of a feed from the first byte to the last. */
static void bytes_come_in_any_order(void **state) {
    static const char *const deltas[] = {"demo/deltas/zen-mini-c", "demo/deltas/zen-mini-coder"};
    bd_error err = {0};
    uint64_t random = support_seed();
    bd_model *model;
    (void)state;
    bd_model_options options = ms_options("demo/zen-mini");
    options.delta_slots = 1;
    MS_OK(bd_model_open(&options, &model, &err), err);
    assert_true(bd_overlay_feeds_anywhere(model));
    uint8_t *arena = bd_model_ops(model)->delta_arena(bd_model_backend(model));
    const size_t arena_bytes = bd_model_page_count(model) * bd_model_page_bytes(model);
    uint8_t *want = malloc(arena_bytes);
    assert_non_null(want);
    for (uint32_t n = 0; n < 12; n++) {
        char path[600];
        ms_variant v = {0};
        bd_mapped_file map;
        bd_overlay_feed *feed;
        memset(arena, 0xa5, arena_bytes);
        ms_variant_open(model, deltas[n % 2], 0, 0, &v);
        memcpy(want, arena, arena_bytes);
        memset(arena, 0xa5, arena_bytes);
        snprintf(path, sizeof path, "%s/shard-00-of-01.safetensors", deltas[n % 2]);
        MS_OK(bd_file_map(path, &map, &err), err);
        MS_OK(bd_overlay_feed_create(model, &v.plan, v.pages, &feed, &err), err);
        feed_anyhow(map.data, map.bytes, feed, &random);
        assert_int_equal(bd_overlay_feed_ready(feed), v.plan.ready_count);
        assert_memory_equal(arena, want, arena_bytes);
        bd_overlay_feed_destroy(feed);
        bd_file_unmap(&map);
        ms_variant_close(&v);
    }
    free(want);
    bd_model_close(model);
}

static void own_config_changes_rope_and_window(void **state) {
    char path[600], dir[256];
    mr_model reference;
    ms_variant v = {0};
    ms_run runs[2] = {0};
    int32_t ids[40];
    bd_error err = {0};
    uint64_t random = support_seed();
    (void)state;
    arch_path(path, sizeof path, "mistral-window");
    mr_open(&reference, path);
    bd_model *model = open_model(path, 1);
    const uint32_t vocab = reference.config.vocab;
    for (int i = 0; i < 40; i++)
        ids[i] = (int32_t)(support_random(&random) % vocab);
    mr_make_delta(&reference, &random, 1, &(mr_fault){0}, dir);
    write_config(dir, "mistral-window", "rope_theta", 20000.0);
    ms_variant_open(model, dir, 0, 0, &v);
    assert_int_equal(v.overlay->rope_table, 1);
    for (uint32_t i = 0; i < 2; i++) {
        runs[i] = (ms_run){
            .prompt = ids, .prompt_count = 40, .new_count = 1, .overlay = i ? v.overlay : NULL};
        runs[i].logits = calloc(vocab, sizeof *runs[i].logits);
        assert_non_null(runs[i].logits);
    }
    ms_run_all(model, runs, 2, MS_ROWS_MAX);
    for (uint32_t i = 0; i < 2; i++) {
        if (i == 1) {
            reference.config.rope.theta = 20000.0;
            MS_OK(bd_delta_open_shard(&v.delta, 0, true, &reference.delta, &err), err);
        }
        double *want = mr_logits(&reference, ids, 40);
        const double l2 = ms_relative_l2(runs[i].logits, want, vocab);
        if (!(l2 <= logits_l2_max)) fail_msg("sequence %u: logits are off by %g", i, l2);
        free(want);
        free(runs[i].logits);
    }
    write_config(dir, "mistral-window", "sliding_window", 7);
    bd_overlay *second;
    MS_OK(bd_overlay_create(model, &v.delta, &v.plan, v.pages, &second, &err), err);
    assert_int_equal(second->rope_table, 0);
    assert_int_equal(second->window_tokens, 7);
    bd_overlay_destroy(second);
    ms_variant_close(&v);
    mr_remove_delta(dir);
    bd_model_close(model);
    mr_close(&reference);
}

/* The same weights under other frequencies give other keys and values: another digest, though the
 * table has the index of the one before. */
static void digest_follows_the_frequencies(void **state) {
    static const double thetas[] = {20000.0, 30000.0, 20000.0};
    enum { TURNS = sizeof thetas / sizeof thetas[0] };
    char path[600], dir[256];
    mr_model reference;
    ms_variant v = {0};
    bd_error err = {0};
    uint8_t digests[TURNS][32];
    uint64_t random = support_seed();
    (void)state;
    arch_path(path, sizeof path, "llama-gqa");
    mr_open(&reference, path);
    bd_model *model = open_model(path, 1);
    mr_make_delta(&reference, &random, 1, &(mr_fault){0}, dir);
    ms_variant_open(model, dir, 0, 0, &v);
    assert_memory_equal(v.overlay->digest, v.delta.digest, sizeof v.delta.digest);
    for (int i = 0; i < TURNS; i++) {
        bd_overlay *own;
        write_config(dir, "llama-gqa", "rope_theta", thetas[i]);
        MS_OK(bd_overlay_create(model, &v.delta, &v.plan, v.pages, &own, &err), err);
        assert_int_equal(own->rope_table, 1);
        memcpy(digests[i], own->digest, sizeof digests[i]);
        bd_overlay_destroy(own);
    }
    assert_memory_not_equal(digests[0], digests[1], sizeof digests[0]);
    assert_memory_not_equal(digests[0], v.delta.digest, sizeof digests[0]);
    assert_memory_equal(digests[0], digests[2], sizeof digests[0]);
    ms_variant_close(&v);
    mr_remove_delta(dir);
    bd_model_close(model);
    mr_close(&reference);
}

static uint32_t flushes;

static bd_status count_flush(bd_backend *backend, bd_error *err) {
    (void)backend;
    (void)err;
    flushes++;
    return BD_OK;
}

/* A backend may still be copying when a load is given up: it is waited for before source and pages
 * are used for something else. */
static void given_up_feed_is_waited_for(void **state) {
    char path[600], dir[256];
    mr_model reference;
    ms_variant v = {0};
    bd_error err = {0};
    bd_overlay_feed *feed;
    bd_model *model;
    uint64_t random = support_seed();
    (void)state;
    arch_path(path, sizeof path, "llama-gqa");
    mr_open(&reference, path);
    bd_backend_ops ops = *bd_backend_cpu_ops();
    ops.put_flush = count_flush;
    bd_model_options options = ms_options(path);
    options.ops = &ops;
    options.delta_slots = 1;
    MS_OK(bd_model_open(&options, &model, &err), err);
    mr_make_delta(&reference, &random, 1, &(mr_fault){0}, dir);
    ms_variant_open(model, dir, 0, 0, &v);
    assert_true(flushes > 0); /* at each layer's end */
    flushes = 0;
    MS_OK(bd_overlay_feed_create(model, &v.plan, v.pages, &feed, &err), err);
    bd_overlay_feed_destroy(feed);
    assert_int_equal(flushes, 1);
    bd_overlay_feed_destroy(NULL);
    ms_variant_close(&v);
    mr_remove_delta(dir);
    bd_model_close(model);
    mr_close(&reference);
}

/* The page arithmetic that memory is planned with is the one that plans use. */
static void pages_are_as_planned(void **state) {
    bd_error err = {0};
    bd_model *model;
    bd_delta delta;
    bd_overlay_plan plan;
    (void)state;
    bd_model_options options = ms_options("demo/zen-mini");
    options.delta_slots = 2;
    MS_OK(bd_model_open(&options, &model, &err), err);
    const bd_model_config *config = bd_model_config_of(model);
    const uint64_t page_bytes = bd_overlay_page_bytes(config, bd_model_ops(model));
    const uint32_t pages = bd_overlay_pages_per_variant(config, bd_model_ops(model), 1, true);
    assert_int_equal(page_bytes % bd_model_ops(model)->page_align_bytes, 0);
    assert_int_equal(bd_model_page_count(model), 2 * pages);
    MS_OK(bd_delta_open("demo/deltas/zen-mini-c", &delta, &err), err);
    MS_OK(bd_overlay_plan_create(model, &delta, &plan, &err), err);
    assert_int_equal(plan.page_count, pages);
    assert_int_equal(plan.ready_count, config->layers + 2);
    for (uint32_t i = 0; i < plan.piece_count; i++) {
        const bd_overlay_piece *piece = &plan.pieces[i];
        assert_true(piece->page < pages && piece->ready_index < plan.ready_count);
        assert_true(piece->page_offset_bytes +
                        (piece->kind == BD_PIECE_BITS ? piece->bytes : 4ull * piece->n) <=
                    page_bytes);
        if (i > 0)
            assert_true(piece->offset_bytes >=
                        plan.pieces[i - 1].offset_bytes + plan.pieces[i - 1].bytes);
        if (i > 0) assert_true(piece->ready_index >= plan.pieces[i - 1].ready_index);
    }
    bd_overlay_plan_destroy(&plan);
    bd_delta_close(&delta);
    bd_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_deltas_match_float64),
        cmocka_unit_test(foreign_base_is_refused),
        cmocka_unit_test(missing_tensor_is_named),
        cmocka_unit_test(misshapen_tensor_is_named),
        cmocka_unit_test(unknown_tensor_is_named),
        cmocka_unit_test(value_that_is_not_finite_is_named),
        cmocka_unit_test(feed_waits_for_holes),
        cmocka_unit_test(bytes_come_in_any_order),
        cmocka_unit_test(own_config_changes_rope_and_window),
        cmocka_unit_test(digest_follows_the_frequencies),
        cmocka_unit_test(given_up_feed_is_waited_for),
        cmocka_unit_test(pages_are_as_planned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
