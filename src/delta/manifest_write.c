/* manifest_write.c - delta.json, byte for byte as Python's json.dump(..., indent=1) and a newline
 * write it, so that the same model gives the same file, and the same digest, whoever encodes it.
 * Threads: any. */
#include <stdio.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/delta/delta.h"
#include "bitdelta/hf/json_text.h"

#include "delta_internal.h"

#define PATH_BYTES 4096u

static void put_text(bd_strbuf *out, const char *key, const char *value) {
    bd_strbuf_printf(out, "%s", key);
    bd_json_put_ascii(out, value);
}

static void put_entry(bd_strbuf *out, const bd_delta_entry *e) {
    put_text(out, "  {\n   \"name\": ", e->name);
    put_text(out, ",\n   \"kind\": ", e->kind == BD_DELTA_SIGN ? "sign" : "full");
    bd_strbuf_puts(out, ",\n   \"shape\": [");
    for (uint32_t i = 0; i < e->rank; i++) {
        bd_strbuf_printf(out, "%s\n    %llu", i ? "," : "", (unsigned long long)e->shape[i]);
    }
    bd_strbuf_puts(out, e->rank ? "\n   ]" : "]");
    if (e->extra_rows > 0) {
        bd_strbuf_printf(out, ",\n   \"extra_rows\": %llu", (unsigned long long)e->extra_rows);
    }
    bd_strbuf_puts(out, "\n  }");
}

static void put_file(bd_strbuf *out, const bd_delta_file *f) {
    put_text(out, "  {\n   \"name\": ", f->name);
    bd_strbuf_printf(out, ",\n   \"bytes\": %llu", (unsigned long long)f->bytes);
    put_text(out, ",\n   \"sha256\": ", f->sha256);
    if (f->chunk_bytes > 0) {
        bd_strbuf_printf(out, ",\n   \"chunk_bytes\": %llu,\n   \"xxh3_64\": [",
                         (unsigned long long)f->chunk_bytes);
        for (uint32_t i = 0; i < f->chunk_count; i++) {
            bd_strbuf_printf(out, "%s\n    \"%016llx\"", i ? "," : "",
                             (unsigned long long)f->chunk_xxh3[i]);
        }
        bd_strbuf_puts(out, f->chunk_count ? "\n   ]" : "]");
    }
    bd_strbuf_puts(out, "\n  }");
}

static void put_manifest(bd_strbuf *out, const bd_delta *d) {
    put_text(out, "{\n \"format\": ", BD_DELTA_FORMAT);
    put_text(out, ",\n \"variant\": ", d->variant);
    put_text(out, ",\n \"base\": ", d->base);
    put_text(out, ",\n \"base_fingerprint\": ", d->base_fingerprint);
    bd_strbuf_printf(out, ",\n \"bits\": %u", d->bits);
    put_text(out, ",\n \"scale\": ", d->scale);
    bd_strbuf_printf(out, ",\n \"shards\": %u", d->shard_count);
    put_text(out, ",\n \"embeddings\": ", d->embeddings);
    bd_strbuf_puts(out, ",\n \"tensors\": [");
    for (uint32_t i = 0; i < d->entry_count; i++) {
        bd_strbuf_puts(out, i ? ",\n" : "\n");
        put_entry(out, &d->entries[i]);
    }
    bd_strbuf_puts(out, d->entry_count ? "\n ]" : "]");
    bd_strbuf_puts(out, ",\n \"files\": [");
    for (uint32_t i = 0; i < d->shard_count; i++) {
        bd_strbuf_puts(out, i ? ",\n" : "\n");
        put_file(out, &d->files[i]);
    }
    bd_strbuf_puts(out, d->shard_count ? "\n ]\n}\n" : "]\n}\n");
}

bd_status bd_delta_write_manifest(const bd_delta *delta, bd_error *err) {
    char path[PATH_BYTES];
    bd_status status = bd_path_join(path, sizeof path, delta->dir, BD_DELTA_MANIFEST_NAME, err);
    if (status != BD_OK) return status;
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    put_manifest(&text, delta);
    if (text.failed) {
        status = bd_fail(err, BD_E_MEMORY, path, "%s: out of memory", path);
    } else {
        status = bd_file_replace(path, text.data, text.len_bytes, err);
    }
    bd_strbuf_deinit(&text);
    return status;
}
