/* safetensors_write.c - writing: the header is complete before the first byte of data, so a file of
 * any size streams through a fixed buffer of nothing. Owner of a writer: one thread. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bitdelta/base/strbuf.h"
#include "bitdelta/hf/json_text.h"
#include "bitdelta/hf/safetensors.h"

#include "tensor_types.h"

struct bd_safetensors_writer {
    char *path;
    char *temporary; /* path + suffix, until finish() renames it */
    int fd;
    uint64_t declared_bytes, written_bytes; /* of tensor data */
};

/* A write(2) of more than 2 GiB is cut by the kernel anyway; the loop also meets short writes. */
static int write_fully(int fd, const void *data, size_t bytes) {
    const char *from = data;
    while (bytes > 0) {
        const size_t part = bytes < (64u << 20) ? bytes : (64u << 20);
        const ssize_t done = write(fd, from, part);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        from += done;
        bytes -= (size_t)done;
    }
    return 0;
}

/* Bytes that the shape and dtype_name of a declared tensor need; false when they make no sense. */
static bool declared_bytes(const bd_tensor *tensor, uint64_t *bytes) {
    bd_dtype dtype;
    uint32_t element_bits;
    uint64_t bits = 1;
    if (!bd_dtype_lookup(tensor->dtype_name, &dtype, &element_bits)) return false;
    if (tensor->rank > BD_TENSOR_RANK_MAX) return false;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (__builtin_mul_overflow(bits, tensor->shape[i], &bits)) return false;
    }
    if (__builtin_mul_overflow(bits, (uint64_t)element_bits, &bits) || bits % 8 != 0) return false;
    *bytes = bits / 8;
    return true;
}

static bd_status build_header(bd_strbuf *text, const bd_tensor *tensors, uint32_t count,
                              uint64_t *total, bd_error *err) {
    uint64_t at = 0;
    bd_strbuf_puts(text, "{");
    for (uint32_t i = 0; i < count; i++) {
        const bd_tensor *t = &tensors[i];
        uint64_t bytes, end;
        if (!declared_bytes(t, &bytes) || __builtin_add_overflow(at, bytes, &end)) {
            return bd_fail(err, BD_E_ARGUMENT, t->name,
                           "%s: dtype and shape of a tensor to write make no sense", t->name);
        }
        if (i > 0) bd_strbuf_puts(text, ",");
        bd_json_put_ascii(text, t->name);
        bd_strbuf_puts(text, ":{\"dtype\":");
        bd_json_put_ascii(text, t->dtype_name);
        bd_strbuf_puts(text, ",\"shape\":[");
        for (uint32_t d = 0; d < t->rank; d++) {
            bd_strbuf_printf(text, d ? ",%llu" : "%llu", (unsigned long long)t->shape[d]);
        }
        bd_strbuf_printf(text, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                         (unsigned long long)end);
        at = end;
    }
    bd_strbuf_puts(text, "}");
    *total = at;
    return BD_OK;
}

/* Spaces after the JSON, so that the data begins at a multiple of align_bytes. */
static bd_status pad_header(bd_strbuf *text, uint32_t align_bytes, const char *subject,
                            bd_error *err) {
    const uint64_t align = align_bytes > 0 ? align_bytes : 1;
    const uint64_t padding = (align - (8 + text->len_bytes) % align) % align;
    for (uint64_t i = 0; i < padding; i++)
        bd_strbuf_puts(text, " ");
    if (text->failed)
        return bd_fail(err, BD_E_MEMORY, subject, "out of memory for a safetensors header");
    if (text->len_bytes > BD_SAFETENSORS_HEADER_BYTES_MAX) {
        return bd_fail(err, BD_E_LIMIT, subject, "a safetensors header would have %zu bytes",
                       text->len_bytes);
    }
    return BD_OK;
}

static bd_status write_header(bd_safetensors_writer *writer, const bd_strbuf *text, bd_error *err) {
    uint8_t prefix[8];
    for (uint32_t i = 0; i < 8; i++)
        prefix[i] = (uint8_t)((uint64_t)text->len_bytes >> (8 * i));
    int error_number = write_fully(writer->fd, prefix, sizeof prefix);
    if (!error_number) error_number = write_fully(writer->fd, text->data, text->len_bytes);
    if (!error_number) return BD_OK;
    return bd_fail_errno(err, BD_E_IO, writer->path, error_number, "cannot write %s", writer->path);
}

