/* registry.c - which backends this binary has, and which of them to use. Threads: any. */
#include <stdio.h>

#include "bitdelta/backend/backend.h"
#ifdef BD_CUDA
#include "bitdelta/backend/cuda.h"
#endif

static void explain(char *why, size_t why_bytes, const char *text) {
    if (why != NULL && why_bytes > 0) snprintf(why, why_bytes, "%s", text);
}

/* BD_OK, or why there is no usable CUDA device. */
static bd_status probe_cuda(char *why, size_t why_bytes) {
#ifdef BD_CUDA
    return bd_cuda_probe(why, why_bytes);
#else
    explain(why, why_bytes, "built without CUDA");
    return BD_E_UNSUPPORTED;
#endif
}

static const bd_backend_ops *cuda_ops(void) {
#ifdef BD_CUDA
    return bd_backend_cuda_ops();
#else
    return NULL;
#endif
}

const bd_backend_ops *bd_backend_table(bd_backend_choice choice) {
    return choice == BD_BACKEND_CPU || (choice == BD_BACKEND_AUTO && !cuda_ops())
               ? bd_backend_cpu_ops()
               : cuda_ops();
}

bd_status bd_backend_select(bd_backend_choice choice, const bd_backend_ops **out, char *why,
                            size_t why_bytes, bd_error *err) {
    char reason[256] = "";
    explain(why, why_bytes, "");
    *out = NULL;
    if (choice == BD_BACKEND_CPU) {
        *out = bd_backend_cpu_ops();
        return BD_OK;
    }
    if (probe_cuda(reason, sizeof reason) == BD_OK) {
        *out = cuda_ops();
        return BD_OK;
    }
    if (choice == BD_BACKEND_CUDA)
        return bd_fail(err, BD_E_DEVICE, "cuda", "no usable device: %s", reason);
    explain(why, why_bytes, reason);
    *out = bd_backend_cpu_ops();
    return BD_OK;
}
