/* executor.h - the thread that runs steps on one rank, behind two functions, so that the scheduler
 * can be tested without a model. Owner: the engine. Threads: submit and take from bd-sched; ops are
 * called on the executor's thread. */
#ifndef BITDELTA_SRC_ENGINE_EXECUTOR_H
#define BITDELTA_SRC_ENGINE_EXECUTOR_H

#include "bitdelta/backend/step.h"
#include "bitdelta/base/status.h"
#include "stream.h"

typedef struct bd_executor_ops {
    /* Launches the whole step. gate: NULL unless some overlay of it still loads. */
    bd_status (*forward)(void *ctx, const bd_step *step, bd_stream_gate *gate, bd_error *err);
    /* Its results, in order of step->logits_rows. deadline_us: CLOCK_MONOTONIC, UINT64_MAX for
     * none; BD_E_DEVICE when it passes or the device fails. Any other error voids the step alone.
     */
    bd_status (*wait)(void *ctx, const bd_step *step, uint64_t deadline_us,
                      bd_token_result *results, bd_error *err);
} bd_executor_ops;

typedef struct bd_executor bd_executor;

/* notify is called on the executor's thread when a step is over. */
BD_MUST_CHECK bd_status bd_executor_create(bd_executor **out, const bd_executor_ops *ops, void *ctx,
                                           void (*notify)(void *ctx), void *notify_ctx,
                                           bd_error *err);
BD_MUST_CHECK bd_status bd_executor_start(bd_executor *executor, bd_error *err);
/* Waits up to timeout_us for the thread; false: it hangs in the device and was left behind, so
 * nothing that the step or the executor uses may be freed. */
BD_MUST_CHECK bool bd_executor_stop(bd_executor *executor, uint64_t timeout_us);
void bd_executor_destroy(bd_executor *executor); /* after a successful stop, or never started */

/* One step at a time; step, gate and results stay untouched until take says it is over. */
void bd_executor_submit(bd_executor *executor, const bd_step *step, bd_stream_gate *gate,
                        bd_token_result *results, uint64_t deadline_us);
/* true once per step: it is over with *status (and *err). */
BD_MUST_CHECK bool bd_executor_take(bd_executor *executor, bd_status *status, bd_error *err);
typedef struct bd_executor_times { /* of the step taken last */
    uint64_t launch_us, wait_us;   /* until it was launched, and then until it was over */
} bd_executor_times;
bd_executor_times bd_executor_last_times(const bd_executor *executor);

#endif
