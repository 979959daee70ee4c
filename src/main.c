/* main.c - the subcommands: options in, exit status out. The only file that ends the process.
 * Exit status: 0 done, 1 the input or environment is at fault, 2 wrong usage, 3 an internal fault;
 * a tool that a signal stopped dies of it, after removing what it had begun. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bitdelta/base/log.h"
#include "bitdelta/config/options.h"
#include "bitdelta/tools/compress.h"
#include "bitdelta/tools/generate.h"
#include "bitdelta/tools/hash_key.h"
#include "bitdelta/tools/inspect.h"
#include "bitdelta/tools/plan.h"
#include "bitdelta/tools/reshard.h"
#include "bitdelta/tools/stop.h"
#include "bitdelta/tools/tokenize.h"
#include "serve.h"

enum { EXIT_DONE = 0, EXIT_INPUT = 1, EXIT_USAGE = 2, EXIT_INTERNAL = 3 };

static int exit_of(bd_status status) {
    return status == BD_OK ? EXIT_DONE : status == BD_E_INTERNAL ? EXIT_INTERNAL : EXIT_INPUT;
}

/* A number of ranks or shards that the model cannot be split over is wrong usage; serve says so
 * itself, since there a file may be at fault. */
static bool wrong_split(int code, const bd_error *err) {
    bool ranks = err->status == BD_E_UNSUPPORTED && strcmp(err->subject, "tensor_parallel") == 0;
    bool shards = err->status == BD_E_ARGUMENT && strcmp(err->subject, "shards") == 0;
    return code == EXIT_INPUT && (ranks || shards);
}

/* Log lines count from the boot of the machine; this one says when that was. */
static void log_start(void) {
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc) && strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc) > 0)
        bd_log(BD_LOG_INFO, "serve", "starting version=%s date=%s", BD_VERSION, date);
}

/* Most messages name their subject already. */
static void complain(const bd_error *err) {
    if (err->subject[0] && !strstr(err->message, err->subject))
        fprintf(stderr, "bitdelta: %s: %s\n", err->subject, err->message);
    else
        fprintf(stderr, "bitdelta: %s\n", err->message);
}

static int help_run(const bd_help_options *options, bd_error *err) {
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_status status = BD_OK;
    if (options->reference)
        bd_reference_write(&text);
    else
        status = bd_help_write(&text, options->topic, err);
    if (status == BD_OK && text.failed) status = bd_fail(err, BD_E_MEMORY, "help", "out of memory");
    if (status == BD_OK) fputs(text.data, stdout);
    bd_strbuf_deinit(&text);
    return status == BD_OK ? EXIT_DONE : EXIT_USAGE;
}

/* What the option says, BD_DTYPE_OTHER for auto. */
static bd_dtype dtype_of(uint32_t option) {
    switch ((bd_option_dtype)option) {
    case BD_OPTION_DTYPE_BF16:
        return BD_DTYPE_BF16;
    case BD_OPTION_DTYPE_FP16:
        return BD_DTYPE_F16;
    case BD_OPTION_DTYPE_FP32:
        return BD_DTYPE_F32;
    case BD_OPTION_DTYPE_AUTO:
        break;
    }
    return BD_DTYPE_OTHER;
}

static int plan_run(const bd_plan_options *o, bd_error *err) {
    const bd_plan_request request = {.base_dir = o->base_path,
                                     .deltas_dir = o->deltas_dir,
                                     .backend = (bd_backend_choice)o->backend,
                                     .dtype = dtype_of(o->dtype),
                                     .kernels = (bd_kernels)o->kernels,
                                     .rank_count = o->tensor_parallel,
                                     .slots = o->slots,
                                     .max_model_len = o->max_model_len,
                                     .rows_max = o->max_batch_tokens,
                                     .seqs_max = o->max_seqs,
                                     .logits_rows_max = o->logits_rows_max,
                                     .kv_tokens = o->kv_tokens,
                                     .device_bytes = o->device_bytes,
                                     .json = o->json};
    return exit_of(bd_plan_run(&request, stdout, err));
}

static int generate_run(const bd_generate_options *o, bd_error *err) {
    const bd_generate_request request = {.base_dir = o->base_path,
                                         .delta_dir = o->delta_dir,
                                         .finetuned_dir = o->finetuned_dir,
                                         .lora_dir = o->lora_dir,
                                         .prompt = o->prompt,
                                         .prompt_ids = o->prompt_ids.ids,
                                         .prompt_id_count = o->prompt_ids.count,
                                         .max_tokens = o->max_tokens,
                                         .greedy = o->greedy,
                                         .temperature = (float)o->temperature,
                                         .top_p = (float)o->top_p,
                                         .seed = o->seed,
                                         .ignore_eos = o->ignore_eos,
                                         .json = o->json,
                                         .dump_logits = o->dump_logits_path,
                                         .chunk_tokens = o->chunk_tokens,
                                         .thread_count = o->threads,
                                         .rank_count = o->tensor_parallel,
                                         .backend = (bd_backend_choice)o->backend,
                                         .dtype = dtype_of(o->dtype),
                                         .kernels = (bd_kernels)o->kernels};
    return bd_generate_main(&request, err);
}

