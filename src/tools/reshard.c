/* reshard.c - `bitdelta reshard`: the old files mapped, the new ones written side by side, entry by
 * entry. Which rows and columns go where is slices.h's to say. See reshard.h. */
#include "bitdelta/tools/reshard.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/delta/slices.h"
#include "bitdelta/tools/stop.h"

#include "compress_internal.h"

#define ALIGN_BYTES  4096u
#define PATH_BYTES   4096u
#define NAME_BYTES   700u
#define GATHER_BYTES (1u << 20) /* of rows put together, before they are written */

typedef struct run {
    const bd_reshard_request *request;
    FILE *out, *notes;
    bd_delta delta; /* as it was */
    bd_safetensors *files[BD_DELTA_SHARDS_MAX];
    uint32_t kv_heads;
    bd_compress_plan plan; /* of the new files: shards and tensors */
    bd_compress_files made;
    bd_output_dir output;
    bd_progress progress;
    uint64_t read_bytes, tensor_bytes, made_bytes; /* old files, what is in them, new files */
    uint8_t *gather;
    char **side_files; /* [side_count], owned */
    uint32_t side_count;
} run;

typedef struct part_of_entry { /* one tensor of an entry, wherever it lies */
    const bd_delta_entry *entry;
    bd_delta_tensor what;
    char name[NAME_BYTES];
} part_of_entry;

/* ---- may it be cut so? ----------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end) {
    const size_t text_len = strlen(text), end_len = strlen(end);
    return text_len >= end_len && strcmp(text + text_len - end_len, end) == 0;
}

/* Does config.json speak of the model that this delta was made for? Of its matrices, that is. */
static bd_status check_dims(const run *r, const bd_model_config *c, const char *dir,
                            bd_error *err) {
    const uint64_t q = (uint64_t)c->heads * c->head_dim, kv = (uint64_t)c->kv_heads * c->head_dim;
    const struct {
        const char *end;
        uint32_t dim;
        uint64_t value;
    } dims[] = {{"q_proj.weight", 0, q},         {"k_proj.weight", 0, kv},
                {"v_proj.weight", 0, kv},        {"o_proj.weight", 1, q},
                {"gate_proj.weight", 0, c->ffn}, {"up_proj.weight", 0, c->ffn},
                {"down_proj.weight", 1, c->ffn}};
    for (uint32_t i = 0; i < r->delta.entry_count; i++) {
        const bd_delta_entry *e = &r->delta.entries[i];
        for (size_t d = 0; d < sizeof dims / sizeof dims[0] && e->rank == 2; d++) {
            if (!ends_with(e->name, dims[d].end) || e->shape[dims[d].dim] == dims[d].value)
                continue;
            return bd_fail(err, BD_E_MISMATCH, e->name,
                           "%s/config.json is not of this delta's base: %s has %llu %s, by "
                           "config.json it would be %llu",
                           dir, e->name, (unsigned long long)e->shape[dims[d].dim],
                           dims[d].dim ? "columns" : "rows", (unsigned long long)dims[d].value);
        }
    }
    return BD_OK;
}

/* Fewer parts join what is there, and k and v tell by their rows how many parts they have. More
 * parts must end where heads end, which only config.json says. */
