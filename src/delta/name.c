/* name.c - which names a base or a variant may have, and which directories may be variants. */
#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/delta/delta.h"

static bool has_parent_part(const char *name) {
    for (const char *part = name; part; part = strchr(part, '/')) {
        if (*part == '/') part++;
        if (part[0] == '.' && part[1] == '.' && (part[2] == '/' || part[2] == '\0')) return true;
    }
    return false;
}

/* What a killed compress leaves: NAME.tmp-<process>. */
static bool is_leftover(const char *entry) {
    const char *end = entry + strlen(entry), *digits = end;
    while (digits > entry && digits[-1] >= '0' && digits[-1] <= '9')
        digits--;
    return digits < end && digits - entry > 5 && memcmp(digits - 5, ".tmp-", 5) == 0;
}

bool bd_delta_is_entry(const char *entry) {
    return entry[0] != '.' && !is_leftover(entry);
}

const char *bd_variant_name_fault(const char *name) {
    const size_t bytes = strlen(name);
    if (bytes == 0) return "is empty";
    if (bytes > BD_VARIANT_NAME_MAX) return "has over 128 bytes";
    _Static_assert(BD_VARIANT_NAME_MAX == 128, "said in the text above");
    if (bd_utf8_valid_prefix(name, bytes) != bytes) return "is not valid UTF-8";
    for (const char *p = name; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) return "has a control character";
        if (*p == '"' || *p == '\'' || *p == '`') return "has a quote";
        if (*p == '\\') return "has a backslash";
    }
    if (name[0] == ' ' || name[bytes - 1] == ' ') return "begins or ends with a space";
    if (has_parent_part(name)) return "has a part \"..\"";
    return NULL;
}
