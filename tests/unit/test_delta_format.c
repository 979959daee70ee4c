/* The delta format: the demo family's deltas (made by tests/data/reference_encoder.py) read,
 * verified and written again byte for byte; manifests with one fault each; random damage; chunk
 * sums that name the bytes; shards of two; the codec against plain float64. */
#include "hf_support.h"

#include <dirent.h>
#include <math.h>
#include <xxhash.h>

#include "bitdelta/base/half.h"
#include "bitdelta/delta/delta.h"

static support_dir dir;

static int setup(void **state) {
    (void)state;
    dir = support_dir_make();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    support_dir_remove(&dir);
    return 0;
}

/* ---- the demo family ------------------------------------------------------------------------- */

static void check_demo_delta(const char *path) {
    bd_error err = {.message = ""};
    bd_delta d;
    bd_safetensors *shard;
    assert_ok(bd_delta_open(path, &d, &err));
    assert_int_equal(d.entry_count, 74);
    assert_true(d.bits == 1 && d.shard_count == 1);
    assert_string_equal(d.base_fingerprint,
                        "b55327472f0ae7ea76e76f27338af55ed50f2746b78b813ef5735d4497285924");
    assert_ok(bd_delta_open_shard(&d, 0, false, &shard, &err));
    assert_int_equal(bd_safetensors_count(shard), 131); /* 57 by sign, 17 whole */
    bd_safetensors_close(shard);
    assert_ok(bd_delta_verify_shard(&d, 0, &err));
    /* Written again it is the same file. */
    size_t before_bytes, after_bytes;
    char *before = support_read(path, "delta.json", &before_bytes);
    snprintf(d.dir, sizeof d.dir, "%s", dir.path);
    assert_ok(bd_delta_write_manifest(&d, &err));
    char *after = support_read(dir.path, "delta.json", &after_bytes);
    assert_int_equal(before_bytes, after_bytes);
    assert_memory_equal(before, after, before_bytes);
    free(before);
    free(after);
    bd_delta_close(&d);
}

static void test_demo_family(void **state) {
    (void)state;
    DIR *list = opendir("demo/deltas");
    assert_non_null(list);
    uint32_t count = 0;
    for (struct dirent *entry = readdir(list); entry; entry = readdir(list)) {
        char path[300];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "demo/deltas/%s", entry->d_name);
        check_demo_delta(path);
        count++;
    }
    closedir(list);
    assert_int_equal(count, 14);
}

/* ---- manifests ------------------------------------------------------------------------------- */

#define HASH64 "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

/* Our own escaping and layout against what Python's json.dumps(indent=1) gives for the same values.
 */
static void test_written_like_python(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    const bd_delta_entry entries[] = {
        {.name = "a", .kind = BD_DELTA_SIGN, .rank = 2, .shape = {3, 8}, .extra_rows = 2},
        {.name = "b", .kind = BD_DELTA_FULL, .rank = 1, .shape = {7}},
    };
    const uint64_t sums[] = {0x1, 0xfedcba9876543210u};
    const bd_delta_file file = {.name = "f",
                                .bytes = 5000,
                                .sha256 = HASH64,
                                .chunk_bytes = 4096,
                                .chunk_count = 2,
                                .chunk_xxh3 = sums};
    bd_delta d = {
        .bits = 2, .shard_count = 1, .entry_count = 2, .entries = entries, .files = &file};
    snprintf(d.dir, sizeof d.dir, "%s", dir.path);
    strcpy(d.variant, "na\xc3\xafve \"v\" \\ \xf0\x9f\x98\x80");
    strcpy(d.base, "b");
    strcpy(d.base_fingerprint, HASH64);
    strcpy(d.scale, "row");
    strcpy(d.embeddings, "full");
    assert_ok(bd_delta_write_manifest(&d, &err));
    size_t bytes;
    char *text = support_read(dir.path, "delta.json", &bytes);
    assert_string_equal(
        text,
        "{\n \"format\": \"bitdelta-1\",\n \"variant\": \"na\\u00efve \\\"v\\\" \\\\ "
        "\\ud83d\\ude00\",\n"
        " \"base\": \"b\",\n \"base_fingerprint\": \"" HASH64
        "\",\n \"bits\": 2,\n \"scale\": \"row\",\n"
        " \"shards\": 1,\n \"embeddings\": \"full\",\n \"tensors\": [\n  {\n   \"name\": \"a\",\n"
        "   \"kind\": \"sign\",\n   \"shape\": [\n    3,\n    8\n   ],\n   \"extra_rows\": 2\n  "
        "},\n  {\n"
        "   \"name\": \"b\",\n   \"kind\": \"full\",\n   \"shape\": [\n    7\n   ]\n  }\n ],\n"
        " \"files\": [\n  {\n   \"name\": \"f\",\n   \"bytes\": 5000,\n   \"sha256\": \"" HASH64
        "\",\n"
        "   \"chunk_bytes\": 4096,\n   \"xxh3_64\": [\n    \"0000000000000001\",\n"
        "    \"fedcba9876543210\"\n   ]\n  }\n ]\n}\n");
    free(text);
    bd_delta again;
    assert_ok(bd_delta_open(dir.path, &again, &err));
    assert_string_equal(again.variant, d.variant);
    assert_true(again.entries[0].extra_rows == 2 && again.files[0].chunk_xxh3[1] == sums[1]);
    bd_delta_close(&again);
}

