/* fake_engine.c - the functions of engine.h without a model, for fuzz targets and benchmarks of
 * what is in front of it: linked before the engine's own, it takes their place. Tokens cost
 * nothing. Without BD_FAKE_STEP_US in the environment calls run on the thread that posts them, one
 * at a time, and a sequence ends after a few tokens; with it bd-sched runs them, every sequence
 * gets a token each so many microseconds (0: as soon as it can), always the same one, and all it
 * asks for. Threads: as engine.h. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/engine/engine.h"

enum { FEW_TOKENS = 6, PACED_TOKEN = 300 };

struct bd_sequence {
    bd_sequence *next;
    const bd_sequence_sink *sink;
    void *sink_ctx;
    bd_lease lease;
    uint32_t prompt_tokens, max_new, generated;
    int32_t stop_id, prompt_logprobs, logprobs;
    bool cancelled;
};

struct bd_engine {
    bd_engine_options options;
    bd_mailbox *inbox;
    pthread_mutex_t lock; /* its holder is bd-sched */
    _Atomic int32_t owner;
    bool helped;
    uint64_t sleep_until_us;
    pthread_t thread;
    bool paced, started;
    _Atomic bool stopping;
    _Atomic bool quiet; /* calls came without a wake */
    uint64_t step_us, next_step_us, random;
    bd_sequence *first, **last;
    _Atomic uint32_t count;
    _Atomic uint64_t generated;
};

/* ---- Sequences ---- */

static bd_token_result make_token(bd_engine *engine, int32_t id, int32_t logprobs) {
    bd_token_result token = {.id = id, .logprob = -0.5f, .rank = 1};
    for (int32_t i = 0; i < logprobs && i < BD_TOP_MAX; i++) {
        token.top_ids[token.top_count] = i;
        token.top_logprobs[token.top_count++] = -0.5f - (float)i;
    }
    engine->random = engine->random * 6364136223846793005u + 1442695040888963407u;
    return token;
}

static int32_t next_id(const bd_engine *engine, const bd_sequence *sequence) {
    if (engine->paced) return PACED_TOKEN;
    if (sequence->generated + 1 == FEW_TOKENS && sequence->stop_id >= 0) return sequence->stop_id;
    return (int32_t)(engine->random >> 33) % 4096;
}

static void report_prompt(bd_engine *engine, const bd_sequence *sequence) {
    if (sequence->prompt_logprobs < 0 || !sequence->sink->prompt) return;
    for (uint32_t i = 1; i < sequence->prompt_tokens; i++) {
        bd_token_result token = make_token(engine, 7, sequence->prompt_logprobs);
        sequence->sink->prompt(sequence->sink_ctx, i, &token, 1);
    }
}

/* The next token; true: that was the last. */
static bool advance(bd_engine *engine, bd_sequence *sequence, bd_finish *finish, int32_t *stop_id) {
    *finish = BD_FINISH_LENGTH;
    *stop_id = -1;
    if (sequence->cancelled) {
        *finish = BD_FINISH_CANCELLED;
        return true;
    }
    if (sequence->generated == 0) report_prompt(engine, sequence);
    if (sequence->generated == sequence->max_new) return true;
    bd_token_result token = make_token(engine, next_id(engine, sequence), sequence->logprobs);
    bool goes_on = sequence->sink->token(sequence->sink_ctx, &token);
    sequence->generated++;
    atomic_fetch_add(&engine->generated, 1);
    if (!goes_on || token.id == sequence->stop_id) {
        *finish = sequence->cancelled ? BD_FINISH_CANCELLED : BD_FINISH_STOP;
        *stop_id = goes_on ? token.id : -1;
        return true;
    }
    return sequence->generated == sequence->max_new ||
           (!engine->paced && sequence->generated == FEW_TOKENS);
}

static void end_sequence(bd_engine *engine, bd_sequence *sequence, bd_finish finish,
                         int32_t stop_id, const bd_error *err) {
    if (sequence->lease.variant && engine->options.cache)
        bd_cache_release(engine->options.cache, &sequence->lease, bd_now_us());
    atomic_fetch_sub(&engine->count, 1);
    sequence->sink->end(sequence->sink_ctx, finish, stop_id, err);
    free(sequence);
}

