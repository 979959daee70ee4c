/* Safetensors and checkpoints: files written by the Python package
 * (tests/data/hf/python.safetensors) and by us, hostile headers one fault at a time, and random
 * damage that must never crash (run it under ASan and UBSan). */
#include "hf_support.h"

#include "bitdelta/hf/checkpoint.h"

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

static bd_status open_file(const char *name, bool map, bd_safetensors **out, bd_error *err) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir.path, name);
    return bd_safetensors_open(path, map, out, err);
}

/* A file with this header text and data_bytes bytes after it. */
static void write_file(const char *name, const char *header, size_t data_bytes) {
    const size_t len = strlen(header);
    char *bytes = calloc(1, 8 + len + data_bytes);
    assert_non_null(bytes);
    for (size_t i = 0; i < 8; i++)
        bytes[i] = (char)(len >> (8 * i));
    memcpy(bytes + 8, header, len);
    support_write(dir.path, name, bytes, 8 + len + data_bytes);
    free(bytes);
}

/* made by tests/data/hf/make_safetensors.py with the safetensors package: every element is its own
 * index */
static void test_python_file(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    bd_safetensors *file;
    assert_ok(bd_safetensors_open("tests/data/hf/python.safetensors", true, &file, &err));
    assert_int_equal(bd_safetensors_count(file), 7);
    static const char *const floats[] = {"bf16", "f16", "f32"};
    for (size_t i = 0; i < 3; i++) {
        const bd_tensor *t = bd_safetensors_find(file, floats[i]);
        assert_non_null(t);
        assert_int_equal(t->rank, 2);
        assert_true(t->shape[0] == 3 && t->shape[1] == 5);
        float values[15];
        bd_tensor_to_f32(t, 0, 15, values);
        for (int j = 0; j < 15; j++)
            assert_true((int)(values[j] * 4.0f) == j - 7);
        bd_tensor_to_f32(t, 14, 1, values);
        assert_true((int)(values[0] * 4.0f) == 7);
    }
    const bd_tensor *t = bd_safetensors_find(file, "scalar");
    assert_true(t && t->rank == 0 && t->bytes == 8 && t->dtype == BD_DTYPE_OTHER);
    assert_string_equal(t->dtype_name, "I64");
    t = bd_safetensors_find(file, "empty");
    assert_true(t && t->rank == 2 && t->shape[0] == 0 && t->bytes == 0);
    t = bd_safetensors_find(file, "n\xc3\xa4me \"x\"");
    assert_true(t && t->dtype == BD_DTYPE_U8 && t->bytes == 3 && t->data[2] == 2);
    assert_null(bd_safetensors_find(file, "absent"));
    uint64_t end = bd_safetensors_at(file, 0)->offset_bytes;
    for (uint32_t i = 0; i < 7; i++) { /* data order, no holes */
        assert_true(bd_safetensors_at(file, i)->offset_bytes == end);
        end += bd_safetensors_at(file, i)->bytes;
    }
    assert_true(end == bd_safetensors_file_bytes(file));
    bd_safetensors_close(file);
}

static void test_header_only(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    bd_safetensors *a, *b;
    assert_ok(bd_safetensors_open("demo/zen-mini/model.safetensors", true, &a, &err));
    assert_ok(bd_safetensors_open("demo/zen-mini/model.safetensors", false, &b, &err));
    assert_int_equal(bd_safetensors_count(a), bd_safetensors_count(b));
    for (uint32_t i = 0; i < bd_safetensors_count(a); i++) {
        const bd_tensor *x = bd_safetensors_at(a, i), *y = bd_safetensors_at(b, i);
        assert_string_equal(x->name, y->name);
        assert_true(x->offset_bytes == y->offset_bytes && x->bytes == y->bytes && x->data &&
                    !y->data);
    }
    bd_safetensors_close(a);
    bd_safetensors_close(b);
}

#define T(name, dtype, shape, from, to)                                                            \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" from "," to   \
    "]}"
#define FINE T("a", "F32", "2", "0", "8")

