/* pages.c - a stack of free pages; every page is either on it or taken. */
#include "pages.h"

#include <stdlib.h>

bd_status bd_pages_init(bd_pages *pages, void *arena, uint64_t page_bytes, uint32_t count,
                        bd_error *err) {
    *pages = (bd_pages){.arena = arena, .page_bytes = page_bytes, .count = count};
    if (count == 0 || page_bytes == 0 || !arena)
        return bd_fail(err, BD_E_ARGUMENT, "page_count", "a cache needs at least one page");
    if (page_bytes > UINT64_MAX / count || page_bytes * count > UINTPTR_MAX - (uintptr_t)arena)
        return bd_fail(err, BD_E_LIMIT, "page_count", "the pages exceed the address space");
    pages->free_list = calloc(count, sizeof *pages->free_list);
    pages->taken = calloc(count, sizeof *pages->taken);
    if (!pages->free_list || !pages->taken) {
        bd_pages_deinit(pages);
        return bd_fail(err, BD_E_MEMORY, "page_count", "out of memory for the page list");
    }
    /* The stack's top is page 0, so that small caches stay together. */
    for (uint32_t i = 0; i < count; i++)
        pages->free_list[i] = count - 1 - i;
    pages->free_count = count;
    return BD_OK;
}

void bd_pages_deinit(bd_pages *pages) {
    free(pages->free_list);
    free(pages->taken);
    pages->free_list = NULL;
    pages->taken = NULL;
}

bool bd_pages_take(bd_pages *pages, uint32_t count, void **out) {
    if (count > pages->free_count) return false;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = pages->free_list[--pages->free_count];
        BD_ASSERT(!pages->taken[index]);
        pages->taken[index] = true;
        out[i] = pages->arena + index * pages->page_bytes;
    }
    return true;
}

void bd_pages_give(bd_pages *pages, uint32_t count, void *const *given) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t offset = (uint64_t)((uint8_t *)given[i] - pages->arena);
        uint64_t index = offset / pages->page_bytes;
        BD_ASSERT(offset % pages->page_bytes == 0 && index < pages->count);
        BD_ASSERT(pages->taken[index]);
        pages->taken[index] = false;
        pages->free_list[pages->free_count++] = (uint32_t)index;
    }
}
