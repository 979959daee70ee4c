/* serve.c - the server's parts in the order of their lives:
 *
 *   http server (answers 503 model_loading) > model > loader > cache > router > engine > attach >
 * signal > drain > reverse order
 *
 * Owner of everything here: the main thread. */
#include "serve.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "bitdelta/http/server.h"
#include "bitdelta/tokenizer/chat_template.h"

#define METRIC_SERIES_MAX     20000u
#define CUDA_STEP_DEADLINE_US 30000000u
#define VARIANTS_PER_STEP_MAX 16u
#define SAME_SIGNAL_US        100000u
#define COLD_WAIT_US          2000000u

typedef struct server {
    const bd_serve_options *options;
    bd_metrics *metrics;
    bd_tenants *tenants; /* guarded by lock until it is there; ends after the signals' thread */
    bd_http_server *http;
    bd_tokenizer *tokenizer;
    bd_model *model;
    bd_loader *loader;
    bd_cache *cache;
    bd_router *router;
    pthread_mutex_t lock;
    bd_engine *engine;   /* guarded by lock: loader and http threads look at it */
    bd_router *changing; /* guarded by lock: the router while it takes changes; signals' thread */
    pthread_mutex_t renew_lock;
    bd_http_server *renewing; /* guarded by renew_lock: http while its certificate may be renewed */
    bool wrong_usage;         /* an option was refused that the command line may have given */
    uint32_t slots;           /* of the model */
    uint32_t rows_max;        /* of a step */
    char base_name[BD_VARIANT_NAME_MAX + 1];
    uint64_t progress_us; /* of the last line about loading */
    uint64_t load_started_us;
} server;

static void wake_engine(void *ctx) {
    server *s = ctx;
    pthread_mutex_lock(&s->lock);
    if (s->engine) bd_engine_wake(s->engine);
    pthread_mutex_unlock(&s->lock);
}

static bd_http_health health(void *ctx) {
    server *s = ctx;
    pthread_mutex_lock(&s->lock);
    const bool lost = s->engine && bd_engine_lost(s->engine);
    pthread_mutex_unlock(&s->lock);
    return lost ? BD_HTTP_DEAD : BD_HTTP_READY;
}

/* Returns the engine that was there before. */
static bd_engine *set_engine(server *s, bd_engine *engine) {
    pthread_mutex_lock(&s->lock);
    bd_engine *before = s->engine;
    s->engine = engine;
    pthread_mutex_unlock(&s->lock);
    return before;
}

static void load_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes) {
    server *s = ctx;
    const uint64_t now_us = bd_now_us();
    if (now_us - s->progress_us < 1000000u && done_bytes != total_bytes) return;
    s->progress_us = now_us;
    const double seconds = (double)(now_us - s->load_started_us) / 1e6 + 1e-9,
                 rate = (double)done_bytes / seconds;
    bd_log(BD_LOG_INFO, "model",
           "loading done_mb=%" PRIu64 " total_mb=%" PRIu64 " mb_per_s=%.0f eta_s=%.0f",
           done_bytes / 1000000u, total_bytes / 1000000u, rate / 1e6,
           (double)(total_bytes - done_bytes) / (rate + 1.0));
}

/* Directories below dir that hold a delta.json: how many slots could be wanted. */
static bd_status count_deltas(const char *dir, uint32_t *count, bd_error *err) {
    *count = 0;
    if (!dir) return BD_OK;
    DIR *handle = opendir(dir);
    if (!handle)
        return bd_fail_errno(err, BD_E_NOT_FOUND, dir, errno,
                             "deltas: the directory %s cannot be read", dir);
    const bd_status status = bd_delta_check_parent(dir, err);
    for (struct dirent *entry; status == BD_OK && (entry = readdir(handle));) {
        char path[4096];
        if (!bd_delta_is_entry(entry->d_name)) continue;
        const int length = snprintf(path, sizeof path, "%s/%s/delta.json", dir, entry->d_name);
        if (length > 0 && (size_t)length < sizeof path && bd_file_exists(path)) ++*count;
    }
    closedir(handle);
    return status;
}

