/* compress_shards.c - how a delta is cut into S files, and writing them: all S grow side by side,
 * weight by weight, so that every weight is read and encoded once. See delta.h for the cut.
 * Owner: the run. */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/half.h"
#include "bitdelta/delta/slices.h"

#include "compress_internal.h"

#define PATH_BYTES   4096u
#define GATHER_BYTES (1u << 20) /* of rows cut by columns, before they are written */

/* ---- may it be cut? -------------------------------------------------------------------------- */

bd_status bd_compress_check_shards(const bd_compress_model *base, uint32_t shards, bd_error *err) {
    if (shards == 1) return BD_OK;
    if (!base->has_config) {
        return bd_fail(err, BD_E_ARGUMENT, "shards",
                       "--shards %u needs the base's config.json, which says where heads end",
                       shards);
    }
    return bd_delta_check_parts(&base->config, shards, "--shards", "shards", err);
}

/* ---- what each file holds -------------------------------------------------------------------- */

static bool is_cut(const bd_compress_item *item) {
    return item->kind == BD_DELTA_SIGN ||
           (item->base.rank == 2 && bd_compress_is_embedding(item->name));
}

static bd_status part_of(const bd_compress_plan *plan, const bd_compress_item *item, uint32_t shard,
                         bd_delta_part *part, bd_error *err) {
    if (bd_delta_part_of(item->name, item->base.shape, shard, plan->shards, plan->kv_parts, part))
        return BD_OK;
    return bd_fail(err, BD_E_ARGUMENT, "shards",
                   "--shards %u: tensor \"%s\" [%llu, %llu] cannot be cut evenly", plan->shards,
                   item->name, (unsigned long long)item->base.shape[0],
                   (unsigned long long)item->base.shape[1]);
}

static bd_status add_tensor(bd_compress_plan *plan, uint32_t shard, const char *name,
                            const char *dtype, const uint64_t *shape, uint32_t rank,
                            bd_error *err) {
    bd_tensor *t = &plan->tensors[(size_t)shard * plan->tensor_max + plan->tensor_count];
    char *copy = strdup(name);
    if (!copy) return bd_fail(err, BD_E_MEMORY, NULL, "out of memory for the plan");
    t->name = copy;
    memcpy(t->dtype_name, dtype, strnlen(dtype, sizeof t->dtype_name - 1)); /* zeroed before */
    t->rank = rank;
    memcpy(t->shape, shape, rank * sizeof *shape);
    plan->tensor_count++;
    return BD_OK;
}

static bd_status add_planes(bd_compress_plan *plan, const bd_compress_item *item, uint32_t shard,
                            uint32_t planes, bd_error *err) {
    bd_delta_part part;
    char name[700];
    bd_status status = part_of(plan, item, shard, &part, err);
    for (uint32_t plane = 0; plane < planes && status == BD_OK; plane++) {
        const uint64_t packed[] = {part.rows, part.cols / 8};
        bd_delta_plane_name(name, sizeof name, item->name, true, plane);
        status = add_tensor(plan, shard, name, "U8", packed, 2, err);
        if (status != BD_OK) break;
        bd_delta_plane_name(name, sizeof name, item->name, false, plane);
        status = add_tensor(plan, shard, name, "F32", &part.rows, 1, err);
    }
    return status;
}

static bd_status add_item_tensors(bd_compress_plan *plan, const bd_compress_item *item,
                                  uint32_t shard, uint32_t planes, bd_error *err) {
    bd_status status;
    bd_delta_part part;
    if (item->kind == BD_DELTA_SIGN) {
        status = add_planes(plan, item, shard, planes, err);
    } else if (is_cut(item)) {
        status = part_of(plan, item, shard, &part, err);
        if (status == BD_OK)
            status = add_tensor(plan, shard, item->name, "BF16",
                                (const uint64_t[]){part.rows, part.cols}, 2, err);
    } else {
        status = add_tensor(plan, shard, item->name, item->tuned.dtype_name, item->tuned.shape,
                            item->tuned.rank, err);
    }
    if (status == BD_OK && item->extra_rows > 0) {
        char name[700];
        (void)snprintf(name, sizeof name, "%s.extra", item->name);
        status = add_tensor(plan, shard, name, "BF16",
                            (const uint64_t[]){item->extra_rows, item->base.shape[1]}, 2, err);
    }
    return status;
}

