/* inspect.c - `bitdelta inspect`: a report as text or JSON. Headers are always checked; checksums
 * with --verify. Threads: the caller's. */
#include "bitdelta/tools/inspect.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/delta/delta.h"
#include "bitdelta/hf/checkpoint.h"

#define PATH_BYTES 4096u

typedef struct report {
    const char *path;
    bool verify, json;
    FILE *out;
    bd_strbuf
        text; /* the whole report: printed once, so that a fault half-way leaves no half of JSON */
} report;

static void put_string(bd_strbuf *b, const char *key, const char *value) {
    bd_strbuf_printf(b, "\"%s\":", key);
    bd_strbuf_json_string(b, value, strlen(value));
}

static void put_shape(bd_strbuf *b, const uint64_t *shape, uint32_t rank, const char *between) {
    bd_strbuf_puts(b, "[");
    for (uint32_t i = 0; i < rank; i++) {
        bd_strbuf_printf(b, "%s%llu", i ? between : "", (unsigned long long)shape[i]);
    }
    bd_strbuf_puts(b, "]");
}

static bd_status print_report(report *r, bd_error *err) {
    bd_status status = BD_OK;
    if (r->text.failed) {
        status = bd_fail(err, BD_E_MEMORY, r->path, "out of memory for the report");
    } else if (fputs(r->text.data, r->out) == EOF || fflush(r->out) != 0) {
        status = bd_fail(err, BD_E_IO, NULL, "cannot write the report");
    }
    return status;
}

/* ---- a delta --------------------------------------------------------------------------------- */

typedef struct delta_report {
    report *r;
    bd_delta delta;
    uint64_t file_bytes, model_bytes; /* model_bytes: the same tensors in bf16 */
    uint64_t sign_count, full_count;
    bd_status status; /* first fault of any shard */
    bd_error fault;
} delta_report;

static uint64_t bf16_bytes(const bd_delta_entry *e) {
    uint64_t bytes =
        2; /* the manifest was read with 8 bytes per element, so this cannot overflow */
    for (uint32_t i = 0; i < e->rank; i++)
        bytes *= e->shape[i];
    return bytes;
}

static void check_shard(delta_report *d, uint32_t index, bd_error *fault) {
    bd_safetensors *file = NULL;
    bd_error_clear(fault);
    bd_status status = bd_delta_open_shard(&d->delta, index, false, &file, fault);
    bd_safetensors_close(file);
    /* Sums first where asked for: they say which bytes are wrong, not what that did to the header.
     */
    if (d->r->verify) {
        bd_error sums;
        bd_error_clear(&sums);
        const bd_status summed = bd_delta_verify_shard(&d->delta, index, &sums);
        if (summed != BD_OK) {
            status = summed;
            *fault = sums;
        }
    }
    if (status != BD_OK && d->status == BD_OK) {
        d->status = status;
        d->fault = *fault;
    }
    fault->status = status;
}

static void file_line(delta_report *d, uint32_t index) {
    const bd_delta_file *f = &d->delta.files[index];
    bd_strbuf *b = &d->r->text;
    bd_error fault;
    check_shard(d, index, &fault);
    const char *state = fault.status != BD_OK ? fault.message
                        : d->r->verify        ? "verified"
                                              : "header checked";
    if (!d->r->json) {
        bd_strbuf_printf(b, "  %-30s %14llu bytes  %u chunk sum%s  %s\n", f->name,
                         (unsigned long long)f->bytes, f->chunk_count, bd_plural(f->chunk_count),
                         state);
        return;
    }
    bd_strbuf_puts(b, index ? ",{" : "{");
    put_string(b, "name", f->name);
    bd_strbuf_printf(b, ",\"bytes\":%llu,", (unsigned long long)f->bytes);
    put_string(b, "sha256", f->sha256);
    bd_strbuf_printf(b, ",\"chunk_bytes\":%llu,\"chunks\":%u,\"ok\":%s",
                     (unsigned long long)f->chunk_bytes, f->chunk_count,
                     fault.status == BD_OK ? "true" : "false");
    if (fault.status != BD_OK) {
        bd_strbuf_puts(b, ",");
        put_string(b, "fault", fault.message);
    }
    bd_strbuf_puts(b, "}");
}

