/* gpu_split_files.h - a base in many files and deltas in as many shards as there are ranks, made as
 * fast as the disk takes them: matrices are a block of random values over and over, each from a
 * place of its own, and a thread writes each file, past the page cache where that is allowed. */
#ifndef BITDELTA_BENCH_GPU_SPLIT_FILES_H
#define BITDELTA_BENCH_GPU_SPLIT_FILES_H

#include <pthread.h>

#include "../tests/gpu/gpu_files.h"
#include "bitdelta/base/half.h"

enum { SPLIT_NOISE_BYTES = 64 << 20, SPLIT_FILES_MAX = 128 };

typedef struct split_file {
    pthread_t thread;
    char path[1300];
    gpu_files_list list;
    uint64_t seed;
    float scale; /* of a delta's */
    bool cached; /* through the page cache */
    uint64_t bytes, *sums;
    uint32_t count;
} split_file;

static uint16_t *split_noise, *split_bits; /* bf16 values around 0; random bits */

static inline void split_make_noise(void) {
    uint64_t state = 20261130;
    split_noise = malloc(SPLIT_NOISE_BYTES);
    split_bits = malloc(SPLIT_NOISE_BYTES);
    if (!split_noise || !split_bits) gpu_files_die("noise");
    for (uint32_t i = 0; i < SPLIT_NOISE_BYTES / 8; i++) {
        const uint64_t word = gpu_files_next(&state);
        memcpy(split_bits + 4 * (size_t)i, &word, 8);
        for (uint32_t k = 0; k < 4; k++)
            split_noise[4 * (size_t)i + k] =
                bd_f32_to_bf16(((float)(uint16_t)(word >> (16 * k)) / 65536.0f - 0.5f) * 0.06f);
    }
}

/* An odd number of values is repeated: rows of an even length come out different. */
static inline void split_put_block(gpu_files_out *o, const uint16_t *block, uint64_t bytes,
                                   uint64_t seed) {
    const uint64_t period = SPLIT_NOISE_BYTES - 2 * 1237;
    for (uint64_t at = gpu_files_next(&seed) % (period / 2) * 2; bytes; at = 0) {
        const uint64_t n = period - at < bytes ? period - at : bytes;
        gpu_files_put(o, (const uint8_t *)block + at, n);
        bytes -= n;
    }
}

/* Scales and vectors follow from name and seed, the same in every shard; bits are the shard's. */
static inline void split_put_tensor(gpu_files_out *o, const gpu_files_tensor *t,
                                    const split_file *f, uint64_t shard_seed) {
    uint64_t seed = XXH3_64bits_withSeed(t->name, strlen(t->name), f->seed);
    if (t->dtype[0] == 'U') {
        split_put_block(o, split_bits, t->bytes, seed ^ shard_seed);
    } else if (t->dtype[0] == 'F') {
        for (uint64_t i = 0; i < t->rows; i++) {
            const float v = f->scale * (0.5f + (float)(gpu_files_next(&seed) >> 40) * 0x1p-24f);
            gpu_files_put(o, &v, sizeof v);
        }
    } else if (t->cols) {
        split_put_block(o, split_noise, t->bytes, seed);
    } else {
        gpu_files_bf16(o, t->rows, true, 1, &seed);
    }
}

static inline void *split_write(void *arg) {
    split_file *f = arg;
    gpu_files_out o = gpu_files_open(f->path, gpu_files_total(&f->list));
    const uint64_t shard_seed = XXH3_64bits(f->path, strlen(f->path));
    if (!f->cached) (void)fcntl(o.fd, F_SETFL, O_DIRECT); /* refused by some: then as it is */
    gpu_files_header(&o, &f->list);
    for (uint32_t i = 0; i < f->list.count; i++)
        split_put_tensor(&o, &f->list.at[i], f, shard_seed);
    if (o.used % 4096) (void)fcntl(o.fd, F_SETFL, 0);
    gpu_files_flush(&o);
    if ((!f->cached && fsync(o.fd) != 0) || close(o.fd) != 0) gpu_files_die(f->path);
    free(o.chunk);
    f->bytes = o.bytes, f->sums = o.sums, f->count = o.count;
    return NULL;
}

static inline void split_write_all(split_file *files, uint32_t count, uint32_t at_once) {
    for (uint32_t i = 0; i < count + at_once; i++) {
        if (i >= at_once) pthread_join(files[i - at_once].thread, NULL);
        if (i < count && pthread_create(&files[i].thread, NULL, split_write, &files[i]) != 0)
            gpu_files_die("thread");
    }
}

/* ---- The base: a file a layer, one of the tables and vectors ---- */

static inline uint32_t split_base_file_of(const gpu_files_tensor *t) {
    uint32_t layer;
    return t->cols && sscanf(t->name, "model.layers.%u.", &layer) == 1 ? 1 + layer : 0;
}

