/* adapter_config.h - adapter_config.json of a PEFT LoRA adapter: what its A and B are multiplied
 * with. */
#ifndef BITDELTA_HF_ADAPTER_CONFIG_H
#define BITDELTA_HF_ADAPTER_CONFIG_H

#include "bitdelta/base/status.h"

#define BD_ADAPTER_RANK_MAX 256

typedef struct bd_adapter_config {
    uint32_t rank;
    float scale; /* alpha / r, or alpha / sqrt(r) with use_rslora */
} bd_adapter_config;

/* Reads DIR/adapter_config.json. Whatever asks for more than A and B of linears (DoRA, biases,
 * modules_to_save, ranks by pattern, an initialisation that changed the base, fields that are not
 * known) is BD_E_UNSUPPORTED by its name. */
BD_MUST_CHECK bd_status bd_adapter_config_read(const char *dir, bd_adapter_config *out,
                                               bd_error *err);

#endif
