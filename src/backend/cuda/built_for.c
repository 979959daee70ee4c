/* built_for.c - whether a build has code for a card, read off CMAKE_CUDA_ARCHITECTURES: entries
 * like 80, 80-real, 90-virtual, 90a-real, 100f, or all, all-major, native. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

/* Machine code runs on cards of its major version that are no older, portable code on all that are
 * no older, code for one architecture alone (a) on that; a family's (f) is taken for machine code.
 * What is not understood is taken to run: it is for the driver to say then. */
static bool runs_on(const char *entry, int major, int minor) {
    char *end;
    const long number = strtol(entry, &end, 10);
    if (end == entry) return true;
    const bool exact = *end == 'a', family = *end == 'f';
    if (exact || family) end++;
    const bool real = strcmp(end, "-real") == 0, virtual = strcmp(end, "-virtual") == 0;
    if (*end && !real && !virtual) return true;
    const long card = major * 10 + minor;
    if (exact) return number == card;
    if (number > card) return false;
    return number / 10 == major || (!real && !family);
}

bool cuda_built_for(const char *architectures, int major, int minor) {
    char entry[32];
    if (!architectures[strspn(architectures, " ")]) return true; /* nothing is said */
    for (const char *at = architectures; *at;) {
        size_t length = 0;
        while (at[length] && !isspace((unsigned char)at[length]))
            length++;
        if (length >= sizeof entry) return true;
        memcpy(entry, at, length);
        entry[length] = '\0';
        if (length && runs_on(entry, major, minor)) return true;
        at += length;
        while (isspace((unsigned char)*at))
            at++;
    }
    return false;
}
