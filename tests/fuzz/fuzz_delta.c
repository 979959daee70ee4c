/* fuzz_delta.c - any bytes as delta.json, then, behind a NUL byte, its first shard. What is
 * accepted keeps its promises, and an accepted shard holds every plane of every entry. */
#include "fuzz.h"

#include <stdio.h>
#include <string.h>

#include "bitdelta/delta/delta.h"

static bool is_lower_hex(const char *text, size_t digits) {
    return strlen(text) == digits && strspn(text, "0123456789abcdef") == digits;
}

static void check_entry(const bd_delta_entry *entry) {
    BD_ASSERT(entry->name[0] != '\0' && entry->rank <= BD_TENSOR_RANK_MAX);
    uint64_t product = 1;
    for (uint32_t i = 0; i < entry->rank; i++) {
        BD_ASSERT(entry->shape[i] > 0);
        BD_ASSERT(!__builtin_mul_overflow(product, entry->shape[i], &product));
    }
    if (entry->kind == BD_DELTA_SIGN) BD_ASSERT(entry->rank == 2 && entry->shape[1] % 8 == 0);
    if (entry->extra_rows > 0) BD_ASSERT(entry->rank == 2);
}

static void check_manifest(const bd_delta *delta) {
    BD_ASSERT(delta->variant[0] != '\0' && delta->base[0] != '\0');
    BD_ASSERT(is_lower_hex(delta->base_fingerprint, 64));
    BD_ASSERT(delta->bits >= 1 && delta->bits <= BD_PLANES_MAX);
    BD_ASSERT(delta->shard_count >= 1 && delta->shard_count <= BD_DELTA_SHARDS_MAX);
    for (uint32_t i = 0; i < delta->entry_count; i++)
        check_entry(&delta->entries[i]);
    for (uint32_t i = 0; i < delta->shard_count; i++) {
        const bd_delta_file *file = &delta->files[i];
        BD_ASSERT(file->name[0] != '\0' && file->name[0] != '.' && !strchr(file->name, '/'));
        BD_ASSERT(is_lower_hex(file->sha256, 64));
        fuzz_read(file->chunk_xxh3, file->chunk_count * sizeof *file->chunk_xxh3);
    }
}

static void check_planes(const bd_delta *delta, const bd_safetensors *shard) {
    char name[1024];
    for (uint32_t i = 0; i < delta->entry_count; i++) {
        const bd_delta_entry *entry = &delta->entries[i];
        if (entry->kind == BD_DELTA_FULL) {
            BD_ASSERT(bd_safetensors_find(shard, entry->name));
            continue;
        }
        for (uint32_t plane = 0; plane < 2 * delta->bits; plane++) {
            bd_delta_plane_name(name, sizeof name, entry->name, plane % 2 == 0, plane / 2);
            BD_ASSERT(bd_safetensors_find(shard, name));
        }
    }
}

static void use_shard(const bd_delta *delta, const fuzz_part *content) {
    const bd_delta_file *file = &delta->files[0];
    bd_error err;
    bd_safetensors *shard;
    bd_error_clear(&err);
    bd_status status = bd_delta_open_shard(delta, 0, true, &shard, &err);
    if (status == BD_OK) {
        check_planes(delta, shard);
        for (uint32_t i = 0; i < bd_safetensors_count(shard); i++) {
            const bd_tensor *tensor = bd_safetensors_at(shard, i);
            fuzz_read(tensor->data, (size_t)tensor->bytes);
        }
        bd_safetensors_close(shard);
    } else {
        BD_ASSERT(!shard);
        fuzz_check_error(status, &err);
    }
    bd_error_clear(&err);
    status = bd_delta_verify_shard(delta, 0, &err);
    if (status != BD_OK) fuzz_check_error(status, &err);
    if (file->chunk_count == 0) return;
    bd_error_clear(&err);
    status = bd_delta_check_chunk(delta, 0, 0, content->data, content->bytes, &err);
    if (status != BD_OK) fuzz_check_error(status, &err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    fuzz_part manifest, content;
    fuzz_split(data, bytes, &manifest, &content);
    fuzz_write("delta.json", manifest.data, manifest.bytes);
    bd_delta delta;
    bd_error err;
    bd_error_clear(&err);
    const bd_status status = bd_delta_open(fuzz_directory(), &delta, &err);
    if (status != BD_OK) {
        BD_ASSERT(!delta.storage);
        fuzz_check_error(status, &err);
        return 0;
    }
    check_manifest(&delta);
    if (content.present && content.bytes > 0) {
        fuzz_write(delta.files[0].name, content.data, content.bytes);
        use_shard(&delta, &content);
        fuzz_remove(delta.files[0].name);
    }
    bd_delta_close(&delta);
    return 0;
}
