/* tenants_file.h - the file of --tenants as plain values:
 *
 *   {"tenants": [{"name": "acme", "keys": ["sha256:<64 hex digits>"], "variants": ["zen-mini"],
 *                 "weight": 2, "requests_per_minute": 600, "request_burst": 20,
 *                 "tokens_per_minute": 100000, "token_burst": 20000, "max_concurrent": 16,
 *                 "priority_min": 0}]}
 *
 * name, keys and variants ("*": every name) must be there. A key is known by the SHA-256 of its
 * bytes; `bitdelta hash-key` makes the line. Strict: an unknown or repeated member, a name or key
 * that is there twice, a number out of range are refused, naming the file and the member.
 * Threads: pure values. */
#ifndef BITDELTA_CONFIG_TENANTS_FILE_H
#define BITDELTA_CONFIG_TENANTS_FILE_H

#include "bitdelta/base/status.h"

#define BD_TENANTS_MAX         10000
#define BD_TENANTS_FILE_MAX    (16 << 20)
#define BD_TENANT_KEYS_MAX     64
#define BD_TENANT_VARIANTS_MAX 10000
#define BD_TENANT_RATE_MAX     1000000000 /* per minute, and bursts */
#define BD_TENANT_WEIGHT_MIN   0.001
#define BD_TENANT_WEIGHT_MAX   1000.0
#define BD_TENANT_NAME_BYTES_MAX                                                                   \
    64 /* letters, digits, '.', '_', '-'; begins with neither of them */
#define BD_TENANT_VARIANT_NAME_MAX 128 /* bytes */

typedef struct bd_tenant_entry {
    char *name;
    uint8_t (*keys)[32]; /* SHA-256 */
    uint32_t key_count;
    bool every_variant;
    char **variants; /* sorted, each once */
    uint32_t variant_count;
    double weight;                               /* 1 when not given */
    uint64_t requests_per_minute, request_burst; /* 0: no limit; burst as long as a minute when not
                                                    given */
    uint64_t tokens_per_minute, token_burst;
    uint32_t max_concurrent; /* sequences; 0: no limit */
    int64_t priority_min;    /* 0 when not given */
} bd_tenant_entry;

typedef struct bd_tenant_list {
    bd_tenant_entry *items;
    uint32_t count;
} bd_tenant_list;

/* On failure nothing is left to deinit. BD_E_NOT_FOUND, BD_E_IO: the file; BD_E_ARGUMENT: what it
 * says; BD_E_LIMIT: it is too large. */
BD_MUST_CHECK bd_status bd_tenant_list_read(const char *path, bd_tenant_list *out, bd_error *err);
void bd_tenant_list_deinit(bd_tenant_list *list);

#endif
