/* admission.c - what a request takes from its tenant's share and from the queue, before and after
 * it is tokenised, and what a client is told when it does not get it. Threads: whichever holds the
 * request. */
#include <inttypes.h>

#include "bitdelta/base/clock.h"
#include "completion.h"

/* A chat that names no limit may fill the context and seldom does: so many new tokens are reserved
 * for it. What it makes beyond them its tenant owes. */
enum { NEW_TOKENS_UNLIMITED = 512, BYTES_PER_TOKEN = 4 };

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Sets the tokens of an ask: of prompts `known` at least and `likely` by estimate, and `limit` new
 * ones of each choice. */
static void ask_tokens(const bd_completion *completion, uint64_t known, uint64_t likely,
                       uint64_t limit, bd_ask *ask) {
    const bd_completion_request *request = &completion->request;
    bool unlimited = request->is_chat && !request->max_tokens_sent;
    uint64_t reserved = unlimited ? smaller(limit, NEW_TOKENS_UNLIMITED) : limit;
    ask->least = known + (unlimited ? 0 : limit * completion->choice_count);
    ask->tokens = likely + reserved * completion->choice_count;
}

/* Before anything is tokenised: ids count as what they are, text by its bytes. */
static void estimate(bd_completion *completion) {
    const bd_completion_request *request = &completion->request;
    const uint64_t length = completion->served->max_model_len;
    uint64_t known = 0, texts = 0;
    for (uint32_t i = 0; !request->is_chat && i < request->prompt_count; i++) {
        const bd_prompt_input *input = &request->prompts[i];
        if (input->is_ids)
            known += input->count;
        else
            texts += smaller(input->text.bytes / BYTES_PER_TOKEN + 1, length);
    }
    if (request->is_chat) texts = smaller(completion->body_bytes / BYTES_PER_TOKEN + 1, length);
    ask_tokens(completion, known, known + texts, smaller((uint64_t)request->max_tokens, length),
               &completion->ask);
}

/* No waiting would help: not the answer that makes clients try again. */
static bool too_large(const bd_completion *completion, const bd_ask *ask, const bd_refused *why,
                      bd_api_error *err) {
    const bd_completion_request *request = &completion->request;
    const char *each = request->best_of > request->n ? "best_of" : "n";
    if (why->limit == BD_LIMIT_SEQUENCES)
        return bd_api_fail(err, BD_API_VALUE, request->prompt_count > 1 ? "prompt" : each,
                           "This key's limit of sequences at once is %" PRIu64 ", but the request "
                           "asks for %" PRIu32 " (prompts x %s).",
                           why->most, ask->choices, each);
    return bd_api_fail(
        err, BD_API_VALUE, request->max_tokens_sent ? request->limit_name : request->prompt_name,
        "This key may use %" PRIu64 " token%s at once, but the request needs %" PRIu64
        " (prompts and new tokens).",
        why->most, bd_plural(why->most), ask->least);
}

static bool over_limit(const bd_refused *why, bd_api_error *err) {
    static const char *const names[] = {[BD_LIMIT_NONE] = "",
                                        [BD_LIMIT_REQUESTS] = "requests per minute",
                                        [BD_LIMIT_TOKENS] = "tokens per minute",
                                        [BD_LIMIT_SEQUENCES] = "sequences at once"};
    const bool full = why->limit == BD_LIMIT_NONE;
    if (full)
        bd_api_fail(err, BD_API_RATE, NULL,
                    "Too many requests are waiting. Please try again later.");
    else
        bd_api_fail(err, BD_API_RATE, NULL,
                    "Rate limit of this key reached: %s. Please try again in %" PRIu32 " s.",
                    names[why->limit], why->retry_after_s);
    err->retry_after_s = why->retry_after_s == 0 ? 1 : why->retry_after_s;
    if (full) err->limit = "queue";
    return false;
}

bool bd_completion_reserve(bd_completion *completion, bd_api_error *err) {
    bd_refused why;
    completion->ask.choices = completion->choice_count;
    estimate(completion);
    bd_status status = bd_router_reserve(completion->openai->router, &completion->ask, &why);
    switch ((int)status) {
    case BD_OK:
        completion->reserved = true;
        return true;
    case BD_BUSY:
        return why.never ? too_large(completion, &completion->ask, &why, err)
                         : over_limit(&why, err);
    case BD_E_SHUTDOWN:
        return bd_api_fail(err, BD_API_SHUTDOWN, NULL, "The server is shutting down.");
    case BD_E_DEVICE:
        return bd_api_fail(err, BD_API_DEAD, NULL, "The engine is not running.");
    default:
        return bd_api_fail(err, BD_API_INTERNAL, NULL, "The request could not be queued.");
    }
}

/* Once everything is tokenised. */
bool bd_completion_correct(bd_completion *completion, bd_api_error *err) {
    bd_refused why;
    bd_ask exact = {.choices = completion->choice_count};
    const uint64_t prompts = completion->prompt_tokens;
    ask_tokens(completion, prompts, prompts, completion->max_new, &exact);
    if (bd_tenant_correct(&completion->ask, exact.least, exact.tokens, bd_now_us(), &why) == BD_OK)
        return true;
    return too_large(completion, &exact, &why, err);
}

/* Work without the engine counts as a request; it is over as soon as it is admitted. */
bool bd_openai_admit(const bd_tenant *tenant, bd_api_error *err) {
    bd_refused why;
    bd_ask ask = {.tenant = tenant};
    uint64_t now_us = bd_now_us();
    if (bd_tenant_admit(&ask, now_us, &why) != BD_OK) return over_limit(&why, err);
    bd_tenant_settle(&ask, 0, 0, BD_TENANT_OK, now_us);
    return true;
}
