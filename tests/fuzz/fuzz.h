/* fuzz.h - what the fuzz targets share. A target is one function over any bytes. With BD_FUZZ it
 * runs under libFuzzer; with driver.c it is an ordinary test over its corpus and random mutations
 * of it. What must hold is checked with BD_ASSERT. Threads: one. */
#ifndef BITDELTA_TESTS_FUZZ_H
#define BITDELTA_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "bitdelta/base/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

typedef struct fuzz_part { /* borrowed from the input; data is not NULL */
    const uint8_t *data;
    size_t bytes;
    bool present;
} fuzz_part;

/* Cuts the input at its first NUL byte, which JSON cannot hold. Without one the second part is
 * absent. */
void fuzz_split(const uint8_t *data, size_t bytes, fuzz_part *first, fuzz_part *second);

/* The path of a file in memory with this content; the file is the same one in every call. */
const char *fuzz_memory_file(const void *data, size_t bytes);

/* A directory of this process, removed at its end. */
const char *fuzz_directory(void);
void fuzz_write(const char *name, const void *data, size_t bytes); /* in that directory */
void fuzz_remove(const char *name);                                /* need not be there */

/* A failure says which, with a message for people in valid UTF-8. */
void fuzz_check_error(bd_status status, const bd_error *err);
/* Reads every byte, so that a sanitizer sees what is not there. */
void fuzz_read(const void *data, size_t bytes);

#endif
