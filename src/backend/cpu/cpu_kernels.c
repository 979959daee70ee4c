/* cpu_kernels.c - which inner loops this machine runs. Threads: any. */
#include <string.h>

#include "cpu.h"

static const struct {
    const char *name;
    const bd_cpu_kernels *(*get)(void);
} known[BD_CPU_KERNELS_COUNT] = {
    {"avx512", bd_cpu_kernels_avx512},
    {"avx2", bd_cpu_kernels_avx2},
    {"neon", bd_cpu_kernels_neon},
    {"plain", bd_cpu_kernels_plain},
};

const bd_cpu_kernels *bd_cpu_kernels_at(uint32_t index) {
    BD_ASSERT(index < BD_CPU_KERNELS_COUNT);
    return known[index].get();
}

bd_status bd_cpu_kernels_pick(const char *name, const bd_cpu_kernels **out, bd_error *err) {
    const bool any = name == NULL || strcmp(name, "auto") == 0;
    *out = NULL;
    for (uint32_t i = 0; i < BD_CPU_KERNELS_COUNT; i++) {
        if (!any && strcmp(name, known[i].name) != 0) continue;
        *out = known[i].get();
        if (*out != NULL) return BD_OK;
        if (any) continue;
        return bd_fail(err, BD_E_UNSUPPORTED, "cpu_kernels", "this machine has no %s", name);
    }
    return bd_fail(err, BD_E_UNSUPPORTED, "cpu_kernels", "there are no kernels \"%s\"",
                   any ? "auto" : name);
}