static void replace_once(char *text, size_t cap, const char *from, const char *to) {
    char *at = strstr(text, from);
    if (!at) fail_msg("\"%s\" is not in the manifest", from);
    const size_t tail = strlen(at + strlen(from)) + 1;
    assert_true((size_t)(at - text) + strlen(to) + tail <= cap);
    memmove(at + strlen(to), at + strlen(from), tail);
    memcpy(at, to, strlen(to));
}

static const char good_manifest[] =
    "{\"format\":\"bitdelta-1\",\"variant\":\"v\",\"base\":\"b\",\"base_fingerprint\":\"" HASH64
    "\",\"bits\":1,"
    "\"scale\":\"row\",\"shards\":1,\"embeddings\":\"sign\",\"tensors\":[{\"name\":\"w\",\"kind\":"
    "\"sign\",\"shape\":[4,16]},"
    "{\"name\":\"n\",\"kind\":\"full\",\"shape\":[16]}],\"files\":[{\"name\":\"s.safetensors\","
    "\"bytes\":9000,\"sha256\":\"" HASH64
    "\",\"chunk_bytes\":8192,\"xxh3_64\":[\"0123456789abcdef\",\"0123456789abcdef\"]}]}";

static void test_faulty_manifests(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *expect; /* expect NULL: fine */
    } cases[] = {
        {"\"bits\":1", "\"bits\":1,\"later\":{}",
         NULL}, /* unknown members are for later versions */
        {",\"chunk_bytes\":8192,\"xxh3_64\":[\"0123456789abcdef\",\"0123456789abcdef\"]", "", NULL},
        {"bitdelta-1", "bitdelta-2", "format"},
        {"\"v\"", "\"\"", "variant"},
        {"\"v\"", "\"a\\nb\"", "variant"},
        {"\"v\"", "7", "variant"},
        {"\"base\":\"b\",", "", "base"},
        {"\"base_fingerprint\":\"0", "\"base_fingerprint\":\"G", "base_fingerprint"},
        {"\"bits\":1", "\"bits\":0", "bits"},
        {"\"bits\":1", "\"bits\":5", "bits"},
        {"\"bits\":1", "\"bits\":1.5", "bits"},
        {"\"scale\":\"row\"", "\"scale\":\"column\"", "scale"},
        {"\"embeddings\":\"sign\"", "\"embeddings\":\"x\"", "embeddings"},
        {"\"shards\":1", "\"shards\":0", "shards"},
        {"\"shards\":1", "\"shards\":2", "files"},
        {"\"shards\":1", "\"shards\":65", "shards"},
        {"\"kind\":\"sign\"", "\"kind\":\"lora\"", "kind"},
        {"[4,16]", "[4,12]", "multiple of 8"},
        {"[4,16]", "[4,16,1]", "no matrix"},
        {"[4,16]", "[0,16]", "shape"},
        {"[4,16]", "[-4,16]", "shape"},
        {"[4,16]", "[4294967296,4294967296]", "shape"},
        {"[16]", "[1,1,1,1,1,1,1,1,1]", "dimensions"},
        {"\"name\":\"n\"", "\"name\":\"w\"", "twice"},
        {"\"name\":\"n\"", "\"name\":\"\"", "tensors"},
        {"\"name\":\"n\"", "\"name\":3", "tensors"},
        {"\"shape\":[16]", "\"shape\":[16],\"extra_rows\":1", "no matrix"},
        {"s.safetensors", "../s.safetensors", "files"},
        {"s.safetensors", "/etc/passwd", "files"},
        {"s.safetensors", ".hidden", "files"},
        {"\"bytes\":9000", "\"bytes\":-1", "bytes"},
        {"\"bytes\":9000", "\"bytes\":1e19", "bytes"},
        {"\"bytes\":9000", "\"bytes\":90000", "xxh3_64"},
        {"\"chunk_bytes\":8192", "\"chunk_bytes\":0", "chunk_bytes"},
        {"\"chunk_bytes\":8192", "\"chunk_bytes\":1e10", "chunk_bytes"},
        {"\"0123456789abcdef\",", "", "xxh3_64"},
        {"\"0123456789abcdef\",", "\"0123456789ABCDEF\",", "xxh3_64"},
        {"\"0123456789abcdef\",", "12,", "xxh3_64"},
        {"{\"format\"", "[{\"format\"", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[2048];
        bd_error err = {.message = ""};
        bd_delta d;
        strcpy(text, good_manifest);
        replace_once(text, sizeof text, cases[i].from, cases[i].to);
        support_write_text(dir.path, "delta.json", text);
        const bd_status status = bd_delta_open(dir.path, &d, &err);
        if ((status == BD_OK) != (cases[i].expect == NULL) ||
            (cases[i].expect && !strstr(err.message, cases[i].expect))) {
            fail_msg("%s -> %s: %s", cases[i].from, cases[i].to, err.message);
        }
        bd_delta_close(&d);
    }
}