static void test_hostile_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *expect; /* part of the message; NULL: fine */
    } cases[] = {
        {"{" FINE "}", 8, NULL},
        {"{\"__metadata__\":{\"format\":\"pt\"}," FINE "}   ", 8, NULL},
        {"{}", 0, NULL},
        {"{" T("b", "F32", "1", "8", "12") "," FINE "}", 12,
         NULL}, /* the header may have another order */
        {"", 8, "does not begin"},
        {" {" FINE "}", 8, "does not begin"},
        {"[1]", 0, "does not begin"},
        {"{" FINE, 8, ""},
        {"{" FINE "}x", 8, ""},
        {"{\"a\xff\":1}", 8, ""},
        {"{" FINE "," T("a", "F32", "1", "8", "12") "}", 12, "twice"},
        {"{" FINE "," T("b", "F32", "2", "4", "12") "}", 12, "overlaps"},
        {"{" FINE "," T("b", "F32", "1", "12", "16") "}", 16, "hole"},
        {"{" T("a", "F32", "2", "4", "12") "}", 12, "hole"},
        {"{" FINE "}", 9, "after the last"},
        {"{" FINE "}", 7, "past the end"},
        {"{" T("a", "F32", "3", "0", "8") "}", 8, "do not hold"},
        {"{" T("a", "F32", "4294967296,4294967296", "0", "8") "}", 8, "overflows"},
        {"{" T("a", "F32", "4611686018427387904", "0", "0") "}", 0, "no size"},
        {"{" T("a", "F64", "4503599627370496,1024", "0", "0") "}", 0, "do not hold"},
        {"{" T("a", "F32", "-2", "0", "8") "}", 8, "no size"},
        {"{" T("a", "F32", "2.5", "0", "8") "}", 8, "no size"},
        {"{" T("a", "F32", "\"2\"", "0", "8") "}", 8, "no size"},
        {"{" T("a", "F32", "1,1,1,1,1,1,1,1,2", "0", "8") "}", 8, "dimensions"},
        {"{" T("a", "F32", "2", "8", "0") "}", 8, "before they begin"},
        {"{" T("a", "F32", "2", "0", "1e300") "}", 8, "data_offsets"},
        {"{" T("a", "F32", "2", "-1", "7") "}", 8, "data_offsets"},
        {"{" T("a", "Q4_0", "2", "0", "8") "}", 8, "dtype"},
        {"{" T("a", "F4", "3", "0", "1") "}", 1, "do not hold"},
        {"{" T("a", "F4", "2", "0", "1") "}", 1, NULL},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "twice"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8,
         "other than"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":{},\"data_offsets\":[0,8]}}", 8, "shape"},
        {"{\"a\":{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, "pair"},
        {"{\"a\":[]}", 0, "not an object"},
        {"{\"__metadata__\":{\"x\":1}}", 0, "__metadata__"},
        {"{\"__metadata__\":[]}", 0, "__metadata__"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_file("h", cases[i].header, cases[i].data_bytes);
        for (int map = 0; map < 2; map++) {
            bd_error err = {.message = ""};
            bd_safetensors *file = NULL;
            const bd_status status = open_file("h", map, &file, &err);
            if ((status == BD_OK) != (cases[i].expect == NULL))
                fail_msg("%s: %s", cases[i].header, err.message);
            if (cases[i].expect && !strstr(err.message, cases[i].expect)) {
                fail_msg("%s: %s, expected: %s", cases[i].header, err.message, cases[i].expect);
            }
            bd_safetensors_close(file);
        }
    }
}

