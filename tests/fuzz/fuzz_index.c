/* fuzz_index.c - any bytes as model.safetensors.index.json of a checkpoint with two small files. */
#include "fuzz.h"

#include <stdio.h>
#include <string.h>

#include "bitdelta/hf/checkpoint.h"
#include "bitdelta/hf/json_text.h"

static void write_shard(const char *name, const char *tensor) {
    char file[256];
    const int length = snprintf(
        file + 8, sizeof file - 8,
        "{\"%s\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,8]}}12345678", tensor);
    BD_ASSERT(length > 8 && length - 8 < 256);
    memcpy(file, (const uint8_t[8]){(uint8_t)(length - 8)}, 8);
    fuzz_write(name, file, (size_t)length + 8);
}

/* Every name of an accepted index is a tensor of the file it names. */
static void check_names(const bd_checkpoint *checkpoint, const uint8_t *data, size_t bytes) {
    cJSON *root;
    BD_ASSERT(bd_json_parse((const char *)data, bytes, "index", &root, NULL) == BD_OK);
    const cJSON *item;
    cJSON_ArrayForEach(item, bd_json_member(root, "weight_map")) {
        const bd_tensor *tensor = bd_checkpoint_find(checkpoint, item->string);
        BD_ASSERT(tensor && cJSON_IsString(item));
        const char *path = bd_checkpoint_file_path(checkpoint, tensor->file_index);
        const char *slash = strrchr(path, '/');
        BD_ASSERT(slash && strcmp(slash + 1, item->valuestring) == 0);
    }
    cJSON_Delete(root);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static bool ready;
    if (!ready) {
        write_shard("a.safetensors", "a");
        write_shard("b.safetensors", "b");
        ready = true;
    }
    fuzz_write("model.safetensors.index.json", data, bytes);
    bd_checkpoint *checkpoint;
    bd_error err;
    bd_error_clear(&err);
    const bd_status status = bd_checkpoint_open(fuzz_directory(), &checkpoint, &err);
    if (status != BD_OK) {
        BD_ASSERT(!checkpoint);
        fuzz_check_error(status, &err);
        return 0;
    }
    const uint32_t count = bd_checkpoint_count(checkpoint);
    BD_ASSERT(count <= 2 && bd_checkpoint_file_count(checkpoint) <= 2);
    for (uint32_t i = 0; i < count; i++) {
        const bd_tensor *tensor = bd_checkpoint_at(checkpoint, i);
        BD_ASSERT(tensor->file_index < bd_checkpoint_file_count(checkpoint));
        BD_ASSERT(bd_checkpoint_find(checkpoint, tensor->name) == tensor);
        BD_ASSERT(bd_checkpoint_file_path(checkpoint, tensor->file_index)[0] != '\0');
        fuzz_read(tensor->data, (size_t)tensor->bytes);
    }
    BD_ASSERT(bd_checkpoint_bytes(checkpoint) == 8 * (uint64_t)count);
    check_names(checkpoint, data, bytes);
    char hex[65];
    BD_ASSERT(bd_checkpoint_fingerprint(checkpoint, hex, &err) == BD_OK && strlen(hex) == 64);
    bd_checkpoint_close(checkpoint);
    return 0;
}
