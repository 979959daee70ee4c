/* sequence.c - one sequence from add to its last reference: memory, lists, blocks, prefix keys. */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

static bool goes_before(const bd_sequence *a, const bd_sequence *b) {
    if (a->payer != b->payer) {
        double counter_a = bd_payer_counter(a), counter_b = bd_payer_counter(b);
        if (counter_a < counter_b || counter_b < counter_a) return counter_a < counter_b;
        if (!a->payer || !b->payer) return !a->payer;
        return a->payer->id < b->payer->id;
    }
    return a->priority != b->priority ? a->priority < b->priority : a->arrival < b->arrival;
}

void bd_list_insert(bd_sequence_list *list, bd_sequence *sequence) {
    bd_sequence *before = list->last; /* most arrive in order */
    while (before && goes_before(sequence, before))
        before = before->prev;
    sequence->prev = before;
    sequence->next = before ? before->next : list->first;
    if (before)
        before->next = sequence;
    else
        list->first = sequence;
    if (sequence->next)
        sequence->next->prev = sequence;
    else
        list->last = sequence;
    list->count++;
}

void bd_list_remove(bd_sequence_list *list, bd_sequence *sequence) {
    BD_ASSERT(list->count > 0);
    if (sequence->prev)
        sequence->prev->next = sequence->next;
    else
        list->first = sequence->next;
    if (sequence->next)
        sequence->next->prev = sequence->prev;
    else
        list->last = sequence->prev;
    sequence->prev = sequence->next = NULL;
    list->count--;
}

/* Merges runs of `width` sequences into runs of twice that. */
static bd_sequence *merge_runs(bd_sequence *left, uint32_t width, bool *sorted) {
    bd_sequence *head = NULL, **tail = &head;
    *sorted = true;
    while (left) {
        bd_sequence *right = left;
        uint32_t left_count = 0, right_count = width;
        while (right && left_count < width) {
            right = right->next;
            left_count++;
        }
        if (head) *sorted = false;
        while (left_count > 0 || (right_count > 0 && right)) {
            bool take_right =
                right_count > 0 && right && (left_count == 0 || goes_before(right, left));
            bd_sequence **from = take_right ? &right : &left;
            *tail = *from;
            *from = (*from)->next;
            tail = &(*tail)->next;
            if (take_right)
                right_count--;
            else
                left_count--;
        }
        left = right;
    }
    *tail = NULL;
    return head;
}

void bd_list_sort(bd_sequence_list *list) {
    bool sorted = true;
    for (const bd_sequence *s = list->first; s && s->next && sorted; s = s->next)
        sorted = !goes_before(s->next, s);
    if (sorted) return;
    for (uint32_t width = 1; !sorted; width *= 2)
        list->first = merge_runs(list->first, width, &sorted);
    list->last = NULL;
    for (bd_sequence *s = list->first; s; s = s->next) {
        s->prev = list->last;
        list->last = s;
    }
}

/* ---- The payer's account ---- */

static void promise(bd_engine *engine, bd_sequence *sequence, uint32_t tokens) {
    int64_t change = (int64_t)tokens - sequence->promised;
    sequence->promised = tokens;
    if (change != 0 && sequence->payer && engine->options.hooks.charge)
        engine->options.hooks.charge(engine->options.hooks.ctx, sequence->payer, change, 0, 0);
}

void bd_sequence_charge(bd_engine *engine, bd_sequence *sequence, uint32_t output_tokens) {
    uint32_t end =
        sequence->computed < sequence->prompt_count ? sequence->computed : sequence->prompt_count;
    uint32_t prompt_tokens = end > sequence->charged ? end - sequence->charged : 0;
    BD_ASSERT(prompt_tokens <= sequence->promised);
    sequence->charged += prompt_tokens;
    sequence->promised -= prompt_tokens;
    if (!sequence->payer || !engine->options.hooks.charge || prompt_tokens + output_tokens == 0)
        return;
    engine->options.hooks.charge(engine->options.hooks.ctx, sequence->payer,
                                 -(int64_t)prompt_tokens, prompt_tokens, output_tokens);
}

