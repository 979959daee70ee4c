/* safetensors.c - reading. A file is 8 bytes of header length (little-endian), the header (JSON),
 * the data. The header is parsed once; afterwards the object never changes. See safetensors.h. */
#include "bitdelta/hf/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/map.h"
#include "bitdelta/hf/json_text.h"

#include "tensor_types.h"

#define PREFIX_BYTES 8u

struct bd_safetensors {
    char *path;
    bd_mapped_file map; /* fd -1: header-only */
    uint64_t file_bytes;
    uint64_t data_at; /* offset of the data section */
    uint32_t count;
    bd_tensor *tensors; /* by offset */
    char *names;        /* one block, borrowed by tensors and by the map's values */
    bd_map *by_name;
};

/* ---- the header's text ----------------------------------------------------------------------- */

static bd_status check_prefix(const char *path, const uint8_t prefix[PREFIX_BYTES],
                              uint64_t file_bytes, uint64_t *header_bytes, bd_error *err) {
    uint64_t value = 0;
    for (uint32_t i = 0; i < PREFIX_BYTES; i++)
        value |= (uint64_t)prefix[i] << (8 * i);
    if (value > BD_SAFETENSORS_HEADER_BYTES_MAX) {
        return bd_fail(err, BD_E_FORMAT, path,
                       "%s is not a safetensors file, or is damaged: its header would have %llu "
                       "bytes, the limit is %u",
                       path, (unsigned long long)value, BD_SAFETENSORS_HEADER_BYTES_MAX);
    }
    if (value > file_bytes - PREFIX_BYTES) {
        return bd_fail(err, BD_E_FORMAT, path,
                       "%s is not a safetensors file, or is damaged: its header of %llu bytes runs "
                       "past the end of the file (%llu bytes)",
                       path, (unsigned long long)value, (unsigned long long)file_bytes);
    }
    *header_bytes = value;
    return BD_OK;
}