static void step(bd_engine *engine) {
    for (bd_sequence **link = &engine->first; *link;) {
        bd_sequence *sequence = *link;
        bd_finish finish;
        int32_t stop_id;
        if (!advance(engine, sequence, &finish, &stop_id)) {
            link = &sequence->next;
            continue;
        }
        *link = sequence->next;
        if (!*link) engine->last = link;
        end_sequence(engine, sequence, finish, stop_id, NULL);
    }
}

/* ---- The loop ---- */

/* true: there was something to do. */
static bool turn(bd_engine *engine) {
    uint64_t now_us = bd_now_us();
    bd_message *message =
        engine->helped ? bd_mailbox_take_for_owner(engine->inbox) : bd_mailbox_take(engine->inbox);
    bool worked = message != NULL;
    while (message) {
        bd_call *call = (bd_call *)message;
        message = message->next;
        call->run(call, engine);
    }
    bool changed = engine->options.cache && bd_cache_poll(engine->options.cache, now_us);
    if (engine->options.hooks.before_step)
        engine->options.hooks.before_step(engine->options.hooks.ctx, now_us, changed);
    if (!engine->first || (engine->step_us > 0 && now_us < engine->next_step_us)) return worked;
    engine->next_step_us = now_us + engine->step_us;
    step(engine);
    return true;
}

static uint64_t next_wake_us(const bd_engine *engine, uint64_t now_us) {
    uint64_t wake_us = UINT64_MAX;
    if (engine->options.hooks.next_wake_us)
        wake_us = engine->options.hooks.next_wake_us(engine->options.hooks.ctx, now_us);
    return engine->first && engine->next_step_us < wake_us ? engine->next_step_us : wake_us;
}

static void take_over(bd_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    atomic_store(&engine->owner, (int32_t)gettid());
}

static void hand_back(bd_engine *engine) {
    atomic_store(&engine->owner, 0);
    pthread_mutex_unlock(&engine->lock);
}

/* As the engine does: without a limit when there is nothing to wait for, and others may help. */
static void wait_for_work(bd_engine *engine) {
    const uint64_t now_us = bd_now_us(), wake_us = next_wake_us(engine, now_us);
    uint64_t timeout_us = wake_us == UINT64_MAX ? UINT64_MAX : 0;
    if (wake_us != UINT64_MAX && wake_us > now_us) timeout_us = wake_us - now_us;
    engine->sleep_until_us = wake_us;
    hand_back(engine);
    bd_mailbox_wait(engine->inbox, timeout_us);
    take_over(engine);
}

static void *run(void *arg) {
    bd_engine *engine = arg;
    (void)pthread_setname_np(pthread_self(), "bd-sched");
    take_over(engine);
    while (!atomic_load(&engine->stopping)) {
        if (!turn(engine)) wait_for_work(engine);
    }
    hand_back(engine);
    return NULL;
}

static void run_here(bd_engine *engine) {
    if (bd_engine_on_thread(engine)) return; /* the loop below comes to it */
    take_over(engine);
    while (turn(engine)) {
    }
    hand_back(engine);
}

/* ---- engine.h ---- */

bd_status bd_engine_create(const bd_engine_options *options, bd_engine **out, bd_error *err) {
    *out = NULL;
    bd_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return bd_fail(err, BD_E_MEMORY, "engine", "out of memory");
    bd_status status = bd_mailbox_create(&engine->inbox, 0, false, err);
    if (status != BD_OK) {
        free(engine);
        return status;
    }
    const char *pace = getenv("BD_FAKE_STEP_US");
    engine->options = *options;
    engine->paced = pace != NULL;
    engine->step_us = pace ? strtoull(pace, NULL, 10) : 0;
    engine->last = &engine->first;
    pthread_mutex_init(&engine->lock, NULL);
    *out = engine;
    return BD_OK;
}

bd_status bd_engine_start(bd_engine *engine, bd_error *err) {
    if (!engine->paced) return BD_OK;
    int fault = pthread_create(&engine->thread, NULL, run, engine);
    if (fault != 0) return bd_fail_errno(err, BD_E_MEMORY, "engine", fault, "no thread");
    engine->started = true;
    return BD_OK;
}

