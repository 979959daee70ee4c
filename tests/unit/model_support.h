/* model_support.h - what the tests of the model room share: reading goldens, and running many
 * sequences of many variants in one mixed batch, in prefill chunks of a given size, over scattered
 * KV blocks. */
#ifndef BITDELTA_TESTS_MODEL_SUPPORT_H
#define BITDELTA_TESTS_MODEL_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/model/overlay.h"

#define MS_NEW_MAX  64
#define MS_SEQS_MAX 40
#define MS_ROWS_MAX 2048
#define MS_TOP_ROWS 16

#define MS_OK(call, err)                                                                           \
    do {                                                                                           \
        if ((call) != BD_OK) fail_msg("%s: %s", #call, (err).message);                             \
    } while (0)

typedef struct ms_run { /* one sequence */
    const int32_t *prompt;
    uint32_t prompt_count, new_count; /* new_count >= 1 */
    const bd_overlay *overlay;        /* NULL: the base */
    bd_sampling sampling;
    const bd_logit_edit *edits;
    uint32_t edit_count;
    uint32_t top_rows; /* trailing prompt rows whose top tokens are wanted, at most MS_TOP_ROWS */
    /* Out: */
    int32_t ids[MS_NEW_MAX];
    bd_token_result results[MS_NEW_MAX], tops[MS_TOP_ROWS];
    float *logits; /* [new_count][logits width] where not NULL */
    /* Inside: */
    uint32_t kv_tokens, made;
    uint32_t *blocks;
} ms_run;

static inline cJSON *ms_json(const char *path) {
    bd_error err = {0};
    char *text = NULL;
    size_t bytes = 0;
    MS_OK(bd_file_read(path, 64 << 20, &text, &bytes, &err), err);
    cJSON *root = cJSON_ParseWithLength(text, bytes);
    free(text);
    assert_non_null(root);
    return root;
}

static inline const cJSON *ms_get(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!item) fail_msg("golden lacks %s", key);
    return item;
}

/* Numbers of an array; the caller frees. */
static inline double *ms_numbers(const cJSON *array, uint32_t *count) {
    const cJSON *item;
    *count = 0;
    double *out = calloc((size_t)cJSON_GetArraySize(array) + 1, sizeof *out);
    assert_non_null(out);
    cJSON_ArrayForEach(item, array) out[(*count)++] = item->valuedouble;
    return out;
}

static inline int32_t *ms_ids(const cJSON *array, uint32_t *count) {
    double *numbers = ms_numbers(array, count);
    int32_t *out = calloc((size_t)*count + 1, sizeof *out);
    assert_non_null(out);
    for (uint32_t i = 0; i < *count; i++)
        out[i] = (int32_t)numbers[i];
    free(numbers);
    return out;
}

static inline bd_model_options ms_options(const char *dir) {
    return (bd_model_options){
        .dir = dir,
        .ops = bd_backend_cpu_ops(),
        .rank_count = 1,
        .thread_count = 2,
        .rows_max = MS_ROWS_MAX,
        .seqs_max = MS_SEQS_MAX,
        .logits_rows_max = MS_SEQS_MAX * MS_TOP_ROWS,
        .kv_block_tokens = 8,
        .kv_tokens = 24576,
        .rope_tables_max = 4,
    };
}

/* Gives each sequence its own blocks, in an order that is neither ascending nor contiguous. */
static inline void ms_assign_blocks(const bd_model *model, ms_run *runs, uint32_t count) {
    const uint32_t tokens = bd_model_kv_block_tokens(model), total = bd_model_kv_block_count(model);
    uint32_t stride = 257, next = 0;
    while (total % stride == 0)
        stride += 2;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t blocks = (runs[i].prompt_count + runs[i].new_count + tokens - 1) / tokens;
        runs[i].kv_tokens = runs[i].made = 0;
        runs[i].blocks = calloc(blocks, sizeof *runs[i].blocks);
        assert_non_null(runs[i].blocks);
        for (uint32_t b = 0; b < blocks; b++) {
            assert_true(next < total);
            runs[i].blocks[b] = (uint32_t)((uint64_t)next++ * stride % total);
        }
    }
}

