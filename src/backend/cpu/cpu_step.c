/* cpu_step.c - the frame of a step: checks, the tables that operators share, and results.
 * Owner: the executor thread. The scheduler vouches for what a step says; here it is asserted. */
#include <math.h>
#include <string.h>

#include "cpu.h"

static void check_rows(const bd_cpu *cpu, const bd_step *step) {
    BD_ASSERT(step->row_count >= 1 && step->row_count <= cpu->options.rows_max);
    BD_ASSERT(step->seq_count >= 1 && step->seq_count <= cpu->options.seqs_max);
    BD_ASSERT(step->logits_row_count <= cpu->options.logits_rows_max);
    for (uint32_t r = 0; r < step->row_count; r++) {
        BD_ASSERT(step->positions[r] < cpu->options.max_model_len);
        BD_ASSERT(step->seq_of_row[r] < step->seq_count);
    }
    for (uint32_t i = 0; i < step->logits_row_count; i++) {
        const bd_logits_row *l = &step->logits_rows[i];
        BD_ASSERT(l->row < step->row_count && l->seq < step->seq_count);
        BD_ASSERT(l->target < 0 || (uint32_t)l->target < bd_cpu_id_end(cpu));
        BD_ASSERT(l->top_count <= BD_TOP_MAX);
    }
}

static void check_seqs(const bd_cpu *cpu, const bd_step *step) {
    const uint32_t block_tokens = cpu->options.kv_block_tokens;
    for (uint32_t s = 0; s < step->seq_count; s++) {
        const bd_seq *seq = &step->seqs[s];
        BD_ASSERT(seq->row_count <= step->row_count &&
                  seq->first_row <= step->row_count - seq->row_count);
        BD_ASSERT(seq->kv_before_tokens <= cpu->options.max_model_len - seq->row_count);
        const uint32_t tokens = seq->kv_before_tokens + seq->row_count;
        const uint32_t blocks = tokens / block_tokens + (tokens % block_tokens != 0 ? 1u : 0u);
        for (uint32_t b = 0; b < blocks; b++)
            BD_ASSERT(seq->kv_blocks[b] < cpu->options.kv_block_count);
        for (uint32_t r = 0; r < seq->row_count; r++)
            BD_ASSERT(step->seq_of_row[seq->first_row + r] == s);
        for (uint32_t e = 0; e < seq->edit_count; e++) {
            BD_ASSERT(seq->edits[e].token >= 0 &&
                      (uint32_t)seq->edits[e].token < bd_cpu_id_end(cpu));
        }
    }
}

static void check_overlay(const bd_cpu *cpu, const bd_overlay *overlay) {
    const uint32_t extra = overlay->extra_rows;
    BD_ASSERT(overlay->rope_table < cpu->options.rope_tables_max);
    BD_ASSERT(extra <= cpu->options.extra_vocab_max &&
              overlay->vocab <= bd_vocab_total(&cpu->options) + extra);
    BD_ASSERT(overlay->extra_embed.count == extra && overlay->extra_head.count == extra);
    BD_ASSERT(overlay->full_embed.count == 0 || overlay->full_embed.count == cpu->config->vocab);
    BD_ASSERT(overlay->full_head.count == 0 || overlay->full_head.count == cpu->config->vocab);
}

static void fill_runs(bd_cpu *cpu, const bd_step *step) {
    bd_cpu_run *runs = cpu->buffers[BD_CPU_RUNS];
    const bd_overlay **of_row = cpu->buffers[BD_CPU_ROW_OVERLAY];
    uint32_t row = 0, count = 0;
    for (uint32_t s = 0; s < step->segment_count; s++) {
        const bd_segment *segment = &step->segments[s];
        BD_ASSERT(segment->first_row == row && segment->row_count <= step->row_count - row);
        BD_ASSERT(segment->overlay >= -1 && segment->overlay < (int64_t)step->overlay_count);
        if (segment->row_count == 0) continue;
        const bd_overlay *overlay = segment->overlay < 0 ? NULL : step->overlays[segment->overlay];
        const uint32_t vocab =
            bd_vocab_total(&cpu->options) + (overlay != NULL ? overlay->extra_rows : 0);
        if (overlay != NULL) check_overlay(cpu, overlay);
        runs[count++] = (bd_cpu_run){overlay, row, segment->row_count, BD_CPU_NO_TABLE};
        for (uint32_t r = row; r < row + segment->row_count; r++) {
            BD_ASSERT(step->tokens[r] >= 0 && (uint32_t)step->tokens[r] < vocab);
            of_row[r] = overlay;
        }
        row += segment->row_count;
    }
    BD_ASSERT(row == step->row_count);
    cpu->run_count = count;

    bd_cpu_run *heads = cpu->buffers[BD_CPU_HEAD_RUNS];
    cpu->head_run_count = 0;
    for (uint32_t i = 0; i < step->logits_row_count; i++) {
        const bd_overlay *overlay = of_row[step->logits_rows[i].row];
        if (cpu->head_run_count > 0 && heads[cpu->head_run_count - 1].overlay == overlay) {
            heads[cpu->head_run_count - 1].count++;
        } else {
            heads[cpu->head_run_count++] = (bd_cpu_run){overlay, i, 1, BD_CPU_NO_TABLE};
        }
    }
}

