/* test_router_changes.c - goal: what is served can change while requests run. Method: the real
 * router and engine over the fakes, a directory of links to the demo's deltas that the test
 * rearranges, rescans and orders as an operator gives them; the fake cache checks threads, leases
 * and that a forgotten variant is in use by nobody. */
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "router_fake.h"

typedef struct world {
    struct bd_model model;
    bd_cache cache;
    bd_router *router;
    bd_engine *engine;
    fake_device fake;
    bd_engine_options options;
    char root[64], demo[1024];
} world;

static void link_variant(const world *w, const char *name, const char *target) {
    char path[256], full[2048];
    snprintf(path, sizeof path, "%s/%s", w->root, name);
    snprintf(full, sizeof full, "%s/%s", w->demo, target);
    (void)unlink(path);
    assert_int_equal(symlink(full, path), 0);
}

static void unlink_variant(const world *w, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", w->root, name);
    assert_int_equal(unlink(path), 0);
}

static void open_world(world *w) {
    bd_error err;
    bd_delta delta;
    uint32_t added;
    memset(w, 0, sizeof *w);
    snprintf(w->root, sizeof w->root, "/tmp/bd-changes-XXXXXX");
    assert_non_null(mkdtemp(w->root));
    char *cwd = getcwd(NULL, 0);
    snprintf(w->demo, sizeof w->demo, "%s/demo/deltas", cwd);
    free(cwd);
    assert_int_equal(bd_model_config_read("demo/zen-mini", &w->model.config, &err), BD_OK);
    assert_int_equal(bd_delta_open("demo/deltas/zen-mini-c", &delta, &err), BD_OK);
    memcpy(w->model.fingerprint, delta.base_fingerprint, sizeof w->model.fingerprint);
    bd_delta_close(&delta);
    w->cache.pages = 4;
    w->cache.load_us = 2000;
    const bd_router_options router = {.cache = &w->cache,
                                      .model = &w->model,
                                      .base_name = "zen-mini",
                                      .base_dir = "demo/zen-mini",
                                      .cold_wait_max_us = 20000};
    assert_int_equal(bd_router_create(&router, &w->router, &err), BD_OK);
    link_variant(w, "one", "zen-mini-c");
    link_variant(w, "two", "zen-mini-sql");
    assert_int_equal(bd_router_add_directory(w->router, w->root, NULL, NULL, &added, &err), BD_OK);
    assert_int_equal(added, 2);
    w->options = (bd_engine_options){.cache = &w->cache,
                                     .model_name = "zen-mini",
                                     .rows_max = 48,
                                     .prefill_chunk_tokens = 16,
                                     .seqs_max = 12,
                                     .variants_per_step_max = 4,
                                     .logits_rows_max = 16,
                                     .decode_delta = true,
                                     .hooks = bd_router_hooks(w->router)};
    fake_device_init(&w->fake, &w->options, 40, 8, 1);
    assert_int_equal(bd_engine_create_on(&w->options, &w->fake.device, &w->engine, &err), BD_OK);
    bd_router_attach(w->router, w->engine);
    w->cache.engine = w->engine;
    w->fake.engine = w->engine;
    assert_int_equal(bd_engine_start(w->engine, &err), BD_OK);
    assert_int_equal(bd_router_start(w->router, &err), BD_OK);
}

static void close_world(world *w) {
    char command[128];
    bd_engine_stop(w->engine);
    bd_router_stop(w->router);
    bd_engine_destroy(w->engine);
    bd_router_destroy(w->router);
    fake_cache_deinit(&w->cache);
    fake_device_deinit(&w->fake);
    snprintf(command, sizeof command, "rm -rf %s", w->root);
    assert_int_equal(system(command), 0);
}

typedef struct order {
    bd_change change; /* first member */
    atomic_bool done;
} order;

static void on_done(bd_change *change) {
    atomic_store(&((order *)change)->done, true);
}

static void give(world *w, order *o) {
    o->change.done = on_done;
    bd_router_change(w->router, &o->change);
    for (uint32_t i = 0; i < 5000 && !atomic_load(&o->done); i++) {
        fake_sleep_us(1000);
        bd_engine_wake(w->engine); /* the fake cache's loads wake nobody */
    }
    assert_true(atomic_load(&o->done));
}

/* "+added ~replaced -removed !refused =unchanged", names in the order told. */
static void expect_rescan(world *w, const char *expected) {
    static const char signs[] = {'+', '~', '-', '!'};
    order o = {.change = {.kind = BD_CHANGE_RESCAN}};
    char got[1024] = "";
    give(w, &o);
    assert_int_equal(o.change.status, BD_OK);
    for (uint32_t i = 0; i < o.change.entry_count; i++) {
        const bd_change_entry *entry = &o.change.entries[i];
        const char *name = strrchr(entry->name, '/') ? strrchr(entry->name, '/') + 1 : entry->name;
        snprintf(got + strlen(got), sizeof got - strlen(got), "%c%s ", signs[entry->result], name);
        assert_int_equal(entry->fault != NULL, entry->result == BD_CHANGE_REFUSED);
    }
    snprintf(got + strlen(got), sizeof got - strlen(got), "=%u", o.change.unchanged);
    assert_string_equal(got, expected);
    bd_change_clear(&o.change);
}

