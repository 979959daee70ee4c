/* cpu_sample_split.c - sampling where each rank has the logits of a part of the vocabulary.
 * Of most rows a rank tells the others its most likely tokens, the largest logit and the sum of
 * exponentials: that is all that greedy decoding, a small top-k, the log-probability of a given
 * token and the alternatives reported need. A second, small exchange counts the tokens before the
 * one chosen. Where it takes the whole distribution (edits, or sampling without a small top-k)
 * every rank gets the row's logits and samples as one rank would. All ranks compute the same from
 * the same numbers, and what one rank would. Owner: the executor thread; rows are spread over the
 * pool. */
#include <math.h>
#include <string.h>

#include "bitdelta/base/rng.h"
#include "cpu_sample.h"

typedef struct split_job {
    bd_cpu *cpu;
    const bd_step *step;
    uint32_t count;                         /* rows */
    uint32_t whole_rows[BD_CPU_WHOLE_ROWS]; /* whose logits are in BD_CPU_WHOLE */
} split_job;

/* Decided from the step alone, so that all ranks decide alike. */
static bool needs_whole(const bd_step *step, const bd_logits_row *row) {
    const bd_seq *seq = &step->seqs[row->seq];
    if (row->target >= 0) return false;
    if (seq->edit_count > 0) return true;
    if (seq->sampling.temperature < BD_CPU_GREEDY_BELOW) return false;
    return seq->sampling.top_k == 0 || seq->sampling.top_k > BD_CPU_PICK_TOKENS;
}

static uint32_t tokens_needed(const bd_step *step, const bd_logits_row *row) {
    const bd_sampling *sampling = &step->seqs[row->seq].sampling;
    const bool greedy = row->target >= 0 || sampling->temperature < BD_CPU_GREEDY_BELOW;
    const uint32_t wanted = greedy ? 1 : sampling->top_k;
    return wanted > row->top_count ? wanted : row->top_count;
}

/* ---- What this rank tells ---- */

static void insert(bd_cpu_pick *pick, uint32_t most, uint32_t id, float logit) {
    if (pick->count == most &&
        !bd_cpu_before(logit, id, pick->logits[most - 1], pick->ids[most - 1]))
        return;
    uint32_t at = pick->count < most ? pick->count++ : most - 1;
    for (; at > 0 && bd_cpu_before(logit, id, pick->logits[at - 1], pick->ids[at - 1]); at--) {
        pick->ids[at] = pick->ids[at - 1];
        pick->logits[at] = pick->logits[at - 1];
    }
    pick->ids[at] = id;
    pick->logits[at] = logit;
}

static void pick_row(void *ctx, uint32_t index, uint32_t worker) {
    const split_job *job = ctx;
    const bd_cpu *cpu = job->cpu;
    (void)worker;
    const bd_logits_row *row = &job->step->logits_rows[index];
    const uint32_t width = bd_cpu_logits_width(cpu), most = tokens_needed(job->step, row);
    const float *logits = bd_cpu_row(cpu, BD_CPU_LOGITS, index, width);
    bd_cpu_pick *pick = (bd_cpu_pick *)cpu->buffers[BD_CPU_PICKS] + index;
    memset(pick, 0, sizeof *pick);
    pick->max = -INFINITY;
    if (needs_whole(job->step, row)) return;
    for (uint32_t i = 0; i < width; i++) {
        if (isnan(logits[i])) pick->fault = true;
        if (logits[i] == -INFINITY) continue;
        if (logits[i] > pick->max) pick->max = logits[i];
        insert(pick, most, bd_cpu_id_of(cpu, i), logits[i]);
    }
    for (uint32_t i = 0; i < width && isfinite(pick->max); i++)
        pick->sum += exp((double)logits[i] - (double)pick->max);
    for (uint32_t i = 0; i < width && row->target >= 0; i++) {
        if (bd_cpu_id_of(cpu, i) != (uint32_t)row->target || logits[i] == -INFINITY) continue;
        pick->has_target = true;
        pick->target_logit = logits[i];
    }
}

/* ---- What all have told ---- */

