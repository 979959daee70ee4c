/* test_gpu_loads.c - deltas into the CUDA backend as the server loads them: from a disk and from memory, by io_uring and by threads,
 * and from page-locked host memory in blocks of any size. All give the same logits bit by bit, and those of the CPU within the
 * element type's rounding; loads that run beside steps, that run beside each other or that are cut short disturb nobody. */
#include "gpu_test.h"

#include "../../src/backend/cuda/cuda_internal.h"
#include "../unit/model_support.h"
#include "../../src/cache/host_tier.h"
#include "bitdelta/base/clock.h"
#include "gpu_files.h"

enum { DELTAS = 3, SLOTS = 4, PROMPT = 21, NEW = 3 };
static const gpu_files_shape shape = {1024, 3, 16, 4, 64, 4096, 20001, false};

typedef struct scene {
    char disk[64], memory[64]; /* folders of each kind of file system, where there is one */
    char base[128], dirs[2][DELTAS][128];
    bd_model *model;
    bd_delta deltas[2][DELTAS]; /* the same three on disk and in memory */
    void **pages;               /* all, shuffled anew for every load */
    uint32_t page_count, need;
    int32_t prompt[PROMPT];
    float *want[DELTAS]; /* of the first load of each */
    size_t logits;       /* floats of a run */
} scene;
static scene sc;

/* ---- Loading ---- */

static void *host_alloc(void *ctx, uint64_t bytes) {
    bd_model *model = ctx;
    return bd_model_ops(model)->host_alloc(bd_model_backend(model), bytes);
}
static void host_free(void *ctx, void *memory, uint64_t bytes) {
    bd_model *model = ctx;
    bd_model_ops(model)->host_free(bd_model_backend(model), memory, bytes);
}

static bd_host_tier *tier_open(uint64_t bytes, uint64_t block_bytes) {
    bd_error err = {0};
    bd_host_tier *tier = NULL;
    const bd_host_options options = {
        .bytes = bytes, .block_bytes = block_bytes, .step_bytes = 8u << 20, .memory = {.ctx = sc.model, .alloc = host_alloc, .free = host_free}};
    MS_OK(bd_host_tier_create(&options, &tier, &err), err);
    const uint64_t until = bd_now_us() + 30000000u;
    while (bd_host_tier_total_bytes(tier) < bytes - bytes % block_bytes)
        if (bd_now_us() > until) fail_msg("host memory does not come");
    return tier;
}

static bd_loader *loader_open(bd_io_choice io) {
    bd_error err = {0};
    bd_loader *loader = NULL;
    const bd_loader_options options = {.model = sc.model, .io = io, .depth = 1 + (uint32_t)(test_next() % 8), .loads_in_parallel = 1};
    MS_OK(bd_loader_create(&options, &loader, &err), err);
    return loader;
}

/* Pages [first, first + need) of the list in a new order. */
static void shuffle(uint32_t first) {
    for (uint32_t i = sc.need - 1; i > 0; i--) {
        const uint32_t k = (uint32_t)(test_next() % (i + 1));
        void *kept = sc.pages[first + i];
        sc.pages[first + i] = sc.pages[first + k], sc.pages[first + k] = kept;
    }
}

static bd_load load_of(const bd_delta *delta, uint32_t slot, bd_load_host *host) {
    return (bd_load){.delta = delta, .pages = sc.pages + slot * sc.need, .page_count = sc.need, .host = host};
}
static void submit(bd_loader *loader, bd_load *load) {
    bd_error err = {0};
    MS_OK(bd_loader_submit(loader, load, &err), err);
}
static bd_overlay *finish(bd_load *load) {
    while (!bd_load_finished(load)) {
    }
    if (load->status != BD_OK) fail_msg("%s: %s", load->error.subject, load->error.message);
    return load->overlay;
}
static bd_overlay *load_into(bd_loader *loader, const bd_delta *delta, uint32_t slot, bd_load_host *host) {
    bd_load load = load_of(delta, slot, host);
    shuffle(slot * sc.need);
    submit(loader, &load);
    return finish(&load);
}

