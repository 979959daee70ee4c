/* compress.c - `bitdelta compress`: checks what it is given, plans, writes the shard tensor by
 * tensor, hashes it, writes delta.json and the small files that differ, and lets the whole appear.
 * See compress.h. */
#include "bitdelta/tools/compress.h"

#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/tokenizer/tokenizer.h"
#include "bitdelta/tools/stop.h"

#include "compress_internal.h"

#define ALIGN_BYTES       4096u
#define PATH_BYTES        4096u
#define WRONG_BASE_CHANGE 0.5 /* median of mean |delta| / mean |base| above it: another base */
#define SIDE_FILES_MAX    8u

typedef struct run {
    const bd_compress_request *request;
    FILE *out, *notes;
    const char *scale, *embeddings;
    uint32_t planes;
    bd_checkpoint *base_files, *tuned_files;
    bd_compress_model base, tuned;
    bd_compress_plan plan;
    bd_pool *pool;
    bd_output_dir output;
    bd_delta delta; /* the manifest to be */
    bd_compress_files files;
    double *changes; /* [plan.count], of the sign-coded ones */
    uint32_t change_count;
    const char *side_files[SIDE_FILES_MAX]; /* to be copied from the fine-tune */
    uint32_t side_count;
    uint32_t shards;
    uint64_t delta_bytes; /* of all shards */
    bd_progress progress;
} run;

/* ---- what was asked for ---------------------------------------------------------------------- */

static bool is_one_of(const char *text, const char *const *choices) {
    while (*choices && strcmp(*choices, text) != 0)
        choices++;
    return *choices != NULL;
}

/* The last part of a path, without trailing slashes. */
static void last_part(const char *path, char *out, size_t out_bytes) {
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/')
        end--;
    size_t first = end;
    while (first > 0 && path[first - 1] != '/')
        first--;
    (void)snprintf(out, out_bytes, "%.*s", (int)(end - first), path + first);
}

static bd_status set_name(char *to, const char *given, const char *path, const char *what,
                          const char *option, bd_error *err) {
    char name[BD_VARIANT_NAME_MAX + 2];
    if (given) {
        (void)snprintf(name, sizeof name, "%s", given);
    } else {
        last_part(path, name, sizeof name);
    }
    const char *fault = bd_variant_name_fault(name);
    if (fault)
        return bd_fail(err, BD_E_ARGUMENT, what, "the %s \"%s\" %s%s%s", what, name, fault,
                       given ? "" : "; give one with ", given ? "" : option);
    memcpy(to, name, strlen(name) + 1);
    return BD_OK;
}

static bd_status check_request(run *r, bd_error *err) {
    static const char *const scales[] = {"row", "matrix", NULL};
    static const char *const embeddings[] = {"sign", "full", "base", NULL};
    const bd_compress_request *q = r->request;
    r->scale = q->scale ? q->scale : "row";
    r->embeddings = q->embeddings ? q->embeddings : "sign";
    r->planes = q->bits ? q->bits : 1;
    r->shards = q->shards ? q->shards : 1;
    if (!is_one_of(r->scale, scales))
        return bd_fail(err, BD_E_ARGUMENT, "scale", "--scale is neither row nor matrix");
    if (!is_one_of(r->embeddings, embeddings)) {
        return bd_fail(err, BD_E_ARGUMENT, "embeddings", "--embeddings is not sign, full or base");
    }
    if (r->planes > BD_PLANES_MAX)
        return bd_fail(err, BD_E_ARGUMENT, "bits", "--bits is not 1, 2, 3 or 4");
    if (r->shards > BD_COMPRESS_SHARDS_MAX || (r->shards & (r->shards - 1)) != 0)
        return bd_fail(err, BD_E_ARGUMENT, "shards", "--shards is not 1, 2, 4 or 8");
    bd_status status =
        set_name(r->delta.base, q->base_name, q->base_dir, "base name", "--base-name", err);
    if (status == BD_OK)
        status = set_name(r->delta.variant, q->variant_name, q->out_dir, "variant name",
                          "--variant", err);
    if (status == BD_OK) status = bd_output_check(q->out_dir, q->force, &r->output, err);
    if (status == BD_OK && strcmp(r->delta.base, r->delta.variant) == 0)
        status = bd_fail(err, BD_E_ARGUMENT, "variant name",
                         "the variant would have the base's name, %s, and a server of that base "
                         "refuse it; give another with --variant, or the base one with --base-name",
                         r->delta.base);
    return status;
}

