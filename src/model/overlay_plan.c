/* overlay_plan.c - from the headers of a delta's shards to the list of pieces and their places. See
 * overlay.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/hf/checkpoint.h"
#include "internal.h"
#include "names.h"
#include "overlay_internal.h"
#include "ranks.h"

enum { PLAN_ARENA_BLOCK = 256 << 10, PLAN_ARENA_MAX = 256 << 20 };

typedef struct table_entry {     /* the embedding or the head, as the delta has it */
    const bd_delta_entry *entry; /* NULL: the base's */
    uint32_t first_page, extra_page;
} table_entry;

typedef struct planner {
    const bd_model *model;
    const bd_delta *delta;
    const bd_safetensors *file;
    uint32_t file_index;
    bd_plan_storage *storage;
    bd_overlay_piece *pieces;
    bd_piece_target *targets;
    uint32_t piece_count, piece_max;
    table_entry embed, head;
    uint32_t layer_page; /* first page of the layers */
    /* The files that this rank needs for its heads, [file_first, file_end). What every file has
     * comes from the first of them. */
    uint32_t file_first, file_end;
    uint64_t sign_bytes; /* of matrices, in the pieces so far */
} planner;

typedef struct run { /* consecutive rows of a table that one shard holds */
    const bd_tensor *tensor;
    const char *name;
    uint64_t first_row, rows, row_bytes; /* first_row: of this rank's */
    uint64_t skip_rows;                  /* of the tensor, before them */
    uint32_t block_rows;                 /* rows of a page */
} run;

/* What a file and this rank have in common of a matrix. */
typedef struct overlap {
    uint64_t first_row, rows, first_col, cols;
} overlap;

static bd_status mismatch(const planner *p, const bd_delta_entry *entry, bd_error *err,
                          const char *what) {
    return bd_fail(err, BD_E_MISMATCH, entry->name, "%s: tensor %s %s",
                   p->delta->files[p->file_index].name, entry->name, what);
}

static bool is_table(bd_weight_id id) {
    return id.kind == BD_WEIGHT_EMBED || id.kind == BD_WEIGHT_HEAD;
}

static table_entry *table_of(planner *p, bd_weight_id id) {
    return id.kind == BD_WEIGHT_EMBED ? &p->embed : &p->head;
}

/* What of an entry this backend or this model's options cannot hold. */
static bd_status check_support(const planner *p, const bd_delta_entry *entry, bd_weight_id id,
                               bd_error *err) {
    const bd_backend_options *options = &p->model->backend_options;
    const bd_backend_ops *ops = p->model->ops;
    const bool full_matrix = entry->rank == 2 && entry->kind == BD_DELTA_FULL;
    if (full_matrix && !is_table(id)) {
        return bd_fail(err, BD_E_UNSUPPORTED, entry->name,
                       "%s: matrix %s is stored in full, which only the embedding and the head may",
                       p->delta->dir, entry->name);
    }
    if ((full_matrix || entry->extra_rows > 0) && !ops->rows_put) {
        return bd_fail(err, BD_E_UNSUPPORTED, entry->name,
                       "%s: %s %s, which the %s backend does not support", p->delta->dir,
                       entry->name, full_matrix ? "is stored in full" : "has added rows",
                       ops->name);
    }
    if (entry->extra_rows > options->extra_vocab_max) {
        return bd_fail(err, BD_E_UNSUPPORTED, entry->name,
                       "%s: %s has %llu added row%s, there is room for %u", p->delta->dir,
                       entry->name, (unsigned long long)entry->extra_rows,
                       bd_plural(entry->extra_rows), options->extra_vocab_max);
    }
    return BD_OK;
}

