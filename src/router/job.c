/* job.c - one request from reserve to done(): submitted and cancelled from any thread, run on
 * bd-sched. Cancelling is a message inside the job. cancel_state keeps done() from being called,
 * and so the job from being freed, while that message is on its way. */
#include <stdlib.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

enum { CANCEL_NONE, CANCEL_POSTED, CANCEL_CLOSED };

static bd_job *job_of_submit(bd_call *call) {
    return (bd_job *)(void *)((char *)call - offsetof(bd_job, internal.submit_call));
}

static bd_job *job_of_cancel(bd_call *call) {
    return (bd_job *)(void *)((char *)call - offsetof(bd_job, internal.cancel_call));
}

/* ---- Prompts that choices share ---- */

/* Their log-probabilities are logits of every position: computed once, by the first choice of each
 * prompt. The others begin when it has told them, and find its prompt in the prefix cache. */
static bool shares_prompts(const bd_job *job) {
    return job->params.prompt_logprobs >= 0 && job->choices_per_prompt > 1;
}

/* The choice that begins as the n-th: where prompts are shared, the first of each before all
 * others. */
static uint32_t nth_choice(const bd_job *job, uint32_t n) {
    const uint32_t others = job->choices_per_prompt - 1;
    if (!shares_prompts(job)) return n;
    if (n < job->prompt_count) return n * job->choices_per_prompt;
    n -= job->prompt_count;
    return n / others * job->choices_per_prompt + 1 + n % others;
}

bool bd_job_must_wait(const bd_job *job) {
    const bd_job_internal *in = &job->internal;
    if (!shares_prompts(job) || in->added < job->prompt_count) return false;
    const uint32_t next = nth_choice(job, in->added);
    return !in->choices[next - next % job->choices_per_prompt].told;
}

/* The job may fail here, but it does not end: this choice has not. */
static void told_prompt(bd_router_choice *choice) {
    bd_job *job = choice->job;
    bd_job_internal *in = &job->internal;
    choice->told = true;
    if (!in->aside || in->failed || bd_job_must_wait(job)) return;
    bd_error err;
    if (bd_queue_take_back(bd_queue_of(job->served), job) == BD_OK) return;
    bd_job_fail(job,
                bd_fail(&err, BD_E_MEMORY, "request", "out of memory for a place in the queue"),
                &err, 0);
}

/* ---- The end ---- */

/* The tenant pays for what was computed: prompts that began to run, each once, and new tokens. */
static void settle(const bd_job *job) {
    const bd_job_internal *in = &job->internal;
    const bd_ask ask = {
        .tenant = job->tenant, .choices = in->choice_count, .tokens = job->reserved_tokens};
    const uint32_t step = shares_prompts(job) ? 1 : job->choices_per_prompt;
    uint64_t prompt_tokens = 0;
    for (uint32_t i = 0; i < job->prompt_count && i * step < in->added; i++)
        prompt_tokens += job->prompts[i].count;
    bd_tenant_result result = in->status == BD_OK          ? BD_TENANT_OK
                              : in->status == BD_CANCELLED ? BD_TENANT_CANCELLED
                                                           : BD_TENANT_FAILED;
    bd_tenant_settle(&ask, prompt_tokens, in->generated_tokens, result, bd_now_us());
}

static void call_done(bd_job *job) {
    bd_job_internal *in = &job->internal;
    bd_router *router = in->router;
    bd_status status = in->status;
    bool detail = status != BD_OK && status != BD_CANCELLED;
    bd_error error; /* the job may be freed inside done() */
    if (detail) error = in->error;
    free(in->choices);
    in->choices = NULL;
    settle(job); /* a client that has its answer may use its share again at once */
    job->sink->done(job->sink_ctx, status, detail ? &error : NULL, in->retry_after_s);
    atomic_fetch_sub(&router->jobs, 1);
}

static void finish_if_over(bd_job *job) {
    bd_job_internal *in = &job->internal;
    if (in->over || in->live > 0 || (!in->failed && in->added < in->choice_count)) return;
    in->over = true;
    bd_series_job_over(job, bd_now_us());
    uint32_t expected = CANCEL_NONE;
    /* A cancel on its way finds the job over and calls done() itself. */
    if (atomic_compare_exchange_strong(&in->cancel_state, &expected, CANCEL_CLOSED) ||
        expected == CANCEL_CLOSED)
        call_done(job);
}

/* The first fault counts. What runs is cancelled; finish_if_over is the caller's. */
static void set_failed(bd_job *job, bd_status status, const bd_error *err, uint32_t retry_after_s) {
    bd_job_internal *in = &job->internal;
    if (in->failed || in->over) return;
    in->failed = true;
    in->status = status;
    in->retry_after_s = retry_after_s;
    if (err)
        in->error = *err;
    else
        bd_error_clear(&in->error);
    if (in->queued) bd_queue_remove(bd_queue_of(job->served), job);
    for (uint32_t n = 0; n < in->added; n++) {
        bd_sequence *sequence = in->choices[nth_choice(job, n)].sequence;
        if (sequence) bd_engine_cancel(in->router->options.engine, sequence);
    }
}