/* Does the variant in `dir` say that its vocabulary is larger than the base's? One that cannot be
 * read is refused when it is added. */
static bool adds_vocabulary(const bd_model_config *base, const char *dir) {
    bd_model_config own;
    return bd_model_config_read_variant(dir, base, &own, NULL) == BD_OK && own.vocab > base->vocab;
}

/* Room for added vocabulary, if any variant needs it. */
static uint32_t extra_vocab(const bd_serve_options *o, const bd_model_config *base) {
    for (uint32_t i = 0; i < o->variants.count; i++)
        if (adds_vocabulary(base, o->variants.items[i].path)) return BD_EXTRA_VOCAB_MAX;
    DIR *handle = o->deltas_dir ? opendir(o->deltas_dir) : NULL;
    uint32_t extra = 0;
    if (!handle) return 0;
    for (struct dirent *entry; extra == 0 && (entry = readdir(handle));) {
        char path[4096];
        if (entry->d_name[0] == '.') continue;
        if (bd_path_join(path, sizeof path, o->deltas_dir, entry->d_name, NULL) != BD_OK) continue;
        if (adds_vocabulary(base, path)) extra = BD_EXTRA_VOCAB_MAX;
    }
    closedir(handle);
    return extra;
}

static void warn_alone(const bd_serve_options *o) {
    const char *dir = o->deltas_dir;
    bd_log(BD_LOG_WARN, "serve", "no variants%s%s%s: the base is served alone%s",
           dir ? " (no directory in " : "", dir ? dir : "", dir ? " has a delta.json)" : "",
           o->slots ? "" : "; any that come later share one slot (--slots)");
}

/* The model's options, with as many delta slots as there are variants or as fit. */
static bd_status model_options(server *s, const bd_backend_ops *ops, bd_model_options *out,
                               bd_error *err) {
    const bd_serve_options *o = s->options;
    uint32_t variants;
    bd_status status = count_deltas(o->deltas_dir, &variants, err);
    if (status != BD_OK) return status;
    variants += o->variants.count;
    if (variants == 0) warn_alone(o);
    s->rows_max = o->max_batch_tokens ? o->max_batch_tokens : ops->rows_default;
    *out = (bd_model_options){.dir = o->base_path,
                              .ops = ops,
                              .rank_count = o->tensor_parallel,
                              .thread_count = o->threads,
                              .kernels = (bd_kernels)o->kernels,
                              .dtype =
                                  o->dtype == BD_OPTION_DTYPE_FP16 ? BD_DTYPE_F16 : BD_DTYPE_OTHER,
                              .cpu_kernels = o->cpu_kernels,
                              .max_model_len = o->max_model_len,
                              .rows_max = s->rows_max,
                              .seqs_max = o->max_seqs,
                              .logits_rows_max = o->logits_rows_max,
                              .kv_block_tokens = 16,
                              .kv_tokens = o->kv_tokens,
                              .rope_tables_max = bd_model_rope_tables(variants, o->slots),
                              .delta_slots = o->slots   ? o->slots
                                             : variants ? variants
                                                        : 1,
                              .progress = load_progress,
                              .progress_ctx = s};
    bd_model_config config;
    bd_memory_plan plan;
    if ((status = bd_model_config_read(o->base_path, &config, err)) != BD_OK) return status;
    out->extra_vocab_max = extra_vocab(o, &config);
    if (o->slots || variants < 2) return BD_OK;
    while (out->delta_slots > 1 && bd_model_plan(out, &config, &plan, NULL) == BD_E_LIMIT)
        out->delta_slots--;
    return BD_OK;
}

static bd_status open_tokenizer(server *s, bd_error *err) {
    char path[4096];
    bd_status status =
        bd_path_join(path, sizeof path, s->options->base_path, "tokenizer.json", err);
    if (status != BD_OK) return status;
    if (!bd_file_exists(path)) {
        bd_log(BD_LOG_WARN, "model", "no tokenizer.json in %s: only prompts of token ids work",
               s->options->base_path);
        return BD_OK;
    }
    return bd_tokenizer_load(&s->tokenizer, path, err);
}

/* An option that is well formed and cannot be honoured: wrong usage, unless a file may be at fault.
 */
