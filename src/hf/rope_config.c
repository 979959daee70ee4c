/* rope_config.c - rotary position encoding of config.json. Published checkpoints say rope_theta and
 * rope_scaling; transformers 5 writes rope_parameters. As there, a non-empty rope_scaling wins,
 * values inside the object win over those beside it, and only Phi-3 lets partial_rotary_factor
 * shrink the rotated part. Threads: any. */
#include <string.h>

#include "config_fields.h"

#define POSITIONS_MAX (1u << 28)

static bd_status check_keys(const bd_config_source *rope, const char *container, bd_error *err) {
    static const char *const known[] = {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    };
    for (const cJSON *item = rope->object->child; item; item = item->next) {
        size_t i = 0;
        while (i < sizeof known / sizeof known[0] && strcmp(known[i], item->string) != 0)
            i++;
        if (i < sizeof known / sizeof known[0] || cJSON_IsNull(item)) continue;
        return bd_fail(err, BD_E_UNSUPPORTED, item->string, "%s: \"%s\" in %s is not supported",
                       rope->path, item->string, container);
    }
    return BD_OK;
}

static bd_status read_kind(const bd_config_source *rope, const char *container, bd_family family,
                           bd_rope_kind *out, bd_error *err) {
    static const struct {
        const char *name;
        bd_rope_kind kind;
    } kinds[] = {{"default", BD_ROPE_PLAIN},
                 {"linear", BD_ROPE_LINEAR},
                 {"llama3", BD_ROPE_LLAMA3},
                 {"yarn", BD_ROPE_YARN}};
    const cJSON *value = bd_config_value(rope, "rope_type");
    const char *field = value ? "rope_type" : "type";
    if (!value) value = bd_config_value(rope, "type");
    *out = BD_ROPE_PLAIN;
    if (!value) return BD_OK;
    if (!cJSON_IsString(value)) return bd_config_fault(rope, field, err, "is not a string");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        /* Phi-3 reads "yarn" as its own long-context type and knows no other but the default. */
        const bool allowed = family != BD_FAMILY_PHI3 || kinds[i].kind == BD_ROPE_PLAIN;
        if (!allowed || strcmp(value->valuestring, kinds[i].name) != 0) continue;
        *out = kinds[i].kind;
        return BD_OK;
    }
    return bd_fail(err, BD_E_UNSUPPORTED, field, "%s: \"%s\" in %s: \"%s\" is not supported%s",
                   rope->path, field, container, value->valuestring,
                   family == BD_FAMILY_PHI3 ? " for this model"
                                            : " (default, linear, llama3 and yarn are)");
}

static bd_status read_llama3(const bd_config_source *rope, bd_rope_config *out, bd_error *err) {
    bd_status status = bd_config_positive(rope, "factor", &out->factor, err);
    if (status != BD_OK) return status;
    if ((status = bd_config_positive(rope, "low_freq_factor", &out->low_freq_factor, err)) != BD_OK)
        return status;
    if ((status = bd_config_positive(rope, "high_freq_factor", &out->high_freq_factor, err)) !=
        BD_OK)
        return status;
    if (out->high_freq_factor > out->low_freq_factor) return BD_OK;
    return bd_config_fault(rope, "high_freq_factor", err, "is not above low_freq_factor");
}

/* Zero or null means "the default" for all of these, as in transformers. */
static bd_status read_unless_zero(const bd_config_source *rope, const char *field, double fallback,
                                  double *out, bd_error *err) {
    const cJSON *value = bd_config_value(rope, field);
    *out = fallback;
    if (!value ||
        (cJSON_IsNumber(value) && !(value->valuedouble > 0.0) && !(value->valuedouble < 0.0)))
        return BD_OK;
    return bd_config_positive(rope, field, out, err);
}

