/* help.c - the table for people: --help, the reference page, the start-up log line. Threads: the
 * caller's. */
#include <string.h>

#include "bitdelta/config/options.h"
#include "table.h"
#include "value.h"

/* `--slots N`, `--backend auto|cuda|cpu`, `DIR|FILE`. */
static void put_form(bd_strbuf *out, const option_row *row) {
    if (row->flag) bd_strbuf_printf(out, "--%s", row->flag);
    if (row->type == OPTION_SWITCH) return;
    if (row->flag) bd_strbuf_puts(out, " ");
    if (row->type != OPTION_ENUM) {
        bd_strbuf_puts(out, row->placeholder);
        return;
    }
    for (size_t i = 0; row->names[i]; i++) {
        if (i > 0) bd_strbuf_puts(out, "|");
        bd_strbuf_puts(out, row->names[i]);
    }
}

static void put_range(bd_strbuf *out, const option_row *row) {
    bool number = row->type == OPTION_U32 || row->type == OPTION_U64 || row->type == OPTION_SIZE ||
                  row->type == OPTION_DOUBLE;
    if (!number || row->max == UINT64_MAX) return;
    bd_strbuf_printf(out, "%llu..%llu", (unsigned long long)row->min, (unsigned long long)row->max);
}

/* "required", "6", "0 (all usable cores)", "last part of --base", or nothing. */
static void put_default(bd_strbuf *out, const option_row *row) {
    if (row->required) {
        bd_strbuf_puts(out, "required");
    } else if (row->fallback && row->fallback_note) {
        bd_strbuf_printf(out, "%s (%s)", row->fallback, row->fallback_note);
    } else if (row->fallback) {
        bd_strbuf_puts(out, row->fallback);
    } else if (row->fallback_note) {
        bd_strbuf_puts(out, row->fallback_note);
    }
}

/* --- --help --- */

static void put_option(bd_strbuf *out, const option_row *row, bd_command command) {
    bd_strbuf_puts(out, "  ");
    put_form(out, row);
    bd_strbuf_printf(out, "\n      %s", row->help);
    size_t before = out->len_bytes;
    bd_strbuf_puts(out, " [");
    size_t start = out->len_bytes;
    if (row->required) {
        bd_strbuf_puts(out, "required");
    } else if (row->fallback || row->fallback_note) {
        bd_strbuf_puts(out, "default: ");
        put_default(out, row);
    }
    if (command == BD_COMMAND_SERVE && row->key) {
        bd_strbuf_printf(out, "%skey: %s", out->len_bytes > start ? "; " : "", row->key);
    }
    if (row->env) bd_strbuf_printf(out, "%senv: %s", out->len_bytes > start ? "; " : "", row->env);
    if (out->len_bytes > start) {
        bd_strbuf_puts(out, "]");
    } else if (!out->failed) {
        out->len_bytes = before; /* nothing to say: take the bracket back */
        out->data[before] = '\0';
    }
    bd_strbuf_puts(out, "\n");
}

static void put_command(bd_strbuf *out, bd_command command) {
    const command_row *row = bd_table_command(command);
    bd_strbuf_printf(out, "bitdelta %s - %s\n\nUsage:\n  %s\n", row->name, row->summary,
                     row->usage);
    if (row->details) bd_strbuf_printf(out, "\n%s\n", row->details);
    bool any = false;
    for (size_t i = 0; i < bd_table_count(); i++) {
        if (bd_table_row(i)->at[command] == 0) continue;
        if (!any) bd_strbuf_puts(out, "\nOptions:\n");
        any = true;
        put_option(out, bd_table_row(i), command);
    }
    bd_strbuf_printf(out, "\nExample:\n  %s\n", row->example);
}

static void put_overview(bd_strbuf *out) {
    bd_strbuf_puts(
        out, "bitdelta - one base model and many fine-tuned variants of it, each a 1-bit delta\n\n"
             "Usage:\n  bitdelta COMMAND [options]\n\nCommands:\n");
    for (int i = 0; i < BD_COMMAND_COUNT; i++) {
        const command_row *row = bd_table_command((bd_command)i);
        bd_strbuf_printf(out, "  %-10s %s\n", row->name, row->summary);
    }
    bd_strbuf_printf(out, "\nExample:\n  %s\n\nbitdelta help COMMAND explains one command.\n",
                     bd_table_command(BD_COMMAND_SERVE)->example);
}

bd_status bd_help_write(bd_strbuf *out, const char *topic, bd_error *err) {
    if (!topic) {
        put_overview(out);
        return BD_OK;
    }
    for (int i = 0; i < BD_COMMAND_COUNT; i++) {
        if (strcmp(bd_table_command((bd_command)i)->name, topic) != 0) continue;
        put_command(out, (bd_command)i);
        return BD_OK;
    }
    return bd_fail(err, BD_E_NOT_FOUND, topic, "%s: no such command; see bitdelta help", topic);
}

/* --- the reference --- */

/* A bar would end the table's cell. */
static void put_cell(bd_strbuf *out, const char *text) {
    for (; *text; text++) {
        if (*text == '|') bd_strbuf_puts(out, "\\");
        bd_strbuf_append(out, text, 1);
    }
}

