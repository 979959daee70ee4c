/* load_json.c - typed access to the JSON tree with errors that name the component. Threads: any. */
#include <string.h>

#include "load.h"

const cJSON *bd_load_member(const cJSON *object, const char *key) {
    const cJSON *found = NULL, *item;
    cJSON_ArrayForEach(item, object) {
        if (item->string && !strcmp(item->string, key)) found = item;
    }
    return found && cJSON_IsNull(found) ? NULL : found;
}

bd_status bd_load_unsupported(bd_load *load, const char *where, const char *what,
                              const char *value) {
    return bd_fail(load->err, BD_E_UNSUPPORTED, load->name, "%s: %s \"%.80s\" is not supported",
                   where, what, value);
}

bd_status bd_load_memory(bd_load *load) {
    return bd_fail(load->err, BD_E_MEMORY, load->name, "out of memory while it was loaded");
}

bd_status bd_load_string(bd_load *load, const cJSON *object, const char *where, const char *key,
                         const char **value) {
    const cJSON *item = bd_load_member(object, key);
    *value = "";
    if (!cJSON_IsString(item))
        return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: \"%s\" must be a string", where,
                       key);
    *value = item->valuestring;
    return BD_OK;
}

bd_status bd_load_type(bd_load *load, const cJSON *object, const char *where, const char **type) {
    *type = "";
    if (!cJSON_IsObject(object))
        return bd_fail(load->err, BD_E_FORMAT, load->name, "%s must be an object", where);
    return bd_load_string(load, object, where, "type", type);
}

bd_status bd_load_bool(bd_load *load, const cJSON *object, const char *where, const char *key,
                       int fallback, bool *value) {
    const cJSON *item = bd_load_member(object, key);
    if (cJSON_IsBool(item))
        *value = cJSON_IsTrue(item);
    else if (!item && fallback >= 0)
        *value = fallback != 0;
    else
        return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: \"%s\" must be true or false",
                       where, key);
    return BD_OK;
}

bd_status bd_load_array(bd_load *load, const cJSON *object, const char *where, const char *key,
                        const cJSON **value) {
    *value = bd_load_member(object, key);
    if (cJSON_IsArray(*value)) return BD_OK;
    return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: \"%s\" must be an array", where, key);
}

bd_status bd_load_id(bd_load *load, const cJSON *item, const char *where, uint32_t *id) {
    *id = 0;
    if (cJSON_IsNumber(item) && item->valuedouble >= 0 &&
        item->valuedouble < (double)BD_TOKENIZER_VOCAB_MAX) {
        *id = (uint32_t)item->valuedouble;
        if ((double)*id >= item->valuedouble) return BD_OK;
    }
    return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: a token id must be 0 to %u", where,
                   BD_TOKENIZER_VOCAB_MAX - 1);
}

bd_status bd_load_pattern(bd_load *load, const cJSON *object, const char *where,
                          const char **pattern, bool *regex) {
    const cJSON *holder = bd_load_member(object, "pattern");
    const cJSON *literal = bd_load_member(holder, "String"), *re = bd_load_member(holder, "Regex");
    const cJSON *found = re ? re : literal;
    *pattern = "";
    *regex = false;
    if (!cJSON_IsObject(holder) || !cJSON_IsString(found) || (re && literal))
        return bd_fail(load->err, BD_E_FORMAT, load->name,
                       "%s: \"pattern\" must hold a \"String\" or a \"Regex\"", where);
    if (found->valuestring[0] == '\0')
        return bd_fail(load->err, BD_E_UNSUPPORTED, load->name, "%s: the pattern is empty", where);
    *pattern = found->valuestring;
    *regex = re != NULL;
    return BD_OK;
}