static bd_status find_heads(run *r, bd_error *err) {
    const uint32_t shards = r->request->shards;
    const char *dir = r->request->base_dir ? r->request->base_dir : r->request->delta_dir;
    bd_model_config config;
    char path[PATH_BYTES];
    if (shards <= r->delta.shard_count && !r->request->base_dir) {
        r->kv_heads = r->delta.shard_count;
        for (uint32_t i = 0; i < r->delta.entry_count; i++) {
            const bd_delta_entry *e = &r->delta.entries[i];
            char name[NAME_BYTES];
            if (!ends_with(e->name, "k_proj.weight") && !ends_with(e->name, "v_proj.weight"))
                continue;
            bd_delta_plane_name(name, sizeof name, e->name, true, 0);
            const bd_tensor *sign = bd_safetensors_find(r->files[0], name);
            if (sign && sign->shape[0] > 0) r->kv_heads = (uint32_t)(e->shape[0] / sign->shape[0]);
            break;
        }
        return BD_OK;
    }
    bd_status status = bd_path_join(path, sizeof path, dir, "config.json", err);
    if (status != BD_OK) return status;
    if (!r->request->base_dir && !bd_file_exists(path))
        return bd_fail(
            err, BD_E_ARGUMENT, "shards",
            "--shards %u of a delta of %u needs --base DIR, whose config.json says where "
            "heads end",
            shards, r->delta.shard_count);
    if ((status = bd_model_config_read(dir, &config, err)) != BD_OK) return status;
    if ((status = check_dims(r, &config, dir, err)) != BD_OK) return status;
    r->kv_heads = config.kv_heads;
    return bd_delta_check_parts(&config, shards, "--shards", "shards", err);
}

/* ---- the old files --------------------------------------------------------------------------- */

static bool is_shard_number(uint32_t n) {
    return n == 1 || n == 2 || n == 4 || n == 8;
}

static bd_status open_delta(run *r, bd_error *err) {
    const bd_reshard_request *q = r->request;
    if (!is_shard_number(q->shards))
        return bd_fail(err, BD_E_ARGUMENT, "shards", "--shards is not 1, 2, 4 or 8");
    bd_status status = bd_output_check(q->out_dir, q->force, &r->output, err);
    if (status == BD_OK) status = bd_delta_open(q->delta_dir, &r->delta, err);
    if (status != BD_OK) return status;
    if (!is_shard_number(r->delta.shard_count))
        return bd_fail(err, BD_E_UNSUPPORTED, q->delta_dir,
                       "%s: a delta of %u shards; those of 1, 2, 4 and 8 can be converted",
                       q->delta_dir, r->delta.shard_count);
    for (uint32_t i = 0; i < r->delta.shard_count && status == BD_OK; i++) {
        status = bd_delta_open_shard(&r->delta, i, true, &r->files[i], err);
        r->read_bytes += r->delta.files[i].bytes;
        for (uint32_t k = 0; status == BD_OK && k < bd_safetensors_count(r->files[i]); k++)
            r->tensor_bytes += bd_safetensors_at(r->files[i], k)->bytes;
    }
    return status;
}

/* New sums over damaged bytes would hide the damage for good. */
static bd_status verify(run *r, bd_error *err) {
    bd_status status = BD_OK;
    for (uint32_t i = 0; i < r->delta.shard_count && status == BD_OK; i++) {
        status = bd_delta_verify_shard(&r->delta, i, err);
        bd_progress_add(&r->progress, r->delta.files[i].bytes, r->delta.files[i].name);
    }
    return status;
}

/* ---- what an entry has in a file ------------------------------------------------------------- */

/* Tensor `index` of an entry in the order of the files; false past the last. */
static bool tensor_of(const run *r, const bd_delta_entry *e, uint32_t index, part_of_entry *out) {
    const uint32_t own = e->kind == BD_DELTA_SIGN ? 2 * r->delta.bits : 1;
    out->entry = e;
    if (index >= own) {
        out->what = BD_DELTA_TENSOR_EXTRA;
        (void)snprintf(out->name, sizeof out->name, "%s.extra", e->name);
        return index == own && e->extra_rows > 0;
    }
    if (e->kind == BD_DELTA_SIGN) {
        out->what = index % 2 ? BD_DELTA_TENSOR_SCALES : BD_DELTA_TENSOR_BITS;
        bd_delta_plane_name(out->name, sizeof out->name, e->name, index % 2 == 0, index / 2);
    } else {
        out->what = BD_DELTA_TENSOR_WHOLE;
        (void)snprintf(out->name, sizeof out->name, "%s", e->name);
    }
    return true;
}

/* Vectors, and matrices in full that are no table: whole in every file. */
static bool is_copied(const part_of_entry *t) {
    return t->what == BD_DELTA_TENSOR_WHOLE &&
           !(t->entry->rank == 2 && bd_delta_is_table(t->entry->name));
}

