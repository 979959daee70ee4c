/* value.h - one value from text into a field, and fields back to nothing. Threads: the caller's. */
#ifndef BITDELTA_SRC_CONFIG_VALUE_H
#define BITDELTA_SRC_CONFIG_VALUE_H

#include "table.h"

/* Who is blamed: subject for the error, label in front of its message ("--slots", "conf.json:
 * cache.slots"). */
typedef struct value_place {
    const char *subject, *label;
} value_place;

/* A scalar replaces the field's value, a list type gets one element more. On failure the field is
 * as it was. */
BD_MUST_CHECK bd_status bd_value_parse(const option_row *row, void *field, const char *text,
                                       const value_place *place, bd_error *err);
/* Appends to a variant list; name may be NULL. */
BD_MUST_CHECK bd_status bd_value_add_variant(bd_variant_list *list, const char *name,
                                             const char *path, bool pin, const value_place *place,
                                             bd_error *err);
/* Frees what the field holds and sets it to "not given". */
void bd_value_clear(const option_row *row, void *field);
/* True when a string or list field holds something. */
bool bd_value_given(const option_row *row, const void *field);

/* All fields of a command's options: to the defaults of the table; back to nothing. */
BD_MUST_CHECK bd_status bd_values_init(bd_command command, void *options, bd_error *err);
void bd_values_deinit(bd_command command, void *options);

#endif
