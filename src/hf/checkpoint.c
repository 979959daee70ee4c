/* checkpoint.c - the files of a model directory as one set of tensors in name order. See
 * checkpoint.h. */
#include "bitdelta/hf/checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/log.h"
#include "bitdelta/hf/json_text.h"

#define INDEX_NAME      "model.safetensors.index.json"
#define SINGLE_NAME     "model.safetensors"
#define INDEX_BYTES_MAX (64u << 20)
#define FILES_MAX       4096u
#define PATH_BYTES      4096u

struct bd_checkpoint {
    char *dir;
    uint32_t file_count;
    char **paths;           /* [file_count] */
    bd_safetensors **files; /* [file_count] */
    uint32_t count;
    bd_tensor *tensors; /* by name */
    uint64_t bytes;
};

static bd_status no_memory(const char *subject, bd_error *err) {
    return bd_fail(err, BD_E_MEMORY, subject, "%s: out of memory", subject);
}

/* An index comes with the weights from anywhere: it must not reach files outside its directory. */
static bool plain_file_name(const char *name) {
    return name[0] != '\0' && name[0] != '.' && !strchr(name, '/') && !strchr(name, '\\') &&
           strlen(name) < 256;
}

static int by_text(const void *a, const void *b) {
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

/* The distinct file names of weight_map, sorted; they borrow from the JSON. */
static bd_status collect_names(const cJSON *map, const char *index_path, const char ***out,
                               uint32_t *out_count, bd_error *err) {
    const uint32_t entries = bd_json_count(map);
    if (!cJSON_IsObject(map) || entries == 0) {
        return bd_fail(err, BD_E_FORMAT, "weight_map", "%s: no weight_map", index_path);
    }
    const char **names = calloc(entries, sizeof *names);
    if (!names) return no_memory(index_path, err);
    uint32_t count = 0;
    for (const cJSON *item = map->child; item; item = item->next) {
        if (!cJSON_IsString(item) || !plain_file_name(item->valuestring)) {
            free(names);
            return bd_fail(
                err, BD_E_FORMAT, item->string,
                "%s: the file of tensor \"%s\" is not the name of a file beside the index",
                index_path, item->string);
        }
        names[count++] = item->valuestring;
    }
    qsort(names, count, sizeof *names, by_text);
    uint32_t distinct = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || strcmp(names[i], names[distinct - 1]) != 0) names[distinct++] = names[i];
    }
    *out = names;
    *out_count = distinct;
    return BD_OK;
}

static bd_status open_files(bd_checkpoint *c, const char *const *names, uint32_t count,
                            bd_error *err) {
    if (count > FILES_MAX) {
        return bd_fail(err, BD_E_LIMIT, c->dir, "%s: %u weight files, more than %u", c->dir, count,
                       FILES_MAX);
    }
    c->paths = calloc((size_t)count + 1, sizeof *c->paths);
    c->files = calloc((size_t)count + 1, sizeof(bd_safetensors *));
    if (!c->paths || !c->files) return no_memory(c->dir, err);
    for (uint32_t i = 0; i < count; i++) {
        char path[PATH_BYTES];
        bd_status status = bd_path_join(path, sizeof path, c->dir, names[i], err);
        if (status != BD_OK) return status;
        c->paths[i] = strdup(path);
        if (!c->paths[i]) return no_memory(c->dir, err);
        c->file_count = i + 1;
        if ((status = bd_safetensors_open(path, true, &c->files[i], err)) != BD_OK) return status;
    }
    return BD_OK;
}

