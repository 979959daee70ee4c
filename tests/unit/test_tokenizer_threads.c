/* One tokenizer, several threads encoding and decoding golden lines at the same time. Meant for the
 * thread sanitizer; without it, it still checks every result. */
#include "tokenizer_support.h"

#include <pthread.h>
#include <stdatomic.h>

#define THREADS 4

typedef struct sample {
    bd_strbuf text, decoded;
    bd_token_vec ids;
    bd_encode_options options;
} sample;

typedef struct shared {
    const bd_tokenizer *tokenizer;
    sample samples[128];
    size_t count;
    atomic_uint wrong;
} shared;

typedef struct worker {
    pthread_t thread;
    shared *all;
    uint32_t index;
} worker;

static bool sample_right(const bd_tokenizer *t, const sample *s) {
    bd_token_vec ids = {0};
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bool right =
        bd_tokenizer_encode(t, s->text.data, s->text.len_bytes, &s->options, &ids, NULL) == BD_OK;
    right = right && ids.count == s->ids.count &&
            (ids.count == 0 || !memcmp(ids.ids, s->ids.ids, ids.count * sizeof *ids.ids));
    right = right &&
            bd_tokenizer_decode(t, s->ids.ids, s->ids.count, false, &text, NULL) == BD_OK &&
            text.len_bytes == s->decoded.len_bytes &&
            (text.len_bytes == 0 || !memcmp(text.data, s->decoded.data, text.len_bytes));
    bd_token_vec_deinit(&ids);
    bd_strbuf_deinit(&text);
    return right;
}

static void *work(void *argument) {
    const worker *w = argument;
    shared *all = w->all;
    for (size_t i = 0; i < all->count * 4; i++) /* each thread begins somewhere else */
        if (!sample_right(all->tokenizer, &all->samples[(i + w->index * 31) % all->count]))
            atomic_fetch_add(&all->wrong, 1);
    return NULL;
}

static void run_threads(const char *name) {
    bd_tokenizer *t = support_load_named(name);
    shared *all = calloc(1, sizeof *all);
    assert_non_null(all);
    all->tokenizer = t;
    support_lines lines = support_lines_open(name, "golden.jsonl");
    bd_json_span object;
    while (support_lines_next(&lines, &object)) {
        if (lines.number % 5 != 0 || all->count == 128) continue;
        sample *s = &all->samples[all->count++];
        s->text = support_string(object, "text");
        s->decoded = support_string(object, "decoded");
        s->options.add_special_tokens = support_flag(object, "add_special_tokens");
        s->options.parse_special = support_flag(object, "parse_special");
        support_ids(object, "ids", &s->ids);
    }
    worker workers[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){.all = all, .index = i};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    assert_int_equal(atomic_load(&all->wrong), 0);
    for (size_t i = 0; i < all->count; i++) {
        bd_strbuf_deinit(&all->samples[i].text);
        bd_strbuf_deinit(&all->samples[i].decoded);
        bd_token_vec_deinit(&all->samples[i].ids);
    }
    free(all);
    bd_tokenizer_destroy(t);
}

static void test_threads(void **state) {
    (void)state;
    run_threads("gpt2");
    run_threads("qwen3");
    run_threads("llama2");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