void bd_engine_stop(bd_engine *engine) {
    atomic_store(&engine->stopping, true);
    if (engine->started) {
        bd_mailbox_wake(engine->inbox);
        (void)pthread_join(engine->thread, NULL);
        engine->started = engine->paced = false;
    }
    bd_error err;
    (void)bd_fail(&err, BD_E_SHUTDOWN, "engine", "the server is shutting down");
    take_over(engine);
    while (engine->first) {
        bd_sequence *sequence = engine->first;
        engine->first = sequence->next;
        end_sequence(engine, sequence, BD_FINISH_ERROR, -1, &err);
    }
    engine->last = &engine->first;
    if (engine->options.hooks.closed) engine->options.hooks.closed(engine->options.hooks.ctx, &err);
    engine->options.hooks = (bd_engine_hooks){0};
    hand_back(engine);
}

void bd_engine_destroy(bd_engine *engine) {
    if (!engine) return;
    if (!atomic_load(&engine->stopping)) bd_engine_stop(engine);
    bd_mailbox_destroy(engine->inbox);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

void bd_engine_post(bd_engine *engine, bd_call *call) {
    bd_status status = bd_mailbox_post(engine->inbox, &call->message);
    BD_ASSERT(status == BD_OK);
    if (!engine->paced) run_here(engine);
}

void bd_engine_post_quietly(bd_engine *engine, bd_call *call) {
    bd_status status = bd_mailbox_post_quietly(engine->inbox, &call->message);
    BD_ASSERT(status == BD_OK);
    atomic_store(&engine->quiet, true);
}

void bd_engine_wake(bd_engine *engine) {
    bd_mailbox_wake(engine->inbox);
    if (atomic_exchange(&engine->quiet, false) && !engine->paced) run_here(engine);
}

void bd_engine_help(bd_engine *engine) {
    bool wake = true;
    if (engine->paced && !bd_engine_on_thread(engine) &&
        pthread_mutex_trylock(&engine->lock) == 0) {
        atomic_store(&engine->owner, (int32_t)gettid());
        if (!atomic_load(&engine->stopping)) {
            engine->helped = true;
            wake = turn(engine) && turn(engine);
            engine->helped = false;
            wake = wake || next_wake_us(engine, bd_now_us()) < engine->sleep_until_us;
        }
        hand_back(engine);
    }
    if (wake) bd_engine_wake(engine);
}

bool bd_engine_on_thread(const bd_engine *engine) {
    return atomic_load(&engine->owner) == (int32_t)gettid();
}

bool bd_engine_lost(const bd_engine *engine) {
    (void)engine;
    return false;
}

bd_status bd_engine_add(bd_engine *engine, const bd_sequence_options *options, bd_sequence **out,
                        bd_error *err) {
    if (atomic_load(&engine->count) >= engine->options.seqs_max)
        return bd_fail(err, BD_BUSY, "engine", "full");
    bd_sequence *sequence = calloc(1, sizeof *sequence);
    if (!sequence) return bd_fail(err, BD_E_MEMORY, "sequence", "out of memory");
    sequence->sink = options->sink;
    sequence->sink_ctx = options->sink_ctx;
    sequence->lease = options->lease;
    sequence->prompt_tokens = options->prompt_tokens;
    sequence->max_new = options->max_new_tokens;
    sequence->stop_id = options->stop_id_count > 0 ? options->stop_ids[0] : -1;
    sequence->prompt_logprobs = options->prompt_logprobs;
    sequence->logprobs = options->logprobs;
    /* The same requests have the same answers. */
    if (!engine->first) engine->random = 0;
    for (uint32_t i = 0; i < options->prompt_tokens; i++)
        engine->random = engine->random * 31 + (uint32_t)options->prompt[i];
    *engine->last = sequence;
    engine->last = &sequence->next;
    atomic_fetch_add(&engine->count, 1);
    *out = sequence;
    return BD_OK;
}

void bd_engine_cancel(bd_engine *engine, bd_sequence *sequence) {
    (void)engine;
    sequence->cancelled = true;
}

void bd_engine_stats_get(const bd_engine *engine, bd_engine_stats *out) {
    *out = (bd_engine_stats){.running = atomic_load(&engine->count),
                             .generated_tokens = atomic_load(&engine->generated)};
}
