/* table.h - the shape of the option table, inside config. Threads: constant data. */
#ifndef BITDELTA_SRC_CONFIG_TABLE_H
#define BITDELTA_SRC_CONFIG_TABLE_H

#include "bitdelta/config/options.h"

typedef enum option_type {                  /* field of the struct        written as */
                           OPTION_SWITCH,   /* bool                       --json, --json=false */
                           OPTION_BOOL,     /* bool                       true | false */
                           OPTION_U32,      /* uint32_t */
                           OPTION_U64,      /* uint64_t */
                           OPTION_SIZE,     /* uint64_t, bytes            64GiB */
                           OPTION_DOUBLE,   /* double */
                           OPTION_ENUM,     /* uint32_t, index into names */
                           OPTION_STRING,   /* char *, UTF-8 */
                           OPTION_PATH,     /* char *, any bytes */
                           OPTION_ADDRESS,  /* char *, host:port or one of names */
                           OPTION_IDS,      /* bd_id_list                 1,2,3 */
                           OPTION_STRINGS,  /* bd_string_list             the flag repeated */
                           OPTION_VARIANTS, /* bd_variant_list            NAME=DIR, the flag
                                               repeated */
} option_type;

typedef struct option_row {
    const char *flag; /* without dashes; NULL: the command's positional argument */
    const char *key;  /* in the configuration file, NULL: not there */
    const char *env;  /* environment variable, NULL: none */
    option_type type;
    const char *placeholder;
    const char *const
        *names; /* ENUM: values in order, ADDRESS: words besides addresses; NULL-terminated */
    uint64_t min, max;         /* U32, U64, SIZE; DOUBLE too, its bounds are whole numbers */
    const char *fallback;      /* the default as one would write it; NULL: none */
    const char *fallback_note; /* what the default means, for people */
    const char *help;
    bool required, secret, may_be_empty;
    bool is_key; /* goes through a header: STRING, STRINGS */
    uint16_t
        at[BD_COMMAND_COUNT]; /* offset in the command's struct plus one; 0: not an option of it */
} option_row;

typedef struct command_row {
    const char *name, *summary, *usage, *details, *example;
} command_row;

size_t bd_table_count(void);
const option_row *bd_table_row(size_t index);
const command_row *bd_table_command(bd_command command);

/* The row's field in the options of that command. NULL: the command has no such option. */
void *bd_table_field(const option_row *row, bd_command command, void *options);
/* Rows by flag (without dashes), by position, by key. NULL: none. */
const option_row *bd_table_by_flag(bd_command command, const char *flag, size_t flag_bytes);
const option_row *bd_table_positional(bd_command command);
const option_row *bd_table_by_key(const char *key);

#endif