uint32_t bd_sequence_target(const bd_sequence *sequence) {
    /* Nothing is asked of the last prompt token when nothing is generated after it. */
    return sequence->max_new == 0 ? sequence->prompt_count - 1 : sequence->count;
}

bool bd_sequence_idle(const bd_sequence *sequence) {
    return sequence->max_new == 0 && sequence->scheduled == 0 &&
           (!sequence->prompt_wanted || sequence->prompt_next >= sequence->prompt_count);
}

uint32_t bd_blocks_for(const bd_engine *engine, uint32_t tokens) {
    return tokens / engine->block_tokens + (tokens % engine->block_tokens != 0);
}

/* ---- Groups ---- */

static uint32_t group_join(bd_engine *engine, const bd_lease *lease) {
    const bd_overlay *overlay = lease->overlay;
    if (!overlay) return BD_GROUP_BASE;
    uint32_t unused = BD_GROUP_BASE;
    for (uint32_t i = 0; i < engine->group_count; i++) {
        bd_engine_group *group = &engine->groups[i];
        if (group->members > 0 && group->overlay == overlay) {
            group->members++;
            return i;
        }
        if (group->members == 0 && unused == BD_GROUP_BASE) unused = i;
    }
    BD_ASSERT(unused != BD_GROUP_BASE);
    /* As if just served: a variant that comes and goes does not overtake those that wait. */
    engine->groups[unused] = (bd_engine_group){
        .overlay = overlay,
        .load = lease->load,
        .members = 1,
        .served_step = atomic_load_explicit(&engine->stat_steps, memory_order_relaxed),
    };
    return unused;
}

static void group_leave(bd_engine *engine, uint32_t index) {
    if (index == BD_GROUP_BASE) return;
    BD_ASSERT(engine->groups[index].members > 0);
    engine->groups[index].members--;
}

/* ---- Prefix keys ---- */

/* Everything but the tokens that decides what a block of KV holds. */
static bd_kv_key identity_of(const bd_engine *engine, const bd_sequence_options *options) {
    struct {
        uint8_t digest[32];
        uint64_t tenant;
        uint32_t has_overlay, rope_table, window_tokens, decode_delta;
    } id;
    memset(&id, 0, sizeof id);
    id.tenant = options->tenant;
    id.decode_delta = engine->options.decode_delta ? 1 : 0;
    const bd_overlay *overlay = options->lease.overlay;
    if (overlay) {
        memcpy(id.digest, overlay->digest, sizeof id.digest);
        id.has_overlay = 1;
        id.rope_table = overlay->rope_table;
        id.window_tokens = overlay->window_tokens;
    }
    return bd_kv_hash(engine->secret, &id, sizeof id);
}

static bd_kv_key chain_key(const bd_engine *engine, bd_kv_key parent, const int32_t *tokens) {
    bd_kv_key parts[2] = {
        parent, bd_kv_hash(engine->secret, tokens, engine->block_tokens * sizeof *tokens)};
    return bd_kv_hash(engine->secret, parts, sizeof parts);
}

/* A variant with added vocabulary keeps its delta: the base has no rows for its tokens. */
bool bd_sequence_ends_with_base(const bd_engine *engine, const bd_sequence *sequence) {
    return !engine->options.decode_delta && sequence->group != BD_GROUP_BASE &&
           engine->groups[sequence->group].overlay->extra_rows == 0;
}

/* Tokens that the base wrote after a variant's prefill are not what the key promises. */
static uint32_t publishable_tokens(const bd_engine *engine, const bd_sequence *sequence) {
    bool pure = !bd_sequence_ends_with_base(engine, sequence);
    uint32_t tokens = sequence->computed;
    return pure || tokens < sequence->prompt_count ? tokens : sequence->prompt_count;
}

