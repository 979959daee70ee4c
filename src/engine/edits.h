/* edits.h - what penalties, logit_bias and min_tokens do to one sequence's logits, as a sparse list
 * of distinct tokens kept up to date token by token. Owner: the sequence (bd-sched); the running
 * step reads the list, so it changes only between steps. Memory is taken from the sequence's arena
 * at init for all tokens that can ever occur. */
#ifndef BITDELTA_SRC_ENGINE_EDITS_H
#define BITDELTA_SRC_ENGINE_EDITS_H

#include "bitdelta/base/arena.h"
#include "bitdelta/engine/engine.h"

struct bd_edit_state;

typedef struct bd_edit_list {
    bd_logit_edit *edits; /* for the backend */
    struct bd_edit_state *states;
    uint32_t count, capacity;
    uint32_t *slots; /* token -> index + 1 */
    uint32_t slot_mask;
    float repetition, presence, frequency;
    bool penalties, stops_masked;
} bd_edit_list;

/* BD_E_MEMORY is the only fault. */
BD_MUST_CHECK bd_status bd_edits_init(bd_edit_list *list, bd_arena *arena,
                                      const bd_sequence_options *options, bd_error *err);
void bd_edits_generated(bd_edit_list *list, int32_t token); /* one more generated token */
void bd_edits_unmask_stops(bd_edit_list *list);             /* min_new_tokens reached */

#endif