static bool read_fully(int fd, void *out, size_t bytes, off_t at) {
    uint8_t *to = out;
    while (bytes > 0) {
        const ssize_t got = pread(fd, to, bytes, at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            if (got == 0) errno = EIO;
            return false;
        }
        to += got;
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}

static bd_status too_short(const char *path, bd_error *err) {
    return bd_fail(err, BD_E_FORMAT, path,
                   "%s is not a safetensors file: it is too short to be one", path);
}

/* Header-only: *text is malloc'ed. */
static bd_status read_header(bd_safetensors *file, char **text, uint64_t *bytes, bd_error *err) {
    bd_status status = BD_OK;
    char *header = NULL;
    uint8_t prefix[PREFIX_BYTES];
    struct stat info;
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot open %s", file->path);
    if (fstat(fd, &info) != 0) {
        status = bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot stat %s", file->path);
        goto done;
    }
    if (!S_ISREG(info.st_mode)) {
        status = bd_fail(err, BD_E_IO, file->path, "%s is not a regular file", file->path);
        goto done;
    }
    file->file_bytes = (uint64_t)info.st_size;
    if (file->file_bytes < PREFIX_BYTES) {
        status = too_short(file->path, err);
        goto done;
    }
    if (!read_fully(fd, prefix, sizeof prefix, 0)) goto fail_read;
    if ((status = check_prefix(file->path, prefix, file->file_bytes, bytes, err)) != BD_OK)
        goto done;
    header = malloc((size_t)*bytes + 1);
    if (!header) {
        status =
            bd_fail(err, BD_E_MEMORY, file->path, "%s: out of memory for its header", file->path);
        goto done;
    }
    if (!read_fully(fd, header, (size_t)*bytes, PREFIX_BYTES)) goto fail_read;
    *text = header;
    header = NULL;
    goto done;
fail_read:
    status =
        bd_fail_errno(err, BD_E_IO, file->path, errno, "cannot read the header of %s", file->path);
done:
    free(header);
    close(fd);
    return status;
}

static bd_status map_file(bd_safetensors *file, uint64_t *header_bytes, bd_error *err) {
    const bd_status status = bd_file_map(file->path, &file->map, err);
    if (status != BD_OK) {
        file->map = (bd_mapped_file){.fd = -1};
        return status;
    }
    file->file_bytes = file->map.bytes;
    if (file->file_bytes < PREFIX_BYTES) return too_short(file->path, err);
    return check_prefix(file->path, file->map.data, file->file_bytes, header_bytes, err);
}

/* ---- one tensor ------------------------------------------------------------------------------ */

static bd_status tensor_fault(const bd_safetensors *file, const char *name, bd_error *err,
                              const char *what) {
    return bd_fail(err, BD_E_FORMAT, name, "%s: tensor \"%s\": %s", file->path, name, what);
}

static bd_status parse_shape(const bd_safetensors *file, const cJSON *value, bd_tensor *t,
                             uint64_t *elements, bd_error *err) {
    if (!value || !cJSON_IsArray(value))
        return tensor_fault(file, t->name, err, "\"shape\" is not a list");
    uint64_t product = 1;
    for (const cJSON *item = value->child; item; item = item->next) {
        uint64_t dim;
        if (t->rank == BD_TENSOR_RANK_MAX)
            return tensor_fault(file, t->name, err, "more than 8 dimensions");
        if (!bd_json_u64(item, BD_JSON_INTEGER_MAX, &dim)) {
            return tensor_fault(file, t->name, err, "a dimension in \"shape\" is no size");
        }
        if (__builtin_mul_overflow(product, dim, &product)) {
            return tensor_fault(file, t->name, err, "the product of \"shape\" overflows");
        }
        t->shape[t->rank++] = dim;
    }
    *elements = product;
    return BD_OK;
}

static bd_status parse_offsets(const bd_safetensors *file, const cJSON *value, bd_tensor *t,
                               bd_error *err) {
    uint64_t begin, end;
    if (!value || !cJSON_IsArray(value) || bd_json_count(value) != 2 ||
        !bd_json_u64(value->child, BD_JSON_INTEGER_MAX, &begin) ||
        !bd_json_u64(value->child->next, BD_JSON_INTEGER_MAX, &end)) {
        return tensor_fault(file, t->name, err, "\"data_offsets\" is not a pair of offsets");
    }
    const uint64_t data_bytes = file->file_bytes - file->data_at;
    if (begin > end)
        return tensor_fault(file, t->name, err, "\"data_offsets\" end before they begin");
    if (end > data_bytes) {
        return bd_fail(
            err, BD_E_FORMAT, t->name,
            "%s: tensor \"%s\": data ends at %llu, past the end of the data section (%llu bytes)",
            file->path, t->name, (unsigned long long)end, (unsigned long long)data_bytes);
    }
    t->offset_bytes = file->data_at + begin;
    t->bytes = end - begin;
    return BD_OK;
}

static bd_status check_members(const bd_safetensors *file, const cJSON *item, const char *name,
                               bd_error *err) {
    uint32_t seen = 0;
    for (const cJSON *member = item->child; member; member = member->next) {
        const uint32_t bit = strcmp(member->string, "dtype") == 0          ? 1u
                             : strcmp(member->string, "shape") == 0        ? 2u
                             : strcmp(member->string, "data_offsets") == 0 ? 4u
                                                                           : 0u;
        if (!bit)
            return tensor_fault(file, name, err,
                                "a member other than dtype, shape and data_offsets");
        if (seen & bit) return tensor_fault(file, name, err, "a member occurs twice");
        seen |= bit;
    }
    return seen == 7u ? BD_OK
                      : tensor_fault(file, name, err, "dtype, shape or data_offsets is missing");
}

static bd_status parse_tensor(const bd_safetensors *file, const cJSON *item, bd_tensor *t,
                              bd_error *err) {
    if (!cJSON_IsObject(item))
        return tensor_fault(file, t->name, err, "its description is not an object");
    bd_status status = check_members(file, item, t->name, err);
    if (status != BD_OK) return status;
    const cJSON *dtype = bd_json_member(item, "dtype");
    uint32_t bits = 0;
    if (!cJSON_IsString(dtype) || !bd_dtype_lookup(dtype->valuestring, &t->dtype, &bits)) {
        return tensor_fault(file, t->name, err, "unknown \"dtype\"");
    }
    strncpy(t->dtype_name, dtype->valuestring, sizeof t->dtype_name - 1);
    uint64_t elements = 0, total_bits;
    if ((status = parse_shape(file, bd_json_member(item, "shape"), t, &elements, err)) != BD_OK)
        return status;
    if ((status = parse_offsets(file, bd_json_member(item, "data_offsets"), t, err)) != BD_OK)
        return status;
    if (__builtin_mul_overflow(elements, (uint64_t)bits, &total_bits) || total_bits % 8 != 0 ||
        total_bits / 8 != t->bytes) {
        return bd_fail(err, BD_E_FORMAT, t->name,
                       "%s: tensor \"%s\": %llu bytes do not hold its %s shape", file->path,
                       t->name, (unsigned long long)t->bytes, t->dtype_name);
    }
    return BD_OK;
}

static bd_status check_metadata(const bd_safetensors *file, const cJSON *item, bd_error *err) {
    if (cJSON_IsObject(item)) {
        const cJSON *entry = item->child;
        while (entry && cJSON_IsString(entry))
            entry = entry->next;
        if (!entry) return BD_OK;
    }
    return bd_fail(err, BD_E_FORMAT, "__metadata__", "%s: __metadata__ is not an object of strings",
                   file->path);
}

/* ---- all tensors ----------------------------------------------------------------------------- */

static bool is_metadata(const cJSON *item) {
    return strcmp(item->string, "__metadata__") == 0;
}

static bd_status allocate(bd_safetensors *file, const cJSON *root, bd_error *err) {
    size_t count = 0, name_bytes = 0;
    for (const cJSON *item = root->child; item; item = item->next) {
        count++;
        name_bytes += strlen(item->string) + 1;
    }
    file->tensors = calloc(count + 1, sizeof *file->tensors);
    file->names = malloc(name_bytes + 1);
    file->by_name = bd_map_create(count + 1);
    if (file->tensors && file->names && file->by_name) return BD_OK;
    return bd_fail(err, BD_E_MEMORY, file->path, "%s: out of memory for %zu tensors", file->path,
                   count);
}

static int by_offset(const void *a, const void *b) {
    const bd_tensor *x = a, *y = b;
    if (x->offset_bytes != y->offset_bytes) return x->offset_bytes < y->offset_bytes ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name); /* empty tensors at one place: any fixed order will do */
}