typedef struct ms_step { /* storage of one step */
    int32_t tokens[MS_ROWS_MAX];
    uint32_t positions[MS_ROWS_MAX], seq_of_row[MS_ROWS_MAX];
    bd_seq seqs[MS_SEQS_MAX];
    ms_run *run_of_seq[MS_SEQS_MAX];
    bd_segment segments[MS_SEQS_MAX];
    const bd_overlay *overlays[MS_SEQS_MAX];
    bd_logits_row logits_rows[MS_SEQS_MAX * MS_TOP_ROWS];
    bd_token_result *targets[MS_SEQS_MAX * MS_TOP_ROWS]; /* where a row's result goes */
    bd_token_result results[MS_SEQS_MAX * MS_TOP_ROWS];
    bd_step step;
} ms_step;

static inline void ms_add_logits_row(ms_step *s, uint32_t row, uint32_t seq, int32_t target,
                                     bd_token_result *out) {
    const uint32_t at = s->step.logits_row_count++;
    s->logits_rows[at] =
        (bd_logits_row){.row = row, .seq = seq, .target = target, .top_count = BD_TOP_MAX};
    s->targets[at] = out;
}

static inline void ms_add_segment(ms_step *s, const bd_overlay *overlay, uint32_t first,
                                  uint32_t rows) {
    if (s->step.segment_count > 0) {
        bd_segment *last = &s->segments[s->step.segment_count - 1];
        const bd_overlay *of_last = last->overlay < 0 ? NULL : s->overlays[last->overlay];
        if (of_last == overlay) {
            last->row_count += rows;
            return;
        }
    }
    bd_segment *segment = &s->segments[s->step.segment_count++];
    *segment = (bd_segment){.overlay = -1, .first_row = first, .row_count = rows};
    if (!overlay) return;
    segment->overlay = (int32_t)s->step.overlay_count;
    s->overlays[s->step.overlay_count++] = overlay;
}

/* The next rows of a run: a chunk of its prompt, or its last token. */
static inline void ms_add_run(ms_step *s, ms_run *run, uint32_t chunk) {
    const bool prefill = run->kv_tokens < run->prompt_count;
    const uint32_t left = prefill ? run->prompt_count - run->kv_tokens : 1,
                   rows = left < chunk ? left : chunk;
    const uint32_t seq = s->step.seq_count++, first = s->step.row_count;
    assert_true(first + rows <= MS_ROWS_MAX && seq < MS_SEQS_MAX);
    for (uint32_t i = 0; i < rows; i++) {
        const uint32_t position = run->kv_tokens + i;
        s->tokens[first + i] = prefill ? run->prompt[position] : run->ids[run->made - 1];
        s->positions[first + i] = position;
        s->seq_of_row[first + i] = seq;
        const uint32_t from_end = run->prompt_count - 1 - position; /* wraps after the prompt */
        if (prefill && from_end < run->top_rows) {
            ms_add_logits_row(s, first + i, seq, from_end == 0 ? -1 : 0,
                              &run->tops[run->top_rows - 1 - from_end]);
        }
    }
    s->seqs[seq] = (bd_seq){
        .first_row = first,
        .row_count = rows,
        .kv_before_tokens = run->kv_tokens,
        .kv_blocks = run->blocks,
        .sampling = run->sampling,
        .edit_count = run->edit_count,
        .edits = run->edits,
    };
    s->run_of_seq[seq] = run;
    s->step.row_count += rows;
    run->kv_tokens += rows;
    const bool last_of_prompt = run->kv_tokens == run->prompt_count;
    if (!prefill || (last_of_prompt && run->top_rows == 0)) {
        ms_add_logits_row(s, first + rows - 1, seq, -1, &run->results[run->made]);
    }
    ms_add_segment(s, run->overlay, first, rows);
}

/* Runs one step over every unfinished run; false when there was none. */
static inline bool ms_step_once(bd_model *model, ms_step *s, ms_run *runs, uint32_t count,
                                uint32_t chunk, uint64_t id) {
    bd_error err = {0};
    const uint32_t vocab = bd_model_logits_width(model);
    memset(&s->step, 0, sizeof s->step);
    s->step = (bd_step){
        .id = id,
        .tokens = s->tokens,
        .positions = s->positions,
        .seq_of_row = s->seq_of_row,
        .seqs = s->seqs,
        .segments = s->segments,
        .overlays = s->overlays,
        .logits_rows = s->logits_rows,
    };
    for (uint32_t i = 0; i < count; i++) {
        if (runs[i].made < runs[i].new_count) ms_add_run(s, &runs[i], chunk);
    }
    if (s->step.row_count == 0) return false;
    MS_OK(bd_model_forward(model, &s->step, NULL, NULL, &err), err);
    MS_OK(bd_model_wait(model, &s->step, UINT64_MAX, s->results, &err), err);
    for (uint32_t i = 0; i < s->step.logits_row_count; i++) {
        ms_run *run = s->run_of_seq[s->logits_rows[i].seq];
        assert_int_equal(s->results[i].fault, 0);
        *s->targets[i] = s->results[i];
        if (s->logits_rows[i].target >= 0) continue;
        if (run->logits) {
            float *row = run->logits + (size_t)run->made * vocab;
            MS_OK(bd_model_logits_get(model, i, row, &err), err);
        }
        run->results[run->made] = s->results[i];
        run->ids[run->made++] = s->results[i].id;
    }
    return true;
}

