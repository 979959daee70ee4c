/* value.c - parsing and ownership of option values. Threads: the caller's. */
#include "value.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"

static bd_status no_memory(const value_place *place, bd_error *err) {
    return bd_fail(err, BD_E_MEMORY, place->subject, "%s: out of memory", place->label);
}

/* --- numbers --- */

/* All of the text as a decimal number; *rest is where the digits end. False: no digit, or over 64
 * bits. */
static bool parse_digits(const char *text, uint64_t *value, const char **rest) {
    uint64_t sum = 0;
    const char *p = text;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (__builtin_mul_overflow(sum, (uint64_t)10, &sum)) return false;
        if (__builtin_add_overflow(sum, (uint64_t)(*p - '0'), &sum)) return false;
    }
    *value = sum;
    *rest = p;
    return p != text;
}

/* "64GiB" and the like; a plain number is bytes. */
static bool parse_size(const char *text, uint64_t *value) {
    static const char *const k_suffixes[] = {"", "KiB", "MiB", "GiB", "TiB"};
    const char *rest;
    if (!parse_digits(text, value, &rest)) return false;
    for (unsigned i = 0; i < sizeof k_suffixes / sizeof k_suffixes[0]; i++) {
        if (strcmp(rest, k_suffixes[i]) != 0) continue;
        return !__builtin_mul_overflow(*value, (uint64_t)1 << (10 * i), value);
    }
    return false;
}

static bd_status parse_whole(const option_row *row, void *field, const char *text,
                             const value_place *place, bd_error *err) {
    uint64_t value;
    const char *rest = "";
    bool size = row->type == OPTION_SIZE;
    bool fine = size ? parse_size(text, &value) : parse_digits(text, &value, &rest) && !*rest;
    if (!fine && size) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject,
                       "%s: \"%.64s\" is not a size (whole number with KiB, MiB, GiB, TiB or "
                       "nothing behind it)",
                       place->label, text);
    }
    if (!fine) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject,
                       "%s: \"%.64s\" is not a whole number in %llu..%llu", place->label, text,
                       (unsigned long long)row->min, (unsigned long long)row->max);
    }
    if (value < row->min || value > row->max) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: %.64s is not in %llu..%llu",
                       place->label, text, (unsigned long long)row->min,
                       (unsigned long long)row->max);
    }
    if (row->type == OPTION_U32) {
        *(uint32_t *)field = (uint32_t)value;
    } else {
        *(uint64_t *)field = value;
    }
    return BD_OK;
}

static bd_status parse_double(const option_row *row, double *field, const char *text,
                              const value_place *place, bd_error *err) {
    char *end = NULL;
    /* strtod alone would also take "nan", "inf", hexadecimal and leading space. */
    bool plain = *text && strspn(text, "0123456789+-.eE") == strlen(text);
    double value = plain ? strtod(text, &end) : 0;
    if (!plain || *end || !isfinite(value)) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: \"%.64s\" is not a number",
                       place->label, text);
    }
    if (!(value >= (double)row->min && value <= (double)row->max)) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: %.64s is not in %llu..%llu",
                       place->label, text, (unsigned long long)row->min,
                       (unsigned long long)row->max);
    }
    *field = value;
    return BD_OK;
}

/* --- words --- */

static bd_status parse_bool(bool *field, const char *text, const value_place *place,
                            bd_error *err) {
    bool yes = strcmp(text, "true") == 0;
    if (!yes && strcmp(text, "false") != 0) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject,
                       "%s: \"%.64s\" is neither true nor false", place->label, text);
    }
    *field = yes;
    return BD_OK;
}

static bd_status parse_enum(const option_row *row, uint32_t *field, const char *text,
                            const value_place *place, bd_error *err) {
    char known[128] = "";
    size_t len = 0;
    for (uint32_t i = 0; row->names[i]; i++) {
        if (strcmp(text, row->names[i]) == 0) {
            *field = i;
            return BD_OK;
        }
        size_t name_len = strlen(row->names[i]);
        if (len + name_len + 3 > sizeof known) continue;
        if (len > 0) known[len++] = '|';
        memcpy(known + len, row->names[i], name_len + 1);
        len += name_len;
    }
    return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: \"%.64s\" is not one of %s",
                   place->label, text, known);
}

/* A header loses spaces at its ends and ends with the line: often a key was read from a file with
 * the end of its line. */
static bool can_be_sent(const char *key) {
    enum { SENT_BYTES_MAX = 4096 };
    const size_t len = strlen(key);
    for (const char *p = key; *p; p++)
        if ((unsigned char)*p < ' ' || *p == 0x7f) return false;
    return len <= SENT_BYTES_MAX && key[0] != ' ' && (len == 0 || key[len - 1] != ' ');
}

