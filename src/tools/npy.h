/* npy.h - a float32 matrix to a NumPy file, row by row, its height known only at the end.
 * Owner: one tool, one thread. */
#ifndef BITDELTA_SRC_TOOLS_NPY_H
#define BITDELTA_SRC_TOOLS_NPY_H

#include <stdio.h>

#include "bitdelta/base/status.h"

typedef struct bd_npy {
    FILE *file; /* NULL: not open */
    const char *path;
    char part_path[1200]; /* written here, renamed at the end */
    uint32_t rows, cols;
} bd_npy;

/* Can a file of this name be made? Asked before hours of work go into one. */
BD_MUST_CHECK bd_status bd_npy_check(const char *path, bd_error *err);
/* path is borrowed until finish or abort. */
BD_MUST_CHECK bd_status bd_npy_open(bd_npy *npy, const char *path, uint32_t cols, bd_error *err);
BD_MUST_CHECK bd_status bd_npy_append(bd_npy *npy, const float *row, bd_error *err);
/* The file is complete under its name, or gone. */
BD_MUST_CHECK bd_status bd_npy_finish(bd_npy *npy, bd_error *err);
void bd_npy_abort(bd_npy *npy); /* a closed one is fine */

#endif
