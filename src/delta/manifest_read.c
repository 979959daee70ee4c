/* manifest_read.c - delta.json, read and checked. It comes with the shards from anywhere, so
 * nothing in it is believed: names stay inside the directory, sizes do not overflow, sums are what
 * they claim to be. See delta.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/arena.h"
#include "bitdelta/base/file.h"
#include "bitdelta/base/map.h"
#include "bitdelta/delta/delta.h"
#include "bitdelta/hf/json_text.h"

#include "delta_internal.h"

#define MANIFEST_BYTES_MAX (64u << 20)
#define ARENA_BYTES_MAX    ((size_t)256 << 20)
#define TENSOR_NAME_MAX    512u
#define ENTRIES_MAX        65536u
#define CHUNK_BYTES_MIN    4096u
#define CHUNK_BYTES_MAX    (1u << 30)

/* Context of one reading; everything it allocates is in the arena and dies with the bd_delta. */
typedef struct reader {
    const char *path;
    const cJSON *root;
    bd_delta *delta;
    bd_arena *arena;
} reader;

static bd_status fault(const reader *r, const char *field, bd_error *err, const char *what) {
    return bd_fail(err, BD_E_FORMAT, field, "%s: \"%s\" %s", r->path, field, what);
}

static bd_status no_memory(const reader *r, bd_error *err) {
    return bd_fail(err, BD_E_MEMORY, r->path, "%s: out of memory", r->path);
}

/* ---- scalars --------------------------------------------------------------------------------- */

static bd_status read_text(const reader *r, const cJSON *object, const char *field, char *out,
                           size_t out_bytes, bd_error *err) {
    const cJSON *value = bd_json_member(object, field);
    if (!cJSON_IsString(value)) return fault(r, field, err, "is not a string");
    if (strlen(value->valuestring) >= out_bytes) return fault(r, field, err, "is too long");
    memcpy(out, value->valuestring, strlen(value->valuestring) + 1);
    return BD_OK;
}

static bd_status read_name(const reader *r, const char *field, char *out, bd_error *err) {
    const cJSON *root = r->root;
    bd_status status = read_text(r, root, field, out, BD_VARIANT_NAME_MAX + 1, err);
    if (status != BD_OK) return status;
    if (out[0] == '\0') return fault(r, field, err, "is empty");
    for (const unsigned char *p = (const unsigned char *)out; *p; p++) {
        if (*p < 0x20 || *p == 0x7f) return fault(r, field, err, "has a control character");
    }
    return BD_OK;
}

static bool is_hex(const char *text, size_t digits) {
    return strlen(text) == digits && strspn(text, "0123456789abcdef") == digits;
}

static bd_status read_hash(const reader *r, const cJSON *object, const char *field, char out[65],
                           bd_error *err) {
    const bd_status status = read_text(r, object, field, out, 65, err);
    if (status != BD_OK) return status;
    return is_hex(out, 64) ? BD_OK
                           : fault(r, field, err, "is not 64 lower-case hexadecimal digits");
}

static bd_status read_number(const reader *r, const cJSON *object, const char *field, uint64_t max,
                             uint64_t *out, bd_error *err) {
    if (bd_json_u64(bd_json_member(object, field), max, out)) return BD_OK;
    return bd_fail(err, BD_E_FORMAT, field, "%s: \"%s\" is not an integer from 0 to %llu", r->path,
                   field, (unsigned long long)max);
}

