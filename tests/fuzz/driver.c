/* driver.c - a fuzz target as an ordinary test, without libFuzzer: every file of its corpus, the
 * empty input, then random mutations of them from a printed seed. A case is a pure function of seed
 * and number, and a child runs the cases; when it dies, the parent names the case and keeps its
 * bytes beside the program.
 *   test_fuzz_NAME CORPUS_DIR [SEED]      test_fuzz_NAME FILE  runs one file in this process */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bitdelta/base/file.h"
#include "fuzz.h"

enum { MUTATIONS = 2000, INPUT_BYTES_MAX = 1 << 16, FILES_MAX = 4096 };

typedef struct input {
    char *data; /* exactly bytes long in memory, so that a sanitizer sees one byte more */
    size_t bytes;
} input;

typedef struct corpus {
    input *files; /* sorted by name */
    size_t count;
} corpus;

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t below(uint64_t *state, size_t limit) {
    return (size_t)(next_random(state) % limit);
}

/* ---- the corpus ---- */

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static input read_input(const char *path) {
    input file;
    bd_error err = {.message = ""};
    if (bd_file_read(path, INPUT_BYTES_MAX, &file.data, &file.bytes, &err) != BD_OK) {
        fprintf(stderr, "%s\n", err.message);
        exit(2);
    }
    return file;
}

static corpus read_corpus(const char *dir) {
    static char *names[FILES_MAX];
    corpus all = {.files = calloc(FILES_MAX, sizeof *all.files)};
    size_t count = 0;
    DIR *list = opendir(dir);
    if (!list || !all.files) {
        fprintf(stderr, "cannot read %s\n", dir);
        exit(2);
    }
    for (const struct dirent *entry; count < FILES_MAX && (entry = readdir(list));)
        if (entry->d_name[0] != '.') names[count++] = strdup(entry->d_name);
    closedir(list);
    if (count > 0) qsort(names, count, sizeof *names, by_name);
    for (; all.count < count; all.count++) {
        char path[4096];
        if (bd_path_join(path, sizeof path, dir, names[all.count], NULL) != BD_OK) exit(2);
        all.files[all.count] = read_input(path);
        free(names[all.count]);
    }
    return all;
}

static void free_corpus(corpus *all) {
    for (size_t i = 0; i < all->count; i++)
        free(all->files[i].data);
    free(all->files);
}

/* ---- mutations ---- */

/* Replaces `cut` bytes at `at`; what would become too long stays as it is. */
static void replace(input *in, size_t at, size_t cut, const void *with, size_t with_bytes) {
    if (in->bytes - cut + with_bytes > INPUT_BYTES_MAX) return;
    memmove(in->data + at + with_bytes, in->data + at + cut, in->bytes - at - cut);
    if (with_bytes > 0) memcpy(in->data + at, with, with_bytes);
    in->bytes = in->bytes - cut + with_bytes;
}

/* A range of the input, mostly short. */
static void choose_range(const input *in, uint64_t *state, size_t *at, size_t *length) {
    *at = below(state, in->bytes + 1);
    const size_t longest = in->bytes - *at;
    *length = below(state, (below(state, 4) == 0 || longest < 16 ? longest : 16) + 1);
}

static void replace_number(input *in, uint64_t *state) {
    static const char *const numbers[] = {"0",
                                          "-1",
                                          "1",
                                          "7",
                                          "0.5",
                                          "1e9",
                                          "1e-400",
                                          "1e308",
                                          "255",
                                          "65536",
                                          "2147483647",
                                          "-2147483648",
                                          "4294967296",
                                          "9007199254740993",
                                          "-0",
                                          "257",
                                          "null",
                                          "1e309",
                                          "18446744073709551615"};
    const size_t start = below(state, in->bytes + 1);
    size_t at = start;
    while (at < in->bytes && (in->data[at] < '0' || in->data[at] > '9'))
        at++;
    size_t end = at;
    while (end < in->bytes && in->data[end] >= '0' && in->data[end] <= '9')
        end++;
    const char *with = numbers[below(state, sizeof numbers / sizeof *numbers)];
    if (end > at) replace(in, at, end - at, with, strlen(with));
}

static void insert_word(input *in, uint64_t *state) {
    static const char *const words[] = {"null",
                                        "true",
                                        "{}",
                                        "[]",
                                        "\"\"",
                                        ",",
                                        ":",
                                        "{",
                                        "}",
                                        "[",
                                        "]",
                                        "\"",
                                        "\\",
                                        "\\u",
                                        "\"a\":1,",
                                        "\\u0000",
                                        "\\ud83d\\ude00",
                                        "\\ud800",
                                        "1e5",
                                        "-",
                                        "\xff",
                                        "\xc3\xa9",
                                        "\xef\xbb\xbf",
                                        "../",
                                        "/",
                                        "%s",
                                        " "};
    const char *with = words[below(state, sizeof words / sizeof *words)];
    replace(in, below(state, in->bytes + 1), 0, with, strlen(with));
}

