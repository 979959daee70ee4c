/* prepare.c - from a checked request to a job: model, queue room, tokens, vocabulary, context
 * length. Threads: whichever holds the request. */
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "completion.h"

enum { DECODER_TAIL_TOKENS = 64 };

static bool over_context(const bd_completion *completion, const char *param, size_t prompt_tokens,
                         bool more, bd_api_error *err) {
    const int64_t wanted = completion->request.max_tokens_sent || !completion->request.is_chat
                               ? completion->request.max_tokens
                               : 1;
    return bd_api_fail(err, BD_API_CONTEXT, param,
                       "This model's maximum context length is %" PRIu32
                       " tokens, but %s%zu prompt token%s and %" PRId64
                       " new token%s were requested.",
                       completion->served->max_model_len, more ? "more than " : "", prompt_tokens,
                       bd_plural(prompt_tokens), wanted, bd_plural((uint64_t)wanted));
}

/* Text that is far over the context is not tokenised to its end. */
static bool encode_text(bd_completion *completion, const bd_prompt_input *input,
                        bd_prompt_state *prompt, bd_api_error *err) {
    const bd_served *served = completion->served;
    if (!served->tokenizer)
        return bd_api_fail(err, BD_API_VALUE, "prompt",
                           "This model has no tokenizer: send token ids as 'prompt'.");
    const bd_encode_options options = {
        .add_special_tokens = completion->request.add_special_tokens,
        .parse_special = true,
        .tokens_max = (size_t)served->max_model_len * 4,
    };
    bd_error fault = {0};
    bd_status status = bd_tokenizer_encode(served->tokenizer, input->text.data, input->text.bytes,
                                           &options, &prompt->ids, &fault);
    if (status == BD_E_LIMIT)
        return over_context(completion, completion->request.prompt_name, options.tokens_max, true,
                            err);
    if (status == BD_E_MEMORY) return bd_out_of_memory(err);
    const char *name = completion->request.prompt_name;
    if (status != BD_OK)
        return bd_api_fail(err, BD_API_VALUE, name, "Invalid '%s': %.200s.", name, fault.message);
    if (prompt->ids.count == 0)
        return bd_api_fail(err, BD_API_VALUE, name, "Invalid '%s': the text gives no token.", name);
    return true;
}

static bool copy_ids(const bd_prompt_input *input, bd_prompt_state *prompt, bd_api_error *err) {
    prompt->ids.ids = malloc((size_t)input->count * sizeof *prompt->ids.ids);
    if (!prompt->ids.ids) return bd_out_of_memory(err);
    memcpy(prompt->ids.ids, input->ids, (size_t)input->count * sizeof *prompt->ids.ids);
    prompt->ids.count = prompt->ids.capacity = input->count;
    return true;
}

static bool check_prompt_ids(const bd_completion *completion, const bd_prompt_state *prompt,
                             bd_api_error *err) {
    for (size_t i = 0; i < prompt->ids.count; i++) {
        if ((uint32_t)prompt->ids.ids[i] >= completion->served->vocab)
            return bd_api_fail(err, BD_API_VALUE, "prompt",
                               "Invalid 'prompt': token id %" PRId32
                               " is not below the vocabulary size %" PRIu32 ".",
                               prompt->ids.ids[i], completion->served->vocab);
    }
    return true;
}

/* The new tokens a prompt leaves room for. A default is shortened to fit, a number that was sent is
 * not. */
static bool check_context(bd_completion *completion, const bd_prompt_state *prompt,
                          bd_api_error *err) {
    uint64_t length = completion->served->max_model_len, count = prompt->ids.count;
    uint64_t wanted = (uint64_t)completion->request.max_tokens;
    const char *name = completion->request.prompt_name;
    if (count > length) return over_context(completion, name, prompt->ids.count, false, err);
    if (count + wanted <= length) return true;
    if (completion->request.max_tokens_sent)
        return over_context(completion, completion->request.limit_name, prompt->ids.count, false,
                            err);
    if (count == length) return over_context(completion, name, prompt->ids.count, false, err);
    if (length - count < completion->max_new) completion->max_new = (uint32_t)(length - count);
    return true;
}

/* Text prompts are echoed as they came; an added special token shows only when special tokens are
 * wanted. Id prompts are decoded as the start of the text that generation goes on with, so an
 * unfinished character at their end is not cut off. */