static size_t bytes_of(const part_of_entry *t, uint64_t elements) {
    switch (t->what) {
    case BD_DELTA_TENSOR_BITS:
        return (size_t)(elements / 8);
    case BD_DELTA_TENSOR_SCALES:
        return (size_t)elements * sizeof(float);
    case BD_DELTA_TENSOR_WHOLE:
    case BD_DELTA_TENSOR_EXTRA:
        break;
    }
    return (size_t)elements * bd_dtype_bytes(BD_DTYPE_BF16);
}

static bd_delta_cut cut_of(const run *r, uint32_t shard, uint32_t shards) {
    return (bd_delta_cut){
        .parts = shards, .part = shard, .shards = r->delta.shard_count, .kv_heads = r->kv_heads};
}

static bd_status not_cut(const run *r, const part_of_entry *t, bd_error *err) {
    return bd_fail(err, BD_E_ARGUMENT, "shards",
                   "--shards %u: tensor \"%s\" of a weight [%llu, %llu] cannot be cut evenly from "
                   "%u shards",
                   r->request->shards, t->name, (unsigned long long)t->entry->shape[0],
                   (unsigned long long)t->entry->shape[1], r->delta.shard_count);
}

/* Several files that hold the same must agree: sums tell only that each is as it was written. */
static bd_status check_copies(const run *r, const part_of_entry *t, bd_error *err) {
    const bd_tensor *before = bd_safetensors_find(r->files[0], t->name);
    bd_delta_part held = {0}, last = {0};
    for (uint32_t i = 0; i < r->delta.shard_count; i++) {
        const bd_delta_cut cut = cut_of(r, i, r->delta.shard_count);
        const bd_tensor *tensor = bd_safetensors_find(r->files[i], t->name);
        BD_ASSERT(tensor && before);
        if (!is_copied(t) && !bd_delta_cut_part(&cut, t->entry, t->what, &held))
            return not_cut(r, t, err);
        const bool same_part =
            i > 0 && held.first_row == last.first_row && held.first_col == last.first_col;
        if (same_part && (tensor->bytes != before->bytes ||
                          strcmp(tensor->dtype_name, before->dtype_name) != 0 ||
                          memcmp(tensor->data, before->data, (size_t)tensor->bytes) != 0)) {
            return bd_fail(err, BD_E_MISMATCH, t->name,
                           "%s: tensor \"%s\" of %s is not that of %s, though both hold the same "
                           "part of it",
                           r->delta.dir, t->name, r->delta.files[i].name,
                           r->delta.files[i - 1].name);
        }
        before = tensor;
        last = held;
    }
    return BD_OK;
}

/* ---- the plan of the new files --------------------------------------------------------------- */

static bd_status plan_tensor(run *r, uint32_t shard, const part_of_entry *t, bd_error *err) {
    bd_compress_plan *plan = &r->plan;
    bd_tensor *made = &plan->tensors[(size_t)shard * plan->tensor_max + plan->tensor_count];
    const bd_tensor *from = bd_safetensors_find(r->files[0], t->name);
    const bd_delta_cut cut = cut_of(r, shard, r->request->shards);
    bd_delta_part part;
    BD_ASSERT(from); /* bd_delta_open_shard has seen it */
    made->name = strdup(t->name);
    if (!made->name) return bd_fail(err, BD_E_MEMORY, NULL, "out of memory for the plan");
    plan->tensor_count++;
    memcpy(made->dtype_name, from->dtype_name, sizeof made->dtype_name);
    made->rank = from->rank;
    memcpy(made->shape, from->shape, sizeof made->shape);
    if (is_copied(t)) return BD_OK;
    if (!bd_delta_cut_part(&cut, t->entry, t->what, &part)) return not_cut(r, t, err);
    made->shape[0] = part.rows;
    if (made->rank == 2)
        made->shape[1] = t->what == BD_DELTA_TENSOR_BITS ? part.cols / 8 : part.cols;
    return BD_OK;
}

