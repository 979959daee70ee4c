/* sinks.c - tokens of a job become text, events and log-probability lists. Threads: bd-sched only;
 * nothing here waits. */
#include <string.h>

#include "completion.h"

static bd_prompt_state *prompt_of(const bd_completion *completion, uint32_t index) {
    return &completion->prompts[index / completion->width];
}

/* The whole request ends with this error; done() follows once the router has stopped the other
 * choices. */
static void fail(bd_completion *completion, bd_api_kind kind, const char *message) {
    if (completion->failed) return;
    completion->failed = true;
    bd_api_fail(&completion->error, kind, NULL, "%s", message);
    bd_router_cancel(completion->openai->router, &completion->job);
}

static size_t choice_bytes(const bd_choice *choice) {
    return choice->text.len_bytes + choice->token_ids.len_bytes +
           bd_logprob_lists_bytes(&choice->lists);
}

static size_t prompt_bytes(const bd_prompt_state *prompt) {
    return prompt->logprobs.len_bytes + bd_logprob_lists_bytes(&prompt->lists);
}

static bool choice_failed(const bd_choice *choice) {
    return choice->text.failed || choice->token_ids.failed ||
           bd_logprob_lists_failed(&choice->lists);
}

/* Output kept for this request is bounded, whatever the request asked for. */
static bool keep(bd_completion *completion, size_t bytes, bool out_of_memory) {
    completion->held_bytes += bytes;
    if (out_of_memory || completion->piece.failed)
        fail(completion, BD_API_INTERNAL, "The server is out of memory.");
    else if (completion->held_bytes > completion->openai->response_bytes_max) {
        fail(completion, BD_API_VALUE,
             "The response would be too large; ask for fewer tokens, choices or logprobs.");
        completion->error.limit = "response_bytes";
    }
    return !completion->failed;
}

static bool account(bd_completion *completion, const bd_choice *choice, size_t before_bytes) {
    return keep(completion, choice_bytes(choice) - before_bytes, choice_failed(choice));
}

/* Each choice of the prompt will tell it, so it counts as often. */
static bool account_prompt(bd_completion *completion, const bd_prompt_state *prompt,
                           size_t before_bytes) {
    return keep(completion, (prompt_bytes(prompt) - before_bytes) * completion->width,
                prompt->logprobs.failed || bd_logprob_lists_failed(&prompt->lists));
}