void bd_job_fail(bd_job *job, bd_status status, const bd_error *err, uint32_t retry_after_s) {
    set_failed(job, status, err, retry_after_s);
    finish_if_over(job);
}

/* ---- What the engine says of a sequence ---- */

static bool on_token(void *ctx, const bd_token_result *token) {
    bd_router_choice *choice = ctx;
    bd_job *job = choice->job;
    const bd_router_series *series = &bd_queue_of(job->served)->series;
    uint64_t now_us = bd_now_us();
    if (job->internal.first_token_us == 0) {
        job->internal.first_token_us = now_us;
        if (series->ready)
            bd_metric_observe(series->first_token, (double)(now_us - job->received_us) / 1e6);
    }
    if (choice->last_token_us != 0 && series->ready)
        bd_metric_observe(series->inter_token, (double)(now_us - choice->last_token_us) / 1e6);
    choice->last_token_us = now_us;
    if (choice->early) { /* its variant is there by now */
        choice->early = false;
        job->internal.router->running++;
    }
    job->internal.generated_tokens++;
    if (series->ready) bd_metric_add(series->output_tokens, 1.0);
    if (job->internal.failed) return false;
    return !job->sink->token || job->sink->token(job->sink_ctx, choice->index, token);
}

static void on_prompt(void *ctx, uint32_t first, const bd_token_result *tokens, uint32_t count) {
    bd_router_choice *choice = ctx;
    const bd_job *job = choice->job;
    if (!job->internal.failed && job->sink->prompt)
        job->sink->prompt(job->sink_ctx, choice->index, first, tokens, count);
    if (first + count >= job->prompts[choice->index / job->choices_per_prompt].count)
        told_prompt(choice);
}

static void on_end(void *ctx, bd_finish finish, int32_t stop_id, const bd_error *err) {
    bd_router_choice *choice = ctx;
    bd_job *job = choice->job;
    bd_job_internal *in = &job->internal;
    const bd_router_series *series = &bd_queue_of(job->served)->series;
    static const bd_finish_kind kinds[] = {BD_FINISHED_STOP, BD_FINISHED_LENGTH, BD_FINISHED_ABORT,
                                           BD_FINISHED_ERROR};
    if (series->ready) bd_metric_add(series->finished[kinds[finish]], 1.0);
    choice->sequence = NULL;
    if (!choice->told && finish != BD_FINISH_ERROR)
        told_prompt(choice); /* whatever it told: nobody waits for more */
    in->live--;
    if (!choice->early) in->router->running--;
    if (finish == BD_FINISH_ERROR)
        set_failed(job, err->status, err, 0);
    else if (!in->failed && job->sink->end)
        job->sink->end(job->sink_ctx, choice->index, finish, stop_id);
    finish_if_over(job);
}

static const bd_sequence_sink sequence_sink = {on_token, on_prompt, on_end};

bd_status bd_job_start_choice(bd_job *job, bd_router_queue *queue, uint64_t now_us, bd_error *err) {
    bd_job_internal *in = &job->internal;
    const uint32_t index = nth_choice(job, in->added), width = job->choices_per_prompt;
    bd_router_choice *choice = &in->choices[index];
    const bd_prompt *prompt = &job->prompts[index / width];
    bd_sequence_options options = job->params;
    *choice = (bd_router_choice){
        .job = job, .index = index, .early = queue->lease.load != NULL, .told = prompt->count == 1};
    options.prompt = prompt->ids;
    options.prompt_tokens = prompt->count;
    options.lease = queue->lease;
    options.tenant = bd_tenant_id(job->tenant);
    options.sampling.choice = index % width;
    if (index % width > 0) options.prompt_logprobs = -1;
    options.sink = &sequence_sink;
    options.sink_ctx = choice;
    options.payer = &in->line->account->flow.payer;
    bd_status status =
        bd_engine_add(queue->router->options.engine, &options, &choice->sequence, err);
    if (status != BD_OK) return status;
    if (in->added == 0 && now_us > job->received_us) {
        if (queue->series.ready)
            bd_metric_observe(queue->series.queue_time, (double)(now_us - job->received_us) / 1e6);
        bd_tenant_waited(job->tenant, now_us - job->received_us);
    }
    in->added++;
    in->live++;
    if (!choice->early) in->router->running++;
    return BD_OK;
}

/* ---- From other threads ---- */

