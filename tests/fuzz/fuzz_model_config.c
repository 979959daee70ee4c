/* fuzz_model_config.c - any bytes as config.json, then, behind a NUL byte, generation_config.json.
 * What is accepted is a model that can be built; the same text is read as adapter_config.json too.
 */
#include "fuzz.h"

#include <math.h>
#include <string.h>

#include "bitdelta/hf/adapter_config.h"
#include "bitdelta/hf/model_config.h"

static void check_sizes(const bd_model_config *c) {
    BD_ASSERT(c->layers > 0 && c->layers <= BD_LAYERS_MAX);
    BD_ASSERT(c->hidden > 0 && c->ffn > 0);
    BD_ASSERT(c->heads > 0 && c->kv_heads > 0 && c->heads % c->kv_heads == 0);
    BD_ASSERT(c->head_dim > 0 && c->head_dim % 2 == 0 && c->head_dim <= 256);
    BD_ASSERT((uint64_t)c->heads * c->head_dim <= INT32_MAX);
    BD_ASSERT(c->vocab > 0 && c->vocab <= INT32_MAX && c->max_positions > 0);
    BD_ASSERT(c->rope.rotary_dim <= c->head_dim && c->rope.rotary_dim % 2 == 0);
    BD_ASSERT(c->eos_count <= BD_EOS_IDS_MAX && c->bos_id >= -1);
    for (uint32_t i = 0; i < c->eos_count; i++)
        BD_ASSERT(c->eos_ids[i] >= 0);
}

static void check_numbers(const bd_model_config *c) {
    const bd_rope_config *rope = &c->rope;
    BD_ASSERT(isfinite(c->norm_eps) && c->norm_eps >= 0);
    BD_ASSERT(isfinite(c->embed_scale) && isfinite(c->attn_scale) && c->attn_scale > 0);
    BD_ASSERT(isfinite(c->attn_softcap) && isfinite(c->logit_softcap));
    BD_ASSERT(isfinite(rope->theta) && rope->theta > 0);
    BD_ASSERT(isfinite(rope->factor) && isfinite(rope->attention_factor));
    BD_ASSERT(isfinite(rope->low_freq_factor) && isfinite(rope->high_freq_factor));
    BD_ASSERT(isfinite(rope->beta_fast) && isfinite(rope->beta_slow));
    BD_ASSERT(isfinite(rope->mscale) && isfinite(rope->mscale_all_dim));
}

static void check_as_variant(const bd_model_config *config) {
    bd_model_config again;
    bd_error err;
    bd_error_clear(&err);
    BD_ASSERT(bd_model_config_read_variant(fuzz_directory(), config, &again, &err) == BD_OK);
    BD_ASSERT(bd_model_config_check_variant(config, &again, "config.json", &err) == BD_OK);
    BD_ASSERT(!bd_model_config_variant_differs(config, &again));
}

static void read_adapter(const fuzz_part *text) {
    fuzz_write("adapter_config.json", text->data, text->bytes);
    bd_adapter_config adapter;
    bd_error err;
    bd_error_clear(&err);
    const bd_status status = bd_adapter_config_read(fuzz_directory(), &adapter, &err);
    if (status != BD_OK) {
        fuzz_check_error(status, &err);
        return;
    }
    BD_ASSERT(adapter.rank >= 1 && adapter.rank <= BD_ADAPTER_RANK_MAX && isfinite(adapter.scale));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    fuzz_part config_text, generation_text;
    fuzz_split(data, bytes, &config_text, &generation_text);
    fuzz_write("config.json", config_text.data, config_text.bytes);
    if (generation_text.present)
        fuzz_write("generation_config.json", generation_text.data, generation_text.bytes);
    else
        fuzz_remove("generation_config.json");
    bd_model_config config;
    bd_error err;
    bd_error_clear(&err);
    const bd_status status = bd_model_config_read(fuzz_directory(), &config, &err);
    if (status == BD_OK) {
        check_sizes(&config);
        check_numbers(&config);
        check_as_variant(&config);
    } else {
        fuzz_check_error(status, &err);
    }
    read_adapter(&config_text);
    return 0;
}