static bd_status plan_files(run *r, bd_error *err) {
    bd_compress_plan *plan = &r->plan;
    plan->shards = r->request->shards;
    plan->tensor_max = r->delta.entry_count * (2 * r->delta.bits + 1) + 1;
    plan->tensors = calloc((size_t)plan->tensor_max * plan->shards, sizeof *plan->tensors);
    if (!plan->tensors) return bd_fail(err, BD_E_MEMORY, NULL, "out of memory for the plan");
    bd_status status = BD_OK;
    for (uint32_t shard = 0; shard < plan->shards && status == BD_OK; shard++) {
        uint64_t bytes = 0;
        part_of_entry t;
        plan->tensor_count = 0; /* the same in every shard */
        for (uint32_t i = 0; i < r->delta.entry_count && status == BD_OK; i++)
            for (uint32_t k = 0; status == BD_OK && tensor_of(r, &r->delta.entries[i], k, &t); k++)
                status = plan_tensor(r, shard, &t, err);
        if (status == BD_OK)
            status = bd_safetensors_measure(plan->tensors + (size_t)shard * plan->tensor_max,
                                            plan->tensor_count, ALIGN_BYTES, &bytes, err);
        r->made_bytes += bytes;
    }
    return status;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Slices of the same rows, side by side: each row is put together from all of them. */
static bd_status append_rows(run *r, bd_safetensors_writer *writer, const part_of_entry *t,
                             const bd_delta_slice *slices, uint32_t count, bd_error *err) {
    const uint8_t *from[BD_DELTA_SHARDS_MAX];
    size_t step[BD_DELTA_SHARDS_MAX], take[BD_DELTA_SHARDS_MAX], used = 0, row_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        const bd_delta_slice *s = &slices[i];
        const bd_tensor *tensor = bd_safetensors_find(r->files[s->file_index], t->name);
        step[i] = bytes_of(t, s->file_cols);
        take[i] = bytes_of(t, s->cols);
        if (!tensor || tensor->bytes != s->file_rows * step[i])
            return bd_fail(err, BD_E_MISMATCH, t->name,
                           "%s/%s: tensor \"%s\" is cut in an unknown way", r->delta.dir,
                           r->delta.files[s->file_index].name, t->name);
        from[i] = tensor->data + s->file_row * step[i] + bytes_of(t, s->file_col);
        row_bytes += take[i];
    }
    if (count == 1 && take[0] == step[0])
        return bd_safetensors_writer_append(writer, from[0], (size_t)slices[0].rows * step[0], err);
    if (row_bytes > GATHER_BYTES)
        return bd_fail(err, BD_E_LIMIT, t->name, "tensor \"%s\": rows of %zu bytes are too long",
                       t->name, row_bytes);
    bd_status status = BD_OK;
    for (uint64_t row = 0; row < slices[0].rows && status == BD_OK; row++) {
        for (uint32_t i = 0; i < count; i++, used += take[i - 1])
            memcpy(r->gather + used, from[i] + row * step[i], take[i]);
        if (GATHER_BYTES - used >= row_bytes && row + 1 < slices[0].rows) continue;
        status = bd_safetensors_writer_append(writer, r->gather, used, err);
        used = 0;
    }
    return status;
}

static bd_status write_tensor(run *r, uint32_t shard, const part_of_entry *t, bd_error *err) {
    bd_safetensors_writer *writer = r->made.writers[shard];
    const bd_delta_cut cut = cut_of(r, shard, r->request->shards);
    bd_delta_slice slices[BD_DELTA_SHARDS_MAX];
    uint32_t count, next;
    if (is_copied(t)) {
        const bd_tensor *tensor = bd_safetensors_find(r->files[0], t->name);
        BD_ASSERT(tensor);
        return bd_safetensors_writer_append(writer, tensor->data, (size_t)tensor->bytes, err);
    }
    if (!bd_delta_cut_slices(&cut, t->entry, t->what, slices, &count)) return not_cut(r, t, err);
    bd_status status = BD_OK;
    for (uint32_t i = 0; i < count && status == BD_OK; i = next) {
        next = i + 1;
        while (next < count && slices[next].row == slices[i].row)
            next++;
        status = append_rows(r, writer, t, &slices[i], next - i, err);
    }
    return status;
}

