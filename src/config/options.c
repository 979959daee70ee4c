/* options.c - the command line and the environment, and how flags, environment, file and defaults
 * meet. The only getenv of the program is here. Threads: the main thread. */
#include "bitdelta/config/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config_file.h"
#include "table.h"
#include "value.h"

/* One flag or positional argument with its text, not yet looked at. */
typedef struct given {
    const option_row *row;
    const char *text;
} given;

typedef struct parser {
    bd_invocation *out;
    const char *const *args;
    int arg_count;
    given *givens;
    size_t given_count;
    bd_error *err;
} parser;

static bd_status fail_usage(parser *p, const char *subject, const char *what) {
    p->out->wrong_usage = true;
    return bd_fail(p->err, BD_E_ARGUMENT, subject, "%s: %s", subject, what);
}

static void *options_of(bd_invocation *invocation) {
    /* All members of the union start at its address. */
    return &invocation->serve;
}

static bool find_command(const char *name, bd_command *command) {
    for (int i = 0; i < BD_COMMAND_COUNT; i++) {
        if (strcmp(bd_table_command((bd_command)i)->name, name) != 0) continue;
        *command = (bd_command)i;
        return true;
    }
    return false;
}

/* --- splitting --- */

static bool is_given(const parser *p, const option_row *row) {
    for (size_t i = 0; i < p->given_count; i++)
        if (p->givens[i].row == row) return true;
    return false;
}

/* Only lists gather what is given again: of two values for one thing neither is the surely meant.
 */
static bd_status keep(parser *p, const option_row *row, const char *text, const char *subject) {
    bool list = row->type == OPTION_STRINGS || row->type == OPTION_VARIANTS;
    if (!list && is_given(p, row)) return fail_usage(p, subject, "given twice");
    p->givens[p->given_count++] = (given){.row = row, .text = text};
    return BD_OK;
}

/* args[*index] starts with "--"; takes the next argument too where that is the value. */
static bd_status split_flag(parser *p, int *index) {
    const char *flag = p->args[*index] + 2;
    size_t len = strcspn(flag, "=");
    const option_row *row = bd_table_by_flag(p->out->command, flag, len);
    char subject[72];
    snprintf(subject, sizeof subject, "--%.*s", (int)(len < 64 ? len : 64), flag);
    if (!row) {
        char what[96];
        snprintf(what, sizeof what, "no such flag; see bitdelta help %s",
                 bd_command_name(p->out->command));
        return fail_usage(p, subject, what);
    }
    if (flag[len] == '=') return keep(p, row, flag + len + 1, subject);
    if (row->type == OPTION_SWITCH) return keep(p, row, "true", subject);
    if (*index + 1 >= p->arg_count) return fail_usage(p, subject, "needs a value");
    /* Far more often a forgotten value than a value that looks like a flag. */
    if (strncmp(p->args[*index + 1], "--", 2) == 0)
        return fail_usage(p, subject,
                          "needs a value (one that starts with -- is written --flag=VALUE)");
    return keep(p, row, p->args[++*index], subject);
}

static bd_status split_args(parser *p) {
    const option_row *positional = bd_table_positional(p->out->command);
    bool flags_end = false;
    bd_status status = BD_OK;
    for (int i = 1; i < p->arg_count && status == BD_OK; i++) {
        const char *arg = p->args[i];
        if (!flags_end && strcmp(arg, "--") == 0) {
            flags_end = true;
        } else if (!flags_end && arg[0] == '-' && arg[1] == '-') {
            status = split_flag(p, &i);
        } else if (!flags_end && arg[0] == '-' && arg[1]) {
            status = fail_usage(p, arg, "flags start with two dashes");
        } else if (!positional) {
            status = fail_usage(p, arg, "unexpected argument");
        } else {
            status = keep(p, positional, arg, arg);
            positional = NULL;
        }
    }
    return status;
}

/* --- sources --- */

static bd_status load_file(parser *p) {
    const char *path = NULL;
    for (size_t i = 0; i < p->given_count; i++) {
        BD_ASSERT(p->givens[i].row);
        const char *flag = p->givens[i].row->flag;
        if (flag && strcmp(flag, "config") == 0) path = p->givens[i].text;
    }
    if (!path || p->out->command != BD_COMMAND_SERVE) return BD_OK;
    if (!*path) return fail_usage(p, "--config", "empty");
    return bd_config_file_load(path, &p->out->serve, p->err);
}