static bool make_echo(bd_completion *completion, const bd_prompt_input *input,
                      bd_prompt_state *prompt, bd_api_error *err) {
    const bd_completion_request *request = &completion->request;
    const bd_tokenizer *tokenizer = completion->served->tokenizer;
    bool want_offsets = request->logprobs >= 0;
    if (want_offsets) {
        prompt->offsets = calloc(prompt->ids.count, sizeof *prompt->offsets);
        if (!prompt->offsets) return bd_out_of_memory(err);
    }
    bd_strbuf decoded;
    bd_strbuf_init(&decoded, 0);
    if (tokenizer && (want_offsets || input->is_ids)) {
        bd_detok detok;
        uint64_t points = 0;
        size_t counted = 0;
        bd_detok_init(&detok, tokenizer, request->skip_special_tokens);
        for (size_t i = 0; i < prompt->ids.count; i++) {
            if (decoded.len_bytes > counted)
                points += bd_code_points(decoded.data + counted, decoded.len_bytes - counted);
            counted = decoded.len_bytes;
            if (want_offsets) prompt->offsets[i] = points;
            bd_detok_push(&detok, prompt->ids.ids[i], &decoded);
        }
        if (request->max_tokens == 0) bd_detok_flush(&detok, &decoded);
        bd_detok_deinit(&detok);
    }
    if (input->is_ids) {
        prompt->echo = decoded;
    } else {
        bd_strbuf_deinit(&decoded);
        int32_t first = prompt->ids.ids[0];
        if (!request->skip_special_tokens && bd_tokenizer_is_special(tokenizer, first)) {
            size_t bytes = 0;
            const char *name = bd_tokenizer_token_content(tokenizer, first, &bytes);
            bool written = bytes <= input->text.bytes && memcmp(name, input->text.data, bytes) == 0;
            if (!written) bd_strbuf_append(&prompt->echo, name, bytes);
        }
        bd_strbuf_append(&prompt->echo, input->text.data, input->text.bytes);
    }
    prompt->echo_points = bd_code_points(prompt->echo.data, prompt->echo.len_bytes);
    return !prompt->echo.failed || bd_out_of_memory(err);
}

/* The conversation becomes the one text prompt. */
static bool render_chat(bd_completion *completion, bd_api_error *err) {
    bd_completion_request *request = &completion->request;
    const bd_chat *chat = NULL;
    bd_strbuf *text = &completion->rendered;
    bd_strbuf_init(text, BD_CHAT_OUTPUT_BYTES_MAX);
    if (!bd_chat_book_get(completion->openai->chats, completion->served, &chat, err)) return false;
    bool ok = bd_chat_render(chat, &request->chat, request->arena, text, err);
    bd_chat_book_release(completion->openai->chats, chat);
    if (!ok) return false;
    request->prompts[0].text =
        (bd_text){.data = text->data ? text->data : "", .bytes = text->len_bytes};
    return true;
}

static bool prepare_prompts(bd_completion *completion, bd_api_error *err) {
    bd_completion_request *request = &completion->request;
    completion->max_new = (uint32_t)request->max_tokens;
    if (request->is_chat && !render_chat(completion, err)) return false;
    for (uint32_t i = 0; i < request->prompt_count; i++) {
        const bd_prompt_input *input = &request->prompts[i];
        bd_prompt_state *prompt = &completion->prompts[i];
        bool ok = input->is_ids ? copy_ids(input, prompt, err)
                                : encode_text(completion, input, prompt, err);
        if (!ok || !check_prompt_ids(completion, prompt, err) ||
            !check_context(completion, prompt, err))
            return false;
        if (request->echo && !make_echo(completion, input, prompt, err)) return false;
        completion->prompt_tokens += prompt->ids.count;
        completion->job_prompts[i] =
            (bd_prompt){.ids = prompt->ids.ids, .count = (uint32_t)prompt->ids.count};
    }
    return true;
}

/* A decoder that has seen the prompt. Only the first choice of a prompt looks at all of it: when
 * nothing is held back at its end, a stretch of it is enough to decode on. */
