/* loading.c - sequences of variants that still load: when they may run, what guards their steps,
 * and how they end when the load fails. Such a sequence is in the engine with its blocks; its group
 * is held back until the plan of stream.h says that the layers will come in time. bd-sched only. */
#include <string.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

enum { LOOK_AGAIN_US = 2000, PATIENCE_US = 5000, PATIENCE_ALONE_US = 50000 };

static void wake_at(bd_engine *engine, uint64_t start_us, uint64_t now_us) {
    if (start_us == UINT64_MAX) start_us = now_us + LOOK_AGAIN_US;
    if (start_us < engine->stream_wake_us) engine->stream_wake_us = start_us;
}

/* Its steps had to wait for it once already. */
static bool was_late(const bd_engine *engine, const bd_load *load) {
    for (uint32_t i = 0; i < engine->group_count; i++) {
        const bd_engine_group *group = &engine->groups[i];
        if (group->members > 0 && group->load == load && group->whole) return true;
    }
    return false;
}

bool bd_engine_may_stream(void *ctx, const bd_load *load, uint64_t now_us) {
    bd_engine *engine = ctx;
    if (engine->closed || was_late(engine, load)) return false;
    /* The earliest that any step could start: the slots of waiting sequences are not taken for the
     * whole load. Estimates are low, so half as much again. */
    const double step_us = bd_stream_step_us(&engine->times, engine->options.rows_max) * 1.5;
    const uint64_t start_us = bd_stream_start_us(load, step_us, BD_STREAM_SPARE_ALONE, now_us);
    if (start_us <= now_us + LOOK_AGAIN_US) return true;
    wake_at(engine, start_us, now_us);
    return false;
}

/* ---- Ends of loads ---- */

static void end_members(bd_engine *engine, bd_sequence_list *list, const bd_load *load,
                        const bd_error *err) {
    bd_sequence *next;
    for (bd_sequence *s = list->first; s; s = next) {
        next = s->next;
        if (s->lease.load != load || s->undelivered) continue;
        bd_sequence_over(engine, s, BD_FINISH_ERROR, -1);
        bd_sequence_end(engine, s, err);
        engine->reap_wanted = true; /* there is room now: another turn for what waits outside */
    }
}

/* A load is cancelled only when nobody uses it or the server ends; callers know variants, not
 * loads. */
static bd_error error_of(const bd_load *load) {
    bd_error err = load->error;
    err.status = BD_E_VARIANT;
    return err;
}

void bd_engine_settle_loads(bd_engine *engine) {
    for (uint32_t i = 0; i < engine->group_count; i++) {
        bd_engine_group *group = &engine->groups[i];
        const bd_load *load = group->load;
        if (group->members == 0 || !load || !bd_load_finished(load)) continue;
        if (load->status == BD_OK) {
            group->load = NULL;
            continue;
        }
        /* The load itself may be gone with the last of its leases, and the group be another's. */
        const bd_error err = error_of(load);
        end_members(engine, &engine->running, load, &err);
        end_members(engine, &engine->waiting, load, &err);
    }
}

/* ---- The plan ---- */

/* A step of `rows` rows, with others or not, may have this group's rows now. */
static bool may_run(bd_engine *engine, const bd_engine_group *group, uint32_t rows, bool company,
                    uint64_t now_us) {
    if (bd_load_finished(group->load)) return false; /* settled in the next turn */
    if (group->whole) return false;
    const double spare = company ? BD_STREAM_SPARE : BD_STREAM_SPARE_ALONE;
    const double step_us = bd_stream_step_us(&engine->times, rows);
    const uint64_t start_us = bd_stream_start_us(group->load, step_us, spare, now_us);
    if (start_us <= now_us) return true;
    wake_at(engine, start_us, now_us);
    return false;
}

static uint32_t sum_up_to(uint32_t a, uint32_t b, uint32_t max) {
    return a < max && b < max - a ? a + b : max;
}

