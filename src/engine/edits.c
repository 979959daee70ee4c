/* edits.c - one entry per token that has a bias, is a masked stop id, or was seen; found through an
 * open-addressed table that is never more than half full. */
#include "edits.h"

#include <math.h>

typedef struct bd_edit_state {
    float bias;
    uint32_t generated; /* times in the output */
    bool seen;          /* in prompt or output */
    bool stop;
} bd_edit_state;

static uint32_t slot_of(const bd_edit_list *list, int32_t token) {
    uint32_t slot = ((uint32_t)token * 2654435761u) & list->slot_mask;
    while (list->slots[slot] != 0 && list->edits[list->slots[slot] - 1].token != token)
        slot = (slot + 1) & list->slot_mask;
    return slot;
}

static uint32_t entry_of(bd_edit_list *list, int32_t token) {
    uint32_t slot = slot_of(list, token);
    if (list->slots[slot] == 0) {
        BD_ASSERT(list->count < list->capacity);
        list->edits[list->count] = (bd_logit_edit){.token = token, .repetition = 1.0f, .add = 0.0f};
        list->slots[slot] = ++list->count;
    }
    return list->slots[slot] - 1;
}

static void refresh(bd_edit_list *list, uint32_t index) {
    const bd_edit_state *state = &list->states[index];
    bd_logit_edit *edit = &list->edits[index];
    edit->repetition = state->seen ? list->repetition : 1.0f;
    edit->add = state->bias;
    if (state->generated > 0)
        edit->add -= list->presence + list->frequency * (float)state->generated;
    if (state->stop && list->stops_masked) edit->add = -INFINITY;
}

static void fill(bd_edit_list *list, const bd_sequence_options *options) {
    for (uint32_t i = 0; i < options->bias_count; i++) {
        uint32_t index = entry_of(list, options->bias[i].token);
        list->states[index].bias = options->bias[i].add;
        refresh(list, index);
    }
    for (uint32_t i = 0; list->stops_masked && i < options->stop_id_count; i++) {
        if (options->stop_ids[i] < 0) continue;
        uint32_t index = entry_of(list, options->stop_ids[i]);
        list->states[index].stop = true;
        refresh(list, index);
    }
    if (list->repetition == 1.0f) return;
    for (uint32_t i = 0; i < options->prompt_tokens; i++) {
        uint32_t index = entry_of(list, options->prompt[i]);
        list->states[index].seen = true;
        refresh(list, index);
    }
}

bd_status bd_edits_init(bd_edit_list *list, bd_arena *arena, const bd_sequence_options *options,
                        bd_error *err) {
    *list = (bd_edit_list){
        .repetition = options->repetition_penalty > 0.0f ? options->repetition_penalty : 1.0f,
        .presence = options->presence_penalty,
        .frequency = options->frequency_penalty,
        .stops_masked = options->min_new_tokens > 0 && options->stop_id_count > 0,
    };
    list->penalties = list->repetition != 1.0f || list->presence != 0.0f || list->frequency != 0.0f;
    uint64_t capacity = options->bias_count;
    if (list->stops_masked) capacity += options->stop_id_count;
    if (list->repetition != 1.0f) capacity += options->prompt_tokens;
    if (list->penalties) capacity += options->max_new_tokens;
    if (capacity == 0) return BD_OK;
    uint64_t slot_count = 16;
    while (slot_count < 2 * capacity)
        slot_count *= 2;
    if (slot_count > UINT32_MAX)
        return bd_fail(err, BD_E_LIMIT, "penalties", "too many tokens to keep count of");
    list->capacity = (uint32_t)capacity;
    list->slot_mask = (uint32_t)slot_count - 1;
    list->edits = bd_arena_alloc(arena, (size_t)capacity, sizeof *list->edits);
    list->states = bd_arena_alloc(arena, (size_t)capacity, sizeof *list->states);
    list->slots = bd_arena_alloc(arena, (size_t)slot_count, sizeof *list->slots);
    if (!list->edits || !list->states || !list->slots)
        return bd_fail(err, BD_E_MEMORY, "penalties", "out of memory for %llu logit edits",
                       (unsigned long long)capacity);
    fill(list, options);
    return BD_OK;
}

void bd_edits_generated(bd_edit_list *list, int32_t token) {
    if (!list->penalties) return;
    uint32_t index = entry_of(list, token);
    list->states[index].seen = true;
    list->states[index].generated++;
    refresh(list, index);
}

void bd_edits_unmask_stops(bd_edit_list *list) {
    if (!list->stops_masked) return;
    list->stops_masked = false;
    for (uint32_t i = 0; i < list->count; i++)
        if (list->states[i].stop) refresh(list, i);
}
