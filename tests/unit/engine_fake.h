/* engine_fake.h - a deterministic model and a fake cache for the tests of engine and router.
 * The model's "KV" is one word per cell, written at (block table, position); a row's logits are a
 * pure function of the words of its whole history, read back through the block table. So any fault
 * of block tables, positions, segments or recomputation changes the tokens. `fake_alone` computes
 * the same from first principles, without blocks or batches. The fake model also checks the rules
 * of a step and that every overlay it sees is leased. */
#ifndef BITDELTA_TESTS_ENGINE_FAKE_H
#define BITDELTA_TESTS_ENGINE_FAKE_H

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "engine/internal.h"

enum { FAKE_VOCAB = 61, FAKE_VARIANTS_MAX = 32 };

struct bd_variant { /* stands in for the cache's */
    bd_overlay overlay;
    _Atomic int32_t leases;
    char name[BD_VARIANT_NAME_MAX + 1];
    /* for the router's tests */
    bd_variant_state state;
    uint32_t pages;
    uint64_t loading_until_us, last_use_us;
    double rate;
    bool fails, pinned, forgotten;
    bd_error failure; /* of the last failed load */
    bd_cache_waiter *waiters;
};

typedef struct fake_rng {
    uint64_t state;
} fake_rng;

static inline uint64_t fake_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t fake_next(fake_rng *rng) {
    rng->state = rng->state * 6364136223846793005u + 1442695040888963407u;
    return fake_mix(rng->state);
}

static inline uint32_t fake_below(fake_rng *rng, uint32_t n) {
    return (uint32_t)(fake_next(rng) % n);
}

