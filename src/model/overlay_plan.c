/* overlay_plan.c - from the header of a delta's shard to the list of pieces and their places. See
 * overlay.h. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "names.h"
#include "overlay_internal.h"

enum { PLAN_ARENA_BLOCK = 256 << 10, PLAN_ARENA_MAX = 256 << 20 };

typedef struct planner {
    const bd_model *model;
    const bd_delta *delta;
    const bd_safetensors *file;
    uint32_t file_index;
    bd_plan_storage *storage;
    bd_overlay_piece *pieces;
    bd_piece_target *targets;
    uint32_t piece_count, piece_max;
    uint32_t layer_page, head_page; /* first page of each kind; the embedding's is 0 */
} planner;

static bd_status mismatch(const planner *p, const bd_delta_entry *entry, bd_error *err,
                          const char *what) {
    return bd_fail(err, BD_E_MISMATCH, entry->name, "%s: tensor %s %s",
                   p->delta->files[p->file_index].name, entry->name, what);
}

static bool is_table(bd_weight_id id) {
    return id.kind == BD_WEIGHT_EMBED || id.kind == BD_WEIGHT_HEAD;
}

/* An entry's weight, with its shape and kind checked against the model. */
static bd_status identify(const planner *p, const bd_delta_entry *entry, bd_weight_id *id,
                          bd_error *err) {
    const bd_model_config *config = &p->model->config;
    uint32_t rows, cols;
    if (!bd_weight_parse(config, entry->name, id) || !bd_weight_shape(config, *id, &rows, &cols)) {
        return mismatch(p, entry, err, "is not a tensor of the base model");
    }
    if (entry->rank != (cols ? 2u : 1u) || entry->shape[0] != rows ||
        (cols && entry->shape[1] != cols)) {
        return mismatch(p, entry, err, "has another shape than the base model's");
    }
    if (cols && entry->kind == BD_DELTA_FULL) {
        return bd_fail(
            err, BD_E_UNSUPPORTED, entry->name,
            "%s: matrix %s is stored in full; only sign planes of matrices are supported",
            p->delta->dir, entry->name);
    }
    if (entry->extra_rows > 0) {
        return bd_fail(err, BD_E_UNSUPPORTED, entry->name,
                       "%s: %s has %llu added rows, which are not supported", p->delta->dir,
                       entry->name, (unsigned long long)entry->extra_rows);
    }
    if (!cols && entry->kind == BD_DELTA_SIGN)
        return mismatch(p, entry, err, "is a vector but coded as signs");
    if (cols && cols % 8 != 0)
        return mismatch(p, entry, err, "has rows that are not whole bytes of signs");
    return BD_OK;
}

static uint32_t ready_index(const bd_model_config *config, bd_weight_id id) {
    if (id.kind == BD_WEIGHT_EMBED) return 0;
    return id.kind == BD_WEIGHT_HEAD ? 1 + config->layers
                                     : 1 + id.layer; /* the final norm's layer is `layers` */
}

static uint32_t page_of(const planner *p, bd_weight_id id, uint32_t plane, uint32_t block) {
    const uint32_t planes = p->delta->bits, layers = p->model->config.layers;
    if (id.kind == BD_WEIGHT_EMBED) return block * planes + plane;
    if (id.kind == BD_WEIGHT_HEAD) return p->head_page + block * planes + plane;
    const uint32_t layer = id.layer < layers ? id.layer : layers - 1;
    return p->layer_page + layer * planes + plane;
}

static bd_overlay_piece *add(planner *p, const bd_piece_target *target, const bd_tensor *tensor,
                             const char *name) {
    BD_ASSERT(p->piece_count < p->piece_max);
    bd_overlay_piece *piece = &p->pieces[p->piece_count];
    p->targets[p->piece_count++] = *target;
    *piece = (bd_overlay_piece){
        .kind =
            target->scale || target->id.kind == BD_WEIGHT_NORM || target->id.kind == BD_WEIGHT_BIAS
                ? BD_PIECE_FLOATS
                : BD_PIECE_BITS,
        .file_index = p->file_index,
        .offset_bytes = tensor->offset_bytes,
        .bytes = tensor->bytes,
        .ready_index = ready_index(&p->model->config, target->id),
        .page = page_of(p, target->id, target->plane, target->block),
        .dtype = tensor->dtype,
        .tensor = name,
    };
    return piece;
}

