/* fuzz_config_file.c - any bytes as the server's configuration file. */
#include "fuzz.h"

#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/config/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const char *const args[] = {"serve", "--config", fuzz_memory_file(data, bytes)};
    bd_invocation invocation;
    bd_error err;
    bd_error_clear(&err);
    const bd_status status = bd_invocation_parse(&invocation, 3, args, &err);
    if (status != BD_OK) {
        fuzz_check_error(status, &err);
        return 0;
    }
    const bd_serve_options *options = &invocation.serve;
    BD_ASSERT(options->base_path && options->listen && options->admin);
    BD_ASSERT(options->max_batch_tokens == 0 ||
              options->prefill_chunk_tokens <= options->max_batch_tokens);
    BD_ASSERT(options->log_level <= BD_LOG_DEBUG);
    for (uint32_t i = 0; i < options->variants.count; i++)
        BD_ASSERT(options->variants.items[i].path[0] != '\0');
    bd_strbuf line;
    bd_strbuf_init(&line, 0);
    bd_invocation_describe(&invocation, &line);
    BD_ASSERT(!line.failed && bd_utf8_valid_prefix(line.data, line.len_bytes) == line.len_bytes);
    bd_strbuf_deinit(&line);
    bd_invocation_deinit(&invocation);
    return 0;
}
