/* stream.h - steps over variants that are still loading: when one may join a step, and what the
 * executor does when a layer is not there after all. The plan is made on bd-sched from the load's
 * measured rate and the time that steps of such a size took; the gate is a guard that should not
 * have to wait. Threads: learn, estimate and start on bd-sched; the gate belongs to whoever owns
 * the step, see executor.h. */
#ifndef BITDELTA_SRC_ENGINE_STREAM_H
#define BITDELTA_SRC_ENGINE_STREAM_H

#include "bitdelta/backend/step.h"
#include "bitdelta/loader/loader.h"

#define BD_STREAM_SIZES 48

typedef struct bd_step_times { /* what steps took, by the half octave of their rows */
    double us[BD_STREAM_SIZES], rows[BD_STREAM_SIZES]; /* moving averages; 0 rows: none yet */
} bd_step_times;

void bd_stream_learn(bd_step_times *times, uint32_t rows, uint64_t us);
/* A step of so many rows takes at least about this; 0: nothing is known. */
double bd_stream_step_us(const bd_step_times *times, uint32_t rows);

/* How the wait for a layer is stretched in the plan: a fifth to spare with company in the step;
 * alone in it a layer may even come late by a little, as nobody else waits at the gate. */
#define BD_STREAM_SPARE       1.2
#define BD_STREAM_SPARE_ALONE 0.95

/* When a step of step_us may begin, so that each layer comes before it is needed: `spare` times the
 * wait for it is planned for. now_us or earlier: at once. Of a load without `early`, or one that
 * has not shown its rate yet: UINT64_MAX. */
uint64_t bd_stream_start_us(const bd_load *load, double step_us, double spare, uint64_t now_us);

typedef enum bd_layer_state { BD_LAYER_READY, BD_LAYER_LATE, BD_LAYER_FAILED } bd_layer_state;

typedef struct bd_stream_gate { /* of one step */
    const bd_load **loads;      /* [overlay_count of the step]; NULL: complete */
    bool *voided;               /* [overlay_count]; its rows mean nothing */
    uint32_t count, layers;
    uint64_t start_us; /* when the step was launched */
    double step_us;
    uint64_t patience_us; /* for all waits of the step beyond the plan */
    uint64_t wait_max_us; /* for all waits of the step, planned ones too */
    uint64_t waited_us;   /* in all */
    uint64_t late_us;     /* beyond the plan */
} bd_stream_gate;

/* Executor: returns when each overlay not voided has ready index `index`. Voids those whose load
 * failed or lets the step wait too long and calls on_void for each. */
void bd_stream_gate_pass(bd_stream_gate *gate, uint32_t index,
                         void (*on_void)(void *ctx, uint32_t overlay), void *ctx);

#endif