static void test_random_damage(void **state) {
    (void)state;
    uint64_t random = support_seed();
    const size_t bytes = sizeof good_manifest - 1;
    char text[sizeof good_manifest];
    for (int round = 0; round < 3000; round++) {
        memcpy(text, good_manifest, bytes);
        const uint64_t flips = 1 + support_random(&random) % 3;
        for (uint64_t i = 0; i < flips; i++) {
            static const char likely[] = "0123456789-,:[]{}\"e.";
            const uint64_t how = support_random(&random);
            const size_t at = support_random(&random) % bytes;
            text[at] = (char)(how % 2 ? likely[how / 2 % (sizeof likely - 1)]
                                      : text[at] ^ (1 << how / 2 % 8));
        }
        support_write(dir.path, "delta.json", text,
                      round % 4 ? bytes : support_random(&random) % bytes);
        bd_error err;
        bd_delta d;
        bd_safetensors *shard = NULL;
        if (bd_delta_open(dir.path, &d, &err) != BD_OK) continue;
        for (uint32_t i = 0; i < d.shard_count; i++) {
            assert_int_not_equal(bd_delta_open_shard(&d, i, true, &shard, &err), BD_OK);
        }
        bd_delta_close(&d);
    }
}

/* ---- shards ---------------------------------------------------------------------------------- */

typedef struct test_tensor {
    const char *name, *dtype;
    uint32_t rank;
    uint64_t shape[2];
} test_tensor;

static void write_shard(const char *name, const test_tensor *list, uint32_t count) {
    bd_error err = {.message = ""};
    bd_tensor tensors[16] = {0};
    char path[256];
    uint64_t total = 0;
    for (uint32_t i = 0; i < count; i++) {
        tensors[i].name = list[i].name;
        strcpy(tensors[i].dtype_name, list[i].dtype);
        tensors[i].rank = list[i].rank;
        memcpy(tensors[i].shape, list[i].shape, sizeof list[i].shape);
        const uint64_t unit = list[i].dtype[1] == '8'             ? 1
                              : strcmp(list[i].dtype, "F32") == 0 ? 4
                                                                  : 2;
        total += unit * list[i].shape[0] * (list[i].rank == 2 ? list[i].shape[1] : 1);
    }
    bd_safetensors_writer *writer;
    snprintf(path, sizeof path, "%s/%s", dir.path, name);
    assert_ok(bd_safetensors_writer_create(path, tensors, count, 4096, &writer, &err));
    uint8_t *data = malloc(total);
    assert_non_null(data);
    uint64_t random = 7;
    for (uint64_t i = 0; i < total; i++)
        data[i] = (uint8_t)support_random(&random);
    assert_ok(bd_safetensors_writer_append(writer, data, total, &err));
    assert_ok(bd_safetensors_writer_finish(writer, &err));
    free(data);
}