static void splice(input *in, const corpus *all, uint64_t *state) {
    const input *other = &all->files[below(state, all->count)];
    size_t from, length, at, cut;
    choose_range(other, state, &from, &length);
    choose_range(in, state, &at, &cut);
    replace(in, at, cut, other->data + from, length);
}

static void mutate(input *in, const corpus *all, uint64_t *state) {
    char block[16];
    size_t at, length;
    choose_range(in, state, &at, &length);
    if (length > sizeof block) length = sizeof block;
    switch (below(state, 8)) {
    case 0:
        if (in->bytes > at) in->data[at] = (char)(in->data[at] ^ (1 << below(state, 8)));
        break;
    case 1:
        if (in->bytes > at) in->data[at] = (char)next_random(state);
        break;
    case 2:
        replace(in, at, length, NULL, 0);
        break;
    case 3: /* twice the same range */
        memcpy(block, in->data + at, length);
        replace(in, at, 0, block, length);
        break;
    case 4:
        for (size_t i = 0; i < length; i++)
            block[i] = (char)next_random(state);
        replace(in, at, length, block, length);
        break;
    case 5:
        replace_number(in, state);
        break;
    case 6:
        insert_word(in, state);
        break;
    default:
        splice(in, all, state);
        break;
    }
}

/* Case `number`: a file of the corpus, the empty input, or a mutation. The caller frees data. */
static input make_case(const corpus *all, uint64_t seed, size_t number) {
    input in = {.data = malloc(INPUT_BYTES_MAX)};
    BD_ASSERT(in.data);
    uint64_t state = seed ^ (number * 0xd1342543de82ef95u);
    const bool mutated = number > all->count;
    const size_t source = mutated ? below(&state, all->count) : number;
    if (source < all->count) replace(&in, 0, 0, all->files[source].data, all->files[source].bytes);
    const size_t edits = mutated ? (size_t)1 << below(&state, 4) : 0;
    for (size_t i = 0; i < edits; i++)
        mutate(&in, all, &state);
    char *exact = malloc(in.bytes > 0 ? in.bytes : 1);
    BD_ASSERT(exact);
    memcpy(exact, in.data, in.bytes);
    free(in.data);
    in.data = exact;
    return in;
}

/* ---- running ---- */

static void run_case(const input *in) {
    LLVMFuzzerTestOneInput((const uint8_t *)in->data, in->bytes);
}

static void run_all(const corpus *all, uint64_t seed, size_t total, volatile size_t *number) {
    for (*number = 0; *number < total; (*number)++) {
        input in = make_case(all, seed, *number);
        run_case(&in);
        free(in.data);
    }
}

static void report(const corpus *all, uint64_t seed, size_t number, int status, const char *self) {
    char path[4096];
    snprintf(path, sizeof path, "%s.failed-input", self);
    input in = make_case(all, seed, number);
    bd_error err = {.message = ""};
    const bool kept = bd_file_replace(path, in.data, in.bytes, &err) == BD_OK;
    printf("case %zu died: %s %d; %zu bytes %s %s\n", number,
           WIFSIGNALED(status) ? "signal" : "exit status",
           WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), in.bytes,
           kept ? "kept in" : "not kept:", kept ? path : err.message);
    free(in.data);
}

static uint64_t fresh_seed(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int main(int argc, char **argv) {
    struct stat info;
    if (argc < 2 || argc > 3 || stat(argv[1], &info) != 0) {
        fprintf(stderr, "usage: %s CORPUS_DIR [SEED] | FILE\n", argv[0]);
        return 2;
    }
    if (S_ISREG(info.st_mode)) {
        const corpus one = {.files = &(input){0}, .count = 1};
        one.files[0] = read_input(argv[1]);
        input in = make_case(&one, 0, 0);
        run_case(&in);
        free(in.data);
        free(one.files[0].data);
        return 0;
    }
    corpus all = read_corpus(argv[1]);
    if (all.count == 0) {
        fprintf(stderr, "%s is empty\n", argv[1]);
        return 2;
    }
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : fresh_seed();
    const size_t total = all.count + 1 + MUTATIONS;
    printf("seed %llu, %zu files, %d mutations\n", (unsigned long long)seed, all.count, MUTATIONS);
    fflush(stdout);
    volatile size_t *number =
        mmap(NULL, sizeof *number, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    BD_ASSERT(number != MAP_FAILED);
    const pid_t child = fork();
    BD_ASSERT(child >= 0);
    if (child == 0) {
        run_all(&all, seed, total, number);
        free_corpus(&all);
        exit(0);
    }
    int status = 0;
    BD_ASSERT(waitpid(child, &status, 0) == child);
    if (status != 0) report(&all, seed, *number, status, argv[0]);
    free_corpus(&all);
    return status == 0 ? 0 : 1;
}