/* Returns the bytes of all files. */
static inline uint64_t split_base(const char *dir, const gpu_files_shape *s, bool cached) {
    const uint32_t count = s->layers + 1;
    gpu_files_list *all = malloc(sizeof *all);
    split_file *files = calloc(count, sizeof *files);
    char path[1300];
    uint64_t bytes = 0;
    if (!all || !files || count > SPLIT_FILES_MAX) gpu_files_die("base");
    gpu_files_config(dir, s);
    gpu_files_weights(s, all);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    FILE *index = fopen(path, "w");
    if (!index) gpu_files_die(path);
    fprintf(index, "{\"metadata\":{},\"weight_map\":{");
    for (uint32_t i = 0; i < all->count; i++) {
        const gpu_files_tensor *t = &all->at[i];
        const uint32_t at = split_base_file_of(t);
        gpu_files_add(&files[at].list, t->name, "", "BF16", t->rows, t->cols, 2);
        fprintf(index, "%s\"%s\":\"model-%05u.safetensors\"", i ? "," : "", t->name, at);
    }
    fprintf(index, "}}\n");
    if (fclose(index) != 0) gpu_files_die(path);
    for (uint32_t i = 0; i < count; i++) {
        snprintf(files[i].path, sizeof files[i].path, "%s/model-%05u.safetensors", dir, i);
        files[i].seed = 1, files[i].cached = cached;
    }
    split_write_all(files, count, 8);
    for (uint32_t i = 0; i < count; i++) {
        bytes += files[i].bytes;
        free(files[i].sums);
    }
    free(files), free(all);
    return bytes;
}

/* ---- Deltas ---- */

static inline void split_delta_list(const gpu_files_list *weights, const gpu_files_shape *s,
                                    uint32_t shards, uint32_t shard, gpu_files_list *out) {
    const uint32_t kv_parts = s->kv_heads < shards ? s->kv_heads : shards;
    for (uint32_t i = 0; i < weights->count; i++) {
        const gpu_files_tensor *w = &weights->at[i];
        const uint64_t shape[2] = {w->rows, w->cols};
        bd_delta_part part;
        if (!w->cols) {
            gpu_files_add(out, w->name, "", "BF16", w->rows, 0, 2);
            continue;
        }
        if (!bd_delta_part_of(w->name, shape, shard, shards, kv_parts, &part))
            gpu_files_die(w->name);
        gpu_files_add(out, w->name, ".sign", "U8", part.rows, part.cols / 8, 1);
        gpu_files_add(out, w->name, ".scale", "F32", part.rows, 0, 4);
    }
}

/* The manifest of a delta whose shards are written. */
static inline void split_manifest(const char *dir, const char *variant, const char *fingerprint,
                                  const gpu_files_list *weights, const split_file *files,
                                  uint32_t shards) {
    bd_delta_entry *entries = calloc(weights->count, sizeof *entries);
    bd_delta_file out[BD_DELTA_SHARDS_MAX] = {0};
    char names[BD_DELTA_SHARDS_MAX][64];
    bd_error err;
    if (!entries) gpu_files_die(dir);
    for (uint32_t i = 0; i < weights->count; i++) {
        const gpu_files_tensor *w = &weights->at[i];
        entries[i] = (bd_delta_entry){.name = w->name,
                                      .kind = w->cols ? BD_DELTA_SIGN : BD_DELTA_FULL,
                                      .rank = w->cols ? 2 : 1,
                                      .shape = {w->rows, w->cols}};
    }
    for (uint32_t i = 0; i < shards; i++) {
        bd_delta_file_name(names[i], sizeof names[i], i, shards);
        out[i] = (bd_delta_file){.name = names[i],
                                 .bytes = files[i].bytes,
                                 .chunk_bytes = BD_DELTA_CHUNK_BYTES,
                                 .chunk_count = files[i].count,
                                 .chunk_xxh3 = files[i].sums};
        memset(out[i].sha256, '0', 64); /* which only `inspect --verify` looks at */
    }
    bd_delta delta = {.embeddings = "sign",
                      .scale = "row",
                      .bits = 1,
                      .shard_count = shards,
                      .entry_count = weights->count,
                      .entries = entries,
                      .files = out};
    snprintf(delta.dir, sizeof delta.dir, "%s", dir);
    snprintf(delta.variant, sizeof delta.variant, "%s", variant);
    snprintf(delta.base, sizeof delta.base, "random");
    snprintf(delta.base_fingerprint, sizeof delta.base_fingerprint, "%s", fingerprint);
    if (bd_delta_write_manifest(&delta, &err) != BD_OK) gpu_files_die(err.message);
    free(entries);
}

/* dirs[count], in `shards` shards each. Returns the bytes of all files. */
static inline uint64_t split_deltas(char (*dirs)[1100], uint32_t count, const char *fingerprint,
                                    const gpu_files_shape *s, uint32_t shards, float scale) {
    gpu_files_list *weights = malloc(sizeof *weights);
    split_file *files = calloc((size_t)count * shards, sizeof *files);
    uint64_t bytes = 0;
    if (!weights || !files) gpu_files_die("deltas");
    gpu_files_weights(s, weights);
    for (uint32_t i = 0; i < count * shards; i++) {
        char name[64];
        if (mkdir(dirs[i / shards], 0700) != 0 && errno != EEXIST) gpu_files_die(dirs[i / shards]);
        bd_delta_file_name(name, sizeof name, i % shards, shards);
        snprintf(files[i].path, sizeof files[i].path, "%s/%s", dirs[i / shards], name);
        files[i].seed = 1000 + i / shards;
        files[i].scale = scale;
        split_delta_list(weights, s, shards, i % shards, &files[i].list);
    }
    split_write_all(files, count * shards, 8);
    for (uint32_t i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "random-%u", i);
        split_manifest(dirs[i], name, fingerprint, weights, &files[i * shards], shards);
    }
    for (uint32_t i = 0; i < count * shards; i++) {
        bytes += files[i].bytes;
        free(files[i].sums);
    }
    free(files), free(weights);
    return bytes;
}

#endif
