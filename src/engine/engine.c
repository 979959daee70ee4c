/* engine.c - bd-sched: the loop that turns sequences into steps, and the calls of other threads
 * into turns. Waking a thread costs more than most turns: who brings a call while bd-sched sleeps
 * may take its turn. Create sizes everything; the decode path allocates nothing. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

enum { HELP_TURNS_MAX = 4 };

/* ---- Memory ---- */

static void buffer_deinit(bd_step_buffer *buffer) {
    free(buffer->tokens);
    free(buffer->positions);
    free(buffer->seq_of_row);
    free(buffer->seqs);
    free(buffer->segments);
    free(buffer->overlays);
    free(buffer->logits_rows);
    free(buffer->sequences);
    free(buffer->overlay_of_seq);
    free(buffer->logits_first);
    free(buffer->gate.loads);
    free(buffer->gate.voided);
    free(buffer->results);
}

static bool buffer_init(const bd_engine *engine, bd_step_buffer *buffer) {
    size_t rows = engine->options.rows_max, logits = engine->options.logits_rows_max;
    size_t seqs = engine->cap, segments = (size_t)engine->options.variants_per_step_max + 1;
    if (segments > seqs + 1) segments = seqs + 1;
    buffer->tokens = calloc(rows, sizeof *buffer->tokens);
    buffer->positions = calloc(rows, sizeof *buffer->positions);
    buffer->seq_of_row = calloc(rows, sizeof *buffer->seq_of_row);
    buffer->seqs = calloc(seqs, sizeof *buffer->seqs);
    buffer->segments = calloc(segments, sizeof *buffer->segments);
    buffer->overlays = calloc(segments, sizeof *buffer->overlays);
    buffer->logits_rows = calloc(logits, sizeof *buffer->logits_rows);
    buffer->sequences = calloc(seqs, sizeof *buffer->sequences);
    buffer->overlay_of_seq = calloc(seqs, sizeof *buffer->overlay_of_seq);
    buffer->logits_first = calloc(seqs + 1, sizeof *buffer->logits_first);
    buffer->gate.loads = calloc(segments, sizeof *buffer->gate.loads);
    buffer->gate.voided = calloc(segments, sizeof *buffer->gate.voided);
    buffer->results = calloc(logits, sizeof *buffer->results);
    return buffer->tokens && buffer->positions && buffer->seq_of_row && buffer->seqs &&
           buffer->segments && buffer->overlays && buffer->logits_rows && buffer->sequences &&
           buffer->overlay_of_seq && buffer->logits_first && buffer->gate.loads &&
           buffer->gate.voided && buffer->results;
}

static void engine_free(bd_engine *engine) {
    bd_executor_destroy(engine->executor);
    bd_mailbox_destroy(engine->inbox);
    bd_kv_destroy(engine->kv);
    for (uint32_t i = 0; i < 2; i++)
        buffer_deinit(&engine->buffers[i]);
    free(engine->groups);
    free(engine->picks);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

static void register_metrics(bd_engine *engine) {
    bd_metrics *metrics = engine->options.metrics;
    if (!metrics) return;
    const char *name = engine->options.model_name ? engine->options.model_name : "base";
    const bd_label label = {"model_name", name};
    engine->metrics.running = bd_metrics_gauge(metrics, "vllm:num_requests_running",
                                               "Sequences in the running batch.", &label, 1);
    engine->metrics.kv_usage = bd_metrics_gauge(metrics, "vllm:kv_cache_usage_perc",
                                                "Share of KV blocks in use, 0 to 1.", &label, 1);
    engine->metrics.preemptions =
        bd_metrics_counter(metrics, "vllm:num_preemptions_total",
                           "Sequences that gave up their KV to others.", &label, 1);
    engine->metrics.streamed =
        bd_metrics_counter(metrics, "bitdelta_streamed_steps_total",
                           "Steps that ran over a variant while it was still loading.", NULL, 0);
    engine->metrics.voided = bd_metrics_counter(
        metrics, "bitdelta_streamed_voids_total",
        "Variants of such steps whose layers came too late or not at all.", NULL, 0);
    engine->metrics.steps =
        bd_metrics_counter(metrics, "bitdelta_steps_total", "Steps of the device.", NULL, 0);
    engine->metrics.step_rows = bd_metrics_counter(metrics, "bitdelta_step_rows_total",
                                                   "Tokens computed in them.", NULL, 0);
    const bd_label parts[] = {{"part", "launch"}, {"part", "wait"}};
    const char *help = "Time of steps: to launch them (on a CPU to compute them), and then to wait "
                       "for the device. What is left of the clock under load is between steps.";
    engine->metrics.launch_seconds =
        bd_metrics_counter(metrics, "bitdelta_step_seconds_total", help, &parts[0], 1);
    engine->metrics.wait_seconds =
        bd_metrics_counter(metrics, "bitdelta_step_seconds_total", help, &parts[1], 1);
    if (!engine->options.prefix_cache) return;
    engine->metrics.prefix_queries =
        bd_metrics_counter(metrics, "vllm:prefix_cache_queries_total",
                           "Tokens looked up in the prefix cache.", &label, 1);
    engine->metrics.prefix_hits = bd_metrics_counter(
        metrics, "vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", &label, 1);
}

static void on_step_over(void *ctx) {
    bd_engine *engine = ctx;
    bd_mailbox_wake(engine->inbox);
}

static uint32_t least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static bd_status check_options(const bd_engine_options *options, const bd_engine_device *device,
                               bd_error *err) {
    const struct {
        const char *name;
        uint32_t value;
    } needed[] = {{"rows_max", options->rows_max},
                  {"seqs_max", options->seqs_max},
                  {"logits_rows_max", options->logits_rows_max},
                  {"variants_per_step_max", options->variants_per_step_max},
                  {"kv_block_tokens", device->kv_block_tokens},
                  {"max_model_len", device->max_model_len}};
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++)
        if (needed[i].value == 0 || needed[i].value > UINT32_MAX / 4)
            return bd_fail(err, BD_E_ARGUMENT, needed[i].name, "%u is out of range",
                           needed[i].value);
    return BD_OK;
}