static void run_submit(bd_call *call, bd_engine *engine) {
    bd_job *job = job_of_submit(call);
    bd_job_internal *in = &job->internal;
    bd_router *router = in->router;
    bd_router_queue *queue = bd_queue_of(job->served);
    (void)engine;
    bd_series_prepare(queue);
    bd_error err;
    bd_status status = BD_OK;
    if (router->closed) {
        err = router->closed_error;
        status = err.status;
    } else if (in->choice_count == 0) {
        status = bd_fail(&err, BD_E_ARGUMENT, "request", "a request needs a prompt");
    } else if (!in->choices) {
        status =
            bd_fail(&err, BD_E_MEMORY, "request", "out of memory for %u choices", in->choice_count);
    } else if (bd_queue_append(queue, job) != BD_OK) {
        status = bd_fail(&err, BD_E_MEMORY, "request", "out of memory for a place in the queue");
    }
    if (status != BD_OK) {
        atomic_fetch_sub(&router->reserved, in->choice_count);
        bd_job_fail(job, status, &err, 0);
        return;
    }
    if (queue->served.variant)
        bd_cache_touch(router->options.cache, queue->served.variant, bd_now_us());
}

void bd_router_submit_quietly(bd_router *router, bd_job *job) {
    bd_job_internal *in = &job->internal;
    uint64_t count = (uint64_t)job->prompt_count * job->choices_per_prompt;
    BD_ASSERT(job->sink && job->sink->done && count <= UINT32_MAX);
    in->router = router;
    in->choice_count = (uint32_t)count;
    in->choices = calloc(count > 0 ? (size_t)count : 1, sizeof *in->choices);
    in->submit_call.run = run_submit;
    atomic_fetch_add(&router->jobs, 1);
    bd_engine_post_quietly(router->options.engine, &in->submit_call);
}

void bd_router_wake(bd_router *router) {
    bd_engine_wake(router->options.engine);
}

void bd_router_help(bd_router *router) {
    bd_engine_help(router->options.engine);
}

void bd_router_submit(bd_router *router, bd_job *job) {
    bd_router_submit_quietly(router, job);
    bd_router_wake(router);
}

static void run_cancel(bd_call *call, bd_engine *engine) {
    bd_job *job = job_of_cancel(call);
    (void)engine;
    atomic_store(&job->internal.cancel_state, CANCEL_CLOSED);
    if (job->internal.over)
        call_done(job);
    else
        bd_job_fail(job, BD_CANCELLED, NULL, 0);
}

void bd_router_cancel(bd_router *router, bd_job *job) {
    uint32_t expected = CANCEL_NONE;
    if (!atomic_compare_exchange_strong(&job->internal.cancel_state, &expected, CANCEL_POSTED))
        return; /* over, or on its way */
    job->internal.cancel_call.run = run_cancel;
    bd_engine_post(router->options.engine, &job->internal.cancel_call);
}

/* ---- Room ---- */

static uint32_t retry_estimate_s(const bd_router *router, uint32_t reserved) {
    uint32_t wait_s = 1 + reserved / (atomic_load(&router->started_per_s) + 1);
    return wait_s < 60 ? wait_s : 60;
}

/* false: no room, or not now. */
static bool take_room(bd_router *router, uint32_t choices, uint32_t *retry_after_s) {
    uint32_t max = router->options.queue_max ? router->options.queue_max : UINT32_MAX;
    uint32_t before = atomic_load(&router->reserved);
    do {
        bool fits = before <= max && choices <= max - before;
        bool alone = before == 0;
        if (!fits && !alone) {
            *retry_after_s = retry_estimate_s(router, before);
            return false;
        }
    } while (!atomic_compare_exchange_weak(&router->reserved, &before, before + choices));
    return true;
}

/* The tenant's own share first: who has used it up takes no room from others, not even for a
 * moment. */
bd_status bd_router_reserve(bd_router *router, bd_ask *ask, bd_refused *why) {
    *why = (bd_refused){0};
    if (atomic_load(&router->draining)) return BD_E_SHUTDOWN;
    if (bd_engine_lost(router->options.engine)) return BD_E_DEVICE;
    uint64_t now_us = bd_now_us();
    bd_status status = bd_tenant_admit(ask, now_us, why);
    if (status != BD_OK) return status;
    if (take_room(router, ask->choices, &why->retry_after_s)) return BD_OK;
    bd_tenant_undo(ask, now_us);
    return BD_BUSY;
}

void bd_router_unreserve(bd_router *router, const bd_ask *ask) {
    uint32_t before = atomic_fetch_sub(&router->reserved, ask->choices);
    BD_ASSERT(before >= ask->choices);
    bd_tenant_settle(ask, 0, 0, BD_TENANT_REFUSED, bd_now_us());
}

void bd_router_drain(bd_router *router) {
    atomic_store(&router->draining, true);
}

bool bd_router_idle(const bd_router *router) {
    return atomic_load(&router->reserved) == 0 && atomic_load(&router->jobs) == 0;
}
