/* The command line and the environment: values into the structs, precedence, and every kind of
 * wrong usage with the name it blames. */
#include "base_support.h"

#include "bitdelta/base/json_scan.h"
#include "bitdelta/config/options.h"
#include "config/table.h"

enum { ARGS_MAX = 40 };

/* Splits at spaces; '~' stands for a space inside an argument. */
static bd_status parse(bd_invocation *out, const char *line, bd_error *err) {
    static char text[1024];
    const char *args[ARGS_MAX];
    int count = 0;
    bd_error_clear(err);
    snprintf(text, sizeof text, "%s", line);
    char *save = NULL;
    for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        for (char *p = word; *p; p++)
            *p = *p == '~' ? ' ' : *p;
        assert_true(count < ARGS_MAX);
        args[count++] = word;
    }
    return bd_invocation_parse(out, count, args, err);
}

static void parse_ok(bd_invocation *out, const char *line) {
    bd_error err;
    if (parse(out, line, &err) != BD_OK) fail_msg("%s: %s", line, err.message);
}

static void clear_environment(void) {
    unsetenv("BITDELTA_API_KEY");
    unsetenv("BITDELTA_ADMIN_KEY");
    unsetenv("BITDELTA_LOG");
}

static int setup(void **state) {
    (void)state;
    clear_environment();
    return 0;
}

static void test_serve_defaults(void **state) {
    (void)state;
    bd_invocation inv;
    parse_ok(&inv, "serve --base dir");
    const bd_serve_options *o = &inv.serve;
    assert_int_equal(inv.command, BD_COMMAND_SERVE);
    assert_string_equal(o->base_path, "dir");
    assert_null(o->base_name);
    assert_null(o->deltas_dir);
    assert_null(o->tenants_path);
    assert_null(o->admin_key);
    assert_int_equal(o->variants.count, 0);
    assert_int_equal(o->api_keys.count, 0);
    assert_string_equal(o->listen, "127.0.0.1:8080");
    assert_string_equal(o->admin, "127.0.0.1:8081");
    assert_int_equal(o->backend, BD_OPTION_BACKEND_AUTO);
    assert_int_equal(o->dtype, BD_OPTION_DTYPE_AUTO);
    assert_int_equal(o->tensor_parallel, 1);
    assert_int_equal(o->threads, 0);
    assert_int_equal(o->slots, 0);
    assert_int_equal(o->pinned_top, 6);
    assert_int_equal(o->host_bytes, 0);
    assert_int_equal(o->max_model_len, 0);
    assert_int_equal(o->kv_tokens, 0);
    assert_int_equal(o->max_batch_tokens, 0);
    assert_int_equal(o->prefill_chunk_tokens, 0);
    assert_int_equal(o->max_seqs, 256);
    assert_int_equal(o->logits_rows_max, 256);
    assert_true(o->decode_delta);
    assert_true(o->fair_input_weight == 1.0 && o->fair_output_weight == 2.0);
    assert_int_equal(o->fair_load_bytes, 1 << 20);
    assert_true(o->fair_residency_bound == 16384.0);
    assert_int_equal(o->max_queue, 1024);
    assert_int_equal(o->max_body_bytes, 32u << 20);
    assert_int_equal(o->max_connections, 10000);
    assert_int_equal(o->http_threads, 1);
    assert_int_equal(o->request_header_seconds, 30);
    assert_int_equal(o->drain_seconds, 30);
    assert_int_equal(o->log_level, BD_LOG_INFO);
    bd_invocation_deinit(&inv);
}

static void test_serve_values(void **state) {
    (void)state;
    bd_invocation inv;
    parse_ok(&inv,
             "serve --base=b --backend cuda --dtype=fp16 --variant x=d1 --variant y=d=2 "
             "--api-key k1 --api-key=k2 --host-bytes 3GiB --decode-delta false --listen [::1]:0 "
             "--admin none --log-level debug");
    const bd_serve_options *o = &inv.serve;
    assert_string_equal(o->base_path, "b");
    assert_int_equal(o->backend, BD_OPTION_BACKEND_CUDA);
    assert_int_equal(o->dtype, BD_OPTION_DTYPE_FP16);
    assert_int_equal(o->variants.count, 2);
    assert_string_equal(o->variants.items[0].name, "x");
    assert_string_equal(o->variants.items[0].path, "d1");
    assert_string_equal(o->variants.items[1].path, "d=2");
    assert_false(o->variants.items[1].pin);
    assert_int_equal(o->api_keys.count, 2);
    assert_string_equal(o->api_keys.items[1], "k2");
    assert_int_equal(o->host_bytes, (uint64_t)3 << 30);
    assert_false(o->decode_delta);
    assert_string_equal(o->listen, "[::1]:0");
    assert_string_equal(o->admin, "none");
    assert_int_equal(o->log_level, BD_LOG_DEBUG);
    bd_invocation_deinit(&inv);
}

