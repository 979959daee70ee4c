/* sources.c - where variants come from: directories of them, and single ones that the configuration
 * or an order named. A rescan goes through this list. Threads: the builder until start, then
 * bd-scan. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

bd_status bd_sources_add(bd_router *router, const char *name, const char *dir, bool pin,
                         bd_error *err) {
    bd_source source = {.name = name ? strdup(name) : NULL, .dir = strdup(dir), .pin = pin};
    bd_source *sources =
        realloc(router->sources, ((size_t)router->source_count + 1) * sizeof *sources);
    if (sources) router->sources = sources;
    if (!sources || !source.dir || (name && !source.name)) {
        free(source.name);
        free(source.dir);
        return bd_fail(err, BD_E_MEMORY, dir, "out of memory for the variant's entry");
    }
    sources[router->source_count++] = source;
    return BD_OK;
}

static bool same_text(const char *a, const char *b) {
    return a && b ? strcmp(a, b) == 0 : a == b;
}

void bd_sources_remove(bd_router *router, const char *name, const char *dir) {
    for (uint32_t i = 0; i < router->source_count; i++) {
        bd_source *source = &router->sources[i];
        if (strcmp(source->dir, dir) != 0 || !same_text(source->name, name)) continue;
        free(source->name);
        free(source->dir);
        router->source_count--;
        memmove(source, source + 1, (router->source_count - i) * sizeof *source);
        return;
    }
}

bd_status bd_roots_add(bd_router *router, const char *dir, bd_error *err) {
    char *copy = strdup(dir);
    char **roots = realloc(router->roots, ((size_t)router->root_count + 1) * sizeof(char *));
    if (roots) router->roots = roots;
    if (!roots || !copy) {
        free(copy);
        return bd_fail(err, BD_E_MEMORY, dir, "out of memory for the directory's entry");
    }
    roots[router->root_count++] = copy;
    return BD_OK;
}

void bd_sources_free(bd_router *router) {
    for (uint32_t i = 0; i < router->source_count; i++) {
        free(router->sources[i].name);
        free(router->sources[i].dir);
    }
    for (uint32_t i = 0; i < router->root_count; i++)
        free(router->roots[i]);
    free(router->sources);
    free(router->roots);
}
