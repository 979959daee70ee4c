/* collect.c - what a finished step means for its sequences, in two halves. Collect does what the
 * next step depends on: tokens appended, ends found, blocks freed. Deliver tells the sinks, while
 * the next step runs already. */
#include "internal.h"

static bd_status result_fault(const bd_step_buffer *buffer, uint32_t seq_index) {
    for (uint32_t i = buffer->logits_first[seq_index]; i < buffer->logits_first[seq_index + 1]; i++)
        if (buffer->results[i].fault) return BD_E_INTERNAL;
    return BD_OK;
}

static bool is_stop(const bd_sequence *sequence, int32_t token) {
    for (uint32_t i = 0; i < sequence->stop_id_count; i++)
        if (sequence->stop_ids[i] == token) return true;
    return false;
}

static void append(bd_engine *engine, bd_sequence *sequence, int32_t token) {
    sequence->tokens[sequence->count++] = token;
    bd_edits_generated(&sequence->edits, token);
    bd_stat_add(&engine->stat_generated, 1);
    bd_sequence_charge(engine, sequence, 1);
    uint32_t generated = sequence->count - sequence->prompt_count;
    if (generated == sequence->min_new) bd_edits_unmask_stops(&sequence->edits);
    if (generated > sequence->min_new && is_stop(sequence, token))
        bd_sequence_over(engine, sequence, BD_FINISH_STOP, token);
    else if (generated == sequence->max_new)
        bd_sequence_over(engine, sequence, BD_FINISH_LENGTH, -1);
}

/* The step gave results for the sequence. */
static void advance(bd_engine *engine, bd_step_buffer *buffer, uint32_t seq_index, uint32_t rows) {
    bd_sequence *sequence = buffer->sequences[seq_index];
    uint32_t prompt_before = sequence->computed;
    sequence->computed += rows;
    if (prompt_before < sequence->prompt_count) {
        uint32_t end = sequence->computed < sequence->prompt_count ? sequence->computed
                                                                   : sequence->prompt_count;
        bd_stat_add(&engine->stat_prompt, end - prompt_before);
        bd_sequence_charge(engine, sequence, 0);
    }
    if (result_fault(buffer, seq_index) != BD_OK) {
        bd_sequence_over(engine, sequence, BD_FINISH_ERROR, -1);
        return;
    }
    bd_sequence_publish(engine, sequence);
    for (uint32_t i = buffer->logits_first[seq_index]; i < buffer->logits_first[seq_index + 1];
         i++) {
        if (buffer->logits_rows[i].target >= 0)
            sequence->prompt_next++;
        else
            append(engine, sequence, buffer->results[i].id);
    }
    if (sequence->state == BD_SEQ_RUNNING && bd_sequence_idle(sequence))
        bd_sequence_over(engine, sequence, BD_FINISH_LENGTH, -1);
}

static void set_fault(bd_step_buffer *buffer, bd_status status, const bd_error *err) {
    if (status == BD_OK)
        (void)bd_fail(&buffer->fault, BD_E_INTERNAL, "logits",
                      "the model's output is not a number");
    else if (err->status == status)
        buffer->fault = *err;
    else
        (void)bd_fail(&buffer->fault, status, "step", "the step failed: %s",
                      bd_status_text(status));
}

void bd_engine_collect(bd_engine *engine, bd_step_buffer *buffer, bd_status status,
                       const bd_error *err) {
    BD_ASSERT(!buffer->pending);
    buffer->pending = true;
    set_fault(buffer, status, err);
    if (status == BD_OK) bd_gate_learn(engine, buffer);
    for (uint32_t i = 0; i < buffer->step.seq_count; i++) {
        bd_sequence *sequence = buffer->sequences[i];
        uint32_t rows = sequence->scheduled;
        sequence->scheduled = 0;
        if (sequence->ended) { /* while the step ran: nobody wants these rows */
            buffer->sequences[i] = NULL;
            bd_sequence_settle(engine, sequence);
            continue;
        }
        if (status == BD_OK && bd_gate_voided(buffer, i)) {
            buffer->sequences[i] = NULL; /* as if it had not been in the step */
            continue;
        }
        sequence->undelivered = true;
        if (status == BD_OK)
            advance(engine, buffer, i, rows);
        else
            bd_sequence_over(engine, sequence, BD_FINISH_ERROR, -1);
    }
}