static const bd_cpu_pick *pick_of(const split_job *job, uint32_t rank, uint32_t index) {
    const bd_cpu_pick *all = (const bd_cpu_pick *)job->cpu->buffers[BD_CPU_PICKS] + job->count;
    return &all[(size_t)rank * job->count + index];
}

/* The most likely of all ranks; the largest logit; false: a fault. */
static bool merge(const split_job *job, uint32_t index, uint32_t most, bd_cpu_pick *out) {
    *out = (bd_cpu_pick){.max = -INFINITY};
    for (uint32_t r = 0; r < job->cpu->options.rank_count; r++) {
        const bd_cpu_pick *pick = pick_of(job, r, index);
        if (pick->fault) out->fault = true;
        if (pick->max > out->max) out->max = pick->max;
        for (uint32_t i = 0; i < pick->count; i++)
            insert(out, most, pick->ids[i], pick->logits[i]);
        if (!pick->has_target) continue;
        out->has_target = true;
        out->target_logit = pick->target_logit;
    }
    for (uint32_t r = 0; r < job->cpu->options.rank_count; r++) {
        const bd_cpu_pick *pick = pick_of(job, r, index);
        if (isfinite(pick->max)) out->sum += pick->sum * exp((double)pick->max - (double)out->max);
    }
    return !out->fault && isfinite(out->max);
}