/* An entry's weight, with its shape and kind checked against the model. */
static bd_status identify(const planner *p, const bd_delta_entry *entry, bd_weight_id *id,
                          bd_error *err) {
    const bd_model_config *config = &p->model->config;
    uint32_t rows = config->vocab, cols = config->hidden;
    if (!bd_table_parse(entry->name, id) && (!bd_weight_parse(config, entry->name, id) ||
                                             !bd_weight_shape(config, *id, &rows, &cols))) {
        return mismatch(p, entry, err, "is not a tensor of the base model");
    }
    if (entry->rank != (cols ? 2u : 1u) || entry->shape[0] != rows ||
        (cols && entry->shape[1] != cols)) {
        return mismatch(p, entry, err, "has another shape than the base model's");
    }
    if (entry->extra_rows > 0 && !is_table(*id))
        return mismatch(p, entry, err, "has added rows but is neither embedding nor head");
    if (!cols && entry->kind == BD_DELTA_SIGN)
        return mismatch(p, entry, err, "is a vector but coded as signs");
    if (cols && cols % 8 != 0)
        return mismatch(p, entry, err, "has rows that are not whole bytes of signs");
    return check_support(p, entry, *id, err);
}

static uint32_t ready_index(const bd_model_config *config, bd_weight_id id) {
    if (id.kind == BD_WEIGHT_EMBED) return 0;
    return id.kind == BD_WEIGHT_HEAD ? 1 + config->layers
                                     : 1 + id.layer; /* the final norm's layer is `layers` */
}

static uint32_t page_of(planner *p, const bd_piece_target *target) {
    const uint32_t planes = p->delta->bits, layers = p->model->config.layers;
    if (is_table(target->id)) {
        const table_entry *table = table_of(p, target->id);
        if (target->part == BD_PART_EXTRA) return table->extra_page + target->block;
        if (target->part == BD_PART_FULL) return table->first_page + target->block;
        return table->first_page + target->block * planes + target->plane;
    }
    const uint32_t layer = target->id.layer < layers ? target->id.layer : layers - 1;
    return p->layer_page + layer * planes + target->plane;
}

static bd_overlay_piece *add(planner *p, const bd_piece_target *target, const bd_tensor *tensor,
                             const char *name) {
    static const bd_piece_kind kinds[] = {[BD_PART_BITS] = BD_PIECE_BITS,
                                          [BD_PART_SCALES] = BD_PIECE_FLOATS,
                                          [BD_PART_VECTOR] = BD_PIECE_FLOATS,
                                          [BD_PART_FULL] = BD_PIECE_ROWS,
                                          [BD_PART_EXTRA] = BD_PIECE_ROWS};
    BD_ASSERT(p->piece_count < p->piece_max);
    bd_overlay_piece *piece = &p->pieces[p->piece_count];
    p->targets[p->piece_count++] = *target;
    *piece = (bd_overlay_piece){
        .kind = kinds[target->part],
        .file_index = p->file_index,
        .offset_bytes = tensor->offset_bytes,
        .bytes = tensor->bytes,
        .ready_index = ready_index(&p->model->config, target->id),
        .page = page_of(p, target),
        .dtype = tensor->dtype,
        .tensor = name,
    };
    return piece;
}

/* One piece per page that the rows reach into, whatever a row is (bits, a scale, bf16 values). */
static void add_run(planner *p, bd_piece_target target, const run *r) {
    const bd_layout *layout = &p->storage->layout;
    const uint64_t end = r->first_row + r->rows;
    for (uint64_t at = r->first_row, next; at < end; at = next) {
        target.block = (uint32_t)(at / r->block_rows);
        next = (target.block + 1ull) * r->block_rows;
        if (next > end) next = end;
        bd_overlay_piece *piece = add(p, &target, r->tensor, r->name);
        piece->offset_bytes += (at - r->first_row + r->skip_rows) * r->row_bytes;
        piece->bytes = (next - at) * r->row_bytes;
        piece->page_offset_bytes = target.part == BD_PART_SCALES ? layout->block_scales : 0;
        piece->first_row = (uint32_t)(at % r->block_rows);
        piece->n = target.part == BD_PART_BITS || target.part == BD_PART_SCALES
                       ? bd_layout_block_rows(layout, &p->model->local, target.block)
                       : r->block_rows;
        piece->k = target.part == BD_PART_SCALES ? 1 : p->model->config.hidden;
        piece->row_bytes = target.part == BD_PART_SCALES ? 0 : r->row_bytes;
        piece->take_bytes = piece->row_bytes;
        if (target.part == BD_PART_BITS) p->sign_bytes += piece->bytes;
    }
}