static bool served(world *w, const char *name) {
    const bd_served *found = bd_router_find(w->router, name, strlen(name), 0);
    bd_router_release(w->router, found);
    return found != NULL;
}

static void test_rescan(void **state) {
    (void)state;
    world w;
    open_world(&w);
    expect_rescan(&w, "=2");
    link_variant(&w, "three", "zen-mini-math");
    expect_rescan(&w, "+zen-mini-math =2");
    expect_rescan(&w, "=3");
    unlink_variant(&w, "one");
    expect_rescan(&w, "-zen-mini-c =2");
    assert_false(served(&w, "zen-mini-c"));
    link_variant(&w, "two", "zen-mini-c"); /* another name in the same place */
    expect_rescan(&w, "-zen-mini-sql +zen-mini-c =1");
    link_variant(&w, "a-copy", "zen-mini-c"); /* sorts first; the name stays where it is */
    expect_rescan(&w, "!a-copy =2");
    unlink_variant(&w, "two");
    expect_rescan(&w, "~zen-mini-c =1");
    assert_true(served(&w, "zen-mini-c"));
    uint32_t count;
    const bd_served **list = bd_router_list(w.router, 0, &count);
    assert_int_equal(count, 3);
    assert_true(list[0]->is_base);
    assert_string_equal(list[1]->name, "zen-mini-c");
    assert_string_equal(list[2]->name, "zen-mini-math");
    bd_router_list_release(w.router, list, count);
    close_world(&w);
}

static void test_bad_ones_alone(void **state) {
    (void)state;
    world w;
    char path[256];
    open_world(&w);
    snprintf(path, sizeof path, "%s/bad", w.root);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/bad/delta.json", w.root);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("{\"format\": 1", file);
    fclose(file);
    link_variant(&w, "three", "zen-mini-math");
    expect_rescan(&w, "+zen-mini-math !bad =2");
    expect_rescan(&w, "!bad =3");
    /* What is served stays served when its files cannot be read: they may come back. */
    link_variant(&w, "one", "../../two/many/names"); /* dangles */
    unlink_variant(&w, "one");
    snprintf(path, sizeof path, "%s/one", w.root);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/one/delta.json", w.root);
    assert_int_equal(symlink("delta.json", path), 0); /* goes round in circles */
    expect_rescan(&w, "!bad !one =3");
    assert_true(served(&w, "zen-mini-c"));
    /* Without its directory nothing is changed at all. */
    char away[80];
    snprintf(away, sizeof away, "%s-away", w.root);
    assert_int_equal(rename(w.root, away), 0);
    order o = {.change = {.kind = BD_CHANGE_RESCAN}};
    give(&w, &o);
    assert_int_equal(o.change.status, BD_E_IO);
    assert_non_null(strstr(o.change.error.message, w.root));
    assert_true(served(&w, "zen-mini-sql"));
    assert_int_equal(rename(away, w.root), 0);
    close_world(&w);
}

/* A holder keeps what it found, and the cache forgets it with the last one. */
static void test_holders(void **state) {
    (void)state;
    world w;
    static bd_router_info infos[8];
    open_world(&w);
    const bd_served *old = bd_router_find(w.router, "zen-mini-c", 10, 0);
    assert_non_null(old);
    unlink_variant(&w, "one");
    expect_rescan(&w, "-zen-mini-c =1");
    assert_string_equal(old->name, "zen-mini-c");
    assert_int_equal(bd_router_infos(w.router, infos, 8), 2);
    assert_true(infos[1].retired && strcmp(infos[1].name, "zen-mini-c") == 0);
    assert_int_equal(w.cache.forgotten, 0);
    bd_router_release(w.router, old);
    for (uint32_t i = 0; i < 5000 && bd_router_infos(w.router, infos, 8) == 2; i++)
        fake_sleep_us(1000);
    assert_int_equal(w.cache.forgotten, 1);
    assert_int_equal(bd_router_infos(w.router, infos, 8), 1);
    close_world(&w);
}

static order load_order(const char *name, const char *dir) {
    order o = {.change = {.kind = BD_CHANGE_LOAD}};
    snprintf(o.change.name, sizeof o.change.name, "%s", name);
    int bytes = snprintf(o.change.dir, sizeof o.change.dir, "%s", dir);
    assert_in_range(bytes, 1, sizeof o.change.dir - 1);
    return o;
}