/* One piece per block of rows, whatever a row is (bits or a scale). */
static void add_blocks(planner *p, bd_piece_target target, const bd_tensor *tensor,
                       const char *name) {
    const bd_layout *layout = &p->storage->layout;
    const bd_model_config *config = &p->model->config;
    const uint64_t row_bytes = tensor->bytes / config->vocab;
    for (target.block = 0; target.block < layout->block_count; target.block++) {
        const uint32_t rows = bd_layout_block_rows(layout, config, target.block);
        bd_overlay_piece *piece = add(p, &target, tensor, name);
        piece->offset_bytes += (uint64_t)target.block * layout->block_rows * row_bytes;
        piece->bytes = rows * row_bytes;
        piece->page_offset_bytes = target.scale ? layout->block_scales : 0;
        piece->n = rows;
        piece->k = target.scale ? 1 : config->hidden;
        piece->row_bytes = target.scale ? 0 : row_bytes;
    }
}

static bd_status add_signs(planner *p, const bd_delta_entry *entry, bd_weight_id id,
                           bd_error *err) {
    const bd_layout *layout = &p->storage->layout;
    for (uint32_t part = 0; part < 2 * p->delta->bits; part++) {
        const bd_piece_target target = {.id = id, .plane = part / 2, .scale = part % 2 == 1};
        char name[BD_TENSOR_NAME_MAX + 16];
        bd_delta_plane_name(name, sizeof name, entry->name, !target.scale, target.plane);
        const bd_tensor *tensor = bd_safetensors_find(p->file, name);
        const uint64_t bytes =
            target.scale ? 4 * entry->shape[0] : entry->shape[0] * (entry->shape[1] / 8);
        if (!tensor) return mismatch(p, entry, err, "lacks one of its planes");
        if (tensor->dtype != (target.scale ? BD_DTYPE_F32 : BD_DTYPE_U8) ||
            tensor->bytes != bytes) {
            return mismatch(p, entry, err, "has a plane of another type or size");
        }
        const char *kept = bd_arena_strndup(p->storage->arena, name, strlen(name));
        if (!kept) return bd_fail(err, BD_E_MEMORY, entry->name, "no memory for the load plan");
        if (is_table(id)) {
            add_blocks(p, target, tensor, kept);
            continue;
        }
        bd_overlay_piece *piece = add(p, &target, tensor, kept);
        piece->page_offset_bytes = target.scale ? layout->scales[id.which] : layout->bits[id.which];
        piece->n = (uint32_t)entry->shape[0];
        piece->k = target.scale ? 1 : (uint32_t)entry->shape[1];
        piece->row_bytes = target.scale ? 0 : entry->shape[1] / 8;
    }
    return BD_OK;
}

static bd_status add_vector(planner *p, const bd_delta_entry *entry, bd_weight_id id,
                            bd_error *err) {
    const bd_layout *layout = &p->storage->layout;
    const bd_tensor *tensor = bd_safetensors_find(p->file, entry->name);
    if (!tensor) return mismatch(p, entry, err, "is missing");
    if (tensor->dtype != BD_DTYPE_F32 && tensor->dtype != BD_DTYPE_BF16 &&
        tensor->dtype != BD_DTYPE_F16) {
        return mismatch(p, entry, err, "has a type other than F32, BF16 and F16");
    }
    if (tensor->bytes != entry->shape[0] * bd_dtype_bytes(tensor->dtype)) {
        return mismatch(p, entry, err, "has another size than its shape");
    }
    const char *kept = bd_arena_strndup(p->storage->arena, entry->name, strlen(entry->name));
    if (!kept) return bd_fail(err, BD_E_MEMORY, entry->name, "no memory for the load plan");
    const bd_piece_target target = {.id = id};
    bd_overlay_piece *piece = add(p, &target, tensor, kept);
    piece->page_offset_bytes = id.kind == BD_WEIGHT_BIAS             ? layout->biases[id.which]
                               : id.layer == p->model->config.layers ? layout->final_norm
                                                                     : layout->norms[id.which];
    piece->n = (uint32_t)entry->shape[0];
    piece->k = 1;
    return BD_OK;
}

