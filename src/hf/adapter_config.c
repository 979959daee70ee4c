/* adapter_config.c - see adapter_config.h. Threads: any. */
#include "bitdelta/hf/adapter_config.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/json_scan.h"

enum { CONFIG_BYTES_MAX = 1 << 20, PATH_BYTES = 1200 };

/* Says something, rather than null, false or nothing. */
static bool is_set(const cJSON *item) {
    if (!item || cJSON_IsNull(item) || cJSON_IsFalse(item)) return false;
    return !((cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child);
}

/* Fields that do not change what A and B mean, or are read below. Which modules have A and B, and
 * in which layers, is told by the tensors themselves. */
static bool is_known(const char *field) {
    static const char *const known[] = {
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "auto_mapping",
        "inference_mode",
        "revision",
        "peft_version",
        "parent_library",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "init_lora_weights",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i], field) == 0) return true;
    }
    return false;
}

static bool is_text(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
}

static bd_status check_fields(const char *path, const cJSON *root, bd_error *err) {
    const cJSON *item;
    cJSON_ArrayForEach(item, root) {
        if (is_set(item) && !is_known(item->string)) {
            return bd_fail(err, BD_E_UNSUPPORTED, item->string, "%s: \"%s\" is not supported", path,
                           item->string);
        }
    }
    if (!is_text(cJSON_GetObjectItemCaseSensitive(root, "peft_type"), "LORA")) {
        return bd_fail(err, BD_E_UNSUPPORTED, "peft_type", "%s: \"peft_type\" is not \"LORA\"",
                       path);
    }
    item = cJSON_GetObjectItemCaseSensitive(root, "bias");
    if (is_set(item) && !is_text(item, "none")) {
        return bd_fail(err, BD_E_UNSUPPORTED, "bias",
                       "%s: \"bias\" other than \"none\" is not supported", path);
    }
    /* PiSSA, OLoRA, CorDA and LoftQ take part of the base's weights away when they start. */
    item = cJSON_GetObjectItemCaseSensitive(root, "init_lora_weights");
    if (cJSON_IsString(item) && !is_text(item, "gaussian") && !is_text(item, "eva") &&
        !is_text(item, "orthogonal")) {
        return bd_fail(err, BD_E_UNSUPPORTED, "init_lora_weights",
                       "%s: \"init_lora_weights\" of a kind that changes the base is not supported",
                       path);
    }
    return BD_OK;
}

static bd_status read_scale(const char *path, const cJSON *root, bd_adapter_config *out,
                            bd_error *err) {
    const cJSON *rank = cJSON_GetObjectItemCaseSensitive(root, "r");
    const cJSON *alpha = cJSON_GetObjectItemCaseSensitive(root, "lora_alpha");
    const double r = cJSON_IsNumber(rank) ? rank->valuedouble : 0;
    if (!(r >= 1 && r <= BD_ADAPTER_RANK_MAX && r <= floor(r))) {
        return bd_fail(err, BD_E_UNSUPPORTED, "r", "%s: \"r\" is not a whole number within 1..%d",
                       path, BD_ADAPTER_RANK_MAX);
    }
    if (!cJSON_IsNumber(alpha) || !isfinite((float)alpha->valuedouble)) {
        return bd_fail(err, BD_E_FORMAT, "lora_alpha", "%s: \"lora_alpha\" is not a number", path);
    }
    const bool by_root = is_set(cJSON_GetObjectItemCaseSensitive(root, "use_rslora"));
    out->rank = (uint32_t)r;
    out->scale = (float)(alpha->valuedouble / (by_root ? sqrt(r) : r));
    return BD_OK;
}

bd_status bd_adapter_config_read(const char *dir, bd_adapter_config *out, bd_error *err) {
    static const bd_json_limits limits = {.depth_max = 16, .nodes_max = 100000};
    char path[PATH_BYTES], *text = NULL;
    size_t bytes = 0;
    bd_json_scan scan;
    bd_status s = bd_path_join(path, sizeof path, dir, "adapter_config.json", err);
    if (s == BD_OK) s = bd_file_read(path, CONFIG_BYTES_MAX, &text, &bytes, err);
    if (s != BD_OK) return s;
    s = bd_json_check(text, bytes, &limits, &scan, err);
    cJSON *root =
        s == BD_OK ? cJSON_ParseWithLength(text + scan.offset, bytes - scan.offset) : NULL;
    if (s == BD_OK && !cJSON_IsObject(root))
        s = bd_fail(err, BD_E_FORMAT, path, "%s is not a JSON object", path);
    if (s == BD_OK) s = check_fields(path, root, err);
    if (s == BD_OK) s = read_scale(path, root, out, err);
    cJSON_Delete(root);
    free(text);
    return s;
}
