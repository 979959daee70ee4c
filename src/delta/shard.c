/* shard.c - a shard's file name, its tensors against the manifest's entries, and its checksums.
 * Threads: any. */
#include <errno.h>
#include <fcntl.h>
#include <nettle/sha2.h>
#include <nettle/version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY /* the state's size; it is of an interface that is stable */
#include <xxhash.h>
#ifdef BD_XXH_DISPATCH
#include <xxh_x86dispatch.h> /* the same functions under the same names */
#endif

#include "bitdelta/base/file.h"
#include "bitdelta/delta/delta.h"

#include "delta_internal.h"

#define PATH_BYTES 4096u
#define NAME_BYTES 640u
#define READ_BYTES (1u << 20)

void bd_delta_plane_name(char *out, size_t out_bytes, const char *name, bool sign, uint32_t plane) {
    const char *what = sign ? "sign" : "scale";
    if (plane == 0) {
        (void)snprintf(out, out_bytes, "%s.%s", name, what);
    } else {
        (void)snprintf(out, out_bytes, "%s.%s%u", name, what, plane);
    }
}

void bd_delta_file_name(char *out, size_t out_bytes, uint32_t index, uint32_t shard_count) {
    (void)snprintf(out, out_bytes, "shard-%02u-of-%02u.safetensors", index, shard_count);
}

/* ---- tensors against entries ----------------------------------------------------------------- */

typedef enum split { SPLIT_ROWS, SPLIT_ROWS_PADDED, SPLIT_KV_ROWS, SPLIT_COLS } split;

static bool ends_with(const char *text, const char *end) {
    const size_t text_len = strlen(text), end_len = strlen(end);
    return text_len >= end_len && strcmp(text + text_len - end_len, end) == 0;
}

static split split_of(const char *name) {
    if (ends_with(name, "o_proj.weight") || ends_with(name, "down_proj.weight")) return SPLIT_COLS;
    if (ends_with(name, "k_proj.weight") || ends_with(name, "v_proj.weight")) return SPLIT_KV_ROWS;
    if (ends_with(name, "embed_tokens.weight") || ends_with(name, "lm_head.weight"))
        return SPLIT_ROWS_PADDED;
    return SPLIT_ROWS;
}

bool bd_delta_is_table(const char *name) {
    return split_of(name) == SPLIT_ROWS_PADDED;
}

bool bd_delta_part_of(const char *name, const uint64_t shape[2], uint32_t index, uint32_t shards,
                      uint64_t kv_parts, bd_delta_part *out) {
    const uint64_t n = shape[0], k = shape[1];
    *out = (bd_delta_part){.rows = n, .cols = k};
    if (shards == 1) return true;
    uint64_t parts = shards;
    switch (split_of(name)) {
    case SPLIT_COLS:
        if (k % (8 * (uint64_t)shards) != 0) return false;
        out->cols = k / shards;
        out->first_col = index * out->cols;
        return true;
    case SPLIT_ROWS_PADDED: {
        const uint64_t each = (n + shards - 1) / shards, first = each * index;
        out->first_row = first < n ? first : n;
        out->rows = n - out->first_row < each ? n - out->first_row : each;
        return true;
    }
    case SPLIT_KV_ROWS: /* heads are repeated where there are fewer of them than shards */
        parts = kv_parts;
        break;
    case SPLIT_ROWS:
        break;
    }
    if (parts == 0 || shards % parts != 0 || n % parts != 0) return false;
    out->rows = n / parts;
    out->first_row = index * parts / shards * out->rows;
    out->repeated = index % (shards / parts) != 0;
    return true;
}

/* Is [rows, cols] the part of the weight that shard `index` of `shards` holds? */
static bool shard_shape_fits(const bd_delta_entry *e, uint32_t index, uint32_t shards,
                             uint64_t rows, uint64_t cols) {
    bd_delta_part part;
    const uint64_t kv_parts = rows > 0 && e->shape[0] % rows == 0 ? e->shape[0] / rows : 0;
    return bd_delta_part_of(e->name, e->shape, index, shards, kv_parts, &part) &&
           part.rows == rows && part.cols == cols;
}

