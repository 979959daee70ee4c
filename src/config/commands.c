/* commands.c - every command, once: its name and what help says of it. Its options are the rows of
 * table.c. Threads: constant data. */
#include "table.h"

static const command_row k_commands[BD_COMMAND_COUNT] = {
    [BD_COMMAND_SERVE] =
        {.name = "serve",
         .summary = "serve a base model and its variants over HTTP",
         .usage = "bitdelta serve --base DIR [--deltas DIR] [options]",
         .details = "Every flag has a key in the configuration file. Paths are relative to the "
                    "directory the "
                    "server is started in.",
         .example =
             "bitdelta serve --base demo/zen-mini --deltas demo/deltas --listen 127.0.0.1:8080"},
    [BD_COMMAND_COMPRESS] =
        {.name = "compress",
         .summary = "write the 1-bit delta between a fine-tuned model and its base",
         .usage = "bitdelta compress --base DIR --finetuned DIR --out DIR [options]",
         .example = "tests/data/unpack.sh && bitdelta compress --base demo/zen-mini "
                    "--finetuned demo/finetuned/zen-mini-coder --out zen-mini-coder"},
    [BD_COMMAND_INSPECT] =
        {.name = "inspect",
         .summary = "describe a model, a delta or a safetensors file, and check its sums",
         .usage = "bitdelta inspect DIR|FILE [--verify] [--json]",
         .example = "bitdelta inspect demo/deltas/zen-mini-coder --verify"},
    [BD_COMMAND_GENERATE] =
        {.name = "generate",
         .summary = "continue one prompt, without a server",
         .usage = "bitdelta generate --base DIR [--delta DIR | --finetuned DIR | --lora DIR] "
                  "(--prompt TEXT | --prompt-ids 1,2,3) [options]",
         .details = "Without a tokenizer.json only --prompt-ids works. With --json the result is "
                    "{\"prompt_ids\", \"ids\", \"text\" or null, \"logprobs\"}.",
         .example = "bitdelta generate --base demo/zen-mini --delta demo/deltas/zen-mini-coder "
                    "--prompt \"def add(a, b):\" --max-tokens 32 --greedy"},
    [BD_COMMAND_TOKENIZE] =
        {.name = "tokenize",
         .summary = "text to token ids and back, as JSON lines",
         .usage = "bitdelta tokenize --tokenizer FILE [--decode]",
         .details = "Reads {\"text\", \"add_special_tokens\", \"parse_special\"} and writes "
                    "{\"ids\"}; with "
                    "--decode reads {\"ids\", \"skip_special_tokens\"} and writes {\"text\"}; "
                    "ids that no token has are passed over, as the tokenizers package does.",
         .example = "echo '{\"text\":\"hello\"}' | bitdelta tokenize --tokenizer "
                    "demo/zen-mini/tokenizer.json"},
    [BD_COMMAND_HASH_KEY] =
        {.name = "hash-key",
         .summary = "turn an API key into the line that a tenants file holds",
         .usage = "bitdelta hash-key < FILE",
         .details = "Reads one key from standard input and prints \"sha256:\" and its SHA-256 in "
                    "hex. Make keys by machine, of 128 random bits or more: short ones can be "
                    "guessed from their hash.",
         .example = "openssl rand -hex 24 | tee acme.key | bitdelta hash-key"},
    [BD_COMMAND_PLAN] =
        {.name = "plan",
         .summary = "say what memory a server would take, without starting one",
         .usage = "bitdelta plan --base DIR [--deltas DIR] [--device-bytes N] [options]",
         .details =
             "Reads config.json and the deltas' manifests, no weights. Options mean what "
             "they mean for serve. What does not fit is refused with the sum, exit status 1.",
         .example = "bitdelta plan --base demo/zen-mini --deltas demo/deltas --backend cuda "
                    "--device-bytes 80GiB"},
    [BD_COMMAND_RESHARD] =
        {.name = "reshard",
         .summary = "convert a delta of some number of shards into one of another number",
         .usage = "bitdelta reshard --delta DIR --out DIR --shards N [--base DIR] [options]",
         .details = "Gives byte for byte what compress --shards N would have written. All sums of "
                    "the old delta are checked first; the other files of its directory are "
                    "copied. --out appears whole or not at all; with --force it may be the old "
                    "delta itself.",
         .example = "bitdelta reshard --delta demo/deltas/zen-mini-coder --base demo/zen-mini "
                    "--out zen-mini-coder-2 --shards 2"},
    [BD_COMMAND_VERSION] = {.name = "version",
                            .summary = "print the version",
                            .usage = "bitdelta version",
                            .example = "bitdelta version"},
    [BD_COMMAND_HELP] = {.name = "help",
                         .summary = "explain a command, or print the whole reference",
                         .usage = "bitdelta help [COMMAND] [--reference]",
                         .example = "bitdelta help serve"},
};

const command_row *bd_table_command(bd_command command) {
    return &k_commands[command];
}

const char *bd_command_name(bd_command command) {
    return command < BD_COMMAND_COUNT ? k_commands[command].name : "unknown";
}