static bd_status check_string(const option_row *row, const char *text, const value_place *place,
                              bd_error *err) {
    if (!*text && !row->may_be_empty) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: empty", place->label);
    }
    if (row->is_key && !can_be_sent(text)) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject,
                       "%s: no client can send this key: it has over 4096 bytes, a control "
                       "character (a line end?) or a space at an end",
                       place->label);
    }
    size_t len = strlen(text);
    if (row->type != OPTION_PATH && bd_utf8_valid_prefix(text, len) != len) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: not valid UTF-8", place->label);
    }
    return BD_OK;
}

/* "host:port" or "[v6]:port". The host is resolved by whoever opens the socket. */
static bool address_fits(const char *text) {
    const char *colon = strrchr(text, ':');
    if (!colon || colon == text) return false;
    if (text[0] == '[') {
        if (colon[-1] != ']' || colon - text < 3) return false;
    } else if (memchr(text, ':', (size_t)(colon - text))) {
        return false; /* a bare IPv6 address: which colon starts the port? */
    }
    uint64_t port;
    const char *rest;
    return parse_digits(colon + 1, &port, &rest) && !*rest && port <= 65535;
}

static bd_status check_address(const option_row *row, const char *text, const value_place *place,
                               bd_error *err) {
    for (size_t i = 0; row->names && row->names[i]; i++) {
        if (strcmp(text, row->names[i]) == 0) return BD_OK;
    }
    if (address_fits(text)) return BD_OK;
    return bd_fail(err, BD_E_ARGUMENT, place->subject,
                   "%s: \"%.64s\" is not HOST:PORT (an IPv6 host in [ ])", place->label, text);
}

static bd_status parse_string(const option_row *row, char **field, const char *text,
                              const value_place *place, bd_error *err) {
    bd_status status = check_string(row, text, place, err);
    if (status == BD_OK && row->type == OPTION_ADDRESS)
        status = check_address(row, text, place, err);
    if (status != BD_OK) return status;
    char *copy = strdup(text);
    if (!copy) return no_memory(place, err);
    free(*field);
    *field = copy;
    return BD_OK;
}

/* --- lists --- */

static bd_status parse_ids(bd_id_list *field, const char *text, const value_place *place,
                           bd_error *err) {
    size_t count = 1;
    for (const char *p = text; *p; p++)
        count += *p == ',';
    if (count > (uint32_t)INT32_MAX) return no_memory(place, err);
    int32_t *ids = calloc(count, sizeof *ids);
    if (!ids) return no_memory(place, err);
    const char *p = text;
    for (size_t i = 0; i < count; i++) {
        uint64_t id;
        const char *rest = p;
        if (!parse_digits(p, &id, &rest) || id > INT32_MAX || (*rest && *rest != ',')) {
            free(ids);
            return bd_fail(err, BD_E_ARGUMENT, place->subject,
                           "%s: \"%.32s\" is not a token id (write 1,2,3)", place->label, p);
        }
        ids[i] = (int32_t)id;
        p = rest + 1;
    }
    free(field->ids);
    *field = (bd_id_list){.ids = ids, .count = (uint32_t)count};
    return BD_OK;
}

static bd_status add_string(const option_row *row, bd_string_list *list, const char *text,
                            const value_place *place, bd_error *err) {
    bd_status status = check_string(row, text, place, err);
    if (status != BD_OK) return status;
    char *copy = strdup(text);
    if (!copy) return no_memory(place, err);
    char **items = realloc(list->items, ((size_t)list->count + 1) * sizeof *items);
    if (!items) {
        free(copy);
        return no_memory(place, err);
    }
    items[list->count] = copy;
    list->items = items;
    list->count++;
    return BD_OK;
}

bd_status bd_value_add_variant(bd_variant_list *list, const char *name, const char *path, bool pin,
                               const value_place *place, bd_error *err) {
    size_t name_len = name ? strlen(name) : 1;
    if (name_len == 0 || !*path) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject,
                       "%s: a variant needs a name and a directory", place->label);
    }
    if (name && bd_utf8_valid_prefix(name, name_len) != name_len) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: not valid UTF-8", place->label);
    }
    for (uint32_t i = 0; name && i < list->count; i++) {
        if (!list->items[i].name || strcmp(list->items[i].name, name) != 0) continue;
        return bd_fail(err, BD_E_ARGUMENT, place->subject,
                       "%s: the variant name \"%.64s\" is given twice", place->label, name);
    }
    bd_variant_option item = {.name = name ? strdup(name) : NULL, .path = strdup(path), .pin = pin};
    bd_variant_option *items = realloc(list->items, ((size_t)list->count + 1) * sizeof *items);
    if (items) list->items = items;
    if (!items || !item.path || (name && !item.name)) {
        free(item.name);
        free(item.path);
        return no_memory(place, err);
    }
    list->items[list->count++] = item;
    return BD_OK;
}