static void entry_line(delta_report *d, uint32_t index) {
    const bd_delta_entry *e = &d->delta.entries[index];
    const char *kind = e->kind == BD_DELTA_SIGN ? "sign" : "full";
    bd_strbuf *b = &d->r->text;
    if (!d->r->json) {
        bd_strbuf_printf(b, "  %s  %-52s ", kind, e->name);
        put_shape(b, e->shape, e->rank, ", ");
        if (e->extra_rows)
            bd_strbuf_printf(b, " + %llu row%s", (unsigned long long)e->extra_rows,
                             bd_plural(e->extra_rows));
        bd_strbuf_puts(b, "\n");
        return;
    }
    bd_strbuf_puts(b, index ? ",{" : "{");
    put_string(b, "name", e->name);
    bd_strbuf_printf(b, ",\"kind\":\"%s\",\"shape\":", kind);
    put_shape(b, e->shape, e->rank, ",");
    bd_strbuf_printf(b, ",\"extra_rows\":%llu}", (unsigned long long)e->extra_rows);
}

static void digest_text(const bd_delta *delta, char hex[65]) {
    for (uint32_t i = 0; i < sizeof delta->digest; i++)
        (void)snprintf(hex + (size_t)2 * i, 3, "%02x", delta->digest[i]);
}

static void delta_json(delta_report *d) {
    bd_strbuf *b = &d->r->text;
    const bd_delta *delta = &d->delta;
    char digest[65];
    digest_text(delta, digest);
    bd_strbuf_puts(b, "{\"kind\":\"delta\",");
    put_string(b, "variant", delta->variant);
    bd_strbuf_puts(b, ",");
    put_string(b, "base", delta->base);
    bd_strbuf_puts(b, ",");
    put_string(b, "base_fingerprint", delta->base_fingerprint);
    bd_strbuf_puts(b, ",");
    put_string(b, "digest", digest);
    bd_strbuf_printf(b, ",\"bits\":%u,\"scale\":\"%s\",\"embeddings\":\"%s\",\"shards\":%u",
                     delta->bits, delta->scale, delta->embeddings, delta->shard_count);
    bd_strbuf_printf(b,
                     ",\"tensors_sign\":%llu,\"tensors_full\":%llu,\"bytes\":%llu,\"model_bytes\":%"
                     "llu,\"files\":[",
                     (unsigned long long)d->sign_count, (unsigned long long)d->full_count,
                     (unsigned long long)d->file_bytes, (unsigned long long)d->model_bytes);
    for (uint32_t i = 0; i < delta->shard_count; i++)
        file_line(d, i);
    bd_strbuf_puts(b, "],\"tensors\":[");
    for (uint32_t i = 0; i < delta->entry_count; i++)
        entry_line(d, i);
    bd_strbuf_printf(b, "],\"verified\":%s,\"ok\":%s}\n",
                     d->r->verify && d->status == BD_OK ? "true" : "false",
                     d->status == BD_OK ? "true" : "false");
}