/* Wants the groups that may run, at most `count` of them; returns how many. Each counts on its own
 * rows and those sure to be in the step: more make it longer, so that nothing comes late. */
static uint32_t want_some(bd_engine *engine, uint32_t rows, bool company, uint32_t count,
                          uint64_t now_us) {
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < engine->group_count && wanted < count; i++) {
        bd_engine_group *group = &engine->groups[i];
        if (!group->load || group->rows == 0) continue;
        const uint32_t all = sum_up_to(rows, group->rows, engine->options.rows_max);
        group->wanted = may_run(engine, group, all, company, now_us);
        wanted += group->wanted;
    }
    return wanted;
}

void bd_engine_want_loading(bd_engine *engine, uint32_t rows, uint64_t now_us) {
    if (want_some(engine, rows, true, UINT32_MAX, now_us) > 0 || rows > 0) return;
    /* Nobody else runs: one may be a little late. */
    (void)want_some(engine, rows, false, 1, now_us);
}

/* ---- The guard ---- */

static const bd_load *load_of(const bd_engine *engine, const bd_overlay *overlay) {
    for (uint32_t i = 0; i < engine->group_count; i++) {
        const bd_engine_group *group = &engine->groups[i];
        if (group->members > 0 && group->overlay == overlay) return group->load;
    }
    return NULL;
}

void bd_gate_init(bd_engine *engine, bd_step_buffer *buffer) {
    const bd_step *step = &buffer->step;
    bd_stream_gate *gate = &buffer->gate;
    buffer->gated = false;
    for (uint32_t i = 0; i < step->overlay_count; i++) {
        gate->loads[i] = load_of(engine, step->overlays[i]);
        gate->voided[i] = false;
        if (gate->loads[i]) buffer->gated = true;
    }
    gate->count = step->overlay_count;
    gate->layers = engine->layers;
    gate->start_us = bd_now_us();
    gate->waited_us = gate->late_us = 0;
    if (!buffer->gated) return;
    gate->step_us = bd_stream_step_us(&engine->times, step->row_count);
    const uint64_t step_us = (uint64_t)gate->step_us;
    const bool company = step->segment_count > 1;
    gate->patience_us = company ? step_us / 4 + PATIENCE_US : step_us + PATIENCE_ALONE_US;
    /* The device's own time is not to be spent on waiting, see launch(). */
    const uint64_t deadline_us = engine->options.step_deadline_us;
    gate->wait_max_us = deadline_us > 0 ? deadline_us / 2 : UINT64_MAX;
    if (engine->metrics.streamed) bd_metric_add(engine->metrics.streamed, 1);
}

bool bd_gate_voided(const bd_step_buffer *buffer, uint32_t seq_index) {
    const int32_t overlay = buffer->overlay_of_seq[seq_index];
    return buffer->gated && overlay >= 0 && buffer->gate.voided[overlay];
}

static void hold_late(bd_engine *engine, const bd_overlay *overlay) {
    for (uint32_t i = 0; i < engine->group_count; i++) {
        bd_engine_group *group = &engine->groups[i];
        if (group->members > 0 && group->overlay == overlay) group->whole = true;
    }
}

void bd_gate_learn(bd_engine *engine, const bd_step_buffer *buffer) {
    const bd_stream_gate *gate = &buffer->gate;
    const uint64_t took_us = bd_now_us() - gate->start_us;
    /* Where launches run ahead of the device, waits and work overlap: such a step tells nothing. */
    if (!buffer->gated || gate->waited_us < took_us / 16)
        bd_stream_learn(&engine->times, buffer->step.row_count, took_us);
    if (!buffer->gated) return;
    for (uint32_t i = 0; i < gate->count; i++) {
        if (!gate->voided[i]) continue;
        hold_late(engine, buffer->step.overlays[i]);
        if (engine->metrics.voided) bd_metric_add(engine->metrics.voided, 1);
    }
}
