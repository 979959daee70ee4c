/* gpu_files.h - a base model and deltas of random bits on disk, of any shape and quickly made: what tests and benchmarks of loads
 * share. A sparse base has a header and no bytes, for those who put weights of their own. */
#ifndef BD_GPU_FILES_H
#define BD_GPU_FILES_H

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "bitdelta/delta/delta.h"

typedef struct gpu_files_shape {
    uint32_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab;
    bool tied;
} gpu_files_shape;

#define GPU_FILES_TENSORS 4096

typedef struct gpu_files_tensor {
    char name[96], dtype[8];
    uint64_t rows, cols; /* cols 0: a vector */
    uint64_t bytes;
} gpu_files_tensor;

typedef struct gpu_files_list {
    uint32_t count;
    gpu_files_tensor at[GPU_FILES_TENSORS];
} gpu_files_list;

static inline void gpu_files_die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static inline uint64_t gpu_files_next(uint64_t *state) { /* SplitMix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ---- Which tensors ---- */

/* The model's weights, in the order of a delta. */
static inline void gpu_files_weights(const gpu_files_shape *s, gpu_files_list *out) {
    const uint32_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    const struct {
        const char *name;
        uint32_t rows, cols;
    } parts[] = {{"input_layernorm", s->hidden, 0},          {"self_attn.q_proj", q, s->hidden},
                 {"self_attn.k_proj", kv, s->hidden},        {"self_attn.v_proj", kv, s->hidden},
                 {"self_attn.o_proj", s->hidden, q},         {"post_attention_layernorm", s->hidden, 0},
                 {"mlp.gate_proj", s->ffn, s->hidden},       {"mlp.up_proj", s->ffn, s->hidden},
                 {"mlp.down_proj", s->hidden, s->ffn}};
    enum { PARTS = sizeof parts / sizeof *parts };
    out->count = 0;
    if (s->layers * PARTS + 3 > GPU_FILES_TENSORS / 2) gpu_files_die("layers");
    out->at[out->count++] = (gpu_files_tensor){.name = "model.embed_tokens.weight", .rows = s->vocab, .cols = s->hidden};
    for (uint32_t layer = 0; layer < s->layers; layer++)
        for (uint32_t i = 0; i < PARTS; i++) {
            gpu_files_tensor *t = &out->at[out->count++];
            *t = (gpu_files_tensor){.rows = parts[i].rows, .cols = parts[i].cols};
            snprintf(t->name, sizeof t->name, "model.layers.%u.%s.weight", layer, parts[i].name);
        }
    out->at[out->count++] = (gpu_files_tensor){.name = "model.norm.weight", .rows = s->hidden};
    if (!s->tied) out->at[out->count++] = (gpu_files_tensor){.name = "lm_head.weight", .rows = s->vocab, .cols = s->hidden};
}

static inline void gpu_files_add(gpu_files_list *list, const char *name, const char *what, const char *dtype, uint64_t rows, uint64_t cols, uint32_t size) {
    gpu_files_tensor *t = &list->at[list->count++];
    *t = (gpu_files_tensor){.rows = rows, .cols = cols, .bytes = rows * (cols ? cols : 1) * size};
    snprintf(t->name, sizeof t->name, "%s%s", name, what);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
}

/* ---- Files ---- */

typedef struct gpu_files_out { /* a file written chunk by chunk, with the sums of its chunks */
    const char *path;
    int fd;
    uint8_t *chunk;
    size_t used;
    uint64_t bytes;
    uint64_t *sums;
    uint32_t count;
} gpu_files_out;

static inline void gpu_files_flush(gpu_files_out *o) {
    if (!o->used) return;
    o->sums[o->count++] = XXH3_64bits(o->chunk, o->used);
    if (write(o->fd, o->chunk, o->used) != (ssize_t)o->used) gpu_files_die(o->path);
    o->bytes += o->used;
    o->used = 0;
}

static inline void gpu_files_put(gpu_files_out *o, const void *data, size_t bytes) {
    for (const uint8_t *from = data; bytes;) {
        const size_t room = BD_DELTA_CHUNK_BYTES - o->used, n = bytes < room ? bytes : room;
        memcpy(o->chunk + o->used, from, n);
        o->used += n, from += n, bytes -= n;
        if (o->used == BD_DELTA_CHUNK_BYTES) gpu_files_flush(o);
    }
}

/* The safetensors header, padded so that the data begins on a page; the data's bytes. */
static inline uint64_t gpu_files_header(gpu_files_out *o, const gpu_files_list *list) {
    char *text = malloc((size_t)list->count * 256 + 8192);
    size_t at = 8;
    uint64_t offset = 0;
    if (!text) gpu_files_die("header");
    at += (size_t)sprintf(text + at, "{");
    for (uint32_t i = 0; i < list->count; i++) {
        const gpu_files_tensor *t = &list->at[i];
        char shape[64];
        snprintf(shape, sizeof shape, t->cols ? "%" PRIu64 ",%" PRIu64 : "%" PRIu64, t->rows, t->cols);
        at += (size_t)sprintf(text + at, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", i ? "," : "", t->name, t->dtype, shape, offset,
                              offset + t->bytes);
        offset += t->bytes;
    }
    text[at++] = '}';
    while (at % 4096) text[at++] = ' ';
    const uint64_t length = at - 8;
    memcpy(text, &length, 8);
    gpu_files_put(o, text, at);
    free(text);
    return offset;
}

static inline gpu_files_out gpu_files_open(const char *path, uint64_t bytes_max) {
    gpu_files_out o = {.path = path, .fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600)};
    if (o.fd < 0 || posix_memalign((void **)&o.chunk, 4096, BD_DELTA_CHUNK_BYTES) != 0) gpu_files_die(path);
    o.sums = calloc(bytes_max / BD_DELTA_CHUNK_BYTES + 2, sizeof *o.sums);
    if (!o.sums) gpu_files_die(path);
    return o;
}

