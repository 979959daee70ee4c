/* pages.h - the free list of the delta arena's equal pages. Owner: cache; one thread. */
#ifndef BITDELTA_SRC_CACHE_PAGES_H
#define BITDELTA_SRC_CACHE_PAGES_H

#include "bitdelta/base/status.h"

typedef struct bd_pages {
    uint8_t *arena; /* device memory: only addresses are computed here */
    uint64_t page_bytes;
    uint32_t count, free_count;
    uint32_t *free_list; /* [count], a stack */
    bool *taken;         /* [count] */
} bd_pages;

BD_MUST_CHECK bd_status bd_pages_init(bd_pages *pages, void *arena, uint64_t page_bytes,
                                      uint32_t count, bd_error *err);
void bd_pages_deinit(bd_pages *pages); /* all pages must be back */
/* All or none. */
bool bd_pages_take(bd_pages *pages, uint32_t count, void **out);
void bd_pages_give(bd_pages *pages, uint32_t count, void *const *given);

#endif