/* Runs all to their end, side by side. Runs must be ordered so that those of one overlay are
 * neighbours. */
static inline void ms_run_all(bd_model *model, ms_run *runs, uint32_t count, uint32_t chunk) {
    ms_step *s = calloc(1, sizeof *s);
    assert_non_null(s);
    ms_assign_blocks(model, runs, count);
    for (uint64_t id = 1; ms_step_once(model, s, runs, count, chunk, id); id++) {
    }
    for (uint32_t i = 0; i < count; i++)
        free(runs[i].blocks);
    free(s);
}

static inline double ms_relative_l2(const float *got, const double *want, uint32_t count) {
    double diff = 0, norm = 0;
    for (uint32_t i = 0; i < count; i++) {
        diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(diff / norm);
}

/* ---- A delta in the model's pages ---- */

typedef struct ms_variant {
    bd_delta delta;
    bd_overlay_plan plan;
    void **pages;
    bd_overlay *overlay;
} ms_variant;

/* Feeds the shard in pieces of `step_bytes` (0: at once). */
static inline bd_status ms_feed(bd_model *model, ms_variant *v, uint64_t step_bytes,
                                bd_error *err) {
    char path[1300];
    bd_mapped_file map;
    bd_overlay_feed *feed;
    MS_OK(bd_path_join(path, sizeof path, v->delta.dir, v->delta.files[0].name, err), *err);
    MS_OK(bd_file_map(path, &map, err), *err);
    MS_OK(bd_overlay_feed_create(model, &v->plan, v->pages, &feed, err), *err);
    bd_status s = BD_OK;
    uint32_t ready = bd_overlay_feed_ready(feed);
    for (uint64_t from = 0; s == BD_OK && from < map.bytes;) {
        const uint64_t left = map.bytes - from,
                       n = step_bytes && step_bytes < left ? step_bytes : left;
        s = bd_overlay_feed_bytes(feed, 0, from, map.data + from, n, err);
        assert_true(bd_overlay_feed_ready(feed) >= ready);
        ready = bd_overlay_feed_ready(feed);
        from += n;
    }
    if (s == BD_OK) assert_int_equal(ready, v->plan.ready_count);
    bd_overlay_feed_destroy(feed);
    bd_file_unmap(&map);
    return s;
}

/* Puts a delta into the arena from page `first_page` on. Returns the pages it took. */
static inline uint32_t ms_variant_open(bd_model *model, const char *dir, uint32_t first_page,
                                       uint64_t step_bytes, ms_variant *v) {
    bd_error err = {0};
    const bd_backend_ops *ops = bd_model_ops(model);
    const uint64_t page_bytes = bd_overlay_page_bytes(bd_model_config_of(model), ops);
    MS_OK(bd_delta_open(dir, &v->delta, &err), err);
    MS_OK(bd_overlay_plan_create(model, &v->delta, &v->plan, &err), err);
    assert_true(first_page + v->plan.page_count <= bd_model_page_count(model));
    v->pages = calloc(v->plan.page_count, sizeof *v->pages);
    assert_non_null(v->pages);
    uint8_t *arena = ops->delta_arena(bd_model_backend(model));
    for (uint32_t i = 0; i < v->plan.page_count;
         i++) { /* backwards: pages need not be neighbours */
        v->pages[i] = arena + (first_page + v->plan.page_count - 1 - i) * page_bytes;
    }
    MS_OK(bd_overlay_create(model, &v->delta, &v->plan, v->pages, &v->overlay, &err), err);
    MS_OK(ms_feed(model, v, step_bytes, &err), err);
    return v->plan.page_count;
}

static inline void ms_variant_close(ms_variant *v) {
    bd_overlay_destroy(v->overlay);
    bd_overlay_plan_destroy(&v->plan);
    bd_delta_close(&v->delta);
    free(v->pages);
}

#endif