static int by_name(const void *a, const void *b) {
    const bd_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static bd_status gather(bd_checkpoint *c, bd_error *err) {
    size_t total = 0;
    for (uint32_t f = 0; f < c->file_count; f++)
        total += bd_safetensors_count(c->files[f]);
    if (total > UINT32_MAX) return bd_fail(err, BD_E_LIMIT, c->dir, "%s: too many tensors", c->dir);
    c->tensors = calloc(total + 1, sizeof *c->tensors);
    if (!c->tensors) return no_memory(c->dir, err);
    for (uint32_t f = 0; f < c->file_count; f++) {
        for (uint32_t i = 0; i < bd_safetensors_count(c->files[f]); i++) {
            bd_tensor *t = &c->tensors[c->count++];
            *t = *bd_safetensors_at(c->files[f], i);
            t->file_index = f;
            c->bytes += t->bytes; /* each file's sum is below its size, so this cannot overflow */
        }
    }
    if (c->count > 1) qsort(c->tensors, c->count, sizeof *c->tensors, by_name);
    for (uint32_t i = 1; i < c->count; i++) {
        const bd_tensor *a = &c->tensors[i - 1], *b = &c->tensors[i];
        if (strcmp(a->name, b->name) != 0) continue;
        return bd_fail(err, BD_E_FORMAT, a->name, "tensor \"%s\" is in two files: %s and %s",
                       a->name, c->paths[a->file_index], c->paths[b->file_index]);
    }
    return BD_OK;
}

/* What the index promises must be there, and in the file it names. */
static bd_status check_index(const bd_checkpoint *c, const cJSON *map, const char *index_path,
                             bd_error *err) {
    for (const cJSON *item = map->child; item; item = item->next) {
        const bd_tensor *t = bd_checkpoint_find(c, item->string);
        const char *path = t ? c->paths[t->file_index] : NULL;
        if (t && strcmp(strrchr(path, '/') + 1, item->valuestring) == 0) continue;
        return bd_fail(err, BD_E_FORMAT, item->string, "%s: tensor \"%s\" is not in %s", index_path,
                       item->string, item->valuestring);
    }
    return BD_OK;
}

static bd_status open_indexed(bd_checkpoint *c, const char *index_path, bd_error *err) {
    cJSON *root = NULL;
    const char **names = NULL;
    uint32_t count = 0;
    bd_status status = bd_json_read_file(index_path, INDEX_BYTES_MAX, &root, err);
    if (status != BD_OK) return status;
    const cJSON *map = bd_json_member(root, "weight_map");
    if ((status = collect_names(map, index_path, &names, &count, err)) != BD_OK) goto done;
    if ((status = open_files(c, names, count, err)) != BD_OK) goto done;
    if ((status = gather(c, err)) != BD_OK) goto done;
    status = check_index(c, map, index_path, err);
done:
    free(names);
    cJSON_Delete(root);
    return status;
}

static bd_status open_single(bd_checkpoint *c, bd_error *err) {
    static const char *const names[] = {SINGLE_NAME};
    bd_status status = open_files(c, names, 1, err);
    return status == BD_OK ? gather(c, err) : status;
}

/* Of a directory that has both, the one file, as transformers does: a model saved once more over
 * one in shards leaves their index behind, which then names what is gone. */
static bd_status open_weights(bd_checkpoint *c, bd_error *err) {
    char single[PATH_BYTES], index[PATH_BYTES];
    bd_status status = bd_path_join(single, sizeof single, c->dir, SINGLE_NAME, err);
    if (status == BD_OK) status = bd_path_join(index, sizeof index, c->dir, INDEX_NAME, err);
    if (status != BD_OK) return status;
    const bool has_index = bd_file_exists(index);
    if (bd_file_exists(single)) {
        if (has_index)
            bd_log(BD_LOG_WARN, "hf",
                   "%s has " SINGLE_NAME " and " INDEX_NAME
                   ": the first is read, the other's files are not",
                   c->dir);
        return open_single(c, err);
    }
    if (has_index) return open_indexed(c, index, err);
    return bd_fail(err, BD_E_NOT_FOUND, c->dir, "%s has neither " SINGLE_NAME " nor " INDEX_NAME,
                   c->dir);
}

static bd_status check_directory(const char *dir, bd_error *err) {
    struct stat info;
    if (stat(dir, &info) == 0) {
        if (S_ISDIR(info.st_mode)) return BD_OK;
        return bd_fail(err, BD_E_ARGUMENT, dir, "%s is not a directory", dir);
    }
    if (errno == ENOENT) return bd_fail(err, BD_E_NOT_FOUND, dir, "%s does not exist", dir);
    return bd_fail_errno(err, BD_E_IO, dir, errno, "%s cannot be reached", dir);
}

bd_status bd_checkpoint_open(const char *dir, bd_checkpoint **out, bd_error *err) {
    *out = NULL;
    bd_status status = check_directory(dir, err);
    if (status != BD_OK) return status;
    bd_checkpoint *c = calloc(1, sizeof *c);
    if (!c) return no_memory(dir, err);
    c->dir = strdup(dir);
    if (!c->dir) {
        status = no_memory(dir, err);
        goto fail;
    }
    if ((status = open_weights(c, err)) != BD_OK) goto fail;
    *out = c;
    return BD_OK;
fail:
    bd_checkpoint_close(c);
    return status;
}

void bd_checkpoint_close(bd_checkpoint *checkpoint) {
    if (!checkpoint) return;
    for (uint32_t i = 0; i < checkpoint->file_count; i++) {
        bd_safetensors_close(checkpoint->files[i]);
        free(checkpoint->paths[i]);
    }
    free(checkpoint->files);
    free(checkpoint->paths);
    free(checkpoint->tensors);
    free(checkpoint->dir);
    free(checkpoint);
}

const char *bd_checkpoint_dir(const bd_checkpoint *checkpoint) {
    return checkpoint->dir;
}

uint32_t bd_checkpoint_count(const bd_checkpoint *checkpoint) {
    return checkpoint->count;
}

const bd_tensor *bd_checkpoint_at(const bd_checkpoint *checkpoint, uint32_t index) {
    BD_ASSERT(index < checkpoint->count);
    return &checkpoint->tensors[index];
}

const bd_tensor *bd_checkpoint_find(const bd_checkpoint *checkpoint, const char *name) {
    const bd_tensor key = {.name = name};
    if (checkpoint->count == 0) return NULL;
    return bsearch(&key, checkpoint->tensors, checkpoint->count, sizeof key, by_name);
}

uint32_t bd_checkpoint_file_count(const bd_checkpoint *checkpoint) {
    return checkpoint->file_count;
}

const char *bd_checkpoint_file_path(const bd_checkpoint *checkpoint, uint32_t file_index) {
    BD_ASSERT(file_index < checkpoint->file_count);
    return checkpoint->paths[file_index];
}

uint64_t bd_checkpoint_bytes(const bd_checkpoint *checkpoint) {
    return checkpoint->bytes;
}

static void shape_text(const bd_tensor *t, char *out, size_t out_bytes) {
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < t->rank && at < out_bytes; i++) {
        const int put = snprintf(out + at, out_bytes - at, i ? ", %llu" : "%llu",
                                 (unsigned long long)t->shape[i]);
        at += (size_t)put;
    }
}