/* A variable that is set but empty counts as not set, as in shells; but for a key, without which
 * the server would be open to everyone because of a misspelt $NAME. */
static bd_status load_environment(parser *p) {
    for (size_t i = 0; i < bd_table_count(); i++) {
        const option_row *row = bd_table_row(i);
        void *field = bd_table_field(row, p->out->command, options_of(p->out));
        const char *text = field && row->env ? getenv(row->env) : NULL;
        if (!text || (!*text && !row->secret)) continue;
        const value_place place = {.subject = row->env, .label = row->env};
        bd_value_clear(row, field);
        bd_status status = bd_value_parse(row, field, text, &place, p->err);
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

/* A list gathers its flags, and the first of them drops what file or environment gave. */
static bd_status apply_flags(parser *p) {
    for (size_t i = 0; i < p->given_count; i++) {
        const option_row *row = p->givens[i].row;
        void *field = bd_table_field(row, p->out->command, options_of(p->out));
        bool first = true;
        for (size_t k = 0; k < i && first; k++)
            first = p->givens[k].row != row;
        if (first) bd_value_clear(row, field);
        char label[72];
        snprintf(label, sizeof label, "%s%.64s", row->flag ? "--" : "",
                 row->flag ? row->flag : row->placeholder);
        const value_place place = {.subject = label, .label = label};
        bd_status status = bd_value_parse(row, field, p->givens[i].text, &place, p->err);
        if (status == BD_E_ARGUMENT) p->out->wrong_usage = true;
        if (status != BD_OK) return status;
    }
    return BD_OK;
}

/* --- checks over several options --- */

static bd_status check_required(parser *p) {
    for (size_t i = 0; i < bd_table_count(); i++) {
        const option_row *row = bd_table_row(i);
        const void *field = bd_table_field(row, p->out->command, options_of(p->out));
        if (!field || !row->required || bd_value_given(row, field)) continue;
        char subject[72];
        snprintf(subject, sizeof subject, "%s%.64s", row->flag ? "--" : "",
                 row->flag ? row->flag : row->placeholder);
        return fail_usage(p, subject, "is required");
    }
    return BD_OK;
}

/* As a browser writes it: nothing after the port. A path or a slash would never be equal to what
 * it sends. */
static bool is_origin(const char *text) {
    const char *host = strstr(text, "://");
    if (strcmp(text, "*") == 0 || strcmp(text, "null") == 0) return true;
    if (!host || host == text) return false;
    for (const char *at = text; at < host; at++)
        if (!strchr("abcdefghijklmnopqrstuvwxyz0123456789+-.", *at)) return false;
    host += 3;
    const bool bracket = *host == '[';
    const size_t bytes = bracket ? strcspn(host, "]") + 1 : strcspn(host, ":");
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)host[i];
        if (c <= ' ' || c >= 0x7f || strchr(bracket ? "/?#@\\\"'" : "/?#@\\\"'[]", c)) return false;
    }
    const char *port = host + bytes;
    if (bytes == 0 || *port == '\0') return bytes > 0;
    return *port == ':' && port[1] && port[1 + strspn(port + 1, "0123456789")] == '\0';
}

enum { HOST_BLOCK_BYTES = 256 << 10 };

/* A value that is wrong beside another: the flag's fault where it was given, else the file's where
 * there is one. */
typedef struct fault_place {
    char subject[512], label[576], other[72];
} fault_place;

static void blame(parser *p, const char *flag, const char *other, fault_place *place) {
    const bd_command command = p->out->command;
    const option_row *row = bd_table_by_flag(command, flag, strlen(flag));
    const option_row *second = other ? bd_table_by_flag(command, other, strlen(other)) : NULL;
    BD_ASSERT(row && (!other || second));
    const char *path = command == BD_COMMAND_SERVE ? p->out->serve.config_path : NULL;
    const bool file = path && !is_given(p, row) && !(second && is_given(p, second));
    p->out->wrong_usage = !file;
    snprintf(place->other, sizeof place->other, "%s%.64s", file ? "" : "--",
             !second ? ""
             : file  ? second->key
                     : other);
    if (file) {
        snprintf(place->subject, sizeof place->subject, "%s", path);
        snprintf(place->label, sizeof place->label, "%.500s: %.64s", path, row->key);
    } else {
        snprintf(place->subject, sizeof place->subject, "--%.64s", flag);
        snprintf(place->label, sizeof place->label, "--%.64s", flag);
    }
}