static void test_sizes_of_files(void **state) {
    (void)state;
    bd_error err;
    bd_safetensors *file;
    static const uint8_t huge[8] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const uint8_t over[10] = {3, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    for (int map = 0; map < 2; map++) {
        support_write(dir.path, "s", huge, 0);
        assert_int_equal(open_file("s", map, &file, &err), BD_E_FORMAT);
        support_write(dir.path, "s", huge, 7);
        assert_int_equal(open_file("s", map, &file, &err), BD_E_FORMAT);
        support_write(dir.path, "s", huge, 8);
        assert_int_equal(open_file("s", map, &file, &err), BD_E_FORMAT);
        support_write(dir.path, "s", over, sizeof over);
        assert_int_equal(open_file("s", map, &file, &err), BD_E_FORMAT);
        assert_int_not_equal(open_file("absent", map, &file, &err), BD_OK);
        assert_non_null(strstr(err.message, "absent"));
        assert_int_equal(bd_safetensors_open(dir.path, map, &file, &err),
                         BD_E_IO); /* a directory */
        assert_null(file);
    }
}

/* Damage to the first 8 bytes and the header of real files: any answer is fine but a crash. */
static void test_random_damage(void **state) {
    (void)state;
    uint64_t random = support_seed();
    size_t bytes;
    char *original = support_read("tests/data/hf", "python.safetensors", &bytes);
    char *copy = malloc(bytes);
    assert_non_null(copy);
    uint32_t header = 0;
    memcpy(&header, original, sizeof header);
    uint32_t accepted = 0;
    for (int round = 0; round < 4000; round++) {
        memcpy(copy, original, bytes);
        const uint64_t flips = 1 + support_random(&random) % 4;
        for (uint64_t i = 0; i < flips; i++) {
            static const char likely[] = "0123456789-,:[]{}\"e.";
            const size_t at = support_random(&random) % (8 + header);
            const uint64_t how = support_random(&random);
            copy[at] = how % 2 ? likely[how / 2 % (sizeof likely - 1)]
                               : (char)(copy[at] ^ (1 << how / 2 % 8));
        }
        const size_t keep = round % 5 ? bytes : support_random(&random) % bytes;
        support_write(dir.path, "m", copy, keep);
        bd_error err;
        bd_safetensors *file = NULL;
        if (open_file("m", round % 2, &file, &err) != BD_OK) continue;
        accepted++;
        for (uint32_t i = 0; i < bd_safetensors_count(file); i++) {
            const bd_tensor *t = bd_safetensors_at(file, i);
            assert_true(t->offset_bytes <= keep && t->bytes <= keep - t->offset_bytes);
            volatile uint8_t sink = 0;
            for (uint64_t j = 0; t->data && j < t->bytes; j++)
                sink = (uint8_t)(sink + t->data[j]);
        }
        bd_safetensors_close(file);
    }
    print_message("%u of 4000 damaged files were still valid\n", accepted);
    free(copy);
    free(original);
}

static void test_writer(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    const bd_tensor tensors[] = {
        {.name = "first \"q\" \xc3\xa9 \xf0\x9f\x98\x80",
         .dtype_name = "BF16",
         .rank = 2,
         .shape = {3, 5}},
        {.name = "second", .dtype_name = "U8", .rank = 1, .shape = {7}},
        {.name = "none", .dtype_name = "F32", .rank = 2, .shape = {0, 9}},
    };
    char path[200];
    snprintf(path, sizeof path, "%s/w", dir.path);
    bd_safetensors_writer *writer;
    assert_ok(bd_safetensors_writer_create(path, tensors, 3, 4096, &writer, &err));
    uint8_t data[37];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 5);
    assert_ok(bd_safetensors_writer_append(writer, data, 11, &err));
    assert_ok(bd_safetensors_writer_append(writer, data + 11, 26, &err));
    assert_int_equal(bd_safetensors_writer_append(writer, data, 1, NULL), BD_E_ARGUMENT);
    assert_false(bd_file_exists(path)); /* only finish() makes it appear */
    assert_ok(bd_safetensors_writer_finish(writer, &err));
    bd_safetensors *file;
    assert_ok(bd_safetensors_open(path, true, &file, &err));
    uint64_t measured;
    assert_ok(bd_safetensors_measure(tensors, 3, 4096, &measured, &err));
    assert_true(measured == bd_safetensors_file_bytes(file) && measured == 4096 + 37);
    for (uint32_t i = 0; i < 3; i++) {
        const bd_tensor *t = bd_safetensors_at(file, i);
        const bd_tensor *same = bd_safetensors_find(file, tensors[i].name);
        assert_true(same && same->rank == tensors[i].rank && same->shape[0] == tensors[i].shape[0]);
        if (i == 0) assert_int_equal(t->offset_bytes, 4096);
    }
    assert_memory_equal(bd_safetensors_at(file, 0)->data, data, 30);
    assert_memory_equal(bd_safetensors_find(file, "second")->data, data + 30, 7);
    bd_safetensors_close(file);
    /* Too few bytes, or abort: nothing stays. */
    assert_int_equal(unlink(path), 0);
    assert_ok(bd_safetensors_writer_create(path, tensors, 3, 8, &writer, &err));
    assert_int_equal(bd_safetensors_writer_finish(writer, NULL), BD_E_ARGUMENT);
    assert_ok(bd_safetensors_writer_create(path, tensors, 3, 8, &writer, &err));
    bd_safetensors_writer_abort(writer);
    char left[220];
    snprintf(left, sizeof left, "%s.partial", path);
    assert_false(bd_file_exists(path) || bd_file_exists(left));
    assert_int_equal(bd_safetensors_writer_create("/nonexistent/x", tensors, 3, 8, &writer, &err),
                     BD_E_IO);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void test_fingerprint(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    bd_checkpoint *c;
    char hex[65];
    assert_ok(bd_checkpoint_open("demo/zen-mini", &c, &err));
    assert_ok(bd_checkpoint_fingerprint(c, hex, &err));
    assert_string_equal(hex, "b55327472f0ae7ea76e76f27338af55ed50f2746b78b813ef5735d4497285924");
    const bd_tensor *t;
    assert_ok(bd_checkpoint_need(c, "model.norm.weight", 256, 0, &t, &err));
    assert_int_equal(bd_checkpoint_need(c, "model.norm.weight", 255, 0, &t, &err), BD_E_MISMATCH);
    assert_int_equal(bd_checkpoint_need(c, "model.norm.weight", 256, 1, &t, &err), BD_E_MISMATCH);
    assert_int_equal(bd_checkpoint_need(c, "model.nrom.weight", 256, 0, &t, &err), BD_E_NOT_FOUND);
    assert_string_equal(err.subject, "model.nrom.weight");
    assert_true(bd_checkpoint_bytes(c) == 14688768);
    bd_checkpoint_close(c);
}

static void test_shards_with_index(void **state) {
    (void)state;
    bd_error err = {.message = ""};
    bd_checkpoint *c;
    assert_ok(bd_checkpoint_open("tests/data/arch/qwen3", &c, &err));
    assert_int_equal(bd_checkpoint_file_count(c), 3);
    for (uint32_t i = 1; i < bd_checkpoint_count(c); i++) {
        assert_true(strcmp(bd_checkpoint_at(c, i - 1)->name, bd_checkpoint_at(c, i)->name) < 0);
    }
    const bd_tensor *t = bd_checkpoint_find(c, "model.layers.2.mlp.down_proj.weight");
    assert_non_null(t);
    assert_non_null(strstr(bd_checkpoint_file_path(c, t->file_index), "of-00003"));
    bd_checkpoint_close(c);
}

static void test_index_faults(void **state) {
    (void)state;
    static const struct {
        const char *index, *expect; /* NULL: fine */
    } cases[] = {
        {"{\"weight_map\":{\"a\":\"x.safetensors\"}}", NULL},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\"}}", NULL},
        {"{\"weight_map\":{\"a\":\"y.safetensors\",\"b\":\"y.safetensors\"}}", "not in"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"q\":\"x.safetensors\"}}", "not in"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"z.safetensors\"}}", "two files"},
        {"{\"weight_map\":{\"a\":\"../x.safetensors\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"..\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":\"\"}}", "not the name of a file"},
        {"{\"weight_map\":{\"a\":1}}", "not the name of a file"},
        {"{\"weight_map\":{}}", "weight_map"},
        {"{\"weight_map\":[\"x.safetensors\"]}", "weight_map"},
        {"{}", "weight_map"},
        {"[", ""},
        {"{\"weight_map\":{\"a\":\"absent.safetensors\"}}", "absent"},
    };
    write_file("x.safetensors", "{" FINE "}", 8);
    write_file("y.safetensors", "{" T("b", "F32", "2", "0", "8") "}", 8);
    write_file("z.safetensors", "{" FINE "," T("b", "F32", "2", "8", "16") "}", 16);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bd_error err = {.message = ""};
        bd_checkpoint *c = NULL;
        support_write_text(dir.path, "model.safetensors.index.json", cases[i].index);
        const bd_status status = bd_checkpoint_open(dir.path, &c, &err);
        if ((status == BD_OK) != (cases[i].expect == NULL) ||
            (cases[i].expect && !strstr(err.message, cases[i].expect))) {
            fail_msg("%s: %s", cases[i].index, err.message);
        }
        bd_checkpoint_close(c);
    }
    bd_error err;
    bd_checkpoint *c;
    assert_int_equal(bd_checkpoint_open("tests/data/hf", &c, &err), BD_E_NOT_FOUND);
    assert_non_null(strstr(err.message, "neither"));
    assert_int_equal(bd_checkpoint_open("tests/no-such", &c, &err), BD_E_NOT_FOUND);
    assert_string_equal(err.message, "tests/no-such does not exist");
    assert_int_equal(bd_checkpoint_open("demo/zen-mini/config.json", &c, &err), BD_E_ARGUMENT);
    assert_string_equal(err.message, "demo/zen-mini/config.json is not a directory");
}

