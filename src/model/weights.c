/* weights.c - see weights.h. Phi-3 stores q, k, v and gate, up stacked by rows; they are taken
 * apart by row ranges, so nothing above the checkpoint knows about fused weights. */
#include "weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "names.h"

/* Weights of a layer besides linears and biases, and those outside the layers (embedding, final
 * norm, head). */
enum { ITEMS_PER_LAYER_MAX = 2 * BD_LINEAR_COUNT + BD_NORM_COUNT, ITEMS_OUTSIDE_MAX = 3 };

/* The fused tensor that holds a linear of Phi-3, its rows, and where the linear's rows start. */
static const char *fused_part(const bd_model_config *config, uint32_t which, uint32_t *first,
                              uint32_t *rows) {
    const uint32_t q = config->heads * config->head_dim, kv = config->kv_heads * config->head_dim;
    const uint32_t firsts[BD_LINEAR_COUNT] = {
        [BD_LINEAR_K] = q, [BD_LINEAR_V] = q + kv, [BD_LINEAR_UP] = config->ffn};
    if (config->family != BD_FAMILY_PHI3 || which == BD_LINEAR_O || which == BD_LINEAR_DOWN)
        return NULL;
    *first = firsts[which];
    *rows = which <= BD_LINEAR_V ? q + 2 * kv : 2 * config->ffn;
    return which <= BD_LINEAR_V ? "self_attn.qkv_proj.weight" : "mlp.gate_up_proj.weight";
}

/* Adds the weight if the model has it. */
static bd_status add_item(const bd_model_config *config, const bd_checkpoint *checkpoint,
                          bd_weight_id id, bd_weight_list *list, bd_error *err) {
    char name[BD_TENSOR_NAME_MAX];
    bd_weight_item *item = &list->items[list->count];
    if (!bd_weight_shape(config, id, &item->rows, &item->cols)) return BD_OK;
    uint32_t first = 0, tensor_rows = item->rows;
    bd_weight_name(config, id, name, sizeof name);
    if (id.kind == BD_WEIGHT_LINEAR) {
        const char *part = fused_part(config, id.which, &first, &tensor_rows);
        if (part) snprintf(name, sizeof name, "model.layers.%u.%s", id.layer, part);
    }
    const bd_status s =
        bd_checkpoint_need(checkpoint, name, tensor_rows, item->cols, &item->tensor, err);
    if (s != BD_OK) return s;
    item->id = id;
    item->first_row = first;
    list->bytes +=
        (uint64_t)item->rows * (item->cols ? item->cols : 1) * bd_dtype_bytes(item->tensor->dtype);
    list->count++;
    return BD_OK;
}

static bd_status add_all(const bd_model_config *config, const bd_checkpoint *checkpoint,
                         bd_weight_list *list, bd_error *err) {
    bd_status s = add_item(config, checkpoint, (bd_weight_id){.kind = BD_WEIGHT_EMBED}, list, err);
    for (uint32_t layer = 0; s == BD_OK && layer < config->layers; layer++) {
        bd_weight_id id = {.layer = layer};
        for (id.which = 0; s == BD_OK && id.which < BD_NORM_COUNT; id.which++) {
            id.kind = BD_WEIGHT_NORM;
            s = add_item(config, checkpoint, id, list, err);
        }
        for (id.which = 0; s == BD_OK && id.which < BD_LINEAR_COUNT; id.which++) {
            id.kind = BD_WEIGHT_LINEAR;
            s = add_item(config, checkpoint, id, list, err);
            id.kind = BD_WEIGHT_BIAS;
            if (s == BD_OK) s = add_item(config, checkpoint, id, list, err);
        }
    }
    const bd_weight_id norm = {
        .kind = BD_WEIGHT_NORM, .layer = config->layers, .which = BD_NORM_INPUT};
    if (s == BD_OK) s = add_item(config, checkpoint, norm, list, err);
    if (s == BD_OK)
        s = add_item(config, checkpoint, (bd_weight_id){.kind = BD_WEIGHT_HEAD}, list, err);
    return s;
}

