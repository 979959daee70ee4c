/* series.c - what the router counts and times per served name. Made with a name's first request, so
 * that ten thousand registered variants cost no series. bd-sched only. */
#include "internal.h"

static const double first_token_bounds[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08,
                                            0.1,   0.25,  0.5,  0.75, 1.0,  2.5,  5.0,
                                            7.5,   10.0,  20.0, 40.0, 80.0, 160.0};
static const double inter_token_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1,
                                            0.15,  0.2,    0.3,   0.4,  0.5,   0.75, 1.0,   2.5};
static const double request_bounds[] = {0.1,  0.3,  0.5,  0.8,  1.0,  1.5,   2.0,   2.5,  5.0,
                                        10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0};
static const double token_bounds[] = {1,   2,    5,    10,   20,    50,    100,   200,
                                      500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};

#define COUNT_OF(array) ((uint32_t)(sizeof(array) / sizeof((array)[0])))

void bd_series_prepare(bd_router_queue *queue) {
    bd_metrics *m = queue->router->options.metrics;
    bd_router_series *s = &queue->series;
    if (!m || s->ready) return;
    static const char *const reasons[BD_FINISHED_COUNT] = {"stop", "length", "abort", "error"};
    bd_label labels[2] = {{"model_name", queue->served.name}, {"finished_reason", ""}};
    s->first_token = bd_metrics_histogram(m, "vllm:time_to_first_token_seconds",
                                          "From arrival to the first token.", first_token_bounds,
                                          COUNT_OF(first_token_bounds), labels, 1);
    s->inter_token = bd_metrics_histogram(m, "vllm:inter_token_latency_seconds",
                                          "Between two tokens of a sequence.", inter_token_bounds,
                                          COUNT_OF(inter_token_bounds), labels, 1);
    s->end_to_end = bd_metrics_histogram(m, "vllm:e2e_request_latency_seconds",
                                         "From arrival to the end of the request.", request_bounds,
                                         COUNT_OF(request_bounds), labels, 1);
    s->queue_time = bd_metrics_histogram(m, "vllm:request_queue_time_seconds",
                                         "From arrival until the request runs.", request_bounds,
                                         COUNT_OF(request_bounds), labels, 1);
    s->prompt_size =
        bd_metrics_histogram(m, "vllm:request_prompt_tokens", "Prompt tokens of a request.",
                             token_bounds, COUNT_OF(token_bounds), labels, 1);
    s->output_size =
        bd_metrics_histogram(m, "vllm:request_generation_tokens", "Generated tokens of a request.",
                             token_bounds, COUNT_OF(token_bounds), labels, 1);
    s->prompt_tokens = bd_metrics_counter(m, "vllm:prompt_tokens_total",
                                          "Prompt tokens of finished requests.", labels, 1);
    s->output_tokens =
        bd_metrics_counter(m, "vllm:generation_tokens_total", "Generated tokens.", labels, 1);
    for (uint32_t i = 0; i < BD_FINISHED_COUNT; i++) {
        labels[1].value = reasons[i];
        s->finished[i] = bd_metrics_counter(m, "vllm:request_success_total",
                                            "Sequences by the reason of their end.", labels, 2);
    }
    s->ready = true;
}

static bd_result_kind result_of(const bd_job *job) {
    switch (job->internal.status) {
    case BD_OK:
        return BD_RESULT_OK;
    case BD_CANCELLED:
        return BD_RESULT_CANCELLED;
    case BD_E_VARIANT:
        return BD_RESULT_VARIANT;
    case BD_E_SHUTDOWN:
        return BD_RESULT_SHUTDOWN;
    case BD_E_DEVICE:
        return BD_RESULT_DEVICE;
    case BD_AGAIN:
    case BD_BUSY:
    case BD_E_ARGUMENT:
    case BD_E_NOT_FOUND:
    case BD_E_LIMIT:
    case BD_E_FORMAT:
    case BD_E_UNSUPPORTED:
    case BD_E_MISMATCH:
    case BD_E_CORRUPT:
    case BD_E_LENGTH:
    case BD_E_IO:
    case BD_E_MEMORY:
    case BD_E_INTERNAL:
        break;
    }
    return BD_RESULT_ERROR;
}

/* Looked up in the registry once. */
static bd_metric *result_metric(bd_router_queue *queue, bd_result_kind kind) {
    static const char *const names[BD_RESULT_COUNT] = {
        "ok", "cancelled", "variant_unavailable", "shutdown", "device", "error"};
    bd_metric **result = &queue->series.results[kind];
    const bd_label labels[2] = {{"variant", queue->served.name}, {"result", names[kind]}};
    if (!*result)
        *result = bd_metrics_counter(queue->router->options.metrics, "bitdelta_requests_total",
                                     "Requests by variant and result.", labels, 2);
    return *result;
}

void bd_series_job_over(const bd_job *job, uint64_t now_us) {
    bd_router_queue *queue = bd_queue_of(job->served);
    const bd_router_series *s = &queue->series;
    if (!s->ready) return;
    bd_metric_add(result_metric(queue, result_of(job)), 1.0);
    if (job->internal.status != BD_OK) return;
    double prompt_tokens = 0.0; /* each prompt once, however many choices it has */
    for (uint32_t i = 0; i < job->prompt_count; i++)
        prompt_tokens += job->prompts[i].count;
    bd_metric_observe(s->end_to_end, (double)(now_us - job->received_us) / 1e6);
    bd_metric_observe(s->prompt_size, prompt_tokens);
    bd_metric_observe(s->output_size, (double)job->internal.generated_tokens);
    bd_metric_add(s->prompt_tokens, prompt_tokens);
}
