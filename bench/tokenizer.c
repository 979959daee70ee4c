/* tokenizer.c - bench_tokenizer TOKENIZER.JSON DOCUMENTS [ids]: encodes the documents of a file,
 * which are separated by NUL bytes, once for each line on standard input, and answers each line
 * with the seconds that took. With a third argument it prints the ids instead, a line for each
 * document, and ends. bench/tokenizer.py drives it. Threads: one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bitdelta/tokenizer/tokenizer.h"

enum { DOCUMENTS_BYTES_MAX = 64 << 20 };

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *read_all(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    char *text = malloc((size_t)DOCUMENTS_BYTES_MAX + 1);
    if (!file || !text) {
        if (file) fclose(file);
        free(text);
        return NULL;
    }
    *bytes = fread(text, 1, DOCUMENTS_BYTES_MAX, file);
    fclose(file);
    text[*bytes] = '\0';
    return text;
}

/* One pass over all documents; prints the ids when show. false: a document was refused. */
static bool encode_all(const bd_tokenizer *tokenizer, const char *text, size_t bytes,
                       bd_token_vec *ids, bool show, bd_error *err) {
    const bd_encode_options options = {.add_special_tokens = false, .parse_special = true};
    for (size_t at = 0; at < bytes;) {
        const size_t length = strlen(text + at);
        ids->count = 0;
        if (bd_tokenizer_encode(tokenizer, text + at, length, &options, ids, err) != BD_OK)
            return false;
        for (size_t i = 0; show && i < ids->count; i++)
            printf("%s%d", i ? " " : "", ids->ids[i]);
        if (show) printf("\n");
        at += length + 1;
    }
    return true;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: bench_tokenizer TOKENIZER.JSON DOCUMENTS [ids]\n");
        return 2;
    }
    bd_error err;
    bd_error_clear(&err);
    bd_tokenizer *tokenizer = NULL;
    bd_token_vec ids = {0};
    size_t bytes = 0;
    char *text = read_all(argv[2], &bytes), line[16];
    bool good = text && bd_tokenizer_load(&tokenizer, argv[1], &err) == BD_OK;
    if (good && argc > 3) good = encode_all(tokenizer, text, bytes, &ids, true, &err);
    while (good && argc == 3 && fgets(line, sizeof line, stdin)) {
        const double start = now_seconds();
        good = encode_all(tokenizer, text, bytes, &ids, false, &err);
        printf("%.9f\n", now_seconds() - start);
        fflush(stdout);
    }
    if (!good) fprintf(stderr, "%s: %s\n", text ? err.subject : argv[2], err.message);
    bd_token_vec_deinit(&ids);
    bd_tokenizer_destroy(tokenizer);
    free(text);
    return good ? 0 : 1;
}