/* ---- the two models -------------------------------------------------------------------------- */

static bool has_file(const char *dir, const char *name) {
    char path[PATH_BYTES];
    return bd_path_join(path, sizeof path, dir, name, NULL) == BD_OK && bd_file_exists(path);
}

static bd_status read_config(bd_compress_model *model, const char *dir, bd_error *err) {
    model->has_config = has_file(dir, "config.json");
    return model->has_config ? bd_model_config_read(dir, &model->config, err) : BD_OK;
}

/* Before anything big is read. */
static bd_status check_configs(run *r, bd_error *err) {
    if (!r->base.has_config || !r->tuned.has_config) return BD_OK;
    char path[PATH_BYTES];
    bd_status status =
        bd_path_join(path, sizeof path, r->request->finetuned_dir, "config.json", err);
    if (status != BD_OK) return status;
    return bd_model_config_check_variant(&r->base.config, &r->tuned.config, path, err);
}

static bd_status open_models(run *r, bd_error *err) {
    const bd_compress_request *q = r->request;
    bd_status status = read_config(&r->base, q->base_dir, err);
    if (status == BD_OK) status = read_config(&r->tuned, q->finetuned_dir, err);
    if (status == BD_OK) status = check_configs(r, err);
    if (status == BD_OK) status = bd_checkpoint_open(q->base_dir, &r->base_files, err);
    if (status == BD_OK) status = bd_checkpoint_open(q->finetuned_dir, &r->tuned_files, err);
    r->base.checkpoint = r->base_files;
    r->tuned.checkpoint = r->tuned_files;
    return status;
}

static bd_status make_plan(run *r, bd_error *err) {
    const bd_embeddings embeddings = strcmp(r->embeddings, "full") == 0   ? BD_EMBEDDINGS_FULL
                                     : strcmp(r->embeddings, "base") == 0 ? BD_EMBEDDINGS_BASE
                                                                          : BD_EMBEDDINGS_SIGN;
    bd_status status = bd_compress_check_shards(&r->base, r->shards, err);
    if (status == BD_OK)
        status = bd_compress_plan_make(&r->base, &r->tuned, embeddings, r->planes, r->shards,
                                       &r->plan, err);
    if (status != BD_OK) return status;
    r->changes = calloc((size_t)r->plan.count + 1, sizeof *r->changes);
    if (!r->changes) return bd_fail(err, BD_E_MEMORY, NULL, "out of memory");
    for (uint32_t i = 0; i < r->shards && status == BD_OK; i++) {
        uint64_t bytes = 0;
        status = bd_safetensors_measure(r->plan.tensors + (size_t)i * r->plan.tensor_max,
                                        r->plan.tensor_count, ALIGN_BYTES, &bytes, err);
        r->delta_bytes += bytes;
    }
    return status;
}

/* ---- the small files ------------------------------------------------------------------------- */

static bd_status same_file(const char *a_dir, const char *b_dir, const char *name, bool *same,
                           bd_error *err) {
    char a_path[PATH_BYTES], b_path[PATH_BYTES];
    bd_mapped_file a = {.fd = -1}, b = {.fd = -1};
    bd_status status = bd_path_join(a_path, sizeof a_path, a_dir, name, err);
    if (status == BD_OK) status = bd_path_join(b_path, sizeof b_path, b_dir, name, err);
    if (status == BD_OK) status = bd_file_map(a_path, &a, err);
    if (status == BD_OK) status = bd_file_map(b_path, &b, err);
    *same = status == BD_OK && a.bytes == b.bytes &&
            (a.bytes == 0 || memcmp(a.data, b.data, a.bytes) == 0);
    bd_file_unmap(&a);
    bd_file_unmap(&b);
    return status;
}

