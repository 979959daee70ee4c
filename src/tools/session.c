/* session.c - see session.h. */
#include "session.h"

#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "bitdelta/base/log.h"
#include "bitdelta/model/overlay.h"
#include "lora.h"

enum { KV_BLOCK_TOKENS = 16, STEP_DEADLINE_S = 3600, PROGRESS_BYTES_MIN = 1 << 28 };

struct bd_session {
    bd_model *model;
    bd_delta delta; /* open when has_delta */
    bool has_delta;
    bd_overlay_plan plans[BD_COMM_RANKS_MAX]; /* of each rank */
    void **pages[BD_COMM_RANKS_MAX];
    bd_overlay *overlay; /* of a delta, all ranks' */
    bd_lora *lora;
    const bd_overlay *active; /* what steps use; NULL: the base */
    uint32_t rows_max, logits_rows_max, tokens_max, len;
    uint64_t step_id;
    uint32_t *kv_blocks;
    uint32_t *positions, *seq_of_row; /* [rows_max] */
    bd_logits_row *logits_rows;       /* [logits_rows_max] */
};

static bool has_own_config(const char *dir, bd_status *status, bd_error *err) {
    char path[1200];
    *status = bd_path_join(path, sizeof path, dir, "config.json", err);
    return *status == BD_OK && bd_file_exists(path);
}

bd_status bd_session_config(const bd_session_options *options, bd_model_config *out,
                            bd_error *err) {
    bd_model_config base;
    bd_status s = bd_model_config_read(options->base_dir, &base, err);
    if (s != BD_OK) return s;
    *out = base;
    if (options->finetuned_dir)
        return bd_model_config_read_variant(options->finetuned_dir, &base, out, err);
    if (options->delta_dir && has_own_config(options->delta_dir, &s, err)) {
        s = bd_model_config_read_variant(options->delta_dir, &base, out, err);
    }
    return s;
}