static bd_status fault(const bd_delta *d, uint32_t index, const char *name, bd_error *err,
                       const char *what) {
    return bd_fail(err, BD_E_FORMAT, name, "%s/%s: tensor \"%s\" %s", d->dir, d->files[index].name,
                   name, what);
}

static bd_status check_plane(const bd_delta *d, uint32_t index, const bd_safetensors *file,
                             const bd_delta_entry *e, uint32_t plane, bd_error *err) {
    char name[NAME_BYTES];
    bd_delta_plane_name(name, sizeof name, e->name, true, plane);
    const bd_tensor *sign = bd_safetensors_find(file, name);
    if (!sign) return fault(d, index, name, err, "is missing");
    if (sign->dtype != BD_DTYPE_U8 || sign->rank != 2 || sign->shape[1] > UINT64_MAX / 8 ||
        !shard_shape_fits(e, index, d->shard_count, sign->shape[0], sign->shape[1] * 8)) {
        return fault(d, index, name, err, "is not U8 of the packed shape of its weight");
    }
    const uint64_t rows = sign->shape[0];
    bd_delta_plane_name(name, sizeof name, e->name, false, plane);
    const bd_tensor *scale = bd_safetensors_find(file, name);
    if (!scale) return fault(d, index, name, err, "is missing");
    if (scale->dtype != BD_DTYPE_F32 || scale->rank != 1 || scale->shape[0] != rows) {
        return fault(d, index, name, err, "is not F32 with one value per row");
    }
    return BD_OK;
}

static bd_status check_full(const bd_delta *d, uint32_t index, const bd_safetensors *file,
                            const bd_delta_entry *e, bd_error *err) {
    const bd_tensor *t = bd_safetensors_find(file, e->name);
    if (!t) return fault(d, index, e->name, err, "is missing");
    if (t->dtype == BD_DTYPE_U8 || t->dtype == BD_DTYPE_OTHER) {
        return fault(d, index, e->name, err, "is not F32, BF16 or F16");
    }
    if (e->rank == 2 && bd_delta_is_table(e->name)) {
        if (t->dtype == BD_DTYPE_BF16 && t->rank == 2 &&
            shard_shape_fits(e, index, d->shard_count, t->shape[0], t->shape[1]))
            return BD_OK;
        return fault(d, index, e->name, err, "is not BF16 of the shape that delta.json says");
    }
    if (t->rank != e->rank || memcmp(t->shape, e->shape, e->rank * sizeof e->shape[0]) != 0) {
        return fault(d, index, e->name, err, "does not have the shape that delta.json says");
    }
    return BD_OK;
}

static bd_status check_extra(const bd_delta *d, uint32_t index, const bd_safetensors *file,
                             const bd_delta_entry *e, bd_error *err) {
    char name[NAME_BYTES];
    (void)snprintf(name, sizeof name, "%s.extra", e->name);
    const bd_tensor *t = bd_safetensors_find(file, name);
    if (!t) return fault(d, index, name, err, "is missing");
    if (t->dtype != BD_DTYPE_BF16 || t->rank != 2 || t->shape[0] != e->extra_rows ||
        t->shape[1] != e->shape[1]) {
        return fault(d, index, name, err, "is not BF16 with the added rows of its weight");
    }
    return BD_OK;
}

/* Counts are compared after every expected tensor was found, so a surplus means something unknown
 * is inside. */
static bd_status check_tensors(const bd_delta *d, uint32_t index, const bd_safetensors *file,
                               bd_error *err) {
    uint64_t expected = 0;
    for (uint32_t i = 0; i < d->entry_count; i++) {
        const bd_delta_entry *e = &d->entries[i];
        bd_status status = BD_OK;
        if (e->kind == BD_DELTA_FULL) {
            status = check_full(d, index, file, e, err);
            expected++;
        }
        for (uint32_t p = 0; e->kind == BD_DELTA_SIGN && p < d->bits && status == BD_OK; p++) {
            status = check_plane(d, index, file, e, p, err);
            expected += 2;
        }
        if (status == BD_OK && e->extra_rows > 0) {
            status = check_extra(d, index, file, e, err);
            expected++;
        }
        if (status != BD_OK) return status;
    }
    if (expected == bd_safetensors_count(file)) return BD_OK;
    return bd_fail(err, BD_E_FORMAT, d->files[index].name,
                   "%s/%s: %u tensor%s where delta.json lists %llu", d->dir, d->files[index].name,
                   bd_safetensors_count(file), bd_plural(bd_safetensors_count(file)),
                   (unsigned long long)expected);
}