/* The manifest of `entries` over files "0", "1", ... already written. */
static void write_manifest(const bd_delta_entry *entries, uint32_t entry_count, uint32_t shards,
                           uint32_t bits) {
    bd_error err = {.message = ""};
    bd_delta_file files[4] = {0};
    uint64_t *chunks[4] = {0};
    static const char *const names[] = {"0", "1", "2", "3"};
    bd_delta d = {.bits = bits,
                  .shard_count = shards,
                  .entry_count = entry_count,
                  .entries = entries,
                  .files = files};
    for (uint32_t i = 0; i < shards; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", dir.path, names[i]);
        assert_ok(bd_delta_hash_file(path, &files[i], &chunks[i], &err));
        files[i].name = names[i];
    }
    snprintf(d.dir, sizeof d.dir, "%s", dir.path);
    strcpy(d.variant, "v");
    strcpy(d.base, "b");
    strcpy(d.base_fingerprint, HASH64);
    strcpy(d.scale, "row");
    strcpy(d.embeddings, "sign");
    assert_ok(bd_delta_write_manifest(&d, &err));
    for (uint32_t i = 0; i < shards; i++)
        free(chunks[i]);
}

static bd_status open_shards(bd_error *err) {
    bd_delta d;
    bd_status status = bd_delta_open(dir.path, &d, err);
    for (uint32_t i = 0; status == BD_OK && i < d.shard_count; i++) {
        bd_safetensors *shard = NULL;
        status = bd_delta_open_shard(&d, i, false, &shard, err);
        bd_safetensors_close(shard);
    }
    bd_delta_close(&d);
    return status;
}

static void test_shard_contents(void **state) {
    (void)state;
    const bd_delta_entry entries[] = {
        {.name = "w", .kind = BD_DELTA_SIGN, .rank = 2, .shape = {4, 16}, .extra_rows = 1},
        {.name = "n", .kind = BD_DELTA_FULL, .rank = 1, .shape = {16}},
    };
    static const test_tensor good[] = {
        {"w.sign", "U8", 2, {4, 2}},     {"w.scale", "F32", 1, {4, 0}},
        {"w.sign1", "U8", 2, {4, 2}},    {"w.scale1", "F32", 1, {4, 0}},
        {"w.extra", "BF16", 2, {1, 16}}, {"n", "F16", 1, {16, 0}},
    };
    static const struct {
        uint32_t index;
        test_tensor with;
        const char *expect;
    } faults[] = {
        {0, {"w.sing", "U8", 2, {4, 2}}, "w.sign"},
        {0, {"w.sign", "U8", 2, {4, 3}}, "w.sign"},
        {0, {"w.sign", "U8", 2, {2, 4}}, "w.sign"},
        {0, {"w.sign", "I8", 2, {4, 2}}, "w.sign"},
        {1, {"w.scale", "F32", 1, {3, 0}}, "w.scale"},
        {1, {"w.scale", "F16", 1, {4, 0}}, "w.scale"},
        {3, {"w.scale2", "F32", 1, {4, 0}}, "w.scale1"},
        {4, {"w.extra", "BF16", 2, {2, 16}}, "w.extra"},
        {5, {"n", "F16", 1, {15, 0}}, "\"n\""},
        {5, {"n", "U8", 1, {16, 0}}, "\"n\""},
    };
    bd_error err = {.message = ""};
    write_shard("0", good, 6);
    write_manifest(entries, 2, 1, 2);
    assert_ok(open_shards(&err));
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        test_tensor list[6];
        memcpy(list, good, sizeof list);
        list[faults[i].index] = faults[i].with;
        write_shard("0", list, 6);
        write_manifest(entries, 2, 1, 2);
        if (open_shards(&err) == BD_OK || !strstr(err.message, faults[i].expect))
            fail_msg("%zu: %s", i, err.message);
    }
    test_tensor more[7] = {{"surplus", "U8", 1, {1, 0}}};
    memcpy(more + 1, good, sizeof good);
    write_shard("0", more, 7);
    write_manifest(entries, 2, 1, 2);
    assert_int_equal(open_shards(&err), BD_E_FORMAT);
    write_shard("0", good, 5);
    assert_int_equal(open_shards(&err), BD_E_LENGTH); /* another size than recorded */
}

