/* hash_key.h - `bitdelta hash-key`: a key on stdin to the line that a tenants file holds.
 * Threads: the main thread only. */
#ifndef BITDELTA_TOOLS_HASH_KEY_H
#define BITDELTA_TOOLS_HASH_KEY_H

#include <stdio.h>

#include "bitdelta/base/status.h"

/* One line of visible ASCII, at most 4096 bytes, becomes "sha256:<hex>". BD_E_ARGUMENT: it is not
 * that; the key itself is never in a message. */
BD_MUST_CHECK bd_status bd_hash_key_run(FILE *in, FILE *out, bd_error *err);

#endif
