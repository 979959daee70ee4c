/* name.c - which names a base or a variant may have, and which directories may be variants. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "bitdelta/base/file.h"
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

bd_status bd_delta_check_parent(const char *dir, bd_error *err) {
    char file[4096];
    const bd_status status = bd_path_join(file, sizeof file, dir, "delta.json", err);
    if (status != BD_OK || !bd_file_exists(file)) return status;
    return bd_fail(err, BD_E_ARGUMENT, dir,
                   "deltas: %s is a delta itself; give the directory that it is in, or serve it "
                   "alone with --variant NAME=DIR",
                   dir);
}

bd_status bd_delta_find(const char *dir, const char *entry, char *path, size_t path_bytes,
                        bd_error *err) {
    char file[4096];
    path[0] = '\0';
    if (!bd_delta_is_entry(entry)) return BD_E_NOT_FOUND;
    bd_status status = bd_path_join(path, path_bytes, dir, entry, err);
    if (status == BD_OK) status = bd_path_join(file, sizeof file, path, "delta.json", err);
    if (status != BD_OK) return status;
    if (bd_file_exists(file)) {
        if (access(file, F_OK) == 0) return BD_OK;
        return bd_fail_errno(err, BD_E_IO, file, errno, "%s cannot be reached", file);
    }
    if (access(path, F_OK) == 0) return BD_E_NOT_FOUND;
    const int why = errno;
    /* Whoever made a link that leads nowhere meant a variant. */
    if (!bd_file_exists(path)) return BD_E_NOT_FOUND; /* removed meanwhile */
    return bd_fail_errno(err, BD_E_IO, path, why, "the link %s leads nowhere", path);
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