static bool cut(uint64_t *first, uint64_t *count, uint64_t other_first, uint64_t other_count) {
    const uint64_t end = *first + *count, other_end = other_first + other_count;
    if (*first < other_first) *first = other_first;
    const uint64_t least = end < other_end ? end : other_end;
    *count = least > *first ? least - *first : 0;
    return *count > 0;
}

/* false: nothing, or what another file is read for. */
static bool overlap_of(const planner *p, bd_weight_id id, const bd_delta_part *part, overlap *out) {
    const bd_model *model = p->model;
    bd_rank_part own;
    if (!bd_rank_part_of(&model->config, model->rank, model->rank_count, id, &own)) return false;
    *out = (overlap){own.first_row, own.rows, own.first_col, own.cols};
    if (!cut(&out->first_row, &out->rows, part->first_row, part->rows) ||
        !cut(&out->first_col, &out->cols, part->first_col, part->cols))
        return false;
    if (is_table(id)) return true; /* ends of files and ranks need not meet */
    if (p->file_index < p->file_first || p->file_index >= p->file_end) return false;
    return !part->repeated || p->file_index == p->file_first;
}

static bd_status keep_name(planner *p, const char *name, const char **out, bd_error *err) {
    *out = bd_arena_strndup(p->storage->arena, name, strlen(name));
    return *out ? BD_OK : bd_fail(err, BD_E_MEMORY, name, "no memory for the load plan");
}

/* What this file holds of a matrix. Of k and v the file itself tells by its rows how many different
 * parts there are. */
static bool part_here(const planner *p, const bd_delta_entry *entry, bd_delta_part *part) {
    char name[BD_TENSOR_NAME_MAX + 16];
    const char *held = entry->name;
    if (entry->kind == BD_DELTA_SIGN) {
        bd_delta_plane_name(name, sizeof name, entry->name, true, 0);
        held = name;
    }
    const bd_tensor *tensor = bd_safetensors_find(p->file, held);
    const uint64_t rows = tensor ? tensor->shape[0] : 0;
    return bd_delta_part_of(entry->name, entry->shape, p->file_index, p->delta->shard_count,
                            rows ? entry->shape[0] / rows : 0, part);
}

/* Where in a page the common part goes, and where in the file it is. */
static void place(planner *p, bd_overlay_piece *piece, bd_weight_id id, const bd_delta_part *part,
                  const overlap *common) {
    const bd_model *model = p->model;
    const bool scales = piece->kind == BD_PIECE_FLOATS;
    const uint64_t row_bytes = scales ? 4 : part->cols / 8;
    bd_rank_part own;
    BD_ASSERT(bd_rank_part_of(&model->config, model->rank, model->rank_count, id, &own));
    piece->offset_bytes += (common->first_row - part->first_row) * row_bytes;
    piece->bytes = common->rows * row_bytes;
    piece->first_row = (uint32_t)(common->first_row - own.first_row);
    piece->n = own.rows;
    piece->k = scales ? 1 : own.cols;
    if (scales) return;
    piece->first_col = (uint32_t)(common->first_col - own.first_col);
    piece->row_bytes = row_bytes;
    piece->take_from = (common->first_col - part->first_col) / 8;
    piece->take_bytes = common->cols / 8;
    p->sign_bytes += common->rows * piece->take_bytes;
}