/* Phi-3 only: the fused names replace those of the linears inside them. */
static bool is_fused_name(const bd_model_config *config, const char *name) {
    char expected[BD_TENSOR_NAME_MAX];
    if (config->family != BD_FAMILY_PHI3) return false;
    for (uint32_t layer = 0; layer < config->layers; layer++) {
        uint32_t first, rows;
        for (uint32_t which = BD_LINEAR_Q; which <= BD_LINEAR_GATE; which += BD_LINEAR_GATE) {
            const char *part = fused_part(config, which, &first, &rows);
            if (!part) continue;
            snprintf(expected, sizeof expected, "model.layers.%u.%s", layer, part);
            if (strcmp(name, expected) == 0) return true;
        }
    }
    return false;
}

static bool is_used(const bd_model_config *config, const char *name) {
    bd_weight_id id;
    uint32_t first, rows;
    if (is_fused_name(config, name)) return true;
    if (!bd_weight_parse(config, name, &id)) return false;
    return id.kind != BD_WEIGHT_LINEAR || !fused_part(config, id.which, &first, &rows);
}

/* A tensor nobody reads is an error, unless it cannot change the result: rotary buffers of old
 * checkpoints, and a head stored although it is tied. */
static bd_status check_extra(const bd_model_config *config, const bd_checkpoint *checkpoint,
                             const bd_tensor *tensor, bd_error *err) {
    static const char buffer[] = "rotary_emb.inv_freq";
    const size_t len = strlen(tensor->name);
    if (len >= sizeof buffer - 1 && strcmp(tensor->name + len - (sizeof buffer - 1), buffer) == 0)
        return BD_OK;
    if (is_used(config, tensor->name)) return BD_OK;
    if (config->tied && strcmp(tensor->name, "lm_head.weight") == 0) {
        const bd_tensor *embed = bd_checkpoint_find(checkpoint, "model.embed_tokens.weight");
        if (embed && embed->dtype == tensor->dtype && embed->bytes == tensor->bytes &&
            memcmp(embed->data, tensor->data, (size_t)embed->bytes) == 0) {
            return BD_OK;
        }
        return bd_fail(err, BD_E_MISMATCH, tensor->name,
                       "lm_head.weight differs from the embedding although config.json says "
                       "tie_word_embeddings");
    }
    return bd_fail(err, BD_E_UNSUPPORTED, tensor->name,
                   "checkpoint %s has tensor %s, which this architecture does not use",
                   bd_checkpoint_dir(checkpoint), tensor->name);
}

bd_status bd_weight_list_create(const bd_model_config *config, const bd_checkpoint *checkpoint,
                                bd_weight_list *out, bd_error *err) {
    bd_weight_list list = {0};
    const size_t items_max = (size_t)config->layers * ITEMS_PER_LAYER_MAX + ITEMS_OUTSIDE_MAX;
    list.items = calloc(items_max, sizeof *list.items);
    if (!list.items) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the list of weights");
    bd_status s = add_all(config, checkpoint, &list, err);
    for (uint32_t i = 0; s == BD_OK && i < bd_checkpoint_count(checkpoint); i++) {
        s = check_extra(config, checkpoint, bd_checkpoint_at(checkpoint, i), err);
    }
    if (s != BD_OK) {
        bd_weight_list_destroy(&list);
        return s;
    }
    *out = list;
    return BD_OK;
}

void bd_weight_list_destroy(bd_weight_list *list) {
    free(list->items);
    *list = (bd_weight_list){0};
}

bd_weight_view bd_weight_item_view(const bd_weight_item *item) {
    const uint64_t cols = item->cols ? item->cols : item->rows;
    const uint64_t stride = cols * bd_dtype_bytes(item->tensor->dtype);
    return (bd_weight_view){
        .dtype = item->tensor->dtype,
        .rows = item->cols ? item->rows : 1,
        .cols = cols,
        .row_stride_bytes = stride,
        .data = item->tensor->data + item->first_row * stride,
    };
}

bd_weight_view bd_weight_view_part(const bd_weight_view *whole, const bd_rank_part *part) {
    const uint64_t size = bd_dtype_bytes(whole->dtype);
    const bool vector = part->cols == 0;
    const uint64_t skip_bytes =
        vector ? part->first_row * size
               : part->first_row * whole->row_stride_bytes + part->first_col * size;
    return (bd_weight_view){
        .dtype = whole->dtype,
        .rows = vector ? 1 : part->rows,
        .cols = vector ? part->rows : part->cols,
        .row_stride_bytes = whole->row_stride_bytes,
        .data = (const uint8_t *)whole->data + skip_bytes,
    };
}
