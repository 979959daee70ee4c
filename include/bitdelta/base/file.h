/* file.h - whole files: map, read, and replace without ever leaving half of one. Threads: any. */
#ifndef BITDELTA_BASE_FILE_H
#define BITDELTA_BASE_FILE_H

#include <stddef.h>

#include "bitdelta/base/status.h"

typedef struct bd_mapped_file {
    const uint8_t *data; /* NULL for an empty file */
    size_t bytes;
    int fd;
} bd_mapped_file;

/* Read-only private mapping of a regular file; anything else is BD_E_IO naming the path. */
BD_MUST_CHECK bd_status bd_file_map(const char *path, bd_mapped_file *out, bd_error *err);
void bd_file_unmap(bd_mapped_file *file);

/* *out is malloc'ed and NUL-terminated (one byte beyond *bytes). BD_E_LIMIT above max_bytes. */
BD_MUST_CHECK bd_status bd_file_read(const char *path, size_t max_bytes, char **out, size_t *bytes,
                                     bd_error *err);

/* Writes to a temporary name in the same directory, fsyncs, renames, fsyncs the directory. */
BD_MUST_CHECK bd_status bd_file_replace(const char *path, const void *data, size_t bytes,
                                        bd_error *err);
/* False only where there surely is nothing. What is there and cannot be reached, or is a link to
 * nowhere, is never taken for absent: whoever opens it gets the error to tell. */
bool bd_file_exists(const char *path);
/* "dir/name" into out; BD_E_LIMIT when it does not fit. */
BD_MUST_CHECK bd_status bd_path_join(char *out, size_t out_bytes, const char *dir, const char *name,
                                     bd_error *err);

#endif
