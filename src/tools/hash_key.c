/* hash_key.c - `bitdelta hash-key`. Owner: main. Threads: the main thread only. */
#include "bitdelta/tools/hash_key.h"

#include <errno.h>
#include <nettle/sha2.h>
#include <string.h>

enum { KEY_BYTES_MAX = 4096 };

/* What a header can carry without being changed on the way. */
static bool is_visible(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (text[i] <= ' ' || text[i] > '~') return false;
    return bytes > 0;
}

bd_status bd_hash_key_run(FILE *in, FILE *out, bd_error *err) {
    char key[KEY_BYTES_MAX + 3]; /* and "\r\n", and one byte that shows that there is more */
    uint8_t digest[SHA256_DIGEST_SIZE];
    size_t bytes = fread(key, 1, sizeof key, in);
    if (ferror(in)) return bd_fail_errno(err, BD_E_IO, "stdin", errno, "cannot read the key");
    if (bytes > 0 && key[bytes - 1] == '\n') bytes--;
    if (bytes > 0 && key[bytes - 1] == '\r') bytes--;
    if (bytes > KEY_BYTES_MAX || !is_visible(key, bytes))
        return bd_fail(err, BD_E_ARGUMENT, "stdin",
                       "the key must be one line of 1 to %d visible ASCII characters without "
                       "spaces",
                       KEY_BYTES_MAX);
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, bytes, (const uint8_t *)key);
    sha256_digest(&hash, sizeof digest, digest);
    fputs("sha256:", out);
    for (size_t i = 0; i < sizeof digest; i++)
        fprintf(out, "%02x", digest[i]);
    fputs("\n", out);
    return BD_OK;
}