typedef struct rotation_job {
    bd_cpu *cpu;
    const bd_step *step;
} rotation_job;

/* transformers: angle = position * inv_freq, cos and sin in float32, times the table's scale. */
static void rotate_row(void *ctx, uint32_t row, uint32_t worker) {
    const rotation_job *job = ctx;
    bd_cpu *cpu = job->cpu;
    (void)worker;
    const bd_overlay *overlay = bd_cpu_row_overlays(cpu)[row];
    const uint32_t table = overlay == NULL ? 0 : overlay->rope_table,
                   half = cpu->config->rope.rotary_dim / 2;
    const float *inv_freq = bd_cpu_row(cpu, BD_CPU_ROPE, table, half);
    const float scale = cpu->rope_scales[table];
    BD_ASSERT(scale > 0.0f);
    float *out = bd_cpu_row(cpu, BD_CPU_ROTATION, row, 2 * half);
    for (uint32_t i = 0; i < half; i++) {
        const float angle = (float)job->step->positions[row] * inv_freq[i];
        out[i] = (float)cos((double)angle) * scale;
        out[half + i] = (float)sin((double)angle) * scale;
    }
}

bd_status bd_cpu_step_begin(bd_backend *backend, const bd_step *step, bd_error *err) {
    (void)err;
    bd_cpu *cpu = bd_cpu_of(backend);
    check_rows(cpu, step);
    check_seqs(cpu, step);
    fill_runs(cpu, step);
    rotation_job job = {cpu, step};
    bd_cpu_for(cpu, step->row_count, (uint64_t)step->row_count * cpu->config->rope.rotary_dim * 32u,
               rotate_row, &job);
    cpu->sampled_step = UINT64_MAX;
    cpu->result_count = step->logits_row_count;
    return BD_OK;
}

/* Their rows go on as the base's. */
void bd_cpu_step_void(bd_backend *backend, const bd_step *step, uint32_t overlay) {
    bd_cpu *cpu = bd_cpu_of(backend);
    const bd_overlay *gone = step->overlays[overlay];
    bd_cpu_run *runs = cpu->buffers[BD_CPU_RUNS], *heads = cpu->buffers[BD_CPU_HEAD_RUNS];
    const bd_overlay **of_row = cpu->buffers[BD_CPU_ROW_OVERLAY];
    for (uint32_t i = 0; i < cpu->run_count; i++)
        if (runs[i].overlay == gone) runs[i].overlay = NULL;
    for (uint32_t i = 0; i < cpu->head_run_count; i++)
        if (heads[i].overlay == gone) heads[i].overlay = NULL;
    for (uint32_t r = 0; r < step->row_count; r++)
        if (of_row[r] == gone) of_row[r] = NULL;
}

bd_status bd_cpu_step_wait(bd_backend *backend, const bd_step *step, uint64_t deadline_us,
                           bd_token_result *results, bd_error *err) {
    (void)deadline_us; /* operators ran at once */
    bd_cpu *cpu = bd_cpu_of(backend);
    if (step->logits_row_count == 0) return BD_OK;
    if (results == NULL) return BD_OK;
    if (cpu->sampled_step != step->id) {
        return bd_fail(err, BD_E_INTERNAL, "step", "step %llu has no results: it was not sampled",
                       (unsigned long long)step->id);
    }
    memcpy(results, cpu->buffers[BD_CPU_RESULTS], step->logits_row_count * sizeof *results);
    return BD_OK;
}

bd_status bd_cpu_logits_get(bd_backend *backend, uint32_t index, float *out, bd_error *err) {
    bd_cpu *cpu = bd_cpu_of(backend);
    if (index >= cpu->result_count) {
        return bd_fail(err, BD_E_ARGUMENT, "logits", "row %u of %u", index, cpu->result_count);
    }
    const uint32_t width = bd_cpu_logits_width(cpu);
    memcpy(out, bd_cpu_row(cpu, BD_CPU_LOGITS, index, width), width * sizeof *out);
    return BD_OK;
}