static inline uint64_t fake_seed(void) {
    const char *given = getenv("BD_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : bd_now_us() ^ (uint64_t)getpid() << 32;
    printf("seed %llu (BD_TEST_SEED)\n", (unsigned long long)seed);
    return seed;
}

/* ---- The model as a pure function ---- */

static inline uint64_t fake_overlay_word(const bd_overlay *overlay) {
    uint64_t word = 0;
    if (overlay) memcpy(&word, overlay->digest, sizeof word);
    return word;
}

static inline uint64_t fake_cell(int32_t token, uint32_t position, uint64_t overlay) {
    return fake_mix((uint64_t)(uint32_t)token << 32 ^ position ^ fake_mix(overlay));
}

static inline float fake_logit(uint64_t history, uint64_t overlay, int32_t token) {
    uint64_t h = fake_mix(history ^ fake_mix(overlay + 77) ^ (uint64_t)token * 0x9e3779b9u);
    return (float)(h % 8192) / 1024.0f - 4.0f;
}

static inline float fake_logprob(const float *logits, int32_t token, uint32_t *rank) {
    double sum = 0.0;
    *rank = 1;
    for (int32_t t = 0; t < FAKE_VOCAB; t++) {
        sum += exp((double)logits[t]);
        if (logits[t] > logits[token]) ++*rank;
    }
    return (float)((double)logits[token] - log(sum));
}

/* Temperature 0 is greedy; else the logits get noise keyed by (seed, choice, position): Gumbel-like
 * sampling. */
static inline int32_t fake_choose(const float *edited, const bd_sampling *sampling,
                                  uint32_t position) {
    int32_t best = 0;
    float best_value = -INFINITY;
    for (int32_t t = 0; t < FAKE_VOCAB; t++) {
        float value = edited[t];
        if (sampling->temperature > 0.0f) {
            uint64_t noise = fake_mix(sampling->seed ^ fake_mix(position) ^
                                      (uint64_t)sampling->choice << 40 ^ (uint64_t)t << 20);
            value += (float)(noise % 4096) / 1024.0f * sampling->temperature;
        }
        if (value > best_value) {
            best_value = value;
            best = t;
        }
    }
    return best;
}

static inline void fake_top(const float *logits, uint8_t count, bd_token_result *out) {
    bool used[FAKE_VOCAB] = {false};
    out->top_count = count;
    for (uint8_t i = 0; i < count; i++) {
        int32_t best = -1;
        for (int32_t t = 0; t < FAKE_VOCAB; t++)
            if (!used[t] && (best < 0 || logits[t] > logits[best])) best = t;
        used[best] = true;
        uint32_t rank;
        out->top_ids[i] = best;
        out->top_logprobs[i] = fake_logprob(logits, best, &rank);
    }
}

static inline void fake_result(const float *logits, int32_t id, uint8_t top, bd_token_result *out) {
    memset(out, 0, sizeof *out);
    out->id = id;
    out->logprob = fake_logprob(logits, id, &out->rank);
    fake_top(logits, top, out);
}

/* ---- The model as a device ---- */

typedef struct fake_device {
    bd_engine_device device;
    uint64_t *cells; /* [block][position in block] */
    const bd_engine_options *options;
    bd_token_result *results;
    fake_rng rng;
    uint32_t delay_us_max;
    _Atomic uint64_t steps, faults;
    _Atomic uint32_t variants_seen_max, rows_seen_max;
    char fault[256];
    /* Planted trouble. */
    _Atomic bool lose_device, hang, fail_step, nan;
    /* From this step on (0: never) the device waits for trouble to be planted or the engine to be
     * stopped, so that a test need not hit the moment. */
    _Atomic uint64_t hold_from;
    bd_engine *engine;
    int32_t nan_token;                  /* a row with this token has a NaN logit, when nan is set */
    uint64_t served[FAKE_VARIANTS_MAX]; /* steps with rows of variant i (digest word i + 1) */
    uint64_t longest_gap, last_step[FAKE_VARIANTS_MAX];
    uint32_t watched; /* variants that must never wait long */
} fake_device;

static inline void fake_fault(fake_device *fake, const char *text, uint64_t a, uint64_t b) {
    if (atomic_fetch_add(&fake->faults, 1) == 0)
        snprintf(fake->fault, sizeof fake->fault, "%s (%llu, %llu)", text, (unsigned long long)a,
                 (unsigned long long)b);
}

static inline uint64_t *fake_cell_at(fake_device *fake, const bd_seq *seq, uint32_t position) {
    uint32_t block = seq->kv_blocks[position / fake->device.kv_block_tokens];
    if (block >= fake->device.kv_block_count) {
        fake_fault(fake, "block out of range", block, position);
        block = 0;
    }
    return &fake->cells[(size_t)block * fake->device.kv_block_tokens +
                        position % fake->device.kv_block_tokens];
}

static inline void fake_check_segments(fake_device *fake, const bd_step *step) {
    uint32_t at = 0, variants = 0;
    for (uint32_t i = 0; i < step->segment_count; i++) {
        const bd_segment *segment = &step->segments[i];
        if (segment->first_row != at || segment->row_count == 0)
            fake_fault(fake, "segments do not cover the rows", segment->first_row, at);
        at += segment->row_count;
        if (i > 0 && segment->row_count > step->segments[i - 1].row_count)
            fake_fault(fake, "a longer segment behind a shorter one", i, segment->row_count);
        if (segment->overlay < -1 || segment->overlay >= (int32_t)step->overlay_count)
            fake_fault(fake, "overlay index", (uint64_t)segment->overlay, step->overlay_count);
        for (uint32_t j = 0; j < i; j++)
            if (step->segments[j].overlay == segment->overlay)
                fake_fault(fake, "variant in two segments", i, j);
        if (segment->overlay >= 0) variants++;
    }
    if (at != step->row_count) fake_fault(fake, "rows not covered", at, step->row_count);
    if (variants > fake->options->variants_per_step_max)
        fake_fault(fake, "variants in a step", variants, fake->options->variants_per_step_max);
    if (variants > fake->variants_seen_max) fake->variants_seen_max = variants;
    if (step->row_count > fake->rows_seen_max) fake->rows_seen_max = step->row_count;
    if (step->row_count > fake->options->rows_max || step->row_count == 0)
        fake_fault(fake, "rows of a step", step->row_count, fake->options->rows_max);
    if (step->logits_row_count > fake->options->logits_rows_max)
        fake_fault(fake, "logits rows of a step", step->logits_row_count, 0);
    for (uint32_t i = 0; i < step->overlay_count; i++) {
        const struct bd_variant *variant =
            (const struct bd_variant *)(const void *)step->overlays[i];
        if (atomic_load(&((struct bd_variant *)(uintptr_t)variant)->leases) <= 0)
            fake_fault(fake, "overlay without a lease", i, 0);
    }
}

static inline void fake_check_seqs(fake_device *fake, const bd_step *step) {
    uint32_t at = 0;
    for (uint32_t i = 0; i < step->seq_count; i++) {
        const bd_seq *seq = &step->seqs[i];
        if (seq->first_row != at) fake_fault(fake, "rows of sequences", seq->first_row, at);
        for (uint32_t r = 0; r < seq->row_count; r++, at++) {
            if (step->seq_of_row[at] != i) fake_fault(fake, "seq_of_row", at, i);
            if (step->positions[at] != seq->kv_before_tokens + r)
                fake_fault(fake, "position", step->positions[at], seq->kv_before_tokens + r);
        }
        for (uint32_t a = 0; a < seq->edit_count; a++)
            for (uint32_t b = 0; b < a; b++)
                if (seq->edits[a].token == seq->edits[b].token)
                    fake_fault(fake, "edit twice", a, b);
    }
    if (at != step->row_count) fake_fault(fake, "rows of sequences end", at, step->row_count);
}

static inline const bd_overlay *fake_overlay_of_row(const bd_step *step, uint32_t row) {
    for (uint32_t i = 0; i < step->segment_count; i++) {
        const bd_segment *segment = &step->segments[i];
        if (row >= segment->first_row && row < segment->first_row + segment->row_count)
            return segment->overlay < 0 ? NULL : step->overlays[segment->overlay];
    }
    return NULL;
}

static inline uint64_t fake_history(fake_device *fake, const bd_seq *seq, uint32_t position) {
    uint64_t history = 1;
    for (uint32_t p = 0; p <= position; p++)
        history = fake_mix(history ^ *fake_cell_at(fake, seq, p));
    return history;
}

static inline void fake_row(fake_device *fake, const bd_step *step, uint32_t index) {
    const bd_logits_row *row = &step->logits_rows[index];
    const bd_seq *seq = &step->seqs[row->seq];
    uint32_t position = step->positions[row->row];
    uint64_t overlay = fake_overlay_word(fake_overlay_of_row(step, row->row));
    uint64_t history = fake_history(fake, seq, position);
    float logits[FAKE_VOCAB], edited[FAKE_VOCAB];
    for (int32_t t = 0; t < FAKE_VOCAB; t++)
        edited[t] = logits[t] = fake_logit(history, overlay, t);
    for (uint32_t e = 0; e < seq->edit_count; e++) {
        const bd_logit_edit *edit = &seq->edits[e];
        float l = logits[edit->token];
        edited[edit->token] = (l > 0.0f ? l / edit->repetition : l * edit->repetition) + edit->add;
    }
    int32_t id = row->target >= 0 ? row->target : fake_choose(edited, &seq->sampling, position);
    fake_result(logits, id, row->top_count, &fake->results[index]);
    if (atomic_load(&fake->nan) && step->tokens[row->row] == fake->nan_token)
        fake->results[index].fault = 1;
}

static inline void fake_count_service(fake_device *fake, const bd_step *step) {
    uint64_t now = atomic_fetch_add(&fake->steps, 1) + 1;
    for (uint32_t i = 0; i < step->overlay_count; i++) {
        uint64_t number = fake_overlay_word(step->overlays[i]) - 1;
        if (number >= FAKE_VARIANTS_MAX) continue;
        uint64_t gap = now - fake->last_step[number];
        if (fake->served[number] > 0 && gap > fake->longest_gap) fake->longest_gap = gap;
        fake->last_step[number] = now;
        fake->served[number]++;
    }
}

static inline void fake_sleep_us(uint64_t us) {
    struct timespec span = {(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
    nanosleep(&span, NULL);
}

static inline bd_status fake_forward(void *ctx, const bd_step *step, bd_stream_gate *gate,
                                     bd_error *err) {
    fake_device *fake = ctx;
    (void)gate;
    fake_check_segments(fake, step);
    fake_check_seqs(fake, step);
    fake_count_service(fake, step);
    if (fake->delay_us_max > 0) fake_sleep_us(fake_below(&fake->rng, fake->delay_us_max));
    while (fake->engine && !atomic_load(&fake->engine->stopping)) {
        uint64_t from = atomic_load(&fake->hold_from);
        if (from == 0 || atomic_load(&fake->steps) < from) break;
        fake_sleep_us(200);
    }
    if (atomic_load(&fake->fail_step)) {
        atomic_store(&fake->fail_step, false);
        return bd_fail(err, BD_E_INTERNAL, "planted", "this step fails");
    }
    if (atomic_load(&fake->lose_device))
        return bd_fail(err, BD_E_DEVICE, "planted", "the device is gone");
    while (atomic_load(&fake->hang))
        fake_sleep_us(1000);
    for (uint32_t row = 0; row < step->row_count; row++) {
        const bd_seq *seq = &step->seqs[step->seq_of_row[row]];
        uint64_t overlay = fake_overlay_word(fake_overlay_of_row(step, row));
        *fake_cell_at(fake, seq, step->positions[row]) =
            fake_cell(step->tokens[row], step->positions[row], overlay);
    }
    for (uint32_t i = 0; i < step->logits_row_count; i++)
        fake_row(fake, step, i);
    return BD_OK;
}

static inline bd_status fake_wait(void *ctx, const bd_step *step, uint64_t deadline_us,
                                  bd_token_result *results, bd_error *err) {
    fake_device *fake = ctx;
    (void)deadline_us;
    (void)err;
    memcpy(results, fake->results, step->logits_row_count * sizeof *results);
    return BD_OK;
}

static inline void fake_device_init(fake_device *fake, const bd_engine_options *options,
                                    uint32_t block_count, uint32_t block_tokens, uint64_t seed) {
    static const bd_executor_ops ops = {.forward = fake_forward, .wait = fake_wait};
    memset(fake, 0, sizeof *fake);
    fake->device = (bd_engine_device){.ops = &ops,
                                      .ctx = fake,
                                      .kv_block_count = block_count,
                                      .kv_block_tokens = block_tokens,
                                      .max_model_len = 512};
    fake->cells = malloc((size_t)block_count * block_tokens * sizeof *fake->cells);
    fake->results = calloc(options->logits_rows_max, sizeof *fake->results);
    assert_non_null(fake->cells);
    assert_non_null(fake->results);
    memset(fake->cells, 0xee, (size_t)block_count * block_tokens * sizeof *fake->cells);
    fake->options = options;
    fake->rng.state = seed;
}

static inline void fake_device_deinit(fake_device *fake) {
    free(fake->cells);
    free(fake->results);
}

/* ---- Alone ---- */

typedef struct fake_run { /* what a sequence gives when nothing else exists */
    int32_t ids[512];
    bd_token_result results[512], prompt[512]; /* prompt[p]: of prompt token p */
    uint32_t count;
    bd_finish finish;
    int32_t stop_id;
} fake_run;

static inline void fake_edit_directly(float *edited, const float *logits,
                                      const bd_sequence_options *o, const int32_t *tokens,
                                      uint32_t count) {
    for (int32_t t = 0; t < FAKE_VOCAB; t++) {
        uint32_t in_prompt = 0, in_output = 0;
        for (uint32_t i = 0; i < count; i++)
            if (tokens[i] == t) ++*(i < o->prompt_tokens ? &in_prompt : &in_output);
        float l = logits[t], add = 0.0f;
        float repetition = o->repetition_penalty > 0.0f ? o->repetition_penalty : 1.0f;
        for (uint32_t i = 0; i < o->bias_count; i++)
            if (o->bias[i].token == t) add = o->bias[i].add;
        if (in_prompt + in_output > 0) l = l > 0.0f ? l / repetition : l * repetition;
        if (in_output > 0) add -= o->presence_penalty + o->frequency_penalty * (float)in_output;
        for (uint32_t i = 0; i < o->stop_id_count; i++)
            if (o->stop_ids[i] == t && count - o->prompt_tokens < o->min_new_tokens)
                add = -INFINITY;
        edited[t] = l + add;
    }
}

static inline void fake_alone(const bd_sequence_options *o, bool decode_delta, fake_run *run) {
    uint64_t own = fake_overlay_word(o->lease.overlay), history = 1;
    int32_t tokens[1024];
    memset(run, 0, sizeof *run);
    run->finish = BD_FINISH_LENGTH;
    run->stop_id = -1;
    memcpy(tokens, o->prompt, o->prompt_tokens * sizeof *tokens);
    uint32_t count = o->prompt_tokens;
    for (uint32_t p = 0; p < count; p++) {
        uint64_t overlay = p < o->prompt_tokens || decode_delta ? own : 0;
        history = fake_mix(history ^ fake_cell(tokens[p], p, overlay));
        float logits[FAKE_VOCAB], edited[FAKE_VOCAB];
        for (int32_t t = 0; t < FAKE_VOCAB; t++)
            logits[t] = fake_logit(history, overlay, t);
        if (p + 1 < o->prompt_tokens) {
            uint8_t top = o->prompt_logprobs > 0 ? (uint8_t)o->prompt_logprobs : 0;
            fake_result(logits, tokens[p + 1], top, &run->prompt[p + 1]);
            continue;
        }
        if (run->count == o->max_new_tokens) return;
        fake_edit_directly(edited, logits, o, tokens, count);
        int32_t id = fake_choose(edited, &o->sampling, p);
        uint8_t top = o->logprobs > 0 ? (uint8_t)o->logprobs : 0;
        fake_result(logits, id, top, &run->results[run->count]);
        run->ids[run->count++] = id;
        tokens[count++] = id;
        for (uint32_t i = 0; i < o->stop_id_count; i++) {
            if (o->stop_ids[i] != id || run->count <= o->min_new_tokens) continue;
            run->finish = BD_FINISH_STOP;
            run->stop_id = id;
            return;
        }
        if (run->count == o->max_new_tokens) return;
    }
}

#endif
