/* options.h - what the command line, the configuration file and the environment ask for.
 * One table (src/config/table.c) describes every option; parsing, the file, --help, the reference
 * page and the start-up log line all follow it. Order of precedence: flags, then environment, then
 * file, then defaults; a list given by flags replaces the list of the file. Owner: the caller
 * (main). Threads: the main thread fills an invocation; read-only afterwards. */
#ifndef BITDELTA_CONFIG_OPTIONS_H
#define BITDELTA_CONFIG_OPTIONS_H

#include "bitdelta/base/log.h"
#include "bitdelta/base/status.h"
#include "bitdelta/base/strbuf.h"

typedef enum bd_command {
    BD_COMMAND_SERVE,
    BD_COMMAND_COMPRESS,
    BD_COMMAND_INSPECT,
    BD_COMMAND_GENERATE,
    BD_COMMAND_TOKENIZE,
    BD_COMMAND_HASH_KEY,
    BD_COMMAND_PLAN,
    BD_COMMAND_RESHARD,
    BD_COMMAND_VERSION,
    BD_COMMAND_HELP,
    BD_COMMAND_COUNT
} bd_command;

/* Values in the order of bd_backend_choice. */
typedef enum bd_option_io {
    BD_OPTION_IO_AUTO,
    BD_OPTION_IO_URING,
    BD_OPTION_IO_PREAD
} bd_option_io;

typedef enum bd_option_backend {
    BD_OPTION_BACKEND_AUTO,
    BD_OPTION_BACKEND_CUDA,
    BD_OPTION_BACKEND_CPU
} bd_option_backend;

typedef enum bd_option_dtype {
    BD_OPTION_DTYPE_AUTO,
    BD_OPTION_DTYPE_BF16,
    BD_OPTION_DTYPE_FP16,
    BD_OPTION_DTYPE_FP32
} bd_option_dtype;

/* Values in the order of bd_kernels. */
typedef enum bd_option_kernels {
    BD_OPTION_KERNELS_AUTO,
    BD_OPTION_KERNELS_PLAIN
} bd_option_kernels;

typedef enum bd_option_scale { BD_OPTION_SCALE_ROW, BD_OPTION_SCALE_MATRIX } bd_option_scale;

typedef enum bd_option_embeddings {
    BD_OPTION_EMBEDDINGS_SIGN,
    BD_OPTION_EMBEDDINGS_FULL,
    BD_OPTION_EMBEDDINGS_BASE
} bd_option_embeddings;

/* Every string and array below belongs to its struct; NULL and count 0 mean "not given". */

typedef struct bd_string_list {
    char **items;
    uint32_t count;
} bd_string_list;

typedef struct bd_id_list {
    int32_t *ids;
    uint32_t count;
} bd_id_list;

typedef struct bd_variant_option {
    char *name; /* NULL: delta.json's */
    char *path;
    bool pin;
} bd_variant_option;

typedef struct bd_variant_list {
    bd_variant_option *items;
    uint32_t count;
} bd_variant_list;

typedef struct bd_serve_options {
    char *config_path;
    char *base_path; /* always given */
    char *base_name; /* NULL: the last part of base_path */
    char *deltas_dir;
    char *chat_template; /* NULL: each model's own */
    bd_variant_list variants;
    char *listen;     /* "host:port", "[v6]:port"; port 0: any free one */
    char *admin;      /* the same, or "none" */
    uint32_t backend; /* bd_option_backend */
    uint32_t dtype;   /* bd_option_dtype */
    uint32_t kernels; /* bd_option_kernels */
    uint32_t tensor_parallel;
    uint32_t threads; /* 0: all usable cores */
    char *cpu_kernels;
    uint32_t slots; /* 0: min(registered variants, what fits) */
    uint32_t pinned_top;
    bd_string_list prefetch; /* names of variants to load at start */
    uint64_t host_bytes;     /* host memory for deltas that left the device; 0: none */
    uint32_t io;             /* bd_option_io */
    uint32_t read_threads;
    uint64_t read_block_bytes;
    uint32_t read_depth;
    uint32_t loads_in_parallel;
    uint32_t max_model_len;        /* 0: the model's own */
    uint64_t kv_tokens;            /* 0: what fits */
    uint32_t max_batch_tokens;     /* 0: the backend's */
    uint32_t prefill_chunk_tokens; /* 0: half of these */
    uint32_t max_seqs;
    uint32_t logits_rows_max;
    bool decode_delta;
    double fair_input_weight, fair_output_weight; /* what a token counts in a tenant's service */
    uint64_t fair_load_bytes;                     /* of a load that count 1; 0: none do */
    double fair_residency_bound;
    uint32_t max_queue;
    uint64_t max_body_bytes;
    uint32_t max_connections;
    uint32_t http_threads;
    uint64_t max_upload_bytes;   /* bodies being received, all together */
    uint64_t max_stream_bytes;   /* events waiting for one reader */
    uint64_t max_response_bytes; /* one answer that is not streamed */
    uint32_t request_header_seconds;
    uint32_t request_body_seconds;
    uint32_t idle_seconds;
    uint32_t stream_comment_seconds; /* 0: none */
    char *cors_origin;               /* NULL: no CORS headers */
    char *tls_cert, *tls_key;        /* PEM files; NULL: plain HTTP */
    uint32_t drain_seconds;
    bd_string_list api_keys; /* empty: no key is asked for */
    char *admin_key;         /* NULL: no key is asked for */
    bool runtime_loading;    /* adapters may be loaded and unloaded on `listen` too */
    char *tenants_path;      /* NULL: no tenants */
    bool metrics_public;     /* with tenants: series of variants and tenants on `listen` too */
    uint32_t log_level;      /* bd_log_level */
} bd_serve_options;

