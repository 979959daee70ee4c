/* lora.h - a PEFT LoRA adapter (adapter_config.json, adapter_model.safetensors) as the low-rank
 * terms of an overlay. Owner: one session, one thread. */
#ifndef BITDELTA_SRC_TOOLS_LORA_H
#define BITDELTA_SRC_TOOLS_LORA_H

#include "bitdelta/model/model.h"

typedef struct bd_lora bd_lora;

/* Reads the config and the tensors' headers and checks both against the base. What changes the
 * arithmetic and is not A and B of a layer's linear (DoRA, biases, modules_to_save, ...) is refused
 * by its name. */
BD_MUST_CHECK bd_status bd_lora_open(const char *dir, const bd_model_config *config, bd_lora **out,
                                     bd_error *err);
void bd_lora_close(bd_lora *lora); /* NULL is fine */
uint32_t bd_lora_rank(const bd_lora *lora);
/* On each of so many ranks, among which the config can be split. */
uint64_t bd_lora_device_bytes(const bd_lora *lora, uint32_t rank_count);
/* Puts every rank's part of A and B at the start of its delta arena, once. *overlay is the lora's.
 */
BD_MUST_CHECK bd_status bd_lora_load(bd_lora *lora, bd_model *model, const bd_overlay **overlay,
                                     bd_error *err);

#endif