/* The sums stay the caller's. */
static inline void gpu_files_close(gpu_files_out *o) {
    gpu_files_flush(o);
    if (fsync(o->fd) != 0 || close(o->fd) != 0) gpu_files_die(o->path);
    free(o->chunk);
}

static inline uint64_t gpu_files_total(const gpu_files_list *list) {
    uint64_t bytes = (uint64_t)list->count * 256 + 16384;
    for (uint32_t i = 0; i < list->count; i++) bytes += list->at[i].bytes;
    return bytes;
}

/* bf16 values around 0 of about `size`, or around 1 (vectors). */
static inline void gpu_files_bf16(gpu_files_out *o, uint64_t count, bool vector, float size, uint64_t *state) {
    uint16_t values[4096];
    while (count) {
        const uint64_t n = count < 4096 ? count : 4096;
        for (uint64_t i = 0; i < n; i++) {
            const float u = (float)(gpu_files_next(state) >> 40) * 0x1p-24f - 0.5f, v = vector ? 1 + 0.2f * u : 3.4f * size * u;
            uint32_t bits;
            memcpy(&bits, &v, 4);
            values[i] = (uint16_t)(bits >> 16);
        }
        gpu_files_put(o, values, n * 2);
        count -= n;
    }
}

/* DIR and DIR/config.json. */
static inline void gpu_files_config(const char *dir, const gpu_files_shape *s) {
    char path[1200];
    if (mkdir(dir, 0700) != 0 && errno != EEXIST) gpu_files_die(dir);
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *config = fopen(path, "w");
    if (!config) gpu_files_die(path);
    fprintf(config,
            "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":%u,\"head_dim\":%u,\"intermediate_size\":%u,\"num_attention_heads\":%u,"
            "\"num_key_value_heads\":%u,\"num_hidden_layers\":%u,\"vocab_size\":%u,\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-5,\"rope_theta\":500000.0,"
            "\"tie_word_embeddings\":%s,\"hidden_act\":\"silu\",\"torch_dtype\":\"bfloat16\"}\n",
            s->hidden, s->head_dim, s->ffn, s->heads, s->kv_heads, s->layers, s->vocab, s->tied ? "true" : "false");
    if (fclose(config) != 0) gpu_files_die(path);
}