static bool is_listed(const int32_t *ids, uint32_t count, int32_t id) {
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

/* Position 0 has no log-probability, but it has an entry. */
static void begin_prompt(bd_completion *completion, bd_prompt_state *prompt) {
    if (prompt->next > 0) return;
    prompt->next = 1;
    const size_t before_bytes = prompt_bytes(prompt);
    if (completion->request.echo && completion->request.logprobs >= 0)
        bd_logprob_lists_add_first(&prompt->lists, &completion->names, prompt->ids.ids[0]);
    if (completion->request.prompt_logprobs >= 0) bd_strbuf_puts(&prompt->logprobs, "null");
    (void)account_prompt(completion, prompt, before_bytes);
}

static void add_prompt_token(bd_completion *completion, bd_prompt_state *prompt,
                             const bd_token_result *token) {
    const bd_completion_request *request = &completion->request;
    if (request->echo && request->logprobs >= 0)
        bd_logprob_lists_add(&prompt->lists, &completion->names, token, (uint32_t)request->logprobs,
                             prompt->offsets[prompt->next]);
    if (request->prompt_logprobs >= 0) {
        bd_strbuf_append(&prompt->logprobs, ",", 1);
        bd_prompt_logprob_write(&completion->names, token, (uint32_t)request->prompt_logprobs,
                                &prompt->logprobs);
    }
    prompt->next++;
}

static void on_prompt(void *ctx, uint32_t index, uint32_t first, const bd_token_result *tokens,
                      uint32_t count) {
    bd_completion *completion = ctx;
    bd_prompt_state *prompt = prompt_of(completion, index);
    if (completion->failed) return;
    begin_prompt(completion, prompt);
    const size_t before_bytes = prompt_bytes(prompt);
    for (uint32_t i = 0; i < count; i++) {
        if (first + i != prompt->next || first + i >= prompt->ids.count) continue;
        if (tokens[i].fault) {
            fail(completion, BD_API_INTERNAL, "The model computed an invalid number.");
            return;
        }
        add_prompt_token(completion, prompt, &tokens[i]);
    }
    (void)account_prompt(completion, prompt, before_bytes);
}

/* A chat choice begins with its role, together with the first token. */
static bool send_role(bd_completion *completion, uint32_t index) {
    bd_strbuf_clear(&completion->event);
    bd_completion_write_role_event(completion, index, &completion->event);
    if (completion->event.failed) {
        fail(completion, BD_API_INTERNAL, "The server is out of memory.");
        return false;
    }
    if (completion->sink->event(completion->sink_ctx, completion->event.data,
                                completion->event.len_bytes, false))
        return true;
    fail(completion, BD_API_SLOW, "The stream was read too slowly.");
    return false;
}

/* Writes the choice's event and empties what it carried. */
static void send_event(bd_completion *completion, uint32_t index) {
    bd_choice *choice = &completion->choices[index];
    if (completion->request.is_chat && !choice->event_sent) {
        completion->any_event = true;
        if (!send_role(completion, index)) return;
    }
    bd_strbuf_clear(&completion->event);
    bd_completion_write_event(completion, index, &completion->event);
    if (completion->event.failed) {
        fail(completion, BD_API_INTERNAL, "The server is out of memory.");
        return;
    }
    bool exempt = !choice->event_sent && completion->request.echo;
    if (!choice->event_sent) completion->held_bytes -= prompt_bytes(prompt_of(completion, index));
    choice->event_sent = true;
    completion->any_event = true;
    completion->held_bytes -= choice_bytes(choice);
    bd_strbuf_clear(&choice->text);
    bd_strbuf_clear(&choice->token_ids);
    bd_logprob_lists_clear(&choice->lists);
    if (!completion->sink->event(completion->sink_ctx, completion->event.data,
                                 completion->event.len_bytes, exempt))
        fail(completion, BD_API_SLOW, "The stream was read too slowly.");
}

/* Text of the token that can be shown now. Returns the stop string that ended the choice, or -1. */
static int add_text(bd_completion *completion, bd_choice *choice, int32_t id, bool hidden,
                    bool last) {
    const bd_completion_request *request = &completion->request;
    bd_strbuf *piece = &completion->piece;
    bd_strbuf_clear(piece);
    if (!hidden) bd_detok_push(&choice->detok, id, piece);
    if (last) bd_detok_flush(&choice->detok, piece);
    if (piece->failed) return -1;
    choice->points += bd_code_points(piece->data, piece->len_bytes);
    int matched = -1;
    if (completion->stops.count == 0 || choice->generated <= request->min_tokens)
        bd_strbuf_append(&choice->text, piece->data, piece->len_bytes);
    else
        matched = bd_stop_feed(&completion->stops, &choice->stop, piece->data, piece->len_bytes,
                               request->include_stop, &choice->text);
    if (last && matched < 0 && completion->stops.count > 0)
        bd_stop_release(&completion->stops, &choice->stop, &choice->text);
    return matched;
}

static bool on_token(void *ctx, uint32_t index, const bd_token_result *token) {
    bd_completion *completion = ctx;
    bd_choice *choice = &completion->choices[index];
    const bd_completion_request *request = &completion->request;
    if (completion->failed || choice->finished) return false;
    if (token->fault) {
        fail(completion, BD_API_INTERNAL, "The model computed an invalid number.");
        return false;
    }
    begin_prompt(completion, prompt_of(completion, index));
    size_t before_bytes = choice_bytes(choice);
    choice->generated++;
    completion->generated++;
    choice->logprob_sum += (double)token->logprob;
    bool stops = is_listed(completion->stop_ids, completion->stop_id_count, token->id);
    bool last = stops || choice->generated == completion->max_new;
    uint64_t offset = choice->points;
    int matched = -1;
    if (completion->served->tokenizer)
        matched = add_text(completion, choice, token->id, stops && !request->include_stop, last);
    if (request->logprobs >= 0 && request->is_chat)
        bd_chat_logprob_add(&choice->lists.tokens, &completion->names, token,
                            (uint32_t)request->logprobs);
    else if (request->logprobs >= 0)
        bd_logprob_lists_add(&choice->lists, &completion->names, token, (uint32_t)request->logprobs,
                             offset);
    if (request->return_token_ids)
        bd_strbuf_printf(&choice->token_ids, "%s%d", choice->token_ids.len_bytes > 0 ? "," : "",
                         (int)token->id);
    if (matched >= 0 || last) {
        choice->finished = true;
        choice->finish = matched >= 0 || stops ? BD_FINISH_STOP : BD_FINISH_LENGTH;
        choice->stop_string = matched;
        bool eos = !request->ignore_eos &&
                   is_listed(completion->served->eos_ids, completion->served->eos_count, token->id);
        if (matched < 0 && stops && !eos) choice->stop_id = token->id;
    }
    if (!account(completion, choice, before_bytes)) return false;
    if (request->stream) send_event(completion, index);
    return matched < 0 && !completion->failed;
}

/* The finish is known from the last token; only a choice without any (max_tokens 0), or one that
 * the engine ended early, is finished here. */
static void on_end(void *ctx, uint32_t index, bd_finish finish, int32_t stop_id) {
    bd_completion *completion = ctx;
    bd_choice *choice = &completion->choices[index];
    bool ended_well = finish == BD_FINISH_STOP || finish == BD_FINISH_LENGTH;
    if (completion->failed || choice->finished || !ended_well) return;
    begin_prompt(completion, prompt_of(completion, index));
    size_t before_bytes = choice_bytes(choice);
    choice->finished = true;
    choice->finish = completion->max_new == 0 ? BD_FINISH_LENGTH : finish;
    if (is_listed(completion->stop_ids, completion->user_stop_count, stop_id))
        choice->stop_id = stop_id;
    if (choice->generated > 0 && completion->served->tokenizer)
        (void)add_text(completion, choice, -1, true, true);
    if (!account(completion, choice, before_bytes)) return;
    if (completion->request.stream) send_event(completion, index);
}

static void fail_by_status(bd_completion *completion, bd_status status, const bd_error *err,
                           uint32_t retry_after_s) {
    bd_api_error *error = &completion->error;
    switch ((int)status) {
    case BD_CANCELLED:
        bd_api_fail(error, BD_API_SHUTDOWN, NULL, "The request was cancelled.");
        break;
    case BD_E_SHUTDOWN:
        bd_api_fail(error, BD_API_SHUTDOWN, NULL, "The server is shutting down.");
        break;
    case BD_E_DEVICE:
        bd_api_fail(error, BD_API_DEAD, NULL, "The engine is not running.");
        break;
    case BD_E_MEMORY:
        bd_out_of_memory(error);
        break;
    case BD_E_LIMIT:
        bd_api_fail(error, BD_API_CONTEXT, "prompt",
                    "This model's maximum context length is %u tokens, but the request needs more "
                    "memory than the "
                    "server has for one sequence.",
                    completion->served->max_model_len);
        break;
    case BD_E_VARIANT:
        bd_api_fail(error, BD_API_VARIANT, NULL, "The model '%s' is unavailable: %s.",
                    completion->served->name, bd_api_variant_fault(err));
        error->retry_after_s = retry_after_s == 0 ? 1 : retry_after_s > 60 ? 60 : retry_after_s;
        break;
    default:
        bd_api_fail(error, BD_API_INTERNAL, NULL, "The server had an internal error.");
        break;
    }
    completion->failed = true;
}

static void end_stream(bd_completion *completion) {
    bd_strbuf *out = &completion->event;
    if (completion->failed || completion->request.include_usage) {
        bd_strbuf_clear(out);
        if (completion->failed) {
            bd_strbuf_puts(out, "data: ");
            bd_api_error_write(&completion->error, out);
            bd_strbuf_puts(out, "\n\n");
        } else {
            bd_completion_write_usage_event(completion, out);
        }
        if (!out->failed)
            (void)completion->sink->event(completion->sink_ctx, out->data, out->len_bytes, true);
    }
    static const char done[] = "data: [DONE]\n\n";
    (void)completion->sink->event(completion->sink_ctx, done, sizeof done - 1, true);
}

static void on_done(void *ctx, bd_status status, const bd_error *err, uint32_t retry_after_s) {
    bd_completion *completion = ctx;
    completion->reserved = false;
    int reason = atomic_load(&completion->cancel_reason);
    if (status == BD_CANCELLED && reason != BD_OK) status = (bd_status)reason;
    if (!completion->failed && status != BD_OK)
        fail_by_status(completion, status, err, retry_after_s);
    if (completion->request.stream && completion->any_event) end_stream(completion);
    completion->sink->done(completion->sink_ctx); /* the completion may be gone afterwards */
}

const bd_job_sink bd_completion_job_sink = {
    .token = on_token,
    .prompt = on_prompt,
    .end = on_end,
    .done = on_done,
};
