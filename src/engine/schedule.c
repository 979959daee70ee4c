/* schedule.c - what runs in the next step: which variants, which sequences, how many rows of each;
 * and who has to give up its KV when none is left. bd-sched only, while no step runs, so every
 * block may be moved. */
#include <string.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

/* The overlay a sequence's next rows go through: without decode_delta the base continues after the
 * prompt. */
static uint32_t group_now(const bd_engine *engine, const bd_sequence *sequence) {
    bool base = bd_sequence_ends_with_base(engine, sequence) &&
                sequence->computed >= sequence->prompt_count;
    return base ? BD_GROUP_BASE : sequence->group;
}

static uint32_t rows_wanted(const bd_sequence *sequence) {
    uint32_t target = bd_sequence_target(sequence);
    return target > sequence->computed ? target - sequence->computed : 0;
}

static bool decodes(const bd_sequence *sequence) {
    return sequence->count > sequence->prompt_count && rows_wanted(sequence) == 1;
}

static bool runnable(const bd_sequence *sequence) {
    return !sequence->cancelled && !bd_sequence_idle(sequence) && rows_wanted(sequence) > 0;
}

void bd_engine_admit(bd_engine *engine) {
    /* Strictly in order: a long prompt at the head is not passed over for ever. */
    bd_list_sort(&engine->waiting);
    while (engine->waiting.first && engine->running.count < engine->cap) {
        bd_sequence *sequence = engine->waiting.first;
        if (!bd_sequence_admit(engine, sequence)) return;
        bd_list_remove(&engine->waiting, sequence);
        sequence->state = BD_SEQ_RUNNING;
        bd_list_insert(&engine->running, sequence);
    }
}

/* ---- Variants of the step ---- */