static void test_other_commands(void **state) {
    (void)state;
    bd_invocation inv;
    parse_ok(&inv, "compress --base a --finetuned b --out c --scale matrix --bits 2 --shards 8 "
                   "--embeddings full "
                   "--calibrate f --dry-run --force --json --threads 3 --base-name n --variant v");
    assert_int_equal(inv.compress.scale, BD_OPTION_SCALE_MATRIX);
    assert_int_equal(inv.compress.bits, 2);
    assert_int_equal(inv.compress.shards, 8);
    assert_int_equal(inv.compress.embeddings, BD_OPTION_EMBEDDINGS_FULL);
    assert_string_equal(inv.compress.calibrate_path, "f");
    assert_true(inv.compress.dry_run && inv.compress.force && inv.compress.json);
    assert_int_equal(inv.compress.threads, 3);
    assert_string_equal(inv.compress.base_name, "n");
    assert_string_equal(inv.compress.variant, "v");
    bd_invocation_deinit(&inv);

    parse_ok(
        &inv,
        "generate --base a --delta d --prompt-ids 1,2,2147483647 --max-tokens 0 --greedy --seed "
        "18446744073709551615 --ignore-eos --json --dump-logits f --chunk-tokens 7 --threads 1 "
        "--temperature 0.25 --top-p=0.5");
    const bd_generate_options *g = &inv.generate;
    assert_int_equal(g->prompt_ids.count, 3);
    assert_int_equal(g->prompt_ids.ids[2], INT32_MAX);
    assert_null(g->prompt);
    assert_int_equal(g->max_tokens, 0);
    assert_true(g->greedy && g->ignore_eos && g->json);
    assert_true(g->seed == UINT64_MAX);
    assert_true(g->temperature == 0.25 && g->top_p == 0.5);
    assert_int_equal(g->chunk_tokens, 7);
    bd_invocation_deinit(&inv);

    parse_ok(&inv, "generate --base a --prompt=--a~b --greedy=false");
    assert_string_equal(inv.generate.prompt, "--a b");
    assert_false(inv.generate.greedy);
    assert_int_equal(inv.generate.max_tokens, 16);
    assert_int_equal(inv.generate.chunk_tokens, 256);
    assert_int_equal(inv.generate.seed, 0);
    assert_true(inv.generate.temperature == 1 && inv.generate.top_p == 1);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "generate --base a --prompt=");
    assert_string_equal(inv.generate.prompt, "");
    bd_invocation_deinit(&inv);

    parse_ok(&inv, "inspect --verify dir --json");
    assert_string_equal(inv.inspect.path, "dir");
    assert_true(inv.inspect.verify && inv.inspect.json);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "reshard --delta d --out=o --shards 8 --force");
    assert_string_equal(inv.reshard.delta_dir, "d");
    assert_string_equal(inv.reshard.out_path, "o");
    assert_null(inv.reshard.base_path);
    assert_true(inv.reshard.shards == 8 && inv.reshard.force && !inv.reshard.json);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "inspect -- --odd");
    assert_string_equal(inv.inspect.path, "--odd");
    assert_false(inv.inspect.verify);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "tokenize --tokenizer t --decode");
    assert_string_equal(inv.tokenize.tokenizer_path, "t");
    assert_true(inv.tokenize.decode);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "--version");
    assert_int_equal(inv.command, BD_COMMAND_VERSION);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "serve --nonsense --help");
    assert_int_equal(inv.command, BD_COMMAND_HELP);
    assert_string_equal(inv.help.topic, "serve");
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "help --reference");
    assert_true(inv.help.reference);
    bd_invocation_deinit(&inv);
}