static bd_status make_parts(bd_engine *engine, const bd_engine_device *device, bd_error *err) {
    engine->groups = calloc(2 * (size_t)engine->cap, sizeof *engine->groups);
    engine->picks = calloc(engine->cap, sizeof *engine->picks);
    bool buffers =
        buffer_init(engine, &engine->buffers[0]) && buffer_init(engine, &engine->buffers[1]);
    if (!engine->groups || !engine->picks || !buffers)
        return bd_fail(err, BD_E_MEMORY, "engine", "out of memory for steps of %u rows",
                       engine->options.rows_max);
    if (getrandom(engine->secret, sizeof engine->secret, 0) != (ssize_t)sizeof engine->secret)
        return bd_fail_errno(err, BD_E_IO, "engine", errno, "no random bytes for the prefix keys");
    bd_status status = bd_kv_create(&engine->kv, device->kv_block_count, err);
    if (status == BD_OK) status = bd_mailbox_create(&engine->inbox, 0, false, err);
    if (status == BD_OK)
        status = bd_executor_create(&engine->executor, device->ops, device->ctx, on_step_over,
                                    engine, err);
    return status;
}

bd_status bd_engine_create_on(const bd_engine_options *options, const bd_engine_device *device,
                              bd_engine **out, bd_error *err) {
    *out = NULL;
    bd_status status = check_options(options, device, err);
    if (status != BD_OK) return status;
    bd_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return bd_fail(err, BD_E_MEMORY, "engine", "out of memory for the engine");
    pthread_mutex_init(&engine->lock, NULL);
    engine->options = *options;
    if (engine->options.prefill_chunk_tokens == 0)
        engine->options.prefill_chunk_tokens = options->rows_max;
    /* With this bound every running sequence has a row and a logits row left in every step. */
    engine->cap = least(options->seqs_max, least(options->rows_max, options->logits_rows_max));
    engine->group_count = 2 * engine->cap; /* those that end while a step runs included */
    engine->block_tokens = device->kv_block_tokens;
    engine->max_model_len = device->max_model_len;
    engine->layers = device->layers;
    status = make_parts(engine, device, err);
    if (status != BD_OK) {
        engine_free(engine);
        return status;
    }
    register_metrics(engine);
    engine->options.model_name = NULL; /* the registry has its copy */
    *out = engine;
    return BD_OK;
}

/* ---- The loop ---- */

static const void *my_mark(void) {
    static _Thread_local char mark; /* its address is the thread's */
    return &mark;
}

static void run_calls(bd_engine *engine) {
    bd_message *message =
        engine->helped ? bd_mailbox_take_for_owner(engine->inbox) : bd_mailbox_take(engine->inbox);
    while (message) {
        bd_call *call = (bd_call *)message;
        message = message->next; /* run() may free the call */
        call->run(call, engine);
    }
}

