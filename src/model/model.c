/* model.c - opening a base model: config, names, memory, then the weights into the backend. See
 * model.h. */
#include "bitdelta/model/model.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/log.h"
#include "bitdelta/model/overlay.h"
#include "internal.h"
#include "ranks.h"
#include "team.h"
#include "weights.h"

/* Of each weight the rank's part alone is read. */
static bd_status load_weights(bd_model *model, const bd_weight_list *list,
                              const bd_model_options *options, bd_error *err) {
    uint64_t done = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const bd_weight_view whole = bd_weight_item_view(&list->items[i]);
        const bd_weight_id id = list->items[i].id;
        bd_rank_part part;
        if (!bd_rank_part_of(&model->config, model->rank, model->rank_count, id, &part)) continue;
        const bd_weight_view view = bd_weight_view_part(&whole, &part);
        const bd_status s = model->ops->weight_put(model->backend, id, &view, err);
        if (s == BD_E_UNSUPPORTED && err) /* the backend knows places, not names */
            return bd_fail(err, s, list->items[i].tensor->name, "%s: %s",
                           list->items[i].tensor->name, err->message);
        if (s != BD_OK) return s;
        bd_tensor_release(list->items[i].tensor); /* the backend has its copy */
        done += whole.rows * whole.row_stride_bytes;
        if (options->progress && model->rank == 0)
            options->progress(options->progress_ctx, done, list->bytes);
    }
    return BD_OK;
}

/* Slot 0 is the base's own table. */
static bd_status put_base_rope(bd_model *model, bd_error *err) {
    uint32_t table;
    model->rope_slots = calloc(model->backend_options.rope_tables_max, sizeof *model->rope_slots);
    if (!model->rope_slots) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for rope tables");
    const bd_status s = bd_model_rope_acquire(model, &model->config.rope, &table, err);
    BD_ASSERT(s != BD_OK || table == 0);
    return s;
}

/* Before anything is allocated, so that a failure later has its arithmetic in the log. */
static void log_plan(const bd_model *model) {
    const bd_memory_plan *plan = &model->memory;
    const uint64_t left = plan->available > plan->total ? plan->available - plan->total : 0;
    bd_log(BD_LOG_INFO, "model",
           "plan rank=%u weights_mb=%" PRIu64 " workspace_mb=%" PRIu64 " logits_mb=%" PRIu64
           " deltas_mb=%" PRIu64 " kv_mb=%" PRIu64 " kv_blocks=%u total_mb=%" PRIu64
           " available_mb=%" PRIu64 " remains_mb=%" PRIu64,
           model->rank, plan->weights >> 20, plan->workspace >> 20, plan->logits >> 20,
           plan->deltas >> 20, plan->kv >> 20, plan->kv_blocks, plan->total >> 20,
           plan->available >> 20, left >> 20);
}

static bd_status recorded_forward(void *ctx, const bd_step *step, bd_error *err) {
    return bd_model_forward_rank(ctx, step, NULL, NULL, err);
}

bd_status bd_model_open_rank(bd_model *model, const bd_model_options *options,
                             const bd_weight_list *list, bd_error *err) {
    bd_status s = model->ops->open(&model->backend_options, &model->backend, err);
    if (s == BD_OK) s = put_base_rope(model, err);
    if (s == BD_OK) s = load_weights(model, list, options, err);
    if (s == BD_OK && model->ops->record && !options->no_recording)
        s = model->ops->record(model->backend, recorded_forward, model, err);
    return s;
}

bd_status bd_model_create(const bd_backend_ops *ops, uint32_t rank, uint32_t rank_count,
                          bd_model **out, bd_error *err) {
    *out = NULL;
    bd_model *model = calloc(1, sizeof *model);
    if (!model) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the model");
    model->ops = ops;
    model->rank = rank;
    model->rank_count = rank_count;
    const int rc = pthread_mutex_init(&model->rope_lock, NULL);
    if (rc != 0) {
        free(model);
        return bd_fail_errno(err, BD_E_MEMORY, NULL, rc, "mutex");
    }
    *out = model;
    return BD_OK;
}

