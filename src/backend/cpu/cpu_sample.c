/* cpu_sample.c - from logits to tokens: report the target or draw the next one.
 * Order: edits, temperature, top-k, top-p (of what top-k left), min-p (against the most likely
 * token), one draw. Tokens are totally ordered by (logit descending, id ascending), so every set is
 * exact. Cuts are found by refining a histogram over the bits of the logits: three passes and no
 * sort. Reported log-probabilities are of the raw logits. Owner: the executor thread; rows are
 * spread over the pool. */
#include <math.h>
#include <string.h>

#include "bitdelta/base/rng.h"
#include "cpu_sample.h"

#define BUCKETS 2048u

typedef struct sample_job {
    bd_cpu *cpu;
    const bd_step *step;
} sample_job;

typedef bd_cpu_candidates candidates;

/* Kept: keys above `key`, and of those equal to it the `ties` with the lowest ids. */
typedef struct cut {
    uint32_t key;
    uint32_t ties;
} cut;

/* Order-preserving: a larger float has a larger key; -0 counts as +0. */
static uint32_t key_of(float value) {
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

typedef struct scan { /* of the raw logits */
    float max;
    uint32_t max_id;
    bool fault;
} scan;

static scan scan_raw(const float *logits, uint32_t count) {
    scan s = {-INFINITY, 0, false};
    for (uint32_t i = 0; i < count; i++) {
        if (isnan(logits[i])) s.fault = true;
        if (logits[i] > s.max) {
            s.max = logits[i];
            s.max_id = i;
        }
    }
    if (isinf(s.max)) s.fault = true; /* nothing to choose from, or a sum that overflowed */
    return s;
}

static double log_sum(const float *logits, uint32_t count, float max) {
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++)
        sum += exp((double)logits[i] - (double)max);
    return log(sum) + (double)max;
}

static bool before(const float *logits, uint32_t a, uint32_t b) {
    return bd_cpu_before(logits[a], a, logits[b], b);
}

static void report_top(const float *logits, uint32_t count, double norm, uint8_t top,
                       bd_token_result *result) {
    uint32_t ids[BD_TOP_MAX], used = 0;
    for (uint32_t i = 0; i < count && top > 0; i++) {
        if (used == top && !before(logits, i, ids[used - 1])) continue;
        uint32_t at = used < top ? used++ : used - 1;
        for (; at > 0 && before(logits, i, ids[at - 1]); at--)
            ids[at] = ids[at - 1];
        ids[at] = i;
    }
    result->top_count = (uint8_t)used;
    for (uint32_t i = 0; i < used; i++) {
        result->top_ids[i] = (int32_t)ids[i];
        result->top_logprobs[i] = (float)((double)logits[ids[i]] - norm);
    }
}

static void report(const float *logits, uint32_t count, float max, uint32_t id, uint8_t top,
                   bd_token_result *result) {
    const double norm = log_sum(logits, count, max);
    result->id = (int32_t)id;
    result->logprob = (float)((double)logits[id] - norm);
    result->rank = 1;
    for (uint32_t i = 0; i < count; i++) {
        if (before(logits, i, id)) result->rank++;
    }
    report_top(logits, count, norm, top, result);
}

static void apply_edits(float *logits, const bd_seq *seq) {
    for (uint32_t e = 0; e < seq->edit_count; e++) {
        const bd_logit_edit *edit = &seq->edits[e];
        float *l = &logits[edit->token];
        if (isinf(*l)) continue; /* beyond the variant's vocabulary: no edit brings it back */
        if (edit->repetition != 1.0f)
            *l = *l > 0.0f ? *l / edit->repetition : *l * edit->repetition;
        *l += edit->add;
    }
}

/* What a cut counts: kept tokens, or their weight. */
typedef struct histogram {
    double mass[BUCKETS];
    uint32_t count[BUCKETS];
} histogram;

/* Which bits of the key a pass looks at: `bits` of them above `shift`, among keys that start with
 * `prefix`. */
typedef struct digit {
    uint32_t prefix, shift, bits;
} digit;

static void fill(histogram *h, const candidates *c, cut bound, digit at) {
    memset(h, 0, sizeof *h);
    uint32_t ties = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        const uint32_t key = key_of(c->logits[i]);
        if (key < bound.key || (key == bound.key && ties++ >= bound.ties)) continue;
        if ((uint64_t)key >> (at.shift + at.bits) != at.prefix) continue;
        const uint32_t bucket = (key >> at.shift) & ((1u << at.bits) - 1);
        h->count[bucket]++;
        h->mass[bucket] += c->weights[i];
    }
}

/* The smallest top set within `bound` of `want` tokens, or (by_mass) of at least `want` weight; all
 * of `bound` where rounding keeps its sum short of want. */
