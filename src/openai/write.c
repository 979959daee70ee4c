/* write.c - response objects and events as JSON text. Threads: events on bd-sched, bodies on the
 * creator's. */
#include <inttypes.h>
#include <string.h>

#include "completion.h"

/* As printf does, which takes four times as long, for what is in every answer and every event. */
static void write_number(uint64_t value, bd_strbuf *out) {
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    bd_strbuf_append(out, digits + at, sizeof digits - at);
}

bool bd_completion_write_head(bd_completion *completion) {
    bd_strbuf *head = &completion->head;
    bd_strbuf_puts(head, "{\"id\":\"");
    bd_strbuf_puts(head, completion->id);
    const bd_completion_request *request = &completion->request;
    const char *object = !request->is_chat ? "text_completion"
                         : request->stream ? "chat.completion.chunk"
                                           : "chat.completion";
    bd_strbuf_puts(head, "\",\"object\":\"");
    bd_strbuf_puts(head, object);
    bd_strbuf_puts(head, "\",\"created\":");
    write_number(completion->created_s, head);
    bd_strbuf_puts(head, ",\"model\":");
    bd_strbuf_json_string(head, completion->served->name, strlen(completion->served->name));
    bd_strbuf_puts(head, ",\"choices\":[");
    return !head->failed;
}

static void write_usage(uint64_t prompt_tokens, uint64_t generated, bd_strbuf *out) {
    bd_strbuf_puts(out, "{\"prompt_tokens\":");
    write_number(prompt_tokens, out);
    bd_strbuf_puts(out, ",\"completion_tokens\":");
    write_number(generated, out);
    bd_strbuf_puts(out, ",\"total_tokens\":");
    write_number(prompt_tokens + generated, out);
    bd_strbuf_puts(out, "}");
}

static void write_finish(const bd_completion *completion, const bd_choice *choice, bd_strbuf *out) {
    if (!choice->finished) {
        bd_strbuf_puts(out, ",\"finish_reason\":null");
        return;
    }
    bd_strbuf_puts(out, choice->finish == BD_FINISH_STOP
                            ? ",\"finish_reason\":\"stop\",\"stop_reason\":"
                            : ",\"finish_reason\":\"length\",\"stop_reason\":");
    if (choice->stop_string >= 0) {
        const bd_text *stop = &completion->stops.strings[choice->stop_string];
        bd_strbuf_json_string(out, stop->data, stop->bytes);
    } else if (choice->stop_id >= 0) {
        bd_strbuf_printf(out, "%" PRId32, choice->stop_id);
    } else {
        bd_strbuf_puts(out, "null");
    }
}

static void write_ids(const bd_token_vec *ids, bd_strbuf *out) {
    for (size_t i = 0; i < ids->count; i++)
        bd_strbuf_printf(out, "%s%" PRId32, i > 0 ? "," : "", ids->ids[i]);
}

/* One literal for the echoed prompt and the text behind it. */
static void write_text(const bd_strbuf *echo, const bd_strbuf *text, bd_strbuf *out) {
    if (!echo || echo->len_bytes == 0) {
        bd_strbuf_json_string(out, text->data, text->len_bytes);
        return;
    }
    bd_strbuf joined;
    bd_strbuf_init(&joined, 0);
    bd_strbuf_append(&joined, echo->data, echo->len_bytes);
    bd_strbuf_append(&joined, text->data, text->len_bytes);
    if (joined.failed)
        out->failed = true;
    else
        bd_strbuf_json_string(out, joined.data, joined.len_bytes);
    bd_strbuf_deinit(&joined);
}

/* The finishing chunk's delta is empty unless it carries the last text. */
static void write_message(const bd_choice *choice, bool stream, bd_strbuf *out) {
    if (stream && choice->finished && choice->text.len_bytes == 0) {
        bd_strbuf_puts(out, ",\"delta\":{}");
        return;
    }
    bd_strbuf_puts(out, stream ? ",\"delta\":{\"content\":"
                               : ",\"message\":{\"role\":\"assistant\",\"content\":");
    bd_strbuf_json_string(out, choice->text.data, choice->text.len_bytes);
    bd_strbuf_puts(out, stream ? "}" : ",\"refusal\":null}");
}

static void write_chat_logprobs(const bd_choice *choice, bd_strbuf *out) {
    bd_strbuf_puts(out, "{\"content\":[");
    bd_strbuf_append(out, choice->lists.tokens.data, choice->lists.tokens.len_bytes);
    bd_strbuf_puts(out, "],\"refusal\":null}");
}

