/* config_fields.c - see config_fields.h. Threads: any. */
#include "config_fields.h"

#include <float.h>
#include <math.h>

const cJSON *bd_config_value(const bd_config_source *source, const char *field) {
    const cJSON *value = bd_json_member(source->object, field);
    return value && !cJSON_IsNull(value) ? value : NULL;
}

bd_status bd_config_fault(const bd_config_source *source, const char *field, bd_error *err,
                          const char *what) {
    return bd_fail(err, BD_E_FORMAT, field, "%s: \"%s\" %s", source->path, field, what);
}

bd_status bd_config_refuse(const bd_config_source *source, const char *field, bd_error *err,
                           const char *what) {
    return bd_fail(err, BD_E_UNSUPPORTED, field, "%s: \"%s\" %s", source->path, field, what);
}

bd_status bd_config_u32(const bd_config_source *source, const char *field, uint32_t min,
                        uint32_t max, uint32_t *out, bd_error *err) {
    const cJSON *value = bd_config_value(source, field);
    uint64_t number;
    if (!value) return bd_config_fault(source, field, err, "is missing");
    if (!bd_json_u64(value, max, &number) || number < min) {
        return bd_fail(err, BD_E_FORMAT, field, "%s: \"%s\" is not an integer from %u to %u",
                       source->path, field, min, max);
    }
    *out = (uint32_t)number;
    return BD_OK;
}

bd_status bd_config_u32_or(const bd_config_source *source, const char *field, uint32_t max,
                           uint32_t fallback, uint32_t *out, bd_error *err) {
    if (bd_config_value(source, field)) return bd_config_u32(source, field, 1, max, out, err);
    *out = fallback;
    return BD_OK;
}

bd_status bd_config_bool_or(const bd_config_source *source, const char *field, bool fallback,
                            bool *out, bd_error *err) {
    const cJSON *value = bd_config_value(source, field);
    if (value && !cJSON_IsBool(value))
        return bd_config_fault(source, field, err, "is neither true nor false");
    *out = value ? cJSON_IsTrue(value) != 0 : fallback;
    return BD_OK;
}

bd_status bd_config_positive(const bd_config_source *source, const char *field, double *out,
                             bd_error *err) {
    const cJSON *value = bd_config_value(source, field);
    if (!value) return bd_config_fault(source, field, err, "is missing");
    if (!cJSON_IsNumber(value) || !isfinite(value->valuedouble) || !(value->valuedouble > 0.0))
        return bd_config_fault(source, field, err, "is not a number above zero");
    /* What is made of it is float32. */
    if (value->valuedouble < (double)FLT_MIN || value->valuedouble > (double)FLT_MAX)
        return bd_config_fault(source, field, err, "is beyond the range of float32");
    *out = value->valuedouble;
    return BD_OK;
}

bd_status bd_config_positive_or(const bd_config_source *source, const char *field, double fallback,
                                double *out, bd_error *err) {
    if (bd_config_value(source, field)) return bd_config_positive(source, field, out, err);
    *out = fallback;
    return BD_OK;
}