static BD_PRINTF(4, 5) bd_status
    refuse(server *s, bd_error *err, const char *option, const char *format, ...) {
    char why[256];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(why, sizeof why, format, args);
    va_end(args);
    s->wrong_usage = !s->options->config_path;
    return bd_fail(err, BD_E_UNSUPPORTED, option, "%s", why);
}

/* Known from config.json: no weight has been read. */
static bd_status check_ranks(server *s, const bd_backend_ops *ops, bd_error *err) {
    const bd_serve_options *o = s->options;
    bd_model_config config, rank;
    bd_error fault;
    if (o->tensor_parallel == 1) return BD_OK;
    if (!ops->comm)
        return refuse(s, err, "tensor_parallel",
                      "the %s backend runs the model on one rank, %u were asked for", ops->name,
                      o->tensor_parallel);
    const bd_status status = bd_model_config_read(o->base_path, &config, err);
    if (status != BD_OK) return status;
    if (bd_model_rank_config(&config, 0, o->tensor_parallel, &rank, &fault) == BD_OK) return BD_OK;
    return refuse(s, err, "tensor_parallel", "%s", fault.message);
}

static bd_status open_model(server *s, bd_error *err) {
    const bd_serve_options *o = s->options;
    const bd_backend_ops *ops;
    char why[256] = "";
    bd_status status = bd_backend_select((bd_backend_choice)o->backend, &ops, why, sizeof why, err);
    if (status != BD_OK) return status;
    bd_log(BD_LOG_INFO, "backend", why[0] ? "using name=%s (%s)" : "using name=%s", ops->name, why);
    const bool cuda = strcmp(ops->name, "cuda") == 0;
    if (cuda ? o->dtype == BD_OPTION_DTYPE_FP32
             : o->dtype == BD_OPTION_DTYPE_BF16 || o->dtype == BD_OPTION_DTYPE_FP16)
        return refuse(s, err, "dtype", "the %s backend computes in %s; leave dtype at auto",
                      ops->name, cuda ? "bf16 or fp16" : "float32");
    if ((status = open_tokenizer(s, err)) != BD_OK) return status;
    bd_model_options options;
    if ((status = check_ranks(s, ops, err)) != BD_OK) return status;
    if ((status = model_options(s, ops, &options, err)) != BD_OK) return status;
    s->load_started_us = bd_now_us();
    if ((status = bd_model_open(&options, &s->model, err)) != BD_OK) return status;
    s->slots = options.delta_slots;
    const bd_memory_plan *plan = bd_model_memory(s->model);
    /* As the lines of the plan before it, megabytes of each rank. */
    bd_log(BD_LOG_INFO, "model",
           "ready path=%s ranks=%u weights_mb=%" PRIu64 " workspace_mb=%" PRIu64 " kv_mb=%" PRIu64
           " logits_mb=%" PRIu64 " deltas_mb=%" PRIu64 " kv_tokens=%u slots=%u",
           o->base_path, o->tensor_parallel, plan->weights >> 20, plan->workspace >> 20,
           plan->kv >> 20, plan->logits >> 20, plan->deltas >> 20,
           bd_model_kv_block_count(s->model) * bd_model_kv_block_tokens(s->model),
           options.delta_slots);
    return BD_OK;
}

static bd_status open_cache(server *s, bd_error *err) {
    const bd_serve_options *o = s->options;
    const bd_loader_options loader = {.model = s->model,
                                      .io = (bd_io_choice)o->io,
                                      .read_threads = o->read_threads,
                                      .block_bytes = (uint32_t)o->read_block_bytes,
                                      .depth = o->read_depth,
                                      .loads_in_parallel = o->loads_in_parallel,
                                      .notify = wake_engine,
                                      .notify_ctx = s,
                                      .metrics = s->metrics};
    bd_status status = bd_loader_create(&loader, &s->loader, err);
    if (status != BD_OK) return status;
    bd_log(BD_LOG_INFO, "loader", "reads by io=%s %s", bd_loader_io_name(s->loader),
           bd_loader_io_reason(s->loader));
    const bd_cache_options cache = {.model = s->model,
                                    .loader = s->loader,
                                    .page_count = bd_model_page_count(s->model),
                                    .pinned_top = o->pinned_top,
                                    .loads_in_parallel = o->loads_in_parallel,
                                    .retry_after_us = 1000000,
                                    .host_bytes = o->host_bytes,
                                    .metrics = s->metrics};
    return bd_cache_create(&cache, &s->cache, err);
}