static void test_two_shards(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    const bd_delta_entry entries[] = {
        {.name = "model.embed_tokens.weight", .kind = BD_DELTA_SIGN, .rank = 2, .shape = {5, 16}},
        {.name = "x.q_proj.weight", .kind = BD_DELTA_SIGN, .rank = 2, .shape = {8, 16}},
        {.name = "x.k_proj.weight", .kind = BD_DELTA_SIGN, .rank = 2, .shape = {4, 16}},
        {.name = "x.o_proj.weight", .kind = BD_DELTA_SIGN, .rank = 2, .shape = {6, 32}},
        {.name = "x.norm.weight", .kind = BD_DELTA_FULL, .rank = 1, .shape = {16}},
    };
    test_tensor list[] = {
        {"model.embed_tokens.weight.sign", "U8", 2, {3, 2}},
        {"model.embed_tokens.weight.scale", "F32", 1, {3, 0}},
        {"x.q_proj.weight.sign", "U8", 2, {4, 2}},
        {"x.q_proj.weight.scale", "F32", 1, {4, 0}},
        {"x.k_proj.weight.sign", "U8", 2, {4, 2}},
        {"x.k_proj.weight.scale", "F32", 1, {4, 0}}, /* repeated */
        {"x.o_proj.weight.sign", "U8", 2, {6, 2}},
        {"x.o_proj.weight.scale", "F32", 1, {6, 0}},
        {"x.norm.weight", "BF16", 1, {16, 0}},
    };
    write_shard("0", list, 9);
    list[0].shape[0] = list[1].shape[0] = 2; /* 5 = 3 + 2 */
    write_shard("1", list, 9);
    write_manifest(entries, 5, 2, 1);
    assert_ok(open_shards(&err));
    list[0].shape[0] = list[1].shape[0] = 3;
    write_shard("1", list, 9);
    write_manifest(entries, 5, 2, 1);
    assert_int_equal(open_shards(&err), BD_E_FORMAT);
}

/* ---- checksums ------------------------------------------------------------------------------- */

static void test_damage_is_named(void **state) {
    (void)state;
    uint64_t random = support_seed();
    bd_error err = {.message = ""};
    const bd_delta_entry entry = {
        .name = "w", .kind = BD_DELTA_SIGN, .rank = 2, .shape = {2048, 40960}};
    static const test_tensor list[] = {{"w.sign", "U8", 2, {2048, 5120}},
                                       {"w.scale", "F32", 1, {2048, 0}}};
    write_shard("0", list, 2); /* 10.5 MB: three chunks */
    write_manifest(&entry, 1, 1, 1);
    bd_delta d;
    assert_ok(bd_delta_open(dir.path, &d, &err));
    assert_int_equal(d.files[0].chunk_count, 3);
    assert_ok(bd_delta_verify_shard(&d, 0, &err));
    size_t bytes;
    char *data = support_read(dir.path, "0", &bytes);
    for (int round = 0; round < 6; round++) {
        const size_t at = support_random(&random) % bytes, chunk = at / BD_DELTA_CHUNK_BYTES;
        data[at] = (char)(data[at] ^ 16);
        support_write(dir.path, "0", data, bytes);
        assert_int_equal(bd_delta_verify_shard(&d, 0, &err), BD_E_CORRUPT);
        char where[100];
        const size_t first = chunk * BD_DELTA_CHUNK_BYTES;
        const size_t last =
            bytes - first < BD_DELTA_CHUNK_BYTES ? bytes - 1 : first + BD_DELTA_CHUNK_BYTES - 1;
        snprintf(where, sizeof where, "/0: chunk %zu (bytes %zu to %zu)", chunk, first, last);
        if (!strstr(err.message, where)) fail_msg("%s, expected %s", err.message, where);
        assert_int_equal(
            bd_delta_check_chunk(&d, 0, (uint32_t)chunk, data + first, last + 1 - first, &err),
            BD_E_CORRUPT);
        data[at] = (char)(data[at] ^ 16);
        assert_ok(
            bd_delta_check_chunk(&d, 0, (uint32_t)chunk, data + first, last + 1 - first, &err));
        assert_int_equal(
            bd_delta_check_chunk(&d, 0, (uint32_t)chunk, data + first, last - first, &err),
            BD_E_CORRUPT);
    }
    support_write(dir.path, "0", data, bytes - 1);
    assert_int_equal(bd_delta_verify_shard(&d, 0, &err), BD_E_LENGTH);
    assert_non_null(strstr(err.message, "records"));
    assert_non_null(strstr(err.subject, "/0"));
    assert_null(strchr(err.message, '/')); /* clients are told it */
    support_write(dir.path, "0", data, bytes);
    assert_ok(bd_delta_verify_shard(&d, 0, &err));
    bd_delta_file wrong = d.files[0]; /* all chunks right, the whole wrong */
    wrong.sha256[0] = wrong.sha256[0] == '0' ? '1' : '0';
    d.files = &wrong;
    assert_int_equal(bd_delta_verify_shard(&d, 0, &err), BD_E_CORRUPT);
    assert_non_null(strstr(err.message, "sha256"));
    wrong.chunk_bytes = 0; /* without chunk sums the sha256 alone decides */
    wrong.chunk_count = 0;
    assert_int_equal(bd_delta_verify_shard(&d, 0, &err), BD_E_CORRUPT);
    free(data);
    bd_delta_close(&d);
}