static bool one_of(const char *text, const char *const *choices) {
    for (; *choices; choices++) {
        if (strcmp(text, *choices) == 0) return true;
    }
    return false;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static bd_status read_shape(const reader *r, const cJSON *item, bd_delta_entry *e, bd_error *err) {
    const cJSON *shape = bd_json_member(item, "shape");
    if (!cJSON_IsArray(shape)) return fault(r, e->name, err, "has no \"shape\"");
    uint64_t product = 8; /* bytes of the widest element, so that no later size can overflow */
    for (const cJSON *value = shape->child; value; value = value->next) {
        uint64_t dim;
        if (e->rank == BD_TENSOR_RANK_MAX)
            return fault(r, e->name, err, "has more than 8 dimensions");
        if (!bd_json_u64(value, BD_JSON_INTEGER_MAX, &dim) || dim == 0 ||
            __builtin_mul_overflow(product, dim, &product)) {
            return fault(r, e->name, err, "has an impossible \"shape\"");
        }
        e->shape[e->rank++] = dim;
    }
    if (e->kind == BD_DELTA_SIGN && (e->rank != 2 || e->shape[1] % 8 != 0)) {
        return fault(r, e->name, err,
                     "is coded by sign but is no matrix with a multiple of 8 columns");
    }
    return BD_OK;
}

static bd_status read_entry(const reader *r, const cJSON *item, bd_delta_entry *e, bd_error *err) {
    const cJSON *name = bd_json_member(item, "name");
    if (!cJSON_IsString(name) || name->valuestring[0] == '\0' ||
        strlen(name->valuestring) > TENSOR_NAME_MAX) {
        return fault(r, "tensors", err, "has an entry without a usable name");
    }
    e->name = bd_arena_strndup(r->arena, name->valuestring, strlen(name->valuestring));
    if (!e->name) return no_memory(r, err);
    const cJSON *kind = bd_json_member(item, "kind");
    if (!cJSON_IsString(kind)) return fault(r, e->name, err, "has no \"kind\"");
    if (strcmp(kind->valuestring, "sign") == 0) {
        e->kind = BD_DELTA_SIGN;
    } else if (strcmp(kind->valuestring, "full") == 0) {
        e->kind = BD_DELTA_FULL;
    } else {
        return fault(r, e->name, err, "has an unknown \"kind\" (sign and full are known)");
    }
    const bd_status status = read_shape(r, item, e, err);
    if (status != BD_OK || !bd_json_member(item, "extra_rows")) return status;
    if (e->rank != 2) return fault(r, e->name, err, "has extra rows but is no matrix");
    return read_number(r, item, "extra_rows", 1u << 20, &e->extra_rows, err);
}

static bd_status check_distinct(const reader *r, const bd_delta_entry *entries, uint32_t count,
                                bd_error *err) {
    bd_status status = BD_OK;
    bd_map *seen = bd_map_create(count + 1);
    if (!seen) return no_memory(r, err);
    for (uint32_t i = 0; i < count && status == BD_OK; i++) {
        status = bd_map_put(seen, entries[i].name, strlen(entries[i].name), r->arena);
        if (status == BD_BUSY)
            status = fault(r, entries[i].name, err, "is listed twice");
        else if (status != BD_OK)
            status = no_memory(r, err);
    }
    bd_map_destroy(seen);
    return status;
}

static bd_status read_entries(const reader *r, bd_error *err) {
    const cJSON *list = bd_json_member(r->root, "tensors");
    if (!cJSON_IsArray(list)) return fault(r, "tensors", err, "is not a list");
    const uint32_t count = bd_json_count(list);
    if (count > ENTRIES_MAX) return fault(r, "tensors", err, "is too long");
    bd_delta_entry *entries = bd_arena_alloc(r->arena, count + 1, sizeof *entries);
    if (!entries) return no_memory(r, err);
    uint32_t i = 0;
    for (const cJSON *item = list->child; item; item = item->next) {
        const bd_status status = read_entry(r, item, &entries[i++], err);
        if (status != BD_OK) return status;
    }
    r->delta->entries = entries;
    r->delta->entry_count = count;
    return check_distinct(r, entries, count, err);
}

/* ---- files ----------------------------------------------------------------------------------- */

static bool plain_file_name(const char *name) {
    return name[0] != '\0' && name[0] != '.' && !strchr(name, '/') && !strchr(name, '\\') &&
           strlen(name) < 256;
}

static bool parse_sum(const cJSON *value, uint64_t *out) {
    if (!cJSON_IsString(value) || !is_hex(value->valuestring, 16)) return false;
    *out = strtoull(value->valuestring, NULL, 16);
    return true;
}

static bd_status read_sums(const reader *r, const cJSON *item, bd_delta_file *f, bd_error *err) {
    const cJSON *list = bd_json_member(item, "xxh3_64");
    if (!list && !bd_json_member(item, "chunk_bytes")) return BD_OK; /* verified whole */
    bd_status status = read_number(r, item, "chunk_bytes", CHUNK_BYTES_MAX, &f->chunk_bytes, err);
    if (status != BD_OK) return status;
    if (f->chunk_bytes < CHUNK_BYTES_MIN) return fault(r, "chunk_bytes", err, "is below 4096");
    const uint64_t count = f->bytes / f->chunk_bytes + (f->bytes % f->chunk_bytes != 0);
    if (!list || !cJSON_IsArray(list) || bd_json_count(list) != count) {
        return fault(r, "xxh3_64", err, "does not have one sum per chunk of its file");
    }
    uint64_t *sums = bd_arena_alloc(r->arena, (size_t)count + 1, sizeof *sums);
    if (!sums) return no_memory(r, err);
    uint32_t i = 0;
    for (const cJSON *value = list->child; value; value = value->next) {
        if (!parse_sum(value, &sums[i++]))
            return fault(r, "xxh3_64", err, "has a sum that is not 16 hexadecimal digits");
    }
    f->chunk_count = (uint32_t)count;
    f->chunk_xxh3 = sums;
    return BD_OK;
}

static bd_status read_file_entry(const reader *r, const cJSON *item, bd_delta_file *f,
                                 bd_error *err) {
    const cJSON *name = bd_json_member(item, "name");
    if (!cJSON_IsString(name) || !plain_file_name(name->valuestring)) {
        return fault(r, "files", err,
                     "has an entry whose name is not that of a file beside delta.json");
    }
    f->name = bd_arena_strndup(r->arena, name->valuestring, strlen(name->valuestring));
    if (!f->name) return no_memory(r, err);
    bd_status status = read_number(r, item, "bytes", BD_JSON_INTEGER_MAX, &f->bytes, err);
    if (status == BD_OK) status = read_hash(r, item, "sha256", f->sha256, err);
    return status == BD_OK ? read_sums(r, item, f, err) : status;
}

static bd_status read_files(const reader *r, bd_error *err) {
    const cJSON *list = bd_json_member(r->root, "files");
    if (!cJSON_IsArray(list) || bd_json_count(list) != r->delta->shard_count) {
        return fault(r, "files", err, "does not list one file per shard");
    }
    bd_delta_file *files = bd_arena_alloc(r->arena, r->delta->shard_count, sizeof *files);
    if (!files) return no_memory(r, err);
    uint32_t i = 0;
    for (const cJSON *item = list->child; item; item = item->next) {
        const bd_status status = read_file_entry(r, item, &files[i], err);
        if (status != BD_OK) return status;
        for (uint32_t j = 0; j < i; j++) {
            if (strcmp(files[j].name, files[i].name) == 0)
                return fault(r, "files", err, "names a file twice");
        }
        i++;
    }
    r->delta->files = files;
    return BD_OK;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static bd_status read_head(const reader *r, bd_error *err) {
    static const char *const scales[] = {"row", "matrix", NULL};
    static const char *const embeddings[] = {"sign", "full", "base", NULL};
    bd_delta *d = r->delta;
    const cJSON *root = r->root;
    char format[32];
    uint64_t bits, shards;
    bd_status status = read_text(r, root, "format", format, sizeof format, err);
    if (status != BD_OK) return status;
    if (strcmp(format, BD_DELTA_FORMAT) != 0) {
        return bd_fail(err, BD_E_UNSUPPORTED, "format",
                       "%s: format is \"%s\", this program reads \"" BD_DELTA_FORMAT "\"", r->path,
                       format);
    }
    if ((status = read_name(r, "variant", d->variant, err)) != BD_OK) return status;
    if ((status = read_name(r, "base", d->base, err)) != BD_OK) return status;
    if ((status = read_hash(r, root, "base_fingerprint", d->base_fingerprint, err)) != BD_OK)
        return status;
    if ((status = read_number(r, root, "bits", BD_PLANES_MAX, &bits, err)) != BD_OK) return status;
    if ((status = read_number(r, root, "shards", BD_DELTA_SHARDS_MAX, &shards, err)) != BD_OK)
        return status;
    if (bits == 0) return fault(r, "bits", err, "is 0");
    if (shards == 0) return fault(r, "shards", err, "is 0");
    if ((status = read_text(r, root, "scale", d->scale, sizeof d->scale, err)) != BD_OK)
        return status;
    if (!one_of(d->scale, scales)) return fault(r, "scale", err, "is neither row nor matrix");
    if ((status = read_text(r, root, "embeddings", d->embeddings, sizeof d->embeddings, err)) !=
        BD_OK)
        return status;
    if (!one_of(d->embeddings, embeddings))
        return fault(r, "embeddings", err, "is not sign, full or base");
    d->bits = (uint32_t)bits;
    d->shard_count = (uint32_t)shards;
    return BD_OK;
}

static void digest_of(const char *text, size_t bytes, uint8_t digest[32]) {
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, bytes, (const uint8_t *)text);
    bd_delta_sha256_digest(&hash, digest);
}

/* While reading, delta->storage is the JSON tree; afterwards it is the arena that all the rest
 * borrows from. */
static bd_status read_manifest(bd_delta *d, const char *path, bd_arena *arena, bd_error *err) {
    char *text = NULL;
    size_t bytes = 0;
    cJSON *root = NULL;
    bd_status status = bd_file_read(path, MANIFEST_BYTES_MAX, &text, &bytes, err);
    if (status != BD_OK) return status;
    if ((status = bd_json_parse(text, bytes, path, &root, err)) != BD_OK) goto done;
    digest_of(text, bytes, d->digest);
    const reader r = {.path = path, .root = root, .delta = d, .arena = arena};
    if ((status = read_head(&r, err)) != BD_OK) goto done;
    if ((status = read_entries(&r, err)) != BD_OK) goto done;
    status = read_files(&r, err);
done:
    cJSON_Delete(root);
    free(text);
    return status;
}

bd_status bd_delta_open(const char *dir, bd_delta *out, bd_error *err) {
    *out = (bd_delta){0};
    char path[sizeof out->dir + sizeof BD_DELTA_MANIFEST_NAME + 1];
    if (strlen(dir) >= sizeof out->dir)
        return bd_fail(err, BD_E_LIMIT, dir, "%s: the path is too long", dir);
    bd_status status = bd_path_join(path, sizeof path, dir, BD_DELTA_MANIFEST_NAME, err);
    if (status != BD_OK) return status;
    bd_arena *arena = bd_arena_create(16u << 10, ARENA_BYTES_MAX);
    if (!arena) return bd_fail(err, BD_E_MEMORY, dir, "%s: out of memory", dir);
    memcpy(out->dir, dir, strlen(dir) + 1);
    if ((status = read_manifest(out, path, arena, err)) != BD_OK) {
        bd_arena_destroy(arena);
        *out = (bd_delta){0};
        return status;
    }
    out->storage = arena;
    return BD_OK;
}

void bd_delta_close(bd_delta *delta) {
    if (!delta) return;
    bd_arena_destroy(delta->storage);
    *delta = (bd_delta){0};
}