/* One of the merged tokens, drawn as from the whole row: the index. */
static uint32_t draw_one(const split_job *job, const bd_logits_row *row,
                         const bd_cpu_pick *merged) {
    const bd_sampling *sampling = &job->step->seqs[row->seq].sampling;
    uint32_t order[BD_CPU_PICK_TOKENS];
    float logits[BD_CPU_PICK_TOKENS];
    double weights[BD_CPU_PICK_TOKENS];
    if (sampling->temperature < BD_CPU_GREEDY_BELOW) return 0;
    for (uint32_t i = 0; i < merged->count; i++) { /* by id */
        uint32_t at = i;
        for (; at > 0 && merged->ids[order[at - 1]] > merged->ids[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (uint32_t i = 0; i < merged->count; i++) {
        logits[i] = merged->logits[order[i]];
        weights[i] = exp(((double)logits[i] - (double)merged->max) / (double)sampling->temperature);
    }
    const bd_cpu_candidates c = {logits, weights, merged->count};
    const uint32_t position = job->step->positions[row->row];
    return order[bd_cpu_draw(&c, sampling,
                             bd_rng_uniform(sampling->seed, sampling->choice, position))];
}

/* The result but for its rank, and how many of this rank's tokens come before the one chosen. */
static void choose_row(void *ctx, uint32_t index, uint32_t worker) {
    const split_job *job = ctx;
    const bd_cpu *cpu = job->cpu;
    (void)worker;
    const bd_logits_row *row = &job->step->logits_rows[index];
    bd_token_result *result = bd_cpu_result(cpu, index);
    uint32_t *before = (uint32_t *)cpu->buffers[BD_CPU_RANKS_OF] + index;
    *before = 0;
    if (needs_whole(job->step, row)) return;
    bd_cpu_pick merged;
    memset(result, 0, sizeof *result);
    if (!merge(job, index, tokens_needed(job->step, row), &merged)) {
        result->fault = 1;
        result->id = row->target >= 0 ? row->target : 0;
        return;
    }
    const uint32_t at = row->target >= 0 ? 0 : draw_one(job, row, &merged);
    const uint32_t id = row->target >= 0 ? (uint32_t)row->target : merged.ids[at];
    const float logit = row->target < 0     ? merged.logits[at]
                        : merged.has_target ? merged.target_logit
                                            : -INFINITY;
    const double norm = log(merged.sum) + (double)merged.max;
    result->id = (int32_t)id;
    result->logprob = (float)((double)logit - norm);
    result->top_count = row->top_count < merged.count ? row->top_count : (uint8_t)merged.count;
    for (uint32_t i = 0; i < result->top_count; i++) {
        result->top_ids[i] = (int32_t)merged.ids[i];
        result->top_logprobs[i] = (float)((double)merged.logits[i] - norm);
    }
    const uint32_t width = bd_cpu_logits_width(cpu);
    const float *logits = bd_cpu_row(cpu, BD_CPU_LOGITS, index, width);
    for (uint32_t i = 0; i < width; i++)
        if (bd_cpu_before(logits[i], bd_cpu_id_of(cpu, i), logit, id)) ++*before;
}

static void add_ranks(const split_job *job) {
    const uint32_t *all = (const uint32_t *)job->cpu->buffers[BD_CPU_RANKS_OF] + job->count;
    for (uint32_t i = 0; i < job->count; i++) {
        bd_token_result *result = bd_cpu_result(job->cpu, i);
        if (needs_whole(job->step, &job->step->logits_rows[i]) || result->fault) continue;
        result->rank = 1;
        for (uint32_t r = 0; r < job->cpu->options.rank_count; r++)
            result->rank += all[(size_t)r * job->count + i];
    }
}

/* ---- Rows that need all their logits ---- */

/* One row of every rank becomes a row of the whole vocabulary. */
static bd_status gather_row(bd_cpu *cpu, uint32_t index, float *whole, bd_error *err) {
    bd_comm *comm = cpu->options.comm;
    const uint32_t width = bd_cpu_logits_width(cpu), each = bd_vocab_each(&cpu->options),
                   total = bd_vocab_total(&cpu->options);
    float *gathered = bd_cpu_f32(cpu, BD_CPU_GATHERED);
    const bd_status status =
        comm->ops->all_gather(comm, bd_cpu_row(cpu, BD_CPU_LOGITS, index, width), gathered,
                              width * sizeof *gathered, NULL, err);
    if (status != BD_OK) return status;
    const float *part = gathered;
    for (uint32_t r = 0; r < comm->rank_count; r++, part += width) {
        const uint32_t first = r * each, left = total - first;
        memcpy(whole + first, part, (left < each ? left : each) * sizeof *whole);
    }
    memcpy(whole + total, part - width + each, cpu->options.extra_vocab_max * sizeof *whole);
    return BD_OK;
}

static void whole_task(void *ctx, uint32_t slot, uint32_t worker) {
    const split_job *job = ctx;
    const float *logits = bd_cpu_row(job->cpu, BD_CPU_WHOLE, slot, bd_cpu_id_end(job->cpu));
    bd_cpu_sample_whole(job->cpu, job->step, job->whole_rows[slot], logits, worker);
}

static bd_status sample_whole_rows(split_job *job, bd_error *err) {
    bd_cpu *cpu = job->cpu;
    uint32_t held = 0;
    for (uint32_t i = 0; i < job->count; i++) {
        const bool last = i + 1 == job->count;
        if (needs_whole(job->step, &job->step->logits_rows[i])) {
            float *whole = bd_cpu_row(cpu, BD_CPU_WHOLE, held, bd_cpu_id_end(cpu));
            const bd_status status = gather_row(cpu, i, whole, err);
            if (status != BD_OK) return status;
            job->whole_rows[held++] = i;
        }
        if (held == 0 || (held < BD_CPU_WHOLE_ROWS && !last)) continue;
        bd_cpu_for(cpu, held, 32ull * held * bd_cpu_id_end(cpu), whole_task, job);
        held = 0;
    }
    return BD_OK;
}

bd_status bd_cpu_sample_split(bd_cpu *cpu, const bd_step *step, bd_error *err) {
    bd_comm *comm = cpu->options.comm;
    split_job job = {.cpu = cpu, .step = step, .count = step->logits_row_count};
    const uint64_t work = 32ull * job.count * bd_cpu_logits_width(cpu);
    bd_cpu_pick *picks = cpu->buffers[BD_CPU_PICKS];
    uint32_t *before = cpu->buffers[BD_CPU_RANKS_OF];
    bd_cpu_for(cpu, job.count, work, pick_row, &job);
    bd_status status =
        comm->ops->all_gather(comm, picks, picks + job.count, job.count * sizeof *picks, NULL, err);
    if (status != BD_OK) return status;
    bd_cpu_for(cpu, job.count, work, choose_row, &job);
    status = comm->ops->all_gather(comm, before, before + job.count, job.count * sizeof *before,
                                   NULL, err);
    if (status != BD_OK) return status;
    add_ranks(&job);
    return sample_whole_rows(&job, err);
}
