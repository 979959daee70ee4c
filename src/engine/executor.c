/* executor.c - bd-exec-0: takes a step, launches it, waits for it, says so. The state word hands
 * the step over and back: whoever may touch the job's fields is known from it. */
#include "executor.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/mailbox.h"

enum { EXECUTOR_IDLE, EXECUTOR_BUSY, EXECUTOR_OVER };

struct bd_executor {
    bd_executor_ops ops;
    void *ctx;
    void (*notify)(void *ctx);
    void *notify_ctx;
    bd_mailbox *inbox; /* only its sleep and wake are used */
    pthread_t thread;
    bool started;
    _Atomic bool stopping;
    _Atomic uint32_t
        state; /* IDLE, OVER: bd-sched owns the fields below; BUSY: the executor does */
    const bd_step *step;
    bd_stream_gate *gate;
    bd_token_result *results;
    uint64_t deadline_us, span_us; /* span: to the deadline, as the step came */
    bd_executor_times times;
    bd_status status;
    bd_error error;
};

/* What the step waited for a variant's layers is not the device's time. Once it is launched it has
 * half of its time at least: the process may have stood still (SIGSTOP, a frozen container). */
static uint64_t deadline_of(const bd_executor *executor) {
    const uint64_t deadline_us = executor->deadline_us;
    if (deadline_us == UINT64_MAX) return UINT64_MAX;
    const uint64_t waited_us = executor->gate ? executor->gate->waited_us : 0;
    const uint64_t least_us = bd_now_us() + executor->span_us / 2;
    const uint64_t until_us =
        deadline_us < UINT64_MAX - waited_us ? deadline_us + waited_us : UINT64_MAX;
    return until_us > least_us ? until_us : least_us;
}

static void run_step(bd_executor *executor) {
    bd_error_clear(&executor->error);
    const uint64_t begin_us = bd_now_us();
    bd_status status =
        executor->ops.forward(executor->ctx, executor->step, executor->gate, &executor->error);
    const uint64_t launched_us = bd_now_us();
    if (status == BD_OK)
        status = executor->ops.wait(executor->ctx, executor->step, deadline_of(executor),
                                    executor->results, &executor->error);
    executor->times = (bd_executor_times){launched_us - begin_us, bd_now_us() - launched_us};
    executor->status = status;
    atomic_store_explicit(&executor->state, EXECUTOR_OVER, memory_order_release);
    executor->notify(executor->notify_ctx);
}

static void *executor_main(void *arg) {
    bd_executor *executor = arg;
    pthread_setname_np(pthread_self(), "bd-exec-0");
    for (;;) {
        if (atomic_load_explicit(&executor->state, memory_order_acquire) == EXECUTOR_BUSY)
            run_step(executor);
        else if (atomic_load(&executor->stopping))
            return NULL;
        else
            bd_mailbox_wait(executor->inbox, UINT64_MAX);
    }
}

bd_status bd_executor_create(bd_executor **out, const bd_executor_ops *ops, void *ctx,
                             void (*notify)(void *ctx), void *notify_ctx, bd_error *err) {
    *out = NULL;
    bd_executor *executor = calloc(1, sizeof *executor);
    if (!executor) return bd_fail(err, BD_E_MEMORY, "executor", "out of memory for an executor");
    executor->ops = *ops;
    executor->ctx = ctx;
    executor->notify = notify;
    executor->notify_ctx = notify_ctx;
    bd_status status = bd_mailbox_create(&executor->inbox, 0, false, err);
    if (status != BD_OK) {
        free(executor);
        return status;
    }
    *out = executor;
    return BD_OK;
}

bd_status bd_executor_start(bd_executor *executor, bd_error *err) {
    BD_ASSERT(!executor->started);
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error_number = pthread_create(&executor->thread, NULL, executor_main, executor);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error_number != 0)
        return bd_fail_errno(err, BD_E_MEMORY, "bd-exec-0", error_number,
                             "the executor thread could not be started");
    executor->started = true;
    return BD_OK;
}

bool bd_executor_stop(bd_executor *executor, uint64_t timeout_us) {
    if (!executor->started) return true;
    atomic_store(&executor->stopping, true);
    bd_mailbox_wake(executor->inbox);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_us / 1000000u);
    until.tv_nsec += (long)(timeout_us % 1000000u * 1000u);
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    executor->started = false;
    if (pthread_timedjoin_np(executor->thread, NULL, &until) == 0) return true;
    pthread_detach(executor->thread);
    return false;
}

void bd_executor_destroy(bd_executor *executor) {
    if (!executor) return;
    BD_ASSERT(!executor->started);
    bd_mailbox_destroy(executor->inbox);
    free(executor);
}

void bd_executor_submit(bd_executor *executor, const bd_step *step, bd_stream_gate *gate,
                        bd_token_result *results, uint64_t deadline_us) {
    BD_ASSERT(atomic_load_explicit(&executor->state, memory_order_relaxed) == EXECUTOR_IDLE);
    executor->step = step;
    executor->gate = gate;
    executor->results = results;
    executor->deadline_us = deadline_us;
    executor->span_us = 0;
    if (deadline_us != UINT64_MAX) {
        const uint64_t now_us = bd_now_us();
        if (deadline_us > now_us) executor->span_us = deadline_us - now_us;
    }
    atomic_store_explicit(&executor->state, EXECUTOR_BUSY, memory_order_release);
    bd_mailbox_wake(executor->inbox);
}

bool bd_executor_take(bd_executor *executor, bd_status *status, bd_error *err) {
    if (atomic_load_explicit(&executor->state, memory_order_acquire) != EXECUTOR_OVER) return false;
    *status = executor->status;
    *err = executor->error;
    atomic_store_explicit(&executor->state, EXECUTOR_IDLE, memory_order_relaxed);
    return true;
}

bd_executor_times bd_executor_last_times(const bd_executor *executor) {
    return executor->times;
}