bd_status bd_checkpoint_need(const bd_checkpoint *checkpoint, const char *name, uint64_t rows,
                             uint64_t cols, const bd_tensor **out, bd_error *err) {
    *out = NULL;
    const bd_tensor *t = bd_checkpoint_find(checkpoint, name);
    if (!t)
        return bd_fail(err, BD_E_NOT_FOUND, name, "%s: tensor \"%s\" is missing", checkpoint->dir,
                       name);
    const char *path = checkpoint->paths[t->file_index];
    const uint32_t rank = cols ? 2 : 1;
    if (t->rank != rank || t->shape[0] != rows || (cols && t->shape[1] != cols)) {
        char got[200], want[64];
        shape_text(t, got, sizeof got);
        (void)snprintf(want, sizeof want, cols ? "%llu, %llu" : "%llu", (unsigned long long)rows,
                       (unsigned long long)cols);
        return bd_fail(err, BD_E_MISMATCH, name, "%s: tensor \"%s\" has shape [%s], expected [%s]",
                       path, name, got, want);
    }
    if (t->dtype != BD_DTYPE_F32 && t->dtype != BD_DTYPE_BF16 && t->dtype != BD_DTYPE_F16) {
        return bd_fail(err, BD_E_UNSUPPORTED, name,
                       "%s: tensor \"%s\" has dtype %s; F32, BF16 and F16 are supported", path,
                       name, t->dtype_name);
    }
    *out = t;
    return BD_OK;
}