static uint32_t chunk_tokens(const server *s) {
    const uint32_t given = s->options->prefill_chunk_tokens;
    if (given == 0) return s->rows_max > 1 ? s->rows_max / 2 : 1;
    return given < s->rows_max ? given : s->rows_max;
}

static bd_status open_engine(server *s, bd_error *err) {
    const bd_serve_options *o = s->options;
    const bd_router_options router = {.cache = s->cache,
                                      .model = s->model,
                                      .base_name = s->base_name,
                                      .base_dir = o->base_path,
                                      .tokenizer = s->tokenizer,
                                      .queue_max = o->max_queue,
                                      .cold_wait_max_us = COLD_WAIT_US,
                                      .fair = {.prompt_cost = o->fair_input_weight,
                                               .output_cost = o->fair_output_weight,
                                               .load_bytes_per_unit = (double)o->fair_load_bytes},
                                      .residency_bound = o->fair_residency_bound,
                                      .slots = s->slots,
                                      .metrics = s->metrics};
    bd_status status = bd_router_create(&router, &s->router, err);
    if (status != BD_OK) return status;
    const bool cuda = strcmp(bd_model_ops(s->model)->name, "cuda") == 0;
    const bd_engine_options engine = {.model = s->model,
                                      .cache = s->cache,
                                      .model_name = s->base_name,
                                      .rows_max = s->rows_max,
                                      .prefill_chunk_tokens = chunk_tokens(s),
                                      .tile_rows = bd_model_ops(s->model)->tile_rows,
                                      .seqs_max = o->max_seqs,
                                      .variants_per_step_max = VARIANTS_PER_STEP_MAX,
                                      .logits_rows_max = o->logits_rows_max,
                                      .step_deadline_us = cuda ? CUDA_STEP_DEADLINE_US : 0,
                                      .decode_delta = o->decode_delta,
                                      .prefix_cache = true,
                                      .hooks = bd_router_hooks(s->router),
                                      .metrics = s->metrics};
    bd_engine *created;
    if ((status = bd_engine_create(&engine, &created, err)) != BD_OK) return status;
    bd_router_attach(s->router, created);
    set_engine(s, created);
    return BD_OK;
}

static void report_variant(void *ctx, const char *dir, const bd_error *err) {
    (void)ctx;
    (void)dir; /* the message names it */
    bd_log_error("router", "variant refused", err);
}

/* A faulty variant is logged and left out; the others serve on. */
static bd_status add_variants(server *s, bd_error *err) {
    const bd_serve_options *o = s->options;
    uint32_t added = 0;
    for (uint32_t i = 0; i < o->variants.count; i++) {
        const bd_variant_option *v = &o->variants.items[i];
        bd_error fault;
        if (bd_router_add_variant(s->router, v->name, v->path, v->pin, &fault) == BD_OK)
            added++;
        else
            report_variant(NULL, v->path, &fault);
    }
    if (o->deltas_dir) {
        uint32_t more = 0;
        bd_status status =
            bd_router_add_directory(s->router, o->deltas_dir, report_variant, NULL, &more, err);
        if (status != BD_OK) return status;
        added += more;
    }
    bd_log(BD_LOG_INFO, "router", "serving base=%s variants=%u", s->base_name, added);
    return BD_OK;
}

static void set_renewing(server *s, bd_http_server *http) {
    pthread_mutex_lock(&s->renew_lock);
    s->renewing = http;
    pthread_mutex_unlock(&s->renew_lock);
}

/* SIGHUP; on the thread of the signals. */
static void renew_certificate(server *s) {
    bd_error err;
    bd_error_clear(&err);
    pthread_mutex_lock(&s->renew_lock);
    if (s->renewing && bd_http_server_reload_tls(s->renewing, &err) != BD_OK)
        bd_log_error("http", "certificate not renewed, the one from before stays", &err);
    pthread_mutex_unlock(&s->renew_lock);
}