/* Clients are told the message, too: the path is the subject alone. */
static bd_status wrong_size(const bd_delta *d, uint32_t index, uint64_t bytes, bd_error *err) {
    const bd_delta_file *f = &d->files[index];
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "%s/%s", d->dir, f->name);
    return bd_fail(err, BD_E_LENGTH, path, "the shard has %llu bytes, delta.json records %llu",
                   (unsigned long long)bytes, (unsigned long long)f->bytes);
}

/* Before the header is looked at: a cut file is reported as cut, not as a strange header. */
static bd_status shard_path(const bd_delta *d, uint32_t index, char *path, size_t path_bytes,
                            bd_error *err) {
    const bd_status status = bd_path_join(path, path_bytes, d->dir, d->files[index].name, err);
    if (status != BD_OK) return status;
    struct stat info;
    if (stat(path, &info) != 0) {
        const bd_status missing = errno == ENOENT ? BD_E_NOT_FOUND : BD_E_IO;
        return bd_fail_errno(err, missing, path, errno, "cannot open %s", path);
    }
    if (!S_ISREG(info.st_mode))
        return bd_fail(err, BD_E_IO, path, "%s is not a regular file", path);
    return (uint64_t)info.st_size == d->files[index].bytes
               ? BD_OK
               : wrong_size(d, index, (uint64_t)info.st_size, err);
}

bd_status bd_delta_open_shard(const bd_delta *delta, uint32_t index, bool map_data,
                              bd_safetensors **out, bd_error *err) {
    *out = NULL;
    BD_ASSERT(index < delta->shard_count);
    char path[PATH_BYTES];
    bd_status status = shard_path(delta, index, path, sizeof path, err);
    if (status != BD_OK) return status;
    bd_safetensors *file = NULL;
    if ((status = bd_safetensors_open(path, map_data, &file, err)) != BD_OK) return status;
    if (bd_safetensors_file_bytes(file) != delta->files[index].bytes) {
        status = wrong_size(delta, index, bd_safetensors_file_bytes(file), err);
    } else {
        status = check_tensors(delta, index, file, err);
    }
    if (status != BD_OK) {
        bd_safetensors_close(file);
        return status;
    }
    *out = file;
    return BD_OK;
}

/* ---- checksums ------------------------------------------------------------------------------- */

void bd_delta_sha256_hex(struct sha256_ctx *hash, char hex[65]) {
    uint8_t digest[SHA256_DIGEST_SIZE];
    bd_delta_sha256_digest(hash, digest);
    for (uint32_t i = 0; i < sizeof digest; i++)
        (void)snprintf(hex + (size_t)2 * i, 3, "%02x", digest[i]);
}

void bd_delta_sha256_digest(struct sha256_ctx *hash, uint8_t digest[SHA256_DIGEST_SIZE]) {
#if NETTLE_VERSION_MAJOR >= 4
    sha256_digest(hash, digest);
#else
    sha256_digest(hash, SHA256_DIGEST_SIZE, digest);
#endif
}

static bd_status bad_chunk(const bd_delta *d, uint32_t index, uint32_t chunk, bd_error *err) {
    const bd_delta_file *f = &d->files[index];
    const uint64_t first = (uint64_t)chunk * f->chunk_bytes;
    const uint64_t end = f->bytes - first < f->chunk_bytes ? f->bytes : first + f->chunk_bytes;
    return bd_fail(err, BD_E_CORRUPT, f->name,
                   "%s/%s: chunk %u (bytes %llu to %llu) does not match its checksum", d->dir,
                   f->name, chunk, (unsigned long long)first, (unsigned long long)(end - 1));
}

static uint64_t chunk_length(const bd_delta *delta, uint32_t file_index, uint32_t chunk) {
    BD_ASSERT(file_index < delta->shard_count);
    const bd_delta_file *f = &delta->files[file_index];
    BD_ASSERT(chunk < f->chunk_count);
    const uint64_t rest = f->bytes - (uint64_t)chunk * f->chunk_bytes;
    return rest < f->chunk_bytes ? rest : f->chunk_bytes;
}