void bd_sequence_publish(bd_engine *engine, bd_sequence *sequence) {
    if (!sequence->publishes) return;
    uint32_t full = publishable_tokens(engine, sequence) / engine->block_tokens;
    for (; sequence->chained_blocks < full; sequence->chained_blocks++) {
        uint32_t at = sequence->chained_blocks;
        const int32_t *tokens = sequence->tokens + (size_t)at * engine->block_tokens;
        sequence->chain = chain_key(engine, sequence->chain, tokens);
        bd_kv_publish(engine->kv, sequence->blocks[at], sequence->chain);
    }
}

/* Takes the blocks of the longest known prefix; at least one token is left to compute. */
static void take_prefix(bd_engine *engine, bd_sequence *sequence) {
    sequence->chain = sequence->identity;
    sequence->chained_blocks = 0;
    /* A block found would skip rows whose log-probabilities are still to be reported. */
    bool reporting = sequence->prompt_wanted && sequence->prompt_next < sequence->prompt_count;
    if (!sequence->publishes || reporting) return;
    uint32_t known = bd_sequence_target(sequence) - 1;
    /* Of a sequence that goes on after a preemption, what the base wrote has no key: another's
     * prompt may hold the very same tokens, computed by the variant. */
    if (bd_sequence_ends_with_base(engine, sequence) && known > sequence->prompt_count)
        known = sequence->prompt_count;
    uint32_t limit = known / engine->block_tokens;
    while (sequence->block_count < limit) {
        const int32_t *tokens =
            sequence->tokens + (size_t)sequence->block_count * engine->block_tokens;
        bd_kv_key key = chain_key(engine, sequence->chain, tokens);
        if (!bd_kv_find(engine->kv, key, &sequence->blocks[sequence->block_count])) break;
        sequence->chain = key;
        sequence->block_count++;
    }
    sequence->chained_blocks = sequence->block_count;
    sequence->computed = sequence->block_count * engine->block_tokens;
}

/* ---- Blocks ---- */

void bd_sequence_drop_blocks(bd_engine *engine, bd_sequence *sequence) {
    /* From the end, so that a prefix is forgotten from its far end. */
    while (sequence->block_count > 0)
        bd_kv_release(engine->kv, sequence->blocks[--sequence->block_count]);
    sequence->computed = 0;
}

static void count_prefix(bd_engine *engine, uint32_t asked, uint32_t found) {
    bd_stat_add(&engine->stat_prefix_queries, asked);
    bd_stat_add(&engine->stat_prefix_hits, found);
    if (!engine->metrics.prefix_hits) return;
    bd_metric_add(engine->metrics.prefix_queries, asked);
    bd_metric_add(engine->metrics.prefix_hits, found);
}

/* What nobody computes nobody pays for. */
static void skip_charge(bd_engine *engine, bd_sequence *sequence, uint32_t found) {
    if (found > sequence->prompt_count) found = sequence->prompt_count;
    if (found <= sequence->charged) return;
    promise(engine, sequence, sequence->promised - (found - sequence->charged));
    sequence->charged = found;
}

bool bd_sequence_admit(bd_engine *engine, bd_sequence *sequence) {
    BD_ASSERT(sequence->block_count == 0);
    uint32_t need = bd_blocks_for(engine, bd_sequence_target(sequence));
    /* Room for those that run to grow, or the newcomer would be thrown out at once. */
    uint32_t running = engine->running.count;
    uint32_t headroom = running > 0 ? 1 + running / 4 : 0;
    take_prefix(engine, sequence);
    uint32_t cached_tokens = sequence->computed;
    if ((uint64_t)(need - sequence->block_count) + headroom > bd_kv_free_count(engine->kv)) {
        bd_sequence_drop_blocks(engine, sequence);
        return false;
    }
    while (sequence->block_count < need) {
        bool got = bd_kv_acquire(engine->kv, &sequence->blocks[sequence->block_count]);
        BD_ASSERT(got);
        sequence->block_count++;
    }
    if (sequence->publishes) count_prefix(engine, bd_sequence_target(sequence), cached_tokens);
    skip_charge(engine, sequence, cached_tokens);
    return true;
}