typedef struct bd_compress_options {
    char *base_path, *finetuned_path, *out_path; /* always given */
    char *base_name;                             /* NULL: the last part of base_path */
    char *variant;                               /* NULL: the last part of out_path */
    uint32_t scale;                              /* bd_option_scale */
    uint32_t bits;                               /* sign planes, 1..4 */
    uint32_t shards;
    uint32_t embeddings; /* bd_option_embeddings */
    char *calibrate_path;
    bool dry_run, force, json;
    uint32_t threads; /* 0: all usable cores */
    uint32_t log_level;
} bd_compress_options;

typedef struct bd_inspect_options {
    char *path; /* always given */
    bool verify, json;
    uint32_t log_level;
} bd_inspect_options;

typedef struct bd_generate_options {
    char *base_path;                            /* always given */
    char *delta_dir, *finetuned_dir, *lora_dir; /* at most one */
    char *prompt;                               /* exactly one of prompt and prompt_ids */
    bd_id_list prompt_ids;                      /* ids >= 0 */
    uint32_t max_tokens;                        /* 0: only the prompt is run */
    bool greedy;
    uint64_t seed;
    double temperature; /* 0 is greedy */
    double top_p;
    bool ignore_eos, json;
    char *dump_logits_path;
    uint32_t chunk_tokens; /* prompt rows per step */
    uint32_t tensor_parallel;
    uint32_t threads; /* 0: all usable cores */
    uint32_t backend; /* bd_option_backend */
    uint32_t dtype;   /* bd_option_dtype */
    uint32_t kernels; /* bd_option_kernels */
    uint32_t log_level;
} bd_generate_options;

typedef struct bd_tokenize_options {
    char *tokenizer_path; /* always given */
    bool decode;
    uint32_t log_level;
} bd_tokenize_options;

typedef struct bd_plan_options { /* as in bd_serve_options */
    char *base_path;             /* always given */
    char *deltas_dir;
    uint32_t backend, dtype, kernels, tensor_parallel, slots, max_model_len, max_batch_tokens,
        max_seqs, logits_rows_max;
    uint64_t kv_tokens;
    uint64_t device_bytes; /* 0: ask the device */
    bool json;
    uint32_t log_level;
} bd_plan_options;

typedef struct bd_reshard_options {
    char *delta_dir, *out_path; /* always given */
    char *base_path;            /* NULL: only the delta itself is read */
    uint32_t shards;            /* 1, 2, 4 or 8 */
    bool force, json;
    uint32_t log_level;
} bd_reshard_options;

typedef struct bd_help_options {
    char *topic; /* NULL, or the name of a command */
    bool reference;
} bd_help_options;

typedef struct bd_invocation {
    bd_command command; /* BD_COMMAND_HELP also for `COMMAND --help`, with that topic */
    bool wrong_usage;   /* after a failure: the command line is at fault (exit status 2), not a file
                           (1) */
    union {
        bd_serve_options serve;
        bd_compress_options compress;
        bd_inspect_options inspect;
        bd_generate_options generate;
        bd_tokenize_options tokenize;
        bd_plan_options plan;
        bd_reshard_options reshard;
        bd_help_options help;
    };
} bd_invocation;

/* args: what follows the program's name. Reads the configuration file and the environment
 * (BITDELTA_API_KEY, BITDELTA_ADMIN_KEY, BITDELTA_LOG) as the command asks for. BD_E_ARGUMENT names
 * the flag, or the file and key, at fault; BD_E_NOT_FOUND and BD_E_IO the file. On failure nothing
 * is left to deinit. */
BD_MUST_CHECK bd_status bd_invocation_parse(bd_invocation *out, int arg_count,
                                            const char *const *args, bd_error *err);
void bd_invocation_deinit(bd_invocation *invocation);

/* The same for one struct alone: it starts with the defaults of the table. */
BD_MUST_CHECK bd_status bd_serve_options_init(bd_serve_options *options, bd_error *err);
void bd_serve_options_deinit(bd_serve_options *options);
void bd_compress_options_deinit(bd_compress_options *options);
void bd_inspect_options_deinit(bd_inspect_options *options);
void bd_generate_options_deinit(bd_generate_options *options);
void bd_tokenize_options_deinit(bd_tokenize_options *options);
void bd_plan_options_deinit(bd_plan_options *options);
void bd_reshard_options_deinit(bd_reshard_options *options);

const char *bd_command_name(bd_command command);

/* Text for people. topic NULL: the overview of all commands. BD_E_NOT_FOUND: no such command. */
BD_MUST_CHECK bd_status bd_help_write(bd_strbuf *out, const char *topic, bd_error *err);
/* The markdown reference of every command, flag and configuration key. */
void bd_reference_write(bd_strbuf *out);
/* `key=value` of every option of the command, for one log line; keys of clients appear as a count
 * only. */
void bd_invocation_describe(const bd_invocation *invocation, bd_strbuf *out);

#endif
