/* model_config.c - config.json of the supported families. Absent fields take the defaults of
 * transformers 5's class of the family; fields that would change the arithmetic in a way not known
 * here are refused. Threads: any. */
#include "bitdelta/hf/model_config.h"

#include <math.h>
#include <string.h>

#include "bitdelta/base/file.h"

#include "config_fields.h"

#define CONFIG_BYTES_MAX (4u << 20)
#define PATH_BYTES       4096u
#define WIDTH_MAX        (1u << 20)
#define POSITIONS_MAX    (1u << 28)
#define VOCAB_MAX        (1u << 24)
#define HEADS_MAX        4096u
#define HEAD_DIM_MAX     256u

typedef struct family_defaults {
    const char *model_type, *architecture;
    bd_family family;
    uint32_t kv_heads; /* when absent; 0: as many as heads */
    uint32_t head_dim; /* when absent; 0: hidden / heads */
    uint32_t max_positions;
    uint32_t window_tokens; /* when absent; 0: none */
    bool tied;
    double norm_eps;
    int32_t bos_id, eos_id; /* when absent; -1: none */
} family_defaults;

static const family_defaults families[] = {
    {"llama", "LlamaForCausalLM", BD_FAMILY_LLAMA, 0, 0, 2048, 0, false, 1e-6, 1, 2},
    {"qwen2", "Qwen2ForCausalLM", BD_FAMILY_QWEN2, 32, 0, 32768, 4096, false, 1e-6, -1, -1},
    {"qwen3", "Qwen3ForCausalLM", BD_FAMILY_QWEN3, 32, 128, 32768, 4096, false, 1e-6, -1, -1},
    {"mistral", "MistralForCausalLM", BD_FAMILY_MISTRAL, 8, 0, 131072, 4096, false, 1e-6, 1, 2},
    {"phi3", "Phi3ForCausalLM", BD_FAMILY_PHI3, 0, 0, 4096, 0, false, 1e-5, 1, 32000},
    {"gemma2", "Gemma2ForCausalLM", BD_FAMILY_GEMMA2, 4, 256, 8192, 4096, true, 1e-6, 2, 1},
};

/* ---- what kind of model ---------------------------------------------------------------------- */

static bd_status read_family(const bd_config_source *s, const family_defaults **out,
                             bd_error *err) {
    const cJSON *type = bd_config_value(s, "model_type");
    if (!type) return bd_config_fault(s, "model_type", err, "is missing");
    if (!cJSON_IsString(type)) return bd_config_fault(s, "model_type", err, "is not a string");
    const family_defaults *family = NULL;
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        if (strcmp(families[i].model_type, type->valuestring) == 0) family = &families[i];
    }
    if (!family) {
        return bd_fail(err, BD_E_UNSUPPORTED, "model_type",
                       "%s: \"model_type\" \"%s\" is not supported (llama, qwen2, qwen3, mistral, "
                       "phi3 and gemma2 are)",
                       s->path, type->valuestring);
    }
    const cJSON *list = bd_config_value(s, "architectures");
    if (list && !cJSON_IsArray(list))
        return bd_config_fault(s, "architectures", err, "is not a list");
    for (const cJSON *item = list ? list->child : NULL; item; item = item->next) {
        if (cJSON_IsString(item) && strcmp(item->valuestring, family->architecture) == 0) continue;
        return bd_fail(err, BD_E_UNSUPPORTED, "architectures",
                       "%s: \"architectures\" names %s; a %s model is %s here", s->path,
                       cJSON_IsString(item) ? item->valuestring : "something else",
                       family->model_type, family->architecture);
    }
    *out = family;
    return BD_OK;
}

/* null, false, 0, "" and empty containers switch a feature off. */
static bool is_off(const cJSON *value) {
    if (cJSON_IsNull(value) || cJSON_IsFalse(value)) return true;
    if (cJSON_IsNumber(value)) return !(value->valuedouble > 0.0) && !(value->valuedouble < 0.0);
    if (cJSON_IsString(value)) return value->valuestring[0] == '\0';
    return (cJSON_IsArray(value) || cJSON_IsObject(value)) && !value->child;
}

static bool is_one(const cJSON *value) {
    return cJSON_IsNumber(value) && !(value->valuedouble > 1.0) && !(value->valuedouble < 1.0);
}