/* Which tables the delta has decides where its layers' pages start. */
static bd_status number_pages(planner *p, uint32_t *page_count, bd_error *err) {
    const bd_model_config *config = &p->model->config;
    bool embed = false, head = false;
    for (uint32_t i = 0; i < p->delta->entry_count; i++) {
        bd_weight_id id;
        const bd_status s = identify(p, &p->delta->entries[i], &id, err);
        if (s != BD_OK) return s;
        if ((id.kind == BD_WEIGHT_EMBED && embed) || (id.kind == BD_WEIGHT_HEAD && head)) {
            return mismatch(p, &p->delta->entries[i], err, "is listed twice");
        }
        embed = embed || id.kind == BD_WEIGHT_EMBED;
        head = head || id.kind == BD_WEIGHT_HEAD;
    }
    const uint32_t table_pages = p->storage->layout.block_count * p->delta->bits;
    p->layer_page = embed ? table_pages : 0;
    p->head_page = p->layer_page + config->layers * p->delta->bits;
    *page_count = p->head_page + (head ? table_pages : 0);
    return BD_OK;
}

static bd_status add_entries(planner *p, bd_error *err) {
    for (uint32_t i = 0; i < p->delta->entry_count; i++) {
        const bd_delta_entry *entry = &p->delta->entries[i];
        bd_weight_id id;
        bd_status s = identify(p, entry, &id, err);
        if (s != BD_OK) return s;
        s = entry->kind == BD_DELTA_SIGN ? add_signs(p, entry, id, err)
                                         : add_vector(p, entry, id, err);
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
    bd_layout_init(&p->storage->layout, &p->model->config, p->model->ops);
    const uint64_t pieces =
        2 * (uint64_t)p->delta->bits *
        ((uint64_t)p->delta->entry_count + 2 * (uint64_t)p->storage->layout.block_count);
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

/* Pieces in the order of the file. Entries are listed in data order, so this is nearly sorted
 * already: insertion. */
static void sort_pieces(planner *p) {
    for (uint32_t i = 1; i < p->piece_count; i++) {
        const bd_overlay_piece piece = p->pieces[i];
        const bd_piece_target target = p->targets[i];
        uint32_t at = i;
        for (; at > 0 && p->pieces[at - 1].offset_bytes > piece.offset_bytes; at--) {
            p->pieces[at] = p->pieces[at - 1];
            p->targets[at] = p->targets[at - 1];
        }
        p->pieces[at] = piece;
        p->targets[at] = target;
    }
}

static bd_status check_base(const bd_model *model, const bd_delta *delta, bd_error *err) {
    if (strcmp(model->fingerprint, delta->base_fingerprint) != 0) {
        return bd_fail(err, BD_E_MISMATCH, "base_fingerprint",
                       "%s/delta.json was made for base %s (%.16s...), not for this one (%.16s...)",
                       delta->dir, delta->base, delta->base_fingerprint, model->fingerprint);
    }
    if (delta->shard_count != 1) {
        return bd_fail(
            err, BD_E_UNSUPPORTED, "shards",
            "%s/delta.json has %u shards; one rank reads deltas of one shard (bitdelta reshard)",
            delta->dir, delta->shard_count);
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
    planner p = {.model = model, .delta = delta};
    bd_safetensors *file = NULL;
    *out = (bd_overlay_plan){0};
    bd_status s = check_base(model, delta, err);
    if (s != BD_OK) return s;
    s = make_storage(&p, err);
    if (s != BD_OK) return s;
    uint32_t page_count = 0;
    s = number_pages(&p, &page_count, err);
    if (s == BD_OK) s = bd_delta_open_shard(delta, p.file_index, false, &file, err);
    p.file = file;
    if (s == BD_OK) s = add_entries(&p, err);
    if (file) bd_safetensors_close(file);
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
