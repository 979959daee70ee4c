/* npy.c - see npy.h. Format version 1.0: magic, header length, a Python dict as text padded to 128
 * bytes, the data. Files are little-endian, as are all machines this runs on. */
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bitdelta/tools/stop.h"

enum { HEADER_BYTES = 128, PREFIX_BYTES = 10 };

static bd_status write_header(bd_npy *npy, bd_error *err) {
    char header[HEADER_BYTES + 1];
    memset(header, ' ', sizeof header);
    memcpy(header, "\x93NUMPY\x01\x00", 8);
    header[8] = (char)(HEADER_BYTES - PREFIX_BYTES);
    header[9] = 0;
    const int n = snprintf(header + PREFIX_BYTES, HEADER_BYTES - PREFIX_BYTES,
                           "{'descr': '<f4', 'fortran_order': False, 'shape': (%u, %u), }",
                           npy->rows, npy->cols);
    header[PREFIX_BYTES + n] = ' ';
    header[HEADER_BYTES - 1] = '\n';
    if (fwrite(header, HEADER_BYTES, 1, npy->file) != 1) {
        return bd_fail_errno(err, BD_E_IO, npy->path, errno, "cannot write %s", npy->path);
    }
    return BD_OK;
}

static bd_status name_part(bd_npy *npy, const char *path, bd_error *err) {
    const int n = snprintf(npy->part_path, sizeof npy->part_path, "%s.part", path);
    if (n >= 0 && (size_t)n < sizeof npy->part_path) return BD_OK;
    return bd_fail(err, BD_E_LIMIT, path, "the path is too long: %s", path);
}

/* Renaming over a device would put a file in its place. */
bd_status bd_npy_check(const char *path, bd_error *err) {
    bd_npy npy;
    struct stat info;
    bd_status s = name_part(&npy, path, err);
    if (s != BD_OK) return s;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return bd_fail(err, BD_E_IO, path, "%s exists and is not a regular file", path);
    bd_stop_begin();
    const int fd = open(npy.part_path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0) s = bd_fail_errno(err, BD_E_IO, path, errno, "cannot create %s", npy.part_path);
    if (fd >= 0) close(fd);
    if (fd >= 0) unlink(npy.part_path);
    if (s == BD_OK) s = bd_stop_check(path, err);
    bd_stop_end();
    return s;
}

bd_status bd_npy_open(bd_npy *npy, const char *path, uint32_t cols, bd_error *err) {
    *npy = (bd_npy){.path = path, .cols = cols};
    bd_status s = name_part(npy, path, err);
    if (s != BD_OK) return s;
    bd_stop_begin();
    npy->file = fopen(npy->part_path, "wb");
    if (!npy->file) {
        s = bd_fail_errno(err, BD_E_IO, path, errno, "cannot create %s", npy->part_path);
        bd_stop_end();
        return s;
    }
    s = write_header(npy, err);
    if (s != BD_OK) bd_npy_abort(npy);
    return s;
}

bd_status bd_npy_append(bd_npy *npy, const float *row, bd_error *err) {
    if (fwrite(row, sizeof *row, npy->cols, npy->file) != npy->cols) {
        return bd_fail_errno(err, BD_E_IO, npy->path, errno, "cannot write %s", npy->path);
    }
    npy->rows++;
    return bd_stop_check(npy->path, err);
}

bd_status bd_npy_finish(bd_npy *npy, bd_error *err) {
    bd_status s = bd_stop_check(npy->path, err);
    if (s == BD_OK && fseek(npy->file, 0, SEEK_SET) != 0) {
        s = bd_fail_errno(err, BD_E_IO, npy->path, errno, "cannot seek in %s", npy->path);
    }
    if (s == BD_OK) s = write_header(npy, err);
    if (fclose(npy->file) != 0 && s == BD_OK) {
        s = bd_fail_errno(err, BD_E_IO, npy->path, errno, "cannot write %s", npy->path);
    }
    npy->file = NULL;
    if (s == BD_OK && rename(npy->part_path, npy->path) != 0) {
        s = bd_fail_errno(err, BD_E_IO, npy->path, errno, "cannot rename %s", npy->part_path);
    }
    if (s != BD_OK) unlink(npy->part_path);
    bd_stop_end();
    return s;
}

void bd_npy_abort(bd_npy *npy) {
    if (!npy->file) return;
    fclose(npy->file);
    npy->file = NULL;
    unlink(npy->part_path);
    bd_stop_end();
}
