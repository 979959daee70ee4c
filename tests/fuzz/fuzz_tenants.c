/* fuzz_tenants.c - any bytes as the file of tenants. */
#include "fuzz.h"

#include <string.h>

#include "bitdelta/config/tenants_file.h"

static void check_limit(uint64_t rate, uint64_t burst) {
    BD_ASSERT(rate <= BD_TENANT_RATE_MAX && burst <= BD_TENANT_RATE_MAX);
    BD_ASSERT((rate == 0) == (burst == 0));
}

static void check_entry(const bd_tenant_list *list, uint32_t index) {
    const bd_tenant_entry *entry = &list->items[index];
    const size_t bytes = strlen(entry->name);
    BD_ASSERT(bytes >= 1 && bytes <= BD_TENANT_NAME_BYTES_MAX && !strpbrk(entry->name, "\"\\\n{}"));
    BD_ASSERT(entry->key_count >= 1 && entry->key_count <= BD_TENANT_KEYS_MAX);
    BD_ASSERT(entry->weight >= BD_TENANT_WEIGHT_MIN && entry->weight <= BD_TENANT_WEIGHT_MAX);
    BD_ASSERT(entry->every_variant == (entry->variant_count == 0));
    for (uint32_t v = 1; v < entry->variant_count; v++)
        BD_ASSERT(strcmp(entry->variants[v - 1], entry->variants[v]) < 0);
    check_limit(entry->requests_per_minute, entry->request_burst);
    check_limit(entry->tokens_per_minute, entry->token_burst);
    for (uint32_t before = 0; before < index; before++) {
        const bd_tenant_entry *other = &list->items[before];
        BD_ASSERT(strcmp(other->name, entry->name) != 0);
        BD_ASSERT(memcmp(other->keys[0], entry->keys[0], sizeof entry->keys[0]) != 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    bd_tenant_list list;
    bd_error err;
    bd_error_clear(&err);
    const bd_status status = bd_tenant_list_read(fuzz_memory_file(data, bytes), &list, &err);
    if (status != BD_OK) {
        fuzz_check_error(status, &err);
        BD_ASSERT(!list.items && list.count == 0);
        return 0;
    }
    BD_ASSERT(list.count >= 1 && list.count <= BD_TENANTS_MAX);
    for (uint32_t i = 0; i < list.count; i++)
        check_entry(&list, i);
    bd_tenant_list_deinit(&list);
    return 0;
}