static bool start_decoder(bd_completion *completion, uint32_t index) {
    const bd_prompt_state *prompt = &completion->prompts[index / completion->width];
    bd_choice *choice = &completion->choices[index];
    size_t skipped = 0;
    if (index % completion->width > 0 && prompt->ids.count > DECODER_TAIL_TOKENS &&
        bd_detok_held_bytes(&choice[-1].detok) == 0)
        skipped = prompt->ids.count - DECODER_TAIL_TOKENS;
    bd_detok_init(&choice->detok, completion->served->tokenizer,
                  completion->request.skip_special_tokens);
    return bd_detok_skip(&choice->detok, prompt->ids.ids + skipped, prompt->ids.count - skipped);
}

static bool prepare_choices(bd_completion *completion, bd_api_error *err) {
    const bd_completion_request *request = &completion->request;
    for (uint32_t i = 0; i < completion->choice_count; i++) {
        bd_choice *choice = &completion->choices[i];
        choice->stop_string = -1;
        choice->stop_id = -1;
        choice->points = completion->prompts[i / completion->width].echo_points;
        if (!completion->served->tokenizer || request->max_tokens == 0) continue;
        if (!start_decoder(completion, i)) return bd_out_of_memory(err);
    }
    return true;
}

static bool prepare_stop(bd_completion *completion, bd_api_error *err) {
    bd_completion_request *request = &completion->request;
    const bd_served *served = completion->served;
    if (request->stop_count > 0 && !served->tokenizer)
        return bd_api_fail(err, BD_API_UNSUPPORTED, "stop",
                           "This model has no tokenizer, so 'stop' cannot be matched.");
    if (!bd_stop_set_init(&completion->stops, request->stops, request->stop_count, request->arena))
        return bd_out_of_memory(err);
    completion->stop_ids =
        bd_arena_alloc(request->arena, request->stop_id_count + served->eos_count + 1u,
                       sizeof *completion->stop_ids);
    if (!completion->stop_ids) return bd_out_of_memory(err);
    for (uint32_t i = 0; i < request->stop_id_count; i++) {
        if (request->stop_ids[i] >= (int64_t)served->vocab)
            return bd_api_fail(err, BD_API_VALUE, "stop_token_ids",
                               "Invalid 'stop_token_ids': %" PRId64
                               " is not below the vocabulary size %" PRIu32 ".",
                               request->stop_ids[i], served->vocab);
        completion->stop_ids[completion->stop_id_count++] = (int32_t)request->stop_ids[i];
    }
    completion->user_stop_count = completion->stop_id_count;
    for (uint32_t i = 0; i < served->eos_count && !request->ignore_eos; i++)
        completion->stop_ids[completion->stop_id_count++] = served->eos_ids[i];
    return true;
}

typedef struct bias_order {
    bd_bias_input input;
    uint32_t sent_at;
} bias_order;

static int compare_bias(const void *left, const void *right) {
    const bias_order *a = left, *b = right;
    if (a->input.id != b->input.id) return a->input.id < b->input.id ? -1 : 1;
    return a->sent_at < b->sent_at ? -1 : 1;
}

/* The engine wants distinct ids; of a repeated key the last counts. */
static bool prepare_bias(bd_completion *completion, bd_api_error *err) {
    bd_completion_request *request = &completion->request;
    uint32_t count = request->bias_count;
    if (count == 0) return true;
    bias_order *order = calloc(count, sizeof *order);
    completion->bias = calloc(count, sizeof *completion->bias);
    if (!order || !completion->bias) {
        free(order);
        return bd_out_of_memory(err);
    }
    for (uint32_t i = 0; i < count; i++)
        order[i] = (bias_order){request->bias[i], i};
    qsort(order, count, sizeof *order, compare_bias);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (i + 1 < count && order[i + 1].input.id == order[i].input.id) continue;
        double value = order[i].input.value;
        completion->bias[kept++] = (bd_logit_edit){.token = (int32_t)order[i].input.id,
                                                   .repetition = 1,
                                                   .add = value <= -100 ? -INFINITY : (float)value};
    }
    int64_t largest = order[count - 1].input.id;
    free(order);
    if (largest >= (int64_t)completion->served->vocab)
        return bd_api_fail(err, BD_API_VALUE, "logit_bias",
                           "Invalid 'logit_bias': token id %" PRId64
                           " is not below the vocabulary size %" PRIu32 ".",
                           largest, completion->served->vocab);
    completion->job.params.bias = completion->bias;
    completion->job.params.bias_count = kept;
    return true;
}

static float float_between(double value, float low, float high) {
    return value < (double)low ? low : value > (double)high ? high : (float)value;
}