/* The prompt's part of the results, then at most one token. true: the sink wants no more. */
static bool hand_over(const bd_step_buffer *buffer, uint32_t seq_index, bd_sequence *sequence) {
    uint32_t first = buffer->logits_first[seq_index], end = buffer->logits_first[seq_index + 1];
    uint32_t prompt = first;
    while (prompt < end && buffer->logits_rows[prompt].target >= 0)
        prompt++;
    if (prompt > first && sequence->sink->prompt) {
        uint32_t position = buffer->step.positions[buffer->logits_rows[first].row] + 1;
        sequence->sink->prompt(sequence->sink_ctx, position, buffer->results + first,
                               prompt - first);
    }
    if (prompt == end || !sequence->sink->token) return false;
    return !sequence->sink->token(sequence->sink_ctx, &buffer->results[prompt]);
}

static void deliver_one(bd_engine *engine, bd_step_buffer *buffer, uint32_t seq_index) {
    bd_sequence *sequence = buffer->sequences[seq_index];
    if (!sequence) return;
    bool failed = sequence->state == BD_SEQ_OVER && sequence->finish == BD_FINISH_ERROR;
    bool enough = false;
    if (!failed && !sequence->cancelled) enough = hand_over(buffer, seq_index, sequence);
    sequence->undelivered = false;
    if (!failed && sequence->cancelled) {
        if (sequence->state != BD_SEQ_OVER)
            bd_sequence_over(engine, sequence, BD_FINISH_CANCELLED, -1);
        sequence->finish = BD_FINISH_CANCELLED;
        sequence->stop_id = -1;
    } else if (enough) {
        if (sequence->state != BD_SEQ_OVER) bd_sequence_over(engine, sequence, BD_FINISH_STOP, -1);
        sequence->finish = BD_FINISH_STOP; /* a stop id found before keeps its place */
    }
    if (sequence->state == BD_SEQ_OVER) bd_sequence_end(engine, sequence, &buffer->fault);
}

void bd_engine_deliver(bd_engine *engine, bd_step_buffer *buffer) {
    if (!buffer->pending) return;
    for (uint32_t i = 0; i < buffer->step.seq_count; i++)
        deliver_one(engine, buffer, i);
    buffer->pending = false;
}

static void reap_list(bd_engine *engine, bd_sequence_list *list) {
    bd_sequence *next;
    for (bd_sequence *s = list->first; s; s = next) {
        next = s->next;
        BD_ASSERT(!s->undelivered);
        bool idle = bd_sequence_idle(s);
        if (!s->cancelled && !idle) continue;
        bd_sequence_over(engine, s, s->cancelled ? BD_FINISH_CANCELLED : BD_FINISH_LENGTH, -1);
        bd_sequence_end(engine, s, NULL);
    }
}

bool bd_engine_reap(bd_engine *engine) {
    const bool wanted = engine->reap_wanted;
    /* A sink's end() may cancel others: once more then. */
    while (engine->reap_wanted) {
        engine->reap_wanted = false;
        reap_list(engine, &engine->running);
        reap_list(engine, &engine->waiting);
    }
    return wanted;
}

void bd_engine_end_all(bd_engine *engine, const bd_error *err) {
    bd_sequence_list *lists[2] = {&engine->running, &engine->waiting};
    for (uint32_t i = 0; i < 2; i++) {
        while (lists[i]->first) {
            bd_sequence *sequence = lists[i]->first;
            BD_ASSERT(!sequence->undelivered);
            bd_sequence_over(engine, sequence, BD_FINISH_ERROR, -1);
            bd_sequence_end(engine, sequence, err);
        }
    }
    engine->reap_wanted = false;
}
