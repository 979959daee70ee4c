/* Allocation failure while a tokenizer loads, encodes and decodes: the sources are compiled in with
 * allocators that fail at the n-th call, for every n. The outcome is BD_E_MEMORY and nothing is
 * lost. */
#include "base_support.h"

#include <cjson/cJSON.h>

static unsigned g_calls_left; /* the call that finds 0 fails */
static bool g_only_one;       /* and all after it, or only that one */

static bool spend(void) {
    if (g_calls_left == 0) {
        if (g_only_one) g_calls_left = UINT32_MAX;
        return false;
    }
    g_calls_left--;
    return true;
}

static void *fail_malloc(size_t bytes) {
    return spend() ? malloc(bytes) : NULL;
}

static void *fail_calloc(size_t count, size_t bytes) {
    return spend() ? calloc(count, bytes) : NULL;
}

static void *fail_realloc(void *memory, size_t bytes) {
    return spend() ? realloc(memory, bytes) : NULL;
}

static char *fail_strdup(const char *text) {
    return spend() ? strdup(text) : NULL;
}

#undef strdup
#define malloc  fail_malloc
#define calloc  fail_calloc
#define realloc fail_realloc
#define strdup  fail_strdup
#include "base/strbuf.c"
#include "tokenizer/added.c"
#include "tokenizer/bpe.c"
#include "tokenizer/decode.c"
#include "tokenizer/encode.c"
#include "tokenizer/keys.c"
#include "tokenizer/load.c"
#include "tokenizer/load_decoder.c"
#include "tokenizer/load_json.c"
#include "tokenizer/load_merges.c"
#include "tokenizer/load_pipeline.c"
#include "tokenizer/load_vocab.c"
#include "tokenizer/normalize.c"
#include "tokenizer/pair_queue.c"
#include "tokenizer/split.c"
#include "tokenizer/tokenizer.c"

static const char file[] =
    "{\"added_tokens\":[{\"id\":8,\"content\":\"<s>\",\"lstrip\":true,\"normalized\":false,"
    "\"special\":true},"
    "{\"id\":9,\"content\":\"c x\",\"normalized\":true,\"special\":false}],"
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":"
    "\"Prepend\",\"prepend\":\"_\"},"
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" "
    "\"},\"content\":\"_\"}]},\"pre_tokenizer\":{\"type\":\"Split\","
    "\"pattern\":{\"Regex\":\"[a-c]+\"},\"behavior\":\"Isolated\",\"invert\":false},\"post_"
    "processor\":{"
    "\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":"
    "{\"id\":\"A\"}}],"
    "\"special_tokens\":{\"<s>\":{\"ids\":[8]}}},\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{"
    "\"type\":"
    "\"Replace\",\"pattern\":{\"String\":\"_\"},\"content\":\" "
    "\"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]},"
    "\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"byte_fallback\":true,\"vocab\":{\"<unk>"
    "\":0,\"a\":1,\"b\":2,"
    "\"_\":3,\"ab\":4,\"<0xC3>\":5,\"<0xA9>\":6,\"c\":7},\"merges\":[\"a b\"]}}";

/* Everything once; true when no call failed. *count: tokens made, 0 before the first complete run.
 */
static bool run(unsigned calls, size_t *count) {
    bd_tokenizer *t;
    bd_token_vec ids = {0};
    bd_strbuf text;
    bd_error err;
    bd_encode_options options = {.add_special_tokens = true, .parse_special = true};
    g_calls_left = calls;
    bd_strbuf_init(&text, 0);
    bd_status s = bd_tokenizer_parse(&t, file, sizeof file - 1, "file", &err);
    if (s == BD_OK) {
        /* A word of over 48 symbols takes the heap, one of HUGE_WORD the buckets; e and U+0301
         * make NFC work. */
        static const char start[] =
            "e\xcc\x81\xcc\xa3 ababababababababababababababababababababababababab"
            "ababababababc x<s>\xc3\xa9z abc ";
        static char input[sizeof start + HUGE_WORD];
        memcpy(input, start, sizeof start - 1);
        for (size_t i = sizeof start - 1; i < sizeof input; i++)
            input[i] = i % 2 ? 'a' : 'b';
        s = bd_tokenizer_encode(t, input, sizeof input, &options, &ids, &err);
        if (s == BD_OK) s = bd_tokenizer_decode(t, ids.ids, ids.count, false, &text, &err);
    }
    if (s != BD_OK && s != BD_E_MEMORY)
        fail_msg("after %u calls: status %d, %s", calls, (int)s, err.message);
    /* A failure that got lost on its way would leave a piece out. */
    if (s == BD_OK && *count > 0) assert_int_equal(ids.count, *count);
    if (s == BD_OK) *count = ids.count;
    bd_tokenizer_destroy(t);
    bd_token_vec_deinit(&ids);
    bd_strbuf_deinit(&text);
    return s == BD_OK;
}

static void test_every_call_fails_once(void **state) {
    (void)state;
    cJSON_Hooks hooks = {.malloc_fn = fail_malloc, .free_fn = free};
    cJSON_InitHooks(&hooks);
    unsigned calls = 0;
    size_t count = 0;
    assert_true(run(UINT32_MAX, &count));
    assert_true(count > 10);
    while (!run(calls, &count))
        calls++;
    /* Memory that comes back must not hide that a part is missing. */
    g_only_one = true;
    for (unsigned call = 0; call < calls; call++)
        assert_false(run(call, &count));
    print_message("%u allocations\n", calls);
    assert_true(calls > 100);
    cJSON_InitHooks(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_call_fails_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