static bd_status write_entry(run *r, const bd_delta_entry *entry, bd_error *err) {
    bd_status status = bd_stop_check(r->output.path, err);
    part_of_entry t;
    uint64_t read_bytes = 0;
    for (uint32_t k = 0; status == BD_OK && tensor_of(r, entry, k, &t); k++) {
        status = check_copies(r, &t, err);
        for (uint32_t shard = 0; shard < r->plan.shards && status == BD_OK; shard++)
            status = write_tensor(r, shard, &t, err);
        for (uint32_t i = 0; i < r->delta.shard_count; i++) {
            const bd_tensor *tensor = bd_safetensors_find(r->files[i], t.name);
            if (!tensor) continue;
            read_bytes += tensor->bytes;
            bd_tensor_release(tensor);
        }
    }
    bd_progress_add(&r->progress, read_bytes, entry->name);
    return status;
}

static bd_status write_shards(run *r, bd_error *err) {
    bd_status status =
        bd_compress_files_open(&r->made, &r->plan, r->output.temporary, ALIGN_BYTES, err);
    for (uint32_t i = 0; i < r->delta.entry_count && status == BD_OK; i++)
        status = write_entry(r, &r->delta.entries[i], err);
    return status == BD_OK ? bd_compress_files_finish(&r->made, r->output.temporary, err) : status;
}

static bd_status write_manifest(run *r, bd_error *err) {
    bd_delta made = r->delta;
    (void)snprintf(made.dir, sizeof made.dir, "%s", r->output.temporary);
    made.shard_count = r->plan.shards;
    made.files = r->made.files;
    return bd_delta_write_manifest(&made, err);
}

/* ---- the other files ------------------------------------------------------------------------- */

/* Part of a delta, old or new, and so not to be copied. */
static bool is_of_delta(const run *r, const char *name) {
    char made[64];
    if (strcmp(name, "delta.json") == 0) return true;
    for (uint32_t i = 0; i < r->delta.shard_count; i++)
        if (strcmp(name, r->delta.files[i].name) == 0) return true;
    for (uint32_t i = 0; i < r->request->shards; i++) {
        bd_delta_file_name(made, sizeof made, i, r->request->shards);
        if (strcmp(name, made) == 0) return true;
    }
    return false;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bd_status keep_side_file(run *r, const char *name, bd_error *err) {
    char path[PATH_BYTES];
    struct stat info;
    const bd_status status = bd_path_join(path, sizeof path, r->delta.dir, name, err);
    if (status != BD_OK) return status;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) {
        if (r->notes && !r->request->json)
            (void)fprintf(r->notes, "not copied: %s is no regular file\n", path);
        return BD_OK;
    }
    char **grown = realloc(r->side_files, (r->side_count + 1) * sizeof *grown);
    if (grown) r->side_files = grown;
    char *copy = grown ? strdup(name) : NULL;
    if (!copy) return bd_fail(err, BD_E_MEMORY, path, "out of memory");
    r->side_files[r->side_count++] = copy;
    return BD_OK;
}

static bd_status list_side_files(run *r, bd_error *err) {
    DIR *dir = opendir(r->delta.dir);
    if (!dir)
        return bd_fail_errno(err, BD_E_IO, r->delta.dir, errno, "cannot look into %s",
                             r->delta.dir);
    bd_status status = BD_OK;
    for (const struct dirent *entry = readdir(dir); entry && status == BD_OK;
         entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (!is_of_delta(r, entry->d_name)) status = keep_side_file(r, entry->d_name, err);
    }
    closedir(dir);
    if (r->side_count > 1) qsort(r->side_files, r->side_count, sizeof *r->side_files, by_name);
    return status;
}

/* ---- the result ------------------------------------------------------------------------------ */

