/* auth.c - API keys. Only their SHA-256 is kept, and comparing digests in constant time tells
 * nothing about a key's length or first bytes. Threads: any. */
#include <nettle/memops.h>
#include <nettle/sha2.h>
#include <string.h>

#include "internal.h"

void bd_key_digest(const char *key, size_t bytes, bd_server_key *out) {
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, bytes, (const uint8_t *)key);
    sha256_digest(&hash, sizeof out->digest, out->digest);
}

bool bd_key_check(const bd_http_server *server, bool admin, const char *header, uint32_t *tenant) {
    *tenant = 0;
    uint32_t count = admin ? (server->admin_guarded ? 1u : 0u) : server->key_count;
    const bd_server_key *keys = admin ? &server->admin_key : server->keys;
    if (count == 0) return true;
    if (!header || strncasecmp(header, "Bearer ", 7) != 0) return false;
    const char *token = header + 7;
    while (*token == ' ')
        token++;
    bd_server_key sent = {.tenant = 0};
    bd_key_digest(token, strlen(token), &sent);
    bool found = false;
    for (uint32_t i = 0; i < count; i++) { /* all of them, so that time does not tell which */
        bool equal = memeql_sec(keys[i].digest, sent.digest, sizeof sent.digest) != 0;
        if (equal && !found) *tenant = keys[i].tenant;
        found = found || equal;
    }
    return found;
}
