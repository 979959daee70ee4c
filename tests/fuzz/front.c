/* front.c - see front.h. It lives to the end of the process. */
#include "front.h"

#include "bitdelta/base/log.h"
#include "bitdelta/loader/loader.h"
#include "bitdelta/model/model.h"

typedef struct front {
    bd_tokenizer *tokenizer;
    bd_model *model;
    bd_loader *loader;
    bd_cache *cache;
    bd_engine *engine;
    bd_router *router;
} front;

static bd_status open_model(front *f, bd_error *err) {
    const bd_backend_ops *ops;
    char why[256] = "";
    bd_status status = bd_tokenizer_load(&f->tokenizer, "demo/zen-mini/tokenizer.json", err);
    if (status == BD_OK) status = bd_backend_select(BD_BACKEND_CPU, &ops, why, sizeof why, err);
    if (status != BD_OK) return status;
    const bd_model_options options = {.dir = "demo/zen-mini",
                                      .ops = ops,
                                      .rank_count = 1,
                                      .thread_count = 1,
                                      .rows_max = 16,
                                      .seqs_max = 4,
                                      .logits_rows_max = 4,
                                      .kv_block_tokens = 16,
                                      .kv_tokens = 2048,
                                      .rope_tables_max = 1,
                                      .delta_slots = 1};
    return bd_model_open(&options, &f->model, err);
}

static bd_status open_router(front *f, bd_error *err) {
    const bd_loader_options loader = {.model = f->model, .io = BD_IO_PREAD, .read_threads = 1};
    bd_status status = bd_loader_create(&loader, &f->loader, err);
    if (status != BD_OK) return status;
    const bd_cache_options cache = {.model = f->model,
                                    .loader = f->loader,
                                    .page_count = bd_model_page_count(f->model),
                                    .retry_after_us = 1000000};
    if ((status = bd_cache_create(&cache, &f->cache, err)) != BD_OK) return status;
    const bd_router_options router = {.cache = f->cache,
                                      .model = f->model,
                                      .base_name = "zen-mini",
                                      .base_dir = "demo/zen-mini",
                                      .tokenizer = f->tokenizer,
                                      .queue_max = 2048,
                                      .cold_wait_max_us = 1000000};
    return bd_router_create(&router, &f->router, err);
}

static bd_status open_engine(front *f, bd_error *err) {
    const bd_engine_options engine = {
        .model = f->model, .seqs_max = 8, .hooks = bd_router_hooks(f->router)};
    bd_status status = bd_engine_create(&engine, &f->engine, err);
    if (status != BD_OK) return status;
    bd_router_attach(f->router, f->engine);
    if ((status = bd_engine_start(f->engine, err)) != BD_OK) return status;
    return bd_router_start(f->router, err);
}

bd_router *fuzz_router(void) {
    static front kept;
    if (kept.router) return kept.router;
    bd_error err = {.message = ""};
    bd_log_level_set(BD_LOG_ERROR);
    bd_status status = open_model(&kept, &err);
    if (status == BD_OK) status = open_router(&kept, &err);
    if (status == BD_OK) status = open_engine(&kept, &err);
    if (status != BD_OK) bd_log_error("fuzz", "cannot start", &err);
    BD_ASSERT(status == BD_OK);
    return kept.router;
}