static void report_json(const run *r) {
    bd_strbuf b;
    bd_strbuf_init(&b, 0);
    bd_strbuf_puts(&b, "{\"out\":");
    bd_strbuf_json_string(&b, r->output.path, strlen(r->output.path));
    bd_strbuf_puts(&b, ",\"variant\":");
    bd_strbuf_json_string(&b, r->delta.variant, strlen(r->delta.variant));
    bd_strbuf_printf(&b,
                     ",\"shards_before\":%u,\"shards\":%u,\"tensors\":%u,\"bytes_before\":%llu,"
                     "\"delta_bytes\":%llu,\"seconds\":%.3f,\"copied\":[",
                     r->delta.shard_count, r->plan.shards, r->delta.entry_count,
                     (unsigned long long)r->read_bytes, (unsigned long long)r->made_bytes,
                     bd_progress_seconds(&r->progress));
    for (uint32_t i = 0; i < r->side_count; i++) {
        bd_strbuf_puts(&b, i ? "," : "");
        bd_strbuf_json_string(&b, r->side_files[i], strlen(r->side_files[i]));
    }
    bd_strbuf_puts(&b, "]}\n");
    if (!b.failed) (void)fputs(b.data, r->out);
    bd_strbuf_deinit(&b);
}

static void report_text(const run *r) {
    (void)fprintf(
        r->notes, "%s: %u tensor%s, %u shard%s made %u; %llu bytes, %llu before; %.1f s\n",
        r->output.path, r->delta.entry_count, bd_plural(r->delta.entry_count), r->delta.shard_count,
        bd_plural(r->delta.shard_count), r->plan.shards, (unsigned long long)r->made_bytes,
        (unsigned long long)r->read_bytes, bd_progress_seconds(&r->progress));
    for (uint32_t i = 0; i < r->side_count; i++)
        (void)fprintf(r->notes, "copied %s\n", r->side_files[i]);
}

/* ---- the run --------------------------------------------------------------------------------- */

static bd_status convert(run *r, bd_error *err) {
    bd_progress_begin(&r->progress, r->notes, r->request->json, r->read_bytes + r->tensor_bytes);
    bd_status status = verify(r, err);
    if (status != BD_OK) return status;
    if ((status = bd_output_begin(&r->output, r->made_bytes + (1u << 20), err)) != BD_OK)
        return status;
    if ((status = write_shards(r, err)) != BD_OK) return status;
    if ((status = bd_output_copy(&r->output, r->delta.dir, (const char *const *)r->side_files,
                                 r->side_count, err)) != BD_OK)
        return status;
    if ((status = write_manifest(r, err)) != BD_OK) return status;
    if ((status = bd_output_commit(&r->output, err)) != BD_OK) return status;
    if (r->request->json) {
        report_json(r);
    } else if (r->notes) {
        report_text(r);
    }
    return BD_OK;
}

static void clean_up(run *r) {
    bd_output_abort(&r->output);
    bd_compress_plan_free(&r->plan);
    bd_compress_files_free(&r->made);
    for (uint32_t i = 0; i < BD_DELTA_SHARDS_MAX; i++)
        if (r->files[i]) bd_safetensors_close(r->files[i]);
    for (uint32_t i = 0; i < r->side_count; i++)
        free(r->side_files[i]);
    free(r->side_files);
    free(r->gather);
    bd_delta_close(&r->delta);
}

bd_status bd_reshard_run(const bd_reshard_request *request, FILE *out, FILE *progress,
                         bd_error *err) {
    run r = {.request = request, .out = out, .notes = progress, .output = {.lock_fd = -1}};
    bd_status status = open_delta(&r, err);
    if (status == BD_OK) status = find_heads(&r, err);
    if (status == BD_OK) status = plan_files(&r, err);
    if (status == BD_OK) status = list_side_files(&r, err);
    if (status == BD_OK && !(r.gather = malloc(GATHER_BYTES)))
        status = bd_fail(err, BD_E_MEMORY, NULL, "out of memory");
    if (status == BD_OK) status = convert(&r, err);
    clean_up(&r);
    return status;
}