/* What is read of a directory that has both is what transformers reads (from_pretrained looks for
 * the one file first), whether the index still leads anywhere or not. */
static void test_one_file_before_an_index(void **state) {
    (void)state;
    static const char *const indexes[] = {"{\"weight_map\":{\"b\":\"y.safetensors\"}}",
                                          "{\"weight_map\":{\"b\":\"gone.safetensors\"}}", "["};
    write_file("model.safetensors", "{" FINE "}", 8);
    write_file("y.safetensors", "{" T("b", "F32", "2", "0", "8") "}", 8);
    for (size_t i = 0; i < sizeof indexes / sizeof indexes[0]; i++) {
        bd_error err = {.message = ""};
        bd_checkpoint *c = NULL;
        support_write_text(dir.path, "model.safetensors.index.json", indexes[i]);
        assert_ok(bd_checkpoint_open(dir.path, &c, &err));
        assert_int_equal(bd_checkpoint_file_count(c), 1);
        assert_non_null(bd_checkpoint_find(c, "a"));
        assert_null(bd_checkpoint_find(c, "b"));
        bd_checkpoint_close(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_python_file),     cmocka_unit_test(test_header_only),
        cmocka_unit_test(test_hostile_headers), cmocka_unit_test(test_sizes_of_files),
        cmocka_unit_test(test_random_damage),   cmocka_unit_test(test_writer),
        cmocka_unit_test(test_fingerprint),     cmocka_unit_test(test_shards_with_index),
        cmocka_unit_test(test_index_faults),    cmocka_unit_test(test_one_file_before_an_index),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