static void close_engine(bd_engine *engine, const bd_error *err) {
    if (engine->closed) return;
    engine->closed = true;
    engine->closed_error = *err;
    bd_engine_end_all(engine, err);
    if (engine->options.hooks.closed) engine->options.hooks.closed(engine->options.hooks.ctx, err);
}

static void lose_device(bd_engine *engine, const bd_error *err) {
    atomic_store(&engine->lost, true);
    close_engine(engine, err);
}

static uint64_t later(uint64_t now_us, uint64_t span_us, uint64_t times) {
    return span_us == 0 || span_us > UINT64_MAX / 8 ? UINT64_MAX : now_us + span_us * times;
}

/* A step that the executor itself does not come back from. Its sequences end; what the step reads
 * stays. At first it is given half the deadline more: where the whole process stood still (SIGSTOP,
 * a frozen container), the executor could not come either. */
static void check_hang(bd_engine *engine, uint64_t now_us) {
    if (!engine->in_flight || engine->stuck || now_us < engine->give_up_us) return;
    if (!engine->overdue) {
        engine->overdue = true;
        engine->give_up_us = later(now_us, engine->options.step_deadline_us / 2, 1);
        return;
    }
    engine->stuck = true;
    bd_error err;
    (void)bd_fail(&err, BD_E_DEVICE, "bd-exec-0", "the device did not finish step %llu in time",
                  (unsigned long long)engine->in_flight->step.id);
    lose_device(engine, &err);
}

static void count_step(const bd_engine *engine, const bd_step *step) {
    const bd_engine_metrics *metrics = &engine->metrics;
    if (!metrics->steps) return;
    const bd_executor_times times = bd_executor_last_times(engine->executor);
    bd_metric_add(metrics->steps, 1);
    bd_metric_add(metrics->step_rows, step->row_count);
    bd_metric_add(metrics->launch_seconds, (double)times.launch_us * 1e-6);
    bd_metric_add(metrics->wait_seconds, (double)times.wait_us * 1e-6);
}

/* true: a step was collected, its tokens wait in *buffer. */
static bool collect_finished(bd_engine *engine, bd_step_buffer **buffer) {
    bd_status status;
    bd_error err;
    if (!engine->in_flight || !bd_executor_take(engine->executor, &status, &err)) return false;
    *buffer = engine->in_flight;
    engine->in_flight = NULL;
    count_step(engine, &(*buffer)->step);
    bd_engine_collect(engine, *buffer, status, &err);
    if (status != BD_E_DEVICE) return true;
    bd_error loss = (*buffer)->fault;
    bd_engine_deliver(engine, *buffer);
    lose_device(engine, &loss);
    return false;
}

/* Of a step that begins now. Twice, since the launch itself may wait for the device, or for half
 * the deadline at the gate of a loading variant. */
static uint64_t give_up_time(const bd_engine *engine, uint64_t now_us) {
    return later(now_us, engine->options.step_deadline_us, 2);
}

static bool launch(bd_engine *engine) {
    if (engine->in_flight || engine->closed) return false;
    bd_step_buffer *buffer = bd_engine_build(engine);
    if (!buffer) return false;
    uint64_t now_us = bd_now_us();
    engine->in_flight = buffer;
    engine->give_up_us = give_up_time(engine, now_us);
    engine->overdue = false;
    bd_executor_submit(engine->executor, &buffer->step, buffer->gated ? &buffer->gate : NULL,
                       buffer->results, later(now_us, engine->options.step_deadline_us, 1));
    return true;
}

static void publish_stats(bd_engine *engine) {
    uint32_t total = bd_kv_total(engine->kv), used = total - bd_kv_free_count(engine->kv);
    uint32_t running = engine->running.count;
    atomic_store_explicit(&engine->stat_waiting, engine->waiting.count, memory_order_relaxed);
    atomic_store_explicit(&engine->stat_running, running, memory_order_relaxed);
    atomic_store_explicit(&engine->stat_kv_used, used, memory_order_relaxed);
    if (!engine->metrics.running) return;
    bd_metric_set(engine->metrics.running, running);
    bd_metric_set(engine->metrics.kv_usage, (double)used / total);
}

static bool loads_remain(const bd_engine *engine) {
    for (uint32_t i = 0; i < engine->group_count; i++)
        if (engine->groups[i].members > 0 && engine->groups[i].load) return true;
    return false;
}