bd_status bd_compress_list_tensors(bd_compress_plan *plan, uint32_t planes, bd_error *err) {
    plan->tensor_max = plan->count * (2 * planes + 1) + 1;
    plan->tensors = calloc((size_t)plan->tensor_max * plan->shards, sizeof *plan->tensors);
    if (!plan->tensors) return bd_fail(err, BD_E_MEMORY, NULL, "out of memory for the plan");
    bd_status status = BD_OK;
    for (uint32_t shard = 0; shard < plan->shards && status == BD_OK; shard++) {
        plan->tensor_count = 0; /* the same in every shard */
        for (uint32_t i = 0; i < plan->count && status == BD_OK; i++)
            status = add_item_tensors(plan, &plan->items[i], shard, planes, err);
    }
    return status;
}

/* ---- writing --------------------------------------------------------------------------------- */

bd_status bd_compress_files_open(bd_compress_files *files, const bd_compress_plan *plan,
                                 const char *dir, uint32_t align_bytes, bd_error *err) {
    bd_status status = BD_OK;
    files->plan = plan;
    for (uint32_t i = 0; i < plan->shards && status == BD_OK; i++) {
        char path[PATH_BYTES];
        bd_delta_file_name(files->names[i], sizeof files->names[i], i, plan->shards);
        files->files[i].name = files->names[i];
        status = bd_path_join(path, sizeof path, dir, files->names[i], err);
        if (status == BD_OK)
            status = bd_safetensors_writer_create(
                path, plan->tensors + (size_t)i * plan->tensor_max, plan->tensor_count, align_bytes,
                &files->writers[i], err);
    }
    return status;
}

/* Columns of the packed bits of all rows. */
static bd_status append_columns(bd_safetensors_writer *writer, const uint8_t *bits,
                                uint64_t row_bytes, const bd_delta_part *part, bd_error *err) {
    const size_t part_bytes = (size_t)(part->cols / 8);
    size_t used = 0, room = GATHER_BYTES > part_bytes ? GATHER_BYTES : part_bytes;
    uint8_t *buffer = malloc(room);
    if (!buffer) return bd_fail(err, BD_E_MEMORY, NULL, "out of memory");
    bd_status status = BD_OK;
    for (uint64_t row = 0; row < part->rows && status == BD_OK; row++) {
        memcpy(buffer + used, bits + row * row_bytes + part->first_col / 8, part_bytes);
        used += part_bytes;
        if (room - used >= part_bytes && row + 1 < part->rows) continue;
        status = bd_safetensors_writer_append(writer, buffer, used, err);
        used = 0;
    }
    free(buffer);
    return status;
}

static bd_status append_planes(bd_safetensors_writer *writer, const bd_compress_item *item,
                               const bd_compress_planes *planes, uint32_t plane_count,
                               const bd_delta_part *part, bd_error *err) {
    const uint64_t row_bytes = item->base.shape[1] / 8;
    bd_status status = BD_OK;
    for (uint32_t p = 0; p < plane_count && status == BD_OK; p++) {
        const uint8_t *bits = planes->bits[p] + part->first_row * row_bytes;
        if (part->cols == item->base.shape[1]) {
            status =
                bd_safetensors_writer_append(writer, bits, (size_t)(part->rows * row_bytes), err);
        } else {
            status = append_columns(writer, bits, row_bytes, part, err);
        }
        if (status != BD_OK) break;
        status = bd_safetensors_writer_append(writer, planes->scale[p] + part->first_row,
                                              (size_t)part->rows * sizeof(float), err);
    }
    return status;
}