typedef struct fault_row {
    const char *line, *subject, *message;
} fault_row;

static void test_wrong_usage(void **state) {
    (void)state;
    static const fault_row k_rows[] = {
        {"", "command", "none given"},
        {"nosuch", "nosuch", "no such command"},
        {"serve", "--base", "is required"},
        {"serve --base", "--base", "needs a value"},
        {"serve --base --listen x", "--base", "needs a value"},
        {"serve --base=", "--base", "empty"},
        {"serve --base x --bass y", "--bass", "no such flag; see bitdelta help serve"},
        {"serve --base x --Slots 1", "--Slots", "no such flag"},
        {"serve --base x -v", "-v", "two dashes"},
        {"serve --base x y", "y", "unexpected argument"},
        {"serve --base x --slots -1", "--slots", "not a whole number in 0..100000"},
        {"serve --base x --slots 1.0", "--slots", "not a whole number"},
        {"serve --base x --slots 99999999999999999999999", "--slots", "not a whole number"},
        {"serve --base x --slots 18446744073709551617", "--slots", "not a whole number"},
        {"serve --base x --slots 4294967297", "--slots", "not in 0..100000"},
        {"serve --base x --slots 100001", "--slots", "not in 0..100000"},
        {"serve --base x --tensor-parallel 0", "--tensor-parallel", "not in 1..8"},
        {"serve --base x --tensor-parallel 9", "--tensor-parallel", "not in 1..8"},
        {"serve --base x --max-body-bytes 32MB", "--max-body-bytes", "KiB, MiB, GiB"},
        {"serve --base x --max-body-bytes 17179869184GiB", "--max-body-bytes", "not a size"},
        {"serve --base x --max-body-bytes 8GiB", "--max-body-bytes", "not in 1024.."},
        {"serve --base x --backend CPU", "--backend", "auto|cuda|cpu"},
        {"serve --base x --decode-delta yes", "--decode-delta", "neither true nor false"},
        {"serve --base x --variant y", "--variant", "not NAME=DIR"},
        {"serve --base x --variant =y", "--variant", "needs a name"},
        {"serve --base x --variant y=", "--variant", "needs a name"},
        {"serve --base x --variant y=1 --variant y=2", "--variant", "\"y\" is given twice"},
        {"serve --base x --api-key=", "--api-key", "empty"},
        {"serve --base x --api-key k\n", "--api-key", "no client can send"},
        {"serve --base x --api-key ok --api-key ~k", "--api-key", "no client can send"},
        {"serve --base x --api-key k~", "--api-key", "no client can send"},
        {"serve --base x --admin-key k\tk", "--admin-key", "no client can send"},
        {"serve --base x --admin-key \x7f", "--admin-key", "no client can send"},
        {"serve --base x --base-name \xff", "--base-name", "UTF-8"},
        {"serve --base x --listen 8080", "--listen", "HOST:PORT"},
        {"serve --base x --listen :8080", "--listen", "HOST:PORT"},
        {"serve --base x --listen ::1:80", "--listen", "HOST:PORT"},
        {"serve --base x --listen []:80", "--listen", "HOST:PORT"},
        {"serve --base x --listen a:65536", "--listen", "HOST:PORT"},
        {"serve --base x --listen a:", "--listen", "HOST:PORT"},
        {"serve --base x --listen none", "--listen", "HOST:PORT"},
        {"serve --base x --listen a:1 --admin a:1", "--admin", "--admin and --listen are both a:1"},
        {"serve --base x --max-batch-tokens 100 --prefill-chunk-tokens 101",
         "--prefill-chunk-tokens", "(101) is over --max-batch-tokens (100)"},
        {"serve --base x --tensor-parallel 3", "--tensor-parallel", "1, 2, 4 or 8 ranks, not 3"},
        {"plan --base x --tensor-parallel 6", "--tensor-parallel", "1, 2, 4 or 8 ranks, not 6"},
        {"generate --base x --prompt y --tensor-parallel 7", "--tensor-parallel",
         "1, 2, 4 or 8 ranks, not 7"},
        {"serve --base x --host-bytes 1", "--host-bytes", "less than one block"},
        {"serve --base x --host-bytes 262143", "--host-bytes", "less than one block"},
        {"serve --base x --host-bytes 1000000000000000000", "--host-bytes", "not in 0.."},
        {"serve --base x --host-bytes 1e18", "--host-bytes", "not a size"},
        {"serve --base x --loads-in-parallel 9", "--loads-in-parallel",
         "(9) is over --read-depth (8)"},
        {"serve --base x --cors-origin y", "--cors-origin", "--cors-origin: \"y\" is not an"},
        {"serve --base x --tls-cert y", "--tls-cert", "--tls-cert needs --tls-key beside it"},
        {"serve --base x --tls-key y", "--tls-key", "--tls-key needs --tls-cert beside it"},
        {"serve --base x --listen a:1 --listen=a:1", "--listen", "--listen: given twice"},
        {"inspect a --json --json", "--json", "--json: given twice"},
        {"serve --base x --config=", "--config", "empty"},
        {"compress --base a --finetuned b", "--out", "is required"},
        {"compress --base a --finetuned b --out c --bits 5", "--bits", "1..4"},
        {"compress --base a --finetuned b --out c --shards 3", "--shards", "3 is not 1, 2, 4 or 8"},
        {"compress --base a --finetuned b --out c --shards 16", "--shards",
         "16 is not 1, 2, 4 or 8"},
        {"compress --base a --finetuned b --out c --config d", "--config", "no such flag"},
        {"inspect", "DIR|FILE", "is required"},
        {"inspect a b", "b", "unexpected argument"},
        {"reshard --delta a --out b", "--shards", "is required"},
        {"reshard --delta a --shards 2", "--out", "is required"},
        {"reshard --out a --shards 2", "--delta", "is required"},
        {"reshard --delta a --out b --shards 6", "--shards", "6 is not 1, 2, 4 or 8"},
        {"inspect a --verify=1", "--verify", "neither true nor false"},
        {"generate --base a", "--prompt", "or --prompt-ids"},
        {"generate --base a --prompt x --prompt-ids 1", "--prompt-ids", "excludes --prompt"},
        {"generate --base a --prompt x --delta d --lora l", "--lora", "only one of"},
        {"generate --base a --prompt x --delta d --finetuned f", "--finetuned", "only one of"},
        {"generate --base a --prompt-ids=", "--prompt-ids", "not a token id"},
        {"generate --base a --prompt-ids 1,,2", "--prompt-ids", "not a token id"},
        {"generate --base a --prompt-ids 1,2,", "--prompt-ids", "not a token id"},
        {"generate --base a --prompt-ids 1;2", "--prompt-ids", "not a token id"},
        {"generate --base a --prompt-ids 2147483648", "--prompt-ids", "not a token id"},
        {"generate --base a --prompt x --temperature nan", "--temperature", "not a number"},
        {"generate --base a --prompt x --temperature 0x1", "--temperature", "not a number"},
        {"generate --base a --prompt x --temperature 1e999", "--temperature", "not a number"},
        {"generate --base a --prompt x --temperature=-0.1", "--temperature", "not in 0..2"},
        {"generate --base a --prompt x --top-p 1.01", "--top-p", "not in 0..1"},
        {"tokenize", "--tokenizer", "is required"},
        {"version x", "x", "unexpected argument"},
        {"help nosuch", "nosuch", "no such command"},
        {"help serve compress", "compress", "unexpected argument"},
    };
    for (size_t i = 0; i < sizeof k_rows / sizeof k_rows[0]; i++) {
        bd_invocation inv;
        bd_error err;
        bd_status status = parse(&inv, k_rows[i].line, &err);
        if (status != BD_E_ARGUMENT || strcmp(err.subject, k_rows[i].subject) != 0 ||
            !strstr(err.message, k_rows[i].message) || !inv.wrong_usage) {
            fail_msg("%s: %s, subject %s, %s", k_rows[i].line, bd_status_name(status), err.subject,
                     err.message);
        }
        /* An option has one name in a message: "--cors-origin: cors_origin: ..." is none. */
        char key[64];
        snprintf(key, sizeof key, "%s", err.subject + strspn(err.subject, "-"));
        for (char *at = key; *at; at++)
            *at = *at == '-' ? '_' : *at;
        if (strchr(key, '_') && strstr(err.message, key))
            fail_msg("%s: %s", k_rows[i].line, err.message);
    }
}