static void put_cell_of(bd_strbuf *out, const option_row *row,
                        void (*put)(bd_strbuf *, const option_row *), const char *quote) {
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    put(&text, row);
    if (text.len_bytes > 0) {
        bd_strbuf_puts(out, quote);
        put_cell(out, text.data);
        bd_strbuf_puts(out, quote);
    }
    out->failed = out->failed || text.failed;
    bd_strbuf_deinit(&text);
    bd_strbuf_puts(out, " | ");
}

static void put_reference_row(bd_strbuf *out, const option_row *row, bd_command command) {
    bd_strbuf_puts(out, "| ");
    put_cell_of(out, row, put_form, "`");
    if (command == BD_COMMAND_SERVE) {
        if (row->key) bd_strbuf_printf(out, "`%s`", row->key);
        bd_strbuf_puts(out, " | ");
    }
    put_cell_of(out, row, put_range, "");
    put_cell_of(out, row, put_default, "");
    put_cell(out, row->help);
    if (row->env) bd_strbuf_printf(out, "; also `%s` in the environment", row->env);
    bd_strbuf_puts(out, " |\n");
}

static void put_reference_command(bd_strbuf *out, bd_command command) {
    const command_row *row = bd_table_command(command);
    bool serve = command == BD_COMMAND_SERVE;
    bd_strbuf_printf(out, "\n## bitdelta %s\n\n%c%s.\n\n    %s\n\n", row->name,
                     row->summary[0] - 'a' + 'A', row->summary + 1, row->usage);
    if (row->details) bd_strbuf_printf(out, "%s\n\n", row->details);
    bd_strbuf_printf(out, "Example:\n\n    %s\n", row->example);
    bool any = false;
    for (size_t i = 0; i < bd_table_count(); i++) {
        if (bd_table_row(i)->at[command] == 0) continue;
        if (!any) {
            bd_strbuf_printf(
                out, "\n| flag |%s range | default | meaning |\n| --- |%s --- | --- | --- |\n",
                serve ? " key |" : "", serve ? " --- |" : "");
        }
        any = true;
        put_reference_row(out, bd_table_row(i), command);
    }
}

void bd_reference_write(bd_strbuf *out) {
    bd_strbuf_puts(
        out,
        "# Command reference\n\n"
        "Written by `bitdelta help --reference` from the table that the program parses with.\n\n"
        "Flags are written `--flag VALUE` or `--flag=VALUE`, each once; repeatable ones "
        "gather.\n"
        "Order of precedence: flags, environment, configuration file, defaults. A list "
        "given by flags\n"
        "replaces the file's. Sizes take KiB, MiB, GiB or TiB.\n\n"
        "Exit status: 0 done, 1 the input or environment is at fault, 2 wrong usage, 3 an internal "
        "fault.\n\n"
        "The configuration file is one JSON object; `cache.slots` is the member `slots` of the "
        "object `cache`.\n"
        "A key that is not listed here, a wrong type, a value out of range or a key given twice is "
        "an error that\n"
        "names the file and the key, and the server does not start.\n");
    for (int i = 0; i < BD_COMMAND_COUNT; i++)
        put_reference_command(out, (bd_command)i);
}

/* --- the log line --- */

static void put_value(bd_strbuf *out, const option_row *row, const void *field) {
    switch (row->type) {
    case OPTION_SWITCH:
    case OPTION_BOOL:
        bd_strbuf_puts(out, *(const bool *)field ? "true" : "false");
        return;
    case OPTION_U32:
        bd_strbuf_printf(out, "%u", *(const uint32_t *)field);
        return;
    case OPTION_U64:
    case OPTION_SIZE:
        bd_strbuf_printf(out, "%llu", (unsigned long long)*(const uint64_t *)field);
        return;
    case OPTION_DOUBLE:
        bd_strbuf_json_number(out, *(const double *)field);
        return;
    case OPTION_ENUM:
        bd_strbuf_puts(out, row->names[*(const uint32_t *)field]);
        return;
    case OPTION_STRING:
    case OPTION_PATH:
    case OPTION_ADDRESS: {
        const char *text = *(char *const *)field;
        if (row->secret) {
            bd_strbuf_puts(out, "set");
        } else {
            bd_strbuf_json_string(out, text, strlen(text));
        }
        return;
    }
    case OPTION_IDS:
        bd_strbuf_printf(out, "%u", ((const bd_id_list *)field)->count);
        return;
    case OPTION_STRINGS:
        bd_strbuf_printf(out, "%u", ((const bd_string_list *)field)->count);
        return;
    case OPTION_VARIANTS:
        bd_strbuf_printf(out, "%u", ((const bd_variant_list *)field)->count);
        return;
    }
}

void bd_invocation_describe(const bd_invocation *invocation, bd_strbuf *out) {
    const bd_command command = invocation->command;
    bd_strbuf_printf(out, "command=%s", bd_command_name(command));
    for (size_t i = 0; i < bd_table_count(); i++) {
        const option_row *row = bd_table_row(i);
        if (row->at[command] == 0) continue;
        const void *field = (const char *)&invocation->serve + row->at[command] - 1;
        if (!bd_value_given(row, field)) continue;
        const char *name = row->key && command == BD_COMMAND_SERVE ? row->key : row->flag;
        bd_strbuf_printf(out, " %s=", name ? name : "argument");
        put_value(out, row, field);
    }
}
