/* fuzz_body.c - any bytes as the body of a POST: the first says where to (0 completions, 1 chat, 2
 * tokenize, 3 detokenize), the rest goes through the whole of the API over an engine that makes a
 * few tokens. Answers and events are well-formed JSON, and nothing stays reserved or held. */
#include "fuzz.h"

#include <string.h>

#include <cjson/cJSON.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/openai/openai.h"
#include "front.h"

enum { RESPONSE_BYTES_MAX = 1 << 20 };

typedef struct outcome {
    unsigned events, dones;
    bool done_mark;
} outcome;

/* A token may be a NUL, so bd_json_check would be too strict with keys. */
static void check_json(const char *text, size_t bytes) {
    const char *end = NULL;
    cJSON *tree = cJSON_ParseWithLengthOpts(text, bytes, &end, false);
    BD_ASSERT(tree && end == text + bytes);
    BD_ASSERT(bd_utf8_valid_prefix(text, bytes) == bytes);
    cJSON_Delete(tree);
}

static bool take_event(void *ctx, const char *data, size_t bytes, bool exempt) {
    static const char done[] = "data: [DONE]\n\n";
    outcome *seen = ctx;
    (void)exempt;
    BD_ASSERT(bytes > 8 && memcmp(data, "data: ", 6) == 0 && !seen->done_mark);
    BD_ASSERT(memcmp(data + bytes - 2, "\n\n", 2) == 0 && !memchr(data, '\n', bytes - 2));
    seen->events++;
    if (bytes == sizeof done - 1 && memcmp(data, done, bytes) == 0)
        seen->done_mark = true;
    else
        check_json(data + 6, bytes - 8);
    return true;
}

static void take_done(void *ctx) {
    ((outcome *)ctx)->dones++;
}

static const bd_openai *api(void) {
    static bd_openai *kept;
    if (kept) return kept;
    const bd_openai_options options = {.router = fuzz_router(),
                                       .base_fingerprint = "0",
                                       .chat_template_path =
                                           "tests/fuzz/corpus/chat_template/qwen3.jinja",
                                       .response_bytes_max = RESPONSE_BYTES_MAX,
                                       .prompts_max = 64};
    BD_ASSERT(bd_openai_create(&options, &kept, NULL) == BD_OK);
    return kept;
}

static void check_refusal(const bd_api_error *err) {
    bd_strbuf body;
    bd_strbuf_init(&body, 0);
    BD_ASSERT(err->kind != BD_API_OK && bd_api_http_status(err->kind) >= 400);
    bd_api_error_write(err, &body);
    BD_ASSERT(!body.failed);
    check_json(body.data, body.len_bytes);
    bd_strbuf_deinit(&body);
}

static bool complete(bool chat, const char *body, size_t bytes, bd_strbuf *out, bd_api_error *err) {
    static const bd_completion_sink sink = {.event = take_event, .done = take_done};
    outcome seen = {0};
    bd_completion *completion = chat ? bd_chat_completion_create(api(), NULL, body, bytes, 1, err)
                                     : bd_completion_create(api(), NULL, body, bytes, 1, err);
    if (!completion) return false;
    bd_completion_submit(completion, &sink, &seen);
    BD_ASSERT(seen.dones == 1);
    bool stream = bd_completion_is_stream(completion);
    BD_ASSERT(stream ? seen.done_mark || seen.events == 0 : seen.events == 0);
    bool ok = stream ? seen.events > 0 : bd_completion_reply(completion, out, err);
    if (stream && !ok) BD_ASSERT(!bd_completion_reply(completion, out, err));
    if (stream && ok) bd_strbuf_puts(out, "null");
    bd_completion_destroy(completion);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const bd_openai *openai = api();
    bd_api_error err = {.kind = BD_API_OK};
    bd_strbuf in, out;
    bool ok = false;
    if (bytes == 0) return 0;
    bd_strbuf_init(&in, 0);
    bd_strbuf_init(&out, 0);
    bd_strbuf_append(&in, (const char *)data + 1, bytes - 1);
    const char *body = in.data ? in.data : "";
    switch (data[0] % 4) {
    case 0:
    case 1:
        ok = complete(data[0] % 4 == 1, body, in.len_bytes, &out, &err);
        break;
    case 2:
        ok = bd_openai_tokenize(openai, NULL, body, in.len_bytes, &out, &err);
        break;
    default:
        ok = bd_openai_detokenize(openai, NULL, body, in.len_bytes, &out, &err);
        break;
    }
    if (ok)
        check_json(out.data, out.len_bytes);
    else
        check_refusal(&err);
    BD_ASSERT(bd_router_idle(fuzz_router()));
    bd_strbuf_deinit(&in);
    bd_strbuf_deinit(&out);
    return 0;
}