static bd_status check_contiguous(const bd_safetensors *file, bd_error *err) {
    uint64_t at = file->data_at;
    for (uint32_t i = 0; i < file->count; i++) {
        const bd_tensor *t = &file->tensors[i];
        if (t->offset_bytes != at) {
            return tensor_fault(file, t->name, err,
                                t->offset_bytes < at ? "its data overlaps another tensor's"
                                                     : "a hole before its data");
        }
        at += t->bytes;
    }
    if (at == file->file_bytes) return BD_OK;
    return bd_fail(err, BD_E_FORMAT, file->path, "%s: %llu byte%s after the last tensor",
                   file->path, (unsigned long long)(file->file_bytes - at),
                   bd_plural(file->file_bytes - at));
}

static bd_status index_names(bd_safetensors *file, bd_error *err) {
    for (uint32_t i = 0; i < file->count; i++) {
        bd_tensor *t = &file->tensors[i];
        BD_ASSERT(t->name != NULL);
        const bd_status status = bd_map_put(file->by_name, t->name, strlen(t->name), t);
        if (status == BD_BUSY) return tensor_fault(file, t->name, err, "the name occurs twice");
        if (status != BD_OK) {
            return bd_fail(err, BD_E_MEMORY, file->path, "%s: out of memory for its tensor names",
                           file->path);
        }
    }
    return BD_OK;
}

