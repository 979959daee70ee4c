/* delta_internal.h - what the files of this room share. */
#ifndef BITDELTA_SRC_DELTA_INTERNAL_H
#define BITDELTA_SRC_DELTA_INTERNAL_H

#include <nettle/sha2.h>
#include <stdint.h>

#define BD_DELTA_MANIFEST_NAME "delta.json"

/* Both end the hash. */
void bd_delta_sha256_hex(struct sha256_ctx *hash, char hex[65]);
void bd_delta_sha256_digest(struct sha256_ctx *hash, uint8_t digest[SHA256_DIGEST_SIZE]);

#endif