/* One turn; false: nothing happened after which there might be more to do. */
static bool turn(bd_engine *engine) {
    run_calls(engine);
    (void)bd_engine_reap(engine); /* before the hook, which sees the room it makes */
    bd_step_buffer *finished = NULL;
    bool collected = collect_finished(engine, &finished);
    uint64_t now_us = bd_now_us();
    check_hang(engine, now_us);
    engine->stream_wake_us = UINT64_MAX;
    bool cache_changed = engine->options.cache && bd_cache_poll(engine->options.cache, now_us);
    if (engine->options.hooks.before_step && !engine->closed)
        engine->options.hooks.before_step(engine->options.hooks.ctx, now_us, cache_changed);
    bd_engine_settle_loads(engine);
    bool launched = launch(engine);
    if (collected) bd_engine_deliver(engine, finished);
    /* Those that ended may have been all that was added, with more in the queues behind them. */
    bool reaped = bd_engine_reap(engine);
    publish_stats(engine);
    /* Collected: what was chosen next may have given way without a step. */
    if (collected || launched || reaped) return true;
    /* Asleep with sequences and neither a step nor a load to wake the loop, they would stay for
     * ever. */
    BD_ASSERT(engine->in_flight || engine->running.count + engine->waiting.count == 0 ||
              engine->stream_wake_us != UINT64_MAX || loads_remain(engine));
    return false;
}

/* When there is something to do without being told; UINT64_MAX: never. */
static uint64_t next_wake_us(const bd_engine *engine, uint64_t now_us) {
    uint64_t wake_us = UINT64_MAX;
    if (engine->options.hooks.next_wake_us && !engine->closed)
        wake_us = engine->options.hooks.next_wake_us(engine->options.hooks.ctx, now_us);
    if (!engine->in_flight && !engine->closed && engine->stream_wake_us < wake_us)
        wake_us = engine->stream_wake_us;
    if (engine->in_flight && !engine->stuck && engine->give_up_us < wake_us)
        wake_us = engine->give_up_us;
    return wake_us;
}

static void take_over(bd_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    atomic_store(&engine->owner, my_mark());
}

static void hand_back(bd_engine *engine) {
    atomic_store(&engine->owner, NULL);
    pthread_mutex_unlock(&engine->lock);
}

/* Others may help meanwhile. A step that one of them begins is given up no sooner than this sleep
 * ends, so that its deadline wakes nobody now. */
static void wait_for_work(bd_engine *engine) {
    const uint64_t now_us = bd_now_us(), latest_us = give_up_time(engine, now_us);
    uint64_t wake_us = next_wake_us(engine, now_us);
    if (latest_us < wake_us) wake_us = latest_us;
    uint64_t timeout_us = wake_us == UINT64_MAX ? UINT64_MAX : 0;
    if (wake_us != UINT64_MAX && wake_us > now_us) timeout_us = wake_us - now_us;
    engine->sleep_until_us = wake_us;
    hand_back(engine);
    bd_mailbox_wait(engine->inbox, timeout_us);
    take_over(engine);
}

static void *engine_main(void *arg) {
    bd_engine *engine = arg;
    pthread_setname_np(pthread_self(), "bd-sched");
    take_over(engine);
    engine->loops = true;
    while (!atomic_load(&engine->stopping))
        if (!turn(engine)) wait_for_work(engine);
    engine->loops = false;
    /* The running step ends by itself or by its deadline; its tokens still go out. */
    bd_error err;
    (void)bd_fail(&err, BD_E_SHUTDOWN, "engine", "the server is shutting down");
    while (engine->in_flight && !engine->stuck) {
        bd_step_buffer *finished = NULL;
        if (collect_finished(engine, &finished))
            bd_engine_deliver(engine, finished);
        else if (engine->in_flight)
            wait_for_work(engine);
        check_hang(engine, bd_now_us());
    }
    (void)bd_engine_reap(engine);
    close_engine(engine, &err);
    run_calls(engine);
    publish_stats(engine);
    hand_back(engine);
    return NULL;
}

/* ---- Calls from other threads ---- */

bd_status bd_engine_start(bd_engine *engine, bd_error *err) {
    BD_ASSERT(!engine->started);
    bd_status status = bd_executor_start(engine->executor, err);
    if (status != BD_OK) return status;
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error_number = pthread_create(&engine->thread, NULL, engine_main, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error_number != 0)
        return bd_fail_errno(err, BD_E_MEMORY, "bd-sched", error_number,
                             "the scheduler thread could not be started");
    engine->started = true;
    return BD_OK;
}