static bd_status open_http(server *s, bd_error *err) {
    const bd_serve_options *o = s->options;
    const bd_http_options options = {.listen = o->listen,
                                     .admin = o->admin && strcmp(o->admin, "none") != 0 ? o->admin
                                                                                        : NULL,
                                     .keys = (const char *const *)o->api_keys.items,
                                     .key_count = o->api_keys.count,
                                     .tenants = s->tenants,
                                     .metrics_public = o->metrics_public,
                                     .admin_key = o->admin_key,
                                     .runtime_loading = o->runtime_loading,
                                     .metrics = s->metrics,
                                     .shard_count = o->http_threads,
                                     .connections_max = o->max_connections,
                                     .body_bytes_max = o->max_body_bytes,
                                     .upload_bytes_max = o->max_upload_bytes,
                                     .stream_bytes_max = o->max_stream_bytes,
                                     .response_bytes_max = o->max_response_bytes,
                                     .header_seconds = o->request_header_seconds,
                                     .body_seconds = o->request_body_seconds,
                                     .idle_seconds = o->idle_seconds,
                                     .comment_seconds = o->stream_comment_seconds,
                                     .cors_origin = o->cors_origin,
                                     .tls_cert = o->tls_cert,
                                     .tls_key = o->tls_key,
                                     .health = health,
                                     .chat_template = o->chat_template,
                                     .health_ctx = s};
    bd_status status = bd_http_server_create(&options, &s->http, err);
    if (status == BD_OK) set_renewing(s, s->http);
    return status == BD_OK ? bd_http_server_start(s->http, err) : status;
}

static bd_status base_name(server *s, bd_error *err) {
    const char *name = s->options->base_name;
    const char *path = s->options->base_path;
    char resolved[4096] = "";
    struct stat info;
    if (!realpath(path, resolved) || stat(resolved, &info) != 0)
        return bd_fail_errno(err, BD_E_NOT_FOUND, path, errno,
                             "the base model's directory cannot be opened");
    if (!S_ISDIR(info.st_mode))
        return bd_fail(err, BD_E_ARGUMENT, path, "%s is not a directory", path);
    /* The last part of the path, also of "." or "dir/". */
    if (!name) name = strrchr(resolved, '/') + 1;
    const size_t length = strlen(name);
    if (length == 0 || length > BD_VARIANT_NAME_MAX)
        return bd_fail(err, BD_E_ARGUMENT, "base_name", "a name has 1 to %d bytes",
                       BD_VARIANT_NAME_MAX);
    const char *fault = bd_variant_name_fault(name);
    if (fault)
        return bd_fail(err, BD_E_ARGUMENT, "base_name", "the base's name \"%.128s\" %s", name,
                       fault);
    memcpy(s->base_name, name, length + 1);
    return BD_OK;
}

static bd_status open_tenants(server *s, bd_error *err) {
    const bd_serve_options *o = s->options;
    if (!o->tenants_path) return BD_OK;
    if (o->api_keys.count > 0)
        return refuse(s, err, "tenants",
                      "tenants: the keys are those of the tenants, api_keys cannot be given too");
    if (o->runtime_loading && !o->admin_key)
        return refuse(s, err, "tenants",
                      "tenants: runtime_loading needs an admin_key, or each tenant could change "
                      "what all are served");
    bd_tenants *tenants;
    bd_status status = bd_tenants_open(o->tenants_path, &tenants, err);
    if (status != BD_OK) return status;
    pthread_mutex_lock(&s->lock);
    s->tenants = tenants;
    pthread_mutex_unlock(&s->lock);
    return BD_OK;
}

/* A template for all models is one that the server cannot do without; found out before the weights
 * are read. */
static bd_status check_chat_template(const bd_serve_options *o, bd_error *err) {
    if (!o->chat_template) return BD_OK;
    const bd_chat_sources sources = {.dir = o->base_path, .override_path = o->chat_template};
    bd_chat *chat;
    bd_status status = bd_chat_load(&chat, &sources, err);
    if (status != BD_OK) return status;
    status = chat->fault.status;
    if (status != BD_OK && err) *err = chat->fault;
    bd_chat_destroy(chat);
    return status;
}