static void delta_text(delta_report *d) {
    bd_strbuf *b = &d->r->text;
    const bd_delta *delta = &d->delta;
    char digest[65];
    digest_text(delta, digest);
    bd_strbuf_printf(
        b, "delta        %s\nvariant      %s\nbase         %s\nfingerprint  %s\ndigest       %s\n",
        delta->dir, delta->variant, delta->base, delta->base_fingerprint, digest);
    bd_strbuf_printf(b, "coding       %u bit%s, scale per %s, embeddings %s, %u shard%s\n",
                     delta->bits, delta->bits == 1 ? "" : "s", delta->scale, delta->embeddings,
                     delta->shard_count, delta->shard_count == 1 ? "" : "s");
    bd_strbuf_printf(b, "tensors      %llu by sign, %llu in full\n",
                     (unsigned long long)d->sign_count, (unsigned long long)d->full_count);
    bd_strbuf_printf(b, "size         %llu bytes; the same tensors in bf16: %llu (1/%.1f)\nfiles\n",
                     (unsigned long long)d->file_bytes, (unsigned long long)d->model_bytes,
                     d->file_bytes ? (double)d->model_bytes / (double)d->file_bytes : 0.0);
    for (uint32_t i = 0; i < delta->shard_count; i++)
        file_line(d, i);
    bd_strbuf_puts(b, "tensors\n");
    for (uint32_t i = 0; i < delta->entry_count; i++)
        entry_line(d, i);
}

static bd_status inspect_delta(report *r, const char *dir, bd_error *err) {
    delta_report d = {.r = r};
    bd_status status = bd_delta_open(dir, &d.delta, err);
    if (status != BD_OK) return status;
    for (uint32_t i = 0; i < d.delta.shard_count; i++)
        d.file_bytes += d.delta.files[i].bytes;
    for (uint32_t i = 0; i < d.delta.entry_count; i++) {
        const bd_delta_entry *e = &d.delta.entries[i];
        d.model_bytes += bf16_bytes(e);
        if (e->kind == BD_DELTA_SIGN) d.sign_count++;
        if (e->kind == BD_DELTA_FULL) d.full_count++;
    }
    if (r->json) {
        delta_json(&d);
    } else {
        delta_text(&d);
    }
    bd_delta_close(&d.delta);
    status = print_report(r, err);
    if (status == BD_OK && d.status != BD_OK) {
        status = d.status;
        if (err) *err = d.fault;
    }
    return status;
}

/* What has no checksums is not called verified, nor passed over in silence. */
static void begin_tensors(report *r, uint32_t count) {
    if (r->verify)
        bd_strbuf_puts(&r->text, r->json ? "\"verified\":false,\"checksums\":0,"
                                         : "checksums    none: there is nothing to verify by\n");
    if (r->json)
        bd_strbuf_puts(&r->text, "\"tensors\":[");
    else
        bd_strbuf_printf(&r->text, "tensors      %u\n", count);
}

/* ---- tensors of a file or a model ------------------------------------------------------------ */

static void tensor_line(report *r, const bd_tensor *t, bool first) {
    bd_strbuf *b = &r->text;
    if (r->json) {
        bd_strbuf_puts(b, first ? "{" : ",{");
        put_string(b, "name", t->name);
        bd_strbuf_printf(b, ",\"dtype\":\"%s\",\"shape\":", t->dtype_name);
        put_shape(b, t->shape, t->rank, ",");
        bd_strbuf_printf(b, ",\"bytes\":%llu}", (unsigned long long)t->bytes);
        return;
    }
    bd_strbuf_printf(b, "  %-8s %14llu  %-52s ", t->dtype_name, (unsigned long long)t->bytes,
                     t->name);
    put_shape(b, t->shape, t->rank, ", ");
    bd_strbuf_puts(b, "\n");
}

static bd_status inspect_file(report *r, bd_error *err) {
    bd_safetensors *file = NULL;
    bd_status status = bd_safetensors_open(r->path, false, &file, err);
    if (status != BD_OK) return status;
    const uint32_t count = bd_safetensors_count(file);
    const unsigned long long bytes = bd_safetensors_file_bytes(file);
    if (r->json) {
        bd_strbuf_printf(&r->text, "{\"kind\":\"safetensors\",\"bytes\":%llu,", bytes);
    } else {
        bd_strbuf_printf(&r->text, "safetensors  %s\nsize         %llu bytes\n", r->path, bytes);
    }
    begin_tensors(r, count);
    for (uint32_t i = 0; i < count; i++)
        tensor_line(r, bd_safetensors_at(file, i), i == 0);
    if (r->json) bd_strbuf_puts(&r->text, "],\"ok\":true}\n");
    bd_safetensors_close(file);
    return print_report(r, err);
}