/* A variant whose tokenizer cannot be used is one that no server takes: found out before anything
 * is written. */
static bd_status check_tokenizer(const run *r, bd_error *err) {
    char path[PATH_BYTES];
    bd_tokenizer *tokenizer = NULL;
    bd_status status =
        bd_path_join(path, sizeof path, r->request->finetuned_dir, "tokenizer.json", err);
    for (uint32_t i = 0; i < r->side_count && status == BD_OK; i++)
        if (strcmp(r->side_files[i], "tokenizer.json") == 0)
            status = bd_tokenizer_load(&tokenizer, path, err);
    bd_tokenizer_destroy(tokenizer);
    return status;
}

static bd_status choose_side_files(run *r, bd_error *err) {
    static const char *const names[] = {"tokenizer.json",         "tokenizer_config.json",
                                        "generation_config.json", "chat_template.jinja",
                                        "chat_template.json",     "config.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        bool same = false;
        if (!has_file(r->request->finetuned_dir, names[i])) continue;
        if (has_file(r->request->base_dir, names[i])) {
            const bd_status status =
                same_file(r->request->finetuned_dir, r->request->base_dir, names[i], &same, err);
            if (status != BD_OK) return status;
        }
        /* Of config.json only the fields that matter to a variant count, not, say, the version that
         * wrote it. */
        const bool config = strcmp(names[i], "config.json") == 0;
        if (config && r->base.has_config &&
            !bd_model_config_variant_differs(&r->base.config, &r->tuned.config))
            same = true;
        if (!same) r->side_files[r->side_count++] = names[i];
    }
    return BD_OK;
}

/* ---- the shards ------------------------------------------------------------------------------ */

static bd_status write_item(run *r, const bd_compress_item *item, bd_error *err) {
    const bool matrix = strcmp(r->scale, "matrix") == 0, sign = item->kind == BD_DELTA_SIGN;
    bd_compress_planes planes = {0};
    bd_status status = bd_stop_check(r->output.path, err);
    if (status == BD_OK && sign)
        status = bd_compress_encode(r->pool, item, r->planes, matrix, &planes, err);
    if (status != BD_OK) return status;
    status = bd_compress_files_put(&r->files, item, &planes, r->planes, err);
    if (sign) r->changes[r->change_count++] = planes.relative_change;
    bd_compress_planes_free(&planes);
    bd_tensor_release(&item->base);
    bd_tensor_release(&item->tuned);
    bd_progress_add(&r->progress, item->base.bytes + item->tuned.bytes, item->name);
    return status;
}

static bd_status write_shards(run *r, bd_error *err) {
    bd_status status =
        bd_compress_files_open(&r->files, &r->plan, r->output.temporary, ALIGN_BYTES, err);
    bd_progress_begin(&r->progress, r->notes, r->request->json, r->plan.input_bytes);
    for (uint32_t i = 0; i < r->plan.count && status == BD_OK; i++)
        status = write_item(r, &r->plan.items[i], err);
    return status == BD_OK ? bd_compress_files_finish(&r->files, r->output.temporary, err) : status;
}

static bd_status write_manifest(run *r, bd_error *err) {
    bd_delta *d = &r->delta;
    (void)snprintf(d->dir, sizeof d->dir, "%s", r->output.temporary);
    (void)snprintf(d->embeddings, sizeof d->embeddings, "%s", r->embeddings);
    (void)snprintf(d->scale, sizeof d->scale, "%s", r->scale);
    d->bits = r->planes;
    d->shard_count = r->shards;
    d->entry_count = r->plan.count;
    d->entries = r->plan.entries;
    d->files = r->files.files;
    return bd_delta_write_manifest(d, err);
}

