/* config_fields.h - reading config.json field by field, for the files of this room. Every fault
 * names the field. */
#ifndef BITDELTA_SRC_HF_CONFIG_FIELDS_H
#define BITDELTA_SRC_HF_CONFIG_FIELDS_H

#include "bitdelta/hf/json_text.h"
#include "bitdelta/hf/model_config.h"

typedef struct bd_config_source {
    const char *path; /* of the file, for messages */
    const cJSON *object;
} bd_config_source;

/* Absent and null are the same to most fields: both read as NULL here. */
const cJSON *bd_config_value(const bd_config_source *source, const char *field);

bd_status bd_config_fault(const bd_config_source *source, const char *field, bd_error *err,
                          const char *what);
bd_status bd_config_refuse(const bd_config_source *source, const char *field, bd_error *err,
                           const char *what);

/* An integer in [min, max]. Required: absent or null is a fault. Or: *out becomes fallback. */
bd_status bd_config_u32(const bd_config_source *source, const char *field, uint32_t min,
                        uint32_t max, uint32_t *out, bd_error *err);
bd_status bd_config_u32_or(const bd_config_source *source, const char *field, uint32_t max,
                           uint32_t fallback, uint32_t *out, bd_error *err); /* min 1 */
bd_status bd_config_bool_or(const bd_config_source *source, const char *field, bool fallback,
                            bool *out, bd_error *err);
/* Above zero and within the range of float32. */
bd_status bd_config_positive(const bd_config_source *source, const char *field, double *out,
                             bd_error *err);
bd_status bd_config_positive_or(const bd_config_source *source, const char *field, double fallback,
                                double *out, bd_error *err);

/* Position encoding; needs family, head_dim and max_positions of *out. */
bd_status bd_config_read_rope(const bd_config_source *source, bd_model_config *out, bd_error *err);

#endif
