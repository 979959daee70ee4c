/* fingerprint.c - identity of a base model: every name, dtype and shape, all small tensors, and
 * samples of large ones. A 70B model costs 0.2 GB of reading. Threads: any. */
#include <nettle/sha2.h>
#include <nettle/version.h>
#include <stdio.h>
#include <string.h>

#include "bitdelta/hf/checkpoint.h"

#define WHOLE_BYTES_MAX (256u << 10)
#define SAMPLE_COUNT    64u
#define SAMPLE_BYTES    4096u

static void hash_text(struct sha256_ctx *hash, const char *text) {
    sha256_update(hash, strlen(text), (const uint8_t *)text);
}

static void hash_data(struct sha256_ctx *hash, const bd_tensor *t) {
    if (t->bytes <= WHOLE_BYTES_MAX) {
        if (t->bytes > 0) sha256_update(hash, (size_t)t->bytes, t->data);
        return;
    }
    for (uint64_t i = 0; i < SAMPLE_COUNT; i++) {
        const uint64_t at = i * (t->bytes - SAMPLE_BYTES) / (SAMPLE_COUNT - 1);
        sha256_update(hash, SAMPLE_BYTES, t->data + at);
    }
}

bd_status bd_checkpoint_fingerprint(const bd_checkpoint *checkpoint, char hex[65], bd_error *err) {
    (void)err; /* all data is mapped; the status is for readers that are not */
    struct sha256_ctx hash;
    sha256_init(&hash);
    for (uint32_t i = 0; i < bd_checkpoint_count(checkpoint); i++) {
        const bd_tensor *t = bd_checkpoint_at(checkpoint, i);
        hash_text(&hash, t->name);
        hash_text(&hash, t->dtype_name);
        for (uint32_t d = 0; d < t->rank; d++) {
            char dim[24];
            (void)snprintf(dim, sizeof dim, d ? "x%llu" : "%llu", (unsigned long long)t->shape[d]);
            hash_text(&hash, dim);
        }
        hash_data(&hash, t);
        bd_tensor_release(t);
    }
    uint8_t digest[SHA256_DIGEST_SIZE];
#if NETTLE_VERSION_MAJOR >= 4
    sha256_digest(&hash, digest);
#else
    sha256_digest(&hash, sizeof digest, digest);
#endif
    for (uint32_t i = 0; i < sizeof digest; i++)
        (void)snprintf(hex + (size_t)2 * i, 3, "%02x", digest[i]);
    return BD_OK;
}

int bd_fingerprint_digits(const char *a, const char *b) {
    int digits = 16;
    while (digits < 64 && strncmp(a, b, (size_t)digits) == 0)
        digits++;
    return digits;
}