/* {"index":shown,...}: what the choice holds now. first: the prompt's parts belong to it. */
static void write_choice(const bd_completion *completion, uint32_t index, uint32_t shown,
                         bool first, bd_strbuf *out) {
    const bd_completion_request *request = &completion->request;
    const bd_choice *choice = &completion->choices[index];
    const bd_prompt_state *prompt = &completion->prompts[index / completion->width];
    bd_strbuf_puts(out, "{\"index\":");
    write_number(shown, out);
    if (request->is_chat) {
        write_message(choice, request->stream, out);
    } else {
        bd_strbuf_puts(out, ",\"text\":");
        write_text(first ? &prompt->echo : NULL, &choice->text, out);
    }
    bd_strbuf_puts(out, ",\"logprobs\":");
    if (request->logprobs >= 0 && request->is_chat)
        write_chat_logprobs(choice, out);
    else if (request->logprobs >= 0)
        bd_logprob_lists_write(first ? &prompt->lists : NULL, &choice->lists, out);
    else
        bd_strbuf_puts(out, "null");
    write_finish(completion, choice, out);
    if (request->return_token_ids) {
        bd_strbuf_puts(out, ",\"token_ids\":[");
        bd_strbuf_append(out, choice->token_ids.data, choice->token_ids.len_bytes);
        bd_strbuf_puts(out, "]");
        if (first) {
            bd_strbuf_puts(out, ",\"prompt_token_ids\":[");
            write_ids(&prompt->ids, out);
            bd_strbuf_puts(out, "]");
        }
    }
    if (request->prompt_logprobs >= 0 && first) {
        bd_strbuf_puts(out, ",\"prompt_logprobs\":[");
        bd_strbuf_append(out, prompt->logprobs.data, prompt->logprobs.len_bytes);
        bd_strbuf_puts(out, "]");
    }
    bd_strbuf_puts(out, "}");
}

void bd_completion_write_event(bd_completion *completion, uint32_t index, bd_strbuf *out) {
    const bd_completion_request *request = &completion->request;
    const bd_choice *choice = &completion->choices[index];
    bd_strbuf_puts(out, "data: ");
    bd_strbuf_append(out, completion->head.data, completion->head.len_bytes);
    write_choice(completion, index, index, !choice->event_sent, out);
    bd_strbuf_puts(out, "]");
    if (request->continuous_usage) {
        bd_strbuf_puts(out, ",\"usage\":");
        write_usage(completion->prompts[index / completion->width].ids.count, choice->generated,
                    out);
    } else if (request->include_usage) {
        bd_strbuf_puts(out, ",\"usage\":null");
    }
    bd_strbuf_puts(out, "}\n\n");
}

void bd_completion_write_role_event(const bd_completion *completion, uint32_t index,
                                    bd_strbuf *out) {
    const bd_completion_request *request = &completion->request;
    bd_strbuf_puts(out, "data: ");
    bd_strbuf_append(out, completion->head.data, completion->head.len_bytes);
    bd_strbuf_printf(out,
                     "{\"index\":%" PRIu32
                     ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                     "\"finish_reason\":null}]",
                     index);
    if (request->continuous_usage) {
        bd_strbuf_puts(out, ",\"usage\":");
        write_usage(completion->prompts[index / completion->width].ids.count, 0, out);
    } else if (request->include_usage) {
        bd_strbuf_puts(out, ",\"usage\":null");
    }
    bd_strbuf_puts(out, "}\n\n");
}

void bd_completion_write_usage_event(bd_completion *completion, bd_strbuf *out) {
    bd_strbuf_puts(out, "data: ");
    bd_strbuf_append(out, completion->head.data, completion->head.len_bytes);
    bd_strbuf_puts(out, "],\"usage\":");
    write_usage(completion->prompt_tokens, completion->generated, out);
    bd_strbuf_puts(out, "}\n\n");
}

static double mean_logprob(const bd_choice *choice) {
    return choice->generated > 0 ? choice->logprob_sum / choice->generated : 0;
}

/* Of equals the one made first. */
static bool is_better(const bd_choice *choices, uint32_t left, uint32_t right) {
    const double a = mean_logprob(&choices[left]), b = mean_logprob(&choices[right]);
    return a > b || (!(a < b) && left < right);
}

/* The choice to show at place `shown`: of each prompt the n best of `width`, best first. */
static uint32_t choice_at(const bd_completion *completion, uint32_t shown) {
    const uint32_t n = (uint32_t)completion->request.n, width = completion->width;
    if (width == n) return shown;
    const uint32_t first = shown / n * width, rank = shown % n;
    for (uint32_t i = first; i < first + width; i++) {
        uint32_t better = 0;
        for (uint32_t j = first; j < first + width; j++)
            better += is_better(completion->choices, j, i);
        if (better == rank) return i;
    }
    return first;
}

void bd_completion_write_body(bd_completion *completion, bd_strbuf *out) {
    bd_strbuf_append(out, completion->head.data, completion->head.len_bytes);
    const uint32_t n = (uint32_t)completion->request.n;
    for (uint32_t i = 0; i < completion->request.prompt_count * n; i++) {
        if (i > 0) bd_strbuf_append(out, ",", 1);
        write_choice(completion, choice_at(completion, i), i, true, out);
    }
    bd_strbuf_puts(out, "],\"usage\":");
    write_usage(completion->prompt_tokens, completion->generated, out);
    bd_strbuf_puts(out, ",\"system_fingerprint\":\"");
    bd_strbuf_puts(out, completion->fingerprint);
    bd_strbuf_puts(out, "\"}");
}