static bd_status read_yarn(const bd_config_source *rope, uint32_t max_positions,
                           bd_rope_config *out, bd_error *err) {
    const double ratio = (double)max_positions / (double)out->original_max_positions;
    bd_status status = bd_json_member(rope->object, "factor")
                           ? bd_config_positive_or(rope, "factor", ratio, &out->factor, err)
                           : bd_config_fault(rope, "factor", err, "is missing");
    if (status == BD_OK) status = read_unless_zero(rope, "beta_fast", 32.0, &out->beta_fast, err);
    if (status == BD_OK) status = read_unless_zero(rope, "beta_slow", 1.0, &out->beta_slow, err);
    if (status == BD_OK)
        status = bd_config_positive_or(rope, "attention_factor", 0.0, &out->attention_factor, err);
    if (status == BD_OK) status = read_unless_zero(rope, "mscale", 0.0, &out->mscale, err);
    if (status == BD_OK)
        status = read_unless_zero(rope, "mscale_all_dim", 0.0, &out->mscale_all_dim, err);
    if (status == BD_OK) status = bd_config_bool_or(rope, "truncate", true, &out->truncate, err);
    return status;
}

static bd_status read_rotary_dim(const bd_config_source *source, const bd_config_source *rope,
                                 bd_model_config *out, bd_error *err) {
    const bd_config_source *from = bd_config_value(rope, "partial_rotary_factor") ? rope : source;
    double factor;
    const bd_status status =
        bd_config_positive_or(from, "partial_rotary_factor", 1.0, &factor, err);
    if (status != BD_OK) return status;
    if (factor > 1.0) return bd_config_fault(source, "partial_rotary_factor", err, "is above 1");
    out->rope.rotary_dim = (uint32_t)((double)out->head_dim * factor);
    if (out->rope.rotary_dim == out->head_dim) return BD_OK;
    if (out->family != BD_FAMILY_PHI3) {
        return bd_config_refuse(source, "partial_rotary_factor", err,
                                "below 1 is not supported for this model");
    }
    if (out->rope.rotary_dim >= 2 && out->rope.rotary_dim % 2 == 0) return BD_OK;
    return bd_config_fault(source, "partial_rotary_factor", err,
                           "does not leave an even number of dimensions");
}

bd_status bd_config_read_rope(const bd_config_source *source, bd_model_config *out, bd_error *err) {
    const cJSON nothing = {.type = cJSON_Object};
    const char *container = "rope_scaling";
    const cJSON *object = bd_config_value(source, container);
    if (!object || (cJSON_IsObject(object) && !object->child)) {
        container = "rope_parameters";
        object = bd_config_value(source, container);
    }
    if (object && !cJSON_IsObject(object))
        return bd_config_fault(source, container, err, "is not an object");
    const bd_config_source rope = {.path = source->path, .object = object ? object : &nothing};
    bd_rope_config *r = &out->rope;
    bd_status status = check_keys(&rope, container, err);
    if (status != BD_OK) return status;
    if ((status = read_kind(&rope, container, out->family, &r->kind, err)) != BD_OK) return status;
    const bd_config_source *theta_from = bd_config_value(&rope, "rope_theta") ? &rope : source;
    if ((status = bd_config_positive_or(theta_from, "rope_theta", 10000.0, &r->theta, err)) !=
        BD_OK)
        return status;
    status = bd_config_u32_or(&rope, "original_max_position_embeddings", POSITIONS_MAX,
                              out->max_positions, &r->original_max_positions, err);
    if (status != BD_OK) return status;
    r->factor = 1.0;
    r->truncate = true;
    if (r->kind == BD_ROPE_LINEAR) status = bd_config_positive(&rope, "factor", &r->factor, err);
    if (r->kind == BD_ROPE_LLAMA3) status = read_llama3(&rope, r, err);
    if (r->kind == BD_ROPE_YARN) status = read_yarn(&rope, out->max_positions, r, err);
    return status == BD_OK ? read_rotary_dim(source, &rope, out, err) : status;
}