/* ---- Life ---- */

static bd_status allocate(bd_engine *engine, const bd_sequence_options *options,
                          bd_sequence *sequence, bd_error *err) {
    uint32_t capacity = options->prompt_tokens + options->max_new_tokens;
    uint32_t blocks = bd_blocks_for(engine, capacity);
    sequence->arena = bd_arena_create(1024, SIZE_MAX);
    if (!sequence->arena) goto fail;
    sequence->tokens = bd_arena_alloc(sequence->arena, capacity, sizeof *sequence->tokens);
    sequence->blocks = bd_arena_alloc(sequence->arena, blocks, sizeof *sequence->blocks);
    sequence->stop_ids = bd_arena_alloc(sequence->arena, (size_t)options->stop_id_count + 1,
                                        sizeof *sequence->stop_ids);
    if (!sequence->tokens || !sequence->blocks || !sequence->stop_ids) goto fail;
    memcpy(sequence->tokens, options->prompt, options->prompt_tokens * sizeof *sequence->tokens);
    if (options->stop_id_count > 0)
        memcpy(sequence->stop_ids, options->stop_ids,
               options->stop_id_count * sizeof *sequence->stop_ids);
    return bd_edits_init(&sequence->edits, sequence->arena, options, err);
fail:
    return bd_fail(err, BD_E_MEMORY, "sequence", "out of memory for a sequence of %u tokens",
                   capacity);
}

static bd_status check(const bd_engine *engine, const bd_sequence_options *options, bd_error *err) {
    if (options->prompt_tokens == 0 || !options->sink)
        return bd_fail(err, BD_E_ARGUMENT, "sequence", "a sequence needs a prompt and a sink");
    uint64_t tokens = (uint64_t)options->prompt_tokens + options->max_new_tokens;
    if (tokens > engine->max_model_len)
        return bd_fail(err, BD_E_LIMIT, "sequence",
                       "%llu tokens of prompt and output are more than the context of %u",
                       (unsigned long long)tokens, engine->max_model_len);
    /* The last token needs no KV. */
    uint32_t blocks = bd_blocks_for(engine, (uint32_t)tokens - 1);
    if (blocks > bd_kv_total(engine->kv))
        return bd_fail(err, BD_E_LIMIT, "KV cache",
                       "the sequence needs %u blocks of %u tokens, there are %u", blocks,
                       engine->block_tokens, bd_kv_total(engine->kv));
    return BD_OK;
}

static uint8_t top_count(int32_t wanted) {
    if (wanted <= 0) return 0;
    return (uint8_t)(wanted < BD_TOP_MAX ? wanted : BD_TOP_MAX);
}

static bd_sequence *create(bd_engine *engine, const bd_sequence_options *options, bd_error *err) {
    bd_sequence *sequence = calloc(1, sizeof *sequence);
    if (!sequence) {
        (void)bd_fail(err, BD_E_MEMORY, "sequence", "out of memory for a sequence");
        return NULL;
    }
    *sequence = (bd_sequence){
        .arrival = engine->arrivals,
        .priority = options->priority,
        .payer = options->payer,
        .lease = options->lease,
        .sink = options->sink,
        .sink_ctx = options->sink_ctx,
        .prompt_count = options->prompt_tokens,
        .count = options->prompt_tokens,
        .max_new = options->max_new_tokens,
        .min_new = options->min_new_tokens,
        .stop_id_count = options->stop_id_count,
        .sampling = options->sampling,
        .top_count = top_count(options->logprobs),
        .prompt_top_count = top_count(options->prompt_logprobs),
        .prompt_wanted = options->prompt_logprobs >= 0,
        .prompt_next = 1,
        .publishes = engine->options.prefix_cache,
        .stop_id = -1,
    };
    if (allocate(engine, options, sequence, err) != BD_OK) {
        bd_arena_destroy(sequence->arena);
        free(sequence);
        return NULL;
    }
    sequence->identity = identity_of(engine, options);
    sequence->group = group_join(engine, &options->lease);
    engine->arrivals++;
    return sequence;
}