/* Verifies one chunk after the other, so that no unchecked byte reaches a page. */
static bd_status feed_chunks(const bd_delta *delta, uint32_t index, const bd_mapped_file *map,
                             bd_overlay_feed *feed, bd_error *err) {
    const bd_delta_file *file = &delta->files[index];
    if (map->bytes != file->bytes) {
        return bd_fail(err, BD_E_CORRUPT, file->name, "%s has %zu bytes, delta.json says %llu",
                       file->name, map->bytes, (unsigned long long)file->bytes);
    }
    if (file->chunk_bytes == 0) {
        const bd_status s = bd_delta_verify_shard(delta, index, err);
        return s != BD_OK ? s : bd_overlay_feed_bytes(feed, index, 0, map->data, map->bytes, err);
    }
    for (uint32_t chunk = 0; chunk < file->chunk_count; chunk++) {
        const uint64_t from = chunk * file->chunk_bytes;
        const uint64_t left = file->bytes - from,
                       n = left < file->chunk_bytes ? left : file->chunk_bytes;
        bd_status s = bd_delta_check_chunk(delta, index, chunk, map->data + from, (size_t)n, err);
        if (s == BD_OK) s = bd_overlay_feed_bytes(feed, index, from, map->data + from, n, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

static bd_status feed_file(const bd_delta *delta, uint32_t index, bd_overlay_feed *feed,
                           bd_error *err) {
    char path[1300];
    bd_mapped_file map;
    bd_status s = bd_path_join(path, sizeof path, delta->dir, delta->files[index].name, err);
    if (s == BD_OK) s = bd_file_map(path, &map, err);
    if (s != BD_OK) return s;
    s = feed_chunks(delta, index, &map, feed, err);
    bd_file_unmap(&map);
    return s;
}

/* One rank's part of the delta into its pages. */
static bd_status load_rank(bd_session *session, uint32_t r, bd_overlay **out, bd_error *err) {
    bd_overlay_feed *feed = NULL;
    bd_model *model = bd_model_rank(session->model, r);
    bd_overlay_plan *plan = &session->plans[r];
    bd_status s = bd_overlay_plan_create(model, &session->delta, plan, err);
    if (s != BD_OK) return s;
    session->pages[r] = calloc((size_t)plan->page_count + 1, sizeof *session->pages[r]);
    if (!session->pages[r]) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the page list");
    uint8_t *arena = bd_model_ops(model)->delta_arena(bd_model_backend(model));
    const uint64_t page_bytes = bd_model_page_bytes(model);
    for (uint32_t i = 0; i < plan->page_count; i++)
        session->pages[r][i] = arena + i * page_bytes;
    s = bd_overlay_create(model, &session->delta, plan, session->pages[r], out, err);
    if (s == BD_OK) s = bd_overlay_feed_create(model, plan, session->pages[r], &feed, err);
    for (uint32_t i = 0; s == BD_OK && i < session->delta.shard_count; i++)
        s = feed_file(&session->delta, i, feed, err);
    if (s == BD_OK && bd_overlay_feed_ready(feed) != plan->ready_count) {
        s = bd_fail(err, BD_E_FORMAT, session->delta.dir, "%s ends before its tensors do",
                    session->delta.dir);
    }
    bd_overlay_feed_destroy(feed);
    return s;
}

static bd_status load_delta(bd_session *session, bd_error *err) {
    bd_overlay *overlays[BD_COMM_RANKS_MAX] = {0};
    const uint32_t ranks = bd_model_rank_count(session->model);
    bd_status s = BD_OK;
    for (uint32_t r = 0; s == BD_OK && r < ranks; r++)
        s = load_rank(session, r, &overlays[r], err);
    if (s != BD_OK) {
        for (uint32_t r = 0; r < ranks; r++)
            bd_overlay_destroy(overlays[r]);
        return s;
    }
    bd_overlay_join(overlays, ranks);
    session->active = session->overlay = overlays[0];
    return BD_OK;
}

static void show_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes) {
    uint32_t *shown = ctx;
    const uint32_t tenth = (uint32_t)(done_bytes / (total_bytes / 10 + 1));
    if (total_bytes < PROGRESS_BYTES_MIN || tenth == *shown) return;
    *shown = tenth;
    bd_log(BD_LOG_INFO, "generate", "weights=%u%%", tenth * 10);
}

static bd_status open_model(bd_session *session, const bd_session_options *options,
                            const bd_backend_ops *ops, const bd_model_config *base, bd_error *err) {
    uint32_t tenth = 0;
    bd_model_config own;
    bd_status s = bd_session_config(options, &own, err);
    if (s != BD_OK) return s;
    const uint32_t extra = own.vocab > base->vocab ? own.vocab - base->vocab : 0;
    bd_model_config rank; /* the first has the most pages */
    s = bd_model_rank_config(base, 0, options->rank_count, &rank, err);
    if (s != BD_OK) return s;
    const uint64_t page_bytes = bd_overlay_page_bytes(&rank, ops);
    uint64_t pages = 0;
    if (session->has_delta) pages = bd_overlay_pages_of(&rank, ops, &session->delta);
    if (session->lora)
        pages = bd_lora_device_bytes(session->lora, options->rank_count) / page_bytes + 1;
    if (pages > UINT32_MAX)
        return bd_fail(err, BD_E_LIMIT, options->lora_dir, "the adapter is too large");
    const bd_model_options model_options = {
        .dir = options->finetuned_dir ? options->finetuned_dir : options->base_dir,
        .ops = ops,
        .device_index = options->device_index,
        .rank_count = options->rank_count,
        .thread_count = options->thread_count,
        .dtype = options->dtype,
        .kernels = options->kernels,
        .no_recording = true, /* one sequence of a few tokens */
        .max_model_len = options->tokens_max,
        .rows_max = session->rows_max,
        .seqs_max = 1,
        .logits_rows_max = session->logits_rows_max,
        .kv_block_tokens = KV_BLOCK_TOKENS,
        .kv_tokens = options->tokens_max,
        .rope_tables_max = 2,
        .delta_pages = (uint32_t)pages,
        .lora_rank_max = session->lora ? bd_lora_rank(session->lora) : 0,
        .extra_vocab_max = options->finetuned_dir       ? 0
                           : extra < BD_EXTRA_VOCAB_MAX ? extra
                                                        : BD_EXTRA_VOCAB_MAX,
        .progress = show_progress,
        .progress_ctx = &tenth,
    };
    return bd_model_open(&model_options, &session->model, err);
}

static bd_status make_tables(bd_session *session, bd_error *err) {
    const uint32_t blocks = session->tokens_max / KV_BLOCK_TOKENS + 1;
    session->kv_blocks = calloc(blocks, sizeof *session->kv_blocks);
    session->positions = calloc(session->rows_max, sizeof *session->positions);
    session->seq_of_row = calloc(session->rows_max, sizeof *session->seq_of_row);
    session->logits_rows = calloc(session->logits_rows_max, sizeof *session->logits_rows);
    if (!session->kv_blocks || !session->positions || !session->seq_of_row ||
        !session->logits_rows) {
        return bd_fail(err, BD_E_MEMORY, NULL, "no memory for a session");
    }
    for (uint32_t i = 0; i < blocks; i++)
        session->kv_blocks[i] = i;
    return BD_OK;
}

bd_status bd_session_open(const bd_session_options *options, bd_session **out, bd_error *err) {
    char why[256] = "";
    const bd_backend_ops *ops;
    bd_model_config base;
    *out = NULL;
    bd_session *session = calloc(1, sizeof *session);
    if (!session) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for a session");
    session->rows_max = options->rows_max;
    session->logits_rows_max = options->logits_rows_max;
    session->tokens_max = options->tokens_max;
    bd_status s = bd_backend_select(options->backend, &ops, why, sizeof why, err);
    const bool cuda = s == BD_OK && strcmp(ops->name, "cuda") == 0;
    if (s == BD_OK && (cuda ? options->dtype == BD_DTYPE_F32
                            : options->dtype == BD_DTYPE_BF16 || options->dtype == BD_DTYPE_F16))
        s = bd_fail(err, BD_E_UNSUPPORTED, "dtype",
                    "the %s backend computes in %s; leave dtype at auto", ops->name,
                    cuda ? "bf16 or fp16" : "float32");
    if (s == BD_OK) s = bd_model_config_read(options->base_dir, &base, err);
    if (s == BD_OK) s = make_tables(session, err);
    if (s == BD_OK && options->delta_dir) {
        s = bd_delta_open(options->delta_dir, &session->delta, err);
        session->has_delta = s == BD_OK;
    }
    if (s == BD_OK && options->lora_dir)
        s = bd_lora_open(options->lora_dir, &base, &session->lora, err);
    if (s == BD_OK) s = open_model(session, options, ops, &base, err);
    if (s == BD_OK && session->has_delta) s = load_delta(session, err);
    if (s == BD_OK && session->lora)
        s = bd_lora_load(session->lora, session->model, &session->active, err);
    if (s != BD_OK) {
        bd_session_close(session);
        return s;
    }
    *out = session;
    return BD_OK;
}

void bd_session_close(bd_session *session) {
    if (!session) return;
    bd_overlay_destroy(session->overlay);
    for (uint32_t r = 0; r < BD_COMM_RANKS_MAX; r++) {
        bd_overlay_plan_destroy(&session->plans[r]);
        free(session->pages[r]);
    }
    if (session->has_delta) bd_delta_close(&session->delta);
    bd_lora_close(session->lora);
    bd_model_close(session->model);
    free(session->kv_blocks);
    free(session->positions);
    free(session->seq_of_row);
    free(session->logits_rows);
    free(session);
}

bd_model *bd_session_model(bd_session *session) {
    return session->model;
}
void bd_session_reset(bd_session *session) {
    session->len = 0;
}

bd_status bd_session_feed(bd_session *session, const int32_t *ids, uint32_t count,
                          uint32_t logits_count, const int32_t *targets,
                          const bd_sampling *sampling, bd_token_result *results, bd_error *err) {
    BD_ASSERT(count > 0 && count <= session->rows_max && logits_count <= count);
    BD_ASSERT(logits_count <= session->logits_rows_max &&
              count <= session->tokens_max - session->len);
    for (uint32_t i = 0; i < count; i++)
        session->positions[i] = session->len + i;
    for (uint32_t i = 0; i < logits_count; i++) {
        session->logits_rows[i] =
            (bd_logits_row){.row = count - logits_count + i, .target = targets ? targets[i] : -1};
    }
    const bd_seq seq = {
        .row_count = count,
        .kv_before_tokens = session->len,
        .kv_blocks = session->kv_blocks,
        .sampling = *sampling,
    };
    const bd_segment segment = {.overlay = session->active ? 0 : -1, .row_count = count};
    const bd_step step = {
        .id = ++session->step_id,
        .row_count = count,
        .seq_count = 1,
        .segment_count = 1,
        .overlay_count = session->active ? 1 : 0,
        .logits_row_count = logits_count,
        .tokens = ids,
        .positions = session->positions,
        .seq_of_row = session->seq_of_row,
        .seqs = &seq,
        .segments = &segment,
        .overlays = &session->active,
        .logits_rows = session->logits_rows,
    };
    bd_status s = bd_model_forward(session->model, &step, NULL, NULL, err);
    if (s != BD_OK) return s;
    const uint64_t deadline_us = bd_now_us() + (uint64_t)STEP_DEADLINE_S * 1000000u;
    s = bd_model_wait(session->model, &step, deadline_us, results, err);
    if (s != BD_OK) return s;
    session->len += count;
    for (uint32_t i = 0; i < logits_count; i++) {
        if (results[i].fault) return bd_fail(err, BD_E_DEVICE, "logits", "a logit is not a number");
    }
    return BD_OK;
}