/* Bits or scales of one plane. */
static bd_status add_plane(planner *p, const bd_delta_entry *entry, const bd_piece_target *target,
                           const bd_delta_part *part, bd_error *err) {
    const bd_layout *layout = &p->storage->layout;
    const bool scales = target->part == BD_PART_SCALES;
    const uint64_t row_bytes = scales ? 4 : part->cols / 8;
    char name[BD_TENSOR_NAME_MAX + 16];
    bd_delta_plane_name(name, sizeof name, entry->name, !scales, target->plane);
    const bd_tensor *tensor = bd_safetensors_find(p->file, name);
    const char *kept;
    overlap common;
    if (!tensor) return mismatch(p, entry, err, "lacks one of its planes");
    if (tensor->dtype != (scales ? BD_DTYPE_F32 : BD_DTYPE_U8) ||
        tensor->bytes != part->rows * row_bytes) {
        return mismatch(p, entry, err, "has a plane of another type or size");
    }
    if (!overlap_of(p, target->id, part, &common)) return BD_OK;
    const bd_status s = keep_name(p, name, &kept, err);
    if (s != BD_OK) return s;
    if (is_table(target->id)) {
        const uint64_t own_first = p->model->backend_options.vocab_first;
        add_run(p, *target,
                &(run){tensor, kept, common.first_row - own_first, common.rows, row_bytes,
                       common.first_row - part->first_row, layout->block_rows});
        return BD_OK;
    }
    if (scales && part->cols != entry->shape[1] && p->file_index > p->file_first)
        return BD_OK; /* the same in every shard */
    const uint32_t which = target->id.which;
    bd_overlay_piece *piece = add(p, target, tensor, kept);
    piece->page_offset_bytes = scales ? layout->scales[which] : layout->bits[which];
    place(p, piece, target->id, part, &common);
    return BD_OK;
}