/* Who waits for KV is passed by nobody but those with a claim on it that is better for sure. */
static bool may_add(const bd_engine *engine, const bd_payer *payer) {
    if (engine->running.count + engine->waiting.count >= engine->cap) return false;
    for (const bd_sequence *s = engine->waiting.first; s; s = s->next)
        if (s->payer == payer || bd_payer_counter(s) <= (payer ? payer->counter : 0.0))
            return false;
    return true;
}

bd_status bd_engine_add(bd_engine *engine, const bd_sequence_options *options, bd_sequence **out,
                        bd_error *err) {
    *out = NULL;
    if (engine->closed) {
        if (err) *err = engine->closed_error;
        return engine->closed_error.status;
    }
    bd_error unused;
    if (!err) err = &unused;
    bd_status status = check(engine, options, err);
    if (status != BD_OK) return status;
    if (!may_add(engine, options->payer)) return BD_BUSY;
    bd_sequence *sequence = create(engine, options, err);
    if (!sequence) return err->status;
    bool idle = bd_sequence_idle(sequence);
    if (!idle) {
        uint32_t target = bd_sequence_target(sequence);
        promise(engine, sequence,
                target < sequence->prompt_count ? target : sequence->prompt_count);
    }
    bool runs = idle || bd_sequence_admit(engine, sequence);
    sequence->state = runs ? BD_SEQ_RUNNING : BD_SEQ_WAITING;
    bd_list_insert(runs ? &engine->running : &engine->waiting, sequence);
    if (idle) engine->reap_wanted = true;
    *out = sequence;
    return BD_OK;
}

void bd_engine_cancel(bd_engine *engine, bd_sequence *sequence) {
    BD_ASSERT(!sequence->ended);
    if (sequence->cancelled) return;
    sequence->cancelled = true;
    engine->reap_wanted = true;
    bd_engine_wake(engine);
}

void bd_sequence_over(bd_engine *engine, bd_sequence *sequence, bd_finish finish, int32_t stop_id) {
    BD_ASSERT(sequence->state != BD_SEQ_OVER);
    promise(engine, sequence, 0);
    bd_list_remove(sequence->state == BD_SEQ_WAITING ? &engine->waiting : &engine->running,
                   sequence);
    sequence->state = BD_SEQ_OVER;
    sequence->finish = finish;
    sequence->stop_id = stop_id;
    engine->over_count++;
    if (sequence->scheduled == 0) bd_sequence_drop_blocks(engine, sequence);
}

void bd_sequence_end(bd_engine *engine, bd_sequence *sequence, const bd_error *err) {
    BD_ASSERT(sequence->state == BD_SEQ_OVER);
    BD_ASSERT(!sequence->ended);
    sequence->ended = true;
    if (sequence->sink->end)
        sequence->sink->end(sequence->sink_ctx, sequence->finish, sequence->stop_id,
                            sequence->finish == BD_FINISH_ERROR ? err : NULL);
    bd_sequence_settle(engine, sequence);
}

void bd_sequence_settle(bd_engine *engine, bd_sequence *sequence) {
    if (sequence->state != BD_SEQ_OVER || !sequence->ended) return;
    if (sequence->scheduled > 0 || sequence->undelivered) return;
    bd_sequence_drop_blocks(engine, sequence);
    /* Only now: no step that reads the variant's pages for this sequence is left. */
    if (sequence->lease.variant && engine->options.cache)
        bd_cache_release(engine->options.cache, &sequence->lease, bd_now_us());
    group_leave(engine, sequence->group);
    BD_ASSERT(engine->over_count > 0);
    engine->over_count--;
    bd_arena_destroy(sequence->arena);
    free(sequence);
}