static cut tighten(const candidates *c, cut bound, double want, bool by_mass) {
    digit digits[3] = {{0, 21, 11}, {0, 10, 11}, {0, 0, 10}};
    histogram h;
    double above = 0.0; /* of keys above those that start with the prefix */
    uint32_t found = 0, key = 0;
    for (int level = 0; level < 3; level++) {
        digits[level].prefix = key;
        fill(&h, c, bound, digits[level]);
        double passed = above;
        for (uint32_t b = 1u << digits[level].bits; b-- > 0;) {
            if (h.count[b] == 0) continue;
            found = b;
            above = passed;
            passed += by_mass ? h.mass[b] : (double)h.count[b];
            if (passed >= want) break;
        }
        key = (key << digits[level].bits) | found;
    }
    const double each = by_mass ? h.mass[found] / (double)h.count[found] : 1.0;
    double need = each > 0.0 ? ceil((want - above) / each) : 1.0;
    if (need < 1.0) need = 1.0;
    if (need > (double)h.count[found]) need = (double)h.count[found];
    return (cut){key, (uint32_t)need};
}

static bool keeps(const candidates *c, cut bound, double least_weight, uint32_t i, uint32_t *ties) {
    const uint32_t key = key_of(c->logits[i]);
    if (key < bound.key || (key == bound.key && (*ties)++ >= bound.ties)) return false;
    return c->weights[i] >= least_weight && c->weights[i] > 0.0;
}

static double kept_mass(const candidates *c, cut bound, double least_weight) {
    double mass = 0.0;
    uint32_t ties = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        if (keeps(c, bound, least_weight, i, &ties)) mass += c->weights[i];
    }
    return mass;
}

uint32_t bd_cpu_draw(const candidates *c, const bd_sampling *sampling, double uniform) {
    cut bound = {0, 0}; /* everything: no float has key 0 but a NaN */
    if (sampling->top_k > 0 && sampling->top_k < c->count)
        bound = tighten(c, bound, sampling->top_k, false);
    if (sampling->top_p < 1.0f) {
        const double want = (double)sampling->top_p * kept_mass(c, bound, 0.0);
        bound = tighten(c, bound, want, true);
    }
    const double least = sampling->min_p > 0.0f ? (double)sampling->min_p : 0.0;
    const double goal = uniform * kept_mass(c, bound, least);
    double sum = 0.0;
    uint32_t ties = 0, last = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        if (!keeps(c, bound, least, i, &ties)) continue;
        last = i;
        sum += c->weights[i];
        if (sum > goal) break;
    }
    return last;
}

static uint32_t choose(const bd_cpu *cpu, const float *raw, const bd_seq *seq, uint32_t position,
                       uint32_t worker, uint32_t raw_best) {
    const uint32_t count = bd_cpu_id_end(cpu);
    uint8_t *scratch = (uint8_t *)cpu->buffers[BD_CPU_SAMPLE] +
                       (size_t)worker * ((count + 1) / 2) * 2 * (sizeof(double) + sizeof(float));
    double *weights = (double *)(void *)scratch;
    float *logits = (float *)(void *)(scratch + (size_t)count * sizeof(double));
    memcpy(logits, raw, count * sizeof *logits);
    apply_edits(logits, seq);
    const scan best = scan_raw(logits, count);
    if (best.fault && best.max == -INFINITY)
        return raw_best; /* all banned: there must still be an answer */
    const bd_sampling *sampling = &seq->sampling;
    if (sampling->temperature < BD_CPU_GREEDY_BELOW) return best.max_id;
    for (uint32_t i = 0; i < count; i++) {
        weights[i] = exp(((double)logits[i] - (double)best.max) / (double)sampling->temperature);
    }
    const candidates c = {logits, weights, count};
    return bd_cpu_draw(&c, sampling, bd_rng_uniform(sampling->seed, sampling->choice, position));
}

void bd_cpu_sample_whole(const bd_cpu *cpu, const bd_step *step, uint32_t index,
                         const float *logits, uint32_t worker) {
    const uint32_t vocab = bd_cpu_id_end(cpu);
    const bd_logits_row *row = &step->logits_rows[index];
    bd_token_result *result = bd_cpu_result(cpu, index);
    memset(result, 0, sizeof *result);
    const scan raw = scan_raw(logits, vocab);
    if (raw.fault) {
        result->fault = 1;
        result->id = row->target >= 0 ? row->target : 0;
        return;
    }
    uint32_t id = (uint32_t)row->target;
    if (row->target < 0) {
        id = choose(cpu, logits, &step->seqs[row->seq], step->positions[row->row], worker,
                    raw.max_id);
    }
    report(logits, vocab, raw.max, id, row->top_count, result);
}

static void sample_row(void *ctx, uint32_t index, uint32_t worker) {
    const sample_job *job = ctx;
    const float *logits = bd_cpu_row(job->cpu, BD_CPU_LOGITS, index, bd_cpu_logits_width(job->cpu));
    bd_cpu_sample_whole(job->cpu, job->step, index, logits, worker);
}

bd_status bd_cpu_sample(bd_backend *backend, const bd_step *step, bd_error *err) {
    bd_cpu *cpu = bd_cpu_of(backend);
    sample_job job = {cpu, step};
    if (cpu->options.comm) {
        const bd_status status = bd_cpu_sample_split(cpu, step, err);
        if (status != BD_OK) return status;
    } else {
        bd_cpu_for(cpu, step->logits_row_count,
                   32ull * step->logits_row_count * bd_cpu_logits_width(cpu), sample_row, &job);
    }
    cpu->sampled_step = step->id;
    return BD_OK;
}
