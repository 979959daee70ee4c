/* names.c - canonical Hugging Face tensor names. See names.h.
 * Norms before the blocks are INPUT and PRE_FFN for every family: the Llama-likes call the second
 * one post_attention_layernorm, which in Gemma-2 is the name of a norm on the attention's output.
 */
#include "names.h"

#include <stdio.h>
#include <string.h>

static const char *const linear_parts[BD_LINEAR_COUNT] = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj",
};

static const char *norm_part(const bd_model_config *config, uint32_t kind) {
    static const char *const plain[BD_NORM_COUNT] = {
        [BD_NORM_INPUT] = "input_layernorm",
        [BD_NORM_PRE_FFN] = "post_attention_layernorm",
    };
    static const char *const with_post[BD_NORM_COUNT] = {
        [BD_NORM_INPUT] = "input_layernorm",
        [BD_NORM_POST_ATTENTION] = "post_attention_layernorm",
        [BD_NORM_PRE_FFN] = "pre_feedforward_layernorm",
        [BD_NORM_POST_FFN] = "post_feedforward_layernorm",
    };
    if (kind >= BD_NORM_COUNT) return NULL;
    if (kind == BD_NORM_Q) return config->qk_norm ? "self_attn.q_norm" : NULL;
    if (kind == BD_NORM_K) return config->qk_norm ? "self_attn.k_norm" : NULL;
    return config->post_norms ? with_post[kind] : plain[kind];
}

static bool has_bias(const bd_model_config *config, uint32_t which) {
    if (which <= BD_LINEAR_V) return config->qkv_bias;
    return which == BD_LINEAR_O ? config->o_bias : config->mlp_bias;
}

static void linear_shape(const bd_model_config *config, uint32_t which, uint32_t *rows,
                         uint32_t *cols) {
    const uint32_t q = config->heads * config->head_dim, kv = config->kv_heads * config->head_dim;
    const uint32_t shapes[BD_LINEAR_COUNT][2] = {
        [BD_LINEAR_Q] = {q, config->hidden},
        [BD_LINEAR_K] = {kv, config->hidden},
        [BD_LINEAR_V] = {kv, config->hidden},
        [BD_LINEAR_O] = {config->hidden, q},
        [BD_LINEAR_GATE] = {config->ffn, config->hidden},
        [BD_LINEAR_UP] = {config->ffn, config->hidden},
        [BD_LINEAR_DOWN] = {config->hidden, config->ffn},
    };
    *rows = shapes[which][0];
    *cols = shapes[which][1];
}

static bool norm_shape(const bd_model_config *config, bd_weight_id id, uint32_t *rows) {
    const bool final = id.layer == config->layers;
    if (final ? id.which != BD_NORM_INPUT
              : id.layer > config->layers || !norm_part(config, id.which)) {
        return false;
    }
    *rows = id.which == BD_NORM_Q || id.which == BD_NORM_K ? config->head_dim : config->hidden;
    return true;
}

bool bd_weight_shape(const bd_model_config *config, bd_weight_id id, uint32_t *rows,
                     uint32_t *cols) {
    *rows = config->vocab;
    *cols = config->hidden;
    switch (id.kind) {
    case BD_WEIGHT_EMBED:
        return true;
    case BD_WEIGHT_HEAD:
        return !config->tied;
    case BD_WEIGHT_LINEAR:
        if (id.layer >= config->layers || id.which >= BD_LINEAR_COUNT) return false;
        linear_shape(config, id.which, rows, cols);
        return true;
    case BD_WEIGHT_BIAS:
        if (id.layer >= config->layers || id.which >= BD_LINEAR_COUNT) return false;
        linear_shape(config, id.which, rows, cols);
        *cols = 0;
        return has_bias(config, id.which);
    case BD_WEIGHT_NORM:
        *cols = 0;
        return norm_shape(config, id, rows);
    }
    return false;
}

void bd_weight_name(const bd_model_config *config, bd_weight_id id, char *out, size_t out_bytes) {
    uint32_t rows, cols;
    snprintf(out, out_bytes, "%s", "");
    if (!bd_weight_shape(config, id, &rows, &cols)) return;
    switch (id.kind) {
    case BD_WEIGHT_EMBED:
        snprintf(out, out_bytes, "model.embed_tokens.weight");
        break;
    case BD_WEIGHT_HEAD:
        snprintf(out, out_bytes, "lm_head.weight");
        break;
    case BD_WEIGHT_LINEAR:
        snprintf(out, out_bytes, "model.layers.%u.%s.weight", id.layer, linear_parts[id.which]);
        break;
    case BD_WEIGHT_BIAS:
        snprintf(out, out_bytes, "model.layers.%u.%s.bias", id.layer, linear_parts[id.which]);
        break;
    case BD_WEIGHT_NORM:
        if (id.layer == config->layers) {
            snprintf(out, out_bytes, "model.norm.weight");
        } else {
            snprintf(out, out_bytes, "model.layers.%u.%s.weight", id.layer,
                     norm_part(config, id.which));
        }
        break;
    }
}

/* "<part>.<suffix>" */
static bool is_part(const char *text, const char *part, const char *suffix) {
    if (!part) return false;
    const size_t len = strlen(part);
    return strncmp(text, part, len) == 0 && text[len] == '.' && strcmp(text + len + 1, suffix) == 0;
}

static bool parse_layer_part(const bd_model_config *config, const char *text, bd_weight_id *id) {
    for (id->which = 0; id->which < BD_LINEAR_COUNT; id->which++) {
        id->kind = BD_WEIGHT_LINEAR;
        if (is_part(text, linear_parts[id->which], "weight")) return true;
        id->kind = BD_WEIGHT_BIAS;
        if (is_part(text, linear_parts[id->which], "bias")) return has_bias(config, id->which);
    }
    id->kind = BD_WEIGHT_NORM;
    for (id->which = 0; id->which < BD_NORM_COUNT; id->which++) {
        if (is_part(text, norm_part(config, id->which), "weight")) return true;
    }
    return false;
}

bool bd_table_parse(const char *name, bd_weight_id *out) {
    const bool head = strcmp(name, "lm_head.weight") == 0;
    if (!head && strcmp(name, "model.embed_tokens.weight") != 0) return false;
    *out = (bd_weight_id){.kind = head ? BD_WEIGHT_HEAD : BD_WEIGHT_EMBED};
    return true;
}

bool bd_weight_parse(const bd_model_config *config, const char *name, bd_weight_id *out) {
    static const char prefix[] = "model.layers.";
    bd_weight_id id = {0};
    bool known = false;
    if (bd_table_parse(name, &id)) {
        known = id.kind == BD_WEIGHT_EMBED || !config->tied;
    } else if (strcmp(name, "model.norm.weight") == 0) {
        id =
            (bd_weight_id){.kind = BD_WEIGHT_NORM, .layer = config->layers, .which = BD_NORM_INPUT};
        known = true;
    } else if (strncmp(name, prefix, sizeof prefix - 1) == 0) {
        const char *at = name + sizeof prefix - 1;
        const char *digits = at;
        for (; *at >= '0' && *at <= '9' && id.layer < BD_LAYERS_MAX; at++) {
            id.layer = id.layer * 10 + (uint32_t)(*at - '0');
        }
        const bool number = at > digits && (*digits != '0' || at == digits + 1);
        known = number && *at == '.' && id.layer < config->layers &&
                parse_layer_part(config, at + 1, &id);
    }
    if (known) *out = id;
    return known;
}