/* ---- codec ----------------------------------------------------------------------------------- */

static void test_codec(void **state) {
    (void)state;
    uint64_t random = support_seed();
    for (int round = 0; round < 200; round++) {
        const uint64_t cols = 8 * (1 + support_random(&random) % 150);
        float *base = malloc(cols * sizeof *base), *tuned = malloc(cols * sizeof *tuned);
        uint8_t *bits = malloc(cols / 8), *again = malloc(cols / 8);
        assert_true(base && tuned && bits && again);
        double sum = 0.0;
        for (uint64_t i = 0; i < cols; i++) {
            base[i] = bd_bf16_to_f32(
                bd_f32_to_bf16((float)(int64_t)(support_random(&random) % 2001) / 1000.0f - 1.0f));
            const float change = (float)(int64_t)(support_random(&random) % 201) / 1000.0f - 0.1f;
            tuned[i] = support_random(&random) % 9
                           ? bd_bf16_to_f32(bd_f32_to_bf16(base[i] + change))
                           : base[i];
            sum += fabs((double)(tuned[i] - base[i])); /* bf16: exact in any order */
        }
        const float scale = bd_delta_encode_row(base, tuned, cols, bits);
        assert_true(scale >= 0.0f);
        assert_memory_equal(&scale, &(float){(float)(sum / (double)cols)}, sizeof scale);
        for (uint64_t i = 0; i < cols; i++) {
            assert_true((bits[i / 8] >> (i % 8) & 1) == (tuned[i] >= base[i]));
            base[i] = tuned[i] - base[i];
        }
        assert_memory_equal(&sum, &(double){bd_delta_pack_row(base, cols, again)}, sizeof sum);
        assert_memory_equal(bits, again, cols / 8);
        base[support_random(&random) % cols] = round % 2 ? NAN : INFINITY;
        assert_true(!isfinite(bd_delta_pack_row(base, cols, again)));
        free(base);
        free(tuned);
        free(bits);
        free(again);
    }
    const float zeros[8] = {0.0f, -0.0f, 0.0f, -0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    uint8_t bits;
    assert_true(fabs(bd_delta_pack_row(zeros, 8, &bits)) < 1e-300 &&
                bits == 0xff); /* both zeros are plus */
}

static void test_names(void **state) {
    (void)state;
    char name[64];
    bd_delta_plane_name(name, sizeof name, "w", true, 0);
    assert_string_equal(name, "w.sign");
    bd_delta_plane_name(name, sizeof name, "w", false, 3);
    assert_string_equal(name, "w.scale3");
    bd_delta_file_name(name, sizeof name, 7, 8);
    assert_string_equal(name, "shard-07-of-08.safetensors");
    static const char *const looked_at[] = {"a", "a.tmp-x", "a.tmp-", "a.tmp-1b", "tmp-12", "a-12"};
    static const char *const passed[] = {".a", "a.tmp-1", "a.tmp-123450", ".", "..", ".tmp-1"};
    for (size_t i = 0; i < sizeof looked_at / sizeof looked_at[0]; i++)
        assert_true(bd_delta_is_entry(looked_at[i]));
    for (size_t i = 0; i < sizeof passed / sizeof passed[0]; i++)
        assert_false(bd_delta_is_entry(passed[i]));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_demo_family),
        cmocka_unit_test(test_written_like_python),
        cmocka_unit_test(test_faulty_manifests),
        cmocka_unit_test(test_random_damage),
        cmocka_unit_test(test_shard_contents),
        cmocka_unit_test(test_two_shards),
        cmocka_unit_test(test_damage_is_named),
        cmocka_unit_test(test_codec),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