/* DIR/config.json and DIR/model.safetensors. */
static inline void gpu_files_base(const char *dir, const gpu_files_shape *s, bool sparse, uint64_t seed) {
    static gpu_files_list list;
    char path[1200];
    gpu_files_config(dir, s);
    gpu_files_weights(s, &list);
    for (uint32_t i = 0; i < list.count; i++) {
        gpu_files_tensor *t = &list.at[i];
        t->bytes = t->rows * (t->cols ? t->cols : 1) * 2;
        snprintf(t->dtype, sizeof t->dtype, "BF16");
    }
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    gpu_files_out o = gpu_files_open(path, gpu_files_total(&list));
    const uint64_t data = gpu_files_header(&o, &list);
    uint64_t state = seed;
    for (uint32_t i = 0; !sparse && i < list.count; i++)
        gpu_files_bf16(&o, list.at[i].bytes / 2, list.at[i].cols == 0, list.at[i].cols ? 1.0f / (float)(s->hidden / 8) : 1, &state);
    gpu_files_flush(&o);
    if (sparse && ftruncate(o.fd, (off_t)(o.bytes + data)) != 0) gpu_files_die(path);
    gpu_files_close(&o);
    free(o.sums);
}

/* A delta of everything: signs and scales of matrices (about `scale`), vectors in full. Its sha256 is not a sum of anything, which
 * only `inspect --verify` looks at. */
static inline void gpu_files_delta(const char *dir, const char *variant, const char *fingerprint, const gpu_files_shape *s, float scale, uint64_t seed) {
    gpu_files_list *weights = malloc(sizeof *weights), *list = calloc(1, sizeof *list);
    bd_delta_entry *entries = calloc(GPU_FILES_TENSORS, sizeof *entries);
    char path[1200];
    bd_error err;
    if (!weights || !list || !entries || (mkdir(dir, 0700) != 0 && errno != EEXIST)) gpu_files_die(dir);
    gpu_files_weights(s, weights);
    for (uint32_t i = 0; i < weights->count; i++) {
        const gpu_files_tensor *w = &weights->at[i];
        entries[i] = (bd_delta_entry){.name = w->name, .kind = w->cols ? BD_DELTA_SIGN : BD_DELTA_FULL, .rank = w->cols ? 2 : 1, .shape = {w->rows, w->cols}};
        if (!w->cols) {
            gpu_files_add(list, w->name, "", "BF16", w->rows, 0, 2);
            continue;
        }
        gpu_files_add(list, w->name, ".sign", "U8", w->rows, w->cols / 8, 1);
        gpu_files_add(list, w->name, ".scale", "F32", w->rows, 0, 4);
    }
    snprintf(path, sizeof path, "%s/shard-00-of-01.safetensors", dir);
    gpu_files_out o = gpu_files_open(path, gpu_files_total(list));
    gpu_files_header(&o, list);
    uint64_t state = seed, words[1024];
    for (uint32_t i = 0; i < list->count; i++) {
        const gpu_files_tensor *t = &list->at[i];
        if (t->dtype[0] == 'B') gpu_files_bf16(&o, t->rows, true, 1, &state);
        for (uint64_t at = 0; t->dtype[0] == 'F' && at < t->rows; at++) {
            const float value = scale * (0.5f + (float)(gpu_files_next(&state) >> 40) * 0x1p-24f);
            gpu_files_put(&o, &value, 4);
        }
        for (uint64_t left = t->dtype[0] == 'U' ? t->bytes : 0; left;) {
            const uint64_t n = left < sizeof words ? left : sizeof words;
            for (uint32_t k = 0; k < 1024; k++) words[k] = gpu_files_next(&state);
            gpu_files_put(&o, words, n);
            left -= n;
        }
    }
    gpu_files_close(&o);
    bd_delta_file file = {.name = "shard-00-of-01.safetensors", .bytes = o.bytes, .chunk_bytes = BD_DELTA_CHUNK_BYTES, .chunk_count = o.count, .chunk_xxh3 = o.sums};
    memset(file.sha256, '0', 64);
    bd_delta delta = {.embeddings = "sign", .scale = "row", .bits = 1, .shard_count = 1, .entry_count = weights->count, .entries = entries, .files = &file};
    snprintf(delta.dir, sizeof delta.dir, "%s", dir);
    snprintf(delta.variant, sizeof delta.variant, "%s", variant);
    snprintf(delta.base, sizeof delta.base, "random");
    snprintf(delta.base_fingerprint, sizeof delta.base_fingerprint, "%s", fingerprint);
    if (bd_delta_write_manifest(&delta, &err) != BD_OK) gpu_files_die(err.message);
    free(o.sums), free(entries), free(list), free(weights);
}

static inline void gpu_files_remove(const char *dir) {
    static const char *const names[] = {"config.json", "model.safetensors", "delta.json", "shard-00-of-01.safetensors"};
    char path[1200];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        (void)unlink(path);
    }
    (void)rmdir(dir);
}

#endif