/* Only what gathers may be there twice; else it would be chance which value counts. */
static void test_given_twice(void **state) {
    (void)state;
    for (int c = 0; c < BD_COMMAND_COUNT; c++) {
        for (size_t i = 0; i < bd_table_count(); i++) {
            const option_row *row = bd_table_row(i);
            if (row->at[c] == 0 || !row->flag) continue;
            char flag[64];
            snprintf(flag, sizeof flag, "--%s=n=1", row->flag);
            const char *args[] = {bd_command_name((bd_command)c), flag, flag};
            bd_invocation inv;
            bd_error err;
            const bool list = strstr(row->help, "may be repeated") != NULL;
            assert_int_equal(bd_invocation_parse(&inv, 3, args, &err), BD_E_ARGUMENT);
            if ((strstr(err.message, ": given twice") != NULL) == list)
                fail_msg("%s %s: %s", args[0], flag, err.message);
        }
    }
}

/* What depends on the backend is left open here. */
static void test_rows_of_a_step(void **state) {
    (void)state;
    bd_invocation inv;
    parse_ok(&inv, "serve --base x --max-batch-tokens 100");
    assert_int_equal(inv.serve.max_batch_tokens, 100);
    assert_int_equal(inv.serve.prefill_chunk_tokens, 0);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "serve --base x --prefill-chunk-tokens 700");
    assert_int_equal(inv.serve.max_batch_tokens, 0);
    assert_int_equal(inv.serve.prefill_chunk_tokens, 700);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "serve --base x --host-bytes 256KiB");
    bd_invocation_deinit(&inv);
}