static void expect_load(world *w, order o, bd_status status) {
    give(w, &o);
    if (o.change.status != status)
        fail_msg("%s: %s", bd_status_name(o.change.status), o.change.error.message);
}

static void test_load_and_unload(void **state) {
    (void)state;
    world w;
    open_world(&w);
    char path[2048];
    /* A real directory below the root; links lead out of it. */
    snprintf(path, sizeof path, "cp -r %s/zen-mini-math %s/real", w.demo, w.root);
    assert_int_equal(system(path), 0);
    expect_load(&w, load_order("mine", "real"), BD_OK);
    assert_true(served(&w, "mine"));
    expect_load(&w, load_order("mine", "real"), BD_OK); /* again: there already */
    expect_load(&w, load_order("mine", "./real/../real"), BD_OK);
    snprintf(path, sizeof path, "%s/real", w.root);
    expect_load(&w, load_order("mine", path), BD_OK);
    static const char *const outside[] = {"../..",         "..", "one/../../..", "/tmp",
                                          "real/../../..", ".",  "no",           "one/."};
    for (size_t i = 0; i < sizeof outside / sizeof outside[0]; i++)
        expect_load(&w, load_order("x", outside[i]), BD_E_NOT_FOUND);
    expect_load(&w, load_order("zen-mini", "real"), BD_E_ARGUMENT);
    expect_load(&w, load_order("a\"b", "real"), BD_E_ARGUMENT);
    expect_load(&w, load_order("zen-mini-c", "real"), BD_E_ARGUMENT);
    expect_load(&w, load_order("linked", "one"), BD_OK); /* an entry of the root, as a rescan's */
    order gone = {.change = {.kind = BD_CHANGE_UNLOAD, .name = "linked"}};
    give(&w, &gone);
    assert_int_equal(gone.change.status, BD_OK);
    order out = load_order("out", "one");
    out.change.anywhere = true;
    expect_load(&w, out, BD_OK);
    order in_place = load_order("out", "real");
    in_place.change.replace = true;
    expect_load(&w, in_place, BD_OK);
    expect_rescan(&w, "+zen-mini-math =4"); /* "real" under its own name, beside the two orders */
    order o = {.change = {.kind = BD_CHANGE_UNLOAD, .name = "mine"}};
    give(&w, &o);
    assert_int_equal(o.change.status, BD_OK);
    assert_false(served(&w, "mine"));
    order again = {.change = {.kind = BD_CHANGE_UNLOAD, .name = "mine"}};
    give(&w, &again);
    assert_int_equal(again.change.status, BD_E_NOT_FOUND);
    order base = {.change = {.kind = BD_CHANGE_UNLOAD, .name = "zen-mini"}};
    give(&w, &base);
    assert_int_equal(base.change.status, BD_E_ARGUMENT);
    expect_rescan(&w, "=4");
    close_world(&w);
}

static void test_failed_load_is_taken_back(void **state) {
    (void)state;
    world w;
    open_world(&w);
    char command[2048];
    snprintf(command, sizeof command, "cp -r %s/zen-mini-math %s/real", w.demo, w.root);
    assert_int_equal(system(command), 0);
    w.cache.fail_next = true;
    order o = load_order("mine", "real");
    give(&w, &o);
    assert_int_equal(o.change.status, BD_E_VARIANT);
    assert_string_equal(o.change.error.message, "planted: a chunk is corrupt");
    assert_false(served(&w, "mine"));
    expect_load(&w, load_order("mine", "real"), BD_OK);
    close_world(&w);
}

/* Orders given while the server ends are answered. */
static void test_stop(void **state) {
    (void)state;
    world w;
    open_world(&w);
    w.cache.load_us = 60000000;
    order orders[4] = {load_order("zen-mini-c", "one"),
                       {.change = {.kind = BD_CHANGE_RESCAN}},
                       {.change = {.kind = BD_CHANGE_UNLOAD, .name = "zen-mini-sql"}},
                       {.change = {.kind = BD_CHANGE_RESCAN}}};
    orders[0].change.anywhere = true;
    for (uint32_t i = 0; i < 4; i++) {
        orders[i].change.done = on_done;
        bd_router_change(w.router, &orders[i].change);
    }
    fake_sleep_us(2000);
    bd_engine_stop(w.engine);
    bd_router_stop(w.router);
    for (uint32_t i = 0; i < 4; i++) {
        assert_true(atomic_load(&orders[i].done));
        bd_change_clear(&orders[i].change);
    }
    assert_int_equal(orders[0].change.status, BD_E_SHUTDOWN);
    close_world(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rescan),
        cmocka_unit_test(test_bad_ones_alone),
        cmocka_unit_test(test_holders),
        cmocka_unit_test(test_load_and_unload),
        cmocka_unit_test(test_failed_load_is_taken_back),
        cmocka_unit_test(test_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
