/* fuzz_request.c - any bytes as the body of POST /v1/completions. An accepted request is within its
 * ranges; a refusal is a well-formed error body. */
#include "fuzz.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "openai/request.h"

enum { PROMPTS_MAX = 64 };

static void check_text(const bd_text *text) {
    BD_ASSERT(bd_utf8_valid_prefix(text->data, text->bytes) == text->bytes);
    BD_ASSERT(text->data[text->bytes] == '\0');
}

static void check_lists(const bd_completion_request *request) {
    BD_ASSERT(request->prompt_count >= 1 && request->prompt_count <= PROMPTS_MAX);
    for (uint32_t i = 0; i < request->prompt_count; i++) {
        const bd_prompt_input *prompt = &request->prompts[i];
        if (!prompt->is_ids) check_text(&prompt->text);
        for (uint32_t j = 0; prompt->is_ids && j < prompt->count; j++)
            BD_ASSERT(prompt->ids[j] >= 0);
    }
    BD_ASSERT(request->stop_count <= BD_STOP_STRINGS_MAX);
    for (uint32_t i = 0; i < request->stop_count; i++) {
        check_text(&request->stops[i]);
        BD_ASSERT(request->stops[i].bytes <= BD_STOP_STRING_BYTES_MAX);
    }
    BD_ASSERT(request->stop_id_count <= BD_STOP_IDS_MAX);
    for (uint32_t i = 0; i < request->stop_id_count; i++)
        BD_ASSERT(request->stop_ids[i] >= 0);
    for (uint32_t i = 0; i < request->bias_count; i++) {
        const bd_bias_input *bias = &request->bias[i];
        BD_ASSERT(bias->id >= 0 && bias->value >= -100 && bias->value <= 100);
    }
}

static bool within(double value, double low, double high) {
    return value >= low && value <= high; /* false for NaN */
}

static void check_request(const bd_completion_request *request) {
    if (request->model.data) check_text(&request->model);
    check_lists(request);
    BD_ASSERT(request->n >= 1 && request->n * request->prompt_count <= PROMPTS_MAX);
    BD_ASSERT(request->max_tokens >= 0 && request->max_tokens <= INT32_MAX);
    BD_ASSERT(request->min_tokens >= 0 && request->min_tokens <= request->max_tokens);
    BD_ASSERT(request->logprobs >= -1 && request->logprobs <= BD_LOGPROBS_MAX);
    BD_ASSERT(request->prompt_logprobs >= -1 && request->prompt_logprobs <= BD_LOGPROBS_MAX);
    BD_ASSERT(request->top_k >= -1 && request->top_k <= INT32_MAX);
    BD_ASSERT(within(request->temperature, 0, 2) && within(request->top_p, 0, 1));
    BD_ASSERT(within(request->min_p, 0, 1));
    BD_ASSERT(within(request->presence_penalty, -2, 2));
    BD_ASSERT(within(request->frequency_penalty, -2, 2));
    BD_ASSERT(request->repetition_penalty > 0 && isfinite(request->repetition_penalty));
    BD_ASSERT(!request->continuous_usage || request->include_usage);
}

static void check_refusal(const bd_api_error *err) {
    const bd_json_limits limits = {.depth_max = 4, .nodes_max = 64, .allow_nul_escape = true};
    bd_strbuf body;
    bd_strbuf_init(&body, 0);
    BD_ASSERT(err->kind != BD_API_OK && bd_api_http_status(err->kind) == 400);
    bd_api_error_write(err, &body);
    BD_ASSERT(!body.failed);
    BD_ASSERT(bd_json_check(body.data, body.len_bytes, &limits, NULL, NULL) == BD_OK);
    bd_strbuf_deinit(&body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *body = malloc(bytes + 1);
    BD_ASSERT(body);
    if (bytes > 0) memcpy(body, data, bytes);
    body[bytes] = '\0';
    bd_completion_request request;
    bd_api_error err = {.kind = BD_API_OK};
    const bool accepted = bd_completion_request_parse(body, bytes, PROMPTS_MAX, &request, &err);
    free(body); /* nothing in the request points into it */
    if (accepted)
        check_request(&request);
    else
        check_refusal(&err);
    bd_completion_request_deinit(&request);
    return 0;
}