void bd_model_free(bd_model *model) {
    if (!model) return;
    if (model->backend) model->ops->close(model->backend);
    if (model->checkpoint) bd_checkpoint_close(model->checkpoint);
    free(model->rope_slots);
    pthread_mutex_destroy(&model->rope_lock);
    free(model);
}

static bd_status size_rank(bd_model *model, const bd_model_options *options, bd_error *err) {
    const bd_sizing sizing = {options,       &model->config,          model->rank,
                              &model->local, &model->backend_options, &model->memory};
    return bd_model_size(&sizing, err);
}

/* All ranks have as many blocks of KV as the one with the least memory. */
static bd_status size_all(bd_model *model, const bd_model_options *options, bd_error *err) {
    bd_model_options same = *options;
    uint32_t least = UINT32_MAX;
    for (uint32_t r = 0; r < model->rank_count; r++) {
        bd_model *rank = bd_model_rank(model, r);
        if (rank != model) rank->config = model->config;
        const bd_status s = size_rank(rank, options, err);
        if (s != BD_OK) return s;
        if (rank->memory.kv_blocks < least) least = rank->memory.kv_blocks;
    }
    same.kv_tokens = (uint64_t)least * model->backend_options.kv_block_tokens;
    for (uint32_t r = 0; model->team && r < model->rank_count; r++) {
        const bd_status s = size_rank(bd_model_rank(model, r), &same, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

/* Not by itself a fault: whoever sends short prompts only may want it so. */
static void warn_of_little_kv(const bd_model *model) {
    const bd_backend_options *o = &model->backend_options;
    const uint64_t tokens = (uint64_t)o->kv_block_count * o->kv_block_tokens;
    if (tokens >= o->max_model_len) return;
    bd_log(BD_LOG_WARN, "model",
           "kv_tokens=%" PRIu64 " holds no sequence of the whole context of %u: a request whose "
           "prompt and new tokens are more is refused",
           tokens, o->max_model_len);
}

static bd_status open_all(bd_model *model, const bd_model_options *options, bd_error *err) {
    bd_weight_list list = {0};
    bd_status s = bd_model_config_read(options->dir, &model->config, err);
    if (s == BD_OK) s = bd_checkpoint_open(options->dir, &model->checkpoint, err);
    if (s == BD_OK) s = bd_weight_list_create(&model->config, model->checkpoint, &list, err);
    if (s == BD_OK && model->rank_count > 1) { /* before anything is made for so many */
        s = size_rank(model, options, err);
        if (s == BD_OK) s = bd_team_create(model, options, &model->team, err);
    }
    if (s == BD_OK) s = size_all(model, options, err);
    for (uint32_t r = 0; s == BD_OK && r < model->rank_count; r++)
        log_plan(bd_model_rank(model, r));
    if (s == BD_OK) warn_of_little_kv(model);
    if (s == BD_OK) s = bd_checkpoint_fingerprint(model->checkpoint, model->fingerprint, err);
    if (s == BD_OK)
        s = model->team ? bd_team_open(model->team, options, &list, err)
                        : bd_model_open_rank(model, options, &list, err);
    bd_weight_list_destroy(&list);
    return s;
}

bd_status bd_model_open(const bd_model_options *options, bd_model **out, bd_error *err) {
    *out = NULL;
    bd_model *model;
    bd_status s = bd_model_create(options->ops, 0, options->rank_count ? options->rank_count : 1,
                                  &model, err);
    if (s != BD_OK) return s;
    if ((s = open_all(model, options, err)) != BD_OK) {
        bd_model_close(model);
        return s;
    }
    *out = model;
    return BD_OK;
}

void bd_model_close(bd_model *model) {
    if (!model) return;
    /* A rank that does not come back still uses all of this. */
    if (model->team && !bd_team_destroy(model->team)) return;
    bd_model_free(model);
}

bd_status bd_model_plan(const bd_model_options *options, const bd_model_config *config,
                        bd_memory_plan *plan, bd_error *err) {
    bd_backend_options backend;
    bd_model_config local;
    *plan = (bd_memory_plan){0};
    const bd_sizing sizing = {options, config, 0, &local, &backend, plan};
    return bd_model_size(&sizing, err);
}

const bd_model_config *bd_model_config_of(const bd_model *model) {
    return &model->config;
}
const char *bd_model_fingerprint(const bd_model *model) {
    return model->fingerprint;
}
const bd_backend_ops *bd_model_ops(const bd_model *model) {
    return model->ops;
}
bd_backend *bd_model_backend(const bd_model *model) {
    return model->backend;
}
uint32_t bd_model_max_len(const bd_model *model) {
    return model->backend_options.max_model_len;
}
uint32_t bd_model_kv_block_count(const bd_model *model) {
    return model->backend_options.kv_block_count;
}
uint32_t bd_model_kv_block_tokens(const bd_model *model) {
    return model->backend_options.kv_block_tokens;
}
const bd_memory_plan *bd_model_memory(const bd_model *model) {
    return &model->memory;
}

uint32_t bd_model_rank_count(const bd_model *model) {
    return model->rank_count;
}

bd_model *bd_model_rank(bd_model *model, uint32_t rank) {
    return rank == 0 || !model->team ? model : bd_team_rank(model->team, rank);
}

uint32_t bd_model_logits_width(const bd_model *model) {
    return model->config.vocab + model->backend_options.extra_vocab_max;
}

uint64_t bd_model_page_bytes(const bd_model *model) {
    return bd_overlay_page_bytes(&model->local, model->ops);
}

uint32_t bd_model_page_count(const bd_model *model) {
    return (uint32_t)(model->backend_options.delta_bytes / bd_model_page_bytes(model));
}

/* The slot with these frequencies, else a free one, else rope_tables_max. */
static uint32_t find_slot(const bd_model *model, const float *inv_freq, size_t bytes, float scale) {
    const uint32_t count = model->backend_options.rope_tables_max;
    uint32_t unused = count;
    for (uint32_t i = 0; i < count; i++) {
        const bd_rope_slot *slot = &model->rope_slots[i];
        if (slot->references == 0) {
            if (unused == count) unused = i;
        } else if (slot->scale == scale && memcmp(slot->inv_freq, inv_freq, bytes) == 0) {
            return i;
        }
    }
    return unused;
}

bd_status bd_model_rope_acquire(bd_model *model, const bd_rope_config *rope, uint32_t *table,
                                bd_error *err) {
    float inv_freq[BD_ROTARY_DIM_MAX / 2], scale;
    bd_status s = bd_rope_table(rope, inv_freq, &scale, err);
    if (s != BD_OK) return s;
    const size_t bytes = rope->rotary_dim / 2 * sizeof *inv_freq;
    pthread_mutex_lock(&model->rope_lock);
    const uint32_t index = find_slot(model, inv_freq, bytes, scale);
    if (index == model->backend_options.rope_tables_max) {
        s = bd_fail(
            err, BD_E_LIMIT, "rope_scaling",
            "all %u rope tables are in use; they follow from the variants there at start and "
            "--slots",
            index);
    } else if (model->rope_slots[index].references == 0) {
        s = model->ops->rope_table_put(model->backend, index, inv_freq, scale, err);
    }
    if (s == BD_OK) {
        bd_rope_slot *slot = &model->rope_slots[index];
        slot->references++;
        slot->scale = scale;
        memcpy(slot->inv_freq, inv_freq, bytes);
        *table = index;
    }
    pthread_mutex_unlock(&model->rope_lock);
    return s;
}

void bd_model_rope_release(bd_model *model, uint32_t table) {
    pthread_mutex_lock(&model->rope_lock);
    BD_ASSERT(model->rope_slots[table].references > 0);
    model->rope_slots[table].references--;
    pthread_mutex_unlock(&model->rope_lock);
}
