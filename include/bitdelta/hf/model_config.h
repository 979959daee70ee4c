/* model_config.h - config.json and generation_config.json of the supported families, normalised.
 * Both the published form (rope_theta, rope_scaling, torch_dtype) and the form of transformers 5
 * (rope_parameters, dtype) are read. Anything that would change the arithmetic and is not known
 * here is refused by field name: quantization_config, other activations, other rope types, MoE
 * fields, ... */
#ifndef BITDELTA_HF_MODEL_CONFIG_H
#define BITDELTA_HF_MODEL_CONFIG_H

#include "bitdelta/base/status.h"

/* Vocabulary rows that a variant may add to its base's. */
#define BD_EXTRA_VOCAB_MAX 256u

#define BD_EOS_IDS_MAX 8
#define BD_LAYERS_MAX  256

typedef enum bd_family {
    BD_FAMILY_LLAMA,   /* LlamaForCausalLM; attention_bias allowed */
    BD_FAMILY_QWEN2,   /* biases on q, k, v */
    BD_FAMILY_QWEN3,   /* RMSNorm on q and k heads before rope */
    BD_FAMILY_MISTRAL, /* sliding window */
    BD_FAMILY_PHI3,    /* fused qkv_proj and gate_up_proj in the checkpoint */
    BD_FAMILY_GEMMA2   /* four norms with 1 + w, soft caps, scaled embedding, mixed window */
} bd_family;

typedef enum bd_rope_kind {
    BD_ROPE_PLAIN,
    BD_ROPE_LINEAR,
    BD_ROPE_LLAMA3,
    BD_ROPE_YARN,
    BD_ROPE_LONGROPE
} bd_rope_kind;

typedef struct bd_rope_config {
    bd_rope_kind kind;
    double theta;
    double factor;                            /* linear, llama3, yarn */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn, and the rest up to truncate */
    double attention_factor;                  /* 0: derived */
    double mscale, mscale_all_dim;
    bool truncate;
    uint32_t original_max_positions;
    uint32_t rotary_dim; /* head_dim unless partial_rotary_factor says less */
} bd_rope_config;

typedef enum bd_activation { BD_ACT_SILU, BD_ACT_GELU_TANH } bd_activation;

typedef struct bd_model_config {
    bd_family family;
    uint32_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab;
    uint32_t max_positions;
    uint32_t window_tokens; /* 0: full attention; else a query sees itself and window - 1 more */
    uint8_t window_layer[BD_LAYERS_MAX]; /* 1: this layer uses the window */
    float norm_eps;
    bool norm_plus_one; /* gamma is 1 + w (Gemma) */
    bool qkv_bias, o_bias, mlp_bias, qk_norm, post_norms, tied;
    bd_activation activation;
    float embed_scale; /* 1 unless Gemma: sqrt(hidden) in float32, as transformers has it for
                          float32 weights (there it takes the dtype of the weights) */
    float attn_scale;  /* 1/sqrt(head_dim) unless query_pre_attn_scalar */
    float attn_softcap, logit_softcap; /* 0: none */
    bd_rope_config rope;
    int32_t bos_id; /* -1: none */
    uint32_t eos_count;
    int32_t eos_ids[BD_EOS_IDS_MAX]; /* config.json's and generation_config.json's together */
} bd_model_config;

/* Reads DIR/config.json and, if there, DIR/generation_config.json. Every limit is checked (layers,
 * vocab, heads divisible by kv_heads, even head_dim <= 256, hidden, ffn multiples of 8, ...). */
BD_MUST_CHECK bd_status bd_model_config_read(const char *dir, bd_model_config *out, bd_error *err);

/* A variant's own config.json: only rope_*, max_position_embeddings, sliding_window, eos/bos/pad
 * ids, vocab_size and tie_word_embeddings (where the tensors decide) may differ from the base's;
 * any other difference is BD_E_MISMATCH naming the field. */
BD_MUST_CHECK bd_status bd_model_config_read_variant(const char *dir, const bd_model_config *base,
                                                     bd_model_config *out, bd_error *err);

/* The rule above on two configs already read; subject: the path, for the message. */
BD_MUST_CHECK bd_status bd_model_config_check_variant(const bd_model_config *base,
                                                      const bd_model_config *variant,
                                                      const char *subject, bd_error *err);
/* Does anything that may differ do so? */
bool bd_model_config_variant_differs(const bd_model_config *base, const bd_model_config *variant);

#endif
