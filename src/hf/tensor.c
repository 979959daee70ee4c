/* tensor.c - element types of safetensors and their conversion to float32. Threads: any. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bitdelta/base/half.h"
#include "bitdelta/hf/safetensors.h"

#include "tensor_types.h"

static const struct {
    char name[12];
    uint8_t bits;
    bd_dtype dtype;
} dtypes[] = {
    {"F32", 32, BD_DTYPE_F32},          {"BF16", 16, BD_DTYPE_BF16},
    {"F16", 16, BD_DTYPE_F16},          {"U8", 8, BD_DTYPE_U8},
    {"F64", 64, BD_DTYPE_OTHER},        {"I64", 64, BD_DTYPE_OTHER},
    {"U64", 64, BD_DTYPE_OTHER},        {"I32", 32, BD_DTYPE_OTHER},
    {"U32", 32, BD_DTYPE_OTHER},        {"I16", 16, BD_DTYPE_OTHER},
    {"U16", 16, BD_DTYPE_OTHER},        {"I8", 8, BD_DTYPE_OTHER},
    {"BOOL", 8, BD_DTYPE_OTHER},        {"C64", 64, BD_DTYPE_OTHER},
    {"F8_E4M3", 8, BD_DTYPE_OTHER},     {"F8_E5M2", 8, BD_DTYPE_OTHER},
    {"F8_E8M0", 8, BD_DTYPE_OTHER},     {"F4", 4, BD_DTYPE_OTHER},
    {"F6_E2M3", 6, BD_DTYPE_OTHER},     {"F6_E3M2", 6, BD_DTYPE_OTHER},
    {"F8_E4M3FNUZ", 8, BD_DTYPE_OTHER}, {"F8_E5M2FNUZ", 8, BD_DTYPE_OTHER},
};

bool bd_dtype_lookup(const char *name, bd_dtype *dtype, uint32_t *bits) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            *dtype = dtypes[i].dtype;
            *bits = dtypes[i].bits;
            return true;
        }
    }
    return false;
}

size_t bd_dtype_bytes(bd_dtype dtype) {
    switch (dtype) {
    case BD_DTYPE_F32:
        return 4;
    case BD_DTYPE_BF16:
    case BD_DTYPE_F16:
        return 2;
    case BD_DTYPE_U8:
        return 1;
    case BD_DTYPE_OTHER:
        break;
    }
    return 0;
}

/* Tensors in a file have no alignment, hence memcpy; compilers turn it into plain unaligned loads.
 */
static void bf16_to_f32(const uint8_t *from, uint64_t count, float *out) {
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, sizeof bits);
        out[i] = bd_bf16_to_f32(bits);
    }
}

static void f16_to_f32(const uint8_t *from, uint64_t count, float *out) {
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, sizeof bits);
        out[i] = bd_f16_to_f32(bits);
    }
}

void bd_tensor_to_f32(const bd_tensor *tensor, uint64_t first, uint64_t count, float *out) {
    const size_t unit_bytes = bd_dtype_bytes(tensor->dtype);
    BD_ASSERT(tensor->data && unit_bytes >= 2);
    BD_ASSERT(first <= tensor->bytes / unit_bytes && count <= tensor->bytes / unit_bytes - first);
    const uint8_t *from = tensor->data + first * unit_bytes;
    if (tensor->dtype == BD_DTYPE_F32) {
        if (count) memcpy(out, from, count * sizeof *out);
    } else if (tensor->dtype == BD_DTYPE_BF16) {
        bf16_to_f32(from, count, out);
    } else {
        f16_to_f32(from, count, out);
    }
}

void bd_tensor_release(const bd_tensor *tensor) {
    if (!tensor->data) return;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t skip = (page - (uintptr_t)tensor->data % page) % page; /* to a page's begin */
    if (tensor->bytes <= skip) return;
    /* madvise takes a plain pointer although it writes nothing. */
    union {
        const uint8_t *read_only;
        void *any;
    } first = {.read_only = tensor->data + skip};
    const size_t whole_pages = (size_t)(tensor->bytes - skip) / page * page;
    /* The pages are file-backed and clean, so failure costs memory, nothing else. */
    if (whole_pages > 0) (void)madvise(first.any, whole_pages, MADV_DONTNEED);
}