static bd_status check_ranks(parser *p, uint32_t ranks) {
    if (ranks <= 8 && (ranks & (ranks - 1)) == 0) return BD_OK;
    fault_place at;
    blame(p, "tensor-parallel", NULL, &at);
    return bd_fail(p->err, BD_E_ARGUMENT, at.subject,
                   "%s: the model can be split over 1, 2, 4 or 8 ranks, not %u", at.label, ranks);
}

static bd_status check_over(parser *p, const char *flag, uint32_t value, const char *other,
                            uint32_t most, const char *why) {
    if (value <= most) return BD_OK;
    fault_place at;
    blame(p, flag, other, &at);
    return bd_fail(p->err, BD_E_ARGUMENT, at.subject, "%s (%u) is over %s (%u)%s", at.label, value,
                   at.other, most, why);
}

static bd_status check_serve(parser *p) {
    bd_serve_options *o = &p->out->serve;
    fault_place at;
    bd_status status = check_ranks(p, o->tensor_parallel);
    if (status != BD_OK) return status;
    if (o->cors_origin && !is_origin(o->cors_origin)) {
        blame(p, "cors-origin", NULL, &at);
        return bd_fail(p->err, BD_E_ARGUMENT, at.subject,
                       "%s: \"%.128s\" is not an origin: scheme://host or scheme://host:port as "
                       "browsers send it, or *",
                       at.label, o->cors_origin);
    }
    if (o->host_bytes > 0 && o->host_bytes < HOST_BLOCK_BYTES) {
        blame(p, "host-bytes", NULL, &at);
        return bd_fail(p->err, BD_E_ARGUMENT, at.subject,
                       "%s (%llu) is less than one block of %u bytes, the least there is", at.label,
                       (unsigned long long)o->host_bytes, HOST_BLOCK_BYTES);
    }
    if (!o->tls_cert != !o->tls_key) {
        blame(p, o->tls_cert ? "tls-cert" : "tls-key", o->tls_cert ? "tls-key" : "tls-cert", &at);
        return bd_fail(p->err, BD_E_ARGUMENT, at.subject, "%s needs %s beside it", at.label,
                       at.other);
    }
    status = check_over(p, "loads-in-parallel", o->loads_in_parallel, "read-depth", o->read_depth,
                        ": each load needs a block");
    if (status == BD_OK && o->max_batch_tokens > 0)
        status = check_over(p, "prefill-chunk-tokens", o->prefill_chunk_tokens, "max-batch-tokens",
                            o->max_batch_tokens, "");
    if (status != BD_OK) return status;
    const char *port = strrchr(o->listen, ':');
    if (strcmp(o->listen, o->admin) == 0 && strcmp(port, ":0") != 0) {
        blame(p, "admin", "listen", &at);
        return bd_fail(p->err, BD_E_ARGUMENT, at.subject, "%s and %s are both %s", at.label,
                       at.other, o->listen);
    }
    return BD_OK;
}

static bd_status check_shards(parser *p, uint32_t shards) {
    if (shards <= 8 && (shards & (shards - 1)) == 0) return BD_OK;
    p->out->wrong_usage = true;
    return bd_fail(p->err, BD_E_ARGUMENT, "--shards", "--shards: %u is not 1, 2, 4 or 8", shards);
}

static bd_status check_compress(parser *p) {
    return check_shards(p, p->out->compress.shards);
}

static bd_status check_reshard(parser *p) {
    const uint32_t shards = p->out->reshard.shards;
    return shards == 0 ? fail_usage(p, "--shards", "is required") : check_shards(p, shards);
}

static bd_status check_generate(parser *p) {
    const bd_generate_options *o = &p->out->generate;
    const bd_status status = check_ranks(p, o->tensor_parallel);
    if (status != BD_OK) return status;
    if (!o->prompt && o->prompt_ids.count == 0) {
        return fail_usage(p, "--prompt", "is required, or --prompt-ids");
    }
    if (o->prompt && o->prompt_ids.count > 0)
        return fail_usage(p, "--prompt-ids", "excludes --prompt");
    int overlays = (o->delta_dir != NULL) + (o->finetuned_dir != NULL) + (o->lora_dir != NULL);
    if (overlays > 1) {
        return fail_usage(p, o->lora_dir ? "--lora" : "--finetuned",
                          "only one of --delta, --finetuned and --lora");
    }
    return BD_OK;
}