/* ---- Looking at what was loaded ---- */

static void run_on(bd_model *model, const bd_overlay *overlay, float *logits) {
    ms_run run = {.prompt = sc.prompt, .prompt_count = PROMPT, .new_count = NEW, .overlay = overlay, .sampling = {.top_p = 1}, .logits = logits};
    ms_run_all(model, &run, 1, PROMPT);
}
static void check(const bd_overlay *overlay, uint32_t delta, const char *how) {
    float *got = calloc(sc.logits, sizeof *got);
    run_on(sc.model, overlay, got);
    for (size_t i = 0; i < sc.logits; i++)
        if (memcmp(&got[i], &sc.want[delta][i], 4)) fail_msg("%s: logit %zu of delta %u is %g, not %g", how, i, delta, (double)got[i], (double)sc.want[delta][i]);
    free(got);
}

/* ---- The scene ---- */

static bd_model *model_open(const bd_backend_ops *ops) {
    bd_error err = {0};
    bd_model *model = NULL;
    bd_model_options o = ms_options(sc.base);
    o.ops = ops, o.kv_tokens = 1024, o.rows_max = 256, o.seqs_max = 4, o.logits_rows_max = 16, o.kv_block_tokens = 16, o.max_model_len = 512, o.delta_slots = SLOTS;
    MS_OK(bd_model_open(&o, &model, &err), err);
    return model;
}

