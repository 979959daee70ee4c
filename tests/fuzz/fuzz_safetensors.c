/* fuzz_safetensors.c - any bytes as a safetensors file. Mapped and header-only reading agree; what
 * is accepted lies inside the file. The input is tried as it is and with its length prefix set to
 * where the last '}' is, so that edits of the header need not hit the prefix too. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "bitdelta/hf/safetensors.h"

enum { PREFIX_BYTES = 8 };

static void use_floats(const bd_tensor *tensor) {
    const size_t width = bd_dtype_bytes(tensor->dtype);
    if (width == 0 || tensor->dtype == BD_DTYPE_U8) return;
    BD_ASSERT(tensor->bytes % width == 0);
    const size_t count = (size_t)tensor->bytes / width;
    float *values = malloc((count + 1) * sizeof *values);
    BD_ASSERT(values);
    bd_tensor_to_f32(tensor, 0, count, values);
    if (count > 1) bd_tensor_to_f32(tensor, count - 1, 1, values);
    fuzz_read(values, count * sizeof *values);
    free(values);
}

static void check_file(const bd_safetensors *file, bool mapped, size_t bytes) {
    BD_ASSERT(bd_safetensors_file_bytes(file) == bytes);
    uint64_t at = bytes;
    for (uint32_t i = bd_safetensors_count(file); i > 0; i--) {
        const bd_tensor *tensor = bd_safetensors_at(file, i - 1);
        BD_ASSERT(tensor->bytes <= bytes && tensor->offset_bytes == at - tensor->bytes);
        at = tensor->offset_bytes;
        BD_ASSERT(tensor->rank <= BD_TENSOR_RANK_MAX);
        BD_ASSERT(bd_safetensors_find(file, tensor->name) == tensor);
        BD_ASSERT((tensor->data != NULL) == mapped);
        if (!mapped) continue;
        fuzz_read(tensor->data, (size_t)tensor->bytes);
        use_floats(tensor);
        bd_tensor_release(tensor);
    }
    BD_ASSERT(at >= PREFIX_BYTES);
}

static bd_status open_both(const void *data, size_t bytes) {
    bd_status status[2];
    const char *path = fuzz_memory_file(data, bytes);
    for (int mapped = 0; mapped < 2; mapped++) {
        bd_safetensors *file;
        bd_error err;
        bd_error_clear(&err);
        status[mapped] = bd_safetensors_open(path, mapped == 1, &file, &err);
        if (status[mapped] == BD_OK) {
            check_file(file, mapped == 1, bytes);
            bd_safetensors_close(file);
        } else {
            BD_ASSERT(!file);
            fuzz_check_error(status[mapped], &err);
        }
    }
    BD_ASSERT(status[0] == status[1]);
    return status[0];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (open_both(data, bytes) == BD_OK || bytes <= PREFIX_BYTES) return 0;
    const uint8_t *end = memrchr(data + PREFIX_BYTES, '}', bytes - PREFIX_BYTES);
    if (!end) return 0;
    uint8_t *fixed = malloc(bytes);
    BD_ASSERT(fixed);
    memcpy(fixed, data, bytes);
    const uint64_t header_bytes = (uint64_t)(end + 1 - data) - PREFIX_BYTES;
    for (unsigned i = 0; i < PREFIX_BYTES; i++)
        fixed[i] = (uint8_t)(header_bytes >> (8 * i));
    (void)open_both(fixed, bytes);
    free(fixed);
    return 0;
}
