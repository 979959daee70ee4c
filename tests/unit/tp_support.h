/* tp_support.h - a delta in the pages of every rank of a split model. */
#ifndef BITDELTA_TESTS_TP_SUPPORT_H
#define BITDELTA_TESTS_TP_SUPPORT_H

#include "model_support.h"

typedef struct tp_variant {
    bd_delta delta;
    bd_overlay_plan plans[BD_COMM_RANKS_MAX];
    void **pages[BD_COMM_RANKS_MAX];
    bd_overlay *overlay; /* all ranks' */
} tp_variant;

static inline void tp_feed_files(bd_model *model, const bd_delta *delta,
                                 const bd_overlay_plan *plan, void *const *pages) {
    bd_error err = {0};
    bd_overlay_feed *feed;
    MS_OK(bd_overlay_feed_create(model, plan, pages, &feed, &err), err);
    for (uint32_t f = 0; f < delta->shard_count; f++) {
        char path[1300];
        bd_mapped_file map;
        MS_OK(bd_path_join(path, sizeof path, delta->dir, delta->files[f].name, &err), err);
        MS_OK(bd_file_map(path, &map, &err), err);
        MS_OK(bd_overlay_feed_bytes(feed, f, 0, map.data, map.bytes, &err), err);
        bd_file_unmap(&map);
    }
    assert_int_equal(bd_overlay_feed_ready(feed), plan->ready_count);
    bd_overlay_feed_destroy(feed);
}

/* Into the pages from `first_page` on; returns how many they are. */
static inline uint32_t tp_variant_open(bd_model *model, const char *dir, uint32_t first_page,
                                       tp_variant *v) {
    bd_error err = {0};
    bd_overlay *overlays[BD_COMM_RANKS_MAX];
    const uint64_t page_bytes = bd_model_page_bytes(model);
    const uint32_t ranks = bd_model_rank_count(model);
    memset(v, 0, sizeof *v);
    MS_OK(bd_delta_open(dir, &v->delta, &err), err);
    for (uint32_t r = 0; r < ranks; r++) {
        bd_model *rank = bd_model_rank(model, r);
        bd_overlay_plan *plan = &v->plans[r];
        MS_OK(bd_overlay_plan_create(rank, &v->delta, plan, &err), err);
        assert_true(plan->page_count <= bd_overlay_pages_for(model, &v->delta));
        assert_true(first_page + plan->page_count <= bd_model_page_count(model));
        v->pages[r] = calloc(plan->page_count, sizeof *v->pages[r]);
        assert_non_null(v->pages[r]);
        uint8_t *arena = bd_model_ops(rank)->delta_arena(bd_model_backend(rank));
        for (uint32_t i = 0; i < plan->page_count; i++)
            v->pages[r][i] = arena + (first_page + i) * page_bytes;
        MS_OK(bd_overlay_create(rank, &v->delta, plan, v->pages[r], &overlays[r], &err), err);
        tp_feed_files(rank, &v->delta, plan, v->pages[r]);
    }
    bd_overlay_join(overlays, ranks);
    v->overlay = overlays[0];
    return bd_overlay_pages_for(model, &v->delta);
}

static inline void tp_variant_close(tp_variant *v) {
    bd_overlay_destroy(v->overlay);
    for (uint32_t r = 0; r < BD_COMM_RANKS_MAX; r++) {
        bd_overlay_plan_destroy(&v->plans[r]);
        free(v->pages[r]);
    }
    bd_delta_close(&v->delta);
}

/* The demo's base with little room, for tests of loads. */
static inline bd_model_options tp_demo_options(const bd_backend_ops *ops, uint32_t ranks,
                                               uint32_t slots) {
    return (bd_model_options){.dir = "demo/zen-mini",
                              .ops = ops,
                              .rank_count = ranks,
                              .thread_count = ranks,
                              .rows_max = 16,
                              .seqs_max = 4,
                              .logits_rows_max = 4,
                              .kv_block_tokens = 16,
                              .kv_tokens = 256,
                              .rope_tables_max = 1,
                              .max_model_len = 128,
                              .delta_slots = slots};
}

#endif