static bd_status inspect_model(report *r, bd_error *err) {
    char fingerprint[65];
    bd_checkpoint *c = NULL;
    bd_status status = bd_checkpoint_open(r->path, &c, err);
    if (status != BD_OK) return status;
    if ((status = bd_checkpoint_fingerprint(c, fingerprint, err)) != BD_OK) goto done;
    const uint32_t count = bd_checkpoint_count(c), files = bd_checkpoint_file_count(c);
    const unsigned long long bytes = bd_checkpoint_bytes(c);
    if (r->json) {
        bd_strbuf_printf(&r->text,
                         "{\"kind\":\"model\",\"fingerprint\":\"%s\",\"files\":%u,\"bytes\":%llu,",
                         fingerprint, files, bytes);
    } else {
        bd_strbuf_printf(
            &r->text,
            "model        %s\nfingerprint  %s\nsize         %llu bytes of tensors in %u file%s\n",
            r->path, fingerprint, bytes, files, bd_plural(files));
    }
    begin_tensors(r, count);
    for (uint32_t i = 0; i < count; i++)
        tensor_line(r, bd_checkpoint_at(c, i), i == 0);
    if (r->json) bd_strbuf_puts(&r->text, "],\"ok\":true}\n");
    status = print_report(r, err);
done:
    bd_checkpoint_close(c);
    return status;
}

/* ---- which of them --------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end) {
    const size_t text_len = strlen(text), end_len = strlen(end);
    return text_len >= end_len && strcmp(text + text_len - end_len, end) == 0;
}

static bool has_file(const char *dir, const char *name) {
    char path[PATH_BYTES];
    return bd_path_join(path, sizeof path, dir, name, NULL) == BD_OK && bd_file_exists(path);
}

static bd_status inspect_directory(report *r, bd_error *err) {
    char path[PATH_BYTES];
    const bd_status status = bd_path_join(path, sizeof path, r->path, "delta.json", err);
    if (status != BD_OK) return status;
    if (bd_file_exists(path)) return inspect_delta(r, r->path, err);
    if (!has_file(r->path, "model.safetensors") &&
        !has_file(r->path, "model.safetensors.index.json"))
        return bd_fail(err, BD_E_NOT_FOUND, r->path,
                       "%s is neither a delta nor a model: it has no delta.json, no "
                       "model.safetensors and no model.safetensors.index.json",
                       r->path);
    return inspect_model(r, err);
}

/* delta.json itself stands for its directory. */
static bd_status inspect_manifest(report *r, bd_error *err) {
    char dir[PATH_BYTES];
    const size_t len = strlen(r->path) - strlen("delta.json");
    (void)snprintf(dir, sizeof dir, "%.*s", len ? (int)len : 1, len ? r->path : ".");
    return inspect_delta(r, dir, err);
}

bd_status bd_inspect_run(const char *path, bool verify, bool json, FILE *out, bd_error *err) {
    report r = {.path = path, .verify = verify, .json = json, .out = out};
    bd_strbuf_init(&r.text, 0);
    struct stat info;
    bd_status status;
    if (stat(path, &info) != 0) {
        status = errno == ENOENT
                     ? bd_fail(err, BD_E_NOT_FOUND, path, "%s does not exist", path)
                     : bd_fail_errno(err, BD_E_IO, path, errno, "%s cannot be reached", path);
    } else if (S_ISDIR(info.st_mode)) {
        status = inspect_directory(&r, err);
    } else if (ends_with(path, "/delta.json") || strcmp(path, "delta.json") == 0) {
        status = inspect_manifest(&r, err);
    } else {
        status = inspect_file(&r, err);
    }
    bd_strbuf_deinit(&r.text);
    return status;
}