/* What changes a model's numbers beside its files. Threads do not. */
static bd_status attach_http(server *s, bd_error *err) {
    static const char *const dtypes[] = {"auto", "bf16", "fp16", "fp32"};
    const bd_serve_options *o = s->options;
    char numerics[256];
    (void)snprintf(numerics, sizeof numerics,
                   "%s dtype=%s kernels=%u cpu=%.64s decode_delta=%d ranks=%u",
                   bd_model_ops(s->model)->name, dtypes[o->dtype], o->kernels, o->cpu_kernels,
                   o->decode_delta, o->tensor_parallel);
    return bd_http_server_attach(s->http, s->router, bd_model_fingerprint(s->model), numerics, err);
}

static void set_changing(server *s, bd_router *router) {
    pthread_mutex_lock(&s->lock);
    s->changing = router;
    pthread_mutex_unlock(&s->lock);
}

/* From here on variants may come and go; those wanted at once are on their way before traffic. */
static bd_status start_changes(server *s, bd_error *err) {
    const bd_string_list *prefetch = &s->options->prefetch;
    bd_status status = bd_router_start(s->router, err);
    if (status != BD_OK) return status;
    bd_router_prefetch(s->router, (const char *const *)prefetch->items, prefetch->count);
    set_changing(s, s->router);
    return BD_OK;
}

static void rescan_done(bd_change *change) {
    bd_change_clear(change);
    free(change);
}

/* SIGHUP; on the thread of the signals. The outcome is in the log. */
static void reload_tenants(server *s) {
    bd_tenants_change change;
    bd_error fault;
    pthread_mutex_lock(&s->lock);
    bd_tenants *tenants = s->tenants;
    pthread_mutex_unlock(&s->lock);
    bd_status status = tenants ? bd_tenants_reload(tenants, &change, &fault) : BD_OK;
    (void)status; /* logged */
}

static void rescan(server *s) {
    bd_change *change = calloc(1, sizeof *change);
    bool posted = false;
    pthread_mutex_lock(&s->lock);
    if (change && s->changing) {
        *change = (bd_change){.kind = BD_CHANGE_RESCAN, .done = rescan_done};
        bd_router_change(s->changing, change);
        posted = true;
    }
    pthread_mutex_unlock(&s->lock);
    if (posted) return;
    bd_log(BD_LOG_WARN, "serve", "signal=SIGHUP ignored: %s",
           change ? "the server does not serve yet, or no more" : "out of memory");
    free(change);
}

static bd_status open_all(server *s, bd_error *err) {
    bd_status status;
    s->metrics = bd_metrics_create(METRIC_SERIES_MAX);
    if (!s->metrics) return bd_fail(err, BD_E_MEMORY, "metrics", "out of memory");
    if ((status = open_tenants(s, err)) != BD_OK) return status;
    if ((status = base_name(s, err)) != BD_OK) return status;
    if ((status = check_chat_template(s->options, err)) != BD_OK) return status;
    if ((status = open_http(s, err)) != BD_OK) return status;
    if ((status = open_model(s, err)) != BD_OK) return status;
    if ((status = open_cache(s, err)) != BD_OK) return status;
    if ((status = open_engine(s, err)) != BD_OK) return status;
    if ((status = add_variants(s, err)) != BD_OK) return status;
    if ((status = bd_engine_start(s->engine, err)) != BD_OK) return status;
    if ((status = start_changes(s, err)) != BD_OK) return status;
    return attach_http(s, err);
}

static void close_all(server *s) {
    set_changing(s, NULL);
    set_renewing(s, NULL);
    if (s->engine) bd_engine_stop(s->engine);
    if (s->http) bd_http_server_stop(s->http);
    bd_router_stop(s->router); /* orders still waiting are answered, to nobody */
    bd_http_server_destroy(s->http);
    bd_engine_destroy(
        set_engine(s, NULL)); /* loads still running have nobody to wake from here on */
    bd_router_destroy(s->router);
    bd_cache_destroy(s->cache);
    bd_loader_destroy(s->loader);
    bd_model_close(s->model);
    bd_tokenizer_destroy(s->tokenizer);
    bd_metrics_destroy(s->metrics);
}