bd_status bd_delta_check_chunk(const bd_delta *delta, uint32_t file_index, uint32_t chunk,
                               const void *data, size_t bytes, bd_error *err) {
    const uint64_t expected = chunk_length(delta, file_index, chunk);
    const bd_delta_file *f = &delta->files[file_index];
    if (bytes != expected || XXH3_64bits(data, bytes) != f->chunk_xxh3[chunk]) {
        return bad_chunk(delta, file_index, chunk, err);
    }
    return BD_OK;
}

_Static_assert(sizeof(XXH3_state_t) <= sizeof(((bd_chunk_sum *)0)->state) &&
                   _Alignof(XXH3_state_t) <= 64,
               "bd_chunk_sum holds xxHash's state");

static XXH3_state_t *state_of(bd_chunk_sum *sum) {
    return (XXH3_state_t *)(void *)sum->state;
}

void bd_chunk_sum_begin(bd_chunk_sum *sum, const bd_delta *delta, uint32_t file_index,
                        uint32_t chunk) {
    sum->delta = delta;
    sum->file_index = file_index;
    sum->chunk = chunk;
    sum->left_bytes = chunk_length(delta, file_index, chunk);
    XXH3_64bits_reset(state_of(sum));
}

static bd_status end_chunk(bd_chunk_sum *sum, bd_error *err) {
    const bd_delta_file *f = &sum->delta->files[sum->file_index];
    if (XXH3_64bits_digest(state_of(sum)) != f->chunk_xxh3[sum->chunk])
        return bad_chunk(sum->delta, sum->file_index, sum->chunk, err);
    if (sum->chunk + 1 < f->chunk_count)
        bd_chunk_sum_begin(sum, sum->delta, sum->file_index, sum->chunk + 1);
    return BD_OK;
}

bd_status bd_chunk_sum_add(bd_chunk_sum *sum, const void *data, size_t bytes, bd_error *err) {
    const uint8_t *at = data;
    bd_status status = BD_OK;
    while (bytes > 0 && status == BD_OK) {
        BD_ASSERT(sum->left_bytes > 0); /* else the file is over */
        const size_t part = bytes < sum->left_bytes ? bytes : (size_t)sum->left_bytes;
        XXH3_64bits_update(state_of(sum), at, part);
        sum->left_bytes -= part;
        at += part;
        bytes -= part;
        if (sum->left_bytes == 0) status = end_chunk(sum, err);
    }
    return status;
}

/* Reads a whole file once and feeds both hashes. chunk_done is called at the end of every chunk. */
typedef struct file_hash {
    struct sha256_ctx sha;
    XXH3_state_t *xxh;
    uint64_t chunk_bytes, in_chunk, bytes;
    uint32_t chunk;
    bool (*chunk_done)(void *ctx, uint32_t chunk, uint64_t sum); /* false: stop */
    void *ctx;
    bool stopped;
} file_hash;

static void hash_end_chunk(file_hash *h) {
    if (h->in_chunk == 0) return;
    if (!h->chunk_done(h->ctx, h->chunk, XXH3_64bits_digest(h->xxh))) h->stopped = true;
    XXH3_64bits_reset(h->xxh);
    h->in_chunk = 0;
    h->chunk++;
}

static void hash_bytes(file_hash *h, const uint8_t *data, size_t bytes) {
    sha256_update(&h->sha, bytes, data);
    h->bytes += bytes;
    while (h->chunk_bytes > 0 && bytes > 0 && !h->stopped) {
        const uint64_t room = h->chunk_bytes - h->in_chunk;
        const size_t part = bytes < room ? bytes : (size_t)room;
        XXH3_64bits_update(h->xxh, data, part);
        h->in_chunk += part;
        data += part;
        bytes -= part;
        if (h->in_chunk == h->chunk_bytes) hash_end_chunk(h);
    }
}