static bd_status add_signs(planner *p, const bd_delta_entry *entry, bd_weight_id id,
                           bd_error *err) {
    bd_delta_part part;
    if (!part_here(p, entry, &part)) return mismatch(p, entry, err, "is cut in an unknown way");
    bd_rank_part own;
    if (!is_table(id) &&
        bd_rank_part_of(&p->model->config, p->model->rank, p->model->rank_count, id, &own) &&
        part.cols < own.cols && !p->model->ops->plane_part_put) {
        return bd_fail(err, BD_E_UNSUPPORTED, entry->name,
                       "%s: %s is cut by columns, which the %s backend does not read; deltas of "
                       "one shard are (compress --shards 1)",
                       p->delta->dir, entry->name, p->model->ops->name);
    }
    for (uint32_t i = 0; i < 2 * p->delta->bits; i++) {
        const bd_piece_target target = {
            .id = id, .plane = i / 2, .part = i % 2 == 1 ? BD_PART_SCALES : BD_PART_BITS};
        const bd_status s = add_plane(p, entry, &target, &part, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

/* A norm or a bias; every shard has it. */
static bd_status add_vector(planner *p, const bd_delta_entry *entry, bd_weight_id id,
                            bd_error *err) {
    const bd_layout *layout = &p->storage->layout;
    const bd_tensor *tensor = bd_safetensors_find(p->file, entry->name);
    const char *kept;
    bd_rank_part own;
    if (p->file_index != p->file_first) return BD_OK;
    if (!tensor) return mismatch(p, entry, err, "is missing");
    if (tensor->dtype != BD_DTYPE_F32 && tensor->dtype != BD_DTYPE_BF16 &&
        tensor->dtype != BD_DTYPE_F16) {
        return mismatch(p, entry, err, "has a type other than F32, BF16 and F16");
    }
    if (tensor->bytes != entry->shape[0] * bd_dtype_bytes(tensor->dtype)) {
        return mismatch(p, entry, err, "has another size than its shape");
    }
    if (!bd_rank_part_of(&p->model->config, p->model->rank, p->model->rank_count, id, &own))
        return BD_OK;
    const bd_status s = keep_name(p, entry->name, &kept, err);
    if (s != BD_OK) return s;
    const bd_piece_target target = {.id = id, .part = BD_PART_VECTOR};
    bd_overlay_piece *piece = add(p, &target, tensor, kept);
    piece->page_offset_bytes = id.kind == BD_WEIGHT_BIAS             ? layout->biases[id.which]
                               : id.layer == p->model->config.layers ? layout->final_norm
                                                                     : layout->norms[id.which];
    const uint64_t value_bytes = bd_dtype_bytes(tensor->dtype);
    piece->offset_bytes += own.first_row * value_bytes;
    piece->bytes = own.rows * value_bytes;
    piece->n = own.rows;
    piece->k = 1;
    return BD_OK;
}

/* Rows of the embedding or head kept whole: all of them, or those added to the base's. */
static bd_status add_whole(planner *p, const bd_delta_entry *entry, bd_weight_id id, bool extra,
                           bd_error *err) {
    char name[BD_TENSOR_NAME_MAX + 16];
    const char *kept;
    bd_delta_part part = {.rows = entry->extra_rows};
    const uint64_t row_bytes = entry->shape[1] * bd_dtype_bytes(BD_DTYPE_BF16);
    if (extra && p->file_index != p->file_first) return BD_OK; /* the same in every shard */
    snprintf(name, sizeof name, "%s%s", entry->name, extra ? ".extra" : "");
    const bd_tensor *tensor = bd_safetensors_find(p->file, name);
    if (!extra && !part_here(p, entry, &part))
        return mismatch(p, entry, err, "is cut in an unknown way");
    if (!tensor) return mismatch(p, entry, err, extra ? "lacks its added rows" : "is missing");
    if (tensor->dtype != BD_DTYPE_BF16 || tensor->bytes != part.rows * row_bytes)
        return mismatch(p, entry, err, "is not BF16 of its size");
    const uint64_t own_first = p->model->backend_options.vocab_first;
    overlap common = {.rows = part.rows};
    part.cols = entry->shape[1];
    if (!extra && !overlap_of(p, id, &part, &common)) return BD_OK;
    const bd_status s = keep_name(p, name, &kept, err);
    if (s != BD_OK) return s;
    const bd_piece_target target = {.id = id, .part = extra ? BD_PART_EXTRA : BD_PART_FULL};
    add_run(p, target,
            &(run){tensor, kept, extra ? 0 : common.first_row - own_first, common.rows, row_bytes,
                   common.first_row - part.first_row, p->storage->layout.whole_rows});
    return BD_OK;
}

/* Embedding and head must agree on how many rows they add. */
static bd_status check_tables(const planner *p, bd_error *err) {
    const bd_delta_entry *embed = p->embed.entry, *head = p->head.entry;
    const uint64_t embed_extra = embed ? embed->extra_rows : 0;
    const bool own_head = head || !p->model->config.tied;
    const uint64_t head_extra = !own_head ? embed_extra : head ? head->extra_rows : 0;
    p->storage->extra_rows = (uint32_t)embed_extra;
    p->storage->own_head = head != NULL;
    p->storage->full_embed = embed && embed->kind == BD_DELTA_FULL;
    p->storage->full_head = own_head ? head && head->kind == BD_DELTA_FULL : p->storage->full_embed;
    if (embed_extra == head_extra) return BD_OK;
    return bd_fail(err, BD_E_MISMATCH, head ? head->name : "lm_head.weight",
                   "%s/delta.json: the embedding has %llu added row%s, the head %llu",
                   p->delta->dir, (unsigned long long)embed_extra, bd_plural(embed_extra),
                   (unsigned long long)head_extra);
}

/* Which tables the delta has decides where its layers' pages start. */
static bd_status number_pages(planner *p, uint32_t *page_count, bd_error *err) {
    const bd_layout *layout = &p->storage->layout;
    const bd_model_config *local = &p->model->local;
    uint32_t extra_at, at = 0;
    for (uint32_t i = 0; i < p->delta->entry_count; i++) {
        const bd_delta_entry *entry = &p->delta->entries[i];
        bd_weight_id id;
        const bd_status s = identify(p, entry, &id, err);
        if (s != BD_OK) return s;
        if (!is_table(id)) continue;
        if (table_of(p, id)->entry) return mismatch(p, entry, err, "is listed twice");
        table_of(p, id)->entry = entry;
    }
    if (p->embed.entry) {
        at = bd_layout_table_pages(layout, local, p->delta, p->embed.entry, &extra_at);
        p->embed.extra_page = extra_at;
    }
    p->layer_page = at;
    at += p->model->config.layers * p->delta->bits;
    p->head.first_page = at;
    if (p->head.entry) {
        at += bd_layout_table_pages(layout, local, p->delta, p->head.entry, &extra_at);
        p->head.extra_page = p->head.first_page + extra_at;
    }
    *page_count = at;
    return check_tables(p, err);
}

static bd_status add_entries(planner *p, bd_error *err) {
    for (uint32_t i = 0; i < p->delta->entry_count; i++) {
        const bd_delta_entry *entry = &p->delta->entries[i];
        bd_weight_id id;
        bd_status s = identify(p, entry, &id, err);
        if (s != BD_OK) return s;
        if (entry->kind == BD_DELTA_SIGN) {
            s = add_signs(p, entry, id, err);
        } else if (is_table(id)) {
            s = add_whole(p, entry, id, false, err);
        } else {
            s = add_vector(p, entry, id, err);
        }
        if (s == BD_OK && entry->extra_rows > 0) s = add_whole(p, entry, id, true, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

static bd_status add_files(planner *p, bd_error *err) {
    for (p->file_index = 0; p->file_index < p->delta->shard_count; p->file_index++) {
        bd_safetensors *file = NULL;
        bd_status s = bd_delta_open_shard(p->delta, p->file_index, false, &file, err);
        p->file = file;
        if (s == BD_OK) s = add_entries(p, err);
        bd_safetensors_close(file);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

static bd_status make_storage(planner *p, bd_error *err) {
    bd_arena *arena = bd_arena_create(PLAN_ARENA_BLOCK, PLAN_ARENA_MAX);
    if (!arena) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the load plan");
    p->storage = bd_arena_alloc(arena, 1, sizeof *p->storage);
    if (!p->storage) goto fail;
    p->storage->arena = arena;
    bd_layout *layout = &p->storage->layout;
    bd_layout_init(layout, &p->model->local, p->model->ops);
    /* Of the two tables: blocks, and one more where a shard's end cuts a block; full or added rows.
     */
    const uint64_t shards = p->delta->shard_count,
                   whole = bd_layout_whole_pages(layout, p->model->local.vocab) +
                           bd_layout_whole_pages(layout, BD_EXTRA_VOCAB_MAX),
                   pieces = 2 * (uint64_t)p->delta->bits *
                            (shards * p->delta->entry_count +
                             2 * (layout->block_count + whole + shards));
    if (pieces > UINT32_MAX) goto fail;
    p->piece_max = (uint32_t)pieces;
    p->pieces = bd_arena_alloc(arena, p->piece_max, sizeof *p->pieces);
    p->targets = bd_arena_alloc(arena, p->piece_max, sizeof *p->targets);
    if (!p->pieces || !p->targets) goto fail;
    p->storage->targets = p->targets;
    return BD_OK;
fail:
    bd_arena_destroy(arena);
    p->storage = NULL;
    return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the load plan");
}

static bool comes_after(const bd_overlay_piece *a, const bd_overlay_piece *b) {
    if (a->file_index != b->file_index) return a->file_index > b->file_index;
    return a->offset_bytes > b->offset_bytes;
}

/* Pieces in the order of the files. Entries are listed in data order, so this is nearly sorted
 * already: insertion. */
static void sort_pieces(planner *p) {
    for (uint32_t i = 1; i < p->piece_count; i++) {
        const bd_overlay_piece piece = p->pieces[i];
        const bd_piece_target target = p->targets[i];
        uint32_t at = i;
        for (; at > 0 && comes_after(&p->pieces[at - 1], &piece); at--) {
            p->pieces[at] = p->pieces[at - 1];
            p->targets[at] = p->targets[at - 1];
        }
        p->pieces[at] = piece;
        p->targets[at] = target;
    }
}

/* Bytes of signs that the rank's part of a matrix has. */
static uint64_t sign_bytes_of(const planner *p, bd_weight_id id) {
    bd_rank_part own;
    BD_ASSERT(bd_rank_part_of(&p->model->config, p->model->rank, p->model->rank_count, id, &own));
    return (uint64_t)own.rows * (own.cols / 8) * p->delta->bits;
}

/* What no file had would be left to what the page held before. */
static bd_status check_whole(const planner *p, bd_error *err) {
    uint64_t wanted = 0;
    for (uint32_t i = 0; i < p->delta->entry_count; i++) {
        const bd_delta_entry *entry = &p->delta->entries[i];
        bd_weight_id id;
        if (entry->kind != BD_DELTA_SIGN) continue;
        const bd_status s = identify(p, entry, &id, err);
        if (s != BD_OK) return s;
        wanted += sign_bytes_of(p, id);
    }
    if (wanted == p->sign_bytes) return BD_OK;
    return bd_fail(err, BD_E_MISMATCH, "shards",
                   "%s: its %u shard%s %s %llu of the %llu bytes of signs that rank %u of %u "
                   "needs",
                   p->delta->dir, p->delta->shard_count, bd_plural(p->delta->shard_count),
                   p->delta->shard_count == 1 ? "has" : "have", (unsigned long long)p->sign_bytes,
                   (unsigned long long)wanted, p->model->rank, p->model->rank_count);
}

static bd_status check_base(const bd_model *model, const bd_delta *delta, bd_error *err) {
    if (strcmp(model->fingerprint, delta->base_fingerprint) != 0) {
        const int digits = bd_fingerprint_digits(delta->base_fingerprint, model->fingerprint);
        return bd_fail(err, BD_E_MISMATCH, "base_fingerprint",
                       "%s/delta.json was made for base %s (%.*s...), not for this one (%.*s...)",
                       delta->dir, delta->base, digits, delta->base_fingerprint, digits,
                       model->fingerprint);
    }
    if (delta->bits < 1 || delta->bits > BD_OVERLAY_PLANES_MAX) {
        return bd_fail(err, BD_E_UNSUPPORTED, "bits",
                       "%s/delta.json has %u planes, 1 to %u are supported", delta->dir,
                       delta->bits, BD_OVERLAY_PLANES_MAX);
    }
    return BD_OK;
}

bd_status bd_overlay_plan_create(const bd_model *model, const bd_delta *delta, bd_overlay_plan *out,
                                 bd_error *err) {
    const uint64_t files = delta->shard_count, ranks = model->rank_count;
    planner p = {.model = model,
                 .delta = delta,
                 .file_first = (uint32_t)(model->rank * files / ranks),
                 .file_end = (uint32_t)(((model->rank + 1) * files + ranks - 1) / ranks)};
    *out = (bd_overlay_plan){0};
    bd_status s = check_base(model, delta, err);
    if (s != BD_OK) return s;
    s = make_storage(&p, err);
    if (s != BD_OK) return s;
    uint32_t page_count = 0;
    s = number_pages(&p, &page_count, err);
    if (s == BD_OK) s = add_files(&p, err);
    if (s == BD_OK) s = check_whole(&p, err);
    if (s != BD_OK) {
        bd_arena_destroy(p.storage->arena);
        return s;
    }
    sort_pieces(&p);
    *out = (bd_overlay_plan){
        .page_count = page_count,
        .piece_count = p.piece_count,
        .ready_count = model->config.layers + 2,
        .pieces = p.pieces,
        .storage = p.storage,
    };
    return BD_OK;
}

void bd_overlay_plan_destroy(bd_overlay_plan *plan) {
    const bd_plan_storage *storage = plan->storage;
    if (storage) bd_arena_destroy(storage->arena);
    *plan = (bd_overlay_plan){0};
}
