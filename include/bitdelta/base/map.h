/* map.h - hash map from byte strings to pointers (open addressing, keyed XXH3). Keys are copied.
 * Values are borrowed: the map never frees them. Not thread-safe. */
#ifndef BITDELTA_BASE_MAP_H
#define BITDELTA_BASE_MAP_H

#include <stddef.h>

#include "bitdelta/base/status.h"

typedef struct bd_map bd_map;

bd_map *bd_map_create(size_t expected_count); /* NULL when out of memory */
void bd_map_destroy(bd_map *map);
/* BD_OK inserted, BD_BUSY key was there already (value unchanged), BD_E_MEMORY. */
BD_MUST_CHECK bd_status bd_map_put(bd_map *map, const void *key, size_t key_bytes, void *value);
void *bd_map_get(const bd_map *map, const void *key, size_t key_bytes); /* NULL: absent */
void *bd_map_take(bd_map *map, const void *key, size_t key_bytes);      /* removes; NULL: absent */
size_t bd_map_count(const bd_map *map);
/* Walk in unspecified order: start with *cursor = 0; false at the end. Do not modify meanwhile. */
bool bd_map_next(const bd_map *map, size_t *cursor, const void **key, size_t *key_bytes,
                 void **value);

#endif