static void fill_job(bd_completion *completion, uint64_t received_us) {
    const bd_completion_request *request = &completion->request;
    bd_job *job = &completion->job;
    bd_sequence_options *params = &job->params;
    uint64_t seed = request->seed_sent ? (uint64_t)request->seed : completion->random_seed;
    params->max_new_tokens = completion->max_new;
    params->min_new_tokens = request->min_tokens < completion->max_new
                                 ? (uint32_t)request->min_tokens
                                 : completion->max_new;
    /* Tiny temperatures mean greedy: dividing by them would overflow. top_p 0 keeps the one best
     * token. */
    params->sampling = (bd_sampling){
        .temperature = request->temperature < 1e-5 ? 0.0f : (float)request->temperature,
        .top_p = float_between(request->top_p, 1e-9f, 1.0f),
        .min_p = (float)request->min_p,
        .top_k = request->top_k > 0 ? (uint32_t)request->top_k : 0,
        .seed = seed,
    };
    params->repetition_penalty = float_between(request->repetition_penalty, FLT_MIN, FLT_MAX);
    params->presence_penalty = (float)request->presence_penalty;
    params->frequency_penalty = (float)request->frequency_penalty;
    params->stop_ids = completion->stop_ids;
    params->stop_id_count = completion->stop_id_count;
    params->logprobs = (int32_t)request->logprobs;
    /* The best are chosen by the log-probabilities of their tokens. */
    if (params->logprobs < 0 && completion->width > (uint32_t)request->n) params->logprobs = 0;
    int64_t echoed = request->echo ? request->logprobs : -1;
    params->prompt_logprobs =
        (int32_t)(echoed > request->prompt_logprobs ? echoed : request->prompt_logprobs);
    params->priority = request->priority;
    job->served = completion->served;
    job->tenant = completion->ask.tenant;
    job->reserved_tokens = completion->ask.tokens;
    job->prompts = completion->job_prompts;
    job->prompt_count = request->prompt_count;
    job->choices_per_prompt = completion->width;
    job->sink = &bd_completion_job_sink;
    job->sink_ctx = completion;
    job->received_us = received_us;
}

/* Nobody overtakes others by asking for it: only as far as the tenant may. Who asks for nothing
 * gets 0, or the most that the tenant may. */
static bool check_priority(bd_completion *completion, bd_api_error *err) {
    const bd_tenant *tenant = completion->ask.tenant;
    bd_completion_request *request = &completion->request;
    if (tenant && !request->priority_sent && request->priority < tenant->priority_min)
        request->priority = tenant->priority_min;
    if (!tenant || request->priority >= tenant->priority_min) return true;
    return bd_api_fail(err, BD_API_INTEGER_LOW, "priority",
                       "Invalid 'priority': this key may ask for %" PRId64 " or more.",
                       tenant->priority_min);
}

bool bd_completion_prepare(bd_completion *completion, uint64_t received_us, bd_api_error *err) {
    bd_completion_request *request = &completion->request;
    const bd_openai *openai = completion->openai;
    if (!check_priority(completion, err)) return false;
    if (!bd_openai_find_model(openai, completion->ask.tenant, &request->model, &completion->served,
                              err))
        return false;
    completion->width = (uint32_t)(request->best_of > request->n ? request->best_of : request->n);
    completion->choice_count = request->prompt_count * completion->width;
    if (!bd_completion_reserve(completion, err)) return false;
    completion->prompts =
        bd_arena_alloc(request->arena, request->prompt_count, sizeof *completion->prompts);
    completion->job_prompts =
        bd_arena_alloc(request->arena, request->prompt_count, sizeof *completion->job_prompts);
    completion->choices =
        bd_arena_alloc(request->arena, completion->choice_count, sizeof *completion->choices);
    if (!completion->prompts || !completion->job_prompts || !completion->choices)
        return bd_out_of_memory(err);
    completion->names = (bd_token_names){completion->served->tokenizer, request->tokens_as_ids};
    if (!prepare_prompts(completion, err) || !bd_completion_correct(completion, err) ||
        !prepare_stop(completion, err) || !prepare_bias(completion, err))
        return false;
    if (!prepare_choices(completion, err)) return false;
    fill_job(completion, received_us);
    bd_openai_fingerprint(openai, completion->served, completion->fingerprint);
    return bd_completion_write_head(completion) || bd_out_of_memory(err);
}