/* One argument, since parse() cuts lines at spaces. */
static void test_origins(void **state) {
    (void)state;
    static const char *const good[] = {"*",
                                       "null",
                                       "https://chat.example",
                                       "http://localhost:3000",
                                       "http://[::1]:8000",
                                       "http://[::1]",
                                       "app+x.1://a_b"};
    static const char *const bad[] = {
        "x y",         "https://a b",      "chat.example",  "https://",      "https://a/",
        "https://a/b", "https://a?b",      "https://a:",    "https://a:8x",  "HTTPS://a",
        "https://u@a", "https://[::1",     "://a",          "https://a:1:2", "https://a, https://b",
        "https://[]x", "https://a\r\nb:c", "https://[::1]x"};
    bd_error err;
    bd_invocation inv;
    const char *args[] = {"serve", "--base", "x", "--cors-origin", NULL};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        args[4] = good[i];
        if (bd_invocation_parse(&inv, 5, args, &err) != BD_OK) fail_msg("%s refused", good[i]);
        bd_invocation_deinit(&inv);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        args[4] = bad[i];
        if (bd_invocation_parse(&inv, 5, args, &err) == BD_OK) fail_msg("%s taken", bad[i]);
        assert_string_equal(err.subject, "--cors-origin");
        assert_true(inv.wrong_usage);
    }
}

static void test_environment(void **state) {
    (void)state;
    bd_invocation inv;
    bd_error err;
    setenv("BITDELTA_API_KEY", "from-env", 1);
    setenv("BITDELTA_LOG", "", 1); /* set but empty counts as not set */
    parse_ok(&inv, "serve --base x");
    assert_int_equal(inv.serve.log_level, BD_LOG_INFO);
    bd_invocation_deinit(&inv);
    setenv("BITDELTA_LOG", "warn", 1);
    parse_ok(&inv, "serve --base x");
    assert_int_equal(inv.serve.api_keys.count, 1);
    assert_string_equal(inv.serve.api_keys.items[0], "from-env");
    assert_null(inv.serve.admin_key);
    assert_int_equal(inv.serve.log_level, BD_LOG_WARN);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "serve --base x --api-key a --api-key b --log-level error");
    assert_int_equal(inv.serve.api_keys.count, 2);
    assert_string_equal(inv.serve.api_keys.items[0], "a");
    assert_int_equal(inv.serve.log_level, BD_LOG_ERROR);
    bd_invocation_deinit(&inv);
    parse_ok(&inv, "inspect x");
    assert_int_equal(inv.inspect.log_level, BD_LOG_WARN);
    bd_invocation_deinit(&inv);
    setenv("BITDELTA_LOG", "loud", 1);
    assert_int_equal(parse(&inv, "inspect x", &err), BD_E_ARGUMENT);
    assert_string_equal(err.subject, "BITDELTA_LOG");
    assert_false(inv.wrong_usage); /* the environment is at fault: exit status 1 */
    clear_environment();
    /* From a file, with the end of its line. */
    setenv("BITDELTA_API_KEY", "key\r\n", 1);
    assert_int_equal(parse(&inv, "serve --base x", &err), BD_E_ARGUMENT);
    assert_string_equal(err.subject, "BITDELTA_API_KEY");
    assert_null(strstr(err.message, "key\r"));
    char many[4098] = "";
    memset(many, 'k', sizeof many - 1);
    setenv("BITDELTA_API_KEY", many, 1);
    assert_int_equal(parse(&inv, "serve --base x", &err), BD_E_ARGUMENT);
    many[4096] = '\0';
    setenv("BITDELTA_API_KEY", many, 1);
    parse_ok(&inv, "serve --base x");
    bd_invocation_deinit(&inv);
    /* An empty key does not open the server. */
    const char *const keys[] = {"BITDELTA_API_KEY", "BITDELTA_ADMIN_KEY"};
    for (size_t i = 0; i < 2; i++) {
        setenv(keys[i], "", 1);
        assert_int_equal(parse(&inv, "serve --base x", &err), BD_E_ARGUMENT);
        assert_string_equal(err.subject, keys[i]);
        clear_environment();
    }
}