static uint32_t smaller(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* Marks groups with work; those still loading only if the step can be expected to find their
 * layers. */
static void want_groups(bd_engine *engine) {
    const uint32_t max = engine->options.rows_max;
    uint32_t rows = 0; /* of those that need not wait for a load */
    bool loading = false;
    for (uint32_t i = 0; i < engine->group_count; i++) {
        engine->groups[i].wanted = engine->groups[i].chosen = false;
        engine->groups[i].rows = engine->groups[i].claims = 0;
    }
    for (const bd_sequence *s = engine->running.first; s; s = s->next) {
        if (!runnable(s)) continue;
        const uint32_t index = group_now(engine, s);
        bd_engine_group *group = index == BD_GROUP_BASE ? NULL : &engine->groups[index];
        const bool loads = group && group->load;
        uint32_t *sum = loads ? &group->rows : &rows;
        const uint32_t chunk = smaller(rows_wanted(s), engine->options.prefill_chunk_tokens);
        *sum = smaller(*sum + smaller(chunk, max), max);
        loading = loading || loads;
        if (group && !loads) group->wanted = true;
        if (group && (group->claims++ == 0 || bd_payer_counter(s) < group->counter))
            group->counter = bd_payer_counter(s);
    }
    if (loading) bd_engine_want_loading(engine, rows, bd_now_us());
}

static bool group_before(const bd_engine_group *a, const bd_engine_group *b) {
    if (a->counter < b->counter || b->counter < a->counter) return a->counter < b->counter;
    return a->served_step < b->served_step;
}

/* At most variants_per_step_max of those with work: those that the least served payers need, among
 * these the longest unserved first, a rotation. */
static void choose_groups(bd_engine *engine) {
    want_groups(engine);
    for (uint32_t n = 0; n < engine->options.variants_per_step_max; n++) {
        bd_engine_group *best = NULL;
        for (uint32_t i = 0; i < engine->group_count; i++) {
            bd_engine_group *group = &engine->groups[i];
            if (!group->wanted || group->chosen) continue;
            if (!best || group_before(group, best)) best = group;
        }
        if (!best) return;
        best->chosen = true;
    }
}

static bool chosen(const bd_engine *engine, const bd_sequence *sequence) {
    uint32_t group = group_now(engine, sequence);
    return group == BD_GROUP_BASE || engine->groups[group].chosen;
}

/* ---- Blocks for decoding ---- */

static void preempt(bd_engine *engine, bd_sequence *sequence) {
    BD_ASSERT(sequence->scheduled == 0);
    bd_list_remove(&engine->running, sequence);
    bd_sequence_drop_blocks(engine, sequence);
    sequence->state = BD_SEQ_WAITING;
    bd_list_insert(&engine->waiting, sequence);
    bd_stat_add(&engine->stat_preemptions, 1);
    if (engine->metrics.preemptions) bd_metric_add(engine->metrics.preemptions, 1.0);
}

/* A block for the next token. Those of least claim give way, from the end of the list; false: that
 * was the sequence itself. */
static bool grow(bd_engine *engine, bd_sequence *sequence) {
    uint32_t need = bd_blocks_for(engine, sequence->computed + 1);
    if (need <= sequence->block_count) return true;
    while (!bd_kv_acquire(engine->kv, &sequence->blocks[sequence->block_count])) {
        bd_sequence *victim = engine->running.last;
        BD_ASSERT(victim);
        preempt(engine, victim);
        if (victim == sequence) return false;
    }
    sequence->block_count++;
    return true;
}

/* ---- Rows ---- */

typedef struct budget {
    uint32_t rows, logits, picks;
    uint32_t chunk; /* rows of one prompt that does not end in the step */
} budget;

static uint32_t *picked_rows(bd_engine *engine, uint32_t group) {
    return group == BD_GROUP_BASE ? &engine->base_picked_rows : &engine->groups[group].picked_rows;
}

/* Logits rows that the next n rows of a sequence need. Row p tells of prompt token p + 1. */
static uint32_t logits_needed(const bd_sequence *sequence, uint32_t n) {
    uint32_t end = sequence->computed + n;
    uint32_t needed = sequence->max_new > 0 && end == sequence->count ? 1 : 0;
    if (!sequence->prompt_wanted) return needed;
    uint32_t from = sequence->prompt_next - 1;
    if (from < sequence->computed) from = sequence->computed;
    uint32_t to = end < sequence->prompt_count ? end : sequence->prompt_count - 1;
    return to > from ? needed + (to - from) : needed;
}

/* The backend computes rows of one variant in tiles: those that would begin another and not fill
 * half of it are left for the next step, where `rows` come on top of `before`. */
static uint32_t whole_tiles(const bd_engine *engine, uint32_t before, uint32_t rows) {
    const uint32_t tile = engine->options.tile_rows, rest = tile ? (before + rows) % tile : 0;
    return rest < tile / 2 && rest < rows ? rows - rest : rows;
}

static uint32_t chunk_rows(bd_engine *engine, const bd_sequence *sequence, const budget *left) {
    uint32_t n = rows_wanted(sequence);
    if (n > left->rows) {
        n = smaller(left->rows, left->chunk);
        n = whole_tiles(engine, *picked_rows(engine, group_now(engine, sequence)), n);
    }
    /* A chunk has one overlay: it ends where the base takes over. */
    if (bd_sequence_ends_with_base(engine, sequence) &&
        sequence->computed < sequence->prompt_count &&
        n > sequence->prompt_count - sequence->computed)
        n = sequence->prompt_count - sequence->computed;
    /* A row needs one at most. */
    for (uint32_t needed; (needed = logits_needed(sequence, n)) > left->logits;)
        n -= needed - left->logits;
    return n;
}

static void pick(bd_engine *engine, bd_sequence *sequence, uint32_t rows, budget *left) {
    uint32_t logits = logits_needed(sequence, rows);
    BD_ASSERT(rows <= left->rows && logits <= left->logits);
    const uint32_t group = group_now(engine, sequence);
    engine->picks[left->picks++] = (bd_pick){sequence, group, rows};
    *picked_rows(engine, group) += rows;
    sequence->scheduled = rows;
    left->rows -= rows;
    left->logits -= logits;
}

static bool prefills(const bd_engine *engine, const bd_sequence *sequence) {
    return !decodes(sequence) && runnable(sequence) && chosen(engine, sequence) &&
           sequence->scheduled == 0;
}

/* So often a prompt is passed by others behind it or left out as a splinter, in all, whoever they
 * are; then claims alone count. */
#define PASSED_MAX 8u

/* What is left of the step is less than the sequence would have of an empty one, and than an eighth
 * of a step. */
static bool splinter(bd_engine *engine, const bd_sequence *sequence, uint32_t fits) {
    const budget all = {engine->options.rows_max, engine->options.logits_rows_max, 0,
                        engine->options.prefill_chunk_tokens};
    return fits < engine->options.rows_max / 8 && fits < chunk_rows(engine, sequence, &all);
}

/* What is left of the step is a splinter that would have a tile of its own. */
static bool wasted(bd_engine *engine, const bd_sequence *sequence, uint32_t fits) {
    const uint32_t tile = engine->options.tile_rows;
    const uint32_t room =
        tile ? tile - *picked_rows(engine, group_now(engine, sequence)) % tile : 0;
    return room > 0 && (room == tile || fits > room) && splinter(engine, sequence, fits);
}

/* The prompts of `best` and of its variant's others, none beyond one that was passed enough. */
static void pick_company(bd_engine *engine, bd_sequence *best, budget *left) {
    const uint32_t group = group_now(engine, best);
    for (bd_sequence *s = best; s && left->rows > 0; s = s->next) {
        if (!prefills(engine, s)) continue;
        if (group_now(engine, s) == group) {
            const uint32_t rows = chunk_rows(engine, s, left);
            if (rows > 0 && (s == best || s->passed >= PASSED_MAX || !wasted(engine, s, rows)))
                pick(engine, s, rows, left);
        } else if (s->passed >= PASSED_MAX) {
            return;
        }
    }
}

static void count_passed(bd_engine *engine, const budget *left) {
    bool behind = left->rows > 0;
    for (bd_sequence *s = engine->running.last; s; s = s->prev) {
        if (s->scheduled > 0)
            behind = behind || !decodes(s);
        else if (behind && prefills(engine, s))
            s->passed++;
    }
}

/* What nobody else had of the step, to those of its prompts that do not end in it. */
static void share_rest(bd_engine *engine, uint32_t decoding, budget *left) {
    left->chunk = engine->options.rows_max;
    for (uint32_t i = decoding; i < left->picks && left->rows > 0; i++) {
        bd_pick *pick = &engine->picks[i];
        const uint32_t had = pick->rows;
        *picked_rows(engine, pick->group) -= had;
        left->rows += had;
        left->logits += logits_needed(pick->sequence, had);
        const uint32_t rows = chunk_rows(engine, pick->sequence, left);
        pick->rows = pick->sequence->scheduled = rows > had ? rows : had;
        *picked_rows(engine, pick->group) += pick->rows;
        left->rows -= pick->rows;
        left->logits -= logits_needed(pick->sequence, pick->rows);
    }
}

/* Prompts' rows, that of best claim first and with it those of its variant: rows of one variant
 * cost as much as the base's, those of each further variant more. What is left for a further one is
 * left alone where it is a splinter. */
static void choose_prompts(bd_engine *engine, budget *left) {
    const uint32_t decoding = left->picks;
    for (bd_sequence *best = engine->running.first; best && left->rows > 0; best = best->next) {
        if (!prefills(engine, best)) continue;
        const uint32_t fits = chunk_rows(engine, best, left);
        const bool further = left->picks > decoding && best->passed < PASSED_MAX;
        if (fits > 0 && !(further && splinter(engine, best, fits)))
            pick_company(engine, best, left);
    }
    if (left->picks == decoding) return;
    count_passed(engine, left);
    share_rest(engine, decoding, left);
}

static uint32_t choose_rows(bd_engine *engine) {
    budget left = {engine->options.rows_max, engine->options.logits_rows_max, 0,
                   engine->options.prefill_chunk_tokens};
    engine->base_picked_rows = 0;
    for (uint32_t g = 0; g < engine->group_count; g++)
        engine->groups[g].picked_rows = 0;
    /* Those of best claim first; whoever is preempted on the way comes later in the list, so it is
     * not picked yet. */
    bd_sequence *next;
    for (bd_sequence *s = engine->running.first; s; s = next) {
        bool ready = decodes(s) && runnable(s) && chosen(engine, s) && grow(engine, s);
        next = s->state == BD_SEQ_RUNNING ? s->next : NULL;
        if (ready) pick(engine, s, 1, &left);
    }
    choose_prompts(engine, &left);
    return left.picks;
}

/* ---- The step ---- */

static void add_logits_rows(bd_step_buffer *buffer, const bd_sequence *sequence,
                            uint32_t seq_index) {
    bd_step *step = &buffer->step;
    const bd_seq *seq = &buffer->seqs[seq_index];
    buffer->logits_first[seq_index] = step->logits_row_count;
    for (uint32_t i = 0; i < seq->row_count; i++) {
        uint32_t at = sequence->computed + i;
        bool reports = sequence->prompt_wanted && at + 1 >= sequence->prompt_next &&
                       at + 1 < sequence->prompt_count;
        bool samples = sequence->max_new > 0 && at + 1 == sequence->count;
        if (!reports && !samples) continue;
        bd_logits_row *row = &buffer->logits_rows[step->logits_row_count++];
        *row = (bd_logits_row){.row = seq->first_row + i, .seq = seq_index, .target = -1};
        row->top_count = reports ? sequence->prompt_top_count : sequence->top_count;
        if (reports) row->target = sequence->tokens[at + 1];
    }
}

static void add_sequence(bd_step_buffer *buffer, const bd_pick *pick, int32_t overlay) {
    bd_step *step = &buffer->step;
    bd_sequence *sequence = pick->sequence;
    uint32_t seq_index = step->seq_count++;
    buffer->sequences[seq_index] = sequence;
    buffer->overlay_of_seq[seq_index] = overlay;
    buffer->seqs[seq_index] = (bd_seq){
        .first_row = step->row_count,
        .row_count = pick->rows,
        .kv_before_tokens = sequence->computed,
        .kv_blocks = sequence->blocks,
        .sampling = sequence->sampling,
        .edit_count = sequence->edits.count,
        .edits = sequence->edits.edits,
    };
    memcpy(buffer->tokens + step->row_count, sequence->tokens + sequence->computed,
           pick->rows * sizeof *buffer->tokens);
    for (uint32_t i = 0; i < pick->rows; i++) {
        buffer->positions[step->row_count + i] = sequence->computed + i;
        buffer->seq_of_row[step->row_count + i] = seq_index;
    }
    add_logits_rows(buffer, sequence, seq_index);
    step->row_count += pick->rows;
}

/* All picks of one group, of which there are some, become one segment. */
static void add_segment(bd_engine *engine, bd_step_buffer *buffer, uint32_t group,
                        uint32_t pick_count) {
    bd_step *step = &buffer->step;
    uint32_t first_row = step->row_count;
    int32_t overlay = group == BD_GROUP_BASE ? -1 : (int32_t)step->overlay_count;
    for (uint32_t i = 0; i < pick_count; i++)
        if (engine->picks[i].group == group) add_sequence(buffer, &engine->picks[i], overlay);
    bd_segment *segment = &buffer->segments[step->segment_count++];
    *segment = (bd_segment){overlay, first_row, step->row_count - first_row};
    if (group == BD_GROUP_BASE) return;
    buffer->overlays[step->overlay_count++] = engine->groups[group].overlay;
    engine->groups[group].served_step = step->id;
}

/* Segments of many rows first: those of few then lie together, which a backend may make use of. */
static void add_segments(bd_engine *engine, bd_step_buffer *buffer, uint32_t pick_count) {
    for (;;) {
        uint32_t most = engine->base_picked_rows, next = BD_GROUP_BASE;
        for (uint32_t g = 0; g < engine->group_count; g++)
            if (engine->groups[g].picked_rows > most) most = engine->groups[next = g].picked_rows;
        if (most == 0) return;
        add_segment(engine, buffer, next, pick_count);
        *picked_rows(engine, next) = 0;
    }
}

bd_step_buffer *bd_engine_build(bd_engine *engine) {
    BD_ASSERT(!engine->in_flight);
    bd_engine_admit(engine);
    bd_list_sort(&engine->running);
    choose_groups(engine);
    uint32_t pick_count = choose_rows(engine);
    if (pick_count == 0) return NULL;
    bd_step_buffer *buffer = &engine->buffers[engine->next_buffer];
    BD_ASSERT(!buffer->pending);
    engine->next_buffer ^= 1u;
    bd_step *step = &buffer->step;
    bd_stat_add(&engine->stat_steps, 1);
    *step = (bd_step){
        .id = atomic_load_explicit(&engine->stat_steps, memory_order_relaxed),
        .tokens = buffer->tokens,
        .positions = buffer->positions,
        .seq_of_row = buffer->seq_of_row,
        .seqs = buffer->seqs,
        .segments = buffer->segments,
        .overlays = buffer->overlays,
        .logits_rows = buffer->logits_rows,
    };
    add_segments(engine, buffer, pick_count);
    buffer->logits_first[step->seq_count] = step->logits_row_count;
    BD_ASSERT(step->seq_count == pick_count);
    bd_gate_init(engine, buffer);
    return buffer;
}