bd_status bd_safetensors_measure(const bd_tensor *tensors, uint32_t tensor_count,
                                 uint32_t align_bytes, uint64_t *file_bytes, bd_error *err) {
    uint64_t data_bytes = 0;
    bd_strbuf text;
    bd_strbuf_init(&text, BD_SAFETENSORS_HEADER_BYTES_MAX + (64u << 10));
    bd_status status = build_header(&text, tensors, tensor_count, &data_bytes, err);
    if (status == BD_OK) status = pad_header(&text, align_bytes, NULL, err);
    *file_bytes = 8 + text.len_bytes + data_bytes;
    bd_strbuf_deinit(&text);
    return status;
}

static bd_safetensors_writer *writer_alloc(const char *path) {
    static const char suffix[] = ".partial";
    bd_safetensors_writer *writer = calloc(1, sizeof *writer);
    if (!writer) return NULL;
    writer->fd = -1;
    writer->path = strdup(path);
    const size_t temporary_bytes = strlen(path) + sizeof suffix;
    writer->temporary = malloc(temporary_bytes);
    if (!writer->path || !writer->temporary) {
        free(writer->path);
        free(writer->temporary);
        free(writer);
        return NULL;
    }
    (void)snprintf(writer->temporary, temporary_bytes, "%s%s", path, suffix);
    return writer;
}

static void writer_free(bd_safetensors_writer *writer) {
    if (writer->fd >= 0) close(writer->fd);
    free(writer->path);
    free(writer->temporary);
    free(writer);
}

bd_status bd_safetensors_writer_create(const char *path, const bd_tensor *tensors,
                                       uint32_t tensor_count, uint32_t align_bytes,
                                       bd_safetensors_writer **out, bd_error *err) {
    *out = NULL;
    bd_safetensors_writer *writer = writer_alloc(path);
    if (!writer) return bd_fail(err, BD_E_MEMORY, path, "out of memory");
    bd_strbuf text;
    bd_strbuf_init(&text, BD_SAFETENSORS_HEADER_BYTES_MAX + (64u << 10));
    bd_status status = build_header(&text, tensors, tensor_count, &writer->declared_bytes, err);
    if (status == BD_OK) status = pad_header(&text, align_bytes, path, err);
    if (status != BD_OK) goto fail;
    writer->fd = open(writer->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (writer->fd < 0) {
        status = bd_fail_errno(err, BD_E_IO, path, errno, "cannot create %s", writer->temporary);
        goto fail;
    }
    if ((status = write_header(writer, &text, err)) != BD_OK) {
        unlink(writer->temporary);
        goto fail;
    }
    bd_strbuf_deinit(&text);
    *out = writer;
    return BD_OK;
fail:
    bd_strbuf_deinit(&text);
    writer_free(writer);
    return status;
}

bd_status bd_safetensors_writer_append(bd_safetensors_writer *writer, const void *data,
                                       size_t bytes, bd_error *err) {
    if (bytes > writer->declared_bytes - writer->written_bytes) {
        return bd_fail(err, BD_E_ARGUMENT, writer->path, "%s: more bytes than its tensors declare",
                       writer->path);
    }
    const int error_number = write_fully(writer->fd, data, bytes);
    if (error_number) {
        return bd_fail_errno(err, BD_E_IO, writer->path, error_number, "cannot write %s",
                             writer->path);
    }
    writer->written_bytes += bytes;
    return BD_OK;
}

static int sync_parent(const char *path) {
    const char *slash = strrchr(path, '/');
    char *dir = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    if (!dir) return ENOMEM;
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(dir);
    if (fd < 0) return errno;
    const int error_number = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    return error_number;
}

bd_status bd_safetensors_writer_finish(bd_safetensors_writer *writer, bd_error *err) {
    bd_status status = BD_OK;
    int error_number = 0;
    if (writer->written_bytes != writer->declared_bytes) {
        status = bd_fail(err, BD_E_ARGUMENT, writer->path, "%s: %llu of %llu bytes were written",
                         writer->path, (unsigned long long)writer->written_bytes,
                         (unsigned long long)writer->declared_bytes);
    } else if (fsync(writer->fd) != 0 || rename(writer->temporary, writer->path) != 0) {
        error_number = errno;
    } else {
        error_number = sync_parent(writer->path);
    }
    if (error_number) {
        status = bd_fail_errno(err, BD_E_IO, writer->path, error_number, "cannot finish %s",
                               writer->path);
    }
    if (status != BD_OK) unlink(writer->temporary);
    writer_free(writer);
    return status;
}

void bd_safetensors_writer_abort(bd_safetensors_writer *writer) {
    if (!writer) return;
    unlink(writer->temporary);
    writer_free(writer);
}