static int compress_run(const bd_compress_options *o, bd_error *err) {
    static const char *const embeddings[] = {"sign", "full", "base"};
    if (o->calibrate_path) {
        (void)bd_fail(err, BD_E_UNSUPPORTED, "--calibrate", "this build has no calibration");
        return EXIT_USAGE;
    }
    const bd_compress_request request = {.base_dir = o->base_path,
                                         .finetuned_dir = o->finetuned_path,
                                         .out_dir = o->out_path,
                                         .scale =
                                             o->scale == BD_OPTION_SCALE_ROW ? "row" : "matrix",
                                         .embeddings = embeddings[o->embeddings],
                                         .base_name = o->base_name,
                                         .variant_name = o->variant,
                                         .bits = o->bits,
                                         .shards = o->shards,
                                         .threads = o->threads,
                                         .dry_run = o->dry_run,
                                         .force = o->force,
                                         .json = o->json};
    return exit_of(bd_compress_run(&request, stdout, stderr, err));
}

static int reshard_run(const bd_reshard_options *o, bd_error *err) {
    const bd_reshard_request request = {.delta_dir = o->delta_dir,
                                        .out_dir = o->out_path,
                                        .base_dir = o->base_path,
                                        .shards = o->shards,
                                        .force = o->force,
                                        .json = o->json};
    return exit_of(bd_reshard_run(&request, stdout, stderr, err));
}

/* Help, version and hash-key log nothing. */
static bd_log_level log_level_of(const bd_invocation *invocation) {
    switch (invocation->command) {
    case BD_COMMAND_SERVE:
        return (bd_log_level)invocation->serve.log_level;
    case BD_COMMAND_COMPRESS:
        return (bd_log_level)invocation->compress.log_level;
    case BD_COMMAND_INSPECT:
        return (bd_log_level)invocation->inspect.log_level;
    case BD_COMMAND_GENERATE:
        return (bd_log_level)invocation->generate.log_level;
    case BD_COMMAND_TOKENIZE:
        return (bd_log_level)invocation->tokenize.log_level;
    case BD_COMMAND_PLAN:
        return (bd_log_level)invocation->plan.log_level;
    case BD_COMMAND_RESHARD:
        return (bd_log_level)invocation->reshard.log_level;
    case BD_COMMAND_HASH_KEY:
    case BD_COMMAND_VERSION:
    case BD_COMMAND_HELP:
    case BD_COMMAND_COUNT:
        break;
    }
    return BD_LOG_INFO;
}

static int run(const bd_invocation *invocation, bd_error *err) {
    bd_log_level_set(log_level_of(invocation));
    switch (invocation->command) {
    case BD_COMMAND_SERVE: {
        bool wrong_usage;
        bd_log_widen();
        log_start();
        bd_status status = bd_serve_run(&invocation->serve, &wrong_usage, err);
        return wrong_usage ? EXIT_USAGE : exit_of(status);
    }
    case BD_COMMAND_COMPRESS:
        return compress_run(&invocation->compress, err);
    case BD_COMMAND_INSPECT:
        return exit_of(bd_inspect_run(invocation->inspect.path, invocation->inspect.verify,
                                      invocation->inspect.json, stdout, err));
    case BD_COMMAND_GENERATE:
        return generate_run(&invocation->generate, err);
    case BD_COMMAND_TOKENIZE:
        return bd_tokenize_main(invocation->tokenize.tokenizer_path, invocation->tokenize.decode,
                                err);
    case BD_COMMAND_HASH_KEY:
        return exit_of(bd_hash_key_run(stdin, stdout, err));
    case BD_COMMAND_PLAN:
        return plan_run(&invocation->plan, err);
    case BD_COMMAND_RESHARD:
        return reshard_run(&invocation->reshard, err);
    case BD_COMMAND_VERSION:
        puts("bitdelta " BD_VERSION);
        return EXIT_DONE;
    case BD_COMMAND_HELP:
        return help_run(&invocation->help, err);
    case BD_COMMAND_COUNT:
        break;
    }
    return exit_of(bd_fail(err, BD_E_INTERNAL, "command", "no such command"));
}

/* Where a standard stream is closed, the next file or connection would get its number and with it
 * the log's lines. What takes the place fails every read or write, as the closed one did. */
static void hold_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
            (void)open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY); /* the lowest: fd */
}

int main(int argc, char **argv) {
    hold_standard_streams();
    /* A limit on the size of files (ulimit -f) fails the write, which names the file; it ends no
     * server because its log has grown. */
    signal(SIGXFSZ, SIG_IGN);
    bd_error err;
    bd_error_clear(&err);
    bd_invocation invocation;
    bd_status status =
        bd_invocation_parse(&invocation, argc - 1, (const char *const *)argv + 1, &err);
    if (status != BD_OK) {
        complain(&err);
        /* Before a command is known, `command` is but the first of them. */
        const char *command = bd_command_name(invocation.command);
        const bool known =
            argc > 1 && strcmp(argv[1], command) == 0 && invocation.command != BD_COMMAND_HELP;
        if (invocation.wrong_usage)
            fprintf(stderr, "try: bitdelta help%s%s\n", known ? " " : "", known ? command : "");
        return invocation.wrong_usage ? EXIT_USAGE : exit_of(status);
    }
    int code = run(&invocation, &err);
    if (invocation.command != BD_COMMAND_SERVE && wrong_split(code, &err)) code = EXIT_USAGE;
    if (code != EXIT_DONE) complain(&err);
    bd_invocation_deinit(&invocation);
    if (code != EXIT_DONE && err.status == BD_CANCELLED && bd_stop_signal() > 0)
        (void)raise(bd_stop_signal());
    /* Output that could not be written (a full disk, a closed pipe) is not success. */
    if (code == EXIT_DONE && (fflush(stdout) != 0 || ferror(stdout))) {
        fputs("bitdelta: cannot write to standard output\n", stderr);
        return EXIT_INPUT;
    }
    return code;
}