/* The loop has ended. */
static void run_late_calls(bd_engine *engine) {
    if (bd_engine_on_thread(engine)) return; /* a call that posts: the loop below comes to it */
    take_over(engine);
    for (bd_message *m = bd_mailbox_take(engine->inbox); m; m = bd_mailbox_take(engine->inbox)) {
        while (m) {
            bd_call *call = (bd_call *)m;
            m = m->next;
            call->run(call, engine);
        }
    }
    hand_back(engine);
}

void bd_engine_stop(bd_engine *engine) {
    if (atomic_load(&engine->stopped)) return;
    atomic_store(&engine->stopping, true);
    bd_mailbox_wake(engine->inbox);
    if (engine->started) pthread_join(engine->thread, NULL);
    engine->started = false;
    bd_error err;
    (void)bd_fail(&err, BD_E_SHUTDOWN, "engine", "the server is shutting down");
    close_engine(engine, &err); /* only an engine that never started is still open */
    const uint64_t patience_us = 2000000;
    engine->stuck = !bd_executor_stop(engine->executor, patience_us);
    bd_status status;
    if (!engine->stuck && engine->in_flight && bd_executor_take(engine->executor, &status, &err)) {
        /* It came back after all; its sequences have ended, what they held is freed now. */
        bd_engine_collect(engine, engine->in_flight, BD_E_DEVICE, &err);
        bd_engine_deliver(engine, engine->in_flight);
        engine->in_flight = NULL;
    }
    publish_stats(engine);
    atomic_store(&engine->stopped, true);
    run_late_calls(engine);
}

void bd_engine_destroy(bd_engine *engine) {
    if (!engine) return;
    bd_engine_stop(engine);
    if (engine->stuck) return; /* the thread left behind still reads the step */
    BD_ASSERT(engine->over_count == 0);
    if (engine->detach) engine->detach(engine->options.cache);
    engine_free(engine);
}

void bd_engine_post(bd_engine *engine, bd_call *call) {
    /* Unbounded mailbox: never full. */
    bd_status status = bd_mailbox_post(engine->inbox, &call->message);
    BD_ASSERT(status == BD_OK);
    if (atomic_load(&engine->stopped)) run_late_calls(engine);
}

void bd_engine_post_quietly(bd_engine *engine, bd_call *call) {
    bd_status status = bd_mailbox_post_quietly(engine->inbox, &call->message);
    BD_ASSERT(status == BD_OK);
    if (atomic_load(&engine->stopped)) run_late_calls(engine);
}

void bd_engine_wake(bd_engine *engine) {
    bd_mailbox_wake(engine->inbox);
}

/* With the lock: true when bd-sched has to be woken all the same. */
static bool help(bd_engine *engine) {
    if (!engine->loops || atomic_load(&engine->stopping)) return true;
    engine->helped = true;
    bool more = true;
    for (uint32_t i = 0; more && i < HELP_TURNS_MAX; i++)
        more = turn(engine);
    engine->helped = false;
    return more || next_wake_us(engine, bd_now_us()) < engine->sleep_until_us;
}

void bd_engine_help(bd_engine *engine) {
    bool wake = true;
    if (!bd_engine_on_thread(engine) && pthread_mutex_trylock(&engine->lock) == 0) {
        atomic_store(&engine->owner, my_mark());
        wake = help(engine);
        hand_back(engine);
    }
    if (wake) bd_engine_wake(engine);
}

bool bd_engine_on_thread(const bd_engine *engine) {
    return atomic_load(&engine->owner) == my_mark();
}

bool bd_engine_lost(const bd_engine *engine) {
    return atomic_load(&engine->lost);
}

void bd_engine_stats_get(const bd_engine *engine, bd_engine_stats *out) {
    *out = (bd_engine_stats){
        .running = atomic_load_explicit(&engine->stat_running, memory_order_relaxed),
        .waiting = atomic_load_explicit(&engine->stat_waiting, memory_order_relaxed),
        .kv_blocks_used = atomic_load_explicit(&engine->stat_kv_used, memory_order_relaxed),
        .kv_blocks_total = bd_kv_total(engine->kv),
        .steps = atomic_load_explicit(&engine->stat_steps, memory_order_relaxed),
        .prompt_tokens = atomic_load_explicit(&engine->stat_prompt, memory_order_relaxed),
        .generated_tokens = atomic_load_explicit(&engine->stat_generated, memory_order_relaxed),
        .preemptions = atomic_load_explicit(&engine->stat_preemptions, memory_order_relaxed),
        .prefix_query_tokens =
            atomic_load_explicit(&engine->stat_prefix_queries, memory_order_relaxed),
        .prefix_hit_tokens = atomic_load_explicit(&engine->stat_prefix_hits, memory_order_relaxed),
    };
}