/* ---- is it the right base? ------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
    const double *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

static double median_change(run *r) {
    const uint32_t n = r->change_count;
    if (n == 0) return 0.0;
    qsort(r->changes, n, sizeof *r->changes, by_value);
    return n % 2 ? r->changes[n / 2] : (r->changes[n / 2 - 1] + r->changes[n / 2]) / 2.0;
}

static bd_status check_base_fits(run *r, double change, bd_error *err) {
    if (!(change > WRONG_BASE_CHANGE)) return BD_OK;
    if (r->request->force) {
        if (r->notes) {
            (void)fprintf(
                r->notes,
                "%swarning: the weights differ from the base's by %.0f%% of their size%s\n",
                r->request->json ? "{\"event\":\"warning\",\"text\":\"" : "", 100.0 * change,
                r->request->json ? "\"}" : "");
        }
        return BD_OK;
    }
    return bd_fail(err, BD_E_MISMATCH, r->request->base_dir,
                   "%s does not seem to be the base of %s: the weights differ by %.0f%% of their "
                   "size (--force overrides)",
                   r->request->base_dir, r->request->finetuned_dir, 100.0 * change);
}

/* ---- the result ------------------------------------------------------------------------------ */

static uint32_t count_kind(const run *r, bd_delta_kind kind) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < r->plan.count; i++)
        count += r->plan.items[i].kind == kind;
    return count;
}

static void put_pair(bd_strbuf *out, const char *key, const char *value) {
    bd_strbuf_printf(out, ",\"%s\":", key);
    bd_strbuf_json_string(out, value, strlen(value));
}

static void report_json(const run *r, double change) {
    bd_strbuf b;
    bd_strbuf_init(&b, 0);
    bd_strbuf_printf(&b, "{\"dry_run\":%s", r->request->dry_run ? "true" : "false");
    put_pair(&b, "out", r->output.path);
    put_pair(&b, "variant", r->delta.variant);
    put_pair(&b, "base", r->delta.base);
    put_pair(&b, "base_fingerprint", r->delta.base_fingerprint);
    put_pair(&b, "scale", r->scale);
    put_pair(&b, "embeddings", r->embeddings);
    bd_strbuf_printf(
        &b,
        ",\"bits\":%u,\"shards\":%u,\"tensors_sign\":%u,\"tensors_full\":%u,\"tensors_equal\":%u",
        r->planes, r->shards, count_kind(r, BD_DELTA_SIGN), count_kind(r, BD_DELTA_FULL),
        r->plan.equal_count);
    bd_strbuf_printf(&b, ",\"model_bytes\":%llu,\"delta_bytes\":%llu",
                     (unsigned long long)bd_checkpoint_bytes(r->tuned_files),
                     (unsigned long long)r->delta_bytes);
    if (!r->request->dry_run) {
        bd_strbuf_printf(&b, ",\"median_relative_change\":%.6g,\"seconds\":%.3f", change,
                         bd_progress_seconds(&r->progress));
    }
    bd_strbuf_puts(&b, ",\"copied\":[");
    for (uint32_t i = 0; i < r->side_count; i++) {
        bd_strbuf_printf(&b, "%s\"%s\"", i ? "," : "", r->side_files[i]);
    }
    bd_strbuf_puts(&b, "]}\n");
    if (!b.failed) (void)fputs(b.data, r->out);
    bd_strbuf_deinit(&b);
}