static bd_status parse_tensors(bd_safetensors *file, const cJSON *root, bd_error *err) {
    char *name = file->names;
    bool metadata_seen = false;
    for (const cJSON *item = root->child; item; item = item->next) {
        bd_status status;
        if (is_metadata(item)) {
            if (metadata_seen)
                return tensor_fault(file, item->string, err, "the name occurs twice");
            metadata_seen = true;
            if ((status = check_metadata(file, item, err)) != BD_OK) return status;
            continue;
        }
        const size_t name_bytes = strlen(item->string) + 1;
        memcpy(name, item->string, name_bytes);
        bd_tensor *t = &file->tensors[file->count];
        t->name = name;
        name += name_bytes;
        if ((status = parse_tensor(file, item, t, err)) != BD_OK) return status;
        if (file->map.data) t->data = file->map.data + t->offset_bytes;
        file->count++;
    }
    if (file->count > 1) qsort(file->tensors, file->count, sizeof *file->tensors, by_offset);
    const bd_status status = check_contiguous(file, err);
    return status != BD_OK ? status : index_names(file, err);
}

static bd_status parse_header(bd_safetensors *file, const char *text, uint64_t bytes,
                              bd_error *err) {
    file->data_at = PREFIX_BYTES + bytes;
    if (bytes == 0 || text[0] != '{') {
        return bd_fail(err, BD_E_FORMAT, file->path,
                       "%s is not a safetensors file, or is damaged: the header does not begin "
                       "with '{'",
                       file->path);
    }
    cJSON *root = NULL;
    bd_status status = bd_json_parse(text, (size_t)bytes, file->path, &root, err);
    if (status != BD_OK) return status;
    status = allocate(file, root, err);
    if (status == BD_OK) status = parse_tensors(file, root, err);
    cJSON_Delete(root);
    return status;
}

/* ---- the object ------------------------------------------------------------------------------ */

bd_status bd_safetensors_open(const char *path, bool map_data, bd_safetensors **out,
                              bd_error *err) {
    *out = NULL;
    bd_status status = BD_E_MEMORY;
    char *header = NULL;
    uint64_t header_bytes = 0;
    bd_safetensors *file = calloc(1, sizeof *file);
    if (!file) return bd_fail(err, status, path, "out of memory");
    file->map.fd = -1;
    file->path = strdup(path);
    if (!file->path) {
        status = bd_fail(err, BD_E_MEMORY, path, "out of memory");
        goto fail;
    }
    if (map_data) {
        if ((status = map_file(file, &header_bytes, err)) != BD_OK) goto fail;
    } else if ((status = read_header(file, &header, &header_bytes, err)) != BD_OK) {
        goto fail;
    }
    BD_ASSERT(header || file->map.data);
    const char *text = header ? header : (const char *)file->map.data + PREFIX_BYTES;
    if ((status = parse_header(file, text, header_bytes, err)) != BD_OK) goto fail;
    free(header);
    *out = file;
    return BD_OK;
fail:
    free(header);
    bd_safetensors_close(file);
    return status;
}

void bd_safetensors_close(bd_safetensors *file) {
    if (!file) return;
    if (file->map.fd >= 0 || file->map.data) bd_file_unmap(&file->map);
    bd_map_destroy(file->by_name);
    free(file->names);
    free(file->tensors);
    free(file->path);
    free(file);
}

uint32_t bd_safetensors_count(const bd_safetensors *file) {
    return file->count;
}

const bd_tensor *bd_safetensors_at(const bd_safetensors *file, uint32_t index) {
    BD_ASSERT(index < file->count);
    return &file->tensors[index];
}

const bd_tensor *bd_safetensors_find(const bd_safetensors *file, const char *name) {
    return bd_map_get(file->by_name, name, strlen(name));
}

uint64_t bd_safetensors_file_bytes(const bd_safetensors *file) {
    return file->file_bytes;
}