/* Rows [first, first + count) of the fine-tune's table as bf16. Added rows lie directly behind the
 * view of the common ones; rows that the fine-tune lacks are zeros. */
static bd_status append_rows(bd_safetensors_writer *writer, const bd_compress_item *item,
                             uint64_t first, uint64_t count, bd_error *err) {
    const uint64_t cols = item->base.shape[1], have = item->tuned.shape[0] + item->extra_rows;
    const uint64_t row_bytes = cols * bd_dtype_bytes(item->tuned.dtype);
    float *values = malloc((size_t)cols * sizeof *values);
    uint16_t *halves = calloc((size_t)cols, sizeof *halves);
    bd_status status = BD_OK;
    if (!values || !halves) {
        status = bd_fail(err, BD_E_MEMORY, item->name, "out of memory");
        goto done;
    }
    for (uint64_t row = first; row < first + count && status == BD_OK; row++) {
        bd_tensor view = item->tuned;
        view.data += row * row_bytes;
        view.bytes = row_bytes;
        if (row < have) {
            status = bd_compress_check_finite(&view, item->name, err);
            if (status != BD_OK) break;
            bd_tensor_to_f32(&view, 0, cols, values);
            for (uint64_t i = 0; i < cols; i++)
                halves[i] = bd_f32_to_bf16(values[i]);
        } else {
            memset(halves, 0, (size_t)cols * sizeof *halves);
        }
        status = bd_safetensors_writer_append(writer, halves, (size_t)cols * sizeof *halves, err);
    }
done:
    free(values);
    free(halves);
    return status;
}

static bd_status put_into(bd_compress_files *files, uint32_t shard, const bd_compress_item *item,
                          const bd_compress_planes *planes, uint32_t plane_count, bd_error *err) {
    bd_safetensors_writer *writer = files->writers[shard];
    bd_delta_part part = {0};
    bd_status status = is_cut(item) ? part_of(files->plan, item, shard, &part, err) : BD_OK;
    if (status != BD_OK) return status;
    if (item->kind == BD_DELTA_SIGN) {
        status = append_planes(writer, item, planes, plane_count, &part, err);
    } else if (is_cut(item)) {
        status = append_rows(writer, item, part.first_row, part.rows, err);
    } else {
        status = bd_compress_check_finite(&item->tuned, item->name, err);
        if (status == BD_OK)
            status = bd_safetensors_writer_append(writer, item->tuned.data,
                                                  (size_t)item->tuned.bytes, err);
    }
    if (status == BD_OK && item->extra_rows > 0)
        status = append_rows(writer, item, item->base.shape[0], item->extra_rows, err);
    return status;
}

bd_status bd_compress_files_put(bd_compress_files *files, const bd_compress_item *item,
                                const bd_compress_planes *planes, uint32_t plane_count,
                                bd_error *err) {
    bd_status status = BD_OK;
    for (uint32_t i = 0; i < files->plan->shards && status == BD_OK; i++)
        status = put_into(files, i, item, planes, plane_count, err);
    return status;
}

bd_status bd_compress_files_finish(bd_compress_files *files, const char *dir, bd_error *err) {
    bd_status status = BD_OK;
    for (uint32_t i = 0; i < files->plan->shards && status == BD_OK; i++) {
        char path[PATH_BYTES];
        bd_safetensors_writer *writer = files->writers[i];
        files->writers[i] = NULL; /* gone, whatever finish says */
        status = bd_safetensors_writer_finish(writer, err);
        if (status == BD_OK) status = bd_path_join(path, sizeof path, dir, files->names[i], err);
        if (status == BD_OK)
            status = bd_delta_hash_file(path, &files->files[i], &files->chunks[i], err);
    }
    return status;
}

void bd_compress_files_free(bd_compress_files *files) {
    for (uint32_t i = 0; i < BD_COMPRESS_SHARDS_MAX; i++) {
        if (files->writers[i]) bd_safetensors_writer_abort(files->writers[i]);
        free(files->chunks[i]);
    }
}