static void report_text(const run *r, FILE *to, double change) {
    const double model = (double)bd_checkpoint_bytes(r->tuned_files),
                 delta = (double)r->delta_bytes;
    (void)fprintf(
        to, "%s%s: %u tensor%s by sign (%u bit%s, scale per %s), %u in full, %u as in the base\n",
        r->request->dry_run ? "would write " : "", r->output.path, count_kind(r, BD_DELTA_SIGN),
        bd_plural(count_kind(r, BD_DELTA_SIGN)), r->planes, bd_plural(r->planes), r->scale,
        count_kind(r, BD_DELTA_FULL), r->plan.equal_count);
    (void)fprintf(to, "%llu bytes for a model of %llu (1/%.1f)", (unsigned long long)r->delta_bytes,
                  (unsigned long long)bd_checkpoint_bytes(r->tuned_files),
                  delta > 0.0 ? model / delta : 0.0);
    if (!r->request->dry_run) {
        (void)fprintf(to, "; weights changed by %.1f%% (median); %.1f s", 100.0 * change,
                      bd_progress_seconds(&r->progress));
    }
    (void)fputc('\n', to);
    for (uint32_t i = 0; i < r->side_count; i++) {
        (void)fprintf(to, "%s %s\n", r->request->dry_run ? "would copy" : "copied",
                      r->side_files[i]);
    }
}

static void report_table(const run *r) {
    uint32_t t = 0;
    for (uint32_t i = 0; i < r->plan.count; i++) {
        const bd_compress_item *item = &r->plan.items[i];
        const bool sign = item->kind == BD_DELTA_SIGN, table = bd_compress_is_embedding(item->name);
        const uint64_t rows = item->base.shape[0], cols = item->base.shape[1];
        uint64_t bytes = item->extra_rows * 2 * cols;
        bytes += sign    ? r->planes * rows * (cols / 8 + 4)
                 : table ? rows * cols * 2
                         : item->tuned.bytes;
        (void)fprintf(r->out, "%-6s %12llu -> %10llu  %s\n", sign ? "sign" : "full",
                      (unsigned long long)item->tuned.bytes, (unsigned long long)bytes, item->name);
        t++;
    }
    if (t == 0) (void)fputs("nothing to store: the models are equal\n", r->out);
}

/* ---- the run --------------------------------------------------------------------------------- */

static bd_status write_all(run *r, bd_error *err) {
    bd_status status = bd_pool_create(&r->pool, r->request->threads, "bd-comp", err);
    if (status != BD_OK) return status;
    if ((status = bd_output_begin(&r->output, r->delta_bytes + (1u << 20), err)) != BD_OK)
        return status;
    if ((status = write_shards(r, err)) != BD_OK) return status;
    const double change = median_change(r);
    if ((status = check_base_fits(r, change, err)) != BD_OK) return status;
    if ((status = bd_output_copy(&r->output, r->request->finetuned_dir, r->side_files,
                                 r->side_count, err)) != BD_OK)
        return status;
    if ((status = write_manifest(r, err)) != BD_OK) return status;
    if ((status = bd_output_commit(&r->output, err)) != BD_OK) return status;
    if (r->request->json) {
        report_json(r, change);
    } else if (r->notes) {
        report_text(r, r->notes, change);
    }
    return BD_OK;
}

static void clean_up(run *r) {
    bd_output_abort(&r->output);
    bd_pool_destroy(r->pool);
    bd_compress_plan_free(&r->plan);
    bd_checkpoint_close(r->base_files);
    bd_checkpoint_close(r->tuned_files);
    bd_compress_files_free(&r->files);
    free(r->changes);
}

bd_status bd_compress_run(const bd_compress_request *request, FILE *out, FILE *progress,
                          bd_error *err) {
    run r = {.request = request, .out = out, .notes = progress, .output = {.lock_fd = -1}};
    bd_status status = check_request(&r, err);
    if (status == BD_OK) status = open_models(&r, err);
    if (status == BD_OK) status = make_plan(&r, err);
    if (status == BD_OK) status = choose_side_files(&r, err);
    if (status == BD_OK) status = check_tokenizer(&r, err);
    if (status == BD_OK)
        status = bd_checkpoint_fingerprint(r.base_files, r.delta.base_fingerprint, err);
    if (status == BD_OK && request->dry_run) {
        if (request->json) {
            report_json(&r, 0.0);
        } else {
            report_table(&r);
            report_text(&r, out, 0.0);
        }
    } else if (status == BD_OK) {
        status = write_all(&r, err);
    }
    clean_up(&r);
    return status;
}
