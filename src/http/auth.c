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

static bool is_one_of(const bd_server_key *keys, uint32_t count, const char *token) {
    bd_server_key sent;
    bool found = false;
    bd_key_digest(token, strlen(token), &sent);
    for (uint32_t i = 0; i < count; i++) /* all of them, so that time does not tell which */
        found |= memeql_sec(keys[i].digest, sent.digest, sizeof sent.digest) != 0;
    return found;
}

bool bd_key_check(const bd_http_server *server, bool admin, const char *header,
                  const bd_tenant **tenant) {
    *tenant = NULL;
    bd_tenants *tenants = admin ? NULL : server->options.tenants;
    uint32_t count = admin ? (server->admin_guarded ? 1u : 0u) : server->key_count;
    if (count == 0 && !tenants) return true;
    if (!header || strncasecmp(header, "Bearer ", 7) != 0) return false;
    const char *token = header + 7;
    while (*token == ' ')
        token++;
    if (!tenants) return is_one_of(admin ? &server->admin_key : server->keys, count, token);
    *tenant = bd_tenants_by_key(tenants, token, strlen(token));
    return *tenant != NULL;
}
