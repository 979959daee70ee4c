/* The configuration file: the shipped example, every key, precedence under flags, and each fault
 * with the file and key it names. Files are written to a temporary directory. */
#include "base_support.h"

#include <unistd.h>

#include "bitdelta/base/file.h"
#include "bitdelta/config/options.h"
#include "config/table.h"

static char g_dir[256];
static char g_path[300];

static int setup(void **state) {
    (void)state;
    unsetenv("BITDELTA_API_KEY");
    unsetenv("BITDELTA_ADMIN_KEY");
    unsetenv("BITDELTA_LOG");
    snprintf(g_dir, sizeof g_dir, "%s/bd-config-XXXXXX", P_tmpdir);
    if (!mkdtemp(g_dir)) return -1;
    snprintf(g_path, sizeof g_path, "%s/conf.json", g_dir);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    unlink(g_path);
    return rmdir(g_dir);
}

static void write_file(const char *text, size_t bytes) {
    FILE *file = fopen(g_path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    fclose(file);
}

/* Parses `serve --config FILE` and up to two more arguments, FILE holding the text. */
static bd_status load_bytes(bd_invocation *inv, const char *text, size_t bytes, const char *flag,
                            const char *value, bd_error *err) {
    write_file(text, bytes);
    const char *args[5] = {"serve", "--config", g_path, flag, value};
    bd_error_clear(err);
    return bd_invocation_parse(inv, flag ? 5 : 3, args, err);
}

static bd_status load(bd_invocation *inv, const char *text, bd_error *err) {
    return load_bytes(inv, text, strlen(text), NULL, NULL, err);
}

static void test_shipped_example(void **state) {
    (void)state;
    bd_invocation inv;
    bd_error err;
    const char *args[] = {"serve", "--config", "configs/zen-mini.json"};
    if (bd_invocation_parse(&inv, 3, args, &err) != BD_OK) fail_msg("%s", err.message);
    assert_string_equal(inv.serve.base_path, "demo/zen-mini");
    assert_string_equal(inv.serve.base_name, "zen-mini");
    assert_int_equal(inv.serve.variants.count, 1);
    assert_true(inv.serve.variants.items[0].pin);
    assert_true(bd_file_exists(inv.serve.base_path));
    assert_true(bd_file_exists(inv.serve.deltas_dir));
    assert_true(bd_file_exists(inv.serve.variants.items[0].path));
    assert_int_equal(inv.serve.slots, 14);
    assert_int_equal(inv.serve.host_bytes, 0);
    bd_invocation_deinit(&inv);
}

static void test_every_shape(void **state) {
    (void)state;
    static const char k_text[] =
        "\xef\xbb\xbf{ \"listen\": \"0.0.0.0:80\", \"admin\": \"none\", \"base\": {\"name\": "
        "\"zen4\", "
        "\"path\": \"/models/zen4\"},\n"
        " \"variants\": [{\"path\": \"/d/a\"}, {\"pin\": true, \"name\": \"b\", \"path\": "
        "\"/d/b\"}, "
        "{\"path\": \"/d/c\", \"pin\": false}],\n"
        " \"tensor_parallel\": 8, \"dtype\": \"fp32\", \"max_model_len\": 8.192e3, "
        "\"decode_delta\": false,\n"
        " \"cache\": {\"slots\": 14, \"host_bytes\": \"64GiB\"}, \"max_body_bytes\": 1048576,\n"
        " \"api_keys\": [\"k1\", \"k2\"], \"admin_key\": \"k\\u00e9\", \"tenants\": \"t.json\"}\n";
    bd_invocation inv;
    bd_error err;
    if (load(&inv, k_text, &err) != BD_OK) fail_msg("%s", err.message);
    const bd_serve_options *o = &inv.serve;
    assert_string_equal(o->listen, "0.0.0.0:80");
    assert_string_equal(o->admin, "none");
    assert_string_equal(o->base_path, "/models/zen4");
    assert_string_equal(o->base_name, "zen4");
    assert_int_equal(o->variants.count, 3);
    assert_null(o->variants.items[0].name);
    assert_string_equal(o->variants.items[1].name, "b");
    assert_true(o->variants.items[1].pin && !o->variants.items[0].pin && !o->variants.items[2].pin);
    assert_string_equal(o->variants.items[2].path, "/d/c");
    assert_int_equal(o->tensor_parallel, 8);
    assert_int_equal(o->dtype, BD_OPTION_DTYPE_FP32);
    assert_int_equal(o->max_model_len, 8192);
    assert_false(o->decode_delta);
    assert_int_equal(o->slots, 14);
    assert_int_equal(o->pinned_top, 6);
    assert_true(o->host_bytes == (uint64_t)64 << 30);
    assert_int_equal(o->max_body_bytes, 1048576);
    assert_int_equal(o->api_keys.count, 2);
    assert_string_equal(o->admin_key, "k\xc3\xa9");
    assert_string_equal(o->tenants_path, "t.json");
    bd_invocation_deinit(&inv);
}

static void test_precedence(void **state) {
    (void)state;
    static const char k_text[] =
        "{\"base\": {\"path\": \"f\"}, \"cache\": {\"slots\": 5}, \"api_keys\": [\"f1\", "
        "\"f2\"], \"admin_key\": \"f\", \"variants\": [{\"name\": \"x\", \"path\": \"p\"}]}";
    bd_invocation inv;
    bd_error err;
    assert_int_equal(load_bytes(&inv, k_text, strlen(k_text), "--slots", "9", &err), BD_OK);
    assert_int_equal(inv.serve.slots, 9);
    assert_string_equal(inv.serve.base_path, "f");
    assert_int_equal(inv.serve.api_keys.count, 2);
    bd_invocation_deinit(&inv);
    assert_int_equal(load_bytes(&inv, k_text, strlen(k_text), "--api-key", "flag", &err), BD_OK);
    assert_int_equal(inv.serve.api_keys.count, 1);
    assert_string_equal(inv.serve.api_keys.items[0], "flag");
    bd_invocation_deinit(&inv);
    /* The same name by flag is no duplicate: the flag's list replaces the file's. */
    assert_int_equal(load_bytes(&inv, k_text, strlen(k_text), "--variant", "x=q", &err), BD_OK);
    assert_int_equal(inv.serve.variants.count, 1);
    assert_string_equal(inv.serve.variants.items[0].path, "q");
    bd_invocation_deinit(&inv);
    setenv("BITDELTA_API_KEY", "env", 1);
    setenv("BITDELTA_ADMIN_KEY", "env", 1);
    assert_int_equal(load(&inv, k_text, &err), BD_OK);
    assert_int_equal(inv.serve.api_keys.count, 1);
    assert_string_equal(inv.serve.api_keys.items[0], "env");
    assert_string_equal(inv.serve.admin_key, "env");
    bd_invocation_deinit(&inv);
    unsetenv("BITDELTA_API_KEY");
    unsetenv("BITDELTA_ADMIN_KEY");
}

static void test_faults(void **state) {
    (void)state;
    static const char *const k_rows[][2] = {
        {"", "not valid JSON"},
        {"[]", "must hold one JSON object"},
        {"{\"slots\": 1,}", "not valid JSON"},
        {"{\"base\": {\"path\": \"x\"}} x", "not valid JSON"},
        {"{\"max_seqs\": 1e999}", "not valid JSON"},
        {"{\"base\": {\"path\": \"a\\u0000b\"}}", "not valid JSON"},
        {"{\"slots\": 1}", "slots: unknown key"},
        {"{\"cache.slots\": 1}", "cache.slots: unknown key"},
        {"{\"Listen\": \"a:1\"}", "Listen: unknown key"},
        {"{\"config\": \"x\"}", "config: unknown key"},
        {"{\"prompt\": \"x\"}", "prompt: unknown key"},
        {"{\"\": 1}", ": unknown key"},
        {"{\"cache\": {\"slot\": 1}}", "cache.slot: unknown key"},
        {"{\"cache\": {\"slots\": {}}}", "cache.slots: must be a whole number"},
        {"{\"cache\": 3}", "cache: must be an object"},
        {"{\"base\": \"dir\"}", "base: must be an object"},
        {"{\"listen\": {\"a\": 1}}", "listen: must be a string"},
        {"{\"listen\": null}", "listen: must be a string"},
        {"{\"listen\": \"x\"}", "listen: \"x\" is not HOST:PORT"},
        {"{\"max_seqs\": \"7\"}", "max_seqs: must be a whole number"},
        {"{\"max_seqs\": 7.5}", "max_seqs: must be a whole number"},
        {"{\"max_seqs\": true}", "max_seqs: must be a whole number"},
        {"{\"max_seqs\": 0}", "max_seqs: 0 is not in 1..65536"},
        {"{\"max_seqs\": -1}", "max_seqs: \"-1\" is not a whole number"},
        {"{\"max_seqs\": 4294967297}", "max_seqs: 4294967297 is not in 1..65536"},
        {"{\"kv_tokens\": 9007199254740994}", "kv_tokens: must be a whole number"},
        {"{\"max_body_bytes\": \"1GB\"}", "max_body_bytes: \"1GB\" is not a size"},
        {"{\"max_body_bytes\": true}", "max_body_bytes: must be a number of bytes"},
        {"{\"decode_delta\": \"true\"}", "decode_delta: must be true or false"},
        {"{\"decode_delta\": 1}", "decode_delta: must be true or false"},
        {"{\"backend\": \"gpu\"}", "backend: \"gpu\" is not one of auto|cuda|cpu"},
        {"{\"api_keys\": \"k\"}", "api_keys: must be a list of strings"},
        {"{\"api_keys\": [\"k\", 1]}", "api_keys: must be a list of strings"},
        {"{\"api_keys\": [\"\"]}", "api_keys: empty"},
        {"{\"api_keys\": []}", "api_keys: the list is empty; leave it out to serve without keys"},
        {"{\"variants\": {}}", "variants: must be a list of objects"},
        {"{\"variants\": [\"x\"]}", "variants: must be a list of objects"},
        {"{\"variants\": [{\"name\": \"x\"}]}", "variants[0]: path is missing"},
        {"{\"variants\": [{\"path\": \"x\"}, {\"path\": 1}]}",
         "variants[1].path: must be a string"},
        {"{\"variants\": [{\"path\": \"x\", \"pin\": 1}]}",
         "variants[0].pin: must be true or false"},
        {"{\"variants\": [{\"path\": \"x\", \"pinned\": true}]}",
         "variants[0].pinned: unknown key"},
        {"{\"variants\": [{\"path\": \"x\", \"path\": \"y\"}]}", "variants[0].path: given twice"},
        {"{\"variants\": [{\"path\": \"\"}]}", "variants[0]: a variant needs"},
        {"{\"variants\": [{\"name\": \"\", \"path\": \"x\"}]}", "variants[0]: a variant needs"},
        {"{\"variants\": [{\"name\": \"n\", \"path\": \"x\"}, {\"name\": \"n\", \"path\": \"y\"}]}",
         "variants[1]: the variant name \"n\" is given twice"},
        {"{\"max_seqs\": 1, \"max_seqs\": 1}", "max_seqs: given twice"},
        {"{\"cache\": {\"slots\": 1}, \"cache\": {\"pinned_top\": 1}}", "cache: given twice"},
        {"{\"cache\": {\"slots\": 1, \"slots\": 2}}", "cache.slots: given twice"},
        {"{\"prefill_chunk_tokens\": 600, \"max_batch_tokens\": 512, \"base\": {\"path\": \"x\"}}",
         ": prefill_chunk_tokens (600) is over max_batch_tokens (512)"},
        {"{\"loader\": {\"read_depth\": 1}, \"base\": {\"path\": \"x\"}}",
         ": loader.loads_in_parallel (2) is over loader.read_depth (1): each"},
        {"{\"tls_cert\": \"y\", \"base\": {\"path\": \"x\"}}", ": tls_cert needs tls_key"},
        {"{\"cors_origin\": \"y\", \"base\": {\"path\": \"x\"}}", ": cors_origin: \"y\" is not an"},
    };
    for (size_t i = 0; i < sizeof k_rows / sizeof k_rows[0]; i++) {
        bd_invocation inv;
        bd_error err;
        bd_status status = load(&inv, k_rows[i][0], &err);
        if (status != BD_E_ARGUMENT || strcmp(err.subject, g_path) != 0 ||
            !strstr(err.message, k_rows[i][1]) || inv.wrong_usage) {
            fail_msg("%s: %s, subject %s, %s", k_rows[i][0], bd_status_name(status), err.subject,
                     err.message);
        }
    }
}

static void test_file_faults(void **state) {
    (void)state;
    bd_invocation inv;
    bd_error err;
    const char *args[] = {"serve", "--base", "x", "--config", "no/such/file.json"};
    assert_int_equal(bd_invocation_parse(&inv, 5, args, &err), BD_E_NOT_FOUND);
    assert_string_equal(err.subject, "no/such/file.json");
    assert_false(inv.wrong_usage);
    args[4] = g_dir;
    assert_int_equal(bd_invocation_parse(&inv, 5, args, &err), BD_E_IO);
    static char deep[4000];
    memset(deep, '[', sizeof deep);
    assert_int_equal(load_bytes(&inv, deep, sizeof deep, NULL, NULL, &err), BD_E_ARGUMENT);
    /* A file without the base is fine if a flag names it. */
    assert_int_equal(load_bytes(&inv, "{}", 2, "--base", "x", &err), BD_OK);
    bd_invocation_deinit(&inv);
}

/* Beside a file it is still the flag's fault where the flag was given. */
static void test_blame(void **state) {
    (void)state;
    static const char *const k_rows[][3] = {
        {"{\"base\": {\"path\": \"x\"}, \"cors_origin\": \"*\"}", "--cors-origin", "y"},
        {"{\"base\": {\"path\": \"x\"}, \"cors_origin\": \"z\"}", "--cors-origin", "y"},
        {"{\"base\": {\"path\": \"x\"}}", "--loads-in-parallel", "9"},
        {"{\"base\": {\"path\": \"x\"}, \"loader\": {\"read_depth\": 3}}", "--loads-in-parallel",
         "4"},
        {"{\"base\": {\"path\": \"x\"}}", "--tensor-parallel", "3"},
    };
    for (size_t i = 0; i < sizeof k_rows / sizeof k_rows[0]; i++) {
        bd_invocation inv;
        bd_error err;
        const char *const *row = k_rows[i];
        assert_int_equal(load_bytes(&inv, row[0], strlen(row[0]), row[1], row[2], &err),
                         BD_E_ARGUMENT);
        assert_string_equal(err.subject, row[1]);
        assert_true(inv.wrong_usage && !strstr(err.message, g_path));
    }
}

/* Every key of the table: the default, written to the file, is taken and gives the default. */
static void test_every_key(void **state) {
    (void)state;
    int keys = 0;
    for (size_t i = 0; i < bd_table_count(); i++) {
        const option_row *row = bd_table_row(i);
        if (!row->key || !row->fallback) continue;
        bool bare = row->type == OPTION_U32 || row->type == OPTION_U64 ||
                    row->type == OPTION_BOOL || row->type == OPTION_DOUBLE;
        const char *quote = bare ? "" : "\"";
        const char *dot = strchr(row->key, '.');
        char text[300];
        if (dot) {
            snprintf(text, sizeof text, "{\"%.*s\": {\"%s\": %s%s%s}}", (int)(dot - row->key),
                     row->key, dot + 1, quote, row->fallback, quote);
        } else {
            snprintf(text, sizeof text, "{\"%s\": %s%s%s}", row->key, quote, row->fallback, quote);
        }
        bd_invocation inv, plain;
        bd_error err;
        if (load_bytes(&inv, text, strlen(text), "--base", "x", &err) != BD_OK)
            fail_msg("%s", err.message);
        assert_int_equal(load_bytes(&plain, "{}", 2, "--base", "x", &err), BD_OK);
        bd_strbuf got, want;
        bd_strbuf_init(&got, 0);
        bd_strbuf_init(&want, 0);
        bd_invocation_describe(&inv, &got);
        bd_invocation_describe(&plain, &want);
        assert_string_equal(got.data, want.data);
        bd_strbuf_deinit(&got);
        bd_strbuf_deinit(&want);
        bd_invocation_deinit(&inv);
        bd_invocation_deinit(&plain);
        keys++;
    }
    assert_true(keys > 20);
}

/* The shipped file with random bytes changed: an error that names the file, or options; never a
 * crash. */
static void test_mutations(void **state) {
    (void)state;
    uint64_t random = support_seed();
    char *text;
    size_t bytes;
    bd_error err;
    assert_int_equal(bd_file_read("configs/zen-mini.json", 1 << 16, &text, &bytes, &err), BD_OK);
    static const char k_junk[] = "{}[]\":,0e.-\\tn\x80";
    int refused = 0;
    for (int round = 0; round < 1500; round++) {
        char *copy = malloc(bytes);
        assert_non_null(copy);
        memcpy(copy, text, bytes);
        for (uint64_t k = support_random(&random) % 3; k < 3; k++) {
            copy[support_random(&random) % bytes] =
                k_junk[support_random(&random) % (sizeof k_junk - 1)];
        }
        bd_serve_options unused;
        assert_int_equal(bd_serve_options_init(&unused, &err), BD_OK);
        bd_serve_options_deinit(&unused);
        write_file(copy, bytes);
        free(copy);
        bd_invocation inv;
        const char *args[] = {"serve", "--base", "x", "--config", g_path};
        bd_status status = bd_invocation_parse(&inv, 5, args, &err);
        if (status == BD_OK) {
            bd_invocation_deinit(&inv);
            continue;
        }
        assert_int_equal(status, BD_E_ARGUMENT);
        assert_string_equal(err.subject, g_path);
        refused++;
    }
    free(text);
    assert_true(refused > 500);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shipped_example), cmocka_unit_test(test_every_shape),
        cmocka_unit_test(test_precedence),      cmocka_unit_test(test_faults),
        cmocka_unit_test(test_file_faults),     cmocka_unit_test(test_blame),
        cmocka_unit_test(test_every_key),       cmocka_unit_test(test_mutations),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
