/* stream.c - the arithmetic of steps over loading variants, and their gate. See stream.h. */
#include "stream.h"

#include <time.h>

#include "bitdelta/base/clock.h"

#define LEARN_SHARE   0.25 /* of the newest step in the averages */
#define HEAD_LAYERS   0.5  /* what the head takes, in layers */
#define GATE_SLEEP_NS 50000

/* Two to an octave: 1, 2, 3, 4, 6, 8, 12, .. rows begin one. */
static uint32_t size_of(uint32_t rows) {
    uint32_t octave = 0;
    while (octave < 31 && rows >> (octave + 1) != 0)
        octave++;
    const bool upper = octave > 0 && (rows >> (octave - 1) & 1u) != 0;
    const uint32_t size = 2 * octave + (upper ? 1 : 0);
    return size < BD_STREAM_SIZES ? size : BD_STREAM_SIZES - 1;
}

void bd_stream_learn(bd_step_times *times, uint32_t rows, uint64_t us) {
    const uint32_t size = size_of(rows);
    const double share = times->rows[size] > 0 ? LEARN_SHARE : 1.0;
    times->us[size] += share * ((double)us - times->us[size]);
    times->rows[size] += share * ((double)rows - times->rows[size]);
}

double bd_stream_step_us(const bd_step_times *times, uint32_t rows) {
    double best = 0;
    for (uint32_t i = 0; i < BD_STREAM_SIZES; i++) {
        if (times->rows[i] <= 0) continue;
        /* A smaller step takes no longer; of a larger one at least the share of its rows. */
        const double scale = (double)rows / times->rows[i];
        const bool near = i == size_of(rows);
        const double us = times->us[i] * (near || scale < 1 ? scale : 1);
        if (us > best) best = us;
    }
    return best;
}

/* When the step needs a ready index, as a share of its time. */
static double needed_at(uint32_t index, uint32_t layers) {
    return index <= 1 ? 0 : (double)(index - 1) / ((double)layers + HEAD_LAYERS);
}

uint64_t bd_stream_start_us(const bd_load *load, double step_us, double spare, uint64_t now_us) {
    const bd_load_early *early = atomic_load_explicit(&load->early, memory_order_acquire);
    if (!early) return UINT64_MAX;
    const uint32_t ready = atomic_load_explicit(&load->ready_count, memory_order_acquire);
    if (ready >= early->count) return now_us;
    const uint64_t read = atomic_load_explicit(&load->read_bytes, memory_order_relaxed);
    /* No step begins without the embedding: rows given up go on as the base's, which has none for
     * added vocabulary. */
    if (ready == 0 || read == 0 || now_us <= load->started_us) return UINT64_MAX;
    const double us_per_byte = (double)(now_us - load->started_us) / (double)read;
    double start = 0; /* from now on */
    for (uint32_t i = ready; i < early->count; i++) {
        const uint64_t end = early->end_bytes[i];
        const double load_us = end > read ? (double)(end - read) * us_per_byte : 0;
        const double at = load_us - step_us * needed_at(i, early->count - 2) / spare;
        if (at > start) start = at;
    }
    return start < 1e15 ? now_us + (uint64_t)start : UINT64_MAX;
}

static bd_layer_state layer_state(const bd_load *load, uint32_t index) {
    /* In this order: the end of a load comes after its last layer. */
    const bool finished = bd_load_finished(load);
    if (atomic_load_explicit(&load->ready_count, memory_order_acquire) > index)
        return BD_LAYER_READY;
    return finished ? BD_LAYER_FAILED : BD_LAYER_LATE;
}

/* Waits for one overlay; false: no longer. */
static bool wait_for(bd_stream_gate *gate, const bd_load *load, uint32_t index) {
    const uint64_t came_us = bd_now_us();
    const uint64_t planned_us =
        gate->start_us + (uint64_t)(gate->step_us * needed_at(index, gate->layers));
    const uint64_t due_us = planned_us > came_us ? planned_us : came_us;
    bd_layer_state state;
    uint64_t now_us = came_us;
    while ((state = layer_state(load, index)) == BD_LAYER_LATE) {
        if (now_us > due_us && gate->late_us + (now_us - due_us) > gate->patience_us) break;
        if (gate->waited_us + (now_us - came_us) > gate->wait_max_us) break;
        const struct timespec pause = {.tv_nsec = GATE_SLEEP_NS};
        nanosleep(&pause, NULL);
        now_us = bd_now_us();
    }
    gate->waited_us += now_us - came_us;
    if (now_us > due_us) gate->late_us += now_us - due_us;
    return state == BD_LAYER_READY;
}

void bd_stream_gate_pass(bd_stream_gate *gate, uint32_t index,
                         void (*on_void)(void *ctx, uint32_t overlay), void *ctx) {
    for (uint32_t i = 0; i < gate->count; i++) {
        if (!gate->loads[i] || gate->voided[i]) continue;
        if (layer_state(gate->loads[i], index) == BD_LAYER_READY) continue;
        if (wait_for(gate, gate->loads[i], index)) continue;
        gate->voided[i] = true;
        on_void(ctx, i);
    }
}