static bd_status hash_stream(const char *path, file_hash *h, bd_error *err) {
    bd_status status = BD_OK;
    sha256_init(&h->sha);
    uint8_t *buffer = malloc(READ_BYTES);
    h->xxh = XXH3_createState();
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (!buffer || !h->xxh) {
        status = bd_fail(err, BD_E_MEMORY, path, "%s: out of memory", path);
        goto done;
    }
    if (fd < 0) {
        status = bd_fail_errno(err, BD_E_IO, path, errno, "cannot open %s", path);
        goto done;
    }
    XXH3_64bits_reset(h->xxh);
    while (!h->stopped) {
        const ssize_t got = read(fd, buffer, READ_BYTES);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) status = bd_fail_errno(err, BD_E_IO, path, errno, "cannot read %s", path);
        if (got <= 0) break;
        hash_bytes(h, buffer, (size_t)got);
    }
    if (status == BD_OK && !h->stopped) hash_end_chunk(h);
done:
    if (fd >= 0) close(fd);
    XXH3_freeState(h->xxh);
    free(buffer);
    return status;
}

typedef struct compare {
    const bd_delta_file *file;
    uint32_t bad_chunk;
} compare;

static bool compare_chunk(void *ctx, uint32_t chunk, uint64_t sum) {
    compare *c = ctx;
    c->bad_chunk = chunk;
    return chunk < c->file->chunk_count && sum == c->file->chunk_xxh3[chunk];
}

bd_status bd_delta_verify_shard(const bd_delta *delta, uint32_t index, bd_error *err) {
    BD_ASSERT(index < delta->shard_count);
    const bd_delta_file *f = &delta->files[index];
    char path[PATH_BYTES], hex[65];
    bd_status status = shard_path(delta, index, path, sizeof path, err);
    if (status != BD_OK) return status;
    compare c = {.file = f};
    file_hash h = {.chunk_bytes = f->chunk_bytes, .chunk_done = compare_chunk, .ctx = &c};
    if ((status = hash_stream(path, &h, err)) != BD_OK) return status;
    if (h.stopped && c.bad_chunk < f->chunk_count) return bad_chunk(delta, index, c.bad_chunk, err);
    if (h.stopped || h.bytes != f->bytes) return wrong_size(delta, index, h.bytes, err);
    bd_delta_sha256_hex(&h.sha, hex);
    if (strcmp(hex, f->sha256) == 0) return BD_OK;
    return bd_fail(err, BD_E_CORRUPT, f->name, "%s/%s: sha256 is %s, delta.json records %s",
                   delta->dir, f->name, hex, f->sha256);
}

typedef struct keep {
    uint64_t *sums;
    uint64_t count;
} keep;

/* False when the file has grown since its size was asked. */
static bool keep_chunk(void *ctx, uint32_t chunk, uint64_t sum) {
    const keep *k = ctx;
    if (chunk >= k->count) return false;
    k->sums[chunk] = sum;
    return true;
}

bd_status bd_delta_hash_file(const char *path, bd_delta_file *out, uint64_t **chunks,
                             bd_error *err) {
    *chunks = NULL;
    struct stat info;
    if (stat(path, &info) != 0)
        return bd_fail_errno(err, BD_E_IO, path, errno, "cannot open %s", path);
    const uint64_t bytes = (uint64_t)info.st_size;
    const uint64_t count = (bytes + BD_DELTA_CHUNK_BYTES - 1) / BD_DELTA_CHUNK_BYTES;
    if (count > UINT32_MAX) return bd_fail(err, BD_E_LIMIT, path, "%s is too large", path);
    uint64_t *sums = calloc((size_t)count + 1, sizeof *sums);
    if (!sums) return bd_fail(err, BD_E_MEMORY, path, "%s: out of memory", path);
    keep k = {.sums = sums, .count = count};
    file_hash h = {.chunk_bytes = BD_DELTA_CHUNK_BYTES, .chunk_done = keep_chunk, .ctx = &k};
    bd_status status = hash_stream(path, &h, err);
    if (status == BD_OK && (h.stopped || h.bytes != bytes)) {
        status = bd_fail(err, BD_E_IO, path, "%s changed while it was read", path);
    }
    if (status != BD_OK) {
        free(sums);
        return status;
    }
    out->bytes = bytes;
    bd_delta_sha256_hex(&h.sha, out->sha256);
    out->chunk_bytes = BD_DELTA_CHUNK_BYTES;
    out->chunk_count = (uint32_t)count;
    out->chunk_xxh3 = sums;
    *chunks = sums;
    return BD_OK;
}