static bd_status check_help(parser *p) {
    bd_command command;
    const char *topic = p->out->help.topic;
    if (topic && !find_command(topic, &command))
        return fail_usage(p, topic, "no such command; see bitdelta help");
    return BD_OK;
}

static bd_status check_options(parser *p) {
    bd_status status = check_required(p);
    if (status != BD_OK) return status;
    if (p->out->command == BD_COMMAND_SERVE) return check_serve(p);
    if (p->out->command == BD_COMMAND_COMPRESS) return check_compress(p);
    if (p->out->command == BD_COMMAND_RESHARD) return check_reshard(p);
    if (p->out->command == BD_COMMAND_GENERATE) return check_generate(p);
    if (p->out->command == BD_COMMAND_PLAN) return check_ranks(p, p->out->plan.tensor_parallel);
    if (p->out->command == BD_COMMAND_HELP) return check_help(p);
    return BD_OK;
}

/* --- the whole --- */

/* The command itself; `--help` anywhere before "--" turns it into help about that command. */
static bd_status choose_command(parser *p, const char **topic) {
    *topic = NULL;
    if (p->arg_count < 1) return fail_usage(p, "command", "none given; see bitdelta help");
    const char *name = p->args[0];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) name = "help";
    if (strcmp(name, "--version") == 0) name = "version";
    if (!find_command(name, &p->out->command))
        return fail_usage(p, name, "no such command; see bitdelta help");
    for (int i = 1; i < p->arg_count && strcmp(p->args[i], "--") != 0; i++) {
        if (strcmp(p->args[i], "--help") == 0 || strcmp(p->args[i], "-h") == 0) {
            *topic = bd_command_name(p->out->command);
        }
    }
    return BD_OK;
}

static bd_status parse_options(parser *p) {
    bd_status status = split_args(p);
    if (status == BD_OK) status = load_file(p);
    if (status == BD_OK) status = load_environment(p);
    if (status == BD_OK) status = apply_flags(p);
    if (status == BD_OK) status = check_options(p);
    return status;
}

bd_status bd_invocation_parse(bd_invocation *out, int arg_count, const char *const *args,
                              bd_error *err) {
    memset(out, 0, sizeof *out);
    parser p = {.out = out, .args = args, .arg_count = arg_count, .err = err};
    const char *topic;
    bd_status status = choose_command(&p, &topic);
    if (status != BD_OK) return status;
    if (topic) {
        out->command = BD_COMMAND_HELP;
        out->help.topic = strdup(topic);
        if (!out->help.topic) return bd_fail(err, BD_E_MEMORY, topic, "out of memory");
        return BD_OK;
    }
    status = bd_values_init(out->command, options_of(out), err);
    if (status != BD_OK) return status;
    p.givens = calloc((size_t)arg_count, sizeof *p.givens);
    if (!p.givens) {
        status = bd_fail(err, BD_E_MEMORY, bd_command_name(out->command), "out of memory");
        goto fail_values;
    }
    status = parse_options(&p);
    free(p.givens);
    if (status == BD_OK) return BD_OK;
fail_values:
    bd_values_deinit(out->command, options_of(out));
    return status;
}

void bd_invocation_deinit(bd_invocation *invocation) {
    if (invocation) bd_values_deinit(invocation->command, options_of(invocation));
}

bd_status bd_serve_options_init(bd_serve_options *options, bd_error *err) {
    memset(options, 0, sizeof *options);
    return bd_values_init(BD_COMMAND_SERVE, options, err);
}

void bd_serve_options_deinit(bd_serve_options *options) {
    bd_values_deinit(BD_COMMAND_SERVE, options);
}

void bd_compress_options_deinit(bd_compress_options *options) {
    bd_values_deinit(BD_COMMAND_COMPRESS, options);
}

void bd_inspect_options_deinit(bd_inspect_options *options) {
    bd_values_deinit(BD_COMMAND_INSPECT, options);
}

void bd_generate_options_deinit(bd_generate_options *options) {
    bd_values_deinit(BD_COMMAND_GENERATE, options);
}

void bd_tokenize_options_deinit(bd_tokenize_options *options) {
    bd_values_deinit(BD_COMMAND_TOKENIZE, options);
}

void bd_plan_options_deinit(bd_plan_options *options) {
    bd_values_deinit(BD_COMMAND_PLAN, options);
}

void bd_reshard_options_deinit(bd_reshard_options *options) {
    bd_values_deinit(BD_COMMAND_RESHARD, options);
}