static void test_help(void **state) {
    (void)state;
    bd_strbuf out;
    bd_error err;
    bd_strbuf_init(&out, 0);
    assert_int_equal(bd_help_write(&out, NULL, &err), BD_OK);
    for (int i = 0; i < BD_COMMAND_COUNT; i++) {
        assert_non_null(strstr(out.data, bd_command_name((bd_command)i)));
    }
    assert_int_equal(bd_help_write(&out, "nosuch", &err), BD_E_NOT_FOUND);
    /* Every command explains every flag and shows an example that its own parser takes. */
    for (int c = 0; c < BD_COMMAND_COUNT; c++) {
        bd_strbuf_clear(&out);
        assert_int_equal(bd_help_write(&out, bd_command_name((bd_command)c), &err), BD_OK);
        assert_non_null(strstr(out.data, "Example:\n  "));
        assert_non_null(strstr(out.data, "Usage:\n  bitdelta "));
        for (size_t i = 0; i < bd_table_count(); i++) {
            const option_row *row = bd_table_row(i);
            char flag[64];
            snprintf(flag, sizeof flag, "--%s", row->flag ? row->flag : "");
            if (row->at[c] > 0 && row->flag) assert_non_null(strstr(out.data, flag));
            if (row->at[c] > 0) assert_non_null(strstr(out.data, row->help));
        }
    }
    bd_strbuf_clear(&out);
    bd_reference_write(&out);
    assert_false(out.failed);
    assert_non_null(
        strstr(out.data, "| `--slots N` | `cache.slots` | 0..100000 | 0 (all registered"));
    assert_non_null(strstr(out.data, "| `--backend auto\\|cuda\\|cpu` | `backend` |  | auto |"));
    assert_int_equal(bd_utf8_valid_prefix(out.data, out.len_bytes), out.len_bytes);
    bd_strbuf_deinit(&out);
}

/* The examples in the help are command lines that work. */
static void test_examples_parse(void **state) {
    (void)state;
    for (int c = 0; c < BD_COMMAND_COUNT; c++) {
        const char *example = strstr(bd_table_command((bd_command)c)->example, "bitdelta ");
        assert_non_null(example);
        char line[512];
        bool quoted = false;
        snprintf(line, sizeof line, "%s", example + strlen("bitdelta "));
        size_t at = 0;
        for (const char *p = example + strlen("bitdelta "); *p; p++) {
            if (*p == '"') {
                quoted = !quoted;
            } else {
                line[at++] = *p == ' ' && quoted ? '~' : *p;
            }
        }
        line[at] = 0;
        bd_invocation inv;
        parse_ok(&inv, line);
        assert_int_equal(inv.command, c);
        bd_invocation_deinit(&inv);
    }
}