/* Signals have a thread of their own, so that they also end a load that takes long. SIGTERM and
 * SIGINT: before the server is ready and after the first one, the process ends at once by that
 * signal; else the main thread drains. SIGHUP: the tenants are read and the variants looked at
 * again. */
typedef struct signals {
    server *server;
    sigset_t set;
    sem_t drain;
    _Atomic bool ready, over;
    int number; /* of the signal that drains; valid after drain */
    pthread_t thread;
} signals;

static void *signals_run(void *ctx) {
    signals *g = ctx;
    uint64_t first_us = 0;
    bool repeated = false;
    for (;;) {
        int number;
        if (sigwait(&g->set, &number) != 0) continue;
        if (atomic_load(&g->over)) return NULL;
        if (number == SIGHUP) {
            renew_certificate(g->server);
            reload_tenants(g->server);
            rescan(g->server);
            continue;
        }
        if (atomic_exchange(&g->ready, false)) {
            g->number = number;
            first_us = bd_now_us();
            sem_post(&g->drain);
            continue;
        }
        /* Supervisors that signal a process and then its group send one order twice. A third is
         * meant. */
        const bool same = first_us && !repeated && bd_now_us() - first_us < SAME_SIGNAL_US;
        repeated = true;
        if (same) continue;
        bd_log(BD_LOG_WARN, "serve", "signal=%d leaving at once", number);
        signal(number, SIG_DFL);
        pthread_sigmask(SIG_UNBLOCK, &g->set, NULL);
        raise(number);
    }
}

static bd_status signals_open(signals *g, bd_error *err) {
    sigemptyset(&g->set);
    sigaddset(&g->set, SIGTERM);
    sigaddset(&g->set, SIGINT);
    sigaddset(&g->set, SIGHUP);
    /* Every thread inherits the mask, so only sigwait above sees them. */
    pthread_sigmask(SIG_BLOCK, &g->set, NULL);
    signal(SIGPIPE, SIG_IGN);
    sem_init(&g->drain, 0, 0);
    const int error_number = pthread_create(&g->thread, NULL, signals_run, g);
    if (error_number)
        return bd_fail_errno(err, BD_E_MEMORY, "serve", error_number, "no thread for signals");
    return BD_OK;
}

static void signals_close(signals *g) {
    atomic_store(&g->over, true);
    pthread_kill(g->thread, SIGHUP);
    pthread_join(g->thread, NULL);
    sem_destroy(&g->drain);
}

bd_status bd_serve_run(const bd_serve_options *options, bool *wrong_usage, bd_error *err) {
    server s = {.options = options};
    signals g = {.server = &s};
    *wrong_usage = false;
    pthread_mutex_init(&s.lock, NULL);
    pthread_mutex_init(&s.renew_lock, NULL);
    bd_status status = signals_open(&g, err);
    if (status != BD_OK) {
        pthread_mutex_destroy(&s.lock);
        pthread_mutex_destroy(&s.renew_lock);
        return status;
    }
    if ((status = open_all(&s, err)) == BD_OK) {
        atomic_store(&g.ready, true);
        bd_log(BD_LOG_INFO, "serve", "ready address=%s admin=%s", bd_http_server_address(s.http),
               bd_http_server_admin_address(s.http));
        while (sem_wait(&g.drain) != 0)
            continue; /* interrupted */
        bd_log(BD_LOG_INFO, "serve", "draining signal=%d seconds=%u", g.number,
               options->drain_seconds);
        bd_http_server_drain(s.http, options->drain_seconds);
    }
    *wrong_usage = s.wrong_usage;
    close_all(&s);
    signals_close(&g);
    bd_tenants_destroy(s.tenants);
    pthread_mutex_destroy(&s.lock);
    pthread_mutex_destroy(&s.renew_lock);
    if (status == BD_OK) bd_log(BD_LOG_INFO, "serve", "stopped");
    return status;
}