static bd_status refuse_unknown_arithmetic(const bd_config_source *s, bd_error *err) {
    static const struct {
        const char *field;
        bool one_is_neutral; /* a factor, not a switch or a count */
        const char *why;
    } fields[] = {
        {"quantization_config", false, "is set: quantised weights are not supported"},
        {"compression_config", false, "is set: quantised weights are not supported"},
        {"num_experts", false, "is set: mixtures of experts are not supported"},
        {"num_local_experts", false, "is set: mixtures of experts are not supported"},
        {"n_routed_experts", false, "is set: mixtures of experts are not supported"},
        {"num_experts_per_tok", false, "is set: mixtures of experts are not supported"},
        {"moe_intermediate_size", false, "is set: mixtures of experts are not supported"},
        {"shared_expert_intermediate_size", false, "is set: mixtures of experts are not supported"},
        {"kv_lora_rank", false, "is set: latent attention is not supported"},
        {"q_lora_rank", false, "is set: latent attention is not supported"},
        {"use_bidirectional_attention", false, "is set: only causal attention is supported"},
        {"is_encoder_decoder", false, "is set: only decoders are supported"},
        {"add_cross_attention", false, "is set: only decoders are supported"},
        {"text_config", false, "is set: only plain text models are supported"},
        {"vision_config", false, "is set: only plain text models are supported"},
        {"audio_config", false, "is set: only plain text models are supported"},
        {"use_qk_norm", false, "is set and not supported"},
        {"qk_layernorm", false, "is set and not supported"},
        {"clip_qkv", false, "is set and not supported"},
        {"attention_chunk_size", false, "is set and not supported"},
        {"dual_chunk_attention_config", false, "is set and not supported"},
        {"no_rope_layers", false, "is set and not supported"},
        {"rope_local_base_freq", false, "is set and not supported"},
        {"num_nextn_predict_layers", false, "is set and not supported"},
        {"logit_scale", true, "is not 1 and not supported"},
        {"logits_scaling", true, "is not 1 and not supported"},
        {"embedding_multiplier", true, "is not 1 and not supported"},
        {"residual_multiplier", true, "is not 1 and not supported"},
        {"attention_multiplier", true, "is not 1 and not supported"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const cJSON *value = bd_json_member(s->object, fields[i].field);
        if (!value || is_off(value) || (fields[i].one_is_neutral && is_one(value))) continue;
        return bd_config_refuse(s, fields[i].field, err, fields[i].why);
    }
    return BD_OK;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static bd_status read_heads(const bd_config_source *s, const family_defaults *family,
                            bd_model_config *out, bd_error *err) {
    bd_status status = bd_config_u32(s, "num_attention_heads", 1, HEADS_MAX, &out->heads, err);
    if (status != BD_OK) return status;
    const bool absent = !bd_json_member(s->object, "num_key_value_heads");
    const uint32_t kv_default = absent && family->kv_heads ? family->kv_heads : out->heads;
    status = bd_config_u32_or(s, "num_key_value_heads", HEADS_MAX, kv_default, &out->kv_heads, err);
    if (status != BD_OK) return status;
    if (out->heads % out->kv_heads != 0) {
        return bd_config_fault(s, "num_key_value_heads", err,
                               "does not divide num_attention_heads");
    }
    uint32_t dim_default = family->head_dim;
    if (dim_default == 0 && !bd_config_value(s, "head_dim")) {
        if (out->hidden % out->heads != 0) {
            return bd_config_fault(s, "num_attention_heads", err,
                                   "does not divide hidden_size, and head_dim is missing");
        }
        dim_default = out->hidden / out->heads;
    }
    if ((status = bd_config_u32_or(s, "head_dim", WIDTH_MAX, dim_default, &out->head_dim, err)) !=
        BD_OK)
        return status;
    if (out->head_dim > HEAD_DIM_MAX || out->head_dim % 2 != 0) {
        return bd_config_refuse(s, "head_dim", err, "is odd or above 256");
    }
    return BD_OK;
}

static bd_status read_sizes(const bd_config_source *s, const family_defaults *family,
                            bd_model_config *out, bd_error *err) {
    /* Signs need rows of whole bytes, a base without a delta does not: what a width is too odd for
     * is refused where a delta codes a matrix of such rows, or by a backend. */
    bd_status status = bd_config_u32(s, "hidden_size", 1, WIDTH_MAX, &out->hidden, err);
    if (status == BD_OK)
        status = bd_config_u32(s, "intermediate_size", 1, WIDTH_MAX, &out->ffn, err);
    if (status == BD_OK)
        status = bd_config_u32(s, "num_hidden_layers", 1, BD_LAYERS_MAX, &out->layers, err);
    if (status == BD_OK) status = bd_config_u32(s, "vocab_size", 1, VOCAB_MAX, &out->vocab, err);
    if (status == BD_OK) {
        status = bd_config_u32_or(s, "max_position_embeddings", POSITIONS_MAX,
                                  family->max_positions, &out->max_positions, err);
    }
    return status == BD_OK ? read_heads(s, family, out, err) : status;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static bd_status read_activation(const bd_config_source *s, bd_model_config *out, bd_error *err) {
    /* Gemma-2 has both fields and means hidden_activation. */
    const bool gemma = out->family == BD_FAMILY_GEMMA2;
    const char *field = gemma ? "hidden_activation" : "hidden_act";
    const cJSON *value = bd_config_value(s, field);
    out->activation = gemma ? BD_ACT_GELU_TANH : BD_ACT_SILU;
    if (!value) return BD_OK;
    if (!cJSON_IsString(value)) return bd_config_fault(s, field, err, "is not a string");
    if (strcmp(value->valuestring, "silu") == 0 || strcmp(value->valuestring, "swish") == 0) {
        out->activation = BD_ACT_SILU;
    } else if (strcmp(value->valuestring, "gelu_pytorch_tanh") == 0) {
        out->activation = BD_ACT_GELU_TANH;
    } else {
        return bd_fail(err, BD_E_UNSUPPORTED, field,
                       "%s: \"%s\" \"%s\" is not supported (silu and gelu_pytorch_tanh are)",
                       s->path, field, value->valuestring);
    }
    return BD_OK;
}

static bd_status read_biases(const bd_config_source *s, bd_model_config *out, bd_error *err) {
    bool attention, mlp;
    bd_status status = bd_config_bool_or(s, "attention_bias", false, &attention, err);
    if (status != BD_OK) return status;
    if ((status = bd_config_bool_or(s, "mlp_bias", false, &mlp, err)) != BD_OK) return status;
    const bool fixed = out->family == BD_FAMILY_MISTRAL || out->family == BD_FAMILY_PHI3;
    if (attention && fixed)
        return bd_config_refuse(s, "attention_bias", err, "is not supported for this model");
    if (mlp && out->family != BD_FAMILY_LLAMA) {
        return bd_config_refuse(s, "mlp_bias", err, "is not supported for this model");
    }
    const bool qwen2 =
        out->family == BD_FAMILY_QWEN2; /* fixed: biases on q, k, v whatever the field says */
    out->qkv_bias = qwen2 || attention;
    out->o_bias = !qwen2 && attention;
    out->mlp_bias = mlp;
    return BD_OK;
}

/* null: no cap. */
static bd_status read_softcap(const bd_config_source *s, const char *field, double fallback,
                              float *out, bd_error *err) {
    double cap = 0.0;
    bd_status status = BD_OK;
    if (!bd_json_member(s->object, field)) {
        cap = fallback;
    } else {
        status = bd_config_positive_or(s, field, 0.0, &cap, err);
    }
    *out = (float)cap;
    return status;
}

static bd_status read_gemma(const bd_config_source *s, bd_model_config *out, bd_error *err) {
    double scalar;
    bd_status status = bd_config_positive_or(s, "query_pre_attn_scalar", 256.0, &scalar, err);
    if (status != BD_OK) return status;
    out->attn_scale = (float)(1.0 / sqrt(scalar));
    out->norm_plus_one = true;
    out->post_norms = true;
    out->embed_scale = (float)sqrt((double)out->hidden);
    if ((status = read_softcap(s, "attn_logit_softcapping", 50.0, &out->attn_softcap, err)) !=
        BD_OK)
        return status;
    return read_softcap(s, "final_logit_softcapping", 30.0, &out->logit_softcap, err);
}

static bd_status read_arithmetic(const bd_config_source *s, const family_defaults *family,
                                 bd_model_config *out, bd_error *err) {
    double eps;
    bd_status status = bd_config_positive_or(s, "rms_norm_eps", family->norm_eps, &eps, err);
    if (status != BD_OK) return status;
    if (eps > 1.0) return bd_config_fault(s, "rms_norm_eps", err, "is above 1");
    out->norm_eps = (float)eps;
    out->attn_scale = (float)(1.0 / sqrt((double)out->head_dim));
    out->embed_scale = 1.0f;
    out->qk_norm = out->family == BD_FAMILY_QWEN3;
    if ((status = read_activation(s, out, err)) != BD_OK) return status;
    if ((status = read_biases(s, out, err)) != BD_OK) return status;
    if ((status = bd_config_bool_or(s, "tie_word_embeddings", family->tied, &out->tied, err)) !=
        BD_OK)
        return status;
    return out->family == BD_FAMILY_GEMMA2 ? read_gemma(s, out, err) : BD_OK;
}

/* ---- which layers see a window --------------------------------------------------------------- */

static bd_status read_layer_types(const bd_config_source *s, const cJSON *list,
                                  bd_model_config *out, bd_error *err) {
    uint32_t layer = 0;
    if (!cJSON_IsArray(list) || bd_json_count(list) != out->layers) {
        return bd_config_fault(s, "layer_types", err, "is not a list of one type per layer");
    }
    for (const cJSON *item = list->child; item; item = item->next) {
        const char *type = cJSON_IsString(item) ? item->valuestring : "";
        const bool sliding = strcmp(type, "sliding_attention") == 0;
        if (!sliding && strcmp(type, "full_attention") != 0) {
            return bd_config_refuse(s, "layer_types", err,
                                    "has a type other than full_attention and sliding_attention");
        }
        out->window_layer[layer++] = sliding;
    }
    return BD_OK;
}

static bool any_window_layer(const bd_model_config *c) {
    return memchr(c->window_layer, 1, c->layers) != NULL;
}

/* The families whose layers may differ: Qwen (from max_window_layers on) and Gemma-2 (even layers).
 */
static bd_status read_mixed_window(const bd_config_source *s, const cJSON *list,
                                   bd_model_config *out, bd_error *err) {
    uint32_t full_layers = 28;
    const bool gemma = out->family == BD_FAMILY_GEMMA2;
    if (!gemma && bd_config_value(s, "max_window_layers")) {
        const bd_status status =
            bd_config_u32(s, "max_window_layers", 0, UINT32_MAX, &full_layers, err);
        if (status != BD_OK) return status;
    }
    for (uint32_t i = 0; i < out->layers; i++) {
        out->window_layer[i] = gemma ? i % 2 == 0 : out->window_tokens > 0 && i >= full_layers;
    }
    bd_status status = list ? read_layer_types(s, list, out, err) : BD_OK;
    if (status != BD_OK) return status;
    if (any_window_layer(out) && out->window_tokens == 0) {
        return bd_config_fault(s, "sliding_window", err, "is missing, but layers use it");
    }
    if (!any_window_layer(out)) out->window_tokens = 0;
    return BD_OK;
}

static bd_status read_window(const bd_config_source *s, const family_defaults *family,
                             bd_model_config *out, bd_error *err) {
    const cJSON *list = bd_config_value(s, "layer_types");
    const bool qwen = out->family == BD_FAMILY_QWEN2 || out->family == BD_FAMILY_QWEN3;
    bool used = out->family != BD_FAMILY_LLAMA;
    bd_status status = BD_OK;
    if (qwen && (status = bd_config_bool_or(s, "use_sliding_window", false, &used, err)) != BD_OK)
        return status;
    if (used) {
        const bool absent = !bd_json_member(s->object, "sliding_window");
        status = bd_config_u32_or(s, "sliding_window", UINT32_MAX / 2,
                                  absent ? family->window_tokens : 0, &out->window_tokens, err);
        if (status != BD_OK) return status;
    }
    if (qwen || out->family == BD_FAMILY_GEMMA2) return read_mixed_window(s, list, out, err);
    const uint8_t all = out->window_tokens > 0;
    if (list) {
        if ((status = read_layer_types(s, list, out, err)) != BD_OK) return status;
        for (uint32_t i = 0; i < out->layers; i++) {
            if (out->window_layer[i] != all) {
                return bd_config_refuse(s, "layer_types", err,
                                        "does not agree with sliding_window for this model");
            }
        }
    }
    memset(out->window_layer, all, out->layers);
    return BD_OK;
}

/* ---- token ids ------------------------------------------------------------------------------- */

static bd_status add_eos(const bd_config_source *s, const cJSON *value, bd_model_config *out,
                         bd_error *err) {
    uint64_t id;
    if (!bd_json_u64(value, INT32_MAX, &id))
        return bd_config_fault(s, "eos_token_id", err, "is not a token id");
    for (uint32_t i = 0; i < out->eos_count; i++) {
        if (out->eos_ids[i] == (int32_t)id) return BD_OK;
    }
    if (out->eos_count == BD_EOS_IDS_MAX) {
        return bd_fail(err, BD_E_LIMIT, "eos_token_id",
                       "%s: more than %d different \"eos_token_id\"", s->path, BD_EOS_IDS_MAX);
    }
    out->eos_ids[out->eos_count++] = (int32_t)id;
    return BD_OK;
}

static bd_status read_eos(const bd_config_source *s, bd_model_config *out, bd_error *err) {
    const cJSON *value = bd_config_value(s, "eos_token_id");
    if (!value) return BD_OK;
    if (!cJSON_IsArray(value)) return add_eos(s, value, out, err);
    for (const cJSON *item = value->child; item; item = item->next) {
        const bd_status status = add_eos(s, item, out, err);
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

static bd_status read_ids(const bd_config_source *s, const family_defaults *family,
                          bd_model_config *out, bd_error *err) {
    const cJSON *bos = bd_json_member(s->object, "bos_token_id");
    uint64_t id;
    out->bos_id = -1;
    if (!bos && family->bos_id >= 0 && (uint32_t)family->bos_id < out->vocab)
        out->bos_id = family->bos_id;
    if (bos && !cJSON_IsNull(bos)) {
        if (!bd_json_u64(bos, INT32_MAX, &id))
            return bd_config_fault(s, "bos_token_id", err, "is not a token id");
        out->bos_id = (int32_t)id;
    }
    if (!bd_json_member(s->object, "eos_token_id") && family->eos_id >= 0 &&
        (uint32_t)family->eos_id < out->vocab) {
        out->eos_ids[out->eos_count++] = family->eos_id;
    }
    return read_eos(s, out, err);
}

/* ---- files ----------------------------------------------------------------------------------- */

static bd_status read_model(const bd_config_source *s, bd_model_config *out, bd_error *err) {
    const family_defaults *family = NULL;
    bd_status status = read_family(s, &family, err);
    if (status != BD_OK) return status;
    BD_ASSERT(family != NULL);
    out->family = family->family;
    if ((status = refuse_unknown_arithmetic(s, err)) != BD_OK) return status;
    if ((status = read_sizes(s, family, out, err)) != BD_OK) return status;
    if ((status = read_arithmetic(s, family, out, err)) != BD_OK) return status;
    if ((status = bd_config_read_rope(s, out, err)) != BD_OK) return status;
    if ((status = read_window(s, family, out, err)) != BD_OK) return status;
    return read_ids(s, family, out, err);
}

static bd_status read_config(const char *dir, bd_model_config *out, bd_error *err) {
    char path[PATH_BYTES];
    cJSON *root = NULL;
    bd_status status = bd_path_join(path, sizeof path, dir, "config.json", err);
    if (status != BD_OK) return status;
    if ((status = bd_json_read_file(path, CONFIG_BYTES_MAX, &root, err)) != BD_OK) return status;
    const bd_config_source source = {.path = path, .object = root};
    status = read_model(&source, out, err);
    cJSON_Delete(root);
    return status;
}

/* Adds the end tokens of DIR/generation_config.json. *present: the file is there. */
static bd_status read_generation(const char *dir, bd_model_config *out, bool *present,
                                 bd_error *err) {
    char path[PATH_BYTES];
    cJSON *root = NULL;
    *present = false;
    bd_status status = bd_path_join(path, sizeof path, dir, "generation_config.json", err);
    if (status != BD_OK || !bd_file_exists(path)) return status;
    if ((status = bd_json_read_file(path, CONFIG_BYTES_MAX, &root, err)) != BD_OK) return status;
    const bd_config_source source = {.path = path, .object = root};
    status = read_eos(&source, out, err);
    *present = status == BD_OK;
    cJSON_Delete(root);
    return status;
}

bd_status bd_model_config_read(const char *dir, bd_model_config *out, bd_error *err) {
    bd_model_config config = {0};
    bool present;
    bd_status status = read_config(dir, &config, err);
    if (status == BD_OK) status = read_generation(dir, &config, &present, err);
    *out = config;
    return status;
}

/* ---- variants -------------------------------------------------------------------------------- */

static bool same(float a, float b) {
    return !(a < b) && !(a > b);
}

bd_status bd_model_config_check_variant(const bd_model_config *base, const bd_model_config *v,
                                        const char *subject, bd_error *err) {
    const bool windows = base->window_tokens > 0 && v->window_tokens > 0;
    const struct {
        const char *field;
        bool equal;
    } checks[] = {
        {"model_type", base->family == v->family},
        {"hidden_size", base->hidden == v->hidden},
        {"num_hidden_layers", base->layers == v->layers},
        {"num_attention_heads", base->heads == v->heads},
        {"num_key_value_heads", base->kv_heads == v->kv_heads},
        {"head_dim", base->head_dim == v->head_dim},
        {"intermediate_size", base->ffn == v->ffn},
        {"rms_norm_eps", same(base->norm_eps, v->norm_eps)},
        {"hidden_act", base->activation == v->activation},
        {"attention_bias", base->qkv_bias == v->qkv_bias && base->o_bias == v->o_bias},
        {"mlp_bias", base->mlp_bias == v->mlp_bias},
        {"query_pre_attn_scalar", same(base->attn_scale, v->attn_scale)},
        {"attn_logit_softcapping", same(base->attn_softcap, v->attn_softcap)},
        {"final_logit_softcapping", same(base->logit_softcap, v->logit_softcap)},
        {"partial_rotary_factor", base->rope.rotary_dim == v->rope.rotary_dim},
        {"layer_types",
         !windows || memcmp(base->window_layer, v->window_layer, sizeof v->window_layer) == 0},
    };
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        if (checks[i].equal) continue;
        return bd_fail(err, BD_E_MISMATCH, checks[i].field,
                       "%s: \"%s\" differs from the base's; only rope_*, "
                       "max_position_embeddings, sliding_window, token ids and vocab_size may",
                       subject, checks[i].field);
    }
    return BD_OK;
}

static bool same_rope(const bd_rope_config *a, const bd_rope_config *b) {
    const double x[] = {a->theta,         a->factor,    a->low_freq_factor,  a->high_freq_factor,
                        a->beta_fast,     a->beta_slow, a->attention_factor, a->mscale,
                        a->mscale_all_dim};
    const double y[] = {b->theta,         b->factor,    b->low_freq_factor,  b->high_freq_factor,
                        b->beta_fast,     b->beta_slow, b->attention_factor, b->mscale,
                        b->mscale_all_dim};
    for (size_t i = 0; i < sizeof x / sizeof x[0]; i++) {
        if (x[i] < y[i] || x[i] > y[i]) return false;
    }
    return a->kind == b->kind && a->truncate == b->truncate &&
           a->original_max_positions == b->original_max_positions && a->rotary_dim == b->rotary_dim;
}

bool bd_model_config_variant_differs(const bd_model_config *base, const bd_model_config *v) {
    return !same_rope(&base->rope, &v->rope) || base->max_positions != v->max_positions ||
           base->window_tokens != v->window_tokens ||
           memcmp(base->window_layer, v->window_layer, sizeof v->window_layer) != 0 ||
           base->vocab != v->vocab || base->bos_id != v->bos_id ||
           base->eos_count != v->eos_count ||
           memcmp(base->eos_ids, v->eos_ids, sizeof v->eos_ids) != 0;
}

bd_status bd_model_config_read_variant(const char *dir, const bd_model_config *base,
                                       bd_model_config *out, bd_error *err) {
    char path[PATH_BYTES];
    bd_model_config config = {0};
    bool present;
    bd_status status = bd_path_join(path, sizeof path, dir, "config.json", err);
    if (status != BD_OK) return status;
    /* Without a file of its own the variant has the base's: files are stored only where they
     * differ. */
    if (!bd_file_exists(path)) {
        config = *base;
    } else {
        if ((status = read_config(dir, &config, err)) != BD_OK) return status;
        if ((status = bd_model_config_check_variant(base, &config, path, err)) != BD_OK)
            return status;
    }
    if ((status = read_generation(dir, &config, &present, err)) != BD_OK) return status;
    for (uint32_t i = 0; !present && i < base->eos_count; i++) {
        const cJSON id = {.type = cJSON_Number, .valuedouble = base->eos_ids[i]};
        const bd_config_source source = {.path = path};
        if ((status = add_eos(&source, &id, &config, err)) != BD_OK) return status;
    }
    *out = config;
    return BD_OK;
}