static void test_table(void **state) {
    (void)state;
    for (size_t i = 0; i < bd_table_count(); i++) {
        const option_row *row = bd_table_row(i);
        bool used = false;
        for (int c = 0; c < BD_COMMAND_COUNT; c++)
            used = used || row->at[c] > 0;
        assert_true(used);
        assert_true(row->min <= row->max);
        bool config = row->flag && strcmp(row->flag, "config") == 0;
        if (row->at[BD_COMMAND_SERVE] > 0 && !config) assert_non_null(row->key);
        for (size_t k = 0; k < i; k++) { /* no two rows claim one flag of one command, or one key */
            const option_row *other = bd_table_row(k);
            if (row->key && other->key) assert_string_not_equal(row->key, other->key);
            for (int c = 0; c < BD_COMMAND_COUNT; c++) {
                if (row->at[c] == 0 || other->at[c] == 0) continue;
                assert_int_not_equal(row->at[c], other->at[c]);
                if (row->flag && other->flag) assert_string_not_equal(row->flag, other->flag);
            }
        }
    }
}

static void test_describe(void **state) {
    (void)state;
    bd_invocation inv;
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    parse_ok(&inv,
             "serve --base my~dir --api-key hunter2 --admin-key hunter3 --slots 3 --variant a=b");
    bd_invocation_describe(&inv, &out);
    assert_non_null(strstr(out.data, "command=serve base.path=\"my dir\" "));
    assert_non_null(strstr(out.data, " api_keys=1 admin_key=set "));
    assert_non_null(strstr(out.data, " cache.slots=3 cache.pinned_top=6 "));
    assert_non_null(strstr(out.data, " variants=1 "));
    assert_null(strstr(out.data, "hunter"));
    bd_invocation_deinit(&inv);
    bd_strbuf_clear(&out);
    parse_ok(&inv, "generate --base b --prompt secret~words --seed 7");
    bd_invocation_describe(&inv, &out);
    assert_null(strstr(out.data, "secret"));
    assert_non_null(strstr(out.data, " prompt=set "));
    assert_non_null(strstr(out.data, " seed=7 "));
    bd_invocation_deinit(&inv);
    bd_strbuf_deinit(&out);
}

/* Random words from the vocabulary of the command line: never a crash or a leak, and what parses
 * has its required options. */
static void test_random_lines(void **state) {
    (void)state;
    static const char *const k_words[] = {
        "serve",        "generate",    "compress",       "inspect",     "--base",
        "--base=x",     "x",           "--slots",        "3",           "--prompt",
        "--prompt-ids", "1,2",         "--variant",      "a=b",         "--api-key",
        "--admin",      "none",        "--listen",       "h:1",         "--json",
        "--",           "--json=x",    "--decode-delta", "true",        "--top-p",
        "0.5",          "--out",       "--finetuned",    "-",           "--host-bytes",
        "2KiB",         "--reference", "help",           "--log-level", "info",
    };
    uint64_t random = support_seed();
    int parsed = 0;
    for (int round = 0; round < 20000; round++) {
        const char *args[ARGS_MAX];
        int count = (int)(support_random(&random) % 9);
        for (int i = 0; i < count; i++) {
            size_t limit = i == 0 ? 4 : sizeof k_words / sizeof k_words[0];
            args[i] = k_words[support_random(&random) % limit];
        }
        bd_invocation inv;
        bd_error err;
        bd_status status = bd_invocation_parse(&inv, count, args, &err);
        if (status != BD_OK) {
            assert_int_equal(status, BD_E_ARGUMENT);
            assert_true(err.subject[0] && err.message[0]);
            continue;
        }
        parsed++;
        if (inv.command == BD_COMMAND_SERVE) assert_non_null(inv.serve.base_path);
        if (inv.command == BD_COMMAND_INSPECT) assert_non_null(inv.inspect.path);
        bd_invocation_deinit(&inv);
    }
    assert_true(parsed > 50);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_serve_defaults), cmocka_unit_test(test_serve_values),
        cmocka_unit_test(test_other_commands), cmocka_unit_test(test_wrong_usage),
        cmocka_unit_test(test_given_twice),    cmocka_unit_test(test_rows_of_a_step),
        cmocka_unit_test(test_origins),        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_help),           cmocka_unit_test(test_examples_parse),
        cmocka_unit_test(test_table),          cmocka_unit_test(test_describe),
        cmocka_unit_test(test_random_lines),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