static bd_status add_variant_text(bd_variant_list *list, const char *text, const value_place *place,
                                  bd_error *err) {
    const char *equals = strchr(text, '=');
    if (!equals) {
        return bd_fail(err, BD_E_ARGUMENT, place->subject, "%s: \"%.64s\" is not NAME=DIR",
                       place->label, text);
    }
    char *name = strndup(text, (size_t)(equals - text));
    if (!name) return no_memory(place, err);
    bd_status status = bd_value_add_variant(list, name, equals + 1, false, place, err);
    free(name);
    return status;
}

/* --- all types --- */

bd_status bd_value_parse(const option_row *row, void *field, const char *text,
                         const value_place *place, bd_error *err) {
    switch (row->type) {
    case OPTION_SWITCH:
    case OPTION_BOOL:
        return parse_bool(field, text, place, err);
    case OPTION_U32:
    case OPTION_U64:
    case OPTION_SIZE:
        return parse_whole(row, field, text, place, err);
    case OPTION_DOUBLE:
        return parse_double(row, field, text, place, err);
    case OPTION_ENUM:
        return parse_enum(row, field, text, place, err);
    case OPTION_STRING:
    case OPTION_PATH:
    case OPTION_ADDRESS:
        return parse_string(row, field, text, place, err);
    case OPTION_IDS:
        return parse_ids(field, text, place, err);
    case OPTION_STRINGS:
        return add_string(row, field, text, place, err);
    case OPTION_VARIANTS:
        return add_variant_text(field, text, place, err);
    }
    return bd_fail(err, BD_E_INTERNAL, place->subject, "%s: unknown type of option", place->label);
}

static void clear_strings(bd_string_list *list) {
    for (uint32_t i = 0; i < list->count; i++) {
        /* Keys must not stay readable in freed memory. */
        explicit_bzero(list->items[i], strlen(list->items[i]));
        free(list->items[i]);
    }
    free(list->items);
    *list = (bd_string_list){.count = 0};
}

static void clear_variants(bd_variant_list *list) {
    for (uint32_t i = 0; i < list->count; i++) {
        free(list->items[i].name);
        free(list->items[i].path);
    }
    free(list->items);
    *list = (bd_variant_list){.count = 0};
}

void bd_value_clear(const option_row *row, void *field) {
    switch (row->type) {
    case OPTION_STRING:
    case OPTION_PATH:
    case OPTION_ADDRESS: {
        char **text = field;
        if (*text && row->secret) explicit_bzero(*text, strlen(*text));
        free(*text);
        *text = NULL;
        return;
    }
    case OPTION_IDS: {
        bd_id_list *list = field;
        free(list->ids);
        *list = (bd_id_list){.count = 0};
        return;
    }
    case OPTION_STRINGS:
        clear_strings(field);
        return;
    case OPTION_VARIANTS:
        clear_variants(field);
        return;
    case OPTION_SWITCH:
    case OPTION_BOOL:
    case OPTION_U32:
    case OPTION_U64:
    case OPTION_SIZE:
    case OPTION_DOUBLE:
    case OPTION_ENUM:
        return;
    }
}

bool bd_value_given(const option_row *row, const void *field) {
    switch (row->type) {
    case OPTION_STRING:
    case OPTION_PATH:
    case OPTION_ADDRESS:
        return *(char *const *)field != NULL;
    case OPTION_IDS:
        return ((const bd_id_list *)field)->count > 0;
    case OPTION_STRINGS:
        return ((const bd_string_list *)field)->count > 0;
    case OPTION_VARIANTS:
        return ((const bd_variant_list *)field)->count > 0;
    case OPTION_SWITCH:
    case OPTION_BOOL:
    case OPTION_U32:
    case OPTION_U64:
    case OPTION_SIZE:
    case OPTION_DOUBLE:
    case OPTION_ENUM:
        return true;
    }
    return false;
}

bd_status bd_values_init(bd_command command, void *options, bd_error *err) {
    for (size_t i = 0; i < bd_table_count(); i++) {
        const option_row *row = bd_table_row(i);
        void *field = bd_table_field(row, command, options);
        if (!field || !row->fallback) continue;
        const value_place place = {.subject = row->flag, .label = row->flag};
        bd_status status = bd_value_parse(row, field, row->fallback, &place, err);
        if (status != BD_OK) {
            bd_values_deinit(command, options);
            return status;
        }
    }
    return BD_OK;
}

void bd_values_deinit(bd_command command, void *options) {
    for (size_t i = 0; i < bd_table_count(); i++) {
        const option_row *row = bd_table_row(i);
        void *field = bd_table_field(row, command, options);
        if (field) bd_value_clear(row, field);
    }
}