static int set_up(void **state) {
    (void)state;
    bd_error err = {0};
    snprintf(sc.disk, sizeof sc.disk, "/tmp/bd-gpu-loads-XXXXXX");
    snprintf(sc.memory, sizeof sc.memory, "%s/bd-gpu-loads-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(sc.disk) || !mkdtemp(sc.memory)) fail_msg("no folder for files");
    snprintf(sc.base, sizeof sc.base, "%s/base", sc.disk);
    gpu_files_base(sc.base, &shape, false, test_next());
    sc.model = model_open(bd_backend_cuda_ops());
    for (uint32_t d = 0; d < DELTAS; d++) {
        char name[16];
        const uint64_t seed = test_next();
        snprintf(name, sizeof name, "random-%u", d);
        for (uint32_t place = 0; place < 2; place++) {
            snprintf(sc.dirs[place][d], sizeof sc.dirs[place][d], "%s/%s", place ? sc.memory : sc.disk, name);
            gpu_files_delta(sc.dirs[place][d], name, bd_model_fingerprint(sc.model), &shape, 0.004f, seed);
            MS_OK(bd_delta_open(sc.dirs[place][d], &sc.deltas[place][d], &err), err);
        }
    }
    for (uint32_t i = 0; i < PROMPT; i++) sc.prompt[i] = (int32_t)(test_next() % shape.vocab);
    sc.logits = (size_t)NEW * bd_model_logits_width(sc.model);
    sc.need = bd_overlay_pages_for(sc.model, &sc.deltas[0][0]);
    sc.page_count = bd_model_page_count(sc.model);
    assert_true(sc.need * SLOTS <= sc.page_count);
    sc.pages = calloc(sc.page_count, sizeof *sc.pages);
    uint8_t *arena = bd_model_ops(sc.model)->delta_arena(bd_model_backend(sc.model));
    for (uint32_t i = 0; i < sc.page_count; i++) sc.pages[i] = arena + i * bd_model_page_bytes(sc.model);
    bd_loader *loader = loader_open(BD_IO_PREAD);
    for (uint32_t d = 0; d < DELTAS; d++) {
        sc.want[d] = calloc(sc.logits, sizeof *sc.want[d]);
        bd_overlay *overlay = load_into(loader, &sc.deltas[0][d], 0, NULL);
        run_on(sc.model, overlay, sc.want[d]);
        bd_overlay_destroy(overlay);
    }
    bd_loader_destroy(loader);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    for (uint32_t d = 0; d < DELTAS; d++) {
        free(sc.want[d]);
        for (uint32_t place = 0; place < 2; place++) {
            bd_delta_close(&sc.deltas[place][d]);
            gpu_files_remove(sc.dirs[place][d]);
        }
    }
    bd_model_close(sc.model);
    gpu_files_remove(sc.base);
    (void)rmdir(sc.disk), (void)rmdir(sc.memory);
    free(sc.pages);
    return 0;
}

/* ---- Tests ---- */

/* What was loaded is the delta: the CPU, which loads and computes in its own way, says the same. bf16 has 8 bits, and a prompt goes
 * through 3 layers; that a delta is not the base is far more. */
static void test_as_on_the_cpu(void **state) {
    (void)state;
    bd_model *cpu = model_open(bd_backend_cpu_ops());
    const uint32_t width = bd_model_logits_width(sc.model);
    ms_variant v;
    float *got = calloc(sc.logits, sizeof *got), *base = calloc(sc.logits, sizeof *base);
    double *want = calloc(width, sizeof *want);
    assert_int_equal(bd_model_logits_width(cpu), width);
    run_on(cpu, NULL, base);
    for (uint32_t d = 0; d < DELTAS; d++) {
        ms_variant_open(cpu, sc.dirs[0][d], 0, 0, &v);
        run_on(cpu, v.overlay, got);
        for (uint32_t k = 0; k < width; k++) want[k] = got[k];
        const double off = relative_l2(sc.want[d], want, width), base_off = relative_l2(base, want, width);
        printf("delta %u: relative L2 from the CPU's logits %.2e, the base alone %.2e\n", d, off, base_off);
        assert_true(base_off > 0.2);
        assert_true(off < 2e-2);
        ms_variant_close(&v);
    }
    free(got), free(base), free(want);
    bd_model_close(cpu);
}

static void test_files(void **state) {
    (void)state;
    static const bd_io_choice ios[] = {BD_IO_PREAD, BD_IO_AUTO};
    for (uint32_t i = 0; i < 12; i++) {
        char how[64];
        bd_loader *loader = loader_open(ios[i % 2]);
        const uint32_t place = i / 2 % 2, d = (uint32_t)(test_next() % DELTAS);
        bd_overlay *overlay = load_into(loader, &sc.deltas[place][d], i % SLOTS, NULL);
        snprintf(how, sizeof how, "%s, %s", bd_loader_io_name(loader), place ? "memory" : "disk");
        check(overlay, d, how);
        bd_overlay_destroy(overlay);
        bd_loader_destroy(loader);
    }
}

/* Kept while it is read, then loaded without the files; blocks that cut rows anywhere. */
static void test_host_memory(void **state) {
    (void)state;
    const uint64_t bytes = sc.deltas[0][0].files[0].bytes;
    for (uint32_t i = 0; i < 8; i++) {
        char how[64];
        const uint64_t block = i < 2 ? 262144 : i == 2 ? 4u << 20 : 1000 + test_next() % 700000;
        bd_host_tier *tier = tier_open(2 * bytes + 4 * block, block);
        bd_loader *loader = loader_open(i % 2 ? BD_IO_PREAD : BD_IO_AUTO);
        bd_load_host *kept[2];
        for (uint32_t d = 0; d < 2; d++) {
            kept[d] = bd_host_tier_take(tier, bytes);
            assert_non_null(kept[d]);
            assert_true(cuda_host_locked(kept[d]->blocks[0]));
            bd_overlay *overlay = load_into(loader, &sc.deltas[i / 2 % 2][d], d, kept[d]);
            assert_true(kept[d]->filled);
            check(overlay, d, "a load that leaves a copy");
            bd_overlay_destroy(overlay);
        }
        snprintf(how, sizeof how, "from host memory in blocks of %llu", (unsigned long long)block);
        for (uint32_t n = 0; n < 4; n++) {
            bd_overlay *overlay = load_into(loader, &sc.deltas[0][n % 2], (uint32_t)(test_next() % SLOTS), kept[n % 2]);
            check(overlay, n % 2, how);
            bd_overlay_destroy(overlay);
        }
        bd_loader_destroy(loader);
        for (uint32_t d = 0; d < 2; d++) bd_host_tier_give(tier, kept[d]);
        bd_host_tier_destroy(tier);
    }
}

/* Two loads at once, one from host memory and one from files, while a third variant computes. */
static void test_beside_steps(void **state) {
    (void)state;
    bd_error err = {0};
    const uint64_t bytes = sc.deltas[0][0].files[0].bytes;
    bd_host_tier *tier = tier_open(bytes + (1u << 20), 262144);
    bd_load_host *kept = bd_host_tier_take(tier, bytes);
    bd_loader *loader = NULL;
    const bd_loader_options options = {.model = sc.model, .loads_in_parallel = 2};
    MS_OK(bd_loader_create(&options, &loader, &err), err);
    bd_overlay_destroy(load_into(loader, &sc.deltas[1][1], 1, kept));
    bd_overlay *hot = load_into(loader, &sc.deltas[1][0], 0, NULL);
    for (uint32_t round = 0; round < 10; round++) {
        shuffle(sc.need), shuffle(2 * sc.need);
        bd_load from_host = load_of(&sc.deltas[1][1], 1, kept), from_file = load_of(&sc.deltas[round % 2][2], 2, NULL);
        submit(loader, &from_host);
        submit(loader, &from_file);
        do check(hot, 0, "beside loads");
        while (!bd_load_finished(&from_host) || !bd_load_finished(&from_file));
        bd_overlay *a = finish(&from_host), *b = finish(&from_file);
        check(a, 1, "from host memory, beside another load");
        check(b, 2, "from a file, beside another load");
        bd_overlay_destroy(a), bd_overlay_destroy(b);
    }
    bd_overlay_destroy(hot);
    bd_loader_destroy(loader);
    bd_host_tier_give(tier, kept);
    bd_host_tier_destroy(tier);
}

/* Pages and host memory of a load that was cut short are another's at once, and what was under way does not reach them. */
static void test_cut_short(void **state) {
    (void)state;
    const uint64_t bytes = sc.deltas[0][0].files[0].bytes;
    bd_host_tier *tier = tier_open(bytes + (1u << 20), 262144);
    bd_load_host *kept = bd_host_tier_take(tier, bytes);
    bd_loader *loader = loader_open(BD_IO_AUTO);
    bd_overlay_destroy(load_into(loader, &sc.deltas[1][0], 0, kept));
    uint32_t cut = 0;
    for (uint32_t round = 0; round < 30; round++) {
        bd_load load = load_of(&sc.deltas[1][round % 2], 0, round % 2 ? NULL : kept);
        shuffle(0);
        submit(loader, &load);
        const uint64_t until = bd_now_us() + test_next() % 2000;
        while (bd_now_us() < until && !bd_load_finished(&load)) {
        }
        atomic_store(&load.cancel, true);
        while (!bd_load_finished(&load)) {
        }
        cut += load.status == BD_CANCELLED;
        if (load.status == BD_OK) bd_overlay_destroy(load.overlay);
        bd_overlay *overlay = load_into(loader, &sc.deltas[1][2], 0, NULL);
        check(overlay, 2, "after a load that was cut short");
        bd_overlay_destroy(overlay);
    }
    printf("%u loads were cut short\n", cut);
    assert_true(cut > 0);
    bd_loader_destroy(loader);
    bd_host_tier_give(tier, kept);
    bd_host_tier_destroy(tier);
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_as_on_the_cpu), cmocka_unit_test(test_files), cmocka_unit_test(test_host_memory), cmocka_unit_test(test_beside_steps),
                                       cmocka_unit_test(test_cut_short)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
